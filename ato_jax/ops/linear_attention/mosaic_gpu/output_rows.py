"""Steps of the role VALUES of `output.py`: it rounds S for the products, sums the denominators, and
computes the factors by which rows of out are multiplied in the end."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_ROWS, Item, load
from ato_jax.ops.linear_attention.mosaic_gpu.output_storage import Part, Walk


def leave_den(walk: Walk, half: Any, item: Item, rows: Any) -> None:
    """Writes a chunk's denominators. With one head in a tile both halves have the same ones."""

    def leave() -> None:
        target = walk.left_den.at[item.batch, walk.tiling.head_of(item.head, half), rows]
        plgpu.copy_smem_to_gmem(walk.own.left_den.at[half], target)

    if walk.tiling.heads == 2:
        leave()
    else:
        pl.when(half == 0)(leave)


def store_state(walk: Walk, half: Any, state: list[Any], S: list[jax.Array]) -> None:
    """Stores S, rounded, to shared memory; in float16 divided by units of its rows."""
    if walk.s_units is not None:
        units = mosaic.units_of_rows(S)
        walk.own.s_units.at[half][...] = units
        S = [mosaic.in_units(part, units) for part in S]
    for part, total in zip(state, S, strict=True):
        part[...] = total.astype(walk.tiling.dtype)


def times(S: list[jax.Array], factor: Any) -> list[jax.Array]:
    return [part * factor for part in S]


def factor_of(
    walk: Walk,
    item: Item,
    half: Any,
    v_slot: Any,
    w: jax.Array,
    w_units: jax.Array | None,
    gates: Any,
) -> tuple[Any, Any]:
    """The factor of out's rows, [64, 64] or a number; and the denominator [64] of the keys that the
    launch sees, or None without a normaliser."""
    spec, own = walk.spec, walk.own
    den: Any = None
    lasting: Any = jnp.exp2(gates.since_middle()) if walk.gated else 1.0
    of_values = lasting if walk.v_rest is None else walk.rest_of_scale(item, half)
    factor = spec.scale * of_values
    eps: Any = spec.eps
    if walk.k_powers is not None:
        of_pairs = walk.powers_of_queries(v_slot, half) * walk.power_of_keys(item, half)
        factor, eps = factor / of_pairs, eps * of_pairs
    if spec.normalize:
        den = jnp.sum(w.astype(F32), axis=1)
        if w_units is not None:
            den = den * w_units
        own.den_known.wait(v_slot)
        for other in range(2) if walk.tiling.heads == 1 else (half,):
            den = den + load(own.den.at[v_slot, other], OF_ROWS)
        den = den * lasting
        if walk.later_den is not None:
            den = den + load(walk.tiling.rows_in(own.later_den, v_slot, half), OF_ROWS)
        if walk.part is Part.LATER:
            factor = lasting
        else:
            den = jnp.maximum(den, eps)
            factor = of_values / den
    if w_units is not None:
        factor = factor * w_units
    if walk.gated or spec.normalize or w_units is not None:
        factor = mosaic.in_columns(factor, HALF)
    return factor, den
