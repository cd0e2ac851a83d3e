"""The facts of each generation, and the chip that a program is for."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import F32
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

import tiledops
from tiledops import chips

MEGACORE = {"v4", "v5p"}


@pytest.mark.parametrize("name", chips.CHIPS)
def test_a_generations_facts(name: str) -> None:
    info = chips.chip_info(name)
    assert info.num_cores == (2 if name in MEGACORE else 1)
    assert chips.chip_name(info) == name
    assert info.vmem_capacity_bytes >= 16 * chips.MiB
    scoped = {"v4": 16, "v5e": 16, "v5p": 16, "v6e": 32, "tpu7x": 32}
    assert chips.scoped_vmem_bytes(info) == scoped[name] * chips.MiB


@pytest.mark.parametrize("name", ["v9", "", "V5E", "TPU v5 lite", None])
def test_an_unknown_chip_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=r"chip must be one of v4, v5e, v5p, v6e, tpu7x; got") as refusal:
        chips.chip_info(name)
    assert repr(name) in str(refusal.value)
    with pytest.raises(ValueError, match="chip must be one of"), tiledops.simulated_chip(name):
        pass
    assert chips.simulated_info() == chips.chip_info("v5e")


def simulated() -> str:
    return chips.chip_name(chips.simulated_info())


def test_simulated_chips_nest() -> None:
    assert simulated() == "v5e"
    with tiledops.simulated_chip("v5p") as info:
        assert info == chips.simulated_info()
        assert simulated() == "v5p"
        with tiledops.simulated_chip("v6e"):
            assert simulated() == "v6e"
        assert simulated() == "v5p"
    with pytest.raises(KeyError), tiledops.simulated_chip("v4"):
        raise KeyError
    assert simulated() == "v5e"


def test_the_environment_names_the_simulated_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEDOPS_CHIP", "tpu7x")
    assert simulated() == "tpu7x"
    with tiledops.simulated_chip("v4"):
        assert simulated() == "v4"
    monkeypatch.setenv("TILEDOPS_CHIP", "v9")
    with pytest.raises(ValueError, match="TILEDOPS_CHIP must be one of v4, v5e, v5p, v6e, tpu7x; got 'v9'"):
        tiledops.axpy(1.0, jnp.ones(3), jnp.ones(3))


def test_a_simulated_chip_belongs_to_its_thread() -> None:
    seen = []
    with tiledops.simulated_chip("v4"):
        thread = threading.Thread(target=lambda: seen.append(simulated()))
        thread.start()
        thread.join(60)
    assert seen == ["v5e"]


def test_on_a_cpu_the_target_is_the_simulated_chip() -> None:
    with tiledops.simulated_chip("v6e") as info:
        assert chips.target() == (info, False)
        with jax.default_device(jax.devices("cpu")[3]):
            assert chips.target() == (info, False)


@pytest.mark.parametrize(("kind", "cores", "version"), [("TPU v5 lite", 1, "v5e"), ("TPU v5", 2, "v5p")])
def test_the_target_is_the_meshs_device(kind: str, cores: int, version: str) -> None:
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        info, real = chips.target()
    assert real
    assert info == pltpu.get_tpu_info_for_chip(chips.CHIPS[version], cores)
    assert chips.target()[1] is False


def test_what_was_traced_keeps_its_chip() -> None:
    """A call made inside `simulated_chip` is differentiated outside as it was made."""
    x = jnp.ones((17, 100))
    with tiledops.simulated_chip("v5p"), tiledops.use_config(mode="simulate", block=(8, 128)):
        _, pullback = jax.vjp(lambda x: tiledops.axpy(0.5, x, x), x)
    (dx,) = pullback(x)
    assert dx.dtype == F32
    assert jnp.all(dx == 1.5)


def test_the_64_bit_switch_is_restored() -> None:
    before = jax.config.jax_enable_x64
    with chips.x64(True):
        assert jnp.asarray(1.0).dtype == jnp.float64
        with chips.x64(False):
            assert jnp.asarray(1.0).dtype == jnp.float32
        assert jnp.asarray(1.0).dtype == jnp.float64
    assert jax.config.jax_enable_x64 == before
