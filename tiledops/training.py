"""Flax's training states, for both flavours, with the whole optimizer step as one call of `step`.

Flax's own call `update`, which writes the update to memory, and then `optax.apply_updates`, which reads it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax  # type: ignore[import-untyped]
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

from tiledops.transformation import TiledTransformation


class Optimizer(nnx.Optimizer[Any]):
    """`nnx.Optimizer`, whose `update` runs the transformation's `step`: in one pass, and in place where it is donated.

    >>> model = nnx.Linear(2, 1, use_bias=False, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    >>> optimizer = tiledops.nnx.Optimizer(model, tiledops.transforms.sgd(0.5, momentum=0.9), wrt=nnx.Param)
    >>> grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
    >>> optimizer.update(model, grads)
    >>> model.kernel[...]
    Array([[0.5],
           [0.5]], dtype=float32)

    Arguments, attributes and state are those of `nnx.Optimizer`, so that either takes the other's checkpoints. In a
    training step `@nnx.jit(donate_argnums=(0, 1)) def train_step(model, optimizer, batch)` both are donated.

    Args:
      model: a module.
      tx: a transformation of this library. One of Optax's works too: its update, then one kernel a parameter.
      wrt: a filter for the variables to train, as in the `nnx.grad` that makes the gradients.
      graph: whether shared references count, as in `nnx.Optimizer`.
    """

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> None:
        """Updates the model's parameters, the optimizer's state and its count of steps.

        Args:
          model: the module.
          grads: the gradients that `nnx.grad` made.
          **kwargs: extra arguments of the transformation, such as `value=loss`; on a mesh with `Auto` axes `specs`, a
            tree of the parameters' PartitionSpecs or a prefix of it.

        Returns:
          None, where `nnx.Optimizer` returns the updates: in one pass they are never stored.

        Raises:
          TypeError, ValueError: as `tx.step`; and `check_finite=True`, unless `tx` is an `apply_if_finite`, whose every
            step checks.
        """
        params, gradients = (nnx.as_pure(nnx.state(tree, self.wrt, graph=self.graph)) for tree in (model, grads))
        old, extra_args = nnx.as_pure(self.opt_state), nnx.as_pure(kwargs)
        if kwargs.get("check_finite") and not isinstance(old, optax.ApplyIfFiniteState):
            raise ValueError(
                "check_finite=True needs a state that counts, and an nnx.Optimizer's state keeps its type. Make the "
                "optimizer of tiledops.transforms.apply_if_finite(tx, max_consecutive_errors), whose every step checks"
            )
        params, new = _step(self.tx)(gradients, old, params, **extra_args)
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(new, graph=self.graph))
        self.step[...] += 1


class TrainState(train_state.TrainState):
    """Flax's `TrainState`, whose `apply_gradients` runs `tx.step`: in one pass, and in place where it is donated.

    >>> model = linen.Dense(1, use_bias=False, kernel_init=linen.initializers.ones)
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    >>> tx = tiledops.transforms.sgd(0.5, momentum=0.9)
    >>> state = tiledops.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    >>> grads = jax.grad(lambda params: state.apply_fn({"params": params}, jnp.ones((1, 2))).sum())(state.params)
    >>> state.apply_gradients(grads=grads).params["kernel"]
    Array([[0.5],
           [0.5]], dtype=float32)

    Attributes, `create` and the tree are those of `flax.training.train_state.TrainState`, so that either takes the
    other's checkpoints, and it is subclassed alike. A training step `jax.jit(train_step, donate_argnums=0)` that takes
    the state first and returns it first works in place.

    Attributes:
      step: how many steps were taken.
      apply_fn: usually the model's `apply`.
      params: the parameters.
      tx: a transformation of this library. One of Optax's works too: its update, then one kernel a parameter.
      opt_state: its state.
    """

    def apply_gradients(self, *, grads: Any, extra_args: Mapping[str, Any] | None = None, **kwargs: Any) -> TrainState:
        """The state after one step.

        Args:
          grads: the gradients, a tree like `params`.
          extra_args: extra arguments of the transformation by name, such as `{"value": loss}`; `check_finite`, as of
            `step`; on a mesh with `Auto` axes `{"specs": specs}`, a tree of the parameters' PartitionSpecs or a prefix
            of it.
          **kwargs: other attributes to replace.

        Returns:
          A state whose step is one more, with new `params` and `opt_state`.

        Raises:
          TypeError, ValueError: as `tx.step`.
        """
        # Flax's fp8 layers keep scales beside the parameters, whose gradient is the new scale.
        overwritten = not isinstance(grads, jax.Array) and OVERWRITE_WITH_GRADIENT in grads
        params, gradients = (tree["params"] if overwritten else tree for tree in (self.params, grads))
        params, opt_state = _step(self.tx)(gradients, self.opt_state, params, **(extra_args or {}))
        if overwritten:
            params = {"params": params, OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}
        state: TrainState = self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)
        return state


def _step(tx: Any) -> Callable[..., tuple[Any, Any]]:
    """`tx.step`. `tx` itself stays as it was given: it is part of the trees' definition, by which jit knows them."""
    if isinstance(tx, optax.MultiSteps):  # which Flax takes, though it is no transformation
        tx = tx.gradient_transformation()
    return TiledTransformation.adopt(tx).step
