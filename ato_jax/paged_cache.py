"""Keys and values in pages, of sequences that come, grow, branch and go.

    key j of the sequence in slot b is row j % page of page page_table[b, j // page], j < lengths[b]

A sequence takes pages as it grows and gives them back when it goes, so that what is held is what is
used, up to one page a sequence. One that is forked shares the pages of the other; whoever appends
to a last page that is shared and partly filled takes a copy of it first. Between any two
operations, with used(b) = ceil(lengths[b] / page):

    page_table[b, i] is a page for i < used(b), and -1 beyond;  lengths[b] = 0 unless active[b]
    references[p] = how many entries of page_table are p
    free_pages[:available] = each page with references[p] = 0, once: a stack

So a page is free or referenced, never both and never neither, and none that two sequences reference
is ever written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ato_jax import checking, meshes, programs, shapes
from ato_jax.ops.common import Integers

# Pages that `defragment` moves in one step: what it needs beside the cache.
MOVED_AT_ONCE = 64


class PagedCache(NamedTuple):
    """A cache of keys and values in pages, for `decode_attention`.

        key j of the sequence in slot b is row j % page of page page_table[b, j // page]

    It is immutable: every operation returns the next cache. All operations work inside `jit`, where
    only the sizes are static, and in place where the caller's `jit` donates the cache:
    `jax.jit(step, donate_argnums=0)`. Outside of `jit`, or without donation, an operation that
    writes into pages copies them all. (XLA does so on a CPU for bfloat16 pages, as of JAX 0.10.2.)

    An operation that cannot be carried out changes nothing. Outside of `jit` it raises a
    ValueError. Inside, where values are not known, the flag or the slot that it returns says so,
    and `ato_jax.checked` reports an error with the same message.

    Make one with `PagedCache.empty`.

    Attributes:
      k_pages: [P, page, G, D].
      v_pages: [P, page, G, V].
      page_table: int32 [B, pages]: the pages of each slot's sequence, -1 beyond its last one.
      lengths: int32 [B]: keys of each sequence.
      active: bool [B]: the slots that are allocated.
      references: int32 [P]: in how many entries of page_table each page is.
      free_pages: int32 [P]: the free pages, as a stack of `available` entries.
      available: int32 []: how many pages are free.

    Example:
      >>> import ato_jax, jax.numpy as jnp
      >>> cache = ato_jax.PagedCache.empty(
      ...     2, 64, num_pages=8, page_size=16, num_kv_heads=2, head_dim=32, dtype=jnp.float32
      ... )
      >>> cache, slot = cache.allocate()
      >>> prompt = jnp.ones((1, 20, 2, 32))  # [N, T, G, D]
      >>> cache, fits = cache.append(prompt, prompt, slots=slot[None])
      >>> q = jnp.ones((2, 1, 8, 32))  # [B, T, H, D]: one query for each slot
      >>> out = ato_jax.decode_attention(
      ...     q, cache.k_pages, cache.v_pages, cache.page_table, cache.lengths
      ... )
      >>> out.shape, cache.lengths.tolist()
      ((2, 1, 8, 32), [20, 0])
    """

    k_pages: jax.Array  # [P, page, G, D]
    v_pages: jax.Array  # [P, page, G, V]
    page_table: jax.Array  # [B, pages] int32
    lengths: jax.Array  # [B] int32
    active: jax.Array  # [B] bool: the slots that are allocated
    references: jax.Array  # [P] int32
    free_pages: jax.Array  # [P] int32
    available: jax.Array  # [] int32

    @classmethod
    def empty(
        cls,
        num_slots: int,
        max_length: int,
        *,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: DTypeLike = jnp.bfloat16,
    ) -> PagedCache:
        """Makes a cache that holds nothing.

        Args:
          num_slots: B, the most sequences at a time.
          max_length: The most keys of a sequence, rounded up to whole pages.
          num_pages: P, pages that all sequences share.
          page_size: page, keys in a page.
          num_kv_heads: G.
          head_dim: D.
          v_head_dim: V; D unless given.
          dtype: float16, bfloat16 or float32.

        Returns:
          The cache, every page free and no slot allocated.

        Raises:
          ValueError: A size is no int of at least 1, or dtype is none of these.

        Example:
          >>> import ato_jax, jax.numpy as jnp
          >>> cache = ato_jax.PagedCache.empty(
          ...     2, 8, num_pages=4, page_size=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32
          ... )
          >>> cache.k_pages.shape, int(cache.available)
          ((4, 4, 1, 8), 4)
        """
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        B, length, P, page, G, D, V = (
            shapes.positive_int(name, size)
            for name, size in (
                ("num_slots", num_slots),
                ("max_length", max_length),
                ("num_pages", num_pages),
                ("page_size", page_size),
                ("num_kv_heads", num_kv_heads),
                ("head_dim", head_dim),
                ("v_head_dim", v_head_dim),
            )
        )
        shapes.float_dtype("dtype", dtype)
        return cls(
            k_pages=jnp.zeros((P, page, G, D), dtype),
            v_pages=jnp.zeros((P, page, G, V), dtype),
            page_table=jnp.full((B, _pages(length, page)), -1, jnp.int32),
            lengths=jnp.zeros(B, jnp.int32),
            active=jnp.zeros(B, bool),
            references=jnp.zeros(P, jnp.int32),
            free_pages=_stack(P),
            available=jnp.full((), P, jnp.int32),
        )

    def allocate(self) -> tuple[PagedCache, jax.Array]:
        """Takes a slot for a new, empty sequence.

        Returns:
          (cache, slot): slot is an int32 scalar. Inside `jit` it is -1 where all slots are taken.

        Raises:
          ValueError: All slots are taken (outside of `jit`).

        Example:
          >>> import ato_jax, jax.numpy as jnp
          >>> cache = ato_jax.PagedCache.empty(
          ...     2, 8, num_pages=4, page_size=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32
          ... )
          >>> cache, slot = cache.allocate()
          >>> int(slot)
          0
        """
        sizes = _bind(self)
        cache, (slot, fine) = _allocate(self)
        _require(fine, (f"allocate() needs a free slot, and all B = {sizes['B']} are taken",), {})
        return cache, slot

    def append(
        self,
        k: ArrayLike,
        v: ArrayLike,
        *,
        slots: Integers | None = None,
        counts: Integers | None = None,
    ) -> tuple[PagedCache, jax.Array]:
        """Appends up to T keys and values to N sequences.

        A last page that is shared with another sequence and partly filled is copied first.

        Args:
          k: [N, T, G, D] in the cache's dtype.
          v: [N, T, G, V] in the cache's dtype.
          slots: Integers [N]: whose keys they are, no slot twice; -1 drops the entry. None means
            every slot: N = B, and entries of slots that are not allocated are dropped.
          counts: Integers [N] from 0 to T: how many of the T there are, the rest being padding.
            None means T.

        Returns:
          (cache, fits): fits is a bool scalar. Inside `jit` it is False where there are too few
          pages, a sequence would outgrow its row of the table, or slots or counts are wrong; the
          cache is then unchanged.

        Raises:
          ValueError: Shapes or dtypes are wrong; or, outside of `jit`, any of the above.

        Example:
          >>> import ato_jax, jax.numpy as jnp
          >>> cache = ato_jax.PagedCache.empty(
          ...     2, 8, num_pages=4, page_size=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32
          ... )
          >>> cache, slot = cache.allocate()
          >>> token = jnp.ones((2, 1, 1, 8))  # [B, T, G, D]: an entry for every slot
          >>> cache, fits = cache.append(token, token)
          >>> bool(fits), cache.lengths.tolist()
          (True, [1, 0])
        """
        sizes = _bind(self)
        k, v = (
            _as_cached(name, array, pages)
            for name, array, pages in (("k", k, self.k_pages), ("v", v, self.v_pages))
        )
        if slots is None:
            sizes["N"] = sizes["B"]
        shapes.bind(sizes, "k", k.shape, "NTGD")
        shapes.bind(sizes, "v", v.shape, "NTGV")
        given = {}  # as they came, for the messages
        if counts is not None:
            given["counts"] = counts = shapes.integers("counts", counts)
            shapes.bind(sizes, "counts", counts.shape, "N")
            counts = shapes.clipped(counts, -1, sizes["T"] + 1)
        if slots is not None:
            given["slots"] = slots = shapes.integers("slots", slots)
            shapes.bind(sizes, "slots", slots.shape, "N")
            slots = shapes.clipped(slots, -2, sizes["B"])
        S = sizes["pages"] * sizes["page"]
        cache, (fits, fine, numbers) = _append(self, k, v, slots, counts)
        messages = (
            f"slots must lie between -1 and B - 1 = {sizes['B'] - 1}, got {{slots}}",
            "slots must name none twice, got {slots}",
            "slots must name allocated ones, got {slots}: call allocate() first",
            f"counts must lie between 0 and T = {sizes['T']}, got {{counts}}",
            f"page_table must lie between 0 and P - 1 = {sizes['P'] - 1} where used, got {{table}}",
            f"k would make sequences of {{longer}} keys, and page_table has room for S = {S} each: "
            "make a cache of a greater max_length",
            f"k needs {{needed}} more pages, and of P = {sizes['P']} there are {{available}} left: "
            "free() a sequence, or make a cache of more pages",
        )
        _require(fine, messages, numbers | given)
        return cache, fits

    def fork(
        self, slot: ArrayLike, length: ArrayLike | None = None
    ) -> tuple[PagedCache, jax.Array]:
        """Takes a slot for a sequence that continues another one, and shares its pages.

        To take keys back from a sequence, fork it with a smaller `length` and free it.

        Args:
          slot: An integer: the slot of the sequence to continue.
          length: An integer: how many of its keys the new sequence has; None means all.

        Returns:
          (cache, new slot): the slot is an int32 scalar. Inside `jit` it is -1 where all slots are
          taken, `slot` is not allocated or its sequence is shorter than `length`.

        Raises:
          ValueError: An argument is no integer; or, outside of `jit`, any of the above.

        Example:
          >>> import ato_jax, jax.numpy as jnp
          >>> cache = ato_jax.PagedCache.empty(
          ...     2, 8, num_pages=4, page_size=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32
          ... )
          >>> cache, slot = cache.allocate()
          >>> prompt = jnp.ones((1, 6, 1, 8))
          >>> cache, _ = cache.append(prompt, prompt, slots=slot[None])
          >>> cache, other = cache.fork(slot)
          >>> cache.lengths.tolist(), int(cache.available)  # 6 keys in 2 of the 4 pages, shared
          ([6, 6], 2)
        """
        sizes = _bind(self)
        given = {"slot": _scalar("slot", slot)}  # as they came, for the messages
        slot = shapes.clipped(given["slot"], -1, sizes["B"])
        if length is not None:
            given["length"] = _scalar("length", length)
            length = shapes.clipped(given["length"], -1, shapes.INT32.max)
        cache, (new, fine, numbers) = _fork(self, slot, length)
        messages = (
            "slot must be an allocated one, got {slot}",
            "length must lie between 0 and the sequence's {held}, got {length}",
            f"fork() needs a free slot, and all B = {sizes['B']} are taken",
        )
        _require(fine, messages, numbers | given)
        return cache, new

    def free(self, slots: Integers) -> PagedCache:
        """Ends sequences: frees their slots, and the pages that no other sequence shares.

        Args:
          slots: An integer or integers [N]; -1 is ignored. Inside `jit`, so is a slot that is not
            allocated.

        Returns:
          The cache.

        Raises:
          ValueError: slots are no integers; or, outside of `jit`, one of them is not allocated.

        Example:
          >>> import ato_jax, jax.numpy as jnp
          >>> cache = ato_jax.PagedCache.empty(
          ...     2, 8, num_pages=4, page_size=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32
          ... )
          >>> cache, slot = cache.allocate()
          >>> cache = cache.free(slot)
          >>> cache.active.tolist()
          [False, False]
        """
        sizes = _bind(self)
        slots = shapes.integers("slots", slots).reshape(-1)
        cache, fine = _free(self, shapes.clipped(slots, -2, sizes["B"]))
        _require(fine, ("slots must name allocated ones, got {slots}",), {"slots": slots})
        return cache

    def defragment(self) -> PagedCache:
        """Moves the pages in use to the front, so that a shorter array would hold them.

        Only pages at or beyond the number of pages in use are moved. Their ids in the table change;
        the keys and values of the sequences do not.

        Returns:
          The cache.

        Raises:
          ValueError: The cache's arrays are not as a `PagedCache` has them.

        Example:
          >>> import ato_jax, jax.numpy as jnp
          >>> cache = ato_jax.PagedCache.empty(
          ...     2, 8, num_pages=4, page_size=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32
          ... )
          >>> prompts = jnp.ones((2, 3, 1, 8))
          >>> cache, first = cache.allocate()
          >>> cache, second = cache.allocate()
          >>> cache, _ = cache.append(prompts, prompts)
          >>> cache = cache.free(first)
          >>> cache.page_table[second].tolist(), cache.defragment().page_table[second].tolist()
          ([1, -1], [0, -1])
        """
        _bind(self)
        return _defragment(self)[0]

    def contiguous(self) -> tuple[jax.Array, jax.Array]:
        """Copies each slot's keys and values into one row, S = pages * page.

        Beyond a sequence's length a row holds whatever the pages hold: give `attention` the
        lengths.

        Returns:
          (k, v): [B, S, G, D] and [B, S, G, V].

        Raises:
          ValueError: The cache's arrays are not as a `PagedCache` has them.

        Example:
          >>> import ato_jax, jax.numpy as jnp
          >>> cache = ato_jax.PagedCache.empty(
          ...     2, 8, num_pages=4, page_size=4, num_kv_heads=1, head_dim=8, dtype=jnp.float32
          ... )
          >>> k, v = cache.contiguous()
          >>> k.shape
          (2, 8, 1, 8)
        """
        _bind(self)

        def rows(cache: PagedCache) -> tuple[jax.Array, ...]:
            pages = cache.k_pages, cache.v_pages
            found = [
                jnp.take(one, jnp.maximum(cache.page_table, 0), axis=0, mode="clip")
                for one in pages
            ]
            return tuple(one.reshape(one.shape[0], -1, *one.shape[3:]) for one in found)

        def partition_of_outputs() -> Any:
            slots, _ = meshes.partition(self.page_table)
            return tuple(
                meshes.sharded(slots, None, *meshes.partition(one)[2:])
                for one in (self.k_pages, self.v_pages)
            )

        k, v = meshes.call(rows, self, partition_of_outputs)
        return k, v


def _pages(length: Any, page: int) -> Any:
    """How many pages hold that many keys."""
    return -(-length // page)


def _stack(P: int) -> jax.Array:
    """All pages, the first on top."""
    return jnp.arange(P, dtype=jnp.int32)[::-1]


def _bind(cache: PagedCache) -> dict[str, int]:
    """The cache's sizes by their letters; a ValueError where its arrays are not as they must be."""
    sizes: dict[str, int] = {}
    pages = shapes.float_dtype("k_pages", shapes.dtype_name("k_pages", cache.k_pages))
    for name, dtype, letters in (
        ("k_pages", pages, ("P", "page", "G", "D")),
        ("v_pages", pages, ("P", "page", "G", "V")),
        ("page_table", "int32", ("B", "pages")),
        ("lengths", "int32", ("B",)),
        ("active", "bool", ("B",)),
        ("references", "int32", ("P",)),
        ("free_pages", "int32", ("P",)),
        ("available", "int32", ()),
    ):
        array = getattr(cache, name)
        found = shapes.dtype_name(name, array)
        if not isinstance(array, jax.Array | np.ndarray | np.generic):
            raise ValueError(f"{name} must be an array in a PagedCache, got {array!r}")
        if found != dtype:
            raise ValueError(f"{name} must be {dtype} in a PagedCache, got {found}")
        shapes.bind(sizes, name, np.shape(array), letters)
    return sizes


def _scalar(name: str, value: Any) -> jax.Array:
    found = shapes.integers(name, value)
    if found.ndim:
        raise ValueError(f"{name} must be a scalar, got shape {found.shape}")
    return found


def _as_cached(name: str, array: Any, pages: jax.Array) -> jax.Array:
    found = shapes.floating(name, array)
    if found.dtype != pages.dtype:
        raise ValueError(
            f"{name} must be {pages.dtype} as the cache is, got {found.dtype}; convert it, or make "
            "the cache with that dtype"
        )
    return found


def _require(fine: jax.Array, messages: tuple[str, ...], numbers: dict[str, jax.Array]) -> None:
    """A ValueError with the first message whose entry of `fine` does not hold.

    Inside jit nothing, and where `checked` looks the same as an error there.
    """
    if isinstance(fine, jax.core.Tracer):
        for n, message in enumerate(messages):
            checking.check(fine[n], message, **numbers)
        return
    for holds, message in zip(np.asarray(fine), messages, strict=True):
        if not holds:
            raise ValueError(message.format(**{key: np.asarray(n) for key, n in numbers.items()}))


def _first_free(cache: PagedCache) -> jax.Array:
    """A slot, -1 where all are taken."""
    return jnp.where(cache.active.all(), -1, jnp.argmin(cache.active)).astype(jnp.int32)


def _on_meshes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(cache, *arrays)`, a cache and what else it returns, where explicit axes of a mesh
    cut the cache: the new cache is cut alike, and the rest is the same on all devices.
    """

    @functools.wraps(function)
    def run(cache: PagedCache, *arrays: Any) -> Any:
        def partition_of_outputs() -> Any:
            found = PagedCache(*(meshes.sharded(*meshes.partition(one)) for one in cache))
            return found, meshes.sharded()

        return meshes.call(
            lambda given: function(given[0], *given[1:]), (cache, *arrays), partition_of_outputs
        )

    return run


@_on_meshes
@programs.jit()
def _allocate(cache: PagedCache) -> tuple[PagedCache, tuple[jax.Array, jax.Array]]:
    """As allocate, and what must hold, [1]."""
    slot = _first_free(cache)
    active = cache.active | (jnp.arange(cache.active.size) == slot)
    return cache._replace(active=active), (slot, slot[None] >= 0)


@_on_meshes
@programs.jit()
def _append(
    cache: PagedCache, k: jax.Array, v: jax.Array, slots: Any, counts: Any
) -> tuple[PagedCache, tuple[jax.Array, jax.Array, dict[str, jax.Array]]]:
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

    first = _pages(held, page) - copies  # the first column of the table that gets a page
    needs = jnp.where(grows, _pages(longer, page) - first, 0)
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
    most = 1 + _pages(max(T - 1, 0), page)
    columns = first[:, None] + jnp.arange(most)  # [N, most]
    takes = jnp.arange(most) < needs[:, None]
    ranks = (jnp.cumsum(needs) - needs)[:, None] + jnp.arange(most)
    taken = cache.free_pages[jnp.where(takes, cache.available - 1 - ranks, 0)]
    page_table = cache.page_table.at[jnp.where(takes, at[:, None], B), columns].set(
        taken, mode="drop"
    )
    references = cache.references.at[jnp.where(takes, taken, P)].add(1, mode="drop")
    references = references.at[jnp.where(copies, last, P)].add(-1, mode="drop")

    # One scatter of rows: what the copied page held, then what is new.
    positions = held[:, None] + jnp.arange(T)  # [N, T]
    homes = page_table[at[:, None], jnp.minimum(positions // page, pages - 1)]
    rows = jnp.broadcast_to(jnp.arange(page), (entries, page))
    copied = copies[:, None] & (rows < held[:, None] % page)
    homes = jnp.concatenate([jnp.broadcast_to(taken[:, :1], copied.shape), homes], 1)
    rows = jnp.concatenate([rows, positions % page], 1)  # [N, page + T]
    present = jnp.concatenate([copied, jnp.arange(T) < written[:, None]], 1)
    # What is left out gets a page of its own beyond the last, so that no row is there twice.
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


@_on_meshes
@programs.jit()
def _fork(
    cache: PagedCache, slot: jax.Array, length: Any
) -> tuple[PagedCache, tuple[jax.Array, jax.Array, dict[str, jax.Array]]]:
    """As fork, and what must hold, [3], and what its messages say."""
    P, page = cache.k_pages.shape[:2]
    B, pages = cache.page_table.shape
    new = _first_free(cache)
    known = (slot >= 0) & (slot < B)
    at = jnp.where(known, slot, 0)
    held = cache.lengths[at]
    length = held if length is None else length
    fine = jnp.stack([known & cache.active[at], (length >= 0) & (length <= held), new >= 0])
    new = jnp.where(fine.all(), new, -1)
    row = jnp.where(jnp.arange(pages) < _pages(length, page), cache.page_table[at], -1)
    chosen = jnp.arange(B) == new
    shared = jnp.where((row >= 0) & (new >= 0), row, P)
    cache = cache._replace(
        page_table=jnp.where(chosen[:, None], row, cache.page_table),
        lengths=jnp.where(chosen, length, cache.lengths),
        active=cache.active | chosen,
        references=cache.references.at[shared].add(1, mode="drop"),
    )
    return cache, (new, fine, {"slot": slot, "held": held, "length": length})


@_on_meshes
@programs.jit()
def _free(cache: PagedCache, slots: jax.Array) -> tuple[PagedCache, jax.Array]:
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


@_on_meshes
@programs.jit()
def _defragment(cache: PagedCache) -> tuple[PagedCache, None]:
    P = cache.references.size
    in_use = cache.references > 0
    behind = jnp.arange(P) >= in_use.sum()
    # As many pages in use lie behind the last place as there are holes before it.
    steps = _pages(P, MOVED_AT_ONCE)
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

    moves = _pages((in_use & behind).sum(), MOVED_AT_ONCE)
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
        free_pages=_stack(P),
    )
    return cache, None
