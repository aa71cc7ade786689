"""The search for block sizes: what it tries, what it drops, and the table that it writes."""

import dataclasses
import tomllib

import jax
import pytest
from absl import flags

import ato_jax
from ato_jax import device, tuning
from ato_jax.ops.linear_attention import triton
from benchmarks import __main__ as entry
from benchmarks import timing, tune
from benchmarks.cases import Case
from tests import numerics

H200 = device.Device("gpu", "NVIDIA H200", (9, 0), 132, 232_448)
TINY = Case("linear", B=1, H=1, T=64, D=16, dtype="float32")
WHEN = {"dtype": "float32", "D": 16, "V": 16, "causal": False, "decay": "none"}
WHEN |= {"segments": "none", "features": "elementwise", "precision": "exact"}


@dataclasses.dataclass(frozen=True)
class Config:
    state_block: int = 32
    state_warps: int = 4
    dq_block: int = 32
    dq_programs: int = 2


class Spec:
    def __init__(self, case):
        self.case = case

    def traits(self):
        return WHEN | {"D": self.case.D, "normalize": True}


class Bench:
    """Times that follow from the config alone; a block of 128 does not compile, 64 is wrong."""

    def __init__(self, case):
        self.spec, self.default = Spec(case), Config()
        self.best_block, self.compared = 16, []

    def program(self, phase, config):
        if phase == "forward":
            return f"forward {config.state_block} {config.state_warps}"
        return f"backward {config.dq_block} {config.dq_programs}"

    def compile(self, configs):
        self.compared.append(len(configs))

    def wrong(self, config):
        if 128 in (config.state_block, config.dq_block):
            return "does not compile"
        return "out is off by 1.0e-01" if 64 in (config.state_block, config.dq_block) else None

    def seconds(self, phase, configs, seconds):
        if phase == "forward":
            return [1 if config.state_block == self.best_block else 1.5 for config in configs]
        return [1 + abs(config.dq_programs - 4 * 132) / 1e4 for config in configs]

    def forget(self, best):
        pass


STEPS = (
    {"state_block": (16, 32, 64, 128), "state_warps": (4, 8)},
    {"dq_block": (16, 64)},
    {"dq_programs": (1, 4)},
)


def search(bench, out_of_time=lambda: False):
    said = []
    return tune.descend(bench, STEPS, 132, out_of_time, said.append), said


def test_the_fastest_right_config_is_found():
    bench = Bench(TINY)
    best, said = search(bench)
    assert best == Config(state_block=16, dq_programs=4 * 132)
    dropped = [line for line in said if "dropped" in line]
    assert "  dropped state_block = 64: out is off by 1.0e-01" in dropped
    assert "  dropped state_block = 128, state_warps = 8: does not compile" in dropped
    assert len(dropped) == 2 * 2 + 1
    # Of 8 combinations, one is the rule's.
    assert bench.compared[0] == 7
    assert search(Bench(TINY), lambda: True)[0] == Config()


def test_only_gains_above_the_noise_make_an_entry():
    bench = Bench(TINY)
    best, _ = search(bench)
    found = tune.entry(bench, best, 0.02, lambda _: None)
    assert found["config"] == {"state_block": 16, "dq_programs": 528}
    assert found["when"] == WHEN
    assert "forward 1500.0000 to 1000.0000 ms" in found["measured"]
    assert tune.entry(bench, best, 0.5, lambda _: None) is None
    assert tune.entry(bench, bench.default, 0.02, lambda _: None) is None
    # What one phase gains, the other must not pay for.
    slower = dataclasses.replace(best, dq_programs=2000)
    assert tune.entry(bench, slower, 0.02, lambda _: None) is None


def test_the_table_is_what_tuning_reads(tmp_path, monkeypatch):
    path = tmp_path / "tuned" / "nvidia_h200.toml"
    cases = (TINY, dataclasses.replace(TINY, D=32))
    monkeypatch.setitem(tune.STEPS, "linear_attention", STEPS)
    said = []

    def run(bench=Bench, budget=100.0):
        return tune.tune("linear_attention", cases, bench, 132, path, budget, 0.02, said.append)

    assert run() == 2
    text = path.read_text()
    assert run() == 2 and path.read_text() == text
    entries = tomllib.loads(text)["linear_attention"]["triton"]
    assert [one["when"]["D"] for one in entries] == [16, 32]

    monkeypatch.setattr(tuning.resources, "files", lambda package: tmp_path)
    tuning.table.cache_clear()
    backend = type("Backend", (), {"default_config": lambda spec, device: Config()})
    tuning.config.cache_clear()
    tuned = tuning.config("linear_attention", "triton", backend, Spec(TINY), H200)
    other = dataclasses.replace(TINY, D=48)
    rule = tuning.config("linear_attention", "triton", backend, Spec(other), H200)
    tuning.table.cache_clear()
    tuning.config.cache_clear()
    assert tuned == Config(state_block=16, dq_programs=528) and rule == Config()

    class Slow(Bench):
        """Where the rule has become the fastest, its entry goes."""

        def __init__(self, case):
            super().__init__(case)
            self.best_block = 32 if case.D == 16 else 16

        def seconds(self, phase, configs, seconds):
            found = super().seconds(phase, configs, seconds)
            return found if phase == "forward" else [1.0 for _ in configs]

    class Unable:
        def __init__(self, case):
            raise ValueError("no kernel")

    assert run(Unable) == 0 and path.read_text() == text
    assert run(budget=0.0) == 0 and path.read_text() == text
    assert any("no kernel" in line for line in said)
    assert run(Slow) == 1
    [left] = tomllib.loads(path.read_text())["linear_attention"]["triton"]
    assert left["when"]["D"] == 32 and left["config"] == {"state_block": 16}


