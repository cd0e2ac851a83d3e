"""The language model that the training examples share: its loss, and a text that is on every machine.

The model is a pre-norm transformer over bytes (Flax NNX). Its residual adds are gates that the caller brings. Losses
are in bits per byte: a byte is 8 bits to who knows nothing, and so to the model at the start.
"""

from __future__ import annotations

import math
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx

BYTES = 256
TRAIN_BYTES, HELD_OUT_BYTES = 2**20, 2**18  # what is read of the text, in whole files

Gate = Callable[..., nnx.Module]  # gate(rngs=rngs)(branch, residual) is gain*branch + residual


class Size(NamedTuple):
    """Layers of `heads` attention heads and an MLP with `hidden` features inside, `width` features between them."""

    layers: int
    width: int
    heads: int
    hidden: int


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions (Su et al. 2021) for x of shape (batch, context, heads, head width)."""
    frequencies = 10000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nnx.Module):
    """Attention and an MLP, each a branch whose result goes through a gate: h = gain*branch + h.

    Arguments as in `LanguageModel`.
    """

    def __init__(self, size: Size, gate: Gate, *, dtype: Any = None, rows: Any = None, rngs: nnx.Rngs):
        options: dict[str, Any] = {"use_bias": False, "dtype": dtype, "rngs": rngs}
        heads = (size.heads, size.width // size.heads)
        self.norm = nnx.RMSNorm(size.width, use_scale=False, dtype=dtype, rngs=rngs)
        self.qkv = nnx.LinearGeneral(size.width, (3, *heads), **options)
        self.project = nnx.LinearGeneral(heads, size.width, axis=(-2, -1), **options)
        self.up = nnx.Linear(size.width, size.hidden, **options)
        self.down = nnx.Linear(size.hidden, size.width, **options)
        self.attention_gate = gate(rngs=rngs)
        self.mlp_gate = gate(rngs=rngs)
        self.rows = rows

    def __call__(self, h: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """`keys`: two random keys for gates that take one."""
        first, second = ({"rngs": key} for key in keys) if keys is not None else ({}, {})
        h = self.attention_gate(self.attention(self.norm(h)), h, **first)
        return self.mlp_gate(self.mlp(self.norm(h)), h, **second)

    def attention(self, x: jax.Array) -> jax.Array:
        q, k, v = (part.squeeze(2) for part in jnp.split(self.qkv(x), 3, axis=2))
        mixed = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.project(mixed, out_sharding=self.rows)

    def mlp(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)), out_sharding=self.rows)


class LanguageModel(nnx.Module):
    """Bytes (batch, context) to the logits of each next byte (batch, context, BYTES).

    The blocks are stacked: one array holds a weight of all of them, and one scan runs them. So a kernel is traced once
    for all blocks, and the optimizer has as many arrays to update as one block has.

    Args:
      gate: makes a gate of an `nnx.Rngs`.
      dtype: of the computation; parameters are float32.
      rows: how the stream (batch, context, width) is sharded on a mesh with Explicit axes; the last matmul of a branch
        sums over the axes that cut its weights and not the stream. None without a mesh.
      gather: applied to a module's weights before it runs, such as what collects them from the chips that share them.
      remat: whether the backward pass runs each block again, so that only its input is kept.
    """

    def __init__(
        self,
        size: Size,
        gate: Gate,
        *,
        dtype: Any = None,
        rows: Any = None,
        gather: Callable[[Any], Any] = lambda weights: weights,
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        initial = nnx.initializers.normal(1.0)
        self.embed = nnx.Embed(BYTES, size.width, dtype=dtype, embedding_init=initial, rngs=rngs)
        self.blocks = nnx.vmap(lambda rngs: Block(size, gate, dtype=dtype, rows=rows, rngs=rngs))(
            rngs.split(size.layers)
        )
        self.norm = nnx.RMSNorm(size.width, use_scale=False, dtype=dtype, rngs=rngs)
        # From zero, every byte is equally likely: the model starts at 8 bits per byte.
        self.head = nnx.Linear(
            size.width, BYTES, use_bias=False, dtype=dtype, kernel_init=nnx.initializers.zeros, rngs=rngs
        )
        self.layers, self.rows, self.gather, self.remat = size.layers, rows, gather, remat

    def __call__(self, text: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """`key`: a random key for gates that take one."""
        block, weights = nnx.split(self.blocks)
        keys = None if key is None else jax.random.split(key, (self.layers, 2))

        def layer(h: jax.Array, of_layer: tuple[Any, Any]) -> tuple[jax.Array, None]:
            weights, keys = of_layer
            return nnx.merge(block, self.gather(weights))(h, keys), None

        if self.remat:
            layer = jax.checkpoint(layer, prevent_cse=False)  # in a scan, nothing can be merged across
        h = self._gathered(self.embed)(text, out_sharding=self.rows)
        h, _ = jax.lax.scan(layer, h, (weights, keys))
        return self._gathered(self.head)(self.norm(h))

    def _gathered(self, module: Any) -> Any:
        definition, weights = nnx.split(module)
        return nnx.merge(definition, self.gather(weights))


def bits_per_byte(model: LanguageModel, text: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """The loss on text (batch, context + 1): each byte is predicted from those before it."""
    logits = model(text[:, :-1], key).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean() / math.log(2)


def standard_library(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and bytes of other files to hold out: modules of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(seed).shuffle(files)

    def read(least: int) -> np.ndarray:
        text = b""
        while files and len(text) < least:
            text += files.pop().read_bytes()
        return np.frombuffer(text, np.uint8)

    held_out = read(HELD_OUT_BYTES)
    return read(TRAIN_BYTES), held_out
