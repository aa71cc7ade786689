"""What the commands say: help, progress, errors, names of files."""

import logging as standard_logging
import math
import sys
import time
import types

import pytest
from absl import flags, logging

import benchmarks
from benchmarks import __main__ as entry
from benchmarks import progress, results, show, usage
from benchmarks.results import Results
from tests.figures import FACTS, parsed_flags  # noqa: F401


@pytest.mark.parametrize("command", ["", *entry.COMMANDS])
def test_help_of_every_command(command, capsys):
    with pytest.raises(SystemExit) as ended:
        entry.parsed(["benchmarks", *filter(None, [command]), "--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0 and "python -m benchmarks" in told
    assert all(len(line) <= 110 for line in told.splitlines())
    if command in ("run", "demo", "tune", "profile", "report"):
        wanted = {"run": "--suite", "demo": "--output", "tune": "--budget_s", "profile": "--case"}
        assert f"  {wanted.get(command, '--check')}" in told.split("Flags:")[1]
    if not command:
        assert all(f" {name}" in told for name in entry.COMMANDS)


def test_every_flag_is_in_the_help_of_a_command():
    own = [
        flag
        for module, of_module in flags.FLAGS.flags_by_module_dict().items()
        if module.startswith("benchmarks.")
        for flag in of_module
    ]
    told = {flag.name for command in entry.COMMANDS for flag in usage.flags_of(command)}
    assert own and {flag.name for flag in own} - told == set()


def test_a_message_has_no_prefix_of_the_log():
    assert entry.main(["benchmarks", "sing"]) == 2
    record = standard_logging.LogRecord("absl", 40, __file__, 1, "No suite %s", ("sing",), None)
    assert logging.get_absl_handler().format(record) == "No suite sing"


def test_the_bar_has_the_time_left(monkeypatch):
    now, written = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "write", written.append)
    progress.start(4)
    progress.show("first")
    assert progress.left() is None and written[-1].endswith(f"[{'.' * progress.WIDTH}] first")
    now[0] += 100
    progress.step()
    progress.show("second")
    assert progress.left() == 300 and written[-1].endswith("5 min left, second")
    assert written[-1].count("#") == progress.WIDTH // 4
    progress.start(4, end=now[0] + 120)
    now[0] += 100
    progress.step()
    # The run ends at a set time, before all parts are done.
    assert progress.left() == 20
    progress.show("")
    assert written[-1] == "\r\x1b[K"
    progress.start(0)
    assert [progress.duration(one) for one in (9, 200, 7200)] == ["9 s", "3 min", "2.0 h"]
    assert math.isinf(progress._end)


def test_plot_says_when_it_drew_nothing(tmp_path, capsys, monkeypatch):
    # `test_smoke_runs` shows that nothing is drawn of figures that no picture is of.
    nothing = types.SimpleNamespace(draw=lambda found, folder: [], SUITES=("ladder",))
    monkeypatch.setattr(benchmarks, "plots", nothing, raising=False)
    path = tmp_path / "figures.json"
    results.write(path, results.json_text(Results(**FACTS)))
    assert show.plot([str(path)]) == 1
    assert f"Nothing was drawn: {path} has no steady figures" in capsys.readouterr().out
