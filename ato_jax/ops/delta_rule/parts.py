"""How a call is divided by batch and heads: the axes of its arrays, and what a part reads.

`partitioning.py` says what the letters mean. They stand as with layout "bthd", and a "." is an axis
that is never cut.
"""

from __future__ import annotations

from typing import Any

import jax

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


def for_any_backward(outputs: Any) -> Outputs:
    """The outputs without what only the same backend's own backward reads."""
    found: Outputs = outputs.plain()
    return found


def placed(inputs: Inputs, b: jax.Array, h: jax.Array) -> Inputs:
    """The inputs of a part of a call that begins at batch entry b and head h."""
    return inputs
