"""FAVOR+ where every query sees every key: both passes without arrays of features.

`projected.py` and the backend (`__init__.py`) call it. Each kernel computes the features from rows
x of q or k in bfloat16, and pulls the gradients of features back to gradients of x; the mathematics
of both is in `random_features.py`.

    phi(x) = exp2(w x - offset(x)),   d_x = w^T d_a / log2(e) - x sum_m d_a_m / sqrt(D)

Forward, `projected_sums.py` computes S and z of a few pieces, XLA adds them up, and
`float32_walk.py` multiplies the queries by S. Backward, with g the cotangent of out,

    G_i   = S g_i,  den_i = phi(q_i) . z,  inverse_i = 1 / max(den_i, eps)
    e_i   = phi(q_i) . G_i / den_i,  0 where den_i <= eps
    d_a_i = phi(q_i) (G_i - e_i z) inverse_i                    of dq_i
    R = sum_i phi(q_i) inverse_i g_i^T,  u = -sum_i e_i inverse_i phi(q_i)
    dv_j  = R^T phi(k_j)
    d_a_j = phi(k_j) (R v_j + u)                                of dk_j

dq is a walk of queries over S, R and u are sums of a second pass over the queries, and dk and dv
are a walk of keys and values over R. Without a normaliser inverse is 1 and e is 0, and S and R
contain the scale.

WGMMA multiplies x, g and v as they are; w, S and R, and the features that these are sums of, in two
bfloat16 parts, 16 bits of each number. The pull-back is a difference, in which their rounding to
bfloat16 weighs: simulated in float64, with 4096 rows of scale 2.5 and D = 64 the worst row of dk is
0.22 off where S is a sum of rounded features. d_a may be rounded, since the difference is of what
is rounded, and so may the features that multiply S in out and R in dv: the worst row is 4.7e-3 off,
where rounding the outputs alone is 2.3e-3.

Features are padded up to a tile's. S, z, R and u are 0 there, and with them d_a.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_ROWS
from ato_jax.ops.linear_attention import random_features
from ato_jax.ops.linear_attention.mosaic_gpu import bidirectional, frame
from ato_jax.ops.linear_attention.mosaic_gpu.float32_query_gradient import (
    d_phi_of,
    in_halves,
    normaliser_of,
    query_gradient,
)
from ato_jax.ops.linear_attention.mosaic_gpu.float32_walk import Chunk, float32_walk
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, Config
from ato_jax.ops.linear_attention.mosaic_gpu.projected_sums import projected_sums
from ato_jax.ops.linear_attention.random_features import LOG2_E
from ato_jax.ops.linear_attention.scans.totals import least_usual
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState, Outputs

PARTS = 2
# Features are mapped at once, and what is made of them by halves: whole tiles of them would spill.
FIRSTS = range(0, frame.F, HALF)


def least_of(spec: LinearAttentionSpec) -> float:
    """The least normaliser by which is divided."""
    return max(spec.eps, least_usual(spec))


def _in_parts(x: jax.Array, axis: int) -> jax.Array:
    """float32 as two bfloat16 parts along a new axis."""
    rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return jnp.stack([rounded, x - rounded], axis=axis).astype(jnp.bfloat16)


def _up_to_a_tile(x: jax.Array, axis: int) -> jax.Array:
    """With zeros behind its features."""
    beyond = [(0, 0)] * x.ndim
    beyond[axis] = 0, frame.F - x.shape[axis]
    return jnp.pad(x, beyond)


def parts_of_projection(B: int, projection: jax.Array) -> jax.Array:
    """[B, PARTS, frame.F, D] bfloat16: w in powers of 2, for each batch entry."""
    w = jnp.stack(random_features.in_two_parts(projection))
    return jnp.broadcast_to(_up_to_a_tile(w, 1), (B, PARTS, frame.F, w.shape[-1]))


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs, w: jax.Array) -> Outputs:
    """`inputs` and `w` as in `backward`."""
    of_keys = bidirectional.deal(spec, config, spec.G, spec.S)
    arrays = w, inputs.k, inputs.v
    pieces = projected_sums(
        spec, of_keys, "random_features_sums", *arrays, lengths=inputs.kv_lengths
    )
    state = LinearState(*(jnp.sum(of_pieces, axis=2)[:, :, : spec.F] for of_pieces in pieces))
    if inputs.initial_state is not None:
        state = jax.tree.map(jnp.add, state, inputs.initial_state)
    S, z = (_up_to_a_tile(x, 2) for x in state)

    def write(chunk: Chunk) -> None:
        chunk.wait(0)
        phi, _ = _features(spec, chunk, 0, meanwhile=chunk.free_the_last)
        factor = [mosaic.rounded(_half(phi, first)) for first in FIRSTS]
        (out,) = mosaic.multiply((mosaic.zeros(C, spec.V), _products(factor, chunk.state)))
        if spec.normalize:
            den = sum(
                jnp.sum(half.astype(F32) * chunk.vector(0, first), axis=1)
                for half, first in zip(factor, FIRSTS, strict=True)
            )
            out = out * mosaic.in_columns(1.0 / jnp.maximum(den, spec.eps), spec.V)
        for first in range(0, spec.V, HALF):
            chunk.store(0, first, mosaic.rounded(_half(out, first)))
        chunk.leave(0, 0)

    shape = frame.shape_of_values(spec, spec.H)
    (out,) = float32_walk(
        spec,
        bidirectional.deal(spec, config, spec.H, spec.T),
        "random_features_output",
        [inputs.q],
        (S * spec.scale).astype(jnp.bfloat16)[:, :, None],
        [z],
        [jax.ShapeDtypeStruct(shape, inputs.v.dtype)],
        write,
        kept=[0],
        lengths=inputs.q_lengths,
        common=w,
    )
    return Outputs(out, state)


def backward(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    w: jax.Array,
    state: LinearState,
    cotangents: Outputs,
) -> tuple[Inputs, LinearState]:
    """The gradients of the arrays, and R and u.

    Args:
      inputs: padding is 0 in them, as in g.
      w: what `parts_of_projection` returns.
      state: S and z.
    """
    padded_state = LinearState(*(_up_to_a_tile(x, 2) for x in state))
    dq, *of_rows = _query_gradient(spec, config, inputs, w, padded_state, cotangents.out)
    of_queries = bidirectional.deal(spec, config, spec.H, spec.T)
    arrays = w, inputs.q, cotangents.out, of_rows, inputs.q_lengths
    r, u = projected_sums(spec, of_queries, "random_features_query_sums", *arrays)
    # Over the pieces and over the query heads of each kv head.
    r = jnp.sum(r.reshape(spec.B, spec.G, -1, frame.F, spec.V), axis=2) * spec.scale
    u = jnp.sum(u.reshape(spec.B, spec.G, -1, frame.F), axis=2)
    sums = LinearState(r[:, :, : spec.F], u[:, :, : spec.F])
    if spec.return_state:
        sums = jax.tree.map(jnp.add, sums, cotangents.state)
    padded_sums = LinearState(*(_up_to_a_tile(x, 2) for x in sums))
    dk, dv = _key_gradient(spec, config, inputs, w, padded_sums)
    return Inputs(dq, dk, dv, initial_state=sums if spec.initial_state else None), sums


def _times(spec: LinearAttentionSpec, tile: Any, parts: Any, **options: Any) -> jax.Array:
    """Rows of a tile in shared memory times the transpose of a factor [F, columns] in parts."""
    products = [(tile, part.T) for part in reversed(parts)]
    (found,) = mosaic.multiply((mosaic.zeros(C, frame.F), products), **options)
    return found


def _half(x: jax.Array, first: int) -> jax.Array:
    return x[:, first : first + HALF]


def _products(halves: Sequence[jax.Array], parts: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The pairs of factors whose products make up [C, F] times [F, columns], the first one given in
    halves and the second in parts; the smallest products come first."""
    own = [(half, pl.ds(first, HALF)) for half, first in zip(halves, FIRSTS, strict=True)]
    return [(half, part.at[rows]) for part in reversed(parts) for half, rows in own]


