"""Forward mode: jvp, linearize, jacfwd and hessian, by every subset of the operands, alone and around reverse mode."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BY_NAME, CASES, Case
from jax.sharding import AxisType, PartitionSpec
from meshes import BLOCK, BOTH, KINDS, MODES, SHAPE, mesh_of, put, values
from programs import SUBSETS, fresh, jnp_axpy, kernels, of
from test_higher_derivatives import assert_alike, composite

import tiledops
from tiledops import chips, compiled
from tiledops.axpy import axpy_where


def directions(operands: Any) -> list[np.ndarray]:
    """A tangent for each, of its dtype."""
    return [np.cos(3 * np.asarray(v, np.float32) + 1).astype(v.dtype) for v in operands]


def along(argnums: tuple[int, ...], *operands: Any) -> Any:
    """The result and its tangent, by some of a, x and y: the first half of the operands; the others are tangents."""
    f, wanted = of(argnums, tiledops.axpy, *operands[:3])
    return jax.jvp(f, wanted, [operands[3 + i] for i in argnums])


def check(case: Case, argnums: tuple[int, ...], wrap: Any = fresh, **fields: Any) -> None:
    operands = case.operands()[:3]
    tangents = directions(operands)
    with tiledops.use_config(block=case.block, **fields):
        out, tangent = wrap(lambda *o: along(argnums, *o))(*map(jnp.asarray, (*operands, *tangents)))
    oracle.assert_same_bits(out, oracle.axpy(*operands))
    assert (tangent.dtype, tangent.shape) == (out.dtype, out.shape)
    given = tuple(tangents[i] if i in argnums else None for i in range(3))
    oracle.assert_within(tangent, *oracle.tangent(operands, given))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case(case: Case) -> None:
    check(case, (0, 1, 2), mode="reference")


@pytest.mark.parametrize("argnums", SUBSETS, ids=str)
@pytest.mark.parametrize("name", ["bf16_into_f32", "feature", "rank4_example", "vector_feature"])
def test_every_subset(name: str, argnums: tuple[int, ...]) -> None:
    check(BY_NAME[name], argnums, mode="reference")


@pytest.mark.parametrize("name", ["merged_feature", "column_example", "bf16_into_f32"])
def test_in_the_simulator(name: str) -> None:
    check(BY_NAME[name], (0, 1, 2), mode="simulate")


@MODES
def test_eagerly(mode: str) -> None:
    check(BY_NAME["lesson"], (0, 1, 2), lambda f: f, mode=mode)


@pytest.mark.parametrize("argnums", SUBSETS, ids=str)
def test_a_kernel_for_each_product(argnums: tuple[int, ...]) -> None:
    """And none for what has no tangent. The first of them adds y's, if it has one."""
    operands = tuple(map(jnp.asarray, BY_NAME["lesson"].operands()[:3]))
    products = len({0, 1} & set(argnums))
    first = [] if not products else ["axpy"] if 2 in argnums else ["scale"]
    with tiledops.use_config(mode="tpu"):
        traced = jax.make_jaxpr(lambda *o: along(argnums, *o))(*operands, *operands)
        report = compiled.compile_for(lambda *o: along(argnums, *o), *operands, *operands, chip="v5e")
    assert kernels(traced) == Counter(["tiledops_axpy"])  # the tangent is one step of it
    names = ["axpy", *first, *["axpy"] * (products - len(first))]
    assert Counter(kernel.name for kernel in report.kernels) == Counter(f"tiledops_{name}" for name in names)


@pytest.mark.parametrize(("case", "chip"), [*zip(CASES, itertools.cycle(chips.CHIPS), strict=False)], ids=str)
def test_compiled_for_tpu(case: Case, chip: str) -> None:
    """Three kernels: the result, a product with its addition, another."""
    structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in case.operands()[:3]]
    with tiledops.use_config(block=case.block):
        report = compiled.compile_for(lambda *o: along((0, 1, 2), *o), *structs, *structs, chip=chip)
    assert [kernel.name for kernel in report.kernels] == ["tiledops_axpy"] * 3


WAYS = {
    "forward over reverse": lambda f: lambda *o: jax.jvp(jax.grad(f, (0, 1, 2)), o, o)[1],
    "reverse over forward": lambda f: jax.grad(lambda *o: jax.jvp(f, o, o)[1], (0, 1, 2)),
    "forward over forward": lambda f: lambda *o: jax.jvp(lambda *o: jax.jvp(f, o, o)[1], o, o)[1],
    "forward over reverse over reverse": lambda f: (
        lambda *o: jax.jvp(jax.grad(lambda *o: sum(g.sum() for g in jax.grad(f, (0, 1, 2))(*o)), (0, 1, 2)), o, o)[1]
    ),
}


def test_a_learned_gain_moves_nine_arrays_where_xla_moves_six() -> None:
    """Of arrays that no fast memory holds, as the README says; within a thousandth, for the scalars."""
    shape = (65536, 4096)
    structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((), shape, shape)]
    for op, arrays in ((tiledops.axpy, 9), (jnp_axpy, 6)):
        report = compiled.compile_for(lambda *o, op=op: jax.jvp(op, o[:3], o[3:]), *structs, *structs, chip="v5e")
        assert report.hbm_bytes == pytest.approx(arrays * 4 * shape[0] * shape[1], rel=1e-3)


