"""Compiles rows of a covering array for a Hopper card on a machine that has none.

    python -m tests.aot_covering mosaic_delta_rule 0 5 11

As `tests.aot_mosaic` does for linear attention, which says how.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tests import aot_mosaic
from tests.aot_mosaic import IN_THIS_PROCESS, Compiled


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a space, by its name."""

    name: str
    numbers: list[int]


def compile_rows(rows: Rows) -> list[Compiled]:
    """Their kernels, forward and backward."""
    return aot_mosaic.compiled_kernels(aot_mosaic.printed_by("tests.aot_covering", rows))


def main(rows: Rows) -> None:
    from tests import covering

    compile_each(covering.SPACES[rows.name], rows.numbers, covering.program)


def compile_each(space: Any, numbers: list[int], program: Callable[..., Any]) -> None:
    """Compiles rows of a space. `program` makes a row's function and its traced arrays."""
    import jax

    from tests import covering

    sharding = aot_mosaic.sharding_on_hopper()

    def described(array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    for number in numbers:
        row = covering.rows(space)[number]
        print(f"row {number} ({covering.label(row)})", flush=True)
        with covering.as_on_a_card(row):
            function, traced = program(space, row)
            aot_mosaic.compiled_on_hopper(function, sharding, [jax.tree.map(described, traced)])


def command(
    arguments: Sequence[str],
    main: Callable[[Rows], None],
    compile_rows: Callable[[Rows], list[Compiled]],
) -> None:
    """From a name and numbers, or as `aot_mosaic.command`."""
    first, *rest = arguments
    if first != IN_THIS_PROCESS:
        rows = Rows(first, list(map(int, rest)))
        first, rest = json.dumps(dataclasses.asdict(rows)), []
    aot_mosaic.command([first, *rest], Rows, main, compile_rows)


def run(*arguments: str) -> None:
    command(arguments, main, compile_rows)


if __name__ == "__main__":
    run(*sys.argv[1:])
