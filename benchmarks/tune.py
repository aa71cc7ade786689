"""Block sizes by measurement, on the device that this runs on: writes the table that
`ato_jax/tuning.py` reads.

For every case the search starts at the backend's rule and goes through the op's steps: each tries
its candidates, the other fields left as they are, and keeps the fastest. A candidate that does not
compile, or whose results are not the rule's within the library's budgets, is dropped with a note.
What is timed is the whole forward and the whole backward, of those the ones whose program a
candidate changes, in turns with the best so far.

At the end the winner and the rule are timed in turns once more: an entry is written where a phase
gains more than the noise, and none loses half as much. Tables are written case by case, so a run
that is stopped has its results. Times that are not steady (`benchmarks/noise.py`) are taken again,
a few times; where they stay so, the table is left as it is for that case.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags, logging

from ato_jax import device, tuning
from ato_jax.backend import Residuals
from benchmarks import (
    demo,
    noise,
    other_load,
    ours,
    progress,
    results,
    timing,
    tune_attention,
    tune_linear_attention,
)
from benchmarks.cases import Case
from benchmarks.results import ResultsError

FLAGS = flags.FLAGS
flags.DEFINE_float("budget_s", 300, "tune: about how many seconds to search", lower_bound=0)
flags.DEFINE_float("noise", 0.02, "tune: the gain, of 1, that an entry has to exceed", 0, 1)
flags.DEFINE_string("table", "", "tune: the table to write, else ato_jax/tuned/<device>.toml")
flags.DEFINE_string("only", "", "tune: of the cases, those whose name contains this")

# The names that an op's module has:
#
#     api                       the op's; its `OP` tells the backend and the type of residuals
#     CASES                     what is searched for, the most wanted first
#     WHEN                      what an entry's `when` names: the traits that the cases differ in,
#                               and those without which the kernels would be others
#     BUDGETS                   those of its results that `BUDGETS` here lacks
#     steps(spec, device)       the steps, each a list of candidates: the fields that they change
#     draw(case, key)           the arrays by name, one of them `dout`
#     prepare(case, arrays)     the request: its spec and inputs
#     cotangents(outputs, dout)
#     results(phase, found)     what is compared of a phase's results, by name
OPS = {"linear_attention": tune_linear_attention, "attention": tune_attention}
BACKEND = "triton"
PHASES = ("forward", "backward")
# The forward that a backward follows. It is not timed: it has the forward's config.
TRAINING = "forward for backward"
EVERY_PHASE = (*PHASES, TRAINING)

# A step's winner has to gain this much; less is noise at `STEP_SECONDS`.
STEP_GAIN = 0.005
STEP_SECONDS = 0.05
FINAL_SECONDS = 0.4
# How often times that are not steady are taken, before a case is given up.
ATTEMPTS = 3
# Rows that no tile divides, for the winner to be compared at, too: several windows or documents.
RAGGED = {"B": 2, "T": 3001, "H": 4}

# The library's budgets of each result, relative RMS.
DTYPES = ("bfloat16", "float16", "float32")
BUDGETS = {
    "out": (3e-3, 6e-4, 2e-6),
    "dq": (5e-3, 1e-3, 2e-6),
    "dk": (4e-3, 1e-3, 2e-6),
    "dv": (4e-3, 1e-3, 2e-6),
}
# Averages: no row of theirs is a small difference of large terms, so each row is compared.
BY_ROW = ("out", "dv")


class Bench:
    """One case on this device: what a config's programs are, whether they are right, and fast."""

    def __init__(self, op: Any, case: Case) -> None:
        arrays = op.draw(case, jax.random.key(case.T))
        request = op.prepare(case, arrays)
        here = device.describe(jax.devices()[0])
        self.spec = request.spec
        traits = self.spec.traits()
        self.when = {name: traits[name] for name in op.WHEN}
        self.steps = op.steps(self.spec, here)
        self._op, self._backend = op, op.api.OP.backend(BACKEND)
        self.default = self._backend.default_config(self.spec, here)
        self._arguments: dict[str, tuple[Any, ...]] = {
            phase: (request.inputs,) for phase in ("forward", TRAINING)
        }
        self._traces: dict[str, list[Trace]] = {phase: [] for phase in EVERY_PHASE}
        self._compiled: dict[str, Any] = {}
        self._right: dict[str, dict[str, jax.Array]] = {}

        def backward_arguments(outputs: Any) -> tuple[Any, Any]:
            residuals = Residuals(request.inputs, outputs)
            return residuals, op.cotangents(outputs, arrays["dout"])

        # Shapes do for compiling, which takes the longest: so all programs can be at once.
        outputs = jax.eval_shape(self._function(TRAINING, self.default), request.inputs)
        self._arguments["backward"] = backward_arguments(outputs)
        self.compile([self.default], EVERY_PHASE)
        outputs = self._run(TRAINING, self.default)
        self._arguments["backward"] = backward_arguments(outputs)
        for phase in PHASES:
            self._right[phase] = self._results(phase, self.default)

    def _function(self, phase: str, config: Any) -> Callable[..., Any]:
        if phase == "backward":
            return lambda residuals, cotangents: self._backend.backward(
                self.spec, config, residuals, cotangents
            )
        spec = self.spec.for_backward() if phase == TRAINING else self.spec
        return lambda inputs: self._backend.forward(spec, config, inputs)

    def _trace(self, phase: str, config: Any) -> Trace:
        for known in self._traces[phase]:
            if all(getattr(config, name) == value for name, value in known.read.items()):
                return known
        recorder = recording(config)
        try:
            traced = jax.jit(self._function(phase, recorder)).trace(*self._arguments[phase])
            text = re.sub(r" at 0x[0-9a-f]+", "", str(traced.jaxpr))
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

    def compile(self, configs: Sequence[Any], phases: Sequence[str] = PHASES) -> None:
        """All at once; what fails here says why when it is compared."""

        def one(job: tuple[str, Any]) -> None:
            try:
                self._compile(*job)
            except Exception as error:  # the compiler's own, of many kinds
                logging.debug("%s: %s", job, error)

        jobs = {self.program(*job): job for job in itertools.product(phases, configs)}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(one, jobs.values()))

    def _run(self, phase: str, config: Any) -> Any:
        return self._compile(phase, config)(*self._arguments[phase])

    def _results(self, phase: str, config: Any) -> dict[str, jax.Array]:
        return self._op.results(phase, self._run(phase, config))

    def wrong(self, config: Any, phases: Sequence[str] = PHASES) -> str | None:
        """Why the config is not to be used; None if it computes what the rule's does."""
        column = DTYPES.index(self.spec.dtype)
        budgets = BUDGETS | self._op.BUDGETS
        for phase in phases:
            if self.program(phase, config) == self.program(phase, self.default):
                continue
            try:
                results = jax.block_until_ready(self._results(phase, config))
            except Exception as error:  # the compiler's own, of many kinds
                return f"{phase}: {str(error).splitlines()[0][:100]}"
            if phase not in self._right:
                self._right[phase] = self._results(phase, self.default)
            for name, right in self._right[phase].items():
                budget = budgets[name][column]
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
        return [one.seconds for one in self._timed(phase, configs, seconds)]

    def _timed(self, phase: str, configs: Sequence[Any], seconds: float) -> list[timing.Timing]:
        for config in configs:
            jax.block_until_ready(self._run(phase, config))
        launches = [functools.partial(self._launch, phase, config) for config in configs]
        return timing.interleaved(launches, jax.block_until_ready, ours.platform(), seconds)

    def _launch(self, phase: str, config: Any, _: int) -> Any:
        return self._run(phase, config)

    def forget(self, best: Any) -> None:
        """Frees the programs of all configs but the rule's and the best."""
        kept = {self.program(*job) for job in itertools.product(self._traces, (self.default, best))}
        self._compiled = {text: one for text, one in self._compiled.items() if text in kept}
        for phase, traces in self._traces.items():
            self._traces[phase] = [one for one in traces if one.text in kept]


