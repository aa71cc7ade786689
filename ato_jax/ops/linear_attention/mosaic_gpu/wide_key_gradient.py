"""dk and dv [B, T, G, D] of heads of 129 to 256 columns, where every query sees every key.

`bidirectional.py` launches it with R [F, V], in the dtype of tiles, and u [F], the sums over all
queries. `whole_key_gradient.py` is the same for heads of up to 128 columns; read it first.

    dv_j = R^T phi(k_j)
    dk_j = (R v_j + u) phi'(k_j)

    memory       loads R and u of a head, and by turns chunks of k and v, into one ring of slots
    gradients    each warpgroup has 64 columns of dk and dv. It maps its columns of k in place; when
                 all have multiplied by phi(k), it stores dv from its place, and later dk from v's

In float16 (`whole_units.py`) R has a unit of its head, by which products are multiplied. With a
normaliser phi(k) becomes shares, which are multiplied by `LARGEST`. Without one phi(k) is rounded
in a unit of its row, by which dv is multiplied; for this unit the warpgroups exchange the largest
magnitudes of their columns. Features of identity are exact and have no unit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_COLUMNS, OF_ROWS, Item, load, multiply, slot_of
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame, row_copies, whole_units
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.whole_units import LARGEST, SumsOfQueries
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def wide_key_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    k: jax.Array,
    v: jax.Array,
    sums: SumsOfQueries,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """dk and dv, which are 0 in rows behind the lengths of keys, [B]."""
    tiling, maps = frame.tiling(spec), feature_maps.features(spec)
    workers = spec.D // HALF
    warpgroups = workers + 1
    slots = 3 if workers > 3 else 6  # what R leaves room for
    of_rows = whole_units.has_units_of_features(spec) and not spec.normalize
    scratch = dict(
        x_s=tiling.of_rows(slots, workers, C, HALF),
        r_s=tiling.shared(workers, HALF, spec.V),
        u_s=plgpu.SMEM((workers, HALF), F32),
        loaded=plgpu.Barrier(num_arrivals=workers, num_barriers=slots),
        free=plgpu.Barrier(num_arrivals=workers, num_barriers=slots),
        mapped=plgpu.Barrier(num_arrivals=workers),
        k_multiplied=plgpu.Barrier(num_arrivals=workers),
        v_multiplied=plgpu.Barrier(num_arrivals=workers),
        r_loaded=plgpu.Barrier(num_arrivals=2 * workers),
        r_free=plgpu.Barrier(num_arrivals=workers),
    )
    if sums.inverse is not None:
        scratch["inverse_s"] = plgpu.SMEM((workers, HALF), F32)
        scratch["r_loaded"] = plgpu.Barrier(num_arrivals=3 * workers)
    if of_rows:
        scratch["largest_s"] = plgpu.SMEM((workers, C), F32)
        scratch["largest_stored"] = plgpu.Barrier(num_arrivals=workers)

    def body(
        k_ref: Any,
        v_ref: Any,
        r_ref: Any,
        u_ref: Any,
        *refs: Any,
        x_s: Any,
        r_s: Any,
        u_s: Any,
        loaded: Any,
        free: Any,
        mapped: Any,
        k_multiplied: Any,
        v_multiplied: Any,
        r_loaded: Any,
        r_free: Any,
        inverse_s: Any = None,
        largest_s: Any = None,
        largest_stored: Any = None,
    ) -> None:
        own = mosaic.group()
        *given, dk_ref, dv_ref = refs
        inverse_ref: Any = given.pop() if sums.inverse is not None else None
        units_ref: Any = given.pop() if sums.units is not None else None
        (lengths_ref,) = given or (None,)

        def load_piece(item: Item) -> None:
            pl.when(item.number > 0)(lambda: plgpu.barrier_wait(r_free))
            of_heads = [(r_ref, r_s), (u_ref, u_s)]
            if inverse_ref is not None:
                of_heads.append((inverse_ref, inverse_s))
            for block in range(workers):
                rows = pl.ds(block * HALF, HALF)
                for ref, own_s in of_heads:
                    source = ref.at[item.batch, item.head, rows]
                    plgpu.copy_gmem_to_smem(source, own_s.at[block], r_loaded)

            def load_chunk(chunk: Any, _: None) -> None:
                for number, ref in enumerate((k_ref, v_ref)):
                    tile = 2 * (item.before + chunk) + number
                    slot = slot_of(tile, slots)
                    mosaic.wait_until_free(free, tile, slots)
                    for block in range(workers):
                        own_part = ref, item, item.rows(chunk), item.head, block
                        tile = x_s.at[slot, block]
                        row_copies.copy_block(tiling, *own_part, tile, loaded.at[slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def write_piece(item: Item) -> None:
            plgpu.barrier_wait(r_loaded)
            unit: Any = None if units_ref is None else units_ref[item.batch, item.head]
            # Shares, and the factor `inverse` of dk, contain `LARGEST`.
            unit_of_shares = unit if inverse_ref is None else unit * (1 / LARGEST)

            def inverse_of_own() -> jax.Array:
                return mosaic.in_rows(load(inverse_s.at[own], OF_COLUMNS), C)

            def all_have(barrier: Any) -> None:
                plgpu.barrier_arrive(barrier)
                plgpu.barrier_wait(barrier)

            def write_chunk(chunk: Any, _: None) -> None:
                tile = 2 * (item.before + chunk)
                slot, v_slot = slot_of(tile, slots), slot_of(tile + 1, slots)
                count = item.rows_within(chunk, lengths_ref)

                def let_go(tile: Any) -> None:
                    """Releases a slot from which a result was stored, while a product runs."""
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                    @pl.when(tile >= 0)
                    def _() -> None:
                        plgpu.barrier_arrive(free.at[slot_of(tile, slots)])

                def write(slot: Any, found: jax.Array, ref: Any) -> None:
                    x_s.at[slot, own][...] = found.astype(tiling.dtype)
                    plgpu.commit_smem()
                    target = ref, item, item.rows(chunk), item.head, own
                    row_copies.leave_block(tiling, x_s.at[slot, own], *target)

                plgpu.barrier_wait(loaded.at[slot])
                first = own * HALF if tiling.is_filled else 0
                x = maps.present(load(x_s.at[slot, own]), first)
                own_units: Any = None
                if of_rows:
                    phi_k = mosaic.kept(maps.unrounded(x, first), count)
                    largest_s.at[own][...] = jnp.max(jnp.abs(phi_k), axis=1)
                    all_have(largest_stored)
                    parts = [load(largest_s.at[n], OF_ROWS) for n in range(workers)]
                    phi_k, own_units = whole_units.in_units_of(phi_k, parts)
                elif inverse_ref is None:
                    phi_k = mosaic.kept(maps.keys(x, first=first), count)
                else:
                    phi_k = mosaic.kept(maps.unrounded(x, first) * inverse_of_own(), count)
                    phi_k = mosaic.rounded(phi_k, tiling.dtype)
                x_s.at[slot, own][...] = phi_k
                plgpu.commit_smem()
                all_have(mapped)
                columns = pl.ds(own * HALF, HALF)
                products = [
                    (x_s.at[slot, block], r_s.at[block, :, columns]) for block in range(workers)
                ]
                (dv,) = multiply(
                    (mosaic.zeros(C, HALF), products), meanwhile=lambda: let_go(tile - 1)
                )
                all_have(k_multiplied)
                dv = dv if own_units is None else dv * mosaic.in_columns(own_units, HALF)
                write(slot, dv if unit is None else dv * unit_of_shares, dv_ref)
                plgpu.barrier_wait(loaded.at[v_slot])
                of_sum = mosaic.in_rows(load(u_s.at[own], OF_COLUMNS), C)
                of_sum = of_sum if unit is None else of_sum * (1 / unit)
                products = [
                    (x_s.at[v_slot, block], r_s.at[own, :, pl.ds(block * HALF, HALF)].T)
                    for block in range(workers)
                ]
                (dk,) = multiply((of_sum, products), meanwhile=lambda: let_go(tile))
                all_have(v_multiplied)
                dk = dk if unit is None else dk * unit_of_shares
                factor = None if inverse_ref is None else inverse_of_own
                dk = dk * whole_units.slope_of_keys(maps, x, phi_k, own_units, factor)
                write(v_slot, mosaic.kept(dk, count), dk_ref)

            lax.fori_loop(0, item.chunks, write_chunk, None)
            plgpu.barrier_arrive(r_free)

        @pl.when(own == workers)
        def _memory() -> None:
            mosaic.set_registers(mosaic.MEMORY_REGISTERS, warpgroups)
            steps = deal.each(load_piece)
            plgpu.barrier_wait(r_free)
            mosaic.await_the_last(free, 2 * steps, slots)

        @pl.when(own < workers)
        def _gradients() -> None:
            mosaic.set_registers(mosaic.workers_registers(workers), warpgroups)
            steps = deal.each(write_piece)
            plgpu.wait_smem_to_gmem(0)
            plgpu.barrier_arrive(free.at[slot_of(2 * steps - 1, slots)])

    out_type = tuple(jax.ShapeDtypeStruct(x.shape, tiling.dtype) for x in (k, v))
    arrays = [x for x in (k, v, sums.r, sums.u, lengths, *sums[2:]) if x is not None]
    return frame.launch(
        body, "wide_key_gradient", deal, out_type, scratch, arrays, warpgroups=warpgroups
    )
