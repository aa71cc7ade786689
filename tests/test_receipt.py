"""The receipt of the last run on a card belongs to the kernels as they stand."""

import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import gpu_run, receipt


def test_the_card_has_seen_these_kernels() -> None:
    wrong, warning = receipt.verdict(
        json.loads(receipt.RECEIPT.read_text()), receipt.source_hashes()
    )
    assert wrong is None, wrong
    if warning:
        warnings.warn(warning, stacklevel=1)


def test_the_hash_covers_every_kernel() -> None:
    covered = {
        str(path.relative_to(receipt.ROOT))
        for op in receipt.OPS
        for path in receipt.source_files(op)
    }
    with_kernels = {
        str(path.relative_to(receipt.ROOT))
        for path in (receipt.ROOT / "ato_jax").rglob("*.py")
        if re.search(r"pallas_call|plgpu\.kernel", path.read_text())
    }
    assert with_kernels <= covered, with_kernels - covered
    folders = {Path(path).parts[2] for path in with_kernels if "ops" in Path(path).parts}
    parts = {*receipt.BESIDE, *receipt.APART}
    assert set(receipt.OPS) == folders | parts
    for part, (op, *_) in receipt.BESIDE.items():
        whole, own = set(receipt.source_files(part)), set(receipt.source_files(op))
        assert own < whole and whole - own == receipt.beside(part)
    for op in ("attention", "linear_attention"):
        others = [path for path in receipt.source_files(op) if "ops" in path.parts]
        assert others and all(path.parts[path.parts.index("ops") + 1] == op for path in others)


def test_each_op_has_its_own_tables() -> None:
    text = (
        '[[attention.first]]\nbackend = "x"\n[[attention.triton]]\na = 1\n'
        '[[linear_attention.last]]\nbackend = "x"\n'
        '[["attention"."triton.wide"]]\na = 4\n'
        "[[decode_attention.triton]]\na = 2\n[[linear_attention.triton]]\na = 3\n"
    )
    attention = {"attention": {"triton": [{"a": 1}]}}
    assert receipt.tables_of("attention", text) == attention
    decoding = attention | {"decode_attention": {"triton": [{"a": 2}]}}
    assert receipt.tables_of("decode_attention", text) == decoding
    assert receipt.tables_of("wide_attention", text) == {"attention": {"triton.wide": [{"a": 4}]}}
    linear = {"linear_attention": {"triton": [{"a": 3}]}}
    assert receipt.tables_of("linear_attention", text) == linear
    order = '[[attention.first]]\nbackend = "x"\n[[attention.last]]\nbackend = "y"\n'
    assert receipt.tables_of("attention", order) == {}


def test_comments_and_docstrings_do_not_count_and_code_does() -> None:
    source = '"""Module."""\n\n\ndef f(x):  # why\n    """Doc\n    string."""\n    return x + 1\n'
    bare = "def f(x):\n    return x + 1\n"
    assert receipt.stripped(source) == receipt.stripped(bare)
    assert receipt.stripped(source) != receipt.stripped(bare.replace("+ 1", "+ 2"))
    assert receipt.stripped('x = "#no comment"') == 'x = "#no comment"'


def test_what_kernels_do_not_use_of_a_kit_does_not_count(tmp_path: Path) -> None:
    kit, kernel = tmp_path / "kit.py", tmp_path / "kernel.py"
    source = "from x import y\nWIDTH = 2\n\ndef one(a: Kind):\n    return a * WIDTH\n\n"
    kernel.write_text("from kit import one\n\ndef kernel(a):\n    return one(a)\n")

    def text(source: str) -> str:
        kit.write_text(source)
        return receipt.reached([kit], [kernel])[kit]

    bare = text(source)
    assert bare == "WIDTH = 2\ndef one(a):\n    return a * WIDTH"
    assert text(source + "class Kind:\n    pass\n\ndef other(a):\n    return one(a)\n") == bare
    assert text(source.replace("2", "3")) != bare
    assert text(source.replace("a * WIDTH", "WIDTH")) != bare


