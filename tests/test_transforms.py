import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from optimizers import CASES, STEPS, assert_agree, halving, matrices, pair, train, tree

import tiledops
from tiledops import transforms


def sgd(m, learning_rate=0.1, momentum=0.9, weight_decay=0.01):
    return optax.chain(
        m.add_decayed_weights(weight_decay), m.trace(momentum, nesterov=True), m.scale_by_learning_rate(learning_rate)
    )


CHAINS = {
    "chain": sgd,
    "named_chain": lambda m: optax.named_chain(("momentum", m.trace(0.9)), ("rate", m.scale(-0.1))),
    "masked": lambda m: optax.masked(sgd(m, weight_decay=halving), matrices),
    "partition": lambda m: optax.partition(
        {"decayed": sgd(m), "fixed": optax.set_to_zero(), "plain": m.scale(-0.1)},
        lambda params: jax.tree.map(lambda p: ("plain", "fixed", "decayed")[min(p.ndim, 2)], params),
    ),
    "inject_hyperparams": lambda m: optax.inject_hyperparams(functools.partial(sgd, m))(learning_rate=halving),
    "MultiSteps": lambda m: optax.MultiSteps(sgd(m), every_k_schedule=2).gradient_transformation(),
    "apply_if_finite": lambda m: optax.apply_if_finite(sgd(m), max_consecutive_errors=2),
    "with Optax's own": lambda m: optax.chain(optax.clip_by_global_norm(1.0), m.trace(0.9), optax.scale(-0.1)),
}


@pytest.fixture
def reference():
    with tiledops.use_config(mode="reference"):
        yield


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_float32_agrees_with_optax(make, reference):
    assert_agree(train(make(transforms), tree(0)), train(make(optax), tree(0)))


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_bfloat16_agrees_with_optax_and_keeps_the_dtype_of_updates(make, reference):
    wanted = train(make(optax), pair(0, jnp.bfloat16))
    got = train(make(transforms), pair(0, jnp.bfloat16))
    # Optax lets the dtype of state drift towards that of an array of hyperparameters; here it is held.
    wanted = [
        (updates, jax.tree.map(lambda x, like: x.astype(like.dtype), state, ours[1]), params)
        for (updates, state, params), ours in zip(wanted, got, strict=True)
    ]
    assert_agree(got, wanted)


@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)
def test_optax_combinators_take_them(make, reference):
    params = pair(0)
    assert_agree(train(make(transforms), params), train(make(optax), params))


@pytest.mark.parametrize("make", [CASES["trace"], CASES["adamw"], sgd], ids=["trace", "adamw", "chain"])
def test_simulated_kernels_agree_with_optax(make):
    params = {"matrix": jnp.asarray(np.random.default_rng(0).standard_normal((17, 257)), jnp.float32)}
    with tiledops.use_config(mode="simulate", block=(8, 128)):
        got = train(make(transforms), params, apply=tiledops.apply_updates)
    assert_agree(got, train(make(optax), params))


@pytest.mark.parametrize("mode", ["reference", "simulate"])
def test_a_trace_is_rounded_once(mode):
    g, t = (np.random.default_rng(seed).standard_normal((3, 130)).astype(np.float32) for seed in (0, 1))
    decay = np.float32(0.9)
    with tiledops.use_config(mode=mode):
        update, state = transforms.trace(0.9, nesterov=True).update(g, optax.TraceState(t))
    new = (np.float64(decay) * t + g).astype(np.float32)
    np.testing.assert_array_equal(state.trace, new)
    np.testing.assert_array_equal(update, (np.float64(decay) * new + g).astype(np.float32))


def test_a_learning_rate_may_be_an_array_that_broadcasts(reference):
    rate, g = np.array([1.0, 2.0, 4.0], np.float32), np.ones((2, 3), np.float32)
    update, _ = transforms.scale_by_learning_rate(rate).update(g, optax.EmptyState())
    np.testing.assert_array_equal(update, -rate * g)


def test_state_types_and_shapes_from_shapes_alone():
    shapes = jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)
    state = jax.eval_shape(sgd(transforms).init, shapes)
    assert state == jax.eval_shape(sgd(optax).init, shapes)


def test_tree_map_params_sees_the_state(reference):
    tx = sgd(transforms)
    state = optax.tree_map_params(tx, lambda x: x + 1, tx.init(jnp.zeros(3)))
    np.testing.assert_array_equal(state[1].trace, np.ones(3))


def test_nnx_optimizer_takes_them(reference):
    def trained(m):
        model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, sgd(m), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            grads = nnx.grad(lambda model: jnp.sum(model(jnp.ones((2, 3))) ** 2))(model)
            optimizer.update(model, grads)

        for _ in range(STEPS):
            step(model, optimizer)
        return nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(optimizer))

    assert_agree(trained(transforms), trained(optax))


RATES = {"Python": 0.1, "NumPy": np.float64(0.1), "JAX": jnp.float32(0.1), "schedule": halving}


