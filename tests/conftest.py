"""The ground of every test: eight CPU devices, no TPU, and none of the caller's own tiledops settings."""

import os

# Read once, when JAX is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["TILEDOPS_MODE"] = os.environ["TILEDOPS_CHIP"] = ""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

import tiledops


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
    """An exception inside a simulated kernel leaves the simulator's memory behind, and the next kernel in it hangs."""
    if call.excinfo is not None:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.fixture
def reference() -> Iterator[None]:
    """Breadth runs in plain jnp; the tests that need a kernel say so."""
    with tiledops.use_config(mode="reference"):
        yield


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer may trace one."""

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a kernel was traced")

    monkeypatch.setattr("tiledops.gates.axpy", refused)


@pytest.fixture
def detectors(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The race detector's record of each kernel that is simulated during the test, in order.

    JAX keeps the last one alone. A record has `reads` and `writes`, which say that the detector was on, and
    `races_found` (jax 0.12 raises there and then; 0.10 prints and goes on).
    """
    records: list[Any] = []
    record = interpret_pallas_call.RaceDetectionState

    def kept(*args: Any, **kwargs: Any) -> Any:
        records.append(record(*args, **kwargs))
        return records[-1]

    monkeypatch.setattr(interpret_pallas_call, "RaceDetectionState", kept)
    return records


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No pod around, whatever the machine; a folder of its own."""

    def initialize(*_: Any) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.chdir(tmp_path)
    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook
