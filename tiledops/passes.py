"""Trees of arrays through chains of links: one pass over each leaf, each array read once and written once.

A gradient transformation says what it does at this step as a list of stages. `run` flattens their trees and gives each
leaf one fused pass: its gradient, its state and its parameter in; its new state and its update, or its new parameter,
out. New state and new parameters are offered the buffers of the old, which a training step donates: without that XLA
would have to copy each result into the donated buffer. The gradient's buffer is left alone: nobody donates it, and
metrics often read it after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tiledops import blocks, contract, launches, links
from tiledops.calls import Call
from tiledops.config import PipelineConfig
from tiledops.launches import Launch


class Stage(NamedTuple):
    """What one gradient transformation does at this step.

    Attributes:
      link: its maths.
      numbers: the values of the link's numbers: Python's, NumPy's or JAX's, traced or not. They reach the kernel as
        operands, so that no value ever recompiles it.
      state: its trees of state.
      promotes: those numbers whose dtype counts, beside the arrays', for the dtype of the update.
      mask: a tree of bools, a prefix of the updates', or None: the leaves that it transforms.
    """

    link: links.Link
    numbers: tuple[Any, ...] = ()
    state: tuple[Any, ...] = ()
    promotes: tuple[Any, ...] = ()
    mask: Any = None


def run(
    stages: Sequence[Stage],
    updates: Any,
    params: Any,
    *,
    apply: bool,
    accept: jax.Array | None = None,
    config: PipelineConfig | None = None,
    specs: Any = None,
    names: tuple[str, str] = ("updates", "params"),
) -> tuple[Any, list[tuple[Any, ...]]]:
    """Runs stages over every leaf, one pass over each.

    Args:
      updates: the gradients. A None leaf has no update and no new state, and must have had none.
      params: needed to apply, or by a stage that reads it; else it may be None.
      apply: whether to add the update to the parameter.
      accept: a bool scalar array; where it is False, parameters and state stay as they are, and updates are zero.
      specs: a tree of PartitionSpecs, the updates' tree or a prefix of it, for a mesh with Auto axes; or None.
      names: of the two trees, for errors.

    Returns:
      The tree of updates, or of new parameters; and for each stage its trees of new state.
    """
    call = Call.of(config)
    stages = [*stages, Stage(links.apply)] if apply else list(stages)
    # apply_updates follows the parameters' tree, transformations the updates'; where both are whole they are the same.
    lead = params if apply else updates
    structure: Any
    paths, structure = jax.tree_util.tree_flatten_with_path(lead, is_leaf=_is_none)
    columns = [
        _column(structure, updates, names[0]),
        _column(structure, params, names[1]),
        *(_column(structure, tree, "the state") for stage in stages for tree in stage.state),
    ]
    masks = [_spread(True if stage.mask is None else stage.mask, lead, structure, "mask") for stage in stages]
    placed = _placed(specs, lead, paths, structure)
    leaves = _Leaves(call, stages, accept, names)
    results: list[Any] = [None] * len(paths)
    states: list[list[Any]] = [[None] * len(paths) for _ in columns[2:]]
    passes: list[tuple[int, _Pass]] = []
    for i, (path, leaf) in enumerate(paths):
        g, p, *state = (column[i] for column in columns)
        where = jax.tree_util.keystr(path)
        if leaf is None:
            _check_forgotten(stages, state, f"{names[apply]}{where}")
            continue
        if g is None:
            raise ValueError(
                f"every parameter needs an update; got None for {names[0]}{where}. Give zeros, or mask it out"
            )
        for column, value in zip(states, state, strict=True):
            column[i] = value
        active = [bool(mask[i]) for mask in masks]
        if any(active):
            passes.append((i, leaves.prepare(g, p, state, active, where, placed[i])))
        else:
            results[i] = g if accept is None else jnp.where(accept, g, jnp.zeros_like(g))
    for (i, its), stored in zip(passes, launches.stored(call, [its.launch for _, its in passes]), strict=True):
        for k, value in zip(its.state, stored, strict=False):
            states[k][i] = value
        results[i] = stored[its.result]
    trees = iter([structure.unflatten(column) for column in states])
    return structure.unflatten(results), [tuple(next(trees) for _ in stage.state) for stage in stages]


class _Pass(NamedTuple):
    """One leaf's pass: which blocks of state it stores, in order, and which of what it stores is its result."""

    launch: Launch
    state: list[int]
    result: int


