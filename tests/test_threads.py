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
import pytest
from cases import BY_NAME
from jax._src.pallas.mosaic.interpret.shared_memory import SharedMemory
from jax.experimental import io_callback
from programs import blocks, fresh

import tiledops

WAYS: list[tuple[dict[str, Any], list[str]]] = [  # and the tile of each kernel that it has traced
    ({"mode": "reference"}, []),
    ({"mode": "simulate", "block": (8, 128)}, ["8x128"]),
    ({"mode": "simulate", "block": (16, 128)}, ["16x128"]),
    ({"mode": "simulate", "block": (16, 256), "schedule": "synchronous"}, ["16x256"]),
]


pytestmark = pytest.mark.timeout(120)


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


def test_threads_simulate_at_once() -> None:
    """JAX's interpreter has one memory for the whole process: the kernels of other threads wait for their turn."""
    a, x, y, _ = BY_NAME["lesson"].operands()

    def work(way: tuple[dict[str, Any], list[str]]) -> list[Any]:
        with tiledops.use_config(**way[0]):
            return [fresh(tiledops.axpy)(a, x, y) for _ in range(2)]

    for outs in in_threads(work, WAYS):
        for out in outs:
            oracle.assert_same_bits(out, oracle.axpy(a, x, y))


def test_a_thread_whose_kernel_fails_ends_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    a, x, y, _ = BY_NAME["lesson"].operands()
    read = SharedMemory.get_buffer_content
    failed = threading.Event()

    def failing(*args: Any, **kwargs: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise ValueError("in one thread")
        return read(*args, **kwargs)

    def work(_: Any) -> str:
        with tiledops.use_config(mode="simulate", block=(8, 128)):
            try:
                oracle.assert_same_bits(fresh(tiledops.axpy)(a, x, y), oracle.axpy(a, x, y))
            except jax.errors.JaxRuntimeError as error:
                return "in one thread" if "in one thread" in str(error) else str(error)
        return "right"

    monkeypatch.setattr(SharedMemory, "get_buffer_content", failing)
    assert sorted(in_threads(work, range(3))) == ["in one thread", "right", "right"]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_callback_simulates_between_two_kernels(ordered: bool) -> None:
    """On the host, in the middle of a program whose own kernels take turns with it."""
    a, x, y, _ = BY_NAME["lesson"].operands()
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def host(x: Any) -> Any:
        with tiledops.use_config(mode="simulate", block=(32, 512)):
            return np.asarray(tiledops.axpy(a, np.asarray(x), y))

    def program(x: Any) -> Any:
        return tiledops.axpy(a, io_callback(host, like, tiledops.axpy(a, x, y), ordered=ordered), y)

    with tiledops.use_config(mode="simulate", block=(32, 512)):
        out = jax.jit(program)(x)
    for _ in range(3):
        x = oracle.axpy(a, x, y)
    oracle.assert_same_bits(out, x)


def test_threads_simulate_different_chips() -> None:
    def work(chip: str) -> int:
        with tiledops.simulated_chip(chip) as info:
            return info.num_cores

    assert in_threads(work, ["v5e", "v5p", "v4", "tpu7x"]) == [1, 2, 2, 1]
