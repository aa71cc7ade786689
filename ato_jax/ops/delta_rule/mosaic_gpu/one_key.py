"""ddecay of a chunk of one key, all of whose keys have one direction, as `corrections.py` finds it.

There even exact states leave a difference of large sums in `gradient.py`: with a beta of 1 a step
takes all that the state has along the key, and a decay's gradient is a thousandth of the terms. So
what is stored as corrections is all of ddecay, in place of what `gradient.py` finds. Let k be the
chunk's first key, k_t = c_t k the key of step t, and S+ the part of S across k, which no step of
the chunk changes but by its decay. With the letters of `corrections.py`

    ddecay_t = (exp(decay_t) k_t S_(t-1)) . dr_t (1 / beta_t - |k_t|^2) / |k_t|^2   along k
               + sum over s >= t of scale * exp(L_s) dout_s . (q_s S+)              across k
               + exp(L_C) <S+, dS~> + exp(L_C) <S+, d>

since dr_t / beta_t is k_t times the state's gradient, as step t finds it. S_(t-1) has c_s u_s of
each earlier step s along k. The part along k is one product for each step and column of v, of a
factor that is small where beta_t |k_t|^2 is nearly 1. The walk that carries S stores all but the
last term. That is of the walk that knows d, which takes S+ of S~: where S is along the key, only
rounding is left of S+ there, and counts as 0.

Whether keys have one direction is an exact test, though each c_t is rounded. Numbers of bfloat16
have 8 bits. So where k_t is not a multiple of k, two of its elements have ratios to those of k that
differ by 2^-16 or more, and one is off from any c_t k by more than `OFF`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_COLUMNS, OF_ROWS, load
from ato_jax.ops.delta_rule.mosaic_gpu import frame
from ato_jax.ops.delta_rule.mosaic_gpu.chunk_gradient import dot
from ato_jax.ops.delta_rule.mosaic_gpu.frame import C

# Below it a key's |k_t|^2, without its factor, is taken as 0: it has to be divided by.
LEAST_SQUARE = 1e-30
# What c_t times an element of k may be off by from that of k_t, as a share of it. Rounding in
# float32 takes less, of terms that all have one sign.
OFF = 2.0**-18
# The most of an element of S~ that is across the key where all of S is along it: half of it is the
# element's own rounding, 2^-9, the other half that of what its column has along the key.
ROUNDING = 1.01 * 2.0**-8


class OneKey(NamedTuple):
    """The key whose multiples all steps of a chunk have, without its factor."""

    blocks: list[Any]  # [64] float32 in shared memory, of each block of D
    square: jax.Array  # [64] of rows, equal numbers: the sum of its elements' squares
    multiples: Any  # [64] float32 in shared memory: c_t, what it is multiplied by in each step

    def along(self, state: Iterable[jax.Array]) -> jax.Array:
        """[64] of rows: its products with v's columns of a transposed state."""
        return total(
            jnp.sum(block * in_all(key), axis=1)
            for block, key in zip(state, self.blocks, strict=True)
        )

    def across(self, state: Iterable[jax.Array], along: jax.Array) -> Iterator[jax.Array]:
        """A transposed state without its part along the key, block by block."""
        for block, key in zip(state, self.blocks, strict=True):
            yield block - mosaic.in_columns(along / self.square, HALF) * in_all(key)

    def across_rounded(self, tiles: list[Any]) -> Iterator[jax.Array]:
        """The part across the key of a state that was rounded, [64, 64] in each of `tiles`, and 0
        where it may be rounding alone."""
        along = self.along(load(tile).astype(F32) for tile in tiles)
        state = (load(tile).astype(F32) for tile in tiles)
        for across, tile in zip(self.across(state, along), tiles, strict=True):
            least = ROUNDING * jnp.abs(load(tile).astype(F32))
            yield jnp.where(jnp.abs(across) > least, across, 0.0)


