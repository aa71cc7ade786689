"""The programs of a `PagedCache`'s operations, on arrays that its methods have checked.

Each returns the next cache and what must hold for the operation to be carried out: where that does
not hold, it changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax import meshes, programs

# A `PagedCache`, whose module imports this one.
Cache = Any

# Pages that `defragment` moves in one step: what it needs beside the cache.
MOVED_AT_ONCE = 64


def pages_for(length: Any, page: int) -> Any:
    """How many pages hold that many keys."""
    return -(-length // page)


def stack(P: int) -> jax.Array:
    """All pages, the first on top."""
    return jnp.arange(P, dtype=jnp.int32)[::-1]


def first_free(cache: Cache) -> jax.Array:
    """A slot, -1 where all are taken."""
    return jnp.where(cache.active.all(), -1, jnp.argmin(cache.active)).astype(jnp.int32)


def on_meshes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(cache, *arrays)`, a cache and what else it returns, where explicit axes of a mesh
    cut the cache: the new cache is cut alike, and the rest is the same on all devices.
    """

    @functools.wraps(function)
    def run(cache: Cache, *arrays: Any) -> Any:
        def partition_of_outputs() -> Any:
            found = type(cache)(*(meshes.sharded(*meshes.partition(one)) for one in cache))
            return found, meshes.sharded()

        return meshes.call(
            lambda given: function(given[0], *given[1:]), (cache, *arrays), partition_of_outputs
        )

    return run


@on_meshes
@programs.jit()
def allocate(cache: Cache) -> tuple[Cache, tuple[jax.Array, jax.Array]]:
    """As allocate, and what must hold, [1]."""
    slot = first_free(cache)
    active = cache.active | (jnp.arange(cache.active.size, dtype=jnp.int32) == slot)
    return cache._replace(active=active), (slot, slot[None] >= 0)


