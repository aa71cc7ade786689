"""The options as functions of a tile's pairs: which are hidden, which bias, which are dropped.

Each option is a function of two indices, `query` and `key`, that broadcast against each other:
[block_q, 1] and [1, block_k], or transposed. Its arrays are whole refs, read at these indices.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ato_jax.launch import triton as plgpu
from ato_jax.ops.attention.spec import (
    AttentionSpec,
    Broadcast,
    Inputs,
    Limits,
    Ranges,
    dropout_keep,
    limits_array,
)
from ato_jax.ops.attention.triton.common import (
    BIASED_UNIT,
    multiply_add,
    quotient,
    score_factor,
)
from ato_jax.ops.attention.triton.visibility import (
    block_ranges,
    intersection,
    limits_of,
    part_of,
    query_bounds,
    segment_ranges,
)

# Triton's offsets into arrays of up to 2^32 bytes are signed 32-bit numbers, which do not reach
# beyond this many bytes.
WIDEST_BYTES = 1 << 31


class Options(NamedTuple):
    """The arrays beside q, k and v, or their refs; None for options that are not given."""

    limits: Any = None  # [B, 4] int32
    ranges: Any = None  # [B, blocks, 4] int32
    q_segments: Any = None  # [B, T] int32
    kv_segments: Any = None  # [B, S] int32
    bias: Any = None  # [B|1, H|1, T|1, S|1]
    mask: Any = None  # [B|1, H|1, T|1, S|1]
    sinks: Any = None  # [H] float32
    seed: Any = None  # [2] uint32


def options_of(
    spec: AttentionSpec, inputs: Inputs, own: str, rows: int, block: int
) -> Options:
    """The arrays for programs that own `rows` queries or keys and go over blocks of the other."""
    ranges = None
    if inputs.q_segments is not None and inputs.kv_segments is not None:
        sides = (inputs.q_segments, inputs.kv_segments)
        ranges = segment_ranges(*(sides if own == "queries" else sides[::-1]), rows, block)
    mask = inputs.mask
    if mask is not None and mask.size > WIDEST_BYTES:
        mask = mask.astype(jnp.int16)
    return Options(
        limits_array(spec, inputs),
        ranges,
        inputs.q_segments,
        inputs.kv_segments,
        inputs.bias,
        mask,
        inputs.sinks,
        inputs.dropout_seed,
    )


class Side(NamedTuple):
    """A tile's queries or keys: their indices, and their segment ids where these are compared."""

    indices: jax.Array
    segments: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The pairs of batch entry `b`, for a program that owns queries, keys, or tiles of both."""

    spec: AttentionSpec
    refs: Options
    b: Any
    own: str  # "queries", "keys" or "tiles"
    limits: Limits

    @classmethod
    def of(cls, spec: AttentionSpec, refs: Options, b: Any, own: str) -> Pairs:
        return cls(spec, refs, b, own, limits_of(spec, refs.limits, b))

    def ranges(self, n: Any, rows: int, block: int, part: Any, parts: int) -> Ranges:
        """The other side's blocks for the n-th block of the program's own rows."""
        low, high, own_length, length = self.limits
        bounds = (low, high)
        if self.own == "keys":
            bounds, own_length, length = query_bounds(bounds), length, own_length
        start = n * rows
        ranges = block_ranges(bounds, start, rows, length, block)
        if not isinstance(own_length, int):
            # Pallas's Triton lowering gives a select between two Python ints the dtype of its
            # condition, bool; `ranges.end` is an int where the other side's length is static.
            end = jnp.where(start < own_length, jnp.int32(ranges.end), 0)
            ranges = Ranges(*(jnp.minimum(bound, end) for bound in ranges))
        if self.refs.ranges is not None:
            allowed = Ranges(*(self.refs.ranges[self.b, n, np.int32(bound)] for bound in range(4)))
            ranges = intersection(ranges, allowed)
        return ranges if parts == 1 else part_of(ranges, part, parts)

    def queries(self, indices: jax.Array, masked: bool = True) -> Side:
        return self._side(indices, masked, self.refs.q_segments, self.spec.T)

    def keys(self, indices: jax.Array, masked: bool = True) -> Side:
        return self._side(indices, masked, self.refs.kv_segments, self.spec.S)

    def _side(self, indices: jax.Array, masked: bool, segments: Any, length: int) -> Side:
        if segments is None or not masked:
            return Side(indices)
        mask = indices < length
        return Side(indices, plgpu.load(segments.at[self.b, indices], mask=mask, other=0))

    def visible(self, h: Any, masked: bool, query: Side, key: Side) -> jax.Array | None:
        """Which pairs are visible; None where all are. Positions hide none unless `masked`."""
        rules = []
        if masked:
            limits = self.limits
            if limits.low is not None:
                rules.append(key.indices >= query.indices + limits.low)
            if limits.high is not None:
                rules.append(key.indices <= query.indices + limits.high)
            # Results of the program's own rows beyond their length are replaced at the end.
            if self.own != "keys":
                rules.append(key.indices < limits.kv_length)
            if self.own != "queries":
                rules.append(query.indices < limits.q_length)
            if query.segments is not None and key.segments is not None:
                rules.append(query.segments == key.segments)
        if self.spec.mask is not None:
            mask = self._plane(self.refs.mask, self.spec.mask, h, query, key)
            rules.append(mask if mask.dtype == jnp.bool_ else mask != 0)
        if not rules:
            return None
        seen = rules[0]
        for rule in rules[1:]:
            seen = seen & rule
        return seen

    def biased(self, h: Any, raw: jax.Array, query: Side, key: Side) -> tuple[jax.Array, float]:
        """Scores with the bias added, and the factor that brings them to their units."""
        factor = score_factor(self.spec)
        if self.spec.bias is None:
            return raw, factor
        bias = self._plane(self.refs.bias, self.spec.bias, h, query, key)
        return multiply_add(raw, factor, bias.astype(jnp.float32) * BIASED_UNIT), 1.0

    def kept(self, h: Any, query: Side, key: Side) -> jax.Array | None:
        """Which weights dropout keeps; None without dropout."""
        rate = self.spec.dropout_rate
        if not rate:
            return None
        seed = tuple(self.refs.seed[word] for word in range(self.refs.seed.shape[0]))
        return dropout_keep(rate, seed, self.b, h, query.indices, key.indices)

    def _plane(self, ref: Any, full: Broadcast, h: Any, query: Side, key: Side) -> jax.Array:
        """A tile of a bias or mask, of size 1 along the axes that the array lacks."""
        of_batch, of_head, of_query, of_key = full
        index = (
            self.b if of_batch else 0,
            h if of_head else 0,
            query.indices if of_query else 0,
            key.indices if of_key else 0,
        )
        rules = []
        if of_query:
            rules.append(query.indices < self.spec.T)
        if of_key:
            rules.append(key.indices < self.spec.S)
        if not rules:
            return ref[index]
        shape = jnp.broadcast_shapes(*(rule.shape for rule in rules))
        inside = jnp.broadcast_to(rules[0], shape)
        for rule in rules[1:]:
            inside = inside & rule
        other = False if ref.dtype == jnp.bool_ else 0
        return plgpu.load(ref.at[index], mask=inside, other=other)


def batch_and_part(z: Any, parts: int) -> tuple[Any, Any]:
    """The batch entry of a program, and the part of the other side that it goes over."""
    b = quotient(z, parts)
    return b, z - b * parts
