"""Tiles, products and scores, which all attention kernels share.

Each side of a tile is a power of two of at least 16, as Triton's dots require. Rows and columns
past the end of an array are masked at the load and read 0.

Scores are in units of log2, so that every exponential is an exp2:

    s[i,j] * log2(e) = raw[i,j] * factor
    raw = q_i . k_j                          factor = scale * log2(e)
    raw = tanh(q_i . k_j * scale / c)        factor = c * log2(e)       with a softcap c

`factor` is positive, so the maximum is taken over the raw scores, before the multiplication. That
and the subtraction of the maximum are then one multiply-add per score.

With a bias, scores are halved instead, which rounds nothing, and only their difference from the
maximum, or from lse, is brought to units of log2. A bias of float32's lowest number, which hides
nothing, would become -inf in units of log2. And where all scores of a query are -1e9, so is lse:
the difference is then exactly 0, but of two products with log2(e) it may be 128.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import device
from ato_jax.launch import triton as plgpu
from ato_jax.ops.attention.spec import SMALLEST_SLOPE, AttentionSpec

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
# A score of 1 where there is a bias. Not 1: with any product of the bias, Triton loads its tile as
# it lies in memory; without one, every thread loads the pairs that it needs, by a pointer for each,
# and the kernel for dk and dv spilled twice as many registers.
BIASED_UNIT = 0.5

# The shortest side that Triton's dots accept.
SMALLEST_TILE = 16

# float32 products on the tensor cores: each operand is the sum of three bfloat16 numbers, which
# hold all of its bits, and the six largest of the nine products are added. The result is closer to
# the exact sum than float32 multiply-adds in sequence, which run at a quarter of the speed.
EXACT_PRODUCTS = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
# The order in which Pallas adds them up: the part of the first factor, that of the second.
ORDER_OF_PRODUCTS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))

# Shorter rows are not cut into slices: products of so few columns take little time.
SHORTEST_SLICED = 64
# Tiles of longer rows do not fit the registers, and are cut into slices of LONGEST_SLICE columns.
LONGEST_ROW = 256
LONGEST_SLICE = 128

# The layout of the rows that one backward kernel stores for the others, [B, H, T] float32 whatever
# the call's layout is, so that a tile's are contiguous.
ROWS_LAYOUT = "bhtd"


def padded(size: int) -> int:
    """The side of the smallest tile that holds `size` elements."""
    return max(SMALLEST_TILE, pl.next_power_of_2(size))


class Blocks(NamedTuple):
    """How a kernel cuts a problem, and what its exponentials are.

    Attributes:
      q, k: the queries and the keys in a tile.
      parts: how many programs share the blocks that one program's rows go over.
      fast_exp2: take NVIDIA's instruction for 2^x (`exp2`).
    """

    q: int
    k: int
    parts: int
    fast_exp2: bool


# Whole rows, [rows, D] or [rows, V], as the tiles of `column_slices`.
Sliced = tuple[jax.Array, ...]


class Columns(NamedTuple):
    """`size` columns of a row from `start` on, of which `width` exist."""

    start: int
    size: int
    width: int


def column_slices(width: int) -> tuple[Columns, ...]:
    """The slices of a row of `width` elements, each of which is a power of two long.

    Two slices where they are shorter than one would be: 64 + 32 for 96, 128 + 64 for 192. Rows
    longer than LONGEST_ROW have slices of LONGEST_SLICE.
    """
    first = padded(width)
    if width > LONGEST_ROW:
        first = LONGEST_SLICE
    elif width > SHORTEST_SLICED and padded(width - first // 2) < first // 2:
        first //= 2
    found = [Columns(0, first, min(width, first))]
    while (start := found[-1].start + found[-1].size) < width:
        size = min(first, padded(width - start))
        found.append(Columns(start, size, min(width - start, size)))
    return tuple(found)


def fitted(block: int, length: int) -> int:
    """The block, or a shorter one where the whole sequence is shorter."""
    return min(block, padded(length))


def quotient(a: Any, b: int) -> Any:
    """a / b rounded down, for a >= 0, in int32 whatever JAX's default integer is."""
    return a if b == 1 else lax.div(a, np.int32(b))


