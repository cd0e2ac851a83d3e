"""The one table of cases, and the shapes of real models that the tiling must get right.

The cases are small enough to simulate, with ragged edges and several tiles. The oracle of their results is oracle.py.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from tiledops import PipelineConfig

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of axpy: x and y of `shape`, a gain, and the block that it is cut into (None: the plan's own)."""

    name: str
    shape: tuple[int, ...]
    block: tuple[int, int] | None
    x: Any
    y: Any
    gain: str  # "scalar", "feature" or "example"
    a: Any
    why: str

    @property
    def config(self) -> PipelineConfig:
        return PipelineConfig(block=self.block)

    @property
    def gain_shape(self) -> tuple[int, ...]:
        rank = len(self.shape)
        return {"scalar": (), "feature": self.shape[-1:], "example": self.shape[:1] + (1,) * (rank - 1)}[self.gain]

    def operands(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """a, x, y and g, the gradient of a loss by the result: standard normal, the same on every run."""
        random = np.random.default_rng(zlib.crc32(self.name.encode()))
        shapes = (self.gain_shape, self.a), (self.shape, self.x), (self.shape, self.y), (self.shape, self.y)
        return tuple(np.asarray(random.standard_normal(shape)).astype(dtype) for shape, dtype in shapes)


# fmt: off
_ROWS = (
    # name               shape           block      x     y     gain       a     why
    ("lesson",          (17, 257),      (8, 128),  F32,  F32,  "scalar",  F32,  "ragged both ways, nine tiles"),
    ("one_tile",        (8, 128),       (8, 128),  F32,  F32,  "scalar",  F32,  "exactly one tile: nothing to trim"),
    ("even",            (16, 256),      (8, 128),  F32,  F32,  "scalar",  BF16, "whole tiles; a bfloat16 gain"),
    ("tall",            (21, 128),      (8, 128),  F32,  F32,  "scalar",  F32,  "ragged rows alone"),
    ("wide",            (8, 257),       (8, 128),  F32,  F32,  "feature", F32,  "ragged columns alone"),
    ("whole",           (17, 257),      None,      F32,  F32,  "scalar",  F32,  "small: one block, all of it"),
    ("slabs",           (140, 1100),    None,      F32,  F32,  "feature", F32,  "one block, in slabs and rests"),
    ("clipped",         (9, 130),       (32, 512), F32,  F32,  "scalar",  F32,  "the block is larger than the array"),
    ("bf16",            (33, 257),      (16, 128), BF16, BF16, "scalar",  F32,  "packed tiles of 16 rows"),
    ("bf16_half_tiles", (17, 257),      (8, 128),  BF16, BF16, "feature", BF16, "8 rows are half a packed tile"),
    ("bf16_into_f32",   (17, 257),      (8, 128),  BF16, F32,  "scalar",  F32,  "the residual stream: y is wider"),
    ("f32_into_bf16",   (17, 257),      (8, 128),  F32,  BF16, "feature", F32,  "the result has y's dtype"),
    ("feature",         (17, 257),      (8, 128),  F32,  F32,  "feature", F32,  "along the lanes, sliced by tile"),
    ("example",         (17, 257),      (8, 128),  F32,  F32,  "example", F32,  "a column vector: blocks of 128 rows"),
    ("example_tiles",   (150, 130),     (8, 128),  BF16, F32,  "example", BF16, "the column, sliced by tile"),
    ("column_major",    (300, 3),       (8, 128),  F32,  F32,  "scalar",  F32,  "XLA transposes it to (3, 300)"),
    ("column_feature",  (300, 3),       (8, 128),  F32,  F32,  "feature", F32,  "features run down the rows"),
    ("column_example",  (300, 3),       (8, 128),  F32,  F32,  "example", F32,  "examples run along the lanes"),
    ("one_row",         (1, 257),       (8, 128),  F32,  F32,  "feature", F32,  "one row of eight"),
    ("one_column",      (257, 1),       (8, 128),  F32,  F32,  "example", F32,  "one column: it becomes a row"),
    ("merged",          (3, 8, 130),    (8, 128),  F32,  F32,  "scalar",  F32,  "leading axes merge into the rows"),
    ("merged_feature",  (2, 8, 257),    (8, 128),  BF16, BF16, "feature", F32,  "merged, the features apart"),
    ("apart",           (3, 8, 130),    (8, 128),  F32,  F32,  "example", F32,  "the gain keeps its axis apart"),
    ("unmerged",        (3, 7, 130),    (8, 128),  F32,  F32,  "scalar",  F32,  "seven rows: merging would move each"),
    ("swapped",         (16, 3, 130),   (8, 128),  F32,  F32,  "example", F32,  "physical order (1, 0, 2)"),
    ("rank4",           (2, 3, 5, 7),   None,      F32,  F32,  "feature", F32,  "any rank"),
    ("rank4_example",   (2, 3, 5, 130), (8, 128),  F32,  BF16, "example", F32,  "two leading axes, one with gains"),
    ("conv",            (3, 3, 12, 20), None,      BF16, BF16, "feature", BF16, "a convolution's kernel"),
    ("ones",            (1, 1, 9, 130), (8, 128),  F32,  F32,  "feature", F32,  "axes of one: nothing to step over"),
    ("vector",          (2500,),        (8, 128),  F32,  F32,  "scalar",  F32,  "rank 1 natively, blocks of 1024"),
    ("vector_feature",  (1300,),        (8, 128),  F32,  F32,  "feature", F32,  "a gain of x's shape: one more stream"),
    ("vector_mixed",    (2500,),        (8, 128),  BF16, F32,  "feature", F32,  "that stream, and two unlike in dtype"),
    ("vector_bf16",     (2500,),        (8, 128),  BF16, BF16, "scalar",  F32,  "blocks of 2048 bfloat16"),
    ("vector_slabs",    (100000,),      None,      F32,  F32,  "scalar",  F32,  "one block, in slabs and a rest"),
    ("short",           (7,),           None,      F32,  F32,  "scalar",  F32,  "less than a register"),
    ("rank0",           (),             None,      F32,  F32,  "scalar",  F32,  "one number"),
)
# fmt: on

CASES = tuple(Case(*row) for row in _ROWS)
BY_NAME = {case.name: case for case in CASES}

# From models: weights, embeddings, activations, kernels of convolutions, biases.
SHAPES = (
    (8192, 4096), (50257, 768), (768, 2304), (1000, 3), (3, 1000), (512, 10), (1001, 3001), (1, 257), (257, 1), (7,),
    (4096,), (5000,), (), (16, 7, 512), (8, 128, 1024), (2, 3, 5, 7), (3, 3, 64, 128), (7, 7, 3, 64), (1, 1, 512, 2048),
)  # fmt: skip
DTYPES = ((F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16))
