"""The examples run as a user runs them, and print what they promise."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiledops

ROOT = Path(__file__).parents[1]
TINY = ("--heads", "1", "--layers", "2", "--context", "8", "--batch", "2")


def start(name: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """An example in a process of its own, warnings as errors, one CPU device as on a laptop."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "TERM": "xterm"}
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / name), *arguments]
    return subprocess.Popen(command, text=True, env=environment, **options)


def printed(name: str, *arguments: str) -> list[str]:
    """The lines that an example prints into a pipe."""
    with start(name, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, error = process.communicate()
    assert process.returncode == 0, error
    return out.splitlines()


def shown(name: str, *arguments: str) -> str:
    """What an example shows on a terminal, without the terminal's control sequences."""
    screen, terminal = os.openpty()
    output = b""
    with start(name, *arguments, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
            while chunk := os.read(screen, 65536):
                output += chunk
    os.close(screen)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    assert process.returncode == 0, text
    return text


def load(name: str) -> ModuleType:
    """An example as a module, to call its functions."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refused(example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: str) -> str:
    """The one line with which an example refuses its arguments."""
    monkeypatch.setattr(sys, "argv", ["example", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        example.main()
    assert exit_info.value.code == 2
    usage, _, error = capsys.readouterr().err.partition("error: ")
    assert usage.startswith("usage: ")
    assert error.count("\n") == 1
    return str(error.strip())


# The lesson


@pytest.mark.parametrize("mode", ["simulate", "reference"])
def test_quickstart(mode: str) -> None:
    arguments = () if mode == "simulate" else ("--mode", mode)  # off TPU, simulate is the default
    lines = [" ".join(line.split()) for line in printed("quickstart.py", *arguments)]
    assert lines[0].startswith("backend cpu")
    assert lines[1].startswith(f"mode {mode}")
    assert lines[2].startswith("chip TPU v5e, imitated")
    assert "grid (3, 3): tiles have 8, 8, 1 rows and 128, 128, 1 columns of the array" in lines
    assert sum(line.endswith("the same bits") for line in lines) == 4  # two dtypes, each against two results
    table = [line for line in lines if re.match(r"\(\d+, \d+\) \d+ ", line)]
    assert table == ["(8, 128) 9 9216 24576 exact", "(16, 128) 6 12288 49152 exact", "(16, 256) 4 16384 98304 exact"]


def test_quickstart_notices_a_wrong_result(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    lesson, axpy = load("quickstart"), tiledops.axpy

    def one_bit_off(*args: Any, **kwargs: Any) -> np.ndarray:
        out = np.array(axpy(*args, **kwargs))
        out.view(np.uint8)[..., 0] ^= 1
        return out

    monkeypatch.setattr(tiledops, "axpy", one_bit_off)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--mode", "reference"])
    with pytest.raises(SystemExit, match="a result differs"):
        lesson.main()
    assert "WRONG" in capsys.readouterr().out


def test_quickstart_refuses_a_tpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert refused(load("quickstart"), monkeypatch, capsys, "--mode", "tpu").startswith("mode tpu runs on a TPU alone")


# The main job


def test_training_in_simulation(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    lines = printed("train_language_model.py", *TINY, "--steps", "3", "--sample", "5", "--out", str(out))
    assert re.fullmatch(r"jax \S+ on cpu; chip TPU v5e, imitated; mode simulate: .*, race detector on", lines[0])
    for library in ("tiledops", "plain"):
        steps = [line for line in lines if re.match(rf"{library} +step \d/3  loss \d\.\d{{3}}  [\d,]+ tokens/s$", line)]
        assert len(steps) == 3
        assert sum(line.startswith(f"{library:8}  held out: 8.000 bits per byte before, ") for line in lines) == 1
    sampled = "\n".join(lines).partition("the model goes on\n")[2].partition("\nplain ")[0]
    assert len(re.sub(r"(^|\n)  \| ", r"\1", sampled)) == 5

    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {
        library: [r["loss"] for r in records if r.get("library") == library and "step" in r]
        for library in ("tiledops", "plain")
    }
    # The head starts at 0: every byte is equally likely, log2(256) bits.
    assert losses["tiledops"][0] == pytest.approx(8.0, abs=1e-5)
    assert [r["step"] for r in records if "step" in r] == [1, 2, 3, 1, 2, 3]
    # Both compute the same in float32, in another order of roundings: apart by some ulps of 8 (1e-6) after 3 steps.
    difference = max(abs(ours - theirs) for ours, theirs in zip(losses["tiledops"], losses["plain"], strict=True))
    assert records[-1] == {"largest_difference": pytest.approx(difference)}
    assert difference < 1e-4
    assert f"largest difference of the two loss curves: {difference:.2e} bits per byte" in lines
    assert (out / "loss.png").exists() == bool(importlib.util.find_spec("matplotlib"))


def test_training_on_a_terminal_learns(tmp_path: Path) -> None:
    arguments = (
        "--mode",
        "reference",
        *TINY,
        "--batch",
        "16",
        "--steps",
        "30",
        "--sample",
        "0",
        "--out",
        str(tmp_path),
    )
    screen = shown("train_language_model.py", *arguments)
    assert re.search(r"tiledops \S+ 30/30 loss \d\.\d{3}  [\d,]+ tokens/s 0:00:00", screen)
    assert "step 1/30" not in screen  # the plain lines are for what is no terminal
    match = re.search(r"tiledops  held out: 8\.000 bits per byte before, (\S+) after", screen)
    assert match is not None
    assert float(match[1]) < 6.0


def test_training_text_is_split_by_file_and_by_seed() -> None:
    example = load("train_language_model")
    (train, held_out), again, other = (example.standard_library(seed) for seed in (0, 0, 1))
    assert held_out.tobytes() == again[1].tobytes() != other[1].tobytes()
    assert train.tobytes() == again[0].tobytes() != other[0].tobytes()
    for start in range(0, len(held_out) - 512, len(held_out) // 16):
        assert held_out[start : start + 512].tobytes() not in train.tobytes()


def test_training_model_sees_no_byte_before_it_predicts_it() -> None:
    example = load("train_language_model")
    model = example.LanguageModel(example.Size(2, 32, 1, 64), example.PlainGate, rngs=nnx.Rngs(0))
    for gate in (model.blocks.attention_gate, model.blocks.mlp_gate):
        gate.gain[...] = jnp.ones(2)
    model.head.kernel[...] = jnp.eye(32, 256)
    text = jnp.arange(8)[None]
    logits, changed = model(text), model(text.at[0, 5].set(200))
    np.testing.assert_array_equal(logits[:, :5], changed[:, :5])
    assert (logits[:, 5:] != changed[:, 5:]).any(axis=-1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "--steps must be 1 or more; got 0"),
        (("--seed", "-1"), "--seed must be 0 or more; got -1"),
        (("--batch", "many"), "argument --batch: invalid int value: 'many'"),
        (("--context", "100000000"), "--context 100000000 is no less than the text"),
        (("--mode", "gpu"), "argument --mode: invalid choice: 'gpu'"),
        (("--mode", "tpu"), "mode tpu runs on a TPU alone; JAX has cpu here. Use simulate or reference"),
        (("--out", "file/folder"), "--out file/folder cannot be written: Not a directory"),
    ],
)
def test_training_refuses(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert refused(load("train_language_model"), monkeypatch, capsys, *arguments).startswith(message)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # nothing is written by a run that is refused
