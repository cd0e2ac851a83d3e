"""What a*x + y is made of under differentiation, and the batching rule that its parts share.

With out = a*x + y and g the gradient of a loss with respect to out,

    dx = a*g        da = sum of g*x over the axes that a doesn't have        dy = g

so that the backward pass is one kernel over g and x, or over one of them where only one of dx and da is wanted. These
are bilinear, and their derivatives are made of the same operations: with u the gradient with respect to dx and v with
respect to da,

    d/da = sum of u*g        d/dg = a*u + v*x        d/dx = v*g

In forward mode a product c*d has the tangent c'*d + c*d', which is made of them too. Each rule below calls only
operations of this file, so derivatives of any order exist, in either mode.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tiledops import blocks, partitioning
from tiledops.calls import Batch, Call
from tiledops.rules import Operand, transformable


def _aligned(gain: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a gain with x's rank: a scalar is 1 along every axis, a vector runs along the last."""
    return (1,) * (len(shape) - len(gain)) + gain


def _run(
    call: Call,
    block: Any,
    coefficients: tuple[jax.Array, ...],
    arrays: tuple[jax.Array, ...],
    *,
    outs: tuple[Any, ...] = (),
    total: tuple[int, ...] | None = None,
    aliases: tuple[tuple[int, int], ...] = (),
) -> tuple[jax.Array, ...]:
    """Runs a block function over arrays of one shape, with or without a gain and a mask.

    Args:
      outs: dtypes of the arrays that it stores.
      total: the shape of the gain whose gradient it sums, or None.
      aliases: pairs (array, out): the stored array takes that array's buffer where the caller gives it up.
    """
    shape = arrays[0].shape
    operation = call.operation(block, outs, None if total is None else _aligned(total, shape), aliases)
    coefficients = tuple(c.reshape(_aligned(c.shape, shape)) for c in coefficients)
    results = call.run(operation, coefficients, arrays)
    return results if total is None else (*results[:-1], results[-1].reshape(total))


@dataclasses.dataclass(frozen=True)
class Results:
    """What an operation below is to return.

    Attributes:
      dtype: of the array that it stores, where that isn't y's.
      total: the shape of the gain whose gradient it sums.
      in_place: whether the result of a*x + y is written into y's buffer, where that is free.
    """

    dtype: Any = None
    total: tuple[int, ...] | None = None
    in_place: bool = False


def _mapped(function: transformable, arrays: slice) -> None:
    """Gives one of the operations below its batching rule. `arrays` are those of its operands that aren't coefficients:
    a gain before them, a mask after them."""

    def rule(axis: Any, call: Call, results: Results, operands: Any, axes: Any) -> tuple[list[jax.Array], list[int]]:
        batch = Batch.of(axis, operands[arrays], axes[arrays])
        lifted = batch.operands(operands, axes, arrays)
        total = results.total
        batched = dataclasses.replace(results, total=None if total is None else batch.total(total))
        values = jax.tree.leaves(function(batch.call(call, lifted[arrays][0]), batched, *lifted))
        at = [batch.at] * len(values)
        if total is not None:
            values[-1], at[-1] = batch.each(values[-1], len(total)), 0
        return values, at

    function.defvmap(rule)


# a*x + y


@transformable
def scaled_add(call: Call, results: Results, a: jax.Array, x: jax.Array, y: jax.Array, *mask: jax.Array) -> jax.Array:
    aliases = ((1, 0),) if results.in_place else ()
    (out,) = _run(call, blocks.axpy, (a, *mask), (x, y), outs=(y.dtype,), aliases=aliases)
    return out


def _scaled_add_forward(call: Call, results: Results, a: Any, x: Any, y: Any, *mask: Any) -> tuple[jax.Array, Saved]:
    # Not in y's buffer: in a program that is differentiated, what came before y has mostly saved it for its gradient.
    masks = tuple(m.value for m in mask)
    return scaled_add(call, Results(), a.value, x.value, y.value, *masks), Saved.of(a, x, masks, y.value.dtype)


def _scaled_add_pushforward(
    call: Call, results: Results, saved: Saved, da: Any, dx: Any, dy: Any, *_: Any
) -> jax.Array | None:
    return saved.tangent(call, da, dx, dy)


