"""Inside jax.shard_map: each device its own part, the gradient of what they share summed as jnp's, and nested."""

from __future__ import annotations

from typing import Any

import jax
import jaxlib.version
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, PartitionSpec
from meshes import BLOCK, BOTH, GAINS, KINDS, MODES, SHAPE, assert_right, differentiated, mesh_of, put, values
from programs import fresh, jnp_axpy

import tiledops

# A stalled simulator must not stall the suite.
pytestmark = pytest.mark.timeout(120)


@MODES
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("gain", GAINS)
def test_the_gradient_of_a_shard_map(gain: str, check_vma: bool, mode: str) -> None:
    """A replicated gain's gradient is summed over the axes that it doesn't vary on."""
    shape, spec = GAINS[gain]
    arrays = values(shape, SHAPE, SHAPE, SHAPE)
    with jax.set_mesh(mesh_of(AxisType.Auto)), tiledops.use_config(mode=mode, block=BLOCK):
        mapped = jax.shard_map(tiledops.axpy, in_specs=(spec, BOTH, BOTH), out_specs=BOTH, check_vma=check_vma)
        if "replicated" in gain and shape:  # each device takes its own part of the whole vector
            mapped = jax.shard_map(
                lambda a, x, y: tiledops.axpy(_own(a, x.shape), x, y),
                in_specs=(spec, BOTH, BOTH),
                out_specs=BOTH,
                check_vma=check_vma,
            )
        assert_right(jax.jit(differentiated(mapped))(*arrays), *arrays)


def _own(gain: Any, shape: tuple[int, ...]) -> Any:
    axis, name, extent = (0, "data", shape[0]) if gain.ndim == 2 else (0, "model", shape[1])
    return jax.lax.dynamic_slice_in_dim(gain, jax.lax.axis_index(name) * extent, extent, axis)


@MODES
@KINDS
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_shard_map_without_jit(check_vma: bool, kind: AxisType, mode: str) -> None:
    arrays = values((), SHAPE, SHAPE, SHAPE)
    mesh, specs = mesh_of(kind), (PartitionSpec(), BOTH, BOTH)
    with jax.set_mesh(mesh), tiledops.use_config(mode=mode, block=BLOCK):
        mapped = jax.shard_map(tiledops.axpy, in_specs=specs, out_specs=BOTH, check_vma=check_vma)
        placed = put(mesh, (*specs, BOTH), arrays)
        oracle.assert_same_bits(mapped(*placed[:3]), oracle.axpy(*arrays[:3]))
        assert_right(differentiated(mapped)(*placed), *arrays)


@MODES
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_gradient_inside_a_shard_map(check_vma: bool, mode: str) -> None:
    """As jnp's own: JAX's types, if checked, sum the shared gain's gradient; if not, each shard keeps its own."""
    arrays = values((), SHAPE, SHAPE, SHAPE)
    out = PartitionSpec() if check_vma else PartitionSpec(("data", "model"))

    def inside(op: Any) -> Any:
        def run(*operands: Any) -> Any:
            out, da, dx, dy = differentiated(op)(*operands)
            return out, da if check_vma else da[None], dx, dy

        specs = (PartitionSpec(), BOTH, BOTH, BOTH)
        return jax.jit(jax.shard_map(run, in_specs=specs, out_specs=(BOTH, out, BOTH, BOTH), check_vma=check_vma))

    with jax.set_mesh(mesh_of(AxisType.Auto)), tiledops.use_config(mode=mode, block=BLOCK):
        o, da, dx, dy = inside(tiledops.axpy)(*arrays)
        assert da.shape == inside(jnp_axpy)(*arrays)[1].shape
    assert_right((o, np.asarray(da).sum().astype(np.float32), dx, dy), *arrays)


@MODES
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("gain", ["scalar", "feature"])
def test_a_shard_map_inside_a_vmap_over_a_mesh_axis(gain: str, check_vma: bool, mode: str) -> None:
    """A gain that is shared varies over one axis less than what is mapped: its gradient is summed over that too."""
    shape, spec = GAINS[gain]
    arrays = values(shape, SHAPE, SHAPE, SHAPE)
    rows = PartitionSpec("model")
    mapped = jax.shard_map(tiledops.axpy, in_specs=(spec, rows, rows), out_specs=rows, check_vma=check_vma)
    batched = jax.vmap(mapped, in_axes=(None, 0, 0), spmd_axis_name="data")
    with jax.set_mesh(mesh_of(AxisType.Auto)), tiledops.use_config(mode=mode):
        assert_right(jax.jit(differentiated(batched))(*arrays), *arrays)


NESTED = jaxlib.version.__version_info__ >= (0, 11, 2)


@KINDS
def test_inside_a_partial_shard_map(kind: AxisType) -> None:
    """Manual over one axis, the other left to us."""
    arrays = values((256,), SHAPE, SHAPE, SHAPE)
    mesh = mesh_of(kind)
    given = None if kind == AxisType.Explicit else PartitionSpec(None, "model")
    mapped = jax.shard_map(
        lambda *o: tiledops.axpy(*o, spec=given),
        in_specs=(PartitionSpec(), PartitionSpec("data"), PartitionSpec("data")),
        out_specs=PartitionSpec("data"),
        axis_names={"data"},
    )
    with jax.set_mesh(mesh):
        placed = put(mesh, (PartitionSpec("model"), BOTH, BOTH, BOTH), arrays)
        with tiledops.use_config(mode="reference", block=BLOCK):
            assert_right(fresh(differentiated(mapped))(*placed), *arrays)
        with tiledops.use_config(mode="simulate", block=BLOCK):
            if NESTED:
                assert_right(fresh(differentiated(mapped))(*placed), *arrays)
            else:  # XLA aborts the whole process on an ordered callback there, so that it must not get one
                with pytest.raises(NotImplementedError, match="mode='reference'"):
                    fresh(differentiated(mapped))(*placed)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (2, 2)], ids=str)
def test_what_jaxlib_cannot_simulate_is_refused(shape: tuple[int, int]) -> None:
    """Simulated kernels in a shard_map inside another: old and new jaxlibs fail on opposite meshes."""
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    mapped = jax.shard_map(
        lambda x: tiledops.axpy(2.0, x, x),
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
        axis_names={"data"},
    )
    runs = (shape == (2, 2)) == NESTED
    with jax.set_mesh(mesh), tiledops.use_config(mode="simulate"):
        (x,) = put(mesh, [PartitionSpec("data")], [np.ones(SHAPE, np.float32)])
        if runs:
            np.testing.assert_array_equal(jax.jit(mapped)(x), 3 * np.ones(SHAPE))
        else:
            with pytest.raises(NotImplementedError, match="jaxlib"):
                jax.jit(mapped)(x)
