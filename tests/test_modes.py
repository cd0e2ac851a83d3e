"""What runs a call: the mode that was asked for, and never another."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME
from jax.sharding import AbstractDevice, AbstractMesh

import tiledops
from tiledops import PipelineConfig, modes, simulator

X = np.ones((17, 257), np.float32)
ON_TPU = PipelineConfig(mode="tpu")


def kernels_of(config: PipelineConfig | None = None) -> int:
    """How many kernels a call traces to."""
    return str(jax.make_jaxpr(lambda x: tiledops.axpy(0.5, x, x, config=config))(X)).count("pallas_call[")


def works() -> bool:
    return bool(jnp.all(tiledops.axpy(0.5, X, X) == 1.5))


def eagerly() -> Any:
    return tiledops.axpy(0.5, X, X, config=ON_TPU)


def under_jit() -> Any:
    return jax.jit(lambda x: tiledops.axpy(0.5, x, x, config=ON_TPU))(X)


def differentiated() -> Any:
    return jax.grad(lambda a: tiledops.axpy(a, X, X, config=ON_TPU).sum())(0.5)


def in_a_loop() -> Any:
    return jax.lax.fori_loop(0, 2, lambda _, x: tiledops.axpy(0.5, x, x, config=ON_TPU), jnp.asarray(X))


def by_default() -> Any:
    with tiledops.use_config(mode="tpu"):
        return tiledops.axpy(0.5, X, X)


@pytest.mark.parametrize("call", [eagerly, under_jit, differentiated, in_a_loop, by_default])
def test_tpu_without_a_tpu_raises(call: Any) -> None:
    with pytest.raises(RuntimeError, match="never falls back") as refusal:
        call()
    message = str(refusal.value)
    assert "cpu" in message
    assert "mode='simulate'" in message
    assert "mode='reference'" in message
    assert works()  # what failed leaves everything usable


def test_the_environments_tpu_raises_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEDOPS_MODE", "tpu")
    with pytest.raises(RuntimeError, match="never falls back"):
        tiledops.axpy(0.5, X, X)


def test_a_program_for_a_tpu_may_be_made_anywhere() -> None:
    """Traced and exported here, to run there."""
    exported = jax.export.export(jax.jit(lambda x: tiledops.axpy(0.5, x, x, config=ON_TPU)), platforms=["tpu"])(X)
    assert exported.mlir_module().count("tpu_custom_call") == 1
    for platforms in (["cpu"], ["cpu", "tpu"]):
        with pytest.raises(RuntimeError, match="never falls back"):
            jax.export.export(jax.jit(lambda x: tiledops.axpy(0.5, x, x, config=ON_TPU)), platforms=platforms)(X)


def test_off_tpu_the_default_is_simulate() -> None:
    assert modes.resolve(PipelineConfig()) == "simulate"
    assert kernels_of() == 1


def test_for_a_tpu_the_default_is_tpu() -> None:
    device = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert modes.resolve(PipelineConfig()) == "tpu"
        assert modes.resolve(PipelineConfig(mode="simulate")) == "simulate"


def test_the_reference_has_no_kernel() -> None:
    assert kernels_of(PipelineConfig(mode="reference")) == 0


def test_argument_before_default_before_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEDOPS_MODE", "reference")
    assert kernels_of() == 0
    with tiledops.use_config(mode="simulate"):
        assert kernels_of() == 1
        assert kernels_of(PipelineConfig(buffers=3)) == 1  # a config that leaves the mode open
        assert kernels_of(PipelineConfig(mode="reference")) == 0
    monkeypatch.setenv("TILEDOPS_MODE", "")  # as good as unset
    assert kernels_of() == 1


@pytest.mark.parametrize("value", ["gpu", "TPU", "interpret", " simulate"])
def test_an_unknown_mode_in_the_environment_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEDOPS_MODE", value)
    with pytest.raises(ValueError, match="the environment's TILEDOPS_MODE must be one of tpu, simulate") as refusal:
        tiledops.axpy(0.5, X, X)
    assert repr(value) in str(refusal.value)


def test_an_unknown_mode_in_the_environment_is_refused_even_where_it_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEDOPS_MODE", "gpu")
    with pytest.raises(ValueError, match="TILEDOPS_MODE"):
        tiledops.axpy(0.5, X, X, config=PipelineConfig(mode="reference"))


def test_the_simulator_looks_for_races_and_beyond_the_edge() -> None:
    params = simulator.interpret_params(2)
    assert params.detect_races
    assert params.buffer_bounds == "padded"
    assert params.num_cores_or_threads == 2


def test_simulate_and_reference_give_the_same_bits() -> None:
    a, x, y, _ = BY_NAME["lesson"].operands()
    simulated, plain = (
        np.asarray(tiledops.axpy(a, x, y, config=PipelineConfig(block=(8, 128), mode=mode)))
        for mode in ("simulate", "reference")
    )
    np.testing.assert_array_equal(simulated.view(np.uint32), plain.view(np.uint32))
