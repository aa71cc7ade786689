"""What both forms share: the arrays of a call by heads, masked features, weights of rows, products.

R = H / G query heads share a kv head. Products take operands of `operand_dtype` and accumulate in
float32. bfloat16 stays bfloat16, and exact float32 is multiplied as it is. float16 becomes float32,
which a GPU multiplies in TF32: that has float16's mantissa, and sums over keys and quotients leave
float16's range. Tensor cores cut a float32 operand off after TF32's 10 bits. Cut features are all
too small, and errors of one sign do not average out, so operands are rounded to the nearest TF32
number here, which is exact on a card.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState

# The axes of q and of k or v but for the last: t is a query or a key, g a kv head, r a query head
# of its group.
QUERY_AXES = {"bthd": "btgr", "bhtd": "bgrt"}
KEY_AXES = {"bthd": "btg", "bhtd": "bgt"}


def operand_dtype(spec: LinearAttentionSpec) -> Any:
    return jnp.bfloat16 if spec.dtype == "bfloat16" else jnp.float32


# Bits of mantissa that an operand has, beside the leading one.
MANTISSA_BITS = {jnp.bfloat16: 7, jnp.float32: 10}


def is_exact(spec: LinearAttentionSpec) -> bool:
    return spec.dtype == "float32" and spec.precision == "exact"


def operand(spec: LinearAttentionSpec, x: jax.Array) -> jax.Array:
    """x as a factor of a product."""
    dtype = operand_dtype(spec)
    if dtype == jnp.bfloat16 or x.dtype == jnp.float16:
        return x.astype(dtype)
    return rounded(spec, x)


def product(
    spec: LinearAttentionSpec, equation: str, left: jax.Array, right: jax.Array, dtype: Any
) -> jax.Array:
    """An einsum accumulated in float32 and rounded once to `dtype`."""
    precision = jax.lax.Precision.HIGHEST if is_exact(spec) else jax.lax.Precision.DEFAULT

    def multiply(left: jax.Array, right: jax.Array, dtype: Any = dtype) -> jax.Array:
        return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=dtype)

    if left.dtype != jnp.bfloat16:
        return multiply(left, right)

    # XLA for CPUs, as JAX 0.11.2 and 0.12.0.1 have it, accumulates some products of bfloat16
    # operands in bfloat16, and ends some with a float32 result by an error.
    def in_float32(left: jax.Array, right: jax.Array) -> jax.Array:
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
        return multiply(left, right, jnp.float32).astype(dtype)

    found: jax.Array = jax.lax.platform_dependent(left, right, cpu=in_float32, default=multiply)
    return found


class Rows(NamedTuple):
    """The rows of a call, or of a segment of it."""

    q: jax.Array  # [B, T, G, R, D]; [B, G, R, T, D] where the layout is "bhtd"
    k: jax.Array  # [B, S, G, D]; [B, G, S, D]
    v: jax.Array  # [B, S, G, V]; [B, G, S, V]


def in_groups(spec: LinearAttentionSpec, array: jax.Array) -> jax.Array:
    """An array of query heads, with their axis as kv heads and the heads of each group."""
    axis = spec.layout.index("h")
    shape = (*array.shape[:axis], spec.G, spec.H // spec.G, *array.shape[axis + 1 :])
    return array.reshape(shape)


def of_heads(spec: LinearAttentionSpec, array: jax.Array) -> jax.Array:
    """Undoes `in_groups`."""
    axis = spec.layout.index("h")
    return array.reshape(*array.shape[:axis], spec.H, *array.shape[axis + 2 :])


def valid(lengths: jax.Array | None, first: Any, count: int, axes: str) -> jax.Array | None:
    """Which of the rows from `first` on are no padding, shaped for arrays [axes.., X]."""
    if lengths is None:
        return None
    mask = first + jnp.arange(count, dtype=jnp.int32) < lengths[:, None]  # [B, T]
    shape = [dict(b=mask.shape[0], t=count).get(axis, 1) for axis in axes]
    return mask.reshape(*shape, 1)


def keep(mask: jax.Array | None, array: jax.Array) -> jax.Array:
    """The array, with 0 in place of padding, whatever that holds."""
    return array if mask is None else jnp.where(mask, array, 0)


def features(spec: LinearAttentionSpec, x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """phi(x) in float32, 0 where there is padding."""
    return keep(mask, spec.feature_map(keep(mask, x).astype(jnp.float32)))


def rounded(spec: LinearAttentionSpec, x: jax.Array) -> jax.Array:
    """float32 values that the operands of products hold.

    Where two terms nearly cancel, both take the same roundings of what they have in common. A cast
    there and back would be none: XLA may remove it.
    """
    if is_exact(spec):
        return x
    bits = MANTISSA_BITS[operand_dtype(spec)]
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=bits)


def pull_back(
    spec: LinearAttentionSpec, x: jax.Array, mask: jax.Array | None, cotangent: jax.Array
) -> jax.Array:
    """The gradient of x from that of its features, in x's dtype."""
    _, pull = jax.vjp(lambda x: features(spec, x, mask), x)
    found: jax.Array = pull(cotangent)[0]
    return found


def weights(spec: LinearAttentionSpec, den: jax.Array) -> jax.Array:
    """What multiplies the numerator: 1 / max(den, eps), or the scale."""
    if not spec.normalize:
        return jnp.full_like(den, spec.scale)
    return 1 / jnp.maximum(den, spec.eps)


def where_divided(spec: LinearAttentionSpec, den: jax.Array, flow: jax.Array) -> jax.Array:
    """What flows into the normaliser: nothing where there is none or where eps replaces it."""
    return jnp.where(den > spec.eps, flow, 0) if spec.normalize else jnp.zeros_like(flow)


def parts_of_states(spec: LinearAttentionSpec, states: jax.Array) -> list[jax.Array]:
    """States as operands: what they round to, and where features may cancel, what that leaves.

    Four factors of like size are rounded: both features, a state and the output. Their errors add
    up to the budget of the output, so a sum that cancels has no room for the state's.
    """
    if spec.feature_map.nonnegative:
        return [operand(spec, states)]
    return in_parts(spec, states)


def in_parts(spec: LinearAttentionSpec, x: jax.Array) -> list[jax.Array]:
    """What x rounds to as an operand, and what that leaves, if anything."""
    high = operand(spec, x)
    if high.dtype == jnp.float32:
        return [high]
    return [high, (x - rounded(spec, x)).astype(high.dtype)]


def initial(spec: LinearAttentionSpec, inputs: Inputs) -> LinearState:
    if inputs.initial_state is not None:
        return inputs.initial_state
    rows = (spec.B, spec.G, spec.F)
    return LinearState(jnp.zeros((*rows, spec.V), jnp.float32), jnp.zeros(rows, jnp.float32))
