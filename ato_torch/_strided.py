"""Tensor maps for parameters that are not contiguous, in place of those that a program has.

    executable, read = restrided(executable, {parameter: Array(sizes, strides), ...})

XLA compiles a program for contiguous parameters. A kernel that reads a parameter through tensor
maps alone has no address of it: it gives the copy engine coordinates, and the tensor map turns them
into addresses. So the kernel reads an array with other strides if its tensor maps have them. Each
axis of a map is a part of one axis of the array, with sizes and strides in bytes:

    array [B, T, H, 128]        row = 128 H
    map   [B, H, T / 8, 8, 128] strides [T row, 128, 8 row, row, 1]

Here 128 columns of 8 bits fill 128 bytes. The axes T / 8 and 8 lie in T, and their strides become 8
and 1 times the new stride of T. Adjacent axes of the array are merged if one stride describes both.
An axis of a map that spans axes which cannot be merged has no single stride: Mosaic GPU folds batch
and head into such an axis where a map would have more than 5 axes, and its kernel computes
batch * T * H + head.

A parameter must stay contiguous if a step reads it by its address, as XLA's own kernels and copies
do, or if a map cannot have its strides.

This module imports neither PyTorch nor JAX, and needs no GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from ato_torch._mosaic import TensorMap
from ato_torch._steps import Executable, Launch, Step
from ato_torch._tensor_maps import width_of

# What CUDA asks of the strides of a tensor map, in bytes.
STRIDE_MULTIPLE, STRIDE_LIMIT = 16, 1 << 40


class Array(NamedTuple):
    """The sizes and strides of an array's axes in bytes: the last axis is the bytes of a row."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class _Axis(NamedTuple):
    """One or more axes of an array, evenly spaced: elements, and bytes from one to the next.

    `dense` are the bytes in the contiguous array, `stride` those in the array itself.
    """

    size: int
    dense: int
    stride: int


def restrided(
    executable: Executable, arrays: Mapping[int, Array]
) -> tuple[Executable, frozenset[int]]:
    """The executable with tensor maps for arrays that are not contiguous, by parameter.

    Returns:
      The executable and the parameters that it reads with the strides of their arrays. All other
      parameters have to be contiguous.
    """
    found: dict[tuple[int, int], TensorMap | None] = {}
    parameters: dict[tuple[int, int], int] = {}
    for n, step in enumerate(executable.steps):
        for m, each in enumerate(step.arguments):
            parameter = executable.allocations[each.allocation].parameter
            if parameter is None or parameter not in arrays:
                continue
            what = None if each.offset else _map_of(step, m)
            parameters[n, m] = parameter
            found[n, m] = None if what is None else _with_strides(what, arrays[parameter])
    refused = {parameters[place] for place, what in found.items() if what is None}
    maps = {
        place: what
        for place, what in found.items()
        if what is not None and parameters[place] not in refused
    }
    steps = tuple(
        _with_maps(step, {m: what for (number, m), what in maps.items() if number == n})
        for n, step in enumerate(executable.steps)
    )
    changed = dataclasses.replace(executable, steps=steps)
    return changed, frozenset(arrays.keys() - refused)


def _map_of(step: Step, argument: int) -> TensorMap | None:
    """The tensor map that is an argument of a step; None for an address."""
    if not isinstance(step, Launch) or step.parameters is None:
        return None
    return step.parameters.places[argument].map


def _with_maps(step: Step, maps: Mapping[int, TensorMap]) -> Step:
    """The step with other tensor maps in some of its arguments."""
    if not maps:
        return step
    assert isinstance(step, Launch) and step.parameters is not None
    places = tuple(
        place._replace(map=maps.get(n, place.map)) for n, place in enumerate(step.parameters.places)
    )
    return dataclasses.replace(
        step, parameters=dataclasses.replace(step.parameters, places=places)
    )


def _with_strides(what: TensorMap, array: Array) -> TensorMap | None:
    """The tensor map of a contiguous array for one with other strides; None if it has none."""
    axes, width = _evenly_spaced(array), width_of(what)
    # How far the map reaches along each of the axes, in elements of the axis.
    reach, strides = [0] * len(axes), []
    for size, stride in zip(what.sizes, (width, *what.strides), strict=True):
        if size > 1:
            n = _axis_of(axes, stride)
            if n is None:
                return None
            steps = stride // axes[n].dense
            reach[n] += (size - 1) * steps
            stride = steps * axes[n].stride
        strides.append(stride)
    reach[-1] += width - 1
    if any(last >= axis.size for last, axis in zip(reach, axes, strict=True)):
        return None
    first, *rest = strides
    if first != width or axes[-1].stride != 1:
        return None
    if not all(0 < stride < STRIDE_LIMIT and stride % STRIDE_MULTIPLE == 0 for stride in rest):
        return None
    return what._replace(strides=tuple(rest))


def _evenly_spaced(array: Array) -> list[_Axis]:
    """The array's axes, the last one last, with those joined that are evenly spaced as one."""
    found: list[_Axis] = []  # the last one first
    dense = 1
    for size, stride in reversed(list(zip(array.sizes, array.strides, strict=True))):
        if size > 1 or not found:
            if found and stride == found[-1].size * found[-1].stride:
                found[-1] = found[-1]._replace(size=found[-1].size * size)
            else:
                found.append(_Axis(size, dense, stride))
        dense *= size
    return found[::-1]


def _axis_of(axes: list[_Axis], stride: int) -> int | None:
    """The axis in which a step of so many bytes of the contiguous array stays."""
    for n, axis in enumerate(axes):
        if axis.dense <= stride < axis.dense * axis.size:
            return None if stride % axis.dense else n
    return None
