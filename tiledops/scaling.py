"""Gradient transformations that multiply, add or clip, with no memory of their own but a count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from tiledops import contract, links, passes
from tiledops.passes import Stage
from tiledops.transformation import Incoming, Plan, TiledTransformation, masked

ScalarOrSchedule = Any  # a number, an array, or a function of the step that returns one


def identity() -> TiledTransformation:
    """Leaves updates as they are: `optax.identity`.

    >>> same = tiledops.transforms.identity()
    >>> same.update(jnp.ones(2), same.init(jnp.ones(2)))[0]
    Array([1., 1.], dtype=float32)
    """
    return TiledTransformation.of(optax.init_empty_state, lambda state, *_: Plan((), lambda _: state))


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

    contract.check_numbers(step_size=step_size)

    def plan(state: optax.EmptyState, *_: Any) -> Plan:
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

    if not callable(step_size_fn):
        raise TypeError(f"step_size_fn must be a function from the step to a number; got {step_size_fn!r}")

    def plan(state: optax.ScaleByScheduleState, *_: Any) -> Plan:
        new_state = optax.ScaleByScheduleState(count=optax.safe_increment(state.count))
        return Plan((Stage(links.scale, (step_size_fn(state.count),)),), lambda _: new_state)

    return TiledTransformation.of(optax.scale_by_schedule(step_size_fn).init, plan, optax.ScaleByScheduleState)


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
    contract.check_numbers(learning_rate=learning_rate)
    return scale(sign * learning_rate)


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
    if not callable(weight_decay):
        contract.check_numbers(weight_decay=weight_decay)
    init = optax.add_decayed_weights(weight_decay).init

    def plan(state: Any, *_: Any) -> Plan:
        rate, new_state = weight_decay, state
        if callable(weight_decay):
            rate = weight_decay(state.count)
            new_state = state._replace(count=optax.safe_increment(state.count))
        elif isinstance(weight_decay, (int, float)) and weight_decay == 0.0:  # Optax adds nothing, not even 0*inf
            return Plan((), lambda _: state)
        return Plan((Stage(links.decayed_weights, (rate,), promotes=(rate,)),), lambda _: new_state)

    return TiledTransformation.of(init, plan) if mask is None else masked(init, plan, mask)


def clip(max_delta: Any) -> TiledTransformation:
    """Clips every element to [-max_delta, max_delta]: `optax.clip`.

    >>> tiledops.transforms.clip(1.0).update(jnp.array([-3.0, 0.5]), optax.EmptyState())[0]
    Array([-1. ,  0.5], dtype=float32)

    Args:
      max_delta: a number or a scalar array.

    Returns:
      A transformation with state `optax.EmptyState`.

    Raises:
      TypeError: a leaf that is not float32 or bfloat16; the message names it by its path.
    """

    contract.check_numbers(max_delta=max_delta)

    def plan(state: optax.EmptyState, *_: Any) -> Plan:
        return Plan((Stage(links.clip, (max_delta,), promotes=(max_delta,)),), lambda _: state)

    return TiledTransformation.of(optax.init_empty_state, plan)


def clip_by_global_norm(max_norm: Any) -> TiledTransformation:
    """Scales all updates down so that the norm of all together is at most `max_norm`: `optax.clip_by_global_norm`.

    The norm is one more pass, that reads the updates alone; its factor rides in the pass that follows. Pascanu et al.,
    "On the difficulty of training Recurrent Neural Networks" (2012).

    >>> tiledops.transforms.clip_by_global_norm(1.0).update(jnp.array([3.0, 4.0]), optax.EmptyState())[0]
    Array([0.6, 0.8], dtype=float32)

    Args:
      max_norm: a number or a scalar array.

    Returns:
      A transformation with state `optax.EmptyState`.

    Raises:
      TypeError: a leaf that is not float32 or bfloat16; the message names it by its path.
    """

    contract.check_scalars(max_norm=max_norm)

    def plan(state: optax.EmptyState, incoming: Incoming) -> Plan:
        squares = incoming.squares
        if squares is None:
            squares = passes.sum_of_squares(incoming.updates, specs=incoming.specs)
        norm = jnp.sqrt(squares)
        factor = jnp.where(norm < max_norm, jnp.float32(1), max_norm / norm)
        return Plan((Stage(links.scale, (factor,)),), lambda _: state)

    return TiledTransformation.of(optax.init_empty_state, plan, reads_all=True)
