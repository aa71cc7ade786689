"""A planted load on the CPU, and a planted process on the GPU: no command concludes anything."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from absl.testing import flagsaver

from benchmarks import __main__ as entry
from benchmarks import (
    cards,
    choices,
    compare,
    demo,
    devices,
    machine,
    noise,
    other_load,
    results,
    scaling_page,
    timing,
    tune,
)
from benchmarks.cases import PHASES, Case
from benchmarks.choices import CHOSEN, Found
from benchmarks.results import Results
from tests.figures import FACTS, parsed_flags  # noqa: F401
from tests.test_benchmark_noise import STEADY, row_of

# Two cards, of which the second has two slices, as `nvidia-smi -L` lists them.
LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa11)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bb22)
  MIG 1g.10gb     Device  0: (UUID: MIG-cc33)
  MIG 1g.10gb     Device  1: (UUID: MIG-GPU-bb22/1/0)
"""
FIRST, SECOND = ["GPU-aa11"], ["GPU-bb22", "MIG-cc33", "MIG-GPU-bb22/1/0"]
# Runs as long as the tests do, and is no child of them.
STRANGER = 1
ADVISED = "Close other programs (`top` and `nvidia-smi` list them), wait until the machine is idle"


def plant_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, apps: str) -> None:
    """A program of that name, which knows two cards."""
    program = folder / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncase \"$1\" in\n"
        f"-L) cat <<'END'\n{LISTED}END\n;;\n"
        f"--query-compute-apps=gpu_uuid,pid,process_name) cat <<'END'\n{apps}\nEND\n;;\n"
        "*) exit 1;;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(other_load, "_seen_on_gpu", (-1e9, ""))


def plant_on_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Others keep nine cores more busy than there are."""
    busy = 9.0 + len(os.sched_getaffinity(0))
    monkeypatch.setattr(other_load, "SHORTEST_SECONDS", 0.0)
    monkeypatch.setattr(other_load, "busy_seconds", lambda: busy * time.monotonic())
    monkeypatch.setattr(other_load, "family", dict)
    return "other programs kept"


def plant_on_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Calls are timed on this CPU, and other load is looked for as on the first GPU."""
    plant_nvidia_smi(folder, monkeypatch, f"GPU-aa11, {STRANGER}, someone")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(other_load, "Watch", functools.partial(watch_of_gpu, other_load.Watch))
    return f"another process on the GPU: someone (process {STRANGER})"


def watch_of_gpu(watch: Callable[[str], other_load.Watch], platform: str) -> other_load.Watch:
    return watch("gpu")


