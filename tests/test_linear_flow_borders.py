"""The gradient of a decay beside segments (`scans/flows.py`) by Triton's kernels and by XLA: its
sums restart at each border, so a segment's gradient has no rounding of another segment."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_linear_passes import (
    check_compiled,
    exact,
    gated,
    known_flows,
    made_by,  # noqa: F401
    normal,
    steep_chunks,
)

import ato_jax
from ato_jax import mosaic
from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.scans import borders, flow_places, flows, gates
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from tests import aot

C = frame.C
# Rows of the segments of two sequences, each but the last one. Borders are at the edges of chunks
# and of places of states, twice in one chunk, and in chunks that follow one another.
SEGMENTS = (10, 30, 88, 64, 8, 1, 190, 121, 64), (200, 312, 300)
SHORTER = 4  # chunks from one place of states to the next, for short sequences


def runs_of(T: int) -> np.ndarray:
    """The number of each row's segment, [B, T]."""
    lengths = [(*some, T - sum(some)) for some in SEGMENTS]
    return np.stack([np.repeat(np.arange(len(some)), some) for some in lengths])


def begins_of(runs: np.ndarray, length: int) -> np.ndarray:
    """The first rows of segments but that of the sequence, [B, length]."""
    whole = np.pad(runs, ((0, 0), (0, length - runs.shape[1])), mode="edge")
    return np.diff(whole, axis=1, prepend=whole[:, :1]) != 0


