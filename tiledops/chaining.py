"""How several gradient transformations become one pass: the stages of all, strung together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import optax  # type: ignore[import-untyped]

from tiledops.finite import Request, way_out
from tiledops.transformation import Incoming, Plan, TiledTransformation, Update


def chain(*transformations: optax.GradientTransformation) -> TiledTransformation:
    """Applies transformations one after the other, in as few passes as they allow: `optax.chain`.

    Transformations of this library become one pass over each leaf, whose `step` also applies the update, in place. One
    that needs all incoming updates first (`clip_by_global_norm`) begins a new pass, and one of Optax's own is a pass by
    itself. Between the links of a pass everything stays float32.

    >>> tx = tiledops.transforms.chain(tiledops.transforms.trace(0.9), tiledops.transforms.scale(-0.5))
    >>> params = jnp.ones(2)
    >>> params, state = tx.step(jnp.ones(2), tx.init(params), params)
    >>> params
    Array([0.5, 0.5], dtype=float32)

    Args:
      *transformations: tiled ones, chains of these, or Optax's.

    Returns:
      A transformation whose state is the tuple of theirs, as with Optax.

    Raises:
      TypeError: something that is not a gradient transformation.
    """
    members = [TiledTransformation.adopt(transformation) for transformation in transformations]
    passes: list[list[TiledTransformation]] = []
    for member in members:
        joins = passes and passes[-1][-1].made.plan and member.made.plan and not member.made.reads_all
        if joins:
            passes[-1].append(member)
        else:
            passes.append([member])
    if len(passes) <= 1 and all(member.made.plan for member in members):
        return _one_pass(members)
    return _several_passes(passes)


def _one_pass(members: Sequence[TiledTransformation]) -> TiledTransformation:
    planners = [planner for member in members if (planner := member.made.plan)]

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(member.init(params) for member in members)

    def plan(state: Any, incoming: Incoming) -> Plan:
        _check_states(state, len(members))
        plans = [plan(its, incoming) for plan, its in zip(planners, state, strict=True)]

        def finish(new: list[tuple[Any, ...]]) -> tuple[Any, ...]:
            trees = iter(new)
            return tuple(plan.finish([next(trees) for _ in plan.stages]) for plan in plans)

        return Plan(tuple(stage for plan in plans for stage in plan.stages), finish)

    return TiledTransformation.of(init, plan, reads_all=bool(members) and members[0].made.reads_all)


def _several_passes(passes: list[list[TiledTransformation]]) -> TiledTransformation:
    """Each pass is a chain; the state is the concatenation of theirs."""
    parts = [_one_pass(members) if members[0].made.plan else _alone(members[0]) for members in passes]
    ends = list(itertools.accumulate(len(members) for members in passes))

    def split(state: Any) -> list[Any]:
        _check_states(state, ends[-1])
        return [state[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(state for part in parts for state in part.init(params))

    def run(grads: Any, state: Any, params: Any, request: Request, **extra_args: Any) -> tuple[Any, Any]:
        new: tuple[Any, ...] = ()
        for part, old in zip(parts, split(state), strict=True):
            its_request = request._replace(apply=request.apply and part is parts[-1])
            grads, its = part.made.run(grads, old, params, its_request, **extra_args)
            new += its
            request = request._replace(squares=None)  # those that come next are others
        return grads, new

    return TiledTransformation(init, Update(run))


def _alone(member: TiledTransformation) -> TiledTransformation:
    """A transformation that is a pass of its own, as a chain of one."""

    def run(grads: Any, state: Any, params: Any, request: Request, **extra_args: Any) -> tuple[Any, Any]:
        grads, its = member.made.run(grads, state[0], params, request, **extra_args)
        return grads, (its,)

    return TiledTransformation(lambda params: (member.init(params),), Update(run))


def _check_states(state: Any, count: int) -> None:
    if not isinstance(state, tuple) or hasattr(state, "_fields") or len(state) != count:
        raise ValueError(
            f"the state of a chain of {count} must be the tuple of {count} states that its init() makes; got "
            f"{type(state).__name__}" + (f" of {len(state)}" if isinstance(state, tuple) else "") + way_out(state)
        )
