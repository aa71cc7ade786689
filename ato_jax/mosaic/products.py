"""WGMMA products: several are issued together, other code runs meanwhile, and one wait awaits all.

In each product a @ b the first factor a lies in registers or shared memory, b in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import device
from ato_jax.mosaic.tiles import F32, in_columns, tiled, zeros

# WGMMA needs N >= 8, so a vector operand is replicated across 8 columns.
ALIKE = 8
# Or 4 columns hold the rounded vector, and the other 4 what rounding left off.
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
    """The sum of a @ b over `products`, and the result of `do`, which runs meanwhile."""

    def both(accumulator: Any) -> Any:
        for a, b in products:
            plgpu.wgmma(accumulator, tiled(a), tiled(b))
        found = do()
        return accumulator[...], found

    product, found = pl.run_scoped(both, plgpu.ACC(shape, F32))
    return lax.optimization_barrier(product), found


def accumulate_while(
    start: jax.Array, products: Sequence[tuple[Any, Any]], do: Callable[[], Any]
) -> tuple[jax.Array, Any]:
    """start + a @ b + ..., and what `do` returns, which runs while the products are in flight."""
    (total,), found = accumulate_all_while([(start, products)], do)
    return total, found


def accumulate_all_while(
    sums: Sequence[Sum], do: Callable[[], Any]
) -> tuple[tuple[jax.Array, ...], Any]:
    """As `accumulate_while`, of several sums."""
    if device.interpreting():
        return _multiply_interpreted(*sums), do()

    def all_of(*accumulators: Any) -> Any:
        for accumulator, (start, _) in zip(accumulators, sums, strict=True):
            accumulator[...] = start
        for accumulator, (_, products) in zip(accumulators, sums, strict=True):
            for a, b in products:
                plgpu.wgmma(accumulator, tiled(a), tiled(b))
        found = do()
        return tuple(accumulator[...] for accumulator in accumulators), found

    shapes = [(start.shape[0], start.shape[1]) for start, _ in sums]
    totals, found = pl.run_scoped(all_of, *(plgpu.ACC(shape, F32) for shape in shapes))
    return lax.optimization_barrier(tuple(totals)), found


def multiply_under(
    first: Sequence[tuple[Any, Any]],
    shape: tuple[int, int],
    sums: Sequence[Sum],
    do: Callable[[jax.Array], Any],
    *,
    between: Callable[[], None] = lambda: None,
    issued: Callable[[], None] = lambda: None,
    under: bool = True,
) -> tuple[Any, tuple[jax.Array, ...]]:
    """(do(x), y): x [shape] is the sum of a @ b over `first`, and y what `multiply(*sums)` gives.

    All products are in flight at once: first those of x, then those of y. `between` runs when those
    of x are issued and those of y are not, `issued` behind both. `do` runs once x is known, while
    the products of y are still in flight; or, unless `under`, once both are known.
    """
    if device.interpreting():
        (x,) = _multiply_interpreted((zeros(*shape), first))
        between()
        issued()
        return do(x), _multiply_interpreted(*sums)
    later = sum(len(products) for _, products in sums)

    def both(accumulator: Any, *others: Any) -> Any:
        for other, (start, _) in zip(others, sums, strict=True):
            other[...] = start
        for a, b in first:
            plgpu.wgmma(accumulator, tiled(a), tiled(b))
        between()
        for other, (_, products) in zip(others, sums, strict=True):
            for a, b in products:
                plgpu.wgmma(other, tiled(a), tiled(b))
        issued()
        # The barriers keep what `do` computes between the two waits.
        x = plgpu.wgmma_accumulator_load(accumulator, wait_n=later if under else 0)
        found = lax.optimization_barrier(do(lax.optimization_barrier(x)))
        return found, tuple(other[...] for other in others)

    others = (plgpu.ACC((start.shape[0], start.shape[1]), F32) for start, _ in sums)
    found, totals = pl.run_scoped(both, plgpu.ACC(shape, F32), *others)
    return found, lax.optimization_barrier(totals)


def pairs_of_parts(a: Sequence[Any], b: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The products of two factors in as many bfloat16 parts each (`in_bf16_parts`), smallest first:
    three of 2 parts, six of 3. Those that are left out are 2^-18, or 2^-27, of the largest."""
    count = len(a)
    places = [(i, j) for i in range(count) for j in range(count - i)]
    return [(a[i], b[j]) for i, j in sorted(places, key=lambda place: -sum(place))]


def _multiply_interpreted(*sums: Sum) -> tuple[jax.Array, ...]:
    """`multiply` for Pallas's interpreter, which has neither factors in registers nor sums that
    start from values."""
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
