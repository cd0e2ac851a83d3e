"""VLIW bundles against DMA time: whether a kernel waits for memory, by the compiler's own schedule.

A TensorCore issues one bundle of instructions a cycle. libtpu can write the final bundles of each kernel, loops and
their trip counts included, so that the cycles which a kernel's arithmetic takes are counted, on a machine with no TPU,
and compared with the time that its bytes need at full HBM bandwidth. Well below 1, a pipelined kernel runs at the speed
of the memory.

libtpu reads its flags once a process, so that the program is handed to a child process, which compiles it again.

>>> from tiledops import bundles
>>> x = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)
>>> (schedule,) = bundles.bundles_for(lambda x, y: tiledops.axpy(2.0, x, y), x, x, chip="v5e")
>>> schedule.name, schedule.steps, schedule.ratio < 0.5
('tiledops_axpy', 64, True)
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from tiledops import chips, compiled

# Every generation multiplies with four MXUs' worth of (column, column) arrays. TpuInfo counts two on v6e and TPU7x, but
# libtpu's own estimates there are of matmuls that take fewer cycles than two could (8192 cubed in bfloat16: 2,977,840
# and 2,604,600, where two need 4,194,304). Four give 1.05, 1.5, 1.75, 1.75 and 2.2 GHz for v4, v5e, v5p, v6e and TPU7x.
_MXUS = 4

# A branch takes effect some bundles later, which belong to the loop: 1 on v4, 4 on v5 and v6e, 6 on TPU7x. Six are
# counted everywhere: rather a few too many than one too few.
_DELAY_SLOTS = 6

_FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What one kernel costs in bundles and in bytes, on one TensorCore.

    Attributes:
      name, instruction: of the kernel (`compiled.Kernel`).
      steps: grid steps of its pipeline.
      bundles: bundles of one step, rounded up, with its share of what surrounds the pipeline and of what a first or a
        last step does alone. Any other predicated part counts as if it always ran.
      dma_seconds: time to move one step's share of the kernel's HBM bytes at the chip's full bandwidth.
      clock_hertz: bundles a second.
    """

    name: str
    instruction: str
    steps: int
    bundles: int
    dma_seconds: float
    clock_hertz: float

    @property
    def ratio(self) -> float:
        """The time of the bundles over the time of the bytes."""
        return self.bundles / self.clock_hertz / self.dma_seconds if self.dma_seconds else float("inf")


def bundles_for(fn: Callable[..., Any], *args: Any, chip: str = chips.DEFAULT_CHIP) -> tuple[Schedule, ...]:
    """The schedules of the kernels of `jax.jit(fn)`, compiled for one chip of a generation.

    Args:
      fn: a function of arrays.
      args: arrays, ShapeDtypeStructs, or trees of them. Make them larger than the chip's VMEM: what XLA keeps there
        moves no byte of HBM, and the kernel copies it by bundles.
      chip: "v4", "v5e", "v5p", "v6e" or "tpu7x".

    Raises:
      ValueError: an unknown chip.
      RuntimeError: the program does not compile, or this libtpu writes no schedules.
    """
    return schedules([(fn, args)], chip=chip)[0]


def schedules(
    programs: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], *, chip: str = chips.DEFAULT_CHIP
) -> list[tuple[Schedule, ...]]:
    """`bundles_for` of several programs, pairs (fn, args), in one child process."""
    info = chips.chip_info(chip)
    with tempfile.TemporaryDirectory(prefix="tiledops_bundles_") as name:
        folders = [pathlib.Path(name, str(i)) for i in range(len(programs))]
        for folder, (fn, args) in zip(folders, programs, strict=True):
            folder.mkdir()
            (folder / "lowered").write_text(compiled.lower_for(fn, *args, chip=chip).as_text(debug_info=True))
        _run_child(name, chip)
        return [_read(folder, info) for folder in folders]


def clock_hertz(info: Any) -> float:
    """The clock that the chip's peak implies: a multiply and an add a cycle in each cell of its MXUs."""
    return float(info.bf16_ops_per_second / (2 * info.mxu_column_size**2 * _MXUS))


def _run_child(folder: str, chip: str) -> None:
    flags = _FLAGS.format(pathlib.Path(folder, "dumps"))
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",  # the child compiles for a TPU, and opens none
        "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip(),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    program = f"from tiledops import bundles; bundles.compile_lowered({folder!r}, {chip!r})"
    child = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    if child.returncode:
        raise RuntimeError(f"libtpu did not compile the program for {chip}:\n{child.stderr[-4000:]}")


