"""What the walk of `carried.py` and the tiles of `stored.py` share: pairs, and stored states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import tiles
from ato_jax.ops.linear_attention.triton.tiles import Columns, Slice
from ato_jax.ops.linear_attention.triton.walk import Walk

# What each kernel needs of the gates.
OF_PAIRS = ("up", "fine", "own", "run")
CAUSAL_GATES = (*OF_PAIRS, "reads", "adds", "keeps")
# Where states are stored, nothing is carried from chunk to chunk.
STORED_QUERY_GATES = (*OF_PAIRS, "reads", "reads_right")
STORED_KEY_GATES = (*OF_PAIRS, "adds", "adds_right")


class Normalizer(NamedTuple):
    """What the walk for dq leaves for the one for dk and dv, [B, H, T] float32."""

    e: jax.Array
    inverse: jax.Array  # 1 / den


class QueryGradient(NamedTuple):
    dq: jax.Array
    # dS^T and dz of each piece with queries, [B, H, pieces, V, F] and [B, H, pieces, F].
    sides: list[tuple[jax.Array, jax.Array]]
    normalizer: Normalizer | None
    # By steps, [B, H, steps], for the decay's gradient: what each query reads from the states,
    # and all that it reads, for its own decay.
    reads: list[jax.Array]
    own: jax.Array | None


def state_blocks(spec: LinearAttentionSpec, index: Any) -> list[pl.BlockSpec]:
    """kv [V, F] and k_sum [F] of one piece; `index(*program_ids)` is (batch, head, piece)."""
    return [
        pl.BlockSpec((None, None, None, spec.V, spec.F), lambda *ids: (*index(*ids), 0, 0)),
        pl.BlockSpec((None, None, None, spec.F), lambda *ids: (*index(*ids), 0)),
    ]


# kv [V, F], or where it is read in parts the refs of both, and k_sum in each of so many rows.
State = tuple[Any, jax.Array]


class RowParts(NamedTuple):
    """Rows that a large state is multiplied with: how many, and some columns of them [C, n]."""

    size: int
    load: Callable[[Columns], jax.Array]


def for_state(
    spec: LinearAttentionSpec, rows: jax.Array, load: Callable[[Columns], jax.Array]
) -> Any:
    """The rows as they are multiplied with a state: whole, or in parts."""
    return RowParts(rows.shape[0], load) if tiles.in_parts(spec) else rows


def load_state(spec: LinearAttentionSpec, refs: tuple[Any, Any], rows: int = 1) -> State:
    """kv [V, F], and k_sum in each of `rows` rows, [rows, F]."""
    kv_ref, k_sum_ref = refs
    k_sum = tiles.load_vector(k_sum_ref, spec.F)[None, :]
    kv = refs if tiles.in_parts(spec) else tiles.load_matrix(kv_ref, spec.V, spec.F)
    return kv, jnp.broadcast_to(k_sum, (rows, k_sum.shape[1]))


def over_parts(width: int, body: Callable[[Columns, Any], Any], sums: Any) -> Any:
    """The sums after all parts of an axis of `width`.

    As a loop: while a part is multiplied the next is loaded, and Triton gives the product the
    layout that is best for it alone.
    """
    size = min(tiles.STATE_PART, tiles.padded(width))

    def add_part(i: Any, sums: Any) -> Any:
        return body(Slice(i * size, size, width), sums)

    return jax.lax.fori_loop(0, pl.cdiv(width, size), add_part, sums)


def _values_in_parts(spec: LinearAttentionSpec, phi: RowParts, kv_ref: Any) -> jax.Array:
    """phi [C, F] times kv^T: [C, V]."""

    def add_part(columns: Columns, found: jax.Array) -> jax.Array:
        kv = tiles.load_matrix(kv_ref, spec.V, columns)  # [V, f]
        return found + tiles.product(spec, phi.load(columns), kv, wide=True, trans_b=True)

    zeros = jnp.zeros((phi.size, tiles.padded(spec.V)), jnp.float32)
    return over_parts(spec.F, add_part, zeros)


def _features_in_parts(
    spec: LinearAttentionSpec, rows: RowParts, kv_ref: Any, *, exact: bool = False
) -> jax.Array:
    """rows [C, V] times kv: [C, F]; `exact` as in `tiles.read_state`."""

    def add_part(columns: Columns, found: jax.Array) -> jax.Array:
        kv = tiles.load_matrix(kv_ref, columns, spec.F)  # [v, F]
        return found + tiles.product(spec, rows.load(columns), kv, wide=True)

    def add_rest(columns: Columns, found: jax.Array) -> jax.Array:
        kv = tiles.left_by_rounding(spec, tiles.load_matrix(kv_ref, columns, spec.F))
        return found + tiles.product(spec, rows.load(columns), kv)

    found = jnp.zeros((rows.size, tiles.padded(spec.F)), jnp.float32)
    found = over_parts(spec.V, add_part, found)
    if exact and kv_ref.dtype == jnp.float32:
        found = over_parts(spec.V, add_rest, found)
    return found


def _output_in_parts(
    spec: LinearAttentionSpec, phi_q: RowParts, refs: tuple[Any, Any]
) -> tuple[jax.Array, Any]:
    """num [C, V] and den [C]."""
    kv_ref, k_sum_ref = refs

    def add_part(columns: Columns, sums: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        num, den = sums
        phi = phi_q.load(columns)  # [C, f]
        if spec.normalize:
            z = tiles.load_vector(k_sum_ref, columns)  # [f]
            den += jnp.sum(phi.astype(jnp.float32) * z[None, :], axis=1)
        kv = tiles.load_matrix(kv_ref, spec.V, columns)  # [V, f]
        return num + tiles.product(spec, phi, kv, wide=True, trans_b=True), den

    num = jnp.zeros((phi_q.size, tiles.padded(spec.V)), jnp.float32)
    den = jnp.zeros(phi_q.size, jnp.float32) if spec.normalize else None
    return over_parts(spec.F, add_part, (num, den))


def load_cotangent(spec: LinearAttentionSpec, refs: tuple[Any, Any]) -> State:
    """dS^T [V, F], and dz in parts [16, F], over all of which the sum is the whole."""
    dkv, dz = load_state(spec, refs, tiles.PARTS)
    return dkv, dz / tiles.PARTS


class Pairs(NamedTuple):
    """The pairs of a tile of queries and one of keys: which see each other, and their decay
    (None: 1). [C, C], queries along the rows unless `keys_first` made them."""

    seen: jax.Array
    decay: jax.Array | None

    def weigh(self, w: jax.Array) -> jax.Array:
        return jnp.where(self.seen, w if self.decay is None else w * self.decay, 0.0)

    def add_keys(
        self, spec: LinearAttentionSpec, sums: jax.Array, phi_k: jax.Array, wide: bool
    ) -> jax.Array:
        """sums [C, F], and those of phi(k_j) over the keys that each query sees, with decay."""
        ones = jnp.ones(self.seen.shape, jnp.float32)
        if self.decay is None:
            return sums + tiles.product(spec, jnp.where(self.seen, ones, 0.0), phi_k, wide=wide)
        return tiles.add_weighted_sum(spec, sums, self.weigh(ones), phi_k)


def pairs_of(
    walk: Walk,
    refs: dict[str, Any],
    queries: tuple[Any, int],
    keys: tuple[Any, int],
    *,
    keys_first: bool = False,
) -> Pairs:
    """The pairs of so many steps from the query step on, and so many from the key step on, which
    are of one chunk of the gates."""

    def difference(query: jax.Array, key: jax.Array) -> jax.Array:
        if keys_first:
            return query[None, :] - key[:, None]
        return query[:, None] - key[None, :]

    def difference_of(name: str) -> jax.Array:
        at_query = tiles.load_steps(refs[name], *queries)
        if keys is queries:
            return difference(at_query, at_query)
        return difference(at_query, tiles.load_steps(refs[name], *keys))

    query, key = (jnp.arange(size, dtype=jnp.int32) for _, size in (queries, keys))
    later = difference(query, key)
    if walk.both_ways:
        seen = jnp.full(later.shape, True)
    else:
        seen = later >= (0 if keys is queries else keys[0] - queries[0])
    if "run" in refs:
        seen &= difference_of("run") == 0
    if "up" not in refs:
        return Pairs(seen, None)
    exponent = difference_of("up")
    if "fine" in refs:
        exponent += difference_of("fine")
    # The pairs that are seen one way only have the other sign: never above 0 either way.
    exponent = -jnp.abs(exponent)
    if "own" in refs:
        own = tiles.load_steps(refs["own"], *queries)
        exponent += difference(own, jnp.zeros(keys[1], jnp.float32))
    return Pairs(seen, jnp.exp2(exponent))


def later_pairs(m: jax.Array, walk: Walk, ahead: Any = 0) -> jax.Array:
    """m [C keys, C queries] of the pairs whose query is later; both ways, less the others.

    The first key stands `ahead` steps behind the first query.
    """
    key, query = (jnp.arange(size, dtype=jnp.int32) for size in m.shape)
    apart = query[None, :] - key[:, None] - ahead
    later = jnp.where(apart > 0, m, 0.0)
    return jnp.where(apart < 0, -m, later) if walk.both_ways else later


def _denominator(spec: LinearAttentionSpec, phi_q: jax.Array, z: jax.Array) -> jax.Array:
    """phi_q . z, [C]."""
    if z.shape[0] > 1:
        # Of phi_q as the product rounds it, so that what rounds it all alike cancels.
        return jnp.sum(tiles.rounded(spec, phi_q, wide=True) * z, axis=1)
    # A product, which takes fewer registers than z in each row.
    columns = tiles.as_columns(spec, z.reshape(-1))
    return jnp.sum(tiles.product(spec, phi_q, columns, wide=True), axis=1)


def read_for_output(
    spec: LinearAttentionSpec,
    refs: dict[str, Any],
    name: str,
    start: Any,
    phi_q: Any,
    state: State,
) -> tuple[jax.Array, Any]:
    """A state's part of num [C, V] and den [C]; `name` is the gate through which it is read.

    phi_q [C, F], as `for_state` has it, is in float32 where z is in each of C rows.
    """
    kv, z = state
    if tiles.in_parts(spec):
        num, den = _output_in_parts(spec, phi_q, kv)
    else:
        num = tiles.product(spec, phi_q, kv, wide=True, trans_b=True)
        den = _denominator(spec, phi_q, z) if spec.normalize else None
    if name in refs:
        reads = tiles.load_steps(refs[name], start, num.shape[0])
        num, den = num * reads[:, None], None if den is None else den * reads
    return num, den


def read_for_gradient(
    spec: LinearAttentionSpec,
    refs: dict[str, Any],
    name: str,
    start: Any,
    do: Any,
    state: State,
) -> tuple[jax.Array, Any]:
    """A state's part of g and of z_i, [C, F]; do as `for_state` has it."""
    kv, z = state
    if tiles.in_parts(spec):
        g = _features_in_parts(spec, do, kv[0])
    else:
        g = tiles.product(spec, do, kv, wide=True)
    z_seen = jnp.broadcast_to(z, g.shape) if spec.normalize else None
    if name in refs:
        reads = tiles.load_steps(refs[name], start, g.shape[0])[:, None]
        g, z_seen = g * reads, None if z_seen is None else z_seen * reads
    return g, z_seen


