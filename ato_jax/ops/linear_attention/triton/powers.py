"""Powers of two by which float16 calls multiply the features of keys before they round them.

float16's smallest normal number is 2^-14, and features may be far below it: elu(x) + 1 of -14 is
8e-7. Each key/value head has a power c, [B, G], which brings the head's largest feature to between
`LARGEST` and twice that, or is 1 where it is larger already. Features down to 2^-28 of the largest
then have all of their digits. In the kernels that round features of keys to float16,

    phi(k), and sums over keys such as S, z, y and z_i     are times c
    phi(q), where it is multiplied with these              is divided by c, which float32 can hold

so that weights and denominators are without c. What a kernel stores is without it, too. Products
with powers of two are exact: only what float16 could not hold changes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec

LARGEST = 2.0**14
# With a larger power, phi(q) divided by it could be too small for float32.
MOST = 2.0**60
# Maps whose features are not all numbers of float16 and fit into it (`mapping.wide_features`).
RISING = "elu1", "softplus"
OTHERS = ("silu",)
EXPONENT = 0x7F800000  # the bits of float32 that are a normal number's exponent
NAME = "k_power"  # the array's name among the refs of a kernel


def arrays(spec: LinearAttentionSpec, inputs: Inputs) -> dict[str, jax.Array]:
    """The powers [B, G, 1] as a kernel takes arrays by steps; none where features need none."""
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
