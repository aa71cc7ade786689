"""Private names of JAX and PyTorch: those in our source, and those in docs/private_names.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LIST = ROOT / "docs" / "private_names.md"
LIBRARIES = ("jax", "jaxlib", "torch")


class Row(NamedTuple):
    """A row of a table: what happens when the name is `gone`, and its tests as "file::name"."""

    name: str
    file: str
    gone: str
    tests: tuple[str, ...]


def listed() -> tuple[list[Row], list[Row], list[str], str]:
    """The rows of private names, of those without an underscore, the messages of XLA's, and all of
    the text."""
    text = LIST.read_text()
    private: list[Row] = []
    undocumented: list[Row] = []
    messages: list[str] = []
    heading = ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if len(cells) == 2 and cells[0].startswith("`"):
            messages.append(cells[0].strip("`"))
        elif len(cells) == 5 and cells[0].startswith("`"):
            row = Row(cells[0].strip("`"), cells[1].strip("`"), cells[3], tuple(tests_in(cells[4])))
            (private if heading in ("PyTorch", "JAX") else undocumented).append(row)
    return private, undocumented, messages, text


def tests_in(text: str) -> list[str]:
    return re.findall(r"`(tests/\w+\.py::\w+)`", text)


def exists(test: str) -> bool:
    file, name = test.split("::")
    path = ROOT / file
    return path.exists() and re.search(rf"^def {name}\(", path.read_text(), re.M) is not None


def used() -> set[tuple[str, str]]:
    """Each private name with the file that has it."""
    return {
        (name, str(path.relative_to(ROOT)))
        for package in ("ato_jax", "ato_torch")
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in names_in(path.read_text())
    }


def names_in(source: str) -> set[str]:
    """The names of JAX and PyTorch with an underscore in front of one of their parts, from what
    they are imported from on; only the longest of those that go on in each other."""
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                imported[each.asname or first] = each.name if each.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                imported[each.asname or each.name] = f"{node.module}.{each.name}"
    found = set(imported.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = _parts(node)
            if first in imported:
                found.add(".".join([imported[first], *rest]))
    found = {name for name in found if _is_private(name)}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def _parts(node: ast.expr) -> Iterator[str]:
    """Of `a.b.c`; one empty part where something else than a name is in front."""
    if isinstance(node, ast.Attribute):
        yield from _parts(node.value)
        yield node.attr
    else:
        yield node.id if isinstance(node, ast.Name) else ""


def _is_private(name: str) -> bool:
    library, *parts = name.split(".")
    return library in LIBRARIES and any(
        part.startswith("_") and not part.startswith("__") for part in parts
    )
