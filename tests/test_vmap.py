"""Under jax.vmap: any subset of the operands, along any axis, nested, and either side of a gradient."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from programs import differentiated, for_two_cores, kernels

import tiledops
from tiledops import chips, compiled

SIZE = 3
SHAPE = (5, 7)
RANDOM = np.random.default_rng(0)


def operand(shape: tuple[int, ...], axis: int | None) -> np.ndarray:
    """Standard normal, with the mapped axis inserted."""
    whole = shape if axis is None else np.insert(np.array(shape, int), axis % (len(shape) + 1), SIZE)
    return RANDOM.standard_normal(tuple(whole)).astype(np.float32)


def each(values: tuple[np.ndarray, ...], axes: tuple[int | None, ...]) -> Any:
    for i in range(SIZE):
        yield tuple(v if axis is None else np.take(v, i, axis) for v, axis in zip(values, axes, strict=True))


def check(gain: tuple[int, ...], axes: tuple[int | None, ...], shape: tuple[int, ...] = SHAPE, **fields: Any) -> None:
    """Result and gradients of every element of the batch, against NumPy."""
    values = operand(gain, axes[0]), operand(shape, axes[1]), operand(shape, axes[2]), operand(shape, 0)
    axes = (*axes, 0)

    with tiledops.use_config(**fields):
        out, da, dx, dy = jax.vmap(differentiated, axes)(*values)
    for i, (a, x, y, g) in enumerate(each(values, axes)):
        oracle.assert_same_bits(out[i], oracle.axpy(a, x, y))
        oracle.assert_within(da[i], *oracle.da(a, x, g))
        oracle.assert_same_bits(dx[i], oracle.dx(a, x, g))
        oracle.assert_same_bits(dy[i], g)


GAINS = {"scalar": ((), (None, 0)), "feature": ((7,), (None, 0, 1)), "example": ((5, 1), (None, 0, 1, -1))}
AXES = [
    (kind, (a, x, y))
    for kind, (_, gain_axes) in GAINS.items()
    for a, x, y in itertools.product(gain_axes, (None, 0, -1), (None, 1))
]


@pytest.mark.parametrize(("kind", "axes"), AXES, ids=str)
def test_any_subset_along_any_axis(kind: str, axes: tuple[int | None, ...]) -> None:
    check(GAINS[kind][0], axes, mode="reference")


KINDS = pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("scalar", (None, 0, 0)),  # a gain of all, arrays one row of tiles an element
        ("scalar", (0, 0, 0)),  # one gain an element
        ("scalar", (0, None, None)),  # gains alone: x and y are repeated
        ("feature", (0, 1, -1)),  # gains that vary along two axes come by parts
        ("example", (None, 0, None)),
    ],
    ids=str,
)
OF_KIND = {"scalar": (), "feature": (130,), "example": (9, 1)}


@KINDS
def test_in_the_simulator(kind: str, axes: tuple[int | None, ...]) -> None:
    check(OF_KIND[kind], axes, (9, 130), mode="simulate", block=(8, 128))


@KINDS
@pytest.mark.parametrize("order", [1, 2])
def test_compiled_for_tpu(kind: str, axes: tuple[int | None, ...], order: int) -> None:
    """One kernel a batch, for the result and for the gradients; nested, with the outer axis last everywhere."""
    shapes = [OF_KIND[kind], (9, 130), (9, 130)]
    shapes = [s if axis is None else operand(s, axis).shape for s, axis in zip(shapes, axes, strict=True)]
    mapped = jax.vmap(jax.value_and_grad(lambda *o: tiledops.axpy(*o).sum(), (0, 1, 2)), axes)
    if order == 2:
        shapes, mapped = [(*s, 4) for s in shapes], jax.vmap(mapped, -1, -1)
    report = compiled.compile_for(mapped, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes), chip="v6e")
    assert sorted(kernel.name for kernel in report.kernels) == ["tiledops_axpy", "tiledops_scale_and_dot"]


LYING = {
    "features inside": ((3, 768), (100, 10, 3, 768), [(0, 2, 2)]),
    "a shared vector": ((768,), (100, 20, 24, 768), [(None, 1, 1)]),
    "gains of each position, shared by all examples": ((31, 512), (31, 50, 512), [(None, 1, 1), (0, 0, 0)]),
    "the last axis": ((), (16, 24, 1024), [(None, 2, 2)]),
}


@pytest.mark.parametrize("chip", chips.CHIPS)
@pytest.mark.parametrize("case", LYING)
def test_a_mapped_axis_stays_where_it_lies(case: str, chip: str) -> None:
    """No array is copied to bring it to the front, and what isn't mapped is read once: XLA's bytes, both ways. Where
    gains of several rows are laid out a row at a time, they are read and written once more, and so is their gradient.
    """
    gain, shape, nested = LYING[case]
    a, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (gain, shape))

    def reports(op: Any) -> list[Any]:
        for axes in reversed(nested):
            op = jax.vmap(op, axes, axes[1])
        programs = (op, a, x, x), (lambda a, x, y, g: jax.vjp(op, a, x, y)[1](g)[:2], a, x, x, x)
        return [compiled.compile_for(*program, chip=chip) for program in programs]

    for ours, plain in zip(reports(tiledops.axpy), reports(lambda a, x, y: a * x + y), strict=True):
        assert len(ours.kernels) == 1
        relaid = 4 * 4 * math.prod(gain) if ours.extra else 0
        assert ours.hbm_bytes <= plain.hbm_bytes + for_two_cores(ours, gain) + relaid


VARYING = {
    ((3, 257), (3, 16, 257)): "a vector of gains for each leading index, as in a conditioned block",
    ((24, 130), (24, 3, 130)): "along the rows and the columns of every leading index: XLA's order is (1, 0, 2)",
    ((3, 140), (3, 140, 130)): "a column for each leading index: it comes as a row",
    ((3, 130), (3, 5, 16, 130)): "axes that merge between those that gains vary along",
}


@pytest.mark.parametrize("chip", ["v5e", "v5p"])
@pytest.mark.parametrize(("gains", "shape"), VARYING, ids=str)
def test_gains_that_vary_along_two_axes(gains: tuple[int, ...], shape: tuple[int, ...], chip: str) -> None:
    a, x, y, g = (RANDOM.standard_normal(s).astype(np.float32) for s in (gains, shape, shape, shape))
    by_feature = gains[-1] == shape[-1]
    mapped = jax.vmap(tiledops.axpy) if by_feature else jax.vmap(jax.vmap(tiledops.axpy))
    aligned = a.reshape(a.shape[0], *[1] * (len(shape) - 2), a.shape[1]) if by_feature else a[..., None]
    with tiledops.use_config(mode="simulate", block=(8, 128)), tiledops.simulated_chip(chip):
        out, pullback = jax.vjp(mapped, a, x, y)
        da, dx, dy = pullback(jnp.asarray(g))
    oracle.assert_agree((aligned, x, y, g), out, da.reshape(aligned.shape), dx, dy)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_out_axes(axis: int) -> None:
    a, x, y = np.float32(0.5), operand(SHAPE, 0), operand(SHAPE, 0)
    with tiledops.use_config(mode="reference"):
        out = jax.vmap(tiledops.axpy, (None, 0, 0), axis)(a, x, y)
    oracle.assert_same_bits(np.moveaxis(out, axis, 0), oracle.axpy(a, x, y))


@pytest.mark.parametrize("mode", ["reference", "simulate"])
def test_nested(mode: str) -> None:
    """The inner axis of x is the outer one of a."""
    a, x, y = (RANDOM.standard_normal(s).astype(np.float32) for s in ((2, 3), (3, 2, 9, 130), (9, 130, 3)))
    with tiledops.use_config(mode=mode, block=(8, 128)):
        inner = jax.vmap(tiledops.axpy, (0, 0, None))
        out = jax.vmap(inner, (1, 0, 2), 1)(a, x, y)
    expected = oracle.axpy(a.T[:, :, None, None], x, np.broadcast_to(np.moveaxis(y, -1, 0)[:, None], x.shape))
    oracle.assert_same_bits(out, expected.swapaxes(0, 1))


@pytest.mark.parametrize("mode", ["reference", "simulate"])
@pytest.mark.parametrize("gain", [(), (130,), (9, 1)], ids=str)
def test_the_gradient_of_a_vmap_sums_over_what_is_shared(gain: tuple[int, ...], mode: str) -> None:
    a, x, y, g = operand(gain, None), *(operand((9, 130), 0) for _ in range(3))

    def loss(a: Any, x: Any, y: Any) -> Any:
        return (jax.vmap(tiledops.axpy, (None, 0, 0))(a, x, y) * g).sum()

    with tiledops.use_config(mode=mode, block=(8, 128)):
        da, dx, dy = jax.grad(loss, (0, 1, 2))(a, x, y)
    parts, tolerances = zip(*(oracle.da(a, x[i], g[i]) for i in range(SIZE)), strict=True)
    oracle.assert_within(da, sum(parts), 2 * sum(tolerances))
    oracle.assert_same_bits(dx, oracle.dx(a, x, g))
    oracle.assert_same_bits(dy, g)


def test_a_vmap_of_second_derivatives() -> None:
    a, x, y = operand((), 0), operand(SHAPE, 0), operand(SHAPE, 0)

    def curvature(op: Any) -> Any:
        slope = lambda a, x, y: jax.grad(lambda a: jnp.sin(op(a, x, y)).sum())(a)  # noqa: E731
        return jax.vmap(jax.grad(slope, (0, 1, 2)))(a, x, y)

    with tiledops.use_config(mode="reference"):
        got = curvature(tiledops.axpy)
    for d, expected in zip(got, curvature(lambda a, x, y: a * x + y), strict=True):
        np.testing.assert_allclose(d, expected, rtol=0, atol=2e-5 * float(jnp.abs(expected).max()))


def test_a_jacobian() -> None:
    """One row of the identity an output: vmap over the cotangent alone."""
    a, x, y = np.float32(0.5), operand((4,), None), operand((4,), None)
    with tiledops.use_config(mode="reference"):
        da, dx, dy = jax.jacrev(tiledops.axpy, (0, 1, 2))(a, x, y)
    np.testing.assert_array_equal(da, x)
    np.testing.assert_array_equal(dx, 0.5 * np.eye(4))
    np.testing.assert_array_equal(dy, np.eye(4))


def test_a_batch_is_one_kernel() -> None:
    x = jnp.ones((SIZE, 2, 9, 130))
    with tiledops.use_config(mode="simulate"):
        mapped = jax.vmap(jax.vmap(lambda a, x: tiledops.axpy(a, x, x), (None, 0)), (0, 0))
        traced = jax.make_jaxpr(jax.grad(lambda a, x: mapped(a, x).sum(), (0, 1)))(jnp.ones(SIZE), x)
    assert kernels(traced) == {"tiledops_axpy": 1, "tiledops_scale_and_dot": 1}


@pytest.mark.parametrize("mode", ["reference", "simulate", "tpu"])
def test_what_is_not_mapped_is_computed_once(mode: str) -> None:
    """In a batch of something else: one call for all, and its result is no batch, as `jax.hessian` counts on."""
    a, x = jnp.float32(0.5), jnp.ones((9, 130))

    def beside(z: Any) -> Any:
        return z, jax.value_and_grad(lambda a: tiledops.axpy(a, x, x).sum())(a), tiledops.apply_updates(x, x)

    with tiledops.use_config(mode=mode):
        shapes = jax.eval_shape(jax.vmap(beside, out_axes=(0, None, None)), jnp.arange(3.0))
        traced = jax.make_jaxpr(jax.hessian(lambda z: z**2 * tiledops.axpy(a, x, x).sum()))(2.0)
    assert [s.shape for s in jax.tree.leaves(shapes)] == [(3,), (), (), (9, 130)]
    assert kernels(traced) == ({} if mode == "reference" else {"tiledops_axpy": 1})


@pytest.mark.parametrize("mode", ["reference", "simulate", "tpu"])
@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_an_empty_batch(kind: str, mode: str) -> None:
    """As jnp's: empty results, and a gradient of zeros by a gain that is shared. There is no tile for a kernel."""
    gain, x = jnp.ones(() if kind == "scalar" else (5,)), jnp.ones((0, 2, 5))

    def loss(a: Any, x: Any, y: Any) -> Any:
        out = jax.vmap(tiledops.axpy, (None, 0, 0))(a, x, y)
        return out.sum(), out

    def run(a: Any, x: Any) -> Any:
        each = jax.vmap(jax.grad(lambda a, x: tiledops.axpy(a, x, x).sum(), (0, 1)), (None, 0))(a, x)
        return jax.grad(loss, (0, 1, 2), has_aux=True)(a, x, x), each

    with tiledops.use_config(mode=mode):
        ((da, dx, dy), out), each = jax.jit(run)(gain, x)
    np.testing.assert_array_equal(da, np.zeros(gain.shape, np.float32))
    assert dx.shape == dy.shape == out.shape == each[1].shape == x.shape
    assert each[0].shape == (0, *gain.shape)


def test_a_batch_of_one_and_a_name() -> None:
    x = operand(SHAPE, None)[None]

    def centred(x: Any) -> Any:
        return tiledops.axpy(-1.0, jax.lax.pmean(x, "batch"), x)

    for mode in ("reference", "simulate"):  # the simulator takes a named axis for one of devices
        with tiledops.use_config(mode=mode):
            np.testing.assert_array_equal(jax.vmap(centred, axis_name="batch")(x), np.zeros_like(x))


def test_under_jit_and_scan() -> None:
    a, x, y = operand((), 0), operand(SHAPE, 0), operand(SHAPE, 0)

    def repeated(a: Any, x: Any, y: Any) -> Any:
        return jax.lax.scan(lambda y, _: (tiledops.axpy(a, x, y), None), y, length=2)[0]

    with tiledops.use_config(mode="reference"):
        out = jax.jit(jax.vmap(repeated))(a, x, y)
    gain = a[:, None, None]
    oracle.assert_same_bits(out, oracle.axpy(gain, x, oracle.axpy(gain, x, y)))
