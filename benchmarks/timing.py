"""How a call is timed, the same way for every framework.

The inputs lie on the device and are random: zeros take less power and run faster than data. What
is timed has been compared with float64 on the same machine before (`cases.wrong`).

A batch is a number of launches back to back, one wait for the last result at its end, and a host
clock around it. A GPU's batch is long enough that the wait vanishes in it, and while the card
works, the host enqueues the next launch: a batch's time over its calls is the card's time. Where a
call is so short that launching it takes the host longer, one launch holds several calls, one after
the other: a CUDA graph in PyTorch, one compiled program in JAX. So the figure is the card's time
there, too, as in a model that is compiled or captured as a whole; a call that is launched by
itself costs the host tens of microseconds more in either framework. The card runs at the clocks
that it can sustain, which may be up to 15% below those of single calls with pauses. On a CPU a
batch is one call.

Many batches are timed, after a warm-up; the figure is their median, and all of them are kept for
what else is said of them (`summary`). Inputs that would fit into a
GPU's cache come in several sets that take turns, or the cache would be measured.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

# A wait costs tens of microseconds: below 1% of this.
GPU_BATCH_SECONDS = 0.01
# Above the second-level cache of the largest GPUs (126 MB), so that a set is gone when its turn
# comes again.
CACHE_BYTES = 1 << 27
MOST_SETS = 32
# A set of inputs up to this takes a GPU well under a millisecond in linear attention.
SHORT_BYTES = 1 << 28
CALLS_PER_LAUNCH = 8
# A call on so little takes a GPU about 5 us, and eight of them less than JAX's dispatch of a
# program, which is 40.
TINY_BYTES = 1 << 23
TINY_CALLS_PER_LAUNCH = 32
FEWEST_BATCHES = 3
# With the call whose result is compared and those that size a batch.
FEWEST_CALLS = FEWEST_BATCHES + 4
MOST_BATCHES = 200
# Of a batch in which the host is timed: with the launches that the card takes on, it never waits.
HOST_CALLS = 20
# The wait is nothing beside such a launch: a batch is one, and is not sized again.
LONG_SECONDS = 0.1
FIRST_LAUNCHES = 4
MOST_SIZINGS = 4


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call in each batch, and how many calls that were in all.

    `host` are those of the host alone for one call: of a batch's first launch, before which
    nothing waits, over its calls; the median of the batches.
    """

    batches: Sequence[float]
    calls: int
    host: float = 0.0

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.batches)


def groups_of_inputs(set_bytes: int, platform: str) -> tuple[int, int]:
    """How many groups of sets of inputs take turns, and how many sets, one a call, are in each."""
    if platform == "cpu" or set_bytes > SHORT_BYTES:
        return 1, 1
    if set_bytes <= TINY_BYTES:
        return 1, TINY_CALLS_PER_LAUNCH
    sets = min(MOST_SETS, -(-CACHE_BYTES // set_bytes))
    return -(-sets // CALLS_PER_LAUNCH), CALLS_PER_LAUNCH


def on_host(
    call: Callable[[], Any], wait: Callable[[Any], None], seconds: float
) -> Timing:
    """Times the host alone: calls one after the other, none of whose results is waited for but
    before and after a batch. On a CPU, which computes them itself, that is all of a call.
    """

    def batch() -> float:
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            result = call()
        spent = time.perf_counter() - start
        wait(result)
        return spent / HOST_CALLS

    batch()
    count = round(seconds / (batch() * HOST_CALLS))
    times = [batch() for _ in range(max(FEWEST_BATCHES, min(MOST_BATCHES, count)))]
    return Timing(times, len(times) * HOST_CALLS, statistics.median(times))


def measure(
    launch: Callable[[int], Any],
    wait: Callable[[Any], None],
    platform: str,
    seconds: float,
    calls: int = 1,
    counts: list[int] | None = None,
) -> Timing:
    """Times one of the `calls` that `launch(i)` enqueues: `interleaved` of one."""
    return interleaved([launch], wait, platform, seconds, calls, counts)[0]


def interleaved(
    launches: Sequence[Callable[[int], Any]],
    wait: Callable[[Any], None],
    platform: str,
    seconds: float,
    calls: int = 1,
    counts: list[int] | None = None,
) -> list[Timing]:
    """Times several launches batch by batch in turns, so that what drifts drifts for all.

    Args:
      launches: each enqueues its i-th launch, of `calls` calls, and returns its result; it has
        run before, so nothing compiles here.
      wait: returns when a result is there, and so all launches before it.
      platform: "cpu" or "gpu".
      seconds: how long to measure each, about; at least three batches in any case.
      calls: how many calls a launch holds.
      counts: the launches of a batch of each, if an earlier turn left them there; else they are
        left there for the next. Each has one batch that does not count then, to warm up.
    """

    def batch(launch: Callable[[int], Any], count: int) -> tuple[float, float]:
        """Seconds of a launch, and those of the host for the first."""
        start = time.perf_counter()
        result = launch(0)
        host = time.perf_counter() - start
        for index in range(1, count):
            result = launch(index)
        wait(result)
        return (time.perf_counter() - start) / count, host

    counts = [] if counts is None else counts
    rounds = []
    for index, launch in enumerate(launches):
        if index < len(counts):
            once, _ = batch(launch, counts[index])
        else:
            count, once = _sized(functools.partial(batch, launch), platform)
            counts.append(count)
        rounds.append(round(seconds / (once * counts[index])))
    # The slowest has its seconds, or its three batches.
    batches = max(FEWEST_BATCHES, min(MOST_BATCHES, *rounds))
    times: list[list[float]] = [[] for _ in launches]
    hosts: list[list[float]] = [[] for _ in launches]
    for turn in range(batches):
        # Each is the first of a round in its turn: the one before it decides the clocks.
        for index in range(len(launches)):
            chosen = (index + turn) % len(launches)
            once, host = batch(launches[chosen], counts[chosen])
            times[chosen].append(once / calls)
            hosts[chosen].append(host / calls)
    return [
        Timing(own, batches * count * calls, statistics.median(of_host))
        for count, own, of_host in zip(counts, times, hosts, strict=True)
    ]


def _sized(batch: Callable[[int], tuple[float, float]], platform: str) -> tuple[int, float]:
    """How many launches fill a batch, and the seconds of one.

    A program's first launches can take many times as long as all later ones (XLA makes a CUDA graph
    of it meanwhile): the fastest of several counts, and a batch only grows. Too short a one would
    be mostly wait.
    """
    once, _ = batch(1)
    if platform != "gpu" or once > LONG_SECONDS:
        return 1, once
    once = min(once, *(batch(1)[0] for _ in range(FIRST_LAUNCHES)))
    count = 1
    # More than once, since a single launch is mostly wait: what it takes shows in a batch alone.
    for _ in range(MOST_SIZINGS):
        fills = round(GPU_BATCH_SECONDS / once)
        if fills <= count:
            break
        count = fills
        once, _ = batch(count)
    return count, once
