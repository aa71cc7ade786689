"""The arrays of decoding: a few queries of each sequence, and the cache that they read."""

from __future__ import annotations

from typing import NamedTuple

import jax

# Of a cache in 8 bits, where every row has a factor of its own.
EIGHT_BITS = ("int8", "float8_e4m3fn")
# More queries than this are a prefill.
MOST_QUERIES = 16


class CacheInputs(NamedTuple):
    """Key j of sequence b is row j % page of page table[b, j // page]; a page's number may be
    wrong, and then nobody sees its keys. Without a table it is row j of entry b: P = B, page = S.

    Of a cache in 8 bits, k and v are its rows times their scales. Where a spec's layout is "bhtd",
    so are q and, without a table, k and v.
    """

    q: jax.Array  # [B, T, H, D]
    k: jax.Array  # [P, page, G, D]
    v: jax.Array | None  # [P, page, G, V]; without it the first V columns of k
    lengths: jax.Array  # [B] int32, keys of each sequence
    table: jax.Array | None = None  # [B, pages] int32
    k_scales: jax.Array | None = None  # [P, page, G] float32
    v_scales: jax.Array | None = None  # [P, page, G] float32
    first: jax.Array | None = None  # [B] int32, query 0's position; lengths - T without it
    q_lengths: jax.Array | None = None  # [B] int32
    sinks: jax.Array | None = None  # [H] float32
