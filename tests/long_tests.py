"""The tests that take long, and the sources with which each of them last passed.

`tests/long_tests.json` names, for each end of the tested range, the tests that take more than
SECONDS of the processor, with a hash of what can change their outcome. While that hash is the same
they would only pass again, and are skipped; whoever changes a kernel runs those of its op.

    ATO_LONG=run python -m pytest        runs them all the same
    ATO_LONG=record python -m pytest     runs them, and records each that passed

`record` takes names of tests, too: what did not run keeps its entry. Tests that a kernel's author
should not wait for are not in there: each is in the ordinary run again as soon as its sources
differ. A file of tests depends on itself, on the helpers that it imports, on the files of figures
that these name, and on the library: on its op and its tables alone where its name says so, and the
frame.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import re
import resource
import sys
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import pytest

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "long_tests.json"
SECONDS = 2.0
HASH_DIGITS = 16
# One op's kernels, interpreted or compiled, by how the names of their tests begin.
OPS = {
    "test_attention": "attention",
    "test_linear": "linear_attention",
    "test_mosaic": "linear_attention",
    "test_few_keys": "linear_attention",
}
# The tables of block sizes and backends that none of an op's tests reads.
OTHERS = {"attention": ("linear_attention",), "linear_attention": ("attention", "decode_attention")}
FRAME = ("ato_jax/*.py", "ato_jax/tuned/*.toml", "ato_jax/triton/*.py", "ato_jax/mosaic/*.py")
WHOLE = ("ato_jax/**/*.py", "ato_jax/tuned/*.toml")
# What others need besides, by a word in their names.
BESIDES = {"torch": ("ato_torch/*.py",), "benchmark": ("benchmarks/**/*.py",)}
# What no test runs but those of its own, which are quick.
APART = ("ato_jax/quantizing.py",)
# They look at documents and figures of any kind, or start programs that do.
ALWAYS = ("test_docs", "test_examples", "test_project", "test_receipt")
CPU_SECONDS = "cpu_seconds"


def mode() -> str:
    found = os.environ.get("ATO_LONG", "skip")
    if found not in ("skip", "run", "record"):
        raise pytest.UsageError(f"ATO_LONG={found}: it is skip, run or record")
    # Whoever asks for every row gets every test.
    return "run" if found == "skip" and os.environ.get("ATO_ALL_ROWS") == "1" else found


def end() -> str:
    """Outcomes are those of one JAX, and source is parsed by one Python."""
    return f"JAX {jax.__version__}, Python {sys.version_info.major}.{sys.version_info.minor}"


def read() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def skip(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Marks those that passed with the same sources as skipped, and returns them."""
    if mode() != "skip":
        return set()
    recorded = read().get(end(), {})
    # Hashes of those in the record alone: they take a second or two.
    known = [item for item in items if item.nodeid in recorded]
    found = {item for item in known if recorded[item.nodeid] == depends_on(item.path)}
    for item in found:
        item.add_marker(pytest.mark.skip(reason="long, and passed with these sources"))
    return found


def used() -> float:
    """Seconds of the processor, of this process and of those that it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Recorder:
    """Of the process that hears of all outcomes, and keeps each at once: a run may be stopped."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        path = ROOT / report.nodeid.partition("::")[0]
        taken = dict(report.user_properties).get(CPU_SECONDS, 0)
        long = report.passed and taken > SECONDS and not path.stem.startswith(ALWAYS)
        write({report.nodeid: depends_on(path) if long else None})


def write(outcomes: dict[str, str | None]) -> None:
    """None takes a test out of the record."""
    record = read()
    before = record.get(end(), {})
    known = before | outcomes
    if all(before.get(test) == known[test] for test in known):
        return
    record[end()] = {test: known[test] for test in sorted(known) if known[test]}
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


@functools.cache
def depends_on(path: Path) -> str:
    """A hash of the sources that can change the outcomes of a file of tests."""
    digest, others = hashlib.sha256(), OTHERS.get(_op_of(path.stem), ())
    for source in sorted({*of_tests(path), *of_the_library(path.stem)}):
        digest.update(f"{source.relative_to(ROOT)} {_digest(source, others)}\n".encode())
    return digest.hexdigest()[:HASH_DIGITS]


def _op_of(name: str) -> str:
    return next((op for begins, op in OPS.items() if name.startswith(begins)), "")


def of_the_library(name: str) -> set[Path]:
    op = _op_of(name)
    patterns = [*FRAME, "ato_jax/ops/*.py", f"ato_jax/ops/{op}/**/*.py"] if op else [*WHOLE]
    for word, more in BESIDES.items():
        patterns += more if word in name else ()
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return found - {ROOT / name for name in APART}


def of_tests(path: Path) -> set[Path]:
    """The file, what it imports of tests, examples and benchmarks, and the data that these name."""
    found: set[Path] = set()
    waiting = [path, ROOT / "tests" / "conftest.py"]
    while waiting:
        source = waiting.pop()
        if source not in found and source.exists():
            found.add(source)
            waiting += _named_in(source)
    return found - {RECORD, Path(__file__)}


@functools.cache
def _named_in(source: Path) -> list[Path]:
    """Where the modules that a file imports, and the data that it names, would be."""
    # The receipt's own figures change with every run on a card, and decide no test here.
    if source.suffix != ".py" or source.name == "receipt.py":
        return []
    text = source.read_text()
    found = [ROOT / "tests" / named for named in re.findall(r"\w+\.(?:txt|json)\b", text)]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        else:
            continue
        for name in names:
            bare = name.removeprefix("tests.").replace(".", "/") + ".py"
            found += [ROOT / "tests" / bare]
            found += [ROOT / bare] if name.startswith(("examples.", "benchmarks.")) else []
    return found


@functools.cache
def _digest(source: Path, others: tuple[str, ...]) -> str:
    return hashlib.sha256(_text(source, others).encode()).hexdigest()


def _text(source: Path, others: tuple[str, ...] = ()) -> str:
    """Without comments and docstrings, and without the tables of `others`."""
    if source.suffix == ".toml":
        tables = tomllib.loads(source.read_text())
        return repr({name: table for name, table in tables.items() if name not in others})
    if source.suffix != ".py":
        return source.read_text()
    tree = ast.parse(source.read_text())
    for node in ast.walk(tree):
        body: Any = getattr(node, "body", None)
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            del body[0]
    return ast.dump(tree)
