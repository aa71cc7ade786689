"""The whole report of this card, in as many parts as it takes: the same command is run again until
it says that nothing is lacking.

    python -m benchmarks whole --folder=DIR --within_s=540 [--another_machine]

The stages, each a command of its own that goes on with what its file lacks:

    report     every suite of the report           DIR/CARD.json
    latency    a decode loop by percentiles        DIR/latency/CARD.json
    memory     a training step's memory            DIR/memory/CARD.json
    training   a model's step beside PyTorch's     DIR/training/CARD.json
    cliffs     options beside their base cases     DIR/cliffs/CARD.json
    sdpa       ato_torch beside SDPA's default     DIR/sdpa/CARD.json
    choices    the backends by name, every second  DIR/choices/CARD.json
               row

`run --suite=choices` measures every row of the last one.

On a machine with several GPUs each of them takes the next stage, with its share of the cores, and
what a stage prints is in DIR/STAGE.log. CUDA_VISIBLE_DEVICES=0 in front keeps to one.

A stage whose file has every row is left out. A stage that dies is started again, a few times at
most. SIGTERM ends all of it and loses nothing that was measured.

`python -m benchmarks report --new=DIR` then puts the rows of `cliffs` and `sdpa` to those of the
report, keeps the files in benchmarks/results and makes the documents and the pictures of them.
Where the command ran in a copy without its history, this also finds the commit of its sources.

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
import queue
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
    latency,
    machine,
    memory,
    progress,
    results,
    sdpa,
    stopping,
    training,
)
from benchmarks.cases import PHASES
from benchmarks.results import NO_TIME_LEFT, ResultsError

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
# The report has every second row of the choices: all of them take a card more than nine minutes.
CHOICES_EVERY = 2
# A stage takes about a minute to start: the imports, a copy's bandwidth, what is compiled.
SHORTEST_SECONDS = 60.0
# What a stage may take beyond its time: the call that runs then, and its tables.
MARGIN_SECONDS = 12.0


@dataclasses.dataclass(frozen=True)
class Stage:
    """`lacking(path, platform)` counts the rows that a file lacks, of all if there is no file.

    `timed` where the command takes --within_s and --resume.
    """

    name: str
    command: tuple[str, ...]
    folder: str
    lacking: Callable[[Path, str], int]
    timed: bool = True

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
        for phase in PHASES
    }
    return len(wanted - _reached(path))


def _of_choices(path: Path, platform: str) -> int:
    known = set()
    if path.exists():
        known = {(one.row, one.phase) for one in choices.read(path)[1]}
    rows = choices.ROWS[platform][0 :: CHOICES_EVERY]
    return len({(str(row), phase) for row in rows for phase in PHASES} - known)


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
    Stage("report", ("run", "--suite=report"), "", _of_report),
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
    Stage(
        training.NAME,
        ("run", f"--suite={training.NAME}"),
        training.NAME,
        functools.partial(_of_cases, training.CASES),
    ),
    Stage(cliffs.NAME, ("run", f"--suite={cliffs.NAME}"), cliffs.NAME, _of_cliffs),
    Stage("sdpa", ("run", "--suite=sdpa"), "sdpa", _of_sdpa),
    Stage(
        "choices",
        ("run", f"--suite={choices.NAME}", f"--part=1/{CHOICES_EVERY}"),
        choices.NAME,
        _of_choices,
    ),
)
# Each row of their files stands alone, so they take no `--another_machine`.
BY_ROW = (training.NAME, choices.NAME)


def command_of(stage: Stage, path: Path, seconds: float) -> list[str]:
    command = [sys.executable, "-m", "benchmarks", *stage.command, f"--json={path}"]
    if stage.timed:
        command += ["--resume", f"--within_s={seconds:.0f}"]
        if FLAGS.another_machine and stage.name not in BY_ROW:
            command.append("--another_machine")
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


def run_stage(
    stage: Stage, path: Path, platform: str, end: float, place: Place
) -> tuple[int, bool]:
    """Runs a stage until it lacks nothing or the time is up; the rows that it lacks then, and
    whether it was refused.
    """
    lacking, refused = stage.lacking(path, platform), False
    for _ in range(MOST_STARTS):
        left = end - time.monotonic()
        if not lacking or left < SHORTEST_SECONDS or _over.is_set():
            break
        where = f" on card {place.card}" if place.card else ""
        told = f"{lacking} rows to measure{where}, {left:.0f} s left"
        print(f"\n## {stage.name}: {told}", flush=True)
        command = command_of(stage, path, left - MARGIN_SECONDS)
        status = ran(command, left, place, stage.name)
        before, lacking = lacking, stage.lacking(path, platform)
        refused = status == REFUSED
        # It would be again.
        if refused or status in (0, 1) and lacking == before:
            break
    return lacking, refused


def run_stages(
    folder: Path, card: str, platform: str, count: int, end: float
) -> dict[str, tuple[int, bool]]:
    """By stage what `run_stage` says: each of `count` cards takes the next one."""
    waiting: queue.SimpleQueue[Stage] = queue.SimpleQueue()
    for stage in STAGES:
        waiting.put(stage)
    found = {}

    def serve(place: Place) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                stage = waiting.get_nowait()
                path = stage.path(folder, card)
                found[stage.name] = run_stage(stage, path, platform, end, place)

    _over.clear()
    folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        serving = [pool.submit(serve, place) for place in places(count, folder)]
        try:
            concurrent.futures.wait(serving, return_when=concurrent.futures.FIRST_EXCEPTION)
            for one in serving:
                if one.done():
                    one.result()
        except BaseException:
            stop()
            raise
    return {stage.name: found[stage.name] for stage in STAGES}


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
    found = run_stages(folder, card, platform, count, end)
    refusals = [stage for stage, (_, refused) in found.items() if refused]
    left_over = {stage: lacking for stage, (lacking, _) in found.items() if lacking}
    print("\nThe files of this report:", flush=True)
    for path in dict.fromkeys(stage.path(folder, card) for stage in STAGES):
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
