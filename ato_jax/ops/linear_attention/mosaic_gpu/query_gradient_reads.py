"""The products of a chunk in `query_gradient.py`: D and z_i, [64, 64] each, and the next S and z.

VALUES calls one of three functions, which give the same results: `read_at_once` issues all
products together, `read_at_border` masks between them where segments begin in the chunk, and
`read_one_by_one` scales in between where the chunk may be steep. In the first chunks of a sequence
phi(k), and in bfloat16 S, are multiplied in two parts (`chunks_in_two_parts`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, OF_COLUMNS, OF_ROWS, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.query_gradient_rows import features_of_queries
from ato_jax.ops.linear_attention.mosaic_gpu.query_gradient_storage import Chunk, Walk


def ones_where(walk: Walk, seen: jax.Array) -> jax.Array:
    return jnp.where(seen, 1.0, 0.0).astype(walk.tiling.dtype)


def sees(walk: Walk) -> jax.Array:
    """[64, 64]: whether the query of the row sees the key of the column."""
    query, key = mosaic.hidden_position(0), mosaic.hidden_position(1)
    return query >= key if walk.deal.end is None else query < key


def where_seen(walk: Walk, x: jax.Array) -> jax.Array:
    # Without the barrier the selected numbers would be rounded singly, not in pairs.
    return lax.optimization_barrier(jnp.where(sees(walk), x, 0.0))


def parts_of(walk: Walk, x: jax.Array) -> list[jax.Array]:
    """w rounded, and if `w_parts` is 2 what rounding left off."""
    dtype = walk.tiling.dtype
    rounded = mosaic.rounded(x, dtype)
    return [rounded, mosaic.rounded(x - rounded.astype(F32), dtype)][: walk.w_parts]


def z_before(walk: Walk, chunk: Chunk) -> jax.Array:
    return mosaic.in_rows(load(walk.own.z.at[chunk.half], OF_COLUMNS), C)


def parts_of_state(walk: Walk, chunk: Chunk) -> list[Any]:
    """The products of g with S, which may be in two parts."""
    half, own_s = chunk.half, walk.own.s
    state = own_s.at[half] if walk.gated else own_s.at[half].T
    return [(chunk.g, state), *([(chunk.g, walk.start_in(half))] if walk.splits else [])]


def map_keys(walk: Walk, chunk: Chunk) -> None:
    """phi(k) of this half in k's place, and what rounding it leaves off."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    first: Any = chunk.half * HALF
    x = walk.phi.present(load(chunk.features), first)
    phi_k = walk.phi.unrounded(x, first)
    power = walk.power(chunk.item, chunk.half)
    phi_k = mosaic.kept(phi_k if power is None else phi_k * power, chunk.count)
    rounded = mosaic.rounded(phi_k, walk.tiling.dtype)
    chunk.rest_of_keys[...] = (phi_k - rounded.astype(F32)).astype(walk.tiling.dtype)
    chunk.features[...] = rounded
    plgpu.commit_smem()


def rest_of_state(walk: Walk, chunk: Chunk, S: jax.Array) -> jax.Array:
    """The product with what rounding S leaves off, where S will lie."""
    own_s = walk.own.s.at[chunk.half]
    own_s[...] = (S - S.astype(BF16).astype(F32)).astype(BF16)
    plgpu.commit_smem()
    (D,) = multiply((mosaic.zeros(C, HALF), [(chunk.g, own_s.T)]))
    return D


def read_at_once(
    walk: Walk, chunk: Chunk, w: jax.Array, initial: Any, S: jax.Array, totals: jax.Array
) -> tuple[Any, ...]:
    """D, z_i if it is needed, and S and z behind the chunk. D starts from `initial`, if given."""
    spec, features = walk.spec, chunk.features
    reads = parts_of_state(walk, chunk)
    weights: list[jax.Array] = []
    if not walk.has_units:
        weights = parts_of(walk, where_seen(walk, w))
        reads += [(part, features) for part in weights]
    start = mosaic.zeros(C, HALF) if initial is None else initial
    of_queries = [(start, reads)]
    if spec.normalize:
        before = z_before(walk, chunk)
        of_queries.append((before, [(ones_where(walk, sees(walk)), features)]))
    if chunk.few is not None:
        of_queries = start_at_rest(walk, chunk, weights, of_queries)
    behind = [(S, [(features.T, chunk.v)])]
    if walk.sums_keys:
        behind.append((totals, [(features.T, walk.own.ones.T)]))
    D, *found = multiply(*of_queries, *behind)
    z, (own_S, *own_totals) = found[: spec.normalize], found[spec.normalize :]
    if walk.has_units:
        D = out_of_units(walk, chunk, D)
        D = add_pairs(walk, chunk, jnp.where(sees(walk), w, 0.0), D)
    return D, z, own_S, own_totals[0] if walk.sums_keys else totals


