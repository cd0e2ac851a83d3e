"""The maths of gradient transformations on one block, and how it chains.

A link takes the update that the link before it hands on, its own numbers and its own blocks of state, and returns the
update for the next link and its new state. `fused` makes one block function of a chain of links, so that a chain is
one pass over its arrays. Inside it everything is float32: an update is rounded to its dtype once, at the end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tiledops import blocks
from tiledops.blocks import Blocks, multiply_add

Computed = tuple[jax.Array, Blocks]


@dataclasses.dataclass(frozen=True)
class Link:
    """What one gradient transformation computes on a block.

    Attributes:
      compute: `(numbers, g, state, p, *, exact) -> (update, new state)`; g is the incoming update, p the parameter.
      numbers: names of its hyperparameters, in the user's words.
      state: how many blocks of state it has.
      flops: operations of one element.
      reads_param: whether it looks at p.
      keeps_update: whether the update that it hands on is its first block of state.
      makes_param: whether what it hands on is the new parameter; then it is the last.
      forgets: whether a leaf without an update loses its state, as Optax has it.
    """

    compute: Callable[..., Computed]
    numbers: tuple[str, ...] = ()
    state: int = 0
    flops: int = 0
    reads_param: bool = False
    keeps_update: bool = False
    makes_param: bool = False
    forgets: bool = False


def link(*numbers: str, **attributes: Any) -> Callable[[Callable[..., Computed]], Link]:
    """Makes a link of the function that it decorates."""
    return lambda compute: Link(compute, numbers, **attributes)


@link(flops=1, reads_param=True, makes_param=True)
def apply(numbers: Blocks, g: jax.Array, state: Blocks, p: jax.Array, *, exact: bool) -> Computed:
    """p' = g + p."""
    return multiply_add(jnp.float32(1), g, p, exact=exact), ()


@link("step_size", "1 - step_size", flops=3, reads_param=True, makes_param=True)
def average(numbers: Blocks, g: jax.Array, state: Blocks, p: jax.Array, *, exact: bool) -> Computed:
    """p' = step_size*g + (1 - step_size)*p."""
    step_size, rest = numbers
    return _average(rest, p, step_size, g, exact=exact), ()


@link("step_size", flops=1)
def scale(numbers: Blocks, g: jax.Array, state: Blocks, p: jax.Array, *, exact: bool) -> Computed:
    """u = step_size*g."""
    (step_size,) = numbers
    return _times(step_size, g, exact=exact), ()


@link("weight_decay", flops=2, reads_param=True)
def decayed_weights(numbers: Blocks, g: jax.Array, state: Blocks, p: jax.Array, *, exact: bool) -> Computed:
    """u = weight_decay*p + g."""
    (weight_decay,) = numbers
    return multiply_add(weight_decay, p, g, exact=exact), ()


@link("decay", state=1, flops=2, keeps_update=True, forgets=True)
def trace(numbers: Blocks, g: jax.Array, state: Blocks, p: jax.Array, *, exact: bool) -> Computed:
    """t' = decay*t + g,  u = t'."""
    (decay,), (t,) = numbers, state
    t = multiply_add(decay, t, g, exact=exact)
    return t, (t,)


@link("decay", state=1, flops=4, forgets=True)
def nesterov_trace(numbers: Blocks, g: jax.Array, state: Blocks, p: jax.Array, *, exact: bool) -> Computed:
    """t' = decay*t + g,  u = decay*t' + g."""
    (decay,), (t,) = numbers, state
    t = multiply_add(decay, t, g, exact=exact)
    return multiply_add(decay, t, g, exact=exact), (t,)


@link("decay", "1 - decay", state=1, flops=3, keeps_update=True)
def ema(numbers: Blocks, g: jax.Array, state: Blocks, p: jax.Array, *, exact: bool) -> Computed:
    """e' = decay*e + (1 - decay)*g,  u = e'."""
    (decay, rest), (e,) = numbers, state
    e = _average(decay, e, rest, g, exact=exact)
    return e, (e,)


@link("decay", "1 - decay", "1/c", state=1, flops=4)
def debiased_ema(numbers: Blocks, g: jax.Array, state: Blocks, p: jax.Array, *, exact: bool) -> Computed:
    """e' = decay*e + (1 - decay)*g,  u = e'/c, where c = 1 - decay**step."""
    *averaging, inverse_c = numbers
    e, state = ema.compute(tuple(averaging), g, state, p, exact=exact)
    return _times(inverse_c, e, exact=exact), state


ADAM_NUMBERS = ("b1", "1 - b1", "b2", "1 - b2", "eps", "eps_root", "1/c1", "1/c2")


@link(*ADAM_NUMBERS, state=2, flops=13)
def adam(numbers: Blocks, g: jax.Array, state: Blocks, p: jax.Array, *, exact: bool) -> Computed:
    """m' = b1*m + (1 - b1)*g,  v' = b2*v + (1 - b2)*g*g,  u = m'/c1 / (sqrt(v'/c2 + eps_root) + eps).

    The bias corrections are c1 = 1 - b1**step and c2 = 1 - b2**step.
    """
    inverse_c1 = numbers[6]
    state, root = _moments(numbers, g, state, exact=exact)
    return _times(inverse_c1, state[0], exact=exact) / root, state


