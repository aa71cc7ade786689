"""The files that a run keeps: its figures, written after every group of rows, and the name of what
runs now, so that `--resume` goes on with the one and without the other.

`merge A.json B.json --json=ALL.json` puts parts of a report together. Parts are resumed and merged
within one machine and one commit alone: a ratio of two runs would be of two machines otherwise.

With `--another_machine` a run goes on with what another machine measured, if the card's name, the
driver, all versions and the commit are the same, and a copy and large products run at about the
rates there. Each case and phase is of one machine still: those that the file has in part are
measured anew, each row of the second machine says so, and no ratio is made of rows of two.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from absl import flags

import ato_jax
from ato_jax import device
from benchmarks import machine, noise, results, spending
from benchmarks.results import NO_TIME_LEFT, Results, ResultsError, Row

# A row of a suite's own kind.
Own = TypeVar("Own")

FLAGS = flags.FLAGS
flags.DEFINE_string("json", "", "run: where to write all figures, a .json")
flags.DEFINE_string("csv", "", "run: where to write a line for each row, a .csv")
flags.DEFINE_bool("resume", False, "run: keep the figures in --json, measure what it lacks")
flags.DEFINE_bool("keep", False, "run: --json is the file of this device in benchmarks/results")
flags.DEFINE_bool(
    "another_machine", False, "run: with --resume, go on on another machine of the same kind"
)
flags.register_multi_flags_validator(
    ["resume", "json", "keep"],
    lambda given: given["json"] or given["keep"] or not given["resume"],
    "--resume goes on with the file that --json names",
)

# How far the rates of two machines of one kind may lie apart. A copy's are those that every row's
# byte limit is of; what large products reach depends on the power that a host gives its cards.
MOST_APART, MOST_APART_OF_PRODUCTS = 0.10, 0.25
# How often a row may be running when a run dies: the next run measures it once more.
MOST_ENDS = 2
# The rows that were running when the last run died.
_cut_off: set[tuple[str, str, str]] = set()
# This machine, where another one began the file.
_here = ""


def write(found: Results) -> None:
    if FLAGS.json:
        results.write(Path(FLAGS.json), results.json_text(found))
    if FLAGS.csv:
        results.write(Path(FLAGS.csv), results.csv_text(found))


def say() -> None:
    """Prints the names of the files that were written."""
    for path in (FLAGS.json, FLAGS.csv):
        if path:
            print(path, flush=True)


def mark(case: str, phase: str, name: str) -> None:
    """Writes beside the file of figures what runs now, and how often a run has died of it, or with
    no name that nothing runs. What ends this program twice is left out when the run is resumed.
    """
    if not FLAGS.json:
        return
    if name:
        ends = 1 + ((case, phase, name) in _cut_off)
        results.write(doing(Path(FLAGS.json)), json.dumps([case, phase, name, ends]))
    else:
        doing(Path(FLAGS.json)).unlink(missing_ok=True)


def unmark() -> None:
    """What runs now does not end this program: a user does, or the time is up."""
    mark("", "", "")


def signed(rows: Sequence[Row]) -> Sequence[Row]:
    """Rows that were measured here, with this machine where another one began the file."""
    for row in rows:
        row.machine = _here
    return rows


def earlier() -> Results | None:
    """The file of figures that a run with --resume goes on with, if there is one yet."""
    path = Path(FLAGS.json)
    if FLAGS.resume and not path.exists():
        print(f"There are no figures in {path} yet: the run begins them", flush=True)
        return None
    return results.read(path) if FLAGS.resume else None


def begun(facts: dict[str, Any], before: Results | None) -> Results:
    """The figures that a run adds to, `facts` being those of `Results` about this machine."""
    global _here
    here = Results(**facts)
    _here = here.machine if before and before.machine != here.machine else ""
    _cut_off.clear()
    found = resumed(Path(FLAGS.json), before, here) if before else here
    clear_the_way()
    # Before anything is measured: a file that cannot be written is known now.
    write(found)
    return found


def clear_the_way() -> None:
    """Before a run writes --json for the first time, unless it goes on with that file."""
    if FLAGS.json and not FLAGS.resume:
        set_aside(Path(FLAGS.json))


def set_aside(path: Path) -> None:
    """Figures that are there are not lost to a new run of the same name."""
    if path.is_file() and path.stat().st_size:
        aside = path.with_name(path.name + ".earlier")
        path.replace(aside)
        print(f"The figures that were in {path} are in {aside} now", flush=True)


def doing(path: Path) -> Path:
    return path.with_name(path.name + ".doing")


def resumed(path: Path, earlier: Results, here: Results) -> Results:
    """What was found earlier, to go on with.

    It keeps its copy bandwidth: the byte limits of one file are of one bandwidth.
    """
    about = earlier.about | here.about
    if earlier.machine != here.machine and FLAGS.another_machine:
        demand_same(path, *(_facts(one) | {"machine": ""} for one in (earlier, here)))
        if unlike := rates_apart(earlier, here):
            raise ResultsError(f"{path} cannot be resumed on this machine: {unlike}")
        about["machines"] = _machines(earlier, here)
    else:
        demand_same(path, *(_facts(one) for one in (earlier, here)))
    kept = [row for row in earlier.rows if row.unavailable != NO_TIME_LEFT]
    if doing(path).exists():
        case, phase, name, *ends = json.loads(doing(path).read_text())
        if (*ends, 1)[0] < MOST_ENDS:
            _cut_off.add((case, phase, name))
            print(f"The last run ended in {case}, {phase}: {name}; it is tried again", flush=True)
        else:
            kept.append(Row(case, phase, name, 1.0, 1.0, 1.0, unavailable="ended this program"))
        doing(path).unlink()
    if earlier.machine != here.machine:
        kept = _whole(path, earlier, kept)
    print(
        f"{len(kept)} rows are from {path}, byte limits at its copy's "
        f"{earlier.bandwidth / 1e12:.3f} TB/s",
        flush=True,
    )
    return dataclasses.replace(earlier, rows=kept, about=about)


def _whole(path: Path, earlier: Results, kept: list[Row]) -> list[Row]:
    """Without the cases and phases of which rows are lacking: this machine measures all of them.
    The file as it was stays beside the new one.
    """
    groups = {(row.case, row.phase) for row in earlier.rows if row.unavailable == NO_TIME_LEFT}
    groups |= {(case, phase) for case, phase, _ in _cut_off}
    whole = [row for row in kept if (row.case, row.phase) not in groups]
    if len(whole) < len(kept):
        results.write(path.with_name(path.name + ".earlier"), results.json_text(earlier))
    return whole


def rates_apart(there: Results, here: Results) -> str:
    """Where a copy or a large product runs at other rates on two machines; "" where they do not."""
    rates = [("a copy", MOST_APART, (there.bandwidth, here.bandwidth))]
    for dtype in sorted(there.matrix.keys() & here.matrix.keys()):
        both = there.matrix[dtype], here.matrix[dtype]
        rates.append((f"a large product of {dtype}", MOST_APART_OF_PRODUCTS, both))
    for what, allowed, both in rates:
        apart = noise.drift(both)
        if apart is not None and apart > allowed:
            return (
                f"{what} ran at {both[0]:.3g} a second there and at {both[1]:.3g} here, "
                f"{apart:.0%} apart"
            )
    return ""


def _machines(earlier: Results, here: Results) -> str:
    """The machines of a file with the rates of each."""
    told = earlier.about.get("machines", "") or _rates(earlier)
    return told if here.machine in told else f"{told}; {_rates(here)}"


def _rates(found: Results) -> str:
    rates = "".join(f", {dtype} {rate / 1e12:.0f}" for dtype, rate in found.matrix.items())
    return f"{found.machine or 'not noted'} (a copy {found.bandwidth / 1e12:.2f} TB/s{rates})"


@functools.cache
def facts() -> dict[str, Any]:
    """The card, commit and versions that a file of results names, where JAX alone was measured."""
    here = device.describe(jax.devices()[0])
    return {
        "device": here.name,
        "commit": machine.commit(),
        "ato_jax": ato_jax.__version__,
        "jax": jax.__version__,
        "about": machine.about() | {"clocks": machine.clocks() or "not noted"},
    }


def told_of(found: Mapping[str, Any]) -> str:
    """What `facts` returned, as a sentence below a table."""
    about = found.get("about", {})
    if not about:
        return ""
    when = f" on {about['date']}" if about.get("date") else ""
    told = [f"commit {found.get('commit') or 'not noted'}", f"JAX {found.get('jax', 'not noted')}"]
    told += [f"driver {about['driver']}"] if "driver" in about else []
    return f"Measured{when} with {', '.join(told)}."


def rows_of(
    path: Path, suite: str, row_of: Callable[[dict[str, Any]], Own]
) -> tuple[dict[str, Any], list[Own]]:
    """The facts and the rows of a file that a suite wrote with rows of its own kind."""
    try:
        told = json.loads(path.read_text())
        rows = [row_of(row) for row in told.pop("rows")]
        told["device"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path} holds no rows of these benchmarks' {suite}: {error}") from error
    return told, rows


def earlier_rows(
    suite: str, row_of: Callable[[dict[str, Any]], Own], facts: Mapping[str, Any]
) -> list[Own]:
    """The rows of the file that a run with --resume goes on with; none where it is yet to come.

    One machine measures all times of a row and of its ratios, so another machine may add rows.
    """
    path = Path(FLAGS.json)
    if not FLAGS.resume:
        return []
    if not path.exists():
        print(f"There are no figures in {path} yet: the run begins them", flush=True)
        return []
    there, rows = rows_of(path, suite, row_of)
    demand_same(path, there, facts)
    return rows


def demand_same(path: Path, earlier: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises an error where the facts of a file and of this run differ, so that it cannot go on."""
    if differ := differences(earlier, here, "there", "here"):
        raise ResultsError(f"{path} cannot be resumed: {differ}")


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], there: str, here: str
) -> str:
    """Names the facts that have to be the same in one report and differ in two files, or ""."""
    return "; ".join(
        f"{name} is {one.get(name) or 'not noted'} {there} and "
        f"{other.get(name) or 'not noted'} {here}"
        for name in (*results.SAME, *results.KIND, "count")
        if one.get(name) != other.get(name)
    )


