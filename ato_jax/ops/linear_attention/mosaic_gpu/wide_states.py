"""The states that runs of 256 rows start from, of causal heads of 129 to 256 columns: of keys,
ahead of each run,

    S = sum_j phi(k_j) v_j^T [F, V],  z = sum_j phi(k_j) [F]

or, with what `wide_runs.py` leaves of each row, of queries, behind each run, by walks from the end,

    R = sum_i phi'_i g_i^T [F, V],  u = -sum_i e_i phi'_i [F],  phi'_i = phi(q_i) inverse_i

    memory    loads chunks of x and y, which are k and v or q and g, as slots come free
    sums      phi(x)^T [64, C] in registers, times 128 columns of y; where a run begins, stores the
              sums [64, 128] as they are by then

So a piece is walked by as many blocks as have a part of its state, and these are enough to fill the
card where other kernels need more pieces. Where values are three times 64 columns, both blocks make
those in the middle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, OF_COLUMNS, OF_ROWS, Item, load, multiply, slot_of
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

RUN = 4  # chunks
# Of keys, and of queries with their inverse and e: two blocks share a multiprocessor.
STAGES, STAGES_OF_QUERIES = 4, 3
SUMS, MEMORY = range(2)
WARPGROUPS = 2
COLUMNS = 2  # blocks of 64 values


# What a chunk takes in the sums of pieces, of its time here; another kernel and a scan, in chunks.
CHUNK_OF_SUMS, CUT = 0.4, 4.0


def chunks_at_once(spec: LinearAttentionSpec) -> int:
    """What pieces are made of: of wide heads, whole runs."""
    return RUN if frame.is_wide(spec) else 1


def pieces_of(spec: LinearAttentionSpec, blocks: int) -> int:
    """So many that all multiprocessors have a part of a state to walk, and few rows are read
    twice."""
    runs, parts = runs_of(spec), spec.B * spec.G * parts_of_state(spec)

    def cost(pieces: int) -> float:
        each = int(pl.cdiv(runs, pieces)) * RUN
        # A multiprocessor has room for two blocks, which share its time.
        found = max(1.0, parts * pieces / blocks) * each
        if pieces > 1:
            found += CUT + CHUNK_OF_SUMS * max(1.0, parts * (pieces - 1) / blocks) * each
        return found

    return min(range(1, runs + 1), key=cost)


def parts_of_state(spec: LinearAttentionSpec) -> int:
    """How many blocks share a state."""
    return spec.D // HALF * int(pl.cdiv(spec.V // HALF, COLUMNS))


def runs_of(spec: LinearAttentionSpec) -> int:
    return int(pl.cdiv(spec.T, RUN * C))


def wide_states(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    name: str,
    x: jax.Array,
    y: jax.Array,
    start: tuple[jax.Array, jax.Array],
    of_rows: Sequence[jax.Array] = (),
) -> tuple[jax.Array, jax.Array]:
    """[B, heads, runs, F, V] in bfloat16, and of each chunk [B, heads, 4 runs, F] in float32.

    Args:
      deal: counts heads, and its pieces are whole runs.
      start: [B, heads, P or more, F, V] in bfloat16 and [B, heads, P or more, F] in float32, ahead
        of each piece as it is walked.
      of_rows: inverse and e of queries, [B, heads, T up to a whole chunk] in float32; they are
        walked from the end. Of keys none.
    """
    tiling, maps = frame.tiling(spec), feature_maps.features(spec)
    parts, values = parts_of_state(spec), spec.V // HALF
    shares = int(pl.cdiv(values, COLUMNS))
    from_the_end = bool(of_rows)
    heads = deal.heads
    # Of two blocks on a multiprocessor one multiplies while the other one waits.
    deal = dataclasses.replace(deal, heads=heads * parts, most_blocks=2 * deal.most_blocks)
    stages = STAGES_OF_QUERIES if of_rows else STAGES
    scratch = dict(
        x_s=tiling.shared(stages, C, HALF),
        y_s=tiling.shared(stages, COLUMNS, C, HALF),
        state_s=tiling.shared(COLUMNS, HALF, HALF),
        loaded=plgpu.Barrier(num_arrivals=1 + COLUMNS + len(of_rows), num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        start_loaded=plgpu.Barrier(num_arrivals=COLUMNS),
        start_free=plgpu.Barrier(num_arrivals=1),
    )
    if of_rows:
        scratch["rows_s"] = plgpu.SMEM((stages, len(of_rows), C), F32)

    def body(
        x_ref: Any,
        y_ref: Any,
        start_ref: Any,
        vector_ref: Any,
        *refs: Any,
        x_s: Any,
        y_s: Any,
        state_s: Any,
        loaded: Any,
        free: Any,
        start_loaded: Any,
        start_free: Any,
        rows_s: Any = None,
    ) -> None:
        *row_refs, states_ref, vectors_ref = refs

        def share_of(item: Item) -> tuple[Any, Any, Any]:
            """Its head, its block of 64 features, and the first of its blocks of 64 values."""
            part = lax.rem(item.head, parts)
            first = jnp.minimum(lax.rem(part, shares) * COLUMNS, values - COLUMNS)
            return lax.div(item.head, parts), lax.div(part, shares), first

        def place_of(item: Item, chunk: Any) -> Any:
            """Of a chunk as it is walked its number in memory, within the piece."""
            return item.chunks - 1 - chunk if from_the_end else chunk

        def of_state(ref: Any, item: Item, number: Any, column: int) -> Any:
            head, block, first = share_of(item)
            own = pl.ds(block * HALF, HALF), pl.ds((first + column) * HALF, HALF)
            return ref.at[(item.batch, head, number, *own)]

        def load_piece(item: Item) -> None:
            head, block, first = share_of(item)

            @pl.when(item.number > 0)
            def _() -> None:
                plgpu.barrier_wait(start_free)

            for column in range(COLUMNS):
                source = of_state(start_ref, item, item.piece, column)
                plgpu.copy_gmem_to_smem(source, state_s.at[column], start_loaded)

            def load_chunk(chunk: Any, _: None) -> None:
                step, rows = item.before + chunk, item.rows(place_of(item, chunk))
                slot = slot_of(step, stages)
                mosaic.wait_until_free(free, step, stages)
                source = tiling.part(x_ref, item, rows, head, block)
                plgpu.copy_gmem_to_smem(source, x_s.at[slot], loaded.at[slot])
                for column in range(COLUMNS):
                    source = tiling.part(y_ref, item, rows, head, first + column)
                    plgpu.copy_gmem_to_smem(source, y_s.at[slot, column], loaded.at[slot])
                for number, ref in enumerate(row_refs):
                    source = ref.at[item.batch, head, rows]
                    plgpu.copy_gmem_to_smem(source, rows_s.at[slot, number], loaded.at[slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def sum_piece(item: Item) -> None:
            head, block, _ = share_of(item)
            of_block = pl.ds(block * HALF, HALF)
            first_chunk = lax.div(item.first_row, C)

            def mapped(x: jax.Array, slot: Any, place: Any) -> tuple[jax.Array, jax.Array]:
                """phi(x) [HALF, C], and what the chunk adds to the vector."""
                if not of_rows:
                    phi = maps.transposed_keys(x, block * HALF if tiling.is_filled else 0)
                    return phi, jnp.sum(phi.astype(F32), axis=1)
                inverse, e = (load(rows_s.at[slot, number], OF_COLUMNS) for number in range(2))
                phi = maps.unrounded(x) * mosaic.in_rows(inverse, HALF)
                e = mosaic.in_rows(e, HALF)
                if spec.T % C and not maps.slope_is_known:
                    # Beyond the end g and e are 0, but phi(0) inverse may be large or not finite.
                    here = mosaic.hidden_position(1) < spec.T - item.first_row - place * C
                    phi, e = jnp.where(here, phi, 0.0), jnp.where(here, e, 0.0)
                return mosaic.rounded(phi), -jnp.sum(phi * e, axis=1)

            plgpu.barrier_wait(start_loaded)
            sums = tuple(load(state_s.at[column]).astype(F32) for column in range(COLUMNS))
            of_start = vector_ref.at[item.batch, head, item.piece, of_block]
            # A mesh's axes belong to the type of what is loaded, but not to that of a sum.
            vector = load(of_start, OF_ROWS, optimized=False) + 0.0

            def sum_chunk(chunk: Any, carried: Any) -> Any:
                sums, vector = carried
                slot, place = slot_of(item.before + chunk, stages), place_of(item, chunk)
                number = first_chunk + place
                begins = lax.rem(place, RUN) == (RUN - 1 if from_the_end else 0)

                @pl.when(begins | (chunk == 0))
                def _() -> None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for column, own in enumerate(sums):
                        state_s.at[column][...] = own.astype(BF16)
                    plgpu.commit_smem()
                    for column in range(COLUMNS):
                        target = of_state(states_ref, item, lax.div(number, RUN), column)
                        plgpu.copy_smem_to_gmem(state_s.at[column], target)

                @pl.when(lax.rem(lax.rem(item.head, parts), shares) == 0)
                def _() -> None:
                    vectors_ref.at[item.batch, head, number, of_block][...] = vector

                plgpu.barrier_wait(loaded.at[slot])
                phi, added = mapped(mosaic.load_transposed(x_s.at[slot]), slot, place)
                sums = multiply(
                    *((own, [(phi, y_s.at[slot, column])]) for column, own in enumerate(sums))
                )
                plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
                plgpu.barrier_arrive(free.at[slot])
                return tuple(sums), vector + added

            lax.fori_loop(0, item.chunks, sum_chunk, (sums, vector))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(start_free)

        @pl.when(mosaic.group() == MEMORY)
        def _memory() -> None:
            steps = deal.each(load_piece)
            plgpu.barrier_wait(start_free)
            mosaic.await_the_last(free, steps, stages)

        @pl.when(mosaic.group() == SUMS)
        def _sums() -> None:
            deal.each(sum_piece)
            plgpu.wait_smem_to_gmem(0)

    runs = runs_of(spec)
    out_type = (
        jax.ShapeDtypeStruct((spec.B, heads, runs, spec.D, spec.V), BF16),
        jax.ShapeDtypeStruct((spec.B, heads, runs * RUN, spec.D), F32),
    )
    arrays = x, y, *start, *of_rows
    return frame.launch(body, name, deal, out_type, scratch, arrays, warpgroups=WARPGROUPS)
