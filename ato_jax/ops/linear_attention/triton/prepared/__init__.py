"""A decay per step and channel, causal, beside a large state: the features are decayed beforehand.

In a run of rows (`stored/`), with c_i the sum of the decays from the middle of the run to row i,
and for the rows before the middle minus the sum of the decays between,

    q^_i = phi(q_i) exp(c_i)                k~_j = phi(k_j) exp(-c_j)
    exp(sum decay[j+1..i, d]) phi(q_id) phi(k_jd) = q^_id k~_jd

so that all pairs of a run are products of q^ and k~, as without decays. One pass writes both
(`decayed.py`). The kernels without a decay then take q^ and k~ as if they were features.

A run's queries see a state as decayed to the middle of the run, and what its keys add to the state
behind it is decayed from there. With `first` and `second` the decays of the run's halves,

    S[p+1] = exp(first + second) S[p] + exp(second) sum_j k~_j v_j^T     they read exp(first) S[p]

These factors go into the scan over the runs (`scan.py`). Backward, dq^ and dk~ come in float32:

    d_phi_q_i = exp(c_i) dq^_i              d_phi_k_j = exp(-c_j) dk~_j
    d_decay_t = sum_{i>=t} q^_i dq^_i - sum_{j>=t} k~_j dk~_j + E

with sums over the steps of the run, and E the product of the state at its end and its cotangent
(`channel/`). The states are rounded here, and what the sum over all k~_j dk~_j has of that
cotangent has to cancel in E. So E is not computed from the state at the end: it is the sum over the
keys of just that part, and the product of the state ahead of the run and the cotangent behind it,
both as they are read. `finish.py` computes the gradients of q, k and the decays from all these.

A run in which a channel loses more than `MOST_LOST_OF_RUN` in either half, by which factors could
leave float32's range, is steep. Its features are left undecayed, what the kernels compute from them
is not used, and `steep.py` overwrites it, on the device. That leaves the sums over such a run as
decayed to its edges; dq^ and dk~ so that the above holds with c = 0; and for E the same product at
the start of the run, from which the sums over the steps before t lead to d_decay_t.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention import features
from ato_jax.ops.linear_attention.decay import MOST_LOST_OF_RUN
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)
from ato_jax.ops.linear_attention.triton import stored
from ato_jax.ops.linear_attention.triton.calls import matched
from ato_jax.ops.linear_attention.triton.config import Config
from ato_jax.ops.linear_attention.triton.prepared import runs, steep
from ato_jax.ops.linear_attention.triton.prepared.decayed import prepare
from ato_jax.ops.linear_attention.triton.prepared.finish import finish
from ato_jax.ops.linear_attention.triton.prepared.runs import Turns
from ato_jax.ops.linear_attention.triton.scan import Edges, scan_states
from ato_jax.ops.linear_attention.triton.sequences import sum_over_group
from ato_jax.ops.linear_attention.triton.states import piece_states
from ato_jax.ops.linear_attention.triton.steps import Steps
from ato_jax.ops.linear_attention.triton.walk import Walk, plan

NO_STEPS = Steps({}, {}, None, None, None)


def inner_spec(spec: LinearAttentionSpec) -> LinearAttentionSpec:
    """The call without decays, over decayed features."""
    return dataclasses.replace(spec, decay=None, feature_map=features.NAMED["identity"])


class Decays(NamedTuple):
    """The decays of a state over a whole run, its first half and its second half, each
    [B, G, P, F]; in steep runs 1 for the halves."""

    whole: jax.Array
    first: jax.Array
    second: jax.Array


def _classify(spec: LinearAttentionSpec, walk: Walk, totals: jax.Array) -> tuple[Decays, Turns]:
    B, G, P, parts, width = totals.shape
    halves = jnp.sum(totals.reshape(B, G, P, 2, parts // 2, width), axis=4)
    is_steep = jnp.any(halves < -MOST_LOST_OF_RUN, axis=(3, 4))
    first, second = (
        jnp.where(is_steep[..., None], 1.0, jnp.exp2(halves[:, :, :, i])) for i in (0, 1)
    )
    whole = jnp.exp2(jnp.sum(halves, axis=3))
    return Decays(whole, first, second), runs.turns(spec, walk, totals, is_steep)


class Sums(NamedTuple):
    """The results of the passes with which both phases begin."""

    prepared: Inputs
    edges: Edges  # the states ahead of each run as its queries read them, and after the last
    decays: Decays
    turns: Turns


def _sums_of_keys(spec: LinearAttentionSpec, config: Config, inputs: Inputs, walk: Walk) -> Sums:
    found = prepare(spec, inputs, walk)
    decays, turns = _classify(spec, walk, found.totals)
    inner = inner_spec(spec)
    keys_at = functools.partial(walk.keys_at, inner)
    sums = piece_states(
        inner, config, found.k, inputs.v, walk.pieces, keys_at, {}, dtype=walk.state_dtype
    )
    sums = steep.states(spec, inputs, walk, turns, sums)
    start = None
    if inputs.initial_state is not None:
        start = jnp.swapaxes(inputs.initial_state.kv, 2, 3), inputs.initial_state.k_sum
    reads = jnp.pad(decays.first, ((0, 0), (0, 0), (0, 1), (0, 0)), constant_values=1)
    edges = scan_states(sums, start, decays.whole, adds=decays.second, reads=reads)
    return Sums(Inputs(found.q, found.k, inputs.v), edges, decays, turns)


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    inner = inner_spec(spec)
    walk = plan(inner, config)
    prepared, edges, _, turns = _sums_of_keys(spec, config, inputs, walk)
    out = stored.output(inner, config, prepared, walk, NO_STEPS, [edges])
    out = steep.output(spec, inputs, walk, turns, edges, out)
    return Outputs(out, LinearState(jnp.swapaxes(edges.end_kv, 2, 3), edges.k_sum[:, :, -1]))


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs, do = residuals.inputs, cotangents.out
    inner = matched(inner_spec(spec))
    walk = plan(inner, config, "backward")
    prepared, edges, decays, turns = _sums_of_keys(spec, config, inputs, walk)
    found = stored.query_gradient(inner, config, prepared, walk, NO_STEPS, [edges], do)
    dq, q_rest, sums, normalizer = steep.query_gradient(
        spec, inputs, walk, turns, edges, found, prepared.q, do
    )
    end = None
    if spec.return_state:
        end = jnp.swapaxes(cotangents.state.kv, 2, 3), cotangents.state.k_sum
    kv, k_sum = (sum_over_group(spec, array, walk.with_queries) for array in sums)
    reads = jnp.pad(decays.second, ((0, 0), (0, 0), (1, 0), (0, 0)), constant_values=1)
    cotangent = scan_states(
        (kv, k_sum), end, decays.whole, adds=decays.first, reads=reads, reverse=True
    )
    dk, dv, added = stored.key_gradient(
        inner, config, prepared._replace(q=q_rest), walk, NO_STEPS, [cotangent], normalizer, do
    )
    crossing = _crossing(edges, cotangent)
    crossing += jnp.sum(added[0].reshape(*crossing.shape[:3], -1, spec.F), axis=3)
    written = (dk, prepared.k, dv, crossing)
    dk, k_rest, dv, crossing = steep.key_gradient(
        spec, inputs, walk, turns, edges, cotangent, normalizer, written, do
    )
    dq, dk, d_decay = finish(spec, inputs, walk, turns, (dq, q_rest), (dk, k_rest), crossing)
    d_state = None
    if inputs.initial_state is not None:
        d_state = LinearState(jnp.swapaxes(cotangent.end_kv, 2, 3), cotangent.k_sum[:, :, 0])
    return Inputs(dq, dk, dv, decay=d_decay, initial_state=d_state)


def _crossing(edges: Edges, cotangent: Edges) -> jax.Array:
    """sum_v S dS + z dz of the state ahead of each run, seen through it, [B, G, P, F]."""
    # As they are read, both are decayed to the middle.
    kv = edges.kv[:, :, :-1].astype(jnp.float32) * cotangent.kv[:, :, 1:].astype(jnp.float32)
    return jnp.sum(kv, axis=3) + edges.k_sum[:, :, :-1] * cotangent.k_sum[:, :, 1:]
