"""What a tiled gradient transformation is.

A transformation says in a `Plan` what it does at a step: its stages, each a link of `tiledops.links` with this step's
numbers and trees of state, and the state that follows. `update` and `step` are made of that, and so are `chain`, in
`tiledops.chaining`, and `apply_if_finite`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from tiledops import contract, finite, passes
from tiledops.finite import Request, Run
from tiledops.passes import Stage


class Plan(NamedTuple):
    """What a transformation does at one step: its stages, and its state after them from their new trees of state."""

    stages: tuple[Stage, ...]
    finish: Callable[[list[tuple[Any, ...]]], Any]


class Incoming(NamedTuple):
    """The updates that a pass begins with, how they are sharded, and their sum of squares if it is known."""

    updates: Any
    specs: Any
    squares: jax.Array | None


Planner = Callable[[Any, Incoming], Plan]  # plan(state, incoming)


@dataclasses.dataclass(frozen=True)
class Update:
    """A transformation's `update`, with what else is made of the same: so a copy of the pair (init, update) is whole.

    Attributes:
      run: what `update` and `step` are made of.
      plan: the links that `run` is made of; None: it is not, hence a pass of its own.
      reads_all: the plan needs the values of all incoming updates, so that it can only be the first of a pass.
      counts: whether its own state counts steps that are not finite.
    """

    run: Run
    plan: Planner | None = None
    reads_all: bool = False
    counts: bool = False

    def __call__(self, updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        return self.run(updates, state, params, Request(apply=False), **extra_args)


class TiledTransformation(optax.GradientTransformationExtraArgs):
    """An Optax gradient transformation with one more function, `step`.

    Attributes:
      init: `init(params) -> state`.
      update: `update(updates, state, params=None, **extra_args) -> (updates, state)`, as Optax has it.
      step: `step(grads, state, params, *, check_finite=False, **extra_args) -> (params, state)`: `update` and
        `apply_updates` together, in one pass if the whole is a chain of links, in place where `state` and `params` are
        donated.

    With `check_finite=True` a step whose gradients are not all finite leaves parameters and state bit for bit as they
    are. What it reports is in the state, an `optax.ApplyIfFiniteState`: `last_finite`, and the counts `total_notfinite`
    and `notfinite_count` (in a row); `inner_state` is the transformation's own. A state without them becomes one with
    them. To have them from the start, which a loop of `jax.lax` needs, use `apply_if_finite`, whose every step checks.
    The check is one reduction over the gradients, and none of its own where the chain begins with
    `clip_by_global_norm`. Gradients that are finite, but so large that their sum of squares overflows, pass.

    `jax.jit` gives donated buffers to results of the same shape in the order in which both come. A training step must
    therefore return what it donates in the order of its arguments, `train_step(params, state, batch) -> (params, state,
    loss)`: crossed, every parameter and every state is copied before the kernel. So don't jit `step` itself.

    On a mesh with Auto axes both take an extra argument `specs`: a tree of the parameters' PartitionSpecs, or a prefix
    of it.
    """

    def step(
        self, grads: Any, state: Any, params: Any, *, check_finite: bool = False, **extra_args: Any
    ) -> tuple[Any, Any]:
        """`(params, state)` after one step: as the class says."""
        if not isinstance(check_finite, (bool, np.bool_)):
            raise TypeError(f"check_finite must be True or False; got {check_finite!r}")
        run = self.made.run
        if check_finite and not self.made.counts:
            run, state = finite.guard(run, finite.NEVER), finite.counted(state)
        return run(grads, state, params, Request(apply=True), **extra_args)

    @property
    def made(self) -> Update:
        """What it is made of; an `update` that somebody else put in its place is one of Optax's."""
        return self.update if isinstance(self.update, Update) else _adopted(self.update)

    @classmethod
    def of(
        cls, init: Callable[[Any], Any], plan: Planner, kind: type | None = None, *, reads_all: bool = False
    ) -> TiledTransformation:
        """From `init`, which makes a state of some `kind`, and from what a step does; all else follows."""

        def checked(state: Any, incoming: Incoming) -> Plan:
            if kind is not None and not isinstance(state, kind):
                raise ValueError(
                    f"the state must be the optax.{kind.__name__} that the transformation's init() makes; got "
                    f"{type(state).__name__}{finite.way_out(state)}"
                )
            return plan(state, incoming)

        def run(grads: Any, state: Any, params: Any, request: Request, **extra_args: Any) -> tuple[Any, Any]:
            specs = extra_args.get("specs")
            stages, finish = checked(state, Incoming(grads, specs, request.squares))
            if params is None and (request.apply or any(stage.link.reads_param for stage in stages)):
                raise ValueError("this transformation needs the parameters; got params=None. Pass them to update()")
            names = ("grads" if request.apply else "updates", "params")  # of `step`'s argument, or `update`'s
            results, new = passes.run(
                stages, grads, params, apply=request.apply, accept=request.accept, specs=specs, names=names
            )
            return results, finite.chosen(request.accept, finish(new), state, new)

        return cls(init, Update(run, checked, reads_all))

    @classmethod
    def adopt(cls, transformation: optax.GradientTransformation) -> TiledTransformation:
        """Any transformation of Optax's, its `step` made of its `update` and one kernel a leaf."""
        if isinstance(transformation, cls):
            return transformation
        if not isinstance(transformation, optax.GradientTransformation):
            raise TypeError(
                f"chain takes gradient transformations, tiledops' or Optax's; got {type(transformation).__name__}"
            )
        theirs = optax.with_extra_args_support(transformation)
        return cls(theirs.init, _adopted(theirs.update))


