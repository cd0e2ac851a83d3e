"""What the Flax layers of both flavours share: a gate joins a branch to the residual stream, gain*branch + residual.

Pure JAX: what is Flax about them, parameters and random streams, is in `linen.py` and `nnx.py`.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tiledops import blocks, contract
from tiledops.axpy import axpy, axpy_where
from tiledops.config import PipelineConfig

Initializer = Callable[..., Any]

LAYER_SCALE: Initializer = jax.nn.initializers.constant(1e-5)


# The gain


def new_gain(init: Initializer, key: Any, features: int | None, dtype: Any) -> Any:
    """A gain as `init` makes it: one in all, or one a channel.

    Without a key it is no parameter but a part of the layer's definition, as a dropout rate is: it has no state.
    """
    if not callable(init):
        raise TypeError(
            f"gain_init must be an initializer, called as gain_init(key, shape, dtype); got {init!r}. For a number use "
            "jax.nn.initializers.constant"
        )
    shape, dtype = gain_shape(features), _check_dtype(dtype, "param_dtype")
    try:
        return init(key, shape, dtype)
    except TypeError as error:
        if key is not None:
            raise
        raise TypeError(
            "with learnable=False the gain is no state, so that its gain_init gets no random key (None); use "
            f"jax.nn.initializers.constant, ones or zeros. {init!r} failed: {error}"
        ) from None


def gain_shape(features: int | None) -> tuple[int, ...]:
    if features is None:
        return ()
    if not isinstance(features, (int, np.integer)) or isinstance(features, bool) or features <= 0:
        got = repr(features) if isinstance(features, (numbers.Number, str)) else type(features).__name__
        raise ValueError(
            "features must be None, for one gain in all, or the positive number of channels in the last axis, for one "
            f"each; got {got}. Other arguments go by their names"
        )
    return (int(features),)


def _check_dtype(dtype: Any, what: str) -> jnp.dtype:
    if jnp.dtype(dtype) not in contract.DTYPES:
        raise TypeError(f"{what} must be float32 or bfloat16; got {dtype}")
    return jnp.dtype(dtype)


# gain*branch + residual


def add(
    gain: Any,
    branch: Any,
    residual: Any,
    *,
    drop: Drop | None = None,
    dtype: Any = None,
    config: PipelineConfig | None = None,
    spec: Any = None,
    initializing: bool = False,
) -> jax.Array:
    """gain*branch + residual in float32, rounded once to `dtype`, or to the residual's.

    While a model initialises, plain jnp does it: its values are hardly used, and no kernel is traced for them.
    """
    branch, residual = _operands(gain, branch, residual, dtype)
    mask = None
    if drop is not None:
        mask, gain = _drawn(drop, gain, branch)
    if initializing:
        gain, branch, residual = contract.check_operands(gain, branch, residual)
        return _plain((gain,) if mask is None else (gain, mask), branch, residual)
    if mask is None:
        return axpy(gain, branch, residual, config=config, spec=spec)
    return axpy_where(mask, gain, branch, residual, config=config, spec=spec)


@jax.jit
def _plain(coefficients: tuple[jax.Array, ...], branch: jax.Array, residual: jax.Array) -> jax.Array:
    (out,), _ = blocks.axpy(coefficients, (branch, residual), exact=False)
    return out.astype(residual.dtype)


def _operands(gain: Any, branch: Any, residual: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Branch and residual as arrays of one shape, cast to `dtype` as Flax's layers cast their inputs."""
    if dtype is not None:
        dtype = _check_dtype(dtype, "dtype")
        residual = jnp.asarray(residual, dtype)
        # A bfloat16 branch is not widened to float32 here: the kernel does it as it reads, and half the bytes move.
        if getattr(branch, "dtype", None) != jnp.bfloat16:
            branch = jnp.asarray(branch, dtype)
    branch, residual = contract.check_array(branch, "branch"), contract.check_array(residual, "residual")
    if branch.shape != residual.shape:
        raise ValueError(
            f"branch and residual must have the same shape; got {branch.shape} and {residual.shape}. Where a block "
            "changes the width, project its input before adding"
        )
    if jnp.ndim(gain) == 1 and branch.shape[-1:] != gain.shape:
        raise ValueError(
            f"features must be the extent of the branch's last axis; got features={gain.size} and shape {branch.shape}"
        )
    return branch, residual


# Stochastic depth


def check_rate(rate: Any) -> None:
    if isinstance(rate, numbers.Real):
        if not 0.0 <= float(rate) <= 1.0:
            raise ValueError(f"rate is the probability to drop a branch, from 0 to 1; got {rate!r}")
    elif not isinstance(rate, (jax.Array, np.ndarray)) or not jnp.issubdtype(rate.dtype, jnp.floating):
        raise TypeError(f"rate must be a number from 0 to 1, or a scalar array of floats; got {rate!r}")


def never_drops(rate: Any) -> bool:
    return isinstance(rate, numbers.Real) and float(rate) == 0.0


def draws(rate: Any) -> bool:
    """Whether a key is needed, as Flax's Dropout needs it: not by rates of 0 and 1 that are numbers."""
    return not (isinstance(rate, numbers.Real) and float(rate) in (0.0, 1.0))


class Drop(NamedTuple):
    """A draw of stochastic depth: a random key or none, the rate, and whether each example is drawn on its own."""

    key: jax.Array | None
    rate: Any
    per_example: bool


def _drawn(drop: Drop, gain: Any, branch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mask and the gain of this step: 1 where the branch is kept, and such that gain*branch keeps its mean."""
    if jnp.ndim(drop.rate):
        raise ValueError(f"rate must be one number for the whole layer; got shape {jnp.shape(drop.rate)}")
    gain, kept = jnp.asarray(gain, jnp.float32), 1.0 - drop.rate
    shape, sharding = _mask(branch, drop.per_example)
    mask = jnp.zeros(shape, out_sharding=sharding)  # without a key, every branch is dropped
    if drop.key is not None:
        mask = jax.random.bernoulli(drop.key, kept, shape, out_sharding=sharding)
    return mask.astype(jnp.float32), gain / jnp.where(kept > 0.0, kept, 1.0).astype(gain.dtype)


def _mask(branch: jax.Array, per_example: bool) -> tuple[tuple[int, ...], NamedSharding]:
    """The shape of the mask, 1 where the branch shares it, and its sharding, as the branch's on a mesh."""
    sharding = jax.typeof(branch).sharding
    own = 1 if per_example else 0
    shape = branch.shape[:own] + (1,) * len(branch.shape[own:])
    return shape, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:own]))
