"""A few queries of each sequence against a long cache, contiguous or in pages: every key is read
once.

The T queries of all heads of a group are the rows of one tile, so that they share each load of
keys and values; row r is query r // share of head r % share. The blocks of keys that are seen, of
all sequences one after the other, are dealt to the programs in equal runs, whatever the lengths: so
a program ends one sequence and begins the next where they meet. For each it goes block by block,
with the running maximum and sums of `forward.py`, and leaves its part in slot

    program + sequence

which no other part has, as each part has the next program or the next sequence of the part before.
A second kernel merges the parts of each sequence. Where there are pages, the place of key j is read
from the table block by block, as the keys are.

Of a cache in 8 bits, with factors a_j of the keys' rows and b_j of the values',

    s[i,j]  = a_j (q_i . k_j)
    acc     = acc + b (sum_j (p_j b_j / b) v_j)        b = max_j |b_j| of the block

so that the rows are multiplied as they are, and p_j b_j / b loses nothing in 16 bits that p_j would
not lose. Where the values are the first columns of the keys, they are loaded once.

Such a cache is loaded in words of two columns, which the tensor cores' loads bring to where 16 bits
have to be, and each word is split in registers: so its tiles are those of the even columns and
those of the odd ones, and q's and acc's are, too. They are multiplied in float16, which holds all
numbers of 8 bits, with each row of q divided by the power of two that brings it into range.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import device, launch
from ato_jax.backend import SpecialForward
from ato_jax.device import Device
from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.attention.cached import MOST_QUERIES, CacheInputs
from ato_jax.ops.attention.spec import (
    AttentionSpec,
    Inputs,
    Outputs,
    positions_of_first_query,
    within_bounds,
)
from ato_jax.ops.attention.triton.common import (
    LN_2,
    LONGEST_ROW,
    SMALLEST_TILE,
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
)
from ato_jax.ops.attention.triton.forward import FLOOR

WIDEST_KEY = 576  # the latent attention of DeepSeek: 512 and 64 for positions
WIDEST_VALUE = 512
# Beyond either, rows are several tiles: they and their sums have to fit the registers.
MOST_ROWS = 64
ROWS_BYTES = 16 * 1024
WIDE_ROWS_BYTES = 48 * 1024
# What words become takes registers, too.
WIDE_ROWS_BYTES_IN_8_BITS = 32 * 1024
LONGEST_BLOCK = 128
NUM_WARPS = 4
# For rows in several slices, of which twice as many then share each load, and for more rows than
# the smallest tile of a cache in 8 bits.
MANY_WARPS = 8
# A block of keys and values under way for each of these, in the shared memory.
NUM_STAGES = 3
# There, the compiler loads from the table ahead, too, which takes every second stage.
NUM_INDIRECT_STAGES = 5
# With so many rows in several slices, which leaves room for as many stages.
NUM_STAGES_OF_MOST_ROWS = 2
# Their runs are equal, so that they end together. In 8 bits, what one waits for takes half as long,
# and another one computes meanwhile.
PROGRAMS_PER_MULTIPROCESSOR = 1
PROGRAMS_PER_MULTIPROCESSOR_IN_8_BITS = 2
# The second kernel's programs take so many columns of so many parts at a time, whose loads are
# under way together.
MERGED_COLUMNS = 64
MERGED_PARTS = 8
# Shorter caches are left to attention's own kernel, which needs no second one. It has a program for
# each head: where they fill the card, and several load the same keys, this one took 0.38 of its
# time at 512 keys (B16 H32 G8 T1) and 0.41 at 1024. Otherwise it took 1.02 of it at 512 keys, 1.07
# at 1024 and 0.95 at 4096 (B8 H16 G16 T1), and 1.10, 1.19 and 1.10 with more rows than the smallest
# tile (B1 H32 G8 T16).
FEWEST_KEYS_SHARED = 512
FEWEST_KEYS = 4096
FEWEST_KEYS_OF_MANY_ROWS = 8192


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows and keys of a program's tiles, its warps and pipeline stages, and how many programs
    share the blocks of all sequences. `fast_exp2` takes NVIDIA's instruction for 2^x.
    """

    rows: int
    block: int
    num_warps: int
    num_stages: int
    programs: int
    fast_exp2: bool = False


