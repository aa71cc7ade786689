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

    memory    loads S and z of a piece, and its chunks
    features  maps k in place
    values    two warpgroups with half of F each: S_half^T [64, V] in registers, w, and the same
              half of G and z_i

Both warpgroups of values compute all of w; every other product is over their half of F. Once a
chunk they exchange their terms of the two row sums. A block has one piece: with a loop over several
pieces the registers do not suffice.

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
(`chunks_in_two_parts`). The warpgroups of values then map k, each its half, and the second part of
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
from ato_jax.ops.linear_attention.mosaic_gpu.frame import FEATURES, MEMORY, C
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
    GATED_REGISTERS,
    K_STAGES,
    OWN_REGISTERS,
    Q_STAGES,
    STAGES,
    Arrays,
    Chunk,
    Left,
    Storage,
    Walk,
    scratch_of,
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
    bodies = [
        (_body(one, tuple(given), tuple(out_type)), scratch_of(one))
        for one in (walk, dataclasses.replace(walk, some_steep=True))[: 1 + walk.gated]
    ]
    name = "query_gradient" if deal.end is None else "later_query_gradient"
    found = frame.launch(
        *(bodies[0][0], name, deal, tuple(out_type.values()), bodies[0][1]),
        tuple(given.values()),
        rest=bodies[1] if walk.gated else None,
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


def _body(walk: Walk, inputs: Sequence[str], outputs: Sequence[str]) -> mosaic.Body:
    """The kernel, over arrays of these names."""

    def body(*refs: Any, **scratch: Any) -> None:
        arrays = Arrays(**dict(zip(inputs, refs, strict=False)))
        left = Left(**dict(zip(outputs, refs[len(inputs) :], strict=True)))
        bound = dataclasses.replace(walk, arrays=arrays, left=left, own=Storage(**scratch))
        values_registers, features_registers = GATED_REGISTERS if walk.gated else OWN_REGISTERS

        @pl.when(mosaic.group() == MEMORY)
        def _memory() -> None:
            mosaic.set_registers(mosaic.MEMORY_REGISTERS, frame.WARPGROUPS)
            memory(bound)

        @pl.when(mosaic.group() == FEATURES)
        def _features() -> None:
            mosaic.set_registers(features_registers, frame.WARPGROUPS)
            bound.each(functools.partial(map_piece, bound))

        @pl.when(mosaic.group() < MEMORY)
        def _values() -> None:
            mosaic.set_registers(values_registers, frame.WARPGROUPS)
            bound.each(functools.partial(multiply_piece, bound))
            plgpu.wait_smem_to_gmem(0)

    return body


def memory(walk: Walk) -> None:
    """Loads pieces and chunks."""
    own = walk.own
    steps = walk.each(functools.partial(load_piece, walk))
    mosaic.await_the_last(own.free, steps, STAGES)
    mosaic.await_the_last(own.k_free, steps, K_STAGES)
    mosaic.await_the_last(own.q_free, steps, Q_STAGES)


def load_piece(walk: Walk, item: Item) -> None:
    own, arrays, tiling = walk.own, walk.arrays, walk.tiling
    kv_item = walk.of_keys(item)
    plgpu.copy_gmem_to_smem(arrays.ones, own.ones, own.start_loaded)
    for half in range(2):
        head, columns = tiling.head_of(kv_item.head, half), tiling.columns_of(half)
        of_piece = item.batch, head, item.piece
        if walk.has_units:
            source = arrays.s_units.at[of_piece]
            plgpu.copy_gmem_to_smem(source, own.start_units.at[half], own.start_loaded)
        if arrays.least is not None:
            source = arrays.least.at[item.batch, head]  # [64]
            plgpu.copy_gmem_to_smem(source, own.least.at[half], own.start_loaded)
        source = arrays.s.at[(*of_piece, slice(None), columns)]
        target = mosaic.for_copy(walk.start_in(half))
        plgpu.copy_gmem_to_smem(source, target, own.start_loaded)
        source = arrays.z.at[(*of_piece, columns)]
        plgpu.copy_gmem_to_smem(source, own.z.at[half], own.start_loaded)

    def load_chunk(chunk: Any, _: None) -> None:
        rows = item.rows(chunk)
        slot = slot_of(chunk, STAGES)
        mosaic.wait_until_free(own.free, chunk, STAGES)
        for ref, tiles, head in ((arrays.g, own.g, item.head), (arrays.v, own.v, kv_item.head)):
            tiling.copy_tile(ref, item, rows, head, tiles, slot, own.loaded)  # [64, V]
        for ref, tiles, head, stages, loaded, free in (
            (arrays.k, own.k, kv_item.head, K_STAGES, own.k_loaded, own.k_free),
            (arrays.q, own.q, item.head, Q_STAGES, own.q_loaded, own.q_free),
        ):
            slot = slot_of(chunk, stages)
            mosaic.wait_until_free(free, chunk, stages)
            for half in range(2):
                plgpu.copy_gmem_to_smem(
                    tiling.part(ref, item, rows, head, half),  # [64, 64]
                    mosaic.for_copy(tiles.at[slot, half]),
                    loaded.at[slot],
                )
            if walk.gated and ref is arrays.k:
                tiling.copy_vector(arrays.gates, kv_item, rows, own.gates, slot, own.k_loaded)
        if walk.given:
            for ref, target in ((arrays.inverse, own.inverse), (arrays.e, own.e)):
                slot = slot_of(chunk, Q_STAGES)
                tiling.copy_vector(ref, item, rows, target, slot, own.q_loaded)  # [64]

    lax.fori_loop(0, item.chunks, load_chunk, None)


def map_piece(walk: Walk, item: Item) -> None:
    """Maps k in place."""
    lax.fori_loop(0, item.chunks, lambda chunk, _: map_chunk(walk, item, chunk), None)


def map_chunk(walk: Walk, item: Item, chunk: Any) -> None:
    own, heads = walk.own, walk.heads
    slot = slot_of(chunk, K_STAGES)
    plgpu.barrier_wait(own.k_loaded.at[slot])
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
    plgpu.barrier_arrive(own.k_mapped.at[slot])


def keep_rows(walk: Walk, item: Item, chunk: Any, k_slot: Any) -> None:
    """Sets rows of features, v and g to 0 that do not count."""
    own = walk.own
    slot, count = slot_of(chunk, STAGES), item.rows_within(chunk, walk.arrays.lengths)
    plgpu.barrier_wait(own.loaded.at[slot])
    for half in range(2):
        mosaic.keep_rows(own.k.at[k_slot, half], count)
        for tiles in (own.g, own.v):
            mosaic.keep_rows(walk.tiling.half_of(tiles, slot, half), count)


def multiply_piece(walk: Walk, item: Item) -> None:
    """Computes half of F, and carries S [64, V] and the same half of z, in 8 equal columns."""
    own, half = walk.own, mosaic.group()
    head = walk.tiling.head_of(item.head, half)
    plgpu.barrier_wait(own.start_loaded)
    # A product with the identity loads the transpose of the start.
    same = ones_where(walk, mosaic.hidden_position(0) == mosaic.hidden_position(1))
    (S,) = multiply((mosaic.zeros(HALF, walk.spec.V), [(same, walk.start_in(half).T)]))
    if walk.has_units:
        S *= mosaic.in_rows(load(own.start_units.at[half], OF_COLUMNS), HALF)
    totals = mosaic.in_columns(load(own.z.at[half], OF_ROWS), ALIKE)  # [64, 8]
    one = functools.partial(multiply_chunk, walk, item, half, head)
    lax.fori_loop(0, item.chunks, one, (S, totals, jnp.float32(1)))


def multiply_chunk(walk: Walk, item: Item, half: Any, head: Any, number: Any, carried: Any) -> Any:
    own, (S, totals, to_end) = walk.own, carried
    chunk = chunk_of(walk, item, half, head, number)
    chunk = chunk._replace(borders=walk.borders(item, number))
    plgpu.barrier_wait(own.loaded.at[chunk.slot])
    plgpu.barrier_wait(own.k_mapped.at[chunk.k_slot])
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
        plgpu.barrier_wait(own.q_loaded.at[chunk.q_slot])
        D, z, S, totals, of_state = read_one_by_one(walk, chunk, w, S, totals)
    else:
        D, z, S, totals = chunk.borders.either(
            functools.partial(read_at_border, walk, chunk, w, totals),
            functools.partial(read_at_once, walk, chunk, w, initial, S, totals),
        )
    if walk.gated or walk.arrays.borders is not None:
        plgpu.commit_smem()  # reads finish before the next loads overwrite them

    def let_values_go() -> None:
        plgpu.barrier_arrive(own.free.at[chunk.slot])

    if few is None:
        let_values_go()
    else:
        pl.when(~few)(let_values_go)
    plgpu.barrier_arrive(own.k_free.at[chunk.k_slot])
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
    slot, q_slot = slot_of(number, STAGES), slot_of(number, Q_STAGES)
    k_slot, parity = slot_of(number, K_STAGES), slot_of(number, 2)
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
