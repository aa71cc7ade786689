"""One pass of `float32_pairs.py`: its arrays, its feature maps, and the last step for 64 rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import HALF, OF_COLUMNS, OF_ROWS, load
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C

# 64 columns of rows [C, 64], by the first of them.
Halves = dict[int, jax.Array]
# x [C, 64] from column `first` on, the numbers of its rows [2, C] in shared memory or None.
Map = Callable[[jax.Array, int, Any], jax.Array]


class Given(NamedTuple):
    """An array, whether its heads are those of the keys, and how many bfloat16 parts of it are
    multiplied; None for as many as of the features (`parts_of`)."""

    array: jax.Array
    of_keys: bool = False
    parts: int | None = None


class Unit(NamedTuple):
    """64 rows in a worker's hands, to be finished: the tile that x or `last` and then the output
    take [C, columns], the state's vector [columns], and inverse and e of the rows [2, C] of them,
    in shared memory. `leave(number)` stores the tile in an output."""

    tile: Any
    vector: Any
    numbers: Any
    leave: Callable[[], None]
    leave_numbers: Callable[[jax.Array], None]

    def read(self, first: int) -> jax.Array:
        return load(self.tile.at[:, pl.ds(first, HALF)])

    def vector_from(self, first: int) -> jax.Array:
        """[C, 64], with all rows equal."""
        return mosaic.in_rows(load(self.vector.at[pl.ds(first, HALF)], OF_COLUMNS), C)

    def number(self, which: int) -> jax.Array:
        """[C]"""
        return load(self.numbers.at[which], OF_ROWS)

    def store(self, first: int, x: jax.Array) -> None:
        self.tile.at[:, pl.ds(first, HALF)][...] = x


@dataclasses.dataclass(frozen=True)
class Pass:
    """One kernel.

    Attributes:
      x, y, value: rows, and maps of them, None for the rows themselves.
      state: [B, heads, runs, F, V] float32, and vector [B, heads, runs, columns] or None.
      last: rows that `finish` reads, where these are not x.
      numbers: inverse and e [B, H, chunks, C] float32, of queries; or None.
      reverse: rows see those from their own on, else those up to their own.
      turned: S is read transposed.
      weight_parts: how many parts w_ij has; None for as many as the features.
      minus: "rows" or "columns" whose e is taken from x_i . y_j, those of x or of y; or None.
      sums_weights: whether `finish` is given the sum of w_ij over j.
      outputs: shapes; the first of rows, the second, if any, of numbers [B, H, chunks, C].
      finish: what is done with the halves of out_i, and with the sum of the weights [C].
    """

    name: str
    x: Given
    y: Given
    value: Given
    state: Given
    outputs: Sequence[jax.ShapeDtypeStruct]
    finish: Callable[[Unit, Halves, Any], None]
    vector: Given | None = None
    last: Given | None = None
    numbers: tuple[jax.Array, jax.Array] | None = None
    map_x: Map | None = None
    map_y: Map | None = None
    map_value: Map | None = None
    reverse: bool = False
    turned: bool = False
    weight_parts: int | None = None
    minus: str | None = None
    sums_weights: bool = False

    def given(self) -> dict[str, Given]:
        """By name, those that there are."""
        names = "x", "y", "value", "state", "vector", "last"
        found = {name: getattr(self, name) for name in names}
        inverse, e = self.numbers or (None, None)
        if inverse is not None and e is not None:
            found |= {"inverse": Given(inverse), "e": Given(e)}
        return {name: given for name, given in found.items() if given is not None}
