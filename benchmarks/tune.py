"""Block sizes by measurement, on the device that this runs on: writes the table that
`ato_jax/tuning.py` reads.

For every case the search starts at the backend's rule and goes through `STEPS`: each step tries
all combinations of its candidates, the other fields left as they are, and keeps the fastest. A
candidate that does not compile, or whose results are not the rule's within the library's budgets,
is dropped with a note. What is timed is the whole forward and the whole backward, of those the
ones whose program a candidate changes, in turns with the best so far.

At the end the winner and the rule are timed in turns once more: an entry is written where a phase
gains more than the noise, and none loses half as much. Tables are written case by case, so a run
that is stopped has its results.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags, logging

from ato_jax import device, tuning
from ato_jax.ops.linear_attention import api, triton
from ato_jax.ops.linear_attention.spec import LinearState, Outputs, Residuals
from benchmarks import demo, ours, timing
from benchmarks.cases import Case

FLAGS = flags.FLAGS
flags.DEFINE_float("budget_s", 300, "tune: about how many seconds to search", lower_bound=0)
flags.DEFINE_float("noise", 0.02, "tune: the gain, of 1, that an entry has to exceed", 0, 1)
flags.DEFINE_string("table", "", "tune: the table to write, else ato_jax/tuned/<device>.toml")
flags.DEFINE_string("only", "", "tune: of the cases, those whose name contains this")

OPS = ("linear_attention",)
BACKEND = "triton"
PHASES = ("forward", "backward")

_bf16 = functools.partial(Case, "linear", dtype="bfloat16")
# The most wanted first. Each fills a card, and its arrays are larger than a cache.
CASES = {
    "linear_attention": (
        _bf16(B=8, T=65536, H=8, D=64),
        _bf16(B=1, T=16384, H=32, D=128),
        _bf16(B=8, T=65536, H=8, D=64, causal=True),
        _bf16(B=1, T=16384, H=32, D=128, causal=True),
        _bf16(B=8, T=16384, H=8, D=64, causal=True, decay="step"),
        _bf16(B=1, T=65536, H=16, D=128, causal=True, decay="step"),
        _bf16(B=8, T=16384, H=8, D=64, causal=True, decay="channel"),
        _bf16(B=4, T=4096, H=16, D=128, causal=True, decay="channel"),
        _bf16(B=8, T=16384, H=8, D=64, causal=True, decay="head"),
        _bf16(B=1, T=16384, H=32, D=128, causal=True, decay="head"),
        Case("linear", B=8, T=16384, H=8, D=64, dtype="float16"),
        Case("linear", B=8, T=16384, H=8, D=64, dtype="float16", causal=True),
        Case("linear", B=4, T=16384, H=8, D=64, dtype="float32"),
        Case("linear", B=4, T=16384, H=8, D=64, dtype="float32", causal=True),
    )
}
# What an entry's `when` names: the traits that the cases differ in, and those without which the
# kernels would be others.
WHEN = ("dtype", "D", "V", "causal", "decay", "segments", "features", "precision")

# The candidates. Fields that end in `programs` are given per multiprocessor. Where a field does
# nothing for a case, its candidates are one program, and cost no time.
STEPS: dict[str, tuple[dict[str, tuple[Any, ...]], ...]] = {
    "linear_attention": (
        {"programs": (2, 4, 8, 16), "piece_rows": (4096, 16384)},
        {"run_rows": (0, 64, 128, 256), "backward_run_rows": (0, 64, 128, 256)},
        {"pair_block": (32, 64)},
        {"state_block": (32, 64, 128), "state_warps": (4, 8)},
        {"state_stages": (2, 3, 4, 5)},
        {"state_programs": (1, 2, 3, 4, 8)},
        {"output_block": (32, 64, 128), "output_warps": (4, 8)},
        {"output_stages": (1, 2, 3, 4, 5)},
        {"output_rows": (0, 128, 256), "output_programs": (1, 2, 4)},
        {"dq_block": (16, 32, 64, 128), "dq_warps": (4, 8)},
        {"dq_delayed": (False, True), "dq_stages": (1, 2, 3, 4)},
        {"dq_programs": (1, 2, 3, 4, 8)},
        {"dkv_block": (16, 32, 64, 128), "dkv_warps": (4, 8)},
        {"dkv_stages": (1, 2, 3, 4, 5)},
        {"dkv_rows": (0, 128, 256), "dkv_programs": (1, 2, 4)},
    )
}
# A step's winner has to gain this much; less is noise at `STEP_SECONDS`.
STEP_GAIN = 0.005
STEP_SECONDS = 0.05
FINAL_SECONDS = 0.4
# Rows that no tile divides, for the winner to be compared at, too.
RAGGED = {"B": 2, "T": 997, "H": 2}

# The library's budgets, relative RMS: bfloat16, float16, float32.
DTYPES = ("bfloat16", "float16", "float32")
BUDGETS = {
    "out": (3e-3, 6e-4, 2e-6),
    "state_kv": (4e-3, 1e-3, 2e-6),
    "state_k_sum": (4e-3, 1e-3, 2e-6),
    "dq": (5e-3, 1e-3, 2e-6),
    "dk": (4e-3, 1e-3, 2e-6),
    "dv": (4e-3, 1e-3, 2e-6),
    "ddecay": (1e-2, 2e-3, 2e-5),
}
# Averages: no row of theirs is a small difference of large terms, so each row is compared.
BY_ROW = ("out", "dv")


class Bench:
    """One case on this device: what a config's programs are, whether they are right, and fast."""

    def __init__(self, case: Case) -> None:
        arrays = ours.draw(case, jax.random.key(case.T))
        request = api.prepare(
            *(arrays[name] for name in ("q", "k", "v")),
            causal=case.causal,
            decay=arrays.get("decay"),
        )
        self.spec = request.spec
        self.default = triton.default_config(self.spec, device.describe(jax.devices()[0]))
        self._arguments: dict[str, tuple[Any, ...]] = {"forward": (request.inputs,)}
        self._traces: dict[str, list[Trace]] = {phase: [] for phase in PHASES}
        self._compiled: dict[str, Any] = {}
        outputs = self._run("forward", self.default)
        no_state = LinearState(*(jnp.zeros_like(array) for array in outputs.state))
        self._arguments["backward"] = (
            Residuals(request.inputs, outputs),
            Outputs(arrays["dout"], no_state),
        )
        self._right = {phase: self._results(phase, self.default) for phase in PHASES}

    def _function(self, phase: str, config: Any) -> Callable[..., Any]:
        if phase == "forward":
            return lambda inputs: triton.forward(self.spec, config, inputs)
        return lambda residuals, cotangents: triton.backward(
            self.spec, config, residuals, cotangents
        )

    def _trace(self, phase: str, config: Any) -> Trace:
        for known in self._traces[phase]:
            if all(getattr(config, name) == value for name, value in known.read.items()):
                return known
        recorder = recording(config)
        try:
            traced = jax.jit(self._function(phase, recorder)).trace(*self._arguments[phase])
            text = phase + re.sub(r" at 0x[0-9a-f]+", "", str(traced.jaxpr))
        except Exception as error:  # whatever sizes that do not fit lead to
            traced, text = None, f"{phase} {config}: {error}"
        read = {name: getattr(config, name) for name in recorder.read}
        self._traces[phase].append(Trace(text, traced, read))
        return self._traces[phase][-1]

    def program(self, phase: str, config: Any) -> str:
        """What would run: the same text for configs that do not differ in what this phase does."""
        return self._trace(phase, config).text

    def _compile(self, phase: str, config: Any) -> Any:
        trace = self._trace(phase, config)
        if trace.traced is None:
            raise ValueError(trace.text.split(": ", 1)[1])
        if trace.text not in self._compiled:
            try:
                self._compiled[trace.text] = trace.traced.lower().compile()
            except Exception as error:  # the compiler's own, of many kinds
                self._compiled[trace.text] = error
        program = self._compiled[trace.text]
        if isinstance(program, Exception):
            raise program
        return program

    def compile(self, configs: Sequence[Any]) -> None:
        """All at once; what fails here says why when it is compared."""

        def one(job: tuple[str, Any]) -> None:
            try:
                self._compile(*job)
            except Exception as error:  # the compiler's own, of many kinds
                logging.debug("%s: %s", job, error)

        jobs = {self.program(*job): job for job in itertools.product(PHASES, configs)}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(one, jobs.values()))

    def _run(self, phase: str, config: Any) -> Any:
        return self._compile(phase, config)(*self._arguments[phase])

    def _results(self, phase: str, config: Any) -> dict[str, jax.Array]:
        found = self._run(phase, config)
        if phase == "forward":
            return {"out": found.out, "state_kv": found.state.kv, "state_k_sum": found.state.k_sum}
        results = {"dq": found.q, "dk": found.k, "dv": found.v}
        return results if found.decay is None else results | {"ddecay": found.decay}

    def wrong(self, config: Any) -> str | None:
        """Why the config is not to be used; None if it computes what the rule's does."""
        column = DTYPES.index(self.spec.dtype)
        for phase in PHASES:
            if self.program(phase, config) == self.program(phase, self.default):
                continue
            try:
                results = jax.block_until_ready(self._results(phase, config))
            except Exception as error:  # the compiler's own, of many kinds
                return f"{phase}: {str(error).splitlines()[0][:100]}"
            for name, right in self._right[phase].items():
                budget = BUDGETS[name][column]
                whole, worst = map(float, difference(results[name], right))
                share = 10 if self.spec.dtype == "float32" else 4
                share *= 1 + 3 * right.shape[-1] ** -0.5
                # Comparisons that NaN does not pass.
                if not whole <= budget:
                    return f"{name} is off by {whole:.1e}, the budget is {budget:.1e}"
                if name in BY_ROW and not worst <= share * budget:
                    return f"a row of {name} is off by {worst:.1e}"
        return None

    def seconds(self, phase: str, configs: Sequence[Any], seconds: float) -> list[float]:
        """Of one call of each, timed in turns."""
        for config in configs:
            jax.block_until_ready(self._run(phase, config))
        launches = [functools.partial(self._launch, phase, config) for config in configs]
        found = timing.interleaved(launches, jax.block_until_ready, ours.platform(), seconds)
        return [one.seconds for one in found]

    def _launch(self, phase: str, config: Any, _: int) -> Any:
        return self._run(phase, config)

    def forget(self, best: Any) -> None:
        """Frees the programs of all configs but the rule's and the best."""
        kept = {self.program(phase, one) for phase in PHASES for one in (self.default, best)}
        self._compiled = {text: one for text, one in self._compiled.items() if text in kept}
        for phase in PHASES:
            self._traces[phase] = [one for one in self._traces[phase] if one.text in kept]


