"""What a traced program runs."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import jax


def kernels(program: Any) -> Counter[str]:
    """The kernels of a jaxpr by name, those of the programs inside it too (a loop's body counts once)."""
    found: Counter[str] = Counter()
    for equation in getattr(program, "jaxpr", program).eqns:
        if equation.primitive.name == "pallas_call":
            found[equation.params["name"]] += 1
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                found += kernels(inner)
    return found


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


def fresh(fn: Any, **options: Any) -> Any:
    """`jax.jit(fn)` with a cache of its own. Jits of one function share theirs, and with it what was traced before
    under other settings of tiledops."""
    return jax.jit(functools.partial(fn), **options)
