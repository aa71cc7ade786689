"""dq [B, T, H, D] of causal calls, without a decay or with one per head or step.

`causal.py` launches it. The walk is that of `output.py`; read that first. With g the cotangent of
out, S [V, F] and z [F] the sums over all keys ahead of a chunk, and z_i = z + sum_{j<=i} phi(k_j)
over the chunk's own keys:

    w[i, j] = g_i . v_j for j <= i of the same chunk, else 0
    G_i     = g_i S + sum_j w[i, j] phi(k_j)         the gradient of phi(q_i) without normaliser
    den_i   = phi(q_i) . z_i,  inverse_i = 1 / max(den_i, eps)
    e_i     = phi(q_i) . G_i / den_i = g_i . out_i,  0 where den_i <= eps
    dq_i    = (G_i - e_i z_i) inverse_i phi'(q_i)

The kernel also writes inverse and e in float32, for the walk over keys. It does not read out: two
sums over a row of G_i and z_i give e and den, and this e fits the rounding of G. phi(q) is not
rounded by itself, since its product with inverse is rounded once, in the walk over keys. Without a
normaliser inverse is the scale, and e is 0.

`query_gradient_storage.py` has the shared memory; read `ato_jax/mosaic/rings.py` and `roles.py` for
the kit. A block has one piece: with a loop over several pieces the registers do not suffice.
Warpgroups, and the barriers between them:

    MEMORY (2)   loads S and z of a piece, and its chunks as slots come free
      |    |    +---- start_loaded: S, z and ones, once ---------------------------------+
      |    +--------- values: g and v; queries: q, and inverse and e if given -----+     |
      |  keys: k and gates                                                         |     |
      v                                                                            |     |
    FEATURES (3)   maps k in place                                                 |     |
      |  mapped: phi(k) lies in the slot                                           |     |
      v                                                                            v     v
    VALUES (0, 1)   half of F each: S_half^T [64, V] float32 in registers, w, and the same half of
                    G and z_i
         exchanged: both halves have stored their terms of the two row sums
         share_loaded: the other launch's part of dq lies in dq's slot

Only VALUES consumes the rings. With lengths FEATURES waits for `values`, too, and sets rows to 0.
Both warpgroups of VALUES compute all of w; every other product is over their half of F. Once a
chunk they exchange their terms of the two row sums.

    symbol         shape       what it is
    q, k           [64, F]     a chunk's rows; k is phi(k) once it is mapped
    g, v           [64, V]     a chunk's rows
    S, z           [V, F], [F] sums over all keys before the chunk; in registers S^T, and z as
                               `totals` [64, 8] with 8 equal columns
    w              [64, 64]    g_i . v_j of the chunk's pairs
    G, z_i         [64, F]     as above; D in place of G in code, and with a decay
    inverse, e     [64]        as above
    to_end         -           the factor of S and z from the chunk's middle row to its last

With a decay G_i is the sum of the log2 decays from the chunk's first row to row i, the gradient of
phi(q_i) is called D_i, and m is the chunk's middle row:

    w[i, j], and phi(k_j) in z_i, have a factor exp2(G_i - G_j); g_i S and z one of exp2(G_i)
    S = exp2(G_C) S + (exp2(G_C - G_j) phi(k_j))^T v_j, likewise z    for the chunk's last row C

phi(k), S and z are scaled to the middle row (`chunk_decay.py`), and rows of D and z_i multiplied by
exp2(G_i - G_m) at the end. In a steep chunk w, the pairs in z_i, what is read of the state, and
phi(k) for the sums are scaled in registers instead.

For the gradient of the decays (`scans/flows.py`) the kernel writes S and z ahead of some chunks,
and each half writes a sum over its columns for each row:

    phi'_i . (D_i - e_i z_i)    phi'_i = exp2(G_i - G_m) phi(q_i) inverse_i, rounded

This is the sum over the query's pairs of the loss's derivative by their exponent. `key_gradient.py`
writes such a sum for each key, and the same pairs have to cancel: so either both kernels round w,
or both multiply it in two parts (`rounds_pairs`). In a steep chunk the sum is over keys of earlier
chunks alone. Where `splits_states` holds, S is multiplied in two parts and is not written; its
second part lies in dq's slots until dq is stored there.

In the first chunks of a sequence phi(k), and in bfloat16 S, are multiplied in two parts
(`chunks_in_two_parts`). VALUES then maps k, each warpgroup its half, and the second part of
phi(k) lies in dq's other slot until S and z have been updated, at the end of the chunk.

Where segments begin in a chunk (`chunk_borders.py`), what is read of S and z is masked before the
pairs are added. S and z are updated last, after rows of phi(k) have been set to 0.

Where a tile holds two heads, each half is a head, and the warpgroups exchange nothing.

This file has the launch and the loops of all roles. `query_gradient_storage.py` has the arrays and
barriers, `query_gradient_reads.py` computes D, z_i and the next S and z, `query_gradient_rows.py`
dq from D and z_i, and `two_parts.py` says which operands are multiplied in two parts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import (
    ALIKE,
    F32,
    HALF,
    OF_COLUMNS,
    OF_ROWS,
    Item,
    load,
    multiply,
    slot_of,
)
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame, value_blocks
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.query_gradient_reads import (
    behind_rest,
    map_keys,
    ones_where,
    read_at_border,
    read_at_once,
    read_one_by_one,
    rest_of_state,
)
from ato_jax.ops.linear_attention.mosaic_gpu.query_gradient_rows import write_rows
from ato_jax.ops.linear_attention.mosaic_gpu.query_gradient_storage import (
    Arrays,
    Chunk,
    Left,
    Storage,
    Walk,
    cast_of,
    storage_of,
)
from ato_jax.ops.linear_attention.scans import flow_places
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def query_gradient(
    spec: LinearAttentionSpec, deal: mosaic.Deal, arrays: Arrays
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, flow_places.OfQueries | None]:
    """Launches the kernel. It returns dq; inverse and e, [B, H, T up to a whole chunk] float32,
    which are those of `arrays` if given; in float16 `Left.largest`; and with a decay the sums for
    its gradient."""
    deal = dataclasses.replace(deal, most_blocks=deal.items)
    arrays = arrays._replace(ones=np.ones((ALIKE, C), arrays.q.dtype))
    if arrays.k_powers is not None and spec.normalize:
        least = jnp.broadcast_to(arrays.k_powers[..., None] * spec.eps, (spec.B, spec.G, C))
        arrays = arrays._replace(least=least)
    walk = Walk(spec, deal, False, arrays)
    rows = jax.ShapeDtypeStruct((spec.B, spec.H, mosaic.whole_chunks(spec.T)), F32)
    of_heads = value_blocks.shape_of_heads(spec, arrays.q)
    types = Left(jax.ShapeDtypeStruct(of_heads, arrays.q.dtype))
    if not walk.given:
        types = types._replace(inverse=rows, e=rows)
    if walk.has_units:
        halves = jax.ShapeDtypeStruct((2 // walk.heads, *rows.shape), F32)
        types = types._replace(largest=halves)
    if walk.gated:
        of_edges = spec.B, spec.G, flow_places.places(spec, deal)
        types = types._replace(flows=jax.ShapeDtypeStruct((2 // walk.heads, *rows.shape), F32))
        if walk.leaves_state:
            of_kv = jax.ShapeDtypeStruct((*of_edges, spec.V, spec.F), arrays.q.dtype)
            types = types._replace(kv=of_kv)
            if walk.has_units:
                types = types._replace(kv_units=jax.ShapeDtypeStruct((*of_edges, spec.F), F32))
        if walk.sums_keys:
            types = types._replace(k_sum=jax.ShapeDtypeStruct((*of_edges, spec.F), F32))
    given, out_type = ({name: of for name, of in some._asdict().items() if of is not None}
                       for some in (arrays, types))  # fmt: skip
    names = tuple(given), tuple(out_type)
    program, rest = _program(walk, *names), None
    if walk.gated:
        rest = _program(dataclasses.replace(walk, some_steep=True), *names)
    name = frame.name_of("query_gradient" if deal.end is None else "later_query_gradient")
    found = mosaic.launch(
        name, program, deal, tuple(out_type.values()), tuple(given.values()), rest=rest
    )
    left = Left(**dict(zip(out_type, found, strict=True)))
    inverse, e = (arrays.inverse, arrays.e) if walk.given else (left.inverse, left.e)
    if not spec.normalize:
        inverse, e = jnp.full(rows.shape, spec.scale, F32), jnp.zeros(rows.shape, F32)
    if not walk.gated:
        return left.dq, inverse, e, left.largest, None
    kv = left.kv
    if left.kv_units is not None:
        kv = kv.astype(F32) * left.kv_units[..., None, :]
    return left.dq, inverse, e, left.largest, flow_places.OfQueries(left.flows, kv, left.k_sum)


def _program(walk: Walk, inputs: Sequence[str], outputs: Sequence[str]) -> mosaic.Program:
    """The kernel, over arrays of these names."""
    cast = cast_of(walk.gated)

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        arrays = Arrays(**dict(zip(inputs, refs, strict=False)))
        left = Left(**dict(zip(outputs, refs[len(inputs) :], strict=True)))
        return dataclasses.replace(walk, arrays=arrays, left=left, own=own)

    parts = (cast.memory, memory), (cast.features, features), (cast.values, values)
    return mosaic.Program(mosaic.Roles(cast), storage_of(walk), parts, bind)


def memory(walk: Walk) -> None:
    """Loads pieces and chunks."""
    own = walk.own
    steps = walk.each(functools.partial(load_piece, walk))
    for ring in (own.values, own.keys, own.queries):
        ring.drain(steps)


def load_piece(walk: Walk, item: Item) -> None:
    own, arrays, tiling = walk.own, walk.arrays, walk.tiling
    kv_item, loaded = walk.of_keys(item), own.start_loaded.barrier
    plgpu.copy_gmem_to_smem(arrays.ones, own.ones, loaded)
    for half in range(2):
        head, columns = tiling.head_of(kv_item.head, half), tiling.columns_of(half)
        of_piece = item.batch, head, item.piece
        if walk.has_units:
            source = arrays.s_units.at[of_piece]
            plgpu.copy_gmem_to_smem(source, own.start_units.at[half], loaded)
        if arrays.least is not None:
            source = arrays.least.at[item.batch, head]  # [64]
            plgpu.copy_gmem_to_smem(source, own.least.at[half], loaded)
        source = arrays.s.at[(*of_piece, slice(None), columns)]
        target = mosaic.for_copy(walk.start_in(half))
        plgpu.copy_gmem_to_smem(source, target, loaded)
        source = arrays.z.at[(*of_piece, columns)]
        plgpu.copy_gmem_to_smem(source, own.z.at[half], loaded)

    def load_chunk(chunk: Any, _: None) -> None:
        rows = item.rows(chunk)
        slot = own.values.slot(chunk)
        own.values.acquire(chunk)
        for ref, tiles, head in ((arrays.g, own.g, item.head), (arrays.v, own.v, kv_item.head)):
            tiling.copy_tile(ref, item, rows, head, tiles, slot, own.values.produced)  # [64, V]
        for ref, tiles, head, ring in (
            (arrays.k, own.k, kv_item.head, own.keys),
            (arrays.q, own.q, item.head, own.queries),
        ):
            slot = ring.slot(chunk)
            ring.acquire(chunk)
            for half in range(2):
                plgpu.copy_gmem_to_smem(
                    tiling.part(ref, item, rows, head, half),  # [64, 64]
                    mosaic.for_copy(tiles.at[slot, half]),
                    ring.produced.at[slot],
                )
            if walk.gated and ref is arrays.k:
                tiling.copy_vector(arrays.gates, kv_item, rows, own.gates, slot, ring.produced)
        if walk.given:
            for ref, target in ((arrays.inverse, own.inverse), (arrays.e, own.e)):
                slot, produced = own.queries.slot(chunk), own.queries.produced
                tiling.copy_vector(ref, item, rows, target, slot, produced)  # [64]

    lax.fori_loop(0, item.chunks, load_chunk, None)


def features(walk: Walk) -> None:
    """Maps k in place."""
    walk.each(functools.partial(map_piece, walk))


def map_piece(walk: Walk, item: Item) -> None:
    lax.fori_loop(0, item.chunks, lambda chunk, _: map_chunk(walk, item, chunk), None)


def map_chunk(walk: Walk, item: Item, chunk: Any) -> None:
    own, heads = walk.own, walk.heads
    slot = own.keys.slot(chunk)
    own.keys.produced.wait(slot)
    exponents: list[Any] = [None] * heads
    if walk.gated:
        of_heads = walk.tiling.by_heads(own.gates.at[slot])
        exponents = [walk.gates_in(rows).up_to_middle() for rows in of_heads]

    def map_halves() -> None:
        for half in range(2):
            feature_maps.map_keys_in_place(
                walk.spec,
                own.k.at[slot, half],
                half,
                exponents[half % heads],
                walk.power(item, half),
            )

    if walk.few_chunks:
        pl.when(~walk.sees_few_keys(item, chunk))(map_halves)
    else:
        map_halves()
    if walk.arrays.lengths is not None:
        keep_rows(walk, item, chunk, slot)
    plgpu.commit_smem()
    own.mapped.arrive(slot)


def keep_rows(walk: Walk, item: Item, chunk: Any, k_slot: Any) -> None:
    """Sets rows of features, v and g to 0 that do not count."""
    own = walk.own
    slot, count = own.values.slot(chunk), item.rows_within(chunk, walk.arrays.lengths)
    own.values.produced.wait(slot)
    for half in range(2):
        mosaic.keep_rows(own.k.at[k_slot, half], count)
        for tiles in (own.g, own.v):
            mosaic.keep_rows(walk.tiling.half_of(tiles, slot, half), count)


def values(walk: Walk) -> None:
    """Computes half of dq's columns, with the same half of S and z in registers."""
    walk.each(functools.partial(multiply_piece, walk))
    plgpu.wait_smem_to_gmem(0)


