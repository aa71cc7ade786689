"""Powers of two for float16 in `channel_output.py` and `channel_sums.py`; XLA computes them.

The gates scale features by 2^-8 to 2^8 (`MOST_LOST_IN_FLOAT16`), while float16's normal numbers lie
between 2^-14 and 2^16. So each operand is multiplied by a power of two before it is rounded:

    keys      c_k   one for each head: the largest phi(k) c_k is between 2^6 and 2^7
    queries   c_i   one for each row: the largest phi(q_i) c_i is between 1 and 2. A weight is then
                    a sum of at most 128 products of at most 2^8
    state     s     S c_k s, from the bound c_k sum_j max phi(k_j) max |v|
    sums      t     z c_k t, from the bound c_k sum_j max phi(k_j)

c_i and c_k cancel in a normalised out, whose eps is multiplied by both. Where the kernel returns
numerators and denominators, and without a normaliser, it divides by them. `channel_sums.py`
multiplies keys by 2^8 c_k, since its exponents are never positive, and XLA divides the sums by
that.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.mosaic import F32
from ato_jax.ops.linear_attention.mosaic_gpu import channel_blocks, powers
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec

# The largest power: products of two powers, and of a power with a sum, stay finite in float32.
MOST = 2.0**60


class Power:
    """The columns of `Powers.of_heads`: log2 c_k, c_k, 1 / c_k, s, 1 / s, t and 1 / t."""

    LOG_KEYS, KEYS, OVER_KEYS, STATE, OVER_STATE, SUMS, OVER_SUMS = range(7)


class Powers(NamedTuple):
    queries: jax.Array  # log2 c_i [B, H, T up to a whole chunk], float32
    of_heads: jax.Array  # [B, G, 7], float32

    def of_keys(self, *, room: float = 1.0) -> jax.Array:
        """log2(c_k room), [B, G]."""
        return self.of_heads[..., Power.LOG_KEYS] + jnp.log2(room)

    def rounded(self, kv: jax.Array) -> jax.Array:
        """States [B, G, P, V, F] times c_k s, in float16."""
        factor = self.of_heads[..., Power.KEYS] * self.of_heads[..., Power.STATE]
        return (kv * factor[..., None, None, None]).astype(jnp.float16)

    def of_sums(self, k_sum: jax.Array) -> jax.Array:
        """z [B, G, P, F] times c_k."""
        return k_sum * self.of_heads[:, :, Power.KEYS, None, None]


def of_call(
    spec: LinearAttentionSpec, inputs: Inputs, start: tuple[jax.Array, jax.Array] | None
) -> Powers | None:
    """The powers of a call; None but in float16. `start` is the initial state in the layout of the
    kernels, S [B, G, V, F] and z [B, G, F]."""
    c_k = powers.powers_of_keys(spec, inputs)
    if c_k is None:
        return None
    rises, rows = powers.largest_of_keys(spec, inputs)
    rows = spec.feature_map(rows) if rises else rows
    sums = _of_features(spec, c_k * jnp.sum(rows, axis=2))
    v = jnp.max(jnp.abs(inputs.v), axis=3).astype(F32)
    v = jnp.max(jnp.where(jnp.isfinite(v), v, 0.0), axis=1 if spec.layout == "bthd" else 2)
    c_k = _of_features(spec, c_k)
    state = sums * _of_values(spec, v)
    if start is not None:
        kv, k_sum = start
        state += c_k * jnp.max(jnp.abs(kv), axis=(2, 3))
        sums += c_k * jnp.max(jnp.abs(k_sum), axis=2)
    s, t = (powers.power_of(bound, MOST) for bound in (state, sums))
    found = jnp.log2(c_k), c_k, 1 / c_k, s, 1 / s, t, 1 / t
    return Powers(_of_queries(spec, inputs.q), jnp.stack(found, axis=2))


def _of_queries(spec: LinearAttentionSpec, q: jax.Array) -> jax.Array:
    phi = spec.feature_map
    if phi.name in powers.RISING:
        largest = phi(powers.largest_of_rows(spec, q))
    else:
        largest = powers.largest_of_rows(spec, jnp.abs(phi(q.astype(F32))))
    largest = jnp.where(jnp.isfinite(largest), largest, 1.0)
    found = jnp.log2(powers.power_of(largest, powers.most_of(spec), 1.0))
    found = jnp.pad(found, [(0, 0), (0, 0), (0, mosaic.whole_chunks(spec.T) - spec.T)])
    return _of_features(spec, found)


def _of_features(spec: LinearAttentionSpec, x: jax.Array) -> jax.Array:
    """x [B, heads of q or k in memory, ..], repeated for each of the kernels' heads."""
    return channel_blocks.of_pairs(spec, x, of_values=False)


def _of_values(spec: LinearAttentionSpec, x: jax.Array) -> jax.Array:
    return channel_blocks.of_pairs(spec, x, of_values=True)
