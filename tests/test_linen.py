"""The Linen layers against NumPy: their sums, parameters, errors, initialisation and sharding."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layers import BF16, CLOSE, F32, KEY, Block, Plain, apply, operands

import tiledops
from tiledops.linen import Axpy, LayerScale, Residual, ReZero, StochasticDepth

pytestmark = pytest.mark.usefixtures("reference")


# The layer


@pytest.mark.parametrize("dtype", [None, jnp.float32, "bfloat16"])
@pytest.mark.parametrize("residual_dtype", [F32, BF16])
@pytest.mark.parametrize("branch_dtype", [F32, BF16])
def test_the_sum_is_rounded_once_to_the_residuals_dtype_or_the_layers(branch_dtype, residual_dtype, dtype):
    branch, residual = operands(branch=branch_dtype, residual=residual_dtype)
    gain = np.random.default_rng(1).standard_normal(5).astype(F32)
    to = jnp.dtype(dtype or residual_dtype)
    x, y = (branch if dtype is None else branch.astype(to)), residual.astype(to)
    got = apply(Axpy(5, dtype=dtype), {"params": {"gain": gain}}, branch, residual)
    oracle.assert_same_bits(got, oracle.axpy(gain, x, y))


@pytest.mark.parametrize(("features", "dtype"), [(None, F32), (5, F32), (5, BF16)])
def test_the_gain_multiplies_in_float32(features, dtype):
    branch, residual = operands(branch=BF16, residual=BF16)
    layer = Axpy(features, gain_init=nn.initializers.normal(), param_dtype=dtype)
    variables = layer.init(KEY, branch, residual)
    gain = np.asarray(variables["params"]["gain"])
    assert gain.shape == (() if features is None else (5,))
    assert gain.dtype == dtype
    oracle.assert_same_bits(apply(layer, variables, branch, residual), oracle.axpy(gain, branch, residual))


def test_a_simulated_kernel_gives_the_same_bits():
    branch, residual = operands((9, 130), BF16, F32)
    layer = Axpy(
        130,
        gain_init=nn.initializers.normal(),
        config=tiledops.PipelineConfig(block=(8, 128), mode="simulate"),
    )
    variables = layer.init(KEY, branch, residual)
    gain = variables["params"]["gain"]
    oracle.assert_same_bits(apply(layer, variables, branch, residual), oracle.axpy(gain, branch, residual))
    gradient = jax.grad(lambda v: apply(layer, v, branch, residual).sum())(variables)["params"]["gain"]
    oracle.assert_within(gradient, *oracle.da(gain, branch, np.ones_like(residual)))


def test_gains_start_as_they_are_named():
    branch, residual = operands()
    starts = [
        (Axpy(), F32(1)),
        (ReZero(), F32(0)),
        (LayerScale(5), np.full(5, 1e-5, F32)),
        (ReZero(5), np.zeros(5, F32)),
    ]
    for layer, start in starts:
        np.testing.assert_array_equal(layer.init(KEY, branch, residual)["params"]["gain"], start)


def test_a_fixed_gain_is_no_parameter():
    branch, residual = operands()
    layer = Axpy(gain_init=nn.initializers.constant(0.25), learnable=False)
    assert layer.init(KEY, branch, residual) == {}
    oracle.assert_same_bits(apply(layer, {}, branch, residual), oracle.axpy(F32(0.25), branch, residual))
    partitioned = Axpy(5, gain_init=nn.with_partitioning(nn.initializers.ones, ("model",)), learnable=False)
    oracle.assert_same_bits(apply(partitioned, {}, branch, residual), oracle.axpy(F32(1), branch, residual))


def test_the_gain_is_an_attribute_of_the_bound_layer():
    assert ReZero(3).bind({"params": {"gain": jnp.arange(3.0)}}).gain[2] == 2.0


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (Axpy(4), ValueError, r"features=4 and shape \(3, 5\)"),
        (Axpy(0), ValueError, "features must be .*; got 0"),
        (Axpy(True), ValueError, "features must be .*; got True"),
        (Axpy(gain_init=0.5), TypeError, "initializers.constant"),
        (Axpy(dtype=jnp.float16), TypeError, "dtype must be float32 or bfloat16; got .*float16"),
        (Axpy(param_dtype=jnp.float16), TypeError, "param_dtype must be float32 or bfloat16; got .*float16"),
        (Axpy(gain_init=nn.initializers.normal(), learnable=False), TypeError, "learnable=False .*constant"),
        (StochasticDepth(1.5), ValueError, "from 0 to 1; got 1.5"),
        (StochasticDepth(np.float32(1.5)), ValueError, "from 0 to 1; got .*1.5"),
        (StochasticDepth(None), TypeError, "rate must be a number from 0 to 1.*got None"),
        (StochasticDepth(jnp.ones(3), deterministic=False), ValueError, r"one number.*got shape \(3,\)"),
        (StochasticDepth(0.5), ValueError, "deterministic"),
    ],
)
def test_what_is_wrong_is_said(layer, error, message):
    with pytest.raises(error, match=message):
        layer.init(KEY, *operands())


def test_a_dtype_casts_lists_and_integers_too():
    out, _ = Axpy(dtype=jnp.bfloat16).init_with_output(KEY, [1, 2], np.array([3, 4]))
    oracle.assert_same_bits(out, np.array([4, 6], BF16))


def test_wrong_operands_are_named_as_the_layer_names_them():
    branch, residual = operands()
    for initializing in (True, False):
        run = (
            Axpy().init_with_output
            if initializing
            else lambda key, *args: Axpy().apply({"params": {"gain": 1.0}}, *args)
        )
        with pytest.raises(ValueError, match=r"branch and residual .*\(3, 4\) and \(3, 5\)"):
            run(KEY, branch[:, :4], residual)
        with pytest.raises(TypeError, match="branch must be float32 or bfloat16; got float16"):
            run(KEY, branch.astype(np.float16), residual)
        with pytest.raises(TypeError, match="residual must be a float32"):
            run(KEY, branch, None)


# Initialisation


@pytest.mark.usefixtures("no_kernels")
def test_initialisation_traces_no_kernel():
    branch, residual = operands(branch=BF16)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, h):
            h = Residual(nn.Dense(5), LayerScale(5, gain_init=nn.initializers.ones))(h)
            h = nn.remat(Residual)(nn.Dense(5), StochasticDepth(0.5, deterministic=False))(h)
            layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            return layers(ReZero)(h, None)[0]

    out, variables = Net().init_with_output(KEY, residual)
    assert out.shape == residual.shape
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, jax.eval_shape(Net().init, KEY, residual))
    assert "ReZero" in Net().tabulate(KEY, residual)
    got, _ = Axpy(gain_init=nn.initializers.constant(3.0)).init_with_output(KEY, branch, residual)
    np.testing.assert_allclose(got, oracle.axpy(3.0, branch, residual), rtol=oracle.F32_ULP, atol=oracle.F32_ULP)


def test_initialisation_takes_no_longer_than_a_plain_models():
    """By more than the 0.2 s that a user would notice. In the process's own time, whatever else the machine does."""

    class Net(nn.Module):
        gate: Any

        @nn.compact
        def __call__(self, h):
            for _ in range(16):
                h = self.gate()(nn.Dense(5)(h), h)
            return h

    def seconds(gate):
        jax.clear_caches()
        start = time.process_time()
        jax.block_until_ready(Net(gate).init(KEY, operands()[0]))
        return time.process_time() - start

    with tiledops.use_config(mode="simulate"):  # what a laptop would do by default, and take a second to trace
        ours, plain = map(min, zip(*((seconds(ReZero), seconds(Plain)) for _ in range(2)), strict=True))
    assert ours < plain + 0.2


