"""In place where the caller gives the buffer up, and only there.

A kernel that aliases an input to an output makes XLA copy the input first wherever it may not be overwritten: at worst
the copy moves more bytes than the kernel. One that doesn't makes XLA copy the result afterwards wherever the buffer was
donated, or is carried by a loop. Which of the two it is shows only when the program is lowered: an argument of the
program is the caller's, unless it is donated; whatever the program has made itself can be taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from tiledops import chips

Aliases = tuple[tuple[int, int], ...]

_in_place: Any = Primitive("tiledops_in_place")
_in_place.multiple_results = True


class Kernel(Protocol):
    """A kernel, hashable, before it is known which of its operands it may overwrite."""

    def __call__(self, aliases: Aliases) -> Callable[..., tuple[jax.Array, ...]]: ...

    def like(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Arrays of the types of its results. Raises what the kernel itself would."""
        ...


def in_place(kernel: Kernel, aliases: Aliases, skip: int, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """`kernel(aliases)(*operands)`, with those of the aliases whose operand may be overwritten.

    Args:
      kernel: the kernel for a choice of aliases.
      aliases: pairs (operand, result), the operands counted from `skip` on.
    """
    if not aliases:
        return kernel(())(*operands)
    chips.lower_calls_inline()
    return tuple(_in_place.bind(*operands, kernel=kernel, aliases=aliases, skip=skip))


@_in_place.def_impl
def _eager(*operands: Any, kernel: Kernel, aliases: Aliases, skip: int) -> Any:
    return kernel(())(*operands)  # outside `jit` every array is the caller's


@_in_place.def_abstract_eval
def _abstract(*operands: Any, kernel: Kernel, aliases: Aliases, skip: int) -> Any:
    return list(jax.make_jaxpr(kernel.like)(*operands).out_avals)  # which aliases to trace it with, `_lower` knows


def _lower(context: Any, *operands: Any, kernel: Kernel, aliases: Aliases, skip: int) -> Any:
    allowed = tuple((i, out) for i, out in aliases if not _is_callers(operands[skip + i]))
    return mlir.lower_fun(kernel(allowed), multiple_results=True)(context, *operands)


# Not cacheable: JAX would lower it once, in a function of its own, whose arguments say nothing.
mlir.register_lowering(_in_place, _lower, cacheable=False)


def _is_callers(value: Any) -> bool:
    """Whether an MLIR value is an argument of the program that the caller keeps."""
    argument = value.maybe_downcast()
    if not hasattr(argument, "arg_number"):  # the result of an operation; XLA may turn these two into views of another
        operation = value.owner.operation
        return operation.name in ("stablehlo.reshape", "stablehlo.transpose") and _is_callers(operation.operands[0])
    inside = argument.owner.owner.operation
    if inside.name == "sdy.manual_computation":  # what `jax.shard_map` lowers to
        return _is_callers(inside.operands[argument.arg_number])
    if inside.name != "func.func" or inside.attributes["sym_name"].value != "main":  # a loop's body, or a jit inside
        return False
    attributes = str(inside.attributes["arg_attrs"][argument.arg_number]) if "arg_attrs" in inside.attributes else ""
    return "tf.aliasing_output" not in attributes and "jax.buffer_donor" not in attributes
