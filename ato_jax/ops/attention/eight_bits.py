"""Calls on float8_e4m3fn arrays as kernels read them: 8 bits and a scale for each head.

    x = values * scale        values [B, T, H, D] of float8_e4m3fn, scale [B, H] float32

The spec of such a call (`Float8Spec`) is that of the same call on arrays of `spec.dtype`, for which
the values stand. Backends of its own (`reading.py`) take `Float8Inputs` and have no derivative.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs


class Float8Spec(AttentionSpec):
    """A call whose q, k and v kernels read as 8 bits."""

    @classmethod
    def of(cls, spec: AttentionSpec) -> Float8Spec:
        names = [field.name for field in dataclasses.fields(spec)]
        return cls(**{name: getattr(spec, name) for name in names})


def reads_eight_bits(spec: AttentionSpec) -> bool:
    return isinstance(spec, Float8Spec)


class Float8Inputs(NamedTuple):
    """The arrays of one call: q, k and v of `arrays` are of 8 bits."""

    arrays: Inputs
    q_scale: jax.Array  # [B, H] float32
    k_scale: jax.Array  # [B, G]
    v_scale: jax.Array  # [B, G]

    def partition_of_outputs(self, layout: str) -> Outputs:
        """`Outputs` with a `PartitionSpec` in place of each array."""
        return self.arrays.partition_of_outputs(layout)