def test_tabulate_shows_the_layer_and_its_parameter():
    table = nn.tabulate(LayerScale(5), KEY, console_kwargs={"width": 200, "no_color": True})(*operands())
    (row,) = [line for line in table.splitlines() if "gain" in line]
    assert "LayerScale" in row
    assert "[5]" in row


# Residual


def test_residual_hands_the_blocks_arguments_through():
    h = operands()[0]
    block = Residual(lambda h, factor, *, shift: h * factor - shift, Axpy(gain_init=nn.initializers.constant(3.0)))
    variables = block.init(KEY, h, 2.0, shift=h)
    oracle.assert_same_bits(apply(block, variables, h, 2.0, shift=h), oracle.axpy(3.0, h, h))


def test_residual_leaves_a_block_its_place_among_the_parameters():
    """As any wrapper of Linen's: what a compact method makes is named there, else by the attribute."""

    class Net(nn.Module):
        wrapped: bool

        @nn.compact
        def __call__(self, h):
            body = nn.Dense(5)
            return Residual(body, ReZero())(h) if self.wrapped else body(h)

    h = operands()[0]
    plain, wrapped = (Net(wrapped).init(KEY, h)["params"] for wrapped in (False, True))
    assert set(wrapped) == {"Dense_0", "ReZero_0"}
    jax.tree.map(np.testing.assert_array_equal, plain["Dense_0"], wrapped["Dense_0"])
    assert set(Residual(nn.Dense(5), ReZero()).init(KEY, h)["params"]) == {"body", "gate"}


