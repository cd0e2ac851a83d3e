"""One network with our gate and with a plain one, on the same variables, under each of Flax's transforms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import linen as nn
from layers import CLOSE, F32, KEY, Block, Plain, apply, operands

import tiledops
from tiledops.linen import Axpy, StochasticDepth

pytestmark = pytest.mark.usefixtures("reference")


def scanned(gate):
    return nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(gate)


def rematerialised(gate):
    return nn.remat(Block)(gate)


def rematerialised_scan(gate):
    return nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(gate)


def mapped(gate):
    return nn.vmap(Block, variable_axes={"params": None}, split_rngs={"params": False})(gate)


def mapped_parameters(gate):
    return nn.vmap(Block, variable_axes={"params": 0}, split_rngs={"params": True})(gate)


def jitted(gate):
    return nn.jit(Block)(gate)


class Shared(nn.Module):
    gate: Any

    def setup(self):
        self.inner = self.gate(5, gain_init=nn.initializers.normal(1.0))
        nn.share_scope(self, self.inner)

    def __call__(self, h, _=None):
        return self.inner(jnp.sin(h), h), None


TRANSFORMS = [Block, scanned, rematerialised, rematerialised_scan, mapped, mapped_parameters, jitted, Shared]


def loss_and_gradients(model, variables, h):
    def loss(variables, h):
        out, _ = model.apply(variables, h)
        return jnp.sum(jnp.cos(out)), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(variables, h)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
def test_transforms_as_a_plain_module(transform):
    h = operands()[0]
    variables = jax.jit(transform(Plain).init)(KEY, h)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, jax.eval_shape(transform(Axpy).init, KEY, h))
    ours, plain = (loss_and_gradients(transform(gate), variables, h) for gate in (Axpy, Plain))
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, **CLOSE), ours, plain)


@pytest.mark.parametrize("transform", [rematerialised_scan, mapped_parameters], ids=lambda f: f.__name__)
def test_transforms_in_simulation(transform):
    h = operands()[0]
    variables = jax.jit(transform(Plain).init)(KEY, h)
    plain = loss_and_gradients(transform(Plain), variables, h)
    with tiledops.use_config(mode="simulate"):
        ours = loss_and_gradients(transform(Axpy), variables, h)
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, **CLOSE), ours, plain)


def test_a_scan_over_layers_of_growing_rate():
    """The linear rule of the paper: each layer has its own rate, an array that the scan hands it."""
    h = operands((32, 5))[0]

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, h, rate):
            out = StochasticDepth(rate)(jnp.ones_like(h), jnp.zeros_like(h), deterministic=False)
            return h, out[:, 0]

    layers = nn.scan(Layer, variable_axes={}, split_rngs={"dropout": True})
    rates = jnp.array([0.0, 0.5, 1.0])
    _, gains = layers().apply({}, h, rates, rngs={"dropout": KEY})
    np.testing.assert_array_equal(gains[0], np.ones(32))
    assert set(np.unique(gains[1])) == {0.0, 2.0}
    np.testing.assert_array_equal(gains[2], np.zeros(32))


@pytest.mark.parametrize("transform", [nn.remat, nn.jit], ids=lambda f: f.__name__)
def test_a_block_that_is_run_again_drops_the_same_examples(transform):
    """`deterministic` by position is static, as Dropout's is."""
    branch, residual = operands((32, 5))

    layer = transform(StochasticDepth, static_argnums=(3,))(0.5)

    def loss(branch):
        out = layer.apply({}, branch, residual, False, rngs={"dropout": KEY})
        return jnp.sum(jnp.cos(out)), out

    gradient, out = jax.jit(jax.grad(loss, has_aux=True))(branch)
    kept = np.any(np.asarray(out) != residual, axis=1, keepdims=True)
    assert 0 < kept.mean() < 1
    np.testing.assert_allclose(gradient, np.where(kept, -2 * np.sin(2 * branch + residual), 0), **CLOSE)


def test_a_vmap_over_examples_draws_for_each():
    branch, residual = operands((32, 5))
    mapped = nn.vmap(StochasticDepth, variable_axes={}, split_rngs={"dropout": True})
    layer = mapped(0.5, per_example=False, deterministic=False)
    got = np.asarray(apply(layer, {}, branch, residual, rngs={"dropout": KEY}))
    dropped = (got == residual).all(1)
    assert 0 < dropped.mean() < 1
    oracle.assert_same_bits(got[~dropped], oracle.axpy(F32(2), branch, residual)[~dropped])
