"""What the first host shows and keeps. The others are silent."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import jax
from console import progress

from pod import RunError


def say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


class Log:
    """A line for each step: shown, and kept as JSON in `metrics.jsonl`.

    A run that goes on from step n drops what was logged after it: those steps are taken again.
    """

    def __init__(self, folder: Path):
        self.path = folder / "metrics.jsonl"
        self.file: TextIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a"):
                pass
        except OSError as error:
            raise RunError(f"--out {folder} cannot be written: {error.strerror}") from error

    @contextmanager
    def steps(self, done: int, steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Yields what logs a step's record: `step`, `loss`, `tokens_per_second`, `refused`, perhaps `share`."""
        if jax.process_index() != 0:
            yield lambda record: None
            return
        with self._continued(done) as file, progress("train", steps, done=done, lines=steps) as show:

            def log(record: dict[str, Any]) -> None:
                file.write(json.dumps(record) + "\n")
                share = f"  {record['share']:.0%} of the roofline" if "share" in record else ""
                loss = math.nan if record["loss"] is None else record["loss"]
                show(record["step"], f"loss {loss:.4f}  {record['tokens_per_second']:,.0f} tokens/s{share}")

            yield log

    def _continued(self, done: int) -> TextIO:
        """The file, open behind its record of step `done`."""
        lines = [line for line in self.path.read_text().splitlines() if _step(line) <= done]
        kept = self.path.with_suffix(".tmp")
        kept.write_text("".join(line + "\n" for line in lines))
        os.replace(kept, self.path)
        return self.path.open("a", buffering=1)


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except ValueError:  # cut off in the middle
        return math.inf