def unsupported(spec: AttentionSpec, here: Device, k: Any) -> str | None:
    """Why not, for a cache of keys such as `k`; None if it can."""
    return launch.no_triton or out_of_range(spec, here, k)


def out_of_range(spec: AttentionSpec, here: Device, k: Any) -> str | None:
    """What is against the kernel where JAX can lower it."""
    capability = here.capability
    if not device.interpreting():
        if here.platform != "gpu" or capability is None or capability < (8, 0):
            return "needs an NVIDIA GPU of compute capability 8.0 or more"
        if k.dtype == jnp.float8_e4m3fn and capability < (8, 9):
            return "float8_e4m3fn needs compute capability 8.9 or more"
    for name, width, widest in (("D", spec.D, WIDEST_KEY), ("V", spec.V, WIDEST_VALUE)):
        if width > widest:
            return f"{name} must be at most {widest}, got {width}"
    if not spec.B * spec.S:
        return "empty arrays"
    return None


class Part(NamedTuple):
    """Some of a row's columns: start, start + step, ..., `size` of which `width` exist."""

    start: int
    size: int
    width: int
    step: int = 1


# The columns that the tiles of one row hold.
Parts = tuple[Part, ...]


def _parts(width: int, in_words: bool) -> Parts:
    """A row's tiles; `in_words` the even columns of the words of each slice, then the odd ones."""
    if not in_words:
        return tuple(Part(*columns) for columns in column_slices(width))
    return tuple(
        Part(2 * start + odd, size, min(size, max(0, pl.cdiv(width - odd, 2) - start)), 2)
        for start, size, _ in column_slices(pl.cdiv(width, 2))
        for odd in (0, 1)
    )


def _value_parts(spec: AttentionSpec, shared: bool, in_words: bool) -> Parts:
    """The columns of values; where they are `shared` with the keys, cut as those are."""
    if not shared:
        return _parts(spec.V, in_words)
    return tuple(
        part._replace(width=max(0, min(part.width, pl.cdiv(spec.V - part.start, part.step))))
        for part in _parts(spec.D, in_words)
        if part.start - part.start % part.step < spec.V
    )


def _size(parts: Parts) -> int:
    return sum(part.size for part in parts)


