"""Each query sees the keys up to its own, on Hopper.

The sequence is cut into as many pieces as fill the card, few: XLA adds up their sums (`sums.py`),
and each piece is walked with its running state in registers (`output.py`). Backwards the queries'
gradient is such a walk, too (`query_gradient.py`), and that of keys and values one from the end
(`query_sums.py`, `key_gradient.py`). The gradient of decays is made of what both leave
(`flows.py`). Gates of channels have kernels of their own (`channel.py`, `channel_backward.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.mosaic_gpu import (
    channel,
    channel_backward,
    flows,
    frame,
    wide_causal,
    wide_walk,
)
from ato_jax.ops.linear_attention.mosaic_gpu.channel_output import channel_output
from ato_jax.ops.linear_attention.mosaic_gpu.channel_sums import channel_sums
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config
from ato_jax.ops.linear_attention.mosaic_gpu.key_gradient import key_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.output import output
from ato_jax.ops.linear_attention.mosaic_gpu.query_gradient import query_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.query_sums import query_sums
from ato_jax.ops.linear_attention.mosaic_gpu.sums import sums
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)

State = tuple[jax.Array, jax.Array]
# The gradients by another backend.
Otherwise = Callable[[LinearAttentionSpec, Residuals, Outputs], Inputs]

# What cutting costs, in the time that the output takes for a chunk: another kernel and a scan, what
# it takes for a chunk of theirs, and what an item takes before its first chunk.
CUT, CUT_CHUNK, ITEM = 4.0, 0.4, 1.0
# Of a piece, so that its state is small beside its rows; and pieces that are added up one by one.
LEAST_CHUNKS, FEW_PIECES = 8, 16
# Of two numbers of pieces that cost as much, but for this, the smaller leaves more rows to be read
# once: 8 sequences of 131,072 rows of 8 heads of 64 took 15% longer for each row in 41 pieces than
# of half the length in four, which this takes for 0.6% more.
AS_GOOD = 1.02


def pieces_of(spec: LinearAttentionSpec, config: Config) -> int:
    """So many that the last round of blocks is nearly full, and little is read twice; of those that
    are as good the fewest."""
    at_once = _chunks_at_once(spec)
    units = pl.cdiv(spec.T, at_once * frame.C)
    heads = spec.B * spec.H // frame.heads_of_tile(spec)
    if frame.is_wide(spec):
        heads *= wide_walk.blocks_of_walk(spec)

    def cost(pieces: int) -> float:
        each = pl.cdiv(units, pieces) * at_once
        rounds = pl.cdiv(heads * pieces, config.blocks)
        if pieces == 1:
            return rounds * (each + ITEM)
        rounds_before = pl.cdiv(heads * (pieces - 1), config.blocks)
        return CUT + (rounds + CUT_CHUNK * rounds_before) * (each + ITEM)

    counts = range(1, max(2, units * at_once // LEAST_CHUNKS + 1))
    least = min(map(cost, counts))
    wanted = config.pieces or next(count for count in counts if cost(count) <= AS_GOOD * least)
    return int(pl.cdiv(units, pl.cdiv(units, wanted)))


def _chunks_at_once(spec: LinearAttentionSpec) -> int:
    """What pieces are made of."""
    return channel.CHUNKS if spec.decay == "channel" else 1


def _deal(spec: LinearAttentionSpec, config: Config) -> frame.Deal:
    """All rows of all query heads."""
    pieces, unit = pieces_of(spec, config), _chunks_at_once(spec) * frame.C
    rows = pl.cdiv(pl.cdiv(spec.T, unit), pieces) * unit
    heads = spec.H // frame.heads_of_tile(spec)
    return frame.Deal(spec.B, heads, spec.T, rows, pieces, config.blocks)


class Kept(NamedTuple):
    """`Outputs`, and the sums ahead of each piece, as `output` reads them; with gates of channels,
    where they are wanted, the features, too."""

    out: jax.Array
    state: LinearState
    s: jax.Array
    z: jax.Array
    features: channel_backward.Features | None = None

    def plain(self) -> Outputs:
        return Outputs(self.out, self.state)


def _split(deal: frame.Deal, kv: jax.Array, k_sum: jax.Array) -> tuple[State, LinearState]:
    """The sums ahead of each piece, as products read them, and those behind the last."""
    ahead = kv[:, :, : deal.pieces].astype(jnp.bfloat16), k_sum[:, :, : deal.pieces]
    return ahead, LinearState(jnp.swapaxes(kv[:, :, -1], 2, 3), k_sum[:, :, -1])


def keep(
    spec: LinearAttentionSpec, config: Config, inputs: Inputs, features: bool = False
) -> Kept:
    """`inputs.decay` are the gates; those of channels as they are given, with which `features` says
    whether these are kept, too."""
    deal, gates = _deal(spec, config), inputs.decay
    if spec.decay == "channel":
        return _keep_by_channel(spec, deal, inputs, features)
    ahead, state = _split(deal, *_states(spec, deal, inputs, gates))
    if frame.is_wide(spec):
        out = wide_causal.output(spec, deal, inputs.q, inputs.k, inputs.v, *ahead)
        return Kept(out, state, *ahead)
    steep = None if gates is None else _steep(spec, deal, gates)
    out = output(spec, deal, inputs.q, inputs.k, inputs.v, *ahead, gates, steep)
    return Kept(out, state, *ahead)


def _keep_by_channel(
    spec: LinearAttentionSpec, deal: frame.Deal, inputs: Inputs, features: bool
) -> Kept:
    q, k, v, gates = inputs.q, inputs.k, inputs.v, inputs.decay
    assert gates is not None
    of_keys = dataclasses.replace(deal, heads=spec.G // frame.heads_of_tile(spec))
    kv, k_sum, lost, least = channel_sums(spec, of_keys, k, v, gates)
    start = None
    if inputs.initial_state is not None:
        start = jnp.swapaxes(inputs.initial_state.kv, 2, 3), inputs.initial_state.k_sum
    edges = channel_backward.join_pieces((kv, k_sum), start, jnp.exp2(lost))
    ahead, state = _split(deal, *edges)
    turns = channel.turns_of(least)
    steep = _any_in_pieces(deal, turns > 1)
    out, *kept = channel_output(spec, deal, q, k, v, *ahead, gates, turns, steep, features)
    found = None
    if features:
        q_features, k_features, halves = kept
        any_steep = jnp.any(steep > 0, axis=(1, 2))
        found = channel_backward.Features(q_features, k_features, halves, any_steep)
    return Kept(out, state, *ahead, found)


def _states(
    spec: LinearAttentionSpec, of_queries: frame.Deal, inputs: Inputs, gates: jax.Array | None
) -> State:
    """The states ahead of each piece; behind the last one, too, if it is to be returned."""
    pieces = of_queries.pieces - (not spec.return_state)
    start = found = keeps = None
    if inputs.initial_state is not None:
        start = jnp.swapaxes(inputs.initial_state.kv, 2, 3), inputs.initial_state.k_sum
    if pieces:
        length = min(pieces * of_queries.rows, spec.T)
        heads = spec.G // frame.heads_of_tile(spec)
        deal = dataclasses.replace(of_queries, heads=heads, length=length, pieces=pieces)
        until = None
        if gates is not None:
            keeps, until = _left_by_pieces(deal, gates), _until_pieces(deal, gates)
        if frame.is_wide(spec):
            found = wide_causal.piece_sums(spec, deal, "whole_sums", inputs.k, inputs.v)
        else:
            found = sums(spec, deal, inputs.k, inputs.v, until)
    return _at_edges(spec, found, start, keeps)


def _in_pieces(deal: frame.Deal, of_chunks: jax.Array) -> jax.Array:
    """[B, G, chunks] to [B, G, P, chunks of a piece], with zeros behind the last."""
    chunks = deal.pieces * (deal.rows // frame.C)
    missing = max(0, chunks - of_chunks.shape[2])
    of_chunks = jnp.pad(of_chunks, ((0, 0), (0, 0), (0, missing)))[:, :, :chunks]
    return of_chunks.reshape(*of_chunks.shape[:2], deal.pieces, -1)


def _any_in_pieces(deal: frame.Deal, of_chunks: jax.Array) -> jax.Array:
    """Which pieces have one, [B, G or tiles, P]."""
    return jnp.any(_in_pieces(deal, of_chunks), axis=3).astype(jnp.int32)


def _of_pieces(deal: frame.Deal, gates: jax.Array) -> jax.Array:
    """The sums of whole chunks, [B, G, P, chunks]."""
    return _in_pieces(deal, frame.halves_of(gates)[1])


def _left_by_pieces(deal: frame.Deal, gates: jax.Array) -> jax.Array:
    """What each piece leaves of what is ahead of it, [B, G, P]."""
    return jnp.exp2(jnp.sum(_of_pieces(deal, gates), axis=3))


def _since_pieces(deal: frame.Deal, gates: jax.Array) -> jax.Array:
    """Gates as summed up from each piece's first row."""
    of_chunks = _of_pieces(deal, gates)
    return _plus(gates, jnp.cumsum(of_chunks, axis=3) - of_chunks)


