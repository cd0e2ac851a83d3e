import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiledops
import tiledops.linen
import tiledops.nnx


@pytest.fixture(autouse=True)
def reference():
    """Breadth runs in plain jnp; the tests that need a kernel say so."""
    with tiledops.use_config(mode="reference"):
        yield


def operands(shape=(3, 5), dtypes=(jnp.float32, jnp.float32), seed=0):
    keys = jax.random.split(jax.random.key(seed))
    return tuple(jax.random.normal(key, shape, dtype) for key, dtype in zip(keys, dtypes, strict=True))


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("residual_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("branch_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("features", [None, 5])
def test_linen_and_nnx_agree_bit_for_bit(features, branch_dtype, residual_dtype, dtype):
    branch, residual = operands(dtypes=(branch_dtype, residual_dtype))
    layer = tiledops.nnx.Axpy(features, gain_init=nnx.initializers.normal(), dtype=dtype, rngs=nnx.Rngs(0))
    out = layer(branch, residual)
    variables = {"params": {"gain": layer.gain[...]}}
    wanted = tiledops.linen.Axpy(features, dtype=dtype).apply(variables, branch, residual)
    assert out.dtype == wanted.dtype == (dtype or residual_dtype)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(wanted))


def test_gains_start_as_they_are_named():
    for kind, start in [(tiledops.nnx.Axpy, 1.0), (tiledops.nnx.ReZero, 0.0)]:
        np.testing.assert_array_equal(kind(rngs=nnx.Rngs(0)).gain[...], np.float32(start))
        np.testing.assert_array_equal(kind(3, rngs=nnx.Rngs(0)).gain[...], np.full(3, start, np.float32))
