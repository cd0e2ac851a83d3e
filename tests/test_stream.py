"""The engine in the simulator: no race, on one core and on two, and what each kernel tells XLA of its cost."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BY_NAME, F32, Case
from jax.experimental.pallas import tpu as pltpu
from programs import racing

import tiledops
from tiledops import blocks, chips, contract, places, stream, tiling
from tiledops.operation import Operation


def run(case: Case, **fields: Any) -> None:
    """The result and all gradients, against NumPy."""
    a, x, y, g = case.operands()
    with tiledops.use_config(mode="simulate", **{"block": case.block, **fields}):
        out, pullback = jax.vjp(tiledops.axpy, *map(jnp.asarray, (a, x, y)))
        da, dx, dy = jax.block_until_ready(pullback(jnp.asarray(g)))
    oracle.assert_same_bits(out, oracle.axpy(a, x, y))
    oracle.assert_same_bits(dx, oracle.dx(a, x, g))
    oracle.assert_same_bits(dy, g)
    oracle.assert_within(da, *oracle.da(a, x, g))


def assert_race_free(detectors: list[Any], kernels: int) -> None:
    assert len(detectors) == kernels
    for detector in detectors:
        assert detector.reads  # it was on, and saw the kernel work
        assert detector.writes
        assert not detector.races_found


@pytest.mark.parametrize("name", ["lesson", "slabs", "example", "column_feature", "apart", "vector", "rank4_example"])
def test_no_race(name: str, detectors: list[Any]) -> None:
    run(BY_NAME[name])
    assert_race_free(detectors, kernels=2)


@pytest.mark.parametrize("name", ["lesson", "column_feature", "vector_bf16"])
def test_no_race_with_three_buffers(name: str, detectors: list[Any]) -> None:
    run(BY_NAME[name], buffers=3)
    assert_race_free(detectors, kernels=2)


# v5p: the tiles are shared out among two TensorCores

TWO_CORES = {
    "lesson": "three rows of tiles: the second core's last step is idle",
    "even": "two rows of tiles, one each",
    "wide": "one row of tiles: the columns are shared out, and each core keeps its part of the sum",
    "example_tiles": "two blocks of rows, the sum along them",
    "column_feature": "the sum down the rows, the columns shared out: a last addition joins the cores'",
    "apart": "a gain an example: the sum's cores would write one another's",
    "merged_feature": "the features' sum, several tiles each way",
    "vector": "rank 1, three blocks",
    "whole": "one tile: one core",
}


@pytest.mark.parametrize("name", TWO_CORES)
def test_two_cores(name: str, detectors: list[Any]) -> None:
    with tiledops.simulated_chip("v5p"):
        run(BY_NAME[name])
    assert_race_free(detectors, kernels=2)


# Gains that don't stay in fast memory: their parts come with the tiles

PARTS = {
    "feature": "parts of a row of gains, each for a column of tiles",
    "example_tiles": "parts of a column, turned into rows, with bfloat16 gains",
    "column_feature": "one part for all tiles, down the rows",
    "merged_feature": "several tiles each way",
    "apart": "one number a leading index",
    "rank4_example": "one number for several leading indices",
    "whole_feature": "one tile",
}


@pytest.mark.parametrize("chip", ["v5e", "v5p"])
@pytest.mark.parametrize("name", PARTS)
def test_a_gain_by_parts(name: str, chip: str, parted: None, detectors: list[Any]) -> None:
    case = BY_NAME["slabs" if name == "whole_feature" else name]
    with tiledops.simulated_chip(chip):
        run(case)
    assert_race_free(detectors, kernels=2)


@pytest.mark.parametrize("fields", [{"schedule": "synchronous"}, {"schedule": "blocked"}, {"buffers": 3}], ids=str)
def test_a_gain_by_parts_otherwise_scheduled(fields: dict[str, Any], parted: None) -> None:
    run(BY_NAME["feature"], **fields)


@pytest.fixture
def parted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No vector is short enough to stay."""
    jax.clear_caches()
    for share in ("VECTOR_VMEM_SHARE", "VECTOR_SMEM_SHARE"):
        monkeypatch.setattr(places, share, 0.0)
    yield
    jax.clear_caches()


@pytest.mark.parametrize("fields", [{"schedule": "synchronous"}, {"schedule": "blocked"}, {"buffers": 3}], ids=str)
@pytest.mark.parametrize("name", ["lesson", "feature"])
def test_two_cores_otherwise_scheduled(name: str, fields: dict[str, Any], detectors: list[Any]) -> None:
    with tiledops.simulated_chip("v5p"):
        run(BY_NAME[name], **fields)
    assert_race_free(detectors, kernels=2)


def test_the_detector_finds_a_race(detectors: list[Any]) -> None:
    try:
        jax.block_until_ready(racing(jnp.ones((8, 128))))
        found = detectors[-1].races_found  # jax 0.10
    except Exception as error:  # jax 0.11 and newer raise
        found = "RACE DETECTED" in str(error)
        pltpu.reset_tpu_interpret_mode_state()
    assert found


# What lies beyond the edge


