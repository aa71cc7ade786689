"""The delta rule: what one call is, its arrays, and the rules that every backend shares."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax import backend
from ato_jax.meshes import partition, sharded

# The strongest log-decay that sums take: exp of it is 0 in float32, and -inf would make NaN.
LEAST_DECAY = -128.0


@dataclasses.dataclass(frozen=True)
class DeltaRuleSpec:
    """Everything static about one call.

    `decay` is None, "step" ([B,T,H]) or "channel" ([B,T,H,D]). `segments`, `lengths` and
    `initial_state` tell whether the call has these arrays.
    """

    B: int
    T: int
    G: int
    H: int
    D: int
    V: int
    dtype: str
    scale: float
    normalize_qk: bool = False
    layout: str = "bthd"
    decay: str | None = None
    segments: bool = False
    lengths: bool = False
    initial_state: bool = False
    return_state: bool = False
    precision: str = "exact"

    @property
    def S(self) -> int:
        """Queries and keys are the same steps."""
        return self.T

    def for_backward(self) -> DeltaRuleSpec:
        """The spec of a forward pass whose outputs a backward pass reads."""
        return self

    def traits(self) -> dict[str, Any]:
        """What block sizes may depend on."""
        return {
            "dtype": self.dtype,
            "D": self.D,
            "V": self.V,
            "group": self.H // self.G,
            "decay": self.decay or "none",
            "segments": self.segments,
            "normalize_qk": self.normalize_qk,
            "precision": self.precision,
        }


class Inputs(NamedTuple):
    """The arrays of one call, those with an axis T in `spec.layout`.

    A step's segment is the number of its run, counted from 0 and never decreasing along T; steps
    beyond the length have that of the last step within it.
    """

    q: jax.Array  # [B, T, G, D]
    k: jax.Array  # [B, T, G, D]
    v: jax.Array  # [B, T, H, V]
    beta: jax.Array  # [B, T, H] float32
    decay: jax.Array | None = None  # [B, T, H] | [B, T, H, D] float32
    initial_state: jax.Array | None = None  # [B, H, D, V] float32
    segments: jax.Array | None = None  # [B, T] int32
    lengths: jax.Array | None = None  # [B] int32

    def partition_of_outputs(self, layout: str) -> Outputs:
        """`Outputs` of how each is sharded."""
        rows = partition(self.v)[:3]
        return Outputs(sharded(*rows, None), sharded(rows[0], rows[layout.index("h")], None, None))


class Outputs(NamedTuple):
    """Both always; the state's cotangent is zero unless `spec.return_state`."""

    out: jax.Array  # [B, T, H, V], v's dtype
    state: jax.Array  # [B, H, D, V] float32, after the last step

    def plain(self) -> Outputs:
        """Without what only a backward reads: all of it."""
        return self


Residuals = backend.Residuals[Inputs, Outputs]


def unit(x: jax.Array) -> jax.Array:
    """Each row divided by its length; a row of zeros stays one, with a derivative of 0."""
    return x * inverse_lengths(x)[..., None]


def inverse_lengths(x: jax.Array) -> jax.Array:
    """One over the length of each row [...]; 0 for a row of zeros, with a derivative of 0."""
    squares = jnp.sum(x * x, axis=-1)
    empty = squares == 0
    return jnp.where(empty, 0, jax.lax.rsqrt(jnp.where(empty, 1, squares)))
