"""Which TPU: the facts of each generation, and the chip that a program is for.

The facts come from `pltpu.TpuInfo` and are never typed again here. This is the one file that touches the spellings
of JAX that drift from version to version (its TPU registry, the abstract device of a mesh, the x64 switch).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

KiB, MiB = 1024, 1024 * 1024

DEFAULT_CHIP = "v5e"

# The name that a user types, as Google Cloud spells it, and JAX's name for the same generation.
CHIPS = {
    "v4": pltpu.ChipVersion.TPU_V4,
    "v5e": pltpu.ChipVersion.TPU_V5E,
    "v5p": pltpu.ChipVersion.TPU_V5P,
    "v6e": pltpu.ChipVersion.TPU_V6E,
    "tpu7x": pltpu.ChipVersion.TPU_7X,
}

_simulated: contextvars.ContextVar[str | None] = contextvars.ContextVar("tiledops_simulated_chip", default=None)


@functools.cache
def chip_info(name: str) -> pltpu.TpuInfo:
    """The facts of a generation, per program: a megacore chip (v4, v5p) runs one program on two TensorCores.

    Raises:
      ValueError: the name is not one of `CHIPS`.
    """
    if name not in CHIPS:
        raise ValueError(f"chip must be one of {', '.join(CHIPS)}; got {name!r}")
    version = CHIPS[name]
    return pltpu.get_tpu_info_for_chip(version, 2 if version.supports_megacore else 1)


def chip_name(info: pltpu.TpuInfo) -> str:
    """The user's name of a generation ("v5e"), or JAX's own where it is none of `CHIPS`."""
    return next((name for name, version in CHIPS.items() if version == info.chip_version), str(info.chip_version))


def scoped_vmem_bytes(info: pltpu.TpuInfo) -> int:
    """VMEM that a kernel gets unless it asks for more. libtpu's default, seen from its out-of-memory messages
    (0.0.42 and 0.0.50): 16 MiB up to v5, 32 MiB from v6e on, and never more than the chip has."""
    return min((16 if info.generation < 6 else 32) * MiB, info.vmem_capacity_bytes)


@contextlib.contextmanager
def simulated_chip(name: str) -> Iterator[pltpu.TpuInfo]:
    """Simulates another TPU generation inside the `with` block.

    Off TPU, the simulator and the tile plans imitate one chip: this one, else the environment's `TILEDOPS_CHIP`,
    else a v5e. It does not touch a program that is compiled for a real TPU. What was traced before under `jax.jit`
    keeps the chip that it was traced for.

    >>> with tiledops.simulated_chip("v5p") as info:
    ...     info.num_cores
    2

    Raises:
      ValueError: `name` is none of v4, v5e, v5p, v6e, tpu7x.
    """
    info = chip_info(name)
    token = _simulated.set(name)
    try:
        yield info
    finally:
        _simulated.reset(token)


def simulated_info() -> pltpu.TpuInfo:
    """The chip that the simulator imitates here and now."""
    name = _simulated.get()
    if name is None and (name := os.environ.get("TILEDOPS_CHIP") or DEFAULT_CHIP) not in CHIPS:
        raise ValueError(f"the environment's TILEDOPS_CHIP must be one of {', '.join(CHIPS)}; got {name!r}")
    return chip_info(name)


def target() -> tuple[pltpu.TpuInfo, bool]:
    """The chip that the program being traced is for, and whether it is a real one.

    A mesh says so by its devices (also the devices of a topology that is not attached: ahead-of-time compilation);
    else the default device does. `jax.devices()[0]` alone is not the compile target.
    """
    kind, cores = _target_device()
    version = _version_of(kind)
    if version is None:
        return simulated_info(), False
    return pltpu.get_tpu_info_for_chip(version, cores), True


def _target_device() -> tuple[str, int]:
    device: Any = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is None:
        device = jax.config.values["jax_default_device"]
    if device is None or isinstance(device, str):  # `jax_default_device` may name a platform
        device = jax.local_devices(backend=device)[0]
    return device.device_kind, getattr(device, "num_cores", None) or 1


def _version_of(device_kind: str) -> Any:
    return _tpu_info_module().chip_version_from_device_kind(device_kind)


@functools.cache
def _tpu_info_module() -> Any:
    try:
        return importlib.import_module("jax._src.tpu_info")  # jax 0.11 and newer
    except ModuleNotFoundError:
        return importlib.import_module("jax._src.pallas.mosaic.tpu_info")  # jax 0.10


@functools.cache
def prepare_simulator() -> None:
    """Lets emit_pipeline be traced off TPU. Once a process, at the first kernel.

    emit_pipeline asks JAX which TPU the default device is and fails on any other, so the kinds of the devices at
    hand are registered as the chip being simulated.
    """
    registry = _tpu_info_module().registry
    for kind in {device.device_kind for device in jax.local_devices()} | {"cpu"}:
        if _version_of(kind) is None:
            registry.setdefault(kind, simulated_info)


@functools.cache
def lower_calls_inline() -> None:
    """Lets a lowering rule see which of its operands are arguments of the whole program. Once a process.

    JAX lowers each distinct call of a custom_jvp, custom_vjp, custom_vmap or shard_map, the user's own too, once, in a
    function of its own, and calls it; inside, every operand is an argument of that function. Lowered inline, which
    changes nothing else, an operand is what the caller made it.
    """
    mlir = importlib.import_module("jax._src.interpreters.mlir")
    for module, primitive in (
        ("jax._src.custom_derivatives", "custom_jvp_call_p"),
        ("jax._src.custom_derivatives", "custom_vjp_call_p"),
        ("jax._src.custom_batching", "custom_vmap_p"),
        ("jax._src.shard_map", "shard_map_p"),
    ):
        mlir._uncacheable_primitives.add(getattr(importlib.import_module(module), primitive))


def x64(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """JAX with 64-bit types on or off, in this thread and block, whatever the user's setting."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enabled)
    experimental = importlib.import_module("jax.experimental")
    return (experimental.enable_x64 if enabled else experimental.disable_x64)()
