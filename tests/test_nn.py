"""The Flax layers: nnx.MultiHeadAttention's parameters and results, masks, caches, bad inputs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import ato_jax
from ato_jax import nn
from ato_jax.nn import masks, rotary
from ato_jax.ops.linear_attention import features
from tests import layers

B, T, E, H, G = 2, 6, 12, 4, 2
SIZES = {"num_heads": H, "in_features": E, "qkv_features": 16}
LAYERS = (nn.Attention, nn.LinearAttention, nn.Performer)


def make(cls: Any, seed: int = 0, **options: Any) -> Any:
    return cls(**(SIZES | options), rngs=nnx.Rngs(seed))


def inputs(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    drawn = np.random.default_rng(seed).normal(size=shape or (B, T, E))
    return jax.device_put(drawn.astype(jnp.dtype(dtype)))


def error(actual: Any, wanted: Any) -> float:
    """Relative RMS."""
    actual, wanted = (np.asarray(array, np.float64) for array in (actual, wanted))
    assert actual.shape == wanted.shape
    return float(np.linalg.norm(actual - wanted) / np.linalg.norm(wanted))


# Parameters


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": G, "out_features": 5, "in_kv_features": 7},
        {"normalize_qk": True, "use_bias": False, "param_dtype": jnp.bfloat16},
    ],
)
@pytest.mark.parametrize("cls", LAYERS)
def test_parameters_are_flaxs(cls: Any, options: dict[str, Any]) -> None:
    """The same names, shapes, dtypes and numbers, so that checkpoints go either way."""
    flax, ours = make(nnx.MultiHeadAttention, **options), make(cls, **options)
    wanted, found = (nnx.to_pure_dict(nnx.state(layer, nnx.Param)) for layer in (flax, ours))
    assert jax.tree.structure(wanted) == jax.tree.structure(found)
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_metadata_is_kept() -> None:
    """Partitioned initialisers and metadata of variables, and a model sharded by them."""
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        layer = make(
            nn.LinearAttention,
            kernel_init=nnx.with_partitioning(
                nnx.initializers.lecun_normal(), (None, "heads", None)
            ),
            out_kernel_init=nnx.with_partitioning(
                nnx.initializers.lecun_normal(), ("heads", None, None)
            ),
            bias_metadata={"note": "bias"},
        )
        specs = nnx.get_partition_spec(nnx.state(layer))
        assert error(layer(inputs()), nnx.jit(lambda layer: layer(inputs()))(layer)) < 1e-6
    assert layer.query.bias.note == "bias"
    specs = nnx.to_pure_dict(specs)
    assert specs["value"]["kernel"] == jax.P(None, "heads", None)
    assert specs["out"]["kernel"] == jax.P("heads", None, None)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": G},
        {"normalize_qk": True, "dtype": jnp.bfloat16},
        {"param_dtype": jnp.bfloat16},
        {"use_bias": False, "out_features": 5},
    ],
)
def test_attention_is_flaxs(options: dict[str, Any]) -> None:
    """A saved state of nnx.MultiHeadAttention, loaded, gives the same outputs."""
    saved = nnx.state(flax := make(nnx.MultiHeadAttention, decode=False, **options))
    nnx.update(layer := make(nn.Attention, seed=1, **options), saved)
    x = inputs()
    wanted, found = layers.jitted(flax, x), layer(x)
    assert found.dtype == wanted.dtype
    # Flax rounds the scores to bfloat16, too.
    assert error(found, wanted) < (2e-2 if jnp.bfloat16 in options.values() else 2e-6)


def test_attention_is_flaxs_in_every_call() -> None:
    flax, layer = (
        make(cls, in_kv_features=5, decode=False) for cls in (nnx.MultiHeadAttention, nn.Attention)
    )
    q, k, v = inputs(2, 3, T, E), inputs(2, 3, 4, 5, seed=1), inputs(2, 3, 4, 5, seed=2)
    mask = np.random.default_rng(3).random((2, 3, 1, T, 4)) < 0.5
    mask[..., 0] = True
    for arguments, options in (((q, k), {}), ((q, k, v), {"mask": jnp.asarray(mask, "float32")})):
        assert (
            error(layer(*arguments, **options), layers.jitted(flax, *arguments, **options)) < 2e-6
        )
    flax, layer = (make(cls, decode=False) for cls in (nnx.MultiHeadAttention, nn.Attention))
    x = inputs()
    assert error(layer(x, is_causal=True), layers.jitted(flax, x, is_causal=True)) < 2e-6
    assert error(layer(x[0]), layer(x)[0]) < 2e-6


def test_attention_options() -> None:
    """Window, softcap and sinks reach the kernels; sinks are parameters."""
    x = inputs()
    layer = make(nn.Attention, causal=True, window=(1, 0), softcap=1.0, sinks=True)
    assert layer.sinks.shape == (H,)
    plain = make(nn.Attention, causal=True)
    changed = layer(x.at[:, 0].add(1.0))
    assert error(changed[:, 2:], layer(x)[:, 2:]) < 1e-7
    assert error(plain(x.at[:, 0].add(1.0))[:, 2:], plain(x)[:, 2:]) > 1e-4
    gradient = nnx.grad(lambda layer: (layer(x) ** 2).sum())(layer)
    assert np.all(np.asarray(gradient["sinks"][...]) != 0)


def test_rope() -> None:
    """A pair is turned by position * theta^(-2d/D), and only distances matter."""
    x = inputs(B, T, 3, 4)
    turned = rotary.rotate(x, jnp.arange(T)[None], 100.0)
    angle = np.arange(T)[:, None] * np.array([1.0, 0.1])
    pairs = np.asarray(x)[..., :2] + 1j * np.asarray(x)[..., 2:]
    pairs = pairs * np.exp(1j * angle)[:, None]
    assert error(turned, np.concatenate([pairs.real, pairs.imag], -1)) < 1e-6
    layer = make(nn.Attention, rope_theta=100.0, causal=True)
    x, positions = inputs(), jnp.broadcast_to(jnp.arange(T), (B, T))
    assert error(layer(x, input_positions=positions + 5), layer(x)) < 2e-6
    assert error(layer(x, input_positions=2 * positions), layer(x)) > 1e-3


def test_dropout() -> None:
    layer = make(nn.Attention, dropout_rate=0.5, causal=True)
    x = inputs()
    first, second = layer(x, deterministic=False), layer(x, deterministic=False)
    assert error(first, second) > 0.1
    one, same = (layer(x, deterministic=False, rngs=nnx.Rngs(dropout=3)) for _ in range(2))
    np.testing.assert_array_equal(one, same)
    still = make(nn.Attention, causal=True)
    layer.eval()
    np.testing.assert_array_equal(layer(x), still(x))


# Linear attention and its masks


@nnx.jit
def explicit(layer: Any, x: jax.Array, visible: Any) -> jax.Array:
    """Linear attention by its definition, `visible` broadcastable to [B, T, S]."""
    feature_map, _ = layer._features()
    if isinstance(feature_map, str):
        feature_map = features.NAMED[feature_map]
    q, k, v = (project(x) for project in (layer.query, layer.key, layer.value))
    k, v = (jnp.repeat(array, q.shape[2] // k.shape[2], axis=2) for array in (k, v))
    w = jnp.einsum("bthf,bshf->bhts", feature_map(q), feature_map(k), precision="highest")
    w = jnp.where(jnp.broadcast_to(visible, (B, T, T))[:, None], w, 0)
    total = jnp.maximum(w.sum(-1, keepdims=True), 1e-6) if layer.normalize is not False else 1
    scale = 1 if layer.normalize is not False else layer.head_dim**-0.5
    out = jnp.einsum("bhts,bshd->bthd", scale * w / total, v, precision="highest")
    return layer.out(out)


CAUSAL = np.tri(T, dtype=bool)
HOLES = np.array([[1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 0]], bool)
PADDING = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], bool)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (nn.LinearAttention, {"num_kv_heads": G}),
        (nn.LinearAttention, {"feature_map": "identity", "normalize": False}),
        (nn.LinearAttention, {"feature_map": jnp.cosh, "normalize": True}),
        (nn.Performer, {"num_features": 7}),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention(cls: Any, options: dict[str, Any], causal: bool) -> None:
    """By the definition, whole and with keys hidden in the middle: exact, in jit, too."""
    layer, x = make(cls, causal=causal, **options), inputs()
    order = CAUSAL if causal else np.ones((T, T), bool)
    assert error(layer(x), explicit(layer, x, order)) < 1e-5
    call = nnx.jit(lambda layer, x, mask: layer(x, mask=mask))
    wanted = explicit(layer, x, HOLES[:, None] & order)
    poisoned = jnp.where(HOLES[..., None], x, jnp.nan)
    out = call(layer, x, jnp.asarray(HOLES[:, None, None], "float32"))
    assert error(out, wanted) < 1e-5
    out = call(layer, poisoned, jnp.asarray(HOLES[:, None, None]))
    assert error(out[HOLES], wanted[HOLES]) < 1e-5


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (nnx.make_causal_mask(np.ones((B, T))), CAUSAL),
        (CAUSAL, CAUSAL),
        (nnx.make_attention_mask(PADDING, PADDING), PADDING[:, None] & PADDING[..., None]),
        (
            nnx.combine_masks(
                nnx.make_causal_mask(np.ones((B, T))), nnx.make_attention_mask(HOLES, HOLES)
            ),
            CAUSAL & HOLES[:, None] & HOLES[..., None],
        ),
    ],
    ids=["causal", "causal without batch", "padding", "both"],
)
def test_linear_attention_reads_masks(mask: Any, visible: Any) -> None:
    """What a mask with values says is done, also where it is a constant inside jit."""
    layer, x = make(nn.LinearAttention), inputs()
    wanted = explicit(layer, x, visible)
    assert error(layer(x, mask=mask), wanted) < 1e-5
    assert error(nnx.jit(lambda layer, x: layer(x, mask=mask))(layer, x), wanted) < 1e-5
    causal = make(nn.LinearAttention, causal=True)
    assert error(causal(x, mask=mask), explicit(causal, x, visible & CAUSAL)) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_hidden_keys_are_nothing(dtype: str) -> None:
    """phi of a hidden key is 0 to the last bit, and so is the gradient."""
    maps: dict[str, Any] = {name: name for name in features.NAMED}
    maps |= {"favor": features.favor(jax.random.key(0), 5, 3), "custom": jnp.exp}
    drawn = inputs(1, 4, 2, 3, dtype=dtype).at[:, 1].set(jnp.nan)
    keys = np.array([[True, False, True, True]])

    def mapped(name: str, key: jax.Array) -> jax.Array:
        hidden, _, extended = masks.hide_keys(key, key, keys, maps[name])
        return features.NAMED.get(name, extended)(hidden)

    @jax.jit
    def every(key: jax.Array) -> dict[str, Any]:
        found = {}
        for name in maps:
            out, pull = jax.vjp(functools.partial(mapped, name), key)
            # Of the first key alone, at every step: so all products have the same sizes.
            found[name] = out, mapped(name, key[:, :1]), *pull(jnp.ones_like(out))
        return found

    for name, found in every(drawn).items():
        out, alone, gradient = (np.asarray(array, np.float32) for array in found)
        assert np.all(out[:, 1] == 0), name
        np.testing.assert_array_equal(out[:, 0], alone[:, 0], name)
        assert np.all(gradient[:, 1] == 0), name
        assert np.all(np.isfinite(gradient)), name


@pytest.mark.parametrize("cls", [nn.LinearAttention, nn.Performer])
@pytest.mark.parametrize("causal", [False, True])
def test_hidden_queries_have_no_gradient(cls: Any, causal: bool) -> None:
    """NaN in steps that are hidden from both sides reaches no gradient of the others."""
    layer, x = make(cls, causal=causal), inputs()
    mask = nnx.make_attention_mask(HOLES, HOLES)
    poisoned = jnp.where(HOLES[..., None], x, jnp.nan)
    gradient_of = jax.jit(jax.grad(lambda x: jnp.sum(layer(x, mask=mask) ** 2)))
    gradient, wanted = gradient_of(poisoned), gradient_of(x)
    np.testing.assert_array_equal(gradient[~HOLES], 0)
    assert error(gradient, wanted) < 1e-6


@pytest.mark.parametrize("feature_map", ["elu1", "favor", lambda x: jnp.exp(0.5 * jnp.abs(x))])
def test_hidden_keys_in_kernels(feature_map: Any) -> None:
    """The same in Triton's kernels, interpreted."""
    options = {"feature_map": feature_map, "normalize": True}
    cls, options = (nn.Performer, {}) if feature_map == "favor" else (nn.LinearAttention, options)
    layer = make(cls, implementation="triton", causal=True, **options)
    with ato_jax.interpret():
        out = layer(inputs(), mask=HOLES[:, None, None])
    assert error(out, explicit(layer, inputs(), HOLES[:, None] & CAUSAL)) < 1e-5


