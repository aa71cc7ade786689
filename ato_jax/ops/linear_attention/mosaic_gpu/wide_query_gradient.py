"""dq [B, T, H, D] of heads of 129 to 256 columns, where every query sees every key.

`bidirectional.py` launches it with S [F, V] and z [F], the sums over all keys.
`whole_query_gradient.py` is the same for heads of up to 128 columns; read it first. With g the
cotangent of out:

    G_i   = g_i S^T,  den_i = phi(q_i) . z,  inverse_i = 1 / max(den_i, least)
    e_i   = phi(q_i) . G_i / den_i,  0 where den_i <= least
    dq_i  = (G_i - e_i z) inverse_i phi'(q_i)

Without a normaliser inverse is 1 and e is 0, and S contains the scale. With one, inverse and e of
each row are written for `whole_sums.py`, which computes the sums over queries: beside S there is no
room for them here.

    memory    loads S of a head, and chunks of q and g, as slots come free
    dq        each warpgroup has 64 columns of dq, which take g's place once all have multiplied g

Once a chunk the warpgroups exchange their terms of e and den. z is read from global memory, since
neither registers nor shared memory have room for it.

In float16 (`whole_units.py`) S has a unit of its head. With a normaliser S is passed as means b of
the values, and with the shares w of a query

    P_i  = g_i b^T,  w_i = phi(q_i) z inverse_i,  e_i = w_i . P_i
    dq_i = (P_i - e_i) phi'(q_i) z inverse_i

phi'(q_i) z inverse_i is multiplied from left to right: z inverse_i alone may be large, while the
product is 0 where phi' is 0, and about 1 at most where phi' is about phi(q_i).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_COLUMNS, OF_ROWS, Item, load, slot_of
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame, row_copies
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def wide_query_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    g: jax.Array,
    s: jax.Array,
    z: jax.Array,
    least: jax.Array,
    units: jax.Array | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """dq; and with a normaliser inverse and e, [B, H, T up to a whole chunk] float32 each. Rows
    behind the lengths of queries have a gradient and an e of 0.

    Args:
      s: [B, G, F, V] in the dtype of tiles; in float16 with a normaliser the means b.
      z: [B, G, F] float32.
      least: [B, G] float32, the least denominator.
      units: [B, G] float32 of s, in float16 without a normaliser.
      lengths: [B] of queries.
    """
    tiling, maps = frame.tiling(spec), feature_maps.features(spec)
    group_size = spec.H // spec.G
    of_shares = mosaic.has_units(tiling.dtype) and spec.normalize
    workers = spec.D // HALF
    warpgroups = workers + 1
    # As many slots of q and g as fit beside S. dq stays in g's slot until the next chunk's product.
    q_slots, slots = (1, 2) if workers > 3 else (2, 4)
    scratch = dict(
        q_s=tiling.of_rows(q_slots, workers, C, HALF),
        g_s=tiling.of_rows(slots, workers, C, HALF),
        s_s=tiling.shared(workers, HALF, spec.V),
        # Each warpgroup's terms of e and den; then, in the first one's place, inverse and e.
        parts_s=plgpu.SMEM((workers, 2, C), F32),
        q_loaded=plgpu.Barrier(num_arrivals=workers, num_barriers=q_slots),
        q_free=plgpu.Barrier(num_arrivals=workers, num_barriers=q_slots),
        loaded=plgpu.Barrier(num_arrivals=workers, num_barriers=slots),
        free=plgpu.Barrier(num_arrivals=workers, num_barriers=slots),
        multiplied=plgpu.Barrier(num_arrivals=workers),
        added=plgpu.Barrier(num_arrivals=workers),
        s_loaded=plgpu.Barrier(num_arrivals=workers),
        s_free=plgpu.Barrier(num_arrivals=workers),
    )

    def body(
        q_ref: Any,
        g_ref: Any,
        s_ref: Any,
        z_ref: Any,
        least_ref: Any,
        *refs: Any,
        q_s: Any,
        g_s: Any,
        s_s: Any,
        parts_s: Any,
        q_loaded: Any,
        q_free: Any,
        loaded: Any,
        free: Any,
        multiplied: Any,
        added: Any,
        s_loaded: Any,
        s_free: Any,
    ) -> None:
        own = mosaic.group()
        rest = list(refs)
        units_ref: Any = None if units is None else rest.pop(0)
        lengths_ref: Any = None if lengths is None else rest.pop(0)
        dq_ref, *row_refs = rest

        def load_piece(item: Item) -> None:
            of_head = item.batch, lax.div(item.head, group_size)

            pl.when(item.number > 0)(lambda: plgpu.barrier_wait(s_free))
            for block in range(workers):
                source = s_ref.at[(*of_head, pl.ds(block * HALF, HALF))]
                plgpu.copy_gmem_to_smem(source, s_s.at[block], s_loaded)

            def load_chunk(chunk: Any, _: None) -> None:
                step, rows = item.before + chunk, item.rows(chunk)
                for ref, tiles, count, barriers, frees in (
                    (g_ref, g_s, slots, loaded, free),
                    (q_ref, q_s, q_slots, q_loaded, q_free),
                ):
                    slot = slot_of(step, count)
                    mosaic.wait_until_free(frees, step, count)
                    for block in range(workers):
                        own_part = ref, item, rows, item.head, block, tiles.at[slot, block]
                        row_copies.copy_block(tiling, *own_part, barriers.at[slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def write_piece(item: Item) -> None:
            of_head = item.batch, lax.div(item.head, group_size)
            plgpu.barrier_wait(s_loaded)

            def z() -> jax.Array:
                """z, loaded at each use: there are no registers to keep it in."""
                of_own = z_ref.at[(*of_head, pl.ds(own * HALF, HALF))]
                return mosaic.in_rows(load(of_own, OF_COLUMNS, optimized=False), C)

            def write_chunk(chunk: Any, _carry: None) -> None:
                step = item.before + chunk
                slot, q_slot = slot_of(step, slots), slot_of(step, q_slots)
                own_dq, count = g_s.at[slot, own], item.rows_within(chunk, lengths_ref)

                def meanwhile() -> tuple[jax.Array, jax.Array]:
                    plgpu.barrier_wait(q_loaded.at[q_slot])
                    x = load(q_s.at[q_slot, own])
                    phi_q = mosaic.kept(maps.unrounded(x), count)
                    plgpu.commit_smem()  # these reads finish before the next load overwrites them
                    plgpu.barrier_arrive(q_free.at[q_slot])
                    # The chunk before has been stored by now.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                    @pl.when(step > 0)
                    def _() -> None:
                        plgpu.barrier_arrive(free.at[slot_of(step - 1, slots)])

                    return x, phi_q

                plgpu.barrier_wait(loaded.at[slot])
                products = [
                    (g_s.at[slot, block], s_s.at[own, :, pl.ds(block * HALF, HALF)].T)
                    for block in range(workers)
                ]
                G, (x, phi_q) = mosaic.multiply_while(products, (C, HALF), meanwhile)
                G = mosaic.kept(G if units_ref is None else G * units_ref[of_head], count)
                inverse: Any = None
                if spec.normalize:
                    of_phi = phi_q * z() if of_shares else phi_q
                    sums = jnp.sum(of_phi * G, axis=1), jnp.sum(phi_q * z(), axis=1)
                    parts_s.at[own, 0][...], parts_s.at[own, 1][...] = sums
                plgpu.barrier_arrive(multiplied)
                plgpu.barrier_wait(multiplied)
                if spec.normalize:
                    of_e, den = (
                        sum(load(parts_s.at[n, number], OF_ROWS) for n in range(workers))
                        for number in range(2)
                    )
                    plgpu.barrier_arrive(added)
                    least = least_ref[of_head]
                    plgpu.barrier_wait(added)
                    inverse = 1.0 / jnp.maximum(den, least)
                    e = jnp.where(den > least, of_e * inverse, 0.0)

                    @pl.when(own == 0)
                    def _() -> None:
                        parts_s.at[0, 0][...], parts_s.at[0, 1][...] = inverse, e

                    e = mosaic.in_columns(e, HALF)
                    G = G - e if of_shares else (G - e * z()) * mosaic.in_columns(inverse, HALF)
                slope = maps.slope_of(x, phi_q)
                if of_shares:
                    slope = slope * z() * mosaic.in_columns(inverse, HALF)
                own_dq[...] = mosaic.kept(G * slope, count).astype(tiling.dtype)
                plgpu.commit_smem()
                rows = item.rows(chunk)
                row_copies.leave_block(tiling, own_dq, dq_ref, item, rows, item.head, own)

                @pl.when(own == 0)
                def _() -> None:
                    for number, ref in enumerate(row_refs):
                        target = ref.at[item.batch, item.head, rows]
                        plgpu.copy_smem_to_gmem(parts_s.at[0, number], target)

            lax.fori_loop(0, item.chunks, write_chunk, None)
            plgpu.barrier_arrive(s_free)

        @pl.when(own == workers)
        def _memory() -> None:
            mosaic.set_registers(mosaic.MEMORY_REGISTERS, warpgroups)
            steps = deal.each(load_piece)
            plgpu.barrier_wait(s_free)
            mosaic.await_the_last(free, steps, slots)
            mosaic.await_the_last(q_free, steps, q_slots)

        @pl.when(own < workers)
        def _dq() -> None:
            mosaic.set_registers(mosaic.workers_registers(workers), warpgroups)
            steps = deal.each(write_piece)
            plgpu.wait_smem_to_gmem(0)
            plgpu.barrier_arrive(free.at[slot_of(steps - 1, slots)])

    rows = jax.ShapeDtypeStruct((spec.B, spec.H, mosaic.whole_chunks(spec.T)), F32)
    out_type = (jax.ShapeDtypeStruct(q.shape, tiling.dtype), *([rows] * (2 * spec.normalize)))
    arrays = q, g, s, z, least, *(x for x in (units, lengths) if x is not None)
    found = frame.launch(
        body, "wide_query_gradient", deal, out_type, scratch, arrays, warpgroups=warpgroups
    )
    return tuple(found)
