"""A file of figures: the rows of all suites that were run, and what they were measured on.

A row belongs to a case, a phase and a contender, whatever suites ask for it. In JSON the file is
whole: it is read back to go on with a run or to compare two. In CSV it is a table for other
programs, a line a row. It is written anew after every group of rows, to another name first: a run
that dies, while it writes too, leaves all that it had.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import machine, noise, summary

# What has to be the same for a run to go on.
SAME = ("device", "machine", "commit", "ato_jax", "jax", "torch")
PLATFORMS = ("gpu", "cpu")
ERRORS = ("out", "dq", "dk", "dv")
# What two machines of one kind have in common beside these; each is noted in `about`.
KIND = ("driver", "highest clock", "CUDA", "Python", *machine.PACKAGES)
# Fields that files written before them lack.
LATER = ("load", "machine", "commit", "form", "spent")
# Of what a file holds: files with a higher number were written by later benchmarks.
FORM = 2
# The reason of a row that was not reached: a later run may reach it.
NO_TIME_LEFT = "no time left"


class ResultsError(Exception):
    """A file cannot be read, written, gone on with or compared; it says why in one line."""


@dataclasses.dataclass
class Row:
    """What was found of one contender: its times and errors, or the reason for neither.

    `limit` is the time of the traffic at the copy bandwidth, `product_limit` that of the operations
    at the rate of a large product of the same dtype. `seconds` is the median of the turns, each
    turn the median of its batches; `spread` is over the batches of all turns. `held` is the bytes
    of inputs and outputs, `scratch` those that a call holds beyond them at its peak; `host` is the
    seconds that a call takes the host; `picked` says what a contender that chooses chose; `load` is
    what other programs did while it was timed. `machine` is empty where it is the file's.
    """

    case: str
    phase: str
    contender: str
    limit: float
    traffic: float
    operations: float
    seconds: float | None = None
    turns: list[float] = dataclasses.field(default_factory=list)
    spread: summary.Spread | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    unavailable: str = ""
    product_limit: float | None = None
    held: int | None = None
    scratch: int | None = None
    host: float | None = None
    picked: str = ""
    load: str = ""
    machine: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case, self.phase, self.contender

    @property
    def reached(self) -> float | None:
        """The share of the byte limit, which is that of the copy bandwidth."""
        return self.limit / self.seconds if self.seconds else None

    @property
    def doubt(self) -> str:
        """Why nothing may be concluded from its time (`noise`); "" where it is steady."""
        return noise.doubt(self.spread, self.turns, self.load) if self.spread else ""

    @property
    def product_share(self) -> float | None:
        """The share of the rate of a large product."""
        return self.product_limit / self.seconds if self.seconds and self.product_limit else None

    @property
    def peak(self) -> int | None:
        """The bytes of a call at its peak."""
        return None if self.scratch is None or self.held is None else self.held + self.scratch

    @property
    def rate(self) -> float | None:
        """Operations per second."""
        return self.operations / self.seconds if self.seconds else None

    @property
    def throughput(self) -> float | None:
        """Bytes of the traffic per second."""
        return self.traffic / self.seconds if self.seconds else None

    def told_errors(self) -> list[str]:
        """Of the output and dq, as the tables print them."""
        return [f"{self.errors[name]:.1e}" if name in self.errors else "" for name in ("out", "dq")]

    def told(self) -> dict[str, Any]:
        """As the file has it: with what follows from the time, for those who read it."""
        return dataclasses.asdict(self) | {
            "TFLOP/s": self.rate and self.rate / 1e12,
            "GB/s": self.throughput and self.throughput / 1e9,
            "reached": self.reached,
            "of the matrix rate": self.product_share,
            "doubt": self.doubt,
        }


@dataclasses.dataclass
class Results:
    """The versions, the bytes that a copy moves per second, and the rows.

    `platform` is "gpu" or "cpu", `matrix` by dtype the operations per second of a large product,
    `about` what else was noted: drivers, peers' versions, clocks. `suites` is the seconds that each
    suite took, `spent` what they went to (`spending`). `machine` and `commit` are empty in files
    that were written before they were noted.
    """

    device: str
    ato_jax: str
    jax: str
    torch: str
    bandwidth: float
    platform: str = "cpu"
    matrix: dict[str, float] = dataclasses.field(default_factory=dict)
    about: dict[str, str] = dataclasses.field(default_factory=dict)
    suites: dict[str, float] = dataclasses.field(default_factory=dict)
    spent: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    machine: str = ""
    commit: str = ""
    form: int = FORM
    rows: list[Row] = dataclasses.field(default_factory=list)


def json_text(results: Results) -> str:
    rows = [row.told() for row in results.rows]
    without = dataclasses.replace(results, rows=[])
    return json.dumps(dataclasses.asdict(without) | {"rows": rows}, indent=1) + "\n"


def csv_text(results: Results) -> str:
    """Every line has the device and the versions, too: lines of several files may be put together.

    The turns are left out, a list in a cell is nobody's.
    """
    about = {name: getattr(results, name) for name in (*SAME, "bandwidth")}
    blank = {field.name: None for field in dataclasses.fields(summary.Spread)}
    lines = []
    for row in results.rows:
        told = row.told()
        errors = {f"error of {name}": row.errors.get(name) for name in ERRORS}
        spread, reason = told.pop("spread") or blank, told.pop("unavailable")
        told["machine"] = told["machine"] or results.machine
        del told["turns"], told["errors"]
        lines.append(about | told | spread | errors | {"unavailable": reason})
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, lines[0] if lines else about, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def write(path: Path, text: str) -> None:
    """All of it or nothing: the file is never half written."""
    if path.exists() and not path.is_file():
        raise ResultsError(f"{path} cannot be written: it is not a file")
    beside = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text)
        beside.replace(path)
    except OSError as error:
        raise ResultsError(f"{path} cannot be written: {error.strerror}") from error


def read(path: Path) -> Results:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ResultsError(f"{path} is not JSON: {error}") from error
    try:
        return _results(found)
    except _UnknownFormError as error:
        raise ResultsError(f"{path} is not a file of these benchmarks' figures: {error}") from error


class _UnknownFormError(Exception):
    """What is not as `json_text` writes it."""


def _demand(fits: bool, what: str) -> None:
    if not fits:
        raise _UnknownFormError(what)


def _fields(of: type, told: Any, where: str) -> dict[str, Any]:
    """The values of a dataclass's fields. A file may have more: what follows from them."""
    _demand(isinstance(told, dict), f"{where} is no object")
    names = [field.name for field in dataclasses.fields(of)]
    absent = [name for name in names if name not in told and name not in LATER]
    _demand(not absent, f"{where} lacks {', '.join(absent)}")
    return {name: told[name] for name in names if name in told}


