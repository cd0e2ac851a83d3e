"""The pod example's checkpoints: kept, restored on another mesh, damaged, of another run."""

from __future__ import annotations

import errno
import gc
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import train_on_pod
from flax import nnx
from jax.sharding import Mesh
from pod import RunError, checkpoints, parallel, presets, training
from pod.checkpoints import Checkpoints, checksums, reason
from pods import TINY, mesh_of

pytestmark = pytest.mark.usefixtures("alone")


def small_state(mesh: Mesh, number: float) -> training.State:
    """One of the real names and shardings, and few arrays."""
    kernel = number + np.random.default_rng(0).standard_normal((64, 256))  # nothing that is compressed away
    params = nnx.State({"up": {"kernel": nnx.Param(jnp.asarray(kernel, jnp.float32))}})
    optimizer = optax.ApplyIfFiniteState(jnp.int32(0), jnp.array(True), jnp.int32(3), {"mu": params})
    state = training.State(params, optimizer, jnp.array([1, 2], jnp.uint32))
    return jax.device_put(state, parallel.shardings(state, mesh))


def saved(folder: Path, mesh: Mesh, steps: int = 2) -> list[str]:
    said: list[str] = []
    checkpoints = Checkpoints(str(folder), 2, said.append)
    for step in range(1, steps + 1):
        checkpoints.save(step, small_state(mesh, step), TINY)
    checkpoints.finish()
    checkpoints.close()
    return said


def restored(folder: Path, mesh: Mesh, settings: presets.Settings = TINY) -> tuple[Any, list[str]]:
    said: list[str] = []
    checkpoints = Checkpoints(str(folder), 2, said.append)
    found = checkpoints.restore(settings, parallel.abstract(small_state(mesh, 0), mesh))
    checkpoints.close()
    return found, said


def assert_state(state: training.State, number: float, mesh: Mesh) -> None:
    expected = small_state(mesh, number)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)
        assert (x.dtype, x.sharding) == (y.dtype, y.sharding)


