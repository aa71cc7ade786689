"""Latent attention as a layer: its definition, either order of products, the cache, bad inputs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ato_jax
from ato_jax.nn import LatentAttention
from tests import layers

B, T, E, H = 2, 7, 12, 3
C, N, R, V = 16, 6, 4, 5
SIZES = {
    "kv_lora_rank": C,
    "qk_nope_head_dim": N,
    "qk_rope_head_dim": R,
    "v_head_dim": V,
    "rope_theta": 100.0,
}
HOLES = np.array([[0, 0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 0, 0]], bool)


def make(seed: int = 0, **options: Any) -> LatentAttention:
    drawn = layers.normal()
    sizes = {"num_heads": H, "in_features": E, "kernel_init": drawn, "down_kernel_init": drawn}
    return layers.on_device(LatentAttention(**(sizes | SIZES | options), rngs=nnx.Rngs(seed)))


def inputs(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    drawn = np.random.default_rng(seed).normal(size=shape or (B, T, E))
    return jax.device_put(drawn.astype(jnp.dtype(dtype)))


def error(actual: Any, wanted: Any) -> float:
    """Relative RMS."""
    actual, wanted = (np.asarray(array, np.float64) for array in (actual, wanted))
    assert actual.shape == wanted.shape
    return float(np.linalg.norm(actual - wanted) / np.linalg.norm(wanted))


def assert_close(path: Any, actual: Any, wanted: Any) -> None:
    assert error(actual, wanted) < 2e-5, path


def naive(layer: LatentAttention, x: Any, visible: Any, positions: Any = None) -> np.ndarray:
    """The definition in float64 from the parameters alone; `visible` broadcasts to [B, H, T, T]."""
    x = np.asarray(x, np.float64)
    positions = np.broadcast_to(
        np.arange(x.shape[1]) if positions is None else positions, x.shape[:2]
    )
    parameters = nnx.to_pure_dict(nnx.state(layer, nnx.Param))

    def project(name: str, x: np.ndarray) -> np.ndarray:
        parts = {part: np.asarray(array, float) for part, array in parameters[name].items()}
        return np.tensordot(
            x, parts["kernel"], parts["kernel"].ndim - 1 if name == "out" else 1
        ) + (parts.get("bias", 0))

    def normalise(name: str, x: np.ndarray) -> np.ndarray:
        scale = np.asarray(parameters[name]["scale"], float)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def turn(x: np.ndarray) -> np.ndarray:
        """[B, T, H, R] as complex numbers of its halves."""
        half = x.shape[-1] // 2
        angles = positions[..., None] * layer.rope_theta ** (-np.arange(half) / half)
        return (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, :, None]

    latent = normalise("kv_norm", project("kv_down", x))
    down = normalise("query_norm", project("query_down", x)) if layer.q_lora_rank else x
    query, key, value = project("query", down), project("key", latent), project("value", latent)
    shared = turn(project("rope_key", x)[:, :, None])
    s = np.einsum("bthn,bshn->bhts", query[..., : key.shape[-1]], key)
    s = (
        s
        + np.einsum(
            "bthr,bsr->bhts", turn(query[..., key.shape[-1] :]), shared[:, :, 0].conj()
        ).real
    )
    s = s / np.sqrt(query.shape[-1])
    visible = np.broadcast_to(visible, s.shape)
    w = np.where(visible, np.exp(s - s.max(-1, keepdims=True)), 0)
    w = w / np.maximum(w.sum(-1, keepdims=True), 1e-300)
    return project("out", np.einsum("bhts,bshv->bthv", w, value))


CAUSAL = np.tri(T, dtype=bool)
OPTIONS = [
    {},
    {"q_lora_rank": 5, "use_bias": True, "bias_init": layers.normal(1.0)},
    {"kv_lora_rank": 3, "num_heads": 1, "out_features": 4, "norm_scale_init": layers.normal(1.0)},
]


@pytest.mark.parametrize(
    "options", OPTIONS, ids=["plain", "query latent and biases", "small latent"]
)
@pytest.mark.parametrize("causal", [True, False])
def test_definition(options: dict[str, Any], causal: bool) -> None:
    layer, x = make(causal=causal, **options), inputs()
    order = CAUSAL if causal else np.ones((T, T), bool)
    assert error(layer(x), naive(layer, x, order)) < 1e-5
    assert error(layer(x, is_causal=True), naive(layer, x, CAUSAL)) < 1e-5


def test_masks() -> None:
    """Any mask, of padding or pair by pair, together with causality; rows without keys give 0."""
    layer, x = make(), inputs()
    pairs = np.random.default_rng(0).random((B, H, T, T)) < 0.5
    for mask in (HOLES[:, None, None], pairs, pairs[0, 0]):
        wanted = naive(layer, x, CAUSAL & mask)
        assert error(layer(x, mask=jnp.asarray(mask)), wanted) < 1e-5
        assert error(layer(x, mask=mask.astype("float32")), wanted) < 1e-5
    nothing = layer(x, mask=np.zeros((B, 1, 1, T), bool))
    np.testing.assert_array_equal(nothing, jnp.zeros_like(nothing))


@pytest.mark.parametrize("kv_lora_rank", [2, 64], ids=["absorbed", "expanded"])
def test_dropout(kv_lora_rank: int) -> None:
    layer, x = make(dropout_rate=0.5, kv_lora_rank=kv_lora_rank), inputs()
    assert layer._absorbs(T, T) == (kv_lora_rank == 2)
    with pytest.raises(ValueError, match="deterministic must be True or False"):
        layer(x)
    first, second = layer(x, deterministic=False), layer(x, deterministic=False)
    assert error(first, second) > 0.1
    one, same = (layer(x, deterministic=False, rngs=nnx.Rngs(dropout=3)) for _ in range(2))
    np.testing.assert_array_equal(one, same)
    still = make(kv_lora_rank=kv_lora_rank)
    np.testing.assert_array_equal(layer(x, deterministic=True), still(x))
    layer.eval()
    np.testing.assert_array_equal(layer(x), still(x))
    # The mean over many calls is the output without: before the last projection it is linear in
    # the weights.
    many = jnp.concatenate([x] * 200)
    mean = layers.jitted(layer, many, deterministic=False).reshape(200, B, T, E).mean(0)
    assert error(mean, still(x)) < 0.15
    assert error(layer(x, deterministic=False), still(x)) > 0.3


def test_dropout_is_the_same_in_both_orders() -> None:
    layer, x = make(dropout_rate=0.5, kv_lora_rank=2), inputs()
    absorbed = layer(x, deterministic=False, rngs=nnx.Rngs(dropout=3))
    layer._absorbs = lambda T, S: False
    expanded = layer(x, deterministic=False, rngs=nnx.Rngs(dropout=3))
    assert error(expanded, absorbed) < 1e-5


def test_dropout_without_kept_rngs() -> None:
    layer, x = make(dropout_rate=0.5, deterministic=False, keep_rngs=False), inputs()
    assert layer.rngs is None
    with pytest.raises(ValueError, match="rngs must be given for dropout where keep_rngs is False"):
        layer(x)
    assert np.isfinite(layer(x, rngs=nnx.Rngs(dropout=3))).all()


def test_positions() -> None:
    """They are what counts, by their differences."""
    layer, x = make(), inputs()
    positions = np.cumsum(np.random.default_rng(0).integers(0, 4, (B, T)), 1)
    found = layer(x, input_positions=jnp.asarray(positions))
    assert error(found, naive(layer, x, CAUSAL, positions)) < 1e-5
    assert error(layer(x, input_positions=jnp.asarray(positions + 9)), found) < 1e-5
    assert error(found, layer(x)) > 1e-3


def test_batch_axes() -> None:
    """Any number of them, or an nnx.vmap over one."""
    layer, x = make(), inputs(2, 3, T, E)
    mapped = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))
    out = layers.jitted(layer, x)
    assert error(nnx.jit(mapped)(layer, x), out) < 1e-6
    mask = np.random.default_rng(0).random((2, 3, 1, T, T)) < 0.7
    found = layers.jitted(layer, x, mask=mask)
    assert error(found[1], layers.jitted(layer, x[1], mask=mask[1])) < 1e-6
    assert error(layers.jitted(layer, x[0, 0]), out[0, 0]) < 1e-6
    layer.init_cache(x.shape)
    assert layer.cached_latent.shape == (2, 3, T, C + R)
    assert error(layers.jitted(layer, x, decode=True), out) < 2e-5


@pytest.mark.parametrize("kv_lora_rank", [3, 16])
def test_gradients(kv_lora_rank: int) -> None:
    """Of every parameter and the inputs, as through the reference, in either order of products."""
    x, weight, mask = inputs(), inputs(B, T, E, seed=1), jnp.asarray(HOLES[:, None, None])
    options = {"q_lora_rank": 5, "use_bias": True, "kv_lora_rank": kv_lora_rank}

    def loss(layer: Any, x: jax.Array) -> jax.Array:
        return (nnx.remat(lambda layer, x: layer(x, mask=mask))(layer, x) * weight).sum()

    gradients = [
        nnx.jit(nnx.grad(loss, argnums=(0, 1)))(make(implementation=implementation, **options), x)
        for implementation in ("xla", "reference")
    ]
    found, wanted = ({"x": dx} | nnx.to_pure_dict(dlayer) for dlayer, dx in gradients)
    for path, gradient in jax.tree.leaves_with_path(wanted):
        assert np.linalg.norm(gradient) > 1e-4, path
    jax.tree.map_with_path(assert_close, found, wanted)


def test_orders_of_products() -> None:
    """Single tokens absorb, long prompts and training expand, a small latent always absorbs."""
    layer, small = make(), make(kv_lora_rank=3)
    assert layer._absorbs(1, T) and not layer._absorbs(T, T)
    assert small._absorbs(1, T) and small._absorbs(T, T)


@pytest.mark.parametrize(("dtype", "prompt"), [("float32", 4), ("bfloat16", 0)])
@pytest.mark.parametrize(
    "options", OPTIONS, ids=["plain", "query latent and biases", "small latent"]
)
def test_decoding(options: dict[str, Any], dtype: str, prompt: int) -> None:
    """A prompt and then a token at a time, or all one at a time, equal the whole pass."""
    layer, x = make(dtype=jnp.dtype(dtype), decode=True, **options), inputs(dtype=dtype)
    wanted = layers.jitted(layer, x, decode=False)
    layer.init_cache((B, T + 1, E), dtype)
    cache = nnx.to_pure_dict(nnx.state(layer, nnx.Cache))
    assert {name: array.shape for name, array in cache.items()} == {
        "cached_latent": (B, T + 1, layer.kv_lora_rank + R),
        "cache_index": (),
    }
    step = layers.jitted
    found = [step(layer, x[:, :prompt])] if prompt else []
    found += [step(layer, x[:, i : i + 1]) for i in range(prompt, T)]
    assert error(jnp.concatenate(found, 1), wanted) < (2e-5 if dtype == "float32" else 2e-2)
    assert int(layer.cache_index[...]) == T


def test_decoding_with_a_mask() -> None:
    """One over the cache, for prompts of unequal lengths, with positions that leave padding out."""
    layer, x = make(), inputs()
    positions = np.maximum(np.cumsum(HOLES, 1) - 1, 0)
    layer.init_cache((B, T + 1, E))
    seen = jnp.asarray(np.pad(HOLES, ((0, 0), (0, 1)), constant_values=True))[:, None, None]
    layers.jitted(layer, x, decode=True, mask=seen, input_positions=positions)
    token, after = inputs(B, 1, E, seed=1), jnp.asarray(HOLES.sum(1)[:, None])
    found = layers.jitted(layer, token, decode=True, mask=seen, input_positions=after)
    for b in range(B):
        alone = np.concatenate([x[b][HOLES[b]], token[b]])[None]
        order = np.tri(alone.shape[1], dtype=bool)
        assert error(found[b], naive(layer, alone, order)[0, -1:]) < 1e-5


def test_decoding_of_no_token() -> None:
    layer, x = make(kv_lora_rank=3), inputs()
    layer.init_cache(x.shape)
    assert layer(x[:, :0], decode=True).shape == (B, 0, E)
    assert int(layer.cache_index[...]) == 0


def test_full_cache() -> None:
    """An error where the count is known; NaN inside jit, and never a silently wrong number."""
    layer, x = make(), inputs()
    layer.init_cache((B, 5, E))
    with pytest.raises(ValueError, match="room for 5 tokens and holds 0 or more"):
        layer(x, decode=True)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    assert np.isfinite(step(layer, x[:, :3])).all()
    with pytest.raises(ValueError, match="room for 5 tokens and holds 3 or more"):
        layer(x[:, :3], decode=True)
    assert np.isnan(step(layer, x[:, :3])).all()


def test_dtypes() -> None:
    """Parameters of one dtype, arithmetic and cache in another."""
    x = inputs()
    wanted = layers.jitted(make(param_dtype=jnp.bfloat16, dtype=jnp.float32), x)
    layer = make(param_dtype=jnp.bfloat16, dtype=jnp.float16)
    found = {leaf.dtype for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param))}
    assert found == {jnp.dtype("bfloat16")}
    out = layers.jitted(layer, x)
    assert out.dtype == jnp.float16
    assert error(out, wanted) < 1e-2
    layer.init_cache(x.shape, jnp.float16)
    assert layers.jitted(layer, x, decode=True).dtype == jnp.float16


def test_split_and_merge() -> None:
    layer, x = make(), inputs()
    layer.init_cache(x.shape)
    graph, parameters, cache = nnx.split(layer, nnx.Param, nnx.Cache)

    @jax.jit
    def step(cache: Any, token: jax.Array) -> Any:
        layer = nnx.merge(graph, parameters, cache)
        out = layer(token, decode=True)
        return out, nnx.state(layer, nnx.Cache)

    first, cache = step(cache, x[:, :1])
    second, cache = step(cache, x[:, 1:2])
    assert error(jnp.concatenate([first, second], 1), layers.jitted(layer, x[:, :2])) < 2e-5
    assert nnx.view(layer, decode=True).decode and not layer.decode
    other = make(seed=1)
    nnx.update(other, parameters)
    np.testing.assert_array_equal(layers.jitted(other, x), layers.jitted(layer, x))


def test_stacked_layers() -> None:
    """Made by vmap, run by scan, as a loop over the layers; their caches, too."""
    depth, x = 2, inputs()

    @nnx.split_rngs(splits=depth)
    @nnx.vmap
    def build(rngs: nnx.Rngs) -> LatentAttention:
        layer = LatentAttention(H, E, **SIZES, rngs=rngs)
        layer.init_cache(x.shape)
        return layer

    @functools.partial(nnx.jit, static_argnums=2)
    def run(stack: LatentAttention, x: jax.Array, decode: bool) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def each(layer: LatentAttention, x: jax.Array) -> jax.Array:
            return x + nnx.remat(lambda layer, x: layer(x, decode=decode))(layer, x)

        return each(stack, x)

    stack = build(nnx.Rngs(0))
    graph, state = nnx.split(stack)
    wanted = x
    for index in range(depth):
        one = nnx.merge(graph, jax.tree.map(lambda leaf, index=index: leaf[index], state))
        wanted = wanted + layers.jitted(one, wanted)
    assert error(run(stack, x, False), wanted) < 1e-6
    found = [run(stack, x[:, :5], True), *(run(stack, x[:, i : i + 1], True) for i in (5, 6))]
    assert error(jnp.concatenate(found, 1), wanted) < 2e-5


def test_metadata_is_kept() -> None:
    """Each kernel is partitioned as its initialiser says, and a sharded model runs."""
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    lecun = layers.normal()
    x = inputs()
    with jax.set_mesh(mesh):
        layer = make(
            q_lora_rank=5,
            kernel_init=nnx.with_partitioning(lecun, (None, "heads", None)),
            out_kernel_init=nnx.with_partitioning(lecun, ("heads", None, None)),
            down_kernel_init=nnx.with_partitioning(lecun, (None, None)),
        )
        assert np.isfinite(nnx.jit(lambda layer: layer(x))(layer)).all()
        layer.init_cache(x.shape)
        assert np.isfinite(nnx.jit(lambda layer: layer(x[:, :1], decode=True))(layer)).all()
        specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer, nnx.Param)))
    for name in ("query", "key", "value"):
        assert specs[name]["kernel"] == jax.P(None, "heads", None)
    for name in ("query_down", "kv_down", "rope_key"):
        assert specs[name]["kernel"] == jax.P(None, None)
    assert specs["out"]["kernel"] == jax.P("heads", None, None)


# Bad inputs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim must be even"),
        ({"num_heads": 0}, "num_heads must be an int of at least 1"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be an int of at least 1"),
        ({"q_lora_rank": 0}, "q_lora_rank must be an int of at least 1"),
        ({"v_head_dim": 2.5}, "v_head_dim must be an int of at least 1"),
        ({"rope_theta": -1.0}, "rope_theta must be positive"),
        ({"norm_epsilon": 0}, "norm_epsilon must be positive"),
        ({"causal": 1}, "causal must be True or False"),
        ({"use_bias": "no"}, "use_bias must be True or False"),
        ({"dtype": "foo"}, "^dtype must be None or a dtype of floats, got 'foo'"),
        ({"param_dtype": int}, "^param_dtype must be None or a dtype of floats, got <class 'int'>"),
        ({"decode": "no"}, "decode must be True or False"),
        ({"keep_rngs": 1}, "keep_rngs must be True or False"),
        ({"dropout_rate": 1.0}, "dropout_rate must be at least 0 and below 1"),
    ],
)
def test_bad_constructors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_bad_calls() -> None:
    layer, x = make(), inputs()
    with pytest.raises(ValueError, match="decode needs a cache: call init_cache"):
        layer(x, decode=True)
    with pytest.raises(ValueError, match=r"inputs_q must be \[batch\.\.\., length, 12\]"):
        layer(x[..., :5])
    with pytest.raises(ValueError, match="inputs_q must be an array, got"):
        layer(x.tolist())
    with pytest.raises(ValueError, match="is_causal must be True or False"):
        layer(x, is_causal=1)
    with pytest.raises(ValueError, match="mask must broadcast to"):
        layer(x, mask=np.ones((B, 1, T, T + 1), bool))
    with pytest.raises(ValueError, match="input_positions must be"):
        layer(x, input_positions=jnp.arange(T))
    layer.init_cache((B, T + 2, E))
    with pytest.raises(ValueError, match=r"mask must broadcast to .*\(2, 3, 7, 9\)"):
        layer(x, decode=True, mask=np.ones((B, 1, T, T), bool))


@pytest.mark.parametrize("options", [{"implementation": "triton"}, {}])
def test_an_error_leaves_the_cache(options: dict[str, Any]) -> None:
    layer, x = make(**options), inputs()
    layer.init_cache((B, T + 2, E))
    with pytest.raises((ValueError, ato_jax.UnsupportedError)):
        layer(x, decode=True, mask=None if options else np.ones((B, 1, T, T), bool))
    assert int(layer.cache_index[...]) == 0
    assert not np.any(layer.cached_latent[...])


def test_bad_caches() -> None:
    layer, x = make(), inputs()
    with pytest.raises(ValueError, match="^dtype must be None or a dtype of floats, got 'foo'"):
        layer.init_cache(x.shape, "foo")
    layer.init_cache((B + 1, T, E))
    with pytest.raises(ValueError, match=r"cached_latent is .*\(3, 7, 20\).*\(2, 7, 20\)"):
        layer(x, decode=True)
    layer.init_cache(x.shape, jnp.bfloat16)
    with pytest.raises(ValueError, match="cached_latent is .* in bfloat16, .* in float32"):
        layer(x, decode=True)
    layer.init_cache(x.shape)
    layer.cached_latent = nnx.Cache(jnp.zeros((B, T, C)))
    with pytest.raises(ValueError, match="cached_latent is .*init_cache"):
        layer(x, decode=True)
