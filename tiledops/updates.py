"""Trees of arrays through chains of links: one kernel a leaf, each array read once and written once.

A gradient transformation says what it does at this step as a list of stages. `run` flattens their trees and gives each
leaf one fused pass: its gradient, its state and its parameter in; its new state and its update, or its new parameter,
out. New state and new parameters are offered the buffers of the old, which a training step donates: without that XLA
would have to copy each result into the donated buffer. The gradient's buffer is left alone: nobody donates it, and
metrics often read it after the step.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tiledops import blocks, contract, links
from tiledops.calls import Call
from tiledops.config import PipelineConfig
from tiledops.stream import Operation


def apply_updates(params: Any, updates: Any, *, config: PipelineConfig | None = None, specs: Any = None) -> Any:
    """p + u for every leaf, in float32, rounded once to the parameter's dtype: `optax.apply_updates`.

    One kernel a leaf, in place where the jitted step donates `params`.

    >>> tiledops.apply_updates({"w": jnp.ones(3)}, {"w": jnp.arange(3.0)})
    {'w': Array([1., 2., 3.], dtype=float32)}

    Args:
      params: a tree of float32 or bfloat16 arrays of any shape; None stays None.
      updates: a tree of the same structure and shapes, each leaf float32 or bfloat16.
      config: how to tile, schedule and run it; default: `use_config`'s, else chosen for the chip.
      specs: a tree of the PartitionSpecs of params, for a mesh with `Auto` axes.

    Returns:
      The new parameters, in params' structure, shapes and dtypes.

    Raises:
      TypeError: a leaf that is not a float32 or bfloat16 array.
      ValueError: trees or shapes that differ.
    """
    new_params, _ = run((), updates, params, apply=True, config=config, specs=specs)
    return new_params


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
) -> tuple[Any, list[tuple[Any, ...]]]:
    """Runs stages over every leaf, one pass each.

    Args:
      updates: the gradients. A None leaf has no update and no new state.
      params: needed to apply, or by a stage that reads it; else it may be None.
      apply: whether to add the update to the parameter.
      accept: a bool scalar array; where it is False, parameters and state stay as they are, and updates are zero.
      specs: a tree of PartitionSpecs, the updates' tree or a prefix of it, for a mesh with Auto axes; or None.

    Returns:
      The tree of updates, or of new parameters; and for each stage its trees of new state.
    """
    call = Call.of(config)
    stages = [*stages, Stage(links.apply)] if apply else list(stages)
    # apply_updates follows the parameters' tree, transformations the updates'; where both are whole they are the same.
    lead = params if apply else updates
    structure: Any
    paths, structure = jax.tree_util.tree_flatten_with_path(lead, is_leaf=_is_none)
    states_of_stages = [tree for stage in stages for tree in stage.state]
    columns = [
        _column(structure, updates, "updates"),
        _column(structure, params, "params"),
        *(_column(structure, tree, "the state") for tree in states_of_stages),
    ]
    masks = [_spread(True if stage.mask is None else stage.mask, lead, structure) for stage in stages]
    placed = _spread(specs, lead, structure)
    values = [
        tuple(number(value, name) for value, name in zip(stage.numbers, stage.link.numbers, strict=True))
        for stage in stages
    ]
    results, states = [], [[] for _ in columns[2:]]  # type: ignore[var-annotated]
    for i, (path, leaf) in enumerate(paths):
        where = jax.tree_util.keystr(path)
        g, p, *state = (column[i] for column in columns)
        if leaf is None:
            new, new_state = None, [None] * len(state)
        elif g is None:
            raise ValueError(
                f"every parameter needs an update; got None for updates{where}. Give zeros, or mask it out"
            )
        else:
            new, new_state = _leaf(
                call, stages, values, [bool(mask[i]) for mask in masks], accept, g, p, state, where, placed[i]
            )
        results.append(new)
        for column, value in zip(states, new_state, strict=True):
            column.append(value)
    trees = iter([structure.unflatten(column) for column in states])
    return structure.unflatten(results), [tuple(next(trees) for _ in stage.state) for stage in stages]


def _leaf(
    call: Call,
    stages: list[Stage],
    values: Any,
    active: list[bool],
    accept: jax.Array | None,
    g: Any,
    p: Any,
    state: list[Any],
    where: str,
    spec: Any,
) -> tuple[Any, list[Any]]:
    """One leaf's pass: its update or new parameter, and its new state in the order of `state`."""
    if not any(active):
        return g if accept is None else jnp.where(accept, g, jnp.zeros_like(g)), state
    g = check_leaf(g, f"updates{where}")
    dtype = g.dtype
    chain, coefficients, taken = [], [], []
    if accept is not None:
        coefficients.append(accept.astype(jnp.float32).reshape((1,) * g.ndim))
    blocks_of_state = iter(range(len(state)))
    for stage, its_values, on in zip(stages, values, active, strict=True):
        own = [next(blocks_of_state) for _ in stage.state]
        if not on:
            continue
        chain.append(stage.link)
        coefficients += [
            _coefficient(value, g.shape, name, where)
            for value, name in zip(its_values, stage.link.numbers, strict=True)
        ]
        for k in own:
            state[k] = check_leaf(state[k], f"the state of updates{where}", g.shape)
        if stage.link.reads_param:
            p = check_leaf(p, f"params{where}", g.shape)
            dtype = jnp.result_type(dtype, p.dtype)
        dtype = jnp.result_type(dtype, *(state[k].dtype for k in own), *stage.promotes)
        taken += own
    reads_param, last = any(link.reads_param for link in chain), chain[-1]
    if last is links.apply:
        dtype = p.dtype
    elif dtype not in contract.DTYPES:  # float64 or float16, by the dtype of a hyperparameter
        dtype = jnp.dtype(jnp.float32)
    # The last link's first block of state, if that is the update too: stored once.
    same = last.keeps_update and accept is None and state[taken[-last.state]].dtype == dtype
    shared = len(taken) - last.state if same else None
    arrays = (g, *(state[k] for k in taken), *((p,) if reads_param else ()))
    outs = [state[k].dtype for k in taken] + [dtype] * (shared is None)
    aliases = [(1 + k, k) for k in range(len(taken))]
    if last is links.apply:
        aliases.append((len(arrays) - 1, len(outs) - 1))
    if g.size == 0:
        stored = tuple(jnp.zeros(g.shape, out) for out in outs)
    else:
        block = links.fused(tuple(chain), stores_update=shared is None, guarded=accept is not None)
        operation = call.operation(block, tuple(outs), aliases=tuple(aliases))
        stored = _launch(call, operation, tuple(coefficients), arrays, where, spec)
    for k, value in zip(taken, stored, strict=False):
        state[k] = value
    return stored[-1 if shared is None else shared], state