@pytest.fixture(params=[plant_on_cpu, plant_on_gpu])
def load(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Plants one kind of load, and returns the reason that commands give, the only one there is."""
    monkeypatch.setattr(noise, "MOST_SCATTER", float("inf"))
    monkeypatch.setattr(noise, "MOST_DRIFT", float("inf"))
    monkeypatch.setattr(choices, "SECONDS", 0.0)
    monkeypatch.setattr(devices, "SECONDS", 0.0)
    return str(request.param(tmp_path, monkeypatch))


# What this process runs on.


@pytest.mark.parametrize(
    ("visible", "own"),
    [
        (None, FIRST + SECOND),
        ("0", FIRST),
        ("1", SECOND),
        ("1,0", SECOND + FIRST),
        ("GPU-bb22", SECOND),
        ("GPU-aa", FIRST),
        ("MIG-cc33", SECOND),
        ("MIG-GPU-bb22/1/0", SECOND),
        ("MIG-GPU-aa11/2/0", FIRST),
        # Unknown to nvidia-smi: it is not known which card this is.
        ("7", FIRST + SECOND),
        ("0,GPU-77", FIRST + SECOND),
        ("", FIRST + SECOND),
    ],
)
def test_the_cards_that_a_process_sees(
    visible: str | None, own: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_nvidia_smi(tmp_path, monkeypatch, "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.own_cards() == own


@pytest.mark.parametrize(("visible", "seen"), [("0", False), ("1", True), ("GPU-aa11", False)])
def test_a_process_on_another_card_is_none_of_ours(
    visible: str, seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_nvidia_smi(tmp_path, monkeypatch, f"GPU-bb22, {STRANGER}, some, one\nGPU-aa11, no, line")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    said = f"another process on the GPU: some, one (process {STRANGER})"
    assert other_load.on_gpu() == (said if seen else "")


# The commands.


class Peer:
    """Stands in for PyTorch's process."""

    def __init__(self, platform: str) -> None:
        pass

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ask(self, what: str) -> dict[str, str]:
        return {"version": "0"}

    def sdpa(self, backend: str, case: Case, phase: str, seconds: float) -> timing.Timing:
        return timing.Timing([1e-4 * case.T] * 9, 9)


def test_the_demo_says_that_the_machine_is_busy(
    load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(demo.peers, "Peer", Peer)
    monkeypatch.setattr(demo.byte_limit, "cpu_bandwidth", lambda: 1e9)
    picture = tmp_path / "demo.png"
    with flagsaver.flagsaver(output=str(picture), max_tokens=512, budget_seconds=5.0):
        assert demo.main() == 0
    said = capsys.readouterr().out
    assert f"This machine is busy: {load}" in said and ADVISED in said
    assert "times faster" not in said and "overtakes" not in said
    assert said.endswith(f"{picture}\n") and picture.is_file()


def test_compare_says_that_the_machine_is_busy(
    load: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = other_load.Watch("cpu")
    time.sleep(0.01)
    told, names = watch.told(), []
    assert load in told
    for name, seconds in (("A", 1.0), ("B", 9.0)):
        row = row_of([seconds * one for one in STEADY], [seconds], load=told)
        names.append(str(tmp_path / f"{name}.json"))
        results.write(Path(names[-1]), results.json_text(Results(**FACTS, rows=[row])))
    assert compare.main(names) == 0
    said = capsys.readouterr().out
    assert "This machine is busy" in said and load in said and ADVISED in said
    assert "9.000" not in said and "0 of 1 rows slower" in said


def test_choices_say_that_the_machine_is_busy(
    load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(choices.ROWS, "cpu", choices.ROWS["cpu"][:1])
    # Every backend by name would be an entry.
    monkeypatch.setattr(choices, "ALLOWED", 0.0)
    path = tmp_path / "choices.json"
    given = {"suite": ["choices"], "json": str(path), "forward_only": True}
    with flagsaver.flagsaver(**given):
        assert entry.main(["benchmarks", "run"]) == 0
    said = capsys.readouterr().out
    assert " noisy      attention" in said and noise.MARK in said and "fastest" not in said
    assert "This machine is busy: 1 of 1 rows are not steady" in said
    assert load in said and ADVISED in said
    assert "[[" not in said and "0 of 1 rows exceed" in said
    [row] = json.loads(path.read_text())["rows"]
    assert load in row["doubt"]
    assert entry.main(["benchmarks", "fit", str(path)]) == 0
    said = capsys.readouterr().out
    assert "1 rows are not steady and were left out" in said and ADVISED in said
    assert "0 of 0 rows lack an entry" in said and "[[" not in said


def test_devices_say_that_the_machine_is_busy(
    load: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "devices.json"
    given = {"suite": ["devices"], "devices": ["1"], "programs": 2, "json": str(path)}
    with flagsaver.flagsaver(**given, forward_only=True, case="by batch"):
        assert entry.main(["benchmarks", "run"]) == 0
    said = capsys.readouterr().out
    assert "  noisy" in said and noise.MARK in said and "not steady" in said
    assert "This machine is busy: 1 of 1 rows are not steady" in said
    assert load in said and ADVISED in said
    [row] = json.loads(path.read_text())["rows"]
    assert load in row["load"] and load in row["doubt"] and row["speed_up"] is None


def test_profile_says_that_the_machine_is_busy(
    load: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = "softmax B2 H2 T128 D16 float32"
    with flagsaver.flagsaver(case=case, forward_only=True):
        assert entry.main(["benchmarks", "profile"]) == 0
    said = capsys.readouterr().out
    assert f"This machine is busy: {load}" in said and ADVISED in said
    assert f"all kernels {noise.MARK}" in said and "GB/s" not in said


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 64


class Bench(tune.SteadyBench):
    """Blocks of 16 take half the time; nothing is compiled."""

    steps = [[{"block": 16}, {"block": 64}]]
    default = Config()
    when = {"D": 16}

    def __init__(self, case: Case) -> None:
        self.turns = 0

    def program(self, phase: str, config: Config) -> str:
        return f"{phase} {config.block}"

    def compile(self, configs: Sequence[Config], phases: Sequence[str] = ()) -> None:
        pass

    def wrong(self, config: Config, phases: Sequence[str] = ()) -> None:
        pass

    def forget(self, best: Config) -> None:
        pass

    def _timed(self, phase: str, configs: Sequence[Config], seconds: float) -> list[timing.Timing]:
        self.turns += 1
        return [timing.Timing([float(config.block)] * 5, 5) for config in configs]


def tuned(path: Path, bench: Callable[[Case], Bench] = Bench) -> tuple[int, str]:
    """How many entries were found, and what was said."""
    said: list[str] = []
    case = Case("linear", B=1, H=2, T=64, D=16, dtype="bfloat16")
    found = tune.tune("linear_attention", [case], bench, path, 100.0, 0.02, said.append)
    return found, "\n".join(said)


def test_tune_says_that_the_machine_is_busy(load: str, tmp_path: Path) -> None:
    """The table stays as it is."""
    path = tmp_path / "card.toml"
    path.write_text(text := "# Mine.\n")
    found, told = tuned(path)
    assert found == 0 and path.read_text() == text, told
    assert "not steady, the table is left as it is" in told and " ms (" not in told
    assert "This machine is busy: 1 of 1 cases are not steady" in told
    assert load in told and ADVISED in told


def test_tune_takes_times_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What scatters once is taken again; what always scatters makes no entry, and removes none."""
    monkeypatch.setattr(other_load.Watch, "told", lambda self: "")

    class Scatters(Bench):
        most = 1

        def _timed(self, *given: Any) -> list[timing.Timing]:
            timed = super()._timed(*given)
            if self.turns > self.most:
                return timed
            return [timing.Timing([*one.batches, 1e9], 6) for one in timed]

    class Always(Scatters):
        most = 1 << 20
        default = Config(16)

    path = tmp_path / "card.toml"
    assert tuned(path, Scatters)[0] == 1
    text = path.read_text()
    assert "block = 16" in text
    found, told = tuned(path, Always)
    assert found == 0 and path.read_text() == text and "p95 is" in told and ADVISED in told


# What makes a row doubtful without other programs.

WILD = [1.0] * 9 + [9.0]
DRIFTS = [1.0] * 5 + [1.2] * 5


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        (STEADY, ""),
        (WILD, "b: p95 is 440% above the median"),
        (DRIFTS, "b: its first and last turns differ by 20%"),
    ],
)
def test_one_program_makes_its_row_doubtful(batches: list[float], reason: str) -> None:
    assert noise.doubt_of_row({"a": STEADY, "b": batches}) == reason
    loaded = noise.doubt_of_row({"a": STEADY, "b": batches}, "a load")
    assert loaded == "; ".join(filter(None, [reason, "a load"]))


def found_of(seconds: dict[str, float], doubt: str = "") -> Found:
    sizes = {"shortest": 8}
    return Found("a row", "attention", PHASES[0], "x", {"D": 8}, sizes, seconds, {}, {}, doubt)


def test_a_doubtful_row_is_not_behind_and_a_wrong_choice_is() -> None:
    slow = found_of({CHOSEN: 2.0, "xla": 1.0}, "a load")
    assert not slow.behind and dataclasses.replace(slow, doubt="").behind
    assert found_of({"xla": 1.0}, "a load").behind
    said = choices.verdict([slow, found_of({CHOSEN: 1.0, "xla": 1.0})])
    assert "0 of 2 rows exceed" in said and "1 of 2 rows are not steady" in said
    assert "[[" not in said and "2.000" not in said


def test_fit_takes_files_of_before_and_leaves_out_what_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row that is marked on one card may lack an entry on another."""
    slow = {CHOSEN: 2.0, "xla": 1.0}
    told = [dataclasses.asdict(found_of(slow)), dataclasses.asdict(found_of(slow, "a load"))]
    del told[0]["doubt"]
    names = []
    for name, row in zip("AB", told, strict=True):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"device": name, "rows": [row]}))
        names.append(str(path))
    assert choices.fit(names) == 0
    said = capsys.readouterr().out
    assert "# A (" in said and "# B (" not in said
    assert "1 rows are not steady and were left out" in said
    assert "1 of 1 rows lack an entry" in said


def test_pages_make_no_ratio_of_a_noisy_row_of_devices(tmp_path: Path) -> None:
    """Files that were written before rows had a load are judged by their batches."""
    case, phase = devices.GROUPS["gpu"][0]
    batches = {"one": [4.0] * 10, "all": [2.0] * 10}
    row = {
        "row": str(case), "phase": phase, "devices": 2, "received": 0, "work": 1, "wrong": "",
        "seconds": {"one": 4.0, "all": 2.0}, "batches": batches, "speed_up": 2.0,
    }  # fmt: skip
    alone = {one: 4.0 for one in PHASES}
    assert scaling_page.line(row, alone)[3:6] == ["4000", "2000", "100.0%"]
    assert scaling_page.by_call([row]) == {str(case.call): {phase: 4.0}}
    path = tmp_path / "devices.json"
    wild = {"batches": batches | {"all": [2.0 * one for one in WILD]}}
    for doubtful in ({"load": "a load", "speed_up": None}, wild):
        cells = scaling_page.line(row | doubtful, alone)
        assert cells[3:6] == ["≈4000", "≈2000", noise.NOISY] and cells[-2:] == ["-", "-"]
        assert scaling_page.by_call([row | doubtful]) == {str(case.call): {}}
        file = {"device": "A", "about": {"date": "today"}, "rows": [row | doubtful]}
        path.write_text(json.dumps(file))
        [cells_of_call] = cards.of_one_device([path]).values()
        # The time on one device is in doubt only beside other load, or by its own batches.
        assert cells_of_call == {"A": f"{noise.MARK * ('load' in doubtful)}4000"}
