"""A decay per head or step within a chunk of 64 rows: the factors by which kernels multiply.

`output.py`, `query_gradient.py` and `key_gradient.py` make a `Gates` for each chunk. A new kind of
decay with one number for each row and head plugs in here. For a decay per channel see `channel.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, is_steep
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec


class Gates(NamedTuple):
    """The decays of one chunk. L_i is the sum of the log2 decays from the chunk's first row to row
    i, or, where chunks are walked from the end (`mosaic.Deal.end`), from its last row to row i.
    `ref` holds all L_i in shared memory; `middle` and `last` are those of the middle row m and of
    the last row. `steep` says whether half of the chunk loses more than features have room for. It
    is None in a kernel none of whose chunks is steep.

    If the chunk is not steep, features of keys are multiplied by exp2(L_m - L_j), queries or what
    they read by exp2(L_i - L_m), and states are scaled to the middle row: products then need no
    factor for pairs. In a steep chunk features have no factor, states are scaled to the first row,
    or behind the chunk to the last one, and pairs are multiplied by exp2(L_i - L_j).
    """

    ref: Any
    middle: Any
    last: Any
    steep: Any

    def of(self, layout: Any) -> jax.Array:
        return mosaic.load(self.ref, layout)

    def unless_steep(self, exponent: Any) -> Any:
        return exponent if self.steep is None else jnp.where(self.steep, 0.0, exponent)

    def either(self, when_steep: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        return otherwise() if self.steep is None else lax.cond(self.steep, when_steep, otherwise)

    def if_steep(self, exponent: Any) -> Any:
        """A factor of a steep chunk alone."""
        return 1.0 if self.steep is None else jnp.exp2(jnp.where(self.steep, exponent, 0.0))

    def since_middle(self) -> jax.Array:
        """[C]: L_i - L_m, or 0 in a steep chunk."""
        return self.unless_steep(self.of(mosaic.OF_ROWS) - self.middle)

    def up_to_middle(self) -> jax.Array:
        return self.unless_steep(self.middle - self.of(mosaic.OF_ROWS))

    def to_middle(self) -> Any:
        """The factor of a state from the chunk's start to the middle row."""
        return jnp.exp2(self.unless_steep(self.middle))

    def from_middle(self) -> Any:
        return jnp.exp2(self.unless_steep(self.last - self.middle))

    def of_pairs(self, queries: int) -> jax.Array:
        """[C, C]: in a steep chunk exp2(L_i - L_j), with queries i along axis `queries`; else 1. It
        may be infinite where query i does not see key j, so pairs have to be masked afterwards."""
        rows, columns = (
            mosaic.in_columns(self.of(mosaic.OF_ROWS), C),
            mosaic.in_rows(self.of(mosaic.OF_COLUMNS), C),
        )
        return self.if_steep(columns - rows if queries else rows - columns)

    def left(self, layout: Any) -> jax.Array:
        """[C]: in a steep chunk the factor of each key in the state behind the chunk; else 1."""
        return self.if_steep(self.last - self.of(layout))


def gates_of(
    spec: LinearAttentionSpec, ref: Any, some_steep: bool = True, from_the_end: bool = False
) -> Gates:
    middle, last = (ref[C // 2], ref[0]) if from_the_end else (ref[C // 2 - 1], ref[C - 1])
    return Gates(ref, middle, last, is_steep(spec, middle, last) if some_steep else None)


def takes_pieces(
    steep_ref: Any, some_steep: bool, group_size: int = 1
) -> Callable[[mosaic.Item], Any] | None:
    """The test by which a launch selects its items: those whose piece has a steep chunk if
    `some_steep`, else all others. None without gates, where a launch has all items. `group_size`
    heads of queries share the gates of one head of keys."""
    if steep_ref is None:
        return None

    def takes(item: mosaic.Item) -> Any:
        some = steep_ref[item.batch, lax.div(item.head, group_size), item.piece] != 0
        return some if some_steep else ~some

    return takes


def each_chunk(steep_ref: Any, item: mosaic.Item, head: Any, loop: Callable[[bool], None]) -> None:
    """Runs `loop(some_steep)` over an item's chunks. The branches are two loops, since the code for
    steep chunks would cost all other chunks registers."""
    if steep_ref is None:
        return loop(False)
    some = steep_ref[item.batch, head, item.piece] != 0
    return lax.cond(some, lambda: loop(True), lambda: loop(False))


def times_squares(x: jax.Array, roots: jax.Array) -> jax.Array:
    """Multiplies each row by the square of a number for it, [rows], in two steps, since the square
    may underflow in float32."""
    factors = mosaic.in_columns(roots, x.shape[1])
    return x * factors * factors