@link(*ADAM_NUMBERS, "1/c1 of the next step", state=2, flops=16)
def nadam(numbers: Blocks, g: jax.Array, state: Blocks, p: jax.Array, *, exact: bool) -> Computed:
    """m' and v' as in Adam,  u = (b1*m'/c1' + (1 - b1)*g/c1) / (sqrt(v'/c2 + eps_root) + eps), c1' of the next step."""
    b1, rest1, _, _, _, _, inverse_c1, _, inverse_next_c1 = numbers
    state, root = _moments(numbers, g, state, exact=exact)
    ahead, now = _times(inverse_next_c1, state[0], exact=exact), _times(inverse_c1, g, exact=exact)
    return _average(b1, ahead, rest1, now, exact=exact) / root, state


def _moments(numbers: Blocks, g: jax.Array, state: Blocks, *, exact: bool) -> tuple[Blocks, jax.Array]:
    """m' and v', and the denominator sqrt(v'/c2 + eps_root) + eps."""
    (b1, rest1, b2, rest2, eps, eps_root, _, inverse_c2, *_), (m, v) = numbers, state
    m = _average(b1, m, rest1, g, exact=exact)
    v = _average(b2, v, rest2, _times(g, g, exact=exact), exact=exact)
    return (m, v), jnp.sqrt(multiply_add(inverse_c2, v, eps_root, exact=exact)) + eps


LION_NUMBERS = ("b1", "1 - b1", "b2", "1 - b2")


@link(*LION_NUMBERS, state=1, flops=8)
def lion(numbers: Blocks, g: jax.Array, state: Blocks, p: jax.Array, *, exact: bool) -> Computed:
    """u = sign(b1*m + (1 - b1)*g),  m' = b2*m + (1 - b2)*g."""
    direction, state = _lion(numbers, g, state, exact=exact)
    return jnp.sign(direction), state


@link(*LION_NUMBERS, "smooth_beta", state=1, flops=9)
def smooth_lion(numbers: Blocks, g: jax.Array, state: Blocks, p: jax.Array, *, exact: bool) -> Computed:
    """u = tanh(smooth_beta*(b1*m + (1 - b1)*g)),  m' = b2*m + (1 - b2)*g."""
    direction, state = _lion(numbers[:4], g, state, exact=exact)
    return jnp.tanh(_times(numbers[4], direction, exact=exact)), state


@link(*LION_NUMBERS, state=1, flops=8)
def refined_lion(numbers: Blocks, g: jax.Array, state: Blocks, p: jax.Array, *, exact: bool) -> Computed:
    """u = b1*m + (1 - b1)*g, no larger than 1 either way,  m' = b2*m + (1 - b2)*g."""
    direction, state = _lion(numbers, g, state, exact=exact)
    return jnp.clip(direction, -1, 1), state


def _lion(numbers: Blocks, g: jax.Array, state: Blocks, *, exact: bool) -> Computed:
    (b1, rest1, b2, rest2), (m,) = numbers, state
    return _average(b1, m, rest1, g, exact=exact), (_average(b2, m, rest2, g, exact=exact),)


@link("max_delta", flops=2)
def clip(numbers: Blocks, g: jax.Array, state: Blocks, p: jax.Array, *, exact: bool) -> Computed:
    """u = g, no larger than max_delta either way."""
    (max_delta,) = numbers
    return jnp.minimum(jnp.maximum(g.astype(jnp.float32), -max_delta), max_delta), ()


@functools.cache
def fused(
    chain: tuple[Link, ...], *, stores_update: bool = True, guarded: bool = False
) -> Callable[..., tuple[Blocks, None]]:
    """The block function of a chain: cached, so that equal chains are one function and one kernel.

    Its coefficients are the links' numbers in order; its blocks are g, the links' blocks of state in order, and p if
    any link reads it. It stores the new state in the same order and then, unless `stores_update` is off, the update.

    If `guarded`, there is one more coefficient before the others. Where it is 0, the state is stored as it was, and so
    is the parameter if the last link applies the update; an update is stored as 0.
    """
    reads_param = any(link.reads_param for link in chain)

    def run(coefficients: Blocks, arrays: Blocks, *, exact: bool) -> tuple[Blocks, None]:
        accept = coefficients[0] != 0 if guarded else None
        numbers, states = iter(coefficients[1:] if guarded else coefficients), iter(arrays[1:])
        update, param = arrays[0], arrays[-1] if reads_param else None
        stored: list[jax.Array] = []
        for link in chain:
            its_numbers = tuple(next(numbers) for _ in link.numbers)
            its_state = tuple(next(states) for _ in range(link.state))
            update, new = link.compute(its_numbers, update, its_state, param, exact=exact)
            stored.extend(_chosen(accept, x, old) for x, old in zip(new, its_state, strict=True))
        if accept is not None:
            update = _chosen(accept, update, arrays[-1] if chain[-1].makes_param else jnp.zeros((), update.dtype))
        return (*stored, update) if stores_update else tuple(stored), None

    run.__name__ = "_".join([*(["guarded"] if guarded else []), *(link.compute.__name__ for link in chain)])
    blocks.FLOPS[run] = sum(link.flops for link in chain)
    return run


def _chosen(accept: jax.Array | None, new: jax.Array, old: jax.Array) -> jax.Array:
    """The new block, or the old one's very bits where a step is not accepted."""
    return new if accept is None else jnp.where(accept, new.astype(old.dtype), old)


def _times(a: jax.Array, x: jax.Array, *, exact: bool) -> jax.Array:
    """a*x: adding -0.0 changes no number, the sign of a zero included."""
    return multiply_add(a, x, jnp.float32(-0.0), exact=exact)


def _average(a: jax.Array, x: jax.Array, b: jax.Array, y: jax.Array, *, exact: bool) -> jax.Array:
    """a*x + b*y."""
    return multiply_add(a, x, _times(b, y, exact=exact), exact=exact)
