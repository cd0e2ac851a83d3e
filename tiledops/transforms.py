"""Optax gradient transformations, each one pipelined kernel a leaf.

Names, arguments, defaults and state types are Optax's, so that they swap in and out of `optax.chain` and of saved
states. They are computed in float32 and rounded once:

- float32: within 1 ulp of the sum's largest term of what Optax computes for each add, and the same for a product alone.
- bfloat16 updates or state: within 1 bfloat16 ulp of each value that Optax rounds on the way; these do not.
- The dtype of state never changes from step to step. Where Optax's would drift (bfloat16 parameters, float32
  gradients, no `accumulator_dtype`), values are as in Optax and the dtype is held.
- The dtype of updates is Optax's, but never float64: a float64 learning rate is rounded to float32.

`update` writes new state into the buffers of the old where the jitted step donates them. Kernels are tiled and run as
`tiledops.use_config` says. Differentiable: the derivative of a step is that of its maths, in plain jnp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from tiledops import contract, links, updates
from tiledops.updates import Stage

ScalarOrSchedule = Any  # a number, an array, or a function of the step that returns one


class Plan(NamedTuple):
    """What a transformation does at one step: its stages, and its state after them from their new trees of state."""

    stages: tuple[Stage, ...]
    finish: Callable[[list[tuple[Any, ...]]], Any]


class TiledTransformation(optax.GradientTransformationExtraArgs):
    """An Optax gradient transformation with one more function.

    Attributes:
      init: `init(params) -> state`.
      update: `update(updates, state, params=None, **extra_args) -> (updates, state)`, as Optax has it.
      step: `step(grads, state, params, **extra_args) -> (params, state)`: `update` and `apply_updates` in one pass, in
        place where `state` and `params` are donated.
    """

    step: Callable[..., tuple[Any, Any]]
    plan: Callable[[Any, Any], Plan]

    @classmethod
    def of(cls, init: Callable[[Any], Any], plan: Callable[[Any, Any], Plan]) -> TiledTransformation:
        """From `init` and from `plan(state, updates)`, which says what a step does; all else follows."""

        def run(grads: Any, state: Any, params: Any, *, apply: bool) -> tuple[Any, Any]:
            stages, finish = plan(state, grads)
            if params is None and (apply or any(stage.link.reads_param for stage in stages)):
                raise ValueError("this transformation needs the parameters; got params=None. Pass them to update()")
            results, new = updates.run(stages, grads, params, apply=apply)
            return results, finish(new)

        def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
            del extra_args
            return run(grads, state, params, apply=False)

        def step(grads: Any, state: Any, params: Any, **extra_args: Any) -> tuple[Any, Any]:
            del extra_args
            return run(grads, state, params, apply=True)

        self = cls(init, update)
        self.step, self.plan = step, plan
        return self


def trace(decay: Any, nesterov: bool = False, accumulator_dtype: Any | None = None) -> TiledTransformation:
    """A trace of past updates, t' = decay*t + g: `optax.trace`. With `nesterov` the update is decay*t' + g.

    >>> momentum = tiledops.transforms.trace(0.9)
    >>> state = momentum.init(jnp.zeros(2))
    >>> update, state = momentum.update(jnp.ones(2), state)
    >>> update, state = momentum.update(jnp.ones(2), state)
    >>> update
    Array([1.9, 1.9], dtype=float32)

    Args:
      decay: decay rate of the trace; a number or a scalar array.
      nesterov: whether to look ahead by one step.
      accumulator_dtype: float32 or bfloat16, of the trace; default: the parameters'.

    Returns:
      A transformation with state `optax.TraceState`.

    Raises:
      TypeError: another dtype, here or of a leaf; the message names the leaf by its path.
    """
    accumulator_dtype = _accumulator(accumulator_dtype, "accumulator_dtype")
    init = optax.trace(0.0, accumulator_dtype=accumulator_dtype).init
    link = links.nesterov_trace if nesterov else links.trace

    def plan(state: optax.TraceState, _: Any) -> Plan:
        return Plan((Stage(link, (decay,), (state.trace,), (decay,)),), lambda new: optax.TraceState(*new[0]))

    return TiledTransformation.of(_with_state(init), plan)


def add_decayed_weights(weight_decay: ScalarOrSchedule = 0.0, mask: Any | None = None) -> TiledTransformation:
    """Adds weight_decay*p to the update of each parameter p: `optax.add_decayed_weights`.

    >>> decay = tiledops.transforms.add_decayed_weights(0.1)
    >>> params = jnp.full(2, 3.0)
    >>> decay.update(jnp.ones(2), decay.init(params), params)[0]
    Array([1.3, 1.3], dtype=float32)

    Args:
      weight_decay: a number, a scalar array, or a schedule.
      mask: a tree of bools, the parameters' tree or a prefix of it, or a function that makes one of the updates; False
        leaves a parameter's update as it is.

    Returns:
      A transformation with Optax's state: `optax.EmptyState`, `WeightDecaySchedule` for a schedule, each in an
      `optax.MaskedState` if there is a mask.

    Raises:
      ValueError: `update` without params.
      TypeError: a leaf that is not float32 or bfloat16; the message names it by its path.
    """
    init = optax.add_decayed_weights(weight_decay).init

    def plan(state: Any, _: Any) -> Plan:
        rate, new_state = weight_decay, state
        if callable(weight_decay):
            rate = weight_decay(state.count)
            new_state = state._replace(count=optax.safe_increment(state.count))
        elif isinstance(weight_decay, (int, float)) and weight_decay == 0.0:  # Optax adds nothing, not even 0*inf
            return Plan((), lambda _: state)
        return Plan((Stage(links.decayed_weights, (rate,), promotes=(rate,)),), lambda _: new_state)

    return TiledTransformation.of(init, plan) if mask is None else _masked(init, plan, mask)


def scale(step_size: Any) -> TiledTransformation:
    """Multiplies updates by `step_size`: `optax.scale`.

    >>> halve = tiledops.transforms.scale(0.5)
    >>> halve.update(jnp.ones(2), halve.init(jnp.ones(2)))[0]
    Array([0.5, 0.5], dtype=float32)

    Args:
      step_size: a number, a scalar array, or an array that broadcasts to the shape of every leaf.

    Returns:
      A transformation with state `optax.EmptyState`.

    Raises:
      TypeError: a leaf that is not float32 or bfloat16; the message names it by its path.
    """

    def plan(state: optax.EmptyState, _: Any) -> Plan:
        return Plan((Stage(links.scale, (step_size,), promotes=(step_size,)),), lambda _: state)

    return TiledTransformation.of(optax.init_empty_state, plan)


def scale_by_schedule(step_size_fn: Callable[[Any], Any]) -> TiledTransformation:
    """Multiplies updates by `step_size_fn(step)`: `optax.scale_by_schedule`. The updates keep their dtype.

    >>> warmup = tiledops.transforms.scale_by_schedule(lambda step: step / 4)
    >>> state = warmup.init(jnp.ones(2))
    >>> _, state = warmup.update(jnp.ones(2), state)
    >>> warmup.update(jnp.ones(2), state)[0]
    Array([0.25, 0.25], dtype=float32)

    Args:
      step_size_fn: from the count of updates so far, an int32 scalar array, to a number.

    Returns:
      A transformation with state `optax.ScaleByScheduleState`.

    Raises:
      TypeError: a leaf that is not float32 or bfloat16; the message names it by its path.
    """

    def plan(state: optax.ScaleByScheduleState, _: Any) -> Plan:
        new_state = optax.ScaleByScheduleState(count=optax.safe_increment(state.count))
        return Plan((Stage(links.scale, (step_size_fn(state.count),)),), lambda _: new_state)

    return TiledTransformation.of(optax.scale_by_schedule(step_size_fn).init, plan)


def scale_by_learning_rate(
    learning_rate: ScalarOrSchedule | None = None, *, flip_sign: bool = True
) -> TiledTransformation:
    """Multiplies updates by -learning_rate, or by learning_rate if not `flip_sign`: `optax.scale_by_learning_rate`.

    >>> descend = tiledops.transforms.scale_by_learning_rate(0.25)
    >>> descend.update(jnp.ones(2), descend.init(jnp.ones(2)))[0]
    Array([-0.25, -0.25], dtype=float32)

    Args:
      learning_rate: a number, an array or a schedule, as in `scale` and `scale_by_schedule`; None scales nothing.
      flip_sign: whether to descend.

    Returns:
      A transformation with state `optax.ScaleByScheduleState` for a schedule, else `optax.EmptyState`.

    Raises:
      TypeError: a leaf that is not float32 or bfloat16; the message names it by its path.
    """
    if learning_rate is None:
        return identity()
    sign = -1 if flip_sign else 1
    if callable(learning_rate):
        return scale_by_schedule(lambda count: sign * learning_rate(count))
    return scale(sign * learning_rate)


def identity() -> TiledTransformation:
    """Leaves updates as they are: `optax.identity`.

    >>> same = tiledops.transforms.identity()
    >>> same.update(jnp.ones(2), same.init(jnp.ones(2)))[0]
    Array([1., 1.], dtype=float32)
    """
    return TiledTransformation.of(optax.init_empty_state, lambda state, _: Plan((), lambda _: state))


def _masked(init: Callable[[Any], Any], plan: Callable[[Any, Any], Plan], mask: Any) -> TiledTransformation:
    """`optax.masked` for what is planned: the same state, still one pass."""

    def masked_plan(state: optax.MaskedState, grads: Any) -> Plan:
        tree = mask(grads) if callable(mask) else mask
        stages, finish = plan(state.inner_state, grads)
        stages = tuple(stage._replace(mask=tree) for stage in stages)
        return Plan(stages, lambda new: optax.MaskedState(finish(new)))

    return TiledTransformation.of(optax.masked(optax.GradientTransformation(init, _unused), mask).init, masked_plan)


def _unused(*_: Any) -> Any:
    raise AssertionError


def _accumulator(dtype: Any | None, name: str) -> Any | None:
    return None if dtype is None else contract.check_dtype(jax.dtypes.canonicalize_dtype(dtype), name)


def _with_state(init: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`init` of a state with the parameters' shapes: their leaves checked, its dtypes made strong."""

    def checked(params: Any) -> Any:
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                updates.check_leaf(leaf, f"params{jax.tree_util.keystr(path)}")
        return jax.tree.map(_strong, init(params))

    return checked


def _strong(x: jax.Array) -> jax.Array:
    """x without JAX's weak type, which the first step would drop, and a jitted step then be compiled twice."""
    return jnp.asarray(x, x.dtype) if getattr(x, "weak_type", False) else x
