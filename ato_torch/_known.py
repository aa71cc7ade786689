"""Calls like one that was checked before: launched with no check of their tensors.

`_checked_calls.py` tells them by the shapes, strides and dtypes of q, k and v, and by the options.
With a gradient recorded, the backward pass is launched in the same way, once for each set of needed
gradients and strides of the cotangent that it has met.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch

from ato_torch import _bridge, _copies, _direct, _modes, _profiling, _programs
from ato_torch._ops import QKV, Gradient, Tensors, is_batch, one_by_one, placed

# How many backward passes a known call keeps, by strides of cotangents and by needed gradients.
MOST_BACKWARDS = 16


def ready(
    program: _programs.Program, tensors: Tensors, differentiates: bool, exchanged: bool
) -> Callable[[Tensors], Tensors] | Literal[False] | None:
    """A function that does what `run_plainly` does, for q, k and v of these shapes and strides, and
    for the scales behind them of a call on float8 tensors.

    It skips all checks of its tensors. If `exchanged`, q, k and v and the outputs have their second
    and third axis exchanged while their memory is unchanged. False where there is no direct launch,
    and None where a later call may find another answer.
    """
    function = program.forward if differentiates else program.answer
    outputs = program.timed if differentiates else program.timed[: program.answers]
    which = (exchanged,) * QKV + (False,) * (len(tensors) - QKV)
    found = _direct.ready(function, tensors, which, outputs)
    if not found:
        return found
    plan, copied = found
    # The backward pass would keep copies that are larger than the originals.
    if differentiates and any(
        is_copied and _copies.repeats(tensor)
        for tensor, is_copied in zip(tensors, copied, strict=True)
    ):
        return False
    call: Callable[[Tensors], Tensors] = plan
    if differentiates:
        known = Known(program, plan, exchanged)
        apply = super(torch.autograd.Function, _KnownCall).apply

        def recorded(tensors: Tensors) -> Tensors:
            return apply(known, *tensors)

        call = recorded
    return _copies.with_copies(call, tensors, copied, which)


class Known:
    """A program with a gradient, and its plans for tensors of known shapes and strides."""

    def __init__(self, program: _programs.Program, plan: _direct.Plan, exchanged: bool) -> None:
        self.program, self.plan, self.exchanged = program, plan, exchanged
        self.answers = program.answers
        # Calls of the backward pass by the gradients needed and the strides of the cotangent, each
        # with the strides of all its tensors.
        self.backwards: dict[Any, tuple[Callable[[Tensors], Tensors] | Literal[False], Any]] = {}

    def backward(self, needed: tuple[bool, ...], tensors: list[torch.Tensor]) -> Any:
        """The needed gradients, from q, k, v, the outputs and the cotangent of the first output.

        None where there is no plan for their strides.
        """
        strides = [tensor.stride() for tensor in tensors]
        key = needed, strides[-1]
        try:
            call, known = self.backwards[key]
        except KeyError:
            found, known = self._backward(needed, tensors), strides
            if found is None:
                return None
            if len(self.backwards) >= MOST_BACKWARDS:
                self.backwards.clear()
            call = found
            self.backwards[key] = call, known
        if not call or strides != known:
            return None
        if _profiling.is_on():
            return _profiling.named(self.program, functools.partial(call, tensors), backward=True)
        return call(tensors)

    def _backward(
        self, needed: tuple[bool, ...], tensors: Tensors
    ) -> Callable[[Tensors], Tensors] | Literal[False] | None:
        outputs = len(tensors) - len(needed) - 1
        given = (True,) + (False,) * (outputs - 1)
        function = self.program.backward(needed, given)
        exchanged, gradients = self.exchanged_ones(needed, given)
        found = _direct.ready(function, tensors, exchanged, gradients)
        if not found:
            return found
        plan, copied = found
        return _copies.with_copies(plan, tensors, copied, exchanged)

    def exchanged_ones(
        self, needed: tuple[bool, ...], given: tuple[bool, ...]
    ) -> tuple[list[bool], list[bool]]:
        """Which tensors of the backward pass, and which gradients, have their axes exchanged."""
        timed = self.program.timed[: len(given)]
        of_given = [each for each, is_given in zip(timed, given, strict=True) if is_given]
        tensors = [*(True for _ in needed), *timed, *of_given]
        return [self.exchanged and each for each in tensors], [self.exchanged] * sum(needed)


class _KnownCall(torch.autograd.Function):
    """(a known program, q, k, v) -> the outputs asked for, where `runs_plainly`."""

    @staticmethod
    def forward(ctx: Any, known: Known, *tensors: torch.Tensor) -> Any:
        outputs = known.plan(tensors)
        ctx.known = known
        ctx.set_materialize_grads(False)
        # Saved by PyTorch, so that it refuses a backward after one of them was written to.
        ctx.save_for_backward(*tensors, *outputs)
        return tuple(outputs[: known.answers])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        known, needed = ctx.known, ctx.needs_input_grad[1:]
        tensors = list(ctx.saved_tensors)
        chosen = [cotangent for cotangent in cotangents if cotangent is not None]
        _modes.refuse_forward_mode(chosen)
        if any(map(is_batch, chosen)):
            return one_by_one(_KnownCall.backward, ctx, cotangents)
        alone = cotangents[0] is not None and len(chosen) == 1
        plainly = not torch.is_grad_enabled() and _modes.runs_plainly([*tensors, *chosen])
        if alone and plainly:
            gradients = known.backward(needed, [*tensors, *chosen])
            if gradients is not None:
                return None, *placed(needed, gradients)
        outputs = len(tensors) - len(needed)
        given = tuple(n < len(cotangents) and cotangents[n] is not None for n in range(outputs))
        exchanged, of_gradients = known.exchanged_ones(needed, given)
        tensors = _bridge.exchanged([*tensors, *chosen], exchanged)
        if plainly:
            backward = known.program.backward(needed, given)
            gradients = _profiling.execute(known.program, backward, tensors, backward=True)
        else:
            gradients = Gradient.apply(known.program, needed, given, *tensors)
        return None, *placed(needed, _bridge.exchanged(gradients, of_gradients))
