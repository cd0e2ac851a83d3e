"""Under jax.grad and its kin: every subset of the operands, every order, and the types of cotangents."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BF16, BY_NAME, CASES, F32, Case
from programs import fresh, kernels, of, saved

import tiledops
from tiledops import compiled
from tiledops.axpy import axpy_where
from tiledops.chips import CHIPS

MODES = pytest.mark.parametrize("mode", ["reference", "simulate", "tpu"])
SUBSETS = [s for n in (1, 2, 3) for s in itertools.combinations(range(3), n)]


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


@pytest.mark.parametrize("mode", ["reference", "simulate"])
def test_forward_mode_is_refused_by_jax(mode: str) -> None:
    """The op has a rule for reverse mode alone, and JAX says so itself. `jax.linearize` says so when it is called."""
    a, x, y, _ = map(jnp.asarray, BY_NAME["lesson"].operands())
    with tiledops.use_config(mode=mode):
        for call in (
            lambda: jax.jvp(tiledops.axpy, (a, x, y), (a, x, y)),
            lambda: jax.linearize(tiledops.axpy, a, x, y)[1](a, x, y),
            lambda: jax.jacfwd(tiledops.axpy)(a, x, y),
            lambda: jax.hessian(lambda a: tiledops.axpy(a, x, y).sum())(a),
        ):
            with pytest.raises(TypeError, match="forward-mode"):
                call()


def test_forward_mode_is_refused_for_tpu() -> None:
    """When the program is lowered: traced, the tangent is one more step of it."""
    a, x, y = (jax.ShapeDtypeStruct(v.shape, v.dtype) for v in BY_NAME["lesson"].operands()[:3])
    with pytest.raises(TypeError, match="forward-mode"):
        compiled.lower_for(lambda *operands: jax.jvp(tiledops.axpy, operands, operands)[1], a, x, y)


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


# Higher orders, where x = x(w), y = y(w): the same numbers as jnp's own to rounding, in float32


def composite(op: Any, case: Case) -> Any:
    g = jnp.asarray(case.operands()[3], jnp.float32)
    return lambda a, x, y: (jnp.sin(op(a, jnp.cos(x), y)) * g).sum()


def jnp_axpy(a: Any, x: Any, y: Any) -> Any:
    return a * x + y


def assert_alike(got: Any, expected: Any) -> None:
    """Sums are reassociated, and XLA fuses a multiply and an add where it likes: 20 ulp of the largest entry."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        scale = max(1.0, float(jnp.abs(other).max()))
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * scale)


def hessian_vector(f: Any, operands: Any, direction: Any) -> Any:
    """Reverse over reverse."""

    def along(*operands: Any) -> Any:
        return sum((d * v).sum() for d, v in zip(jax.grad(f, (0, 1, 2))(*operands), direction, strict=True))

    return jax.grad(along, (0, 1, 2))(*operands)


HESSIANS = ["lesson", "feature", "example", "column_feature", "vector_feature", "rank0"]


@pytest.mark.parametrize("name", HESSIANS)
def test_hessian_vector_products(name: str) -> None:
    case = BY_NAME[name]
    operands = tuple(map(jnp.asarray, case.operands()[:3]))
    direction = tuple(jnp.cos(3 * v) for v in operands)
    with tiledops.use_config(mode="reference"):
        got = hessian_vector(composite(tiledops.axpy, case), operands, direction)
    assert_alike(got, hessian_vector(composite(jnp_axpy, case), operands, direction))


@pytest.mark.parametrize("argnums", SUBSETS, ids=str)
def test_hessian_vector_products_by_subset(argnums: tuple[int, ...]) -> None:
    """Each derivative of a derivative is again of what was asked for alone."""
    case = BY_NAME["feature"]
    operands = tuple(map(jnp.asarray, case.operands()[:3]))

    def second(op: Any) -> Any:
        f = composite(op, case)
        inner = lambda *o: sum((d * d).sum() for d in jax.grad(f, argnums)(*o))  # noqa: E731
        return jax.grad(inner, argnums)(*operands)

    with tiledops.use_config(mode="reference"):
        assert_alike(second(tiledops.axpy), second(jnp_axpy))


@pytest.mark.parametrize("inner", SUBSETS, ids=str)
def test_a_second_derivative_computes_and_saves_what_is_asked_for(inner: tuple[int, ...]) -> None:
    """Of da = sum g*x and dx = a*g, as far as they were asked for, by every subset of a, x, y and g."""
    operands = tuple(map(jnp.asarray, BY_NAME["lesson"].operands()))
    first = {(0,): ["dot"], (1,): ["scale"], (0, 1): ["scale_and_dot"]}.get(tuple(i for i in inner if i < 2), [])

    def pulled(out: Any, pullback: Any) -> Any:
        return pullback(out)

    def gradients(*operands: Any) -> Any:
        f, wanted = of(inner, tiledops.axpy, *operands[:3])
        return jax.vjp(f, *wanted)[1](operands[3])

    for outer in (s for n in (1, 2, 3, 4) for s in itertools.combinations(range(4), n)):
        f, wanted = of(outer, gradients, *operands)
        with tiledops.use_config(mode="tpu"):
            traced = jax.make_jaxpr(lambda *wanted, f=f: pulled(*jax.vjp(f, *wanted)))(*wanted)
            kept = saved(f, *wanted)
        a, x, g = (i in outer for i in (0, 1, 3))
        by_dx = ["scale_and_dot"] if a and g else ["dot"] * a + ["scale"] * g
        by_da = ["scale"] * x + ["axpy" if 1 in inner else "scale"] * g  # v*x, or v*x + a*u, one kernel either way
        second = [*(by_dx if 1 in inner else ()), *(by_da if 0 in inner else ())]
        assert kernels(traced) == Counter(f"tiledops_{name}" for name in ("axpy", *first, *second)), outer
        needs_g, needs_x = (1 in inner and a) or (0 in inner and x), 0 in inner and g
        assert kept.count(operands[1].size) == needs_g + needs_x, outer


