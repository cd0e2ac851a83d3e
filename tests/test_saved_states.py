"""Through orbax: what a plain Flax module and Optax saved restores into tiledops' layers and optimizers, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.training import train_state
from optimizers import assert_agree, gradients, halving, matrices, pair

import tiledops
import tiledops.nnx
from tiledops import linen, transforms

H = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)

# float32 through one layer of five terms each, summed in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


pytestmark = pytest.mark.usefixtures("reference")


@pytest.fixture
def through_orbax(tmp_path):
    """Saves a tree, and restores it in the structure, shapes and dtypes of another, real or abstract."""
    with ocp.StandardCheckpointer() as checkpointer:

        def through(saved, like):
            path = tmp_path / str(len(list(tmp_path.iterdir())))
            checkpointer.save(path, saved)
            checkpointer.wait_until_finished()
            return checkpointer.restore(path, like)

        yield through


def assert_same(got, wanted):
    """The same tree, and the same bits in it."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


# Layers


class PlainNNX(nnx.Module):
    """What somebody writes by hand: gain*x + y."""

    def __init__(self, features=None, *, rngs):
        self.gain = nnx.Param(jax.random.normal(rngs.params(), () if features is None else (features,)))

    def __call__(self, x, y):
        return self.gain[...] * x + y


class BlockNNX(nnx.Module):
    def __init__(self, first, second, rngs):
        self.dense = nnx.Linear(5, 5, rngs=rngs)
        self.first, self.second = first(rngs=rngs), second(5, rngs=rngs)

    def __call__(self, h):
        return self.second(jnp.sin(h), self.first(self.dense(h), h))


class PlainLinen(nn.Module):
    features: int | None = None

    @nn.compact
    def __call__(self, x, y):
        gain = self.param("gain", nn.initializers.normal(), () if self.features is None else (self.features,))
        return gain * x + y


class BlockLinen(nn.Module):
    first: type[nn.Module]
    second: type[nn.Module]

    def setup(self):
        self.dense, self.scalar, self.vector = nn.Dense(5), self.first(), self.second(5)

    def __call__(self, h):
        return self.vector(jnp.sin(h), self.scalar(self.dense(h), h))


def block_nnx(first, second):
    return BlockNNX(first, second, nnx.Rngs(0))


@pytest.mark.parametrize("pure", [False, True], ids=["state", "pure dict"])
def test_a_plain_nnx_modules_parameters_restore_and_go_back(pure, through_orbax):
    def into(model, make):
        definition, abstract = nnx.split(nnx.eval_shape(make))
        if not pure:
            return nnx.merge(definition, through_orbax(nnx.state(model), abstract))
        saved = through_orbax(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(abstract))
        nnx.replace_by_pure_dict(abstract, saved)
        return nnx.merge(definition, abstract)

    plain = block_nnx(PlainNNX, PlainNNX)
    ours = into(plain, lambda: block_nnx(tiledops.nnx.ReZero, tiledops.nnx.LayerScale))
    np.testing.assert_array_equal(ours.second.gain[...], plain.second.gain[...])
    np.testing.assert_allclose(ours(H), plain(H), **CLOSE)
    assert_same(nnx.state(into(ours, lambda: block_nnx(PlainNNX, PlainNNX))), nnx.state(plain))


def test_a_plain_linen_modules_parameters_restore_and_go_back(through_orbax):
    plain, ours = BlockLinen(PlainLinen, PlainLinen), BlockLinen(linen.ReZero, linen.LayerScale)
    variables = plain.init(jax.random.key(0), H)
    restored = through_orbax(variables, jax.eval_shape(ours.init, jax.random.key(0), H))
    assert_same(restored, variables)
    np.testing.assert_allclose(ours.apply(restored, H), plain.apply(variables, H), **CLOSE)
    assert_same(through_orbax(restored, variables), variables)


def test_nnx_parameters_restore_into_linen_and_back(through_orbax):
    model = tiledops.nnx.Residual(nnx.Linear(5, 5, rngs=nnx.Rngs(0)), PlainNNX(5, rngs=nnx.Rngs(1)))
    layer = linen.Residual(nn.Dense(5), linen.LayerScale(5))
    abstract = jax.eval_shape(layer.init, jax.random.key(0), H)["params"]
    params = through_orbax(nnx.to_pure_dict(nnx.state(model)), abstract)
    np.testing.assert_allclose(layer.apply({"params": params}, H), model(H), **CLOSE)
    assert_same(through_orbax(params, abstract), nnx.to_pure_dict(nnx.state(model)))


# Optimizers: each is made of Optax's module and of this library's by the same line

