"""Softmax attention in tiles whose score matrix lies in memory: the rung between plain JAX and the
flash kernels, so that the ladder has three implementations that run.

    s = q k^T / sqrt(D)     [B, H, T, S], float32, written tile by tile
    p = softmax(s)          in place, a row at a time
    out = p v               a block of queries goes over the tiles of its rows

Each product and the softmax is a kernel of its own, tuned no further: what is compared is that the
scores go through memory. T and S are powers of two, from 16 on.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu

BLOCK = 64
# 128 threads hold a row of this many scores, 64 each.
LONGEST_ROW = 8192


def _product(a: jax.Array, b: jax.Array, **transposed: bool) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, precision=precision, **transposed)


def _scores(q: jax.Array, k: jax.Array, rows: int, keys: int) -> jax.Array:
    B, T, H, D = q.shape
    S = k.shape[1]

    def kernel(q_ref: Any, k_ref: Any, s_ref: Any) -> None:
        q_tile = plgpu.load(q_ref)  # [T_block, D]
        k_tile = plgpu.load(k_ref)  # [S_block, D]
        s = _product(q_tile, k_tile, trans_b=True)  # [T_block, S_block]
        plgpu.store(s_ref, D**-0.5 * s)

    return pallas_call(
        kernel,
        grid=(S // keys, T // rows, B * H),
        in_specs=[
            pl.BlockSpec((None, rows, None, D), lambda s, t, bh: (bh // H, t, bh % H, 0)),
            pl.BlockSpec((None, keys, None, D), lambda s, t, bh: (bh // H, s, bh % H, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, rows, keys), lambda s, t, bh: (bh // H, bh % H, t, s)),
        out_shape=jax.ShapeDtypeStruct((B, H, T, S), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        name="tiled_scores",
    )(q, k)


def _softmax(s: jax.Array) -> jax.Array:
    B, H, T, S = s.shape

    def kernel(s_ref: Any, p_ref: Any) -> None:
        row = plgpu.load(s_ref)  # [S]
        weights = jnp.exp(row - jnp.max(row))
        plgpu.store(p_ref, weights / jnp.sum(weights))

    block = pl.BlockSpec((None, None, None, S), lambda t, bh: (bh // H, bh % H, t, 0))
    return pallas_call(
        kernel,
        grid=(T, B * H),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(s.shape, s.dtype),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        name="tiled_softmax",
    )(s)


def _averages(p: jax.Array, v: jax.Array, rows: int, keys: int) -> jax.Array:
    B, H, T, S = p.shape
    D = v.shape[-1]

    def kernel(p_ref: Any, v_ref: Any, out_ref: Any) -> None:
        def add(tile: Any, sums: jax.Array) -> jax.Array:
            where = pl.ds(tile * keys, keys)
            p_tile = plgpu.load(p_ref.at[:, where]).astype(v.dtype)  # [T_block, S_block]
            v_tile = plgpu.load(v_ref.at[where, :])  # [S_block, D]
            return sums + _product(p_tile, v_tile)

        sums = jax.lax.fori_loop(0, S // keys, add, jnp.zeros((rows, D), jnp.float32))
        plgpu.store(out_ref, sums.astype(v.dtype))

    return pallas_call(
        kernel,
        grid=(T // rows, B * H),
        in_specs=[
            pl.BlockSpec((None, None, rows, S), lambda t, bh: (bh // H, bh % H, t, 0)),
            pl.BlockSpec((None, S, None, D), lambda t, bh: (bh // H, 0, bh % H, 0)),
        ],
        out_specs=pl.BlockSpec((None, rows, None, D), lambda t, bh: (bh // H, t, bh % H, 0)),
        out_shape=jax.ShapeDtypeStruct((B, T, H, D), v.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        name="tiled_averages",
    )(p, v)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Of q, k, v [B, T, H, D]."""
    T, S = q.shape[1], k.shape[1]
    if max(T, S) > LONGEST_ROW or T & (T - 1) or S & (S - 1):
        raise ValueError(f"T and S must be powers of two up to {LONGEST_ROW}, got {T} and {S}")
    rows, keys = min(BLOCK, T), min(BLOCK, S)
    return _averages(_softmax(_scores(q, k, rows, keys)), v, rows, keys)
