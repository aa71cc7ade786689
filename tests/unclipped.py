"""Stores by Mosaic GPU that would run over the end of an axis.

The copy engine cuts off what a copy has beyond an array, axis by axis, where it is given a tensor
map. Mosaic GPU gives it none where what is stored lies in one stretch of the array and is not
swizzled (`cp.async.bulk`): then all bytes are written, and those beyond an axis are the next head's
or the next row's. Pallas's interpreter cuts off every copy. So this looks at the shapes while a
kernel is traced, and what it refuses would go wrong on a card alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def checked(copy: Callable[..., Any]) -> Callable[..., Any]:
    """`plgpu.copy_smem_to_gmem`, which raises where it would run over."""

    def checked_copy(source: Any, target: Any, **options: Any) -> Any:
        if not is_swizzled(source) and (found := overrun(target)):
            raise ValueError(found)
        return copy(source, target, **options)

    return checked_copy


def is_swizzled(ref: Any) -> bool:
    transforms = getattr(ref, "transforms", ())
    return any("swizzle" in type(one).__name__.lower() for one in transforms)


def overrun(target: Any) -> str | None:
    """Which axis a store that needs no tensor map may run over, by the shape of its array."""
    indexers = [one for one in getattr(target, "transforms", ()) if hasattr(one, "indices")]
    if not indexers:
        return None
    shape = tuple(indexers[0].shape)
    sizes, axes, over = list(shape), list(range(len(shape))), None
    for indexer in indexers:
        left = []
        for axis, index in zip(axes, indexer.indices, strict=True):
            if not hasattr(index, "stride"):  # a number
                sizes[axis] = 1
                continue
            extent, sizes[axis] = sizes[axis], index.size
            if not _stays_inside(index, extent):
                over = f"{index.size} of {extent} elements of axis {axis} of {shape}"
            left.append(axis)
        axes = left
    if over is None or not _in_one_stretch(shape, sizes):
        return None
    return f"a store without a tensor map may run over the end: {over}"


def _stays_inside(index: Any, extent: int) -> bool:
    """A slice that begins at a traced number is taken for one of an axis's blocks."""
    if isinstance(index.start, int):
        return index.start + index.size <= extent
    return bool(index.size <= extent and extent % index.size == 0)


def _in_one_stretch(shape: tuple[int, ...], sizes: list[int]) -> bool:
    """As Mosaic GPU decides it."""
    wanted = 1
    for axis in reversed(range(len(shape))):
        if sizes[axis] != 1 and math.prod(shape[axis + 1 :]) != wanted:
            return False
        wanted *= sizes[axis]
    return True
