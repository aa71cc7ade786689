"""Options that are slower than their targets: a table of the document, and `ato_jax/slower.toml`.

    factor = base / share in the table of the suite `cliffs`
           = time for each byte of a call with the option / that of its base case, timed in turns

A row of the table is an option in one size that misses its target in a phase; shapes that a seed
drew are left out, since no option is the reason for their time. `slower.toml`, which `explain`
reads, has the options of linear attention with a factor of at least `slower.LEAST`. `python -m
benchmarks report` writes both; `python -m tests.support` then puts the factors into
docs/support.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ato_jax import slower
from benchmarks import cliff_rows, cliffs, float8_tables
from benchmarks.cases import PHASES
from benchmarks.choices import Row
from benchmarks.cliff_rows import Step
from benchmarks.results import Results
from benchmarks.tables import Table

HEAD = ("option", "size", *PHASES, "at most", "None is")
TITLE = "Options slower than their targets"
# Groups of `cliffs` without an option of a bfloat16 call at a size that was chosen.
APART = ("drawn", float8_tables.GROUP)
# In the names of cards of the architecture `slower.CAPABILITY`.
HOPPERS = ("H100", "H200")


@dataclasses.dataclass(frozen=True)
class Factor:
    """How many times as long as its base case a row takes for each byte, in one phase.

    `wanted` is the factor that meets the target. It is None where the row has no target.
    """

    step: Step
    phase: str
    times: float
    wanted: float | None
    backend: str


def factors(found: Results) -> Iterator[Factor]:
    """Yields the factors of all rows whose times were steady."""
    rows = {row.key: row for row in found.rows}
    for step in cliff_rows.STEPS[found.platform]:
        for phase in step.phases:
            row, base = (
                rows.get((str(step.row), phase, name)) for name in (cliffs.OURS, cliffs.BASE)
            )
            if step.group in APART or row is None or row.doubt:
                continue
            line = cliffs.line_of(step, phase, row, base)
            if line.ratio and line.reached:
                wanted = line.reached / line.ratio if step.target else None
                yield Factor(step, phase, 1 / line.ratio, wanted, row.picked)


def tables(found: Results) -> list[Table]:
    """The options that miss a target, the worst first; no table where none does."""
    by_step: dict[Step, dict[str, Factor]] = {}
    for factor in factors(found):
        by_step.setdefault(factor.step, {})[factor.phase] = factor

    def missed(of_step: dict[str, Factor]) -> float:
        """The largest part by which a factor is above what is wanted."""
        return max(one.times / one.wanted for one in of_step.values() if one.wanted)

    aimed = [one for step, one in by_step.items() if step.target]
    short = sorted((one for one in aimed if missed(one) > 1), key=missed, reverse=True)
    if not short:
        return []
    lines = []
    for of_step in short:
        step = next(iter(of_step.values())).step
        wanted = dict.fromkeys(_number(one.wanted) for one in of_step.values())
        backends = dict.fromkeys(one.backend for one in of_step.values())
        cells = [_number(of_step[phase].times) if phase in of_step else "-" for phase in PHASES]
        lines.append([step.name, step.size, *cells, ", ".join(wanted), " then ".join(backends)])
    notes = [
        "The columns forward and forward + backward have the time that a call takes for each byte, "
        "over that of its base case; at most is the factor that meets the target, where there are "
        "two numbers the first is for forward calls. Each row misses it in at least one phase, and "
        "the worst comes first. Base cases, and the rows that a seed drew, are in the table below. "
        "None is: the backends that a call without an implementation ran on when it was measured.",
        f"{len(short)} of {len(aimed)} options, each in one size, are here.",
    ]
    return [Table(TITLE, HEAD, lines, notes, texts=2)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def traits(row: Row) -> dict[str, Any]:
    """Those of the call's spec that `slower.OPTIONS` asks for."""
    return {
        "dtype": row.dtype,
        "D": row.D,
        "V": row.V or row.D,
        "causal": row.causal,
        "decay": row.decay or "none",
        "segments": "self" if row.documents else "none",
        "features": "projected"
        if dict(row.options).get("feature_map") == "favor"
        else "elementwise",
        "precision": "tf32" if row.tf32 else "exact",
    }


def option_of(row: Row) -> slower.Option | None:
    return slower.option_of(traits(row)) if row.op == "linear_attention" else None


def entries(found: Results) -> dict[str, dict[str, dict[str, Any]]]:
    """By option and phase: the backend of the largest factor, and that backend's least and most."""
    by_option: dict[str, dict[str, list[Factor]]] = {}
    for factor in factors(found):
        if option := option_of(factor.step.row):
            phase = slower.FORWARD if factor.phase == PHASES[0] else slower.TRAINING
            by_option.setdefault(option.name, {}).setdefault(phase, []).append(factor)
    told: dict[str, dict[str, dict[str, Any]]] = {}
    for option in slower.OPTIONS:
        of_option = by_option.get(option.name, {})
        every = [one.times for of_phase in of_option.values() for one in of_phase]
        if every and max(every) >= slower.LEAST:
            told[option.name] = {phase: _entry(of_phase) for phase, of_phase in of_option.items()}
    return told


def _entry(of_phase: list[Factor]) -> dict[str, Any]:
    backend = max(of_phase, key=lambda one: one.times).backend
    times = [one.times for one in of_phase if one.backend == backend]
    return {"backend": backend, "least": round(min(times), 1), "most": round(max(times), 1)}


def toml_text(every: list[Results]) -> str:
    """`slower.toml`, of the first card of the architecture that has rows; "" if none has."""
    for found in every:
        hopper = any(name in found.device for name in HOPPERS)
        if not hopper or not (told := entries(found)):
            continue
        parts = [
            "# Options of linear attention that take long, see slower.py.\n"
            "# Made by python -m benchmarks report.",
            f'card = "{found.device}"',
        ]
        for name, phases in told.items():
            lines = [f'[[options]]\nname = "{name}"']
            for phase, entry in phases.items():
                least, most = entry["least"], entry["most"]
                of_phase = f'backend = "{entry["backend"]}", least = {least}, most = {most}'
                lines.append(f"{phase} = {{{of_phase}}}")
            parts.append("\n".join(lines))
        return "\n\n".join(parts) + "\n"
    return ""
