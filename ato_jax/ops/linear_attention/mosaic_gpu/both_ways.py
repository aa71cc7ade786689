"""Each query sees every key, with a decay per head or step between the two, on Hopper.

A query's keys are those up to its own, which the causal kernels walk to it, and those behind it,
which the same kernels walk to it from the end of the sequence (`mosaic.Deal.end`):

    sums over j <= i    decay(i, j) = exp(sum decay[j+1..i])    a walk from the start
    sums over j > i     decay(i, j) = exp(sum decay[i+1..j])    a walk from the end

Counted from the end, row t' = T - 1 - t has the decay of step t + 1: with that decay the second sum
is the first one of the sequence turned round, without a row's own key. No array of rows is turned
round in memory; the decays and their sums are, which are small.

The walk from the end comes first and leaves sums that are not divided. The other one adds them to
its own, so that out is divided and stored once. A state that is given or returned belongs to the
walk from the start.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.ops.linear_attention.mosaic_gpu import causal, frame
from ato_jax.ops.linear_attention.mosaic_gpu.causal import Kept
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config
from ato_jax.ops.linear_attention.mosaic_gpu.output import later_output
from ato_jax.ops.linear_attention.scans import gates
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec


def gates_of_heads(spec: LinearAttentionSpec, decay: jax.Array) -> jax.Array:
    """`gates_of_steps` of a decay per head [G]."""
    found = gates.of_heads(spec, decay)
    return jnp.stack([found, found], axis=1)


def gates_of_steps(spec: LinearAttentionSpec, decay: jax.Array) -> jax.Array:
    """The prefix sums of the decays within chunks, [B, 2, G, T up to a whole chunk]: those from the
    start; and those of the sequence turned round."""
    length = frame.whole_chunks(spec.T)
    time = 1 if spec.layout == "bthd" else 2
    # The first step's decay stands between no two rows.
    behind = lax.slice_in_dim(decay, 1, None, axis=time)
    missing = [(0, 0)] * 3
    missing[time] = 0, length - (spec.T - 1)
    turned = jnp.flip(jnp.pad(behind, missing), time)
    of_whole = dataclasses.replace(spec, T=length, S=length)
    return jnp.stack([gates.of_steps(spec, decay), gates.of_steps(of_whole, turned)], axis=1)


def from_the_end(deal: mosaic.Deal, length: int) -> mosaic.Deal:
    """The same pieces; their rows are counted from the end of a sequence of this length."""
    return dataclasses.replace(deal, end=frame.whole_chunks(length))


def keep(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Kept:
    """`inputs.decay` are the gates, `gates_of_steps`."""
    assert inputs.decay is not None
    of_start = dataclasses.replace(spec, causal=True)
    of_end = dataclasses.replace(of_start, initial_state=False, return_state=False)
    deal = causal.deal_of(of_start, config)
    turned_deal = from_the_end(deal, spec.T)
    own, turned = inputs.decay[:, 0], inputs.decay[:, 1]

    def to_rows(x: jax.Array) -> jax.Array:
        return jnp.flip(x, 2)

    pieces = gates.of_pieces(of_end, turned_deal, turned)
    pieces = pieces._replace(until=to_rows(pieces.until), since=to_rows(pieces.since))
    arrays = inputs.q, inputs.k, inputs.v
    without = inputs._replace(initial_state=None)
    behind = causal.states_of(of_end, turned_deal, without, pieces)
    states = behind.kv, behind.k_sum
    later = later_output(
        of_end, turned_deal, *arrays, *states, to_rows(turned), pieces.steep, inputs.kv_lengths
    )
    return causal.keep(of_start, config, inputs._replace(decay=own), later=later)
