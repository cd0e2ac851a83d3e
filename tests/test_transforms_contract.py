"""What transformations refuse: before any kernel runs, by the user's own names, and with nothing lost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import tiledops
from tiledops import transforms


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int32, jnp.complex64])
def test_a_leaf_that_kernels_cannot_take_is_refused_by_its_path(dtype):
    params = {"layers": [{"kernel": jnp.ones(2, dtype)}]}
    message = rf"params\['layers'\]\[0\]\['kernel'\] must be float32 or bfloat16; got {dtype.__name__}.*optax.masked"
    with pytest.raises(TypeError, match=message):
        transforms.trace(0.9).init(params)
    with pytest.raises(TypeError, match=message.replace("params", "updates")):
        transforms.scale(0.5).update(params, optax.EmptyState())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: transforms.trace(0.9, accumulator_dtype=jnp.float16), TypeError, "accumulator_dtype.*got float16"),
        (lambda g: transforms.scale("0.1"), TypeError, "step_size must be a real number.*got '0.1'"),
        (lambda g: transforms.scale(True), TypeError, "step_size must be a real number.*got True"),
        (lambda g: transforms.scale(1j), TypeError, "step_size must be a real number.*got 1j"),
        (
            lambda g: transforms.scale(jnp.ones(7)).update(g, ()),
            ValueError,
            r"step_size.*shape \(7,\).*\['w'\].*\(3,\)",
        ),
        (
            lambda g: transforms.add_decayed_weights(0.1).update(g, ()),
            ValueError,
            "needs the parameters; got params=No",
        ),
        (lambda g: transforms.trace(0.9).update(g, optax.TraceState({})), ValueError, "tree structure; the state diff"),
        (lambda g: transforms.chain(transforms.trace), TypeError, "chain takes gradient transf.*got function"),
        (lambda g: transforms.sgd(0.1).step(g, (optax.EmptyState(),), g), ValueError, "chain of 2 must be.*tuple of 1"),
        (lambda g: transforms.sgd(0.1).step(g, transforms.sgd(0.1).init(g), None), ValueError, "got params=None"),
        (lambda g: transforms.scale_by_lion(mode="soft"), ValueError, "mode must be one of hard, smooth.*got 'soft'"),
        (lambda g: transforms.sgd("0.1"), TypeError, "learning_rate must be a real number.*got '0.1'"),
        (lambda g: transforms.sgd(0.1, momentum=[0.9]), TypeError, r"momentum must be a real number.*got \[0.9\]"),
        (lambda g: transforms.trace(None), TypeError, "decay must be a real number.*got None"),
        (lambda g: transforms.ema("0.9"), TypeError, "decay must be a real number.*got '0.9'"),
        (lambda g: transforms.adam(0.1, b1="0.9"), TypeError, "b1 must be a real number.*got '0.9'"),
        (lambda g: transforms.adamw(0.1, eps=None), TypeError, "eps must be a real number.*got None"),
        (lambda g: transforms.lion(0.1, b2=1j), TypeError, "b2 must be a real number.*got 1j"),
        (lambda g: transforms.adamw(0.1, weight_decay="no"), TypeError, "weight_decay must be a real.*got 'no'"),
        (lambda g: transforms.clip(None), TypeError, "max_delta must be a real number.*got None"),
        (lambda g: transforms.clip_by_global_norm("1"), TypeError, "max_norm must be a real number.*got '1'"),
        (lambda g: transforms.clip_by_global_norm(jnp.ones(3)), ValueError, r"max_norm must be one number.*\(3,\)"),
        (lambda g: transforms.apply_if_finite(transforms.sgd(0.1), "3"), TypeError, "max_consecutive_errors.*got '3'"),
        (lambda g: transforms.scale_by_schedule(0.1), TypeError, "step_size_fn must be a function.*got 0.1"),
        (
            lambda g: transforms.scale_by_adam().update(g, transforms.scale_by_lion().init(g)),
            ValueError,
            "state must be the optax.ScaleByAdamState that .*init.. makes; got ScaleByLionState",
        ),
        (
            lambda g: transforms.trace(0.9).update(g, {"trace": g}),
            ValueError,
            "state must be the optax.TraceState .* got dict",
        ),
        (
            lambda g: transforms.add_decayed_weights(0.1, {"v": True}).update(g, optax.MaskedState(()), g),
            ValueError,
            "mask must be a tree like the parameters', or a prefix of it",
        ),
        (
            lambda g: transforms.sgd(0.1).step(g, transforms.sgd(0.1).init(g), g, check_finite="no"),
            TypeError,
            "check_finite must be True or False; got 'no'",
        ),
    ],
)
def test_misuse_is_refused(call, error, message, no_kernel_runs):
    with pytest.raises(error, match=message):
        call({"w": jnp.ones(3)})


@pytest.fixture
def no_kernel_runs(monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("a kernel was traced")

    monkeypatch.setattr("tiledops.launches.Call.run", refused)


def test_a_gradient_of_another_shape_is_named():
    params = {"w": jnp.ones((5, 7))}
    tx = transforms.adamw(1e-3)
    grads, state = {"w": jnp.ones((7, 5))}, tx.init(params)
    for call, name in [(tx.step, "grads"), (tx.update, "updates")]:
        with pytest.raises(ValueError, match=rf"{name}\['w'\] must have the shape of its parameter, \(5, 7\); got"):
            call(grads, state, params)


@pytest.mark.parametrize("name", ["adam", "lion", "ema", "scale_by_adam"])
@pytest.mark.parametrize("updates", [None, {"w": None, "b": jnp.ones(5)}], ids=["all", "one"])
def test_no_state_is_lost_with_an_update_that_is_none(updates, name):
    params = {"w": jnp.ones((3, 5)), "b": jnp.ones(5)}
    tx = getattr(transforms, name)(0.1)
    with pytest.raises(ValueError, match="is None, but there is a state of it, which would be lost"):
        tx.update(updates, tx.init(params), params)
    nothing = {"w": None, "b": jnp.ones(5)}
    assert tx.update(nothing, tx.init(nothing), nothing)[0]["w"] is None


def test_an_array_that_was_donated_is_named(no_kernel_runs):
    params = {"w": jnp.ones((8, 128)), "z": jnp.ones((8, 128))}
    tx = transforms.sgd(0.1)
    params["z"].delete()
    with pytest.raises(RuntimeError, match=r"grads\['z'\] was deleted: a call that it was donated to"):
        tx.step(params, tx.init(params), params)


@pytest.mark.parametrize(
    ("specs", "error", "message"),
    [
        ({"w": "data", "b": jax.P()}, TypeError, r"specs must be jax.P\(...\).* got 'data' for \['w'\]"),
        ({"w": jax.P()}, ValueError, "specs must be a tree like the parameters', or a prefix"),
        ({"w": jax.P("data", "data"), "b": jax.P()}, ValueError, r"\['w'\]: spec must name each axis .* once at most"),
        ({"w": None, "b": jax.P()}, ValueError, r"\['w'\]: the arrays are on a mesh with Auto axes"),
    ],
    ids=["no spec", "no leaf", "twice", "None"],
)
def test_specs_that_do_not_fit_are_refused(specs, error, message, no_kernel_runs):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    params = {"w": jnp.ones((8, 128)), "b": jnp.ones(128)}
    tx = transforms.sgd(0.1)
    with jax.set_mesh(mesh), pytest.raises(error, match=message):
        tx.step(params, tx.init(params), params, specs=specs)


def test_a_leaf_whose_gradient_lies_elsewhere_is_named(no_kernel_runs):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    tx = transforms.sgd(0.1)
    with jax.set_mesh(mesh):
        params, grads = (
            {"w": jax.device_put(np.ones((8, 128)), spec)} for spec in (jax.P("data"), jax.P(None, "data"))
        )
        with pytest.raises(Exception, match=r"shard(.|\n)*These are the arrays of grads\['w'\]"):
            tx.step(grads, tx.init(params), params)


def test_the_next_call_works_after_a_refusal():
    params = {"w": jnp.ones((8, 128))}
    tx = transforms.adam(0.1)
    state = tx.init(params)
    with tiledops.use_config(mode="simulate"):
        wanted = jax.tree.map(np.asarray, tx.step(params, state, params))
        with pytest.raises(ValueError, match="tree structure"):
            tx.step({"v": params["w"]}, state, params)
        got = tx.step(params, state, params)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
