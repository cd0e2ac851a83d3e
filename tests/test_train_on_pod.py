"""The pod example in one process of eight devices: its mesh, its step, its log, and the whole."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import train_on_pod
from pod import account, data, loop, parallel, training
from pod.log import Log
from pods import TEXT, TINY, mesh_of

import tiledops
from tiledops import transforms

pytestmark = pytest.mark.usefixtures("alone")


def started(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["train_on_pod.py", *arguments])
    return train_on_pod.main()


# The mesh


def test_the_default_mesh_and_what_does_not_fit() -> None:
    assert dict(parallel.make_mesh(jax.devices(), None).shape) == {"data": 1, "fsdp": 8, "tensor": 1}
    with pytest.raises(ValueError, match=r"--mesh 3,1,1 is of 3 devices, and there are 8"):
        parallel.make_mesh(jax.devices(), (3, 1, 1))


def test_the_loss_does_not_depend_on_the_mesh() -> None:
    """But for sums in another order: of bfloat16 products, 8 bits each, over 16 x 16 bytes and three steps of Adam."""

    def alike(x: jax.Array, sharding: Any) -> bool:
        return x.sharding.is_equivalent_to(sharding, x.ndim)

    def losses(*shape: int) -> list[float]:
        mesh = mesh_of(*shape)
        state, step = training.initial(TINY, mesh), training.train_step(TINY)
        with jax.set_mesh(mesh), tiledops.use_config(mode="reference"):
            found = []
            for number in range(1, 4):
                state, metrics = step(state, data.batch_of(TEXT, mesh, seed=0, step=number, batch=16, length=17))
                found.append(float(metrics.loss))
        assert jax.tree.all(jax.tree.map(alike, state, parallel.shardings(state, mesh)))
        return found

    one = losses(1, 1, 1)
    assert one[0] == pytest.approx(8.0, abs=1e-5)  # the head starts at 0
    assert one[2] < 7.9
    np.testing.assert_allclose(losses(2, 2, 2), one, rtol=0, atol=8 * 2**-9)


# The step


def refusing(loss: float, grads: Any) -> tuple[Any, training.State, training.Metrics]:
    optimizer = transforms.apply_if_finite(transforms.adamw(0.1), 2**31 - 1)
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    before = training.State(params, optimizer.init(params), jnp.zeros(2, jnp.uint32))
    with tiledops.use_config(mode="reference"):
        params, state, metrics = jax.jit(lambda *o: training.update(optimizer, *o, before))(loss, grads)
    return before, training.State(params, state, before.rng), metrics


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["loss", "b"])
def test_what_is_not_finite_changes_nothing(bad: float, where: str) -> None:
    grads = {"a": jnp.ones(3), "b": jnp.ones((2, 2)).at[1, 0].set(bad if where == "b" else 1.0)}
    before, after, metrics = refusing(bad if where == "loss" else 1.0, grads)
    assert int(metrics.refused) == 1
    assert metrics.finite.tolist() == [True, where == "loss"]
    kept = (before.params, before.optimizer.inner_state), (after.params, after.optimizer.inner_state)
    for x, y in zip(*map(jax.tree.leaves, kept), strict=True):
        np.testing.assert_array_equal(x, y)


def test_what_is_finite_is_stepped() -> None:
    before, after, metrics = refusing(1.0, {"a": jnp.ones(3), "b": jnp.ones((2, 2))})
    assert int(metrics.refused) == 0
    assert metrics.finite.all()
    changes, _ = optax.adamw(0.1).update(
        jax.tree.map(jnp.ones_like, before.params), before.optimizer.inner_state, before.params
    )
    for x, y in zip(
        jax.tree.leaves(after.params), jax.tree.leaves(optax.apply_updates(before.params, changes)), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_matmul_flops_are_the_programs_own() -> None:
    """Counted in the traced step, loops included."""

    def is_program(value: Any) -> bool:
        return hasattr(value, "eqns") or hasattr(value, "jaxpr")

    def count(jaxpr: Any) -> int:
        total = 0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                operand = equation.invars[0].aval.shape
                total += 2 * equation.outvars[0].aval.size * int(np.prod([operand[axis] for axis in contracted]))
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
                if is_program(value):
                    total += count(getattr(value, "jaxpr", value)) * equation.params.get("length", 1)
        return total

    mesh = mesh_of(1, 1, 1)
    state = parallel.abstract(jax.eval_shape(lambda: training.new_state(TINY)), mesh)
    with jax.set_mesh(mesh), tiledops.use_config(mode="reference"):
        traced = training.train_step(TINY).trace(
            state, jax.ShapeDtypeStruct((16, 17), jnp.int32, sharding=jax.NamedSharding(mesh, parallel.BATCH))
        )
    assert count(traced.jaxpr.jaxpr) == account.matmul_flops(TINY)


# The log


def test_what_else_is_in_the_metrics_file_is_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = b'{"step": 1}\n'
    others = b'null\n[1]\n{}\n{"step": null}\n{"step": Infinity}\n\xff\xfe\n{"step": 2}\n{"st'
    (tmp_path / "metrics.jsonl").write_bytes(kept + others)
    with Log(tmp_path).steps(1, 2) as record:
        record({"step": 2, "loss": 1.0, "tokens_per_second": 1.0, "refused": 0})
    first, second = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert (first, json.loads(second)["loss"]) == (kept, 1.0)
    assert (tmp_path / "metrics.dropped.jsonl").read_bytes() == others + b"\n"
    assert "metrics of 8 steps that are not in the checkpoint are now in" in capsys.readouterr().out


def test_a_record_that_lost_its_end_keeps_its_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}')
    with Log(tmp_path).steps(1, 2) as record:
        record({"step": 2, "loss": 1.0, "tokens_per_second": 1.0, "refused": 0})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()] == [1, 2]


def test_a_metrics_file_that_cannot_be_written_ends_in_one_line(tmp_path: Path) -> None:
    log = Log(tmp_path)
    (tmp_path / "metrics.tmp").mkdir()
    with pytest.raises(train_on_pod.RunError, match=r"metrics\.jsonl cannot be written: Is a directory$"):
        log.steps(0, 2).__enter__()


# The whole


def test_a_run_that_diverges_stops(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    arguments = (
        "--steps",
        "9",
        "--context",
        "8",
        "--learning-rate",
        "1e30",
        "--patience",
        "2",
        "--out",
        "out",
        "--mesh",
        "2,2,2",
    )
    with pytest.raises(SystemExit) as stop:
        started(monkeypatch, *arguments)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == "preset tiny: 16 windows of 8 bytes a step; mesh {'data': 2, 'fsdp': 2, 'tensor': 2}"
    assert lines[1].endswith("mode reference: kernels replaced by plain jnp")
    first = "first gradient that is not finite: blocks.attention_gate.gain"
    assert [line.partition(": ")[0] for line in lines if line.endswith(first)] == [
        "step 2 is refused",
        "step 3 is refused",
    ]
    assert printed.err == "train_on_pod.py: error: stopped at step 3: 2 steps in a row were not finite\n"
    records = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["refused"]) for r in records] == [(1, 0), (2, 1), (3, 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "--steps must be 1 or more; got 0"),
        (("--batch", "1"), "--batch must be 2 or more; got 1"),
        (("--drop", "1"), "--drop must be from 0 to less than 1; got 1.0"),
        (("--learning-rate", "-1"), "--learning-rate must be more than 0, and a float32; got -1.0"),
        (("--learning-rate", "inf"), "--learning-rate must be more than 0, and a float32; got inf"),
        (("--seed", "2147483648"), "--seed must be less than 2**31; got 2147483648"),
        (("--preset", "2b"), "argument --preset: invalid choice: '2b'"),
        (("--mesh", "2,4"), "argument --mesh: must be three numbers of 1 or more, as 2,4,1; got '2,4'"),
        (("--mesh", "2,,1"), "argument --mesh: must be three numbers of 1 or more, as 2,4,1; got '2,,1'"),
        (("--mesh", "2,2,1"), "--mesh 2,2,1 is of 4 devices, and there are 8"),
        (("--mesh", "1,1,8"), "the heads of preset tiny, 4 must be a multiple of the mesh's tensor, 8"),
        (("--batch", "12"), "--batch 12 must be a multiple of the mesh's data*fsdp, 8"),
        (("--context", "1000000000"), "--context 1000000000 must be less than the text, of "),
        (("--mode", "tpu"), "mode tpu runs on a TPU alone; JAX has cpu here. Use simulate or reference"),
        (("--data", "missing"), "--data missing cannot be read: No such file or directory"),
        (("--data", ""), "argument --data: must not be empty"),
        (("--checkpoints", ""), "argument --checkpoints: must not be empty"),
        (("--data", "file"), "--data file cannot be read: Not a directory"),
        (("--out", "file/folder"), "--out file/folder cannot be written: Not a directory"),
        (
            ("--out", "new", "--checkpoints", "file/folder"),
            "--checkpoints file/folder cannot be written: Not a directory",
        ),
        (("--process-id", "0"), "--coordinator, --num-processes and --process-id go together"),
        (("--coordinator", "a:b:c"), "argument --coordinator: must be host:port, as 10.0.0.2:1234; got 'a:b:c'"),
        (("--coordinator", "host:0"), "argument --coordinator: must be host:port, as 10.0.0.2:1234; got 'host:0'"),
        (("--compile-only", ""), "argument --compile-only: must not be empty"),
        (
            ("--compile-only", "v5e:2x2", "--mode", "simulate"),
            "--mode simulate runs on this machine alone, and compiles for no TPU; take tpu or reference",
        ),
        (("--compile-only", "v5e:3x7"), "chip must be one of v4, v5e, v5p, v6e, tpu7x or a topology"),
    ],
)
def test_refuses_in_one_line(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    Path("file").touch()
    with pytest.raises(SystemExit) as stop:
        started(monkeypatch, *arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err.partition("error: ")[2]
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert "missing" not in os.listdir()


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (1, 7, [1, 2, Path("trace"), 3, 4, 5, "stop", 6, 7]),
        (11, 15, [11, 12, Path("trace"), 13, 14, 15, "stop"]),
        (1, 4, [1, Path("trace"), 2, 3, 4, "stop"]),
        (60, 60, [Path("trace"), 60, "stop"]),
    ],
)
def test_a_trace_is_of_three_steps_or_of_those_left(
    first: int, last: int, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(jax.profiler, "start_trace", calls.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    steps = range(first, last + 1)
    with loop.traced(Path("trace"), steps) as trace, loop.traced(None, steps) as none:
        for step in steps:
            none(step)
            trace(step)
            calls.append(step)
    assert calls == expected
