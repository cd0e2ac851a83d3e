"""One network with our gate and with a plain one, on the same state, under each of NNX's transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers import CLOSE, operands, same

import tiledops
from tiledops.nnx import Axpy, LayerScale, StochasticDepth

pytestmark = pytest.mark.usefixtures("reference")


class Plain(nnx.Module):
    """What somebody writes by hand."""

    def __init__(self, features=None, *, gain_init, rngs):
        self.gain = nnx.Param(gain_init(rngs.params(), () if features is None else (features,), jnp.float32))

    def __call__(self, branch, residual):
        return self.gain[...] * branch + residual


class Block(nnx.Module):
    def __init__(self, gate, rngs):
        self.body = nnx.Linear(5, 5, rngs=rngs)
        self.gate = gate(5, gain_init=nnx.initializers.normal(1.0), rngs=rngs)

    def __call__(self, h):
        return self.gate(self.body(jnp.sin(h)), h)


def one(gate):
    return Block(gate, nnx.Rngs(0))


def stack(gate):
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return Block(gate, rngs)

    return make(nnx.Rngs(0))


def called(model, h):
    return model(h)


def merged(model, h):
    return nnx.merge(*nnx.split(model))(h)


def mapped(model, h):
    return nnx.vmap(called, in_axes=(None, 0))(model, h)


def mapped_models(model, h):
    return nnx.vmap(called)(model, h)


rematerialised = nnx.remat(called)


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
def scanned(model, h):
    return model(h)


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
def rematerialised_scan(model, h):
    return rematerialised(model, h)


TRANSFORMS = {
    called: one,
    merged: one,
    mapped: one,
    rematerialised: one,
    mapped_models: stack,
    scanned: stack,
    rematerialised_scan: stack,
}


def loss_and_gradients(transform, model, h):
    def loss(model, h):
        out = transform(model, h)
        return jnp.sum(jnp.cos(out)), out

    (value, out), (of_model, of_h) = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))(model, h)
    return value, out, nnx.to_pure_dict(of_model), of_h


def assert_as_plain(transform, mode):
    ours, plain = (TRANSFORMS[transform](gate) for gate in (Axpy, Plain))
    jax.tree.map(same, *(nnx.to_pure_dict(nnx.state(model, nnx.Param)) for model in (ours, plain)))
    h = operands()[0]
    with tiledops.use_config(mode=mode):
        got = loss_and_gradients(transform, ours, h)
    wanted = loss_and_gradients(transform, plain, h)
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, **CLOSE), got, wanted)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: getattr(f, "__name__", "rematerialised"))
def test_transforms_as_a_plain_module(transform):
    assert_as_plain(transform, "reference")


@pytest.mark.parametrize("transform", [mapped_models, rematerialised_scan], ids=lambda f: f.__name__)
def test_transforms_in_simulation(transform):
    assert_as_plain(transform, "simulate")


def test_a_scan_over_layers_of_growing_rate():
    """Each layer has its own random stream and its own rate, an array."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rate, rngs):
        return StochasticDepth(rate, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def run(h, layer):
        return h, layer(jnp.ones_like(h), jnp.zeros_like(h))[:, 0]

    layers = make(jnp.array([0.0, 0.5, 1.0]), nnx.Rngs(0))
    _, gains = run(jnp.ones((32, 2)), layers)
    np.testing.assert_array_equal(gains[0], np.ones(32))
    assert set(np.unique(gains[1])) == {0.0, 2.0}
    np.testing.assert_array_equal(gains[2], np.zeros(32))
    assert np.any(run(jnp.ones((32, 2)), layers)[1][1] != gains[1])


@pytest.mark.usefixtures("no_kernels")
def test_making_a_model_traces_no_kernel():
    abstract = nnx.eval_shape(lambda: Block(LayerScale, nnx.Rngs(0)))
    assert abstract.gate.gain.shape == (5,)
    one(Axpy)
