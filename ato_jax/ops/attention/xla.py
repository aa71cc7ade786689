"""Softmax attention in plain JAX: every option, on every platform, memory linear in T.

For one kv head, a block of queries i, and all keys j that its strip can see (`blocks.py`):

    s[i,j] = softcap(scale * q_i . k_j) + bias[i,j]         -inf where i may not see j
    m_i    = max_j s[i,j], the sink too                     0 where that is -inf
    p[i,j] = exp(s[i,j] - m_i)
    l_i    = sum_j p[i,j] + exp(sink - m_i)
    out_i  = sum_j dropped(p[i,j]) v_j / l_i                0 where l_i = 0
    lse_i  = m_i + log l_i                                  -inf where l_i = 0

A query that sees NaN, or a score or sink of +inf, has an l_i of NaN, and so out and lse are NaN.

m only keeps exp in range. Neither out nor lse depends on it, so every derivative takes it for a
constant. The softmax has a custom derivative in forward mode, which JAX transposes and
differentiates to any order:

    dlse_i = sum_j w[i,j] ds[i,j]                 w = p / l, and the sink's term
    dw[i,j] = w[i,j] (ds[i,j] - dlse_i)

The gradient of s is then w (dp - sum_j w dp), with the same rounded dp in both terms. It is exactly
0 where a query sees one key, and where the two terms nearly cancel, its rounding error is small
beside the difference. The forward pass keeps m of each block, and the backward pass computes the
weights again, as a flash kernel does. It sums l again, too: a score computed twice may differ in
its last bit, which at 1000 is 6e-5, and weights over the forward pass's l would add up to 1 + 6e-5.

Causality and windows skip what they hide where the position of query 0 is static
(`spec.offset`). Elsewhere, as with a traced `query_offset`, they only mask.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ato_jax import autodiff
from ato_jax.backend import Backend
from ato_jax.ops.attention import blocks
from ato_jax.ops.attention.blocks import Config, default_config
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs, Residuals, dropout_keep


def unsupported(spec: AttentionSpec, phase: str) -> str | None:
    return None


def forward(spec: AttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("m")
    )
    def block(arrays: blocks.Arrays) -> tuple[jax.Array, jax.Array]:
        return _block(spec, arrays)

    def strip(arrays: blocks.Arrays) -> tuple[jax.Array, jax.Array]:
        return blocks.over_queries(block, arrays, config.block_t)

    def head(arrays: blocks.Arrays) -> tuple[jax.Array, jax.Array]:
        return blocks.strips(spec, config, strip, arrays)

    out, lse = blocks.per_head(spec, config, head, blocks.per_kv_head(spec, inputs))
    if inputs.q_lengths is not None:
        # The rows hold these values already; the selects keep NaN in their cotangents from the
        # gradients.
        held = jnp.arange(spec.T, dtype=jnp.int32) < inputs.q_lengths[:, None, None]  # [B, 1, T]
        out = jnp.where(held[..., None], out, 0)
        lse = jnp.where(held, lse, lax.stop_gradient(lse))
    if spec.layout == "bthd":
        out, lse = out.swapaxes(1, 2), lse.swapaxes(1, 2)
    return Outputs(out.astype(inputs.v.dtype), lse)


def _block(spec: AttentionSpec, arrays: blocks.Arrays) -> tuple[jax.Array, jax.Array]:
    """out [R, block, V] and lse [R, block] of a block of queries against all keys of its strip."""
    by_query = None
    if spec.bias is not None and not spec.bias[3]:
        arrays = dict(arrays)
        by_query = arrays.pop("bias")  # [R|1, block|1, 1]
    s = blocks.scores(spec, arrays)  # [R, block, S]
    sinks = arrays["sinks"][:, None, None] if spec.sinks else None  # [R, 1, 1]
    if by_query is not None:
        # A bias that all keys of a query share only shifts lse, and the keys against the sink.
        # Added there, its gradient needs no sum of ds over the keys, whose terms cancel.
        s = jnp.where(by_query == -jnp.inf, -jnp.inf, s)
        by_query = jnp.where(jnp.max(s, axis=-1, keepdims=True) == -jnp.inf, 0, by_query)
        # NaN and infinity are added to the scores as well, so that `out` shows them.
        s = s + jnp.where(jnp.isfinite(by_query), 0, by_query)
    keep = None
    if spec.dropout_rate:
        i, j = blocks.indices(arrays)
        h = arrays["h"][:, None, None]
        keep = dropout_keep(spec.dropout_rate, arrays["seed"], arrays["b"], h, i, j)
    out, lse = _softmax(spec, s, arrays["v"], sinks, by_query, keep)
    return out, lse[..., 0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _softmax(
    spec: AttentionSpec,
    s: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    by_query: jax.Array | None,
    keep: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """out [R, block, V] and lse [R, block, 1], from scores and sinks [R, block|1, 1].

    `by_query` [R|1, block|1, 1] is a bias that all scores of a query share, and that `s` lacks. For
    the weights, adding it to the scores is the same as subtracting it from the sink.
    """
    beside = _beside(sinks, by_query)
    m = _largest(s, beside)
    total = _normaliser(s, beside, m)
    out = _values(spec, _dropped(spec, jnp.exp(s - m), keep), v) / _not_zero(total)
    return out, _lse(m, total, sinks, by_query)


@_softmax.defjvp
def _softmax_jvp(spec: AttentionSpec, primals: Any, tangents: Any) -> Any:
    s, v, sinks, by_query, keep = primals
    d_s, d_v, d_sinks, d_by_query, _ = tangents
    beside = _beside(sinks, by_query)
    m = checkpoint_name(_largest(s, beside), "m")
    total = _normaliser(s, beside, m)
    p = jnp.exp(s - m) / _not_zero(total)  # [R, block, S]
    mean = jnp.sum(p * d_s, axis=-1, keepdims=True)  # [R, block, 1]
    d_lse = mean
    if beside is not None:
        share = jnp.exp(beside - m) / _not_zero(total)
        d_lse = d_lse + share * d_sinks
        mean = mean + share * (d_sinks if by_query is None else d_sinks - d_by_query)
    if by_query is not None:
        # 1 - share would cancel where the sink has nearly all the weight.
        d_lse = d_lse + jnp.sum(p, axis=-1, keepdims=True) * d_by_query
    out = _values(spec, _dropped(spec, p, keep), v)
    d_out = _values(spec, _dropped(spec, p * (d_s - mean), keep), v)
    d_out = d_out + _values(spec, _dropped(spec, p, keep), d_v)
    return (out, _lse(m, total, sinks, by_query)), (d_out, d_lse)


def _beside(sinks: jax.Array | None, by_query: jax.Array | None) -> jax.Array | None:
    """The sinks' logits beside scores that lack `by_query`."""
    return sinks if sinks is None or by_query is None else sinks - by_query


