"""Feature maps that are not elementwise, FAVOR+: XLA maps, the kernels attend over the features.

    out     = attend(phi(q), phi(k), v)                         the kernels, feature map "identity"
    d_x     = (d phi(x) / d x)^T d_phi_x                         for x = q and x = k
    d_param = sum over q and k of (d phi(x) / d param)^T d_phi_x

phi(x) [.., F] is computed in float32 and rounded once, to the dtype that the kernels multiply. The
forward in bfloat16 takes bfloat16. The other kernels take features, v and cotangents in float32.
float32 calls are multiplied as they ask, exactly or in TF32, and all others in TF32: in float16
features could leave its range, and backward in bfloat16 the pull-back is a difference, of the
projection's rows and x, in which the roundings of dS and of d_phi_x dominate: dk was over its
budget, and with TF32 at half of it.

The cost of the map, for a row of q or k in bfloat16 at D = 64, F = 128: the features, written once
and read once, are 512 bytes, 0.12 ns at 4.3 TB/s; the 2 * D * F = 16 kflop of the projection in
full float32 take 0.27 ns at 60 TFLOP/s. A row of exact attention over S keys is 2 * S * (D + V)
flop, at S = 4096 and 600 TFLOP/s 1.7 ns: the map is small beside that, and does not grow with S.
The backward maps again and pulls back, three such products; no array of size F is kept in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention import features
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, Outputs, Residuals


def inner_spec(spec: LinearAttentionSpec, phase: str) -> LinearAttentionSpec:
    """The kernels' call for this one: over features where the map is not elementwise."""
    if spec.feature_map.elementwise:
        return spec
    inner = dataclasses.replace(spec, D=spec.F, feature_map=features.NAMED["identity"])
    if spec.dtype == "float32" or spec.dtype == "bfloat16" and phase == "forward":
        return inner
    return dataclasses.replace(inner, dtype="float32", precision="tf32")


def _mapping(
    spec: LinearAttentionSpec, inputs: Inputs
) -> Callable[[jax.Array, jax.Array, tuple[jax.Array, ...]], tuple[jax.Array, jax.Array]]:
    """(q, k, parameters) -> phi(q), phi(k) in float32, padding put to zero before the map."""

    time = 1 if spec.layout == "bthd" else 2

    def real(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
        if lengths is None:
            return x
        positions = jax.lax.broadcasted_iota(jnp.int32, x.shape, time)
        return jnp.where(positions < lengths[:, None, None, None], x, 0)

    def mapping(q: Any, k: Any, parameters: Any) -> tuple[jax.Array, jax.Array]:
        q = real(q, inputs.q_lengths).astype(jnp.float32)
        k = real(k, inputs.kv_lengths).astype(jnp.float32)
        return spec.feature_map(q, *parameters), spec.feature_map(k, *parameters)

    return mapping


def _inner_inputs(
    spec: LinearAttentionSpec, inputs: Inputs, phi_q: jax.Array, phi_k: jax.Array
) -> Inputs:
    phi_q, phi_k, v = (array.astype(spec.dtype) for array in (phi_q, phi_k, inputs.v))
    return inputs._replace(q=phi_q, k=phi_k, v=v, feature_parameters=())


def forward(attend: Callable[..., Outputs], spec: LinearAttentionSpec, inputs: Inputs) -> Outputs:
    """`attend(spec, inputs)` is the kernels' forward."""
    inner = inner_spec(spec, "forward")
    phi_q, phi_k = _mapping(spec, inputs)(inputs.q, inputs.k, inputs.feature_parameters)
    out, state = attend(inner, _inner_inputs(inner, inputs, phi_q, phi_k))
    return Outputs(out.astype(spec.dtype), state)


def backward(
    attend: Callable[..., Inputs],
    spec: LinearAttentionSpec,
    residuals: Residuals,
    cotangents: Outputs,
) -> Inputs:
    """`attend(spec, residuals, cotangents)` is the kernels' backward."""
    inner = inner_spec(spec, "backward")
    inputs, outputs = residuals
    (phi_q, phi_k), pull = jax.vjp(
        _mapping(spec, inputs), inputs.q, inputs.k, inputs.feature_parameters
    )
    found = attend(
        inner,
        Residuals(
            _inner_inputs(inner, inputs, phi_q, phi_k),
            outputs._replace(out=outputs.out.astype(inner.dtype)),
        ),
        cotangents._replace(out=cotangents.out.astype(inner.dtype)),
    )
    dq, dk, d_parameters = pull((found.q, found.k))
    return found._replace(q=dq, k=dk, v=found.v.astype(spec.dtype), feature_parameters=d_parameters)
