"""The states at the edges of the pieces, and what the decays of each piece sum up to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.decay import most_lost_at_once
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import products, sequences
from ato_jax.ops.linear_attention.triton.calls import SMALL_STATE, state_size
from ato_jax.ops.linear_attention.triton.channel.chunk import (
    STEEP_BLOCK,
    load_gates,
    mild_parts,
    pairs,
    side_of,
    sum_rows,
    sums_of,
)
from ato_jax.ops.linear_attention.triton.config import Config
from ato_jax.ops.linear_attention.triton.scan import scan_states
from ato_jax.ops.linear_attention.triton.walk import Walk
from ato_jax.triton import tiles
from ato_jax.triton.launch import launch, piece_id
from ato_jax.triton.tiles import Rows
from ato_jax.triton.work import Pieces

# Features up to which a tile fits the registers that has a chunk's sums in each of its rows.
WIDEST_SUMS = 64


class States(NamedTuple):
    """The states and the decays of all pieces, known before the walks."""

    kv: jax.Array  # [B, G, P + 1, V, F], the states before each piece, and after the last
    k_sum: jax.Array  # [B, G, P + 1, F]
    totals: jax.Array  # [B, G, P, chunks of state_block, F], the sums of the decays

    @property
    def decay(self) -> jax.Array:
        """The log2 decay of each piece, [B, G, P, F]."""
        return jnp.sum(self.totals, axis=3)

    @property
    def steepest(self) -> jax.Array:
        """The most that a channel loses within a chunk of each piece, [B, G, P]."""
        return -jnp.min(self.totals, axis=(3, 4))


def has_room(spec: LinearAttentionSpec) -> bool:
    """Whether registers are left beside a state, for sums in each row of a tile."""
    return state_size(spec) <= SMALL_STATE and tiles.padded(spec.F) <= WIDEST_SUMS


def prefix_states(spec: LinearAttentionSpec, config: Config, inputs: Inputs, walk: Walk) -> States:
    kv, k_sum, totals = _piece_states(spec, config, inputs, walk)
    if inputs.initial_state is None:
        start = jnp.zeros_like(kv[:, :, 0]), jnp.zeros_like(k_sum[:, :, 0])
    else:
        start = jnp.swapaxes(inputs.initial_state.kv, 2, 3), inputs.initial_state.k_sum
    edges = scan_states((kv, k_sum), start, jnp.exp2(jnp.sum(totals, axis=3)))
    return States(edges.kv, edges.k_sum, totals)


def _piece_states(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, walk: Walk
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each piece's sums over its keys, decayed to its end, and its chunks' sums of decays.

    A program goes from the end of the piece to its start. The decays between a row and the end are
    then a suffix sum that grows with each chunk, each row is decayed by its own part of it, and the
    sums in the registers are only added to. Where registers allow, that suffix sum is in each row
    of a tile: a product with ones leaves it there.
    """
    block = config.state_block
    in_rows = has_room(spec)
    pieces = walk.pieces
    chunks = pieces.rows // block

    def kernel(
        k_ref: Any, v_ref: Any, gates_ref: Any, kv_ref: Any, k_sum_ref: Any, totals_ref: Any
    ) -> None:
        first = walk.first_key + piece_id() * pieces.rows
        ones = jnp.ones((products.SUM_ROWS, block), jnp.float32)
        all_ = jnp.ones((block, block), jnp.bfloat16)
        row, column = pairs(block)

        def add_tile(i: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            kv, k_sum, decay = sums  # [V, F], [SUM_ROWS, F], [C or 1, F]
            chunk = chunks - 1 - i
            rows = tiles.tile_rows(first + chunk * block, block, spec.S, walk.aligned)
            k = tiles.load_tile(k_ref, rows, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, rows, spec.V)  # [C, V]
            gates = load_gates(spec, gates_ref, rows)  # [C, F]
            parts = mild_parts(spec, gates)
            total = sums_of(all_, parts) if in_rows else sum_rows(gates)  # [C or 1, F]
            adds = side_of(spec, k, rows, sums_of(column > row, parts, decay))
            kv += products.product(spec, v, adds.edge, wide=True, trans_a=True)
            k_sum += products.product(spec, ones, adds.edge, wide=True)
            first_row = tiles.tile_rows(chunk, len(total), chunk + 1, False)
            tiles.store_tile(totals_ref, first_row, spec.F, total)
            return kv, k_sum, decay + total

        nothing = jnp.zeros((block if in_rows else 1, tiles.padded(spec.F)), jnp.float32)
        sums = (*products.no_state(spec, products.SUM_ROWS), nothing)
        kv, k_sum, _ = jax.lax.fori_loop(0, chunks, add_tile, sums)
        tiles.store_matrix(kv_ref, spec.V, spec.F, kv)
        tiles.store_vector(k_sum_ref, spec.F, jnp.max(k_sum, axis=0))

    P = pieces.count
    keys = sequences.sequence_block(spec, spec.S, spec.D, sequences.own_head)
    return tuple(
        launch(
            kernel,
            "linear_attention_channel_states",
            grid=(P, spec.G, spec.B),
            in_specs=[
                keys,
                sequences.sequence_block(spec, spec.S, spec.V, sequences.own_head),
                keys,
            ],
            out_specs=[
                *sequences.state_blocks(spec, lambda p, g, b: (b, g, p)),
                pl.BlockSpec((None, None, None, chunks, spec.F), lambda p, g, b: (b, g, p, 0, 0)),
            ],
            out_shape=[
                *sequences.state_shapes(spec, spec.G, P),
                jax.ShapeDtypeStruct((spec.B, spec.G, P, chunks, spec.F), jnp.float32),
            ],
            warps=config.state_warps,
            stages=config.state_stages,
        )(inputs.k, inputs.v, inputs.decay)
    )


def load_state(
    spec: LinearAttentionSpec, refs: tuple[Any, Any], wanted: Any = None
) -> tuple[jax.Array, jax.Array]:
    """kv [V, F] and k_sum [1, F]; kv is not read where `wanted` is false."""
    kv_ref, k_sum_ref = refs
    rows = tiles.all_rows(spec.V)
    if wanted is not None:
        rows = Rows(rows.numbers, rows.exist, (rows.numbers < spec.V) & wanted)
    kv = tiles.load_tile(kv_ref, rows, spec.F)  # [V, F]
    return kv, tiles.load_vector(k_sum_ref, spec.F)[None, :]  # [1, F]


def is_mild(spec: LinearAttentionSpec, config: Config, steepest_ref: Any, block: int) -> jax.Array:
    """Whether each of a piece's chunks of `block` rows is mild (`chunk.py`)."""
    # A chunk that is larger than those of the state pass loses at most this many times as much.
    return steepest_ref[...] <= most_lost_at_once(spec) / max(1, block // config.state_block)


def walk_chunks(
    spec: LinearAttentionSpec,
    config: Config,
    pieces: Pieces,
    steepest_ref: Any,
    block: int,
    chunk: Callable[[bool, int], Callable[..., Any]],
    carry: Any,
    kinds: tuple[bool, ...] = (True, False),
) -> Any:
    """The carry after `chunk(mild, rows)(i, carry)` for each chunk i of a piece.

    Chunks have `block` rows in mild pieces, and at most `STEEP_BLOCK` in others. Pieces that are
    not of one of the `kinds`, values of `mild`, have no chunks.
    """
    mild_piece = is_mild(spec, config, steepest_ref, block).astype(jnp.int32)
    # Two loops, one of which has no turns: XLA's Triton crashed on a branch around them.
    for mild in kinds:
        turns = mild_piece if mild else 1 - mild_piece
        rows = block if mild else min(block, STEEP_BLOCK)
        carry = jax.lax.fori_loop(0, turns * (pieces.rows // rows), chunk(mild, rows), carry)
    return carry
