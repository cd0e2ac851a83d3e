"""A zero-copy tiled view of any array.

XLA lays an array out in HBM so that it pads least, and hands it to a kernel that way. Mosaic wants row-major operands:
where the two differ, XLA copies every operand and the result. Viewing the array in its own physical order (a
transpose and a reshape that compile to bitcasts) makes them agree. The rule below was read off libtpu 0.0.42 and
0.0.50 for 400 random shapes; it is the same for v4, v5e, v5p, v6e and TPU7x. `tests/test_compiled.py` holds it there:
if a compiler changes its mind, a copy appears and the test says where.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp

LANES, SUBLANES = 128, 8  # of a vector register, and of the (8, 128) tile, on every TPU generation


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def physical_order(shape: tuple[int, ...], dtype: jnp.dtype) -> tuple[int, ...]:
    """The axes from major to minor as XLA for TPU orders them in memory: the last two are tiled.

    XLA picks the minor and the second-minor axis that pad the array least when tiled by (t, 128), where t is the
    smallest power of two that holds the second-minor axis, from one packed word of `dtype` up to 8 sublanes. The
    later axis wins a tie; the remaining axes keep their order.

    >>> physical_order((1000, 3), jnp.dtype(jnp.float32))
    (1, 0)
    """
    axes = range(len(shape))
    if len(shape) < 2:
        return tuple(axes)

    def padded(pair: tuple[int, int]) -> int:
        minor, second = pair
        rest = math.prod(shape) // (shape[minor] * shape[second])
        tile = max(4 // dtype.itemsize, min(SUBLANES, 1 << (shape[second] - 1).bit_length()))
        return round_up(shape[minor], LANES) * round_up(shape[second], tile) * rest

    minor, second = min(itertools.permutations(reversed(axes), 2), key=padded)
    return (*(axis for axis in axes if axis not in (minor, second)), second, minor)


@dataclasses.dataclass(frozen=True)
class View:
    """An array seen in its physical order, with neighbouring axes merged where that moves nothing.

    Attributes:
      order: the logical axes from major to minor.
      groups: for each axis of the view, the logical axes that it merges.
      shape: the extents of the view. Rank 1 for rank 0 and 1; else the last two axes are the tiled ones.
    """

    order: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]

    def of(self, x: jax.Array) -> jax.Array:
        return x.transpose(self.order).reshape(self.shape)

    def back(self, viewed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """`viewed`, an array of the view's shape, as the array of logical `shape` that it is a view of."""
        inverse = sorted(range(len(shape)), key=self.order.__getitem__)
        return viewed.reshape([shape[axis] for axis in self.order]).transpose(inverse)


def view(shape: tuple[int, ...], dtype: jnp.dtype, *, apart: tuple[frozenset[int], ...] = ()) -> View:
    """The view of an array, keeping what varies apart from what doesn't.

    Leading axes merge among themselves, and into the second-minor axis where that is a multiple of 8: otherwise
    each of its slices is padded to whole tiles, and merging would move every row.

    Args:
      shape, dtype: of the array.
      apart: sets of axes, each the axes that some coefficient varies along; two axes merge only if they are in the
        same sets.
    """
    if len(shape) < 2:
        return View(tuple(range(len(shape))), (tuple(range(len(shape))),), shape or (1,))
    order = physical_order(shape, dtype)
    groups: list[list[int]] = []
    for axis in order[:-2]:
        if shape[axis] == 1:
            continue  # nothing to step over; `reshape` drops it
        if groups and _together(groups[-1][0], axis, apart):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    second, minor = order[-2:]
    rows = [second]
    if groups and shape[second] % SUBLANES == 0 and _together(groups[-1][0], second, apart):
        rows = [*groups.pop(), second]
    groups += [rows, [minor]]
    return View(order, tuple(map(tuple, groups)), tuple(math.prod(shape[i] for i in group) for group in groups))


def _together(one: int, other: int, apart: tuple[frozenset[int], ...]) -> bool:
    return all((one in axes) == (other in axes) for axes in apart)