def span(start: Any, count: int) -> jax.Array:
    """start, ..., start + count - 1, in int32 whatever JAX's default integer is."""
    return start + jnp.arange(count, dtype=jnp.int32)


def row_size(width: int) -> int:
    """The columns of all slices, padding included."""
    return sum(columns.size for columns in column_slices(width))


def sequence_spec(
    layout: str,
    length: int,
    width: int | None,
    block: int,
    *,
    group: int = 1,
    share: int = 1,
    parts: int = 1,
) -> pl.BlockSpec:
    """The block spec of whole sequences, whose ref `load_tile` reads.

    The grid is (blocks, heads, batch).

    Args:
      layout: "bthd" or "bhtd".
      length: T or S.
      width: the columns of a row; None for a vector such as lse.
      block: the tallest tile that will be read.
      group: how many heads a program reads.
      share: how many programs along the grid's heads read the same head.
      parts: how many programs along the grid's batch axis read the same batch entry.
    """
    rows = max(length, block)
    columns = () if width is None else (row_size(width),)
    heads = group if group > 1 else None
    if layout == "bthd":
        return pl.BlockSpec(
            (None, rows, heads, *columns),
            lambda n, h, b: (quotient(b, parts), 0, quotient(h, share), *(0 for _ in columns)),
        )
    return pl.BlockSpec(
        (None, heads, rows, *columns),
        lambda n, h, b: (quotient(b, parts), quotient(h, share), 0, *(0 for _ in columns)),
    )


def whole_spec(array: Any) -> pl.BlockSpec:
    """The block spec of a whole array, whose ref kernels index by batch entry and head."""
    return pl.BlockSpec(array.shape, lambda n, h, b: (0,) * array.ndim)


def _place(
    layout: str, ref: Any, batch: Any, head: Any, start: Any, rows: int, columns: Columns | None
) -> Any:
    index: tuple[Any, ...] = (pl.ds(start, rows),)
    if head is not None:
        index = (*index, head) if layout == "bthd" else (head, *index)
    if batch is not None:
        index = (batch, *index)
    if columns is not None and columns.size != ref.shape[-1]:
        index = (*index, *[slice(None)] * (ref.ndim - 1 - len(index)))
        index = (*index, pl.ds(columns.start, columns.size))
    return ref.at[index]


def _inside(start: Any, rows: int, length: Any, columns: Columns | None) -> jax.Array | None:
    """The mask of the elements of a tile that exist; None where the sizes show that all do."""
    mask = None
    if not isinstance(length, int) or length % rows:
        mask = span(start, rows) < length
    if columns is not None:
        if mask is not None:
            mask = mask[:, None]
        if columns.width != columns.size:
            exists = (jnp.arange(columns.size, dtype=jnp.int32) < columns.width)[None, :]
            mask = exists if mask is None else mask & exists
        if mask is not None:
            mask = jnp.broadcast_to(mask, (rows, columns.size))
    return mask


def load_tile(
    layout: str,
    ref: Any,
    head: Any,
    start: Any,
    rows: int,
    length: Any,
    columns: Columns | None = None,
    whole: bool = False,
    batch: Any = None,
) -> jax.Array:
    """Rows `start` to `start + rows` of one head: [rows, columns.size], or [rows] of a vector.

    Args:
      layout: "bthd" or "bhtd".
      ref: of whole sequences (`sequence_spec`).
      head, batch: their indices; None where the ref holds a single one.
      start, rows: which rows.
      length: rows from here on read 0; it may be traced.
      columns: which columns; None for a vector such as lse.
      whole: promises that all of the rows exist.
    """
    mask = _inside(start, rows, rows if whole else length, columns)
    place = _place(layout, ref, batch, head, start, rows, columns)
    return plgpu.load(place) if mask is None else plgpu.load(place, mask=mask, other=0)


