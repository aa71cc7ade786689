"""The outputs under a decay per step and channel, in one kernel or, beside a small state, in two.

A state of few features leaves registers to walk mild pieces in a kernel of their own, in which less
passes between threads and no pairs are parted: `mild_output`. `output` then walks the other pieces
only, and writes into the same array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import products, sequences
from ato_jax.ops.linear_attention.triton.channel.chunk import (
    finely,
    frame_of,
    load_gates,
    mild_parts,
    output_of,
    pairs,
    reading_side,
    side_of,
    sums_of,
    unrounded_side,
)
from ato_jax.ops.linear_attention.triton.channel.states import (
    States,
    is_mild,
    load_state,
    walk_chunks,
)
from ato_jax.ops.linear_attention.triton.config import Config
from ato_jax.ops.linear_attention.triton.walk import Walk
from ato_jax.triton import tiles
from ato_jax.triton.arithmetic import exp2
from ato_jax.triton.launch import launch, piece_id


def mild_output(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, walk: Walk, states: States
) -> jax.Array:
    """The outputs of mild pieces; those of the others are left undefined.

    z is in every row of a tile, where the query's features are, by a product with ones, and the
    sums of the decays come from the states' pass. So only the denominators pass between threads.
    """
    block = config.output_block
    group = spec.H // spec.G
    width = tiles.padded(spec.F)
    chunks = walk.pieces.rows // block
    totals = states.totals.reshape(*states.totals.shape[:3], chunks, -1, spec.F).sum(axis=4)

    def kernel(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        gates_ref: Any,
        totals_ref: Any,
        kv_ref: Any,
        k_sum_ref: Any,
        steepest_ref: Any,
        out_ref: Any,
    ) -> None:
        piece = walk.with_queries + piece_id()
        row, column = pairs(block)

        def write(i: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            kv, z = state  # [V, F], [C, F]
            queries, keys = walk.rows_at(spec, {}, piece * walk.pieces.rows + i * block, block)
            q = tiles.load_tile(q_ref, queries, spec.D)  # [C, D]
            k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
            gates = load_gates(spec, gates_ref, keys, mild=True)  # [C, F]
            c = sums_of(column <= row, mild_parts(spec, gates))  # [C, F]
            total = tiles.load_rows(totals_ref, tiles.all_rows(spec.F), i)  # [F]
            keep = exp2(total)[None, :]
            adds = side_of(spec, k, keys, -c).edge
            reads = products.rounded(spec, unrounded_side(spec, q, queries, c).edge, wide=True)
            w = products.product(spec, reads, adds, wide=True, trans_b=True)  # [C, C]
            w = jnp.where(column <= row, w, 0.0)
            out = products.product(spec, reads, kv, wide=True, trans_b=True)  # [C, V]
            if spec.normalize:
                # w is summed as it is rounded for the product: the roundings cancel.
                w = products.rounded(spec, w, wide=True)
                if block == width:  # one sum of rows, which threads exchange, not two
                    den = jnp.sum(w + reads * z, axis=1)  # [C]
                else:
                    den = jnp.sum(w, axis=1) + jnp.sum(reads * z, axis=1)
                out += products.product(spec, w, v, wide=True)
                out *= (1 / jnp.maximum(den, spec.eps))[:, None]
                ones = jnp.ones((block, block), jnp.float32)
                z = (z + products.product(spec, ones, adds, wide=True)) * keep
            else:
                out = (out + finely(spec, w, v, fine="a")) * spec.scale
            tiles.store_tile(out_ref, queries, spec.V, out)
            return (kv + products.product(spec, v, adds, wide=True, trans_a=True)) * keep, z

        kv, z = load_state(spec, (kv_ref, k_sum_ref))
        turns = is_mild(spec, config, steepest_ref, block).astype(jnp.int32) * chunks
        jax.lax.fori_loop(0, turns, write, (kv, jnp.broadcast_to(z, (block, width))))

    def piece_of(p: Any, h: Any, b: Any) -> tuple[Any, ...]:
        return b, h // group, walk.with_queries + p

    q, k, v = sequences.query_blocks(spec)
    return launch(
        kernel,
        "linear_attention_channel_mild_output",
        grid=(walk.pieces.count - walk.with_queries, spec.H, spec.B),
        in_specs=[
            *(q, k, v, k),
            pl.BlockSpec((None, None, None, chunks, spec.F), lambda *ids: (*piece_of(*ids), 0, 0)),
            *sequences.state_blocks(spec, piece_of),
            pl.BlockSpec((None, None, None), piece_of),
        ],
        out_specs=sequences.sequence_block(spec, spec.T, spec.V, sequences.own_head),
        out_shape=sequences.sequence_shape(spec, spec.T, spec.H, spec.V),
        warps=config.output_warps,
        stages=config.output_stages,
    )(inputs.q, inputs.k, inputs.v, inputs.decay, totals, states.kv, states.k_sum, states.steepest)


def output(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    states: States,
    written: jax.Array | None,
) -> jax.Array:
    """The outputs; with `written` those of mild pieces are there already, and stay as they are."""
    block = config.output_block
    group = spec.H // spec.G
    extra = () if written is None else (written,)

    def kernel(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        gates_ref: Any,
        kv_ref: Any,
        k_sum_ref: Any,
        steepest_ref: Any,
        *refs: Any,
    ) -> None:
        out_ref = refs[-1]
        piece = walk.with_queries + piece_id()

        def write_chunk(mild: bool, block: int) -> Callable[..., Any]:
            index = pairs(block)

            def write(i: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                queries, keys = walk.rows_at(spec, {}, piece * walk.pieces.rows + i * block, block)
                q = tiles.load_tile(q_ref, queries, spec.D)  # [C, D]
                k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
                v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
                frame = frame_of(spec, gates_ref, keys, mild)  # [C, F]
                reads = reading_side(spec, q, queries, frame.since)
                adds = side_of(spec, k, keys, frame.until)

                def store(out: jax.Array) -> None:
                    tiles.store_tile(out_ref, queries, spec.V, out)

                return output_of(spec, frame, index, reads, adds, v, state, store)

            return write

        kinds: tuple[bool, ...] = (True, False)
        wanted: jax.Array | None = None
        if written is not None:
            kinds = (False,)
            wanted = ~is_mild(spec, config, steepest_ref, block)
        state = load_state(spec, (kv_ref, k_sum_ref), wanted)
        walk_chunks(spec, config, walk.pieces, steepest_ref, block, write_chunk, state, kinds)

    def piece_of(p: Any, h: Any, b: Any) -> tuple[Any, ...]:
        return b, h // group, walk.with_queries + p

    q, k, v = sequences.query_blocks(spec)
    outs = sequences.sequence_block(spec, spec.T, spec.V, sequences.own_head)
    read = (inputs.q, inputs.k, inputs.v, inputs.decay)
    arrays = (*read, states.kv, states.k_sum, states.steepest)
    return launch(
        kernel,
        "linear_attention_channel_output",
        grid=(walk.pieces.count - walk.with_queries, spec.H, spec.B),
        in_specs=[
            *(q, k, v, k),
            *sequences.state_blocks(spec, piece_of),
            pl.BlockSpec((None, None, None), piece_of),
            *[outs] * len(extra),
        ],
        out_specs=outs,
        out_shape=sequences.sequence_shape(spec, spec.T, spec.H, spec.V),
        warps=config.output_warps,
        stages=config.output_stages,
        aliases={len(arrays): 0} if extra else {},
    )(*arrays, *extra)
