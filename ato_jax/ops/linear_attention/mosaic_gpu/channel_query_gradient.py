"""dq and the flow [B, T, H, D] of queries, for causal calls with a decay per step and channel.

`channel_backward.py` launches it, with q^ and k~ of the forward pass. Read `channel.py` first for
q^, k~ and the middle row, and `query_gradient.py` for the pass without a decay. With g the
cotangent of out, S [V, F] and z [F] the state ahead of a chunk, scaled to its middle row, and
z_i = z + sum_{j<=i} k~_j:

    w[i, j] = g_i . v_j for j <= i of the same chunk, else 0
    D_i     = g_i S + sum_j w[i, j] k~_j
    den_i   = q^_i . z_i,  inverse_i = 1 / max(den_i, eps)
    e_i     = q^_i . D_i / den_i = g_i . out_i,  0 where den_i <= eps
    q'_i    = q^_i inverse_i
    flow_i  = q'_i (D_i - e_i z_i),  dq_i = q^_i (D_i - e_i z_i) inverse_i phi'(q_i) / phi(q_i)

The gradient of the gates is, for each pair, a difference between the results of this walk and of
`channel_key_gradient.py`. So w is multiplied in two parts (rounded, and what rounding left off),
and q' is rounded as it is there. The kernel writes the flow, inverse and e in float32, and S and z
ahead of each run with the rounding that the products have. Without a normaliser e is 0, inverse is
the power of two in the scale, and D_i is multiplied by the rest (`channel.parts_of_scale`).

Where segments begin in a chunk (`chunk_borders.py`), masks apply to w and to what is read of S and
z, and then to the features that are added to S and z: products that run one after the other.

A block has one piece. `channel_query_gradient_storage.py` has the shared memory; read
`ato_jax/mosaic/rings.py` and `roles.py` for the kit. Warpgroups, and the barriers between them:

    MEMORY (2)   loads S and z of the piece, and its chunks as slots come free
      |  start_loaded: S, z and ones, once
      |  values: g and v, and inverse and e where they are given
      |  keys: k~, and the factors onto the chunk's middle row
      |  queries: q^
      |  inputs: x, of which phi' is computed
      v
    VALUES (0, 1)   half of F each: S_half^T [64, V] float32 in registers, w, and the same half of
                    D and z_i
         exchanged: both halves have stored their terms of q^_i . D_i and q^_i . z_i

Only VALUES consumes the rings: `values` and `keys` after the products, `inputs` when dq is in
shared memory, and a slot of `queries` when the copy of dq from it has been made, a chunk later.

    symbol         shape       what it is
    x, q, k        [64, F]     a chunk's queries, q^ and k~
    g, v           [64, V]     a chunk's rows
    S, z           [V, F], [F] the state ahead of the chunk, or behind it once it is updated; in
                               registers S^T, and z as `totals` [64, 8] with 8 equal columns
    onto           [F]         square root of the factor of S and z between two middle rows
    w              [64, 64]    g_i . v_j of the chunk's pairs
    D, z_i         [64, F]     as above
    inverse, e     [64]        as above

Where a tile holds two heads of 64 columns, each half is a head with its own g, v and w. The two
warpgroups then exchange nothing, and each writes inverse and e.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import (
    ALIKE,
    BF16,
    F32,
    HALF,
    OF_COLUMNS,
    OF_ROWS,
    Item,
    load,
    multiply,
    slot_of,
)
from ato_jax.ops.linear_attention.mosaic_gpu import (
    channel,
    channel_blocks,
    chunk_decay,
    feature_maps,
    frame,
)
from ato_jax.ops.linear_attention.mosaic_gpu.channel_query_gradient_storage import (
    MEMORY,
    ROLES,
    VALUES,
    Arrays,
    Chunk,
    Half,
    Left,
    Storage,
    Walk,
    storage_of,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.scans.borders import NO_BORDERS, OfSequence
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


class Factors(NamedTuple):
    """The operands of a chunk's products, tiles in shared memory or in registers."""

    g: Any
    state: Any  # S^T, rounded
    features: Any  # k~, half of its columns
    v: Any
    of_pairs: Any  # the products of both parts of w with the features
    ones: Any  # as many columns as a product needs, to sum features over rows
    sees: Callable[[], jax.Array]  # [64, 64], a mask of pairs
    z: Any = None  # ahead of the chunk; None without a normaliser

    def z_before(self) -> jax.Array:
        return mosaic.in_rows(load(self.z, OF_COLUMNS), C)


