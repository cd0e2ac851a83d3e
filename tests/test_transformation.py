import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType
from optimizers import (
    CASES,
    assert_agree,
    compiled_step,
    gradients,
    halving,
    matrices,
    one_pass,
    pair,
    train,
    train_by_steps,
    tree,
    two_passes,
)

import tiledops
from tiledops import chips, compiled, transforms

CHAINS = {
    "one pass": lambda m: m.chain(m.add_decayed_weights(0.1, matrices), m.trace(0.9, nesterov=True), m.scale(-0.1)),
    "nested": lambda m: m.chain(m.chain(m.clip(0.5), m.trace(0.5)), m.chain(m.adamw(0.1))),
    "one": lambda m: m.chain(m.scale_by_learning_rate(halving)),
    "norm first": lambda m: m.chain(m.clip_by_global_norm(1.0), m.adamw(0.1)),
    "norm in the middle": lambda m: m.chain(m.trace(0.9), m.clip_by_global_norm(1.0), m.scale(-0.1)),
    "norm nested": lambda m: m.chain(m.trace(0.9), m.chain(m.clip_by_global_norm(1.0), m.scale(-0.1)), m.scale(0.5)),
    "Optax's first": lambda m: m.chain(optax.clip(0.5), m.sgd(0.1, 0.9)),
    "Optax's last": lambda m: m.chain(m.trace(0.9), optax.scale(-0.1)),
    "Optax's between": lambda m: m.chain(m.trace(0.9), optax.ema(0.5), m.scale(-0.1)),
    "nested in Optax's": lambda m: optax.chain(m.chain(m.trace(0.9), m.scale(-1.0)), optax.scale(0.1)),
}
STEPPED = {**CASES, **{name: make for name, make in CHAINS.items() if name != "nested in Optax's"}}


@pytest.fixture
def reference():
    with tiledops.use_config(mode="reference"):
        yield


@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)
def test_a_chain_agrees_with_optax(make, reference):
    assert_agree(train(make(transforms), tree(0)), train(make(optax), tree(0)))


@pytest.mark.parametrize("make", STEPPED.values(), ids=STEPPED)
def test_a_step_agrees_with_optax(make, reference):
    wanted = [(state, params) for _, state, params in train(make(optax), pair(0))]
    assert_agree(train_by_steps(make(transforms), pair(0)), wanted)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_simulated_step_gives_the_bits_of_the_reference(dtype):
    """Where every operation is a rounded a*x + y, with no quotient and no root."""
    tx = transforms.chain(transforms.add_decayed_weights(0.1), transforms.trace(0.9, True), transforms.scale(-0.3))
    params = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((17, 257)), dtype)}
    with tiledops.use_config(mode="reference"):
        wanted = train_by_steps(tx, params)
    with tiledops.use_config(mode="simulate", block=(16, 128)):
        got = train_by_steps(tx, params)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_a_simulated_adamw_step_agrees_with_optax():
    params = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((9, 130)), jnp.float32)}
    wanted = [(state, params) for _, state, params in train(optax.adamw(0.1), params)]
    with tiledops.use_config(mode="simulate", block=(8, 128)):
        assert_agree(train_by_steps(transforms.adamw(0.1), params), wanted)


