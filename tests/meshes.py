"""Meshes of the eight simulated devices: what lies on them, and how it must come out."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

MODES = pytest.mark.parametrize("mode", ["reference", "simulate"])
KINDS = pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name)
SHAPE, BLOCK = (16, 256), (8, 128)
BOTH = PartitionSpec("data", "model")

# A gain, and how it is sharded: as x along the axis that it has, or on every device whole.
GAINS = {
    "scalar": ((), PartitionSpec()),
    "feature": ((256,), PartitionSpec("model")),
    "feature_replicated": ((256,), PartitionSpec()),
    "example": ((16, 1), PartitionSpec("data")),
    "example_replicated": ((16, 1), PartitionSpec()),
}


def values(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def mesh_of(kind: AxisType, shape: tuple[int, ...] = (4, 2), names: tuple[str, ...] = ("data", "model")) -> Any:
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def put(mesh: Any, specs: Any, arrays: Any) -> list[jax.Array]:
    return [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip(arrays, specs, strict=True)]


def differentiated(op: Any) -> Any:
    def run(a: Any, x: Any, y: Any, g: Any) -> Any:
        out, pullback = jax.vjp(op, a, x, y)
        return out, *pullback(g)

    return run


def assert_right(results: Any, a: Any, x: Any, y: Any, g: Any) -> None:
    """Elementwise, the same bits as on one device. The gain's gradient is one float32 sum, in another order."""
    out, da, dx, dy = results
    oracle.assert_same_bits(out, oracle.axpy(a, x, y))
    oracle.assert_same_bits(dx, oracle.dx(a, x, g))
    oracle.assert_same_bits(dy, g)
    oracle.assert_within(da, *oracle.da(a, x, g))


def assert_sharded_alike(results: Any, expected: Any) -> None:
    for one, other in zip(results, expected, strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim), (one.sharding, other.sharding)
