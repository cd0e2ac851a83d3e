"""What is done to parameters from outside of a gradient transformation: updates added, averages kept."""

from __future__ import annotations

from typing import Any

from tiledops import links, passes
from tiledops.config import PipelineConfig
from tiledops.passes import Stage


def apply_updates(params: Any, updates: Any, *, config: PipelineConfig | None = None, specs: Any = None) -> Any:
    """p + u for every leaf, in float32, rounded once to the parameter's dtype: `optax.apply_updates`.

    One pass, in place where the jitted step donates `params`.

    >>> tiledops.apply_updates({"w": jnp.ones(3)}, {"w": jnp.arange(3.0)})
    {'w': Array([1., 2., 3.], dtype=float32)}

    Args:
      params: a tree of float32 or bfloat16 arrays of any shape; None stays None.
      updates: a tree of the same structure and shapes, each leaf float32 or bfloat16.
      config: how to tile, schedule and run it; default: `use_config`'s, else chosen for the chip.
      specs: a tree of the PartitionSpecs of params, for a mesh with `Auto` axes.

    Returns:
      The new parameters, in params' structure, shapes and dtypes.

    Raises:
      TypeError: a leaf that is not a float32 or bfloat16 array.
      ValueError: trees or shapes that differ.
    """
    new_params, _ = passes.run((), updates, params, apply=True, config=config, specs=specs)
    return new_params


def incremental_update(
    new_tensors: Any,
    old_tensors: Any,
    step_size: Any,
    *,
    config: PipelineConfig | None = None,
    specs: Any = None,
) -> Any:
    """step_size*new + (1 - step_size)*old for every leaf, as for Polyak averages: `optax.incremental_update`.

    One pass in float32, rounded once to the old tensor's dtype, so that the average keeps it, where Optax's takes on
    the wider of the two. In place where the jitted step donates `old_tensors`. Polyak and Juditsky, "Acceleration of
    Stochastic Approximation by Averaging" (1992).

    >>> tiledops.incremental_update({"w": jnp.ones(3)}, {"w": jnp.arange(3.0)}, 0.5)
    {'w': Array([0.5, 1. , 1.5], dtype=float32)}

    Args:
      new_tensors: a tree of float32 or bfloat16 arrays of any shape; None stays None.
      old_tensors: the average so far, a tree of the same structure and shapes, each leaf float32 or bfloat16.
      step_size: how much of the new there is in the average; a number, or an array that broadcasts to every leaf.
      config, specs: as in `apply_updates`.

    Returns:
      The new average, in the old one's structure, shapes and dtypes.

    Raises:
      TypeError: a leaf that is not a float32 or bfloat16 array; a step_size that is not a real number.
      ValueError: trees or shapes that differ.
    """
    rate = passes.number(step_size, "step_size")
    stage = Stage(links.average, (rate, 1 - rate))
    names = ("new_tensors", "old_tensors")
    average, _ = passes.run((stage,), new_tensors, old_tensors, apply=False, config=config, specs=specs, names=names)
    return average