def multiply_piece(walk: Walk, item: Item) -> None:
    own, half = walk.own, mosaic.as_slot(mosaic.group(), 2)
    head = walk.tiling.head_of(item.head, half)
    own.start_loaded.wait()
    # A product with the identity loads the transpose of the start.
    same = ones_where(walk, mosaic.hidden_position(0) == mosaic.hidden_position(1))
    (S,) = multiply((mosaic.zeros(HALF, walk.spec.V), [(same, walk.start_in(half).T)]))
    if walk.has_units:
        S *= mosaic.in_rows(load(own.start_units.at[half], OF_COLUMNS), HALF)
    totals = mosaic.in_columns(load(own.z.at[half], OF_ROWS), ALIKE)  # [64, 8]
    one = functools.partial(multiply_chunk, walk, item, half, head)
    lax.fori_loop(0, item.chunks, one, (S, totals, jnp.float32(1)))


def multiply_chunk(walk: Walk, item: Item, half: Any, head: Any, number: Any, carried: Any) -> Any:
    """Carries half of F: S [64, V], z in 8 equal columns, and the factor of both from the chunk's
    middle row to its last."""
    own, (S, totals, to_end) = walk.own, carried
    chunk = chunk_of(walk, item, half, head, number)
    chunk = chunk._replace(borders=walk.borders(item, number))
    own.values.produced.wait(chunk.slot)
    own.mapped.wait(chunk.k_slot)
    if walk.gated:
        gates = walk.gates_in(walk.tiling.rows_in(own.gates, chunk.k_slot, half), walk.some_steep)
        onto = to_end * gates.to_middle()
        S, totals, to_end = S * onto, totals * onto, gates.from_middle()
        chunk = chunk._replace(gates=gates, lasting=jnp.exp2(gates.since_middle()))
    few = initial = None
    if walk.few_chunks:
        few = walk.sees_few_keys(item, number)
        # Where dq of the last chunk was.
        rest_of_keys = own.dq.at[half, pl.ds((1 - chunk.parity) * C, C)]
        chunk = chunk._replace(few=few, rest_of_keys=rest_of_keys)
        pl.when(few)(functools.partial(map_keys, walk, chunk))
    if walk.few_chunks > 1:
        of_rest = functools.partial(rest_of_state, walk, chunk, S)
        initial = lax.cond(few, of_rest, lambda: mosaic.zeros(C, HALF))
    (w,) = multiply(
        (mosaic.zeros(C, C), [(chunk.g, chunk.v.T)]),
        meanwhile=lambda: publish(walk, half, S, totals),
    )
    of_state: Any = None
    if walk.leaves_state:
        keep_state(walk, chunk)
    if walk.some_steep:
        own.queries.produced.wait(chunk.q_slot)
        D, z, S, totals, of_state = read_one_by_one(walk, chunk, w, S, totals)
    else:
        D, z, S, totals = chunk.borders.either(
            functools.partial(read_at_border, walk, chunk, w, totals),
            functools.partial(read_at_once, walk, chunk, w, initial, S, totals),
        )
    if walk.gated or walk.arrays.borders is not None:
        plgpu.commit_smem()  # reads finish before the next loads overwrite them

    def let_values_go() -> None:
        own.values.consumed.arrive(chunk.slot)

    if few is None:
        let_values_go()
    else:
        pl.when(~few)(let_values_go)
    own.keys.consumed.arrive(chunk.k_slot)
    if walk.leaves_state:

        @pl.when(flow_places.is_kept(walk.spec, number))
        def _() -> None:  # S and z, ahead of what replaces them
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    write_rows(walk, chunk, D, z, of_state)
    if few is not None:
        # Here, where no other sum takes registers.
        add_rest = functools.partial(behind_rest, walk, chunk, S, totals)
        S, totals = lax.cond(few, add_rest, lambda: (S, totals))
        pl.when(few)(let_values_go)
    return S, totals, to_end