HESSIANS = [(name, "reference") for name in ("lesson", "feature", "example", "vector_feature", "rank0")]


@pytest.mark.parametrize(("name", "mode"), [*HESSIANS, ("feature", "simulate")])
@pytest.mark.parametrize("way", WAYS)
def test_around_another_derivative(way: str, name: str, mode: str) -> None:
    case = BY_NAME[name]
    operands = tuple(map(jnp.asarray, case.operands()[:3]))
    with tiledops.use_config(mode=mode):
        got = fresh(WAYS[way](composite(tiledops.axpy, case)))(*operands)
    assert_alike(got, WAYS[way](composite(jnp_axpy, case))(*operands))


@pytest.mark.parametrize("inner", SUBSETS, ids=str)
@pytest.mark.parametrize("outer", SUBSETS, ids=str)
def test_forward_over_reverse_by_subsets(inner: tuple[int, ...], outer: tuple[int, ...], reference: None) -> None:
    """A part of what the backward kernel returns may have no tangent."""
    case = BY_NAME["feature"]
    operands = tuple(map(jnp.asarray, case.operands()[:3]))

    def second(op: Any) -> Any:
        f, wanted = of(outer, jax.grad(composite(op, case), inner), *operands)
        return jax.jvp(f, wanted, wanted)

    assert_alike(second(tiledops.axpy), second(jnp_axpy))


@MODES
@pytest.mark.parametrize("gain", [(), (5,), (2, 1)], ids=str)
def test_a_hessian(gain: tuple[int, ...], mode: str) -> None:
    """`jax.hessian` is forward over reverse, with every direction at once under `jax.vmap`."""
    a, x, y = (jnp.asarray(v) for v in values(gain, (2, 5), (2, 5)))

    def hessian(op: Any) -> Any:
        return jax.jit(jax.hessian(lambda a, x: jnp.sin(op(a, x, y)).sum(), (0, 1)))(a, x)

    with tiledops.use_config(mode=mode):
        got = hessian(tiledops.axpy)
    assert_alike(got, hessian(jnp_axpy))


@MODES
def test_a_jacobian_and_what_linearize_gives(mode: str) -> None:
    a, x, y = (jnp.asarray(v) for v in values((5,), (2, 5), (2, 5)))
    with tiledops.use_config(mode=mode):
        got = jax.jacfwd(tiledops.axpy, (0, 1, 2))(a, x, y)
        out, tangent = jax.linearize(tiledops.axpy, a, x, y)
        twice = tangent(a, x, y), jax.vmap(tangent, (None, -1, None))(a, jnp.stack([x, -x], -1), y)
    assert_alike(got, jax.jacfwd(jnp_axpy, (0, 1, 2))(a, x, y))
    assert_alike(twice, (2 * a * x + y, jnp.stack([2 * a * x + y, y])))
    assert_alike(out, a * x + y)


@MODES
def test_in_loops_and_checkpoints(mode: str) -> None:
    case = BY_NAME["example"]
    operands = tuple(map(jnp.asarray, case.operands()[:3]))

    def loop(op: Any) -> Any:
        layer = jax.checkpoint(lambda y, each: (jnp.sin(op(*each, y)), None))

        def run(a: Any, x: Any, y: Any) -> Any:
            return jax.lax.scan(layer, y, (jnp.stack([a, -a]), jnp.stack([x, x])))[0]

        return jax.jit(lambda *o: jax.jvp(jax.grad(lambda *o: run(*o).sum()), o, o))(*operands)

    with tiledops.use_config(mode=mode):
        got = loop(tiledops.axpy)
    assert_alike(got, loop(jnp_axpy))


@MODES
def test_what_is_masked_has_no_tangent(mode: str) -> None:
    a, x, y, tangent = (jnp.asarray(v) for v in values((), (2, 5), (2, 5), (2, 5)))
    mask = jnp.array([[1.0], [0.0]])
    poisoned = jnp.where(mask != 0, x, jnp.nan)
    with tiledops.use_config(mode=mode):
        _, got = jax.jvp(lambda a, x: axpy_where(mask, a, x, y), (a, poisoned), (a, tangent))
        added = jax.jvp(lambda x, y: axpy_where(mask, a, x, y), (poisoned, y), (tangent, y))[1]
    assert_alike(got, mask * (a * x + a * tangent))
    assert_alike(added, mask * (a * tangent) + y)


@MODES
@KINDS
def test_on_a_mesh(kind: AxisType, mode: str) -> None:
    """The tangent lies where the result does, and its kernels run on each shard."""
    operands = values((256,), SHAPE, SHAPE)
    specs = (PartitionSpec("model"), BOTH, BOTH)
    spec = None if kind == AxisType.Explicit else BOTH
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh), tiledops.use_config(mode=mode, block=BLOCK):
        placed = put(mesh, specs, operands)
        out, tangent = jax.jit(lambda *o: jax.jvp(lambda *o: tiledops.axpy(*o, spec=spec), o, o))(*placed)
        mapped = jax.shard_map(tiledops.axpy, in_specs=specs, out_specs=BOTH)
        inside = jax.jit(lambda *o: jax.jvp(mapped, o, o)[1])(*placed)
    assert tangent.sharding.is_equivalent_to(out.sharding, 2)
    for value in (tangent, inside):
        oracle.assert_within(value, *oracle.tangent(tuple(operands), tuple(operands)))
