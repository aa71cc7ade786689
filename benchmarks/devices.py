"""One call on one device and on several of the same host: the suite `devices`.

    python -m benchmarks run --suite=devices [--case=PART] [--devices=2,4] [--programs=14]
                                             [--within_s=SECONDS] [--json=FILE.json]

Every row is a call in one phase, cut over n devices inside `jax.shard_map`:

    by time     context parallelism, `ato_jax.parallel`: linear attention and the delta rule gather
                a state of each device; causal softmax, in zigzag order, gathers keys and values or
                sends them around a ring
    by heads    each device its own heads, by the plain function: nothing is sent
    by batch    each device its own sequences, likewise

The result and the gradients are first compared with those of one device, and two runs on n devices
bit by bit. Then both programs are timed batch by batch in turns. Of a weak row each device has T
rows, so n devices have n T of them. The table has

    speed-up    the work on n devices over that on one, times the ratio of the times; causal softmax
                has n^2 times the work where there are n times the rows
    linear      the speed-up over n
    sends       the collectives of the compiled program, by the bytes of a device's result, and the
                bytes that a device receives in all, and the time of the collectives in a trace,
                on the mean of the devices: it holds what they wait for each other

Rows stand with the most wanted first. `--programs` is the most programs that a run compiles: one
for each row on n devices, and one for each call that differs on one device. `--case` takes the rows
whose names contain it. Rows for which there is no room in memory, or no time, are listed with the
reason. The exit status is 1 where a result is wrong. Of a row whose times are not steady (`noise`)
no speed-up is told; `--resume` measures it again, and what --json lacks. By default n is all
devices that JAX finds; on a CPU, whose sizes are tiny,
XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight. NCCL's NVLink multicast is switched
off.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags, logging
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import ato_jax
import ato_jax.parallel
from ato_jax import device
from benchmarks import (
    byte_limit,
    choices,
    collectives,
    demo,
    kept,
    machine,
    noise,
    other_load,
    ours,
    profiling,
    progress,
    results,
    timing,
)
from benchmarks.cases import PHASES
from benchmarks.choices import Row
from benchmarks.results import ResultsError

FLAGS = flags.FLAGS
flags.DEFINE_list(
    "devices", [], "run --suite=devices: on how many devices, besides one; all of them by default"
)
flags.DEFINE_integer(
    "programs", 14, "run --suite=devices: the most programs that are compiled; 0: any number", 0
)

NAME = "devices"
AXIS = "devices"
# Of each of the two programs in a row's turns.
SECONDS = 0.3
# The calls of a row that are traced, for the time of its collectives.
TRACED = 3
# Of --within_s, the part in which programs are compiled.
COMPILING = 0.5
# Of a device's memory, the part that a row may need.
MOST_MEMORY = 0.95
# The errors that the library allows itself against float64. Both results that are compared may be
# so far off, each to its own side.
BUDGETS = {
    "bfloat16": {"out": 3e-3, "dq": 5e-3, "dk": 4e-3, "dv": 4e-3, "ddecay": 1e-2, "dbeta": 1e-2},
    "float32": {"out": 2e-6, "dq": 2e-6, "dk": 2e-6, "dv": 2e-6, "ddecay": 2e-5, "dbeta": 2e-5},
}
AXES = {
    "q": "BTHD", "k": "BSGD", "v": "BSGV", "dout": "BTHV", "beta": "BTH", "segment_ids": "BT",
}  # fmt: skip
DECAY_AXES = {"head": "G", "step": "BSG", "channel": "BSGD"}
CUT = {"time": "TS", "heads": "HG", "batch": "B"}
PARALLEL: dict[str, Callable[..., Any]] = {
    "attention": ato_jax.parallel.attention,
    "linear_attention": ato_jax.parallel.linear_attention,
    "gated_delta_rule": ato_jax.parallel.gated_delta_rule,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that is cut over devices. Of a weak one, `call.T` are the rows of each device."""

    call: Row
    cut: str = "time"
    schedule: str = ""
    weak: bool = False

    def __str__(self) -> str:
        by = f"{self.cut}, {self.schedule}" if self.schedule else self.cut
        return f"{self.call}, by {by}{', weak' * self.weak}"

    def whole(self, count: int) -> Row:
        """The call on `count` devices together."""
        return dataclasses.replace(self.call, T=self.call.T * count) if self.weak else self.call

    def work(self, count: int) -> int:
        """The work on `count` devices over that of the call on one."""
        if not self.weak:
            return 1
        return count**2 if self.call.op == "attention" else count

    @property
    def zigzag(self) -> bool:
        return bool(self.schedule)