def _facts(found: Results) -> dict[str, Any]:
    noted = {name: found.about.get(name) for name in results.KIND}
    return noted | {name: getattr(found, name) for name in results.SAME}


def merged(
    names: Sequence[str], parts: Sequence[Results], machines_may_differ: bool = False
) -> Results:
    """The first file's rows, and of the others those that it lacks, at its byte limits.

    A row that two of them have was timed twice: where these times disagree, it is doubtful.
    """
    first = parts[0]
    rows = {row.key: row for row in first.rows}
    suites, about = dict(first.suites), dict(first.about)
    spent = {suite: dict(seconds) for suite, seconds in first.spent.items()}
    for name, part in zip(names[1:], parts[1:], strict=True):
        both = _facts(first), _facts(part)
        if machines_may_differ and first.machine != part.machine:
            both = both[0] | {"machine": ""}, both[1] | {"machine": ""}
            if unlike := rates_apart(first, part):
                raise ResultsError(f"{name} cannot be merged with {names[0]}: {unlike}")
            about["machines"] = _machines(dataclasses.replace(first, about=about), part)
        if differ := differences(*both, f"in {names[0]}", f"in {name}"):
            raise ResultsError(f"{name} cannot be merged: {differ}")
        for row in part.rows:
            row = _at_limits_of(first, part, row)
            if first.machine != part.machine:
                row.machine = row.machine or part.machine
            known = rows.get(row.key)
            if known is None or not known.seconds and row.seconds:
                rows[row.key] = row
            elif known.seconds and row.seconds:
                apart = noise.drift([known.seconds, row.seconds])
                if apart is not None and apart > noise.MOST_DRIFT:
                    told = [known.load] * bool(known.load) + [f"timed twice, {apart:.0%} apart"]
                    rows[row.key] = dataclasses.replace(known, load="; ".join(told))
        suites |= {suite: suites.get(suite, 0.0) + spent for suite, spent in part.suites.items()}
        for suite, seconds in part.spent.items():
            spending.add(spent, suite, seconds)
        about = part.about | about
    return dataclasses.replace(
        first, rows=[*rows.values()], suites=suites, spent=spent, about=about
    )


