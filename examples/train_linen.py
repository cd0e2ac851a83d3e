"""Trains one deep residual network in Flax Linen with each gate of tiledops, and compares what they learn.

    python examples/train_linen.py

The network highlights syntax: from 65 bytes of Python source it tells what the byte in the middle belongs to, a
comment, a string, a keyword, another name, a number, an operator or space. The data is on every machine: Python's own
standard library, labelled by Python's own tokenizer, split into train and held-out by file.

It is a stack of residual MLP blocks, h = gate(mlp(h), h), without normalisation, so that all that keeps it trainable is
the gate:

- plain add, h + mlp(h). At the start a branch has the variance of its input, so that the signal's doubles from block to
  block. With normalisation in each branch and few blocks it is the right choice, and XLA fuses it.
- Axpy with the fixed gain 1/sqrt(branches): the variance grows by 1/branches a block, less than e-fold through any
  depth, and nothing is learned or saved for the backward pass. The first thing to try. (GPT-2 scales the last weights
  of its branches so, at the start: Radford et al. 2019.)
- ReZero, a learned gain from 0 for each block: the network begins as the identity, signal and gradient pass unchanged
  through any depth, and each block joins when it has something to say. For very deep stacks without normalisation or
  warm-up (Bachlechner et al. 2020, arXiv:2003.04887).
- LayerScale, a learned gain from a small number for each channel: near the identity too, and channels of one block go
  each at its own pace. Made for deep vision transformers, which have normalisation besides (Touvron et al. 2021,
  arXiv:2103.17239; 0.1 up to 18 blocks, as here by default, 1e-5 and less beyond).
- StochasticDepth: training drops whole branches at random, the later the likelier. A regulariser, for networks that
  would overfit; it costs training loss (Huang et al. 2016, arXiv:1603.09382). Here with the fixed gain of the second.

All have the same weights to begin with, the same batches and the same optimizer, `tiledops.transforms.adamw` in Flax's
training state. Losses are in bits: a kind out of seven is log2(7) = 2.81 bits to who knows nothing. What the defaults
gave (`--seed 0` on Python 3.11, `--seed 1` on 3.13; 2026-12-02): plain add ended at 0.55 and 0.64 bits, 75.5% and 77.8%
of the held-out bytes right; the four gates at 0.34-0.37 and 0.39-0.41 bits, 81.4-82.0% and 84.9-86.4%. That there is a
gate counts for more here than which.

By default the kernels are replaced by plain jnp (`--mode reference`), since a simulated kernel takes some 5 ms a tile:
`--mode simulate --steps 2` shows that they are right, and on a TPU `--mode tpu` runs them.
"""

from __future__ import annotations

import argparse
import functools
import json
import keyword
import math
import random
import sysconfig
import time
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from console import at_least, begin, progress
from flax import linen as nn
from rich.console import Console
from rich.table import Table

import tiledops
from tiledops import transforms
from tiledops.linen import Axpy, LayerScale, Residual, ReZero, StochasticDepth, TrainState

KINDS = ("space", "comment", "string", "keyword", "name", "number", "operator")
TOKENS = {"COMMENT": "comment", "STRING": "string", "NAME": "name", "NUMBER": "number", "OP": "operator"}
SIDE = 32  # bytes that the network sees before and after the one that it tells the kind of
TRAIN_BYTES, HELD_OUT_BYTES = 2**19, 2**17  # what is read of the library, in whole files
HELD_OUT_WINDOWS = 8192
DROP_RATE = 0.2  # of the last block, with stochastic depth


class Code(NamedTuple):
    """Bytes of source, SIDE of padding at either end, and of each byte between its kind."""

    text: np.ndarray
    kinds: np.ndarray

    def windows(self, size: int, *seed: int) -> tuple[jax.Array, jax.Array]:
        """Random windows (size, 2*SIDE + 1), and the kinds of their middle bytes."""
        starts = np.random.default_rng(seed).integers(len(self.kinds), size=size)
        return jnp.asarray(self.text[starts[:, None] + np.arange(2 * SIDE + 1)]), jnp.asarray(self.kinds[starts])


def kinds_of(source: str) -> np.ndarray:
    """The kind of each character, as an index into KINDS, by Python's tokenizer."""
    kinds = np.zeros(len(source), np.int32)
    lines = source.splitlines(keepends=True)
    starts = np.cumsum([0, *map(len, lines)])
    for token in tokenize.generate_tokens(iter(lines).__next__):
        name = tokenize.tok_name[token.type]
        kind = "string" if name.startswith(("FSTRING", "TSTRING")) else TOKENS.get(name, "space")
        if kind == "name" and keyword.iskeyword(token.string):
            kind = "keyword"
        (first, column), (last, end) = token.start, token.end
        kinds[starts[first - 1] + column : starts[last - 1] + end] = KINDS.index(kind)
    return kinds


