"""Gates for residual networks in Flax NNX. The same layers, parameters and results as in `tiledops.linen`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tiledops import gates
from tiledops.config import PipelineConfig
from tiledops.gates import Initializer


class Axpy(nnx.Module):
    """gain*branch + residual, the end of a residual block, as one pipelined kernel.

    >>> layer = tiledops.nnx.Axpy(features=3, rngs=nnx.Rngs(0))
    >>> layer(jnp.full((2, 3), 2.0), jnp.ones((2, 3)))
    Array([[3., 3., 3.],
           [3., 3., 3.]], dtype=float32)
    >>> layer.gain.shape
    (3,)

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
      param_dtype: the dtype of the gain.
      config: how to tile, schedule and run it; default: `tiledops.use_config`'s, else chosen for the chip.
      spec: the PartitionSpec of branch and residual on a mesh with `Auto` axes.
      rngs: the random streams; the gain's initializer takes a key from `params`.
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
        rngs: nnx.Rngs,
    ):
        gates.check_gain_init(gain_init)
        shape = gates.gain_shape(features)
        self.gain: nnx.Param[jax.Array] | None
        if learnable:
            self.gain = nnx.Param(gain_init(rngs.params(), shape, param_dtype))
        else:
            self.gain = nnx.data(None)
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
          TypeError, ValueError: as `tiledops.axpy`; and for a branch whose last axis is not `features`.
        """
        if self.gain is None:
            gain = gates.fixed_gain(self.gain_init, gates.gain_shape(self.features), self.param_dtype)
        else:
            gain = self.gain[...]
        return gates.add(gain, branch, residual, dtype=self.dtype, config=self.config, spec=self.spec)


class ReZero(Axpy):
    """gain*branch + residual with a gain that starts at 0: at first every block is the identity.

    A deep network then trains from the start without normalisation or warm-up, as every layer's signal and gradient
    arrive unchanged (Bachlechner et al., "ReZero is All You Need", 2020, arXiv:2003.04887). Arguments as in `Axpy`.

    >>> layer = tiledops.nnx.ReZero(rngs=nnx.Rngs(0))
    >>> layer.gain[...]
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
        rngs: nnx.Rngs,
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
