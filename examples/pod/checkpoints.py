"""Saved, checked, restored.

Orbax writes while training goes on, each host its own part, into a folder that gets its name when all of it is there:
what was interrupted is no checkpoint. Each also carries a checksum of every array, made on the devices from the bits
that were to be saved, so that what a disk or a network changed since is never trained on.

What is damaged is set aside; what is whole, and of something else, is left as it is and ends the run.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import logging
import os
import sys
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from pod import RunError
from pod.parallel import different, names
from pod.presets import Settings
from pod.training import State

# What an error says that is of this machine or of the way to the checkpoint, which may be as good as ever.
NOT_DAMAGED = (
    *map(os.strerror, (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT)),
    *("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNAUTHENTICATED"),
)


class Checkpoints:
    """The last few states of a run, by the number of the step that made them.

    Args:
      folder: that all hosts see. A `gs://` path too; a relative one is of the working directory.
      keep: how many.
      say: prints a line.
    """

    def __init__(self, folder: str, keep: int, say: Callable[[str], None]):
        self.folder, self.keep, self.say = epath.Path(folder).expanduser().absolute(), keep, say
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.iterdir():
                if ".orbax-checkpoint-tmp" in path.name:
                    say(f"checkpoint {path.name} is half written: skipped")
            self.manager = self._open()
        except OSError as error:
            raise RunError(f"--checkpoints {folder} cannot be written: {error.strerror or error}") from error

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=self.keep, cleanup_tmp_directories=True)
        return ocp.CheckpointManager(self.folder, options=options)

    def save(self, step: int, state: State, settings: Settings) -> None:
        """Begins to save; the arrays may be given up when it returns.

        Raises:
          RunError: this or an earlier checkpoint could not be written.
        """
        about = about_run(settings, state)
        about["checksums"] = checksums(state) | {"about": about_checksum(about)}
        try:
            self.manager.save(
                step, args=ocp.args.Composite(state=ocp.args.StandardSave(flat(state)), about=ocp.args.JsonSave(about))
            )
        except Exception as error:  # of the filesystem, by way of Python, tensorstore or a thread of orbax's
            raise self._unwritten(error) from error

    def finish(self) -> None:
        """Waits until all is written.

        Raises:
          RunError: it could not be.
        """
        try:
            self.manager.wait_until_finished()
        except Exception as error:  # as above
            raise self._unwritten(error) from error

    def _unwritten(self, error: Exception) -> RunError:
        return RunError(f"a checkpoint cannot be written to {self.folder}: {reason(error)}")

    def restore(self, settings: Settings, like: State) -> tuple[int, State] | None:
        """The newest good checkpoint, as (step, state); None if there is none.

        Args:
          like: the state's shapes, dtypes and shardings, which need not be those that it was saved with.

        Raises:
          RunError: it is of a run with other settings, of another model or program, or must not be read.
        """
        steps = sorted(self.manager.all_steps(), reverse=True)
        if different({"steps": steps}):
            raise RunError(
                f"not all hosts see the same checkpoints in {self.folder}: it must be a folder that they share"
            )
        for step in steps:
            fault, state = self._read(step, settings, like)
            if jax.process_count() > 1:  # bad for one is bad for all
                fault = fault or (
                    "another host cannot read it" if multihost_utils.process_allgather(bool(fault)).any() else ""
                )
            if not fault:
                self.say(f"checkpoint {step}: restored")
                return step, state
            self.say(f"checkpoint {step} is corrupt: {fault}; set aside as {self._set_aside(step)}, skipped")
        return None

    def _read(self, step: int, settings: Settings, like: State) -> tuple[str, Any]:
        """What is wrong with a checkpoint, or "" and the state."""
        try:
            inside = {path.name for path in (self.folder / str(step)).iterdir()}
            if inside and not inside & {"state", "about"}:
                raise RunError(f"{self.folder / str(step)} is of another program: give another --checkpoints")
            about = self.manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
            sums = dict(about["checksums"])
            if about_checksum(about) != sums.get("about"):
                return "its settings are not what was saved", None
            for what, now in about_run(settings, like).items():
                refuse_others(f"the checkpoints in {self.folder} are of a run with other {what}", about[what], now)
            restore = ocp.args.Composite(state=ocp.args.StandardRestore(flat(like)))
            arrays = self.manager.restore(step, args=restore)["state"]
        except RunError:
            raise
        except Exception as error:  # whatever a damaged file makes of orbax
            if isinstance(error, MemoryError) or any(word in str(error) for word in NOT_DAMAGED):
                raise RunError(f"checkpoint {step} in {self.folder} cannot be read: {reason(error)}") from error
            return reason(error), None
        state = jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in flat(like)])
        wrong = [name for name, found in checksums(state).items() if found != sums.get(name)]
        return (f"{wrong[0]} is not what was saved" if wrong else ""), state

    def _set_aside(self, step: int) -> str:
        """The name that it has from now on."""
        names = (f"{step}.corrupt{number or ''}" for number in itertools.count())
        free = next(name for name in names if not (self.folder / name).exists())
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"all know {free}")
        if jax.process_index() == 0:
            try:
                (self.folder / str(step)).rename(self.folder / free)
            except OSError as error:
                raise RunError(f"checkpoint {step} in {self.folder} is corrupt, and cannot be renamed") from error
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"set aside {step}")
        self.manager.close()
        self.manager = self._open()  # it keeps in mind how what it found was laid out
        return free

    def close(self) -> None:
        """Waits as `finish` does, and as often as it is called."""
        try:
            self.finish()
        finally:
            try:
                self.manager.close()
            except Exception as error:  # as above
                raise self._unwritten(error) from error


def about_run(settings: Settings, state: State) -> dict[str, dict[str, Any]]:
    """What must be the same for a run to go on: its settings, and the dtypes and shapes of its arrays."""
    arrays = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in flat(state).items()}
    return {"settings": dataclasses.asdict(settings), "arrays": arrays}


def about_checksum(about: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps([about["settings"], about["arrays"]], sort_keys=True).encode())


def refuse_others(what: str, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises RunError with the first few entries that differ."""
    names = [name for name in {**now, **saved} if now.get(name) != saved.get(name)]
    if names:
        shown = "; ".join(f"{name} {saved.get(name)}, now {now.get(name)}" for name in names[:8])
        more = f"; and {len(names) - 8} more" if names[8:] else ""
        raise RunError(f"{what}: {shown}{more}. Give another --checkpoints, or what it was begun with")


