"""The backward kernels: dQ by query blocks, then dK and dV by key blocks, without atomics.

With p_ij = exp(s_ij - lse_i), recomputed tile by tile (`weights.py`),

    dv_j    = sum_i p_ij do_i
    ds_ij   = p_ij (dp_ij - delta_i)          times 1 - tanh^2 with a softcap
    dq_i    = scale * sum_j ds_ij k_j
    dk_j    = scale * sum_i ds_ij q_i

where the sums for dk and dv also run over the query heads of the group. The first kernel computes
delta for its queries and stores it for the second, with lse in the units of scores. A bias's
gradient is ds summed over the axes that the bias lacks (`bias.py`); a sink's is

    dsink_h = -sum_i exp(sink_h - lse_i) delta_i
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.attention.spec import (
    REST_UNITS,
    AttentionSpec,
    Inputs,
    Outputs,
    Residuals,
    exact_delta,
    gradient_gain,
    may_have_alike_gradients,
    sums_by_query,
    with_correction,
)
from ato_jax.ops.attention.triton import bias
from ato_jax.ops.attention.triton.block_sizes import Config
from ato_jax.ops.attention.triton.common import (
    ROWS_LAYOUT,
    Blocks,
    Sliced,
    each,
    fitted,
    in_score_units,
    inner,
    load_rows,
    load_tile,
    parts_first,
    plus_product,
    sequence_spec,
    span,
    store_rows,
    store_tile,
    sum_of_products,
    whole_spec,
    zeros,
)
from ato_jax.ops.attention.triton.pairs import Options, Pairs, batch_and_part, options_of
from ato_jax.ops.attention.triton.visibility import for_blocks
from ato_jax.ops.attention.triton.weights import (
    Rows,
    correction_of,
    gain_spec,
    load_gain,
    norm_of,
    plain_delta,
    renormalises,
    scaled_weight,
    shift,
    sink_shares,
    weight_gradient,
    weights,
    without_powers,
)
from ato_jax.triton.arithmetic import round_to_bfloat16

# Beside a launch the products of calls of so few queries, over all heads, take no time.
FEW_QUERIES = 64


class DqReads(NamedTuple):
    """The dQ kernel's inputs, the options apart: arrays, their block specs, or their refs."""

    q: Any  # [B, T, H, D]
    k: Any  # [B, S, G, D]
    v: Any  # [B, S, G, V]
    out: Any  # [B, T, H, V]
    lse: Any  # [B, T, H] float32
    do: Any  # [B, T, H, V]
    rest: Any  # [B, T, H, V] int8; None where the forward kept none
    dlse: Any  # [B, T, H] float32; None unless the call returns lse
    gain: Any  # [B, G] float32; None unless float16


class DqWrites(NamedTuple):
    """What the dQ kernel writes: shapes, block specs or refs."""

    dq: Any  # [B, T, H, D]
    norm: Any  # [B, H, T] float32, as `Rows.norm`
    delta: Any  # [B, H, T] float32, as `Rows.delta`
    total: Any  # [B, H, T] float32, the sum of a query's weights; None unless `renormalises`
    flow: Any  # [B, H, T] float32, the sum of a query's ds; None unless `sums_by_query`


