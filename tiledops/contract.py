"""What is accepted: every check of user input, and its message.

Each message says the rule, what was got and what to do. TypeError for the wrong kind of thing (a dtype, a string),
ValueError for a wrong value of the right kind (a shape, a block that is no multiple).
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BLOCK_MULTIPLES = (8, 128)  # sublanes and lanes of a 32-bit vector register, the tile of every TPU generation
BUFFERS = (2, 3)
SCHEDULES = ("pipelined", "synchronous", "blocked")
MODES = ("tpu", "simulate", "reference")
DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


def check_block(block: Any) -> tuple[int, int]:
    rule = "block must be (rows, cols), two positive integers in multiples of (8, 128)"
    if not isinstance(block, Sequence) or isinstance(block, str) or len(block) != 2:
        raise TypeError(f"{rule}; got {block!r}")
    if not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in block):
        raise TypeError(f"{rule}; got {block!r}")
    rows, cols = int(block[0]), int(block[1])
    if rows <= 0 or cols <= 0 or rows % BLOCK_MULTIPLES[0] or cols % BLOCK_MULTIPLES[1]:
        nearest = tuple(max(1, round(n / m)) * m for n, m in zip((rows, cols), BLOCK_MULTIPLES, strict=True))
        raise ValueError(f"{rule}; got {block!r}. The nearest is {nearest}")
    return rows, cols


def check_buffers(buffers: Any) -> None:
    if not isinstance(buffers, int) or isinstance(buffers, bool) or buffers not in BUFFERS:
        raise ValueError(f"buffers must be 2 (double buffering) or 3; got {buffers!r}")


def check_schedule(schedule: Any, buffers: int) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}; got {schedule!r}")
    if schedule == "blocked" and buffers != 2:
        raise ValueError(
            "schedule='blocked' has two buffers, the only number that pallas_call's own pipeline takes; got "
            f"buffers={buffers}. Use schedule='pipelined' for three"
        )


def check_mode(mode: Any, source: str) -> None:
    if mode is not None and mode not in MODES:
        raise ValueError(f"{source} must be one of {', '.join(MODES)}; got {mode!r}")


def check_config(config: Any, kind: type) -> None:
    if config is not None and not isinstance(config, kind):
        raise TypeError(f"config must be a tiledops.PipelineConfig or None; got {config!r}")


def check_shape(shape: Any) -> tuple[int, ...]:
    rule = "shape must be a tuple of positive integers"
    if not isinstance(shape, Sequence) or not all(isinstance(n, (int, np.integer)) for n in shape):
        raise TypeError(f"{rule}; got {shape!r}")
    if any(n <= 0 for n in shape):
        raise ValueError(f"{rule}; got {shape!r}")
    return tuple(map(int, shape))


def check_static(shape: tuple[Any, ...]) -> None:
    """What a kernel is cut for is known when it is traced."""
    if not all(isinstance(n, (int, np.integer)) for n in shape):
        raise TypeError(
            f"a kernel needs a shape of integers; got the symbolic {shape}. Export one program a shape, or use "
            "mode='reference' (plain jnp), which takes symbolic shapes"
        )


def check_dtype(dtype: Any, what: str) -> jnp.dtype:
    """float32 and bfloat16 alone. No TPU generation compiles float16, though the simulator would run it, and 8-byte
    types hang Pallas's tiling inference, so that what is not known to work is refused in every mode alike."""
    if dtype in DTYPES:
        return jnp.dtype(dtype)
    nearest = "bfloat16" if dtype == jnp.float16 else "float32"
    raise TypeError(
        f"{what} must be float32 or bfloat16; got {dtype}. Convert it first, e.g. with .astype(jnp.{nearest})"
    )


