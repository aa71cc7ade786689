"""Suites: that all of them are whole, what they say of rows, sweeps, documents, and failures."""

import contextlib
import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from absl.testing import flagsaver

from benchmarks import __main__ as entry
from benchmarks import (
    ahead,
    byte_limit,
    cliff_rows,
    cliffs,
    document,
    exponents,
    findings,
    kept,
    noise,
    ours,
    peers,
    profiling,
    quoted,
    results,
    run,
    show,
    side_by_side,
    suites,
    summary,
    sweeps,
    tables,
    tiled,
    timing,
    variants,
)
from benchmarks.cases import HOST_PHASES, PHASES, Case
from benchmarks.results import Results, ResultsError, Row
from benchmarks.tables import Table
from tests.figures import FACTS, parsed_flags  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
CASE = Case("linear", B=1, H=2, T=64, D=16, dtype="float32")


def row_of(case, phase, contender, seconds, **more):
    work = case.traffic(phase), case.operations(phase)
    spread = summary.spread([seconds] * 3)
    found = Row(str(case), phase, contender, 1e-6, *work, seconds, [seconds], spread, **more)
    return dataclasses.replace(found, held=case.held(phase))


def every_suite():
    return (suites.SMOKE_SUITE, *suites.named("report"))


# What there is.


def test_bytes_of_inputs_and_outputs_by_hand():
    # q, k, v and out; with the backward dout and three gradients: 2 heads of 64 x 16 floats each.
    assert [CASE.held(phase) for phase in PHASES] == [4 * 8192, 8 * 8192]
    grouped = Case("softmax", B=1, H=4, G=2, T=8, S=32, D=16, dtype="bfloat16")
    assert grouped.held("forward") == 2 * (2 * 8 * 4 * 16 + 2 * 32 * 2 * 16)
    # Two heads of one sequence: 16 columns and a scale in float32; values in the keys; in all.
    eight = dataclasses.replace(grouped, T=1, cache="int8")
    assert eight.traffic("forward") == 2 * 2 * 4 * 16 + 2 * 32 * 2 * (16 + 4)
    latent = dataclasses.replace(grouped, T=1, V=12)
    assert latent.traffic("forward") == 2 * 4 * (16 + 12) + 2 * 32 * 2 * 16
    ragged = dataclasses.replace(grouped, B=3, T=1, ragged=True)
    assert ragged.pairs == ragged.lengths.sum() < 3 * 32
    assert ragged.traffic("forward") == 2 * (2 * 3 * 4 * 16 + 2 * ragged.lengths.sum() * 2 * 16)
    gated = dataclasses.replace(CASE, causal=True, decay="step")
    assert gated.held("forward + backward") == 8 * 8192 + 2 * 4 * 64 * 2


def test_every_suite_has_someone_for_every_case():
    names = [suite.name for suite in every_suite()]
    apart = [suite.name for suite in suites.APART]
    assert [*names, "report", *apart] == list(suites.NAMES) and len(set(names)) == 16
    # What a report may take on a card, with what it takes to begin.
    assert sum(suite.seconds for suite in suites.named("report")) < 540
    for suite in (*every_suite(), *suites.APART):
        for contest in suite.contests:
            for platform in results.PLATFORMS:
                assert contest.cases[platform], suite.name
                for case in contest.cases[platform]:
                    wanted = side_by_side.wanted(contest, case)
                    assert wanted and any(map(side_by_side.is_ours, wanted)), (suite.name, case)
    in_torch = {
        name for suite in every_suite() for contest in suite.contests for name in contest.in_torch
    }
    known = {name for names in peers.CONTENDERS.values() for name in names}
    assert in_torch <= known