def chunk_of(walk: Walk, item: Item, half: Any, head: Any, number: Any) -> Chunk:
    own = walk.own
    slot, q_slot = own.values.slot(number), own.queries.slot(number)
    k_slot, parity = own.keys.slot(number), slot_of(number, 2)
    count = item.rows_within(number, walk.arrays.lengths)
    g, v = (walk.tiling.head_in(tiles, slot, half) for tiles in (own.g, own.v))
    features = own.k.at[k_slot, half]
    return Chunk(
        item, number, half, head, slot, q_slot, k_slot, parity, count, features=features, g=g, v=v
    )


def publish(walk: Walk, half: Any, S: jax.Array, totals: jax.Array) -> None:
    """S and z as products read them."""
    own, dtype = walk.own, walk.tiling.dtype
    if walk.has_units:
        units = mosaic.units_of_rows([S])
        own.units.at[half][...] = units
        S = mosaic.in_units(S, units)
    if walk.gated:
        mosaic.store_transposed(own.s.at[half], S.astype(dtype))
        if walk.splits:
            # The stores of dq that lay there.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            rest = S - S.astype(dtype).astype(F32)
            mosaic.store_transposed(walk.start_in(half), rest.astype(dtype))
    else:
        own.s.at[half][...] = S.astype(dtype)
    if walk.sums_keys:
        own.z.at[half][...] = jnp.max(totals, axis=1)  # all columns are equal
    plgpu.commit_smem()


def keep_state(walk: Walk, chunk: Chunk) -> None:
    """The state ahead of the chunk, if it is kept; once for a group of heads."""
    own, left, group_size = walk.own, walk.left, walk.group_size
    item, half, head = chunk.item, chunk.half, chunk.head
    kept = flow_places.is_kept(walk.spec, chunk.number)
    if group_size > 1:
        kept &= lax.rem(head, group_size) == 0

    @pl.when(kept)
    def _() -> None:
        of_state = head if group_size == 1 else lax.div(head, group_size)
        at = item.batch, of_state, flow_places.place(walk.spec, walk.deal, item, chunk.number)
        columns = walk.tiling.columns_of(half)
        plgpu.copy_smem_to_gmem(own.s.at[half], left.kv.at[(*at, slice(None), columns)])
        if left.kv_units is not None:
            plgpu.copy_smem_to_gmem(own.units.at[half], left.kv_units.at[(*at, columns)])
        if left.k_sum is not None:
            plgpu.copy_smem_to_gmem(own.z.at[half], left.k_sum.at[(*at, columns)])
