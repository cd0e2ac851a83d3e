"""How a kernel is simulated: Pallas' interpreter, as one operation of a program.

The interpreter runs a kernel by callbacks to the host, and JAX keeps the order of such callbacks by an effect. A
callback of the user's has that effect too, so JAX never drops one and no Flax scan takes one. But a simulated kernel
is a pure function of its operands: only the memory that it is simulated in, one for the whole process, wants one
kernel at a time. So it gets an effect of its own, that orders the kernels of a thread and promises nothing else; the
kernels of other threads wait for their turn.

Nor do its callbacks need arrays of JAX's, which they turn into NumPy's at once. A callback of the user's gets them by a
`device_put`, of more than 100 KiB by another thread of the pool that runs the devices: where as many devices simulate
as there are threads, all of them wait for one that is free, for ever (jax 0.10.2). And it takes half of the time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Primitive, jaxpr_as_fun

# JAX has no public way to make an effect, nor to ask its interpreter whether it is at work.
callbacks: Any = importlib.import_module("jax._src.callback")
core: Any = importlib.import_module("jax._src.core")
dispatch: Any = importlib.import_module("jax._src.dispatch")
effects: Any = importlib.import_module("jax._src.effects")
interpreter: Any = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
mlir: Any = importlib.import_module("jax._src.interpreters.mlir")
partial_eval: Any = importlib.import_module("jax._src.interpreters.partial_eval")


class Simulation(effects.Effect):
    """The effect of a simulated kernel: it takes its turn."""

    def __str__(self) -> str:
        return "Simulation"


_simulation = Simulation()

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

    def in_turn(*operands: jax.Array) -> Any:
        io_callback(_turns.take, _TAKEN, ordered=True)
        results = kernel(*operands)
        left = io_callback(_turns.leave, _TAKEN, ordered=True)
        # Nobody has a result before: a callback of the user's may get one, and simulate a kernel itself.
        return [jnp.where(jnp.broadcast_to(left, x.shape), x, jnp.zeros_like(x)) for x in results]

    # The devices of a mesh run one kernel together, and have to arrive together.
    alone = math.prod(jax.sharding.get_abstract_mesh().axis_sizes) == 1
    return lambda *operands: _simulated.bind(*operands, kernel=jax.make_jaxpr(in_turn if alone else kernel)(*operands))


_TAKEN = jax.ShapeDtypeStruct((), np.bool_)


class _Turns:
    """One kernel at a time, of all threads. A kernel that fails never leaves: after it, the next takes over."""

    PATIENCE = 2.0  # seconds; from taking its turn to making its memory a kernel took 0.007 at most, at a load of 8

    def __init__(self) -> None:
        self._taken = threading.Lock()
        self._by: tuple[int | None, types.FrameType | None] | None = None

    def take(self) -> np.bool_:
        me, alive = threading.current_thread(), time.monotonic()
        while not self._taken.acquire(timeout=0.002):
            if (by := self._by) is not None and not _runs(*by):  # it was interrupted
                break
            if interpreter._shared_memory is not None:
                alive = time.monotonic()
            elif time.monotonic() - alive > self.PATIENCE:  # the memory of a kernel that failed is gone
                break
        # What JAX's own threads run may go on in another of them.
        self._by = None if isinstance(me, threading._DummyThread) else (me.ident, _program())
        return np.bool_(True)

    def leave(self) -> np.bool_:
        self._by = None
        with contextlib.suppress(RuntimeError):  # it was taken over
            self._taken.release()
        return np.bool_(True)


def _program() -> types.FrameType | None:
    """The frame in which this thread runs the program that calls back to here."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in (callbacks.__file__, __file__):
        frame = frame.f_back
    return frame


