"""The sum that a kernel takes: how the products of its tiles add up, and how what is finished is written.

A sum gathers in an accumulator of a few vector registers, in the order of the tiles, so that the tile plan alone fixes
its bits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tiledops.layouts import LANES, SUBLANES
from tiledops.places import Place
from tiledops.tiling import TilePlan


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum over all axes of the view but those of its place: one a core."""

    plan: TilePlan
    place: Place

    def result(self) -> tuple[tuple[int, ...], pl.BlockSpec]:
        """Shape and block of a sum that stays in fast memory for the whole kernel."""
        plan, axis = self.plan, self.place.axis
        extent = 1 if axis is None else plan.shape[axis]
        in_vmem = axis is not None and not self.place.in_smem
        padded = plan.vector_extent(axis) if axis is not None and in_vmem else extent
        space = pltpu.VMEM if in_vmem else pltpu.SMEM
        if plan.cores == 1:
            return (extent,), pl.BlockSpec((padded,), lambda *_: (0,), memory_space=space)
        block = pl.BlockSpec((None, 1, padded), lambda core, *_: (core, 0, 0), memory_space=space)
        return (plan.cores, 1, extent), block

    def add(self, accumulator: Any, product: Any, start: Any, size: tuple[int, ...]) -> None:
        """Adds the products of a slab, register by register: sums across a register wait for `write`."""
        rank, place = len(self.plan.shape), self.place
        product = jnp.sum(product, tuple(range(rank - 2)))
        if place.leading:  # one index each a slab
            accumulator = accumulator.at[tuple(start[axis] for axis in place.leading)]
        parts: list[tuple[tuple[Any, ...], Any]] = [((), product)]
        for position, axis in reversed(list(enumerate(range(rank)[-2:]))):
            extent = accumulator.shape[position]
            if axis in place.axes:
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

    def write(self, at: Any, accumulator: Any, result: Any) -> None:
        """Writes what is finished after the tile at `at`: into a part of the sum, or where all of it stays."""
        numbers = self.place.leading and not (self.place.rows or self.place.cols)
        axes = self.place.leading[:-1] if numbers else self.place.leading

        def each(index: tuple[Any, ...]) -> None:
            if len(index) < len(axes):
                jax.lax.fori_loop(0, self.plan.block[axes[len(index)]], lambda i, _: each((*index, i)), None)
            elif numbers:
                self._write_numbers(at, index, accumulator, result)
            else:
                self._write(at, index, accumulator[index or ...], result)

        each(())

    def _write_numbers(self, at: Any, index: tuple[Any, ...], accumulator: Any, result: Any) -> None:
        """Writes one number for each index along the last leading axis.

        Eight are summed across registers at once: for examples of (8, 1024) in bfloat16 on v4 (jax 0.10.2), one at a
        time took all arithmetic to 10.1 of the DMA time, eight at once take it to 1.9.
        """
        plan, place = self.plan, self.place
        axis = place.leading[-1]
        block = plan.block[axis]
        last: Any = block - 1
        if place.stays and plan.shape[axis] % block:
            last = jnp.minimum(last, plan.shape[axis] - 1 - at[axis] * block)

        def eight(i: Any, carry: None) -> None:
            sums = accumulator[(*index, pl.ds(pl.multiple_of(i * SUBLANES, SUBLANES), SUBLANES))]
            column = jnp.sum(jnp.sum(sums, 1), 1, keepdims=True)
            for j in reversed(range(SUBLANES)):  # the last comes after what is beyond it, and is written over that
                k, number = jnp.minimum(i * SUBLANES + j, last), column[j, 0]
                if place.stays:
                    result[at[axis] * block + k] = number  # such a sum is one core's
                else:
                    result[(*self._leading((*index, k)), ...)] = jnp.full((1, 1), number)

        jax.lax.fori_loop(0, last // SUBLANES + 1, eight, None)

    def _write(self, at: Any, index: tuple[Any, ...], sums: Any, result: Any) -> None:
        """Writes a vector, a number or a block: one for each index along the leading axes."""
        plan, place = self.plan, self.place
        if place.rows and place.cols:
            value = sums
        elif place.cols:
            value = jnp.sum(sums, 0)
        elif place.rows:  # a column of sums is turned into a row
            column = jnp.sum(sums, 1, keepdims=True)
            value = jnp.broadcast_to(column, (sums.shape[0], LANES)).T[0]
        else:
            value = jnp.sum(sums)
        lead = (0,) if plan.cores > 1 else ()
        axis = place.axis
        if not place.stays:
            result[(*self._leading(index), *(() if place.rows and place.cols else (0,)), ...)] = value
        elif axis is None:
            result[(*lead, 0)] = value
        elif plan.grid[axis] == 1:
            result[(*lead, ...)] = value
        else:
            result[(*lead, pl.ds(pl.multiple_of(at[axis] * plan.block[axis], LANES), plan.block[axis]))] = value

    def _leading(self, index: tuple[Any, ...]) -> tuple[Any, ...]:
        """The index of a part along the view's leading axes: `index` along the sum's own."""
        own = iter(index)
        return tuple(next(own) if axis in self.place.axes else 0 for axis in range(self.place.rank - 2))


def _fold(x: jax.Array, axis: int, extent: int) -> list[jax.Array]:
    """The sum of the pieces of `extent` along an axis, in order, and the smaller piece that may be left."""
    n = x.shape[axis]
    pieces = [jax.lax.slice_in_dim(x, i, min(i + extent, n), axis=axis) for i in range(0, n, extent)]
    whole = n // extent
    return [functools.reduce(jnp.add, pieces[:whole]), *pieces[whole:]] if whole else pieces
