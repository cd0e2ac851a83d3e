"""The same call on each shard of sharded arrays.

The operations here are elementwise, so that every shard of the result needs the same shard of its operands and nothing
else: no collective, but for the sum of a gain's gradient over the axes that the gain doesn't vary on. XLA can't find
that out by itself, because a Mosaic kernel is opaque to its partitioner; `jax.shard_map` tells it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from tiledops.stream import Operation

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the arrays of a call live: over the axes `names` of `mesh`, cut by `spec`."""

    mesh: Any
    names: frozenset[str]
    spec: PartitionSpec

    def batched(self, entry: Any) -> Placement:
        """With one more leading axis, sharded as `entry` says."""
        return dataclasses.replace(self, spec=PartitionSpec(entry, *self.spec))


def place(
    coefficients: Arrays, arrays: Arrays, *, spec: PartitionSpec | None, opaque: bool
) -> tuple[Placement | None, Arrays, Arrays]:
    """How a call is to be partitioned, and its operands brought together for it.

    On a mesh with Explicit axes, the arrays' own types say how they are sharded. On one with Auto axes, `spec` does.
    Inside `jax.shard_map`, and where there is no mesh, the call runs as it stands.

    Args:
      coefficients: arrays whose extents are 1 or those of the arrays' last axes, or one an example.
      arrays: of one shape. If their shardings differ, they are resharded or refused as `jnp.add` would.
      spec: the arrays' PartitionSpec over Auto axes.
      opaque: whether a kernel runs. Plain jnp needs no help from `spec`.

    Raises:
      ValueError: no `spec` on a mesh with Auto axes, or one that doesn't fit the mesh or the shape.
    """
    mesh = _mesh(arrays)
    names = {kind: [n for n, t in _axes(mesh) if t == kind] for kind in (AxisType.Auto, AxisType.Explicit)}
    coefficients, arrays = _varying_alike(coefficients, arrays)
    explicit = _explicit_spec(arrays, names[AxisType.Explicit])
    if names[AxisType.Explicit]:
        arrays = tuple(jax.sharding.reshard(x, explicit) for x in arrays)
    if not opaque or not any(names.values()):
        return None, coefficients, arrays
    shape = arrays[0].shape
    if names[AxisType.Auto] and spec is None:
        raise ValueError(
            f"x is an array on a mesh with Auto axes {_sizes(mesh, names[AxisType.Auto])}, over which XLA can't "
            "partition a kernel. Either say how x and y are sharded (spec=jax.P(...), one entry an axis of x), or "
            "give the mesh Explicit axes (jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Explicit,) * n)), or "
            "call inside jax.shard_map"
        )
    given = PartitionSpec(*spec) if spec is not None and names[AxisType.Auto] else PartitionSpec()
    _check_spec(given, mesh, names[AxisType.Auto], shape)
    joint = PartitionSpec(*map(_join, _padded(explicit, len(shape)), _padded(given, len(shape))))
    placement = Placement(mesh, frozenset(names[AxisType.Auto] + names[AxisType.Explicit]), joint)
    return placement, coefficients, arrays


def per_shard(
    operation: Operation, placement: Placement | None, coefficients: Arrays, arrays: Arrays
) -> tuple[jax.Array, ...]:
    """Runs a streamed operation on each shard. Its stored arrays are sharded as its operands are; its sum is added up
    over the shards that it runs across, in float32, and sharded along the axes that it keeps."""
    if placement is None:
        return operation(coefficients, arrays)
    rank = len(arrays[0].shape)
    total = operation.total

    def shard(coefficients: Arrays, arrays: Arrays) -> tuple[jax.Array, ...]:
        coefficients, arrays = _varying_alike(coefficients, arrays)
        if total is None:
            return operation(coefficients, arrays)
        local = tuple(extent if full > 1 else 1 for extent, full in zip(arrays[0].shape, total, strict=True))
        *outs, part = dataclasses.replace(operation, total=local)(coefficients, arrays)
        across = [
            n for e, full in zip(_padded(placement.spec, rank), total, strict=True) if full == 1 for n in _names(e)
        ]
        return (*outs, jax.lax.psum(part, tuple(across)) if across else part)

    specs = tuple(_of_coefficient(c.shape, placement.spec) for c in coefficients)
    explicit = [n for n, t in _axes(placement.mesh) if t == AxisType.Explicit]
    if explicit:
        coefficients = tuple(
            jax.sharding.reshard(c, _only(s, explicit)) for c, s in zip(coefficients, specs, strict=True)
        )
    context = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        shard,
        mesh=placement.mesh if context.empty else None,
        in_specs=(specs, placement.spec),
        out_specs=(
            *(placement.spec for _ in operation.outs),
            *(_of_coefficient(t, placement.spec) for t in [total] if t),
        ),
        axis_names=set(placement.names),
    )(coefficients, arrays)


