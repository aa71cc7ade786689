"""Whether `implementation=None` takes the fastest backend: the suite `choices`.

    python -m benchmarks run --suite=choices [--json=FILE.json] [--case=PART] [--within_s=SECONDS]
                                             [--part=K/N]

Every row is one call, timed forward and forward + backward: with `implementation=None`, and with
each backend by name that supports it. Programs that lower to the same text are one program, which
is compiled and timed once; so a row can only differ from its fastest backend where `None` runs
something else. The programs of a row are compared with XLA's float32 result first, and then timed
batch by batch in turns. A backend that takes more than `FAR_BEHIND` times the fastest has three
batches; `None` and the others have many, and where `None` is behind, it is timed against the faster
ones once more.

The table marks rows in which `None` takes more than `ALLOWED` times the fastest. They are listed
again at the end, with the entries of `ato_jax/tuned/` that would change the choice, and the last
line says how many there are; the exit status is 1 if there are any. A row whose times are not
steady (`noise`) is marked: no ratio and no entry is made of it, and it is not behind. `--resume`
measures what --json lacks, and then these again. On a CPU sizes are tiny, and kernels are
interpreted.

`--part=2/4` takes every fourth row from the second on, so that a machine with four cards measures
all rows at one time: one process a card, each with cores of its own.

    python -m benchmarks fit A.json [B.json ...]

takes what several cards measured and prints the entries that any of them lacks, each with how far
the backend it names is from the fastest on every card. Rows that are not steady are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging
from jax.experimental import serialize_executable

import ato_jax
from ato_jax import choosing, dispatch, tuning
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.linear_attention import api as linear_attention_api
from benchmarks import (
    ahead,
    cases,
    demo,
    float8,
    kept,
    noise,
    other_load,
    ours,
    progress,
    results,
    spending,
    store,
    timing,
)
from benchmarks.cases import PHASES
from benchmarks.results import ResultsError
from benchmarks.spending import CHECKING, COMPILING, TIMING, clock
from benchmarks.store import Store
from benchmarks.tables import Table

FLAGS = flags.FLAGS
flags.DEFINE_string("part", "", "run --suite=choices or cliffs: K/N, every Nth row from the Kth on")

NAME = "choices"
ALLOWED = 1.03
FAR_BEHIND = 3.0
# Of each program in a row's turns: about so many batches of 10 ms on a GPU.
SECONDS = 0.12
# Where `None` is behind by more than this, it is timed for longer beside those ahead of it.
DOUBTFUL = 1.01
SECONDS_OF_DOUBT = 0.3
# The most calls of one program: XLA compiles each of its own calls anew.
MOST_CALLS = 8
# A program that takes less than this may wait for the host that launches it, so it makes several
# calls. The rates, in bytes and operations a second, are above those of any row.
LAUNCH_SECONDS = 100e-6
FASTEST_COPY = 5e12
FASTEST_PRODUCTS = 800e12
# The longest that compiling in other processes may take: all rows need more on 16 cores.
COMPILE_SECONDS = 270
One = TypeVar("One")
# What a call without a name is called here.
CHOSEN = "None"
# The float32 result of XLA that the others are compared with.
RIGHT = "right"

APIS = {"attention": attention_api, "linear_attention": linear_attention_api}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": ato_jax.attention,
    "linear_attention": ato_jax.linear_attention,
    "gated_delta_rule": ato_jax.gated_delta_rule,
}
FAVOR_FEATURES = 128


def shifted_silu(x: jax.Array) -> jax.Array:
    """A user's own feature map, positive everywhere: x sigmoid(x) is above -0.28."""
    return 1 + x * jax.nn.sigmoid(x)