def load_rows(
    layout: str,
    ref: Any,
    head: Any,
    start: Any,
    rows: int,
    length: Any,
    width: int,
    whole: bool = False,
    batch: Any = None,
) -> Sliced:
    """`load_tile` of whole rows of `width` columns: a tile [rows, size] for each slice."""
    return tuple(
        load_tile(layout, ref, head, start, rows, length, columns, whole, batch)
        for columns in column_slices(width)
    )


def store_tile(
    layout: str,
    ref: Any,
    head: Any,
    start: Any,
    value: jax.Array,
    length: Any,
    columns: Columns | None = None,
) -> None:
    rows = value.shape[0]
    place = _place(layout, ref, None, head, start, rows, columns)
    plgpu.store(place, value.astype(ref.dtype), mask=_inside(start, rows, length, columns))


def store_rows(
    layout: str, ref: Any, head: Any, start: Any, value: Sliced, length: Any, width: int
) -> None:
    for tile, columns in zip(value, column_slices(width), strict=True):
        store_tile(layout, ref, head, start, tile, length, columns)


def zeros(rows: int, width: int) -> Sliced:
    return tuple(jnp.zeros((rows, columns.size), jnp.float32) for columns in column_slices(width))


def each(function: Callable[[jax.Array], jax.Array], rows: Sliced) -> Sliced:
    return tuple(function(tile) for tile in rows)


def inner(spec: AttentionSpec, a: Sliced, b: Sliced, *, mirrored: bool = False) -> jax.Array:
    """a . b^T over whole rows; `mirrored`, it has the bits of (b . a^T)^T.

    Exact products differ in their last bit where the factors change places. A score of 20,000 is
    then off by 2e-3, and so is a weight that one kernel takes from q . k^T and another, by the
    norm of the first, from k . q^T.
    """
    product = mirrored_dot if mirrored else functools.partial(dot, trans_b=True)
    first, *others = (product(spec, *pair) for pair in zip(a, b, strict=True))
    return sum(others, first)


def sum_of_products(a: Sliced, b: Sliced) -> jax.Array:
    """The inner product of each row of a with the same row of b, in float32: [rows]."""
    first, *others = (
        jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32), axis=1)
        for x, y in zip(a, b, strict=True)
    )
    return sum(others, first)


def plus_product(spec: AttentionSpec, sums: Sliced, a: jax.Array, rows: Sliced) -> Sliced:
    """sums + a . rows, slice by slice."""
    return tuple(total + dot(spec, a, tile) for total, tile in zip(sums, rows, strict=True))


def dot(spec: AttentionSpec, a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    """a . b or a . b^T, accumulated in float32; float32 is rounded to TF32 only where asked for."""
    precision: Any = None
    if spec.dtype == "float32":
        if device.interpreting():
            return _interpreted_dot(a, b, trans_b)
        precision = EXACT_PRODUCTS if spec.precision == "exact" else lax.Precision.HIGH
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision)


def mirrored_dot(spec: AttentionSpec, a: jax.Array, b: jax.Array) -> jax.Array:
    """a . b^T with the bits of (b . a^T)^T as `dot` computes that.

    Tensor cores sum the products of one instruction in a way that does not depend on which factor
    is first, and the instructions go over the columns in ascending order. So only the order of the
    six products of exact factors has to change places with them.
    """
    if spec.dtype != "float32" or spec.precision != "exact" or device.interpreting():
        return dot(spec, a, b, trans_b=True)
    return exact_products(a, b.T, [(j, i) for i, j in ORDER_OF_PRODUCTS])


def exact_products(
    a: jax.Array, b: jax.Array, order: Sequence[tuple[int, int]] = ORDER_OF_PRODUCTS
) -> jax.Array:
    """a . b by EXACT_PRODUCTS, written out: products of a's part i and b's part j, in order."""
    a_parts, b_parts = _rounded_parts(a), _rounded_parts(b)
    *small, largest = (plgpu.dot(a_parts[i], b_parts[j]) for i, j in order)
    first, *others = small
    total = sum(others, first)
    # An infinite factor's other parts are NaN.
    return jnp.where(total == total, total, 0.0) + largest


def _rounded_parts(x: jax.Array) -> list[jax.Array]:
    """Three bfloat16 arrays whose sum is float32 x."""
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts


