"""The softmax of rows whose scores come block by block, in base 2.

With raw scores s and c = scale * log2(e), each block of keys updates

    m'    = max(m, max_j s_j)
    p_j   = exp2(c s_j - c m')              one multiply-add and one exponential
    total = exp2(c m - c m') total + sum_j p_j

and the sums that p_j multiplies are scaled alike. At the end

    out = acc / (total narrowed(top) / top),  lse = ln(2) (c m + log2(total)),
    top = exp2(c m - c m)

c m is rounded before the multiply-add, which rounds once. So the largest weight is top, not 1: by
2e-4 larger or smaller at scores of thousands, twice or half of it at scores of 10^7. The product
with the values has narrowed(top), top as a weight is rounded: 1 where scores are small. So the sum
of weights is multiplied by their quotient; lse takes the sum as it is. Earlier sums are multiplied
by a power of the difference of two rounded numbers: by exactly 1 where m stays what it is.

In 8 bits a weight above 448 is cut off, and so is narrowed(top). Where c m is 2^27 or more, top may
be so small that it is 0 there; where c m is 2^30 or more, top may be beyond float32.

With a bias, scores may be as low as float32 goes, where c m is beyond it. Then

    p_j = exp2(c (s_j - m)),  lse = m + ln(total)

at the price of one more operation for each pair.

    symbol     shape       what it is
    s, p       [R, K]      scores, weights of a block
    m          [R]         the largest raw score so far
    c_m        [R]         c m, rounded
    total      [R, 8]      sums over every 8th key: added up across threads at the end alone
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import F32, OF_ROWS

LOG2_E = math.log2(math.e)
# Columns of a register tile; a thread has two of them, and sums up its own.
COLUMNS = 8
# Weights of 8 bits are multiplied by 2 to this: 448 is the largest number, 2^-9 the smallest.
EXPONENT = 8
# The initial m: finite, so that no infinities are subtracted in rows which have seen no key, and so
# small that exp2(c m - c m') is 0 at the first one. It is minus 2 to this, or to less.
FLOOR_EXPONENT = 120
# That of scores of 8 bits, whose unit is known only when the kernel runs: no score is as low, and
# no row has sums that would have to vanish.
FLOOR_OF_EIGHT_BITS = -(2.0**30)


class Rows(NamedTuple):
    m: jax.Array
    c_m: jax.Array
    total: jax.Array


class Softmax(NamedTuple):
    """The softmax of scores s whose natural value is `unit` times s, a number or a scalar in the
    kernel. Weights and their sum are multiplied by 2^shift. The product with the values has weights
    of `dtype`."""

    unit: Any
    subtracts_first: bool = False
    shift: int = 0
    dtype: Any = mosaic.BF16

    @property
    def c(self) -> Any:
        return self.unit * LOG2_E

    def start(self, rows: int) -> Rows:
        # A power of two, whose product with c is exact.
        if self.subtracts_first:
            floor = float(jnp.finfo(F32).min)
        elif isinstance(self.unit, jax.Array):
            floor = FLOOR_OF_EIGHT_BITS
        else:
            floor = -(2.0 ** (FLOOR_EXPONENT - max(0, math.ceil(math.log2(self.c)))))
        m = plgpu.layout_cast(jnp.full((rows,), floor, F32), OF_ROWS)
        c_m = m if self.subtracts_first else self._rounded(m)
        return Rows(m, c_m, mosaic.zeros(rows, COLUMNS))

    def _rounded(self, m: jax.Array) -> jax.Array:
        """c m. Without the barrier it would become a part of multiply-adds, unrounded."""
        return lax.optimization_barrier(m * self.c)

    def _less_shift(self, c_m: jax.Array) -> jax.Array:
        return c_m - self.shift if self.shift else c_m

    def _narrowed(self, top: jax.Array) -> jax.Array:
        """Rounds positive numbers as weights are, by their bits: XLA may leave out a conversion to
        16 bits and back."""
        most, dropped = float(jnp.finfo(self.dtype).max), 23 - jnp.finfo(self.dtype).nmant
        bits = lax.bitcast_convert_type(jnp.minimum(top, most), jnp.int32)
        bits = bits + (((bits >> dropped) & 1) + (2 ** (dropped - 1) - 1))  # ties to even
        return lax.bitcast_convert_type(bits & -(2**dropped), F32)

    def _shifted(self, exponent: jax.Array) -> jax.Array:
        return exponent + self.shift if self.shift else exponent

    def lasts(self, earlier: jax.Array, c_m: jax.Array) -> jax.Array:
        """What sums of one c_m are multiplied by for another."""
        difference = earlier - c_m
        return jnp.exp2(difference * self.c if self.subtracts_first else difference)

    def update(self, rows: Rows, s: jax.Array) -> tuple[jax.Array, Rows, jax.Array]:
        """The weights, float32, the rows behind them, and what earlier sums are multiplied by."""
        m = jnp.maximum(rows.m, jnp.max(s, axis=1))
        if self.subtracts_first:
            c_m = m
            p = jnp.exp2(self._shifted((s - mosaic.in_columns(m, s.shape[1])) * self.c))
            lasts = jnp.exp2((rows.m - m) * self.c)
        else:
            c_m = self._rounded(m)
            p = jnp.exp2(s * self.c - mosaic.in_columns(self._less_shift(c_m), s.shape[1]))
            lasts = jnp.exp2(rows.c_m - c_m)
        total = rows.total * mosaic.in_columns(lasts, COLUMNS) + by_columns(p)
        return p, Rows(m, c_m, total), lasts

    def finish(self, rows: Rows, sink: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the factor of the sum of weighted values, and lse. `sink` is a scalar in natural
        units, or None. A row without keys has a factor of 0, and an lse of minus infinity or of
        the sink."""
        total = jnp.sum(rows.total, axis=1)
        if self.subtracts_first:
            top, largest, to_log2, to_natural = jnp.ones_like(total), rows.m, LOG2_E, 1.0
        else:
            largest, to_log2, to_natural = rows.c_m, 1.0, math.log(2)
            top = jnp.exp2(rows.m * self.c - self._less_shift(rows.c_m))  # as in `update`
            top = top / self._narrowed(top)
        if sink is not None:
            sink = sink / to_natural
            m, largest = largest, jnp.maximum(largest, sink)
            lasts = jnp.exp2((m - largest) * to_log2)
            total = total * lasts + jnp.exp2(self._shifted((sink - largest) * to_log2))
            top = top * lasts
        factor = jnp.where(total > 0, top / total, 0.0)
        log2 = jnp.log2(total) - self.shift if self.shift else jnp.log2(total)
        return factor, largest * to_natural + log2 * math.log(2)


def by_columns(p: jax.Array) -> jax.Array:
    """p [R, K] added up to [R, 8], each thread its own elements."""
    parts = [p[:, n : n + COLUMNS] for n in range(0, p.shape[1], COLUMNS)]
    while len(parts) > 1:
        paired = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = paired + parts[len(paired) * 2 :]
    return parts[0]
