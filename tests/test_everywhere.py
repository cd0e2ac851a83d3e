"""Anywhere that jnp goes: JAX's transformations over the whole table of cases, in all three modes.

What is particular to one transformation is in a file of its own. Here each is a way round to the same four values, the
result and the three gradients, and the oracle does not change. In plain jnp every case goes every way. The simulator
and the TPU's compiler take each case once, each way with several of them, and each chip too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import oracle
import pytest
from cases import CASES, Case
from programs import differentiated, fresh

import tiledops
from tiledops import chips, compiled

Values = Any  # the result, and the gradients of the gain, the branch and the stream


def grad(a: Any, x: Any, y: Any, g: Any) -> Values:
    def loss(a: Any, x: Any, y: Any) -> Any:
        out = tiledops.axpy(a, x, y)
        return (out.astype(jnp.float32) * g.astype(jnp.float32)).sum(), out

    gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(a, x, y)
    return out, *gradients


def checkpoint(a: Any, x: Any, y: Any, g: Any) -> Values:
    op = jax.checkpoint(tiledops.axpy, policy=jax.checkpoint_policies.nothing_saveable)
    out, pullback = jax.vjp(op, a, x, y)
    return out, *pullback(g)


def linearize(a: Any, x: Any, y: Any, g: Any) -> Values:
    out, tangent = jax.linearize(tiledops.axpy, a, x, y)
    return out, *jax.linear_transpose(tangent, a, x, y)(g)


def twice(*operands: Any) -> Any:
    """A batch of two: the first is another call, and the second is looked at."""
    return tuple(jnp.stack([-value, value]) for value in operands)


def second(values: Any) -> Values:
    return tuple(value[1] for value in values)


def vmap_of_grad(*operands: Any) -> Values:
    return second(jax.vmap(differentiated)(*twice(*operands)))


def grad_of_vmap(a: Any, x: Any, y: Any, g: Any) -> Values:
    out, pullback = jax.vjp(jax.vmap(tiledops.axpy, out_axes=-1), *twice(a, x, y))
    return out[..., 1], *second(pullback(jnp.stack([-g, g], -1)))


def scan(*operands: Any) -> Values:
    return second(jax.lax.scan(lambda carry, each: (carry, differentiated(*each)), (), twice(*operands))[1])


def grad_of_scan(a: Any, x: Any, y: Any, g: Any) -> Values:
    """Of a loop that carries the stream and takes one step."""

    def loop(a: Any, x: Any, y: Any) -> Any:
        return jax.lax.scan(lambda y, each: (tiledops.axpy(*each, y), None), y, (a[None], x[None]))[0]

    out, pullback = jax.vjp(loop, a, x, y)
    return out, *pullback(g)


def while_loop(*operands: Any) -> Values:
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(differentiated, *operands))
    return jax.lax.while_loop(
        lambda carry: carry[0] < 1, lambda carry: (carry[0] + 1, differentiated(*operands)), (jnp.int32(0), zeros)
    )[1]


def cond(a: Any, x: Any, y: Any, g: Any) -> Values:
    def either(a: Any, x: Any, y: Any) -> Any:
        return jax.lax.cond(a.sum() > jnp.inf, lambda a, x, y: y, tiledops.axpy, a, x, y)

    out, pullback = jax.vjp(either, a, x, y)
    return out, *pullback(g)


def switch(a: Any, x: Any, y: Any, g: Any) -> Values:
    branches = [lambda a, x, y: y, lambda a, x, y: -y, tiledops.axpy]
    out, pullback = jax.vjp(
        lambda *operands: jax.lax.switch(jnp.int32(operands[0].size + 1), branches, *operands), a, x, y
    )
    return out, *pullback(g)


def checkpointed_scan(a: Any, x: Any, y: Any, g: Any) -> Values:
    layer = jax.checkpoint(lambda y, each: (tiledops.axpy(*each, y), None), prevent_cse=False)
    out, pullback = jax.vjp(lambda a, x, y: jax.lax.scan(layer, y, (a[None], x[None]))[0], a, x, y)
    return out, *pullback(g)


WAYS: tuple[Callable[..., Values], ...] = (
    differentiated, grad, checkpoint, linearize, vmap_of_grad, grad_of_vmap, scan, grad_of_scan, while_loop, cond,
    switch, checkpointed_scan,
)  # fmt: skip
# Each case once, each way with every twelfth case: the rotation keeps a kind of gain from meeting one way alone.
ONCE = [(case, WAYS[(k + k // len(WAYS)) % len(WAYS)]) for k, case in enumerate(CASES)]


def check(case: Case, way: Callable[..., Values], **fields: Any) -> None:
    operands = case.operands()
    with tiledops.use_config(block=case.block, **fields):
        oracle.assert_agree(operands, *fresh(way)(*operands))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_plain_jnp(case: Case, way: Callable[..., Values]) -> None:
    check(case, way, mode="reference")


@pytest.mark.parametrize(("case", "way"), ONCE, ids=lambda value: getattr(value, "__name__", "") or value.name)
def test_simulated(case: Case, way: Callable[..., Values]) -> None:
    check(case, way, mode="simulate")


@pytest.mark.parametrize(
    ("case", "way", "chip"),
    [(case, WAYS[(k * 5 + k // len(WAYS)) % len(WAYS)], list(chips.CHIPS)[k % 5]) for k, case in enumerate(CASES)],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", "") or value.name,
)
def test_compiled_for_tpu(case: Case, way: Callable[..., Values], chip: str) -> None:
    structs = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in case.operands()]
    with tiledops.use_config(block=case.block):
        report = compiled.compile_for(fresh(way), *structs, chip=chip)
    names = [kernel.name for kernel in report.kernels]
    assert names.count("tiledops_axpy") == 1
    assert len(names) == 2  # and the gradients of gain and branch, in one
