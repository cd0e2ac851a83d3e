"""Every check of user input: the rule, what was got, the way out; nothing runs before it, and nothing breaks after."""

from __future__ import annotations

import decimal
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tiledops
from tiledops import PipelineConfig, chips, partitioning

SHAPE = (3, 5)
X = np.ones(SHAPE, np.float32)
REFERENCE = PipelineConfig(mode="reference")


@pytest.fixture(autouse=True)
def nothing_runs_and_nothing_breaks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """A refused call reaches no block function; a good call after it works as ever."""
    ran = []
    run = partitioning.stream
    monkeypatch.setattr(partitioning, "stream", lambda *args: (ran.append(args), run(*args))[1])
    yield
    assert not ran or "accepted" in request.node.name
    np.testing.assert_array_equal(tiledops.axpy(2.0, X, X, config=REFERENCE), 3 * X)


def refused(error: type[Exception], *words: str, a: Any = 1.0, x: Any = X, y: Any = X) -> None:
    """`axpy` refuses, eagerly and where JAX traces the other operands, in a message with all these words."""
    with pytest.raises(error) as eager:
        tiledops.axpy(a, x, y)
    with pytest.raises(error) as traced:
        jax.jit(lambda z: tiledops.axpy(a, z if x is X else x, z if y is X else y))(X)
    for refusal in (eager, traced):
        message = str(refusal.value)
        for word in words:
            assert word in message, f"{word!r} is not in {message!r}"


# x and y

WRONG_DTYPES = [np.float16, np.int8, np.int32, np.uint32, np.bool_, np.complex64, ml_dtypes.float8_e4m3fn]


@pytest.mark.parametrize("operand", ["x", "y"])
@pytest.mark.parametrize("dtype", WRONG_DTYPES)
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_other_dtypes(operand: str, dtype: Any, make: Any) -> None:
    name = np.dtype(dtype).name
    refused(TypeError, f"{operand} must be float32 or bfloat16", f"got {name}", "astype", **{operand: make(X, dtype)})


def test_float16s_way_out_is_bfloat16() -> None:
    refused(TypeError, "x must be float32 or bfloat16; got float16", "astype(jnp.bfloat16)", x=X.astype(np.float16))


@pytest.mark.parametrize("mode", ["tpu", "simulate", "reference"])
def test_float16_is_refused_in_every_mode(mode: str) -> None:
    with pytest.raises(TypeError, match="float16"):
        tiledops.axpy(1.0, X.astype(np.float16), X, config=PipelineConfig(mode=mode))


def test_numbers_that_jax_does_not_have() -> None:
    records = np.zeros((9, 130), [("re", "f4"), ("im", "f4")])
    refused(TypeError, "x must be float32 or bfloat16", "got [('re'", "astype", x=records)
    refused(TypeError, "y must be float32 or bfloat16", f"got {np.dtype(np.longdouble)}", "astype", y=np.longdouble(X))


def test_float64_where_64_bit_types_are_on() -> None:
    """They would hang Pallas for ever, so that this test ends at all."""
    wide = X.astype(np.float64)
    with chips.x64(True):
        for operand in ("a", "x", "y"):
            value = np.ones(5) if operand == "a" else wide
            refused(TypeError, f"{operand} must be float32 or bfloat16; got float64", "float32)", **{operand: value})
            refused(TypeError, f"{operand} must be", "got float64", **{operand: jnp.asarray(value)})


def test_float64_of_numpy_is_accepted_where_jax_itself_narrows_it() -> None:
    out = tiledops.axpy(1.0, X.astype(np.float64), X.astype(np.float64), config=REFERENCE)
    assert out.dtype == jnp.float32


