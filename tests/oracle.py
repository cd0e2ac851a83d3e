"""What a*x + y and its gradients must be: NumPy float64, rounded where the op says that it rounds."""

from __future__ import annotations

from typing import Any

import numpy as np

BF16_HALF_ULP = 2.0**-8  # of 8 significant bits, relative
F32_ULP = 2.0**-23


def rounded(exact: np.ndarray, dtype: Any) -> np.ndarray:
    """float64 to float32, once, and from there to `dtype`."""
    with np.errstate(over="ignore"):
        return np.asarray(exact).astype(np.float32).astype(dtype)


def axpy(a: Any, x: Any, y: Any) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return rounded(f64(a) * f64(x) + f64(y), np.asarray(y).dtype)


def dx(a: Any, x: Any, g: Any) -> np.ndarray:
    return rounded(f64(a) * f64(g), np.asarray(x).dtype)


def tangent(operands: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The tangent of a*x + y in float64, and how far the op's may be from it: it has y's dtype, and each of the two
    products is rounded to that, once, where it has been added. An operand that has no tangent has None."""
    (a, x, y), (ta, tx, ty) = operands, tangents
    pairs = [pair for pair in ((a, tx), (ta, x)) if pair[0] is not None and pair[1] is not None]
    terms = [np.zeros(np.shape(y)), *(f64(c) * f64(v) for c, v in pairs), *([] if ty is None else [f64(ty)])]
    half_ulp = BF16_HALF_ULP if np.asarray(y).dtype.itemsize == 2 else F32_ULP / 2
    return sum(terms), 2 * half_ulp * sum(map(np.abs, terms))


def da(a: Any, x: Any, g: Any) -> tuple[np.ndarray, np.ndarray]:
    """The gain's gradient in float64, and how far a float32 sum may be from it.

    The bound of a pairwise sum of n products: log2(n) additions and the product, each half an ulp of something no
    larger than sum |g*x|. A bfloat16 gain's gradient is then rounded to bfloat16.
    """
    a, product = np.asarray(a), f64(g) * f64(x)
    gain = (1,) * (product.ndim - a.ndim) + a.shape  # a vector runs along the last axis
    axes = tuple(axis for axis, extent in enumerate(gain) if extent == 1)
    exact, size = (terms.sum(axes).reshape(a.shape) for terms in (product, np.abs(product)))
    depth = 1 + np.ceil(np.log2(product.size / a.size) + 1)
    return exact, depth * F32_ULP / 2 * size + (BF16_HALF_ULP * np.abs(exact) if a.dtype.itemsize == 2 else 0.0)


def assert_agree(operands: tuple[np.ndarray, ...], result: Any, gain: Any, branch: Any, stream: Any) -> None:
    """A call's result and the gradients of its gain, branch and stream; the operands are a, x, y and g."""
    a, x, y, g = operands
    assert_same_bits(result, axpy(a, x, y))
    assert_same_bits(branch, dx(a, x, g))
    assert_same_bits(stream, g)
    assert (gain.dtype, gain.shape) == (a.dtype, a.shape)
    assert_within(gain, *da(a, x, g))


def f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def assert_same_bits(got: Any, expected: np.ndarray) -> None:
    """Equal dtype, shape and bits: signed zeros and infinities too. Any NaN equals any other."""
    got = np.asarray(got)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    bits = np.uint16 if got.dtype.itemsize == 2 else np.uint32
    np.testing.assert_array_equal(got.view(bits)[~nan], expected.view(bits)[~nan])


def assert_within(got: Any, expected: np.ndarray, tolerance: np.ndarray) -> None:
    error = np.abs(f64(got) - expected)
    assert np.all(error <= tolerance), f"off by {np.max(error)}, {np.max(error / tolerance)} times the tolerance"
