"""The collectives of compiled programs: kind, bytes, chips and how often, also inside fusions and loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tiledops import compiled
from tiledops.collectives import Collective

P = PartitionSpec
WHOLE = 1024 * 512 * 4  # bytes of the float32 array that each program below works on


def compile_on_a_row(fn: Any, spec: PartitionSpec, out: PartitionSpec) -> tuple[Collective, ...]:
    """fn on each of four chips in a row of v5e:4x4, the array cut by `spec`, the result by `out`."""
    mesh = Mesh(
        np.array(compiled.topology_devices("v5e:4x4")).reshape(4, 4), ("row", "chip"), axis_types=(AxisType.Auto,) * 2
    )
    x = jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=NamedSharding(mesh, spec))
    return compiled.compile_for(jax.shard_map(fn, in_specs=spec, out_specs=out, check_vma=False), x).collectives


@pytest.mark.parametrize(
    ("kind", "fn", "spec", "out", "whole", "sent"),
    [
        ("all-reduce", lambda x: jax.lax.psum(x, "chip"), P(), P(), WHOLE, 2 * WHOLE * 3 // 4),
        ("all-gather", lambda x: jax.lax.all_gather(x, "chip", tiled=True), P("chip"), P(), WHOLE, WHOLE * 3 // 4),
        (
            "reduce-scatter",
            lambda x: jax.lax.psum_scatter(x, "chip", tiled=True),
            P(),
            P("chip"),
            WHOLE,
            WHOLE * 3 // 4,
        ),
        (
            "collective-permute",
            lambda x: jax.lax.ppermute(x, "chip", [(i, (i + 1) % 4) for i in range(4)]),
            P("chip"),
            P("chip"),
            WHOLE // 4,
            WHOLE // 4,
        ),
    ],
)
def test_of_each_kind(kind: str, fn: Any, spec: PartitionSpec, out: PartitionSpec, whole: int, sent: int) -> None:
    (one,) = compile_on_a_row(fn, spec, out)
    assert (one.opcode, one.times) == (kind, 1)
    assert one.bytes == pytest.approx(whole, rel=0.15)  # XLA may pad what it scatters to whole tiles a chip
    assert one.bytes >= whole
    assert one.sent_bytes == pytest.approx(sent, rel=0.15)


def test_in_a_loop() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (jax.lax.psum(jnp.sin(x), "chip"), None), x, length=7)[0]

    (one,) = compile_on_a_row(fn, P(), P())
    assert (one.opcode, one.chips, one.times) == ("all-reduce", 4, 7)


def test_in_a_branch() -> None:
    """Which branch runs is not known: each counts."""

    def fn(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda x: jax.lax.psum(jnp.sin(x), "chip"), lambda x: x, x)

    (one,) = compile_on_a_row(fn, P(), P())
    assert (one.opcode, one.bytes, one.chips, one.times) == ("all-reduce", WHOLE, 4, 1)


def test_on_a_core_of_their_own() -> None:
    """TPU7x has its SparseCores do large sums, in computations that a thread of theirs runs."""
    mesh = Mesh(np.array(compiled.topology_devices("tpu7x:2x2x1")), ("chip",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P("chip")))
    gram = jax.shard_map(lambda x: jax.lax.psum(x.T @ x, "chip"), in_specs=P("chip"), out_specs=P(), check_vma=False)
    lowered = compiled.lower_for(gram, x).compile().as_text() or ""
    assert 'execution_thread="sparsecore"' in lowered
    (one,) = compiled.read_report(lowered).collectives
    assert (one.opcode, one.bytes, one.chips, one.times) == ("all-reduce", 2048 * 2048 * 2, 8, 1)


ASYNCHRONOUS = """HloModule jit_step, is_scheduled=true, replica_count=1, num_partitions=16

%start (p: bf16[8,128]) -> (bf16[8,128], bf16[32,128]) {
  %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %ag.1 = bf16[32,128]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, replica_groups=[4,4]<=[16], dimensions={0}
  ROOT %begun = (bf16[8,128]{1,0}, bf16[32,128]{1,0}) custom-call(%ag.1), custom_call_target="Start"
}

%done (q: bf16[8,128]) -> bf16[32,128] {
  %q = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %ag.2 = bf16[32,128]{1,0:T(8,128)(2,1)} all-gather(%q), channel_id=7, replica_groups=[4,4]<=[16], dimensions={0}
  ROOT %ended = bf16[32,128]{1,0} custom-call(%ag.2), custom_call_target="Done"
}

%all-reduce-scatter.3 (r: f32[64,128]) -> f32[16,128] {
  %r = f32[64,128]{1,0:T(8,128)} parameter(0)
  %ar.4 = f32[64,128]{1,0:T(8,128)} all-reduce(%r), channel_id=8, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %slice.5 = f32[16,128]{1,0:T(8,128)} dynamic-slice(%ar.4), dynamic_slice_sizes={16,128}
}

ENTRY %main (a: bf16[8,128], b: f32[64,128]) -> f32[16,128] {
  %a = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %b = f32[64,128]{1,0:T(8,128)} parameter(1)
  %async-collective-start = (bf16[8,128]{1,0}, bf16[32,128]{1,0}) fusion(%a), kind=kCustom, calls=%start
  %async-collective-done = bf16[32,128]{1,0} fusion(%a), kind=kCustom, calls=%done
  ROOT %fusion = f32[16,128]{1,0:T(8,128)} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.3
}
"""


def test_in_fusions() -> None:
    """As libtpu writes them: one all-gather in two fusions, and a reduce-scatter in one."""
    assert compiled.read_report(ASYNCHRONOUS).collectives == (
        Collective("all-gather", "bf16[32,128]{1,0:T(8,128)(2,1)}", 32 * 128 * 2, 4),
        Collective("reduce-scatter", "f32[64,128]{1,0:T(8,128)}", 64 * 128 * 4, 4),
    )


@pytest.mark.parametrize(
    ("groups", "chips"),
    [
        ("replica_groups={{0,1},{2,3}}", 2),
        ("replica_groups=[2,8]<=[16]", 8),
        ("replica_groups=mesh['x'=2,'y'=1,'z'=8], device_ids=([2,8]T(1,0)) {'x','z'}", 16),
        ("replica_groups={}", 16),
    ],
)
def test_groups(groups: str, chips: int) -> None:
    text = f"""HloModule jit_step, replica_count=1, num_partitions=16

ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0:T(256)}} parameter(0)
  ROOT %all-reduce = f32[8]{{0:T(256)}} all-reduce(%a), {groups}, to_apply=%add
}}
"""
    (one,) = compiled.read_report(text).collectives
    assert (one.bytes, one.chips) == (32, chips)
