"""Stochastic depth in NNX, against Flax's own Dropout: what it drops, what switches it, and its random keys."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from layers import KEY, call, operands, same

from tiledops.nnx import Residual, StochasticDepth

pytestmark = pytest.mark.usefixtures("reference")


def test_it_drops_the_examples_that_dropout_drops():
    branch, residual = operands((64, 2, 3))
    ours, theirs = StochasticDepth(0.25, rngs=nnx.Rngs(7)), nnx.Dropout(0.25, broadcast_dims=(1, 2), rngs=nnx.Rngs(7))
    for _ in range(2):
        got, kept = call(ours, branch, residual), np.asarray(call(theirs, jnp.ones_like(branch))) != 0
        survivors = oracle.axpy(np.float32(1) / np.float32(0.75), branch, residual)
        oracle.assert_same_bits(got, np.where(kept, survivors, residual))


def test_train_eval_and_view_switch_it():
    branch, residual = operands((64, 1))
    whole = oracle.axpy(1.0, branch, residual)
    model = Residual(lambda h: branch, StochasticDepth(0.5, rngs=nnx.Rngs(0)))
    assert np.any(call(model, residual) != whole)
    model.eval()
    same(call(model, residual), whole)
    model.train()
    assert np.any(call(model, residual) != whole)
    same(call(nnx.view(model, deterministic=True), residual), whole)
    same(call(model.gate, branch, residual, deterministic=True), whole)


def test_random_keys_are_as_dropouts():
    branch, residual = operands((64, 1))
    by_key = StochasticDepth(0.5)(branch, residual, rngs=KEY)
    depth = StochasticDepth(0.5, rng_collection="depth", rngs=nnx.Rngs(depth=0))
    for rngs in (nnx.Rngs(depth=KEY), nnx.Rngs(depth=KEY)["depth"]):
        expected = StochasticDepth(0.5)(branch, residual, rngs=nnx.Rngs(depth=KEY)["depth"]())
        same(depth(branch, residual, rngs=rngs), expected)
    assert np.any(by_key != depth(branch, residual))
    assert np.any(depth(branch, residual) != depth(branch, residual))


RNGS = {
    "none": lambda: None,
    "key": lambda: KEY,
    "raw key": lambda: jax.random.PRNGKey(0),
    "number": lambda: 3,
    "rngs": lambda: nnx.Rngs(0),
    "rngs without the stream": lambda: nnx.Rngs(params=0),
    "stream": lambda: nnx.Rngs(0)["dropout"],
}


@pytest.mark.parametrize("where", ["constructor", "call"])
@pytest.mark.parametrize("name", RNGS)
def test_what_dropout_takes_for_random_keys_is_taken_and_nothing_else(name, where):
    def outcome(kind, *args):
        constructor, call = ({"rngs": RNGS[name]()} if here == where else {} for here in ("constructor", "call"))
        try:
            layer = kind(0.5, **constructor)
        except (TypeError, ValueError, KeyError) as error:
            return "constructor", type(error)
        try:
            return "call", np.asarray(layer(*args, **call)).tolist()
        except (TypeError, ValueError, KeyError) as error:
            return "call", type(error)

    ones = jnp.ones((8, 1))
    assert outcome(StochasticDepth, ones, jnp.zeros_like(ones)) == outcome(nnx.Dropout, ones)


def test_nothing_and_everything_are_dropped_without_random_keys():
    branch, residual = operands()
    for rate, wanted in ((0.0, branch + residual), (1.0, residual), (np.float32(1.0), residual)):
        same(StochasticDepth(rate)(branch, residual), wanted)
