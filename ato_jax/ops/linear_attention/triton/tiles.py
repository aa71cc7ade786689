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
from jax.experimental.pallas import triton as plgpu

from ato_jax import device
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

COLUMNS = 16  # the narrowest tile that Triton's dots take
# The product of ones [SUM_ROWS, C] with a tile [C, F] is the tile's sum over its rows, in each
# row; it costs nothing beside the other products, at the height that Hopper's tensor cores take.
SUM_ROWS = 64
# float32 factors in three bfloat16 parts each, six products of them on the tensor cores: measured
# as near to float64 as multiply-adds in float32, at D = 64 and T = 65,536, and free of the
# spills into which Triton's float32 dots run from tiles of 32 x 32 on.
EXACT = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6
LOG2_E = math.log2(math.e)
# Of float32's 23 bits of mantissa TF32 keeps 10.
TF32_HALF_ULP = 1 << 12
TF32_MASK = -(1 << 13)

# Maps with |phi(x)| <= |x| + 1, whose features fit into float16 wherever the inputs do.
LINEARLY_BOUNDED = ("elu1", "relu", "identity", "silu", "softplus")


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows per tile, warps and pipeline stages of each pass, and how long its programs are.

    `state_*` sums over the keys, `output_*` writes out, `dq_*` and `dkv_*` are the two passes of
    the backward. A program that leaves sums behind covers at most `piece_rows` rows, fewer where
    the grid would else have less than `programs` programs; one that only reads a finished state
    covers `stream_rows`.
    """

    piece_rows: int
    stream_rows: int
    programs: int
    state_block: int
    state_warps: int
    state_stages: int
    output_block: int
    output_warps: int
    output_stages: int
    dq_block: int
    dq_warps: int
    dq_stages: int
    dkv_block: int
    dkv_warps: int
    dkv_stages: int
    # Whether the device has room for the passes of `wide.py`.
    wide: bool = False


def padded(size: int) -> int:
    """The power of two that a tile's axis takes, at least the smallest that dots take."""
    return max(COLUMNS, pl.next_power_of_2(size))


SMALL_STATE = 64 * 64


def state_size(spec: LinearAttentionSpec) -> int:
    """The elements of a state as a program holds it."""
    return padded(spec.F) * padded(spec.V)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """An axis cut into `count` pieces of `rows` rows, the last of which may be shorter."""

    count: int
    rows: int


