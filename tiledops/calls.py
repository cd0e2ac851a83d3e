"""One call of a streamed operation: what is static about it, and how it runs under `jax.vmap` and on sharded arrays."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tiledops import chips, config, modes, partitioning
from tiledops.config import PipelineConfig
from tiledops.operation import BlockFunction, Operation


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
        coefficients: tuple[jax.Array, ...],
        arrays: tuple[jax.Array, ...],
        *,
        spec: PartitionSpec | None,
        way_out: str = partitioning.SPEC,
    ) -> tuple[Call, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
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

    def run(
        self, operation: Operation, coefficients: tuple[jax.Array, ...], arrays: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """The arrays that the operation stores, then its float32 sum if it has one."""
        traced = any(isinstance(x, jax.core.Tracer) for x in (*coefficients, *arrays))
        return (_run if traced else _run_eagerly)(self, operation, coefficients, arrays)


def _run(
    call: Call, operation: Operation, coefficients: tuple[jax.Array, ...], arrays: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    return partitioning.per_shard(vectorized, operation, call.placement, coefficients, arrays)


# One program, as jnp's operations are: an array on a mesh meets one on a single device in `jit` alone.
_run_eagerly = jax.jit(_run, static_argnums=(0, 1))


@functools.cache
def vectorized(operation: Operation) -> Any:
    """An operation with its batching rule: a mapped axis is one more leading axis of the same operation.

    Two kinds of mesh axes meet a mapped axis from two sides. Where it is sharded over Explicit axes, its type says so,
    and only once it is an axis of the operands: so the operation is cut inside this rule. Over Auto axes, `jax.vmap`'s
    `spmd_axis_name` says so, to `jax.shard_map`'s own rule alone: so they are cut outside, by `Call.run`.
    """
    batched = jax.custom_batching.custom_vmap(functools.partial(partitioning.by_type, operation))

    @batched.def_vmap
    def rule(size: int, in_batched: Any, coefficients: Any, arrays: Any) -> tuple[Any, Any]:
        mapped_coefficients, mapped_arrays = in_batched
        coefficients = tuple(
            c if mapped else c[None] for c, mapped in zip(coefficients, mapped_coefficients, strict=True)
        )
        arrays = tuple(
            x if mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, mapped in zip(arrays, mapped_arrays, strict=True)
        )
        total = None if operation.total is None else (size, *operation.total)
        leaf = dataclasses.replace(operation.leaf, total=total)  # mapped vectors no longer share a kernel
        parts = [
            vectorized(leaf)(coefficients, partitioning.alike(coefficients, its)) for its in operation.by_leaf(arrays)
        ]
        stored = [x for part in parts for x in part[: len(leaf.outs)]]
        totals = [functools.reduce(jnp.add, [part[-1] for part in parts])] if total else []
        results = (*stored, *totals)
        return results, jax.tree.map(lambda _: True, results)

    return batched
