"""The newest queries of each sequence against a cache in pages: every key is read once.

The T queries of all heads of a group are the rows of one tile, so that they share each load of
keys and values; row r is query r // share of head r % share. A program goes over a part of one
sequence's keys, block by block, with the running maximum and sums of `forward.py`; a sequence has
as many parts whatever its length, each as many blocks as the others, and `merge` puts them
together. Where key j lies is read from the table block by block, as the keys are.
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
from ato_jax.ops.attention.merging import merge
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
# Keys and values that are loaded at one time.
BLOCK_BYTES = 32 * 1024
LONGEST_BLOCK = 128
# So many that those of long sequences, which take longest, do not run alone in the end.
PROGRAMS_PER_MULTIPROCESSOR = 16
# Of one part, or the merging takes as long as what is merged.
FEWEST_KEYS = 512


class Tiles(NamedTuple):
    """Rows and keys of a program's tiles, and how they are run."""

    rows: int
    block: int
    num_warps: int = 4
    num_stages: int = 3


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


def _tiles(spec: AttentionSpec) -> Tiles:
    item = jnp.dtype(spec.dtype).itemsize
    widths = row_size(spec.D), row_size(spec.V)

    def fitting(size: int, width: int, most: int) -> int:
        found = pl.next_power_of_2(size // (width * item) + 1) // 2
        return max(SMALLEST_TILE, min(found, most))

    rows = fitting(ROWS_BYTES, max(widths), MOST_ROWS)
    rows = min(rows, padded(spec.T * spec.H // spec.G))
    return Tiles(rows, fitting(BLOCK_BYTES, sum(widths), LONGEST_BLOCK))


def _parts(spec: AttentionSpec, programs: int, multiprocessors: int) -> int:
    """How many programs share the keys of a sequence."""
    seen = spec.S if spec.left is None else min(spec.S, spec.left + spec.T)
    wanted = pl.cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors, programs)
    return max(1, min(wanted, seen // FEWEST_KEYS))


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
    parts: int,
    fast_exp2: bool,
) -> None:
    share = spec.H // spec.G
    pages, page = k_ref.shape[:2]
    part, b = pl.program_id(1), pl.program_id(2)
    length = lengths_ref[b]
    factor = score_factor(spec)
    row = (pl.program_id(0) % tiles) * rows + jnp.arange(rows, dtype=jnp.int32)
    is_row = row < spec.T * share
    position = length - spec.T + quotient(row, share)  # [rows]

    def place(columns: Columns) -> tuple[jax.Array, jax.Array]:
        column = span(columns.start, columns.size)[None, :]
        return column, span(0, columns.size)[None, :] < columns.width

    def own(ref: Any, columns: Columns) -> tuple[Any, jax.Array]:
        column, is_column = place(columns)
        return ref.at[row[:, None], column], is_row[:, None] & is_column

    def load(ref: Any, mask: jax.Array) -> jax.Array:
        return plgpu.load(ref, mask=mask, other=0)

    q: Sliced = tuple(load(*own(q_ref, columns)) for columns in column_slices(spec.D))

    def step(n: Any, carry: Any) -> Any:
        m, total, acc = carry  # [rows], [rows], [rows, V]
        key = span(n * block, block)
        slot = quotient(key, page)
        number = plgpu.load(table_ref.at[slot], mask=key < length, other=-1)  # [block]
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

    first = jnp.int32(0)
    if spec.left is not None:
        first = quotient(jnp.maximum(length - spec.T - spec.left, 0), block)
    blocks = quotient(length + block - 1, block) - first
    start = first + quotient(blocks * part, parts)
    end = first + quotient(blocks * (part + 1), parts)
    carry = (jnp.full((rows,), FLOOR), jnp.zeros((rows,)), zeros(rows, spec.V))
    m, total, acc = lax.fori_loop(start, end, step, carry)
    nothing = total == 0
    safe = jnp.where(nothing, 1.0, total)
    for tile, columns in zip(acc, column_slices(spec.V), strict=True):
        target, mask = own(out_ref, columns)
        plgpu.store(target, (tile / safe[:, None]).astype(out_ref.dtype), mask=mask)
    lse = jnp.where(nothing, -jnp.inf, m * LN_2 + jnp.log(safe))
    plgpu.store(lse_ref.at[row], lse, mask=is_row)


def forward(
    spec: AttentionSpec, here: Device, inputs: PagedInputs
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, H, V] in float32 where parts were merged, lse [B, T, H]; without sinks."""
    B, T, H, G = spec.B, spec.T, spec.H, spec.G
    share = H // G
    count = T * share
    rows, block, num_warps, num_stages = _tiles(spec)
    tiles = pl.cdiv(count, rows)
    parts = _parts(spec, B * G * tiles, here.multiprocessors)
    q = inputs.q.reshape(B, T, G, share, spec.D)
    q = jnp.swapaxes(q, 1, 2).reshape(B, G, count, spec.D)

    def of_part(*width: int) -> pl.BlockSpec:
        zeros = (0,) * len(width)
        return pl.BlockSpec(
            (None, None, None, tiles * rows, *width),
            lambda n, p, b: (p, b, quotient(n, tiles), 0, *zeros),
        )

    def all_pages(pages: jax.Array) -> pl.BlockSpec:
        count, page, _, width = pages.shape
        return pl.BlockSpec(
            (count, page, None, row_size(width)), lambda n, p, b: (0, 0, quotient(n, tiles), 0)
        )

    out, lse = pallas_call(
        functools.partial(
            _kernel,
            spec=spec,
            rows=rows,
            tiles=tiles,
            block=block,
            parts=parts,
            fast_exp2=here.capability is not None,
        ),
        # The heads of one sequence's part lie side by side in memory, and run side by side.
        grid=(G * tiles, parts, B),
        in_specs=[
            pl.BlockSpec(
                (None, None, tiles * rows, row_size(spec.D)),
                lambda n, p, b: (b, quotient(n, tiles), 0, 0),
            ),
            all_pages(inputs.k_pages),
            all_pages(inputs.v_pages),
            pl.BlockSpec((None, inputs.page_table.shape[1]), lambda n, p, b: (b, 0)),
            pl.BlockSpec((B,), lambda n, p, b: (0,)),
        ],
        out_specs=[of_part(row_size(spec.V)), of_part()],
        out_shape=[
            jax.ShapeDtypeStruct(
                (parts, B, G, count, spec.V), spec.dtype if parts == 1 else jnp.float32
            ),
            jax.ShapeDtypeStruct((parts, B, G, count), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        name="attention_paged",
    )(q, inputs.k_pages, inputs.v_pages, inputs.page_table, inputs.lengths)
    out, lse = (out[0], lse[0]) if parts == 1 else merge(out, lse)

    def ungrouped(array: jax.Array) -> jax.Array:
        """[B, G, T * share, ...] -> [B, T, H, ...]"""
        array = array.reshape(B, G, T, share, *array.shape[3:])
        return jnp.swapaxes(array, 1, 2).reshape(B, T, H, *array.shape[4:])

    return ungrouped(out), ungrouped(lse)
