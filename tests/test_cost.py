"""What every kernel tells XLA's scheduler about its cost is the truth, to the byte and to the operation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

import tiledops
from tiledops import passes

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
SHAPES = [(17, 257), (5, 3), (300,), (), (2, 3, 5, 7)]
DTYPES = [(F32, F32), (BF16, BF16), (F32, BF16)]


def costs(fn: Any, *args: Any) -> list[tuple[str, int, int, int]]:
    """Name, operations, transcendental functions and bytes of each kernel of a function, as traced."""

    def kernels(jaxpr: Any) -> Iterator[Any]:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield equation.params
            else:
                for inner in jaxprs_in_params(equation.params):
                    yield from kernels(inner)

    found = [(params["name"], params["cost_estimate"]) for params in kernels(jax.make_jaxpr(fn)(*args).jaxpr)]
    return [(name, cost.flops, cost.transcendentals, cost.bytes_accessed) for name, cost in found]


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: "-".join(dtype.name for dtype in dtypes))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_of_the_op_and_its_gradients(shape: tuple[int, ...], dtypes: tuple[Any, Any]) -> None:
    """For n elements, p bytes each in x and in its gradient, q in y, in the result and in its gradient g:

    kernel           computes                  operations            moves                          bytes
    axpy             a*x + y                   product, sum: 2n      x and y in, the result out     (p + 2q)n
    scale_and_dot    a*g, sum of g*x           2 products, sum: 3n   g and x in, dx out             (2p + q)n
    scale            a*g                       product: n            g in, dx out                   (p + q)n
    dot              sum of g*x                product, sum: 2n      g and x in                     (p + q)n

    whatever the tiles: what hangs over an edge is neither moved nor meant. The gain and the sum, one number or one a
    feature, are not counted.
    """
    n, (p, q) = math.prod(shape), (dtype.itemsize for dtype in dtypes)
    x, y = (jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes)
    for gain in {(), shape[-1:] if len(shape) > 1 else ()}:
        a = jax.ShapeDtypeStruct(gain, F32)
        forward = ("tiledops_axpy", 2 * n, 0, (p + 2 * q) * n)
        both = ("tiledops_scale_and_dot", 3 * n, 0, (2 * p + q) * n)
        of_x = ("tiledops_scale", n, 0, (p + q) * n)
        of_a = ("tiledops_dot", 2 * n, 0, (p + q) * n)
        assert costs(tiledops.axpy, a, x, y) == [forward]
        assert costs(lambda a, x, y: jax.vjp(tiledops.axpy, a, x, y)[1](y), a, x, y) == [forward, both]
        assert costs(lambda a, x, y: jax.vjp(lambda x: tiledops.axpy(a, x, y), x)[1](y), a, x, y) == [forward, of_x]
        assert costs(lambda a, x, y: jax.vjp(lambda a: tiledops.axpy(a, x, y), a)[1](y), a, x, y) == [forward, of_a]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_of_a_norm(dtype: Any) -> None:
    """The sum of g*g: a product and a sum an element, and g read once."""
    g = jax.ShapeDtypeStruct((17, 257), dtype)
    wanted = ("tiledops_square", 2 * 17 * 257, 0, dtype.itemsize * 17 * 257)
    assert costs(lambda g: passes.sum_of_squares({"w": g}), g) == [wanted]


def test_of_a_gain_by_parts() -> None:
    """Under vmap a gain a feature is a vector of its own for each of the batch: read once, and its gradient written."""
    a, x = jax.ShapeDtypeStruct((3, 130), F32), jax.ShapeDtypeStruct((3, 8, 130), BF16)
    n, gains = 3 * 8 * 130, 3 * 130
    gradients = jax.vmap(lambda a, x, g: jax.vjp(tiledops.axpy, a, x, x)[1](g))
    assert costs(jax.vmap(tiledops.axpy), a, x, x) == [("tiledops_axpy", 2 * n, 0, 3 * 2 * n + 4 * gains)]
    assert costs(gradients, a, x, x)[-1] == ("tiledops_scale_and_dot", 3 * n, 0, 3 * 2 * n + 2 * 4 * gains)


def test_of_a_gain_of_every_element() -> None:
    """One more float32 array to read, and its gradient one to write."""
    a, x = jax.ShapeDtypeStruct((1300,), F32), jax.ShapeDtypeStruct((1300,), BF16)
    assert costs(tiledops.axpy, a, x, x) == [("tiledops_axpy", 2 * 1300, 0, (3 * 2 + 4) * 1300)]
    gradients = costs(lambda a, x, g: jax.vjp(tiledops.axpy, a, x, x)[1](g), a, x, x)
    assert gradients[-1] == ("tiledops_scale_and_dot", 3 * 1300, 0, (3 * 2 + 4 + 4) * 1300)
