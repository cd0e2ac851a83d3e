"""The Linen layers against NumPy, Flax's own Dropout, and under each transform a plain module of the same variables."""

import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tiledops
from tiledops import chips, compiled
from tiledops.linen import Axpy, LayerScale, Residual, ReZero, StochasticDepth

F32, BF16 = np.float32, ml_dtypes.bfloat16
KEY = jax.random.key(0)

# float32 through a few layers of a few dozen terms each, summed in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


pytestmark = pytest.mark.usefixtures("reference")


def operands(shape=(3, 5), branch=F32, residual=F32, seed=0):
    random = np.random.default_rng(seed)
    return random.standard_normal(shape).astype(branch), random.standard_normal(shape).astype(residual)


def apply(layer, variables, *args, **options):
    """`layer.apply`, compiled: the reference is a dozen operations, each compiled apart if not."""
    return jax.jit(lambda variables, *args: layer.apply(variables, *args, **options))(variables, *args)


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


@pytest.fixture
def no_kernels(monkeypatch):
    def refused(*args, **kwargs):
        raise AssertionError("a kernel was traced")

    monkeypatch.setattr("tiledops.gates.axpy", refused)


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


# Stochastic depth


def kept_by_dropout(rate, key, shape, axes):
    """The examples that Flax's own Dropout keeps."""
    drop = nn.Dropout(rate, broadcast_dims=axes, deterministic=False)
    return np.asarray(drop.apply({}, jnp.ones(shape), rngs={"dropout": key})) != 0


@pytest.mark.parametrize("shape", [(64,), (64, 3), (64, 2, 3)])
def test_it_drops_the_examples_that_dropout_drops(shape):
    branch, residual = operands(shape, branch=BF16)
    got = apply(StochasticDepth(0.25, deterministic=False), {}, branch, residual, rngs={"dropout": KEY})
    kept = kept_by_dropout(0.25, KEY, shape, range(1, len(shape)))
    assert 0 < kept.mean() < 1
    survivors = oracle.axpy(F32(1) / F32(0.75), branch, residual)
    oracle.assert_same_bits(got, np.where(kept, survivors, residual))


def test_or_the_whole_batch():
    branch, residual = operands((4, 3))
    layer = StochasticDepth(0.5, per_example=False, deterministic=False)
    run = jax.jit(lambda key: layer.apply({}, branch, residual, rngs={"dropout": key}))
    outcomes = set()
    for key in jax.random.split(KEY, 8):
        got = run(key)
        kept = kept_by_dropout(0.5, key, branch.shape, (0, 1)).all()
        oracle.assert_same_bits(got, oracle.axpy(F32(2), branch, residual) if kept else residual)
        outcomes.add(bool(kept))
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("start", "mode"), [(1.0, "reference"), (-2.0, "reference"), (0.0, "reference"), (-2.0, "simulate")]
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_dropped_branch_leaves_no_trace(dtype, start, mode):
    """Neither in the result, which is the residual to its signed zeros, nor in any gradient."""
    branch, residual = operands((16, 3), dtype, dtype)
    residual[:, 0], residual[:, 1] = 0.0, -0.0
    layer = StochasticDepth(
        0.5,
        features=3,
        gain_init=nn.initializers.constant(start),
        learnable=True,
        config=tiledops.PipelineConfig(mode=mode),
    )
    kept = kept_by_dropout(0.5, KEY, branch.shape, (1,))[:, 0]
    poisoned = branch.copy()
    poisoned[~kept] = np.array([np.nan, np.inf, -np.inf], dtype)

    def run(gain, branch, residual):
        return apply(layer, {"params": {"gain": gain}}, branch, residual, deterministic=False, rngs={"dropout": KEY})

    gain = jnp.full(3, start)
    got, gradients = jax.vjp(run, gain, poisoned, residual)
    oracle.assert_same_bits(got[~kept], residual[~kept])
    oracle.assert_same_bits(got[kept], oracle.axpy(F32(2 * start), branch, residual)[kept])
    da, dx, dy = gradients(jnp.ones_like(got))
    oracle.assert_same_bits(dy, np.ones_like(residual))
    np.testing.assert_array_equal(
        np.asarray(dx), np.where(kept[:, None], dtype(2 * start), dtype(0)) * np.ones(3, dtype)
    )
    exact, tolerance = oracle.da(gain, branch[kept], np.ones_like(branch[kept]))
    oracle.assert_within(da, 2 * exact, 2 * tolerance)


