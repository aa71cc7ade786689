"""The delta rule as a user may write it in plain JAX, to be compared with `implementation="xla"`.

Both forms take q, k, v [B, T, H, D], a decay if there is one, and beta [B, T, H], and start from a
state of zeros. They have none of the library's options, and their keys may not be nearly alike.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention_jax import Attend
from benchmarks.cases import Case


def by_steps(case: Case) -> Attend:
    """The recurrence, in one `lax.scan`."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *gates: jax.Array) -> jax.Array:
        def step(state: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            q, k, v, *decay, beta = arrays  # [B, H, D], ..., [B, H]
            for one in decay:
                factor = jnp.exp(one if one.ndim == 3 else one[..., None])
                state = factor[..., None] * state
            written = beta[..., None] * (v - jnp.einsum("bhd,bhdv->bhv", k, state))
            state = state + k[..., None] * written[..., None, :]
            return state, jnp.einsum("bhd,bhdv->bhv", q, state)

        arrays = tuple(jnp.moveaxis(array, 1, 0) for array in (q, k, v, *gates))
        state = jnp.zeros((case.B, case.H, case.D, v.shape[-1]), v.dtype)
        return case.D**-0.5 * jnp.moveaxis(jax.lax.scan(step, state, arrays)[1], 0, 1)

    return attend


def by_chunks(steps: int, case: Case) -> Attend:
    """The WY form in chunks of so many steps, one head's decay for all channels; the inverse of a
    chunk's triangle as a product of powers, (I + N) (I + N^2) (I + N^4) ..."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *gates: jax.Array) -> jax.Array:
        def chunks(array: jax.Array) -> jax.Array:
            """[chunks, B, H, steps, ...]."""
            array = array.reshape(case.B, -1, steps, *array.shape[2:])
            return jnp.moveaxis(array, (1, 3), (0, 2))

        def chunk(state: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            q, k, v, *decay, beta = arrays
            turned = jnp.swapaxes(k, -1, -2)
            sums = jnp.cumsum(decay[0] if decay else jnp.zeros_like(beta), -1)
            seen = np.tri(steps, dtype=bool)
            between = jnp.exp(jnp.where(seen, sums[..., None] - sums[..., None, :], -jnp.inf))
            power = -beta[..., None] * jnp.tril((k @ turned) * between, -1)
            inverse, reach = jnp.eye(steps) + power, 2
            while reach < steps:
                power = power @ power
                inverse, reach = inverse + inverse @ power, 2 * reach
            before = jnp.exp(sums)[..., None]
            written = inverse @ (beta[..., None] * (v - (before * k) @ state))
            out = (before * q) @ state + ((q @ turned) * between) @ written
            after = jnp.exp(sums[..., -1:] - sums)[..., None, :]
            return before[..., -1:, :] * state + (turned * after) @ written, out

        arrays = tuple(chunks(array) for array in (case.D**-0.5 * q, k, v, *gates))
        state = jnp.zeros((case.B, case.H, case.D, v.shape[-1]), v.dtype)
        out = jax.lax.scan(jax.checkpoint(chunk), state, arrays)[1]
        return jnp.moveaxis(out, (0, 2), (1, 3)).reshape(case.B, case.T, case.H, -1)

    return attend
