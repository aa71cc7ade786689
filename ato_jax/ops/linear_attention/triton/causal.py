"""Query i sees keys up to position i + offset: chunks inside pieces, causal or both ways.

With offset = S - T the last query sees the last key. The positions are cut into pieces, a piece
into chunks of C rows. Position p is key p and query p - offset, so that in the same chunk row i
sees row j iff j <= i. One state per piece is summed (`states.py`) and accumulated over the pieces
(`scan.py`); then one program walks each piece chunk by chunk, its running state S [F, V] and z [F]
in registers. With seen[i, j] = 1 iff j <= i:

    num = phi(q) S + w v              w = seen * (phi(q) phi(k)^T)
    den = phi(q) . z + w 1
    out = num / max(den, eps)         normalize, else scale * num

Backward, the same walk for dq. With dw = seen * (do v^T), the weights' gradient without the
normaliser, and row i's own z_i = z + sum_{j<=i} phi(k_j):

    g_i       = S do_i + sum_j dw[i, j] phi(k_j)
    e_i       = -(phi(q_i) . g_i) / den_i, 0 where phi(q_i) . z_i <= eps or not normalize
    d_num_i   = do_i / den_i
    d_den_i   = e_i / den_i
    d_phi_q_i = (g_i + e_i z_i) / den_i

and a walk from the end for dk and dv, with dS = sum phi(q_i) d_num_i^T and dz = sum d_den_i
phi(q_i) over the queries i of later chunks; d_den and 1 / den were left by the walk before, in
float32. 1 / den goes with do, not with phi(q), whose rows may all be alike: their roundings would
add up.

    dv_j      = dS^T phi(k_j) + sum_i seen[i, j] (phi(q_i) . phi(k_j)) d_num_i
    d_phi_k_j = dS v_j + dz   + sum_i seen[i, j] (d_num_i . v_j + d_den_i) phi(q_i)

With a decay or segments a pair's weight, and what goes through a state, are multiplied by the
factors of `walk.py`, `pair`, `reads`, `adds` and `keeps`: w and dw by `pair`, S and z where a
query reads them by `reads`, phi(k_j) where it goes into them by `adds`, and so on backwards.

Both ways at once is the same with a pair for all i and j and a second state, of the keys in later
chunks; a piece is then one chunk, so that there is a state on either side of each.

The states' kv are held transposed, [V, F]: what the state pass leaves.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

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
from ato_jax.ops.linear_attention.triton import tiles
from ato_jax.ops.linear_attention.triton.bidirectional import normalizer_terms
from ato_jax.ops.linear_attention.triton.scan import scan_states
from ato_jax.ops.linear_attention.triton.states import piece_states
from ato_jax.ops.linear_attention.triton.tiles import Config
from ato_jax.ops.linear_attention.triton.walk import (
    Flows,
    Steps,
    Walk,
    decay_flows,
    edge_flows,
    gates,
    lay_out,
    plan,
)

# What each kernel needs of the gates.
OF_PAIRS = ("up", "fine", "own", "run")
CAUSAL_GATES = (*OF_PAIRS, "reads", "adds", "keeps")
# Both ways nothing is carried from chunk to chunk.
QUERY_GATES_BOTH_WAYS = (*OF_PAIRS, "reads", "reads_right")
KEY_GATES_BOTH_WAYS = (*OF_PAIRS, "adds", "adds_right")


class Side(NamedTuple):
    """States at the edges of the pieces, [B, G, pieces + 1, V, F] and [B, G, pieces + 1, F]."""

    kv: jax.Array
    k_sum: jax.Array


def _lay_out(spec: LinearAttentionSpec, walk: Walk, inputs: Inputs) -> tuple[Steps, Any]:
    """The steps; and a function from their decays' gradients to that of the inputs' decay."""
    layout = lay_out(spec, walk, inputs)
    decay = own = pull = None
    if inputs.decay is not None:
        (decay, own), pull = jax.vjp(layout.place, inputs.decay)
    return Steps(layout.rows, decay, own, layout.run), pull


def _sides(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, walk: Walk, steps: Steps
) -> list[Side]:
    """The states that the queries read: of the keys before each edge, and both ways behind it."""
    names = ("adds", "keeps", "adds_right", "keeps_right")
    of_pieces = gates(spec, walk, steps, walk.pieces.rows, names)

    def sums(suffix: str) -> tuple[jax.Array, jax.Array]:
        arrays = dict(steps.rows)
        if of_pieces:
            arrays["adds"] = of_pieces[f"adds{suffix}"]
        keys_at = functools.partial(walk.keys_at, spec)
        return piece_states(spec, config, inputs, walk.pieces, keys_at, arrays)

    start = None
    if inputs.initial_state is not None:
        start = jnp.swapaxes(inputs.initial_state.kv, 2, 3), inputs.initial_state.k_sum
    left = Side(*scan_states(sums(""), start, of_pieces.get("keeps")))
    if not walk.both_ways:
        return [left]
    keeps = of_pieces["keeps_right"]
    return [left, Side(*scan_states(sums("_right"), None, keeps, reverse=True))]


def _state_blocks(spec: LinearAttentionSpec, index: Any) -> list[pl.BlockSpec]:
    """kv [V, F] and k_sum [F] of one piece; `index(*program_ids)` is (batch, head, piece)."""
    return [
        pl.BlockSpec((None, None, None, spec.V, spec.F), lambda *ids: (*index(*ids), 0, 0)),
        pl.BlockSpec((None, None, None, spec.F), lambda *ids: (*index(*ids), 0)),
    ]


def _load_state(
    spec: LinearAttentionSpec, refs: tuple[Any, Any]
) -> tuple[jax.Array, jax.Array]:
    """kv [V, F], and k_sum in parts [16, F] (`tiles.row_parts`)."""
    kv_ref, k_sum_ref = refs
    first = jnp.arange(tiles.PARTS, dtype=jnp.int32)[:, None] == 0
    k_sum = tiles.load_vector(k_sum_ref, spec.F)[None, :]
    return tiles.load_matrix(kv_ref, spec.V, spec.F), jnp.where(first, k_sum, 0.0)


def _seen(block: int) -> jax.Array:
    """[C, C]: whether column j is at or before row i."""
    i = jnp.arange(block, dtype=jnp.int32)
    return i[None, :] <= i[:, None]


class Pairs(NamedTuple):
    """The pairs (i, j) of a chunk, [C, C]: which see each other, and their decay (None: 1)."""

    seen: jax.Array
    decay: jax.Array | None

    def weigh(self, w: jax.Array) -> jax.Array:
        return jnp.where(self.seen, w if self.decay is None else w * self.decay, 0.0)

    def sums(self, spec: LinearAttentionSpec, phi_k: jax.Array, wide: bool) -> jax.Array:
        """[C, F]: the sum of phi(k_j) over the keys that each query sees, with their decay."""
        ones = jnp.ones(self.seen.shape, jnp.float32)
        if self.decay is None:
            return tiles.product(spec, jnp.where(self.seen, ones, 0.0), phi_k, wide=wide)
        return tiles.weighted_sum(spec, self.weigh(ones), phi_k)


def _pairs(
    walk: Walk, refs: dict[str, Any], start: Any, block: int, keys_first: bool = False
) -> Pairs:
    """Queries along the rows, or with `keys_first` along the columns."""

    def difference(query: jax.Array, key: jax.Array) -> jax.Array:
        if keys_first:
            return query[None, :] - key[:, None]
        return query[:, None] - key[None, :]

    nothing = jnp.zeros((block,), jnp.float32)
    seen = _seen(block)
    seen = seen.T if keys_first else seen
    if walk.both_ways:
        seen = jnp.full((block, block), True)
    if "run" in refs:
        run = tiles.load_steps(refs["run"], start, block)
        seen &= difference(run, run) == 0
    if "up" not in refs:
        return Pairs(seen, None)
    up = tiles.load_steps(refs["up"], start, block)
    exponent = difference(up, up)
    if "fine" in refs:
        fine = tiles.load_steps(refs["fine"], start, block)
        exponent += difference(fine, fine)
    # The pairs that are seen one way only have the other sign: never above 0 either way.
    exponent = -jnp.abs(exponent)
    if "own" in refs:
        exponent += difference(tiles.load_steps(refs["own"], start, block), nothing)
    return Pairs(seen, jnp.exp2(exponent))


def _later_pairs(m: jax.Array, walk: Walk) -> jax.Array:
    """m [C keys, C queries] of the pairs whose query is later; both ways, less the others."""
    i = jnp.arange(m.shape[0], dtype=jnp.int32)
    later = jnp.where(i[None, :] > i[:, None], m, 0.0)
    if not walk.both_ways:
        return later
    return jnp.where(i[None, :] < i[:, None], -m, later)


def _walk_chunks(walk: Walk, chunks: int, body: Any, carry: Any) -> Any:
    """The carry after all chunks of a piece; both ways a piece is one."""
    return body(0, carry) if walk.both_ways else jax.lax.fori_loop(0, chunks, body, carry)


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    walk = plan(spec, config)
    steps, _ = _lay_out(spec, walk, inputs)
    sides = _sides(spec, config, inputs, walk, steps)
    kv, k_sum = sides[0]
    state = LinearState(jnp.swapaxes(kv[:, :, -1], 2, 3), k_sum[:, :, -1])
    return Outputs(_output(spec, config, inputs, walk, steps, sides), state)


def _side_blocks(spec: LinearAttentionSpec, walk: Walk, index: Any) -> list[Any]:
    """The states that a piece reads: ahead of it, and both ways that behind it."""

    def behind(*ids: Any) -> tuple[Any, ...]:
        b, g, p = index(*ids)
        return b, g, p + 1

    sides = [index, behind] if walk.both_ways else [index]
    return [_state_blocks(spec, side) for side in sides]


def _output(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    steps: Steps,
    sides: list[Side],
) -> jax.Array:
    block = walk.pieces.rows if walk.both_ways else config.output_block
    group = spec.H // spec.G
    names = QUERY_GATES_BOTH_WAYS if walk.both_ways else CAUSAL_GATES
    arrays = steps.rows | gates(spec, walk, steps, block, names)

    def kernel(
        refs: dict[str, Any], q_ref: Any, k_ref: Any, v_ref: Any, side_refs: Any, out_ref: Any
    ) -> None:
        piece = walk.with_queries + tiles.piece_id()

        def write_chunk(i: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            start = piece * walk.pieces.rows + i * block
            queries, keys = walk.rows_at(spec, refs, start, block)
            q = tiles.load_tile(q_ref, queries, spec.D)  # [C, D]
            k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
            phi_q = tiles.operand(spec, tiles.features_of(spec, q, queries), wide=True)
            features = tiles.features_of(spec, k, keys)  # [C, F]
            phi_k = tiles.operand(spec, features, wide=tiles.wide_features(spec))
            pairs = _pairs(walk, refs, start, block)
            w = tiles.product(spec, phi_q, phi_k, wide=True, trans_b=True)  # [C, C]
            w = pairs.weigh(w)

            def read(state: tuple[jax.Array, jax.Array], name: str) -> tuple[jax.Array, Any]:
                """A state's part of num [C, V] and den [C]."""
                kv, z = state  # [V, F], [16, F]
                num = tiles.product(spec, phi_q, kv, wide=True, trans_b=True)
                den = tiles.by_parts(spec, phi_q, z) if spec.normalize else None
                if name in refs:
                    reads = tiles.load_steps(refs[name], start, block)
                    num, den = num * reads[:, None], None if den is None else den * reads
                return num, den

            out, den = read(state, "reads")
            if walk.both_ways:
                right, right_den = read(_load_state(spec, side_refs[1]), "reads_right")
                out, den = out + right, None if den is None else den + right_den
            if den is not None:
                # Of the rounded weights, so that what rounds them all alike cancels.
                w = tiles.rounded(spec, w)
                den += jnp.sum(w, axis=1)
                out += tiles.product(spec, w, v, wide=True)
                out *= (1 / jnp.maximum(den, spec.eps))[:, None]
            else:
                out += tiles.weighted_sum(spec, w, v)
                out *= spec.scale
            tiles.store_tile(out_ref, queries, spec.V, out)
            if walk.both_ways:
                return state
            return _add_keys(spec, refs, (start, block), state, features, v)

        state = _load_state(spec, side_refs[0])
        _walk_chunks(walk, walk.pieces.rows // block, write_chunk, state)

    return tiles.launch(
        kernel,
        "linear_attention_causal_output",
        grid=(walk.pieces.count - walk.with_queries, spec.H, spec.B),
        in_specs=[
            tiles.step_blocks(arrays, lambda p, h, b: (b, h // group)),
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            tiles.sequence_block(spec, spec.S, spec.D, lambda p, h, b: (b, h // group)),
            tiles.sequence_block(spec, spec.S, spec.V, lambda p, h, b: (b, h // group)),
            _side_blocks(spec, walk, lambda p, h, b: (b, h // group, walk.with_queries + p)),
        ],
        out_specs=tiles.sequence_block(spec, spec.T, spec.V, lambda p, h, b: (b, h)),
        out_shape=tiles.sequence_shape(spec, spec.T, spec.H, spec.V),
        warps=config.output_warps,
        stages=config.output_stages,
    )(arrays, inputs.q, inputs.k, inputs.v, [list(side) for side in sides])


def _add_keys(
    spec: LinearAttentionSpec,
    refs: dict[str, Any],
    steps: tuple[Any, int],
    state: tuple[jax.Array, jax.Array],
    features: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The state [V, F], [16, F] behind a chunk, whose keys have these features [C, F]."""
    kv, z = state
    start, block = steps
    wide = tiles.wide_features(spec)
    if "adds" in refs:
        keep = refs["keeps"][start // block]
        kv, z = keep * kv, keep * z
        features, wide = tiles.scale_rows(features, refs["adds"], start), True
    features = tiles.rounded(spec, features)
    if spec.normalize:
        z += tiles.row_parts(features)
    return kv + tiles.product(spec, v, features, wide=wide, trans_a=True), z


class Normalizer(NamedTuple):
    """What the walk for dq leaves for the one for dk and dv, [B, H, T] float32."""

    e: jax.Array
    inverse: jax.Array  # 1 / den


class QueryGradient(NamedTuple):
    dq: jax.Array
    sides: list[Side]  # of each piece, [B, H, pieces, V, F] and [B, H, pieces, F]
    normalizer: Normalizer | None
    # By steps, [B, H, steps], for the decay's gradient: what each query reads from the states,
    # and all that it reads, for its own decay.
    reads: list[jax.Array]
    own: jax.Array | None


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs = residuals.inputs
    walk = plan(spec, config)
    steps, pull = _lay_out(spec, walk, inputs)
    states = _sides(spec, config, inputs, walk, steps)
    found = _query_gradient(spec, config, inputs, walk, steps, states, cotangents.out)

    def of_group(array: jax.Array) -> jax.Array:
        """Over the query heads of each kv head; pieces that hold keys alone add nothing."""
        array = jnp.sum(array.reshape(spec.B, spec.G, -1, *array.shape[2:]), axis=2)
        before = array.shape[2] * walk.with_queries // (walk.pieces.count - walk.with_queries)
        return jnp.pad(array, [(0, 0), (0, 0), (before, 0)] + [(0, 0)] * (array.ndim - 3))

    end = None
    if spec.return_state:
        end = jnp.swapaxes(cotangents.state.kv, 2, 3), cotangents.state.k_sum
    pieces = [(of_group(side.kv), of_group(side.k_sum)) for side in found.sides]
    keeps = gates(spec, walk, steps, walk.pieces.rows, ("keeps", "keeps_right"))
    sides = [Side(*scan_states(pieces[0], end, keeps.get("keeps"), reverse=True))]
    if walk.both_ways:
        sides.append(Side(*scan_states(pieces[1], None, keeps["keeps_right"])))
    dk, dv, flows = _key_gradient(
        spec, config, inputs, walk, steps, sides, found.normalizer, cotangents.out
    )
    d_state = d_decay = None
    if inputs.initial_state is not None:
        d_state = LinearState(jnp.swapaxes(sides[0].kv[:, :, 0], 2, 3), sides[0].k_sum[:, :, 0])
    if pull is not None:
        reads = [of_group(array) for array in found.reads]
        own = None if found.own is None else of_group(found.own)
        d_steps = _decay_gradient(walk, config, keeps, states, sides, reads, flows)
        (d_decay,) = pull((d_steps, own))
    return Inputs(found.dq, dk, dv, decay=d_decay, initial_state=d_state)


def _decay_gradient(
    walk: Walk,
    config: Config,
    keeps: dict[str, jax.Array],
    states: list[Side],
    cotangents: list[Side],
    reads: list[jax.Array],
    flows: list[jax.Array],
) -> jax.Array:
    """The gradient of each step's decay, [B, G, steps] (`walk.py`)."""
    ends, starts, *right = flows
    if not walk.both_ways:
        passing = edge_flows(states[0], cotangents[0])
        found = Flows(reads[0], starts, ends + reads[0])
        return decay_flows(walk, found, passing, config.dq_block)

    def edges(side: Side, part: slice) -> tuple[jax.Array, jax.Array]:
        return side.kv[:, :, part], side.k_sum[:, :, part]

    ahead, behind = slice(None, -1), slice(1, None)
    passing = keeps["keeps"] * edge_flows(edges(states[0], ahead), edges(cotangents[0], behind))
    passing += keeps["keeps_right"] * edge_flows(
        edges(states[1], behind), edges(cotangents[1], ahead)
    )
    found = Flows(reads[0], starts + reads[1], ends + reads[0] + right[0])
    return decay_flows(walk, found, passing, walk.pieces.rows)


def _query_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    steps: Steps,
    sides: list[Side],
    do: jax.Array,
) -> QueryGradient:
    block = walk.pieces.rows if walk.both_ways else config.dq_block
    group = spec.H // spec.G
    count = walk.pieces.count - walk.with_queries
    names = QUERY_GATES_BOTH_WAYS if walk.both_ways else CAUSAL_GATES
    arrays = steps.rows | gates(spec, walk, steps, block, names)
    if "reads" in arrays:
        of_pieces = gates(spec, walk, steps, walk.pieces.rows, ("reads",))
        arrays["reads_of_piece"] = of_pieces["reads"]
    # Per step, for the decay's gradient.
    flows = len(sides) if spec.decay is not None else 0
    own = int("own" in arrays)

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
        flow_refs: Any,
    ) -> None:
        piece = walk.with_queries + tiles.piece_id()
        one = tiles.identity(spec, tiles.padded(spec.D))

        def write_chunk(i: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            state, sums = carry
            start = piece * walk.pieces.rows + i * block
            queries, keys = walk.rows_at(spec, refs, start, block)
            q = tiles.load_tile(q_ref, queries, spec.D)  # [C, D]
            k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
            do = tiles.load_tile(do_ref, queries, spec.V)  # [C, V]
            q = tiles.as_accumulated(q, one)
            phi_q, slopes = tiles.features_and_slopes(spec, q, queries)  # [C, F]
            wide = tiles.wide_features(spec)
            features = tiles.features_of(spec, k, keys)  # [C, F]
            phi_k = tiles.operand(spec, features, wide=wide)
            pairs = _pairs(walk, refs, start, block)
            dw = tiles.product(spec, do, v, trans_b=True)  # [C, C]
            dw = pairs.weigh(dw)

            def read(state: tuple[jax.Array, jax.Array], name: str) -> tuple[jax.Array, Any]:
                """A state's part of g and of z_i, [C, F]."""
                kv, z = state  # [V, F], [16, F]
                g = tiles.product(spec, do, kv, wide=True)
                z_seen = tiles.in_each_row(spec, block, z) if spec.normalize else None
                if name in refs:
                    reads = tiles.load_steps(refs[name], start, block)[:, None]
                    g, z_seen = g * reads, None if z_seen is None else z_seen * reads
                return g, z_seen

            parts = [read(state, "reads")]
            if walk.both_ways:
                parts.append(read(_load_state(spec, side_refs[1]), "reads_right"))
            g = sum((g for g, _ in parts), tiles.product(spec, dw, phi_k, wide=True))
            e = z_seen = None
            inverse = jnp.full((block,), spec.scale, jnp.float32)
            if spec.normalize:
                z_seen = sum((z for _, z in parts), pairs.sums(spec, phi_k, wide))
                e, inverse = normalizer_terms(spec, [phi_q], [g], [z_seen])
                tiles.store_rows(normalizer_refs[0], queries, e)
                tiles.store_rows(normalizer_refs[1], queries, inverse)

            def to_features(g: jax.Array, z: Any) -> jax.Array:
                """[C, F]: the derivative by phi(q) of what was read with these g and z."""
                if e is not None:
                    g += e[:, None] * z
                return g * inverse[:, None]

            d_phi_q = to_features(g, z_seen)
            tiles.store_tile(dq_ref, queries, spec.D, d_phi_q * slopes)
            at = start - walk.with_queries * walk.pieces.rows
            for flow_ref, part in zip(flow_refs[:flows], parts, strict=False):
                tiles.store_steps(flow_ref, at, jnp.sum(phi_q * to_features(*part), axis=1))
            if own:
                tiles.store_steps(flow_refs[-1], at, jnp.sum(phi_q * d_phi_q, axis=1))
            if not walk.both_ways:
                state = _add_keys(spec, refs, (start, block), state, features, v)
            found = []
            u = phi_q * inverse[:, None]
            for side, name in zip(sums, ("reads_of_piece", "reads_right"), strict=False):
                of_side = tiles.scale_rows(u, refs[name], start) if name in refs else u
                dkv, dz = side  # [V, F], [F, 16]
                of_side = tiles.operand(spec, of_side, wide=True)
                dkv += tiles.product(spec, do, of_side, wide=True, trans_a=True)
                if e is not None:
                    columns = tiles.as_columns(spec, e)
                    dz += tiles.product(spec, of_side, columns, wide=True, trans_a=True)
                found.append((dkv, dz))
            return state, tuple(found)

        state = _load_state(spec, side_refs[0])
        d_side = jnp.zeros_like(state[0]), jnp.zeros(state[1].shape[::-1], jnp.float32)
        nothing = (d_side,) * len(sides)
        _, sums = _walk_chunks(walk, walk.pieces.rows // block, write_chunk, (state, nothing))
        for (dkv_ref, dk_sum_ref), (dkv, dz) in zip(d_side_refs, sums, strict=True):
            tiles.store_matrix(dkv_ref, spec.V, spec.F, dkv)
            tiles.store_vector(dk_sum_ref, spec.F, jnp.sum(dz, axis=1))

    per_row = pl.BlockSpec((None, None, spec.T), lambda p, h, b: (b, h, 0))
    row_shape = jax.ShapeDtypeStruct((spec.B, spec.H, spec.T), jnp.float32)
    normalizers = 2 if spec.normalize else 0
    asked = count * walk.pieces.rows
    per_step = pl.BlockSpec((None, None, asked), lambda p, h, b: (b, h, 0))
    step_shape = jax.ShapeDtypeStruct((spec.B, spec.H, asked), jnp.float32)
    side_shape = [
        jax.ShapeDtypeStruct((spec.B, spec.H, count, spec.V, spec.F), jnp.float32),
        jax.ShapeDtypeStruct((spec.B, spec.H, count, spec.F), jnp.float32),
    ]
    dq, d_sides, normalizer, found = tiles.launch(
        kernel,
        "linear_attention_causal_query_gradient",
        grid=(count, spec.H, spec.B),
        in_specs=[
            tiles.step_blocks(arrays, lambda p, h, b: (b, h // group)),
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            tiles.sequence_block(spec, spec.S, spec.D, lambda p, h, b: (b, h // group)),
            tiles.sequence_block(spec, spec.S, spec.V, lambda p, h, b: (b, h // group)),
            tiles.sequence_block(spec, spec.T, spec.V, lambda p, h, b: (b, h)),
            _side_blocks(spec, walk, lambda p, h, b: (b, h // group, walk.with_queries + p)),
        ],
        out_specs=[
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            [_state_blocks(spec, lambda p, h, b: (b, h, p))] * len(sides),
            [per_row] * normalizers,
            [per_step] * (flows + own),
        ],
        out_shape=[
            tiles.sequence_shape(spec, spec.T, spec.H, spec.D),
            [side_shape] * len(sides),
            [row_shape] * normalizers,
            [step_shape] * (flows + own),
        ],
        warps=config.dq_warps,
        stages=config.dq_stages,
    )(arrays, inputs.q, inputs.k, inputs.v, do, [list(side) for side in sides])
    return QueryGradient(
        dq,
        [Side(*side) for side in d_sides],
        Normalizer(*normalizer) if normalizer else None,
        found[:flows],
        found[-1] if own else None,
    )


def _weighted(spec: LinearAttentionSpec, w: jax.Array, rows: jax.Array) -> jax.Array:
    """w @ rows; weights with 1 / den in them round differently from query to query, others may
    all be alike."""
    if spec.normalize:
        return tiles.product(spec, w, rows, wide=True)
    return tiles.weighted_sum(spec, w, rows)


def _key_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    steps: Steps,
    sides: list[Side],
    normalizer: Normalizer | None,
    do: jax.Array,
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """dk and dv, summed over the query heads of each kv head; and for the decay's gradient.

    These are of each step, [B, G, steps]: what counts for decays up to its own and for later
    ones, and both ways also what its key's part in the right state counts for the former.
    """
    # The flows of queries and of keys are added up by the same chunks.
    block = config.dkv_block if spec.decay is None else config.dq_block
    block = walk.pieces.rows if walk.both_ways else block
    group = spec.H // spec.G
    chunks = walk.pieces.rows // block
    axis = tiles.heads_axis(spec)
    names = KEY_GATES_BOTH_WAYS if walk.both_ways else CAUSAL_GATES
    arrays = steps.rows | gates(spec, walk, steps, block, names)
    flows = 0 if spec.decay is None else 3 + walk.both_ways

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
        flow_refs: Any,
    ) -> None:
        piece = tiles.piece_id()
        one = tiles.identity(spec, tiles.padded(spec.D))

        def write_chunk(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            start = piece * walk.pieces.rows + (chunks - 1 - i) * block
            queries, keys = walk.rows_at(spec, refs, start, block)
            k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
            k = tiles.as_accumulated(k, one)
            features, slopes = tiles.features_and_slopes(spec, k, keys)  # [C, F]
            phi_k = tiles.operand(spec, features, wide=True)

            def read(
                sums: tuple[jax.Array, jax.Array], name: str
            ) -> tuple[jax.Array, jax.Array]:
                """What later chunks add to dv [C, V] and to phi(k)'s gradient [C, F]."""
                dkv, dz = sums  # [V, F], [16, F]
                dv = tiles.product(spec, phi_k, dkv, wide=True, trans_b=True)
                d_features = tiles.read_state(spec, v, dkv)
                if spec.normalize or spec.return_state:
                    d_features += tiles.in_each_row(spec, block, dz)
                if name in refs:
                    adds = tiles.load_steps(refs[name], start, block)[:, None]
                    dv, d_features = dv * adds, d_features * adds
                return dv, d_features

            dv, d_features = read(sums, "adds")
            if flows:
                tiles.store_steps(flow_refs[2], start, jnp.sum(features * d_features, axis=1))
            if walk.both_ways:
                right_dv, right = read(_load_state(spec, side_refs[1]), "adds_right")
                if flows:
                    tiles.store_steps(flow_refs[3], start, jnp.sum(features * right, axis=1))
                dv, d_features = dv + right_dv, d_features + right
            if "keeps" in refs:
                keep = refs["keeps"][start // block]
                sums = keep * sums[0], keep * sums[1]
            pairs = _pairs(walk, refs, start, block, keys_first=True)  # [C keys, C queries]

            def add_head(head: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                dv, d_features, sums, ends = carry
                q = tiles.load_tile(q_ref, queries, spec.D, head, axis)  # [C, D]
                do = tiles.load_tile(do_ref, queries, spec.V, head, axis)  # [C, V]
                e, inverse = None, jnp.full((block,), spec.scale, jnp.float32)
                if spec.normalize:
                    e = tiles.load_rows(normalizer_refs[0], queries, head)  # [C]
                    inverse = tiles.load_rows(normalizer_refs[1], queries, head)  # [C]
                u = tiles.features_of(spec, q, queries) * inverse[:, None]  # [C, F]
                carried = u
                if "reads" in refs:
                    carried = tiles.scale_rows(u, refs["reads"], start)
                u = tiles.rounded(spec, u)
                dw = tiles.product(spec, v, do, trans_b=True)  # [C keys, C queries]
                if e is not None:
                    dw += e[None, :]
                w = tiles.product(spec, phi_k, u, wide=True, trans_b=True)
                w = pairs.weigh(w)
                dv += _weighted(spec, w, do)
                if flows:
                    m = _later_pairs(w * dw, walk)
                    ends = [ends[0] + jnp.sum(m, axis=0), ends[1] + jnp.sum(m, axis=1)]
                # These are a difference, and where features are all alike nothing averages.
                d_features += tiles.weighted_sum(spec, pairs.weigh(dw), u)
                if not walk.both_ways:
                    dkv, dz = sums
                    carried = tiles.rounded(spec, carried)
                    dkv += tiles.product(spec, do, carried, wide=True, trans_a=True)
                    if e is not None:
                        dz += tiles.row_parts(carried * e[:, None])
                    sums = dkv, dz
                return dv, d_features, sums, ends

            nothing = [jnp.zeros((block,), jnp.float32)] * (2 if flows else 0)
            carry = dv, d_features, sums, nothing
            if group == 1:
                # Not a loop of one turn: loads ahead are those of the loop they stand in.
                dv, d_features, sums, ends = add_head(0, carry)
            else:
                dv, d_features, sums, ends = jax.lax.fori_loop(0, group, add_head, carry)
            for flow_ref, end in zip(flow_refs[:2], ends, strict=False):
                tiles.store_steps(flow_ref, start, end)
            tiles.store_tile(dv_ref, keys, spec.V, dv)
            tiles.store_tile(dk_ref, keys, spec.D, d_features * slopes)
            return sums

        _walk_chunks(walk, chunks, write_chunk, _load_state(spec, side_refs[0]))

    keys = tiles.sequence_block(spec, spec.S, spec.D, lambda p, g, b: (b, g))
    values = tiles.sequence_block(spec, spec.S, spec.V, lambda p, g, b: (b, g))
    per_row = pl.BlockSpec((None, group, spec.T), lambda p, g, b: (b, g, 0))
    per_step = pl.BlockSpec((None, None, walk.steps), lambda p, g, b: (b, g, 0))
    behind = _state_blocks(spec, lambda p, g, b: (b, g, p + 1))
    ahead = _state_blocks(spec, lambda p, g, b: (b, g, p))
    dk, dv, found = tiles.launch(
        kernel,
        "linear_attention_causal_key_gradient",
        grid=(walk.pieces.count, spec.G, spec.B),
        in_specs=[
            tiles.step_blocks(arrays, lambda p, g, b: (b, g)),
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, g, b: (b, g), group),
            keys,
            values,
            tiles.sequence_block(spec, spec.T, spec.V, lambda p, g, b: (b, g), group),
            [behind, ahead][: len(sides)],
            [per_row] * len(normalizer or ()),
        ],
        out_specs=[keys, values, [per_step] * flows],
        out_shape=[
            tiles.sequence_shape(spec, spec.S, spec.G, spec.D),
            tiles.sequence_shape(spec, spec.S, spec.G, spec.V),
            [jax.ShapeDtypeStruct((spec.B, spec.G, walk.steps), jnp.float32)] * flows,
        ],
        warps=config.dkv_warps,
        stages=config.dkv_stages,
    )(
        arrays,
        inputs.q,
        inputs.k,
        inputs.v,
        do,
        [list(side) for side in sides],
        list(normalizer or ()),
    )
    if not flows:
        return dk, dv, []
    of_queries, of_keys, starts, *right = found
    return dk, dv, [of_queries - of_keys, starts, *right]
