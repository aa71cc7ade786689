"""Runs suites: each puts the library beside its peers in some cases, all into one file of figures.

A row that another suite has measured is not measured again. The suites are run one after the other,
the most wanted first, until the time is up: what there was none for is at the end, and `--resume`
goes on with that.
"""

from __future__ import annotations

import collections
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags, logging

import ato_jax
from ato_jax import tuning
from benchmarks import (
    ahead,
    byte_limit,
    choices,
    cliffs,
    demo,
    devices,
    kept,
    machine,
    noise,
    ours,
    peers,
    progress,
    results,
    side_by_side,
    spending,
    store,
    suites,
    training,
)
from benchmarks.ahead import Ahead
from benchmarks.results import Results, ResultsError
from benchmarks.side_by_side import DeviceLostError, Meeting, Plan
from benchmarks.suites import Suite

# The files of figures that are kept, one for each device.
FOLDER = machine.ROOT / "benchmarks" / "results"

# Flags of some suites.
ONLY = {
    "part": (choices.NAME, cliffs.NAME),
    "rows": (cliffs.NAME,),
    "devices": (devices.NAME,),
}
# The most of --within_s in which programs are compiled before any is timed.
COMPILING = 0.55
# Contenders that a suite's last line names.
MOST_TOLD = 12

FLAGS = flags.FLAGS
flags.DEFINE_list("suite", [], "run: names of suites, or `report` for all of the report's")
flags.DEFINE_string("config", "", "run: a .yaml that describes a sweep")


def introduced(peer: peers.Peer, platform: str) -> dict[str, Any] | None:
    """Prints what this runs on, and gives it: the device, the versions, a copy's bandwidth.

    None, and an error logged, where PyTorch is missing.
    """
    about = peer.ask("about")
    if "unavailable" in about:
        logging.error("%s: pip install '.[torch]'", about["unavailable"])
        return None
    if platform == "gpu":
        device, bandwidth = about["device"], peer.ask("copy", seconds=0.5)["bandwidth"]
        matrix = peer.ask("matrix", seconds=0.2)
    else:
        device, bandwidth = demo.processor(), byte_limit.cpu_bandwidth()
        matrix = {"float32": byte_limit.cpu_matrix_rate()}
    facts = {
        "device": device,
        "machine": machine.identity(),
        "commit": machine.commit(),
        "ato_jax": ato_jax.__version__,
        "jax": jax.__version__,
        "torch": about["version"],
        "bandwidth": bandwidth,
        "platform": platform,
        "matrix": matrix,
        "about": machine.about() | ({"CUDA": about["cuda"]} if about["cuda"] else {}),
    }
    rates = ", ".join(f"{dtype} {rate / 1e12:.3g}" for dtype, rate in matrix.items())
    print(
        f"{device}; JAX {jax.__version__}, PyTorch {about['version']}; "
        f"a copy moves {bandwidth / 1e12:.3f} TB/s, a large product runs at {rates} TFLOP/s",
        flush=True,
    )
    if platform == "cpu":
        print("No GPU here: small sizes, by XLA; kernels are interpreted", flush=True)
    return facts


def helping(platform: str) -> int:
    """Processes that compile ahead: a CPU's cores are few, and its programs small."""
    return ahead.workers() if platform == "gpu" else 0


def hold(wanted: Sequence[Suite], names: Sequence[str] = ()) -> int:
    """Runs the suites, those of these names and of the config; prints what they find; the exit
    status.
    """
    start = time.monotonic()
    spending.spent.clear()
    platform = ours.platform()
    if platform not in results.PLATFORMS:
        logging.error("The benchmarks run on a CPU or an NVIDIA GPU, JAX computes on %s", platform)
        return 1
    contests = suites.contests(wanted)
    if reason := side_by_side.unknown(contests):
        raise ResultsError(reason)
    earlier = kept.earlier()
    # Tokamax warns of each call for which it has no tuned config.
    logging.set_verbosity(logging.ERROR)
    with peers.Peer(platform) as peer:
        facts = introduced(peer, platform)
        if facts is None:
            return 1
        found = kept.begun(facts, earlier)
        plan = Plan()
        if kept_programs := store.given():
            plan.take(contests, found, kept_programs)
        elif count := helping(platform):
            with Ahead(platform, [FLAGS.config, *names], count) as helpers:
                limit = COMPILING * FLAGS.within_s if FLAGS.within_s else None
                plan.compile_ahead(contests, found, helpers, limit)
            print(f"compiling ahead took {time.monotonic() - start:.0f} s", flush=True)
        spending.add(found.spent, spending.START, spending.of_kinds(time.monotonic() - start))
        all_of_them = sum(suite.seconds for suite in wanted)
        end = start + FLAGS.within_s if FLAGS.within_s else time.monotonic() + all_of_them
        progress.start(len(unmeasured(contests, found)), end)
        try:
            for suite in wanted:
                run_suite(suite, peer, found, end, plan)
        except DeviceLostError:
            kept.write(found)
            return again(end - time.monotonic(), peer)
    print("\n" + spending.table(found.spent).text(), flush=True)
    if told := doubtful(found.rows):
        print(f"\n{told}", flush=True)
    kept.say()
    return 0


