"""`import tiledops` is light, and its files import one way."""

from __future__ import annotations

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

import tiledops

TRIES = 7
PACKAGE = pathlib.Path(tiledops.__file__).parent


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


def imports(path: pathlib.Path) -> set[str]:
    """Modules that a file imports, those of the package by their own names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= (
                {alias.name for alias in node.names} if module == "tiledops" else {module.removeprefix("tiledops.")}
            )
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.split(".")[0] for name in found}


def test_files_import_their_own_row_and_those_below() -> None:
    """By the map in the package's docstring, on which every file has its place."""
    rows = [
        re.split(r" {3,}", line.strip())[1].split() for line in tiledops.__doc__.splitlines() if line[:4] == " " * 4
    ]
    files = {path.stem: path for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    assert sorted(name for row in rows for name in row) == sorted(files)
    beside = rows.pop()
    allowed = {name: {*beside, "chips"} for name in beside}
    allowed |= {name: set().union(*rows[i:]) for i, row in enumerate(rows) for name in row}
    for name, path in files.items():
        assert imports(path) & {*files} <= allowed[name], name
        assert not imports(path) & {"flax", "optax"} or name in rows[0] + rows[1], name


@pytest.mark.parametrize("name", ["flax", "optax", "libtpu", "matplotlib"])
def test_it_imports_no(name: str) -> None:
    assert python(f"import tiledops, sys; print({name!r} in sys.modules)") == "False"


def test_it_touches_no_device() -> None:
    program = "import tiledops; from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    assert python(program) == "False"
    # With a platform that does not exist, JAX fails at the first device it is asked for.
    assert python("import tiledops; print(tiledops.__version__)", JAX_PLATFORMS="nowhere")


def test_it_takes_hardly_longer_than_jax() -> None:
    """A fifth of a second more at most, of processor time: an import waits for nothing but the disk, once. On a machine
    so slow that JAX alone takes more than a second, a fifth of that.

    Other processes can only add to a time, so that the least of several counts.
    """
    program = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"
    jax_alone, both = [], []
    for _ in range(TRIES):
        jax_alone.append(float(python(program.format("jax"))))
        both.append(float(python(program.format("tiledops"))))
        if min(both) <= min(jax_alone) + 0.2 * max(1.0, min(jax_alone)):
            return
    raise AssertionError(f"seconds to import jax: {jax_alone}, tiledops: {both}")
