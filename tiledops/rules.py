"""A function with rules of its own for differentiation and for `jax.vmap`: one primitive.

A backward rule that leaves out what nobody asks for, and a forward rule that saves nothing for it, hand something else
from one to the other each time. `jax.custom_vjp` knows by what a call is differentiated (`symbolic_zeros`), but once
the call is a step of a traced program, JAX keeps the shape of what the forward rule saved in one place for that step:
of two pullbacks of one jitted function by different arguments, the first then reads its own as the second's, and its
gradients are wrong (jax 0.10.2 to 0.12.0). So here a call is a primitive, whose rule of differentiation calls the
`custom_vjp` function as if for the first time.

And `jax.custom_batching.custom_vmap` brings every mapped axis to the front: XLA then copies whole arrays before the
kernel. The primitive's batching rule gets the axes as they lie.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from tiledops import simulator


class transformable:  # noqa: N801  a decorator, spelled as JAX's are
    """A function of two static arguments and arrays: `function(one, other, *arrays)`.

    Its rules are given as JAX's are: `defvjp` or `defjvp`, with the static arguments first, and `defvmap` for
    `rule(axis, one, other, arrays, axes) -> (results, axes of the results)`, where `axis` has a `size` and a
    `spmd_name`, and at least one of `axes` is not None.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        self.differentiable: Any = jax.custom_vjp(self.function, nondiff_argnums=(0, 1))
        self.differentiable.defvjp(forward, backward, symbolic_zeros=True)

    def defjvp(self, rule: Callable[..., Any]) -> None:
        self.differentiable = jax.custom_jvp(self.function, nondiff_argnums=(0, 1))
        self.differentiable.defjvp(rule)

    def defvmap(self, rule: Callable[..., Any]) -> None:
        self.mapped = rule

    def __call__(self, one: Any, other: Any, *arrays: jax.Array) -> Any:
        call = _Call(self, one, other)
        traced = _jitted.trace(call, *arrays)
        results = _call.bind(*arrays, call=call, program=traced.jaxpr)
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), results)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A function of arrays, equal to another with the same rules and static arguments."""

    rules: transformable
    one: Any
    other: Any

    def __call__(self, *arrays: jax.Array) -> Any:
        return self.rules.function(self.one, self.other, *arrays)


_call: Any = Primitive("tiledops_call")
_call.multiple_results = True


@functools.partial(jax.jit, static_argnums=0)
def _jitted(call: _Call, *arrays: jax.Array) -> Any:
    return call(*arrays)


@_call.def_impl
def _eagerly(*arrays: jax.Array, call: _Call, program: Any) -> list[jax.Array]:
    # One program, as jnp's operations are: an array on a mesh meets one on a single device in `jit` alone.
    return jax.tree.leaves(_jitted(call, *arrays))


@_call.def_effectful_abstract_eval
def _abstract(*_: Any, call: _Call, program: Any) -> Any:
    return program.out_avals, program.effects


def _differentiated(primals: Any, tangents: Any, *, call: _Call, program: Any) -> tuple[Any, Any]:
    perturbed = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def of_perturbed(*values: jax.Array) -> list[jax.Array]:
        operands = list(primals)
        for i, value in zip(perturbed, values, strict=True):
            operands[i] = value
        return jax.tree.leaves(call.rules.differentiable(call.one, call.other, *operands))

    return jax.jvp(of_perturbed, [primals[i] for i in perturbed], [tangents[i] for i in perturbed])


def _batched(axis: Any, arrays: Any, axes: Any, *, call: _Call, program: Any) -> tuple[Any, Any]:
    if all(mapped is None for mapped in axes):  # one call for the whole batch
        results = _call.bind(*arrays, call=call, program=program)
        return results, [None] * len(results)
    return call.rules.mapped(axis, call.one, call.other, arrays, axes)


def _lowering(context: Any, *operands: Any, call: _Call, program: Any) -> Any:
    return mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(context, *operands)


ad.primitive_jvps[_call] = _differentiated
batching.fancy_primitive_batchers[_call] = _batched
mlir.register_lowering(_call, _lowering, cacheable=False)  # that it stays in sight which operands the program gives up
simulator.rematerialize(_call)