def _features(
    spec: LinearAttentionSpec, chunk: Chunk, number: int, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """phi(x) [C, F] of a tile, 0 in rows that do not count, and the offset of each row."""
    exponents = _times(spec, chunk.tiles[number], chunk.common, **options)
    xs = (chunk.read(number, first) for first in range(0, spec.D, HALF))
    offset = random_features.offset_of(spec, xs)
    phi = jnp.exp2(exponents - mosaic.in_columns(offset, frame.F))
    return mosaic.kept(phi, chunk.count), offset


def _store_pulled_back(spec: LinearAttentionSpec, chunk: Chunk, d_a: Sequence[jax.Array]) -> None:
    """d_x takes the place of x. d_a, in halves, is in bfloat16."""
    total = sum(jnp.sum(half.astype(F32), axis=1) for half in d_a) * spec.D**-0.5
    products = _products(d_a, chunk.common)
    (product,) = mosaic.multiply((mosaic.zeros(C, spec.D), products))
    for first in range(0, spec.D, HALF):
        d_x = _half(product, first) * (1 / LOG2_E)
        d_x = d_x - chunk.read(1, first).astype(F32) * mosaic.in_columns(total, HALF)
        chunk.store(1, first, mosaic.rounded(d_x))


def _query_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    w: jax.Array,
    state: LinearState,
    g: jax.Array,
) -> Any:
    """dq; log2 of inverse less the offset, and e, [B, H, T up to a whole chunk] float32."""
    least = least_of(spec)

    def write(chunk: Chunk) -> None:
        chunk.wait(0)
        G = in_halves(_times(spec, chunk.tiles[0], chunk.state, meanwhile=chunk.free_the_last))
        chunk.let_go(0)
        chunk.wait(1)
        features, offset = _features(spec, chunk, 1)
        phi, normaliser = in_halves(features), None
        shift, e = -offset, plgpu.layout_cast(jnp.zeros((C,), F32), OF_ROWS)
        if spec.normalize:
            normaliser = normaliser_of(chunk, phi, G, least)
            e, shift = normaliser.e, shift + jnp.log(normaliser.inverse) * LOG2_E
        chunk.leave_rows([shift, e], 1)
        d_phi = {first: d_phi_of(chunk, G, first, normaliser) for first in FIRSTS}
        d_a = [mosaic.rounded(phi[first] * d_phi[first]) for first in FIRSTS]
        _store_pulled_back(spec, chunk, d_a)
        chunk.leave(1, 0)

    return query_gradient(
        spec,
        config,
        "random_features_query_gradient",
        inputs,
        g,
        (_in_parts(state.kv * spec.scale, 2), state.k_sum),
        write,
        leaves_numbers=True,
        common=w,
    )