def start_of_chunk(
    row: int, points: dict[int, float], begins: set[int], known: set[int], passing: np.ndarray
) -> float:
    """Y at a chunk's first row, from the rows `points` at which F is known, in which `begins` are
    borders and `known` starts of chunks, and A - R of all rows."""
    first = max(x for x in points if x < row or x == row and x in known)
    last = min((x for x in points if x > first), default=None)
    found = points[first] + passing[first:row].sum()
    if last is None or first == row:
        return float(found)
    missed = points[last] - points[first] - passing[first:last].sum()
    # The chunk in which a border is counts, also where that is its first row.
    end = -(-last // C) if last in known or last not in begins else last // C + 1
    return float(found + missed * (row // C - first // C) / (end - first // C))


def slow_flows(
    spec: LinearAttentionSpec,
    runs: np.ndarray,
    steep: np.ndarray,
    known: dict[int, np.ndarray],
    reads: np.ndarray,
    adds: np.ndarray,
    inside: np.ndarray,
) -> np.ndarray:
    """F at each step [B, H, T], row by row, from Y [B, H] ahead of the chunks `known`."""
    B, H, length = reads.shape
    passing, found = adds - reads, np.zeros(reads.shape)
    for b, h in np.ndindex(B, H):
        begins = set(np.flatnonzero(begins_of(runs, length)[b]).tolist())
        points = {chunk * C: float(y[b, h]) for chunk, y in known.items()}
        points |= dict.fromkeys(begins, 0.0)
        if not spec.return_state:
            points[length] = 0.0
        starts = {chunk * C for chunk in known}
        for row in range(0, length, C):
            crossing = start_of_chunk(row, points, begins, starts, passing[b, h])
            if steep[b, h, row // C]:
                crossing = reads[b, h, row : row + C].sum()
            for t in range(row, row + C):
                own = max((x for x in begins if row <= x <= t), default=None)
                before = crossing if own is None else 0.0
                first = row if own is None else own
                found[b, h, t] = before + passing[b, h, first:t].sum() + inside[b, h, t]
    return found[:, :, : spec.T]


def as_given(spec: LinearAttentionSpec, found: np.ndarray, of_heads: bool) -> np.ndarray:
    """F [B, H, T] as the passes write it."""
    if of_heads:
        missing = -spec.T % C
        whole = np.pad(found, ((0, 0), (0, 0), (0, missing)))
        return whole.reshape(*whole.shape[:2], -1, C).sum(axis=3)
    return found if spec.layout == "bhtd" else found.swapaxes(1, 2)


def call(
    spec: LinearAttentionSpec, deal: mosaic.Deal, runs: jax.Array, sums: jax.Array
) -> tuple[borders.OfSequence, jax.Array]:
    """The borders, and the sums of decays as the walks are given them."""
    with ato_jax.interpret():
        own = borders.of_sequence(spec, deal, runs)
        return own, gates.of_pieces(spec, deal, sums, own.begun).gates


@aot.requires_triton
@pytest.mark.parametrize(
    "T, D, of_heads, start, options",
    [
        (1000, 128, False, False, {}),
        (960, 64, True, False, {}),
        (1000, 64, False, True, {"layout": "bhtd", "return_state": True, "normalize": False}),
    ],
)
def test_restarts(
    T: int,
    D: int,
    of_heads: bool,
    start: bool,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums of arrays that have nothing to do with each other, with steep pieces and others."""
    B, G, rows = 2, 2, 7 * C
    monkeypatch.setitem(flow_places.SPACING, "step", SHORTER)
    spec, deal, decay, sums = gated(B, T, G, D, rows, **options)
    if of_heads:
        spec = dataclasses.replace(spec, decay="head")
    runs = runs_of(T)
    own, sums = call(spec, deal, jnp.asarray(runs), sums)
    steep = steep_chunks(sums)
    assert steep.any() and not steep.all()
    length, places = sums.shape[2], flow_places.places(spec, deal)
    # Nothing crosses a border, so no query behind it has added to the states' cotangent.
    first = np.minimum(flow_places.chunk_of(spec, deal, np.arange(1, places)) * C, length - 1)
    crosses = np.pad(~begins_of(runs, length)[:, first], ((0, 0), (0, 1)))[:, None, :]
    kv, r = (normal(B, G, places, D, D, seed=seed).astype(jnp.bfloat16) for seed in (20, 21))
    z, u = (normal(B, G, places, D, seed=seed) for seed in (22, 23))
    queries = flow_places.OfQueries(
        normal(2 // frame.heads_of_tile(spec), B, G, length, seed=24),
        kv,
        z if spec.normalize else None,
    )
    adds, inside = (normal(B, G, length, seed=seed) for seed in (25, 26))
    r, u = r * jnp.asarray(crosses)[..., None, None], u * jnp.asarray(crosses)[..., None]
    keys = flow_places.OfKeys(adds, inside, r, u)
    of_start = 10 * normal(B, G, seed=27) if start else None

    def found_of(sums: Any, queries: Any, keys: Any, of_start: Any, decay: Any, own: Any) -> Any:
        decay = None if of_heads else decay
        return flows.decay_flows(spec, deal, sums, queries, keys, of_start, decay, own)

    arrays = sums, queries, keys, of_start, decay, own
    with ato_jax.interpret():
        found = jax.jit(found_of)(*arrays)
    known = known_flows(spec, deal, sums, queries, keys, of_start)
    of_rows = exact(queries.flows).sum(axis=0), exact(adds), exact(inside)
    wanted = as_given(spec, slow_flows(spec, runs, steep, known, *of_rows), of_heads)
    if not of_heads:
        wanted = np.where(exact(decay) < gates.LEAST_DECAY, 0, wanted)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    check_compiled(found_of, *arrays)


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("kind", ["step", "head"])
def test_segments_apart(in_pieces: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F of pairs of each segment. Where segments differ in size a small one is right beside its
    own norm, though sums of rows of large ones are rounded; one of zeros has exactly 0, and so has
    each first row."""
    B, G, T, D, rows = 2, 2, 1000, 64, 7 * C
    monkeypatch.setitem(flow_places.SPACING, "step", SHORTER)
    spec, deal, decay, _ = gated(B, T, G, D, rows, normalize=False)
    spec = dataclasses.replace(spec, decay=kind)
    decay = jnp.zeros_like(decay)
    runs = runs_of(T)
    own, sums = call(spec, deal, jnp.asarray(runs), jnp.zeros((B, G, frame.whole_chunks(T))))
    length = sums.shape[2]
    generator = np.random.default_rng(1)
    scales = np.array([1e3, 1.0, 0.0])[runs % 3]  # [B, T]
    pairs = np.tril(generator.normal(size=(B, G, T, T))) * scales[:, None, :, None]
    pairs *= (runs[:, :, None] == runs[:, None, :])[:, None]
    # F(t) is over j < t <= i.
    over_keys = np.cumsum(pairs, axis=3) - pairs
    wanted = np.stack([over_keys[:, :, t:, t].sum(axis=2) for t in range(T)], axis=2)
    rounding = 1 + 2.0**-9 * generator.normal(size=(2, B, G, T)) * (scales[:, None] == 1e3)
    missing = ((0, 0), (0, 0), (0, length - T))
    reads, adds = (
        jnp.asarray(np.pad(pairs.sum(axis=axis) * own_rounding, missing), jnp.float32)
        for axis, own_rounding in zip((3, 2), rounding, strict=True)
    )

    def states(first: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """S and dS of which the product is F at the rows `first`, [B, G, places, D, D]."""
        y = np.where(first < T, wanted[:, :, np.minimum(first, T - 1)], 0.0)
        s = np.zeros((*y.shape, D, D))
        s[..., 0, 0] = y
        return jnp.asarray(s, jnp.float32), jnp.zeros(s.shape, jnp.float32).at[..., 0, 0].set(1.0)

    with ato_jax.interpret():
        if in_pieces:
            s, r = states(np.arange(deal.pieces) * rows)
            queries = flow_places.OfQueries(reads[None])
            keys = flow_places.OfKeys(adds, jnp.zeros_like(adds), r)
            found = flows.decay_flows_in_pieces(spec, deal, sums, queries, keys, s, decay, own)
        else:
            places = np.arange(flow_places.places(spec, deal))
            s, r = states(flow_places.chunk_of(spec, deal, places) * C)
            nothing = jnp.zeros(s.shape[:4])
            queries = flow_places.OfQueries(reads[None], s)
            keys = flow_places.OfKeys(adds, jnp.zeros_like(adds), r, nothing)
            found = flows.decay_flows(spec, deal, sums, queries, keys, None, decay, own)
    found = exact(found).swapaxes(1, 2)
    for b in range(B):
        for run in range(runs[b].max() + 1):
            of_run = runs[b] == run
            error = np.linalg.norm(found[b][:, of_run] - wanted[b][:, of_run])
            limit = {0: 2e-2, 1: 1e-5, 2: 0.0}[run % 3] * np.linalg.norm(wanted[b][:, of_run])
            assert error <= limit, (b, run, error, limit)
            assert not found[b][:, np.flatnonzero(of_run)[0]].any()
