"""Operands and calls of the layers of both flavours, and models of Linen's, for their tests."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
from flax import linen as nn
from flax import nnx

F32, BF16 = np.float32, ml_dtypes.bfloat16
KEY = jax.random.key(0)

# float32 through a few layers of a few dozen terms each, summed in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def operands(shape=(3, 5), branch=F32, residual=F32, seed=0):
    random = np.random.default_rng(seed)
    return random.standard_normal(shape).astype(branch), random.standard_normal(shape).astype(residual)


def apply(layer, variables, *args, **options):
    """`layer.apply` of Linen, compiled: the reference is a dozen operations, each compiled apart if not."""
    return jax.jit(lambda variables, *args: layer.apply(variables, *args, **options))(variables, *args)


def call(layer, *args, **options):
    """`layer(...)` of NNX, compiled for the same reason."""
    return nnx.jit(lambda layer, *args: layer(*args, **options))(layer, *args)


def same(got, wanted):
    oracle.assert_same_bits(got, np.asarray(wanted))


class Plain(nn.Module):
    """What somebody writes by hand."""

    features: int | None = None
    gain_init: Any = nn.initializers.ones

    @nn.compact
    def __call__(self, branch, residual):
        gain = self.param("gain", self.gain_init, () if self.features is None else (self.features,))
        return gain * branch + residual


class Block(nn.Module):
    gate: Any

    @nn.compact
    def __call__(self, h, _=None):
        return self.gate(gain_init=nn.initializers.normal(1.0), name="gate")(nn.Dense(5)(jnp.sin(h)), h), None