@dataclasses.dataclass(frozen=True)
class Trace:
    """A phase's program, and the fields of the config that it was made of.

    A config with the same values of these has the same program.
    """

    text: str
    traced: Any
    read: Mapping[str, Any]


def recording(config: Any) -> Any:
    """The same config, with `read`: the names of the fields that were read."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    names_read: set[str] = set()

    class Recorder(type(config)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in fields:
                names_read.add(name)
            return super().__getattribute__(name)

    recorder = Recorder(**fields)
    names_read.clear()
    object.__setattr__(recorder, "read", names_read)
    return recorder


@jax.jit
def difference(found: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Relative RMS over the whole, and of the worst row, which counts as half the RMS row."""
    right = right.astype(jnp.float32)
    apart = found.astype(jnp.float32) - right
    rows, rows_apart = (jnp.linalg.norm(array, axis=-1) for array in (right, apart))
    # Both may be 0.
    tiny = jnp.finfo(jnp.float32).tiny
    whole = jnp.linalg.norm(rows_apart) / jnp.maximum(jnp.linalg.norm(rows), tiny)
    typical = jnp.sqrt(jnp.mean(rows**2))
    return whole, jnp.max(rows_apart / jnp.maximum(jnp.maximum(rows, typical / 2), tiny))


def choices(step: Mapping[str, Sequence[Any]], places: int) -> Iterator[dict[str, Any]]:
    """All combinations, `programs` times the number of multiprocessors."""
    for values in itertools.product(*step.values()):
        yield {
            name: value * places if name.endswith("programs") else value
            for name, value in zip(step, values, strict=True)
        }


