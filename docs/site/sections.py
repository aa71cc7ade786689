"""What Griffe, which reads the docstrings for the site, is told of this project's style."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Sections(griffe.Extension):
    """`Example:` is a section of `>>>` lines, and overloads are left to type checkers."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        func.overloads = None
