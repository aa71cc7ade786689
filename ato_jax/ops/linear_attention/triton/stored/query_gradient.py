"""dq of a run of queries, tile by tile (`causal.py` has the mathematics).

A tile reads y_i and z_i from its states and adds those of its run's keys. There are two orders.
`_by_sums` goes through the keys once, sums up both, and takes the difference y_i + e_i z_i last.
`_by_difference` goes through them twice: first for e_i, then for the sum of dw_ij + e_i. Beside a
strong decay dw_ij + e_i is small where a query all but sees key j alone. So e is then made of the
very same float32 w and dw, and only the difference is rounded. Both ways, a second state fills the
registers that this takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import mapping, powers, products, sequences
from ato_jax.ops.linear_attention.triton.calls import MatchedSpec, in_parts
from ato_jax.ops.linear_attention.triton.config import Config
from ato_jax.ops.linear_attention.triton.gradients import (
    Normalizer,
    QueryGradient,
    feature_gradient,
    normalizer_terms,
)
from ato_jax.ops.linear_attention.triton.pairs import STORED_QUERY_GATES, Pairs, pairs_of
from ato_jax.ops.linear_attention.triton.reads import for_state, load_state, read_for_gradient
from ato_jax.ops.linear_attention.triton.scan import Edges
from ato_jax.ops.linear_attention.triton.states import RowWeights, piece_states
from ato_jax.ops.linear_attention.triton.steps import Steps, gates
from ato_jax.ops.linear_attention.triton.stored.tiling import (
    Tiling,
    add_up,
    over_tiles,
    sides_of_queries,
    tiling,
)
from ato_jax.ops.linear_attention.triton.walk import Walk
from ato_jax.triton import tiles
from ato_jax.triton.launch import launch, piece_id
from ato_jax.triton.tiles import Columns, Rows

# A part of y and of z_i from each state, [C, F].
Parts = list[tuple[jax.Array, Any]]
# phi(k) [C, F] of a tile of keys, multiplied by the head's power (`powers.py`) where it has one;
# its pairs with the queries, and do v^T [C, C].
OfKeys = tuple[jax.Array, Pairs, jax.Array]


@dataclasses.dataclass(frozen=True)
class QueryTile:
    """A program's tile of queries, and the keys of its run."""

    spec: LinearAttentionSpec
    walk: Walk
    cut: Tiling
    refs: dict[str, Any]
    qkv_refs: tuple[Any, Any, Any]
    side_refs: Any
    place: tuple[Any, Any]  # the first steps of the tile and of its run
    queries: Rows
    do: jax.Array  # [C, V]
    load_do: Callable[[Columns], jax.Array]  # some columns of it
    # q [C, D], beside a large state. Loaded later, Triton would lay out the sums over its rows as q
    # is loaded, not as y is.
    early: jax.Array | None

    @property
    def power(self) -> Any:
        return powers.of_head(self.refs)

    def map_queries(self, anew: bool) -> tuple[jax.Array, jax.Array]:
        """phi(q) and phi'(q), [C, F]."""
        spec, q = self.spec, self.early
        if q is None:
            q = tiles.load_tile(self.qkv_refs[0], self.queries, spec.D, anew=anew)  # [C, D]
        q = products.as_accumulated(q, products.identity(spec, tiles.padded(spec.D)))
        return mapping.features_and_slopes(spec, q, self.queries)

    def read_states(self) -> Parts:
        spec, reading = self.spec, for_state(self.spec, self.do, self.load_do)
        return [
            read_for_gradient(
                spec, self.refs, name, self.place[0], reading, load_state(spec, side)
            )
            for name, side in zip(("reads", "reads_right"), self.side_refs, strict=False)
        ]

    def with_keys(self, j: Any) -> OfKeys:
        """The run's tile j of keys."""
        spec, (start, run), other = self.spec, self.place, self.cut.other
        first = run + j * other
        keys = self.walk.keys_at(spec, self.refs, first, other)
        k = tiles.load_tile(self.qkv_refs[1], keys, spec.D)  # [C, D]
        v = tiles.load_tile(self.qkv_refs[2], keys, spec.V)  # [C, V]
        wide = mapping.wide_features(spec)
        phi_k = powers.times(self.power, mapping.features_of(spec, k, keys))
        phi_k = products.operand(spec, phi_k, wide=wide)
        pairs = pairs_of(self.walk, self.refs, (start, self.cut.block), (first, other))
        return phi_k, pairs, products.product(spec, self.do, v, trans_b=True)

    def over_keys(self, body: Callable[[OfKeys, Any], Any], sums: Any) -> Any:
        """The sums after `body(with_keys(j), sums)` for each tile of keys that is seen."""
        start, run = self.place

        def add_tile(j: Any, sums: Any) -> Any:
            return body(self.with_keys(j), sums)

        last = (start - run + self.cut.block) // self.cut.other
        return over_tiles(0, last, self.cut.others, add_tile, sums)


