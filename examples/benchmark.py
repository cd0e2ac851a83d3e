"""What tiledops costs beside XLA's own fusion, by the TPU compiler's account, on a machine with no TPU.

    python examples/benchmark.py                      # all four parts, for five TPU generations
    python examples/benchmark.py --part compile       # one part: compile, step, block or bytes
    python examples/benchmark.py --part block --chips v5e tpu7x

compile   seconds to trace, lower and compile fifty updates p + a*g, of GPT-2 small's shapes
step      kernels, HBM bytes and seconds to compile of an optimizer's step, of GPT-2 small's 148 leaves
block     HBM bytes of a transformer block's training step, its residual adds by tiledops and by plain jnp
bytes     HBM bytes of one scaled add and of its backward pass, shape by shape

Nothing here runs: libtpu compiles ahead of time for chips that are not attached (pip install -e ".[test]").
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding

import tiledops
from tiledops import compiled, transforms

CHIPS = tuple(compiled.HOSTS)
F32, BF16 = jnp.float32, jnp.bfloat16


def struct(shape: tuple[int, ...], dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def plain_axpy(a: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The same maths for XLA to fuse: in float32, rounded once."""
    return (a * x.astype(F32) + y.astype(F32)).astype(y.dtype)


WAYS: dict[str, Callable[..., jax.Array]] = {"tiledops": tiledops.axpy, "plain jnp": plain_axpy}


# compile: an optimizer's updates

EMBED = 768
LAYER = (
    [(EMBED,)] * 6
    + [(3 * EMBED,), (4 * EMBED,)]
    + [(EMBED, 3 * EMBED), (EMBED, EMBED), (EMBED, 4 * EMBED), (4 * EMBED, EMBED)]
)
LEAVES = [(50257, EMBED), (1024, EMBED), *LAYER * 4]  # 50 leaves of 9 shapes; twelve layers have the same nine


def seconds_to_compile(axpy: Callable[..., jax.Array], chip: str) -> tuple[float, float]:
    """Tracing and lowering, then compiling, with nothing remembered from before."""
    jax.clear_caches()
    leaves = [struct(shape) for shape in LEAVES]

    def update(a: Any, gradients: Any, params: Any) -> Any:
        return [axpy(a, g, p) for g, p in zip(gradients, params, strict=True)]

    start = time.perf_counter()
    lowered = compiled.lower_for(update, struct(()), leaves, leaves, chip=chip, donate_argnums=2)
    middle = time.perf_counter()
    lowered.compile()
    return middle - start, time.perf_counter() - middle


