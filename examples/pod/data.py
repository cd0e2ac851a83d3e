"""Each host's rows of each batch.

A row's window of text depends on the seed, the step and the row's number alone: not on what was read before, how many
hosts there are, or how the mesh cuts the batch. So a run goes on anywhere from the number of its step, and each host
reads the rows of its own chips and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import language_model
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pod import RunError
from pod.parallel import BATCH


class File(NamedTuple):
    """Open only while it is read: a text may be of more files than a process may hold open."""

    path: Path
    size: int

    def read(self, offset: int, most: int) -> np.ndarray:
        """Up to so many bytes.

        Raises:
          RunError: they are not there any more.
        """
        count = min(most, self.size - offset)
        try:
            found = np.fromfile(self.path, np.uint8, count, offset=offset)
        except OSError as error:
            raise RunError(f"--data {self.path} cannot be read: {error.strerror or error}") from error
        if len(found) < count:
            raise RunError(f"--data {self.path} is shorter than the {self.size} bytes that it had")
        return found


class Memory(NamedTuple):
    """What a `File` is, of bytes that are here."""

    content: np.ndarray

    @property
    def size(self) -> int:
        return len(self.content)

    def read(self, offset: int, most: int) -> np.ndarray:
        return self.content[offset : offset + most]


class Text:
    """The bytes of several parts one after the other: what is not asked for is not read."""

    def __init__(self, parts: Sequence[File | Memory]):
        self.parts = parts
        self.ends = np.cumsum([part.size for part in parts])

    @classmethod
    def of(cls, folder: Path | None) -> Text:
        """All files of a folder in the order of their names; with none, modules of Python's standard library.

        Raises:
          OSError: the folder or a file in it cannot be read.
        """
        if folder is None:
            return cls([Memory(language_model.standard_library(0)[0])])
        files = sorted(path for path in folder.iterdir() if path.is_file())
        for path in files:
            path.open("rb").close()  # rather refused now than in the middle of a run
        return cls([File(path, path.stat().st_size) for path in files])

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.parts else 0

    def window(self, start: int, length: int) -> np.ndarray:
        pieces: list[np.ndarray] = []
        part = int(np.searchsorted(self.ends, start, side="right"))
        offset = start - (int(self.ends[part - 1]) if part else 0)
        while length > 0:
            pieces.append(self.parts[part].read(offset, length))
            length -= len(pieces[-1])
            part, offset = part + 1, 0
        return np.concatenate(pieces)


def row(text: Text, seed: int, step: int, number: int, length: int) -> np.ndarray:
    start = np.random.default_rng((seed, step, number)).integers(len(text) - length + 1)
    return text.window(int(start), length)


def batch_of(text: Text, mesh: Mesh, *, seed: int, step: int, batch: int, length: int) -> jax.Array:
    """The batch (batch, length) of a step, of which this host has read its part."""

    def rows(index: tuple[Any, ...]) -> np.ndarray:
        numbers = range(*index[0].indices(batch))
        return np.stack([row(text, seed, step, number, length) for number in numbers]).astype(np.int32)

    return jax.make_array_from_callback((batch, length), NamedSharding(mesh, BATCH), rows)
