"""An op of ato_jax with its options as jitted functions of flat lists of arrays.

    forward:   arrays -> the op's outputs
    backward:  arrays, outputs, cotangents -> gradients

A `Call` is everything static about a call but shapes and dtypes. A `Program` is a call on one
device for arrays of the same shapes and dtypes; `ato_jax.programs` limits how many there are.
A call's `text` says the same in words, so that a compiled or exported PyTorch program carries its
options along. What cannot be written down, a feature map that is a function, is named by a handle
that belongs to this process alone; equal ones share it.

The outputs are the op's own residuals, so backward computes nothing of the forward again, but for
the ops of one line, which have JAX's derivative.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax import device, dispatch, programs
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.attention.pieces import combine
from ato_jax.ops.attention.spec import Outputs as AttentionOutputs
from ato_jax.ops.common import axes
from ato_jax.ops.linear_attention import api as linear_attention_api
from ato_jax.ops.linear_attention import features
from ato_jax.ops.linear_attention.spec import LinearState
from ato_jax.ops.linear_attention.spec import Outputs as LinearAttentionOutputs
from ato_jax.ops.linear_attention.step import linear_attention_step

# Texts that are kept, and plans of calls: more than a model has, and yet a bound.
KEPT = 1024
# Backends whose kernels JAX's runtime alone can launch.
THROUGH_JAX_ALONE = ("mosaic_gpu",)

# The arrays that a feature map computes with, which have no gradient.
PARAMETERS = tuple(f"feature_map.{n}" for n in range(64))

Arrays = Sequence[Any]
Shapes = list[tuple[tuple[Any, ...], str]]
Levels = tuple[tuple[bool, ...], ...]


class Call(NamedTuple):
    """`arrays` names the arrays in their order, "state.kv" a part of one argument.

    `training` keeps what only a backward reads. Each level of `batched`, innermost first, tells
    which arrays have one more axis in front, over which the op is mapped; `batched_backward` the
    same of the backward's arrays, for maps around it alone.
    """

    op: str
    arrays: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    training: bool
    interpreting: bool
    batched: Levels = ()
    batched_backward: Levels = ()

    @property
    def text(self) -> str:
        return json.dumps(self._asdict(), default=_in_words, separators=(",", ":"))

    def inside(self, level: tuple[bool, ...]) -> Call:
        """This call, mapped over one more axis."""
        return self._replace(batched=(*self.batched, level))

    def inside_backward(self, level: tuple[bool, ...]) -> Call:
        return self._replace(batched_backward=(*self.batched_backward, level))


@functools.lru_cache(maxsize=KEPT)
def parse(text: str) -> Call:
    """The call that a text says."""
    fields = json.loads(text)
    options = tuple((name, _from_words(value)) for name, value in fields.pop("options"))
    return Call(
        **{name: _as_tuple(value) for name, value in fields.items()},
        options=options,
    )


# Handles of the feature maps that are functions, and the other way round.
_handles: dict[features.FeatureMap, str] = {}
_feature_maps: dict[str, features.FeatureMap] = {}
# Two threads that count at once would give two functions one handle.
_counting = threading.Lock()
# No other process gives these: a program loaded there must not find another function.
_process = uuid.uuid4().hex


def resolve(feature_map: Any) -> tuple[features.FeatureMap, tuple[jax.Array, ...]]:
    """A feature map without a name, and its parameters. Whether it fits D, `prepare` looks."""
    is_favor = isinstance(feature_map, features.Favor)
    found, parameters, _ = features.resolve(
        feature_map, feature_map.projection.shape[1] if is_favor else 1
    )
    if len(parameters) > len(PARAMETERS):
        raise ValueError(
            f"feature_map must close over at most {len(PARAMETERS)} arrays, got {len(parameters)}"
        )
    return found, parameters


def _in_words(value: Any) -> Any:
    if callable(value) and not isinstance(value, features.FeatureMap):
        value, _ = resolve(value)
    if isinstance(value, features.FeatureMap):
        return {"feature_map": _handle(value)}
    if isinstance(value, jax.lax.Precision):
        return value.name.lower()
    if hasattr(value, "item"):
        return value.item()
    raise ValueError(f"{value!r} cannot be an option of a compiled call")


def _handle(feature_map: features.FeatureMap) -> str:
    with _counting:
        handle = _handles.get(feature_map)
        if handle is None:
            handle = f"{_process}-{len(_handles)}"
            _feature_maps[handle] = feature_map
            _handles[feature_map] = handle
    return handle


def _from_words(value: Any) -> Any:
    if not isinstance(value, dict):
        return _as_tuple(value)
    handle = value["feature_map"]
    if handle not in _feature_maps:
        raise ValueError(
            "feature_map is a function of the process that exported this program, and does not "
            "travel with it: export with a feature map that has a name"
        )
    return _feature_maps[handle]


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


class Function:
    """A function of arrays, jitted.

    `plans` and `short_of_memory` are `_direct`'s, which one thread at a time adds to.
    """

    def __init__(self, traced: Callable[..., list[jax.Array]]) -> None:
        self.traced = traced
        self.jitted = jax.jit(traced)
        self.plans: dict[Any, Any] = {}
        # Of plans that found no memory, how many calls asked for them.
        self.short_of_memory: dict[Any, int] = {}
        self.planning = threading.Lock()


class Program(programs.Program):
    """A call on one device, for arrays of the same shapes and dtypes each time.

    JAX keeps what it compiled as long as the functions exist, so other shapes are another program.
    """

    def __init__(self, call: Call, place: jax.Device) -> None:
        super().__init__(device.describe(place).platform)
        self.call = call
        self.place = place
        self.forward = self._function(functools.partial(forward, call))
        self.answer = self._function(functools.partial(answer, call))
        self._backwards: dict[Any, Function] = {}

    def backward(self, needed: tuple[bool, ...], given: tuple[bool, ...]) -> Function:
        """(arrays, outputs, the cotangents that are given) -> the gradients that are needed."""
        try:
            return self._backwards[needed, given]
        except KeyError:
            function = self._function(functools.partial(backward, self.call, needed, given))
            return self._backwards.setdefault((needed, given), function)

    @property
    def timed(self) -> tuple[bool, ...]:
        """Of an op with kernels of its own: which of its outputs have an axis T."""
        return OPS[self.call.op].timed

    @property
    def answers(self) -> int | None:
        """How many outputs the caller asked for, from the first; None for all."""
        return OPS[self.call.op].answers(self.call)

    @functools.cached_property
    def text(self) -> str:
        return self.call.text

    def batched(self, level: tuple[bool, ...], facts: Any) -> Program:
        return of_call(self.call.inside(level), self.place, facts)

    def batched_backward(self, level: tuple[bool, ...], facts: Any) -> Program:
        return of_call(self.call.inside_backward(level), self.place, facts)

    @property
    def waits_for_memory(self) -> bool:
        """Whether the direct road is closed for now alone."""
        return any(function.short_of_memory for function in self._functions)

    def is_pinned(self) -> bool:
        plans = [plan for function in self._functions for plan in list(function.plans.values())]
        return any(plan.is_captured for plan in plans)

    @property
    def _functions(self) -> list[Function]:
        return [self.forward, self.answer, *list(self._backwards.values())]

    def _function(self, function: Callable[..., Any]) -> Function:
        # Not `self`: in a circle of references its memory would wait for Python's collector.
        place, interpreting = self.place, self.call.interpreting

        def traced(*arrays: jax.Array) -> list[jax.Array]:
            # The op asks where it will run; tracers do not tell.
            with jax.default_device(place), device.interpret(interpreting):
                return function(arrays)

        return Function(traced)


kept = programs.Programs()
# The same ones by their calls' texts.
_texts: dict[Any, Program] = {}


def of_call(call: Call, place: jax.Device, facts: Any) -> Program:
    """The program of a call on arrays of such shapes and dtypes, which `facts` tell."""
    # 1 is equal to True, but another option.
    kinds = tuple([type(value) for _, value in call.options])
    return kept.find((call, kinds, place, facts), functools.partial(Program, call, place))


def of_text(text: str, place: jax.Device, facts: Any) -> Program:
    key = (text, place, facts)
    program = _texts.get(key)
    if program is None:
        program = of_call(parse(text), place, facts)
        kept.also_known(program, _texts, key, program)
    program.used = True
    return program


def forward(call: Call, arrays: Arrays) -> list[jax.Array]:
    def function(*arrays: jax.Array) -> list[jax.Array]:
        return OPS[call.op].forward(call, arrays)

    for level in call.batched:
        function = jax.vmap(function, in_axes=_in_axes(level))
    return function(*arrays)


def answer(call: Call, arrays: Arrays) -> list[jax.Array]:
    """Of the outputs those that the caller asked for, where no backward will read the others."""
    return forward(call, arrays)[: OPS[call.op].answers(call)]


def backward(
    call: Call, needed: tuple[bool, ...], given: tuple[bool, ...], arrays: Arrays
) -> list[jax.Array]:
    def function(*arrays: jax.Array) -> list[jax.Array]:
        inputs, rest = arrays[: len(needed)], arrays[len(needed) :]
        outputs, cotangents = rest[: len(given)], iter(rest[len(given) :])
        every = [
            next(cotangents) if is_given else jnp.zeros_like(output)
            for is_given, output in zip(given, outputs, strict=True)
        ]
        return OPS[call.op].backward(call, needed, inputs, outputs, every)

    for level in call.batched:
        outer = (True,) * (len(arrays) - len(needed))
        function = _summed(jax.vmap(function, in_axes=_in_axes(level + outer)), level, needed)
    for level in call.batched_backward:
        function = jax.vmap(function, in_axes=_in_axes(level))
    return function(*arrays)


def _in_axes(level: tuple[bool, ...]) -> tuple[int | None, ...]:
    return tuple(0 if batched else None for batched in level)


def _summed(
    function: Callable[..., Any], level: tuple[bool, ...], needed: tuple[bool, ...]
) -> Callable[..., Any]:
    """An array that all members of a batch read has the sum of their gradients."""
    batched = [is_batched for is_batched, wanted in zip(level, needed, strict=True) if wanted]

    def summed(*arrays: jax.Array) -> list[jax.Array]:
        return [
            gradient if is_batched else gradient.astype(jnp.float32).sum(0).astype(gradient.dtype)
            for is_batched, gradient in zip(batched, function(*arrays), strict=True)
        ]

    return summed


def output_shapes(call: Call, inputs: Shapes) -> Shapes:
    """Shape and dtype of every output; sizes may be PyTorch's symbols."""
    if call.batched:
        *inner, level = call.batched
        size, bare = _unbatched(level, inputs)
        found = output_shapes(call._replace(batched=tuple(inner)), bare)
        return [((size, *shape), dtype) for shape, dtype in found]
    return OPS[call.op].shapes(call, dict(zip(call.arrays, inputs, strict=True)))


