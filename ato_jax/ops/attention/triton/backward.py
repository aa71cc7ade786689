"""The backward kernels: dQ by query blocks, then dK and dV by key blocks. No atomics.

With p_ij = exp(s_ij - lse_i), all of it recomputed tile by tile,

    dv_j    = sum_i p_ij do_i
    dp_ij   = do_i . v_j
    delta_i = sum_j p_ij dp_ij - dlse_i = out_i . do_i - dlse_i
    ds_ij   = p_ij (dp_ij - delta_i)          times 1 - tanh^2 with a softcap
    dq_i    = scale * sum_j ds_ij k_j
    dk_j    = scale * sum_i ds_ij q_i

where the sums for dk and dv run over the query heads of the group, too. The first kernel finds
delta for its queries and leaves it for the second, with lse in units of log2.

float16 holds nothing below 6e-8 and little below 6e-5, where p and ds lie for long sequences, so
there both carry powers of two into the products, taken out of the sums: 2^WEIGHT_SHIFT in p, which
is at most 1, and `gain` in dp - delta besides, a power of two per group that keeps the product
within 2^WEIGHT_SHIFT whatever the size of v and do.

A large lse is rounded by more than float32's budget for p: at 1000 by 3e-5. So for float32 the
first kernel sums each query's weights as it finds them from lse, divides its dq by that sum, which
should be 1, and leaves the inverse for the second kernel to multiply with.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ato_jax import device
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs, Residuals
from ato_jax.ops.attention.triton.common import (
    LOG2_E,
    block_ranges,
    dot,
    exp2,
    fitted,
    for_blocks,
    key_bounds,
    load_tile,
    padded,
    query_bounds,
    quotient,
    raw_scores,
    score_factor,
    sequence_spec,
    store_tile,
    visible,
)

# 2^15 is half of what float16 holds: room for weights that rounding puts above 1.
WEIGHT_SHIFT = 15

# The rows that the first kernel leaves for the second, [B, H, T] float32 whatever the layout, so
# that a tile's are contiguous.
ROWS_LAYOUT = "bhtd"


def _shift(spec: AttentionSpec) -> int:
    return WEIGHT_SHIFT if spec.dtype == "float16" else 0


def _renormalises(spec: AttentionSpec) -> bool:
    return spec.dtype == "float32"


def _gradient_gain(spec: AttentionSpec, inputs: Inputs, cotangents: Outputs) -> jax.Array | None:
    """float16: for each group a power of two times |dp - delta| that is at most 1, [B, G]."""
    if spec.dtype != "float16":
        return None
    heads = 2 if spec.layout == "bthd" else 1

    def largest(array: jax.Array) -> jax.Array:
        """[B, G], over all other axes."""
        shape = array.shape[:heads] + (spec.G, -1) + array.shape[heads + 1 :]
        array = jnp.abs(array.reshape(shape)).astype(jnp.float32)
        return jnp.max(array, axis=[a for a in range(array.ndim) if a not in (0, heads)])

    # |dp| <= V max|do| max|v|, and out . do is a mean of dp.
    bound = 2 * spec.V * largest(cotangents.out) * largest(inputs.v)
    if spec.return_lse:
        bound += largest(cotangents.lse)
    _, exponent = jnp.frexp(bound)
    return jnp.ldexp(jnp.float32(1), -exponent)


def _load_gain(gain_ref: Any | None) -> jax.Array | None:
    return None if gain_ref is None else gain_ref[0, 0]


def _score_gradient(
    spec: AttentionSpec,
    p: jax.Array,
    dp: jax.Array,
    delta: jax.Array,
    slope: jax.Array | None,
    gain: jax.Array | None,
) -> jax.Array:
    """ds, or ds * gain * 2^shift where there is a gain; delta carries the gain already."""
    ds = p * ((dp if gain is None else dp * gain) - delta)
    return (ds if slope is None else ds * slope).astype(spec.dtype)


def _without_gain(spec: AttentionSpec, sums: jax.Array, gain: jax.Array | None) -> jax.Array:
    """Sums over ds times q or k, scaled, the powers of two taken out."""
    scale: Any = spec.scale * 2.0 ** -_shift(spec)
    return sums * (scale if gain is None else scale / gain)


def _weights(
    spec: AttentionSpec,
    products: jax.Array,
    log2_norm: jax.Array,
    hidden: jax.Array | None,
    fast_exp2: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """p * 2^shift from q . k, and the softcap's slope. `log2_norm` lacks the shift already."""
    raw = raw_scores(spec, products)
    slope = None if spec.softcap is None else 1 - raw * raw
    if hidden is not None:
        raw = jnp.where(hidden, -jnp.inf, raw)
    return exp2(raw * score_factor(spec) - log2_norm, fast_exp2), slope


