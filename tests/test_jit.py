"""Under jax.jit: nothing is compiled twice, donated operands are taken, options are static."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BY_NAME
from programs import fresh

import tiledops
from tiledops import compiled, stream


@pytest.mark.parametrize("name", ["lesson", "merged_feature", "column_example", "vector_bf16", "rank0"])
def test_another_gain_compiles_nothing(name: str) -> None:
    case = BY_NAME[name]
    a, x, y, g = case.operands()

    @jax.jit
    def differentiated(a: Any, x: Any, y: Any, g: Any) -> Any:
        out, pullback = jax.vjp(tiledops.axpy, a, x, y)
        return out, pullback(g)

    with tiledops.use_config(mode="reference"):
        differentiated(a, x, y, g)
        out, (_, dx, _) = differentiated(-a, x, y, g)
    assert differentiated._cache_size() == 1
    oracle.assert_same_bits(out, oracle.axpy(-a, x, y))
    oracle.assert_same_bits(dx, oracle.dx(-a, x, g))


@pytest.mark.parametrize("name", ["lesson", "merged_feature"])
def test_the_simulator_is_compiled_once(name: str) -> None:
    case = BY_NAME[name]
    a, x, y, _ = case.operands()
    op = fresh(tiledops.axpy)
    with tiledops.use_config(mode="simulate", block=case.block):
        for gain in (a, -a, 2 * a):
            oracle.assert_same_bits(op(gain, x, y), oracle.axpy(gain, x, y))
    assert op._cache_size() == 1


@pytest.mark.parametrize("gain", ["number", "feature", "example"])
def test_a_gain_is_an_operand_of_the_program_for_tpu(gain: str) -> None:
    """Of one program, whatever its value: traced once, and lowered to the same text."""
    of_shape = {"number": (), "feature": (130,), "example": (9, 1)}[gain]
    traces, x = [], jax.ShapeDtypeStruct((9, 130), jnp.float32)

    @jax.jit
    def differentiated(a: Any, x: Any) -> Any:
        traces.append(a)
        return jax.value_and_grad(lambda a, x: tiledops.axpy(a, x, x).sum(), (0, 1))(a, x)

    values = (0.5, -2.0) if gain == "number" else (np.full(of_shape, v, np.float32) for v in (0.5, -2.0))
    with tiledops.use_config(mode="tpu"):
        one, other = (differentiated.trace(value, x).lower(lowering_platforms=("tpu",)).as_text() for value in values)
    assert len(traces) == 1
    assert one == other


@pytest.mark.parametrize("donated", [(), (2,)], ids=["kept", "donated"])
def test_a_kernel_is_traced_once(donated: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it may overwrite y or not, which only lowering knows."""
    traces, launch = [], stream._launch
    monkeypatch.setattr(stream, "_launch", lambda *args, **specs: traces.append(args) or launch(*args, **specs))
    a, x = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((24, 1025), jnp.float32)
    jax.clear_caches()
    compiled.lower_for(fresh(tiledops.axpy), a, x, x, donate_argnums=donated)
    assert len(traces) == 1


def test_a_block_that_does_not_fit_is_refused_when_the_program_is_traced() -> None:
    x = jax.ShapeDtypeStruct((65536, 65536), jnp.float32)
    with tiledops.use_config(mode="tpu", block=(8192, 8192)), pytest.raises(ValueError, match="bytes of VMEM"):
        jax.jit(lambda x: tiledops.axpy(0.5, x, x)).trace(x)


def test_numbers_share_one_program() -> None:
    x = jnp.ones((3, 5))
    op = fresh(tiledops.axpy)
    with tiledops.use_config(mode="reference"):
        for gain in (0.5, 1.5, -2.5):
            np.testing.assert_array_equal(op(gain, x, x), np.full((3, 5), gain + 1))
    assert op._cache_size() == 1


def test_eager_and_jitted_give_the_same_bits() -> None:
    a, x, y, _ = BY_NAME["feature"].operands()
    with tiledops.use_config(mode="simulate", block=(8, 128)):
        oracle.assert_same_bits(fresh(tiledops.axpy)(a, x, y), np.asarray(tiledops.axpy(a, x, y)))


def test_options_are_static_arguments() -> None:
    a, x, y, _ = BY_NAME["lesson"].operands()
    op = fresh(tiledops.axpy, static_argnames=("config", "spec"))
    for _ in range(2):  # an equal config is the same config
        out = op(a, x, y, config=tiledops.PipelineConfig(block=(16, 128), mode="reference"), spec=jax.P("data"))
    assert op._cache_size() == 1
    oracle.assert_same_bits(out, oracle.axpy(a, x, y))


@pytest.mark.parametrize("mode", ["reference", "simulate"])
@pytest.mark.parametrize("name", ["lesson", "bf16", "vector"])
def test_a_donated_y_is_taken(name: str, mode: str) -> None:
    case = BY_NAME[name]
    a, x, y, _ = case.operands()
    given = jnp.asarray(y)
    with tiledops.use_config(mode=mode, block=case.block):
        out = fresh(tiledops.axpy, donate_argnums=2)(a, x, given)
    assert given.is_deleted()
    oracle.assert_same_bits(out, oracle.axpy(a, x, y))


@pytest.mark.parametrize("shape", [(1024, 512), (1001, 3001), (5000,), (16, 7, 512)], ids=str)
def test_a_donated_y_is_written_in_place_on_tpu(shape: tuple[int, ...]) -> None:
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    report = compiled.compile_for(functools.partial(tiledops.axpy, 2.0), x, x, donate_argnums=1)
    assert [kernel.name for kernel in report.kernels] == ["tiledops_axpy"]
    assert report.extra == ()
    assert report.donated_bytes == report.output_bytes
    assert report.temporary_bytes < 4096
