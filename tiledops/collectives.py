"""The collectives of an optimized program, and the bytes that they send.

XLA for TPU runs many of them beside other work: the start, the steps and the end of one all-gather lie in fusions that
compute something else, and a reduce-scatter is written as a fusion of an all-reduce and a slice. Both are read here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from tiledops import hlo

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
      opcode: one of `KINDS`.
      shape: of the result, as XLA prints it; of a fused reduce-scatter, of what it adds up.
      bytes: of the whole array, on one chip: an all-gather's result, any other's operand.
      chips: how many take part in each group.
      times: how often it runs (the trip counts of the loops around it).
    """

    opcode: str
    shape: str
    bytes: int
    chips: int
    times: int = 1

    @property
    def sent_bytes(self) -> int:
        """What each chip must send, at least, each time: of a chip's share of the whole, what the others lack."""
        if self.opcode in ("collective-permute", "collective-broadcast"):
            return self.bytes
        rounds = 2 if self.opcode == "all-reduce" else 1  # a reduce-scatter, then an all-gather
        return rounds * self.bytes * (self.chips - 1) // self.chips


def read(computations: dict[str, list[str]], entry: str, devices: int) -> tuple[Collective, ...]:
    """The collectives of a program of so many devices; every branch of a conditional counts, as if all ran."""
    found: dict[str, Collective] = {}
    for line, times, inside in _lines(computations, entry, 1):
        match = hlo.LINE.match(line)
        opcode = match["opcode"].removesuffix("-start") if match else ""
        if match is None or opcode not in KINDS:
            continue
        channel = re.search(r"channel_id=(\d+)", line)
        arrays = list(hlo.ARRAY.finditer(match["shape"]))
        if match["opcode"] in ("all-gather-start", "collective-permute-start"):  # (operands, results, contexts)
            arrays = [array for array in arrays if array["dims"]]
            arrays = arrays[len(arrays) // 2 :]
        chips, size = _chips(line, devices), sum(map(hlo.array_bytes, arrays))
        if opcode == "reduce-scatter":
            size *= chips
        elif inside.startswith("all-reduce-scatter"):
            opcode = "reduce-scatter"
        found.setdefault(
            channel[1] if channel else match["name"], Collective(opcode, match["shape"], size, chips, times)
        )
    return tuple(found.values())


def _lines(computations: dict[str, list[str]], name: str, times: int) -> Iterator[tuple[str, int, str]]:
    """Each line that runs, how often, and the computation that it is in."""
    for line in computations.get(name, ()):
        yield line, times, name
        for called, trips in hlo.called(computations, line):
            yield from _lines(computations, called, times * trips)


def _chips(line: str, devices: int) -> int:
    """How many devices each group has, from any of the three ways in which XLA lists groups."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", line)
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    tiled = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if tiled:
        return int(tiled[1])
    return len(listed[1].split(",")) if listed else devices