@on_meshes
@programs.jit()
def append(
    cache: Cache, k: jax.Array, v: jax.Array, slots: Any, counts: Any
) -> tuple[Cache, tuple[jax.Array, jax.Array, dict[str, jax.Array]]]:
    """As append, and what must hold, [7], and what its messages say."""
    P, page = cache.k_pages.shape[:2]
    B, pages = cache.page_table.shape
    entries, T = k.shape[:2]  # the first of N
    counts = jnp.full(entries, T, jnp.int32) if counts is None else counts
    if slots is None:
        slots = jnp.where(cache.active, jnp.arange(B, dtype=jnp.int32), -1)
    named = (slots >= 0) & (slots < B)
    at = jnp.where(named, slots, 0)  # [N]
    grows = named & (counts > 0)
    held = cache.lengths[at]
    longer = held + jnp.where(grows, counts, 0)

    # Where one goes on in a page that others share, it copies, unless the others do: as if those
    # who are appended to went one after another.
    last = cache.page_table[at, jnp.minimum(held // page, pages - 1)]
    goes_on = grows & (held % page > 0)
    exists = (last >= 0) & (last < P)
    same = (last[:, None] == last) & goes_on[:, None] & goes_on  # [N, N]
    before = jnp.tril(same, -1).sum(1)
    copies = goes_on & exists & (cache.references[jnp.where(exists, last, 0)] - before > 1)

    first = pages_for(held, page) - copies  # the first column of the table that gets a page
    needs = jnp.where(grows, pages_for(longer, page) - first, 0)
    needed = needs.sum()
    twice = jnp.tril((slots[:, None] == slots) & named, -1)
    fine = jnp.stack(
        [
            ((slots >= -1) & (slots < B)).all(),
            ~twice.any(),
            (cache.active[at] | ~named).all(),
            ((counts >= 0) & (counts <= T)).all(),
            (exists | ~goes_on).all(),
            (longer <= pages * page).all(),
            needed <= cache.available,
        ]
    )
    numbers = {
        "slots": slots,
        "counts": counts,
        "table": last,
        "longer": longer,
        "needed": needed,
        "available": cache.available,
    }
    fits = fine.all()
    written = jnp.where(grows & fits, counts, 0)
    copies, needs = copies & fits, jnp.where(fits, needs, 0)

    # The pages that are taken, from the top of the stack.
    most = 1 + pages_for(max(T - 1, 0), page)
    columns = first[:, None] + jnp.arange(most, dtype=jnp.int32)  # [N, most]
    takes = jnp.arange(most, dtype=jnp.int32) < needs[:, None]
    ranks = (jnp.cumsum(needs) - needs)[:, None] + jnp.arange(most, dtype=jnp.int32)
    taken = cache.free_pages[jnp.where(takes, cache.available - 1 - ranks, 0)]
    page_table = cache.page_table.at[jnp.where(takes, at[:, None], B), columns].set(
        taken, mode="drop"
    )
    references = cache.references.at[jnp.where(takes, taken, P)].add(1, mode="drop")
    references = references.at[jnp.where(copies, last, P)].add(-1, mode="drop")

    # One scatter of rows: what the copied page held, then what is new.
    positions = held[:, None] + jnp.arange(T, dtype=jnp.int32)  # [N, T]
    homes = page_table[at[:, None], jnp.minimum(positions // page, pages - 1)]
    rows = jnp.broadcast_to(jnp.arange(page, dtype=jnp.int32), (entries, page))
    copied = copies[:, None] & (rows < held[:, None] % page)
    homes = jnp.concatenate([jnp.broadcast_to(taken[:, :1], copied.shape), homes], 1)
    rows = jnp.concatenate([rows, positions % page], 1)  # [N, page + T]
    present = jnp.concatenate([copied, jnp.arange(T, dtype=jnp.int32) < written[:, None]], 1)
    # A row that is left out names a page of its own beyond the last, so no page and row come twice.
    beyond = P + jnp.arange(homes.size, dtype=jnp.int32).reshape(homes.shape)
    homes = jnp.where(present, homes, beyond)

    def put(held_pages: jax.Array, new: jax.Array) -> jax.Array:
        old = held_pages[jnp.where(copies, last, 0)]  # [N, page, G, D]
        # Not by rows of all pages in one axis: a reshape around it may cost a copy of all.
        new = jnp.concatenate([old, new], 1)
        return held_pages.at[homes, rows].set(new, mode="drop", unique_indices=True)

    cache = cache._replace(
        k_pages=put(cache.k_pages, k),
        v_pages=put(cache.v_pages, v),
        page_table=page_table,
        lengths=cache.lengths.at[jnp.where(named, at, B)].add(written, mode="drop"),
        references=references,
        available=cache.available - needs.sum(dtype=jnp.int32),
    )
    return cache, (fits, fine, numbers)


@on_meshes
@programs.jit()
def fork(
    cache: Cache, slot: jax.Array, length: Any
) -> tuple[Cache, tuple[jax.Array, jax.Array, dict[str, jax.Array]]]:
    """As fork, and what must hold, [3], and what its messages say."""
    P, page = cache.k_pages.shape[:2]
    B, pages = cache.page_table.shape
    new = first_free(cache)
    known = (slot >= 0) & (slot < B)
    at = jnp.where(known, slot, 0)
    held = cache.lengths[at]
    length = held if length is None else length
    fine = jnp.stack([known & cache.active[at], (length >= 0) & (length <= held), new >= 0])
    new = jnp.where(fine.all(), new, -1)
    needed = jnp.arange(pages, dtype=jnp.int32) < pages_for(length, page)
    row = jnp.where(needed, cache.page_table[at], -1)
    chosen = jnp.arange(B, dtype=jnp.int32) == new
    shared = jnp.where((row >= 0) & (new >= 0), row, P)
    cache = cache._replace(
        page_table=jnp.where(chosen[:, None], row, cache.page_table),
        lengths=jnp.where(chosen, length, cache.lengths),
        active=cache.active | chosen,
        references=cache.references.at[shared].add(1, mode="drop"),
    )
    return cache, (new, fine, {"slot": slot, "held": held, "length": length})


@on_meshes
@programs.jit()
def free(cache: Cache, slots: jax.Array) -> tuple[Cache, jax.Array]:
    """As free, and what must hold, [1]."""
    P = cache.references.size
    B = cache.lengths.size
    known = (slots >= 0) & (slots < B)
    ends = jnp.zeros(B, bool).at[jnp.where(known, slots, B)].set(True, mode="drop")
    fine = (slots >= -1).all() & (slots < B).all() & ~(ends & ~cache.active).any()
    ends &= cache.active
    left = jnp.where(ends[:, None] & (cache.page_table >= 0), cache.page_table, P)
    references = cache.references.at[left].add(-1, mode="drop")
    freed = (cache.references > 0) & (references == 0)
    place = jnp.where(freed, cache.available + jnp.cumsum(freed) - 1, P)
    cache = cache._replace(
        page_table=jnp.where(ends[:, None], -1, cache.page_table),
        lengths=jnp.where(ends, 0, cache.lengths),
        active=cache.active & ~ends,
        references=references,
        free_pages=cache.free_pages.at[place].set(jnp.arange(P, dtype=jnp.int32), mode="drop"),
        available=cache.available + freed.sum(dtype=jnp.int32),
    )
    return cache, fine[None]


@on_meshes
@programs.jit()
def defragment(cache: Cache) -> tuple[Cache, None]:
    P = cache.references.size
    in_use = cache.references > 0
    behind = jnp.arange(P, dtype=jnp.int32) >= in_use.sum()
    # As many pages in use lie behind the last place as there are holes before it.
    steps = pages_for(P, MOVED_AT_ONCE)
    size = steps * MOVED_AT_ONCE
    [sources] = jnp.nonzero(in_use & behind, size=size, fill_value=P)
    [targets] = jnp.nonzero(~in_use & ~behind, size=size, fill_value=P)

    def move(step: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        source, target = (
            jax.lax.dynamic_slice_in_dim(pages, step * MOVED_AT_ONCE, MOVED_AT_ONCE)
            for pages in (sources, targets)
        )
        return tuple(
            array.at[target].set(jnp.take(array, source, axis=0, mode="clip"), mode="drop")
            for array in arrays
        )

    moves = pages_for((in_use & behind).sum(), MOVED_AT_ONCE)
    k_pages, v_pages, references = jax.lax.fori_loop(
        0, moves, move, (cache.k_pages, cache.v_pages, cache.references)
    )
    homes = jnp.arange(P, dtype=jnp.int32).at[sources].set(targets.astype(jnp.int32), mode="drop")
    table = cache.page_table
    cache = cache._replace(
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=jnp.where(table >= 0, homes[jnp.maximum(table, 0)], -1),
        references=jnp.where(behind, 0, references),
        free_pages=stack(P),
    )
    return cache, None
