"""The examples' command lines: help, where they write, and where they run from."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import command

FOLDER = Path(command.__file__).parent
SHARED = {"command", "sharding", "texts", "training"}
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in SHARED)
NEEDS = {"hugging_face": "transformers"}
WRITE = ["02_original_benchmarks", "03_comparison", "char_lm", "encoder", "swap_attention"]


def example(name):
    pytest.importorskip(NEEDS.get(name, "jax"))
    if name == "hugging_face":
        pytest.importorskip("torch")
    return importlib.import_module(f"examples.{name}")


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_says_what_it_does(name, capsys):
    module = example(name)
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert module.__doc__.splitlines()[0] in told and f"python -m examples.{name}" in told
    assert "writes" in told and ("--output" in told) == (name in WRITE)


@pytest.mark.parametrize("name", WRITE)
def test_an_output_that_cannot_be_written_is_refused_at_once(name, tmp_path, capsys):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SystemExit) as ended:
        example(name).main(["--output", str(tmp_path / "file" / "inside")])
    assert ended.value.code == 2
    assert "--output" in capsys.readouterr().err


def test_runs_by_its_path_from_another_folder(tmp_path):
    """Without the repository on Python's path: what is beside the example is found."""
    path = FOLDER / "02_original_benchmarks.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(path), "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr


def test_basics_agree(capsys):
    found = example("01_basics").main([])
    assert len(found) == 4 and max(found.values()) < 1e-4, found
    assert "forward: xla" in capsys.readouterr().out


def test_the_original_benchmarks_are_suites(tmp_path, monkeypatch):
    module = example("02_original_benchmarks")
    from benchmarks import suites

    assert all(suites.named(name) for name in module.SUITES)
    ran = []

    def run(arguments, **options):
        ran.append(arguments)
        return subprocess.CompletedProcess(arguments, 3)

    monkeypatch.setattr(module.subprocess, "run", run)
    assert module.main(["--suite", "ladder", "--output", str(tmp_path)]) == 3
    assert "--suite=ladder" in ran[0] and f"--json={tmp_path / 'original.json'}" in ran[0]


def test_comparison_agrees_with_float64(tmp_path, capsys):
    rows = example("03_comparison").main(
        ["--tokens", "64", "--turns", "1", "--output", str(tmp_path)]
    )
    assert {row["op"] for row in rows} == {"softmax", "linear"}
    assert max(row["error"] for row in rows) < 2e-6
    assert f"wrote {tmp_path / 'comparison.json'}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        example("03_comparison").main(["--tokens", "0", "--output", str(tmp_path)])


def test_the_model_learns_and_writes(capsys):
    first, last = example("04_model").main(["--steps", "25"])
    assert last < first - 1
    assert "subject to the terms and " in capsys.readouterr().out
