"""Where a kernel keeps what doesn't vary along every axis: its coefficients, and the sum that it takes.

A number, or a vector that is short enough, stays in the chip's fast memory for the whole kernel. Anything else comes
and goes by parts with the tiles, so that it moves once, and not once an element.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tiledops import chips, layouts
from tiledops.layouts import LANES, SUBLANES, round_up

# The share of its memory that one vector may take. In VMEM a gain and its gradient, twice buffered, leave the rest of
# what `tiling.VMEM_SHARE` leaves; in SMEM a gain, a mask and the gradient leave a quarter of it.
VECTOR_VMEM_SHARE, VECTOR_SMEM_SHARE = 1 / 16, 1 / 4


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one coefficient or sum is kept.

    Attributes:
      axes: those of the view that it varies along.
      rank: of the view.
      stays: whether it lies in fast memory for the whole kernel; then it has one axis at most.
    """

    axes: tuple[int, ...]
    rank: int
    stays: bool

    @property
    def axis(self) -> int | None:
        """That of a vector which stays; None for a number, and for what comes by parts."""
        return self.axes[0] if self.stays and self.axes else None

    @property
    def whole(self) -> bool:
        """Whether it varies along every axis: one more array."""
        return len(self.axes) == self.rank

    @property
    def leading(self) -> tuple[int, ...]:
        """Its axes before the tiled ones: it has one index a slab there."""
        return tuple(axis for axis in self.axes if axis < self.rank - 2)

    @property
    def rows(self) -> bool:
        return self.rank > 1 and self.rank - 2 in self.axes

    @property
    def cols(self) -> bool:
        return self.rank - 1 in self.axes

    @property
    def column(self) -> bool:
        """Whether it runs down the rows alone. Then it lies along the lanes, where it is contiguous."""
        return self.rows and not self.cols

    @property
    def in_smem(self) -> bool:
        """Whether it is numbers, one for each slab or one for all."""
        return self.stays and not (self.rows or self.cols)

    def part(self, of: Sequence[Any], elsewhere: Any = 1) -> tuple[Any, ...]:
        """The extents or indices `of` the view along its own axes, in the order in which it lies in memory."""
        own = [n if axis in self.axes else elsewhere for axis, n in enumerate(of)]
        return (*own[:-2], own[-1], own[-2]) if self.column else tuple(own)

    def accumulator(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what a sum gathers in: registers enough for its own axes, and one along the others."""
        if len(block) == 1:
            return (min(block[0], SUBLANES * LANES),)
        *_, rows, cols = block
        leading = [block[axis] for axis in self.leading]
        if leading and not (self.rows or self.cols):
            leading[-1] = round_up(leading[-1], SUBLANES)  # `sums` writes eight numbers at once
        return (*leading, rows if self.rows else SUBLANES, cols if self.cols else LANES)


def place(view: layouts.View, axes: frozenset[int], info: Any) -> Place:
    """The place of what varies along some axes of the array that `view` views.

    >>> varying = frozenset({0}), frozenset({0, 2})  # one number an example; a vector of its own for each
    >>> view = layouts.view((4, 24, 256), jnp.dtype(jnp.float32), apart=varying)
    >>> [place(view, axes, chips.chip_info("v5e")).part(view.shape) for axes in varying]
    [(4, 1, 1), (4, 1, 256)]
    """
    rank = len(view.shape)
    touched = tuple(d for d, group in enumerate(view.groups) if axes & set(group))
    vector = Place(touched, rank, stays=True)
    in_smem, in_vmem = VECTOR_SMEM_SHARE * info.smem_capacity_bytes, VECTOR_VMEM_SHARE * chips.scoped_vmem_bytes(info)
    most = (in_smem if vector.in_smem else in_vmem) // 4
    if not touched or (rank > 1 and len(touched) == 1 and view.shape[touched[0]] <= most):
        return vector
    everywhere = all(d in touched or n == 1 for d, n in enumerate(view.shape))
    return Place(tuple(range(rank)) if everywhere else touched, rank, stays=False)