def channel_query_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    x: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    s: jax.Array,
    z: jax.Array,
    onto: jax.Array,
    weights: tuple[jax.Array, jax.Array] | None = None,
    borders: OfSequence = NO_BORDERS,
) -> tuple[jax.Array, ...]:
    """Launches the kernel. It returns dq; the flow; inverse and e, [B, H, T up to a whole chunk];
    and ahead of each run S^T [B, H, runs, D, V] in bfloat16 and, with a normaliser, z [B, H, runs,
    D].

    Args:
      x: the queries.
      q, k: q^ and k~.
      s, z: S^T and z ahead of each piece.
      onto: `Factors.of_keys` of `channel_backward.py`, [B, H, chunks * D].
      weights: inverse and e, if heads are cut and the kernel cannot compute them
        (`channel_blocks.py`).
    """
    deal = dataclasses.replace(deal, most_blocks=deal.items)
    ones = np.ones((ALIKE, C), BF16)
    of_segments = borders.begins, borders.chunks
    arrays = Arrays(x, q, k, v, g, s, z, onto, ones, *of_segments, *(weights or ()))
    rows = jax.ShapeDtypeStruct((spec.B, spec.H, mosaic.whole_chunks(spec.T)), F32)
    of_runs = spec.B, spec.H, pl.cdiv(spec.T, channel.RUN)
    of_features = channel_blocks.shape_of_heads(spec, q)
    types = Left(
        jax.ShapeDtypeStruct(of_features, BF16),
        jax.ShapeDtypeStruct(of_features, F32),
        jax.ShapeDtypeStruct((*of_runs, spec.D, spec.V), BF16),
    )
    if spec.normalize:
        types = types._replace(k_sum=jax.ShapeDtypeStruct((*of_runs, spec.D), F32))
    if spec.normalize and weights is None:
        types = types._replace(inverse=rows, e=rows)
    (operands, of_arrays), (out_type, of_types) = map(jax.tree.flatten, (arrays, types))

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        given, left = refs[: len(operands)], refs[len(operands) :]
        named = jax.tree.unflatten(of_arrays, given), jax.tree.unflatten(of_types, left)
        return Walk(spec, deal, *named, own)

    parts = (MEMORY, memory), (VALUES, values)
    program = mosaic.Program(ROLES, storage_of(spec, weights is not None), parts, bind)
    name = frame.name_of("channel_query_gradient")
    found = mosaic.launch(name, program, deal, tuple(out_type), operands, own_barriers=True)
    left = jax.tree.unflatten(of_types, found)
    inverse, e = weights or (left.inverse, left.e)
    if not spec.normalize:
        power, _ = channel.parts_of_scale(spec)
        inverse, e = jnp.full(rows.shape, power, F32), jnp.zeros(rows.shape, F32)
    return left.dq, left.flow, inverse, e, left.kv, left.k_sum


def memory(walk: Walk) -> None:
    """Loads a piece and its chunks."""
    walk.deal.each(functools.partial(load_piece, walk))


def load_piece(walk: Walk, item: Item) -> None:
    own, arrays, tiling = walk.own, walk.arrays, walk.tiling
    plgpu.copy_gmem_to_smem(arrays.ones, own.ones, own.start_loaded.barrier)
    for half in range(2):
        head, columns = tiling.head_of(item.head, half), tiling.columns_of(half)
        for ref, start in ((arrays.z, own.z), (arrays.s, own.s)):
            source = ref.at[item.batch, head, item.piece, columns]  # [64], and [64, V]
            plgpu.copy_gmem_to_smem(source, start.at[half], own.start_loaded.barrier)
    lax.fori_loop(0, item.chunks, lambda chunk, _: load_chunk(walk, item, chunk), None)
    for ring in (own.values, own.keys, own.queries, own.inputs):
        ring.drain(item.chunks)


