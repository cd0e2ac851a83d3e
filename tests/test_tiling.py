"""The tile plan: what holds for every shape, dtype and chip, and the tables that users read."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp
import pytest
from cases import BF16, CASES, DTYPES, F32, SHAPES

import tiledops
from tiledops import PipelineConfig, chips, layouts, places, tiling

ALL_SHAPES = sorted({*SHAPES, *(case.shape for case in CASES), (100_003,), (8, 128), (131, 70_001), (2, 3, 50_000)})
BLOCKS = (None, (8, 128), (16, 256), (64, 1024), (256, 256))


def plans(shape: tuple[int, ...], x: Any, y: Any, block: Any) -> Any:
    """The plans of axpy and of its backward passes, for each kind of gain, one that stays and one that comes by parts,
    and each chip, as `stream` asks for them."""
    for chip, gain in itertools.product(chips.CHIPS, ((), (0,), (len(shape) - 1,), (0, len(shape) - 1))):
        info = chips.chip_info(chip)
        axes = frozenset(gain if shape else ())
        view = layouts.view(shape, x, apart=(axes,))
        home = places.place(view, axes, info)
        homes = [home] if home.whole or not home.axes else [home, dataclasses.replace(home, stays=False)]
        for home, buffers, summed in itertools.product(homes, (2, 3), (False, True)):
            plan = tiling.plan(
                view.shape,
                (x.itemsize, y.itemsize),
                (y.itemsize,),
                info=info,
                config=PipelineConfig(block=block, buffers=buffers),
                places=() if home.whole else (home,),
                kept=home if summed and not home.whole else None,
            )
            yield plan, info, home, summed and not home.whole


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
def test_every_plan(shape: tuple[int, ...], block: Any) -> None:
    for x, y in DTYPES:
        for plan, info, place, summed in plans(shape, x, y, block):
            rank, parts = len(plan.shape), not (place.stays or place.whole)
            assert len(plan.block) == len(plan.grid) == rank
            assert math.prod(plan.shape) == math.prod(shape)

            # Blocks cover the array, none of them lies outside, and none is larger than the array.
            for n, b, count in zip(plan.shape, plan.block, plan.grid, strict=True):
                assert 1 <= b <= n
                assert (count - 1) * b < n <= count * b

            # Blocks are whole along an axis, or end where a tile ends: packed tiles where the plan chose them.
            packed = 4 // min(x.itemsize, y.itemsize) if block is None else 1
            if rank == 1:
                assert plan.block[0] == plan.shape[0] or plan.block[0] % (packed * 1024) == 0
            else:
                rows, cols = plan.block[-2:]
                assert rows == plan.shape[-2] or rows % (packed * 8) == 0
                assert cols == plan.shape[-1] or cols % 128 == 0
                # A vector down the rows lies along the lanes, where slices start at multiples of 128. A vector along
                # a leading axis is a scalar a slab.
                assert not place.column or rows == plan.shape[-2] or rows % 128 == 0
                assert place.whole or all(plan.slab[axis] == 1 for axis in place.leading)

            # Every tile has its turn on some core, and the cores are the chip's.
            assert sorted(plan.order) == list(range(rank))
            assert plan.cores in (1, info.num_cores)
            turns = dict(zip(plan.order, plan.steps, strict=True))
            for axis in range(rank):
                assert turns[axis] * (plan.cores if axis == plan.split else 1) >= plan.grid[axis]
            one_cores_own = summed and (parts or (place.in_smem and bool(place.axes)))
            if (
                info.num_cores == 2
                and plan.programs > 1
                and (not one_cores_own or (parts and plan.split in place.axes))
            ):
                assert plan.cores == 2  # half the chip would idle
            if summed or parts:
                assert {*plan.order[: len(place.axes)]} == {*place.axes}  # one sum is finished before the next
            if one_cores_own and plan.cores == 2:
                assert plan.split in place.axes

            # Slabs are whole tiles, no larger than 96 registers or than what lies along the lanes makes them.
            multiples = [1024] if rank == 1 else [*[1] * (rank - 2), 128 if place.column else 16, 128]
            for slab, extent, multiple in zip(plan.slab, plan.block, multiples, strict=True):
                assert 1 <= slab <= extent
                assert slab == extent or slab % multiple == 0
            assert math.prod(plan.slab) <= tiling.SLAB_ELEMENTS

            # VMEM: the buffers fit what the kernel asks for, and that fits the chip.
            assert plan.buffer_bytes <= plan.vmem_limit_bytes <= info.vmem_capacity_bytes
            moved = 4 * math.prod(place.part(plan.shape)) * (1 + summed) if parts else 0
            assert plan.hbm_bytes == math.prod(shape) * (x.itemsize + 2 * y.itemsize) + moved


@pytest.mark.parametrize("chip", chips.CHIPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_chosen_block_leaves_room_and_steps(shape: tuple[int, ...], chip: str) -> None:
    plan, info = tiledops.plan_tiles(shape, F32, chip=chip), chips.chip_info(chip)
    assert plan.vmem_limit_bytes <= chips.scoped_vmem_bytes(info)
    assert plan.buffer_bytes <= tiling.VMEM_SHARE * chips.scoped_vmem_bytes(info)
    # A step moves what the memory delivers in one latency at least (unless the array is smaller), and a plan that
    # moves many times that has several steps. Equal parts, rounded to tiles, may be half of what was meant.
    latency = tiling.LATENCY_SECONDS * info.mem_bw_bytes_per_second
    assert plan.programs == 1 or plan.hbm_bytes / plan.programs >= latency / 2
    if plan.hbm_bytes > 4 * tiling.STEPS * latency:
        assert plan.programs >= tiling.STEPS / 2


def test_examples_share_a_tile_and_few_rows_do_not_shrink_it() -> None:
    """Neither a scalar an example nor rows that VMEM pads make steps that wait for a DMA's latency."""
    for chip in chips.CHIPS:
        info = chips.chip_info(chip)
        for shape, axis in [((4096, 8, 128), 0), ((3, 1_000_000), 0), ((3, 2, 50_000), 2), ((3, 50_000), 1)]:
            kept = places.Place((axis,), len(shape), stays=True)
            plan = tiling.plan(shape, (4, 4), (4,), info=info, config=PipelineConfig(), places=(kept,), kept=kept)
            latency = tiling.LATENCY_SECONDS * info.mem_bw_bytes_per_second
            assert plan.programs == 1 or plan.hbm_bytes / plan.programs >= latency / 3, (shape, chip)  # uneven parts