def feature_gradient(
    g: jax.Array, z: jax.Array | None, e: jax.Array | None, inverse: jax.Array
) -> jax.Array:
    """[C, F]: the derivative by phi(q) of what was read with these g and z."""
    if e is not None and z is not None:
        g += e[:, None] * z
    return g * inverse[:, None]


def read_for_values(
    spec: LinearAttentionSpec,
    refs: dict[str, Any],
    name: str,
    start: Any,
    phi_k: Any,
    sums: State,
) -> jax.Array:
    """What the sums dS^T, dz over later queries add to dv, [C, V]; phi_k as `for_state` has it."""
    if tiles.in_parts(spec):
        dv = _values_in_parts(spec, phi_k, sums[0][0])
    else:
        dv = tiles.product(spec, phi_k, sums[0], wide=True, trans_b=True)
    return dv * tiles.load_steps(refs[name], start, dv.shape[0])[:, None] if name in refs else dv


def read_for_features(
    spec: LinearAttentionSpec,
    refs: dict[str, Any],
    name: str,
    start: Any,
    v: Any,
    sums: State,
) -> jax.Array:
    """What they add to phi(k)'s gradient, [C, F]; v as `for_state` has it, dz in parts [16, F]."""
    dz: Any = 0.0
    if spec.normalize or spec.return_state:
        if tiles.in_parts(spec):
            # As a product it would have a layout of its own.
            dz = jnp.sum(sums[1], axis=0)[None, :]
        else:
            # By a product: added as a vector, it led to tiles in more shared memory than there is.
            dz = tiles.in_each_row(spec, v.shape[0], sums[1])
    if tiles.in_parts(spec):
        found = _features_in_parts(spec, v, sums[0][0], exact=True) + dz
    else:
        found = tiles.read_state(spec, v, sums[0]) + dz
    if name in refs:
        found *= tiles.load_steps(refs[name], start, found.shape[0])[:, None]
    return found


def add_weighted(
    spec: LinearAttentionSpec, sums: jax.Array, w: jax.Array, rows: jax.Array
) -> jax.Array:
    """sums + w @ rows; weights with 1 / den in them round differently from query to query, others
    may all be alike."""
    if spec.normalize:
        return sums + tiles.product(spec, w, rows, wide=True)
    return tiles.add_weighted_sum(spec, sums, w, rows)
