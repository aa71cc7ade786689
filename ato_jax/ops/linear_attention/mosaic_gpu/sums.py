"""The sums over the keys of each piece, S [B, G, P, V, F] and z [B, G, P, F] in float32.

    S = sum_j v_j phi(k_j)^T [V, F],  z = sum_j phi(k_j) [F]

`causal.py` launches it; `scans/edges.py` adds the pieces up to the state ahead of
each, which `output.py` reads. `query_sums.py` launches the same kernel, `piece_sums`, for queries.

    memory    loads chunks of k and v
    features  two warpgroups with half of F each: they map k in place
    values    two warpgroups with half of V each: they keep S in registers, and half of F of z

With a decay the sums are scaled to the end of the piece. Where a tile holds two heads of 64
columns, each half is a head with sums of its own; features then sums z, since values has as many
steps as with one head, for half of the products. Where a tile of one head lies in two blocks
(`Tiling.parts_in`), so do the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF, Item
from ato_jax.ops.linear_attention.mosaic_gpu import (
    channel_blocks,
    chunk_borders,
    feature_maps,
    frame,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

STAGES = 4
WARPGROUPS = 5
VALUES_REGISTERS, FEATURES_REGISTERS = 160, 64


def sums(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    k: jax.Array,
    v: jax.Array,
    gates: jax.Array | None,
    lengths: jax.Array | None = None,
    adding: jax.Array | None = None,
    powers: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """kv [B, G, P, V, F] and k_sum [B, G, P, F], float32; gates: from each step up to its piece's
    end, [B, G, T up to a whole chunk]; lengths: [B] int32, rows behind them are left out; adding:
    with segments, as `scans.borders` has it; powers: in float16 those of keys, `powers.py`."""

    def map_rows(
        half: int, k_ref: Any, adds_ref: Any, gates_ref: Any = None, power: Any = None
    ) -> None:
        adds = mosaic.ones(C, ALIKE, frame.tiling(spec).dtype)
        mosaic.store_transposed(adds_ref, adds)
        exponents = None
        if gates_ref is not None:
            exponents = mosaic.load(gates_ref, mosaic.OF_ROWS)
        feature_maps.map_keys_in_place(spec, k_ref, half, exponents, power)

    vectors = [] if gates is None else [gates]
    options: dict[str, Any] = dict(lengths=lengths, within=adding, powers=powers)
    return piece_sums(spec, deal, "sums", k, v, vectors, map_rows, ALIKE, **options)


def piece_sums(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    name: str,
    x: jax.Array,
    y: jax.Array,
    vectors: Sequence[jax.Array],
    map_rows: Callable[..., None],
    of_columns: int,
    weigh: Callable[..., jax.Array] | None = None,
    lengths: jax.Array | None = None,
    units: tuple[jax.Array, jax.Array] | None = None,
    within: jax.Array | None = None,
    powers: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel. It returns sum_j y_j phi_j^T [B, heads, P, V, D], and the sum over 8
    columns c of sum_j a_jc phi_j, divided by `of_columns`; both in float32.

    Args:
      vectors: [B, heads, N for each chunk] in float32. `map_rows` gets the N numbers of a chunk for
        the head of its half; [B, G, ..] where the heads are groups of query heads.
      map_rows: a function of (0 or 1, that half of x's columns, a^T, *vectors), all in shared
        memory, which replaces x by phi and stores a.
      of_columns: the divisor of the second sum.
      weigh: a function of (0 or 1, a^T, *vectors) that stores a before; the second sum is then over
        a_jc x_j, for x as loaded, times the numbers that it returns for the half's columns.
      lengths: [B] int32; rows of x and y behind them count as 0.
      units: in float16, of phi and of a, [B, heads, chunks] each, which `map_rows` is given, too:
        it divides by them. Sums are kept in the units of the last chunk.
      within: [B, P, 2] int32, the rows of each piece that are summed, where not all are: the first
        one, and the one behind the last.
      powers: [B, heads], of which `map_rows` is given its head's.
    """
    tiling = frame.tiling(spec)
    heads = frame.heads_of_tile(spec)
    by_values = weigh is None and heads == 1
    widths = [vector.shape[2] // pl.cdiv(spec.T, C) for vector in vectors]
    scratch = dict(
        x_s=tiling.tiles(STAGES),
        y_s=tiling.of_rows(STAGES, 2, C, HALF),
        a_s=tiling.shared(STAGES, 2, ALIKE, C),
        total_s=tiling.shared(2, HALF, spec.D, dtype=F32),
        columns_s=plgpu.SMEM((2, HALF), F32),
        loaded=plgpu.Barrier(
            num_arrivals=tiling.blocks + heads * len(vectors), num_barriers=STAGES
        ),
        y_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        mapped=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=2 if by_values else 4, num_barriers=STAGES),
    )
    names = [f"vector_{number}_s" for number in range(len(vectors))]
    for own_name, width in zip(names, widths, strict=True):
        scratch[own_name] = plgpu.SMEM((STAGES, heads * width), F32)

    def body(
        x_ref: Any,
        y_ref: Any,
        *refs: Any,
        x_s: Any,
        y_s: Any,
        a_s: Any,
        total_s: Any,
        columns_s: Any,
        loaded: Any,
        y_loaded: Any,
        mapped: Any,
        free: Any,
        **vectors_s: Any,
    ) -> None:
        *given, total_ref, columns_ref = refs
        vector_refs = given[: len(vectors_s)]
        unit_refs = given[len(vectors_s) : len(vectors_s) + 2] if units else ()
        powers_ref = None if powers is None else given.pop()
        within_ref = None if within is None else given.pop()
        lengths_ref = None if lengths is None else given[-1]

        def each(do: Callable[[Item], None]) -> Any:
            if within_ref is None:
                return deal.each(do)
            return deal.each(do, cut=lambda item: chunk_borders.cut_to(within_ref, item))

        def units_of(item: Item, half: Any, chunk: Any) -> tuple[Any, ...]:
            """The units of phi and of a in this chunk."""
            number, head = lax.div(item.first_row, C) + chunk, tiling.head_of(item.head, half)
            return tuple(ref[item.batch, head, number] for ref in unit_refs)

        def units_before(item: Item, half: Any, chunk: Any) -> tuple[Any, ...]:
            return units_of(item, half, jnp.maximum(chunk - 1, 0))

        def load_piece(item: Item) -> None:
            def load_chunk(chunk: Any, _: None) -> None:
                step, rows = item.before + chunk, item.rows(chunk)
                slot = mosaic.slot_of(step, STAGES)
                mosaic.wait_until_free(free, step, STAGES)
                x_head = channel_blocks.head_of_features(spec, x_ref, item.head)
                tiling.copy_tile(x_ref, item, rows, x_head, x_s, slot, loaded)
                number = item.number_of(chunk)
                for ref, own_name, width in zip(vector_refs, names, widths, strict=True):
                    columns, own = pl.ds(number * width, width), vectors_s[own_name]
                    at = item
                    if ref.shape[1] < deal.heads * heads:
                        at = item._replace(head=frame.head_of_keys(spec, item.head))
                    tiling.copy_vector(ref, at, columns, own, slot, loaded)
                y_head = channel_blocks.head_of_values(spec, y_ref, item.head)
                for half in range(2):
                    source = tiling.part(y_ref, item, rows, y_head, half)
                    target = mosaic.for_copy(y_s.at[slot, half])
                    plgpu.copy_gmem_to_smem(source, target, y_loaded.at[slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def map_piece(item: Item, half: int) -> None:
            def map_chunk(chunk: Any, columns: jax.Array) -> jax.Array:
                slot = mosaic.slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(loaded.at[slot])
                x, a = tiling.half_of(x_s, slot, half), a_s.at[slot, half]
                vectors = [
                    tiling.by_heads(vectors_s[own_name].at[slot])[half % heads]
                    for own_name in names
                ]
                if weigh is not None and within_ref is not None:
                    chunk_borders.keep_within(within_ref, item, chunk, x)
                if weigh is not None:
                    factors = mosaic.in_columns(weigh(half, a, *vectors), ALIKE)
                    plgpu.commit_smem()
                    (own_columns,) = mosaic.multiply((mosaic.zeros(HALF, ALIKE), [(x.T, a.T)]))
                    columns = columns + own_columns * factors
                given_units: Any = {"units": units_of(item, half, chunk)} if units else {}
                if powers_ref is not None:
                    head = tiling.head_of(item.head, half)
                    given_units["power"] = powers_ref[item.batch, head]
                map_rows(half, x, a, *vectors, **given_units)
                mosaic.keep_rows(x, item.rows_within(chunk, lengths_ref))
                if within_ref is not None and weigh is None:
                    chunk_borders.keep_within(within_ref, item, chunk, x)
                plgpu.commit_smem()
                plgpu.barrier_arrive(mapped.at[slot])
                if by_values:
                    return columns
                if units:
                    columns *= ratios(item, half, chunk)[1]
                if weigh is None:
                    (columns,) = mosaic.multiply((columns, [(x.T, a.T)]))
                plgpu.barrier_arrive(free.at[slot])
                return columns

            columns = lax.fori_loop(0, item.chunks, map_chunk, mosaic.zeros(HALF, ALIKE))
            if not by_values:
                leave_columns(item, half, columns * last_units(item, half)[1] if units else columns)

        def ratios(item: Item, half: Any, chunk: Any) -> tuple[Any, Any]:
            """From the units of the sums before the chunk to its own."""
            (of_x, of_a), (own_x, own_a) = (
                units_before(item, half, chunk),
                units_of(item, half, chunk),
            )
            return of_x / own_x, of_x / own_x * (of_a / own_a)

        def last_units(item: Item, half: Any) -> tuple[Any, Any]:
            of_x, of_a = units_of(item, half, item.chunks - 1)
            return of_x, of_x * of_a

        def leave_columns(item: Item, half: Any, columns: jax.Array) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            columns_s.at[half][...] = jnp.sum(columns, axis=1) * (1 / of_columns)
            plgpu.commit_smem()
            head = tiling.head_of(item.head, half)
            target = columns_ref.at[item.batch, head, item.piece, tiling.columns_of(half)]
            plgpu.copy_smem_to_gmem(columns_s.at[half], target)

        def multiply_piece(item: Item) -> None:
            half = mosaic.group()

            def multiply_chunk(chunk: Any, sums: list[jax.Array]) -> list[jax.Array]:
                slot = mosaic.slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(y_loaded.at[slot])
                plgpu.barrier_wait(mapped.at[slot])
                y = y_s.at[slot, half]
                products = [(y.T, x) for x in tiling.parts_in(x_s, slot, half)]
                if lengths_ref is not None:
                    mosaic.keep_rows(y, item.rows_within(chunk, lengths_ref))
                    plgpu.commit_smem()
                if by_values:
                    own = tiling.half_of(x_s, slot, half)
                    products.append((own.T, a_s.at[slot, half].T))
                if units:
                    sums = times(sums, ratios(item, half, chunk))
                pairs = zip(sums, products, strict=True)
                found = mosaic.multiply(*((before, [factors]) for before, factors in pairs))
                plgpu.barrier_arrive(free.at[slot])
                return list(found)

            def times(sums: list[jax.Array], factors: tuple[Any, Any]) -> list[jax.Array]:
                return [x * factors[number == len(parts)] for number, x in enumerate(sums)]

            parts = tiling.parts_of(total_s.at[half])
            start = [mosaic.zeros(HALF, part.shape[1]) for part in parts]
            if by_values:
                start.append(mosaic.zeros(HALF, ALIKE))
            found = lax.fori_loop(0, item.chunks, multiply_chunk, start)
            if units:
                found = times(found, last_units(item, half))
            if by_values:
                leave_columns(item, half, found.pop())
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for part, total in zip(parts, found, strict=True):
                part[...] = total
            plgpu.commit_smem()
            head = tiling.head_of(item.head, half)
            target = total_ref.at[item.batch, head, item.piece, tiling.columns_of(half)]
            plgpu.copy_smem_to_gmem(total_s.at[half], target)

        @pl.when(mosaic.group() == frame.MEMORY)
        def _memory() -> None:
            mosaic.set_registers(mosaic.MEMORY_REGISTERS, WARPGROUPS)
            steps = each(load_piece)
            mosaic.await_the_last(free, steps, STAGES)

        for half in range(2):

            @pl.when(mosaic.group() == frame.FEATURES + half)
            def _features(half: int = half) -> None:
                mosaic.set_registers(FEATURES_REGISTERS, WARPGROUPS)
                each(lambda item: map_piece(item, half))
                plgpu.wait_smem_to_gmem(0)

        @pl.when(mosaic.group() < frame.MEMORY)
        def _values() -> None:
            mosaic.set_registers(VALUES_REGISTERS, WARPGROUPS)
            each(multiply_piece)
            plgpu.wait_smem_to_gmem(0)

    of_pieces = deal.B, deal.heads * heads, deal.pieces
    out_type = (
        jax.ShapeDtypeStruct((*of_pieces, spec.V, spec.D), F32),
        jax.ShapeDtypeStruct((*of_pieces, spec.D), F32),
    )
    arrays = [x, y, *vectors, *(units or ())]
    arrays += [array for array in (lengths, within, powers) if array is not None]
    return frame.launch(body, name, deal, out_type, scratch, arrays, warpgroups=WARPGROUPS)
