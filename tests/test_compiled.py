"""Every kernel through the real TPU compiler, for every generation, beside XLA's own fusion of the same maths.

Nothing here runs: libtpu compiles ahead of time for chips that are not attached, and the optimized program says how
many bytes it moves. Bytes are exact, so that the comparisons have no tolerance.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from programs import for_two_cores

import tiledops
from tiledops import chips, compiled, layouts
from tiledops.axpy import axpy_where

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


GAINS_BY_PARTS = {
    ((64, 256, 1152), (64, 1, 1152)): "a vector of gains for each example, as in a conditioned transformer",
    ((36, 1001, 3000), (36, 1001, 1)): "one for each token, of a length that doesn't merge",
    ((80000, 8, 256), (80000, 1, 1)): "more examples than SMEM holds",
    ((64, 600000), (600000,)): "more features than the smaller VMEMs hold",
}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("shape", "gain"), GAINS_BY_PARTS, ids=str)
def test_a_gain_by_parts_moves_no_byte_twice(shape, gain, chip):
    """Gains that vary along several axes, or are too long to stay in fast memory: as XLA's own fusion. One for each
    example, where SMEM can't hold them, is a tile of 128 lanes in HBM: written and read, and so is its gradient."""
    spread = 2 * 4 * 128 * shape[0] if len(gain) == 3 and gain[1:] == (1, 1) else 0

    def op(a, x, y):
        if gain in [(*shape[:1], *[1] * (len(shape) - 1)), shape[-1:]]:
            return tiledops.axpy(a, x, y)
        each = jax.vmap(tiledops.axpy)
        return each(a[:, 0], x, y) if gain[1] == 1 else jax.vmap(each)(a[..., 0], x, y)

    for transform in (forward, backward):
        args = arguments(shape, (BF16, BF16), gain, transform)
        ours, xla = (compiled.compile_for(transform(f), *args, chip=chip) for f in (op, plain))
        assert len(ours.kernels) == 1, (transform.__name__, ours.instructions)
        assert spread or not ours.extra, (transform.__name__, ours.instructions)
        assert ours.hbm_bytes <= xla.hbm_bytes + spread * (1 if transform is forward else 2), transform.__name__


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_sum_of_a_narrow_tile_fits(dtype, chip):
    """Its accumulator is as large as the tile or larger: 128 lanes for each row, or registers for eight of two numbers.
    The mask keeps the two apart from the examples."""

    def by_two(a, x, y):
        two = jax.vmap(lambda mask, a, x, y: axpy_where(mask.reshape(1, 1), a, x, y), (None, 0, 0, 0))
        return jax.vmap(two)(x[:, 0, 0, 0].astype(F32), a, x, y)

    for op, shape, gain in [(tiledops.axpy, (100000, 128), (100000, 1)), (by_two, (4000, 2, 8, 128), (4000, 2))]:
        x = struct(shape, dtype)
        for gradients in (backward(op), lambda a, x, y, g, op=op: jax.vjp(lambda a: op(a, x, y), a)[1](g)):
            assert len(compiled.compile_for(gradients, struct(gain), x, x, x, chip=chip).kernels) == 1


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


LARGE = (8192, 8192)  # in float32 larger than VMEM, where XLA could hide a copy


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("shape", "dtype", "gain"),
    [(LARGE, F32, ()), ((1001, 3001), BF16, ()), ((5000,), F32, ()), ((1 << 24,), F32, (1 << 24,))],
    ids=str,
)
def test_donated_result_takes_the_buffer_of_y(shape, dtype, gain, chip):
    """With a gain that is one more stream too."""
    args = struct(gain), struct(shape, dtype), struct(shape, dtype)
    donated = compiled.compile_for(tiledops.axpy, *args, chip=chip, donate_argnums=2)
    kept = compiled.compile_for(tiledops.axpy, *args, chip=chip)
    assert donated.donated_bytes == donated.output_bytes >= dtype.itemsize * math.prod(shape)
    assert not kept.donated_bytes
    for report in (donated, kept):
        assert len(report.kernels) == 1
        assert not report.extra
    assert donated.hbm_bytes == kept.hbm_bytes


@pytest.mark.parametrize("chip", CHIPS)
def test_a_bfloat16_gain_an_example(chip):
    """A column taken whole: Mosaic of jax 0.10 turns no row of bfloat16 into one on v4 and v5."""
    for transform in (forward, backward):
        x = struct((64, 768), BF16)
        args = (struct((64, 1), BF16), x, x, *([x] if transform is not forward else []))
        assert len(compiled.compile_for(transform(tiledops.axpy), *args, chip=chip).kernels) == 1