class _Leaves:
    """What all leaves have in common: the stages, and their numbers as arrays."""

    def __init__(self, call: Call, stages: Sequence[Stage], accept: jax.Array | None, names: tuple[str, str]) -> None:
        self.call, self.stages, self.names = call, stages, names
        self.guard = () if accept is None else (accept.astype(jnp.float32),)
        self.values = [
            tuple(number(value, name) for value, name in zip(stage.numbers, stage.link.numbers, strict=True))
            for stage in stages
        ]
        self.aligned: dict[tuple[int, int], jax.Array] = {}  # each number with each rank that leaves have, made once

    def prepare(self, g: Any, p: Any, state: list[Any], active: list[bool], where: str, spec: Any) -> _Pass:
        """The pass of one leaf through the stages that are active for it."""
        what, param = (f"{name}{where}" for name in self.names)
        g = check_leaf(g, what)
        if getattr(p, "shape", g.shape) != g.shape:
            raise ValueError(f"{what} must have the shape of its parameter, {p.shape}; got {g.shape}")
        dtype = g.dtype
        chain, taken, values = [], [], list(self.guard)
        coefficients = [self._coefficient(value, g.shape, "", what) for value in self.guard]
        blocks_of_state = iter(range(len(state)))
        for stage, its_values, on in zip(self.stages, self.values, active, strict=True):
            own = [next(blocks_of_state) for _ in stage.state]
            if not on:
                continue
            chain.append(stage.link)
            values += its_values
            for value, name in zip(its_values, stage.link.numbers, strict=True):
                coefficients.append(self._coefficient(value, g.shape, name, what))
            for k in own:
                state[k] = check_leaf(state[k], f"the state of {what}", g.shape)
            if stage.link.reads_param:
                p = check_leaf(p, param, g.shape)
                dtype = jnp.result_type(dtype, p.dtype)
            dtype = jnp.result_type(dtype, *(state[k].dtype for k in own), *stage.promotes)
            taken += own
        last, reads_param = chain[-1], any(link.reads_param for link in chain)
        if last.makes_param:
            dtype = p.dtype
        elif dtype not in contract.DTYPES:  # float64 or float16, by the dtype of a hyperparameter
            dtype = jnp.dtype(jnp.float32)
        # If the update is the last link's first block of state too, it is stored once.
        result = len(taken)
        if last.keeps_update and not self.guard and state[taken[-last.state]].dtype == dtype:
            result -= last.state
        arrays = (g, *(state[k] for k in taken), *((p,) if reads_param else ()))
        outs = [*(state[k].dtype for k in taken), dtype][: max(len(taken), result + 1)]
        aliases = [(1 + k, k) for k in range(len(taken))]
        if last.makes_param:
            aliases.append((len(arrays) - 1, len(outs) - 1))
        block = links.fused(tuple(chain), stores_update=result == len(taken), guarded=bool(self.guard))
        operation = self.call.operation(block, tuple(outs), aliases=tuple(aliases))
        return _Pass(Launch(operation, tuple(values), tuple(coefficients), arrays, what, spec), taken, result)

    def _coefficient(self, value: jax.Array, shape: tuple[int, ...], name: str, what: str) -> jax.Array:
        """A number with the rank of the arrays."""
        rank = len(shape)
        aligned = (1,) * (rank - value.ndim) + value.shape
        if len(aligned) != rank or any(n not in (1, extent) for n, extent in zip(aligned, shape, strict=True)):
            raise ValueError(
                f"{name} must be a number, or broadcast to the shape of every leaf; got shape {value.shape} for "
                f"{what} of shape {shape}"
            )
        return self.aligned.setdefault((id(value), rank), value.reshape(aligned))