_linear = functools.partial(Row, "linear_attention", B=1, H=16, D=128, causal=True)
_delta = functools.partial(Row, "gated_delta_rule", B=1, H=16, D=128, decay="step")
_softmax = functools.partial(Row, "attention", B=1, H=16, D=128, causal=True)
_small = functools.partial(Row, B=1, H=2, T=64, D=8, dtype="float32", causal=True)
SCHEDULES = ("all_gather", "ring")
# The cases of a GPU on n devices and those on a CPU, with their phases: the most wanted first.
K = 1024
MAIN = (
    Case(_linear(T=256 * K)),
    *(Case(_softmax(T=128 * K), schedule=schedule) for schedule in reversed(SCHEDULES)),
    Case(_linear(T=256 * K, decay="step")),
    Case(_linear(T=256 * K, decay="channel")),
    Case(_linear(T=256 * K), "heads"),
    Case(_delta(T=64 * K)),
)
MORE = (
    Case(_linear(T=64 * K), weak=True),
    Case(_linear(B=8, T=32 * K), "batch"),
    Case(_linear(T=64 * K)),
    Case(_softmax(T=32 * K), "heads"),
    *(Case(_softmax(T=64 * K), schedule=schedule) for schedule in SCHEDULES),
    Case(_softmax(T=32 * K), schedule="ring", weak=True),
    Case(_linear(T=64 * K, decay="step"), weak=True),
    Case(_linear(T=64 * K, decay="channel"), weak=True),
    Case(_linear(T=1024 * K, H=8)),
    Case(_linear(T=1024 * K, H=8, decay="step")),
    *(Case(_softmax(T=256 * K), schedule=schedule) for schedule in SCHEDULES),
    Case(_softmax(T=1024 * K, H=4), schedule="ring"),
)
Group = tuple[Case, str]


def _groups(main: Sequence[Case], more: Sequence[Case]) -> tuple[Group, ...]:
    forward, both = PHASES
    return (
        (main[0], both),
        (main[0], forward),
        *((case, both) for case in main[1:]),
        *((case, forward) for case in main[1:]),
        *((case, phase) for case in more for phase in (both, forward)),
    )


GROUPS: dict[str, tuple[Group, ...]] = {
    "gpu": _groups(MAIN, MORE),
    "cpu": _groups(
        (
            Case(_small("linear_attention", decay="step")),
            Case(_small("attention"), schedule="ring"),
            Case(_small("attention"), schedule="all_gather"),
            Case(_small("gated_delta_rule", decay="step")),
        ),
        (
            Case(_small("linear_attention", T=8), weak=True),
            Case(_small("attention", H=8), "heads"),
            Case(_small("linear_attention", B=8), "batch"),
        ),
    ),
}


# -- programs ------------------------------------------------------------------------------------


def mesh_of(count: int) -> Mesh:
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), (AXIS,), devices=devices, axis_types=(AxisType.Auto,))


def spec_of(case: Case, name: str) -> PartitionSpec:
    """How an input or output of that name is cut."""
    name = {"out": "dout"}.get(name, name)
    if name not in (*AXES, "decay"):
        name = name.removeprefix("d")  # the gradient of that input
    axes = AXES[name] if name in AXES else DECAY_AXES[str(case.call.decay)]
    return PartitionSpec(*(AXIS if axis in CUT[case.cut] else None for axis in axes))