def find(tiles: list[Any], steps: Any, keys: Any, sums: Any) -> tuple[OneKey, Any]:
    """The first key of a chunk, and whether all others are multiples of it and none is 0.

    Args:
      tiles: the chunk's k.
      steps: how many steps the chunk has.
      keys: room for a number for each column of k, and behind them one for each row,
        [D / 64 + 1 ..., 64] float32.
      sums: room for two numbers for each row, [2, 64] float32.
    """
    first = mosaic.hidden_position(1) == 0
    for n, tile in enumerate(tiles):
        rows = mosaic.load_transposed(tile).astype(F32)
        keys.at[n][...] = jnp.sum(jnp.where(first, rows, 0.0), axis=1)
    plgpu.commit_smem()
    blocks = [keys.at[n] for n in range(len(tiles))]
    within = mosaic.hidden_position(0) < steps

    def rows_of(tile: Any, key: Any) -> jax.Array:
        """[64, 64]: a block of the chunk's keys. Rows behind the last step count as the first."""
        return jnp.where(within, load(tile).astype(F32), in_all(key))

    pairs = list(zip(tiles, blocks, strict=True))
    square = total(jnp.sum(in_all(key) * in_all(key), axis=1) for key in blocks)
    multiples = total(jnp.sum(rows_of(*pair) * in_all(pair[1]), axis=1) for pair in pairs) / square

    def differing(tile: Any, key: Any) -> jax.Array:
        """[64] of rows: how many elements are not those of a multiple of the key."""
        rows = rows_of(tile, key)
        off = jnp.abs(rows - mosaic.in_columns(multiples, HALF) * in_all(key))
        return jnp.sum(jnp.where(off > OFF * jnp.abs(rows), 1.0, 0.0), axis=1)

    own = keys.at[len(tiles)]
    own[...] = multiples
    # Also where the first key is 0, whose multiples are NaN.
    is_long = multiples * multiples * square > LEAST_SQUARE
    sums.at[0][...] = jnp.where(is_long, total(differing(*pair) for pair in pairs), 1.0)
    plgpu.commit_smem()
    sums.at[1][...] = jnp.sum(in_all(sums.at[0]), axis=1)
    plgpu.commit_smem()
    equal = sums[1, 0] == 0
    plgpu.commit_smem()  # ahead of what overwrites the sums
    return OneKey(blocks, square, own), equal


def dots_along(
    key: OneKey, along: jax.Array, room: Any, numbers: Any, dr: list[Any], written: tuple[Any, Any]
) -> jax.Array:
    """[64] of rows: ddecay's part along a chunk's one key.

    Args:
      along: the key's products with S.
      room: for these, [64] float32.
      numbers: those of the chunk's steps.
      dr: its tiles [64, 64].
      written: those of u, in two parts.
    """
    room[...] = along
    plgpu.commit_smem()
    of_keys = load(numbers.at[frame.OF_KEYS], OF_ROWS)
    square = key.square * of_keys
    weights = mosaic.in_columns(square, C) * frame.decays_of_pairs(numbers)
    weights = weights * in_all(numbers.at[frame.OF_KEYS]) * in_all(key.multiples)
    earlier = mosaic.hidden_position(0) > mosaic.hidden_position(1)
    parts = frame.in_two_parts(jnp.where(earlier, weights, 0.0))
    from_start = mosaic.in_columns(load(numbers.at[frame.RECALLED], OF_ROWS), HALF)
    (recalled,) = mosaic.multiply((from_start * in_all(room), frame.products(parts, written)))
    multiples = load(key.multiples, OF_ROWS)
    square = square * of_keys * (multiples * multiples)
    beta = load(numbers.at[frame.BETA], OF_ROWS)
    dots = total(dot(part, recalled) for part in dr) * multiples
    return dots * ((1 / beta - square) / square)


def in_all(numbers: Any) -> jax.Array:
    """One number for each column, [64] in shared memory, in all of 64 rows."""
    return mosaic.in_rows(load(numbers, OF_COLUMNS), C)


def total(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)
