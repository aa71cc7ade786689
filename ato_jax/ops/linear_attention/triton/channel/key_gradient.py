"""dk, dv and the decays' gradient under a decay per step and channel: a walk over each piece from
its end, which knows dS and dz."""

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
    pairs,
    side_of,
    sum_rows,
)
from ato_jax.ops.linear_attention.triton.channel.gradients import (
    KeySums,
    add_pairs_of_keys,
    finish_gradient,
    read_cotangent,
)
from ato_jax.ops.linear_attention.triton.channel.query_gradient import Normalizer
from ato_jax.ops.linear_attention.triton.channel.states import States, load_state, walk_chunks
from ato_jax.ops.linear_attention.triton.config import Config
from ato_jax.ops.linear_attention.triton.walk import Walk
from ato_jax.triton import tiles
from ato_jax.triton.launch import launch, piece_id


def _sums_from_the_end(flow: jax.Array, later: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum over the rows of a flow [C, F] and `later` [F], and those over each row and the ones
    behind it, [C, F]: from the first row, since Triton has no prefix sum from the last one."""
    later += jnp.sum(flow, axis=0)
    before = jnp.cumsum(flow, axis=0) - flow
    return later, later[None, :] - before


def key_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    states: States,
    cotangent: tuple[jax.Array, jax.Array],
    flow: jax.Array,
    normalizer: Normalizer | None,
    do: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dk, dv and the decays' gradient, summed over the query heads of each key/value head.

    With a returned state the last piece of the latter has the flow of each step instead, which
    `channel.backward` sums up.

    Args:
      cotangent: dS^T [B, G, P + 1, V, F] and dz [B, G, P + 1, F] at the pieces' edges.
      flow: phi(q) d_phi_q, [B, H, T, F].
    """
    group = spec.H // spec.G
    axis = sequences.heads_axis(spec)

    def kernel(
        sequence_refs: tuple[Any, ...],
        flow_ref: Any,
        state_refs: tuple[Any, Any],
        cotangent_refs: tuple[Any, Any],
        steepest_ref: Any,
        normalizer_refs: tuple[Any, ...],
        *gradient_refs: Any,
    ) -> None:
        q_ref, k_ref, v_ref, gates_ref, do_ref = sequence_refs
        dk_ref, dv_ref, d_gates_ref = gradient_refs
        piece = piece_id()

        def write_chunk(mild: bool, block: int) -> Callable[..., Any]:
            index = pairs(block)  # keys, queries
            chunks = walk.pieces.rows // block

            def write(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                dkv, dz, later = carry  # [V, F], [1, F], [F]
                start = piece * walk.pieces.rows + (chunks - 1 - i) * block
                queries, keys = walk.rows_at(spec, {}, start, block)
                k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
                v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
                frame = frame_of(spec, gates_ref, keys, mild)  # [C, F]
                adds = side_of(spec, k, keys, frame.until)
                sums = read_cotangent(spec, frame, adds, v, (dkv, dz))

                def add_head(head: Any, sums: KeySums) -> KeySums:
                    q = tiles.load_tile(q_ref, queries, spec.D, head, axis)  # [C, D]
                    do = tiles.load_tile(do_ref, queries, spec.V, head, axis)  # [C, V]
                    do = products.operand(spec, do)
                    reads = side_of(spec, q, queries, frame.since)
                    dz, inverse = sums.dz, jnp.full((block,), spec.scale, jnp.float32)
                    if spec.normalize:
                        inverse = tiles.load_rows(normalizer_refs[1], queries, head)  # [C]
                    d_num = do.astype(jnp.float32) * inverse[:, None]  # [C, V]
                    # Not v . d_num, which is rounded: these terms are a difference.
                    dw = products.product(spec, v, do, trans_b=True)  # [C keys, C queries]
                    dw *= inverse[None, :]
                    if spec.normalize:
                        d_den = tiles.load_rows(normalizer_refs[0], queries, head)  # [C]
                        dw += d_den[None, :]
                        dz += sum_rows(d_den[:, None] * reads.edge.astype(jnp.float32))
                    sums = add_pairs_of_keys(
                        spec, frame, index, sums, adds, reads, dw, inverse, do
                    )
                    flow = sums.flow + tiles.load_tile(flow_ref, queries, spec.F, head, 0)  # [C, F]
                    dkv = sums.dkv + finely(spec, d_num, reads.edge, fine="a", trans_a=True)
                    return sums._replace(flow=flow, dkv=dkv, dz=dz)

                sums = sums._replace(flow=jnp.zeros_like(frame.since))
                sums = jax.lax.fori_loop(0, group, add_head, sums)
                dk, of_keys = finish_gradient(sums.gradient, adds)
                tiles.store_tile(dv_ref, keys, spec.V, sums.dv)
                tiles.store_tile(dk_ref, keys, spec.D, dk)
                flow = sums.flow - of_keys
                later, d_gates = _sums_from_the_end(flow, later)
                if spec.return_state:
                    d_gates = jnp.where(piece == walk.pieces.count - 1, flow, d_gates)
                tiles.store_tile(d_gates_ref, keys, spec.F, d_gates)
                return sums.dkv, sums.dz, later

            return write

        dkv, dz = load_state(spec, cotangent_refs)
        kv = tiles.load_matrix(state_refs[0], spec.V, spec.F)  # [V, F]
        later = jnp.sum(kv * dkv, axis=0)  # [F]
        if spec.normalize or spec.return_state:
            z = tiles.load_vector(state_refs[1], spec.F)  # [F]
            later += z * tiles.load_vector(cotangent_refs[1], spec.F)  # [F]
        carry = (dkv, dz, later)
        walk_chunks(spec, config, walk.pieces, steepest_ref, config.dkv_block, write_chunk, carry)

    _, keys, values, *_ = sequences.gated_blocks_of_group(spec)
    behind = tuple(sequences.state_blocks(spec, lambda p, g, b: (b, g, p + 1)))
    gates_shape = sequences.sequence_shape(spec, spec.S, spec.G, spec.D).update(dtype=jnp.float32)
    normalizers = tuple(normalizer or ())
    return tuple(
        launch(
            kernel,
            "linear_attention_channel_key_gradient",
            grid=(walk.pieces.count, spec.G, spec.B),
            in_specs=[
                sequences.gated_blocks_of_group(spec),
                pl.BlockSpec((None, group, spec.T, spec.F), lambda p, g, b: (b, g, 0, 0)),
                behind,
                behind,
                pl.BlockSpec((None, None, None), lambda p, g, b: (b, g, p)),
                (sequences.group_row_vectors(spec),) * len(normalizers),
            ],
            out_specs=[keys, values, keys],
            out_shape=[
                sequences.sequence_shape(spec, spec.S, spec.G, spec.D),
                sequences.sequence_shape(spec, spec.S, spec.G, spec.V),
                gates_shape,
            ],
            warps=config.dkv_warps,
            stages=config.dkv_stages,
        )(
            (inputs.q, inputs.k, inputs.v, inputs.decay, do),
            flow,
            (states.kv, states.k_sum),
            cotangent,
            states.steepest,
            normalizers,
        )
    )
