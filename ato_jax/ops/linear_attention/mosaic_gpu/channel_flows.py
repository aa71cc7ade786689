"""The last pass of the gradients with a gate for each step and channel (`channel_backward.py`).

Row by row but for a sum over the steps of a run, and all memory's: a kernel by Triton.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.mosaic_gpu import channel, frame
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import prepared, tiles

# Of a tile; and so many programs for the columns of a run.
ROWS, COLUMNS, WARPS = 32, 64, 4


def of_flows(
    spec: LinearAttentionSpec,
    k: jax.Array,
    of_queries: jax.Array,
    of_keys: jax.Array,
    crossing: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """dk and the gates' gradient, from both flows and E [B, H, runs, F]."""
    slices = frame.F // COLUMNS
    whole = spec.T % channel.RUN == 0

    def kernel(
        k_ref: Any,
        of_queries_ref: Any,
        of_keys_ref: Any,
        crossing_ref: Any,
        dk_ref: Any,
        d_gates_ref: Any,
    ) -> None:
        run, number = tiles.piece_id() // slices, tiles.piece_id() % slices
        columns = prepared.Slice(number * COLUMNS, COLUMNS, frame.F)

        def of_rows(i: Any, crossing: jax.Array) -> jax.Array:
            rows = tiles.tile_rows(run * channel.RUN + i * ROWS, ROWS, spec.T, whole)
            k, of_keys, of_queries = (
                tiles.load_tile(ref, rows, columns)
                for ref in (k_ref, of_keys_ref, of_queries_ref)
            )
            # phi(k) = (max(k, 0) + 1) phi'(k)
            over = jnp.maximum(k.astype(jnp.float32), 0.0) + 1.0
            tiles.store_tile(dk_ref, rows, columns, of_keys / over)
            passing = of_keys - of_queries
            before = jax.lax.cumsum(passing, axis=0) - passing
            tiles.store_tile(d_gates_ref, rows, columns, crossing[None, :] + before)
            return crossing + jnp.sum(passing, axis=0)

        crossing = tiles.load_vector(crossing_ref, columns)
        jax.lax.fori_loop(0, channel.RUN // ROWS, of_rows, crossing)

    rows = tiles.sequence_block(spec, spec.T, frame.F, lambda p, h, b: (b, h))
    of_run = pl.BlockSpec((None, None, None, frame.F), lambda p, h, b: (b, h, p // slices, 0))
    shape = tiles.sequence_shape(spec, spec.T, spec.H, frame.F)
    found = tiles.launch(
        kernel,
        "linear_attention_channel_flows",
        grid=(pl.cdiv(spec.T, channel.RUN) * slices, spec.H, spec.B),
        in_specs=[rows, rows, rows, of_run],
        out_specs=[rows, rows],
        out_shape=[shape, shape.update(dtype=jnp.float32)],
        warps=WARPS,
        stages=1,
    )(k, of_queries, of_keys, crossing)
    return tuple(found)
