"""How a sequence is cut for these passes, and for the kernels between which they run.

A sequence of T steps is cut into pieces of whole chunks, and a chunk has C steps. The decays of a
chunk are prefix sums from its first step on, to base 2.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.decay import (
    MOST_LOST_IN_FLOAT16,
    MOST_LOST_OF_CHUNK,
    MOST_LOST_OF_TURN,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.triton.arithmetic import LOG2_E as LOG2_E

C = 64  # steps of a chunk
TILE_COLUMNS = 128  # columns of a tile: one head's, or those of two heads of 64
# WGMMA needs N >= 8, so a vector operand is replicated across 8 columns.
ALIKE = 8
# A vector that is rounded takes half of them, and what the rounding left takes the other half.
PARTS = ALIKE // 2
# Chunks over which the gradient of a decay per step and channel is summed at once, and their steps.
CHUNKS_OF_RUN = 4
RUN = CHUNKS_OF_RUN * C
# What half a chunk may lose where runs of rows are walked of which each sees both sides. No feature
# carries a factor there, and in the sums for the decay's gradient a pair of a row with itself is
# none. But in float16 states that lose 2^-12 or more in each step are near its smallest numbers: at
# T = 520 a decay of -80 in every step left half of the gradient.
MOST_LOST_OF_BOTH_SIDES = 384.0
# `MOST_LOST_OF_TURN` where features may be as large as exp's, or where the gradients read features
# of 0 as 2^-60 (`flow_features.py`), which is normal in bfloat16 beside a factor of 2^-60.
MOST_LOST_OF_TURN_ANY_MAP = 60.0


class Cut(Protocol):
    """A sequence in `pieces` of `rows` steps each."""

    @property
    def rows(self) -> int: ...

    @property
    def pieces(self) -> int: ...


class OfPiece(Protocol):
    """Work on one piece."""

    @property
    def piece(self) -> Any: ...


def whole_chunks(length: int) -> int:
    """The length, rounded up to whole chunks."""
    return int(pl.cdiv(length, C)) * C


def in_runs(spec: LinearAttentionSpec) -> bool:
    """Whether heads of up to 128 columns are walked in runs of rows, too, as wider ones are: where
    queries see both sides, through a decay per head or step or within their segment in float16, and
    through both in bfloat16."""
    if spec.causal or spec.dtype == "float32" or spec.decay == "channel":
        return False
    options = (spec.segments is not None) + (spec.decay is not None)
    return options == 2 or options == 1 and spec.dtype == "float16"


def heads_of_tile(spec: LinearAttentionSpec) -> int:
    """How many heads share a tile's columns: one of 128, or two of up to 64. Where every query
    sees every key alike or through a decay per channel, in float32, and in runs of rows, no head
    shares a tile."""
    in_pairs = (spec.causal or spec.segments or spec.decay) and spec.dtype != "float32"
    in_pairs = in_pairs and not in_runs(spec) and (spec.causal or spec.decay != "channel")
    return 2 if in_pairs and 2 * max(spec.D, spec.V) <= TILE_COLUMNS else 1


def most_lost(spec: LinearAttentionSpec) -> float:
    """How much a half of a chunk that is not steep may lose, an exponent of 2."""
    if not spec.causal and (in_runs(spec) or max(spec.D, spec.V) > TILE_COLUMNS):
        return MOST_LOST_OF_BOTH_SIDES
    return MOST_LOST_IN_FLOAT16 if spec.dtype == "float16" else MOST_LOST_OF_CHUNK


def most_lost_of_turn(spec: LinearAttentionSpec) -> float:
    """How much half of a turn may lose, with a decay per step and channel (`channel_turns.py`)."""
    if spec.dtype == "float16":
        return MOST_LOST_IN_FLOAT16
    is_bounded = spec.feature_map.name in ("elu1", "relu", "relu2", "softplus")
    return MOST_LOST_OF_TURN if is_bounded else MOST_LOST_OF_TURN_ANY_MAP


def is_steep(spec: LinearAttentionSpec, middle: Any, last: Any) -> Any:
    """Whether a chunk loses more than `most_lost` in either half, from the prefix sums at the last
    row of the first half and at the last row."""
    return jnp.minimum(middle, last - middle) < -most_lost(spec)
