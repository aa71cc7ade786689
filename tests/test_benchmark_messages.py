"""What the commands say: help, progress, errors, names of files."""

import json
import logging as standard_logging
import math
import os
import sys
import time
import types

import pytest
from absl import flags, logging
from absl.testing import flagsaver

import benchmarks
from benchmarks import __main__ as entry
from benchmarks import ahead, choices, devices, peers, progress, results, show, tune, usage
from benchmarks.choices import Found
from benchmarks.results import Results, ResultsError
from tests.figures import FACTS, parsed_flags  # noqa: F401
from tests.test_benchmark_busy import Bench, tuned
from tests.test_benchmark_noise import CASE, STEADY, row_of


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
    # Beginning with the command that it is defined for, whatever values absl puts before that.
    for flag in own:
        command = usage.told(flag).split()[0].rstrip(":")
        assert f"  --{flag.name}" in usage.text(command, entry.COMMANDS, ""), flag.name
    of_run = usage.text("run", entry.COMMANDS, "")
    assert "--part=...  --suite=choices or cliffs: K/N" in of_run
    assert "--dtype=...  all cases in this dtype, one of bfloat16" in of_run


@pytest.mark.parametrize(
    ("command", "flag"),
    [("latency", "part"), ("tune", "json"), ("fit", "case"), ("plot", "suite"), ("memory", "csv")],
)
def test_a_flag_of_another_command_is_named(command, flag, monkeypatch, caplog):
    monkeypatch.setattr(flags.FLAGS[flag], "present", 1)
    assert entry.main(["benchmarks", command]) == 2
    said = f"{command} takes no --{flag}: `{command} --help` lists what it takes"
    assert caplog.messages == [said]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"suite": ["smoke"], "part": "1/2"}, "--part is of --suite=choices or cliffs alone"),
        ({"suite": ["devices"], "part": "1/2"}, "--part is of --suite=choices or cliffs alone"),
        ({"suite": ["choices"], "rows": ["maps"]}, "--rows is of --suite=cliffs alone"),
        ({"suite": ["linear"], "devices": ["1"]}, "--devices is of --suite=devices alone"),
        ({"suite": ["choices"], "csv": "a.csv"}, "choices writes --json alone: no --csv"),
        ({"suite": ["devices"], "keep": True}, "devices writes --json alone: no --csv"),
        ({"suite": ["choices"], "dtype": "float32"}, "choices has rows of every dtype"),
        ({"suite": ["choices"], "case": "no such"}, "'no such': attention B1 H2 T32 D16"),
        ({"suite": ["devices"], "case": "no such"}, "'no such': linear_attention B1 H2 T64"),
        ({"suite": ["cliffs"], "case": "no such"}, "No row of cliffs contains --case='no such': "),
    ],
)
def test_flags_that_a_suite_does_not_take_are_named(given, said, caplog):
    with flagsaver.flagsaver(**given):
        assert entry.main(["benchmarks", "run"]) == 2
    assert said in caplog.text


def test_a_table_of_no_row_is_an_error_and_a_sweeps_has_its_rows(tmp_path, capsys, caplog):
    path = tmp_path / "figures.json"
    found = Results(**FACTS, rows=[row_of(STEADY, [1.0])], suites={"tiny": 1.0})
    results.write(path, results.json_text(found))
    assert entry.main(["benchmarks", "table", str(path)]) == 0
    assert "a card; JAX 2" in (told := capsys.readouterr().out) and "1000" in told
    with flagsaver.flagsaver(case="no such"):
        assert entry.main(["benchmarks", "table", str(path)]) == 2
    assert f"No row contains --case='no such': {CASE}" in caplog.text
    assert capsys.readouterr().out == ""


# How far a command is, and what is left of one that is stopped.