def default_config(
    spec: AttentionSpec, here: Device, inputs: CacheInputs | None = None
) -> Config:
    """By the widths of a row, the device's shared memory and the form of the cache; without
    `inputs` it is contiguous, in the spec's dtype, with values of its own.
    """
    shared = inputs is not None and inputs.v is None
    in_pages = inputs is not None and inputs.table is not None
    eight_bits = inputs is not None and inputs.k_scales is not None
    item = jnp.dtype(spec.dtype).itemsize
    widths = row_size(spec.D), _size(_value_parts(spec, shared, False))
    count = spec.T * spec.H // spec.G

    def fitting(size: int, width: int, most: int) -> int:
        found = pl.next_power_of_2(size // (width * item) + 1) // 2
        return max(SMALLEST_TILE, min(found, most))

    wide = max(widths) > LONGEST_ROW
    rows_bytes, most_rows = ROWS_BYTES, MOST_ROWS // 2 if eight_bits else MOST_ROWS
    if wide:
        rows_bytes = WIDE_ROWS_BYTES_IN_8_BITS if eight_bits else WIDE_ROWS_BYTES
    rows = min(fitting(rows_bytes, max(widths), most_rows), padded(count))
    streamed = widths[0] if shared else sum(widths)
    block = fitting(here.shared_memory // NUM_STAGES, streamed, LONGEST_BLOCK)
    num_stages = NUM_INDIRECT_STAGES if wide and in_pages else NUM_STAGES
    if wide and shared and item == 2 and count > MOST_ROWS and not in_pages and not eight_bits:
        rows, num_stages = MOST_ROWS, NUM_STAGES_OF_MOST_ROWS
    each = PROGRAMS_PER_MULTIPROCESSOR_IN_8_BITS if eight_bits else PROGRAMS_PER_MULTIPROCESSOR
    return Config(
        rows,
        block,
        here.waves(MANY_WARPS if wide or (eight_bits and rows > SMALLEST_TILE) else NUM_WARPS),
        num_stages,
        _programs(spec, block, pl.cdiv(count, rows) * spec.G, each * here.multiprocessors),
        fast_exp2=here.capability is not None,
    )


def _programs(spec: AttentionSpec, block: int, others: int, programs: int) -> int:
    """How many share the blocks of all sequences; `others` is how often that is.

    Fewer, where that keeps programs from having two sequences of the same length, and gives none
    more to do.
    """
    blocks = spec.B * pl.cdiv(spec.S, block)
    most = max(1, min(programs // others, blocks))
    even = most - most % spec.B
    return even if even and pl.cdiv(blocks, even) == pl.cdiv(blocks, most) else most


class _Runs(NamedTuple):
    """Which blocks of which sequence each program has; sequences and programs as vectors."""

    length: jax.Array  # [B], as all that follow, padded with sequences of no blocks
    position: jax.Array  # query 0's
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


def _runs(spec: AttentionSpec, config: Config, lengths_ref: Any, first_ref: Any | None) -> _Runs:
    index = jnp.arange(pl.next_power_of_2(spec.B), dtype=jnp.int32)

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref.at[index], mask=index < spec.B, other=0)

    length = jnp.clip(load(lengths_ref), 0, spec.S)
    position = length - spec.T if first_ref is None else load(first_ref)
    first, stop = jnp.zeros_like(length), length
    if spec.left is not None:
        first = quotient(jnp.maximum(position - spec.left, 0), config.block)
    if spec.right is not None:
        stop = jnp.clip(position + spec.T + spec.right, 0, length)
    blocks = jnp.maximum(quotient(stop + config.block - 1, config.block) - first, 0)
    total = jnp.sum(blocks, dtype=jnp.int32)
    each = quotient(total, config.programs)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    return _Runs(length, position, first, ends, blocks, each, total - each * config.programs)


def _count(found: jax.Array) -> jax.Array:
    return jnp.sum(found, dtype=jnp.int32)


class _Rows(NamedTuple):
    """A program's rows of its group, as vectors."""

    spec: AttentionSpec
    group: Any
    row: jax.Array
    query: jax.Array
    head: jax.Array
    exist: jax.Array

    @classmethod
    def of(cls, spec: AttentionSpec, size: int) -> _Rows:
        share = spec.H // spec.G
        tiles = pl.cdiv(spec.T * share, size)
        group = quotient(pl.program_id(0), tiles)
        row = span((pl.program_id(0) - group * tiles) * size, size)
        query = quotient(row, share)
        head = group * share + row - query * share
        return cls(spec, group, row, query, head, row < spec.T * share)

    def outside(self, b: Any) -> tuple[Any, ...]:
        """Where they are in a caller's array."""
        own = (self.query, self.head)
        return (b, *(own if self.spec.layout == "bthd" else own[::-1]))

    def part(self, slot: Any) -> tuple[Any, ...]:
        """Where they are in [slots, G, T * share]."""
        return slot, self.group, self.row

    def nothing(self, parts: Parts) -> tuple[jax.Array, jax.Array, Sliced]:
        """The maximum and the sums of rows that have seen no key: [rows], [rows], [rows, V]."""
        zeros = jnp.zeros(self.row.shape, jnp.float32)
        acc = tuple(jnp.zeros((*self.row.shape, part.size), jnp.float32) for part in parts)
        return jnp.full_like(zeros, FLOOR), zeros, acc

    def load(self, ref: Any, index: tuple[Any, ...], parts: Parts) -> Sliced:
        return _load(ref, index, self.exist, parts)

    def store(
        self,
        refs: tuple[Any, Any],
        index: tuple[Any, ...],
        parts: Parts,
        sums: tuple[jax.Array, jax.Array, Sliced],
    ) -> None:
        """acc / total and lse = ln(2) m + ln(total); 0 and -inf where total is 0."""
        out_ref, lse_ref = refs
        m, total, acc = sums
        nobody = total == 0
        safe = jnp.where(nobody, 1.0, total)
        for tile, part in zip(acc, parts, strict=True):
            place, mask = _place(out_ref, index, self.exist, part)
            plgpu.store(place, (tile / safe[:, None]).astype(out_ref.dtype), mask=mask)
        lse = jnp.where(nobody, -jnp.inf, m * LN_2 + jnp.log(safe))
        plgpu.store(lse_ref.at[index], lse, mask=self.exist)


def _place(
    ref: Any, index: tuple[Any, ...], exist: jax.Array, part: Part
) -> tuple[Any, jax.Array]:
    """Some columns of rows, and which of their elements exist: `index` has vectors and scalars."""
    count = span(0, part.size)[None, :]
    column = part.start + (count if part.step == 1 else count * part.step)
    index = tuple(one[:, None] if jnp.ndim(one) else one for one in index)
    return ref.at[(*index, column)], exist[:, None] & (count < part.width)


def _load(ref: Any, index: tuple[Any, ...], exist: jax.Array, parts: Parts) -> Sliced:
    found = []
    for part in parts:
        place, mask = _place(ref, index, exist, part)
        zero = 0.0 if jnp.issubdtype(ref.dtype, jnp.floating) else 0
        found.append(plgpu.load(place, mask=mask, other=zero))
    return tuple(found)


def _words(rows: jax.Array) -> jax.Array:
    """[..., D] of 8 bits as words of two columns, [..., D / 2]."""
    if rows.shape[-1] % 2:
        rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, 1)])
    return lax.bitcast_convert_type(rows.reshape(*rows.shape[:-1], -1, 2), jnp.int16)


