"""docs/results.md and the README's table, made of the files of figures in benchmarks/results.

What stands between `<!-- results -->` and `<!-- /results -->` is written by `python -m benchmarks
report` and compared by a test; techniques that only another kernel would switch, and quality on
tasks, are taken from where they were measured, docs/notes/attention.md and docs/examples.md.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from absl import flags, logging

from benchmarks import findings, linear, results, run, show, side_by_side, suites
from benchmarks.results import NO_TIME_LEFT, Results, ResultsError
from benchmarks.tables import Table

FLAGS = flags.FLAGS
flags.DEFINE_bool("check", False, "report: write nothing, exit status 1 where documents differ")

ROOT = Path(__file__).resolve().parents[1]
RESULTS, README = ROOT / "docs" / "results.md", ROOT / "README.md"
NOTES, EXAMPLES = ROOT / "docs" / "notes" / "attention.md", ROOT / "docs" / "examples.md"
FIRST, LAST = "<!-- results -->", "<!-- /results -->"
BLANK = f"# Results\n\n{FIRST}\n{LAST}\n"

# Rows of the notes' table of what was tried that only other kernels would show again.
QUOTED = ("`exp2` with", "q scaled beforehand", "cache hints", "dk, dv and dq in kernels")
# Headings of docs/examples.md whose tables tell of quality.
QUALITY = ("A character language model", "Encoders", "Linear attention in a trained softmax model")
# Of the README's table: bidirectional and causal, two cases in two phases each.
README_ROWS = 8


def files() -> list[Path]:
    """The files of figures that are kept."""
    return sorted(run.FOLDER.glob("*.json"))


def quoted_techniques() -> Table:
    rows = []
    for line in NOTES.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith(QUOTED):
            rows.append(cells)
    head = ["technique", "predicted", "measured, ms", "kept"]
    return Table("Techniques that another kernel would switch: from the notes", head, rows, texts=4)


def quoted_quality() -> list[str]:
    """Headings and their first table."""
    parts = re.split(r"^## ", EXAMPLES.read_text(), flags=re.MULTILINE)
    found = []
    for part in parts:
        heading, _, rest = part.partition("\n")
        table = re.search(r"(?:^\|.*\n)+", rest, flags=re.MULTILINE)
        if heading in QUALITY and table:
            found.append(f"#### {heading}\n\n{table[0].rstrip()}")
    return found


def measured(table: Table) -> list[Table]:
    """The table without rows of which nothing was measured; none where no row is left."""
    ours = [n for n, name in enumerate(table.head) if n >= table.texts and "original" not in name]
    rows = [row for row in table.rows if any(row[n] not in ("", "-") for n in ours)]
    return [dataclasses.replace(table, rows=rows)] if rows else []


def asked_for(found: Results) -> tuple[int, int]:
    """How many rows the report's suites ask for, and how many of these there was no time for."""
    wanted = {
        (str(case), phase, name)
        for contest in suites.contests(suites.named("report"))
        for case, phase in contest.groups(found.platform)
        for name in side_by_side.wanted(contest, case)
    }
    reached = {row.key for row in found.rows if row.unavailable != NO_TIME_LEFT}
    return len(wanted), len(wanted - reached)


def section(found: Results, name: str) -> str:
    """Everything of one file."""
    wanted, waiting = asked_for(found)
    noted = {key: value for key, value in found.about.items() if not key.startswith("clocks")}
    rates = ", ".join(f"{dtype} {rate / 1e12:.0f}" for dtype, rate in found.matrix.items())
    versions = ", ".join(f"{key} {value}" for key, value in noted.items())
    parts = [
        f"## {found.device}",
        f"JAX {found.jax}, PyTorch {found.torch}, ato_jax {found.ato_jax}; {versions}. A copy "
        f"moves {found.bandwidth / 1e12:.2f} TB/s, a large product runs at (TFLOP/s) {rates}. "
        f"Every row: [{name}.json](../benchmarks/results/{name}.json).",
    ]
    if waiting:
        parts.append(f"Of {wanted} rows {waiting} are still to be measured.")
    for suite in suites.named("report"):
        for table in suite.findings(found):
            parts += [one.markdown() for one in measured(table)]
        if suite.name == "techniques":
            parts.append(quoted_techniques().markdown())
    parts += [
        f"![{picture.stem}](../benchmarks/results/{name}/{picture.name})"
        for picture in sorted((run.FOLDER / name).glob("*.png"))
    ]
    return "\n\n".join(parts)


def results_text() -> str:
    parts = [section(results.read(path), path.stem) for path in files()]
    quality = ["## Quality: linear against softmax on real tasks, from docs/examples.md"]
    return "\n\n".join([*parts, *quality, *quoted_quality()])


def readme_text() -> str:
    """The most telling rows of each device."""
    parts = []
    for path in files():
        found = results.read(path)
        for table in findings.standing(linear.CONTEST, "Linear attention")(found)[:1]:
            short = Table(f"On one {found.device}", table.head, table.rows[:README_ROWS], texts=2)
            parts.append(short.markdown())
    return "\n\n".join(parts)


def between(text: str, made: str, path: Path) -> str:
    """The text with what is made between its marks."""
    if text.count(FIRST) != 1 or text.count(LAST) != 1:
        raise ResultsError(f"{path} must have {FIRST} and {LAST} once each")
    before, rest = text.split(FIRST)
    _, after = rest.split(LAST)
    return f"{before}{FIRST}\n\n{made}\n\n{LAST}{after}"


def documents() -> dict[Path, str]:
    """What each document has to be."""
    made = {}
    for path, blank, text in ((RESULTS, BLANK, results_text), (README, "", readme_text)):
        now = path.read_text() if path.exists() else blank
        made[path] = between(now, text(), path)
    return made


def differing() -> list[Path]:
    return [
        path for path, text in documents().items() if not path.exists() or path.read_text() != text
    ]


def main(_: Sequence[str]) -> int:
    if not files():
        raise ResultsError(
            f"There are no figures in {run.FOLDER.relative_to(ROOT)}: run --suite=report"
        )
    if FLAGS.check:
        for path in differing():
            logging.error("%s is not made of the figures: python -m benchmarks report", path.name)
        return 1 if differing() else 0
    for path in files():
        show.plot([str(path)])
    for path, text in documents().items():
        results.write(path, text)
        print(path.relative_to(ROOT))
    return 0
