"""Stochastic depth in Linen, against Flax's own Dropout: what it drops, and what that costs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import linen as nn
from layers import BF16, F32, KEY, apply, operands

import tiledops
from tiledops import chips, compiled
from tiledops.linen import StochasticDepth

pytestmark = pytest.mark.usefixtures("reference")


def kept_by_dropout(rate, key, shape, axes):
    """The examples that Flax's own Dropout keeps."""
    drop = nn.Dropout(rate, broadcast_dims=axes, deterministic=False)
    return np.asarray(drop.apply({}, jnp.ones(shape), rngs={"dropout": key})) != 0


@pytest.mark.parametrize("shape", [(64,), (64, 3), (64, 2, 3)])
def test_it_drops_the_examples_that_dropout_drops(shape):
    branch, residual = operands(shape, branch=BF16)
    got = apply(StochasticDepth(0.25, deterministic=False), {}, branch, residual, rngs={"dropout": KEY})
    kept = kept_by_dropout(0.25, KEY, shape, range(1, len(shape)))
    assert 0 < kept.mean() < 1
    survivors = oracle.axpy(F32(1) / F32(0.75), branch, residual)
    oracle.assert_same_bits(got, np.where(kept, survivors, residual))


def test_or_the_whole_batch():
    branch, residual = operands((4, 3))
    layer = StochasticDepth(0.5, per_example=False, deterministic=False)
    run = jax.jit(lambda key: layer.apply({}, branch, residual, rngs={"dropout": key}))
    outcomes = set()
    for key in jax.random.split(KEY, 8):
        got = run(key)
        kept = kept_by_dropout(0.5, key, branch.shape, (0, 1)).all()
        oracle.assert_same_bits(got, oracle.axpy(F32(2), branch, residual) if kept else residual)
        outcomes.add(bool(kept))
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("start", "mode"), [(1.0, "reference"), (-2.0, "reference"), (0.0, "reference"), (-2.0, "simulate")]
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_dropped_branch_leaves_no_trace(dtype, start, mode):
    """Neither in the result, which is the residual to its signed zeros, nor in any gradient."""
    branch, residual = operands((16, 3), dtype, dtype)
    residual[:, 0], residual[:, 1] = 0.0, -0.0
    layer = StochasticDepth(
        0.5,
        features=3,
        gain_init=nn.initializers.constant(start),
        learnable=True,
        config=tiledops.PipelineConfig(mode=mode),
    )
    kept = kept_by_dropout(0.5, KEY, branch.shape, (1,))[:, 0]
    poisoned = branch.copy()
    poisoned[~kept] = np.array([np.nan, np.inf, -np.inf], dtype)

    def run(gain, branch, residual):
        return apply(layer, {"params": {"gain": gain}}, branch, residual, deterministic=False, rngs={"dropout": KEY})

    gain = jnp.full(3, start)
    got, gradients = jax.vjp(run, gain, poisoned, residual)
    oracle.assert_same_bits(got[~kept], residual[~kept])
    oracle.assert_same_bits(got[kept], oracle.axpy(F32(2 * start), branch, residual)[kept])
    da, dx, dy = gradients(jnp.ones_like(got))
    oracle.assert_same_bits(dy, np.ones_like(residual))
    np.testing.assert_array_equal(
        np.asarray(dx), np.where(kept[:, None], dtype(2 * start), dtype(0)) * np.ones(3, dtype)
    )
    exact, tolerance = oracle.da(gain, branch[kept], np.ones_like(branch[kept]))
    oracle.assert_within(da, 2 * exact, 2 * tolerance)


@pytest.mark.parametrize(
    ("per_example", "learnable", "features", "chip"),
    [
        *((*choice, "v5e") for choice in itertools.product([True, False], [True, False], [None, 1024])),
        *((True, True, 1024, chip) for chip in chips.CHIPS if chip != "v5e"),
    ],
)
def test_dropping_takes_no_pass_of_its_own(per_example, learnable, features, chip):
    """Of arrays too large for the chip's VMEM, in which XLA may otherwise hold one between two passes."""
    array = jax.ShapeDtypeStruct((65536, 1024), BF16)
    options = {"learnable": learnable, "features": features, "deterministic": False}
    layer = StochasticDepth(0.2, per_example=per_example, **options)

    def forward(key, branch, residual, gain):
        variables = {"params": {"gain": gain}} if learnable else {}
        return layer.apply(variables, branch, residual, rng=jax.random.wrap_key_data(key))

    def pullback(key, *operands):
        return jax.vjp(lambda *operands: forward(key, *operands), *operands)[1]

    operands = jax.ShapeDtypeStruct((2,), jnp.uint32), array, array, jnp.ones(features or ())
    with tiledops.use_config(mode="tpu"):
        forwards = compiled.compile_for(forward, *operands, chip=chip)
        saved = compiled.lower_for(pullback, *operands, chip=chip).out_info
        backwards = compiled.compile_for(lambda pull, g: pull(g)[0], saved, array, chip=chip)
        if learnable:
            backwards = compiled.compile_for(lambda pull, g: pull(g)[::2], saved, array, chip=chip)
    size = 2 * array.size
    for report, arrays in ((forwards, 3), (backwards, 3 if learnable else 2)):
        # And the mask, a float32 an example, its random bits and the gain.
        assert arrays * size < report.hbm_bytes < 1.02 * arrays * size
        assert (len(report.kernels), report.extra) == (1, ())


def test_nothing_is_dropped_when_deterministic_or_at_rate_zero():
    branch, residual = operands()
    whole = oracle.axpy(1.0, branch, residual)
    oracle.assert_same_bits(apply(StochasticDepth(0.5), {}, branch, residual, deterministic=True), whole)
    oracle.assert_same_bits(apply(StochasticDepth(0.5, deterministic=True), {}, branch, residual), whole)
    oracle.assert_same_bits(apply(StochasticDepth(0.0, deterministic=False), {}, branch, residual), whole)


def test_everything_is_dropped_at_rate_one():
    branch, residual = operands()
    layer = StochasticDepth(1.0, features=5, learnable=True, deterministic=False)

    def run(gain, branch):  # without a random key, which Dropout doesn't need for it either
        return apply(layer, {"params": {"gain": gain}}, branch, residual)

    got, gradients = jax.vjp(run, jnp.full(5, 3.0), branch)
    oracle.assert_same_bits(got, residual)
    for gradient in gradients(jnp.ones_like(got)):
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


def test_random_keys_are_as_dropouts():
    branch, residual = operands((64, 1))
    layer = StochasticDepth(0.5, deterministic=False, rng_collection="depth")
    by_stream = apply(layer, {}, branch, residual, rngs={"depth": KEY})
    assert np.any(by_stream != apply(layer, {}, branch, residual, rngs={"depth": jax.random.key(1)}))
    oracle.assert_same_bits(
        apply(layer, {}, branch, residual, rng=KEY),
        np.asarray(apply(StochasticDepth(0.5, deterministic=False), {}, branch, residual, rng=KEY)),
    )
    with pytest.raises(Exception, match="depth"):
        apply(layer, {}, branch, residual)
