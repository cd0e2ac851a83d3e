"""A step whose gradients are not all finite changes nothing but the count of such steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import CASES, assert_agree, compiled_step, gradients, one_pass, pair
from test_transformation import CHAINS, SIZE, kernels

import tiledops
from tiledops import chips, transforms


def remember():
    """A transformation of somebody else's, whose state moves on a place at each step."""

    def update(updates, state, params=None):
        return jax.tree.map(jnp.add, updates, state["before"]), {"last": updates, "before": state["last"]}

    def init(params):
        return {"last": params, "before": jax.tree.map(jnp.zeros_like, params)}

    return optax.GradientTransformation(init, update)


STEPPED = {**CASES, **{name: make for name, make in CHAINS.items() if name != "nested in Optax's"}}
GUARDED = {
    "adamw": lambda m: m.adamw(0.1, weight_decay=0.1),
    "norm first": CHAINS["norm first"],
    "norm in the middle": CHAINS["norm in the middle"],
    "Optax's between": CHAINS["Optax's between"],
    "a state that moves on": lambda m: m.chain(remember(), m.scale(-0.1)),
    "nested": lambda m: m.chain(m.trace(0.9), m.apply_if_finite(m.adam(0.1), 1), m.scale(0.5)),
    "identity": lambda m: m.identity(),
    "masked": lambda m: m.add_decayed_weights(0.1, {"matrix": True, "vector": False}),
}


@pytest.fixture
def reference():
    with tiledops.use_config(mode="reference"):
        yield


def spoilt(grads, value, leaf="vector"):
    """One element of one leaf isn't finite."""
    return {**grads, leaf: grads[leaf].at[(-1,) * grads[leaf].ndim].set(value)}


def assert_same_bits(got, wanted):
    def same(ours, theirs):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()

    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(same, got, wanted)


def report(state):
    return int(state.notfinite_count), bool(state.last_finite), int(state.total_notfinite)


@pytest.mark.parametrize("make", STEPPED.values(), ids=STEPPED)
def test_a_refused_step_keeps_every_bit(make, reference):
    """And the next step is what it would have been without it."""
    tx, start = make(transforms), pair(0)
    params, state = tx.step(gradients(start, 0), tx.init(start), start)
    kept, checked = tx.step(spoilt(gradients(start, 1), np.nan), state, params, check_finite=True)
    assert_same_bits((kept, checked.inner_state), (params, state))
    assert report(checked) == (1, False, 1)
    wanted = tx.step(gradients(start, 1), state, params)
    kept, checked = tx.step(gradients(start, 1), checked, kept, check_finite=True)
    assert_agree([(kept, checked.inner_state)], [wanted])
    assert report(checked) == (0, True, 1)


@pytest.mark.parametrize(
    ("leaf", "dtype", "value"),
    [("vector", jnp.float32, np.nan), ("matrix", jnp.float32, -np.inf), ("matrix", jnp.bfloat16, np.inf)],
    ids=["vector, float32, nan", "matrix, float32, -inf", "matrix, bfloat16, inf"],
)
def test_simulated_kernels_keep_every_bit(leaf, dtype, value):
    """Those of NaN, of infinities and of negative zeros included; the last element lies in a ragged tile."""
    params = jax.tree.map(
        lambda p: p.at[..., 0].set(-0.0).at[..., 1].set(np.nan).at[..., 2].set(-np.inf), pair(0, dtype)
    )
    tx = transforms.apply_if_finite(transforms.adamw(0.1), 3)
    state = tx.init(params)
    state = state._replace(inner_state=(state.inner_state[0]._replace(mu=params, nu=params), *state.inner_state[1:]))
    with tiledops.use_config(mode="simulate", block=(16, 128)):
        kept, checked = jax.jit(tx.step)(spoilt(gradients(pair(0, dtype), 0), value, leaf), state, params)
    assert_same_bits((kept, checked.inner_state), (params, state.inner_state))
    assert report(checked) == (1, False, 1)


@pytest.mark.parametrize("make", GUARDED.values(), ids=GUARDED)
def test_apply_if_finite_agrees_with_optax(make, reference):
    """Update by update, with two refused in a row, and the third taken all the same."""
    start, histories = pair(0), []
    for m in (transforms, optax):
        tx, params, history = m.apply_if_finite(make(m), 2), start, []
        state, update = tx.init(params), jax.jit(tx.update)
        for i, bad in enumerate([False, True, True, False, True, False, True, True, True]):
            grads = gradients(start, i)
            updates, state = update(spoilt(grads, np.nan) if bad else grads, state, params)
            params = optax.apply_updates(params, updates)
            history.append((updates, state, params))
        histories.append(history)
    ours, theirs = histories
    assert report(ours[-1][1]) == (3, False, 6)
    # What it then takes is NaN here and there: compared above, where a step is refused and where it is taken.
    assert_agree(ours[:-1], theirs[:-1])


