"""What the attention kernels share: tiles, products, scores.

A tile is a power of two in each direction, at least 16, as Triton's dots ask. Rows and columns
past the end of an array are masked at the load and read 0.

Scores live in units of log2, so that every exponential is an exp2:

    s[i,j] * log2(e) = raw[i,j] * factor
    raw = q_i . k_j                          factor = scale * log2(e)
    raw = tanh(q_i . k_j * scale / c)        factor = c * log2(e)       with a softcap c

`factor` is positive, so the maximum over raw scores is found before the multiplication, which
then merges with the subtraction of the maximum into one multiply-add per score.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ato_jax import device
from ato_jax.ops.attention.spec import AttentionSpec

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)

# Triton's dots take no side shorter than this.
SMALLEST_TILE = 16

# float32 operands as sums of three bfloat16 pieces, which hold all of their bits, and the six
# largest of the nine products of pieces: on the tensor cores, and closer to the exact sum than
# float32 multiply-adds in sequence, which also run at a quarter of the speed.
EXACT_PRODUCTS = lax.DotAlgorithmPreset.BF16_BF16_F32_X6


# The rows that one backward kernel leaves for the others, [B, H, T] float32 whatever the layout, so
# that a tile's are contiguous.
ROWS_LAYOUT = "bhtd"


def padded(size: int) -> int:
    """The side of the smallest tile that holds `size` elements."""
    return max(SMALLEST_TILE, pl.next_power_of_2(size))


def fitted(block: int, length: int) -> int:
    """The configured block, or less where the whole sequence is shorter."""
    return min(block, padded(length))


def quotient(a: Any, b: int) -> Any:
    """a / b rounded down, for a >= 0, in int32 whatever JAX's default integer is."""
    return a if b == 1 else lax.div(a, np.int32(b))


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
    """`group` heads of one batch entry over their whole sequence: a ref for `load_tile`.

    The grid is (blocks, heads, batch); `share` programs along its heads and `parts` along its
    batch read the same ones. A row vector such as lse has no `width`. `block` is the tallest tile
    that will be read.
    """
    rows = max(length, block)
    columns = () if width is None else (padded(width),)
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
    """The whole array, for every program: a ref that is indexed by batch entry and head."""
    return pl.BlockSpec(array.shape, lambda n, h, b: (0,) * array.ndim)


def _place(layout: str, ref: Any, batch: Any, head: Any, start: Any, rows: int) -> Any:
    index: tuple[Any, ...] = (pl.ds(start, rows),)
    if head is not None:
        index = (*index, head) if layout == "bthd" else (head, *index)
    return ref.at[index if batch is None else (batch, *index)]


def _inside(start: Any, rows: int, length: Any, width: int | None) -> jax.Array | None:
    """Which elements of a tile exist; None where the sizes say that all do."""
    mask = None
    if not isinstance(length, int) or length % rows:
        mask = start + jnp.arange(rows) < length
    if width is not None:
        if mask is not None:
            mask = mask[:, None]
        if width != padded(width):
            exists = (jnp.arange(padded(width)) < width)[None, :]
            mask = exists if mask is None else mask & exists
        if mask is not None:
            mask = jnp.broadcast_to(mask, (rows, padded(width)))
    return mask


def load_tile(
    layout: str,
    ref: Any,
    head: Any,
    start: Any,
    rows: int,
    length: Any,
    width: int | None = None,
    whole: bool = False,
    batch: Any = None,
) -> jax.Array:
    """Rows `start` to `start + rows` of one head, 0 from `length` on, which may be traced.

    `head` and `batch` are None where the ref holds a single one; `whole` promises that all of the
    rows exist.
    """
    mask = _inside(start, rows, rows if whole else length, width)
    place = _place(layout, ref, batch, head, start, rows)
    return plgpu.load(place) if mask is None else plgpu.load(place, mask=mask, other=0)


def store_tile(
    layout: str,
    ref: Any,
    head: Any,
    start: Any,
    value: jax.Array,
    length: int,
    width: int | None = None,
) -> None:
    rows = value.shape[0]
    place = _place(layout, ref, None, head, start, rows)
    plgpu.store(place, value.astype(ref.dtype), mask=_inside(start, rows, length, width))


def dot(spec: AttentionSpec, a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    """a . b or a . b^T, accumulated in float32; float32 operands are rounded only if asked."""
    precision: Any = None
    if spec.dtype == "float32":
        precision = EXACT_PRODUCTS if spec.precision == "exact" else lax.Precision.HIGH
        if device.interpreting():
            precision = lax.Precision.HIGHEST
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision)


def exp2(x: jax.Array, fast: bool) -> jax.Array:
    """2^x; `fast` by the bare instruction, which flushes results below 1e-38 to 0.

    Without it the compiler adds three instructions per element to get those right.
    """
    if not fast or device.interpreting():
        return jnp.exp2(x)
    (result,) = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


def score_factor(spec: AttentionSpec) -> float:
    if spec.softcap is not None:
        return spec.softcap * LOG2_E
    return spec.scale * LOG2_E if _keeps_order(spec) else LOG2_E


def _keeps_order(spec: AttentionSpec) -> bool:
    return float(np.float32(spec.scale * LOG2_E)) > 0


def raw_scores(spec: AttentionSpec, products: jax.Array) -> jax.Array:
    if spec.softcap is not None:
        return jnp.tanh(products * (spec.scale / spec.softcap))
    return products if _keeps_order(spec) else products * spec.scale


def parts_first(array: jax.Array, parts: int) -> jax.Array:
    """[B * parts, ...] -> [parts, B, ...]"""
    return jnp.moveaxis(array.reshape(-1, parts, *array.shape[1:]), 1, 0)
