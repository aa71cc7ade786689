"""Prefix sums that restart at the borders of segments, for the gradient of a decay (`flows.py`).

No pair of a query and a key crosses a border. F is therefore 0 at a segment's first row, and the
terms before that row are not part of the sum. With x_j = A_j - R_j, and Y what crosses the start of
the chunk,

    F(t) = sum of x_j, begins_t <= j < t, and I(t)    in rows whose segment begins in the chunk
    F(t) = Y + sum of x_j, 0 <= j < t, and I(t)       in the rows ahead of the first border

Two neighbouring points of a sequence at which F is known are the ends of a stretch. A point is a
border, where F is 0, or the start of a chunk whose states the kernels leave, where F is Y. At the
start of a chunk within a stretch Y is the value at the first end plus the sum of x from there on.
Where F at the last end differs from that sum, the difference is spread evenly over the stretch's
chunks, counted from the one with the first end to the one with the last end. No sum and no
difference of one segment is carried into another.

Both the Triton kernels and XLA call these functions, but for `in_chunk`, which is XLA's. Rows,
chunks and their numbers lie along the last axis of each array.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.scans.chunks import C


def in_chunk(x: jax.Array, begins: jax.Array) -> jax.Array:
    """The sum of x_j over begins_t <= j < t for each row t of a chunk, [..., C]. A masked sum and
    not a difference of two prefix sums, whose rounding errors other segments would contribute
    to."""
    row = jnp.arange(C, dtype=jnp.int32)
    is_added = (begins[..., None] <= row) & (row < row[:, None])  # [..., C, C]
    return jnp.sum(jnp.where(is_added, x[..., None, :], 0.0), axis=-1)


def at_ends(x: jax.Array, reads: jax.Array, adds: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of x [..., chunks, C] over each chunk's rows ahead of its first border, and over
    those behind its last one; both are over all rows of a chunk without a border.

    Args:
      reads, adds: as `borders.OfSequence.chunks` has them, [..., chunks].
    """
    row = jnp.arange(C, dtype=jnp.int32)
    ahead = jnp.sum(jnp.where(row < reads[..., None], x, 0.0), axis=-1)
    behind = jnp.sum(jnp.where(row >= adds[..., None], x, 0.0), axis=-1)
    return ahead, behind


def over_chunks(behind: jax.Array, have_border: jax.Array) -> jax.Array:
    """The sum of x up to the start of each of several consecutive chunks, [..., chunks]: from the
    last border in a chunk before, or from the start of the first chunk."""
    number = jnp.arange(behind.shape[-1], dtype=jnp.int32)
    earlier = number < number[:, None]
    is_last = earlier & have_border[..., None, :]
    last = jnp.max(jnp.where(is_last, number, jnp.zeros_like(number)), axis=-1)
    is_added = earlier & (number >= last[..., None])
    return jnp.sum(jnp.where(is_added, behind[..., None, :], 0.0), axis=-1)


class Stretch(NamedTuple):
    """The stretch in which a chunk's start lies: the chunk of either end, and whether that end is a
    border."""

    first: Any
    last: Any
    from_border: Any
    to_border: Any


def stretch_of(chunk: Any, low: Any, end: Any, number: Any, have_border: Any) -> Stretch:
    """The stretch of `chunk`.

    Args:
      low, end: the chunk ahead of which the kernels left the states last, and the next such chunk,
        or the number of chunks. Without a border both are the stretch's ends.
      number, have_border: the numbers of the chunks between, and which of them have a border; more
        chunks than these have none. The other arguments lack this last axis.
    """
    chunk, low, end = (jnp.asarray(x, jnp.int32) for x in (chunk, low, end))
    is_earlier = number < chunk[..., None]
    before = jnp.where(have_border & is_earlier, number, low[..., None] - 1)
    behind = jnp.where(have_border & ~is_earlier, number, end[..., None])
    border_before, border_behind = jnp.max(before, axis=-1), jnp.min(behind, axis=-1)
    return Stretch(
        jnp.maximum(border_before, low),
        jnp.minimum(border_behind, end - 1),
        border_before >= low,
        border_behind < end,
    )
