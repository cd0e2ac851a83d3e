import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import assert_agree, compiled_step, gradients, one_pass
from test_cost import costs
from test_transformation import kernels

import tiledops
from tiledops import chips, packing, transforms

SIZES = (5, 128, 300, 1, 2048, 1001)
F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


def vectors(dtype=jnp.float32, sizes=SIZES):
    rng = np.random.default_rng(0)
    tree = {f"v{n}": jnp.asarray(rng.standard_normal(n), dtype) for n in sizes}
    return {**tree, "scalar": jnp.asarray(rng.standard_normal(), dtype)}


def momentum(m=transforms, accumulator_dtype=None):
    """Every operation is a rounded a*x + y."""
    return m.chain(m.add_decayed_weights(0.1), m.trace(0.9, True, accumulator_dtype), m.scale(-0.3))


def names(tx, params, grads=None):
    return [name for name, _ in kernels(tx.step, params if grads is None else grads, tx.init(params), params)]


def test_vectors_lie_at_whole_tiles_of_every_dtype():
    pack = packing.Pack((5, 128, 300), (F32, BF16), (BF16,))
    assert pack.offsets == (0, 256, 512, 1024)
    assert pack.extent == packing.SLAB
    assert pack.buffer_bytes == (4 + 2 + 2) * packing.SLAB
    assert pack.hbm_bytes == (4 + 2 + 2) * 433
    assert packing.Pack((5, 128, 300), (F32,), (F32,)).offsets == (0, 128, 256, 640)


@pytest.mark.parametrize("chip", chips.CHIPS)
def test_a_pack_fits_into_vmem(chip):
    info = chips.chip_info(chip)
    packs = packing.split([100_000] * 500, 7, 28, info)
    assert [i for pack in packs for i in pack] == list(range(500))
    assert max(map(len, packs)) < packing.TRANSFERS // 7
    for pack in packs:
        wanted = packing.Pack((100_000,) * len(pack), (F32,) * 4, (F32,) * 3).buffer_bytes
        assert wanted <= 0.75 * chips.scoped_vmem_bytes(info)


def test_layers_that_repeat_make_packs_that_are_alike():
    """GPT-2 small's vectors through AdamW: packs of 9 leaves would be of nine kinds."""
    layer = [768] * 6 + [2304, 3072]
    packs = packing.split([*layer * 12, 768, 768], 7, 28, chips.chip_info("v5e"))
    assert packs == [list(range(k, min(k + 8, 98))) for k in range(0, 98, 8)]


def test_a_pack_has_so_many_transfers_at_most():
    """Mosaic compiles more of them in more than proportionate time."""
    packs = packing.split([5] * 500, 7, 28, chips.chip_info("v5e"))
    assert [i for pack in packs for i in pack] == list(range(500))
    assert max(map(len, packs)) == packing.TRANSFERS // 7


@pytest.mark.parametrize(
    ("dtype", "state"), [(F32, None), (BF16, None), (BF16, F32)], ids=["float32", "bfloat16", "mixed"]
)
def test_a_shared_kernel_gives_the_bits_of_the_reference(dtype, state):
    params, tx = vectors(dtype), momentum(accumulator_dtype=state)
    grads = gradients(params, 0)
    with tiledops.use_config(mode="reference"):
        wanted = tx.step(grads, tx.init(params), params)
    with tiledops.use_config(mode="simulate"):
        assert names(tx, params) == ["tiledops_decayed_weights_nesterov_trace_scale_apply"]
        got = tx.step(grads, tx.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_a_shared_sum_leaves_out_what_lies_between(dtype):
    tx = transforms.chain(transforms.clip_by_global_norm(1.0), transforms.scale(-0.1))
    params = vectors(dtype)
    with tiledops.use_config(mode="simulate"):
        assert names(tx, params) == ["tiledops_square", "tiledops_scale_scale_apply"]
        got = tx.step(params, tx.init(params), params)[0]
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.scale(-0.1))
    exact = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    wanted = optax.apply_updates(exact, theirs.update(exact, theirs.init(exact))[0])
    assert_agree(got, jax.tree.map(lambda p: p.astype(dtype), wanted))


def test_every_leaf_keeps_its_own_result_through_adam():
    params = vectors()
    with tiledops.use_config(mode="simulate"):
        tx = transforms.adamw(0.1)
        got = tx.step(gradients(params, 0), tx.init(params), params)
    theirs = optax.adamw(0.1)
    updates, state = theirs.update(gradients(params, 0), theirs.init(params), params)
    assert_agree(got, (optax.apply_updates(params, updates), state))


