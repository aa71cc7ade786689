"""The arrays of decoding: a few queries per sequence, and the cache that they read."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from ato_jax.meshes import partition, sharded

# The dtypes of a cache in 8 bits, where every row has a scale of its own.
EIGHT_BITS = ("int8", "float8_e4m3fn")
# More queries than this are a prefill.
MOST_QUERIES = 16


class CacheInputs(NamedTuple):
    """The arrays of one decoding call.

    Key j of sequence b is row j % page of page table[b, j // page]. No query sees the keys of a
    page whose number is out of range. Without a table it is row j of entry b: P = B, page = S.

    In a cache of 8 bits the keys are k times `k_scales`, and the values v times `v_scales`. A
    spec's layout "bhtd" is that of q and, without a table, of k and v.
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

    def letters(self) -> Any:
        """The tree with each array replaced by the letters of its axes (`partitioning.py`).

        Pages belong to no sequence: all devices that share a batch read all of them.
        """
        rows = ".." if self.table is not None else "BS"
        every = ("BTHD", rows + "GD", rows + "GV", "B", "B.", rows + "G", rows + "G", "B", "B", "H")
        given: Any = (
            None if array is None else letters
            for array, letters in zip(self, every, strict=True)
        )
        return CacheInputs(*given)

    def partition_of_outputs(self) -> Any:
        """(out, lse) with a `PartitionSpec` in place of each array."""
        rows = partition(self.q)[:3]
        return sharded(*rows, None), sharded(*rows)
