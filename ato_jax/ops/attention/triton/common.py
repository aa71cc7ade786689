"""What the attention kernels share: tiles, block ranges, visibility, scores.

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
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ato_jax import device
from ato_jax.ops.attention.spec import AttentionSpec, within_bounds

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)

# Triton's dots take no side shorter than this.
SMALLEST_TILE = 16

# float32 operands as sums of three bfloat16 pieces, which hold all of their bits, and the six
# largest of the nine products of pieces: on the tensor cores, and closer to the exact sum than
# float32 multiply-adds in sequence, which also run at a quarter of the speed.
EXACT_PRODUCTS = lax.DotAlgorithmPreset.BF16_BF16_F32_X6

Carry = TypeVar("Carry")


def padded(size: int) -> int:
    """The side of the smallest tile that holds `size` elements."""
    return max(SMALLEST_TILE, pl.next_power_of_2(size))


def fitted(block: int, length: int) -> int:
    """The configured block, or less where the whole sequence is shorter."""
    return min(block, padded(length))


def quotient(a: Any, b: int) -> Any:
    """a / b rounded down, for a >= 0, in int32 whatever JAX's default integer is."""
    return lax.div(a, np.int32(b))


def sequence_spec(
    layout: str, length: int, width: int | None, block: int, group: int = 1, share: int = 1
) -> pl.BlockSpec:
    """`group` heads of one batch entry over their whole sequence: a ref for `load_tile`.

    The grid is (blocks, heads, batch); `share` programs along its heads read the same ones.
    A row vector such as lse has no `width`. `block` is the tallest tile that will be read.
    """
    rows = max(length, block)
    columns = () if width is None else (padded(width),)
    heads = group if group > 1 else None
    if layout == "bthd":
        return pl.BlockSpec(
            (None, rows, heads, *columns),
            lambda n, h, b: (b, 0, quotient(h, share), *(0 for _ in columns)),
        )
    return pl.BlockSpec(
        (None, heads, rows, *columns),
        lambda n, h, b: (b, quotient(h, share), 0, *(0 for _ in columns)),
    )


def _place(layout: str, ref: Any, head: Any, start: Any, rows: int) -> Any:
    window = pl.ds(start, rows)
    if head is None:
        return ref.at[window]
    return ref.at[window, head] if layout == "bthd" else ref.at[head, window]


def _inside(start: Any, rows: int, length: int, width: int | None) -> jax.Array | None:
    """Which elements of a tile exist; None where the sizes say that all do."""
    mask = None
    if length % rows:
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
    length: int,
    width: int | None = None,
    whole: bool = False,
) -> jax.Array:
    """Rows `start` to `start + rows` of one head, 0 where there are none.

    `head` is None where the ref holds a single one; `whole` promises that all of the rows exist.
    """
    mask = _inside(start, rows, rows if whole else length, width)
    place = _place(layout, ref, head, start, rows)
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
    place = _place(layout, ref, head, start, rows)
    plgpu.store(place, value.astype(ref.dtype), mask=_inside(start, rows, length, width))


def key_bounds(spec: AttentionSpec, offset: int) -> tuple[int | None, int | None]:
    """Query i sees keys from i + low to i + high, None for no bound."""
    low = None if spec.left is None else offset - spec.left
    high = None if spec.right is None else offset + spec.right
    return low, high


def query_bounds(spec: AttentionSpec, offset: int) -> tuple[int | None, int | None]:
    """Key j is seen by queries from j + low to j + high, None for no bound."""
    low, high = key_bounds(spec, offset)
    return None if high is None else -high, None if low is None else -low


def block_ranges(
    bounds: tuple[int | None, int | None], start: Any, rows: int, length: int, block: int
) -> tuple[Any, Any, Any, Any]:
    """Which blocks of the other side the items from `start` to `start + rows` pair with.

    Item x pairs with x + low to x + high. The blocks first, ..., end - 1 hold all pairs; those
    from whole to whole_end - 1 hold nothing else: they need no mask, and lie inside the sequence.
    Bounds that are known while tracing stay Python ints.
    """
    low, high = bounds
    last = start + rows - 1
    first: Any = 0
    whole: Any = 0
    whole_end: Any = length // block
    end: Any = pl.cdiv(length, block)
    if high is not None:
        whole_end = jnp.minimum(whole_end, quotient(jnp.maximum(start + high + 1, 0), block))
        end = jnp.minimum(end, quotient(jnp.maximum(last + high + block, 0), block))
    if low is not None:
        first = jnp.minimum(end, quotient(jnp.maximum(start + low, 0), block))
        whole = quotient(jnp.maximum(last + low + block - 1, 0), block)
        whole = jnp.minimum(jnp.maximum(whole, first), end)
    if high is not None or low is not None:
        whole_end = jnp.maximum(whole_end, whole)
    return first, whole, whole_end, end


def _loop(lower: Any, upper: Any, body: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
    if isinstance(lower, int) and isinstance(upper, int):
        if lower >= upper:
            return carry
        if upper == lower + 1 and not device.interpreting():
            # A loop known to run once is inlined, and its neighbour then spills a thousand bytes.
            upper = upper + jnp.minimum(pl.program_id(0), 0)
    # Python ints would count in JAX's default integer.
    lower, upper = (np.int32(n) if isinstance(n, int) else n for n in (lower, upper))
    return lax.fori_loop(lower, upper, body, carry)


def for_blocks(
    ranges: tuple[Any, Any, Any, Any], step: Callable[[bool, Any, Carry], Carry], carry: Carry
) -> Carry:
    """`step(masked, n, carry)` over the blocks of `block_ranges`, in order, by separate loops."""
    first, whole, whole_end, end = ranges

    def masked(n: Any, carry: Carry) -> Carry:
        return step(True, n, carry)

    def unmasked(n: Any, carry: Carry) -> Carry:
        return step(False, n, carry)

    carry = _loop(first, whole, masked, carry)
    carry = _loop(whole, whole_end, unmasked, carry)
    return _loop(whole_end, end, masked, carry)


def visible(spec: AttentionSpec, offset: int, query: jax.Array, key: jax.Array) -> jax.Array:
    """Which pairs of a tile see each other: indices that broadcast against each other."""
    bounded = within_bounds(spec, query + offset, key)
    return bounded & (key < spec.S)


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
