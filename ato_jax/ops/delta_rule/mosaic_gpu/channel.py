"""A decay for each step and channel of the key (Kimi Delta Attention): what all its kernels share.

With L_t [D] the sum of log2 decays from a chunk's first step to t, a pair's weight is a sum over
channels, which no factor of rows or columns gives:

    a_t . b_s = sum_d a[t, d] b[s, d] exp2(L[t, d] - L[s, d])       s < t

A pair belongs to the level m = 1, 2, 4, .. 32 at which t and s lie in blocks of m steps that are
neighbours. Where M is the last step of the first of these,

    exp2(L_t - L_s) = exp2(L_t - L_M) exp2(L_M - L_s)

has two factors of at most 1, so it is a product of decayed rows at any decay. A level takes each
step once, on one side or the other, so a step has one factor exp2(-|L_t - L_M|).

Where neither half of a chunk loses more than `MOST_LOST` in any channel, one level has all pairs.
M is the chunk's middle, and a step has two factors, exp2(L_t - L_M) where it reads and
exp2(L_M - L_t) where it is read: one of them is the factor above, the other is one over it.

Sums over steps are products with matrices of 0 and `UNIT`, of the log2 decays in float16, by which
these are divided. So a pair's exponent x is off by x 2^-12 at most, its weight 2^x by 9e-5: as much
of it as is left. A difference of two sums from the chunk's start would lose small decays that
follow a large one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import F16, F32
from ato_jax.ops.delta_rule.mosaic_gpu import frame, steps
from ato_jax.ops.delta_rule.mosaic_gpu.frame import C
from ato_jax.ops.delta_rule.spec import LEAST_DECAY, DeltaRuleSpec, Inputs

# What float16 holds of log2 decays: from 185, that of `LEAST_DECAY`, down to 2e-7.
UNIT = 2.0**-8
# `LEAST_DECAY` as the kernels hold it: a float16 number, to base 2, over `UNIT`.
LEAST = float(np.float16(LEAST_DECAY * frame.LOG2_E / UNIT))
LEVELS = 6
# To base 2. One level multiplies rows with factors from 2^-64 to 2^64 by numbers that are as small
# or as large as dout: so dout of 1e-14 still keeps its digits there, and dout of 1e14 is finite.
MOST_LOST = 64.0


class Decays(NamedTuple):
    log_decays: jax.Array  # to base 2, over `UNIT`, in the layout of [B, T, H, D], float16
    kept: jax.Array  # what they leave of a state over each chunk, [B, H, chunks, D] float32
    one_level: jax.Array  # whether one level has all pairs, [B, H, chunks]


def decays_of(spec: DeltaRuleSpec, inputs: Inputs) -> Decays:
    assert inputs.decay is not None
    scaled = jnp.maximum(inputs.decay, LEAST_DECAY) * (frame.LOG2_E / UNIT)
    # Sums of the stored array take XLA less time than sums beside its conversion.
    found = lax.optimization_barrier(scaled.astype(F16))
    chunks, axis = frame.chunks_of(spec), spec.layout.index("t")
    padding = [(0, 0)] * 4
    padding[axis] = (0, chunks * C - spec.T)
    cut = jnp.pad(found.astype(F32), padding)
    cut = cut.reshape(*cut.shape[:axis], chunks, 2, C // 2, *cut.shape[axis + 1 :])
    halves = jnp.sum(cut, axis=axis + 2) * UNIT
    kept = jnp.exp2(jnp.sum(halves, axis=axis + 1))
    lost = jnp.min(halves, axis=(axis + 1, -1))
    if spec.layout == "bthd":
        kept, lost = (jnp.swapaxes(one, 1, 2) for one in (kept, lost))
    return Decays(found, kept, lost >= -MOST_LOST)


def numbers_of(spec: DeltaRuleSpec, inputs: Inputs, one_level: jax.Array) -> jax.Array:
    """[B, H, chunks, NUMBERS_OF_CHANNELS, 64] in float32: the first numbers of `steps.py`, and
    `one_level` in each step."""
    given = steps.given_of(spec, inputs._replace(decay=None))

    def cut(array: jax.Array, repeats: int = 1) -> jax.Array:
        """An array of the layout's [B, T, heads] as [B, H, chunks, 64]."""
        array = jnp.swapaxes(array, 1, 2) if spec.layout == "bthd" else array
        return jnp.repeat(array, repeats, axis=1).reshape(spec.B, spec.H, -1, C)

    beta = cut(given.beta)
    beta = jnp.where(jnp.abs(beta) < frame.LEAST_BETA, frame.LEAST_BETA, beta)
    of_keys, of_queries = jnp.ones_like(beta), jnp.full_like(beta, spec.scale)
    if spec.normalize_qk:
        group = spec.H // spec.G
        of_keys, of_queries = cut(given.of_keys, group), spec.scale * cut(given.of_queries, group)
    of_levels = jnp.broadcast_to(one_level[..., None], beta.shape).astype(F32)
    return jnp.stack((beta, of_keys, of_queries, of_levels), axis=3)