@pytest.mark.parametrize("operand", ["x", "y"])
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([[1.0]], "list"),
        ((1.0,), "tuple"),
        (None, "NoneType"),
        ("ones", "str"),
        ({"x": 1.0}, "dict"),
        (jax.ShapeDtypeStruct(SHAPE, jnp.float32), "ShapeDtypeStruct"),
        (2, "int"),
        (True, "bool"),
        (1j, "complex"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_array(operand: str, value: Any, kind: str) -> None:
    refused(TypeError, f"{operand} must be a float32 or bfloat16 array", "got", kind, **{operand: value})


@pytest.mark.parametrize("operand", ["a", "x", "y"])
def test_keys(operand: str) -> None:
    refused(TypeError, f"{operand} must be", "float32 or bfloat16", "got key", **{operand: jax.random.key(0)})
    refused(TypeError, f"{operand} must be", "float32 or bfloat16", "got uint32", **{operand: jax.random.PRNGKey(0)})


@pytest.mark.parametrize("operand", ["a", "x", "y"])
@pytest.mark.parametrize("value", [np.array(["one"]), np.array([None]), np.array(["2020"], "M8[Y]")], ids=str)
def test_numpy_arrays_of_no_numbers(operand: str, value: np.ndarray) -> None:
    refused(TypeError, f"{operand} must be", "float32 or bfloat16", f"got {value.dtype}", **{operand: value})


@pytest.mark.parametrize("other", [(3, 6), (5, 3), (5,), (1, 5), (3, 1), (), (1, 3, 5), (3, 5, 1)], ids=str)
def test_shapes_that_differ(other: tuple[int, ...]) -> None:
    rule = "x and y must have the same shape"
    refused(ValueError, rule, f"got {SHAPE} and {other}", "broadcast_to", y=np.ones(other, np.float32))
    refused(ValueError, rule, f"got {other} and {SHAPE}", "broadcast_to", x=np.ones(other, np.float32))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (3, 0, 5)], ids=str)
def test_nothing(shape: tuple[int, ...]) -> None:
    refused(ValueError, "must not be empty", f"got shape {shape}", x=np.ones(shape, "f4"), y=np.ones(shape, "f4"))


def test_accepted_mixed_dtypes() -> None:
    narrow = X.astype(jnp.bfloat16)
    for x, y in ((narrow, X), (X, narrow), (narrow, narrow)):
        assert tiledops.axpy(1.0, x, y, config=REFERENCE).dtype == y.dtype


@pytest.mark.parametrize("rank", range(7))
def test_accepted_ranks(rank: int) -> None:
    x = np.ones((2,) * rank, np.float32)
    assert jax.eval_shape(lambda x: tiledops.axpy(1.0, x, x, config=REFERENCE), x).shape == x.shape


def test_accepted_inputs_of_numpy() -> None:
    """Also in an order of memory that isn't JAX's; the result is JAX's array."""
    x = np.asfortranarray(np.arange(15, dtype=np.float32).reshape(SHAPE))
    for operand in (x, x[::-1, ::-1], np.asarray(x, jnp.bfloat16)):
        out = tiledops.axpy(np.float32(2), operand, operand, config=REFERENCE)
        assert isinstance(out, jax.Array)
        np.testing.assert_array_equal(out, 3 * operand)


def test_accepted_python_floats_make_an_array_of_rank_zero() -> None:
    out = tiledops.axpy(2.0, 3.0, 4.0, config=REFERENCE)
    assert (out.shape, out.dtype, float(out)) == ((), jnp.float32, 10.0)


# The gain


@pytest.mark.parametrize("gain", [True, False, np.True_])
def test_booleans_as_a_gain(gain: Any) -> None:
    refused(TypeError, "a must be a number or a float32 or bfloat16 array", "boolean", repr(gain), a=gain)


@pytest.mark.parametrize("gain", ["2", b"2", 1j], ids=repr)
def test_strings_and_complex_numbers_as_a_gain(gain: Any) -> None:
    refused(TypeError, "a must be a number or", f"got {type(gain).__name__} {gain!r}", a=gain)


@pytest.mark.parametrize("gain", [None, [1.0], (1.0,), {}, len, decimal.Decimal(1)], ids=lambda v: type(v).__name__)
def test_what_is_no_gain(gain: Any) -> None:
    refused(TypeError, "a must be", f"got {type(gain).__name__}", "jnp.asarray", a=gain)


@pytest.mark.parametrize("dtype", WRONG_DTYPES)
def test_other_dtypes_as_a_gain(dtype: Any) -> None:
    for gain in (np.ones(5, dtype), jnp.ones((), dtype)):
        refused(TypeError, "a must be float32 or bfloat16", f"got {np.dtype(dtype).name}", "astype", a=gain)


@pytest.mark.parametrize("gain", [10**400, -(10**400), 1e300, np.float64(1e300)], ids=lambda v: type(v).__name__)
def test_numbers_that_no_float32_holds(gain: Any) -> None:
    refused(ValueError, "a must be", "float32", a=gain)


