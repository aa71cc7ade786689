"""A decay per step and channel, causal: `causal.py`'s pieces and chunks, their factors decayed.

    S_t = diag(exp(decay_t)) S_{t-1} + phi(k_t) v_t^T          [F, V]

so that channel d of the pair (i, j) carries exp(sum decay[j+1..i, d]). Within a chunk, with c_i
the sum of the decays from its first row to row i and `total` that over all its rows, [F]:

    q^_i = phi(q_i) exp(c_i)                 as the state before the chunk is read
    k^_j = phi(k_j) exp(total - c_j)         as the state after it is added to
    num  = q^ S + w v                        den = q^ . z + w 1
    S'   = exp(total) S + k^^T v             z' = exp(total) z + k^^T 1

Pairs within a chunk are w[i, j] = sum_d phi(q_id) phi(k_jd) exp(c_id - c_jd) where j <= i, and no
factor's exponent may be large. Where no channel of a piece loses much within a chunk, as is usual,
the exponents c_i and -c_j part all pairs at once. With k~_j = phi(k_j) exp(-c_j) all is then as
without decays:

    w = seen * (q^ k~^T)                     S' = exp(total) (S + k~^T v)

In other pieces chunks are short, and a pair is parted at the level of its two rows (`chunk.py`).

Backward, as in `causal.py`: a walk for dq, which knows S, and one from the end for dk and dv,
which knows dS. With dw[i, j] = (do_i . v_j + e_i) / den_i:

    e_i       = -(num_i . do_i) / den_i, 0 where den_i <= eps or not normalize
    d_phi_q_i = exp(c_i) (S do_i + e_i z) / den_i + sum_{j<=i} exp(c_i - c_j) dw[i, j] phi(k_j)
    d_phi_k_j = exp(total - c_j) (dS v_j + dz) + sum_{i>=j} exp(c_i - c_j) dw[i, j] phi(q_i)

The decay of step t is in all pairs i >= t > j, and in each channel of a pair alike, in phi(q)
d_phi_q and in phi(k) d_phi_k. So with the sums over the steps of the piece, and S and dS at its
end,

    d_decay_t = sum_{i>=t} phi(q_i) d_phi_q_i - sum_{j>=t} phi(k_j) d_phi_k_j
                + sum_v S dS + z dz                                                     [F]

in which pairs later than t cancel. For that both walks multiply the same roundings of the factors,
the weights' gradients and the states are rounded in two parts, and the pieces are short. The walk
for dq leaves phi(q) d_phi_q, the flow, in float32.

Where the state is returned, its cotangent meets the last key without a decay. That pair would have
to cancel beside pairs of which strong decays have left next to nothing. So in the last piece the
sums go over the steps before t, from what crosses the piece's start, S and dS there:

    d_decay_t = sum_v S dS + z dz + sum_{j<t} phi(k_j) d_phi_k_j - sum_{i<t} phi(q_i) d_phi_q_i

In the code all exponents are to base 2, and decays as soon as they are loaded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)
from ato_jax.ops.linear_attention.triton.channel.key_gradient import key_gradient
from ato_jax.ops.linear_attention.triton.channel.output import mild_output, output
from ato_jax.ops.linear_attention.triton.channel.query_gradient import query_gradient
from ato_jax.ops.linear_attention.triton.channel.states import has_room, prefix_states
from ato_jax.ops.linear_attention.triton.config import Config
from ato_jax.ops.linear_attention.triton.scan import scan_states
from ato_jax.ops.linear_attention.triton.sequences import sum_over_group
from ato_jax.ops.linear_attention.triton.walk import Walk, plan


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    walk = plan(spec, config)
    states = prefix_states(spec, config, inputs, walk)
    state = LinearState(jnp.swapaxes(states.kv[:, :, -1], 2, 3), states.k_sum[:, :, -1])
    written = None
    if has_room(spec) and config.output_block % config.state_block == 0:
        written = mild_output(spec, config, inputs, walk, states)
    return Outputs(output(spec, config, inputs, walk, states, written), state)


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs = residuals.inputs
    walk = plan(spec, config)
    states = prefix_states(spec, config, inputs, walk)
    found = query_gradient(spec, config, inputs, walk, states, cotangents.out)
    dkv, dk_sum = (
        sum_over_group(spec, sums, walk.with_queries) for sums in (found.dkv, found.dk_sum)
    )
    if spec.return_state:
        end = jnp.swapaxes(cotangents.state.kv, 2, 3), cotangents.state.k_sum
    else:
        end = jnp.zeros_like(dkv[:, :, 0]), jnp.zeros_like(dk_sum[:, :, 0])
    keeps = jnp.exp2(states.decay)
    dkv, dk_sum, _ = scan_states((dkv, dk_sum), end, keeps, reverse=True)
    dk, dv, d_decay = key_gradient(
        spec,
        config,
        inputs,
        walk,
        states,
        (dkv, dk_sum),
        found.flow,
        found.normalizer,
        cotangents.out,
    )
    if spec.return_state:
        last = walk.pieces.count - 1
        crossing = jnp.sum(states.kv[:, :, last] * dkv[:, :, last], axis=2)  # [B, G, F]
        crossing += states.k_sum[:, :, last] * dk_sum[:, :, last]
        d_decay = _sum_last_piece(spec, walk, d_decay, crossing)
    d_state = None
    if inputs.initial_state is not None:
        d_state = LinearState(jnp.swapaxes(dkv[:, :, 0], 2, 3), dk_sum[:, :, 0])
    return Inputs(found.dq, dk, dv, decay=d_decay, initial_state=d_state)


def _sum_last_piece(
    spec: LinearAttentionSpec, walk: Walk, d_decay: jax.Array, crossing: jax.Array
) -> jax.Array:
    """The decays' gradient, whose last piece has the flows of its steps: sums of those before."""
    axis = 1 if spec.layout == "bthd" else 2
    first = (walk.pieces.count - 1) * walk.pieces.rows
    flow = jax.lax.slice_in_dim(d_decay, first, spec.S - 1, axis=axis)
    terms = jnp.concatenate([jnp.expand_dims(crossing, axis), -flow], axis=axis)
    return jax.lax.dynamic_update_slice_in_dim(
        d_decay, jnp.cumsum(terms, axis=axis), first, axis=axis
    )
