"""What the benchmarks compile in other processes: the same programs, and no row is lost by it."""

import dataclasses
import importlib.util
import os
import sys
import time

import jax
import numpy as np
import pytest

from benchmarks import ahead, linear_torch, ours, peers, side_by_side, suites
from benchmarks.results import Results
from tests.figures import FACTS, parsed_flags  # noqa: F401
from tests.test_benchmark_suites import InJax, Peer, fails, row_of

SMOKE = suites.SMOKE_SUITE
LINEAR = SMOKE.contests[0].cases["cpu"][0]


@pytest.fixture(scope="module")
def one_worker():
    with ahead.Ahead("cpu", ["", "smoke"], 1) as helpers:
        yield helpers


def test_another_processs_program_is_loaded_compared_and_timed(one_worker):
    job = (0, LINEAR, "forward + backward", "ato_jax")
    (told,) = one_worker.programs([job])
    found = ours.unpacked(told)
    here = SMOKE.contests[0].in_jax["ato_jax"].compiled(*job[1:3])
    key = jax.random.key(1)
    inputs = here.inputs.draw(key)
    jax.tree.map(np.testing.assert_array_equal, found.inputs.draw(key), inputs)
    jax.tree.map(np.testing.assert_array_equal, found.program([inputs]), here.program([inputs]))
    prepared = found()
    assert prepared.errors == here().errors and prepared.errors.keys() == {"out", "dq", "dk", "dv"}
    assert prepared.scratch == here.scratch and prepared.time(0.01).seconds > 0


# Stand in for a process that compiles and one of PyTorch's, and start in a moment. The first ends
# at a contest that there is not, as its model does.
COMPILES = """
import json, pickle, sys
for line in sys.stdin:
    sys.stdout.buffer.write(pickle.dumps(["compiled"][json.loads(line)["contest"]]))
    sys.stdout.flush()
"""
FILLS = """
import sys
for line in sys.stdin:
    print("{}", flush=True)
"""


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(peers.Peer, "COMMAND", (sys.executable, "-c", FILLS))
    with ahead.Ahead("cpu", ["", "smoke"], 1) as helpers:
        monkeypatch.setattr(helpers._workers[0], "_command", (sys.executable, "-c", COMPILES))
        yield helpers


def test_a_job_that_ends_its_worker_costs_no_other(stand_in):
    """There is no such contest: an error ends the worker, and the next job has a new one."""
    good = (0, LINEAR, "forward", "ato_jax")
    told = stand_in.programs([(7, LINEAR, "forward", "ato_jax"), good])
    assert told == [None, "compiled"]


def test_a_worker_that_takes_too_long_is_ended(stand_in, monkeypatch):
    monkeypatch.setattr(ahead, "LONGEST_SECONDS", 0)
    told = stand_in.programs([(0, LINEAR, "forward", "ato_jax")])
    assert told == ["compiling took longer than 0 s"]
    assert stand_in._workers[0]._process is None


SLOW = """
import pickle, sys, time
for number, line in enumerate(sys.stdin):
    time.sleep(60 * number)
    sys.stdout.buffer.write(pickle.dumps("compiled"))
    sys.stdout.flush()
"""
SILENT = "import sys, time\nfor line in sys.stdin: time.sleep(60)"


def test_what_takes_longer_than_its_time_is_left_out(stand_in, monkeypatch, capsys):
    """Of processes that compile and of those that fill caches; none of them is started again."""
    monkeypatch.setattr(stand_in._workers[0], "_command", (sys.executable, "-c", SLOW))
    monkeypatch.setattr(peers.Peer, "COMMAND", (sys.executable, "-c", SILENT))
    start = time.monotonic()
    with stand_in as helpers:
        job = (0, LINEAR, "forward", "ato_jax")
        warm = [[(LINEAR, "forward", "PyTorch")]]
        assert helpers.programs([job, job, job], warm, 3.0) == ["compiled", None, None]
        (warmer,) = helpers._warmers
    assert time.monotonic() - start < 20
    said = capsys.readouterr().out
    assert "without 1 of 1" in said and "without 2 of 3" in said
    time.sleep(0.5)
    assert warmer._process.poll() is not None and helpers._workers[0]._process is None


def test_nothing_runs_on_when_something_is_timed(stand_in):
    """Neither a process that compiled nor one that filled caches, nor what they started."""
    with stand_in as helpers:
        plain = (LINEAR, "forward", "PyTorch")
        job = (0, LINEAR, "forward", "ato_jax")
        assert helpers.programs([job], [[plain]]) == ["compiled"]
        every = [*helpers._workers, *helpers._warmers]
        groups = [one._process.pid for one in every]
        assert len(groups) == 2 and all(os.getpgid(group) == group for group in groups)
    for group in groups:
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)


class Helpers:
    """Answers as it is told to, and remembers what it was asked."""

    def __init__(self, answers):
        self._answers, self.asked, self.warmed = answers, [], []

    def programs(self, jobs, in_torch, seconds=None):
        self.asked.append([(number, str(case), phase, name) for number, case, phase, name in jobs])
        self.warmed.append([[(str(case), name) for case, _, name in one] for one in in_torch])
        return [self._answers[name] for *_, name in jobs]


