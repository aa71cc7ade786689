"""A chunk under a decay per step and channel: its decays, its decayed features, its pairs.

With c_i the sum of the decays from the chunk's first row to row i and `total` that over all its
rows, [F], to base 2:

    q^_i = phi(q_i) 2^c_i                    as the state before the chunk is read
    k^_j = phi(k_j) 2^(total - c_j)          as the state after it is added to

A chunk is mild where no channel loses more than `decay.most_lost_at_once`. Then all pairs are
products of the features decayed by c_i and by -c_j. In another chunk a pair is parted where it lies
on either side of the middle of a block of 2, 4, 8, .. rows: at the level of the highest bit in
which i and j differ. With h_i the sum of the decays between row i and the middle of its block (0 on
the diagonal, level 0):

    w = sum over the levels of at_level * (phi(q) 2^h) (phi(k) 2^h)^T

The sums are products with zeros and ones, the decays in three bfloat16 parts. They are exact, while
a difference of prefix sums would lose the weak decays that follow a strong one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention.decay import LEAST_DECAY
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import mapping, products
from ato_jax.ops.linear_attention.triton.calls import SMALL_STATE, state_size
from ato_jax.triton import tiles
from ato_jax.triton.arithmetic import LOG2_E, bfloat16_parts, exp2, truncate_to_bfloat16
from ato_jax.triton.tiles import Columns, Rows

# Rows of a chunk that is not mild: each level of its pairs holds tiles of its own.
STEEP_BLOCK = 16


def load_gates(spec: LinearAttentionSpec, ref: Any, rows: Rows, mild: bool = False) -> jax.Array:
    """The decays [C, F] to base 2, zero where there is no step."""
    gates = tiles.load_tile(ref, rows, spec.F)  # [C, F]
    return (gates if mild else jnp.maximum(gates, LEAST_DECAY)) * LOG2_E


def mild_parts(spec: LinearAttentionSpec, gates: jax.Array) -> list[jax.Array]:
    """As many bfloat16 parts of the decays as matter where no exponent is large.

    In bfloat16 two, which hold 16 bits. With the 8 bits of one part, equal decays would have equal
    errors, and the error of a sum over the steps would be the whole budget.
    """
    return bfloat16_parts(gates, 2 if spec.dtype == "bfloat16" else 3)


def sums_of(chosen: jax.Array, parts: list[jax.Array], start: Any = 0.0) -> jax.Array:
    """`start` and the sums of the decays [C, F], given in parts, that are chosen [C, C] for each
    row."""
    matrix = chosen.astype(jnp.bfloat16)
    for part in parts:
        start += plgpu.dot(matrix, part)
    return start


def sum_rows(tile: jax.Array) -> jax.Array:
    """[1, F], the sum of a tile's rows in float32.

    Not a product: one of fewer rows than WGMMA takes imposes its layout on the others, and one of
    as many fills too many registers.
    """
    return jnp.sum(tile.astype(jnp.float32), axis=0)[None, :]


def pairs(block: int) -> tuple[jax.Array, jax.Array]:
    """The numbers of rows [C, 1] and columns [1, C] of a chunk's pairs."""
    index = jnp.arange(block, dtype=jnp.int32)
    return index[:, None], index[None, :]


# Rows [C, 1] and columns [1, C], computed by `pairs` ahead of a loop over chunks.
Index = tuple[jax.Array, jax.Array]


class Frame(NamedTuple):
    """The decays between the rows of a chunk and its edges.

    Where `mild` is true, `until` lacks `keep`: it is -c, and the state, to which is added in these
    terms, is multiplied by `keep` at the end.
    """

    mild: bool
    gates: jax.Array  # [C, F]
    since: jax.Array  # [C, F], c
    until: jax.Array  # [C, F], total - c
    keep: jax.Array  # [1, F], 2^total


def frame_of(spec: LinearAttentionSpec, ref: Any, rows: Rows, mild: bool) -> Frame:
    gates = load_gates(spec, ref, rows, mild)  # [C, F]
    keep = exp2(sum_rows(gates))
    i, j = pairs(gates.shape[0])
    if mild:
        c = sums_of(j <= i, mild_parts(spec, gates))
        return Frame(mild, gates, c, -c, keep)
    parts = bfloat16_parts(gates)
    return Frame(mild, gates, sums_of(j <= i, parts), sums_of(j > i, parts), keep)


def advance(frame: Frame, state: jax.Array, added: jax.Array) -> jax.Array:
    """The state [.., F] at the end of a chunk, from that before it and what the chunk adds."""
    return (state + added) * frame.keep if frame.mild else state * frame.keep + added


class Side(NamedTuple):
    """The queries or the keys of a chunk, [C, F] each."""

    features: jax.Array  # float32
    slopes: jax.Array
    edge: jax.Array  # the operand: the features, decayed between the rows and the chunk's edge
    edge_slopes: jax.Array  # the slopes, decayed likewise