def kernels(fn, *args):
    """The kernels that a function calls: their names, and which operands' buffers their results take."""

    def of(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                yield equation.params["name"], [out for _, out in equation.params["input_output_aliases"]]
            else:
                for inner in jaxprs_in_params(equation.params):
                    yield from of(inner)

    return list(of(jax.make_jaxpr(fn)(*args).jaxpr))


def test_a_step_is_one_kernel_that_writes_state_and_parameters_in_place():
    params = jnp.ones((8, 128))
    tx = transforms.chain(transforms.add_decayed_weights(0.1), transforms.sgd(0.1, 0.9))
    assert kernels(tx.step, params, tx.init(params), params) == [("tiledops_decayed_weights_trace_scale_apply", [0, 1])]
    tx = transforms.adamw(0.1)
    assert kernels(tx.step, params, tx.init(params), params) == [
        ("tiledops_adam_decayed_weights_scale_apply", [0, 1, 2])
    ]


def test_a_new_pass_begins_only_where_it_must():
    params = jnp.ones((8, 128))
    tx = CHAINS["norm in the middle"](transforms)
    names = [name for name, _ in kernels(tx.step, params, tx.init(params), params)]
    assert names == ["tiledops_trace", "tiledops_square", "tiledops_scale_scale_apply"]
    tx = CHAINS["Optax's between"](transforms)
    names = [name for name, _ in kernels(tx.step, params, tx.init(params), params)]
    assert names == ["tiledops_trace", "tiledops_scale_apply"]


def test_a_mask_chooses_links_leaf_by_leaf():
    params = {"kernel": jnp.ones((8, 128)), "bias": jnp.ones(128)}
    tx = transforms.adamw(0.1, mask=matrices)
    names = {name for name, _ in kernels(tx.step, params, tx.init(params), params)}
    assert names == {"tiledops_adam_decayed_weights_scale_apply", "tiledops_adam_scale_apply"}


@pytest.mark.parametrize("name", ["one pass", "norm first", "Optax's between"])
def test_a_jitted_step_compiles_once(name, reference):
    """No dtype, weak type or structure changes on the way, and a schedule changes nothing."""
    start = {"w": jnp.ones((3, 5), jnp.bfloat16), "v": jnp.ones(5)}
    tx = transforms.chain(CHAINS[name](transforms), transforms.scale_by_learning_rate(halving))
    step, params, state = jax.jit(tx.step), start, tx.init(start)
    for i in range(3):
        params, state = step(gradients(start, i), state, params)
    assert step._cache_size() == 1


def test_equal_leaves_share_one_kernel_in_the_lowered_program():
    params = {f"layer {i}": jnp.ones((8, 128)) for i in range(4)}
    tx = transforms.sgd(0.1, 0.9)
    step = jax.jit(tx.step)
    text = compiled.lower_for(step, params, tx.init(params), params).as_text()
    assert text.count("tpu_custom_call") == 1


def test_extra_arguments_reach_the_members_that_take_them(reference):
    def make(m):
        return m.chain(m.scale(2.0), optax.polyak_sgd())

    params, grads = jnp.ones(3), jnp.full(3, 0.5)
    wanted, _ = make(optax).update(grads, make(optax).init(params), params, value=2.0)
    tx = make(transforms)
    got, _ = tx.update(grads, tx.init(params), params, value=2.0)
    np.testing.assert_array_equal(got, wanted)
    stepped, _ = tx.step(grads, tx.init(params), params, value=2.0)
    np.testing.assert_array_equal(stepped, optax.apply_updates(params, wanted))


def test_a_transformation_is_still_a_pair():
    init, update = transforms.chain(transforms.trace(0.9), transforms.scale(0.5))
    state = init(jnp.ones(2))
    np.testing.assert_array_equal(update(jnp.ones(2), state)[0], np.full(2, 0.5))


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda tx: jax.tree.map(lambda f: f, tx), lambda tx: tx._replace(init=tx.init)],
    ids=["copy", "deepcopy", "tree.map", "_replace"],
)
def test_a_copy_is_whole(copied):
    """Libraries copy what they configure: `step` and what `chain` joins come along."""
    params, tx = jnp.ones((8, 128)), transforms.sgd(0.5, 0.9)
    again = copied(tx)
    for ours in (again, transforms.chain(again, transforms.scale(1.0))):
        state = ours.init(params)
        assert len(kernels(ours.step, params, state, params)) == 1
        np.testing.assert_array_equal(ours.update(params, state, params)[0], np.full((8, 128), -0.5))
        np.testing.assert_array_equal(ours.step(params, state, params)[0], np.full((8, 128), 0.5))


def test_an_update_put_in_anothers_place_is_stepped():
    tx = transforms.sgd(0.5)
    twice = tx._replace(update=lambda g, state, params=None, **extra: tx.update(2 * g, state, params, **extra))
    np.testing.assert_array_equal(twice.step(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))[0], np.zeros(2))


def test_an_empty_chain_changes_nothing_but_applies():
    tx = transforms.chain()
    assert tx.init(jnp.ones(2)) == ()
    np.testing.assert_array_equal(tx.step(jnp.ones(2), (), jnp.ones(2))[0], np.full(2, 2.0))


def fsdp(mesh):
    """Parameters sharded over the first axis, as their types say it."""
    params = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((8, 128)), jnp.float32), "b": jnp.ones(8)}
    return jax.tree.map(lambda p: jax.device_put(p, jax.NamedSharding(mesh, jax.P("data"))), params)


@pytest.mark.parametrize("mode", ["reference", "simulate"])
def test_sharded_parameters_stay_where_they_are(mode):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    tx = transforms.chain(transforms.clip_by_global_norm(1.0), transforms.sgd(0.1, 0.9))
    with jax.set_mesh(mesh), tiledops.use_config(mode=mode):
        params = fsdp(mesh)
        new, state = jax.jit(tx.step)(params, tx.init(params), params)
    plain = jax.tree.map(np.asarray, params)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9))
    updates, wanted_state = theirs.update(plain, theirs.init(plain), plain)
    assert_agree(jax.tree.map(np.asarray, (new, state)), (optax.apply_updates(plain, updates), wanted_state))
    for leaf in jax.tree.leaves((new, state)):
        assert leaf.sharding.spec == jax.P("data", *[None] * (leaf.ndim - 1))


