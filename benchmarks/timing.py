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

Many batches are timed, after a warm-up; the figure is their median. Inputs that would fit into a
GPU's cache come in several sets that take turns, or the cache would be measured.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
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
FEWEST_BATCHES = 3
# With the call whose result is compared and those that size a batch.
FEWEST_CALLS = FEWEST_BATCHES + 4
MOST_BATCHES = 200


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call, the median over batches; the quartiles tell the spread."""

    seconds: float
    lower: float
    upper: float
    calls: int


def groups_of_inputs(set_bytes: int, platform: str) -> tuple[int, int]:
    """How many groups of sets of inputs take turns, and how many sets, one a call, are in each."""
    if platform == "cpu" or set_bytes > SHORT_BYTES:
        return 1, 1
    sets = min(MOST_SETS, -(-CACHE_BYTES // set_bytes))
    return -(-sets // CALLS_PER_LAUNCH), CALLS_PER_LAUNCH


def measure(
    launch: Callable[[int], Any],
    wait: Callable[[Any], None],
    platform: str,
    seconds: float,
    calls: int = 1,
) -> Timing:
    """Times one of the `calls` that `launch(i)` enqueues.

    Args:
      launch: enqueues the i-th launch and returns its result; it has run before, so nothing
        compiles here.
      wait: returns when a result is there, and so all launches before it.
      platform: "cpu" or "gpu".
      seconds: how long to measure, about; at least three batches in any case.
      calls: how many calls a launch holds.
    """

    def batch(launches: int) -> float:
        start = time.perf_counter()
        result = None
        for index in range(launches):
            result = launch(index)
        wait(result)
        return (time.perf_counter() - start) / launches

    launches, once = 1, batch(1)
    if platform == "gpu":
        # Twice, since a single launch is mostly wait: what it takes shows in a batch alone.
        for _ in range(2):
            launches = max(1, round(GPU_BATCH_SECONDS / once))
            once = batch(launches)
    batches = round(seconds / (once * launches))
    batches = max(FEWEST_BATCHES, min(MOST_BATCHES, batches))
    times = [batch(launches) / calls for _ in range(batches)]
    lower, middle, upper = statistics.quantiles(times, n=4)
    return Timing(middle, lower, upper, batches * launches * calls)