def gradient_shapes(call: Call, arrays: Shapes) -> Shapes:
    """Of every array of the backward, the shape that a gradient of it has."""
    if not call.batched_backward:
        return arrays
    *inner, level = call.batched_backward
    size, bare = _unbatched(level, arrays)
    found = gradient_shapes(call._replace(batched_backward=tuple(inner)), bare)
    return [((size, *shape), dtype) for shape, dtype in found]


def _unbatched(level: tuple[bool, ...], arrays: Shapes) -> tuple[Any, Shapes]:
    """The size of the axis that is mapped over, and the shapes without it."""
    pairs = list(zip(level, arrays, strict=True))
    size = next(shape[0] for batched, (shape, _) in pairs if batched)
    return size, [(shape[1:] if batched else shape, dtype) for batched, (shape, dtype) in pairs]


def arguments(call: Call, arrays: Arrays) -> dict[str, Any]:
    """What the op's function takes, by name."""
    named = dict(zip(call.arrays, arrays, strict=True))
    for name in ("initial_state", "state"):
        if f"{name}.kv" in named:
            named[name] = LinearState(named.pop(f"{name}.kv"), named.pop(f"{name}.k_sum"))
    found = named | dict(call.options)
    parameters = [found.pop(name) for name in call.arrays if name in PARAMETERS]
    feature_map = found.get("feature_map")
    if isinstance(feature_map, features.FeatureMap):
        found["feature_map"] = (
            (lambda x: feature_map(x, *parameters))
            if feature_map.elementwise
            else features.Favor(*parameters)
        )
    return found


