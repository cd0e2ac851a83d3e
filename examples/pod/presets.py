"""How large a model, and all else that decides a loss curve."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from language_model import Size


class Preset(NamedTuple):
    """A size, and what it is trained on at a time: windows a step, over all chips, and bytes in a window."""

    size: Size
    batch: int
    context: int
    learning_rate: float


PRESETS = {
    "tiny": Preset(Size(layers=2, width=64, heads=4, hidden=256), batch=16, context=64, learning_rate=1e-2),
    "10m": Preset(Size(layers=6, width=384, heads=6, hidden=1536), batch=64, context=512, learning_rate=2e-3),
    "85m": Preset(Size(layers=12, width=768, heads=6, hidden=3072), batch=512, context=1024, learning_rate=6e-4),
    "300m": Preset(Size(layers=24, width=1024, heads=8, hidden=4096), batch=512, context=2048, learning_rate=3e-4),
    "1b": Preset(Size(layers=20, width=2048, heads=16, hidden=8192), batch=1024, context=2048, learning_rate=2e-4),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the loss curve. A run goes on from a checkpoint only with the same.

    Attributes:
      preset: a name in `PRESETS`.
      steps: of the whole run: the learning rate falls until then.
      drop: how often training drops a branch (stochastic depth).
      text_bytes: in all of the text.
    """

    preset: str
    batch: int
    context: int
    steps: int
    learning_rate: float
    drop: float
    seed: int
    text_bytes: int

    @property
    def size(self) -> Size:
        return PRESETS[self.preset].size
