"""The search for block sizes: what it tries, what it drops, and the table that it writes."""

import dataclasses
import functools
import tomllib

import jax
import pytest
from absl import flags

from ato_jax import device, tuning
from benchmarks import __main__ as entry
from benchmarks import timing, tune, tune_attention, tune_linear_attention
from benchmarks.cases import Case
from tests import numerics

H200 = device.Device("gpu", "NVIDIA H200", (9, 0), 132, 232_448)
TINY = Case("linear", B=1, H=1, T=64, D=16, dtype="float32")
TINY_ATTENTION = tune_attention.Case("softmax", B=1, H=2, T=32, D=16, dtype="bfloat16", bias=True)
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


CHOICES = (
    {"state_block": (16, 32, 64, 128), "state_warps": (4, 8)},
    {"dq_block": (16, 64)},
    {"dq_programs": (1, 4)},
)
STEPS = [list(tune_linear_attention.choices(step, 132)) for step in CHOICES]


class Bench:
    """Times that follow from the config alone; a block of 128 does not compile, 64 is wrong."""

    steps = STEPS

    def __init__(self, case):
        self.spec, self.default, self.when = Spec(case), Config(), WHEN | {"D": case.D}
        self.best_block, self.compared = 16, []

    def program(self, phase, config):
        if phase == "forward":
            return f"forward {config.state_block} {config.state_warps}"
        return f"backward {config.dq_block} {config.dq_programs}"

    def compile(self, configs, phases=tune.PHASES):
        self.compared.append(len(configs))

    def wrong(self, config, phases=tune.PHASES):
        if 128 in (config.state_block, config.dq_block):
            return "does not compile"
        return "out is off by 1.0e-01" if 64 in (config.state_block, config.dq_block) else None

    def seconds(self, phase, configs, seconds):
        if phase == "forward":
            return [1 if config.state_block == self.best_block else 1.5 for config in configs]
        return [1 + abs(config.dq_programs - 4 * 132) / 1e4 for config in configs]

    def forget(self, best):
        pass


def search(bench, out_of_time=lambda: False):
    said = []
    return tune.descend(bench, out_of_time, said.append), said


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
    said = []

    def run(bench=Bench, budget=100.0):
        return tune.tune("linear_attention", cases, bench, path, budget, 0.02, said.append)

    assert run() == 2
    text = path.read_text()
    assert run() == 2 and path.read_text() == text
    entries = tomllib.loads(text)["linear_attention"]["triton"]
    assert [one["when"]["D"] for one in entries] == [16, 32]

    monkeypatch.setattr(tuning.resources, "files", lambda package: tmp_path)
    tuning.table.cache_clear()
    backend = type("Backend", (), {"default_config": lambda spec, device: Config()})
    tuning._config.cache_clear()
    tuned = tuning.config("linear_attention", "triton", backend, Spec(TINY), H200)
    other = dataclasses.replace(TINY, D=48)
    rule = tuning.config("linear_attention", "triton", backend, Spec(other), H200)
    tuning.table.cache_clear()
    tuning._config.cache_clear()
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
    table["op"]["first"] = [{"when": {"a": "x"}, "backend": "triton"}]
    assert tomllib.loads(tune.text_of(table)) == table


each_op = pytest.mark.parametrize("op", tune.OPS)
each_case = pytest.mark.parametrize(
    "op, case",
    [pytest.param(op, case, id=f"{op} {case}") for op in tune.OPS for case in tune.OPS[op].CASES],
)


@functools.cache
def spec_of(op, case):
    """Without the arrays, which only a GPU has room for."""
    found = []

    def trace():
        module = tune.OPS[op]
        found.append(module.prepare(case, module.draw(case, jax.random.key(0))).spec)

    jax.eval_shape(trace)
    return found[0]


@each_op
def test_steps_name_the_configs_fields(op):
    """Every candidate is a field of the right type, and every field has candidates.

    Except for what a rule finds by the sizes of a call, or for a device.
    """
    rules = {"wide_state"}
    if op == "attention":
        rules = {"parts", "dq_parts", "dkv_parts", "fast_exp2"}
    config = tune.OPS[op].api.OP.module(tune.BACKEND).Config
    fields = {field.name: field.type for field in dataclasses.fields(config)}
    named = set()
    for case in tune.OPS[op].CASES:
        for step in tune.OPS[op].steps(spec_of(op, case), H200):
            named |= set(step[0])
            for choice in step:
                assert list(choice) == list(step[0])
                for name, value in choice.items():
                    assert type(value) is {"int": int, "bool": bool}[str(fields[name])], name
    assert named == set(fields) - rules


def test_programs_are_given_per_multiprocessor():
    assert [dict(x=132, y=3)] == list(tune_linear_attention.choices({"x": (132,), "y": (3,)}, 132))
    assert [{"x_programs": 264}] == list(tune_linear_attention.choices({"x_programs": (2,)}, 132))


@each_op
def test_budgets_are_the_librarys(op):
    for name, figures in (tune.BUDGETS | tune.OPS[op].BUDGETS).items():
        assert figures == tuple(numerics.budget(name, dtype) for dtype in tune.DTYPES)


@each_case
def test_entries_name_traits_that_are_not_lengths(op, case):
    """And each case has traits of its own, and a kernel."""
    spec, names = spec_of(op, case), tune.OPS[op].WHEN
    traits = spec.traits()
    assert set(names) <= set(traits) and not {"T", "S", "B", "H", "G"} & set(names)
    expected = {"dtype": case.dtype, "D": case.D, "causal": case.causal}
    if op == "linear_attention":
        expected["decay"] = case.decay or "none"
    assert expected.items() <= traits.items()
    backend = tune.OPS[op].api.OP.backend(tune.BACKEND)
    assert all(backend.unsupported(spec, phase) is None for phase in tune.PHASES)
    # Timed out of memory, not out of a cache; softmax attention is not bound by memory.
    assert op == "attention" or 4 * case.unit >= 2 * timing.CACHE_BYTES


