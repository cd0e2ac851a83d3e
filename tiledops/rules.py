"""A function with rules of its own for differentiation and for `jax.vmap`: one primitive, and another for its tangent.

`jax.custom_vjp` gives reverse mode alone, and `jax.custom_jvp` would have JAX transpose the products one by one, each a
kernel that reads g again. Here the tangent of a call is a primitive, linear in the tangents of its operands, that has a
rule of either kind: forward mode evaluates it, reverse mode runs the one backward kernel in its place.

Nor can `jax.custom_vjp` have a forward rule that saves nothing for what nobody differentiates by. It knows by what a
call is differentiated (`symbolic_zeros`), but once the call is a step of a traced program, JAX keeps the shape of what
the forward rule saved in one place for that step: of two pullbacks of one jitted function by different arguments, the
first then reads its own as the second's, and its gradients are wrong (jax 0.10.2 to 0.12.0).

And `jax.custom_batching.custom_vmap` brings every mapped axis to the front: XLA then copies whole arrays before the
kernel. The primitive's batching rule gets the axes as they lie.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from tiledops import simulator


class Operand(NamedTuple):
    """What a forward rule gets of an operand: with `perturbed`, whether anybody differentiates by it."""

    value: jax.Array
    perturbed: bool


class transformable:  # noqa: N801  a decorator, spelled as JAX's are
    """A function of two static arguments and arrays: `function(one, other, *arrays)`.

    Its rules have the static arguments first, as JAX's have:

    - `deflinear(forward, pushforward, pullback)`. `forward(*operands) -> (results, saved)` gets each operand as an
      `Operand`; `pushforward(saved, *tangents) -> tangents of the results` gets None for an operand that has none; and
      its transpose, `pullback(saved, gradients) -> gradients`, a `SymbolicZero` for a result of several that nobody
      reads. It returns None where there is no gradient, and none for operands at the end that never have one.
    - `defjvp(rule)`, as that of `jax.custom_jvp`, where JAX may transpose what it does.
    - `defvmap(rule)`, for `rule(axis, one, other, arrays, axes) -> (results, axes of the results)`, where `axis` has a
      `size` and a `spmd_name`, and at least one of `axes` is not None.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def deflinear(
        self, forward: Callable[..., Any], pushforward: Callable[..., Any], pullback: Callable[..., Any]
    ) -> None:
        self.forward, self.pushforward, self.pullback = forward, pushforward, pullback

    def defjvp(self, rule: Callable[..., Any]) -> None:
        self.differentiable: Any = jax.custom_jvp(self.function, nondiff_argnums=(0, 1))
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


