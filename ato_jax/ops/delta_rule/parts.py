"""How a call is divided by batch and heads, as `backend.Parts` asks for it."""

from __future__ import annotations

from typing import Any

from ato_jax.backend import Parts
from ato_jax.ops.delta_rule.spec import Inputs, Outputs


def letters_of_inputs(inputs: Inputs) -> Any:
    """Returns the tree of inputs with each array replaced by the letters of its axes."""
    decay = "BTH" if inputs.decay is None or inputs.decay.ndim == 3 else "BTHD"
    every = ("BTGD", "BTGD", "BTHV", "BTH", decay, "BHDV", "BT", "B")
    given = zip(inputs, every, strict=True)
    return Inputs(*(None if array is None else letters for array, letters in given))  # type: ignore[arg-type]


def letters_of_outputs(outputs: Outputs) -> Any:
    """The letters of the outputs that callers and any backend's backward read."""
    return Outputs("BTHV", "BHDV")  # type: ignore[arg-type]


class _DeltaRuleParts(Parts[Inputs, Outputs]):
    letters_of_inputs = staticmethod(letters_of_inputs)
    letters_of_outputs = staticmethod(letters_of_outputs)


PARTS = _DeltaRuleParts()