def check_array(value: Any, what: str) -> jax.Array:
    """An array (JAX's, NumPy's or a traced one) or a Python float, as a float32 or bfloat16 jax.Array."""
    if isinstance(value, (bool, int, complex)) and not isinstance(value, (float, np.generic)):
        raise TypeError(f"{what} must be a float32 or bfloat16 array; got the Python {type(value).__name__} {value!r}")
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, float)) and not hasattr(value, "__jax_array__"):
        raise TypeError(
            f"{what} must be a float32 or bfloat16 array; got {type(value).__name__}. "
            "Convert it first, e.g. with jnp.asarray"
        )
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != np.float64:  # that one JAX converts, or keeps
        check_dtype(value.dtype, what)
    array = jnp.asarray(value)
    if getattr(array, "weak_type", False):  # a Python float that JAX traces: float64 with 64-bit types on
        array = array.astype(jnp.float32 if array.dtype == jnp.float64 else array.dtype)
    check_dtype(array.dtype, what)
    return array


def check_operands(a: Any, x: Any, y: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The operands of `a*x + y` as arrays: x and y of one shape, a broadcasting against them by the rule."""
    x, y = check_array(x, "x"), check_array(y, "y")
    if x.shape != y.shape:
        raise ValueError(
            f"x and y must have the same shape; got {x.shape} and {y.shape}. Broadcast one first, e.g. with "
            "jnp.broadcast_to"
        )
    if x.size == 0:
        raise ValueError(
            f"x and y must not be empty; got shape {x.shape}. Leave the call out where there is nothing to add"
        )
    return check_gain(a, x.shape), x, y


def check_gain(a: Any, shape: tuple[int, ...]) -> jax.Array:
    """A gain as an array: a scalar, one number a feature, or one number an example.

    A Python number becomes a float32 array, so that its value never enters the compiled program's identity.
    """
    if isinstance(a, (bool, np.bool_)):
        raise TypeError(f"a must be a number or a float32 or bfloat16 array; got the boolean {a!r}")
    python_number = isinstance(a, numbers.Real) and not isinstance(a, (np.ndarray, np.floating, np.integer))
    if python_number or isinstance(a, np.float64):  # NumPy's float64 scalar is a Python float
        return jnp.asarray(_number(a), jnp.float32)
    if isinstance(a, (str, bytes, complex)):
        raise TypeError(f"a must be a number or a float32 or bfloat16 array; got {type(a).__name__} {a!r}")
    if getattr(a, "weak_type", False) and jnp.issubdtype(a.dtype, jnp.integer):  # a Python int that JAX traces
        a = a.astype(jnp.float32)
    gain = check_array(a, "a")
    per_example = shape[:1] + (1,) * (len(shape) - 1)
    allowed = {(): "()", shape[-1:]: f"{shape[-1:]} (one a feature)", per_example: f"{per_example} (one an example)"}
    if gain.shape not in allowed:
        raise ValueError(
            f"a must be a number or have shape {' or '.join(allowed.values())} for x of shape {shape}; got shape "
            f"{gain.shape}"
        )
    return gain


def check_numbers(**values: Any) -> None:
    """Hyperparameters by their names: real numbers or arrays of them, traced or not, whose values nobody looks at."""
    for name, value in values.items():
        known = isinstance(value, (numbers.Real, np.ndarray, np.generic, jax.Array)) or hasattr(value, "__jax_array__")
        dtype: Any = getattr(value, "dtype", None) or (jnp.result_type(value) if known else None)
        real = known and not isinstance(value, bool)
        if not real or not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
            raise TypeError(f"{name} must be a real number or an array of real numbers; got {value!r}")


def check_scalars(**values: Any) -> None:
    """The same of one number each."""
    check_numbers(**values)
    for name, value in values.items():
        if jnp.ndim(value):
            raise ValueError(f"{name} must be one number; got an array of shape {jnp.shape(value)}")


def _number(a: Any) -> float:
    largest = float(np.finfo(np.float32).max)
    if a in (float("inf"), -float("inf")) or a != a or abs(a) <= largest:
        return float(a)
    got = f"an integer of {a.bit_length()} bits" if isinstance(a, int) else repr(a)
    raise ValueError(f"a must be a number that float32 holds, of size {largest:.3g} at most; got {got}")
