"""What Griffe, which reads the docstrings for the site, is told of this project's style."""

from __future__ import annotations

import re
from typing import Any

import griffe

# They name `**options` without its stars, of which Griffe would warn; that each argument has its
# entry tests/test_docs.py checks. (Options in docs/reference/nn.md and torch.md say so, too.)
WITHOUT_STARS = ("ato_jax.nn", "ato_torch")


class Sections(griffe.Extension):
    """`Example:` is a section of `>>>` lines, and overloads are left to type checkers."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )
            if obj.path.startswith(WITHOUT_STARS):
                obj.docstring.parser_options = {"warnings": False}

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        func.overloads = None