def on_devices(case: Case, mesh: Any) -> Callable[..., jax.Array]:
    """The call on the devices of the mesh, as a function of whole arrays."""
    options = choices.keywords(case.call)
    function = choices.FUNCTIONS[case.call.op]
    if case.cut == "time":
        function, options["axis_name"] = PARALLEL[case.call.op], AXIS
    if case.schedule:
        options |= {"schedule": case.schedule, "order": "zigzag"}

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, **named: jax.Array) -> jax.Array:
        arrays = {"q": q, "k": k, "v": v, **named}
        found: jax.Array = jax.shard_map(
            lambda arrays: function(**arrays, **options),
            mesh=mesh,
            in_specs=({name: spec_of(case, name) for name in arrays},),
            out_specs=spec_of(case, "out"),
        )(arrays)
        return found

    return attend


# What a program is the same by: a call and a phase on one device, or a case and a phase on several.
Key = tuple[Any, str, int]


def lowered(key: Key) -> jax.stages.Lowered:
    what, phase, count = key
    row = what.whole(count) if isinstance(what, Case) else what
    shapes = jax.eval_shape(functools.partial(choices.draw, row), jax.random.key(0))
    shardings: dict[str, Any] = dict.fromkeys(shapes, SingleDeviceSharding(jax.devices()[0]))
    call = choices.called(row, phase, None)
    if isinstance(what, Case):
        mesh = mesh_of(count)
        shardings = {name: NamedSharding(mesh, spec_of(what, name)) for name in shapes}
        call = choices.in_phase(on_devices(what, mesh), phase)
    placed = {
        name: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=shardings[name])
        for name, shape in shapes.items()
    }
    return jax.jit(call).lower(placed)


def keys_of(group: Group, count: int) -> tuple[Key, Key]:
    """The programs of a row: on one device, on several."""
    case, phase = group
    return (case.call, phase, 1), (case, phase, count)


def within_programs(groups: Sequence[Group], counts: Sequence[int]) -> list[tuple[Group, int]]:
    """The rows whose programs are no more than --programs together, the most wanted first on every
    number of devices."""
    found, keys = [], set[Key]()
    for group in groups:
        for count in counts:
            needed = keys | {*keys_of(group, count)}
            if not FLAGS.programs or len(needed) <= FLAGS.programs:
                keys = needed
                found.append((group, count))
    return found


