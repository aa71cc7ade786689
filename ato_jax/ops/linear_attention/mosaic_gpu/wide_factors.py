"""Factors of rows, [B, G, rows] float32, for a decay per head or step and segments of wide heads.

`wide_heads.py` computes them by XLA, and the kernels of `wide_states.py` and `wide_runs.py` read
them. Let L_t be the sum of the log2 decays from the first row of t's run of 256 rows up to row t.
Each factor is 0 where a segment begins between the two rows, or between the row and the state:

    exp2(L_i - L_j)                          multiplies the pair of query i and key j <= i of a run
    reads = exp2(L_i)                        multiplies what query i reads of the state ahead of
                                             its run
    reads_behind = exp2(L_last - L_j)        multiplies what key j reads of the sums behind its run

`wide_states.py` updates a state once a chunk, by factors within the chunk: `adds` multiplies the
term of a key, `keeps` the state ahead of the chunk, and `reads_of_chunk` the term of a query, since
queries are walked from the end. Where rows see both sides, a walk in the other direction takes
`reads_of_chunk` for keys and `adds` for queries; a query then reads the state behind its run by
`reads_behind`, and a pair of the run has exp2(-|L_i - L_j|).

All exponents are differences within a run and at most 0, so no decay is too strong for out, dq, dk
and dv.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.scans.borders import OfSequence
from ato_jax.ops.linear_attention.scans.chunks import CHUNKS_OF_RUN, RUN, C, Cut
from ato_jax.ops.linear_attention.scans.gates import OfPieces
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Stands for the last row of a segment that goes on behind the run.
BEYOND = 2**30


class Factors(NamedTuple):
    """Arrays [B, G, rows up to a whole run] in float32, unless a comment says otherwise."""

    reads: jax.Array
    reads_behind: jax.Array
    reads_of_chunk: jax.Array  # exp2 of the sum of log2 decays since the chunk's first row
    adds: jax.Array
    keeps: jax.Array  # the factor of the chunk, repeated in each of its rows
    sums: jax.Array | None  # L; None without a decay
    # [B, rows] int32, rows of the sequence; None without segments. `first` is the first row of each
    # row's segment, or -1 if that lies ahead of the run; `last` is its last row, or `BEYOND`.
    first: jax.Array | None
    last: jax.Array | None


def factors_of(
    spec: LinearAttentionSpec, gates: jax.Array | None, borders: OfSequence
) -> Factors | None:
    """The factors of a call; None where it has neither a decay nor segments.

    Args:
      gates: the prefix sums of the log2 decays in each chunk, [B, G, T up to a whole chunk].
      borders: of the segments.
    """
    if gates is None and borders.begun is None:
        return None
    nothing = jnp.zeros((spec.B, 1, 1), jnp.float32)
    of_gates = _in_runs(spec, nothing if gates is None else gates)
    last = of_gates[..., -1:]  # [B, G, runs, chunks, 1]
    sums = of_gates + jnp.cumsum(last, axis=3) - last
    whole = sums[:, :, :, -1:, -1:]
    factors = sums, whole - sums, of_gates, last - of_gates, jnp.broadcast_to(last, sums.shape)
    seen: tuple[jax.Array, ...] | None = None
    first_rows = last_rows = None
    if borders.begun is not None:
        first_rows, last_rows, seen = of_segments(spec, borders)
    of_rows = [jnp.exp2(x) for x in factors]
    if seen is None and not spec.causal:
        of_rows[2] = jnp.where(_exist(spec), of_rows[2], 0.0)
    if seen is not None:
        of_rows = [jnp.where(here, x, 0.0) for here, x in zip(seen, of_rows, strict=True)]
    shape = spec.B, spec.G, -1
    flat = [jnp.broadcast_to(x, (spec.B, spec.G, *x.shape[2:])).reshape(shape) for x in of_rows]
    reads, behind, of_chunk, adds, keeps = flat
    return Factors(
        reads,
        behind,
        of_chunk,
        adds,
        keeps,
        None if gates is None else sums.reshape(shape),
        None if first_rows is None else first_rows.reshape(spec.B, -1),
        None if last_rows is None else last_rows.reshape(spec.B, -1),
    )


def _in_runs(spec: LinearAttentionSpec, x: jax.Array, filler: float = 0.0) -> jax.Array:
    """Reshapes [.., T up to a whole chunk] to [.., runs, chunks, C], and broadcasts [.., 1]."""
    rows = int(pl.cdiv(spec.T, RUN)) * RUN
    if x.shape[-1] > 1:
        beyond = [(0, 0)] * (x.ndim - 1) + [(0, rows - x.shape[-1])]
        x = jnp.pad(x, beyond, constant_values=filler)
    x = jnp.broadcast_to(x, (*x.shape[:-1], rows))
    return x.reshape(*x.shape[:-1], -1, CHUNKS_OF_RUN, C)


def of_segments(
    spec: LinearAttentionSpec, borders: OfSequence
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """`Factors.first` and `Factors.last`, [B, runs, chunks, C]; and for each of the first five
    fields of `Factors` where segments leave it other than 0, [B, 1, runs, chunks, C]."""
    assert borders.begins is not None and borders.ends is not None
    assert borders.begun is not None and borders.chunks is not None
    begins, begun = _in_runs(spec, borders.begins), _in_runs(spec, borders.begun)
    ends = _in_runs(spec, borders.ends, C - 1)
    B, runs = spec.B, begun.shape[1]
    chunks = runs * CHUNKS_OF_RUN
    # Rows behind the last one belong to the last segment.
    of_chunks = jnp.pad(borders.chunks, ((0, 0), (0, chunks - borders.chunks.shape[1]), (0, 0)))
    exist = jnp.arange(chunks, dtype=jnp.int32) < borders.chunks.shape[1]
    reads = jnp.where(exist, of_chunks[..., 0], C).reshape(B, runs, CHUNKS_OF_RUN)
    adds = of_chunks[..., 1].reshape(B, runs, CHUNKS_OF_RUN)
    start = jnp.arange(chunks, dtype=jnp.int32).reshape(runs, CHUNKS_OF_RUN) * C
    cut = begun[..., -1] > 0  # a segment begins in the chunk

    ahead, found = jnp.full((B, runs), -1, jnp.int32), []
    for chunk in range(CHUNKS_OF_RUN):
        found.append(ahead)
        own = start[:, chunk] + adds[:, :, chunk]
        ahead = jnp.where(cut[:, :, chunk], own, ahead)
    first = jnp.where(begun > 0, start[..., None] + begins, jnp.stack(found, axis=2)[..., None])

    # The number of rows of the next chunk that belong to this chunk's last segment.
    of_all = reads.reshape(B, -1)
    more = jnp.pad(of_all[:, 1:], ((0, 0), (0, 1)), constant_values=C).reshape(reads.shape)
    behind, found = jnp.full((B, runs), BEYOND, jnp.int32), []
    for chunk in reversed(range(CHUNKS_OF_RUN)):
        own_end, next_start = start[:, chunk] + (C - 1), start[:, chunk] + C
        beyond = (
            behind
            if chunk + 1 == CHUNKS_OF_RUN
            else jnp.where(more[:, :, chunk] < C, next_start + more[:, :, chunk] - 1, behind)
        )
        behind = jnp.where(more[:, :, chunk] == 0, own_end, beyond)
        found.append(behind)
    tails = jnp.stack(found[::-1], axis=2)[..., None]
    last = jnp.where(ends < C - 1, start[..., None] + ends, tails)
    row = jnp.arange(C, dtype=jnp.int32)
    goes_on = begun == 0
    if not spec.causal:
        goes_on &= _exist(spec)
    seen = (
        first < 0,
        last == BEYOND,
        goes_on,
        row >= adds[..., None],
        jnp.broadcast_to(~cut[..., None], begun.shape),
    )
    return first, last, tuple(x[:, None] for x in seen)


def _exist(spec: LinearAttentionSpec) -> jax.Array:
    """Which rows are not padding, [runs, chunks, C]. Where rows see both sides, keys are also
    walked from the end: phi(0) of the padding behind the last row would enter the sums."""
    runs = int(pl.cdiv(spec.T, RUN))
    return jnp.arange(runs * RUN, dtype=jnp.int32).reshape(runs, CHUNKS_OF_RUN, C) < spec.T


def until_end_of_piece(
    spec: LinearAttentionSpec, deal: Cut, pieces: OfPieces | None, borders: OfSequence
) -> jax.Array | None:
    """The factor of each key's term in the state behind its piece, [B, G, T up to a whole chunk];
    None where all are 1."""
    exponents = None if pieces is None else pieces.until
    return _in_pieces(spec, deal, exponents, borders.adding)


def since_start_of_piece(
    spec: LinearAttentionSpec, deal: Cut, pieces: OfPieces | None, borders: OfSequence
) -> jax.Array | None:
    """The factor of each query's term in the sums ahead of its piece, of the same shape."""
    exponents = None if pieces is None else pieces.since
    return _in_pieces(spec, deal, exponents, borders.reading)


def _in_pieces(
    spec: LinearAttentionSpec, deal: Cut, exponents: jax.Array | None, within: jax.Array | None
) -> jax.Array | None:
    """exp2(exponents), 0 in rows that do not count. `within` [B, P, 2] has the first row of each
    piece that counts, and the row behind the last one."""
    factor = None if exponents is None else jnp.exp2(exponents)
    rows = int(pl.cdiv(spec.T, C)) * C
    own = jnp.arange(rows, dtype=jnp.int32)
    if within is None:
        if factor is None or spec.causal:
            return factor
        return jnp.where(own < spec.T, factor, 0.0)
    first, end = (jnp.repeat(within[..., n], deal.rows, axis=1)[:, None, :rows] for n in range(2))
    counts = (own >= first) & (own < end)  # [B, 1, rows]
    shape = spec.B, spec.G, rows
    factor = jnp.ones(shape, jnp.float32) if factor is None else factor
    return jnp.where(counts, factor, 0.0)