def like(gradient: jax.Array, primal: jax.Array) -> jax.Array:
    """A gradient with its primal's dtype, and its sharding over Explicit axes."""
    gradient = gradient.astype(primal.dtype)
    wanted = jax.typeof(primal).sharding
    if any(t == AxisType.Explicit for _, t in _axes(wanted.mesh)):
        gradient = jax.sharding.reshard(gradient, wanted.spec)
    return gradient


def _mesh(arrays: Arrays) -> Any:
    """The mesh that the arrays live on, by their types; else the one in context. Axes of size 1 shard nothing."""
    for x in arrays:
        mesh = getattr(jax.typeof(x).sharding, "mesh", None)
        if mesh is not None and not mesh.empty:
            return mesh
    return jax.sharding.get_abstract_mesh()


def _axes(mesh: Any) -> list[tuple[str, AxisType]]:
    if mesh.empty or mesh.size == 1:
        return []
    return [(name, kind) for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if mesh.shape[name] > 1]


def _sizes(mesh: Any, names: list[str]) -> str:
    return "(" + ", ".join(f"{name}: {mesh.shape[name]}" for name in names) + ")"


def _explicit_spec(arrays: Arrays, names: list[str]) -> PartitionSpec:
    """How the sum of the arrays would be sharded over Explicit axes, by JAX's own rule and with its own errors."""
    if not names:
        return PartitionSpec()
    total = jax.eval_shape(lambda *xs: functools.reduce(jnp.add, xs), *arrays)
    return total.sharding.spec


def _check_spec(spec: PartitionSpec, mesh: Any, names: list[str], shape: tuple[int, ...]) -> None:
    if len(spec) > len(shape):
        raise ValueError(f"spec must have at most one entry an axis of x; got {spec} for shape {shape}")
    for extent, entry in zip(shape, spec, strict=False):
        shards = 1
        for name in _names(entry):
            if name not in names:
                raise ValueError(f"spec must name Auto axes of the mesh {_sizes(mesh, names)}; got {name!r} in {spec}")
            shards *= mesh.shape[name]
        if extent % shards:
            raise ValueError(
                f"spec must divide x evenly: {spec} cuts an axis of {extent} into {shards} for shape {shape}"
            )


def _names(entry: Any) -> tuple[Any, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def _join(one: Any, other: Any) -> Any:
    names = (*_names(one), *_names(other))
    return names[0] if len(names) == 1 else names or None


def _padded(spec: PartitionSpec, rank: int) -> tuple[Any, ...]:
    return (*spec, *(None,) * (rank - len(spec)))


def _of_coefficient(shape: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
    """The spec of a coefficient with the arrays' rank: as theirs along the axes that it has; 1 is never sharded."""
    entries = _padded(spec, len(shape))
    return PartitionSpec(*(None if extent == 1 else entry for extent, entry in zip(shape, entries, strict=True)))


def _only(spec: PartitionSpec, names: list[str]) -> PartitionSpec:
    """The part of a spec over some of the mesh's axes."""
    kept = [tuple(name for name in _names(entry) if name in names) for entry in spec]
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in kept))


def _varying_alike(coefficients: Arrays, arrays: Arrays) -> tuple[Arrays, Arrays]:
    """Inside `shard_map`: all operands varying over the same mesh axes, as `jnp.add` makes them. The transpose of this
    cast is the sum over those axes: of a replicated gain's gradient, over the shards."""
    everything = (*coefficients, *arrays)
    axes = frozenset[str]().union(*map(_varies_on, everything))

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _varies_on(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return tuple(map(vary, coefficients)), tuple(map(vary, arrays))


def _varies_on(x: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)