def compile_lowered(folder: str, chip: str) -> None:
    """In the child: compiles what the parent left in `folder`, and leaves each program's schedules beside it."""
    from jax._src.interpreters.mlir import make_ir_context
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    (device, *_) = compiled.topology_devices(chip)
    client: Any = device.client
    for lowered in pathlib.Path(folder).glob("*/lowered"):
        with make_ir_context():
            module = ir.Module.parse(lowered.read_text())
        executable = client.compile(module, executable_devices=xla_client.DeviceList((device,)))
        (lowered.parent / "optimized").write_text(executable.hlo_modules()[0].to_string())
        for dump in pathlib.Path(folder, "dumps").glob("*-final_bundles.txt"):
            dump.rename(lowered.parent / dump.name)


def _read(folder: pathlib.Path, info: Any) -> tuple[Schedule, ...]:
    found = {}
    for dump in folder.glob("*-final_bundles.txt"):
        match = re.fullmatch(r"\d+-(.+)-\d+-final_bundles\.txt", dump.name)
        if match:
            found[match[1]] = dump
    result = []
    for kernel in compiled.read_report((folder / "optimized").read_text()).kernels:
        if kernel.instruction not in found:
            raise RuntimeError(
                f"libtpu wrote no schedule of the kernel {kernel.instruction}: this version has no final-bundles dump "
                "under --xla_jf_dump_to. The versions that come with jax 0.10.2 and 0.12.0 do"
            )
        steps, bundles = count(found[kernel.instruction].read_text())
        seconds = (kernel.read + kernel.written) / kernel.cores / info.mem_bw_bytes_per_second
        result.append(Schedule(kernel.name, kernel.instruction, steps, bundles, seconds / steps, clock_hertz(info)))
    return tuple(result)


_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s>*\s*\{(?P<text>.*)")
_BRANCH = re.compile(r"sbr\.rel (?:\((?P<predicate>!?%\w+)\) )?target = \$region(?P<region>\d+)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")


def count(schedule: str) -> tuple[int, int]:
    """Grid steps, and bundles a step, of a kernel's final bundles as libtpu writes them.

    A bundle names the regions that start there. A branch back to one of them ends a loop. Its trip count is the
    constant that the branch's predicate is compared with; without a constant (the last, ragged tile of an operand that
    XLA keeps in VMEM is copied by a loop) it counts once. The outermost loop that waits for a DMA is the pipeline. A
    branch ahead skips a part: unless a counter equals a constant, the part is a first or a last step's own, and counts
    once a kernel.

    >>> count('''
    ...      0   :  { %s1 = smov 0 }
    ...    0x1 LB: > { %s2 = sadd.s32 1, %s1 } /* Start region 9 */
    ...    0x2   : > { dma.done.wait [#allocation4], 64 }
    ...    0x3   : > { %p3 = scmp.ne.s32.totalorder %s1, 15 }
    ...    0x4   : > { %148 = sbr.rel (%p3) target = $region7 }
    ...    0x5   : > { %v1 = vst [vmem:[%s4] sm:$0xff] %v0 }
    ...    0x6 LB: >> { %v1 = vld [vmem:[%s3] sm:$0xff] } /* Start/End empty region 7 :: Start region 8 */
    ...    0x7   : >> { %p2 = scmp.ge.s32.totalorder %s3, 100 }
    ...    0x8   : >> { %149 = sbr.rel (!%p2) target = $region8 }
    ...    0x9   : > { %p1 = scmp.ge.s32.totalorder %s2, 16 }
    ...    0xa   : > { %150 = sbr.rel (!%p1) target = $region9 }
    ... ''')
    (16, 506)
    """
    bundles = [match["text"] for match in map(_BUNDLE.match, schedule.splitlines()) if match]
    starts = {region: at for at, text in enumerate(bundles) for region in _REGION.findall(text)}
    times, steps, pipeline = [1] * len(bundles), 1, len(bundles)
    rare: set[int] = set()
    for at, text in enumerate(bundles):
        for branch in _BRANCH.finditer(text):
            target, predicate = starts.get(branch["region"], at), branch["predicate"] or ""
            if target > at:
                if _compared(bundles[: at + 1], predicate, "eq" if predicate.startswith("!") else "ne"):
                    rare.update(range(at + 1 + _DELAY_SLOTS, target))
                continue
            trips = _compared(bundles[target : at + 1], predicate) or 1
            if target < pipeline and any("dma.done.wait" in text for text in bundles[target : at + 1]):
                steps, pipeline = trips, target
            end = at + 1 + _DELAY_SLOTS
            times[target:end] = [n * trips for n in times[target:end]]
    total = sum(max(1, n // steps) if at in rare else n for at, n in enumerate(times))
    return steps, -(-total // steps)


def _compared(bundles: list[str], predicate: str, relation: str = r"\w+") -> int | None:
    """The constant that a number is compared with for a predicate, the last time that it is set; None if there is none,
    or if they are compared otherwise."""
    test = re.escape(predicate.lstrip("!")) + rf" = scmp\.{relation}\.\S+ (?:\([^)]*\), )?%\w+, (\d+)"
    constants = [int(n) for text in bundles for n in re.findall(test, text)]
    return constants[-1] if constants else None