def _dq_kernel(
    reads: DqReads, options: Options, writes: DqWrites, *, spec: AttentionSpec, blocks: Blocks
) -> None:
    q_ref, k_ref, v_ref, out_ref, lse_ref, do_ref, rest_ref, dlse_ref, gain_ref = reads
    dq_ref, norm_ref, delta_ref, total_ref, flow_ref = writes
    block_q, block_k, parts, fast_exp2 = blocks
    layout = spec.layout
    block, h = pl.program_id(0), pl.program_id(1)
    if spec.right is not None:
        # The last queries see the most keys, so their programs start first.
        block = pl.num_programs(0) - 1 - block
    b, part = batch_and_part(pl.program_id(2), parts)
    pairs = Pairs.of(spec, options, b, "queries")
    q_length, kv_length = pairs.limits.q_length, pairs.limits.kv_length
    i0 = block * block_q
    query = pairs.queries(span(i0, block_q)[:, None])  # [block_q, 1]
    gain = load_gain(gain_ref)

    out = load_rows(layout, out_ref, None, i0, block_q, q_length, spec.V)  # [block_q, V]
    do = load_rows(layout, do_ref, None, i0, block_q, q_length, spec.V)  # [block_q, V]
    lse = load_tile(layout, lse_ref, None, i0, block_q, spec.T)  # [block_q]
    if rest_ref is not None:
        rest = load_rows(layout, rest_ref, None, i0, block_q, q_length, spec.V)  # [block_q, V]
        out = tuple(
            tile.astype(jnp.float32) * (1 + units.astype(jnp.float32) * REST_UNITS[spec.dtype])
            for tile, units in zip(out, rest, strict=True)
        )
    delta = sum_of_products(out, do)
    if dlse_ref is not None:
        delta = delta - load_tile(layout, dlse_ref, None, i0, block_q, q_length)
    if gain is not None:
        delta = delta * gain
    # A query that sees nothing has lse -inf. With +inf instead, all of its weights are 0.
    sees = lse > -jnp.inf
    exists = query.indices[:, 0] < q_length if spec.q_lengths else None
    if exists is not None:
        sees = sees & exists
    norm = norm_of(spec, lse, sees)
    store_tile(ROWS_LAYOUT, norm_ref, None, i0, norm, spec.T)
    store_tile(ROWS_LAYOUT, delta_ref, None, i0, delta, spec.T)

    q = load_rows(layout, q_ref, None, i0, block_q, q_length, spec.D)  # [block_q, D]

    def step(
        masked: bool, n: Any, sums: tuple[Sliced, jax.Array, jax.Array | None]
    ) -> tuple[Sliced, jax.Array, jax.Array | None]:
        dq, total, flow = sums  # [block_q, D], [block_q], [block_q]
        j0 = n * block_k
        key = pairs.keys(span(j0, block_k)[None, :], masked)  # [1, block_k]
        k = load_rows(layout, k_ref, None, j0, block_k, kv_length, spec.D, not masked)
        v = load_rows(layout, v_ref, None, j0, block_k, kv_length, spec.V, not masked)
        products = inner(spec, q, k)  # [block_q, block_k]
        p, slope = weights(
            pairs, h, masked, query, key, products, norm[:, None], fast_exp2
        )
        if total_ref is not None:
            total = total + jnp.sum(p, axis=1)
        dp = inner(spec, do, v)  # [block_q, block_k]
        dp = weight_gradient(spec, dp, pairs.kept(h, query, key), gain)
        ds = p * (dp - delta[:, None])
        if flow is not None:
            flow = flow + jnp.sum(ds, axis=1)
        ds = ds if slope is None else ds * slope
        return _plus_weighted(spec, dq, ds, k, in_parts=may_have_alike_gradients(spec)), total, flow

    total = jnp.zeros((block_q,), jnp.float32)
    if total_ref is not None and options.sinks is not None:
        sink = jnp.where(part == 0, in_score_units(spec, options.sinks[h]), -jnp.inf)
        total = scaled_weight(spec, sink, 1.0, norm)
    flow = None if flow_ref is None else jnp.zeros((block_q,), jnp.float32)
    start = (zeros(block_q, spec.D), total, flow)
    dq, total, flow = for_blocks(pairs.ranges(block, block_q, block_k, part, parts), step, start)
    if exists is not None:
        dq = each(lambda tile: jnp.where(exists[:, None], tile, 0.0), dq)
        total = jnp.where(exists, total, 0.0)
    if total_ref is not None:
        if parts == 1:
            total = correction_of(spec, total)
            dq = each(lambda tile: tile * total[:, None], dq)
        store_tile(ROWS_LAYOUT, total_ref, None, i0, total, spec.T)
    if flow is not None:
        if exists is not None:
            flow = jnp.where(exists, flow, 0.0)
        store_tile(ROWS_LAYOUT, flow_ref, None, i0, without_powers(spec, flow, gain), spec.T)
    dq = each(lambda tile: without_powers(spec, tile, gain, spec.scale), dq)
    store_rows(layout, dq_ref, None, i0, dq, spec.T, spec.D)


def _has_few_queries(spec: AttentionSpec) -> bool:
    """Whether dk and dv are sums over so few queries that roundings do not average out: in bfloat16
    one loses up to 3.9e-3, and a pair or two may be all of dk, weights that are alike all of dv."""
    return spec.dtype == "bfloat16" and spec.B * spec.H * spec.T <= FEW_QUERIES


