"""The causal passes over heads of 129 to 256 columns: `wide_states.py` walks the sequence, and
`wide_runs.py` does the rest. A decay per head or step, and segments, are factors of rows
(`wide_factors.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.ops.linear_attention.mosaic_gpu import frame, wide_factors
from ato_jax.ops.linear_attention.mosaic_gpu.whole_sums import blocks_of_state, whole_sums
from ato_jax.ops.linear_attention.mosaic_gpu.wide_factors import Factors, factors_of
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_storage import Arrays, Left, Pass
from ato_jax.ops.linear_attention.mosaic_gpu.wide_runs import (
    whole_units,
    wide_key_gradients,
    wide_runs,
)
from ato_jax.ops.linear_attention.mosaic_gpu.wide_states import wide_states
from ato_jax.ops.linear_attention.scans.borders import OfSequence
from ato_jax.ops.linear_attention.scans.edges import Edges, at_edges
from ato_jax.ops.linear_attention.scans.gates import OfPieces
from ato_jax.ops.linear_attention.scans.run_flows import AtRuns, decay_flows_of_runs
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    Outputs,
    Residuals,
)

State = tuple[jax.Array, jax.Array]


def states_of(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    inputs: Inputs,
    pieces: OfPieces | None,
    borders: OfSequence,
) -> Edges:
    """S [B, G, runs, F, V] ahead of each run, and z ahead of each chunk; behind the last, too, if
    returned. `inputs.decay` are the gates."""
    count, found = deal.pieces - (not spec.return_state), None
    if count:
        length = min(count * deal.rows, spec.T)
        of_keys = dataclasses.replace(deal, heads=spec.G, length=length, pieces=count)
        until = wide_factors.until_end_of_piece(spec, deal, pieces, borders)
        own = () if until is None else (until,)
        found = _piece_sums(spec, of_keys, "whole_sums", inputs.k, inputs.v, own)
    keeps = borders.keeps if pieces is None else pieces.keeps
    edges = at_edges(
        spec, found, inputs.initial_state, keeps, ends=spec.return_state, dtype=jnp.bfloat16
    )
    factors = factors_of(spec, inputs.decay, borders)
    own, keeps = ((), None) if factors is None else ((factors.adds,), factors.keeps)
    starts = jnp.swapaxes(edges.kv, 3, 4), edges.k_sum
    of_heads = dataclasses.replace(deal, heads=spec.G)
    arrays = inputs.k, inputs.v, starts, own, keeps
    kv, k_sum = wide_states(spec, of_heads, "wide_key_states", *arrays)
    return edges._replace(kv=kv, k_sum=k_sum)


def output(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    inputs: Inputs,
    ahead: State,
    borders: OfSequence,
) -> jax.Array:
    """out. `ahead` are S and z as `states_of` returns them."""
    arrays = Arrays(inputs.q, inputs.k, inputs.v, *ahead)
    if (factors := factors_of(spec, inputs.decay, borders)) is not None:
        arrays = arrays._replace(sums=factors.sums, limit=factors.first, reads=factors.reads)
    found: jax.Array = wide_runs(spec, deal, Pass.OUT, arrays).found
    return found


def gradients(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    inputs: Inputs,
    cotangents: Outputs,
    ahead: State,
    pieces: OfPieces | None,
    borders: OfSequence,
    decay: jax.Array | None,
) -> Inputs:
    """With `ahead` as `output` takes it, and `decay` as `flows.decay_flows`. H = G."""
    q, k, v, g = inputs.q, inputs.k, inputs.v, cotangents.out
    factors = factors_of(spec, inputs.decay, borders)
    of_queries = _query_gradient(spec, deal, (q, k, v, g), ahead, factors)
    own = of_queries.inverse, of_queries.e
    # No key reads the sums of the first piece, but the state before it.
    first, found = 0 if spec.initial_state else 1, None
    if deal.pieces > first:
        later = dataclasses.replace(deal, first=first * deal.rows, pieces=deal.pieces - first)
        since = wide_factors.since_start_of_piece(spec, deal, pieces, borders)
        rows = own if since is None else _times(own, since)
        found = _piece_sums(spec, later, "whole_query_sums", q, g, rows)
    keeps = borders.keeps if pieces is None else pieces.keeps
    end = cotangents.state if spec.return_state else None
    options = {"ends": spec.initial_state, "reverse": True, "dtype": jnp.bfloat16}
    behind = at_edges(spec, found, end, keeps, first, **options)
    starts = jnp.swapaxes(behind.kv, 3, 4), behind.k_sum
    rows, keeps = own, None
    if factors is not None:
        rows, keeps = _times(own, factors.reads_of_chunk), factors.keeps
    states = wide_states(spec, deal, "wide_query_states", q, g, starts, rows, keeps)
    given = Arrays(v, g, q, *states, k, *own)
    if factors is not None:
        given = given._replace(sums=factors.sums, limit=factors.last, reads=factors.reads_behind)
    dk, dv, of_keys = wide_key_gradients(spec, deal, given)
    d_decay = None
    if inputs.decay is not None:
        assert of_queries.flows is not None and of_keys is not None
        of_start = None
        if behind.end is not None:
            of_start = jnp.sum(ahead[0][:, :, 0].astype(jnp.float32) * behind.end.kv, axis=(2, 3))
            of_start += jnp.sum(ahead[1][:, :, 0] * behind.end.k_sum, axis=2)
        queries, keys = AtRuns(of_queries.flows, *ahead), AtRuns(of_keys, *states)
        of_flows = inputs.decay, queries, keys, of_start, decay, borders
        d_decay = decay_flows_of_runs(spec, deal, *of_flows)
    return Inputs(of_queries.found, dk, dv, decay=d_decay, initial_state=behind.end)


def unless_steep(
    gates: jax.Array,
    fallback: Callable[..., Inputs],
    run: Callable[..., Inputs],
    spec: LinearAttentionSpec,
    residuals: Residuals,
    cotangents: Outputs,
) -> Inputs:
    """The gradients by `run`, or, where a chunk is steep, by `fallback`: there each term of a
    decay's gradient may be far larger than their sum.

    Args:
      gates: the prefix sums of the decays in each chunk, [B, G, T up to a whole chunk].
      fallback: called as `run`, with plain outputs.
    """
    of_chunks = gates.reshape(*gates.shape[:2], -1, frame.C)
    middle, last = of_chunks[..., frame.C // 2 - 1], of_chunks[..., frame.C - 1]
    inputs, outputs = residuals
    return jax.lax.cond(
        jnp.any(frame.is_steep(spec, middle, last)),
        lambda: fallback(spec, Residuals(inputs, outputs.plain()), cotangents),
        lambda: run(spec, residuals=residuals, cotangents=cotangents),
    )


def _query_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    ahead: State,
    factors: Factors | None,
) -> Left:
    """dq, inverse, e and, with a decay, flows; the rows [B, H, T up to a whole unit] in float32.
    Of q, k, v and g."""
    q, k, v, g = arrays
    given = Arrays(g, v, k, *ahead, q)
    if factors is not None:
        own = {"sums": factors.sums, "limit": factors.first, "reads": factors.reads}
        given = given._replace(**own)
        if spec.normalize:
            given = given._replace(reads_of_chunk=factors.reads_of_chunk)
    left = wide_runs(spec, deal, Pass.DQ, given)
    if spec.normalize:
        return left
    inverse = jnp.full((spec.B, spec.H, whole_units(spec.T)), spec.scale, jnp.float32)
    return left._replace(inverse=inverse, e=jnp.zeros_like(inverse))


def _times(own: Sequence[jax.Array], factor: jax.Array) -> tuple[jax.Array, ...]:
    """inverse of rows times a factor, and e, in as many rows as are in both."""
    inverse, e = own
    rows = min(inverse.shape[2], factor.shape[2])
    return inverse[:, :, :rows] * factor[:, :, :rows], e[:, :, :rows]


def _piece_sums(
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
