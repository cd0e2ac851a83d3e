"""Tiles of HBM arrays through a block function: the engine, and the only file with a kernel in it.

`stream` takes arrays of one shape and coefficients that broadcast against them, runs a function of `tiledops.blocks` on
every tile, and returns the arrays that it stores and the sum that it takes. Each array is read once and each result
written once. The pipeline's body is one line over the block function; what surrounds it here is the addressing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tiledops import blocks, chips, layouts, modes, tiling
from tiledops.config import PipelineConfig
from tiledops.layouts import LANES, SUBLANES
from tiledops.tiling import TilePlan

BlockFunction = Callable[..., tuple[tuple[jax.Array, ...], jax.Array | None]]


@dataclasses.dataclass(frozen=True)
class Operation:
    """What a stream computes: static and hashable, so that equal operations are traced once.

    Attributes:
      block: a function of `tiledops.blocks`.
      outs: dtypes of the arrays that it stores.
      total: the shape that its sum keeps, broadcastable against the arrays (1 where it is summed over), or None.
      config: block, buffers and schedule.
      mode: what runs it, resolved.
      chip: the chip that it is cut for.
      aliases: pairs (array, out): the stored array takes that array's buffer.
    """

    block: BlockFunction
    outs: tuple[jnp.dtype, ...]
    total: tuple[int, ...] | None
    config: PipelineConfig
    mode: str
    chip: pltpu.TpuInfo
    aliases: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        return f"tiledops_{self.block.__name__}"

    def __call__(self, coefficients: tuple[jax.Array, ...], arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The stored arrays, then the float32 sum if there is one."""
        return stream(self, coefficients, arrays)


