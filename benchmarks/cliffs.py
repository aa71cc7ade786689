"""What each option of linear and softmax attention costs beside its base case: the suite `cliffs`.

    python -m benchmarks run --suite=cliffs [--rows=GROUP,GROUP] [--case=PART] [--within_s=SECONDS]
                                            [--json=FILE.json | --keep] [--resume] [--forward_only]
                                            [--part=K/N]

Every row is a call with one option and `implementation=None`, timed forward and forward + backward
batch by batch in turns with its base case, so that both see the same clocks. Both are first
compared with XLA's float32 result on this machine; a call that is wrong, or that raises, has the
reason in place of a time. The table has, the row furthest below its target first:

    share      the time in which a copy moves the call's bytes, over its time
    base       the same of the base case, in the same turns
    ratio      share / base
    target     the least ratio that the project aims at; a few targets are a part of the byte
               limit, or of the larger of the byte limit and the time of the products
    reached    share over the share that meets the target
    None is    the backends that `implementation=None` chose

Calls on float8 inputs, forward alone, have tables of their own (`float8_tables.py`): their times
beside the same calls in bfloat16, beside the float8 calls without the option and beside cuDNN's,
and their errors against float64. They may be measured by themselves, at another commit than the
card's report: `--rows=float8 --json=DIR/float8/CARD.json`, and then `report --new=DIR` keeps them
beside it. The document has their commit below their tables.

`--rows` takes groups of rows: lengths, dtypes, maps, gates, softmax, float8, heads, drawn. All
groups together may take a card more than ten minutes: `--within_s` ends a run and lists the rows
that it left out, and `--json=FILE.json --resume` goes on with those. `--part=2/4` takes every
fourth row from the second on, one process for each card of a machine that has four. On a CPU sizes
are tiny, and an option is measured in one size.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from absl import flags, logging

from benchmarks import (
    ahead,
    choices,
    cliff_rows,
    float8,
    float8_tables,
    kept,
    other_load,
    ours,
    peers,
    progress,
    results,
    side_by_side,
    spending,
    store,
    summary,
    tables,
    timing,
)
from benchmarks.choices import CHOSEN, RIGHT, Group, Programs, Row
from benchmarks.cliff_rows import Step
from benchmarks.results import NO_TIME_LEFT, Results, ResultsError
from benchmarks.spending import CHECKING, TIMING, clock
from benchmarks.tables import Table

FLAGS = flags.FLAGS
flags.DEFINE_list(
    "rows", [], f"run --suite=cliffs: only groups of rows, of {', '.join(cliff_rows.GROUPS)}"
)

NAME = "cliffs"
OURS, BASE = cliff_rows.OURS, cliff_rows.BASE
# Time for the batches of each of the two calls; a batch takes a GPU about 10 ms.
SECONDS = 0.12
# Base cases that are kept with their inputs.
MOST_BASES = 3
# The other processes compile for at most this part of the time that is left.
COMPILING = 0.5
# The most seconds that they compile at a time.
COMPILE_SECONDS = 400
# With fewer seconds left they are not started: they would not have begun to compile.
SHORTEST_ROUND = 40


@dataclasses.dataclass(frozen=True)
class Ready:
    """A call whose results were right; `launch(i)` runs it `calls` times, on the i-th inputs.
    `out_of` gives the output of other arrays, such as `inputs`, those of the first call.
    """

    launch: Callable[[int], Any]
    calls: int
    choice: str
    errors: dict[str, float]
    out_of: Callable[[dict[str, Any]], Any] | None = None
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)


def wanted(platform: str) -> list[Step]:
    """The rows that the flags leave; an error that names what they may be, if none."""
    for name in FLAGS.rows:
        if name not in cliff_rows.GROUPS:
            known = ", ".join(cliff_rows.GROUPS)
            raise ResultsError(f"--rows takes groups of rows, {known}; got {name!r}")
    if FLAGS.dtype or FLAGS.peer:
        raise ResultsError(f"{NAME} has rows of every dtype and no peers: no --dtype, no --peer")
    found = [
        step
        for step in cliff_rows.STEPS[platform]
        if (not FLAGS.rows or step.group in FLAGS.rows)
        and (FLAGS.case in str(step.row) or FLAGS.case in step.name)
    ]
    if not found:
        known = "; ".join(dict.fromkeys(step.name for step in cliff_rows.STEPS[platform]))
        raise ResultsError(f"No row of {NAME} contains --case={FLAGS.case!r}: {known}")
    return choices.part_of(found)


def phases(step: Step) -> tuple[str, ...]:
    return step.phases[:1] if FLAGS.forward_only else step.phases


# -- one row -------------------------------------------------------------------------------------


def compared(row: Row, phase: str, programs: Programs, platform: str) -> Ready | str:
    """The call, ready to be timed if its results are right, or the reason why it cannot be."""
    if CHOSEN not in programs.of:
        return programs.failed.get(CHOSEN, "no program")
    groups, calls = choices.groups_of_inputs(row, phase, platform)
    keys = jax.random.split(jax.random.key(row.T), (groups, calls))
    sets = [[programs.drawing(key) for key in group] for group in keys]
    program = programs.compiled[programs.of[CHOSEN]]
    right = programs.compiled[RIGHT]([sets[0][0]])[0]
    [found, *_] = program(sets[0])
    errors = {name: float(one) for name, one in programs.comparing(found, right).items()}
    # A comparison that NaN does not pass.
    off = [
        f"{name} is wrong: relative error {error:.1e}"
        for name, error in errors.items()
        if not error <= choices.tolerance(row)
    ]
    if off:
        return ", ".join(off)

    def out_of(arrays: dict[str, Any]) -> Any:
        return program([arrays] * calls)[0]["out"]

    launch = functools.partial(choices.launched, program, sets)
    return Ready(launch, calls, programs.told.choice, errors, out_of, sets[0][0])


@dataclasses.dataclass
class Calls:
    """Makes calls ready from programs that other processes compiled, and keeps base cases."""

    platform: str
    programs: dict[Group, Programs]
    _bases: collections.OrderedDict[Group, Ready | str] = dataclasses.field(
        default_factory=collections.OrderedDict
    )

    def ready(self, row: Row, phase: str) -> Ready | str:
        """The call, compiled here if no other process compiled it, or the reason why it raises."""
        ahead_of_time = self.programs.get((row, phase))
        if ahead_of_time is not None:
            try:
                return compared(row, phase, choices.unpacked(ahead_of_time), self.platform)
            except Exception as error:  # a program that cannot be loaded, or does not run here
                reason = side_by_side.refusal(error)
                print(f"{row}, {phase}: compiled again: {reason}", flush=True)
        try:
            with clock(spending.COMPILING):
                programs = choices.compiled(row, phase, self.platform, by_name=False)
            return compared(row, phase, programs, self.platform)
        except Exception as error:  # a compiler's own, of many kinds
            return side_by_side.refusal(error)

    def base(self, row: Row, phase: str) -> Ready | str:
        group = row, phase
        if group not in self._bases:
            # Before the next one's inputs are drawn.
            while len(self._bases) >= MOST_BASES:
                self._bases.popitem(last=False)
            self._bases[group] = self.ready(row, phase)
        self._bases.move_to_end(group)
        return self._bases[group]


def measured(step: Step, phase: str, calls: Calls, found: Results) -> list[results.Row]:
    """The row, its base case and what else is beside it, all compared and then timed in turns."""
    with clock(CHECKING):
        every = {name: calls.base(row, phase) for name, row in step.beside.items()}
        every[OURS] = calls.ready(step.row, phase)
    rows = {OURS: blank(step.row, phase, found, OURS)}
    rows |= {name: blank(step.row, phase, found, name, row) for name, row in step.beside.items()}
    ready = {name: one for name, one in every.items() if not isinstance(one, str)}
    for name, one in every.items():
        if isinstance(one, str):
            rows[name].unavailable = one
        else:
            rows[name].errors, rows[name].picked = one.errors, one.choice
    if OURS in ready:
        watch = other_load.Watch(calls.platform)
        with clock(TIMING):
            timed = in_turns(list(ready.values()), calls.platform)
        load = watch.told()
        for name, batches in zip(ready, timed, strict=True):
            rows[name].seconds, rows[name].load = statistics.median(batches), load
            rows[name].turns, rows[name].spread = [rows[name].seconds], summary.spread(batches)
    else:
        for name in ready:
            rows[name].unavailable = "there is nothing beside it"
    if step.errors and OURS in ready and BASE in ready:
        with clock(CHECKING):
            add_errors(step, ready, rows)
    return [*rows.values()]


def add_errors(step: Step, ready: Mapping[str, Ready], rows: Mapping[str, results.Row]) -> None:
    """The errors of a float8 call against float64, and of the same call in bfloat16."""
    own, base = ready[OURS], ready[BASE]
    feature_map = dict(step.row.options).get("feature_map")
    what = step.row.op, step.row.causal, feature_map, base.inputs
    try:
        assert own.out_of and base.out_of
        of_own, of_base = float8.errors(*what, own.out_of, base.out_of)
    except Exception as error:  # memory, of the card or of the host
        print(f"{step.row}: no errors: {side_by_side.refusal(error)}", flush=True)
        return
    rows[OURS].errors = own.errors | of_own
    rows[BASE].errors = base.errors | of_base


def in_turns(ready: Sequence[Ready], platform: str) -> list[list[float]]:
    """The seconds of one call in each batch, for each of these."""
    launches, counts = [one.launch for one in ready], []
    wait = jax.block_until_ready
    # The first batches warm the card up.
    timing.interleaved(launches, wait, platform, 0.0, counts=counts)
    timed = timing.interleaved(launches, wait, platform, SECONDS, counts=counts)
    return [
        [seconds / one.calls for seconds in own.batches]
        for one, own in zip(ready, timed, strict=True)
    ]


def blank(
    row: Row, phase: str, found: Results, contender: str, base: Row | None = None
) -> results.Row:
    """A row without figures yet. A base case is filed under the name of the row beside which it is
    timed, with its own bytes.
    """
    of = base or row
    moved, operations = cliff_rows.traffic(of, phase), cliff_rows.operations(of, phase)
    rate = None if of.tf32 else found.matrix.get(of.dtype)
    return results.Row(
        str(row),
        phase,
        contender,
        moved / found.bandwidth,
        moved,
        operations,
        product_limit=operations / rate if rate else None,
    )


# -- what is said of it --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Line:
    """One row of the table; `reached` is over the share that meets the target, or over the base
    case's share where there is no target, and `ratio` over the base case's; None without a time.
    """

    reached: float | None
    ratio: float | None
    cells: tuple[str, ...]


def line_of(step: Step, phase: str, row: results.Row, base: results.Row | None) -> Line:
    steady = not (row.doubt or base and base.doubt)
    share, beside = (row.reached, base.reached if base else None) if steady else (None, None)
    needed = step.target.share(row, base) if step.target else beside
    reached = share / needed if share and needed else None
    ratio = share / beside if share and beside else None
    refused = row.unavailable or (base.unavailable if base else "")
    return Line(
        reached,
        ratio,
        (
            step.name,
            step.size,
            phase,
            tables.milliseconds(row),
            tables.number(share),
            tables.number(beside),
            tables.number(ratio),
            str(step.target or "-"),
            tables.number(reached if step.target else None),
            refused or row.doubt or (base.doubt if base else "") or row.picked,
        ),
    )


HEAD = (
    "option",
    "size",
    "phase",
    "ms",
    "share",
    "base",
    "ratio",
    "target",
    "reached",
    "None is",
)


def findings(found: Results) -> list[Table]:
    """The tables: rows without a time, then the worst first, and float8 calls in tables of their
    own. No table of what was not measured.
    """
    rows = {row.key: row for row in found.rows}
    lines, late = [], 0
    for step in cliff_rows.STEPS[found.platform]:
        for phase in step.phases:
            row = rows.get((str(step.row), phase, OURS))
            if row is None or step.group == float8_tables.GROUP:
                continue
            if row.unavailable == NO_TIME_LEFT:
                late += 1
                continue
            base = rows.get((str(step.row), phase, BASE))
            lines.append((step, line_of(step, phase, row, base)))
    of_float8 = float8_tables.of(found)
    if not lines:
        return of_float8
    lines.sort(key=lambda one: (one[1].reached is not None, one[1].reached or 0.0))
    held = [line.reached >= 1 for step, line in lines if step.target and line.reached is not None]
    notes = [
        "Share is the time in which a copy moves every input and every output once, over the "
        "call's time. Base is the share of the base case, timed in turns with the row: the plain "
        "call, or of a gated row the same call without its gate, of a channel gate of other sizes "
        "that of 128 columns, and of a gate both ways the causal one. Ratio is share over base, "
        "so it compares uses of the bandwidth, not times: a row in float32 moves twice the bytes "
        "of its base case. Target is the least ratio that is wanted, or the least share, of the "
        "byte limit or of the larger of it and the time of the products, or the base case's speed "
        "so many times. Reached is over 1 where the target is met. None is: the backends that a "
        "call without an implementation runs on, or why the row has no ratio.",
        f"{sum(held)} of {len(held)} rows with a target meet it.",
    ]
    of_drawn = [line.ratio for step, line in lines if step.group == "drawn" and line.ratio]
    if of_drawn:
        median, least = map(tables.number, (statistics.median(of_drawn), min(of_drawn)))
        notes.append(
            f"The ratio of the {len(of_drawn)} rows that a seed drew is {median} in the median and "
            f"{least} at the least."
        )
    if late:
        notes.append(f"{late} rows were left out for lack of time.")
    cells = [line.cells for _, line in lines]
    return [Table("Options beside their base cases", HEAD, cells, notes, 3), *of_float8]


def worst(found: Results) -> tuple[Step, str, results.Row, results.Row] | None:
    """The steady row that is furthest below its target, with its phase and its base case."""
    rows = {row.key: row for row in found.rows}
    lines = []
    for step in cliff_rows.STEPS[found.platform]:
        for phase in step.phases:
            row, base = (rows.get((str(step.row), phase, name)) for name in (OURS, BASE))
            if row and base and row.seconds and base.seconds and step.target:
                reached = line_of(step, phase, row, base).reached
                if reached is not None:
                    lines.append((reached, step, phase, row, base))
    return min(lines, key=lambda line: line[0])[1:] if lines else None


def left_out(found: Results) -> list[str]:
    return [
        f"  {row.case}, {row.phase}"
        for row in found.rows
        if row.contender == OURS and row.unavailable == NO_TIME_LEFT
    ]


# -- the suite -----------------------------------------------------------------------------------


def both_of(groups: Iterable[tuple[Step, str]]) -> list[Group]:
    """The rows of these, their base cases and what else is beside them, each once."""
    every = [(row, phase) for step, phase in groups for row in step.rows]
    return list(dict.fromkeys(every))


def said(step: Step, phase: str, rows: Sequence[results.Row]) -> str:
    """A line about a row that was just measured."""
    by_name = {row.contender: row for row in rows}
    if step.group == float8_tables.GROUP:
        of_step = {name: by_name.get(name) for name in (OURS, *step.beside)}
        told = float8_tables.cells(step, of_step)
    else:
        told = line_of(step, phase, by_name[OURS], by_name.get(BASE)).cells
    return ", ".join(filter(None, told))


def compile_ahead(
    groups: Sequence[tuple[Step, str]], platform: str, left: float
) -> dict[Group, Programs]:
    """The programs of rows and base cases, compiled by other processes in a part of the time that
    is left; a CPU has no cores to spare for them.
    """
    if platform == "cpu" or left < SHORTEST_ROUND:
        return {}
    distinct = both_of(groups)
    seconds = min(COMPILING * left, COMPILE_SECONDS)
    return choices.compiled_ahead(distinct, platform, seconds, ahead.workers(), by_name=False)


def unreached(groups: Iterable[tuple[Step, str]], found: Results) -> list[results.Row]:
    rows = [blank(step.row, phase, found, OURS) for step, phase in groups]
    for row in rows:
        row.unavailable = NO_TIME_LEFT
    return rows


def run_rows(groups: Sequence[tuple[Step, str]], calls: Calls, found: Results, end: float) -> bool:
    """Measures rows until the time is up; whether the device still works then."""
    for index, (step, phase) in enumerate(groups):
        if time.monotonic() > end:
            found.rows += unreached(groups[index:], found)
            break
        progress.show(f"{step.row}, {phase}")
        kept.mark(str(step.row), phase, OURS)
        new = measured(step, phase, calls, found)
        calls.programs.pop((step.row, phase), None)
        found.rows += kept.signed(new)
        kept.write(found)
        kept.mark(str(step.row), phase, "")
        progress.step()
        print(said(step, phase, new), flush=True)
        if new[0].unavailable and not side_by_side.device_works():
            return False
    return True


def main(introduce: Callable[[peers.Peer, str], dict[str, Any] | None]) -> int:
    """Runs the suite; `introduce` measures the copy's bandwidth, by PyTorch on a GPU."""
    start = time.monotonic()
    spending.spent.clear()
    end = start + (FLAGS.within_s or float("inf"))
    platform = ours.platform()
    if platform not in results.PLATFORMS:
        logging.error("The benchmarks run on a CPU or an NVIDIA GPU, JAX computes on %s", platform)
        return 1
    steps = wanted(platform)
    earlier = kept.earlier()
    with peers.Peer(platform) as peer:
        facts = introduce(peer, platform)
    if facts is None:
        return 1
    found = kept.begun(facts, earlier)
    known = {row.key for row in found.rows}
    every = [(step, phase) for step in steps for phase in phases(step)]
    groups = [(step, phase) for step, phase in every if (str(step.row), phase, OURS) not in known]
    print(f"{len(groups)} rows to measure, {len(every) - len(groups)} known", flush=True)
    progress.start(len(groups), end)
    works, late = True, []
    if kept_programs := store.given():
        programs, later = choices.in_store(both_of(groups), kept_programs, by_name=False)
        late = [group for group in groups if later.intersection(both_of([group]))]
        ready = [group for group in groups if group not in late]
        works, groups = run_rows(ready, Calls(platform, programs), found, end), []
    while groups and works:
        with clock(spending.COMPILING):
            programs = compile_ahead(groups, platform, end - time.monotonic())
        calls = Calls(platform, programs)
        print(f"compiled ahead after {time.monotonic() - start:.0f} s", flush=True)
        ready = [
            (step, phase)
            for step, phase in groups
            # Another library's call may never compile.
            if all((row, phase) in calls.programs for row in step.rows if not row.by)
        ]
        # The others are for the next round: this process compiles them one by one.
        ready = ready or groups
        works = run_rows(ready, calls, found, end)
        groups = [group for group in groups if group not in ready]
    # They wait for a run that finds them compiled.
    found.rows += unreached(late, found)
    spent = time.monotonic() - start
    found.suites[NAME] = found.suites.get(NAME, 0.0) + spent
    spending.add(found.spent, NAME, spending.of_kinds(spent))
    kept.write(found)
    for table in findings(found):
        print("\n" + table.text(), flush=True)
    if late := left_out(found):
        print("\nLeft out for lack of time:", *late, sep="\n")
    print(f"\n{NAME} took {time.monotonic() - start:.0f} s", flush=True)
    print("\n" + spending.table(found.spent).text(), flush=True)
    kept.say()
    if not works:
        logging.error("The device fails for good: with --json and --resume a new run goes on")
    return int(not works)