def start_at_rest(walk: Walk, chunk: Chunk, weights: list[jax.Array], sums: list[Any]) -> list[Any]:
    """D and z_i started with the terms of the second part of phi(k); in float16 z_i alone."""
    (D, of_D), (z, of_z) = sums
    of_rest = [(part, chunk.rest_of_keys) for part in weights]
    of_ones = [(ones_where(walk, sees(walk)), chunk.rest_of_keys)]
    if walk.has_units:
        (z,) = lax.cond(chunk.few, lambda: multiply((z, of_ones)), lambda: (z,))
    else:
        D, z = lax.cond(chunk.few, lambda: multiply((D, of_rest), (z, of_ones)), lambda: (D, z))
    return [(D, of_D), (z, of_z)]


def behind_rest(walk: Walk, chunk: Chunk, S: jax.Array, totals: jax.Array) -> tuple[Any, ...]:
    """S and z behind the chunk, with the terms of the second part of phi(k)."""
    of_keys = chunk.rest_of_keys.T
    return multiply((S, [(of_keys, chunk.v)]), (totals, [(of_keys, walk.own.ones.T)]))


def add_pairs(walk: Walk, chunk: Chunk, seen: jax.Array, D: jax.Array) -> jax.Array:
    """Adds `seen` phi(k) to D, which is g S so far: the pairs of the chunk, with weights `seen`."""
    units = mosaic.units_of_rows([seen])
    weights = parts_of(walk, lax.optimization_barrier(mosaic.in_units(seen, units)))
    D = mosaic.in_units(D, units)
    if chunk.few is not None:
        of_rest = [(part, chunk.rest_of_keys) for part in weights]
        (D,) = lax.cond(chunk.few, lambda: multiply((D, of_rest)), lambda: (D,))
    (D,) = multiply((D, [(part, chunk.features) for part in weights]))
    return D * mosaic.in_columns(units, HALF)


def out_of_units(walk: Walk, chunk: Chunk, D: jax.Array) -> jax.Array:
    """g S times the units of its columns, in float16."""
    if not walk.has_units:
        return D
    return D * mosaic.in_rows(load(walk.own.units.at[chunk.half], OF_COLUMNS), C)


def read_at_border(walk: Walk, chunk: Chunk, w: jax.Array, totals: jax.Array) -> tuple[Any, ...]:
    """The results of `read_at_once` where segments begin in the chunk. Products follow one another,
    since registers have no room for all operands. Features that are not added to the state are set
    to 0 in the end."""
    borders, features = chunk.borders, chunk.features
    seen = borders.pairs_from() & sees(walk)
    w = jnp.where(seen, w, 0.0)
    (D,) = multiply((mosaic.zeros(C, HALF), parts_of_state(walk, chunk)))
    D = mosaic.rows_within(out_of_units(walk, chunk, D), None, borders.reads)
    if walk.has_units:
        D = add_pairs(walk, chunk, w, D)
    else:
        weights = parts_of(walk, lax.optimization_barrier(w))
        (D,) = multiply((D, [(part, features) for part in weights]))
    z: list[jax.Array] = []
    if walk.spec.normalize:
        before = mosaic.rows_within(z_before(walk, chunk), None, borders.reads)
        z += multiply((before, [(ones_where(walk, seen), features)]))
    mosaic.keep_rows_between(features, borders.adds, C)
    plgpu.commit_smem()
    behind = [(mosaic.zeros(HALF, walk.spec.V), [(features.T, chunk.v)])]
    if walk.sums_keys:
        behind.append((mosaic.zeros(*totals.shape), [(features.T, walk.own.ones.T)]))
    S, *own_totals = multiply(*behind)
    return D, z, S, own_totals[0] if walk.sums_keys else totals


def read_one_by_one(
    walk: Walk, chunk: Chunk, w: jax.Array, S: jax.Array, totals: jax.Array
) -> tuple[Any, ...]:
    """The results of `read_at_once` where the chunk may be steep, and what D and z_i have of the
    state alone. Products follow one another, since registers have no room for all operands."""
    gates, features = chunk.gates, chunk.features
    left = mosaic.in_columns(gates.if_steep(gates.of(OF_ROWS)), HALF)
    pairs = gates.of_pairs(queries=0)
    (D,) = multiply((mosaic.zeros(C, HALF), parts_of_state(walk, chunk)))
    D = out_of_units(walk, chunk, D) * left
    phi_q = features_of_queries(walk, chunk)
    reads = [jnp.sum(phi_q * D, axis=1)]
    seen = where_seen(walk, w * pairs)
    if walk.has_units:
        D = add_pairs(walk, chunk, seen, D)
    else:
        (D,) = multiply((D, [(part, features) for part in parts_of(walk, seen)]))
    z: list[jax.Array] = []
    if walk.spec.normalize:
        before = z_before(walk, chunk) * left
        reads.append(jnp.sum(phi_q * before, axis=1))
        decays = mosaic.rounded(where_seen(walk, pairs), walk.tiling.dtype)
        z += multiply((before, [(decays, features)]))
    added = mosaic.times_rows(features, gates.left(OF_COLUMNS))
    keeps = gates.if_steep(gates.last)
    (own_S,) = multiply((S * keeps, [(added, chunk.v)]))
    own_totals = totals
    if walk.sums_keys:
        (own_totals,) = multiply((totals * keeps, [(added, walk.own.ones.T)]))
    return D, z, own_S, own_totals, reads
