"""Operations on many leaves, in as few kernels as they allow: small vectors that have the same done to them share one.

A leaf of rank 2 or more, a long vector, and one with numbers of its own has a kernel to itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tiledops import modes, packing, partitioning
from tiledops.calls import Batch, Call
from tiledops.operation import Operation
from tiledops.rules import transformable

Arrays = tuple[jax.Array, ...]


class Launch(NamedTuple):
    """What is to be done to one leaf.

    Attributes:
      operation: that which is done.
      numbers: what the coefficients are made of; leaves with the very same have the same coefficients.
      coefficients: arrays that broadcast against the leaf's, of their rank.
      arrays: the leaf's.
      where: the leaf's name, for errors.
      spec: its PartitionSpec over Auto axes, or None.
    """

    operation: Operation
    numbers: tuple[Any, ...]
    coefficients: Arrays
    arrays: Arrays
    where: str
    spec: Any


def stored(call: Call, launches: Sequence[Launch]) -> list[Arrays]:
    """The arrays that each launch stores."""
    results: list[Arrays] = [()] * len(launches)
    for i, launch in enumerate(launches):
        if launch.arrays[0].size == 0:  # what takes an array's buffer is that array as it is, on its devices
            taken = {out: launch.arrays[array] for array, out in launch.operation.aliases}
            outs = enumerate(launch.operation.outs)
            results[i] = tuple(taken.get(k, launch.arrays[0]).astype(dtype) for k, dtype in outs)
    for members, values in _run_all(call, launches):
        width = len(values) // len(members)
        for k, i in enumerate(members):
            shape = launches[i].arrays[0].shape
            results[i] = tuple(value.reshape(shape) for value in values[k * width : (k + 1) * width])
    return results


def total(call: Call, launches: Sequence[Launch]) -> jax.Array:
    """The sum of the sums of launches that store nothing: a float32 scalar."""
    sums = [value.reshape(()) for _, (value,) in _run_all(call, launches)]
    return functools.reduce(jnp.add, sums, jnp.float32(0))


def _run_all(call: Call, launches: Sequence[Launch]) -> Iterator[tuple[list[int], Arrays]]:
    """For each kernel the launches that share it, and its results: the arrays of one after the other, or their sum."""
    groups: dict[Any, list[int]] = {}
    placed: dict[int, tuple[Call, Arrays, Arrays]] = {}
    for i, launch in enumerate(launches):
        if launch.arrays[0].size == 0:
            continue
        try:
            its_call, coefficients, arrays = call.placed(
                launch.coefficients, launch.arrays, spec=launch.spec, way_out=partitioning.SPECS
            )
        except ValueError as refusal:
            raise ValueError(f"{launch.where}: {refusal}") from None
        except Exception as error:  # JAX's own, of arrays that don't go together on a mesh
            error.add_note(f"These are the arrays of {launch.where}.")
            raise
        key: Any = i
        if _packs(call, launch):
            placements = tuple(partitioning.residence(x) for x in arrays)
            dtypes = tuple(x.dtype for x in arrays)
            done = (launch.operation.block, launch.operation.outs, launch.operation.aliases)
            key = (done, dtypes, tuple(map(id, launch.numbers)), its_call, placements)
        groups.setdefault(key, []).append(i)
        placed[i] = (its_call, coefficients, arrays)
    for group in groups.values():
        dtypes = _dtypes(launches[group[0]])
        sizes = [launches[i].arrays[0].size for i in group]
        per_element = sum(dtype.itemsize for dtype in dtypes)
        for pack in packing.split(sizes, len(dtypes), per_element, call.chip) if group[1:] else [[0]]:
            members = [group[k] for k in pack]
            its_call, coefficients, arrays = placed[members[0]]
            operation = launches[members[0]].operation
            if members[1:]:
                operation = operation.on(len(members), len(arrays))
                coefficients = tuple(c.reshape(1) for c in coefficients)
                arrays = tuple(x.reshape(x.size) for i in members for x in placed[i][2])
            yield members, _run(its_call, _Work(operation, len(coefficients)), *coefficients, *arrays)


def _packs(call: Call, launch: Launch) -> bool:
    """Whether a leaf may share a kernel. Where the user says how to tile, every leaf is tiled so."""
    return (
        call.mode != modes.REFERENCE
        and call.config.block is None
        and call.config.schedule == "pipelined"
        and launch.arrays[0].ndim < 2
        and all(c.size == 1 for c in launch.coefficients)
        and packing.small(launch.arrays[0].size, sum(dtype.itemsize for dtype in _dtypes(launch)), call.chip)
    )


def _dtypes(launch: Launch) -> tuple[Any, ...]:
    """Of all that moves, in and out."""
    return (*(x.dtype for x in launch.arrays), *launch.operation.outs)


class _Work(NamedTuple):
    """An operation, and how many of its operands are coefficients: the first."""

    operation: Operation
    coefficients: int

    def split(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(operands[: self.coefficients]), tuple(operands[self.coefficients :])


@transformable
def _run(call: Call, work: _Work, *operands: jax.Array) -> Arrays:
    return call.run(work.operation, *work.split(operands))


@_run.defjvp
def _run_jvp(call: Call, work: _Work, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Differentiating through a step (meta-learning) is rare: its derivative is that of the block's maths, by jnp."""
    operation = work.operation

    def plain(*operands: Any) -> Arrays:
        coefficients, arrays = work.split(operands)
        leaves = [operation.block(coefficients, its, exact=False) for its in operation.by_leaf(arrays)]
        outs = (out for stored, _ in leaves for out in stored)
        apart = tuple(axis for axis, extent in enumerate(operation.total or ()) if extent == 1)
        sums = [jnp.sum(summed, apart, keepdims=True) for _, summed in leaves if summed is not None]
        rounded = tuple(out.astype(dtype) for out, dtype in zip(outs, operation.outs, strict=True))
        return (*rounded, functools.reduce(jnp.add, sums)) if sums else rounded

    return _run(call, work, *primals), jax.jvp(plain, primals, tangents)[1]


@_run.defvmap
def _run_mapped(axis: Any, call: Call, work: _Work, operands: Any, axes: Any) -> tuple[list[jax.Array], list[int]]:
    """Mapped vectors no longer share a kernel: each leaf is one more axis of the operation on it alone."""
    operation, leaf = work.operation, work.operation.leaf
    (coefficients, arrays), (coefficient_axes, array_axes) = work.split(operands), work.split(axes)
    stored: list[jax.Array] = []
    at: list[int] = []
    sums = []
    for its, its_axes in zip(operation.by_leaf(arrays), operation.by_leaf(array_axes), strict=True):
        batch = Batch.of(axis, its, its_axes)
        first = slice(len(coefficients), None)
        lifted = batch.operands((*coefficients, *its), (*coefficient_axes, *its_axes), first)
        total = None if leaf.total is None else batch.total(leaf.total)
        batched = dataclasses.replace(leaf, total=total)
        values = _run(batch.call(call, lifted[-1]), _Work(batched, len(coefficients)), *lifted)
        stored += values[: len(leaf.outs)]
        at += [batch.at] * len(leaf.outs)
        if leaf.total is not None:
            sums.append(batch.each(values[-1], len(leaf.total)))
    return [*stored, *([functools.reduce(jnp.add, sums)] if sums else [])], [*at, *([0] if sums else [])]
