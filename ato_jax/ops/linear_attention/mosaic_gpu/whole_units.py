"""Float16 in `whole_*.py` and `wide_*_gradient.py`: operands are bounded, or divided by a unit.

Features may be far below float16's smallest normal number, 2^-14: elu(-14) + 1 is 8e-7. With a
normaliser, dividing by z [F], the sum over all keys, turns features into shares and S into means of
the values, which are bounded:

    b_f  = S_f / z_f [V]                   mean of v in the weights of feature f: within v's range
    w_if = phi(q_i)_f z_f / den_i          shares of a query: in [0, 1], and their sum over f is 1
    out_i = sum_f w_if b_f
    P_i  = g_i b^T [F],  e_i = w_i . P_i
    dq_i = (P_i - e_i) z / den_i phi'(q_i)
    R_f  = sum_i w_if g_i [V],  u_f = -sum_i e_i w_if
    dv_j = sum_f phi(k_j)_f / z_f R_f      shares of a key: in [0, 1], and their sum over j is 1
    dk_j = (R v_j + u) phi'(k_j) / z

The sums S and z themselves are made of features in units of their columns, each the largest feature
up to then in the piece (`whole_sums.py`). Shares are multiplied by `LARGEST` before they are
rounded where they may all be small, so those down to 2^-28 have all of their digits, and products
are divided by it.

R has a unit of its head, its largest magnitude over `LARGEST`, and without a normaliser S has one,
too. They are of the whole head, not of rows as in `mosaic/scales.py`: R and S are multiplied along
either axis. Without a normaliser, features have units in all products (`has_units_of_features`). In
products with S and R the unit is of a row, its largest magnitude over `LARGEST`; in sums over rows
it is the largest magnitude so far in the piece, over `LARGEST`. Features of identity have none:
they are float16 numbers already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.mosaic import F16, F32
from ato_jax.mosaic.scales import LEAST_UNIT, has_units, units_of_rows
from ato_jax.mosaic.scales import in_units as in_units_of_rows
from ato_jax.ops.linear_attention.mosaic_gpu.feature_maps import Features
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec, LinearState

LARGEST = 2.0**14
# Smaller sums of features count as 0: LARGEST over it, and its product with a value are normal
# numbers of float32.
LEAST_SUM = 2.0**-100
# Above what 256 features of up to 2^16, each with a sum that counts as 0, make of a denominator:
# with an eps of at least this, such features change nothing that is divided by it.
LEAST_EPS = 2.0**-76
LEAST_SHARE = 2.0**-24  # float16's smallest positive number


class SumsOfQueries(NamedTuple):
    """The sums over all queries that the kernels for dk and dv read.

    Args:
      r: R [B, G, F, V] in the dtype of tiles.
      u: [B, G, F] float32.
      units: [B, G] float32 of r, in float16.
      inverse: [B, G, F] float32, `LARGEST` / z, in float16 with a normaliser.
    """

    r: jax.Array
    u: jax.Array
    units: jax.Array | None = None
    inverse: jax.Array | None = None


def has_units_of_features(spec: LinearAttentionSpec) -> bool:
    """Whether features are rounded in units: float16 ones that are not exact as they are."""
    return has_units(jnp.dtype(spec.dtype)) and spec.feature_map.name != "identity"


def rounds_in_units(spec: LinearAttentionSpec) -> bool:
    """Whether features that are multiplied with S or R, or that R is the sum of, have units: with a
    normaliser they are shares, which have none."""
    return has_units_of_features(spec) and not spec.normalize


def has_shares(spec: LinearAttentionSpec) -> bool:
    """Whether shares stand in the place of features."""
    return has_units(jnp.dtype(spec.dtype)) and spec.normalize


def rows_in_units(parts: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Rows of features in parts [rows, columns] float32, rounded in the unit of each row, and the
    units [rows]."""
    units = units_of_rows(parts) * (1 / LARGEST)
    return [mosaic.rounded(in_units_of_rows(part, units), F16) for part in parts], units


def in_units_of(x: jax.Array, largest: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """`rows_in_units` for one part x [rows, columns] float32, given the `largest` magnitudes [rows]
    of each part."""
    units = jnp.maximum(functools.reduce(jnp.maximum, largest), LEAST_UNIT) * (1 / LARGEST)
    return mosaic.rounded(in_units_of_rows(x, units), F16), units


def slope_of_keys(
    maps: Features,
    x: jax.Array,
    rounded: jax.Array,
    units: jax.Array | None = None,
    inverse: Callable[[], jax.Array] | None = None,
) -> jax.Array:
    """phi'(x), float32, where phi(x) was `rounded` in `units` of its rows, or in none; or, where it
    was rounded as shares phi(x) `inverse()`, the derivative of these."""
    if inverse is not None and maps.slope_is_known:
        return maps.scaled_slope(rounded.astype(F32), inverse())
    if inverse is not None:
        return maps.slope(x) * inverse()
    phi = rounded
    if units is not None:
        phi = phi.astype(F32) * mosaic.in_columns(units, phi.shape[1])
    return maps.slope_of(x, phi).astype(F32)


def in_units(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [B, G, F, V] float32 in float16, in the unit of each head, and the units [B, G]."""
    unit = jnp.maximum(jnp.max(jnp.abs(x), axis=(2, 3)), LEAST_UNIT) / LARGEST
    return (x / unit[..., None, None]).astype(jnp.float16), unit


def means(state: LinearState) -> jax.Array:
    """b [B, G, F, V] in float16; 0 for features that no key has."""
    is_there = state.k_sum >= LEAST_SUM
    z = jnp.where(is_there, state.k_sum, 1.0)[..., None]
    return jnp.where(is_there[..., None], state.kv / z, 0.0).astype(jnp.float16)


def inverse_sums(z: jax.Array) -> jax.Array:
    """`LARGEST` / z, [B, G, F]; 0 for features that no key has."""
    return jnp.where(z >= LEAST_SUM, LARGEST / jnp.maximum(z, LEAST_SUM), 0.0)
