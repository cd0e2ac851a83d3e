"""Optax gradient transformations, each one pipelined kernel a leaf, and `chain`, which makes one of many.

Names, arguments, defaults and state types are Optax's, so that they swap in and out of `optax.chain` and of saved
states. They have one function more, `step(grads, state, params) -> (params, state)`: the whole step in one pass over
gradients, state and parameters, in place where the jitted step donates the last two.

Everything is computed in float32 and rounded once, where Optax rounds every operation to the dtype of its operands:

- float32: each add a*x + y is within 3*2**-24*(|a*x| + |y|) of Optax's, each product, quotient and root within 2 ulp.
- bfloat16: the same with 2**-9, by Optax's roundings.
- The dtype of state never changes from step to step. Where Optax's would drift (bfloat16 parameters, float32
  gradients, no `accumulator_dtype`), values are as in Optax and the dtype is held.
- The dtype of updates is Optax's, but never float64: a float64 learning rate is rounded to float32.

Kernels are tiled and run as `tiledops.use_config` says. Differentiable: the derivative of a step is that of its maths,
in plain jnp.
"""

from __future__ import annotations

from typing import Any

from tiledops import contract
from tiledops.chaining import chain
from tiledops.momentum import ema, scale_by_adam, scale_by_lion, trace
from tiledops.scaling import (
    ScalarOrSchedule,
    add_decayed_weights,
    clip,
    clip_by_global_norm,
    identity,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
)
from tiledops.transformation import TiledTransformation, apply_if_finite

__all__ = [
    "TiledTransformation",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_if_finite",
    "chain",
    "clip",
    "clip_by_global_norm",
    "ema",
    "identity",
    "lion",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_schedule",
    "sgd",
    "trace",
]


def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: Any | None = None,
    nesterov: bool = False,
    accumulator_dtype: Any | None = None,
) -> TiledTransformation:
    """Stochastic gradient descent, with momentum unless it is None: `optax.sgd`.

    >>> tx = tiledops.transforms.sgd(0.5, momentum=0.9)
    >>> params, state = tx.step(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))
    >>> params
    Array([0.5, 0.5], dtype=float32)

    Args:
      learning_rate: see `scale_by_learning_rate`.
      momentum, nesterov, accumulator_dtype: see `trace`.

    Returns:
      A transformation with Optax's state.
    """
    if momentum is not None:
        contract.check_numbers(momentum=momentum)
    memory = identity() if momentum is None else trace(momentum, nesterov, accumulator_dtype)
    return chain(memory, scale_by_learning_rate(learning_rate))


def adam(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = False,
) -> TiledTransformation:
    """Adam: `optax.adam`.

    >>> tx = tiledops.transforms.adam(0.5)
    >>> params, state = tx.step(jnp.full(2, 3.0), tx.init(jnp.ones(2)), jnp.ones(2))
    >>> params.round(4)
    Array([0.5, 0.5], dtype=float32)

    Args:
      learning_rate: see `scale_by_learning_rate`.
      b1, b2, eps, eps_root, mu_dtype, nesterov: see `scale_by_adam`.

    Returns:
      A transformation with Optax's state.
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov), scale_by_learning_rate(learning_rate)
    )


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any | None = None,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: Any | None = None,
    *,
    nesterov: bool = False,
) -> TiledTransformation:
    """Adam with weight decay that the moments don't see: `optax.adamw`.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).

    >>> tx = tiledops.transforms.adamw(0.5, weight_decay=0.5)
    >>> params, state = tx.step(jnp.full(2, 3.0), tx.init(jnp.ones(2)), jnp.ones(2))
    >>> params.round(4)
    Array([0.25, 0.25], dtype=float32)

    Args:
      learning_rate: see `scale_by_learning_rate`.
      b1, b2, eps, eps_root, mu_dtype, nesterov: see `scale_by_adam`.
      weight_decay, mask: see `add_decayed_weights`.

    Returns:
      A transformation with Optax's state.
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def lion(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.99,
    mu_dtype: Any | None = None,
    weight_decay: ScalarOrSchedule = 1e-3,
    mask: Any | None = None,
) -> TiledTransformation:
    """The sign of momentum, with weight decay: `optax.lion`.

    >>> tx = tiledops.transforms.lion(0.5, weight_decay=0.0)
    >>> params, state = tx.step(jnp.full(2, 3.0), tx.init(jnp.ones(2)), jnp.ones(2))
    >>> params
    Array([0.5, 0.5], dtype=float32)

    Args:
      learning_rate: see `scale_by_learning_rate`.
      b1, b2, mu_dtype: see `scale_by_lion`.
      weight_decay, mask: see `add_decayed_weights`.

    Returns:
      A transformation with Optax's state.
    """
    return chain(
        scale_by_lion(b1, b2, mu_dtype),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
