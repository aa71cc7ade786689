"""Both passes of causal calls, heads of up to 128 columns: `keep` forward, `backward` backward.

The backend (`__init__.py`) calls them. A sequence is cut into the fewest pieces that fill the card
(`causal_pieces.py`). The kernels, in the order in which they run, with XLA's scans between them:

    sums.py              the sums over each piece's keys; `scans/edges.py` adds them up to the state
                         ahead of each piece
    output.py            walks each piece from its start, with the state in registers; writes out
    query_gradient.py    is such a walk, too, and writes dq
    query_sums.py        the sums over each piece's queries
    key_gradient.py      walks each piece from its end and writes dk and dv

Read `output.py` next. A decay per head or step is passed as prefix sums of its log2
(`scans/gates.py`); its gradient follows from sums that both gradient walks write
(`scans/flows.py`). A decay per channel has kernels of its own, which this module launches, too
(`channel.py`, `channel_backward.py`). Wide heads are in `wide_heads.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.ops.linear_attention.alignment import runs_of_keys
from ato_jax.ops.linear_attention.eight_bits import Float8Inputs
from ato_jax.ops.linear_attention.mosaic_gpu import (
    causal_pieces,
    channel,
    channel_backward,
    channel_blocks,
    channel_powers,
    frame,
    narrow,
    powers,
    query_gradient_storage,
)
from ato_jax.ops.linear_attention.mosaic_gpu.channel_output import channel_output
from ato_jax.ops.linear_attention.mosaic_gpu.channel_sums import channel_sums
from ato_jax.ops.linear_attention.mosaic_gpu.float8_sums import float8_sums
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config
from ato_jax.ops.linear_attention.mosaic_gpu.key_gradient import key_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.key_gradient_storage import Arrays, keeps_start
from ato_jax.ops.linear_attention.mosaic_gpu.output import Later, output, output_of_eight_bits
from ato_jax.ops.linear_attention.mosaic_gpu.output_eight_bits import split_scale
from ato_jax.ops.linear_attention.mosaic_gpu.query_gradient import query_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.query_sums import query_sums, units_of_chunks
from ato_jax.ops.linear_attention.mosaic_gpu.sums import sums
from ato_jax.ops.linear_attention.mosaic_gpu.two_parts import splits_states
from ato_jax.ops.linear_attention.scans import flow_places, flows
from ato_jax.ops.linear_attention.scans.borders import NO_BORDERS, OfSequence, of_sequence
from ato_jax.ops.linear_attention.scans.chunks import most_lost_of_turn
from ato_jax.ops.linear_attention.scans.edges import Edges, at_edges, join_pieces
from ato_jax.ops.linear_attention.scans.gates import OfPieces, of_pieces
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)

State = tuple[jax.Array, jax.Array]
# Computes the gradients by another backend.
Fallback = Callable[[LinearAttentionSpec, Residuals, Outputs], Inputs]


class Kept(NamedTuple):
    """The outputs, and what the backward pass reads of the forward pass."""

    out: jax.Array
    state: LinearState
    s: jax.Array  # S and z ahead of each piece, as `output` reads them
    z: jax.Array
    features: channel_backward.Features | None = None  # with a decay per channel, if asked for
    units: jax.Array | None = None  # of the rows of s, in float16
    k_powers: jax.Array | None = None  # in float16
    # Where each query sees every key through a decay: the denominators, and the sums of the walk
    # from the end, of the shapes of s and z.
    den: jax.Array | None = None
    behind: State | None = None
    rest: jax.Array | None = None  # what rounding left off out, where heads are cut into blocks

    def plain(self) -> Outputs:
        return Outputs(self.out, self.state)


def keep(
    spec: LinearAttentionSpec,
    config: Config,
    inputs: Inputs,
    features: bool = False,
    later: Later | None = None,
) -> Kept:
    """The forward pass. `inputs.decay` holds the gates, or the decays themselves if they are per
    channel; `features` then asks for the scaled features, too. `later` has the sums over the keys
    behind each query, if queries see these (`both_ways.py`)."""
    deal = causal_pieces.deal_of(spec, config)
    if spec.decay == "channel":
        return _keep_by_channel(spec, deal, inputs, features)
    borders = of_sequence(spec, deal, runs_of_keys(spec, inputs))
    pieces = None if inputs.decay is None else of_pieces(spec, deal, inputs.decay, borders.begun)
    k_powers = powers.powers_of_keys(spec, inputs)
    ahead = states_of(spec, deal, inputs, pieces, borders, k_powers)
    kv, units = _in_units(spec, ahead.kv)
    arrays = inputs.q, inputs.k, inputs.v, kv, ahead.k_sum
    options: dict[str, Any] = {}
    if pieces is not None:
        options = {"gates": pieces.gates, "steep": pieces.steep}
    options |= {"s_units": units, "lengths": inputs.kv_lengths}
    options |= {"begins": borders.begins, "borders_of": borders.chunks}
    options |= {"k_powers": k_powers}
    out, den = output(spec, deal, *arrays, later, **options)
    state = ahead.end
    if k_powers is not None:
        state = powers.times(state, 1 / k_powers)
    state = _or_zeros(spec, state)
    return Kept(out, state, kv, ahead.k_sum, units=units, k_powers=k_powers, den=den)


def _or_zeros(spec: LinearAttentionSpec, state: LinearState | None) -> LinearState:
    if state is not None:
        return state
    of_state = spec.B, spec.G, spec.D, spec.V
    return LinearState(jnp.zeros(of_state, jnp.float32), jnp.zeros(of_state[:3], jnp.float32))


def forward_of_float8(spec: LinearAttentionSpec, config: Config, inputs: Float8Inputs) -> Outputs:
    """The forward pass of q, k and v in 8 bits, without a decay. S has values times the power of
    two in their scale; `rest` is what the scale has besides."""
    deal = causal_pieces.deal_of(spec, config)
    power, rest = split_scale(inputs.v_scale)
    inputs = inputs._replace(v_scale=power)
    pieces, found = deal.pieces - (not spec.return_state), None
    if pieces:
        length = min(pieces * deal.rows, spec.T)
        of_keys = dataclasses.replace(deal, heads=spec.G, length=length, pieces=pieces)
        arrays = inputs.k, inputs.v, inputs.k_scale, inputs.v_scale
        found = _as_of_pieces(pieces, *float8_sums(spec, of_keys, arrays, inputs.kv_lengths))
    ahead = at_edges(spec, found, _with_kv(inputs.initial_state, 1 / rest), ends=spec.return_state)
    out = output_of_eight_bits(spec, deal, inputs, ahead.kv, ahead.k_sum, rest)
    return Outputs(out, _or_zeros(spec, _with_kv(ahead.end, rest)))


def _with_kv(state: LinearState | None, factor: jax.Array) -> LinearState | None:
    """The state with its kv times a number for each head, [B, G]."""
    return None if state is None else state._replace(kv=state.kv * factor[..., None, None])


def _as_of_pieces(pieces: int, kv: jax.Array, k_sum: jax.Array) -> State:
    """Adds up kv [B, G, N P, F, V], N parts for each piece, to [B, G, P, V, F]; likewise k_sum."""
    kv, k_sum = (x.reshape(*x.shape[:2], pieces, -1, *x.shape[3:]) for x in (kv, k_sum))
    return jnp.swapaxes(jnp.sum(kv, axis=3), 3, 4), jnp.sum(k_sum, axis=3)


def _keep_by_channel(
    spec: LinearAttentionSpec, deal: mosaic.Deal, inputs: Inputs, features: bool
) -> Kept:
    q, k, v, gates = inputs.q, inputs.k, inputs.v, inputs.decay
    assert gates is not None
    of_keys = dataclasses.replace(deal, heads=spec.G // frame.heads_of_tile(spec))
    borders = of_sequence(spec, deal, runs_of_keys(spec, inputs))
    start = None
    if inputs.initial_state is not None:
        start = jnp.swapaxes(inputs.initial_state.kv, 2, 3), inputs.initial_state.k_sum
    powers_of = channel_powers.of_call(spec, inputs, start)
    k_powers, most_turns = None, channel.MOST_TURNS
    if powers_of is not None:
        most_turns = channel.MOST_TURNS_IN_FLOAT16
        k_powers = powers_of.of_keys(room=powers.room_for_decay(spec))
    kv, k_sum, lost, least = channel_sums(spec, of_keys, k, v, gates, borders, k_powers)
    if k_powers is not None:
        factor = jnp.exp2(-k_powers)[..., None, None]
        kv, k_sum = kv * factor[..., None], k_sum * factor
    keeps = jnp.exp2(lost)
    if borders.keeps is not None:
        keeps = keeps * borders.keeps[..., None]
    edges = join_pieces((kv, k_sum), start, keeps)
    s, z = (x[:, :, : deal.pieces] for x in edges)
    if powers_of is None:
        ahead = s.astype(jnp.bfloat16), z
    else:
        ahead = powers_of.rounded(s), powers_of.of_sums(z)
    state = LinearState(jnp.swapaxes(edges[0][:, :, -1], 2, 3), edges[1][:, :, -1])
    turns = channel.turns_of(least, most_lost_of_turn(spec), most_turns)
    steep = _any_in_pieces(deal, turns > 1)
    of_chunks = gates, turns, steep
    arrays = q, k, v, *ahead, of_chunks
    out, *kept = channel_output(spec, deal, *arrays, features, borders, powers_of)
    found = den = None
    if channel_blocks.adds_up(spec) and spec.normalize:
        den, *kept = kept
    if features:
        q_features, k_features, halves = kept
        any_steep = jnp.any(steep > 0, axis=(1, 2))
        found = channel_backward.Features(q_features, k_features, halves, any_steep)
    return Kept(out, state, *ahead, found, den=den)


def states_of(
    spec: LinearAttentionSpec,
    of_queries: mosaic.Deal,
    inputs: Inputs,
    gates: OfPieces | None,
    borders: OfSequence = NO_BORDERS,
    k_powers: jax.Array | None = None,
) -> Edges:
    """The states ahead of each piece; if the call returns its state, also the one behind the last
    piece. In float16 they are multiplied by the powers of keys."""
    pieces = of_queries.pieces - (not spec.return_state)
    found = None
    if pieces:
        length = min(pieces * of_queries.rows, spec.T)
        heads = spec.G // frame.heads_of_tile(spec)
        deal = dataclasses.replace(of_queries, heads=heads, length=length, pieces=pieces)
        until, adding = None if gates is None else gates.until, borders.adding
        found = sums(spec, deal, inputs.k, inputs.v, until, inputs.kv_lengths, adding, k_powers)
    keeps = borders.keeps if gates is None else gates.keeps
    dtype = _dtype_of_edges(spec)
    options: Any = {"ends": spec.return_state, "dtype": dtype}
    start = inputs.initial_state
    if k_powers is not None:
        start = powers.times(start, k_powers)
    return at_edges(spec, found, start, keeps, **options)


def _dtype_of_edges(spec: LinearAttentionSpec) -> Any:
    """The dtype of the states between pieces. Float16 calls keep float32 here, and `_in_units`
    rounds it."""
    return jnp.float32 if mosaic.has_units(frame.tiling(spec).dtype) else jnp.bfloat16


def _in_units(spec: LinearAttentionSpec, kv: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """kv [B, G, P, V, F] as kernels read it, and in float16 the units of its rows [B, G, P, V]."""
    if not mosaic.has_units(frame.tiling(spec).dtype):
        return kv, None
    units = mosaic.units_of_rows([kv])
    return (kv / units[..., None]).astype(jnp.float16), units


def _any_in_pieces(deal: mosaic.Deal, of_chunks: jax.Array) -> jax.Array:
    """Which pieces have one, [B, G, chunks] to [B, G, P]."""
    chunks = deal.pieces * (deal.rows // frame.C)
    missing = max(0, chunks - of_chunks.shape[2])
    of_chunks = jnp.pad(of_chunks, ((0, 0), (0, 0), (0, missing)))
    of_pieces = of_chunks.reshape(*of_chunks.shape[:2], deal.pieces, -1)
    return jnp.any(of_pieces, axis=3).astype(jnp.int32)


def backward(
    spec: LinearAttentionSpec,
    config: Config,
    residuals: Residuals,
    cotangents: Outputs,
    decay: jax.Array | None,
) -> Inputs:
    """The backward pass. `inputs.decay` holds the gates; `decay` holds the decays as
    `flows.decay_flows` takes them, and the gradient is that of `decay`."""
    inputs, kept = residuals
    deal = causal_pieces.deal_of_gradients(spec, config)
    ahead = k_powers = None
    if isinstance(kept, Kept) and deal.pieces == causal_pieces.deal_of(spec, config).pieces:
        ahead = kept.s, kept.z, kept.units
        k_powers = kept.k_powers
    borders = of_sequence(spec, deal, runs_of_keys(spec, inputs))
    pieces = None
    if inputs.decay is not None:
        pieces = of_pieces(spec, deal, inputs.decay, borders.begun)
        inputs = inputs._replace(decay=pieces.gates)
    arrays = inputs, cotangents, ahead, pieces, decay
    return gradients(spec, deal, *arrays, k_powers=k_powers, borders=borders)


def gradients(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    inputs: Inputs,
    cotangents: Outputs,
    ahead: tuple[jax.Array, jax.Array, jax.Array | None] | None,
    pieces: OfPieces | None,
    decay: jax.Array | None,
    weights: State | None = None,
    shares: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    k_powers: jax.Array | None = None,
    borders: OfSequence = NO_BORDERS,
) -> Inputs:
    """The backward pass of one walk. If `deal` counts from the end (`both_ways.py`), the result is
    the part of the pairs whose key is behind the query. `inputs.decay`, the rows of `pieces` and
    `decay` are then those of the reversed sequence; in the former two each row is at its place in
    memory.

    Args:
      ahead: the sums ahead of each piece, as kernels read them, and their units; None if they are
        to be computed.
      weights: inverse and e, if they are known.
      shares: dq, dk and dv of the other walk, to which the results are added.
      k_powers: in float16 the powers of two of the keys in `ahead`.
    """
    g = cotangents.out
    q, k, v, gates, lengths = inputs.q, inputs.k, inputs.v, inputs.decay, inputs.kv_lengths
    if ahead is None:
        without = dataclasses.replace(spec, return_state=False)
        k_powers = powers.powers_of_keys(spec, inputs)
        s, z, _ = states_of(without, deal, inputs, pieces, borders, k_powers)
        s, units = _in_units(spec, s)
    else:
        s, z, units = ahead
    of_q, of_k, of_v = shares or (None,) * 3
    steep, since, keeps = None, None, borders.keeps
    if pieces is not None:
        steep, since, keeps = pieces.steep, pieces.since, pieces.keeps
    arrays = query_gradient_storage.Arrays(
        *(q, k, v, g, s, z),
        s_units=units,
        k_powers=k_powers,
        lengths=lengths,
        gates=gates,
        steep=steep,
        share=of_q,
        begins=borders.begins,
        borders=borders.chunks,
    )
    if weights is not None:
        arrays = arrays._replace(inverse=weights[0], e=weights[1])
    dq, inverse, e, largest, of_queries = query_gradient(spec, deal, arrays)

    of_chunks = None
    end = cotangents.state if spec.return_state else None
    if k_powers is not None:
        if not spec.normalize:
            group = jnp.repeat(k_powers, spec.H // spec.G, axis=1)
            inverse = inverse / group[..., None]
        assert largest is not None
        largest = powers.largest_weights(spec, largest, inverse, gates)
        of_inverse, of_e = (units_of_chunks(spec, x, lengths) for x in (largest, e))
        if gates is not None:
            of_inverse = powers.next_power(of_inverse)
        end = powers.times(end, 1 / k_powers)
        of_chunks = of_inverse, of_e
    # The sums of the first piece only enter the gradient of the initial state.
    first = 0 if spec.initial_state else 1
    found = None
    if deal.pieces > first:
        later = dataclasses.replace(deal, first=first * deal.rows, pieces=deal.pieces - first)
        reading = None if borders.reading is None else borders.reading[:, first:]
        found = query_sums(spec, later, q, g, inverse, e, since, lengths, of_chunks, reading)
        found = jax.tree.map(lambda x: _of_groups(spec, x, 1), found)
    behind = at_edges(
        spec,
        found,
        end,
        keeps,
        first,
        ends=spec.initial_state,
        reverse=True,
        dtype=jnp.float32 if keeps_start(spec) else _dtype_of_edges(spec),
    )
    r, r_units = _in_units(spec, behind.kv)
    of_walk = q, k, v, g, inverse, e, r, behind.k_sum
    walk = dataclasses.replace(deal, heads=spec.G // frame.heads_of_tile(spec))
    arrays_of_keys = Arrays(*of_walk, gates, steep, lengths, r_units, *(of_chunks or ()))
    own_borders = {"ends": borders.ends, "borders": borders.chunks}
    arrays_of_keys = arrays_of_keys._replace(dk=of_k, dv=of_v, **own_borders, k_powers=k_powers)
    dk, dv, of_keys = key_gradient(spec, walk, arrays_of_keys)
    d_decay = None
    if gates is not None and of_queries is not None and of_keys is not None:
        of_start = None
        if behind.end is not None:
            kv, k_sum = behind.end
            of_kv = s[:, :, 0].astype(jnp.float32) * jnp.swapaxes(kv, 2, 3)
            if units is not None:
                of_kv *= units[:, :, 0, :, None]
            of_start = jnp.sum(of_kv, axis=(2, 3)) + jnp.sum(z[:, :, 0] * k_sum, axis=2)
        of_queries = of_queries._replace(flows=_of_groups(spec, of_queries.flows, 2))
        if deal.end is not None:
            gates, of_queries, of_keys = _turned(gates, of_queries, of_keys)
            spec = dataclasses.replace(spec, T=deal.end, S=deal.end)
        flows_of = spec, deal, gates, of_queries, of_keys
        if splits_states(spec):
            starts = s[:, :, : deal.pieces]
            d_decay = flows.decay_flows_in_pieces(*flows_of, starts, decay, borders)
        else:
            d_decay = flows.decay_flows(*flows_of, of_start, decay, borders)
    of_initial = behind.end
    if k_powers is not None:
        of_initial = powers.times(of_initial, k_powers)
    return Inputs(dq, dk, dv, decay=d_decay, initial_state=of_initial)


def _turned(
    gates: jax.Array, queries: flow_places.OfQueries, keys: flow_places.OfKeys
) -> tuple[jax.Array, flow_places.OfQueries, flow_places.OfKeys]:
    """Arrays whose rows lie as in memory, in the order in which a walk from the end counts rows."""
    return (
        jnp.flip(gates, 2),
        queries._replace(flows=jnp.flip(queries.flows, 3)),
        keys._replace(flows=jnp.flip(keys.flows, 2), inside=jnp.flip(keys.inside, 2)),
    )


def _of_groups(spec: LinearAttentionSpec, x: jax.Array, axis: int) -> jax.Array:
    """Sums an array over each group of queries' heads, which are its axis `axis`."""
    if spec.H == spec.G:
        return x
    shape = *x.shape[:axis], spec.G, spec.H // spec.G, *x.shape[axis + 1 :]
    return jnp.sum(x.reshape(shape), axis=axis + 1)


