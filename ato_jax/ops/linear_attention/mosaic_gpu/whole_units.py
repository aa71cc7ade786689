"""Float16 where every query sees every key: S and R are rounded in a unit of each head.

    S = unit S',  max |S'| = 2^14        likewise R, and z

S' is rounded to float16, and kernels multiply a product with S' by the unit. The unit is of all of
S, not of rows as in `mosaic/scales.py`: S is multiplied along either axis. From 2^14 down to 2^-14
float16 has all of its digits: what is 2^28 times smaller than the largest element loses some.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ato_jax.mosaic.scales import LEAST_UNIT
from ato_jax.ops.linear_attention.scans.chunks import PARTS

LARGEST = 2.0**14


def in_units(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [B, G, ..] float32 in float16, in the unit of each head, and the units [B, G]."""
    largest = jnp.max(jnp.abs(x), axis=tuple(range(2, x.ndim)))
    unit = jnp.maximum(largest, LEAST_UNIT) / LARGEST
    return (x / _along(unit, x)).astype(jnp.float16), unit


def rows_in_units(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """z [B, G, F] in 8 rows [B, G, 8, F], 4 of it rounded, 4 of what that left off; the units."""
    rounded, unit = in_units(z)
    rest = (z / _along(unit, z) - rounded.astype(jnp.float32)).astype(jnp.float16)
    return jnp.repeat(jnp.stack([rounded, rest], axis=2), PARTS, axis=2), unit


def _along(unit: jax.Array, x: jax.Array) -> jax.Array:
    return unit.reshape(*unit.shape, *(1,) * (x.ndim - 2))
