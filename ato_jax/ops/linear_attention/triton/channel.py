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

Forward, a state of few features leaves registers to walk mild pieces with less that passes between
threads, and no pairs parted in the same kernel (`_mild_output`). The other pieces are `_output`'s
there as elsewhere, and it writes into the same array.

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

Where the state is returned, its cotangent meets the last key without a decay, and that pair would
have to cancel beside pairs that strong gates have left next to nothing of. So in the last piece
the sums go over the steps before t, from what crosses the piece's start, S and dS there:

    d_decay_t = sum_v S dS + z dz + sum_{j<t} phi(k_j) d_phi_k_j - sum_{i<t} phi(q_i) d_phi_q_i

In the code all exponents are to base 2, gates as soon as they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)
from ato_jax.ops.linear_attention.triton import tiles
from ato_jax.ops.linear_attention.triton.scan import scan_states
from ato_jax.ops.linear_attention.triton.tiles import Columns, Config, Pieces, Rows
from ato_jax.ops.linear_attention.triton.walk import Walk, plan

# Of the gates as given. exp of it is 0 in float32: nothing stronger matters, and -inf would turn
# sums into NaN.
STRONGEST = -128.0
BFLOAT16_MASK = -(1 << 16)  # of float32's bits
# Rows of a chunk where the gates are not mild: each level of its pairs holds tiles of its own.
STEEP_BLOCK = 16
# Features up to which a tile fits the registers that has a chunk's sums in each of its rows.
WIDEST_SUMS = 64


def mildest(spec: LinearAttentionSpec) -> float:
    """How much of its logarithm a channel may lose in a chunk whose pairs are parted at once.

    2^46 leaves float32 and bfloat16 room for any features. float32's products are exact only
    as far as the exponents are, which are differences of sums of that size.
    """
    return 11.5 if spec.dtype == "float32" and spec.precision == "exact" else 46.0


def _load_gates(spec: LinearAttentionSpec, ref: Any, rows: Rows, mild: bool = False) -> jax.Array:
    """[C, F] to base 2, zero where there is no step."""
    gates = tiles.load_tile(ref, rows, spec.F)
    return (gates if mild else jnp.maximum(gates, STRONGEST)) * tiles.LOG2_E


def _cut_off(x: jax.Array) -> jax.Array:
    """x without the bits that bfloat16 lacks: cheaper than rounding, and the rest has no error."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & BFLOAT16_MASK
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _parts(gates: jax.Array, count: int = 3) -> list[jax.Array]:
    """bfloat16 operands, of which float32 gates are the sum: exactly in three."""
    found = []
    for _ in range(count - 1):
        part = _cut_off(gates)
        found.append(part.astype(jnp.bfloat16))
        gates -= part
    return [*found, gates.astype(jnp.bfloat16)]


def _mild_parts(spec: LinearAttentionSpec, gates: jax.Array) -> list[jax.Array]:
    """As many as matter where no exponent is large.

    In bfloat16 two, of 16 bits: of a single one's 8 the error is that of every step where gates
    are alike, and of a sum over the steps it would be all of the budget.
    """
    return _parts(gates, 2 if spec.dtype == "bfloat16" else 3)


def _sums(chosen: jax.Array, parts: list[jax.Array], start: Any = 0.0) -> jax.Array:
    """`start` and the sums of the gates [C, F], in parts, that are chosen [C, C] for each row."""
    matrix = chosen.astype(jnp.bfloat16)
    for part in parts:
        start += plgpu.dot(matrix, part)
    return start


class Frame(NamedTuple):
    """The decays between the rows of a chunk and its edges.

    Where `mild` is True, `until` lacks `keep`: it is -c, and the state, which has been added to
    in these terms, gets the factor at the end.
    """

    mild: bool
    gates: jax.Array  # [C, F]
    since: jax.Array  # [C, F], c
    until: jax.Array  # [C, F], total - c
    keep: jax.Array  # [1, F], 2^total


def _frame(spec: LinearAttentionSpec, ref: Any, rows: Rows, mild: bool) -> Frame:
    gates = _load_gates(spec, ref, rows, mild)  # [C, F]
    keep = tiles.exp2(_sum_rows(gates))
    i, j = _pairs(gates.shape[0])
    if mild:
        c = _sums(j <= i, _mild_parts(spec, gates))
        return Frame(mild, gates, c, -c, keep)
    parts = _parts(gates)
    return Frame(mild, gates, _sums(j <= i, parts), _sums(j > i, parts), keep)


def _pairs(block: int) -> tuple[jax.Array, jax.Array]:
    index = jnp.arange(block, dtype=jnp.int32)
    return index[:, None], index[None, :]


class Side(NamedTuple):
    """The queries or the keys of a chunk, [C, F] each."""

    features: jax.Array  # float32
    slopes: jax.Array
    edge: jax.Array  # the operand: the features decayed between the rows and the chunk's edge
    edge_slopes: jax.Array  # the slopes, likewise


def _unrounded_side(
    spec: LinearAttentionSpec,
    x: jax.Array,
    rows: Rows,
    decay: jax.Array,
    columns: Columns | None = None,
) -> Side:
    """From a tile of q or k [C, D], and its rows' decays to an edge of the chunk [C, F].

    Its edge is float32, not an operand yet. `columns` are the tile's, if it has not all.
    """
    features, slopes = tiles.features_and_slopes(spec, x, rows, columns)
    if spec.feature_map.name == "elu1":
        # phi(x) = (max(x, 0) + 1) exp(min(x, 0)), of which the second factor is phi'(x).
        x = x.astype(jnp.float32)
        edge_slopes = tiles.exp2(jnp.minimum(x, 0.0) * tiles.LOG2_E + decay)
        edge = edge_slopes * (jnp.maximum(x, 0.0) + 1)
        if rows.exist is not None or tiles.padded(spec.D) != spec.D:
            edge = jnp.where(features != 0, edge, 0.0)
    else:
        factor = tiles.exp2(decay)
        edge, edge_slopes = features * factor, slopes * factor
    return Side(features, slopes, edge, edge_slopes)


def _side(spec: LinearAttentionSpec, x: jax.Array, rows: Rows, decay: jax.Array) -> Side:
    side = _unrounded_side(spec, x, rows, decay)
    return side._replace(edge=tiles.operand(spec, side.edge, wide=True))


def _over_levels(frame: Frame, add_level: Callable[..., Any], sums: Any) -> Any:
    """`add_level(level, at_level [C, C], factor [C, F], sums)` for each level of the pairs."""
    block = frame.gates.shape[0]
    i, j = _pairs(block)

    def add(level: Any, sums: Any) -> Any:
        half = (1 << level) >> 1
        middle = (i & -(2 * half)) + half
        between = (jnp.minimum(middle, i + 1) <= j) & (j < jnp.maximum(middle, i + 1)) & (half > 0)
        at_level = (half <= (i ^ j)) & ((i ^ j) < jnp.maximum(2 * half, 1))
        return add_level(level, at_level, tiles.exp2(_sums(between, _parts(frame.gates))), sums)

    return jax.lax.fori_loop(0, block.bit_length(), add, sums)


def _weights(spec: LinearAttentionSpec, frame: Frame, rows: Side, columns: Side) -> jax.Array:
    """[C rows, C columns]: the pairs' products, decayed; right where the query is not earlier."""
    if frame.mild:
        return tiles.product(spec, rows.edge, columns.edge, wide=True, trans_b=True)

    def add_level(_: Any, at_level: jax.Array, factor: jax.Array, w: jax.Array) -> jax.Array:
        found = tiles.product(
            spec, rows.features * factor, columns.features * factor, wide=True, trans_b=True
        )
        return jnp.where(at_level, found, w)

    return _over_levels(frame, add_level, jnp.zeros([frame.gates.shape[0]] * 2, jnp.float32))


