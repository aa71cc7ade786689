"""Calls on float8_e4m3fn arrays as kernels read them: 8 bits and a scale for each head.

    x = values * scale        values [B, T, H, D] of float8_e4m3fn, scale [B, H] float32

The spec of such a call is that of the same call on arrays of `spec.dtype`, for which the values
stand. Backends of its own (`reading.py`) take `Float8Inputs` and have no derivative.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from ato_jax.ops.linear_attention.spec import Inputs, LinearState, Outputs


class Float8Inputs(NamedTuple):
    """The arrays of one call, with q, k and v in `spec.layout`."""

    q: jax.Array  # [B, T, H, D] of 8 bits
    k: jax.Array  # [B, S, G, D]
    v: jax.Array  # [B, S, G, V]
    q_scale: jax.Array  # [B, H] float32
    k_scale: jax.Array  # [B, G]
    v_scale: jax.Array  # [B, G]
    decay: jax.Array | None = None  # as in `Inputs`
    initial_state: LinearState | None = None
    q_lengths: jax.Array | None = None  # [B] int32
    kv_lengths: jax.Array | None = None  # [B] int32

    def without_scales(self) -> Inputs:
        """These as arrays of the other backends' kernels, which have no scales."""
        return Inputs(
            self.q, self.k, self.v, self.decay, self.initial_state,
            q_lengths=self.q_lengths, kv_lengths=self.kv_lengths,
        )  # fmt: skip

    def partition_of_outputs(self, layout: str) -> Outputs:
        """`Outputs` of how each is sharded."""
        return self.without_scales().partition_of_outputs(layout)
