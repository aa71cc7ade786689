"""A gate per step and channel, causal: `causal.py`'s pieces and chunks, their factors decayed.

    S_t = diag(exp(decay_t)) S_{t-1} + phi(k_t) v_t^T          [F, V]

so that channel d of the pair (i, j) carries exp(sum decay[j+1..i, d]). Within a chunk, with c_i
the sum of the gates from its first row to row i and `total` that over all its rows, [F]:

    q^_i = phi(q_i) exp(c_i)                 as the state before the chunk is read
    k^_j = phi(k_j) exp(total - c_j)         as the state after it is added to
    num  = q^ S + w v                        den = q^ . z + w 1
    S'   = exp(total) S + k^^T v             z' = exp(total) z + k^^T 1

Pairs within a chunk, w[i, j] = sum_d phi(q_id) phi(k_jd) exp(c_id - c_jd) where j <= i: no
exponent of a factor may be large. Where no channel of a piece loses more than `mildest` within a
chunk, as is usual, the exponents c_i and -c_j part all pairs at once, and with k~_j = phi(k_j)
exp(-c_j) all is as without gates:

    w = seen * (q^ k~^T)                     S' = exp(total) (S + k~^T v)

In other pieces a pair is parted where it lies on either side of the middle of a block of 2, 4,
8, .. rows: at the level of the highest bit in which i and j differ. With h_i the sum of the gates
between row i and the middle of its block (the diagonal is level 0, where it is 0):

    w = sum over the levels of at_level * (phi(q) exp(h)) (phi(k) exp(h))^T

Those sums are products with zeros and ones, the gates in three bfloat16 parts: exact, where a
difference of running sums would lose the small gates that follow a large one.

Backward, as in `causal.py`: a walk for dq, which knows S, and one from the end for dk and dv,
which knows dS. With dw[i, j] = (do_i . v_j + e_i) / den_i:

    e_i       = -(num_i . do_i) / den_i, 0 where den_i <= eps or not normalize
    d_phi_q_i = exp(c_i) (S do_i + e_i z) / den_i + sum_{j<=i} exp(c_i - c_j) dw[i, j] phi(k_j)
    d_phi_k_j = exp(total - c_j) (dS v_j + dz) + sum_{i>=j} exp(c_i - c_j) dw[i, j] phi(q_i)

The gate of step t is in all pairs i >= t > j, and each channel of a pair, in phi(q) d_phi_q and in
phi(k) d_phi_k, alike. So with the sums over the steps of the piece, and S and dS at its end,

    d_decay_t = sum_{i>=t} phi(q_i) d_phi_q_i - sum_{j>=t} phi(k_j) d_phi_k_j
                + sum_v S dS + z dz                                                     [F]

in which pairs later than t cancel: both walks multiply the same roundings of the factors, the
weights' gradients and states are rounded twice as finely, and the pieces are short. The walk for
dq leaves phi(q) d_phi_q in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)
from ato_jax.ops.linear_attention.triton import tiles
from ato_jax.ops.linear_attention.triton.causal import Normalizer, Walk
from ato_jax.ops.linear_attention.triton.scan import states_between
from ato_jax.ops.linear_attention.triton.tiles import Config, Pieces, Rows

# exp of it is 0 in float32: nothing stronger matters, and -inf would turn sums into NaN.
STRONGEST = -128.0


def mildest(spec: LinearAttentionSpec) -> float:
    """How much of its logarithm a channel may lose in a chunk whose pairs are parted at once.

    exp(32) leaves float32 and bfloat16 room for any features. float32's products are exact only
    as far as the exponents are, which are differences of sums of that size.
    """
    return 8.0 if spec.dtype == "float32" and spec.precision == "exact" else 32.0


def _exp(x: jax.Array) -> jax.Array:
    return jnp.exp2(x * tiles.LOG2_E)


def _load_gates(spec: LinearAttentionSpec, ref: Any, rows: Rows) -> jax.Array:
    """[C, F], zero where there is no step."""
    return jnp.maximum(tiles.load_tile(ref, rows, spec.F), STRONGEST)


def _sums(chosen: jax.Array, gates: jax.Array) -> jax.Array:
    """The sums of the gates [C, F] that are chosen [C, C] for each row."""
    matrix = chosen.astype(jnp.bfloat16)
    found = jnp.zeros(gates.shape, jnp.float32)
    for _ in range(3):
        part = gates.astype(jnp.bfloat16)
        found += plgpu.dot(matrix, part)
        gates -= part.astype(jnp.float32)
    return found


class Frame(NamedTuple):
    """The decays between the rows of a chunk and its edges, as factors.

    Where `mild` is True, `until` lacks the factor `keep`: it is exp(-c), and the state, which
    has been added to in these terms, gets the factor at the end.
    """

    mild: bool
    gates: jax.Array  # [C, F]
    since: jax.Array  # [C, F], exp(c)
    until: jax.Array  # [C, F], exp(total - c)
    keep: jax.Array  # [1, F], exp(total)


def _frame(gates: jax.Array, mild: bool) -> Frame:
    keep = _exp(jnp.sum(gates, axis=0))[None, :]
    if mild:
        c = jnp.cumsum(gates, axis=0)
        return Frame(mild, gates, _exp(c), _exp(-c), keep)
    i, j = _pairs(gates.shape[0])
    return Frame(mild, gates, _exp(_sums(j <= i, gates)), _exp(_sums(j > i, gates)), keep)


def _pairs(block: int) -> tuple[jax.Array, jax.Array]:
    index = jnp.arange(block, dtype=jnp.int32)
    return index[:, None], index[None, :]


class Side(NamedTuple):
    """The queries or the keys of a chunk."""

    features: jax.Array  # [C, F] float32
    edge: jax.Array  # [C, F], the operand: features times `since` or `until`


def _side(spec: LinearAttentionSpec, features: jax.Array, factor: jax.Array) -> Side:
    return Side(features, tiles.operand(spec, features * factor, wide=True))


def _over_levels(frame: Frame, add_level: Callable[..., Any], sums: Any) -> Any:
    """`add_level(at_level [C, C], factor [C, F], sums)` for each level of a chunk's pairs."""
    block = frame.gates.shape[0]
    i, j = _pairs(block)

    def add(level: Any, sums: Any) -> Any:
        half = (1 << level) >> 1
        middle = (i & -(2 * half)) + half
        between = (jnp.minimum(middle, i + 1) <= j) & (j < jnp.maximum(middle, i + 1)) & (half > 0)
        at_level = (half <= (i ^ j)) & ((i ^ j) < jnp.maximum(2 * half, 1))
        return add_level(at_level, _exp(_sums(between, frame.gates)), sums)

    return jax.lax.fori_loop(0, block.bit_length(), add, sums)


