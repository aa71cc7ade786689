"""How a call is divided by batch and heads, as `backend.Parts` asks for it."""

from __future__ import annotations

from typing import Any

from ato_jax.backend import Parts
from ato_jax.ops.linear_attention.eight_bits import Float8Inputs
from ato_jax.ops.linear_attention.spec import STATE_LETTERS, Inputs, Outputs


def letters_of_inputs(inputs: Inputs | Float8Inputs) -> Any:
    """Returns the tree of inputs with each array replaced by the letters of its axes."""
    if isinstance(inputs, Float8Inputs):
        found = letters_of_inputs(inputs.without_scales())
        scales: dict[str, Any] = {"q_scale": "BH", "k_scale": "BG", "v_scale": "BG"}
        fields = (name for name in inputs._fields if name not in scales)
        return Float8Inputs(**{name: getattr(found, name) for name in fields}, **scales)
    decay = None if inputs.decay is None else {1: "G", 3: "BSG", 4: "BSGF"}[inputs.decay.ndim]
    rows = ("BTHD", "BSGD", "BSGV", decay)
    state = None if inputs.initial_state is None else STATE_LETTERS
    parameters = tuple("." * array.ndim for array in inputs.feature_parameters)
    others = zip(inputs[6:], ("BT", "BS", "B", "B"), strict=True)
    given = (None if array is None else letters for array, letters in others)
    return Inputs(*rows, state, parameters, *given)  # type: ignore[arg-type]


def letters_of_outputs(outputs: Outputs) -> Any:
    """The letters of the outputs that callers and any backend's backward read."""
    return Outputs("BTHV", STATE_LETTERS)  # type: ignore[arg-type]


class _LinearAttentionParts(Parts[Inputs, Outputs]):
    letters_of_inputs = staticmethod(letters_of_inputs)
    letters_of_outputs = staticmethod(letters_of_outputs)


PARTS = _LinearAttentionParts()