@dataclasses.dataclass(frozen=True)
class _Tangent:
    """The tangent of a call, as a function of what it saved and of the tangents of the operands that have one.

    Attributes:
      call: whose it is.
      perturbed: which of its operands have a tangent.
      saved, results: the structures of what it saved and of what it returned.
      types: of the results, which are those of their tangents.
      effects: what the call does beside: a simulated kernel has its turn, and one for the tangent has it too.
    """

    call: _Call
    perturbed: tuple[bool, ...]
    saved: Any
    results: Any
    types: tuple[Any, ...]
    effects: frozenset[Any]

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        given = iter(arrays[self.saved.num_leaves :])
        tangents = [next(given) if perturbed else None for perturbed in self.perturbed]
        call = self.call
        return jax.tree.leaves(call.rules.pushforward(call.one, call.other, self._saved(arrays), *tangents))

    def transposed(self, gradients: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """The gradients of the perturbed operands; `arrays` begin with what was saved."""
        call, of_results = self.call, jax.tree.unflatten(self.results, gradients)
        everyone = call.rules.pullback(call.one, call.other, self._saved(arrays), of_results)
        return [gradient for gradient, perturbed in zip(everyone, self.perturbed, strict=False) if perturbed]

    def _saved(self, arrays: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.saved, arrays[: self.saved.num_leaves])


_call: Any = Primitive("tiledops_call")
_tangent: Any = Primitive("tiledops_tangent")


@functools.partial(jax.jit, static_argnums=0)
def _jitted(call: _Call | _Tangent, *arrays: jax.Array) -> Any:
    return call(*arrays)


def _eagerly(*arrays: jax.Array, call: _Call | _Tangent, program: Any = None) -> list[jax.Array]:
    # One program, as jnp's operations are: an array on a mesh meets one on a single device in `jit` alone.
    return jax.tree.leaves(_jitted(call, *arrays))


def _abstract(*_: Any, call: _Call, program: Any) -> Any:
    return program.out_avals, program.effects


def _abstract_tangent(*_: Any, call: _Tangent) -> Any:
    return call.types, call.effects


def _differentiated(primals: Any, tangents: Any, *, call: _Call, program: Any) -> tuple[Any, Any]:
    if hasattr(call.rules, "differentiable"):
        return _jvp(lambda *arrays: call.rules.differentiable(call.one, call.other, *arrays), primals, tangents)
    perturbed = tuple(type(tangent) is not ad.Zero for tangent in tangents)
    results, saved = call.rules.forward(call.one, call.other, *map(Operand, primals, perturbed))
    leaves, structure = jax.tree.flatten(saved)
    out = jax.tree.structure(results)
    tangent = _Tangent(call, perturbed, structure, out, tuple(program.out_avals), frozenset(program.effects))
    given = (tangent for tangent, has_one in zip(tangents, perturbed, strict=True) if has_one)
    return jax.tree.leaves(results), _tangent.bind(*leaves, *given, call=tangent)


def _differentiated_again(primals: Any, tangents: Any, *, call: _Tangent) -> tuple[Any, Any]:
    return _jvp(call, primals, tangents)


def _jvp(function: Callable[..., Any], primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
    """`jax.jvp` by what has a tangent alone."""
    perturbed = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def of_perturbed(*values: jax.Array) -> list[jax.Array]:
        operands = list(primals)
        for i, value in zip(perturbed, values, strict=True):
            operands[i] = value
        return jax.tree.leaves(function(*operands))

    return jax.jvp(of_perturbed, [primals[i] for i in perturbed], [tangents[i] for i in perturbed])


def _transposed(gradients: Any, *arrays: Any, call: _Tangent) -> list[Any]:
    if all(type(g) is ad.Zero for g in gradients):
        return [None] * len(arrays)
    known = [SymbolicZero(g.aval) if type(g) is ad.Zero else g for g in gradients]
    of_perturbed = call.transposed(known, arrays)
    return [None] * (len(arrays) - len(of_perturbed)) + of_perturbed


def _batched(axis: Any, arrays: Any, axes: Any, *, call: _Call, program: Any) -> tuple[Any, Any]:
    if all(mapped is None for mapped in axes):  # one call for the whole batch, out here where the whole mesh is
        results = jax.tree.leaves(call.rules(call.one, call.other, *arrays))
        return results, [None] * len(results)
    return call.rules.mapped(axis, call.one, call.other, arrays, axes)


def _batched_tangent(axis: Any, arrays: Any, axes: Any, *, call: _Tangent) -> tuple[Any, Any]:
    results = jax.vmap(call, axes, axis_size=axis.size, spmd_axis_name=axis.spmd_name)(*arrays)
    return results, [0] * len(results)


def _lowering(context: Any, *operands: Any, call: _Call, program: Any) -> Any:
    return mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)(context, *operands)


def _lowering_tangent(context: Any, *operands: Any, call: _Tangent) -> Any:
    return mlir.lower_fun(call, multiple_results=True)(context, *operands)


for _primitive, _abstract_rule, _jvp_rule, _batching_rule, _lowering_rule in (
    (_call, _abstract, _differentiated, _batched, _lowering),
    (_tangent, _abstract_tangent, _differentiated_again, _batched_tangent, _lowering_tangent),
):
    _primitive.multiple_results = True
    _primitive.def_impl(_eagerly)
    _primitive.def_effectful_abstract_eval(_abstract_rule)
    ad.primitive_jvps[_primitive] = _jvp_rule
    batching.fancy_primitive_batchers[_primitive] = _batching_rule
    # Not cacheable: it stays in sight which operands the program gives up.
    mlir.register_lowering(_primitive, _lowering_rule, cacheable=False)
    simulator.rematerialize(_primitive)
ad.primitive_transposes[_tangent] = _transposed
