"""The backward pass: delta, and then the kernel of `gradient.py`, for dq and for dk and dv.

    norm_i  = log2(e) lse_i            plus infinity for a query that sees nothing
    delta_i = out_i . dout_i - dlse_i
    dsink_h = -sum_i exp(sink_h - lse_i) delta_i

XLA computes these. In delta, `Outputs.rest` gives out back what rounding took from it. Then

    dv_j = sum_i p_ij dout_i
    dk_j = scale sum_i p_ij (dp_ij - delta_i) q_i
    dq_i = scale sum_j p_ij (dp_ij - delta_i) k_j

by kernels that make p and dp again, block by block: one for dq, and one for dk and dv, or one for
each. No sum is shared between blocks, so all gradients are the same bits each time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.mosaic import F32
from ato_jax.ops.attention.mosaic_gpu import (
    bias_gradient,
    dropout,
    gradient,
    gradient_pairs,
    pairs,
    segments,
)
from ato_jax.ops.attention.mosaic_gpu.frame import Config
from ato_jax.ops.attention.mosaic_gpu.gradient_storage import ROWS, Pass, passes
from ato_jax.ops.attention.mosaic_gpu.softmax import LOG2_E
from ato_jax.ops.attention.spec import (
    REST_UNITS,
    AttentionSpec,
    Inputs,
    Outputs,
    Residuals,
    bias_gradient_by_query,
    exact_delta,
    gradient_gain,
    limits_array,
    over_lacked_axes,
    with_correction,
)


def backward(
    spec: AttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs, dout = residuals.inputs, cotangents.out
    gain = gradient_gain(spec, inputs, cotangents)
    lse, delta = of_queries(spec, residuals, cotangents)
    norm = lse if spec.bias is not None else lse * LOG2_E - gradient_pairs.shift(spec)
    rows = {"norm": padded(spec, config, norm, jnp.inf)}
    if (hashes := dropout.hashes(spec, inputs, rows["norm"].shape[2])) is not None:
        rows["hashes"] = hashes
    if gain is not None:
        rows["gain"] = gain
    found: dict[str, jax.Array] = {}
    correction = by_key = by_query = None
    corrected = delta
    for of in passes(spec, config):
        planes = pairs.planes_of(spec, inputs, of.of_keys)
        # With dropout ds is without its factor, see `gradient_pairs.unit_of_ds`.
        minus_delta = -corrected * (1 - spec.dropout_rate) if spec.dropout_rate else -corrected
        rows["minus_delta"] = padded(spec, config, minus_delta, 0)
        results = gradient.run(of, planes, arrays_of(of, planes, inputs, dout) | rows)
        found |= dict(zip(of.names, results, strict=False))
        by_row = dict(zip(of.by_row, results[len(of.names) :], strict=True))
        if "weights" in by_row:
            # The rows of padded queries may hold NaN.
            correction = jnp.where(lse < jnp.inf, by_row["weights"][..., : spec.T], 1.0)
            dout, corrected = with_correction(spec, correction, dout, delta)
        if "ds" in by_row and of.of_keys:
            by_key = by_row["ds"][..., : spec.S]
        elif "ds" in by_row:
            by_query = by_row["ds"][..., : spec.T]
    shares: Any = 0.0
    if inputs.sinks is not None:
        shares = jnp.exp(jnp.minimum(inputs.sinks[:, None] - lse, 0))
        shares = shares if correction is None else shares * correction
        exact = delta
        if by_query is not None:
            exact = exact_delta(spec, cotangents, shares, lse, delta, by_query)
        found["sinks"] = -jnp.sum(shares * exact, axis=(0, 2))
    if spec.bias is not None and inputs.bias is not None:
        if pairs.extent(spec.bias) == "pairs":
            found["bias"] = by_pairs(spec, config, inputs, dout, rows)
        else:
            if by_key is not None:
                dbias = by_key[:, :, None]  # [B, H, 1, S]
            else:
                log2_lse = lse * LOG2_E
                of_bias = bias_gradient_by_query(spec, cotangents, shares, delta, log2_lse)
                dbias = of_bias[..., None]  # [B, H, T, 1]
            found["bias"] = over_lacked_axes(dbias, inputs.bias)
    return Inputs(**found)


def by_pairs(
    spec: AttentionSpec, config: Config, inputs: Inputs, dout: jax.Array, rows: dict[str, jax.Array]
) -> jax.Array:
    """dbias of a bias over pairs, by a kernel of its own: a call that does not use it does not run
    it. `rows` as for dk and dv."""
    tiles = bias_gradient.tiles_of(spec, config)
    assert tiles is not None and inputs.bias is not None
    planes = pairs.planes_of(spec, inputs)
    arrays = arrays_of(tiles.of, planes, inputs._replace(sinks=None), dout)
    arrays |= {name: array for name, array in rows.items() if name != "gain"}
    return bias_gradient.run(spec, config, planes, inputs.bias, arrays)


def arrays_of(
    of: Pass, planes: pairs.Planes, inputs: Inputs, dout: jax.Array
) -> dict[str, jax.Array]:
    """The kernel's arrays, by the names of `gradient_storage.Walk`, but for the rows of queries."""
    sides = (inputs.q, dout, inputs.q_segments), (inputs.k, inputs.v, inputs.kv_segments)
    (x, y, own_ids), (other_x, other_y, other_ids) = reversed(sides) if of.of_keys else sides
    given = dict(x=x, y=y, other_x=other_x, other_y=other_y)
    if "weights" in of.by_row and inputs.sinks is not None:
        given["sinks"] = inputs.sinks
    if (bounds := limits_array(of.spec, inputs)) is not None:
        given["bounds"] = bounds
    rows, columns = of.tiles * of.tile, of.other_blocks * of.others
    given |= pairs.arrays_of(planes, inputs, rows, columns, of.of_keys)
    if own_ids is not None and other_ids is not None:
        own_ids = segments.padded(own_ids, rows)
        other_ids = segments.padded(other_ids, columns)
        shared = segments.shared(own_ids, ROWS, other_ids, of.others)
        given |= dict(own_ids=own_ids, other_ids=other_ids, shared=shared)
    return given