# One number of each of two words as float16: the even columns', or the odd ones'. In the last byte
# of a float16, n + 128 makes it 1024 + 128 + n.
_HALF = {
    "int8": """{{
.reg .b32 number, bias;
mov.b32 bias, 0x64806480;
shr.b32 number, $1, {odd} * 8;
lop3.b32 number, number, 0x00ff00ff, bias, 0x6a;
sub.f16x2 $0, number, bias;
}}""",
    "float8_e4m3fn": """{{
.reg .b32 sorted;
.reg .b16 number<2>;
prmt.b32 sorted, $1, 0, 0x3120;
mov.b32 {{number0, number1}}, sorted;
cvt.rn.f16x2.e4m3x2 $0, number{odd};
}}""",
}


def _halves(words: jax.Array, kept: str, dtype: Any) -> Sequence[jax.Array]:
    """The even and the odd columns of words of two numbers in the dtype `kept`, as `dtype`."""
    if dtype == jnp.float16 and device.takes_ptx():
        found = (
            plgpu.elementwise_inline_asm(
                _HALF[kept].format(odd=odd),
                args=[words],
                constraints="=r,r",
                pack=2,
                result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, dtype)],
            )
            for odd in (0, 1)
        )
        return [half for [half] in found]
    if kept == "int8":
        return tuple(
            lax.shift_right_arithmetic(one, jnp.int16(8)).astype(jnp.float32).astype(dtype)
            for one in (lax.shift_left(words, jnp.int16(8)), words)
        )
    return tuple(
        lax.bitcast_convert_type(one.astype(jnp.int8), jnp.dtype(kept)).astype(dtype)
        for one in (words, lax.shift_right_logical(words, jnp.int16(8)))
    )


def _into_range(rows: Sliced) -> tuple[Sliced, jax.Array]:
    """Rows in float16, and the powers of two [rows] that they are to be multiplied by."""
    rows = each(lambda tile: tile.astype(jnp.float32), rows)
    top = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(tile), axis=1) for tile in rows))
    # Of a float32 the exponent alone, and its negative.
    smallest, largest = (np.int32(exponent << 23) for exponent in (1, 253))
    exponent = lax.bitcast_convert_type(top, jnp.int32) & np.int32(0xFF << 23)
    exponent = jnp.clip(exponent, smallest, largest)
    inverse = lax.bitcast_convert_type(np.int32(254 << 23) - exponent, jnp.float32)
    rows = each(lambda tile: (tile * inverse[:, None]).astype(jnp.float16), rows)
    return rows, lax.bitcast_convert_type(exponent, jnp.float32)