def load_chunk(walk: Walk, item: Item, chunk: Any) -> None:
    own, arrays, tiling, spec = walk.own, walk.arrays, walk.tiling, walk.spec
    rows = item.rows(chunk)
    number = lax.div(item.first_row, C) + chunk
    slot, q_slot = own.values.slot(chunk), own.queries.slot(chunk)
    k_slot = own.keys.slot(chunk)
    own.values.acquire(chunk)
    produced = own.values.produced
    for ref, tiles in ((arrays.g, own.g), (arrays.v, own.v)):
        head = channel_blocks.head_of_values(spec, ref, item.head)
        tiling.copy_tile(ref, item, rows, head, tiles, slot, produced)  # [64, V]
    for n, ref in enumerate((arrays.inverse, arrays.e) if walk.given else ()):
        tiling.copy_vector(ref, item, rows, own.weights.at[n], slot, produced)  # [64]
    own.keys.acquire(chunk)
    columns = pl.ds(number * spec.D, spec.D)
    tiling.copy_vector(arrays.onto, item, columns, own.onto, k_slot, own.keys.produced)  # [F]
    head = channel_blocks.head_of_features(spec, arrays.k, item.head)
    for half in range(2):
        source = tiling.part(arrays.k, item, rows, head, half)  # [64, 64]
        plgpu.copy_gmem_to_smem(source, own.k.at[k_slot, half], own.keys.produced.at[k_slot])
    own.queries.acquire(chunk)
    for half in range(2):
        source = tiling.part(arrays.q, item, rows, head, half)  # [64, 64]
        plgpu.copy_gmem_to_smem(source, own.q.at[q_slot, half], own.queries.produced.at[q_slot])
    own.inputs.acquire(chunk)
    for half in range(2):
        source = tiling.part(arrays.x, item, rows, head, half)  # [64, 64]
        plgpu.copy_gmem_to_smem(source, own.x.at[half], own.inputs.produced.barrier)


def values(walk: Walk) -> None:
    """Computes half of dq's columns, with the same half of S and z in registers."""
    walk.deal.each(functools.partial(multiply_piece, walk))
    plgpu.wait_smem_to_gmem(0)


def multiply_piece(walk: Walk, item: Item) -> None:
    own, number = walk.own, mosaic.group()
    head = walk.tiling.head_of(item.head, number)
    half = Half(item, number, head, pl.ds(number * HALF, HALF))
    own.start_loaded.wait()
    S = load(own.s.at[number]).astype(F32)  # S^T [64, V]
    totals = mosaic.in_columns(load(own.z.at[number], OF_ROWS), ALIKE)  # z [64, 8]
    plgpu.commit_smem()  # reads finish before the first chunk's stores
    one = functools.partial(multiply_chunk, walk, half)
    lax.fori_loop(0, item.chunks, one, (S, totals))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    release_queries(walk, item.chunks - 1)


def release_queries(walk: Walk, chunk: Any) -> None:
    """Releases the slot from which a chunk's dq was stored."""
    walk.own.queries.consumed.arrive(walk.own.queries.slot(chunk))


