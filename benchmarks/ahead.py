"""Compiles all that a run will time, in processes of its own, before anything is timed.

Tracing and lowering hold Python's lock: threads of one process compile hardly faster than one
thread. So a program for JAX is compiled by one of several workers (`worker.py`) and comes back as
XLA serializes it: the driver loads it and times the same machine code. A worker reads one JSON
object a line and answers each with a pickle:

    {"contest": number, "case": {...}, "phase": name, "contender": name}
        -> what `ours.unpacked` takes, the reason why the contender does not run, or None
    {"row": {...}, "phase": name, "by_name": whether each backend is compiled by its name, too}
        -> what `choices.unpacked` takes, or None

None is also what a job comes to that ends its worker: the driver compiles it itself then.

What PyTorch's process compiles goes through Triton's and Inductor's caches on disk. Others like it
fill these beforehand: they run each contender once, and where it searches for block sizes, they
compile all and time none. The search itself is left to the process that is timed.

One phase of compiling alone, rather than some before every few rows: all cores are busy until its
end, which is waited for once, and all these processes are gone when the first row is timed. What
some of them keep between two jobs, threads and processes that look for work, disturbs nothing.

`whole` has one such phase for all stages of a part, on all cores and cards (`Ahead.fill`). Its
answers are files (`store.py`), so what one part compiled no later part compiles again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pickle
import queue
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import byte_limit, peers
from benchmarks.cases import Case
from benchmarks.store import Store

# A worker is asked for a program of a contest, by the contest's number and by what its row is named
# by, or for a program of a row of `choices` or `cliffs`, by JSON that names the row.
Job = tuple[int, Case, str, str] | Mapping[str, Any]
# A contender of PyTorch's process, by what its row is named by.
InTorch = tuple[Case, str, str]
# A program's bytes, or why there is none.
Answer = dict[str, Any] | str | None

# For one answer, while all cores are busy. A worker that takes longer is ended.
LONGEST_SECONDS = 180
# For one of a row of `choices`, which has the programs of all backends.
LONGEST_SECONDS_OF_ROW = 400
# Processes that fill PyTorch's caches: each search in them compiles on several cores by itself, and
# each holds a case's tensors.
WARMERS = 6


def named(case: Case, phase: str, contender: str) -> dict[str, Any]:
    """The name of a row's program in a store, whatever contest asks for it."""
    return {"case": dataclasses.asdict(case), "phase": phase, "contender": contender}


def question(job: Job) -> dict[str, Any]:
    """Returns the JSON by which a worker is asked for a job."""
    if isinstance(job, Mapping):
        return dict(job)
    number, *of_row = job
    return {"contest": number, **named(*of_row)}


def key(job: Job) -> dict[str, Any]:
    """The job's name in a store."""
    return {name: one for name, one in question(job).items() if name != "contest"}


def workers() -> int:
    """Processes that compile at one time: each keeps a little less than one core busy."""
    return max(1, byte_limit.threads())


class _Worker:
    """One process, started with its first job and again after one that ended it."""

    def __init__(self, arguments: Sequence[str], card: str = "") -> None:
        self._command = (sys.executable, "-m", "benchmarks.worker", *arguments)
        self._variables = on_card(card)
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, job: Job) -> Answer:
        longest = LONGEST_SECONDS_OF_ROW if isinstance(job, Mapping) else LONGEST_SECONDS
        try:
            process = self._process or self._start()
            assert process.stdin and process.stdout
            process.stdin.write((json.dumps(question(job)) + "\n").encode())
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], longest)
            if ready:
                return pickle.load(process.stdout)
        except Exception:  # it ended, in whatever it was about to say
            self.end()
            return None
        self.end()
        return f"compiling took longer than {longest} s"

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            self._command,
            cwd=peers.ROOT,
            env=os.environ | self._variables,
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


def on_card(card: str) -> dict[str, str]:
    """The variable of a process that sees this card alone, or every card that this one sees."""
    return {"CUDA_VISIBLE_DEVICES": card} if card else {}


