"""Feature maps that are not elementwise, FAVOR+: arrays of features, which the kernels attend over.

    out     = attend(phi(q), phi(k), v)                         the kernels, feature map "identity"
    d_x     = (d phi(x) / d x)^T d_phi_x                         for x = q and x = k
    d_param = sum over q and k of (d phi(x) / d param)^T d_phi_x

phi(x) [.., F] is computed in float32 and rounded once, to the dtype that the kernels multiply. The
forward in bfloat16 takes bfloat16. The other kernels take features in float32, and v and cotangents
in float32 or bfloat16. float32 calls are multiplied as they ask, exactly or in TF32, and all others
in TF32: in float16 features could leave its range, and backward in bfloat16 the pull-back is a
difference, of the projection's rows and x. Simulated in float64 with 512 causal rows of scale 2.5
and D = 64, F = 128, the worst row of dk is 8.6e-2 off where the states S and dS alone are rounded
to bfloat16, 1.3e-2 where the features are, 3.7e-3 where d_phi_x is, and 9e-3 where all are to TF32.

Calls in bfloat16 of up to `MOST_COLUMNS` and `MOST_FEATURES` map and pull back by kernels
(`random_features.py`), all others by XLA. On an H100, B2 H16 T16384 D128 F128 with gradients took
5.67 ms where XLA did, by six products in full float32, of 17 Gflop and 0.54 GB each, and passes
over float32 arrays of 268 MB between them. The kernels read and write 0.54 GB to map q and k, 0.81
where the features are in float32, and 1.07 to pull back. No array of size F is kept between forward
and backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax.device import Device
from ato_jax.ops.linear_attention import features, random_features
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, Outputs, Residuals
from ato_jax.ops.linear_attention.triton.calls import LARGEST_STATE, SMALL_STATE
from ato_jax.ops.linear_attention.triton.config import HOPPER_SHARED_MEMORY, LONG_FEATURES
from ato_jax.triton.tiles import padded

# Of a map's and a pull-back's tiles, which are to leave room in 99 KiB of shared memory.
MOST_COLUMNS, MOST_FEATURES = 128, 256

# Block sizes where causal gradients are multiplied in TF32 beside a state above 64 x 64: a state is
# stored for every run of 128 rows, and each program has 64 rows. A program that carries its state
# holds 16 rows at a time and spills: at D = V = F = 128 208 bytes in the pass for dq, 440 in that
# for dk and dv; here it is none and 188, at D = V = 64 none at all. The pass for the states takes 8
# warps, as with 4 it spills 452 bytes.
STORED: dict[str, Any] = {
    "backward_run_rows": 128,
    "state_block": 32,
    "state_warps": 8,
    "state_stages": 3,
    "dq_block": 64,
    "dq_warps": 8,
    "dq_stages": 1,
    "dkv_block": 64,
    "dkv_warps": 8,
    "dkv_stages": 2,
}


def _by_kernels(spec: LinearAttentionSpec) -> bool:
    """Whether kernels map, and pull back."""
    fits = spec.D <= MOST_COLUMNS and spec.F <= MOST_FEATURES
    return spec.feature_map.name == "favor" and spec.dtype == "bfloat16" and fits


def block_sizes(spec: LinearAttentionSpec, device: Device) -> dict[str, Any]:
    """Those that are not their regime's."""
    large = SMALL_STATE < padded(spec.F) * padded(spec.V) <= LARGEST_STATE
    short = padded(spec.F) <= LONG_FEATURES and padded(spec.V) <= LONG_FEATURES
    roomy = device.shared_memory >= HOPPER_SHARED_MEMORY
    causal = spec.causal and spec.decay is None and spec.segments is None
    return STORED if _by_kernels(spec) and causal and large and short and roomy else {}


def inner_spec(spec: LinearAttentionSpec, phase: str) -> LinearAttentionSpec:
    """The kernels' call for this one: over features where the map is not elementwise."""
    if spec.feature_map.elementwise:
        return spec
    inner = dataclasses.replace(spec, D=spec.F, feature_map=features.NAMED["identity"])
    if phase == "backward" and _by_kernels(spec):
        inner = dataclasses.replace(inner, feature_map=random_features.OWN_SLOPE)
    if spec.dtype == "float32" or spec.dtype == "bfloat16" and phase == "forward":
        return inner
    return dataclasses.replace(inner, dtype="float32", precision="tf32")


def _mapping(
    spec: LinearAttentionSpec, inputs: Inputs
) -> Callable[[jax.Array, jax.Array, tuple[jax.Array, ...]], tuple[jax.Array, jax.Array]]:
    """(q, k, parameters) -> phi(q), phi(k) in float32, padding put to zero before the map."""

    def mapping(q: Any, k: Any, parameters: Any) -> tuple[jax.Array, jax.Array]:
        q, k = random_features.counted(spec, inputs._replace(q=q, k=k))
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
        return spec.feature_map(q, *parameters), spec.feature_map(k, *parameters)

    return mapping


def _inner_inputs(
    spec: LinearAttentionSpec, inputs: Inputs, phi_q: jax.Array, phi_k: jax.Array
) -> Inputs:
    phi_q, phi_k, v = (array.astype(spec.dtype) for array in (phi_q, phi_k, inputs.v))
    return inputs._replace(q=phi_q, k=phi_k, v=v, feature_parameters=())


def _mapped_by_kernels(spec: LinearAttentionSpec, inputs: Inputs, dtype: str) -> Inputs:
    """phi(q) and phi(k) in `dtype` instead of q and k."""
    (projection,) = inputs.feature_parameters
    phi_q, phi_k = (
        random_features.features_of(x, projection, jnp.dtype(dtype))
        for x in random_features.counted(spec, inputs)
    )
    return inputs._replace(q=phi_q, k=phi_k, feature_parameters=())


def forward(attend: Callable[..., Outputs], spec: LinearAttentionSpec, inputs: Inputs) -> Outputs:
    """`attend(spec, inputs)` is the kernels' forward."""
    inner = inner_spec(spec, "forward")
    if _by_kernels(spec):
        return attend(inner, _mapped_by_kernels(spec, inputs, inner.dtype))
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
    if _by_kernels(spec):
        mapped = _mapped_by_kernels(spec, inputs, inner.dtype)
        found = attend(inner, Residuals(mapped, outputs), cotangents)
        return random_features.pulled_back(spec, inputs, found)
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
