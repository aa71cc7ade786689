"""Calls on float8_e4m3fn arrays as kernels read them: 8 bits and a scale for each head.

    x = values * scale        values [B, T, H, D] of float8_e4m3fn, scale [B, H] float32

The spec of such a call is that of the same call on arrays of `spec.dtype`, for which the values
stand, with `eight_bits` set. Backends of its own (`reading.py`) take `Float8Inputs` and have no
derivative.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from ato_jax.ops.attention.spec import Inputs, Outputs


class Float8Inputs(NamedTuple):
    """The arrays of one call: q, k and v of `arrays` are of 8 bits."""

    arrays: Inputs
    q_scale: jax.Array  # [B, H] float32
    k_scale: jax.Array  # [B, G]
    v_scale: jax.Array  # [B, G]

    def partition_of_outputs(self, layout: str) -> Outputs:
        """`Outputs` with a `PartitionSpec` in place of each array."""
        return self.arrays.partition_of_outputs(layout)
