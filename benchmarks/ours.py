"""This library, and what else runs on JAX, timed in the driver's own process."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

import ato_jax
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.delta_rule import api as delta_rule_api
from ato_jax.ops.linear_attention import api as linear_attention_api
from benchmarks import cases, timing

OPS: dict[str, Callable[..., Any]] = {
    "linear": ato_jax.linear_attention,
    "softmax": ato_jax.attention,
}


def platform() -> str:
    """ "gpu" or "cpu", where JAX computes by default."""
    return jax.default_backend()


def device_name() -> str:
    return jax.devices()[0].device_kind


def backends(case: cases.Case) -> tuple[str, str]:
    """Which of the library's backends run the case: forward, backward."""
    q = jax.ShapeDtypeStruct(case.query_shape, case.dtype)
    k = jax.ShapeDtypeStruct(case.key_shape, case.dtype)
    more: list[Any] = []
    if case.decay:
        more.append(jax.ShapeDtypeStruct(case.gates, jnp.float32))
    if case.documents:
        more.append(jax.ShapeDtypeStruct((case.B, case.T), jnp.int32))
    told = ato_jax.explain(OPS[case.op], q, k, k, **options(case, *more))
    forward, backward = (
        choice.backend if choice else "none" for choice in (told.forward, told.backward)
    )
    return forward, backward


