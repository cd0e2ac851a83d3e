"""Programs that the tests run, and what a traced one runs."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import tiledops
from tiledops import chips, layouts, simulator

# Of the indices of a, x and y: each that can be asked for.
SUBSETS = [s for n in (1, 2, 3) for s in itertools.combinations(range(3), n)]


def jnp_axpy(a: Any, x: Any, y: Any) -> Any:
    return a * x + y


def differentiated(a: Any, x: Any, y: Any, g: Any) -> Any:
    """The result of `axpy`, and the gradients of its operands."""
    out, pullback = jax.vjp(tiledops.axpy, a, x, y)
    return out, *pullback(g)


def kernels(program: Any) -> Counter[str]:
    """The kernels of a jaxpr by name, those of the programs inside it too (a loop's body counts once)."""
    return Counter(call["name"] for call in _calls(program))


def of(argnums: tuple[int, ...], fn: Any, *operands: Any) -> tuple[Any, list[Any]]:
    """`fn` as a function of some of its operands, the others fixed; and those operands."""

    def of_wanted(*wanted: Any) -> Any:
        given = dict(zip(argnums, wanted, strict=True))
        return fn(*(given.get(i, operand) for i, operand in enumerate(operands)))

    return of_wanted, [operands[i] for i in argnums]


def saved(fn: Any, *operands: Any) -> list[int]:
    """How many elements each array has that the forward pass hands to the backward pass, of an equation's each once."""
    traced = jax.make_jaxpr(lambda *operands: jax.vjp(fn, *operands)[1])(*operands)
    return sorted(v.aval.size for v in set(traced.jaxpr.outvars))


def blocks(program: Any) -> list[str]:
    """The tile of each kernel of a jaxpr, as its metadata has it."""
    return [dict(call["metadata"])["block"] for call in _calls(program)]


def for_two_cores(report: Any, gain: tuple[int, ...]) -> int:
    """HBM bytes that a second TensorCore costs: a scalar is windowed, so that XLA copies its 512 padded bytes before
    and after; each core's part of the gain's gradient is written, read and added."""
    padded = 4 * layouts.round_up(math.prod(gain), 1024)
    return 0 if report.kernels[0].cores == 1 else 2 * 512 + 4 * padded


def _calls(program: Any) -> Iterator[dict[str, Any]]:
    for equation in getattr(program, "jaxpr", program).eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params
            continue
        if equation.primitive.name == "tiledops_in_place":  # the kernel of its lowering
            yield from _calls(jax.make_jaxpr(equation.params["kernel"](()))(*(v.aval for v in equation.invars)))
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from _calls(inner)


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


def fresh(fn: Any, **options: Any) -> Any:
    """`jax.jit(fn)` with a cache of its own. Jits of one function share theirs, and with it what was traced before
    under other settings of tiledops."""
    return jax.jit(functools.partial(fn), **options)


def racing(x: Any) -> Any:
    """Two cores that write one place, under the parameters that our own kernels are simulated with."""

    def both_write(x: Any, out: Any) -> None:
        pltpu.sync_copy(x, out)

    chips.prepare_simulator()
    return pl.pallas_call(
        both_write,
        grid=(2,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=(pltpu.PARALLEL,)),
        interpret=simulator.interpret_params(2),
    )(x)