def _key_gradient(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, w: jax.Array, sums: LinearState
) -> Any:
    """dk and dv, which take the place of k, one after the other."""

    def write(chunk: Chunk) -> None:
        chunk.wait(0)
        d_phi = _times(spec, chunk.tiles[0], chunk.state, meanwhile=chunk.free_the_last)
        chunk.let_go(0)
        chunk.wait(1)
        phi, _ = _features(spec, chunk, 1)
        factor, d_a = [], []
        for first in FIRSTS:
            d_log = _half(phi, first) * (_half(d_phi, first) + chunk.vector(0, first))
            d_a.append(mosaic.rounded(d_log))
            factor.append(mosaic.rounded(_half(phi, first)))
        _store_pulled_back(spec, chunk, d_a)
        chunk.leave(1, 0)
        products = _products(factor, chunk.state)
        (dv,) = mosaic.multiply((mosaic.zeros(C, spec.V), products))
        chunk.await_reads()
        for first in range(0, spec.V, HALF):
            chunk.store(1, first, mosaic.rounded(_half(dv, first)))
        chunk.leave(1, 1)

    arrays = inputs.k, inputs.v
    return float32_walk(
        spec,
        bidirectional.deal(spec, config, spec.G, spec.S),
        "random_features_key_gradient",
        [inputs.v, inputs.k],
        _in_parts(sums.kv, 2),
        [sums.k_sum],
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        write,
        kept=[1],
        lengths=inputs.kv_lengths,
        common=w,
    )