def multiply_chunk(walk: Walk, half: Half, number: Any, carried: Any) -> Any:
    """Carries half of S^T [64, V], and of z [64, 8]."""
    own, spec, tiling = walk.own, walk.spec, walk.tiling
    S, totals = carried
    borders = walk.borders(half.item, number)
    slot, q_slot = own.values.slot(number), own.queries.slot(number)
    k_slot, parity = own.keys.slot(number), slot_of(number, 2)
    chunk = Chunk(half, number, slot, q_slot, k_slot, parity)
    features = own.k.at[k_slot, half.number]
    own.keys.produced.wait(k_slot)
    onto = load(own.onto.at[k_slot, half.columns], OF_ROWS)
    S = chunk_decay.times_squares(S, onto)
    if spec.normalize:
        totals = chunk_decay.times_squares(totals, onto)
    own.values.produced.wait(slot)
    g, v = (tiling.head_in(tiles, slot, half.number) for tiles in (own.g, own.v))
    (w,) = multiply(
        (mosaic.zeros(C, C), [(g, v.T)]), meanwhile=lambda: publish(walk, chunk, S, totals)
    )
    w = borders.either(lambda: jnp.where(borders.pairs_from(), w, 0.0), lambda: w)
    sees = functools.partial(channel_blocks.sees, spec, half.item)
    # Without the barrier the selected numbers would be rounded singly, not in pairs.
    w = lax.optimization_barrier(jnp.where(sees(), w, 0.0))
    rounded = mosaic.rounded(w)
    rest = mosaic.rounded(w - rounded.astype(F32))
    of_pairs = (rounded, features), (rest, features)
    factors = Factors(g, own.s.at[half.number].T, features, v, of_pairs, own.ones.T, sees)
    if spec.normalize:
        factors = factors._replace(z=own.z.at[half.number])
    D, S, *of_keys = borders.either(
        lambda: read_at_border(borders, factors, S, totals),
        lambda: read_at_once(factors, S, totals),
    )
    z, totals = of_keys or (None, totals)
    weights = None
    if walk.given:
        weights = [load(own.weights.at[n, slot], OF_ROWS) for n in range(2)]
        plgpu.commit_smem()  # reads finish before the next load overwrites them
    own.values.consumed.arrive(slot)
    own.keys.consumed.arrive(k_slot)
    own.queries.produced.wait(q_slot)
    write_rows(walk, chunk, D, z, weights)
    return S, totals


def publish(walk: Walk, chunk: Chunk, S: jax.Array, totals: jax.Array) -> None:
    """Stores S and z as products read them, and writes them if the chunk is the first of its
    run."""
    own, left, half = walk.own, walk.left, chunk.half
    own.s.at[half.number][...] = S.astype(BF16)
    if walk.spec.normalize:
        own.z.at[half.number][...] = jnp.max(totals, axis=1)  # all columns are equal
    plgpu.commit_smem()

    @pl.when(lax.rem(chunk.number, channel.CHUNKS) == 0)
    def _keep() -> None:
        run = channel.run_of(half.item, chunk.number)
        at = half.item.batch, half.head, run, walk.tiling.columns_of(half.number)
        plgpu.copy_smem_to_gmem(own.s.at[half.number], left.kv.at[at])
        if left.k_sum is not None:
            plgpu.copy_smem_to_gmem(own.z.at[half.number], left.k_sum.at[at])


def read_at_once(factors: Factors, S: jax.Array, totals: jax.Array) -> Any:
    """D, and S behind the chunk; with a normaliser also z_i, and z behind the chunk."""
    features = factors.features
    sums = [
        (mosaic.zeros(C, HALF), ((factors.g, factors.state), *factors.of_pairs)),
        (S, [(features.T, factors.v)]),
    ]
    if factors.z is not None:
        z_before = factors.z_before()
        sums += [
            (z_before, [(ones_where(factors.sees()), features)]),
            (totals, [(features.T, factors.ones)]),
        ]
    return multiply(*sums)


def read_at_border(borders: Any, factors: Factors, S: jax.Array, totals: jax.Array) -> Any:
    """The results of `read_at_once` where segments begin in the chunk. Products follow one another,
    since registers have no room for all operands. Features that are not added to the state are set
    to 0 in the end."""
    features = factors.features
    (D,) = multiply((mosaic.zeros(C, HALF), [(factors.g, factors.state)]))
    (D,) = multiply((mosaic.rows_within(D, None, borders.reads), factors.of_pairs))
    z: Any = ()
    if factors.z is not None:
        before = mosaic.rows_within(factors.z_before(), None, borders.reads)
        seen = borders.pairs_from() & factors.sees()
        z = multiply((before, [(ones_where(seen), features)]))
    plgpu.commit_smem()  # all warps have multiplied by the features
    mosaic.keep_rows_between(features, borders.adds, C)
    plgpu.commit_smem()
    behind = [(mosaic.zeros(*S.shape), [(features.T, factors.v)])]
    if factors.z is not None:
        behind.append((mosaic.zeros(*totals.shape), [(features.T, factors.ones)]))
    S_behind, *totals_behind = multiply(*behind)
    return D, S_behind, *z, *totals_behind


