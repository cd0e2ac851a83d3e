"""Under scan, while, cond and switch, and the gradients through them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from programs import kernels, saved

import tiledops

MODES = pytest.mark.parametrize("mode", ["reference", "simulate"])
SHAPE, BLOCK = (9, 130), (8, 128)
DEPTH = 3


def operands(*shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(0)
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)


@MODES
def test_a_scan_over_a_residual_stream(mode: str) -> None:
    """y <- a_i*x_i + y, layer by layer: dy is g all the way, so that da_i = sum g*x_i and dx_i = a_i*g."""
    a, x, y, g = operands((DEPTH,), (DEPTH, *SHAPE), SHAPE, SHAPE)

    @jax.jit
    def stream(a: Any, x: Any, y: Any) -> Any:
        return jax.lax.scan(lambda y, layer: (tiledops.axpy(*layer, y), None), y, (a, x))[0]

    with tiledops.use_config(mode=mode, block=BLOCK):
        out, pullback = jax.vjp(stream, a, x, y)
        da, dx, dy = pullback(jnp.asarray(g))
    expected = y
    for i in range(DEPTH):
        expected = oracle.axpy(a[i], x[i], expected)
        oracle.assert_within(da[i], *oracle.da(a[i], x[i], g))
        oracle.assert_same_bits(dx[i], oracle.dx(a[i], x[i], g))
    oracle.assert_same_bits(out, expected)
    oracle.assert_same_bits(dy, g)


def test_a_scan_traces_its_kernel_once() -> None:
    a, x, y = operands((DEPTH,), (DEPTH, *SHAPE), SHAPE)

    def loss(a: Any, x: Any, y: Any) -> Any:
        return jax.lax.scan(lambda y, layer: (tiledops.axpy(*layer, y), None), y, (a, x))[0].sum()

    with tiledops.use_config(mode="simulate"):
        traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(a, x, y)
    assert kernels(traced) == {"tiledops_axpy": 1, "tiledops_scale_and_dot": 1}


@MODES
def test_a_while_loop_with_a_traced_end(mode: str) -> None:
    a, x, y = operands((), SHAPE, SHAPE)

    @jax.jit
    def repeated(n: Any, y: Any) -> Any:
        body = lambda state: (state[0] + 1, tiledops.axpy(a, x, state[1]))  # noqa: E731
        return jax.lax.while_loop(lambda state: state[0] < n, body, (0, y))[1]

    expected = y
    with tiledops.use_config(mode=mode, block=BLOCK):
        for n in range(3):
            oracle.assert_same_bits(repeated(n, y), expected)
            expected = oracle.axpy(a, x, expected)


@MODES
def test_both_branches_of_a_cond(mode: str) -> None:
    a, x, y, g = operands((), SHAPE, SHAPE, SHAPE)

    @jax.jit
    def maybe(add: Any, a: Any, x: Any, y: Any) -> Any:
        return jax.lax.cond(add, tiledops.axpy, lambda a, x, y: y, a, x, y)

    with tiledops.use_config(mode=mode, block=BLOCK):
        for add in (True, False):
            out, pullback = jax.vjp(lambda *operands, add=add: maybe(add, *operands), a, x, y)
            da, dx, dy = pullback(jnp.asarray(g))
            oracle.assert_same_bits(out, oracle.axpy(a, x, y) if add else y)
            oracle.assert_same_bits(dx, oracle.dx(a, x, g) if add else np.zeros_like(x))
            oracle.assert_same_bits(dy, g)
            exact, tolerance = oracle.da(a, x, g)
            oracle.assert_within(da, add * exact, tolerance)


@MODES
def test_a_switch_between_configurations(mode: str) -> None:
    """Every branch is tiled its own way, and they agree in every bit."""
    a, x, y = operands((), SHAPE, SHAPE)
    ways: list[dict[str, Any]] = [{"block": (8, 128)}, {"block": (16, 256)}, {"schedule": "synchronous"}]
    branches = [functools.partial(tiledops.axpy, config=tiledops.PipelineConfig(**way)) for way in ways]
    with tiledops.use_config(mode=mode):
        chosen = jax.jit(lambda i: jax.lax.switch(i, branches, a, x, y))
        for i in range(len(branches)):
            oracle.assert_same_bits(chosen(i), oracle.axpy(a, x, y))


@MODES
def test_map_and_fori_loop(mode: str) -> None:
    a, x, y = operands((DEPTH,), (DEPTH, *SHAPE), SHAPE)
    with tiledops.use_config(mode=mode, block=BLOCK):
        mapped = jax.lax.map(lambda layer: tiledops.axpy(*layer, y), (a, x))
        looped = jax.lax.fori_loop(0, DEPTH, lambda i, y: tiledops.axpy(jnp.asarray(a)[i], jnp.asarray(x)[i], y), y)
    expected = y
    for i in range(DEPTH):
        oracle.assert_same_bits(mapped[i], oracle.axpy(a[i], x[i], y))
        expected = oracle.axpy(a[i], x[i], expected)
    oracle.assert_same_bits(looped, expected)


@MODES
def test_a_cond_under_vmap_runs_both_and_selects(mode: str) -> None:
    a, x, y = operands((), (2, *SHAPE), (2, *SHAPE))
    add = np.array([True, False])
    with tiledops.use_config(mode=mode, block=BLOCK):
        out = jax.vmap(lambda add, x, y: jax.lax.cond(add, lambda: tiledops.axpy(a, x, y), lambda: y))(add, x, y)
    oracle.assert_same_bits(out, np.where(add[:, None, None], oracle.axpy(a, x, y), y))


LOOPS: dict[str, Any] = {
    "a constant branch": lambda op: lambda a, x: jax.lax.scan(lambda y, _: (op(a, x, y), None), x, length=5)[0],
    "a constant gain": lambda op: lambda a, x: jax.lax.scan(lambda y, _: (op(a, jnp.sin(y), y), None), x, length=5)[0],
    "a fixed gain": lambda op: lambda a, x: jax.lax.scan(lambda y, _: (op(0.5, x, y), None), x, length=5)[0],
    "cond": lambda op: lambda a, x: jax.lax.cond(a > 0, lambda: op(a, jnp.sin(x), x), lambda: x),
    "cond, a fixed gain": lambda op: lambda a, x: jax.lax.cond(a > 0, lambda: op(0.5, x, x), lambda: x),
}


@pytest.mark.parametrize("mode", ["reference", "simulate", "tpu"])
@pytest.mark.parametrize("name", LOOPS)
def test_what_is_saved_across_a_loop_is_what_jnp_saves(name: str, mode: str) -> None:
    """What is the same in every step is saved once."""
    a, x = map(jnp.asarray, operands((), SHAPE))
    with tiledops.use_config(mode=mode):
        got = saved(LOOPS[name](tiledops.axpy), a, x)
    assert got == saved(LOOPS[name](lambda a, x, y: a * x + y), a, x)
