"""The public op: a*x + y, its derivatives and its batching rule.

With out = a*x + y and g the gradient of a loss with respect to out,

    dx = a*g        da = sum of g*x over the axes that a doesn't have        dy = g

so that the backward pass is one kernel over g and x, or over one of them where only one of dx and da is wanted. These
are bilinear, and their derivatives are made of the same operations: with u the gradient with respect to dx and v with
respect to da,

    d/da = sum of u*g        d/dg = a*u + v*x        d/dx = v*g

Each rule below calls only differentiable operations, so derivatives of any order exist.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from tiledops import blocks, contract, partitioning
from tiledops.calls import Batch, Call
from tiledops.config import PipelineConfig
from tiledops.rules import transformable


def axpy(a: Any, x: Any, y: Any, *, config: PipelineConfig | None = None, spec: Any = None) -> jax.Array:
    """The scaled add a*x + y, in float32, rounded once to y's dtype (BLAS AXPY: y is the accumulator).

    On TPU, one pipelined kernel that reads x and y once and writes the result once, and another for the backward pass.
    Differentiable any number of times in reverse mode. A gain that is not differentiated keeps no activation.

    >>> x, y = jnp.full((3, 5), 2.0), jnp.ones((3, 5))
    >>> tiledops.axpy(0.5, x, y)[0]
    Array([2., 2., 2., 2., 2.], dtype=float32)
    >>> jax.grad(lambda a: tiledops.axpy(a, x, y).sum())(0.5)
    Array(30., dtype=float32, weak_type=True)

    Args:
      a: the gain: a Python number, a scalar array, one number a feature `(x.shape[-1],)`, or one an example
        `(x.shape[0], 1, ..., 1)`; float32 or bfloat16. A traced gain never recompiles.
      x, y: arrays of one shape, any rank, not empty; each float32 or bfloat16.
      config: how to tile, schedule and run it; default: `use_config`'s, else chosen for the chip.
      spec: the PartitionSpec of x and y on a mesh with `Auto` axes; not used where there is none.

    Returns:
      An array of y's shape and dtype.

    Raises:
      TypeError: an operand that is not a float32 or bfloat16 array.
      ValueError: shapes that differ, an empty array, a gain that doesn't broadcast by the rule, a block that doesn't
        fit the chip's VMEM, a mesh with Auto axes and no `spec`.
      RuntimeError: mode "tpu" in a program that is not for a TPU.
    """
    a, x, y = contract.check_operands(a, x, y)
    call, (a,), (x, y) = Call.of(config).placed((a,), (x, y), spec=spec)
    return _axpy(call, Results(in_place=True), a, x, y)


def axpy_where(
    mask: jax.Array, a: Any, x: Any, y: Any, *, config: PipelineConfig | None = None, spec: Any = None
) -> jax.Array:
    """`axpy` where the mask is 1, and y where it is 0, bit for bit and whatever x holds: in as few passes as `axpy`.

    >>> x, y = jnp.array([[2.0, 3.0], [jnp.nan, jnp.inf]]), jnp.ones((2, 2))
    >>> axpy_where(jnp.array([[1.0], [0.0]]), 0.5, x, y)
    Array([[2. , 2.5],
           [1. , 1. ]], dtype=float32)

    Args:
      mask: float32 ones and zeros, of x's rank: `(x.shape[0], 1, ..., 1)` or `(1, ..., 1)`. It has no derivative.
      a, x, y, config, spec: as in `axpy`, and errors too.

    Returns:
      An array of y's shape and dtype.
    """
    a, x, y = contract.check_operands(a, x, y)
    call, (a, mask), (x, y) = Call.of(config).placed((a, jax.lax.stop_gradient(mask)), (x, y), spec=spec)
    return _axpy(call, Results(in_place=True), a, x, y, mask)


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
        lifted = [batch.coefficient(c, its) for c, its in zip(operands, axes, strict=True)]
        lifted[arrays] = batch.arrays(operands[arrays], axes[arrays])

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
def _axpy(call: Call, results: Results, a: jax.Array, x: jax.Array, y: jax.Array, *mask: jax.Array) -> jax.Array:
    aliases = ((1, 0),) if results.in_place else ()
    (out,) = _run(call, blocks.axpy, (a, *mask), (x, y), outs=(y.dtype,), aliases=aliases)
    return out


def _axpy_forward(call: Call, results: Results, a: Any, x: Any, y: Any, *mask: Any) -> tuple[jax.Array, Saved]:
    # Not in y's buffer: in a program that is differentiated, what came before y has mostly saved it for its gradient.
    masks = tuple(m.value for m in mask)
    return _axpy(call, Results(), a.value, x.value, y.value, *masks), Saved.of(a, x, masks)


def _axpy_backward(call: Call, results: Results, saved: Saved, g: Any) -> tuple[Any, ...]:
    if isinstance(g, SymbolicZero):
        return None, None, None, *_no_gradient(saved.mask)
    return *_gradients(call, saved, g), g, *_no_gradient(saved.mask)


_axpy.defvjp(_axpy_forward, _axpy_backward)
_mapped(_axpy, slice(1, 3))


# a*g


@transformable
def _scale(call: Call, results: Results, a: jax.Array, g: jax.Array, *mask: jax.Array) -> jax.Array:
    (dx,) = _run(call, blocks.scale, (a, *mask), (g,), outs=(results.dtype,))
    return dx


def _scale_forward(call: Call, results: Results, a: Any, g: Any, *mask: Any) -> tuple[jax.Array, Saved]:
    masks = tuple(m.value for m in mask)
    return _scale(call, results, a.value, g.value, *masks), Saved.of(a, g, masks)


def _scale_backward(call: Call, results: Results, saved: Saved, u: Any) -> tuple[Any, ...]:
    if isinstance(u, SymbolicZero):
        return None, None, *_no_gradient(saved.mask)
    return *_gradients(call, saved, u), *_no_gradient(saved.mask)


_scale.defvjp(_scale_forward, _scale_backward)
_mapped(_scale, slice(1, 2))


# sum of g*x


@transformable
def _dot(call: Call, results: Results, g: jax.Array, x: jax.Array, *mask: jax.Array) -> jax.Array:
    (da,) = _run(call, blocks.dot, mask, (g, x), total=results.total)
    return da


def _dot_forward(call: Call, results: Results, g: Any, x: Any, *mask: Any) -> tuple[jax.Array, Factors]:
    masks = tuple(m.value for m in mask)
    return _dot(call, results, g.value, x.value, *masks), Factors.of(g, x, masks)


def _dot_backward(call: Call, results: Results, saved: Factors, v: Any) -> tuple[Any, ...]:
    if isinstance(v, SymbolicZero):
        return None, None, *_no_gradient(saved.mask)
    return saved.dg(call, v), saved.dx(call, v), *_no_gradient(saved.mask)


_dot.defvjp(_dot_forward, _dot_backward)
_mapped(_dot, slice(0, 2))


# a*g and sum of g*x in one pass


@transformable
def _scale_and_dot(
    call: Call, results: Results, a: jax.Array, g: jax.Array, x: jax.Array, *mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    dx, da = _run(call, blocks.scale_and_dot, (a, *mask), (g, x), outs=(results.dtype,), total=results.total)
    return dx, da


def _scale_and_dot_forward(
    call: Call, results: Results, a: Any, g: Any, x: Any, *mask: Any
) -> tuple[Any, tuple[Saved, Factors]]:
    masks = tuple(m.value for m in mask)
    saved = Saved.of(a, g, masks), Factors.of(g, x, masks)
    return _scale_and_dot(call, results, a.value, g.value, x.value, *masks), saved


def _scale_and_dot_backward(
    call: Call, results: Results, saved: tuple[Saved, Factors], gradients: Any
) -> tuple[Any, ...]:
    (scaled, summed), (u, v) = saved, gradients
    da, dg = (None, None) if isinstance(u, SymbolicZero) else _gradients(call, scaled, u)
    if isinstance(v, SymbolicZero):
        return da, dg, None, *_no_gradient(scaled.mask)
    return da, summed.dg(call, v, dg), summed.dx(call, v), *_no_gradient(scaled.mask)


_scale_and_dot.defvjp(_scale_and_dot_forward, _scale_and_dot_backward)
_mapped(_scale_and_dot, slice(1, 3))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a", "x", "mask"], meta_fields=["gain", "dtype"])
@dataclasses.dataclass(frozen=True)
class Saved:
    """What the backward pass of a*x needs: x if a is differentiated, a and the dtype of dx if x is; the mask, if
    any, and the gain's type."""

    a: jax.Array | None
    x: jax.Array | None
    mask: tuple[jax.Array, ...]
    gain: Any
    dtype: Any

    @classmethod
    def of(cls, a: Any, x: Any, mask: tuple[jax.Array, ...]) -> Saved:
        """From the operands as `custom_vjp` hands them over: with `value` and `perturbed`."""
        of_x = (a.value, x.value.dtype) if x.perturbed else (None, None)
        return cls(of_x[0], x.value if a.perturbed else None, mask, jax.typeof(a.value), of_x[1])


