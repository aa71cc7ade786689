"""Memory of a training step and latency of a decode loop, on a CPU."""

import json

import jax
import jax.numpy as jnp
import pytest
from absl.testing import flagsaver

from benchmarks import __main__ as entry
from benchmarks import latency, memory, noise, other_load
from benchmarks.cases import Case
from benchmarks.results import ResultsError
from tests.figures import parsed_flags  # noqa: F401

HLO = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[2]{0}}

%inner (p: f32[1000]) -> f32[1000] {
  ROOT %big = f32[1000]{0} negate(%p)
}

ENTRY %main.9 (x.1: f32[4]) -> (f32[2], f32[]) {
  %x.1 = f32[4]{0} parameter(0), metadata={op_name="x"}
  %a = f32[100]{0} broadcast(%x.1), dimensions={}
  %both = (f32[10]{0}, bf16[10]{0}) custom-call(%a), custom_call_target="%x.1"
  %b = pred[50]{0} fusion(%x.1), kind=kLoop, calls=%inner
  %view = bf16[10]{0} get-tuple-element(%both), index=1
  %loop = bf16[10]{0} while(%view), condition=%inner, body=%inner
  %c = f32[2]{0} fusion(%loop, %b), kind=kLoop, calls=%inner
  %d = f32[] constant(0)
  ROOT %out = (f32[2]{0}, f32[]) tuple(%c, %d)
}
"""


def test_a_timeline_by_hand():
    moments = memory.timeline(HLO)
    # x is 16 bytes throughout; a 400, both 40 + 20, b 50, c 8. A view keeps its tuple.
    assert [(one.name, one.held) for one in moments] == [
        ("a", 16 + 400),
        ("both", 16 + 400 + 60),
        ("b", 16 + 60 + 50),
        # In place.
        ("loop", 16 + 60 + 50),
        ("c", 16 + 60 + 50 + 8),
    ]
    assert moments[1].largest == ((400, "a"), (60, "both"), (16, "x.1"))
    text = memory.drawn(moments).text()
    assert len(text.splitlines()) == 2 + 5 and text.count("#" * memory.WIDTH) == 1
    with pytest.raises(ResultsError, match="no schedule"):
        memory.timeline(HLO.replace("is_scheduled=true, ", ""))


def test_the_memory_of_a_step(capsys, monkeypatch):
    case = Case("linear", B=1, H=2, T=32, D=8, dtype="float32")
    monkeypatch.setitem(memory.CASES, "cpu", [case])
    with flagsaver.flagsaver(case="linear"):
        assert entry.main(["benchmarks", "memory"]) == 0
    told = capsys.readouterr().out
    assert "peak by XLA's plan" in told and "Timeline of the step" in told
    assert "Only a GPU's allocator reports what the step itself held." in told
    # What has to be there: weights, and the two sequences.
    arguments = [line for line in told.splitlines() if line.startswith("arguments")]
    assert arguments[0].split()[-1] == f"{4 * (4 * 16 * 16 + 2 * 32 * 16) / 1e6:.3f}"


def test_percentiles_of_a_loop_and_when_not_to_speak():
    mixed = latency.Latency("a loop", 1.0, ([1e-3] * 9 + [2e-3]) * 10)
    assert mixed.doubt == ""
    table = latency.table([mixed])
    assert [name.endswith(", ms") for name in table.head] == [False, *[True] * 6, False]
    row = table.rows[0]
    assert row == ["a loop", "1.000", "1.100", "2.000", "2.000", "2.000", "1000", "1000"]
    slower = latency.Latency("a loop", 1.0, [1e-3] * 50 + [1.2e-3] * 50)
    assert slower.doubt == "its first and last quarters differ by 20%"
    busy = latency.Latency("a loop", 1.0, [1e-3] * 100, "a planted load")
    for one in (slower, busy):
        table = latency.table([one])
        assert table.rows[0][-1] == noise.NOISY and "This machine is busy" in table.notes[0]


def test_a_loop_is_measured_and_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(other_load.Watch, "told", lambda self: "a planted load")
    path = tmp_path / "latency.json"
    with flagsaver.flagsaver(tokens=8, json=str(path)):
        assert entry.main(["benchmarks", "latency"]) == 0
    told = capsys.readouterr().out
    assert "only a GPU can tell" in told and str(path) in told
    assert "This machine is busy: " in told and "a planted load" in told
    rows = json.loads(path.read_text())["rows"]
    assert [len(row["tokens"]) for row in rows] == [8, 8]
    assert all(row["first"] > max(row["tokens"]) for row in rows)


def test_the_loop_of_a_cache_carries_it_on():
    case = Case("softmax", B=1, H=2, G=1, T=1, S=4, D=4, dtype="float32")
    step, cache, token = latency.loop_of(case)
    for length in (3, 3, 3):
        out, cache = jax.jit(step)(cache, token)
        assert cache[2].tolist() == [length] and bool(jnp.isfinite(out).all())
    assert bool((cache[0][0, 3, 0] == token[1][0, 0]).all())


def test_a_case_that_is_not_there_is_named(caplog):
    for command in ("memory", "latency"):
        caplog.clear()
        with flagsaver.flagsaver(case="T7"):
            assert entry.main(["benchmarks", command]) == 2
        assert f"No case of {command} contains --case='T7': " in caplog.text
