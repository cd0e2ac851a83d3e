"""One call of a streamed operation: what is static about it, how it runs on sharded arrays and under `jax.vmap`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tiledops import chips, config, modes, partitioning
from tiledops.config import PipelineConfig
from tiledops.operation import BlockFunction, Operation

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static of a call: how it is cut, what runs it, the chip that it is for, and how it is partitioned."""

    config: PipelineConfig
    mode: str
    chip: Any
    placement: partitioning.Placement | None = None

    @classmethod
    def of(cls, options: PipelineConfig | None) -> Call:
        """The call that the user's options, or their absence, ask for here and now."""
        resolved = config.resolve(options)
        return cls(resolved, modes.resolve(resolved), chips.target()[0])

    def placed(
        self,
        coefficients: Arrays,
        arrays: Arrays,
        *,
        spec: PartitionSpec | None,
        way_out: str = partitioning.SPEC,
    ) -> tuple[Call, Arrays, Arrays]:
        """The call on the mesh that its arrays live on, and its operands (`partitioning.place`)."""
        opaque = self.mode != modes.REFERENCE
        placement, coefficients, arrays = partitioning.place(
            coefficients, arrays, spec=spec, opaque=opaque, way_out=way_out
        )
        return dataclasses.replace(self, placement=placement), coefficients, arrays

    def operation(
        self,
        block: BlockFunction,
        outs: tuple[Any, ...] = (),
        total: tuple[int, ...] | None = None,
        aliases: tuple[tuple[int, int], ...] = (),
    ) -> Operation:
        """The call's operation: a block function, the dtypes that it stores, the shape that its sum keeps."""
        return Operation(block, tuple(map(jnp.dtype, outs)), total, self.config, self.mode, self.chip, aliases)

    def run(self, operation: Operation, coefficients: Arrays, arrays: Arrays) -> Arrays:
        """The arrays that the operation stores, then its float32 sum if it has one."""
        return partitioning.per_shard(operation, self.placement, coefficients, arrays)


@dataclasses.dataclass(frozen=True)
class Batch:
    """What `jax.vmap` makes of a call: the same call, of arrays with one more axis.

    The axis stays where it lies, since moving it would copy whole arrays. A coefficient that isn't mapped has an extent
    of 1 there, so that a gain which is shared is read once, and its gradient summed over the batch, by one kernel.

    Attributes:
      size: of the mapped axis.
      at: where it lies in the arrays.
      rank: of the arrays without it.
      spmd_name: the names of the mesh axes that it is sharded over, or None: `jax.vmap`'s `spmd_axis_name`.
    """

    size: int
    at: int
    rank: int
    spmd_name: Any

    @classmethod
    def of(cls, axis: Any, arrays: Sequence[jax.Array], axes: Sequence[int | None]) -> Batch:
        """From what a batching rule gets: the mapped axis, the arrays, and where it lies in each."""
        at = next((its for its in axes if its is not None), 0)
        return cls(axis.size, at, arrays[0].ndim - (axes[0] is not None), axis.spmd_name)

    def call(self, call: Call, array: jax.Array) -> Call:
        """The call on arrays like `array`, which has the axis."""
        if call.placement is None:
            return call
        return dataclasses.replace(call, placement=call.placement.batched(self.at, self.spmd_name, array))

    def operands(self, operands: Sequence[jax.Array], axes: Sequence[int | None], arrays: slice) -> list[jax.Array]:
        """Those of the call on the batch; all but the slice are coefficients. `spmd_name` makes what is mapped vary
        over a manual mesh axis: what isn't mapped is cast to here, where the cast is differentiated with the rest."""
        inside = range(*arrays.indices(len(operands)))
        lifted = [
            (self._array if i in inside else self._coefficient)(x, axis)
            for i, (x, axis) in enumerate(zip(operands, axes, strict=True))
        ]
        (lifted,) = map(list, partitioning.varying_alike(tuple(lifted)))
        coefficients = tuple(x for i, x in enumerate(lifted) if i not in inside)
        # Spread over the batch, an array is on no axis of an Explicit mesh yet.
        lifted[arrays] = partitioning.alike(coefficients, tuple(lifted[arrays]))
        return lifted

    def _array(self, x: jax.Array, axis: int | None) -> jax.Array:
        if axis is None:
            shape = (*x.shape[: self.at], self.size, *x.shape[self.at :])
            return jnp.broadcast_to(jnp.expand_dims(x, self.at), shape)
        return jnp.moveaxis(x, axis, self.at)

    def _coefficient(self, x: jax.Array, axis: int | None) -> jax.Array:
        """With the rank of the arrays: it runs along the last of an example's axes, and is 1 along the others."""
        batch = jnp.expand_dims(x, 0) if axis is None else jnp.moveaxis(x, axis, 0)
        aligned = jnp.expand_dims(batch, tuple(range(1, 2 + self.rank - batch.ndim)))
        return jnp.moveaxis(aligned, 0, self.at)

    def total(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a batch of sums of some shape, with the rank of the arrays: one sum an example."""
        aligned = (1,) * (self.rank - len(shape)) + shape
        return (*aligned[: self.at], self.size, *aligned[self.at :])

    def each(self, total: jax.Array, rank: int) -> jax.Array:
        """The batch of sums as one of their own rank, along the first axis."""
        return jnp.squeeze(jnp.moveaxis(total, self.at, 0), tuple(range(1, 1 + self.rank - rank)))