@dataclasses.dataclass(frozen=True)
class Row:
    """One call. `decay` is "head", "step" or "channel"; `documents` the mean length of the
    segments; `lengths` pads a quarter of the last sequence; `bias` is one of [1, H, T, S], `mask`
    one of [B, 1, T, S] that hides a quarter of the pairs, `sinks` a logit for each head, `offsets`
    an array of query offsets that gives the queries the positions that they have without it. Of
    the delta rule H is G, and its betas are between 0 and 1. Inputs of "float8_e4m3fn" have scales
    and no gradients. `by` names a function of `float8.PEERS` that makes the call in place of this
    library's.
    `options` are further arguments of the call, by name; `feature_map="favor"` makes Performer's,
    "callable" passes a function that the library does not know, and a `dropout_rate` gets a key.
    """

    op: str
    B: int
    H: int
    T: int
    D: int
    dtype: str = "bfloat16"
    causal: bool = False
    S: int | None = None
    G: int | None = None
    V: int | None = None
    decay: str | None = None
    documents: int | None = None
    lengths: bool = False
    bias: bool = False
    mask: bool = False
    sinks: bool = False
    offsets: bool = False
    tf32: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    by: str = ""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of q, k, v and dout."""
        S, G, V = self.S or self.T, self.G or self.H, self.V or self.D
        rows = {
            "q": (self.B, self.T, self.H, self.D),
            "k": (self.B, S, G, self.D),
            "v": (self.B, S, G, V),
            "dout": (self.B, self.T, self.H, V),
        }
        if dict(self.options).get("layout") == "bhtd":
            return {name: (B, H, T, D) for name, (B, T, H, D) in rows.items()}
        return rows

    @property
    def set_bytes(self) -> int:
        item = jnp.dtype(self.dtype).itemsize
        return item * sum(int(np.prod(shape)) for shape in self.shapes.values())

    def __str__(self) -> str:
        told = [f"{self.op} B{self.B} H{self.H}{f' G{self.G}' if self.G else ''} T{self.T}"]
        told[0] += f"{f' S{self.S}' if self.S else ''} D{self.D}{f' V{self.V}' if self.V else ''}"
        told[0] += f" {self.dtype}{' TF32' if self.tf32 else ''}{' causal' if self.causal else ''}"
        told += [f"decay per {self.decay}"] if self.decay else []
        told += [f"documents of {self.documents}"] if self.documents else []
        told += ["lengths"] if self.lengths else []
        told += [name for name in ("bias", "mask", "sinks", "offsets") if getattr(self, name)]
        told += [f"{name}={value}" for name, value in self.options]
        told += [f"by {self.by}"] if self.by else []
        return ", ".join(told)


def _rows_of_softmax() -> Iterator[Row]:
    bf16 = functools.partial(Row, "attention")
    for B, H, T, D, causals in (
        (8, 16, 256, 128, (False,)),
        (4, 16, 512, 64, (True,)),
        (8, 16, 1024, 64, (False,)),
        (2, 16, 8192, 64, (False,)),
        (4, 16, 1024, 96, (False,)),
        (4, 16, 512, 128, (False, True)),
        (4, 16, 1024, 128, (True,)),
        (2, 16, 4096, 128, (False, True)),
        (4, 8, 512, 192, (True,)),
        (2, 16, 4096, 192, (False,)),
        (4, 8, 512, 256, (False,)),
        (4, 8, 1024, 256, (True,)),
        (2, 8, 4096, 256, (True,)),
    ):
        for causal in causals:
            yield bf16(B=B, H=H, T=T, D=D, causal=causal)
    yield bf16(B=1, H=4, T=128, D=64, causal=True)
    yield bf16(B=2, H=32, T=4096, D=128, G=8, causal=True)
    yield bf16(B=2, H=16, T=4096, D=128, causal=True, options=(("window", (1023, None)),))
    yield bf16(B=2, H=16, T=2047, D=128, causal=True)
    yield bf16(B=2, H=16, T=4096, D=128, causal=True, options=(("layout", "bhtd"),))
    yield bf16(B=4, H=16, T=2048, D=80)
    yield bf16(B=2, H=8, T=4096, D=160, causal=True)
    yield bf16(B=2, H=8, T=2048, D=512)
    yield bf16(B=64, H=4, T=64, D=1024)
    yield bf16(B=1, H=1, T=64, D=2048)
    float16 = functools.partial(Row, "attention", dtype="float16")
    yield float16(B=4, H=16, T=1024, D=64)
    yield float16(B=4, H=16, T=512, D=128, causal=True)
    yield float16(B=2, H=16, T=4096, D=128)
    float32 = functools.partial(Row, "attention", dtype="float32")
    for tf32 in (False, True):
        yield float32(B=2, H=16, T=2048, D=64, causal=True, tf32=tf32)
        yield float32(B=2, H=16, T=2048, D=128, tf32=tf32)
    yield float32(B=2, H=8, T=1024, D=512)


def _rows_of_linear() -> Iterator[Row]:
    bf16 = functools.partial(Row, "linear_attention")
    for causal in (False, True):
        yield bf16(B=8, H=8, T=16384, D=64, causal=causal)
        yield bf16(B=8, H=8, T=1024, D=64, causal=causal)
        yield bf16(B=2, H=16, T=16384, D=128, causal=causal)
        yield bf16(B=2, H=8, T=8192, D=160, causal=causal)
        yield bf16(B=2, H=8, T=8192, D=256, causal=causal)
        yield bf16(B=2, H=16, T=8192, D=128, documents=1024, causal=causal)
        yield bf16(B=2, H=16, T=8192, D=128, decay="step", causal=causal)
    yield bf16(B=1, H=4, T=128, D=64, causal=True)
    yield bf16(B=1, H=8, T=2048, D=128, causal=True)
    yield bf16(B=4, H=8, T=8192, D=64, decay="step")
    yield bf16(B=2, H=8, T=8192, D=192, causal=True)
    yield bf16(B=4, H=8, T=8192, D=64, decay="channel", causal=True)
    yield bf16(B=2, H=16, T=8192, D=128, decay="channel", causal=True)
    yield bf16(B=2, H=8, T=4096, D=256, decay="step", causal=True)
    yield bf16(B=2, H=16, T=4096, D=128, G=4, causal=True)
    yield bf16(B=8, H=8, T=4096, D=64, options=(("feature_map", "favor"),))
    yield bf16(B=2, H=16, T=8192, D=128, causal=True, options=(("feature_map", "silu"),))
    for dtype, tf32 in (("float16", False), ("float32", True), ("float32", False)):
        other = functools.partial(Row, "linear_attention", dtype=dtype, tf32=tf32)
        for causal in (False, True):
            yield other(B=8, H=8, T=8192, D=64, causal=causal)
            yield other(B=2, H=16, T=16384, D=128, causal=causal)
    yield Row("linear_attention", B=2, H=8, T=4096, D=256, dtype="float32")
    yield Row("linear_attention", B=1, H=4, T=1024, D=128, dtype="float32")


_tiny = functools.partial(Row, B=1, H=2, T=32, D=16, dtype="float32")
ROWS: dict[str, tuple[Row, ...]] = {
    "gpu": (*_rows_of_softmax(), *_rows_of_linear()),
    "cpu": (
        _tiny("attention", causal=True),
        _tiny("attention", lengths=True, bias=True),
        _tiny("linear_attention", dtype="bfloat16", options=(("layout", "bhtd"),)),
        _tiny("linear_attention", decay="step", documents=8, causal=True),
    ),
}


# -- one row -------------------------------------------------------------------------------------


def draw(row: Row, key: jax.Array) -> dict[str, jax.Array]:
    """The arrays of a call, by name, and of float8 inputs a tuple of scales."""
    keys = jax.random.split(key, 6)
    narrow = row.dtype == float8.FLOAT8
    found = {
        name: jax.random.normal(one, shape, jnp.float32).astype("float32" if narrow else row.dtype)
        for one, (name, shape) in zip(keys, row.shapes.items(), strict=False)
    }
    S, G = row.S or row.T, row.G or row.H
    if row.decay:
        shape = {"head": (G,), "step": (row.B, S, G), "channel": (row.B, S, G, row.D)}[row.decay]
        found["decay"] = -cases.DECAY * jnp.abs(jax.random.normal(keys[4], shape))
    if row.documents:
        cuts = jax.random.uniform(keys[4], (row.B, row.T)) * row.documents < 1
        found["segment_ids"] = jnp.cumsum(cuts, axis=1, dtype=jnp.int32)
    if row.lengths:
        found["kv_lengths"] = jnp.full(row.B, S, jnp.int32).at[-1].set(S - S // 4)
    if row.op == "gated_delta_rule":
        # Keys of length 1, with which no step makes a state grow.
        length = jnp.linalg.norm(found["k"].astype(jnp.float32), axis=-1, keepdims=True)
        found["k"] = (found["k"] / length).astype(row.dtype)
        found["beta"] = jax.nn.sigmoid(jax.random.normal(keys[5], (row.B, row.T, row.H)))
    if row.bias:
        found["bias"] = jax.random.normal(keys[5], (1, row.H, row.T, S), jnp.float32)
    if row.mask:
        found["mask"] = jax.random.uniform(keys[5], (row.B, 1, row.T, S)) < 0.75
    if row.sinks:
        found["sinks"] = jax.random.normal(keys[5], (row.H,), jnp.float32)
    if row.offsets:
        found["query_offset"] = jnp.full(row.B, S - row.T, jnp.int32)
    return float8.quantised(found, float8.SCALE) if narrow else found


def keywords(row: Row) -> dict[str, Any]:
    """The arguments of a call that are no arrays."""
    found = dict(row.options)
    if row.op != "gated_delta_rule":
        found["causal"] = row.causal
    if row.tf32:
        found["precision"] = "tf32"
    if "dropout_rate" in found:
        found["dropout_key"] = jax.random.key(0)
    if found.get("feature_map") == "favor":
        with jax.ensure_compile_time_eval():
            found["feature_map"] = ato_jax.favor(jax.random.key(0), FAVOR_FEATURES, row.D)
    elif found.get("feature_map") == "callable":
        found["feature_map"] = shifted_silu
    return found


DIFFERENTIATED = ("q", "k", "v", "beta", "decay", "bias", "sinks")


def called(
    row: Row, phase: str, implementation: str | None
) -> Callable[[dict[str, jax.Array]], dict[str, jax.Array]]:
    """From the arrays of a call to its output, and in the second phase to its gradients."""
    if row.by:
        return in_phase(functools.partial(float8.PEERS[row.by], **keywords(row)), phase)
    function = FUNCTIONS[row.op]
    options = {**keywords(row), "implementation": implementation}
    return in_phase(functools.partial(function, **options), phase)


def in_phase(
    function: Callable[..., jax.Array], phase: str
) -> Callable[[dict[str, jax.Array]], dict[str, jax.Array]]:
    """`function(q, k, v, **named)` as a function of a call's arrays; in the second phase with its
    gradients. A softmax normalizer that it returns, too, has a cotangent of ones.
    """

    def call(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        inputs = {name: array for name, array in arrays.items() if name != "dout"}
        wanted = {name: inputs.pop(name) for name in DIFFERENTIATED if name in inputs}

        def attend(wanted: dict[str, jax.Array]) -> dict[str, jax.Array]:
            named = wanted | inputs
            q, k, v = (named.pop(name) for name in "qkv")
            found: Any = function(q, k, v, **named)
            return (
                dict(zip(("out", "lse"), found, strict=True))
                if isinstance(found, tuple)
                else {"out": found}
            )

        if phase == PHASES[0]:
            return attend(wanted)
        found, pull = jax.vjp(attend, wanted)
        given = jax.tree.map(jnp.ones_like, found) | {"out": arrays["dout"]}
        return found | {f"d{name}": array for name, array in pull(given)[0].items()}

    return call


def right(row: Row, phase: str) -> Callable[[dict[str, jax.Array]], dict[str, jax.Array]]:
    """The same by XLA in float32, of the arrays as they were rounded."""
    exact = dataclasses.replace(row, dtype="float32", tf32=False, by="")
    call = called(exact, phase, "xla")

    def call_in_float32(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if row.dtype == float8.FLOAT8:
            return call(float8.widened(arrays))
        wide = {
            name: array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array
            for name, array in arrays.items()
        }
        return call(wide)

    return call_in_float32


def errors(found: dict[str, jax.Array], wanted: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The relative RMS error of each result."""

    def error(name: str) -> jax.Array:
        apart = float8.read(found[name]) - wanted[name].astype(jnp.float32)
        return jnp.linalg.norm(apart.ravel()) / jnp.linalg.norm(
            wanted[name].astype(jnp.float32).ravel()
        )

    return {name: error(name) for name in wanted}


