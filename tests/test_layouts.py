"""The zero-copy view: which axes it orders and merges, and that it loses nothing."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from cases import BF16, CASES, F32, SHAPES

from tiledops import layouts

ALL_SHAPES = sorted({*SHAPES, *(case.shape for case in CASES)})


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
def test_a_view_is_the_whole_array_and_back(shape: tuple[int, ...], dtype: Any) -> None:
    for apart in ((), *((frozenset({axis}),) for axis in range(len(shape)))):
        view = layouts.view(shape, dtype, apart=apart)
        assert math.prod(view.shape) == math.prod(shape)
        assert len(view.groups) == len(view.shape)
        assert sorted(view.order) == list(range(len(shape)))
        assert len(view.shape) >= min(2, max(1, len(shape)))
        if math.prod(shape) > 2**22:
            continue  # what follows allocates
        x = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
        viewed = view.of(x)
        assert viewed.shape == view.shape
        np.testing.assert_array_equal(view.back(viewed, shape), x)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
def test_a_group_runs_along_neighbours_alone(shape: tuple[int, ...], dtype: Any) -> None:
    """The groups, one after the other, are the physical order, but for axes of extent one that are dropped."""
    if len(shape) < 2:
        return
    view = layouts.view(shape, dtype)
    grouped = [axis for group in view.groups for axis in group]
    assert grouped == [axis for axis in view.order if axis in grouped]
    assert all(shape[axis] == 1 for axis in view.order if axis not in grouped)
    assert view.groups[-1] == view.order[-1:]  # the minor axis merges with nothing
    assert view.shape == tuple(math.prod(shape[axis] for axis in group) for group in view.groups)


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((8192, 4096), (0, 1)),
        ((1000, 3), (1, 0)),
        ((3, 1000), (0, 1)),
        ((512, 10), (1, 0)),
        ((1001, 3001), (1, 0)),
        ((257, 1), (1, 0)),
        ((1, 257), (0, 1)),
        ((16, 7, 512), (1, 0, 2)),
        ((8, 128, 1024), (0, 1, 2)),
        ((7,), (0,)),
        ((), ()),
    ],
    ids=str,
)
def test_the_order_that_pads_least(shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    assert layouts.physical_order(shape, F32) == order


def test_the_tie_goes_to_the_later_axis() -> None:
    assert layouts.physical_order((128, 128), F32) == (0, 1)
    assert layouts.physical_order((8, 8, 8), F32) == (0, 1, 2)
    assert layouts.physical_order((1, 1, 1, 1), BF16) == (0, 1, 2, 3)


def test_the_order_never_pads_more_than_row_major() -> None:
    def padded(shape: tuple[int, ...], order: tuple[int, ...]) -> int:
        *lead, second, minor = (shape[axis] for axis in order)
        tile = min(8, 1 << (second - 1).bit_length())
        return math.prod(lead) * layouts.round_up(second, tile) * layouts.round_up(minor, 128)

    for shape in ALL_SHAPES:
        if len(shape) >= 2:
            order = layouts.physical_order(shape, F32)
            assert padded(shape, order) <= padded(shape, tuple(range(len(shape))))


@pytest.mark.parametrize(
    ("shape", "merged"),
    [
        ((8, 128, 1024), (1024, 1024)),  # 128 rows are whole tiles
        ((3, 8, 130), (24, 130)),
        ((3, 7, 130), (3, 7, 130)),  # 7 are not: each slice is padded to 8
        ((3, 3, 7, 130), (9, 7, 130)),  # but leading axes merge among themselves
        ((16, 7, 512), (112, 512)),  # in physical order, (7, 16, 512): 16 rows are whole tiles
        ((1, 1, 512, 2048), (512, 2048)),
        ((5, 1, 7, 130), (35, 1, 130)),  # one row pads least of all
        ((2, 1, 8, 130), (16, 130)),  # an axis of one is in nobody's way
    ],
    ids=str,
)
def test_axes_merge_where_that_moves_nothing(shape: tuple[int, ...], merged: tuple[int, ...]) -> None:
    assert layouts.view(shape, F32).shape == merged


def test_what_a_coefficient_varies_along_stays_apart() -> None:
    by_first, by_last = frozenset({0}), frozenset({2})
    assert layouts.view((3, 8, 130), F32, apart=(by_first,)).shape == (3, 8, 130)
    assert layouts.view((3, 8, 130), F32, apart=(by_last,)).shape == (24, 130)
    assert layouts.view((3, 3, 7, 130), F32, apart=(by_first,)).shape == (3, 3, 7, 130)
    assert layouts.view((3, 3, 7, 130), F32, apart=(frozenset({0, 1}),)).shape == (9, 7, 130)
    assert layouts.view((3, 3, 8, 130), F32, apart=(by_first,)).shape == (3, 24, 130)
    assert layouts.view((3, 3, 8, 130), F32, apart=(by_first, frozenset({1}))).shape == (3, 3, 8, 130)


def test_rank_zero_and_one_are_viewed_as_they_are() -> None:
    assert layouts.view((), F32).shape == (1,)
    assert layouts.view((5000,), BF16).shape == (5000,)
    assert layouts.view((5000,), BF16).of(jnp.ones(5000)).shape == (5000,)