def of_queries(
    spec: AttentionSpec, residuals: Residuals, cotangents: Outputs
) -> tuple[jax.Array, jax.Array]:
    """lse, plus infinity for a query that sees nothing, and delta, [B, H, T] float32."""
    out, lse, rest = residuals.outputs
    # Ahead of the transposition: behind it XLA makes a launch of its own for the comparison.
    lse = jnp.where(lse > -jnp.inf, lse, jnp.inf)
    exact = out.astype(F32)
    if rest is not None:
        exact *= 1 + rest.astype(F32) * REST_UNITS[spec.dtype]
    delta = jnp.sum(exact * cotangents.out.astype(F32), axis=-1)
    if spec.return_lse:
        delta -= cotangents.lse
    if spec.layout == "bthd":
        lse, delta = lse.swapaxes(1, 2), delta.swapaxes(1, 2)
    lengths = residuals.inputs.q_lengths
    if lengths is not None:
        exists = lax.broadcasted_iota(jnp.int32, lse.shape, 2) < lengths[:, None, None]
        lse, delta = jnp.where(exists, lse, jnp.inf), jnp.where(exists, delta, 0)
    return lse, delta


def padded(spec: AttentionSpec, config: Config, rows: jax.Array, value: float) -> jax.Array:
    """[B, H, T up to a whole tile of each kernel]"""
    sizes = [of.others if of.of_keys else of.tile for of in passes(spec, config)]
    whole = max(int(pl.cdiv(spec.T, size)) * size for size in sizes)
    beyond = ((0, 0), (0, 0), (0, whole - spec.T))
    return jnp.pad(rows, beyond, constant_values=value)
