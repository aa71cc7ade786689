"""docs/results.md, the README's figures and `ato_jax/slower.toml`, made of the files of figures in
benchmarks/results.

What stands between `<!-- results -->` and `<!-- /results -->`, and so for other names, is written
by `python -m benchmarks report` and compared by a test; techniques that only another kernel would
switch, and what the examples found, are taken from where they were measured,
docs/notes/attention.md and docs/examples.md.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags, logging

from ato_jax import slower
from benchmarks import (
    attention,
    cards,
    choices,
    cliffs,
    findings,
    float8_tables,
    kept,
    latency,
    linear,
    machine,
    memory,
    noise,
    quoted,
    results,
    run,
    sdpa,
    shortfall,
    show,
    side_by_side,
    suites,
    training,
)
from benchmarks.cases import HOST_PHASES, PHASES, Case
from benchmarks.findings import Found
from benchmarks.results import NO_TIME_LEFT, Results, ResultsError
from benchmarks.tables import Table, milliseconds

FLAGS = flags.FLAGS
flags.DEFINE_bool("check", False, "report: write nothing, exit status 1 where documents differ")
flags.DEFINE_string("new", "", "report: first keep the files that `whole` left in this folder")

ROOT = Path(__file__).resolve().parents[1]
RESULTS, README = ROOT / "docs" / "results.md", ROOT / "README.md"
NOTES, EXAMPLES = ROOT / "docs" / "notes" / "attention.md", ROOT / "docs" / "examples.md"
FIGURES = "results"
BLANK = f"# Results\n\n<!-- {FIGURES} -->\n<!-- /{FIGURES} -->\n"

# Rows of the notes' table of what was tried that only other kernels would show again.
QUOTED = ("`exp2` with", "q scaled beforehand", "cache hints", "dk, dv and dq in kernels")
# Headings of docs/examples.md whose tables tell of quality.
QUALITY = ("A character language model", "Encoders", "Linear attention in a trained softmax model")
# Names of two lines of a card's facts, with the units that their values leave out.
CLOCKS = "clocks of the processors and of the memory, power and temperature (°C) after each suite"
MACHINES = "machines by number, with the rates of a copy and of large matrix products (TFLOP/s)"
# Of docs/examples.md: training tokens a second by attention and length.
SPEED = "Its training speed over longer texts"
# Above all tables of docs/results.md: what they compare with.
ORIGINAL = (
    '"The original" is the project that [this one grew from](origins.md). It was measured on other '
    "hardware, so its ratios are quoted, not its times."
)
# What has rows of its own kind, and the folder of its files, one for each card.
OTHERS: dict[Callable[[Path], list[Table]], str] = {
    choices.tables: choices.NAME,
    latency.tables: "latency",
    memory.tables: "memory",
    training.tables: training.NAME,
}
# Suites of which `whole` leaves the rows in folders of their own.
PARTS = ("cliffs", "sdpa")
# The report says this where a file of results names no commit.
OLD_KERNELS = (
    "The rows of softmax attention were measured before the Mosaic GPU forward kernel for Hopper "
    "was there: they ran by cuDNN or Triton. The "
    "[notes](notes/attention.md#the-forward-kernel-for-hopper-mosaic_gpu) have the times of that "
    "kernel beside both, on an H100."
)
# The pictures' texts for readers who cannot see them.
SHOWN = {
    "accuracy": "Relative error of the output against float64 over the time of one call, both axes "
    "logarithmic: linear and softmax attention, by implementation",
    "bidirectional": "Time of one call over the number of tokens, both axes logarithmic, forward "
    "and forward + backward: bidirectional linear attention, its peers and PyTorch's SDPA",
    "causal": "Time of one call over the number of tokens, both axes logarithmic, forward and "
    "forward + backward: causal linear attention beside flash-linear-attention",
    "crossover": "The best SDPA backend's time over linear attention's, by tokens and head size, "
    "forward",
    "memory": "Peak memory of one call over the number of tokens, both axes logarithmic: naive, "
    "tiled and flash attention",
    "roofline": "Operations per second over operations per byte, both axes logarithmic, under the "
    "rates of a copy and of a large matrix product",
}
# The picture at the top of the README.
PICTURE = "bidirectional"
# The note below the README's first table.
HEADLINE_NOTE = (
    "The last column is above 1x where this library is faster. SDPA is PyTorch's exact softmax "
    "attention, so beside linear attention it computes another function of the same inputs, at a "
    "cost that grows with T squared. [docs/results.md](docs/results.md) has the other rows, also "
    "those in which this library is slower."
)
# Of the README's table: bidirectional and causal, two cases in two phases each.
README_ROWS = 8


def files() -> list[Path]:
    """The files of figures that are kept, in the order of `reports`."""
    return [path for path, _ in reports()]


def reports() -> list[tuple[Path, Results]]:
    """The files of figures that are kept, each with what it holds: those that name the commit of
    their kernels before those that do not, and then the newest first.
    """

    def age(report: tuple[Path, Results]) -> tuple[bool, str]:
        _, found = report
        return bool(found.commit), found.about.get("date", "")

    read = [(path, results.read(path)) for path in sorted(run.FOLDER.glob("*.json"))]
    # Sorting keeps the order of what is equal, also backwards.
    return sorted(read, key=age, reverse=True)


def marked(table: Table) -> Table:
    """The table, with what the mark means below it where a time has it."""
    has_mark = any(cell.startswith(noise.MARK) for row in table.rows for cell in row)
    return dataclasses.replace(table, notes=[*table.notes, *[noise.LEGEND] * has_mark])


def quoted_techniques() -> Table:
    rows = []
    for line in NOTES.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith(QUOTED):
            rows.append(cells)
    head = ["technique", "predicted", "measured, ms", "kept"]
    return Table("Techniques that another kernel would switch: from the notes", head, rows, texts=4)


def tables_of(path: Path) -> dict[str, str]:
    """By heading, the first table under it."""
    parts = re.split(r"^## ", path.read_text(), flags=re.MULTILINE)
    found = {}
    for part in parts:
        heading, _, rest = part.partition("\n")
        table = re.search(r"(?:^\|.*\n)+", rest, flags=re.MULTILINE)
        if table:
            found[heading] = table[0].rstrip()
    return found


def quoted_quality() -> list[str]:
    """Headings and their first table."""
    told = tables_of(EXAMPLES)
    return [f"#### {heading}\n\n{told[heading]}" for heading in QUALITY if heading in told]


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


def provenance(found: Results, name: str) -> str:
    """Where one file's figures come from, and the card's two speeds that they are compared with."""
    noted = {key: value for key, value in found.about.items() if not key.startswith("clocks")}
    clocks = [
        f"{key.removeprefix('clocks after ')}: {value}"
        for key, value in found.about.items()
        if key.startswith("clocks")
    ]
    rates = ", ".join(f"{dtype} {rate / 1e12:.0f}" for dtype, rate in found.matrix.items())
    facts = {
        "date": noted.pop("date", ""),
        "card": found.device,
        "commit": found.commit or "not noted",
        "ato_jax": found.ato_jax,
        "JAX": found.jax,
        "PyTorch": found.torch,
        **{MACHINES if key == "machines" else key: value for key, value in noted.items()},
        CLOCKS: "; ".join(clocks) or "not noted",
        "a copy of a large array, TB/s": f"{found.bandwidth / 1e12:.2f}",
        "a large matrix product, TFLOP/s": rates,
        "every row": f"[{name}.json](../benchmarks/results/{name}.json)",
    }
    rows = [[fact, str(value)] for fact, value in facts.items() if value]
    return Table("Where these figures come from", ["what", "value"], rows, texts=2).markdown()


def section(found: Results, name: str) -> str:
    """Everything of one file."""
    wanted, waiting = asked_for(found)
    parts = [f"## {found.device}", provenance(found, name)]
    if not found.commit:
        parts.append(OLD_KERNELS)
    if any(row.doubt for row in found.rows):
        parts.append(noise.LEGEND)
    if waiting:
        parts.append(f"Of {wanted} rows {waiting} are still to be measured.")
    for suite in suites.named("report"):
        for table in suite.findings(found):
            parts += [one.markdown() for one in measured(table)]
        if suite.name == "techniques":
            parts.append(quoted_techniques().markdown())
    parts += [table.markdown() for table in shortfall.tables(found)]
    parts += [table.markdown() for table in cliffs.findings(found)]
    parts += [table.markdown() for table in float8_apart(found, name)]
    for table in sdpa.findings(sdpa.CONTEST)(found):
        parts += [one.markdown() for one in measured(table)]
    for tables_of_file, folder in OTHERS.items():
        path = run.FOLDER / folder / f"{name}.json"
        parts += [table.markdown() for table in tables_of_file(path)] if path.exists() else []
    parts += [
        f"![{SHOWN.get(picture.stem, picture.stem)}](../benchmarks/results/{name}/{picture.name})"
        for picture in sorted((run.FOLDER / name).glob("*.png"))
    ]
    return "\n\n".join(parts)


def float8_apart(found: Results, name: str) -> list[Table]:
    """The tables of float8 calls that were measured by themselves, with the commit that they were
    measured at; none where the card's own file has such calls.
    """
    path = run.FOLDER / float8_tables.GROUP / f"{name}.json"
    if float8_tables.of(found) or not path.exists():
        return []
    apart = results.read(path)
    of_file = f"{kept.told_of(vars(apart))} A copy ran at {apart.bandwidth / 1e12:.2f} TB/s."
    return [
        dataclasses.replace(table, notes=[*table.notes, of_file])
        for table in float8_tables.of(apart)
    ]


def results_text() -> str:
    every = reports()
    parts = [section(found, path.stem) for path, found in every]
    parts += [table.markdown(level=2) for table in cards.tables([found for _, found in every])]
    quality = ["## Quality: linear against softmax on real tasks, from docs/examples.md"]
    return "\n\n".join([ORIGINAL, *parts, *quality, *quoted_quality()])


def readme_text() -> str:
    """The most telling rows of each device."""
    parts = []
    for _, found in reports():
        for table in findings.standing(linear.CONTEST, "Linear attention")(found)[:1]:
            short = Table(f"On one {found.device}", table.head, table.rows[:README_ROWS], texts=2)
            parts.append(marked(short).markdown())
    return "\n\n".join(parts)


def headline_of(found: Results) -> list[list[str]]:
    """What, phase, this library's time, the peer, its time, and the peer's over ours; of what was
    measured alone. The last line is the option of linear attention that is furthest below its
    target, beside its base case.
    """
    rows = findings.Found(found)
    long, causal = suites.BIDIRECTIONAL.cases["gpu"][-1], suites.CAUSAL.cases["gpu"][-1]
    [softmax] = [
        case
        for case in attention.CASES["gpu"]
        if case.causal and case.T == 16384 and attention.whole(case) == case
    ]
    lines = []
    for case, peers in (
        (long, [findings.SDPA]),
        (causal, [findings.SDPA]),
        (softmax, [("SDPA cuDNN", "JAX cuDNN"), ("FlashAttention-3 through JAX",)]),
    ):
        for names in peers:
            for phase in PHASES:
                own = rows.row(case, phase, findings.OURS)
                peer = findings.best(row for row in rows.of(case, phase) if row.contender in names)
                if own is not None and own.seconds and peer is not None:
                    cells = [milliseconds(own), peer.contender, milliseconds(peer)]
                    lines.append([str(case), phase, *cells, findings.times(peer, own)])
    if worst := cliffs.worst(found):
        step, phase, own, base = worst
        cells = [milliseconds(own), "ato_jax, its base case, of other sizes", milliseconds(base)]
        if step.group == float8_tables.GROUP:
            cells[1] = "ato_jax, the same call in bfloat16"
        elif own.traffic == base.traffic:
            cells[1] = "ato_jax, its base case"
        lines.append([f"the worst option: {step.name}, {step.size}", phase, *cells])
        lines[-1].append(findings.times(base, own))
    return lines


def headline_text() -> str:
    """What each card's figures come to, in a few lines. A file that names no commit has none: it
    is not known of which kernels its figures are.
    """
    parts = []
    for _, found in reports():
        head = ["", "phase", "ato_jax, ms", "beside", "ms", "peer / ato_jax"]
        if found.commit and (lines := headline_of(found)):
            title = f"In short, on one {found.device}"
            parts.append(marked(Table(title, head, lines, [HEADLINE_NOTE], texts=2)).markdown())
    return "\n\n".join(parts)


def host_text() -> str:
    """The host's time of a call from PyTorch, in words. Each card with steady times has a
    paragraph; the cards whose times are not steady share one, and so do those that have none.
    """
    parts: list[str] = []
    noisy: list[str] = []
    missing: list[str] = []
    softmax, linear_full, linear_causal = suites.HOST_CASES
    for _, found in reports():
        rows = findings.Found(found)
        every = [
            rows.row(case, phase, name)
            for case, names in (
                (softmax, ("ato_torch", "SDPA default")),
                (linear_full, ("ato_torch",)),
                (linear_causal, ("ato_torch",)),
            )
            for name in names
            for phase in HOST_PHASES
        ]

        def told(case: Case, name: str, rows: Found = rows) -> str:
            """Forward, recorded, and with the backward pass."""
            times = [rows.row(case, phase, name) for phase in HOST_PHASES]
            forward, recorded, both = map(findings.microseconds, times)
            return f"{forward} µs, {recorded} with a gradient recorded and {both} with its backward"

        if any(row is None or row.seconds is None for row in every):
            missing.append(f"the {found.device}")
            continue
        if any(row is not None and row.doubt for row in every):
            noisy.append(f"the {found.device}")
            continue
        own, peer = told(softmax, "ato_torch"), told(softmax, "SDPA default")
        each = [told(case, "ato_torch") for case in (linear_full, linear_causal)]
        shape = f"`{[softmax.B, softmax.H, softmax.T, softmax.D]}`"
        parts.append(
            f"On one {found.device} with JAX {found.jax}, causal `attention` of {softmax.dtype} "
            f"{shape} takes {own} of the host's time; `scaled_dot_product_attention` in the same "
            f"run takes {peer}. `linear_attention`, which is several kernels and one launch, takes "
            f"{each[0]}; causal, {each[1]}."
        )
    if noisy:
        parts.append(
            f"What a call takes the host was measured on {quoted.listed(noisy)}, but not all of "
            "the times were steady, so none is quoted here: "
            "[docs/results.md](docs/results.md#what-a-call-from-pytorch-takes-the-host) has "
            "each of them, the doubtful ones marked."
        )
    if missing:
        parts.append(
            f"What a call takes the host is not measured on {quoted.listed(missing)} yet: "
            "`python -m benchmarks run --suite=host`."
        )
    return "\n\n".join(parts)


def picture_text() -> str:
    """The picture of the first card that has one, and what it shows."""
    for path, found in reports():
        device, name = found.device, f"{path.stem}/{PICTURE}.png"
        if (run.FOLDER / name).exists():
            kinds = "B 8, H 8, D 64, bfloat16"
            told = (
                f"Time of one call over the number of tokens, logarithmic on both axes, on one "
                f"{device}: linear attention against PyTorch's scaled_dot_product_attention, "
                f"forward and forward + backward, {kinds}"
            )
            return (
                f"![{told}](benchmarks/results/{name})\n\n"
                f"Bidirectional attention, {kinds}, measured on one {device}. The dashed line is "
                "the time that a copy of the same bytes takes, the lower bound of any "
                "implementation."
            )
    return ""


def speed_text() -> str:
    """How much faster a language model trains, of the table in docs/examples.md."""
    table = tables_of(EXAMPLES)[SPEED].splitlines()
    head, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    rates = {line[0]: [int(cell.replace(",", "")) for cell in line[1:]] for line in lines[1:]}
    pairs = zip(rates["linear"], rates["softmax"], strict=True)
    ratios = [f"{linear / softmax:.1f} times" for linear, softmax in pairs]
    lengths = [f" at {length.removeprefix('T = ')} tokens" for length in head[1:]]
    ratios[0] += " as fast with linear attention as with softmax"
    told = map(str.__add__, ratios, lengths)
    return f"A language model trains {', '.join(told)}."


def between(text: str, made: str, path: Path, name: str = FIGURES, around: str = "\n\n") -> str:
    """The text with `made` between its marks, and `around` on either side of it: nothing for marks
    that stand within a paragraph.
    """
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(first) != 1 or text.count(last) != 1:
        raise ResultsError(f"{path} must have {first} and {last} once each")
    before, rest = text.split(first)
    _, after = rest.split(last)
    return f"{before}{first}{around}{made}{around}{last}{after}"


# Between which marks the README has what.
IN_README = ("picture", "headline", FIGURES, "host", "speed")
README_TEXTS = (picture_text, headline_text, readme_text, host_text, speed_text)


def documents() -> dict[Path, str]:
    """What each document has to be."""
    made = {}
    for path, blank, texts in (
        (RESULTS, BLANK, {FIGURES: results_text}),
        (README, "", dict(zip(IN_README, README_TEXTS, strict=True))),
    ):
        made[path] = path.read_text() if path.exists() else blank
        for name, text in texts.items():
            made[path] = between(made[path], text(), path, name)
    if text := shortfall.toml_text([found for _, found in reports()]):
        made[ROOT / "ato_jax" / slower.NAME] = text
    named = [(path.stem, found) for path, found in reports()]
    for page, names in quoted.PAGES.items():
        path = ROOT / page
        made[path] = made.get(path) or path.read_text()
        for name in names:
            sentences = quoted.SENTENCES[name](named)
            made[path] = between(made[path], sentences, path, name, around="")
    return made


def differing() -> list[Path]:
    return [
        path for path, text in documents().items() if not path.exists() or path.read_text() != text
    ]


def keep(folder: Path) -> list[Path]:
    """Puts the files of a folder, as `whole` leaves it, among those that are kept, with the commit
    of their sources. All are read before any is written. Rows of float8 calls that were measured by
    themselves are in the folder's own folder `float8`, and stay apart.
    """
    texts = {}
    for path in sorted(folder.glob("*.json")):
        parts = [path, *(part for name in PARTS if (part := folder / name / path.name).exists())]
        names = [str(part.relative_to(folder)) for part in parts]
        found = kept.merged(names, [*map(results.read, parts)], machines_may_differ=True)
        found.commit = machine.of_sources(found.commit)
        texts[run.FOLDER / path.name] = results.json_text(found)
    for path in sorted((folder / float8_tables.GROUP).glob("*.json")):
        found = results.read(path)
        found.commit = machine.of_sources(found.commit)
        texts[run.FOLDER / float8_tables.GROUP / path.name] = results.json_text(found)
    if not texts:
        raise ResultsError(f"--new={folder} has no file of figures: `whole --folder` writes them")
    for tables_of_file, name in OTHERS.items():
        for path in sorted((folder / name).glob("*.json")):
            tables_of_file(path)
            told = json.loads(path.read_text())
            told["commit"] = machine.of_sources(told.get("commit", ""))
            texts[run.FOLDER / name / path.name] = json.dumps(told, indent=1) + "\n"
    for path, text in texts.items():
        results.write(path, text)
    return [*texts]


def main(_: Sequence[str]) -> int:
    if FLAGS.new:
        for path in keep(Path(FLAGS.new)):
            print(path)
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
