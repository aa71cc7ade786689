"""The backward pass: delta, and then the kernel of `gradient.py`, for dq and for dk and dv.

    norm_i  = log2(e) lse_i            plus infinity for a query that sees nothing
    delta_i = out_i . dout_i - dlse_i

XLA computes both, in one pass over out and dout. With these

    dv_j = sum_i p_ij dout_i
    dk_j = scale sum_i p_ij (dp_ij - delta_i) q_i
    dq_i = scale sum_j p_ij (dp_ij - delta_i) k_j

each by a kernel that makes p and dp again, block by block. No sum is shared between blocks, so all
gradients are the same bits each time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.mosaic import F32
from ato_jax.ops.attention.mosaic_gpu import gradient, visibility
from ato_jax.ops.attention.mosaic_gpu.frame import Config
from ato_jax.ops.attention.mosaic_gpu.gradient_storage import Pass, dkv_passes, dq_pass
from ato_jax.ops.attention.mosaic_gpu.softmax import LOG2_E
from ato_jax.ops.attention.spec import REST_UNITS, AttentionSpec, Inputs, Outputs, Residuals


def backward(
    spec: AttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs = residuals.inputs
    norm, delta = rows_of(spec, config, residuals, cotangents)
    found: dict[str, jax.Array] = {}
    for of in (dq_pass(spec, config), *dkv_passes(spec, config)):
        names = ("k", "v") if of.of_keys else ("q",)
        results = gradient.run(of, arrays_of(of, inputs, cotangents.out, norm, delta))
        found |= dict(zip(names, results, strict=True))
    return Inputs(**found)


def arrays_of(
    of: Pass, inputs: Inputs, dout: jax.Array, norm: jax.Array, delta: jax.Array
) -> dict[str, jax.Array]:
    """The kernel's arrays, by the names of `gradient_storage.Walk`."""
    sides = (inputs.q, dout), (inputs.k, inputs.v)
    (x, y), (other_x, other_y) = reversed(sides) if of.of_keys else sides
    given = dict(x=x, y=y, other_x=other_x, other_y=other_y, norm=norm, delta=delta)
    if (bounds := visibility.limits_array(of.spec, inputs)) is not None:
        given["bounds"] = bounds
    return given


def rows_of(
    spec: AttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> tuple[jax.Array, jax.Array]:
    """norm and delta, [B, H, T up to whole tiles] float32."""
    out, lse, rest = residuals.outputs
    exact = out.astype(F32)
    if rest is not None:
        exact *= 1 + rest.astype(F32) * REST_UNITS[spec.dtype]
    delta = jnp.sum(exact * cotangents.out.astype(F32), axis=-1)
    if spec.return_lse:
        delta -= cotangents.lse
    if spec.layout == "bthd":
        lse, delta = lse.swapaxes(1, 2), delta.swapaxes(1, 2)
    sees = lse > -jnp.inf
    lengths = residuals.inputs.q_lengths
    if lengths is not None:
        exists = lax.broadcasted_iota(jnp.int32, lse.shape, 2) < lengths[:, None, None]
        sees, delta = sees & exists, jnp.where(exists, delta, 0)
    norm = jnp.where(sees, lse * LOG2_E, jnp.inf)
    whole = max(
        int(pl.cdiv(spec.T, rows)) * rows
        for rows in (dq_pass(spec, config).tile, *(of.others for of in dkv_passes(spec, config)))
    )
    beyond = ((0, 0), (0, 0), (0, whole - spec.T))
    return jnp.pad(norm, beyond, constant_values=jnp.inf), jnp.pad(delta, beyond)
