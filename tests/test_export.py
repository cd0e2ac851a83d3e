"""Shapes alone, ahead of time, and for another machine: eval_shape, lower, compile, jax.export."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BY_NAME, CASES, Case
from jax import export
from programs import differentiated, fresh

import tiledops
from tiledops import compiled


def structs(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in case.operands())


def names(module: str) -> list[str]:
    """The Mosaic kernels of a StableHLO module, in order."""
    return re.findall(r'kernel_name = "(\w+)"', module)


@pytest.mark.parametrize("mode", ["reference", "simulate", "tpu"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_eval_shape(case: Case, mode: str) -> None:
    """Nothing is lowered, so that even mode "tpu" answers."""
    a, x, y, _ = structs(case)
    with tiledops.use_config(mode=mode, block=case.block):
        results = jax.eval_shape(differentiated, *structs(case))
    assert [(r.shape, r.dtype) for r in results] == [(s.shape, s.dtype) for s in (y, a, x, y)]


@pytest.mark.parametrize("mode", ["reference", "simulate"])
def test_lowered_and_compiled_ahead_of_time(mode: str) -> None:
    case = BY_NAME["feature"]
    a, x, y, g = case.operands()
    with tiledops.use_config(mode=mode, block=case.block):
        executable = fresh(differentiated).lower(*structs(case)).compile()
    out, da, dx, dy = executable(a, x, y, g)  # outside of the settings that it was traced in
    oracle.assert_same_bits(out, oracle.axpy(a, x, y))
    oracle.assert_within(da, *oracle.da(a, x, g))
    oracle.assert_same_bits(dx, oracle.dx(a, x, g))
    oracle.assert_same_bits(dy, g)


@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_lowered_for_a_tpu_that_is_not_attached(chip: str) -> None:
    """The mesh's devices say what the program is for: the mode is "tpu" without a word."""
    lowered = compiled.lower_for(differentiated, *structs(BY_NAME["merged_feature"]), chip=chip)
    assert names(lowered.as_text()) == ["tiledops_axpy", "tiledops_scale_and_dot"]


@pytest.mark.parametrize("name", ["lesson", "merged_feature", "vector_bf16", "column_example"])
def test_exported_for_tpu_from_a_cpu(name: str) -> None:
    case = BY_NAME[name]
    with tiledops.use_config(mode="tpu"):
        exported = export.export(fresh(differentiated), platforms=["tpu"])(*structs(case))
    assert exported.platforms == ("tpu",)
    assert sorted(names(exported.mlir_module())) == ["tiledops_axpy", "tiledops_scale_and_dot"]
    assert [(a.shape, a.dtype) for a in exported.in_avals] == [(s.shape, s.dtype) for s in structs(case)]
    with pytest.raises(ValueError, match="platform"):  # JAX's own refusal to run it here
        jax.jit(exported.call)(*case.operands())


def test_a_stored_program_compiles_for_tpu() -> None:
    """Exported, written, read: its kernels are found in what the TPU compiler makes of it, its derivative's too."""
    case = BY_NAME["even"]
    a, x, y, _ = structs(case)
    with tiledops.use_config(mode="tpu"):
        stored = export.export(fresh(tiledops.axpy), platforms=["tpu"])(a, x, y).serialize(vjp_order=1)
    exported = export.deserialize(stored)
    report = compiled.compile_for(exported.call, a, x, y)
    assert [kernel.name for kernel in report.kernels] == ["tiledops_axpy"]
    report = compiled.compile_for(jax.grad(lambda a, x, y: exported.call(a, x, y).sum()), a, x, y)
    assert [kernel.name for kernel in report.kernels] == ["tiledops_scale_and_dot"]  # of all operands, as exported


def test_the_gradient_of_an_exported_program() -> None:
    case = BY_NAME["feature"]
    a, x, y, g = map(jnp.asarray, case.operands())
    with tiledops.use_config(mode="reference"):
        exported = export.export(fresh(tiledops.axpy))(a, x, y)
        out, pullback = jax.vjp(exported.call, a, x, y)  # exports the derivative
    da, dx, dy = pullback(g)
    oracle.assert_same_bits(out, oracle.axpy(*case.operands()[:3]))
    oracle.assert_within(da, *oracle.da(*case.operands()[:2], case.operands()[3]))
    oracle.assert_same_bits(dx, oracle.dx(a, x, case.operands()[3]))
    oracle.assert_same_bits(dy, np.asarray(g))


def test_the_simulator_is_not_for_export() -> None:
    """It is callbacks into this very process, and JAX says so."""
    a, x, y, _ = structs(BY_NAME["one_tile"])
    with tiledops.use_config(mode="simulate"):
        exporting = export.export(fresh(tiledops.axpy))
        with pytest.raises(NotImplementedError, match="serialization of host_callbacks"):
            exporting(a, x, y)


@pytest.mark.parametrize("platforms", [["tpu"], ["cpu", "tpu"]], ids="+".join)
def test_the_simulator_is_not_for_other_platforms(platforms: list[str]) -> None:
    """Off TPU it is the default, so that who exports for TPU meets it there."""
    a, x, y, _ = structs(BY_NAME["one_tile"])
    exporting = export.export(fresh(tiledops.axpy), platforms=platforms)
    with pytest.raises(RuntimeError, match=r"mode='simulate' runs kernels on the host .* Use mode='tpu'"):
        exporting(a, x, y)


@pytest.mark.parametrize("mode", ["simulate", "tpu"])
def test_symbolic_shapes_have_no_kernel(mode: str) -> None:
    (rows,) = export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 128), jnp.float32)
    with tiledops.use_config(mode=mode):
        exporting = export.export(fresh(lambda x: tiledops.axpy(2.0, x, x)), platforms=["tpu"])
        with pytest.raises(TypeError, match=r"got the symbolic \(rows, 128\).*mode='reference'"):
            exporting(x)


def test_symbolic_shapes_in_the_reference() -> None:
    (rows,) = export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 128), jnp.float32)
    with tiledops.use_config(mode="reference"):
        exported = export.export(fresh(jax.grad(lambda a, x: tiledops.axpy(a, x, x).sum())))(jnp.float32(2), x)
    assert exported.call(jnp.float32(2), jnp.ones((3, 128))) == 384


def test_tpu_for_another_platform_is_refused() -> None:
    a, x, y, _ = structs(BY_NAME["one_tile"])
    with tiledops.use_config(mode="tpu"):
        exporting = export.export(fresh(tiledops.axpy), platforms=["cpu", "tpu"])
        with pytest.raises(RuntimeError, match="mode='tpu' runs on TPU only"):
            exporting(a, x, y)