def _largest(s: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """m, [R, block, 1]."""
    top = jnp.max(lax.stop_gradient(s), axis=-1, keepdims=True)
    if sinks is not None:
        top = jnp.maximum(top, lax.stop_gradient(sinks))
    return jnp.where(top == -jnp.inf, 0, top)


def _normaliser(s: jax.Array, sinks: jax.Array | None, m: jax.Array) -> jax.Array:
    """l, [R, block, 1]."""
    total = jnp.sum(jnp.exp(s - m), axis=-1, keepdims=True)
    return total if sinks is None else total + jnp.exp(sinks - m)


def _lse(
    m: jax.Array, total: jax.Array, sinks: jax.Array | None, by_query: jax.Array | None
) -> jax.Array:
    log_total = jnp.log(_not_zero(total))
    if by_query is None:
        return jnp.where(total == 0, -jnp.inf, m + log_total)
    top = m + by_query
    if sinks is not None:
        # Where the sink is the largest, m + by_query is sinks - by_query + by_query, which loses
        # the sink's digits beside a large bias.
        top = jnp.where(sinks - by_query >= m, sinks, top)
    # m has no derivative, which `total` makes up for; by_query has one.
    shifted = lax.stop_gradient(top) + (by_query - lax.stop_gradient(by_query))
    return jnp.where(total == 0, -jnp.inf, shifted + log_total)


def _not_zero(total: jax.Array) -> jax.Array:
    return jnp.where(total == 0, 1, total)


def _dropped(spec: AttentionSpec, p: jax.Array, keep: jax.Array | None) -> jax.Array:
    return p if keep is None else jnp.where(keep, p / (1 - spec.dropout_rate), 0)


def _values(spec: AttentionSpec, p: jax.Array, v: jax.Array) -> jax.Array:
    """p . v, [R, block, V]."""
    return jnp.einsum("rts,sv->rtv", p, v, precision=blocks.dot_precision(spec))


def backward(
    spec: AttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    return autodiff.gradient(
        functools.partial(forward, spec, config), residuals.inputs, cotangents
    )


class _Xla(Backend[AttentionSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)


BACKEND = _Xla()
