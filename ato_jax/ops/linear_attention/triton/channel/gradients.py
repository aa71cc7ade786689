"""The backward of a chunk under a decay per step and channel: the reads of a pass over queries, and
the sums of a pass over keys. `__init__.py` has the mathematics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import products
from ato_jax.ops.linear_attention.triton.channel.chunk import (
    Frame,
    Index,
    Side,
    advance,
    finely,
    over_levels,
    sum_rows,
    weights,
)


class Gradient(NamedTuple):
    """Sums to which the gradient of one side's features is added, [C, F] each.

    `edge`, decayed from the side's rows to the edge, is that gradient without `pairs`. The product
    of that gradient with the features, without `flow`, has no pair of a row with itself. Where the
    frame is mild there is `edge` alone.
    """

    edge: jax.Array
    pairs: tuple[jax.Array, ...]  # pairs and flow


def start_gradient(frame: Frame, edge: jax.Array) -> Gradient:
    return Gradient(edge, () if frame.mild else (jnp.zeros_like(edge), jnp.zeros_like(edge)))


def add_pairs(
    spec: LinearAttentionSpec,
    frame: Frame,
    found: Gradient,
    dw: jax.Array,
    rows: Side,
    columns: Side,
) -> Gradient:
    """The rows' gradient, with the part that the weights' gradient dw [C rows, C columns] adds."""
    if frame.mild:
        return Gradient(found.edge + finely(spec, dw, columns.edge, fine="a"), ())

    def add_level(level: Any, at_level: jax.Array, factor: jax.Array, sums: Any) -> Any:
        of_pairs, flow = sums
        read = products.operand(spec, columns.features * factor, wide=True)
        sum_ = finely(spec, jnp.where(at_level, dw, 0.0), read, fine="a")
        rounded = products.operand(spec, rows.features * factor, wide=True).astype(jnp.float32)
        # No decay is in the pair of a row with itself. In the difference of both sides' sums that
        # pair would cancel except for rounding, which may be more than strong decays leave of the
        # other pairs. A factor, as a choice would spill more registers.
        differ = jnp.minimum(level, 1).astype(jnp.float32)
        return of_pairs + factor * sum_, flow + differ * rounded * sum_

    return Gradient(found.edge, over_levels(frame, add_level, found.pairs))


def finish_gradient(found: Gradient, side: Side) -> tuple[jax.Array, jax.Array]:
    """x's gradient, and the flow: the features' gradient times the features as they were rounded,
    both [C, F]."""
    gradient = found.edge * side.edge_slopes
    flow = found.edge * side.edge.astype(jnp.float32)
    if not found.pairs:
        return gradient, flow
    of_pairs, flow_of_pairs = found.pairs
    return gradient + of_pairs * side.slopes, flow + flow_of_pairs


class Read(NamedTuple):
    """The values and keys as the queries of a chunk read them."""

    dw: jax.Array  # [C, C], do_i . v_j + e_i
    y: jax.Array  # [C, F], S do_i + e_i z
    e: jax.Array | None  # [C]
    inverse: jax.Array  # [C], 1 / den, or the scale
    z: jax.Array  # [1, F] at the end of the chunk


def read_chunk(
    spec: LinearAttentionSpec,
    frame: Frame,
    index: Index,
    reads: Side,
    adds: Side,
    edge: jax.Array,
    v: jax.Array,
    do: jax.Array,
    state: tuple[jax.Array, jax.Array],
) -> Read:
    """From v and do [C, V], and the state before the chunk, kv [V, F] and z [1, F].

    `edge` are the queries' decayed features as the forward rounded them, in float32 [C, F]: the two
    terms that nearly cancel both have them.
    """
    kv, z = state
    row, column = index
    dw = products.product(spec, do, v, trans_b=True)  # [C, C]
    y = finely(spec, do, kv, fine="b")  # [C, F]
    inverse = jnp.full((len(v),), spec.scale, jnp.float32)
    if not spec.normalize:
        return Read(dw, y, None, inverse, z)
    w = weights(spec, frame, reads, adds)  # [C, C]
    w = jnp.where(column <= row, w, 0.0)
    den = jnp.sum(w, axis=1) + jnp.sum(edge * z, axis=1)  # [C]
    out_do = jnp.sum(w * dw, axis=1) + jnp.sum(edge * y, axis=1)
    inverse = 1 / jnp.maximum(den, spec.eps)
    e = jnp.where(den > spec.eps, -inverse * out_do, 0.0)
    dw += e[:, None]
    y += e[:, None] * z
    return Read(dw, y, e, inverse, advance(frame, z, sum_rows(adds.edge)))


def pairs_of_queries(
    spec: LinearAttentionSpec, frame: Frame, index: Index, found: Read, reads: Side, adds: Side
) -> Gradient:
    """The gradient of the queries' features, times den."""
    row, column = index
    dw = jnp.where(column <= row, found.dw, 0.0)
    return add_pairs(spec, frame, start_gradient(frame, found.y), dw, reads, adds)


class KeySums(NamedTuple):
    """The sums of a chunk of keys over the queries that see it."""

    dv: jax.Array  # [C, V]
    gradient: Gradient
    flow: Any  # [C, F], that of the queries, where the pass adds it up, else None
    dkv: jax.Array  # dS^T [V, F] at the start of the chunk, without the chunk's own queries
    dz: jax.Array  # dz [1, F], likewise


def read_cotangent(
    spec: LinearAttentionSpec,
    frame: Frame,
    adds: Side,
    v: jax.Array,
    cotangent: tuple[jax.Array, jax.Array],
) -> KeySums:
    """From the cotangent behind the chunk, dS^T [V, F] and dz [1, F], and v [C, V]."""
    dkv, dz = cotangent
    if frame.mild:
        dkv, dz = dkv * frame.keep, dz * frame.keep
    dv = products.product(spec, adds.edge, dkv, wide=True, trans_b=True)  # [C, V]
    found = start_gradient(frame, finely(spec, v, dkv, fine="b") + dz)  # [C, F]
    if not frame.mild:
        dkv, dz = dkv * frame.keep, dz * frame.keep
    return KeySums(dv, found, None, dkv, dz)


def add_pairs_of_keys(
    spec: LinearAttentionSpec,
    frame: Frame,
    index: Index,
    sums: KeySums,
    adds: Side,
    reads: Side,
    dw: jax.Array,
    inverse: jax.Array,
    do: jax.Array,
) -> KeySums:
    """The sums, with the parts of dv and of the gradient that one head's queries of the chunk add.

    Args:
      dw: [C keys, C queries], times 1 / den.
      inverse: [C queries], 1 / den.
      do: [C queries, V].
    """
    row, column = index  # keys, queries
    w = weights(spec, frame, adds, reads)  # [C keys, C queries]
    # 1 / den multiplies the weights, whose rounding is multiplied too, as do is exact.
    w = jnp.where(row <= column, w * inverse[None, :], 0.0)
    dv = sums.dv + finely(spec, w, do, fine="a")
    dw = jnp.where(row <= column, dw, 0.0)
    return sums._replace(dv=dv, gradient=add_pairs(spec, frame, sums.gradient, dw, adds, reads))
