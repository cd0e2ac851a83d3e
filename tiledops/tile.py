"""One tile inside a kernel: where it lies, which coefficients it sees, what it adds to the sum.

`stream` decides what moves between HBM and VMEM; this file computes on what has arrived. A tile is computed slab by
slab through the block function. A sum gathers in an accumulator of a few vector registers, in the order of the tiles,
so that the tile plan alone fixes its bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tiledops import tiling
from tiledops.layouts import LANES
from tiledops.tiling import STREAMED, TilePlan


@dataclasses.dataclass(frozen=True)
class Refs:
    """What a tile's body sees: vectors and scalars that stay for the whole kernel, and the tile's own buffers."""

    resident: tuple[Any, ...]
    ins: tuple[Any, ...]
    outs: tuple[Any, ...]
    total: Any = None
    accumulator: Any = None


@dataclasses.dataclass(frozen=True)
class Tile:
    """The body of a kernel.

    Attributes:
      compute: the block function, `(coefficients, blocks) -> (blocks to store, block to sum or None)`.
      plan: how the view is cut.
      places: for each coefficient the axis of the view that it runs along, None or STREAMED.
      kept: the axis that the sum runs along, or None for a scalar.
      summed: whether there is a sum.
      products: whether the block to sum is stored as it is, to be summed outside.
    """

    compute: Callable[..., Any]
    plan: TilePlan
    places: tuple[int | None, ...]
    kept: int | None
    summed: bool
    products: bool

    @property
    def resident(self) -> tuple[int | None, ...]:
        """The places of the coefficients that stay in fast memory."""
        return tuple(place for place in self.places if place != STREAMED)

    def at(self, core: Any, ids: Any) -> tuple[Any, ...]:
        """The tile's index along each axis of the view."""
        at: list[Any] = [0] * len(self.plan.shape)
        for axis, i in zip(self.plan.order, ids, strict=True):
            at[axis] = i
        split, tiles = self.plan.split, self.plan.grid[self.plan.split]
        if self.plan.cores > 1:
            at[split] = core * self.plan.steps[self.plan.order.index(split)] + at[split]
        if tiles % self.plan.cores:
            # The last core has steps without a tile of their own. They stay on its last tile: the pipeline then neither
            # loads nor stores, and `run` computes nothing.
            idle = at[split] >= tiles
            at = [jnp.where(idle, n - 1, i) for i, n in zip(at, self.plan.grid, strict=True)]
        return tuple(at)

    def run(self, core: Any, ids: tuple[Any, ...], refs: Refs) -> None:
        """Computes the tile at grid step `ids` (in loop order, on TensorCore `core`)."""
        plan = self.plan
        at = self.at(core, ids)
        local = dict(zip(plan.order, ids, strict=True))
        active: Any = True
        if plan.cores > 1 and plan.grid[plan.split] % plan.cores:
            active = core * plan.steps[plan.order.index(plan.split)] + local[plan.split] < plan.grid[plan.split]
        compute = functools.partial(self._each_slab, lambda start, size: self._slab(at, start, size, refs))
        if not self.summed:
            _when(active, compute)
            return
        # The steps that add up to one element of the sum, and the first and the last of them. They empty and flush the
        # accumulator even where there is no tile left for this core, unless the sum is another one there.
        inner = [
            (local[axis], n) for axis, n in zip(plan.order, plan.steps, strict=True) if axis != self.kept and n > 1
        ]
        owner = active if plan.split == self.kept else True
        if plan.cores > 1 and self.kept is not None:  # a core writes its own part of the sum, and zeros elsewhere
            _when(_all(i == 0 for i in ids), lambda: _clear(refs.total))
        _when(_all([owner, *(i == 0 for i, _ in inner)]), lambda: _clear(refs.accumulator))
        for axis, (extent, block) in enumerate(zip(plan.shape, plan.block, strict=True)):
            if extent % block and axis != self.kept:
                last = at[axis] == plan.grid[axis] - 1
                _when(_all([active, last]), functools.partial(self._clear_overhang, axis, refs))
        _when(active, compute)
        _when(_all([owner, *(i == n - 1 for i, n in inner)]), lambda: self._flush(at, refs))

    def _each_slab(self, visit: Callable[[Any, Any], None], first: tuple[int, ...] = (), *slab: Any) -> None:
        """Calls `visit(start, size)` for each slab of the tile: along each axis a loop and a rest.

        Args:
          first: the slab to begin with along each axis; () for all of the tile.
          slab: start and size along the axes that are done.
        """
        start, size = slab or ((), ())
        axis = len(start)
        if axis == len(self.plan.shape):
            visit(start, size)
            return
        extent = self.plan.slab[axis]
        whole, rest = divmod(self.plan.block[axis], extent)
        begin = first[axis] if first else 0
        if whole - begin == 1:
            self._each_slab(visit, first, (*start, begin * extent), (*size, extent))
        elif whole > begin:

            def step(i: Any, carry: None) -> None:
                self._each_slab(visit, first, (*start, pl.multiple_of(i * extent, extent)), (*size, extent))

            jax.lax.fori_loop(begin, whole, step, None)
        if rest:
            self._each_slab(visit, first, (*start, whole * extent), (*size, rest))

    def _clear_overhang(self, axis: int, refs: Refs) -> None:
        """Zeroes what the last tile along an axis holds beyond the array's edge, which may be anything, NaN included:
        the products there add nothing to the sum, and no other tile has to mask its own."""
        plan = self.plan
        inside = plan.shape[axis] % plan.block[axis]

        def clear(start: Any, size: Any) -> None:
            index = self._window(start, size)
            for ref in refs.ins:
                x = ref[index].astype(jnp.float32)  # not every TPU selects among bfloat16
                kept = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) < inside - start[axis]
                ref[index] = jnp.where(kept, x, 0.0).astype(ref.dtype)

        first = [0] * len(plan.shape)
        first[axis] = inside // plan.slab[axis]
        self._each_slab(clear, tuple(first))

    def _slab(self, at: Any, start: tuple[Any, ...], size: tuple[int, ...], refs: Refs) -> None:
        index = self._window(start, size)
        tiles = [ref[index] for ref in refs.ins]
        vectors, streamed = iter(refs.resident), iter(tiles)
        coefficients = tuple(
            next(streamed) if place == STREAMED else self._coefficient(next(vectors), place, at, start, size)
            for place in self.places
        )
        stored, product = self.compute(coefficients, tuple(streamed))
        for ref, value in zip(refs.outs, (*stored, product) if self.products else stored, strict=True):
            ref[index] = value.astype(ref.dtype)
        if self.summed:
            self._accumulate(refs.accumulator, product, start, size)

    def _window(self, start: tuple[Any, ...], size: tuple[int, ...]) -> Any:
        if size == self.plan.block:
            return ...
        extents = zip(start, size, self.plan.block, strict=True)
        return tuple(slice(None) if n == extent else pl.ds(i, n) for i, n, extent in extents)

    def _coefficient(self, ref: Any, place: int | None, at: Any, start: tuple[Any, ...], size: tuple[int, ...]) -> Any:
        """A coefficient's part for one slab, shaped to broadcast against it."""
        plan, rank = self.plan, len(self.plan.shape)
        if place is None:
            return ref[0] if ref.shape else ref[...]
        if place < rank - 2:  # one leading index a slab: a scalar
            index, extent = self._leading(place, at, start[place])
            return ref[index if extent is None else jnp.minimum(index, extent - 1)]
        offset, extent = start[place], size[place]
        if plan.grid[place] > 1:
            offset = at[place] * plan.block[place] + offset
        if extent == ref.shape[0]:
            vector = ref[...]
        else:
            vector = ref[pl.ds(pl.multiple_of(offset, LANES) if not isinstance(offset, int) else offset, extent)]
        # Not every Mosaic turns a row of bfloat16 into a column.
        return vector.astype(jnp.float32)[:, None] if place == rank - 2 else vector[None, :]

    def _leading(self, axis: int, at: Any, start: Any) -> tuple[Any, int | None]:
        """An index along a leading axis; and its bound, if the last tile hangs over it."""
        extent, block = self.plan.shape[axis], self.plan.block[axis]
        return at[axis] * block + start, extent if extent % block else None

    def _accumulate(self, accumulator: Any, product: Any, start: Any, size: tuple[int, ...]) -> None:
        """Adds the products into the accumulator, register by register: sums across a register wait for `_flush`."""
        rank = len(self.plan.shape)
        product = jnp.sum(product, tuple(range(rank - 2)))
        if self.kept is not None and self.kept < rank - 2:
            accumulator = accumulator.at[start[self.kept]]
        parts: list[tuple[tuple[Any, ...], Any]] = [((), product)]
        for position, axis in reversed(list(enumerate(range(rank)[-2:]))):
            extent = accumulator.shape[position]
            if axis == self.kept:
                window = slice(None) if size[axis] == extent else pl.ds(start[axis], size[axis])
                parts = [((window, *index), part) for index, part in parts]
            else:
                parts = [
                    ((slice(0, piece.shape[position]), *index), piece)
                    for index, part in parts
                    for piece in _fold(part, position, extent)
                ]
        for index, part in parts:
            accumulator[index] += part

    def _flush(self, at: Any, refs: Refs) -> None:
        """Writes a finished sum."""
        plan, rank, total = self.plan, len(self.plan.shape), refs.total
        lead = (0,) if plan.cores > 1 else ()
        if self.kept is None:
            total[(*lead, 0)] = jnp.sum(refs.accumulator[...])
        elif self.kept < rank - 2:
            self._flush_each(self.kept, at, refs)
        else:
            sums = refs.accumulator[...]
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

    def _flush_each(self, axis: int, at: Any, refs: Refs) -> None:
        """Writes the finished sums of a tile's leading indices."""

        def flush(i: Any, carry: None) -> None:
            index, extent = self._leading(axis, at, i)

            def write() -> None:
                refs.total[index] = jnp.sum(refs.accumulator[i])  # such a sum is one core's

            _when(True if extent is None else index < extent, write)

        jax.lax.fori_loop(0, self.plan.block[axis], flush, None)

    def resident_spec(self, place: int | None) -> pl.BlockSpec:
        """Where a coefficient stays for the whole kernel: scalars in SMEM, vectors along a tiled axis in VMEM."""
        if place is None or place < len(self.plan.shape) - 2:
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        return pl.BlockSpec((self.plan.vector_extent(place),), lambda *_: (0,))

    def total(self) -> tuple[tuple[int, ...], pl.BlockSpec, Any]:
        """Shape, block and accumulator of the sum: one a core."""
        plan, rank, kept = self.plan, len(self.plan.shape), self.kept
        extent = 1 if kept is None else plan.shape[kept]
        shape: tuple[int, ...] = (extent,)
        in_vmem = kept is not None and kept >= rank - 2
        padded = plan.vector_extent(kept) if kept is not None and in_vmem else extent
        space = pltpu.VMEM if in_vmem else pltpu.SMEM
        if plan.cores == 1:
            spec = pl.BlockSpec((padded,), lambda *_: (0,), memory_space=space)
        else:
            shape = (plan.cores, 1, extent)
            spec = pl.BlockSpec((None, 1, padded), lambda core, *_: (core, 0, 0), memory_space=space)
        return shape, spec, pltpu.VMEM(tiling.accumulator_shape(plan.block, kept), jnp.float32)


def _fold(x: jax.Array, axis: int, extent: int) -> list[jax.Array]:
    """The sum of the pieces of `extent` along an axis, in order, and the smaller piece that may be left."""
    n = x.shape[axis]
    pieces = [jax.lax.slice_in_dim(x, i, min(i + extent, n), axis=axis) for i in range(0, n, extent)]
    whole = n // extent
    return [functools.reduce(jnp.add, pieces[:whole]), *pieces[whole:]] if whole else pieces


def _all(conditions: Iterable[Any]) -> Any:
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
