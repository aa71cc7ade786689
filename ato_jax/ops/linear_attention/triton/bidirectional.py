"""Every query sees every key: two passes forward, two backward, each array read once in each.

Forward, with S = sum_j phi(k_j) v_j^T [F, V] and z = sum_j phi(k_j) [F] (the state):

    den_i = max(phi(q_i) . z, eps)            normalize, else 1 / scale
    out_i = S^T phi(q_i) / den_i

Backward, with y_i = S do_i [F]. do_i . out_i equals phi(q_i) . y_i / den_i, so no output is formed,
and the difference below is taken in float32:

    e_i       = -(do_i . out_i), 0 where phi(q_i) . z <= eps or not normalize
    u_i       = phi(q_i) / den_i
    d_phi_q_i = (y_i + e_i z) / den_i
    dS        = sum_i u_i do_i^T + the state's cotangent         dz = sum_i e_i u_i + likewise
    dv_j      = dS^T phi(k_j)
    d_phi_k_j = dS v_j + dz

The first pass of the backward reads q and do, writes dq, and leaves dS and dz of its pieces. The
second pass reads k and v and writes dk and dv.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)
from ato_jax.ops.linear_attention.triton import mapping, powers, products, sequences
from ato_jax.ops.linear_attention.triton.calls import SMALL_STATE, state_size
from ato_jax.ops.linear_attention.triton.config import Config
from ato_jax.ops.linear_attention.triton.gradients import normalizer_terms
from ato_jax.ops.linear_attention.triton.states import piece_states
from ato_jax.triton import tiles, work
from ato_jax.triton.launch import launch, piece_id
from ato_jax.triton.tiles import Rows
from ato_jax.triton.work import Dealt, Pieces


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    pieces = work.deal(spec.S, spec.B * spec.G, config.state_block, config.state_programs)

    def keys_at(refs: dict[str, Any], start: Any, block: int) -> Rows:
        return tiles.tile_rows(start, block, spec.S, pieces.whole, refs.get("kv_length"))

    lengths = sequences.length_arrays(inputs)
    arrays = lengths | powers.arrays(spec, inputs)
    kv, k_sum = piece_states(spec, config, inputs.k, inputs.v, pieces, keys_at, arrays)
    state = LinearState(jnp.swapaxes(jnp.sum(kv, axis=2), 2, 3), jnp.sum(k_sum, axis=2))
    if inputs.initial_state is not None:
        state = jax.tree.map(jnp.add, state, inputs.initial_state)
    return Outputs(_output(spec, config, inputs.q, state, lengths), state)


def _stream(length: int, others: int, block: int, programs: int, rows: int) -> Pieces | Dealt:
    """How the rows of a pass that only reads a finished state go to programs."""
    if rows:
        return work.cut(length, others, max(rows, block), block, 1)
    return work.deal(length, others, block, programs)


def _state_blocks(spec: LinearAttentionSpec, group: int) -> list[pl.BlockSpec]:
    """kv [F, V] and k_sum [F] of the key/value head that a query head reads."""
    return [
        pl.BlockSpec((None, None, spec.F, spec.V), lambda p, h, b: (b, h // group, 0, 0)),
        pl.BlockSpec((None, None, spec.F), lambda p, h, b: (b, h // group, 0)),
    ]


def _output(
    spec: LinearAttentionSpec,
    config: Config,
    q: jax.Array,
    state: LinearState,
    lengths: dict[str, jax.Array],
) -> jax.Array:
    block = config.output_block
    pieces = _stream(spec.T, spec.B * spec.H, block, config.output_programs, config.output_rows)
    whole = pieces.whole

    def kernel(
        lengths: dict[str, Any], q_ref: Any, kv_ref: Any, k_sum_ref: Any, out_ref: Any
    ) -> None:
        piece = piece_id()
        count = pieces.turns(piece, block)
        kv = products.operand(spec, tiles.load_matrix(kv_ref, spec.F, spec.V), wide=True)  # [F, V]
        z = products.as_columns(spec, tiles.load_vector(k_sum_ref, spec.F))  # [F, 16]

        def write_tile(i: Any, carry: None) -> None:
            first, length = pieces.first_row(piece, i, block), lengths.get("q_length")
            rows = tiles.tile_rows(first, block, spec.T, whole, length)
            q = tiles.load_tile(q_ref, rows, spec.D)  # [T_block, D]
            features = mapping.features_of(spec, q, rows)  # [T_block, F]
            if not products.rounds_both_signs(spec):
                features = products.operand(spec, features, wide=True)
            out = products.read_by_features(spec, features, kv)  # [T_block, V]
            if spec.normalize:
                den = jnp.sum(products.product(spec, features, z, wide=True), axis=1)  # [T_block]
                out *= (1 / jnp.maximum(den, spec.eps))[:, None]
            else:
                out *= spec.scale
            tiles.store_tile(out_ref, rows, spec.V, out)

        jax.lax.fori_loop(0, count, write_tile, None)

    return launch(
        kernel,
        "linear_attention_output",
        grid=(pieces.count, spec.H, spec.B),
        in_specs=[
            sequences.step_blocks(lengths, sequences.own_head),
            sequences.sequence_block(spec, spec.T, spec.D, sequences.own_head),
            *_state_blocks(spec, spec.H // spec.G),
        ],
        out_specs=sequences.sequence_block(spec, spec.T, spec.V, sequences.own_head),
        out_shape=sequences.sequence_shape(spec, spec.T, spec.H, spec.V),
        warps=config.output_warps,
        stages=config.output_stages,
    )(lengths, q, *state)


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs, outputs = residuals
    lengths = sequences.length_arrays(inputs)
    dq, dkv, dk_sum = _query_gradient(
        spec, config, inputs.q, outputs.state, cotangents.out, lengths
    )
    # Summed over the pieces and over the query heads of each key/value head.
    dkv = jnp.sum(dkv.reshape(spec.B, spec.G, -1, spec.V, spec.F), axis=2)
    dk_sum = jnp.sum(dk_sum.reshape(spec.B, spec.G, -1, spec.F), axis=2)
    if spec.return_state:
        dkv += jnp.swapaxes(cotangents.state.kv, 2, 3)
        dk_sum += cotangents.state.k_sum
    dk, dv = _key_gradient(spec, config, inputs.k, inputs.v, dkv, dk_sum, lengths)
    d_state = None
    if inputs.initial_state is not None:
        d_state = LinearState(jnp.swapaxes(dkv, 2, 3), dk_sum)
    return Inputs(dq, dk, dv, initial_state=d_state)


# dS^T [V, F] and dz [F, 16], for each part of the features.
Sums = list[tuple[jax.Array, jax.Array]]


def _usual(spec: LinearAttentionSpec, z: list[jax.Array]) -> Any:
    """A number like most den_i. dS and dz are sums of phi(q_i) * usual / den_i, and are divided by
    `usual` at the end: where rows are all alike, so are the roundings of phi(q_i) / den_i, and
    these would add up."""
    if not spec.normalize:
        return 1 / spec.scale if spec.scale else 1.0
    usual = functools.reduce(jnp.add, [jnp.sum(jnp.abs(z_part)) for z_part in z])
    return jnp.where(usual > 0, usual, 1.0)


def _add_terms(
    spec: LinearAttentionSpec, sums: Sums, do: jax.Array, us: list[jax.Array], e: jax.Array
) -> Sums:
    """The sums and what a tile of queries adds to them: u_i do_i^T and e_i u_i."""
    return [
        (
            dkv + products.product(spec, do, u, wide=True, trans_a=True),  # [V, F]
            dz + products.sum_by_normalizer(spec, u, e)  # [F, 16]
            if spec.normalize
            else dz,
        )
        for (dkv, dz), u in zip(sums, us, strict=True)
    ]


def _query_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    q: jax.Array,
    state: LinearState,
    do: jax.Array,
    lengths: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq; and dS^T [B, H, pieces, V, F] and dz [B, H, pieces, F] of each piece.

    Where dq is delayed, a tile's terms are added to dS and dz in the next tile's turn: these
    products then do not wait for those that e and u depend on.
    """
    block = config.dq_block
    delayed = config.dq_delayed
    parts = tiles.in_slices(spec.F) if delayed else [tiles.all_columns(spec.F)]
    pieces = work.deal(spec.T, spec.B * spec.H, block, config.dq_programs)

    def kernel(
        lengths: dict[str, Any],
        q_ref: Any,
        do_ref: Any,
        kv_ref: Any,
        k_sum_ref: Any,
        dq_ref: Any,
        dkv_ref: Any,
        dk_sum_ref: Any,
    ) -> None:
        piece = piece_id()
        count = pieces.turns(piece, block)
        kv = [  # [F, V], in parts of F
            products.operand(spec, tiles.load_matrix(kv_ref, part, spec.V), wide=True)
            for part in parts
        ]
        z = [tiles.load_vector(k_sum_ref, part)[None, :] for part in parts]  # [1, F]
        usual = _usual(spec, z)
        one = products.identity(spec, parts[0].count)

        def rows_at(i: Any) -> Rows:
            first, length = pieces.first_row(piece, i, block), lengths.get("q_length")
            return tiles.tile_rows(first, block, spec.T, pieces.whole, length)

        def load_do(i: Any) -> jax.Array:
            return tiles.load_tile(do_ref, rows_at(i), spec.V)  # [T_block, V]

        def write_tile(i: Any, carry: Any) -> Any:
            rows = rows_at(i)
            do = load_do(i)
            features, slopes, y = [], [], []  # [T_block, F], in parts of F
            for part, kv_part in zip(parts, kv, strict=True):
                q = products.as_accumulated(tiles.load_tile(q_ref, rows, part), one)  # [T_block, f]
                mapped = mapping.features_and_slopes(spec, q, rows, part)
                features.append(mapped[0])
                slopes.append(mapped[1])
                y.append(products.product(spec, do, kv_part, wide=True, trans_b=True))
            if spec.normalize:
                e, inverse = normalizer_terms(spec, features, y, z)
                y = [y_part + e[:, None] * z_part for y_part, z_part in zip(y, z, strict=True)]
            else:
                e = jnp.zeros((block,), jnp.float32)
                inverse = jnp.full((block,), spec.scale, jnp.float32)
            factor = inverse[:, None]
            for part, y_part, slope in zip(parts, y, slopes, strict=True):
                tiles.store_tile(dq_ref, rows, part, y_part * (factor * slope))
            us = [x * (factor * usual) for x in features]
            if not products.of_initial_sums(spec):
                us = [products.operand(spec, u, wide=True) for u in us]
            terms = us, products.as_columns(spec, e)
            if not delayed:
                return _add_terms(spec, carry, do, *terms)
            sums, before = carry
            return _add_terms(spec, sums, load_do(jnp.maximum(i - 1, 0)), *before), terms

        sums = [
            (
                jnp.zeros((tiles.padded(spec.V), part.count), jnp.float32),
                jnp.zeros((part.count, tiles.COLUMNS), jnp.float32),
            )
            for part in parts
        ]
        if delayed:
            operands = jnp.bfloat16 if spec.dtype == "bfloat16" else jnp.float32
            of_us = jnp.float32 if products.of_initial_sums(spec) else operands
            us = [jnp.zeros((block, part.count), of_us) for part in parts]
            before = us, jnp.zeros((block, tiles.COLUMNS), operands)
            sums, before = jax.lax.fori_loop(0, count, write_tile, (sums, before))
            sums = _add_terms(spec, sums, load_do(count - 1), *before)
        else:
            sums = jax.lax.fori_loop(0, count, write_tile, sums)
        for part, (dkv, dz) in zip(parts, sums, strict=True):
            tiles.store_matrix(dkv_ref, spec.V, part, dkv / usual)
            tiles.store_vector(dk_sum_ref, part, jnp.sum(dz, axis=1) / usual)

    queries = sequences.sequence_block(spec, spec.T, spec.D, sequences.own_head)
    return launch(
        kernel,
        "linear_attention_query_gradient",
        grid=(pieces.count, spec.H, spec.B),
        in_specs=[
            sequences.step_blocks(lengths, sequences.own_head),
            queries,
            sequences.sequence_block(spec, spec.T, spec.V, sequences.own_head),
            *_state_blocks(spec, spec.H // spec.G),
        ],
        out_specs=[queries, *sequences.state_blocks(spec, lambda p, h, b: (b, h, p))],
        out_shape=[
            sequences.sequence_shape(spec, spec.T, spec.H, spec.D),
            *sequences.state_shapes(spec, spec.H, pieces.count),
        ],
        warps=config.dq_warps,
        stages=config.dq_stages,
    )(lengths, q, do, *state)


def _key_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    k: jax.Array,
    v: jax.Array,
    dkv: jax.Array,
    dk_sum: jax.Array,
    lengths: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """dk and dv, from dS^T [B, G, V, F] and dz [B, G, F]."""
    block = config.dkv_block
    pieces = _stream(spec.S, spec.B * spec.G, block, config.dkv_programs, config.dkv_rows)
    whole = pieces.whole
    # dS is the right factor of one product and, transposed, of the other. An exact product holds
    # three parts of it in shared memory each time, for which only a small one leaves room.
    in_parts = state_size(spec) <= SMALL_STATE

    def kernel(
        lengths: dict[str, Any],
        k_ref: Any,
        v_ref: Any,
        dkv_ref: Any,
        dk_sum_ref: Any,
        dk_ref: Any,
        dv_ref: Any,
    ) -> None:
        piece = piece_id()
        count = pieces.turns(piece, block)
        dkv = tiles.load_matrix(dkv_ref, spec.V, spec.F)  # [V, F]
        dkv = products.operand(spec, dkv, wide=True)
        dz = tiles.load_vector(dk_sum_ref, spec.F)  # [F]

        def write_tile(i: Any, carry: None) -> None:
            first, length = pieces.first_row(piece, i, block), lengths.get("kv_length")
            rows = tiles.tile_rows(first, block, spec.S, whole, length)
            k = tiles.load_tile(k_ref, rows, spec.D)  # [S_block, D]
            v = tiles.load_tile(v_ref, rows, spec.V)  # [S_block, V]
            # dk is written before dv is computed: both at once would take all registers.
            d_features = products.product(spec, v, dkv, wide=True, in_parts=in_parts)
            d_features += dz[None, :]  # [S_block, F]
            features, slopes = mapping.features_and_slopes(spec, k, rows)  # [S_block, F]
            tiles.store_tile(dk_ref, rows, spec.D, d_features * slopes)
            dv = products.product(  # [S_block, V]
                spec, features, dkv, wide=True, trans_b=True, in_parts=in_parts
            )
            tiles.store_tile(dv_ref, rows, spec.V, dv)

        jax.lax.fori_loop(0, count, write_tile, None)

    keys = sequences.sequence_block(spec, spec.S, spec.D, sequences.own_head)
    values = sequences.sequence_block(spec, spec.S, spec.V, sequences.own_head)
    return launch(
        kernel,
        "linear_attention_key_gradient",
        grid=(pieces.count, spec.G, spec.B),
        in_specs=[
            sequences.step_blocks(lengths, sequences.own_head),
            keys,
            values,
            pl.BlockSpec((None, None, spec.V, spec.F), lambda p, g, b: (b, g, 0, 0)),
            pl.BlockSpec((None, None, spec.F), lambda p, g, b: (b, g, 0)),
        ],
        out_specs=[keys, values],
        out_shape=[
            sequences.sequence_shape(spec, spec.S, spec.G, spec.D),
            sequences.sequence_shape(spec, spec.S, spec.G, spec.V),
        ],
        warps=config.dkv_warps,
        stages=config.dkv_stages,
    )(lengths, k, v, dkv, dk_sum)