@pytest.mark.parametrize(
    ("command", "parts", "given"),
    [
        ("memory", 1, {"case": "softmax"}),
        ("latency", 1, {"case": "step", "tokens": 8}),
        ("profile", 1, {"case": "softmax B2 H2 T128 D16 float32", "forward_only": True}),
        ("run", 1, {"suite": ["devices"], "case": "by batch", "forward_only": True}),
        ("run", 2, {"suite": ["choices"], "case": "lengths"}),
    ],
)
def test_long_commands_show_how_far_they_are(command, parts, given, monkeypatch, capsys):
    begun, shown = [], []
    start = progress.start
    monkeypatch.setattr(progress, "start", lambda *of: (begun.append(of[0]), start(*of)))
    monkeypatch.setattr(progress, "show", lambda what: shown.append((progress._done, what)))
    monkeypatch.setattr(choices, "measure", lambda row, phase, *_: choice(row, phase))
    with flagsaver.flagsaver(**given):
        assert entry.main(["benchmarks", command]) == 0
    assert begun == [parts]
    # The line of the first part stands while nothing is done, and is cleared at the end.
    assert any(done == 0 and what for done, what in shown) and shown[-1] == (parts, "")


def choice(row, phase):
    return Found(str(row), row.op, phase, "xla", {}, {}, {"None": 1.0, "xla": 1.0}, {}, {})


def test_tune_shows_how_far_it_is(tmp_path, monkeypatch):
    begun, shown = [], []
    monkeypatch.setattr(progress, "start", lambda *of: begun.append(of))
    monkeypatch.setattr(progress, "show", shown.append)
    steady = type("Steady", (Bench,), {"seconds": tune.Bench.seconds})
    tuned(tmp_path / "card.toml", steady)
    assert begun[0][0] == 1 and shown[0].startswith("tuning linear B1") and shown[-1] == ""


def test_a_line_is_said_above_the_bar(monkeypatch, capsys):
    written = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "write", written.append)
    progress.start(2, time.monotonic() + 60)
    progress.show("a case")
    progress.say("a line")
    assert capsys.readouterr().out == "a line\n" and written[1] == "\r\x1b[K"
    # Before the first part is done, the time that is left is all that there is.
    assert written[0].endswith("60 s left, a case") and written[2].endswith("left, a case")
    progress.start(0)
    progress.show("")


@pytest.mark.parametrize("suite", ["choices", "devices"])
def test_a_suite_that_is_stopped_goes_on(suite, tmp_path, monkeypatch, caplog, capsys):
    """It keeps its rows, and those of a file of its name that was there."""
    path, stop, ran = tmp_path / "figures.json", [True], []
    path.write_text("of before")

    def measured(what, phase="", *_):
        if stop[0] and ran:
            raise KeyboardInterrupt
        ran.append(str((what, phase)))
        if suite == "choices":
            return choice(what, phase)
        (case, of_phase), count = what
        return devices.Found(str(case), of_phase, count, seconds={"one": 1.0, "all": 1.0})

    monkeypatch.setattr(choices, "_measured", measured)
    monkeypatch.setattr(devices, "measured", measured)
    monkeypatch.setattr(devices, "compiled", lambda *_: ({}, {}))
    case = {"choices": "lengths", "devices": "by batch"}[suite]
    given = {"suite": [suite], "case": case, "json": str(path)}
    with flagsaver.flagsaver(**given):
        assert entry.main(["benchmarks", "run"]) == 130
    assert f"What was measured is in {path}: the same command with --resume" in caplog.text
    assert path.with_name("figures.json.earlier").read_text() == "of before"
    assert len(json.loads(path.read_text())["rows"]) == 1
    stop[0] = False
    with flagsaver.flagsaver(**given, resume=True):
        assert entry.main(["benchmarks", "run"]) == 0
    told = json.loads(path.read_text())
    assert len(told["rows"]) == len(ran) == len(set(ran)) == 2
    # Rows that are not steady are measured again, and stay until then.
    told["rows"][0] |= {"doubt": "a load"} if suite == "choices" else {"load": "a load"}
    path.write_text(json.dumps(told))
    stop[0] = True
    with flagsaver.flagsaver(**given, resume=True):
        assert entry.main(["benchmarks", "run"]) == 130
    assert len(json.loads(path.read_text())["rows"]) == 2
    stop[0] = False
    with flagsaver.flagsaver(**given, resume=True):
        assert entry.main(["benchmarks", "run"]) == 0
    assert len(ran) == 3 and "a load" not in path.read_text()
    # Another version's rows are not gone on with.
    path.write_text(json.dumps(told | {"jax": "0.0.1"}))
    with flagsaver.flagsaver(**given, resume=True):
        assert entry.main(["benchmarks", "run"]) == 2
    assert f"{path} cannot be resumed: jax is 0.0.1 there and " in caplog.text
    path.write_text('{"rows": [{"case": 1}]}')
    with flagsaver.flagsaver(**given, resume=True):
        assert entry.main(["benchmarks", "run"]) == 2
    assert f"{path} holds no rows of these benchmarks' {suite}" in caplog.text
    assert path.read_text() == '{"rows": [{"case": 1}]}'