def backward_by_channel(
    spec: LinearAttentionSpec,
    config: Config,
    residuals: Residuals,
    cotangents: Outputs,
    fallback: Fallback,
) -> Inputs:
    """The gradients of a call with a gate per channel. `spec` is the call after `fits.py`
    and before tiles pad it: `fallback`, another backend's backward pass, takes it as it is."""
    if channel_blocks.is_cut(spec):
        return _backward_in_blocks(spec, config, residuals, cotangents, fallback)
    in_tiles = narrow.in_tiles(spec)
    deal = causal_pieces.deal_of(in_tiles, config)
    inputs, outputs = residuals
    given, of_outputs = inputs, cotangents
    if inputs.initial_state is not None:
        given = given._replace(initial_state=narrow.widened(in_tiles, inputs.initial_state))
    if spec.return_state:
        of_outputs = of_outputs._replace(state=narrow.widened(in_tiles, cotangents.state))
    kept: Any = outputs
    if not isinstance(outputs, Kept):
        kept = _keep_by_channel(in_tiles, deal, given, features=True)

    def by_walks() -> Inputs:
        arrays = given, kept.features, (kept.s, kept.z), of_outputs
        found = channel_backward.gradients(in_tiles, deal, *arrays)
        if found.initial_state is None:
            return found
        return found._replace(initial_state=narrow.narrowed(in_tiles, found.initial_state))

    def by_fallback() -> Inputs:
        return fallback(spec, Residuals(inputs, outputs.plain()), cotangents)

    return jax.lax.cond(jnp.any(kept.features.steep), by_fallback, by_walks)


