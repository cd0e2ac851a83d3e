"""Every kernel through the real TPU compiler, for every generation, beside XLA's own fusion of the same maths.

Nothing here runs: libtpu compiles ahead of time for chips that are not attached, and the optimized program says how
many bytes it moves. Bytes are exact, so that the comparisons have no tolerance.
"""

import math

import jax
import jax.numpy as jnp
import pytest

import tiledops
from tiledops import chips, compiled, layouts

CHIPS = tuple(chips.CHIPS)
F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)

SHAPES = {
    (8192, 4096): "a large activation",
    (50257, 768): "an embedding with an odd vocabulary",
    (768, 2304): "a fused projection",
    (1000, 3): "XLA lays it out column-major",
    (3, 1000): "fewer rows than a tile",
    (512, 10): "column-major",
    (1001, 3001): "ragged both ways, column-major",
    (1, 257): "one row",
    (257, 1): "one column",
    (7,): "a vector below one register",
    (4096,): "a vector of whole tiles",
    (5000,): "a ragged vector",
    (): "a scalar",
    (16, 7, 512): "physical order (1, 0, 2)",
    (8, 128, 1024): "leading axes that merge",
    (2, 3, 5, 7): "nothing near a tile",
    (3, 3, 64, 128): "a convolution's kernel",
    (7, 7, 3, 64): "a stem's kernel: leading axes that don't merge",
    (1, 1, 512, 2048): "a pointwise convolution's kernel",
}

# One number is padded to 512 bytes, and XLA copies each into and out of the kernel's vector form.
LESS_THAN_A_TILE = 4095


def forward(op):
    return op


def backward(op):
    """The gradients of gain and branch."""
    return lambda a, x, y, g: jax.vjp(op, a, x, y)[1](g)[:2]


def backward_fixed(op):
    """The gradient of the branch alone."""
    return lambda a, x, y, g: jax.vjp(lambda x: op(a, x, y), x)[1](g)


def plain(a, x, y):
    """What XLA is given to fuse: the same maths, the gain in float32, one rounding."""
    return (a * x.astype(F32) + y.astype(F32)).astype(y.dtype)


def struct(shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def arguments(shape, dtypes, gain, transform):
    x, y = (struct(shape, dtype) for dtype in dtypes)
    return (struct(gain), x, y, *([y] if transform is not forward else []))


def compile_pair(shape, dtypes, gain, transform, chip):
    """Ours and XLA's."""
    args = arguments(shape, dtypes, gain, transform)
    return tuple(compiled.compile_for(transform(op), *args, chip=chip) for op in (tiledops.axpy, plain))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moves_no_byte_twice(shape, chip):
    """One kernel, no operation of XLA's around it, and no more bytes than XLA's own fusion."""
    for dtypes in [(F32, F32), (BF16, BF16)] + [(F32, BF16), (BF16, F32)] * (shape == (16, 7, 512)):
        for transform, gain in [(forward, ()), (backward, ()), (backward, shape[-1:]), (backward_fixed, ())]:
            ours, xla = compile_pair(shape, dtypes, gain, transform, chip)
            case = (shape, dtypes, gain, transform.__name__, ours.instructions)
            assert len(ours.kernels) == 1, case
            assert not ours.extra, case
            allowed = xla.hbm_bytes + for_two_cores(ours, gain) + (0 if shape else LESS_THAN_A_TILE)
            assert ours.hbm_bytes <= allowed, case


def for_two_cores(report, gain):
    """What a second TensorCore costs: a scalar is windowed, so that XLA copies its 512 padded bytes before and after;
    each core's part of the gain's gradient is written, read and added."""
    padded = 4 * layouts.round_up(math.prod(gain), 1024)
    return 0 if report.kernels[0].cores == 1 else 2 * 512 + 4 * padded


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("schedule", ["pipelined", "synchronous", "blocked"])
def test_every_schedule_compiles(schedule, chip):
    """A user's own block, ragged, with a channel gain: forward and backward."""
    for block in [(8, 128), (16, 256)]:
        for buffers in (2, 3) if schedule != "blocked" else (2,):
            config = tiledops.PipelineConfig(block=block, schedule=schedule, buffers=buffers)
            for dtype in (F32, BF16):
                args = arguments((100, 700), (dtype, dtype), (700,), backward)
                report = compiled.compile_for(
                    backward(lambda a, x, y, config=config: tiledops.axpy(a, x, y, config=config)), *args, chip=chip
                )
                (kernel,) = report.kernels
                assert kernel.block == block, (block, buffers, dtype)


def test_donated_result_takes_the_buffer_of_y():
    shape = (8192, 8192)  # larger than VMEM, where XLA could hide a copy
    report = compiled.compile_for(tiledops.axpy, struct(()), struct(shape), struct(shape), donate_argnums=2)
    assert report.donated_bytes == 4 * 8192 * 8192
