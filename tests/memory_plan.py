"""The memory that options of linear attention take beside their inputs and outputs, by XLA's plan.

    python -m tests.memory_plan [PART]        all rows below, or those whose option has PART in it

A call is compiled for an H200 on a machine that has no card, as in `tests/aot_mosaic.py`. XLA says
how many bytes of temporary arrays the compiled program allocates; `u` is the size of q. With
gradients, that includes what the forward pass leaves for the backward. Sizes are those of the suite
`cliffs`, T 16384 but where it is said, and the backends are those that `implementation=None`
chooses. Rows are printed as a table, those that take the most memory first. Each compiles for up to
a minute. The table in docs/notes/linear_attention.md, "Memory", is printed by this command.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from typing import Any

from tests import aot_mosaic

FOUND = "temporaries: "
FORWARD, BOTH = "forward", "forward + backward"


@dataclasses.dataclass(frozen=True)
class Call:
    """A row of the suite `cliffs`, or with `base` the base case of that row."""

    option: str
    size: str
    phase: str = BOTH
    base: bool = False

    def __str__(self) -> str:
        return "the plain call" if self.base else self.option


D64, D128 = "B8 H8 D64", "B2 H16 D128"
CALLS = (
    Call("T 16411", f"{D128}, causal", base=True),
    Call("T 16411", f"{D64}, causal", base=True),
    Call("T 16411", f"{D128}, bidirectional", base=True),
    Call("T 16411", f"{D128}, causal"),
    Call("lengths", f"{D128}, causal"),
    Call("group of 4", f"{D128}, causal"),
    Call("float16", f"{D128}, causal"),
    Call("segments of 1024", f"{D128}, causal"),
    Call("segments of 1024", f"{D128}, bidirectional"),
    Call("float32, exact", f"{D128}, causal"),
    Call("float32, exact", f"{D128}, bidirectional"),
    Call("scalar gate", f"{D128}, causal"),
    Call("scalar gate both ways", f"{D128}, bidirectional"),
    Call("channel gate", f"{D128}, causal", FORWARD),
    Call("channel gate", f"{D128}, causal"),
    Call("channel gate", f"{D64}, causal"),
    Call("D 256, channel gate", "B2 H8 D256, causal"),
    Call("D 256", "B2 H8 D256, causal", FORWARD),
    Call("D 256", "B2 H8 D256, causal"),
    Call("D 256", "B2 H8 D256, bidirectional"),
    Call("FAVOR+, 128 features", f"{D128}, causal"),
    Call("FAVOR+, 128 features", f"{D64}, causal"),
    Call("FAVOR+, 128 features", f"{D128}, bidirectional"),
    Call("D 512", "B2 H4 D512, causal"),
    Call("D 512", "B2 H4 D512, bidirectional"),
)


def row_of(call: Call) -> Any:
    from benchmarks import cliff_rows

    (step,) = [
        step
        for step in cliff_rows.STEPS["gpu"]
        if (step.name, step.size) == (call.option, call.size) and step.phases[-1] == BOTH
    ]
    return step.base if call.base else step.row


def compile_here(call: Call) -> None:
    """Prints the bytes of temporary arrays, and of q."""
    sharding = aot_mosaic.sharding_on_hopper()
    import jax
    import jax.numpy as jnp

    from ato_jax import device
    from benchmarks import choices
    from tests.choices import pretending

    row, card = row_of(call), device.of_call(())
    with pretending(card):
        key = jax.eval_shape(lambda: jax.random.key(0))
        shapes = jax.eval_shape(functools.partial(choices.draw, row), key)
        arrays = {
            name: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding)
            for name, one in shapes.items()
        }
        function = choices.called(row, call.phase, None)
        program = aot_mosaic.compiled_on_hopper(function, sharding, [arrays])
    plan = program.memory_analysis()
    u = row.B * row.T * row.H * row.D * jnp.dtype(row.dtype).itemsize
    print(FOUND + json.dumps([plan.temp_size_in_bytes, u]))


def found_of(call: Call) -> tuple[int, int]:
    """The bytes of temporary arrays, and of q, by a process that has the CUDA plugin."""
    printed = aot_mosaic.printed_by("tests.memory_plan", call)
    (line,) = [one for one in printed.splitlines() if one.startswith(FOUND)]
    temporaries, u = json.loads(line.removeprefix(FOUND))
    return temporaries, u


def main(part: str = "") -> None:
    lines = []
    for call in CALLS:
        if part in str(call):
            temporaries, u = found_of(call)
            size = f"{temporaries / 1e6:.0f} MB"
            cells = f"| {call} | {call.size} | {call.phase} | {size} | {temporaries / u:.2f} u |"
            lines.append((temporaries / u, cells))
            print(cells, file=sys.stderr, flush=True)
    print("| option | size | phase | temporaries | of q |")
    print("| --- | --- | --- | ---: | ---: |")
    print(*(cells for _, cells in sorted(lines, reverse=True)), sep="\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [aot_mosaic.IN_THIS_PROCESS, told]:
            compile_here(Call(**json.loads(told)))
        case arguments:
            main(*arguments)
