"""Segment ids made canonical: runs of keys numbered in order, queries pointed at theirs.

An id that returns starts a new segment, so an id alone does not name one. A segment is a run of
equal ids. Where queries and keys share one array of ids, a query sees the run at its own place.
Where each side has its own, the runs of one id are counted from the end on both sides, and a query
sees the run of keys with its id and its count: its own run where both sides have the same ids, or
where the queries are the last part of the keys' sequence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ato_jax import meshes
from ato_jax.ops.common import number_runs, starts_of_runs


def _sorted_runs(ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """ids and order sorted by (id, position), and the count of runs begun by then."""
    order = jnp.argsort(ids, stable=True)
    begun = jnp.cumsum(starts_of_runs(ids).at[0].set(1)[order], dtype=jnp.int32)
    return ids[order], order, begun


def _last_count(sorted_ids: jax.Array, begun: jax.Array, ids: jax.Array) -> jax.Array:
    """The count of runs begun by the end of each id's group."""
    end = jnp.searchsorted(sorted_ids, ids, side="right") - 1
    return begun[jnp.maximum(end, 0)]


def _match(q_ids: jax.Array, kv_ids: jax.Array) -> jax.Array:
    """[T], [S] ids of one batch entry -> the number of the run that each query sees, or -1."""
    q_sorted, q_order, q_begun = _sorted_runs(q_ids)
    kv_sorted, kv_order, kv_begun = _sorted_runs(kv_ids)
    from_end = jnp.zeros_like(q_ids).at[q_order].set(
        _last_count(q_sorted, q_begun, q_sorted) - q_begun
    )
    # kv_begun never falls along the sorted keys: the wanted run starts where it reaches `wanted`.
    wanted = _last_count(kv_sorted, kv_begun, q_ids) - from_end
    index = jnp.searchsorted(kv_begun, wanted, side="left")
    found = kv_sorted[jnp.minimum(index, kv_ids.size - 1)] == q_ids
    run = number_runs(kv_ids[None])[0][kv_order[jnp.minimum(index, kv_ids.size - 1)]]
    return jnp.where(found & (wanted > 0), run, -1).astype(jnp.int32)


def match_runs(
    q_ids: jax.Array,
    kv_ids: jax.Array,
    q_lengths: jax.Array | None,
    kv_lengths: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """[B, T] and [B, S] ids -> canonical segments of the queries and of the keys."""

    def without_padding(ids: jax.Array, lengths: jax.Array | None) -> jax.Array:
        """Padding goes with the last run: any id of its own could be that of a real one."""
        if lengths is None:
            return ids
        last = jnp.maximum(lengths - 1, 0)[:, None]
        inside = jnp.arange(ids.shape[1], dtype=jnp.int32) <= last
        return jnp.where(inside, ids, jnp.take_along_axis(ids, last, 1))

    def match(ids: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q_ids, kv_ids = ids
        return jax.vmap(_match)(q_ids, kv_ids), number_runs(kv_ids)

    ids = without_padding(q_ids, q_lengths), without_padding(kv_ids, kv_lengths)
    # JAX searches no array with an explicit axis.
    return meshes.call(
        match, ids, lambda: tuple(meshes.sharded(*meshes.partition(side)) for side in ids)
    )