def _at_limits_of(first: Results, part: Results, row: Row) -> Row:
    """A row of one part by the copy bandwidth and the products' rates of another."""
    product_limit = row.product_limit
    if product_limit:
        rate = row.operations / product_limit
        for dtype, of_dtype in part.matrix.items():
            if dtype in first.matrix and math.isclose(rate, of_dtype, rel_tol=1e-6):
                product_limit = row.operations / first.matrix[dtype]
    limit = row.limit * part.bandwidth / first.bandwidth
    return dataclasses.replace(row, limit=limit, product_limit=product_limit)


def merge(names: Sequence[str]) -> int:
    if len(names) < 2 or not FLAGS.json:
        given = " ".join(names) or "none"
        raise ResultsError(f"merge takes two files or more, and --json=ALL.json; got {given}")
    found = merged(names, [results.read(Path(name)) for name in names])
    set_aside(Path(FLAGS.json))
    write(found)
    print(f"{len(found.rows)} rows of {len(names)} files")
    say()
    return 0


# The commands that write --json as they go, and go on with it.
RESUMED = ("run", "linear", "attention")


def stopped(command: str) -> str:
    """The message for a user who stops a command."""
    if FLAGS.json and Path(FLAGS.json).is_file():
        more = ": the same command with --resume goes on" * (command in RESUMED)
        return f"Stopped. What was measured is in {FLAGS.json}{more}"
    without = "Without --json nothing was kept." if command in RESUMED else ""
    return f"Stopped. {without or 'Files that were written are whole.'}"
