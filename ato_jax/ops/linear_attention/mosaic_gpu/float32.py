"""Both passes in float32 where every query sees every key, without a decay, up to 128 columns.

The backend (`__init__.py`) calls `forward` and `backward`. WGMMA multiplies bfloat16 and
accumulates in float32. So each operand is split into bfloat16 parts whose sum it is, and a product
is a sum of products of parts: six products of three parts, which hold all 24 bits of a number, if
products are to be exact; three products of two parts, 16 bits, if TF32 was asked for. (WGMMA's own
TF32 cannot read an operand along the other axis, as sums over rows need.)

Forward, `float32_sums.py` computes S and z of a few pieces, XLA adds them up, and `float32_walk.py`
multiplies the queries by S. Backward, with g the cotangent of out,

    G_i   = g_i S^T,  den_i = phi(q_i) . z,  inverse_i = 1 / max(den_i, eps)
    e_i   = phi(q_i) . G_i / den_i,  0 where den_i <= eps
    dq_i  = (G_i - e_i z) inverse_i phi'(q_i)
    R = sum_i phi(q_i) inverse_i g_i^T,  u = -sum_i e_i inverse_i phi(q_i)
    dv_j  = R^T phi(k_j)
    dk_j  = (R v_j + u) phi'(k_j)

dq is a walk of queries over S, R and u are sums of a second pass over the queries, and dk and dv
are a walk of keys and values over R. Without a normaliser inverse is 1 and e is 0, and S and R
contain the scale.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF
from ato_jax.ops.linear_attention.mosaic_gpu import bidirectional, feature_maps, frame
from ato_jax.ops.linear_attention.mosaic_gpu.float32_query_gradient import (
    d_phi_of,
    in_halves,
    normaliser_of,
    query_gradient,
)
from ato_jax.ops.linear_attention.mosaic_gpu.float32_sums import float32_sums, parts_of
from ato_jax.ops.linear_attention.mosaic_gpu.float32_walk import Chunk, float32_walk
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
)


def in_parts(spec: LinearAttentionSpec, x: jax.Array) -> jax.Array:
    """A state [B, G, F, V] as [B, G, parts, F, V] bfloat16."""
    parts = []
    for _ in range(parts_of(spec)):
        parts.append(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))
        x = x - parts[-1]
    return jnp.stack(parts, axis=2).astype(jnp.bfloat16)


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    of_queries = bidirectional.deal(spec, config, spec.H, spec.T)
    of_keys = bidirectional.deal(spec, config, spec.G, spec.S)
    pieces = float32_sums(
        spec, of_keys, "float32_sums", inputs.k, inputs.v, lengths=inputs.kv_lengths
    )
    state = LinearState(*(jnp.sum(of_pieces, axis=2) for of_pieces in pieces))
    if inputs.initial_state is not None:
        state = jax.tree.map(jnp.add, state, inputs.initial_state)
    maps = feature_maps.features(spec)

    def write(chunk: Chunk) -> None:
        def features(first: int) -> Any:
            phi = mosaic.kept(maps.unrounded(chunk.read(0, first), first), chunk.count)
            den = None
            if spec.normalize:
                den = jnp.sum(phi * chunk.vector(0, first), axis=1)
            if first + HALF == spec.D:
                chunk.free_the_last()
            return chunk.split(phi), den

        chunk.wait(0)
        out, dens = chunk.times_state(features)
        if spec.normalize:
            inverse = 1.0 / jnp.maximum(sum(dens), spec.eps)
            out = out * mosaic.in_columns(inverse, spec.V)
        for first in range(0, spec.V, HALF):
            chunk.store(0, first, out[:, first : first + HALF])
        chunk.leave(0, 0)

    out_type = jax.ShapeDtypeStruct(frame.shape_of_values(spec, spec.H), F32)
    (out,) = float32_walk(
        spec,
        of_queries,
        "float32_output",
        [inputs.q],
        in_parts(spec, state.kv * spec.scale),
        [state.k_sum] if spec.normalize else [],
        [out_type],
        write,
        kept=[0],
        lengths=inputs.q_lengths,
    )
    return Outputs(out, state)


def backward(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    state: LinearState,
    cotangents: Outputs,
) -> Inputs:
    """The gradients of the inputs. `state` is the one that the forward pass kept."""
    dq, *of_rows = _query_gradient(spec, config, inputs, state, cotangents.out)
    of_queries = bidirectional.deal(spec, config, spec.H, spec.T)
    arrays = inputs.q, cotangents.out, of_rows, inputs.q_lengths
    r, u = float32_sums(spec, of_queries, "float32_query_sums", *arrays)
    # Over the pieces and over the query heads of each kv head.
    r = jnp.sum(r.reshape(spec.B, spec.G, -1, spec.D, spec.V), axis=2) * spec.scale
    u = jnp.sum(u.reshape(spec.B, spec.G, -1, spec.D), axis=2)
    if not spec.normalize:
        u = jnp.zeros_like(u)  # it may be infinite
    sums = LinearState(r, u)
    if spec.return_state:
        sums = jax.tree.map(jnp.add, sums, cotangents.state)
    dk, dv = _key_gradient(spec, config, inputs, sums)
    return Inputs(dq, dk, dv, initial_state=sums if spec.initial_state else None)


def _first_tile(chunk: Chunk, columns: int) -> Any:
    """The rows of a chunk's first tile as a factor. Once they are read, the tile is free, and so is
    what was stored before: under the products of the columns before, if there are any."""

    def factor(first: int) -> Any:
        parts = chunk.split(chunk.read(0, first))
        if first + HALF == columns:
            chunk.let_go(0)
            chunk.free_the_last()
        return parts, None

    return factor


def _query_gradient(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, state: LinearState, g: jax.Array
) -> Any:
    """dq; and where there is a normaliser inverse and e [B, H, T up to a whole chunk], float32."""
    maps = feature_maps.features(spec)

    def write(chunk: Chunk) -> None:
        def features(first: int) -> jax.Array:
            return mosaic.kept(maps.unrounded(chunk.read(1, first), first), chunk.count)

        chunk.wait(0)
        whole, _ = chunk.times_state(_first_tile(chunk, spec.V), turned=True)
        chunk.wait(1)
        G, normaliser = in_halves(whole), None
        if spec.normalize:
            phi = {first: features(first) for first in G}
            normaliser = normaliser_of(chunk, phi, G, spec.eps)
            chunk.leave_rows(normaliser, 1)
        for first in G:
            d_phi = d_phi_of(chunk, G, first, normaliser)
            chunk.store(1, first, d_phi * maps.slope(chunk.read(1, first)))
        chunk.leave(1, 0)

    return query_gradient(
        spec,
        config,
        "float32_query_gradient",
        inputs,
        g,
        (in_parts(spec, state.kv * spec.scale), state.k_sum if spec.normalize else None),
        write,
        leaves_numbers=spec.normalize,
    )


def _key_gradient(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, sums: LinearState
) -> Any:
    """dk and dv, which take the place of k, one after the other."""
    maps = feature_maps.features(spec)

    def write(chunk: Chunk) -> None:
        chunk.wait(0)
        whole, _ = chunk.times_state(_first_tile(chunk, spec.V), turned=True)
        chunk.wait(1)
        phis = {}
        for first in range(0, spec.D, HALF):
            x = chunk.read(1, first)
            dk = whole[:, first : first + HALF] + chunk.vector(0, first)
            phi = maps.unrounded(maps.present(x, first), first)
            phis[first] = chunk.split(mosaic.kept(phi, chunk.count))
            chunk.store(1, first, dk * maps.slope(x))
        chunk.leave(1, 0)
        dv, _ = chunk.times_state(lambda first: (phis[first], None))
        chunk.await_reads()
        for first in range(0, spec.V, HALF):
            chunk.store(1, first, dv[:, first : first + HALF])
        chunk.leave(1, 1)

    like = [jax.ShapeDtypeStruct(array.shape, F32) for array in (inputs.k, inputs.v)]
    return float32_walk(
        spec,
        bidirectional.deal(spec, config, spec.G, spec.S),
        "float32_key_gradient",
        [inputs.v, inputs.k],
        in_parts(spec, sums.kv),
        [sums.k_sum],
        like,
        write,
        kept=[1],
        lengths=inputs.kv_lengths,
    )
