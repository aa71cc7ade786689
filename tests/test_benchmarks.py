"""The benchmarks' own logic: what is said of measured times, what is left out, what is compared."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
import types
import weakref
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from benchmarks import __main__ as entry
from benchmarks import (
    byte_limit,
    cases,
    demo,
    linear_torch,
    ours,
    peers,
    picture,
    side_by_side,
    timing,
)
from tests import numerics
from tests.figures import parsed_flags  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="the benchmarks compare with PyTorch")
CASE = cases.Case("linear", B=2, H=3, T=64, D=16, dtype="float32")


@pytest.mark.parametrize(
    ("linear", "sdpa", "said"),
    [
        (
            {512: 1, 1024: 2, 2048: 4},
            {512: 1.5, 1024: 6, 2048: 24},
            "is faster than the best SDPA backend at every T measured, 1.5 times at T = 512 and "
            "6.0 times at T = 2048",
        ),
        (
            {512: 4, 1024: 8},
            {512: 1, 1024: 4},
            "overtakes SDPA at no T measured and takes 2.0 times the time of the best SDPA "
            "backend at T = 1024",
        ),
        (
            {512: 2, 1024: 2, 2048: 2, 4096: 2},
            {512: 1, 1024: 1.9, 2048: 10, 4096: 68},
            "overtakes the best SDPA backend at T = 2048 and is 34 times faster at T = 4096",
        ),
        (  # faster once by chance: what counts is from where on it stays faster
            {512: 1, 1024: 2, 2048: 2},
            {512: 1.1, 1024: 1.9, 2048: 684},
            "overtakes the best SDPA backend at T = 2048 and is 340 times faster at T = 2048",
        ),
        (
            {512: 1, 1024: 4},
            {512: 2, 1024: 2},
            "overtakes SDPA only at shorter T and takes 2.0 times the time of the best SDPA "
            "backend at T = 1024",
        ),
        ({512: 1}, {512: 3}, "is 3.0 times faster than the best SDPA backend at T = 512"),
        ({512: 1, 1024: 2}, {}, "could not be compared with SDPA"),
    ],
    ids=["always", "never", "crossover", "by chance", "shorter only", "one length", "alone"],
)
def test_verdict(linear, sdpa, said):
    assert demo.verdict(linear, sdpa) == said


def test_finding_takes_the_best_backend_at_each_length():
    times = {
        phase: {
            demo.OURS: {512: 2.0, 1024: 2.0, 2048: 3.0},
            "SDPA flash": {512: 1.0, 1024: 5.0},
            "SDPA math": {512: 3.0, 1024: 4.0},
        }
        for phase in cases.PHASES
    }
    assert demo.best_of_sdpa(times["forward"]) == {512: 1.0, 1024: 4.0}
    assert demo.finding(times) == (
        "Forward, linear attention overtakes the best SDPA backend at T = 1024 and is 2.0 times "
        "faster at T = 1024; forward + backward, it overtakes the best SDPA backend at T = 1024 "
        "and is 2.0 times faster at T = 1024."
    )


@pytest.mark.parametrize(
    ("value", "text"), [(1.04, "1.0"), (9.94, "9.9"), (9.96, "10"), (34.4, "34"), (346, "350")]
)
def test_ratio_has_two_digits(value, text):
    assert demo.ratio(value) == text


def test_table_leaves_gaps_where_nothing_was_measured():
    times = {
        phase: {demo.OURS: {512: 1e-3, 1024: 0.02345}, "SDPA math": {512: 5e-6}, "SDPA flash": {}}
        for phase in cases.PHASES
    }
    limits = {phase: {512: 1e-4, 1024: 2e-4} for phase in cases.PHASES}
    block = demo.table(times, limits).split("\n\n")[0].splitlines()
    assert block[0] == "forward, ms"
    assert block[1].split("  ")[-1] == "byte limit" and "flash" not in block[1]
    assert block[2].split() == ["512", "1.000", "0.0050", "0.1000"]
    assert block[3].split() == ["1024", "23.45", "0.2000"]
    assert len({len(line) for line in block[1:]}) == 1


def test_memory_doubles_and_that_of_scores_quadruples():
    twice = dataclasses.replace(CASE, T=2 * CASE.T)
    for phase in cases.PHASES:
        assert twice.memory(phase) == 2 * CASE.memory(phase)
        scores = CASE.memory(phase, quadratic=True) - CASE.memory(phase)
        assert twice.memory(phase, quadratic=True) - twice.memory(phase) == 4 * scores
        assert scores >= 3 * 4 * 2 * 3 * 64 * 64
    assert CASE.memory("forward + backward") >= 8 * CASE.unit


def test_traffic_and_byte_limit(monkeypatch):
    monkeypatch.setattr(byte_limit, "CPU_COPY_BYTES", 1 << 22)
    assert CASE.unit == 2 * 3 * 64 * 16 * 4
    assert [CASE.traffic(phase) / CASE.unit for phase in cases.PHASES] == [4, 11]
    assert byte_limit.limit(CASE, "forward", 2.0 * CASE.unit) == 2
    assert byte_limit.cpu_bandwidth() > 1e8


def test_plan_refuses_what_would_not_fit():
    big = dataclasses.replace(CASE, T=65536)
    plan = demo.Plan(budget=100, memory=2**34)
    reason = plan.reason_against("SDPA math", big, "forward", None, 0.0)
    assert reason is not None and reason.startswith("would need about 288.") and "of 16.0" in reason
    assert plan.reason_against("SDPA flash", big, "forward", None, 0.0) is None
    # Four times the last for SDPA, twice for ours; a quarter of what is left.
    last = 100 / 4 / timing.FEWEST_CALLS / 3
    assert "would take about 33 s" in plan.reason_against("SDPA flash", big, "forward", last, 0.0)
    assert plan.reason_against(demo.OURS, big, "forward", last, 0.0) is None
    assert "would take about 27 s" in plan.reason_against(demo.OURS, big, "forward", last, 10.0)
    plan = demo.Plan(budget=0, memory=2**34)
    assert plan.reason_against("SDPA flash", CASE, "forward", None, 0.0) == "the time is used up"


def test_measure_goes_on_with_those_that_are_left():
    def contender(growth, refuses=None):
        def call(case, phase, seconds):
            if case.T == refuses:
                return "out of memory"
            return timing.Timing([1e-4 * (case.T / 64) ** growth] * 3, 3)

        return call

    contenders = {
        demo.OURS: contender(1),
        "SDPA flash": contender(2, refuses=256),
        "SDPA math": lambda *_: "no",
    }
    seen = []
    found = demo.measure(
        demo.Plan(100, 2**40), contenders, CASE, 1024, lambda T, what: seen.append((T, what))
    )
    times, left_out = found.times, found.left_out
    assert list(times["forward"][demo.OURS]) == [64, 128, 256, 512, 1024]
    assert list(times["forward + backward"]["SDPA flash"]) == [64, 128]
    assert times["forward"]["SDPA math"] == {}
    assert left_out == [
        "SDPA math, forward and forward + backward, at all: no",
        "SDPA flash, forward and forward + backward, from T = 256: out of memory",
    ]
    assert seen[0] == (64, f"{demo.OURS}, forward")


@pytest.mark.parametrize(("op", "causal"), [("linear", True), ("softmax", False)])
def test_exact_is_the_reference(op, causal):
    generator = np.random.default_rng(0)
    q, k, v = generator.normal(size=(3, 1, 12, 1, 4)).astype(np.float32)
    name = {"linear": "linear_attention", "softmax": "attention"}[op]
    wanted = numerics.oracle(name, q, k, v, causal=causal)
    case = cases.Case(op, 1, 1, 12, 4, "float32", causal)
    one = {"q": q, "k": k, "v": v, "dout": np.asarray(wanted.cotangents)}
    one = {name: array[0, :, 0] for name, array in one.items()}
    found = cases.exact(case, *one.values(), np.arange(12))
    for name, array in wanted.exact.items():
        np.testing.assert_allclose(found[name], array[0, :, 0], rtol=1e-6, atol=1e-9)
    rows = np.array([3, 11])
    sampled = cases.exact(case, *one.values(), rows)
    np.testing.assert_allclose(sampled["dq"], found["dq"][rows])
    # The sums over the rest are what a dout of zero in the sample leaves.
    rest = cases.exact(case, *one.values(), np.setdiff1d(np.arange(12), rows))
    np.testing.assert_allclose(sampled["dk"] + rest["dk"], found["dk"], atol=1e-12)
    one, found = of_one_head(one), of_one_head(found)
    assert cases.wrong(case, one, found) is None
    assert "dk is wrong" in cases.wrong(case, one, found | {"dk": found["dk"] * 1.01})
    assert "out is wrong" in cases.wrong(case, one, found | {"out": found["out"] * np.nan})


@pytest.mark.parametrize(("channels", "strength"), [((4,), 0.1), ((4,), 300.0), ((), 3.0)])
def test_exact_is_the_reference_with_gates(channels, strength):
    """The stronger ones are 0 in float64 after three steps, where `exact` leaves keys out."""
    generator = np.random.default_rng(0)
    q, k, v = generator.normal(size=(3, 1, 12, 1, 4)).astype(np.float32)
    decay = -strength * np.abs(generator.normal(size=(1, 12, 1, *channels))).astype(np.float32)
    wanted = numerics.oracle("linear_attention", q, k, v, causal=True, decay=decay)
    case = cases.Case("linear", 1, 1, 12, 4, "float32", True, "channel" if channels else "step")
    one = [array[0, :, 0] for array in (q, k, v, np.asarray(wanted.cotangents))]
    found = cases.exact(case, *one, np.arange(12), decay[0, :, 0])
    for name in ("out", "dq", "dk", "dv"):
        np.testing.assert_allclose(found[name], wanted.exact[name][0, :, 0], rtol=1e-6, atol=1e-9)


def of_one_head(arrays):
    """As `cases.errors` takes the arrays of a key head and its queries."""
    of_queries = ("q", "dout", "out", "dq")
    return {name: array[None] if name in of_queries else array for name, array in arrays.items()}


def test_long_sequences_are_compared_by_a_sample_of_rows():
    case = cases.Case("linear", 1, 1, 2 * cases.WHOLE, 4, "float32")
    generator = np.random.default_rng(0)
    one = {name: generator.normal(size=(case.T, 4)) for name in ("q", "k", "v", "dout")}
    everywhere = cases.exact(case, *one.values(), np.arange(case.T))
    rows = cases.compared_rows(case)
    assert len(rows) == cases.SAMPLE
    found = {"out": everywhere["out"]} | {
        name: cases.exact(case, *one.values(), rows)[name] for name in ("dk", "dv")
    }
    one = of_one_head(one)
    assert cases.wrong(case, one, of_one_head(found)) is None
    assert "out is wrong" in cases.wrong(case, one, of_one_head({"out": found["out"] + 0.1}))
    assert "dk is wrong" in cases.wrong(case, one, {"dk": everywhere["dk"]})


def test_timing_counts_calls_and_waits_once_a_batch():
    launched, waited = [], []
    found = timing.measure(launched.append, waited.append, "cpu", 0.0, calls=2)
    assert found.calls == 2 * timing.FEWEST_BATCHES
    assert len(launched) == len(waited) == 1 + timing.FEWEST_BATCHES
    assert len(found.batches) == timing.FEWEST_BATCHES
    assert 0 < min(found.batches) <= found.seconds <= max(found.batches)


def test_slow_first_launches_do_not_make_batches_short(monkeypatch):
    now, launched = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def launch(index):
        launched.append(index)
        now[0] += 0.02 if len(launched) < 3 else 1e-4

    def wait(_):
        now[0] += 2e-5

    found = timing.measure(launch, wait, "gpu", 0.03)
    # The wait is lost in batches of a hundred, as it would not be in batches of one.
    assert abs(found.seconds / 1e-4 - 1) < 0.01 and found.calls >= 90 * len(found.batches)


def test_a_later_turn_takes_the_size_of_a_batch_from_the_first(monkeypatch):
    """Of a launch of 1 ms, where the clock is what the launches say: ten make a batch."""
    now, launched, counts = [0.0], [], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def launch(index):
        launched.append(index)
        now[0] += 1e-3

    def measured():
        launched.clear()
        return timing.measure(launch, lambda _: None, "gpu", 0.03, 2, counts), len(launched)

    (first, of_first), (second, of_second) = measured(), measured()
    assert counts == [10] and of_first == 5 + 10 + 30 and of_second == 10 + 30
    assert len(first.batches) == len(second.batches) == 3 and first.calls == second.calls == 60
    assert first.seconds == second.seconds == pytest.approx(5e-4)
    # Twenty times as long: a launch is a batch.
    counts.clear()
    monkeypatch.setattr(timing, "GPU_BATCH_SECONDS", 5e-4)
    assert [measured()[1], measured()[1]] == [5 + 30, 1 + 30] and counts == [1]


@pytest.mark.parametrize(
    ("set_bytes", "platform", "groups"),
    [
        (1 << 20, "cpu", (1, 1)),
        (1 << 30, "gpu", (1, 1)),
        (1 << 27, "gpu", (1, 8)),
        (1 << 24, "gpu", (1, 8)),
        (1 << 10, "gpu", (1, 32)),
    ],
)
def test_inputs_take_turns_on_a_gpu(set_bytes, platform, groups):
    assert timing.groups_of_inputs(set_bytes, platform) == groups


@pytest.mark.parametrize("phase", cases.PHASES)
def test_ours_is_compared_and_timed(phase, monkeypatch):
    assert isinstance(ours.measure(CASE, phase, 0.0), timing.Timing)
    assert "is wrong" in ours.measure(CASE, phase, 0.0, lambda q, k, v: q)
    assert ours.backends(CASE) == ("xla", "xla")
    monkeypatch.setattr(timing, "groups_of_inputs", lambda *_: (2, 3))
    found = ours.measure(CASE, phase, 0.0)
    assert found.calls == 3 * timing.FEWEST_BATCHES


def test_a_launch_holds_every_call_and_traces_one():
    traced = []

    def call(x):
        traced.append(x)
        return jnp.sort(x)  # which XLA fuses with nothing

    launch = ours.in_turn(call)
    group = [jnp.asarray(row) for row in ([3, 1, 2], [6, 5, 4], [7, 9, 8])]
    program = launch.lower(group)
    assert len(traced) == 1 and program.as_text().count("stablehlo.sort") == 1
    assert program.as_text().count("stablehlo.optimization_barrier") == 3
    compiled = program.compile()
    assert compiled.as_text().count(" sort(") == 3
    assert [row.tolist() for row in compiled(group)] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_picture_is_a_picture(tmp_path):
    from matplotlib import image

    lengths = [512 << power for power in range(12)]
    times = {
        phase: {
            demo.OURS: {T: 1e-7 * T for T in lengths},
            "SDPA flash": {T: 1e-10 * T**2 for T in lengths[:7]},
            "SDPA cuDNN": {},
        }
        for phase in cases.PHASES
    }
    limits = {phase: {T: 5e-8 * T for T in lengths} for phase in cases.PHASES}
    output = tmp_path / "folder" / "picture.png"
    picture.draw(times, limits, "One sentence.", "one machine", output)
    pixels = image.imread(output)
    height, width = pixels.shape[:2]
    assert height > 500 and width > 1000
    for style in picture.STYLES[:2]:
        colour = [int(style["color"][at : at + 2], 16) / 255 for at in (1, 3, 5)]
        drawn = (np.abs(pixels[..., :3] - colour) < 0.02).all(-1)
        # In both panels.
        assert drawn[:, : width // 2].sum() > 200 and drawn[:, width // 2 :].sum() > 200
    assert picture.length(512) == "512" and picture.length(3 << 20) == "3M"
    assert [picture.duration(x) for x in (2e-6, 1e-3, 0.25)] == ["2 µs", "1 ms", "250 ms"]


# The command with all the time that a busy machine may need, of which it measures for none; and
# without the guard that such a machine would set off.
DEMO = """
import runpy
from benchmarks import byte_limit, demo, noise, other_load
demo.SHARE_OF_ONE, byte_limit.CPU_COPY_BYTES = 0.0, 1 << 22
noise.MOST_SCATTER = noise.MOST_DRIFT = float("inf")
other_load.Watch.told = lambda self: ""
runpy.run_module("benchmarks", run_name="__main__")
"""


@needs_torch
def test_demo_runs(tmp_path):
    """The command itself, at one length: table, sentence, what was left out and the picture."""
    output = tmp_path / "demo.png"
    ran = subprocess.run(
        [
            *(sys.executable, "-c", DEMO, "demo", "--max_tokens=256"),
            *("--budget_seconds=600", f"--output={output}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert ran.returncode == 0, ran.stderr
    assert "no GPU here" in ran.stdout and "xla forward" in ran.stdout
    assert "forward + backward, ms" in ran.stdout and "SDPA flash" in ran.stdout
    assert "SDPA cuDNN, forward and forward + backward, at all: No viable backend" in ran.stdout
    sentence, name = ran.stdout.splitlines()[-2:]
    assert sentence.startswith("Forward, linear attention ") and sentence.endswith(".")
    assert name == str(output)
    assert output.read_bytes().startswith(b"\x89PNG") and output.stat().st_size > 20_000
    assert "T = 256 after" in ran.stderr


@pytest.mark.skipif(HAS_TORCH, reason="PyTorch is installed")
def test_without_pytorch_the_commands_say_so(caplog):
    for command in (["demo"], ["run", "smoke"]):
        assert entry.main(["benchmarks", *command]) == 1


# Stands in for PyTorch's process, and starts in a moment. What is called "ends time <n>" ends it
# when it is timed for the n-th time; "loses" says that nothing can run any more.
STAND_IN = """
import json, os, sys
timed = {}
for line in sys.stdin:
    request = json.loads(line)
    name, answer = request.get("contender", ""), {}
    if request["ask"] == "prepare":
        timed[name] = 0
        known = {"errors": {"out": 1e-3}}
        answer = {"ended": "no access"} if name == "loses" else known
    if request["ask"] == "time":
        timed[name] += 1
        answer = {"batches": [1e-3, 1e-3], "calls": 1}
        if name == f"ends time {timed[name]}":
            os._exit(3)
    print(json.dumps(answer), flush=True)
    if "ended" in answer:
        break
