"""Nothing is carried: a state is stored for every run of rows, and each program has one tile.

Each program takes a tile of C queries, or of keys, reads the state ahead of its run (and both
ways the one behind it), and goes through those tiles of the run that it sees: so all programs are
alike, small and independent. Against `carried.py` this writes and reads a state for every run; it
pays where a state would fill the registers. Both ways a tile is a whole run. No program holds a
state: one larger than the shared memory is summed in blocks, and multiplied part after part.

Backward, the sums dS and dz over a run's queries are a pass of their own (`states.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import tiles
from ato_jax.ops.linear_attention.triton.bidirectional import normalizer_terms
from ato_jax.ops.linear_attention.triton.pairs import (
    STORED_KEY_GATES,
    STORED_QUERY_GATES,
    Normalizer,
    Pairs,
    QueryGradient,
    add_weighted,
    feature_gradient,
    for_state,
    later_pairs,
    load_cotangent,
    load_state,
    pairs_of,
    read_for_features,
    read_for_gradient,
    read_for_output,
    read_for_values,
    state_blocks,
)
from ato_jax.ops.linear_attention.triton.scan import Edges
from ato_jax.ops.linear_attention.triton.states import RowWeights, piece_states
from ato_jax.ops.linear_attention.triton.tiles import Columns, Config
from ato_jax.ops.linear_attention.triton.walk import Steps, Walk, gates


def over_tiles(first: Any, last: Any, most: int, body: Any, sums: Any) -> Any:
    """The sums after the tiles from `first` up to `last`, of which there are `most` in a run."""
    return body(0, sums) if most == 1 else jax.lax.fori_loop(first, last, body, sums)


def add_up(parts: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


def output(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    steps: Steps,
    sides: list[Edges],
) -> jax.Array:
    block = walk.pieces.block_within(config.output_block)
    in_run = walk.pieces.rows // block
    other = walk.pieces.rows if walk.both_ways else min(config.pair_block, block)
    count = walk.pieces.rows // other
    group = spec.H // spec.G
    arrays = steps.rows | gates(spec, walk, steps, walk.pieces.rows, STORED_QUERY_GATES)

    def kernel(
        refs: dict[str, Any], q_ref: Any, k_ref: Any, v_ref: Any, side_refs: Any, out_ref: Any
    ) -> None:
        tile = walk.with_queries * in_run + tiles.piece_id()
        start, run = tile * block, tile // in_run * walk.pieces.rows
        queries = walk.queries_at(spec, refs, start, block)
        q = tiles.load_tile(q_ref, queries, spec.D)  # [C, D]
        phi_q = tiles.feature_operand(spec, q, queries, wide=True)  # [C, F]

        def map_part(columns: Columns) -> jax.Array:  # phi(q) [C, f]
            q = tiles.load_tile(q_ref, queries, columns)
            return tiles.feature_operand(spec, q, queries, columns, wide=True)

        reading = for_state(spec, phi_q, map_part)
        state = load_state(spec, side_refs[0])
        out, den = read_for_output(spec, refs, "reads", start, reading, state)
        if walk.both_ways:
            state = load_state(spec, side_refs[1])
            right = read_for_output(spec, refs, "reads_right", start, reading, state)
            out, den = out + right[0], None if den is None else den + right[1]

        def add_tile(j: Any, sums: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            out, den = sums
            first = run + j * other
            keys = walk.keys_at(spec, refs, first, other)
            k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
            wide = tiles.wide_features(spec)
            phi_k = tiles.feature_operand(spec, k, keys, wide=wide)
            w = tiles.product(spec, phi_q, phi_k, wide=True, trans_b=True)  # [C, C]
            w = pairs_of(walk, refs, (start, block), (first, other)).weigh(w)
            if den is None:
                return tiles.add_weighted_sum(spec, out, w, v), den
            # Of the rounded weights, so that what rounds them all alike cancels.
            den += jnp.sum(tiles.rounded(spec, w, wide=True), axis=1)
            return out + tiles.product(spec, w, v, wide=True), den

        out, den = over_tiles(0, (start - run + block) // other, count, add_tile, (out, den))
        out *= spec.scale if den is None else (1 / jnp.maximum(den, spec.eps))[:, None]
        tiles.store_tile(out_ref, queries, spec.V, out)

    def at_edge(behind: int) -> Any:
        def index(p: Any, h: Any, b: Any) -> tuple[Any, ...]:
            return b, h // group, walk.with_queries + p // in_run + behind

        return index

    return tiles.launch(
        kernel,
        "linear_attention_causal_output",
        grid=((walk.pieces.count - walk.with_queries) * in_run, spec.H, spec.B),
        in_specs=[
            tiles.step_blocks(arrays, lambda p, h, b: (b, h // group)),
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            tiles.sequence_block(spec, spec.S, spec.D, lambda p, h, b: (b, h // group)),
            tiles.sequence_block(spec, spec.S, spec.V, lambda p, h, b: (b, h // group)),
            [state_blocks(spec, at_edge(n)) for n in range(len(sides))],
        ],
        out_specs=tiles.sequence_block(spec, spec.T, spec.V, lambda p, h, b: (b, h)),
        out_shape=tiles.sequence_shape(spec, spec.T, spec.H, spec.V),
        warps=config.output_warps,
        stages=config.output_stages,
    )(arrays, inputs.q, inputs.k, inputs.v, [[side.kv, side.k_sum] for side in sides])


def query_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    steps: Steps,
    sides: list[Edges],
    do: jax.Array,
) -> QueryGradient:
    block = walk.pieces.block_within(config.dq_block)
    in_run = walk.pieces.rows // block
    other = walk.pieces.rows if walk.both_ways else min(config.pair_block, block)
    count = walk.pieces.rows // other
    group = spec.H // spec.G
    programs = (walk.pieces.count - walk.with_queries) * in_run
    arrays = steps.rows | gates(spec, walk, steps, walk.pieces.rows, STORED_QUERY_GATES)
    matched = isinstance(spec, tiles.MatchedSpec)
    # Per step, for the decay's gradient.
    flows = len(sides) if spec.decay is not None else 0
    own = int("own" in arrays)
    # Beside a strong decay dw_ij + e_i is small where a query all but sees key j alone: so e is
    # then made of the very same float32 w and dw, and only the difference is rounded. Both ways, a
    # second state fills the registers that this takes.
    in_difference = spec.normalize and spec.decay is not None and not walk.both_ways

    def kernel(
        refs: dict[str, Any],
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        do_ref: Any,
        side_refs: Any,
        dq_ref: Any,
        normalizer_refs: Any,
        flow_refs: Any,
    ) -> None:
        tile = walk.with_queries * in_run + tiles.piece_id()
        start, run = tile * block, tile // in_run * walk.pieces.rows
        queries = walk.queries_at(spec, refs, start, block)
        do = tiles.load_tile(do_ref, queries, spec.V)  # [C, V]

        # Of a large state beforehand: else Triton lays out the sums over its rows as q is loaded,
        # not as g is.
        early = tiles.load_tile(q_ref, queries, spec.D) if tiles.in_parts(spec) else None

        def map_queries(anew: bool) -> tuple[jax.Array, jax.Array]:  # phi(q), slopes [C, F]
            q = early
            if q is None:
                q = tiles.load_tile(q_ref, queries, spec.D, anew=anew)  # [C, D]
            q = tiles.as_accumulated(q, tiles.identity(spec, tiles.padded(spec.D)))
            return tiles.features_and_slopes(spec, q, queries)

        reading = for_state(spec, do, lambda columns: tiles.load_tile(do_ref, queries, columns))

        def read_states() -> list[tuple[jax.Array, Any]]:
            """A part of g and of z_i from each state, [C, F]."""
            return [
                read_for_gradient(spec, refs, name, start, reading, load_state(spec, side))
                for name, side in zip(("reads", "reads_right"), side_refs, strict=False)
            ]

        def sums_of(parts: list[Any], phi_q: jax.Array) -> list[list[jax.Array]]:
            """phi(q) . g and phi(q) . z of each state, [C]: what is read but for e and 1 / den."""
            return [
                [jnp.sum(phi_q * tile, axis=1) for tile in part if tile is not None]
                for part in parts
            ]

        def with_keys(j: Any) -> tuple[jax.Array, Pairs, jax.Array]:
            """phi(k) [C, F] of the run's tile j, its pairs with the queries, and do v^T [C, C]."""
            first = run + j * other
            keys = walk.keys_at(spec, refs, first, other)
            k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
            v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
            wide = tiles.wide_features(spec)
            phi_k = tiles.operand(spec, tiles.features_of(spec, k, keys), wide=wide)
            pairs = pairs_of(walk, refs, (start, block), (first, other))
            return phi_k, pairs, tiles.product(spec, do, v, trans_b=True)

        def over_keys(body: Callable[..., Any], sums: Any) -> Any:
            """The sums after `body(with_keys(j), sums)` for each tile of keys that is seen."""

            def add_tile(j: Any, sums: Any) -> Any:
                return body(with_keys(j), sums)

            return over_tiles(0, (start - run + block) // other, count, add_tile, sums)

        def keep_normalizer(e: jax.Array, inverse: jax.Array) -> None:
            tiles.store_rows(normalizer_refs[0], queries, e)
            tiles.store_rows(normalizer_refs[1], queries, inverse)

        e, inverse = None, jnp.full((block,), spec.scale, jnp.float32)
        own_flow: Any = None
        flowing: list[list[jax.Array]] = []
        if in_difference:

            def add_weights(of_keys: tuple[Any, ...], sums: tuple[Any, ...]) -> tuple[Any, ...]:
                phi_k, pairs, dw = of_keys
                den, num_do = sums
                w = tiles.product(spec, phi_q, phi_k, wide=True, trans_b=True)  # [C, C]
                w = pairs.weigh(w)
                return den + jnp.sum(w, axis=1), num_do + jnp.sum(w * dw, axis=1)

            nothing = jnp.zeros((block,), jnp.float32)
            phi_q = tiles.operand(spec, map_queries(anew=False)[0], wide=True)
            den, num_do = over_keys(add_weights, (nothing, nothing))  # [C]
            # What the states add comes after the loop, where it does not fill the registers.
            phi_q = tiles.rounded(spec, map_queries(anew=count > 1)[0], wide=True)
            parts = read_states()
            flowing = sums_of(parts, phi_q)
            num_do += add_up(sums[0] for sums in flowing)
            den += add_up(sums[1] for sums in flowing)
            inverse = 1 / jnp.maximum(den, spec.eps)
            e = jnp.where(den > spec.eps, -inverse * num_do, 0.0)
            own_flow = (num_do + e * den) * inverse
            of_rows = e[:, None]

            def add_difference(of_keys: tuple[Any, ...], g: jax.Array) -> jax.Array:
                phi_k, pairs, dw = of_keys
                # In two parts: of what rounds the weights nothing cancels, as it does in their sum.
                return tiles.add_weighted_sum(spec, g, pairs.weigh(dw + of_rows), phi_k)

            g = add_up(part[0] for part in parts) + of_rows * add_up(part[1] for part in parts)
            d_phi_q = over_keys(add_difference, g) * inverse[:, None]
            _, slopes = map_queries(anew=count > 1)
            keep_normalizer(e, inverse)
        else:

            def add_tile(of_keys: tuple[Any, ...], sums: tuple[Any, ...]) -> tuple[Any, ...]:
                phi_k, pairs, dw = of_keys
                g, z_seen = sums
                dw = pairs.weigh(dw)
                if matched:
                    g = tiles.add_weighted_sum(spec, g, dw, phi_k)
                else:
                    g += tiles.product(spec, dw, phi_k, wide=True)
                wide = tiles.wide_features(spec)
                return g, None if z_seen is None else pairs.add_keys(spec, z_seen, phi_k, wide)

            parts = read_states()
            # Before the loop, through which the parts themselves would fill the registers.
            ahead = flows > 0 and count > 1
            if ahead:
                flowing = sums_of(parts, map_queries(anew=False)[0])
            g = add_up(part[0] for part in parts)
            z_seen = add_up(part[1] for part in parts) if spec.normalize else None
            g, z_seen = over_keys(add_tile, (g, z_seen))
            phi_q, slopes = map_queries(anew=ahead)
            if z_seen is not None:
                e, inverse = normalizer_terms(spec, [phi_q], [g], [z_seen])
                keep_normalizer(e, inverse)
            d_phi_q = feature_gradient(g, z_seen, e, inverse)

        tiles.store_tile(dq_ref, queries, spec.D, d_phi_q * slopes)
        at = tiles.piece_id() * block
        if flows and not flowing:
            flowing = sums_of(parts, phi_q)
        for flow_ref, (flow, *seen) in zip(flow_refs[:flows], flowing, strict=True):
            if e is not None:
                flow += e * seen[0]
            tiles.store_steps(flow_ref, at, flow * inverse)
        if own:
            if own_flow is None:
                own_flow = jnp.sum(phi_q * d_phi_q, axis=1)
            tiles.store_steps(flow_refs[-1], at, own_flow)

    def at_edge(behind: int) -> Any:
        def index(p: Any, h: Any, b: Any) -> tuple[Any, ...]:
            return b, h // group, walk.with_queries + p // in_run + behind

        return index

    per_row = pl.BlockSpec((None, None, spec.T), lambda p, h, b: (b, h, 0))
    row_shape = jax.ShapeDtypeStruct((spec.B, spec.H, spec.T), jnp.float32)
    normalizers = 2 if spec.normalize else 0
    per_step = pl.BlockSpec((None, None, programs * block), lambda p, h, b: (b, h, 0))
    step_shape = jax.ShapeDtypeStruct((spec.B, spec.H, programs * block), jnp.float32)
    dq, normalizer, found = tiles.launch(
        kernel,
        "linear_attention_causal_query_gradient",
        grid=(programs, spec.H, spec.B),
        in_specs=[
            tiles.step_blocks(arrays, lambda p, h, b: (b, h // group)),
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            tiles.sequence_block(spec, spec.S, spec.D, lambda p, h, b: (b, h // group)),
            tiles.sequence_block(spec, spec.S, spec.V, lambda p, h, b: (b, h // group)),
            tiles.sequence_block(spec, spec.T, spec.V, lambda p, h, b: (b, h)),
            [state_blocks(spec, at_edge(n)) for n in range(len(sides))],
        ],
        out_specs=[
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, h, b: (b, h)),
            [per_row] * normalizers,
            [per_step] * (flows + own),
        ],
        out_shape=[
            tiles.gradient_shape(spec, spec.T, spec.H, spec.D),
            [row_shape] * normalizers,
            [step_shape] * (flows + own),
        ],
        warps=config.dq_warps,
        stages=config.dq_stages,
    )(arrays, inputs.q, inputs.k, inputs.v, do, [[side.kv, side.k_sum] for side in sides])
    normalizer = Normalizer(*normalizer) if normalizer else None
    return QueryGradient(
        dq,
        _query_sums(spec, config, inputs.q, do, walk, steps, normalizer),
        normalizer,
        found[:flows],
        found[-1] if own else None,
    )


def _query_sums(
    spec: LinearAttentionSpec,
    config: Config,
    q: jax.Array,
    do: jax.Array,
    walk: Walk,
    steps: Steps,
    normalizer: Normalizer | None,
) -> list[tuple[jax.Array, jax.Array]]:
    """dS^T and dz of each run with queries, [B, H, runs, V, F] and [B, H, runs, F]."""
    of_runs = gates(spec, walk, steps, walk.pieces.rows, ("reads", "reads_right"))
    weights = RowWeights(spec.scale, None) if normalizer is None else RowWeights(*normalizer[::-1])
    found = []
    for name in ("reads", "reads_right")[: 1 + walk.both_ways]:
        arrays = dict(steps.rows)
        if name in of_runs:
            arrays["adds"] = of_runs[name]
        found.append(
            piece_states(
                spec,
                config,
                q,
                do,
                walk.pieces,
                lambda refs, first, block: walk.queries_at(spec, refs, first, block),
                arrays,
                weights=weights,
                first_piece=walk.with_queries,
                dtype=walk.state_dtype,
            )
        )
    return found


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
    """dk and dv, summed over the query heads of each kv head; and for the decay's gradient.

    These are of each step, [B, G, steps]: what counts for decays up to its own, for later ones,
    and what its key's part in the right state counts for the former. A matched call has one array
    instead, [B, G, tiles, F]: over the keys of a tile, the sum of phi(k) times what the sums over
    later runs' queries add to its gradient.
    """
    block = walk.pieces.block_within(config.dkv_block)
    in_run = walk.pieces.rows // block
    other = walk.pieces.rows if walk.both_ways else min(config.pair_block, block)
    count = walk.pieces.rows // other
    group = spec.H // spec.G
    axis = tiles.heads_axis(spec)
    matched = isinstance(spec, tiles.MatchedSpec)
    arrays = steps.rows | gates(spec, walk, steps, walk.pieces.rows, STORED_KEY_GATES)
    flows = 0 if spec.decay is None else 2 + len(sides)
    # Rounded after it is scaled by a number that is no power of 2, phi(q) would be off by as much
    # in all of a query's pairs, and so in the decay's gradient.
    scaled_later = matched or flows > 0 and not spec.normalize

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
        of_queries_ref: Any,
        flow_refs: Any,
    ) -> None:
        tile = tiles.piece_id()
        start, run = tile * block, tile // in_run * walk.pieces.rows
        keys = walk.keys_at(spec, refs, start, block)
        k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
        v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
        features = tiles.features_of(spec, k, keys)  # [C, F]
        phi_k = tiles.feature_operand(spec, k, keys, wide=True)

        def map_part(columns: Columns) -> jax.Array:  # phi(k) [C, f]
            k = tiles.load_tile(k_ref, keys, columns)
            return tiles.feature_operand(spec, k, keys, columns, wide=True)

        adding_k = for_state(spec, phi_k, map_part)
        adding_v = for_state(spec, v, lambda columns: tiles.load_tile(v_ref, keys, columns))
        dvs, parts = [], []
        for name, side in zip(("adds", "adds_right"), side_refs, strict=False):
            cotangent = load_cotangent(spec, side)
            dvs.append(read_for_values(spec, refs, name, start, adding_k, cotangent))
            parts.append(read_for_features(spec, refs, name, start, adding_v, cotangent))
        if matched:
            tiles.store_vector(flow_refs[0], spec.F, jnp.sum(features * parts[0], axis=0))
        for flow_ref, part in zip(flow_refs[1:], parts, strict=False):
            tiles.store_steps(flow_ref, start, jnp.sum(features * part, axis=1))

        def add_tile(i: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            first = run + i * other
            queries = walk.queries_at(spec, refs, first, other)
            pairs = pairs_of(walk, refs, (first, other), (start, block), keys_first=True)

            def add_head(head: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
                dv, d_features, of_keys, of_queries = sums
                q = tiles.load_tile(q_ref, queries, spec.D, head, axis)  # [C, D]
                do = tiles.load_tile(do_ref, queries, spec.V, head, axis)  # [C, V]
                e, inverse = None, jnp.full((other,), spec.scale, jnp.float32)
                if spec.normalize:
                    e = tiles.load_rows(normalizer_refs[0], queries, head)  # [C]
                    inverse = tiles.load_rows(normalizer_refs[1], queries, head)  # [C]
                if scaled_later:
                    u = tiles.feature_operand(spec, q, queries, wide=True)  # [C, F]
                else:
                    u = tiles.features_of(spec, q, queries) * inverse[:, None]  # [C, F]
                    u = tiles.rounded(spec, u, wide=True)
                w = pairs.weigh(tiles.product(spec, phi_k, u, wide=True, trans_b=True))
                if scaled_later:
                    w *= inverse[None, :]
                dv = add_weighted(spec, dv, w, do)
                dw = tiles.product(spec, v, do, trans_b=True)  # [keys, queries]
                if e is not None:
                    dw += e[None, :]
                if flows:
                    m = later_pairs(w * dw, walk, start - first)
                    of_keys += jnp.sum(m, axis=1)
                    of_queries += jnp.sum(m, axis=0)
                if scaled_later:
                    dw *= inverse[None, :]
                # These are a difference, and where features are all alike nothing averages.
                d_features = tiles.add_weighted_sum(spec, d_features, pairs.weigh(dw), u)
                return dv, d_features, of_keys, of_queries

            of_queries = jnp.zeros((other,), jnp.float32) if flows else None
            *sums, of_queries = over_tiles(0, group, group, add_head, (*sums, of_queries))
            if flows:
                tiles.store_steps(of_queries_ref, first, of_queries)
            return tuple(sums)

        of_keys = jnp.zeros((block,), jnp.float32) if flows else None
        first_sums = add_up(dvs), add_up(parts), of_keys
        dv, d_features, of_keys = over_tiles(
            (start - run) // other, count, count, add_tile, first_sums
        )
        if flows:
            tiles.store_steps(flow_refs[0], start, of_keys)
        tiles.store_tile(dv_ref, keys, spec.V, dv)
        # Once more, where the registers are free again.
        k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
        _, slopes = tiles.features_and_slopes(spec, k, keys)  # [C, F]
        tiles.store_tile(dk_ref, keys, spec.D, d_features * slopes)

    def at_edge(behind: int) -> Any:
        return lambda p, g, b: (b, g, p // in_run + behind)

    keys = tiles.sequence_block(spec, spec.S, spec.D, lambda p, g, b: (b, g))
    values = tiles.sequence_block(spec, spec.S, spec.V, lambda p, g, b: (b, g))
    per_row = pl.BlockSpec((None, group, spec.T), lambda p, g, b: (b, g, 0))
    per_step = pl.BlockSpec((None, None, walk.steps), lambda p, g, b: (b, g, 0))
    flow_specs = [per_step] * flows
    flow_shapes = [jax.ShapeDtypeStruct((spec.B, spec.G, walk.steps), jnp.float32)] * flows
    if matched:
        shape = (spec.B, spec.G, walk.pieces.count * in_run, spec.F)
        flow_specs = [pl.BlockSpec((None, None, None, spec.F), lambda p, g, b: (b, g, p, 0))]
        flow_shapes = [jax.ShapeDtypeStruct(shape, jnp.float32)]
    # What a query's pairs add up to has a part from each tile of keys that it sees.
    per_part = pl.BlockSpec((None, None, None, walk.steps), lambda p, g, b: (b, g, p % in_run, 0))
    part_shape = jax.ShapeDtypeStruct((spec.B, spec.G, in_run, walk.steps), jnp.float32)
    dk, dv, of_queries, found = tiles.launch(
        kernel,
        "linear_attention_causal_key_gradient",
        grid=(walk.pieces.count * in_run, spec.G, spec.B),
        in_specs=[
            tiles.step_blocks(arrays, lambda p, g, b: (b, g)),
            tiles.sequence_block(spec, spec.T, spec.D, lambda p, g, b: (b, g), group),
            keys,
            values,
            tiles.sequence_block(spec, spec.T, spec.V, lambda p, g, b: (b, g), group),
            [state_blocks(spec, at_edge(1 - n)) for n in range(len(sides))],
            [per_row] * len(normalizer or ()),
        ],
        out_specs=[keys, values, per_part if flows else None, flow_specs],
        out_shape=[
            tiles.gradient_shape(spec, spec.S, spec.G, spec.D),
            tiles.sequence_shape(spec, spec.S, spec.G, spec.V),
            part_shape if flows else None,
            flow_shapes,
        ],
        warps=config.dkv_warps,
        stages=config.dkv_stages,
    )(
        arrays,
        inputs.q,
        inputs.k,
        inputs.v,
        do,
        [[side.kv, side.k_sum] for side in sides],
        list(normalizer or ()),
    )
    if not flows:
        return dk, dv, found
    if not walk.both_ways:
        # Programs leave out the queries before their keys.
        step, first = np.arange(walk.steps) % walk.pieces.rows, np.arange(in_run)[:, None] * block
        of_queries = jnp.where(step >= first, of_queries, 0.0)
    of_keys, *edges = found
    return dk, dv, [jnp.sum(of_queries, axis=2) - of_keys, *edges]
