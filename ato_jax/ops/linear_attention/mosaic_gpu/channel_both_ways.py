"""Every query sees every key through a decay per step and channel: arrays for two causal walks.

`channel_blocks.py` calls these functions. One walk takes the keys up to each query's own; the other
walks the reversed sequence and takes the keys behind it, where no query sees its own key:

    sums over j <= i    decay(i, j) = exp(sum decay[j+1..i])    a walk from the start
    sums over j > i     decay(i, j) = exp(sum decay[i+1..j])    a walk from the end

Row t' = T - 1 - t of the reversed sequence has the decay of step t + 1. XLA writes the arrays of
both walks next to each other, so that each batch entry becomes two, and the causal kernels run a
call with twice the batch. XLA adds up their numerators and denominators. The gradients are sums
over both walks, too: given 1 / den and e of each row, they are linear in the result of each walk. A
state that is given or returned belongs to the walk from the start.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax.ops.linear_attention.spec import Inputs, LinearState

# All functions here take rows [B, T, heads, columns], whatever the layout of the call.
TIME = 1


def _side_by_side(x: jax.Array, turned: jax.Array) -> jax.Array:
    """Interleaves two arrays [B, ..] to [2 B, ..]: entry b becomes entries 2 b and 2 b + 1."""
    return jnp.stack([x, turned], axis=1).reshape(-1, *x.shape[1:])


def _apart(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = x.reshape(-1, 2, *x.shape[1:])
    return x[:, 0], x[:, 1]


def of_walks(x: jax.Array, time: int = TIME) -> jax.Array:
    """x and x reversed along `time`, [2 B, ..]."""
    return _side_by_side(x, jnp.flip(x, time))


def of_first_walk(x: jax.Array) -> jax.Array:
    return _apart(x)[0]


def added_up(x: jax.Array, time: int = TIME) -> jax.Array:
    """Adds the rows [2 B, ..] of both walks: [B, ..] in float32."""
    first, turned = (half.astype(jnp.float32) for half in _apart(x))
    return first + jnp.flip(turned, time)


def _turned_decay(decay: jax.Array) -> jax.Array:
    """The decays of the reversed sequence; 0 in its first row, ahead of which there is no row."""
    behind = lax.slice_in_dim(decay, 1, None, axis=TIME)
    return jnp.flip(jnp.pad(behind, [(0, 0), (0, 1), (0, 0), (0, 0)]), TIME)


def gradient_of_decay(x: jax.Array) -> jax.Array:
    """The gradient of the decays [B, T, heads, columns], from the gradients of both walks."""
    first, turned = _apart(x)
    behind = lax.slice_in_dim(jnp.flip(turned, TIME), 0, x.shape[TIME] - 1, axis=TIME)
    return first + jnp.pad(behind, [(0, 0), (1, 0), (0, 0), (0, 0)])


def state_of_walks(state: LinearState) -> LinearState:
    """A state, or its cotangent, for the walk from the start, and 0 for the other walk."""
    return LinearState(*(_side_by_side(x, jnp.zeros_like(x)) for x in state))


def inputs_of_walks(inputs: Inputs) -> Inputs:
    """The arrays of both walks. In the reversed sequence segments are numbered from the end."""
    assert inputs.decay is not None
    state, runs = inputs.initial_state, inputs.kv_segments
    if runs is not None:
        runs = _side_by_side(runs, runs[:, -1:] - jnp.flip(runs, 1))
    return inputs._replace(
        q=of_walks(inputs.q),
        k=of_walks(inputs.k),
        v=of_walks(inputs.v),
        decay=_side_by_side(inputs.decay, _turned_decay(inputs.decay)),
        initial_state=None if state is None else state_of_walks(state),
        q_segments=runs,
        kv_segments=runs,
    )
