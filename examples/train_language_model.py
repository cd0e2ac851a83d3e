"""Trains a small language model whose residual adds and optimizer arithmetic are tiledops kernels.

    python examples/train_language_model.py

The model is a pre-norm transformer over bytes (`language_model.py`). Its text is on every machine: the source of
Python's own standard library, split into train and held-out by file. On a TPU the kernels are compiled; anywhere else
Pallas simulates them, race detector on, which shows that they are right and not that they are fast. At the end the
same model is trained from the same seed with plain jnp adds and Optax, and the two loss curves are compared.

Losses are in bits per byte: a byte is 8 bits to who knows nothing, and so to the model at the start.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from console import at_least, begin, progress
from flax import nnx
from language_model import LanguageModel, Size, bits_per_byte, standard_library

import tiledops
import tiledops.nnx
import tiledops.transforms

HEAD_WIDTH = 32
HELD_OUT_BATCHES = 8


class PlainGate(tiledops.nnx.ReZero):
    """The same gate, with the same parameter, in plain jnp."""

    def __call__(self, branch: jax.Array, residual: jax.Array) -> jax.Array:
        assert self.gain is not None
        return self.gain[...] * branch + residual


class Library(NamedTuple):
    """Where the residual add and the optimizer come from. All else is shared."""

    name: str
    gate: type[tiledops.nnx.ReZero]
    transforms: ModuleType
    apply_updates: Callable[[Any, Any], Any]

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        """SGD with momentum. Optax's own transformations (the clipping) mix with tiledops' in one chain."""
        rate = optax.warmup_cosine_decay_schedule(0.03, 0.3, max(1, steps // 10), max(2, steps), 0.03)
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            self.transforms.add_decayed_weights(1e-4, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
            self.transforms.trace(decay=0.9, nesterov=True),
            self.transforms.scale_by_learning_rate(rate),
        )


TILEDOPS = Library("tiledops", tiledops.nnx.ReZero, tiledops.transforms, tiledops.apply_updates)
PLAIN = Library("plain", PlainGate, optax, optax.apply_updates)


def windows(text: np.ndarray, batch: int, length: int, seed: int) -> Iterator[jax.Array]:
    """Batches of random windows of the text, for ever, and the same for the same seed."""
    draw = np.random.default_rng(seed)
    while True:
        starts = draw.integers(0, len(text) - length + 1, batch)
        yield jnp.asarray(np.stack([text[start : start + length] for start in starts]), jnp.int32)


def train(
    library: Library, args: argparse.Namespace, text: tuple[np.ndarray, np.ndarray], metrics: TextIO
) -> tuple[LanguageModel, list[float]]:
    """The trained model and its losses. All that is random comes from `args.seed`, the same for every library."""
    width = HEAD_WIDTH * args.heads
    model = LanguageModel(Size(args.layers, width, args.heads, 2 * width), library.gate, rngs=nnx.Rngs(args.seed))
    optimizer = library.optimizer(args.steps)
    state = optimizer.init(nnx.state(model, nnx.Param))

    @nnx.jit(donate_argnames=("model", "state"))  # new parameters and momentum take the place of the old
    def step(model: LanguageModel, state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = nnx.value_and_grad(bits_per_byte)(model, batch)
        params = nnx.state(model, nnx.Param)
        updates, state = optimizer.update(grads, state, params)
        nnx.update(model, library.apply_updates(params, updates))
        return state, loss

    batches, held_out = (windows(part, args.batch, args.context + 1, args.seed) for part in text)
    held_out_batches = jnp.stack([next(held_out) for _ in range(HELD_OUT_BATCHES)])
    evaluate = nnx.jit(lambda model: jax.lax.map(lambda batch: bits_per_byte(model, batch), held_out_batches).mean())

    before, losses = float(evaluate(model)), []
    with progress(library.name, args.steps) as show:
        for number in range(1, args.steps + 1):
            start = time.perf_counter()
            state, loss = step(model, state, next(batches))
            losses.append(float(loss))
            rate = args.batch * args.context / (time.perf_counter() - start)
            show(number, f"loss {losses[-1]:.3f}  {rate:,.0f} tokens/s")
            record = {"library": library.name, "step": number, "loss": losses[-1], "tokens_per_second": rate}
            print(json.dumps(record), file=metrics)
    after = float(evaluate(model))
    print(json.dumps({"library": library.name, "held_out_before": before, "held_out_after": after}), file=metrics)
    print(f"{library.name:8}  held out: {before:.3f} bits per byte before, {after:.3f} after")
    return model, losses


@nnx.jit
def continuation(model: LanguageModel, seen: jax.Array, keys: jax.Array) -> jax.Array:
    """Samples one byte a key after `seen` (1, length), from the last `length` bytes each."""

    def sample(seen: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        byte = jax.random.categorical(key, model(seen)[:, -1:] / 0.8)  # the temperature
        return jnp.concatenate([seen[:, 1:], byte], axis=1), byte

    return jax.lax.scan(sample, seen, keys)[1].reshape(-1)


def printable(text: Any) -> str:
    """With a margin, and a dot for each byte that is not printable ASCII."""
    return "  | " + "".join(chr(b) if 32 <= b < 127 or b == 10 else "." for b in map(int, text)).replace("\n", "\n  | ")


def plot(path: Path, curves: dict[str, list[float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots()
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(range(1, len(losses) + 1), losses, style, label=name)
    axes.set(xlabel="step", ylabel="training loss, bits per byte")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--mode", choices=("tpu", "simulate", "reference"), help="default: tpu on a TPU, else simulate")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the model, the batches and the split of the text")
    parser.add_argument("--out", type=Path, default=Path("runs/language_model"), help="folder for metrics and plot")
    parser.add_argument("--batch", type=int, default=8, help="windows of text a step")
    parser.add_argument("--context", type=int, default=128, help="bytes in a window")
    parser.add_argument("--heads", type=int, default=4, help=f"attention heads, {HEAD_WIDTH} features each")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sample", type=int, default=100, help="bytes to sample after training")
    args = parser.parse_args()
    at_least(parser, args, {"steps": 1, "batch": 1, "context": 1, "heads": 1, "layers": 1, "seed": 0, "sample": 0})
    start = time.perf_counter()
    text = standard_library(args.seed)
    if min(map(len, text)) <= args.context:
        parser.error(f"--context {args.context} is no less than the text, of {min(map(len, text))} bytes")
    metrics = begin(parser, args)

    with metrics, tiledops.use_config(mode=args.mode):
        print("text: {:,} bytes to train on, {:,} of other files held out".format(*map(len, text)), flush=True)
        model, ours = train(TILEDOPS, args, text, metrics)
        prompt = text[1][: args.context]
        keys = jax.random.split(jax.random.key(args.seed), args.sample)
        sampled = continuation(model, jnp.asarray(prompt, jnp.int32)[None], keys)
        print(f"After\n{printable(prompt)}\nthe model goes on\n{printable(sampled)}")
        _, plain = train(PLAIN, args, text, metrics)
        difference = float(np.abs(np.subtract(ours, plain)).max())
        print(json.dumps({"largest_difference": difference}), file=metrics)
    print(f"largest difference of the two loss curves: {difference:.2e} bits per byte")
    print(f"metrics: {args.out / 'metrics.jsonl'}")
    if importlib.util.find_spec("matplotlib"):
        plot(args.out / "loss.png", {TILEDOPS.name: ours, PLAIN.name: plain})
        print(f"loss plot: {args.out / 'loss.png'}")
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