def test_performer_estimates_softmax() -> None:
    """With the same parameters, many features come close to softmax attention; redraw redraws."""
    x = 0.5 * inputs()
    performer, softmax = make(nn.Performer, num_features=4096), make(nn.Attention)
    assert error(performer(x), softmax(x)) < 0.05
    before = performer.random_features[...]
    nnx.jit(lambda layer: layer.redraw(nnx.Rngs(5)))(performer)
    assert error(performer.random_features[...], before) > 0.5
    assert error(performer(x), softmax(x)) < 0.05
    assert len(jax.tree.leaves(nnx.state(performer, nnx.Param))) == 8
    saved = nnx.state(make(nnx.MultiHeadAttention, seed=3))
    nnx.update(performer, saved)


# Gradients


@pytest.mark.parametrize("cls", LAYERS)
def test_gradients(cls: Any) -> None:
    """Of every parameter, against the same layer on the reference."""
    x = inputs()
    mask = jnp.asarray(HOLES[:, None, None])
    found, wanted = (
        nnx.jit(nnx.grad(lambda layer: (layer(x, mask=mask) ** 2).sum()))(
            make(cls, causal=True, rope_theta=1e4, num_kv_heads=G, implementation=implementation)
        )
        for implementation in ("xla", "reference")
    )
    found, wanted = nnx.to_pure_dict(found), nnx.to_pure_dict(wanted)
    # A bias of all keys moves no weight of a softmax: what is left of its gradient is rounding.
    if cls is nn.Attention:
        del found["key"]["bias"], wanted["key"]["bias"]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert error(one, other) < 1e-5


