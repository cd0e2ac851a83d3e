"""The training states against Flax's own with the same transformation, step for step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state
from jax.extend.core import jaxprs_in_params
from optimizers import STEPS, assert_agree, halving, matrices

import tiledops
from tiledops import compiled, transforms
from tiledops.linen import TrainState
from tiledops.nnx import Optimizer

X = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)

TRANSFORMATIONS = {
    "tiled": transforms.adamw(halving, weight_decay=0.1, mask=matrices),
    "tiled, norm first": transforms.chain(transforms.clip_by_global_norm(0.1), transforms.sgd(0.1, 0.9, True)),
    "Optax's": optax.adamw(halving, weight_decay=0.1),
    "Optax's chain of tiled": optax.chain(transforms.trace(0.9), optax.scale(-0.1)),
    "with extra arguments": optax.chain(transforms.trace(0.9), optax.polyak_sgd()),
}


pytestmark = pytest.mark.usefixtures("reference")


class Net(nnx.Module):
    """Parameters, and statistics that are none."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 5, rngs=rngs), nnx.Linear(5, 1, use_bias=False, rngs=rngs)])
        self.norm = nnx.BatchNorm(5, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.norm(jnp.sin(self.layers[0](x))))


def train_nnx(optimizer_class, tx, mode="reference"):
    """The states of model and optimizer after each step, jitted and donated."""
    model = Net(nnx.Rngs(0))
    optimizer = optimizer_class(model, tx, wrt=nnx.Param)
    traced = []

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model, optimizer, x):
        traced.append(None)
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads, value=loss)
        return loss

    history = []
    with tiledops.use_config(mode=mode):
        for i in range(STEPS):
            train_step(model, optimizer, X * (i + 1))
            history.append(jax.tree.map(np.asarray, (nnx.state(model), nnx.state(optimizer))))
    assert len(traced) == 1
    return history


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_an_optimizer_trains_as_flaxs(name):
    tx = optax.with_extra_args_support(TRANSFORMATIONS[name])
    if name.startswith("tiled"):
        tx = TRANSFORMATIONS[name]
    assert_agree(train_nnx(Optimizer, tx), train_nnx(nnx.Optimizer, tx))


def train_linen(state_class, tx, value=False):
    """The trees of the state after each step, jitted and donated."""
    model = nn.Sequential([nn.Dense(5), jnp.sin, nn.Dense(1)])
    params = model.init(jax.random.key(0), X)["params"]
    state, traced = state_class.create(apply_fn=model.apply, params=params, tx=tx), []

    def train_step(state, x):
        traced.append(None)
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2))(state.params)
        options = {"extra_args": {"value": loss}} if value else {}
        return state.apply_gradients(grads=grads, **options), loss

    jitted, history = jax.jit(train_step, donate_argnums=0), []
    for i in range(STEPS):
        state, _ = jitted(state, X * (i + 1))
        assert type(state) is state_class
        history.append(jax.tree.map(np.asarray, (state.step, state.params, state.opt_state)))
    assert len(traced) == 1
    return history


@pytest.mark.parametrize("name", [name for name in TRANSFORMATIONS if "extra" not in name])
def test_a_train_state_trains_as_flaxs(name):
    tx = TRANSFORMATIONS[name]
    assert_agree(train_linen(TrainState, tx), train_linen(train_state.TrainState, tx))


def test_a_train_state_takes_extra_arguments():
    """Flax's own has no way to pass them: the oracle is a transformation that needs none."""

    def constant(value):
        return optax.GradientTransformationExtraArgs(
            lambda params: (), lambda g, s, p=None, **args: (optax.tree.scale(value(args), g), s)
        )

    got = train_linen(TrainState, constant(lambda args: -0.0 * args["value"] - 0.1), value=True)
    assert_agree(got, train_linen(TrainState, constant(lambda args: -0.1)))