def _kernel(
    refs: Any, out_ref: Any, lse_ref: Any, *, spec: AttentionSpec, config: Config, kept: str | None
) -> None:
    """`refs` are those of `CacheInputs`; of a cache in 8 bits words, of numbers in `kept`."""
    block, fast_exp2 = config.block, config.fast_exp2
    program = pl.program_id(1)
    factor = score_factor(spec)
    rows = _Rows.of(spec, config.rows)
    runs = _runs(spec, config, refs.lengths, refs.first)
    begin, end = runs.start(program), runs.start(program + 1)
    in_words = kept is not None
    key_parts, value_parts = _parts(spec.D, in_words), _value_parts(spec, refs.v is None, in_words)

    def add_sequence(b: Any, nothing: Any) -> Any:
        length = runs.of(b, runs.length)
        position = runs.of(b, runs.position) + rows.query  # [rows]
        q = rows.load(refs.q, rows.outside(b), key_parts)  # [rows, D]
        unit = None
        if in_words and q[0].dtype == jnp.bfloat16:
            q, unit = _into_range(q)

        def find(key: jax.Array) -> tuple[tuple[Any, ...], jax.Array]:
            """Where the keys are, and which there are."""
            exist = key < length
            if refs.table is None:
                return ((b, key, rows.group), exist)
            pages, page = refs.k.shape[:2]
            slot = quotient(key, page)
            number = plgpu.load(refs.table.at[b, slot], mask=exist, other=-1)
            # Of a page that there is not, nothing is read, and nobody sees it.
            exist = (number >= 0) & (number < pages)
            return (jnp.where(exist, number, 0), key - slot * page, rows.group), exist

        def step(n: Any, carry: Any) -> Any:
            m, total, acc = carry  # [rows], [rows], [rows, V]
            key = span(n * block, block)
            index, exist = find(key)

            def rows_of(ref: Any, width: int) -> Sliced:
                place = index if spec.layout == "bthd" else (index[0], index[2], index[1])
                if kept is None:
                    return _load(ref, place, exist, _parts(width, False))
                words = _load(ref, place, exist, _parts(pl.cdiv(width, 2), False))
                return tuple(half for tile in words for half in _halves(tile, kept, q[0].dtype))

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
            v = k[: len(value_parts)]
            if refs.v is not None:
                v = rows_of(refs.v, spec.V)  # [block, V]
            if refs.v_scales is not None:
                scale = plgpu.load(refs.v_scales.at[index], mask=exist, other=0)
            if scale is None:
                return m_next, total, plus_product(spec, acc, p.astype(v[0].dtype), v)
            top = jnp.max(jnp.abs(scale))
            p = p * (scale / jnp.where(top == 0, 1.0, top))[None, :]
            added = plus_product(spec, each(jnp.zeros_like, acc), p.astype(v[0].dtype), v)
            return m_next, total, tuple(a + top * b for a, b in zip(acc, added, strict=True))

        stop = runs.of(b, runs.ends)
        # From a block's place among all of them to its place in the sequence.
        shift = runs.of(b, runs.first) + runs.of(b, runs.blocks) - stop
        start = jnp.maximum(begin, stop - runs.of(b, runs.blocks))
        sums = lax.fori_loop(
            start + shift, jnp.minimum(end, stop) + shift, step, rows.nothing(value_parts)
        )
        rows.store((out_ref, lse_ref), rows.part(program + b), value_parts, sums)
        return nothing

    first = _count(runs.ends <= begin)
    last = jnp.where(end > begin, _count(runs.ends < end) + 1, first)
    lax.fori_loop(first, last, add_sequence, jnp.int32(0))


