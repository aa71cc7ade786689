"""The check of a cache's table and lengths, where `decode_attention` can read them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ato_jax import checking, shapes
from ato_jax.ops.common import check_lengths


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
