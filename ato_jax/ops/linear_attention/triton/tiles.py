"""What every kernel here is made of: tiles of rows, features, products, and how work is cut.

Sizes that Triton wants as powers of two are padded: `padded(D)` columns are loaded, those beyond
D as zeros, and features beyond F are put to zero, since phi(0) need not be.

Sums over a tile's rows that are wanted tile after tile are products with ones, or added up
elementwise and summed once at the end: a reduction across threads for each tile costs more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import device
from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec

COLUMNS = 16  # the narrowest tile that Triton's dots take
# The product of ones [SUM_ROWS, C] with a tile [C, F] is the tile's sum over its rows, in each
# row; it costs nothing beside the other products, at the height that Hopper's tensor cores take.
SUM_ROWS = 64
# float32 factors in three bfloat16 parts each, six products of them on the tensor cores: measured
# as near to float64 as multiply-adds in float32, at D = 64 and T = 65,536, and free of the
# spills into which Triton's float32 dots run from tiles of 32 x 32 on.
EXACT = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6
PARTS = 16  # rows in which sums of rows are kept, see `row_parts`
LARGEST_IDENTITY = 128
LOG2_E = math.log2(math.e)
# Of float32's 23 bits of mantissa TF32 keeps 10.
TF32_HALF_ULP = 1 << 12
TF32_MASK = -(1 << 13)

# Maps with |phi(x)| <= |x| + 1, whose features fit into float16 wherever the inputs do.
LINEARLY_BOUNDED = ("elu1", "relu", "identity", "silu", "softplus")


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows per tile, warps and pipeline stages of each pass, and how its work is cut.

    `state_*` sums over the keys, `output_*` writes out, `dq_*` and `dkv_*` are the two passes of
    the backward. `*_programs` are dealt the blocks of all sequences; where `*_rows` is not 0,
    each covers so many rows instead. `dq_delayed` says that the pass for dq sums up each block's
    terms when it is at the next. Causal, where programs walk along the rows, each covers at most
    `piece_rows`, fewer where the grid would else have less than `programs`; where `run_rows`, or
    `backward_run_rows` in the backward, is not 0, a state is stored for every run of so many rows
    instead, of which all blocks are parts, and each program takes at most `pair_block` rows of
    the other side at a time, and V is cut into blocks of `stored_columns` or what a program that
    holds a state takes, whichever is more.
    """

    piece_rows: int
    programs: int
    run_rows: int
    backward_run_rows: int
    pair_block: int
    stored_columns: int
    state_block: int
    state_warps: int
    state_stages: int
    state_programs: int
    output_block: int
    output_warps: int
    output_stages: int
    output_programs: int
    output_rows: int
    dq_block: int
    dq_warps: int
    dq_stages: int
    dq_programs: int
    dq_delayed: bool
    dkv_block: int
    dkv_warps: int
    dkv_stages: int
    dkv_programs: int
    dkv_rows: int


def padded(size: int) -> int:
    """The power of two that a tile's axis takes, at least the smallest that dots take."""
    return max(COLUMNS, pl.next_power_of_2(size))


SMALL_STATE = 64 * 64
# The elements of a state [V, F] that a program holds in float32, beside all else: with 8 warps 64
# of a thread's 255 registers.
LARGEST_STATE = 128 * 128
# Of a larger state, which is stored: the columns or rows that lie in shared memory at one time,
# and those of the blocks in which it is summed up.
STATE_PART = 64
STATE_BLOCK = 128


def state_size(spec: LinearAttentionSpec) -> int:
    """The elements of a state as a program holds it."""
    return padded(spec.F) * padded(spec.V)


def in_parts(spec: LinearAttentionSpec) -> bool:
    """Whether no program has a state as a whole: only where states are stored (`split.py`)."""
    return state_size(spec) > LARGEST_STATE


