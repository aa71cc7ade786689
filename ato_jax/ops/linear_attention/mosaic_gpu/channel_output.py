"""out [B, T, H, V] of causal calls with a decay per step and channel, one block for each piece.

`causal.py` launches it, after `channel_sums.py` and the scan over pieces. Read
`channel.py` first: it defines q^, k~, G, the middle row m, and turns. With S [V, F] and z [F] the
state ahead of the chunk, scaled to its middle row, the kernel is `output.py` with q^ and k~ in
place of phi(q) and phi(k):

    w[i, j] = q^_i . k~_j for j <= i of the same chunk, else 0
    out_i = (q^_i S^T + sum_j w[i, j] v_j) / max(q^_i . z + sum_j w[i, j], eps)
    S = exp2(G_m' - G_m) (S + v^T k~),  likewise z      for the middle row m' of the next chunk

    memory    loads S and z of a piece, and its chunks of q, k, v and gates
    features  two warpgroups with half of F each: they store q^ and k~ in place of q and k, keep z,
              and compute q^_i . z
    values    two warpgroups with half of V each: S_half [64, F] in registers, w, out_half

In a piece with steep chunks a step is a turn, and the chunk is loaded again for each of its turns.
A turn's part of out is 0 in all other rows, so the parts of a chunk's turns are added up.

Where features have either sign, products cancel and rounding errors do not: rounding each of q^,
k~, S or w, and out adds an error of 1.7e-3, in all 3.3e-3, twice that of rounding out alone, which
is the whole budget. So S and w are then multiplied in two parts: rounded, and what rounding left
off. The two parts of S take the same place in shared memory, one after the other.

Where segments begin in a chunk, masks apply to w, to what is read of S and z, and to the keys that
are added to S and z (`channel_turns.py`), and v^T k~ is a product of its own behind w.

Where a tile holds two heads, "half" means one of them, and products are over its 64 columns. Where
heads are cut into blocks (`channel_blocks.py`), the kernel returns numerators and denominators in
place of out. In float16 q^, k~, S and z are multiplied by powers of two (`channel_powers.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
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
    chunk_borders,
    chunk_decay,
    frame,
)
from ato_jax.ops.linear_attention.mosaic_gpu.channel_output_storage import (
    GATES_STAGES,
    STAGES,
    V_STAGES,
    storage,
)
from ato_jax.ops.linear_attention.mosaic_gpu.channel_powers import Power, Powers
from ato_jax.ops.linear_attention.mosaic_gpu.channel_turns import Masks, each_step
from ato_jax.ops.linear_attention.mosaic_gpu.frame import FEATURES, MEMORY, C
from ato_jax.ops.linear_attention.scans.borders import NO_BORDERS, OfSequence
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

WARPGROUPS = 5
MEMORY_REGISTERS = 32
# Registers a thread of values and features, by whether S and w are multiplied in two parts.
OWN_REGISTERS = {False: (136, 88), True: (160, 64)}


def channel_output(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    s: jax.Array,
    z: jax.Array,
    of_chunks: tuple[jax.Array, jax.Array, jax.Array],
    keeps_features: bool,
    borders: OfSequence = NO_BORDERS,
    powers: Powers | None = None,
) -> tuple[jax.Array, ...]:
    """Launches the kernel and returns out; or, where XLA adds up blocks (`channel_blocks.adds_up`),
    numerators in float32 and, if normalised, den [B, H, T up to a whole chunk]. If
    `keeps_features`, it also returns q^, k~, and the sums of the gates over each half of a chunk,
    [B, H, chunks, 2, F], which are valid in pieces that are not steep.

    Args:
      s, z: the state ahead of each piece, of the shapes that `output` takes.
      of_chunks: the gates; the number of turns of each chunk, [B, tiles, chunks]; and whether a
        piece has a chunk of more than one turn, [B, tiles, P]. There are G tiles, or G / 2 where a
        tile holds two heads.
      powers: in float16 (`channel_powers.py`), by which s and z are multiplied already.
    """
    # One item for each block: the storage of a piece's start is loaded once.
    tiling = frame.tiling(spec)
    deal = dataclasses.replace(deal, most_blocks=deal.items)
    heads = frame.heads_of_tile(spec)
    group_size = spec.H // spec.G
    adds_up = channel_blocks.adds_up(spec)
    leaves_den = adds_up and spec.normalize
    has_borders = borders.chunks is not None
    # In float16 a rounding leaves 2e-4, and 6e-4 is allowed.
    in_two_parts = not spec.feature_map.nonnegative and powers is None
    values_registers, features_registers = OWN_REGISTERS[in_two_parts]
    scratch = storage(spec, keeps_features, powers is not None)

    def body(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        s_ref: Any,
        z_ref: Any,
        gates_ref: Any,
        turns_ref: Any,
        steep_ref: Any,
        *refs: Any,
        q_s: Any,
        k_s: Any,
        v_s: Any,
        gates_s: Any,
        rounded_s: Any,
        s_s: Any,
        out_s: Any,
        z_s: Any,
        onto_s: Any,
        den_s: Any,
        z_rows_s: Any,
        ones_s: Any,
        halves_s: Any,
        since_middle_s: Any,
        loaded: Any,
        v_loaded: Any,
        gates_loaded: Any,
        mapped: Any,
        den_known: Any,
        free: Any,
        v_free: Any,
        gates_free: Any,
        start_loaded: Any,
        weights_stored: Any,
        both_s: Any = None,
        powers_s: Any = None,
    ) -> None:
        begins_ref, chunks_ref = refs[:2] if has_borders else (None, None)
        refs = refs[2 * has_borders :]
        (queries_ref, heads_ref), refs = (
            ((None, None), refs) if powers is None else (refs[:2], refs[2:])
        )
        out_ref, *kept = refs
        den_ref: Any = kept.pop(0) if leaves_den else None
        feature_refs = kept[:2]
        both_ref: Any = kept[2] if keeps_features else None

        def each(item: Item, start: Callable[[bool], Any], do: Callable[..., Any]) -> Any:
            head = lax.div(item.head, group_size)
            return each_step(steep_ref, turns_ref, item, head, start, do, powers is not None)

        def power_of(item: Item, half: Any, name: int) -> Any:
            """Returns one power of the head of keys that half a tile belongs to."""
            head = tiling.head_of(lax.div(item.head, group_size), half)
            return heads_ref[item.batch, head, name]

        def times(x: jax.Array, item: Item, half: Any, name: int) -> jax.Array:
            return x if powers is None else x * power_of(item, half, name)

        def load_piece(item: Item) -> None:
            kv_head = lax.div(item.head, group_size)
            for half in range(2):
                head, own = tiling.head_of(kv_head, half), tiling.columns_of(half)
                for ref, start in ((z_ref, z_s), (s_ref, s_s)):
                    source = ref.at[item.batch, head, item.piece, own]
                    plgpu.copy_gmem_to_smem(source, start.at[half], start_loaded)

            def leave_if(item: Item, condition: Any, leave: Callable[[], None]) -> None:
                # Heads that differ in the block of values alone have the same features.
                if (is_first := channel_blocks.has_first_values(spec, item.head)) is not None:
                    condition = is_first & condition
                pl.when(condition)(leave)

            def leave_features(chunk: Any) -> None:
                slot, rows = slot_of(chunk, STAGES), item.rows(chunk)
                plgpu.barrier_wait(mapped.at[slot])
                for own, ref in zip((q_s, k_s), feature_refs, strict=True):
                    head = channel_blocks.head_of_features(spec, ref, item.head)
                    tiling.leave_tile(own, slot, ref, item, rows, head)

            def load_step(step: Any, chunk: Any, turn: Any, _last: Any, carried: Any) -> Any:
                rows = item.rows(chunk)
                slot, v_slot = slot_of(step, STAGES), slot_of(step, V_STAGES)
                gates_slot = slot_of(step, GATES_STAGES)
                mosaic.wait_until_free(gates_free, step, GATES_STAGES)
                own_head = channel_blocks.head_of_features(spec, gates_ref, kv_head)
                for half in range(2):
                    source = tiling.part(gates_ref, item, rows, own_head, half)
                    own = gates_s.at[gates_slot, half]
                    plgpu.copy_gmem_to_smem(source, own, gates_loaded.at[gates_slot])
                mosaic.wait_until_free(free, step, STAGES)
                if keeps_features:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for ref, own, head in ((k_ref, k_s, kv_head), (q_ref, q_s, item.head)):
                    head = channel_blocks.head_of_features(spec, ref, head)
                    tiling.copy_tile(ref, item, rows, head, own, slot, loaded)
                if queries_ref is not None:
                    tiling.copy_vector(queries_ref, item, rows, powers_s, slot, loaded)
                mosaic.wait_until_free(v_free, step, V_STAGES)
                own_head = channel_blocks.head_of_values(spec, v_ref, kv_head)
                for half in range(2):
                    source = tiling.part(v_ref, item, rows, own_head, half)
                    plgpu.copy_gmem_to_smem(source, v_s.at[v_slot, half], v_loaded.at[v_slot])
                if keeps_features and turn is None:
                    # After the loads of the next chunk, which must not wait for these stores.
                    leave_if(item, chunk > 0, lambda: leave_features(chunk - 1))
                    leave_if(item, chunk == item.chunks - 1, lambda: leave_features(chunk))
                return carried

            steps = each(item, lambda _: None, load_step)
            mosaic.await_the_last(gates_free, steps, GATES_STAGES)
            mosaic.await_the_last(free, steps, STAGES)
            mosaic.await_the_last(v_free, steps, V_STAGES)

        def map_piece(item: Item, half: int) -> None:
            columns = pl.ds(half * HALF, HALF)
            own = (ref.at[half] for ref in (rounded_s, z_rows_s, ones_s, halves_s))
            rounded, z_rows, ones, halves = own
            plgpu.barrier_wait(start_loaded)
            totals = mosaic.in_columns(load(z_s.at[half], OF_ROWS), ALIKE)  # z

            def leave_halves(chunk: Any, both: tuple[jax.Array, jax.Array]) -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for number, total in enumerate(both):
                    both_s.at[half, number][...] = total
                plgpu.commit_smem()
                head, own = tiling.head_of(item.head, half), tiling.columns_of(half)
                at = item.batch, head, lax.div(item.first_row, C) + chunk
                for number in range(2):
                    target = both_ref.at[(*at, number, own)]
                    plgpu.copy_smem_to_gmem(both_s.at[half, number], target)

            def store_ones(first: Any = None) -> None:
                adds = mosaic.ones(C, ALIKE, tiling.dtype)
                adds = adds if first is None else mosaic.rows_within(adds, first, None)
                mosaic.store_transposed(ones, adds)
                plgpu.commit_smem()

            def map_step(
                step: Any, chunk: Any, turn: channel.Turn | None, _last: Any, carried: Any
            ) -> Any:
                totals, behind = carried
                borders = chunk_borders.of_chunk(begins_ref, chunks_ref, item, chunk)
                masks = Masks(borders, turn)
                slot, v_slot = slot_of(step, STAGES), slot_of(step, V_STAGES)
                gates_slot = slot_of(step, GATES_STAGES)
                own_q, own_k = (tiling.half_of(tiles, slot, half) for tiles in (q_s, k_s))
                if turn is not None:
                    channel.store_halves(halves, turn)
                plgpu.barrier_wait(gates_loaded.at[gates_slot])
                channel.round_gates(gates_s.at[gates_slot, half], rounded, borders)
                plgpu.commit_smem()
                plgpu.barrier_arrive(gates_free.at[gates_slot])
                weights = since_middle_s if turn is None else channel.since_middle(turn)
                since, both = multiply(
                    channel.sums_of(weights, rounded), channel.sums_by_channel(rounded, halves)
                )
                first, second = channel.halves(both)
                # Its square is the factor of the state, which may underflow in float32.
                onto = jnp.exp2((behind + first) * 0.5)
                if spec.normalize:
                    totals = chunk_decay.times_squares(totals, onto)
                    of_sums = times(totals, item, half, Power.SUMS)
                    mosaic.store_transposed(z_rows, of_sums.astype(tiling.dtype))
                plgpu.barrier_wait(loaded.at[slot])
                of_q: Any = since
                if powers is not None:
                    own_powers = load(tiling.rows_in(powers_s, slot, half), OF_ROWS)
                    of_q += mosaic.in_columns(own_powers, HALF)
                onto_s.at[slot, columns][...] = onto
                kept: Any = {"for_flows": keeps_features}
                channel.map_in_place(spec, own_q, half, of_q, turn, **kept)
                of_k: Any = -since
                if powers is not None:
                    of_k += power_of(item, half, Power.LOG_KEYS)
                channel.map_in_place(spec, own_k, half, of_k, turn, are_keys=True, **kept)
                plgpu.commit_smem()
                plgpu.barrier_arrive(mapped.at[slot])
                if keeps_features and turn is None:
                    leave_halves(chunk, (first, second))
                if spec.normalize:
                    borders.when_some(lambda: store_ones(masks.adds))
                    den, totals = multiply(
                        (mosaic.zeros(C, ALIKE), [(own_q, z_rows.T)]),
                        (masks.left(totals), [(own_k.T, ones.T)]),
                    )
                    den = borders.either(lambda: masks.reading(den), lambda: den)
                    if has_borders:
                        plgpu.commit_smem()  # all warps have multiplied by it
                    borders.when_some(store_ones)
                    plgpu.barrier_wait(v_loaded.at[v_slot])  # the old den in this slot was read
                    den = times(jnp.sum(den, axis=1) / ALIKE, item, half, Power.OVER_SUMS)
                    den_s.at[v_slot, half][...] = den
                    plgpu.barrier_arrive(den_known.at[v_slot])
                plgpu.barrier_arrive(free.at[slot])
                return totals, second

            none = plgpu.layout_cast(jnp.zeros((HALF,), F32), OF_ROWS)
            each(item, lambda _: (totals, none), map_step)

        def eps_and_scale(item: Item, half: Any, slot: Any) -> tuple[Any, Any]:
            """eps and the scale; in float16 of each row, since numerators and denominators contain
            the powers of the row and of the head."""
            if powers is None:
                return spec.eps, spec.scale
            row = load(tiling.rows_in(powers_s, slot, half), OF_ROWS)
            eps = jnp.exp2(row) * (spec.eps * power_of(item, half, Power.KEYS))
            return eps, jnp.exp2(-row) * (spec.scale * power_of(item, half, Power.OVER_KEYS))

        def multiply_piece(item: Item) -> None:
            half = mosaic.group()
            own = () if heads == 1 else (pl.ds(half * HALF, HALF),)  # the columns of its head
            plgpu.barrier_wait(start_loaded)
            S = load(s_s.at[half]).astype(F32)  # [HALF, F]
            S = times(S, item, half, Power.OVER_STATE)

            def multiply_step(
                step: Any, chunk: Any, turn: channel.Turn | None, is_last: Any, carried: Any
            ) -> Any:
                S, *found = carried
                borders = chunk_borders.of_chunk(begins_ref, chunks_ref, item, chunk)
                masks = Masks(borders, turn)
                # Then keys are masked before they are added to S, in a product of its own.
                adds_later = has_borders and turn is not None
                slot, v_slot = slot_of(step, STAGES), slot_of(step, V_STAGES)
                values = v_s.at[v_slot, half]
                plgpu.barrier_wait(mapped.at[slot])
                onto = mosaic.in_rows(load(onto_s.at[(slot, *own)], OF_COLUMNS), HALF)
                S = S * onto * onto
                q, k = (tiling.head_in(tiles, slot, half) for tiles in (q_s, k_s))
                of_rest: Any = None
                if in_two_parts:
                    s_s.at[half][...] = mosaic.rounded(S - mosaic.rounded(S).astype(F32))
                    plgpu.commit_smem()
                    (of_rest,) = multiply((mosaic.zeros(C, HALF), [(q, s_s.at[half].T)]))
                    plgpu.commit_smem()  # all warps have multiplied by it
                s_s.at[half][...] = times(S, item, half, Power.STATE).astype(tiling.dtype)
                eps, over = eps_and_scale(item, half, slot)
                plgpu.barrier_wait(v_loaded.at[v_slot])
                plgpu.commit_smem()
                products = [
                    (mosaic.zeros(C, C), [(q, k.T)]),
                    (of_rest if in_two_parts else mosaic.zeros(C, HALF), [(q, s_s.at[half].T)]),
                    (S, [(values.T, k)]),
                ]
                if adds_later:
                    w, out = multiply(*products[:2])
                else:
                    w, out, S = multiply(*products)
                    borders.unless_some(lambda: plgpu.barrier_arrive(free.at[slot]))
                out = times(out, item, half, Power.OVER_STATE)
                w, out = borders.either(
                    lambda: (jnp.where(borders.pairs_from(), w, 0.0), masks.reading(out)),
                    lambda: (w, out),
                )
                w = jnp.where(channel_blocks.sees(spec, item), w, 0.0)
                # Without the barrier the selected numbers would be rounded singly, not in pairs.
                w = lax.optimization_barrier(w)
                parts = [mosaic.rounded(w, tiling.dtype)]
                if in_two_parts:
                    parts.append(mosaic.rounded(w - parts[0].astype(F32)))
                (out,) = multiply((out, [(part, values) for part in parts]))

                def add_last_segment() -> jax.Array:
                    plgpu.commit_smem()  # all warps have multiplied by the values
                    mosaic.keep_rows_between(values, masks.adds, C)
                    plgpu.commit_smem()
                    ahead = masks.left(S) if adds_later else mosaic.zeros(*S.shape)
                    (found,) = multiply((ahead, [(values.T, k)]))
                    return found

                if adds_later:
                    S = add_last_segment()
                    plgpu.barrier_arrive(free.at[slot])
                elif has_borders:
                    S = borders.either(add_last_segment, lambda: S)
                    borders.when_some(lambda: plgpu.barrier_arrive(free.at[slot]))
                factor, of_row = over, None
                if spec.normalize:
                    den = jnp.sum(w if in_two_parts else parts[0].astype(F32), axis=1)
                    plgpu.barrier_wait(den_known.at[v_slot])
                    for number in range(2) if heads == 1 else (half,):
                        den = den + load(den_s.at[v_slot, number], OF_ROWS)
                    of_row = den if powers is None else den * over
                    factor = over if leaves_den else 1.0 / jnp.maximum(den, eps)
                factor = mosaic.in_columns(factor, HALF) if jnp.ndim(factor) else factor
                plgpu.commit_smem()  # all warps have multiplied by s_s, which the next step stores
                plgpu.barrier_arrive(v_free.at[v_slot])
                out = out * factor
                made = (out, of_row) if leaves_den else (out,)
                if turn is None:
                    store_chunk(chunk, *made)
                    return (S,)
                sums = [x + before for x, before in zip(made, found, strict=True)]
                pl.when(is_last)(lambda: store_chunk(chunk, *sums))
                return S, *(jnp.where(is_last, 0.0, x) for x in sums)

            def store_chunk(chunk: Any, out: jax.Array, den: Any = None) -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_s.at[half][...] = out.astype(out_s.dtype)
                plgpu.commit_smem()
                head = item.head
                if not adds_up:
                    head = channel_blocks.head_of_values(spec, out_ref, head)
                target = tiling.part(out_ref, item, item.rows(chunk), head, half)
                plgpu.copy_smem_to_gmem(out_s.at[half], target)
                if leaves_den:

                    @pl.when(half == 0)
                    def _() -> None:
                        # Stored from registers: shared memory has no room for den.
                        of_rows = den_ref.at[item.batch, item.head, item.rows(chunk)]
                        mosaic.store_in_memory(of_rows, den)

            def start(in_turns: bool) -> Any:
                if not in_turns:
                    return (S,)
                start = S, mosaic.zeros(C, HALF)
                if leaves_den:
                    return *start, plgpu.layout_cast(jnp.zeros((C,), F32), OF_ROWS)
                return start

            each(item, start, multiply_step)

        @pl.when(mosaic.group() == MEMORY)
        def _memory() -> None:
            mosaic.set_registers(MEMORY_REGISTERS, WARPGROUPS)
            deal.each(load_piece)
            if keeps_features:
                plgpu.wait_smem_to_gmem(0)

        for half in range(2):

            @pl.when(mosaic.group() == FEATURES + half)
            def _features(half: int = half) -> None:
                mosaic.set_registers(features_registers, WARPGROUPS)
                mosaic.store_transposed(ones_s.at[half], mosaic.ones(C, ALIKE, tiling.dtype))
                channel.store_halves(halves_s.at[half])
                if half == 0:
                    since_middle_s[...] = channel.since_middle()
                plgpu.commit_smem()
                plgpu.barrier_arrive(weights_stored)
                plgpu.barrier_wait(weights_stored)
                deal.each(lambda item: map_piece(item, half))
                if keeps_features:
                    plgpu.wait_smem_to_gmem(0)

        @pl.when(mosaic.group() < MEMORY)
        def _values() -> None:
            mosaic.set_registers(values_registers, WARPGROUPS)
            deal.each(multiply_piece)
            plgpu.wait_smem_to_gmem(0)

    dtype = F32 if adds_up else tiling.dtype
    out_type = [jax.ShapeDtypeStruct(frame.shape_of_values(spec, spec.H), dtype)]
    if leaves_den:
        den = jax.ShapeDtypeStruct((spec.B, spec.H, mosaic.whole_chunks(spec.T)), F32)
        out_type.append(den)
    if keeps_features:
        both = spec.B, spec.H, pl.cdiv(spec.T, C), 2, spec.F
        features = jax.ShapeDtypeStruct(q.shape, BF16)
        out_type += [features, features, jax.ShapeDtypeStruct(both, F32)]
    arrays = q, k, v, s, z, *of_chunks, *borders.arrays("begins", "chunks"), *(powers or ())
    found = frame.launch(
        body,
        "channel_output",
        deal,
        tuple(out_type),
        scratch,
        arrays,
        warpgroups=WARPGROUPS,
        own_barriers=True,
    )
    return tuple(found)
