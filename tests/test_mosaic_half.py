"""Kernels for Hopper in float16, interpreted beside the float64 reference: sums and weights beyond
float16's range, and far below."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import test_linear_channel as channel
import test_mosaic_maps_whole as whole
from test_linear_mosaic import OP, against_the_reference, options_of
from test_mosaic_lengths import poisoned
from test_mosaic_segments import ids_of

from ato_jax.ops.linear_attention import api, mosaic_gpu
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401


@newest
@pytest.mark.parametrize(
    "D, H, G, scale, options",
    [
        (128, 1, 1, 1.0, {}),
        (64, 2, 2, 30.0, {"layout": "bhtd"}),
        (128, 1, 1, 30.0, {"feature_map": "identity", "scale": 1e-4}),
        (96, 1, 1, 0.01, {"feature_map": "relu", "normalize": True, "kv_lengths": [60, 200]}),
        (128, 2, 1, 1.0, {"feature_map": "silu", "kv_lengths": [90, 200], "return_state": True}),
    ],
)
def test_output_and_gradients(
    D: int, H: int, G: int, scale: float, options: dict[str, Any]
) -> None:
    """In two pieces of two chunks, the last in part."""
    B = 2 if "kv_lengths" in options else 1
    arrays = [
        (channel.draw(B, 200, heads, D, dtype="float32", seed=seed) * scale).astype(jnp.float16)
        for seed, heads in enumerate((H, G, G))
    ]
    if options.get("layout") == "bhtd":
        arrays = [jnp.swapaxes(x, 1, 2) for x in arrays]
    if "kv_lengths" in options:
        lengths = jnp.array(options["kv_lengths"], jnp.int32)
        options, arrays = options | {"kv_lengths": lengths}, poisoned(arrays, lengths, "bthd")
    wanted = numerics.oracle(OP, *arrays, causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize(
    "D, T, S, H, sizes, options",
    [
        (128, 72, 136, 2, (1.0, 1.0, 1.0), {}),
        (128, 136, 72, 1, (30.0, 30.0, 1e4), {"layout": "bhtd"}),
        (96, 136, 72, 1, (0.01, 0.01, 1e-3), {"q_lengths": [60, 136], "kv_lengths": [72, 50]}),
        (112, 72, 72, 1, (1e3, 1e3, 1.0), {"feature_map": "softplus"}),
        (128, 72, 136, 1, (30.0, 30.0, 1e3), {"feature_map": "identity", "scale": 1e-6}),
        (128, 136, 72, 2, (1.0, 1.0, 1.0), {"feature_map": "silu", "return_state": True}),
    ],
)
def test_every_query_sees_every_key(
    D: int, T: int, S: int, H: int, sizes: tuple[float, ...], options: dict[str, Any]
) -> None:
    """In two pieces, of the sizes of q, k and v."""
    lengths = {name: jnp.array(options[name]) for name in options if name.endswith("lengths")}
    B = 2 if lengths else 1
    arrays = [
        (channel.draw(B, rows, heads, D, dtype="float32", seed=seed) * size).astype(jnp.float16)
        for seed, (rows, heads, size) in enumerate(zip((T, S, S), (H, 1, 1), sizes, strict=True))
    ]
    if options.get("layout") == "bhtd":
        arrays = [jnp.swapaxes(x, 1, 2) for x in arrays]
    whole.against_the_reference(numerics.oracle(OP, *arrays, **options | lengths))


@newest
@pytest.mark.parametrize(
    "D, V, H, T, S, sizes, options",
    [
        (256, 256, 2, 72, 136, (1.0, 1.0, 1.0), {}),
        (192, 192, 1, 136, 72, (30.0, 30.0, 1e3), {"feature_map": "relu", "layout": "bhtd"}),
        (208, 256, 1, 72, 136, (1.0, 1.0, 1.0), {"feature_map": "softplus", "return_state": True}),
        # A head whose columns end within the first 64 of its tile.
        (48, 192, 1, 72, 136, (1.0, 1.0, 1.0), {"feature_map": "softplus"}),
        (144, 144, 1, 136, 72, (0.01, 0.01, 1e-3), {"q_lengths": [60, 136], "kv_lengths": [72, 9]}),
        (256, 256, 1, 72, 136, (30.0, 30.0, 1e3), {"feature_map": "identity", "scale": 1e-6}),
        (240, 160, 2, 136, 72, (1.0, 1.0, 1.0), {"feature_map": "silu", "given": True}),
        (192, 192, 1, 72, 136, (1.0, 1.0, 1e3), {"normalize": False, "scale": 1e-4}),
    ],
)
def test_wide_heads(
    D: int, V: int, H: int, T: int, S: int, sizes: tuple[float, ...], options: dict[str, Any]
) -> None:
    """Where every query sees every key, in two pieces, of the sizes of q, k and v."""
    lengths = {name: jnp.array(options[name]) for name in options if name.endswith("lengths")}
    B, layout = 2 if lengths else 1, options.get("layout", "bthd")
    shapes = (T, H, D), (S, 1, D), (S, 1, V)
    arrays = [
        (channel.draw(B, *shape, seed=seed) * size).astype(jnp.float16)
        for seed, (shape, size) in enumerate(zip(shapes, sizes, strict=True))
    ]
    if layout == "bhtd":
        arrays = [jnp.swapaxes(x, 1, 2) for x in arrays]
    others = {name: value for name, value in options.items() if name != "given"}
    others |= options_of(B, 1, layout, "given" in options, D, V) | lengths
    whole.against_the_reference(numerics.oracle(OP, *arrays, **others))


@newest
@pytest.mark.parametrize(
    "D, H, of_queries, of_keys, options",
    [
        (128, 2, (0.0,), (-14.0,), {"return_state": True}),
        (96, 1, (-14.0, 3.0), (-20.0, 10.0, -3.0), {"feature_map": "softplus"}),
        (256, 1, (-14.0,), (-14.0,), {"return_state": True}),
        (144, 1, (-14.0, 3.0), (-20.0, 10.0, -3.0), {"feature_map": "softplus"}),
    ],
)
def test_features_below_the_least_normal_number(
    D: int, H: int, of_queries: Any, of_keys: Any, options: dict[str, Any]
) -> None:
    """Beside others that are not; queries and keys have offsets, by columns in turn."""
    arrays = [
        (channel.draw(1, rows, heads, D, seed=seed) + jnp.resize(jnp.array(offsets), D))
        for seed, (rows, heads, offsets) in enumerate(
            ((72, H, of_queries), (136, 1, of_keys), (136, 1, (0.0,)))
        )
    ]
    arrays = [x.astype(jnp.float16) for x in arrays]
    whole.against_the_reference(numerics.oracle(OP, *arrays, **options))


@newest
@pytest.mark.parametrize(
    "D, T, S, H, of_queries, of_keys, options",
    [
        (128, 136, 72, 1, -16.0, 2.0, {}),
        (128, 72, 136, 2, 2.0, -16.0, {"return_state": True, "layout": "bhtd"}),
        (96, 72, 136, 1, -12.0, -1.0, {}),
        (112, 136, 72, 1, -16.0, -1.0, {"feature_map": "softplus"}),
        (128, 136, 72, 1, -16.0, 2.0, {"feature_map": "silu"}),
        (96, 72, 136, 2, 2.0, -16.0, {"feature_map": "silu", "return_state": True}),
        (256, 72, 136, 1, 2.0, -16.0, {"return_state": True}),
        (192, 136, 72, 1, -16.0, 2.0, {"layout": "bhtd"}),
    ],
)
def test_small_features_without_a_normaliser(
    D: int, T: int, S: int, H: int, of_queries: float, of_keys: float, options: dict[str, Any]
) -> None:
    """`scale` brings out and all gradients to where float16 has all of its digits."""
    rows = (T, H, of_queries), (S, 1, of_keys), (S, 1, 0.0)
    arrays = [
        (channel.draw(1, length, heads, D, seed=seed) + offset).astype(jnp.float16)
        for seed, (length, heads, offset) in enumerate(rows)
    ]
    if options.get("layout") == "bhtd":
        arrays = [jnp.swapaxes(x, 1, 2) for x in arrays]
    of_all = {"normalize": False, "scale": 1e3} | options
    whole.against_the_reference(numerics.oracle(OP, *arrays, **of_all))


@newest
@pytest.mark.parametrize(
    "D, H, T, of_queries, of_keys, of_first_key, options",
    [
        (128, 1, 64, -16.0, 2.0, 2.0, {}),
        (128, 1, 64, 2.0, -16.0, -16.0, {}),
        (128, 1, 64, 2.0, 2.0, -16.0, {}),
        (128, 1, 64, (-20.0, 9.0), 2.0, 2.0, {}),
        # The largest features of a query's halves lie between other powers of two.
        (128, 1, 64, -3.0, 0.0, 0.0, {}),
        (96, 2, 72, -13.0, -13.0, -13.0, {"feature_map": "softplus"}),
        (64, 2, 136, -12.0, -12.0, -12.0, {"normalize": False, "scale": 1e8, "layout": "bhtd"}),
        (128, 1, 64, -16.0, 2.0, 2.0, {"feature_map": "silu", "scale": 2.0**12}),
        (128, 1, 64, 2.0, -16.0, -16.0, {"feature_map": "silu", "scale": 2.0**12}),
    ],
)
def test_causal_features_below_the_least_normal_number(
    D: int,
    H: int,
    T: int,
    of_queries: Any,
    of_keys: float,
    of_first_key: float,
    options: dict[str, Any],
) -> None:
    """Queries, by rows in turn, and keys have offsets, and the first key, which is all that the
    first query sees, one of its own."""
    G = 1 if D > 64 else H
    q, k, v = (channel.draw(1, T, heads, D, seed=seed) for seed, heads in enumerate((H, G, G)))
    k = k + jnp.where(jnp.arange(T) == 0, of_first_key, of_keys)[:, None, None]
    q = q + jnp.resize(jnp.array(of_queries), T)[:, None, None]
    arrays = [x.astype(jnp.float16) for x in (q, k, v)]
    if options.get("layout") == "bhtd":
        arrays = [jnp.swapaxes(x, 1, 2) for x in arrays]
    wanted = numerics.oracle(OP, *arrays, causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
def test_features_that_no_key_has() -> None:
    """Every ninth query has no other features: its denominator is eps."""
    q, k, v = (channel.draw(1, 72, 1, 128, seed=seed) for seed in range(3))
    dead = jnp.arange(128) < 40
    alone = jnp.arange(72)[:, None, None] % 9 == 0
    q, k = jnp.where(alone & ~dead, -1.0, q), jnp.where(dead, -1.0, k)
    arrays = [x.astype(jnp.float16) for x in (q, k, v)]
    whole.against_the_reference(numerics.oracle(OP, *arrays, feature_map="relu"))


@newest
@pytest.mark.parametrize(
    "D, H, G, name, scale, options",
    [
        (128, 2, 1, "some", 1.0, {"normalize": False, "feature_map": "silu"}),
        (128, 1, 1, "late", 30.0, {"layout": "bhtd"}),
        (64, 2, 2, "short", 1.0, {}),
        (40, 2, 2, "some", 1.0, {"feature_map": "relu", "normalize": True}),
    ],
)
def test_causal_segments(
    D: int, H: int, G: int, name: str, scale: float, options: dict[str, Any]
) -> None:
    arrays = [
        (channel.draw(1, 200, heads, D, dtype="float32", seed=seed) * scale).astype(jnp.float16)
        for seed, heads in enumerate((H, G, G))
    ]
    if options.get("layout") == "bhtd":
        arrays = [jnp.swapaxes(x, 1, 2) for x in arrays]
    wanted = numerics.oracle(OP, *arrays, causal=True, segment_ids=ids_of(name), **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


# All but steep (2^-7.85 of 2^-8 in half a chunk); a steep chunk beside others; steep ones alone.
@newest
@pytest.mark.parametrize(
    "D, H, G, T, decay, scale, options",
    [
        (128, 1, 1, 136, (-0.17,), 30.0, {}),
        (128, 2, 1, 136, "strong", 1.0, {"feature_map": "silu", "normalize": False}),
        (64, 2, 2, 136, "strong", 1.0, {"layout": "bhtd"}),
        (64, 2, 2, 136, (-0.001, -0.5), 0.01, {}),
        (96, 1, 1, 136, (-6.0,), 1.0, {"feature_map": "softplus"}),
        (128, 1, 1, 200, "mild", 1.0, {"segment_ids": "some"}),
        (48, 2, 2, 72, "mild", 1.0, {"kv_lengths": [70]}),
    ],
)
def test_gates(
    D: int, H: int, G: int, T: int, decay: Any, scale: float, options: dict[str, Any]
) -> None:
    arrays = [
        (channel.draw(1, T, heads, D, dtype="float32", seed=seed) * scale).astype(jnp.float16)
        for seed, heads in enumerate((H, G, G))
    ]
    if isinstance(decay, tuple):
        options = options | {"decay": jnp.array(decay, jnp.float32)}
    else:
        of_steps = channel.draw_gates("mild", 1, T, G)
        if decay == "strong":
            of_steps = of_steps.at[:, jnp.array([40, T - 2])].set(-50.0)
        options = options | {"decay": of_steps}
    if options.get("layout") == "bhtd":
        arrays = [jnp.swapaxes(x, 1, 2) for x in arrays]
        options = options | {"decay": jnp.swapaxes(options["decay"], 1, 2)}
    if "segment_ids" in options:
        options = options | {"segment_ids": ids_of(options["segment_ids"])}
    if "kv_lengths" in options:
        options = options | {"kv_lengths": jnp.array(options["kv_lengths"], jnp.int32)}
    wanted = numerics.oracle(OP, *arrays, causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize("D", [64, 128])
def test_gates_beside_a_state(D: int) -> None:
    arrays = [channel.draw(1, 136, 2, D, dtype="float16", seed=seed) for seed in range(3)]
    decay = channel.draw_gates("mild", 1, 136, 2).at[:, 40].set(-50.0)
    options = options_of(1, 2, "bthd", True, D) | {"decay": decay, "normalize": False}
    wanted = numerics.oracle(OP, *arrays, causal=True, **options)
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


def test_gradients_of_states_in_two_parts() -> None:
    q = jnp.zeros((1, 256, 2, 128), jnp.float16)
    decay = jnp.full((2,), -0.1)
    options: dict[str, Any] = {"causal": True, "decay": decay, "feature_map": "silu"}
    spec = api.prepare(q, q, q, **options).spec
    assert mosaic_gpu.unsupported(spec, "forward") is None
    assert "may be negative" in str(mosaic_gpu.unsupported(spec, "backward"))
