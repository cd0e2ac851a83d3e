"""The pod example's text: windows, folders of files, and batches."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import Mesh
from pod import RunError, data
from pods import TEXT, mesh_of

pytestmark = pytest.mark.usefixtures("alone")


def test_a_window_may_cross_files() -> None:
    assert len(TEXT) == 301
    assert TEXT.window(98, 5).tolist() == [98, 99, 0, 0, 1]
    assert TEXT.window(299, 2).tolist() == [198, 199]


def test_a_folder_of_files(tmp_path: Path) -> None:
    for name, text in (("b", b"two"), ("a", b"one"), ("empty", b"")):
        (tmp_path / name).write_bytes(text)
    (tmp_path / "folder").mkdir()
    text = data.Text.of(tmp_path)
    assert text.window(0, len(text)).tobytes() == b"onetwo"


def test_a_folder_of_more_files_than_may_be_open(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(map(int, os.listdir("/proc/self/fd"))) + 50
    for number in range(1000, 1000 + few):
        (tmp_path / str(number)).write_bytes(b"%d" % number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limit[1]))
    try:
        text = data.Text.of(tmp_path)
        assert text.window(0, len(text)).tobytes() == b"".join(b"%d" % number for number in range(1000, 1000 + few))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_a_file_that_changed_while_it_was_trained_on(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"longer")
    text = data.Text.of(tmp_path)
    (tmp_path / "a").write_bytes(b"short")
    with pytest.raises(RunError, match=r"^--data \S+/a is shorter than the 6 bytes that it had$"):
        text.window(0, 6)
    (tmp_path / "a").unlink()
    with pytest.raises(RunError, match=r"^--data \S+/a cannot be read: No such file or directory$"):
        text.window(0, 6)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    def batch(mesh: Mesh, **changed: int) -> bytes:
        return np.asarray(
            data.batch_of(TEXT, mesh, **{"seed": 0, "step": 3, "batch": 8, "length": 9} | changed)
        ).tobytes()

    first = batch(mesh_of(1, 1, 1))
    assert first == batch(mesh_of(2, 2, 2)) == batch(mesh_of(1, 8, 1))
    assert len({first, batch(mesh_of(1, 1, 1), step=4), batch(mesh_of(1, 1, 1), seed=1)}) == 3
