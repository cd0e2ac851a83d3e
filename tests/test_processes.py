"""Two processes of one job, on one machine, give the same as one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest

JOB = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

coordinator, count, index, mode, results = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
if count > 1:
    jax.distributed.initialize(coordinator, count, index)

import tiledops

assert jax.process_count() == count
assert jax.device_count() == 4
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
random = np.random.default_rng(0)
values = [random.standard_normal(shape).astype(np.float32) for shape in ((130,), (32, 130), (32, 130), (32, 130))]
with jax.set_mesh(mesh), tiledops.use_config(mode=mode, block=(8, 128)):
    a, x, y, g = (
        jax.make_array_from_callback(v.shape, NamedSharding(mesh, P(*spec)), lambda at, v=v: v[at])
        for v, spec in zip(values, ((), ("data",), ("data",), ("data",)))
    )

    @jax.jit
    def step(a, x, y, g):
        out, pullback = jax.vjp(tiledops.axpy, a, x, y)
        return out, *pullback(g)

    out, da, dx, dy = step(a, x, y, g)
    whole = jax.jit(lambda *v: jax.sharding.reshard(v, P()))(out, da, dx)
np.savez(results, *(np.asarray(v.addressable_data(0)) for v in whole))
"""


def run(count: int, mode: str, folder: Path) -> list[list[np.ndarray]]:
    """What each process of a job of `count` sees of the result, the gain's gradient and the branch's."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // count}",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, coordinator, str(count), str(index), mode, str(folder / f"{index}.npz")],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-2000:]
    return [list(np.load(folder / f"{index}.npz").values()) for index in range(count)]


@pytest.mark.timeout(240)
def test_two_processes_equal_one(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    a, x, y, g = (random.standard_normal(s).astype(np.float32) for s in ((130,), (32, 130), (32, 130), (32, 130)))
    one = run(1, "reference", tmp_path)
    for out, da, dx in (*one, *run(2, "reference", tmp_path)):
        oracle.assert_same_bits(out, oracle.axpy(a, x, y))
        oracle.assert_within(da, *oracle.da(a, x, g))
        oracle.assert_same_bits(dx, oracle.dx(a, x, g))


@pytest.mark.timeout(240)
def test_the_simulator_is_of_one_process(tmp_path: Path) -> None:
    """Its devices would wait for ever for those of the other process."""
    run(1, "simulate", tmp_path)
    with pytest.raises(AssertionError, match="NotImplementedError: mode='simulate' simulates the devices of one"):
        run(2, "simulate", tmp_path)