def _weights(spec: LinearAttentionSpec, frame: Frame, rows: Side, columns: Side) -> jax.Array:
    """[C rows, C columns]: the pairs' products, decayed; right where the query is not earlier."""
    if frame.mild:
        return tiles.product(spec, rows.edge, columns.edge, wide=True, trans_b=True)

    def add_level(at_level: jax.Array, factor: jax.Array, w: jax.Array) -> jax.Array:
        found = tiles.product(
            spec, rows.features * factor, columns.features * factor, wide=True, trans_b=True
        )
        return jnp.where(at_level, found, w)

    return _over_levels(frame, add_level, jnp.zeros([frame.gates.shape[0]] * 2, jnp.float32))


class Gradient(NamedTuple):
    """Sums to which the gradient of one side's features is added, [C, F] each.

    It is `edge` times the factor of the side's edge, plus `pairs`; its product with the features
    is `edge` times the side's edge, plus `flow`. Where the frame is mild there is `edge` alone.
    """

    edge: jax.Array
    pairs: tuple[jax.Array, ...]  # pairs and flow


def _start_gradient(frame: Frame, edge: jax.Array) -> Gradient:
    return Gradient(edge, () if frame.mild else (jnp.zeros_like(edge), jnp.zeros_like(edge)))


def _add_pairs(
    spec: LinearAttentionSpec,
    frame: Frame,
    found: Gradient,
    dw: jax.Array,
    rows: Side,
    columns: Side,
) -> Gradient:
    """What the weights' gradient dw [C rows, C columns] adds to that of the rows' features."""
    if frame.mild:
        return Gradient(found.edge + tiles.weighted_sum(spec, dw, columns.edge), ())

    def add_level(at_level: jax.Array, factor: jax.Array, sums: Any) -> Any:
        pairs, flow = sums
        read = tiles.operand(spec, columns.features * factor, wide=True)
        sum_ = tiles.weighted_sum(spec, jnp.where(at_level, dw, 0.0), read)
        rounded = tiles.operand(spec, rows.features * factor, wide=True).astype(jnp.float32)
        return pairs + factor * sum_, flow + rounded * sum_

    return Gradient(found.edge, _over_levels(frame, add_level, found.pairs))