def _adopted(update: Callable[..., tuple[Any, Any]]) -> Update:
    """Of an `update` of Optax's."""

    def run(grads: Any, state: Any, params: Any, request: Request, **extra_args: Any) -> tuple[Any, Any]:
        changes, new = update(grads, state, params, **extra_args)
        kept = finite.chosen(request.accept, new, state)
        if request.apply:
            specs = extra_args.get("specs")
            return passes.run((), changes, params, apply=True, accept=request.accept, specs=specs)[0], kept
        return finite.chosen(request.accept, changes, jax.tree.map(jnp.zeros_like, changes)), kept

    return Update(run)


def apply_if_finite(inner: optax.GradientTransformation, max_consecutive_errors: int) -> TiledTransformation:
    """Takes a step only if every gradient is finite: `optax.apply_if_finite`.

    A step that is not taken leaves parameters and the inner state bit for bit as they are. What the check costs is said
    at `TiledTransformation`.

    >>> tx = tiledops.transforms.apply_if_finite(tiledops.transforms.sgd(0.5, momentum=0.9), max_consecutive_errors=3)
    >>> params, state = tx.step(jnp.array([1.0, jnp.nan]), tx.init(jnp.ones(2)), jnp.ones(2))
    >>> params, state.last_finite, state.total_notfinite
    (Array([1., 1.], dtype=float32), Array(False, dtype=bool), Array(1, dtype=int32))

    Args:
      inner: the transformation to guard.
      max_consecutive_errors: after so many refused steps in a row one is taken all the same, as in Optax. (If `inner`
        then begins with `clip_by_global_norm`, all of it is NaN, where Optax leaves finite what infinities let it.)

    Returns:
      A transformation with state `optax.ApplyIfFiniteState`.

    Raises:
      TypeError: a leaf that is not float32 or bfloat16; the message names it by its path.
    """
    contract.check_scalars(max_consecutive_errors=max_consecutive_errors)
    inner = TiledTransformation.adopt(inner)
    init = optax.apply_if_finite(inner, max_consecutive_errors).init
    return TiledTransformation(init, Update(finite.guard(inner.made.run, max_consecutive_errors), counts=True))


def masked(init: Callable[[Any], Any], plan: Planner, mask: Any) -> TiledTransformation:
    """`optax.masked` for what is planned: the same state, still one pass."""

    def masked_plan(state: optax.MaskedState, incoming: Incoming) -> Plan:
        tree = mask(incoming.updates) if callable(mask) else mask
        stages, finish = plan(state.inner_state, incoming)
        stages = tuple(stage._replace(mask=tree) for stage in stages)
        return Plan(stages, lambda new: optax.MaskedState(finish(new)))

    masked_init = optax.masked(optax.GradientTransformation(init, _unused), mask).init
    return TiledTransformation.of(masked_init, masked_plan, optax.MaskedState)


def _unused(*_: Any) -> Any:
    raise AssertionError


def accumulator(dtype: Any | None, name: str) -> Any | None:
    return None if dtype is None else contract.check_dtype(jax.dtypes.canonicalize_dtype(dtype), name)


def with_state(init: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`init` of a state with the parameters' shapes: their leaves checked, its dtypes made strong."""

    def checked(params: Any) -> Any:
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                passes.check_leaf(leaf, f"params{jax.tree_util.keystr(path)}")
        return jax.tree.map(_strong, init(params))

    return checked


def _strong(x: jax.Array) -> jax.Array:
    """x without JAX's weak type, which the first step would drop, and a jitted step then be compiled twice."""
    return jnp.asarray(x, x.dtype) if getattr(x, "weak_type", False) else x
