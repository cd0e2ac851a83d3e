"""The Linen example runs as a user runs it, and labels, learns and draws what it promises."""

from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import train_linen as example
from test_examples import printed, refused

import tiledops

GATES = ("plain add", "Axpy, fixed", "ReZero", "LayerScale", "StochasticDepth")
STEPS = 12


def test_every_gate_is_trained_and_shown(tmp_path: Path) -> None:
    tiny = ("--layers", "3", "--width", "8", "--batch", "4", "--steps", str(STEPS))
    lines = printed("train_linen.py", *tiny, "--out", str(tmp_path / "a" / "b"))
    assert re.fullmatch(r"jax \S+ on cpu; chip TPU v5e, imitated; mode reference: .* plain jnp", lines[0])
    assert re.fullmatch(r"code: [\d,]{7} bytes to train on, [\d,]{7} of other files held out", lines[1])
    records = [json.loads(line) for line in (tmp_path / "a" / "b" / "metrics.jsonl").read_text().splitlines()]
    curves = {
        name: [record["loss"] for record in records if record["gate"] == name and "loss" in record] for name in GATES
    }
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert [row[0] for row in rows] == list(GATES)
    for name, first, last, held_out, gains, _ in rows:
        assert len(curves[name]) == STEPS
        # The head starts at 0: every kind is equally likely, log2(7) bits.
        assert curves[name][0] == pytest.approx(np.log2(7), abs=1e-5)
        assert (first, last) == (f"{np.mean(curves[name][:2]):.3f}", f"{np.mean(curves[name][-2:]):.3f}")
        (accuracy,) = [r["held_out_accuracy"] for r in records if r["gate"] == name and "held_out_accuracy" in r]
        assert held_out == f"{accuracy:.1%}"
        assert (gains == "none") == (name not in ("ReZero", "LayerScale"))
    plot = "\n".join(lines).partition("\nbits\n")[2].partition("+")[0].splitlines()
    columns = [line[6:].ljust(STEPS) for line in plot]
    assert all(set(column) != {" "} for column in zip(*columns, strict=True))

    flags = argparse.Namespace(layers=3, width=8, batch=4, steps=2, seed=0, rate=3e-3)
    with tiledops.use_config(mode="simulate"):
        gate, code = example.gates(3, 8)["ReZero"], example.standard_library(0)
        simulated = example.train("ReZero", gate, flags, code, io.StringIO())
    # A few hundred terms in float32, summed in another order.
    np.testing.assert_allclose(simulated.losses, curves["ReZero"][:2], rtol=1e-4)


def test_bytes_are_labelled_as_the_tokenizer_says() -> None:
    source = 'if x1 == 2.5:  # why\n    y = """a\n b"""\n'
    short = {"space": " ", "comment": "c", "string": "s", "keyword": "k", "name": "n", "number": "1", "operator": "o"}
    labelled = "".join(short[example.KINDS[kind]] for kind in example.kinds_of(source))
    assert labelled == "kk nn oo 111o  ccccc     n o ssssssssss "


def test_code_is_split_by_file_and_by_seed() -> None:
    (learn, held_out), again, other = (example.standard_library(seed) for seed in (0, 0, 1))
    assert held_out.text.tobytes() == again[1].text.tobytes() != other[1].text.tobytes()
    for part in (learn, held_out):
        assert len(part.text) == len(part.kinds) + 2 * example.SIDE
        assert set(np.unique(part.kinds)) == set(range(len(example.KINDS)))
    text = held_out.text[example.SIDE : -example.SIDE]
    for start in range(0, len(text) - 512, len(text) // 16):
        assert text[start : start + 512].tobytes() not in learn.text.tobytes()


def test_a_window_has_the_labelled_byte_in_its_middle() -> None:
    code, _ = example.standard_library(0)
    windows, kinds = code.windows(512, 0, 1)
    middle = np.asarray(windows[:, example.SIDE])
    blank = np.isin(middle, np.frombuffer(b" \n", np.uint8))
    assert blank[np.asarray(kinds) == example.KINDS.index("space")].mean() > 0.95  # the rest continues lines: "\\"
    assert not blank[np.asarray(kinds) == example.KINDS.index("name")].any()
    assert windows.shape == (512, 2 * example.SIDE + 1)
    assert not jnp.array_equal(windows, code.windows(512, 0, 2)[0])


def test_the_plot_tells_curves_apart() -> None:
    drawn = example.plot({"up": [0.5, 1.0, 9.0], "down": [2.0, 1.0, float("nan")]}, rows=3)
    top, middle, bottom = (line.partition("|")[2] for line in drawn.splitlines()[1:4])
    assert (top, middle, bottom) == ("d *", " *", "u")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "--steps must be 1 or more; got 0"),
        (("--layers", "0"), "--layers must be 1 or more; got 0"),
        (("--rate", "-1"), "--rate must be a positive number; got -1.0"),
        (("--rate", "nan"), "--rate must be a positive number; got nan"),
        (("--batch", "many"), "argument --batch: invalid int value: 'many'"),
        (("--mode", "gpu"), "argument --mode: invalid choice: 'gpu'"),
        (("--mode", "tpu"), "mode tpu runs on a TPU alone; JAX has cpu here. Use simulate or reference"),
        (("--out", "file/folder"), "--out file/folder cannot be written: Not a directory"),
    ],
)
def test_wrong_flags_are_refused(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert refused(example, monkeypatch, capsys, *arguments).startswith(message)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
