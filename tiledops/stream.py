"""Tiles of HBM arrays through a block function: the engine, and the only file with a kernel in it.

`stream` takes arrays of one shape and coefficients that broadcast against them, runs a function of `tiledops.blocks` on
every tile, and returns the arrays that it stores and the sum that it takes. Each array is read once and each result
written once. The pipeline's body is one line over the block function; what surrounds it here is the addressing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tiledops import blocks, chips, donation, modes, packing, simulator, tiling
from tiledops.operation import Operation
from tiledops.places import Place
from tiledops.tile import Refs, Tile


def stream(op: Operation, coefficients: tuple[jax.Array, ...], arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Runs `op` on arrays of one shape and coefficients of the same rank, each extent theirs or 1.

    Returns:
      The stored arrays, then the float32 sum if there is one.
    """
    if op.mode == modes.REFERENCE or arrays[0].size == 0:  # an empty batch: no tile, so no kernel
        return _reference(op, coefficients, arrays)
    kernel = _Kernel(op, len(coefficients))
    chips.prepare_simulator()  # also to trace for a TPU where there is none, as `jax.export` does
    if op.mode == modes.SIMULATE:
        simulator.forget_failure()
        # The interpreter pads the blocks of a grid but not the buffer that they alias.
        aliases = () if op.config.schedule == "blocked" else op.aliases
        return kernel(aliases)(*coefficients, *arrays)
    operands = (*coefficients, *arrays[:-1], modes.for_tpu(arrays[-1]))
    return donation.in_place(kernel, op.aliases, len(coefficients), *operands)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A stream as a function of flat operands, once it is known which of them it may overwrite."""

    op: Operation
    coefficients: int

    def __call__(self, aliases: tuple[tuple[int, int], ...]) -> Callable[..., tuple[jax.Array, ...]]:
        op = dataclasses.replace(self.op, aliases=aliases)

        def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
            with chips.x64(False):  # index arithmetic in a kernel is 32-bit
                engine = _streamed if op.leaves == 1 else _packed
                return engine(op, operands[: self.coefficients], operands[self.coefficients :])

        return run

    def like(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Arrays of the types of its results; once it is known that the kernel can be cut."""
        op, coefficients, arrays = self.op, operands[: self.coefficients], operands[self.coefficients :]
        if op.leaves == 1:
            Tile.of(op, coefficients, arrays)
        leaves = op.by_leaf(arrays)
        stored = tuple(leaves[k * op.leaves // len(op.outs)][0].astype(dtype) for k, dtype in enumerate(op.outs))
        if op.total is None:
            return stored
        axes = tuple(axis for axis, extent in enumerate(op.total) if extent == 1)
        return (*stored, jnp.sum(arrays[0].astype(jnp.float32), axes, keepdims=True))


@functools.partial(jax.jit, static_argnums=0)
def _reference(op: Operation, coefficients: Any, arrays: Any) -> tuple[jax.Array, ...]:
    outs, summed = op.block(coefficients, arrays, exact=True)
    results = tuple(out.astype(dtype) for out, dtype in zip(outs, op.outs, strict=True))
    if summed is None:
        return results
    assert op.total is not None
    axes = tuple(axis for axis, extent in enumerate(op.total) if extent == 1)
    return (*results, jnp.sum(summed, axes, keepdims=True))


@functools.partial(jax.jit, static_argnums=0)
def _streamed(op: Operation, coefficients: Any, arrays: Any) -> tuple[jax.Array, ...]:
    """The kernel, behind a jit of its own: however many leaves share a shape, it is traced and lowered once."""
    tile = Tile.of(op, coefficients, arrays)
    view, plan, kept = tile.view, tile.plan, tile.kept
    resident, streams = [], []
    for c, its in zip(coefficients, tile.places, strict=True):
        viewed = c.transpose(view.order)
        if its.stays:
            resident.append(_sliceable(viewed.reshape(-1), plan.slices(its)))
        else:
            streams.append(_sliceable(viewed.reshape(its.part(view.shape)), not its.whole))
    results = _call(op, tile, resident, [*streams, *map(view.of, arrays)])
    stored = tuple(view.back(out, arrays[0].shape) for out in results[: len(op.outs)])
    if kept is None or op.total is None:
        return stored
    total = jnp.sum(results[-1], 0) if kept.stays and plan.cores > 1 else results[-1]
    return (*stored, view.back(total, op.total))


def _sliceable(vector: jax.Array, sliced: bool) -> jax.Array:
    """A coefficient whose tiles take pieces of it, as float32: those of bfloat16 would start at multiples of 256."""
    return vector.astype(jnp.float32) if sliced else vector


def _call(op: Operation, tile: Tile, resident: list[jax.Array], streams: list[jax.Array]) -> list[jax.Array]:
    """One pallas_call over views: the pipeline of its own, or the one that emit_pipeline builds inside it."""
    plan, kept, like = tile.plan, tile.kept, streams[-1]
    # What stays in fast memory, and what is streamed: coefficients, arrays, what is stored, a sum that goes by parts.
    staying = [place for place in tile.places if place.stays]
    array = Place(tuple(range(len(plan.shape))), len(plan.shape), stays=False)
    ins = [place for place in tile.places if not place.stays]
    ins += [array] * (len(streams) - len(ins))
    outs = [array] * len(op.outs)
    if kept is not None and not kept.stays:
        outs.append(kept)
    dtypes = [*(x.dtype for x in streams), *op.outs, jnp.float32][: len(ins) + len(outs)]
    totals = [tile.sum.result()] if tile.sum is not None and tile.sum.place.stays else []

    looped = tuple(n for n in plan.steps if n > 1)  # an axis of one step would only cost time to trace

    def tile_specs(at: Callable[..., tuple[Any, ...]]) -> tuple[list[pl.BlockSpec], list[pl.BlockSpec]]:
        def spec(place: Place, buffers: int) -> pl.BlockSpec:
            pipeline_mode = None if buffers == 2 else pl.Buffered(buffers)  # 2 is the default
            return pl.BlockSpec(
                place.part(plan.block), lambda *ids: place.part(at(*ids), 0), pipeline_mode=pipeline_mode
            )

        return [spec(place, plan.buffers) for place in ins], [spec(place, tiling.OUTPUT_BUFFERS) for place in outs]

    def split(refs: tuple[Any, ...]) -> Refs:
        a, b, c = len(staying), len(staying) + len(ins), len(staying) + len(ins) + len(outs)
        return Refs(refs[:a], refs[a:b], refs[b:c], *([] if totals else [None]), *refs[c:])

    def blocked(*refs: Any) -> None:
        tile.run(pl.program_id(0), tuple(pl.program_id(1 + k) for k in range(len(plan.order))), split(refs))

    def pipelined(*refs: Any) -> None:
        core, hbm = 0 if alone else pl.program_id(0), split(refs)

        def every_axis(ids: Iterable[Any]) -> tuple[Any, ...]:
            steps = iter(ids)
            return tuple(next(steps) if n > 1 else 0 for n in plan.steps)

        def body(*tiles: Any) -> None:
            ids = every_axis(map(pl.program_id, range(len(looped))))
            tile.run(core, ids, dataclasses.replace(hbm, ins=tiles[: len(ins)], outs=tiles[len(ins) :]))

        in_specs, out_specs = tile_specs(lambda *ids: tile.at(core, every_axis(ids)))
        synchronous = op.config.schedule == "synchronous"
        pltpu.emit_pipeline(
            body, grid=looped or (1,), in_specs=in_specs, out_specs=out_specs, no_pipelining=synchronous
        )(*hbm.ins, *hbm.outs)

    def at_once(*refs: Any) -> None:
        end = len(refs) - len(dtypes) - 2
        hbm, buffers, (loaded, stored) = split(refs[:end]), refs[end:-2], refs[-2:]
        tiles = dataclasses.replace(hbm, ins=buffers[: len(ins)], outs=buffers[len(ins) :])
        _transfer(hbm.ins, tiles.ins, loaded)
        tile.run(0, (0,) * len(plan.order), tiles)
        _transfer(tiles.outs, hbm.outs, stored)

    # A kernel without a grid takes scalars as they are; the windows of a grid have at least one axis.
    sliced = any(map(plan.slices, (*staying, *([kept] if kept else []))))
    alone = plan.cores == 1 and op.config.schedule != "blocked" and not sliced
    if alone:
        resident = [c if place.axes else c.reshape(()) for c, place in zip(resident, staying, strict=True)]
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    in_specs, out_specs = [in_hbm] * len(ins), [in_hbm] * len(outs)
    scratch = [pltpu.VMEM(tile.sum.place.accumulator(plan.block), jnp.float32)] if tile.sum else []
    if op.config.schedule == "blocked":
        kernel: Callable[..., None] = blocked
        grid: tuple[int, ...] = (plan.cores, *plan.steps)
        in_specs, out_specs = tile_specs(lambda core, *ids: tile.at(core, ids))
    elif plan.programs > 1:
        kernel, grid = pipelined, () if alone else (plan.cores,)
    else:  # nothing to overlap, and a pipeline of one step takes as long to trace as all the rest
        kernel, grid = at_once, () if alone else (1,)
        blocks_of = (place.part(plan.block) for place in (*ins, *outs))
        scratch += [*map(pltpu.VMEM, blocks_of, dtypes), *(pltpu.SemaphoreType.DMA,) * 2]
    return _launch(
        op,
        kernel,
        [*resident, *streams],
        elements=math.prod(plan.shape),
        hbm_bytes=plan.hbm_bytes,
        metadata={"block": "x".join(map(str, plan.block)), "vmem_bytes": plan.buffer_bytes, "cores": plan.cores},
        grid=grid,
        in_specs=[*map(tile.resident_spec, staying), *in_specs],
        out_specs=[*out_specs, *(spec for _, spec in totals)],
        out_shape=[
            *(_struct(like, place.part(plan.shape), d) for place, d in zip(outs, dtypes[len(ins) :], strict=True)),
            *(_struct(like, shape, jnp.float32) for shape, _ in totals),
        ],
        scratch_shapes=scratch,
        input_output_aliases={len(tile.places) + i: out for i, out in op.aliases},  # the arrays come last
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=((pltpu.PARALLEL,) + (pltpu.ARBITRARY,) * len(plan.order))[: len(grid)],
            vmem_limit_bytes=plan.vmem_limit_bytes,
        ),
    )


@functools.partial(jax.jit, static_argnums=0)
def _packed(op: Operation, coefficients: Any, arrays: Any) -> tuple[jax.Array, ...]:
    """One kernel for several vectors, each gathered into VMEM whole."""
    ins, outs = len(arrays) // op.leaves, len(op.outs) // op.leaves
    sizes = tuple(x.size for x in arrays[::ins])
    pack = packing.Pack(sizes, tuple(x.dtype for x in arrays[:ins]), op.outs[:outs])
    summed, scalars = op.total is not None, len(coefficients)
    compute = functools.partial(op.block, exact=op.mode != modes.TPU)

    def kernel(*refs: Any) -> None:
        numbers, refs = refs[:scalars], refs[scalars:]
        hbm, refs = refs[: len(arrays)], refs[len(arrays) :]
        results, refs = refs[: len(op.outs)], refs[len(op.outs) :]
        total, scratch = (refs[0], refs[1:]) if summed else (None, refs)
        pack.run(compute, tuple(ref[...] for ref in numbers), hbm, results, total, scratch)

    in_smem, in_hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pl.ANY))
    results = _launch(
        op,
        kernel,
        [*(c.reshape(()) for c in coefficients), *arrays],
        elements=sum(sizes),
        hbm_bytes=pack.hbm_bytes,
        metadata={"block": pack.extent, "vmem_bytes": pack.buffer_bytes, "cores": 1},
        in_specs=[in_smem] * scalars + [in_hbm] * len(arrays),
        out_specs=[in_hbm] * len(op.outs) + [in_smem] * summed,
        out_shape=[
            *(_struct(arrays[k // outs * ins], (sizes[k // outs],), dtype) for k, dtype in enumerate(op.outs)),
            *(_struct(arrays[0], (1,), jnp.float32) for _ in range(summed)),
        ],
        scratch_shapes=pack.scratch(),
        input_output_aliases={scalars + i: out for i, out in op.aliases},
    )
    return tuple(results)


def _launch(
    op: Operation,
    kernel: Callable[..., None],
    operands: list[jax.Array],
    *,
    elements: int,
    hbm_bytes: int,
    metadata: dict[str, Any],
    **specs: Any,
) -> list[jax.Array]:
    """The pallas_call, compiled or simulated, with what it costs and with the metadata that `compiled` reads back."""
    simulate = op.mode == modes.SIMULATE
    call = pl.pallas_call(
        kernel,
        cost_estimate=pl.CostEstimate(
            flops=blocks.FLOPS[op.block] * elements, transcendentals=0, bytes_accessed=hbm_bytes
        ),
        interpret=simulator.interpret_params(op.chip.num_cores) if simulate else False,
        name=op.name,
        metadata={key: str(value) for key, value in metadata.items()},
        **specs,
    )
    return (simulator.simulated(call) if simulate else call)(*operands)


def _transfer(sources: Sequence[Any], targets: Sequence[Any], semaphore: Any) -> None:
    """Copies each source to its target, all under way at once."""
    copies = [pltpu.make_async_copy(source, target, semaphore) for source, target in zip(sources, targets, strict=True)]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


def _struct(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Of a result that varies over the same mesh axes as `like`, where that is inside `shard_map`."""
    struct: Any = jax.ShapeDtypeStruct
    return struct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)
