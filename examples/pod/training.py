"""The state of a run, and the step from one to the next."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax.sharding import Mesh
from language_model import LanguageModel, bits_per_byte

import tiledops.nnx
from pod import parallel
from pod.presets import Settings
from tiledops import transforms


class State(NamedTuple):
    """All that a step needs beside its batch, and all that is saved. Arrays, each cut as `parallel` says.

    Attributes:
      params: float32.
      optimizer: the state of the optimizer, which also counts the steps that were refused.
      rng: the key of all later random numbers, as its words.
    """

    params: Any
    optimizer: optax.ApplyIfFiniteState
    rng: jax.Array


class Metrics(NamedTuple):
    """Of one step.

    Attributes:
      loss: bits per byte.
      refused: how many steps in a row, up to this one, were refused.
      finite: of each parameter's gradient, whether all of it is; all True of a step that was not refused.
    """

    loss: jax.Array
    refused: jax.Array
    finite: jax.Array


def new_model(settings: Settings) -> LanguageModel:
    def gate(rngs: nnx.Rngs) -> nnx.Module:
        """gain*branch + residual with a gain that starts at 0, the branch dropped at times."""
        if not settings.drop:
            return tiledops.nnx.ReZero(rngs=rngs)
        zero = nnx.initializers.zeros
        layer = tiledops.nnx.StochasticDepth(settings.drop, gain_init=zero, learnable=True, rngs=rngs)
        layer.rngs = nnx.data(None)  # each call brings its key, so that the model is its parameters and nothing else
        return layer

    return LanguageModel(
        settings.size,
        gate,
        dtype=parallel.COMPUTE,
        rows=parallel.STREAM,
        gather=functools.partial(parallel.gather, dtype=parallel.COMPUTE),
        remat=True,
        rngs=nnx.Rngs(settings.seed),
    )


def new_optimizer(settings: Settings) -> transforms.TiledTransformation:
    """AdamW behind a clipped norm, refusing what is not finite: one pass for the norm, and one for all the rest."""
    warmup = max(1, settings.steps // 20)
    rate = optax.warmup_cosine_decay_schedule(
        settings.learning_rate / 10,
        settings.learning_rate,
        warmup,
        max(settings.steps, warmup + 1),
        settings.learning_rate / 10,
    )
    matrices = functools.partial(jax.tree.map, lambda p: p.ndim > 1)
    chain = transforms.chain(
        transforms.clip_by_global_norm(1.0), transforms.adamw(rate, b2=0.95, weight_decay=0.1, mask=matrices)
    )
    return transforms.apply_if_finite(chain, max_consecutive_errors=2**31 - 1)  # when to stop is the loop's affair


def new_state(settings: Settings) -> State:
    """The state before the first step."""
    params = nnx.state(new_model(settings), nnx.Param)
    return State(params, new_optimizer(settings).init(params), jax.random.key_data(jax.random.key(settings.seed)))


def initial(settings: Settings, mesh: Mesh) -> State:
    """`new_state`, each array made where it lives."""
    make = functools.partial(new_state, settings)
    return jax.jit(make, out_shardings=parallel.shardings(jax.eval_shape(make), mesh))()


def train_step(settings: Settings) -> Callable[[State, jax.Array], tuple[State, Metrics]]:
    """`step(state, text)`, jitted, in place of the old state; text is (batch, context + 1) bytes."""
    definition = nnx.split(nnx.eval_shape(lambda: new_model(settings)))[0]
    optimizer = new_optimizer(settings)

    def loss_of(params: Any, text: jax.Array, key: jax.Array | None) -> jax.Array:
        return bits_per_byte(nnx.merge(definition, params), text, key)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, text: jax.Array) -> tuple[State, Metrics]:
        rng, key = jax.random.split(jax.random.wrap_key_data(state.rng))
        loss, grads = jax.value_and_grad(loss_of)(state.params, text, key if settings.drop else None)
        params, opt_state, metrics = update(optimizer, loss, grads, state)
        return State(params, opt_state, jax.random.key_data(rng)), metrics

    return step


def update(optimizer: Any, loss: jax.Array, grads: Any, state: State) -> tuple[Any, Any, Metrics]:
    """The optimizer's step, unless the loss or a gradient is not finite: then nothing changes but the counts."""
    leaves, tree = jax.tree.flatten(grads)
    smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)  # the loss speaks through a gradient
    spoken = [g + jnp.where(jnp.isfinite(loss), 0.0, jnp.nan) if i == smallest else g for i, g in enumerate(leaves)]
    params, opt_state = optimizer.step(tree.unflatten(spoken), state.optimizer, state.params)
    finite = jax.lax.cond(
        opt_state.last_finite,
        lambda: jnp.ones(len(leaves), bool),
        lambda: jnp.stack([jnp.isfinite(g).all() for g in leaves]),  # another pass, only when it is needed
    )
    return params, opt_state, Metrics(loss, opt_state.notfinite_count, finite)
