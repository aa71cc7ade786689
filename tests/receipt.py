"""The GPU receipt: what the last run of `pytest -m gpu` on a card saw, and of which kernels.

A whole, unfiltered run of `pytest -m gpu` writes `tests/gpu_receipt.json`. Where some of its tests
failed that only measured wrongly, these may be run again by their names, on the same kernels: those
that pass are counted as passed, and named under "again". The ordinary tests
compare its hash with that of the kernels' source as it stands, so nothing lands that no card has
seen. Where no card could be had,

    python -m tests.receipt pending "the reason"

writes a receipt that passes with a loud warning.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import hashlib
import importlib.metadata
import io
import json
import platform
import sys
import tokenize
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parent.parent
RECEIPT = ROOT / "tests" / "gpu_receipt.json"

# What decides which machine code runs: the kernels, what they share, and their block sizes.
KERNEL_SOURCES = (
    "ato_jax/device.py",
    "ato_jax/tuning.py",
    "ato_jax/tuned/*.toml",
    "ato_jax/ops/*/spec.py",
    "ato_jax/ops/*/features.py",
    "ato_jax/ops/*/triton.py",
    "ato_jax/ops/*/triton/*.py",
)
OUTCOMES = ("passed", "failed", "error", "skipped")
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "triton", "torch", "numpy")


def kernel_files() -> list[Path]:
    return sorted(path for pattern in KERNEL_SOURCES for path in ROOT.glob(pattern))


def stripped(source: str) -> str:
    """Python source without comments, docstrings, blank lines and trailing spaces.

    Cut out by position, so that every Python version comes to the same text.
    """
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def kernel_hash() -> str:
    digest = hashlib.sha256()
    for path in kernel_files():
        text = path.read_text()
        text = stripped(text) if path.suffix == ".py" else text
        digest.update(f"{path.relative_to(ROOT)}\n{text}\n".encode())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def write(content: dict[str, Any]) -> None:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    RECEIPT.write_text(
        json.dumps({"date": today, **content, "kernel_hash": kernel_hash()}, indent=2) + "\n"
    )


def write_run(device: str, tally: dict[str, int], failed: list[str]) -> None:
    write({"device": device, "versions": versions(), "tally": tally, "failed": failed})


def with_second_run(receipt: dict[str, Any], passed: set[str]) -> dict[str, Any]:
    """The receipt after a run in which those tests passed."""
    again = [name for name in receipt["failed"] if name in passed]
    tally = dict(receipt["tally"])
    tally["failed"] -= len(again)
    tally["passed"] += len(again)
    left = [name for name in receipt["failed"] if name not in passed]
    again = [*receipt.get("again", []), *again]
    return {**receipt, "tally": tally, "failed": left, "again": again}


def after(session: Any) -> None:
    """Writes the receipt of a session that ran every test of the marker gpu, and no less."""
    config = session.config
    whole = (
        config.args_source is config.ArgsSource.TESTPATHS
        and config.option.markexpr == "gpu"
        and not config.option.keyword
        and not config.option.collectonly
        and not config.option.deselect
        and not getattr(config.option, "lf", False)
        and not session.shouldstop
    )
    if hasattr(config, "workerinput"):
        return
    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    if not whole:
        passed = {report.nodeid for report in stats.get("passed", [])}
        found = json.loads(RECEIPT.read_text())
        same = found["kernel_hash"] == kernel_hash()
        same = same and found.get("device") == jax.devices()[0].device_kind
        if same and passed & set(found["failed"]):
            write(with_second_run(found, passed))
        return
    tally = {outcome: len(stats.get(outcome, [])) for outcome in OUTCOMES}
    failed = [report.nodeid for outcome in ("failed", "error") for report in stats.get(outcome, [])]
    write_run(jax.devices()[0].device_kind, tally, failed)


def verdict(receipt: dict[str, Any], current_hash: str) -> tuple[str | None, str | None]:
    """(what is wrong with the receipt, what to warn of); both None where all is well."""
    if receipt["kernel_hash"] != current_hash:
        return "the kernels changed since: run `pytest -m gpu` on a card", None
    if "pending" in receipt:
        return None, f"NO CARD HAS SEEN THESE KERNELS: {receipt['pending']}"
    if receipt["failed"] or receipt["tally"].get("failed", 0):
        return f"tests failed on the card: {receipt['failed']}", None
    if not receipt["tally"].get("passed", 0):
        return "no test passed on the card", None
    return None, None


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "pending" or not sys.argv[2].strip():
        sys.exit(f"usage: python -m tests.receipt pending REASON\ncurrent hash: {kernel_hash()}")
    write({"pending": sys.argv[2].strip()})
