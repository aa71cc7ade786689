"""From the sums of each piece to the states between pieces, with or without decays.

    S[0] = start,  S[p + 1] = exp(decay[p]) S[p] + sums[p]          p = 0, 1, .., P - 1
    S[P] = start,  S[p] = exp(decay[p]) S[p + 1] + sums[p]          reversed, p = P - 1, .., 0

where decay[p], the sum of the log-decays of piece p, is missing, a number, or one for each of the
F columns. One program takes some rows of kv, walks the pieces in order and keeps its rows of the
state in registers, so that each sum is read once and each state written once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ato_jax.ops.linear_attention.triton import tiles

# Few, so that there are programs enough where there are few heads.
ROWS = 16


def states_between(
    kv: jax.Array,
    k_sum: jax.Array,
    start: tuple[jax.Array, jax.Array],
    decay: jax.Array | None = None,
    *,
    reverse: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The states between the pieces, with those at both ends: P + 1 of them.

    Args:
      kv: [B, G, P, V, F] float32, the sums of each piece.
      k_sum: [B, G, P, F] float32, likewise.
      start: [B, G, V, F] and [B, G, F], the state before the first piece (after the last one).
      decay: None, [B, G, P] or [B, G, P, F] float32.
      reverse: from the last piece to the first.
    """
    B, G, P, V, width = kv.shape
    per_channel = decay is not None and decay.ndim == 4

    def kernel(
        kv_ref: Any, k_sum_ref: Any, kv_start_ref: Any, k_sum_start_ref: Any, *refs: Any
    ) -> None:
        *decay_refs, kv_out_ref, k_sum_out_ref = refs
        block = pl.program_id(0)
        rows = tiles.tile_rows(block * ROWS, ROWS, V, V % ROWS == 0)
        columns = jnp.arange(tiles.padded(width), dtype=jnp.int32)
        real = columns < width
        mask = jnp.broadcast_to(real[None, :], (ROWS, tiles.padded(width)))
        if rows.exist is not None:
            mask &= rows.exist[:, None]

        def store(p: Any, kv: jax.Array, k_sum: jax.Array) -> None:
            plgpu.store(kv_out_ref.at[p, rows.numbers[:, None], columns[None, :]], kv, mask=mask)
            # Every program has k_sum, the first one writes it.
            plgpu.store(k_sum_out_ref.at[p, columns], k_sum, mask=real & (block == 0))

        def add_piece(i: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            kv, k_sum = state  # [ROWS, F], [F]
            p = P - 1 - i if reverse else i
            store(p + 1 if reverse else p, kv, k_sum)
            if decay is not None:
                if per_channel:
                    log = plgpu.load(decay_refs[0].at[p, columns], mask=real, other=0.0)  # [F]
                else:
                    log = jnp.broadcast_to(decay_refs[0][p], columns.shape)
                keep = jnp.exp2(log * tiles.LOG2_E)
                kv, k_sum = kv * keep[None, :], k_sum * keep
            kv += tiles.load_tile(kv_ref, rows, width, p, 0)
            k_sum += plgpu.load(k_sum_ref.at[p, columns], mask=real, other=0.0)
            return kv, k_sum

        state = (
            tiles.load_tile(kv_start_ref, rows, width),
            plgpu.load(k_sum_start_ref.at[columns], mask=real, other=0.0),
        )
        kv, k_sum = jax.lax.fori_loop(0, P, add_piece, state)
        store(0 if reverse else P, kv, k_sum)

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda v, g, b: (b, g, *[0] * len(shape)))

    return tuple(
        tiles.launch(
            kernel,
            "linear_attention_scan",
            grid=(pl.cdiv(V, ROWS), G, B),
            in_specs=[
                whole(P, V, width),
                whole(P, width),
                whole(V, width),
                whole(width),
                *([] if decay is None else [whole(*decay.shape[2:])]),
            ],
            out_specs=[whole(P + 1, V, width), whole(P + 1, width)],
            out_shape=[
                jax.ShapeDtypeStruct((B, G, P + 1, V, width), jnp.float32),
                jax.ShapeDtypeStruct((B, G, P + 1, width), jnp.float32),
            ],
            warps=4,
            stages=3,
        )(kv, k_sum, *start, *([] if decay is None else [decay]))
    )