def _plus_weighted(
    spec: AttentionSpec, sums: Sliced, w: jax.Array, rows: Sliced, *, in_parts: bool
) -> Sliced:
    """sums + w . rows, slice by slice, the weights w [rows of sums, rows] rounded to the dtype.
    With `in_parts` what rounding left off is multiplied, too."""
    sums = plus_product(spec, sums, w.astype(rows[0].dtype), rows)
    if not in_parts:
        return sums
    return plus_product(spec, sums, _rounding_of(spec, w).astype(rows[0].dtype), rows)


def _rounding_of(spec: AttentionSpec, w: jax.Array) -> jax.Array:
    """What rounding w to the dtype leaves off, in float32."""
    if spec.dtype == "bfloat16":
        return w - round_to_bfloat16(w)
    return w - w.astype(spec.dtype).astype(jnp.float32)


def _dkv_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    do_ref: Any,
    rows_refs: Rows,
    gain_ref: Any | None,
    options: Options,
    dk_ref: Any,
    dv_ref: Any,
    dbias_ref: Any | None,
    *,
    spec: AttentionSpec,
    blocks: Blocks,
) -> None:
    """Tiles of pairs are transposed, [block_k, block_q], as the sums over queries need them."""
    norm_ref, delta_ref, correction_ref = rows_refs
    block_q, block_k, parts, fast_exp2 = blocks
    layout = spec.layout
    share = spec.H // spec.G
    block, g = pl.program_id(0), pl.program_id(1)
    b, part = batch_and_part(pl.program_id(2), parts)
    pairs = Pairs.of(spec, options, b, "keys")
    q_length, kv_length = pairs.limits.q_length, pairs.limits.kv_length
    j0 = block * block_k
    key = pairs.keys(span(j0, block_k)[:, None])  # [block_k, 1]
    exists = key.indices < kv_length if spec.kv_lengths else None
    gain = load_gain(gain_ref)
    k = load_rows(layout, k_ref, None, j0, block_k, kv_length, spec.D)  # [block_k, D]
    v = load_rows(layout, v_ref, None, j0, block_k, kv_length, spec.V)  # [block_k, V]
    ranges = pairs.ranges(block, block_k, block_q, part, parts)

    def head(r: Any, sums: tuple[Sliced, Sliced]) -> tuple[Sliced, Sliced]:
        """Adds the terms of the group's query head r; None where the group has one head."""
        h = g if r is None else g * share + jnp.int32(r)

        def step(
            masked: bool, n: Any, sums: tuple[Sliced, Sliced, jax.Array | None]
        ) -> tuple[Sliced, Sliced, jax.Array | None]:
            dk, dv, dbias = sums  # [block_k, D], [block_k, V], [block_k]
            i0 = n * block_q
            all_exist = not masked

            def row(ref: Any) -> jax.Array:
                values = load_tile(ROWS_LAYOUT, ref, r, i0, block_q, spec.T, whole=all_exist)
                return values[None, :]  # [1, block_q]

            query = pairs.queries(span(i0, block_q)[None, :], masked)  # [1, block_q]
            q = load_rows(layout, q_ref, r, i0, block_q, q_length, spec.D, all_exist)
            products = inner(spec, k, q, mirrored=True)  # [block_k, block_q]
            p, slope = weights(
                pairs, h, masked, query, key, products, row(norm_ref), fast_exp2
            )
            if correction_ref is not None:
                p = p * row(correction_ref)
            do = load_rows(layout, do_ref, r, i0, block_q, q_length, spec.V, all_exist)
            kept = pairs.kept(h, query, key)
            dropped = p if kept is None else jnp.where(kept, p, 0.0)
            dv = _plus_weighted(spec, dv, dropped, do, in_parts=_has_few_queries(spec))
            dp = inner(spec, v, do)  # [block_k, block_q]
            ds = p * (weight_gradient(spec, dp, kept, gain) - row(delta_ref))
            if dbias is not None:
                dbias = dbias + jnp.sum(ds, axis=1)
            ds = ds if slope is None else ds * slope
            in_parts = _has_few_queries(spec) or may_have_alike_gradients(spec)
            return _plus_weighted(spec, dk, ds, q, in_parts=in_parts), dv, dbias

        of_head = None if dbias_ref is None else jnp.zeros((block_k,), jnp.float32)
        dk, dv, of_head = for_blocks(ranges, step, (*sums, of_head))
        if of_head is not None:
            if exists is not None:
                of_head = jnp.where(exists[:, 0], of_head, 0.0)
            of_head = without_powers(spec, of_head, gain)
            store_tile(ROWS_LAYOUT, dbias_ref, r, j0, of_head, spec.S)
        return dk, dv

    sums = (zeros(block_k, spec.D), zeros(block_k, spec.V))
    dk, dv = head(None, sums) if share == 1 else lax.fori_loop(0, share, head, sums)
    if exists is not None:
        dk, dv = (each(lambda tile: jnp.where(exists, tile, 0.0), sums) for sums in (dk, dv))
    dk = each(lambda tile: without_powers(spec, tile, gain, spec.scale), dk)
    dv = each(lambda tile: tile * (2.0 ** -shift(spec) / (1 - spec.dropout_rate)), dv)
    store_rows(layout, dk_ref, None, j0, dk, spec.S, spec.D)
    store_rows(layout, dv_ref, None, j0, dv, spec.S, spec.V)