@pytest.mark.parametrize("gain", [float("inf"), float("-inf"), float("nan")])
def test_accepted_infinities(gain: float) -> None:
    np.testing.assert_array_equal(tiledops.axpy(gain, X, X, config=REFERENCE), np.full(SHAPE, gain, np.float32))


@pytest.mark.parametrize("shape", [(3,), (1,), (4,), (1, 5), (1, 1), (3, 5), (0,), (1, 3, 1)], ids=str)
def test_gains_that_do_not_broadcast_by_the_rule(shape: tuple[int, ...]) -> None:
    for make in (np.ones, jnp.ones):
        refused(
            ValueError,
            "a must be a number or have shape",
            "() or (5,) (one a feature) or (3, 1) (one an example)",
            f"for x of shape {SHAPE}",
            f"got shape {shape}",
            a=make(shape, jnp.float32),
        )


@pytest.mark.parametrize("shape", [(), (5,), (3, 1)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_accepted_gains(shape: tuple[int, ...], dtype: Any) -> None:
    gain = np.full(shape, 2.0).astype(dtype)
    np.testing.assert_array_equal(tiledops.axpy(gain, X, X, config=REFERENCE), 3 * X)


def test_accepted_python_integers_traced_or_not() -> None:
    with tiledops.use_config(mode="reference"):
        np.testing.assert_array_equal(jax.jit(tiledops.axpy)(2, X, X), tiledops.axpy(2, X, X))


def test_a_gain_an_example_has_its_batch_first() -> None:
    x = np.ones((2, 3, 5), np.float32)
    refused(ValueError, "(2, 1, 1) (one an example)", "got shape (1, 3, 1)", a=np.ones((1, 3, 1), "f4"), x=x, y=x)


# config


@pytest.mark.parametrize("config", ["reference", {}, (8, 128), PipelineConfig], ids=repr)
def test_what_is_no_config(config: Any) -> None:
    with pytest.raises(TypeError, match=r"config must be a tiledops.PipelineConfig or None; got"):
        tiledops.axpy(1.0, X, X, config=config)


# plan_tiles


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "bool", np.complex64])
def test_a_plans_dtype(dtype: Any) -> None:
    with pytest.raises(TypeError, match="dtype must be float32 or bfloat16; got"):
        tiledops.plan_tiles(SHAPE, dtype)


@pytest.mark.parametrize("shape", [(0, 5), (0,), (3, 0, 5), (-3, 5)], ids=str)
def test_a_plan_of_nothing(shape: Any) -> None:
    with pytest.raises(ValueError, match=r"shape|empty|positive"):
        tiledops.plan_tiles(shape, jnp.float32)


@pytest.mark.parametrize("shape", [17, None, "ab", (3.0, 5)], ids=repr)
def test_what_is_no_shape(shape: Any) -> None:
    with pytest.raises(TypeError, match="shape"):
        tiledops.plan_tiles(shape, jnp.float32)


def test_a_plans_chip() -> None:
    with pytest.raises(ValueError, match="chip must be one of v4, v5e, v5p, v6e, tpu7x; got 'v9'"):
        tiledops.plan_tiles(SHAPE, jnp.float32, chip="v9")


def test_an_accepted_block_that_no_vmem_holds() -> None:
    """x and y and the result, each twice, of 8192*1024 float32: 192 MiB. A v5e has 128."""
    config = PipelineConfig(block=(8192, 1024))
    with pytest.raises(ValueError, match=r"needs 201326592 bytes of VMEM .* v5e has 134217728\. Choose a smaller"):
        tiledops.plan_tiles((8192, 4096), jnp.float32, config=config)
    with pytest.raises(ValueError, match="needs 268435456 bytes of VMEM"):
        tiledops.plan_tiles((8192, 4096), jnp.float32, config=PipelineConfig(block=(8192, 1024), buffers=3))
    big = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)  # the op itself says so where it is traced
    with tiledops.use_config(mode="simulate"), pytest.raises(ValueError, match="needs 201326592 bytes of VMEM"):
        jax.eval_shape(lambda x: tiledops.axpy(1.0, x, x, config=PipelineConfig(block=(8192, 1024))), big)