# Sharding


def test_partitioning_metadata():
    branch, residual = operands()
    layer = LayerScale(5, gain_init=nn.with_partitioning(nn.initializers.ones, ("model",)))
    variables = layer.init(KEY, branch, residual)
    assert nn.get_partition_spec(variables) == {"params": {"gain": P("model")}}
    oracle.assert_same_bits(apply(layer, variables, branch, residual), oracle.axpy(1.0, branch, residual))
    logical = LayerScale(5, gain_init=nn.with_logical_partitioning(nn.initializers.ones, ("embed",)))
    specs = nn.get_partition_spec(logical.init(KEY, branch, residual))
    assert nn.logical_to_mesh(specs, (("embed", "model"),)) == {"params": {"gain": P("model")}}
    scanned = nn.scan(
        lambda layer, h, _: (layer(h, h), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=2,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    stacked = nn.init(lambda layer, h: scanned(layer, h, None), layer)(KEY, residual)
    assert nn.get_partition_spec(stacked) == {"params": {"gain": P("layers", "model")}}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_partitioned_gain_is_placed_and_applied_as_a_plain_modules(kind):
    """`nn.with_partitioning` in both. Inside an Explicit mesh Flax itself refuses to initialise (its constraint asserts
    there), so that there variables are made outside, and placed by `nn.get_partition_spec`."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    branch, residual = operands((8, 4))
    gain_init = nn.with_partitioning(nn.initializers.normal(1.0), ("model",))
    outcomes = []
    for gate in (Axpy(4, gain_init=gain_init), Plain(4, gain_init=gain_init)):
        variables = jax.jit(gate.init)(KEY, branch, residual)
        shardings = nn.get_sharding(variables, mesh)
        assert shardings["params"]["gain"].spec == P("model")
        with jax.set_mesh(mesh):
            x, y = jax.device_put((branch, residual), NamedSharding(mesh, P("data", "model")))
            try:
                jax.jit(gate.init, out_shardings=shardings)(KEY, x, y)
                initialised = True
            except AssertionError:
                initialised = False
            placed = jax.device_put(variables, shardings)
            out, gradient = jax.jit(
                jax.value_and_grad(lambda v: jnp.sum(jnp.cos(gate.apply(v, x, y))))  # noqa: B023 run here and now
            )(placed)
            applied = gate.apply(nn.unbox(placed), x, y)
        outcomes.append((initialised, applied.sharding.spec, gradient["params"]["gain"].value.sharding.spec))
        outcomes[-1] += (out, gradient["params"]["gain"].value)
    ours, plain = outcomes
    assert ours[:3] == plain[:3]
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, **CLOSE), ours[3:], plain[3:])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_arrays(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    branch, residual = operands((8, 3, 4))
    layer = StochasticDepth(0.5, features=4, learnable=True, deterministic=False)
    variables = layer.init(KEY, branch, residual)
    wanted = apply(layer, variables, branch, residual, rng=KEY)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("data", None, "model"))
        x, y = jax.device_put((branch, residual), sharding)
        assert layer.init(KEY, x, y).keys() == variables.keys()
        for per_example in (True, False):
            got = apply(layer.clone(per_example=per_example), variables, x, y, rng=KEY)
            assert got.sharding.is_equivalent_to(sharding, 3)
            if per_example:
                oracle.assert_same_bits(got, np.asarray(wanted))
