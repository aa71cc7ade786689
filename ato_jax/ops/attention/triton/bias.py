"""The bias's gradient: ds summed over the axes that the bias lacks, without storing all of ds.

    dbias[b, h, i, j] = ds_ij of query head h = p_ij (dp_ij - delta_i)

The sum of ds over all keys of a query follows from lse's cotangent and the sink:

    sum_j ds_ij = out_i . do_i - (1 - share_i) delta_i = dlse_i + share_i delta_i

where share_i is the sink's share of the weights. So the gradient of a bias without keys needs no
kernel. For a bias with keys and no queries, the kernel for dk and dv also sums ds over its queries,
and XLA sums that over the heads and batch entries that the bias lacks. For a bias with both, each
program of the kernel here owns a tile of dbias and sums over the heads and batch entries that the
bias lacks.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.attention.spec import (
    AttentionSpec,
    Inputs,
    Outputs,
    bias_gradient_by_query,
    over_lacked_axes,
)
from ato_jax.ops.attention.triton.block_sizes import Config
from ato_jax.ops.attention.triton.common import (
    ROWS_LAYOUT,
    fitted,
    in_log2,
    inner,
    load_rows,
    load_tile,
    quotient,
    row_size,
    span,
    whole_spec,
)
from ato_jax.ops.attention.triton.pairs import Options, Pairs, options_of
from ato_jax.ops.attention.triton.weights import (
    Rows,
    plain_delta,
    sink_shares,
    weight_gradient,
    weights,
    without_powers,
)


def of_keys(spec: AttentionSpec) -> bool:
    """Whether the bias has an axis of keys, but none of queries."""
    return spec.bias is not None and spec.bias[3] and not spec.bias[2]


def gradient(
    spec: AttentionSpec,
    config: Config,
    inputs: Inputs,
    cotangents: Outputs,
    rows: Rows,
    gain: jax.Array | None,
    by_key: jax.Array | None,
) -> jax.Array:
    """dbias; `by_key` is ds summed over the queries, [B, H, S], for a bias without queries."""
    assert spec.bias is not None and inputs.bias is not None
    if by_key is not None:
        found = by_key[:, :, None]  # [B, H, 1, S]
    elif not spec.bias[3]:
        shares, delta = sink_shares(spec, inputs.sinks, rows), plain_delta(spec, rows, gain)
        log2_lse = in_log2(spec, rows.norm)
        by_query = bias_gradient_by_query(spec, cotangents, shares, delta, log2_lse)
        found = by_query[..., None]  # [B, H, T, 1]
    else:
        return _by_tile(spec, config, inputs, cotangents.out, rows, gain)
    return over_lacked_axes(found, inputs.bias)


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    do_ref: Any,
    rows_refs: Rows,
    gain_ref: Any | None,
    options: Options,
    dbias_ref: Any,
    *,
    spec: AttentionSpec,
    block_q: int,
    block_k: int,
    fast_exp2: bool,
) -> None:
    assert spec.bias is not None
    layout = spec.layout
    share = spec.H // spec.G
    n, m = pl.program_id(0), pl.program_id(1)
    i0, j0 = n * block_q, m * block_k
    has_batch, has_heads, *_ = spec.bias
    heads = spec.H if has_heads else 1
    own_b = quotient(pl.program_id(2), heads)
    own_h = pl.program_id(2) - own_b * heads

    def entry(b: Any, h: Any, sums: jax.Array) -> jax.Array:
        """Adds the terms of a batch entry and head, if the tile holds visible pairs there."""
        pairs = Pairs.of(spec, options, b, "tiles")
        q_length, kv_length = pairs.limits.q_length, pairs.limits.kv_length
        g = quotient(h, share)
        gain = None if gain_ref is None else gain_ref[b, g]

        def row(ref: Any) -> jax.Array:
            values = load_tile(ROWS_LAYOUT, ref, h, i0, block_q, spec.T, batch=b)
            return values[:, None]  # [block_q, 1]

        def step(_: Any, sums: jax.Array) -> jax.Array:
            query = pairs.queries(span(i0, block_q)[:, None])  # [block_q, 1]
            key = pairs.keys(span(j0, block_k)[None, :])  # [1, block_k]
            q = load_rows(layout, q_ref, h, i0, block_q, q_length, spec.D, batch=b)
            k = load_rows(layout, k_ref, g, j0, block_k, kv_length, spec.D, batch=b)
            products = inner(spec, q, k)  # [block_q, block_k]
            p, _ = weights(
                pairs, h, True, query, key, products, row(rows_refs.norm), fast_exp2
            )
            if rows_refs.correction is not None:
                p = p * row(rows_refs.correction)
            do = load_rows(layout, do_ref, h, i0, block_q, q_length, spec.V, batch=b)
            v = load_rows(layout, v_ref, g, j0, block_k, kv_length, spec.V, batch=b)
            dp = inner(spec, do, v)  # [block_q, block_k]
            dp = weight_gradient(spec, dp, pairs.kept(h, query, key), gain)
            return sums + without_powers(spec, p * (dp - row(rows_refs.delta)), gain)

        ranges = pairs.ranges(n, block_q, block_k, 0, 1)
        # One iteration or none: the intersection of [m, m + 1) and the blocks with visible pairs.
        start, stop = jnp.maximum(ranges.first, m), jnp.minimum(ranges.end, m + 1)
        return lax.fori_loop(start, stop, step, sums)

    sums = jnp.zeros((block_q, block_k), jnp.float32)
    if has_batch and has_heads:
        sums = entry(own_b, own_h, sums)
    else:
        turns = (1 if has_batch else spec.B) * (1 if has_heads else spec.H)

        def body(turn: Any, sums: jax.Array) -> jax.Array:
            turn = jnp.int32(turn)
            b = own_b if has_batch else turn if has_heads else quotient(turn, spec.H)
            h = own_h if has_heads else turn if has_batch else turn - b * spec.H
            return entry(b, h, sums)

        sums = lax.fori_loop(0, turns, body, sums)
    query = span(i0, block_q)[:, None]  # [block_q, 1]
    key = span(j0, block_k)[None, :]  # [1, block_k]
    plgpu.store(
        dbias_ref.at[own_b, own_h, query, key],
        sums.astype(dbias_ref.dtype),
        mask=(query < spec.T) & (key < spec.S),
    )


def _by_tile(
    spec: AttentionSpec,
    config: Config,
    inputs: Inputs,
    do: jax.Array,
    rows: Rows,
    gain: jax.Array | None,
) -> jax.Array:
    assert inputs.bias is not None
    block_q, block_k = fitted(config.dbias_block_q, spec.T), fitted(config.dbias_block_k, spec.S)
    options = options_of(spec, inputs, "queries", block_q, block_k)._replace(sinks=None)

    def sequence(heads: int, length: int, width: int, block: int) -> pl.BlockSpec:
        """The whole array, padded to the block and the padded row."""
        time = max(length, block)
        axes = (time, heads) if spec.layout == "bthd" else (heads, time)
        return pl.BlockSpec((spec.B, *axes, row_size(width)), lambda n, m, z: (0, 0, 0, 0))

    rows_spec = pl.BlockSpec((spec.B, spec.H, max(spec.T, block_q)), lambda n, m, z: (0, 0, 0))
    owners = inputs.bias.shape[0] * inputs.bias.shape[1]
    return pallas_call(
        functools.partial(
            _kernel, spec=spec, block_q=block_q, block_k=block_k, fast_exp2=config.fast_exp2
        ),
        grid=(pl.cdiv(spec.T, block_q), pl.cdiv(spec.S, block_k), owners),
        in_specs=[
            sequence(spec.H, spec.T, spec.D, block_q),
            sequence(spec.G, spec.S, spec.D, block_k),
            sequence(spec.G, spec.S, spec.V, block_k),
            sequence(spec.H, spec.T, spec.V, block_q),
            jax.tree.map(lambda _: rows_spec, rows),
            None if gain is None else whole_spec(gain),
            jax.tree.map(whole_spec, options),
        ],
        out_specs=whole_spec(inputs.bias),
        out_shape=jax.ShapeDtypeStruct(inputs.bias.shape, inputs.bias.dtype),
        compiler_params=plgpu.CompilerParams(
            num_warps=config.dbias_num_warps, num_stages=config.dbias_num_stages
        ),
        name="attention_backward_dbias",
    )(inputs.q, inputs.k, inputs.v, do, rows, gain, options)
