"""The pod example's step, compiled whole for pods that are not there."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import train_on_pod
from pod import RunError, account, parallel, presets

from tiledops import compiled


def printed(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["train_on_pod.py", "--context", "16", *arguments])
    hook = sys.unraisablehook
    assert train_on_pod.main() == 0
    sys.unraisablehook = hook
    return str(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("topology", "mesh", "devices", "bandwidth"),  # of the memory, by the datasheet, with its three digits
    [("v5e:2x2", "2,2,1", 4, 819e9), ("v5p:2x2x2", "1,4,2", 8, 2765e9), ("tpu7x:2x2x1", "8,1,1", 8, 7380e9 / 2)],
)
def test_three_topologies(
    topology: str, mesh: str, devices: int, bandwidth: float, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    of, accounts = account.of, list[account.Account]()
    monkeypatch.setattr(account, "of", lambda *what: (accounts.append(of(*what)), accounts[-1])[1])
    text = printed(monkeypatch, capsys, "--compile-only", topology, "--mesh", mesh)
    kind = topology.partition(":")[0]
    assert accounts[0].hbm_bandwidth == pytest.approx(bandwidth, rel=3e-3)
    assert re.search(rf"parameters +131,\d{{3}}, on {devices} devices of TPU {kind}\n", text)
    held = re.search(
        r"a device holds (\S+) GB of arguments and (\S+) GB of temporaries: (\S+) of (\S+) GB, it fits", text
    )
    assert held is not None
    arguments, temporaries, used, capacity = map(float, held.groups())
    shards = 1 if mesh == "8,1,1" else 4  # parameters, and two moments of each, in float32
    assert arguments == pytest.approx(3 * 4 * 131e3 / shards / (2 if mesh == "1,4,2" else 1) / 1e9, abs=1.1e-3)
    assert arguments + temporaries <= used + 2e-3 < capacity
    for kernel in ("tiledops_axpy", "tiledops_scale_and_dot", "tiledops_checked_square", "adam"):
        assert re.search(rf"{kernel}\S* +\d+ a step\n", text), kernel
    kinds = set(re.findall(r"^(\S+) +\d+ a step, \d+\.\d{3} MB sent$", text, re.MULTILINE))
    assert kinds >= {"all-reduce"} | (set() if mesh == "8,1,1" else {"all-gather"})
    assert re.search(r"least time +compute \S+ ms, memory \S+ ms, interconnect \S+ ms\n", text)
    assert re.search(r"bound by (compute|memory|interconnect): at most [\d,]+ tokens/s\n", text)


def test_what_does_not_fit_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        printed(monkeypatch, capsys, "--compile-only", "v5e:2x2", "--batch", "4000000", "--context", "64")
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch(
        r"train_on_pod.py: error: tiny does not fit on 4 devices: \d+\.\d\d GiB a device are missing \(.*\)\. "
        r"Take more devices or a smaller --batch\n",
        error,
    )


def test_what_the_compiler_says_is_missing() -> None:
    """In either of its two ways to say so, and in one that it has yet to find."""
    needed = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total (308.79G) exceeds available HBM (15.75G).\nmore"
    used = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.25G of 15.75G hbm. Exceeded by 4.50G."
    assert account.missing(needed).startswith("293.04 GiB a device are missing")
    assert account.missing(used).startswith("4.50 GiB a device are missing")
    assert account.missing("RESOURCE_EXHAUSTED: Ran out of memory.\nmore") == "Ran out of memory."


def test_less_than_the_chip_has_by_the_compiler_and_more_by_the_datasheet(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = presets.Settings("tiny", 16, 16, 8, 1e-2, 0.0, 0, 1000)
    mesh = parallel.make_mesh(compiled.topology_devices("v5e"), (4, 1, 1))
    large = account.Account(
        "v5e", 4, 1, 1.0, compiled.read_report("ENTRY %main () -> f32[] {\n}\n"), 10**9, 197e12, 820e9, 200e9
    )
    monkeypatch.setattr(account, "of", lambda *_: large)
    monkeypatch.setattr(account.Account, "hbm_used", 3 * 10**9)
    monkeypatch.setattr(compiled, "lower_for", lambda *_: type("Lowered", (), {"compile": lambda _: None})())
    with pytest.raises(RunError, match=r"^tiny does not fit on 4 devices: 2\.00 GB a device are missing$"):
        account.compile_only(settings, mesh)


def test_bounds() -> None:
    collective = compiled.Collective("all-reduce", "f32[8]", bytes=1000, chips=4, times=2)
    report = compiled.Report((), (), (), (collective,), 3000, 1000, 10, 20, 30, 5)
    one = account.Account(
        "v5e", 4, 100, flops=2e6, report=report, hbm_capacity=60, peak_flops=1e9, hbm_bandwidth=1e6, link_bandwidth=1e6
    )
    assert one.hbm_used == 10 + 20 + 30 - 5
    assert one.bounds == {"compute": 2e-3, "memory": 4e-3, "interconnect": 3e-3}
    assert "bound by memory: at most 16,000 tokens/s" in one.lines(tokens=64)
