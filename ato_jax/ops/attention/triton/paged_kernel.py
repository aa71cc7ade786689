"""The two paged kernels: parts of sequences by runs of blocks, and the merging of those parts.

`paged.py` has their mathematics, and launches them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.launch import triton as plgpu
from ato_jax.ops.attention.cached import CacheInputs
from ato_jax.ops.attention.spec import AttentionSpec, within_bounds
from ato_jax.ops.attention.triton.common import (
    SMALLEST_TILE,
    Sliced,
    each,
    exp2,
    inner,
    padded,
    plus_product,
    quotient,
    raw_scores,
    score_factor,
    span,
)
from ato_jax.ops.attention.triton.forward import FLOOR
from ato_jax.ops.attention.triton.paged_tiles import (
    Config,
    Rows,
    count_of,
    load_columns,
    runs_of,
    slices_of,
    value_slices_of,
)
from ato_jax.ops.attention.triton.paged_words import halves_of, into_range

# Columns and parts that a merging program takes at a time; their loads are in flight together.
MERGED_COLUMNS = 64
MERGED_PARTS = 8


def attend_kernel(
    refs: CacheInputs,
    out_ref: Any,
    lse_ref: Any,
    *,
    spec: AttentionSpec,
    config: Config,
    cache_dtype: str | None,
) -> None:
    """One run of blocks: a part of every sequence that the run touches.

    `cache_dtype` is the dtype of a cache in 8 bits, whose refs hold words of two columns; None for
    any other cache.
    """
    block, fast_exp2 = config.block, config.fast_exp2
    program = pl.program_id(1)
    factor = score_factor(spec)
    rows = Rows.of(spec, config.rows)
    runs = runs_of(spec, config, refs.lengths, refs.first)
    begin, end = runs.start(program), runs.start(program + 1)
    in_words = cache_dtype is not None
    key_slices = slices_of(spec.D, in_words)
    value_slices = value_slices_of(spec, refs.v is None, in_words)

    def add_sequence(b: Any, nothing: Any) -> Any:
        """Stores the part of sequence b."""
        length = runs.of(b, runs.length)
        position = runs.of(b, runs.position) + rows.query  # [rows]
        q = rows.load(refs.q, rows.outside(b), key_slices)  # [rows, D]
        unit = None
        if in_words and q[0].dtype == jnp.bfloat16:
            q, unit = into_range(q)

        def find(key: jax.Array) -> tuple[tuple[Any, ...], jax.Array]:
            """The index of the keys' rows in the cache, and which of them exist."""
            exist = key < length
            if refs.table is None:
                return ((b, key, rows.group), exist)
            pages, page = refs.k.shape[:2]
            slot = quotient(key, page)
            number = plgpu.load(refs.table.at[b, slot], mask=exist, other=-1)  # [block]
            # A page number out of range is not read, and no query sees its keys.
            exist = (number >= 0) & (number < pages)
            return (jnp.where(exist, number, 0), key - slot * page, rows.group), exist

        def step(n: Any, carry: Any) -> Any:
            m, total, acc = carry  # [rows], [rows], [rows, V]
            key = span(n * block, block)
            index, exist = find(key)

            def rows_of(ref: Any, width: int) -> Sliced:
                """The block's rows of the cache, [block, width], in the dtype of the products."""
                place = index if spec.layout == "bthd" else (index[0], index[2], index[1])
                if cache_dtype is None:
                    return load_columns(ref, place, exist, slices_of(width, False))
                words = load_columns(ref, place, exist, slices_of(pl.cdiv(width, 2), False))
                halves = (halves_of(tile, cache_dtype, q[0].dtype) for tile in words)
                return tuple(half for both in halves for half in both)

            k = rows_of(refs.k, spec.D)  # [block, D]
            products = inner(spec, q, k)  # [rows, block]
            if unit is not None:
                products = products * unit[:, None]
            scale = None
            if refs.k_scales is not None:
                scale = plgpu.load(refs.k_scales.at[index], mask=exist, other=0)  # [block]
                products = products * scale[None, :]
            raw = raw_scores(spec, products)
            seen = exist[None, :] & within_bounds(spec, position[:, None], key[None, :])
            if refs.q_lengths is not None:
                seen &= (rows.query < refs.q_lengths[b])[:, None]
            raw = jnp.where(seen, raw, -jnp.inf)
            m_next = jnp.maximum(m, jnp.max(raw, axis=1) * factor)
            p = exp2(raw * factor - m_next[:, None], fast_exp2)
            correction = exp2(m - m_next, fast_exp2)
            total = total * correction + jnp.sum(p, axis=1)
            acc = each(lambda tile: tile * correction[:, None], acc)
            v = k[: len(value_slices)]
            if refs.v is not None:
                v = rows_of(refs.v, spec.V)  # [block, V]
            if refs.v_scales is not None:
                scale = plgpu.load(refs.v_scales.at[index], mask=exist, other=0)  # [block]
            if scale is None:
                return m_next, total, plus_product(spec, acc, p.astype(v[0].dtype), v)
            top = jnp.max(jnp.abs(scale))
            p = p * (scale / jnp.where(top == 0, 1.0, top))[None, :]
            added = plus_product(spec, each(jnp.zeros_like, acc), p.astype(v[0].dtype), v)
            return m_next, total, tuple(a + top * b for a, b in zip(acc, added, strict=True))

        stop = runs.of(b, runs.ends)
        # From a block's number through all sequences to its number in this one.
        shift = runs.of(b, runs.first) + runs.of(b, runs.blocks) - stop
        start = jnp.maximum(begin, stop - runs.of(b, runs.blocks))
        sums = lax.fori_loop(
            start + shift, jnp.minimum(end, stop) + shift, step, rows.nothing(value_slices)
        )
        rows.store((out_ref, lse_ref), rows.part(program + b), value_slices, sums)
        return nothing

    first = count_of(runs.ends <= begin)
    last = jnp.where(end > begin, count_of(runs.ends < end) + 1, first)
    lax.fori_loop(first, last, add_sequence, jnp.int32(0))