def tolerance(row: Row) -> float:
    if row.by:
        return float8.TOLERANCE_OF_PEERS
    if row.dtype == float8.FLOAT8:
        return float8.TOLERANCES[row.op]
    return cases.TF32_TOLERANCE if row.tf32 else cases.TOLERANCES[row.dtype]


@dataclasses.dataclass
class Told:
    """What is known of a row in a phase before anything runs: what `None` chooses, the traits that
    a table's entry may name, and why backends do not take the call.
    """

    choice: str
    traits: dict[str, Any]
    sizes: dict[str, int]
    supported: list[str]
    refused: dict[str, str]


def told_of(row: Row, phase: str, shapes: dict[str, Any]) -> Told:
    if row.by:
        return Told(row.by, {}, {}, [], {})
    if row.dtype == float8.FLOAT8:
        return Told(_choice_of_float8(row, shapes), {}, {}, [], {})
    found: list[Told] = []

    def prepare(arrays: dict[str, jax.Array]) -> None:
        named = {name: array for name, array in arrays.items() if name != "dout"}
        q, k, v = (named.pop(name) for name in "qkv")
        api = APIS[row.op]
        request = api.prepare(q, k, v, **named, **keywords(row))
        wanted = choosing.PHASES if phase == PHASES[1] else choosing.PHASES[:1]
        told = dispatch.explain(api.OP, request.spec, request.inputs, None)
        supported, refused = [], {}
        for name in dict.fromkeys(map(choosing.family, api.OP.backends)):
            if name == "reference":
                continue
            # A backend runs a phase where any kernels of its family do.
            family = [one for one in api.OP.backends if choosing.family(one) == name]
            reasons = [
                " ".join(str(told.reasons[one][needed]) for one in family)
                for needed in wanted
                if all(told.reasons[one][needed] for one in family)
            ]
            if reasons:
                refused[name] = reasons[0]
            else:
                supported.append(name)
        choices = [told.forward]
        if phase == PHASES[1]:
            choices = [told.recorded, told.backward]
        names = dict.fromkeys(choosing.family(one.backend) if one else "none" for one in choices)
        sizes = tuning.sizes_of(request.spec)
        found.append(Told(" + ".join(names), request.spec.traits(), sizes, supported, refused))

    jax.eval_shape(prepare, shapes)
    return found[0]