class Ahead:
    """The driver's end: `arguments`, a --config or "" and names of suites, say which contests the
    jobs count, and the processes take `cards` in turns. When it is left, all of its processes are
    ended, with what they started.
    """

    def __init__(
        self, platform: str, arguments: Sequence[str], count: int, cards: Sequence[str] = ("",)
    ) -> None:
        self._platform, self._count, self._cards, self._over = platform, count, cards, False
        self._workers = [_Worker(arguments, cards[n % len(cards)]) for n in range(count)]
        self._warmers: list[peers.Peer] = []
        self._idle: queue.SimpleQueue[peers.Peer] = queue.SimpleQueue()

    def programs(
        self,
        jobs: Sequence[Job],
        in_torch: Iterable[Sequence[InTorch]] = (),
        seconds: float | None = None,
    ) -> list[Answer]:
        """Of each job, while PyTorch's caches are filled for those contenders: those that stand
        together one after the other, as they share much of what is compiled. What takes longer
        than `seconds` comes to None.
        """
        answers = self._answers(jobs, in_torch, seconds, lambda job, answer: answer)
        return [None if one is LATE else one for one in answers]

    def fill(
        self,
        jobs: Sequence[Job],
        in_torch: Iterable[Sequence[InTorch]],
        seconds: float,
        store: Store,
    ) -> int:
        """Puts the answers into a store, each as soon as it is there, and a note of each contender
        for which PyTorch's caches are filled; how many jobs have no answer after `seconds`. What
        the store has is not asked for again.
        """

        def kept(job: Job, answer: Answer) -> None:
            # A worker that is ended because the time is up has not answered.
            if not self._over:
                store.put(key(job), answer)

        wanted = [job for job in jobs if not store.has(key(job))]
        cold = [[one for one in many if not store.has(_filled(one))] for many in in_torch]
        told = f"{len(jobs) - len(wanted)} of {len(jobs)} programs were compiled before"
        print(f"{told}, {len(wanted)} are to be compiled by {self._count} processes", flush=True)
        found = self._answers(wanted, [many for many in cold if many], seconds, kept, store)
        return sum(one is LATE for one in found)

    def _answers(
        self,
        jobs: Sequence[Job],
        in_torch: Iterable[Sequence[InTorch]],
        seconds: float | None,
        keep: Callable[[Job, Answer], Any],
        store: Store | None = None,
    ) -> list[Any]:
        """What `keep` makes of each answer, and `LATE` of a job that has none in time."""
        idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def answered(job: Job) -> Any:
            worker = idle.get()
            try:
                return keep(job, worker.ask(job))
            finally:
                idle.put(worker)

        start = time.monotonic()
        compiling = concurrent.futures.ThreadPoolExecutor(self._count)
        warming = concurrent.futures.ThreadPoolExecutor(WARMERS * len(self._cards))
        try:
            warm = [warming.submit(self._warm, one, store) for one in in_torch]
            answers = [compiling.submit(answered, job) for job in jobs]
            # What was waited for last says what a shorter phase has to leave out.
            for what, waited in (("PyTorch's caches", warm), ("programs for JAX", answers)):
                limit = None if seconds is None else start + seconds - time.monotonic()
                _, late = concurrent.futures.wait(waited, limit and max(0.0, limit))
                lacking = f", without {len(late)} of {len(waited)}" if late else ""
                spent = time.monotonic() - start
                print(f"{what} were there after {spent:.0f} s{lacking}", flush=True)
            return [one.result() if one.done() else LATE for one in answers]
        finally:
            # Where this is interrupted, nothing more is begun.
            for pool in (compiling, warming):
                pool.shutdown(wait=False, cancel_futures=True)

    def _warm(self, jobs: Iterable[InTorch], store: Store | None) -> None:
        try:
            peer = self._idle.get_nowait()
        except queue.Empty:
            card = self._cards[len(self._warmers) % len(self._cards)]
            peer = peers.Peer(self._platform, leads=True, **WARMING, **on_card(card))
            self._warmers.append(peer)
        for case, phase, name in jobs:
            # What fails says why where it is timed.
            if not peer.warm(name, case, phase):
                break
            if store and not self._over:
                store.put(_filled((case, phase, name)), "filled")
        self._idle.put(peer)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for one in [*self._workers, *self._warmers]:
            one.end()


# Stands for the answer to a job where none came in time.
LATE = object()
# What flash-linear-attention would keep of a search: here nothing was timed.
WARMING = {"FLA_CACHE_RESULTS": "0"}


def _filled(one: InTorch) -> dict[str, Any]:
    """The name of the note that PyTorch's caches hold what this contender compiles."""
    return {"filled": named(*one)}
