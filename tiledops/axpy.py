"""The public op: a*x + y."""

from __future__ import annotations

from typing import Any

import jax

from tiledops import contract
from tiledops.calls import Call
from tiledops.config import PipelineConfig
from tiledops.derivatives import Results, scaled_add


def axpy(a: Any, x: Any, y: Any, *, config: PipelineConfig | None = None, spec: Any = None) -> jax.Array:
    """The scaled add a*x + y, in float32, rounded once to y's dtype (BLAS AXPY: y is the accumulator).

    On TPU, one pipelined kernel that reads x and y once and writes the result once, and another for the backward pass.
    Differentiable any number of times, in reverse and in forward mode. A gain that is not differentiated keeps no
    activation.

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
    return scaled_add(call, Results(in_place=True), a, x, y)


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
    return scaled_add(call, Results(in_place=True), a, x, y, mask)
