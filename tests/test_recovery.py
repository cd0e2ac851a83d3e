"""After an exception inside a simulated kernel, a race, an interrupt in the middle: the next call works."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BY_NAME
from jax._src.pallas.mosaic.interpret.shared_memory import SharedMemory
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from programs import racing

import tiledops

pytestmark = pytest.mark.timeout(120)


def works() -> None:
    a, x, y, _ = BY_NAME["lesson"].operands()
    with tiledops.use_config(mode="simulate", block=(8, 128)):
        oracle.assert_same_bits(tiledops.axpy(a, x, y), oracle.axpy(a, x, y))


def broken(monkeypatch: pytest.MonkeyPatch, call: Any, error: BaseException) -> None:
    """The call, in which a read of the simulated memory raises `error` in the middle of the pipeline."""
    read, reads = SharedMemory.get_buffer_content, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        reads.append(None)
        if len(reads) == 9:
            raise error
        return read(*args, **kwargs)

    with monkeypatch.context() as patched, tiledops.use_config(mode="simulate", block=(8, 128)):
        patched.setattr(SharedMemory, "get_buffer_content", failing)
        # Of several devices, one that waited for the failing one may be the first to say so.
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"{type(error).__name__}|BrokenBarrierError"):
            jax.block_until_ready(call())
    assert len(reads) >= 9


@pytest.mark.parametrize("error", [ValueError("in the kernel"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_an_exception_inside_a_kernel(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    a, x, y, _ = BY_NAME["lesson"].operands()
    works()
    for _ in range(2):
        broken(monkeypatch, lambda: tiledops.axpy(a, x, y), error)
        works()


def test_an_interrupted_thread_that_lives_on_holds_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator keeps the memory of the kernel that was interrupted, and its thread doesn't call again."""
    a, x, y, _ = BY_NAME["lesson"].operands()
    broken(monkeypatch, lambda: tiledops.axpy(a, x, y), KeyboardInterrupt())
    other = threading.Thread(target=works, daemon=True)
    other.start()
    other.join(20)
    assert not other.is_alive()


def test_an_exception_on_one_of_eight_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others don't wait for it for ever, and JAX forgets it (`simulator.forget_failure`)."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(np.ones((64, 128), np.float32), NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        broken(monkeypatch, lambda: jax.jit(lambda x: tiledops.axpy(0.5, x, x))(x), ValueError("in the kernel"))
        with tiledops.use_config(mode="simulate"):
            np.testing.assert_array_equal(jax.jit(lambda x: tiledops.axpy(2.0, x, x))(x), np.full((64, 128), 3.0))
    works()


def test_a_race() -> None:
    """JAX 0.10 reports it, newer ones raise."""
    try:
        jax.block_until_ready(racing(jnp.ones((8, 128))))
    except jax.errors.JaxRuntimeError as error:
        assert "RACE DETECTED" in str(error)  # noqa: PT017
    works()


INTERRUPTED = """
import os, signal, threading, time
import jax, numpy as np, tiledops

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
x = np.ones((33, 257), np.float32)

def call(gain):  # traced, compiled and simulated anew
    with tiledops.use_config(mode="simulate", block=(8, 128)):
        return np.asarray(jax.jit(lambda x: tiledops.axpy(gain, x, x))(x))

start = time.monotonic()
call(1.0)
whole = time.monotonic() - start
interrupted = 0
for part in (0.05, 0.2, 0.4, 0.6, 0.8, 0.95):
    interrupt = threading.Timer(part * whole, os.kill, (os.getpid(), signal.SIGINT))
    try:
        interrupt.start()
        call(part)
        time.sleep(2 * whole)  # the call was faster this time
    except BaseException:  # KeyboardInterrupt, or whatever the simulator made of it
        interrupted += 1
    interrupt.join()
    np.testing.assert_array_equal(call(2.0), 3 * x)
assert interrupted  # one or another may come while nobody listens
"""


def test_interrupts_in_the_middle() -> None:
    """While it is traced, compiled and run, in a process of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
