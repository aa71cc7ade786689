"""Feature maps in kernels: phi(x) and phi'(x) of a tile, and phi(x) as the tensor cores take it.

Columns beyond D and rows that are not real hold zeros, and phi(0) need not be 0: so the features
there are put to zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton.products import operand
from ato_jax.triton.arithmetic import LOG2_E, exp2
from ato_jax.triton.tiles import Columns, Rows, all_columns, tile_mask

# Maps with |phi(x)| <= |x| + 1, whose features fit into float16 wherever the inputs do.
LINEARLY_BOUNDED = ("elu1", "relu", "identity", "silu", "softplus")


def wide_features(spec: LinearAttentionSpec) -> bool:
    """Whether features may leave float16's range, as `wide` says in `products.py`."""
    return spec.feature_map.name not in LINEARLY_BOUNDED


def features_and_slopes(
    spec: LinearAttentionSpec, x: jax.Array, rows: Rows, columns: Columns | None = None
) -> tuple[jax.Array, jax.Array]:
    """phi(x) and phi'(x), float32 [C, F], of a tile x [C, D]; `columns` are its columns if it has
    not all of them."""
    x = x.astype(jnp.float32)
    if spec.feature_map.name == "elu1":
        # exp(x) >= x + 1 everywhere, equal at 0: no comparison. The slope follows from the value.
        features = jnp.maximum(x + 1, exp2(jnp.minimum(x * LOG2_E, 0)))
        slopes = jnp.minimum(features, 1)
    else:
        features, slopes = jax.jvp(spec.feature_map, (x,), (jnp.ones_like(x),))
    mask = tile_mask(rows.real, columns or all_columns(spec.D))
    return (features if mask is None else jnp.where(mask, features, 0)), slopes


def features_of(
    spec: LinearAttentionSpec, x: jax.Array, rows: Rows, columns: Columns | None = None
) -> jax.Array:
    """phi(x), float32 [C, F]."""
    return features_and_slopes(spec, x, rows, columns)[0]


def feature_operand(
    spec: LinearAttentionSpec,
    x: jax.Array,
    rows: Rows,
    columns: Columns | None = None,
    *,
    wide: bool = False,
) -> jax.Array:
    """phi(x) as an `operand`. A bfloat16 tile that needs no mapping stays as it was loaded, so that
    it goes from memory to the products without passing through registers."""
    if spec.feature_map.name == "identity" and x.dtype == jnp.bfloat16:
        return x
    return operand(spec, features_of(spec, x, rows, columns), wide=wide)