def _query_gradient(
    spec: AttentionSpec,
    config: Config,
    residuals: Residuals,
    cotangents: Outputs,
    gain: jax.Array | None,
) -> tuple[jax.Array, Rows, jax.Array | None]:
    """dq, the rows that its kernel stores for the other kernels, and the sum of each query's ds,
    [B, H, T], where it `sums_by_query`."""
    inputs, outputs = residuals
    layout, parts = spec.layout, config.dq_parts
    share = spec.H // spec.G
    block_q, block_k = fitted(config.dq_block_q, spec.T), fitted(config.dq_block_k, spec.S)
    options = options_of(spec, inputs, "queries", block_q, block_k)
    per_query = jax.ShapeDtypeStruct((spec.B * parts, spec.H, spec.T), jnp.float32)
    inputs_rows = sequence_spec(layout, spec.T, None, block_q, parts=parts)
    rows_spec = sequence_spec(ROWS_LAYOUT, spec.T, None, block_q)
    queries = sequence_spec(layout, spec.T, spec.D, block_q, parts=parts)
    query_values = sequence_spec(layout, spec.T, spec.V, block_q, parts=parts)
    with_total, with_flow = renormalises(spec), sums_by_query(spec)
    reads = DqReads(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        out=outputs.out,
        lse=outputs.lse,
        do=cotangents.out,
        rest=outputs.rest,
        dlse=cotangents.lse if spec.return_lse else None,
        gain=gain,
    )
    blocks = Blocks(block_q, block_k, parts, config.fast_exp2)
    [[dq, norm, delta, total, flow]] = pallas_call(
        functools.partial(_dq_kernel, spec=spec, blocks=blocks),
        grid=(pl.cdiv(spec.T, block_q), spec.H, spec.B * parts),
        in_specs=[
            DqReads(
                q=queries,
                k=sequence_spec(layout, spec.S, spec.D, block_k, share=share, parts=parts),
                v=sequence_spec(layout, spec.S, spec.V, block_k, share=share, parts=parts),
                out=query_values,
                lse=inputs_rows,
                do=query_values,
                rest=None if reads.rest is None else query_values,
                dlse=None if reads.dlse is None else inputs_rows,
                gain=None if gain is None else gain_spec(share, parts),
            ),
            jax.tree.map(whole_spec, options),
        ],
        out_specs=[
            DqWrites(
                dq=sequence_spec(layout, spec.T, spec.D, block_q),
                norm=rows_spec,
                delta=rows_spec,
                total=rows_spec if with_total else None,
                flow=rows_spec if with_flow else None,
            )
        ],
        out_shape=[
            DqWrites(
                dq=jax.ShapeDtypeStruct(
                    (spec.B * parts, *inputs.q.shape[1:]),
                    inputs.q.dtype if parts == 1 else jnp.float32,
                ),
                norm=per_query,
                delta=per_query,
                total=per_query if with_total else None,
                flow=per_query if with_flow else None,
            )
        ],
        compiler_params=plgpu.CompilerParams(
            num_warps=config.dq_num_warps, num_stages=config.dq_num_stages
        ),
        name="attention_backward_dq",
    )(reads, options)
    correction = total
    if parts > 1:
        norm, delta, correction = norm[::parts], delta[::parts], None
        dq = jnp.sum(parts_first(dq, parts), axis=0)
        flow = None if flow is None else jnp.sum(parts_first(flow, parts), axis=0)
    if parts > 1 and total is not None:
        correction = correction_of(spec, jnp.sum(parts_first(total, parts), axis=0))  # [B, H, T]
        by_query = correction if layout == "bhtd" else correction.swapaxes(1, 2)
        dq = dq * by_query[..., None]
    if flow is not None and correction is not None:
        flow = flow * correction
    return dq.astype(inputs.q.dtype), Rows(norm, delta, correction), flow