def test_only_small_vectors_with_the_same_to_do_share():
    params = {"a": jnp.ones(5), "b": jnp.ones(7), "c": jnp.ones(9, jnp.bfloat16), "w": jnp.ones((8, 128))}
    tx = transforms.adamw(0.1)
    assert len(names(tx, params)) == 3  # two vectors of one dtype, the third, the matrix
    assert len(names(tx, {"a": jnp.ones(5), "b": jnp.ones(1_000_000)})) == 2
    assert len(names(transforms.adamw(0.1, mask={"a": True, "b": False}), {"a": jnp.ones(5), "b": jnp.ones(7)})) == 2
    assert len(names(transforms.scale(jnp.ones(5)), {"a": jnp.ones(5), "b": jnp.ones(5)})) == 2
    with tiledops.use_config(block=(8, 128)):  # the user's own tiles
        assert len(names(tx, {"a": jnp.ones(5), "b": jnp.ones(7)})) == 2
    with tiledops.use_config(mode="reference"):
        assert not names(transforms.adamw(0.1), params)


def test_all_results_are_offered_their_operands_buffers():
    params, tx = vectors(), transforms.adamw(0.1)
    ((_, aliased),) = kernels(tx.step, params, tx.init(params), params)
    assert aliased == list(range(3 * len(params)))


def test_the_cost_estimate_is_exact():
    params = {"a": jnp.ones(5, jnp.bfloat16), "b": jnp.ones(300, jnp.bfloat16)}
    tx = transforms.trace(0.9)
    (cost,) = costs(tx.step, params, tx.init(params), params)
    assert cost == ("tiledops_trace_apply", 3 * 305, 0, 5 * 2 * 305)  # g, t and p read, t' and p' written


def test_under_vmap_each_leaf_has_its_kernel():
    params = {"a": jnp.arange(10.0).reshape(2, 5), "b": jnp.arange(6.0).reshape(2, 3)}
    tx = transforms.chain(transforms.clip_by_global_norm(1.0), transforms.trace(0.9), transforms.scale(-0.5))
    state = jax.vmap(tx.init)(params)
    with tiledops.use_config(mode="simulate"):
        got = jax.vmap(tx.step)(params, state, params)
    with tiledops.use_config(mode="reference"):
        wanted = jax.vmap(tx.step)(params, state, params)
    assert_agree(got, wanted)


def test_a_step_is_differentiable():
    tx = momentum()
    params = {"a": jnp.arange(5.0), "b": jnp.arange(3.0)}

    def loss(params):
        new, _ = tx.step(params, tx.init(params), params)
        return sum(jnp.sum(p**2) for p in jax.tree.leaves(new))

    with tiledops.use_config(mode="simulate"):
        got = jax.grad(loss)(params)
    with tiledops.use_config(mode="reference"):
        wanted = jax.grad(loss)(params)
    assert_agree(got, wanted)


def test_shards_are_packed_by_how_they_are_cut():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    specs = {"a": jax.P("data"), "b": jax.P("data"), "c": jax.P(), "d": jax.P()}
    tx = transforms.chain(transforms.clip_by_global_norm(1.0), transforms.trace(0.9), transforms.scale(-0.5))
    with jax.set_mesh(mesh), tiledops.use_config(mode="simulate"):
        plain = {"a": np.arange(10.0), "b": np.arange(6.0), "c": np.arange(5.0), "d": np.float64(3.0)}
        params = {k: jax.device_put(jnp.asarray(plain[k], jnp.float32), specs[k]) for k in specs}
        assert names(tx, params) == ["tiledops_square"] * 2 + ["tiledops_scale_trace_scale_apply"] * 2
        new, state = jax.jit(tx.step)(params, tx.init(params), params)
    for name in "ab":
        assert new[name].sharding.spec == state[1].trace[name].sharding.spec == jax.P("data")
    plain = jax.tree.map(np.float32, plain)
    with tiledops.use_config(mode="reference"):
        wanted = tx.step(plain, tx.init(plain), plain)
    assert_agree(jax.tree.map(np.asarray, (new, state)), jax.tree.map(np.asarray, wanted))


@pytest.mark.parametrize("chip", chips.CHIPS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_a_compiled_pack_is_one_kernel_in_place(dtype, chip):
    tx = transforms.adamw(0.1, mu_dtype=jnp.float32)
    params = {str(n): jax.ShapeDtypeStruct((n,), dtype) for n in (768, 2304, 5, 1001)}
    state = jax.eval_shape(tx.init, params)
    report = compiled_step(one_pass(tx), params, state, chip=chip)
    assert len(report.kernels) == 1
    assert not report.extra
    assert report.temporary_bytes == 0