# Decoding


GROUPED = {"num_kv_heads": G, "rope_theta": 1e4}
WINDOW = {"window": (2, None), "sinks": True}


@pytest.mark.parametrize(
    ("cls", "options", "dtype", "prompt"),
    [
        (nn.Attention, GROUPED, "float32", 4),
        (nn.Attention, GROUPED, "bfloat16", 0),
        (nn.Attention, WINDOW, "float32", 0),
        (nn.Attention, WINDOW, "bfloat16", 4),
        (nn.LinearAttention, GROUPED, "float32", 4),
        (nn.LinearAttention, GROUPED, "bfloat16", 0),
        (nn.LinearAttention, {"feature_map": "silu"}, "float32", 0),
        (nn.LinearAttention, {"feature_map": "silu"}, "bfloat16", 4),
        (nn.Performer, {}, "float32", 4),
        (nn.Performer, {}, "bfloat16", 0),
    ],
)
def test_decoding(cls: Any, options: dict[str, Any], dtype: str, prompt: int) -> None:
    """A prompt and then a token at a time, or all one at a time, equal the whole causal pass."""
    layer = make(cls, causal=True, dtype=jnp.dtype(dtype), **options)
    x = inputs(dtype=dtype)
    wanted = layers.jitted(layer, x)
    layer.init_cache(x.shape, dtype)
    step = functools.partial(layers.jitted, decode=True)
    found = [step(layer, x[:, :prompt])] if prompt else []
    found += [step(layer, x[:, i : i + 1]) for i in range(prompt, T)]
    assert int(layer.cache_index[...]) == T
    limit = 2e-5 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(
        np.asarray(jnp.concatenate(found, 1), np.float32),
        np.asarray(wanted, np.float32),
        rtol=limit,
        atol=limit,
    )


