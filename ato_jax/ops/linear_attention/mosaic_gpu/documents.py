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

from ato_jax.ops.linear_attention.mosaic_gpu import document_table
from ato_jax.ops.linear_attention.mosaic_gpu.document_gradient import document_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.document_output import document_output
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState, Outputs


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
