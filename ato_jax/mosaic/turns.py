"""Turns: warpgroups with the same part issue their products one after the other.

Where two warpgroups alternate, the tensor cores run the products of one while the other computes on
its results. Without an order both would issue products at once, and then both would compute.

    turns.open(worker)         once, before the first wait
    turns.wait(worker)         until it is this warpgroup's turn
    ... issue products ...
    turns.pass_on(worker)      the next warpgroup's turn
    turns.close(worker)        once, behind the last pass

Each warpgroup has a named barrier of the hardware, of 256 threads: its own 128, which wait, and the
128 of the one before it, which arrive. All warpgroups must take the same number of turns. No result
depends on the order, so turns are left out where kernels are interpreted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from ato_jax.mosaic.assembly import named_barrier

# A named barrier counts the threads of one warpgroup that waits and of one that arrives.
THREADS = 256


@dataclasses.dataclass(frozen=True)
class Turns:
    """The order of `workers` warpgroups, the first ones of a block of `warpgroups`.

    Mosaic GPU takes barrier 0 for the block and one more for each warpgroup.
    """

    workers: int
    warpgroups: int

    def _of(self, worker: Any) -> Any:
        return worker + (self.warpgroups + 1)

    def open(self, worker: Any) -> None:
        """The first turn is that of worker 0."""
        pl.when(worker == self.workers - 1)(lambda: self.pass_on(worker))

    def wait(self, worker: Any) -> None:
        named_barrier("sync", self._of(worker), THREADS)

    def pass_on(self, worker: Any) -> None:
        named_barrier("arrive", self._of(lax.rem(worker + 1, self.workers)), THREADS)

    def close(self, worker: Any) -> None:
        """Awaits the last arrival, which is at worker 0."""
        pl.when(worker == 0)(lambda: self.wait(worker))
