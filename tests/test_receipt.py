"""The receipt of the last run on a card belongs to the kernels as they stand."""

import json
import warnings

from tests import receipt


def test_the_card_has_seen_these_kernels() -> None:
    wrong, warning = receipt.verdict(
        json.loads(receipt.RECEIPT.read_text()), receipt.kernel_hash()
    )
    assert wrong is None, wrong
    if warning:
        warnings.warn(warning, stacklevel=1)


def test_the_hash_covers_every_kernel() -> None:
    covered = {str(path.relative_to(receipt.ROOT)) for path in receipt.kernel_files()}
    with_kernels = {
        str(path.relative_to(receipt.ROOT))
        for path in (receipt.ROOT / "ato_jax").rglob("*.py")
        if "pallas_call" in path.read_text()
    }
    assert with_kernels and with_kernels <= covered


def test_comments_and_docstrings_do_not_count_and_code_does() -> None:
    source = '"""Module."""\n\n\ndef f(x):  # why\n    """Doc\n    string."""\n    return x + 1\n'
    bare = "def f(x):\n    return x + 1\n"
    assert receipt.stripped(source) == receipt.stripped(bare)
    assert receipt.stripped(source) != receipt.stripped(bare.replace("+ 1", "+ 2"))
    assert receipt.stripped('x = "#no comment"') == 'x = "#no comment"'


def test_what_failed_may_be_run_again() -> None:
    outcomes = {"a": "passed", "b": "passed", "c": "passed"}
    outcomes |= {"x": "failed", "y": "error", "s": "skipped"}
    first = {"kernel_hash": "h", **receipt.of_run(list(outcomes), outcomes, "card", {})}
    assert first["failed"] == ["x", "y"] and "left" not in first
    assert first["tally"] == {"passed": 3, "failed": 1, "error": 1, "skipped": 1}
    second = receipt.with_second_run(first, {"x": "passed", "z": "passed", "a": "failed"})
    assert second["failed"] == ["y"] and second["again"] == ["x"]
    assert second["tally"] == {"passed": 4, "failed": 0, "error": 1, "skipped": 1}
    assert receipt.verdict(second, "h")[0] is not None
    third = receipt.with_second_run(second, {"y": "passed"})
    assert third["again"] == ["x", "y"] and receipt.verdict(third, "h") == (None, None)
    assert third["tally"] == {"passed": 5, "failed": 0, "error": 0, "skipped": 1}


def test_what_a_stopped_run_left_may_be_made_up_for() -> None:
    first = receipt.of_run(["a", "b", "c", "d"], {"a": "passed"}, "card", {})
    first["kernel_hash"] = "h"
    assert first["left"] == ["b", "c", "d"]
    wrong, warning = receipt.verdict(first, "h")
    assert wrong is None and "NOT COME TO 3 TESTS" in str(warning)
    second = receipt.with_second_run(first, {"b": "skipped", "c": "failed"})
    assert second["left"] == ["d"] and second["failed"] == ["c"]
    assert second["tally"] == {"passed": 1, "failed": 1, "error": 0, "skipped": 1}
    assert "failed" in str(receipt.verdict(second, "h")[0])
    third = receipt.with_second_run(second, {"c": "passed", "d": "passed"})
    assert "left" not in third and receipt.verdict(third, "h") == (None, None)


def test_verdicts() -> None:
    good = {"kernel_hash": "a", "tally": {"passed": 3, "failed": 0}, "failed": []}
    assert receipt.verdict(good, "a") == (None, None)
    assert "changed" in str(receipt.verdict(good, "b")[0])
    assert "failed" in str(receipt.verdict({**good, "failed": ["test_x"]}, "a")[0])
    assert "passed" in str(receipt.verdict({**good, "tally": {}}, "a")[0])
    pending = {"kernel_hash": "a", "pending": "no card today"}
    wrong, warning = receipt.verdict(pending, "a")
    assert wrong is None and "no card today" in str(warning)
    assert receipt.verdict(pending, "b")[0] is not None