def unrounded_side(
    spec: LinearAttentionSpec,
    x: jax.Array,
    rows: Rows,
    decay: jax.Array,
    columns: Columns | None = None,
) -> Side:
    """A side whose edge is float32, not an operand yet.

    Args:
      x: a tile of q or k, [C, D].
      decay: that of its rows to an edge of the chunk, [C, F].
      columns: the tile's columns, if it has not all of them.
    """
    features, slopes = mapping.features_and_slopes(spec, x, rows, columns)
    if spec.feature_map.name == "elu1":
        # phi(x) = (max(x, 0) + 1) exp(min(x, 0)), whose second factor is phi'(x).
        x = x.astype(jnp.float32)
        edge_slopes = exp2(jnp.minimum(x, 0.0) * LOG2_E + decay)
        edge = edge_slopes * (jnp.maximum(x, 0.0) + 1)
        if rows.exist is not None or tiles.padded(spec.D) != spec.D:
            edge = jnp.where(features != 0, edge, 0.0)
    else:
        factor = exp2(decay)
        edge, edge_slopes = features * factor, slopes * factor
    return Side(features, slopes, edge, edge_slopes)


def side_of(spec: LinearAttentionSpec, x: jax.Array, rows: Rows, decay: jax.Array) -> Side:
    side = unrounded_side(spec, x, rows, decay)
    return side._replace(edge=products.operand(spec, side.edge, wide=True))


def reading_side(spec: LinearAttentionSpec, x: jax.Array, rows: Rows, decay: jax.Array) -> Side:
    """That of queries for `output_of`."""
    make = unrounded_side if reads_finely(spec) else side_of
    return make(spec, x, rows, decay)


def reads_finely(spec: LinearAttentionSpec) -> bool:
    """Whether outputs read a state by what rounding leaves of the decayed queries, too.

    q^, k^, the state and the output, each rounded by itself to bfloat16, take the whole budget. A
    denominator has some of the roundings in common with the numerator.
    """
    return spec.dtype == "bfloat16" and not spec.normalize and state_size(spec) > SMALL_STATE


def over_levels(frame: Frame, add_level: Callable[..., Any], sums: Any) -> Any:
    """The sums after `add_level(level, at_level [C, C], factor [C, F], sums)` for each level of
    the pairs; factor is 2^h."""
    block = frame.gates.shape[0]
    i, j = pairs(block)

    def add(level: Any, sums: Any) -> Any:
        half = (1 << level) >> 1
        middle = (i & -(2 * half)) + half
        between = (jnp.minimum(middle, i + 1) <= j) & (j < jnp.maximum(middle, i + 1)) & (half > 0)
        at_level = (half <= (i ^ j)) & ((i ^ j) < jnp.maximum(2 * half, 1))
        factor = exp2(sums_of(between, bfloat16_parts(frame.gates)))
        return add_level(level, at_level, factor, sums)

    return jax.lax.fori_loop(0, block.bit_length(), add, sums)


def weights(spec: LinearAttentionSpec, frame: Frame, rows: Side, columns: Side) -> jax.Array:
    """w [C rows, C columns]; right where the query is not the earlier one."""
    if frame.mild:
        return products.product(spec, rows.edge, columns.edge, wide=True, trans_b=True)

    def add_level(_: Any, at_level: jax.Array, factor: jax.Array, w: jax.Array) -> jax.Array:
        found = products.product(
            spec, rows.features * factor, columns.features * factor, wide=True, trans_b=True
        )
        return jnp.where(at_level, found, w)

    return over_levels(frame, add_level, jnp.zeros([frame.gates.shape[0]] * 2, jnp.float32))


def finely(
    spec: LinearAttentionSpec,
    a: jax.Array,
    b: jax.Array,
    *,
    fine: str,
    trans_a: bool = False,
    trans_b: bool = False,
) -> jax.Array:
    """a @ b, where what rounding leaves of the factor called `fine` is multiplied, too.

    The decays' gradient is a difference of sums over a whole piece: so also in float16 and TF32.
    """
    if spec.dtype == "float32" and spec.precision == "exact":
        return products.product(spec, a, b, trans_a=trans_a, trans_b=trans_b)
    x = a if fine == "a" else b
    if spec.dtype == "bfloat16":
        first = truncate_to_bfloat16(x)
    else:
        first = products.operand(spec, x, wide=True).astype(jnp.float32)
    found = jnp.float32(0)
    for part in (first, x - first):
        factors = (part, b) if fine == "a" else (a, part)
        found += products.product(spec, *factors, wide=True, trans_a=trans_a, trans_b=trans_b)
    return found


def output_of(
    spec: LinearAttentionSpec,
    frame: Frame,
    index: Index,
    reads: Side,
    adds: Side,
    v: jax.Array,
    state: tuple[jax.Array, jax.Array],
    store: Callable[[jax.Array], None],
) -> tuple[jax.Array, jax.Array]:
    """Stores the outputs [C, V] of a chunk.

    Args:
      reads: from `reading_side`.
      v: [C, V].
      state: kv [V, F] and z [1, F] before the chunk. Returned are those after it.
    """
    kv, z = state
    row, column = index
    w = weights(spec, frame, reads, adds)  # [C, C]
    w = jnp.where(column <= row, w, 0.0)
    if reads_finely(spec):
        out = finely(spec, reads.edge, kv, fine="a", trans_b=True)  # [C, V]
    else:
        out = products.product(spec, reads.edge, kv, wide=True, trans_b=True)  # [C, V]
    out += finely(spec, w, v, fine="a")
    if spec.normalize:
        den = jnp.sum(w, axis=1)  # [C]
        den += jnp.sum(reads.edge.astype(jnp.float32) * z, axis=1)
        out *= (1 / jnp.maximum(den, spec.eps))[:, None]
        z = advance(frame, z, sum_rows(adds.edge))
    else:
        out *= spec.scale
    store(out)
    added = products.product(spec, v, adds.edge, wide=True, trans_a=True)
    return advance(frame, kv, added), z
