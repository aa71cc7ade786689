"""`table FILE.json` prints what a file of figures has, `plot FILE.json` draws it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from benchmarks import cliffs, results, suites, tables
from benchmarks.results import Results, ResultsError

FLAGS = flags.FLAGS


def _file(command: str, names: Sequence[str]) -> Path:
    if len(names) != 1:
        given = " ".join(names) or "none"
        raise ResultsError(f"{command} takes one file of figures, FILE.json; got {given}")
    return Path(names[0])


def text(found: Results, names: Sequence[str]) -> str:
    """All rows by case and phase, then what the suites of these names find."""
    groups: dict[tuple[str, str], list[results.Row]] = {}
    for row in found.rows:
        if FLAGS.case in row.case:
            groups.setdefault((row.case, row.phase), []).append(row)
    if not groups:
        cases = "; ".join(dict.fromkeys(row.case for row in found.rows)) or "it has no rows"
        raise ResultsError(f"No row contains --case={FLAGS.case!r}: {cases}")
    parts = [tables.measured(rows).text() for rows in groups.values()]
    for name in names:
        if name == cliffs.NAME:
            parts += [table.text() for table in cliffs.findings(found)]
            continue
        of_name = suites.named(name)
        if not of_name:
            raise ResultsError(f"There is no suite {name!r}: {', '.join(suites.NAMES)}")
        parts += [table.text() for suite in of_name for table in suite.findings(found)]
    return "\n\n".join(parts)


def table(names: Sequence[str]) -> int:
    path = _file("table", names)
    found = results.read(path)
    # A --config's sweep is no suite: it has rows alone here.
    known = [name for name in found.suites if name == cliffs.NAME or suites.named(name)]
    told = text(found, FLAGS.suite or known)
    print(f"{found.device}; JAX {found.jax}, PyTorch {found.torch}\n\n{told}")
    return 0


def plot(names: Sequence[str]) -> int:
    """Beside the file, in a folder of its name."""
    path = _file("plot", names)
    found = results.read(path)
    try:
        from benchmarks import plots
    except ImportError as error:
        raise ResultsError(f"Pictures need Matplotlib: pip install '.[bench]' ({error})") from error
    drawn = plots.draw(found, path.with_suffix(""))
    for picture in drawn:
        print(picture)
    if not drawn:
        print(
            f"Nothing was drawn: {path} has no steady figures of the cases that the pictures show. "
            f"They are of the suites {', '.join(plots.SUITES)}: python -m benchmarks run SUITE"
        )
        return 1
    return 0