class Gradient(NamedTuple):
    """Sums to which the gradient of one side's features is added, [C, F] each.

    With the side's decays to the edge, `edge` is that gradient but for `pairs`; and the product of
    that gradient with the features but for `flow`, in which no row is paired with itself. Where the
    frame is mild there is `edge` alone.
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
        return Gradient(found.edge + _finely(spec, dw, columns.edge, fine="a"), ())

    def add_level(level: Any, at_level: jax.Array, factor: jax.Array, sums: Any) -> Any:
        pairs, flow = sums
        read = tiles.operand(spec, columns.features * factor, wide=True)
        sum_ = _finely(spec, jnp.where(at_level, dw, 0.0), read, fine="a")
        rounded = tiles.operand(spec, rows.features * factor, wide=True).astype(jnp.float32)
        # No gate is in the pair of a row with itself. In both sides' sums, it would cancel but for
        # rounding, which may be more than strong gates leave of the other pairs.
        # A factor, as a choice would spill more.
        differ = jnp.minimum(level, 1).astype(jnp.float32)
        return pairs + factor * sum_, flow + differ * rounded * sum_

    return Gradient(found.edge, _over_levels(frame, add_level, found.pairs))


def _finish_gradient(found: Gradient, side: Side) -> tuple[jax.Array, jax.Array]:
    """x's gradient, and the features' times the features as they were rounded."""
    gradient = found.edge * side.edge_slopes
    flow = found.edge * side.edge.astype(jnp.float32)
    if not found.pairs:
        return gradient, flow
    pairs, flow_of_pairs = found.pairs
    return gradient + pairs * side.slopes, flow + flow_of_pairs


def _finely(
    spec: LinearAttentionSpec, a: jax.Array, b: jax.Array, *, fine: str, trans_a: bool = False
) -> jax.Array:
    """a @ b, what rounding leaves of the factor called `fine` multiplied, too.

    The gates' gradient is a difference of sums over a whole piece: so also in float16 and TF32.
    """
    if spec.dtype == "float32" and spec.precision == "exact":
        return tiles.product(spec, a, b, trans_a=trans_a)
    x = a if fine == "a" else b
    if spec.dtype == "bfloat16":
        first = _cut_off(x)
    else:
        first = tiles.operand(spec, x, wide=True).astype(jnp.float32)
    found = jnp.float32(0)
    for part in (first, x - first):
        factors = (part, b) if fine == "a" else (a, part)
        found += tiles.product(spec, *factors, wide=True, trans_a=trans_a)
    return found


def _sum_rows(tile: jax.Array) -> jax.Array:
    """[1, F], the sum of a tile's rows in float32.

    Not a product: one of fewer rows than Hopper's tensor cores take drags the others' layouts
    along, and one of as many fills too many registers.
    """
    return jnp.sum(tile.astype(jnp.float32), axis=0)[None, :]


class Normalizer(NamedTuple):
    """What the walk for dq leaves for the one for dk and dv, [B, H, T] float32."""

    d_den: jax.Array  # e / den
    inverse: jax.Array  # 1 / den


class States(NamedTuple):
    """What is known of each piece before it is walked."""

    kv: jax.Array  # [B, G, P + 1, V, F], the states before each piece, and after the last
    k_sum: jax.Array  # [B, G, P + 1, F]
    totals: jax.Array  # [B, G, P, chunks of state_block, F], the sums of the gates

    @property
    def decay(self) -> jax.Array:
        """[B, G, P, F], each piece's."""
        return jnp.sum(self.totals, axis=3)

    @property
    def steepest(self) -> jax.Array:
        """[B, G, P], the most that a channel loses within a chunk of a piece."""
        return -jnp.min(self.totals, axis=(3, 4))


