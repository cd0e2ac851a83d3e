"""The same call on each shard of sharded arrays.

The operations here are elementwise, so that every shard of the result needs the same shard of its operands and nothing
else: no collective, but for the sum of a gain's gradient over the axes that the gain doesn't vary on. XLA can't find
that out by itself, because a Mosaic kernel is opaque to its partitioner; `jax.shard_map` tells it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tiledops import contract, modes
from tiledops.operation import Operation
from tiledops.stream import stream

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the arrays of a call live: over all axes of `mesh` that are not taken yet, cut by `spec`."""

    mesh: Any
    spec: PartitionSpec

    def batched(self, at: int, spmd_name: Any, array: jax.Array) -> Placement:
        """Of arrays like `array`, which has one more axis `at`: sharded by its type over Explicit axes, over Auto axes
        by the names that `jax.vmap` was given."""
        entries = list(_padded(self.spec, array.ndim - 1))
        entries.insert(at, _join(_padded(jax.typeof(array).sharding.spec, array.ndim)[at], spmd_name))
        return Placement(self.mesh, PartitionSpec(*entries))


SPEC = "say how x and y are sharded (spec=jax.P(...), one entry an axis of x)"
SPECS = "say how the leaves are sharded (specs=, a tree of jax.P(...), or a prefix of it)"


def place(
    coefficients: Arrays, arrays: Arrays, *, spec: PartitionSpec | None, opaque: bool, way_out: str = SPEC
) -> tuple[Placement | None, Arrays, Arrays]:
    """How a call is to be partitioned over Auto axes, and its operands brought together for it.

    On a mesh with Explicit axes, the arrays' own types say how they are sharded. On one with Auto axes, `spec` does.
    Inside `jax.shard_map`, and where there is no mesh, the call runs as it stands.

    Args:
      coefficients: arrays whose extents are 1 or those of the arrays' last axes, or one an example.
      arrays: of one shape. They and the coefficients are resharded or refused as `a*x + y` would be.
      spec: the arrays' PartitionSpec over Auto axes.
      opaque: whether a kernel runs. Plain jnp needs no help from `spec`.
      way_out: how the caller's user gives `spec`.

    Raises:
      ValueError: no `spec` on a mesh with Auto axes, or one that doesn't fit the mesh or the shape.
    """
    coefficients, arrays = varying_alike(coefficients, arrays)
    arrays = alike(coefficients, arrays)
    mesh = _mesh(arrays)
    auto = {name: mesh.shape[name] for name in _names_of(mesh, AxisType.Auto)}
    if not opaque or not auto:
        return None, coefficients, arrays
    if spec is None and any(size > 1 for size in auto.values()):
        raise ValueError(
            f"the arrays are on a mesh with Auto axes {_sizes(auto)}, over which XLA can't partition a kernel. Either "
            f"{way_out}, or "
            "give the mesh Explicit axes (jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Explicit,) * n)), or "
            "call inside jax.shard_map"
        )
    given = PartitionSpec(*(spec or ()))
    _check_spec(given, auto, arrays[0].shape)
    rank = len(arrays[0].shape)
    joint = map(_join, _padded(jax.typeof(arrays[0]).sharding.spec, rank), _padded(given, rank))
    return Placement(mesh, PartitionSpec(*joint)), coefficients, arrays


def alike(coefficients: Arrays, arrays: Arrays) -> Arrays:
    """Arrays of one shape with one sharding over Explicit axes: that of `a*x + y`, by JAX's rule and with its errors.

    An array on a single device, beside others on a mesh that is in no context, is left to `jax.jit`."""
    if not _names_of(_mesh(arrays), AxisType.Explicit):
        return arrays

    def total(coefficients: Arrays, arrays: Arrays) -> jax.Array:
        rank = len(arrays[0].shape)
        aligned = (c.reshape((1,) * (rank - len(c.shape)) + c.shape) for c in coefficients)
        first, *others = (x.astype(jnp.float32) for x in arrays)
        return functools.reduce(jnp.add, [*(c.astype(jnp.float32) * first for c in aligned), first, *others])

    (out,) = jax.make_jaxpr(total)(coefficients, arrays).out_avals
    return tuple(x if jax.typeof(x).sharding.mesh.empty else _reshard(x, out.sharding) for x in arrays)


def residence(x: jax.Array) -> tuple[Any, ...]:
    """Where an array lives, by its type: kernels of several arrays take those of one residence."""
    sharding = jax.typeof(x).sharding
    cut = tuple((axis, entry) for axis, entry in enumerate(sharding.spec) if entry is not None)
    return sharding.mesh, cut, _varies_on(x)


