"""Gradient transformations that remember: averages of past gradients, and what is made of them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from tiledops import contract, links
from tiledops.passes import Stage
from tiledops.transformation import Plan, TiledTransformation, accumulator, with_state


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
    contract.check_numbers(decay=decay)
    accumulator_dtype = accumulator(accumulator_dtype, "accumulator_dtype")
    init = optax.trace(0.0, accumulator_dtype=accumulator_dtype).init
    link = links.nesterov_trace if nesterov else links.trace

    def plan(state: optax.TraceState, *_: Any) -> Plan:
        return Plan((Stage(link, (decay,), (state.trace,), (decay,)),), lambda new: optax.TraceState(*new[0]))

    return TiledTransformation.of(with_state(init), plan, optax.TraceState)


def ema(decay: Any, debias: bool = True, accumulator_dtype: Any | None = None) -> TiledTransformation:
    """An exponential moving average of updates, e' = decay*e + (1 - decay)*g: `optax.ema`.

    >>> average = tiledops.transforms.ema(0.5, debias=False)
    >>> average.update(jnp.ones(2), average.init(jnp.ones(2)))[0]
    Array([0.5, 0.5], dtype=float32)

    Args:
      decay: decay rate of the average; a number or a scalar array.
      debias: whether to divide the update, not the state, by 1 - decay**step.
      accumulator_dtype: float32 or bfloat16, of the average; default: the parameters'.

    Returns:
      A transformation with state `optax.EmaState`.

    Raises:
      TypeError: another dtype, here or of a leaf; the message names the leaf by its path.
    """
    contract.check_numbers(decay=decay)
    accumulator_dtype = accumulator(accumulator_dtype, "accumulator_dtype")
    init = optax.ema(0.0, accumulator_dtype=accumulator_dtype).init

    def plan(state: optax.EmaState, *_: Any) -> Plan:
        count = optax.safe_increment(state.count)
        link = links.debiased_ema if debias else links.ema
        numbers = (decay, 1 - decay, *((_inverse_bias(decay, count),) if debias else ()))
        stage = Stage(link, numbers, (state.ema,), (decay,))
        return Plan((stage,), lambda new: optax.EmaState(count, *new[0]))

    return TiledTransformation.of(with_state(init), plan, optax.EmaState)


def scale_by_adam(
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = False,
) -> TiledTransformation:
    """Divides the average gradient by the root of the average square, both debiased: `optax.scale_by_adam`.

    Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2014); with `nesterov`, Dozat, "Incorporating Nesterov
    Momentum into Adam" (2016).

    >>> adam = tiledops.transforms.scale_by_adam(eps=0.0)
    >>> adam.update(jnp.full(2, 4.0), adam.init(jnp.ones(2)))[0].round(4)
    Array([1., 1.], dtype=float32)

    Args:
      b1, b2: decay rates of the two averages; numbers or scalar arrays.
      eps, eps_root: added to the root, and under it.
      mu_dtype: float32 or bfloat16, of the first average; default: the parameters'.
      nesterov: whether to look ahead by one step.

    Returns:
      A transformation with state `optax.ScaleByAdamState`.

    Raises:
      TypeError: another dtype, here or of a leaf; the message names the leaf by its path.
    """
    contract.check_numbers(b1=b1, b2=b2, eps=eps, eps_root=eps_root)
    init = optax.scale_by_adam(mu_dtype=accumulator(mu_dtype, "mu_dtype")).init

    def plan(state: optax.ScaleByAdamState, *_: Any) -> Plan:
        count = optax.safe_increment(state.count)
        numbers = [b1, 1 - b1, b2, 1 - b2, eps, eps_root, _inverse_bias(b1, count), _inverse_bias(b2, count)]
        if nesterov:
            numbers.append(_inverse_bias(b1, optax.safe_increment(count)))
        link = links.nadam if nesterov else links.adam
        stage = Stage(link, tuple(numbers), (state.mu, state.nu), (b1, b2, eps, eps_root))
        return Plan((stage,), lambda new: optax.ScaleByAdamState(count, *new[0]))

    return TiledTransformation.of(with_state(init), plan, optax.ScaleByAdamState)


def scale_by_lion(
    b1: Any = 0.9, b2: Any = 0.99, mu_dtype: Any | None = None, *, mode: str = "hard", smooth_beta: Any = 1.0
) -> TiledTransformation:
    """The sign of an average gradient: `optax.scale_by_lion`.

    Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023).

    >>> lion = tiledops.transforms.scale_by_lion()
    >>> lion.update(jnp.array([4.0, -0.1]), lion.init(jnp.ones(2)))[0]
    Array([ 1., -1.], dtype=float32)

    Args:
      b1: how much of the average, beside the gradient, there is in the update.
      b2: decay rate of the average.
      mu_dtype: float32 or bfloat16, of the average; default: the parameters'.
      mode: "hard" (the sign), "smooth" (tanh of `smooth_beta` times the average) or "refined" (the sign from 1 on,
        below that the average itself).
      smooth_beta: see `mode`.

    Returns:
      A transformation with state `optax.ScaleByLionState`.

    Raises:
      ValueError: another mode.
      TypeError: another dtype, here or of a leaf; the message names the leaf by its path.
    """
    modes = {"hard": links.lion, "smooth": links.smooth_lion, "refined": links.refined_lion}
    if mode not in modes:
        raise ValueError(f"mode must be one of {', '.join(modes)}; got {mode!r}")
    contract.check_numbers(b1=b1, b2=b2, smooth_beta=smooth_beta)
    init = optax.scale_by_lion(mu_dtype=accumulator(mu_dtype, "mu_dtype")).init
    smooth = (smooth_beta,) if mode == "smooth" else ()

    def plan(state: optax.ScaleByLionState, *_: Any) -> Plan:
        count = optax.safe_increment(state.count)
        stage = Stage(modes[mode], (b1, 1 - b1, b2, 1 - b2, *smooth), (state.mu,), (b1, *smooth))
        return Plan((stage,), lambda new: optax.ScaleByLionState(count, *new[0]))

    return TiledTransformation.of(with_state(init), plan, optax.ScaleByLionState)


def _inverse_bias(decay: Any, count: Any) -> Any:
    """1/(1 - decay**count): what an average over `count` steps that began at 0 must be multiplied by.

    By Optax's own function: where decay is near 1, another way to raise it to a power changes the fifth digit.
    """
    return optax.tree.bias_correction(jnp.float32(1), decay, count)