def compiled(
    rows: Sequence[tuple[Group, int]], seconds: float
) -> tuple[dict[Key, Any], dict[Key, str]]:
    """The programs of all rows whose lowering begins within that time, and why others have none.

    Lowering holds Python's lock, and XLA does not: it compiles beside.
    """
    start, futures, wrong = time.monotonic(), dict[Key, Any](), dict[Key, str]()
    with concurrent.futures.ThreadPoolExecutor(max(1, byte_limit.threads() // 2)) as pool:
        for key in dict.fromkeys(key for row in rows for key in keys_of(*row)):
            if time.monotonic() - start > seconds:
                wrong[key] = "not compiled in time"
                continue
            progress.show(f"compiling {', '.join(map(str, key))}")
            try:
                futures[key] = pool.submit(lowered(key).compile)
            except Exception as error:  # the library's own, or a lowering's
                wrong[key] = reason(error)
    found = {}
    for key, future in futures.items():
        try:
            found[key] = future.result()
        except Exception as error:  # a compiler's own, of many kinds
            wrong[key] = reason(error)
    progress.show("")
    return found, wrong


def reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# -- measuring -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Found(noise.InTurns):
    """One row: a call on one device, and on all.

    `sends` are the collectives of the program, `received` the bytes that one device receives,
    `collective_seconds` what they take in a trace on the mean of the devices, and `kernels` the
    custom calls of the program on each device, by backend.
    """

    row: str
    phase: str
    devices: int
    work: int = 1
    sends: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    received: int = 0
    collective_seconds: float | None = None
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)
    memory: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def speed_up(self) -> float | None:
        if len(self.seconds) < 2 or self.doubt:
            return None
        return self.work * self.seconds["one"] / self.seconds["all"]


def held(program: Any, outputs: int = 1) -> int:
    """The bytes on each device while the program runs, with the outputs of so many calls."""
    told = program.memory_analysis()
    outside = told.argument_size_in_bytes + outputs * told.output_size_in_bytes
    return int(outside + told.temp_size_in_bytes)


@jax.jit
def apart(found: jax.Array, wanted: jax.Array) -> jax.Array:
    """The relative RMS error."""
    exact = wanted.astype(jnp.float32)
    return jnp.linalg.norm((found.astype(jnp.float32) - exact).ravel()) / jnp.linalg.norm(
        exact.ravel()
    )


@jax.jit
def same_bits(one: jax.Array, other: jax.Array) -> jax.Array:
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[one.dtype.itemsize]
    bits = (jax.lax.bitcast_convert_type(array, unsigned) for array in (one, other))
    return jnp.all(jnp.equal(*bits))


class Measurer:
    """Draws the inputs of a row, compares its programs and times them."""

    def __init__(self, group: Group, count: int, one: Any, many: Any, platform: str) -> None:
        self.case, self.phase = group
        self.count, self.one, self.many, self.platform = count, one, many, platform
        self.first = jax.devices()[0]
        self.found = Found(
            str(self.case), self.phase, count, work=self.case.work(count),
            memory={"one": held(one), "all": held(many)},
        )  # fmt: skip
        text = many.as_text()
        sends = collectives.collectives(text)
        self.found.sends = [dataclasses.asdict(one) for one in sends]
        self.found.received = collectives.received(sends)
        self.found.kernels = collectives.kernels(text)

    def room(self) -> str:
        """Why the row has no room on a device; "" where it has, or none is known."""
        limit = (self.first.memory_stats() or {}).get("bytes_limit")
        # One device's inputs and results stay while the other program runs twice.
        told = self.one.memory_analysis()
        stays = told.argument_size_in_bytes + told.output_size_in_bytes
        needed = max(stays + held(self.many, 2), held(self.one))
        if limit and needed > MOST_MEMORY * limit:
            return f"needs {needed / 1e9:.0f} GB on a device, which grants {limit / 1e9:.0f} GB"
        return ""

    def zigzagged(self, name: str, array: jax.Array, back: bool = False) -> jax.Array:
        if not self.case.zigzag:
            return array
        change = ato_jax.parallel.unzigzag if back else ato_jax.parallel.zigzag
        return jax.jit(functools.partial(change, devices=self.count))(array)

    def drawn(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """The inputs on one device and on all of them."""
        row = self.case.whole(self.count)
        arrays = jax.jit(functools.partial(choices.draw, row))(jax.random.key(row.T))
        mesh = mesh_of(self.count)
        placed = {
            name: jax.device_put(
                self.zigzagged(name, array), NamedSharding(mesh, spec_of(self.case, name))
            )
            for name, array in arrays.items()
        }
        return {name: self.first_rows(name, array) for name, array in arrays.items()}, placed

    def first_rows(self, name: str, array: jax.Array) -> jax.Array:
        """The rows that one device has of a weak row."""
        spec = spec_of(dataclasses.replace(self.case, cut="time"), name)
        if not self.case.weak or AXIS not in spec:
            return array
        return jax.lax.slice_in_dim(array, 0, self.case.call.T, axis=spec.index(AXIS))

    def compare(self, one: dict[str, jax.Array], placed: dict[str, jax.Array]) -> list[str]:
        """What is wrong with the results on all devices."""
        wanted = self.one(one)
        found, again = self.many(placed), self.many(placed)
        wrong = [
            f"{name} differs from run to run"
            for name in found
            if not same_bits(found[name], again[name])
        ]
        del again
        budgets = BUDGETS[self.case.call.dtype]
        for name in list(found):
            # Later rows change no output and no dq of earlier ones, and all other gradients.
            if self.case.weak and name not in ("out", "dq"):
                continue
            array = jax.device_put(found.pop(name), self.first)
            array = self.first_rows(name, self.zigzagged(name, array, back=True))
            self.found.errors[name] = error = float(apart(array, wanted[name]))
            # A comparison that NaN does not pass.
            if not error <= 2 * budgets[name]:
                wrong.append(f"{name} off by {error:.1e}")
        return wrong

    def measure(self) -> Found:
        self.found.skipped = self.room()
        if self.found.skipped:
            return self.found
        one, placed = self.drawn()
        if wrong := self.compare(one, placed):
            self.found.wrong = ", ".join(wrong)
            return self.found
        launches = [lambda _: self.one(one), lambda _: self.many(placed)]
        watch = other_load.Watch(self.platform)
        timed = timing.interleaved(launches, jax.block_until_ready, self.platform, SECONDS)
        self.found.load = watch.told()
        for name, of_it in zip(("one", "all"), timed, strict=True):
            self.found.batches[name] = list(of_it.batches)
            self.found.seconds[name] = statistics.median(of_it.batches)
        if self.found.received:
            kernels = profiling.kernels(profiling.traced(launches[1], TRACED), TRACED)
            self.found.collective_seconds = collectives.traced_seconds(kernels, self.count)
        return self.found


def measured(
    row: tuple[Group, int], programs: dict[Key, Any], wrong: dict[Key, str], platform: str
) -> Found:
    group, count = row
    keys = keys_of(group, count)
    blank = Found(str(group[0]), group[1], count)
    for key in keys:
        if key in wrong:
            return dataclasses.replace(blank, skipped=wrong[key])
    try:
        return Measurer(group, count, *(programs[key] for key in keys), platform).measure()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return dataclasses.replace(blank, skipped="runs out of memory")
        return dataclasses.replace(blank, wrong=reason(error))
    except Exception as error:  # a program's own
        return dataclasses.replace(blank, wrong=reason(error))


# -- what is said of it --------------------------------------------------------------------------


def line_of(found: Found) -> str:
    """What is printed of a row."""
    name = f"{found.row}, {found.phase}, {found.devices} devices"
    if found.skipped or found.wrong:
        return f"                {name}: {found.skipped or 'WRONG: ' + found.wrong}"
    mark, told = noise.MARK * bool(found.doubt), f"{noise.NOISY:>7}        "
    if found.speed_up is not None:
        told = f"{found.speed_up:7.3f} {found.speed_up / found.devices:7.1%}"
    one, many = (mark + demo.milliseconds(found.seconds[which]) for which in ("one", "all"))
    sends = collectives.told([collectives.Collective(**one) for one in found.sends])
    errors = ", ".join(f"{name} {error:.1e}" for name, error in found.errors.items())
    taken = found.collective_seconds
    spent = "" if taken is None else f" in {demo.milliseconds(taken)} ms of a device"
    kernels = ", ".join(f"{count} {name}" for name, count in found.kernels.items())
    memory = ", ".join(f"{which} {size / 1e9:.3g}" for which, size in found.memory.items())
    return (
        f"{told} {name}: {f'not steady, {found.doubt}; ' * bool(found.doubt)}"
        f"one {one} ms, all {many} ms; sends {sends or 'nothing'}, receives "
        f"{found.received / 1e6:.4g} MB{spent}; kernels: {kernels or 'none'}; GB: {memory}; "
        f"bit-equal, off by {errors}"
    )


def write(all_found: Iterable[Found], facts: dict[str, Any]) -> None:
    if FLAGS.json:
        rows = [
            {**dataclasses.asdict(found), "speed_up": found.speed_up, "doubt": found.doubt}
            for found in all_found
        ]
        results.write(Path(FLAGS.json), json.dumps({**facts, "rows": rows}, indent=1) + "\n")


# A row's name, its phase and its devices.
RowKey = tuple[str, str, int]


def earlier(facts: dict[str, Any]) -> dict[RowKey, Found]:
    """The rows of the file that a run with --resume goes on with."""
    rows = kept.earlier_rows(NAME, Found.of_file, facts)
    if rows:
        print(f"{sum(not one.again for one in rows)} of {len(rows)} rows there stay", flush=True)
    return {(found.row, found.phase, found.devices): found for found in rows}


def counts() -> list[int]:
    """How many devices the flags ask for."""
    there = jax.device_count()
    if not FLAGS.devices:
        return [there]
    for text in FLAGS.devices:
        if not text.isdecimal() or not 1 <= int(text) <= there:
            raise ResultsError(f"--devices takes numbers from 1 to {there}, got {text!r}")
    return [int(text) for text in FLAGS.devices]


def fits(case: Case, count: int) -> bool:
    """Whether the axis that is cut divides: in zigzag order, two chunks for each device."""
    sizes = {"time": case.whole(count).T, "heads": case.call.H, "batch": case.call.B}
    return sizes[case.cut] % (2 * count if case.zigzag else count) == 0


def main() -> int:
    start = time.monotonic()
    # Ahead of the first collective, at which NCCL starts.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    platform = ours.platform()
    if platform not in results.PLATFORMS:
        logging.error("The benchmarks run on a CPU or an NVIDIA GPU, JAX computes on %s", platform)
        return 1
    if FLAGS.dtype or FLAGS.peer:
        raise ResultsError(f"{NAME} has rows of one dtype and no peers: no --dtype, no --peer")
    groups = [
        (case, phase)
        for case, phase in GROUPS[platform]
        if FLAGS.case in str(case) and not (FLAGS.forward_only and phase == PHASES[1])
    ]
    if not groups:
        names = "; ".join(dict.fromkeys(str(case) for case, _ in GROUPS[platform]))
        raise ResultsError(f"No row of {NAME} contains --case={FLAGS.case!r}: {names}")
    here = device.describe(jax.devices()[0])
    facts = {
        "device": here.name,
        "count": jax.device_count(),
        "commit": machine.commit(),
        "ato_jax": ato_jax.__version__,
        "jax": jax.__version__,
        "about": machine.about(),
    }
    print(f"{jax.device_count()} x {here.name}; JAX {jax.__version__}", flush=True)
    all_found = earlier(facts)
    known = {key for key, found in all_found.items() if not found.again}
    groups = [
        group
        for group in groups
        if any((str(group[0]), group[1], count) not in known for count in counts())
    ]
    asked = [
        ((case, phase), count)
        for case, phase in groups
        for count in counts()
        if fits(case, count) and (str(case), phase, count) not in known
    ]
    rows = [row for row in within_programs(groups, counts()) if row in asked]
    within = FLAGS.within_s or float("inf")
    kept.clear_the_way()
    write(all_found.values(), facts)
    programs, wrong = compiled(rows, COMPILING * within)
    print(f"compiling {len(programs)} programs took {time.monotonic() - start:.0f} s", flush=True)
    print("\nspeed-up linear", flush=True)
    late = [row for row in asked if row not in rows]
    progress.start(len(rows), start + within)
    for row in rows:
        if time.monotonic() - start > within:
            late.append(row)
            continue
        progress.show(f"{row[0][0]}, {row[0][1]}, {row[1]} devices")
        found = measured(row, programs, wrong, platform)
        all_found[found.row, found.phase, found.devices] = found
        progress.step()
        print(line_of(found), flush=True)
        write(all_found.values(), facts)
    if late:
        print("\nNot measured, for want of time or beyond --programs:", flush=True)
        for (case, phase), count in late:
            print(f"  {case}, {phase}, {count} devices", flush=True)
    if said := noise.left_out([found.doubt for found in all_found.values() if found.seconds]):
        print(f"\n{said}", flush=True)
    print(f"\nthe suite took {time.monotonic() - start:.0f} s", flush=True)
    if FLAGS.json:
        print(FLAGS.json, flush=True)
    return int(any(found.wrong for found in all_found.values()))
