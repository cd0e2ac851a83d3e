"""On meshes of eight simulated devices: the result and every gradient as on one, sharded as jnp's would be."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, PartitionSpec
from meshes import (
    BLOCK,
    BOTH,
    GAINS,
    KINDS,
    MODES,
    SHAPE,
    assert_right,
    assert_sharded_alike,
    differentiated,
    mesh_of,
    put,
    values,
)
from programs import fresh, jnp_axpy

import tiledops
from tiledops import transforms

# A stalled simulator must not stall the suite.
pytestmark = pytest.mark.timeout(120)


@MODES
@KINDS
@pytest.mark.parametrize("gain", GAINS)
def test_under_jit(gain: str, kind: AxisType, mode: str) -> None:
    shape, spec = GAINS[gain]
    arrays = values(shape, SHAPE, SHAPE, SHAPE)
    mesh = mesh_of(kind)
    given = None if kind == AxisType.Explicit else BOTH
    with jax.set_mesh(mesh), tiledops.use_config(mode=mode, block=BLOCK):
        placed = put(mesh, (spec, BOTH, BOTH, BOTH), arrays)
        results = jax.jit(differentiated(lambda *o: tiledops.axpy(*o, spec=given)))(*placed)
        expected = jax.jit(differentiated(jnp_axpy))(*placed)
    assert_right(results, *arrays)
    if kind == AxisType.Explicit:
        assert_sharded_alike(results, expected)


@MODES
@pytest.mark.parametrize("spec", [BOTH, ("data",), (None, "model"), (("data", "model"),), (None, ("model", "data"))])
def test_any_spec(spec: Any, mode: str) -> None:
    """Eagerly, the mesh in no context: the arrays' types alone name it."""
    spec = PartitionSpec(*spec)
    arrays = values((256,), SHAPE, SHAPE, SHAPE)
    placed = put(mesh_of(AxisType.Explicit), (PartitionSpec(), spec, spec, spec), arrays)
    with tiledops.use_config(mode=mode, block=BLOCK):
        results = fresh(differentiated(tiledops.axpy))(*placed)
    assert_right(results, *arrays)
    assert results[0].sharding.is_equivalent_to(placed[1].sharding, 2)


@MODES
def test_eagerly(mode: str) -> None:
    arrays = values((), SHAPE, SHAPE, SHAPE)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh), tiledops.use_config(mode=mode, block=BLOCK):
        results = differentiated(tiledops.axpy)(*put(mesh, (PartitionSpec(), BOTH, BOTH, BOTH), arrays))
    assert_right(results, *arrays)


@MODES
@pytest.mark.parametrize("apart", ["a", "x", "y"])
def test_eagerly_beside_an_array_on_one_device(apart: str, mode: str) -> None:
    """The mesh in no context: jnp moves the other array there."""
    arrays = values((256,), SHAPE, SHAPE, SHAPE)
    placed = put(mesh_of(AxisType.Explicit), (PartitionSpec("model"), BOTH, BOTH, BOTH), arrays)
    operands = [v if name == apart else p for name, v, p in zip("axyg", arrays, placed, strict=True)]
    with tiledops.use_config(mode=mode, block=BLOCK):
        results = differentiated(tiledops.axpy)(*operands)
    assert_right(results, *arrays)
    expected = jnp_axpy(*operands[:3])
    assert results[0].sharding.is_equivalent_to(expected.sharding, 2)


@MODES
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eagerly"])
def test_arrays_that_are_older_than_the_mesh(wrap: Any, mode: str) -> None:
    """Their types name none; jnp takes them as they are."""
    arrays = values((256,), SHAPE, SHAPE, SHAPE)
    operands = [jnp.asarray(v) for v in arrays]
    with jax.set_mesh(mesh_of(AxisType.Explicit)), tiledops.use_config(mode=mode, block=BLOCK):
        results = wrap(differentiated(tiledops.axpy))(*operands)
    assert_right(results, *arrays)


@MODES
def test_an_optimizers_step_eagerly(mode: str) -> None:
    """The mesh in no context, and the hyperparameters on one device."""
    w, b = values(SHAPE, (256,))
    mesh = mesh_of(AxisType.Explicit)
    params = dict(zip("wb", put(mesh, (BOTH, PartitionSpec("model")), (w, b)), strict=True))
    optimizer = transforms.sgd(0.5, momentum=0.9)
    with tiledops.use_config(mode=mode):
        stepped, _ = optimizer.step(params, optimizer.init(params), params)
    for name, value in (("w", w), ("b", b)):
        np.testing.assert_array_equal(stepped[name], 0.5 * value)
        assert stepped[name].sharding.is_equivalent_to(params[name].sharding, value.ndim)


