"""The gradients with a gate for each step and channel, of q^ and k~ as the forward had them.

With those in place of features, and states as the middle of a chunk sees them, all is as without
gates: a walk (`channel_query_gradient.py`), the sums of each piece's queries (`query_sums.py`), and
a walk from the end (`channel_key_gradient.py`). As the gradient of phi(q_i) is that of q^_i times
q^_i / phi(q_i), both walks leave flows [T, D], of which the last pass makes the rest,

    flow_i = q^_i dq^_i                     flow'_j = k~_j dk~_j
    dq_i = flow_i phi'(q_i) / phi(q_i)      dk_j = flow'_j phi'(k_j) / phi(k_j)
    d_decay_t = E - sum_{i<t} flow_i + sum_{j<t} flow'_j

with sums over the steps of a run of chunks, and E the product at its start of the state and its
cotangent, summed over V. A pair (i, j) of rows on the same side of step t does not depend on its
gate, and has to cancel in these sums. It does: both flows make the pairs of a run of the same
rounded factors, and rows read the same rounded state that E is made of.

Beside segments all sums are over the rows of one segment (`chunk_borders.py`).

If any chunk of the call is steep (`channel.py`), the gradients are another backend's.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.ops.linear_attention.alignment import runs_of_keys
from ato_jax.ops.linear_attention.mosaic_gpu import channel_blocks, frame
from ato_jax.ops.linear_attention.mosaic_gpu.channel_key_gradient import channel_key_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.channel_query_gradient import channel_query_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.query_sums import channel_query_sums
from ato_jax.ops.linear_attention.scans.borders import of_sequence
from ato_jax.ops.linear_attention.scans.channel_flows import of_flows
from ato_jax.ops.linear_attention.scans.edges import State, join_pieces
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState, Outputs


class Features(NamedTuple):
    q: jax.Array  # q^
    k: jax.Array  # k~
    halves: jax.Array  # the sums of the gates over each chunk's, to base 2 [B, H, chunks, 2, D]
    steep: jax.Array  # [B], whether any chunk is steep; then all other fields mean nothing


class Factors(NamedTuple):
    """The factors of states up to the middle of each chunk, [B, H, chunks * D]. From one middle to
    the next it is the factor's square root, which is multiplied twice: the factor may underflow in
    float32, while the sums that it multiplies are as much larger."""

    of_keys: jax.Array  # from the middle of the chunk before, or the start of the piece, on
    of_queries: jax.Array  # from the middle of the chunk behind, or the end of the piece, back
    since_pieces: jax.Array  # from the start of the piece on
    whole: jax.Array  # [B, H, P, D]: from the start of each piece to its end


def _factors(spec: LinearAttentionSpec, deal: mosaic.Deal, halves: jax.Array) -> Factors:
    B, H, chunks = halves.shape[:3]
    missing = deal.pieces * (deal.rows // frame.C) - chunks
    halves = jnp.pad(halves, ((0, 0), (0, 0), (0, missing), (0, 0), (0, 0)))
    halves = halves.reshape(B, H, deal.pieces, -1, 2, spec.D)
    first, second = halves[:, :, :, :, 0], halves[:, :, :, :, 1]
    before, behind = (
        jnp.pad(half, ((0, 0),) * 3 + (ends, (0, 0)))
        for half, ends in ((second[:, :, :, :-1], (1, 0)), (first[:, :, :, 1:], (0, 1)))
    )
    whole = first + second

    def of_chunks(sums: jax.Array) -> jax.Array:
        return jnp.exp2(sums.reshape(B, H, -1, spec.D)[:, :, :chunks]).reshape(B, H, -1)

    return Factors(
        of_chunks((before + first) * 0.5),
        of_chunks((second + behind) * 0.5),
        of_chunks(jnp.cumsum(whole, axis=3) - second),
        jnp.exp2(jnp.sum(whole, axis=3)),
    )


def gradients(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    inputs: Inputs,
    features: Features,
    states: State,
    cotangents: Outputs,
    weights: tuple[jax.Array, jax.Array] | None = None,
) -> Inputs:
    """The gradients of all inputs, in blocks where heads are cut: sums over the pairs of a block.

    Args:
      states: those ahead of each piece, S [B, H, P, V, D] in bfloat16 and z [B, H, P, D].
      weights: of the rows, as `channel_query_gradient` takes them.
    """
    q, k, v, g = features.q, features.k, inputs.v, cotangents.out
    # R and u begin with the cotangent of the state that is returned.
    end = None
    if spec.return_state:
        end = jnp.swapaxes(cotangents.state.kv, 2, 3), cotangents.state.k_sum
    factors = _factors(spec, deal, features.halves)
    runs = runs_of_keys(spec, inputs)
    borders = of_sequence(spec, deal, runs)
    s, z = states
    dq, of_queries, inverse, e, kv, k_sum = channel_query_gradient(
        spec,
        deal,
        inputs.q,
        q,
        k,
        v,
        g,
        jnp.swapaxes(s, 3, 4),
        z,
        factors.of_keys,
        weights,
        borders,
    )
    # No key reads the sums of the first piece, but the state before it.
    first = 0 if spec.initial_state else 1
    later = dataclasses.replace(deal, first=first * deal.rows, pieces=deal.pieces - first)
    of_pieces = spec.B, spec.H, later.pieces
    r = jnp.zeros((*of_pieces, spec.V, spec.D), jnp.float32)
    u = jnp.zeros((*of_pieces, spec.D), jnp.float32)
    if later.pieces:
        reading = None if borders.reading is None else borders.reading[:, first:]
        r, u = channel_query_sums(spec, later, q, g, inverse, e, factors.since_pieces, reading)
    keeps = factors.whole
    if borders.keeps is not None:
        keeps = keeps * borders.keeps[..., None]
    r, u = join_pieces((r, u), end, keeps[:, :, first:], reverse=True)
    d_state = None
    if spec.initial_state:
        d_state = LinearState(jnp.swapaxes(r[:, :, 0], 2, 3), u[:, :, 0])
        r, u = r[:, :, 1:], u[:, :, 1:]
    r = jnp.swapaxes(r.astype(jnp.bfloat16), 3, 4)
    of_keys, dv, crossing = channel_key_gradient(
        spec, deal, q, k, v, g, inverse, e, r, u, factors.of_queries, kv, k_sum, borders
    )
    dk_dtype = None
    if isinstance(spec, channel_blocks.Cut):
        # The sums over both walks are rounded once.
        dk_dtype = jnp.float32 if spec.both_ways else None
        dq, of_queries, of_keys = (
            channel_blocks.summed(spec, x, 3, x.dtype) for x in (dq, of_queries, of_keys)
        )
        dv = channel_blocks.summed(spec, dv, 2, dv.dtype)
        crossing = channel_blocks.summed(spec, jnp.swapaxes(crossing, 1, 2), 3, crossing.dtype)
        crossing = jnp.swapaxes(crossing, 1, 2)
        spec = dataclasses.replace(spec, H=dq.shape[2])
    arrays = inputs.k, of_queries, of_keys, crossing, runs
    dk, d_decay = of_flows(spec, *arrays, dtype=dk_dtype)
    return Inputs(dq, dk, dv, decay=d_decay, initial_state=d_state)
