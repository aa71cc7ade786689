"""Softmax attention: what one call is, its arrays, and the rules that every backend shares."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax import backend
from ato_jax.meshes import partition, sharded

Broadcast = tuple[bool, bool, bool, bool]

# Rounding takes at most half of a last place, 127 of these shares of the number.
REST_UNITS = {"bfloat16": 2.0**-8 / 127, "float16": 2.0**-11 / 127}

# A softcap's slope, 1 - tanh^2, is 0 from here on: half of float64's epsilon, so that a saturated
# score has no gradient in any precision.
SMALLEST_SLOPE = 2.0**-53


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Everything static about one call.

    `left` and `right` bound the keys around a query's position, None for no bound; `causal` is
    `right = 0`. `offset` is the position of query 0 among the keys where it is static, None where
    it follows from `query_offset` or the lengths. `bias` and `mask` tell, for each axis of
    [B, H, T, S], whether the array has it in full (False: broadcast, of size 1). `keep_rest` asks
    for `Outputs.rest`.
    """

    B: int
    T: int
    S: int
    H: int
    G: int
    D: int
    V: int
    dtype: str
    scale: float
    layout: str = "bthd"
    left: int | None = None
    right: int | None = None
    offset: int | None = 0
    query_offset: bool = False
    bias: Broadcast | None = None
    mask: Broadcast | None = None
    segments: bool = False
    q_lengths: bool = False
    kv_lengths: bool = False
    softcap: float | None = None
    sinks: bool = False
    dropout_rate: float = 0.0
    return_lse: bool = False
    precision: str = "exact"
    keep_rest: bool = False

    def for_backward(self) -> AttentionSpec:
        """The same, of a forward whose outputs a backward will read."""
        return dataclasses.replace(self, keep_rest=self.dtype != "float32")

    def traits(self) -> dict[str, Any]:
        """What block sizes may depend on."""
        return {
            "dtype": self.dtype,
            "D": self.D,
            "V": self.V,
            "causal": self.right == 0,
            "window": self.left is not None or self.right not in (None, 0),
            "bias": _extent(self.bias),
            "mask": _extent(self.mask),
            "segments": self.segments,
            "softcap": self.softcap is not None,
            "dropout": self.dropout_rate > 0,
            "grouped": self.H > self.G,
            "precision": self.precision,
        }


def _extent(full: Broadcast | None) -> str:
    """Of a bias or a mask: a number for every pair takes memory and loads that others do not."""
    if full is None:
        return "none"
    return "pairs" if full[2] and full[3] else "broadcast"


class Inputs(NamedTuple):
    """The arrays of one call, in `spec.layout`; the optional ones None where not given."""

    q: jax.Array  # [B, T, H, D]
    k: jax.Array  # [B, S, G, D]
    v: jax.Array  # [B, S, G, V]
    bias: jax.Array | None = None  # [B|1, H|1, T|1, S|1]
    mask: jax.Array | None = None  # [B|1, H|1, T|1, S|1] bool
    sinks: jax.Array | None = None  # [H] float32
    q_segments: jax.Array | None = None  # [B, T] int32
    kv_segments: jax.Array | None = None  # [B, S] int32
    q_lengths: jax.Array | None = None  # [B] int32
    kv_lengths: jax.Array | None = None  # [B] int32
    query_offset: jax.Array | None = None  # [B] int32
    dropout_seed: jax.Array | None = None  # [2] uint32

    def partition_of_outputs(self, layout: str) -> Outputs:
        """`Outputs` of how each is sharded."""
        rows = partition(self.q)[:3]
        return Outputs(sharded(*rows, None), sharded(*rows))


class Outputs(NamedTuple):
    """Out and lse always; `lse`'s cotangent is zero unless `spec.return_lse`.

    `rest` is what rounding took from `out`, from backends that keep it. The gradients are made of
    do . v_j - do . out, which is small where one key has nearly all of a query's weight. In
    its place `triton.wide` leaves for its own backward what that makes them of.
    """

    out: jax.Array  # [B, T, H, V], v's dtype
    lse: jax.Array  # [B, T, H] float32 ([B, H, T] with layout "bhtd")
    rest: jax.Array | None = None  # [B, T, H, V] int8, in `REST_UNITS` of out

    def plain(self) -> Outputs:
        """Without what only a backward reads."""
        return self._replace(rest=None)


Residuals = backend.Residuals[Inputs, Outputs]


def positions_of_first_query(spec: AttentionSpec, inputs: Inputs) -> jax.Array:
    """The position of query 0 among the keys, [B] int32: query i stands i further on."""
    if spec.offset is not None:
        return jnp.full((spec.B,), spec.offset, jnp.int32)
    if inputs.query_offset is not None:
        return inputs.query_offset
    q_lengths = jnp.int32(spec.T) if inputs.q_lengths is None else inputs.q_lengths
    kv_lengths = jnp.int32(spec.S) if inputs.kv_lengths is None else inputs.kv_lengths
    return jnp.broadcast_to(kv_lengths - q_lengths, (spec.B,))


def within_bounds(spec: AttentionSpec, position: Any, key: Any) -> Any:
    """Whether a query at `position` may see the key at `key`, by causality and window alone."""
    visible = True
    if spec.left is not None:
        visible = key >= position - spec.left
    if spec.right is not None:
        visible = visible & (key <= position + spec.right)
    return visible


def _mix(bits: Any) -> Any:
    """A 32-bit finaliser (Ettinger's lowbias32): every input bit reaches every output bit."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)


def dropout_keep(rate: float, seed: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Which weights dropout keeps: a hash of the seed and of the position (b, h, i, j) alone.

    `seed` holds two uint32 scalars, the indices broadcast against each other. The same bits
    come out in forward and backward, on every backend, for every tile size.
    """

    def word(x: Any) -> Any:
        return jnp.asarray(x).astype(jnp.uint32)

    row = _mix(_mix(_mix(seed[0] ^ word(b)) + word(h)) + word(i))
    bits = _mix(_mix(row ^ seed[1]) + word(j))
    # 24 bits, so that the threshold is exact in a float32 and the comparison in an int32.
    threshold = round(rate * (1 << 24))
    return (bits >> 8).astype(jnp.int32) >= threshold
