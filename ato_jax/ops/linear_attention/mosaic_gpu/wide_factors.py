"""Factors of rows, by which the passes over runs of heads of 129 to 256 columns apply a decay per
head or step, and segments. XLA makes them.

With L_t the sum of log2 decays from the run's first row to row t, and all rows of one run of 256,

    a query i and a key j of the run      see each other by exp2(L_i - L_j) where j <= i
    a query and the state ahead of it     `reads` = exp2(L_i)
    a key and the sums behind the run     `reads_behind` = exp2(L_last - L_j)

Each is 0 where a segment begins between the two. Of a chunk's rows `adds` are what they add to the
state behind the chunk, and `keeps` what the chunk leaves of the state ahead of it. Queries are
walked from the end, and add `reads_of_chunk`. Where rows see both sides, keys are walked from the
end, too, and queries from the start; a query reads the state behind its run by `reads_behind`, and
sees a row of its run by exp2(-|L_i - L_j|). The exponents are differences within a run, at most
0, so no decay is too strong for out, dq, dk and dv.
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

# A segment that reaches beyond its run ends there.
BEYOND = 2**30


class Factors(NamedTuple):
    """Each array is [B, G, rows up to a whole run] float32, unless its comment says otherwise."""

    reads: jax.Array
    reads_behind: jax.Array
    reads_of_chunk: jax.Array  # exp2 of the decays since the chunk's first row
    adds: jax.Array
    keeps: jax.Array  # the chunk's, in each of its rows
    sums: jax.Array | None  # L; None without a decay
    # Without segments None; in the rows of the sequence, [B, rows] int32: the first row of a row's
    # segment, -1 where that lies ahead of the run, and its last row, `BEYOND` where behind the run.
    first: jax.Array | None
    last: jax.Array | None
    # Where rows see their whole document: whether a run, which is not the last one, has rows of
    # one alone, [B, runs] int32. Such a run's rows see what is ahead of the next run, and `reads`
    # says so.
    undivided: jax.Array | None = None

    def of_vectors(self, of_chunk: jax.Array, of_run: jax.Array) -> jax.Array:
        """The factors by which rows read the vectors beside their chunk, or their run if it is
        undivided."""
        if self.undivided is None:
            return of_chunk
        return jnp.where(_of_rows(self.undivided) > 0, of_run, of_chunk)


def factors_of(
    spec: LinearAttentionSpec, gates: jax.Array | None, borders: OfSequence
) -> Factors | None:
    """None where the call has neither.

    Args:
      gates: the prefix sums of the decays in each chunk, [B, G, T up to a whole chunk].
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
        first_rows, last_rows, seen = _of_segments(spec, borders)
    of_rows = [jnp.exp2(x) for x in factors]
    if seen is None and not spec.causal:
        of_rows[2] = jnp.where(_exist(spec), of_rows[2], 0.0)
    if seen is not None:
        of_rows = [jnp.where(here, x, 0.0) for here, x in zip(seen, of_rows, strict=True)]
    shape = spec.B, spec.G, -1
    flat = [jnp.broadcast_to(x, (spec.B, spec.G, *x.shape[2:])).reshape(shape) for x in of_rows]
    reads, behind, of_chunk, adds, keeps = flat
    undivided = None
    if borders.begun is not None and gates is None and not spec.causal:
        undivided = _undivided(_in_runs(spec, borders.begun))
        reads = jnp.where(_of_rows(undivided) > 0, 1.0, reads)
    return Factors(
        reads,
        behind,
        of_chunk,
        adds,
        keeps,
        None if gates is None else sums.reshape(shape),
        None if first_rows is None else first_rows.reshape(spec.B, -1),
        None if last_rows is None else last_rows.reshape(spec.B, -1),
        undivided,
    )


def _undivided(begun: jax.Array) -> jax.Array:
    """From how many segments begin in a chunk up to each row, [B, runs, chunks, C]: one may begin
    at the run's first row."""
    borders = jnp.sum(begun[..., -1], axis=2) - begun[:, :, 0, 0]
    number = jnp.arange(borders.shape[1], dtype=jnp.int32)
    return ((borders == 0) & (number + 1 < borders.shape[1])).astype(jnp.int32)


def _of_rows(of_runs: jax.Array) -> jax.Array:
    """[B, runs] as [B, 1, rows]."""
    return jnp.repeat(of_runs, RUN, axis=1)[:, None]


def _in_runs(spec: LinearAttentionSpec, x: jax.Array, filler: float = 0.0) -> jax.Array:
    """[.., T up to a whole chunk], or [.., 1], as [.., runs, chunks, C]."""
    rows = int(pl.cdiv(spec.T, RUN)) * RUN
    if x.shape[-1] > 1:
        beyond = [(0, 0)] * (x.ndim - 1) + [(0, rows - x.shape[-1])]
        x = jnp.pad(x, beyond, constant_values=filler)
    x = jnp.broadcast_to(x, (*x.shape[:-1], rows))
    return x.reshape(*x.shape[:-1], -1, CHUNKS_OF_RUN, C)


def _of_segments(
    spec: LinearAttentionSpec, borders: OfSequence
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """The first and the last row of each row's segment, as `Factors` has them, [B, runs, chunks,
    C]; and where each of its factors is not 0, [B, 1, runs, chunks, C]."""
    assert borders.begins is not None and borders.ends is not None
    assert borders.begun is not None and borders.chunks is not None
    begins, begun = _in_runs(spec, borders.begins), _in_runs(spec, borders.begun)
    ends = _in_runs(spec, borders.ends, C - 1)
    B, runs = spec.B, begun.shape[1]
    chunks = runs * CHUNKS_OF_RUN
    # Rows behind the sequence's last one are of its segment.
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

    # How many rows of the next chunk go on with this chunk's last segment.
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
    """Which rows are there, [runs, chunks, C]. Where rows see both sides keys are walked from the
    end, too, behind which zeros have features."""
    runs = int(pl.cdiv(spec.T, RUN))
    return jnp.arange(runs * RUN, dtype=jnp.int32).reshape(runs, CHUNKS_OF_RUN, C) < spec.T


def until_end_of_piece(
    spec: LinearAttentionSpec, deal: Cut, pieces: OfPieces | None, borders: OfSequence
) -> jax.Array | None:
    """What each row of keys adds to the state behind its piece, [B, G, T up to a whole chunk]; None
    where that is 1."""
    exponents = None if pieces is None else pieces.until
    return _in_pieces(spec, deal, exponents, borders.adding)


def since_start_of_piece(
    spec: LinearAttentionSpec, deal: Cut, pieces: OfPieces | None, borders: OfSequence
) -> jax.Array | None:
    """What each row of queries adds to the sums ahead of its piece."""
    exponents = None if pieces is None else pieces.since
    return _in_pieces(spec, deal, exponents, borders.reading)


def _in_pieces(
    spec: LinearAttentionSpec, deal: Cut, exponents: jax.Array | None, within: jax.Array | None
) -> jax.Array | None:
    """`within` [B, P, 2]: the first of a piece's rows that count, and the one behind the last."""
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
