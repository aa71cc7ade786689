"""Packed documents in the Flax layers: each document has the results that it has alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ato_jax import nn
from ato_jax.nn import rotary
from tests import layers

B, T, E, H, G = 2, 9, 12, 4, 2
LENGTHS = (4, 2, 3)
IDS = np.repeat([[7, 0, 5], [1, 2, 3]], LENGTHS, axis=1)  # [B, T]
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}
LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "softmax": (nn.Attention, {"causal": True, "num_kv_heads": G}),
    "softmax, rotated": (nn.Attention, {"rope_theta": 100.0}),
    "linear": (nn.LinearAttention, {"causal": True, "num_kv_heads": G}),
    "linear, rotated": (nn.LinearAttention, {"rope_theta": 100.0}),
    "linear, silu": (nn.LinearAttention, {"feature_map": "silu", "causal": True}),
    "Performer": (nn.Performer, {"causal": True}),
    "gated by channel": (nn.GatedLinearAttention, {}),
    "gated by head, both ways": (nn.GatedLinearAttention, {"gate": "scalar", "causal": False}),
    "latent": (nn.LatentAttention, {**LATENT, "causal": True}),
}
each_layer = pytest.mark.parametrize("kind", LAYERS)


def make(kind: str) -> Any:
    cls, options = LAYERS[kind]
    sizes = {} if cls is nn.LatentAttention else {"qkv_features": 16}
    sizes |= {"num_heads": H, "in_features": E, "kernel_init": layers.normal()}
    return layers.on_device(cls(**sizes, **options, rngs=nnx.Rngs(0)))


def inputs(*shape: int) -> jax.Array:
    drawn = np.random.default_rng(0).normal(size=shape or (B, T, E))
    return jax.device_put(drawn.astype("float32"))


def error(actual: Any, wanted: Any) -> float:
    """Relative RMS."""
    actual, wanted = (np.asarray(array, np.float64) for array in (actual, wanted))
    assert actual.shape == wanted.shape
    return float(np.linalg.norm(actual - wanted) / np.linalg.norm(wanted))


def one_by_one(layer: Any, x: jax.Array) -> jax.Array:
    """Each document in a call of its own."""
    parts = jnp.split(x, np.cumsum(LENGTHS)[:-1], axis=1)
    return jnp.concatenate([layer(part) for part in parts], axis=1)


@each_layer
def test_documents_are_apart(kind: str) -> None:
    """Results and gradients, which those of all documents in one differ from."""
    layer, x, weights = make(kind), inputs(), jnp.cos(inputs())

    @nnx.jit
    def found(layer: Any, x: jax.Array) -> Any:
        out = layer(x, segment_ids=IDS)
        return out, jax.grad(lambda x: (layer(x, segment_ids=IDS) * weights).sum())(x)

    @nnx.jit
    def wanted(layer: Any, x: jax.Array) -> Any:
        return one_by_one(layer, x), jax.grad(lambda x: (one_by_one(layer, x) * weights).sum())(x)

    for actual, alone in zip(found(layer, x), wanted(layer, x), strict=True):
        assert error(actual, alone) < 1e-5
    assert error(layers.jitted(layer, x), wanted(layer, x)[0]) > 1e-2


@each_layer
def test_a_document_beside_padding(kind: str) -> None:
    """Ids and a mask of keys: the last two tokens of the last document are padding."""
    layer, x = make(kind), inputs()
    seen = np.arange(T) < T - 2
    found = layers.jitted(layer, x, mask=seen[None, None, None], segment_ids=IDS)
    short = layers.jitted(layer, x[:, :-2], segment_ids=IDS[:, :-2])
    assert error(found[:, :-2], short) < 1e-5


@pytest.mark.parametrize("kind", ["linear", "latent"])
def test_other_batch_axes(kind: str) -> None:
    layer, x = make(kind), inputs()
    whole = layers.jitted(layer, x, segment_ids=IDS)
    found = layer(x[0], segment_ids=IDS[0].tolist())
    assert error(found, whole[0]) < 1e-6
    found = layers.jitted(layer, x[:, None], segment_ids=IDS[:, None])
    assert error(found, whole[:, None]) < 1e-6


def test_linen() -> None:
    module = nn.to_linen(nn.LinearAttention, num_heads=H)
    x = inputs()
    variables = module.init(jax.random.key(0), x)
    found = module.apply(variables, x, segment_ids=IDS)
    parts = jnp.split(x, np.cumsum(LENGTHS)[:-1], axis=1)
    wanted = jnp.concatenate([module.apply(variables, part) for part in parts], axis=1)
    assert error(found, wanted) < 1e-5


def test_positions_count_from_the_start_of_a_document() -> None:
    found = rotary.positions_in_segments(jnp.asarray(IDS))
    np.testing.assert_array_equal(found, np.broadcast_to([0, 1, 2, 3, 0, 1, 0, 1, 2], (B, T)))
    assert rotary.positions_in_segments(jnp.zeros((B, 0), int)).shape == (B, 0)
    # Positions that are given count as they are.
    layer, x = make("linear, rotated"), inputs()
    running = jnp.broadcast_to(jnp.arange(T), (B, T))
    restarted = layers.jitted(layer, x, segment_ids=IDS)
    again, other = (
        layers.jitted(layer, x, segment_ids=IDS, input_positions=positions)
        for positions in (found, running)
    )
    assert error(again, restarted) < 1e-6 and error(other, restarted) > 1e-3


@each_layer
def test_bad_segments(kind: str) -> None:
    layer, x = make(kind), inputs()
    for wrong, message in (
        (IDS[0], r"segment_ids must be \[batch\.\.\., T\] = \(2, 9\) and T = S, got shape \(9,\)"),
        (IDS[:, 1:], r"segment_ids must be .* got shape \(2, 8\)"),
        (IDS * 1.0, "segment_ids must hold integers, got float64"),
        ("ids", "segment_ids must hold integers"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, segment_ids=wrong)
    layer.init_cache(x.shape)
    with pytest.raises(ValueError, match="segment_ids cannot be given with decode: a cache holds"):
        layer(x, segment_ids=IDS, decode=True)
    assert int(layer.cache_index[...]) == 0
    if kind == "linear, rotated":
        with pytest.raises(ValueError, match="T = S, got shape .*, T=9, S=6"):
            layer(x, x[:, :6], segment_ids=IDS)
