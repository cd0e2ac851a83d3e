"""One tile inside a kernel: where it lies, which coefficients it sees, what it adds to the sum.

`stream` decides what moves between HBM and VMEM; this file computes on what has arrived. A tile is computed slab by
slab through the block function.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tiledops import layouts, modes, tiling
from tiledops.layouts import LANES
from tiledops.operation import Operation
from tiledops.places import Place, place
from tiledops.sums import Sum
from tiledops.tiling import TilePlan


@dataclasses.dataclass(frozen=True)
class Refs:
    """What a tile's body sees: vectors and scalars that stay for the whole kernel, and the tile's own buffers. The sum
    is in `total` if it stays, else in the last of `outs`."""

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
      view: how the arrays are seen.
      plan: how the view is cut.
      places: of the coefficients. Those that don't stay are the first of the streams.
      kept: the place of the sum, if there is one. If it doesn't stay, it is the last that is stored.
    """

    compute: Callable[..., Any]
    view: layouts.View
    plan: TilePlan
    places: tuple[Place, ...]
    kept: Place | None

    @classmethod
    def of(cls, op: Operation, coefficients: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> Tile:
        """Of an operation on arrays of one shape and coefficients that broadcast against them.

        Raises:
          ValueError: a block of the user's that doesn't fit.
        """
        shape = arrays[0].shape
        varying = tuple(_varying(c.shape) for c in coefficients)
        kept_axes = _varying(op.total or ())
        view = layouts.view(shape, arrays[-1].dtype, apart=(*varying, kept_axes))
        places = tuple(place(view, axes, op.chip) for axes in varying)
        kept = None if op.total is None else place(view, kept_axes, op.chip)
        # What varies along every axis is one array more: a coefficient is read like x, products are stored like out.
        whole = [c for c, its in zip(coefficients, places, strict=True) if its.whole]
        products = kept is not None and kept.whole
        plan = tiling.plan(
            view.shape,
            tuple(x.dtype.itemsize for x in (*whole, *arrays)),
            (*(dtype.itemsize for dtype in op.outs), *((4,) * products)),
            info=op.chip,
            config=op.config,
            places=tuple(place for place in places if not place.whole),
            kept=None if products else kept,
        )
        return cls(functools.partial(op.block, exact=op.mode != modes.TPU), view, plan, places, kept)

    @property
    def sum(self) -> Sum | None:
        """What adds up. What varies along every axis doesn't: it is stored like any other block."""
        return None if self.kept is None or self.kept.whole else Sum(self.plan, self.kept)

    def resident_spec(self, place: Place) -> pl.BlockSpec:
        """Of a coefficient that stays: numbers in SMEM, a vector along a tiled axis in VMEM."""
        if place.in_smem:
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        return pl.BlockSpec((self.plan.vector_extent(place.axes[0]),), lambda *_: (0,))

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
        if self.sum is None:
            _when(active, compute)
            return
        kept = self.sum.place
        # The steps that add up to one element of the sum, and the first and the last of them. They empty and flush the
        # accumulator even where there is no tile left for this core, unless the sum is another one there.
        inner = [
            (local[axis], n) for axis, n in zip(plan.order, plan.steps, strict=True) if axis not in kept.axes and n > 1
        ]
        write, result = self.sum.write, refs.total if kept.stays else refs.outs[-1]
        owner = active if plan.split in kept.axes else True
        if plan.cores > 1 and kept.axis is not None:  # a core writes its own part of the sum, and zeros elsewhere
            _when(_all(i == 0 for i in ids), lambda: _clear(refs.total))
        _when(_all([owner, *(i == 0 for i, _ in inner)]), lambda: _clear(refs.accumulator))
        for axis, (extent, block) in enumerate(zip(plan.shape, plan.block, strict=True)):
            if extent % block and axis not in kept.axes:
                last = at[axis] == plan.grid[axis] - 1
                _when(_all([active, last]), functools.partial(self._clear_overhang, axis, refs))
        _when(active, compute)
        _when(_all([owner, *(i == n - 1 for i, n in inner)]), lambda: write(at, refs.accumulator, result))

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
            for ref in refs.ins[sum(not its.stays for its in self.places) :]:
                x = ref[index].astype(jnp.float32)  # not every TPU selects among bfloat16
                kept = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) < inside - start[axis]
                ref[index] = jnp.where(kept, x, 0.0).astype(ref.dtype)

        first = [0] * len(plan.shape)
        first[axis] = inside // plan.slab[axis]
        self._each_slab(clear, tuple(first))

    def _slab(self, at: Any, start: tuple[Any, ...], size: tuple[int, ...], refs: Refs) -> None:
        index = self._window(start, size)
        staying, streams = iter(refs.resident), iter(refs.ins)
        coefficients = tuple(
            self._resident(next(staying), place, at, start, size)
            if place.stays
            else self._part(next(streams), place, start, size)
            for place in self.places
        )
        stored, product = self.compute(coefficients, tuple(ref[index] for ref in streams))
        if product is not None and self.sum is None:
            stored = (*stored, product)
        for ref, value in zip(refs.outs, stored, strict=False):  # the parts of a sum come later
            ref[index] = value.astype(ref.dtype)
        # After the stores: before them a gain a feature took 0.54 of the DMA time on TPU7x (bfloat16, jax 0.10.2).
        if self.sum is not None:
            self.sum.add(refs.accumulator, product, start, size)

    def _window(self, start: tuple[Any, ...], size: tuple[int, ...]) -> Any:
        if size == self.plan.block:
            return ...
        extents = zip(start, size, self.plan.block, strict=True)
        return tuple(slice(None) if n == extent else pl.ds(i, n) for i, n, extent in extents)

    def _resident(self, ref: Any, place: Place, at: Any, start: tuple[Any, ...], size: tuple[int, ...]) -> Any:
        """What a slab sees of a coefficient that stays, shaped to broadcast against it."""
        plan, axis = self.plan, place.axis
        if axis is None:
            return ref[0] if ref.shape else ref[...]
        if place.in_smem:  # one leading index a slab: a scalar
            extent, block = plan.shape[axis], plan.block[axis]
            i = at[axis] * block + start[axis]
            return ref[jnp.minimum(i, extent - 1) if extent % block else i]
        offset, extent = start[axis], size[axis]
        if plan.grid[axis] > 1:
            offset = at[axis] * plan.block[axis] + offset
        if extent == ref.shape[0]:
            vector = ref[...]
        else:
            vector = ref[pl.ds(pl.multiple_of(offset, LANES) if not isinstance(offset, int) else offset, extent)]
        return _spread(vector, place)

    def _part(self, ref: Any, place: Place, start: tuple[Any, ...], size: tuple[int, ...]) -> Any:
        """What a slab sees of a coefficient's part that came with the tile."""
        if place.whole:
            return ref[self._window(start, size)]
        rank = len(size)
        windows = [pl.ds(i, n) for i, n in zip(start, size, strict=True)]
        *_, rows, cols = place.part(windows, slice(None))
        leading = place.part(start, 0)[: rank - 2]
        if place.rows == place.cols:
            return ref[(*leading, rows, cols)]
        return _spread(ref[(*leading, 0, cols)], place)


def _varying(shape: tuple[int, ...]) -> frozenset[int]:
    return frozenset(axis for axis, extent in enumerate(shape) if extent > 1)


def _spread(vector: Any, place: Place) -> Any:
    """A vector along the rows or the columns, to broadcast against a slab. Not every Mosaic turns a row of bfloat16
    into a column."""
    return vector.astype(jnp.float32)[:, None] if place.rows else vector[None, :]


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
