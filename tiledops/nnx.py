"""Gates for residual networks in Flax NNX, and the optimizer. Parameters and results: as in `tiledops.linen`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tiledops import gates
from tiledops.config import PipelineConfig
from tiledops.gates import Initializer
from tiledops.training import Optimizer

__all__ = ["Axpy", "LayerScale", "Optimizer", "ReZero", "Residual", "StochasticDepth"]


class Axpy(nnx.Module):
    """gain*branch + residual, the end of a residual block, as one pipelined kernel.

    >>> layer = tiledops.nnx.Axpy(features=3, rngs=nnx.Rngs(0))
    >>> layer.gain[...]
    Array([1., 1., 1.], dtype=float32)
    >>> layer(jnp.full((2, 3), 2.0), jnp.ones((2, 3)))
    Array([[3., 3., 3.],
           [3., 3., 3.]], dtype=float32)

    The gain multiplies in float32 whatever its dtype, and the sum is rounded once.

    Args:
      features: the number of channels, the extent of the last axis, for one gain each; None for one gain in all.
      gain_init: initializer of the gain; 1 by default, the plain residual connection.
      learnable: whether the gain is the parameter `gain`. If not, it is what `gain_init` makes of no random key, and
        there is no parameter: `gain_init=nnx.initializers.constant((2 * layers) ** -0.5), learnable=False` is the fixed
        scale of a network with two branches a layer, and keeps no activation for the backward pass.
      dtype: the dtype that branch and residual are cast to, and the result's, float32 or bfloat16. By default neither
        is cast, and the result has the residual's dtype: a branch in bfloat16 leaves a float32 stream float32, and the
        other way round.
      param_dtype: the dtype of the gain, float32 or bfloat16.
      config: how to tile, schedule and run it; default: `tiledops.use_config`'s, else chosen for the chip.
      spec: the PartitionSpec of branch and residual on a mesh with `Auto` axes.
      rngs: the random streams. A learnable gain takes a key from `params`.
    """

    def __init__(
        self,
        features: int | None = None,
        *,
        gain_init: Initializer = nnx.initializers.ones,
        learnable: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        config: PipelineConfig | None = None,
        spec: Any = None,
        rngs: nnx.Rngs | None = None,
    ):
        gates.gain_shape(features)  # a mistaken one before random streams are asked for, such as nnx.Rngs in its place
        self.gain: nnx.Param[jax.Array] | None = nnx.data(None)
        if learnable:
            self.gain = nnx.Param(gates.new_gain(gain_init, _params_key(rngs), features, param_dtype))
        self.features = features
        self.gain_init = gain_init
        self.learnable = learnable
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.config = config
        self.spec = spec

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
        if self.gain is not None:
            gain = self.gain[...]
        else:
            gain = gates.new_gain(self.gain_init, None, self.features, self.param_dtype)
            gain = gain.raw_value if isinstance(gain, nnx.VariableMetadata) else gain
        return gates.add(gain, branch, residual, drop=drop, dtype=self.dtype, config=self.config, spec=self.spec)


class ReZero(Axpy):
    """gain*branch + residual with a gain that starts at 0: at first every block is the identity.

    A deep network then trains from the start without normalisation or warm-up, as every layer's signal and gradient
    arrive unchanged (Bachlechner et al., "ReZero is All You Need", 2020, arXiv:2003.04887). Arguments as in `Axpy`.

    >>> tiledops.nnx.ReZero(rngs=nnx.Rngs(0)).gain[...]
    Array(0., dtype=float32)
    """

    def __init__(
        self,
        features: int | None = None,
        *,
        gain_init: Initializer = nnx.initializers.zeros,
        learnable: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        config: PipelineConfig | None = None,
        spec: Any = None,
        rngs: nnx.Rngs | None = None,
    ):
        super().__init__(
            features,
            gain_init=gain_init,
            learnable=learnable,
            dtype=dtype,
            param_dtype=param_dtype,
            config=config,
            spec=spec,
            rngs=rngs,
        )


class LayerScale(Axpy):
    """gain*branch + residual with a gain for each channel that starts small.

    Each block begins near the identity, and each channel finds its own pace (Touvron et al., "Going deeper with Image
    Transformers", 2021, arXiv:2103.17239). The paper starts at 0.1 in networks of up to 18 blocks, 1e-5 in 24, 1e-6 in
    deeper ones. Arguments as in `Axpy`, with `features` required.

    >>> tiledops.nnx.LayerScale(3, gain_init=nnx.initializers.constant(0.1), rngs=nnx.Rngs(0)).gain[...]
    Array([0.1, 0.1, 0.1], dtype=float32)
    """

    def __init__(
        self,
        features: int,
        *,
        gain_init: Initializer = gates.LAYER_SCALE,
        learnable: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        config: PipelineConfig | None = None,
        spec: Any = None,
        rngs: nnx.Rngs | None = None,
    ):
        super().__init__(
            features,
            gain_init=gain_init,
            learnable=learnable,
            dtype=dtype,
            param_dtype=param_dtype,
            config=config,
            spec=spec,
            rngs=rngs,
        )


class StochasticDepth(Axpy):
    """gain*branch + residual, where training drops the whole branch at random: a network of random depth.

    Of each example the branch is dropped with probability `rate`, which leaves its residual as it is, bit for bit and
    whatever the branch holds, NaN too; the survivors are scaled by 1 / (1 - rate), so that evaluation needs no scale
    (Huang et al., "Deep Networks with Stochastic Depth", 2016, arXiv:1603.09382). The paper lets the rate grow linearly
    from the first block to the last. Random keys, `deterministic`, `train()` and `eval()` are as in `nnx.Dropout`, and
    from the same key come the examples that `nnx.Dropout` with `broadcast_dims` over all but the first axis drops.

    >>> layer = tiledops.nnx.StochasticDepth(0.5)
    >>> layer(jnp.ones((6, 1)), jnp.ones((6, 1)), rngs=jax.random.key(0)).ravel()
    Array([1., 1., 3., 3., 1., 3.], dtype=float32)

    Args:
      rate: the probability to drop a branch, a number from 0 to 1 or a scalar array, such as one layer's of a scan.
      per_example: whether each index of the first axis is dropped on its own; if not, one draw serves the whole batch.
        Under `nnx.vmap` over examples it is each call's own batch that counts: use False, and split the random key.
      deterministic: if true, nothing is dropped or scaled. `train()` and `eval()` set it.
      rng_collection: the random stream to draw from.
      gain_init, learnable, ...: as in `Axpy`, but by default the gain is 1 and no parameter. With `features=n,
        gain_init=nnx.initializers.constant(1e-5), learnable=True` it is `LayerScale` with stochastic depth.
      rngs: the random streams. A learnable gain takes a key from `params`.
    """

    def __init__(
        self,
        rate: Any,
        *,
        per_example: bool = True,
        deterministic: bool | None = False,
        rng_collection: str = "dropout",
        features: int | None = None,
        gain_init: Initializer = nnx.initializers.ones,
        learnable: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        config: PipelineConfig | None = None,
        spec: Any = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ):
        gates.check_rate(rate)
        super().__init__(
            features,
            gain_init=gain_init,
            learnable=learnable,
            dtype=dtype,
            param_dtype=param_dtype,
            config=config,
            spec=spec,
            rngs=rngs,  # type: ignore[arg-type]  # a stream alone has no key for a parameter, and is refused if one is needed
        )
        self.rate = nnx.data(rate) if isinstance(rate, jax.Array) else rate
        self.per_example = per_example
        self.deterministic = deterministic
        self.rng_collection = rng_collection
        stream = _stream(rngs, rng_collection)
        if not (stream is None or isinstance(stream, nnx.RngStream)):
            raise TypeError(f"rngs must be an nnx.Rngs (try nnx.Rngs(0)), an nnx.RngStream or None; got {type(rngs)}")
        self.rngs = nnx.data(None) if stream is None else stream.fork()

    def __call__(
        self,
        branch: jax.Array,
        residual: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """gain*branch + residual of the examples that are kept, and the residual of the others.

        Args:
          branch, residual: arrays of one shape, any rank, not empty; each float32 or bfloat16.
          deterministic: if true, nothing is dropped or scaled. It precedes the constructor's.
          rngs: a random key, or the streams to draw one from. It precedes the constructor's.

        Returns:
          An array of their shape, in the dtype of the layer, else in the residual's.

        Raises:
          TypeError, ValueError: as `Axpy`; no `deterministic` or no `rngs`, here or in the constructor, or wrong ones.
        """
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise ValueError("StochasticDepth needs deterministic=True or False, in the constructor or in the call")
        if deterministic or gates.never_drops(self.rate):
            return self._add(branch, residual)
        key = self._key(rngs) if gates.draws(self.rate) else None
        return self._add(branch, residual, gates.Drop(key, self.rate, self.per_example))

    def _key(self, rngs: Any) -> jax.Array:
        source = _stream(self.rngs if rngs is None else rngs, self.rng_collection)
        if isinstance(source, (jax.Array, nnx.RngStream)):
            return source if isinstance(source, jax.Array) else source()
        raise (ValueError if source is None else TypeError)(
            "StochasticDepth draws at random: it needs rngs, an nnx.Rngs, an nnx.RngStream or a random key, in the "
            f"constructor (no key there) or in the call; got {type(source).__name__}. For evaluation call eval()"
        )

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets what `nnx.view` sets.

        Args:
          deterministic: if true, nothing is dropped or scaled.
        """
        if deterministic is not None:
            self.deterministic = deterministic


class Residual(nnx.Module):
    """Makes a block residual: h -> gate(body(h, *args, **kwargs), h).

    >>> rngs = nnx.Rngs(0)
    >>> block = tiledops.nnx.Residual(nnx.Linear(3, 3, rngs=rngs), tiledops.nnx.ReZero(rngs=rngs))
    >>> block(jnp.ones((2, 3)))
    Array([[1., 1., 1.],
           [1., 1., 1.]], dtype=float32)

    Args:
      body: the block, a module or a function, whose result has the shape of h.
      gate: `gate(branch, residual)`: a layer of this module, or any of the kind.
    """

    def __init__(self, body: Callable[..., Any], gate: Callable[..., Any]):
        self.body = body
        self.gate = gate

    def __call__(self, h: jax.Array, *args: Any, **kwargs: Any) -> Any:
        """gate(body(h, *args, **kwargs), h)."""
        return self.gate(self.body(h, *args, **kwargs), h)


def _stream(rngs: Any, name: str) -> Any:
    return rngs[name] if isinstance(rngs, nnx.Rngs) else rngs


def _params_key(rngs: Any) -> Any:
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"a learnable gain needs rngs, an nnx.Rngs (try rngs=nnx.Rngs(0)), to start; got {type(rngs)}")
    return rngs.params()