def _until_pieces(deal: frame.Deal, gates: jax.Array) -> jax.Array:
    """What gates of later rows of each piece sum up to."""
    of_chunks = _of_pieces(deal, gates)
    return _plus(-gates, jnp.flip(jnp.cumsum(jnp.flip(of_chunks, 3), axis=3), 3))


def _plus(gates: jax.Array, of_chunks: jax.Array) -> jax.Array:
    """What rows have, and their chunks, which is 0 behind the pieces."""
    rows = gates.reshape(*gates.shape[:2], -1, frame.C)
    of_chunks = of_chunks.reshape(*gates.shape[:2], -1)[:, :, : rows.shape[2]]
    missing = rows.shape[2] - of_chunks.shape[2]
    of_chunks = jnp.pad(of_chunks, ((0, 0), (0, 0), (0, missing)))
    return (rows + of_chunks[..., None]).reshape(gates.shape)


def _steep(spec: LinearAttentionSpec, deal: frame.Deal, gates: jax.Array) -> jax.Array:
    """Which pieces have a steep chunk, [B, tiles, P]."""
    steep = frame.is_steep(*frame.halves_of(gates))
    of_tiles = steep.reshape(spec.B, -1, frame.heads_of_tile(spec), steep.shape[2])
    return _any_in_pieces(deal, jnp.any(of_tiles, axis=2))


