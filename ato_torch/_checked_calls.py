"""Calls that were checked before, so that a call like one of them skips the checks.

A call of query, key and value alone, or of float8 ones with their scales, is described by its
options and by the shape, dtype, device and strides of these tensors. The first such call is checked
and stores its program here; later ones go to the program at once. The checks take longer than a
launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from ato_jax import device
from ato_torch import _known, _modes, _ops, _profiling, _programs
from ato_torch._calls import KEPT, SCALES

# Types of options that are known by their value.
PLAIN = (bool, int, float, str, type(None))

Finish = Callable[[bool, Sequence[torch.Tensor]], Any]


class CheckedCall:
    """The program of a call of query, key and value alone, or of float8 ones with their scales, and
    how to read its outputs.

    It depends only on `key`, which `checked_call` makes of a call.
    """

    def __init__(self, key: tuple[Any, ...], differentiates: bool) -> None:
        self.key, self.differentiates = key, differentiates
        self.program: _programs.Program | None = None  # None until `fill` is called
        # Whether the program takes q, k and v with their second and third axis exchanged.
        self.exchanged = False
        # (whether they are exchanged, outputs) -> what the public function returns
        self.finish: Finish
        # The direct launch: None if it is not known yet, False if there is none.
        self.ready: Callable[[_ops.Tensors], _ops.Tensors] | Literal[False] | None = None

    def fill(
        self,
        op: str,
        tensors: tuple[torch.Tensor, ...],
        options: dict[str, Any],
        exchanged: bool,
        finish: Finish,
    ) -> None:
        """Stores the program of the call that was checked."""
        self.exchanged, self.finish = exchanged, finish
        names = ("q", "k", "v", *SCALES)[: len(tensors)]
        self.program = _ops.program_of(op, names, tensors, self.differentiates, options)
        if len(checked) >= KEPT:
            checked.clear()
        _programs.kept.also_known(self.program, checked, self.key, self)

    def __call__(self, tensors: _ops.Tensors) -> Any:
        program = self.program
        assert program is not None
        program.used = True
        if self.ready:
            if _profiling.is_on():
                named = functools.partial(self.ready, tensors)
                return self.finish(False, _profiling.named(program, named))
            return self.finish(False, self.ready(tensors))
        if self.ready is None:
            self.ready = _known.ready(program, tensors, self.differentiates, self.exchanged)
        if self.exchanged:
            turned = [tensor.transpose(1, 2) for tensor in tensors[: _ops.QKV]]
            tensors = [*turned, *tensors[_ops.QKV :]]
        outputs = _ops.run_plainly(program, tensors, self.differentiates)
        return self.finish(self.exchanged, outputs)


# The calls that have a program, by their keys.
checked: dict[Any, CheckedCall] = {}


def checked_call(
    op: str, tensors: tuple[torch.Tensor, ...], options: tuple[Any, ...]
) -> CheckedCall | None:
    """The checked call that is like this one; a new one, without a program, for the first.

    `tensors` are as autocast leaves them, so that their dtypes are those of the program. None where
    calls have to be checked each time: under transforms and compilers, for tensors that are not
    dense, for options that are not plain values.
    """
    if not _modes.runs_plainly(tensors):
        return None
    if _modes.is_forward_mode():
        return None
    query, key, value, *scales = tensors
    differentiates = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    # 1 == True == 1.0, yet they are different options, also inside a window.
    kinds = tuple(map(type, options))
    if tuple in kinds:
        kinds += tuple(type(part) for each in options if type(each) is tuple for part in each)
    try:
        facts = (
            *(op, options, kinds, differentiates, device.interpreting()),
            *(query.shape, query.dtype, query.device, query.layout, query.stride()),
            *(key.shape, key.dtype, key.device, key.layout, key.stride()),
            *(value.shape, value.dtype, value.device, value.layout, value.stride()),
            # Their shapes and dtypes follow from those above, as `_float8` has checked.
            *[scale.stride() for scale in scales],
        )
        found = checked.get(facts)
    except (RuntimeError, TypeError):  # a tensor without strides, an option without a hash
        return None
    if found is not None:
        return found
    is_dense = query.layout is key.layout is value.layout is torch.strided
    if is_dense and all(type(option) in PLAIN or _is_window(option) for option in options):
        return CheckedCall(facts, differentiates)
    return None


def _is_window(option: Any) -> bool:
    return type(option) is tuple and all(type(part) in (int, type(None)) for part in option)