class _Kernels:
    """An op with kernels of its own for the forward and for the backward.

    `timed` tells which of its outputs have an axis T, `asks` names the option that asks for more
    than the first.
    """

    timed: tuple[bool, ...]
    asks: str

    def __init__(self, api: Any) -> None:
        self.api = api

    def answers(self, call: Call) -> int | None:
        """How many outputs, from the first; None for all."""
        return None if dict(call.options).get(self.asks) else 1

    def leaves(self, spec: Any, outputs: Any) -> list[jax.Array]:
        raise NotImplementedError

    def outputs(self, leaves: Arrays) -> Any:
        raise NotImplementedError

    def op(self, request: Any) -> dispatch.Op:
        """Where the caller names no backend, without those that the direct road cannot launch: a
        CUDA graph could not hold the call."""
        if request.implementation is not None:
            return self.api.OP
        names = tuple(name for name in self.api.OP.backends if name not in THROUGH_JAX_ALONE)
        return dataclasses.replace(self.api.OP, backends=names)

    def forward(self, call: Call, arrays: Arrays) -> list[jax.Array]:
        request = self.api.prepare(**arguments(call, arrays))
        spec = request.spec.for_backward() if call.training else request.spec
        outputs = dispatch.run(
            self.op(request), spec, request.inputs, request.implementation, call.training
        )
        leaves = self.leaves(spec, outputs)
        if request.T < spec.T:
            # An empty T is one row to the op.
            time = axes(spec.layout, "BTHV").index("T")
            leaves = [
                jax.lax.slice_in_dim(leaf, 0, request.T, axis=time) if timed else leaf
                for leaf, timed in zip(leaves, self.timed, strict=False)
            ]
        return leaves

    def backward(
        self,
        call: Call,
        needed: tuple[bool, ...],
        inputs: Arrays,
        outputs: Arrays,
        cotangents: Arrays,
    ) -> list[jax.Array]:
        request = self.api.prepare(**arguments(call, inputs))
        spec = request.spec
        wanted = [name for name, is_needed in zip(call.arrays, needed, strict=True) if is_needed]
        if spec.B == 0:
            found = dict(zip(call.arrays, map(jnp.zeros_like, inputs), strict=True))
            return [found[name] for name in wanted]
        if request.T < spec.T:
            time = axes(spec.layout, "BTHV").index("T")
            outputs, cotangents = (
                [
                    jnp.zeros((*leaf.shape[:time], 1, *leaf.shape[time + 1 :]), leaf.dtype)
                    if timed
                    else leaf
                    for leaf, timed in zip(leaves, self.timed, strict=False)
                ]
                for leaves in (outputs, cotangents)
            )
        gradients = dispatch.backward(
            self.op(request),
            spec,
            request.inputs,
            self.outputs(outputs),
            self.outputs(cotangents).plain(),
            request.implementation,
            tuple(dict.fromkeys(name.split(".")[0] for name in wanted)),
        )
        shapes = dict(zip(call.arrays, (array.shape for array in inputs), strict=True))
        return [_cut(_part(gradients, name), shapes[name]) for name in wanted]