@MODES
@KINDS
@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (1, 1, 8), (1, 1)], ids=str)
def test_axes_of_one_shard_nothing(shape: tuple[int, ...], kind: AxisType, mode: str) -> None:
    arrays = values((256,), SHAPE, SHAPE, SHAPE)
    names = ("data", "model", "expert")[: len(shape)]
    mesh, spec = mesh_of(kind, shape, names), PartitionSpec(names[shape.index(max(shape))])
    given = None if kind == AxisType.Explicit else spec
    with jax.set_mesh(mesh), tiledops.use_config(mode=mode, block=BLOCK):
        placed = put(mesh, (PartitionSpec(), spec, spec, spec), arrays)
        results = jax.jit(differentiated(lambda *o: tiledops.axpy(*o, spec=given)))(*placed)
    assert_right(results, *arrays)


@MODES
def test_explicit_and_auto_axes_in_one_mesh(mode: str) -> None:
    arrays = values((256,), SHAPE, SHAPE, SHAPE)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh), tiledops.use_config(mode=mode, block=BLOCK):
        placed = put(mesh, (PartitionSpec("model"), BOTH, BOTH, BOTH), arrays)
        spec = PartitionSpec(None, "model")
        assert_right(jax.jit(differentiated(lambda *o: tiledops.axpy(*o, spec=spec)))(*placed), *arrays)


# Shardings that differ, and what is refused


@MODES
@pytest.mark.parametrize(
    ("x_spec", "y_spec"), [(BOTH, ("data",)), ((), BOTH), (("data",), (None, "model")), ((), ("model",))], ids=str
)
def test_differing_shardings_meet_as_jnps(x_spec: Any, y_spec: Any, mode: str) -> None:
    arrays = values((), SHAPE, SHAPE)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh), tiledops.use_config(mode=mode, block=BLOCK):
        a, x, y = put(mesh, (PartitionSpec(), PartitionSpec(*x_spec), PartitionSpec(*y_spec)), arrays)
        expected, pullback = jax.vjp(jax.jit(jnp_axpy), a, x, y)
        results = fresh(differentiated(tiledops.axpy))(a, x, y, expected)
        assert_right(results, *arrays, np.asarray(expected))
        assert_sharded_alike(results, (expected, *pullback(expected)))


@MODES
@pytest.mark.parametrize(
    ("a", "x", "y"), [(None, "data", "data"), ("model", "data", "data"), ("model", None, None)], ids=str
)
def test_a_gain_sharded_where_x_is_not(a: Any, x: Any, y: Any, mode: str) -> None:
    arrays = values((256,), SHAPE, SHAPE)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh), tiledops.use_config(mode=mode, block=BLOCK):
        placed = put(mesh, map(PartitionSpec, (a, x, y)), arrays)
        expected, pullback = jax.vjp(jax.jit(jnp_axpy), *placed)
        results = fresh(differentiated(tiledops.axpy))(*placed, expected)
        assert_right(results, *arrays, np.asarray(expected))
        assert_sharded_alike(results, (expected, *pullback(expected)))


@MODES
@pytest.mark.parametrize(
    ("a", "x", "y"), [((), "data", "model"), ("data", ("data", "model"), ("data", "model"))], ids=str
)
def test_shardings_that_conflict_are_refused_as_jnps(a: Any, x: Any, y: Any, mode: str) -> None:
    arrays = values((256,), SHAPE, SHAPE)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh), tiledops.use_config(mode=mode):
        a, x, y = put(
            mesh, [PartitionSpec(*s) if isinstance(s, tuple) else PartitionSpec(s) for s in (a, x, y)], arrays
        )
        with pytest.raises(Exception) as jnps:  # noqa: PT011  JAX has no public name for it
            jnp_axpy(a, x, y)
        with pytest.raises(type(jnps.value), match=re.escape(str(jnps.value).split(":")[0])):
            tiledops.axpy(a, x, y)


@pytest.mark.parametrize("mode", ["simulate", "tpu"])
def test_an_auto_mesh_without_a_spec(mode: str) -> None:
    mesh = mesh_of(AxisType.Auto)
    x = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    with jax.set_mesh(mesh), tiledops.use_config(mode=mode):
        with pytest.raises(ValueError, match="can't partition a kernel") as refused:
            jax.eval_shape(lambda x: tiledops.axpy(2.0, x, x), x)
        jax.eval_shape(lambda x: tiledops.axpy(2.0, x, x, spec=PartitionSpec()), x)  # replicated, if one says so
    message = str(refused.value)
    assert "(data: 4, model: 2)" in message
    for way_out in ("spec=jax.P(", "AxisType.Explicit", "jax.shard_map"):
        assert way_out in message


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (PartitionSpec("batch"), "spec must name Auto axes of the mesh .*got 'batch'"),
        (PartitionSpec("data", None, None), "at most one entry an axis"),
        (PartitionSpec(None, "data"), "divide the array evenly"),
    ],
    ids=str,
)
def test_a_spec_that_does_not_fit(spec: PartitionSpec, message: str) -> None:
    x = jax.ShapeDtypeStruct((16, 129), jnp.float32)
    with (
        jax.set_mesh(mesh_of(AxisType.Auto)),
        tiledops.use_config(mode="simulate"),
        pytest.raises(ValueError, match=message),
    ):
        jax.eval_shape(lambda x: tiledops.axpy(2.0, x, x, spec=spec), x)


