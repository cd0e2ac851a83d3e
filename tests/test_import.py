"""`import tiledops` is light."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TRIES = 7


def python(program: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("name", ["flax", "optax", "libtpu", "matplotlib"])
def test_it_imports_no(name: str) -> None:
    assert python(f"import tiledops, sys; print({name!r} in sys.modules)") == "False"


def test_it_touches_no_device() -> None:
    program = "import tiledops; from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    assert python(program) == "False"
    # With a platform that does not exist, JAX fails at the first device it is asked for.
    assert python("import tiledops; print(tiledops.__version__)", JAX_PLATFORMS="nowhere")


def test_it_takes_hardly_longer_than_jax() -> None:
    """A fifth of a second more at most, of processor time: an import waits for nothing but the disk, once.

    Other processes can only add to a time, so that the least of several counts.
    """
    program = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"
    jax_alone, both = [], []
    for _ in range(TRIES):
        jax_alone.append(float(python(program.format("jax"))))
        both.append(float(python(program.format("tiledops"))))
        if min(both) <= min(jax_alone) + 0.2:
            return
    raise AssertionError(f"seconds to import jax: {jax_alone}, tiledops: {both}")