def test_cases_of_attention_have_traits_of_their_own():
    """So that none writes over the entry of another."""
    cases = tune_attention.CASES
    traits = [spec_of("attention", case).traits() for case in cases]
    whens = [tuple(found[name] for name in tune_attention.WHEN) for found in traits]
    assert len(set(whens)) == len(cases) == len(set(map(str, cases)))
    assert [found["bias"] for found in traits].count("pairs") == 2


@pytest.mark.parametrize("case", tune_attention.CASES, ids=str)
def test_attention_tries_tiles_that_may_fit(case):
    """Some of each kernel, and no more than a card compiles and times within a minute."""
    steps = tune_attention.steps(spec_of("attention", case), H200)
    counts = [len(step) for step in steps]
    assert len(steps) == 2 * (4 if case.bias else 3)
    assert all(5 <= count <= 40 for count in counts[::2]), counts
    assert sum(counts) <= 100


def test_attention_tries_less_where_shared_memory_is_less():
    """And the wide tiles of a bias leave less of it."""
    tiny = dataclasses.replace(H200, shared_memory=64 * 1024)
    wide = tune_attention.CASES[0]
    first = {
        (device, bias): tune_attention.steps(
            spec_of("attention", dataclasses.replace(wide, bias=bias)), device
        )[0]
        for device in (H200, tiny)
        for bias in (False, True)
    }
    tile = {"block_q": 256, "block_k": 64, "num_warps": 8, "num_stages": 3, "strands": 2}
    assert tile in first[H200, False]
    assert len(first[H200, False]) > len(first[H200, True]) > len(first[tiny, True])
    assert len(first[H200, False]) > len(first[tiny, False])


@pytest.fixture(scope="module")
def bench():
    with device.interpret():
        yield tune.Bench(tune_linear_attention, TINY)


def changed(bench, **fields):
    """The phases whose programs these fields change."""
    other = dataclasses.replace(bench.default, **fields)
    return [
        phase
        for phase in tune.PHASES
        if bench.program(phase, other) != bench.program(phase, bench.default)
    ]


def test_bench_knows_which_phases_a_field_changes(bench):
    default = bench.default
    assert changed(bench, output_stages=default.output_stages + 1) == ["forward"]
    assert changed(bench, dkv_block=16) == ["backward"]
    assert changed(bench, piece_rows=default.piece_rows + 1) == []


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


@pytest.fixture(scope="module")
def attention_bench():
    with device.interpret():
        yield tune.Bench(tune_attention, TINY_ATTENTION)


def test_attention_bench_knows_which_phases_a_field_changes(attention_bench):
    assert changed(attention_bench, num_warps=8) == ["forward"]
    for prefix in ("dq", "dkv", "dbias"):
        assert changed(attention_bench, **{f"{prefix}_num_stages": 5}) == ["backward"]
    # Tiles are no longer than the sequence.
    assert changed(attention_bench, block_q=128) == []


def test_attentions_backward_reads_what_its_own_forward_keeps(attention_bench):
    residuals, _ = attention_bench._arguments["backward"]
    assert residuals.outputs.rest is not None
    assert attention_bench._run("forward", attention_bench.default).rest is None
    assert set(attention_bench._right["backward"]) == {"dq", "dk", "dv", "dbias"}


def test_attention_bench_compares_every_phase(attention_bench):
    bench = attention_bench
    smaller = {name: 16 for name in dataclasses.asdict(bench.default) if "block" in name}
    config = dataclasses.replace(bench.default, **smaller)
    bench.compile([config], tune.EVERY_PHASE)
    assert bench.wrong(config, tune.EVERY_PHASE) is None
    off = bench._right[tune.TRAINING] | {"lse": bench._right[tune.TRAINING]["lse"] + 1e-2}
    bench._right[tune.TRAINING] = off
    assert bench.wrong(config) is None
    assert "lse is off by " in bench.wrong(config, tune.EVERY_PHASE)


@pytest.mark.lowering
def test_attention_is_tuned_as_a_whole(tmp_path, monkeypatch):
    """Every part on a tiny case, with kernels interpreted."""
    monkeypatch.setattr(tune, "RAGGED", {"B": 1, "T": 37, "H": 2})
    seconds = tune.Bench.seconds

    def faster_and_faster(self, phase, configs, _):
        return [
            found / (1e6 ** (1 + i)) for i, found in enumerate(seconds(self, phase, configs, 0))
        ]

    monkeypatch.setattr(tune.Bench, "seconds", faster_and_faster)
    steps = [[{"block_q": 16}], [{"dkv_block_k": 16, "dkv_num_stages": 1}]]
    monkeypatch.setattr(tune_attention, "steps", lambda spec, device: steps)
    case = dataclasses.replace(TINY_ATTENTION, causal=True, bias=False, G=1, left=8)
    path, said = tmp_path / "cpu.toml", []
    bench_of = functools.partial(tune.Bench, tune_attention)
    with device.interpret():
        found = tune.tune("attention", [case], bench_of, path, 100.0, 0.02, said.append)
    [written] = tomllib.loads(path.read_text())["attention"]["triton"]
    assert found == 1, said
    wanted = {"window": True, "grouped": True, "bias": "none", "dropout": False, "causal": True}
    assert wanted.items() <= written["when"].items()


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
