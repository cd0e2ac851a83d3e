"""Where coefficients and sums are kept: what stays in fast memory, what comes by parts, and how parts lie."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from tiledops import chips, layouts
from tiledops.places import Place, place

F32 = jnp.dtype(jnp.float32)

# shape, axes that a gain varies along: what is kept for it
PLACES = {
    ((64, 256), ()): "a number",
    ((7,), (0,)): "whole",
    ((1, 257), (1,)): "a vector",
    ((64, 256), (1,)): "a vector",
    ((64, 256), (0,)): "a column",
    ((64, 256), (0, 1)): "whole",
    ((4, 24, 256), (0,)): "numbers",
    ((4, 24, 256), (2,)): "a vector",
    ((4, 24, 256), (0, 1)): "a column",  # they merge
    ((4, 23, 256), (0, 1)): "a part",  # they don't
    ((4, 24, 256), (0, 2)): "a part",
    ((4, 24, 256), (0, 1, 2)): "whole",
}


def of(shape: tuple[int, ...], axes: tuple[int, ...], chip: str = "v5e") -> tuple[Place, layouts.View]:
    view = layouts.view(shape, F32, apart=(frozenset(axes),))
    return place(view, frozenset(axes), chips.chip_info(chip)), view


@pytest.mark.parametrize(("shape", "axes"), PLACES, ids=str)
def test_places(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    its, _ = of(shape, axes)
    kinds = {
        "a number": its.stays and not its.axes,
        "numbers": its.stays and its.in_smem and bool(its.leading),
        "a vector": its.stays and its.cols,
        "a column": its.stays and its.column,
        "a part": not its.stays and not its.whole,
        "whole": its.whole and not its.stays,
    }
    assert [kind for kind, holds in kinds.items() if holds] == [PLACES[shape, axes]]


@pytest.mark.parametrize("chip", chips.CHIPS)
def test_what_stays_leaves_room(chip: str) -> None:
    """Two gains and a gradient in SMEM; in VMEM a gain and its gradient, twice, in what the streams leave."""
    info = chips.chip_info(chip)
    numbers, features = info.smem_capacity_bytes // 16, chips.scoped_vmem_bytes(info) // 64
    for extra, stays in [(0, True), (1, False)]:
        assert of((numbers + extra, 8, 128), (0,), chip)[0].stays == stays
        assert of((64, features + extra), (1,), chip)[0].stays == stays


def test_a_part_has_its_own_axes_alone() -> None:
    """And what runs down the rows lies along the lanes."""
    for shape, axes, part in [((4, 24, 256), (0, 2), (4, 1, 256)), ((3, 20, 256), (0, 1), (3, 1, 20))]:
        its, view = of(shape, axes)
        assert its.part(view.shape) == part
        assert its.part(("i", "j", "k"), 0) == ("i", 0, "k" if its.cols else "j")
