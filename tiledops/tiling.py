"""How to cut: the block of a tile, the grid of tiles, and what they cost in VMEM and HBM. Pure Python."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from tiledops import chips, contract, layouts
from tiledops.config import PipelineConfig, resolve
from tiledops.layouts import LANES, SUBLANES, round_up
from tiledops.places import Place

OUTPUT_BUFFERS = 2  # emit_pipeline takes a third output buffer only from jax 0.12 on

# The share of a kernel's VMEM that its stream buffers may take: the rest is for gains, accumulators and what Mosaic
# spills. With three float32 streams it makes blocks of 2 MiB on v4 and v5, and of 4 MiB on v6e and TPU7x, which is
# what XLA's own fusion of a*x + y uses there (2.6 and 4 MiB).
VMEM_SHARE = 0.75

# Each kernel says what VMEM it needs, the default too: XLA then keeps more of what its neighbours use there. HBM
# megabytes of a transformer block's training step whose residual add follows a sum over chips, unsaid and said: 1072
# and 1038 on v5e, 1123 and 1105 on v6e, the same elsewhere (`examples/benchmark.py --part block`, jax 0.10.2). To ask
# for less than the default is not safe: what Mosaic spills can be four times the buffers (a vector's sum in bfloat16),
# and saved nothing more there.

# A pipeline hides all but its first load and its last store, so that it should have several steps; but a step that
# moves less than the memory delivers during one DMA's latency (about a microsecond, not measured here) waits.
STEPS = 8
LATENCY_SECONDS = 1e-6

# A block is computed in slabs of at most 96 float32 registers, in loops: enough to fill the vector unit, and the
# program stays small however large the block is. A slab has few columns and many rows, which share what is done once
# a column: spreading a gain over the sublanes, adding to a sum down the rows. Arithmetic over DMA time in bfloat16, the
# worst of `tests/test_bundles.py` on v4 and TPU7x with jax 0.12.0.1, but for a gain's gradient alone and with it: 0.69
# and 0.83 with slabs of whole rows and 64 registers on v4; with 4 columns of registers and 64, 0.51 and 0.65, 0.48 and
# 0.64; with 6 and 96, 0.49 and 0.54, 0.46 and 0.73; with 8 and 96, 0.49 and 0.54, 0.52 and 0.73.
SLAB_ELEMENTS = 96 * SUBLANES * LANES
SLAB_COLUMNS = 6 * LANES
# Without a sum a smaller slab does as well, and compiles faster: by what an element moves, 64 registers for a*x + y in
# bfloat16 and 32 in float32, 19 for SGD and 13 for AdamW. Of 96 and of these, GPT-2 small's step compiles in 0.91 and
# 0.80 s with SGD and 1.56 and 1.20 with AdamW (jax 0.12.0.1, v5e), and a*x + y takes 0.14 and 0.21 of the DMA time in
# float32, 0.38 and 0.44 in bfloat16 (TPU7x, where it takes most).
SLAB_BYTES = 384 * 1024


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """How the tiles of one operation are cut.

    Attributes:
      shape: extents of the array's zero-copy view (`tiledops.layouts`), rank 1 or more; the last two axes are tiled.
      block: extents of one tile; the last tile along an axis may hang over its edge.
      grid: number of tiles along each axis of the view.
      order: axes of the view from the outermost loop to the innermost.
      slab: extents of what is computed at once, no larger than the block.
      cores: TensorCores that share the grid.
      split: the axis of the view whose tiles the cores share out.
      buffers: VMEM buffers of each input.
      buffer_bytes: VMEM of all stream buffers.
      hbm_bytes: HBM read and written, in logical bytes, each operand once.
      vmem_limit_bytes: what the kernel asks of the compiler.
    """

    shape: tuple[int, ...]
    block: tuple[int, ...]
    grid: tuple[int, ...]
    order: tuple[int, ...]
    slab: tuple[int, ...]
    cores: int
    split: int
    buffers: int
    buffer_bytes: int
    hbm_bytes: int
    vmem_limit_bytes: int

    @property
    def programs(self) -> int:
        """Number of tiles, which is the number of grid steps."""
        return math.prod(self.grid)

    @property
    def padded_elements(self) -> int:
        """Elements of all tiles together, what hangs over the edges included."""
        return self.programs * math.prod(self.block)

    def slices(self, place: Place) -> bool:
        """Whether a vector that stays in VMEM is taken a piece at a time, by tile or by slab."""
        axis = place.axis
        if axis is None or place.in_smem:
            return False
        return self.grid[axis] > 1 or self.slab[axis] < self.block[axis]

    def vector_extent(self, axis: int) -> int:
        """Of a vector along one axis in VMEM: room for the last tile's overhang, so that no slice leaves it."""
        if self.grid[axis] == 1:
            return self.shape[axis]
        return round_up(self.grid[axis] * self.block[axis], SUBLANES * LANES)

    @property
    def steps(self) -> tuple[int, ...]:
        """The grid of each core, in loop order: the split axis is shared out, rounded up."""
        return tuple(-(-self.grid[d] // self.cores) if d == self.split else self.grid[d] for d in self.order)


def plan_tiles(
    shape: tuple[int, ...], dtype: Any, *, chip: str = chips.DEFAULT_CHIP, config: PipelineConfig | None = None
) -> TilePlan:
    """The plan of `axpy` for x and y of one shape and dtype.

    >>> plan = tiledops.plan_tiles((17, 257), jnp.float32, config=tiledops.PipelineConfig(block=(8, 128)))
    >>> plan.grid, plan.programs, plan.padded_elements, plan.buffer_bytes
    ((3, 3), 9, 9216, 24576)

    Args:
      shape, dtype: of x, y and the result.
      chip: "v4", "v5e", "v5p", "v6e" or "tpu7x".
      config: block and buffers; default: inside `use_config`, its fields, else chosen for the chip.

    Raises:
      ValueError: an unknown chip, an empty shape, or a block that does not fit the chip's VMEM.
      TypeError: a dtype that is neither float32 nor bfloat16.
    """
    dtype = contract.check_dtype(jnp.dtype(dtype), "dtype")
    size = dtype.itemsize
    view = layouts.view(contract.check_shape(shape), dtype)
    return plan(view.shape, (size, size), (size,), info=chips.chip_info(chip), config=resolve(config))


def plan(
    shape: tuple[int, ...],
    in_bytes: tuple[int, ...],
    out_bytes: tuple[int, ...],
    *,
    info: Any,
    config: PipelineConfig,
    places: tuple[Place, ...] = (),
    kept: Place | None = None,
) -> TilePlan:
    """The plan of any streamed operation.

    Args:
      shape: of the view.
      in_bytes, out_bytes: item sizes of the streams.
      info: the chip (`pltpu.TpuInfo`).
      config: the user's block and buffers.
      places: of the coefficients that are not streams. Down the rows, the second-minor axis, a vector lies along the
        lanes of VMEM, where slices start at multiples of 128: blocks have multiples of 128 rows. What varies along a
        leading axis has one index a slab.
      kept: the place of the sum, if there is one. Its axes are the outer loops, so that one sum is finished before the
        next.
    """
    rank = len(shape)
    varying = (*places, *([kept] if kept else []))
    parts = [place for place in varying if not place.stays]  # float32
    column = any(place.column for place in varying)
    ones = frozenset(axis for place in varying for axis in place.leading)
    streams = config.buffers * sum(in_bytes) + OUTPUT_BUFFERS * sum(out_bytes)  # VMEM bytes of one element
    streams += 4 * config.buffers * sum(place.rows and place.cols for place in parts)  # the others are thin
    multiples = _multiples(rank, min((*in_bytes, *out_bytes), default=4), column)
    if config.block is None:
        accumulated = _accumulated(shape, kept) if kept else 0
        block = _choose(shape, info, streams + accumulated, sum(in_bytes) + sum(out_bytes), multiples)
    else:
        block = _users(shape, config.block, multiples, column)
    grid = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    # The outer loops run along the axes of the sum; else along those of coefficients that come by parts, each once.
    outer = {axis for place in ([kept] if kept else parts) for axis in place.axes}
    order = tuple(sorted(range(rank), key=lambda axis: axis not in outer))
    # The cores share out the first axis that has more than one tile. A sum has one accumulator a core: a number, or a
    # vector in VMEM whose axis can't be shared out, is summed in parts by the cores, and a last addition joins them.
    split = next((axis for axis in order if grid[axis] > 1), order[0])
    shared = kept is None or (not kept.leading if kept.stays else split in kept.axes)
    cores = info.num_cores if grid[split] > 1 and shared else 1
    buffer_bytes = streams * _tiled_elements(block)
    if config.block is not None and buffer_bytes > info.vmem_capacity_bytes:
        raise ValueError(
            f"block={config.block} with buffers={config.buffers} needs {buffer_bytes} bytes of VMEM for "
            f"{len(in_bytes)} inputs and {len(out_bytes)} outputs; {chips.chip_name(info)} has "
            f"{info.vmem_capacity_bytes}. Choose a smaller block, or leave block=None"
        )
    return TilePlan(
        shape=shape,
        block=block,
        grid=grid,
        order=order,
        slab=_slab(block, column, ones, SLAB_ELEMENTS if kept else _slab_elements(sum(in_bytes) + sum(out_bytes))),
        cores=cores,
        split=split,
        buffers=config.buffers,
        buffer_bytes=buffer_bytes,
        hbm_bytes=(sum(in_bytes) + sum(out_bytes)) * math.prod(shape)
        + sum(4 * math.prod(place.part(shape)) for place in parts),
        vmem_limit_bytes=_vmem_limit(buffer_bytes, info),
    )


def _vmem_limit(buffer_bytes: int, info: Any) -> int:
    """The default where the buffers leave room; else their share of a larger one, up to all that the chip has."""
    return min(max(chips.scoped_vmem_bytes(info), int(buffer_bytes / VMEM_SHARE)), info.vmem_capacity_bytes)


def _tiled_elements(block: tuple[int, ...]) -> int:
    """Elements that a block occupies in VMEM, where its last two axes are padded to whole (8, 128) tiles."""
    if len(block) == 1:
        return round_up(block[0], SUBLANES * LANES)
    return math.prod(block[:-2]) * round_up(block[-2], SUBLANES) * round_up(block[-1], LANES)


def _accumulated(shape: tuple[int, ...], kept: Place) -> int:
    """VMEM bytes of a sum's accumulator for each element of a tile; those of a fraction are in what the streams leave.
    A column is spread once more to become a row."""
    tile = *(shape[axis] for axis in kept.leading), *shape[-2:]
    return 4 * (2 if kept.column else 1) * math.prod(kept.accumulator(shape)) // _tiled_elements(tile)


def _multiples(rank: int, fewest_bytes: int, column: bool) -> tuple[int, int]:
    """Of rows and columns of a block: whole packed tiles, so that no transfer splits one."""
    packed = 4 // fewest_bytes
    if rank == 1:
        return 1, packed * SUBLANES * LANES
    return LANES if column else packed * SUBLANES, LANES


def _choose(
    shape: tuple[int, ...], info: Any, vmem_per_element: int, hbm_per_element: int, multiples: tuple[int, int]
) -> tuple[int, ...]:
    """The largest contiguous block within the VMEM share that still leaves several steps; small arrays whole."""
    most = int(VMEM_SHARE * chips.scoped_vmem_bytes(info)) // vmem_per_element
    total = _tiled_elements(shape)
    padding = total / math.prod(shape)  # VMEM is full of it where HBM is not: an array of fewer rows than a tile has
    worthwhile = int(padding * LATENCY_SECONDS * info.mem_bw_bytes_per_second) // hbm_per_element
    budget = min(most, max(worthwhile, total // STEPS))
    row_multiple, col_multiple = multiples
    if len(shape) == 1:
        return (_balanced(shape[0], budget, col_multiple),)
    fewest_rows = min(row_multiple, round_up(shape[-2], SUBLANES))
    cols = _balanced(shape[-1], budget // fewest_rows, col_multiple)
    rows = _balanced(shape[-2], budget // round_up(cols, LANES), row_multiple)
    block = [rows, cols]
    room = budget // _tiled_elements((rows, cols)) if (rows, cols) == shape[-2:] else 1
    for extent in reversed(shape[:-2]):
        block.insert(0, max(1, min(extent, room)))
        room = room // extent if block[0] == extent else 1
    return tuple(block)


def _balanced(extent: int, most: int, multiple: int) -> int:
    """The block along one axis: all of it if that fits, else equal parts, rounded up to a multiple."""
    most = max(multiple, most // multiple * multiple)
    if extent <= most:
        return extent
    parts = -(-extent // most)
    return min(most, round_up(-(-extent // parts), multiple))


def _users(shape: tuple[int, ...], block: tuple[int, int], multiples: tuple[int, int], column: bool) -> tuple[int, ...]:
    """The user's block, no larger than the array: rows and columns of the view's last two axes, one of each leading
    index. A rank-1 view takes rows*cols elements."""
    rows, cols = block
    row_multiple, col_multiple = multiples
    if len(shape) == 1:
        return (min(shape[0], round_up(rows * cols, col_multiple)),)
    rows = round_up(rows, row_multiple) if column else rows
    return (1,) * (len(shape) - 2) + (min(shape[-2], rows), min(shape[-1], cols))


def _slab_elements(hbm_per_element: int) -> int:
    """Of a slab that adds to no sum: whole registers."""
    registers = SLAB_BYTES // (hbm_per_element * SUBLANES * LANES)
    return min(SLAB_ELEMENTS, registers * SUBLANES * LANES)


def _slab(block: tuple[int, ...], column: bool, ones: frozenset[int], most: int) -> tuple[int, ...]:
    """Of `most` elements: a few columns, equal parts of the block's where they are whole registers; rows in whole
    tiles, of bfloat16 too; leading indices if there is room, and one of those that have a scalar each."""
    if len(block) == 1:
        return (min(block[0], most),)
    widths = range(SLAB_COLUMNS, 0, -LANES)
    even = next((width for width in widths if block[-1] % width == 0), SLAB_COLUMNS)
    cols = min(block[-1], even)
    multiple = LANES if column else 2 * SUBLANES
    rows = min(block[-2], max(multiple, most // round_up(cols, LANES) // multiple * multiple))
    slab = [rows, cols]
    room = most // _tiled_elements((rows, cols)) if (rows, cols) == block[-2:] else 1
    for axis in reversed(range(len(block) - 2)):
        slab.insert(0, 1 if axis in ones else max(1, min(block[axis], room)))
        room = room // block[axis] if slab[0] == block[axis] else 1
    return tuple(slab)