def unmeasured(contests: Sequence[side_by_side.Contest], found: Results) -> set[tuple[str, str]]:
    """The cases and phases of which a row lacks."""
    known = {row.key for row in found.rows}
    return {
        (str(case), phase)
        for contest in contests
        for case, phase in contest.groups(found.platform)
        if any((str(case), phase, name) not in known for name in side_by_side.wanted(contest, case))
    }


def doubtful(rows: Sequence[results.Row]) -> str:
    """What is said of times that are not steady; "" of none."""
    doubts = [row.doubt for row in rows if row.doubt]
    if not doubts:
        return ""
    loads = [row.load for row in rows if row.load]
    said = f"{len(doubts)} of {sum(row.seconds is not None for row in rows)} times are not steady"
    return f"{noise.LEGEND}\n{noise.busy(loads[0]) if loads else f'{said}. {noise.ADVICE}.'}"


def run_suite(suite: Suite, peer: peers.Peer, found: Results, end: float, plan: Plan) -> None:
    start = time.monotonic()
    spending.spent.clear()
    print(f"\n# {suite.name}: {suite.title}", flush=True)
    for contest in suite.contests:
        suite.tell(Meeting(contest, peer, found, end, plan))
    for table in suite.findings(found):
        print("\n" + table.text(), flush=True)
    spent = time.monotonic() - start
    found.suites[suite.name] = found.suites.get(suite.name, 0.0) + spent
    spending.add(found.spent, suite.name, spending.of_kinds(spent))
    if told := machine.clocks():
        found.about[f"clocks after {suite.name}"] = told
    kept.write(found)
    print(f"\n{suite.name} took {spent:.0f} s{went_to()}", flush=True)


def went_to() -> str:
    """What the seconds of a suite went to, and the contenders that took most of them."""
    of_what: collections.Counter[str] = collections.Counter()
    of_whom: collections.Counter[str] = collections.Counter()
    for (what, whom), seconds in spending.spent.items():
        of_what[what] += seconds
        of_whom[whom] += seconds if whom else 0
    told = [f"{what} {seconds:.0f}" for what, seconds in of_what.most_common()]
    most = [f"{whom} {seconds:.1f}" for whom, seconds in of_whom.most_common(MOST_TOLD) if seconds]
    return "".join([f": {', '.join(told)}" * bool(told), f"; {', '.join(most)}" * bool(most)])


def again(left: float, peer: peers.Peer) -> int:
    """Starts this program once more, to go on: a device that is lost is lost to this process."""
    if not FLAGS.json:
        logging.error("The device fails for good; with --json a run goes on from there")
        return 1
    logging.error("The device fails for good in this process: starting again")
    peer.__exit__()
    sys.stdout.flush()

    more = ["--resume", f"--within_s={max(1.0, left)}"]
    command = [sys.executable, "-m", "benchmarks", *sys.argv[1:], *more]
    os.execv(sys.executable, command)


def main(names: Sequence[str]) -> int:
    names = [*FLAGS.suite, *names]
    for name in suites.ALONE:
        if name in names and (names != [name] or FLAGS.config):
            raise ResultsError(f"{name} is run alone: it has no peers")
    for flag, of_flag in ONLY.items():
        if FLAGS[flag].value and names not in [[name] for name in of_flag]:
            raise ResultsError(f"--{flag} is of --suite={' or '.join(of_flag)} alone")
    if FLAGS.compiled and names in ([devices.NAME], [training.NAME]):
        raise ResultsError(f"{names[0]} compiles for itself: no --compiled")
    by_itself = ([choices.NAME], [devices.NAME], [training.NAME])
    if names in by_itself and (FLAGS.csv or FLAGS.keep):
        raise ResultsError(f"{names[0]} writes --json alone: no --csv, no --keep")
    if names == [choices.NAME]:
        return choices.main()
    if names == [devices.NAME]:
        return devices.main()
    if names == [training.NAME]:
        return training.main()
    alone = names == [cliffs.NAME]
    wanted = [] if alone else suites.chosen(names, FLAGS.config)
    if FLAGS.keep:
        FLAGS.json = str(FOLDER / f"{tuning.table_name(ours.device_name())}.json")
    return cliffs.main(introduced) if alone else hold(wanted, names)
