"""The memory of a training step: its peak, what it is made of, and a timeline over the step.

The step is an attention layer with its four projections, a squared error, gradients and an SGD
update whose weights are donated. Arguments, outputs and temporaries are XLA's plan of the compiled
program. The timeline follows the program in the order in which XLA schedules it: a buffer is held
from the instruction that makes it to the last one that reads it, and arguments throughout. XLA
also writes in place, so its plan may be below the timeline's peak; kernels' own scratch is in
neither. What the allocator held while the step ran, only a GPU reports.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

import ato_jax
from benchmarks import kept, ours, progress, results
from benchmarks.cases import Case
from benchmarks.results import ResultsError
from benchmarks.tables import Table

FLAGS = flags.FLAGS

CASES = {
    "gpu": [Case(op, B=8, H=8, T=4096, D=64, dtype="bfloat16") for op in ("linear", "softmax")],
    "cpu": [Case(op, B=1, H=2, T=256, D=16, dtype="float32") for op in ("linear", "softmax")],
}
OPS = {"linear": ato_jax.linear_attention, "softmax": ato_jax.attention}
LINES = 16
WIDTH = 40
LARGEST = 5
BITS = {"pred": 8, "bf16": 16}
# Results that hold nothing of their own: views of an operand, and loops, which run in place.
SILENT = ("get-tuple-element", "bitcast", "tuple", "constant", "parameter", "after-all")
VIEWS = (*SILENT, "while")

_SHAPE = re.compile(r"\b(pred|bf16|[fsuc]\d+)(?:e\dm\d\w*)?\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$")
_OPERATION = re.compile(r"(?:^|\s)([a-z][\w-]*)\(")


@dataclasses.dataclass(frozen=True)
class Moment:
    """The buffers that are held while one instruction runs."""

    name: str
    held: int
    # The largest first: bytes and the instruction that made them.
    largest: tuple[tuple[int, str], ...]


def size(shapes: str) -> int:
    """Bytes of the arrays in a type as HLO writes it."""
    total = 0
    for dtype, axes in _SHAPE.findall(shapes):
        count = 1
        for axis in filter(None, axes.split(",")):
            count *= int(axis)
        bits = BITS.get(dtype) or int(dtype[1:])
        total += -(-count * bits // 8)
    return total


def timeline(text: str) -> list[Moment]:
    """The moments of a scheduled program, one for each instruction of its entry computation."""
    entry = re.search(r"^ENTRY [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    if entry is None or "is_scheduled=true" not in text:
        raise ResultsError("XLA gave no schedule of this program: there is no timeline")
    made: list[tuple[str, str, int, list[str]]] = []
    for line in entry[1].splitlines():
        found = _INSTRUCTION.match(line)
        operation = _OPERATION.search(found[2]) if found else None
        if not found or not operation:
            continue
        reads = re.findall(r"%([\w.-]+)", found[2][operation.end() :].partition(", metadata=")[0])
        made.append((found[1], operation[1], size(found[2][: operation.start()]), reads))
    # A view keeps what it is a view of; so does a view of a view.
    sources: dict[str, set[str]] = {}
    last: dict[str, int] = {}
    for index, (name, operation_name, _, reads) in enumerate(made):
        of_reads = set().union(*(sources.get(read, {read}) for read in reads))
        if operation_name in VIEWS and operation_name != "parameter":
            sources[name] = of_reads
        for read in of_reads:
            last[read] = index
    # Arguments are held from the first instruction to the last.
    held = {name: bytes_ for name, what, bytes_, _ in made if what == "parameter"}
    arguments, moments = set(held), []
    for index, (name, what, bytes_, _) in enumerate(made):
        if what not in VIEWS:
            held[name] = bytes_
        largest = sorted(((count, one) for one, count in held.items()), reverse=True)[:LARGEST]
        if what not in SILENT:
            moments.append(Moment(name, sum(held.values()), tuple(largest)))
        for one in [*held]:
            if one not in arguments and last.get(one, index) <= index:
                del held[one]
    return moments


def step_of(case: Case) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """The training step, donated weights first, and the shapes that it takes."""
    width = case.H * case.D
    attend = functools.partial(OPS[case.op], causal=True)

    def loss(weights: jax.Array, x: jax.Array, wanted: jax.Array) -> jax.Array:
        q, k, v = (
            (x @ weights[index]).reshape(case.B, case.T, case.H, case.D) for index in range(3)
        )
        out = attend(q, k, v).reshape(x.shape) @ weights[3]
        return jnp.mean(jnp.square((out - wanted).astype(jnp.float32)))

    def step(weights: jax.Array, x: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        found, gradient = jax.value_and_grad(loss)(weights, x, wanted)
        return weights - 1e-3 * gradient, found

    sequence = jax.ShapeDtypeStruct((case.B, case.T, width), case.dtype)
    return step, [jax.ShapeDtypeStruct((4, width, width), case.dtype), sequence, sequence]


def plan(program: Any) -> dict[str, int]:
    """What XLA says of the program; empty where it says nothing."""
    told = program.memory_analysis()
    if told is None:
        return {}
    parts = {
        "arguments": told.argument_size_in_bytes,
        "outputs beyond donated arguments": told.output_size_in_bytes - told.alias_size_in_bytes,
        "temporaries": told.temp_size_in_bytes,
    }
    return parts | {"peak by XLA's plan": sum(parts.values())}


def megabytes(count: float) -> str:
    return f"{count / 1e6:.3f}" if count < 1e7 else f"{count / 1e6:.1f}"


def drawn(moments: Sequence[Moment]) -> Table:
    """The timeline in a few lines: of each stretch of the step its highest moment."""
    peak = max(moment.held for moment in moments)
    count = min(LINES, len(moments))
    lines = []
    for part in range(count):
        first, end = (len(moments) * one // count for one in (part, part + 1))
        highest = max(moments[first:end], key=lambda moment: moment.held)
        bar = "#" * round(WIDTH * highest.held / peak)
        lines.append([f"{end / len(moments):.0%}", bar, highest.name[:40], megabytes(highest.held)])
    head = ["of the step", "", "instruction", "MB"]
    return Table("Timeline of the step, by XLA's schedule", head, lines, texts=3)


def at_peak(moments: Sequence[Moment]) -> Table:
    highest = max(moments, key=lambda moment: moment.held)
    lines = [[name, megabytes(count)] for count, name in highest.largest]
    title = f"The largest buffers at the timeline's peak, {megabytes(highest.held)} MB"
    return Table(title, ["made by", "MB"], lines)


def allocated(program: Any, shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple[int | None, str]:
    """Runs the step; the bytes that were held at its peak, if they are known, and what is said."""
    before = _highest()
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays = [
        (0.1 * jax.random.normal(key, one.shape)).astype(one.dtype)
        for key, one in zip(keys, shapes, strict=True)
    ]
    weights, _ = program(*arrays)
    jax.block_until_ready(program(weights, *arrays[1:]))
    if (held := _highest()) is not None:
        if before == held:
            # The allocator's peak is that of the whole process.
            return None, f"Held by the allocator: no more than {megabytes(held)} MB, as before"
        return held, f"Held by the allocator at its peak: {megabytes(held)} MB"
    # Linux counts in KiB.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return None, (
        "Only a GPU's allocator reports what the step itself held. On this CPU the process, with "
        f"Python, JAX and its compiler, had {megabytes(resident)} MB at its peak."
    )


def _highest() -> int | None:
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


@dataclasses.dataclass(frozen=True)
class Step:
    """One case: XLA's plan by part, the timeline's moments as the instruction and the bytes that
    are held, and the allocator's peak if it is known.
    """

    case: str
    plan: dict[str, int]
    timeline: list[tuple[str, int]]
    allocated: int | None = None


def tables(path: Path) -> list[Table]:
    """Of a file that `--json` wrote."""
    facts, steps = kept.rows_of(path, "memory", lambda row: Step(**row))
    parts = [*dict.fromkeys(part for step in steps for part in step.plan)]
    head = ["case", *(f"{part}, MB" for part in parts), "peak of the timeline, MB"]
    head.append("held by the allocator, MB")
    lines = []
    for step in steps:
        cells = [megabytes(step.plan[part]) if part in step.plan else "-" for part in parts]
        cells.append(megabytes(max((held for _, held in step.timeline), default=0)))
        cells.append("-" if step.allocated is None else megabytes(step.allocated))
        lines.append([step.case, *cells])
    title = "Memory of a training step of causal attention"
    return [Table(title, head, lines, [kept.told_of(facts)])] if lines else []


def write(steps: Sequence[Step]) -> None:
    if FLAGS.json:
        rows = [dataclasses.asdict(step) for step in steps]
        results.write(Path(FLAGS.json), json.dumps(kept.facts() | {"rows": rows}, indent=1) + "\n")


def main(_: Sequence[str]) -> int:
    every = CASES["gpu" if ours.platform() == "gpu" else "cpu"]
    wanted = [case for case in every if FLAGS.case in str(case)]
    if not wanted:
        raise ResultsError(
            f"No case of memory contains --case={FLAGS.case!r}: {'; '.join(map(str, every))}"
        )
    steps: list[Step] = []
    kept.clear_the_way()
    write(steps)
    progress.start(len(wanted))
    for case in wanted:
        progress.show(str(case))
        step, shapes = step_of(case)
        program = jax.jit(step, donate_argnums=0).lower(*shapes).compile()
        planned = plan(program)
        lines = [[name, megabytes(count)] for name, count in planned.items()]
        moments = timeline(program.as_text())
        title = f"A training step of causal attention, {case}"
        parts = [Table(title, ["", "MB"], lines), drawn(moments), at_peak(moments)]
        held, said = allocated(program, shapes)
        timed = [(moment.name, moment.held) for moment in moments]
        steps.append(Step(str(case), planned, timed, held))
        write(steps)
        progress.step()
        for part in parts:
            print("\n" + part.text())
        print(f"\n{said}", flush=True)
    kept.say()
    return 0
