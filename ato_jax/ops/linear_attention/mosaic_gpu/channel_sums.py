"""The sums over the keys of each piece with a decay per step and channel, and how steep chunks are.

`causal.py` launches it before the scan over pieces and of `channel_output.py`.
Read `channel.py` first. The sums are scaled to the last row T of the piece. For the last piece they
are left out, unless the call returns its state.

    S = sum_j v_j phi(k_j)^T exp2(G_T - G_j) [V, F],  z = sum_j phi(k_j) exp2(G_T - G_j) [F]

Chunk by chunk, with k'_j = phi(k_j) exp2(G_C - G_j) for the last row C of the chunk, this is
S = exp2(G_C) S + v^T k'. No exponent is positive, however strong a gate is.

    memory    loads chunks of k, v and the gates
    features  two warpgroups with half of F each: they store k' in place of k, and sum z
    values    two warpgroups with half of V each: they keep S in registers

Where a tile holds two heads, each half is one of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF, Item
from ato_jax.ops.linear_attention.mosaic_gpu import (
    channel,
    channel_blocks,
    chunk_borders,
    frame,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, F
from ato_jax.ops.linear_attention.scans.borders import NO_BORDERS, OfSequence
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

STAGES, GATES_STAGES = 3, 1
WARPGROUPS = 5
VALUES_REGISTERS, FEATURES_REGISTERS = 96, 128


def channel_sums(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    k: jax.Array,
    v: jax.Array,
    gates: jax.Array,
    borders: OfSequence = NO_BORDERS,
    k_powers: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Launches the kernel. It returns in float32 kv [B, G, P, V, F]; k_sum [B, G, P, F]; the sums
    of each piece's gates, [B, G, P, F]; and `least`, from which `channel.turns_of` computes the
    number of turns of each chunk. With segments the sums are over the rows of `borders.adding`.

    Args:
      k_powers: [B, G], in float16 log2 of the power of two by which keys, and so both sums, are
        multiplied (`channel_powers.py`).
    """
    # One item for each block, since there is room for the sums of one.
    tiling = frame.tiling(spec)
    deal = dataclasses.replace(deal, most_blocks=deal.items)
    heads = frame.heads_of_tile(spec)
    scratch = dict(
        k_s=tiling.tiles(STAGES),
        v_s=tiling.shared(STAGES, 2, C, HALF),
        gates_s=tiling.of_rows_in_float32(GATES_STAGES, 2, C, HALF),
        rounded_s=channel.shared(spec, 2, C, HALF),
        keeps_s=plgpu.SMEM((STAGES, F), F32),
        least_s=plgpu.SMEM((2, C), F32),
        halves_s=channel.shared(spec, C, C),
        until_end_s=channel.shared(spec, C, C),
        ones_s=tiling.shared(2, ALIKE, C),
        all_s=channel.shared(spec, 2, ALIKE, C),
        total_s=tiling.shared(2, HALF, F // 2, dtype=F32),
        columns_s=plgpu.SMEM((2, 2, HALF), F32),
        loaded=plgpu.Barrier(num_arrivals=heads, num_barriers=STAGES),
        v_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        gates_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=GATES_STAGES),
        mapped=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
        gates_free=plgpu.Barrier(num_arrivals=2, num_barriers=GATES_STAGES),
        weights_stored=plgpu.Barrier(num_arrivals=2),
    )

    def body(
        k_ref: Any,
        v_ref: Any,
        gates_ref: Any,
        *refs: Any,
        k_s: Any,
        v_s: Any,
        gates_s: Any,
        rounded_s: Any,
        keeps_s: Any,
        least_s: Any,
        halves_s: Any,
        until_end_s: Any,
        ones_s: Any,
        all_s: Any,
        total_s: Any,
        columns_s: Any,
        loaded: Any,
        v_loaded: Any,
        gates_loaded: Any,
        mapped: Any,
        free: Any,
        gates_free: Any,
        weights_stored: Any,
    ) -> None:
        *border_refs, kv_ref, k_sum_ref, lost_ref, least_ref = refs
        powers_ref = None if k_powers is None else border_refs.pop()
        begins_ref, chunks_ref, adding_ref = border_refs or (None, None, None)

        def summed(item: Item) -> Any:
            """The number of chunks of an item that are summed up."""
            if spec.return_state:
                return item.chunks
            return jnp.where(item.piece < deal.pieces - 1, item.chunks, 0)

        def load_piece(item: Item) -> None:
            def load_chunk(chunk: Any, _: None) -> None:
                rows = item.rows(chunk)
                slot, gates_slot = (
                    mosaic.slot_of(chunk, STAGES),
                    mosaic.slot_of(chunk, GATES_STAGES),
                )

                @pl.when(chunk < summed(item))
                def _load_summed() -> None:
                    mosaic.wait_until_free(free, chunk, STAGES)
                    k_head = channel_blocks.head_of_features(spec, k_ref, item.head)
                    tiling.copy_tile(k_ref, item, rows, k_head, k_s, slot, loaded)
                    v_head = channel_blocks.head_of_values(spec, v_ref, item.head)
                    for half in range(2):
                        source = tiling.part(v_ref, item, rows, v_head, half)
                        plgpu.copy_gmem_to_smem(source, v_s.at[slot, half], v_loaded.at[slot])

                mosaic.wait_until_free(gates_free, chunk, GATES_STAGES)
                gates_head = channel_blocks.head_of_features(spec, gates_ref, item.head)
                for half in range(2):
                    source = tiling.part(gates_ref, item, rows, gates_head, half)
                    own = gates_s.at[gates_slot, half]
                    plgpu.copy_gmem_to_smem(source, own, gates_loaded.at[gates_slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)
            mosaic.await_the_last(free, summed(item), STAGES)
            mosaic.await_the_last(gates_free, item.chunks, GATES_STAGES)

        def map_piece(item: Item, half: int) -> None:
            columns = pl.ds(half * HALF, HALF)
            rounded, ones = rounded_s.at[half], ones_s.at[half]
            of_piece = item.batch, tiling.head_of(item.head, half), item.piece

            def take_gates(chunk: Any) -> None:
                borders = chunk_borders.of_chunk(begins_ref, chunks_ref, item, chunk)
                slot = mosaic.slot_of(chunk, GATES_STAGES)
                plgpu.barrier_wait(gates_loaded.at[slot])
                channel.round_gates(gates_s.at[slot, half], rounded, borders)
                plgpu.commit_smem()
                plgpu.barrier_arrive(gates_free.at[slot])

            def store_least(chunk: Any, halves: jax.Array) -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                least_s.at[half][...] = jnp.min(halves, axis=1)
                plgpu.commit_smem()
                number = lax.div(item.first_row, C) + chunk
                least = least_ref.at[item.batch, item.head, number, half]
                plgpu.copy_smem_to_gmem(least_s.at[half], least)

            def map_chunk(chunk: Any, carried: Any) -> Any:
                z, lost = carried  # [HALF, ALIKE] each
                slot = mosaic.slot_of(chunk, STAGES)
                own = tiling.half_of(k_s, slot, half)
                take_gates(chunk)
                halves, until_end, total = mosaic.multiply(
                    channel.sums_of(halves_s, rounded),
                    channel.sums_of(until_end_s, rounded),
                    channel.sums_by_channel(rounded, all_s.at[half]),
                )
                store_least(chunk, halves)
                keeps = jnp.exp2(total)
                plgpu.barrier_wait(loaded.at[slot])
                keeps_s.at[slot, columns][...] = jnp.max(keeps, axis=1)
                if powers_ref is not None:
                    until_end += powers_ref[item.batch, tiling.head_of(item.head, half)]
                channel.map_in_place(spec, own, half, until_end, are_keys=True)
                if adding_ref is not None:
                    chunk_borders.keep_within(adding_ref, item, chunk, own)
                plgpu.commit_smem()
                plgpu.barrier_arrive(mapped.at[slot])
                (z,) = mosaic.multiply((z * keeps, [(own.T, ones.T)]))
                plgpu.barrier_arrive(free.at[slot])
                return z, lost + total

            def classify_chunk(chunk: Any, _: None) -> None:
                take_gates(chunk)
                (halves,) = mosaic.multiply(channel.sums_of(halves_s, rounded))
                store_least(chunk, halves)

            none = mosaic.zeros(HALF, ALIKE)
            found = lax.fori_loop(0, summed(item), map_chunk, (none, none))
            lax.fori_loop(summed(item), item.chunks, classify_chunk, None)
            for number, (ref, rows) in enumerate(zip((k_sum_ref, lost_ref), found, strict=True)):
                columns_s.at[half, number][...] = jnp.sum(rows, axis=1) * (1 / ALIKE)
                plgpu.commit_smem()
                target = ref.at[(*of_piece, tiling.columns_of(half))]
                plgpu.copy_smem_to_gmem(columns_s.at[half, number], target)

        def multiply_piece(item: Item) -> None:
            half = mosaic.group()
            own = () if heads == 1 else (pl.ds(half * HALF, HALF),)  # the columns of its head

            def multiply_chunk(chunk: Any, total: jax.Array) -> jax.Array:
                slot = mosaic.slot_of(chunk, STAGES)
                plgpu.barrier_wait(v_loaded.at[slot])
                plgpu.barrier_wait(mapped.at[slot])
                keeps = mosaic.load(keeps_s.at[(slot, *own)], mosaic.OF_COLUMNS)
                total *= mosaic.in_rows(keeps, HALF)
                features = tiling.head_in(k_s, slot, half)
                (total,) = mosaic.multiply((total, [(v_s.at[slot, half].T, features)]))
                plgpu.barrier_arrive(free.at[slot])
                return total

            total = lax.fori_loop(0, summed(item), multiply_chunk, mosaic.zeros(HALF, spec.F))
            of_piece = item.batch, tiling.head_of(item.head, half), item.piece
            for number in range(spec.F // HALF):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                total_s.at[half][...] = total[:, number * HALF : (number + 1) * HALF]
                plgpu.commit_smem()
                block = tiling.columns_of(half), pl.ds(number * HALF, HALF)
                target = kv_ref.at[(*of_piece, *block)]
                plgpu.copy_smem_to_gmem(total_s.at[half], target)

        @pl.when(mosaic.group() == frame.MEMORY)
        def _memory() -> None:
            mosaic.set_registers(mosaic.MEMORY_REGISTERS, WARPGROUPS)
            deal.each(load_piece)

        for half in range(2):

            @pl.when(mosaic.group() == frame.FEATURES + half)
            def _features(half: int = half) -> None:
                mosaic.set_registers(FEATURES_REGISTERS, WARPGROUPS)
                mosaic.store_transposed(ones_s.at[half], mosaic.ones(C, ALIKE, tiling.dtype))
                channel.store_all(all_s.at[half])
                if half:
                    halves_s[...] = channel.of_halves()
                else:
                    until_end_s[...] = channel.until_end()
                plgpu.commit_smem()
                plgpu.barrier_arrive(weights_stored)
                plgpu.barrier_wait(weights_stored)
                deal.each(lambda item: map_piece(item, half))
                plgpu.wait_smem_to_gmem(0)

        @pl.when(mosaic.group() < frame.MEMORY)
        def _values() -> None:
            mosaic.set_registers(VALUES_REGISTERS, WARPGROUPS)
            deal.each(multiply_piece)
            plgpu.wait_smem_to_gmem(0)

    of_pieces = spec.B, spec.G, deal.pieces
    chunks = pl.cdiv(deal.length, C)
    out_type = (
        jax.ShapeDtypeStruct((*of_pieces, spec.V, spec.F), F32),
        jax.ShapeDtypeStruct((*of_pieces, spec.F), F32),
        jax.ShapeDtypeStruct((*of_pieces, spec.F), F32),
        jax.ShapeDtypeStruct((deal.B, deal.heads, chunks, 2, C), F32),
    )
    arrays = [k, v, gates, *borders.arrays("begins", "chunks", "adding")]
    if k_powers is not None:
        arrays.append(k_powers)
    return frame.launch(
        body,
        "channel_sums",
        deal,
        out_type,
        scratch,
        arrays,
        warpgroups=WARPGROUPS,
        own_barriers=True,
    )
