"""The pairs of a tile of queries and a tile of keys: which see each other, and their decay.

Both tiles belong to one chunk of the decays' prefix sums `up` (`steps.py`), so that pair (i, j)
carries 2^(up[i] - up[j]) where j <= i, and both ways 2^-|up[i] - up[j]|.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import products
from ato_jax.ops.linear_attention.triton.walk import Walk
from ato_jax.triton import tiles

# Beside a launch the products of calls of so few queries, over all heads, take no time.
FEW_QUERIES = 64
# The arrays of `steps.gates` that each kernel reads.
OF_PAIRS = ("up", "fine", "own", "own_fine", "run")
CAUSAL_GATES = (*OF_PAIRS, "reads", "adds", "keeps")
# Where states are stored, no program carries one from chunk to chunk.
STORED_QUERY_GATES = (*OF_PAIRS, "reads", "reads_right")
STORED_KEY_GATES = (*OF_PAIRS, "adds", "adds_right")


class Pairs(NamedTuple):
    """Which pairs see each other, and their decay (None: 1). [C, C], with queries along the rows,
    or along the columns if `pairs_of` was asked for keys first."""

    seen: jax.Array
    decay: jax.Array | None

    def weigh(self, w: jax.Array) -> jax.Array:
        return jnp.where(self.seen, w if self.decay is None else w * self.decay, 0.0)

    def add_keys(
        self, spec: LinearAttentionSpec, sums: jax.Array, phi_k: jax.Array, wide: bool
    ) -> jax.Array:
        """sums [C, F], and the sum of phi(k_j) over the keys that each query sees, with decay."""
        ones = jnp.ones(self.seen.shape, jnp.float32)
        if self.decay is None:
            seen = jnp.where(self.seen, ones, 0.0)
            return sums + products.product(spec, seen, phi_k, wide=wide)
        return products.add_weighted_sum(spec, sums, self.weigh(ones), phi_k)


def _power(coarse: jax.Array, fine: jax.Array) -> jax.Array:
    """2^(coarse + fine), `coarse` exact: their sum would round off 4e-6 of a power of 2^-64."""
    whole = jnp.floor(coarse)
    bits = jnp.maximum(whole.astype(jnp.int32) + 127, 0) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32) * jnp.exp2(coarse - whole + fine)


def pairs_of(
    walk: Walk,
    refs: dict[str, Any],
    queries: tuple[Any, int],
    keys: tuple[Any, int],
    *,
    keys_first: bool = False,
) -> Pairs:
    """The pairs of the queries and keys of some steps, each given as (first step, how many)."""

    def difference(query: jax.Array, key: jax.Array) -> jax.Array:
        if keys_first:
            return query[None, :] - key[:, None]
        return query[:, None] - key[None, :]

    def difference_of(name: str) -> jax.Array:
        at_query = tiles.load_steps(refs[name], *queries)  # [C]
        if keys is queries:
            return difference(at_query, at_query)
        return difference(at_query, tiles.load_steps(refs[name], *keys))  # [C]

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
    if "own_fine" in refs:
        fine = difference_of("fine")
        # Both ways, as below.
        mirrored = exponent + fine > 0
        exponent, fine = (jnp.where(mirrored, -part, part) for part in (exponent, fine))
        own, own_fine = (tiles.load_steps(refs[name], *queries) for name in ("own", "own_fine"))
        nothing = jnp.zeros(keys[1], jnp.float32)
        exponent += difference(own, nothing)
        return Pairs(seen, _power(exponent, fine + difference(own_fine, nothing)))
    if "fine" in refs:
        exponent += difference_of("fine")
    # Both ways, a pair whose key is the later one has the other sign. It is never above 0.
    exponent = -jnp.abs(exponent)
    if "own" in refs:
        own = tiles.load_steps(refs["own"], *queries)  # [C]
        exponent += difference(own, jnp.zeros(keys[1], jnp.float32))
    return Pairs(seen, jnp.exp2(exponent))


def later_pairs(m: jax.Array, walk: Walk, ahead: Any = 0) -> jax.Array:
    """m [C keys, C queries] where the query is the later one; both ways, less those where the key
    is, and 0 on the diagonal.

    The first key stands `ahead` steps behind the first query.
    """
    key, query = (jnp.arange(size, dtype=jnp.int32) for size in m.shape)
    apart = query[None, :] - key[:, None] - ahead
    later = jnp.where(apart > 0, m, 0.0)
    return jnp.where(apart < 0, -m, later) if walk.both_ways else later


def add_weighted(
    spec: LinearAttentionSpec, sums: jax.Array, w: jax.Array, rows: jax.Array
) -> jax.Array:
    """sums + w @ rows. Weights with 1 / den in them round differently from query to query. Others
    may all be alike, and are multiplied in two parts; and so are those of few queries, of which one
    may be all of a sum."""
    if spec.normalize and spec.B * spec.H * spec.T > FEW_QUERIES:
        return sums + products.product(spec, w, rows, wide=True)
    return products.add_weighted_sum(spec, sums, w, rows)
