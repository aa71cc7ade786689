"""Units of float16 in `key_gradient.py`: of R and u, of products with R, and of the pairs a and b.

A matrix that is rounded is divided by its unit, or each row by one, and products are multiplied by
it (`ato_jax/mosaic/scales.py`). The roles STATE, DV and DK call these functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, OF_ROWS, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.key_gradient_storage import Walk


class Before(NamedTuple):
    """The factors by which R and u of one head, as they are in registers, have to be multiplied."""

    to_start: Any  # what the middle of the chunk behind keeps of a state at its start
    units: Any = None  # in float16 those of R and u, of the last queries that were added


def in_units_of(units: list[tuple[Any, Any]], sums: Any, before: list[Before]) -> Any:
    """R and u in the units of these queries, and their units."""
    found, own = [], []
    for (total, parts), (of_q, of_e), of_head in zip(sums, units, before, strict=True):
        r, u = of_head.units
        found.append(([x * (r / of_q) for x in total], parts * (u / of_q / of_e)))
        own.append(of_head._replace(units=(of_q, of_q * of_e)))
    return found, own


def rows_of_parts(rows: Any, total: list[jax.Array]) -> list[Any]:
    """The units in shared memory of the rows of each part of R."""
    height = total[0].shape[0]
    return [rows.at[pl.ds(number * height, height)] for number in range(len(total))]


def out_of_rows_units(walk: Walk, sums: Any) -> Any:
    """R as it was loaded, times the units of its rows: R in float32."""
    found = []
    for (total, of_u), rows in zip(sums, walk.tiling.by_heads(walk.own.r_rows), strict=True):
        parts = zip(total, rows_of_parts(rows, total), strict=True)
        scaled = [x * mosaic.in_columns(load(own, OF_ROWS), x.shape[1]) for x, own in parts]
        found.append((scaled, of_u))
    return found


def as_stored(walk: Walk, sums: Any, before: list[Before]) -> Any:
    """R in one unit for all of its elements, which `r_rows` has then, and u."""
    of_heads = walk.tiling.by_heads(walk.own.r_rows)
    for (total, _), rows in zip(sums, of_heads, strict=True):
        for x, own in zip(total, rows_of_parts(rows, total), strict=True):
            own[...] = mosaic.units_of_rows([x])
    plgpu.commit_smem()
    pairs = zip(sums, of_heads, strict=True)
    largest = [mosaic.unit_of(rows, total[0].shape[0]) for (total, _), rows in pairs]
    plgpu.commit_smem()  # this read finishes before the next store to the same place
    stored = []
    for rows, unit, (total, parts), of_head in zip(of_heads, largest, sums, before, strict=True):
        r, u = of_head.units
        for own in rows_of_parts(rows, total):
            own[...] = unit * r
        stored.append(([mosaic.in_units(x, unit) for x in total], parts * u))
    return stored


def of_state(walk: Walk, products: list[Any], first_head: int = 0) -> list[jax.Array]:
    """The products with R in float16, times R's unit, for each head from one on."""
    columns = walk.spec.F  # as many as V
    found = multiply(*((mosaic.zeros(C, columns), [one]) for one in products))
    of_heads = walk.tiling.by_heads(walk.own.r_rows)[first_head:]
    return [x * rows[0] for x, rows in zip(found, of_heads, strict=False)]


def add_in_units(
    walk: Walk,
    units: list[tuple[Any, Any]],
    sums: Iterable[jax.Array],
    pairs: list[jax.Array],
    others: list[Any],
    parts: int = 1,
) -> list[jax.Array]:
    """sums + unit * pairs @ others for each head, in float16, with pairs rounded in units of their
    rows, in one or two `parts`."""
    starts, factors, products = [], [], []
    for (unit, _), x, own, other in zip(units, sums, pairs, others, strict=True):
        rows = mosaic.units_of_rows([own])
        scaled = lax.optimization_barrier(mosaic.in_units(own, rows))
        rounded = parts_of(scaled, walk.dtype)[:parts]
        starts.append(mosaic.in_units(x * (1 / unit), rows))
        factors.append(rows * unit)
        products.append([(part, other) for part in rounded])
    found = multiply(*zip(starts, products, strict=True))
    return [x * mosaic.in_columns(own, x.shape[1]) for x, own in zip(found, factors, strict=True)]


def add_parts(
    walk: Walk, x: jax.Array, pairs: list[Any], rows: jax.Array | None, unit: Any, other: Any
) -> jax.Array:
    """x + pairs @ other, where `pairs` are parts in shared memory; in float16 in units of their
    rows, and `other` in a unit of its own."""
    if rows is None:
        (found,) = multiply((x, [(part, other) for part in pairs]))
        return found
    x = mosaic.in_units(x * (1 / unit), rows)
    (found,) = multiply((x, [(part, other) for part in pairs]))
    return found * mosaic.in_columns(rows * unit, x.shape[1])


def parts_of(b: jax.Array, dtype: Any = BF16) -> list[jax.Array]:
    """x rounded, and what rounding left off."""
    rounded = mosaic.rounded(b, dtype)
    return [rounded, mosaic.rounded(b - rounded.astype(F32), dtype)]
