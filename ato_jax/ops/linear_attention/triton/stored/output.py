"""The outputs of a run of queries, tile by tile (`causal.py` has the mathematics)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import mapping, powers, products, sequences
from ato_jax.ops.linear_attention.triton.config import Config
from ato_jax.ops.linear_attention.triton.pairs import STORED_QUERY_GATES, pairs_of
from ato_jax.ops.linear_attention.triton.reads import for_state, load_state, read_for_output
from ato_jax.ops.linear_attention.triton.scan import Edges
from ato_jax.ops.linear_attention.triton.steps import Steps, gates
from ato_jax.ops.linear_attention.triton.stored.tiling import over_tiles, sides_of_queries, tiling
from ato_jax.ops.linear_attention.triton.walk import Walk
from ato_jax.triton import tiles
from ato_jax.triton.launch import launch, piece_id
from ato_jax.triton.tiles import Columns


def output(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    steps: Steps,
    sides: list[Edges],
) -> jax.Array:
    cut = tiling(walk, config, config.output_block)
    arrays = steps.rows | steps.powers
    arrays |= gates(spec, walk, steps, walk.pieces.rows, STORED_QUERY_GATES)

    def kernel(
        refs: dict[str, Any], q_ref: Any, k_ref: Any, v_ref: Any, side_refs: Any, out_ref: Any
    ) -> None:
        start, run = cut.place(walk.with_queries * cut.in_run + piece_id())
        queries = walk.queries_at(spec, refs, start, cut.block)
        q = tiles.load_tile(q_ref, queries, spec.D)  # [C, D]
        phi_q = mapping.feature_operand(spec, q, queries, wide=True)  # [C, F]

        in_two = products.rounds_both_signs(spec)

        def map_part(columns: Columns) -> jax.Array:  # phi(q) [C, f]
            q = tiles.load_tile(q_ref, queries, columns)  # [C, f]
            if in_two:
                return mapping.features_of(spec, q, queries, columns)
            return mapping.feature_operand(spec, q, queries, columns, wide=True)

        unrounded = mapping.features_of(spec, q, queries) if in_two else phi_q  # [C, F]
        reading = for_state(spec, unrounded, map_part)
        state = load_state(spec, side_refs[0])
        out, den = read_for_output(spec, refs, "reads", start, reading, state)
        if walk.both_ways:
            state = load_state(spec, side_refs[1])
            right = read_for_output(spec, refs, "reads_right", start, reading, state)
            out, den = out + right[0], None if den is None else den + right[1]

        power = powers.of_head(refs)
        phi_q = powers.over(power, phi_q)

        def add_tile(j: Any, sums: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            out, den = sums
            first = run + j * cut.other
            keys = walk.keys_at(spec, refs, first, cut.other)
            k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
            wide = mapping.wide_features(spec)
            if power is None:
                phi_k = mapping.feature_operand(spec, k, keys, wide=wide)  # [C, F]
            else:
                phi_k = powers.times(power, mapping.features_of(spec, k, keys))  # [C, F]
                phi_k = products.operand(spec, phi_k, wide=wide)
            w = products.product(spec, phi_q, phi_k, wide=True, trans_b=True)  # [C, C]
            w = pairs_of(walk, refs, (start, cut.block), (first, cut.other)).weigh(w)
            if den is None:
                return products.add_weighted_sum(spec, out, w, v), den
            # The weights are summed as they are rounded for the product: roundings that are alike
            # cancel.
            den += jnp.sum(products.rounded(spec, w, wide=True), axis=1)
            return out + products.product(spec, w, v, wide=True), den

        last = (start - run + cut.block) // cut.other
        out, den = over_tiles(0, last, cut.others, add_tile, (out, den))
        out *= spec.scale if den is None else (1 / jnp.maximum(den, spec.eps))[:, None]
        tiles.store_tile(out_ref, queries, spec.V, out)

    kv_head = sequences.head_of_group(spec)
    return launch(
        kernel,
        "linear_attention_causal_output",
        grid=((walk.pieces.count - walk.with_queries) * cut.in_run, spec.H, spec.B),
        in_specs=[
            sequences.step_blocks(arrays, kv_head),
            *sequences.query_blocks(spec),
            sides_of_queries(spec, walk, cut, sides),
        ],
        out_specs=sequences.sequence_block(spec, spec.T, spec.V, sequences.own_head),
        out_shape=sequences.sequence_shape(spec, spec.T, spec.H, spec.V),
        warps=config.output_warps,
        stages=config.output_stages,
    )(arrays, inputs.q, inputs.k, inputs.v, [[side.kv, side.k_sum] for side in sides])