def per_shard(
    operation: Operation, placement: Placement | None, coefficients: Arrays, arrays: Arrays
) -> tuple[jax.Array, ...]:
    """Runs a streamed operation on each shard: where `placement` says, else over the mesh's Explicit axes as the
    arrays' types cut them. Its stored arrays are sharded as its operands are; its sum is added up over the shards that
    it runs across, in float32, and sharded along the axes that it keeps."""
    if operation.mode != modes.REFERENCE:
        contract.check_static(arrays[0].shape)
        placement = placement or _by_type(arrays)
    if operation.mode == modes.SIMULATE:
        _check_simulator(_mesh(arrays), nested=placement is not None)
    if placement is None:
        return stream(operation, coefficients, arrays)
    rank = len(arrays[0].shape)
    total = operation.total

    def shard(coefficients: Arrays, arrays: Arrays) -> tuple[jax.Array, ...]:
        coefficients, arrays = varying_alike(coefficients, arrays)
        if total is None:
            return stream(operation, coefficients, arrays)
        local = tuple(extent if full > 1 else 1 for extent, full in zip(arrays[0].shape, total, strict=True))
        *outs, part = stream(dataclasses.replace(operation, total=local), coefficients, arrays)
        across = [
            n for e, full in zip(_padded(placement.spec, rank), total, strict=True) if full == 1 for n in _names(e)
        ]
        return (*outs, jax.lax.psum(part, tuple(across)) if across else part)

    specs = tuple(_of_coefficient(c.shape, placement.spec) for c in coefficients)
    explicit = _names_of(placement.mesh, AxisType.Explicit)
    if explicit:

        def there(x: jax.Array, spec: PartitionSpec) -> jax.Array:
            return _reshard(x, NamedSharding(placement.mesh, _only(spec, explicit)))

        coefficients = tuple(map(there, coefficients, specs))
        arrays = tuple(there(x, placement.spec) for x in arrays)
    context = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        shard,
        mesh=placement.mesh if context.empty else None,
        in_specs=(specs, placement.spec),
        out_specs=(
            *(placement.spec for _ in operation.outs),
            *(_of_coefficient(t, placement.spec) for t in [total] if t is not None),
        ),
    )(coefficients, arrays)


def _by_type(arrays: Arrays) -> Placement | None:
    """Where the arrays' types say that they live, on a mesh with Explicit axes."""
    mesh = _mesh(arrays)
    if not _names_of(mesh, AxisType.Explicit):
        return None
    types = (jax.typeof(x).sharding for x in arrays)  # an array that is older than the mesh knows of none
    return Placement(mesh, next((s.spec for s in types if not s.mesh.empty), PartitionSpec()))


def like(gradient: jax.Array, primal: Any) -> jax.Array:
    """A gradient with the dtype of its primal's type, and its sharding over Explicit axes."""
    gradient = gradient.astype(primal.dtype)
    if _names_of(primal.sharding.mesh, AxisType.Explicit):
        gradient = _reshard(gradient, primal.sharding)
    return gradient


def _reshard(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    return x if jax.typeof(x).sharding == sharding else jax.sharding.reshard(x, sharding)


def _mesh(arrays: Arrays) -> Any:
    """The mesh in context; else the one that the arrays live on, by their types."""
    context = jax.sharding.get_abstract_mesh()
    meshes = [context, *(getattr(jax.typeof(x).sharding, "mesh", context) for x in arrays)]
    return next((mesh for mesh in meshes if not mesh.empty), context)


def _names_of(mesh: Any, *kinds: AxisType) -> tuple[str, ...]:
    """The axes of some kinds. One of size 1 shards nothing, but XLA still asks who partitions the kernel over it; in a
    mesh of one device only JAX does, and only about Explicit axes, which types name there too."""
    if mesh.empty:
        return ()
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(n for n, kind in axes if kind in kinds and (mesh.size > 1 or kind == AxisType.Explicit))


def _sizes(axes: dict[str, int]) -> str:
    return "(" + ", ".join(f"{name}: {size}" for name, size in axes.items()) + ")"


def _check_simulator(mesh: Any, *, nested: bool) -> None:
    """What the simulator can't do: it lives in one process. Its callbacks are ordered, and no jaxlib compiles those in
    every `shard_map` inside another: up to 0.11.1 it aborts the process if both cut something, from then on it refuses
    unless both do."""
    if jax.process_count() > 1 and mesh.size > jax.local_device_count():
        raise NotImplementedError(
            f"mode='simulate' simulates the devices of one process; this mesh of {mesh.size} devices spans "
            f"{jax.process_count()} processes. Use mode='reference' here, or run it on TPU"
        )
    outer = _names_of(mesh, AxisType.Manual)
    inner = _names_of(mesh, AxisType.Auto, AxisType.Explicit)
    both = all(math.prod(mesh.shape[name] for name in axes) > 1 for axes in (outer, inner))
    if nested and outer and both == (jaxlib.version.__version_info__ < (0, 11, 2)):
        raise NotImplementedError(
            f"mode='simulate' can't run in a jax.shard_map over {outer} that leaves the mesh axes "
            f"{inner} to another: jaxlib {jaxlib.version.__version__} can't compile it. Let the shard_map take "
            "all axes (no axis_names), use mode='reference' here, or run it on TPU"
        )


def _check_spec(spec: PartitionSpec, sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    if len(spec) > len(shape):
        raise ValueError(f"spec must have at most one entry an axis of the array; got {spec} for shape {shape}")
    given = [name for entry in spec for name in _names(entry)]
    if len(set(given)) < len(given):
        raise ValueError(f"spec must name each axis of the mesh once at most; got {spec}")
    for extent, entry in zip(shape, spec, strict=False):
        shards = 1
        for name in _names(entry):
            if name not in sizes:
                raise ValueError(f"spec must name Auto axes of the mesh {_sizes(sizes)}; got {name!r} in {spec}")
            shards *= sizes[name]
        if extent % shards:
            raise ValueError(
                f"spec must divide the array evenly: {spec} cuts an axis of {extent} into {shards} for shape {shape}"
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


def _only(spec: PartitionSpec, names: tuple[str, ...]) -> PartitionSpec:
    """The part of a spec over some of the mesh's axes."""
    kept = [tuple(name for name in _names(entry) if name in names) for entry in spec]
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in kept))


def varying_alike(*groups: Arrays) -> tuple[Arrays, ...]:
    """Inside `shard_map`: all operands varying over the same mesh axes, as `jnp.add` makes them. The transpose of this
    cast is the sum over those axes: of a replicated gain's gradient, over the shards."""
    axes = frozenset[str]().union(*(_varies_on(x) for group in groups for x in group))

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _varies_on(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return tuple(tuple(map(vary, group)) for group in groups)


def _varies_on(x: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)
