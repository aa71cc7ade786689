"""The gradient of a decay of heads that are walked in runs of 256 rows.

The gradient of a causal decay per step is made as `flows.py` says: Y is known at the start of each
run, and no chunk is steep. For a decay per head that is not exact enough. Its gradient is a sum
over all steps, and a running sum of A - R carries each rounding on to the next place, while a
strong decay leaves few steps to each true term: errors are up to 2e-2 of the gradient. So it is
made as

    sum over all pairs of |i - j| M[i, j]

in which a rounding counts for its own pair alone, whatever the decay is. With s the first row of a
run of 256, and l its last one, query and key of different runs are apart by i - s + 1 rows of the
query's run, l - j rows of the key's, and all rows of the runs between:

    sum over queries of (i - s + 1) sum of M[i, j] over the keys ahead of i's run
    + sum over keys of  (l - j) sum of M[i, j] over the queries behind j's run
    + sum over runs of  256 keep (<S, R> + z . u)
    + sum over pairs of one run of (i - j) M[i, j]

with S and z ahead of the run, R and u behind it, and keep what the run leaves of S. The kernels
leave the sums over M, and of each key its part of the last term (`wide_run_flows.py`).

Where rows see both sides, queries ahead of a key count, too. These are the same sums with queries
and keys exchanged: S and z behind the run, R and u ahead of it, and in the last term |i - j|. The
gradient of step t's decay is the sum of M over the pairs with t behind one of the two and not
behind the other. Beside R_i and A_j of `flows.py`, which have the pairs with j < i, with R'_i and
A'_j of those with i < j,

    F(t + 1) = F(t) + (A_t - A'_t) - (R_t - R'_t)

and Y has the inner products of both exchanges. Here a pair of a row with itself counts for
nothing, so that few chunks are steep.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.scans import flows, flows_by_xla
from ato_jax.ops.linear_attention.scans.borders import OfSequence
from ato_jax.ops.linear_attention.scans.chunks import CHUNKS_OF_RUN, RUN, C, Cut, whole_chunks
from ato_jax.ops.linear_attention.scans.flow_places import Known, OfKeys, OfQueries, places
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec, LinearState


class AtRuns(NamedTuple):
    """What one of the two walks leaves: R or A of each row, [B, H, T or more]; the states ahead of
    each run, or their cotangents behind it, [B, H, runs, F, V]; and their vectors, ahead of each
    chunk or behind it, [B, H, chunks of whole runs, F]. States and vectors are to be multiplied by
    `unit`, and states by `unit_of_kv`, too, if these are given, [B, H]."""

    flows: jax.Array
    kv: jax.Array
    k_sum: jax.Array
    unit: jax.Array | None = None
    unit_of_kv: jax.Array | None = None
    within: jax.Array | None = None  # sums over pairs of one run, where the kernels leave them

    def of_start(self, cotangent: LinearState) -> jax.Array:
        """The inner product of the given state and its gradient, [B, H]: the part of the first
        step's decay gradient that comes from that state."""
        kv = jnp.sum(self.kv[:, :, 0].astype(jnp.float32) * cotangent.kv, axis=(2, 3))
        kv = kv if self.unit_of_kv is None else kv * self.unit_of_kv
        found = kv + jnp.sum(self.k_sum[:, :, 0] * cotangent.k_sum, axis=2)
        return found if self.unit is None else found * self.unit


def gradient_of_heads(
    spec: LinearAttentionSpec,
    queries: AtRuns,
    keys: AtRuns,
    beyond: tuple[AtRuns, AtRuns] | None,
    keeps: jax.Array,
) -> jax.Array:
    """The gradient of a decay per head in each batch entry, for a call that returns no state.

    Args:
      queries, keys: their flows are sums of M over pairs with rows of other runs, and `within` of
        keys is the last term's sum for each key, [B, H, T or more].
      beyond: queries and keys of the pairs with i < j, where rows see both sides.
      keeps: what each chunk leaves of the state ahead of it, in each of its rows, [B, H, rows of
        whole runs].

    Returns:
      [B, H, 1], as sums over chunks.
    """
    assert keys.within is not None
    of_runs = keeps.reshape(spec.B, spec.H, -1, CHUNKS_OF_RUN, C)[..., 0]
    kept = RUN * jnp.prod(of_runs[:, :, :-1], axis=3)
    row = jnp.arange(spec.T, dtype=jnp.int32) % RUN
    since, until = (x.astype(jnp.float32) for x in (row + 1, RUN - 1 - row))
    reads, adds, within = (x[:, :, : spec.T] for x in (queries.flows, keys.flows, keys.within))
    of_rows, passing = since * reads + until * adds + within, kept * _inner(queries, keys, 0)
    if beyond is not None:
        behind, ahead = beyond
        reads, adds = (side.flows[:, :, : spec.T] for side in beyond)
        of_rows += until * reads + since * adds
        passing += kept * _inner(ahead, behind, 0)
    return jnp.sum(of_rows, axis=2, keepdims=True) + jnp.sum(passing, axis=2, keepdims=True)


