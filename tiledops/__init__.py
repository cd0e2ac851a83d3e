"""Tiled, software-pipelined scaled add (AXPY) for TPU, and the layers and optimizers made of it."""

from tiledops.axpy import axpy
from tiledops.chips import simulated_chip
from tiledops.config import PipelineConfig, use_config
from tiledops.tiling import TilePlan, plan_tiles

__all__ = ["PipelineConfig", "TilePlan", "axpy", "plan_tiles", "simulated_chip", "use_config"]
__version__ = "0.1.0"
