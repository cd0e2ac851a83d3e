"""The NNX layers against Linen's: their signatures, sums, parameters, errors, display, bridges and sharding."""

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
from layers import KEY, call, operands, same

import tiledops
from tiledops import linen
from tiledops.nnx import Axpy, LayerScale, ReZero, StochasticDepth

pytestmark = pytest.mark.usefixtures("reference")


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


# Display


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
