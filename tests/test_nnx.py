"""The NNX layers against Linen's, Flax's own Dropout, and under transforms a plain module of the same state."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tiledops
from tiledops import linen
from tiledops.nnx import Axpy, LayerScale, Residual, ReZero, StochasticDepth

KEY = jax.random.key(0)

# float32 through a few layers of a few dozen terms each, summed in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


pytestmark = pytest.mark.usefixtures("reference")


@pytest.fixture
def no_kernels(monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("a kernel was traced")

    monkeypatch.setattr("tiledops.gates.axpy", refused)


def operands(shape=(3, 5), branch=np.float32, residual=np.float32, seed=0):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.standard_normal(shape), branch), jnp.asarray(random.standard_normal(shape), residual)


def call(layer, *args, **options):
    """`layer(...)`, compiled: the reference is a dozen operations, each compiled apart if not."""
    return nnx.jit(lambda layer, *args: layer(*args, **options))(layer, *args)


def same(got, wanted):
    oracle.assert_same_bits(got, np.asarray(wanted))


# The same as in Linen


@pytest.mark.parametrize("name", ["Axpy", "ReZero", "LayerScale", "StochasticDepth", "Residual"])
def test_names_arguments_and_defaults_are_linens(name):
    """But for what the flavours do differently in Flax too: rngs here, name and parent there, and in Dropout that
    `deterministic` is False here and open there."""
    ours, theirs = (
        {
            parameter.name: (parameter.kind, parameter.default)
            for parameter in inspect.signature(getattr(module, name).__init__).parameters.values()
            if parameter.name not in ("rngs", "parent", "name")
        }
        for module in (tiledops.nnx, linen)
    )
    if "deterministic" in ours:
        dropouts = [
            inspect.signature(kind.__init__).parameters["deterministic"].default for kind in (nnx.Dropout, nn.Dropout)
        ]
        assert [ours.pop("deterministic")[1], theirs.pop("deterministic")[1]] == dropouts
    assert ours == theirs


@pytest.mark.parametrize("dtype", [None, jnp.float32, "bfloat16"])
@pytest.mark.parametrize("residual_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("branch_dtype", [jnp.float32, jnp.bfloat16])
def test_results_are_linens_bit_for_bit(branch_dtype, residual_dtype, dtype):
    branch, residual = operands((6, 5), branch_dtype, residual_dtype)
    gain = jax.random.normal(KEY, (5,))

    for ours, theirs in [
        (Axpy(5, dtype=dtype, rngs=nnx.Rngs(0)), linen.Axpy(5, dtype=dtype)),
        (
            StochasticDepth(0.5, features=5, learnable=True, dtype=dtype, rngs=nnx.Rngs(0)),
            linen.StochasticDepth(0.5, features=5, learnable=True, dtype=dtype, deterministic=False),
        ),
    ]:
        ours.gain[...] = gain
        at_random = isinstance(ours, StochasticDepth)
        got = call(ours, branch, residual, **({"rngs": KEY} if at_random else {}))
        wanted = jax.jit(theirs.apply)(
            {"params": {"gain": gain}}, branch, residual, **({"rng": KEY} if at_random else {})
        )
        assert got.dtype == (dtype or residual_dtype)
        same(got, wanted)


def test_initial_parameters_are_linens():
    h = operands()[0]
    layers = [
        (ReZero(rngs=nnx.Rngs(0)), linen.ReZero()),
        (LayerScale(5, rngs=nnx.Rngs(0)), linen.LayerScale(5)),
        (LayerScale(5, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), linen.LayerScale(5, param_dtype=jnp.bfloat16)),
        (Axpy(learnable=False), linen.Axpy(learnable=False)),
        (StochasticDepth(0.5, deterministic=True), linen.StochasticDepth(0.5, deterministic=True)),
    ]
    for ours, theirs in layers:
        got = nnx.to_pure_dict(nnx.state(ours, nnx.Param))
        wanted = theirs.init(KEY, h, h).get("params", {})
        assert got.keys() == wanted.keys()
        jax.tree.map(same, got, dict(wanted))


def test_a_simulated_kernel_gives_the_same_bits():
    branch, residual = operands((9, 130), jnp.bfloat16)
    layer = Axpy(
        130,
        gain_init=nnx.initializers.normal(),
        config=tiledops.PipelineConfig(block=(8, 128), mode="simulate"),
        rngs=nnx.Rngs(0),
    )
    oracle.assert_same_bits(layer(branch, residual), oracle.axpy(layer.gain[...], branch, residual))
    gradient = nnx.grad(lambda layer: layer(branch, residual).sum())(layer).gain[...]
    oracle.assert_within(gradient, *oracle.da(layer.gain[...], branch, np.ones_like(residual)))


def test_a_fixed_gain_is_no_state():
    branch, residual = operands()
    for gain_init in (nnx.initializers.constant(0.25), nnx.with_partitioning(nnx.initializers.constant(0.25), ("m",))):
        layer = Axpy(gain_init=gain_init, learnable=False)
        assert not nnx.to_pure_dict(nnx.state(layer))
        oracle.assert_same_bits(call(layer, branch, residual), oracle.axpy(0.25, branch, residual))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda rngs: Axpy(4, rngs=rngs), ValueError, r"features=4 and shape \(3, 5\)"),
        (lambda rngs: Axpy(-1, rngs=rngs), ValueError, "features must be .*; got -1"),
        (Axpy, ValueError, "features must be .*; got Rngs. Other arguments go by their names"),
        (lambda rngs: Axpy(), TypeError, r"needs rngs.*try rngs=nnx.Rngs\(0\).*; got .*NoneType"),
        (lambda rngs: Axpy(gain_init=0.5, rngs=rngs), TypeError, "initializers.constant"),
        (lambda rngs: Axpy(dtype=jnp.float16, rngs=rngs), TypeError, "dtype must be float32 or bfloat16"),
        (lambda rngs: Axpy(param_dtype=jnp.float16, rngs=rngs), TypeError, "param_dtype must be float32 or bfloat16"),
        (
            lambda rngs: Axpy(gain_init=nnx.initializers.normal(), learnable=False, rngs=rngs),
            TypeError,
            "learnable=False .*constant",
        ),
        (lambda rngs: StochasticDepth(-0.1, rngs=rngs), ValueError, "from 0 to 1; got -0.1"),
        (lambda rngs: StochasticDepth(0.5, deterministic=None, rngs=rngs), ValueError, "needs deterministic"),
        (lambda rngs: StochasticDepth(None, rngs=rngs), TypeError, "rate must be a number from 0 to 1.*got None"),
        (lambda rngs: StochasticDepth(0.5), ValueError, r"it needs rngs.*got None.*eval\(\)"),
        (lambda rngs: StochasticDepth(0.5, rngs=KEY), TypeError, r"try nnx.Rngs\(0\).*or None; got .*PRNGKeyArray"),
        (lambda rngs: StochasticDepth(0.5, learnable=True, rngs=rngs["dropout"]), TypeError, "needs rngs"),
    ],
)
def test_what_is_wrong_is_said(make, error, message):
    with pytest.raises(error, match=message):
        make(nnx.Rngs(0))(*operands())


# Stochastic depth


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


# Transforms: one network with our gate and with a plain one, on the same state


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


def test_display_and_tabulate_show_the_layer_and_its_parameter():
    layer = LayerScale(5, rngs=nnx.Rngs(0))
    assert "LayerScale" in str(layer)
    assert "gain=Param" in str(layer)
    table = nnx.tabulate(layer, *operands(), console_kwargs={"width": 200, "no_color": True})
    (row,) = [line for line in table.splitlines() if "gain" in line]
    assert "LayerScale" in row
    assert "[5]" in row


# Bridges


@pytest.mark.usefixtures("no_kernels")
def test_the_bridge_initialises_linens_layers_without_a_kernel():
    layer = nnx.bridge.ToNNX(linen.LayerScale(5), rngs=nnx.Rngs(0)).lazy_init(*operands())
    np.testing.assert_array_equal(layer.gain[...], np.full(5, 1e-5, np.float32))


def test_bridges_give_the_same_bits():
    branch, residual = operands()
    theirs = nnx.bridge.ToNNX(linen.LayerScale(5), rngs=nnx.Rngs(0)).lazy_init(branch, residual)
    ours = LayerScale(5, rngs=nnx.Rngs(0))
    same(call(theirs, branch, residual), call(ours, branch, residual))
    wrapped = nnx.bridge.to_linen(LayerScale, 5)
    variables = jax.jit(wrapped.init)(KEY, branch, residual)
    assert jax.tree.map(jnp.shape, nn.unbox(variables)["params"]) == {"gain": (5,)}
    same(jax.jit(wrapped.apply)(variables, branch, residual), call(ours, branch, residual))


# Sharding


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_partitioned_gain_is_sharded_as_it_is_made(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    branch, residual = operands((8, 3, 4))
    wanted = oracle.axpy(1.0, branch, residual)
    gain_init = nnx.with_partitioning(nnx.initializers.ones, ("model",))
    with jax.set_mesh(mesh):
        layer = LayerScale(4, gain_init=gain_init, rngs=nnx.Rngs(0))
        assert layer.gain[...].sharding.spec == P("model")
        assert nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer))) == {"gain": P("model")}
        sharding = NamedSharding(mesh, P("data", None, "model"))
        x, y = jax.device_put((branch, residual), sharding)
        got = call(layer, x, y)
        assert got.sharding.is_equivalent_to(sharding, 3)
        oracle.assert_same_bits(got, wanted)
        logical = nnx.with_partitioning(nnx.initializers.ones, ("embed",), sharding_rules=(("embed", "model"),))
        layer = LayerScale(4, gain_init=logical, rngs=nnx.Rngs(0))
        assert layer.gain[...].sharding.spec == P("model")