@pytest.mark.parametrize("chip", CHIPS)
def test_only_a_donated_buffer_is_overwritten(chip):
    """The optimized program says which operand's buffer a kernel's result takes."""
    args = struct(()), struct(LARGE), struct(LARGE)
    kept = compiled.lower_for(tiledops.axpy, *args, chip=chip).compile().as_text()
    donated = compiled.lower_for(tiledops.axpy, *args, chip=chip, donate_argnums=2).compile().as_text()
    assert "output_to_operand_aliasing" not in kept
    assert "output_to_operand_aliasing={{}: (2, {})}" in donated


@pytest.mark.parametrize("chip", CHIPS)
def test_in_a_loop_the_carry_stays_in_its_buffer(chip):
    """Ten steps move ten times the bytes of one, and two arrays live."""

    def steps(a, x, y):
        return jax.lax.scan(lambda y, _: (tiledops.axpy(a, x, y), None), y, length=10)[0]

    args = struct(()), struct(LARGE), struct(LARGE)
    report = compiled.compile_for(steps, *args, chip=chip, donate_argnums=2)
    (kernel,) = report.kernels
    assert kernel.times == 10
    assert not report.extra
    assert report.temporary_bytes < 4 * math.prod(LARGE)


@pytest.mark.parametrize("shape", [(8192, 4096), (1001, 3001), (4096, 7, 512), (1 << 20,)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_both_tensor_cores_work(shape, dtype):
    """On v5p one program has two, forward, backward and in sums, ragged shapes too. (A v4 has two as well, but libtpu
    describes v4 topologies with one a device, so that kernels compiled ahead of time use one.)"""
    for transform, gain in [(forward, ()), (backward, ()), (backward, shape[-1:]), (backward_fixed, ())]:
        args = arguments(shape, (dtype, dtype), gain, transform)
        (kernel,) = compiled.compile_for(transform(tiledops.axpy), *args, chip="v5p").kernels
        assert kernel.cores == 2, (transform.__name__, gain)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", [(8192, 4096), (50257, 768), (1001, 3001)], ids=str)
def test_a_learnable_gain_in_bfloat16(shape, chip):
    """Three arrays move, ours and XLA's: it fuses the backward pass into one, whether the gain is float32 or, as a user
    would write it, a*x + y is all in bfloat16. There what we move more is a gain's conversion to float32 and its
    gradient's to bfloat16, outside the kernel: 512 padded bytes each for a scalar; and for a gain a feature, which the
    kernel slices, 2 bytes an element read, 4 written and 2 more read."""
    for dtype, op in [(F32, plain), (BF16, bfloat16_axpy)]:
        for gain in ((), shape[-1:]):
            args = (struct(gain, dtype), *(struct(shape, BF16) for _ in range(3)))
            ours, xla = (compiled.compile_for(backward(op), *args, chip=chip) for op in (tiledops.axpy, op))
            assert not ours.extra
            assert [round(report.hbm_bytes / (2 * math.prod(shape))) for report in (ours, xla)] == [3, 3], (dtype, gain)
            conversion = 8 * layouts.round_up(math.prod(gain), 1024) if gain else 2 * 512
            allowed = xla.hbm_bytes + for_two_cores(ours, gain) + (conversion if dtype == BF16 else 0)
            assert ours.hbm_bytes <= allowed, (dtype, gain)


def bfloat16_axpy(a, x, y):
    return a * x + y


def test_without_libtpu_the_way_out_is_said(monkeypatch):
    def refuse(**_):
        raise RuntimeError("JAX TPU support not installed")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    for topology in ("tpu7x", "v5e:16x16"):
        with pytest.raises(RuntimeError, match=r"needs libtpu: .* pip install -e '.\[test\]'"):
            compiled.topology_devices.__wrapped__(topology)


def test_a_kernel_has_its_name_whatever_xla_appends():
    array = "f32[8,128]{1,0:T(8,128)}"
    report = compiled.read_report(f"""HloModule m

ENTRY %main (x: f32[8,128]) -> f32[8,128] {{
  %x = {array} parameter(0)
  %tiledops_axpy.1 = {array} custom-call(%x), custom_call_target="tpu_custom_call"
  ROOT %tiledops_axpy.4.refs_2_ = {array} custom-call(%tiledops_axpy.1), custom_call_target="tpu_custom_call"
}}
""")
    assert [kernel.name for kernel in report.kernels] == ["tiledops_axpy"] * 2


def test_a_prefetched_slice_counts_its_own_bytes():
    report = compiled.read_report("""HloModule m

ENTRY %main (x: f32[64,128]) -> f32[8,128] {
  %x = f32[64,128]{1,0:T(8,128)} parameter(0)
  %slice-start = ((f32[64,128]{1,0:T(8,128)}), f32[8,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%x)
  %slice-done = f32[8,128]{1,0:T(8,128)S(1)} slice-done(%slice-start)
  ROOT %negate = f32[8,128]{1,0:T(8,128)} negate(%slice-done)
}
""")
    assert (report.hbm_read, report.hbm_written) == (4 * 8 * 128, 4 * 8 * 128)
