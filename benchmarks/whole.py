"""The whole report of this card, in as many parts as it takes: the same command is run again until
it says that nothing is lacking.

    python -m benchmarks whole --folder=DIR --within_s=540 [--another_machine]

First a part compiles, on all cores and for all cards, what the rows still to be measured run; then
it times rows, and nothing compiles beside them. The next part on this machine finds the programs in
--compiled, a folder of this user's cache unless it is given, and compiles the rest. The folder's
programs are removed when nothing is lacking. A CPU compiles nothing ahead.

The stages, each a command of its own that goes on with what its file lacks:

    report     every suite of the report           DIR/CARD.json
    cliffs     options beside their base cases     DIR/cliffs/CARD.json
    choices    the backends by name, every second  DIR/choices/CARD.json
               row
    sdpa       ato_torch beside SDPA's default     DIR/sdpa/CARD.json
    training   a model's step beside PyTorch's     DIR/training/CARD.json
    latency    a decode loop by percentiles        DIR/latency/CARD.json
    memory     a training step's memory            DIR/memory/CARD.json

`run --suite=choices` measures every row of the last one.

The longest come first. On a machine with several GPUs each of them takes the next stage, or goes on
with one that it began, with its share of the cores, and what a stage prints is in DIR/STAGE.log.
CUDA_VISIBLE_DEVICES=0 in front keeps to one.

A stage whose file has every row is left out. A stage that dies is started again, a few times at
most. SIGTERM ends all of it and loses nothing that was measured.

`python -m benchmarks report --new=DIR` then puts the rows of `cliffs` and `sdpa` to those of the
report, keeps the files in benchmarks/results and makes the documents and the pictures of them.
Where the command ran in a copy without its history, this also finds the commit of its sources.

DIR/seconds/CARD.json and the table at the end say what the seconds of all parts went to.

The exit status is 0 where nothing is lacking, 3 where the same command has to be run again, and 2
where a file is of another machine, version or commit.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags, logging

from ato_jax import tuning
from benchmarks import (
    choices,
    cliff_rows,
    cliffs,
    compiling,
    latency,
    machine,
    memory,
    progress,
    results,
    sdpa,
    spending,
    stopping,
    store,
    training,
)
from benchmarks.cases import PHASES
from benchmarks.results import NO_TIME_LEFT, ResultsError
from benchmarks.store import Store
from benchmarks.tables import Table

FLAGS = flags.FLAGS
flags.DEFINE_string("folder", "", "whole: where the files of figures are, or will be")

flags.register_multi_flags_validator(
    ["another_machine", "resume", "folder"],
    lambda given: given["resume"] or given["folder"] or not given["another_machine"],
    "--another_machine goes on with figures that are there: with --resume, or of whole --folder",
)

# The exit status where a part of the report is lacking.
LACKING = 3
# That of a command that was asked wrongly, or whose file is of another machine or commit.
REFUSED = 2
MOST_STARTS = 4
# The folder of the files that say what the seconds of all parts went to, one for each card.
SECONDS = "seconds"
# The report has every second row of the choices: all of them take a card more than nine minutes.
CHOICES_EVERY = 2
# A stage takes about a minute to start: the imports, a copy's bandwidth, what is compiled.
SHORTEST_SECONDS = 60.0
# The most of a part in which programs are compiled.
COMPILING = 0.62
# What a stage may take beyond its time: the call that runs then, and its tables.
MARGIN_SECONDS = 12.0


@dataclasses.dataclass(frozen=True)
class Stage:
    """`lacking(path, platform)` counts the rows that a file lacks, of all if there is no file.

    `timed` where the command takes --within_s and --resume. `ahead(path, platform)` gives what is
    compiled before it runs, if anything is.
    """

    name: str
    command: tuple[str, ...]
    folder: str
    lacking: Callable[[Path, str], int]
    timed: bool = True
    ahead: Callable[[Path, str], compiling.Jobs] | None = None

    def path(self, folder: Path, card: str) -> Path:
        return folder / self.folder / f"{card}.json"


def _of_report(path: Path, platform: str) -> int:
    # Its tables are of all suites, which take a while to import.
    from benchmarks import document

    found = results.read(path) if path.exists() else results.Results("", "", "", "", 1.0, "gpu")
    found.platform = platform
    return document.asked_for(found)[1]


def _reached(path: Path) -> set[tuple[str, str, str]]:
    """The rows of a file, if there is one, but for those that no time was left for."""
    rows = results.read(path).rows if path.exists() else []
    return {row.key for row in rows if row.unavailable != NO_TIME_LEFT}


def _of_cliffs(path: Path, platform: str) -> int:
    wanted = {
        (str(step.row), phase, cliffs.OURS)
        for step in cliff_rows.STEPS[platform]
        for phase in step.phases
    }
    return len(wanted - _reached(path))


def choices_rows(platform: str) -> Sequence[choices.Row]:
    return choices.ROWS[platform][0::CHOICES_EVERY]


def _known_choices(path: Path) -> set[tuple[str, str]]:
    return {(one.row, one.phase) for one in choices.read(path)[1]} if path.exists() else set()


def _of_choices(path: Path, platform: str) -> int:
    rows = choices_rows(platform)
    return len({(str(row), phase) for row in rows for phase in PHASES} - _known_choices(path))


def _of_sdpa(path: Path, platform: str) -> int:
    wanted = {
        (str(case), phase, name)
        for case, phase in sdpa.CONTEST.groups(platform)
        for name in (sdpa.OURS, sdpa.THEIRS)
    }
    return len(wanted - _reached(path))


def _of_cases(cases: Mapping[str, Sequence[Any]], path: Path, platform: str) -> int:
    """The cases that a file lacks, all of them if it is of another commit."""
    wanted = {str(case) for case in cases[platform]}
    try:
        told = json.loads(path.read_text())
        if told["commit"] != machine.commit():
            return len(wanted)
        measured = {row["case"] for row in told["rows"] if row.get("skipped") != NO_TIME_LEFT}
    except (OSError, ValueError, KeyError, TypeError):
        return len(wanted)
    return len(wanted - measured)


# Prints where JAX computes, and on how many devices.
PROBE = """
import jax
from benchmarks import ours
print(ours.platform(), jax.local_device_count())
print(ours.device_name())
"""


def probed() -> tuple[str, str, int]:
    """The platform, the name of the device, and how many there are, by a process of its own: what
    this one held on a GPU would be another program's beside all that its commands time.
    """
    command = [sys.executable, "-c", PROBE]
    try:
        found = subprocess.run(
            command, cwd=machine.ROOT, capture_output=True, text=True, check=True
        )
    except subprocess.CalledProcessError as error:
        raise ResultsError(f"JAX finds no device: {error.stderr.strip()[-300:]}") from error
    told, name = found.stdout.strip().splitlines()[-2:]
    platform, count = told.split()
    return ("gpu", name, int(count)) if platform == "gpu" else ("cpu", name, 1)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where stages run: on all of the machine, or beside others on one card and some of the cores,
    what they print in files of this folder.
    """

    card: str = ""
    cores: frozenset[int] = frozenset()
    folder: Path | None = None


