"""The newest queries of each sequence against a cache in pages: every key is read once.

The T queries of all heads of a group are the rows of one tile, so that they share each load of
keys and values; row r is query r // share of head r % share. The blocks of keys that are seen, of
all sequences one after the other, are dealt to the programs in equal runs, whatever the lengths: so
a program ends one sequence and begins the next where they meet. For each it goes block by block,
with the running maximum and sums of `forward.py`, and leaves its part in slot

    program + sequence

which no other part has, as each part has the next program or the next sequence of the part before.
A second kernel merges the parts of each sequence. Where key j lies is read from the table block by
block, as the keys are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ato_jax import device
from ato_jax.device import Device
from ato_jax.launch import pallas_call
from ato_jax.ops.attention.spec import AttentionSpec, PagedInputs
from ato_jax.ops.attention.triton.common import (
    LN_2,
    SMALLEST_TILE,
    Columns,
    Sliced,
    column_slices,
    each,
    exp2,
    inner,
    padded,
    plus_product,
    quotient,
    raw_scores,
    row_size,
    score_factor,
    span,
    zeros,
)
from ato_jax.ops.attention.triton.forward import FLOOR

WIDEST_HEAD = 512
# Beyond either, rows are several tiles: they and their sums have to fit the registers.
MOST_ROWS = 64
ROWS_BYTES = 16 * 1024
LONGEST_BLOCK = 128
NUM_WARPS = 4
# A block of keys and values under way for each of these, in the shared memory.
NUM_STAGES = 3
# Their runs are equal, so that they end together.
PROGRAMS_PER_MULTIPROCESSOR = 1


class Tiles(NamedTuple):
    """Rows and keys of a program's tiles."""

    rows: int
    block: int


def unsupported(spec: AttentionSpec, here: Device) -> str | None:
    old = here.capability is None or here.capability < (8, 0)
    if not device.interpreting() and (here.platform != "gpu" or old):
        return "needs an NVIDIA GPU of compute capability 8.0 or more"
    for name, width in (("D", spec.D), ("V", spec.V)):
        if width > WIDEST_HEAD:
            return f"{name} must be at most {WIDEST_HEAD}, got {width}"
    if not spec.B * spec.S:
        return "empty arrays"
    return None


