"""Steps that are taken only if every gradient is finite.

One reduction over the gradients says whether they are; its answer is one more number of the pass that follows, which
then stores what was there before. So a step that is not taken costs what one that is costs, and nothing branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from tiledops import passes

NEVER = 2**31 - 1  # no more than so many steps in a row are ever refused: the count saturates there


class Request(NamedTuple):
    """What is asked of one run of a transformation, beside its operands.

    Attributes:
      apply: whether to return new parameters, not updates.
      accept: whether to take the step, a scalar array; or None, to take it. Where it is False parameters and state stay
        as they are, and updates are zero.
      squares: the sum of squares of all incoming updates, if it is known: NaN if one of them is not finite.
    """

    apply: bool
    accept: jax.Array | None = None
    squares: jax.Array | None = None


Run = Callable[..., tuple[Any, Any]]  # run(updates, state, params, request, **extra_args) -> (results, state)


def guard(run: Run, max_consecutive_errors: Any) -> Run:
    """`run`, with its state in an `optax.ApplyIfFiniteState`, and its steps refused as `optax.apply_if_finite` does."""

    def guarded(grads: Any, state: Any, params: Any, request: Request, **extra_args: Any) -> tuple[Any, Any]:
        if not isinstance(state, optax.ApplyIfFiniteState):
            raise ValueError(
                "the state must be the optax.ApplyIfFiniteState that apply_if_finite(...).init() makes; got "
                f"{type(state).__name__}"
            )
        squares = request.squares
        if squares is None:
            squares = passes.sum_of_squares(grads, checked=True, specs=extra_args.get("specs"))
        finite = ~jnp.isnan(squares)
        in_a_row = jnp.where(finite, 0, optax.safe_increment(state.notfinite_count))
        total = jnp.where(finite, state.total_notfinite, optax.safe_increment(state.total_notfinite))
        accept = finite | (in_a_row > max_consecutive_errors)
        if request.accept is not None:
            accept &= request.accept
        results, inner = run(grads, state.inner_state, params, Request(request.apply, accept, squares), **extra_args)
        new = optax.ApplyIfFiniteState(in_a_row, finite, total, inner)
        return results, chosen(request.accept, new, state, inner)

    return guarded


def counted(state: Any) -> optax.ApplyIfFiniteState:
    """A state with its count of steps that were not finite, from zero on."""
    if isinstance(state, optax.ApplyIfFiniteState):
        return state
    return optax.ApplyIfFiniteState(jnp.zeros((), jnp.int32), jnp.array(True), jnp.zeros((), jnp.int32), state)


def way_out(state: Any) -> str:
    """What to do with a state that counts, where one that doesn't is wanted."""
    if not isinstance(state, optax.ApplyIfFiniteState):
        return ""
    return ". It counts steps that are not finite: go on with check_finite=True, or with its inner_state"


def chosen(accept: jax.Array | None, new: Any, old: Any, done: Any = ()) -> Any:
    """The new tree, or the old one where a step is not accepted; of `done` the leaves are chosen already."""
    if accept is None:
        return new
    settled = {id(leaf) for leaf in jax.tree.leaves(done)}
    return jax.tree.map(lambda x, y: x if x is y or id(x) in settled else jnp.where(accept, x, y), new, old)
