"""What the TPU compiler made of a function, on a machine with no TPU.

libtpu compiles ahead of time for a chip or a whole pod that is not attached. `compile_for` does so and reads the
optimized program: its kernels, the HBM bytes that each instruction moves in their physical, tiled size, what XLA added
around the kernels, and the collectives. It works for any function, so that plain jnp can stand beside a kernel.

>>> from tiledops import compiled
>>> x = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
>>> report = compiled.compile_for(lambda x, y: tiledops.axpy(2.0, x, y), x, x, chip="v5e")
>>> [kernel.name for kernel in report.kernels], report.hbm_bytes, report.extra
(['tiledops_axpy'], 6291968, ())
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tiledops import collectives, hlo
from tiledops.chips import DEFAULT_CHIP
from tiledops.collectives import Collective

# The smallest topology of each generation that libtpu describes: one host.
HOSTS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

# What libtpu asks of its surroundings before it describes a machine that is not there; and it may be loaded by several
# processes at once, since none of them runs anything.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@functools.cache
def topology_devices(topology: str) -> tuple[Any, ...]:
    """The devices of a TPU topology that need not be attached: "v5e", "v5e:4x4", "v5p:8x8x8" ...

    Raises:
      ValueError: libtpu knows no such topology.
      RuntimeError: libtpu is not installed (the package's extra `test` brings it).
    """
    from jax.experimental import topologies

    if not (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")):  # a TPU's own host knows better
        for key, value in _ENVIRONMENT.items():
            os.environ.setdefault(key, value)
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=HOSTS.get(topology, topology))
    except Exception as error:  # jaxlib raises its own types for both
        if importlib.util.find_spec("libtpu") is None:
            raise RuntimeError(
                "compiling for TPU needs libtpu: install it, or this package with its extra: pip install -e '.[test]'"
            ) from error
        raise ValueError(
            f"chip must be one of {', '.join(HOSTS)} or a topology such as 'v5e:4x4'; got {topology!r} ({error})"
        ) from error
    return tuple(described.devices)


def lower_for(fn: Callable[..., Any], *args: Any, chip: str = DEFAULT_CHIP, **jit_options: Any) -> jax.stages.Lowered:
    """Traces and lowers `jax.jit(fn, **jit_options)` for a TPU that need not be attached.

    Args:
      fn: a function of arrays; if it is jitted already, `jit_options` must be empty.
      args: arrays, ShapeDtypeStructs, or trees of them. Those with a NamedSharding on a mesh of
        `topology_devices(...)` say what mesh the program is for; else it is for one device of `chip`.
      chip: a generation ("v4", "v5e", "v5p", "v6e", "tpu7x") or a topology ("v5e:4x4").
    """
    leaves = jax.tree.leaves(args)
    shardings = [leaf.sharding for leaf in leaves if isinstance(getattr(leaf, "sharding", None), NamedSharding)]
    meshes = {sharding.mesh for sharding in shardings if isinstance(sharding.mesh, Mesh)}
    mesh = meshes.pop() if meshes else Mesh(np.array(topology_devices(chip)[:1]), ("chip",))

    spec: Any = jax.P
    replicated = spec()

    def placed(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        # The mesh of what `jax.eval_shape` returns is abstract.
        sharding = NamedSharding(mesh, sharding.spec if isinstance(sharding, NamedSharding) else replicated)
        leaf = leaf if hasattr(leaf, "dtype") else jax.numpy.asarray(leaf)
        struct: Any = jax.ShapeDtypeStruct
        return struct(leaf.shape, leaf.dtype, sharding=sharding)

    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn, **jit_options)
    with jax.set_mesh(mesh):
        return jitted.lower(*jax.tree.map(placed, args))


def compile_for(fn: Callable[..., Any], *args: Any, chip: str = DEFAULT_CHIP, **jit_options: Any) -> Report:
    """Compiles `fn` as `lower_for` lowers it, and reports what came out."""
    executable = lower_for(fn, *args, chip=chip, **jit_options).compile()
    return read_report(executable.as_text() or "", executable.memory_analysis())


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of the optimized program.

    Attributes:
      opcode: as XLA spells it: "fusion", "custom-call", "copy", "all-reduce" ...
      name: of the instruction; of a kernel, the kernel's own.
      shape: of the result, as XLA prints it, layout included.
      read, written: HBM bytes in their tiled size, each operand and result counted whole.
      times: how often it runs (the trip counts of the loops around it).
    """

    opcode: str
    name: str
    shape: str
    read: int
    written: int
    times: int = 1


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Mosaic kernel: its name, that of its instruction, HBM bytes a call and calls; of one of ours also its tile, the
    VMEM of its stream buffers and the TensorCores that share it."""

    name: str
    instruction: str
    block: tuple[int, ...]
    vmem_bytes: int
    cores: int
    read: int
    written: int
    times: int


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler made of a function.

    Attributes:
      instructions: everything that runs at the top level or in a loop, but for what moves nothing (bitcasts, tuples).
        Every branch of a conditional counts, as if all ran.
      kernels: the Mosaic kernels among them.
      extra: the copies, pads, slices, transposes and reshapes that XLA runs as operations of their own. A copy of less
        than a tile (4 KiB), such as a scalar's to SMEM, and a prefetch into VMEM, which moves no byte of HBM twice,
        are not counted.
      collectives: kind, result shape, bytes and chips of each.
      hbm_read, hbm_written: bytes.
      argument_bytes, output_bytes, temporary_bytes, donated_bytes: of the program's buffers on one device.
    """

    instructions: tuple[Instruction, ...]
    kernels: tuple[Kernel, ...]
    extra: tuple[Instruction, ...]
    collectives: tuple[Collective, ...]
    hbm_read: int
    hbm_written: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    donated_bytes: int

    @property
    def hbm_bytes(self) -> int:
        return self.hbm_read + self.hbm_written


_MOVES_NOTHING = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id"}
_EXTRA = {"copy", "pad", "slice", "transpose", "reshape", "dynamic-slice", "concatenate"}
_TILE_BYTES = 4096
_KERNEL = "tpu_custom_call"


def read_report(text: str, memory: Any = None) -> Report:
    """Reads an optimized HLO module of XLA for TPU, and its memory analysis."""
    computations = dict(hlo.computations(text))
    entry = next(name for name in computations if name.startswith("ENTRY "))
    listed = tuple(_instructions(computations, entry, 1))
    instructions = tuple(instruction for instruction, _ in listed)
    extra = tuple(
        i for i in instructions if i.opcode in _EXTRA and max(i.read, i.written) > _TILE_BYTES and "S(" not in i.shape
    )
    return Report(
        instructions=instructions,
        kernels=tuple(_kernel(instruction, line) for instruction, line in listed if _KERNEL in line),
        extra=extra,
        collectives=collectives.read(computations, entry, _devices(text)),
        hbm_read=sum(i.read * i.times for i in instructions),
        hbm_written=sum(i.written * i.times for i in instructions),
        argument_bytes=getattr(memory, "argument_size_in_bytes", 0),
        output_bytes=getattr(memory, "output_size_in_bytes", 0),
        temporary_bytes=getattr(memory, "temp_size_in_bytes", 0),
        donated_bytes=getattr(memory, "alias_size_in_bytes", 0),
    )


def _devices(text: str) -> int:
    return math.prod(int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0]))


