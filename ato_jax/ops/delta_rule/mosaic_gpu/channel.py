"""A decay for each step and channel of the key (Kimi Delta Attention): what all its kernels share.

With L_t [D] the sum of log2 decays from a chunk's first step to t, a pair's weight is a sum over
channels, which no factor of rows or columns gives:

    a_t . b_s = sum_d a[t, d] b[s, d] exp2(L[t, d] - L[s, d])       s < t

A pair belongs to the level m = 1, 2, 4, .. 32 at which t and s lie in blocks of m steps that are
neighbours. Where M is the last step of the first of these,

    exp2(L_t - L_s) = exp2(L_t - L_M) exp2(L_M - L_s)

has two factors of at most 1, so it is a product of decayed rows at any decay. A level takes each
step once, on one side or the other, so a step has one factor exp2(-|L_t - L_M|).

Sums over steps are products with matrices of 0 and `UNIT`, of the log2 decays in float16, by which
these are divided. So a pair's exponent x is off by x 2^-12 at most, its weight 2^x by 9e-5: as much
of it as is left. A difference of two sums from the chunk's start would lose small decays that
follow a large one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.mosaic import F16, F32
from ato_jax.ops.delta_rule.mosaic_gpu import frame, steps
from ato_jax.ops.delta_rule.mosaic_gpu.frame import C
from ato_jax.ops.delta_rule.spec import LEAST_DECAY, DeltaRuleSpec, Inputs

# What float16 holds of log2 decays: from 185, that of `LEAST_DECAY`, down to 2e-7.
UNIT = 2.0**-8
LEVELS = 6


def log_decays(spec: DeltaRuleSpec, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The log2 decays over `UNIT` in float16, in the layout of [B, T, H, D]; and what they leave of
    a state over each chunk, [B, H, chunks, D] float32."""
    assert inputs.decay is not None
    scaled = jnp.maximum(inputs.decay, LEAST_DECAY) * (frame.LOG2_E / UNIT)
    found = scaled.astype(F16)
    chunks, axis = frame.chunks_of(spec), spec.layout.index("t")
    padding = [(0, 0)] * 4
    padding[axis] = (0, chunks * C - spec.T)
    cut = jnp.pad(found.astype(F32), padding)
    cut = cut.reshape(*cut.shape[:axis], chunks, C, *cut.shape[axis + 1 :])
    kept = jnp.exp2(jnp.sum(cut, axis=axis + 1) * UNIT)
    return found, jnp.swapaxes(kept, 1, 2) if spec.layout == "bthd" else kept


def numbers_of(spec: DeltaRuleSpec, inputs: Inputs) -> jax.Array:
    """[B, H, chunks, NUMBERS_OF_CHANNELS, 64] in float32: the first numbers of `steps.py`."""
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
    return jnp.stack((beta, of_keys, of_queries), axis=3)


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


def of_level(size: Any, turned: bool = False) -> jax.Array:
    """[64, 64]: which pairs (row, column) belong to the level; `turned`: (column, row)."""
    row, column = mosaic.hidden_position(int(turned)), mosaic.hidden_position(int(not turned))
    return (row > column) & ((row ^ column) >= size) & ((row ^ column) < 2 * size)


def factors(weights: jax.Array, log_decays: list[Any]) -> list[jax.Array]:
    """exp2 of weights @ the log decays of each block of channels, [64, 64]."""
    sums = mosaic.multiply(*((mosaic.zeros(C, C), [(weights, one)]) for one in log_decays))
    return [jnp.exp2(one) for one in sums]
