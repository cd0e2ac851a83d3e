"""Every kernel computes in under half of the time that its tiles take to move, by the compiler's own schedule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tiledops
from tiledops import bundles, chips

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)

# Larger than VMEM in either dtype, where XLA could keep an operand and leave the kernel to copy it by bundles.
SHAPES = {
    (16384, 8192): "aligned",
    (10001, 16001): "ragged both ways",
    (50257, 3072): "an embedding with an odd vocabulary",
    (32768, 7, 512): "seen as (7, 32768, 512)",
}
BAR = 0.5


def forward(a: Any, x: Any, y: Any) -> Any:
    return tiledops.axpy(a, x, y)


def backward(a: Any, x: Any, y: Any, g: Any) -> Any:
    return jax.vjp(tiledops.axpy, a, x, y)[1](g)[:2]


def backward_fixed(a: Any, x: Any, y: Any, g: Any) -> Any:
    return jax.vjp(lambda x: tiledops.axpy(a, x, y), x)[1](g)


def backward_frozen(a: Any, x: Any, y: Any, g: Any) -> Any:
    """The gain's gradient alone: nothing to store, so that its bytes take the least time, and its arithmetic 0.54 of
    that on v4, 0.57 on v5p and 0.73 on TPU7x in bfloat16: still memory-bound, by less of a margin."""
    return jax.vjp(lambda a: tiledops.axpy(a, x, y), a)[1](g)


BARS = {backward_frozen: 0.75}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("chip", chips.CHIPS)
def test_arithmetic_hides_behind_memory(chip: str, dtype: Any) -> None:
    ops = (forward, backward, backward_fixed, backward_frozen)
    cases = [(op, shape, gain) for shape in SHAPES for gain in ((), shape[-1:]) for op in ops]
    programs = []
    for op, shape, gain in cases:
        arrays = [jax.ShapeDtypeStruct(shape, dtype)] * (2 if op is forward else 3)
        programs.append((op, (jax.ShapeDtypeStruct(gain, F32), *arrays)))
    for (op, shape, gain), (schedule,) in zip(cases, bundles.schedules(programs, chip=chip), strict=True):
        assert schedule.steps > 1, (shape, gain)
        assert 0 < schedule.ratio < BARS.get(op, BAR), (op.__name__, shape, gain, schedule, schedule.ratio)


def test_the_clocks() -> None:
    """From TpuInfo: within a twentieth of the gigahertz that are published for v4 (1.05), v5e (1.5) and v5p (1.75)."""
    for chip, gigahertz in [("v4", 1.05), ("v5e", 1.5), ("v5p", 1.75)]:
        assert bundles.clock_hertz(chips.chip_info(chip)) == pytest.approx(gigahertz * 1e9, rel=0.05)


def test_a_libtpu_that_writes_no_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_FLAGS", "")
    x = jax.ShapeDtypeStruct((1024, 1024), F32)
    with pytest.raises(RuntimeError, match="wrote no schedule of the kernel tiledops_axpy"):
        bundles.bundles_for(forward, jax.ShapeDtypeStruct((), F32), x, x)


def test_a_program_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_FLAGS", "--no_such_flag={}")
    x = jax.ShapeDtypeStruct((8, 128), F32)
    with pytest.raises(RuntimeError, match="libtpu did not compile the program for v5e"):
        bundles.bundles_for(forward, jax.ShapeDtypeStruct((), F32), x, x)
