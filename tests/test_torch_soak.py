"""The long mixed run of `tests/soak.py`, for seconds on a CPU, and with planted faults."""

import functools
import time

import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)

import ato_torch  # noqa: E402
from tests import soak  # noqa: E402

KIND = functools.partial(soak.Kind, "attention", 1, 2, 2, 5, 5, 4, torch.float32)


def short_run(chosen):
    return soak.run(0.02, threads=2, device="cpu", leave_gib=0.0, chosen=chosen)


def test_a_short_run_on_a_cpu(capsys):
    status = short_run(soak.kinds("cpu")[1:])
    printed = capsys.readouterr().out
    assert status == 0 and printed.endswith("passed\n"), printed
    assert "before: " in printed and "alone: host time of a call by kind" in printed


@pytest.fixture
def planted(monkeypatch):
    """Makes `ato_torch.attention` something else, which is given its result."""
    attention = ato_torch.attention

    def plant(change):
        monkeypatch.setattr(
            ato_torch, "attention", lambda *args, **kw: change(attention(*args, **kw))
        )

    return plant


def test_results_far_from_float64_are_reported(planted):
    made = soak.Soak("cpu", [KIND()])
    planted(lambda out: out + 1e-4)
    made.prepare(threads=1)
    assert "out: error" in made.record.wrong[0]


def test_results_that_change_by_a_bit_are_reported(planted):
    made = soak.Soak("cpu", [KIND()])
    made.prepare(threads=1)
    assert not made.record.wrong
    planted(lambda out: out.nextafter(torch.full_like(out, 9.0)))
    made.thread(0, time.monotonic() + 0.2, new_lengths=False)
    assert "other bits than the first call gave" in made.record.wrong[0]


def test_errors_are_reported_and_end_a_thread(planted):
    made = soak.Soak("cpu", [KIND()])
    made.prepare(threads=1)
    planted(lambda out: 1 / 0)
    start = time.monotonic()
    made.thread(0, start + 60, new_lengths=False)
    assert "ZeroDivisionError" in made.record.errors[0] and time.monotonic() < start + 30


def test_slow_calls_and_their_reasons():
    record, pauses = soak.Record(), soak.Pauses()

    def timed(milliseconds, start=0.0, allocated=False):
        return soak.Timed("a kind", start, start + milliseconds / 1e3, allocated)

    record.controls = [timed(1)] * 9 + [timed(5)]
    record.calls = [timed(1)] * 99
    record.calls += [timed(2.9), timed(4), timed(4, allocated=True), timed(9)]
    record.calls += [timed(9, start=100.0), timed(9, start=200.0), timed(9, start=300.0)]
    pauses.collections = [(100.001, 100.006), (300.0, 300.001)]
    pauses.compilations = [(199.0, 200.001)]
    found = record.slow(pauses, compiling=True)["a kind"]
    assert found["count"] == 106 and found["median"] == pytest.approx(1e-3)
    assert found["slow"] == {
        "noise": 1,
        "device allocation": 1,
        "garbage collection": 1,
        "compilation": 1,
        "UNEXPLAINED": 2,
    }
    # Where nothing is to be compiled, that explains nothing.
    assert record.slow(pauses, compiling=False)["a kind"]["slow"]["UNEXPLAINED"] == 3


def test_growth_of_memory():
    steady = [{"host MiB": 1000.0 + n % 7, "mappings": 5000.0} for n in range(40)]
    assert soak.growth(steady, 0) == []
    growing = [sample | {"mappings": 5000.0 + 50 * n} for n, sample in enumerate(steady)]
    assert soak.growth(growing, 0) == ["mappings grew from 6450 to 6950"]
    # Memory of programs that are compiled in the first half.
    programs = [one | {"host MiB": 1000.0 + 15 * min(n, 20)} for n, one in enumerate(steady)]
    assert soak.growth(programs, 80) == []
    assert soak.growth(programs, 40) == ["host MiB grew from 1000 to 1300 by 40 programs"]