def places(count: int, folder: Path) -> list[Place]:
    """One for each card, with about as many cores."""
    if count == 1:
        return [Place()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    cards = visible.split(",") if visible else [str(number) for number in range(count)]
    # Neighbors in number share caches.
    cores = sorted(os.sched_getaffinity(0))
    ends = [len(cores) * number // count for number in range(count + 1)]
    shares = [frozenset(cores[ends[n] : ends[n + 1]]) for n in range(count)]
    return [Place(card, share, folder) for card, share in zip(cards, shares, strict=True)]


STAGES = (
    Stage(
        compiling.REPORT,
        ("run", f"--suite={compiling.REPORT}"),
        "",
        _of_report,
        ahead=lambda path, platform: compiling.of_report(_reached(path), platform),
    ),
    Stage(
        cliffs.NAME,
        ("run", f"--suite={cliffs.NAME}"),
        cliffs.NAME,
        _of_cliffs,
        ahead=lambda path, platform: compiling.of_cliffs(_reached(path), platform),
    ),
    Stage(
        choices.NAME,
        ("run", f"--suite={choices.NAME}", f"--part=1/{CHOICES_EVERY}"),
        choices.NAME,
        _of_choices,
        ahead=lambda path, platform: compiling.of_choices(
            choices_rows(platform), _known_choices(path)
        ),
    ),
    Stage("sdpa", ("run", "--suite=sdpa"), "sdpa", _of_sdpa),
    Stage(
        training.NAME,
        ("run", f"--suite={training.NAME}"),
        training.NAME,
        functools.partial(_of_cases, training.CASES),
    ),
    Stage(
        "latency",
        ("latency",),
        "latency",
        functools.partial(_of_cases, latency.CASES),
        timed=False,
    ),
    Stage(
        "memory",
        ("memory",),
        "memory",
        functools.partial(_of_cases, memory.CASES),
        timed=False,
    ),
)
# Each row of their files stands alone, so they take no `--another_machine`.
BY_ROW = (training.NAME, choices.NAME)


def command_of(stage: Stage, path: Path, seconds: float, programs: Path | None = None) -> list[str]:
    command = [sys.executable, "-m", "benchmarks", *stage.command, f"--json={path}"]
    if stage.timed:
        command += ["--resume", f"--within_s={seconds:.0f}"]
        if FLAGS.another_machine and stage.name not in BY_ROW:
            command.append("--another_machine")
    if stage.ahead and programs:
        command.append(f"--compiled={programs}")
    return command


# The commands that run, and whether they are to be the last ones.
_running: set[subprocess.Popen[bytes]] = set()
_over = threading.Event()


def ran(command: Sequence[str], seconds: float, place: Place, name: str) -> int:
    """The exit status of a command, which is stopped after so many seconds."""
    variables = {"CUDA_VISIBLE_DEVICES": place.card} if place.card else {}
    if place.cores:
        # The processes that this thread starts inherit its cores.
        os.sched_setaffinity(0, place.cores)
    with contextlib.ExitStack() as files:
        told: dict[str, Any] = {}
        if place.folder:
            log = files.enter_context((place.folder / f"{name}.log").open("ab"))
            told = {"stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=machine.ROOT, env=os.environ | variables, **told)
        _running.add(process)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return _stopped(process)
        finally:
            _running.discard(process)


def stop() -> None:
    """Ends what runs, and starts nothing more."""
    _over.set()
    running = list(_running)
    for process in running:
        process.send_signal(signal.SIGTERM)
    for process in running:
        _stopped(process)


def _stopped(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(stopping.GRACE_SECONDS + 2)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


# By stage, and of the phase of compiling: the seconds of this command.
_walls: dict[str, float] = {}


def note(name: str, seconds: float) -> None:
    _walls[name] = _walls.get(name, 0.0) + seconds


def noted(folder: Path, card: str) -> Table:
    """The seconds of all parts so far, those of this one now in a file of the folder, too."""
    path = folder / SECONDS / f"{card}.json"
    sums = spending.of_file(path).get(card, {})
    for name, seconds in _walls.items():
        sums[name] = sums.get(name, 0.0) + seconds
    _walls.clear()
    told = spending.of_stages(sums, {stage.name: stage.path(folder, card) for stage in STAGES})
    results.write(path, json.dumps({"spent": {card: sums}, "kinds": told}, indent=1) + "\n")
    note_of_cards = "Compiling takes all cards at a time, a stage takes one."
    return dataclasses.replace(spending.table(told), notes=[note_of_cards])


def run_stage(
    stage: Stage,
    path: Path,
    platform: str,
    end: float,
    place: Place,
    programs: Path | None = None,
) -> tuple[int, bool]:
    """Runs a stage until it lacks nothing or the time is up; the rows that it lacks then, and
    whether it was refused.
    """
    lacking, refused = stage.lacking(path, platform), False
    begun = time.monotonic()
    for _ in range(MOST_STARTS):
        left = end - time.monotonic()
        if not lacking or left < SHORTEST_SECONDS or _over.is_set():
            break
        where = f" on card {place.card}" if place.card else ""
        told = f"{lacking} rows to measure{where}, {left:.0f} s left"
        print(f"\n## {stage.name}: {told}", flush=True)
        command = command_of(stage, path, left - MARGIN_SECONDS, programs)
        status = ran(command, left, place, stage.name)
        before, lacking = lacking, stage.lacking(path, platform)
        refused = status == REFUSED
        # It would be again; and what is not compiled waits for the next phase.
        waits = lacking == before or bool(stage.ahead and programs)
        if refused or status in (0, 1) and waits:
            break
    note(stage.name, time.monotonic() - begun)
    return lacking, refused


def begun_on(path: Path) -> str:
    """The machine and card of a file; "" where there is no file, or where it names none."""
    try:
        return str(json.loads(path.read_text()).get("machine", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def run_stages(
    folder: Path,
    card: str,
    platform: str,
    count: int,
    end: float,
    programs: Path | None = None,
) -> dict[str, tuple[int, bool]]:
    """By stage what `run_stage` says: each of `count` cards takes the next one. A file is of one
    card, so a stage that another one began waits for that card.
    """
    waiting, lock, found = [*STAGES], threading.Lock(), {}
    served = places(count, folder)
    machines = {place: machine.identity(place.card) for place in served}

    def next_of(place: Place) -> Stage | None:
        """The first stage that no other card here has begun."""
        others = {*machines.values()} - {machines[place]}
        with lock:
            for stage in waiting:
                if begun_on(stage.path(folder, card)) not in others:
                    waiting.remove(stage)
                    return stage
        return None

    def serve(place: Place) -> None:
        while stage := next_of(place):
            path = stage.path(folder, card)
            found[stage.name] = run_stage(stage, path, platform, end, place, programs)

    _over.clear()
    folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        serving = [pool.submit(serve, place) for place in served]
        try:
            concurrent.futures.wait(serving, return_when=concurrent.futures.FIRST_EXCEPTION)
            for one in serving:
                if one.done():
                    one.result()
        except BaseException:
            stop()
            raise
    return {stage.name: found[stage.name] for stage in STAGES}


def compile_ahead(
    folder: Path, card: str, platform: str, count: int, seconds: float, kept: Store
) -> int:
    """Compiles what the stages lack, for so long at most; how many programs are lacking then."""
    start = time.monotonic()
    print(f"\n## compiling for {count} cards, {seconds:.0f} s at most", flush=True)
    lacking = compiling.fill(
        [stage.ahead(stage.path(folder, card), platform) for stage in STAGES if stage.ahead],
        platform,
        [place.card for place in places(count, folder)],
        seconds,
        kept,
    )
    note(spending.COMPILING, time.monotonic() - start)
    print(f"compiling took {time.monotonic() - start:.0f} s; {lacking} programs lack", flush=True)
    return lacking


def in_phases(
    folder: Path, card: str, platform: str, count: int, end: float, kept: Store
) -> dict[str, tuple[int, bool]]:
    """Compiles and then runs the stages, again where time is left for what was not compiled."""
    while True:
        left = end - time.monotonic()
        absent = compile_ahead(folder, card, platform, count, COMPILING * left, kept)
        found = run_stages(folder, card, platform, count, end, kept.folder)
        over = end - time.monotonic() < SHORTEST_SECONDS + compiling.SHORTEST_SECONDS
        if not absent or over or any(refused for _, refused in found.values()):
            return found


def compiles_ahead(platform: str) -> bool:
    """A CPU's cores are few, and its programs small."""
    return platform == "gpu"


def main(_: Sequence[str]) -> int:
    if not FLAGS.within_s or not FLAGS.folder:
        raise ResultsError(
            "whole takes --folder, where the files of figures are, and --within_s, the seconds of "
            "this part, such as 540"
        )
    end = time.monotonic() + FLAGS.within_s
    folder = Path(FLAGS.folder).absolute()
    platform, name, count = probed()
    card = tuning.table_name(name)
    progress.show("")
    programs = Path(FLAGS.compiled).absolute() if FLAGS.compiled else store.default_folder()
    if compiles_ahead(platform):
        kept = store.opened(programs, platform)
        found = in_phases(folder, card, platform, count, end, kept)
        if not any(lacking for lacking, _ in found.values()):
            kept.remove()
    else:
        found = run_stages(folder, card, platform, count, end)
    refusals = [stage for stage, (_, refused) in found.items() if refused]
    left_over = {stage: lacking for stage, (lacking, _) in found.items() if lacking}
    print("\n" + noted(folder, card).text(), flush=True)
    print("\nThe files of this report:", flush=True)
    paths = [stage.path(folder, card) for stage in STAGES]
    for path in dict.fromkeys([*paths, folder / SECONDS / f"{card}.json"]):
        if path.exists():
            print(path, flush=True)
    if left_over:
        told = ", ".join(f"{count} rows of {name}" for name, count in left_over.items())
        if refusals:
            logging.error("Lacking: %s. Refused: %s, as it says above", told, ", ".join(refusals))
            return REFUSED
        logging.error("Lacking: %s. The same command goes on", told)
        return LACKING
    print(f"Nothing is lacking: python -m benchmarks report --new={FLAGS.folder}")
    return 0
