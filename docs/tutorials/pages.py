"""Reads the code blocks of a tutorial page and runs them.

The blocks of a page that are marked `python`, and nothing else, share one namespace and run from
top to bottom. Blocks marked `python gpu` need a card and are left out.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

FOLDER = pathlib.Path(__file__).parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(name: str) -> list[tuple[int, str]]:
    """The line on which each block of a page starts, and its code."""
    text = (FOLDER / f"{name}.md").read_text()
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in BLOCK.finditer(text)]


def run(name: str) -> dict[str, Any]:
    """Runs a page and returns its namespace; line numbers in a traceback are those of the page."""
    path = FOLDER / f"{name}.md"
    namespace: dict[str, Any] = {"__name__": path.stem}
    for line, code in blocks(name):
        exec(compile("\n" * line + code, str(path), "exec"), namespace)
    return namespace