def test_decoding_is_flaxs() -> None:
    """Cache variables, their shapes and the outputs, step by step, with a mask over the cache."""
    flax, layer = (make(cls, num_kv_heads=G) for cls in (nnx.MultiHeadAttention, nn.Attention))
    x = inputs()
    for each in (flax, layer):
        each.init_cache(x.shape)
    mask = jnp.asarray(HOLES[:, None, None]).at[:, :, :, :2].set(True)
    for i in range(T):
        token = x[:, i : i + 1]
        wanted = layers.jitted(flax, token, decode=True, mask=mask)
        found = layer(token, decode=True, mask=mask)
        assert error(found, wanted) < 2e-6
    found, wanted = (nnx.to_pure_dict(nnx.state(each, nnx.Cache)) for each in (layer, flax))
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, wanted)


def test_decoding_linear_prompts_with_holes() -> None:
    """A padded prompt leaves nothing in the state; batch axes may be many."""
    layer = make(nn.LinearAttention)
    x = inputs()
    layer.init_cache(x.shape)
    layer(x, decode=True, mask=jnp.asarray(HOLES[:, None, None]))
    token = inputs(B, 1, E, seed=1)
    found = layer(token, decode=True)
    for b in range(B):
        alone = jnp.concatenate([x[b][HOLES[b]], token[b]])
        assert error(found[b], layer(alone, is_causal=True)[-1:]) < 1e-5
    layer.init_cache((1, *x.shape))
    again = layer(x[None], decode=True)
    assert error(again[0], layer(x, is_causal=True)) < 1e-5


@pytest.mark.parametrize("page_size", [None, T])
def test_decoding_of_no_token(page_size: int | None) -> None:
    layer, x = make(nn.Attention), inputs()
    layer.init_cache(x.shape, page_size=page_size)
    assert layer(x[:, :0], decode=True).shape == (B, 0, E)
    assert error(layer(x, decode=True), layer(x, is_causal=True)) < 1e-5


