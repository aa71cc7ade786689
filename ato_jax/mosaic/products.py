"""WGMMA products: started together, awaited together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import device
from ato_jax.mosaic.tiles import F32, in_columns, tiled

# WGMMA needs N >= 8, so a vector operand is replicated across 8 columns.
ALIKE = 8
# Or it takes 4 of them once rounded, and what the rounding left off the other 4.
PARTS = ALIKE // 2

Sum = tuple[jax.Array, Sequence[tuple[Any, Any]]]


def multiply(*sums: Sum, meanwhile: Callable[[], None] = lambda: None) -> tuple[jax.Array, ...]:
    """start + a @ b + ... for each (start, [(a, b), ...]) of `sums`: all products are in flight at
    once, while `meanwhile` runs. a lies in registers or in shared memory, b in shared memory."""
    if device.interpreting():
        found = _multiply_interpreted(*sums)
        meanwhile()
        return found

    def issue(accumulators: Any) -> None:
        for accumulator, (_, products) in zip(accumulators, sums, strict=True):
            for a, b in products:
                plgpu.wgmma(accumulator, tiled(a), tiled(b))
        meanwhile()

    accumulators = pl.run_state(issue)(tuple(plgpu.ACC.init(start) for start, _ in sums))
    # The barrier keeps reads of the accumulators behind the wait for the products.
    return lax.optimization_barrier(tuple(accumulators))


def multiply_while(
    products: Sequence[tuple[Any, Any]], shape: tuple[int, int], do: Callable[[], Any]
) -> tuple[jax.Array, Any]:
    """The sum of a @ b, and what `do` returns, which runs while the products are in flight."""

    def both(accumulator: Any) -> Any:
        for a, b in products:
            plgpu.wgmma(accumulator, tiled(a), tiled(b))
        found = do()
        return accumulator[...], found

    product, found = pl.run_scoped(both, plgpu.ACC(shape, F32))
    return lax.optimization_barrier(product), found


def _multiply_interpreted(*sums: Sum) -> tuple[jax.Array, ...]:
    """Pallas's interpreter knows no factors in registers, and no sums that begin with values."""
    found = []
    for start, products in sums:
        for a, b in products:
            if isinstance(a, jax.Array):
                start = start + jnp.dot(a, b[...], preferred_element_type=F32)
                plgpu.commit_smem()
                continue

            def one(accumulator: Any, a: Any = a, b: Any = b) -> jax.Array:
                plgpu.wgmma(accumulator, a, b)
                return accumulator[...]

            rows, columns = start.shape
            start = start + pl.run_scoped(one, plgpu.ACC((rows, columns), F32))
        found.append(start)
    return tuple(found)


def of_parts(parts: jax.Array) -> jax.Array:
    """The sum that 8 columns hold, 4 of them of a rounded vector, 4 of what rounding left off."""
    return jnp.sum(parts, axis=1) / PARTS


def in_parts(vector: jax.Array) -> jax.Array:
    """The inverse of `of_parts`: spreads a vector [F] over 8 columns, [F, 8]."""
    return in_columns(vector * (PARTS / ALIKE), ALIKE)