def cut(length: int, others: int, most_rows: int, block: int, programs: int) -> Pieces:
    """Pieces of whole blocks, so that `others` times their number is `programs` or more."""
    blocks = pl.cdiv(length, block)
    wanted = max(pl.cdiv(programs, others), pl.cdiv(length, most_rows))
    rows = max(1, blocks // wanted) * block
    return Pieces(pl.cdiv(length, rows), rows)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of one array: their numbers [C], and which of them exist (None: all do)."""

    numbers: jax.Array
    exist: jax.Array | None


def tile_rows(first: Any, block: int, length: int, whole: bool) -> Rows:
    """`block` rows from `first` on; `whole` promises that all of them exist."""
    index = first + jnp.arange(block, dtype=jnp.int32)
    return Rows(index, None if whole else (index >= 0) & (index < length))


def _mask(rows: Rows, width: int) -> jax.Array | None:
    columns = jnp.arange(padded(width), dtype=jnp.int32)[None, :] < width
    if rows.exist is None:
        return None if padded(width) == width else columns
    exist = rows.exist[:, None]
    return exist if padded(width) == width else exist & columns


def load_tile(ref: Any, rows: Rows, width: int, head: Any = None, axis: int = 1) -> jax.Array:
    """[C, padded(width)] of ref [length, width]: zero where there is no row or no column.

    With `head`, ref has one more axis, of heads, at `axis`.
    """
    columns = jnp.arange(padded(width), dtype=jnp.int32)[None, :]
    mask = _mask(rows, width)
    index = [rows.numbers[:, None], columns]
    if head is not None:
        index.insert(axis, head)
    return plgpu.load(ref.at[tuple(index)], mask=mask, other=None if mask is None else 0)


def store_tile(ref: Any, rows: Rows, width: int, tile: jax.Array) -> None:
    """The tile's real rows and columns into ref [length, width]."""
    columns = jnp.arange(padded(width), dtype=jnp.int32)[None, :]
    index = rows.numbers
    if rows.exist is not None:
        # Interpreted, a negative index would wrap round; one past the end is dropped.
        index = jnp.where(index >= 0, index, ref.shape[0])
    plgpu.store(ref.at[index[:, None], columns], tile.astype(ref.dtype), mask=_mask(rows, width))


def load_rows(ref: Any, rows: Rows, head: Any = None) -> jax.Array:
    """[C] of ref [length], or of [heads, length]: zero where there is no row."""
    index = rows.numbers if head is None else (head, rows.numbers)
    other = None if rows.exist is None else 0
    return plgpu.load(ref.at[index], mask=rows.exist, other=other)


def store_rows(ref: Any, rows: Rows, values: jax.Array) -> None:
    index = rows.numbers
    if rows.exist is not None:
        index = jnp.where(index >= 0, index, ref.shape[0])
    plgpu.store(ref.at[index], values, mask=rows.exist)


def load_matrix(ref: Any, height: int, width: int) -> jax.Array:
    """[padded(height), padded(width)] of ref [height, width], such as a state."""
    whole = padded(height) == height
    return load_tile(ref, tile_rows(0, padded(height), height, whole), width)


def store_matrix(ref: Any, height: int, width: int, matrix: jax.Array) -> None:
    whole = padded(height) == height
    store_tile(ref, tile_rows(0, padded(height), height, whole), width, matrix)


def load_vector(ref: Any, size: int) -> jax.Array:
    return load_rows(ref, tile_rows(0, padded(size), size, padded(size) == size))


def store_vector(ref: Any, size: int, vector: jax.Array) -> None:
    store_rows(ref, tile_rows(0, padded(size), size, padded(size) == size), vector)


def features_and_slopes(
    spec: LinearAttentionSpec, x: jax.Array, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """phi(x) and phi'(x), float32 [C, F]; the features of what does not exist are zero."""
    x = x.astype(jnp.float32)
    if spec.feature_map.name == "elu1":
        # exp2 is one instruction where exp is several; and the slope follows from the value.
        features = jnp.where(x > 0, x + 1, jnp.exp2(x * LOG2_E))
        slopes = jnp.where(features > 1, 1.0, features)
    else:
        features, slopes = jax.jvp(spec.feature_map, (x,), (jnp.ones_like(x),))
    mask = _mask(rows, spec.D)
    return (features if mask is None else jnp.where(mask, features, 0)), slopes


def features_of(spec: LinearAttentionSpec, x: jax.Array, rows: Rows) -> jax.Array:
    return features_and_slopes(spec, x, rows)[0]


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


def _left_by_rounding(spec: LinearAttentionSpec, x: jax.Array) -> jax.Array:
    return x - operand(spec, x).astype(jnp.float32)


def weighted_sum(spec: LinearAttentionSpec, w: jax.Array, rows: jax.Array) -> jax.Array:
    """w @ rows, the weights w [.., C] of pairs rounded less than operands are.

    Weights that are nearly alike are rounded alike, and the errors add up. bfloat16 shows it: so
    there, what the rounding left is multiplied, too.
    """
    found = product(spec, w, rows, wide=True)
    if spec.dtype == "bfloat16":
        found += product(spec, _left_by_rounding(spec, w), rows)
    return found


def read_state(spec: LinearAttentionSpec, rows: jax.Array, state: jax.Array) -> jax.Array:
    """rows @ state, the state rounded as little as weights are in `weighted_sum`."""
    found = product(spec, rows, state, wide=True)
    if spec.dtype == "bfloat16":
        found += product(spec, rows, _left_by_rounding(spec, state))
    return found


def as_columns(spec: LinearAttentionSpec, vector: jax.Array) -> jax.Array:
    """float32 [n] as [n, 16] operands, the sum over whose columns is the vector.

    A vector rounded once would be the least precise part of a product with it: so column 0 is
    the rounded vector, column 1 what the rounding left, and the others are zero.
    """
    column = jnp.arange(COLUMNS, dtype=jnp.int32)[None, :]
    rounded = operand(spec, vector, wide=True)
    rest = vector - rounded.astype(jnp.float32)
    columns = jnp.where(column == 0, vector[:, None], 0.0)
    return operand(spec, jnp.where(column == 1, rest[:, None], columns), wide=True)


def no_sums(spec: LinearAttentionSpec, rows: int) -> tuple[jax.Array, jax.Array]:
    """A state to add to: kv transposed, [V, F], and k_sum in each of some rows [rows, F]."""
    height, width = padded(spec.V), padded(spec.F)
    return jnp.zeros((height, width), jnp.float32), jnp.zeros((rows, width), jnp.float32)


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


def heads_axis(spec: LinearAttentionSpec) -> int:
    return 1 if spec.layout == "bthd" else 0


def sequence_shape(
    spec: LinearAttentionSpec, length: int, heads: int, width: int
) -> jax.ShapeDtypeStruct:
    axes = (length, heads) if spec.layout == "bthd" else (heads, length)
    dtype = "float32" if isinstance(spec, UnroundedSpec) else spec.dtype
    return jax.ShapeDtypeStruct((spec.B, *axes, width), dtype)


def launch(
    kernel: Callable[..., None],
    name: str,
    *,
    grid: tuple[int, ...],
    in_specs: Any,
    out_specs: Any,
    out_shape: Any,
    warps: int,
    stages: int,
) -> Callable[..., Any]:
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=device.interpreting(),
        name=name,
    )


@dataclasses.dataclass(frozen=True)
class UnroundedSpec(LinearAttentionSpec):
    """A call whose sequences are written in float32: the caller computes on, and rounds once."""


def unrounded(spec: LinearAttentionSpec) -> UnroundedSpec:
    fields = dataclasses.fields(LinearAttentionSpec)
    return UnroundedSpec(**{field.name: getattr(spec, field.name) for field in fields})