@pytest.mark.parametrize("rate", RATES.values(), ids=RATES)
@pytest.mark.parametrize("grads_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scan_over_steps_keeps_every_dtype(dtype, grads_dtype, rate, reference):
    tx, params = sgd(transforms, rate), {"w": jnp.ones((2, 5), dtype)}

    def step(carry, g):
        params, state = carry
        updates, state = tx.update({"w": g}, state, params)
        return (tiledops.apply_updates(params, updates), state), None

    start = (params, tx.init(params))
    end, _ = jax.lax.scan(step, start, jnp.ones((STEPS, 2, 5), grads_dtype))
    assert [x.dtype for x in jax.tree.leaves(end)] == [x.dtype for x in jax.tree.leaves(start)]
    assert np.all(np.asarray(end[0]["w"]) < 1)


def test_a_step_compiles_once_whatever_the_learning_rate():
    def step(rate, grads, state, params):
        updates, state = sgd(transforms, rate).update(grads, state, params)
        return tiledops.apply_updates(params, updates), state

    step = jax.jit(step)
    params = {"w": jnp.ones((3, 5)), "v": jnp.asarray(1.0)}  # the second is weakly typed
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    state = sgd(transforms).init(params)
    for rate in (0.1, 0.2, 0.3):
        params, state = step(rate, params, state, params)
    assert step._cache_size() == 1


def test_a_new_learning_rate_takes_the_same_kernel_without_jit(caplog):
    def compiled(rate, shape):
        """How many programs a call compiles."""
        caplog.clear()
        with jax.log_compiles():
            update, _ = transforms.scale(rate).update(jnp.ones(shape), optax.EmptyState())
        np.testing.assert_array_equal(update, np.full(shape, rate))
        return sum("Compiling" in record.message for record in caplog.records)

    assert compiled(0.5, (3, 5)) > 0
    assert compiled(0.25, (3, 5)) == 0
    assert compiled(0.25, (3, 7)) > 0


def test_weakly_typed_parameters_get_strong_state():
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    assert not transforms.trace(0.9).init(weak).trace.weak_type


NO_KERNEL = ("weight decay, default", "learning rate, none", "identity")
NORM = ("clip by norm", "clip by norm, untouched")  # whose norm is one more kernel a leaf


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_one_kernel_a_leaf(case):
    params = {"w": jnp.ones((8, 128)), "v": jnp.ones((2, 8, 128))}
    tx = CASES[case](transforms)
    jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    assert count_kernels(jaxpr.jaxpr) == (0 if case in NO_KERNEL else 4 if case in NORM else 2)


def count_kernels(jaxpr):
    return sum(
        equation.primitive.name == "pallas_call"
        or sum(count_kernels(inner) for inner in jaxprs_in_params(equation.params))
        for equation in jaxpr.eqns
    )


def two_steps(m):
    """A loss after two steps as a function of the learning rate, as meta-learning differentiates it."""
    params, grads = jnp.asarray([1.0, 2.0]), jnp.asarray([0.5, -1.0])

    def loss(rate):
        tx = sgd(m, rate)
        updates, state = tx.update(grads, tx.init(params), params)
        updates, state = tx.update(updates, state, params)
        return jnp.sum((params + updates) ** 2)

    return loss


@pytest.mark.parametrize("mode", ["reference", "simulate"])
@pytest.mark.parametrize("derivative", [jax.grad, jax.hessian])
def test_a_step_is_differentiable(derivative, mode):
    wanted = derivative(two_steps(optax))(0.1)
    with tiledops.use_config(mode=mode):
        # about 20 operations on terms of up to 4
        np.testing.assert_allclose(derivative(two_steps(transforms))(0.1), wanted, atol=20 * 4 * 2.0**-24)


@pytest.mark.parametrize("mode", ["reference", "simulate"])
def test_vmap_trains_many_models_at_once(mode):
    params = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 5)), jnp.float32)}
    wanted = jax.vmap(lambda p: train(sgd(optax), p, steps=1, jit=False))(params)
    with tiledops.use_config(mode=mode):
        got = jax.vmap(lambda p: train(sgd(transforms), p, steps=1, jit=False))(params)
    assert_agree(got, wanted)


@pytest.mark.parametrize("axes", [(0, 0), (-1, 0), (None, -1)], ids=str)
def test_the_derivative_of_a_batch_of_clipped_steps(axes):
    """Each model has a norm of its own, wherever the mapped axis lies in its gradients and parameters."""
    random = np.random.default_rng(0)

    def batch(axis):
        shapes = {"w": (3, 5), "b": (4,), "gain": (6,), "scale": ()}
        mapped = {
            name: s if axis is None else np.insert(np.array(s, int), axis % (len(s) + 1), 2)
            for name, s in shapes.items()
        }
        return {name: jnp.asarray(random.standard_normal(tuple(s)), jnp.float32) for name, s in mapped.items()}

    def loss(module, grads, params):
        tx = module.chain(module.clip_by_global_norm(0.5), module.scale(-0.1))
        updated = jax.vmap(lambda g, p: optax.apply_updates(p, tx.update(g, tx.init(p))[0]), axes)(grads, params)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(updated))

    operands = batch(axes[0]), batch(axes[1])
    wanted = jax.grad(functools.partial(loss, optax), (0, 1))(*operands)
    with tiledops.use_config(mode="reference"):
        assert_agree(jax.grad(functools.partial(loss, transforms), (0, 1))(*operands), wanted)


def test_a_constant_zero_weight_decay_adds_nothing_at_all():
    params, g = jnp.asarray([jnp.inf]), jnp.ones(1)
    update, _ = transforms.add_decayed_weights(0.0).update(g, optax.EmptyState(), params)
    np.testing.assert_array_equal(update, g)


def test_a_masked_leaf_may_be_of_any_dtype(reference):
    tree = {"w": jnp.ones(3), "count": jnp.arange(3)}
    tx = transforms.add_decayed_weights(0.5, mask={"w": True, "count": False})
    updates, _ = tx.update(tree, tx.init(tree), tree)
    np.testing.assert_array_equal(updates["w"], np.full(3, 1.5))
    np.testing.assert_array_equal(updates["count"], np.arange(3))