def keep_in_blocks(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, features: bool
) -> Kept:
    """`keep` with gates of channels, of heads that are cut; out and the state are whole."""
    cut = channel_blocks.in_blocks(spec)
    arrays = channel_blocks.arrays_in_blocks(spec, cut, inputs)
    kept = _keep_by_channel(cut, causal_pieces.deal_of(cut, config), arrays, features)
    out, rest = channel_blocks.whole_output(spec, cut, kept.out, kept.den)
    state = channel_blocks.whole_state(spec, cut, kept.state)
    return kept._replace(out=out, rest=rest if features else None, state=state)


def _backward_in_blocks(
    spec: LinearAttentionSpec,
    config: Config,
    residuals: Residuals,
    cotangents: Outputs,
    fallback: Fallback,
) -> Inputs:
    inputs, outputs = residuals
    cut = channel_blocks.in_blocks(spec)
    kept: Any = outputs
    if not isinstance(outputs, Kept):
        kept = keep_in_blocks(spec, config, inputs, features=True)

    def by_walks() -> Inputs:
        of_outputs = channel_blocks.cotangents_in_blocks(spec, cut, cotangents)
        of_rows = kept.den, kept.out, kept.rest
        weights = channel_blocks.weights_of(spec, cut, of_rows, of_outputs.out)
        arrays = channel_blocks.arrays_in_blocks(spec, cut, inputs)
        states = kept.s, kept.z
        deal = causal_pieces.deal_of(cut, config)
        found = channel_backward.gradients(
            cut, deal, arrays, kept.features, states, of_outputs, weights
        )
        return channel_blocks.whole_gradients(spec, cut, found)

    def by_fallback() -> Inputs:
        return fallback(spec, Residuals(inputs, outputs.plain()), cotangents)

    return jax.lax.cond(jnp.any(kept.features.steep), by_fallback, by_walks)