def _has_room(spec: LinearAttentionSpec) -> bool:
    """Whether registers are left beside a state, for sums in each row of a tile."""
    return tiles.state_size(spec) <= tiles.SMALL_STATE and tiles.padded(spec.F) <= WIDEST_SUMS


def _state_blocks(spec: LinearAttentionSpec, index: Any) -> list[pl.BlockSpec]:
    """kv [V, F] and k_sum [F] of one piece; `index(*program_ids)` is (batch, head, piece)."""
    return [
        pl.BlockSpec((None, None, None, spec.V, spec.F), lambda *ids: (*index(*ids), 0, 0)),
        pl.BlockSpec((None, None, None, spec.F), lambda *ids: (*index(*ids), 0)),
    ]


def _prefix_states(spec: LinearAttentionSpec, config: Config, inputs: Inputs, walk: Walk) -> States:
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
    """Each piece's sums over its keys, decayed to its end, and its chunks' sums of gates.

    From the end, so that the decays between a row and the end of the piece are a running sum, of
    which each row's factor is taken: the sums in the registers are only added to. That of the
    gates is in each row of a tile, where registers allow: a product with ones leaves it there.
    """
    block = config.state_block
    in_rows = _has_room(spec)
    pieces = walk.pieces
    chunks = pieces.rows // block

    def kernel(
        k_ref: Any, v_ref: Any, gates_ref: Any, kv_ref: Any, k_sum_ref: Any, totals_ref: Any
    ) -> None:
        first = walk.first_key + tiles.piece_id() * pieces.rows
        ones = jnp.ones((tiles.SUM_ROWS, block), jnp.float32)
        all_ = jnp.ones((block, block), jnp.bfloat16)
        row, column = _pairs(block)

        def add_tile(i: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            kv, k_sum, decay = sums  # [V, F], [SUM_ROWS, F], [C or 1, F]
            chunk = chunks - 1 - i
            rows = tiles.tile_rows(first + chunk * block, block, spec.S, walk.aligned)
            k = tiles.load_tile(k_ref, rows, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, rows, spec.V)  # [C, V]
            gates = _load_gates(spec, gates_ref, rows)  # [C, F]
            parts = _mild_parts(spec, gates)
            total = _sums(all_, parts) if in_rows else _sum_rows(gates)  # [C or 1, F]
            adds = _side(spec, k, rows, _sums(column > row, parts, decay))
            kv += tiles.product(spec, v, adds.edge, wide=True, trans_a=True)
            k_sum += tiles.product(spec, ones, adds.edge, wide=True)
            first_row = tiles.tile_rows(chunk, len(total), chunk + 1, False)
            tiles.store_tile(totals_ref, first_row, spec.F, total)
            return kv, k_sum, decay + total

        nothing = jnp.zeros((block if in_rows else 1, tiles.padded(spec.F)), jnp.float32)
        sums = (*_no_sums(spec, tiles.SUM_ROWS), nothing)
        kv, k_sum, _ = jax.lax.fori_loop(0, chunks, add_tile, sums)
        tiles.store_matrix(kv_ref, spec.V, spec.F, kv)
        tiles.store_vector(k_sum_ref, spec.F, jnp.max(k_sum, axis=0))

    P = pieces.count
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
                pl.BlockSpec((None, None, None, chunks, spec.F), lambda p, g, b: (b, g, p, 0, 0)),
            ],
            out_shape=[
                jax.ShapeDtypeStruct((spec.B, spec.G, P, spec.V, spec.F), jnp.float32),
                jax.ShapeDtypeStruct((spec.B, spec.G, P, spec.F), jnp.float32),
                jax.ShapeDtypeStruct((spec.B, spec.G, P, chunks, spec.F), jnp.float32),
            ],
            warps=config.state_warps,
            stages=config.state_stages,
        )(inputs.k, inputs.v, inputs.decay)
    )


