"""The pass that decays the features of q and k: a program has a run of rows and some columns.

Columns mix in no other way than by being decayed by their own sums, so a tile has few of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import sequences
from ato_jax.ops.linear_attention.triton.channel.chunk import Side, unrounded_side
from ato_jax.ops.linear_attention.triton.prepared.runs import load_columns, part_rows, slices
from ato_jax.ops.linear_attention.triton.stored.tiling import over_tiles
from ato_jax.ops.linear_attention.triton.walk import Walk
from ato_jax.triton import tiles
from ato_jax.triton.launch import launch, piece_id
from ato_jax.triton.tiles import Columns, Rows, Slice

PREPARE_COLUMNS, WARPS, STAGES = 64, 4, 2


class Prepared(NamedTuple):
    q: jax.Array  # [B, T, H, F] in the spec's layout, q^
    k: jax.Array  # [B, S, G, F], k~
    totals: jax.Array  # [B, G, P, parts of a run, F], the sums of the decays to base 2


def from_middle(half: Any, gates: jax.Array) -> jax.Array:
    """c of the rows of a run's first half (0) or second half (1), [C, f], from its decays."""
    whole = jnp.where(half == 0, jnp.sum(gates, axis=0), 0.0)
    return jax.lax.cumsum(gates, axis=0) - whole[None, :]


def decayed_side(
    spec: LinearAttentionSpec, x: jax.Array, rows: Rows, decay: jax.Array, columns: Columns
) -> Side:
    """Some columns x [C, f] of q or k, mapped and decayed, in float32."""
    return unrounded_side(spec, x.astype(jnp.float32), rows, decay, columns)


def prepare(spec: LinearAttentionSpec, inputs: Inputs, walk: Walk) -> Prepared:
    half = walk.pieces.rows // 2
    part = part_rows(walk)
    group = spec.H // spec.G
    axis = sequences.heads_axis(spec)
    count, width = slices(spec, PREPARE_COLUMNS)

    def kernel(
        q_ref: Any, k_ref: Any, gates_ref: Any, q_out: Any, k_out: Any, totals_ref: Any
    ) -> None:
        program = piece_id()
        run = program // count
        columns = Slice(program % count * width, width, spec.F)

        def write_half(i: Any, _: None) -> None:
            queries, keys = walk.rows_at(spec, {}, run * walk.pieces.rows + i * half, half)
            gates = load_columns(gates_ref, keys, columns)  # [C, f]
            c = from_middle(i, gates)
            k = tiles.load_tile(k_ref, keys, columns)  # [C, f]
            tiles.store_tile(k_out, keys, columns, decayed_side(spec, k, keys, -c, columns).edge)

            def write_head(head: Any, _: None) -> None:
                q = tiles.load_tile(q_ref, queries, columns, head, axis)  # [C, f]
                q = decayed_side(spec, q, queries, c, columns).edge
                tiles.store_tile(q_out, queries, columns, q, head, axis)

            over_tiles(0, group, group, write_head, None)
            totals = jnp.sum(gates.reshape(-1, part, width), axis=1)  # [parts of a half, f]
            parts = tiles.tile_rows(i * (half // part), half // part, 0, True)
            tiles.store_tile(totals_ref, parts, columns, totals)

        jax.lax.fori_loop(0, 2, write_half, None)

    P = walk.pieces.count
    parts = walk.pieces.rows // part
    queries = sequences.sequence_block(spec, spec.T, spec.D, sequences.own_head, group)
    keys = sequences.sequence_block(spec, spec.S, spec.D, sequences.own_head)
    found = launch(
        kernel,
        "linear_attention_prepare",
        grid=(P * count, spec.G, spec.B),
        in_specs=[queries, keys, keys],
        out_specs=[
            queries,
            keys,
            pl.BlockSpec(
                (None, None, None, parts, spec.F), lambda p, g, b: (b, g, p // count, 0, 0)
            ),
        ],
        out_shape=[
            sequences.sequence_shape(spec, spec.T, spec.H, spec.D),
            sequences.sequence_shape(spec, spec.S, spec.G, spec.D),
            jax.ShapeDtypeStruct((spec.B, spec.G, P, parts, spec.F), jnp.float32),
        ],
        warps=WARPS,
        stages=STAGES,
    )(inputs.q, inputs.k, inputs.decay)
    return Prepared(*found)