OPTIMIZERS = {
    "sgd": lambda m: m.sgd(0.1),
    "sgd, momentum": lambda m: m.sgd(halving, momentum=0.9, nesterov=True),
    "sgd, bfloat16 momentum": lambda m: m.sgd(0.1, 0.9, accumulator_dtype="bfloat16"),
    "adam, bfloat16 moment": lambda m: m.adam(0.1, mu_dtype="bfloat16"),
    "adamw": lambda m: m.adamw(halving, weight_decay=0.1, mask=matrices),
    "lion": lambda m: m.lion(0.1),
    "ema": lambda m: m.chain(m.ema(0.9), m.scale(-0.1)),
    "clipped": lambda m: m.chain(m.clip_by_global_norm(1.0), m.adamw(0.1)),
    "several passes": lambda m: m.chain(m.trace(0.9), m.clip_by_global_norm(1.0), m.scale_by_schedule(halving)),
    "masked": lambda m: optax.masked(m.sgd(0.1, 0.9), matrices),
    "injected": lambda m: optax.inject_hyperparams(m.adam)(learning_rate=halving),
    "multi-step": lambda m: optax.MultiSteps(m.adam(0.1), 2).gradient_transformation(),
}


def by_update(tx):
    """A step of Optax's, compiled."""

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


def by_step(tx):
    return jax.jit(transforms.TiledTransformation.adopt(tx).step)


def after(step, params, state, *numbers):
    """Parameters and state after these steps, each of its own gradients."""
    for i in numbers:
        params, state = step(gradients(pair(0), i), state, params)
    return params, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optax_states_restore_and_go_back_and_training_continues(name, through_orbax):
    make = OPTIMIZERS[name]
    theirs, ours = make(optax), make(transforms)
    step, params = by_update(theirs), pair(0)
    saved = after(step, params, theirs.init(params), 0)
    wanted = after(step, *saved, 1)

    restored = through_orbax(saved, (params, jax.eval_shape(ours.init, params)))
    assert_same(restored, saved)
    got = after(by_step(ours), *restored, 1)
    assert_agree(got, wanted)

    back = through_orbax(got, (params, jax.eval_shape(theirs.init, params)))
    assert_same(back, got)
    assert_agree(after(step, *back, 2), after(step, *wanted, 2))


@pytest.mark.parametrize("name", ["adamw", "clipped", "masked"])
def test_optax_states_restore_from_flaxs_bytes(name):
    theirs, ours = OPTIMIZERS[name](optax), OPTIMIZERS[name](transforms)
    params = pair(0)
    _, state = after(by_update(theirs), params, theirs.init(params), 0)
    restored = serialization.from_bytes(ours.init(params), serialization.to_bytes(state))
    assert_same(restored, state)
    assert_same(serialization.from_bytes(theirs.init(params), serialization.to_bytes(restored)), state)


# Training states, whole


@pytest.mark.parametrize("tx", [optax.adamw(0.1), transforms.adamw(0.1)], ids=["Optax's", "tiled"])
def test_flaxs_train_state_restores_and_goes_back(tx, through_orbax):
    model = BlockLinen(PlainLinen, PlainLinen)
    grads = params = model.init(jax.random.key(0), H)["params"]

    def new(of, transformation):
        return of.create(apply_fn=model.apply, params=params, tx=transformation)

    saved = new(train_state.TrainState, optax.adamw(0.1)).apply_gradients(grads=grads)
    ours = through_orbax(saved, new(linen.TrainState, tx))
    assert (type(ours), ours.tx, int(ours.step)) == (linen.TrainState, tx, 1)
    got, wanted = ours.apply_gradients(grads=grads), saved.apply_gradients(grads=grads)
    assert_agree((got.params, got.opt_state), (wanted.params, wanted.opt_state))
    back = through_orbax(ours, new(train_state.TrainState, optax.adamw(0.1)))
    assert_same((back.params, back.opt_state), (saved.params, saved.opt_state))


@pytest.mark.parametrize("tx", [optax.adamw(0.1), transforms.adamw(0.1)], ids=["Optax's", "tiled"])
def test_flaxs_optimizer_restores_and_goes_back(tx, through_orbax):
    def fresh(of, gate, transformation):
        model = block_nnx(gate, gate)
        return model, of(model, transformation, wrt=nnx.Param)

    def into(saved, make):
        definition, abstract = nnx.split(nnx.eval_shape(make))
        return nnx.merge(definition, through_orbax(nnx.state(saved), abstract))

    def stepped(model, optimizer):
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
        return model, optimizer

    saved = stepped(*fresh(nnx.Optimizer, PlainNNX, optax.adamw(0.1)))
    ours = into(saved, lambda: fresh(tiledops.nnx.Optimizer, tiledops.nnx.Axpy, tx))
    back = into(ours, lambda: fresh(nnx.Optimizer, PlainNNX, optax.adamw(0.1)))
    assert_same(nnx.state(back), nnx.state(saved))
    assert_agree(nnx.state(stepped(*ours)), nnx.state(stepped(*saved)))
