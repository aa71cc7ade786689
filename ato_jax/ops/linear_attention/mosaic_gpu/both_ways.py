"""Both passes of calls in which every query sees every key through a decay per head or step.

The backend (`__init__.py`) calls `keep` and `backward` for heads of up to 128 columns in bfloat16.
They run the causal kernels twice: from the start for the keys up to a query's own, and from the end
of the sequence (`mosaic.Deal.end`) for the keys behind it. Read `causal.py` first.

    sums over j <= i    decay(i, j) = exp(sum decay[j+1..i])    a walk from the start
    sums over j > i     decay(i, j) = exp(sum decay[i+1..j])    a walk from the end

The second sum is the first sum of the reversed sequence, without a row's own key, if row
t' = T - 1 - t of that has the decay of step t + 1. Only the decays and their prefix sums are
reversed in memory; q, k, v and out are read in place.

Forward, the walk from the end runs first and writes numerators and denominators. The walk from the
start adds them to its own, so that out is divided and rounded once. A state that is given or
returned belongs to the walk from the start.

Backward, let den_i be the denominator over all keys, inverse_i = 1 / max(den_i, eps), and
e_i = g_i . out_i. The gradients are sums over pairs (i, j) of

    decay(i, j) (g_i . v_j - e_i) inverse_i

times phi(q_i), phi(k_j) and their derivatives. So each is the sum of the gradients of the two
walks, which the causal kernels compute with inverse and e as inputs. The same holds for the
gradient of the decays, since each walk has its own pairs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.ops.linear_attention.mosaic_gpu import causal, causal_pieces, frame
from ato_jax.ops.linear_attention.mosaic_gpu.causal import Kept
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config
from ato_jax.ops.linear_attention.mosaic_gpu.output import later_output
from ato_jax.ops.linear_attention.scans import gates
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, Outputs, Residuals


def gates_of_heads(spec: LinearAttentionSpec, decay: jax.Array) -> jax.Array:
    """`gates_of_steps` of a decay per head [G]."""
    found = gates.of_heads(spec, decay)
    return jnp.stack([found, found], axis=1)


def gates_of_steps(spec: LinearAttentionSpec, decay: jax.Array) -> jax.Array:
    """The prefix sums of the log2 decays within chunks, [B, 2, G, T up to a whole chunk]: of the
    sequence, and of the reversed sequence."""
    length = frame.whole_chunks(spec.T)
    of_whole = dataclasses.replace(spec, T=length, S=length)
    turned = _turned(spec, decay)
    return jnp.stack([gates.of_steps(spec, decay), gates.of_steps(of_whole, turned)], axis=1)


def _turned(spec: LinearAttentionSpec, decay: jax.Array) -> jax.Array:
    """The decays of the reversed sequence, padded to a whole chunk, with 0 ahead of its rows."""
    time = _axis_of_time(spec)
    # The first step's decay stands between no two rows.
    behind = lax.slice_in_dim(decay, 1, None, axis=time)
    missing = [(0, 0)] * 3
    missing[time] = 0, frame.whole_chunks(spec.T) - (spec.T - 1)
    return jnp.flip(jnp.pad(behind, missing), time)


def _of_turned(spec: LinearAttentionSpec, gradient: jax.Array) -> jax.Array:
    """The gradient of the decays, from that of `_turned`."""
    time = _axis_of_time(spec)
    behind = lax.slice_in_dim(jnp.flip(gradient, time), 0, spec.T - 1, axis=time)
    missing = [(0, 0)] * 3
    missing[time] = 1, 0
    return jnp.pad(behind, missing)


def _axis_of_time(spec: LinearAttentionSpec) -> int:
    return 1 if spec.layout == "bthd" else 2


def from_the_end(deal: mosaic.Deal, length: int) -> mosaic.Deal:
    """`deal`, with pieces and rows counted from the end of the sequence."""
    return dataclasses.replace(deal, end=frame.whole_chunks(length))


def _walks(
    spec: LinearAttentionSpec, inputs: Inputs
) -> tuple[tuple[LinearAttentionSpec, Inputs], tuple[LinearAttentionSpec, Inputs]]:
    """The specs of the walk from the start and of the walk from the end."""
    assert inputs.decay is not None
    of_start = dataclasses.replace(spec, causal=True)
    of_end = dataclasses.replace(of_start, initial_state=False, return_state=False)
    turned = jnp.flip(inputs.decay[:, 1], 2)
    without = inputs._replace(decay=turned, initial_state=None)
    return (of_start, inputs._replace(decay=inputs.decay[:, 0])), (of_end, without)


def _pieces_from_the_end(
    spec: LinearAttentionSpec, deal: mosaic.Deal, own: jax.Array
) -> gates.OfPieces:
    """The sums of gates for the pieces of the walk from the end. In `own` and in the result rows
    lie in the order of memory."""
    found = gates.of_pieces(spec, deal, jnp.flip(own, 2))
    return found._replace(until=jnp.flip(found.until, 2), since=jnp.flip(found.since, 2))


def keep(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Kept:
    """The forward pass. `inputs.decay` holds the gates (`gates_of_steps`)."""
    (of_start, own), (of_end, turned) = _walks(spec, inputs)
    assert turned.decay is not None
    deal = from_the_end(causal_pieces.deal_of(of_start, config), spec.T)
    pieces = _pieces_from_the_end(of_end, deal, turned.decay)
    behind = causal.states_of(of_end, deal, turned, pieces)
    arrays = turned.q, turned.k, turned.v, behind.kv, behind.k_sum, turned.decay, pieces.steep
    later = later_output(of_end, deal, *arrays, turned.kv_lengths)
    found = causal.keep(of_start, config, own, later=later)
    return found._replace(behind=(behind.kv, behind.k_sum))


def backward(
    spec: LinearAttentionSpec,
    config: Config,
    residuals: Residuals,
    cotangents: Outputs,
    decay: jax.Array | None,
) -> Inputs:
    """`inputs.decay` holds the gates (`gates_of_steps`). `decay` is the decay itself, as
    `flows.decay_flows` takes it, and the gradient is with respect to it."""
    inputs = residuals.inputs
    kept: Any = residuals.outputs
    if not isinstance(kept, Kept):
        kept = keep(spec, config, inputs)
    (of_start, own), (of_end, turned) = _walks(spec, inputs)
    assert own.decay is not None and turned.decay is not None
    deal = causal_pieces.deal_of_gradients(of_start, config)
    turned_deal = from_the_end(deal, spec.T)
    ahead = behind = None
    if kept.behind is not None and deal == causal_pieces.deal_of(of_start, config):
        ahead, behind = (kept.s, kept.z, None), (*kept.behind, None)
    weights = None if kept.den is None else _weights(spec, inputs, kept.out, kept.den, cotangents)
    pieces = gates.of_pieces(of_start, deal, own.decay)
    found = causal.gradients(of_start, deal, own, cotangents, ahead, pieces, decay, weights)
    pieces = _pieces_from_the_end(of_end, turned_deal, turned.decay)
    turned_decay = None if decay is None else _turned(spec, decay)
    shares = found.q, found.k, found.v
    more = causal.gradients(
        of_end, turned_deal, turned, cotangents, behind, pieces, turned_decay, weights, shares
    )
    assert found.decay is not None and more.decay is not None
    of_turned = more.decay if decay is None else _of_turned(spec, more.decay)
    return more._replace(decay=found.decay + of_turned, initial_state=found.initial_state)


def _weights(
    spec: LinearAttentionSpec,
    inputs: Inputs,
    out: jax.Array,
    den: jax.Array,
    cotangents: Outputs,
) -> tuple[jax.Array, jax.Array]:
    """inverse and e, [B, H, T up to a whole chunk]. e is 0 where eps replaces den, and in rows
    behind the lengths."""
    of_rows = jnp.sum(out.astype(jnp.float32) * cotangents.out.astype(jnp.float32), axis=3)
    if spec.layout == "bthd":
        of_rows = jnp.swapaxes(of_rows, 1, 2)
    e = jnp.pad(of_rows, ((0, 0), (0, 0), (0, den.shape[2] - spec.T)))
    counts = den > spec.eps
    if inputs.kv_lengths is not None:
        counts &= jnp.arange(den.shape[2], dtype=jnp.int32) < inputs.kv_lengths[:, None, None]
    return 1 / den, jnp.where(counts, e, 0.0)
