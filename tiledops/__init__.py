"""Tiled, software-pipelined scaled add (AXPY) for TPU, and the layers and optimizers made of it."""

from tiledops.axpy import axpy
from tiledops.chips import simulated_chip
from tiledops.config import PipelineConfig, use_config
from tiledops.tiling import TilePlan, plan_tiles
from tiledops.updates import apply_updates, incremental_update
from tiledops.version import __version__

__all__ = [
    "PipelineConfig",
    "TilePlan",
    "__version__",
    "apply_updates",
    "axpy",
    "incremental_update",
    "plan_tiles",
    "simulated_chip",
    "use_config",
]
