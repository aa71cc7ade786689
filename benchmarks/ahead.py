"""Compiles all that a run will time, in processes of its own, before anything is timed.

Tracing and lowering hold Python's lock: threads of one process compile hardly faster than one
thread. So a program for JAX is compiled by one of several workers (`worker.py`) and comes back as
XLA serializes it: the driver loads it and times the same machine code. A worker reads one JSON
object a line and answers each with a pickle:

    {"contest": number, "case": {...}, "phase": name, "contender": name}
        -> what `ours.unpacked` takes, the reason why the contender does not run, or None

None is also what a job comes to that ends its worker: the driver compiles it itself then.

What PyTorch's process compiles goes through Triton's and Inductor's caches on disk. Others like it
fill these beforehand: they run each contender once, and where it searches for block sizes, they
compile all and time none. The search itself is left to the process that is timed.

One phase of compiling alone, rather than some before every few rows: all cores are busy until its
end, which is waited for once, and all these processes are gone when the first row is timed. What
some of them keep between two jobs, threads and processes that look for work, disturbs nothing.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pickle
import queue
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import byte_limit, peers
from benchmarks.cases import Case

# What is asked of a worker: the number of a contest, and what the row is named by.
Job = tuple[int, Case, str, str]
# A program's bytes, or why there is none.
Answer = dict[str, Any] | str | None

# For one answer, while all cores are busy. A worker that takes longer is ended.
LONGEST_SECONDS = 180
# Processes that fill PyTorch's caches: each search in them compiles on several cores by itself, and
# each holds a case's tensors.
WARMERS = 6


def workers() -> int:
    """Processes that compile at one time: each takes a little more than one core."""
    return max(1, 3 * byte_limit.threads() // 4)


class _Worker:
    """One process, started with its first job and again after one that ended it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._command = (sys.executable, "-m", "benchmarks.worker", *arguments)
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, job: Job) -> Answer:
        number, case, phase, name = job
        facts = {"contest": number, "case": dataclasses.asdict(case), "phase": phase}
        try:
            process = self._process or self._start()
            assert process.stdin and process.stdout
            process.stdin.write((json.dumps(facts | {"contender": name}) + "\n").encode())
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], LONGEST_SECONDS)
            if ready:
                return pickle.load(process.stdout)
        except Exception:  # it ended, in whatever it was about to say
            self.end()
            return None
        self.end()
        return f"compiling took longer than {LONGEST_SECONDS} s"

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            self._command,
            cwd=peers.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        return self._process

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            peers.kill(process)
            process.communicate()


class Ahead:
    """The driver's end: `arguments`, a --config or "" and names of suites, say which contests the
    jobs count. When it is left, all of its processes are ended, with what they started.
    """

    def __init__(self, platform: str, arguments: Sequence[str], count: int) -> None:
        self._platform, self._count = platform, count
        self._workers = [_Worker(arguments) for _ in range(count)]
        self._warmers: list[peers.Peer] = []
        self._idle: queue.SimpleQueue[peers.Peer] = queue.SimpleQueue()

    def programs(
        self,
        jobs: Sequence[Job],
        in_torch: Iterable[Sequence[tuple[Case, str, str]]] = (),
        seconds: float | None = None,
    ) -> list[Answer]:
        """Of each job, while PyTorch's caches are filled for those contenders: those that stand
        together one after the other, as they share much of what is compiled. What takes longer
        than `seconds` comes to None.
        """
        idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def answered(job: Job) -> Answer:
            worker = idle.get()
            try:
                return worker.ask(job)
            finally:
                idle.put(worker)

        start = time.monotonic()
        compiling = concurrent.futures.ThreadPoolExecutor(self._count)
        warming = concurrent.futures.ThreadPoolExecutor(WARMERS)
        try:
            warm = [warming.submit(self._warm, one) for one in in_torch]
            answers = [compiling.submit(answered, job) for job in jobs]
            # What was waited for last says what a shorter phase has to leave out.
            for what, waited in (("PyTorch's caches", warm), ("programs for JAX", answers)):
                limit = None if seconds is None else start + seconds - time.monotonic()
                _, late = concurrent.futures.wait(waited, limit and max(0.0, limit))
                lacking = f", without {len(late)} of {len(waited)}" if late else ""
                spent = time.monotonic() - start
                print(f"{what} were there after {spent:.0f} s{lacking}", flush=True)
            return [one.result() if one.done() else None for one in answers]
        finally:
            # Where this is interrupted, nothing more is begun.
            for pool in (compiling, warming):
                pool.shutdown(wait=False, cancel_futures=True)

    def _warm(self, jobs: Iterable[tuple[Case, str, str]]) -> None:
        try:
            peer = self._idle.get_nowait()
        except queue.Empty:
            peer = peers.Peer(self._platform, leads=True, **WARMING)
            self._warmers.append(peer)
        for case, phase, name in jobs:
            # What fails says why where it is timed.
            if not peer.warm(name, case, phase):
                break
        self._idle.put(peer)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        for one in [*self._workers, *self._warmers]:
            one.end()


# What flash-linear-attention would keep of a search: here nothing was timed.
WARMING = {"FLA_CACHE_RESULTS": "0"}
