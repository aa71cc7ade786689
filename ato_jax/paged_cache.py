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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ato_jax import checking, meshes, page_updates, shapes
from ato_jax.ops.common import Integers


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
            page_table=jnp.full((B, page_updates.pages_for(length, page)), -1, jnp.int32),
            lengths=jnp.zeros(B, jnp.int32),
            active=jnp.zeros(B, bool),
            references=jnp.zeros(P, jnp.int32),
            free_pages=page_updates.stack(P),
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
        cache, (slot, fine) = page_updates.allocate(self)
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
        cache, (fits, fine, numbers) = page_updates.append(self, k, v, slots, counts)
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
        cache, (new, fine, numbers) = page_updates.fork(self, slot, length)
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
        cache, fine = page_updates.free(self, shapes.clipped(slots, -2, sizes["B"]))
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
        return page_updates.defragment(self)[0]

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
