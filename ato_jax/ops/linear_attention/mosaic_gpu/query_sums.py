"""The sums over the queries of each piece, R [B, H, P, V, F] and u [B, H, P, F] in float32.

    R = sum_i g_i phi'_i^T [V, F],  u = -sum_i e_i phi'_i [F],  phi'_i = phi(q_i) inverse_i

`causal.py` and `channel_backward.py` launch it between `query_gradient.py`, which writes inverse
and e, and `key_gradient.py`, or between the kernels of the same names for a decay per channel. The
kernel itself is `sums.piece_sums`. u is computed in eight columns, since a product has at least so
many: four multiply e rounded, four what rounding left off.

With a decay R and u are scaled to the start of the piece: inverse_i is multiplied by the decay
between the start of the piece and row i.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.sums import piece_sums
from ato_jax.ops.linear_attention.mosaic_gpu.sums_storage import Arrays, Terms
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def spread(e: jax.Array, minus_e_ref: Any, count: Any = None) -> None:
    """Stores -e [C] in the rows of minus_e [8, C]: rounded in four, and what rounding left off in
    four. Numbers behind the first `count` become 0, unless that is None."""
    dtype = minus_e_ref.dtype
    minus_e = mosaic.kept(mosaic.in_columns(-e, ALIKE), count)
    rounded = mosaic.rounded(minus_e, dtype)
    rest = mosaic.rounded(minus_e - rounded.astype(F32), dtype)
    column = plgpu.broadcasted_iota(jnp.int32, (C, ALIKE), dimension=1, layout=mosaic.TILE)
    mosaic.store_transposed(minus_e_ref, jnp.where(lax.rem(column, 2) == 0, rounded, rest))


def units_of_chunks(
    spec: LinearAttentionSpec, x: jax.Array, lengths: jax.Array | None
) -> jax.Array:
    """The largest magnitude of each chunk's rows that count, [B, H, chunks], of x [B, H, T up to a
    whole chunk]."""
    number = jnp.arange(x.shape[2], dtype=jnp.int32)
    counted = number < (spec.T if lengths is None else lengths[:, None, None])
    return mosaic.units_of_rows([jnp.where(counted, x, 0.0).reshape(*x.shape[:2], -1, C)])


def query_sums(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    g: jax.Array,
    inverse: jax.Array,
    e: jax.Array,
    gates: jax.Array | None,
    lengths: jax.Array | None = None,
    units: tuple[jax.Array, jax.Array] | None = None,
    reading: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """R [B, H, P, V, F] and u [B, H, P, F], float32; gates are summed up from each piece's first
    row, [B, H, T up to a whole chunk]; rows behind `lengths` [B] are left out. units: in float16
    those of inverse and e, `units_of_chunks`. reading: with segments, as `scans.borders` has it, of
    the pieces of `deal`."""

    def map_rows(
        half: int,
        q_ref: Any,
        minus_e_ref: Any,
        inverse_ref: Any,
        e_ref: Any,
        gates_ref: Any = None,
        units: tuple[Any, Any] | None = None,
    ) -> None:
        inverse = mosaic.load(inverse_ref, mosaic.OF_ROWS)
        if gates_ref is not None:
            inverse = inverse * jnp.exp2(mosaic.load(gates_ref, mosaic.OF_ROWS))
        if units is not None:
            inverse = inverse / units[0]
        feature_maps.map_queries_in_place(spec, q_ref, inverse, half * HALF)
        e = mosaic.load(e_ref, mosaic.OF_ROWS)
        spread(e if units is None else e / units[1], minus_e_ref)

    vectors = (inverse, e) if gates is None else (inverse, e, gates)
    arrays = Arrays(q, g, vectors, units=units, lengths=lengths, within=reading)
    return piece_sums(spec, deal, Terms("query_sums", map_rows, mosaic.PARTS), arrays)


def channel_query_sums(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    g: jax.Array,
    inverse: jax.Array,
    e: jax.Array,
    since: jax.Array,
    reading: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The sums with a decay per channel, for q^ in q (`channel.py`). `since` [B, H, chunks * D] are
    the factors of a state from the start of the piece to the middle row of each chunk. u is a sum
    of q^ itself, since q^ times a factor would be rounded once more, and u is part of the gradient
    of the initial state."""

    tiling = frame.tiling(spec)

    def weigh(
        half: int, minus_e_ref: Any, inverse_ref: Any, e_ref: Any, since_ref: Any
    ) -> jax.Array:
        e, inverse = (mosaic.load(ref, mosaic.OF_ROWS) for ref in (e_ref, inverse_ref))
        spread(e * inverse, minus_e_ref)
        return mosaic.load(since_ref.at[tiling.columns_of(half)], mosaic.OF_ROWS)

    def map_rows(
        half: int, q_ref: Any, _minus_e_ref: Any, inverse_ref: Any, _e_ref: Any, since_ref: Any
    ) -> None:
        inverse = mosaic.in_columns(mosaic.load(inverse_ref, mosaic.OF_ROWS), mosaic.HALF)
        own = since_ref.at[tiling.columns_of(half)]
        since = mosaic.in_rows(mosaic.load(own, mosaic.OF_COLUMNS), C)
        q_ref[...] = mosaic.rounded(mosaic.load(q_ref).astype(F32) * inverse * since)

    terms = Terms("channel_query_sums", map_rows, mosaic.PARTS, weigh)
    return piece_sums(spec, deal, terms, Arrays(q, g, (inverse, e, since), within=reading))