def test_a_hessian_vector_product_in_the_simulator() -> None:
    case = BY_NAME["feature"]
    operands = tuple(map(jnp.asarray, case.operands()[:3]))
    with tiledops.use_config(mode="simulate", block=(8, 128)):
        got = jax.jit(lambda *o: hessian_vector(composite(tiledops.axpy, case), o, o))(*operands)
    assert_alike(got, hessian_vector(composite(jnp_axpy, case), operands, operands))


@pytest.mark.parametrize(("name", "chip"), [*zip(HESSIANS, itertools.cycle(CHIPS), strict=False)], ids=str)
def test_a_hessian_vector_product_compiled_for_tpu(name: str, chip: str) -> None:
    """A kernel each for the forward and the backward pass, and one and three for their derivatives."""
    case = BY_NAME[name]
    structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in case.operands()[:3]]
    report = compiled.compile_for(lambda *o: hessian_vector(composite(tiledops.axpy, case), o, o), *structs, chip=chip)
    once = Counter({"tiledops_axpy": 2, "tiledops_scale": 1, "tiledops_scale_and_dot": 3})
    assert Counter(kernel.name for kernel in report.kernels) == once


@pytest.mark.parametrize("mode", ["reference", "simulate"])
@pytest.mark.parametrize("argnum", [0, 1, 2])
def test_third_derivatives(argnum: int, mode: str) -> None:
    case = BY_NAME["rank4"]
    operands = tuple(map(jnp.asarray, case.operands()[:3]))

    def slope(f: Any) -> Any:
        return lambda *o: jax.grad(f, argnum)(*o).sum()

    def third(op: Any) -> Any:
        f = composite(op, case)
        for _ in range(3):
            f = slope(f)
        return f(*operands)

    with tiledops.use_config(mode=mode):
        assert_alike(third(tiledops.axpy), third(jnp_axpy))


@pytest.mark.parametrize("name", ["merged_feature", "bf16_into_f32", "f32_into_bf16", "example_tiles"])
def test_second_derivatives_keep_their_dtypes(name: str) -> None:
    case = BY_NAME[name]
    operands = tuple(map(jnp.asarray, case.operands()[:3]))
    with tiledops.use_config(mode="reference"):
        second = hessian_vector(lambda *o: (tiledops.axpy(*o).astype(jnp.float32) ** 2).sum(), operands, operands)
    assert [(d.dtype, d.shape) for d in second] == [(v.dtype, v.shape) for v in operands]
    assert all(bool(jnp.isfinite(d.astype(jnp.float32)).all()) for d in second)


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


@pytest.mark.parametrize("mode", ["reference", "simulate"])
@pytest.mark.parametrize("gain", [(), (5,), (8, 1, 1)], ids=str)
def test_a_mask_in_every_order_and_mapped(gain: tuple[int, ...], mode: str) -> None:
    """What is masked is in no derivative, and its NaN neither. Plain jnp, which would spread the NaN, is spared it."""
    random = np.random.default_rng(0)
    a, x, y, mask = (
        jnp.asarray(random.standard_normal(n), jnp.float32) for n in (gain, (8, 3, 5), (8, 3, 5), (8, 1, 1))
    )
    mask = (mask > 0).astype(jnp.float32)
    poisoned = jnp.where(mask != 0, x, jnp.nan)

    def plain(mask: Any, a: Any, x: Any, y: Any) -> Any:
        return jnp.where(mask != 0, a * x, 0.0) + y

    def gradients(op: Any, mask: Any, *operands: Any) -> Any:
        first = jax.grad(lambda *operands: jnp.cos(op(mask, *operands)).sum(), (0, 1, 2))

        def of_first(*operands: Any) -> Any:
            return sum(jnp.sin(gradient).sum() for gradient in first(*operands))

        return first(*operands), jax.grad(of_first, (0, 1, 2))(*operands)

    masks = jnp.stack([mask, mask])
    with tiledops.use_config(mode=mode):
        got = jax.jit(lambda *operands: gradients(axpy_where, *operands))(mask, a, poisoned, y)
        mapped = jax.jit(jax.vmap(lambda mask, x: axpy_where(mask, a, x, y)))(masks, jnp.stack([poisoned, x]))
        of_mask = jax.grad(lambda mask: axpy_where(mask, a, x, y).sum())(mask)
    wanted = gradients(plain, mask, a, x, y)
    # A hundred terms of about 1 in float32, summed in another order.
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-5), got, wanted)
    for out in mapped:
        np.testing.assert_allclose(out, plain(mask, a, x, y), rtol=1e-6, atol=1e-6)
    assert not of_mask.any()
