"""The GPU receipt: what the last run of `pytest -m gpu` on a card saw, and of which kernels.

A whole, unfiltered run of `pytest -m gpu` writes `tests/gpu_receipt.json`. Where some of its tests
failed that only measured wrongly, these may be run again by their names, on the same kernels: those
that pass are counted as passed, and named under "again". What a run that was stopped did not come
to stands under "left", and is made up for in the same way:

    python -m tests.receipt left > left.txt
    python -m pytest -m gpu @left.txt

The ordinary tests compare the receipt's hash with that of the kernels' source as it stands, so
nothing lands that no card has seen. Where no card could be had,

    python -m tests.receipt pending "the reason"

writes a receipt that passes with a loud warning, as does one with tests left.
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
    "ato_jax/launch.py",
    "ato_jax/tuning.py",
    "ato_jax/tuned/*.toml",
    "ato_jax/ops/*/spec.py",
    "ato_jax/ops/*/features.py",
    "ato_jax/ops/*/triton.py",
    "ato_jax/ops/*/triton/*.py",
)
OUTCOMES = ("failed", "error", "passed", "skipped")
FAILURES = ("failed", "error")
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


def of_run(
    collected: list[str], outcomes: dict[str, str], device: str, packages: dict[str, str]
) -> dict[str, Any]:
    """The receipt of a run of all tests, which may have been stopped. `outcomes` by test."""
    tally = {name: list(outcomes.values()).count(name) for name in OUTCOMES}
    failed = [name for name, outcome in outcomes.items() if outcome in FAILURES]
    left = [name for name in collected if name not in outcomes]
    return {
        **{"device": device, "versions": packages, "tally": tally, "failed": failed},
        **({"left": left} if left else {}),
    }


def with_second_run(receipt: dict[str, Any], outcomes: dict[str, str]) -> dict[str, Any]:
    """The receipt after a run of some tests that had failed, or were left."""
    tally, failed = dict(receipt["tally"]), list(receipt["failed"])
    left, again = list(receipt.get("left", [])), list(receipt.get("again", []))
    for name, outcome in outcomes.items():
        if name in left:
            left.remove(name)
            tally[outcome] += 1
            failed += [name] if outcome in FAILURES else []
        elif name in failed and outcome == "passed":
            failed.remove(name)
            again.append(name)
            tally["failed" if tally["failed"] else "error"] -= 1
            tally["passed"] += 1
    found = {**receipt, "tally": tally, "failed": failed}
    for key, names in (("left", left), ("again", again)):
        found.pop(key, None)
        found |= {key: names} if names else {}
    return found


def collected(session: Any) -> list[str]:
    """Every test of the session, with workers or without."""
    workers = session.config.pluginmanager.get_plugin("dsession")
    if workers is None:
        return [item.nodeid for item in session.items]
    return list(workers.sched.collection or [])


def after(session: Any) -> None:
    """Writes the receipt of a session of every test of the marker gpu, or adds to it."""
    config = session.config
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    # A test that failed and then had an error in its end has failed.
    outcomes = {
        report.nodeid: outcome
        for outcome in reversed(OUTCOMES)
        for report in stats.get(outcome, [])
    }
    whole = (
        config.args_source is config.ArgsSource.TESTPATHS
        and config.option.markexpr == "gpu"
        and not config.option.keyword
        and not config.option.deselect
        and not getattr(config.option, "lf", False)
        and not session.shouldstop
    )
    device = jax.devices()[0].device_kind
    if whole:
        write(of_run(collected(session), outcomes, device, versions()))
        return
    found = json.loads(RECEIPT.read_text())
    same = found["kernel_hash"] == kernel_hash() and found.get("device") == device
    if same and {*found["failed"], *found.get("left", [])} & set(outcomes):
        write(with_second_run(found, outcomes))


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
    if "left" in receipt:
        return None, f"THE CARD HAS NOT COME TO {len(receipt['left'])} TESTS OF THESE KERNELS"
    return None, None


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["pending", reason] if reason.strip():
            write({"pending": reason.strip()})
        case ["left"]:
            print("\n".join(json.loads(RECEIPT.read_text()).get("left", [])))
        case _:
            sys.exit(
                "usage: python -m tests.receipt pending REASON, or left\n"
                f"current hash: {kernel_hash()}"
            )
