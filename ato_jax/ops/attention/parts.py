"""How a call is divided by batch and heads, as `backend.Parts` asks for it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ato_jax.backend import Parts
from ato_jax.ops.attention.eight_bits import Float8Inputs
from ato_jax.ops.attention.spec import Inputs, Outputs


def letters_of_inputs(inputs: Inputs | Float8Inputs) -> Any:
    """Returns the tree of inputs with each array replaced by the letters of its axes."""
    if isinstance(inputs, Float8Inputs):
        return Float8Inputs(letters_of_inputs(inputs.arrays), "BH", "BG", "BG")  # type: ignore[arg-type]

    def of_pairs(array: Any) -> str:
        return "".join(
            "." if size == 1 else letter
            for letter, size in zip("BHTS", array.shape, strict=True)
        )

    every = ("BTHD", "BSGD", "BSGV", of_pairs, of_pairs, "H", "BT", "BS", "B", "B", "B", ".")
    given: Any = (
        None if array is None else letters(array) if callable(letters) else letters
        for array, letters in zip(inputs, every, strict=True)
    )
    return Inputs(*given)


def letters_of_outputs(outputs: Outputs) -> Any:
    """The letters of the outputs that callers and any backend's backward read."""
    return Outputs("BTHV", "BTH", None if outputs.rest is None else "BTHV")  # type: ignore[arg-type]


def for_any_backward(outputs: Outputs) -> Outputs:
    """The outputs without the products that `triton.wide` keeps for its own backward."""
    own = outputs.rest is not None and outputs.rest.dtype != jnp.int8
    return outputs._replace(rest=None) if own else outputs


def placed(inputs: Any, b: jax.Array, h: jax.Array) -> Any:
    """The inputs of a part of a call that begins at batch entry b and head h.

    Dropout hashes the positions in the whole call.
    """
    if isinstance(inputs, Float8Inputs):
        return inputs._replace(arrays=placed(inputs.arrays, b, h))
    if inputs.dropout_seed is None:
        return inputs
    start = jnp.stack([b, h, jnp.zeros_like(b), jnp.zeros_like(b)]).astype(jnp.uint32)
    words, given = inputs.dropout_seed[:2], inputs.dropout_seed[2:]
    start = start + given if given.size else start
    return inputs._replace(dropout_seed=jnp.concatenate([words, start]))


class _AttentionParts(Parts[Inputs, Outputs]):
    letters_of_inputs = staticmethod(letters_of_inputs)
    letters_of_outputs = staticmethod(letters_of_outputs)
    for_any_backward = staticmethod(for_any_backward)
    placed = staticmethod(placed)


PARTS = _AttentionParts()
