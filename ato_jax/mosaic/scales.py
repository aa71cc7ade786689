"""Float16 operands: sums of float32 are divided by a unit before they are rounded, and products
multiplied by it after.

The exponents of bfloat16 are those of float32, so a sum is only rounded. Float16 ends at 65504, and
below 2^-14 it loses digits. A row's unit is its largest magnitude: what is then below 2^-14 is too
small to be seen beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax.mosaic.tiles import F16, OF_COLUMNS, in_columns, in_rows, load

# The unit of a row of zeros. Kernels divide by the product of two units, which is at least 2^-100:
# a number of 1e8 divided by it is still finite in float32.
LEAST_UNIT = 2.0**-50


def has_units(dtype: object) -> bool:
    return dtype == F16


def units_of_rows(parts: Sequence[jax.Array]) -> jax.Array:
    """The unit of each row, [.., rows], of a matrix in parts [.., rows, columns]."""
    largest = [jnp.max(jnp.abs(part), axis=part.ndim - 1) for part in parts]
    found = largest[0]
    for other in largest[1:]:
        found = jnp.maximum(found, other)
    return jnp.maximum(found, LEAST_UNIT)


def unit_of(vector: Any, rows: int) -> jax.Array:
    """The largest magnitude of a vector in shared memory: [rows] times the same number."""
    return units_of_rows([in_rows(load(vector, OF_COLUMNS), rows)])


def in_units(x: jax.Array, units: jax.Array) -> jax.Array:
    """x [rows, columns] in the units of its rows, float32."""
    return x * in_columns(1 / units, x.shape[1])
