"""Compiled for whole pods that are not attached: no collective but the sum for the gain, nothing around the kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import tiledops
from tiledops import compiled

PODS = ("v5e:4x4", "v5e:16x16", "v5p:2x2x4", "v5p:8x8x8", "v6e:16x16", "tpu7x:2x2x2")
BOTH = PartitionSpec("data", "model")
COLUMNS = 2048  # 512 on each of four chips


def mesh_of(pod: str, kind: AxisType = AxisType.Explicit) -> Mesh:
    devices = np.array(compiled.topology_devices(pod))
    return Mesh(devices.reshape(-1, 4), ("data", "model"), axis_types=(kind, kind))


def struct(mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def operands(mesh: Mesh, gain: tuple[int, ...] = (COLUMNS,), spec: PartitionSpec = PartitionSpec("model")) -> Any:  # noqa: B008
    """A float32 gain and three arrays of 256 x 512 bfloat16 on each chip."""
    x = struct(mesh, (mesh.devices.shape[0] * 256, COLUMNS), BOTH)
    return struct(mesh, gain, spec, jnp.float32), x, x, x


def backward(op: Any = tiledops.axpy) -> Any:
    """The result and the gradients of gain and branch. (y's is g itself.)"""

    def run(a: Any, x: Any, y: Any, g: Any) -> Any:
        out, pullback = jax.vjp(op, a, x, y)
        return out, *pullback(g)[:2]

    return run


def assert_two_kernels_and(report: compiled.Report, *sums: str) -> None:
    assert sorted(kernel.name for kernel in report.kernels) == ["tiledops_axpy", "tiledops_scale_and_dot"]
    assert [(c.opcode.removesuffix("-start"), c.shape.split("{")[0]) for c in report.collectives] == [
        ("all-reduce", shape) for shape in sums
    ]
    assert report.extra == ()


@pytest.mark.parametrize("pod", PODS)
def test_forward_has_no_collective(pod: str) -> None:
    a, x, y, _ = operands(mesh_of(pod))
    report = compiled.compile_for(tiledops.axpy, a, x, y)
    assert [kernel.name for kernel in report.kernels] == ["tiledops_axpy"]
    assert report.collectives == ()
    assert report.extra == ()
    assert report.hbm_bytes <= 3 * 256 * 512 * 2 + 4096  # each shard moved once, and its part of the gain


@pytest.mark.parametrize("pod", PODS)
def test_backward_sums_the_gain_alone(pod: str) -> None:
    """Over the axis that the gain doesn't vary on, in float32: each chip's 512 numbers."""
    assert_two_kernels_and(compiled.compile_for(backward(), *operands(mesh_of(pod))), "f32[1,512]")


def test_a_scalar_gain_is_summed_over_all() -> None:
    args = operands(mesh_of("v5e:4x4"), (), PartitionSpec())
    assert_two_kernels_and(compiled.compile_for(backward(), *args), "f32[1,1]")


def test_a_gain_an_example_is_summed_over_the_model() -> None:
    args = operands(mesh_of("v5e:4x4"), (4 * 256, 1), PartitionSpec("data"))
    assert_two_kernels_and(compiled.compile_for(backward(), *args), "f32[256,1]")


def test_auto_axes_by_a_spec() -> None:
    op = lambda *o: tiledops.axpy(*o, spec=BOTH)  # noqa: E731
    report = compiled.compile_for(backward(op), *operands(mesh_of("v5e:4x4", AxisType.Auto)))
    assert_two_kernels_and(report, "f32[1,512]")


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map(check_vma: bool) -> None:
    specs = (PartitionSpec("model"), BOTH, BOTH)
    op = jax.shard_map(tiledops.axpy, in_specs=specs, out_specs=BOTH, check_vma=check_vma)
    report = compiled.compile_for(backward(op), *operands(mesh_of("v5e:4x4", AxisType.Auto)))
    assert_two_kernels_and(report, "f32[512]")


def test_inside_a_partial_shard_map() -> None:
    """Manual over the data; the model's axis is the mesh's own affair."""
    specs = (PartitionSpec(), PartitionSpec("data"), PartitionSpec("data"))

    def op(a: Any, x: Any, y: Any) -> Any:
        inner = lambda *o: tiledops.axpy(*o, spec=PartitionSpec(None, "model"))  # noqa: E731
        return jax.shard_map(inner, in_specs=specs, out_specs=PartitionSpec("data"), axis_names={"data"})(a, x, y)

    report = compiled.compile_for(backward(op), *operands(mesh_of("v5e:4x4", AxisType.Auto)))
    assert_two_kernels_and(report, "f32[512]")


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name)
def test_vmap_over_a_sharded_axis(kind: AxisType) -> None:
    """One gain for all, but a gradient of it for each example: summed over the model alone."""
    mesh = mesh_of("v5e:4x4", kind)
    explicit = kind == AxisType.Explicit
    op = lambda *o: tiledops.axpy(*o, spec=None if explicit else PartitionSpec("model"))  # noqa: E731
    x = struct(mesh, (8, 1024, 512), BOTH)
    a = struct(mesh, (512,), PartitionSpec(), jnp.float32)
    mapped = jax.vmap(backward(op), (None, 0, 0, 0), spmd_axis_name=None if explicit else "data")
    assert_two_kernels_and(compiled.compile_for(mapped, a, x, x, x), "f32[2,1,512]")


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name)
def test_an_axis_of_one(kind: AxisType) -> None:
    """XLA asks who partitions a kernel even there."""
    devices = np.array(compiled.topology_devices("v5e:4x4"))
    mesh = Mesh(devices.reshape(16, 1), ("data", "model"), axis_types=(kind, kind))
    x = struct(mesh, (16 * 256, 512), PartitionSpec("data"))
    spec = None if kind == AxisType.Explicit else PartitionSpec("data")
    report = compiled.compile_for(lambda x, y: tiledops.axpy(0.5, x, y, spec=spec), x, x)
    assert [kernel.name for kernel in report.kernels] == ["tiledops_axpy"]
    assert (report.collectives, report.extra) == ((), ())
