"""Both passes of calls in which every query sees every key, without a decay: `forward`, `backward`.

The backend (`__init__.py`) calls them. All queries read the same state. So each pass is two
kernels, and each of them reads its arrays once:

    whole_sums.py             the sums S, z over the keys of a few pieces, which `scans/totals.py`
                              adds up; `float8_sums.py` for keys and values in 8 bits
    whole_output.py           out from S, z
    whole_query_gradient.py   dq from S, z, and the sums R, u over the queries of a few pieces
    whole_key_gradient.py     dk and dv from R, u

Heads of more than 128 columns have `wide_query_gradient.py` and `wide_key_gradient.py` instead, and
R, u from a further launch of `whole_sums.py`. Read `whole_sums.py` next.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.ops.linear_attention.eight_bits import Float8Inputs
from ato_jax.ops.linear_attention.mosaic_gpu import frame, whole_units
from ato_jax.ops.linear_attention.mosaic_gpu.float8_sums import chunks_of_group, float8_sums
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config
from ato_jax.ops.linear_attention.mosaic_gpu.whole_key_gradient import whole_key_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.whole_output import whole_output
from ato_jax.ops.linear_attention.mosaic_gpu.whole_query_gradient import whole_query_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.whole_sums import blocks_of_state, whole_sums
from ato_jax.ops.linear_attention.mosaic_gpu.wide_key_gradient import wide_key_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.wide_query_gradient import wide_query_gradient
from ato_jax.ops.linear_attention.scans.totals import Totals, add_up
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
)

# The time of an item before its first chunk, in units of the time of one chunk.
ITEM = 2.0


def deal(spec: LinearAttentionSpec, config: Config, heads: int, length: int) -> mosaic.Deal:
    """The schedule with the fewest pieces for which the last round of blocks is nearly full."""
    chunks = pl.cdiv(length, frame.C)

    def cost(pieces: int) -> float:
        rounds = pl.cdiv(spec.B * heads * pieces, config.blocks)
        return rounds * (pl.cdiv(chunks, pieces) + ITEM)

    wanted = config.pieces or min(range(1, min(chunks, config.blocks) + 1), key=cost)
    each = pl.cdiv(chunks, wanted)
    pieces = pl.cdiv(chunks, each)
    return mosaic.Deal(spec.B, heads, length, each * frame.C, pieces, config.blocks)


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    parts = blocks_of_state(spec)
    of_queries = deal(spec, config, spec.H * parts, spec.T)
    of_keys = deal(spec, config, spec.G * parts, spec.S)
    k, v, lengths = inputs.k, inputs.v, inputs.kv_lengths
    pieces = whole_sums(spec, of_keys, "whole_sums", k, v, lengths=lengths)
    sums = add_up(spec, pieces, inputs.initial_state, returned=True)
    assert sums.kv is not None
    state = LinearState(sums.kv, sums.k_sum)
    read, z, units = sums.read, sums.rows, None
    if _in_float16(spec):
        read, units = _in_units(spec, state)
        z = sums.k_sum
    out = whole_output(spec, of_queries, inputs.q, read, z, inputs.q_lengths, units=units)
    return Outputs(out, state)


def forward_of_float8(spec: LinearAttentionSpec, config: Config, inputs: Float8Inputs) -> Outputs:
    of_queries = deal(spec, config, spec.H, spec.T)
    at_once = chunks_of_group(spec)
    of_groups = deal(spec, config, spec.G, pl.cdiv(spec.S, at_once))
    of_keys = dataclasses.replace(of_groups, length=spec.S, rows=at_once * of_groups.rows)
    arrays = inputs.k, inputs.v, inputs.k_scale, inputs.v_scale
    pieces = float8_sums(spec, of_keys, arrays, inputs.kv_lengths)
    sums = add_up(spec, pieces, inputs.initial_state, returned=True)
    assert sums.kv is not None
    of_output = inputs.q, sums.read, sums.rows, inputs.q_lengths, inputs.q_scale
    out = whole_output(spec, of_queries, *of_output)
    return Outputs(out, LinearState(sums.kv, sums.k_sum))


def backward(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    state: LinearState,
    cotangents: Outputs,
) -> Inputs:
    """The gradients. `state` is the sum over all keys, from the forward pass."""
    of_queries, of_keys = deal(spec, config, spec.H, spec.T), deal(spec, config, spec.G, spec.S)
    # S, z and thus phi' are scaled by a unit, and R and u have it, too. Where all rows are equal,
    # all roundings of phi' are equal and would add up. In units of 1 / sum z equal features are
    # not rounded at all.
    units: jax.Array | None = None
    if _in_float16(spec):
        read, units = _in_units(spec, state)
        least = max(spec.eps, whole_units.LEAST_SUM)
        s = Totals(read, state.k_sum, read, jnp.full((spec.B, spec.G, frame.C), least, jnp.float32))
    else:
        whole = state.kv[:, :, None], state.k_sum[:, :, None]
        s = add_up(spec, whole, unit_of=state.k_sum, returned=False)
    arrays = inputs.q, cotangents.out, s.read, s.k_sum
    if frame.is_wide(spec):
        of_dq = *arrays, s.least[:, :, 0], units, inputs.q_lengths
        dq, *of_rows = wide_query_gradient(spec, of_queries, *of_dq)
        of_sums = deal(spec, config, spec.H * blocks_of_state(spec), spec.T)
        z = s.k_sum if _in_float16(spec) and spec.normalize else None
        of_queries_sums = inputs.q, cotangents.out, of_rows, inputs.q_lengths
        r, u = whole_sums(spec, of_sums, "whole_query_sums", *of_queries_sums, z)
        if not spec.normalize:
            u = jnp.zeros_like(u)
    else:
        dq, r, u = whole_query_gradient(spec, of_queries, *arrays, s.least, inputs.q_lengths, units)
    # `add_up` sums over the pieces and over the query heads of each head of keys.
    pieces = (
        r.reshape(spec.B, spec.G, -1, spec.D, spec.V),
        u.reshape(spec.B, spec.G, -1, spec.D),
    )
    added = cotangents.state if spec.return_state else None
    if _in_float16(spec):
        dk, dv, sums = _key_gradient_in_float16(spec, of_keys, inputs, state, pieces, added)
    else:
        sums = add_up(spec, pieces, added, state.k_sum, returned=spec.initial_state)
        read_sums = whole_units.SumsOfQueries(sums.read, sums.k_sum)
        dk, dv = _key_gradient(spec, of_keys, inputs, read_sums)
    d_state = None
    if spec.initial_state:
        assert sums.kv is not None
        d_state = LinearState(sums.kv, sums.k_sum)
    return Inputs(dq, dk, dv, initial_state=d_state)


def _in_float16(spec: LinearAttentionSpec) -> bool:
    return mosaic.has_units(frame.tiling(spec).dtype)


def _in_units(spec: LinearAttentionSpec, state: LinearState) -> tuple[jax.Array, jax.Array | None]:
    """The means of the values; or, without a normaliser, kv in units, and the units [B, G] times
    the scale."""
    if spec.normalize:
        return whole_units.means(state), None
    read, units = whole_units.in_units(state.kv)
    return read, units * spec.scale


def _key_gradient_in_float16(
    spec: LinearAttentionSpec,
    of_keys: mosaic.Deal,
    inputs: Inputs,
    state: LinearState,
    pieces: tuple[jax.Array, jax.Array],
    added: LinearState | None,
) -> tuple[jax.Array, jax.Array, Totals]:
    """dk and dv, and the sums over the pieces. With a normaliser these are sums of shares, z times
    R and u, so `added` is multiplied by z, too."""
    z = state.k_sum
    inverse = whole_units.inverse_sums(z) if spec.normalize else None
    unit_of = None if spec.normalize else z
    if spec.normalize and added is not None:
        added = LinearState(added.kv * z[..., None], added.k_sum * z)
    sums = add_up(spec, pieces, added, unit_of, returned=True)
    assert sums.kv is not None
    r, units = whole_units.in_units(sums.kv)
    read = whole_units.SumsOfQueries(r, sums.k_sum, units, inverse)
    return *_key_gradient(spec, of_keys, inputs, read), sums


def _key_gradient(
    spec: LinearAttentionSpec,
    of_keys: mosaic.Deal,
    inputs: Inputs,
    sums: whole_units.SumsOfQueries,
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel for heads of this width, and returns dk and dv."""
    key_gradient = wide_key_gradient if frame.is_wide(spec) else whole_key_gradient
    return key_gradient(spec, of_keys, inputs.k, inputs.v, sums, inputs.kv_lengths)
