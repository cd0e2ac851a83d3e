import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn

import tiledops
import tiledops.linen

BF16 = ml_dtypes.bfloat16


@pytest.fixture(autouse=True)
def reference():
    """Breadth runs in plain jnp; the tests that need a kernel say so."""
    with tiledops.use_config(mode="reference"):
        yield


def operands(shape=(3, 5), dtypes=(np.float32, np.float32), seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(dtype) for dtype in dtypes)


def gated(gain, branch, residual):
    """gain*branch + residual in float64, rounded to float32 and then to the residual's dtype."""
    exact = np.float64(gain) * branch.astype(np.float64) + residual.astype(np.float64)
    return exact.astype(np.float32).astype(residual.dtype)


@pytest.mark.parametrize("residual_dtype", [np.float32, BF16])
@pytest.mark.parametrize("branch_dtype", [np.float32, BF16])
@pytest.mark.parametrize("features", [None, 5])
def test_the_result_has_the_residuals_dtype(features, branch_dtype, residual_dtype):
    branch, residual = operands(dtypes=(branch_dtype, residual_dtype))
    layer = tiledops.linen.Axpy(features, gain_init=nn.initializers.normal())
    variables = layer.init(jax.random.key(0), branch, residual)
    gain = variables["params"]["gain"]
    assert gain.shape == (() if features is None else (5,))
    assert gain.dtype == jnp.float32
    out = layer.apply(variables, branch, residual)
    assert out.dtype == residual_dtype
    np.testing.assert_array_equal(np.asarray(out), gated(np.asarray(gain), branch, residual))


def test_gains_start_as_they_are_named():
    branch, residual = operands()
    for layer, start in [(tiledops.linen.Axpy(), 1.0), (tiledops.linen.ReZero(), 0.0)]:
        assert layer.init(jax.random.key(0), branch, residual) == {"params": {"gain": start}}


def test_a_simulated_kernel_gives_the_same_bits():
    branch, residual = operands((17, 257), (BF16, np.float32))
    config = tiledops.PipelineConfig(block=(8, 128), mode="simulate")
    layer = tiledops.linen.Axpy(257, gain_init=nn.initializers.normal(), config=config)
    variables = layer.init(jax.random.key(0), branch, residual)
    out = layer.apply(variables, branch, residual)
    np.testing.assert_array_equal(np.asarray(out), gated(np.asarray(variables["params"]["gain"]), branch, residual))