def _inner(queries: AtRuns, keys: AtRuns, shift: int) -> jax.Array:
    """<S, R> + z . u of all runs but the last, [B, H, runs - 1]: with R and u behind the run, and S
    and z ahead of it; or, where `shift` is 1, of the next run. With queries and keys exchanged of
    S and z behind the run, and of R and u ahead of it."""
    count = queries.kv.shape[2] - 1
    ahead, after = queries.kv[:, :, shift:][:, :, :count], keys.kv[:, :, :count]
    inner = jnp.sum(ahead.astype(jnp.float32) * after.astype(jnp.float32), axis=(3, 4))
    for side in (queries, keys):
        inner = inner if side.unit_of_kv is None else inner * side.unit_of_kv[..., None]
    # A run's first vector, and the one behind a run.
    z = queries.k_sum[:, :, shift * CHUNKS_OF_RUN :: CHUNKS_OF_RUN][:, :, :count]
    u = keys.k_sum[:, :, CHUNKS_OF_RUN - 1 :: CHUNKS_OF_RUN][:, :, :count]
    inner += jnp.sum(z * u, axis=3)
    for side in (queries, keys):
        inner = inner if side.unit is None else inner * side.unit[..., None]
    return inner


def decay_flows_of_runs(
    spec: LinearAttentionSpec,
    deal: Cut,
    gates: jax.Array,
    queries: AtRuns,
    keys: AtRuns,
    beyond: tuple[AtRuns, AtRuns] | None,
    of_start: jax.Array | None,
    decay: jax.Array | None,
    borders: OfSequence,
) -> jax.Array:
    """As `flows.decay_flows`, for a call that returns no state. Where rows see both sides, `beyond`
    has queries and keys of the pairs with i < j, the flows are sums over pairs with rows of other
    runs, and `within` are those over pairs of one run with the sign of i - j: of keys [B, H, T or
    more], and of queries over the keys of each chunk of the run, [B, H, 4, T or more]."""
    B, H, length = spec.B, spec.H, whole_chunks(spec.T)
    reads, adds = (side.flows[:, :, :length] for side in (queries, keys))
    inner = _inner(queries, keys, 1)
    if beyond is not None:
        assert queries.within is not None and keys.within is not None
        behind, ahead = beyond
        inner += _inner(ahead, behind, 1)
        within = jnp.where(_chunks_exist(length), queries.within[..., :length], 0.0)
        reads += jnp.sum(within, axis=2) - behind.flows[:, :, :length]
        adds += keys.within[:, :, :length] - ahead.flows[:, :, :length]
        exist = jnp.arange(length, dtype=jnp.int32) < spec.T
        reads, adds = (jnp.where(exist, x, 0.0) for x in (reads, adds))
    start = jnp.zeros((B, H), jnp.float32) if of_start is None else of_start
    crossing = jnp.concatenate([start[..., None], inner], axis=2)
    unused = places(spec, deal) - crossing.shape[2]
    crossing = jnp.pad(crossing, ((0, 0), (0, 0), (0, unused)))
    passing = (adds - reads).reshape(B, H, -1, C)
    known = Known(crossing, *flows_by_xla.between_places(spec, deal, passing, borders))
    of_queries, of_keys = OfQueries(reads[None]), OfKeys(adds, jnp.zeros_like(adds), keys.kv)
    arrays = gates, of_queries, of_keys, known, decay, borders
    return flows.of_steps(spec, deal, *arrays)


def _chunks_exist(length: int) -> jax.Array:
    """Which chunks of a row's run there are, [4, length]."""
    chunk = jnp.arange(CHUNKS_OF_RUN, dtype=jnp.int32)[:, None]
    first = jnp.arange(length, dtype=jnp.int32) // RUN * CHUNKS_OF_RUN
    return (chunk + first) * C < length
