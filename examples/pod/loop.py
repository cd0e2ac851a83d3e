"""Step after step, from the last good checkpoint to the end or the first signal to stop."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from pod import RunError, account, data, parallel, training
from pod.checkpoints import Checkpoints, reason
from pod.log import Log, say
from pod.presets import Settings


class Plan(NamedTuple):
    """How a run is watched; none of it changes the loss curve.

    Attributes:
      save_every: steps from one checkpoint to the next.
      patience: how many steps in a row may be refused.
      profile: whether to write a trace of three steps.
    """

    save_every: int
    patience: int
    profile: bool


def run(settings: Settings, mesh: Mesh, text: data.Text, checkpoints: Checkpoints, log: Log, plan: Plan) -> bool:
    """Whether all steps were taken; if not, a signal came, and the state is saved.

    Raises:
      RunError: a checkpoint could not be written, or too many steps in a row were refused.
    """
    like = parallel.abstract(jax.eval_shape(lambda: training.new_state(settings)), mesh)
    done, state = checkpoints.restore(settings, like) or (0, training.initial(settings, mesh))
    if done >= settings.steps:
        say(f"all {settings.steps} steps are taken{', and none is left to trace' if plan.profile else ''}")
        return True

    def batch(step: int) -> jax.Array:
        return data.batch_of(
            text, mesh, seed=settings.seed, step=step, batch=settings.batch, length=settings.context + 1
        )

    start = time.perf_counter()
    step = account.compile_step(settings, mesh, training.train_step(settings).lower(state, batch(done + 1)))
    say(f"compiled in {time.perf_counter() - start:.1f} s")
    least = account.of(settings, mesh, step).least_seconds if account.on_tpu(mesh) else None
    leaves = [".".join(parallel.names(path)) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)]

    numbers = range(done + 1, settings.steps + 1)
    traces = log.folder("profile") if plan.profile else None
    with log.steps(done, settings.steps) as record, stop_signal() as stopping, traced(traces, numbers) as trace:
        before = time.perf_counter()

        def settle(number: int, metrics: training.Metrics) -> None:
            """Reads a step's numbers and logs them."""
            nonlocal before
            loss, refused, finite = jax.device_get(metrics)
            now = time.perf_counter()
            entry: dict[str, Any] = {"step": number, "loss": float(loss) if math.isfinite(loss) else None}
            entry |= {"tokens_per_second": settings.batch * settings.context / (now - before), "refused": int(refused)}
            if least:
                entry["share"] = least / (now - before)
            before = now
            record(entry)
            if refused:
                first = next((name for name, ok in zip(leaves, finite, strict=True) if not ok), "none")
                say(f"step {number} is refused: loss {loss}, first gradient that is not finite: {first}")
            if refused >= plan.patience:
                raise RunError(f"stopped at step {number}: {int(refused)} steps in a row were not finite")

        text_of_step = batch(done + 1)
        for number in numbers:
            trace(number)
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                state, metrics = step(state, text_of_step)
                text_of_step = batch(number + 1)  # read while the step runs
                settle(number, metrics)
            stop = stopping(number)
            if stop or number % plan.save_every == 0 or number == settings.steps:
                checkpoints.save(number, state, settings)
                before = time.perf_counter()
            if stop:
                break
        checkpoints.finish()  # while a signal to stop still waits for it
    if number < settings.steps:
        say(f"told to stop: step {number} is saved, and the same command goes on from there")
    return number == settings.steps


@contextlib.contextmanager
def stop_signal() -> Iterator[Callable[[int], bool]]:
    """Yields `stopping(step)`: whether SIGTERM came, which a machine gets before it is taken away.

    Of several hosts, often only one gets it. JAX's distributed runtime tells the others, and all stop after one step.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    came = []
    handler = signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    try:
        yield lambda step: bool(came)
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def traced(folder: Path | None, steps: range) -> Iterator[Callable[[int], None]]:
    """Yields `trace(step)`, called before each: writes a trace in which XLA's operations have their names.

    It is of the third step to the fifth, earlier where fewer are left to take, and what there is of it where they end.
    """
    if not folder:
        yield lambda step: None
        return
    first = steps[max(0, min(2, len(steps) - 3))]
    with contextlib.ExitStack() as tracing:

        def trace(step: int) -> None:
            if step == first:
                jax.profiler.start_trace(folder)
                tracing.callback(write)
            elif step == first + 3:
                tracing.close()

        def write() -> None:
            try:
                jax.profiler.stop_trace()
            except (jax.errors.JaxRuntimeError, OSError) as error:
                raise RunError(f"a trace cannot be written to {folder}: {reason(error)}") from error
            say(f"trace: {folder}")

        yield trace