def _at_edges(
    spec: LinearAttentionSpec,
    pieces: State | None,
    start: State | None,
    keeps: jax.Array | None = None,
    reverse: bool = False,
) -> State:
    """kv [B, G, P, V, F] and k_sum [B, G, P, F] -> the sums of all pieces ahead of each edge, or
    behind it, [B, G, P + 1, ..], from `start` [B, G, ..] on. `keeps` [B, G, P]: what a piece leaves
    of what is ahead of it."""
    if pieces is None and start is None:
        shape = (spec.B, spec.G, 1, spec.V, spec.D)
        return jnp.zeros(shape, jnp.float32), jnp.zeros((*shape[:3], spec.D), jnp.float32)
    if pieces is None:
        assert start is not None
        return start[0][:, :, None], start[1][:, :, None]
    count = pieces[0].shape[2]
    # What edge e has of piece r; and of the start.
    ahead = jnp.tri(count + 1, count, -1, dtype=jnp.float32)
    weights = (1 - ahead if reverse else ahead)[None, None]
    of_start: Any = 1.0
    if keeps is not None:
        keeps = jnp.flip(keeps, 2) if reverse else keeps
        passed = jnp.where(jnp.tri(count, dtype=bool, k=-1), keeps[..., None], 1.0)
        passed = jnp.cumprod(passed, axis=2)  # from piece r on, up to the edge behind e
        weights = jnp.pad(passed, ((0, 0), (0, 0), (1, 0), (0, 0))) * ahead
        of_start = jnp.pad(jnp.cumprod(keeps, axis=2), ((0, 0), (0, 0), (1, 0)), constant_values=1)
        of_start = of_start[..., None]
        if reverse:
            weights, of_start = jnp.flip(weights, (2, 3)), jnp.flip(of_start, 2)

    def add_up(pieces: jax.Array, start: jax.Array | None) -> jax.Array:
        flat = pieces.reshape(*pieces.shape[:3], -1)
        if count <= FEW_PIECES:  # a product of matrices would be mostly empty
            found = jnp.sum(weights[..., None] * flat[:, :, None], axis=3)
        else:
            every = jnp.broadcast_to(weights, (*flat.shape[:2], *weights.shape[2:]))
            found = jnp.einsum("bger,bgrn->bgen", every, flat, precision=jax.lax.Precision.HIGHEST)
        if start is not None:
            found += of_start * start.reshape(*start.shape[:2], 1, -1)
        return found.reshape(*pieces.shape[:2], count + 1, *pieces.shape[3:])

    starts = (None, None) if start is None else start
    kv, k_sum = map(add_up, pieces, starts)
    return kv, k_sum


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    """`inputs.decay` are the gates; of the decays the gradient is each step's, [B, G, T]."""
    inputs, g = residuals.inputs, cotangents.out
    q, k, v, gates = inputs.q, inputs.k, inputs.v, inputs.decay
    deal = _deal(spec, config)
    if isinstance(residuals.outputs, Kept):
        s, z = residuals.outputs.s, residuals.outputs.z
    else:
        kv, z = _states(dataclasses.replace(spec, return_state=False), deal, inputs, gates)
        s = kv.astype(jnp.bfloat16)
    wide = frame.is_wide(spec)
    steep = None if gates is None else _steep(spec, deal, gates)
    of_queries = of_keys = None
    if wide:
        dq, inverse, e = wide_causal.query_gradient(spec, deal, q, k, v, g, s, z)
    else:
        dq, inverse, e, of_queries = query_gradient(spec, deal, q, k, v, g, s, z, gates, steep)

    # No key reads the sums of the first piece, but the state before it.
    first = 0 if spec.initial_state else 1
    found = end = keeps = None
    if deal.pieces > first:
        later = dataclasses.replace(deal, first=first * deal.rows, pieces=deal.pieces - first)
        since = None
        if gates is not None:
            since = _since_pieces(deal, gates)
            keeps = _left_by_pieces(deal, gates)[:, :, first:]
        if wide:
            found = wide_causal.piece_sums(spec, later, "whole_query_sums", q, g, (inverse, e))
        else:
            found = query_sums(spec, later, q, g, inverse, e, since)
    if spec.return_state:
        end = jnp.swapaxes(cotangents.state.kv, 2, 3), cotangents.state.k_sum
    r, u = _at_edges(spec, found, end, keeps, reverse=True)
    d_state = of_start = None
    if spec.initial_state:
        of_kv = jnp.sum(s[:, :, 0].astype(jnp.float32) * r[:, :, 0], axis=(2, 3))
        of_start = of_kv + jnp.sum(z[:, :, 0] * u[:, :, 0], axis=2)
        d_state = LinearState(jnp.swapaxes(r[:, :, 0], 2, 3), u[:, :, 0])
        r, u = r[:, :, 1:], u[:, :, 1:]
    arrays = q, k, v, g, inverse, e, r.astype(jnp.bfloat16), u
    if wide:
        dk, dv = wide_causal.key_gradient(spec, deal, *arrays)
    else:
        dk, dv, of_keys = key_gradient(spec, deal, *arrays, gates, steep)
    d_decay = None
    if gates is not None and of_queries is not None and of_keys is not None:
        d_decay = flows.decay_flows(spec, deal, gates, of_queries, of_keys, of_start)
    return Inputs(dq, dk, dv, decay=d_decay, initial_state=d_state)


def backward_by_channel(
    spec: LinearAttentionSpec,
    config: Config,
    residuals: Residuals,
    cotangents: Outputs,
    otherwise: Otherwise,
) -> Inputs:
    """The same where gates are those of channels."""
    deal = _deal(spec, config)
    inputs, outputs = residuals
    kept: Any = outputs
    if not isinstance(outputs, Kept):
        kept = _keep_by_channel(spec, deal, inputs, features=True)

    def by_walks() -> Inputs:
        states = kept.s, kept.z
        return channel_backward.gradients(
            spec, deal, inputs, kept.features, states, cotangents.out
        )

    def hand_over() -> Inputs:
        return otherwise(spec, Residuals(inputs, outputs.plain()), cotangents)

    return jax.lax.cond(jnp.any(kept.features.steep), hand_over, by_walks)
