"""A block of pairs in the backward kernels: p and ds of own rows and others, [R, C] in registers,
as `gradient.py` has them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import OF_COLUMNS, OF_ROWS
from ato_jax.ops.attention.mosaic_gpu import dropout, pairs, visibility
from ato_jax.ops.attention.mosaic_gpu.gradient_storage import ROWS, Walk
from ato_jax.ops.attention.mosaic_gpu.schedule import Item
from ato_jax.ops.attention.mosaic_gpu.softmax import LOG2_E
from ato_jax.ops.attention.spec import SMALLEST_SLOPE, AttentionSpec

# The power of two that float16's weights carry: half of its largest number, which leaves room for
# weights that round above 1.
WEIGHT_SHIFT = 15


def shift(spec: AttentionSpec) -> int:
    return WEIGHT_SHIFT if spec.dtype == "float16" else 0


class Own(NamedTuple):
    """A consumer's part of an item: `norm`, `minus_delta` and dropout's `hashes` of its rows, if
    these are queries, and float16's `gain`; of `bias` and `mask` what is the same for all of a
    row's pairs; and which tiles its x and y are."""

    item: Item
    number: Any
    first_row: Any
    x_place: Any = None
    y_place: Any = None
    norm: Any = None
    minus_delta: Any = None
    gain: Any = None
    hashes: Any = None
    bias: Any = None
    mask: Any = None


class At(NamedTuple):
    """Where a step is: which block of the others, and the slots that it and its bias and mask lie
    in."""

    block: Any
    x_slot: Any
    y_slot: Any
    pairs_slot: Any


def load_planes(walk: Walk, item: Item, head: Any, now: Any, first: Any) -> None:
    """Loads bias and mask of a step, for a head of queries and the others from `first` on."""
    own, ring = walk.own, walk.own.pairs
    if ring is None:
        return
    ring.acquire(now)
    slot = ring.slot(now)
    for plane, ref, tiles in (
        (walk.planes.bias, walk.bias, own.bias),
        (walk.planes.mask, walk.mask, own.mask),
    ):
        if plane is not None and plane.in_ring:
            at, corner = (item.batch, head), (item.first_row, first)
            barrier = ring.produced.at[slot]
            plane.load(ref, walk.of.block, at, corner, tiles.at[slot], barrier)


def with_queries(walk: Walk, mine: Own) -> Own:
    """With what is known of own rows that are queries, [R] each."""
    at = mine.item.batch, mine.item.head, pl.ds(mine.first_row, ROWS)
    norm, minus_delta, hashes = (
        None if ref is None else mosaic.load(ref.at[at], OF_ROWS, optimized=False)
        for ref in (walk.norm, walk.minus_delta, walk.hashes)
    )
    return mine._replace(norm=norm, minus_delta=minus_delta, hashes=hashes)


def with_planes_of(walk: Walk, mine: Own, member: Any) -> Own:
    """With what a head's bias and mask have for all of a row's pairs."""
    head = walk.other_head(mine.item, member) if walk.of.of_keys else mine.item.head
    bias, mask = (
        None if plane is None else plane.of_rows(ref, walk.of.block, at, mine.first_row)
        for at in [(mine.item.batch, head)]
        for plane, ref in zip(walk.planes, (walk.bias, walk.mask), strict=True)
    )
    return mine._replace(bias=bias, mask=mask)