def test_which_backend_is_chosen_does_not_count() -> None:
    rule = "def beats_later_backends(spec):\n    return spec.T > {}\n"
    rule += "def kernel():\n    return {}\n"
    assert receipt.stripped(rule.format(1, 2)) == receipt.stripped(rule.format(3, 2))
    assert receipt.stripped(rule.format(1, 2)) != receipt.stripped(rule.format(1, 3))
    for part in receipt.OPS:
        names = {path.relative_to(receipt.ROOT).as_posix() for path in receipt.source_files(part)}
        assert not names & set(receipt.ORDERING_FILES)
    assert all((receipt.ROOT / name).exists() for name in receipt.ORDERING_FILES)


HASHES = {"attention": "a", "linear_attention": "l", "decode_attention": "d"}
HASHES |= {"wide_attention": "w", "channel_gates": "c", "mosaic_gpu": "m", "bridge": "b"}
HASHES |= {"mosaic_channel_gates": "g", "mosaic_attention": "h", "mosaic_delta_rule": "r"}
HASHES |= {"mosaic_documents": "s", "random_features": "f", "delta_rule": "t"}


def first_run(collected: list[str], outcomes: dict[str, str]) -> dict:
    return {**receipt.of_run(collected, outcomes, "card", {}), "sources": HASHES}


def test_what_failed_may_be_run_again() -> None:
    outcomes = {"a": "passed", "b": "passed", "c": "passed"}
    outcomes |= {"x": "failed", "y": "error", "s": "skipped"}
    first = first_run(list(outcomes), outcomes)
    assert (first["failed"], first["error"], first["left"]) == (["x"], ["y"], [])
    assert first["tally"] == {
        **{"passed": 3, "failed": 1, "error": 1, "skipped": 1},
        **{"left": 0, "again": 0},
    }
    second = receipt.with_second_run(first, {"x": "passed", "z": "passed", "a": "failed"})
    assert second["failed"] == [] and second["error"] == ["y"] and second["again"] == ["x"]
    assert receipt.verdict(second, HASHES)[0] is not None
    third = receipt.with_second_run(second, {"y": "passed"})
    assert third["again"] == ["x", "y"] and receipt.verdict(third, HASHES) == (None, None)
    assert third["tally"]["passed"] == 5 and third["tally"]["error"] == 0


def test_what_a_stopped_run_left_may_be_made_up_for() -> None:
    first = first_run(["a", "b", "c", "d"], {"a": "passed"})
    assert first["left"] == ["b", "c", "d"]
    wrong, warning = receipt.verdict(first, HASHES)
    assert wrong is None and "NOT COME TO 3 TESTS" in str(warning)
    second = receipt.with_second_run(first, {"b": "skipped", "c": "failed"})
    assert second["left"] == ["d"] and second["failed"] == ["c"] and second["skipped"] == ["b"]
    assert "failed" in str(receipt.verdict(second, HASHES)[0])
    third = receipt.with_second_run(second, {"c": "passed", "d": "passed"})
    assert third["left"] == [] and receipt.verdict(third, HASHES) == (None, None)


def test_what_a_change_of_one_part_leaves() -> None:
    outcomes = {"of a": "passed", "of l": "passed", "of both": "passed", "gone": "skipped"}
    first = first_run([*outcomes, "late"], outcomes)
    both = set(HASHES)
    ops = {"of a": {"attention"}, "of l": {"linear_attention"}, "of both": both, "new": both}
    now = {**HASHES, "linear_attention": "m"}
    found = receipt.renewed(first, now, ops)
    assert found["passed"] == ["of a"] and found["left"] == ["new", "of both", "of l"]
    assert found["skipped"] == [] and found["sources"] == now
    # Of the same kernels, what was added alone.
    assert receipt.renewed(first, HASHES, ops)["left"] == ["new"]


@pytest.mark.parametrize(
    ("file", "parameters", "marks", "wanted"),
    [
        ("test_gpu", {"op": "attention"}, [], {"attention"}),
        ("test_gpu", {"T": 3}, ["linear_attention"], {"linear_attention"}),
        ("test_gpu", {"name": "channel"}, ["linear_attention"], {"channel_gates"}),
        ("test_gpu", {}, [], {"attention", "linear_attention", "decode_attention"}),
        ("test_torch_sdpa", {}, ["attention"], {"attention", "bridge"}),
    ],
)
def test_whose_code_a_test_runs(
    file: str, parameters: dict[str, Any], marks: list[str], wanted: set[str]
) -> None:
    test = SimpleNamespace(
        nodeid=f"tests/{file}.py::test_it",
        callspec=SimpleNamespace(params=parameters),
        get_closest_marker=lambda name: SimpleNamespace(args=marks) if marks else None,
    )
    assert receipt.parts_of(test) == wanted


