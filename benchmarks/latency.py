"""The latency of a decode loop: percentiles of the time of one token, as the host sees it.

Each token is one launch, waited for before the next, as where the next token is sampled on the
host: launch and wait are in the time. The state or the cache is donated and carried on. Linear
attention updates a state of constant size; softmax attention writes into a cache and reads it.
The first token, which compiles, and those that warm up stand apart.

On a CPU the time is that of XLA's code on its cores. How fast a GPU decodes, and what its launch
costs, only a GPU can tell.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

import ato_jax
from benchmarks import demo, kept, noise, other_load, ours, progress, results, summary
from benchmarks.cases import Case
from benchmarks.results import ResultsError
from benchmarks.tables import Table

FLAGS = flags.FLAGS
flags.DEFINE_integer("tokens", 200, "latency: how many tokens of each loop are timed", 8)

WARM_UP = 8
CASES = {
    "gpu": [
        Case("step", B=16, H=32, T=1, D=128, dtype="bfloat16"),
        Case("softmax", B=16, H=32, G=8, T=1, S=8192, D=128, dtype="bfloat16"),
    ],
    "cpu": [
        Case("step", B=1, H=4, T=1, D=16, dtype="float32"),
        Case("softmax", B=1, H=4, G=2, T=1, S=256, D=16, dtype="float32"),
    ],
}

Carried = Any
Loop = Callable[[Carried, Any], tuple[jax.Array, Carried]]


@dataclasses.dataclass(frozen=True)
class Latency:
    """Seconds: of the first token, and of each that was timed."""

    case: str
    first: float
    tokens: Sequence[float]
    load: str = ""

    @property
    def spread(self) -> summary.Spread:
        return summary.spread(self.tokens)

    @property
    def drift(self) -> float | None:
        """Between the medians of the first and the last quarter."""
        quarter = len(self.tokens) // 4
        ends = self.tokens[:quarter], self.tokens[-quarter:]
        return noise.drift([statistics.median(end) for end in ends])

    @property
    def doubt(self) -> str:
        """A tail is what is asked for here: only a drift or other load makes it doubtful."""
        drifted = self.drift
        moved = drifted is not None and drifted > noise.MOST_DRIFT
        told = [f"its first and last quarters differ by {drifted:.0%}"] * moved
        return "; ".join(told + [self.load] * bool(self.load))


def loop_of(case: Case) -> tuple[Loop, Carried, Any]:
    """One token's function, what it carries at first, and the token's inputs."""
    keys = jax.random.split(jax.random.key(0), 3)
    heads = case.G or case.H
    shapes = ((case.B, case.H, case.D), (case.B, heads, case.D), (case.B, heads, case.D))
    token = tuple(
        jax.random.normal(key, shape).astype(case.dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )
    if case.op == "step":
        sums = jnp.zeros(shapes[1], jnp.float32)
        state = ato_jax.LinearState(jnp.zeros((*sums.shape, case.D), jnp.float32), sums)
        return lambda state, qkv: ato_jax.linear_attention_step(*qkv, state), state, token

    def step(cache: Carried, qkv: Any) -> tuple[jax.Array, Carried]:
        keys, values, length = cache
        q, k, v = (one[:, None] for one in qkv)
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(whole, one, length[0], axis=1)
            for whole, one in ((keys, k), (values, v))
        )
        # A full cache stays full: its last row is written again.
        last = jnp.minimum(length + 1, case.S - 1)
        return ato_jax.decode_attention(q, keys, values, lengths=length + 1), (keys, values, last)

    whole = (case.B, case.S, heads, case.D)
    # Half full, so that the loop grows it as a model would.
    length = jnp.full(case.B, case.S // 2, jnp.int32)
    cache = jnp.zeros(whole, case.dtype), jnp.zeros(whole, case.dtype), length
    return step, cache, token


def measure(case: Case, tokens: int) -> Latency:
    step, carried, token = loop_of(case)
    program = jax.jit(step, donate_argnums=0)

    def one() -> float:
        nonlocal carried
        start = time.perf_counter()
        out, carried = program(carried, token)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    first = one()
    for _ in range(WARM_UP):
        one()
    watch = other_load.Watch(ours.platform())
    times = [one() for _ in range(tokens)]
    return Latency(str(case), first, times, watch.told())


def table(found: Sequence[Latency], *more: str) -> Table:
    """A line of each loop; a doubtful one is marked, and no rate is made of it."""
    lines, notes = [], [*more]
    for one in found:
        spread, mark = one.spread, noise.MARK * bool(one.doubt)
        rate = noise.NOISY if one.doubt else f"{1 / spread.p50:.0f}"
        percentiles = [spread.p50, spread.p90, spread.p95, spread.p99, max(one.tokens)]
        cells = [f"{mark}{demo.milliseconds(each)}" for each in percentiles]
        lines.append([one.case, *cells, demo.milliseconds(one.first), rate])
        if one.doubt:
            notes.append(f"  {noise.MARK}{one.case}: {noise.busy(one.doubt)}")
    times = ("p50", "p90", "p95", "p99", "longest", "first token, which compiles")
    head = ["", *(f"{time}, ms" for time in times), "tokens/s a sequence"]
    return Table("Latency of a token in a decode loop", head, lines, notes)


def write(found: Sequence[Latency]) -> None:
    if FLAGS.json:
        rows = [dataclasses.asdict(one) | {"doubt": one.doubt} for one in found]
        results.write(Path(FLAGS.json), json.dumps(kept.facts() | {"rows": rows}, indent=1) + "\n")


def _row(told: dict[str, Any]) -> Latency:
    return Latency(**{name: one for name, one in told.items() if name != "doubt"})


def tables(path: Path) -> list[Table]:
    """The table of a file that `write` wrote, or none where it has no rows."""
    facts, found = kept.rows_of(path, "latency", _row)
    return [table(found, kept.told_of(facts))] if found else []


def main(_: Sequence[str]) -> int:
    platform = ours.platform()
    every = CASES["gpu" if platform == "gpu" else "cpu"]
    wanted = [case for case in every if FLAGS.case in str(case)]
    if not wanted:
        raise ResultsError(
            f"No case of latency contains --case={FLAGS.case!r}: {'; '.join(map(str, every))}"
        )
    found: list[Latency] = []
    kept.clear_the_way()
    write(found)
    progress.start(len(wanted))
    for case in wanted:
        progress.show(str(case))
        found.append(measure(case, FLAGS.tokens))
        progress.step()
        write(found)
    print(table(found).text(), flush=True)
    if platform != "gpu":
        print("\nOn a CPU: how fast a GPU decodes, and what its launch costs, only a GPU can tell.")
    kept.say()
    return 0