@pytest.mark.parametrize("cls", LAYERS)
def test_decoding_without_batch(cls: Any) -> None:
    layer, x = make(cls), inputs(T, E)
    layer.init_cache(x.shape)
    found = [layer(x[:4], decode=True), layer(x[4:5], decode=True), layer(x[5:], decode=True)]
    assert error(jnp.concatenate(found), layer(x, is_causal=True)) < 1e-5


def test_full_cache() -> None:
    """An error where the count is known; NaN inside jit, and never a silently wrong number."""
    layer, x = make(nn.Attention), inputs()
    layer.init_cache((B, T - 1, E))
    with pytest.raises(ValueError, match="room for 5 tokens and holds 0 or more"):
        layer(x, decode=True)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    assert np.isfinite(step(layer, x[:, :3])).all()
    with pytest.raises(ValueError, match="room for 5 tokens and holds 3 or more"):
        layer(x[:, :3], decode=True)
    assert np.isnan(step(layer, x[:, :3])).all()


# Bad inputs


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (nn.Attention, {"qkv_features": 18}, "divisible"),
        (nn.LinearAttention, {"num_kv_heads": 3}, "divisible"),
        (nn.Attention, {"attention_fn": nnx.dot_product_attention}, "attention_fn cannot"),
        (nn.Attention, {"rope_theta": 1e4, "qkv_features": 12}, "rope_theta .* even"),
        (nn.Attention, {"rope_theta": 0.0}, "rope_theta must be positive"),
        (nn.Attention, {"rope_theta": float("inf")}, "rope_theta must be finite"),
        (nn.LinearAttention, {"rope_theta": True}, "rope_theta must be a number"),
        (nn.Attention, {"num_heads": 0}, "num_heads must be an int of at least 1"),
        (nn.Attention, {"num_kv_heads": 0}, "num_kv_heads must be an int of at least 1"),
        (nn.LinearAttention, {"num_kv_heads": -2}, "num_kv_heads must be an int of at least 1"),
        (nn.Attention, {"qkv_features": 0}, "qkv_features must be an int of at least 1"),
        (nn.Attention, {"in_kv_features": 2.0}, "in_kv_features must be an int of at least 1"),
        (nn.Attention, {"causal": "no"}, "causal must be True or False"),
        (nn.Performer, {"causal": 1}, "causal must be True or False"),
        (nn.Attention, {"sinks": 1}, "sinks must be True or False"),
        (nn.Attention, {"use_bias": None}, "use_bias must be True or False"),
        (nn.Attention, {"normalize_qk": "yes"}, "normalize_qk must be True or False"),
        (nn.Attention, {"dropout_rate": 1.0}, "dropout_rate must be at least 0 and below 1"),
        (nn.Attention, {"dropout_rate": -0.1}, "dropout_rate must be at least 0 and below 1"),
        (nn.Attention, {"dropout_rate": "half"}, "dropout_rate must be a number"),
        (nn.LinearAttention, {"dropout_rate": 0.1}, "dropout_rate must be 0"),
        (
            nn.LinearAttention,
            {"feature_map": features.Favor(jnp.ones((3, 4)))},
            "ato_jax.nn.Performer",
        ),
        (nn.LinearAttention, {"feature_map": "elu"}, "feature_map must be one of 'elu1'"),
        (nn.LinearAttention, {"normalize": 1}, "normalize must be True or False"),
        (nn.LinearAttention, {"implementation": "cudnn"}, "implementation must be one of"),
        (nn.Attention, {"implementation": "flash"}, "implementation must be one of 'mosaic_gpu'"),
        (nn.Attention, {"window": 4}, r"window must be a pair \(left, right\)"),
        (nn.Attention, {"softcap": -1.0}, "softcap must be positive"),
        (nn.Attention, {"precision": "low"}, "precision must be None"),
        (nn.Attention, {"deterministic": "no"}, "deterministic must be True or False"),
        (nn.Attention, {"dtype": "float64"}, "^dtype must have at most 32 bits, got 'float64'"),
        (nn.Attention, {"dtype": "foo"}, "^dtype must be None or a dtype of floats, got 'foo'"),
        (nn.LinearAttention, {"dtype": jnp.int32}, "^dtype must be None or a dtype of floats"),
        (nn.Attention, {"param_dtype": "foo"}, "^param_dtype must be None or a dtype of floats"),
        (nn.Attention, {"sinks_init": 3}, "^sinks_init must be a function of .*, got 3"),
        (nn.Performer, {"feature_map": "relu"}, "feature_map cannot be given"),
        (nn.Performer, {"num_features": 0}, "num_features must be"),
    ],
)
def test_bad_constructors(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(cls, **options)


ADDITIVE = np.where(CAUSAL, 0, -1e9).astype("float32")


@pytest.mark.parametrize("layer_class", [nn.Attention, nn.LinearAttention])
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (ADDITIVE, "hold True and False, or 1 and 0, got values from -1e.09 to 0: .*added"),
        (jnp.asarray(ADDITIVE, "bfloat16"), "hold True and False, or 1 and 0, got values"),
        (np.where(CAUSAL, 0, -np.inf), "got values from -inf to 0"),
        (np.where(CAUSAL, 0, -10_000), "hold True and False, or 1 and 0, got values from -10000"),
        (np.zeros((1, 1, 1, T), np.float32), "not hold zeros alone, got shape"),
        (np.full((1, 1, 1, T), np.nan), "got values from nan"),
        ([[True], [True, False]], "an array"),
        ("causal", "an array of booleans"),
        (np.full((T, T), None), "an array of booleans"),
    ],
)
def test_masks_that_are_none(layer_class: Any, mask: Any, message: str) -> None:
    """A mask that is meant to be added hides all that it should show, if it is read as booleans."""
    with pytest.raises(ValueError, match=f"^mask must .*{message}"):
        make(layer_class)(inputs(), mask=mask)