@functools.partial(jax.jit, static_argnums=0)
def draw(case: cases.Case, key: jax.Array) -> dict[str, jax.Array]:
    """q, k, v and dout, with a decay its logarithms, few far below 0, with documents their ids; and
    what more there is to a cache: scales, the table of its pages, lengths.
    """
    shapes = (case.query_shape, case.key_shape, case.key_shape, case.query_shape)
    keys = jax.random.split(key, 5)
    found = {
        name: jax.random.normal(one, shape, jnp.float32).astype(case.dtype)
        for name, one, shape in zip(("q", "k", "v", "dout"), keys, shapes, strict=False)
    }
    if case.decay is not None:
        found["decay"] = (
            jnp.asarray(cases.head_decays(case.H))
            if case.decay == "head"
            else -cases.DECAY * jnp.abs(jax.random.normal(keys[4], case.gates))
        )
    if case.op in cases.WITH_BETAS:
        length = jnp.linalg.norm(found["k"].astype(jnp.float32), axis=-1, keepdims=True)
        found["k"] = (found["k"] / length).astype(case.dtype)
        of_beta = jax.random.fold_in(keys[4], 1)
        found["beta"] = jax.nn.sigmoid(jax.random.normal(of_beta, (case.B, case.T, case.H)))
    if case.documents:
        found["ids"] = jnp.asarray(case.document_ids)
    if case.V:
        del found["v"]
    if case.cache:
        for name, one in zip("kv", jax.random.split(keys[4]), strict=True):
            found[name] = jax.random.randint(keys["qkv".index(name)], case.key_shape, -127, 128)
            found[name] = found[name].astype(case.cache)
            # Of the size of 1 when they are multiplied.
            scales = jax.random.uniform(one, case.key_shape[:3], minval=0.5, maxval=1.5)
            found[f"{name}_scales"] = scales / 64
    if case.page:
        pages = jax.random.permutation(keys[4], case.B * case.key_shape[1] // case.page)
        found["table"] = pages.reshape(case.B, -1).astype(jnp.int32)
    if case.page or case.ragged:
        found["lengths"] = jnp.asarray(case.lengths)
    return found


# Of a set of inputs, what a function takes by name.
CACHE = ("k_scales", "v_scales", "table", "lengths")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A call that is compiled and compared, ready to be timed.

    `scratch` is the bytes that it holds at its peak beyond its inputs and outputs, as XLA plans it.
    """

    launch: Callable[[int], Any]
    calls: int
    errors: dict[str, float]
    scratch: int | None = None
    counts: list[int] = dataclasses.field(default_factory=list)

    def time(self, seconds: float) -> timing.Timing:
        return timing.measure(
            self.launch, jax.block_until_ready, platform(), seconds, self.calls, self.counts
        )


def measure(
    case: cases.Case, phase: str, seconds: float, function: Callable[..., Any] | None = None
) -> timing.Timing | str:
    """Times the op, or another `function(q, k, v)` of arrays [B, T, H, D]; or says why not."""
    ready = prepare(case, phase, function)
    return ready if isinstance(ready, str) else ready.time(seconds)


OUT_OF_MEMORY = "out of memory"

# Compares what was compiled, and says why it cannot be timed or what is to be timed.
Compiled = Callable[[], Prepared | str]


def prepare(case: cases.Case, phase: str, *arguments: Any, **options: Any) -> Prepared | str:
    """`compiled` and compared, or the reason why it cannot be timed."""
    return finished(compiled(case, phase, *arguments, **options))


def finished(ready: Compiled | str) -> Prepared | str:
    return ready if isinstance(ready, str) else ready()


def compiled(
    case: cases.Case,
    phase: str,
    function: Callable[..., Any] | None = None,
    mapped: bool = False,
    normalize: bool = True,
    steps: bool = False,
) -> Compiled | str:
    """The op or another function, compiled: it runs nothing, so that others may compile beside it.

    Args:
      case, phase: what to run.
      function: `function(q, k, v)` or, with a decay or documents, `function(q, k, v, decay)` or
        `function(q, k, v, ids)`; of the delta rule with betas, too, which come last; of a cache
        what else there is by name, as `CACHE` has it.
      mapped: the function takes features, phi(q) and phi(k), in place of q and k.
      normalize: whether it divides by the sum of the weights.
      steps: the function launches programs of its own, one after the other from Python.
    """
    call = called(case, phase, function)
    _, calls = _groups(case)

    def compile_all() -> Programs:
        inputs = _inputs(case, mapped)
        # The call first: most refusals are its.
        program, scratch = (lambda group: [call(one) for one in group]), None
        if not steps:
            program = in_turn(call).lower([inputs.shapes] * calls).compile()
            # XLA need not share memory among the calls of one program: of several it may be more.
            one = in_turn(call).lower([inputs.shapes]).compile() if calls > 1 else program
            scratch = scratch_of(one)
        shapes = _shapes(jax.eval_shape(call, inputs.shapes))
        reading = _reading(case, shapes)
        return Programs(case, mapped, normalize, program, scratch, inputs, shapes, reading)

    return _or_reason(compile_all)


def _groups(case: cases.Case) -> tuple[int, int]:
    return timing.groups_of_inputs(case.set_bytes, platform())


@dataclasses.dataclass(frozen=True)
class Programs:
    """All that one contender runs in a case and phase, compiled; called, it is compared.

    `program` makes the results of a group of inputs, and `reading` takes what is compared out of
    those, which have these `shapes`.
    """

    case: cases.Case
    mapped: bool
    normalize: bool
    program: Any
    scratch: int | None
    inputs: _Inputs
    shapes: _Shapes
    reading: Any

    def __call__(self) -> Prepared | str:
        return _or_reason(self._compared)

    def _compared(self) -> Prepared | str:
        groups, calls = _groups(self.case)
        keys = _keys(self.case, groups, calls)
        sets = [[self.inputs.draw(key) for key in group] for group in keys]
        dout, heads = self.inputs.compared(sets[0][0])
        results = self.program([sets[0][0] | {"dout": dout}, *sets[0][1:]])[0]
        found = cases.errors(
            self.case,
            _on_host(self.case, heads),
            _on_host(self.case, self.reading(results)),
            ("JAX", self.mapped),
            mapped=self.mapped,
            normalize=self.normalize,
        )
        launch = functools.partial(_launched, self.program, sets)
        reason = cases.too_large(self.case, found)
        return reason or Prepared(launch, calls, found, self.scratch)

    def packed(self) -> dict[str, Any]:
        """As it goes to another process; an error where a program cannot."""
        return {
            "input_shapes": self.inputs.shapes,
            "drawing": _serialized(self.inputs.draw),
            "comparing": _serialized(self.inputs.compared),
            "reading": _serialized(self.reading),
            "program": _serialized(self.program),
        } | {name: getattr(self, name) for name in _PLAIN}


# Of what is packed, that which is no program.
_PLAIN = ("case", "mapped", "normalize", "scratch", "shapes")


@functools.cache
def import_backends() -> None:
    """Before a program of another process is loaded: JAX says where the functions are that Mosaic
    GPU's programs call when it is imported with that backend."""
    for api in (attention_api, linear_attention_api, delta_rule_api):
        for name in api.OP.backends:
            api.OP.backend(name)


def unpacked(told: dict[str, Any]) -> Programs:
    """What another process packed, with programs that this one can run."""
    import_backends()
    case, shapes = told["case"], told["shapes"]
    of_inputs = (told[name] for name in ("input_shapes", "drawing", "comparing"))
    inputs = _loaded_inputs(case, told["mapped"], *of_inputs)
    reading = _loaded_reading(case, shapes, told["reading"])
    plain = {name: told[name] for name in _PLAIN}
    return Programs(program=_loaded(told["program"]), inputs=inputs, reading=reading, **plain)


def _serialized(program: Any) -> tuple[Any, ...]:
    return serialize_executable.serialize(program)


def _loaded(told: tuple[Any, ...]) -> Any:
    return serialize_executable.deserialize_and_load(*told)


def _launched(program: Any, sets: list[Any], index: int) -> Any:
    return program(sets[index % len(sets)])


def scratch_of(program: Any) -> int | None:
    """The bytes that a compiled program holds beyond its inputs and outputs, where XLA knows."""
    told = program.memory_analysis()
    return None if told is None else told.temp_size_in_bytes


def once(make: Callable[..., Any], named_by: int | None = None) -> Callable[..., Any]:
    """The same, what it makes kept for the latest arguments, of which the first `named_by` tell
    them apart, if not all: threads that ask at one time wait for the one that makes it.
    """
    latest = functools.lru_cache(maxsize=64)(lambda *arguments: (threading.Lock(), []))

    @functools.wraps(make)
    def made(*arguments: Any) -> Any:
        lock, found = latest(*arguments[:named_by])
        with lock:
            if not found:
                found.append(make(*arguments))
            return found[0]

    return made


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """Programs for a case's inputs: what draws a set of them, and what gives of a set the dout of
    a compared call, and the heads that are compared.
    """

    shapes: dict[str, jax.ShapeDtypeStruct]
    draw: Any
    compared: Any


@once
def _inputs(case: cases.Case, mapped: bool) -> _Inputs:
    def drawn(key: jax.Array) -> dict[str, jax.Array]:
        arrays = draw(case, key)
        return _mapped(arrays) if mapped else arrays

    def compared(arrays: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        arrays = arrays | {"dout": _compared_dout(case, arrays["dout"])}
        return arrays["dout"], _one_group(case, arrays)

    key = jax.eval_shape(lambda: jax.random.key(0))
    drawing = jax.jit(drawn).lower(key).compile()
    shapes = jax.eval_shape(drawn, key)
    return _Inputs(shapes, drawing, jax.jit(compared).lower(shapes).compile())


@functools.partial(once, named_by=2)
def _loaded_inputs(
    case: cases.Case, mapped: bool, shapes: Any, drawing: Any, comparing: Any
) -> _Inputs:
    return _Inputs(shapes, _loaded(drawing), _loaded(comparing))


# By name, those of the results.
_Shapes = tuple[tuple[str, jax.ShapeDtypeStruct], ...]


def _shapes(results: dict[str, Any]) -> _Shapes:
    return tuple(results.items())


@functools.partial(once, named_by=2)
def _loaded_reading(case: cases.Case, shapes: _Shapes, reading: Any) -> Any:
    return _loaded(reading)


@once
def _reading(case: cases.Case, shapes: _Shapes) -> Any:
    """What takes the compared heads out of results of these shapes."""
    return jax.jit(functools.partial(_one_group, case)).lower(dict(shapes)).compile()


def _keys(case: cases.Case, groups: int, calls: int) -> list[list[jax.Array]]:
    keys = jax.random.split(jax.random.key(case.T), (groups, calls))
    return [list(group) for group in keys]


def in_turn(call: Callable[[Any], Any]) -> Any:
    """One program that calls once for each of a group of inputs, each of its own arrays."""
    # A function in the program: traced and lowered once, not once a call.
    once = jax.jit(call)

    @jax.jit
    def launch(group: list[Any]) -> list[Any]:
        results = []
        while group:
            # One call after the other: XLA neither fuses two nor runs them side by side.
            result, group = jax.lax.optimization_barrier((once(group[0]), group[1:]))
            results.append(result)
        return results

    return launch


def _or_reason(function: Callable[[], Any]) -> Any:
    """What the function returns, or why it does not."""
    try:
        return function()
    except (ato_jax.UnsupportedError, ValueError) as error:
        return str(error).splitlines()[0]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return OUT_OF_MEMORY
        return str(error).splitlines()[0]


def called(
    case: cases.Case, phase: str, function: Callable[..., Any] | None = None
) -> Callable[[dict[str, jax.Array]], dict[str, jax.Array]]:
    """From a set of inputs, as `draw` makes it, to out and maybe the gradients."""
    attend = function or functools.partial(_attend, case)

    def call(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        named = [name for name in ("q", "k", "v", "decay", "beta") if name in inputs]
        arrays = [inputs[name] for name in named]
        ids = [inputs["ids"]] if "ids" in inputs else []
        cache = {name: inputs[name] for name in CACHE if name in inputs}
        if phase == "forward":
            return {"out": attend(*arrays, *ids, **cache)}
        out, pull = jax.vjp(lambda *arrays: attend(*arrays, *ids), *arrays)
        gradients = pull(inputs["dout"])
        results = ("out", *(f"d{name}" for name in named))
        return dict(zip(results, (out, *gradients), strict=True))

    return call


def _compared_dout(case: cases.Case, dout: jax.Array) -> jax.Array:
    """The same, but zero in all rows that are not compared."""
    kept = np.zeros((case.T, 1, 1), bool)
    kept[cases.compared_rows(case)] = True
    return jnp.where(kept, dout, 0)


def _one_group(case: cases.Case, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The last key head of the last batch entry, with its queries."""
    heads = case.H // case.key_shape[2]
    found = {}
    for name, array in arrays.items():
        if name in ("q", "dout", "out", "dq"):
            # [H / G, T, D]
            found[name] = array[-1, :, -heads:].astype(jnp.float32).swapaxes(0, 1)
        elif name in ("k", "v", "dk", "dv"):
            found[name] = _last_rows(case, arrays, array).astype(jnp.float32)  # [S, D]
            if f"{name}_scales" in arrays:
                found[name] *= _last_rows(case, arrays, arrays[f"{name}_scales"])[:, None]
        elif name in ("decay", "beta"):
            found[name] = array[-1] if array.ndim == 1 else array[-1, :, -1]
    return found


def _last_rows(
    case: cases.Case, arrays: dict[str, jax.Array], array: jax.Array
) -> jax.Array:
    """Of the last key head of the last batch entry, in their order: [S, ...]."""
    if case.page is None:
        return array[-1, :, -1]
    # [P, page, ...] of one head
    pages = array[:, :, -1].reshape(-1, case.page, *array.shape[3:])
    return pages[arrays["table"][-1]].reshape(-1, *array.shape[3:])


def _on_host(case: cases.Case, arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    found = {name: np.asarray(array) for name, array in arrays.items()}
    if "decay" in found:
        found["decay"] = np.broadcast_to(found["decay"], (case.T, *found["decay"].shape[1:]))
    return found


def _attend(case: cases.Case, *arrays: jax.Array) -> jax.Array:
    q, k, v, *more = arrays
    return OPS[case.op](q, k, v, **options(case, *more))


def options(case: cases.Case, *more: jax.Array) -> dict[str, Any]:
    """The library's, for what a set of inputs has beside q, k and v."""
    found: dict[str, Any] = {"causal": case.causal}
    if case.decay:
        found["decay"] = more[0]
    if case.left is not None:
        found["window"] = (case.left, None)
    if case.documents:
        found["segment_ids"] = more[0]
    if case.tf32:
        found["precision"] = "tf32"
    return found


def _mapped(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    features = {name: jax.nn.elu(arrays[name]) + 1 for name in ("q", "k")}
    return arrays | features