def test_an_optimizer_checks_by_a_state_that_counts():
    """One that doesn't keeps its type, so that the count would be lost in a transformed function: refused at once."""
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    grads = jax.tree.map(lambda p: p * jnp.nan, nnx.state(model, nnx.Param))
    before = jax.tree.map(np.asarray, nnx.state(model))
    optimizer = Optimizer(model, transforms.adam(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"needs a state that counts.*Make the optimizer of .*apply_if_finite\(tx"):
        optimizer.update(model, grads, check_finite=True)
    counting = Optimizer(model, transforms.apply_if_finite(transforms.adam(0.1), 3), wrt=nnx.Param)
    counting.update(model, grads)
    counting.update(model, grads, check_finite=True)
    assert int(counting.opt_state.total_notfinite[...]) == 2
    assert (int(optimizer.step[...]), int(counting.step[...])) == (0, 2)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)


def test_a_train_state_begins_to_count_where_it_begins_to_check():
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=transforms.sgd(0.5))
    state = state.apply_gradients(grads={"w": jnp.full(3, jnp.nan)}, extra_args={"check_finite": True})
    state = state.apply_gradients(grads={"w": jnp.ones(3)}, extra_args={"check_finite": True})
    assert int(state.opt_state.total_notfinite) == 1
    np.testing.assert_array_equal(state.params["w"], np.full(3, 0.5))


def test_simulated_kernels_train_as_flaxs():
    tx = transforms.sgd(0.1, 0.9)
    assert_agree(train_nnx(Optimizer, tx, mode="simulate"), train_nnx(nnx.Optimizer, tx))


def test_a_step_is_one_kernel_a_parameter():
    def kernels(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield equation.params["name"]
            else:
                for inner in jaxprs_in_params(equation.params):
                    yield from kernels(inner)

    params = {"w": jnp.ones((3, 4)), "v": jnp.ones((4, 3))}
    state = TrainState.create(apply_fn=None, params=params, tx=transforms.adam(0.1))
    with tiledops.use_config(mode="simulate"):
        jaxpr = jax.make_jaxpr(lambda state, grads: state.apply_gradients(grads=grads))(state, params).jaxpr
        assert list(kernels(jaxpr)) == ["tiledops_adam_scale_apply"] * 2
        model = nnx.Linear(3, 4, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = Optimizer(model, transforms.adam(0.1), wrt=nnx.Param)

        def update(*trees):
            model, optimizer, grads = nnx.merge(definition, *trees)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer))

        definition, trees = nnx.split((model, optimizer, nnx.state(model)))
        assert list(kernels(jax.make_jaxpr(update)(trees).jaxpr)) == ["tiledops_adam_scale_apply"]


def nnx_step(tx):
    def make():
        model = nnx.Linear(1024, 1024, rngs=nnx.Rngs(0))
        return model, Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model))

    return train_step, *nnx.eval_shape(make)