def blocked_axpy(a: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return tiledops.axpy(a, x, y, config=tiledops.PipelineConfig(schedule="blocked"))


def compile_part(chips: list[str], tries: int) -> None:
    ways = {**WAYS, "blocked": blocked_axpy}  # `pallas_call`'s own pipeline, which is not traced in Python
    print(f"\nSeconds to compile {len(LEAVES)} updates of {len(set(LEAVES))} shapes, the median of {tries} in turns")
    print(f"{'chip':8}{'':12}{'trace + lower':>14}{'compile':>10}{'together':>10}{'of XLA':>10}")
    for chip in chips:
        compiled.topology_devices(chip)  # libtpu is loaded before the first try
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _, (way, axpy) in itertools.product(range(tries), ways.items()):
            times[way].append(seconds_to_compile(axpy, chip))
        together = {way: statistics.median(map(sum, tries)) for way, tries in times.items()}
        for way, tries_of_it in times.items():
            first, second = (statistics.median(column) for column in zip(*tries_of_it, strict=True))
            ratio = together[way] / together["plain jnp"]
            print(f"{chip:8}{way:12}{first:14.2f}{second:10.2f}{together[way]:10.2f}{ratio:10.2f}")


# step: a whole optimizer, of a whole model

GPT2_SMALL = [(50257, EMBED), (1024, EMBED), *LAYER * 12, (EMBED,), (EMBED,)]


def links_of(optimizer: str, m: Any) -> list[Any]:
    """The members of the chain, from a module that has Optax's names."""
    decay, descend = m.add_decayed_weights(0.1), m.scale_by_learning_rate(0.1)
    return {
        "sgd": [decay, m.trace(0.9), descend],
        "adamw": [m.scale_by_adam(), decay, descend],
        "clipped adamw": [m.clip_by_global_norm(1.0), m.scale_by_adam(), decay, descend],
    }[optimizer]


def steps_of(optimizer: str) -> dict[str, Callable[..., Any]]:
    """The step in one pass, by XLA's fusions, and by a kernel for each link."""
    tx = transforms.chain(*links_of(optimizer, transforms))

    def apart(module: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
        links = optax.chain(*links_of(optimizer, module))

        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = links.update(grads, state, params)
            return apply(params, updates), state

        return step

    return {
        "tiledops": lambda params, state, grads: tx.step(grads, state, params),
        "XLA": apart(optax, optax.apply_updates),
        "naive chain": apart(transforms, tiledops.apply_updates),
    }


def step_part(chips: list[str], tries: int) -> None:
    params = [struct(shape) for shape in GPT2_SMALL]
    count = sum(math.prod(shape) for shape in GPT2_SMALL)
    print(f"\nOne step of {len(params)} leaves, {count:,} float32 parameters; seconds: the median of {tries} in turns")
    print(f"{'chip':8}{'optimizer':15}{'':13}{'kernels':>8}{'bytes a parameter':>19}{'seconds to compile':>20}")
    for chip, optimizer in itertools.product(chips, ("sgd", "adamw", "clipped adamw")):
        compiled.topology_devices(chip)
        state = jax.eval_shape(optax.chain(*links_of(optimizer, optax)).init, params)
        reports, seconds = {}, collections.defaultdict(list)
        for _, (way, step) in itertools.product(range(tries), steps_of(optimizer).items()):
            jax.clear_caches()
            start = time.perf_counter()
            reports[way] = compiled.compile_for(step, params, state, params, chip=chip, donate_argnums=(0, 1))
            seconds[way].append(time.perf_counter() - start)
        for way, report in reports.items():
            kernels = len(report.kernels) or sum(i.opcode == "fusion" for i in report.instructions)
            each, time_taken = report.hbm_bytes / count, statistics.median(seconds[way])
            print(f"{chip:8}{optimizer:15}{way:13}{kernels:8}{each:19.2f}{time_taken:20.2f}")
        ratio = statistics.median(a / b for a, b in zip(seconds["tiledops"], seconds["XLA"], strict=True))
        print(f"{chip:8}{optimizer:15}tiledops takes {ratio:.2f} of XLA's time to compile")


# block: a residual in its model

TOKENS, SEQUENCE, FEATURES, HEADS, HIDDEN = 8192, 1024, 1024, 16, 4096
MODEL_CHIPS = 4  # of the tensor-parallel mesh

PARAMETERS = {  # and the axis that tensor parallelism shards
    "query_key_value": ((FEATURES, 3, FEATURES), 2),
    "attention_out": ((FEATURES, FEATURES), 0),
    "up": ((FEATURES, HIDDEN), 1),
    "down": ((HIDDEN, FEATURES), 0),
}
GAINS = ("attention_gain", "mlp_gain")


def training_step(params: Any, x: jax.Array, *, axpy: Callable[..., jax.Array], end: str, learnable: bool) -> Any:
    """One step of gradient descent on a pre-norm block, and the gradient of its input."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(block(params, x, axpy, end, learnable).astype(F32)))

    gradients, dx = jax.grad(loss, (0, 1))(params, x)
    return jax.tree.map(lambda p, g: (p - 1e-3 * g).astype(p.dtype), params, gradients), dx


def block(params: Any, x: jax.Array, axpy: Callable[..., jax.Array], end: str, learnable: bool) -> jax.Array:
    gains = [params[name] if learnable else 1.0 for name in GAINS]
    x = axpy(gains[0], finish(attention(params, normalize(x)), params["attention_out"], end), x)
    hidden = jax.nn.gelu(normalize(x) @ params["up"])
    return axpy(gains[1], finish(hidden, params["down"], end), x)


def normalize(x: jax.Array) -> jax.Array:
    x32 = x.astype(F32)
    return (x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + 1e-6)).astype(x.dtype)


def attention(params: Any, x: jax.Array) -> jax.Array:
    sequences = x.reshape(-1, SEQUENCE, FEATURES)
    heads = jnp.einsum("bsf,fcd->cbsd", sequences, params["query_key_value"])
    q, k, v = heads.reshape(*heads.shape[:-1], -1, FEATURES // HEADS)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(x.shape[0], -1)


def finish(x: jax.Array, weight: jax.Array, end: str) -> jax.Array:
    """The branch's last matmul, and what the residual add follows."""
    if end == "kernel":
        return kernel_matmul(x, weight)
    return x @ weight  # over a mesh, the weight's rows are sharded, and XLA sums the chips' parts


@jax.custom_vjp
def kernel_matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """A matmul by a kernel, as many a branch ends in one: XLA can't fuse an add into it."""
    rows, cols = 256, 256
    return pl.pallas_call(
        lambda x, w, out: out.__setitem__(..., jnp.dot(x[...], w[...], preferred_element_type=F32).astype(out.dtype)),
        grid=(x.shape[0] // rows, weight.shape[1] // cols),
        in_specs=[
            pl.BlockSpec((rows, x.shape[1]), lambda i, j: (i, 0)),
            pl.BlockSpec((weight.shape[0], cols), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((rows, cols), lambda i, j: (i, j)),
        out_shape=struct((x.shape[0], weight.shape[1]), x.dtype),
        name="matmul",
    )(x, weight)


kernel_matmul.defvjp(
    lambda x, weight: (kernel_matmul(x, weight), (x, weight)),
    lambda saved, g: (g @ saved[1].T, saved[0].T @ g),
)


def block_report(way: str, end: str, chip: str, learnable: bool) -> compiled.Report:
    """Of one chip's program."""
    axpy, count = WAYS[way], MODEL_CHIPS if end == "psum" else 1
    mesh = Mesh(np.array(compiled.topology_devices(chip)[:count]), ("model",))
    if end == "psum" and axpy is tiledops.axpy:
        axpy = functools.partial(axpy, spec=jax.P())

    def placed(shape: tuple[int, ...], dtype: Any, axis: int | None = None) -> Any:
        spec = jax.P() if axis is None else jax.P(*[None] * axis, "model")
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = {name: placed(shape, BF16, axis) for name, (shape, axis) in PARAMETERS.items()}
    params |= {name: placed((), F32) for name in GAINS} if learnable else {}
    step = functools.partial(training_step, axpy=axpy, end=end, learnable=learnable)
    return compiled.compile_for(step, params, placed((TOKENS, FEATURES), BF16), chip=chip, donate_argnums=(0, 1))


def block_part(chips: list[str], gains: list[str]) -> None:
    print(f"\nHBM megabytes of a block's training step: {TOKENS} tokens, {FEATURES} features, bfloat16, of one chip")
    print(f"matmul: a branch ends in a matmul; psum: in its sum over {MODEL_CHIPS} chips; kernel: in another kernel")
    print(f"{'chip':8}{'ends in':10}{'gain':12}{'tiledops':>10}{'plain jnp':>10}{'difference':>12}")
    for chip, end, gain in itertools.product(chips, ("matmul", "psum", "kernel"), gains):
        ours, plain = (block_report(way, end, chip, gain == "learnable").hbm_bytes for way in WAYS)
        print(f"{chip:8}{end:10}{gain:12}{ours / 1e6:10.0f}{plain / 1e6:10.0f}{ours / plain - 1:+12.1%}", flush=True)


# bytes: one operation

SHAPES = [
    *[(8192, 4096), (50257, 768), (768, 2304), (1000, 3), (3, 1000), (512, 10), (1001, 3001), (1, 257), (257, 1)],
    *[(7,), (4096,), (5000,), (), (16, 7, 512), (8, 128, 1024), (2, 3, 5, 7), (3, 3, 64, 128), (7, 7, 3, 64)],
    (1, 1, 512, 2048),
]


def operations(shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], Callable[..., Any]]]:
    """Name, shape of the gain, and what to compile of an axpy."""
    gradients = lambda op: lambda a, x, y: jax.vjp(op, a, x, y)[1](y)[:2]  # noqa: E731
    yield "forward", (), lambda op: op
    yield "backward", (), gradients
    if shape:
        yield "backward, a gain a feature", shape[-1:], gradients


def bytes_part(chips: list[str]) -> None:
    print("\nHBM bytes of a*x + y and of the gradients of a and x: tiledops / plain jnp")
    for dtype, shape in itertools.product((F32, BF16), SHAPES):
        for name, gain, of in operations(shape):
            args = (struct(gain), struct(shape, dtype), struct(shape, dtype))
            pairs = []
            for chip in chips:
                ours, plain = (compiled.compile_for(of(op), *args, chip=chip).hbm_bytes for op in WAYS.values())
                pairs.append(f"{chip} {ours:,} / {plain:,} ({ours / plain:.2f})")
            print(f"{jnp.dtype(dtype).name:9}{shape!s:18}{name}: {'; '.join(pairs)}")


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain, allow_abbrev=False)
    parser.add_argument("--part", choices=["compile", "step", "block", "bytes", "all"], default="all")
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--gains", nargs="+", choices=["learnable", "1"], default=["learnable"], help="of the block")
    parser.add_argument("--tries", type=int, default=5, help="how often each is compiled in the compile and step parts")
    options = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "compile": lambda: compile_part(options.chips, options.tries),
        "step": lambda: step_part(options.chips, options.tries),
        "block": lambda: block_part(options.chips, options.gains),
        "bytes": lambda: bytes_part(options.chips),
    }
    for part in parts if options.part == "all" else [options.part]:
        parts[part]()


if __name__ == "__main__":
    main()
