"""The gradient of a causal decay of heads that are walked in runs of 256 rows (`flows.py` says of
what it is made): Y is known at the start of each run, and no chunk is steep."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.scans import flows, flows_by_xla
from ato_jax.ops.linear_attention.scans.borders import OfSequence
from ato_jax.ops.linear_attention.scans.chunks import CHUNKS_OF_RUN, C, Cut, whole_chunks
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

    def of_start(self, cotangent: LinearState) -> jax.Array:
        """The inner product of the given state and its gradient, [B, H]: the part of the first
        step's decay gradient that comes from that state."""
        kv = jnp.sum(self.kv[:, :, 0].astype(jnp.float32) * cotangent.kv, axis=(2, 3))
        kv = kv if self.unit_of_kv is None else kv * self.unit_of_kv
        found = kv + jnp.sum(self.k_sum[:, :, 0] * cotangent.k_sum, axis=2)
        return found if self.unit is None else found * self.unit


def decay_flows_of_runs(
    spec: LinearAttentionSpec,
    deal: Cut,
    gates: jax.Array,
    queries: AtRuns,
    keys: AtRuns,
    of_start: jax.Array | None,
    decay: jax.Array | None,
    borders: OfSequence,
) -> jax.Array:
    """As `flows.decay_flows`, for a call that returns no state."""
    B, H, length = spec.B, spec.H, whole_chunks(spec.T)
    reads, adds = (side.flows[:, :, :length] for side in (queries, keys))
    ahead, behind = queries.kv[:, :, 1:], keys.kv[:, :, :-1]
    inner = jnp.sum(ahead.astype(jnp.float32) * behind.astype(jnp.float32), axis=(3, 4))
    for side in (queries, keys):
        inner = inner if side.unit_of_kv is None else inner * side.unit_of_kv[..., None]
    # A run's first vector, and the one behind the run before.
    z = queries.k_sum[:, :, CHUNKS_OF_RUN::CHUNKS_OF_RUN]
    u = keys.k_sum[:, :, CHUNKS_OF_RUN - 1 : -1 : CHUNKS_OF_RUN]
    inner += jnp.sum(z * u, axis=3)
    for side in (queries, keys):
        inner = inner if side.unit is None else inner * side.unit[..., None]
    start = jnp.zeros((B, H), jnp.float32) if of_start is None else of_start
    crossing = jnp.concatenate([start[..., None], inner], axis=2)
    unused = places(spec, deal) - crossing.shape[2]
    crossing = jnp.pad(crossing, ((0, 0), (0, 0), (0, unused)))
    passing = (adds - reads).reshape(B, H, -1, C)
    known = Known(crossing, *flows_by_xla.between_places(spec, deal, passing, borders))
    of_queries, of_keys = OfQueries(reads[None]), OfKeys(adds, jnp.zeros_like(adds), keys.kv)
    arrays = gates, of_queries, of_keys, known, decay, borders
    return flows.of_steps(spec, deal, *arrays)
