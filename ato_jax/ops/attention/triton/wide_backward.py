"""Wide heads, backward: the weights of all keys recomputed, as in `wide_forward.py`, no atomics.

The scores of all keys are kept or recomputed, so neither out nor lse is read:

    p_ij    = exp(s_ij) / sum_j exp(s_ij)     with the sink's term in the sum
    dp_ij   = do_i . v_j                      with dropout, 0 where it dropped p_ij
    delta_i = sum_j p_ij dp_ij - dlse_i
    ds_ij   = p_ij (dp_ij - delta_i)          times 1 - tanh^2 with a softcap

    dv_j    = sum_i p_ij do_i
    dq_i    = scale * sum_j ds_ij k_j
    dk_j    = scale * sum_i ds_ij q_i

Where one tile has all queries of a head, and no other head reads its keys, one kernel does all: it
goes over the columns of q and k for the scores, unless they were kept, over those of v and do for
dp and dv, and over those of q and k for dq and dk. Where `slices` programs share the columns, a
kernel before it stores the parts of q . k and do . v.

Otherwise the sums for dk and dv need the weights of several programs. One kernel then stores p and
ds, and further kernels multiply these with do, q and k.

Where lse has a cotangent, ds is multiplied in two parts of 16 bits (`may_have_alike_gradients`).
Beyond one kernel it is then stored in float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.attention.spec import (
    AttentionSpec,
    Inputs,
    Outputs,
    Residuals,
    gradient_gain,
    may_have_alike_gradients,
)
from ato_jax.ops.attention.triton.common import (
    ROWS_LAYOUT,
    dot,
    fitted,
    load_tile,
    padded,
    quotient,
    sequence_spec,
    span,
    store_tile,
    whole_spec,
)
from ato_jax.ops.attention.triton.pairs import Options
from ato_jax.ops.attention.triton.weights import (
    gain_spec,
    load_gain,
    shift,
    without_powers,
)
from ato_jax.ops.attention.triton.wide_forward import (
    Config,
    Cut,
    Cuts,
    Matrix,
    Rows,
    Tiles,
    block_and_slice,
    load_parts,
    options_for,
    own_rows,
    parts_of_products,
    parts_spec,
    products,
    tile_of,
)
from ato_jax.ops.attention.triton.wide_scores import (
    dots,
    factors_of,
    found_weights,
    score_gradient,
    transposed_dot,
)


def _load_dlse(spec: AttentionSpec, ref: Any, rows: Rows) -> jax.Array | None:
    if ref is None:
        return None
    return load_tile(spec.layout, ref, None, *rows)[:, None]


class Factors(NamedTuple):
    """The factors of all products: arrays, block specs or refs."""

    q: Any  # [B, T, H, D]
    k: Any  # [B, S, G, D]
    v: Any  # [B, S, G, V]
    do: Any  # [B, T, H, V]


class Gradients(NamedTuple):
    """What the one kernel writes: arrays, shapes, block specs or refs."""

    dq: Any  # [B, T, H, D]
    dk: Any  # [B, S, G, D]
    dv: Any  # [B, S, G, V]
    dsink: Any  # [B, H, T] float32, the gradient of each query's sink; None without sinks


def _kernel(
    factors: Factors,
    dlse_ref: Any | None,
    gain_ref: Any | None,
    scores_ref: Any | None,
    dp_ref: Any | None,
    options: Options,
    gradients: Gradients,
    *,
    spec: AttentionSpec,
    block_q: int,
    cuts: Cuts,
    fast_exp2: bool,
) -> None:
    """All queries and keys of one head."""
    (q_ref, k_ref, v_ref, do_ref), (columns, value_columns) = factors, cuts
    dq_ref, dk_ref, dv_ref, dsink_ref = gradients
    n, h, b = (pl.program_id(axis) for axis in range(3))
    tile = tile_of(spec, options, b, h, 0, block_q)
    queries, keys = own_rows(tile, 0)
    gain = load_gain(gain_ref)

    def matrix(ref: Any, rows: Rows, cut: Cut) -> Matrix:
        return Matrix(spec.layout, ref, None, rows, cut)

    q, k = matrix(q_ref, queries, columns), matrix(k_ref, keys, columns)
    v, do = matrix(v_ref, keys, value_columns), matrix(do_ref, queries, value_columns)
    all_queries, all_keys = queries._replace(length=spec.T), keys._replace(length=spec.S)
    dq, dk = matrix(dq_ref, all_queries, columns), matrix(dk_ref, all_keys, columns)
    dv = matrix(dv_ref, all_keys, value_columns)

    product = products(spec, q, k, n) if scores_ref is None else load_parts(scores_ref, tile)
    found = found_weights(tile, product, fast_exp2)

    def values(start: Any, dp: jax.Array) -> jax.Array:
        cotangent = do.load(start)  # [block_q, block]
        if dp_ref is None:
            dp = dp + dot(spec, cotangent, v.load(start), trans_b=True)
        summed = transposed_dot(spec, found.dropped, cotangent)  # [block_k, block]
        dv.store(start, summed * (2.0 ** -shift(spec) / (1 - spec.dropout_rate)))
        return dp

    dp = jnp.zeros(product.shape, jnp.float32) if dp_ref is None else load_parts(dp_ref, tile)
    dp = value_columns.each(n, values, dp)
    ds, dsink = score_gradient(tile, found, dp, _load_dlse(spec, dlse_ref, queries), gain)
    if dsink_ref is not None:
        # All slices store the same values.
        store_tile(ROWS_LAYOUT, dsink_ref, None, 0, dsink[:, 0], spec.T)
    ds_parts = factors_of(spec, ds)

    def keys_and_queries(start: Any, nothing: Any) -> Any:
        of_keys = dots(spec, ds_parts, k.load(start))  # [block_q, block]
        dq.store(start, without_powers(spec, of_keys, gain, spec.scale))
        of_queries = dots(spec, [part.T for part in ds_parts], q.load(start))  # [block_k, block]
        dk.store(start, without_powers(spec, of_queries, gain, spec.scale))
        return nothing

    columns.each(n, keys_and_queries, np.int32(0))


def _weights_kernel(
    scores_ref: Any,
    dp_ref: Any,
    dlse_ref: Any | None,
    gain_ref: Any | None,
    options: Options,
    p_ref: Any,
    ds_ref: Any,
    dsink_ref: Any | None,
    *,
    spec: AttentionSpec,
    block_q: int,
    fast_exp2: bool,
) -> None:
    block, h, b = (pl.program_id(axis) for axis in range(3))
    start = block * block_q
    tile = tile_of(spec, options, b, h, start, block_q)
    queries, _ = own_rows(tile, start)
    found = found_weights(tile, load_parts(scores_ref, tile), fast_exp2)
    dlse = _load_dlse(spec, dlse_ref, queries)
    ds, dsink = score_gradient(tile, found, load_parts(dp_ref, tile), dlse, load_gain(gain_ref))
    plgpu.store(p_ref.at[tile.place()], found.dropped, mask=tile.mask)
    plgpu.store(ds_ref.at[tile.place()], ds.astype(ds_ref.dtype), mask=tile.mask)
    if dsink_ref is not None:
        store_tile(ROWS_LAYOUT, dsink_ref, None, start, dsink[:, 0], spec.T)


def _load_weights(
    spec: AttentionSpec, ref: Any, head: Any, i0: Any, rows: int, j0: Any, columns: int
) -> jax.Array:
    """A tile of [T, S], 0 past its end: [rows, columns]."""
    i, j = span(i0, rows)[:, None], span(j0, columns)[None, :]
    index = (i, j) if head is None else (head, i, j)
    return plgpu.load(ref.at[index], mask=(i < spec.T) & (j < spec.S), other=0)


def _query_sums_kernel(
    w_ref: Any,
    x_ref: Any,
    gain_ref: Any | None,
    lengths: Options,
    out_ref: Any,
    *,
    spec: AttentionSpec,
    block_q: int,
    cut: Cut,
    scale: float,
) -> None:
    """w . x for the columns of one slice: the sums over keys."""
    n, h, b = (pl.program_id(axis) for axis in range(3))
    block, n = block_and_slice(n, cut.slices)
    start = block * block_q
    tile = tile_of(spec, lengths, b, h, start, block_q)
    queries, keys = own_rows(tile, start)
    x = Matrix(spec.layout, x_ref, None, keys, cut)
    out = Matrix(spec.layout, out_ref, None, queries._replace(length=spec.T), cut)
    w = _load_weights(spec, w_ref, None, start, block_q, 0, keys.size)  # [block_q, block_k]
    factors = factors_of(spec, w)

    def step(start: Any, nothing: Any) -> Any:
        found = dots(spec, factors, x.load(start))  # [block_q, block]
        out.store(start, without_powers(spec, found, load_gain(gain_ref), scale))
        return nothing

    cut.each(n, step, np.int32(0))


def _key_sums_kernel(
    w_ref: Any,
    x_ref: Any,
    gain_ref: Any | None,
    lengths: Options,
    out_ref: Any,
    *,
    spec: AttentionSpec,
    block_q: int,
    block_k: int,
    cut: Cut,
    scale: float,
) -> None:
    """w^T . x for the columns of one slice: the sums over the queries of all heads of a group."""
    n, g, b = (pl.program_id(axis) for axis in range(3))
    block, n = block_and_slice(n, cut.slices)
    j0 = block * block_k
    share, blocks = spec.H // spec.G, pl.cdiv(spec.T, block_q)
    tile = tile_of(spec, lengths, b, g, 0, block_q)
    out = Matrix(spec.layout, out_ref, None, Rows(j0, block_k, spec.S), cut)

    def step(start: Any, nothing: Any) -> Any:
        def add(m: Any, total: jax.Array) -> jax.Array:
            m = jnp.int32(m)
            r = quotient(m, blocks)
            i0 = (m - r * blocks) * block_q
            head = None if share == 1 else r
            queries, _ = own_rows(tile, i0)
            w = _load_weights(spec, w_ref, head, i0, block_q, j0, block_k)  # [block_q, block_k]
            x = Matrix(spec.layout, x_ref, head, queries, cut).load(start)  # [block_q, block]
            return total + dots(spec, [part.T for part in factors_of(spec, w)], x)

        zeros = jnp.zeros((block_k, cut.block), jnp.float32)
        total = lax.fori_loop(np.int32(0), np.int32(share * blocks), add, zeros)
        out.store(start, without_powers(spec, total, load_gain(gain_ref), scale))
        return nothing

    cut.each(n, step, np.int32(0))


def _by_one_kernel(
    spec: AttentionSpec,
    tiles: Tiles,
    fast_exp2: bool,
    options: Options,
    inputs: Inputs,
    cotangents: Outputs,
    gain: jax.Array | None,
    parts: tuple[jax.Array | None, jax.Array | None],
) -> Gradients:
    """All gradients by one kernel."""
    layout, slices = spec.layout, tiles.slices
    block_q, block_k = padded(spec.T), padded(spec.S)
    queries, values = (
        sequence_spec(layout, spec.T, width, block_q) for width in (spec.D, spec.V)
    )
    keys, key_values = (sequence_spec(layout, spec.S, width, block_k) for width in (spec.D, spec.V))
    rows = sequence_spec(layout, spec.T, None, block_q)
    rows_spec = sequence_spec(ROWS_LAYOUT, spec.T, None, block_q)
    per_query = jax.ShapeDtypeStruct((spec.B, spec.H, spec.T), jnp.float32)
    dlse = cotangents.lse if spec.return_lse else None
    [found] = pallas_call(
        functools.partial(
            _kernel,
            spec=spec,
            block_q=block_q,
            cuts=Cuts(Cut.of(spec.D, tiles.block_d, slices), Cut.of(spec.V, tiles.block_v, slices)),
            fast_exp2=fast_exp2,
        ),
        grid=(slices, spec.H, spec.B),
        in_specs=[
            Factors(q=queries, k=keys, v=key_values, do=values),
            None if dlse is None else rows,
            None if gain is None else gain_spec(1, 1),
            *(None if part is None else parts_spec(part.shape[2], spec, block_q) for part in parts),
            jax.tree.map(whole_spec, options),
        ],
        out_specs=[Gradients(queries, keys, key_values, rows_spec if spec.sinks else None)],
        out_shape=[
            Gradients(
                dq=jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype),
                dk=jax.ShapeDtypeStruct(inputs.k.shape, inputs.k.dtype),
                dv=jax.ShapeDtypeStruct(inputs.v.shape, inputs.v.dtype),
                dsink=per_query if spec.sinks else None,
            )
        ],
        compiler_params=tiles.compiler_params,
        name="attention_wide_backward",
    )(Factors(inputs.q, inputs.k, inputs.v, cotangents.out), dlse, gain, *parts, options)
    return found


def _by_several_kernels(
    spec: AttentionSpec,
    tiles: Tiles,
    fast_exp2: bool,
    options: Options,
    inputs: Inputs,
    cotangents: Outputs,
    gain: jax.Array | None,
    parts: tuple[jax.Array, jax.Array],
) -> Gradients:
    """All gradients by way of p and ds in memory, [B, H, T, S]."""
    layout, slices = spec.layout, tiles.slices
    share = spec.H // spec.G
    block_q, block_k = fitted(tiles.block_q, spec.T), padded(spec.S)
    lengths = Options(limits=options.limits)
    dlse = cotangents.lse if spec.return_lse else None
    pairs = spec.B, spec.H, spec.T, spec.S
    in_parts = may_have_alike_gradients(spec)
    sides = (max(spec.T, block_q), block_k)
    pair_spec = pl.BlockSpec((None, None, *sides), lambda n, h, b: (b, h, 0, 0))
    p, ds, dsink = pallas_call(
        functools.partial(_weights_kernel, spec=spec, block_q=block_q, fast_exp2=fast_exp2),
        grid=(pl.cdiv(spec.T, block_q), spec.H, spec.B),
        in_specs=[
            *(parts_spec(part.shape[2], spec, block_q) for part in parts),
            None if dlse is None else sequence_spec(layout, spec.T, None, block_q),
            None if gain is None else gain_spec(share, 1),
            jax.tree.map(whole_spec, options),
        ],
        out_specs=[
            pair_spec,
            pair_spec,
            sequence_spec(ROWS_LAYOUT, spec.T, None, block_q) if spec.sinks else None,
        ],
        out_shape=[
            jax.ShapeDtypeStruct(pairs, inputs.q.dtype),
            jax.ShapeDtypeStruct(pairs, jnp.float32 if in_parts else inputs.q.dtype),
            jax.ShapeDtypeStruct((spec.B, spec.H, spec.T), jnp.float32) if spec.sinks else None,
        ],
        compiler_params=tiles.compiler_params,
        name="attention_wide_weights",
    )(*parts, dlse, gain, options)

    dq = pallas_call(
        functools.partial(
            _query_sums_kernel,
            spec=spec,
            block_q=block_q,
            cut=Cut.of(spec.D, tiles.block_d, slices),
            scale=spec.scale,
        ),
        grid=(pl.cdiv(spec.T, block_q) * slices, spec.H, spec.B),
        in_specs=[
            pair_spec,
            sequence_spec(layout, spec.S, spec.D, block_k, share=share),
            None if gain is None else gain_spec(share, 1),
            jax.tree.map(whole_spec, lengths),
        ],
        out_specs=sequence_spec(layout, spec.T, spec.D, block_q),
        out_shape=jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype),
        compiler_params=tiles.compiler_params,
        name="attention_wide_dq",
    )(ds, inputs.k, gain, lengths)

    own_keys = fitted(tiles.block_q, spec.S)
    heads = share if share > 1 else None

    def key_sums(
        name: str, w: jax.Array, x: jax.Array, like: jax.Array, gain: Any, scale: float
    ) -> jax.Array:
        width = like.shape[-1]
        return pallas_call(
            functools.partial(
                _key_sums_kernel,
                spec=spec,
                block_q=block_q,
                block_k=own_keys,
                cut=Cut.of(width, tiles.block_v, slices),
                scale=scale,
            ),
            grid=(pl.cdiv(spec.S, own_keys) * slices, spec.G, spec.B),
            in_specs=[
                pl.BlockSpec((None, heads, *sides), lambda n, g, b: (b, g, 0, 0)),
                sequence_spec(layout, spec.T, width, block_q, group=share),
                None if gain is None else gain_spec(1, 1),
                jax.tree.map(whole_spec, lengths),
            ],
            out_specs=sequence_spec(layout, spec.S, width, own_keys),
            out_shape=jax.ShapeDtypeStruct(like.shape, like.dtype),
            compiler_params=tiles.compiler_params,
            name=name,
        )(w, x, gain, lengths)

    dk = key_sums("attention_wide_dk", ds, inputs.q, inputs.k, gain, spec.scale)
    dropped_scale = 1 / (1 - spec.dropout_rate)
    dv = key_sums("attention_wide_dv", p, cotangents.out, inputs.v, None, dropped_scale)
    return Gradients(dq, dk, dv, dsink)


# The largest tile of p, which is held beside ds during the blocks of dv, dq and dk.
LARGEST_TILE_BYTES = 32 * 1024


def _fits(spec: AttentionSpec) -> bool:
    item = jnp.dtype(spec.dtype).itemsize
    return padded(spec.T) * padded(spec.S) * item <= LARGEST_TILE_BYTES


def kept_products(outputs: Outputs) -> jax.Array | None:
    """The products that `wide_forward.forward_for_own_backward` kept: others leave int8 or None."""
    rest = outputs.rest
    return rest if rest is not None and rest.dtype == jnp.float32 else None


def backward(
    spec: AttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs = residuals.inputs
    tiles = config.backward_tiles
    gain = gradient_gain(spec, inputs, cotangents)
    one_tile = spec.H == spec.G and spec.T <= tiles.block_q and _fits(spec)
    options = options_for(spec, inputs, fitted(tiles.block_q, spec.T))
    kept = kept_products(residuals.outputs)
    parts: Any = (kept, None)
    if tiles.slices > 1 or not one_tile:
        of_values = (cotangents.out, inputs.v)
        if kept is None:
            parts = parts_of_products(spec, tiles, options, (inputs.q, inputs.k), of_values)
        else:
            parts = (kept, *parts_of_products(spec, tiles, options, of_values))
    gradients = _by_one_kernel if one_tile else _by_several_kernels
    dq, dk, dv, dsink = gradients(
        spec, tiles, config.fast_exp2, options, inputs, cotangents, gain, parts
    )
    dsinks = None if dsink is None else jnp.sum(dsink, axis=(0, 2))
    return Inputs(q=dq, k=dk, v=dv, sinks=dsinks)
