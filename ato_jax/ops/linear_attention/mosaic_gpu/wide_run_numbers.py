"""Numbers of single rows for the role OWN of `wide_runs.py`: loads of factors, of z and u, and the
powers of two in float16. A warpgroup has 64 own rows; a number of each is [64] in registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_COLUMNS, OF_ROWS, Item, load
from ato_jax.ops.linear_attention.mosaic_gpu import powers, wide_powers
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_arrays import Pass
from ato_jax.ops.linear_attention.mosaic_gpu.wide_run_storage import (
    Runs,
    columns_of,
    rows_of,
)

Found = tuple[jax.Array, ...]  # [64, D], in parts of as many columns as a product has


class Powers(NamedTuple):
    """The powers of two by which a warpgroup scales its operands in float16 (`wide_powers.py`).
    Each is one number, or a number for each own row, [64]."""

    keys: Any  # c, which scales phi(k)
    row: Any  # scales phi(q) of the own rows in OUT; 1 in all other passes
    pairs: Any  # scales w[i, j]
    state: Any  # brings x_i T to the scale of the sum of w[i, j] p_j
    found: Any  # undoes the scale of that sum


class Own(NamedTuple):
    """A warpgroup's own rows."""

    chunk: Any  # its number in the sequence
    turn: Any  # at which the ring brings y and p of this chunk
    sums: jax.Array | None  # [64]: L of each row, with a decay
    limit: jax.Array | None  # [64]: with segments `Arrays.limit`
    limit_beyond: jax.Array | None  # [64]: and `Beyond.limit`
    powers: Powers | None  # in float16


def of_own(runs: Runs, item: Item, ref: Any) -> Any:
    """The numbers of the own rows in an array, [64]; None where there is no array."""
    if ref is None:
        return None
    return of_rows_in(runs, item, ref, runs.own_chunk(item, mosaic.group()))


def of_rows_in(runs: Runs, item: Item, ref: Any, chunk: Any) -> Any:
    """The numbers of a chunk's rows in an array, [64]; None where there is no array."""
    if ref is None:
        return None
    rows = rows_of(chunk)
    at = (item.batch, rows) if len(ref.shape) == 2 else (item.batch, runs.kv_head(item), rows)
    return load(ref.at[at], OF_ROWS, optimized=False)


def powers_of(runs: Runs, item: Item) -> Powers | None:
    """The powers of a unit whose x has been loaded; None in bfloat16. In DQ it also writes the
    largest magnitude of each row of g."""
    if runs.arrays.powers is None:
        return None
    keys, sums = (runs.power(item, number) for number in (wide_powers.KEYS, wide_powers.SUMS))
    row: Any = 1.0
    if runs.of in (Pass.OUT, Pass.DQ):
        largest = largest_of_x(runs)
        leave(runs, item, runs.left.cotangents, largest)
        if runs.of is Pass.OUT:
            row = powers.power_of(largest, powers.most_of(runs.spec))
            largest = largest * row
        of_pairs = largest * runs.power(item, wide_powers.PAIRS)
        pairs = powers.power_of(of_pairs, wide_powers.MOST)
        found = 1.0 / (row * (keys * pairs) if runs.of is Pass.OUT else pairs)
    else:
        of_values = runs.of is Pass.DV
        pairs = runs.power(item, wide_powers.SHARES if of_values else wide_powers.PAIRS)
        found = (1.0 if of_values else keys) / (pairs * runs.power(item, wide_powers.QUERIES))
    return Powers(keys, row, pairs, pairs / sums, found)


def largest_of_x(runs: Runs) -> jax.Array:
    """The largest magnitude in each own row, [64]: of phi(q) in OUT, of g in DQ."""
    found: Any = None
    for block in range(runs.blocks):
        x = load(runs.block_in(runs.x.at[mosaic.group()], block))
        if runs.of is Pass.OUT:
            largest = runs.phi.largest_of_rows(x, block * HALF)
        else:
            largest = jnp.max(jnp.abs(x.astype(F32)), axis=1)
        found = largest if found is None else jnp.maximum(found, largest)
    return found


def times(found: jax.Array, reads: Any) -> jax.Array:
    """`found` [64, columns] times `reads`, which is a number, a number for each row, or None."""
    if reads is None:
        return found
    return found * (mosaic.in_columns(reads, found.shape[1]) if jnp.ndim(reads) else reads)


def vector_of(runs: Runs, item: Item, block: int, side: int) -> jax.Array:
    """64 columns of z or u, repeated in all rows, [64, 64]."""
    if runs.has_vector:
        own = load(runs.own.vector.at[mosaic.group(), columns_of(block)], OF_COLUMNS)
    else:
        chunk = runs.chunk_of_vectors(item, mosaic.group(), side)
        at = item.batch, runs.kv_head(item), chunk, columns_of(block)
        own = load(runs.vectors[side].at[at], OF_COLUMNS, optimized=False)
    return mosaic.in_rows(own, C)


def vectors_times(runs: Runs, item: Item, block: int, reads: Sequence[Any]) -> jax.Array:
    """The sum over sides of 64 columns of z or u times the row's factor for that side, [64, 64]."""
    found = mosaic.zeros(C, HALF)
    for side, own in enumerate(reads):
        found = found + times(vector_of(runs, item, block, side), own)
    return found


def reads_of_states(runs: Runs, item: Item, own: Powers | None) -> list[Any]:
    """For each side the factor of x T, [64]; None stands for 1."""
    found = [of_own(runs, item, ref) for ref in runs.reads]
    if own is None:
        return found
    return [own.state if reads is None else reads * own.state for reads in found]


def block_in(found: Sequence[jax.Array], block: int) -> jax.Array:
    part, first = divmod(block * HALF, found[0].shape[1])
    return found[part][:, first : first + HALF]


def leave(runs: Runs, item: Item, ref: Any, of_rows: Any) -> None:
    """Writes a number for each own row, if there is an array for it."""
    if ref is not None:
        rows = rows_of(runs.own_chunk(item, mosaic.group()))
        ref.at[item.batch, item.head, rows][...] = of_rows
