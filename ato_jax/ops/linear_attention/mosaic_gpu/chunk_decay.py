"""A scalar decay within a chunk: the factors that a kernel multiplies by."""

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
    """The decays of one chunk. With L_i the sum of log2 decays from the chunk's first row to row i,
    `ref` has all L_i in shared memory, `middle` and `last` are those of the middle row m and of the
    last row. `steep` says whether half of the chunk loses more than features in bfloat16 have room
    for; it is None in a kernel whose chunks are all known not to be steep.

    Where chunks are walked from the end (`mosaic.Deal.end`), rows are counted from the chunk's last
    one, too: L_i is the sum from there to row i.

    Where a chunk is not steep, keys carry exp2(L_m - L_j), queries, or what they read, carry
    exp2(L_i - L_m), and states are those that the middle row sees: so no decay stands between two
    products. In a steep chunk neither carries any, states are those of its start or, behind it, of
    its end, and pairs of rows are multiplied by exp2(L_i - L_j).
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
        """The factor of a state at the chunk's start when the middle row sees it."""
        return jnp.exp2(self.unless_steep(self.middle))

    def from_middle(self) -> Any:
        return jnp.exp2(self.unless_steep(self.last - self.middle))

    def of_pairs(self, queries: int) -> jax.Array:
        """[C, C]: in a steep chunk exp2(L_i - L_j), with queries i along axis `queries`; else 1. It
        may be infinite where query i does not see key j, so pairs have to be masked behind it."""
        rows, columns = (
            mosaic.in_columns(self.of(mosaic.OF_ROWS), C),
            mosaic.in_rows(self.of(mosaic.OF_COLUMNS), C),
        )
        return self.if_steep(columns - rows if queries else rows - columns)

    def left(self, layout: Any) -> jax.Array:
        """[C]: the factor of each key at the end of a steep chunk; else 1."""
        return self.if_steep(self.last - self.of(layout))


def gates_of(
    spec: LinearAttentionSpec, ref: Any, some_steep: bool = True, from_the_end: bool = False
) -> Gates:
    middle, last = (ref[C // 2], ref[0]) if from_the_end else (ref[C // 2 - 1], ref[C - 1])
    return Gates(ref, middle, last, is_steep(spec, middle, last) if some_steep else None)


def takes_pieces(
    steep_ref: Any, some_steep: bool, group_size: int = 1
) -> Callable[[mosaic.Item], Any] | None:
    """A function that says whether a launch takes an item: one whose piece has a steep chunk if
    `some_steep`, else one whose piece has none. None without gates, since all items are taken then.
    `group_size` heads of queries share the gates of one head of keys."""
    if steep_ref is None:
        return None

    def takes(item: mosaic.Item) -> Any:
        some = steep_ref[item.batch, lax.div(item.head, group_size), item.piece] != 0
        return some if some_steep else ~some

    return takes


def each_chunk(steep_ref: Any, item: mosaic.Item, head: Any, loop: Callable[[bool], None]) -> None:
    """`loop` goes through an item's chunks, of which some may be steep or none is. These are two
    loops, since what a steep one needs would cost all others registers."""
    if steep_ref is None:
        return loop(False)
    some = steep_ref[item.batch, head, item.piece] != 0
    return lax.cond(some, lambda: loop(True), lambda: loop(False))


def times_squares(x: jax.Array, roots: jax.Array) -> jax.Array:
    """Multiplies each row by the square of its root [rows], in two steps, since the square may be
    smaller than float32 holds."""
    factors = mosaic.in_columns(roots, x.shape[1])
    return x * factors * factors
