"""The long mixed run of `tests/soak.py`, for seconds on a CPU, and with planted faults."""

import functools
import os
import random
import re
import signal
import threading
import time

import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here: ato_torch is tested at the other end"
)

import ato_torch  # noqa: E402
from tests import soak  # noqa: E402

KIND = functools.partial(soak.Kind, "attention", 1, 2, 2, 5, 5, 4, torch.float32)


def short_run(chosen, minutes=0.02, **settings):
    return soak.run(minutes, threads=2, device="cpu", leave_gib=0.0, chosen=chosen, **settings)


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
    made = soak.Soak("cpu", [KIND()], lambda: 0)
    planted(lambda out: out + 1e-4)
    made.prepare(threads=1)
    assert "out: error" in made.record.wrong[0]


def test_results_that_change_by_a_bit_are_reported(planted):
    made = soak.Soak("cpu", [KIND()], lambda: 0)
    made.prepare(threads=1)
    assert not made.record.wrong
    planted(lambda out: out.nextafter(torch.full_like(out, 9.0)))
    made.thread(0, time.monotonic() + 0.2, new_lengths=False)
    assert "other bits than the first call gave" in made.record.wrong[0]


def test_other_bits_of_a_program_that_was_compiled_again(planted):
    """They are compared with float64 once, and known from then on."""
    compilations = [0]
    made = soak.Soak("cpu", [KIND()], lambda: len(compilations))
    made.prepare(threads=1)
    for change, wrong in ((lambda x: x.nextafter(torch.full_like(x, 9.0)), 0), (torch.neg, 2)):
        compilations.append(0)
        planted(change)
        made.thread(0, time.monotonic() + 0.2, new_lengths=False)
        assert len(made.record.wrong) == wrong, made.record.wrong
        assert all("compiled again: out: error" in said for said in made.record.wrong)
    assert len(made.record.again) == 4


def test_other_bits_that_memory_does_not_suffice_to_compare(planted, monkeypatch):
    compilations = [0]
    made = soak.Soak("cpu", [KIND()], lambda: len(compilations), seeds=1)
    made.prepare(threads=1)

    def too_much(*given):
        raise torch.OutOfMemoryError("scores")

    monkeypatch.setattr(soak, "over_budget", too_much)
    compilations.append(0)
    planted(torch.neg)
    made.thread(0, time.monotonic() + 0.2, new_lengths=False)
    assert len(made.record.wrong) == 1 and "no memory to compare" in made.record.wrong[0]
    assert not made.record.out_of_memory and len(made.record.calls) > 1


def test_errors_ahead_of_the_calls_are_reported(monkeypatch):
    made = soak.Soak("cpu", [KIND()], lambda: 0)
    for error in (ZeroDivisionError("a compiler"), torch.OutOfMemoryError("a length")):
        monkeypatch.setattr(soak, "call", lambda *given, error=error: (_ for _ in ()).throw(error))
        made.warm(2)
    assert made.record.out_of_memory == 2 and made.record.new_lengths == 4
    assert len(made.record.errors) == 2 and "ZeroDivisionError" in made.record.errors[0]


def test_errors_are_reported_and_end_a_thread(planted):
    made = soak.Soak("cpu", [KIND()], lambda: 0)
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


def test_overlaps_with_sorted_intervals():
    chosen = random.Random(0)
    found, now = [], 0.0
    for _ in range(300):
        now += chosen.random()
        found.append((now, now + chosen.random() ** 8 * 20))
    intervals = soak.Intervals(found)
    for _ in range(100):
        start = chosen.random() * now
        one = soak.Timed("a kind", start, start + chosen.random(), False)
        wanted = sum(max(0.0, min(end, one.end) - max(begin, one.start)) for begin, end in found)
        assert intervals.overlap(one) == pytest.approx(wanted)


# What --prepare keeps


def test_a_run_finds_what_was_prepared(tmp_path, capsys):
    kinds = [KIND()]
    assert soak.prepare(tmp_path, "cpu", 1, kinds) == 0
    assert short_run(kinds, cache=tmp_path) == 0
    printed = capsys.readouterr().out
    assert "prepared\n" in printed and "compared with what is kept" in printed

    # A bit of a kept result.
    kept = soak.Kept.read(tmp_path / soak.KEPT)
    (name, digest), *_ = kept.results.items()
    kept.results[name] = f"{int(digest[0], 16) ^ 1:x}{digest[1:]}"
    kept.write(tmp_path / soak.KEPT)
    assert short_run(kinds, cache=tmp_path) == 1
    assert "seed 0: other bits than those that were compared" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["sources", "JAX", "PyTorch", "settings", "card"])
def test_a_cache_of_another_state_is_refused(what, tmp_path, capsys):
    soak.Kept(soak.identity("cpu") | {what: "another"}, {}).write(tmp_path / soak.KEPT)
    assert short_run([KIND()], cache=tmp_path) == 1
    assert f"was prepared with other {what}: 'another'" in capsys.readouterr().out


