"""Derivatives by JAX's own tracing, for the backends that are plain JAX and for second order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

InputsT = TypeVar("InputsT")
OutputsT = TypeVar("OutputsT")


def _is_float(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def vjp(
    function: Callable[[InputsT], OutputsT], inputs: InputsT
) -> tuple[OutputsT, jax.tree_util.Partial]:
    """`function(inputs)`, and a function from the result's cotangents to the inputs'.

    The cotangent of an input that holds no floats is None. The function is a pytree of the arrays
    that it keeps, so that it can be a residual.
    """
    leaves, structure = jax.tree.flatten(inputs)
    where = tuple(index for index, leaf in enumerate(leaves) if _is_float(leaf))

    def of_floats(floats: list[jax.Array]) -> OutputsT:
        merged = list(leaves)
        for index, leaf in zip(where, floats, strict=True):
            merged[index] = leaf
        return function(jax.tree.unflatten(structure, merged))

    outputs, pull_floats = jax.vjp(of_floats, [leaves[index] for index in where])
    return outputs, jax.tree_util.Partial(functools.partial(_pull, structure, where), pull_floats)


def _pull(structure: Any, where: tuple[int, ...], pull_floats: Any, cotangents: Any) -> Any:
    result: list[Any] = [None] * structure.num_leaves
    for index, leaf in zip(where, pull_floats(cotangents)[0], strict=True):
        result[index] = leaf
    return jax.tree.unflatten(structure, result)


def gradient(
    function: Callable[[InputsT], OutputsT], inputs: InputsT, cotangents: OutputsT
) -> InputsT:
    """The cotangents of `inputs` under `function`; None for those that hold no floats."""
    found: InputsT = vjp(function, inputs)[1](cotangents)
    return found


@jax.custom_jvp
def quotient(num: jax.Array, den: jax.Array) -> jax.Array:
    """num / den. JAX's derivative divides by den^2, which overflows float32 at den = 2^64."""
    return num / den


@quotient.defjvp
def _quotient_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    num, den = primals
    d_num, d_den = tangents
    out = quotient(num, den)
    return out, (d_num - out * d_den) * quotient(jnp.ones_like(den), den)