"""


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(peers.Peer, "COMMAND", (sys.executable, "-c", STAND_IN))
    with peers.Peer("cpu") as peer:
        yield peer


def told_of(peer, case, names):
    """By contender: how many turns it was timed, or why it has no figure."""
    anyone = linear_torch.Contender(lambda case: True, None)
    contest = side_by_side.Contest({}, {}, dict.fromkeys(names, anyone))
    rows = side_by_side.measure(contest, peer, case, "forward", 1.0, lambda: 1.0)
    assert all(bool(row.unavailable) == (row.seconds is None) for row in rows)
    return {row.contender: row.unavailable or len(row.turns) for row in rows}


def test_a_peer_that_dies_is_an_error_and_another_takes_its_place(stand_in):
    stand_in._process.kill()
    with pytest.raises(peers.PeerError, match="status -9"):
        stand_in.ask("about")
    assert stand_in.ask("about") == {}
    stand_in._process.kill()
    stand_in.forget()
    assert stand_in.ask("about") == {}


def test_a_contender_that_ends_the_peer_costs_its_own_row_alone(stand_in):
    for case in (CASE, dataclasses.replace(CASE, T=128)):
        told = told_of(stand_in, case, ["first", "loses", "second", "ends time 2", "third"])
        assert told == {
            "first": side_by_side.TURNS,
            "loses": "ended PyTorch's process: no access",
            "second": side_by_side.TURNS,
            # It was timed before, and has no figure.
            "ends time 2": "ended PyTorch's process: status 3",
            "third": side_by_side.TURNS,
        }


def test_a_peer_is_started_again_a_few_times_a_case(stand_in):
    names = ["first", "loses", "ends time 1", "ends time 2", "ends time 3", "second"]
    told = told_of(stand_in, CASE, names)
    assert [name for name, reason in told.items() if "ended PyTorch's" in str(reason)] == names[1:4]
    for name in ("first", "ends time 3", "second"):
        assert told[name] == "PyTorch's process ended 3 times in this case"
    # All of it is of that case.
    assert told_of(stand_in, dataclasses.replace(CASE, T=128), ["first"]) == {"first": 3}


@needs_torch
def test_pytorchs_own_process_is_started_again(monkeypatch):
    fatal = (
        "import os; from benchmarks import linear_torch, peers;"
        "make = lambda torch, case: os._exit(3);"
        "peers.CONTENDERS['linear']['fatal'] = linear_torch.Contender(None, make); peers.main()"
    )
    monkeypatch.setattr(peers.Peer, "COMMAND", (sys.executable, "-c", fatal))
    with peers.Peer("cpu") as peer:
        assert peer.prepare("PyTorch", CASE, "forward")["errors"]["out"] < 1e-5
        assert peer.prepare("fatal", CASE, "forward") == "ended PyTorch's process: status 3"
        assert isinstance(peer.time("PyTorch", 0.0), timing.Timing)


class Tensor:
    """What a weak reference can follow."""


class FakeTorch(types.SimpleNamespace):
    """As much of PyTorch as capturing and replaying takes: a replay needs what was captured."""

    OutOfMemoryError = MemoryError

    def __init__(self):
        self.replayed = 0

        def replay():
            self.replayed += 1

        graph = functools.partial(types.SimpleNamespace, replay=replay)
        super().__init__(
            cuda=types.SimpleNamespace(
                CUDAGraph=graph,
                graph=contextlib.nullcontext,
                empty_cache=lambda: None,
                synchronize=lambda: None,
            )
        )


def test_a_captured_graph_holds_its_tensors_until_it_is_forgotten(monkeypatch):
    followed = {}

    def made(name):
        tensor = Tensor()
        followed[name] = weakref.ref(tensor)
        return tensor

    def prepare(torch, platform, contender, case, phase):
        mask = made("mask")
        sets = [{name: made(f"{name} of {number}") for name in "qkv"} for number in range(2)]

        def call(tensors):
            assert mask
            return {"out": made(f"result {len(followed)}")}

        return peers._Prepared([peers._capture(torch, call, sets)], 2, {"out": 1e-3})

    monkeypatch.setattr(peers, "_prepare", prepare)
    monkeypatch.setattr(peers.linear_torch, "hasten_triton", lambda: None)
    torch = FakeTorch()
    asked = [
        {"ask": "prepare", "contender": "SDPA flash", "phase": "forward"}
        | {"case": dataclasses.asdict(CASE)},
        {"ask": "time", "contender": "SDPA flash", "seconds": 0.0},
        {"ask": "forget"},
        {"ask": "about"},
    ]
    answers = peers._answers(torch, "cpu", map(json.dumps, asked))
    assert next(answers) == {"errors": {"out": 1e-3}, "scratch": None, "picked": ""}
    assert len(followed) == 1 + 2 * 3 + 2
    assert all(reference() for reference in followed.values())
    assert next(answers)["calls"] == 2 * torch.replayed - 2
    assert all(reference() for reference in followed.values())
    assert next(answers) == {}
    assert not any(reference() for reference in followed.values())


def test_a_process_whose_gpu_fails_for_good_says_so_and_ends(monkeypatch):
    reason = "CUDA error: an illegal memory access was encountered"

    def fail(*_):
        raise RuntimeError(f"{reason}\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(peers.linear_torch, "hasten_triton", lambda: None)
    monkeypatch.setattr(peers, "_prepare_contender", fail)
    torch = FakeTorch()
    asked = map(json.dumps, [{"ask": "forget"}, {"ask": "prepare"}] * 2)
    answers = peers._answers(torch, "gpu", asked)
    assert [next(answers) for _ in range(3)] == [{}, {"unavailable": reason}, {}]
    torch.cuda.synchronize = fail
    assert list(answers) == [{"ended": reason}]


@pytest.mark.parametrize("arguments", [[], ["sing"], ["demo", "run"], ["linear", "x"]], ids=str)
def test_unknown_commands(arguments):
    assert entry.main(["benchmarks", *arguments]) == 2


@pytest.mark.parametrize(
    "flag", ["--output=picture.jpg", "--budget_seconds=0", "--max_tokens=many", "--dtype=int8"]
)
def test_bad_flags(flag):
    name = flag.split("=")[0].removeprefix("--")
    with flagsaver.flagsaver(), pytest.raises(flags.IllegalFlagValueError, match=name):
        flags.FLAGS(["benchmarks", flag])