def test_a_stopped_command_promises_no_more_than_it_does(monkeypatch, tmp_path, caplog):
    def stopped(names):
        raise KeyboardInterrupt

    path = tmp_path / "figures.json"
    for command, text, said in (
        ("demo", "", "Stopped. Files that were written are whole."),
        ("run", "", "Stopped. Without --json nothing was kept."),
        ("latency", "{}", f"Stopped. What was measured is in {path}"),
    ):
        caplog.clear()
        path.write_text(text)
        monkeypatch.setitem(entry.COMMANDS, command, stopped)
        with flagsaver.flagsaver(json=str(path) * bool(text)):
            assert entry.main(["benchmarks", command]) == 130
        assert caplog.messages == [said]


def test_ctrl_c_is_for_the_driver_alone(monkeypatch):
    """PyTorch's process prints nothing of it, and is ended at once, whatever it does."""
    silent = "import sys, time\nfor line in sys.stdin: time.sleep(60)"
    monkeypatch.setattr(peers.Peer, "COMMAND", (sys.executable, "-c", silent))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), peers.Peer("cpu") as peer:
        assert os.getpgid(peer._process.pid) != os.getpgid(0)
        raise KeyboardInterrupt
    assert peer._process.poll() is not None and time.monotonic() - start < 5


def test_compiling_ahead_that_is_stopped_ends_its_processes(monkeypatch):
    def stopped(futures, seconds):
        while not any(one._process for one in made):
            time.sleep(0.01)
        processes.extend(one._process for one in made if one._process)
        raise KeyboardInterrupt

    made, processes = [], []
    worker = ahead._Worker
    monkeypatch.setattr(ahead, "_Worker", lambda *_: made.append(worker(*_)) or made[-1])
    monkeypatch.setattr(ahead.concurrent.futures, "wait", stopped)
    with pytest.raises(KeyboardInterrupt):
        choices.compiled_ahead([(choices.ROWS["cpu"][0], "forward")], "cpu", 60.0, 1)
    assert processes and all(one.poll() is not None for one in processes)


def test_a_stopped_program_ends_at_once(monkeypatch):
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    assert [entry.ended(status) for status in (0, 1, 130)] == [0, 1, 130]
    assert ends == [130]


def test_what_tune_is_asked_wrongly_is_named(tmp_path, caplog):
    with flagsaver.flagsaver(only="no such"):
        assert entry.main(["benchmarks", "tune", "attention"]) == 2
    assert "No case of tune attention contains --only='no such': softmax B4" in caplog.text
    path = tmp_path / "card.toml"
    path.write_text("no table")
    with pytest.raises(ResultsError, match="card.toml is no table of block sizes: "):
        tuned(path)
    assert path.read_text() == "no table"


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
