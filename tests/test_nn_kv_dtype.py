"""Caches of layers in 8 bits: right against caches that are not, causal, and half as large."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ato_jax
from ato_jax import nn
from tests import layers

B, T, E, H, G, D = 2, 20, 12, 4, 2, 16
PROMPT = 17  # more tokens than `decode_attention` takes
SIZES = {"num_heads": H, "in_features": E, "qkv_features": H * D, "num_kv_heads": G}
FLOAT8 = "float8_e4m3fn"
OPTIONS = {
    "rope": {"rope_theta": 10000.0},
    "window, softcap, sinks": {"window": (5, None), "softcap": 2.0, "sinks": True},
}


def make(cls: Any = nn.Attention, **options: Any) -> Any:
    drawn = {"kernel_init": layers.normal(), "bias_init": layers.normal(0.1)}
    return layers.on_device(cls(**(SIZES | drawn | options), rngs=nnx.Rngs(0)))


def inputs(dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(B, T, E)), dtype)


def decoded(layer: Any, x: jax.Array, prompt: int, dtype: Any = jnp.float32) -> jax.Array:
    """The outputs of a prompt and of the tokens after it, one at a time."""
    layer.init_cache(x.shape, dtype)
    found = [layers.jitted(layer, x[:, :prompt], decode=True)] if prompt else []
    for t in range(prompt, x.shape[1]):
        found.append(layers.jitted(layer, x[:, t : t + 1], decode=True))
    return jnp.concatenate(found, 1)


def caches(layer: Any) -> dict[Any, np.ndarray]:
    state = nnx.state(layer, nnx.Cache)
    return {path: np.asarray(array[...]) for path, array in nnx.to_flat_state(state)}


def error(found: Any, wanted: Any) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


class Rounded(nn.Attention):
    """A wide cache of keys and values that were rounded to 8 bits before."""

    def attend(self, call: Any) -> jax.Array:
        key, value = (
            (values.astype(jnp.float32) * scale[..., None]).astype(call.key.dtype)
            for values, scale in (ato_jax.quantize(x, 3) for x in (call.key, call.value))
        )
        return super().attend(call._replace(key=key, value=value))


@pytest.mark.parametrize(
    ("name", "dtype", "beside", "least", "most"),
    [
        ("rope", "float32", Rounded, 0, 2e-6),
        ("window, softcap, sinks", "bfloat16", nn.Attention, 1e-2, 5e-2),
    ],
)
def test_decoding(name: str, dtype: str, beside: Any, least: float, most: float) -> None:
    """As with keys and values that are rounded alike, and within float8's error of wide ones."""
    options = OPTIONS[name] | {"dtype": jnp.dtype(dtype)}
    layer = make(kv_dtype=FLOAT8, **options)
    x = inputs(dtype)
    found, wanted = (
        decoded(each, x, PROMPT, dtype) for each in (layer, make(beside, **options))
    )
    assert found.dtype == wanted.dtype and least <= error(found, wanted) < most
    assert layer.cached_key.dtype == FLOAT8 and layer.cached_value.dtype == FLOAT8
    assert layer.cached_key_scale.shape == layer.cached_value_scale.shape == (B, T, G)


def test_a_token_knows_no_later_one() -> None:
    """Neither its cache nor its output depends on how the sequence came, or on what follows."""
    x = inputs()
    layer = make(kv_dtype=FLOAT8, rope_theta=10000.0)
    whole = decoded(layer, x, T)
    held = caches(layer)
    steps = decoded(layer, x.at[:, -1].multiply(1e3), 0)
    assert error(steps[:, :-1], whole[:, :-1]) < 2e-6
    for name, array in caches(layer).items():
        if array.ndim:
            np.testing.assert_array_equal(array[:, :-1], held[name][:, :-1])


def test_a_mask_hides_keys_of_a_cache_in_8_bits() -> None:
    """Widened for a mask, the same numbers as read in 8 bits."""
    x = inputs()
    layer = make(kv_dtype=FLOAT8)
    plain = decoded(layer, x, PROMPT)[:, -1:]
    layer.cache_index[...] -= 1
    full = layers.jitted(layer, x[:, -1:], decode=True, mask=jnp.ones((1, 1, 1, T), bool))
    assert error(full, plain) < 2e-6
    layer.cache_index[...] -= 1
    hidden = layers.jitted(
        layer, x[:, -1:], decode=True, mask=(jnp.arange(T) > 4)[None, None, None]
    )
    assert error(hidden, plain) > 1e-2


def test_memory_is_about_half() -> None:
    sizes = []
    for kv_dtype in (None, FLOAT8):
        layer = make(kv_dtype=kv_dtype)
        layer.init_cache((B, T, E), jnp.bfloat16)
        sizes.append(sum(array.nbytes for array in caches(layer).values() if array.ndim))
    assert sizes == [2 * B * T * G * D * 2, 2 * B * T * G * (D + 4)]


def test_a_full_cache_and_a_wrong_one() -> None:
    x = inputs()
    layer = make(kv_dtype=jnp.float8_e4m3fn)
    layer.init_cache((B, T - 1, E))
    with pytest.raises(ValueError, match="room for 19 tokens and holds 0 or more"):
        layer(x, decode=True)
    assert not any(array.any() for array in caches(layer).values())
    layer.cache_index[...] = jnp.array(T - 1)
    assert jnp.isnan(layers.jitted(layer, x[:, -1:], decode=True)).all()
    layer.init_cache((B + 1, T, E))
    with pytest.raises(ValueError, match=f"cached_key is .* in {FLOAT8}.* call init_cache"):
        layer(x, decode=True)


@pytest.mark.parametrize("kv_dtype", ["float8", "int8", "float8_e5m2", jnp.bfloat16, 8, "foo"])
def test_bad_kv_dtypes(kv_dtype: Any) -> None:
    with pytest.raises(ValueError, match=f"^kv_dtype must be None or '{FLOAT8}', got "):
        make(kv_dtype=kv_dtype)


def test_what_takes_no_kv_dtype() -> None:
    for cls in (nn.LinearAttention, nn.Performer, nn.GatedLinearAttention):
        with pytest.raises(ValueError, match=f"^kv_dtype must be None: .* got '{FLOAT8}'"):
            make(cls, kv_dtype=FLOAT8)
    with pytest.raises(ValueError, match="^page_size must be None with kv_dtype"):
        make(kv_dtype=FLOAT8).init_cache((B, T, E), page_size=4)
    with pytest.raises(ValueError, match="^dtype must have 16 bits or more.*give the layer kv_dt"):
        make().init_cache((B, T, E), FLOAT8)


def test_calls_that_do_not_decode_are_as_without_it() -> None:
    """Also in Linen, and in a layer that took another one's place."""
    x = inputs()
    plain = make()
    wanted = plain(x, is_causal=True)
    assert (make(kv_dtype=FLOAT8)(x, is_causal=True) == wanted).all()
    module = nn.to_linen(nn.Attention, kv_dtype=FLOAT8, **SIZES)
    params = nnx.to_pure_dict(nnx.state(plain, nnx.Param))
    assert (module.apply({"params": params}, x, is_causal=True) == wanted).all()
    flax = make(nnx.MultiHeadAttention, decode=False)
    assert ato_jax.nn.convert_attention(flax, nn.Attention, kv_dtype=FLOAT8).kv_dtype == FLOAT8