def ones_where(seen: jax.Array) -> jax.Array:
    return jnp.where(seen, 1.0, 0.0).astype(BF16)


def write_rows(walk: Walk, chunk: Chunk, D: jax.Array, z: Any, weights: Any) -> None:
    """Writes dq and the flow, from D and z_i [64, 64], and inverse and e if these are not given in
    `weights`."""
    own, spec, half = walk.own, walk.spec, chunk.half.number
    q = own.q.at[chunk.q_slot, half]
    read = load(q).astype(F32)  # q^, below q' before it is rounded
    parts = None
    if spec.normalize and weights is None:
        parts = jnp.sum(read * D, axis=1), jnp.sum(read * z, axis=1)
        if own.parts is not None:
            for n, part in enumerate(parts):
                own.parts.at[chunk.parity, half, n][...] = part
    plgpu.commit_smem()  # the stores above, and reads of q^ before dq is stored there
    if parts is not None:
        weights = weights_of(walk, chunk, parts)
    if spec.normalize:
        inverse, e = weights
        D = D - mosaic.in_columns(e, HALF) * z
        read = read * mosaic.in_columns(inverse, HALF)
    else:
        power, scale_rest = channel.parts_of_scale(spec)
        D = channel.times_rest(D, scale_rest)
        read = read * power
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the chunk before
    pl.when(chunk.number > 0)(lambda: release_queries(walk, chunk.number - 1))
    own.flow.at[half][...] = mosaic.rounded(read).astype(F32) * D
    own.inputs.produced.wait()
    of_flow = feature_maps.features(spec).slope_by_feature(load(own.x.at[half]))
    q[...] = mosaic.rounded(of_flow(read * D))
    if parts is not None:
        store_weights(walk, half, *weights)
    plgpu.commit_smem()
    own.inputs.consumed.arrive()
    leave_rows(walk, chunk)


def weights_of(
    walk: Walk, chunk: Chunk, parts: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """inverse and e [64], from this half's terms of q^_i . D_i and q^_i . z_i. Those of the other
    half are in shared memory if both belong to the same head."""
    own, eps = walk.own, walk.spec.eps
    total, den = parts
    if own.exchanged is not None:
        own.exchanged.arrive()
        own.exchanged.wait()
        total, den = (
            part + load(own.parts.at[chunk.parity, 1 - chunk.half.number, n], OF_ROWS)
            for n, part in enumerate(parts)
        )
    inverse = 1.0 / jnp.maximum(den, eps)
    return inverse, jnp.where(den > eps, total * inverse, 0.0)


def store_weights(walk: Walk, half: Any, inverse: jax.Array, e: jax.Array) -> None:
    """Stores inverse and e for `leave_rows`. Where both halves belong to one head, each stores one
    of the two."""
    rows = walk.own.rows
    if walk.heads == 1:
        rows.at[half][...] = jnp.where(half == 0, inverse, e)
        return
    for n, weights in enumerate((inverse, e)):
        rows.at[2 * half + n][...] = weights


def leave_rows(walk: Walk, chunk: Chunk) -> None:
    """Copies this half of the chunk's results to global memory."""
    own, left, (item, half, head, _) = walk.own, walk.left, chunk.half
    rows = item.rows(chunk.number)
    tiles = (own.flow.at[half], left.flow), (own.q.at[chunk.q_slot, half], left.dq)
    for tile, ref in tiles:
        plgpu.copy_smem_to_gmem(tile, walk.tiling.part(ref, item, rows, item.head, half))
    if left.inverse is None:
        return
    for n, ref in enumerate((left.inverse, left.e)):
        target = ref.at[item.batch, head, rows]
        if walk.heads == 2:
            plgpu.copy_smem_to_gmem(own.rows.at[2 * half + n], target)
        else:
            copy = functools.partial(plgpu.copy_smem_to_gmem, own.rows.at[half], target)
            pl.when(half == n)(copy)