def merge_kernel(
    out_ref: Any,
    lse_ref: Any,
    lengths_ref: Any,
    first_ref: Any | None,
    sinks_ref: Any | None,
    merged_ref: Any,
    merged_lse_ref: Any,
    *,
    spec: AttentionSpec,
    config: Config,
) -> None:
    """Merges one sequence's parts of some rows and columns, `MERGED_PARTS` at a time."""
    b = pl.program_id(1)
    rows = Rows.of(spec, SMALLEST_TILE)
    width = merged_columns(spec)
    start = pl.program_id(2) * width
    column = start + span(0, width)
    exist = rows.exist[:, None] & (column < spec.V)[None, :]  # [rows, V]
    runs = runs_of(spec, config, lengths_ref, first_ref)
    stop = runs.of(b, runs.ends)
    begin = stop - runs.of(b, runs.blocks)
    program = jnp.arange(pl.next_power_of_2(config.programs), dtype=jnp.int32)
    real = program < config.programs
    first = count_of(real & (runs.start(program + 1) <= begin))
    last = jnp.where(stop > begin, count_of(real & (runs.start(program) < stop)), first)

    def add_parts(n: Any, carry: Any) -> Any:
        top, total, acc = carry  # [rows], [rows], [rows, V]
        program = span(first + n * MERGED_PARTS, MERGED_PARTS)
        real = program < last
        slot = (program + b)[:, None]
        lse = plgpu.load(
            lse_ref.at[slot, rows.group, rows.row[None, :]],
            mask=real[:, None] & rows.exist[None, :],
            other=-jnp.inf,
        )  # [parts, rows]
        parts = plgpu.load(
            out_ref.at[slot[..., None], rows.group, rows.row[None, :, None], column[None, None, :]],
            mask=real[:, None, None] & exist[None],
            other=0,
        )  # [parts, rows, V]
        higher = jnp.maximum(top, jnp.max(lse, axis=0))
        old, new = jnp.exp(top - higher), jnp.exp(lse - higher[None, :])
        acc = acc * old[:, None] + jnp.sum(parts * new[:, :, None], axis=0)
        return higher, total * old + jnp.sum(new, axis=0), acc

    top = jnp.full(rows.row.shape, FLOOR, jnp.float32)
    total = jnp.zeros_like(top)
    if sinks_ref is not None:
        sink = plgpu.load(sinks_ref.at[rows.head], mask=rows.exist, other=0)
        top = jnp.maximum(sink, FLOOR)
        total = jnp.exp(sink - top)  # 0 for a sink of -inf
    count = quotient(last - first + MERGED_PARTS - 1, MERGED_PARTS)
    acc = jnp.zeros(exist.shape, jnp.float32)
    top, total, acc = lax.fori_loop(0, count, add_parts, (top, total, acc))
    nobody = total == 0
    safe = jnp.where(nobody, 1.0, total)
    index = rows.outside(b)
    place = tuple(one[:, None] if jnp.ndim(one) else one for one in index)
    merged = (acc / safe[:, None]).astype(merged_ref.dtype)
    plgpu.store(merged_ref.at[(*place, column[None, :])], merged, mask=exist)
    lse = jnp.where(nobody, -jnp.inf, top + jnp.log(safe))
    plgpu.store(merged_lse_ref.at[index], lse, mask=rows.exist & (start == 0))


def merged_columns(spec: AttentionSpec) -> int:
    """The columns that a merging program has."""
    return min(MERGED_COLUMNS, padded(spec.V))