def test_the_report_is_short_and_has_who_matters():
    """A part of each suite, all of it known to the whole one; in ten minutes on a card."""
    rows = []
    for brief in suites.named("report"):
        of_parts = []
        for suite in (brief, *suites.named(brief.name)):
            of_parts.append(
                {
                    (str(case), phase, name)
                    for contest in suite.contests
                    for case, phase in contest.groups("gpu")
                    for name in side_by_side.wanted(contest, case)
                }
            )
        assert of_parts[0] <= of_parts[1], brief.name
        rows += of_parts[0]
    assert len(set(rows)) < 640
    by_case = {}
    for case, _, name in rows:
        by_case.setdefault(case, set()).add(name)
    for size in ("B8 H8 T65536 D64", "B1 H32 T16384 D128"):
        causal = by_case[f"linear {size} bfloat16 causal"]
        assert {"SDPA cuDNN", "fla chunk, phi out"} <= causal
        assert "jax-linear-attention, phi out, not normalised" in causal
    assert "plain JAX, associative scan" in by_case["linear B8 H8 T65536 D64 bfloat16 causal"]
    order = [suite.name for suite in suites.named("report")]
    assert order[0] == "linear" and order[-3:] == ["decode", "wide", "attention"]
    full = by_case["linear B8 H8 T65536 D64 bfloat16"]
    assert {"plain JAX", "flash-bidirectional-linear-attention, phi out"} <= full
    assert {"PyTorch, compiled", "SDPA default"} & full == {"PyTorch, compiled"}
    for case, names in by_case.items():
        if case.startswith(("softmax B4 H32 T8192", "softmax B2 H8 T8192 D256")):
            assert {"SDPA cuDNN", "SDPA flash", "Tokamax Triton, 128x64", "ato_jax triton"} <= names
            assert {"JAX's Pallas kernel, 128x64", "FlashAttention-3 through JAX"} <= names
    cache = "softmax B16 H32 G8 T1 S65536 D128 bfloat16"
    for names in (by_case[cache], by_case[cache.replace("65536", "8192")]):
        assert {"SDPA cuDNN", "SDPA flash", "plain JAX", "JAX's Pallas decode kernel"} <= names
    forms = (", ragged", ", pages of 16", ", pages of 64", ", int8 cache")
    assert all("ato_jax" in by_case[f"{cache}{form}"] for form in forms)
    assert "FlexAttention" in by_case["softmax B2 H16 T16384 D128 bfloat16 causal, window 1024"]


def test_cases_of_two_ops_are_two_rows():
    assert str(CASE) != str(dataclasses.replace(CASE, op="softmax"))


def full_results(platform):
    """A row for everything that is asked for."""
    rows = [
        row_of(case, phase, name, 1e-7 * case.T * (1 + number), errors={"out": 1e-3}, scratch=9)
        for suite in every_suite()
        for contest in suite.contests
        for case in contest.cases[platform]
        for phase in contest.phases_of(case)
        for number, name in enumerate(side_by_side.wanted(contest, case))
    ]
    rows = list({row.key: row for row in rows}.values())
    return Results(**FACTS, platform=platform, matrix={"bfloat16": 8e14}, rows=rows)


def test_all_suites_say_something_of_no_row_and_of_every_row():
    for platform in results.PLATFORMS:
        empty, full = Results(**FACTS, platform=platform), full_results(platform)
        for suite in every_suite():
            for found in (empty, full):
                for table in suite.findings(found):
                    assert all(len(line) == len(table.head) for line in table.rows), suite.name
                    assert table.text().startswith(table.title)
                    assert table.markdown().count("\n|") >= len(table.rows)


@pytest.mark.parametrize("T", [16, 128])
def test_the_rungs_compute_attention(T):
    case = Case("softmax", B=2, H=2, T=T, D=16, dtype="float32")
    for name, rung in variants.LADDER.items():
        found = ours.finished(rung.compiled(case, "forward"))
        assert found.errors["out"] < 1e-5, name
    with pytest.raises(ValueError, match="powers of two up to 8192, got 24 and 24"):
        tiled.attention(*np.zeros((3, 1, 24, 1, 16), np.float32))


def test_variants_compute_what_the_library_does():
    loop = dataclasses.replace(CASE, causal=True)
    grouped = Case("softmax", B=2, H=4, G=2, T=1, S=64, D=16, dtype="float32")
    every = variants.IN_LINEAR | variants.IN_SOFTMAX
    for case, names in (
        (CASE, ("ato_jax, tiles of 32", variants.MAPS_APART)),
        (loop, (variants.LOOP,)),
        (grouped, (variants.REPEATED, variants.PAGED)),
    ):
        for name in names:
            one = every[name]
            assert one.takes(case)
            found = ours.finished(one.compiled(case, "forward"))
            assert found.errors["out"] < 1e-5, name
            assert isinstance(found.time(0.0), timing.Timing)


