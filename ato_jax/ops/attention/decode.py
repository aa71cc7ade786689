"""Decoding: the newest queries of each sequence against a cache of keys and values in pages.

    query i of sequence b stands at position lengths[b] - T + i and sees the keys up to there
    key j of sequence b is row j % page of page page_table[b, j // page]
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ato_jax import shapes
from ato_jax.ops.attention.api import attention

# More queries than this are a prefill: `attention` is made for them.
MOST_QUERIES = 16


def decode_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    lengths: Any,
    *,
    window: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    scale: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attention of the T newest queries of each sequence against a paged cache.

    The queries are causal among themselves; their own keys and values are in the cache already,
    and counted in `lengths`. Only the pages that hold a sequence's first `lengths` keys are read:
    the other ids in its row of the table may be anything, and no NaN in unused rows or pages gets
    into an output.

    Args:
      q: [B, T, H, D], T from 1 to 16.
      k_pages: [P, page, G, D] with H % G == 0; the query heads of a group share each key.
      v_pages: [P, page, G, V].
      page_table: [B, pages] integers: which page holds keys 0 to page - 1, which the next, ...
      lengths: [B] integers, keys per sequence, the T newest included.
      window: (left, right): keys from position - left on, None for no bound.
      softcap, sinks, scale, return_lse: as in `attention`.

    Returns:
      out [B, T, H, V], or (out, lse) with `return_lse`: lse float32 [B, T, H]. A query that sees
      nothing, as in an empty sequence, gives 0, and -inf (the sink's logit where there is one).
    """
    q = shapes.floating("q", q)
    k_pages, v_pages = (
        shapes.floating(name, array, str(q.dtype))
        for name, array in (("k_pages", k_pages), ("v_pages", v_pages))
    )
    sizes: dict[str, int] = {}
    shapes.bind(sizes, "q", q.shape, ("B", "T", "H", "D"))
    shapes.bind(sizes, "k_pages", k_pages.shape, ("P", "page", "G", "D"))
    shapes.bind(sizes, "v_pages", v_pages.shape, ("P", "page", "G", "V"))
    table = shapes.integers("page_table", page_table)
    shapes.bind(sizes, "page_table", table.shape, ("B", "pages"))
    if not 1 <= sizes["T"] <= MOST_QUERIES:
        raise ValueError(
            f"q must hold between 1 and {MOST_QUERIES} queries, got T={sizes['T']}; "
            "use attention() for more"
        )
    for axis in ("P", "page"):
        if sizes[axis] < 1:
            raise ValueError(f"axis {axis} of k_pages must be at least 1, got {axis}=0")
    sizes["S"] = sizes["pages"] * sizes["page"]
    keys = shapes.lengths("lengths", lengths, sizes, "S")
    _check_used_pages(page_table, lengths, sizes)

    used = -(-keys // sizes["page"])[:, None]  # pages of each sequence
    table = shapes.clipped(table, 0, sizes["P"] - 1)
    table = jnp.where(jnp.arange(sizes["pages"]) < used, table, 0)

    def contiguous(pages: jax.Array) -> jax.Array:
        """[P, page, G, D] -> [B, S, G, D]"""
        found = jnp.take(pages, table, axis=0, mode="clip")
        return found.reshape(sizes["B"], sizes["S"], *pages.shape[2:])

    return attention(
        q,
        contiguous(k_pages),
        contiguous(v_pages),
        causal=True,
        window=window,
        query_offset=keys - sizes["T"],
        # Said of both sides: where T = S, the one given would stand for the other, too.
        q_lengths=jnp.full(sizes["B"], sizes["T"], jnp.int32),
        kv_lengths=keys,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        return_lse=return_lse,
        implementation="xla",
    )


def _check_used_pages(page_table: Any, lengths: Any, sizes: dict[str, int]) -> None:
    """A ValueError for a page that there is not, where table and lengths are on the host."""
    if isinstance(page_table, jax.Array) or isinstance(lengths, jax.Array):
        return
    starts = np.arange(sizes["pages"]) * sizes["page"]
    used = np.asarray(page_table)[starts < np.asarray(lengths)[:, None]]
    shapes.within("page_table", used, 0, sizes["P"] - 1, f"P - 1 = {sizes['P'] - 1} where used")
