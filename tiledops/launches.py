"""Operations on many leaves, in as few kernels as they allow: small vectors that have the same done to them share one.

A leaf of rank 2 or more, a long vector, and one with numbers of its own has a kernel to itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tiledops import modes, packing, partitioning
from tiledops.calls import Call
from tiledops.operation import Operation

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
        if launch.arrays[0].size == 0:
            results[i] = tuple(jnp.zeros(launch.arrays[0].shape, out) for out in launch.operation.outs)
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
            yield members, _run(its_call, operation, coefficients, arrays)


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


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run(call: Call, operation: Operation, coefficients: Any, arrays: Any) -> Arrays:
    return call.run(operation, coefficients, arrays)


@_run.defjvp
def _run_jvp(call: Call, operation: Operation, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Differentiating through a step (meta-learning) is rare: its derivative is that of the block's maths, by jnp."""

    def plain(coefficients: Any, arrays: Any) -> Arrays:
        leaves = [operation.block(coefficients, its, exact=False) for its in operation.by_leaf(arrays)]
        outs = (out for stored, _ in leaves for out in stored)
        sums = [jnp.sum(summed, keepdims=True) for _, summed in leaves if summed is not None]
        rounded = tuple(out.astype(dtype) for out, dtype in zip(outs, operation.outs, strict=True))
        return (*rounded, functools.reduce(jnp.add, sums)) if sums else rounded

    return _run(call, operation, *primals), jax.jvp(plain, primals, tangents)[1]
