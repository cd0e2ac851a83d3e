"""Under JAX's own settings: whatever the user has switched on, the op does what it does without."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BY_NAME, Case
from programs import differentiated, fresh

import tiledops
from tiledops import chips, compiled

MODES = pytest.mark.parametrize("mode", ["reference", "simulate"])
SETTINGS = {
    "disable_jit": jax.disable_jit,
    "strict_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "no_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "x64": lambda: chips.x64(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "check_tracer_leaks": jax.checking_leaks,
    "no_transfers": lambda: jax.transfer_guard_device_to_host("disallow_explicit"),
    "highest_precision": lambda: jax.default_matmul_precision("highest"),
}


def check(case: Case, mode: str) -> Any:
    """Result and gradients, eagerly and jitted."""
    a, x, y, g = case.operands()

    with tiledops.use_config(mode=mode, block=case.block):
        for f in (differentiated, fresh(differentiated)):
            yield f(*map(jnp.asarray, (a, x, y, g)))


def verify(case: Case, results: Any) -> None:
    for values in results:
        oracle.assert_agree(case.operands(), *values)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["lesson", "bf16_into_f32", "merged_feature", "rank4_example", "vector_feature"])
def test_every_setting(name: str, setting: str) -> None:
    case = BY_NAME[name]
    with SETTINGS[setting]():
        results = list(check(case, "reference"))
    verify(case, results)


@pytest.mark.parametrize(
    ("name", "setting"),
    [("merged_feature", s) for s in SETTINGS if s not in ("disable_jit", "no_transfers", "highest_precision")],
)
def test_every_setting_in_the_simulator(name: str, setting: str) -> None:
    """But for the two that forbid what it is made of, compiled loops and callbacks."""
    case = BY_NAME[name]
    with SETTINGS[setting]():
        results = list(check(case, "simulate"))
    verify(case, results)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_compiled_for_tpu(setting: str) -> None:
    """The kernels are what they are without, and so is what XLA made of the rest: nothing in 64 bits, no copy.
    (`disable_jit` leaves in the names of what is compiled by which transformations it came about.)"""
    structs = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in BY_NAME["merged_feature"].operands()]
    plain = compiled.compile_for(fresh(differentiated), *structs)
    with SETTINGS[setting]():
        report = compiled.compile_for(fresh(differentiated), *structs)
    for kernel, name in zip(report.kernels, ("tiledops_axpy", "tiledops_scale_and_dot"), strict=True):
        assert name in kernel.name
    assert (report.extra, report.hbm_bytes) == (plain.extra, plain.hbm_bytes)
    assert [kernel.block for kernel in report.kernels] == [kernel.block for kernel in plain.kernels]


def test_the_simulator_without_jit() -> None:
    """Of a single tile: without compiled loops, each of the interpreter's steps runs by itself."""
    a, x, y, _ = BY_NAME["one_tile"].operands()
    with jax.disable_jit(), tiledops.use_config(mode="simulate"):
        out = tiledops.axpy(a, x, y)
    oracle.assert_same_bits(out, oracle.axpy(a, x, y))


@pytest.mark.parametrize("gain", [0.5, 2, np.float64(0.5)], ids=repr)
@pytest.mark.parametrize("setting", ["strict_promotion", "no_rank_promotion", "x64"])
def test_numbers_under_every_setting(setting: str, gain: Any) -> None:
    x = np.ones((3, 5), np.float32)
    with SETTINGS[setting](), tiledops.use_config(mode="reference"):
        for op in (tiledops.axpy, fresh(tiledops.axpy) if gain == 0.5 and type(gain) is float else tiledops.axpy):
            oracle.assert_same_bits(op(gain, x, x), np.full((3, 5), gain + 1, np.float32))


@pytest.mark.parametrize("name", ["feature", "example"])
def test_second_derivatives_under_strict_promotion(name: str) -> None:
    a, x, y, g = map(jnp.asarray, BY_NAME[name].operands())
    bf16 = x.astype(jnp.bfloat16)

    def slope(a: Any, x: Any) -> Any:
        da = jax.grad(lambda a: (jnp.sin(tiledops.axpy(a, x, y)) * g).sum())(a)
        return (da * da).sum()

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"), tiledops.use_config(mode="reference"):
        da, dx = jax.grad(slope, (0, 1))(a, bf16)
    assert (da.dtype, dx.dtype) == (a.dtype, bf16.dtype)


@MODES
def test_debug_nans_finds_the_users_own(mode: str) -> None:
    """The NaN that lies beyond a ragged edge in the simulator never shows; one in the result does."""
    x = np.ones((9, 130), np.float32)
    with jax.debug_nans(True), tiledops.use_config(mode=mode, block=(8, 128)):
        op = fresh(tiledops.axpy)
        out = op(np.float32(0.5), x, x)
        for call in (op, tiledops.axpy):
            with pytest.raises(FloatingPointError, match="nan"):
                jax.block_until_ready(call(np.float32(np.inf), x, -np.inf * x))
        _, pullback = jax.vjp(tiledops.axpy, np.float32(np.inf), x, x)
        with pytest.raises(FloatingPointError, match="nan"):
            jax.block_until_ready(pullback(jnp.zeros((9, 130))))  # 0*inf
    oracle.assert_same_bits(out, np.full((9, 130), 1.5, np.float32))
