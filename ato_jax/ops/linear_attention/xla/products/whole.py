"""Every query sees every key: six large products, two forward and four backward.

    S   = sum_j phi(k_j) v_j^T          z   = sum_j phi(k_j)          the initial state included
    w_i = 1 / max(phi(q_i) . z, eps)                                  or the scale
    out_i = w_i phi(q_i) S

    s_i = (w_i phi(q_i)) . (do_i S^T)             out_i . do_i; 0 where eps replaces phi(q_i) . z
    dS  = sum_i w_i phi(q_i) do_i^T               dz  = -sum_i s_i w_i phi(q_i)
    dphi(q_i) = w_i (do_i S^T - s_i z)
    dphi(k_j) = v_j dS^T + dz                     dv_j = phi(k_j) dS

w_i multiplies phi(q_i) before it is rounded, so that do and v are operands as they are. A scale
multiplies S and dS instead, since phi(q_i) may be exact without it. Sums over rows of single
vectors and over a row's columns are float32 sums and no products, which a GPU would round to TF32.

Where all features of a row are alike, they are rounded alike, and no sum over them averages that
out. For keys, z is a sum of the rounded features that S is made of: both are off by one factor,
which cancels in the quotient. For queries, w_i phi(q_i) is then 1 / sum(z) in every column,
whatever value the row has. So products take c w_i phi(q_i) and S / c. c, one number of a kv head,
is such that c / sum(z) is 1 / F as operands hold it, times a power of two. Where all keys are
alike, too, S / c is the output times nearly a power of two, so that both round to the same number.

s_i is taken from the product that the gradient is made of: the two terms of it nearly cancel, and
then their roundings do, too.
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
from ato_jax.ops.linear_attention.xla.products import rows


def _over(axes: str, per_head: jax.Array) -> jax.Array:
    """[B, G, X] shaped to meet arrays [axes.., X]."""
    B, G, width = per_head.shape
    return per_head.reshape(*(dict(b=B, g=G).get(axis, 1) for axis in axes), width)


def _unit(spec: LinearAttentionSpec, z: jax.Array) -> jax.Array:
    """c [B, G, 1], of a size from 0.5 to 2; 1 where nothing is divided or rounded."""
    if not spec.normalize or rows.is_exact(spec):
        return jnp.ones_like(z[..., :1])
    share = rows.rounded(spec, jnp.float32(2 ** (spec.F - 1).bit_length() / spec.F))
    # Without the barrier XLA makes one sum of this and z's, and stores all features for it.
    total = jnp.sum(jax.lax.optimization_barrier(z), axis=-1, keepdims=True)
    unit = jnp.frexp(total)[0] * share
    return jnp.where((unit != 0) & jnp.isfinite(unit), unit, 1)


def _queries(
    spec: LinearAttentionSpec, inputs: Inputs, z: jax.Array, unit: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """c w phi(q) as an operand, or phi(q) where that is not normalised, den [.., 1], and the mask
    of padding."""
    axes = rows.QUERY_AXES[spec.layout]
    mask = rows.valid(inputs.q_lengths, 0, spec.T, axes)
    phi_q = rows.features(spec, rows.in_groups(spec, inputs.q), mask)
    den = jnp.sum(phi_q * _over(axes, z), axis=-1, keepdims=True)
    weighed = phi_q * (rows.weights(spec, den) * _over(axes, unit)) if spec.normalize else phi_q
    # Behind the barrier all read the operand. Else XLA keeps it in float32 for some.
    operand = jax.lax.optimization_barrier(rows.operand(spec, weighed))
    return operand, den, mask


def _keys(
    spec: LinearAttentionSpec, inputs: Inputs
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """phi(k) in float32, v as an operand, and the mask of padding."""
    mask = rows.valid(inputs.kv_lengths, 0, spec.S, rows.KEY_AXES[spec.layout])
    v = rows.operand(spec, rows.keep(mask, inputs.v))
    return rows.features(spec, inputs.k, mask), v, mask


def forward(spec: LinearAttentionSpec, inputs: Inputs) -> Outputs:
    query_axes, key_axes = rows.QUERY_AXES[spec.layout], rows.KEY_AXES[spec.layout]
    state = rows.initial(spec, inputs)
    phi_k, v, _ = _keys(spec, inputs)
    k = rows.operand(spec, phi_k)
    S = state.kv + rows.product(spec, f"{key_axes}f,{key_axes}v->bgfv", k, v, jnp.float32)
    z = state.k_sum + jnp.sum(rows.rounded(spec, phi_k), axis=key_axes.index("t"))
    unit = _unit(spec, z)
    q = _queries(spec, inputs, z, unit)[0]
    factors = rows.parts_of_states(spec, S / unit[..., None] if spec.normalize else S * spec.scale)
    equation = f"{query_axes}f,bgfv->{query_axes}v"
    dtype = inputs.v.dtype if len(factors) == 1 and v.dtype == jnp.bfloat16 else jnp.float32
    out, *rests = (rows.product(spec, equation, q, factor, dtype) for factor in factors)
    for rest in rests:
        out = out + rest
    return Outputs(rows.of_heads(spec, out.astype(inputs.v.dtype)), LinearState(S, z))


def backward(spec: LinearAttentionSpec, residuals: Residuals, cotangents: Outputs) -> Inputs:
    query_axes, key_axes = rows.QUERY_AXES[spec.layout], rows.KEY_AXES[spec.layout]
    inputs, (S, z) = residuals.inputs, residuals.outputs.state
    dtype = rows.operand_dtype(spec)
    unit = _unit(spec, z)
    q, den, asked = _queries(spec, inputs, z, unit)
    # The maps' derivatives read q and k by themselves: else XLA keeps the features in float32.
    q_again, k_again = jax.lax.optimization_barrier((rows.in_groups(spec, inputs.q), inputs.k))
    phi_k, v, real = _keys(spec, inputs)
    d_out = rows.operand(spec, rows.keep(asked, rows.in_groups(spec, cotangents.out)))

    d_kv = rows.product(spec, f"{query_axes}f,{query_axes}v->bgfv", q, d_out, jnp.float32)
    d_kv = d_kv / unit[..., None] if spec.normalize else d_kv * spec.scale
    d_kv = d_kv + cotangents.state.kv
    equation = f"{query_axes}v,bgfv->{query_axes}f"
    parts = [
        rows.product(spec, equation, d_out, part, jnp.float32)
        for part in rows.in_parts(spec, S / unit[..., None])
    ]
    of_state = sum(parts[1:], parts[0])  # do S^T / c
    num_flow = jnp.sum(q.astype(jnp.float32) * of_state, axis=-1, keepdims=True)  # out . do
    num_flow = rows.where_divided(spec, den, num_flow)
    w = rows.weights(spec, den) * _over(query_axes, unit)
    d_phi_q = (of_state - num_flow * _over(query_axes, z / unit)) * w
    over_rows = tuple(query_axes.index(axis) for axis in "tr")
    dz = -jnp.sum(q.astype(jnp.float32) * num_flow, axis=over_rows) / unit
    dz = dz + cotangents.state.k_sum
    d_kv_operand = rows.operand(spec, d_kv)
    d_phi_k = rows.product(spec, f"{key_axes}v,bgfv->{key_axes}f", v, d_kv_operand, jnp.float32)
    d_phi_k = d_phi_k + _over(key_axes, dz)
    k = rows.operand(spec, phi_k)
    d_v = rows.product(spec, f"{key_axes}f,bgfv->{key_axes}v", k, d_kv_operand, dtype)
    return Inputs(
        rows.of_heads(spec, rows.pull_back(spec, q_again, asked, d_phi_q)),
        rows.pull_back(spec, k_again, real, d_phi_k),
        rows.keep(real, d_v).astype(inputs.v.dtype),
        initial_state=None if inputs.initial_state is None else LinearState(d_kv, dz),
    )