def _finish_gradient(
    found: Gradient, factor: jax.Array, side: Side
) -> tuple[jax.Array, jax.Array]:
    """The features' gradient, and its product with the features as they were rounded."""
    gradient = found.edge * factor
    flow = found.edge * side.edge.astype(jnp.float32)
    if not found.pairs:
        return gradient, flow
    return gradient + found.pairs[0], flow + found.pairs[1]


def _cut(spec: LinearAttentionSpec, config: Config) -> Walk:
    offset = spec.S - spec.T
    first_key = min(0, offset)
    length = spec.S - first_key
    block = max(config.state_block, config.output_block, config.dq_block, config.dkv_block)
    pieces = tiles.cut(length, spec.B * spec.G, config.piece_rows, block, config.programs)
    aligned = offset == 0 and pieces.count * pieces.rows == length
    return Walk(pieces, first_key, first_key - offset, aligned, max(0, offset) // pieces.rows)


class States(NamedTuple):
    """What is known of each piece before it is walked."""

    kv: jax.Array  # [B, G, P + 1, V, F], the states before each piece, and after the last
    k_sum: jax.Array  # [B, G, P + 1, F]
    decay: jax.Array  # [B, G, P, F], the sums of the gates
    steepest: jax.Array  # [B, G, P], the most that a channel loses within a chunk of state_block


def _state_blocks(spec: LinearAttentionSpec, index: Any) -> list[pl.BlockSpec]:
    """kv [V, F] and k_sum [F] of one piece; `index(*program_ids)` is (batch, head, piece)."""
    return [
        pl.BlockSpec((None, None, None, spec.V, spec.F), lambda *ids: (*index(*ids), 0, 0)),
        pl.BlockSpec((None, None, None, spec.F), lambda *ids: (*index(*ids), 0)),
    ]


def _prefix_states(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, walk: Walk
) -> States:
    kv, k_sum, decay, steepest = _piece_states(spec, config, inputs, walk)
    if inputs.initial_state is None:
        start = jnp.zeros_like(kv[:, :, 0]), jnp.zeros_like(k_sum[:, :, 0])
    else:
        start = jnp.swapaxes(inputs.initial_state.kv, 2, 3), inputs.initial_state.k_sum
    return States(*states_between(kv, k_sum, start, decay), decay, steepest)


def _piece_states(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, walk: Walk
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Each piece's sums over its keys, decayed to its end; its gates' sums, and the steepest.

    From the end, so that the decays between a row and the end of the piece are a running sum, of
    which each row's factor is taken: the sums in the registers are only added to.
    """
    block = config.state_block
    pieces = walk.pieces
    chunks = pieces.rows // block

    def kernel(
        k_ref: Any,
        v_ref: Any,
        gates_ref: Any,
        kv_ref: Any,
        k_sum_ref: Any,
        decay_ref: Any,
        steepest_ref: Any,
    ) -> None:
        first = walk.first_key + pl.program_id(0) * pieces.rows
        ones = jnp.ones((tiles.SUM_ROWS, block), jnp.float32)
        # From last to first, so that running sums are those from a row to the tile's end.
        backwards = block - 1 - jnp.arange(block, dtype=jnp.int32)

        def add_tile(i: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            kv, k_sum, decay, steepest = sums  # [V, F], [SUM_ROWS, F], [F], [F]
            start = first + (chunks - 1 - i) * block
            numbers = start + backwards
            exist = (numbers >= 0) & (numbers < spec.S)
            rows = Rows(numbers, None if walk.aligned else exist)
            # The gates after each row, and that of the first row.
            behind = Rows(numbers + 1, (backwards < block - 1) & (numbers + 1 < spec.S) & exist)
            k = tiles.load_tile(k_ref, rows, spec.D)  # [S_block, D]
            v = tiles.load_tile(v_ref, rows, spec.V)  # [S_block, V]
            gates = _load_gates(spec, gates_ref, behind)  # [S_block, F]
            own = _load_gates(spec, gates_ref, rows)  # [S_block, F]
            factor = _exp(jnp.cumsum(gates, axis=0) + decay[None, :])
            features = tiles.features_of(spec, k, rows) * factor
            features = tiles.operand(spec, features, wide=True)
            kv += tiles.product(spec, v, features, wide=True, trans_a=True)
            k_sum += tiles.product(spec, ones, features, wide=True)
            total = jnp.sum(own, axis=0)
            return kv, k_sum, decay + total, jnp.minimum(steepest, total)

        nothing = jnp.zeros(tiles.padded(spec.F), jnp.float32)
        sums = (*tiles.no_sums(spec, tiles.SUM_ROWS), nothing, nothing)
        kv, k_sum, decay, steepest = jax.lax.fori_loop(0, chunks, add_tile, sums)
        tiles.store_matrix(kv_ref, spec.V, spec.F, kv)
        tiles.store_vector(k_sum_ref, spec.F, jnp.max(k_sum, axis=0))
        tiles.store_vector(decay_ref, spec.F, decay)
        steepest_ref[...] = -jnp.min(steepest)

    P = pieces.count
    vector = pl.BlockSpec((None, None, None, spec.F), lambda p, g, b: (b, g, p, 0))
    keys = tiles.sequence_block(spec, spec.S, spec.D, lambda p, g, b: (b, g))
    return tuple(
        tiles.launch(
            kernel,
            "linear_attention_channel_states",
            grid=(P, spec.G, spec.B),
            in_specs=[
                keys,
                tiles.sequence_block(spec, spec.S, spec.V, lambda p, g, b: (b, g)),
                keys,
            ],
            out_specs=[
                *_state_blocks(spec, lambda p, g, b: (b, g, p)),
                vector,
                pl.BlockSpec((None, None, None), lambda p, g, b: (b, g, p)),
            ],
            out_shape=[
                jax.ShapeDtypeStruct((spec.B, spec.G, P, spec.V, spec.F), jnp.float32),
                jax.ShapeDtypeStruct((spec.B, spec.G, P, spec.F), jnp.float32),
                jax.ShapeDtypeStruct((spec.B, spec.G, P, spec.F), jnp.float32),
                jax.ShapeDtypeStruct((spec.B, spec.G, P), jnp.float32),
            ],
            warps=config.state_warps,
            stages=config.state_stages,
        )(inputs.k, inputs.v, inputs.decay)
    )


def _walk_chunks(
    spec: LinearAttentionSpec,
    config: Config,
    steepest_ref: Any,
    chunks: int,
    block: int,
    chunk: Callable[[bool], Callable[..., Any]],
    carry: Any,
) -> Any:
    """`chunk(mild)(i, carry)` for each of the chunks, all of them mild or none taken to be."""
    # A chunk that is larger than those of the state pass loses at most this many times as much.
    most = mildest(spec) / max(1, block // config.state_block)

    def walk(mild: bool) -> Callable[[Any], Any]:
        return lambda carry: jax.lax.fori_loop(0, chunks, chunk(mild), carry)

    return jax.lax.cond(steepest_ref[...] <= most, walk(True), walk(False), carry)


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    walk = _cut(spec, config)
    states = _prefix_states(spec, config, inputs, walk)
    state = LinearState(jnp.swapaxes(states.kv[:, :, -1], 2, 3), states.k_sum[:, :, -1])
    return Outputs(_output(spec, config, inputs, walk, states), state)


def _output(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, walk: Walk, states: States
) -> jax.Array:
    block = config.output_block
    group = spec.H // spec.G

    def kernel(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        gates_ref: Any,
        kv_ref: Any,
        k_sum_ref: Any,
        steepest_ref: Any,
        out_ref: Any,
    ) -> None:
        piece = walk.with_queries + pl.program_id(0)
        ones = jnp.ones((block, block), jnp.float32)
        row, column = _pairs(block)

        def write_chunk(mild: bool) -> Callable[..., Any]:
            def write(i: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                kv, z = state  # [V, F], [C, F]
                queries, keys = walk.rows_at(spec, piece, i, block)
                q = tiles.load_tile(q_ref, queries, spec.D)  # [C, D]
                k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
                v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
                frame = _frame(_load_gates(spec, gates_ref, keys), mild)  # [C, F]
                reads = _side(spec, tiles.features_of(spec, q, queries), frame.since)
                adds = _side(spec, tiles.features_of(spec, k, keys), frame.until)
                w = _weights(spec, frame, reads, adds)  # [C, C]
                w = jnp.where(column <= row, w, 0.0)
                out = tiles.product(spec, reads.edge, kv, wide=True, trans_b=True)  # [C, V]
                out += tiles.weighted_sum(spec, w, v)
                if spec.normalize:
                    den = jnp.sum(w, axis=1)  # [C]
                    den += jnp.sum(reads.edge.astype(jnp.float32) * z, axis=1)
                    out *= (1 / jnp.maximum(den, spec.eps))[:, None]
                    z = _advance(frame, z, tiles.product(spec, ones, adds.edge, wide=True))
                else:
                    out *= spec.scale
                tiles.store_tile(out_ref, queries, spec.V, out)
                added = tiles.product(spec, v, adds.edge, wide=True, trans_a=True)
                return _advance(frame, kv, added), z

            return write

        state = _load_state(spec, kv_ref, k_sum_ref, block)
        chunks = walk.pieces.rows // block
        _walk_chunks(spec, config, steepest_ref, chunks, block, write_chunk, state)

    keys = tiles.sequence_block(spec, spec.S, spec.D, lambda p, h, b: (b, h // group))
    return tiles.launch(
        kernel,
        "linear_attention_channel_output",
        grid=(walk.pieces.count - walk.with_queries, spec.H, spec.B),
        in_specs=[
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            keys,
            tiles.sequence_block(spec, spec.S, spec.V, lambda p, h, b: (b, h // group)),
            keys,
            *_state_blocks(spec, lambda p, h, b: (b, h // group, walk.with_queries + p)),
            pl.BlockSpec(
                (None, None, None), lambda p, h, b: (b, h // group, walk.with_queries + p)
            ),
        ],
        out_specs=tiles.sequence_block(spec, spec.T, spec.V, lambda p, h, b: (b, h)),
        out_shape=tiles.sequence_shape(spec, spec.T, spec.H, spec.V),
        warps=config.output_warps,
        stages=config.output_stages,
    )(inputs.q, inputs.k, inputs.v, inputs.decay, states.kv, states.k_sum, states.steepest)


def _load_state(
    spec: LinearAttentionSpec, kv_ref: Any, k_sum_ref: Any, rows: int
) -> tuple[jax.Array, jax.Array]:
    """kv [V, F], and k_sum in each of so many rows [rows, F]."""
    width = tiles.padded(spec.F)
    return (
        tiles.load_matrix(kv_ref, spec.V, spec.F),
        jnp.broadcast_to(tiles.load_vector(k_sum_ref, spec.F)[None, :], (rows, width)),
    )


def _advance(frame: Frame, state: jax.Array, added: jax.Array) -> jax.Array:
    """The state [.., F] at the end of a chunk, from that before it and what the chunk adds."""
    return (state + added) * frame.keep if frame.mild else state * frame.keep + added