def _scaled_add_pullback(call: Call, results: Results, saved: Saved, g: Any) -> tuple[Any, ...]:
    return *saved.gradients(call, g), g


scaled_add.deflinear(_scaled_add_forward, _scaled_add_pushforward, _scaled_add_pullback)
_mapped(scaled_add, slice(1, 3))


# a*g


@transformable
def scale(call: Call, results: Results, a: jax.Array, g: jax.Array, *mask: jax.Array) -> jax.Array:
    (dx,) = _run(call, blocks.scale, (a, *mask), (g,), outs=(results.dtype,))
    return dx


def _scale_forward(call: Call, results: Results, a: Any, g: Any, *mask: Any) -> tuple[jax.Array, Saved]:
    masks = tuple(m.value for m in mask)
    return scale(call, results, a.value, g.value, *masks), Saved.of(a, g, masks, results.dtype)


def _scale_pushforward(call: Call, results: Results, saved: Saved, da: Any, dg: Any, *_: Any) -> jax.Array | None:
    return saved.tangent(call, da, dg)


def _scale_pullback(call: Call, results: Results, saved: Saved, u: Any) -> tuple[Any, ...]:
    return saved.gradients(call, u)


scale.deflinear(_scale_forward, _scale_pushforward, _scale_pullback)
_mapped(scale, slice(1, 2))


# sum of g*x


@transformable
def dot(call: Call, results: Results, g: jax.Array, x: jax.Array, *mask: jax.Array) -> jax.Array:
    (da,) = _run(call, blocks.dot, mask, (g, x), total=results.total)
    return da


def _dot_forward(call: Call, results: Results, g: Any, x: Any, *mask: Any) -> tuple[jax.Array, Factors]:
    masks = tuple(m.value for m in mask)
    return dot(call, results, g.value, x.value, *masks), Factors.of(g, x, masks)


def _dot_pushforward(call: Call, results: Results, saved: Factors, dg: Any, dx: Any, *_: Any) -> jax.Array | None:
    return saved.tangent(call, results.total, dg, dx)


def _dot_pullback(call: Call, results: Results, saved: Factors, v: Any) -> tuple[Any, ...]:
    return saved.dg(call, v), saved.dx(call, v)


dot.deflinear(_dot_forward, _dot_pushforward, _dot_pullback)
_mapped(dot, slice(0, 2))


# a*g and sum of g*x in one pass


