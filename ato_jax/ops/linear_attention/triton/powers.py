"""Powers of two by which float16 calls multiply the features of keys before they round them.

float16's smallest normal number is 2^-14, and features may be far below it: elu(x) + 1 of -14 is
8e-7. Each key/value head has a power c, [B, G], which brings the head's largest feature to between
`LARGEST` and twice that; c is at least 1 and at most `MOST`. Features down to 2^-28 of the largest
then have all of their digits. In the kernels that round features of keys to float16,

    phi(k), and sums over keys such as S, z, y and z_i     are multiplied by c
    phi(q), where it is multiplied by these                is divided by c, in float32's range

so weights and denominators do not contain c, and kernels divide sums by c before they store them.
Multiplying by a power of two is exact, so only features that float16 would have cut short change.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec

LARGEST = 2.0**14
# Divided by a larger power, phi(q) could underflow in float32.
MOST = 2.0**60
# Maps whose features stay in float16's range (`mapping.wide_features`) but have to be rounded to
# it; relu and identity need no rounding. The largest feature of a RISING map is that of the largest
# x.
RISING = "elu1", "softplus"
OTHERS = ("silu",)
EXPONENT = 0x7F800000  # the exponent bits of a float32
NAME = "k_power"  # the array's name among the refs of a kernel


def arrays(spec: LinearAttentionSpec, inputs: Inputs) -> dict[str, jax.Array]:
    """The powers [B, G, 1], by the name of their array in a kernel; empty where none are needed."""
    phi, k = spec.feature_map, inputs.k
    if spec.dtype != "float16" or phi.name not in RISING + OTHERS:
        return {}
    rises = phi.name in RISING
    rows = jnp.max(k if rises else jnp.abs(phi(k.astype(jnp.float32))), axis=3)
    # XLA would else read k column by column in one pass over all heads.
    rows = lax.optimization_barrier(rows).astype(jnp.float32)
    if spec.layout == "bthd":
        rows = jnp.swapaxes(rows, 1, 2)  # [B, G, S]
    counts = jnp.isfinite(rows)
    if inputs.kv_lengths is not None:
        counts &= jnp.arange(spec.S, dtype=jnp.int32) < inputs.kv_lengths[:, None, None]
    largest = jnp.max(jnp.where(counts, rows, -65504.0 if rises else 0.0), axis=2)
    if rises:
        largest = phi(largest)
    bits = lax.bitcast_convert_type(jnp.clip(largest, LARGEST / MOST, LARGEST), jnp.int32)
    power = LARGEST / lax.bitcast_convert_type(bits & EXPONENT, jnp.float32)
    return {NAME: power[..., None]}


def of_head(refs: dict[str, Any]) -> Any:
    """The power of the head whose keys a program reads; None where features need none."""
    return refs[NAME][0] if NAME in refs else None


def times(power: Any, arrays: Any) -> Any:
    """One array, or several, times the power."""
    return arrays if power is None else jax.tree.map(lambda array: array * power, arrays)


def over(power: Any, arrays: Any) -> Any:
    """One array, or several, divided by the power."""
    return arrays if power is None else times(1 / power, arrays)
