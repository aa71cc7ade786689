"""The sums over the rows of each piece, [B, heads, P, F, V] and [B, heads, P, F] in float32.

`bidirectional.py` launches it where every query sees every key, and `wide_heads.py` for the pieces
of wide heads. The sums are over keys, or over queries with inverse and e of each row:

    S = sum_j phi(k_j) v_j^T [F, V],  z = sum_j phi(k_j) [F]
    R = sum_i phi'_i g_i^T [F, V],  u = -sum_i e_i phi'_i [F],  phi'_i = phi(q_i) inverse_i

    memory    loads chunks of x and y, which are k and v or q and g
    sums      each warpgroup has 64 rows of the sum: it multiplies phi(x)^T [64, C], in registers,
              by all columns of y

Where the sum fills more registers than a block has, two blocks have half of its rows each.

In float16 (`whole_units.py`) phi(k) is rounded in units, one for each feature: its largest
magnitude so far in the piece, over `LARGEST`. S is accumulated in these units, and z without.
Features of queries have such units, too, without a normaliser; with one, phi' are shares, which are
multiplied by `LARGEST`: phi'_i = phi(q_i) z inverse_i. Features of identity are exact and have no
unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_COLUMNS, OF_ROWS, Item, load, multiply, slot_of
from ato_jax.mosaic.tiles import tiled
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame, row_copies, whole_units
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.whole_units import LARGEST, LEAST_SUM
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

STAGES = 4
COLUMNS = 32  # columns of a sum that are stored at once
MOST_ROWS = 192  # the most rows of a sum that a block's registers hold


def blocks_of_state(spec: LinearAttentionSpec) -> int:
    """The number of blocks that share S or R, and so of items for each piece."""
    return 1 if spec.D <= MOST_ROWS else 2


def whole_sums(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    name: str,
    x: jax.Array,
    y: jax.Array,
    of_rows: Sequence[jax.Array] = (),
    lengths: jax.Array | None = None,
    z: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel, and returns S and z, or R and u.

    Args:
      deal: counts items, `blocks_of_state` for each head.
      of_rows: [B, heads, T up to a whole chunk] float32 each: inverse and e of queries; of keys (),
        or a factor of their features.
      lengths: of keys, [B] int32; rows behind them are left out.
      z: [B, G, F] float32, if the sums are to be those of shares of queries.
    """
    tiling = row_copies.by_blocks(spec, always=frame.is_wide(spec))
    maps = feature_maps.features(spec)
    parts = blocks_of_state(spec)
    workers = spec.D // parts // HALF
    warpgroups = workers + 1
    in_units = whole_units.has_units_of_features(spec) and not of_rows
    scratch = dict(
        x_s=tiling.of_rows(STAGES, workers, C, HALF),
        y_s=tiling.tiles(STAGES),
        total_s=tiling.shared(workers, HALF, COLUMNS, dtype=F32),
        vector_s=plgpu.SMEM((workers, HALF), F32),
        loaded=plgpu.Barrier(
            num_arrivals=workers + tiling.blocks + len(of_rows), num_barriers=STAGES
        ),
        free=plgpu.Barrier(num_arrivals=workers, num_barriers=STAGES),
    )
    if lengths is not None:
        scratch["masked"] = plgpu.Barrier(num_arrivals=workers)
    if of_rows:
        scratch["rows_s"] = plgpu.SMEM((STAGES, len(of_rows), C), F32)

    def body(
        x_ref: Any,
        y_ref: Any,
        *refs: Any,
        x_s: Any,
        y_s: Any,
        total_s: Any,
        vector_s: Any,
        loaded: Any,
        free: Any,
        rows_s: Any = None,
        masked: Any = None,
    ) -> None:
        *row_refs, total_ref, vector_ref = refs
        lengths_ref = None if lengths is None else row_refs.pop()
        z_ref: Any = None if z is None else row_refs.pop()

        def load_piece(item: Item) -> None:
            head, share = lax.div(item.head, parts), lax.rem(item.head, parts)

            def load_chunk(chunk: Any, _: None) -> None:
                step, rows = item.before + chunk, item.rows(chunk)
                slot = slot_of(step, STAGES)
                mosaic.wait_until_free(free, step, STAGES)
                for worker in range(workers):
                    of_worker = x_ref, item, rows, head, share * workers + worker
                    own = x_s.at[slot, worker]
                    row_copies.copy_block(tiling, *of_worker, own, loaded.at[slot])
                tiling.copy_tile(y_ref, item, rows, head, y_s, slot, loaded)
                for number, ref in enumerate(row_refs):
                    source = ref.at[item.batch, head, rows]
                    plgpu.copy_gmem_to_smem(source, rows_s.at[slot, number], loaded.at[slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def sum_piece(item: Item) -> None:
            worker = mosaic.group()
            head, share = lax.div(item.head, parts), lax.rem(item.head, parts)

            def there(found: jax.Array, chunk: Any) -> jax.Array:
                """found [HALF, C] in rows that there are, which are its columns; else 0."""
                here = item.rows_within(chunk, lengths_ref)
                if here is None:
                    here = deal.length - item.first_row - chunk * C
                return jnp.where(mosaic.hidden_position(1) < here, found.astype(F32), 0.0)

            z_own: Any = None
            if z_ref is not None:
                group, block = lax.div(head, spec.H // spec.G), share * workers + worker
                z_own = z_ref.at[item.batch, group, pl.ds(block * HALF, HALF)]
                z_own = load(z_own, OF_ROWS, optimized=False) * LARGEST

            def first_column() -> Any:
                first = worker * HALF
                return first + share * workers * HALF if tiling.is_filled and parts > 1 else first

            def mask_values(slot: Any, count: Any) -> None:
                """Sets rows of y that do not count to 0: each worker does so in some columns."""

                @pl.when(count < C)
                def _() -> None:
                    blocks = spec.V // HALF // workers
                    for block in range(blocks):
                        own = tiling.block_in(tiled(y_s).at[slot], worker * blocks + block)
                        mosaic.keep_rows(own, count)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(masked)
                    plgpu.barrier_wait(masked)

            def map_keys(x: jax.Array, slot: Any, chunk: Any) -> tuple[jax.Array, jax.Array]:
                """phi(k) of rows and columns that there are, and its sum over the rows."""
                first = first_column()
                if of_rows:
                    factor = mosaic.in_rows(load(rows_s.at[slot, 0], OF_COLUMNS), HALF)
                    phi = there(maps.unrounded_transposed_keys(x, first) * factor, chunk)
                    phi = mosaic.rounded(phi, tiling.dtype)
                else:
                    phi = maps.transposed_keys(x, first)
                    if lengths_ref is not None or deal.length % C:
                        phi = mosaic.rounded(there(phi, chunk), tiling.dtype)
                return phi, jnp.sum(phi.astype(F32), axis=1)

            def map_keys_in_units(
                x: jax.Array, chunk: Any, before: jax.Array
            ) -> tuple[jax.Array, jax.Array, jax.Array]:
                """phi(k) in units [HALF] of its features, which are at least those `before`; its
                sum over the rows; and the units, each the largest magnitude."""
                phi = maps.unrounded_transposed_keys(x, first_column())
                if lengths_ref is not None or deal.length % C:
                    phi = there(phi, chunk)
                size = phi if spec.feature_map.nonnegative else jnp.abs(phi)
                largest = jnp.maximum(jnp.max(size, axis=1), before)
                phi = mosaic.rounded(phi * mosaic.in_columns(LARGEST / largest, C), tiling.dtype)
                added = jnp.sum(phi.astype(F32), axis=1) * (largest * (1 / LARGEST))
                return phi, added, largest

            def map_queries(x: jax.Array, slot: Any, chunk: Any) -> tuple[jax.Array, jax.Array]:
                inverse, e = (load(rows_s.at[slot, number], OF_COLUMNS) for number in range(2))
                phi = maps.unrounded_transposed_queries(x, first_column())
                phi = phi if z_own is None else phi * mosaic.in_columns(z_own, C)
                phi = phi * mosaic.in_rows(inverse, HALF)
                # Beyond the end g and e are 0, but phi(0) inverse may be large or not finite.
                masks = lengths_ref is not None or deal.length % C and not maps.slope_is_known
                phi = there(phi, chunk) if masks else phi
                rounded, e = mosaic.rounded(phi, tiling.dtype), mosaic.in_rows(e, HALF)
                e = there(e, chunk) if masks else e
                return rounded, -jnp.sum(phi * e, axis=1)

            def sum_chunk(chunk: Any, sums: Any) -> Any:
                totals, vector, *largest_before = sums
                slot = slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(loaded.at[slot])
                x = mosaic.load_transposed(x_s.at[slot, worker])  # [HALF, C]
                largest: list[jax.Array] = []
                if in_units:
                    (before,) = largest_before
                    phi, added, *largest = map_keys_in_units(x, chunk, before)
                    totals = times(totals, before / largest[0])
                else:
                    own_map = map_queries if len(of_rows) == 2 else map_keys
                    phi, added = own_map(x, slot, chunk)
                if lengths_ref is not None:
                    mask_values(slot, item.rows_within(chunk, lengths_ref))
                blocks = tiling.all_in(tiled(y_s).at[slot])
                totals = multiply(
                    *((total, [(phi, y)]) for total, y in zip(totals, blocks, strict=True))
                )
                plgpu.commit_smem()  # reads finish before the next load overwrites them
                plgpu.barrier_arrive(free.at[slot])
                return totals, vector + added, *largest

            nothing = plgpu.layout_cast(jnp.zeros((HALF,), F32), OF_ROWS)
            width = spec.V // tiling.blocks
            start: Any = (mosaic.zeros(HALF, width),) * tiling.blocks, nothing
            if in_units:
                start += (plgpu.layout_cast(jnp.full((HALF,), LEAST_SUM, F32), OF_ROWS),)
            totals, vector, *largest = lax.fori_loop(0, item.chunks, sum_chunk, start)
            if in_units:
                totals = times(totals, largest[0] * (1 / LARGEST))
            if z_own is not None:
                totals = tuple(total * (1 / LARGEST) for total in totals)
                vector = vector * (1 / LARGEST)
            of_piece = item.batch, head, item.piece
            rows = pl.ds((share * workers + worker) * HALF, HALF)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            vector_s.at[worker][...] = vector
            for column in range(0, spec.V, COLUMNS):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                total, first = totals[column // width], column % width
                total_s.at[worker][...] = total[:, first : first + COLUMNS]
                plgpu.commit_smem()
                target = total_ref.at[(*of_piece, rows, pl.ds(column, COLUMNS))]
                plgpu.copy_smem_to_gmem(total_s.at[worker], target)
            plgpu.copy_smem_to_gmem(vector_s.at[worker], vector_ref.at[(*of_piece, rows)])

        @pl.when(mosaic.group() == workers)
        def _memory() -> None:
            mosaic.set_registers(mosaic.MEMORY_REGISTERS, warpgroups)
            steps = deal.each(load_piece)
            mosaic.await_the_last(free, steps, STAGES)

        @pl.when(mosaic.group() < workers)
        def _sums() -> None:
            mosaic.set_registers(mosaic.workers_registers(workers), warpgroups)
            deal.each(sum_piece)
            plgpu.wait_smem_to_gmem(0)

    of_pieces = deal.B, deal.heads // parts, deal.pieces
    out_type = (
        jax.ShapeDtypeStruct((*of_pieces, spec.D, spec.V), F32),
        jax.ShapeDtypeStruct((*of_pieces, spec.D), F32),
    )
    arrays = (x, y, *of_rows, *(one for one in (z, lengths) if one is not None))
    return frame.launch(body, name, deal, out_type, scratch, arrays, warpgroups=warpgroups)


def times(totals: Sequence[jax.Array], factors: jax.Array) -> tuple[jax.Array, ...]:
    """A sum, in parts of its columns, times a factor for each feature."""
    return tuple(total * mosaic.in_columns(factors, total.shape[1]) for total in totals)