def _interpreted_dot(a: jax.Array, b: jax.Array, trans_b: bool) -> jax.Array:
    """A float32 product with sums in float64.

    XLA's order of summation on a CPU depends on the shapes and on the surrounding program, and so
    would the last bit of a score (`multiply_add`).
    """
    with jax.enable_x64(True):
        dimensions = (((1,), (1 if trans_b else 0,)), ((), ()))
        found = lax.dot_general(a.astype(jnp.float64), b.astype(jnp.float64), dimensions)
        return found.astype(jnp.float32)


def multiply_add(a: jax.Array, b: Any, c: jax.Array) -> jax.Array:
    """a * b + c, rounded once, as the compilers for NVIDIA and AMD do it.

    The CPU's compiler rounds once in some loops and twice in others. Scores of two interpreted
    kernels would then differ in the last bit, and the weights of a score of 1000 by 6e-5.
    """
    if not device.interpreting():
        return a * b + c
    with jax.enable_x64(True):
        a, b, c = (jnp.asarray(x, jnp.float32).astype(jnp.float64) for x in (a, b, c))
        return (a * b + c).astype(jnp.float32)


def exp2(x: jax.Array, fast: bool) -> jax.Array:
    """2^x. With `fast` it is NVIDIA's instruction alone, which flushes results below 1e-38 to 0.

    Otherwise NVIDIA's compiler adds three instructions per element for such results.
    """
    if not fast or not device.takes_ptx():
        return jnp.exp2(x)
    (result,) = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


def in_score_units(spec: AttentionSpec, logit: Any) -> Any:
    """A logit or an lse as the scores are: in units of log2, or halved with a bias."""
    return logit * (LOG2_E if spec.bias is None else BIASED_UNIT)


def natural(spec: AttentionSpec, score: Any) -> Any:
    return score * (LN_2 if spec.bias is None else 1 / BIASED_UNIT)


def power(spec: AttentionSpec, difference: jax.Array, fast: bool = False) -> jax.Array:
    """exp of a difference of scores."""
    return exp2(in_log2(spec, difference), fast)


def in_log2(spec: AttentionSpec, difference: Any) -> Any:
    return difference if spec.bias is None else difference * (LOG2_E / BIASED_UNIT)


def score_factor(spec: AttentionSpec) -> float:
    unit = LOG2_E if spec.bias is None else BIASED_UNIT
    if spec.softcap is not None:
        return spec.softcap * unit
    return spec.scale * unit if _keeps_order(spec) else unit


def _keeps_order(spec: AttentionSpec) -> bool:
    return float(np.float32(spec.scale * LOG2_E)) > 0


def raw_scores(spec: AttentionSpec, products: jax.Array) -> jax.Array:
    if spec.softcap is not None:
        return jnp.tanh(products * (spec.scale / spec.softcap))
    return products if _keeps_order(spec) else products * spec.scale


def raw_scores_and_slope(
    spec: AttentionSpec, products: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """`raw_scores` and the softcap's slope 1 - tanh^2; None without a softcap.

    With e = exp(-2|x|) and u = 2 e / (1 + e), tanh |x| = 1 - u and the slope is u (2 - u). The
    subtraction 1 - tanh^2 would cancel in float32 beyond |x| = 8. 1 - u has an absolute error of
    float32's epsilon, which is enough for 16-bit inputs; float32 takes tanh itself.
    """
    if spec.softcap is None:
        return raw_scores(spec, products), None
    x = products * (spec.scale / spec.softcap)
    e = jnp.exp2(jnp.abs(x) * (-2 * LOG2_E))
    u = jnp.where(e > SMALLEST_SLOPE / 4, 2 * e / (1 + e), 0.0)
    raw = jnp.tanh(x) if spec.dtype == "float32" else jnp.where(x < 0, u - 1, 1 - u)
    return raw, u * (2 - u)


def parts_first(array: jax.Array, parts: int) -> jax.Array:
    """[B * parts, ...] -> [parts, B, ...]"""
    return jnp.moveaxis(array.reshape(-1, parts, *array.shape[1:]), 1, 0)
