"""A small run of the pod example, for the tests of its parts."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh
from pod import data, parallel, presets

TINY = presets.Settings("tiny", 16, 16, steps=8, learning_rate=1e-2, drop=0.1, seed=0, text_bytes=1000)
TEXT = data.Text([data.Memory(np.arange(n, dtype=np.uint8)) for n in (100, 1, 200)])


def mesh_of(*shape: int) -> Mesh:
    return parallel.make_mesh(jax.devices()[: int(np.prod(shape))], shape)  # type: ignore[arg-type]
