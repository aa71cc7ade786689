"""Linear attention beside its peers: bidirectional, causal, gated and step by step.

For each case, everything that takes it is compiled and compared with float64 first, and then timed
in turns; the figure is the median of the turns. "phi out" marks a peer that takes features in
place of q and k, so that its time leaves out the mapping; "not normalised" one that leaves out the
division, too. The reached share is that of the byte limit of the whole problem, at the bandwidth
of a copy in the same run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import flags, logging

from benchmarks import byte_limit, cases, demo, linear_jax, linear_torch, ours, peers, run, timing
from benchmarks.cases import Case

FLAGS = flags.FLAGS
flags.DEFINE_string("json", "", "linear: where to write all figures, a .json")
flags.DEFINE_float("within_s", 210, "linear: start nothing new after so long", lower_bound=0)
flags.DEFINE_string("case", "", "linear: only cases whose name contains this")
flags.DEFINE_string("contender", "", "linear: only ato_jax and peers whose name contains this")

_bf16 = functools.partial(Case, "linear", dtype="bfloat16")
CASES = {
    # The most telling first: what the time does not suffice for is at the end.
    "gpu": (
        _bf16(B=8, T=65536, H=8, D=64),
        _bf16(B=1, T=16384, H=32, D=128),
        _bf16(B=8, T=65536, H=8, D=64, causal=True),
        _bf16(B=1, T=16384, H=32, D=128, causal=True),
        Case("step", B=64, T=1, H=32, D=128, dtype="bfloat16"),
        _bf16(B=1, T=65536, H=16, D=128, causal=True, decay="step"),
        _bf16(B=8, T=65536, H=8, D=64, causal=True, decay="channel"),
        _bf16(B=4, T=4096, H=16, D=128, causal=True, decay="channel"),
        _bf16(B=8, T=4096, H=8, D=64, causal=True),
        _bf16(B=8, T=4096, H=8, D=64),
        _bf16(B=8, T=1024, H=8, D=64),
        _bf16(B=8, T=16384, H=8, D=64),
        _bf16(B=8, T=16384, H=8, D=64, causal=True, decay="head"),
    ),
    "cpu": (
        Case("linear", B=1, H=2, T=256, D=32, dtype="float32"),
        Case("linear", B=1, H=2, T=256, D=32, dtype="float32", causal=True),
        Case("linear", B=1, H=2, T=256, D=32, dtype="float32", causal=True, decay="step"),
        Case("step", B=2, H=2, T=1, D=32, dtype="float32"),
    ),
}
TURNS = 3
TURN_SECONDS = 0.03
# What takes longer than this is timed in one turn: it is far behind.
SLOW_SECONDS = 0.03

# Times one turn, or says why it cannot.
Turn = Callable[[float], timing.Timing | str]


@dataclasses.dataclass
class Row:
    """What was found of one contender: its turns' seconds and errors, or the reason for neither."""

    case: str
    phase: str
    contender: str
    limit: float
    seconds: float | None = None
    turns: list[float] = dataclasses.field(default_factory=list)
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    unavailable: str = ""

    @property
    def reached(self) -> float | None:
        return self.limit / self.seconds if self.seconds else None


def prepare(peer: peers.Peer, case: Case, phase: str, name: str) -> tuple[dict, Turn] | str:
    """The contender's errors and its turn, or why it has none."""
    if name in linear_torch.CONTENDERS:
        errors = peer.prepare(name, case, phase)
        return errors if isinstance(errors, str) else (errors, functools.partial(peer.time, name))
    try:
        ready = linear_jax.CONTENDERS[name].prepare(case, phase)
    except Exception as error:  # a peer's own: its reason, and on to the next
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ready if isinstance(ready, str) else (ready.errors, ready.time)


def wanted(case: Case) -> list[str]:
    """The names of those that take the case, this library first."""
    found = [name for name, one in linear_jax.CONTENDERS.items() if one.takes(case)]
    if case.op == "linear":
        found += [name for name, one in linear_torch.CONTENDERS.items() if one.takes(case)]
    return [name for name in found if name == "ato_jax" or FLAGS.contender in name]


def measure(
    peer: peers.Peer, case: Case, phase: str, limit: float, left: Callable[[], float]
) -> list[Row]:
    """Rows of all contenders, prepared one by one and then timed in turns."""
    rows, turns = [], {}
    for name in wanted(case):
        row = Row(str(case), phase, name, limit)
        rows.append(row)
        if left() <= 0:
            row.unavailable = "no time left"
            continue
        run.progress(f"{case}, {phase}: {name}")
        ready = prepare(peer, case, phase, name)
        if isinstance(ready, str):
            row.unavailable = ready
        else:
            row.errors, turns[name] = ready
    for turn in range(TURNS):
        for row in rows:
            # At least once, whatever the time.
            slow = row.turns and row.turns[-1] > SLOW_SECONDS
            if row.contender not in turns or turn and (slow or left() <= 0):
                continue
            found = turns[row.contender](TURN_SECONDS)
            if isinstance(found, str):
                row.unavailable = found
                del turns[row.contender]
            else:
                row.turns.append(found.seconds)
    for row in rows:
        row.seconds = statistics.median(row.turns) if row.turns else None
    peer.ask("forget")
    run.progress("")
    return rows


def table(rows: list[Row]) -> str:
    """The rows of one case and phase."""
    head = rows[0]
    lines = [[f"{head.case}, {head.phase}", "ms", "reached", "out", "dq"]]
    for row in rows:
        if row.seconds is None:
            lines.append([f"  {row.contender}: {row.unavailable}", "-", "", "", ""])
            continue
        errors = [f"{row.errors[name]:.1e}" if name in row.errors else "" for name in ("out", "dq")]
        lines.append(
            [f"  {row.contender}", demo.milliseconds(row.seconds), f"{row.reached:.0%}", *errors]
        )
    lines.append(["  byte limit", demo.milliseconds(head.limit), "", "", ""])
    return demo.aligned(lines, texts=1)


def main() -> int:
    platform = ours.platform()
    if platform not in CASES:
        logging.error("The benchmarks run on a CPU or an NVIDIA GPU, JAX computes on %s", platform)
        return 1
    end = time.monotonic() + FLAGS.within_s
    rows: list[Row] = []
    with peers.Peer(platform) as peer:
        about = peer.ask("about")
        if "unavailable" in about:
            logging.error("%s: pip install '.[torch]'", about["unavailable"])
            return 1
        if platform == "gpu":
            device, bandwidth = about["device"], peer.ask("copy", seconds=0.5)["bandwidth"]
        else:
            device, bandwidth = demo.processor(), byte_limit.cpu_bandwidth()
        facts = {
            "device": device,
            "jax": jax.__version__,
            "torch": about["version"],
            "bandwidth": bandwidth,
        }
        print(
            f"{device}; JAX {jax.__version__}, PyTorch {about['version']}; "
            f"a copy moves {bandwidth / 1e12:.3f} TB/s",
            flush=True,
        )
        for case in CASES[platform]:
            if FLAGS.case not in str(case):
                continue
            for phase in cases.PHASES[: 1 if case.op == "step" else 2]:
                limit = byte_limit.limit(case, phase, bandwidth)
                found = measure(peer, case, phase, limit, lambda: end - time.monotonic())
                rows += found
                print("\n" + table(found), flush=True)
                if FLAGS.json:
                    write(Path(FLAGS.json), facts, rows)
    return 0


def write(path: Path, facts: dict[str, Any], rows: list[Row]) -> None:
    """All that was found so far."""
    told = [dataclasses.asdict(row) | {"reached": row.reached} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts | {"rows": told}, indent=1) + "\n")
