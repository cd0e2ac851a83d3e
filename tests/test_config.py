"""The options of a call, and the defaults that `use_config` gives them."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tiledops
from tiledops import PipelineConfig, config


def resolved() -> PipelineConfig:
    return config.resolve(None)


def test_equal_configs_are_one_static_argument() -> None:
    one, other = PipelineConfig(block=(16, 256), buffers=3), PipelineConfig(block=[np.int64(16), 256], buffers=3)
    assert one == other
    assert hash(one) == hash(other)
    assert all(type(n) is int for n in other.block)


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PipelineConfig().buffers = 3


@pytest.mark.parametrize("block", [8, "ab", (8,), (8, 128, 1), (), (8.0, 128), (True, 128), (8, None), {8, 128}])
def test_blocks_of_the_wrong_kind(block: Any) -> None:
    with pytest.raises(TypeError, match=r"block must be \(rows, cols\), two positive integers in multiples") as refusal:
        PipelineConfig(block=block)
    assert f"got {block!r}" in str(refusal.value)


@pytest.mark.parametrize(
    ("block", "nearest"),
    [
        ((7, 128), (8, 128)),
        ((8, 100), (8, 128)),
        ((0, 128), (8, 128)),
        ((8, 0), (8, 128)),
        ((-8, 128), (8, 128)),
        ((8, -128), (8, 128)),
        ((30, 300), (32, 256)),
        ((128, 8), (128, 128)),
    ],
)
def test_blocks_that_are_no_multiple(block: tuple[int, int], nearest: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"in multiples of \(8, 128\)") as refusal:
        PipelineConfig(block=block)
    assert f"got {block}. The nearest is {nearest}" in str(refusal.value)
    assert PipelineConfig(block=nearest).block == nearest


@pytest.mark.parametrize("buffers", [0, 1, 4, -2, 2.0, "2", None, True])
def test_buffers(buffers: Any) -> None:
    with pytest.raises(ValueError, match=r"buffers must be 2 .* or 3") as refusal:
        PipelineConfig(buffers=buffers)
    assert f"got {buffers!r}" in str(refusal.value)


@pytest.mark.parametrize("schedule", ["fast", "Pipelined", "", None, 2])
def test_schedule(schedule: Any) -> None:
    with pytest.raises(ValueError, match="schedule must be one of pipelined, synchronous, blocked") as refusal:
        PipelineConfig(schedule=schedule)
    assert f"got {schedule!r}" in str(refusal.value)


def test_three_buffers_are_the_pipelines_own() -> None:
    with pytest.raises(ValueError, match=r"blocked.* two buffers.* got buffers=3. Use schedule='pipelined'"):
        PipelineConfig(schedule="blocked", buffers=3)


@pytest.mark.parametrize("mode", ["gpu", "TPU", "", True, 0])
def test_mode(mode: Any) -> None:
    with pytest.raises(ValueError, match="mode must be one of tpu, simulate, reference") as refusal:
        PipelineConfig(mode=mode)
    assert f"got {mode!r}" in str(refusal.value)


def test_defaults() -> None:
    assert resolved() == PipelineConfig(block=None, buffers=2, schedule="pipelined", mode=None)


def test_nested_defaults_add_up_and_end() -> None:
    with tiledops.use_config(mode="reference") as outer:
        assert resolved() == outer == PipelineConfig(mode="reference")
        with tiledops.use_config(block=(8, 128), buffers=3) as inner:
            assert resolved() == inner == PipelineConfig((8, 128), 3, mode="reference")
            with tiledops.use_config(mode="simulate", buffers=2):
                assert resolved() == PipelineConfig((8, 128), mode="simulate")
            assert resolved() == inner
        assert resolved() == outer
    assert resolved() == PipelineConfig()


def test_defaults_end_with_an_exception() -> None:
    with pytest.raises(KeyError), tiledops.use_config(buffers=3):
        raise KeyError
    assert resolved() == PipelineConfig()


def test_a_calls_own_config_wins_as_a_whole_but_for_an_open_mode() -> None:
    with tiledops.use_config(block=(8, 128), buffers=3, mode="reference"):
        assert config.resolve(PipelineConfig()) == PipelineConfig(mode="reference")
        own = PipelineConfig(block=(16, 128), mode="simulate")
        assert config.resolve(own) == own


def test_defaults_belong_to_their_thread() -> None:
    seen = {}
    inside, done = threading.Event(), threading.Event()

    def one() -> None:
        with tiledops.use_config(buffers=3):
            inside.set()
            done.wait(30)
            seen["one"] = resolved()

    def other() -> None:
        inside.wait(30)
        seen["other"] = resolved()
        done.set()

    threads = [threading.Thread(target=run) for run in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {"one": PipelineConfig(buffers=3), "other": PipelineConfig()}
    assert resolved() == PipelineConfig()


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="blocks"), tiledops.use_config(blocks=(8, 128)):
        pass
    assert resolved() == PipelineConfig()


def test_fields_that_are_wrong_only_together_are_refused_where_they_meet() -> None:
    with tiledops.use_config(buffers=3):
        with pytest.raises(ValueError, match="two buffers"), tiledops.use_config(schedule="blocked"):
            pass
        assert resolved() == PipelineConfig(buffers=3)


def test_the_call_honours_the_defaults() -> None:
    with tiledops.use_config(mode="reference"):
        out = tiledops.axpy(2.0, jnp.ones(3), jnp.ones(3))
    np.testing.assert_array_equal(out, [3.0, 3.0, 3.0])
