"""The causal passes over heads of 129 to 256 columns: `wide_states.py` walks the sequence, and
`wide_runs.py` does the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.ops.linear_attention.mosaic_gpu.whole_sums import blocks_of_state, whole_sums
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_storage import Arrays, Pass
from ato_jax.ops.linear_attention.mosaic_gpu.wide_runs import (
    whole_units,
    wide_key_gradients,
    wide_runs,
)
from ato_jax.ops.linear_attention.mosaic_gpu.wide_states import wide_states
from ato_jax.ops.linear_attention.scans.edges import Edges
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec

State = tuple[jax.Array, jax.Array]


def piece_sums(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    name: str,
    x: jax.Array,
    y: jax.Array,
    of_rows: Sequence[jax.Array] = (),
) -> State:
    """As `whole_sums`, but [B, heads, P, V, F]."""
    deal = dataclasses.replace(deal, heads=deal.heads * blocks_of_state(spec))
    kv, k_sum = whole_sums(spec, deal, name, x, y, of_rows)
    return jnp.swapaxes(kv, 3, 4), k_sum


def at_runs(spec: LinearAttentionSpec, deal: mosaic.Deal, inputs: Inputs, edges: Edges) -> Edges:
    """The states ahead of each run, S [B, G, runs, F, V], and z ahead of each chunk, of those ahead
    of each piece."""
    deal = dataclasses.replace(deal, heads=spec.G)
    start = jnp.swapaxes(edges.kv, 3, 4), edges.k_sum
    kv, k_sum = wide_states(spec, deal, "wide_key_states", inputs.k, inputs.v, start)
    return edges._replace(kv=kv, k_sum=k_sum)


def output(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    s: jax.Array,
    z: jax.Array,
) -> jax.Array:
    """out. s and z are the states that `at_runs` returns."""
    found: jax.Array = wide_runs(spec, deal, Pass.OUT, Arrays(q, k, v, s, z)).found
    return found


def query_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    s: jax.Array,
    z: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq; inverse and e [B, H, T up to a whole unit], float32."""
    dq, inverse, e = wide_runs(spec, deal, Pass.DQ, Arrays(g, v, k, s, z, q))
    if not spec.normalize:
        inverse = jnp.full((spec.B, spec.H, whole_units(spec.T)), spec.scale, jnp.float32)
        e = jnp.zeros_like(inverse)
    return dq, inverse, e


def key_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    inverse: jax.Array,
    e: jax.Array,
    r: jax.Array,
    u: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """dk and dv."""
    start = jnp.swapaxes(r, 3, 4), u
    states = wide_states(spec, deal, "wide_query_states", q, g, start, (inverse, e))
    return wide_key_gradients(spec, deal, Arrays(v, g, q, *states, k, inverse, e))