def _merge_kernel(
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
    """Some columns of rows of one sequence, `MERGED_PARTS` of its parts at a time."""
    b = pl.program_id(1)
    rows = _Rows.of(spec, SMALLEST_TILE)
    width = _merged_columns(spec)
    start = pl.program_id(2) * width
    column = start + span(0, width)
    exist = rows.exist[:, None] & (column < spec.V)[None, :]  # [rows, V]
    runs = _runs(spec, config, lengths_ref, first_ref)
    stop = runs.of(b, runs.ends)
    begin = stop - runs.of(b, runs.blocks)
    program = jnp.arange(pl.next_power_of_2(config.programs), dtype=jnp.int32)
    real = program < config.programs
    first = _count(real & (runs.start(program + 1) <= begin))
    last = jnp.where(stop > begin, _count(real & (runs.start(program) < stop)), first)

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


def _merged_columns(spec: AttentionSpec) -> int:
    return min(MERGED_COLUMNS, padded(spec.V))


def attend(
    spec: AttentionSpec, config: Config, inputs: CacheInputs
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, H, V] in q's dtype and lse [B, T, H] float32, or as the spec's layout has it."""
    B, T, H, G = spec.B, spec.T, spec.H, spec.G
    count = T * H // G
    tiles = pl.cdiv(count, config.rows)
    slots = config.programs + B - 1
    kept = None
    if inputs.k_scales is not None:
        kept = str(inputs.k.dtype)
        v = None if inputs.v is None else _words(inputs.v)
        inputs = inputs._replace(k=_words(inputs.k), v=v)
    rows = (B, T, H) if spec.layout == "bthd" else (B, H, T)

    def whole(array: Any, width: int = 0) -> pl.BlockSpec:
        """An array as it is, with room for tiles of `width` columns."""
        shape = (*array.shape[:-1], max(width, array.shape[-1]))
        return pl.BlockSpec(shape, lambda *program: (0,) * array.ndim)

    keys = _size(_parts(spec.D, kept is not None))
    values = max(_size(_value_parts(spec, inputs.v is None, kept is not None)), MERGED_COLUMNS)
    values = pl.cdiv(values, MERGED_COLUMNS) * MERGED_COLUMNS
    specs = jax.tree.map(whole, inputs)._replace(
        q=whole(inputs.q, keys),
        k=whole(inputs.k, keys),
        v=None if inputs.v is None else whole(inputs.v, values),
    )
    parts = (
        jax.ShapeDtypeStruct((slots, G, count, spec.V), jnp.float32),
        jax.ShapeDtypeStruct((slots, G, count), jnp.float32),
    )
    merged = (
        jax.ShapeDtypeStruct((*rows, spec.V), spec.dtype),
        jax.ShapeDtypeStruct(rows, jnp.float32),
    )
    of_parts, of_merged = ([whole(out, values), whole(lse)] for out, lse in (parts, merged))
    out, lse = pallas_call(
        functools.partial(_kernel, spec=spec, config=config, kept=kept),
        # The heads of one sequence's part lie side by side in memory, and run side by side.
        grid=(G * tiles, config.programs),
        in_specs=[specs._replace(sinks=None)],
        out_specs=of_parts,
        out_shape=list(parts),
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        name="attention_paged",
    )(inputs._replace(sinks=None))
    out, lse = pallas_call(
        functools.partial(_merge_kernel, spec=spec, config=config),
        grid=(G * pl.cdiv(count, SMALLEST_TILE), B, pl.cdiv(spec.V, _merged_columns(spec))),
        in_specs=[*of_parts, specs.lengths, specs.first, specs.sinks],
        out_specs=of_merged,
        out_shape=list(merged),
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        name="attention_paged_merge",
    )(out, lse, inputs.lengths, inputs.first, inputs.sinks)
    return out, lse


def _fewest_keys(spec: AttentionSpec, here: Device) -> int:
    if spec.H > spec.G and spec.B * spec.H > here.multiprocessors:
        return FEWEST_KEYS_SHARED
    many = spec.T * spec.H // spec.G > SMALLEST_TILE
    return FEWEST_KEYS_OF_MANY_ROWS if many else FEWEST_KEYS


def serves(spec: AttentionSpec, here: Device) -> bool:
    """Whether `forward` is for this call of attention: a few queries and many keys.

    Not where a backward follows that wants `Outputs.rest`: out is then attention's own kernel's,
    which differs from this one's by rounding.
    """
    plain = spec.bias is None and spec.mask is None and not spec.segments and not spec.dropout_rate
    few = spec.T <= MOST_QUERIES and spec.S >= _fewest_keys(spec, here)
    new = device.interpreting() or (here.capability is not None and here.capability >= (8, 0))
    return plain and few and new and not spec.keep_rest


def forward(spec: AttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    """A few queries of `attention`."""
    lengths = inputs.kv_lengths
    if lengths is None:
        lengths = jnp.full((spec.B,), spec.S, jnp.int32)
    first = positions_of_first_query(spec, inputs)
    cache = CacheInputs(
        inputs.q,
        inputs.k,
        inputs.v,
        lengths,
        first=first,
        q_lengths=inputs.q_lengths,
        sinks=inputs.sinks,
    )
    return Outputs(*attend(spec, config, cache))


class _FewQueries(SpecialForward[AttentionSpec, Config, Inputs, Outputs]):
    serves = staticmethod(serves)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)


SPECIAL_FORWARD = _FewQueries()