SCALARS = {"alone": {"gain": ()}, "first": {"gain": (), "vector": (5,)}, "last": {"bias": (5,), "gain": ()}}


@pytest.mark.parametrize("mode", ["reference", "simulate"])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name)
@pytest.mark.parametrize("shapes", SCALARS.values(), ids=SCALARS)
def test_scalars_count_in_the_norm_on_a_mesh(shapes, kind, mode):
    """ReZero's gain is one; small leaves share the kernel that sums squares, whichever comes first."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    params = {name: jnp.full(shape, 3.0) for name, shape in shapes.items()}
    extra = {} if kind == AxisType.Explicit else {"specs": jax.P()}
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    wanted = optax.apply_updates(params, theirs.update(params, theirs.init(params), params)[0])
    with jax.set_mesh(mesh), tiledops.use_config(mode=mode):
        tx = transforms.chain(transforms.clip_by_global_norm(1.0), transforms.sgd(0.1))
        step = jax.jit(functools.partial(tx.step, **extra))
        got, _ = step(params, tx.init(params), params)
        _, state = tx.step(
            jax.tree.map(lambda p: p * jnp.inf, params), tx.init(params), params, check_finite=True, **extra
        )
    assert_agree(got, wanted)
    assert not state.last_finite


@pytest.mark.parametrize("mode", ["reference", "simulate"])
def test_an_empty_leaf_stays_where_it_is(mode):
    """So that a scan over steps takes it."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    tx = transforms.adam(0.1)
    with jax.set_mesh(mesh), tiledops.use_config(mode=mode):
        params = {"none": jax.device_put(jnp.ones((0, 8)), jax.P(None, "data"))}
        steps = jax.jit(lambda carry: jax.lax.scan(lambda c, _: (tx.step(c[0], c[1], c[0]), None), carry, length=2)[0])
        new, state = steps((params, tx.init(params)))
    for leaf in (new["none"], state[0].mu["none"], state[0].nu["none"]):
        assert leaf.sharding.spec == jax.P(None, "data")


def test_on_auto_axes_specs_say_how_parameters_are_sharded():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    tx = transforms.sgd(0.1, 0.9)
    with jax.set_mesh(mesh), tiledops.use_config(mode="simulate"):
        params = fsdp(mesh)
        with pytest.raises(ValueError, match=r"grads\['b'\]: .*Auto axes .*Either say how .*\(specs=, a tree of"):
            jax.jit(tx.step)(params, tx.init(params), params)
        step = jax.jit(lambda g, s, p: tx.step(g, s, p, specs=jax.P("data")))
        new, _ = step(params, tx.init(params), params)
        applied = jax.jit(lambda p: tiledops.apply_updates(p, p, specs={"w": jax.P("data"), "b": jax.P("data")}))(
            params
        )
    # p - 0.1*p: two operations of one rounding each, on either side
    np.testing.assert_allclose(new["w"], 0.9 * np.asarray(params["w"], np.float64), rtol=4 * 2.0**-24)
    np.testing.assert_array_equal(applied["w"], 2 * np.asarray(params["w"]))


SIZE = (8192, 8192)  # larger than VMEM, where XLA could hide a copy
BYTES = {"sgd": 20, "adamw": 28}  # gradient, state and parameter read, state and parameter written, 4 bytes each


@pytest.mark.parametrize("chip", chips.CHIPS)
@pytest.mark.parametrize("name", BYTES)
def test_a_compiled_step_moves_no_byte_twice(name, chip):
    """What XLA's own fused step moves, in place, with nothing beside the kernel."""

    def make(m):
        return m.adamw(0.1) if name == "adamw" else m.chain(m.add_decayed_weights(0.1), m.sgd(0.1, 0.9))

    tx, params = make(transforms), jax.ShapeDtypeStruct(SIZE, jnp.float32)
    state = jax.eval_shape(tx.init, params)
    ours, xla = (compiled_step(step, params, state, chip=chip) for step in (one_pass(tx), two_passes(make(optax))))
    assert len(ours.kernels) == 1
    assert not [i for i in ours.extra if i.read + i.written > 4096]  # the count's increment, a scalar
    assert ours.donated_bytes == xla.donated_bytes >= (BYTES[name] - 4) // 2 * SIZE[0] * SIZE[1]
    scalars = 16 * 4096  # hyperparameters, a tile each
    assert xla.hbm_bytes - scalars <= ours.hbm_bytes <= BYTES[name] * SIZE[0] * SIZE[1] + scalars