# vmap over a sharded axis

BATCH = PartitionSpec("data", "model")


@MODES
@pytest.mark.parametrize("shared", [False, True])
@KINDS
def test_vmap_keeps_the_mapped_axis_sharded(kind: AxisType, shared: bool, mode: str) -> None:
    """By its type, or by `spmd_axis_name`; and the gradients of gains, one an element of the batch, stay apart."""
    a, x, y, g = values((128,) if shared else (8,), *(((8, 16, 128),) * 3))
    mesh = mesh_of(kind)
    explicit = kind == AxisType.Explicit
    op = lambda *o: tiledops.axpy(*o, spec=None if explicit else PartitionSpec("model"))  # noqa: E731
    mapped = jax.vmap(differentiated(op), (None if shared else 0, 0, 0, 0), spmd_axis_name=None if explicit else "data")
    with jax.set_mesh(mesh), tiledops.use_config(mode=mode, block=BLOCK):
        placed = put(mesh, (PartitionSpec() if shared else PartitionSpec("data"), *(BATCH,) * 3), (a, x, y, g))
        compiled = jax.jit(mapped).lower(*placed).compile()
        out, da, dx, dy = compiled(*placed)
    gain = a if shared else a[:, None, None]
    oracle.assert_same_bits(out, oracle.axpy(gain, x, y))
    oracle.assert_same_bits(dx, oracle.dx(gain, x, g))
    oracle.assert_same_bits(dy, g)
    for i in range(8):
        oracle.assert_within(np.asarray(da)[i], *oracle.da(a if shared else a[i], x[i], g[i]))
    if explicit or mode == "simulate":
        assert all(r.sharding.is_equivalent_to(placed[1].sharding, 3) for r in (out, dx, dy))
        assert " all-gather(" not in compiled.as_text()


def test_a_device_a_core_and_much_to_read() -> None:
    """JAX 0.10's own callbacks wait for ever for their 100 KiB and more, where as many devices as cores simulate."""
    mesh = mesh_of(AxisType.Explicit)
    (x,) = values((64, 4096))  # 128 KiB, one tile, a device
    with jax.set_mesh(mesh), tiledops.use_config(mode="simulate"):
        (placed,) = put(mesh, [PartitionSpec(("data", "model"))], [x])
        oracle.assert_same_bits(tiledops.axpy(2.0, placed, placed), oracle.axpy(2.0, x, x))


@MODES
@pytest.mark.parametrize("axes", [(None, 0, None), (None, None, 0), (0, None, None), (0, 0, 0)], ids=str)
def test_a_vmap_over_an_explicit_axis(axes: tuple[int | None, ...], mode: str) -> None:
    """What isn't mapped is on no axis of the mesh, and joins what is: as in jnp, and with no copy of it elsewhere."""
    arrays = [
        jnp.ones(shape if axis is None else (4, *shape)) for shape, axis in zip([(), (8, 6), (8, 6)], axes, strict=True)
    ]
    mesh = mesh_of(AxisType.Explicit)

    def run(op: Any) -> Any:
        def of(*operands: Any) -> Any:
            mapped = jax.vmap(op, axes)
            gradients = jax.grad(lambda *o: mapped(*o).sum(), (0, 1, 2))(*operands)
            each = jax.vmap(jax.grad(lambda *o: op(*o).sum(), (0, 1, 2)), axes)(*operands)
            return mapped(*operands), gradients, each

        specs = [PartitionSpec() if axis is None else PartitionSpec("data") for axis in axes]
        return jax.jit(of)(*put(mesh, specs, arrays))

    with jax.set_mesh(mesh), tiledops.use_config(mode=mode):
        for got, wanted in zip(jax.tree.leaves(run(tiledops.axpy)), jax.tree.leaves(run(jnp_axpy)), strict=True):
            assert got.sharding.is_equivalent_to(wanted.sharding, wanted.ndim), (got.sharding, wanted.sharding)
            np.testing.assert_array_equal(got, wanted)  # small whole numbers