@transformable
def scale_and_dot(
    call: Call, results: Results, a: jax.Array, g: jax.Array, x: jax.Array, *mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    dx, da = _run(call, blocks.scale_and_dot, (a, *mask), (g, x), outs=(results.dtype,), total=results.total)
    return dx, da


def _scale_and_dot_forward(
    call: Call, results: Results, a: Any, g: Any, x: Any, *mask: Any
) -> tuple[Any, tuple[Saved, Factors]]:
    masks = tuple(m.value for m in mask)
    saved = Saved.of(a, g, masks, results.dtype), Factors.of(g, x, masks)
    return scale_and_dot(call, results, a.value, g.value, x.value, *masks), saved


def _scale_and_dot_pushforward(
    call: Call, results: Results, saved: tuple[Saved, Factors], da: Any, dg: Any, dx: Any, *_: Any
) -> tuple[jax.Array, jax.Array]:
    scaled, summed = saved
    of_product, of_sum = scaled.tangent(call, da, dg), summed.tangent(call, results.total, dg, dx)
    # One of the two has no tangent where nobody differentiates by g.
    return (
        jnp.zeros_like(dx, results.dtype) if of_product is None else of_product,
        jnp.zeros_like(da, jnp.float32) if of_sum is None else of_sum,
    )


def _scale_and_dot_pullback(
    call: Call, results: Results, saved: tuple[Saved, Factors], gradients: Any
) -> tuple[Any, ...]:
    (scaled, summed), (u, v) = saved, gradients
    da, dg = (None, None) if isinstance(u, SymbolicZero) else scaled.gradients(call, u)
    if isinstance(v, SymbolicZero):
        return da, dg, None
    return da, summed.dg(call, v, dg), summed.dx(call, v)


scale_and_dot.deflinear(_scale_and_dot_forward, _scale_and_dot_pushforward, _scale_and_dot_pullback)
_mapped(scale_and_dot, slice(1, 3))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["a", "x", "mask"], meta_fields=["gain", "dtype", "stored"]
)
@dataclasses.dataclass(frozen=True)
class Saved:
    """What the derivatives of a*x need: x if a is differentiated, a and the dtype of dx if x is; the mask, if any, the
    gain's type, and the dtype of the result."""

    a: jax.Array | None
    x: jax.Array | None
    mask: tuple[jax.Array, ...]
    gain: Any
    dtype: Any
    stored: Any

    @classmethod
    def of(cls, a: Operand, x: Operand, mask: tuple[jax.Array, ...], stored: Any) -> Saved:
        of_x = (a.value, x.value.dtype) if x.perturbed else (None, None)
        return cls(of_x[0], x.value if a.perturbed else None, mask, jax.typeof(a.value), of_x[1], stored)

    def tangent(
        self, call: Call, da: jax.Array | None, dx: jax.Array | None, other: jax.Array | None = None
    ) -> jax.Array | None:
        """da*x + a*dx, and what else there is of it."""
        if dx is not None:
            other = _add(call, self.stored, self.a, dx, self.mask, other)
        if da is not None:
            other = _add(call, self.stored, da, self.x, self.mask, other)
        return other

    def gradients(self, call: Call, g: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
        """da and dx, each None if nobody differentiates by it. da has a's dtype, dx has x's."""
        da = dx = None
        if self.a is None and self.x is not None:
            da = dot(call, Results(total=self.gain.shape), g, self.x, *self.mask)
        elif self.a is not None and self.x is None:
            dx = scale(call, Results(self.dtype), self.a, g, *self.mask)
        elif self.a is not None and self.x is not None:
            dx, da = scale_and_dot(call, Results(self.dtype, self.gain.shape), self.a, g, self.x, *self.mask)
        return None if da is None else partitioning.like(da, self.gain), dx


@functools.partial(jax.tree_util.register_dataclass, data_fields=["g", "x", "mask"], meta_fields=["dtypes"])
@dataclasses.dataclass(frozen=True)
class Factors:
    """What the derivatives of a sum of g*x need: each of the two if the other is differentiated, and the mask."""

    g: jax.Array | None
    x: jax.Array | None
    mask: tuple[jax.Array, ...]
    dtypes: tuple[Any, Any]

    @classmethod
    def of(cls, g: Operand, x: Operand, mask: tuple[jax.Array, ...]) -> Factors:
        dtypes = g.value.dtype, x.value.dtype
        return cls(g.value if x.perturbed else None, x.value if g.perturbed else None, mask, dtypes)

    def tangent(self, call: Call, total: Any, dg: jax.Array | None, dx: jax.Array | None) -> jax.Array | None:
        """The sum of dg*x + g*dx."""
        pairs = ((g, x) for g, x in ((dg, self.x), (self.g, dx)) if g is not None and x is not None)
        sums = [dot(call, Results(total=total), g, x, *self.mask) for g, x in pairs]
        return functools.reduce(jnp.add, sums) if sums else None

    def dg(self, call: Call, v: jax.Array, other: jax.Array | None = None) -> jax.Array | None:
        """v*x, and what else there is of it, or None if nobody differentiates by g."""
        return None if self.x is None else _add(call, self.dtypes[0], v, self.x, self.mask, other)

    def dx(self, call: Call, v: jax.Array) -> jax.Array | None:
        """v*g, or None if nobody differentiates by x."""
        return None if self.g is None else _add(call, self.dtypes[1], v, self.g, self.mask)


def _add(
    call: Call, dtype: Any, a: Any, x: Any, mask: tuple[jax.Array, ...], other: jax.Array | None = None
) -> jax.Array:
    """a*x in some dtype, or added to what has it."""
    if other is None:
        return scale(call, Results(dtype), a, x, *mask)
    return scaled_add(call, Results(in_place=True), a, x, other, *mask)
