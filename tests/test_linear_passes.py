"""The passes between Mosaic GPU's kernels of linear attention: by Triton's kernels, which are also
compiled, and by XLA, where JAX cannot lower to Triton."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel
from test_linear_mosaic import draw

import ato_jax
from ato_jax import launch, mosaic
from ato_jax.ops.linear_attention import api
from ato_jax.ops.linear_attention import decay as decay_limits
from ato_jax.ops.linear_attention.decay import LEAST_DECAY
from ato_jax.ops.linear_attention.mosaic_gpu import channel as by_channel
from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.scans import (
    channel_flows,
    edges,
    flow_places,
    flows,
    gates,
    totals,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec, LinearState
from tests import aot


@pytest.fixture(params=["triton", "xla"], autouse=True)
def made_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "xla":
        monkeypatch.setattr(launch, "no_triton", "is hidden")


def check_compiled(function: Callable[..., Any], *arrays: Any) -> None:
    if launch.no_triton is not None:
        with pytest.raises(ValueError, match="no Triton kernel"):
            aot.triton_kernels(function, *arrays, capability=90)
        return
    for kernel in aot.compile_function(function, *arrays, capabilities=(90,)):
        assert not kernel.spills and kernel.fits, kernel


def normal(*shape: int, seed: int) -> jax.Array:
    return channel.draw(*shape, seed=seed)


def exact(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


@aot.requires_triton
@pytest.mark.parametrize(
    "P, V, D, start, keeps, options",
    [
        (1, 64, 64, False, False, {}),
        (8, 64, 64, False, True, {"ends": True}),
        (19, 64, 64, True, True, {"ends": True, "reverse": True}),
        (3, 192, 192, True, False, {"reverse": True}),
    ],
)
def test_edges(P: int, V: int, D: int, start: bool, keeps: bool, options: dict[str, bool]) -> None:
    """One by one, in float64; of what pieces leave the last numbers are theirs."""
    B, G, first = 2, 3, 1
    pieces = normal(B, G, P, V, D, seed=0), normal(B, G, P, D, seed=1)
    given = LinearState(normal(B, G, D, V, seed=2), normal(B, G, D, seed=3)) if start else None
    kept = jnp.exp(-jnp.abs(normal(B, G, first + P, seed=4))) if keeps else None
    spec = dataclasses.replace(api.prepare(*draw(1, 64, 1, 1, D=D)).spec, B=B, H=G, G=G)

    def found_of(pieces: Any, given: Any, kept: Any) -> edges.Edges:
        return edges.at_edges(spec, pieces, given, kept, first, **options)

    with ato_jax.interpret():
        found = found_of(pieces, given, kept)
    kv, k_sum = np.zeros((B, G, V, D)), np.zeros((B, G, D))
    if given is not None:
        kv, k_sum = exact(given.kv).swapaxes(2, 3), exact(given.k_sum)
    wanted = [(kv, k_sum)]
    for piece in reversed(range(P)) if options.get("reverse") else range(P):
        left = np.ones((B, G)) if kept is None else exact(kept)[:, :, first + piece]
        kv = kv * left[..., None, None] + exact(pieces[0])[:, :, piece]
        k_sum = k_sum * left[..., None] + exact(pieces[1])[:, :, piece]
        wanted.append((kv, k_sum))
    if options.get("ends"):
        assert found.end is not None
        kv, k_sum = wanted.pop()
        np.testing.assert_allclose(found.end.kv, kv.swapaxes(2, 3), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found.end.k_sum, k_sum, rtol=1e-5, atol=1e-5)
    wanted = wanted[::-1] if options.get("reverse") else wanted
    kv, k_sum = (np.stack(states, axis=2) for states in zip(*wanted, strict=True))
    np.testing.assert_allclose(exact(found.kv), kv, rtol=2**-8, atol=1e-5)
    np.testing.assert_allclose(found.k_sum, k_sum, rtol=1e-5, atol=1e-5)
    check_compiled(found_of, pieces, given, kept)


def test_edges_without_pieces() -> None:
    spec = dataclasses.replace(api.prepare(*draw(1, 64, 2, 2)).spec, B=3)
    nothing = edges.at_edges(spec, None, None)
    assert nothing.kv.shape == (3, 2, 1, 128, 128) and nothing.kv.dtype == jnp.bfloat16
    assert nothing.k_sum.shape == (3, 2, 1, 128) and not nothing.kv.any() | nothing.k_sum.any()
    start = LinearState(normal(3, 2, 128, 128, seed=0), normal(3, 2, 128, seed=1))
    found = edges.at_edges(spec, None, start)
    wanted = jnp.swapaxes(start.kv, 2, 3).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found.kv[:, :, 0], wanted)
    np.testing.assert_array_equal(found.k_sum[:, :, 0], start.k_sum)


@aot.requires_triton
@pytest.mark.parametrize(
    "P, D, V, added, options, unit",
    [
        (1, 128, 128, False, {}, "none"),
        (1, 128, 128, False, {}, "sums"),
        (9, 192, 192, True, {}, "sums"),
        (9, 192, 192, True, {}, "nothing"),
        (16, 128, 128, True, {"normalize": False, "scale": 0.3}, "none"),
        (16, 128, 128, True, {"normalize": False, "scale": 0.3}, "nothing"),
    ],
)
def test_totals(P: int, D: int, V: int, added: bool, options: dict[str, Any], unit: str) -> None:
    B, G = 2, 3
    spec = dataclasses.replace(api.prepare(*draw(1, 64, 1, 1, D=D), **options).spec, B=B, H=G, G=G)
    pieces = normal(B, G, P, D, V, seed=0), normal(B, G, P, D, seed=1)
    state = LinearState(normal(B, G, D, V, seed=2), normal(B, G, D, seed=3)) if added else None
    unit_of = {"none": None, "sums": normal(B, G, D, seed=4), "nothing": jnp.zeros((B, G, D))}[unit]

    def found_of(pieces: Any, state: Any, unit_of: Any) -> totals.Totals:
        return totals.add_up(spec, pieces, state, unit_of, returned=added)

    with ato_jax.interpret():
        found = found_of(pieces, state, unit_of)
    units = np.ones((B, G))
    if unit_of is not None and spec.normalize:
        units /= np.abs(exact(unit_of)).sum(axis=2) if unit == "sums" else 1
    elif unit_of is not None:
        units *= spec.scale
    kv = exact(pieces[0]).sum(axis=2) * units[..., None, None]
    k_sum = exact(pieces[1]).sum(axis=2) * units[..., None]
    if state is not None:
        kv, k_sum = kv + exact(state.kv), k_sum + exact(state.k_sum)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    read = kv if unit_of is not None or spec.normalize else kv * spec.scale
    close(exact(found.read), read, rtol=2**-8)
    close(found.k_sum, k_sum)
    close(exact(found.rows[:, :, : mosaic.PARTS]), k_sum[:, :, None].repeat(4, 2), rtol=2**-8)
    close(exact(found.rows).sum(axis=2) / mosaic.PARTS, k_sum, rtol=2**-15)
    close(found.least, (spec.eps * units)[..., None].repeat(frame.C, 2))
    if added:
        close(found.kv, kv)
    else:
        assert found.kv is None
    check_compiled(found_of, pieces, state, unit_of)


def gated(
    B: int, T: int, G: int, D: int, rows: int, **options: Any
) -> tuple[LinearAttentionSpec, mosaic.Deal, jax.Array, jax.Array]:
    """Decays, steep in some chunks, and their sums within chunks."""
    layout = options.setdefault("layout", "bthd")
    decay = -0.02 * jnp.abs(normal(B, G, T, seed=5))
    decay = decay.at[:, 0, T // 3 : T // 3 + 40].set(-9.0).at[:, G - 1, T // 4].set(-jnp.inf)
    decay = decay if layout == "bhtd" else jnp.swapaxes(decay, 1, 2)
    q = draw(B, T, G, G, layout, D=D)[0]
    spec = api.prepare(q, q, q, causal=True, decay=decay, **options).spec
    heads = G // frame.heads_of_tile(spec)
    deal = mosaic.Deal(B, heads, T, rows, -(-T // rows), 132)
    with ato_jax.interpret():
        sums = gates.of_steps(spec, decay)
    return spec, deal, decay, sums


@aot.requires_triton
@pytest.mark.parametrize(
    "B, T, G, D, rows",
    [
        (2, 1000, 3, 128, 512),
        (1, 64, 4, 64, 64),
        (1, 64 * 70, 2, 64, 64 * 35),
        (2, 64 * 13 - 10, 4, 64, 64 * 5),  # fewer chunks in the last piece
        (1, 64 * 1300, 1, 128, 64 * 1300),  # more chunks than are read at once
    ],
)
def test_gates_of_pieces(B: int, T: int, G: int, D: int, rows: int) -> None:
    spec, deal, _, sums = gated(B, T, G, D, rows)
    with ato_jax.interpret():
        found = gates.of_pieces(spec, deal, sums)
    length, in_piece = frame.whole_chunks(T), rows // frame.C
    missing = deal.pieces * in_piece - length // frame.C
    rows_of = exact(sums).reshape(B, G, -1, frame.C)
    rows_of = np.pad(rows_of, ((0, 0), (0, 0), (0, missing), (0, 0)))
    rows_of = rows_of.reshape(B, G, deal.pieces, in_piece, frame.C)
    middle, last = rows_of[..., frame.C // 2 - 1], rows_of[..., -1]
    up_to = np.cumsum(last, axis=3)

    def cut(x: np.ndarray) -> np.ndarray:
        return x.reshape(B, G, -1)[:, :, :length]

    until = cut(up_to[..., -1:, None] - (up_to - last)[..., None] - rows_of)
    np.testing.assert_allclose(found.until, until, rtol=2e-5, atol=1e-4)
    since = cut((up_to - last)[..., None] + rows_of)
    np.testing.assert_allclose(found.since, since, rtol=2e-5, atol=1e-4)
    np.testing.assert_allclose(found.keeps, np.exp2(up_to[..., -1]), rtol=1e-3, atol=1e-37)
    steep = (np.minimum(middle, last - middle) < -decay_limits.MOST_LOST_OF_CHUNK).any(axis=3)
    of_tiles = steep.reshape(B, deal.heads, -1, deal.pieces).any(axis=2)
    np.testing.assert_array_equal(found.steep, of_tiles)
    assert of_tiles.any() and (deal.pieces == 1 or not of_tiles.all())
    check_compiled(functools.partial(gates.of_pieces, spec, deal), sums)


@aot.requires_triton
@pytest.mark.parametrize("G, D", [(3, 128), (4, 64)])
def test_gates_of_pieces_beside_segments(G: int, D: int) -> None:
    """Where a tile's piece has a steep chunk as of decays with the least one where a segment
    begins; elsewhere as of decays without it, but a border keeps nothing."""
    B, T, rows = 2, 1000, 256
    spec, deal, decay, sums = gated(B, T, G, D, rows)
    begins = np.zeros((B, T), bool)
    begins[0, [5, 6, 300, 319]] = begins[1, [256, 700]] = True
    count = np.pad(begins, ((0, 0), (0, 24))).reshape(B, -1, frame.C).cumsum(axis=2)
    count = jnp.asarray(count.reshape(B, -1), jnp.int32)
    with ato_jax.interpret():
        at_borders = gates.of_steps(spec, jnp.where(begins[..., None], LEAST_DECAY, decay))
        without = gates.of_steps(spec, jnp.where(begins[..., None], 0.0, decay))
        plain, masked, found = (
            gates.of_pieces(spec, deal, *given)
            for given in ((at_borders,), (without,), (without, count))
        )
    np.testing.assert_array_equal(found.steep, masked.steep)
    assert 0 < np.mean(found.steep) < 1
    steep = np.repeat(found.steep, G // found.steep.shape[1], axis=1) > 0  # [B, G, P]
    of_rows = np.repeat(steep, rows, axis=2)[:, :, : sums.shape[2]]
    np.testing.assert_allclose(
        found.gates, np.where(of_rows, at_borders, without), rtol=1e-5, atol=1e-3
    )
    for name in ("until", "since"):
        wanted = np.where(of_rows, getattr(plain, name), getattr(masked, name))
        np.testing.assert_allclose(getattr(found, name), wanted, rtol=1e-5, atol=1e-3)
    borders = np.pad(begins, ((0, 0), (0, 24))).reshape(B, deal.pieces, -1).any(axis=2)
    wanted = np.where(borders[:, None], 0.0, masked.keeps)
    np.testing.assert_allclose(found.keeps, wanted, rtol=1e-4, atol=1e-15)
    check_compiled(functools.partial(gates.of_pieces, spec, deal), without, count)


def test_what_is_steep() -> None:
    """By the sums over a chunk's halves: where one loses all that is too much, not a row sooner."""
    q = draw(1, 128, 1, 1)[0]
    decay = jnp.zeros((1, 128, 1)).at[0, 64 + 32 : 64 + 34].set(-30.0).at[0, 31:33].set(-30.0)
    spec = api.prepare(q, q, q, causal=True, decay=decay).spec
    with ato_jax.interpret():
        sums = gates.of_steps(spec, decay)
        found = gates.of_pieces(spec, mosaic.Deal(1, 1, 128, 64, 2, 132), sums)
    assert found.steep.tolist() == [[[0, 1]]]


