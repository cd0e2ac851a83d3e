"""Optax's documented uses: its own examples, with tiledops names, and every combinator that takes a transformation."""

import doctest
import functools
import inspect
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.training import train_state
from optimizers import STEPS, assert_agree, gradients, halving, matrices, pair, train, train_by_steps

import tiledops
import tiledops.linen
import tiledops.nnx
from tiledops import transforms


@pytest.fixture
def reference():
    with tiledops.use_config(mode="reference"):
        yield


# Optax's own examples, from its docstrings: what they print is printed with tiledops names too.

OURS = re.compile(rf"\boptax\.({'|'.join(sorted(transforms.__all__, key=len, reverse=True))})\b(?! import)")
NOT_RUN = {
    "inject_hyperparams": "no valid doctest, even with Optax's names",
    "multi_transform": "no valid doctest, even with Optax's names",
    "partition": "the example of multi_transform",
    "scale_by_zoom_linesearch": "20 s; scale_by_backtracking_linesearch is used alike",
}


def documented():
    """Name and docstring of everything in Optax whose example uses what is in `tiledops.transforms`."""
    docs = {}
    for module in (optax.tree_utils, optax.contrib, optax):
        for name, public in inspect.getmembers(module, callable):
            doc = inspect.getdoc(public) or ""
            code = [line for line in map(str.strip, doc.splitlines()) if line[:3] in (">>>", "...")]
            if name not in NOT_RUN and any(map(OURS.search, code)):
                docs[doc] = name  # by docstring: a function with two names has one
    return {name: doc for doc, name in docs.items()}


DOCUMENTED = documented()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_optaxs_examples_print_the_same(name, reference, capsys):
    doc = OURS.sub(r"tiledops.transforms.\1", DOCUMENTED[name]).replace("optax.apply_updates", "tiledops.apply_updates")
    names = {"__name__": name, "jax": jax, "jnp": jnp, "optax": optax, "tiledops": tiledops}
    test = doctest.DocTestParser().get_doctest(doc, names, name, None, 0)
    assert "tiledops.transforms." in doc
    assert doctest.DocTestRunner().run(test).failed == 0, capsys.readouterr().out


def test_the_examples_are_found():
    assert {"adam", "adamw", "chain", "lion", "lookahead", "named_chain", "sgd", "tree_map_params"} <= set(DOCUMENTED)


# Every combinator that takes a transformation: each is made of Optax's module and of this library's by the same line


def labels(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "other", params)


def even(step, **_):
    return step % 2 == 0


