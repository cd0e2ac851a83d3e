"""How the training examples meet their user: flags refused, what runs, a bar on a terminal and lines elsewhere."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import tiledops


@contextmanager
def progress(name: str, steps: int, *, done: int = 0, lines: int = 12) -> Iterator[Callable[[int, str], None]]:
    """Yields `show(step, text)`: a bar with the text beside it on a terminal, else so many lines in all."""

    def line(step: int, text: str) -> None:
        if step in (1, steps) or step % math.ceil(steps / lines) == 0:
            print(f"{name:8}  step {step}/{steps}  {text}", flush=True)

    if not sys.stdout.isatty():
        yield line
        return
    columns = (TextColumn(f"{name:8}"), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(name, total=steps, completed=done, text="")
        yield lambda step, text: bar.update(task, completed=step, text=text)


def what_runs(config: tiledops.PipelineConfig) -> str:
    """One line: the versions, the chip and the mode that a program of tiledops' runs in here.

    Raises:
      RuntimeError: mode tpu with no TPU.
    """
    chip, attached = tiledops.chips.target()
    mode, backend = tiledops.modes.resolve(config), jax.default_backend()
    if mode == "tpu" and not attached:
        raise RuntimeError(f"mode tpu runs on a TPU alone; JAX has {backend} here. Use simulate or reference")
    kernels = {"tpu": "compiled", "simulate": "simulated, race detector on", "reference": "replaced by plain jnp"}[mode]
    device = f"TPU {tiledops.chips.chip_name(chip)}{'' if attached else ', imitated'}"
    return f"jax {jax.__version__} on {backend}; chip {device}; mode {mode}: kernels {kernels}"


def at_least(parser: argparse.ArgumentParser, args: argparse.Namespace, least: dict[str, int]) -> None:
    """Ends the program with a line if a number that was given is less than it may be."""
    for name, number in least.items():
        value = getattr(args, name)
        if value is not None and value < number:
            parser.error(f"--{name.replace('_', '-')} must be {number} or more; got {value}")


def begin(parser: argparse.ArgumentParser, args: argparse.Namespace) -> TextIO:
    """Says what runs in `args.mode`, and opens `args.out`/metrics.jsonl; or ends the program with a line why not."""
    try:
        with tiledops.use_config(mode=args.mode) as config:
            print(what_runs(config), flush=True)
    except (RuntimeError, ValueError) as error:  # a mode that cannot run here, or an environment that names none
        parser.error(str(error))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        metrics: TextIO = (args.out / "metrics.jsonl").open("w", buffering=1)
    except OSError as error:
        parser.error(f"--out {args.out} cannot be written: {error.strerror}")
    return metrics
