"""Several Python threads at once, each with its own configuration: none sees another's."""

from __future__ import annotations

import contextvars
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import oracle
from cases import BY_NAME
from programs import blocks

import tiledops

WAYS: list[tuple[dict[str, Any], list[str]]] = [  # and the tile of each kernel that it has traced
    ({"mode": "reference"}, []),
    ({"mode": "simulate", "block": (8, 128)}, ["8x128"]),
    ({"mode": "simulate", "block": (16, 128)}, ["16x128"]),
    ({"mode": "simulate", "block": (16, 256), "schedule": "synchronous"}, ["16x256"]),
]


def in_threads(work: Any, items: Any) -> list[Any]:
    """work(item) in a thread each, all of them inside at once."""
    barrier = threading.Barrier(len(items))

    def together(item: Any) -> Any:
        barrier.wait(60)
        return work(item)

    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(together, items))


def traced(way: dict[str, Any]) -> list[str]:
    """The tiles of five programs that a thread traces."""
    _, x, y, _ = BY_NAME["lesson"].operands()
    tiles: list[str] = []
    for _ in range(5):
        with tiledops.use_config(**way):
            tiles += blocks(jax.make_jaxpr(functools.partial(tiledops.axpy, 0.5))(x, y))
    return tiles


def test_each_thread_has_its_own_configuration() -> None:
    ways, tiles = zip(*WAYS, strict=True)
    assert in_threads(traced, ways) == [5 * tile for tile in tiles]


def test_no_thread_inherits_the_mains() -> None:
    default = traced({})
    assert len(default) == 5  # the simulator
    with tiledops.use_config(mode="reference", block=(8, 128)):
        assert in_threads(lambda _: traced({}), [None] * 2) == [default] * 2


def test_a_copied_context_takes_it_along() -> None:
    with tiledops.use_config(mode="reference"):
        context = contextvars.copy_context()
    assert context.run(traced, {}) == []


def test_threads_compute_side_by_side() -> None:
    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        x, y, g = (random.standard_normal((9, 130)).astype(np.float32) for _ in range(3))
        a = np.float32(seed)
        for _ in range(5):
            with tiledops.use_config(mode="reference"):
                out, pullback = jax.vjp(tiledops.axpy, a, x, y)
                da, dx, _ = pullback(g)
            oracle.assert_same_bits(out, oracle.axpy(a, x, y))
            oracle.assert_same_bits(dx, oracle.dx(a, x, g))
            oracle.assert_within(da, *oracle.da(a, x, g))

    in_threads(work, range(4))


def test_threads_simulate_in_turn() -> None:
    """Traced side by side; run one by one, as JAX's simulator has one memory for the whole process."""
    a, x, y, _ = BY_NAME["lesson"].operands()
    turn = threading.Lock()

    def work(way: tuple[dict[str, Any], list[str]]) -> Any:
        with tiledops.use_config(**way[0]):
            executable = jax.jit(functools.partial(tiledops.axpy)).lower(a, x, y).compile()
            with turn:
                return jax.block_until_ready(executable(a, x, y))

    for out in in_threads(work, WAYS):
        oracle.assert_same_bits(out, oracle.axpy(a, x, y))


def test_threads_simulate_different_chips() -> None:
    def work(chip: str) -> int:
        with tiledops.simulated_chip(chip) as info:
            return info.num_cores

    assert in_threads(work, ["v5e", "v5p", "v4", "tpu7x"]) == [1, 2, 2, 1]
