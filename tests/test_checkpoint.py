"""Under jax.checkpoint, by every policy: what is saved is not run again, and the numbers stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from programs import kernels

import tiledops
from tiledops import compiled

P = jax.checkpoint_policies
HOST = {"offload_src": "device", "offload_dst": "pinned_host"}

# How often the forward kernel runs in a gradient of two blocks: the second block's input is the first one's result,
# which is saved or computed again. (The second result itself is in nobody's derivative.)
POLICIES: dict[str, tuple[Any, int]] = {
    "default": (None, 3),
    "nothing": (P.nothing_saveable, 3),
    "everything": (P.everything_saveable, 2),
    "dots": (P.dots_saveable, 3),
    "dots_without_batch": (P.dots_with_no_batch_dims_saveable, 3),
    "only_these_names": (P.save_only_these_names("residual"), 2),
    "any_names_but_these": (P.save_any_names_but_these("residual"), 3),
    "anything_except_these_names": (P.save_anything_except_these_names("other"), 2),
    "both_policies": (P.save_from_both_policies(P.dots_saveable, P.save_only_these_names("residual")), 2),
    "offload_names": (
        P.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=["residual"], **HOST
        ),
        2,
    ),
    "offload_dots": (P.offload_dot_with_no_batch_dims("device", "pinned_host"), 3),
}


def operands() -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    shapes = ((), (130, 130), (9, 130))
    return tuple(jnp.asarray(random.standard_normal(shape) / 10, jnp.float32) for shape in shapes)


def loss(op: Any, policy: Any = None, *, remat: bool = True) -> Any:
    def blocks(a: Any, w: Any, x: Any) -> Any:
        h = checkpoint_name(op(a, jnp.sin(x @ w), x), "residual")
        return op(a, jnp.cos(h @ w), h)

    checkpointed = jax.checkpoint(blocks, policy=policy) if remat else blocks
    return lambda *operands: (checkpointed(*operands) ** 2).sum()


@pytest.mark.parametrize("mode", ["simulate", "tpu"])
@pytest.mark.parametrize("name", POLICIES)
def test_how_often_the_kernel_runs(name: str, mode: str) -> None:
    policy, forwards = POLICIES[name]
    with tiledops.use_config(mode=mode):
        traced = jax.make_jaxpr(jax.grad(loss(tiledops.axpy, policy), (0, 1, 2)))(*operands())
    assert kernels(traced) == {"tiledops_axpy": forwards, "tiledops_scale_and_dot": 2}


@pytest.mark.parametrize("name", ["default", "only_these_names", "offload_names", "offload_dots"])
def test_how_often_it_runs_once_compiled(name: str) -> None:
    """XLA doesn't merge what is computed again with what was computed first."""
    policy, forwards = POLICIES[name]
    report = compiled.compile_for(jax.grad(loss(tiledops.axpy, policy), (0, 1, 2)), *operands())
    assert Counter(kernel.name for kernel in report.kernels) == {"tiledops_axpy": forwards, "tiledops_scale_and_dot": 2}


@pytest.mark.parametrize("mode", ["reference", "simulate"])
@pytest.mark.parametrize("name", POLICIES)
def test_the_same_gradients(name: str, mode: str, detectors: list[Any]) -> None:
    policy, forwards = POLICIES[name]
    gradients = jax.grad(loss(tiledops.axpy, policy), (0, 1, 2))
    with tiledops.use_config(mode=mode, block=(8, 128)):
        # See the next test: what offloads is simulated without jit.
        got = (gradients if mode == "simulate" and "offload" in name else jax.jit(gradients))(*operands())
    expected = jax.grad(loss(lambda a, x, y: a * x + y, remat=False), (0, 1, 2))(*operands())
    for d, other in zip(got, expected, strict=True):
        # Through two matmuls and two sums, of 130 and 1170 terms: reassociated at 20 ulp of the largest entry
        np.testing.assert_allclose(d, other, rtol=0, atol=2e-5 * float(jnp.abs(other).max()))
    assert len(detectors) == (forwards + 2 if mode == "simulate" else 0)


def test_jax_offloads_nothing_beside_an_ordered_effect() -> None:
    """In one jitted program: in such a program a policy that offloads is for the other modes."""

    def beside(x: Any) -> Any:
        io_callback(lambda: None, None, ordered=True)
        return jax.device_put(x, jax.memory.Space.Host)

    with pytest.raises(ValueError, match="safe_zip"):
        jax.jit(beside)(jnp.ones(4))


@pytest.mark.parametrize("mode", ["reference", "simulate"])
def test_a_scan_over_checkpointed_layers(mode: str) -> None:
    random = np.random.default_rng(1)
    a, x = (jnp.asarray(random.standard_normal(s), jnp.float32) for s in ((3,), (9, 130)))

    def deep(op: Any) -> Any:
        layer = jax.checkpoint(lambda y, a: (op(a, jnp.sin(y), y), None), prevent_cse=False)
        return lambda a, x: (jax.lax.scan(layer, x, a)[0] ** 2).sum()

    with tiledops.use_config(mode=mode, block=(8, 128)):
        got = jax.jit(jax.grad(deep(tiledops.axpy), (0, 1)))(a, x)
    for d, other in zip(got, jax.grad(deep(lambda a, x, y: a * x + y), (0, 1))(a, x), strict=True):
        np.testing.assert_allclose(d, other, rtol=0, atol=2e-5 * float(jnp.abs(other).max()))


def test_a_fixed_gain_leaves_nothing_to_run_again() -> None:
    """Its derivative needs no activation at all."""
    _, _, x = operands()
    with tiledops.use_config(mode="tpu"):
        traced = jax.make_jaxpr(jax.grad(lambda x: jax.checkpoint(lambda x: tiledops.axpy(0.5, x, x))(x).sum()))(x)
    assert kernels(traced) == {"tiledops_axpy": 1, "tiledops_scale": 1}
