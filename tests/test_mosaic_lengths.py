"""Row masks of the causal Hopper kernels, and segments, interpreted beside the float64 reference:
lengths, whose padding holds NaN, and a state behind a chunk that the sequence ends in."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import test_linear_channel as channel
from test_linear_mosaic import OP, against_the_reference, draw, options_of

from ato_jax.ops.linear_attention.mosaic_gpu import causal_pieces
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401


def decay_of(kind: str, B: int, T: int, G: int, layout: str) -> Any:
    if kind == "none":
        return None
    if kind == "head":
        return -jnp.linspace(0.05, 0.2, G)
    decay = -jnp.abs(channel.draw(B, T, G, seed=5)) * 0.2
    if kind == "steep":
        decay = decay.at[:, 70:90].set(-8.0)
    return decay if layout == "bthd" else jnp.swapaxes(decay, 1, 2)


def poisoned(arrays: list[Any], lengths: Any, layout: str) -> list[Any]:
    """NaN in the padding."""
    length = arrays[0].shape[1 if layout == "bthd" else 2]
    padded = jnp.arange(length) >= lengths[:, None]
    padded = padded[:, :, None, None] if layout == "bthd" else padded[:, None, :, None]
    return [jnp.where(padded, jnp.nan, array) for array in arrays]


@newest
@pytest.mark.parametrize(
    "D, H, layout, decay, given, options",
    [
        (128, 1, "bthd", "none", True, {}),
        (64, 2, "bhtd", "none", False, {"feature_map": "exp"}),
        (128, 1, "bhtd", "head", False, {"normalize": False}),
        (64, 2, "bthd", "step", True, {}),
        (128, 1, "bthd", "steep", True, {"feature_map": "silu", "normalize": False}),
        (96, 1, "bthd", "step", False, {}),
    ],
)
def test_lengths(
    D: int, H: int, layout: str, decay: str, given: bool, options: dict[str, Any]
) -> None:
    """Sequences end in the second piece, at a chunk's end, and before their first row; a sequence
    has two pieces of two chunks."""
    B, T = 2, 200
    lengths = jnp.array([150, 0] if given else [150, 64], jnp.int32)
    arrays = poisoned(draw(B, T, H, H, layout, D=D), lengths, layout)
    options = options_of(B, H, layout, given, D) | options
    options |= {"decay": decay_of(decay, B, T, H, layout)}
    wanted = numerics.oracle(OP, *arrays, causal=True, kv_lengths=lengths, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize("D, H, decay", [(128, 1, "none"), (64, 2, "step"), (112, 1, "head")])
def test_a_state_behind_a_cut_chunk(D: int, H: int, decay: str) -> None:
    B, T = 1, 136
    options = options_of(B, H, "bthd", True, D) | {"decay": decay_of(decay, B, T, H, "bthd")}
    wanted = numerics.oracle(OP, *draw(B, T, H, H, D=D), causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize(
    "D, H, layout, decay, padded, options",
    [
        (128, 1, "bthd", "none", False, {}),
        (128, 1, "bhtd", "step", True, {}),
        (64, 2, "bhtd", "step", True, {}),
        (96, 1, "bthd", "head", False, {"normalize": False, "feature_map": "silu"}),
    ],
)
def test_segments(
    D: int, H: int, layout: str, decay: str, padded: bool, options: dict[str, Any]
) -> None:
    """Segments have one row, or cross chunks and pieces, or begin with a chunk. A state stands
    ahead of the first segment, and the state behind the last one is returned."""
    B, T, G = 2, 200, H
    ids = jnp.repeat(jnp.arange(5), jnp.array([40, 1, 23, 100, 36]))
    ids = jnp.stack([ids, jnp.where(ids == 2, 0, ids)])
    arrays = draw(B, T, H, G, layout, D=D)
    options = options_of(B, G, layout, True, D) | {"segment_ids": ids} | options
    options |= {"decay": decay_of(decay, B, T, G, layout)}
    if padded:
        options["kv_lengths"] = lengths = jnp.array([90, 200], jnp.int32)
        arrays = poisoned(arrays, lengths, layout)
    wanted = numerics.oracle(OP, *arrays, causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize(
    "D, H, layout, sides, options",
    [
        (128, 2, "bthd", ("q", "kv"), options_of(3, 1, "bthd", True)),
        (128, 1, "bhtd", ("kv",), {"feature_map": "silu", "normalize": False}),
        (96, 1, "bthd", ("q",), {"feature_map": "exp"}),
        (192, 1, "bthd", ("q", "kv"), {}),
        (256, 2, "bthd", ("kv",), {}),
        (144, 2, "bhtd", ("q", "kv"), {"feature_map": "silu", "normalize": False}),
        (176, 1, "bhtd", ("kv",), {"feature_map": "exp", "dtype": "float16"}),
        (192, 1, "bthd", ("q",), {"normalize": False, "dtype": "float16"}),
    ],
)
def test_lengths_where_every_query_sees_every_key(
    D: int, H: int, layout: str, sides: tuple[str, ...], options: dict[str, Any]
) -> None:
    """Queries, keys or both have lengths; a query of a sequence without keys gives 0."""
    B, T, S = 3, 136, 200
    options = {"layout": layout} | options
    dtype = options.pop("dtype", "bfloat16")
    q, k, v = (x.astype(dtype) for x in draw(B, T, H, 1, layout, S=S, D=D))
    if "q" in sides:
        options["q_lengths"] = jnp.array([70, 136, 0], jnp.int32)
        (q,) = poisoned([q], options["q_lengths"], layout)
    if "kv" in sides:
        options["kv_lengths"] = jnp.array([0, 64, 150], jnp.int32)
        k, v = poisoned([k, v], options["kv_lengths"], layout)
    wanted = numerics.oracle(OP, q, k, v, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize(
    "D, H, G, layout, decay, given, options",
    [
        (128, 4, 2, "bthd", "none", True, {}),
        (96, 2, 1, "bhtd", "head", True, {"normalize": False, "feature_map": "silu"}),
        (128, 4, 1, "bthd", "step", True, {}),
        (128, 4, 2, "bhtd", "steep", True, {}),
        (64, 4, 2, "bthd", "none", True, {}),
        (64, 4, 2, "bthd", "steep", False, {"feature_map": "exp"}),
    ],
)
def test_gradients_of_groups(
    D: int,
    H: int,
    G: int,
    layout: str,
    decay: str,
    given: bool,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two pieces of two chunks, the last in part. Where a state is given, the gradients have pieces
    of one chunk. With one pair of keys and values there are two sequences, one of them shorter."""
    if given:
        monkeypatch.setattr(causal_pieces, "LEAST_CHUNKS", 1)
    B, T = 2 if G == 1 else 1, 200
    lengths = jnp.array([150, 200][:B], jnp.int32)
    arrays = poisoned(draw(B, T, H, G, layout, D=D), lengths, layout)
    options = options_of(B, G, layout, given, D) | options
    options |= {"decay": decay_of(decay, B, T, G, layout), "kv_lengths": lengths}
    wanted = numerics.oracle(OP, *arrays, causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)