@pytest.mark.parametrize("layer_class", [nn.Attention, nn.LinearAttention])
def test_masks_of_any_kind(layer_class: Any) -> None:
    """Numbers, lists and single booleans; of a traced float mask nobody knows the values."""
    layer, x = make(layer_class), inputs()
    wanted = layer(x, mask=CAUSAL)
    for mask in (CAUSAL.tolist(), CAUSAL.astype("int8"), jnp.asarray(CAUSAL, "bfloat16")):
        np.testing.assert_array_equal(layer(x, mask=mask), wanted)
    np.testing.assert_array_equal(layer(x, mask=True), layer(x))
    out, bias = layer(x, mask=False), layer.out.bias[...]
    np.testing.assert_array_equal(out, jnp.broadcast_to(bias, out.shape))
    keys = jnp.asarray(HOLES[:, None, None], "float32")
    found = nnx.jit(lambda layer, mask: layer(x, mask=mask))(layer, keys)
    assert error(found, layer(x, mask=keys)) < 1e-6


class Squared:
    """A feature map that is equal to others of its kind, and so has no hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Squared)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * x


def test_feature_maps_without_a_hash() -> None:
    layer, x = make(nn.LinearAttention, feature_map=Squared(), normalize=True), inputs()
    named = make(nn.LinearAttention, feature_map=lambda x: x**2, normalize=True)
    mask = HOLES[:, None, None]
    assert error(layer(x, mask=mask), named(x, mask=mask)) < 1e-6


ALL = np.ones((B, 1, T, T), bool)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {"sow_weights": True}, "sow_weights must be False"),
        ((), {"inputs_v": inputs()}, "inputs_v needs inputs_k"),
        ((inputs(B, T, 5),), {}, "inputs_k must be"),
        ((inputs(3, T, E),), {}, "inputs_k must be"),
        ((inputs(B, 4, E),), {"is_causal": True}, "T=6, S=4"),
        ((inputs(B, 4, E),), {"decode": True}, "T=6, S=4"),
        ((), {"decode": True}, "call init_cache"),
        ((), {"mask": np.ones((B, 1, T, 5), bool)}, "mask must broadcast"),
        ((), {"mask": np.ones((3, 1, 1, T), bool)}, "mask must broadcast"),
    ],
)
@pytest.mark.parametrize("cls", [nn.Attention, nn.LinearAttention])
def test_bad_calls(cls: Any, arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(cls)(inputs(), *arguments, **options)


@pytest.mark.parametrize("cls", [nn.Attention, nn.LatentAttention, nn.Performer])
def test_bad_rngs(cls: Any) -> None:
    """A key in place of streams, and streams without the one that is drawn from."""
    for given in (jax.random.key(0), 0, None):
        with pytest.raises(ValueError, match=r"^rngs must be an nnx\.Rngs, .*got"):
            cls(num_heads=H, in_features=E, rngs=given)
    with pytest.raises(ValueError, match="^rngs must have a stream 'params' or 'default'"):
        cls(num_heads=H, in_features=E, rngs=nnx.Rngs(dropout=0))


def test_redraw_of_a_stack() -> None:
    """Each layer has features of its own, as if it had been drawn alone."""
    keys = jax.random.split(jax.random.key(0), 3)
    stack = nnx.vmap(lambda key: make_performer(nnx.Rngs(key)))(keys)
    before = stack.random_features[...]
    stack.redraw(nnx.Rngs(1))
    after = stack.random_features[...]
    assert after.shape == before.shape and error(after, before) > 0.5
    assert error(after[0], after[1]) > 0.5 and error(after[1], after[2]) > 0.5


def make_performer(rngs: nnx.Rngs) -> nn.Performer:
    return nn.Performer(H, E, rngs=rngs)


def test_sinks_have_an_initialiser_and_metadata() -> None:
    ones = nnx.with_partitioning(nnx.initializers.ones, ("heads",))
    with jax.set_mesh(jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Auto,))):
        layer = make(nn.Attention, sinks=True, sinks_init=ones)
        specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer, nnx.Param)))
    assert specs["sinks"] == jax.P("heads")
    plain = make(nn.Attention, sinks=True, sinks_init=nnx.initializers.ones)
    np.testing.assert_array_equal(plain.sinks[...], np.ones(H))


def test_padding_that_is_repeated_for_all_heads() -> None:
    layer, x = make(nn.LinearAttention), inputs()
    padding = np.arange(T) < np.array([[2], [T - 1]])[:, :, None, None]
    wanted = layer(x, mask=padding)
    for numpy in (np, jnp):
        repeated = numpy.broadcast_to(padding, (B, H, 1, T))
        np.testing.assert_array_equal(layer(x, mask=repeated), wanted)


def test_bad_rngs_for_redraw() -> None:
    with pytest.raises(ValueError, match=r"^rngs must be an nnx\.Rngs, .*got"):
        make(nn.Performer).redraw(jax.random.key(0))


def test_bad_rngs_for_dropout() -> None:
    with pytest.raises(ValueError, match="^rngs must have a stream 'dropout' or 'default'"):
        nn.Attention(H, E, dropout_rate=0.1, rngs=nnx.Rngs(params=0))
    layer = make(nn.Attention, dropout_rate=0.1)
    with pytest.raises(ValueError, match="^rngs must be an nnx.Rngs or an nnx.RngStream, .*got"):
        layer(inputs(), deterministic=False, rngs=jax.random.key(0))
    with pytest.raises(ValueError, match="^rngs must have a stream 'dropout' or 'default'"):
        layer(inputs(), deterministic=False, rngs=nnx.Rngs(params=0))
    given = (nnx.Rngs(3), nnx.Rngs(3).default, nnx.Rngs(dropout=3))
    found = [layer(inputs(), deterministic=False, rngs=rngs) for rngs in given]
    np.testing.assert_array_equal(found[0], found[1])


def test_bad_inputs() -> None:
    x = inputs()
    for cls in (nn.Attention, nn.LinearAttention):
        with pytest.raises(ValueError, match="^inputs_q must be an array, got"):
            make(cls)(x.tolist())
        with pytest.raises(ValueError, match="^inputs_k must be an array, got"):
            make(cls)(x, "x")
        with pytest.raises(ValueError, match="^is_causal must be True or False"):
            make(cls)(x, is_causal=1)
        with pytest.raises(ValueError, match="^decode must be True or False"):
            make(cls)(x, decode="yes")
    with pytest.raises(ValueError, match="^input_positions .* rope_theta"):
        make(nn.Attention)(x, input_positions=jnp.zeros((B, T), int))
    with pytest.raises(ValueError, match="^input_positions must hold integers or floats, got"):
        make(nn.Attention, rope_theta=1e4)(x, input_positions="first")


def test_bad_positions_and_dropout() -> None:
    with pytest.raises(ValueError, match="input_positions must be"):
        make(nn.Attention, rope_theta=1e4)(inputs(), input_positions=jnp.arange(T))
    layer = make(nn.Attention, dropout_rate=0.1, keep_rngs=False)
    with pytest.raises(ValueError, match="deterministic must be"):
        layer(inputs())
    with pytest.raises(ValueError, match="rngs must be given"):
        layer(inputs(), deterministic=False)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.random.default_rng(0).random((B, 1, T, T)) < 0.5, "neither causal nor"),
        (np.tri(T, dtype=bool)[:, ::-1].copy(), "neither causal nor"),
        (ALL & np.array([True, True, False, True])[:, None, None], "neither causal nor"),
        (np.arange(B * H * T).reshape(B, H, 1, T) % 5 > 0, "head by head"),
    ],
    ids=["random", "anticausal", "by heads", "keys by heads"],
)
def test_linear_attention_refuses_masks(mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"mask .*{message}"):
        make(nn.LinearAttention)(inputs(), mask=mask)


def test_linear_attention_refuses_masks_without_values() -> None:
    call = nnx.jit(lambda layer, mask: layer(inputs(), mask=mask))
    with pytest.raises(ValueError, match="mask has an axis of queries.*causal=True"):
        call(make(nn.LinearAttention), jnp.asarray(ALL))
    with pytest.raises(ValueError, match="mask must broadcast"):
        layer = make(nn.LinearAttention)
        layer.init_cache((B, 9, E))
        layer(inputs(), decode=True, mask=np.ones((B, 1, 1, 9), bool))


@pytest.mark.parametrize("cls", LAYERS)
def test_bad_caches(cls: Any) -> None:
    layer = make(cls)
    layer.init_cache((3, T, E))
    with pytest.raises(ValueError, match=r"cache.* call init_cache\("):
        layer(inputs(), decode=True)


@pytest.mark.parametrize("cls", [nn.Attention, nn.LinearAttention])
@pytest.mark.parametrize("shape", [5, (2,), (2, 5), (2, 5, E + 1), (2, -1, E), (2, 2.5, E)])
def test_bad_shapes_of_caches(cls: Any, shape: Any) -> None:
    with pytest.raises(ValueError, match=r"^input_shape must be \(batch\.\.\., length, "):
        make(cls).init_cache(shape)


def test_bad_cache_dtype() -> None:
    layer = make(nn.Attention)
    with pytest.raises(ValueError, match="^dtype must be None or a dtype of floats, got 'foo'"):
        layer.init_cache((B, T, E), "foo")
    layer.init_cache((B, T, E), jnp.bfloat16)
    with pytest.raises(
        ValueError, match="cached_key is .* in bfloat16, but this call .* in float32"
    ):
        layer(inputs(), decode=True)


@pytest.mark.parametrize(
    ("cls", "options", "mask"),
    [
        (nn.Attention, {}, np.ones((B, 1, T, T + 1), bool)),
        (nn.Attention, {"implementation": "triton"}, None),
        (nn.LinearAttention, {"implementation": "triton"}, None),
        (nn.LinearAttention, {}, np.arange(B * H * T).reshape(B, H, 1, T) % 5 > 0),
    ],
)
def test_an_error_leaves_the_cache(cls: Any, options: dict[str, Any], mask: Any) -> None:
    """Whatever is wrong with a call, its tokens are not in the cache afterwards."""
    x = inputs()
    whole, layer = make(cls), make(cls, **options)
    for each in (whole, layer):
        each.init_cache((B, T + 2, E))
        nnx.update(each, nnx.state(whole))
    whole(x[:, :2], decode=True)
    nnx.update(layer, nnx.state(whole, nnx.Cache))
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer, nnx.Cache)))
    with pytest.raises((ValueError, ato_jax.UnsupportedError)):
        layer(x, decode=True, mask=mask)
    after = nnx.to_pure_dict(nnx.state(layer, nnx.Cache))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize("cls", [nn.LinearAttention, nn.GatedLinearAttention])
def test_one_token_honours_the_implementation(cls: Any) -> None:
    """A backend that is named runs, or is refused, for one token as for a prompt."""
    x = inputs()
    token, fastest = x[:, :1], make(cls)
    fastest.init_cache(x.shape)
    wanted = fastest(token, decode=True)
    for name in ("xla", "reference"):
        layer = make(cls, implementation=name)
        layer.init_cache(x.shape)
        assert error(layer(token, decode=True), wanted) < 1e-5
        assert error(layer.cached_kv[...], fastest.cached_kv[...]) < 1e-5
    layer = make(cls, implementation="triton")
    layer.init_cache(x.shape)
    with pytest.raises(ato_jax.UnsupportedError):
        layer(token, decode=True)


def test_an_error_of_the_last_projection_leaves_the_cache() -> None:
    layer = make(nn.LinearAttention)
    layer.init_cache((B, T, E))
    layer.out.kernel = nnx.Param(jnp.ones((H + 1, 4, E)))
    with pytest.raises(TypeError):
        layer(inputs(), decode=True)
    assert int(layer.cache_index[...]) == 0
    assert not np.any(layer.cached_kv[...])


@pytest.mark.parametrize("cls", [*LAYERS, nn.GatedLinearAttention])
def test_tabulate(cls: Any) -> None:
    """It compiles every method that is called, as public functions of arrays."""
    assert "query" in nnx.tabulate(make(cls), inputs())
