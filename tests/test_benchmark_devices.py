"""The suite `devices`: what it reads from programs, what runs in each shard, and that it runs.

It needs several devices to run, and so a process of its own.

    ATO_ALL_ROWS=1 python -m pytest tests/test_benchmark_devices.py     every kernel in a shard
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from absl import flags
from absl.testing import flagsaver
from jax.sharding import AxisType

from ato_jax import device
from benchmarks import __main__ as entry
from benchmarks import choices, collectives, devices, scaling, scaling_page
from benchmarks.cases import PHASES
from benchmarks.choices import Row
from benchmarks.collectives import Collective
from benchmarks.devices import Case
from tests import aot
from tests.mosaic_text import H200

DEVICES = 8
ALL_ROWS = os.environ.get("ATO_ALL_ROWS") == "1"
# As XLA prints them for a GPU and for a CPU.
PROGRAM = """
%body.1 (p: (s32[], f32[2,4])) -> (s32[], f32[2,4]) {
  %cps = (bf16[2,8]{1,0}, bf16[2,8]{1,0}) collective-permute-start(%x), source_target_pairs={{0,1}}
  ROOT %t = (s32[], f32[2,4]) tuple(%i, %y)
}

%branch.2 (p: f32[4]) -> f32[4] {
  ROOT %ar = f32[4]{0} all-reduce(%p), replica_groups=[1,4]<=[4], to_apply=%sum
}