def _with_correction(spec: AttentionSpec, do: jax.Array, rows: Rows) -> tuple[jax.Array, Rows]:
    """do and the rows for the other kernels, which correct the weights of float32 alone."""
    if rows.correction is None or spec.dtype == "float32":
        return do, rows
    scaled, delta = with_correction(spec, rows.correction, do, rows.delta)
    return scaled, rows._replace(delta=delta, correction=None)


def _key_gradients(
    spec: AttentionSpec,
    config: Config,
    inputs: Inputs,
    do: jax.Array,
    rows: Rows,
    gain: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """dk, dv, and for a bias with keys but no queries ds summed over the queries, [B, H, S]."""
    layout, parts = spec.layout, config.dkv_parts
    share = spec.H // spec.G
    block_q, block_k = fitted(config.dkv_block_q, spec.T), fitted(config.dkv_block_k, spec.S)
    options = options_of(spec, inputs, "keys", block_k, block_q)
    options = options._replace(sinks=None)
    rows_spec = sequence_spec(ROWS_LAYOUT, spec.T, None, block_q, group=share, parts=parts)
    with_dbias = bias.of_keys(spec)
    dk, dv, dbias = pallas_call(
        functools.partial(
            _dkv_kernel, spec=spec, blocks=Blocks(block_q, block_k, parts, config.fast_exp2)
        ),
        grid=(pl.cdiv(spec.S, block_k), spec.G, spec.B * parts),
        in_specs=[
            sequence_spec(layout, spec.T, spec.D, block_q, group=share, parts=parts),
            sequence_spec(layout, spec.S, spec.D, block_k, parts=parts),
            sequence_spec(layout, spec.S, spec.V, block_k, parts=parts),
            sequence_spec(layout, spec.T, spec.V, block_q, group=share, parts=parts),
            jax.tree.map(lambda _: rows_spec, rows),
            None if gain is None else gain_spec(1, parts),
            jax.tree.map(whole_spec, options),
        ],
        out_specs=[
            sequence_spec(layout, spec.S, spec.D, block_k),
            sequence_spec(layout, spec.S, spec.V, block_k),
            sequence_spec(ROWS_LAYOUT, spec.S, None, block_k, group=share) if with_dbias else None,
        ],
        out_shape=[
            *(
                jax.ShapeDtypeStruct(
                    (spec.B * parts, *array.shape[1:]),
                    array.dtype if parts == 1 else jnp.float32,
                )
                for array in (inputs.k, inputs.v)
            ),
            jax.ShapeDtypeStruct((spec.B * parts, spec.H, spec.S), jnp.float32)
            if with_dbias
            else None,
        ],
        compiler_params=plgpu.CompilerParams(
            num_warps=config.dkv_num_warps, num_stages=config.dkv_num_stages
        ),
        name="attention_backward_dkv",
    )(inputs.q, inputs.k, inputs.v, do, rows, gain, options)
    if parts > 1:
        dk, dv, dbias = (
            None if array is None else jnp.sum(parts_first(array, parts), axis=0)
            for array in (dk, dv, dbias)
        )
    return dk.astype(inputs.k.dtype), dv.astype(inputs.v.dtype), dbias


def backward(
    spec: AttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs = residuals.inputs
    gain = gradient_gain(spec, inputs, cotangents)
    dq, rows, flow = _query_gradient(spec, config, residuals, cotangents, gain)
    dbias = dsinks = None
    if spec.sinks:
        shares, delta = sink_shares(spec, inputs.sinks, rows), plain_delta(spec, rows, gain)
        if flow is not None:
            delta = exact_delta(spec, cotangents, shares, rows.norm, delta, flow)
        dsinks = -jnp.sum(shares * delta, axis=(0, 2))
    do, rows = _with_correction(spec, cotangents.out, rows)
    cotangents = cotangents._replace(out=do)
    dk, dv, by_key = _key_gradients(spec, config, inputs, do, rows, gain)
    if spec.bias is not None:
        dbias = bias.gradient(spec, config, inputs, cotangents, rows, gain, by_key)
    return Inputs(q=dq, k=dk, v=dv, bias=dbias, sinks=dsinks)
