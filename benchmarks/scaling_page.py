"""The tables of docs/scaling.md: what the model of `scaling` predicts, and what was measured.

    python -m benchmarks scaling        writes them
    python -m benchmarks run --suite=devices --devices=1,2 --json=benchmarks/results/devices/N.json
                                        measures on the GPUs of a host

A prediction beside a measured row takes the call's time on one GPU from the same run, and from the
model what the collectives take. A call that is cut by heads or batch sends nothing: its prediction
is the time on one GPU over n, and what pieces of sequences read twice where that leaves few walks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import noise, results, scaling
from benchmarks.cases import PHASES
from benchmarks.devices import GROUPS, Case, Found

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
BEGIN, END = "<!-- scaling -->", "<!-- /scaling -->"
FOLDER = Path(__file__).parent / "results" / "devices"
SCHEDULES = {"ring": scaling.ring_seconds, "all_gather": scaling.gathered_seconds}
# What each device of a cut call computes besides, over the time on one, forward and with gradients:
# with a decay per channel the queries' passes of the backward run twice, of which the first makes
# the states' cotangents, and forward four GPUs took a fifth more than a quarter, whose cause no
# trace has shown; in the delta rule, in plain JAX, the D x D matrix that the steps apply to
# a state takes as long as the rest.
AGAIN = {
    ("linear_attention", "channel"): (0.2, 0.24),
    ("gated_delta_rule", "step"): (1.0, 1.0),
}
# Arrays of the inputs' size that causal linear attention without a decay reads and writes forward:
# a walk for each head of each sequence, where these fill a GPU's multiprocessors; else sequences
# are cut into pieces, whose keys and values are read once more.
WALKS, WHOLE, IN_PIECES = 100, 4.0, 5.5
CASES = {str(case): case for case, _ in GROUPS["gpu"]}


def size(count: float) -> str:
    """Such as "8.45 MB"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def took(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def label(T: int) -> str:
    return f"{T >> 20}M" if T >= 1 << 20 else f"{T >> 10}K"


def bytes_table(T: int) -> str:
    linear, softmax = scaling.LINEAR, scaling.SOFTMAX
    rows = []
    for n in scaling.COUNTS[1:]:
        of_keys = n, 1, T, softmax.G, softmax.D, softmax.V, scaling.BFLOAT16, True
        cells = [
            scaling.linear_bytes(n, 1, linear.G, linear.D, linear.V, both=True),
            scaling.delta_rule_bytes(n, 1, linear.H, linear.D, linear.V, both=True),
            scaling.gathered_bytes(*of_keys),
            scaling.ring_bytes(*of_keys),
        ]
        rows.append([str(n), *(size(sum(cell.values())) for cell in cells)])
    return table(["GPUs", "linear", "delta rule", "softmax, gathered", "softmax, ring"], rows)


def times_table(T: int) -> str:
    rows = []
    for n in scaling.COUNTS:
        cells = [str(n)]
        for seconds in (scaling.linear_seconds, scaling.gathered_seconds, scaling.ring_seconds):
            here = seconds(T, n)
            cells += [took(here), f"{seconds(T, 1) / here / n:.0%}"]
        rows.append(cells)
    header = ["GPUs", "linear", "of n", "gathered", "of n", "ring", "of n"]
    return table(header, rows)


def crossover(n: int, within: float, both: bool) -> int | None:
    """The fewest rows, a power of two up to 128M, at which the ring takes no more than `within`
    times as long as the all-gather."""
    for power in range(10, 28):
        T = 1 << power
        ring, gathered = scaling.ring_seconds(T, n, both), scaling.gathered_seconds(T, n, both)
        if T >= 2 * n and ring <= within * gathered:
            return T
    return None


def crossover_table() -> str:
    columns = (1.1, False), (1.1, True)
    rows = []
    for n in scaling.COUNTS[1:]:
        found = [crossover(n, *column) for column in columns]
        rows.append([str(n), *(label(T) if T else "-" for T in found)])
    return table(["GPUs", "forward", "forward and backward"], rows)


def memory_table() -> str:
    rows = []
    for T in (1 << 20, 1 << 24):
        for n in (1, 8, 64, 256):
            cells = [scaling.memory(kind, T, n) for kind in ("linear", "all_gather", "ring")]
            fits = [
                f"{size(cell)}{'' if cell <= scaling.MEMORY else ', too much'}" for cell in cells
            ]
            rows.append([label(T), str(n), *fits])
    return table(["T", "GPUs", "linear", "softmax, gathered", "softmax, ring"], rows)


# -- what was measured ---------------------------------------------------------------------------


def traffic(walks: int) -> float:
    return WHOLE if walks >= WALKS else IN_PIECES


def predicted(case: Case, phase: str, n: int, alone: dict[str, float]) -> float | None:
    """Seconds on n GPUs; None where the phase that the prediction needs has no time on one.

    Args:
      alone: the seconds of each phase of the call on one GPU.
    """
    call, both = case.call, phase == PHASES[1]
    if case.cut != "time":
        more = 1.0
        if call.op == "linear_attention" and call.decay is None and not both:
            more = traffic(call.B * call.H // n) / traffic(call.B * call.H)
        return more * alone[phase] * case.work(n) / n
    if not all(name in alone for name in PHASES):
        return None
    measured = scaling.Call(
        call.op, call.H, call.H, call.D, call.D, call.T,
        seconds=(alone[PHASES[0]], alone[PHASES[1]]), power=2 if case.schedule else 1,
        again=AGAIN.get((call.op, str(call.decay)), (0.0, 0.0)),
    )  # fmt: skip
    seconds = SCHEDULES.get(case.schedule, scaling.linear_seconds)
    return seconds(case.whole(n).T, n, both, measured)


def by_call(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The median seconds of each phase of a call on one GPU, from its last steady row on most GPUs.
    """
    found: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: row["devices"]):
        phases = found.setdefault(str(CASES[row["row"]].call), {})
        if "one" in row["seconds"] and not Found.of_file(row).doubt:
            phases[row["phase"]] = row["seconds"]["one"]
    return found


def line(row: dict[str, Any], alone: dict[str, float]) -> list[str]:
    case, n = CASES[row["row"]], row["devices"]
    one, many = row["seconds"]["one"], row["seconds"]["all"]
    taken = row.get("collective_seconds")
    model = predicted(case, row["phase"], n, alone | {row["phase"]: one})
    doubt = Found.of_file(row).doubt
    mark, model = noise.MARK * bool(doubt), None if doubt else model
    return [
        row["row"].replace("_", " "),
        row["phase"],
        str(n),
        f"{mark}{1e3 * one:.4g}",
        f"{mark}{1e3 * many:.4g}",
        noise.NOISY if doubt else f"{row['speed_up'] / n:.1%}",
        size(row["received"]) if row["received"] else "nothing",
        "-" if taken is None else f"{1e3 * taken:.3g}",
        "-" if model is None else f"{1e3 * model:.4g}",
        "-" if model is None else f"{many / model - 1:+.0%}",
    ]


def section(path: Path) -> str:
    """The rows of one run, as Markdown."""
    run = json.loads(path.read_text())
    rows = [row for row in run["rows"] if row["seconds"]]
    alone = by_call(rows)
    header = ["call", "phase", "GPUs", "one GPU, ms", "all, ms", "of linear", "a GPU receives"]
    header += ["collectives, ms", "predicted, ms", "measured over it"]
    about = run["about"]
    facts = f"{run['count']} x {run['device']}, {about['date']}, JAX {run['jax']}"
    worst = max(max(row["errors"].values()) for row in rows)
    return "\n\n".join(
        [
            f"### {facts}",
            "Medians; the program on one GPU and that on all ran in turns. A row on one GPU is the "
            "program that cuts the call, on a mesh of one. Results and gradients were compared "
            f"with one GPU's first, at most {worst:.1e} apart, and two runs on all GPUs gave the "
            "same bits. The time of the collectives is a trace's, on the mean of the GPUs: it has "
            "what they wait for each other, and may pass beside other kernels.",
            table(header, [line(row, alone[str(CASES[row["row"]].call)]) for row in rows]),
            *[noise.LEGEND] * any(Found.of_file(row).doubt for row in rows),
        ]
    )


def measured() -> list[str]:
    sections = [section(path) for path in files()]
    return ["## Measured", *sections] if sections else []


# -- the page ------------------------------------------------------------------------------------


def tables() -> str:
    """All of them, in Markdown."""
    parts = [
        "## Bytes",
        "Bytes that a GPU receives, forward and backward, T = 1M:",
        bytes_table(1 << 20),
        "## Times",
        *(
            text
            for T in (1 << 17, 1 << 20)
            for text in (
                f"Forward and backward, T = {label(T)}; \"of n\" is the speed-up over the number "
                "of GPUs:",
                times_table(T),
            )
        ),
        "## Ring or all-gather",
        "By the model the all-gather is always the faster one, where its keys and values fit. The "
        "fewest rows, a power of two up to 128M, at which the ring takes at most 10% longer:",
        crossover_table(),
        "## What fits",
        f"Bytes on a GPU, forward and backward; more than {scaling.MEMORY / 1e9:.0f} GB are too "
        "much for an H200:",
        memory_table(),
        *measured(),
    ]
    return "\n\n".join(parts)


def page(text: str) -> str:
    """The page with its tables made again."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def files() -> list[Path]:
    """What was measured on several devices."""
    return sorted(FOLDER.glob("*.json"))


def main(_: Sequence[str] = ()) -> int:
    results.write(PAGE, page(PAGE.read_text()))
    print(f"wrote {PAGE}")
    return 0