def _flows_of(parts: Parts, phi_q: jax.Array) -> list[list[jax.Array]]:
    """phi(q) . y and phi(q) . z of each state, [C]: what is read, without e and 1 / den."""
    return [
        [jnp.sum(phi_q * tile, axis=1) for tile in part if tile is not None] for part in parts
    ]


class Found(NamedTuple):
    phi_q: jax.Array  # [C, F]
    slopes: jax.Array  # phi'(q), [C, F]
    d_phi_q: jax.Array  # [C, F]
    parts: Parts
    e: jax.Array | None  # [C]
    inverse: jax.Array  # [C]
    # For the decay's gradient: what is read from each state, if it is known yet, and in all.
    flows: list[list[jax.Array]]
    own: jax.Array | None = None


# Stores e and 1 / den of the tile.
Keep = Callable[[jax.Array, jax.Array], None]


def _by_difference(tile: QueryTile, keep: Keep) -> Found:
    spec, several = tile.spec, tile.cut.others > 1

    def add_weights(of_keys: OfKeys, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        phi_k, pairs, dw = of_keys
        den, num_do = sums
        w = products.product(spec, phi_q, phi_k, wide=True, trans_b=True)  # [C, C]
        w = pairs.weigh(w)
        return den + jnp.sum(w, axis=1), num_do + jnp.sum(w * dw, axis=1)

    nothing = jnp.zeros((tile.cut.block,), jnp.float32)
    phi_q = powers.over(tile.power, tile.map_queries(anew=False)[0])
    phi_q = products.operand(spec, phi_q, wide=True)
    den, num_do = tile.over_keys(add_weights, (nothing, nothing))  # [C]
    # The states' part comes after the loop, where it does not fill the registers.
    phi_q = products.rounded(spec, tile.map_queries(anew=several)[0], wide=True)
    parts = tile.read_states()
    flows = _flows_of(parts, phi_q)
    num_do += add_up(sums[0] for sums in flows)
    den += add_up(sums[1] for sums in flows)
    inverse = 1 / jnp.maximum(den, spec.eps)
    e = jnp.where(den > spec.eps, -inverse * num_do, 0.0)
    own = (num_do + e * den) * inverse
    of_rows = e[:, None]

    def add_difference(of_keys: OfKeys, y: jax.Array) -> jax.Array:
        phi_k, pairs, dw = of_keys
        # In two parts, because the roundings of these weights do not cancel.
        return products.add_weighted_sum(spec, y, pairs.weigh(dw + of_rows), phi_k)

    y = add_up(part[0] for part in parts) + of_rows * add_up(part[1] for part in parts)
    y = tile.over_keys(add_difference, powers.times(tile.power, y))
    d_phi_q = y * powers.over(tile.power, inverse)[:, None]
    _, slopes = tile.map_queries(anew=several)
    keep(e, inverse)
    return Found(phi_q, slopes, d_phi_q, parts, e, inverse, flows, own)


def _by_sums(tile: QueryTile, keep: Keep, with_flows: bool) -> Found:
    spec = tile.spec
    matched = isinstance(spec, MatchedSpec)
    e, inverse = None, jnp.full((tile.cut.block,), spec.scale, jnp.float32)

    def add_tile(of_keys: OfKeys, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        phi_k, pairs, dw = of_keys
        y, z_seen = sums
        dw = pairs.weigh(dw)
        if matched or products.of_initial_sums(spec):
            y = products.add_weighted_sum(spec, y, dw, phi_k)
        else:
            y += products.product(spec, dw, phi_k, wide=True)
        wide = mapping.wide_features(spec)
        return y, None if z_seen is None else pairs.add_keys(spec, z_seen, phi_k, wide)

    parts = tile.read_states()
    # Before the loop, through which the parts themselves would fill the registers.
    ahead = with_flows and tile.cut.others > 1
    flows = _flows_of(parts, tile.map_queries(anew=False)[0]) if ahead else []
    y = add_up(part[0] for part in parts)
    z_seen = add_up(part[1] for part in parts) if spec.normalize else None
    y, z_seen = tile.over_keys(add_tile, powers.times(tile.power, (y, z_seen)))
    phi_q, slopes = tile.map_queries(anew=ahead)
    if z_seen is not None:
        e, inverse = normalizer_terms(spec, [powers.over(tile.power, phi_q)], [y], [z_seen])
        keep(e, inverse)
    d_phi_q = feature_gradient(y, z_seen, e, powers.over(tile.power, inverse))
    return Found(phi_q, slopes, d_phi_q, parts, e, inverse, flows)


def query_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    walk: Walk,
    steps: Steps,
    sides: list[Edges],
    do: jax.Array,
) -> QueryGradient:
    cut = tiling(walk, config, config.dq_block)
    programs = (walk.pieces.count - walk.with_queries) * cut.in_run
    arrays = steps.rows | steps.powers
    arrays |= gates(spec, walk, steps, walk.pieces.rows, STORED_QUERY_GATES)
    # Per step, for the decay's gradient.
    flows = len(sides) if spec.decay is not None else 0
    own = int("own" in arrays)
    by_difference = spec.normalize and spec.decay is not None and not walk.both_ways

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
        place = cut.place(walk.with_queries * cut.in_run + piece_id())
        queries = walk.queries_at(spec, refs, place[0], cut.block)
        do = tiles.load_tile(do_ref, queries, spec.V)  # [C, V]
        early = tiles.load_tile(q_ref, queries, spec.D) if in_parts(spec) else None  # [C, D]
        tile = QueryTile(
            spec,
            walk,
            cut,
            refs,
            (q_ref, k_ref, v_ref),
            side_refs,
            place,
            queries,
            do,
            lambda columns: tiles.load_tile(do_ref, queries, columns),
            early,
        )

        def keep(e: jax.Array, inverse: jax.Array) -> None:
            tiles.store_rows(normalizer_refs[0], queries, e)
            tiles.store_rows(normalizer_refs[1], queries, inverse)

        found = _by_difference(tile, keep) if by_difference else _by_sums(tile, keep, flows > 0)
        tiles.store_tile(dq_ref, queries, spec.D, found.d_phi_q * found.slopes)
        at = piece_id() * cut.block
        read = found.flows
        if flows and not read:
            read = _flows_of(found.parts, found.phi_q)
        for flow_ref, (flow, *seen) in zip(flow_refs[:flows], read, strict=True):
            if found.e is not None:
                flow += found.e * seen[0]
            tiles.store_steps(flow_ref, at, flow * found.inverse)
        if own:
            own_flow = found.own
            if own_flow is None:
                own_flow = jnp.sum(found.phi_q * found.d_phi_q, axis=1)
            tiles.store_steps(flow_refs[-1], at, own_flow)

    queries = sequences.sequence_block(spec, spec.T, spec.D, sequences.own_head)
    per_row, row_shape = sequences.row_vectors(spec)
    normalizers = 2 if spec.normalize else 0
    per_step = pl.BlockSpec((None, None, programs * cut.block), lambda p, h, b: (b, h, 0))
    step_shape = jax.ShapeDtypeStruct((spec.B, spec.H, programs * cut.block), jnp.float32)
    dq, normalizer, found = launch(
        kernel,
        "linear_attention_causal_query_gradient",
        grid=(programs, spec.H, spec.B),
        in_specs=[
            sequences.step_blocks(arrays, sequences.head_of_group(spec)),
            *sequences.query_blocks(spec),
            sequences.sequence_block(spec, spec.T, spec.V, sequences.own_head),
            sides_of_queries(spec, walk, cut, sides),
        ],
        out_specs=[queries, [per_row] * normalizers, [per_step] * (flows + own)],
        out_shape=[
            sequences.gradient_shape(spec, spec.T, spec.H, spec.D),
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