# What is said of rows.


def test_exponents_are_those_of_powers():
    assert exponents.exponent({T: 3e-7 * T**1.5 for T in (64, 256, 1024)}) == pytest.approx(1.5)
    members = [dataclasses.replace(CASE, T=T) for T in (64, 128, 256, 512)]
    contest = side_by_side.Contest({"cpu": tuple(members), "gpu": ()}, {}, {})
    rows = []
    for case in members:
        forward = 1e-5 * case.T if case.T > 64 else 2e-4
        for phase, seconds in zip(PHASES, (forward, forward + 1e-8 * case.T**2), strict=True):
            scratch = case.held(phase) if case.T > 64 else 1 << 20
            rows.append(row_of(case, phase, "one", seconds, scratch=scratch))
    (growth,) = exponents.growths(Results(**FACTS, rows=rows), [contest])
    # The first is its launches.
    assert (growth.first, growth.last) == (128, 512)
    assert growth.forward == pytest.approx(1) and growth.backward == pytest.approx(2)
    assert growth.memory == pytest.approx(1) and growth.family == "linear B1 H2 D16 float32"
    (table,) = exponents.complexity([contest])(Results(**FACTS, rows=rows))
    assert table.rows[0][2:] == ["128 to 512", "1.00", "2.00", "1.00"]


def test_the_librarys_exponents_are_one_where_they_were_measured():
    """In time and memory, forward and backward, of the kept figures of a GPU, as the table prints
    them, with two decimals."""
    for path in document.files():
        found = results.read(path)
        own = {
            one.family: one
            for one in exponents.growths(found, suites.LENGTHS)
            if one.contender == "ato_jax" and one.family.startswith("linear")
        }
        for causal in ("", " causal"):
            one = own[f"linear B8 H8 D64 bfloat16{causal}"]
            assert one.last >= 4 * one.first
            for value in (one.forward, one.backward, one.memory):
                assert 0.95 <= round(value, 2) <= 1.05, one


def test_the_fastest_peer_computes_all_of_the_problem():
    rows = [
        row_of(CASE, "forward", name, seconds)
        for name, seconds in (
            ("ato_jax", 1e-3),
            ("SDPA flash", 3e-3),
            ("PyTorch, compiled", 2e-3),
            ("fla chunk, phi out", 1e-4),
            ("ato_jax, tiles of 32", 1e-5),
        )
    ]
    assert findings.best(rows).contender == "PyTorch, compiled"
    contest = side_by_side.Contest({"cpu": (CASE,), "gpu": ()}, {}, {}, PHASES[:1])
    (table,) = findings.standing(contest, "All")(Results(**FACTS, rows=rows))
    assert table.rows[0][-3:] == ["PyTorch, compiled", "2.000", "2.0x"]
    contest = dataclasses.replace(contest, in_torch={"fla chunk, phi out": InJax(None)})
    (table,) = findings.standing(contest, "All")(Results(**FACTS, rows=rows))
    assert table.rows[0][-3:] == ["fla chunk, phi out", "0.1000", "0.1x"]


def test_a_wrong_row_has_its_reason_and_no_time():
    rows = [row_of(CASE, "forward", "one", 1e-3, picked="FLASH", scratch=5, host=2e-6)]
    rows.append(Row(*rows[0].key[:2], "two", 1.0, 1.0, 1.0, unavailable="out is wrong: 0.5"))
    text = tables.measured(rows).text()
    assert "one (FLASH)" in text and text.endswith("  two: out is wrong: 0.5")