@dataclasses.dataclass(frozen=True)
class Pieces:
    """An axis of `length` rows cut into `count` runs of `rows`, the last maybe shorter."""

    count: int
    rows: int
    length: int

    @property
    def whole(self) -> bool:
        """Whether all rows exist."""
        return self.count * self.rows == self.length

    def block_within(self, wanted: int) -> int:
        """The block of a pass that wants so many rows."""
        return min(wanted, self.rows)

    def turns(self, piece: Any, block: int) -> Any:
        """How many blocks a piece has."""
        return self.rows // block

    def first_row(self, piece: Any, turn: Any, block: int) -> Any:
        """The first row of a piece's block."""
        return piece * self.rows + turn * block


def cut(length: int, others: int, most_rows: int, block: int, programs: int) -> Pieces:
    """Pieces of whole blocks, so that `others` times their number is about `programs` or more.

    Where the blocks divide into equal pieces of nearly that length, they do: then no piece is
    shorter than the others, and no row needs a mask.
    """
    blocks = pl.cdiv(length, block)
    wanted = max(pl.cdiv(programs, others), pl.cdiv(length, most_rows))
    most = max(1, blocks // wanted)
    even = [size for size in range(1, most * 5 // 4 + 1) if blocks % size == 0]
    size = even[-1] if even[-1] * 2 > most else most
    return Pieces(pl.cdiv(blocks, size), size * block, length)


@dataclasses.dataclass(frozen=True)
class Dealt:
    """An axis of `length` rows dealt out in blocks of `block` to `count` programs, in turns.

    What the programs read and write at one time then lies close together, which the memory likes.
    """

    count: int
    block: int
    length: int

    @property
    def whole(self) -> bool:
        return self.length % self.block == 0

    def block_within(self, wanted: int) -> int:
        return self.block

    def turns(self, piece: Any, block: int) -> Any:
        blocks = pl.cdiv(self.length, block)
        if blocks % self.count == 0:
            return blocks // self.count
        return jax.lax.div(blocks - piece + (self.count - 1), jnp.int32(self.count))

    def first_row(self, piece: Any, turn: Any, block: int) -> Any:
        return (piece + turn * self.count) * block


def deal(length: int, others: int, block: int, programs: int) -> Dealt:
    """To as many programs that `others` times their number fills `programs` places.

    Programs that all run at once end together. Where `others` alone are about as many as the
    places, or more, some multiple of them is sought whose last turn is nearly full.
    """
    blocks = pl.cdiv(length, block)
    least = max(1, programs // others)
    most = max(least, 4 * programs // others)

    def filled(count: int) -> float:
        return round(count * others / (programs * pl.cdiv(count * others, programs)), 1)

    count = max(range(least, most + 1), key=lambda count: (filled(count), -count))
    return Dealt(min(count, blocks), block, length)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of one array: their numbers [C], which exist and which are real (None: all are).

    What exists and is not real is padding: never loaded, and stored as zeros.
    """

    numbers: jax.Array
    exist: jax.Array | None
    real: jax.Array | None


def tile_rows(first: Any, block: int, length: int, whole: bool, real_length: Any = None) -> Rows:
    """`block` rows from `first` on; `whole` promises that all of them exist.

    `real_length` is a ref [1], where what lies beyond is padding.
    """
    index = first + jnp.arange(block, dtype=jnp.int32)
    exist = None if whole else (index >= 0) & (index < length)
    if real_length is None:
        return Rows(index, exist, exist)
    real = index < real_length[0]
    return Rows(index, exist, real if exist is None else exist & real)


def indexed_rows(ref: Any, first: Any, block: int, length: int) -> Rows:
    """Rows by their numbers n in ref: -1 - n is padding, and `length` where there is none."""
    entries = load_steps(ref, first, block)
    numbers = jnp.maximum(entries, -1 - entries)
    exist = numbers < length
    return Rows(numbers, exist, exist & (entries >= 0))


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns `first` to `first + count` of an axis of `width`, in a tile of `count`."""

    first: int
    count: int
    width: int

    @property
    def index(self) -> jax.Array:
        return self.first + jnp.arange(self.count, dtype=jnp.int32)

    @property
    def exist(self) -> jax.Array | None:
        return None if self.first + self.count <= self.width else self.index < self.width


@dataclasses.dataclass(frozen=True)
class Slice(Columns):
    """Columns of which the kernel knows the first only when it runs."""

    first: Any

    @property
    def exist(self) -> jax.Array | None:
        return None if self.width % self.count == 0 else self.index < self.width


def all_columns(width: int) -> Columns:
    return Columns(0, padded(width), width)


def in_slices(width: int) -> list[Columns]:
    """The columns in tiles of 64, the last of which may be narrower."""
    whole = padded(width)
    return [Columns(first, min(64, whole - first), width) for first in range(0, whole, 64)]


def _columns(width: int | Columns) -> Columns:
    return width if isinstance(width, Columns) else all_columns(width)


def tile_mask(rows: jax.Array | None, columns: Columns) -> jax.Array | None:
    exist = columns.exist
    if rows is None:
        return None if exist is None else exist[None, :]
    return rows[:, None] if exist is None else rows[:, None] & exist[None, :]


def load_tile(
    ref: Any,
    rows: Rows,
    width: int | Columns,
    head: Any = None,
    axis: int = 1,
    *,
    anew: bool = False,
) -> jax.Array:
    """[C, padded(width)] of ref [length, width], or some of its columns: zero where no row is
    real or no column exists.

    With `head`, ref has one more axis, of heads, at `axis`. `anew` is for a tile that was loaded
    before: the compiler would hold the first one, and what is made of it, in registers. As the
    cache need not keep it any longer, it is another kind of load.
    """
    columns = _columns(width)
    mask = tile_mask(rows.real, columns)
    index = [rows.numbers[:, None], columns.index[None, :]]
    if head is not None:
        index.insert(axis, head)
    return plgpu.load(
        ref.at[tuple(index)],
        mask=mask,
        other=None if mask is None else 0,
        eviction_policy="evict_first" if anew else None,
    )


def store_tile(
    ref: Any,
    rows: Rows,
    width: int | Columns,
    tile: jax.Array,
    head: Any = None,
    axis: int = 1,
) -> None:
    """The tile's rows and columns that exist into ref [length, width], padding as zeros.

    `head` and `axis` as in `load_tile`.
    """
    columns = _columns(width)
    if rows.real is not None and rows.real is not rows.exist:
        tile = jnp.where(rows.real[:, None], tile, 0)
    index = rows.numbers
    if rows.exist is not None:
        # Interpreted, a negative index would wrap round; one past the end is dropped.
        length = ref.shape[0 if head is None or axis else 1]
        index = jnp.where(index >= 0, index, length)
    at = [index[:, None], columns.index[None, :]]
    if head is not None:
        at.insert(axis, head)
    plgpu.store(
        ref.at[tuple(at)],
        tile.astype(ref.dtype),
        mask=tile_mask(rows.exist, columns),
    )


def load_rows(ref: Any, rows: Rows, head: Any = None) -> jax.Array:
    """[C] of ref [length], or of [heads, length]: zero where no row is real."""
    index = rows.numbers if head is None else (head, rows.numbers)
    other = None if rows.real is None else 0
    return plgpu.load(ref.at[index], mask=rows.real, other=other)


def store_rows(ref: Any, rows: Rows, values: jax.Array) -> None:
    index = rows.numbers
    if rows.exist is not None:
        index = jnp.where(index >= 0, index, ref.shape[0])
    plgpu.store(ref.at[index], values, mask=rows.exist)


def load_steps(ref: Any, first: Any, block: int) -> jax.Array:
    """[C] of ref [steps], which is as long as the pieces are together."""
    return plgpu.load(ref.at[first + jnp.arange(block, dtype=jnp.int32)])


def store_steps(ref: Any, first: Any, values: jax.Array) -> None:
    plgpu.store(ref.at[first + jnp.arange(values.shape[0], dtype=jnp.int32)], values)


def scale_rows(tile: jax.Array, ref: Any, first: Any) -> jax.Array:
    """tile [C, X], each row times its step's number in ref."""
    return tile * load_steps(ref, first, tile.shape[0])[:, None]


def all_rows(height: int | Columns) -> Rows:
    """The rows of a matrix, such as a state."""
    columns = _columns(height)
    return Rows(columns.index, columns.exist, columns.exist)


def load_matrix(ref: Any, height: int | Columns, width: int | Columns) -> jax.Array:
    """[padded(height), padded(width)] of ref [height, width], or a part of it."""
    return load_tile(ref, all_rows(height), width)


def store_matrix(ref: Any, height: int | Columns, width: int | Columns, matrix: jax.Array) -> None:
    store_tile(ref, all_rows(height), width, matrix)


def load_vector(ref: Any, size: int | Columns) -> jax.Array:
    return load_rows(ref, all_rows(size))


def store_vector(ref: Any, size: int | Columns, vector: jax.Array) -> None:
    store_rows(ref, all_rows(size), vector)


def exp2(x: jax.Array) -> jax.Array:
    """2 to the power of x, float32.

    On NVIDIA GPUs by the bare instruction, which flushes results below 2^-126 to 0: to keep them,
    the compiler adds three instructions for each element.
    """
    if not device.takes_ptx():
        return jnp.exp2(x)
    return plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=(x,),
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=(jax.ShapeDtypeStruct(x.shape, jnp.float32),),
    )[0]


def features_and_slopes(
    spec: LinearAttentionSpec, x: jax.Array, rows: Rows, columns: Columns | None = None
) -> tuple[jax.Array, jax.Array]:
    """phi(x) and phi'(x), float32 [C, F]; the features of what is not real are zero."""
    x = x.astype(jnp.float32)
    if spec.feature_map.name == "elu1":
        # exp(x) >= x + 1 everywhere, equal at 0: no comparison. The slope follows from the value.
        features = jnp.maximum(x + 1, exp2(jnp.minimum(x * LOG2_E, 0)))
        slopes = jnp.minimum(features, 1)
    else:
        features, slopes = jax.jvp(spec.feature_map, (x,), (jnp.ones_like(x),))
    mask = tile_mask(rows.real, columns or all_columns(spec.D))
    return (features if mask is None else jnp.where(mask, features, 0)), slopes


def features_of(
    spec: LinearAttentionSpec, x: jax.Array, rows: Rows, columns: Columns | None = None
) -> jax.Array:
    return features_and_slopes(spec, x, rows, columns)[0]


def _to_tf32(x: jax.Array) -> jax.Array:
    """Rounded to TF32's mantissa: the tensor cores alone would cut it off, always downwards."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    rounded = jax.lax.bitcast_convert_type((bits + TF32_HALF_ULP) & TF32_MASK, jnp.float32)
    return jnp.where(x == x, rounded, x)  # the carry would turn a NaN into a number


def operand(spec: LinearAttentionSpec, x: jax.Array, *, wide: bool = False) -> jax.Array:
    """`x` as the tensor cores take it: bfloat16, float16, or TF32 or float32 in float32.

    `wide` says that x may leave float16's range (a sum over keys, a weight, a quotient): float16
    calls then use TF32, which has float16's mantissa and float32's range.
    """
    if spec.dtype == "bfloat16":
        return x.astype(jnp.bfloat16)
    if spec.dtype == "float16":
        if not wide:
            return x.astype(jnp.float16)
        # A float16 is a TF32 as it is.
        return x.astype(jnp.float32) if x.dtype == jnp.float16 else _to_tf32(x)
    return _to_tf32(x) if spec.precision == "tf32" else x


def rounded(spec: LinearAttentionSpec, x: jax.Array, *, wide: bool = False) -> jax.Array:
    """float32 x as the `operand` holds it, in float32.

    NVIDIA GPUs round to bfloat16 two elements at a time: the compiler makes one slow instruction
    for each element of a conversion down and up again.
    """
    if spec.dtype != "bfloat16":
        return operand(spec, x, wide=wide).astype(jnp.float32)
    if device.interpreting():
        return jax.lax.reduce_precision(x, 8, 7)
    if not device.takes_ptx():
        return x.astype(jnp.bfloat16).astype(jnp.float32)
    return plgpu.elementwise_inline_asm(
        """{
        .reg .b32 pair, low, high;
        cvt.rn.bf16x2.f32 pair, $3, $2;
        shl.b32 low, pair, 16;
        and.b32 high, pair, 0xffff0000;
        mov.b32 $0, low;
        mov.b32 $1, high;
        }""",
        args=(x,),
        constraints="=f,=f,f,f",
        pack=2,
        result_shape_dtypes=(jax.ShapeDtypeStruct(x.shape, jnp.float32),),
    )[0]


def feature_operand(
    spec: LinearAttentionSpec,
    x: jax.Array,
    rows: Rows,
    columns: Columns | None = None,
    *,
    wide: bool = False,
) -> jax.Array:
    """phi(x) as `operand` has it; what needs no mapping as it was loaded, not through registers."""
    if spec.feature_map.name == "identity" and x.dtype == jnp.bfloat16:
        return x
    return operand(spec, features_of(spec, x, rows, columns), wide=wide)


def product(
    spec: LinearAttentionSpec,
    a: jax.Array,
    b: jax.Array,
    *,
    wide: bool = False,
    trans_a: bool = False,
    trans_b: bool = False,
    in_parts: bool = True,
) -> jax.Array:
    """a @ b in float32, the factors rounded to operands.

    Without `in_parts` exact float32 products are multiply-adds: slower, without shared memory
    for the parts.
    """
    exact = spec.dtype == "float32" and spec.precision == "exact"
    return plgpu.dot(
        operand(spec, a, wide=wide),
        operand(spec, b, wide=wide),
        trans_a=trans_a,
        trans_b=trans_b,
        # DEFAULT is TF32 for float32 operands, and rounds no others.
        precision=(EXACT if in_parts else jax.lax.Precision.HIGHEST)
        if exact
        else jax.lax.Precision.DEFAULT,
    )


def left_by_rounding(spec: LinearAttentionSpec, x: jax.Array) -> jax.Array:
    return x - rounded(spec, x)


def identity(spec: LinearAttentionSpec, size: int) -> jax.Array | None:
    """[size, size]: what `as_accumulated` multiplies with; None where that would round, or fill
    the shared memory."""
    if spec.dtype == "float32" or size > LARGEST_IDENTITY:
        return None
    index = jnp.arange(size, dtype=jnp.int32)
    return operand(spec, jnp.where(index[:, None] == index[None, :], 1.0, 0.0))


def as_accumulated(tile: jax.Array, one: jax.Array | None) -> jax.Array:
    """A loaded tile [C, D] in float32, in the registers where products of it arrive.

    Multiplied by one, exactly: the tensor cores, idle here, spread it and widen it, which saves
    reading it once more in the layout of the accumulators, a path with bank conflicts, and all
    that is computed from it in two layouts.
    """
    if one is None:
        return tile.astype(jnp.float32)
    return plgpu.dot(tile, one)


def weighted_sum(spec: LinearAttentionSpec, w: jax.Array, rows: jax.Array) -> jax.Array:
    """w @ rows, the weights w [.., C] of pairs rounded less than operands are.

    Weights that are nearly alike are rounded alike, and the errors add up. bfloat16 shows it: so
    there, what the rounding left is multiplied, too.
    """
    found = product(spec, w, rows, wide=True)
    if spec.dtype == "bfloat16":
        found += product(spec, left_by_rounding(spec, w), rows)
    return found


def add_weighted_sum(
    spec: LinearAttentionSpec, sums: jax.Array, w: jax.Array, rows: jax.Array
) -> jax.Array:
    """sums + `weighted_sum`."""
    if not in_parts(spec) or spec.dtype != "bfloat16":
        return sums + weighted_sum(spec, w, rows)

    # A loop, because of two products, one of which goes on to the other, Triton has both
    # warpgroups make the first one whole, each for itself, in a layout of its own.
    def add(turn: Any, sums: jax.Array) -> jax.Array:
        return sums + product(spec, jnp.where(turn == 0, w, left_by_rounding(spec, w)), rows)

    return jax.lax.fori_loop(0, 2, add, sums)


def read_state(spec: LinearAttentionSpec, rows: jax.Array, state: jax.Array) -> jax.Array:
    """rows @ state, the state rounded as little as weights are in `weighted_sum`."""
    found = product(spec, rows, state, wide=True)
    if spec.dtype == "bfloat16" and state.dtype == jnp.float32:
        found += product(spec, rows, left_by_rounding(spec, state))
    return found


def as_columns(spec: LinearAttentionSpec, vector: jax.Array) -> jax.Array:
    """float32 [n] as [n, 16] operands, the sum over whose columns is the vector.

    A vector rounded once would be the least precise part of a product with it: so column 0 is
    the rounded vector, column 1 what the rounding left, and the others are zero.
    """
    column = jnp.arange(COLUMNS, dtype=jnp.int32)[None, :]
    rest = vector - rounded(spec, vector, wide=True)
    columns = jnp.where(column == 0, vector[:, None], 0.0)
    return operand(spec, jnp.where(column == 1, rest[:, None], columns), wide=True)


def row_parts(tile: jax.Array) -> jax.Array:
    """[16, F]: sums of the rows of a loaded tile [C, F], over all of which the sum is the whole.

    A thread adds up what it has itself: nothing passes between threads.
    """
    return jnp.sum(tile.reshape(-1, PARTS, tile.shape[1]), axis=0)


def in_each_row(spec: LinearAttentionSpec, rows: int, parts: jax.Array) -> jax.Array:
    """[rows, F]: in each the sum of parts [16, F].

    Half the factor's rows are sums of two, rounded, the others what the rounding left: rounded
    once, equal parts would all be off by the same.
    """
    pairs = jnp.sum(parts.reshape(PARTS // 2, 2, -1), axis=1)  # [8, F]
    high = rounded(spec, pairs, wide=True)
    is_high = jnp.arange(2, dtype=jnp.int32)[:, None, None] == 0
    both = jnp.where(is_high, high[None], (pairs - high)[None])  # [2, 8, F]
    ones = jnp.ones((rows, PARTS), jnp.float32)
    return product(spec, ones, both.reshape(PARTS, -1), wide=True)


def wide_features(spec: LinearAttentionSpec) -> bool:
    return spec.feature_map.name not in LINEARLY_BOUNDED


def sequence_block(
    spec: LinearAttentionSpec,
    length: int,
    width: int,
    index: Callable[..., tuple[Any, Any]],
    heads: int | None = None,
) -> pl.BlockSpec:
    """The whole sequence of one head, [length, width], whatever the spec's layout.

    `index(*program_ids)` is (batch entry, head). With `heads` it is that many heads, `index` says
    which such group, and the ref has an axis for them, `heads_axis(spec)`.
    """

    def bthd(*ids: Any) -> tuple[Any, ...]:
        b, h = index(*ids)
        return b, 0, h, 0

    def bhtd(*ids: Any) -> tuple[Any, ...]:
        b, h = index(*ids)
        return b, h, 0, 0

    if spec.layout == "bthd":
        return pl.BlockSpec((None, length, heads, width), bthd)
    return pl.BlockSpec((None, heads, length, width), bhtd)


def length_arrays(inputs: Inputs) -> dict[str, jax.Array]:
    """[B, 1] each, of those lengths that are given."""
    found = {}
    if inputs.q_lengths is not None:
        found["q_length"] = inputs.q_lengths[:, None]
    if inputs.kv_lengths is not None:
        found["kv_length"] = inputs.kv_lengths[:, None]
    return found


def step_blocks(
    arrays: dict[str, jax.Array], index: Callable[..., tuple[Any, Any]]
) -> dict[str, pl.BlockSpec]:
    """The steps of one batch entry, and kv head where there is that axis; `index` gives both."""

    def of_entry(*ids: Any) -> tuple[Any, ...]:
        return index(*ids)[0], 0

    def of_head(*ids: Any) -> tuple[Any, ...]:
        return *index(*ids), 0

    def of_all_heads(*ids: Any) -> tuple[Any, ...]:
        return index(*ids)[0], 0, 0

    found = {}
    for name, array in arrays.items():
        if array.ndim == 2:
            found[name] = pl.BlockSpec((None, array.shape[1]), of_entry)
        else:
            head = of_all_heads if array.shape[1] == 1 else of_head
            found[name] = pl.BlockSpec((None, None, array.shape[2]), head)
    return found


def heads_axis(spec: LinearAttentionSpec) -> int:
    return 1 if spec.layout == "bthd" else 0


def sequence_shape(
    spec: LinearAttentionSpec, length: int, heads: int, width: int
) -> jax.ShapeDtypeStruct:
    axes = (length, heads) if spec.layout == "bthd" else (heads, length)
    dtype = "float32" if isinstance(spec, UnroundedSpec) else spec.dtype
    return jax.ShapeDtypeStruct((spec.B, *axes, width), dtype)


def piece_id() -> jax.Array:
    """Which piece a program of `launch` has."""
    return pl.program_id(1)


def launch(
    kernel: Callable[..., None],
    name: str,
    *,
    grid: tuple[int, int, int],
    in_specs: Any,
    out_specs: Any,
    out_shape: Any,
    warps: int,
    stages: int,
    aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """A kernel over a grid (pieces, heads, batch), whose specs' index maps take these three.

    `aliases` says which array's memory, by its number, an output takes over, contents and all.

    Programs start in the order heads, pieces, batch: the heads of one row lie side by side in
    memory, and are read and written together.
    """
    pieces, heads, batch = grid

    def turned(spec: pl.BlockSpec) -> pl.BlockSpec:
        index_map: Any = spec.index_map
        return pl.BlockSpec(spec.block_shape, lambda h, p, b: index_map(p, h, b))

    in_specs, out_specs = jax.tree.map(
        turned, (in_specs, out_specs), is_leaf=lambda leaf: isinstance(leaf, pl.BlockSpec)
    )
    return pallas_call(
        kernel,
        grid=(heads, pieces, batch),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        name=name,
    )


def gradient_shape(
    spec: LinearAttentionSpec, length: int, heads: int, width: int
) -> jax.ShapeDtypeStruct:
    """Of the gradient of q or k."""
    shape = sequence_shape(spec, length, heads, width)
    return shape.update(dtype=jnp.float32) if isinstance(spec, MatchedSpec) else shape


@dataclasses.dataclass(frozen=True)
class UnroundedSpec(LinearAttentionSpec):
    """A call whose sequences are written in float32: the caller computes on, and rounds once."""


@dataclasses.dataclass(frozen=True)
class MatchedSpec(LinearAttentionSpec):
    """A call whose caller takes q's gradient times q, less k's times k.

    In that what both say of a pair has to cancel: so both gradients are written in float32, and
    multiply the same roundings of the factors and the pair's weight, which is hardly rounded.
    """


def unrounded(spec: LinearAttentionSpec) -> UnroundedSpec:
    return UnroundedSpec(**_fields(spec))


def matched(spec: LinearAttentionSpec) -> MatchedSpec:
    return MatchedSpec(**_fields(spec))


def _fields(spec: LinearAttentionSpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