def _instructions(computations: dict[str, list[str]], name: str, times: int) -> Iterator[tuple[Instruction, str]]:
    shapes: dict[str, str] = {}
    for line in computations[name]:
        match = hlo.LINE.match(line)
        if match is None:
            continue
        shapes[match["name"]] = match["shape"]
        if match["opcode"] in _MOVES_NOTHING:
            continue
        inside = [
            each
            for called, trips in hlo.called(computations, line)
            for each in _instructions(computations, called, times * trips)
        ]
        if match["opcode"] in ("while", "call", "async-start", "conditional"):
            yield from inside
            continue
        if match["opcode"] == "fusion" and any(_KERNEL in its_line for _, its_line in inside):
            # A kernel that reads its part of a stack of arrays, or writes it, in place: the part is what moves.
            yield from ((instruction, its_line) for instruction, its_line in inside if _KERNEL in its_line)
            continue
        operands = [shapes.get(operand, "") for operand in re.findall(r"%([\w.\-]+)", match["operands"])]
        read, written = sum(map(hlo.hbm_bytes, operands)), hlo.hbm_bytes(match["shape"])
        if match["opcode"].endswith("-done"):
            read = written = 0  # counted at its start
        elif match["opcode"] == "slice-start":  # reads a part of its operand; the result is (operand, part, semaphore)
            part = [array for array in hlo.ARRAY.finditer(match["shape"]) if array["dims"]][-1]
            read, written = min(read, hlo.tiled_bytes(part)), hlo.hbm_bytes(part[0])
        elif match["opcode"].endswith("-start"):  # the result repeats the operands
            written = hlo.hbm_bytes(match["shape"]) - read
        yield Instruction(match["opcode"], match["name"], match["shape"], read, max(0, written), times), line


def _kernel(instruction: Instruction, line: str) -> Kernel:
    own = dict(re.findall(r'"(block|vmem_bytes|cores)":"([\dx]+)"', line))
    return Kernel(
        name=re.sub(r"\.\d+(\.refs_\d+_)?$", "", instruction.name),
        instruction=instruction.name,
        block=tuple(map(int, own["block"].split("x"))) if "block" in own else (),
        vmem_bytes=int(own.get("vmem_bytes", 0)),
        cores=int(own.get("cores", 1)),
        read=instruction.read,
        written=instruction.written,
        times=instruction.times,
    )