def tiling(spec: DeltaRuleSpec) -> mosaic.Tiling:
    """The tiles of log decays."""
    return dataclasses.replace(frame.tiling(spec), dtype=F16)


def _units(where: jax.Array) -> jax.Array:
    return jnp.where(where, UNIT, 0.0).astype(F16)


def to_middle(size: Any) -> jax.Array:
    """[64, 64]: what sums up L_t - L_M, or L_M - L_t, where blocks have `size` steps."""
    row, column = mosaic.hidden_position(0), mosaic.hidden_position(1)
    middle = (row | (2 * size - 1)) - size
    return _units((column > jnp.minimum(row, middle)) & (column <= jnp.maximum(row, middle)))


def from_start() -> jax.Array:
    """[64, 64]: what sums up L_t."""
    return _units(mosaic.hidden_position(0) >= mosaic.hidden_position(1))


def to_end() -> jax.Array:
    """[64, 64]: what sums up L_C - L_t, for the chunk's last step C."""
    return _units(mosaic.hidden_position(0) < mosaic.hidden_position(1))


@dataclasses.dataclass(frozen=True)
class Level:
    """The pairs of steps that lie in two neighbouring blocks of `size` steps.

    With `has_all` the size is 32, and pairs within one block belong to the level, too.
    """

    size: Any
    has_all: bool = False

    def pairs(self, turned: bool = False) -> jax.Array:
        """[64, 64]: which pairs (row, column) belong to the level; `turned`: (column, row)."""
        row, column = mosaic.hidden_position(int(turned)), mosaic.hidden_position(int(not turned))
        if self.has_all:
            return row > column
        return (row > column) & ((row ^ column) >= self.size) & ((row ^ column) < 2 * self.size)

    def reads(self, exponents: jax.Array) -> jax.Array:
        """The factors of rows that read, of the rows' -|L_t - L_M|, [64, 64]."""
        return jnp.exp2(self._turned(exponents, first=True))

    def is_read(self, exponents: jax.Array) -> jax.Array:
        """The factors of rows that are read, of the same exponents."""
        return jnp.exp2(self._turned(exponents, first=False))

    def _turned(self, exponents: jax.Array, first: bool) -> jax.Array:
        """Changes the sign of the exponents in the rows of one block, which `first` selects. At a
        level that does not have all pairs nothing is changed."""
        if not self.has_all:
            return exponents
        row = mosaic.hidden_position(0)
        return jnp.where(row < self.size if first else row >= self.size, -exponents, exponents)


def over_levels(one_level: Any, add: Callable[[Level, Any], Any], sums: Any) -> Any:
    """What `add` makes of sums, level by level. `one_level`: of the chunk, in shared memory. These
    are loops, one of which runs no times: behind the branches of a condition more is spilled."""
    at_once = lax.convert_element_type(one_level > 0, jnp.int32)

    def of_all(_: Any, sums: Any) -> Any:
        return add(Level(C // 2, has_all=True), sums)

    def one(number: Any, sums: Any) -> Any:
        return add(Level(lax.shift_left(jnp.int32(1), jnp.int32(number))), sums)

    sums = lax.fori_loop(0, at_once, of_all, sums)
    return lax.fori_loop(0, LEVELS * (1 - at_once), one, sums)


def exponents(weights: jax.Array, log_decays: list[Any]) -> list[jax.Array]:
    """weights @ the log decays of each block of channels, [64, 64]."""
    products = ((mosaic.zeros(C, C), [(weights, one)]) for one in log_decays)
    return list(mosaic.multiply(*products))


def factors(weights: jax.Array, log_decays: list[Any]) -> list[jax.Array]:
    return [jnp.exp2(one) for one in exponents(weights, log_decays)]