def _positive(value: Any) -> bool:
    """A time, or what a time is divided by."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0


def _results(told: Any) -> Results:
    if isinstance(told, Mapping) and isinstance(form := told.get("form", 1), int):
        _demand(
            form <= FORM,
            f"it is of form {form}, of later benchmarks: these read forms up to {FORM}",
        )
    found = dataclasses.replace(Results(**_fields(Results, told, "it")), form=FORM)
    for name in SAME:
        _demand(isinstance(getattr(found, name), str), f"{name} is no text")
    _demand(found.platform in PLATFORMS, "platform is neither gpu nor cpu")
    _demand(_positive(found.bandwidth), "bandwidth is no number above 0")
    _demand(_is_errors(found.matrix), "matrix has no numbers by name")
    _demand(_is_errors(found.suites), "suites has no numbers by name")
    of_suites = isinstance(found.spent, Mapping) and all(map(_is_errors, found.spent.values()))
    _demand(of_suites, "spent has no numbers by name")
    _demand(_is_texts(found.about), "about has no texts by name")
    _demand(isinstance(found.rows, list), "rows is no list")
    found.rows = [_row(row, f"row {number}") for number, row in enumerate(found.rows, 1)]
    return found


def _is_errors(told: Any) -> bool:
    return isinstance(told, Mapping) and all(isinstance(one, int | float) for one in told.values())


def _is_texts(told: Any) -> bool:
    return isinstance(told, Mapping) and all(isinstance(one, str) for one in told.values())


def _row(told: Any, where: str) -> Row:
    row = Row(**_fields(Row, told, where))
    for name in ("case", "phase", "contender", "unavailable", "picked", "load", "machine"):
        _demand(isinstance(getattr(row, name), str), f"{where}: {name} is no text")
    for name in ("limit", "traffic", "operations"):
        _demand(_positive(getattr(row, name)), f"{where}: {name} is no number above 0")
    for name in ("product_limit", "held", "scratch", "host"):
        value = getattr(row, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        _demand(value is None or number, f"{where}: {name} is no number from 0 on")
    _demand(_is_errors(row.errors), f"{where}: errors are no numbers by name")
    _demand(isinstance(row.turns, list), f"{where}: turns is no list")
    if row.seconds is None:
        _demand(row.unavailable != "", f"{where} has neither a time nor a reason")
        row.spread = None
        return row
    row.spread = summary.Spread(**_fields(summary.Spread, row.spread, f"{where}: spread"))
    percentiles = dataclasses.asdict(row.spread)
    percentiles = [percentiles[f"p{percent}"] for percent in (25, 50, 75, 90, 95, 99)]
    times = [row.seconds, *row.turns, *percentiles]
    _demand(bool(row.turns) and all(map(_positive, times)), f"{where}: a time is no number above 0")
    return row
