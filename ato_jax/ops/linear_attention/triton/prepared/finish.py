"""The last pass of the backward: from the gradients of decayed features to those of q, k and the
decays. A program has a run of rows and some columns, and takes half a run at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import products, sequences
from ato_jax.ops.linear_attention.triton.prepared.decayed import decayed_side, from_middle
from ato_jax.ops.linear_attention.triton.prepared.runs import (
    Turns,
    is_steep,
    load_columns,
    slices,
)
from ato_jax.ops.linear_attention.triton.stored.tiling import over_tiles
from ato_jax.ops.linear_attention.triton.walk import Walk
from ato_jax.triton import tiles
from ato_jax.triton.launch import launch, piece_id
from ato_jax.triton.tiles import Columns, Rows, Slice

FINISH_COLUMNS, WARPS = 32, 4


def _of_side(
    spec: LinearAttentionSpec,
    refs: tuple[Any, Any, Any],
    rows: Rows,
    columns: Columns,
    c: jax.Array,
    steep: jax.Array,
    *head: Any,
) -> tuple[jax.Array, jax.Array]:
    """The gradient of x, and the flow: that of its features times these, [C, f].

    Args:
      refs: x, the gradient of its decayed features, and what that lacks in steep runs.
      c: the decay of its features, [C, f].
      head: with x of several heads, which one and their axis.
    """
    x, dx = (tiles.load_tile(ref, rows, columns, *head) for ref in refs[:2])  # [C, f] each
    exist = steep if rows.real is None else rows.real & steep
    exist = jnp.broadcast_to(exist, rows.numbers.shape)
    rest = tiles.load_tile(refs[2], Rows(rows.numbers, exist, exist), columns, *head)  # [C, f]
    side = decayed_side(spec, x, rows, c, columns)
    # As the kernels multiplied them.
    read = jnp.where(steep, side.edge, products.rounded(spec, side.edge))
    return (dx + rest.astype(jnp.float32)) * side.edge_slopes, dx * read


def finish(
    spec: LinearAttentionSpec,
    inputs: Inputs,
    walk: Walk,
    turns: Turns,
    of_queries: tuple[jax.Array, jax.Array],
    of_keys: tuple[jax.Array, jax.Array],
    crossing: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and the decays' gradient.

    Args:
      of_queries, of_keys: dq^ and dk~ in float32, and in steep runs what these lack of the
        features' gradients.
      crossing: E of each run, [B, G, P, F].
    """
    half = walk.pieces.rows // 2
    group = spec.H // spec.G
    axis = sequences.heads_axis(spec)
    count, width = slices(spec, FINISH_COLUMNS)

    def kernel(
        q_ref: Any,
        k_ref: Any,
        gates_ref: Any,
        of_queries_refs: Any,
        of_keys_refs: Any,
        crossing_ref: Any,
        turns_ref: Any,
        dq_out: Any,
        dk_out: Any,
        d_gates_out: Any,
    ) -> None:
        program = piece_id()
        run = program // count
        columns = Slice(program % count * width, width, spec.F)
        steep = is_steep(turns_ref)

        def write_half(turn: Any, crossing: jax.Array) -> jax.Array:
            # From the end of the run; in a steep one from its start, less the rows before.
            i = jnp.where(steep, turn, 1 - turn)
            queries, keys = walk.rows_at(spec, {}, run * walk.pieces.rows + i * half, half)
            gates = load_columns(gates_ref, keys, columns)  # [C, f]
            c = from_middle(i, gates)
            c = jnp.where(steep, 0.0, c)
            dx, flow = _of_side(spec, (k_ref, *of_keys_refs), keys, columns, -c, steep)
            tiles.store_tile(dk_out, keys, columns, dx)

            def add_head(head: Any, flow: jax.Array) -> jax.Array:
                refs = (q_ref, *of_queries_refs)
                dx, added = _of_side(spec, refs, queries, columns, c, steep, head, axis)
                tiles.store_tile(dq_out, queries, columns, dx, head, axis)
                return flow + added

            flow = over_tiles(0, group, group, add_head, -flow)
            before, whole = jax.lax.cumsum(flow, axis=0) - flow, jnp.sum(flow, axis=0)
            d_gates = jnp.where(steep, 0.0, whole)[None, :] - before + crossing[None, :]
            tiles.store_tile(d_gates_out, keys, columns, d_gates)
            return crossing + jnp.where(steep, -whole, whole)

        jax.lax.fori_loop(0, 2, write_half, tiles.load_vector(crossing_ref, columns))  # [f]

    queries = sequences.sequence_block(spec, spec.T, spec.D, sequences.own_head, group)
    keys = sequences.sequence_block(spec, spec.S, spec.D, sequences.own_head)
    shape = sequences.sequence_shape(spec, spec.S, spec.G, spec.D)
    return tuple(
        launch(
            kernel,
            "linear_attention_finish",
            grid=(walk.pieces.count * count, spec.G, spec.B),
            in_specs=[
                queries,
                keys,
                keys,
                (queries, queries),
                (keys, keys),
                pl.BlockSpec((None, None, None, spec.F), lambda p, g, b: (b, g, p // count, 0)),
                pl.BlockSpec((None, None, None, 2), lambda p, g, b: (b, g, p // count, 0)),
            ],
            out_specs=[queries, keys, keys],
            out_shape=[
                sequences.sequence_shape(spec, spec.T, spec.H, spec.D),
                shape,
                shape.update(dtype=jnp.float32),
            ],
            warps=WARPS,
            stages=1,
        )(inputs.q, inputs.k, inputs.decay, of_queries, of_keys, crossing, turns)
    )