COMBINATORS = {
    "apply_if_finite": lambda m: optax.apply_if_finite(m.adamw(0.1), max_consecutive_errors=2),
    "chain": lambda m: optax.chain(optax.zero_nans(), m.sgd(0.1, 0.9), optax.keep_params_nonnegative()),
    "conditionally_mask": lambda m: optax.conditionally_mask(m.sgd(0.1, 0.9), even),
    "conditionally_transform": lambda m: optax.conditionally_transform(m.sgd(0.1, 0.9), even),
    "flatten": lambda m: optax.flatten(m.adam(0.1)),
    "inject_hyperparams": lambda m: optax.inject_hyperparams(m.adamw)(halving, weight_decay=0.1),
    "inject, static": lambda m: optax.inject_hyperparams(m.sgd, static_args=("nesterov",))(0.1, 0.9, nesterov=True),
    "masked": lambda m: optax.masked(m.adam(0.1), matrices),
    "multi_transform": lambda m: optax.multi_transform({"matrix": m.adam(0.1), "other": m.sgd(0.1, 0.9)}, labels),
    "partition, frozen": lambda m: optax.partition({"matrix": m.adam(0.1), "other": optax.set_to_zero()}, labels),
    "selective_transform": lambda m: optax.selective_transform(m.sgd(0.1, 0.9), freeze_mask=matrices),
    "MultiSteps": lambda m: optax.MultiSteps(m.adam(0.1), every_k_schedule=2).gradient_transformation(),
    "MultiSteps, skipping": lambda m: optax.MultiSteps(
        m.sgd(0.1, 0.9), 1, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "named_chain": lambda m: optax.named_chain(("momentum", m.trace(0.9)), ("rate", m.scale_by_learning_rate(halving))),
    "schedule_free": lambda m: optax.contrib.schedule_free(m.sgd(0.1), learning_rate=0.1),
    "mechanize": lambda m: optax.contrib.mechanize(m.adam(0.1)),
    "restarting schedule": lambda m: m.sgd(
        optax.join_schedules([optax.linear_schedule(0.1, 0.2, 2), optax.cosine_decay_schedule(0.2, 2)], [2])
    ),
}


@pytest.mark.parametrize("make", COMBINATORS.values(), ids=COMBINATORS)
def test_a_combinator_takes_them(make, reference):
    wanted = train(make(optax), pair(0), jit=True)
    assert_agree(train(make(transforms), pair(0), jit=True), wanted)
    tx = transforms.TiledTransformation.adopt(make(transforms))
    stepped = train_by_steps(SimpleNamespace(init=tx.init, step=jax.jit(tx.step)), pair(0))
    assert_agree(stepped, [(state, params) for _, state, params in wanted])


@pytest.mark.parametrize("name", ["apply_if_finite", "conditionally_transform", "MultiSteps"])
def test_kernels_in_a_combinators_branches(name):
    """Where Optax puts the transformation under a `lax.cond`."""
    make, params = COMBINATORS[name], {"matrix": pair(0)["matrix"]}
    with tiledops.use_config(mode="simulate", block=(16, 256)):
        got = train(make(transforms), params, jit=True)
    assert_agree(got, train(make(optax), params, jit=True))


@pytest.mark.parametrize("reset_state", [False, True])
def test_lookahead(reset_state, reference):
    """Fast parameters take the steps; every other step the slow ones go half-way to them."""
    ours, theirs = (
        optax.lookahead(m.adam(0.1), sync_period=2, slow_step_size=0.5, reset_state=reset_state)
        for m in (transforms, optax)
    )
    step = jax.jit(transforms.TiledTransformation.adopt(ours).step)

    def step_theirs(grads, state, params):
        updates, state = theirs.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    start = optax.LookaheadParams.init_synced(pair(0))
    got, wanted = (start, ours.init(start)), (start, theirs.init(start))
    for i in range(STEPS):
        grads = gradients(start.fast, i)
        got, wanted = step(grads, got[1], got[0]), step_theirs(grads, wanted[1], wanted[0])
        assert_agree(got, wanted)
    assert not np.array_equal(got[0].slow["matrix"], start.slow["matrix"])


def test_a_gradient_that_is_not_finite_is_skipped(reference):
    params = pair(0)
    tx = optax.apply_if_finite(transforms.adamw(0.1), max_consecutive_errors=2)
    state = tx.init(params)
    bad = jax.tree.map(lambda p: p.at[0].set(jnp.nan), params)
    new, skipped = transforms.TiledTransformation.adopt(tx).step(bad, state, params)
    jax.tree.map(np.testing.assert_array_equal, (new, skipped.inner_state), (params, state.inner_state))
    assert (int(skipped.notfinite_count), bool(skipped.last_finite)) == (1, False)


def test_an_injected_learning_rate_is_set_between_steps_and_compiles_nothing(reference):
    params = pair(0)
    tx = optax.inject_hyperparams(transforms.sgd)(learning_rate=0.5)
    step, state = jax.jit(transforms.TiledTransformation.adopt(tx).step), tx.init(params)
    for rate in (0.5, 0.25, 0.125):
        state.hyperparams["learning_rate"] = jnp.asarray(rate, jnp.float32)
        new, state = step(params, state, params)
        jax.tree.map(lambda got, p, rate=rate: np.testing.assert_array_equal(got, p - rate * p), new, params)
    assert step._cache_size() == 1


def test_complex_parameters_by_their_parts(reference):
    """Kernels take no complex numbers; Optax splits them in two."""
    w = jnp.asarray([1 + 2j, -3 + 0.5j], jnp.complex64)
    ours, theirs = (optax.contrib.split_real_and_imaginary(m.adam(0.1)) for m in (transforms, optax))
    (got, _), (wanted, _) = (tx.update(w, tx.init(w)) for tx in (ours, theirs))
    np.testing.assert_allclose(got, wanted, rtol=8 * 2.0**-24)


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
def test_gradients_are_accumulated_as_optax_documents_it(flavour, reference):
    """`MultiSteps` itself, which has Optax's two functions and is no transformation, in Flax's training states."""

    def trained(m, optimizer, state):
        accumulated = optax.MultiSteps(m.adam(0.1), every_k_schedule=2)
        if flavour == "nnx":
            model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
            its = optimizer(model, accumulated, wrt=nnx.Param)
            update = nnx.jit(lambda its, model, grads: its.update(model, grads))
            for i in range(STEPS):
                update(its, model, gradients(nnx.state(model), i))
            return nnx.state((model, its))
        its = state.create(apply_fn=None, params=pair(0), tx=accumulated)
        apply = jax.jit(lambda its, grads: its.apply_gradients(grads=grads))
        for i in range(STEPS):
            its = apply(its, gradients(pair(0), i))
        assert its.tx.has_updated(its.opt_state) == (STEPS % 2 == 0)
        return its.params, its.opt_state

    ours = trained(transforms, tiledops.nnx.Optimizer, tiledops.linen.TrainState)
    assert_agree(ours, trained(optax, nnx.Optimizer, train_state.TrainState))


def test_named_states_are_read_and_set_by_name(reference):
    """As the guide to optimizer states does."""
    params = pair(0)
    tx = transforms.chain(transforms.add_decayed_weights(0.1), transforms.adam(halving))
    _, state = tx.step(params, tx.init(params), params)
    assert int(optax.tree.get(state, "count", filtering=lambda path, _: "ScaleByAdam" in str(path))) == 1
    assert jax.tree.structure(optax.tree.get(state, "mu")) == jax.tree.structure(params)
    state = optax.tree.set(state, mu=params)
    assert optax.tree.get(state, "mu") is params


def test_partial_factories(reference):
    """Hyperparameters bound by functools.partial, as sweeps do."""
    make = functools.partial(transforms.adamw, b1=0.8, weight_decay=0.1)
    wanted = train(optax.adamw(0.1, b1=0.8, weight_decay=0.1), pair(0))
    assert_agree(train(make(0.1), pair(0)), wanted)
