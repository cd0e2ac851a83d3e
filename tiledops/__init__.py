"""Tiled, software-pipelined scaled add (AXPY) for TPU, and the layers and optimizers made of it.

A file imports from its own row and from those below:

    packaging     linen nnx transforms                        flax and optax are imported here and one row below
    its parts     gates training chaining momentum scaling updates transformation finite
    operations    axpy derivatives passes links launches      on two arrays, on trees of them
    placement     rules calls partitioning                    the same call under grad and vmap, and on each shard
    the engine    stream operation tile sums packing donation simulator   tiles of HBM arrays through a block function
    its parts     layouts places tiling blocks modes          how to view, how to cut, one block's maths, how to run
    the ground    contract config chips version               what is accepted, options, which TPU this is for
    beside        compiled bundles collectives hlo            what the TPU compiler made of any function, on chips alone
"""

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
