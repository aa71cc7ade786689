"""The GPU receipt: what the last run of `pytest -m gpu` on a card saw, and of which kernels.

A whole, unfiltered run of `pytest -m gpu` writes `tests/gpu_receipt.json`. Where some of its tests
failed that only measured wrongly, these may be run again by their names, on the same kernels: those
that pass are counted as passed, and named under "again". What a run that was stopped did not come
to stands under "left", and is made up for in the same way:

    python -m tests.receipt left > left.txt
    python -m pytest -m gpu @left.txt

or, on all cards of a machine and within a limit of time, by `python -m tests.gpu_run`.

The ordinary tests compare the receipt's hashes, one for each op's kernels and one for the bridge
from PyTorch, with those of the source as it stands, so nothing lands that no card has seen. Where
one of them alone changed, or tests were added,

    python -m tests.receipt renew

puts the tests of that part, and the new ones, under "left". Where most kernels of a part are shown
to be the same as before, by the text that they are compiled from or by their block sizes,

    python -m tests.receipt carry PART "how that was shown" [NAME ...]

keeps what was seen of all its tests but those that are named, and writes the reason under
"carried".

Which ops' kernels a test runs its parameter `op` says, or a marker `kernels` of its own parameters;
a parameter that names gates of channels, or Mosaic GPU, says that it runs theirs; else the
function's marker says it. Any other test counts for all but these and those for wide heads, which
no test runs unasked. The bridge's are those of `tests/test_torch_*.py`. Where no card could be had,

    python -m tests.receipt pending "the reason"

writes a receipt that passes with a loud warning, as does one with tests left. What an earlier run
saw of the same kernels stays in it, failures too, and can be made up for as above: the receipt is
pending until no test is left and none has failed.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import sys
import tokenize
import tomllib
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parent.parent
RECEIPT = ROOT / "tests" / "gpu_receipt.json"
# The file that gets the outcomes of a part of a run, whose parent writes the receipt (gpu_run.py).
OUTCOME_FILE = "ATO_OUTCOMES"

OPS = (
    "attention",
    "linear_attention",
    "decode_attention",
    "wide_attention",
    "channel_gates",
    "mosaic_gpu",
    "mosaic_channel_gates",
    "mosaic_documents",
    "random_features",
    "mosaic_attention",
    "mosaic_delta_rule",
    "delta_rule",
)
BRIDGE = "bridge"
PARTS = (*OPS, BRIDGE)
# What decides which machine code runs: the kernels, what they share, and their block sizes.
SHARED_SOURCES = (
    "ato_jax/device.py",
    "ato_jax/launch.py",
    "ato_jax/tuning.py",
    "ato_jax/tuned/*.toml",  # the op's own tables alone
)
SOURCES_OF_AN_OP = ("spec.py", "features.py", "decay.py", "triton.py", "triton/**/*.py")
# Kernels in a folder of their own, with what they share with the op's others.
APART = {
    "mosaic_gpu": (
        "linear_attention",
        "spec.py",
        "features.py",
        "decay.py",
        "mosaic_gpu/*.py",
        "scans/*.py",
    ),
    "mosaic_attention": ("attention", "spec.py", "mosaic_gpu/*.py"),
    "mosaic_delta_rule": ("delta_rule", "spec.py", "mosaic_gpu/*.py"),
}
# The kit for Triton, and the parts whose kernels are made of it.
KIT = "ato_jax/triton/*.py"
MADE_OF_THE_KIT = ("linear_attention", "mosaic_gpu")
# The kit of Hopper kernels, and the parts that are made of it.
HOPPER_KIT = "ato_jax/mosaic/*.py"
MADE_OF_HOPPERS_KIT = ("mosaic_gpu", "mosaic_attention", "mosaic_delta_rule")
# Kernels of their own, which build on another part's, and of whose code that part runs nothing.
BESIDE = {
    "decode_attention": ("attention", "attention/triton/paged*.py"),
    "wide_attention": ("attention", "attention/triton/wide*.py"),
    "channel_gates": (
        "linear_attention",
        "linear_attention/triton/channel/*.py",
        "linear_attention/triton/prepared/*.py",
    ),
    "mosaic_channel_gates": (
        "mosaic_gpu",
        "linear_attention/mosaic_gpu/channel*.py",
        "linear_attention/scans/channel*.py",
    ),
    "mosaic_documents": ("mosaic_gpu", "linear_attention/mosaic_gpu/document*.py"),
    "random_features": ("mosaic_gpu", "linear_attention/random_features.py"),
}
# What only orders backends: entries of a table, functions of a backend and of `tuning.py`, files.
ORDER = ("first", "last")
ORDERING = ("beats_later_backends", "order")
ORDERING_FILES = ("ato_jax/ops/linear_attention/mosaic_gpu/order.py",)
# The entries of attention's tables that are about these alone.
WIDE = "triton.wide"
# No test runs these unless it says so: the others' heads are narrower, their gates whole, and their
# calls name Triton.
MARKED_ALONE = {
    "wide_attention",
    "channel_gates",
    "mosaic_gpu",
    "mosaic_channel_gates",
    "mosaic_documents",
    "random_features",
    "mosaic_attention",
    "mosaic_delta_rule",
    "delta_rule",
}
# What a parameter says of whose kernels a test runs.
NAMED = {
    "channel": "channel_gates",
    "gates of channels": "channel_gates",
    "mosaic_gpu": "mosaic_gpu",
}
OUTCOMES = ("failed", "error", "passed", "skipped")
FAILURES = ("failed", "error")
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "triton", "torch", "numpy")


def source_files(part: str) -> list[Path]:
    if part == BRIDGE:
        return sorted(ROOT.glob("ato_torch/*.py"))
    below = BESIDE[part][0] if part in BESIDE else part
    folder, *names = APART.get(below, (below, *SOURCES_OF_AN_OP))
    patterns = [*SHARED_SOURCES, *(f"ato_jax/ops/{folder}/{name}" for name in names)]
    patterns += [KIT] if below in MADE_OF_THE_KIT else []
    patterns += [HOPPER_KIT] if below in MADE_OF_HOPPERS_KIT else []
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    found -= {ROOT / name for name in ORDERING_FILES}
    found |= beside(part) if part in BESIDE else set()
    return sorted(found - {path for other in BESIDE if other != part for path in beside(other)})


def beside(part: str) -> set[Path]:
    _, *names = BESIDE[part]
    return {path for name in names for path in (ROOT / "ato_jax" / "ops").glob(name)}


def stripped(source: str) -> str:
    """Python source without comments, docstrings, types of arguments, blank lines and trailing
    spaces, and without what only orders backends: no kernel becomes another by these."""
    return _joined(_bare_lines(source))


def _joined(lines: list[str]) -> str:
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _bare_lines(source: str) -> list[str]:
    """The lines of the source, of which the rest is cut out by position, so that every Python
    version comes to the same text."""
    lines = source.splitlines()
    cuts = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            cuts.append((row, column, len(lines[row - 1])))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg) and node.annotation is not None:
            named = node.col_offset + len(node.arg)
            if node.lineno == node.annotation.end_lineno:
                cuts.append((node.lineno, named, node.annotation.end_col_offset or named))
    for row, first, last in sorted(cuts, reverse=True):
        lines[row - 1] = lines[row - 1][:first] + lines[row - 1][last:]
    for node in ast.walk(ast.parse(source)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, ast.FunctionDef) and node.name in ORDERING:
            _blank(lines, node)
        elif isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            _blank(lines, node.body[0])
    return lines


def _blank(lines: list[str], node: ast.stmt) -> None:
    first, last = node.lineno, node.end_lineno or node.lineno
    lines[first - 1 : last] = [""] * (last - first + 1)


def reached(kit: list[Path], users: list[Path]) -> dict[Path, str]:
    """What the code of `users` runs of a kit: of each file the definitions that are named there, or
    in another such definition, and what is neither a definition nor an import."""
    definitions: dict[str, list[tuple[Path, ast.stmt]]] = {}
    found: dict[Path, list[ast.stmt]] = {path: [] for path in kit}
    for path in kit:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [one.id for target in targets for one in _names(target)]
            elif not isinstance(node, ast.Import | ast.ImportFrom):
                found[path].append(node)
                continue
            else:
                continue
            for name in names:
                definitions.setdefault(name, []).append((path, node))
    trees = [ast.parse(path.read_text()) for path in users]
    waiting: list[ast.AST] = [*trees, *(node for nodes in found.values() for node in nodes)]
    while waiting:
        for name in _identifiers(waiting.pop()):
            for path, node in definitions.pop(name, []):
                if node not in found[path]:
                    found[path].append(node)
                    waiting.append(node)
    return {path: _text_of(path, nodes) for path, nodes in found.items()}


def _names(target: ast.expr) -> list[ast.Name]:
    return [node for node in ast.walk(target) if isinstance(node, ast.Name)]


def _identifiers(tree: ast.AST) -> set[str]:
    """All but those in types of arguments and results."""
    types: list[Any] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            types.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            types.append(node.returns)
    skipped = {id(node) for one in types if one is not None for node in ast.walk(one)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name)
    return found


def _text_of(path: Path, nodes: list[ast.stmt]) -> str:
    lines = _bare_lines(path.read_text())
    kept = []
    for node in sorted(nodes, key=lambda node: node.lineno):
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(one.lineno for one in decorators)])
        kept += lines[first - 1 : node.end_lineno]
    return _joined(kept)


def tables_of(op: str, text: str) -> dict[str, Any]:
    """What a table says of the block sizes of the op's kernels; of decoding, which builds on it,
    attention's, too.

    Not which backend comes first or last where a call names none: no kernel becomes another by
    that.
    """
    tables = tomllib.loads(text)
    of_attention = ("attention",)
    wanted = {
        "decode_attention": (op, *of_attention),
        "wide_attention": of_attention,
        "channel_gates": ("linear_attention",),
    }
    found = {
        name: {
            kind: entries
            for kind, entries in table.items()
            if kind not in ORDER and (kind == WIDE) == (op == "wide_attention")
        }
        for name, table in tables.items()
        if name in wanted.get(op, (op,))
    }
    return {name: kinds for name, kinds in found.items() if kinds}


def source_hash(part: str) -> str:
    digest = hashlib.sha256()
    files = source_files(part)
    kits = {path for pattern in (KIT, HOPPER_KIT) for path in ROOT.glob(pattern)}
    of_kits = reached(
        [path for path in files if path in kits],
        [path for path in files if path.suffix == ".py" and path not in kits],
    )
    for path in files:
        text = path.read_text()
        if path in of_kits:
            text = of_kits[path]
        elif path.suffix == ".py":
            text = stripped(text)
        elif tables := tables_of(part, text):
            text = json.dumps(tables)
        else:
            # A table of another op, or one that only orders backends.
            continue
        if text:
            digest.update(f"{path.relative_to(ROOT)}\n{text}\n".encode())
    return digest.hexdigest()


def source_hashes() -> dict[str, str]:
    return {part: source_hash(part) for part in PARTS}


def parts_of(test: Any) -> set[str]:
    """The parts whose code a collected test runs."""
    bridge = {BRIDGE} if test.nodeid.startswith("tests/test_torch_") else set()
    return _ops_of(test) | bridge


def _ops_of(test: Any) -> set[str]:
    parameters, own = {}, []
    if hasattr(test, "callspec"):
        parameters = test.callspec.params
        own = [mark for mark in getattr(test.callspec, "marks", ()) if mark.name == "kernels"]
    if parameters.get("op") in OPS:
        return {parameters["op"]}
    if not own:
        for value in parameters.values():
            if isinstance(value, str) and value in NAMED:
                return {NAMED[value]}
    marker = own[0] if own else test.get_closest_marker("kernels")
    named = set(marker.args) if marker else set(OPS) - MARKED_ALONE
    assert named <= set(OPS), f"{test.nodeid}: {named}"
    return named


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def write(content: dict[str, Any]) -> None:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    RECEIPT.write_text(
        json.dumps({**content, "date": today, "sources": source_hashes()}, indent=2) + "\n"
    )


def of_run(
    collected: list[str], outcomes: dict[str, str], device: str, packages: dict[str, str]
) -> dict[str, Any]:
    """The receipt of a run of all tests, which may have been stopped. `outcomes` by test."""
    names = {kind: [name for name in outcomes if outcomes[name] == kind] for kind in OUTCOMES}
    left = [name for name in collected if name not in outcomes]
    return _tallied({"device": device, "versions": packages, **names, "left": left, "again": []})


def _tallied(receipt: dict[str, Any]) -> dict[str, Any]:
    """With the numbers of tests, and the tests themselves after all else."""
    lists = (*OUTCOMES, "left", "again")
    rest = {key: value for key, value in receipt.items() if key not in (*lists, "tally")}
    tally = {kind: len(receipt[kind]) for kind in lists}
    return {**rest, "tally": tally, **{kind: sorted(receipt[kind]) for kind in lists}}


def with_second_run(receipt: dict[str, Any], outcomes: dict[str, str]) -> dict[str, Any]:
    """The receipt after a run of some tests that had failed, or were left."""
    found = {**receipt, **{kind: list(receipt[kind]) for kind in (*OUTCOMES, "left", "again")}}
    for name, outcome in outcomes.items():
        if name in found["left"]:
            found["left"].remove(name)
            found[outcome].append(name)
        elif outcome == "passed":
            for kind in FAILURES:
                if name in found[kind]:
                    found[kind].remove(name)
                    found["again"].append(name)
                    found["passed"].append(name)
    if not any(found[kind] for kind in (*FAILURES, "left")):
        found.pop("pending", None)
    return _tallied(found)


def renewed(
    receipt: dict[str, Any], hashes: dict[str, str], parts_by_test: dict[str, set[str]]
) -> dict[str, Any]:
    """The receipt for the source and tests of now: what these changed, or added, is left."""
    changed = {part for part in PARTS if receipt["sources"].get(part) != hashes[part]}
    seen = {name: kind for kind in OUTCOMES for name in receipt[kind] if name in parts_by_test}
    stays = {name: kind for name, kind in seen.items() if not parts_by_test[name] & changed}
    names = {kind: [name for name in stays if stays[name] == kind] for kind in OUTCOMES}
    left = [name for name in parts_by_test if name not in stays]
    again = [name for name in receipt["again"] if name in stays]
    carried = {part: why for part, why in receipt.get("carried", {}).items() if part not in changed}
    found = {**receipt, **names, "left": left, "again": again, "sources": hashes}
    return _tallied({**found, "carried": carried})


def with_carried(
    receipt: dict[str, Any], part: str, reason: str, named: list[str], hashes: dict[str, str]
) -> dict[str, Any]:
    """The receipt with a part's hash of now, although the card saw its kernels before a change that
    left them as they are, but for those of the named tests."""
    known = {name for kind in (*OUTCOMES, "left") for name in receipt[kind]}
    if unknown := sorted(set(named) - known):
        raise ValueError(f"the receipt has no test {unknown[0]}: run `renew` after `carry`")
    stays = {kind: [name for name in receipt[kind] if name not in named] for kind in OUTCOMES}
    again = [name for name in receipt["again"] if name not in named]
    left = sorted({*receipt["left"], *named})
    sources = {**receipt["sources"], part: hashes[part]}
    carried = {**receipt.get("carried", {}), part: reason}
    found = {**receipt, **stays, "left": left, "again": again, "sources": sources}
    return _tallied({**found, "carried": carried})


def collected(session: Any) -> list[str]:
    """Every test of the session, with workers or without."""
    workers = session.config.pluginmanager.get_plugin("dsession")
    if workers is None:
        return [item.nodeid for item in session.items]
    return list(workers.sched.collection or [])


def after(session: Any) -> None:
    """Writes the receipt of a session of every test of the marker gpu, or adds to it."""
    config = session.config
    if hasattr(config, "workerinput") or config.option.collectonly or OUTCOME_FILE in os.environ:
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
    same = found["sources"] == source_hashes() and found.get("device") == device
    if same and {*found["failed"], *found["error"], *found["left"]} & set(outcomes):
        write(with_second_run(found, outcomes))


def verdict(receipt: dict[str, Any], current: dict[str, str]) -> tuple[str | None, str | None]:
    """(what is wrong with the receipt, what to warn of); both None where all is well."""
    if changed := [part for part in PARTS if receipt["sources"].get(part) != current[part]]:
        return f"the source of {', '.join(changed)} changed since: run `pytest -m gpu`", None
    if "pending" in receipt:
        return None, f"NO CARD HAS SEEN ALL OF THIS CODE: {receipt['pending']}"
    if failed := receipt["failed"] + receipt["error"]:
        return f"tests failed on the card: {failed}", None
    if not receipt["passed"]:
        return "no test passed on the card", None
    if receipt["left"]:
        return None, f"THE CARD HAS NOT COME TO {len(receipt['left'])} TESTS OF THIS CODE"
    return None, None


class _Collected:
    """A plugin of pytest that keeps the parts of every test."""

    def __init__(self) -> None:
        self.parts: dict[str, set[str]] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        self.parts = {item.nodeid: parts_of(item) for item in session.items}


def gpu_tests() -> dict[str, set[str]]:
    """The parts of every test of the marker gpu."""
    import pytest

    plugin = _Collected()
    with contextlib.redirect_stdout(io.StringIO()):
        status = pytest.main(["-m", "gpu", "--collect-only", "-q"], plugins=[plugin])
    if status:
        sys.exit(f"pytest could not collect the tests: it ended with {status}")
    return plugin.parts


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["pending", reason] if reason.strip():
            old = json.loads(RECEIPT.read_text())
            seen = renewed(old, source_hashes(), gpu_tests()) if "passed" in old else {}
            write({**seen, "pending": reason.strip()})
        case ["carry", part, reason, *named] if part in PARTS and reason.strip():
            old = json.loads(RECEIPT.read_text())
            found = with_carried(old, part, reason.strip(), named, source_hashes())
            RECEIPT.write_text(json.dumps(found, indent=2) + "\n")
        case ["left"]:
            print("\n".join(json.loads(RECEIPT.read_text()).get("left", [])))
        case ["renew"]:
            old = json.loads(RECEIPT.read_text())
            if "passed" not in old:
                sys.exit("no card has run a test: only a whole run of `pytest -m gpu` renews it")
            write(renewed(old, source_hashes(), gpu_tests()))
            print(len(json.loads(RECEIPT.read_text())["left"]), "tests to run")
        case _:
            sys.exit(
                "usage: python -m tests.receipt pending REASON, or left, or renew, or "
                "carry PART REASON [NAME ...]\n"
                f"current hashes: {source_hashes()}"
            )
