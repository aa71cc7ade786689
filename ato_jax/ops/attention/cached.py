"""The arrays of decoding: a few queries per sequence, and the cache that they read; its checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ato_jax import checking, shapes
from ato_jax.meshes import partition, sharded
from ato_jax.ops.common import check_lengths

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


def check_cache(page_table: Any, lengths: Any, sizes: dict[str, int]) -> None:
    """A ValueError for a page that there is not, where table and lengths are on the host.

    Where `checked` looks an error for it, and for a length, wherever they are.
    """
    if lengths is not None:
        check_lengths("lengths", lengths, "S", sizes["S"])
    if page_table is None:
        return
    starts = np.arange(sizes["pages"]) * sizes["page"]
    span = f"P - 1 = {sizes['P'] - 1} where used"
    if checking.checking():
        table = jnp.asarray(page_table)
        used = starts < jnp.asarray(lengths).reshape(-1, 1)  # [B, pages]
        pages = shapes.clipped(table, -1, sizes["P"])
        exists = (pages >= 0) & (pages < sizes["P"])
        checking.check(
            (exists | ~used).all(),
            f"page_table must lie between 0 and {span}, got {{page_table}}",
            page_table=table,
        )
    elif not isinstance(page_table, jax.Array) and not isinstance(lengths, jax.Array):
        host = np.asarray(page_table).reshape(sizes["B"], sizes["pages"])
        of_use = host[starts < np.asarray(lengths).reshape(-1, 1)]
        shapes.within("page_table", of_use, 0, sizes["P"] - 1, span)
