"""Calls as jitted functions of flat lists of arrays.

    forward:   arrays -> the op's outputs
    backward:  arrays, outputs, cotangents -> gradients

A `Program` is a `Call` on one device, for arrays of the same shapes and dtypes each time. It has
one `Function` for the forward pass, one for its first outputs alone, and one for each set of
gradients that is asked for. `ato_jax.programs` limits how many programs are kept.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax import device, programs
from ato_torch import _compiling
from ato_torch._adapters import OPS
from ato_torch._calls import Arrays, Call, Shapes, parse


class Function:
    """A function of arrays, jitted.

    `plans`, `strided`, `refused` and `short_of_memory` belong to `_direct`, which changes them
    while it holds `planning`.
    """

    def __init__(self, traced: Callable[..., list[jax.Array]], place: jax.Device) -> None:
        self.traced = traced
        self.jitted = _compiling.jit(traced, place)
        self.plans: dict[Any, Any] = {}
        # Plans for tensors that are not contiguous, by shapes, dtypes and strides.
        self.strided: dict[Any, Any] = {}
        # Patterns without such a plan: the number of calls that found no memory for the trial, and
        # 0 for a pattern that is always copied.
        self.refused: dict[Any, int] = {}
        # The number of calls that asked for a plan and found no memory, by shapes and dtypes.
        self.short_of_memory: dict[Any, int] = {}
        self.planning = threading.Lock()


class Program(programs.Program):
    """A call on one device, for arrays of the same shapes and dtypes each time.

    JAX keeps a compiled program for as long as its function exists. So that it can be dropped,
    other shapes are another `Program`.
    """

    def __init__(self, call: Call, place: jax.Device) -> None:
        super().__init__(device.describe(place).platform)
        self.call = call
        self.place = place
        self._reads_float8: bool | None = None
        self.forward = self._function(functools.partial(forward, call))
        self.answer = self._function(functools.partial(answer, call))
        self._backwards: dict[Any, Function] = {}

    def backward(self, needed: tuple[bool, ...], given: tuple[bool, ...]) -> Function:
        """The function (arrays, outputs, the given cotangents) -> the needed gradients."""
        try:
            return self._backwards[needed, given]
        except KeyError:
            function = self._function(functools.partial(backward, self.call, needed, given))
            return self._backwards.setdefault((needed, given), function)

    def reads_float8(self, shapes: Shapes) -> bool:
        """Whether kernels read the 8 bits of the call, whose arrays have these shapes."""
        if self._reads_float8 is None:
            self._reads_float8 = reads_float8(self.call, self.place, shapes)
        return self._reads_float8

    @property
    def timed(self) -> tuple[bool, ...]:
        """Which outputs have an axis T, for an op with kernels of its own."""
        return OPS[self.call.op].timed

    @property
    def answers(self) -> int | None:
        """How many outputs the caller asked for, from the first; None for all."""
        return OPS[self.call.op].answers(self.call)

    @functools.cached_property
    def text(self) -> str:
        return self.call.text

    def batched(self, level: tuple[bool, ...], facts: Any) -> Program:
        """The program of this call under one more vmap."""
        return of_call(self.call.inside(level), self.place, facts)

    def batched_backward(self, level: tuple[bool, ...], facts: Any) -> Program:
        """The program of this call with its backward pass under one more vmap."""
        return of_call(self.call.inside_backward(level), self.place, facts)

    def is_pinned(self) -> bool:
        plans = [plan for function in self._functions for plan in list(function.plans.values())]
        return any(plan.is_captured for plan in plans)

    @property
    def _functions(self) -> list[Function]:
        return [self.forward, self.answer, *list(self._backwards.values())]

    def _function(self, function: Callable[..., Any]) -> Function:
        # Without `self`: a reference cycle would keep memory until Python's collector runs.
        place, interpreting = self.place, self.call.interpreting

        def traced(*arrays: jax.Array) -> list[jax.Array]:
            # The op chooses kernels by the device, which tracers do not have.
            with jax.default_device(place), device.interpret(interpreting):
                return function(arrays)

        return Function(traced, place)


kept = programs.Programs()
# The programs in `kept` by the texts of their calls.
_texts: dict[Any, Program] = {}


def of_call(call: Call, place: jax.Device, facts: Any) -> Program:
    """The program of a call; `facts` are the shapes and dtypes of its arrays."""
    # 1 == True, yet they are different options.
    kinds = tuple([type(value) for _, value in call.options])
    return kept.find((call, kinds, place, facts), functools.partial(Program, call, place))


def of_text(text: str, place: jax.Device, facts: Any) -> Program:
    """The program of the call with this text; `facts` as in `of_call`."""
    key = (text, place, facts)
    program = _texts.get(key)
    if program is None:
        program = of_call(parse(text), place, facts)
        kept.also_known(program, _texts, key, program)
    program.used = True
    return program


def reads_float8(call: Call, place: jax.Device, shapes: Shapes) -> bool:
    """Whether kernels read the 8 bits of a call on `place` whose arrays have these shapes."""
    found = []

    def ask(*arrays: jax.Array) -> None:
        found.append(OPS[call.op].reads_float8(call, arrays))

    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    # As in `Program._function`: nothing is compiled, and the answer is that of the trace.
    with jax.default_device(place), device.interpret(call.interpreting):
        jax.eval_shape(ask, *structs)
    return found[0]


def forward(call: Call, arrays: Arrays) -> list[jax.Array]:
    """The op's outputs."""
    def function(*arrays: jax.Array) -> list[jax.Array]:
        return OPS[call.op].forward(call, arrays)

    for level in call.batched:
        function = jax.vmap(function, in_axes=_in_axes(level))
    return function(*arrays)