def stream(op: Operation, coefficients: tuple[jax.Array, ...], arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Runs `op` on arrays of one shape and coefficients of the same rank, each extent theirs or 1."""
    if op.mode == modes.REFERENCE:
        return _reference(op, coefficients, arrays)
    if op.mode == modes.SIMULATE:
        chips.prepare_simulator()
    else:
        arrays = (*arrays[:-1], modes.for_tpu(arrays[-1]))
    with chips.x64(False):  # index arithmetic in a kernel is 32-bit
        return _streamed(op, coefficients, arrays)


def _reference(op: Operation, coefficients: Any, arrays: Any) -> tuple[jax.Array, ...]:
    outs, summed = op.block(coefficients, arrays, exact=True)
    results = tuple(out.astype(dtype) for out, dtype in zip(outs, op.outs, strict=True))
    if summed is None:
        return results
    assert op.total is not None
    axes = tuple(axis for axis, extent in enumerate(op.total) if extent == 1)
    return (*results, jnp.sum(summed, axes, keepdims=True))


@functools.partial(jax.jit, static_argnums=0)
def _streamed(op: Operation, coefficients: Any, arrays: Any) -> tuple[jax.Array, ...]:
    """The kernel, behind a jit of its own: however many leaves share a shape, it is traced and lowered once."""
    shape = arrays[0].shape
    varying = tuple(_varying(c.shape, shape) for c in coefficients)
    kept_axes = _varying(op.total or (), shape)
    view = layouts.view(shape, arrays[-1].dtype, apart=(*varying, kept_axes))
    # A coefficient lies in fast memory for the whole kernel if it varies along one axis of the view at most. Else it
    # is one more stream; and a sum that keeps more than one axis is taken of the streamed products, outside.
    places = tuple(_place(view, axes) for axes in varying)
    kept = _place(view, kept_axes)
    summed_here = op.total is not None and kept is not STREAMED
    products = op.total is not None and kept is STREAMED
    rank = len(view.shape)
    plan = tiling.plan(
        view.shape,
        tuple(x.dtype.itemsize for x in arrays) + (4,) * places.count(STREAMED),
        tuple(dtype.itemsize for dtype in op.outs) + (4,) * products,
        info=op.chip,
        config=op.config,
        kept=kept if summed_here else None,
        summed=summed_here,
        vectors=tuple(place for place in (*places, kept) if place is not None and place != STREAMED),
    )
    kernel = Kernel(op, plan, places, kept if summed_here else None, summed_here, products)
    resident = [
        c.transpose(view.order).reshape(-1) if place is not None else c.reshape(())
        for c, place in zip(coefficients, places, strict=True)
        if place != STREAMED
    ]
    streams = [
        view.of(jnp.broadcast_to(c, shape).astype(jnp.float32))
        for c, place in zip(coefficients, places, strict=True)
        if place == STREAMED
    ]
    results = kernel(resident, [*streams, *map(view.of, arrays)])
    outs = tuple(view.back(out, shape) for out in results[: len(op.outs)])
    if op.total is None:
        return outs
    if products:
        product = view.back(results[-1], shape)
        axes = tuple(axis for axis, extent in enumerate(op.total) if extent == 1)
        return (*outs, jnp.sum(product, axes, keepdims=True))
    total = results[-1] if plan.cores == 1 else jnp.sum(results[-1], 0)
    return (*outs, view.back(total, op.total))


def _varying(coefficient: tuple[int, ...], shape: tuple[int, ...]) -> frozenset[int]:
    return frozenset(axis for axis, extent in enumerate(coefficient) if extent > 1)


STREAMED = -1


def _place(view: layouts.View, axes: frozenset[int]) -> int | None:
    """The axis of the view that a coefficient varies along; None for a scalar, STREAMED for anything else."""
    touched = [d for d, group in enumerate(view.groups) if axes & set(group)]
    if not touched:
        return None
    return touched[0] if len(touched) == 1 and len(view.shape) > 1 else STREAMED


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One pallas_call over views.

    Attributes:
      op, plan: what it computes and how it is cut.
      places: for each coefficient the axis of the view that it varies along, None or STREAMED.
      kept: the axis that the sum keeps, or None.
      summed: whether there is a sum.
      products: whether the last stored array is the products themselves, summed by the caller.
    """

    op: Operation
    plan: TilePlan
    places: tuple[int | None, ...]
    kept: int | None
    summed: bool
    products: bool

    def __call__(self, resident: list[jax.Array], streams: list[jax.Array]) -> list[jax.Array]:
        op, plan = self.op, self.plan
        out_dtypes = (*op.outs, *((jnp.dtype(jnp.float32),) * self.products))
        like = streams[-1]
        out_shape = [jax.ShapeDtypeStruct.like(like).update(dtype=dtype) for dtype in out_dtypes]
        hbm = pl.BlockSpec(memory_space=pl.ANY)
        blocked = op.config.schedule == "blocked"
        in_specs = [self._block_spec(blocked, op.config.buffers) for _ in streams]
        out_specs = [self._block_spec(blocked, tiling.OUTPUT_BUFFERS) for _ in out_dtypes]
        total_shape, total_spec, scratch = self._total(like) if self.summed else ([], [], [])
        counts = len(resident), len(streams), len(out_dtypes), len(total_shape)

        def body(*refs: Any) -> None:
            fixed, ins, outs, total, accumulator = _split(refs, counts)
            core = pl.program_id(0)
            if blocked:
                self._tile(core, 1, fixed, ins, outs, total, accumulator)
                return
            pipeline = pltpu.emit_pipeline(
                lambda *tiles: self._tile(
                    core, 0, fixed, tiles[: len(ins)], tiles[len(ins) :], total, accumulator
                ),
                grid=plan.steps,
                in_specs=[self._block_spec(True, op.config.buffers, core) for _ in streams],
                out_specs=[self._block_spec(True, tiling.OUTPUT_BUFFERS, core) for _ in out_dtypes],
                no_pipelining=op.config.schedule == "synchronous",
            )
            pipeline(*ins, *outs)

        grid = (plan.cores, *plan.steps) if blocked else (plan.cores,)
        return pl.pallas_call(
            body,
            grid=grid,
            in_specs=[*map(self._resident_spec, self._resident_places()), *(in_specs if blocked else [hbm] * counts[1])],
            out_specs=[*(out_specs if blocked else [hbm] * counts[2]), *total_spec],
            out_shape=[*out_shape, *total_shape],
            scratch_shapes=scratch,
            input_output_aliases={len(resident) + i: o for i, o in op.aliases},
            cost_estimate=pl.CostEstimate(
                flops=FLOPS[op.block] * math.prod(plan.shape), transcendentals=0, bytes_accessed=plan.hbm_bytes
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",) + ("arbitrary",) * (len(grid) - 1),
                vmem_limit_bytes=plan.vmem_limit_bytes,
            ),
            interpret=modes.interpret_params(op.chip.num_cores) if op.mode == modes.SIMULATE else False,
            name=op.name,
        )(*resident, *streams)

    # Addressing. `ids` are the indices of the running grid step in loop order; `at` the tile's along each axis.

    def _at(self, core: Any, ids: Any) -> list[Any]:
        at: list[Any] = [0] * len(self.plan.shape)
        for axis, i in zip(self.plan.order, ids, strict=True):
            at[axis] = i
        if self.plan.cores > 1:
            # Where the tiles don't divide among the cores, the last core's last step stays on the last tile: the
            # pipeline then neither loads nor stores, and `_tile` computes nothing.
            split, per_core = self.plan.split, -(-self.plan.grid[self.plan.split] // self.plan.cores)
            at[split] = jnp.minimum(core * per_core + at[split], self.plan.grid[split] - 1)
        return at

    def _block_spec(self, blocked: bool, buffers: int, core: Any = None) -> pl.BlockSpec:
        def index_map(*ids: Any) -> tuple[Any, ...]:
            where, ids = (ids[0], ids[1:]) if core is None else (core, ids)
            return tuple(self._at(where, ids))

        mode = None if buffers == 2 else pl.Buffered(buffers)
        return pl.BlockSpec(self.plan.block, index_map, pipeline_mode=mode)

    def _resident_places(self) -> list[int | None]:
        return [place for place in self.places if place != STREAMED]

    def _resident_spec(self, place: int | None) -> pl.BlockSpec:
        if place is None or place < len(self.plan.shape) - 2:
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        return pl.BlockSpec((self._vector_extent(place),), lambda *_: (0,))

    def _vector_extent(self, axis: int) -> int:
        """Of a vector along one axis in VMEM: room for the last tile's overhang, so that no slice leaves it."""
        plan = self.plan
        if plan.grid[axis] == 1:
            return plan.shape[axis]
        return layouts.round_up(plan.grid[axis] * plan.block[axis], SUBLANES * LANES)

    # Arithmetic.

    def _tile(self, core: Any, grid_axis: int, fixed: Any, ins: Any, outs: Any, total: Any, accumulator: Any) -> None:
        """One tile: the block function slab by slab, the sum's accumulator emptied before and flushed after."""
        plan = self.plan
        ids = [pl.program_id(grid_axis + k) for k in range(len(plan.order))]
        at = self._at(core, ids)
        uneven = plan.cores > 1 and plan.grid[plan.split] % plan.cores != 0
        local = dict(zip(plan.order, ids, strict=True))
        per_core = -(-plan.grid[plan.split] // plan.cores)
        active = core * per_core + local[plan.split] < plan.grid[plan.split] if uneven else True
        inner = [(local[axis], n) for axis, n in zip(plan.order, plan.steps, strict=True) if axis != self.kept and n > 1]
        keeps_active = self.kept is not None and plan.split == self.kept

        if self.summed:
            first = _all(i == 0 for i, _ in inner)
            _when(_all([first, active]) if keeps_active else first, lambda: _clear(accumulator[0]))
            if plan.cores > 1 and self.kept is not None:
                _when(_all(i == 0 for i in ids), lambda: _clear(total[0]))
        _when(active, lambda: self._slabs(at, fixed, ins, outs, accumulator))
        if self.summed:
            last = _all(i == n - 1 for i, n in inner)
            _when(
                _all([last, active]) if keeps_active else last, lambda: self._flush(at, total[0], accumulator[0])
            )

    def _slabs(self, at: Any, fixed: Any, ins: Any, outs: Any, accumulator: Any) -> None:
        axis, slab, extent = self.plan.slab_axis, self.plan.slab, self.plan.block[self.plan.slab_axis]
        whole, rest = divmod(extent, slab)
        if whole == 1 and not rest:
            self._slab(at, 0, slab, fixed, ins, outs, accumulator)
            return

        def step(i: Any, carry: None) -> None:
            self._slab(at, pl.multiple_of(i * slab, slab), slab, fixed, ins, outs, accumulator)

        jax.lax.fori_loop(0, whole, step, None)
        if rest:
            self._slab(at, whole * slab, rest, fixed, ins, outs, accumulator)

    def _slab(self, at: Any, start: Any, size: int, fixed: Any, ins: Any, outs: Any, accumulator: Any) -> None:
        plan, rank = self.plan, len(self.plan.shape)
        whole = size == plan.block[plan.slab_axis]
        index = ... if whole else tuple(pl.ds(start, size) if d == plan.slab_axis else slice(None) for d in range(rank))
        tiles = [ref[index] for ref in ins]
        vectors, streamed = iter(fixed), iter(tiles)
        coefficients = tuple(
            next(streamed) if place == STREAMED else self._coefficient(next(vectors), place, at, start, size)
            for place in self.places
        )
        stored, product = self.op.block(
            coefficients, tiles[self.places.count(STREAMED) :], exact=self.op.mode != modes.TPU
        )
        for ref, value in zip(outs, (*stored, product) if self.products else stored, strict=True):
            ref[index] = value.astype(ref.dtype)
        if self.summed:
            self._accumulate(accumulator[0], self._inside(product, at, start), start, size)

    def _coefficient(self, ref: Any, place: int | None, at: Any, start: Any, size: int) -> Any:
        """A coefficient's part for one slab, shaped to broadcast against it."""
        plan, rank = self.plan, len(self.plan.shape)
        if place is None:
            return ref[...]
        if place < rank - 2:  # one leading index a tile: a scalar
            return ref[at[place]]
        sliced = place == plan.slab_axis
        offset, extent = (start, size) if sliced else (0, plan.block[place])
        if plan.grid[place] > 1:
            offset = at[place] * plan.block[place] + offset
        if extent == ref.shape[0]:
            vector = ref[...]
        else:
            vector = ref[pl.ds(pl.multiple_of(offset, LANES) if not isinstance(offset, int) else offset, extent)]
        return vector[:, None] if place == rank - 2 else vector[None, :]

    def _inside(self, product: Any, at: Any, start: Any) -> Any:
        """The products, zero beyond the array's edge: what a ragged tile holds there is anything, NaN included."""
        plan = self.plan
        for axis, (extent, block) in enumerate(zip(plan.shape, plan.block, strict=True)):
            if axis != self.kept and extent % block:
                limit = extent - at[axis] * block - (start if axis == plan.slab_axis else 0)
                position = jax.lax.broadcasted_iota(jnp.int32, product.shape, axis)
                product = jnp.where(position < limit, product, 0.0)
        return product

    def _accumulate(self, accumulator: Any, product: Any, start: Any, size: int) -> None:
        """Adds the products into the accumulator, register by register: sums across a register wait for `_flush`."""
        rank = len(self.plan.shape)
        if rank == 1:
            accumulator[...] += _fold(product, 0, accumulator.shape[0])
            return
        product = jnp.sum(product, tuple(range(rank - 2)))
        if self.kept != rank - 1:
            product = _fold(product, 1, accumulator.shape[1])
        if self.kept != rank - 2:
            accumulator[...] += _fold(product, 0, accumulator.shape[0])
        elif product.shape == accumulator.shape:
            accumulator[...] += product
        else:
            accumulator[pl.ds(start, size), :] += product

    def _flush(self, at: Any, total: Any, accumulator: Any) -> None:
        """Writes a finished sum."""
        plan, rank = self.plan, len(self.plan.shape)
        sums = accumulator[...]
        lead = (0,) if plan.cores > 1 else ()
        if self.kept is None:
            total[(*lead, 0)] = jnp.sum(sums)
        elif self.kept < rank - 2:
            total[(*lead, at[self.kept])] = jnp.sum(sums)
        else:
            if self.kept == rank - 1:
                vector = jnp.sum(sums, 0)
            else:  # a column of sums is turned into a row
                column = jnp.sum(sums, 1, keepdims=True)
                vector = jnp.broadcast_to(column, (sums.shape[0], LANES)).T[0]
            block = plan.block[self.kept]
            if plan.grid[self.kept] == 1:
                total[(*lead, ...)] = vector
            else:
                total[(*lead, pl.ds(pl.multiple_of(at[self.kept] * block, LANES), block))] = vector

    def _total(self, like: jax.Array) -> tuple[list[Any], list[Any], list[Any]]:
        """Shape, block and accumulator of the sum: one a core."""
        plan, rank, kept = self.plan, len(self.plan.shape), self.kept
        extent = 1 if kept is None else plan.shape[kept]
        shape: tuple[int, ...] = (extent,)
        in_vmem = kept is not None and kept >= rank - 2
        padded = self._vector_extent(kept) if kept is not None and in_vmem else extent
        space = pltpu.VMEM if in_vmem else pltpu.SMEM
        if plan.cores == 1:
            spec = pl.BlockSpec((padded,), lambda *_: (0,), memory_space=space)
        else:
            shape = (plan.cores, 1, extent)
            spec = pl.BlockSpec((None, 1, padded), lambda core, *_: (core, 0, 0), memory_space=space)
        return (
            [jax.ShapeDtypeStruct.like(like).update(shape=shape, dtype=jnp.float32)],
            [spec],
            [pltpu.VMEM(self._accumulator_shape(), jnp.float32)],
        )

    def _accumulator_shape(self) -> tuple[int, ...]:
        plan, rank = self.plan, len(self.plan.shape)
        if rank == 1:
            whole = plan.slab % (SUBLANES * LANES) == 0 and plan.block[0] % plan.slab == 0
            return (SUBLANES * LANES if whole else plan.block[0],)
        rows, cols = plan.block[-2:]
        if self.kept != rank - 2:
            slabs = (plan.slab, rows % plan.slab) if plan.slab_axis == rank - 2 else (rows,)
            rows = SUBLANES if all(n % SUBLANES == 0 for n in slabs) else 1
        if self.kept != rank - 1:
            cols = LANES if cols % LANES == 0 else 1
        return rows, cols


# Operations of one element, for XLA's scheduler.
FLOPS: dict[BlockFunction, int] = {blocks.axpy: 2, blocks.scale: 1, blocks.dot: 2, blocks.scale_and_dot: 3}


def _fold(x: jax.Array, axis: int, extent: int) -> jax.Array:
    """Adds up the pieces of `extent` along an axis, in order."""
    pieces = [jax.lax.slice_in_dim(x, i, i + extent, axis=axis) for i in range(0, x.shape[axis], extent)]
    return functools.reduce(jnp.add, pieces) if extent > 1 else jnp.sum(x, axis, keepdims=True)


def _split(items: Any, counts: tuple[int, ...]) -> list[Any]:
    parts, start = [], 0
    for count in counts:
        parts.append(items[start : start + count])
        start += count
    return [*parts, items[start:]]


def _all(conditions: Any) -> Any:
    """The conjunction of conditions, each a Python bool or traced; True if there are none."""
    result: Any = True
    for condition in conditions:
        result = condition if result is True else result if condition is True else jnp.logical_and(result, condition)
    return result


def _when(condition: Any, action: Callable[[], None]) -> None:
    if condition is True:
        action()
    else:
        pl.when(condition)(action)


def _clear(ref: Any) -> None:
    ref[...] = jnp.zeros(ref.shape, ref.dtype)
