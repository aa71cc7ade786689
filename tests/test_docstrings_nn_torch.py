"""Docstrings of the public objects of ato_jax.nn and ato_torch: sections and names.

Their examples run in tests/test_docs.py, with those of ato_jax.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PACKAGES = [
    name
    for name, needs in (("ato_jax.nn", "flax"), ("ato_torch", "torch"))
    if importlib.util.find_spec(needs) is not None
]
# Methods that users call. An example of the class stands for `__call__`; models call `set_view`.
METHODS = {"__call__": False, "init_cache": True, "redraw": True, "set_view": False}
SECTIONS = ("Args", "Returns", "Yields", "Raises", "Example")


def public() -> Iterator[tuple[str, Any, bool]]:
    """Each public function, class and method by its name, and whether it needs an example."""
    seen: list[Any] = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            found = getattr(module, name)
            yield f"{package}.{name}", found, True
            for method, needs_example in METHODS.items() if inspect.isclass(found) else ():
                function = getattr(found, method, None)
                # Not those that are Flax's, nor once more those that a class inherits.
                if getattr(function, "__module__", "").startswith(package) and function not in seen:
                    seen.append(function)
                    yield f"{package}.{name}.{method}", function, needs_example


PUBLIC = list(public())


def sections(found: Any) -> dict[str, str]:
    """The text of each section of a docstring, and under "" what stands before them."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", inspect.getdoc(found) or "", flags=re.M)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def faults(found: Callable[..., Any], needs_example: bool) -> list[str]:
    """What a docstring lacks."""
    parts = sections(found)
    wanted = {"Raises"} | ({"Example"} if needs_example else set())
    # A class of Flax hides its constructor's signature.
    signature = inspect.signature(found.__init__ if inspect.isclass(found) else found)
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    names = [stars.get(each.kind, "") + each.name for each in parameters]
    if names:
        wanted.add("Args")
    returned = str(signature.return_annotation)
    if not inspect.isclass(found) and returned != "None":
        wanted.add("Yields" if "Iterator" in returned else "Returns")
    missing = [f"no section {name}" for name in sorted(wanted - set(parts))]
    summary = parts[""].split("\n\n")[0]
    if not summary.endswith(".") or "\n" in summary.strip():
        missing.append(f"the summary is no sentence of one line: {summary!r}")
    documented = re.findall(r"^  (\*{0,2}\w+): ", parts.get("Args", ""), re.M)
    if documented != names:
        missing.append(f"Args has {documented}, the signature {names}")
    return missing


@pytest.mark.parametrize(
    ("found", "needs_example"), [row[1:] for row in PUBLIC], ids=[row[0] for row in PUBLIC]
)
def test_sections(found: Any, needs_example: bool) -> None:
    assert not faults(found, needs_example)


def test_faults_are_found() -> None:
    def flawed(first: int, second: int) -> int:
        """Adds
        numbers.

        Args:
          first: A number.
          third: None of them.
        """
        return first + second

    assert len(faults(flawed, True)) == 5