@functools.partial(jax.tree_util.register_dataclass, data_fields=["g", "x", "mask"], meta_fields=["dtypes"])
@dataclasses.dataclass(frozen=True)
class Factors:
    """What the backward pass of a sum of g*x needs: each of the two if the other is differentiated, and the mask."""

    g: jax.Array | None
    x: jax.Array | None
    mask: tuple[jax.Array, ...]
    dtypes: tuple[Any, Any]

    @classmethod
    def of(cls, g: Any, x: Any, mask: tuple[jax.Array, ...]) -> Factors:
        """From the operands as `custom_vjp` hands them over."""
        dtypes = g.value.dtype, x.value.dtype
        return cls(g.value if x.perturbed else None, x.value if g.perturbed else None, mask, dtypes)

    def dg(self, call: Call, v: jax.Array, other: jax.Array | None = None) -> jax.Array | None:
        """v*x, and what else there is of it, or None if nobody differentiates by g."""
        if self.x is None:
            return None
        if other is None:
            return _scale(call, Results(self.dtypes[0]), v, self.x, *self.mask)
        return _axpy(call, Results(in_place=True), v, self.x, other, *self.mask)

    def dx(self, call: Call, v: jax.Array) -> jax.Array | None:
        """v*g, or None if nobody differentiates by x."""
        return None if self.g is None else _scale(call, Results(self.dtypes[1]), v, self.g, *self.mask)


def _no_gradient(mask: tuple[jax.Array, ...]) -> tuple[None, ...]:
    return (None,) * len(mask)


def _gradients(call: Call, saved: Saved, g: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
    """da and dx, each None if nobody differentiates by it. da has a's dtype, dx has x's."""
    a, x, mask, dtype = saved.a, saved.x, saved.mask, saved.dtype
    da = dx = None
    if a is None and x is not None:
        da = _dot(call, Results(total=saved.gain.shape), g, x, *mask)
    elif a is not None and x is None:
        dx = _scale(call, Results(dtype), a, g, *mask)
    elif a is not None and x is not None:
        dx, da = _scale_and_dot(call, Results(dtype, saved.gain.shape), a, g, x, *mask)
    return None if da is None else partitioning.like(da, saved.gain), dx
