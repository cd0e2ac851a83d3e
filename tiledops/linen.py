"""Gates for residual networks in Flax Linen, and the training state. Parameters and results: as in `tiledops.nnx`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tiledops import gates
from tiledops.config import PipelineConfig
from tiledops.gates import Initializer
from tiledops.training import TrainState

__all__ = ["Axpy", "LayerScale", "ReZero", "Residual", "StochasticDepth", "TrainState"]


class Axpy(nn.Module, kw_only=True):
    """gain*branch + residual, the end of a residual block, as one pipelined kernel.

    >>> layer = tiledops.linen.Axpy(features=3)
    >>> branch, residual = jnp.full((2, 3), 2.0), jnp.ones((2, 3))
    >>> variables = layer.init(jax.random.key(0), branch, residual)
    >>> variables
    {'params': {'gain': Array([1., 1., 1.], dtype=float32)}}
    >>> layer.apply(variables, branch, residual)
    Array([[3., 3., 3.],
           [3., 3., 3.]], dtype=float32)

    The gain multiplies in float32 whatever its dtype, and the sum is rounded once. `init` runs no kernel: there, plain
    jnp computes the layer.

    Attributes:
      features: the number of channels, the extent of the last axis, for one gain each; None for one gain in all.
      gain_init: initializer of the gain; 1 by default, the plain residual connection.
      learnable: whether the gain is the parameter `gain`. If not, it is what `gain_init` makes of no random key, and
        there is no parameter: `gain_init=nn.initializers.constant((2 * layers) ** -0.5), learnable=False` is the fixed
        scale of a network with two branches a layer, and keeps no activation for the backward pass.
      dtype: the dtype that branch and residual are cast to, and the result's, float32 or bfloat16. By default neither
        is cast, and the result has the residual's dtype: a branch in bfloat16 leaves a float32 stream float32, and the
        other way round.
      param_dtype: the dtype of the gain, float32 or bfloat16.
      config: how to tile, schedule and run it; default: `tiledops.use_config`'s, else chosen for the chip.
      spec: the PartitionSpec of branch and residual on a mesh with `Auto` axes.
    """

    features: int | None = dataclasses.field(default=None, kw_only=False)
    gain_init: Initializer = nn.initializers.ones
    learnable: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    config: PipelineConfig | None = None
    spec: Any = None

    def setup(self) -> None:
        if self.learnable:
            self.gain = self.param(
                "gain", lambda key: gates.new_gain(self.gain_init, key, self.features, self.param_dtype)
            )
        else:
            self.gain = nn.unbox(gates.new_gain(self.gain_init, None, self.features, self.param_dtype))

    def __call__(self, branch: jax.Array, residual: jax.Array) -> jax.Array:
        """gain*branch + residual.

        Args:
          branch, residual: arrays of one shape, any rank, not empty; each float32 or bfloat16.

        Returns:
          An array of their shape, in the dtype of the layer, else in the residual's.

        Raises:
          TypeError, ValueError: an operand that `tiledops.axpy` refuses; a last axis that is not `features`.
        """
        return self._add(branch, residual)

    def _add(self, branch: jax.Array, residual: jax.Array, drop: gates.Drop | None = None) -> jax.Array:
        return gates.add(
            self.gain,
            branch,
            residual,
            drop=drop,
            dtype=self.dtype,
            config=self.config,
            spec=self.spec,
            initializing=self.is_initializing(),
        )


class ReZero(Axpy, kw_only=True):
    """gain*branch + residual with a gain that starts at 0: at first every block is the identity.

    A deep network then trains from the start without normalisation or warm-up, as every layer's signal and gradient
    arrive unchanged (Bachlechner et al., "ReZero is All You Need", 2020, arXiv:2003.04887). Attributes as in `Axpy`.

    >>> layer = tiledops.linen.ReZero()
    >>> layer.init(jax.random.key(0), jnp.ones((2, 3)), jnp.ones((2, 3)))
    {'params': {'gain': Array(0., dtype=float32)}}
    """

    gain_init: Initializer = nn.initializers.zeros


class LayerScale(Axpy, kw_only=True):
    """gain*branch + residual with a gain for each channel that starts small.

    Each block begins near the identity, and each channel finds its own pace (Touvron et al., "Going deeper with Image
    Transformers", 2021, arXiv:2103.17239). The paper starts at 0.1 in networks of up to 18 blocks, 1e-5 in 24, 1e-6 in
    deeper ones. Attributes as in `Axpy`, with `features` required.

    >>> layer = tiledops.linen.LayerScale(3, gain_init=linen.initializers.constant(0.1))
    >>> layer.init(jax.random.key(0), jnp.ones((2, 3)), jnp.ones((2, 3)))
    {'params': {'gain': Array([0.1, 0.1, 0.1], dtype=float32)}}
    """

    features: int = dataclasses.field(kw_only=False)
    gain_init: Initializer = gates.LAYER_SCALE


class StochasticDepth(Axpy, kw_only=True):
    """gain*branch + residual, where training drops the whole branch at random: a network of random depth.

    Of each example the branch is dropped with probability `rate`, which leaves its residual as it is, bit for bit and
    whatever the branch holds, NaN too; the survivors are scaled by 1 / (1 - rate), so that evaluation needs no scale
    (Huang et al., "Deep Networks with Stochastic Depth", 2016, arXiv:1603.09382). The paper lets the rate grow linearly
    from the first block to the last. Random keys and `deterministic` are as in `nn.Dropout`, and from the same key come
    the examples that `nn.Dropout` with `broadcast_dims` over all but the first axis drops.

    >>> layer = tiledops.linen.StochasticDepth(0.5, deterministic=False)
    >>> layer.apply({}, jnp.ones((6, 1)), jnp.ones((6, 1)), rngs={"dropout": jax.random.key(0)}).ravel()
    Array([1., 3., 3., 1., 1., 1.], dtype=float32)

    Attributes:
      rate: the probability to drop a branch, a number from 0 to 1 or a scalar array, such as one layer's of a scan.
      per_example: whether each index of the first axis is dropped on its own; if not, one draw serves the whole batch.
        Under `nn.vmap` over examples it is each call's own batch that counts: use False, and split the random key.
      deterministic: if true, nothing is dropped or scaled. Give it here or to the call.
      rng_collection: the collection of random keys to draw from.
      gain_init, learnable, ...: as in `Axpy`, but by default the gain is 1 and no parameter. With `features=n,
        gain_init=nn.initializers.constant(1e-5), learnable=True` it is `LayerScale` with stochastic depth.
    """

    rate: Any = dataclasses.field(kw_only=False)
    features: int | None = None
    learnable: bool = False
    per_example: bool = True
    deterministic: bool | None = None
    rng_collection: str = "dropout"

    def setup(self) -> None:
        gates.check_rate(self.rate)
        super().setup()

    def __call__(
        self,
        branch: jax.Array,
        residual: jax.Array,
        deterministic: bool | None = None,
        rng: jax.Array | None = None,
    ) -> jax.Array:
        """gain*branch + residual of the examples that are kept, and the residual of the others.

        Args:
          branch, residual: arrays of one shape, any rank, not empty; each float32 or bfloat16.
          deterministic: if true, nothing is dropped or scaled. Give it here or to the constructor.
          rng: the random key; by default one of `rng_collection`.

        Returns:
          An array of their shape, in the dtype of the layer, else in the residual's.

        Raises:
          TypeError, ValueError: as `Axpy`; a rate outside 0 to 1; `deterministic` given twice or not at all.
        """
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        if deterministic or gates.never_drops(self.rate):
            return self._add(branch, residual)
        key = self.make_rng(self.rng_collection) if rng is None and gates.draws(self.rate) else rng
        return self._add(branch, residual, gates.Drop(key, self.rate, self.per_example))


class Residual(nn.Module):
    """Makes a block residual: h -> gate(body(h, *args, **kwargs), h).

    >>> block = tiledops.linen.Residual(linen.Dense(3), tiledops.linen.ReZero())
    >>> h = jnp.ones((2, 3))
    >>> variables = block.init(jax.random.key(0), h)
    >>> jax.tree.map(jnp.shape, variables["params"])
    {'body': {'bias': (3,), 'kernel': (3, 3)}, 'gate': {'gain': ()}}
    >>> block.apply(variables, h)
    Array([[1., 1., 1.],
           [1., 1., 1.]], dtype=float32)

    Attributes:
      body: the block, a module or a function, whose result has the shape of h.
      gate: `gate(branch, residual)`: a layer of this module, or any of the kind. It gets nothing else, so that a
        StochasticDepth here takes its `deterministic` in the constructor.
    """

    body: Callable[..., Any]
    gate: Callable[..., Any]

    def __call__(self, h: jax.Array, *args: Any, **kwargs: Any) -> Any:
        """gate(body(h, *args, **kwargs), h)."""
        return self.gate(self.body(h, *args, **kwargs), h)