def sum_of_squares(tree: Any, *, checked: bool = False, specs: Any = None) -> jax.Array:
    """Of all elements of all leaves, in float32: each is read once.

    If `checked`, it is NaN if and only if an element is not finite.
    """
    call = Call.of(None)
    structure: Any
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    block = blocks.checked_square if checked else blocks.square
    jobs = []
    for (path, leaf), spec in zip(paths, _placed(specs, tree, paths, structure), strict=True):
        what = f"updates{jax.tree_util.keystr(path)}"
        x = check_leaf(leaf, what)
        jobs.append(Launch(call.operation(block, total=(1,) * x.ndim), (), (), (x,), what, spec))
    return launches.total(call, jobs)


def check_leaf(value: Any, what: str, shape: tuple[int, ...] | None = None) -> jax.Array:
    """A leaf as an array that kernels take, or the refusal with its path in the tree."""
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and value.is_deleted():
        raise RuntimeError(f"{what} was deleted: a call that it was donated to returned another. Use that one")
    try:
        array = contract.check_array(value, what)
    except TypeError as refusal:
        raise TypeError(
            f"{refusal}; or keep it out of the transformation, with optax.masked or optax.partition"
        ) from None
    if shape is not None and array.shape != shape:
        raise ValueError(f"{what} must have the shape of its update, {shape}; got {array.shape}")
    return array


def number(value: Any, name: str) -> jax.Array:
    """A hyperparameter as a float32 array, whatever it came as."""
    contract.check_numbers(**{name: value})
    return jnp.asarray(value, jnp.float32)


def _is_none(x: Any) -> bool:
    return x is None


def _column(structure: Any, tree: Any, what: str) -> list[Any]:
    """The leaves of a tree of the leading structure; all None for no tree at all."""
    if tree is None:
        return [None] * structure.num_leaves
    try:
        leaves: list[Any] = structure.flatten_up_to(tree)
    except ValueError as mismatch:
        raise ValueError(
            f"params, updates and state must have one tree structure; {what} differs: {mismatch}"
        ) from None
    return leaves


def _check_forgotten(stages: Sequence[Stage], state: list[Any], what: str) -> None:
    """Of a leaf that is None no state remains: there must be none. (Optax's trace forgets it, all others raise.)"""
    states = iter(state)
    for stage in stages:
        its = [next(states) for _ in stage.state]
        if not stage.link.forgets and any(value is not None for value in its):
            raise ValueError(
                f"{what} is None, but there is a state of it, which would be lost. Give zeros, or mask it out with "
                "optax.masked or optax.partition"
            )


def _placed(specs: Any, lead: Any, paths: Any, structure: Any) -> list[Any]:
    """The PartitionSpec of each leaf, or None."""
    if specs is None:
        return [None] * structure.num_leaves
    placed = _spread(specs, lead, structure, "specs", is_leaf=lambda x: x is None or isinstance(x, PartitionSpec))
    for (path, _), spec in zip(paths, placed, strict=True):
        if spec is not None and not isinstance(spec, PartitionSpec):
            where = jax.tree_util.keystr(path)
            raise TypeError(
                f"specs must be jax.P(...), one entry an axis of the leaf; got {spec!r} for {where or 'the leaf'}"
            )
    return placed


def _spread(
    prefix: Any, lead: Any, structure: Any, what: str, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """The leaves of a prefix of the tree, such as a mask or PartitionSpecs, one for each leaf below them."""

    def below(value: Any, subtree: Any) -> Any:
        return jax.tree.map(lambda _: value, subtree, is_leaf=_is_none)

    try:
        whole = jax.tree.map(below, prefix, lead, is_leaf=is_leaf)
    except ValueError as mismatch:
        raise ValueError(f"{what} must be a tree like the parameters', or a prefix of it: {mismatch}") from None
    leaves: list[Any] = structure.flatten_up_to(whole)
    return leaves
