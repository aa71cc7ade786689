"""PagedCache: a long random walk beside a plain model of it, refusals, in place, in the layer."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify

import ato_jax
from ato_jax import PagedCache, nn
from tests import numerics

P, PAGE, B, PAGES, T = 24, 4, 6, 8, 7


def empty(**sizes: Any) -> PagedCache:
    options = {"num_pages": P, "page_size": PAGE, "num_kv_heads": 1, "head_dim": 2, "v_head_dim": 1}
    return PagedCache.empty(B, PAGE * PAGES, dtype=jnp.float32, **(options | sizes))


def tokens(*numbers: Any) -> tuple[jax.Array, jax.Array]:
    """k and v [N, T, 1, 2 and 1] that tell which token it is."""
    rows = jnp.asarray(numbers, jnp.float32)[..., None, None]
    return jnp.concatenate([rows, -rows], -1), 2 * rows


def same(one: PagedCache, other: PagedCache) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


# The walk


class Model:
    """What a PagedCache should do, with lists: a page is a list of one number, who share it."""

    def __init__(self) -> None:
        self.keys: list[list[float] | None] = [None] * B
        self.pages: list[list[list[int]]] = [[] for _ in range(B)]
        self.left = P

    def first_free(self) -> int:
        return self.keys.index(None) if None in self.keys else -1

    def allocate(self) -> int:
        slot = self.first_free()
        if slot >= 0:
            self.keys[slot] = []
        return slot

    def append(self, wanted: dict[int, list[float]]) -> bool:
        """One sequence after another; all of them or none."""
        shared = {id(page): page[0] for row in self.pages for page in row}
        copies, needed = [], 0
        for slot, new in wanted.items():
            keys = self.keys[slot]
            if keys is None or len(keys) + len(new) > PAGE * PAGES:
                return False
            needed += -(-(len(keys) + len(new)) // PAGE) - len(self.pages[slot])
            if new and len(keys) % PAGE and shared[id(self.pages[slot][-1])] > 1:
                shared[id(self.pages[slot][-1])] -= 1
                copies.append(slot)
        if needed + len(copies) > self.left:
            return False
        for slot in copies:
            self.pages[slot][-1][0] -= 1
            self.pages[slot][-1] = [1]
        for slot, new in wanted.items():
            self.keys[slot] += new
            while len(self.pages[slot]) * PAGE < len(self.keys[slot]):
                self.pages[slot].append([1])
        self.left -= needed + len(copies)
        return True

    def fork(self, slot: int, length: int) -> int:
        new = self.first_free()
        if new < 0 or self.keys[slot] is None or not 0 <= length <= len(self.keys[slot]):
            return -1
        self.keys[new] = self.keys[slot][:length]
        self.pages[new] = self.pages[slot][: -(-length // PAGE)]
        for page in self.pages[new]:
            page[0] += 1
        return new

    def free(self, slots: list[int]) -> None:
        for slot in slots:
            for page in self.pages[slot]:
                page[0] -= 1
                self.left += page[0] == 0
            self.keys[slot], self.pages[slot] = None, []


def agree(cache: PagedCache, model: Model) -> None:
    """The invariants of the module's docstring, and every key of every sequence."""
    held = PagedCache(*(np.asarray(array) for array in cache))
    lengths = [0 if keys is None else len(keys) for keys in model.keys]
    np.testing.assert_array_equal(held.lengths, lengths)
    np.testing.assert_array_equal(held.active, [keys is not None for keys in model.keys])
    used = np.arange(PAGES) * PAGE < held.lengths[:, None]
    np.testing.assert_array_equal(held.page_table >= 0, used)
    ids = held.page_table[used]
    np.testing.assert_array_equal(held.references, np.bincount(ids, minlength=P))
    np.testing.assert_array_equal(
        np.sort(held.free_pages[: held.available]), np.flatnonzero(held.references == 0)
    )
    assert held.available == model.left
    sharers = [page[0] for row in model.pages for page in row]
    np.testing.assert_array_equal(held.references[ids], sharers)
    wanted = [key for keys in model.keys if keys for key in keys]
    seen = np.arange(PAGE * PAGES) < held.lengths[:, None]
    for array, factors in ((held.k_pages, [1, -1]), (held.v_pages, [2])):
        found = array[held.page_table].reshape(B, PAGE * PAGES, -1)[seen]
        np.testing.assert_array_equal(found, np.outer(wanted, factors).reshape(found.shape))


