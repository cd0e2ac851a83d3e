"""What the TPU compiler made of the step, and the least time that it can take."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from language_model import BYTES

from pod import RunError, parallel, training
from pod.presets import Settings
from tiledops import chips, compiled

# Bytes a second that a chip can send over all its links together: half of the "bidirectional inter-chip interconnect
# bandwidth per chip" of https://docs.cloud.google.com/tpu/docs (v5e, v5p, v6e, tpu7x; read 2026-12-02). Of v4 the page
# has the sum over a pod alone, 1.1 PB/s of all-reduce on 4096 chips.
LINKS = {"v4": 270e9, "v5e": 200e9, "v5p": 600e9, "v6e": 400e9, "tpu7x": 600e9}

# Bytes a second of a chip's memory, by the same pages, where JAX's `TpuInfo` says less: it has 2460e9 for v5p.
MEMORY = {"v5p": 2765e9}


@dataclasses.dataclass(frozen=True)
class Account:
    """Of one training step, on each device (a chip, or one of its two cores where JAX has a device for each).

    Attributes:
      flops: of the matmuls.
      hbm_capacity: bytes.
      peak_flops, hbm_bandwidth, link_bandwidth: a second, by the datasheet.
    """

    kind: str
    devices: int
    parameters: int
    flops: float
    report: compiled.Report
    hbm_capacity: int
    peak_flops: float
    hbm_bandwidth: float
    link_bandwidth: float

    @property
    def hbm_used(self) -> int:
        r = self.report
        return r.argument_bytes + r.output_bytes - r.donated_bytes + r.temporary_bytes

    @property
    def sent_bytes(self) -> int:
        return sum(c.sent_bytes * c.times for c in self.report.collectives)

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds that each resource is busy at least."""
        return {
            "compute": self.flops / self.peak_flops,
            "memory": self.report.hbm_bytes / self.hbm_bandwidth,
            "interconnect": self.sent_bytes / self.link_bandwidth,
        }

    @property
    def least_seconds(self) -> float:
        return max(self.bounds.values())

    def lines(self, tokens: int) -> list[str]:
        """For people."""
        r, bound = self.report, max(self.bounds, key=lambda name: self.bounds[name])
        kernels = Counter[str]()
        for kernel in r.kernels:
            kernels[kernel.name] += kernel.times
        kinds = sorted({c.opcode for c in r.collectives})
        return [
            f"parameters     {self.parameters:,}, on {self.devices} devices of TPU {self.kind}",
            f"a device holds {r.argument_bytes / 1e9:.3f} GB of arguments and {r.temporary_bytes / 1e9:.3f} GB of "
            f"temporaries: {self.hbm_used / 1e9:.3f} of {self.hbm_capacity / 1e9:.1f} GB, it fits",
            f"HBM traffic    {r.hbm_bytes / 1e9:.3f} GB a step, {len(r.extra)} copies of their own",
            *(
                f"{kind:18} {sum(c.times for c in r.collectives if c.opcode == kind):4} a step, "
                f"{sum(c.sent_bytes * c.times for c in r.collectives if c.opcode == kind) / 1e6:.3f} MB sent"
                for kind in kinds
            ),
            *(f"{name:58} {times:4} a step" for name, times in sorted(kernels.items())),
            "least time     " + ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in self.bounds.items()),
            f"bound by {bound}: at most {tokens / self.least_seconds:,.0f} tokens/s",
        ]


def on_tpu(mesh: Mesh) -> bool:
    return bool(mesh.devices.flat[0].platform == "tpu")


def matmul_flops(settings: Settings) -> int:
    """Of a step on all devices: forward, twice that backward, and each block forward once more (its rematerialisation).

    A block's matmuls have 4*width^2 + 2*width*hidden weights; attention adds a query with every key, and a weight with
    every value, masked or not.
    """
    size, tokens = settings.size, settings.batch * settings.context
    block = 2 * (4 * size.width**2 + 2 * size.width * size.hidden) + 4 * settings.context * size.width
    return tokens * (4 * size.layers * block + 3 * 2 * size.width * BYTES)


def of(settings: Settings, mesh: Mesh, step: Any) -> Account:
    """Of a compiled step."""
    device = mesh.devices.flat[0]
    cores = getattr(device, "num_cores", None) or 1  # what TpuInfo says is of one core
    with jax.set_mesh(mesh):
        kind = chips.chip_name(chips.target()[0])
    info = chips.chip_info(kind)
    shared = mesh.size / len({tuple(d.coords) for d in mesh.devices.flat})  # devices of one chip share its links
    shapes = jax.eval_shape(functools.partial(training.new_state, settings)).params
    return Account(
        kind=kind,
        devices=mesh.size,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(shapes)),
        flops=matmul_flops(settings) / mesh.size,
        report=compiled.read_report(step.as_text(), step.memory_analysis()),
        hbm_capacity=info.hbm_capacity_bytes * cores,
        peak_flops=info.bf16_ops_per_second * cores,
        hbm_bandwidth=MEMORY.get(kind, info.mem_bw_bytes_per_second * cores),
        link_bandwidth=LINKS[kind] / shared,
    )


def compile_step(settings: Settings, mesh: Mesh, lowered: Any) -> Any:
    """The lowered step, compiled.

    Raises:
      RunError: it does not fit into the devices' memory.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "Ran out of memory" not in str(error):
            raise
        raise RunError(f"{settings.preset} does not fit on {mesh.size} devices: {missing(str(error))}") from error


def compile_only(settings: Settings, mesh: Mesh) -> Account:
    """Compiles a step for TPUs that need not be there.

    Raises:
      RunError: it does not fit into their memory.
    """
    state = parallel.abstract(jax.eval_shape(functools.partial(training.new_state, settings)), mesh)
    batch = NamedSharding(mesh, parallel.BATCH)
    text = jax.ShapeDtypeStruct((settings.batch, settings.context + 1), jnp.int32, sharding=batch)
    lowered = compiled.lower_for(training.train_step(settings), state, text)
    result = of(settings, mesh, compile_step(settings, mesh, lowered))
    if result.hbm_used > result.hbm_capacity:
        lacking = (result.hbm_used - result.hbm_capacity) / 1e9
        raise RunError(f"{settings.preset} does not fit on {mesh.size} devices: {lacking:.2f} GB a device are missing")
    return result


def missing(message: str) -> str:
    """What the compiler says that it lacks, in short."""
    first = re.sub(r"^\w+: ", "", message.splitlines()[0])
    needed, there = (
        re.search(r"([\d.]+)G[^\d]*exceeds[^\d]*([\d.]+)G", first),
        re.search(r"([\d.]+)G of ([\d.]+)G", first),
    )
    found = needed or there
    if not found:
        return first
    lacking = float(found[1]) - float(found[2])
    return f"{lacking:.2f} GiB a device are missing ({first.rstrip('.')}). Take more devices or a smaller --batch"