def test_kernels_are_read_from_a_trace():
    def meta(kind, name, pid, tid=0):
        return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}

    events = [meta("process_name", "/device:GPU:0", 1), meta("process_name", "/host:CPU", 2)]
    events += [meta("thread_name", "Stream #1", 1, 7), meta("thread_name", "XLA Ops", 1, 8)]
    events += [
        {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": 0, "dur": duration}
        for name, pid, tid, duration in (
            ("states", 1, 7, 30),
            ("states", 1, 7, 10),
            ("output", 1, 7, 60),
            ("states", 1, 8, 99),
            ("launch", 2, 7, 99),
        )
    ]
    found = profiling.kernels({"traceEvents": events}, calls=2)
    assert [(one.name, one.calls) for one in found] == [("output", 0.5), ("states", 1.0)]
    assert [one.seconds for one in found] == pytest.approx([3e-5, 2e-5])
    short = profiling.short([(CASE, "forward", found)]).text()
    assert short.splitlines()[-1].split()[-4:] == ["output", "60%", "2", "50.0"]
    text = profiling.table(CASE, "forward", found, 8).text()
    assert "60.0%" in text and f"{CASE.traffic('forward') / 5e-5 / 1e9:.0f} GB/s" in text


# Sweeps.


def test_the_originals_sweep():
    linear, softmax = sweeps.contests(sweeps.FOLDER / "original.yaml")
    for contest, op in ((linear, "linear"), (softmax, "softmax")):
        of_op = contest.cases["gpu"]
        assert len(of_op) == 50 and {case.op for case in of_op} == {op}
        assert {case.B for case in of_op} == {1, 2, 4, 8, 16}
        assert {case.T for case in of_op} == {256, 512, 1024, 2048, 4096}
        assert {(case.H * case.D, case.H) for case in of_op} == {(768, 12), (1024, 16)}
        assert {*contest.in_jax, *contest.in_torch} >= {"ato_jax", "SDPA default"}


def test_the_sweep_of_heads():
    (contest,) = sweeps.contests(sweeps.FOLDER / "heads.yaml")
    of_sizes = {case.D: case.unit for case in contest.cases["gpu"]}
    assert [*of_sizes] == [64, 80, 96, 112, 128, 192, 256]
    assert max(of_sizes.values()) < 1.7 * min(of_sizes.values())
    assert {case.causal for case in contest.cases["gpu"]} == {False, True}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{op: linear, batch: 1, tokens: 8, models: [], head: 1}", "unknown key 'head'"),
        ("{op: linear, batchs: 1}", "unknown key 'batchs': did you mean batch?"),
        ("{op: linear, batch: 1, tokens: 8}", "lacks models: {width: W"),
        ("{op: cubic}", "op must be linear or softmax, got 'cubic'"),
        ("{op: [[linear]]}", r"op must be linear or softmax, got \['linear'\]"),
        ("{op: linear, batch: true}", "batch must be whole numbers above 0, got True"),
        (
            "{op: linear, batch: 1, tokens: 8, models: {width: 9, heads: 2}}",
            "models must be {width: W, heads: H}, W a multiple of H",
        ),
        ("[1]", "has no keys; known are op, batch"),
        ("{op: ", "is not YAML: "),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_sweep_that_is_not_one(text, said, tmp_path):
    path = tmp_path / "sweep.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ResultsError, match=f"sweep.yaml.*{said}"):
        sweeps.contests(path)


def test_unknown_suites_and_files_are_a_line_and_status_2(caplog, tmp_path):
    for arguments, said in (
        (["run", "sing"], "There is no suite 'sing': smoke, linear"),
        (["run"], "Name a suite, --suite=NAME, or a --config: smoke"),
        (["table"], "table takes one file of figures, FILE.json; got none"),
        (["plot", str(tmp_path / "no.json")], "no.json cannot be read"),
        (["tune", "sing"], "tune takes one of linear_attention, attention; got sing"),
        (["profile"], "profile needs a --case of these: linear B1"),
    ):
        caplog.clear()
        assert entry.main(["benchmarks", *arguments]) == 2
        assert said in caplog.text and len(caplog.records) == 1


# What fails.


class Peer:
    """Stands in for PyTorch's process."""

    def __init__(self, *_):
        self.left = False

    def prepare(self, name, case, phase):
        return {"errors": {"out": 1e-3}, "picked": "FLASH", "scratch": 3}

    def time(self, name, seconds):
        return timing.Timing([1e-3, 2e-3, 3e-3], 3, 1e-5)

    def forget(self):
        pass

    def __exit__(self, *_):
        self.left = True


class InJax:
    """A contender on JAX that does what it is told to."""

    searches = False

    def __init__(self, compile, launch=lambda _: None):
        self._compile, self._launch = compile, launch

    def takes(self, case):
        return True

    def compiled(self, case, phase):
        self._compile()
        return lambda: ours.Prepared(self._launch, 1, {"out": 1e-3}, 7)


def fails(*_):
    raise RuntimeError("of its own")


def measured(in_jax, **more):
    contest = side_by_side.Contest({}, in_jax, {"SDPA flash": InJax(None)})
    rows = side_by_side.measure(contest, Peer(), CASE, "forward", 1.0, lambda: 1.0, **more)
    return {row.contender: row for row in rows}


def test_what_fails_costs_its_own_row(monkeypatch):
    import threading

    monkeypatch.setattr(side_by_side, "LONGEST_COMPILE_SECONDS", 0.5)
    monkeypatch.setattr(ahead, "workers", lambda: 4)
    monkeypatch.setattr(side_by_side, "stuck", [])
    end = threading.Event()
    found = measured(
        {
            "good": InJax(lambda: None),
            "does not compile": InJax(fails),
            "does not run": InJax(lambda: None, fails),
            "compiles forever": InJax(end.wait),
        }
    )
    end.set()
    assert found["good"].seconds and found["good"].scratch == 7 and found["good"].host >= 0
    assert found["SDPA flash"].picked == "FLASH" and found["SDPA flash"].host == 1e-5
    reason = "RuntimeError: of its own"
    assert found["does not compile"].unavailable == found["does not run"].unavailable == reason
    assert found["compiles forever"].unavailable == "compiling took longer than 0.5 s"
    assert len(side_by_side.stuck) == 1


def test_a_device_that_is_lost_has_the_program_started_again(monkeypatch, tmp_path):
    path = tmp_path / "figures.json"
    contest = side_by_side.Contest(
        {"cpu": (CASE,), "gpu": ()}, {"breaks": InJax(fails), "good": InJax(lambda: None)}, {}
    )
    peer, started = Peer(), []
    monkeypatch.setattr(peers, "Peer", lambda _: contextlib.nullcontext(peer))
    monkeypatch.setattr(run, "introduced", lambda *_: FACTS)
    monkeypatch.setattr(side_by_side, "device_works", lambda: False)
    monkeypatch.setattr(os, "execv", lambda program, command: started.append(command))
    with flagsaver.flagsaver(json=str(path)):
        run.hold([suites.Suite("a suite", "of a test", 100, (contest,))])
    [command] = started
    assert command[-2] == "--resume" and command[-1].startswith("--within_s=") and peer.left
    rows = {row.contender: row.unavailable for row in results.read(path).rows}
    assert rows == {"breaks": "RuntimeError: of its own", "good": results.NO_TIME_LEFT}


def test_what_ended_the_program_is_left_out_when_it_is_resumed(monkeypatch, tmp_path):
    path = tmp_path / "figures.json"
    contest = side_by_side.Contest({"cpu": (CASE,), "gpu": ()}, {"one": InJax(lambda: None)}, {})
    results.write(path, results.json_text(Results(**FACTS)))
    # It ran when the last two runs died: the first time it is tried again.
    kept.doing(path).write_text(json.dumps([str(CASE), "forward", "one", 2]))
    monkeypatch.setattr(peers, "Peer", lambda _: contextlib.nullcontext(Peer()))
    monkeypatch.setattr(run, "introduced", lambda *_: FACTS)
    with flagsaver.flagsaver(json=str(path), resume=True):
        assert run.hold([suites.Suite("a suite", "of a test", 100, (contest,))]) == 0
    forward, both = results.read(path).rows
    assert forward.unavailable == "ended this program" and both.seconds
    assert list(tmp_path.iterdir()) == [path]


def test_a_peer_that_does_not_answer_is_ended(monkeypatch):
    silent = "import sys, time\nfor line in sys.stdin: time.sleep(60)"
    monkeypatch.setattr(peers.Peer, "COMMAND", (sys.executable, "-c", silent))
    monkeypatch.setattr(peers, "LONGEST_SECONDS", 0.3)
    with peers.Peer("cpu") as peer:
        told = peer.prepare("SDPA flash", CASE, "forward")
        peer._process.kill()
    assert told == "ended PyTorch's process: no answer in 0.3 s"


# Documents.


def test_documents_are_made_of_the_files_of_figures():
    if not document.files():
        pytest.skip("there are no figures yet")
    assert document.differing() == []


def test_rows_that_were_not_reached_are_counted():
    """Those that the file has as such, and those that it has not."""
    found = full_results("gpu")
    wanted, waiting = document.asked_for(found)
    smoke = {str(case) for contest in suites.SMOKE_SUITE.contests for case in contest.cases["gpu"]}
    assert wanted == sum(row.case not in smoke for row in found.rows) and waiting == 0
    found.rows[-2].unavailable = results.NO_TIME_LEFT
    del found.rows[-1]
    assert document.asked_for(found) == (wanted, 2)


MARKS = "<!-- {0} -->\n<!-- /{0} -->"


def test_what_is_between_the_marks_is_replaced(tmp_path):
    text = "before <!-- results -->\nold\n<!-- /results --> after"
    made = document.between(text, "new", tmp_path)
    assert made == "before <!-- results -->\n\nnew\n\n<!-- /results --> after"
    assert document.between(made, "new", tmp_path) == made
    with pytest.raises(ResultsError, match="once each"):
        document.between("none", "new", tmp_path)


def test_the_report_writes_what_it_compares(tmp_path, monkeypatch):
    readme, told = tmp_path / "README.md", tmp_path / "docs" / "results.md"
    for page, names in quoted.PAGES.items():
        blank = "\n".join(MARKS.format(name) for name in names)
        results.write(tmp_path / page, blank)
    blocks = "\n".join(MARKS.format(name) for name in document.IN_README)
    readme.write_text(f"{blocks}\n{readme.read_text()}")
    for module, name, value in (
        (document, "ROOT", tmp_path),
        (document, "README", readme),
        (document, "RESULTS", told),
        (run, "FOLDER", tmp_path / "figures"),
        (show, "plot", lambda names: None),
    ):
        monkeypatch.setattr(module, name, value)
    assert entry.main(["benchmarks", "report"]) == 2
    results.write(run.FOLDER / "a_card.json", results.json_text(full_results("gpu")))
    with flagsaver.flagsaver(check=True):
        assert entry.main(["benchmarks", "report"]) == 1
    assert entry.main(["benchmarks", "report"]) == 0
    assert document.differing() == []
    text = told.read_text()
    assert "### The ladder" in text and "50x" in text and "#### Encoders" in text
    assert readme.read_text().count("\n| linear B8 H8 T65536") == document.README_ROWS // 2
    assert "`[1, 4, 128, 64]` takes" in readme.read_text()
    guide = tmp_path / "docs" / "guides" / "pytorch.md"
    assert "<!-- softmax -->No card has steady times" in guide.read_text()
    for path, old, new in ((told, "50x", "51x"), (guide, "No card", "A card")):
        text = path.read_text()
        path.write_text(text.replace(old, new))
        assert document.differing() == [path]
        path.write_text(text)


# What says how fast or how large something was found to be.
MEASURED = re.compile(
    r"\d[\d.,]* ?(µs|us|ms|milliseconds|TB/s|GB/s|TFLOP/s|tokens/s|%|x\b|times (as|faster|slower))"
)


def test_all_results_in_the_readme_are_made_of_files():
    """No figure with a unit of a result stands outside of the marks."""
    text = document.README.read_text()
    for name in (*document.IN_README, *quoted.PAGES["README.md"]):
        before, rest = text.split(f"<!-- {name} -->")
        text = before + rest.split(f"<!-- /{name} -->")[1]
    assert [found[0] for found in MEASURED.finditer(text)] == []
    sentences = "takes 15.0 us, 249 µs; 2.2 times as fast; 94% of 4.2 TB/s, in 0.2 to 0.3 ms, 3.4x"
    assert len(MEASURED.findall(sentences)) == 7


def test_what_was_not_measured_is_said_in_words(tmp_path, monkeypatch):
    full = full_results("gpu")
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    path = tmp_path / "a_card.json"
    results.write(path, results.json_text(full))
    times = document.host_text()
    assert times.startswith("On one a card with JAX 2, causal `attention` of bfloat16")
    # Of the stand-in's rows each is twice as long as the one before it.
    assert "takes 12.8 µs, 12.8 with a gradient recorded and 12.8 with its backward" in times
    assert "takes 25.6 µs, 25.6 with" in times
    full.rows = [row for row in full.rows if "on the host, recorded" not in row.phase]
    results.write(path, results.json_text(full))
    said = document.host_text()
    assert said.startswith("What a call takes the host is not measured on the a card yet")
    # Cards without a sentence of their own share one.
    for name in ("b card", "c card"):
        other = dataclasses.replace(full_results("gpu"), device=name)
        case = str(suites.HOST_CASES[-1])
        [host] = [row for row in other.rows if row.key == (case, HOST_PHASES[0], "ato_torch")]
        host.load = "another program"
        results.write(tmp_path / f"{name}.json", results.json_text(other))
    noisy, missing = document.host_text().split("\n\n")
    assert noisy.startswith("What a call takes the host was measured on the b card and the c card,")
    assert "µs" not in noisy and missing == said


def test_the_newest_figures_of_kernels_that_are_known_come_first(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    assert document.picture_text() == ""
    for name, date, commit in (
        ("a", "2026-11-01", "abc"),
        ("b", "2026-11-28", ""),
        ("c", "2026-11-27", "abc"),
        ("d", "2026-11-27", "abc"),
    ):
        found = dataclasses.replace(
            full_results("gpu"), device=f"card {name}", commit=commit, about={"date": date}
        )
        results.write(tmp_path / f"{name}.json", results.json_text(found))
    assert "".join(path.stem for path in document.files()) == "cdab"
    assert re.findall(r"### In short, on one card (.)\n", document.headline_text()) == [*"cda"]
    # The picture is that of the first card that has one.
    for name in ("b", "a"):
        results.write(tmp_path / name / "bidirectional.png", "")
    made = document.picture_text()
    assert "(benchmarks/results/a/bidirectional.png)" in made and "measured on one card a." in made


def test_a_table_says_what_its_marks_mean():
    table = Table("title", ["", "ms"], [["a", "1.0"]], ["a note"])
    assert document.marked(table) == table
    table.rows.append(["b", f"{noise.MARK}2.0"])
    assert list(document.marked(table).notes) == ["a note", noise.LEGEND]


def test_the_headline_is_of_figures_that_name_their_commit(tmp_path, monkeypatch):
    full = full_results("gpu")
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    path = tmp_path / "a_card.json"
    results.write(path, results.json_text(full))
    assert document.headline_text() == ""
    full.commit = "abc"
    results.write(path, results.json_text(full))
    text = document.headline_text()
    assert text.startswith("### In short, on one a card")
    for peer in ("SDPA", "FlashAttention-3 through JAX"):
        assert f"| {peer}" in text
    lines = [line for line in text.splitlines() if line.startswith("| ") and "B" in line]
    assert [line.split(" | ")[0] for line in lines] == [
        f"| {case} bfloat16{more}"
        for case, more, count in (
            ("linear B8 H8 T65536 D64", "", 2),
            ("linear B8 H8 T16384 D64", " causal", 2),
            ("softmax B2 H16 T16384 D128", " causal", 4),
        )
        for _ in range(count)
    ]
    # The option that is furthest below its target, beside its base case.
    steps = [step for step in cliff_rows.STEPS["gpu"] if step.target][:2]
    for step, seconds in zip(steps, (1.0, 9.0), strict=True):
        for name, of in ((cliffs.OURS, seconds), (cliffs.BASE, 0.5)):
            row = cliffs.blank(step.row, "forward", full, name, step.base)
            spread = summary.spread([of] * 3)
            full.rows.append(dataclasses.replace(row, seconds=of, turns=[of], spread=spread))
    last = document.headline_of(full)[-1]
    assert last[0] == f"the worst option: {steps[1].name}, {steps[1].size}"
    assert last[2:-1] == ["9000", "ato_jax, its base case", "500.0"] and last[-1] == "0.1x"


def test_what_is_quoted_is_there():
    assert document.speed_text().endswith(
        "as fast with linear attention as with softmax at 8,192 tokens, 5.4 times at 32,768 tokens."
    )
    assert len(document.quoted_techniques().rows) == len(document.QUOTED)
    assert len(document.quoted_quality()) == len(document.QUALITY)


# The whole command.


def test_smoke_runs(tmp_path, capsys, monkeypatch):
    """Measured, written, shown and drawn; in a process of its own: `test_demo_runs`."""
    pytest.importorskip("torch")
    monkeypatch.setattr(byte_limit, "CPU_COPY_BYTES", 1 << 22)
    monkeypatch.setattr(byte_limit, "CPU_MATRIX", 128)
    monkeypatch.setattr(side_by_side, "TURN_SECONDS", 0.0)
    path, table = tmp_path / "smoke.json", tmp_path / "smoke.csv"
    files = (f"--json={path}", f"--csv={table}")
    with flagsaver.flagsaver():
        rest = entry.parsed(["benchmarks", "run", "--suite=smoke", *files, "--forward_only"])
        assert entry.main(rest) == 0
    printed = capsys.readouterr().out
    assert "No GPU here" in printed and "SDPA default (" in printed
    found = results.read(path)
    assert found.platform == "cpu" and found.matrix["float32"] > 0 and found.suites["smoke"] > 0
    assert len(found.rows) == 8 and all(row.seconds for row in found.rows), found.rows
    assert len(table.read_text().splitlines()) == 9
    text = show.text(found, ["smoke", "linear"])
    assert all(row.contender in text for row in found.rows)
    from benchmarks import plots

    # The suites that the pictures are of were not run: every picture is left out.
    assert plots.draw(found, tmp_path / "pictures") == []
    assert f"\n{path}\n{table}\n" in printed


def test_pictures_are_drawn_of_every_row(tmp_path):
    from benchmarks import plots

    found = full_results("gpu")
    drawn = plots.draw(found, tmp_path / "pictures")
    assert [one.stem for one in drawn] == list(plots.PICTURES)
    assert all(one.read_bytes().startswith(b"\x89PNG") for one in drawn)


def test_pictures_mark_what_is_not_steady():
    """An open marker over a line's point, and a cell without a ratio."""
    from benchmarks import plots

    def labels(figure):
        return [text.get_text() for text in figure.legends[0].get_texts()]

    def cells(figure):
        return [text.get_text() for text in figure.axes[0].texts]

    def points(found):
        return sum(len(one.get_offsets()) for one in plots.roofline(found).axes[0].collections)

    found = full_results("gpu")
    steady = plots.PICTURES["bidirectional"](found)
    assert plots.OPEN_LABEL not in labels(steady)
    assert noise.NOISY not in cells(plots.crossover(found))
    every = points(found)
    # No backend that was asked for by name is among them.
    kept_rows = [
        row
        for contest, _ in plots._contests().values()
        for case in findings.cases_of(found, contest)
        for row in findings.Found(found).of(case, "forward")
        if row.contender == "ato_jax" or not side_by_side.is_ours(row.contender)
    ]
    assert every == len(kept_rows)
    for case in (suites.BIDIRECTIONAL.cases["gpu"][0], suites.CROSSOVER.cases["gpu"][0]):
        for row in found.rows:
            if row.key == (str(case), "forward", "ato_jax"):
                row.load = "another program"
    figure = plots.PICTURES["bidirectional"](found)
    assert labels(figure) == [*labels(steady), plots.OPEN_LABEL]
    [opened] = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"]
    assert list(opened.get_xdata()) == [suites.BIDIRECTIONAL.cases["gpu"][0].T]
    assert cells(plots.crossover(found)).count(noise.NOISY) == 1
    first = suites.BIDIRECTIONAL.cases["gpu"][0]
    assert first in findings.cases_of(found, plots.linear.CONTEST)
    assert points(found) == every - 1
    footer = plots.accuracy(found).texts[-1]
    assert plots.OPEN_LABEL not in footer.get_text()
    first = findings.cases_of(found, plots.linear.CONTEST)[0]
    found.rows = [
        dataclasses.replace(row, load="a load" if row.case == str(first) else row.load)
        for row in found.rows
    ]
    assert plots.OPEN_LABEL in plots.accuracy(found).texts[-1].get_text()


def test_a_document_leaves_out_what_was_not_measured() -> None:
    head = ["T", "phase", "ato_jax, ms", "the original", "peer / ours"]
    rows = [["8", "forward", "-", "2x", "-"], ["16", "forward", "0.5", "2x", ""]]
    (found,) = document.measured(Table("title", head, rows, texts=2))
    assert found.rows == rows[1:]
    assert document.measured(Table("title", head, rows[:1], texts=2)) == []