def test_what_comes_of_other_processes_and_what_does_not(monkeypatch):
    """All groups of both contests are asked for once; what does not come, or does not run here, is
    compiled here.
    """
    here = []
    names = ("comes", "does not load", "is lost", "has no memory there", "is refused", "searches")
    in_jax = {name: InJax(lambda name=name: here.append(name)) for name in names}
    in_jax["searches"].searches = True
    shares = linear_torch.Contender(lambda case: True, None, shares=linear_torch.by_size)
    in_torch = {
        "SDPA flash": dataclasses.replace(shares, shares=None),
        "fla": shares,
        "compiled": dataclasses.replace(shares, shares=linear_torch.by_case),
    }
    cases = {"cpu": (LINEAR, dataclasses.replace(LINEAR, T=32)), "gpu": ()}
    contests = [side_by_side.Contest(cases, in_jax, in_torch, ("forward",)) for _ in range(2)]
    another = {"cpu": (LINEAR, dataclasses.replace(LINEAR, T=16)), "gpu": ()}
    contests[1] = dataclasses.replace(contests[1], cases=another, in_jax={"comes": in_jax["comes"]})
    told = ({}, {"wrong": 1}, None, "out of memory", "cannot")
    helpers = Helpers(dict(zip(names[:-1], told, strict=True)))
    good = ours.Prepared(lambda _: None, 1, {"out": 1e-4})
    monkeypatch.setattr(ours, "unpacked", lambda told: fails() if told else lambda: good)
    # What is known is not compiled again.
    found = Results(**FACTS, rows=[row_of(cases["cpu"][1], "forward", "comes", 1.0)])
    plan = side_by_side.Plan()
    plan.compile_ahead(contests, found, helpers)
    for contest in contests:
        meeting = side_by_side.Meeting(contest, Peer(), found, time.monotonic() + 60, plan)
        for group in meeting.groups():
            meeting.measure(*group)
    both = [str(case) for case in cases["cpu"]]
    asked = [(0, case, "forward", name) for case in both for name in names[:-1]]
    asked.remove((0, both[1], "forward", "comes"))
    asked.append((1, str(another["cpu"][1]), "forward", "comes"))
    assert helpers.asked == [asked]
    # What shares is in one list, in the order in which it is timed.
    every = [*both, str(another["cpu"][1])]
    alone = [[(case, "compiled")] for case in every]
    assert sorted(helpers.warmed[0]) == sorted([[(case, "fla") for case in every], *alone])
    assert sorted(here) == sorted(2 * [*names[1:4], "searches"])
    rows = {(row.case, row.contender): row for row in found.rows}
    assert len(rows) == len(found.rows) == 2 * 9 + 4
    assert rows[both[0], "comes"].errors == {"out": 1e-4}
    for case in both:
        assert all(rows[case, name].errors == {"out": 1e-3} for name in names[1:4])
        assert rows[case, "is refused"].unavailable == "cannot"
        assert all(rows[case, name].seconds for name in (*names[:4], "searches"))


def test_caches_are_filled_by_contenders_that_run(one_worker):
    """One that is not installed says so once it is made; what it says costs nothing else."""
    pytest.importorskip("torch")
    plain = (LINEAR, "forward + backward", "PyTorch")
    assert one_worker.programs([], [[plain]]) == []
    (peer,) = one_worker._warmers
    facts = {"case": dataclasses.asdict(LINEAR), "phase": "forward"}
    assert peer.ask("warm", contender="PyTorch", **facts) == {}
    if importlib.util.find_spec("fla") is None:
        refused = {"unavailable": "fla is not installed"}
        assert peer.ask("warm", contender="fla chunk, phi out", **facts) == refused


def test_a_search_that_fills_caches_times_nothing(monkeypatch):
    """Nor is anything kept of it, in Triton's caches or in Inductor's."""
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    config = pytest.importorskip("torch._inductor.config")
    tuner = autotuner.Autotuner
    monkeypatch.setattr(tuner, "do_bench", vars(tuner)["do_bench"])
    # Not by monkeypatch: what it restores, PyTorch takes to be deleted.
    with config.patch(autotune_local_cache=True, autotune_remote_cache=True):
        linear_torch.search_nothing()
        assert not config.autotune_local_cache and not config.autotune_remote_cache
    launched = []
    told = object.__new__(tuner).do_bench(lambda: launched.append(1), quantiles=(0.5, 0.2, 0.8))
    assert told == [1.0, 1.0, 1.0] and launched == [1]
    # These would be kept otherwise: what is compiled is found all the same, by the same key.
    kept = config._cache_config_ignore_prefix
    assert {"autotune_local_cache", "autotune_remote_cache"} <= set(kept)
    assert ahead.WARMING == {"FLA_CACHE_RESULTS": "0"}