@pytest.mark.parametrize("name", ["lesson", "column_example", "vector"])
def test_a_sum_takes_nothing_from_beyond_the_edge(name: str) -> None:
    """The simulator fills it with NaN, which a sum would spread; and zeros of infinite operands are still NaN."""
    case = BY_NAME[name]
    a, x, y, g = case.operands()
    with tiledops.use_config(mode="simulate", block=case.block):
        da = jax.grad(lambda a: jnp.vdot(tiledops.axpy(a, x, y), g))(jnp.asarray(a))
    assert np.all(np.isfinite(da))


@pytest.mark.parametrize("chip", ["v5e", "v5p"])
def test_several_examples_a_tile(chip: str, monkeypatch: pytest.MonkeyPatch, detectors: list[Any]) -> None:
    """Each slab has its own example's gain, each example its own sum; the last tile hangs over the edge."""
    case = Case("examples", (9, 8, 130), None, F32, F32, "example", F32, "two examples a tile, five tiles")
    monkeypatch.setattr(tiling, "LATENCY_SECONDS", 0.0)
    monkeypatch.setattr(tiling, "STEPS", 4)
    with tiledops.simulated_chip(chip):
        run(case)
    assert_race_free(detectors, kernels=2)


def test_infinities_of_the_array_itself_reach_the_sum() -> None:
    x = np.ones((9, 130), np.float32)
    x[8, 129] = np.inf
    with tiledops.use_config(mode="simulate", block=(8, 128)):
        da = jax.grad(lambda a: tiledops.axpy(a, x, x).sum())(0.5)
    assert np.isposinf(da)


# The programs


def pallas_calls(jaxpr: Any) -> list[Any]:
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            found.append(equation)
        else:
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
                found += pallas_calls(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("schedule", ["pipelined", "synchronous", "blocked"])
def test_the_cost_that_xla_is_told(schedule: str) -> None:
    """Each array once in its logical bytes, and two operations an element."""
    with tiledops.use_config(mode="simulate", block=(8, 128), schedule=schedule):
        jaxpr = jax.make_jaxpr(tiledops.axpy)(0.5, jnp.ones((17, 257)), jnp.ones((17, 257)))
    (call,) = pallas_calls(jaxpr)
    cost = call.params["cost_estimate"]
    assert (cost.flops, cost.transcendentals, cost.bytes_accessed) == (2 * 17 * 257, 0, 3 * 4 * 17 * 257)
    assert call.params["name"] == "tiledops_axpy"


def test_no_operand_is_padded_or_copied() -> None:
    """Around the kernel there are views alone; that they are bitcasts, the TPU compiler says (test_compiled.py)."""
    allowed = {"jit", "pjit", "pallas_call", "transpose", "reshape", "squeeze"}
    allowed |= {"convert_element_type", "broadcast_in_dim", "copy", "tiledops_call"}
    allowed |= {"tiledops_simulated", "io_callback", "select_n"}  # a kernel in the simulator takes its turn
    for name in ("lesson", "column_feature", "merged", "vector"):
        case = BY_NAME[name]
        with tiledops.use_config(mode="simulate", block=case.block):
            jaxpr = jax.make_jaxpr(tiledops.axpy)(*case.operands()[:3])
        assert primitives(jaxpr) - allowed == set()
        assert "pad" not in primitives(jaxpr)


def primitives(jaxpr: Any) -> set[str]:
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        if equation.primitive.name != "pallas_call":
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
                names |= primitives(inner) if hasattr(inner, "eqns") else set()
    return names


def operation(**fields: Any) -> Operation:
    config = tiledops.PipelineConfig(block=(8, 128))
    fields = {"config": config, "mode": "simulate", "chip": chips.chip_info("v5e"), **fields}
    return Operation(blocks.axpy, (F32,), None, **fields)


def test_equal_operations_are_traced_once() -> None:
    case = BY_NAME["lesson"]
    a, x, y, _ = map(jnp.asarray, case.operands())
    traced = functools.partial(stream._streamed.trace, operation(), (a.reshape(1, 1),), (x, y))
    before = stream._streamed._cache_size()
    for _ in range(2):
        stream.stream(operation(), (a.reshape(1, 1),), (x, y))
    assert stream._streamed._cache_size() == before + 1
    assert len(pallas_calls(traced().jaxpr)) == 1


def test_in_place_gives_the_same_bits(detectors: list[Any]) -> None:
    """The result may take y's buffer: each tile is read before it is written."""
    a, x, y, _ = BY_NAME["lesson"].operands()
    gain, arrays = (jnp.asarray(a).reshape(1, 1),), (jnp.asarray(x), jnp.asarray(y))
    for buffers in (2, 3):
        config = tiledops.PipelineConfig(block=(8, 128), buffers=buffers)
        (out,) = jax.block_until_ready(stream.stream(operation(aliases=((1, 0),), config=config), gain, arrays))
        oracle.assert_same_bits(out, oracle.axpy(a, x, y))
    np.testing.assert_array_equal(arrays[1], y)  # the caller's y, not donated, is as it was
    assert_race_free(detectors, kernels=2)


@pytest.mark.parametrize("schedule", contract.SCHEDULES)
def test_forward_alone_on_a_ragged_shape(schedule: str) -> None:
    """Not differentiated, the kernel may take y's buffer, and a block that hangs over the edge must still fit it."""
    x = np.arange(17 * 257, dtype=np.float32).reshape(17, 257)
    config = tiledops.PipelineConfig(block=(8, 128), schedule=schedule, mode="simulate")
    np.testing.assert_array_equal(tiledops.axpy(2.0, x, x, config=config), 3 * x)
