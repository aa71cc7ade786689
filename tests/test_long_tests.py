"""The record of tests that take long: what makes them run again."""

import os

import pytest

from tests import long_tests

ROOT = long_tests.ROOT
GATES = ROOT / "tests" / "test_linear_gates.py"


def sources(name: str) -> set[str]:
    path = ROOT / "tests" / f"{name}.py"
    found = long_tests.of_tests(path) | long_tests.of_the_library(path.stem)
    return {str(source.relative_to(ROOT)) for source in found}


def test_what_a_file_depends_on():
    of_linear = sources("test_linear_gates")
    assert {
        "ato_jax/autodiff.py",
        "ato_jax/ops/common.py",
        "ato_jax/ops/linear_attention/triton/walk.py",
        "ato_jax/tuned/sm_90.toml",
        "tests/conftest.py",
        "tests/numerics.py",
        "tests/test_linear_gates.py",
        "tests/test_linear_triton.py",  # whose `check` it imports
    } <= of_linear
    assert not any(name.startswith("ato_jax/ops/attention") for name in of_linear)
    assert "tests/gpu_receipt.json" not in of_linear
    assert {"tests/choices.txt", "ato_jax/ops/attention/xla.py"} <= sources("test_choices")
    assert "ato_torch/linear.py" in sources("test_torch_compile")
    assert set(long_tests.OTHERS) == set(long_tests.OPS.values())


@pytest.mark.parametrize(
    ("before", "after", "again"),
    [
        ("return a + b", "return a - b", True),
        ("return a + b", "return a + b  # Of two.", False),
        ('"""Adds."""', '"""Adds two."""', False),
        ("LIMIT = 3", "LIMIT = 4", True),
    ],
)
def test_code_counts_and_comments_do_not(tmp_path, before, after, again):
    source = 'LIMIT = 3\ndef add(a, b):\n    """Adds."""\n    return a + b\n'
    texts = []
    for name, text in (("one.py", source), ("other.py", source.replace(before, after))):
        (tmp_path / name).write_text(text)
        texts.append(long_tests._text(tmp_path / name))
    assert (texts[0] != texts[1]) == again


@pytest.mark.parametrize(
    ("before", "after", "others", "again"),
    [
        ("64", "32", (), True),
        ("64", "32", ("linear_attention",), True),
        ("256", "128", (), True),
        ("256", "128", ("linear_attention",), False),
        ("# Of an op.", "# Of one.", (), False),
    ],
)
def test_tables_of_other_ops_do_not_count(tmp_path, before, after, others, again):
    tables = "# Of an op.\n[attention]\nleast = 64\n[linear_attention]\nleast = 256\n"
    texts = []
    for name, text in (("one.toml", tables), ("other.toml", tables.replace(before, after))):
        (tmp_path / name).write_text(text)
        texts.append(long_tests._text(tmp_path / name, others))
    assert (texts[0] != texts[1]) == again


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid, self.path, self.markers = nodeid, ROOT / nodeid.partition("::")[0], []

    def add_marker(self, marker: object) -> None:
        self.markers.append(marker)


def test_only_what_passed_with_these_sources_is_skipped(monkeypatch, tmp_path):
    for name in ("ATO_LONG", "ATO_ALL_ROWS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(long_tests, "RECORD", tmp_path / "record.json")
    passed, failed, changed, new = items = [
        Item(f"tests/test_linear_gates.py::test_{name}") for name in ("a", "b", "c", "d")
    ]
    assert long_tests.skip(items) == set()
    same = long_tests.depends_on(GATES)
    long_tests.write({passed.nodeid: same, failed.nodeid: same, changed.nodeid: "another"})
    long_tests.write({failed.nodeid: None})
    assert long_tests.skip(items) == {passed}
    assert [len(item.markers) for item in items] == [1, 0, 0, 0]
    monkeypatch.setenv("ATO_LONG", "run")
    assert long_tests.skip(items) == set()


def test_the_record_names_tests_that_there_are():
    for tests in long_tests.read().values():
        for test in tests:
            file, name = test.partition("[")[0].split("::")
            assert f"def {name}(" in (ROOT / file).read_text(), test


def test_an_unknown_mode_is_named(monkeypatch):
    monkeypatch.setitem(os.environ, "ATO_LONG", "never")
    with pytest.raises(pytest.UsageError, match="ATO_LONG=never: it is skip, run or record"):
        long_tests.mode()