def _runs(thread: int | None, program: types.FrameType | None) -> bool:
    """Whether a thread is still at it."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None and frame is not program:
        frame = frame.f_back
    return frame is not None


_turns = _Turns()


@_simulated.def_effectful_abstract_eval
def _abstract(*_: Any, kernel: Any) -> Any:
    return kernel.out_avals, {_simulation}


@_simulated.def_impl
def _under_disable_jit(*operands: Any, kernel: Any) -> Any:
    return jaxpr_as_fun(kernel)(*operands)


def _lowering(context: Any, *operands: Any, kernel: Any) -> Any:
    """The interpreter's own program, its callbacks in the order of our token."""
    platforms = context.module_context.platforms
    if len(platforms) > 1 or ("tpu" in platforms and jax.default_backend() != "tpu"):
        raise RuntimeError(
            "mode='simulate' runs kernels on the host of this very process; this program is being lowered for "
            f"{' and '.join(platforms)}. Use mode='tpu' to export or compile for TPU from here, one platform a "
            "program, or mode='reference' (plain jnp)"
        )
    theirs, module = callbacks._OrderedIOEffect, context.module_context
    rules = ((callbacks.io_callback_p, _lowering_callback), *(module.lowering_parameters.override_lowering_rules or ()))
    parameters = dataclasses.replace(module.lowering_parameters, override_lowering_rules=rules)
    inner = context.replace(
        module_context=module.replace(lowering_parameters=parameters),
        tokens_in=mlir.TokenSet({theirs: context.tokens_in.get(_simulation)}),
        tokens_out=None,
    )
    with _device_axes(getattr(module.axis_context, "manual_axes", frozenset())):
        results = mlir.lower_fun(jaxpr_as_fun(kernel), multiple_results=True)(inner, *operands)
    context.set_tokens_out(mlir.TokenSet({_simulation: inner.tokens_out.get(theirs)}))
    return results


def _lowering_callback(context: Any, *operands: Any, callback: Any, sharding: Any, ordered: bool, **_: Any) -> Any:
    """`io_callback`, but that the callback gets the arrays as they come, which are NumPy's."""
    theirs = callbacks._OrderedIOEffect
    results, token, _ = callbacks.emit_python_callback(
        context,
        lambda *arrays: tuple(map(np.asarray, callback(*arrays))),
        context.tokens_in.get(theirs) if ordered else None,
        list(operands),
        context.avals_in,
        context.avals_out,
        has_side_effect=True,
        returns_token=ordered,
        sharding=callbacks._callback_op_sharding(context.module_context.axis_context, sharding, context.avals_out),
    )
    if ordered:
        context.set_tokens_out(context.tokens_in.update_tokens(mlir.TokenSet({theirs: token})))
    return results


@contextlib.contextmanager
def _device_axes(names: frozenset[Any]) -> Iterator[None]:
    """The interpreter takes every named axis in sight for one of devices, a named axis of `jax.vmap` too."""
    environment = core.get_axis_env()
    devices = environment
    for name in set(environment.axis_sizes) - names:
        devices = devices.pop_pure(name)
    core.trace_ctx.set_axis_env(devices)
    try:
        yield
    finally:
        core.trace_ctx.set_axis_env(environment)


mlir.register_lowering(_simulated, _lowering)


def rematerialize(primitive: Any) -> None:
    """Lets `jax.checkpoint` run a primitive again where its policy doesn't save the results, as on TPU. Left to itself
    it saves those of whatever has an effect."""
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = _by_policy


def _by_policy(policy: Any, unknown: Any, there: Any, equation: Any) -> tuple[Any, Any, list[bool], list[bool], Any]:
    """What is computed now, what later, of which results nothing is known now, which are there later, from what."""
    no, yes = ([value] * len(equation.outvars) for value in (False, True))
    needed = [v for v, is_there in zip(equation.invars, there, strict=True) if isinstance(v, core.Var) and not is_there]
    if any(unknown):
        return None, equation, yes, yes, needed
    decision = policy(equation.primitive, *(v.aval for v in equation.invars), **equation.params)
    if isinstance(partial_eval.ensure_enum(decision), partial_eval.RecomputeType):
        return equation, equation, no, yes, needed
    return equation, None, no, no, []


def forget_failure() -> None:
    """Lets a thread simulate again after a kernel failed.

    On several devices JAX keeps the token of a computation that failed, and raises its error again at the next one
    (jax-ml/jax#37587).
    """
    token = dispatch.runtime_tokens.current_tokens.get(_simulation)
    if token is None:
        return
    try:
        token.block_until_ready()
    except jax.errors.JaxRuntimeError:
        dispatch.runtime_tokens.clear()