def flat(state: State) -> dict[str, Any]:
    """The leaves by name, so that a checkpoint depends on no class of Flax's or Optax's."""
    return {".".join(names(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def checksums(state: State) -> dict[str, int]:
    """One number for each array, the same however it is cut over devices."""
    arrays = flat(state)
    return dict(zip(arrays, np.asarray(_checksums(list(arrays.values()))).tolist(), strict=True))


@jax.jit
def _checksums(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([_checksum(x) for x in arrays])


def _checksum(x: jax.Array) -> jax.Array:
    """The sum, modulo 2^32, of each element's bits mixed with its place. The mixing can be undone, so that one changed
    element is always seen; several are missed once in 2^32."""
    x = x.astype(jnp.uint32) if x.dtype == bool else x
    words = jax.lax.bitcast_convert_type(x, jnp.uint32)  # all of a state's arrays have 32 bits
    for axis in range(words.ndim):
        place = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis, out_sharding=jax.typeof(words).sharding)
        words = (words ^ place) * jnp.uint32(2654435761)
        words ^= words >> 15
    return words.sum(dtype=jnp.uint32)


def reason(error: BaseException) -> str:
    """What went wrong, without the pages that some errors come with: the system's own word for it, if it is there."""
    text = str(error)
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO):
        if os.strerror(code) in text:
            return os.strerror(code)
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= 200 else line[:200] + "..."


def hush() -> None:
    """Keeps orbax from printing pages about what `Checkpoints` says in a line: a write or a read that failed."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    show = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        callback = str(unraisable.exc_value) == "Event loop is closed"  # what tensorstore's then find
        coroutine = "_read_array_index_and_device_put" in repr(unraisable.object)  # orbax's, of the other arrays
        if not callback and not coroutine:
            show(unraisable)

    sys.unraisablehook = hook
