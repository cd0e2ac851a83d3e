"""What is to be computed, as one value: which block function, what it stores and sums, how and where it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from tiledops.config import PipelineConfig

BlockFunction = Callable[..., tuple[tuple[jax.Array, ...], jax.Array | None]]


@dataclasses.dataclass(frozen=True)
class Operation:
    """What a kernel computes: static and hashable, so that equal operations are traced once.

    Attributes:
      block: a function of `tiledops.blocks`.
      outs: dtypes of the arrays that it stores.
      total: the shape that its sum keeps, broadcastable against the arrays (1 where it is summed over), or None.
      config: block, buffers and schedule.
      mode: what runs it, resolved.
      chip: the chip that it is cut for.
      aliases: pairs (array, out): the stored array takes that array's buffer.
      leaves: of how many leaves the arrays are. If several, each of one axis, the arrays of the first come first, then
        those of the second ...; so do `outs`; and there is one sum over all.
    """

    block: BlockFunction
    outs: tuple[jnp.dtype, ...]
    total: tuple[int, ...] | None
    config: PipelineConfig
    mode: str
    chip: pltpu.TpuInfo
    aliases: tuple[tuple[int, int], ...] = ()
    leaves: int = 1

    @property
    def name(self) -> str:
        return f"tiledops_{self.block.__name__}"

    def on(self, leaves: int, arrays: int) -> Operation:
        """The operation of one leaf that has so many arrays, on several leaves."""
        outs = len(self.outs)
        aliases = tuple((k * arrays + i, k * outs + out) for k in range(leaves) for i, out in self.aliases)
        total = None if self.total is None else (1,)  # a scalar among them is a vector of one
        return dataclasses.replace(self, outs=self.outs * leaves, total=total, aliases=aliases, leaves=leaves)

    @property
    def leaf(self) -> Operation:
        """The operation on one of its leaves."""
        outs, aliases = len(self.outs) // self.leaves, len(self.aliases) // self.leaves
        return dataclasses.replace(self, outs=self.outs[:outs], aliases=self.aliases[:aliases], leaves=1)

    def by_leaf(self, arrays: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """The arrays of each leaf, or what there is one of for each array."""
        width = len(arrays) // self.leaves
        return [arrays[k : k + width] for k in range(0, len(arrays), width)]
