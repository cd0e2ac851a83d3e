"""The mesh, and where each array lives on it.

Three axes, all Explicit: the types of arrays say how they are cut, and JAX refuses what is ambiguous.

data    rows of the batch; weights are whole copies of each other
fsdp    rows of the batch too; each chip keeps a part of every weight and of its optimizer state, and collects the rest
        of a layer's weights just before it runs
tensor  attention heads and the MLP's features; each branch ends in a sum over the axis
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pod.presets import Settings

AXES = ("data", "fsdp", "tensor")
BATCH = PartitionSpec(("data", "fsdp"), None)  # text: (batch, context)
STREAM = PartitionSpec(("data", "fsdp"), None, None)  # the residual stream: (batch, context, width)

# Of each layer's kernel, without the leading axis of stacked blocks. What is not here (gains, counts) is whole on each.
WEIGHTS = {
    "embed": PartitionSpec(None, "fsdp"),  # (bytes, width)
    "qkv": PartitionSpec("fsdp", None, "tensor", None),  # (width, 3, heads, head width)
    "project": PartitionSpec("tensor", None, "fsdp"),  # (heads, head width, width)
    "up": PartitionSpec("fsdp", "tensor"),  # (width, hidden)
    "down": PartitionSpec("tensor", "fsdp"),  # (hidden, width)
    "head": PartitionSpec("fsdp", None),  # (width, bytes)
}


def make_mesh(devices: Sequence[Any], shape: tuple[int, int, int] | None) -> Mesh:
    """A mesh of all devices; by default up to 16 of them share the weights.

    Raises:
      ValueError: a shape that is not of so many devices.
    """
    if shape is None:
        fsdp = math.gcd(len(devices), 16)
        shape = (len(devices) // fsdp, fsdp, 1)
    if math.prod(shape) != len(devices):
        raise ValueError(
            f"--mesh {','.join(map(str, shape))} is of {math.prod(shape)} devices, and there are {len(devices)}"
        )
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Explicit,) * 3, devices=devices)


def check_fits(settings: Settings, mesh: Mesh) -> None:
    """Raises ValueError if an axis of the mesh does not divide what it cuts."""
    size, sizes = settings.size, dict(mesh.shape)
    rows = sizes["data"] * sizes["fsdp"]
    for what, extent, by, axis in (
        ("--batch", settings.batch, rows, "data*fsdp"),
        (f"the width of preset {settings.preset},", size.width, sizes["fsdp"], "fsdp"),
        (f"the heads of preset {settings.preset},", size.heads, sizes["tensor"], "tensor"),
    ):
        if extent % by:
            raise ValueError(f"{what} {extent} must be a multiple of the mesh's {axis}, {by}")


def different(values: dict[str, Any]) -> list[str]:
    """The names of the values that are not the same in all hosts' processes, each of which calls this."""
    if jax.process_count() == 1:
        return []
    sums = np.array([zlib.crc32(repr(value).encode()) for value in values.values()], np.uint32)
    everywhere = multihost_utils.process_allgather(sums)
    return [name for name, same in zip(values, (everywhere == sums).all(0), strict=True) if not same]


def names(path: Any) -> list[str]:
    """Where a leaf is in a tree, as the user names it: ["blocks", "qkv", "kernel"]."""
    keys = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path)
    return [str(key) for key in keys if key not in ("value", None)]


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Of parameters and of whatever has their names: gradients, an optimizer's state."""

    def of(path: Any, _: Any) -> NamedSharding:
        where = names(path)
        spec = next((WEIGHTS[name] for name in where if name in WEIGHTS), PartitionSpec())
        return NamedSharding(mesh, PartitionSpec(None, *spec) if "blocks" in where and spec else spec)

    return jax.tree_util.tree_map_with_path(of, tree)


def gather(weights: Any, dtype: Any) -> Any:
    """A module's matrices in the dtype of the computation, whole over `fsdp`: the narrower ones travel.

    `reduced` says how the gradient comes back: as each chip's own part of the sum over the batch, which is scattered
    over `fsdp` as it is added up, and only then added up over `data`. Without it every chip gets the whole sum of all
    chips, and keeps its part.
    """

    def one(w: jax.Array) -> jax.Array:
        if w.ndim < 2:
            return w
        spec = jax.typeof(w).sharding.spec
        whole = (None if name == "fsdp" else name for name in spec)
        w = jax.sharding.reshard(w.astype(dtype), PartitionSpec(*spec, reduced={"data"}))
        return jax.sharding.reshard(w, PartitionSpec(*whole, reduced={"data", "fsdp"}))

    return jax.tree.map(one, weights)


def abstract(tree: Any, mesh: Mesh) -> Any:
    """The arrays of a tree as shapes, dtypes and shardings alone."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings(tree, mesh)
    )


COMPUTE = jnp.bfloat16
