"""The options of a call: how the pipeline is cut and scheduled, and what runs it."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

from tiledops import contract


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How a tiled operation runs. Hashable, so that it can be a static argument or a field of a Flax module.

    Attributes:
      block: `(rows, cols)` of one tile, multiples of (8, 128) elements, in the array's own physical order. Default:
        chosen from shape, dtypes and chip (`plan_tiles`).
      buffers: VMEM buffers for each input stream, 2 or 3; 2 with schedule "blocked". (Outputs always have two.)
      schedule: "pipelined" overlaps each tile's transfers with its neighbours' arithmetic (`pltpu.emit_pipeline`);
        "synchronous" is the same pipeline, one transfer at a time; "blocked" leaves it to `pl.pallas_call`'s own
        grid. The three give the same bits.
      mode: "tpu", "simulate" or "reference"; see `tiledops.modes`. Default: by `use_config`, else the environment's
        `TILEDOPS_MODE`, else by the chip that the program is for.

    >>> tiledops.PipelineConfig(block=(16, 256), buffers=3)
    PipelineConfig(block=(16, 256), buffers=3, schedule='pipelined', mode=None)

    Raises:
      ValueError, TypeError: a field breaks its rule above.
    """

    block: tuple[int, int] | None = None
    buffers: int = 2
    schedule: str = "pipelined"
    mode: str | None = None

    def __post_init__(self) -> None:
        if self.block is not None:
            object.__setattr__(self, "block", contract.check_block(self.block))
        contract.check_buffers(self.buffers)
        contract.check_schedule(self.schedule, self.buffers)
        contract.check_mode(self.mode, "mode")


_defaults: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("tiledops_config", default=None)


@contextlib.contextmanager
def use_config(**fields: Any) -> Iterator[PipelineConfig]:
    """Defaults for the calls inside the `with` block, of this thread and context. Nested blocks add up.

    A call's own `config` wins over it as a whole, but for a `mode` that it leaves open. As with any Python setting,
    what `jax.jit` traced before keeps what it was traced with.

    >>> with tiledops.use_config(mode="reference"):
    ...     print(tiledops.axpy(2.0, jnp.ones(3), jnp.ones(3)))
    [3. 3. 3.]

    Raises:
      TypeError: a name that is no field of `PipelineConfig`.
      ValueError, TypeError: a field breaks its rule.
    """
    merged = {**(_defaults.get() or {}), **fields}
    config = PipelineConfig(**merged)
    token = _defaults.set(merged)
    try:
        yield config
    finally:
        _defaults.reset(token)


def resolve(config: PipelineConfig | None) -> PipelineConfig:
    """The call's own config, its gaps filled from `use_config`."""
    contract.check_config(config, PipelineConfig)
    defaults = _defaults.get() or {}
    if config is None:
        return PipelineConfig(**defaults)
    if config.mode is None and defaults.get("mode"):
        return dataclasses.replace(config, mode=defaults["mode"])
    return config
