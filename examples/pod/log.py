"""What the first host shows and keeps. The others are silent."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import jax
from console import progress

from pod import RunError


def say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


class Log:
    """A line for each step: shown, and kept as JSON in `metrics.jsonl`.

    A run that goes on from step n takes the later steps again: what was logged of them goes to `metrics.dropped.jsonl`.
    """

    def __init__(self, folder: Path):
        self.path = folder / "metrics.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a"):
                pass
        except OSError as error:
            raise RunError(f"--out {folder} cannot be written: {error.strerror}") from error

    def folder(self, name: str) -> Path:
        """One beside the file."""
        path = self.path.with_name(name)
        with self._writing(path):
            path.mkdir(exist_ok=True)
        return path

    @contextmanager
    def steps(self, done: int, steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Yields what logs a step's record: `step`, `loss`, `tokens_per_second`, `refused`, perhaps `share`.

        Raises:
          RunError: the file could not be written.
        """
        if jax.process_index() != 0:
            yield lambda record: None
            return
        with self._continued(done) as file, progress("train", steps, done=done, lines=steps) as show:

            def log(record: dict[str, Any]) -> None:
                with self._writing(self.path):
                    file.write(json.dumps(record).encode() + b"\n")
                share = f"  {record['share']:.0%} of the roofline" if "share" in record else ""
                loss = math.nan if record["loss"] is None else record["loss"]
                show(record["step"], f"loss {loss:.4f}  {record['tokens_per_second']:,.0f} tokens/s{share}")

            yield log

    def _continued(self, done: int) -> BinaryIO:
        """The file, open behind its record of step `done`."""
        with self._writing(self.path):
            kept: list[bytes] = []
            dropped: list[bytes] = []
            for line in self.path.read_bytes().splitlines():  # the last may have lost its end
                (kept if _step(line) <= done else dropped).append(line + b"\n")
            if dropped:
                others = self.path.with_suffix(".dropped.jsonl")
                with others.open("ab") as file:
                    file.writelines(dropped)
                say(f"metrics of {len(dropped)} steps that are not in the checkpoint are now in {others}")
            written = self.path.with_suffix(".tmp")
            written.write_bytes(b"".join(kept))
            os.replace(written, self.path)
            return self.path.open("ab", buffering=0)  # what could not be written is not tried again by a buffer

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}") from error


def _step(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, LookupError, OverflowError):  # cut off in the middle, or of something else
        return math.inf
