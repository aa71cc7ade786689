"""Numbers of the own rows in `wide_run_rows.py`: what arrays hold of them, factors, and powers of
two in float16."""

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
    """The factors by which a warpgroup scales its numbers in float16 (`wide_powers.py`). Each is a
    number, or one number for each of its rows, [64]."""

    keys: Any  # c, which scales phi(k)
    row: Any  # scales phi(q) of the own rows in OUT; 1 in all other passes
    pairs: Any  # scales w[i, j]
    state: Any  # scales x_i T as the sum of w[i, j] p_j is scaled
    found: Any  # undoes the scale of that sum


class Own(NamedTuple):
    """A warpgroup's own rows: their chunk, the turn at which it comes, L of each row with a decay,
    and with segments the limits of what each row sees, [64]; and the powers of two, in float16."""

    chunk: Any
    turn: Any
    sums: jax.Array | None
    limit: jax.Array | None
    limit_beyond: jax.Array | None
    powers: Powers | None


def of_own(runs: Runs, item: Item, ref: Any) -> Any:
    """What an array holds of the own rows, [64]; None where there is no array."""
    if ref is None:
        return None
    return of_rows_in(runs, item, ref, runs.own_chunk(item, mosaic.group()))


def of_rows_in(runs: Runs, item: Item, ref: Any, chunk: Any) -> Any:
    """What an array holds of a chunk's rows, [64]; None where there is no array."""
    if ref is None:
        return None
    rows = rows_of(chunk)
    at = (item.batch, rows) if len(ref.shape) == 2 else (item.batch, runs.kv_head(item), rows)
    return load(ref.at[at], OF_ROWS, optimized=False)


def powers_of(runs: Runs, item: Item) -> Powers | None:
    """The factors of a unit whose x has been loaded; None in bfloat16. DQ also writes the largest
    magnitude of each row of g."""
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
    """The largest magnitude in each own row, [64]: of phi(q) in OUT, and of x in DQ."""
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
    """64 columns of z or u, in all rows."""
    if runs.has_vector:
        own = load(runs.own.vector.at[mosaic.group(), columns_of(block)], OF_COLUMNS)
    else:
        chunk = runs.chunk_of_vectors(item, mosaic.group(), side)
        at = item.batch, runs.kv_head(item), chunk, columns_of(block)
        own = load(runs.vectors[side].at[at], OF_COLUMNS, optimized=False)
    return mosaic.in_rows(own, C)


def vectors_times(runs: Runs, item: Item, block: int, reads: Sequence[Any]) -> jax.Array:
    """The sum of both sides' vectors in 64 columns, [64, 64], each times its factor of the row."""
    found = mosaic.zeros(C, HALF)
    for side, own in enumerate(reads):
        found = found + times(vector_of(runs, item, block, side), own)
    return found


def reads_of_states(runs: Runs, item: Item, own: Powers | None) -> list[Any]:
    """For each side, the factor of a row's product with the state of that side; None is 1."""
    found = [of_own(runs, item, ref) for ref in runs.reads]
    if own is None:
        return found
    return [own.state if reads is None else reads * own.state for reads in found]


def block_in(found: Sequence[jax.Array], block: int) -> jax.Array:
    part, first = divmod(block * HALF, found[0].shape[1])
    return found[part][:, first : first + HALF]


def leave(runs: Runs, item: Item, ref: Any, of_rows: Any) -> None:
    """Writes a number of each own row, where there is an array for them."""
    if ref is not None:
        rows = rows_of(runs.own_chunk(item, mosaic.group()))
        ref.at[item.batch, item.head, rows][...] = of_rows
