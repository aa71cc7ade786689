"""The passes of a call, each divided among the devices of a mesh by batch and heads.

`partitioning.py` divides a function of arrays by their letters. Here are the arrays of an op's
passes: an op's `Parts` (`backend.py`) has their letters, and a device's part of a call has a spec
with its own sizes. `alone` is for a kernel that has no backward pass, as those of decoding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax import partitioning
from ato_jax.backend import Parts, Residuals


def letters(parts: Parts, spec: Any, inputs: Any) -> list[str]:
    """The letters of each array of a call."""
    return _laid_out(parts.letters_of_inputs(inputs), spec.layout)


def _laid_out(letters: Any, layout: str) -> list[str]:
    """The letters of each array in a tree, in the layout."""
    return [partitioning.laid_out(one, layout) for one in jax.tree.leaves(letters)]


def spec_of(spec: Any, cut: partitioning.Cut) -> Any:
    """The spec of a device's part of a call."""
    sizes = {letter: getattr(spec, letter) // cut.parts[letter] for letter in "BGH"}
    return dataclasses.replace(spec, **sizes)


def _part_of(parts: Parts, spec: Any, cut: partitioning.Cut, inputs: Any) -> tuple[Any, Any]:
    """The spec and the inputs of a device's part of a call."""
    own = spec_of(spec, cut)
    return own, parts.placed(inputs, cut.start("B", own.B), cut.start("H", own.H))


def forward(
    parts: Parts,
    spec: Any,
    cut: partitioning.Cut | None,
    inputs: Any,
    whole: Callable[[Any], Any],
    part: Callable[[Any, Any], Any],
) -> Any:
    """The outputs `whole(inputs)`, of which `part(spec, inputs)` are those of a device.

    What a part keeps for its own backward depends on the part's sizes, so there it is zeros, which
    `backward` does not read. `cut` is as in `partitioning.divided`.
    """
    arrays, tree = jax.tree.flatten(inputs)
    kept: list[Any] = []  # the outputs as shapes, and which of them every backward reads

    def of_all(*arrays: jax.Array) -> list[jax.Array]:
        outputs = whole(jax.tree.unflatten(tree, arrays))
        read = jax.tree.map(id, jax.tree.leaves(parts.for_any_backward(outputs)))
        kept[:] = jax.tree.structure(outputs), [
            read.index(id(leaf)) if id(leaf) in read else None
            for leaf in jax.tree.leaves(outputs)
        ], [jax.typeof(leaf) for leaf in jax.tree.leaves(outputs)]  # fmt: skip
        return jax.tree.leaves(outputs)

    def letters_of(shapes: Any) -> list[str]:
        outputs = parts.for_any_backward(jax.tree.unflatten(kept[0], shapes))
        known = _laid_out(parts.letters_of_outputs(outputs), spec.layout)
        return [
            "." * shape.ndim if index is None else known[index]
            for index, shape in zip(kept[1], shapes, strict=True)
        ]

    def of_part(cut: partitioning.Cut, *arrays: jax.Array) -> list[jax.Array]:
        here = _part_of(parts, spec, cut, jax.tree.unflatten(tree, arrays))
        found = jax.tree.leaves(parts.for_any_backward(part(*here)))
        return [
            jnp.zeros(shape.shape, shape.dtype) if index is None else found[index]
            for index, shape in zip(*kept[1:], strict=True)
        ]

    operands = arrays, letters(parts, spec, inputs)
    outputs = partitioning.divided(of_all, of_part, operands, letters_of, cut=cut)
    return jax.tree.unflatten(kept[0], outputs)


def backward(
    parts: Parts,
    spec: Any,
    cut: partitioning.Cut | None,
    given: tuple[Residuals, Any],
    whole: Callable[[Residuals, Any], Any],
    part: Callable[[Any, Residuals, Any], Any],
) -> Any:
    """The gradients `whole(residuals, cotangents)`, likewise; `given` are the two."""
    residuals, cotangents = given
    layout = spec.layout
    arrays, tree = jax.tree.flatten(given)
    of_inputs = parts.letters_of_inputs(residuals.inputs)
    read = parts.for_any_backward(residuals.outputs)
    names = _laid_out(parts.letters_of_outputs(read), layout)
    known = {id(leaf): one for leaf, one in zip(jax.tree.leaves(read), names, strict=True)}
    of_outputs = [
        known.get(id(leaf), "." * leaf.ndim) for leaf in jax.tree.leaves(residuals.outputs)
    ]
    of_cotangents = _laid_out(parts.letters_of_outputs(cotangents), layout)
    of_gradients: list[Any] = []  # their structure, and their letters

    def of_all(*arrays: jax.Array) -> list[jax.Array]:
        gradients = whole(*jax.tree.unflatten(tree, arrays))
        of_gradients[:] = jax.tree.structure(gradients), _letters_of_given(
            gradients, of_inputs, layout
        )  # fmt: skip
        return jax.tree.leaves(gradients)

    def of_part(cut: partitioning.Cut, *arrays: jax.Array) -> list[jax.Array]:
        residuals, cotangents = jax.tree.unflatten(tree, arrays)
        here, inputs = _part_of(parts, spec, cut, residuals.inputs)
        read = parts.for_any_backward(residuals.outputs)
        return jax.tree.leaves(part(here, Residuals(inputs, read), cotangents))

    operands = arrays, [*_laid_out(of_inputs, layout), *of_outputs, *of_cotangents]
    marks = [False] * (len(arrays) - len(of_cotangents)) + [True] * len(of_cotangents)
    found = partitioning.divided(of_all, of_part, operands, lambda _: of_gradients[1], marks, cut)
    return jax.tree.unflatten(of_gradients[0], found)


def alone(
    function: Callable[[partitioning.Cut | None, Any], Any],
    inputs: Any,
    letters: Any,
    letters_of_outputs: Any,
    cut: partitioning.Cut | None,
) -> Any:
    """`function(None, inputs)`, and on several devices `function(cut, inputs)` of each one's part.

    `letters` and `letters_of_outputs` are the trees of inputs and outputs with each array replaced
    by the letters of its axes. `cut` is as in `partitioning.divided`.
    """
    arrays, tree = jax.tree.flatten(inputs)
    if cut is None and not partitioning.may_divide(arrays):
        return function(None, inputs)

    def run(cut: partitioning.Cut | None, *arrays: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(function(cut, jax.tree.unflatten(tree, arrays)))

    operands = arrays, jax.tree.leaves(letters)
    results, outputs = jax.tree.flatten(letters_of_outputs)
    found = partitioning.divided(
        functools.partial(run, None), run, operands, lambda _: results, cut=cut
    )
    return jax.tree.unflatten(outputs, found)


def _letters_of_given(gradients: Any, letters: Any, layout: str) -> list[str]:
    """The letters of those inputs that have a gradient; `letters` are those of all inputs."""
    absent = lambda leaf: leaf is None  # noqa: E731
    given = jax.tree.leaves(gradients, is_leaf=absent)
    names = jax.tree.leaves(letters, is_leaf=absent)
    return [
        partitioning.laid_out(name, layout)
        for one, name in zip(given, names, strict=True)
        if one is not None
    ]