def _part(gradients: dict[str, Any], name: str) -> jax.Array:
    whole, _, part = name.partition(".")
    return getattr(gradients[whole], part) if part else gradients[whole]


def _cut(gradient: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Without the row that `prepare` adds to an empty axis."""
    return gradient[tuple(map(slice, shape))] if gradient.shape != shape else gradient


class _Attention(_Kernels):
    """out, lse, and in training below float32 what rounding took from out."""

    timed = (True, True, True)
    asks = "return_lse"

    def leaves(self, spec: Any, outputs: Any) -> list[jax.Array]:
        out, lse, rest = outputs
        if not spec.keep_rest:
            return [out, lse]
        # Not every backend keeps it; to a backward, zeros are as much as nothing.
        return [out, lse, jnp.zeros(out.shape, jnp.int8) if rest is None else rest]

    def outputs(self, leaves: Arrays) -> Any:
        return AttentionOutputs(*leaves)

    def shapes(self, call: Call, inputs: dict[str, Any]) -> Shapes:
        (rows, dtype), (value, _) = inputs["q"], inputs["v"]
        out, lse = (*rows[:-1], value[-1]), rows[:-1]
        rest: Shapes = [(out, "int8")] if call.training and dtype != "float32" else []
        return [(out, dtype), (lse, "float32"), *rest]


class _LinearAttention(_Kernels):
    """out and the state's two sums."""

    timed = (True, False, False)
    asks = "return_state"

    def leaves(self, spec: Any, outputs: Any) -> list[jax.Array]:
        return jax.tree.leaves(outputs)

    def outputs(self, leaves: Arrays) -> Any:
        return LinearAttentionOutputs(leaves[0], LinearState(*leaves[1:]))

    def shapes(self, call: Call, inputs: dict[str, Any]) -> Shapes:
        (rows, dtype), (key, _), (value, _) = (inputs[name] for name in "qkv")
        options = dict(call.options)
        heads = axes(options["layout"], "BSGD").index("G")
        size = _features(options["feature_map"], key[-1], inputs)
        k_sum = (key[0], key[heads], size)
        return [
            ((*rows[:-1], value[-1]), dtype),
            ((*k_sum, value[-1]), "float32"),
            (k_sum, "float32"),
        ]


def _features(feature_map: Any, D: Any, inputs: dict[str, Any]) -> Any:
    """F: D, but for FAVOR+, which has a row of its projection for each feature."""
    is_favor = isinstance(feature_map, features.FeatureMap) and not feature_map.elementwise
    return inputs[PARAMETERS[0]][0][0] if is_favor else D


class _Plain:
    """An op of plain JAX, differentiated by JAX."""

    def answers(self, call: Call) -> int | None:
        return None

    def backward(
        self,
        call: Call,
        needed: tuple[bool, ...],
        inputs: Arrays,
        outputs: Arrays,
        cotangents: Arrays,
    ) -> list[jax.Array]:
        def of_needed(chosen: Arrays) -> list[jax.Array]:
            ahead = iter(chosen)
            every = [
                next(ahead) if is_needed else array
                for is_needed, array in zip(needed, inputs, strict=True)
            ]
            return self.forward(call, every)

        chosen = [array for is_needed, array in zip(needed, inputs, strict=True) if is_needed]
        return jax.vjp(of_needed, chosen)[1](list(cotangents))[0]

    def forward(self, call: Call, arrays: Arrays) -> list[jax.Array]:
        raise NotImplementedError


class _Step(_Plain):
    def forward(self, call: Call, arrays: Arrays) -> list[jax.Array]:
        return jax.tree.leaves(linear_attention_step(**arguments(call, arrays)))

    def shapes(self, call: Call, inputs: dict[str, Any]) -> Shapes:
        (rows, dtype), (value, _) = inputs["q"], inputs["v"]
        kv, k_sum = (inputs[f"state.{name}"][0] for name in LinearState._fields)
        return [((*rows[:-1], value[-1]), dtype), (kv, "float32"), (k_sum, "float32")]


class _Combine(_Plain):
    def forward(self, call: Call, arrays: Arrays) -> list[jax.Array]:
        return list(combine(**arguments(call, arrays)))

    def shapes(self, call: Call, inputs: dict[str, Any]) -> Shapes:
        outs, dtype = inputs["outs"]
        return [(outs[1:], dtype), (outs[1:-1], "float32")]


OPS: dict[str, Any] = {
    "attention": _Attention(attention_api),
    "linear_attention": _LinearAttention(linear_attention_api),
    "linear_attention_step": _Step(),
    "combine": _Combine(),
}