def test_a_marker_of_the_parameters_comes_before_what_they_name() -> None:
    """Rows of softmax attention by Hopper's kernels are none of linear attention's."""
    assert parts_by_marker("mosaic_attention") == {"mosaic_attention"}
    # XLA's kernels are no part's.
    assert parts_by_marker() == set()


def parts_by_marker(*parts: str) -> set[str]:
    own = SimpleNamespace(name="kernels", args=parts)
    parameters = {"implementation": "mosaic_gpu"}
    test = SimpleNamespace(
        nodeid="tests/test_covering.py::test_it",
        callspec=SimpleNamespace(params=parameters, marks=[own]),
        get_closest_marker=lambda name: own,
    )
    return receipt.parts_of(test)


def test_verdicts() -> None:
    good = first_run(["t"], {"t": "passed"})
    assert receipt.verdict(good, HASHES) == (None, None)
    assert "the source of attention changed" in str(
        receipt.verdict(good, {**HASHES, "attention": "b"})[0]
    )
    assert "failed" in str(receipt.verdict({**good, "failed": ["test_x"]}, HASHES)[0])
    assert "passed" in str(receipt.verdict({**good, "passed": []}, HASHES)[0])
    pending = {"sources": HASHES, "pending": "no card today"}
    wrong, warning = receipt.verdict(pending, HASHES)
    assert wrong is None and "no card today" in str(warning)
    assert receipt.verdict(pending, {**HASHES, "attention": "b"})[0] is not None


def test_a_pending_receipt_is_made_up_for() -> None:
    run = {**first_run(["t", "u"], {"t": "failed"}), "pending": "the card was taken away"}
    assert receipt.verdict(run, HASHES)[0] is None
    run = receipt.with_second_run(run, {"u": "passed"})
    assert "pending" in run and run["failed"] == ["t"]
    run = receipt.with_second_run(run, {"t": "passed"})
    assert "pending" not in run and receipt.verdict(run, HASHES) == (None, None)


def test_what_was_seen_of_the_same_kernels_is_carried_over() -> None:
    """But for the named tests, and until the part changes again."""
    run = first_run(["t", "u", "w"], {"t": "passed", "u": "passed", "w": "passed"})
    later = {**HASHES, "attention": "b"}
    run = receipt.with_carried(run, "attention", "the same text", ["u"], later)
    assert run["passed"] == ["t", "w"] and run["left"] == ["u"]
    assert run["carried"] == {"attention": "the same text"}
    wrong, warning = receipt.verdict(run, later)
    assert wrong is None and "1 TESTS" in str(warning)
    with pytest.raises(ValueError, match="no test other"):
        receipt.with_carried(run, "attention", "the same text", ["other"], later)
    parts = {"t": {"attention"}, "u": {"attention"}, "w": {"linear_attention"}}
    again = receipt.renewed(run, {**later, "attention": "c"}, parts)
    assert again["left"] == ["t", "u"] and not again["carried"]


def test_cards_get_the_longest_tests_first() -> None:
    seconds = {"a": 100.0, "b": 60.0, "c": 50.0, "d": 1.0}
    hands = gpu_run.dealt(["d", "new", "c", "b", "a"], 2, seconds)
    assert hands == [["a", "new"], ["b", "c", "d"]]


def test_an_outcome_is_written_as_soon_as_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is ended by its limit keeps what it has seen: a failure with its reason, and not
    a set-up that passed."""
    file = tmp_path / "outcomes_0.jsonl"
    monkeypatch.setenv(receipt.OUTCOME_FILE, str(file))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)

    def report(when: str, outcome: str, why: str = "") -> Any:
        return SimpleNamespace(
            nodeid="tests/test_a.py::test", when=when, outcome=outcome, duration=1.26, longrepr=why
        )

    for made in (report("setup", "passed"), report("call", "passed"), report("teardown", "failed")):
        gpu_run.pytest_runtest_logreport(made)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    gpu_run.pytest_runtest_logreport(report("call", "failed"))
    lines = gpu_run.read(tmp_path)
    assert [(line["outcome"], line["seconds"]) for line in lines] == [
        ("passed", 1.3),
        ("error", 1.3),
    ]
    # The later line counts.
    assert gpu_run.outcomes(lines) == {"tests/test_a.py::test": "error"}