@pytest.mark.parametrize(
    ("per_example", "learnable", "features", "chip"),
    [
        *((*choice, "v5e") for choice in itertools.product([True, False], [True, False], [None, 1024])),
        *((True, True, 1024, chip) for chip in chips.CHIPS if chip != "v5e"),
    ],
)
def test_dropping_takes_no_pass_of_its_own(per_example, learnable, features, chip):
    """Of arrays too large for the chip's VMEM, in which XLA may otherwise hold one between two passes."""
    array = jax.ShapeDtypeStruct((65536, 1024), BF16)
    options = {"learnable": learnable, "features": features, "deterministic": False}
    layer = StochasticDepth(0.2, per_example=per_example, **options)

    def forward(key, branch, residual, gain):
        variables = {"params": {"gain": gain}} if learnable else {}
        return layer.apply(variables, branch, residual, rng=jax.random.wrap_key_data(key))

    def pullback(key, *operands):
        return jax.vjp(lambda *operands: forward(key, *operands), *operands)[1]

    operands = jax.ShapeDtypeStruct((2,), jnp.uint32), array, array, jnp.ones(features or ())
    with tiledops.use_config(mode="tpu"):
        forwards = compiled.compile_for(forward, *operands, chip=chip)
        saved = compiled.lower_for(pullback, *operands, chip=chip).out_info
        backwards = compiled.compile_for(lambda pull, g: pull(g)[0], saved, array, chip=chip)
        if learnable:
            backwards = compiled.compile_for(lambda pull, g: pull(g)[::2], saved, array, chip=chip)
    size = 2 * array.size
    for report, arrays in ((forwards, 3), (backwards, 3 if learnable else 2)):
        # And the mask, a float32 an example, its random bits and the gain.
        assert arrays * size < report.hbm_bytes < 1.02 * arrays * size
        assert (len(report.kernels), report.extra) == (1, ())


def test_nothing_is_dropped_when_deterministic_or_at_rate_zero():
    branch, residual = operands()
    whole = oracle.axpy(1.0, branch, residual)
    oracle.assert_same_bits(apply(StochasticDepth(0.5), {}, branch, residual, deterministic=True), whole)
    oracle.assert_same_bits(apply(StochasticDepth(0.5, deterministic=True), {}, branch, residual), whole)
    oracle.assert_same_bits(apply(StochasticDepth(0.0, deterministic=False), {}, branch, residual), whole)


def test_everything_is_dropped_at_rate_one():
    branch, residual = operands()
    layer = StochasticDepth(1.0, features=5, learnable=True, deterministic=False)

    def run(gain, branch):  # without a random key, which Dropout doesn't need for it either
        return apply(layer, {"params": {"gain": gain}}, branch, residual)

    got, gradients = jax.vjp(run, jnp.full(5, 3.0), branch)
    oracle.assert_same_bits(got, residual)
    for gradient in gradients(jnp.ones_like(got)):
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


def test_random_keys_are_as_dropouts():
    branch, residual = operands((64, 1))
    layer = StochasticDepth(0.5, deterministic=False, rng_collection="depth")
    by_stream = apply(layer, {}, branch, residual, rngs={"depth": KEY})
    assert np.any(by_stream != apply(layer, {}, branch, residual, rngs={"depth": jax.random.key(1)}))
    oracle.assert_same_bits(
        apply(layer, {}, branch, residual, rng=KEY),
        np.asarray(apply(StochasticDepth(0.5, deterministic=False), {}, branch, residual, rng=KEY)),
    )
    with pytest.raises(Exception, match="depth"):
        apply(layer, {}, branch, residual)


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


# Transforms: one network with our gate and with a plain one, on the same variables


class Plain(nn.Module):
    """What somebody writes by hand."""

    features: int | None = None
    gain_init: Any = nn.initializers.ones

    @nn.compact
    def __call__(self, branch, residual):
        gain = self.param("gain", self.gain_init, () if self.features is None else (self.features,))
        return gain * branch + residual


class Block(nn.Module):
    gate: Any

    @nn.compact
    def __call__(self, h, _=None):
        return self.gate(gain_init=nn.initializers.normal(1.0), name="gate")(nn.Dense(5)(jnp.sin(h)), h), None