def told(config: Any, other: Any) -> dict[str, Any]:
    """The fields in which config differs from other."""
    fields = dataclasses.asdict(config)
    return {name: value for name, value in fields.items() if value != getattr(other, name)}


def names(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in fields.items()) or "the rule's"


def descend(
    bench: Any,
    steps: Sequence[Mapping[str, Sequence[Any]]],
    places: int,
    out_of_time: Callable[[], bool],
    say: Callable[[str], None],
) -> Any:
    """The fastest config that the steps lead to, from the rule's."""
    best = bench.default
    for step in steps:
        if out_of_time():
            say(f"  out of time before {', '.join(step)}")
            break
        # One config for each pair of programs.
        different = {
            tuple(bench.program(phase, config) for phase in PHASES): config
            for config in (
                *(dataclasses.replace(best, **choice) for choice in choices(step, places)),
                best,
            )
        }
        candidates = [config for config in different.values() if config != best]
        bench.compile(candidates)
        configs = [best]
        for config in candidates:
            if reason := bench.wrong(config):
                say(f"  dropped {names(told(config, best))}: {reason}")
            else:
                configs.append(config)
        if len(configs) > 1:
            best = fastest(bench, configs, step, say)
        bench.forget(best)
    return best


def fastest(
    bench: Any, configs: Sequence[Any], step: Mapping[str, Any], say: Callable[[str], None]
) -> Any:
    """The first, unless another takes less time in all and no more in any phase."""
    times: list[list[float]] = []  # by phase, then config
    for phase in PHASES:
        programs = [bench.program(phase, config) for config in configs]
        unique = list(dict.fromkeys(programs))
        if len(unique) > 1:
            chosen = [configs[programs.index(program)] for program in unique]
            by_program = dict(zip(unique, bench.seconds(phase, chosen, STEP_SECONDS), strict=True))
            times.append([by_program[program] for program in programs])
    totals = [sum(of_config) for of_config in zip(*times, strict=True)]
    index = min(
        (
            index
            for index in range(len(configs))
            if all(by_config[index] <= (1 + STEP_GAIN) * by_config[0] for by_config in times)
        ),
        key=lambda index: totals[index],
    )
    if totals[index] > (1 - STEP_GAIN) * totals[0]:
        index = 0
    gain = 1 - totals[index] / totals[0]
    kept = {name: getattr(configs[index], name) for name in step}
    say(f"  {names(kept)}: {1e3 * totals[index]:.4f} ms ({gain:.1%}) of {len(configs)} configs")
    return configs[index]