def test_values_are_toml():
    table = {"op": {"triton": [{"when": {"a": "x", "b": True}, "config": {"c": 3, "d": False}}]}}
    assert tomllib.loads(tune.text_of(table)) == table


@pytest.mark.parametrize("op", tune.OPS)
def test_steps_name_the_configs_fields(op):
    """Every candidate is a field of the right type, and every field has candidates."""
    fields = {field.name: field.type for field in dataclasses.fields(triton.Config)}
    named = [name for step in tune.STEPS[op] for name in step]
    assert sorted(named) == sorted(fields)
    for step in tune.STEPS[op]:
        for name, values in step.items():
            kind = {"int": int, "bool": bool}[str(fields[name])]
            assert all(type(value) is kind for value in values), name
    assert [dict(x=132, y=3)] == list(tune.choices({"x": (132,), "y": (3,)}, 132))
    assert [{"x_programs": 264}] == list(tune.choices({"x_programs": (2,)}, 132))


def test_budgets_are_the_librarys():
    for name, figures in tune.BUDGETS.items():
        assert figures == tuple(numerics.budget(name, dtype) for dtype in tune.DTYPES)


@pytest.mark.parametrize("case", tune.CASES["linear_attention"], ids=str)
def test_entries_name_traits_that_are_not_lengths(case):
    """And each case has traits of its own, and a kernel."""
    arrays = [jax.ShapeDtypeStruct((1, 8, 1, case.D), case.dtype)] * 3
    gates = {None: None, "head": (1,), "step": (1, 8, 1), "channel": (1, 8, 1, case.D)}
    decay = gates[case.decay] and jax.ShapeDtypeStruct(gates[case.decay], "float32")
    told = ato_jax.explain(ato_jax.linear_attention, *arrays, causal=case.causal, decay=decay)
    traits = told.spec.traits()
    assert set(tune.WHEN) <= set(traits) and not {"T", "S", "B", "H", "G"} & set(tune.WHEN)
    expected = {"dtype": case.dtype, "D": case.D, "causal": case.causal}
    assert expected.items() <= traits.items() and traits["decay"] == (case.decay or "none")
    assert all(triton.unsupported(told.spec, phase) is None for phase in tune.PHASES)
    # Timed out of memory, not out of a cache.
    assert 4 * case.unit >= 2 * timing.CACHE_BYTES


@pytest.fixture(scope="module")
def bench():
    with device.interpret():
        yield tune.Bench(TINY)


def test_bench_knows_which_phases_a_field_changes(bench):
    def changed(**fields):
        other = dataclasses.replace(bench.default, **fields)
        return [
            phase
            for phase in tune.PHASES
            if bench.program(phase, other) != bench.program(phase, bench.default)
        ]

    default = bench.default
    assert changed(output_stages=default.output_stages + 1) == ["forward"]
    assert changed(dkv_block=16) == ["backward"]
    assert changed(piece_rows=default.piece_rows + 1) == []


def test_bench_compares_and_times(bench, monkeypatch):
    config = dataclasses.replace(bench.default, state_block=16, output_block=16, output_rows=0)
    bench.compile([config])
    assert bench.wrong(config) is None
    assert len(bench.seconds("forward", [bench.default, config], 0.0)) == 2
    assert "forward: " in bench.wrong(dataclasses.replace(config, state_block=0))
    right = bench._right["forward"]
    monkeypatch.setitem(right, "out", right["out"].at[0, 3].multiply(1.01))
    assert "out is off by " in bench.wrong(config)
    bench.forget(bench.default)
    assert len(bench._compiled) == 2


def test_difference_sees_a_single_row():
    right = jax.numpy.ones((1, 100, 1, 4), jax.numpy.bfloat16).at[0, 7].set(0)
    whole, worst = tune.difference(right.at[0, 3].set(2).at[0, 7].set(0.25), right)
    assert float(whole) == pytest.approx((1.0625 / 99) ** 0.5, rel=1e-2)
    # A row of zeros counts as half the RMS row.
    assert float(worst) == pytest.approx(1.0)
    assert float(tune.difference(right, right)[1]) == 0


def test_without_a_gpu_the_command_says_so():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["benchmarks"])
    assert entry.main(["benchmarks", "tune", "linear_attention"]) == 1
    assert entry.main(["benchmarks", "tune", "softmax"]) == 2
