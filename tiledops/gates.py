"""What the Flax layers of both flavours share: a gate joins a branch to the residual stream, gain*branch + residual.

Pure JAX: what is Flax about them, parameters and random streams, is in `linen.py` and `nnx.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tiledops import blocks, contract
from tiledops.axpy import axpy
from tiledops.config import PipelineConfig

Initializer = Callable[..., Any]


def gain_shape(features: int | None) -> tuple[int, ...]:
    """One gain in all, or one a channel."""
    if features is None:
        return ()
    if not isinstance(features, (int, np.integer)) or isinstance(features, bool) or features <= 0:
        raise ValueError(
            "features must be None, for one gain in all, or the positive number of channels in the last axis, for one "
            f"each; got {features!r}"
        )
    return (int(features),)


def check_gain_init(gain_init: Any) -> None:
    if not callable(gain_init):
        raise TypeError(
            f"gain_init must be an initializer, called as gain_init(key, shape, dtype); got {gain_init!r}. For a "
            "number use jax.nn.initializers.constant"
        )


def fixed_gain(gain_init: Initializer, shape: tuple[int, ...], dtype: Any) -> Any:
    """A gain that is no parameter. It is part of the layer's definition as a rate is: no state, no random key."""
    try:
        return gain_init(None, shape, dtype)
    except TypeError as error:
        raise TypeError(
            "with learnable=False the gain is no state, so that its gain_init gets no random key (None); use "
            f"jax.nn.initializers.constant, ones or zeros. {gain_init!r} failed: {error}"
        ) from None


def add(
    gain: Any,
    branch: Any,
    residual: Any,
    *,
    dtype: Any = None,
    config: PipelineConfig | None = None,
    spec: Any = None,
    initializing: bool = False,
) -> jax.Array:
    """gain*branch + residual in float32, rounded once to `dtype`, or to the residual's.

    While a model initialises, plain jnp does it: its values shape parameters at most, and no kernel is traced.
    """
    branch, residual = _cast(branch, dtype), _cast(residual, dtype)
    _check_channels(gain, branch)
    if initializing:
        a, x, y = contract.check_operands(gain, branch, residual)
        return blocks.multiply_add(a, x, y, exact=False).astype(y.dtype)
    return axpy(gain, branch, residual, config=config, spec=spec)


def _cast(x: Any, dtype: Any) -> Any:
    """As Flax's layers cast their inputs."""
    return x if dtype is None else jnp.asarray(x, contract.check_dtype(dtype, "dtype"))


def _check_channels(gain: Any, branch: Any) -> None:
    shape = jnp.shape(branch)
    if jnp.ndim(gain) == 1 and shape[-1:] != gain.shape:
        raise ValueError(
            f"features must be the extent of the branch's last axis; got features={gain.size} and shape {shape}"
        )