def scanned(gate):
    return nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(gate)


def rematerialised(gate):
    return nn.remat(Block)(gate)


def rematerialised_scan(gate):
    return nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(gate)


def mapped(gate):
    return nn.vmap(Block, variable_axes={"params": None}, split_rngs={"params": False})(gate)


def mapped_parameters(gate):
    return nn.vmap(Block, variable_axes={"params": 0}, split_rngs={"params": True})(gate)


def jitted(gate):
    return nn.jit(Block)(gate)


class Shared(nn.Module):
    gate: Any

    def setup(self):
        self.inner = self.gate(5, gain_init=nn.initializers.normal(1.0))
        nn.share_scope(self, self.inner)

    def __call__(self, h, _=None):
        return self.inner(jnp.sin(h), h), None


TRANSFORMS = [Block, scanned, rematerialised, rematerialised_scan, mapped, mapped_parameters, jitted, Shared]


def loss_and_gradients(model, variables, h):
    def loss(variables, h):
        out, _ = model.apply(variables, h)
        return jnp.sum(jnp.cos(out)), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(variables, h)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__)
def test_transforms_as_a_plain_module(transform):
    h = operands()[0]
    variables = jax.jit(transform(Plain).init)(KEY, h)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, jax.eval_shape(transform(Axpy).init, KEY, h))
    ours, plain = (loss_and_gradients(transform(gate), variables, h) for gate in (Axpy, Plain))
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, **CLOSE), ours, plain)


@pytest.mark.parametrize("transform", [rematerialised_scan, mapped_parameters], ids=lambda f: f.__name__)
def test_transforms_in_simulation(transform):
    h = operands()[0]
    variables = jax.jit(transform(Plain).init)(KEY, h)
    plain = loss_and_gradients(transform(Plain), variables, h)
    with tiledops.use_config(mode="simulate"):
        ours = loss_and_gradients(transform(Axpy), variables, h)
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, **CLOSE), ours, plain)


def test_a_scan_over_layers_of_growing_rate():
    """The linear rule of the paper: each layer has its own rate, an array that the scan hands it."""
    h = operands((32, 5))[0]

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, h, rate):
            out = StochasticDepth(rate)(jnp.ones_like(h), jnp.zeros_like(h), deterministic=False)
            return h, out[:, 0]

    layers = nn.scan(Layer, variable_axes={}, split_rngs={"dropout": True})
    rates = jnp.array([0.0, 0.5, 1.0])
    _, gains = layers().apply({}, h, rates, rngs={"dropout": KEY})
    np.testing.assert_array_equal(gains[0], np.ones(32))
    assert set(np.unique(gains[1])) == {0.0, 2.0}
    np.testing.assert_array_equal(gains[2], np.zeros(32))


@pytest.mark.parametrize("transform", [nn.remat, nn.jit], ids=lambda f: f.__name__)
def test_a_block_that_is_run_again_drops_the_same_examples(transform):
    """`deterministic` by position is static, as Dropout's is."""
    branch, residual = operands((32, 5))

    layer = transform(StochasticDepth, static_argnums=(3,))(0.5)

    def loss(branch):
        out = layer.apply({}, branch, residual, False, rngs={"dropout": KEY})
        return jnp.sum(jnp.cos(out)), out

    gradient, out = jax.jit(jax.grad(loss, has_aux=True))(branch)
    kept = np.any(np.asarray(out) != residual, axis=1, keepdims=True)
    assert 0 < kept.mean() < 1
    np.testing.assert_allclose(gradient, np.where(kept, -2 * np.sin(2 * branch + residual), 0), **CLOSE)


def test_a_vmap_over_examples_draws_for_each():
    branch, residual = operands((32, 5))
    mapped = nn.vmap(StochasticDepth, variable_axes={}, split_rngs={"dropout": True})
    layer = mapped(0.5, per_example=False, deterministic=False)
    got = np.asarray(apply(layer, {}, branch, residual, rngs={"dropout": KEY}))
    dropped = (got == residual).all(1)
    assert 0 < dropped.mean() < 1
    oracle.assert_same_bits(got[~dropped], oracle.axpy(F32(2), branch, residual)[~dropped])


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
