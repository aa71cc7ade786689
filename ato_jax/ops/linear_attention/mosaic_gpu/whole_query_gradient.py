"""dq [B, T, H, D] where every query sees every key, without a decay, and the sums over queries.

`bidirectional.py` launches it with S [F, V] and z [F], the sums over all keys. R and u of each
piece are added up for `whole_key_gradient.py`. With g the cotangent of out, and phi'_i = phi(q_i)
inverse_i (phi'(q_i) is the derivative of phi):

    G_i   = g_i S^T                         the gradient of phi(q_i) without normaliser
    den_i = phi(q_i) . z,  inverse_i = 1 / max(den_i, least)
    e_i   = phi(q_i) . G_i / den_i = g_i . out_i,  0 where den_i <= least
    dq_i  = (G_i - e_i z) inverse_i phi'(q_i)
    R = sum_i phi'_i g_i^T [F, V],  u = -sum_i e_i phi'_i [F]     of the piece

Without a normaliser inverse is 1 and e is 0, and S contains the scale.

    memory    loads S and z of a head, and chunks of q and g
    dq        two warpgroups with half of F each: they map q once, compute dq, and store phi' to
              q's place
    sums      keeps R in registers

Once a chunk the warpgroups of dq exchange their terms of e and den. Features stay in float32, so
phi' is rounded once, and e follows from the same G and den as dq.

In float16 (`whole_units.py`) S has a unit of its head without a normaliser. With one S is passed as
means, and phi' are shares, which are multiplied by `LARGEST`. u is accumulated in a unit of its
half of F. Without a normaliser phi(q) is rounded in a unit of its half, the largest magnitude so
far in the piece over `LARGEST`, and R is accumulated in that unit; features of identity are exact
and have none.

Pallas adds no barriers around loads and stores here (`own_barriers`). A warp only stores where it
alone has loaded, or after `wait_smem_to_gmem`; and a warpgroup that waits on a barrier sees all
stores ahead of the arrivals on it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
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
from ato_jax.mosaic.scales import LEAST_UNIT
from ato_jax.mosaic.tiles import tiled
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame, row_copies, whole_units
from ato_jax.ops.linear_attention.mosaic_gpu.frame import MEMORY, C, F, V
from ato_jax.ops.linear_attention.mosaic_gpu.whole_units import LARGEST
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

SUMS = 3  # the warpgroup of the role sums; those of dq are 0 and 1
STAGES = 4
DQ_REGISTERS, SUMS_REGISTERS = 160, 168
COLUMNS = 32  # columns of R that are stored at once


def whole_query_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    g: jax.Array,
    s: jax.Array,
    z: jax.Array,
    least: jax.Array,
    lengths: jax.Array | None = None,
    units: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Launches the kernel. It returns dq; and R [B, H, P, F, V] and u [B, H, P, F] in float32, in
    float16 with a normaliser those of shares. Rows behind the lengths of queries have a gradient of
    0 and no part in the sums.

    Args:
      s: [B, G, F, V] in the dtype of tiles; in float16 with a normaliser the means of values.
      z: [B, G, F] float32.
      least: [B, G, C] float32, the least denominator, repeated C times.
      lengths: [B] of queries.
      units: [B, G] float32 of s, in float16 without a normaliser.
    """
    tiling, maps = row_copies.tiling(spec), feature_maps.features(spec)
    group_size = spec.H // spec.G
    scratch = dict(
        q_s=tiling.of_rows(STAGES, 2, C, HALF),
        g_s=tiling.tiles(STAGES),
        s_s=tiling.shared(2, HALF, V),
        z_s=plgpu.SMEM((2, HALF), F32),
        least_s=plgpu.SMEM((C,), F32),
        ones_s=tiling.shared(ALIKE, C),
        parts_s=plgpu.SMEM((2, 2, 2, C), F32),  # [even or odd chunk, half, terms of e or den]
        dq_s=tiling.of_rows(2, 2, C, HALF),
        r_s=tiling.shared(2, HALF, COLUMNS, dtype=F32),
        u_s=plgpu.SMEM((2, HALF), F32),
        loaded=plgpu.Barrier(num_arrivals=2 + row_copies.copies_of(tiling), num_barriers=STAGES),
        mapped=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        exchanged=plgpu.Barrier(num_arrivals=2),
        ones_stored=plgpu.Barrier(num_arrivals=1),
        s_loaded=plgpu.Barrier(num_arrivals=5),
        s_free=plgpu.Barrier(num_arrivals=2),
    )
    if lengths is not None:
        scratch["multiplied"] = plgpu.Barrier(num_arrivals=2)
    half_precision = mosaic.has_units(tiling.dtype)
    of_shares = half_precision and spec.normalize
    in_units = whole_units.has_units_of_features(spec) and not spec.normalize
    if of_shares or in_units:
        scratch["largest_s"] = plgpu.SMEM((2, C), F32)
        scratch["largest_stored"] = plgpu.Barrier(num_arrivals=1, num_barriers=2)
    if in_units:
        scratch["phi_units_s"] = plgpu.SMEM((STAGES, 2, C), F32)

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
        z_s: Any,
        least_s: Any,
        ones_s: Any,
        parts_s: Any,
        dq_s: Any,
        r_s: Any,
        u_s: Any,
        loaded: Any,
        mapped: Any,
        free: Any,
        exchanged: Any,
        ones_stored: Any,
        s_loaded: Any,
        s_free: Any,
        multiplied: Any = None,
        largest_s: Any = None,
        largest_stored: Any = None,
        phi_units_s: Any = None,
    ) -> None:
        *given, dq_ref, r_ref, u_ref = refs
        units_ref: Any = given.pop() if units is not None else None
        (lengths_ref,) = given or (None,)
        g_rows = tiled(g_s)

        def load_piece(item: Item) -> None:
            of_head = item.batch, lax.div(item.head, group_size)

            @pl.when(item.number > 0)
            def _() -> None:
                plgpu.barrier_wait(s_free)

            for half in range(2):
                rows = pl.ds(half * HALF, HALF)
                for ref, own in ((s_ref, s_s), (z_ref, z_s)):
                    plgpu.copy_gmem_to_smem(ref.at[(*of_head, rows)], own.at[half], s_loaded)
            plgpu.copy_gmem_to_smem(least_ref.at[of_head], least_s, s_loaded)

            def load_chunk(chunk: Any, _: None) -> None:
                step, rows = item.before + chunk, item.rows(chunk)
                slot = slot_of(step, STAGES)
                mosaic.wait_until_free(free, step, STAGES)
                for half in range(2):
                    of_half = q_ref, item, rows, item.head, half
                    own_q = q_s.at[slot, half]
                    row_copies.copy_block(tiling, *of_half, own_q, loaded.at[slot])
                tiling.copy_tile(g_ref, item, rows, item.head, g_s, slot, loaded)

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def least_unit() -> jax.Array:
            return plgpu.layout_cast(jnp.full((C,), LEAST_UNIT, F32), OF_ROWS)

        def first_carried() -> jax.Array:
            """The sum that u is made of, [C, HALF]; or the unit of phi(q), repeated in [C]."""
            return least_unit() if in_units else mosaic.zeros(C, HALF)

        def write_piece(item: Item) -> None:
            half = mosaic.group()
            s_unit: Any = None
            if units_ref is not None:
                s_unit = units_ref[item.batch, lax.div(item.head, group_size)]
            plgpu.barrier_wait(s_loaded)

            def z() -> jax.Array:
                """Read where it is needed: there are no registers to keep it in."""
                return mosaic.in_rows(load(z_s.at[half], OF_COLUMNS), C)

            def scaled(slope: jax.Array, inverse: Any) -> jax.Array:
                """The derivative of what shares have in place of phi(q). In this order it is 0
                where slope is, and near 1 at most where slope is about phi(q)."""
                return slope * z() * inverse if of_shares else slope

            def unit_of(x: jax.Array) -> jax.Array:
                """The largest magnitude of x [C, HALF] over `LARGEST`: [C] times the same."""
                own = largest_s.at[half]
                own[...] = jnp.max(jnp.abs(x), axis=1)
                plgpu.barrier_arrive(largest_stored.at[half])
                plgpu.barrier_wait(largest_stored.at[half])
                return mosaic.unit_of(own, C) * (1 / LARGEST)

            def mask_cotangents(slot: Any, count: Any) -> None:
                """Sets half the columns of g to 0 in rows that do not count, ahead of the sums:
                0 does not cancel NaN. Both halves have been multiplied with all of g."""

                @pl.when(count < C)
                def _() -> None:
                    plgpu.barrier_arrive(multiplied)
                    plgpu.barrier_wait(multiplied)
                    mosaic.keep_rows(g_rows.at[slot, :, pl.ds(half * HALF, HALF)], count)

            def write_chunk(chunk: Any, total: jax.Array) -> jax.Array:
                step = item.before + chunk
                slot, parity = slot_of(step, STAGES), slot_of(step, 2)
                own_q, own_dq = q_s.at[slot, half], dq_s.at[parity, half]
                count = item.rows_within(chunk, lengths_ref)

                def features() -> jax.Array:
                    x = load(own_q)
                    phi = maps.unrounded(maps.present(x, half * HALF) if in_units else x)
                    if count is not None:
                        return mosaic.kept(phi, count)
                    if maps.slope_is_known and not in_units or deal.length % C == 0:
                        return phi
                    # Beyond the end g is 0, but phi(0) inverse may be large or not finite, and
                    # phi(0) the largest of its half.
                    return mosaic.kept(phi, deal.length - item.first_row - chunk * C)

                plgpu.barrier_wait(loaded.at[slot])
                products = [(g_rows.at[slot], s_s.at[half].T)]
                G, phi_q = mosaic.multiply_while(products, (C, HALF), features)
                if s_unit is not None:
                    G = G * s_unit
                if count is not None:
                    mask_cotangents(slot, count)
                mapped_q, inverse = phi_q, None
                if spec.normalize:
                    of_phi = phi_q * z() if of_shares else phi_q
                    own_parts = jnp.sum(of_phi * G, axis=1), jnp.sum(phi_q * z(), axis=1)
                    for number, own in enumerate(own_parts):
                        parts_s.at[parity, half, number][...] = own
                    plgpu.barrier_arrive(exchanged)
                    plgpu.barrier_wait(exchanged)
                    of_e, den = (
                        own + load(parts_s.at[parity, 1 - half, number], OF_ROWS)
                        for number, own in enumerate(own_parts)
                    )
                    least = load(least_s, OF_ROWS)
                    inverse = 1.0 / jnp.maximum(den, least)
                    e = mosaic.in_columns(jnp.where(den > least, of_e * inverse, 0.0), HALF)
                    inverse = mosaic.in_columns(inverse, HALF)
                    mapped_q = (phi_q * z() if of_shares else phi_q) * inverse
                    total -= e * mapped_q
                    if of_shares:
                        G = G - e
                        mapped_q = mapped_q * LARGEST
                    else:
                        G = (G - e * z()) * inverse
                if not maps.slope_is_known:  # of x, which phi' replaces
                    G = G * scaled(maps.slope(load(own_q)), inverse)
                if in_units:
                    total = jnp.maximum(total, unit_of(mapped_q))
                    phi_units_s.at[slot, half][...] = total
                    mapped_q = mosaic.in_units(mapped_q, total)
                own_q[...] = mapped_q.astype(tiling.dtype)
                # Behind this wait the store of two chunks ago has read the slot.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                if maps.slope_is_known:
                    G = G * scaled(maps.slope_of_features(phi_q), inverse)
                own_dq[...] = mosaic.kept(G, count).astype(tiling.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(mapped.at[slot])
                target = dq_ref, item, item.rows(chunk), item.head, half
                row_copies.leave_block(tiling, own_dq, *target)
                return total

            total = lax.fori_loop(0, item.chunks, write_chunk, first_carried())
            plgpu.barrier_arrive(s_free)
            total = mosaic.zeros(C, HALF) if in_units else total
            # The sum over rows, by a product of the rows in two parts with ones.
            u_unit: Any = None
            if of_shares:
                u_unit = unit_of(total)
                total = mosaic.in_units(total, u_unit)
            rounded = mosaic.rounded(total, tiling.dtype)
            sums = mosaic.zeros(HALF, ALIKE)
            for one in (rounded, (total - rounded.astype(F32)).astype(tiling.dtype)):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                dq_s.at[0, half][...] = one
                plgpu.commit_smem()
                (sums,) = multiply((sums, [(dq_s.at[0, half].T, ones_s.T)]))
            u = jnp.max(sums, axis=1)  # all columns are equal
            u_s.at[half][...] = u if u_unit is None else u * u_unit
            plgpu.commit_smem()
            rows = pl.ds(half * HALF, HALF)
            plgpu.copy_smem_to_gmem(u_s.at[half], u_ref.at[item.batch, item.head, item.piece, rows])

        def sum_piece(item: Item) -> None:
            def units_in(slot: Any) -> list[jax.Array]:
                """The unit of phi(q) in each half, repeated in [HALF]."""
                return [load(phi_units_s.at[slot, half], OF_ROWS) for half in range(2)]

            def times(halves: Any, factors: list[jax.Array]) -> Any:
                pairs = zip(halves, factors, strict=True)
                return tuple(total * mosaic.in_columns(factor, V) for total, factor in pairs)

            def sum_chunk(chunk: Any, carried: Any) -> Any:
                halves, before = carried
                slot = slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(mapped.at[slot])
                if in_units:
                    units = units_in(slot)
                    halves = times(halves, [x / y for x, y in zip(before, units, strict=True)])
                    before = units
                halves = multiply(
                    *(
                        (total, [(q_s.at[slot, half].T, g_rows.at[slot])])
                        for half, total in enumerate(halves)
                    )
                )
                plgpu.barrier_arrive(free.at[slot])
                return halves, before

            start = mosaic.zeros(HALF, V), mosaic.zeros(HALF, V)
            units = [least_unit()] * 2 if in_units else []
            halves, units = lax.fori_loop(0, item.chunks, sum_chunk, (start, units))
            if in_units:
                halves = times(halves, units)
            if of_shares:
                halves = tuple(total * (1 / LARGEST) for total in halves)
            of_piece = item.batch, item.head, item.piece
            for column in range(0, V, COLUMNS):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                columns = slice(column, column + COLUMNS)
                for half, total in enumerate(halves):
                    r_s.at[half][...] = total[:, columns]
                plgpu.commit_smem()
                for half in range(2):
                    rows = pl.ds(half * HALF, HALF)
                    plgpu.copy_smem_to_gmem(
                        r_s.at[half], r_ref.at[(*of_piece, rows, pl.ds(column, COLUMNS))]
                    )

        @pl.when(mosaic.group() == MEMORY)
        def _memory() -> None:
            mosaic.set_registers(mosaic.MEMORY_REGISTERS, frame.WARPGROUPS)
            steps = deal.each(load_piece)
            plgpu.barrier_wait(s_free)
            mosaic.await_the_last(free, steps, STAGES)

        @pl.when(mosaic.group() == SUMS)
        def _sums() -> None:
            mosaic.set_registers(SUMS_REGISTERS, frame.WARPGROUPS)
            mosaic.store_transposed(ones_s, mosaic.ones(C, ALIKE, tiling.dtype))
            plgpu.commit_smem()
            plgpu.barrier_arrive(ones_stored)
            deal.each(sum_piece)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(mosaic.group() < MEMORY)
        def _dq() -> None:
            mosaic.set_registers(DQ_REGISTERS, frame.WARPGROUPS)
            plgpu.barrier_wait(ones_stored)
            deal.each(write_piece)
            plgpu.wait_smem_to_gmem(0)

    out_type = (
        jax.ShapeDtypeStruct(q.shape, tiling.dtype),
        jax.ShapeDtypeStruct((spec.B, spec.H, deal.pieces, F, V), F32),
        jax.ShapeDtypeStruct((spec.B, spec.H, deal.pieces, F), F32),
    )
    arrays = [q, g, s, z, least, *(x for x in (lengths, units) if x is not None)]
    return frame.launch(
        body, "whole_query_gradient", deal, out_type, scratch, arrays, own_barriers=True
    )
