"""What runs a kernel: a TPU, its simulator, or plain jnp. A mode that was asked for never becomes another.

tpu        Mosaic compiles the kernel; RuntimeError where the program is for anything but a TPU.
simulate   Pallas interprets the kernel on the host: the same grid, buffers, DMAs and semaphores, its race detector
           on. It shows that the pipeline is right, not that it is fast.
reference  the same block function over the whole array in plain jnp: no kernel at all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from tiledops import chips, contract
from tiledops.config import PipelineConfig

TPU, SIMULATE, REFERENCE = "tpu", "simulate", "reference"


def resolve(config: PipelineConfig) -> str:
    """The mode of a call: its own, else the environment's, else by the chip that the program is for."""
    environment = os.environ.get("TILEDOPS_MODE") or None
    contract.check_mode(environment, "the environment's TILEDOPS_MODE")
    return config.mode or environment or (TPU if chips.target()[1] else SIMULATE)


_for_tpu: Any = Primitive("tiledops_for_tpu")
_for_tpu.def_abstract_eval(lambda x: x)


def for_tpu(x: jax.Array) -> jax.Array:
    """`x` itself, in a program that lowers for TPU alone.

    Only lowering knows the platform: `jax.export(..., platforms=["tpu"])` and ahead-of-time compilation trace on a
    CPU, and are right to. Lowered for anything else, it raises RuntimeError before any kernel is reached.
    """
    return _for_tpu.bind(x)


@_for_tpu.def_impl
def _eager(x: jax.Array) -> jax.Array:
    platforms = sorted({device.platform for device in x.devices()})
    return x if platforms == [TPU] else _refuse(platforms)


def _refuse(platforms: Sequence[str]) -> Any:
    raise RuntimeError(
        "mode='tpu' runs on TPU only and never falls back; this program is being lowered for "
        f"{' and '.join(platforms)}. Use mode='simulate' (Pallas interprets the kernel) or "
        "mode='reference' (plain jnp) here, or compile ahead of time for a TPU topology."
    )


mlir.register_lowering(_for_tpu, lambda context, operand: _refuse(context.module_context.platforms))
mlir.register_lowering(_for_tpu, lambda context, operand: [operand], platform="tpu")
