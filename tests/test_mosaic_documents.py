"""Segments without a causal mask by Hopper's kernels, a document at a time: interpreted beside the
float64 reference, compiled for a card, and on one."""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel
from test_linear_mosaic import OP, draw, kernels_of, mesh_of
from test_mosaic_lengths import poisoned

import ato_jax
from ato_jax import choosing
from ato_jax.ops.linear_attention import segments
from ato_jax.ops.linear_attention.mosaic_gpu import document_table
from ato_jax.ops.linear_attention.spec import Inputs
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401

# More documents than blocks.
FEW = {"blocks": 2}


def against_the_reference(wanted: numerics.Oracle) -> None:
    names = "mosaic_gpu", "mosaic_gpu"
    configs = {"forward_config": FEW, "backward_config": FEW}
    with ato_jax.interpret():
        found = numerics.run_backends(*names, wanted, device=channel.GPU, **configs)
    numerics.compare(found, wanted)


def ids_of(*rows: int) -> jax.Array:
    """Runs of so many rows."""
    return jnp.repeat(jnp.arange(len(rows)), jnp.array(rows))


@newest
def test_documents() -> None:
    """Of one row, of a chunk and a part of one, and of rows that are no multiple of 8."""
    ids = ids_of(1, 67, 11)[None]
    arrays = draw(1, 79, 1, 1, "bthd", D=128)
    against_the_reference(numerics.oracle(OP, *arrays, segment_ids=ids))


@newest
def test_heads_that_fill_a_tile_in_part() -> None:
    """No row is stored beyond its head, where there is the next one."""
    ids = ids_of(66, 5)[None]
    arrays = draw(1, 71, 2, 2, "bthd", D=96)
    against_the_reference(numerics.oracle(OP, *arrays, feature_map="silu", segment_ids=ids))


@newest
def test_queries_and_keys_that_differ() -> None:
    """Documents in another order, without keys, and without queries; padding is never seen. Heads
    of a pair have keys of their own, which the queries of another pair see, too."""
    of_queries = jnp.array([[5] * 30 + [7] * 20 + [5] * 15])
    of_keys = jnp.array([[7] * 66 + [9] * 3 + [5] * 11])
    options = {"q_segment_ids": of_queries, "kv_segment_ids": of_keys, "layout": "bhtd"}
    options |= {"q_lengths": jnp.array([60]), "kv_lengths": jnp.array([75])}
    q, k, v = draw(1, 65, 4, 2, "bhtd", S=80, D=64)
    (q,) = poisoned([q], options["q_lengths"], "bhtd")
    k, v = poisoned([k, v], options["kv_lengths"], "bhtd")
    against_the_reference(numerics.oracle(OP, q, k, v, feature_map="silu", **options))


@newest
@pytest.mark.parametrize(
    ("D", "layout", "options"),
    [
        (128, "bthd", {"kv_lengths": jnp.array([121])}),
        (128, "bhtd", {"feature_map": "silu", "normalize": False, "scale": 0.3}),
        (64, "bhtd", {"feature_map": "silu"}),
    ],
)
def test_documents_that_share_a_chunk(D: int, layout: str, options: dict[str, Any]) -> None:
    """Whole ones, and those at both ends that cross into another chunk; two heads see the same
    keys."""
    ids = ids_of(1, 1, 30, 40, 2, 1, 5, 3, 40, 7)[None]
    H, G = (2, 1) if D == 128 else (4, 2)
    q, k, v = draw(1, 130, H, G, layout, D=D)
    if "kv_lengths" in options:
        k, v = poisoned([k, v], options["kv_lengths"], layout)
    against_the_reference(
        numerics.oracle(OP, q, k, v, segment_ids=ids, layout=layout, **options)
    )


@newest
@pytest.mark.parametrize("D", [128, 64])
def test_pairs_ahead_of_sums(monkeypatch: pytest.MonkeyPatch, D: int) -> None:
    """Where there are many documents, those behind the first ones come in the order of their rows.
    Denominators of up to 8 rows are below eps."""
    monkeypatch.setattr(document_table, "SORTED", 1)
    ids = ids_of(3, 1, 20, 70, 5, 2, 66, 8)[None]
    H, G = (2, 1) if D == 128 else (4, 2)
    arrays = draw(1, 175, H, G, "bthd", D=D)
    against_the_reference(numerics.oracle(OP, *arrays, segment_ids=ids, eps=16.0 * D))


