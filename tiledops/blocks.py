"""What one block computes: pure jnp, float32 inside, written once.

The kernels call these functions on a tile, the reference mode on the whole array. Each takes the coefficients (already
broadcastable against the blocks) and the blocks, and returns the blocks to store and the block to sum, or None. Those
of `axpy` take a mask as one coefficient more: where it is 0, x counts as absent, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tiledops import chips

Blocks = tuple[jax.Array, ...]


def axpy(coefficients: Blocks, blocks: Blocks, *, exact: bool) -> tuple[Blocks, None]:
    """out = a*x + y."""
    (a, *mask), (x, y) = coefficients, blocks
    return (_kept(mask, multiply_add(a, x, y, exact=exact), y),), None


def scale(coefficients: Blocks, blocks: Blocks, *, exact: bool) -> tuple[Blocks, None]:
    """out = a*g."""
    (a, *mask), (g,) = coefficients, blocks
    # a*g + (-0.0) is a*g, the sign of a zero included.
    return (_kept(mask, multiply_add(a, g, jnp.float32(-0.0), exact=exact), jnp.float32(0.0)),), None


def dot(coefficients: Blocks, blocks: Blocks, *, exact: bool) -> tuple[Blocks, jax.Array]:
    """sum of g*x."""
    g, x = blocks
    return (), _kept(coefficients, _f32(g) * _f32(x), jnp.float32(0.0))


def scale_and_dot(coefficients: Blocks, blocks: Blocks, *, exact: bool) -> tuple[Blocks, jax.Array]:
    """out = a*g, and the sum of g*x: the backward pass of axpy in one pass over g and x."""
    g, _ = blocks
    outs, _ = scale(coefficients, (g,), exact=exact)
    _, product = dot(coefficients[1:], blocks, exact=exact)
    return outs, product


def square(coefficients: Blocks, blocks: Blocks, *, exact: bool) -> tuple[Blocks, jax.Array]:
    """sum of g*g."""
    (g,) = blocks
    return (), _f32(g) * _f32(g)


def checked_square(coefficients: Blocks, blocks: Blocks, *, exact: bool) -> tuple[Blocks, jax.Array]:
    """sum of g*g + (g - g): as `square`, but NaN if any g is infinite too. Squares that overflow make it infinite."""
    (g,) = blocks
    return (), _f32(g) * _f32(g) + (_f32(g) - _f32(g))


def _kept(mask: Sequence[jax.Array], value: jax.Array, otherwise: jax.Array) -> jax.Array:
    """`otherwise` where there is a mask and it is 0. (A gain of 0 there would not do: 0*nan is nan.)"""
    return jnp.where(mask[0] != 0, value, _f32(otherwise)) if mask else value


def multiply_add(a: jax.Array, x: jax.Array, y: jax.Array, *, exact: bool) -> jax.Array:
    """a*x + y in float32.

    On TPU (`exact=False`) that is the vector unit's own multiply and add. XLA's CPU backend, which the simulator and
    the reference run on, flushes float32 subnormals to zero, and fuses the two roundings into one where the
    processor can, so that the same program gives different bits on different laptops. There (`exact=True`) the sum
    is taken in float64, where the product is exact and no float32 is subnormal, and rounded to float32.
    """
    a, x, y = map(_f32, (a, x, y))
    if not exact:
        return a * x + y
    with chips.x64(True):
        return _narrow(_widen(a) * _widen(x) + _widen(y))


# Operations of one element, as XLA's scheduler counts them.
FLOPS: dict[Callable[..., Any], int] = {
    axpy: 2,
    scale: 1,
    dot: 2,
    scale_and_dot: 3,
    square: 2,
    checked_square: 4,
}


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


# The parts of a float32's 32 bits, and the spacing 2**-149 of the subnormals, which are the smallest it has.
_SIGN, _EXPONENT, _FRACTION = np.int32(-(2**31)), np.int32(0x7F800000), np.int32(0x007FFFFF)
_SPACING, _SMALLEST_NORMAL = 2.0**-149, 2.0**-126


def _widen(x: jax.Array) -> jax.Array:
    """float32 to float64. The fraction of a subnormal is read as the integer that it is."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    fraction = (bits & _FRACTION).astype(jnp.float64) * _SPACING
    subnormal = ((bits & _EXPONENT) == 0) & (fraction != 0)
    return jnp.where(subnormal, jnp.where(bits < 0, -fraction, fraction), x.astype(jnp.float64))


def _narrow(x: jax.Array) -> jax.Array:
    """float64 to the nearest float32, ties to even. A subnormal is assembled from its integer fraction."""
    size = jnp.abs(x)
    fraction = jax.lax.round(jnp.minimum(size, _SMALLEST_NORMAL) / _SPACING, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    bits = fraction.astype(jnp.int32) | jnp.where(x < 0, _SIGN, 0)
    subnormal = (size < _SMALLEST_NORMAL) & (size != 0)
    return jnp.where(subnormal, jax.lax.bitcast_convert_type(bits, jnp.float32), x.astype(jnp.float32))
