"""One scaled add, cut into tiles: what a pipelined kernel does, on a matrix small enough to check by hand.

    python examples/quickstart.py

2*x + y for 17 x 257 matrices, whose edges fit no tile. The kernel runs twice, one transfer at a time and pipelined, and
the two must agree bit for bit; both must be what NumPy computes in float64, rounded. Then a table shows what the choice
of a block costs. Off TPU, Pallas simulates the kernel: its grid, buffers and transfers, race detector on.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiledops
from tiledops import PipelineConfig

SHAPE = (17, 257)
GAIN = 2.0
BLOCKS = ((8, 128), (16, 128), (16, 256))
MODES = {
    "tpu": "the kernel, compiled",
    "simulate": "the kernel, interpreted by Pallas",
    "reference": "no kernel, the same maths in plain jnp",
}


def operands(dtype: Any) -> tuple[jax.Array, jax.Array]:
    draw = np.random.default_rng(0)
    x, y = (jnp.asarray(draw.standard_normal(SHAPE), dtype) for _ in range(2))
    return x, y


def oracle(x: jax.Array, y: jax.Array) -> np.ndarray:
    """NumPy's float64 sum, rounded to float32, which is what the kernel computes in, and then to y's dtype."""
    exact = GAIN * np.asarray(x, np.float64) + np.asarray(y, np.float64)
    return exact.astype(np.float32).astype(y.dtype)


def same_bits(one: Any, other: Any) -> bool:
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()


def say_what_runs(config: PipelineConfig) -> None:
    """The backend is what JAX found on this machine; the chip is what the kernel is cut for."""
    chip, attached = tiledops.chips.target()
    mode, backend = tiledops.modes.resolve(config), jax.default_backend()
    if mode == "tpu" and not attached:
        raise RuntimeError(f"mode tpu runs on a TPU alone; JAX has {backend} here. Use simulate or reference")
    name, vmem = tiledops.chips.chip_name(chip), chip.vmem_capacity_bytes // 2**20
    print(f"backend    {backend} ({jax.devices()[0].device_kind}), jax {jax.__version__}")
    print(f"mode       {mode}: {MODES[mode]}")
    print(f"chip       TPU {name}{'' if attached else ', imitated'}: {vmem} MiB of VMEM, {chip.num_cores} core(s)")


def say_layout(block: tuple[int, int]) -> None:
    plan = tiledops.plan_tiles(SHAPE, jnp.float32, config=PipelineConfig(block=block))
    rows, cols = (
        ", ".join(str(min(size, extent - start)) for start in range(0, extent, size))
        for extent, size in zip(plan.shape, plan.block, strict=True)
    )
    print(f"layout     {SHAPE} in HBM, nothing padded; tiles of {plan.block} in VMEM, {plan.buffers} for each input")
    print(f"           grid {plan.grid}: tiles have {rows} rows and {cols} columns of the array\n")


def lesson() -> bool:
    """Whether all results are equal, and equal to the oracle."""
    right = True
    for dtype in (jnp.float32, jnp.bfloat16):
        x, y = operands(dtype)
        expected = oracle(x, y)
        synchronous, pipelined = (
            tiledops.axpy(GAIN, x, y, config=PipelineConfig(block=BLOCKS[0], schedule=schedule))
            for schedule in ("synchronous", "pipelined")
        )
        equal, exact = same_bits(synchronous, pipelined), same_bits(pipelined, expected)
        print(f"{pipelined.dtype!s:10} synchronous and pipelined: {'the same bits' if equal else 'DIFFERENT bits'}")
        print(f"{'':10} and NumPy float64, rounded:  {'the same bits' if exact else 'DIFFERENT bits'}")
        right = right and equal and exact
    return right


def table() -> bool:
    """Whether every block gives the oracle's bits."""
    x, y = operands(jnp.float32)
    expected, right = oracle(x, y), True
    print(f"\n{'block':>10}  {'programs':>8}  {'padded elements':>15}  {'modelled buffer bytes':>21}  {'result':>8}")
    for block in BLOCKS:
        config = PipelineConfig(block=block)
        plan = tiledops.plan_tiles(SHAPE, jnp.float32, config=config)
        exact = same_bits(tiledops.axpy(GAIN, x, y, config=config), expected)
        right = right and exact
        print(
            f"{block!s:>10}  {plan.programs:>8}  {plan.padded_elements:>15}  {plan.buffer_bytes:>21}  "
            f"{'exact' if exact else 'WRONG':>8}"
        )
    print(f"\nThe array has {SHAPE[0] * SHAPE[1]} elements. A larger block takes fewer programs, each with its own")
    print("overhead, but more of it hangs over the edges, and its buffers take more of the VMEM.")
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--mode", choices=("tpu", "simulate", "reference"), help="default: tpu on a TPU, else simulate")
    args = parser.parse_args()
    with tiledops.use_config(mode=args.mode) as config:
        try:
            say_what_runs(config)
            say_layout(BLOCKS[0])
            right = lesson()
        except (RuntimeError, ValueError) as error:  # a mode that cannot run here, or an environment that names none
            parser.error(str(error))
        right = table() and right
    if not right:
        sys.exit("quickstart: a result differs; see above")


if __name__ == "__main__":
    main()