def test_documents_of_a_chunk_are_one_entry() -> None:
    """Documents that cross a border of chunks have an entry each, all others of a chunk share one.
    """
    random = np.random.default_rng(0)
    B, T, C = 4, 300, document_table.C
    begins = random.random((B, T)) < np.array([1.0, 0.3, 0.05, 0.01])[:, None]
    begins[:, 0] = True
    runs = np.cumsum(begins, axis=1) - 1
    nothing = jnp.zeros(0)
    inputs = Inputs(*[nothing] * 3, q_segments=jnp.array(runs), kv_segments=jnp.array(runs))
    spec: Any = types.SimpleNamespace(segments="self", B=B, T=T, S=T)
    fields, number, ids = jax.jit(functools.partial(document_table.of, spec))(inputs)
    entries, wanted = np.asarray(fields)[:, : int(number[0])].T, set()
    for entry in range(B):
        starts = np.flatnonzero(begins[entry])
        for first, end in zip(starts, [*starts[1:], T], strict=True):
            chunk = (first // C,) if first // C == (end - 1) // C else (first, end)
            wanted.add((entry, *chunk))
    found = set()
    for entry, first, size, *_ in entries.tolist():
        end = first + size
        found.add((entry, first // C) if first // C == (end - 1) // C else (entry, first, end))
    assert found == wanted and len(entries) == len(wanted)
    of_rows = np.zeros((B, T), int)
    for entry, first, size, valid, *of_keys in entries.tolist():
        of_rows[entry, first : first + size] += 1
        assert valid == size and of_keys == [first, size, size]
    assert (of_rows == 1).all()
    assert (np.asarray(ids)[:, :T] == runs).all() and (np.asarray(ids)[:, T:] == -1).all()
    assert len(entries) <= 2 * B * -(-T // C)


@pytest.mark.parametrize("with_lengths", [False, True])
def test_table(with_lengths: bool) -> None:
    """Each row is in one document, and a query sees just the keys that it is to see."""
    random = np.random.default_rng(0)
    B, T, S = 3, 23, 17
    q_ids, kv_ids = random.integers(0, 3, (B, T)), random.integers(0, 3, (B, S))
    lengths: tuple[Any, Any] = (None, None)
    if with_lengths:
        lengths = jnp.array([20, 5, 0]), jnp.array([3, 17, 9])
    of_queries, of_keys = jax.jit(segments.match_runs)(q_ids, kv_ids, *lengths)
    nothing = jnp.zeros(0)
    inputs = Inputs(
        *[nothing] * 3,
        q_segments=of_queries,
        kv_segments=of_keys,
        q_lengths=lengths[0],
        kv_lengths=lengths[1],
    )
    spec: Any = types.SimpleNamespace(segments="cross", B=B, T=T, S=S)
    fields, number, _ = jax.jit(functools.partial(document_table.of, spec))(inputs)
    q_rows, kv_rows, seen = np.zeros((B, T)), np.zeros((B, S)), np.zeros((B, T, S), bool)
    for entry, *rows in np.asarray(fields)[:, : int(number[0])].T:
        (q, q_size, q_valid), (k, k_size, k_valid) = rows[:3], rows[3:]
        q_rows[entry, q : q + q_size] += 1
        kv_rows[entry, k : k + k_size] += 1
        seen[entry, q : q + q_valid, k : k + k_valid] = True
    wanted = np.asarray(of_queries)[:, :, None] == np.asarray(of_keys)[:, None]
    if with_lengths:
        exist = (np.arange(size) < np.asarray(of)[:, None]
                 for size, of in zip((T, S), lengths, strict=True))  # fmt: skip
        of_queries, of_keys = exist
        wanted &= of_queries[:, :, None] & of_keys[:, None]
    assert (q_rows == 1).all() and (kv_rows == 1).all()
    np.testing.assert_array_equal(seen, wanted)


def test_transforms_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients on a mesh, where the table of documents is a device's own, and of a batch."""
    monkeypatch.setattr(choosing.device, "of_call", lambda arrays: channel.GPU)

    def gradients(x: jax.Array, ids: jax.Array, other: jax.Array) -> jax.Array:
        def forward(x: jax.Array) -> jax.Array:
            options: Any = {"q_segment_ids": ids, "kv_segment_ids": other}
            return ato_jax.linear_attention(x, x, x, implementation="mosaic_gpu", **options)

        out, pull = jax.vjp(forward, x)
        return pull(out)[0]

    array = jax.ShapeDtypeStruct((4, 256, 8, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct(array.shape[:2], jnp.int32)
    mesh = mesh_of("data", "heads")
    rows, axes = (jax.sharding.PartitionSpec("data", *rest) for rest in ((), (None, "heads")))
    with jax.sharding.use_abstract_mesh(mesh):
        sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(axes, rows, rows), out_specs=axes)
        same = jax.shard_map(
            lambda x, ids: gradients(x, ids, ids), mesh=mesh, in_specs=(axes, rows), out_specs=axes
        )
        assert jax.eval_shape(same, array, ids).shape == array.shape
    assert kernels_of(sharded, array, ids, ids, mesh=mesh) == 2
    batch = (jax.ShapeDtypeStruct((3, *one.shape), one.dtype) for one in (array, ids, ids))
    assert jax.eval_shape(jax.vmap(gradients), *batch).shape == (3, *array.shape)
