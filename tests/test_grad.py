"""Under jax.grad and its kin: every subset of the operands, what is saved for it, and the types of cotangents."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BF16, BY_NAME, CASES, F32, Case
from programs import SUBSETS, fresh, jnp_axpy, of, saved

import tiledops

MODES = pytest.mark.parametrize("mode", ["reference", "simulate", "tpu"])


def check(case: Case, wanted: dict[int, Any]) -> None:
    """Gradients by the index of their operand."""
    a, x, y, g = case.operands()
    for index, gradient in wanted.items():
        assert (gradient.dtype, gradient.shape) == ((a, x, y)[index].dtype, (a, x, y)[index].shape)
    if 0 in wanted:
        oracle.assert_within(wanted[0], *oracle.da(a, x, g))
    if 1 in wanted:
        oracle.assert_same_bits(wanted[1], oracle.dx(a, x, g))
    if 2 in wanted:
        oracle.assert_same_bits(wanted[2], g)


def loss(case: Case) -> Any:
    g = jnp.asarray(case.operands()[3], jnp.float32)
    return lambda a, x, y: (tiledops.axpy(a, x, y).astype(jnp.float32) * g).sum()


@pytest.mark.parametrize("argnums", SUBSETS, ids=str)
@pytest.mark.parametrize("name", ["bf16_into_f32", "feature", "rank4_example", "vector_feature"])
def test_every_subset(name: str, argnums: tuple[int, ...]) -> None:
    case = BY_NAME[name]
    a, x, y, _ = map(jnp.asarray, case.operands())
    with tiledops.use_config(mode="reference"):
        check(case, dict(zip(argnums, jax.grad(loss(case), argnums)(a, x, y), strict=True)))


@pytest.mark.parametrize("argnums", SUBSETS, ids=str)
@pytest.mark.parametrize("name", ["merged_feature", "column_example"])
def test_every_subset_in_the_simulator(name: str, argnums: tuple[int, ...]) -> None:
    case = BY_NAME[name]
    a, x, y, _ = map(jnp.asarray, case.operands())
    with tiledops.use_config(mode="simulate", block=case.block):
        check(case, dict(zip(argnums, jax.grad(loss(case), argnums)(a, x, y), strict=True)))


@pytest.mark.parametrize("name", ["lesson", "bf16_into_f32", "feature", "rank4_example"])
def test_a_pullback_leaves_jit_and_serves_twice(name: str) -> None:
    case = BY_NAME[name]
    a, x, y, g = map(jnp.asarray, case.operands())
    with tiledops.use_config(mode="reference"):
        _, pullback = jax.jit(lambda *operands: jax.vjp(tiledops.axpy, *operands))(a, x, y)
        pullback(2 * g)
        check(case, dict(enumerate(jax.jit(pullback)(g))))


@pytest.mark.parametrize("mode", ["reference", "simulate"])
@pytest.mark.parametrize("subsets", [*itertools.permutations([(0,), (1,), (0, 1, 2)], 2)], ids=str)
def test_pullbacks_of_one_jitted_function_by_different_operands(subsets: Any, mode: str) -> None:
    """Each has saved something else; neither takes what it reads for the other's."""
    case = BY_NAME["one_tile"]
    operands = [*map(jnp.asarray, case.operands())]
    g = operands.pop()
    jitted = fresh(tiledops.axpy)

    def pullback(argnums: tuple[int, ...]) -> Any:
        f, wanted = of(argnums, jitted, *operands)
        return jax.vjp(f, *wanted)[1]

    with tiledops.use_config(mode=mode):
        for argnums, gradients in [(s, pullback(s)) for s in subsets]:
            check(case, dict(zip(argnums, gradients(g), strict=True)))