def standard_library(seed: int) -> tuple[Code, Code]:
    """Code to train on, and code of other files to hold out: modules of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(seed).shuffle(files)

    def read(least: int) -> Code:
        sources: list[str] = []
        while files and sum(map(len, sources)) < least:
            source = files.pop().read_bytes()
            if source.isascii():  # a character is a byte
                sources.append("\n".join(source.decode().splitlines()) + "\n")
        text = np.frombuffer("".join(sources).encode(), np.uint8)
        return Code(np.pad(text, SIDE), np.concatenate([kinds_of(source) for source in sources]))

    held_out = read(HELD_OUT_BYTES)
    return read(TRAIN_BYTES), held_out


# The network

Gate = Callable[[jax.Array, bool], Callable[..., Any]]  # of a block's rate of dropping and `deterministic`, its gate


def gates(layers: int, width: int) -> dict[str, Gate]:
    """Each gate by its name, for a network of so many blocks."""
    fixed = nn.initializers.constant(layers**-0.5)
    small = nn.initializers.constant(0.1 if layers <= 18 else 1e-5)
    return {
        "plain add": lambda rate, deterministic: lambda branch, residual: branch + residual,
        "Axpy, fixed": lambda rate, deterministic: Axpy(gain_init=fixed, learnable=False),
        "ReZero": lambda rate, deterministic: ReZero(),
        "LayerScale": lambda rate, deterministic: LayerScale(width, gain_init=small),
        "StochasticDepth": lambda rate, deterministic: StochasticDepth(
            rate, gain_init=fixed, deterministic=deterministic
        ),
    }


class MLP(nn.Module):
    """A hidden layer of relu, by weights that keep the variance of what they take."""

    @nn.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        width = h.shape[-1]
        hidden = nn.relu(nn.Dense(width, kernel_init=nn.initializers.lecun_normal())(h))
        return nn.Dense(width, kernel_init=nn.initializers.he_normal())(hidden)


class Block(nn.Module):
    gate: Gate
    deterministic: bool

    @nn.compact
    def __call__(self, h: jax.Array, rate: jax.Array) -> tuple[jax.Array, None]:
        return Residual(MLP(name="mlp"), self.gate(rate, self.deterministic))(h), None


class Highlighter(nn.Module):
    """Windows of bytes (batch, 2*SIDE + 1) to the logits of their middle byte's kind (batch, len(KINDS)).

    One scan runs the blocks: a kernel is traced once for all of them.
    """

    gate: Gate
    layers: int
    width: int

    @nn.compact
    def __call__(self, windows: jax.Array, deterministic: bool) -> jax.Array:
        bytes_ = nn.Embed(256, 16, embedding_init=nn.initializers.normal(1.0))(windows)
        h = nn.Dense(self.width)(bytes_.reshape(len(windows), -1))
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True})
        h, _ = blocks(self.gate, deterministic, name="blocks")(h, jnp.linspace(0.0, DROP_RATE, self.layers))
        # From zero, every kind is equally likely at the start, whatever the blocks do.
        return nn.Dense(len(KINDS), kernel_init=nn.initializers.zeros)(h)


class Outcome(NamedTuple):
    """Each step's loss, in bits; the held-out share that is right; each block's mean |gain|; the seconds it took."""

    losses: list[float]
    accuracy: float
    gains: list[float]
    seconds: float


def train(name: str, gate: Gate, args: argparse.Namespace, code: tuple[Code, Code], metrics: TextIO) -> Outcome:
    learn, held_out = code
    model = Highlighter(gate, args.layers, args.width)
    key = jax.random.key(args.seed)
    params = jax.jit(lambda windows: model.init(key, windows, True)["params"])(learn.windows(1, 0)[0])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=transforms.adamw(args.rate))

    @functools.partial(jax.jit, donate_argnums=0)  # in place: what is donated first is returned first
    def step(state: TrainState, windows: jax.Array, kinds: jax.Array) -> tuple[TrainState, jax.Array]:
        def bits(params: Any) -> jax.Array:
            rngs = {"dropout": jax.random.fold_in(key, state.step)}
            logits = state.apply_fn({"params": params}, windows, False, rngs=rngs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, kinds).mean() / math.log(2)

        loss, grads = jax.value_and_grad(bits)(state.params)
        return state.apply_gradients(grads=grads), loss

    @jax.jit
    def share_right(params: Any, windows: jax.Array, kinds: jax.Array) -> jax.Array:
        return (model.apply({"params": params}, windows, True).argmax(-1) == kinds).mean()

    losses: list[float] = []
    start = time.perf_counter()
    with progress(f"{name:15}", args.steps, lines=2) as show:
        for i in range(1, args.steps + 1):
            state, loss = step(state, *learn.windows(args.batch, args.seed, i))
            losses.append(float(loss))
            print(json.dumps({"gate": name, "step": i, "loss": losses[-1]}), file=metrics)
            show(i, f"loss {losses[-1]:.3f}")
    accuracy = float(share_right(state.params, *held_out.windows(HELD_OUT_WINDOWS, args.seed)))
    print(json.dumps({"gate": name, "held_out_accuracy": accuracy}), file=metrics)
    of_blocks = [leaf for path, leaf in jax.tree.leaves_with_path(state.params["blocks"]) if "gain" in str(path)]
    gains = [float(np.abs(gain).mean()) for leaf in of_blocks for gain in np.asarray(leaf)]
    return Outcome(losses, accuracy, gains, time.perf_counter() - start)


def table(outcomes: dict[str, Outcome]) -> Table:
    shown = Table(caption="losses: means of the first and of the last tenth of the steps, in bits")
    for column in ("gate", "first loss", "last loss", "held out", "gains", "time"):
        shown.add_column(column, justify="left" if column == "gate" else "right")
    for name, (losses, accuracy, gains, seconds) in outcomes.items():
        tenth = math.ceil(len(losses) / 10)
        first, last = float(np.mean(losses[:tenth])), float(np.mean(losses[-tenth:]))
        sizes = f"{min(gains):.3f}-{max(gains):.3f}" if gains else "none"
        shown.add_row(name, f"{first:.3f}", f"{last:.3f}", f"{accuracy:.1%}", sizes, f"{seconds:.0f} s")
    return shown


def plot(curves: dict[str, list[float]], columns: int = 70, rows: int = 18) -> str:
    """Learning curves in characters: the loss, on a logarithmic scale, by the first letter of the gate.

    Each column is the mean of its steps. Where curves meet, a `*`. What is worse than a blind guess is at the top.
    """
    top, columns = math.log2(len(KINDS)), min(columns, *map(len, curves.values()))
    means = {
        name[0]: [min(top, float(np.mean(part))) for part in np.array_split(losses, columns)]
        for name, losses in curves.items()
    }
    bottom = min(top / 2, *map(min, means.values()))
    canvas = [[" "] * columns for _ in range(rows)]
    for letter, curve in means.items():
        for column, loss in enumerate(curve):
            row = canvas[round(math.log(top / loss) / math.log(top / bottom) * (rows - 1))]
            row[column] = letter if row[column] == " " else "*"
    levels = top * (bottom / top) ** (np.arange(rows) / (rows - 1))
    lines = [f"{level:4.2f} |{''.join(row)}".rstrip() for level, row in zip(levels, canvas, strict=True)]
    steps = len(next(iter(curves.values())))
    return "\n".join(["bits", *lines, f"     +{'-' * columns}", f"step  1{steps:>{max(1, columns - 1)}}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    modes = ("tpu", "simulate", "reference")
    parser.add_argument("--mode", choices=modes, default="reference", help="default: reference, plain jnp for kernels")
    parser.add_argument("--steps", type=int, default=1500, help="of each network")
    parser.add_argument("--seed", type=int, default=0, help="of the networks, the batches and the split of the code")
    parser.add_argument("--out", type=Path, default=Path("runs/linen"), help="folder for metrics")
    parser.add_argument("--batch", type=int, default=128, help="windows of code a step")
    parser.add_argument("--layers", type=int, default=18, help="residual blocks")
    parser.add_argument("--width", type=int, default=64, help="features")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    args = parser.parse_args()
    at_least(parser, args, {"steps": 1, "batch": 1, "layers": 1, "width": 1, "seed": 0})
    if not 0.0 < args.rate < math.inf:
        parser.error(f"--rate must be a positive number; got {args.rate}")
    start = time.perf_counter()
    metrics = begin(parser, args)

    code = standard_library(args.seed)
    print("code: {:,} bytes to train on, {:,} of other files held out".format(*(len(part.kinds) for part in code)))
    shares = np.bincount(code[1].kinds, minlength=len(KINDS)) / len(code[1].kinds)
    print(f"who always says {KINDS[shares.argmax()]} is right of {shares.max():.1%} of what is held out", flush=True)
    with metrics, tiledops.use_config(mode=args.mode):
        chosen = gates(args.layers, args.width).items()
        outcomes = {name: train(name, gate, args, code, metrics) for name, gate in chosen}
    print(plot({name: outcome.losses for name, outcome in outcomes.items()}))
    Console().print(table(outcomes))
    print(f"metrics: {args.out / 'metrics.jsonl'}")
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
