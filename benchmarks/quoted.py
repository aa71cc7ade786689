"""Figures in sentences of the documents that are of files of figures: `report` writes them anew,
and a test compares them.

A sentence says of which card it is. A figure that is not steady in the card's file, or that the
file lacks, is left as it stands, and `report` says so.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks import findings, machine, suites
from benchmarks.findings import FORWARD, OURS, SDPA
from benchmarks.results import Results, ResultsError

DOCS = machine.ROOT / "docs"
# The card of all these sentences, by the name of its file.
CARD = "nvidia_h200"
# By page: sentences, or parts that stand in it once, with the names of `figures` in braces.
SENTENCES: dict[Path, tuple[str, ...]] = {
    machine.ROOT / "README.md": (
        "linear attention has {T 512} times the speed at 512 tokens (B 4), {T 1024} times at 1,024 "
        "(B 8), {T 2048} times at 2,048 (B 4).",
    ),
    **dict.fromkeys(
        (DOCS / "faq.md", DOCS / "guides" / "choosing.md"),
        (
            "has {T 512} times softmax's speed at 512 tokens and {T 2048} times at 2,048 ([B 4,",
            "and {T 1024} times at 1,024 ([B 8,",
        ),
    ),
}


def figures(found: Results) -> dict[str, str]:
    """By name: SDPA's best time over linear attention's, of a bidirectional forward call."""
    rows, told = findings.Found(found), {}
    crossover = {case.T: case for case in suites.CROSSOVER.cases["gpu"] if case.D == 64}
    beside = {1024: dataclasses.replace(suites.BIDIRECTIONAL.cases["gpu"][0], T=1024)}
    for T in (512, 1024, 2048):
        case = {**crossover, **beside}[T]
        peer = findings.best(row for row in rows.of(case, FORWARD) if row.contender in SDPA)
        ratio = findings.times(peer, rows.row(case, FORWARD, OURS))
        if ratio.endswith("x"):
            told[f"T {T}"] = ratio[:-1]
    return told


def renewed(text: str, path: Path, told: Mapping[str, str]) -> str:
    """A page's text with these figures in its sentences."""
    for sentence in SENTENCES.get(path, ()):
        parts = re.split(r"\{([^}]*)\}", sentence)
        pattern = "".join(
            r"([\d.,]+)" if index % 2 else re.escape(part) for index, part in enumerate(parts)
        )
        if len(re.findall(pattern, text)) != 1:
            raise ResultsError(f"{path} must have once: {sentence}")

        def filled(match: re.Match[str], parts: list[str] = parts) -> str:
            # The names are every second part, and each has its group.
            return "".join(
                told.get(part, match[index // 2 + 1]) if index % 2 else part
                for index, part in enumerate(parts)
            )

        text = re.sub(pattern, filled, text)
    return text


def lacking(told: Mapping[str, str]) -> list[str]:
    """The names of figures that stand as they are."""
    names = [re.findall(r"\{([^}]*)\}", one) for many in SENTENCES.values() for one in many]
    return [name for name in dict.fromkeys(sum(names, [])) if name not in told]