def answer(call: Call, arrays: Arrays) -> list[jax.Array]:
    """Only the outputs that the caller asked for: no backward pass will read the others."""
    return forward(call, arrays)[: OPS[call.op].answers(call)]


def backward(
    call: Call, needed: tuple[bool, ...], given: tuple[bool, ...], arrays: Arrays
) -> list[jax.Array]:
    """The needed gradients; `arrays` are the inputs, the outputs and the given cotangents."""

    def function(*arrays: jax.Array) -> list[jax.Array]:
        inputs, rest = arrays[: len(needed)], arrays[len(needed) :]
        outputs, cotangents = rest[: len(given)], iter(rest[len(given) :])
        every = [
            next(cotangents) if is_given else None for is_given in given
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
    """The function with gradients summed for arrays that all members of the batch share."""
    batched = [is_batched for is_batched, wanted in zip(level, needed, strict=True) if wanted]

    def summed(*arrays: jax.Array) -> list[jax.Array]:
        return [
            gradient if is_batched else gradient.astype(jnp.float32).sum(0).astype(gradient.dtype)
            for is_batched, gradient in zip(batched, function(*arrays), strict=True)
        ]

    return summed


def output_shapes(call: Call, inputs: Shapes) -> Shapes:
    """Shape and dtype of every output. Sizes may be PyTorch's symbols."""
    if call.batched:
        *inner, level = call.batched
        size, bare = unbatched(level, inputs)
        found = output_shapes(call._replace(batched=tuple(inner)), bare)
        return [((size, *shape), dtype) for shape, dtype in found]
    return OPS[call.op].shapes(call, dict(zip(call.arrays, inputs, strict=True)))


def gradient_shapes(call: Call, arrays: Shapes) -> Shapes:
    """The shape of the gradient of each array of the backward pass."""
    if not call.batched_backward:
        return arrays
    *inner, level = call.batched_backward
    size, bare = unbatched(level, arrays)
    found = gradient_shapes(call._replace(batched_backward=tuple(inner)), bare)
    return [((size, *shape), dtype) for shape, dtype in found]


def unbatched(level: tuple[bool, ...], arrays: Shapes) -> tuple[Any, Shapes]:
    """The size of the axis that is mapped over, and the shapes without it."""
    pairs = list(zip(level, arrays, strict=True))
    size = next(shape[0] for batched, (shape, _) in pairs if batched)
    return size, [(shape[1:] if batched else shape, dtype) for batched, (shape, dtype) in pairs]