def test_the_last_few_are_kept_and_restored_on_another_mesh(tmp_path: Path) -> None:
    assert saved(tmp_path, mesh_of(2, 2, 2), steps=3) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    for mesh in (mesh_of(1, 8, 1), mesh_of(1, 1, 1)):
        (step, state), said = restored(tmp_path, mesh)
        assert (step, said) == (3, ["checkpoint 3: restored"])
        assert_state(state, 3, mesh)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), ValueError("RESOURCE_EXHAUSTED: 20 GB"), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_what_is_wrong_with_the_machine_sets_no_checkpoint_aside(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def restore(*_: Any, **__: Any) -> None:
        raise error

    saved(tmp_path, mesh_of(1, 1, 1))
    with monkeypatch.context() as patched:
        patched.setattr(ocp.CheckpointManager, "restore", restore)
        with pytest.raises(RunError, match=r"^checkpoint 2 in \S+ cannot be read: "):
            restored(tmp_path, mesh_of(1, 1, 1))
    assert restored(tmp_path, mesh_of(1, 1, 1))[1] == ["checkpoint 2: restored"]


def test_what_closing_finds_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def close(_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    checkpoints = Checkpoints(str(tmp_path), 2, print)
    with monkeypatch.context() as patched:
        patched.setattr(ocp.CheckpointManager, "close", close)
        with pytest.raises(RunError, match=r"^a checkpoint cannot be written to \S+: .*Too many open files$"):
            checkpoints.close()
    checkpoints.close()


def test_hosts_that_see_other_checkpoints_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved(tmp_path, mesh_of(1, 1, 1))
    monkeypatch.setattr(checkpoints, "different", list)  # every name: no host has what another has
    with pytest.raises(RunError, match=r"^not all hosts see the same checkpoints in \S+: it must be a folder"):
        restored(tmp_path, mesh_of(1, 1, 1))


def test_none(tmp_path: Path) -> None:
    assert restored(tmp_path / "new" / "folder", mesh_of(1, 1, 1)) == (None, [])


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(folder: Path) -> None:
    os.truncate(largest(folder), largest(folder).stat().st_size // 2)


def flip(folder: Path) -> None:
    content = bytearray(largest(folder).read_bytes())
    content[len(content) // 2] ^= 1
    largest(folder).write_bytes(content)


def remove(folder: Path) -> None:
    largest(folder).unlink()


def forget(folder: Path) -> None:
    (folder / "about" / "metadata").write_text("{")


def reseed(folder: Path) -> None:
    about = (folder / "about" / "metadata").read_text()
    changed = about.replace('"seed": 0', '"seed": 7')
    assert changed != about
    (folder / "about" / "metadata").write_text(changed)


def swap(folder: Path) -> None:
    """Whole and readable, and not what was saved: only the checksum tells."""
    about = json.loads((folder / "about" / "metadata").read_text())
    about["checksums"]["params.up.kernel"] ^= 1
    (folder / "about" / "metadata").write_text(json.dumps(about))


@pytest.mark.parametrize("damage", [truncate, flip, remove, forget, reseed, swap])
def test_a_corrupt_checkpoint_is_skipped(damage: Any, tmp_path: Path) -> None:
    mesh = mesh_of(1, 2, 1)
    saved(tmp_path, mesh)
    damage(tmp_path / "2")
    (step, state), said = restored(tmp_path, mesh)
    assert step == 1
    assert_state(state, 1, mesh)
    assert len(said) == 2
    assert said[0].startswith("checkpoint 2 is corrupt: ")
    assert said[0].endswith("; set aside as 2.corrupt, skipped")
    saved(tmp_path, mesh)  # 2 can be saved again
    assert restored(tmp_path, mesh)[0][0] == 2


def test_what_orbax_leaves_of_a_failed_read_is_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: shown.append(repr(unraisable.object)))
    checkpoints.hush()
    for _ in range(3):  # it leaves something at most of them
        saved(tmp_path, mesh_of(1, 2, 1))
        remove(tmp_path / "2")
        restored(tmp_path, mesh_of(1, 2, 1))
        gc.collect()
    assert shown == []
    sys.unraisablehook(SimpleNamespace(exc_value=ValueError(), object=None))  # type: ignore[arg-type]
    assert shown == ["None"]  # anything else is


def test_a_half_written_checkpoint_is_skipped(tmp_path: Path) -> None:
    mesh = mesh_of(1, 2, 1)
    saved(tmp_path, mesh)
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    (step, _), said = restored(tmp_path, mesh)
    assert (step, said[0]) == (1, "checkpoint 2.orbax-checkpoint-tmp is half written: skipped")


def test_a_run_with_other_settings_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, mesh_of(1, 2, 1))
    with pytest.raises(train_on_pod.RunError, match=r"are of a run with other settings: seed 0, now 1\. Give another"):
        restored(tmp_path, mesh_of(1, 2, 1), TINY.__class__(**{**vars(TINY), "seed": 1}))


def test_a_run_of_another_model_is_refused(tmp_path: Path) -> None:
    """Settings alike, arrays not: the model was edited, and the checkpoint is good."""
    mesh = mesh_of(1, 2, 1)
    saved(tmp_path, mesh)
    like = parallel.abstract(small_state(mesh, 0), mesh)
    like.params["up"]["bias"] = like.params["up"].pop("kernel")
    checkpoints = Checkpoints(str(tmp_path), 2, print)
    with pytest.raises(
        train_on_pod.RunError, match=r"with other arrays: params\.up\.bias None, now float32\[64, 256\]"
    ):
        checkpoints.restore(TINY, like)
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_checkpoint_of_another_program_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "7" / "default"
    theirs.mkdir(parents=True)
    (theirs / "weights").write_text("theirs")
    with pytest.raises(train_on_pod.RunError, match=r"7 is of another program: give another --checkpoints$"):
        restored(tmp_path, mesh_of(1, 1, 1))
    assert (theirs / "weights").read_text() == "theirs"


def test_what_was_set_aside_stays(tmp_path: Path) -> None:
    """The same step corrupt again: neither takes the other's place."""
    mesh = mesh_of(1, 2, 1)
    for name in ("2.corrupt", "2.corrupt1"):
        saved(tmp_path, mesh)
        remove(tmp_path / "2")
        _, said = restored(tmp_path, mesh)
        assert said[0].endswith(f"; set aside as {name}, skipped")
        assert (tmp_path / name).is_dir()


def test_a_relative_folder_is_of_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    saved(Path("here"), mesh_of(1, 1, 1))
    saved(Path("~/there"), mesh_of(1, 1, 1))
    assert restored(tmp_path / "here", mesh_of(1, 1, 1))[0][0] == 2
    assert restored(tmp_path / "home" / "there", mesh_of(1, 1, 1))[0][0] == 2


def test_checksums_see_one_bit_and_the_place_and_not_the_mesh() -> None:
    def checksum(state: training.State) -> dict[str, int]:
        return checksums(state)

    state = small_state(mesh_of(1, 1, 1), 1)
    sums = checksum(state)
    assert sums == checksum(small_state(mesh_of(2, 2, 2), 1))
    kernel = np.array(state.params["up"]["kernel"][...])
    swapped, bit = kernel.copy(), kernel.copy()
    swapped[[0, 1], 5] = kernel[0, [5, 6]]
    bit.view(np.uint32)[3, 7] ^= 1
    for changed in (swapped, bit):
        other = state._replace(params=nnx.State({"up": {"kernel": nnx.Param(jnp.asarray(changed))}}))
        assert checksum(other)["params.up.kernel"] != sums["params.up.kernel"]


def test_reasons_are_short() -> None:
    assert (
        reason(ValueError("RESOURCE_EXHAUSTED: writing 'x': No space left on device [source ...]"))
        == "No space left on device"
    )
    assert reason(ValueError("\n  first\nsecond")) == "first"
    assert len(reason(ValueError("x" * 1000))) == 203
    assert reason(KeyError()) == "KeyError"