def entry(bench: Any, best: Any, noise: float, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The table's entry, where the best config beats the rule's by more than the noise."""
    changed = told(best, bench.default)
    if not changed:
        say("  the rule's stays")
        return None
    gains, figures = [], []
    for phase in PHASES:
        if bench.program(phase, best) == bench.program(phase, bench.default):
            continue
        rule, found = bench.seconds(phase, (bench.default, best), FINAL_SECONDS)
        gains.append(1 - found / rule)
        figures.append(f"{phase} {1e3 * rule:.4f} to {1e3 * found:.4f} ms")
    measured = ", ".join(figures)
    if not gains or max(gains) <= noise or min(gains) < -noise / 2:
        say(f"  the rule's stays: {measured}")
        return None
    say(f"  an entry: {measured}: {names(changed)}")
    traits = bench.spec.traits()
    return {
        "when": {name: traits[name] for name in WHEN},
        "config": changed,
        "measured": measured,
    }


def value_of(value: Any) -> str:
    """A TOML value: an integer, a boolean, a string or a table of them."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {value_of(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def text_of(table: Mapping[str, Any]) -> str:
    """TOML that `tuning.table` reads back as the same."""
    lines = ["# Written by `python -m benchmarks tune`: what beats the backend's rule, measured."]
    for op, backends in table.items():
        for backend, entries in backends.items():
            for one in entries:
                lines += ["", f"[[{op}.{backend}]]"]
                lines += [f"{key} = {value_of(value)}" for key, value in one.items()]
    return "\n".join(lines) + "\n"


def record(path: Path, op: str, when: Mapping[str, Any], found: dict[str, Any] | None) -> None:
    """Puts the entry into the table at path, in place of one for the same traits, or removes it."""
    table = tomllib.loads(path.read_text()) if path.is_file() else {}
    entries = table.setdefault(op, {}).setdefault(BACKEND, [])
    index = next((i for i, one in enumerate(entries) if one["when"] == when), len(entries))
    entries[index : index + 1] = [] if found is None else [found]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(table))


def tune(
    op: str,
    all_cases: Sequence[Case],
    bench_of: Callable[[Case], Any],
    places: int,
    path: Path,
    budget: float,
    noise: float,
    say: Callable[[str], None],
) -> int:
    """Searches case by case and writes the table as it goes; the number of entries found."""
    end = time.monotonic() + budget
    entries = 0
    for index, case in enumerate(all_cases):
        left = end - time.monotonic()
        if left <= 0:
            say(f"No time left for {case}")
            continue
        # What an easy case leaves of its share goes to the others.
        deadline = time.monotonic() + left / (len(all_cases) - index)
        say(f"{case}, {left:.0f} s left")
        try:
            bench = bench_of(case)
        except Exception as error:  # the compiler's own, of many kinds
            say(f"  the rule's does not run: {str(error).splitlines()[0]}")
            continue
        out_of_time = functools.partial(lambda deadline: time.monotonic() > deadline, deadline)
        best = descend(bench, STEPS[op], places, out_of_time, say)
        found = entry(bench, best, noise, say)
        if found is not None:
            if reason := bench_of(dataclasses.replace(case, **RAGGED)).wrong(best):
                say(f"  no entry: at T = {RAGGED['T']}, {reason}")
                found = None
        entries += found is not None
        traits = bench.spec.traits()
        record(path, op, {name: traits[name] for name in WHEN}, found)
    return entries


def main(op: str) -> int:
    here = device.describe(jax.devices()[0])
    if here.platform != "gpu":
        logging.error("Block sizes are measured on a GPU, JAX computes on %s", here.platform)
        return 1
    name = f"{tuning.table_name(here.name)}.toml"
    path = Path(FLAGS.table or Path(tuning.__file__).parent / "tuned" / name)
    wanted = [case for case in CASES[op] if FLAGS.only in str(case)]
    say = functools.partial(print, flush=True)
    say(f"{here.name}, {here.multiprocessors} multiprocessors; JAX {jax.__version__}")
    start = time.monotonic()
    found = tune(op, wanted, Bench, here.multiprocessors, path, FLAGS.budget_s, FLAGS.noise, say)
    say(f"{found} entries after {demo.ratio(time.monotonic() - start)} s: {path}")
    return 0