@pytest.mark.parametrize("shape", [(), (7,), (17, 257), (3, 3, 64, 128), (1, 257), (257, 1)], ids=str)
def test_a_small_array_is_one_step(shape: tuple[int, ...]) -> None:
    for chip in chips.CHIPS:
        assert tiledops.plan_tiles(shape, BF16, chip=chip).programs == 1


@pytest.mark.parametrize(
    ("block", "programs", "padded_elements", "buffer_bytes"),
    [((8, 128), 9, 9216, 24576), ((16, 128), 6, 12288, 49152), ((16, 256), 4, 16384, 98304)],
)
def test_the_lessons_table(block: tuple[int, int], programs: int, padded_elements: int, buffer_bytes: int) -> None:
    plan = tiledops.plan_tiles((17, 257), jnp.float32, config=PipelineConfig(block=block))
    assert plan.block == block
    assert (plan.programs, plan.padded_elements, plan.buffer_bytes) == (programs, padded_elements, buffer_bytes)


def test_a_third_buffer_is_the_inputs() -> None:
    two, three = (
        tiledops.plan_tiles((17, 257), F32, config=PipelineConfig(block=(8, 128), buffers=n)).buffer_bytes
        for n in (2, 3)
    )
    assert (two, three) == (6 * 4096, 8 * 4096)


def test_use_config_plans_too() -> None:
    with tiledops.use_config(block=(16, 256)):
        assert tiledops.plan_tiles((17, 257), F32).block == (16, 256)
        assert tiledops.plan_tiles((17, 257), F32, config=PipelineConfig()).block == (17, 257)


@pytest.mark.parametrize("chip", chips.CHIPS)
def test_the_largest_block_that_fits_is_accepted_and_the_next_refused(chip: str) -> None:
    capacity = chips.chip_info(chip).vmem_capacity_bytes
    rows = capacity // (6 * 4 * 128) // 8 * 8  # x, y and the result, each twice
    shape = (2 * rows, 256)
    plan = tiledops.plan_tiles(shape, F32, chip=chip, config=PipelineConfig(block=(rows, 128)))
    assert plan.buffer_bytes == rows * 128 * 24
    assert plan.buffer_bytes <= plan.vmem_limit_bytes <= capacity
    with pytest.raises(ValueError, match="bytes of VMEM") as refusal:
        tiledops.plan_tiles(shape, F32, chip=chip, config=PipelineConfig(block=(rows + 8, 128)))
    for word in (f"block=({rows + 8}, 128)", str((rows + 8) * 128 * 24), f"{chip} has {capacity}", "block=None"):
        assert word in str(refusal.value)


def test_a_plan_is_a_static_argument() -> None:
    one, other = (tiledops.plan_tiles((17, 257), "float32") for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