def test_what_linearize_gives_transposes() -> None:
    case = BY_NAME["feature"]
    a, x, y, g = map(jnp.asarray, case.operands())
    with tiledops.use_config(mode="reference"):
        out, linear = jax.linearize(tiledops.axpy, a, x, y)
        check(case, dict(enumerate(jax.linear_transpose(linear, a, x, y)(g))))
    oracle.assert_same_bits(out, oracle.axpy(*case.operands()[:3]))


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        (case, mode)
        for case in CASES
        if {case.a, case.x, case.y} == {F32}  # of others jnp saves what it has converted
        for mode in (["tpu", "reference", "simulate"] if case.name in ("lesson", "vector_feature") else ["tpu"])
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_what_is_not_asked_for_is_not_saved(case: Case, mode: str) -> None:
    """What plain jnp saves and no more, by every subset: x for the gain's gradient, the gain for x's. And mapped."""
    operands = [*map(jnp.asarray, case.operands()[:3])]
    batches = [jnp.stack([v, v]) for v in operands]
    for argnums in SUBSETS:
        for values, wrap in ((operands, lambda op: op), (batches, jax.vmap)):
            with tiledops.use_config(mode=mode, block=case.block):
                f, wanted = of(argnums, wrap(tiledops.axpy), *values)
                got = saved(f, *wanted)
            f, wanted = of(argnums, wrap(jnp_axpy), *values)
            assert got == saved(f, *wanted), argnums


# Types of cotangents


@MODES
@pytest.mark.parametrize("gain", [2, np.int32(2), True], ids=repr)
def test_what_has_no_gradient_gets_float0(gain: Any, mode: str) -> None:
    """Only as jnp itself gives it: an integer that goes through a conversion to a gain."""
    x = jnp.ones((3, 5))

    def gradients(gain: Any, x: Any) -> Any:
        return jax.vjp(lambda n, x: tiledops.axpy(jnp.float32(n), x, x), gain, x)[1](x)

    with tiledops.use_config(mode=mode):
        dn, dx = jax.eval_shape(gradients, gain, x) if mode == "tpu" else gradients(gain, x)
    assert (dn.dtype, dx.dtype) == (jax.dtypes.float0, F32)
    if mode != "tpu":
        np.testing.assert_array_equal(dx, np.full((3, 5), gain + 1.0))


@MODES
def test_a_float0_gradient_of_an_integer_input_beside_the_op(mode: str) -> None:
    def f(n: Any, a: Any, x: Any) -> Any:
        return (tiledops.axpy(a, x, x) * n).sum()

    gradients, x = jax.grad(f, (0, 1, 2), allow_int=True), jnp.ones((3, 5))
    with tiledops.use_config(mode=mode):
        dn, da, _ = jax.eval_shape(gradients, 2, 0.5, x) if mode == "tpu" else gradients(2, 0.5, x)
    assert (dn.dtype, da.dtype) == (jax.dtypes.float0, F32)
    if mode != "tpu":
        assert float(da) == 30.0


@MODES
@pytest.mark.parametrize("gain", [0.5, jnp.float32(0.5), jnp.bfloat16(0.5)], ids=lambda a: type(a).__name__ + str(a))
def test_a_gains_gradient_has_its_type(gain: Any, mode: str) -> None:
    x = jnp.ones((3, 5), BF16)
    gradient = lambda op: jax.grad(lambda a: op(a, x, x).astype(F32).sum())  # noqa: E731
    with tiledops.use_config(mode=mode):
        got, expected = (jax.eval_shape(gradient(op), gain) for op in (tiledops.axpy, jnp_axpy))
        assert (got.dtype, got.weak_type) == (expected.dtype, expected.weak_type)
        assert mode == "tpu" or float(gradient(tiledops.axpy)(gain)) == 15.0


@MODES
def test_the_result_is_never_weakly_typed(mode: str) -> None:
    """y is an array; where jnp would promote a weak y, there is nothing to promote."""
    x = jnp.ones((3, 5))
    with tiledops.use_config(mode=mode):
        assert mode == "tpu" or not tiledops.axpy(0.5, x, x).weak_type
        assert not jax.eval_shape(tiledops.axpy, 0.5, x, x).weak_type
        assert not jax.eval_shape(lambda y: tiledops.axpy(0.5, y, y), 2.0).weak_type  # a number that is traced