def test_a_cache_that_was_not_prepared_is_refused(tmp_path, capsys):
    assert short_run([KIND()], cache=tmp_path) == 1
    assert f"{tmp_path} has no results" in capsys.readouterr().out


def test_faults_leave_no_prepared_cache(planted, tmp_path, capsys):
    assert soak.prepare(tmp_path, "cpu", 1, [KIND()]) == 0
    planted(lambda out: out + 1e-4)
    assert soak.prepare(tmp_path, "cpu", 1, [KIND()]) == 1
    assert "out: error" in capsys.readouterr().out
    assert not (tmp_path / soak.KEPT).exists()


def test_more_programs_through_jax_than_as_they_were_prepared(monkeypatch, tmp_path, capsys):
    assert soak.prepare(tmp_path, "cpu", 1, [KIND()]) == 0
    monkeypatch.setattr(soak, "closed_roads", lambda: soak.collections.Counter({"a reason": 1}))
    assert short_run([KIND()], cache=tmp_path) == 1
    assert "1 programs go through JAX, where 0 did" in capsys.readouterr().out


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_kind_is_in_one_share(count):
    kinds = soak.kinds("cuda")
    shares = [soak.share_of(kinds, number, count) for number in range(count)]
    assert sorted(str(kind) for share in shares for kind in share) == sorted(map(str, kinds))
    assert sum(any(kind.weight != 1 for kind in share) for share in shares) == 1


def test_the_modules_of_kernels_have_no_number(monkeypatch):
    from jax.experimental.mosaic.gpu import core

    def serialized(text, **options):
        return soak.ir.Module.parse(text)

    monkeypatch.setattr(core, "_run_serde_pass", serialized)
    text = 'module attributes {mosaic_gpu.dump_basename = "attention_%d"} {}'
    with soak.ir.Context():
        with soak.unnumbered_kernels():
            texts = {str(core._run_serde_pass(text % n, serialize=True)) for n in range(2)}
            assert len(texts) == 1 and "attention" not in texts.pop()
        assert core._run_serde_pass is serialized


def test_settings_of_the_cache_are_given_back(tmp_path):
    names = ["jax_compilation_cache_dir", *soak.CACHE_SETTINGS]
    before = [getattr(soak.jax.config, name) for name in names]
    with soak.cached_programs(tmp_path):
        found = [getattr(soak.jax.config, name) for name in names]
        assert found == [str(tmp_path / "programs"), *soak.CACHE_SETTINGS.values()]
    assert [getattr(soak.jax.config, name) for name in names] == before


# How a run ends


def test_a_limit_shortens_the_run(monkeypatch, capsys):
    monkeypatch.setattr(soak, "END_SECONDS", 1.0)
    monkeypatch.setattr(soak, "REPORT_SECONDS", 1.0)
    monkeypatch.setattr(soak.Soak, "warm", lambda *_: time.sleep(3))
    kinds = [KIND()]
    short_run(kinds)  # compiles
    start = time.monotonic()
    assert short_run(kinds, minutes=5.0, limit=8.0) == 0
    assert time.monotonic() - start < 20
    printed = capsys.readouterr().out
    assert printed.endswith("passed\n")
    # Compiling ahead of the calls takes from their time: 2 s are kept for the end, 3 s passed.
    assert int(re.search(r"leaves (\d+) s of calls in place of 300", printed)[1]) <= 3


def test_no_time_for_calls_is_a_fault(capsys):
    assert short_run([KIND()], limit=1.0) == 1
    assert "the limit left no time for calls" in capsys.readouterr().out


def test_a_thread_that_does_not_end_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(soak, "END_SECONDS", 0.5)
    released = threading.Event()
    monkeypatch.setattr(soak.Soak, "_one", lambda *_: released.wait())
    try:
        assert short_run([KIND()], minutes=0.1, limit=60.0) == 1
    finally:
        released.set()
    printed = capsys.readouterr().out
    assert "2 threads did not end within" in printed
    assert "CUT in part 2 by a thread that does not end" in printed


def test_a_run_that_is_cut_prints_what_it_found(monkeypatch, capsys):
    memory, seen = soak.memory, []

    def sampled(device):
        seen.append(device)
        if len(seen) == 4:  # part 2 runs
            os.kill(os.getpid(), signal.SIGTERM)
        return memory(device)

    monkeypatch.setattr(soak, "memory", sampled)
    before = signal.signal(signal.SIGTERM, soak._cut)
    try:
        assert short_run([KIND()], minutes=5.0) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    printed = capsys.readouterr().out
    assert "2 threads: host time of a call by kind" in printed and "passed" not in printed
    assert "CUT in part 2 by SIGTERM, after " in printed.splitlines()[-1]