def _dq_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    do_ref: Any,
    dlse_ref: Any | None,
    gain_ref: Any | None,
    dq_ref: Any,
    log2_norm_ref: Any,
    delta_ref: Any,
    correction_ref: Any | None,
    *,
    spec: AttentionSpec,
    offset: int,
    block_q: int,
    block_k: int,
    fast_exp2: bool,
) -> None:
    layout = spec.layout
    block = pl.program_id(0)
    if spec.right is not None:
        # The last queries see the most keys: started first, they do not end last.
        block = pl.num_programs(0) - 1 - block
    i0 = block * block_q
    query = (i0 + jnp.arange(block_q))[:, None]  # [block_q, 1]
    gain = _load_gain(gain_ref)

    out = load_tile(layout, out_ref, None, i0, block_q, spec.T, spec.V)  # [block_q, V]
    do = load_tile(layout, do_ref, None, i0, block_q, spec.T, spec.V)  # [block_q, V]
    lse = load_tile(layout, lse_ref, None, i0, block_q, spec.T)  # [block_q]
    delta = jnp.sum(out.astype(jnp.float32) * do.astype(jnp.float32), axis=1)
    if dlse_ref is not None:
        delta = delta - load_tile(layout, dlse_ref, None, i0, block_q, spec.T)
    if gain is not None:
        delta = delta * gain
    # A query that sees nothing has lse -inf; with +inf in its place every weight of it is 0.
    log2_norm = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E - _shift(spec))
    store_tile(ROWS_LAYOUT, log2_norm_ref, None, i0, log2_norm, spec.T)
    store_tile(ROWS_LAYOUT, delta_ref, None, i0, delta, spec.T)

    q = load_tile(layout, q_ref, None, i0, block_q, spec.T, spec.D)  # [block_q, D]

    def step(
        masked: bool, n: Any, sums: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        dq, total = sums  # [block_q, D], [block_q]
        j0 = n * block_k
        k = load_tile(layout, k_ref, None, j0, block_k, spec.S, spec.D, not masked)  # [block_k, D]
        v = load_tile(layout, v_ref, None, j0, block_k, spec.S, spec.V, not masked)  # [block_k, V]
        hidden = None
        if masked:
            key = (j0 + jnp.arange(block_k))[None, :]  # [1, block_k]
            hidden = ~visible(spec, offset, query, key)
        products = dot(spec, q, k, trans_b=True)  # [block_q, block_k]
        p, slope = _weights(spec, products, log2_norm[:, None], hidden, fast_exp2)
        if correction_ref is not None:
            total = total + jnp.sum(p, axis=1)
        dp = dot(spec, do, v, trans_b=True)  # [block_q, block_k]
        ds = _score_gradient(spec, p, dp, delta[:, None], slope, gain)
        return dq + dot(spec, ds, k), total

    ranges = block_ranges(key_bounds(spec, offset), i0, block_q, spec.S, block_k)
    start = (
        jnp.zeros((block_q, padded(spec.D)), jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
    )
    dq, total = for_blocks(ranges, step, start)
    if correction_ref is not None:
        correction = 1 / jnp.where(total == 0, 1.0, total)
        store_tile(ROWS_LAYOUT, correction_ref, None, i0, correction, spec.T)
        dq = dq * correction[:, None]
    store_tile(layout, dq_ref, None, i0, _without_gain(spec, dq, gain), spec.T, spec.D)


def _dkv_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    do_ref: Any,
    log2_norm_ref: Any,
    delta_ref: Any,
    correction_ref: Any | None,
    gain_ref: Any | None,
    dk_ref: Any,
    dv_ref: Any,
    *,
    spec: AttentionSpec,
    offset: int,
    block_q: int,
    block_k: int,
    fast_exp2: bool,
) -> None:
    """Tiles of pairs stand transposed, [block_k, block_q], ready for the sums over queries."""
    layout = spec.layout
    j0 = pl.program_id(0) * block_k
    key = (j0 + jnp.arange(block_k))[:, None]  # [block_k, 1]
    gain = _load_gain(gain_ref)
    k = load_tile(layout, k_ref, None, j0, block_k, spec.S, spec.D)  # [block_k, D]
    v = load_tile(layout, v_ref, None, j0, block_k, spec.S, spec.V)  # [block_k, V]
    ranges = block_ranges(query_bounds(spec, offset), j0, block_k, spec.T, block_q)

    def head(h: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def step(
            masked: bool, n: Any, sums: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            dk, dv = sums  # [block_k, D], [block_k, V]
            i0 = n * block_q
            all_exist = not masked

            def row(ref: Any) -> jax.Array:
                values = load_tile(ROWS_LAYOUT, ref, h, i0, block_q, spec.T, whole=all_exist)
                return values[None, :]  # [1, block_q]

            q = load_tile(layout, q_ref, h, i0, block_q, spec.T, spec.D, all_exist)  # [block_q, D]
            hidden = None
            if masked:
                query = (i0 + jnp.arange(block_q))[None, :]  # [1, block_q]
                hidden = ~(visible(spec, offset, query, key) & (query < spec.T))
            products = dot(spec, k, q, trans_b=True)  # [block_k, block_q]
            p, slope = _weights(spec, products, row(log2_norm_ref), hidden, fast_exp2)
            if correction_ref is not None:
                p = p * row(correction_ref)
            do = load_tile(
                layout, do_ref, h, i0, block_q, spec.T, spec.V, all_exist
            )  # [block_q, V]
            dv = dv + dot(spec, p.astype(do.dtype), do)
            dp = dot(spec, v, do, trans_b=True)  # [block_k, block_q]
            ds = _score_gradient(spec, p, dp, row(delta_ref), slope, gain)
            return dk + dot(spec, ds, q), dv

        return for_blocks(ranges, step, sums)

    sums = (
        jnp.zeros((block_k, padded(spec.D)), jnp.float32),
        jnp.zeros((block_k, padded(spec.V)), jnp.float32),
    )
    share = spec.H // spec.G
    dk, dv = head(None, sums) if share == 1 else lax.fori_loop(0, share, head, sums)
    store_tile(layout, dk_ref, None, j0, _without_gain(spec, dk, gain), spec.S, spec.D)
    store_tile(layout, dv_ref, None, j0, dv * 2.0 ** -_shift(spec), spec.S, spec.V)


def backward(spec: AttentionSpec, config: Any, residuals: Residuals, cotangents: Outputs) -> Inputs:
    assert spec.offset is not None
    inputs, outputs = residuals
    layout = spec.layout
    share = spec.H // spec.G
    gain = _gradient_gain(spec, inputs, cotangents)
    dlse = cotangents.lse if spec.return_lse else None
    rows = jax.ShapeDtypeStruct((spec.B, spec.H, spec.T), jnp.float32)

    block_q, block_k = fitted(config.dq_block_q, spec.T), fitted(config.dq_block_k, spec.S)
    query_rows = sequence_spec(layout, spec.T, None, block_q)
    rows_spec = sequence_spec(ROWS_LAYOUT, spec.T, None, block_q)
    correction_spec, correction_rows = (rows_spec, rows) if _renormalises(spec) else (None, None)
    dq, log2_norm, delta, correction = pl.pallas_call(
        functools.partial(
            _dq_kernel,
            spec=spec,
            offset=spec.offset,
            block_q=block_q,
            block_k=block_k,
            fast_exp2=config.fast_exp2,
        ),
        grid=(pl.cdiv(spec.T, block_q), spec.H, spec.B),
        in_specs=[
            sequence_spec(layout, spec.T, spec.D, block_q),
            sequence_spec(layout, spec.S, spec.D, block_k, share=share),
            sequence_spec(layout, spec.S, spec.V, block_k, share=share),
            sequence_spec(layout, spec.T, spec.V, block_q),
            query_rows,
            sequence_spec(layout, spec.T, spec.V, block_q),
            None if dlse is None else query_rows,
            None if gain is None else pl.BlockSpec((1, 1), lambda n, h, b: (b, quotient(h, share))),
        ],
        out_specs=[
            sequence_spec(layout, spec.T, spec.D, block_q),
            rows_spec,
            rows_spec,
            correction_spec,
        ],
        out_shape=[
            jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype),
            rows,
            rows,
            correction_rows,
        ],
        compiler_params=plgpu.CompilerParams(
            num_warps=config.dq_num_warps, num_stages=config.dq_num_stages
        ),
        interpret=device.interpreting(),
        name="attention_backward_dq",
    )(inputs.q, inputs.k, inputs.v, outputs.out, outputs.lse, cotangents.out, dlse, gain)

    block_q, block_k = fitted(config.dkv_block_q, spec.T), fitted(config.dkv_block_k, spec.S)
    rows_spec = sequence_spec(ROWS_LAYOUT, spec.T, None, block_q, group=share)
    keys = sequence_spec(layout, spec.S, spec.D, block_k)
    values = sequence_spec(layout, spec.S, spec.V, block_k)
    dk, dv = pl.pallas_call(
        functools.partial(
            _dkv_kernel,
            spec=spec,
            offset=spec.offset,
            block_q=block_q,
            block_k=block_k,
            fast_exp2=config.fast_exp2,
        ),
        grid=(pl.cdiv(spec.S, block_k), spec.G, spec.B),
        in_specs=[
            sequence_spec(layout, spec.T, spec.D, block_q, group=share),
            keys,
            values,
            sequence_spec(layout, spec.T, spec.V, block_q, group=share),
            rows_spec,
            rows_spec,
            None if correction is None else rows_spec,
            None if gain is None else pl.BlockSpec((1, 1), lambda n, g, b: (b, g)),
        ],
        out_specs=[keys, values],
        out_shape=[
            jax.ShapeDtypeStruct(inputs.k.shape, inputs.k.dtype),
            jax.ShapeDtypeStruct(inputs.v.shape, inputs.v.dtype),
        ],
        compiler_params=plgpu.CompilerParams(
            num_warps=config.dkv_num_warps, num_stages=config.dkv_num_stages
        ),
        interpret=device.interpreting(),
        name="attention_backward_dkv",
    )(inputs.q, inputs.k, inputs.v, cotangents.out, log2_norm, delta, correction, gain)
    return Inputs(q=dq, k=dk, v=dv)
