import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

import tiledops

SHAPES = [(), (5,), (17, 257), (3, 4, 130), (0, 7)]
DTYPES = [np.float32, ml_dtypes.bfloat16]


def leaf(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def summed(p, u):
    """p + u in float64, rounded to float32 and then to p's dtype, as the documentation says."""
    return (p.astype(np.float64) + u.astype(np.float64)).astype(np.float32).astype(p.dtype)


@pytest.mark.parametrize("update_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_is_rounded_once_to_the_parameters_dtype(shape, dtype, update_dtype):
    p, u = leaf(shape, dtype, 0), leaf(shape, update_dtype, 1)
    with tiledops.use_config(mode="reference"):
        got = tiledops.apply_updates({"w": p}, {"w": u})["w"]
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got), summed(p, u))


@pytest.mark.parametrize("dtype", DTYPES)
def test_simulated_kernels_give_the_same_bits(dtype):
    config = tiledops.PipelineConfig(block=(8, 128) if dtype == np.float32 else (16, 128), mode="simulate")
    params = {"w": leaf((17, 257), dtype, 0), "b": leaf((5,), dtype, 1), "s": leaf((), dtype, 2)}
    updates = {"w": leaf((17, 257), dtype, 3), "b": leaf((5,), dtype, 4), "s": leaf((), dtype, 5)}
    got = tiledops.apply_updates(params, updates, config=config)
    for name, p in params.items():
        np.testing.assert_array_equal(np.asarray(got[name]), summed(p, updates[name]), err_msg=name)


def test_trees_are_as_in_optax():
    params = {"a": [jnp.ones(3), None], "b": optax.MaskedNode(), "c": {}, "d": (jnp.zeros((0, 2)), 1.5)}
    updates = {"a": [jnp.ones(3), jnp.ones(2)], "b": optax.MaskedNode(), "c": {}, "d": (jnp.zeros((0, 2)), 0.25)}
    with tiledops.use_config(mode="reference"):
        got = tiledops.apply_updates(params, updates)
    wanted = optax.apply_updates(params, updates)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("empty", [{}, (), None])
def test_an_empty_tree_stays_empty(empty):
    assert tiledops.apply_updates(empty, empty) == empty


def test_each_leaf_is_one_kernel_that_writes_where_it_reads():
    params = {"w": jnp.ones((8, 128)), "b": jnp.ones(128)}
    config = tiledops.PipelineConfig(mode="simulate")
    jaxpr = jax.make_jaxpr(lambda p, u: tiledops.apply_updates(p, u, config=config))(params, params)
    kernels = list(kernels_of(jaxpr.jaxpr))
    # operands of each kernel: the update, the parameter
    assert [kernel.params["input_output_aliases"] for kernel in kernels] == [((1, 0),), ((1, 0),)]


def kernels_of(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for inner in jaxprs_in_params(equation.params):
            yield from kernels_of(inner)


@pytest.mark.parametrize(
    ("params", "updates", "error", "message"),
    [
        ({"a": {"w": np.ones(2, np.int32)}}, {"a": {"w": np.ones(2)}}, TypeError, r"params\['a'\]\['w'\].*int32.*Conv"),
        ([jnp.ones(2)], [jnp.ones(2, jnp.float16)], TypeError, r"updates\[0\].*float16.*astype\(jnp.bfloat16\)"),
        ({"w": jnp.ones(2)}, {"w": jnp.ones(2) * 1j}, TypeError, r"updates\['w'\].*complex64"),
        (
            {"w": jnp.ones(2)},
            {"w": jnp.ones(3)},
            ValueError,
            r"updates\['w'\] must have the shape.*\(2,\); got \(3,\)",
        ),
        ({"w": jnp.ones(2)}, {"w": None}, ValueError, r"every parameter needs an update; got None for updates\['w'\]"),
        ({"w": jnp.ones(2)}, {"v": jnp.ones(2)}, ValueError, "one tree structure; updates differs"),
    ],
)
def test_what_kernels_cannot_take_is_refused_by_its_path(params, updates, error, message):
    with pytest.raises(error, match=message):
        tiledops.apply_updates(params, updates)


def test_float64_is_refused():
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"params\['w'\].*float64.*astype\(jnp.float32\)"):
        tiledops.apply_updates({"w": jnp.ones(2, jnp.float64)}, {"w": jnp.ones(2, jnp.float32)})


def test_importing_tiledops_imports_neither_optax_nor_flax():
    check = "import sys, tiledops; assert tiledops.apply_updates; assert not {'optax', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.parametrize("step_size", [0.25, np.float32(0.25), 1], ids=["float", "NumPy", "int"])
@pytest.mark.parametrize("mode", ["reference", "simulate"])
def test_an_incremental_update_is_as_in_optax(mode, step_size):
    new = {"w": leaf((17, 257), np.float32, 0), "b": [leaf((5,), np.float32, 1), leaf((), np.float32, 2)], "n": None}
    old = {"w": leaf((17, 257), np.float32, 3), "b": [leaf((5,), np.float32, 4), leaf((), np.float32, 5)], "n": None}
    got = tiledops.incremental_update(new, old, step_size, config=tiledops.PipelineConfig(mode=mode))
    wanted = optax.incremental_update(new, old, step_size)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    # Three roundings, each of at most the largest value here, below 8.
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=0, atol=3 * 4 * 2.0**-23), got, wanted
    )


def test_an_average_keeps_its_dtype_and_its_place():
    new, old = {"w": jnp.ones((8, 128))}, {"w": jnp.ones((8, 128), jnp.bfloat16)}
    config = tiledops.PipelineConfig(mode="simulate")

    def average(new, old, rate):
        return tiledops.incremental_update(new, old, rate, config=config)

    assert jax.eval_shape(average, new, old, 0.5)["w"].dtype == jnp.bfloat16
    (kernel,) = kernels_of(jax.make_jaxpr(average)(new, old, 0.5).jaxpr)
    assert kernel.params["input_output_aliases"] == ((3, 0),)  # after two numbers and the new tensor


@pytest.mark.parametrize(
    ("new", "old", "error", "message"),
    [
        ({"w": jnp.ones(2, jnp.float16)}, {"w": jnp.ones(2)}, TypeError, r"new_tensors\['w'\].*float16"),
        ({"w": jnp.ones(2)}, {"w": jnp.ones(2, int)}, TypeError, r"old_tensors\['w'\].*int32"),
        ({"w": jnp.ones(2)}, {"v": jnp.ones(2)}, ValueError, "one tree structure; old_tensors differs"),
    ],
)
def test_an_average_of_what_kernels_cannot_take_is_refused(new, old, error, message):
    with pytest.raises(error, match=message):
        tiledops.incremental_update(new, old, 0.5)
