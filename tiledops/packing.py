"""Many small vectors through one kernel: gathered into VMEM, computed as one, and scattered back.

A bias, a norm's scale or a gain is a few KiB, and an optimizer has hundreds. A kernel of its own for each would mostly
wait: for its launch, for its first load, for its last store. Here all their transfers are under way at once, and the
block function runs once over all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tiledops import chips, tiling
from tiledops.layouts import LANES, SUBLANES, round_up

SLAB = 8 * SUBLANES * LANES  # elements computed at once: 8 float32 registers an array

# Transfers in one kernel. Mosaic's time to compile grows faster than their number: for vectors of 768 through AdamW,
# seven arrays each, 64 of them take it 0.9 s, 128 2.9, 256 12.8, 512 81 (jax 0.10.2, libtpu 0.0.42, v5e, CPU time). To
# trace, lower and compile a whole step of GPT-2 small takes, with 32, 64, 128 and 256 of them, 1.6, 1.6, 1.8 and 1.8 s
# with SGD and 2.2, 2.7, 2.7 and 2.7 with AdamW (jax 0.12.0.1, libtpu 0.0.50.1, v5e).
TRANSFERS = 64
# What another kind of pack takes to trace and compile, in packs of a kind that is there already: 60 ms and 10. AdamW's
# step of GPT-2 small takes 2.00 s in packs of 9 leaves, of nine kinds, and 1.66 in packs of 8, of two (v5e, 0.12.0.1).
KIND = 5


def small(size: int, bytes_per_element: int, info: pltpu.TpuInfo) -> bool:
    """Whether a vector's transfers take less time than a DMA's latency: a pipeline would have nothing to hide."""
    return size * bytes_per_element <= tiling.LATENCY_SECONDS * info.mem_bw_bytes_per_second


def split(sizes: Sequence[int], arrays: int, bytes_per_element: int, info: pltpu.TpuInfo) -> list[list[int]]:
    """Leaves by their indices, in order, in packs that fit into VMEM and compile fast.

    Args:
      sizes: elements of each leaf.
      arrays, bytes_per_element: of one leaf, in and out together.
    """
    room = int(tiling.VMEM_SHARE * chips.scoped_vmem_bytes(info)) // bytes_per_element - SLAB
    most = max(1, TRANSFERS // arrays)
    # A model's layers repeat: packs that are a little shorter than they may be can come out alike.
    splits = [_split(sizes, room, longest) for longest in range(most, most // 2, -1)]
    return min(splits, key=lambda packs: len(packs) + KIND * len({tuple(sizes[i] for i in pack) for pack in packs}))


def _split(sizes: Sequence[int], room: int, longest: int) -> list[list[int]]:
    packs: list[list[int]] = []
    used = 0
    for i, size in enumerate(sizes):
        needed = round_up(size, 2 * LANES)
        if not packs or used + needed > room or len(packs[-1]) == longest:
            packs.append([])
            used = 0
        packs[-1].append(i)
        used += needed
    return packs


@dataclasses.dataclass(frozen=True)
class Pack:
    """Where each vector lies in the buffers, one for each array of a leaf: all at the same offsets.

    Attributes:
      sizes: elements of each leaf.
      ins, outs: dtypes of the arrays of one leaf, in and out.
    """

    sizes: tuple[int, ...]
    ins: tuple[jnp.dtype, ...]
    outs: tuple[jnp.dtype, ...]

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Of each leaf, and the end of the last: multiples of the tile of every dtype."""
        tile = max(map(_tile, (*self.ins, *self.outs)))
        offsets = [0]
        for size in self.sizes:
            offsets.append(offsets[-1] + round_up(size, tile))
        return tuple(offsets)

    @property
    def extent(self) -> int:
        """Elements of a buffer: whole slabs."""
        return round_up(self.offsets[-1], SLAB)

    @property
    def buffer_bytes(self) -> int:
        return self.extent * sum(dtype.itemsize for dtype in (*self.ins, *self.outs))

    @property
    def hbm_bytes(self) -> int:
        return sum(self.sizes) * sum(dtype.itemsize for dtype in (*self.ins, *self.outs))

    def scratch(self) -> list[Any]:
        """A buffer for each array, and a semaphore for loads and one for stores."""
        buffers = [pltpu.VMEM((self.extent,), dtype) for dtype in (*self.ins, *self.outs)]
        return [*buffers, pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA]

    def run(
        self,
        compute: Callable[..., Any],
        coefficients: tuple[jax.Array, ...],
        ins: Sequence[Any],
        outs: Sequence[Any],
        total: Any,
        scratch: Sequence[Any],
    ) -> None:
        """The kernel's body.

        Args:
          compute: the block function, `(coefficients, blocks) -> (blocks to store, block to sum or None)`.
          ins, outs: in HBM, the arrays of the first leaf, then those of the second ...
          total: in SMEM, where the sum over all leaves goes; or None.
          scratch: what `scratch` asks for.
        """
        *buffers, loaded, stored = scratch
        sources, targets = buffers[: len(self.ins)], buffers[len(self.ins) :]
        for array, part in self._parts(ins, sources):
            pltpu.make_async_copy(array, part, loaded).start()
        self._wait(sources, loaded)
        if total is not None:
            self._clear(sources)

        def step(i: Any, partial: Any) -> Any:
            window = pl.ds(pl.multiple_of(i * SLAB, SLAB), SLAB)
            results, product = compute(coefficients, tuple(source[window] for source in sources))
            for target, value in zip(targets, results, strict=True):
                target[window] = value.astype(target.dtype)
            return partial if product is None else partial + product

        partial = jax.lax.fori_loop(
            0, self.extent // SLAB, step, None if total is None else jnp.zeros(SLAB, jnp.float32)
        )
        if total is not None:
            total[0] = jnp.sum(partial)
        for array, part in self._parts(outs, targets):
            pltpu.make_async_copy(part, array, stored).start()
        self._wait(targets, stored)

    def _parts(self, arrays: Sequence[Any], buffers: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Each array in HBM with its part of the buffer.

        Transfers move whole tiles. What HBM holds beyond a vector's end is its own padding; a size that is not known
        when the kernel is traced lets the transfer reach it, as it does in `pltpu.emit_pipeline`.
        """
        for k, array in enumerate(arrays):
            leaf, which = divmod(k, len(buffers))
            size, tile = self.sizes[leaf], _tile(array.dtype)
            moved: Any = size
            if size % tile:
                moved = pl.multiple_of(jax.lax.full((), round_up(size, tile), jnp.int32), tile)
            part = buffers[which].at[pl.ds(self.offsets[leaf], moved)]
            yield array.at[pl.ds(0, moved)] if size % tile else array, part

    def _wait(self, buffers: Sequence[Any], semaphore: Any) -> None:
        """For all transfers of all leaves: a semaphore counts bytes, so that one wait for their sum is enough."""
        for buffer in buffers:
            moved = buffer.at[pl.ds(0, sum(round_up(size, _tile(buffer.dtype)) for size in self.sizes))]
            pltpu.make_async_copy(moved, moved, semaphore).wait()

    def _clear(self, buffers: Sequence[Any]) -> None:
        """Zeros wherever there is no element, for a sum: what lies there is anything, NaN included."""
        for buffer in buffers:
            tile = _tile(buffer.dtype)
            for offset, size in zip(self.offsets, self.sizes, strict=False):
                if size % tile:
                    window = pl.ds(offset + size // tile * tile, tile)
                    inside = jax.lax.broadcasted_iota(jnp.int32, (tile,), 0) < size % tile
                    last = buffer[window].astype(jnp.float32)
                    buffer[window] = jnp.where(inside, last, 0.0).astype(buffer.dtype)
            if (rest := self.extent - self.offsets[-1]) > 0:
                buffer[pl.ds(self.offsets[-1], rest)] = jnp.zeros(rest, buffer.dtype)


def _tile(dtype: Any) -> int:
    """Elements of the smallest piece of a vector that a transfer may move."""
    return LANES * 4 // jnp.dtype(dtype).itemsize
