"""Derivatives of derivatives, where x = x(w), y = y(w): the same numbers as jnp's own to rounding, in float32."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, Case
from programs import SUBSETS, jnp_axpy, kernels, of, saved

import tiledops
from tiledops import compiled
from tiledops.axpy import axpy_where
from tiledops.chips import CHIPS


def composite(op: Any, case: Case) -> Any:
    g = jnp.asarray(case.operands()[3], jnp.float32)
    return lambda a, x, y: (jnp.sin(op(a, jnp.cos(x), y)) * g).sum()


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