@pytest.mark.parametrize("make", [GUARDED["adamw"], GUARDED["norm first"]], ids=["adamw", "norm first"])
@pytest.mark.parametrize("mode", ["reference", "simulate"])
def test_finite_gradients_whose_squares_overflow_are_finite(make, mode):
    tx, params = make(transforms), {"w": jnp.ones(5)}
    grads = {"w": jnp.full(5, 3e38)}
    with tiledops.use_config(mode=mode):
        wanted = tx.step(grads, tx.init(params), params)
        got, state = tx.step(grads, tx.init(params), params, check_finite=True)
    assert report(state) == (0, True, 0)
    assert_same_bits((got, state.inner_state), wanted)


@pytest.mark.parametrize("name", ["adamw", "norm first"])
def test_the_check_is_one_reduction_and_the_clips_own(name):
    tx, params = GUARDED[name](transforms), jnp.ones((8, 128))
    step = functools.partial(tx.step, check_finite=True)
    first, second = kernels(step, params, tx.init(params), params)
    assert first == ("tiledops_checked_square", [])
    assert second[0].startswith("tiledops_guarded_")
    assert second[1] == [0, 1, 2]


def test_a_loop_takes_a_state_that_counts_from_the_start(reference):
    tx = transforms.apply_if_finite(transforms.adam(0.1), 10)
    params = pair(0)

    def body(carry, factor):
        return tx.step(jax.tree.map(lambda p: p * factor, params), carry[1], carry[0]), None

    factors = jnp.array([1.0, jnp.nan, 1.0, jnp.inf])
    (_, state), _ = jax.jit(lambda carry: jax.lax.scan(body, carry, factors))((params, tx.init(params)))
    assert report(state) == (1, False, 2)
    assert int(state.inner_state[0].count) == 2


def test_each_example_of_a_mapped_step_has_its_own_flag():
    tx = transforms.apply_if_finite(transforms.sgd(0.5), 3)
    params, grads = jnp.ones((2, 5)), jnp.ones((2, 5)).at[1, 3].set(jnp.nan)
    with tiledops.use_config(mode="simulate"):
        new, state = jax.vmap(tx.step)(grads, jax.vmap(tx.init)(params), params)
    np.testing.assert_array_equal(new, [[0.5] * 5, [1.0] * 5])
    np.testing.assert_array_equal(state.last_finite, [True, False])


def test_one_shard_speaks_for_all():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    tx = transforms.apply_if_finite(transforms.sgd(0.1, 0.9), 3)
    with jax.set_mesh(mesh), tiledops.use_config(mode="simulate"):
        ones = np.ones((8, 128), np.float32)
        grads = np.where(np.arange(8)[:, None] == 7, np.inf, ones)  # in the second shard
        params, grads = (jax.device_put(x, jax.P("data")) for x in (ones, grads))
        new, state = jax.jit(tx.step)(grads, tx.init(params), params)
    assert_same_bits(new, params)
    assert new.sharding.spec == state.inner_state[0].trace.sharding.spec == jax.P("data", None)
    assert report(state) == (1, False, 1)


def test_a_state_that_does_not_count_is_refused():
    tx = transforms.apply_if_finite(transforms.sgd(0.1), 3)
    with pytest.raises(ValueError, match=r"must be the optax.ApplyIfFiniteState that .* makes; got tuple"):
        tx.step(jnp.ones(2), transforms.sgd(0.1).init(jnp.ones(2)), jnp.ones(2))
    for other in (transforms.sgd(0.1), transforms.trace(0.9)):
        with pytest.raises(ValueError, match=r"must be the .* got ApplyIfFiniteState.* go on with check_finite=True"):
            other.step(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


BYTES = {"adamw": 28 + 4, "norm first": 28 + 4}  # a parameter: the step's own, and the reduction's


@pytest.mark.parametrize("chip", chips.CHIPS)
@pytest.mark.parametrize("name", BYTES)
def test_a_compiled_check_reads_the_gradients_once_more(name, chip):
    tx, params = transforms.apply_if_finite(GUARDED[name](transforms), 3), jax.ShapeDtypeStruct(SIZE, jnp.float32)
    state = jax.eval_shape(tx.init, params)
    report = compiled_step(one_pass(tx), params, state, chip=chip)
    assert len(report.kernels) == 2
    assert not [i for i in report.extra if i.read + i.written > 4096]  # counts and flags
    assert report.donated_bytes >= 12 * SIZE[0] * SIZE[1]
    assert report.hbm_bytes <= BYTES[name] * SIZE[0] * SIZE[1] + 24 * 4096  # and scalars, a tile each
