"""The gradients of keys and values of 129 to 256 columns that every query sees, as in
`whole_key_gradient.py`, of R [F, V] (bfloat16) and u [F]:

    dv_j = R^T phi(k_j)
    dk_j = (R v_j + u) phi'(k_j)

    memory       loads R and u of a head, and chunks of k and of v by turns, as slots come free
    gradients    each 64 columns of both: maps its own of k in place, and where all have multiplied
                 these, dv lies in their place, and dk in v's
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, OF_COLUMNS, Item, load, multiply, slot_of
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


def wide_key_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    k: jax.Array,
    v: jax.Array,
    r: jax.Array,
    u: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """dk and dv, of r [B, G, F, V] in bfloat16 and u [B, G, F] in float32."""
    tiling, maps = frame.tiling(spec), feature_maps.features(spec)
    workers = spec.D // HALF
    warpgroups = workers + 1
    slots = 3 if workers > 3 else 6  # what R leaves room for
    scratch = dict(
        x_s=tiling.shared(slots, workers, C, HALF),
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

    def body(
        k_ref: Any,
        v_ref: Any,
        r_ref: Any,
        u_ref: Any,
        dk_ref: Any,
        dv_ref: Any,
        *,
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
    ) -> None:
        own = mosaic.group()

        def load_piece(item: Item) -> None:
            @pl.when(item.number > 0)
            def _() -> None:
                plgpu.barrier_wait(r_free)

            for block in range(workers):
                rows = pl.ds(block * HALF, HALF)
                for ref, own_s in ((r_ref, r_s), (u_ref, u_s)):
                    source = ref.at[item.batch, item.head, rows]
                    plgpu.copy_gmem_to_smem(source, own_s.at[block], r_loaded)

            def load_chunk(chunk: Any, _: None) -> None:
                for number, ref in enumerate((k_ref, v_ref)):
                    tile = 2 * (item.before + chunk) + number
                    slot = slot_of(tile, slots)
                    mosaic.wait_until_free(free, tile, slots)
                    for block in range(workers):
                        source = tiling.part(ref, item, item.rows(chunk), item.head, block)
                        plgpu.copy_gmem_to_smem(source, x_s.at[slot, block], loaded.at[slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def write_piece(item: Item) -> None:
            plgpu.barrier_wait(r_loaded)

            def all_have(barrier: Any) -> None:
                plgpu.barrier_arrive(barrier)
                plgpu.barrier_wait(barrier)

            def write_chunk(chunk: Any, _: None) -> None:
                tile = 2 * (item.before + chunk)
                slot, v_slot = slot_of(tile, slots), slot_of(tile + 1, slots)

                def let_go(tile: Any) -> None:
                    """Of what was stored from its place before the product that is in flight."""
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                    @pl.when(tile >= 0)
                    def _() -> None:
                        plgpu.barrier_arrive(free.at[slot_of(tile, slots)])

                def write(slot: Any, found: jax.Array, ref: Any) -> None:
                    x_s.at[slot, own][...] = found.astype(BF16)
                    plgpu.commit_smem()
                    target = tiling.part(ref, item, item.rows(chunk), item.head, own)
                    plgpu.copy_smem_to_gmem(x_s.at[slot, own], target)

                plgpu.barrier_wait(loaded.at[slot])
                first = own * HALF if tiling.is_filled else 0
                x = maps.present(load(x_s.at[slot, own]), first)
                phi_k = maps.keys(x, first=first)
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
                write(slot, dv, dv_ref)
                plgpu.barrier_wait(loaded.at[v_slot])
                of_sum = mosaic.in_rows(load(u_s.at[own], OF_COLUMNS), C)
                products = [
                    (x_s.at[v_slot, block], r_s.at[own, :, pl.ds(block * HALF, HALF)].T)
                    for block in range(workers)
                ]
                (dk,) = multiply((of_sum, products), meanwhile=lambda: let_go(tile))
                all_have(v_multiplied)
                write(v_slot, dk * maps.slope_of(x, phi_k).astype(F32), dk_ref)

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

    out_type = jax.ShapeDtypeStruct(k.shape, BF16), jax.ShapeDtypeStruct(v.shape, BF16)
    arrays = k, v, r, u
    return frame.launch(
        body, "wide_key_gradient", deal, out_type, scratch, arrays, warpgroups=warpgroups
    )