ENTRY %main (p: f32[2,4]) -> f32[8,4] {
  %ags = ((f32[1,64]{1,0}, s8[4]), (f32[4,64]{1,0}, s8[16])) all-gather-start(%p, %o), \
replica_groups={{0,1,2,3}}, dimensions={0}
  %agd = f32[4,64]{1,0} all-gather-done(%ags)
  %rs = f32[2,4]{1,0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, to_apply=%sum
  %w = (s32[], f32[2,4]) while(%t), condition=%c, body=%body.1, \
backend_config={"known_trip_count":{"n":"3"}}
  %m = f32[2,4]{1,0} custom-call(%p), custom_call_target="mosaic_gpu_v2"
  %k = f32[2,4]{1,0} custom-call(%p), custom_call_target="__gpu$xla.gpu.triton"
  ROOT %cond = f32[4] conditional(%b, %p, %p), branch_computations={%branch.2, %branch.2}
}
"""


@pytest.fixture(autouse=True)
def parsed() -> None:
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["benchmarks"])


def test_collectives_of_a_program() -> None:
    found = collectives.collectives(PROGRAM)
    assert found == [
        Collective("all-gather", 4 * 64 * 4 + 16, 4),
        Collective("reduce-scatter", 32, 4),
        Collective("collective-permute", 32, 2, times=3),
        Collective("all-reduce", 16, 4),
        Collective("all-reduce", 16, 4),
    ]
    assert [one.received for one in found] == [780, 96, 32, 24, 24]
    assert collectives.received(found) == 780 + 96 + 3 * 32 + 48
    assert "3 collective-permutes of 3.2e-05 MB, 2 all-reduces" in collectives.told(found)
    assert collectives.kernels(PROGRAM) == {"mosaic_gpu": 1, "triton": 1}


def test_the_page_of_scaling_has_the_model_s_tables() -> None:
    text = scaling_page.PAGE.read_text()
    assert scaling_page.page(text) == text


def test_predictions_beside_measured_rows() -> None:
    """A prediction is the time on one GPU over n, plus the model's time of the collectives."""
    forward, both = PHASES
    alone = {forward: 1e-2, both: 3e-2}
    by_heads, gathered, ring, weak = (
        next(case for case, _ in devices.GROUPS["gpu"] if wanted(case))
        for wanted in (
            lambda case: case.cut == "heads",
            lambda case: case.schedule == "all_gather",
            lambda case: case.schedule == "ring",
            lambda case: case.weak and not case.schedule,
        )
    )
    assert scaling_page.predicted(by_heads, both, 4, alone) == 3e-2 / 4
    assert scaling_page.predicted(gathered, both, 4, {both: 3e-2}) is None
    T, H, D = gathered.call.T, gathered.call.H, gathered.call.D
    sent = scaling.gathered_bytes(4, 1, T, H, D, D, 2)["all-gather"]
    found = scaling_page.predicted(gathered, forward, 4, alone)
    assert found == pytest.approx(1e-2 / 4 + scaling.gather_seconds(4, sent))
    # A ring's kernels leave its permutes no multiprocessor.
    sent = scaling.ring_bytes(4, 1, T, H, D, D, 2)["collective-permute"] / scaling.PERMUTE.bandwidth
    found = scaling_page.predicted(ring, forward, 4, {forward: 1.0, both: 3.0})
    assert found == pytest.approx(0.25 + sent, abs=3e-4)
    assert scaling_page.predicted(weak, forward, 4, alone) == pytest.approx(1e-2, rel=0.01)


def test_a_row_of_the_page() -> None:
    case, phase = devices.GROUPS["gpu"][0]
    seconds = {"one": 4e-3, "all": 2.5e-3}
    row = {"row": str(case), "phase": phase, "devices": 2, "received": 2e6, "seconds": seconds}
    cells = scaling_page.line({**row, "speed_up": 1.6}, {PHASES[0]: 1e-3, phase: 4e-3})
    assert cells[1:8] == [phase, "2", "4", "2.5", "80.0%", "2 MB", "-"]
    assert float(cells[8]) == pytest.approx(2.14, abs=0.02) and cells[9] == "+17%"


def test_seconds_of_the_model() -> None:
    """Within a node each GPU receives by NVLink alone; beyond, an eighth by its own port."""
    assert scaling.gather_seconds(1, 0) == 0
    within, beyond = (scaling.gather_seconds(n, 1e12) for n in (8, 1024))
    assert within == pytest.approx(1e12 / scaling.NVLINK.bandwidth, rel=1e-3)
    outside = 1e12 * 1016 / 1023 / 8
    assert beyond == pytest.approx(outside / scaling.INFINIBAND.bandwidth, rel=1e-2)
    for seconds in (scaling.linear_seconds, scaling.gathered_seconds, scaling.ring_seconds):
        assert seconds(1 << 24, 1) == pytest.approx(8 * seconds(1 << 24, 8), rel=0.05)


@pytest.mark.parametrize(
    ("groups", "count"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=mesh['time'=8] {'time'}", 8),
        ("replica_groups=mesh['data'=2,'time'=4] {'time'}", 4),
        ("replica_groups=mesh['data'=2,'time'=4] {'data','time':(2)2}", 4),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", 4),
    ],
)
def test_devices_of_a_collective(groups: str, count: int) -> None:
    """As XLA writes them, from JAX 0.11 on by the mesh."""
    text = f"ENTRY %main (p: f32[4]) -> f32[4] {{\n  %a = f32[4]{{0}} all-reduce(%p), {groups}\n}}"
    assert [one.devices for one in collectives.collectives(text)] == [count]
    with pytest.raises(ValueError, match="no known form"):
        collectives.collectives(text.replace("replica_groups", "groups"))


def test_rows() -> None:
    for platform, groups in devices.GROUPS.items():
        assert len(set(groups)) == len(groups)
        for case, _ in groups:
            for count in (1, 2, 4, 8):
                assert devices.fits(case, count), (platform, case, count)
    weak = Case(Row("attention", 1, 2, 64, 8), schedule="ring", weak=True)
    assert weak.whole(4).T == 256 and weak.work(4) == 16
    assert Case(Row("linear_attention", 1, 2, 64, 8), weak=True).work(4) == 4


def test_programs_are_few() -> None:
    """Those of the first rows, which are all cuts and gates and both schedules."""
    with flagsaver.flagsaver(programs=14):
        rows = devices.within_programs(devices.GROUPS["gpu"], [2])
    assert len({key for row in rows for key in devices.keys_of(*row)}) <= 14
    assert {case for (case, _), _ in rows} >= {*devices.MAIN}
    with flagsaver.flagsaver(programs=3):
        rows = devices.within_programs(devices.GROUPS["gpu"], [1, 2])
    assert rows == [(devices.GROUPS["gpu"][0], count) for count in (1, 2)]


def lowered(case: Case, phase: str, count: int) -> str:
    """The case on so many Hopper cards, none of which is there, with its kernels' names."""
    kind = jax.sharding.AbstractDevice(aot.DEVICE_KIND[90], num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh(
        (count,), (devices.AXIS,), axis_types=(AxisType.Auto,), abstract_device=kind
    )
    shapes = jax.eval_shape(lambda key: choices.draw(case.call, key), jax.random.key(0))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(choices.in_phase(devices.on_devices(case, mesh), phase)).trace(shapes)
        return str(traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True))


def kernels(text: str) -> set[str]:
    return set(re.findall(r'loc\("(?:[^"]*/)?((?:linear_)?attention_\w+)["/]', text))


_linear = functools.partial(Row, "linear_attention", B=1, H=16, T=262144, D=128, causal=True)
_softmax = functools.partial(Row, "attention", B=1, H=16, T=262144, D=128, causal=True)


@pytest.mark.lowering
@pytest.mark.parametrize(
    ("case", "phase"),
    [
        (Case(_linear()), PHASES[0]),
        (Case(_linear(), "heads"), PHASES[0]),
        (Case(_softmax(), schedule="ring"), PHASES[1]),
    ]
    + [
        (Case(_linear()), PHASES[1]),
        (Case(_linear(decay="channel")), PHASES[0]),
        (Case(_softmax(), schedule="all_gather"), PHASES[0]),
    ] * ALL_ROWS,
    ids=str,
)
def test_every_shard_runs_kernels(
    case: Case, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard on eight cards has the kernels that one card has for a shard's rows or heads."""
    monkeypatch.setattr(device, "of_call", lambda _: H200)
    text = lowered(case, phase, DEVICES)
    assert "manual_computation" in text
    axis = {"time": "T", "heads": "H", "batch": "B"}[case.cut]
    size = getattr(case.call, axis) // DEVICES
    alone = lowered(dataclasses.replace(
        case, call=dataclasses.replace(case.call, **{axis: size})
    ), phase, 1)  # fmt: skip
    assert kernels(text) == kernels(alone) and kernels(text)
    assert "mosaic_gpu" in text
    # XLA multiplies nothing.
    assert "stablehlo.dot_general" not in text


@pytest.mark.lowering
@pytest.mark.parametrize(
    ("decay", "prefix", "more"),
    [("step", "", {"corrections"}), ("channel", "channel_", set())],
    ids=["step-", "channel-channel_"],
)
def test_a_shard_of_the_delta_rule_runs_kernels(
    monkeypatch: pytest.MonkeyPatch, decay: str, prefix: str, more: set[str]
) -> None:
    """Forward and backward, with the states that its steps begin and end with."""
    monkeypatch.setattr(device, "of_call", lambda _: H200)
    row = Row("gated_delta_rule", B=1, H=2, T=1024, D=64, decay=decay)
    text = lowered(Case(row), PHASES[1], DEVICES)
    assert set(re.findall(r"gated_delta_rule_(\w+?)_mosaic", text)) == {
        prefix + name for name in {"solve", "walk", "walk_backward", "gradients"} | more
    }


def test_the_suite_runs(tmp_path: Path) -> None:
    path = tmp_path / "devices.json"
    count = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks", "run", "--suite=devices", f"--json={path}",
            "--programs=6", "--devices=4",
        ],
        cwd=Path(__file__).parent.parent,
        env={
            **os.environ,
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {count}",
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "beyond --programs" in done.stdout and "the suite took" in done.stdout
    told = json.loads(path.read_text())
    assert told["count"] == 4 and len(told["rows"]) >= 3
    for row in told["rows"]:
        assert not row["wrong"] and not row["skipped"], row
        # On a CPU beside other programs times are seldom steady.
        assert row["speed_up"] is None if row["doubt"] else row["speed_up"] > 0, row
        assert row["errors"] and len(row["batches"]["all"]) >= 3
        assert 0 < row["collective_seconds"] < 10 * row["seconds"]["all"] + 1
    linear, ring = told["rows"][0], told["rows"][2]
    assert [one["kind"] for one in linear["sends"]] == ["all-gather"] * 2
    assert "ring" in ring["row"] and {one["kind"] for one in ring["sends"]} == {
        "collective-permute"
    }
    # Forward k and v, backward k and v and their gradients; these once more at the end.
    assert sum(one["times"] for one in ring["sends"]) == 3 * (2 + 4) + 2


def test_wrong_results_are_not_timed() -> None:
    """On a mesh of one device, whose program gives something else."""
    group, phase = devices.GROUPS["cpu"][0][0], PHASES[0]
    one = jax.jit(choices.called(group.call, phase, None))
    shapes = jax.eval_shape(lambda key: choices.draw(group.call, key), jax.random.key(0))
    program = one.lower(shapes).compile()

    class Off:
        memory_analysis, as_text = program.memory_analysis, program.as_text

        def __call__(self, arrays: Any) -> Any:
            return jax.tree.map(lambda array: array * 1.01, program(arrays))

    found = devices.Measurer((group, phase), 1, program, Off(), "cpu").measure()
    assert found.wrong.startswith("out off by") and not found.seconds
    assert "WRONG: out off by" in devices.line_of(found)
    rows = [(group, phase), 1]
    missing = devices.measured(tuple(rows), {}, {(group.call, phase, 1): "no"}, "cpu")  # type: ignore[arg-type]
    assert missing.skipped == "no" and "no" in devices.line_of(missing)


def test_bits_and_errors() -> None:
    x = jnp.array([0.0, 1.0, jnp.nan])
    assert devices.same_bits(x, x) and not devices.same_bits(x, -x)
    assert float(devices.apart(jnp.full(4, 1.02), jnp.ones(4))) == pytest.approx(0.02, rel=1e-3)


@pytest.mark.parametrize(
    "given",
    [
        {"case": "no such call"},
        {"devices": ["1000"]},
        {"dtype": "float32"},
        {"suite": ["devices", "smoke"]},
    ],
)
def test_flags_that_make_no_sense(given: dict[str, Any]) -> None:
    with flagsaver.flagsaver(**{"suite": ["devices"]} | given):
        assert entry.main(["benchmarks", "run"]) == 2
