"""Makes the tables of the suite `cliffs` about float8 calls: one of times and one of errors.

Rows without a time and rows that miss their target come first. A ratio is of two steady times of
one run; where one of them is lacking there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from benchmarks import cliff_rows, findings, float8, results, tables
from benchmarks.cases import PHASES
from benchmarks.cliff_rows import BASE, OURS, PLAIN, Step
from benchmarks.results import NO_TIME_LEFT, Results
from benchmarks.tables import Table

GROUP = "float8"
PEER = next(iter(float8.PEERS))
# By contender the rows of one step, its own and those beside it.
Rows = Mapping[str, results.Row | None]

# The words by which a table names a contender that was timed beside the row.
NAMES = {BASE: "bfloat16", PLAIN: "without the option"}
TIMES = "Float8 inputs beside bfloat16"
HEAD = (
    "call",
    "size",
    "ms",
    "bfloat16, ms",
    "bfloat16 / float8",
    "without the option, ms",
    f"{PEER}, ms",
    "cuDNN / float8",
    "share",
    "bfloat16's share",
    "target",
    "reached",
    "error",
    "None is",
)
NOTE = (
    "Every row is a forward call on q, k and v of float8_e4m3fn with an output in bfloat16, since "
    "float8 inputs have no gradients. It was timed in turns with the same call in bfloat16, an "
    "option also with the float8 call without it, and plain softmax attention also with "
    f"{PEER}, whose output has 8 bits, too. A ratio is of times: above 1x the float8 call is "
    "faster. Share is the time in which a copy moves the call's own bytes, one byte for each "
    "element of q, k and v and two of the output, over the call's time. Target is the least share "
    "as a part of bfloat16's share, of the byte limit, or the least speed beside bfloat16; reached "
    "is over 1 where it is met. Error is the output's relative RMS error beside XLA's float32 "
    "result on the same float8 inputs. None is: the backend that a call without an implementation "
    "runs on; widened says that it runs on arrays widened to bfloat16."
)

ERRORS = "Errors of float8 calls against float64"
ERRORS_HEAD = (
    "call",
    "size",
    "inputs",
    "q and k",
    "same float8 inputs",
    "at most",
    "inputs not quantised",
    "bfloat16",
)
ERRORS_NOTE = (
    f"Relative RMS errors of the output, of {float8.QUERIES} queries of {float8.HEADS} heads, "
    "against float64: on the same float8 inputs, and on the bfloat16 inputs before they were "
    "quantised. The last column is the error of the call on these bfloat16 inputs. Rotated is: "
    "`ato_jax.rotate` was applied to q and k ahead of `quantize`, which only softmax attention and "
    'the feature map "identity" allow. Rows above the error that is wanted come first.'
)


def size_of(step: Step) -> str:
    heads, _, rest = step.size.partition(" D")
    return f"{heads} T{step.row.T} D{rest}"


def rows_of(step: Step, known: Mapping[tuple[str, str, str], results.Row]) -> Rows:
    return {name: known.get((str(step.row), PHASES[0], name)) for name in (OURS, *step.beside)}


def reached(step: Step, rows: Rows) -> float | None:
    """The share over the share that meets the target; None without steady times."""
    row, base = rows[OURS], rows[BASE]
    if step.target is None or row is None or row.reached is None or row.doubt:
        return None
    if base is None or not base.seconds or base.doubt or base.machine != row.machine:
        return None
    needed = step.target.share(row, base)
    return row.reached / needed if needed else None


def share(row: results.Row | None) -> str:
    return tables.number(row.reached if row and not row.doubt else None)


def said(step: Step, rows: Rows) -> str:
    """Why a row has no time or no steady one; else what runs, and what is lacking beside it."""
    row = rows[OURS]
    if row is None:
        return "-"
    if row.unavailable or row.doubt:
        return row.unavailable or row.doubt
    told = [row.picked]
    for name in step.beside:
        one = rows[name]
        lacking = "not measured" if one is None else one.unavailable or one.doubt
        if lacking:
            told.append(f"{NAMES.get(name, name)}: {lacking}")
    return "; ".join(told)


def cells(step: Step, rows: Rows) -> tuple[str, ...]:
    row, base, peer = rows[OURS], rows[BASE], rows.get(PEER)
    return (
        step.name.removeprefix(f"{GROUP} "),
        size_of(step),
        tables.milliseconds(row),
        tables.milliseconds(base),
        findings.times(base, row),
        tables.milliseconds(rows.get(PLAIN)) if step.plain else "",
        tables.milliseconds(peer) if step.peer else "",
        findings.times(peer, row) if step.peer else "",
        share(row),
        share(base),
        str(step.target or "-"),
        tables.number(reached(step, rows)),
        f"{row.errors['out']:.1e}" if row and "out" in row.errors else "-",
        said(step, rows),
    )


def _order(step: Step, rows: Rows) -> tuple[bool, bool, float]:
    """Rows without a time, those that miss a target, and then all from the slowest on."""
    row, base, found = rows[OURS], rows[BASE], reached(step, rows)
    ratio = findings.steady_ratio(base, row) if base and row and base.seconds else None
    missed = found is not None and found < 1
    value = found if missed and found is not None else ratio or math.inf
    return bool(row and row.seconds), not missed, value


def of(found: Results) -> list[Table]:
    """The tables of what was measured; none where no float8 row was."""
    known = {row.key: row for row in found.rows}
    every = [
        (step, rows_of(step, known))
        for step in cliff_rows.STEPS[found.platform]
        if step.group == GROUP
    ]
    seen = [(step, rows) for step, rows in every if rows[OURS]]
    measured = [(step, rows) for step, rows in seen if not _late(rows)]
    if not measured:
        return []
    measured.sort(key=lambda one: _order(*one))
    held = [ratio >= 1 for one in measured if (ratio := reached(*one)) is not None]
    notes = [NOTE, f"{sum(held)} of {len(held)} float8 rows with a target meet it."]
    if len(measured) < len(every):
        notes.append(f"{len(every) - len(measured)} of {len(every)} float8 rows are not measured.")
    told = [Table(TIMES, HEAD, [cells(*one) for one in measured], notes, 2)]
    lines = [line for step, rows in measured if step.errors for line in _errors(step, rows)]
    if lines:
        lines.sort(key=lambda line: line[:2])
        notes = [ERRORS_NOTE]
        within = sum(one for one, *_ in lines)
        notes.append(f"{within} of {len(lines)} rows are within the error that is wanted.")
        told.append(Table(ERRORS, ERRORS_HEAD, [cells for *_, cells in lines], notes, 4))
    return told


def _late(rows: Rows) -> bool:
    row = rows[OURS]
    return row is not None and row.unavailable == NO_TIME_LEFT


def _errors(step: Step, rows: Rows) -> list[tuple[bool, float, tuple[str, ...]]]:
    """Lines of the table of errors: whether the error is within what is wanted, how they are sorted
    beside their like, and the cells.
    """
    row, base = rows[OURS], rows[BASE]
    most, lines = float8.LIMITS[step.row.op], []
    feature_map = dict(step.row.options).get("feature_map")
    for name in (float8.NORMAL, float8.OUTLIERS):
        for rotated in (False, True) if float8.rotates(step.row.op, feature_map) else (False,):
            same, before = (
                row.errors.get(float8.name_of(name, against, rotated)) if row else None
                for against in (float8.SAME, float8.BEFORE)
            )
            # What was not measured is not within it, nor is NaN.
            within = same is not None and same <= most
            size = math.inf if same is None or math.isnan(same) else same / most
            cells_of_line = (
                step.name.removeprefix(f"{GROUP} "),
                size_of(step),
                name,
                float8.ROTATED if rotated else "as they are",
                _number(same),
                f"{most:.0e}",
                _number(before),
                _number(base.errors.get(name) if base else None),
            )
            lines.append((within, -size, cells_of_line))
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