def test_random_walk() -> None:
    """10,000 operations, each compared with the model: every page and every key is where it is."""
    draw = np.random.default_rng(0)
    jitted = functools.partial(jax.jit, donate_argnums=0)
    put = jitted(lambda cache, k, v, counts: cache.append(k, v, counts=counts))
    put_some = jitted(lambda cache, k, v, slots, counts: cache.append(k, v, slots=slots, counts=counts))
    one_more = jitted(lambda cache, k, v: cache.append(k, v))
    allocate = jitted(lambda cache: cache.allocate())
    fork = jitted(lambda cache, slot, length: cache.fork(slot, length))
    free = jitted(lambda cache, slots: cache.free(slots))
    defragment = jitted(lambda cache: cache.defragment())
    cache, model, number = empty(), Model(), 1
    outcomes: dict[tuple[str, bool], int] = {}
    operations = draw.choice(
        ["allocate", "one more", "put", "put some", "fork", "free", "defragment"],
        10_000,
        p=[0.15, 0.25, 0.1, 0.1, 0.18, 0.2, 0.02],
    )
    for name in operations:
        done = True
        if name in ("one more", "put", "put some"):
            size = 1 if name == "one more" else T
            slots = draw.permutation(B)[:2] if name == "put some" else np.arange(B)
            counts = draw.integers(0, size + 1, slots.size) if size > 1 else np.ones(B, int)
            numbers = number + np.arange(slots.size * size).reshape(slots.size, size)
            number += numbers.size
            k = np.stack([numbers, -numbers], -1)[:, :, None].astype(np.float32)
            v = 2 * k[..., :1]
            wanted = {
                int(slot): list(map(float, row[:count]))
                for slot, row, count in zip(slots, numbers, counts, strict=True)
                if name == "put some" or model.keys[slot] is not None
            }
            if name == "one more":
                cache, done = one_more(cache, k, v)
            elif name == "put":
                cache, done = put(cache, k, v, counts)
            else:
                cache, done = put_some(cache, k, v, slots, counts)
            done = bool(done)
            assert done == model.append(wanted)
        elif name == "allocate":
            cache, slot = allocate(cache)
            done = int(slot) >= 0
            assert int(slot) == model.allocate()
        elif name == "fork":
            slot = int(draw.integers(B))
            held = len(model.keys[slot] or [])
            length = held if draw.random() < 0.5 else int(draw.integers(0, held + 2))
            cache, new = fork(cache, slot, length)
            done = int(new) >= 0
            assert int(new) == model.fork(slot, length)
        elif name == "free":
            slots = draw.integers(-1, B, 2)
            slots[1] = -1 if draw.random() < 0.7 else slots[1]
            cache = free(cache, slots)
            model.free([slot for slot in set(slots) if slot >= 0 and model.keys[slot] is not None])
        else:
            cache = defragment(cache)
            assert np.all(np.asarray(cache.page_table) < P - model.left)
        agree(cache, model)
        outcomes[name, done] = outcomes.get((name, done), 0) + 1
    # It went through everything, refusals too.
    for name in ("allocate", "one more", "put", "put some", "fork"):
        assert min(outcomes[name, True], outcomes[name, False]) > 50, outcomes
    cache = free(cache, np.flatnonzero(np.asarray(cache.active))[:1].repeat(2))
    cache = cache.free(np.flatnonzero(np.asarray(cache.active)))
    assert int(cache.available) == P and not np.any(cache.references)
