"""One table of gradient transformations, each made of Optax's module and of this library's by the same line, and how
the two are compared over several steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tiledops import compiled

STEPS = 3


def matrices(params):
    """A mask: weight decay for matrices alone."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def halving(step):
    return 0.1 * 0.5**step


# One table of cases: each is made of Optax's module and of this library's, by the same line.
CASES = {
    "trace": lambda m: m.trace(0.9),
    "trace, an array": lambda m: m.trace(jnp.float32(0.9)),
    "trace, Nesterov": lambda m: m.trace(0.9, nesterov=True),
    "trace, bfloat16 state": lambda m: m.trace(0.9, accumulator_dtype=jnp.bfloat16),
    "trace, float32 state": lambda m: m.trace(0.9, True, "float32"),
    "weight decay": lambda m: m.add_decayed_weights(0.1),
    "weight decay, default": lambda m: m.add_decayed_weights(),
    "weight decay, schedule": lambda m: m.add_decayed_weights(halving),
    "weight decay, mask": lambda m: m.add_decayed_weights(0.1, mask=matrices),
    "weight decay, schedule and mask": lambda m: m.add_decayed_weights(halving, matrices),
    "scale": lambda m: m.scale(-0.5),
    "scale, an int": lambda m: m.scale(2),
    "scale, NumPy": lambda m: m.scale(np.float32(0.5)),
    "learning rate": lambda m: m.scale_by_learning_rate(0.1),
    "learning rate, an array": lambda m: m.scale_by_learning_rate(jnp.float32(0.1)),
    "learning rate, a schedule": lambda m: m.scale_by_learning_rate(halving),
    "learning rate, ascending": lambda m: m.scale_by_learning_rate(0.1, flip_sign=False),
    "learning rate, none": lambda m: m.scale_by_learning_rate(),
    "schedule": lambda m: m.scale_by_schedule(halving),
    "identity": lambda m: m.identity(),
    "ema": lambda m: m.ema(0.9),
    "ema, biased": lambda m: m.ema(0.9, debias=False),
    "ema, bfloat16 state": lambda m: m.ema(0.9, True, jnp.bfloat16),
    "Adam's scale": lambda m: m.scale_by_adam(),
    "Adam's scale, arrays": lambda m: m.scale_by_adam(jnp.float32(0.8), jnp.float32(0.9), jnp.float32(1e-6)),
    "Lion's scale": lambda m: m.scale_by_lion(),
    "Lion's scale, smooth": lambda m: m.scale_by_lion(mode="smooth", smooth_beta=2.0),
    "Lion's scale, refined": lambda m: m.scale_by_lion(mode="refined"),
    "clip": lambda m: m.clip(0.5),
    "clip by norm": lambda m: m.clip_by_global_norm(1.0),
    "clip by norm, untouched": lambda m: m.clip_by_global_norm(1e3),
    "sgd": lambda m: m.sgd(0.1),
    "sgd, momentum": lambda m: m.sgd(halving, momentum=0.9, nesterov=True),
    "adam": lambda m: m.adam(0.1),
    "adam, Nesterov": lambda m: m.adam(0.1, eps_root=1e-6, nesterov=True),
    "adam, bfloat16 moment": lambda m: m.adam(0.1, mu_dtype="bfloat16"),
    "adamw": lambda m: m.adamw(halving, weight_decay=0.1, mask=matrices),
    "lion": lambda m: m.lion(0.1),
}


def tree(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return {
        "matrix": draw(9, 130),
        "nested": [draw(5), (draw(2, 3, 4), None)],
        "scalar": draw(),
        "empty": draw(0, 3),
        "masked": optax.MaskedNode(),
        "nothing": {},
    }


def pair(seed, dtype=jnp.float32):
    """The two leaves that masks tell apart."""
    whole = tree(seed, dtype)
    return {"matrix": whole["matrix"], "vector": whole["nested"][0]}


def gradients(params, step):
    """They change from step to step, but not with the parameters: what one step errs doesn't grow in the next."""
    return jax.tree.map(lambda p: jnp.cos(p * (step + 1)).astype(p.dtype), params)


def train(tx, params, steps=STEPS, apply=optax.apply_updates, jit=False):
    """Updates, state and parameters after every step."""
    update = jax.jit(tx.update) if jit else tx.update
    start, state, history = params, tx.init(params), []
    for i in range(steps):
        updates, state = update(gradients(start, i), state, params)
        params = apply(params, updates)
        history.append((updates, state, params))
    return history


def train_by_steps(tx, params):
    """The same by `tx.step`: state and parameters after every step."""
    start, state, history = params, tx.init(params), []
    for i in range(STEPS):
        params, state = tx.step(gradients(start, i), state, params)
        history.append((state, params))
    return history


def one_pass(tx):
    return lambda params, state, grads: tx.step(grads, state, params)


def two_passes(tx):
    """As Optax's users write it."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def compiled_step(step, params, state, **options):
    """The report of a step that parameters and state are given up to."""
    return compiled.compile_for(step, params, state, params, donate_argnums=(0, 1), **options)


def assert_agree(got, wanted):
    """The same trees, shapes and dtypes, and values within rounding.

    A step rounds a value at most 8 times, each by one unit roundoff of it: 2**-24 in float32, 2**-9 where anything is
    bfloat16. No value here is larger than the largest that is compared, and what one step errs the next keeps.
    """
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    largest = max((np.abs(np.asarray(x, np.float64)).max(initial=0) for x in jax.tree.leaves(wanted)), default=0)
    unit = 2.0**-9 if any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(wanted)) else 2.0**-24
    bound = STEPS * 8 * unit * largest

    def agree(path, ours, theirs):
        where = jax.tree_util.keystr(path)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), where
        if jnp.issubdtype(ours.dtype, jnp.floating):
            np.testing.assert_allclose(
                np.asarray(ours, np.float64), np.asarray(theirs, np.float64), rtol=0, atol=bound, err_msg=where
            )
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=where)

    jax.tree_util.tree_map_with_path(agree, got, wanted)
