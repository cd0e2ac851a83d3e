"""The pod example in processes of its own: killed, told to stop, on a full disk, on a terminal, and two as one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "train_on_pod.py"
STEPS = 60
COMMON = ("--context", "8", "--drop", "0.1", "--steps", str(STEPS), "--save-every", "4")


@pytest.fixture(scope="module")
def compilations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the runs of this module share what they compile, as those of a pod do."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compilations")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def start(*arguments: str, devices: int = 2, environment: dict[str, str] | None = None, **options: Any) -> Any:
    everything = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "JAX_PLATFORMS": "cpu",
        # Compiled quickly rather than well: these runs are short.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
        "COLUMNS": "120",
        **(environment or {}),
    }
    command = [sys.executable, "-W", "error", *(() if "-c" in arguments else (str(SCRIPT),)), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(command, text=True, env=everything, **pipes)


def finished(process: Any) -> tuple[int, list[str], str]:
    try:
        out, error = process.communicate(timeout=200)
    finally:
        process.kill()
    return process.returncode, out.splitlines() if out else [], error


def stopped(process: Any, when: Callable[[], bool], by: signal.Signals) -> tuple[int, list[str], str]:
    """The process, signalled as soon as `when()`."""
    deadline = time.monotonic() + 200
    while process.poll() is None and not when() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert process.poll() is None, finished(process)
    process.send_signal(by)
    return finished(process)


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


@pytest.mark.timeout(600)
def test_a_run_that_is_killed_goes_on_as_if_nothing_had_been(tmp_path: Path, compilations: dict[str, str]) -> None:
    """The same losses to the last bit, by way of two kills and a signal to stop."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    code, lines, error = finished(start(*COMMON, "--out", str(whole), environment=compilations))
    assert (code, error) == (0, "")
    assert (
        sum(bool(re.fullmatch(r"train +step \d+/60  loss \d\.\d{4}  [\d,]+ tokens/s", line)) for line in lines) == STEPS
    )
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["52", "56", "60"]

    def again(*flags: str) -> Any:
        return start(*COMMON, "--out", str(broken), *flags, environment=compilations)

    def saving(*after: int) -> bool:
        """Whether a checkpoint is half written."""
        names = os.listdir(broken / "checkpoints") if (broken / "checkpoints").exists() else []
        return any("tmp" in name and int(name.split(".")[0]) > max(after) for name in names)

    def reached(step: int) -> bool:
        path = broken / "metrics.jsonl"
        return path.exists() and f'"step": {step},' in path.read_text()

    code, _, _ = stopped(again(), lambda: saving(4), signal.SIGKILL)  # in the middle of a save
    assert code == -signal.SIGKILL
    assert saving(4)
    code, _, _ = stopped(again(), lambda: reached(18), signal.SIGKILL)  # in the middle of a step
    assert code == -signal.SIGKILL
    code, lines, error = stopped(again(), lambda: reached(30), signal.SIGTERM)
    assert (code, error) == (143, "")
    assert "restored" in "".join(lines)
    (said,) = [line for line in lines if line.startswith("told to stop: step ")]
    step = int(said.split()[4])
    assert (broken / "checkpoints" / str(step)).is_dir()
    code, lines, error = finished(again())
    assert (code, error) == (0, "")
    assert f"checkpoint {step}: restored" in lines
    assert losses(broken) == losses(whole)
    assert losses(whole)[-1] < 6.0

    code, lines, _ = finished(again("--profile"))
    assert code == 0
    assert "all 60 steps are taken, and none is left to trace" in lines
    assert not (broken / "profile").exists()


LIMITED = """
import resource, sys
sys.path.insert(0, {examples!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
import train_on_pod
sys.argv[0] = "train_on_pod.py"
sys.exit(train_on_pod.main())
"""


def test_a_full_disk_ends_in_one_line(tmp_path: Path) -> None:
    """As far as a test can have one: no file may grow beyond 64 KiB."""
    job = LIMITED.format(examples=str(SCRIPT.parent))
    code, _, error = finished(start("-c", job, *COMMON, "--out", str(tmp_path), devices=1))
    assert code == 2
    expected = f"train_on_pod.py: error: a checkpoint cannot be written to {tmp_path}/checkpoints: File too large\n"
    assert error == expected


JOB = """
import sys
import jax
sys.path.insert(0, {examples!r})
import train_on_pod
from pod import data

read, row = set(), data.row
data.row = lambda text, seed, step, number, length: (read.add(number), row(text, seed, step, number, length))[1]
train_on_pod.main()
print("read", sorted(read))
"""


@pytest.mark.timeout(400)
def test_hosts_started_differently_are_refused(tmp_path: Path) -> None:
    """With other seeds they would train a mix of two models; the one that saves more often would wait for ever."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        join = ("--coordinator", f"localhost:{free.getsockname()[1]}", "--num-processes", "2", "--process-id")
    seeds = [("--seed", str(index), "--save-every", str(1 + index), "--out", str(tmp_path)) for index in range(2)]
    two = [start(*flags, *join, str(index)) for index, flags in enumerate(seeds)]
    for code, _, error in [finished(process) for process in two]:
        assert code == 2, error
        expected = "error: not all hosts have the same seed, save_every: start the same command on each"
        assert error.splitlines()[-1].endswith(expected)


@pytest.mark.timeout(400)
def test_two_processes_equal_one_and_each_reads_its_share(tmp_path: Path) -> None:
    job = JOB.format(examples=str(SCRIPT.parent))
    arguments = ("-c", job, "--context", "8", "--steps", "4", "--mesh", "2,2,2", "--save-every", "2")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        join = ("--coordinator", f"localhost:{free.getsockname()[1]}", "--num-processes", "2", "--process-id")
    one = start(*arguments, "--out", str(tmp_path / "one"), devices=8)
    two = [start(*arguments, "--out", str(tmp_path / "two"), *join, str(index), devices=4) for index in range(2)]
    results = [finished(process) for process in (one, *two)]
    for code, _, error in results:
        assert code == 0, error
    reads = [next(line for line in lines if line.startswith("read ")) for _, lines, _ in results]
    assert reads == [f"read {list(range(*part))}" for part in ((16,), (8,), (8, 16))]
    assert not any(line.startswith("train ") for line in results[2][1])  # the second host is silent
    # Over a network the sums of a collective are added up in another order: an ulp of a float32 of 8 is 4.8e-7.
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=0, atol=1e-5)
    assert sorted(path.name for path in (tmp_path / "two" / "checkpoints").iterdir()) == ["2", "4"]


@pytest.mark.timeout(400)
def test_simulated_on_a_terminal_with_a_trace(tmp_path: Path) -> None:
    """A bar, and a trace in which each kernel has its name."""
    screen, terminal = os.openpty()
    arguments = (
        "--mode",
        "simulate",
        "--steps",
        "5",
        "--batch",
        "2",
        "--context",
        "4",
        "--profile",
        "--out",
        str(tmp_path),
    )
    process = start(*arguments, devices=1, stdout=terminal, stderr=terminal, environment={"TERM": "xterm"})
    os.close(terminal)
    output = b""
    try:
        while chunk := os.read(screen, 65536):
            output += chunk
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(screen)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    assert process.wait() == 0, text
    assert "mode simulate: kernels simulated, race detector on" in text
    assert re.search(r"train +\S+ 5/5 loss \d\.\d{4}  [\d,]+ tokens/s 0:00:00", text), text
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    content = trace.read_bytes()
    for kernel in (b"tiledops_axpy", b"tiledops_scale_and_dot", b"tiledops_checked_square", b"adam"):
        assert kernel in content