class NotSteadyError(Exception):
    """Why nothing may be concluded from times."""


class SteadyBench(Bench):
    """One whose times are steady; else it raises an error."""

    def seconds(self, phase: str, configs: Sequence[Any], seconds: float) -> list[float]:
        for _ in range(ATTEMPTS):
            watch = other_load.Watch(ours.platform())
            found = self._timed(phase, configs, seconds)
            batches = {f"config {i}": one.batches for i, one in enumerate(found)}
            doubt = noise.doubt_of_row(batches, watch.told())
            if not doubt:
                return [one.seconds for one in found]
        raise NotSteadyError(doubt)


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


def told(config: Any, other: Any) -> dict[str, Any]:
    """The fields in which config differs from other."""
    fields = dataclasses.asdict(config)
    return {name: value for name, value in fields.items() if value != getattr(other, name)}


def names(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in fields.items()) or "the rule's"


def descend(bench: Any, out_of_time: Callable[[], bool], say: Callable[[str], None]) -> Any:
    """The fastest config that the steps lead to, from the rule's."""
    best = bench.default
    for step in bench.steps:
        if out_of_time():
            say(f"  out of time before {', '.join(step[0])}")
            break
        # One config for each pair of programs.
        different = {
            tuple(bench.program(phase, config) for phase in PHASES): config
            for config in (
                *(dataclasses.replace(best, **choice) for choice in step),
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
            best = fastest(bench, configs, step[0], say)
        bench.forget(best)
    return best


def fastest(
    bench: Any, configs: Sequence[Any], fields: Iterable[str], say: Callable[[str], None]
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
    kept = {name: getattr(configs[index], name) for name in fields}
    say(f"  {names(kept)}: {1e3 * totals[index]:.4f} ms ({gain:.1%}) of {len(configs)} configs")
    return configs[index]


def entry(bench: Any, best: Any, least: float, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The table's entry, where the best config beats the rule's by more than the least gain."""
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
    if not gains or max(gains) <= least or min(gains) < -least / 2:
        say(f"  the rule's stays: {measured}")
        return None
    say(f"  an entry: {measured}: {names(changed)}")
    return {"when": bench.when, "config": changed, "measured": measured}


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


def read(path: Path) -> dict[str, Any]:
    """The table at path, empty where there is no file."""
    try:
        return tomllib.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} is no table of block sizes: {error}") from error


def record(path: Path, op: str, when: Mapping[str, Any], found: dict[str, Any] | None) -> None:
    """Puts the entry into the table at path, in place of one for the same traits, or removes it."""
    table = read(path)
    entries = table.setdefault(op, {}).setdefault(BACKEND, [])
    index = next((i for i, one in enumerate(entries) if one["when"] == when), len(entries))
    entries[index : index + 1] = [] if found is None else [found]
    results.write(path, text_of(table))


def tune(
    op: str,
    all_cases: Sequence[Case],
    bench_of: Callable[[Case], Any],
    path: Path,
    budget: float,
    least: float,
    say: Callable[[str], None],
) -> int:
    """Searches case by case and writes the table as it goes; the number of entries found."""
    end = time.monotonic() + budget
    entries, doubts = 0, list[str]()
    progress.start(len(all_cases), end)
    for index, case in enumerate(all_cases):
        left = end - time.monotonic()
        if left <= 0:
            say(f"No time left for {case}")
            continue
        # What an easy case leaves of its share goes to the others.
        deadline = time.monotonic() + left / (len(all_cases) - index)
        say(f"{case}, {left:.0f} s left")
        progress.show(f"tuning {case}")
        try:
            bench = bench_of(case)
        except Exception as error:  # the compiler's own, of many kinds
            say(f"  the rule's does not run: {str(error).splitlines()[0]}")
            progress.step()
            continue
        out_of_time = functools.partial(lambda deadline: time.monotonic() > deadline, deadline)
        try:
            best = descend(bench, out_of_time, say)
            found = entry(bench, best, least, say)
        except NotSteadyError as error:
            doubts.append(str(error))
            say(f"  not steady, the table is left as it is: {error}")
            progress.step()
            continue
        doubts.append("")
        if found is not None:
            ragged = bench_of(dataclasses.replace(case, **RAGGED, G=case.G and 1))
            # As `tuning` applies it: on the rule for this shape.
            config = dataclasses.replace(ragged.default, **found["config"])
            ragged.compile([config], EVERY_PHASE)
            if reason := ragged.wrong(config, EVERY_PHASE):
                say(f"  no entry: at T = {RAGGED['T']}, {reason}")
                found = None
        entries += found is not None
        record(path, op, bench.when, found)
        progress.step()
    if said := noise.left_out(doubts, "cases"):
        say(said)
    return entries


def main(names: Sequence[str]) -> int:
    [op] = names if len(names) == 1 else [" ".join(names)]
    if op not in OPS:
        raise ResultsError(f"tune takes one of {', '.join(OPS)}; got {op or 'none'}")
    wanted = [case for case in OPS[op].CASES if FLAGS.only in str(case)]
    if not wanted:
        known = "; ".join(map(str, OPS[op].CASES))
        raise ResultsError(f"No case of tune {op} contains --only={FLAGS.only!r}: {known}")
    here = device.describe(jax.devices()[0])
    if here.platform != "gpu":
        logging.error("Block sizes are measured on a GPU, JAX computes on %s", here.platform)
        return 1
    name = f"{tuning.table_name(here.name)}.toml"
    path = Path(FLAGS.table or Path(tuning.__file__).parent / "tuned" / name)
    # Before anything is measured.
    read(path)
    say = progress.say
    say(f"{here.name}, {here.multiprocessors} multiprocessors; JAX {jax.__version__}")
    start = time.monotonic()
    bench_of = functools.partial(SteadyBench, OPS[op])
    found = tune(op, wanted, bench_of, path, FLAGS.budget_s, FLAGS.noise, say)
    say(f"{found} entries after {demo.ratio(time.monotonic() - start)} s: {path}")
    return 0
