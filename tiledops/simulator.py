"""How a kernel is simulated: Pallas' interpreter, as one operation of a program.

The interpreter runs a kernel by callbacks to the host, and JAX keeps the order of such callbacks by an effect. A
callback of the user's has that effect too, so JAX never drops one and no Flax scan takes one. But a simulated kernel
is a pure function of its operands: only the memory that it is simulated in, one for the whole process, wants one kernel
at a time. So it gets an effect of its own, that orders kernels and promises nothing else.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Primitive, jaxpr_as_fun

# JAX has no public way to make an effect.
callback: Any = importlib.import_module("jax._src.callback")
dispatch: Any = importlib.import_module("jax._src.dispatch")
effects: Any = importlib.import_module("jax._src.effects")
mlir: Any = importlib.import_module("jax._src.interpreters.mlir")
partial_eval: Any = importlib.import_module("jax._src.interpreters.partial_eval")


class Simulation(effects.Effect):
    """The effect of a simulated kernel: it takes its turn."""

    def __str__(self) -> str:
        return "Simulation"


_turn = Simulation()

for _rule in (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.shardable_ordered_effects,  # each device has its own turns
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,  # running it twice is harmless
    partial_eval.dceable_effects,  # and so is not running it, if nobody wants its results
):
    _rule.add_type(Simulation)


@functools.cache
def interpret_params(num_cores: int) -> Any:
    """How the interpreter runs a kernel."""
    return pltpu.InterpretParams(
        detect_races=True,
        # A ragged last block reaches past the array's edge, as it does on TPU; what lies there reads as NaN.
        buffer_bounds="padded",
        num_cores_or_threads=num_cores,
    )


_simulated: Any = Primitive("tiledops_simulated")
_simulated.multiple_results = True


def simulated(kernel: Callable[..., Any]) -> Callable[..., list[jax.Array]]:
    """A pallas_call with `interpret=interpret_params(...)`, for use under `jax.jit`, with no effect but its turn."""
    return lambda *operands: _simulated.bind(*operands, kernel=jax.make_jaxpr(kernel)(*operands))


@_simulated.def_effectful_abstract_eval
def _abstract(*_: Any, kernel: Any) -> Any:
    return kernel.out_avals, {_turn}


def _lowering(context: Any, *operands: Any, kernel: Any) -> Any:
    """The interpreter's own program, its callbacks in the order of our token."""
    theirs = callback._OrderedIOEffect
    inner = context.replace(tokens_in=mlir.TokenSet({theirs: context.tokens_in.get(_turn)}), tokens_out=None)
    results = mlir.lower_fun(jaxpr_as_fun(kernel), multiple_results=True)(inner, *operands)
    context.set_tokens_out(mlir.TokenSet({_turn: inner.tokens_out.get(theirs)}))
    return results


mlir.register_lowering(_simulated, _lowering)


def forget_failure() -> None:
    """Lets a thread simulate again after a kernel failed.

    On several devices JAX keeps the token of a computation that failed, and raises its error again at the next one
    (jax-ml/jax#37587).
    """
    token = dispatch.runtime_tokens.current_tokens.get(_turn)
    if token is None:
        return
    try:
        token.block_until_ready()
    except jax.errors.JaxRuntimeError:
        dispatch.runtime_tokens.clear()
