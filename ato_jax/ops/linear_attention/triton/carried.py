"""One program walks a piece chunk by chunk, its running state in registers (`causal.py`).

The backward here is that of calls without a decay. The gradient of a decay needs the state and its
cotangent at the same place, and each of the two walks knows only one of them (`steps.py`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import mapping, powers, products, sequences
from ato_jax.ops.linear_attention.triton.config import Config
from ato_jax.ops.linear_attention.triton.gradients import (
    Normalizer,
    QueryGradient,
    feature_gradient,
    normalizer_terms,
)
from ato_jax.ops.linear_attention.triton.pairs import CAUSAL_GATES, add_weighted, pairs_of
from ato_jax.ops.linear_attention.triton.reads import (
    State,
    load_cotangent,
    load_state,
    read_for_features,
    read_for_gradient,
    read_for_output,
    read_for_values,
)
from ato_jax.ops.linear_attention.triton.scan import Edges
from ato_jax.ops.linear_attention.triton.steps import Steps, gates
from ato_jax.ops.linear_attention.triton.walk import Walk
from ato_jax.triton import tiles
from ato_jax.triton.launch import launch, piece_id


def output(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    steps: Steps,
    sides: list[Edges],
) -> jax.Array:
    block = config.output_block
    arrays = steps.rows | steps.powers | gates(spec, walk, steps, block, CAUSAL_GATES)

    def kernel(
        refs: dict[str, Any], q_ref: Any, k_ref: Any, v_ref: Any, side_refs: Any, out_ref: Any
    ) -> None:
        piece = walk.with_queries + piece_id()
        one = products.identity(spec, tiles.padded(spec.D))
        power = powers.of_head(refs)

        def write_chunk(i: Any, state: State) -> State:
            start = piece * walk.pieces.rows + i * block
            chunk = start, block
            queries, keys = walk.rows_at(spec, refs, start, block)
            q = tiles.load_tile(q_ref, queries, spec.D)  # [C, D]
            k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
            phi_q = mapping.features_of(spec, products.as_accumulated(q, one), queries)  # [C, F]
            phi_q = powers.over(power, phi_q)
            features = powers.times(power, mapping.features_of(spec, k, keys))  # [C, F]
            phi_k = products.operand(spec, features, wide=mapping.wide_features(spec))
            pairs = pairs_of(walk, refs, chunk, chunk)
            w = products.product(spec, phi_q, phi_k, wide=True, trans_b=True)  # [C, C]
            w = pairs.weigh(w)

            out, den = read_for_output(spec, refs, "reads", start, phi_q, state)
            if den is not None:
                # The weights are summed as they are rounded for the product: roundings that are
                # alike cancel.
                den += jnp.sum(products.rounded(spec, w, wide=True), axis=1)
                out += products.product(spec, w, v, wide=True)
                out *= (1 / jnp.maximum(den, spec.eps))[:, None]
            else:
                out += products.weighted_sum(spec, w, v)
                out *= spec.scale
            tiles.store_tile(out_ref, queries, spec.V, out)
            return _add_keys(spec, refs, chunk, state, features, phi_k, v)

        state = powers.times(power, load_state(spec, side_refs, block))
        jax.lax.fori_loop(0, walk.pieces.rows // block, write_chunk, state)

    return launch(
        kernel,
        "linear_attention_causal_output",
        grid=(walk.pieces.count - walk.with_queries, spec.H, spec.B),
        in_specs=[
            sequences.step_blocks(arrays, sequences.head_of_group(spec)),
            *sequences.query_blocks(spec),
            _states_of_queries(spec, walk),
        ],
        out_specs=sequences.sequence_block(spec, spec.T, spec.V, sequences.own_head),
        out_shape=sequences.sequence_shape(spec, spec.T, spec.H, spec.V),
        warps=config.output_warps,
        stages=config.output_stages,
    )(arrays, inputs.q, inputs.k, inputs.v, [sides[0].kv, sides[0].k_sum])


def _states_of_queries(spec: LinearAttentionSpec, walk: Walk) -> list[pl.BlockSpec]:
    """The state ahead of the piece whose queries a program takes."""
    group = spec.H // spec.G
    return sequences.state_blocks(spec, lambda p, h, b: (b, h // group, walk.with_queries + p))


def _add_keys(
    spec: LinearAttentionSpec,
    refs: dict[str, Any],
    steps: tuple[Any, int],
    state: State,
    features: jax.Array,
    phi_k: jax.Array,
    v: jax.Array,
) -> State:
    """The state behind a chunk, kv [V, F] and z [C, F], from that ahead of it.

    `features` are phi(k) [C, F] of the chunk's keys in float32, and phi_k is their operand. State
    and features are multiplied by the head's power (`powers.py`) where it has one.
    """
    kv, z = state
    start, block = steps
    wide = mapping.wide_features(spec)
    if "adds" in refs:
        keep = refs["keeps"][start // block]
        kv, z = keep * kv, keep * z
        wide = True
        phi_k = products.operand(spec, tiles.scale_rows(features, refs["adds"], start), wide=wide)
    if spec.normalize:
        z += products.product(spec, jnp.ones((block, block), jnp.float32), phi_k, wide=wide)
    return kv + products.product(spec, v, phi_k, wide=wide, trans_a=True), z


def query_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    steps: Steps,
    sides: list[Edges],
    do: jax.Array,
) -> QueryGradient:
    block = config.dq_block
    count = walk.pieces.count - walk.with_queries
    arrays = steps.rows | steps.powers | gates(spec, walk, steps, block, CAUSAL_GATES)
    if "reads" in arrays:
        of_pieces = gates(spec, walk, steps, walk.pieces.rows, ("reads",))
        arrays["reads_of_piece"] = of_pieces["reads"]

    def kernel(
        refs: dict[str, Any],
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        do_ref: Any,
        side_refs: Any,
        dq_ref: Any,
        d_side_refs: Any,
        normalizer_refs: Any,
    ) -> None:
        piece = walk.with_queries + piece_id()
        one = products.identity(spec, tiles.padded(spec.D))
        power = powers.of_head(refs)

        def write_chunk(i: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            state, (dkv, dz) = carry
            start = piece * walk.pieces.rows + i * block
            chunk = start, block
            queries, keys = walk.rows_at(spec, refs, start, block)
            q = tiles.load_tile(q_ref, queries, spec.D)  # [C, D]
            k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
            do = tiles.load_tile(do_ref, queries, spec.V)  # [C, V]
            q = products.as_accumulated(q, one)
            phi_q, slopes = mapping.features_and_slopes(spec, q, queries)  # [C, F]
            wide = mapping.wide_features(spec)
            features = powers.times(power, mapping.features_of(spec, k, keys))  # [C, F]
            phi_k = products.operand(spec, features, wide=wide)
            pairs = pairs_of(walk, refs, chunk, chunk)
            dw = products.product(spec, do, v, trans_b=True)  # [C, C]
            dw = pairs.weigh(dw)

            from_state = read_for_gradient(spec, refs, "reads", start, do, state)
            y = from_state[0] + products.product(spec, dw, phi_k, wide=True)
            if products.of_initial_sums(spec):
                y += products.product(spec, products.left_by_rounding(spec, dw), phi_k)
            e = z_seen = None
            inverse = jnp.full((block,), spec.scale, jnp.float32)
            if spec.normalize:
                z_seen = pairs.add_keys(spec, from_state[1], phi_k, wide)
                e, inverse = normalizer_terms(spec, [powers.over(power, phi_q)], [y], [z_seen])
                tiles.store_rows(normalizer_refs[0], queries, e)
                tiles.store_rows(normalizer_refs[1], queries, inverse)

            d_phi_q = feature_gradient(y, z_seen, e, powers.over(power, inverse))
            tiles.store_tile(dq_ref, queries, spec.D, d_phi_q * slopes)
            u = phi_q * inverse[:, None]
            if "reads_of_piece" in refs:
                u = tiles.scale_rows(u, refs["reads_of_piece"], start)
            unrounded = u
            u = products.operand(spec, u, wide=True)
            dkv += products.product(spec, do, u, wide=True, trans_a=True)
            if e is not None:
                columns = products.as_columns(spec, e)
                of_e = unrounded if products.of_initial_sums(spec) else u
                dz += products.sum_by_normalizer(spec, of_e, columns)
            state = _add_keys(spec, refs, chunk, state, features, phi_k, v)
            return state, (dkv, dz)

        state = powers.times(power, load_state(spec, side_refs, block))
        dz = jnp.zeros((state[1].shape[1], tiles.COLUMNS), jnp.float32)
        sums = jnp.zeros_like(state[0]), dz
        chunks = walk.pieces.rows // block
        _, (dkv, dz) = jax.lax.fori_loop(0, chunks, write_chunk, (state, sums))
        dkv_ref, dk_sum_ref = d_side_refs
        tiles.store_matrix(dkv_ref, spec.V, spec.F, dkv)
        tiles.store_vector(dk_sum_ref, spec.F, jnp.sum(dz, axis=1))

    per_row, row_shape = sequences.row_vectors(spec)
    normalizers = 2 if spec.normalize else 0
    dq, d_side, normalizer = launch(
        kernel,
        "linear_attention_causal_query_gradient",
        grid=(count, spec.H, spec.B),
        in_specs=[
            sequences.step_blocks(arrays, sequences.head_of_group(spec)),
            *sequences.query_blocks(spec),
            sequences.sequence_block(spec, spec.T, spec.V, sequences.own_head),
            _states_of_queries(spec, walk),
        ],
        out_specs=[
            sequences.sequence_block(spec, spec.T, spec.D, sequences.own_head),
            sequences.state_blocks(spec, lambda p, h, b: (b, h, p)),
            [per_row] * normalizers,
        ],
        out_shape=[
            sequences.sequence_shape(spec, spec.T, spec.H, spec.D),
            sequences.state_shapes(spec, spec.H, count),
            [row_shape] * normalizers,
        ],
        warps=config.dq_warps,
        stages=config.dq_stages,
    )(arrays, inputs.q, inputs.k, inputs.v, do, [sides[0].kv, sides[0].k_sum])
    return QueryGradient(
        dq, [tuple(d_side)], Normalizer(*normalizer) if normalizer else None, [], None
    )


def key_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    steps: Steps,
    sides: list[Edges],
    normalizer: Normalizer | None,
    do: jax.Array,
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """dk and dv, summed over the query heads of each key/value head, and no array for a decay's
    gradient."""
    block = config.dkv_block
    group = spec.H // spec.G
    chunks = walk.pieces.rows // block
    axis = sequences.heads_axis(spec)
    arrays = steps.rows | gates(spec, walk, steps, block, CAUSAL_GATES)

    def kernel(
        refs: dict[str, Any],
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        do_ref: Any,
        side_refs: Any,
        normalizer_refs: Any,
        dk_ref: Any,
        dv_ref: Any,
    ) -> None:
        piece = piece_id()
        one = products.identity(spec, tiles.padded(spec.D))

        def write_chunk(i: Any, sums: State) -> State:  # dS^T [V, F], and dz in parts [16, F]
            start = piece * walk.pieces.rows + (chunks - 1 - i) * block
            chunk = start, block
            queries, keys = walk.rows_at(spec, refs, start, block)
            k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
            k = products.as_accumulated(k, one)
            features, slopes = mapping.features_and_slopes(spec, k, keys)  # [C, F]
            phi_k = products.operand(spec, features, wide=True)

            dv = read_for_values(spec, refs, "adds", start, phi_k, sums)
            d_features = read_for_features(spec, refs, "adds", start, v, sums)
            if "keeps" in refs:
                keep = refs["keeps"][start // block]
                sums = keep * sums[0], keep * sums[1]
            pairs = pairs_of(walk, refs, chunk, chunk, keys_first=True)

            def add_head(head: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                dv, d_features, sums = carry
                q = tiles.load_tile(q_ref, queries, spec.D, head, axis)  # [C, D]
                do = tiles.load_tile(do_ref, queries, spec.V, head, axis)  # [C, V]
                e, inverse = None, jnp.full((block,), spec.scale, jnp.float32)
                if spec.normalize:
                    e = tiles.load_rows(normalizer_refs[0], queries, head)  # [C]
                    inverse = tiles.load_rows(normalizer_refs[1], queries, head)  # [C]
                u = mapping.features_of(spec, q, queries) * inverse[:, None]  # [C, F]
                carried = u
                if "reads" in refs:
                    carried = tiles.scale_rows(u, refs["reads"], start)
                dw = products.product(spec, v, do, trans_b=True)  # [C keys, C queries]
                if e is not None:
                    dw += e[None, :]
                w = products.product(spec, phi_k, u, wide=True, trans_b=True)
                w = pairs.weigh(w)
                dv = add_weighted(spec, dv, w, do)
                # dw is a difference, and where features are all alike its roundings do not average
                # out.
                d_features += products.weighted_sum(spec, pairs.weigh(dw), u)
                dkv, dz = sums
                dkv += products.product(spec, do, carried, wide=True, trans_a=True)
                if e is not None:
                    rounded = products.rounded(spec, carried, wide=True)
                    dz += products.row_parts(rounded * e[:, None])
                return dv, d_features, (dkv, dz)

            carry = dv, d_features, sums
            if group == 1:
                # Not a loop of one turn: the compiler loads ahead within one loop only.
                dv, d_features, sums = add_head(0, carry)
            else:
                dv, d_features, sums = jax.lax.fori_loop(0, group, add_head, carry)
            tiles.store_tile(dv_ref, keys, spec.V, dv)
            tiles.store_tile(dk_ref, keys, spec.D, d_features * slopes)
            return sums

        jax.lax.fori_loop(0, chunks, write_chunk, load_cotangent(spec, side_refs))

    keys = sequences.sequence_block(spec, spec.S, spec.D, sequences.own_head)
    values = sequences.sequence_block(spec, spec.S, spec.V, sequences.own_head)
    per_row = sequences.group_row_vectors(spec)
    dk, dv = launch(
        kernel,
        "linear_attention_causal_key_gradient",
        grid=(walk.pieces.count, spec.G, spec.B),
        in_specs=[
            sequences.step_blocks(arrays, sequences.own_head),
            sequences.sequence_block(spec, spec.T, spec.D, sequences.own_head, group),
            keys,
            values,
            sequences.sequence_block(spec, spec.T, spec.V, sequences.own_head, group),
            sequences.state_blocks(spec, lambda p, g, b: (b, g, p + 1)),
            [per_row] * len(normalizer or ()),
        ],
        out_specs=[keys, values],
        out_shape=[
            sequences.sequence_shape(spec, spec.S, spec.G, spec.D),
            sequences.sequence_shape(spec, spec.S, spec.G, spec.V),
        ],
        warps=config.dkv_warps,
        stages=config.dkv_stages,
    )(
        arrays,
        inputs.q,
        inputs.k,
        inputs.v,
        do,
        [sides[0].kv, sides[0].k_sum],
        list(normalizer or ()),
    )
    return dk, dv, []