def weights(
    walk: Walk, mine: Own, is_cut: bool, at: At, s: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """p, float32, and the softcap's slope."""
    spec, slope = walk.of.spec, None
    if spec.softcap is not None:
        s, slope = capped(s * (spec.scale / spec.softcap))
    s = with_planes(walk, mine, at, s)
    if is_cut:
        s = hide(walk, mine, at, s)
    norm = per_query(walk, mine.norm, walk.own.norm, at.x_slot)
    if spec.bias is not None:
        return natural_weights(spec, s, norm), slope
    return jnp.exp2(s * ((spec.softcap or spec.scale) * LOG2_E) - norm), slope


def natural_weights(spec: AttentionSpec, s: jax.Array, lse: jax.Array) -> jax.Array:
    """The weights of scores with a bias."""
    return jnp.exp2((s - lse) * LOG2_E + shift(spec))


def with_planes(walk: Walk, mine: Own, at: At, s: jax.Array) -> jax.Array:
    """s with bias, in natural units then, and mask."""
    of_rows = mine.bias, mine.mask
    bias, mask = walk.planes.read(walk.own, of_rows, walk.of.block, at.pairs_slot, mine.number)
    if bias is not None:
        s = pairs.add(s * (walk.of.spec.softcap or walk.of.spec.scale), bias)
    return s if mask is None else pairs.keep(s, mask)


def capped(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """tanh and its slope: with e = exp(-2 |x|) and u = 2 e / (1 + e), tanh |x| = 1 - u, and the
    slope is u (2 - u), which cancels no digits where tanh is close to 1."""
    e = jnp.exp2(jnp.abs(x) * (-2 * LOG2_E))
    u = jnp.where(e > SMALLEST_SLOPE / 4, 2 * e / (1 + e), 0.0)
    return jnp.where(x < 0, u - 1, 1 - u), u * (2 - u)


def hide(walk: Walk, mine: Own, at: At, s: jax.Array) -> jax.Array:
    of, own, limits = walk.of, walk.own, walk.limits(mine.item.batch)
    end = limits.kv_length if of.masks_the_end else None
    ids = None
    if own.ids is not None:
        rows = walk.own_ids.at[mine.item.batch, pl.ds(mine.first_row, ROWS)]
        of_others = mosaic.load(own.ids.at[at.x_slot], OF_COLUMNS)
        ids = mosaic.load(rows, OF_ROWS, optimized=False), of_others  # [R], [C]
    return visibility.hide(s, limits, mine.first_row, at.block * of.others, end, ids)


def per_query(walk: Walk, of_rows: Any, vectors: Any, slot: Any) -> jax.Array:
    """norm or -delta at each pair, [R, C], of own rows or from a slot of others."""
    if vectors is None:
        return mosaic.in_columns(of_rows, walk.of.others)
    return mosaic.in_rows(mosaic.load(vectors.at[slot], OF_COLUMNS), ROWS)


def gradient_of_scores(
    spec: AttentionSpec, mine: Own, p: jax.Array, dp: jax.Array, minus_delta: Any
) -> jax.Array:
    """ds, float32, in units of `unit_of_ds`, without the softcap's slope: from p with `signs`, the
    sum that began with `start_of_dp`, and -delta as `start_of_dp` says."""
    if not spec.dropout_rate:
        return p * (dp if mine.gain is None else dp * mine.gain)
    ds = dropped(spec, p) * dp + jnp.abs(p) * minus_delta
    return ds if mine.gain is None else ds * mine.gain


def unit_of_ds(spec: AttentionSpec) -> float:
    """What ds is to be multiplied by: dropout's factor is left out of dp, and float16's shift is
    in p."""
    return 2.0 ** -shift(spec) / (1 - spec.dropout_rate)


def signs(walk: Walk, mine: Own, at: At, p: jax.Array) -> jax.Array:
    """p, negative where dropout drops it: of two arrays the loops would hold both in registers."""
    of = walk.of
    if not of.spec.dropout_rate:
        return p
    hashes = per_query(walk, mine.hashes, walk.own.hashes, at.x_slot)
    first_key = mine.first_row if of.of_keys else at.block * of.others
    return jnp.where(dropout.kept(of.spec, hashes, first_key, 0 if of.of_keys else 1), p, -p)


def undropped(spec: AttentionSpec, p: jax.Array) -> jax.Array:
    return jnp.abs(p) if spec.dropout_rate else p


def dropped(spec: AttentionSpec, p: jax.Array) -> jax.Array:
    return jnp.maximum(p, 0.0) if spec.dropout_rate else p


def start_of_dp(spec: AttentionSpec, minus_delta: jax.Array) -> jax.Array:
    """The initial value of the sum dp: -delta, or 0 with dropout, which is for dp but not for
    delta. Then -delta is multiplied by 1 - the rate: see `backward.py`."""
    return mosaic.zeros(*minus_delta.shape) if spec.dropout_rate else minus_delta
