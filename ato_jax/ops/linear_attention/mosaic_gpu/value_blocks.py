"""Causal calls with D <= 128 < V: each block of 128 values becomes a head of the kernels.

The backend (`__init__.py`) calls these functions; with a decay per channel it calls those of
`channel_blocks.py` instead. A block of out's columns depends on the same columns of v alone, and
one of dv on those of v and g. The gradients of q, k and the decay are sums over blocks b: with
e_ib = g_ib . out_ib,

    dq_i = sum_b (G_ib - e_ib z_i) inverse_i phi'(q_i)        likewise dk_j and the decay's gradient

To the kernels block b of head h is head b H + h. H is a multiple of G, so b G + g is the head of
keys that a group of such heads reads. No array is copied: `mosaic.Tiling.cut` finds the rows of a
block. Blocks that run at the same time have the same piece of all heads (`mosaic.Deal`), so that
both blocks of a head read its q and k at about the same time.

The kernels write dq and dk of each block, [B, T, blocks H, D], and XLA adds them up in float32.
Beside what a head of 128 columns moves, in its columns, that is 12 of 20 with two blocks: each
gradient is written and read twice, and written once more.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.mosaic_gpu import narrow
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState

COLUMNS = 128  # of a block


@dataclasses.dataclass(frozen=True)
class Cut(narrow.Narrow):
    """A call whose heads are blocks; `values_width` is V of a whole head."""

    value_blocks: int = 1


def is_cut(spec: LinearAttentionSpec) -> bool:
    """Whether a call's heads are cut so."""
    return spec.causal and spec.decay != "channel" and spec.D <= COLUMNS < spec.V


def blocks_of(spec: LinearAttentionSpec) -> int:
    """How many blocks share a head's q and k, in a call as kernels take it."""
    return spec.value_blocks if isinstance(spec, Cut) else 1


def in_blocks(spec: LinearAttentionSpec) -> Cut:
    blocks = int(pl.cdiv(spec.V, COLUMNS))
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    fields |= dict.fromkeys("DFV", COLUMNS) | {"H": blocks * spec.H, "G": blocks * spec.G}
    return Cut(**fields, width=spec.D, values_width=spec.V, value_blocks=blocks)


def heads_axis(spec: LinearAttentionSpec) -> int:
    return spec.layout.index("h")


def shape_of_heads(spec: LinearAttentionSpec, x: jax.Array) -> tuple[int, ...]:
    """The shape of an array like q or k that has a part for each of the kernels' heads."""
    axis = heads_axis(spec)
    return (*x.shape[:axis], x.shape[axis] * blocks_of(spec), *x.shape[axis + 1 :])


def of_blocks(cut: Cut, x: jax.Array, axis: int) -> jax.Array:
    """One part for each of the kernels' heads, of what all blocks of a head share."""
    return jnp.concatenate([x] * cut.value_blocks, axis)


def summed(cut: Cut, x: jax.Array, axis: int) -> jax.Array:
    """The reverse for gradients: the sum over the blocks of each head."""
    parts = x.reshape(*x.shape[:axis], cut.value_blocks, -1, *x.shape[axis + 1 :])
    return jnp.sum(parts.astype(jnp.float32), axis=axis).astype(x.dtype)


def state_in_blocks(cut: Cut, state: LinearState, is_cotangent: bool = False) -> LinearState:
    """The state of the kernels' heads. All blocks have the same k_sum; a cotangent's is given to
    the first block alone, whose k_sum is returned."""
    kv, k_sum = state
    B, G, D, V = kv.shape
    blocks = cut.value_blocks
    kv = jnp.pad(kv, [(0, 0), (0, 0), (0, cut.D - D), (0, blocks * cut.V - V)])
    kv = kv.reshape(B, G, cut.D, blocks, cut.V)
    kv = jnp.transpose(kv, (0, 3, 1, 2, 4)).reshape(B, -1, cut.D, cut.V)
    k_sum = jnp.pad(k_sum, [(0, 0), (0, 0), (0, cut.D - D)])
    if is_cotangent:
        return LinearState(kv, jnp.pad(k_sum, [(0, 0), (0, (blocks - 1) * G), (0, 0)]))
    return LinearState(kv, of_blocks(cut, k_sum, 1))


def whole_state(cut: Cut, state: LinearState, is_gradient: bool = False) -> LinearState:
    """The state of whole heads: the inverse of `state_in_blocks`. The k_sum of a gradient is the
    sum over blocks."""
    kv, k_sum = state
    blocks, G = cut.value_blocks, cut.G // cut.value_blocks
    kv = kv.reshape(cut.B, blocks, G, cut.D, cut.V)
    kv = jnp.transpose(kv, (0, 2, 3, 1, 4)).reshape(cut.B, G, cut.D, -1)
    k_sum = summed(cut, k_sum, 1) if is_gradient else k_sum[:, :G]
    return LinearState(kv[:, :, : cut.width, : cut.values_width], k_sum[:, :, : cut.width])


def widened(
    spec: LinearAttentionSpec, state: LinearState, is_cotangent: bool = False
) -> LinearState:
    """A state of the call, or its cotangent, as kernels take it."""
    if isinstance(spec, Cut):
        return state_in_blocks(spec, state, is_cotangent)
    return narrow.widened(spec, state)


def narrowed(spec: LinearAttentionSpec, state: LinearState) -> LinearState:
    """The reverse."""
    if isinstance(spec, Cut):
        return whole_state(spec, state)
    return narrow.narrowed(spec, state)


def whole_gradients(cut: Cut, found: Inputs, of_steps: bool) -> Inputs:
    """The gradients of whole heads; the decay's is one of each step, or else one of each chunk, [B,
    H, chunks]."""
    axis, decay, state = heads_axis(cut), found.decay, found.initial_state
    if decay is not None:
        decay = summed(cut, decay, axis if of_steps else 1)
    if state is not None:
        state = whole_state(cut, state, is_gradient=True)
    q, k = (summed(cut, x, axis) for x in (found.q, found.k))
    return found._replace(q=q, k=k, decay=decay, initial_state=state)