def _choice_of_float8(row: Row, shapes: dict[str, Any]) -> str:
    """The backend that reads 8 bits, or that of the arrays once they are widened."""
    told = ato_jax.explain(row.op, **shapes, **keywords(row)).forward
    name = told.backend if told else "none"
    return name if name.endswith(".float8") else f"{choosing.family(name)}, widened"


# A row, or its name, and a phase.
Group = tuple[Any, str]


# -- compiling -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Programs:
    """All programs of a row and phase: compiled, or serialized on the way between processes.

    `of` has the program of each implementation by name, `compiled` the different ones. `hasty` is
    XLA's where it was compiled without a search for its fastest products.
    """

    told: Told
    of: dict[str, str]
    failed: dict[str, str]
    compiled: dict[str, Any]
    drawing: Any
    comparing: Any
    hasty: str | None = None


def least_seconds(row: Row, phase: str) -> float:
    """A bound from below on the time of a call on any card."""
    passes = 1 if phase == PHASES[0] else 2.5
    copying = passes * row.set_bytes / FASTEST_COPY
    if row.op != "attention" or dict(row.options).get("window"):
        return copying
    pairs = row.B * row.H * row.T * (row.S or row.T) / (2 if row.causal else 1)
    rate = FASTEST_PRODUCTS * (2 if row.dtype == float8.FLOAT8 else 1)
    return max(copying, 2 * passes * pairs * (row.D + (row.V or row.D)) / rate)


