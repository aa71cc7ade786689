"""The backward pass with a decay per step and channel, from the q^ and k~ of the forward pass.

`causal.py` calls `gradients`. With q^ and k~ (`channel.py`) in place of features,
and states scaled to the middle row of a chunk, the pass is that without a decay:

    channel_query_gradient.py    walks from the start and computes dq
    query_sums.py                computes the sums over each piece's queries
    channel_key_gradient.py      walks from the end and computes dv

The gradient of phi(q_i) is the gradient of q^_i times q^_i / phi(q_i), and likewise for keys. So
both walks write flows [B, T, H, D], from which `scans/channel_flows.py` computes dk and d_decay:

    flow_i = q^_i dq^_i                     flow'_j = k~_j dk~_j
    dq_i = flow_i phi'(q_i) / phi(q_i)      dk_j = flow'_j phi'(k_j) / phi(k_j)
    d_decay_t = E - sum_{i<t} flow_i + sum_{j<t} flow'_j

The sums are over the steps of one run of chunks, or over those of one segment within it. E is the
product of the state at the start of the run and its cotangent, summed over V. A pair (i, j) with
both rows on the same side of step t does not depend on the gate of t and has to cancel in these
sums. It does, because both flows compute the pairs of a run from the same rounded factors, and rows
read the same rounded state from which E is computed.

If any chunk of a call is steep (`channel.py`), another backend computes the gradients.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.ops.linear_attention.alignment import runs_of_keys
from ato_jax.ops.linear_attention.mosaic_gpu import channel, channel_blocks, frame
from ato_jax.ops.linear_attention.mosaic_gpu.channel_key_gradient import channel_key_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.channel_key_gradient_storage import Arrays
from ato_jax.ops.linear_attention.mosaic_gpu.channel_query_gradient import channel_query_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.query_sums import channel_query_sums
from ato_jax.ops.linear_attention.scans.borders import of_sequence
from ato_jax.ops.linear_attention.scans.channel_flows import of_flows
from ato_jax.ops.linear_attention.scans.edges import State, join_pieces
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState, Outputs


class Features(NamedTuple):
    q: jax.Array  # q^
    k: jax.Array  # k~
    halves: jax.Array  # [B, H, chunks, 2, D]: the sums of the gates over each half of a chunk
    steep: jax.Array  # [B]: whether any chunk is steep; then the other fields are not valid


class Factors(NamedTuple):
    """Factors of states, [B, H, chunks * D] each. The first two hold the square root of the factor
    between two rows, and kernels multiply by it twice: the factor itself may underflow in float32,
    while the sum that it multiplies is large."""

    of_keys: jax.Array  # from the middle of the chunk before, or the piece's start, to the middle
    of_queries: jax.Array  # from the middle to that of the chunk behind, or to the piece's end
    since_pieces: jax.Array  # from the piece's start to the middle
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
    """The gradients of all inputs. Where heads are cut into blocks (`channel_blocks.py`), they are
    those of the blocks: sums over all pairs that contain a block.

    Args:
      states: S [B, H, P, V, D] in bfloat16 and z [B, H, P, D] ahead of each piece.
      weights: inverse and e of each row, where the kernel cannot compute them itself.
    """
    q, k, v, g = features.q, features.k, inputs.v, cotangents.out
    # R and u start from the cotangent of the state that is returned, without the rest of the scale.
    _, scale_rest = channel.parts_of_scale(spec)
    end = None
    if spec.return_state:
        of_state = [channel.times_rest(x, 1 / scale_rest) for x in cotangents.state]
        end = jnp.swapaxes(of_state[0], 2, 3), of_state[1]
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
    # The sums of the first piece only enter the gradient of the initial state.
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
        first_sums = jnp.swapaxes(r[:, :, 0], 2, 3), u[:, :, 0]
        d_state = LinearState(*(channel.times_rest(x, scale_rest) for x in first_sums))
        r, u = r[:, :, 1:], u[:, :, 1:]
    r = jnp.swapaxes(r.astype(jnp.bfloat16), 3, 4)
    rows, sums = (q, k, v, g, inverse, e), (r, u, factors.of_queries)
    arrays_of_keys = Arrays(*rows, *sums, kv, borders.ends, borders.chunks, k_sum)
    of_keys, dv, crossing = channel_key_gradient(spec, deal, arrays_of_keys)
    dtype = v.dtype
    if isinstance(spec, channel_blocks.Cut):
        # Where rows see both sides, dk and dv stay in float32 until XLA has added the two walks.
        dtype = jnp.dtype(jnp.float32) if spec.both_ways else dtype
        dq, of_queries, of_keys = (
            channel_blocks.summed(spec, x, 3, x.dtype) for x in (dq, of_queries, of_keys)
        )
        dv = channel_blocks.summed(spec, dv, 2, dtype)
        crossing = channel_blocks.summed(spec, jnp.swapaxes(crossing, 1, 2), 3, crossing.dtype)
        crossing = jnp.swapaxes(crossing, 1, 2)
        spec = dataclasses.replace(spec, H=dq.shape[2])
    arrays = inputs.k, of_queries, of_keys, crossing, runs
    dk, d_decay = of_flows(spec, *arrays, dtype=dtype)
    return Inputs(dq, dk, dv, decay=d_decay, initial_state=d_state)