def sum_of_squares(tree: Any, *, checked: bool = False, specs: Any = None) -> jax.Array:
    """Of all elements of all leaves, in float32: one kernel a leaf that reads it once.

    If `checked`, it is NaN if and only if an element is not finite.
    """
    call = Call.of(None)
    structure: Any
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    total = jnp.float32(0)
    for (path, leaf), spec in zip(paths, _spread(specs, tree, structure), strict=True):
        where = jax.tree_util.keystr(path)
        x = check_leaf(leaf, f"updates{where}")
        if x.size:
            operation = call.operation(blocks.checked_square if checked else blocks.square, total=(1,) * x.ndim)
            total += _launch(call, operation, (), (x,), where, spec)[0].reshape(())
    return total


def _launch(
    call: Call, operation: Operation, coefficients: Any, arrays: Any, where: str, spec: Any
) -> tuple[jax.Array, ...]:
    """Runs an operation on its arrays wherever they live."""
    try:
        call, coefficients, arrays = call.placed(coefficients, arrays, spec=spec)
    except ValueError as refusal:
        raise ValueError(f"updates{where}: {refusal}") from None
    return _run(call, operation, coefficients, arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run(call: Call, operation: Operation, coefficients: Any, arrays: Any) -> tuple[jax.Array, ...]:
    return call.run(operation, coefficients, arrays)


@_run.defjvp
def _run_jvp(call: Call, operation: Operation, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Differentiating through a step (meta-learning) is rare: its derivative is that of the block's maths, by jnp."""

    def plain(coefficients: Any, arrays: Any) -> tuple[jax.Array, ...]:
        stored, summed = operation.block(coefficients, arrays, exact=False)
        outs = tuple(out.astype(dtype) for out, dtype in zip(stored, operation.outs, strict=True))
        return outs if summed is None else (*outs, jnp.sum(summed, keepdims=True))

    return _run(call, operation, *primals), jax.jvp(plain, primals, tangents)[1]


def check_leaf(value: Any, what: str, shape: tuple[int, ...] | None = None) -> jax.Array:
    """A leaf as an array that kernels take, or the refusal with its path in the tree."""
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
    real = isinstance(value, (numbers.Real, np.ndarray, np.generic, jax.Array)) and not isinstance(value, bool)
    if not real or not (
        jnp.issubdtype(kind := jnp.result_type(value), jnp.floating) or jnp.issubdtype(kind, jnp.integer)
    ):
        raise TypeError(f"{name} must be a real number or an array of real numbers; got {value!r}")
    return jnp.asarray(value, jnp.float32)


def _coefficient(value: jax.Array, shape: tuple[int, ...], name: str, where: str) -> jax.Array:
    """A hyperparameter with the rank of the arrays."""
    aligned = (1,) * (len(shape) - value.ndim) + value.shape
    if len(aligned) != len(shape) or any(n not in (1, extent) for n, extent in zip(aligned, shape, strict=True)):
        raise ValueError(
            f"{name} must be a number, or broadcast to the shape of every leaf; got shape {value.shape} for "
            f"updates{where} of shape {shape}"
        )
    return value.reshape(aligned)


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


def _spread(prefix: Any, lead: Any, structure: Any) -> list[Any]:
    """The leaves of a prefix of the tree, such as a mask or PartitionSpecs, one for each leaf below them."""
    if prefix is None:
        return [None] * structure.num_leaves

    def below(value: Any, subtree: Any) -> Any:
        return jax.tree.map(lambda _: value, subtree, is_leaf=_is_none)

    whole = jax.tree.map(below, prefix, lead, is_leaf=lambda x: isinstance(x, PartitionSpec))
    leaves: list[Any] = structure.flatten_up_to(whole)
    return leaves
