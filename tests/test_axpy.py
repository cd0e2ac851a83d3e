"""The public op against NumPy: values, gradients, what the backward pass keeps and what it runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BF16, BY_NAME, CASES, F32, Case
from programs import kernels, of

import tiledops
from tiledops import chips

SCHEDULES = ("pipelined", "synchronous", "blocked")


def differentiated(a: Any, x: Any, y: Any, g: Any, **fields: Any) -> tuple[Any, ...]:
    """The result and the gradients of a, x and y."""
    with tiledops.use_config(**fields):
        out, pullback = jax.vjp(tiledops.axpy, *map(jnp.asarray, (a, x, y)))
        return out, *pullback(jnp.asarray(g))


@pytest.mark.parametrize("mode", ["reference", "simulate"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_numpy(case: Case, mode: str) -> None:
    oracle.assert_agree(case.operands(), *differentiated(*case.operands(), mode=mode, block=case.block))


@pytest.mark.parametrize("name", ["lesson", "example", "column_feature", "vector_bf16"])
def test_schedules_and_buffers_give_the_same_bits(name: str) -> None:
    case = BY_NAME[name]
    ways = [*({"schedule": schedule} for schedule in SCHEDULES), {"buffers": 3}]
    first, *others = [differentiated(*case.operands(), mode="simulate", block=case.block, **way) for way in ways]
    oracle.assert_agree(case.operands(), *first)
    for results in others:
        for got, expected in zip(results, first, strict=True):
            oracle.assert_same_bits(got, np.asarray(expected))


@pytest.mark.parametrize("name", ["feature", "merged_feature", "vector"])
def test_the_same_bits_every_time(name: str) -> None:
    """The plan alone fixes the order of a sum."""
    case = BY_NAME[name]
    one, other = (differentiated(*case.operands(), mode="simulate", block=case.block) for _ in range(2))
    for got, expected in zip(other, one, strict=True):
        oracle.assert_same_bits(got, np.asarray(expected))


@pytest.mark.parametrize("mode", ["reference", "simulate"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_values_at_the_edges_of_float32(mode: str, dtype: Any) -> None:
    numbers = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 2.0**-149, 2.0**-126, 3e38, -3e38, np.inf, -np.inf, np.nan]
    x, y = (v.reshape(13, 13).astype(dtype) for v in np.meshgrid(np.float32(numbers), np.float32(numbers)))
    g = np.ones_like(y)
    for a in (np.float32(-0.5), np.float32(0.0), np.float32(2.0**-30), np.float32(np.inf)):
        with np.errstate(invalid="ignore"):
            out, _, dx, _ = differentiated(a, x, y, g, mode=mode)
            oracle.assert_same_bits(out, oracle.axpy(a, x, y))
            oracle.assert_same_bits(dx, oracle.dx(a, x, g))


def test_gradient_of_minus_zero_keeps_its_sign() -> None:
    g = np.float32([0.0, -0.0, 1.0, -1.0])
    for a in np.float32([0.0, -0.0, 2.0]):
        dx = differentiated(a, g, g, g, mode="reference")[2]
        oracle.assert_same_bits(dx, a * g)


# What is accepted besides arrays


@pytest.mark.parametrize("gain", [2, 2.0, np.float32(2), np.float64(2), np.array(2.0, np.float32), jnp.float32(2)])
def test_a_number_is_a_gain(gain: Any) -> None:
    with tiledops.use_config(mode="reference"):
        out = tiledops.axpy(gain, np.ones((3, 5), np.float32), np.ones((3, 5), np.float32))
    assert isinstance(out, jax.Array)
    oracle.assert_same_bits(out, np.full((3, 5), 3.0, np.float32))


def test_a_gain_never_recompiles() -> None:
    traces = []

    @jax.jit
    def step(a: Any, x: Any) -> Any:
        traces.append(a)
        return tiledops.axpy(a, x, x)

    with tiledops.use_config(mode="reference"):
        for gain in (0.5, 2.0, -1e-3):
            step(gain, jnp.ones((3, 5)))
    assert len(traces) == 1


def test_operands_that_are_one_array() -> None:
    _, x, _, _ = BY_NAME["lesson"].operands()
    x = jnp.asarray(x)
    with tiledops.use_config(mode="simulate", block=(8, 128)):
        out, pullback = jax.vjp(lambda x: tiledops.axpy(0.5, x, x), x)
    oracle.assert_same_bits(out, oracle.axpy(np.float32(0.5), x, x))
    oracle.assert_same_bits(pullback(x)[0], np.asarray(x) * np.float32(0.5) + np.asarray(x))


@pytest.mark.parametrize("mode", ["reference", "simulate"])
def test_64_bit_types_switched_on(mode: str) -> None:
    case = BY_NAME["feature"]
    with chips.x64(True):
        oracle.assert_agree(case.operands(), *differentiated(*case.operands(), mode=mode, block=case.block))
        with tiledops.use_config(mode=mode, block=case.block):
            x = jnp.ones((9, 130), jnp.float32)
            assert tiledops.axpy(0.5, x, x).dtype == F32
            assert jax.jit(tiledops.axpy)(0.5, x, x).dtype == F32  # a Python float is traced as a weak float64
            assert jax.grad(lambda x: tiledops.axpy(0.5, x, x).sum())(x).dtype == F32


# Gradients


@pytest.mark.parametrize(("x", "y"), [(F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16)])
@pytest.mark.parametrize("a", [F32, BF16])
def test_gradients_have_their_operands_dtypes(a: Any, x: Any, y: Any) -> None:
    operands = jnp.ones(5, a), jnp.ones((3, 5), x), jnp.ones((3, 5), y)
    gradients = differentiated(*operands, jnp.ones((3, 5), y), mode="reference")[1:]
    assert [(d.dtype, d.shape) for d in gradients] == [(v.dtype, v.shape) for v in operands]


def test_a_numbers_gradient_is_as_weakly_typed_as_jnps() -> None:
    x = jnp.ones((3, 5))
    with tiledops.use_config(mode="reference"):
        got = jax.grad(lambda a: tiledops.axpy(a, x, x).sum())(0.5)
    expected = jax.grad(lambda a: (a * x + x).sum())(0.5)
    assert (got.dtype, got.weak_type) == (expected.dtype, expected.weak_type)


WANTED = {  # by which of a, x, y: the backward pass's kernels
    (0,): ["tiledops_dot"],
    (1,): ["tiledops_scale"],
    (2,): [],
    (0, 1): ["tiledops_scale_and_dot"],
    (0, 2): ["tiledops_dot"],
    (1, 2): ["tiledops_scale"],
    (0, 1, 2): ["tiledops_scale_and_dot"],
}


@pytest.mark.parametrize("argnums", WANTED, ids=str)
def test_unwanted_gradients_run_no_kernel(argnums: tuple[int, ...]) -> None:
    pullback, g = _pullback(argnums)
    assert kernels(jax.make_jaxpr(pullback)(g)) == Counter(WANTED[argnums])


@pytest.mark.parametrize("argnums", WANTED, ids=str)
def test_a_fixed_gain_keeps_no_activation(argnums: tuple[int, ...]) -> None:
    pullback, g = _pullback(argnums)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if getattr(leaf, "shape", None) == g.shape]
    assert len(kept) == (0 in argnums)


def test_a_fixed_gain_keeps_no_activation_under_jit() -> None:
    x = jnp.ones((17, 257))
    with tiledops.use_config(mode="simulate"):
        for gain, wanted in ((lambda p: 0.5, 0), (lambda p: p, 1)):
            step = jax.jit(lambda p, x, gain=gain: tiledops.axpy(gain(p), x, x))
            _, pullback = jax.vjp(step, jnp.float32(0.5), x)
            assert sum(getattr(leaf, "shape", None) == x.shape for leaf in jax.tree.leaves(pullback)) == wanted


def _pullback(argnums: tuple[int, ...]) -> tuple[Any, jax.Array]:
    operands = [jnp.float32(0.5), jnp.ones((17, 257)), jnp.full((17, 257), 2.0)]

    with tiledops.use_config(mode="simulate"):
        f, wanted = of(argnums, tiledops.axpy, *operands)
        _, pullback = jax.vjp(f, *wanted)
    return pullback, operands[2]


def test_an_unused_gradient_is_zero() -> None:
    """A result that nothing depends on has a symbolic zero for its gradient."""
    x = jnp.ones((3, 5))
    with tiledops.use_config(mode="reference"):
        gradients = jax.grad(lambda *args: (tiledops.axpy(*args), x.sum())[1], (0, 1, 2))(2.0, x, x)
    assert [float(jnp.abs(d).max()) for d in gradients] == [0.0, 0.0, 0.0]


# Derivatives of higher order


@pytest.mark.parametrize("mode", ["reference", "simulate"])
def test_second_derivatives(mode: str) -> None:
    """Of L = sum(out**2)/2, for which dL/da = sum out*x, dL/dx = a*out and dL/dy = out."""
    random = np.random.default_rng(0)
    x, y, u = (random.standard_normal((9, 130)).astype(np.float32) for _ in range(3))
    a = np.float32(0.75)
    out = a * oracle.f64(x) + oracle.f64(y)

    def loss(a: Any, x: Any, y: Any) -> Any:
        return 0.5 * (tiledops.axpy(a, x, y) ** 2).sum()

    def slope(a: Any, x: Any, y: Any) -> Any:  # along a by 1, along x and y by u
        da, dx, dy = jax.grad(loss, (0, 1, 2))(a, x, y)
        return da + (dx * u).sum() + (dy * u).sum()

    with tiledops.use_config(mode=mode, block=(8, 128)):
        d2a, d2x, d2y = jax.grad(slope, (0, 1, 2))(a, x, y)
    oracle.assert_within(d2a, *_summed(oracle.f64(x) ** 2, out * u, a * x * u, x * u))
    scale = np.abs(out) + np.abs(x) + np.abs(u)  # each is a sum of such terms, and ten roundings of them
    oracle.assert_within(d2x, out + a * x + (a * a + a) * oracle.f64(u), 10 * oracle.F32_ULP * scale)
    oracle.assert_within(d2y, oracle.f64(x) + (a + 1.0) * u, 10 * oracle.F32_ULP * scale)


@pytest.mark.parametrize("argnum", [0, 1, 2])
def test_third_derivatives_by_one_operand(argnum: int) -> None:
    """Those of sum(out**3)/6 are sum x**3, a**3 and 1 (the last two elementwise, summed here at each order)."""
    random = np.random.default_rng(1)
    x, y = (random.standard_normal((5, 7)).astype(np.float32) for _ in range(2))
    a = np.float32(-1.5)

    def derivative(order: int) -> Any:
        if order == 0:
            return lambda *args: (tiledops.axpy(*args) ** 3).sum() / 6
        return lambda *args: jax.grad(derivative(order - 1), argnum)(*args).sum()

    value = {0: (oracle.f64(x) ** 3).sum(), 1: a.astype(np.float64) ** 3 * x.size, 2: float(x.size)}[argnum]
    with tiledops.use_config(mode="reference"):
        got = derivative(3)(a, x, y)
    oracle.assert_within(got, np.asarray(value), np.asarray(20 * oracle.F32_ULP * (np.abs(x) ** 3 + 4).sum()))


@pytest.mark.parametrize("name", ["feature", "example", "merged_feature", "rank4_example"])
def test_second_derivatives_of_vector_gains(name: str) -> None:
    """Against jnp's own in float32, the arrays being float32 all through."""
    case = BY_NAME[name]
    a, x, y, u = (jnp.asarray(v, jnp.float32) for v in case.operands())

    def mixed(op: Any) -> Any:
        loss = lambda *args: (jnp.sin(op(*args)) * u).sum()  # noqa: E731
        return jax.grad(lambda *args: sum((d * d).sum() for d in jax.grad(loss, (0, 1, 2))(*args)), (0, 1, 2))(a, x, y)

    with tiledops.use_config(mode="reference"):
        got = mixed(tiledops.axpy)
    for d, expected in zip(got, mixed(lambda a, x, y: a * x + y), strict=True):
        # A sum's terms are reassociated, and XLA fuses a multiply and an add where it likes: relative to the largest.
        np.testing.assert_allclose(d, expected, rtol=0, atol=1e-5 * float(jnp.abs(expected).max()))


def _summed(*terms: Any) -> tuple[np.ndarray, np.ndarray]:
    """The sum of all, and the tolerance of float32 sums of them (oracle.da)."""
    terms = tuple(map(oracle.f64, terms))
    return np.asarray(sum(t.sum() for t in terms)), np.asarray(4 * oracle.F32_ULP * sum(np.abs(t).sum() for t in terms))