def linen_step(tx):
    model = nn.Dense(1024)

    def make():
        variables = model.init(jax.random.key(0), jnp.ones((8, 1024)))
        return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)

    def train_step(state, x):
        grads = jax.grad(lambda params: jnp.sum(state.apply_fn({"params": params}, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    return jax.jit(train_step, donate_argnums=0), jax.eval_shape(make)


@pytest.mark.parametrize("make", [nnx_step, linen_step])
def test_a_compiled_step_is_in_place(make):
    step, *state = make(transforms.adamw(0.1))
    with tiledops.use_config(mode="tpu"):
        report = compiled.compile_for(step, *state, jax.ShapeDtypeStruct((8, 1024), jnp.float32), chip="v5e")
    assert {kernel.name for kernel in report.kernels} == {"tiledops_adam_decayed_weights_scale_apply"}
    assert not [i for i in report.extra if i.read + i.written > 4096]  # counts, scalars
    assert report.donated_bytes >= 3 * 4 * 1024 * (1024 + 1)


def test_only_what_the_filter_names_is_trained():
    model = Net(nnx.Rngs(0))
    first = nnx.All(nnx.Param, nnx.PathContains("norm"))
    optimizer = Optimizer(model, transforms.sgd(0.1), wrt=first)
    before = jax.tree.map(np.asarray, nnx.state(model))
    grads = nnx.grad(lambda model: jnp.sum(jnp.cos(model(X))), argnums=nnx.DiffState(0, first))(model)
    assert optimizer.update(model, grads) is None
    changed = jax.tree.map(lambda old, new: bool((old != new).any()), before, nnx.state(model))
    where = {path[0] for path, leaf in nnx.to_flat_state(changed) if leaf.get_value()}
    assert where == {"norm"}
    assert optimizer.step[...] == 1


def test_optimizers_are_flaxs_in_all_but_the_step():
    partitioned = nnx.with_partitioning(nnx.initializers.ones, (None, "model"))
    tx = optax.adam(0.1)
    with jax.set_mesh(jax.make_mesh((1,), ("model",))):
        model = nnx.Linear(3, 4, kernel_init=partitioned, rngs=nnx.Rngs(0))
        ours, theirs = (of(model, tx, wrt=nnx.Param) for of in (Optimizer, nnx.Optimizer))
    assert isinstance(ours, nnx.Optimizer)
    assert ours.tx is theirs.tx
    assert jax.tree.structure(nnx.state(ours)) == jax.tree.structure(nnx.state(theirs))
    nnx.update(ours, nnx.state(theirs))
    assert nnx.get_partition_spec(nnx.state(ours)) == nnx.get_partition_spec(nnx.state(theirs))
    with pytest.raises(TypeError, match="wrt"):
        Optimizer(model, tx)
    with pytest.raises(TypeError, match="grads"):
        ours.update(model)


def test_a_subclass_has_attributes_of_its_own():
    class WithStatistics(TrainState):
        statistics: dict

    params = {"w": jnp.ones(3)}
    state = WithStatistics.create(apply_fn=None, params=params, tx=transforms.sgd(0.5), statistics={"mean": 0})
    new = state.apply_gradients(grads=params, statistics={"mean": 1})
    assert isinstance(new, WithStatistics)
    assert (new.step, new.statistics) == (1, {"mean": 1})
    np.testing.assert_array_equal(new.params["w"], np.full(3, 0.5))


@pytest.mark.parametrize("state_class", [TrainState, train_state.TrainState])
def test_what_flax_overwrites_with_its_gradient_is_overwritten(state_class):
    params = {"params": {"w": jnp.ones(3)}, OVERWRITE_WITH_GRADIENT: {"scale": jnp.ones(2)}}
    grads = {"params": {"w": jnp.ones(3)}, OVERWRITE_WITH_GRADIENT: {"scale": jnp.full(2, 7.0)}}
    state = state_class.create(apply_fn=None, params=params, tx=transforms.sgd(0.5))
    new = state.apply_gradients(grads=grads)
    wanted = {"params": {"w": np.full(3, 0.5)}, OVERWRITE_WITH_GRADIENT: {"scale": np.full(2, 7.0)}}
    jax.tree.map(np.testing.assert_array_equal, new.params, wanted)


def test_parameters_may_be_one_array():
    state = TrainState.create(apply_fn=None, params=jnp.ones(3), tx=transforms.sgd(0.5))
    np.testing.assert_array_equal(state.apply_gradients(grads=jnp.ones(3)).params, np.full(3, 0.5))


def test_on_auto_axes_specs_are_passed_on():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), tiledops.use_config(mode="simulate"):
        w = jax.device_put(jnp.ones((8, 128)), jax.NamedSharding(mesh, jax.P("data")))
        state = TrainState.create(apply_fn=None, params={"w": w}, tx=transforms.sgd(0.5))
        step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads, extra_args={"specs": jax.P("data")}))
        np.testing.assert_array_equal(step(state, {"w": w}).params["w"], np.full((8, 128), 0.5))

        @nnx.jit
        def update(model, optimizer, grads):
            optimizer.update(model, grads, specs=jax.P("data"))

        model = nnx.Linear(8, 128, use_bias=False, rngs=nnx.Rngs(0))
        model.kernel[...] = w
        update(model, Optimizer(model, transforms.sgd(0.5), wrt=nnx.Param), nnx.state(model))
        np.testing.assert_array_equal(model.kernel[...], np.full((8, 128), 0.5))
