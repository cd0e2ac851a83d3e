"""One block's arithmetic against NumPy: every bit pattern counts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BF16, F32

from tiledops import blocks, chips

COUNT = 200_000
SPECIAL = np.float32([0, 2.0**-149, 3 * 2.0**-149, 2.0**-126 - 2.0**-149, 2.0**-126, 1, 1 + 2.0**-23, 3.4e38, np.inf])


def patterns(seed: int, dtype: Any) -> np.ndarray:
    """Numbers of uniformly random bits: all exponents alike, subnormals, infinities and NaNs among them."""
    bits = np.random.default_rng(seed).integers(0, 2 ** (8 * dtype.itemsize), COUNT)
    return bits.astype(np.uint32 if dtype == F32 else np.uint16).view(dtype)


def near(seed: int, dtype: Any, exponents: tuple[int, int]) -> np.ndarray:
    """Numbers within a range of exponents, so that product and addend meet and their sum has to be rounded."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(COUNT) * 2.0 ** random.integers(*exponents, COUNT)).astype(dtype)


def check(a: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    out = jax.jit(lambda *args: blocks.multiply_add(*args, exact=True))(*map(jnp.asarray, (a, x, y)))
    with np.errstate(invalid="ignore", over="ignore"):
        oracle.assert_same_bits(out, (oracle.f64(a) * oracle.f64(x) + oracle.f64(y)).astype(np.float32))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_random_bits(dtype: Any) -> None:
    check(*(patterns(seed, dtype) for seed in range(3)))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("exponents", [(-4, 5), (-75, -60)], ids=["ordinary", "subnormal_products"])
def test_products_that_meet_their_addend(dtype: Any, exponents: tuple[int, int]) -> None:
    low, high = exponents
    check(near(0, dtype, exponents), near(1, dtype, exponents), near(2, dtype, (2 * low, 2 * high)))


def test_special_values() -> None:
    signed = np.concatenate([SPECIAL, -SPECIAL, [np.float32(np.nan)]])
    check(*(v.reshape(-1) for v in np.meshgrid(signed, signed, signed)))


def test_mixed_dtypes() -> None:
    check(patterns(0, F32), patterns(1, BF16), patterns(2, F32))
    check(patterns(0, BF16), patterns(1, F32), patterns(2, BF16))


def test_with_64_bit_types_switched_on() -> None:
    with chips.x64(True):
        check(*(patterns(seed, F32) for seed in range(3)))


def test_exactness_leaves_the_x64_setting_alone() -> None:
    blocks.multiply_add(jnp.ones(3), jnp.ones(3), jnp.ones(3), exact=True)
    assert jnp.asarray(np.ones(3)).dtype == F32


def test_a_scaled_gradient_keeps_the_sign_of_zero() -> None:
    a, g = (v.reshape(-1) for v in np.meshgrid(np.float32([0.0, -0.0, 1.0, -1.0]), np.float32([0.0, -0.0, 2.0])))
    (dx,), summed = blocks.scale((jnp.asarray(a),), (jnp.asarray(g),), exact=True)
    oracle.assert_same_bits(dx, a * g)
    assert summed is None


def test_the_tpus_arithmetic_is_a_multiply_and_an_add() -> None:
    """Mosaic compiles it as it stands, so that it must be two operations in float32 and no more."""
    x = jnp.ones(3, BF16)
    jaxpr = jax.make_jaxpr(lambda *args: blocks.multiply_add(*args, exact=False))(x, x, x)
    operations = [e.primitive.name for e in jaxpr.eqns if e.primitive.name != "convert_element_type"]
    assert operations == ["mul", "add"]
    assert [v.aval.dtype for v in jaxpr.jaxpr.outvars] == [F32]


def test_every_block_function_has_its_cost() -> None:
    a, g, x = jnp.float32(3), jnp.ones(5), jnp.full(5, 2.0)
    for block, coefficients, arrays in (
        (blocks.axpy, (a,), (g, x)),
        (blocks.scale, (a,), (g,)),
        (blocks.dot, (), (g, x)),
        (blocks.scale_and_dot, (a,), (g, x)),
    ):
        stored, summed = block(coefficients, arrays, exact=True)
        # a multiply and an add for a*x + y, a multiply for a*g, a multiply and the sum's addition for g*x
        flops = (2 if block is blocks.axpy else len(stored)) + (0 if summed is None else 2)
        assert blocks.FLOPS[block] == flops