def test_gradient_of_heads() -> None:
    """Summed up; none of what is as strong as it gets."""
    decay = jnp.array([-1.0, -jnp.inf, LEAST_DECAY - 1])
    found = gates.gradient_of_heads(decay, jnp.ones((2, 3, 5)))
    assert found.tolist() == [10.0, 0.0, 0.0]


def steep_chunks(sums: jax.Array) -> np.ndarray:
    """Which chunks are steep, [B, H, chunks]."""
    rows_of = exact(sums).reshape(*sums.shape[:2], -1, frame.C)
    middle, last = rows_of[..., frame.C // 2 - 1], rows_of[..., -1]
    return np.minimum(middle, last - middle) < -decay_limits.MOST_LOST_OF_CHUNK


def known_flows(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    sums: jax.Array,
    queries: flow_places.OfQueries,
    keys: flow_places.OfKeys,
    of_start: jax.Array | None,
) -> dict[int, np.ndarray]:
    """Y [B, H] ahead of each chunk whose states are kept."""
    count, in_piece = sums.shape[2] // frame.C, deal.rows // frame.C
    rows_of, steep = exact(sums).reshape(*sums.shape[:2], count, frame.C), steep_chunks(sums)
    middle, last = rows_of[..., frame.C // 2 - 1], rows_of[..., -1]
    of_s, of_r = np.where(steep, 0, -middle), np.where(steep, 0, middle - last)
    chunks = [chunk for chunk in range(count) if chunk % in_piece % flow_places.spacing(spec) == 0]
    known = {0: np.zeros(sums.shape[:2]) if of_start is None else exact(of_start)}
    for place, chunk in list(enumerate(chunks))[1:]:
        found = (exact(queries.kv)[:, :, place] * exact(keys.kv)[:, :, place - 1]).sum((2, 3))
        if queries.k_sum is not None:
            z = exact(queries.k_sum)[:, :, place] * exact(keys.k_sum)[:, :, place - 1]
            found += z.sum(axis=2)
        known[chunk] = found * np.exp2(of_s[:, :, chunk] + of_r[:, :, chunk - 1])
    return known


def slow_flows(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    sums: jax.Array,
    queries: flow_places.OfQueries,
    keys: flow_places.OfKeys,
    of_start: jax.Array | None,
) -> np.ndarray:
    """F at each step [B, H, T], chunk by chunk as `scans/flows.py` says it."""
    count = sums.shape[2] // frame.C
    of_chunks = (*sums.shape[:2], count, frame.C)
    reads, adds = exact(queries.flows).sum(axis=0).reshape(of_chunks), exact(keys.flows)
    passing = adds.reshape(of_chunks) - reads
    known = known_flows(spec, deal, sums, queries, keys, of_start)
    crossing = np.zeros((*sums.shape[:2], count + 1))
    for chunk, found in known.items():
        crossing[:, :, chunk] = found
    for low, high in zip(known, [*list(known)[1:], count], strict=True):
        own = passing[:, :, low:high].sum(axis=3)
        missed = crossing[:, :, high] - crossing[:, :, low] - own.sum(axis=2)
        if high == count and spec.return_state:
            missed[...] = 0
        for chunk in range(low + 1, high):
            share = missed * (chunk - low) / (high - low)
            crossing[:, :, chunk] = crossing[:, :, low] + own[:, :, : chunk - low].sum(2) + share
    crossing = np.where(steep_chunks(sums), reads.sum(axis=3), crossing[:, :, :count])
    before = np.cumsum(passing, axis=3) - passing
    found = before + exact(keys.inside).reshape(of_chunks) + crossing[..., None]
    return found.reshape(*sums.shape[:2], -1)[:, :, : spec.T]


@aot.requires_triton
@pytest.mark.parametrize(
    "B, T, G, D, rows, start, options, of_heads",
    [
        (2, 6000, 3, 128, 3072, False, {}, False),
        (2, 6000, 3, 128, 3072, False, {}, True),
        (1, 64, 20, 64, 64, True, {"layout": "bhtd"}, False),
        (1, 1500, 2, 64, 64 * 5, True, {"normalize": False, "return_state": True}, False),
        (1, 1500, 2, 64, 64 * 5, True, {"normalize": False, "return_state": True}, True),
        (1, 4480, 2, 128, 2304, False, {"return_state": True, "layout": "bhtd"}, False),
        (1, 1000, 4, 64, 1024, False, {"normalize": False}, True),
        (1, 64 * 60, 2, 64, 64 * 40, False, {}, False),
    ],
)
def test_flows(
    B: int,
    T: int,
    G: int,
    D: int,
    rows: int,
    start: bool,
    options: dict[str, Any],
    of_heads: bool,
) -> None:
    """Of arrays that have nothing to do with each other; places without a chunk are never read."""
    spec, deal, decay, sums = gated(B, T, G, D, rows, **options)
    if of_heads:  # has more places
        spec = dataclasses.replace(spec, decay="head")
    length, places = sums.shape[2], flow_places.places(spec, deal)
    missing = flow_places.chunk_of(spec, deal, np.arange(places)) >= length // frame.C
    assert missing.any() == (T == 64 * 60 or of_heads and T == 1500)
    halves = 2 // frame.heads_of_tile(spec)

    def states(seed: int) -> tuple[jax.Array, jax.Array]:
        kv, k_sum = normal(B, G, places, D, D, seed=seed), normal(B, G, places, D, seed=seed + 1)
        kv, k_sum = (x.at[:, :, missing].set(jnp.nan) for x in (kv, k_sum))
        return kv.astype(jnp.bfloat16), k_sum

    kv, k_sum = states(20)
    z = k_sum if spec.normalize else None
    queries = flow_places.OfQueries(normal(halves, B, G, length, seed=22), kv, z)
    adds, inside = (normal(B, G, length, seed=seed) for seed in (23, 24))
    keys = flow_places.OfKeys(adds, inside, *states(25))
    of_start = 10 * normal(B, G, seed=27) if start else None

    def found_of(sums: Any, queries: Any, keys: Any, of_start: Any, decay: Any) -> jax.Array:
        decay = None if of_heads else decay
        return flows.decay_flows(spec, deal, sums, queries, keys, of_start, decay)

    arrays = sums, queries, keys, of_start, decay
    with ato_jax.interpret():
        found = jax.jit(found_of)(*arrays)
    wanted = slow_flows(spec, deal, sums, queries, keys, of_start)
    if of_heads:
        wanted = np.pad(wanted, ((0, 0), (0, 0), (0, length - T)))
        wanted = wanted.reshape(B, G, -1, frame.C).sum(axis=3)
    else:
        wanted = wanted if spec.layout == "bhtd" else wanted.swapaxes(1, 2)
        wanted = np.where(exact(decay) < LEAST_DECAY, 0, wanted)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    if B == 2:
        check_compiled(found_of, *arrays)


def test_flows_of_nearly_steep_gates() -> None:
    """Of states that float32 holds, though not their products before their factors."""
    D, T = 64, 64 * 40
    spec, deal, _, _ = gated(1, T, 2, D, T)
    small = 2.0**-70
    kv, r = (small * normal(1, 2, 2, D, D, seed=seed) for seed in (30, 31))
    k_sum, u = (small * normal(1, 2, 2, D, seed=seed) for seed in (32, 33))
    nothing = jnp.zeros((1, 2, T))
    queries = flow_places.OfQueries(nothing[None], kv.astype(jnp.bfloat16), k_sum)
    keys = flow_places.OfKeys(nothing, nothing, r.astype(jnp.bfloat16), u)
    decay = jnp.full((1, T, 2), -1.25)
    with ato_jax.interpret():
        sums = gates.of_steps(spec, decay)
        found = flows.decay_flows(spec, deal, sums, queries, keys, None, decay)
    wanted = slow_flows(spec, deal, sums, queries, keys, None).swapaxes(1, 2)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    assert np.abs(wanted).max() > 0


@aot.requires_triton
@pytest.mark.parametrize("layout, T, D", [("bthd", 1024, 128), ("bhtd", 1000, 64)])
def test_flows_of_channels(layout: str, T: int, D: int) -> None:
    """dk from the keys' flow, and sums within runs from the product at each run's start on."""
    spec = api.prepare(*draw(1, 64, 1, 1, D=D)).spec
    spec = dataclasses.replace(spec, B=2, T=T, S=T, H=2, G=2, layout=layout)
    shape = (2, T, 2, D) if layout == "bthd" else (2, 2, T, D)
    runs = -(-T // by_channel.RUN)
    k = normal(*shape, seed=40).astype(jnp.bfloat16)
    of_queries, of_keys = (normal(*shape, seed=seed) for seed in (41, 42))
    crossing = normal(2, 2, runs, D, seed=43)
    function = functools.partial(channel_flows.of_flows, spec)
    with ato_jax.interpret():
        dk, d_gates = function(k, of_queries, of_keys, crossing)
    wanted_dk = exact(of_keys) / (np.maximum(exact(k), 0) + 1)
    np.testing.assert_allclose(exact(dk), wanted_dk, rtol=2**-8)
    passing = exact(of_keys) - exact(of_queries)
    passing = passing if layout == "bhtd" else passing.swapaxes(1, 2)
    passing = np.pad(passing, ((0, 0), (0, 0), (0, runs * by_channel.RUN - T), (0, 0)))
    passing = passing.reshape(2, 2, runs, by_channel.RUN, D)
    wanted = exact(crossing)[:, :, :, None] + np.cumsum(passing, axis=3) - passing
    wanted = wanted.reshape(2, 2, -1, D)[:, :, :T]
    wanted = wanted if layout == "bhtd" else wanted.swapaxes(1, 2)
    np.testing.assert_allclose(d_gates, wanted, rtol=1e-5, atol=1e-4)
    check_compiled(function, k, of_queries, of_keys, crossing)


@aot.requires_triton
@pytest.mark.parametrize("B, T, G, layout", [(2, 200, 20, "bthd"), (1, 128, 3, "bhtd")])
def test_sums_of_gates(B: int, T: int, G: int, layout: str) -> None:
    """Within chunks; of strong gates as much as leaves nothing."""
    q = draw(B, T, G, G, layout, D=64)[0]
    shape = (B, T, G) if layout == "bthd" else (B, G, T)
    decay = -3 * jnp.abs(channel.draw(*shape, seed=3)).at[0, 1, 2].set(jnp.inf)
    spec = api.prepare(q, q, q, causal=True, decay=decay, layout=layout).spec
    with ato_jax.interpret():
        found = gates.of_steps(spec, decay)
    wanted = np.maximum(exact(decay), LEAST_DECAY) * frame.LOG2_E
    wanted = np.swapaxes(wanted, 1, 2) if layout == "bthd" else wanted
    wanted = np.pad(wanted, ((0, 0), (0, 0), (0, -T % frame.C))).reshape(B, G, -1, frame.C)
    wanted = np.cumsum(wanted, axis=3).reshape(B, G, -1)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    check_compiled(functools.partial(gates.of_steps, spec), decay)
