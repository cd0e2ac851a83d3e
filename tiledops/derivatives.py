"""A function with a derivative rule of its own, that each differentiation asks anew.

A backward rule that leaves out what nobody asks for, and a forward rule that saves nothing for it, hand something else
from one to the other each time. `jax.custom_vjp` knows by what a call is differentiated (`symbolic_zeros`), but once
the call is a step of a traced program, JAX keeps the shape of what the forward rule saved in one place for that step:
of two pullbacks of one jitted function by different arguments, the first then reads its own as the second's, and its
gradients are wrong (jax 0.10.2 to 0.12.0). So here a call is a primitive, whose rule of differentiation calls the
`custom_vjp` function as if for the first time.
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


class differentiable:  # noqa: N801  a decorator, spelled as JAX's are
    """A `jax.custom_vjp` function of two static arguments and arrays."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._rule = jax.custom_vjp(function, nondiff_argnums=(0, 1))

        self.defvjp = self._rule.defvjp

    def __call__(self, one: Any, other: Any, *arrays: jax.Array) -> Any:
        return _bind(_Function(self._rule, one, other), arrays)


@dataclasses.dataclass(frozen=True)
class _Function:
    """A function of arrays, equal to another with the same rule and static arguments."""

    rule: Any
    one: Any
    other: Any

    def __call__(self, *arrays: jax.Array) -> Any:
        return self.rule(self.one, self.other, *arrays)


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A function under `jax.vmap`, which is one more function with the same kind of derivative."""

    function: Callable[..., Any]
    axes: tuple[int | None, ...]
    size: int
    spmd_axis_name: Any

    def __call__(self, *arrays: jax.Array) -> Any:
        mapped = jax.vmap(self.function, self.axes, axis_size=self.size, spmd_axis_name=self.spmd_axis_name)
        return mapped(*arrays)


_call: Any = Primitive("tiledops_call")
_call.multiple_results = True


@functools.partial(jax.jit, static_argnums=0)
def _jitted(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    return function(*arrays)


def _bind(function: Callable[..., Any], arrays: Any) -> Any:
    traced = _jitted.trace(function, *arrays)
    results = _call.bind(*arrays, function=function, program=traced.jaxpr)
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), results)


@_call.def_impl
def _eagerly(*arrays: jax.Array, function: Any, program: Any) -> list[jax.Array]:
    return jax.tree.leaves(_jitted(function, *arrays))


@_call.def_effectful_abstract_eval
def _abstract(*_: Any, function: Any, program: Any) -> Any:
    return program.out_avals, program.effects


def _differentiated(primals: Any, tangents: Any, *, function: Any, program: Any) -> tuple[Any, Any]:
    perturbed = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def of_perturbed(*values: jax.Array) -> list[jax.Array]:
        operands = list(primals)
        for i, value in zip(perturbed, values, strict=True):
            operands[i] = value
        return jax.tree.leaves(function(*operands))

    return jax.jvp(of_perturbed, [primals[i] for i in perturbed], [tangents[i] for i in perturbed])


def _batched(axis: Any, arrays: Any, axes: Any, *, function: Any, program: Any) -> tuple[Any, Any]:
    if all(mapped is None for mapped in axes):  # one call for the whole batch
        results = _call.bind(*arrays, function=function, program=program)
        return results, [None] * len(results)
    results = jax.tree.leaves(_bind(_Mapped(function, tuple(axes), axis.size, axis.spmd_name), arrays))
    return results, [0] * len(results)


def _lowering(context: Any, *operands: Any, function: Any, program: Any) -> Any:
    return mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(context, *operands)


ad.primitive_jvps[_call] = _differentiated
batching.fancy_primitive_batchers[_call] = _batched
mlir.register_lowering(_call, _lowering, cacheable=False)  # that it stays in sight which operands the program gives up
simulator.rematerialize(_call)
