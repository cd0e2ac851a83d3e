"""The text of an optimized program of XLA's for TPU: its computations, loops and arrays.

XLA offers its modules as protocol buffers too; their text is what every version of jaxlib hands out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

LINE = re.compile(
    r"\s+(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\((?P<operands>[^)]*)\)"
)
ARRAY = re.compile(r"\b(?P<type>[a-z]+\d*\w*)\[(?P<dims>[\d,]*)\](?:\{(?P<order>[\d,]*)(?::(?P<tiling>[^}]*))?\})?")


def computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """Name and lines of each computation; the entry's name begins with "ENTRY "."""
    name = None
    lines: list[str] = []
    for line in text.splitlines():
        if name is None and line.endswith("{") and not line.startswith("HloModule"):
            entry, _, rest = line.partition("%")
            name = entry + re.split(r"[ (]", rest)[0]
            lines = []
        elif re.match(r"\}(, |\s*$)", line) and name is not None:  # behind the brace, a thread of a core of its own
            yield name, lines
            name = None
        elif name is not None and re.match(r"\s+(ROOT )?%", line):
            lines.append(line)
        elif lines:  # a kernel's metadata spreads over lines
            lines[-1] += line


def called(computations: dict[str, list[str]], line: str) -> list[tuple[str, int]]:
    """The computations that an instruction runs, and how often: a call's, a fusion's, a loop's body, each branch of a
    conditional, as if all ran."""
    if " conditional(" in line:
        listed = re.search(r"branch_computations=\{([^}]*)\}", line)
        names = r"%([\w.\-]+)" if listed else r"_computation=%([\w.\-]+)"
        return [(name, 1) for name in re.findall(names, listed[1] if listed else line)]
    # What else has a `to_apply` is a reduction, and that is its addition.
    single = re.search(r"(?:(?:body|calls)=| call(?:-start)?\(.*to_apply=)%([\w.\-]+)", line)
    return [(single[1], _trips(computations, line) if " while(" in line else 1)] if single else []


def _trips(computations: dict[str, list[str]], line: str) -> int:
    """How often a loop runs: as XLA notes it, else the one number that its condition compares with, else once."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
    condition = re.search(r"condition=%([\w.\-]+)", line)
    body = "\n".join(computations.get(condition[1], ())) if condition else ""
    numbers = re.findall(r"= s32\[\]\S* constant\((\d+)\)", body)
    if known:
        return int(known[1])
    return int(numbers[0]) if len(numbers) == 1 and "direction=LT" in body else 1


def hbm_bytes(shape: str) -> int:
    """Bytes of an array or a tuple of them in HBM, padded to its tiles; what lies in VMEM or SMEM is none."""
    arrays = [match for match in ARRAY.finditer(shape) if "S(" not in (match["tiling"] or "")]
    return sum(map(tiled_bytes, arrays))


def tiled_bytes(array: re.Match[str]) -> int:
    """Bytes of an array, padded to its tiles."""
    dims, order = _numbers(array["dims"]) or [1], _numbers(array["order"] or "") or [0]
    tile = re.search(r"T\(([\d,]+)\)", array["tiling"] or "")
    for extent, axis in zip(reversed(_numbers(tile[1] if tile else "")), order, strict=False):
        dims[axis] = -(-dims[axis] // extent) * extent
    return _bytes(array, dims)


def array_bytes(array: re.Match[str]) -> int:
    """Bytes of an array's elements, without padding."""
    return _bytes(array, _numbers(array["dims"]))


def _bytes(array: re.Match[str], dims: list[int]) -> int:
    digits = re.search(r"\d+", array["type"])  # none in a token or a predicate
    return math.prod(dims) * int(digits[0]) // 8 if digits else 0


def _numbers(listed: str) -> list[int]:
    return [int(n) for n in listed.split(",") if n]
