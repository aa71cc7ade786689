"""Causal segments by the Hopper kernels, without a decay: interpreted beside the float64 reference,
with borders between and within chunks and pieces."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_linear_mosaic import OP, against_the_reference, draw, options_of
from test_mosaic_lengths import poisoned

from ato_jax import mosaic
from ato_jax.ops.linear_attention.mosaic_gpu import chunk_borders, frame
from ato_jax.ops.linear_attention.spec import Inputs
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401

# Rows of each segment: borders at the edges of chunks and of the pieces of two chunks; several in a
# chunk; of one row each; within the last chunk, which is cut.
SEGMENTS = {
    "edges": (64, 64, 72),
    "some": (40, 1, 23, 100, 36),
    "short": (*(1,) * 70, *(3,) * 20, 70),
    "one": (200,),
    "late": (130, 10, 1, 59),
}


def ids_of(*names: str, length: int = 200) -> jax.Array:
    """[B, length]: a batch entry for each name."""
    rows = [np.repeat(np.arange(len(SEGMENTS[name])), SEGMENTS[name]) for name in names]
    return jnp.asarray(np.stack(rows)[:, :length])


@newest
@pytest.mark.parametrize(
    "D, H, G, layout, names, given, options",
    [
        (128, 1, 1, "bthd", ("some", "edges"), True, {}),
        (128, 2, 1, "bhtd", ("short",), False, {"feature_map": "silu", "normalize": False}),
        (128, 1, 1, "bhtd", ("late", "one"), False, {}),
        (64, 2, 2, "bthd", ("some", "short"), False, {}),
        (64, 2, 2, "bhtd", ("edges",), True, {"normalize": False, "feature_map": "exp"}),
        (64, 4, 2, "bthd", ("late",), True, {}),
        (96, 1, 1, "bthd", ("late",), True, {"feature_map": "relu"}),
        (40, 2, 2, "bhtd", ("some",), False, {}),
    ],
)
def test_segments_without_a_decay(
    D: int,
    H: int,
    G: int,
    layout: str,
    names: tuple[str, ...],
    given: bool,
    options: dict[str, Any],
) -> None:
    """Some calls take a state, which the first segment continues, and return that of the last."""
    B = len(names)
    options = options_of(B, G, layout, given, D) | {"segment_ids": ids_of(*names)} | options
    wanted = numerics.oracle(OP, *draw(B, 200, H, G, layout, D=D), causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize("D, H, G", [(128, 1, 1), (64, 2, 2)])
def test_lengths_and_segments(D: int, H: int, G: int) -> None:
    """Sequences end within a segment, and padding holds NaN."""
    lengths = jnp.array([90, 164], jnp.int32)
    arrays = poisoned(draw(2, 200, H, G, D=D), lengths, "bthd")
    options = options_of(2, G, "bthd", True, D) | {"segment_ids": ids_of("some", "late")}
    wanted = numerics.oracle(OP, *arrays, causal=True, kv_lengths=lengths, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize("D, H, backward", [(64, 2, "mosaic_gpu"), (128, 1, "triton")])
def test_rows_that_are_no_multiple_of_8(D: int, H: int, backward: str) -> None:
    options = {"segment_ids": ids_of("some", length=197)}
    wanted = numerics.oracle(OP, *draw(1, 197, H, H, D=D), causal=True, **options)
    against_the_reference("mosaic_gpu", backward, wanted)


@pytest.mark.parametrize("T", [192, 200])
def test_rows_of_borders(T: int) -> None:
    """What XLA makes of runs, beside loops over rows, in two pieces of two chunks."""
    lengths = [[1, 62, 1, 64, 1, T - 129], [T], [100, 28, T - 128]]
    runs = np.stack([np.repeat(np.arange(len(own)), own) for own in lengths])
    whole = np.pad(runs, ((0, 0), (0, mosaic.whole_chunks(T) - T)), mode="edge")
    spec: Any = types.SimpleNamespace(segments="self", B=3, T=T, S=T, G=2)
    deal = mosaic.Deal(3, 2, T, 2 * frame.C, 2, 3)
    nothing = jnp.zeros(())
    found = chunk_borders.of_sequence(spec, deal, Inputs(*[nothing] * 3, kv_segments=runs))
    assert found is not None
    for b, own in enumerate(whole):
        for chunk in range(whole.shape[1] // frame.C):
            first = chunk * frame.C
            rows = own[first : first + frame.C]
            ahead = own[max(first - 1, 0)]
            begins = [list(rows).index(run) for run in rows]
            ends = [frame.C - 1 - list(rows[::-1]).index(run) for run in rows]
            here = slice(first, first + frame.C)
            np.testing.assert_array_equal(found.begins[b, here], begins)
            np.testing.assert_array_equal(found.ends[b, here], ends)
            assert list(found.chunks[b, chunk]) == [sum(rows == ahead), begins[-1]]
        for piece in range(2):
            first, end = piece * deal.rows, min(T, (piece + 1) * deal.rows)
            rows, ahead = own[first:end], own[max(first - 1, 0)]
            adds, reads = first + list(rows).index(rows[-1]), first + sum(rows == ahead)
            assert list(found.adding[b, piece]) == [adds, end]
            assert list(found.reading[b, piece]) == [first, reads]
            assert list(found.keeps[b, :, piece]) == [float(ahead == rows[-1])] * 2