def _is_mild(spec: LinearAttentionSpec, config: Config, steepest_ref: Any, block: int) -> jax.Array:
    """Whether all pairs of each of a piece's chunks of `block` rows may be parted at once."""
    # A chunk that is larger than those of the state pass loses at most this many times as much.
    return steepest_ref[...] <= mildest(spec) / max(1, block // config.state_block)


def _walk_chunks(
    spec: LinearAttentionSpec,
    config: Config,
    pieces: Pieces,
    steepest_ref: Any,
    block: int,
    chunk: Callable[[bool, int], Callable[..., Any]],
    carry: Any,
    kinds: tuple[bool, ...] = (True, False),
) -> Any:
    """`chunk(mild, rows)(i, carry)` for each chunk i of a piece, its rows `block` if mild.

    A piece that is not of one of the `kinds`, which are what `mild` may be, is passed over.
    """
    is_mild = _is_mild(spec, config, steepest_ref, block).astype(jnp.int32)
    # Two loops, one of which has no turns: XLA's Triton crashed on a branch around them.
    for mild in kinds:
        turns = is_mild if mild else 1 - is_mild
        rows = block if mild else min(block, STEEP_BLOCK)
        carry = jax.lax.fori_loop(0, turns * (pieces.rows // rows), chunk(mild, rows), carry)
    return carry


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    walk = plan(spec, config)
    states = _prefix_states(spec, config, inputs, walk)
    state = LinearState(jnp.swapaxes(states.kv[:, :, -1], 2, 3), states.k_sum[:, :, -1])
    written = None
    if _has_room(spec) and config.output_block % config.state_block == 0:
        written = _mild_output(spec, config, inputs, walk, states)
    return Outputs(_output(spec, config, inputs, walk, states, written), state)


def _mild_output(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, walk: Walk, states: States
) -> jax.Array:
    """The outputs of mild pieces; what lies in the others' place is left as it was.

    Beside a small state there are registers to keep z in every row of a tile, fed by a product
    with ones, where the query's features are; and the sums of the gates are the states' pass's.
    So but for the denominators nothing passes from thread to thread.
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
        piece = walk.with_queries + tiles.piece_id()
        row, column = _pairs(block)

        def write(i: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            kv, z = state  # [V, F], [C, F]
            queries, keys = walk.rows_at(spec, {}, piece * walk.pieces.rows + i * block, block)
            q = tiles.load_tile(q_ref, queries, spec.D)  # [C, D]
            k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
            gates = _load_gates(spec, gates_ref, keys, mild=True)  # [C, F]
            c = _sums(column <= row, _mild_parts(spec, gates))  # [C, F]
            total = tiles.load_rows(totals_ref, tiles.all_rows(spec.F), i)  # [F]
            keep = tiles.exp2(total)[None, :]
            adds = _side(spec, k, keys, -c).edge
            reads = tiles.rounded(spec, _unrounded_side(spec, q, queries, c).edge, wide=True)
            w = tiles.product(spec, reads, adds, wide=True, trans_b=True)  # [C, C]
            w = jnp.where(column <= row, w, 0.0)
            out = tiles.product(spec, reads, kv, wide=True, trans_b=True)  # [C, V]
            if spec.normalize:
                # As the product takes them: their roundings cancel.
                w = tiles.rounded(spec, w, wide=True)
                if block == width:  # one sum of rows, which threads exchange, not two
                    den = jnp.sum(w + reads * z, axis=1)  # [C]
                else:
                    den = jnp.sum(w, axis=1) + jnp.sum(reads * z, axis=1)
                out += tiles.product(spec, w, v, wide=True)
                out *= (1 / jnp.maximum(den, spec.eps))[:, None]
                ones = jnp.ones((block, block), jnp.float32)
                z = (z + tiles.product(spec, ones, adds, wide=True)) * keep
            else:
                out = (out + _finely(spec, w, v, fine="a")) * spec.scale
            tiles.store_tile(out_ref, queries, spec.V, out)
            return (kv + tiles.product(spec, v, adds, wide=True, trans_a=True)) * keep, z

        kv, z = _load_state(spec, kv_ref, k_sum_ref)
        turns = _is_mild(spec, config, steepest_ref, block).astype(jnp.int32) * chunks
        jax.lax.fori_loop(0, turns, write, (kv, jnp.broadcast_to(z, (block, width))))

    def piece_of(p: Any, h: Any, b: Any) -> tuple[Any, ...]:
        return b, h // group, walk.with_queries + p

    keys = tiles.sequence_block(spec, spec.S, spec.D, lambda p, h, b: (b, h // group))
    return tiles.launch(
        kernel,
        "linear_attention_channel_mild_output",
        grid=(walk.pieces.count - walk.with_queries, spec.H, spec.B),
        in_specs=[
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            keys,
            tiles.sequence_block(spec, spec.S, spec.V, lambda p, h, b: (b, h // group)),
            keys,
            pl.BlockSpec((None, None, None, chunks, spec.F), lambda *ids: (*piece_of(*ids), 0, 0)),
            *_state_blocks(spec, piece_of),
            pl.BlockSpec((None, None, None), piece_of),
        ],
        out_specs=tiles.sequence_block(spec, spec.T, spec.V, lambda p, h, b: (b, h)),
        out_shape=tiles.sequence_shape(spec, spec.T, spec.H, spec.V),
        warps=config.output_warps,
        stages=config.output_stages,
    )(inputs.q, inputs.k, inputs.v, inputs.decay, totals, states.kv, states.k_sum, states.steepest)


def _output(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    states: States,
    written: jax.Array | None,
) -> jax.Array:
    """The outputs, those of mild pieces as they are `written` already, if they are."""
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
        piece = walk.with_queries + tiles.piece_id()

        def write_chunk(mild: bool, block: int) -> Callable[..., Any]:
            row, column = _pairs(block)

            def write(i: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                kv, z = state  # [V, F], [1, F]
                queries, keys = walk.rows_at(spec, {}, piece * walk.pieces.rows + i * block, block)
                q = tiles.load_tile(q_ref, queries, spec.D)  # [C, D]
                k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
                v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
                frame = _frame(spec, gates_ref, keys, mild)  # [C, F]
                reads = _side(spec, q, queries, frame.since)
                adds = _side(spec, k, keys, frame.until)
                w = _weights(spec, frame, reads, adds)  # [C, C]
                w = jnp.where(column <= row, w, 0.0)
                out = tiles.product(spec, reads.edge, kv, wide=True, trans_b=True)  # [C, V]
                out += _finely(spec, w, v, fine="a")
                if spec.normalize:
                    den = jnp.sum(w, axis=1)  # [C]
                    den += jnp.sum(reads.edge.astype(jnp.float32) * z, axis=1)
                    out *= (1 / jnp.maximum(den, spec.eps))[:, None]
                    z = _advance(frame, z, _sum_rows(adds.edge))
                else:
                    out *= spec.scale
                tiles.store_tile(out_ref, queries, spec.V, out)
                added = tiles.product(spec, v, adds.edge, wide=True, trans_a=True)
                return _advance(frame, kv, added), z

            return write

        kinds: tuple[bool, ...] = (True, False)
        wanted: jax.Array | None = None
        if written is not None:
            kinds = (False,)
            wanted = ~_is_mild(spec, config, steepest_ref, block)
        state = _load_state(spec, kv_ref, k_sum_ref, wanted)
        _walk_chunks(spec, config, walk.pieces, steepest_ref, block, write_chunk, state, kinds)

    def piece_of(h: Any, p: Any, b: Any) -> tuple[Any, ...]:
        return b, h // group, walk.with_queries + p

    keys = tiles.sequence_block(spec, spec.S, spec.D, lambda h, p, b: (b, h // group))
    outs = tiles.sequence_block(spec, spec.T, spec.V, lambda h, p, b: (b, h))
    sequences = (inputs.q, inputs.k, inputs.v, inputs.decay)
    arrays = (*sequences, states.kv, states.k_sum, states.steepest)
    return pallas_call(
        kernel,
        name="linear_attention_channel_output",
        grid=(spec.H, walk.pieces.count - walk.with_queries, spec.B),
        in_specs=[
            tiles.sequence_block(spec, spec.T, spec.D, lambda h, p, b: (b, h)),
            keys,
            tiles.sequence_block(spec, spec.S, spec.V, lambda h, p, b: (b, h // group)),
            keys,
            *_state_blocks(spec, piece_of),
            pl.BlockSpec((None, None, None), piece_of),
            *[outs] * len(extra),
        ],
        out_specs=outs,
        out_shape=tiles.sequence_shape(spec, spec.T, spec.H, spec.V),
        input_output_aliases={len(arrays): 0} if extra else {},
        compiler_params=plgpu.CompilerParams(
            num_warps=config.output_warps, num_stages=config.output_stages
        ),
    )(*arrays, *extra)


def _no_sums(spec: LinearAttentionSpec, rows: int) -> tuple[jax.Array, jax.Array]:
    """A state to add to: kv transposed, [V, F], and k_sum in each of some rows [rows, F]."""
    height, width = tiles.padded(spec.V), tiles.padded(spec.F)
    return jnp.zeros((height, width), jnp.float32), jnp.zeros((rows, width), jnp.float32)


def _load_state(
    spec: LinearAttentionSpec, kv_ref: Any, k_sum_ref: Any, wanted: Any = None
) -> tuple[jax.Array, jax.Array]:
    """kv [V, F] and k_sum [1, F]; of kv nothing is read where `wanted` is False."""
    rows = tiles.all_rows(spec.V)
    if wanted is not None:
        rows = Rows(rows.numbers, rows.exist, (rows.numbers < spec.V) & wanted)
    kv = tiles.load_tile(kv_ref, rows, spec.F)
    return kv, tiles.load_vector(k_sum_ref, spec.F)[None, :]


def _advance(frame: Frame, state: jax.Array, added: jax.Array) -> jax.Array:
    """The state [.., F] at the end of a chunk, from that before it and what the chunk adds."""
    return (state + added) * frame.keep if frame.mild else state * frame.keep + added


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs = residuals.inputs
    walk = plan(spec, config)
    states = _prefix_states(spec, config, inputs, walk)
    dq, flow, dkv, dk_sum, normalizer = _query_gradient(
        spec, config, inputs, walk, states, cotangents.out
    )
    # Over the query heads of each kv head; the first pieces may hold keys alone.
    dkv, dk_sum = (
        jnp.pad(
            jnp.sum(sums.reshape(spec.B, spec.G, -1, *sums.shape[2:]), axis=2),
            [(0, 0), (0, 0), (walk.with_queries, 0)] + [(0, 0)] * (sums.ndim - 3),
        )
        for sums in (dkv, dk_sum)
    )
    if spec.return_state:
        end = jnp.swapaxes(cotangents.state.kv, 2, 3), cotangents.state.k_sum
    else:
        end = jnp.zeros_like(dkv[:, :, 0]), jnp.zeros_like(dk_sum[:, :, 0])
    keeps = jnp.exp2(states.decay)
    dkv, dk_sum, _ = scan_states((dkv, dk_sum), end, keeps, reverse=True)
    dk, dv, d_decay = _key_gradient(
        spec, config, inputs, walk, states, dkv, dk_sum, flow, normalizer, cotangents.out
    )
    if spec.return_state:
        last = walk.pieces.count - 1
        crossing = jnp.sum(states.kv[:, :, last] * dkv[:, :, last], axis=2)  # [B, G, F]
        crossing += states.k_sum[:, :, last] * dk_sum[:, :, last]
        d_decay = _sum_last_piece(spec, walk, d_decay, crossing)
    d_state = None
    if inputs.initial_state is not None:
        d_state = LinearState(jnp.swapaxes(dkv[:, :, 0], 2, 3), dk_sum[:, :, 0])
    return Inputs(dq, dk, dv, decay=d_decay, initial_state=d_state)


def _sum_last_piece(
    spec: LinearAttentionSpec, walk: Walk, d_decay: jax.Array, crossing: jax.Array
) -> jax.Array:
    """The gates' gradient, whose last piece has the flows of its steps: sums of those before."""
    axis = 1 if spec.layout == "bthd" else 2
    first = (walk.pieces.count - 1) * walk.pieces.rows
    flow = jax.lax.slice_in_dim(d_decay, first, spec.S - 1, axis=axis)
    terms = jnp.concatenate([jnp.expand_dims(crossing, axis), -flow], axis=axis)
    return jax.lax.dynamic_update_slice_in_dim(
        d_decay, jnp.cumsum(terms, axis=axis), first, axis=axis
    )


def _query_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    states: States,
    do: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Normalizer | None]:
    """dq; phi(q) d_phi_q [B, H, T, F] float32; and, as seen from each piece's start, dS^T
    [B, H, pieces, V, F] and dz [B, H, pieces, F]; d_den and 1 / den."""
    block = config.dq_block
    group = spec.H // spec.G
    count = walk.pieces.count - walk.with_queries

    def kernel(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        gates_ref: Any,
        do_ref: Any,
        kv_ref: Any,
        k_sum_ref: Any,
        steepest_ref: Any,
        dq_ref: Any,
        flow_ref: Any,
        dkv_ref: Any,
        dk_sum_ref: Any,
        *normalizer_refs: Any,
    ) -> None:
        piece = walk.with_queries + tiles.piece_id()

        def write_chunk(mild: bool, block: int) -> Callable[..., Any]:
            row, column = _pairs(block)

            def write(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                kv, z, dkv, dz, since_start = carry  # [V, F], [1, F], [V, F], [1, F], [1, F]
                queries, keys = walk.rows_at(spec, {}, piece * walk.pieces.rows + i * block, block)
                q = tiles.load_tile(q_ref, queries, spec.D)  # [C, D]
                k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
                v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
                do = tiles.operand(spec, tiles.load_tile(do_ref, queries, spec.V))  # [C, V]
                frame = _frame(spec, gates_ref, keys, mild)  # [C, F]
                reads = _side(spec, q, queries, frame.since)
                adds = _side(spec, k, keys, frame.until)
                # The features as the forward rounded them, in both terms that nearly cancel.
                edge = reads.edge.astype(jnp.float32)  # [C, F]
                dw = tiles.product(spec, do, v, trans_b=True)  # [C, C]
                g = _finely(spec, do, kv, fine="b")  # [C, F]
                inverse = jnp.full((block,), spec.scale, jnp.float32)
                d_den: jax.Array | None = None
                if spec.normalize:
                    w = _weights(spec, frame, reads, adds)  # [C, C]
                    w = jnp.where(column <= row, w, 0.0)
                    den = jnp.sum(w, axis=1) + jnp.sum(edge * z, axis=1)  # [C]
                    out_do = jnp.sum(w * dw, axis=1) + jnp.sum(edge * g, axis=1)
                    inverse = 1 / jnp.maximum(den, spec.eps)
                    e = jnp.where(den > spec.eps, -inverse * out_do, 0.0)
                    dw += e[:, None]
                    g += e[:, None] * z
                    z = _advance(frame, z, _sum_rows(adds.edge))
                    d_den = e * inverse
                    tiles.store_rows(normalizer_refs[0], queries, d_den)
                    tiles.store_rows(normalizer_refs[1], queries, inverse)
                dw = jnp.where(column <= row, dw, 0.0)
                found = _add_pairs(spec, frame, _start_gradient(frame, g), dw, reads, adds)
                dq, flow = _finish_gradient(found, reads)
                tiles.store_tile(dq_ref, queries, spec.D, dq * inverse[:, None])
                tiles.store_tile(flow_ref, queries, spec.F, flow * inverse[:, None])
                added = tiles.product(spec, v, adds.edge, wide=True, trans_a=True)
                d_num = do.astype(jnp.float32) * inverse[:, None]  # [C, V]
                # As seen from the start of the piece.
                read = tiles.operand(spec, edge * since_start, wide=True)  # [C, F]
                dkv += _finely(spec, d_num, read, fine="a", trans_a=True)
                if d_den is not None:
                    dz += _sum_rows(d_den[:, None] * read.astype(jnp.float32))
                return _advance(frame, kv, added), z, dkv, dz, since_start * frame.keep

            return write

        state = _load_state(spec, kv_ref, k_sum_ref)
        nothing = _no_sums(spec, 1)
        carry = (*state, *nothing, jnp.ones((1, tiles.padded(spec.F)), jnp.float32))
        carry = _walk_chunks(spec, config, walk.pieces, steepest_ref, block, write_chunk, carry)
        _, _, dkv, dz, _ = carry
        tiles.store_matrix(dkv_ref, spec.V, spec.F, dkv)
        tiles.store_vector(dk_sum_ref, spec.F, dz[0])

    per_row = pl.BlockSpec((None, None, spec.T), lambda p, h, b: (b, h, 0))
    row_shape = jax.ShapeDtypeStruct((spec.B, spec.H, spec.T), jnp.float32)
    extra = 2 if spec.normalize else 0
    keys = tiles.sequence_block(spec, spec.S, spec.D, lambda p, h, b: (b, h // group))
    queries = tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h))
    dq, flow, dkv, dk_sum, *normalizer = tiles.launch(
        kernel,
        "linear_attention_channel_query_gradient",
        grid=(count, spec.H, spec.B),
        in_specs=[
            queries,
            keys,
            tiles.sequence_block(spec, spec.S, spec.V, lambda p, h, b: (b, h // group)),
            keys,
            tiles.sequence_block(spec, spec.T, spec.V, lambda p, h, b: (b, h)),
            *_state_blocks(spec, lambda p, h, b: (b, h // group, walk.with_queries + p)),
            pl.BlockSpec(
                (None, None, None), lambda p, h, b: (b, h // group, walk.with_queries + p)
            ),
        ],
        out_specs=[
            queries,
            pl.BlockSpec((None, None, spec.T, spec.F), lambda p, h, b: (b, h, 0, 0)),
            *_state_blocks(spec, lambda p, h, b: (b, h, p)),
            *[per_row] * extra,
        ],
        out_shape=[
            tiles.sequence_shape(spec, spec.T, spec.H, spec.D),
            jax.ShapeDtypeStruct((spec.B, spec.H, spec.T, spec.F), jnp.float32),
            jax.ShapeDtypeStruct((spec.B, spec.H, count, spec.V, spec.F), jnp.float32),
            jax.ShapeDtypeStruct((spec.B, spec.H, count, spec.F), jnp.float32),
            *[row_shape] * extra,
        ],
        warps=config.dq_warps,
        stages=config.dq_stages,
    )(inputs.q, inputs.k, inputs.v, inputs.decay, do, states.kv, states.k_sum, states.steepest)
    return dq, flow, dkv, dk_sum, Normalizer(*normalizer) if normalizer else None


def _key_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    states: States,
    dkv: jax.Array,
    dk_sum: jax.Array,
    flow: jax.Array,
    normalizer: Normalizer | None,
    do: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dk, dv and the gates' gradient, summed over the query heads of each kv head; with a returned
    state the last piece has what is still to be summed up instead (`_sum_last_piece`)."""
    block = config.dkv_block
    group = spec.H // spec.G
    axis = tiles.heads_axis(spec)

    def kernel(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        gates_ref: Any,
        do_ref: Any,
        flow_ref: Any,
        kv_ref: Any,
        k_sum_ref: Any,
        dkv_ref: Any,
        dk_sum_ref: Any,
        steepest_ref: Any,
        *refs: Any,
    ) -> None:
        *normalizer_refs, dk_ref, dv_ref, d_gates_ref = refs
        piece = tiles.piece_id()

        def write_chunk(mild: bool, block: int) -> Callable[..., Any]:
            row, column = _pairs(block)  # keys, queries
            chunks = walk.pieces.rows // block

            def write(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                dkv, dz, later = carry  # [V, F], [1, F], [F]
                start = piece * walk.pieces.rows + (chunks - 1 - i) * block
                queries, keys = walk.rows_at(spec, {}, start, block)
                k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
                v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
                frame = _frame(spec, gates_ref, keys, mild)  # [C, F]
                adds = _side(spec, k, keys, frame.until)
                if mild:
                    dkv, dz = dkv * frame.keep, dz * frame.keep
                dv = tiles.product(spec, adds.edge, dkv, wide=True, trans_b=True)  # [C, V]
                found = _start_gradient(frame, _finely(spec, v, dkv, fine="b") + dz)  # [C, F]
                if not mild:
                    dkv, dz = dkv * frame.keep, dz * frame.keep

                def add_head(head: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
                    dv, found, flow, dkv, dz = sums
                    q = tiles.load_tile(q_ref, queries, spec.D, head, axis)  # [C, D]
                    do = tiles.load_tile(do_ref, queries, spec.V, head, axis)  # [C, V]
                    do = tiles.operand(spec, do)
                    reads = _side(spec, q, queries, frame.since)
                    inverse = jnp.full((block,), spec.scale, jnp.float32)
                    if spec.normalize:
                        inverse = tiles.load_rows(normalizer_refs[1], queries, head)  # [C]
                    d_num = do.astype(jnp.float32) * inverse[:, None]  # [C, V]
                    # Not v . d_num, which is rounded: these terms are a difference.
                    dw = tiles.product(spec, v, do, trans_b=True)  # [C keys, C queries]
                    dw *= inverse[None, :]
                    if spec.normalize:
                        d_den = tiles.load_rows(normalizer_refs[0], queries, head)  # [C]
                        dw += d_den[None, :]
                        dz += _sum_rows(d_den[:, None] * reads.edge.astype(jnp.float32))
                    w = _weights(spec, frame, adds, reads)  # [C keys, C queries]
                    # 1 / den goes with the weights, which are multiplied finely, as do is exact.
                    w = jnp.where(row <= column, w * inverse[None, :], 0.0)
                    dv += _finely(spec, w, do, fine="a")
                    dw = jnp.where(row <= column, dw, 0.0)
                    found = _add_pairs(spec, frame, found, dw, adds, reads)
                    flow += tiles.load_tile(flow_ref, queries, spec.F, head, 0)  # [C, F]
                    dkv += _finely(spec, d_num, reads.edge, fine="a", trans_a=True)
                    return dv, found, flow, dkv, dz

                sums = (dv, found, jnp.zeros_like(frame.since), dkv, dz)
                dv, found, flow, dkv, dz = jax.lax.fori_loop(0, group, add_head, sums)
                dk, of_keys = _finish_gradient(found, adds)
                tiles.store_tile(dv_ref, keys, spec.V, dv)
                tiles.store_tile(dk_ref, keys, spec.D, dk)
                flow -= of_keys
                # From the first row, since there is no running sum from the last one.
                later += jnp.sum(flow, axis=0)
                before = jnp.cumsum(flow, axis=0) - flow
                d_gates = later[None, :] - before
                if spec.return_state:
                    d_gates = jnp.where(piece == walk.pieces.count - 1, flow, d_gates)
                tiles.store_tile(d_gates_ref, keys, spec.F, d_gates)
                return dkv, dz, later

            return write

        dkv, dz = _load_state(spec, dkv_ref, dk_sum_ref)
        kv = tiles.load_matrix(kv_ref, spec.V, spec.F)  # [V, F]
        later = jnp.sum(kv * dkv, axis=0)  # [F]
        if spec.normalize or spec.return_state:
            z = tiles.load_vector(k_sum_ref, spec.F)  # [F]
            later += z * tiles.load_vector(dk_sum_ref, spec.F)
        carry = (dkv, dz, later)
        _walk_chunks(spec, config, walk.pieces, steepest_ref, block, write_chunk, carry)

    keys = tiles.sequence_block(spec, spec.S, spec.D, lambda p, g, b: (b, g))
    values = tiles.sequence_block(spec, spec.S, spec.V, lambda p, g, b: (b, g))
    per_row = pl.BlockSpec((None, group, spec.T), lambda p, g, b: (b, g, 0))
    gates_shape = tiles.sequence_shape(spec, spec.S, spec.G, spec.D).update(dtype=jnp.float32)
    return tuple(
        tiles.launch(
            kernel,
            "linear_attention_channel_key_gradient",
            grid=(walk.pieces.count, spec.G, spec.B),
            in_specs=[
                tiles.sequence_block(spec, spec.T, spec.D, lambda p, g, b: (b, g), group),
                keys,
                values,
                keys,
                tiles.sequence_block(spec, spec.T, spec.V, lambda p, g, b: (b, g), group),
                pl.BlockSpec((None, group, spec.T, spec.F), lambda p, g, b: (b, g, 0, 0)),
                *_state_blocks(spec, lambda p, g, b: (b, g, p + 1)),
                *_state_blocks(spec, lambda p, g, b: (b, g, p + 1)),
                pl.BlockSpec((None, None, None), lambda p, g, b: (b, g, p)),
                *[per_row] * len(normalizer or ()),
            ],
            out_specs=[keys, values, keys],
            out_shape=[
                tiles.sequence_shape(spec, spec.S, spec.G, spec.D),
                tiles.sequence_shape(spec, spec.S, spec.G, spec.V),
                gates_shape,
            ],
            warps=config.dkv_warps,
            stages=config.dkv_stages,
        )(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.decay,
            do,
            flow,
            states.kv,
            states.k_sum,
            dkv,
            dk_sum,
            states.steepest,
            *(normalizer or ()),
        )
    )