def _tiles(spec: AttentionSpec, here: Device) -> Tiles:
    item = jnp.dtype(spec.dtype).itemsize
    widths = row_size(spec.D), row_size(spec.V)

    def fitting(size: int, width: int, most: int) -> int:
        found = pl.next_power_of_2(size // (width * item) + 1) // 2
        return max(SMALLEST_TILE, min(found, most))

    rows = fitting(ROWS_BYTES, max(widths), MOST_ROWS)
    rows = min(rows, padded(spec.T * spec.H // spec.G))
    return Tiles(rows, fitting(here.shared_memory // NUM_STAGES, sum(widths), LONGEST_BLOCK))


def _programs(spec: AttentionSpec, tiles: Tiles, others: int, multiprocessors: int) -> int:
    """How many share the blocks of all sequences; `others` is how often that is."""
    blocks = spec.B * pl.cdiv(spec.S, tiles.block)
    return max(1, min(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // others, blocks))


class _Runs(NamedTuple):
    """Which blocks of which sequence each program has; sequences and programs as vectors."""

    length: jax.Array  # [B], as all that follow, padded with sequences of no blocks
    first: jax.Array  # the first block that is seen
    ends: jax.Array  # where its blocks end among those of all sequences
    blocks: jax.Array
    each: Any
    rest: Any

    def start(self, program: Any) -> Any:
        """The first of a program's blocks among those of all sequences."""
        return program * self.each + jnp.minimum(program, self.rest)

    def of(self, sequence: Any, values: jax.Array) -> Any:
        """One sequence's number of a vector."""
        index = jnp.arange(values.shape[0], dtype=jnp.int32)
        return jnp.sum(jnp.where(index == sequence, values, 0), dtype=jnp.int32)


def _runs(spec: AttentionSpec, lengths_ref: Any, block: int, programs: int) -> _Runs:
    index = jnp.arange(pl.next_power_of_2(spec.B), dtype=jnp.int32)
    length = plgpu.load(lengths_ref.at[index], mask=index < spec.B, other=0)
    first = jnp.zeros_like(length)
    if spec.left is not None:
        first = quotient(jnp.maximum(length - spec.T - spec.left, 0), block)
    blocks = quotient(length + block - 1, block) - first
    total = jnp.sum(blocks, dtype=jnp.int32)
    each = quotient(total, programs)
    return _Runs(
        length, first, jnp.cumsum(blocks, dtype=jnp.int32), blocks, each, total - each * programs
    )


def _count(found: jax.Array) -> jax.Array:
    return jnp.sum(found, dtype=jnp.int32)


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    lengths_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    spec: AttentionSpec,
    rows: int,
    tiles: int,
    block: int,
    programs: int,
    fast_exp2: bool,
) -> None:
    share = spec.H // spec.G
    pages, page = k_ref.shape[:2]
    program = pl.program_id(1)
    factor = score_factor(spec)
    row = (pl.program_id(0) % tiles) * rows + jnp.arange(rows, dtype=jnp.int32)
    is_row = row < spec.T * share
    runs = _runs(spec, lengths_ref, block, programs)
    begin, end = runs.start(program), runs.start(program + 1)

    def place(columns: Columns) -> tuple[jax.Array, jax.Array]:
        column = span(columns.start, columns.size)[None, :]
        return column, span(0, columns.size)[None, :] < columns.width

    def own(ref: Any, index: Any, columns: Columns) -> tuple[Any, jax.Array]:
        column, is_column = place(columns)
        return ref.at[index, row[:, None], column], is_row[:, None] & is_column

    def load(ref: Any, mask: jax.Array) -> jax.Array:
        return plgpu.load(ref, mask=mask, other=0)

    def add_sequence(b: Any, nothing: Any) -> Any:
        length = runs.of(b, runs.length)
        position = length - spec.T + quotient(row, share)  # [rows]
        q: Sliced = tuple(load(*own(q_ref, b, columns)) for columns in column_slices(spec.D))

        def step(n: Any, carry: Any) -> Any:
            m, total, acc = carry  # [rows], [rows], [rows, V]
            key = span(n * block, block)
            slot = quotient(key, page)
            number = plgpu.load(table_ref.at[b, slot], mask=key < length, other=-1)  # [block]
            # Of a page that there is not, nothing is read, and nobody sees it.
            exists = (number >= 0) & (number < pages)
            number = jnp.where(exists, number, 0)[:, None]
            in_page = (key - slot * page)[:, None]

            def rows_of(ref: Any, width: int) -> Sliced:
                found = []
                for columns in column_slices(width):
                    column, is_column = place(columns)
                    found.append(load(ref.at[number, in_page, column], exists[:, None] & is_column))
                return tuple(found)

            raw = raw_scores(spec, inner(spec, q, rows_of(k_ref, spec.D)))  # [rows, block]
            seen = exists[None, :] & (key[None, :] <= position[:, None])
            if spec.left is not None:
                seen &= key[None, :] >= position[:, None] - spec.left
            raw = jnp.where(seen, raw, -jnp.inf)
            m_next = jnp.maximum(m, jnp.max(raw, axis=1) * factor)
            p = exp2(raw * factor - m_next[:, None], fast_exp2)
            correction = exp2(m - m_next, fast_exp2)
            total = total * correction + jnp.sum(p, axis=1)
            acc = each(lambda tile: tile * correction[:, None], acc)
            v = rows_of(v_ref, spec.V)  # [block, V]
            return m_next, total, plus_product(spec, acc, p.astype(v[0].dtype), v)

        stop = runs.of(b, runs.ends)
        # From a block's place among all of them to its place in the sequence.
        shift = runs.of(b, runs.first) + runs.of(b, runs.blocks) - stop
        start = jnp.maximum(begin, stop - runs.of(b, runs.blocks))
        carry = (
            jnp.full((rows,), FLOOR, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            zeros(rows, spec.V),
        )
        m, total, acc = lax.fori_loop(start + shift, jnp.minimum(end, stop) + shift, step, carry)
        nobody = total == 0
        safe = jnp.where(nobody, 1.0, total)
        for tile, columns in zip(acc, column_slices(spec.V), strict=True):
            target, mask = own(out_ref, program + b, columns)
            plgpu.store(target, tile / safe[:, None], mask=mask)
        lse = jnp.where(nobody, -jnp.inf, m * LN_2 + jnp.log(safe))
        plgpu.store(lse_ref.at[program + b, row], lse, mask=is_row)
        return nothing

    first = _count(runs.ends <= begin)
    last = jnp.where(end > begin, _count(runs.ends < end) + 1, first)
    lax.fori_loop(first, last, add_sequence, jnp.int32(0))


def _merge_kernel(
    out_ref: Any,
    lse_ref: Any,
    lengths_ref: Any,
    merged_ref: Any,
    merged_lse_ref: Any,
    *,
    spec: AttentionSpec,
    rows: int,
    tiles: int,
    block: int,
    programs: int,
) -> None:
    b = pl.program_id(1)
    row = (pl.program_id(0) % tiles) * rows + jnp.arange(rows, dtype=jnp.int32)
    is_row = row < spec.T * (spec.H // spec.G)
    runs = _runs(spec, lengths_ref, block, programs)
    stop = runs.of(b, runs.ends)
    start = stop - runs.of(b, runs.blocks)
    program = jnp.arange(pl.next_power_of_2(programs), dtype=jnp.int32)
    real = program < programs
    first = _count(real & (runs.start(program + 1) <= start))
    last = jnp.where(stop > start, _count(real & (runs.start(program) < stop)), first)

    def own(ref: Any, columns: Columns, *index: Any) -> tuple[Any, jax.Array]:
        column = span(columns.start, columns.size)[None, :]
        is_column = span(0, columns.size)[None, :] < columns.width
        return ref.at[(*index, row[:, None], column)], is_row[:, None] & is_column

    def add_part(program: Any, carry: Any) -> Any:
        top, total, acc = carry  # [rows], [rows], [rows, V]
        lse = plgpu.load(lse_ref.at[program + b, row], mask=is_row, other=0)
        higher = jnp.maximum(top, lse)
        old, new = jnp.exp(top - higher), jnp.exp(lse - higher)
        added = []
        for tile, columns in zip(acc, column_slices(spec.V), strict=True):
            target, mask = own(out_ref, columns, program + b)
            part = plgpu.load(target, mask=mask, other=0)
            added.append(tile * old[:, None] + part * new[:, None])
        return higher, total * old + new, tuple(added)

    carry = (
        jnp.full((rows,), FLOOR, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        zeros(rows, spec.V),
    )
    top, total, acc = lax.fori_loop(first, last, add_part, carry)
    nobody = total == 0
    safe = jnp.where(nobody, 1.0, total)
    for tile, columns in zip(acc, column_slices(spec.V), strict=True):
        target, mask = own(merged_ref, columns)
        plgpu.store(target, (tile / safe[:, None]).astype(merged_ref.dtype), mask=mask)
    lse = jnp.where(nobody, -jnp.inf, top + jnp.log(safe))
    plgpu.store(merged_lse_ref.at[row], lse, mask=is_row)


def forward(spec: AttentionSpec, here: Device, inputs: PagedInputs) -> tuple[jax.Array, jax.Array]:
    """out [B, T, H, V], in float32 where a sink is to be added, and lse [B, T, H] without it."""
    B, T, H, G = spec.B, spec.T, spec.H, spec.G
    share = H // G
    count = T * share
    sizes = _tiles(spec, here)
    tiles = pl.cdiv(count, sizes.rows)
    programs = _programs(spec, sizes, G * tiles, here.multiprocessors)
    slots = programs + B - 1
    q = inputs.q.reshape(B, T, G, share, spec.D)
    q = jnp.swapaxes(q, 1, 2).reshape(B, G, count, spec.D)
    static: dict[str, Any] = {"spec": spec, "rows": sizes.rows, "tiles": tiles}
    static |= {"block": sizes.block, "programs": programs}

    def of_group(number: int, *width: int) -> pl.BlockSpec:
        """[number, rows, ...] of a group's."""
        zeros = (0,) * (1 + len(width))
        return pl.BlockSpec(
            (number, None, tiles * sizes.rows, *width), lambda n, i: (0, quotient(n, tiles), *zeros)
        )

    def of_sequence(*width: int) -> pl.BlockSpec:
        zeros = (0,) * (1 + len(width))
        return pl.BlockSpec(
            (None, None, tiles * sizes.rows, *width), lambda n, b: (b, quotient(n, tiles), *zeros)
        )

    def all_pages(pages: jax.Array) -> pl.BlockSpec:
        count, page, _, width = pages.shape
        return pl.BlockSpec(
            (count, page, None, row_size(width)), lambda n, p: (0, 0, quotient(n, tiles), 0)
        )

    lengths = pl.BlockSpec((B,), lambda n, i: (0,))
    parts = pallas_call(
        functools.partial(_kernel, **static, fast_exp2=here.capability is not None),
        # The heads of one sequence's part lie side by side in memory, and run side by side.
        grid=(G * tiles, programs),
        in_specs=[
            of_group(B, row_size(spec.D)),
            all_pages(inputs.k_pages),
            all_pages(inputs.v_pages),
            pl.BlockSpec(inputs.page_table.shape, lambda n, p: (0, 0)),
            lengths,
        ],
        out_specs=[of_group(slots, row_size(spec.V)), of_group(slots)],
        out_shape=[
            jax.ShapeDtypeStruct((slots, G, count, spec.V), jnp.float32),
            jax.ShapeDtypeStruct((slots, G, count), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=NUM_STAGES),
        name="attention_paged",
    )(q, inputs.k_pages, inputs.v_pages, inputs.page_table, inputs.lengths)
    out, lse = pallas_call(
        functools.partial(_merge_kernel, **static),
        grid=(G * tiles, B),
        in_specs=[of_group(slots, row_size(spec.V)), of_group(slots), lengths],
        out_specs=[of_sequence(row_size(spec.V)), of_sequence()],
        out_shape=[
            jax.ShapeDtypeStruct((B, G, count, spec.V), jnp.float32 if spec.sinks else spec.dtype),
            jax.ShapeDtypeStruct((B, G, count), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=NUM_STAGES),
        name="attention_paged_merge",
    )(*parts, inputs.lengths)

    def ungrouped(array: jax.Array) -> jax.Array:
        """[B, G, T * share, ...] -> [B, T, H, ...]"""
        array = array.reshape(B, G, T, share, *array.shape[3:])
        return jnp.swapaxes(array, 1, 2).reshape(B, T, H, *array.shape[4:])

    return ungrouped(out), ungrouped(lse)
