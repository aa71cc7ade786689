"""dk and dv of a run of keys, tile by tile (`causal.py` has the mathematics).

For the decay's gradient (`steps.py`) a tile of keys also finds, with M[i, j] = w_ij dw_ij what each
pair adds by its own exponent, the sums over its keys and over the queries that they meet, of the
pairs whose query is the later one.

Where queries and keys have steps of their own, a pair without a key's step in between has no decay.
It is left out: in float32 sums its weight of 1 leaves more rounding than steep decays leave weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import mapping, products, sequences
from ato_jax.ops.linear_attention.triton.calls import MatchedSpec
from ato_jax.ops.linear_attention.triton.config import Config
from ato_jax.ops.linear_attention.triton.gradients import Normalizer
from ato_jax.ops.linear_attention.triton.pairs import (
    STORED_KEY_GATES,
    Pairs,
    add_weighted,
    later_pairs,
    pairs_of,
)
from ato_jax.ops.linear_attention.triton.reads import (
    for_state,
    load_cotangent,
    read_for_features,
    read_for_values,
)
from ato_jax.ops.linear_attention.triton.scan import Edges
from ato_jax.ops.linear_attention.triton.steps import Steps, gates
from ato_jax.ops.linear_attention.triton.stored.tiling import (
    Tiling,
    add_up,
    over_tiles,
    sides_of_keys,
    tiling,
)
from ato_jax.ops.linear_attention.triton.walk import Walk
from ato_jax.triton import tiles
from ato_jax.triton.launch import launch, piece_id
from ato_jax.triton.tiles import Columns, Rows


class Sums(NamedTuple):
    """The sums of a tile of keys over queries."""

    dv: jax.Array  # [C, V]
    d_features: jax.Array  # [C, F]
    of_keys: jax.Array | None  # [C], the later pairs of each key
    of_queries: jax.Array | None = None  # [C], and of each query, of one tile of queries


class Queries(NamedTuple):
    """The refs of q and do [.., group, ..], and of e and 1 / den [group, T] where there are any."""

    q: Any
    do: Any
    normalizer: Any


def _add_query_head(
    spec: LinearAttentionSpec,
    walk: Walk,
    refs: Queries,
    head: Any,
    queries: Rows,
    keys: tuple[jax.Array, jax.Array],
    pairs: Pairs,
    firsts: tuple[Any, Any],
    decayed: jax.Array | None,
    sums: Sums,
) -> Sums:
    """The sums and what the queries of one head add.

    Args:
      keys: phi(k) [C, F] and v [C, V].
      firsts: the steps of the first key and of the first query.
      decayed: which pairs have a key's step in between, [keys, queries]; None if all do.
    """
    phi_k, v = keys
    flows = sums.of_keys is not None
    # Scaled by a number that is no power of 2 and then rounded, phi(q) would have the same error in
    # all of a query's pairs, and so would the decay's gradient.
    scaled_later = isinstance(spec, MatchedSpec) or flows and not spec.normalize
    q = tiles.load_tile(refs.q, queries, spec.D, head, sequences.heads_axis(spec))  # [C, D]
    do = tiles.load_tile(refs.do, queries, spec.V, head, sequences.heads_axis(spec))  # [C, V]
    e, inverse = None, jnp.full((len(q),), spec.scale, jnp.float32)
    if spec.normalize:
        e = tiles.load_rows(refs.normalizer[0], queries, head)  # [C]
        inverse = tiles.load_rows(refs.normalizer[1], queries, head)  # [C]
    if scaled_later:
        u = mapping.feature_operand(spec, q, queries, wide=True)  # [C, F]
    else:
        u = mapping.features_of(spec, q, queries) * inverse[:, None]  # [C, F]
        u = products.rounded(spec, u, wide=True)
    w = pairs.weigh(products.product(spec, phi_k, u, wide=True, trans_b=True))  # [keys, queries]
    if scaled_later:
        w *= inverse[None, :]
    dv = add_weighted(spec, sums.dv, w, do)
    dw = products.product(spec, v, do, trans_b=True)  # [keys, queries]
    if e is not None:
        dw += e[None, :]
    of_keys, of_queries = sums.of_keys, sums.of_queries
    if of_keys is not None and of_queries is not None:
        m = later_pairs(w * dw, walk, firsts[0] - firsts[1])
        m = m if decayed is None else jnp.where(decayed, m, 0.0)
        of_keys += jnp.sum(m, axis=1)
        of_queries += jnp.sum(m, axis=0)
    if scaled_later:
        dw *= inverse[None, :]
    # dw is a difference, and where features are all alike its roundings do not average out.
    d_features = products.add_weighted_sum(spec, sums.d_features, pairs.weigh(dw), u)
    return Sums(dv, d_features, of_keys, of_queries)


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
    """dk and dv, summed over the query heads of each key/value head; and for the decay's gradient,
    of each step, [B, G, steps]: what counts for decays up to its own, what for later ones, and what
    its key's part in the right state counts for the former.

    A matched call has one array instead, [B, G, tiles, F]: over the keys of a tile, the sum of
    phi(k) times what the sums over later runs' queries add to its gradient.
    """
    cut = tiling(walk, config, config.dkv_block)
    group = spec.H // spec.G
    matched = isinstance(spec, MatchedSpec)
    arrays = steps.rows | gates(spec, walk, steps, walk.pieces.rows, STORED_KEY_GATES)
    flows = 0 if spec.decay is None else 2 + len(sides)
    if flows and spec.segments == "cross":
        key = steps.rows["key"]
        arrays["keys_so_far"] = jnp.cumsum((key >= 0) & (key < spec.S), axis=1, dtype=jnp.int32)

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
        start, run = cut.place(piece_id())
        keys = walk.keys_at(spec, refs, start, cut.block)
        k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
        v = tiles.load_tile(v_ref, keys, spec.V)  # [C, V]
        features = mapping.features_of(spec, k, keys)  # [C, F]
        phi_k = mapping.feature_operand(spec, k, keys, wide=True)  # [C, F]

        def map_part(columns: Columns) -> jax.Array:  # phi(k) [C, f]
            k = tiles.load_tile(k_ref, keys, columns)  # [C, f]
            return mapping.feature_operand(spec, k, keys, columns, wide=True)

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

        def add_tile(i: Any, sums: Sums) -> Sums:
            first = run + i * cut.other
            queries = walk.queries_at(spec, refs, first, cut.other)
            at = (first, cut.other), (start, cut.block)
            pairs = pairs_of(walk, refs, *at, keys_first=True)
            of_group = Queries(q_ref, do_ref, normalizer_refs)
            decayed = None
            if "keys_so_far" in refs:
                at_query, at_key = (tiles.load_steps(refs["keys_so_far"], *side) for side in at)
                decayed = at_query[None, :] != at_key[:, None]

            def add_head(head: Any, sums: Sums) -> Sums:
                of_keys, firsts = (phi_k, v), (start, first)
                return _add_query_head(
                    spec, walk, of_group, head, queries, of_keys, pairs, firsts, decayed, sums
                )

            of_queries = jnp.zeros((cut.other,), jnp.float32) if flows else None
            sums = over_tiles(0, group, group, add_head, sums._replace(of_queries=of_queries))
            if sums.of_queries is not None:
                tiles.store_steps(of_queries_ref, first, sums.of_queries)
            return sums._replace(of_queries=None)

        of_keys = jnp.zeros((cut.block,), jnp.float32) if flows else None
        sums = Sums(add_up(dvs), add_up(parts), of_keys)
        sums = over_tiles((start - run) // cut.other, cut.others, cut.others, add_tile, sums)
        if sums.of_keys is not None:
            tiles.store_steps(flow_refs[0], start, sums.of_keys)
        tiles.store_tile(dv_ref, keys, spec.V, sums.dv)
        # k is loaded once more, where the registers are free again.
        k = tiles.load_tile(k_ref, keys, spec.D)  # [C, D]
        _, slopes = mapping.features_and_slopes(spec, k, keys)  # [C, F]
        tiles.store_tile(dk_ref, keys, spec.D, sums.d_features * slopes)

    own_head = sequences.own_head
    keys = sequences.sequence_block(spec, spec.S, spec.D, own_head)
    values = sequences.sequence_block(spec, spec.S, spec.V, own_head)
    per_row = sequences.group_row_vectors(spec)
    flow_specs, flow_shapes = _flow_arrays(spec, walk, cut, flows)
    # A query's pairs are summed in parts, one from each tile of keys that it sees.
    per_part = pl.BlockSpec(
        (None, None, None, walk.steps), lambda p, g, b: (b, g, p % cut.in_run, 0)
    )
    part_shape = jax.ShapeDtypeStruct((spec.B, spec.G, cut.in_run, walk.steps), jnp.float32)
    dk, dv, of_queries, found = launch(
        kernel,
        "linear_attention_causal_key_gradient",
        grid=(walk.pieces.count * cut.in_run, spec.G, spec.B),
        in_specs=[
            sequences.step_blocks(arrays, own_head),
            sequences.sequence_block(spec, spec.T, spec.D, own_head, group),
            keys,
            values,
            sequences.sequence_block(spec, spec.T, spec.V, own_head, group),
            sides_of_keys(spec, cut, sides),
            [per_row] * len(normalizer or ()),
        ],
        out_specs=[keys, values, per_part if flows else None, flow_specs],
        out_shape=[
            sequences.gradient_shape(spec, spec.S, spec.G, spec.D),
            sequences.sequence_shape(spec, spec.S, spec.G, spec.V),
            part_shape if flows else None,
            flow_shapes,
        ],
        warps=config.dkv_warps,
        stages=config.dkv_stages,
    )(
        *(arrays, inputs.q, inputs.k, inputs.v, do),
        [[side.kv, side.k_sum] for side in sides],
        list(normalizer or ()),
    )
    if not flows:
        return dk, dv, found
    return dk, dv, _joined_flows(walk, cut, of_queries, found)


def _flow_arrays(
    spec: LinearAttentionSpec, walk: Walk, cut: Tiling, flows: int
) -> tuple[list[pl.BlockSpec], list[jax.ShapeDtypeStruct]]:
    """The arrays that the kernel writes for the decay's gradient, except the sums of each query."""
    if isinstance(spec, MatchedSpec):
        shape = (spec.B, spec.G, walk.pieces.count * cut.in_run, spec.F)
        block = pl.BlockSpec((None, None, None, spec.F), lambda p, g, b: (b, g, p, 0))
        return [block], [jax.ShapeDtypeStruct(shape, jnp.float32)]
    block = pl.BlockSpec((None, None, walk.steps), lambda p, g, b: (b, g, 0))
    steps = jax.ShapeDtypeStruct((spec.B, spec.G, walk.steps), jnp.float32)
    return [block] * flows, [steps] * flows


def _joined_flows(
    walk: Walk, cut: Tiling, of_queries: jax.Array, found: list[jax.Array]
) -> list[jax.Array]:
    """The later pairs of each query less those of each key, and what the edges' flows are."""
    if not walk.both_ways:
        # Programs leave out the queries before their keys.
        step = np.arange(walk.steps) % walk.pieces.rows
        first = np.arange(cut.in_run)[:, None] * cut.block
        of_queries = jnp.where(step >= first, of_queries, 0.0)
    of_keys, *edges = found
    return [jnp.sum(of_queries, axis=2) - of_keys, *edges]
