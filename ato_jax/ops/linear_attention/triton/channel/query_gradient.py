"""dq under a decay per step and channel: a walk over each piece, which knows S and z."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import products, sequences
from ato_jax.ops.linear_attention.triton.channel.chunk import (
    advance,
    finely,
    frame_of,
    pairs,
    side_of,
    sum_rows,
)
from ato_jax.ops.linear_attention.triton.channel.gradients import (
    finish_gradient,
    pairs_of_queries,
    read_chunk,
)
from ato_jax.ops.linear_attention.triton.channel.states import States, load_state, walk_chunks
from ato_jax.ops.linear_attention.triton.config import Config
from ato_jax.ops.linear_attention.triton.walk import Walk
from ato_jax.triton import tiles
from ato_jax.triton.launch import launch, piece_id


class Normalizer(NamedTuple):
    """The normaliser's terms, which the walk for dk and dv reads, [B, H, T] float32."""

    d_den: jax.Array  # e / den
    inverse: jax.Array  # 1 / den


class QueryPass(NamedTuple):
    """The results of the walk for dq."""

    dq: jax.Array
    flow: jax.Array  # phi(q) d_phi_q, [B, H, T, F] float32
    # As seen from each piece's start: dS^T [B, H, pieces, V, F] and dz [B, H, pieces, F].
    dkv: jax.Array
    dk_sum: jax.Array
    normalizer: Normalizer | None


def query_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    states: States,
    do: jax.Array,
) -> QueryPass:
    group = spec.H // spec.G
    count = walk.pieces.count - walk.with_queries

    def kernel(
        sequence_refs: tuple[Any, ...],
        state_refs: tuple[Any, Any],
        steepest_ref: Any,
        gradient_refs: tuple[Any, Any],
        sum_refs: tuple[Any, Any],
        normalizer_refs: list[Any],
    ) -> None:
        q_ref, k_ref, v_ref, gates_ref, do_ref = sequence_refs
        piece = walk.with_queries + piece_id()

        def write_chunk(mild: bool, block: int) -> Callable[..., Any]:
            index = pairs(block)

            def write(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                kv, z, dkv, dz, since_start = carry  # [V, F], [1, F], [V, F], [1, F], [1, F]
                queries, keys = walk.rows_at(spec, {}, piece * walk.pieces.rows + i * block, block)
                q = tiles.load_tile(q_ref, queries, spec.D)  # [C, D]
                k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
                v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
                do = products.operand(spec, tiles.load_tile(do_ref, queries, spec.V))  # [C, V]
                frame = frame_of(spec, gates_ref, keys, mild)  # [C, F]
                reads = side_of(spec, q, queries, frame.since)
                adds = side_of(spec, k, keys, frame.until)
                edge = reads.edge.astype(jnp.float32)  # [C, F]
                read = read_chunk(spec, frame, index, reads, adds, edge, v, do, (kv, z))
                inverse = read.inverse
                d_den: jax.Array | None = None
                if read.e is not None:
                    d_den = read.e * inverse
                    tiles.store_rows(normalizer_refs[0], queries, d_den)
                    tiles.store_rows(normalizer_refs[1], queries, inverse)
                found = pairs_of_queries(spec, frame, index, read, reads, adds)
                dq, flow = finish_gradient(found, reads)
                tiles.store_tile(gradient_refs[0], queries, spec.D, dq * inverse[:, None])
                tiles.store_tile(gradient_refs[1], queries, spec.F, flow * inverse[:, None])
                added = products.product(spec, v, adds.edge, wide=True, trans_a=True)
                d_num = do.astype(jnp.float32) * inverse[:, None]  # [C, V]
                # As seen from the start of the piece.
                u = products.operand(spec, edge * since_start, wide=True)  # [C, F]
                dkv += finely(spec, d_num, u, fine="a", trans_a=True)
                if d_den is not None:
                    dz += sum_rows(d_den[:, None] * u.astype(jnp.float32))
                return advance(frame, kv, added), read.z, dkv, dz, since_start * frame.keep

            return write

        state = load_state(spec, state_refs)
        nothing = products.no_state(spec, 1)
        carry = (*state, *nothing, jnp.ones((1, tiles.padded(spec.F)), jnp.float32))
        carry = walk_chunks(
            spec, config, walk.pieces, steepest_ref, config.dq_block, write_chunk, carry
        )
        _, _, dkv, dz, _ = carry
        tiles.store_matrix(sum_refs[0], spec.V, spec.F, dkv)
        tiles.store_vector(sum_refs[1], spec.F, dz[0])

    def piece_of(p: Any, h: Any, b: Any) -> tuple[Any, ...]:
        return b, h // group, walk.with_queries + p

    per_row, row_shape = sequences.row_vectors(spec)
    extra = 2 if spec.normalize else 0
    queries, keys, values = sequences.query_blocks(spec)
    flows = pl.BlockSpec((None, None, spec.T, spec.F), lambda p, h, b: (b, h, 0, 0))
    flows_shape = jax.ShapeDtypeStruct((spec.B, spec.H, spec.T, spec.F), jnp.float32)
    (dq, flow), (dkv, dk_sum), normalizer = launch(
        kernel,
        "linear_attention_channel_query_gradient",
        grid=(count, spec.H, spec.B),
        in_specs=[
            (
                *(queries, keys, values, keys),
                sequences.sequence_block(spec, spec.T, spec.V, sequences.own_head),
            ),
            tuple(sequences.state_blocks(spec, piece_of)),
            pl.BlockSpec((None, None, None), piece_of),
        ],
        out_specs=[
            (queries, flows),
            tuple(sequences.state_blocks(spec, lambda p, h, b: (b, h, p))),
            [per_row] * extra,
        ],
        out_shape=[
            (sequences.sequence_shape(spec, spec.T, spec.H, spec.D), flows_shape),
            tuple(sequences.state_shapes(spec, spec.H, count)),
            [row_shape] * extra,
        ],
        warps=config.dq_warps,
        stages=config.dq_stages,
    )(
        (inputs.q, inputs.k, inputs.v, inputs.decay, do),
        (states.kv, states.k_sum),
        states.steepest,
    )
    return QueryPass(dq, flow, dkv, dk_sum, Normalizer(*normalizer) if normalizer else None)
