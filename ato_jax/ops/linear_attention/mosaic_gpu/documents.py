"""Both passes of calls with segments, neither causal nor with a decay: `forward` and `backward`.

The backend (`__init__.py`) calls them. A segment is called a document here. A block processes one
document of one tile of heads, from its sums to its outputs, so that no state leaves the chip.
Forward (`document_output.py`) it reads k and v, then q: 4u in all, with u the size of one array.
Backward (`document_gradient.py`) it reads k and v, q and the cotangent of out, and k and v once
more: 9u; it reads nothing that the forward pass kept. Where queries and keys have the same
segments, all documents within a chunk of 64 rows are one item, computed from the pairs of its rows
(`document_pairs.py`): 4u and 7u, and at most two items a chunk, however short documents are. With
groups of query heads such items read k and v for each head.
"""

from __future__ import annotations

import jax.numpy as jnp

from ato_jax.ops.linear_attention.mosaic_gpu import document_table, frame
from ato_jax.ops.linear_attention.mosaic_gpu.document_gradient import document_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.document_output import document_output
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState, Outputs

# The fewest tiles, by heads in a tile. One long document is one block's work for each tile, so its
# time follows from T alone, while that of Triton's kernels falls with the number of tiles.
ENOUGH_TILES = {1: 16, 2: 24}


def are_faster_than_tritons(spec: LinearAttentionSpec) -> bool:
    """The lengths of documents are not known here. At T = 16,384 on an H200 documents of one row,
    of 30, of 1,024 rows and one document took B2 H16 D128 0.28, 0.61, 0.26 and 0.78 ms and by
    Triton's kernels 1.3, with gradients 0.74, 1.92, 0.76 and 2.41 and by Triton's 3.7; B8 H8 D64
    0.31, 0.56, 0.25 and 0.63 and 0.73, with gradients 0.73, 1.81, 0.67 and 1.87 and 2.03. With the
    fewest tiles here one document takes up to 1.2 times as long as by Triton's kernels (B1 H16
    T8192 D128: 0.40 and 0.36 ms), those of 300 rows 0.34 of its time. Where queries and keys have
    segments of their own, documents of a few rows are slow. Wide heads have other kernels, whose
    blocks share a document (`wide_heads.py`).
    """
    if frame.by_runs(spec):
        return spec.segments == "self"
    tiles = spec.B * spec.G // frame.heads_of_tile(spec)
    return spec.segments == "self" and tiles >= ENOUGH_TILES[frame.heads_of_tile(spec)]


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    """The state is no document's: it is 0."""
    deal, table = document_table.deal(spec, config), document_table.of(spec, inputs)
    out = document_output(spec, deal, table, inputs.q, inputs.k, inputs.v)
    of_state = spec.B, spec.G, spec.D, spec.V
    nothing = jnp.zeros(of_state, jnp.float32), jnp.zeros(of_state[:3], jnp.float32)
    return Outputs(out, LinearState(*nothing))


def backward(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, cotangents: Outputs
) -> Inputs:
    deal, table = document_table.deal(spec, config), document_table.of(spec, inputs)
    arrays = inputs.q, inputs.k, inputs.v, cotangents.out
    return Inputs(*document_gradient(spec, deal, table, *arrays))