def groups_of_inputs(row: Row, phase: str, platform: str) -> tuple[int, int]:
    """As elsewhere, with fewer calls in a program: XLA compiles each of its own calls anew, so
    there are only as many as keep the GPU busy while the host launches the next program.
    """
    groups, calls = timing.groups_of_inputs(row.set_bytes, platform)
    needed = math.ceil(LAUNCH_SECONDS / least_seconds(row, phase))
    fewer = min(calls, needed, MOST_CALLS)
    return -(-groups * calls // fewer), fewer


def compiled(row: Row, phase: str, platform: str, by_name: bool = True) -> Programs:
    """Everything that the row needs in this phase, compiled in this process. Without `by_name`,
    these are the program of `implementation=None` and the float32 result it is compared with.
    """
    _, calls = groups_of_inputs(row, phase, platform)
    key = jax.eval_shape(lambda: jax.random.key(0))
    drawing = jax.jit(functools.partial(draw, row)).lower(key).compile()
    shapes = jax.eval_shape(functools.partial(draw, row), key)
    programs: dict[str, Any] = {}
    of: dict[str, str] = {}
    failed: dict[str, str] = {}
    hasty: str | None = None
    quick = {"xla_gpu_autotune_level": 0} if platform == "gpu" else {}
    # Pallas interprets the kernels on a CPU, where they are asked for by name.
    with ato_jax.interpret(platform == "cpu"):
        told = told_of(row, phase, shapes)
        named: dict[str, Any] = {
            name: called(row, phase, None if name == CHOSEN else name)
            for name in (CHOSEN, *(told.supported if by_name else ()))
        }
        for name, call in named.items():
            try:
                lowered = ours.in_turn(call).lower([shapes] * calls)
                text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
                if text not in programs:
                    # XLA's search for products takes the most time of all, and matters only where
                    # the other backends are not far ahead.
                    is_hasty = name == "xla" and len(told.supported) > 1 and bool(quick)
                    hasty = text if is_hasty else hasty
                    programs[text] = lowered.compile(quick if is_hasty else {})
                of[name] = text
            except Exception as error:  # a compiler's own, of many kinds
                failed[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        lowered = ours.in_turn(right(row, phase)).lower([shapes])
        # It is not timed.
        programs[RIGHT] = lowered.compile(quick)
        result = jax.eval_shape(called(row, phase, "xla"), shapes)
        wanted = jax.eval_shape(right(row, phase), shapes)
    comparing = jax.jit(errors).lower(result, wanted).compile()
    return Programs(told, of, failed, programs, drawing, comparing, hasty)


def packed(row: Row, phase: str, platform: str, by_name: bool = True) -> Programs:
    """What `compiled` gives, as it goes to another process."""
    found = compiled(row, phase, platform, by_name)
    pack = serialize_executable.serialize
    return dataclasses.replace(
        found,
        compiled={text: pack(program) for text, program in found.compiled.items()},
        drawing=pack(found.drawing),
        comparing=pack(found.comparing),
    )


def unpacked(found: Programs) -> Programs:
    ours.import_backends()

    def load(told: Any) -> Any:
        return serialize_executable.deserialize_and_load(*told)

    return dataclasses.replace(
        found,
        compiled={text: load(program) for text, program in found.compiled.items()},
        drawing=load(found.drawing),
        comparing=load(found.comparing),
    )


def job_of(row: Row, phase: str, by_name: bool = True) -> dict[str, Any]:
    """Returns the JSON by which a worker is asked for a row, and a store names the answer."""
    return {"row": dataclasses.asdict(row), "phase": phase, "by_name": by_name}


def row_of(told: Mapping[str, Any]) -> Row:
    """A row that was JSON on its way, where tuples are lists."""

    def tupled(one: Any) -> Any:
        return tuple(map(tupled, one)) if isinstance(one, list) else one

    return Row(**{name: tupled(one) for name, one in told.items()})


def compiled_ahead(
    groups: Sequence[Group], platform: str, seconds: float, count: int, by_name: bool = True
) -> dict[Group, Programs]:
    """The programs of as many of the groups as `count` other processes compile in that time;
    `compiled` says what `by_name` leaves out.
    """
    if not count:
        return {}
    # Backward passes take the longest to compile: nothing should wait for one at the end.
    ordered = sorted(groups, key=lambda group: group[1] == PHASES[0])
    progress.show(f"compiling {len(ordered)} rows, {progress.duration(seconds)} at most")
    with ahead.Ahead(platform, [""], count) as helpers:
        jobs = [job_of(*group, by_name) for group in ordered]
        answers = helpers.programs(jobs, seconds=seconds)
    progress.show("")
    return _programs(dict(zip(ordered, answers, strict=True)))


def _programs(answers: Mapping[Group, Any]) -> dict[Group, Programs]:
    """Without the rows that have none, or for which a worker took too long."""
    return {group: told for group, told in answers.items() if told and not isinstance(told, str)}


def in_store(
    groups: Iterable[Group], kept_programs: Store, by_name: bool = True
) -> tuple[dict[Group, Programs], set[Group]]:
    """The programs of these groups that a store has, and the groups that it has no answer for."""
    jobs = {group: job_of(*group, by_name) for group in groups}
    late = {group for group, job in jobs.items() if not kept_programs.has(job)}
    found = {group: kept_programs.get(job) for group, job in jobs.items() if group not in late}
    told = f"{len(jobs) - len(late)} of {len(jobs)} rows' programs are in {kept_programs.folder}"
    print(told, flush=True)
    return _programs(found), late


# -- measuring -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Found:
    """One row and phase: seconds of one call by implementation, without those of `None` where no
    program of it runs; `wrong` is why a backend has no time, and `doubt` why nothing may be
    concluded from the times. Files that were written before there was a doubt have none.
    """

    row: str
    op: str
    phase: str
    choice: str
    traits: dict[str, Any]
    sizes: dict[str, int]
    seconds: dict[str, float]
    wrong: dict[str, str]
    refused: dict[str, str]
    doubt: str = ""

    @property
    def fastest(self) -> str:
        """The backend; where it is `None`'s, of backends of one program the first."""
        named = {name: s for name, s in self.seconds.items() if name != CHOSEN}
        return min(named, key=named.__getitem__) if named else CHOSEN

    @property
    def ratio(self) -> float:
        """Of `None`'s time to the fastest; infinite where `None` does not run."""
        if CHOSEN not in self.seconds:
            return float("inf")
        return self.seconds[CHOSEN] / min(self.seconds.values())

    @property
    def behind(self) -> bool:
        """A choice that does not run is behind whatever the times are."""
        return self.ratio > ALLOWED and not (self.doubt and CHOSEN in self.seconds)


def measure(row: Row, phase: str, programs: Programs, platform: str) -> Found:
    """Compares the programs of a row, and times those that are right in turns."""
    groups, calls = groups_of_inputs(row, phase, platform)
    keys = jax.random.split(jax.random.key(row.T), (groups, calls))
    sets = [[programs.drawing(key) for key in group] for group in keys]
    wanted = programs.compiled[RIGHT]([sets[0][0]])[0]
    wrong = dict(programs.failed)
    texts: dict[str, str] = {}
    for name, text in programs.of.items():
        try:
            [found, *_] = programs.compiled[text](sets[0])
            apart = {key: float(one) for key, one in programs.comparing(found, wanted).items()}
        except Exception as error:  # a program's own
            wrong[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            continue
        # A comparison that NaN does not pass.
        off = [f"{key} off by {one:.1e}" for key, one in apart.items() if not one <= tolerance(row)]
        if off:
            wrong[name] = ", ".join(off)
        else:
            texts[name] = text
    del wanted
    watch = other_load.Watch(platform)
    batches = _timed(texts, programs.compiled, sets, calls, platform)
    hasty = programs.hasty
    if hasty in _near(batches, texts.get(CHOSEN)):
        lowered = ours.in_turn(called(row, phase, "xla")).lower([sets[0][0]] * calls)
        with clock(COMPILING):
            programs.compiled[hasty] = lowered.compile()
        watch = other_load.Watch(platform)
        batches = _timed(texts, programs.compiled, sets, calls, platform)
    load, near = watch.told(), _near(batches, texts.get(CHOSEN))
    doubt = noise.doubt_of_row(
        {name: batches[text] for name, text in texts.items() if text in near}, load
    )
    told = programs.told
    named = {name: statistics.median(batches[text]) for name, text in texts.items()}
    return Found(
        str(row), row.op, phase, told.choice, told.traits, told.sizes, named, wrong, told.refused,
        doubt,
    )  # fmt: skip


def _near(batches: dict[str, list[float]], chosen: str | None) -> list[str]:
    """The program of `None`, and those that are not far behind: the others have few batches, and
    decide nothing.
    """
    found = {text: statistics.median(one) for text, one in batches.items()}
    most = FAR_BEHIND * min(found.values(), default=0.0)
    return [text for text, seconds in found.items() if seconds <= most or text == chosen]


def _timed(
    texts: dict[str, str], compiled: dict[str, Any], sets: list[Any], calls: int, platform: str
) -> dict[str, list[float]]:
    """Seconds of one call in each batch, of each program."""
    batches: dict[str, list[float]] = {text: [] for text in texts.values()}
    counts: dict[str, list[int]] = {text: [] for text in batches}

    def turns(which: Sequence[str], seconds: float) -> None:
        launches = [functools.partial(launched, compiled[text], sets) for text in which]
        known = [count for text in which for count in counts[text]]
        with clock(TIMING):
            timed = timing.interleaved(
                launches, jax.block_until_ready, platform, seconds, calls, known
            )
        for text, one, count in zip(which, timed, known, strict=True):
            batches[text] += one.batches
            counts[text] = [count]

    def times() -> dict[str, float]:
        return {text: statistics.median(found) for text, found in batches.items()}

    if not batches:
        return {}
    turns(list(batches), 0.0)
    chosen = texts.get(CHOSEN)
    near = _near(batches, chosen)
    # The first batches may have warmed the card up: they do not count.
    for text in near:
        batches[text].clear()
    turns(near, SECONDS)
    found = times()
    if chosen is not None and found[chosen] > DOUBTFUL * min(found.values()):
        ahead_of_it = [text for text in near if found[text] <= found[chosen]]
        if len(ahead_of_it) > 1:
            turns(ahead_of_it, SECONDS_OF_DOUBT)
    return batches


def launched(program: Any, sets: list[Any], index: int) -> Any:
    return program(sets[index % len(sets)])


# -- what is said of it --------------------------------------------------------------------------


def line_of(found: Found) -> str:
    """A row of the table, with everything that was timed."""
    doubtful = noise.MARK * bool(found.doubt)
    times = ", ".join(
        f"{name} {doubtful}{demo.milliseconds(seconds)}"
        for name, seconds in sorted(found.seconds.items(), key=lambda item: item[1])
        if name != CHOSEN
    )
    wrong = "".join(f"; {name}: {reason}" for name, reason in found.wrong.items())
    mark = "  <-- " if found.behind else "      "
    ratio = f"{noise.NOISY:>6}" if found.doubt else f"{found.ratio:6.3f}"
    fastest = f"not steady, {found.doubt}" if found.doubt else f"fastest {found.fastest}"
    return (
        f"{ratio}{mark}{found.row}, {found.phase}: {CHOSEN} is {found.choice} "
        f"{doubtful}{demo.milliseconds(found.seconds.get(CHOSEN))}, {fastest}; ms: {times}{wrong}"
    )


# The traits that decide which of cuDNN's kernels run.
CUDNN_TRAITS = ("dtype", "D", "causal", "window")


def entry_of(found: Found) -> str:
    """The entry of a table in `ato_jax/tuned/` that puts the fastest backend first."""
    # cuDNN refuses options by itself; an entry for XLA is for the options that were measured.
    names = CUDNN_TRAITS if found.fastest == "cudnn" else found.traits.keys() - {"normalize"}
    when = {name: value for name, value in found.traits.items() if name in names}
    told = ", ".join(f"{name} = {json.dumps(value)}" for name, value in when.items())
    phase = "forward" if found.phase == PHASES[0] else "training"
    return "\n".join(
        [
            f"# {found.row}: {found.choice} takes {found.ratio:.2f} of {found.fastest}'s time",
            f"[[{found.op}.first]]",
            f"when = {{{told}}}",
            f'phase = "{phase}"',
            f"sizes = {{shortest = {{least = {found.sizes['shortest']}}}}}",
            f'backend = "{found.fastest}"',
        ]
    )


def verdict(all_found: Sequence[Found]) -> str:
    """The rows in which `None` is behind, entries that would change that, and a last line."""
    behind = [found for found in all_found if found.behind]
    lines = []
    if behind:
        lines += ["", f"Behind by more than {ALLOWED - 1:.0%}:"]
        lines += map(line_of, sorted(behind, key=lambda found: -found.ratio))
        timed = [found for found in behind if CHOSEN in found.seconds]
        if timed:
            lines += ["", "Entries that would change these choices:", *map(entry_of, timed)]
    if said := noise.left_out([found.doubt for found in all_found]):
        lines += ["", said]
    lines += ["", f"{len(behind)} of {len(all_found)} rows exceed {ALLOWED - 1:.0%}"]
    return "\n".join(lines)


def read(path: Path) -> tuple[dict[str, Any], list[Found]]:
    """The facts and the rows of a file that `write` wrote."""
    return kept.rows_of(path, NAME, lambda row: Found(**row))


def tables(path: Path) -> list[Table]:
    """A table of the rows in which `None` is behind, from a file that `write` wrote; its note
    counts all rows."""
    facts, found = read(path)
    if not found:
        return []
    steady = [one for one in found if not one.doubt]
    behind = sorted((one for one in found if one.behind), key=lambda one: -one.ratio)
    lines = [
        [one.row, one.phase, one.choice, one.fastest, f"{one.ratio:.2f}x"]
        for one in behind
        if CHOSEN in one.seconds
    ]
    phases = len(PHASES)
    note = (
        f"{len(found)} of {phases * len(ROWS['gpu'])} calls were measured, {len(steady)} of them "
        f"steadily. In {len(steady) - len(behind)} `implementation=None` takes at most "
        f"{ALLOWED:.2f} times the fastest backend; the table has the others."
    )
    head = ["call", "phase", "None runs", "fastest", "None / fastest"]
    notes = [note, kept.told_of(facts)]
    return [Table("Whether implementation=None is the fastest backend", head, lines, notes, 4)]


def fit(names: Sequence[str]) -> int:
    """Prints the entries that the cards of these files lack."""
    if not names:
        raise ResultsError("fit takes files that `run --suite=choices --json=FILE.json` wrote")
    cards: dict[str, dict[Group, Found]] = {}
    marked = 0
    for name in names:
        facts, rows = read(Path(name))
        cards[f"{facts['device']} ({name})"] = {
            (one.row, one.phase): one for one in rows if not one.doubt
        }
        marked += sum(bool(one.doubt) for one in rows)
    groups = dict.fromkeys(group for rows in cards.values() for group in rows)
    count = 0
    for group in groups:
        found = {card: rows[group] for card, rows in cards.items() if group in rows}
        behind = [one for one in found.values() if one.behind and CHOSEN in one.seconds]
        if not behind:
            continue
        worst = max(behind, key=lambda one: one.ratio)
        print()
        for card, one in found.items():
            if worst.fastest in one.seconds:
                share = one.seconds[worst.fastest] / min(one.seconds.values())
                print(f"# {card}: None {one.ratio:.3f}, {worst.fastest} {share:.3f}")
        print(entry_of(worst))
        count += 1
    if marked:
        print(
            f"\n{marked} rows are not steady and were left out. {noise.ADVICE}: "
            f"`run --suite={NAME} --resume` takes these alone"
        )
    print(f"\n{count} of {len(groups)} rows lack an entry")
    return 0


def write(all_found: Iterable[Found], facts: dict[str, Any]) -> None:
    if FLAGS.json:
        rows = [dataclasses.asdict(found) for found in all_found]
        results.write(Path(FLAGS.json), json.dumps({**facts, "rows": rows}, indent=1) + "\n")


def earlier(facts: dict[str, Any]) -> dict[Group, Found]:
    """The rows of the file that a run with --resume goes on with."""
    rows = kept.earlier_rows(NAME, lambda row: Found(**row), facts)
    if rows:
        told = f"{sum(not one.doubt for one in rows)} of {len(rows)} rows there are steady"
        print(told, flush=True)
    return {(found.row, found.phase): found for found in rows}


def part_of(rows: list[One]) -> list[One]:
    """The rows that --part leaves."""
    if not FLAGS.part:
        return rows
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", FLAGS.part)
    first, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= count:
        raise ResultsError(f"--part takes K/N with 1 <= K <= N, such as 1/4; got {FLAGS.part!r}")
    if first > len(rows):
        raise ResultsError(f"--part={FLAGS.part} has no row: there are {len(rows)}")
    return rows[first - 1 :: count]


def main() -> int:
    start = time.monotonic()
    spending.spent.clear()
    platform = ours.platform()
    if platform not in results.PLATFORMS:
        logging.error("The benchmarks run on a CPU or an NVIDIA GPU, JAX computes on %s", platform)
        return 1
    if FLAGS.dtype or FLAGS.peer:
        raise ResultsError(f"{NAME} has rows of every dtype and no peers: no --dtype, no --peer")
    phases = PHASES[:1] if FLAGS.forward_only else PHASES
    rows = [row for row in ROWS[platform] if FLAGS.case in str(row)]
    if not rows:
        known = "; ".join(map(str, ROWS[platform]))
        raise ResultsError(f"No row of {NAME} contains --case={FLAGS.case!r}: {known}")
    rows = part_of(rows)
    facts = dict(kept.facts())
    print(f"{facts['device']}; JAX {jax.__version__}; {len(rows)} rows", flush=True)
    every = [(row, phase) for row in rows for phase in phases]
    within = FLAGS.within_s or float("inf")
    all_found = earlier(facts)
    facts["spent"] = spending.of_file(Path(FLAGS.json)) if FLAGS.resume else {}
    steady = {group for group, found in all_found.items() if not found.doubt}
    groups = [(row, phase) for row, phase in every if (str(row), phase) not in steady]
    # Ahead of those that were not steady.
    groups.sort(key=lambda group: (str(group[0]), group[1]) in all_found)
    kept.clear_the_way()
    write(all_found.values(), facts)
    # A CPU's cores are few, and its programs small.
    count = ahead.workers() if platform == "gpu" else 0
    not_compiled = 0
    if kept_programs := store.given():
        programs, later = in_store(groups, kept_programs)
        groups, not_compiled = [group for group in groups if group not in later], len(later)
    else:
        with clock(COMPILING):
            programs = compiled_ahead(groups, platform, min(within / 2, COMPILE_SECONDS), count)
    print(f"compiling took {time.monotonic() - start:.0f} s\n\n ratio", flush=True)
    if count:
        # Rows that this process has to compile come last.
        groups.sort(key=lambda group: group not in programs)
    progress.start(len(groups), start + within)
    late = not_compiled
    for index, group in enumerate(groups):
        if time.monotonic() - start > within:
            late += len(groups) - index
            break
        progress.show(", ".join(map(str, group)))
        with clock(CHECKING):
            found = _measured(*group, programs.pop(group, None), platform)
        all_found[found.row, found.phase] = found
        progress.step()
        print(line_of(found), flush=True)
        write(all_found.values(), facts)
    if late:
        print(f"{late} rows were not reached in time", flush=True)
    spent = time.monotonic() - start
    spending.add(facts["spent"], NAME, spending.of_kinds(spent))
    write(all_found.values(), facts)
    print(f"\nthe suite took {spent:.0f} s")
    print("\n" + spending.table(facts["spent"]).text(), flush=True)
    print(verdict([*all_found.values()]), flush=True)
    if FLAGS.json:
        print(FLAGS.json, flush=True)
    return int(any(found.behind for found in all_found.values()) or late > 0)


def _measured(row: Row, phase: str, ready: Programs | None, platform: str) -> Found:
    """By what was compiled ahead; where there is nothing, or it does not run, compiled here."""
    if ready is not None:
        try:
            return measure(row, phase, unpacked(ready), platform)
        except Exception as error:  # a program that cannot be loaded
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            print(f"{row}, {phase}: compiled again: {reason}", flush=True)
    with clock(COMPILING):
        programs = compiled(row, phase, platform)
    return measure(row, phase, programs, platform)
