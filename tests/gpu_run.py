"""Runs the tests that the GPU receipt lacks on all cards of this machine, within a limit of time.

    python -m tests.gpu_run --seconds=540 [--workers=13] [--cards=1,2,3] [--cache] [NAME ...]

takes the tests under "left" and those that failed, or the named ones, and deals them to the cards.
Each card has one pytest with `--workers` processes, since a test mostly compiles. Every outcome is
written to a file as soon as it is known, so a run that ends by its limit loses only the tests that
were running: all others stand in `tests/gpu_receipt.json` afterwards. What took longest last time
starts first: `tests/gpu_seconds.json`, which this writes, too.

Tests of one card share its memory and its time. A test that fails for want of memory, or that
measures time, runs again alone: `--workers=1` with its name.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests import receipt

SECONDS = receipt.ROOT / "tests" / "gpu_seconds.json"
# What one run leaves to the next, in a folder that git ignores.
CACHES = receipt.ROOT / ".aot_cache" / "gpu_run"
# A test of which nothing is known, on one of many workers.
TYPICAL_SECONDS = 30.0
# Tests that take less are not worth a place in the file.
LONG_SECONDS = 40.0


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """As a plugin: one line for each test that has ended. Workers tell their parent."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when == "call" or report.outcome != "passed":
        kind = "error" if report.when != "call" and report.outcome == "failed" else report.outcome
        line = {"test": report.nodeid, "outcome": kind, "seconds": round(report.duration, 1)}
        if report.outcome == "failed":
            line["why"] = str(report.longrepr)[-2000:]
        with open(os.environ[receipt.OUTCOME_FILE], "a") as file:
            file.write(json.dumps(line) + "\n")


def dealt(tests: list[str], cards: int, seconds: dict[str, float]) -> list[list[str]]:
    """The tests of each card, the longest first."""
    hands: list[list[str]] = [[] for _ in range(cards)]
    loads = [0.0] * cards
    for test in sorted(tests, key=lambda test: -seconds.get(test, TYPICAL_SECONDS)):
        card = loads.index(min(loads))
        hands[card].append(test)
        loads[card] += seconds.get(test, TYPICAL_SECONDS)
    return hands


def settings(cache: bool, threads: int | None) -> dict[str, str]:
    """Of the environment of the processes, about nothing but what a run costs."""
    # Workers import the same files: the first that does leaves its bytecode to all others.
    found = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(CACHES / "bytecode")}
    if threads is not None:
        found["NPROC"] = str(threads)
    if cache:
        found |= {
            "JAX_COMPILATION_CACHE_DIR": str(CACHES / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        }
    return found


def started(
    card: int, tests: list[str], workers: int, folder: Path, own: dict[str, str]
) -> subprocess.Popen[bytes]:
    listed = folder / f"tests_{card}.txt"
    listed.write_text("\n".join(tests))
    environment = {
        **os.environ,
        receipt.OUTCOME_FILE: str(folder / f"outcomes_{card}.jsonl"),
        "CUDA_VISIBLE_DEVICES": str(card),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "OMP_NUM_THREADS": "1",
        **own,
    }
    spread = ["-n", str(workers), "--dist", "load", "--maxschedchunk", "1"]
    plugins = ["-p", "tests.gpu_run", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--no-header", "--tb=short"]
    with open(folder / f"pytest_{card}.txt", "w") as log:
        return subprocess.Popen(
            [*command, *plugins, *(spread if workers > 1 else []), f"@{listed}"],
            cwd=receipt.ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def ended(running: list[subprocess.Popen[bytes]], limit: float) -> None:
    """Waits for all of them until `limit`, and ends those that are still there."""
    while any(process.poll() is None for process in running) and time.monotonic() < limit:
        time.sleep(0.5)
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("outcomes_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def outcomes(lines: list[dict[str, Any]]) -> dict[str, str]:
    """By test; what came last counts, such as an error behind a test that had passed. A test that
    was skipped is still left: it skips itself where a shared card did not serve it."""
    found = {line["test"]: line["outcome"] for line in lines}
    return {test: outcome for test, outcome in found.items() if outcome != "skipped"}


def cards() -> list[str]:
    """The cards' names."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--workers", type=int, default=13)
    told = "numbers, with commas; by default those of CUDA_VISIBLE_DEVICES, or all"
    parser.add_argument("--cards", default=os.environ.get("CUDA_VISIBLE_DEVICES", ""), help=told)
    parser.add_argument("--cache", action="store_true", help="share JAX's programs on disk")
    parser.add_argument("--threads", type=int, help="of XLA in each process; 32 by default")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    limit = time.monotonic() + options.seconds
    found = json.loads(receipt.RECEIPT.read_text())
    if found["sources"] != receipt.source_hashes():
        sys.exit("the receipt is not of these sources: `python -m tests.receipt renew` first")
    tests = options.names or [*found["left"], *found["failed"], *found["error"]]
    seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    own = settings(options.cache, options.threads)
    names = cards()
    numbers = list(map(int, options.cards.split(","))) if options.cards else range(len(names))
    devices = {*found.get("device", names[0]).split(", "), *names}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(os.environ.get("OUT", temporary))
        hands = dealt(tests, len(numbers), seconds)
        running = [
            started(card, hand, min(options.workers, len(hand)), folder, own)
            for card, hand in zip(numbers, hands, strict=True)
            if hand
        ]
        ended(running, limit)
        lines = read(folder)
    for line in lines:
        seconds.pop(line["test"], None)
        if line["seconds"] >= LONG_SECONDS:
            seconds[line["test"]] = line["seconds"]
        if line["outcome"] != "passed":
            print(line["outcome"], line["test"], line.get("why", "")[-600:])
    SECONDS.write_text(json.dumps(dict(sorted(seconds.items())), indent=0) + "\n")
    ended_as = outcomes(lines)
    found["device"] = ", ".join(sorted(devices))
    receipt.write(receipt.with_second_run(found, ended_as))
    print(f"{len(ended_as)} of {len(tests)} tests ended; tally:", end=" ")
    print(json.loads(receipt.RECEIPT.read_text())["tally"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
