"""Gated linear attention as a layer: the recurrence, padding, the state, transforms, bad inputs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ato_jax.nn import GatedLinearAttention
from tests import layers

B, T, E, H, G = 2, 7, 12, 4, 2
GATES = ("scalar", "vector")
HOLES = np.array([[0, 0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 0, 0]], bool)


def make(seed: int = 0, **options: Any) -> GatedLinearAttention:
    """A layer with every bias at random, and short memories."""
    sizes = {"num_heads": H, "in_features": E, "qkv_features": 16, "num_kv_heads": G}
    kernel, bias = layers.normal(), layers.normal(1.0)
    sizes |= {"temperature": 2.0, "kernel_init": kernel, "gate_kernel_init": kernel}
    sizes |= {"bias_init": bias, "gate_bias_init": bias}
    return layers.on_device(GatedLinearAttention(**(sizes | options), rngs=nnx.Rngs(seed)))


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


def naive(layer: GatedLinearAttention, x: Any) -> np.ndarray:
    """One sequence [T, E], a token at a time, in float64, from the parameters alone."""
    x = np.asarray(x, np.float64)
    parameters = nnx.to_pure_dict(nnx.state(layer, nnx.Param))

    def project(name: str, x: np.ndarray) -> np.ndarray:
        parts = {part: np.asarray(array, float) for part, array in parameters[name].items()}
        return np.tensordot(x, parts["kernel"], 1) + parts.get("bias", 0)

    q, k, v = (project(name, x) for name in ("query", "key", "value"))
    if layer.gate == "scalar":
        logits = project("forget_gate", x)[..., None]
    else:
        logits = project("forget_gate_up", project("forget_gate_down", x))
    factors = (1 / (1 + np.exp(-logits))) ** (1 / layer.temperature)  # [T, G, D or 1]
    D = layer.head_dim
    state, out = np.zeros((layer.num_kv_heads, D, D)), np.zeros((len(x), layer.num_heads, D))
    for t in range(len(x)):
        state = factors[t][..., None] * state + k[t][..., None] * v[t][:, None]
        for h in range(layer.num_heads):
            out[t, h] = q[t, h] @ state[h * layer.num_kv_heads // layer.num_heads] / D**0.5
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + layer.norm.epsilon)
    out = out * np.asarray(parameters["norm"]["scale"])
    if layer.output_gate is not None:
        gate = project("output_gate", x)
        out = out * gate / (1 + np.exp(-gate))
    kernel, bias = (np.asarray(parameters["out"][part], float) for part in ("kernel", "bias"))
    return np.tensordot(out, kernel, 2) + bias


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": None, "use_output_gate": False, "norm_scale_init": layers.normal(1.0)},
        {"num_kv_heads": 1, "out_features": 5},
    ],
    ids=["grouped", "no output gate", "one key head"],
)
def test_recurrence(gate: str, options: dict[str, Any]) -> None:
    if gate == "vector":
        options = {"gate_rank": 3} | options
    layer, x = make(gate=gate, **options), inputs()
    assert error(layer(x), np.stack([naive(layer, each) for each in x])) < 1e-5


def test_decay_is_per_step_and_head_or_channel() -> None:
    """Shapes of the parameters; half is left after tau steps, or nothing where a bias says so."""
    scalar, vector = (
        nnx.to_pure_dict(nnx.state(make(gate=gate), nnx.Param)) for gate in ("scalar", "vector")
    )
    assert scalar["forget_gate"]["kernel"].shape == (E, G)
    assert vector["forget_gate_down"]["kernel"].shape == (E, 16)
    assert vector["forget_gate_up"]["kernel"].shape == (16, G, 4)
    x, zeros = inputs(), nnx.initializers.zeros
    for gate in GATES:
        layer = make(gate=gate, gate_kernel_init=zeros, gate_bias_init=zeros)
        layer.init_cache(x.shape)
        layer(x[:, :1], decode=True)
        before = layer.cached_kv[...]
        layer.value.kernel[...] = jnp.zeros_like(layer.value.kernel)
        layer.value.bias[...] = jnp.zeros_like(layer.value.bias)
        layer(x[:, 1:3], decode=True)
        assert error(layer.cached_kv[...], before / 2) < 1e-6  # tau is 2
        forgetful = make(gate=gate, gate_bias_init=nnx.initializers.constant(-1e3))
        changed = forgetful(x.at[:, 0].add(1.0))
        np.testing.assert_array_equal(changed[:, 1:], forgetful(x)[:, 1:])


@pytest.mark.parametrize("gate", GATES)
def test_hidden_steps_are_not_there(gate: str) -> None:
    """Padding on either side and holes, NaN in them too: as if the rest stood alone, in jit."""
    layer, x = make(gate=gate), inputs()
    poisoned = jnp.where(HOLES[..., None], x, jnp.nan)
    out = nnx.jit(lambda layer, mask: layer(poisoned, mask=mask))(
        layer, jnp.asarray(HOLES[:, None, None])
    )
    both = layer(x, mask=nnx.make_attention_mask(HOLES, HOLES))
    for b in range(B):
        wanted = naive(layer, x[b][HOLES[b]])
        assert error(out[b][HOLES[b]], wanted) < 1e-5
        assert error(both[b][HOLES[b]], wanted) < 1e-5


@pytest.mark.parametrize("gate", GATES)
def test_hidden_steps_give_zero(gate: str) -> None:
    """Before the last projection, whatever is in them, and for every input a finite gradient."""
    layer, x = make(gate=gate, use_bias=False), inputs()
    mask = nnx.make_attention_mask(HOLES, HOLES)
    poisoned = jnp.where(HOLES[..., None], x, jnp.nan)
    out = layer(poisoned, mask=mask)
    assert not np.any(np.asarray(out)[~HOLES])
    gradient_of = jax.jit(jax.grad(lambda x: jnp.sum(layer(x, mask=mask) ** 2)))
    gradient, wanted = gradient_of(poisoned), gradient_of(x)
    np.testing.assert_array_equal(gradient[~HOLES], 0)
    assert error(gradient, wanted) < 1e-6
    # A gate's parameters see no more of a hidden step than the rest.
    state = nnx.jit(nnx.grad(lambda layer: jnp.sum(layer(poisoned, mask=mask))))(layer)
    for name, part in nnx.to_pure_dict(state).items():
        if "gate" in name:
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(part)), name


def test_batch_axes() -> None:
    """Any number of them, or an nnx.vmap over one, also over states."""
    layer, x = make(), inputs(2, 3, T, E)
    mapped = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))
    out = layers.jitted(layer, x)
    assert error(nnx.jit(mapped)(layer, x), out) < 1e-6
    assert error(layers.jitted(layer, x[0, 0]), out[0, 0]) < 1e-6
    layer.init_cache(x.shape)
    assert layer.cached_kv.shape == (2, 3, G, 4, 4)
    assert error(layers.jitted(layer, x, decode=True), out) < 2e-5


def test_bidirectional() -> None:
    """A pair decays by the steps between, hidden ones left out: the last query sees as causal."""
    causal, both = make(), make(causal=False)
    x, mask = inputs(), jnp.asarray(HOLES[::-1, None, None])
    assert error(both(x, mask=mask)[:, -1], causal(x, mask=mask)[:, -1]) < 1e-5
    assert error(both(x)[:, 0], causal(x)[:, 0]) > 1e-2
    assert error(both(x, is_causal=True), causal(x)) < 1e-6


@pytest.mark.parametrize(
    ("gate", "options"),
    [("scalar", {"feature_map": "elu1", "rope_theta": 100.0}), ("vector", {})],
)
def test_gradients(gate: str, options: dict[str, Any]) -> None:
    """Of every parameter and the inputs, as through the reference, under jit and remat."""
    x, weight, mask = inputs(), inputs(B, T, E, seed=1), jnp.asarray(HOLES[:, None, None])

    def loss(layer: Any, x: jax.Array) -> jax.Array:
        return (nnx.remat(lambda layer, x: layer(x, mask=mask))(layer, x) * weight).sum()

    gradients = [
        nnx.jit(nnx.grad(loss, argnums=(0, 1)))(
            make(gate=gate, implementation=implementation, **options), x
        )
        for implementation in ("xla", "reference")
    ]
    found, wanted = ({"x": dx} | nnx.to_pure_dict(dlayer) for dlayer, dx in gradients)
    for path, gradient in jax.tree.leaves_with_path(wanted):
        assert np.linalg.norm(gradient) > 1e-4, path
    jax.tree.map_with_path(assert_close, found, wanted)


@pytest.mark.parametrize(("dtype", "prompt"), [("float32", 4), ("bfloat16", 0)])
@pytest.mark.parametrize(
    "options",
    [{"gate": "scalar"}, {"gate": "vector"}, {"feature_map": "elu1", "rope_theta": 100.0}],
    ids=[*GATES, "elu1"],
)
def test_decoding(options: dict[str, Any], dtype: str, prompt: int) -> None:
    """A prompt and then a token at a time, or all one at a time, equal the whole pass."""
    layer, x = make(dtype=jnp.dtype(dtype), decode=True, **options), inputs(dtype=dtype)
    wanted = layers.jitted(layer, x, decode=False)
    layer.init_cache(x.shape)
    sizes = [array.shape for array in jax.tree.leaves(nnx.state(layer, nnx.Cache))]
    step = layers.jitted
    found = [step(layer, x[:, :prompt])] if prompt else []
    found += [step(layer, x[:, i : i + 1]) for i in range(prompt, T)]
    limit = 2e-5 if dtype == "float32" else 1e-2
    assert error(jnp.concatenate(found, 1), wanted) < limit
    assert int(layer.cache_index[...]) == T
    assert sizes == [array.shape for array in jax.tree.leaves(nnx.state(layer, nnx.Cache))]


@pytest.mark.parametrize("gate", GATES)
def test_decoding_after_prompts_of_unequal_lengths(gate: str) -> None:
    """Padding leaves nothing in the state, neither of a prompt nor of a single token."""
    layer, x = make(gate=gate), inputs()
    layer.init_cache(x.shape)
    layer(x, decode=True, mask=jnp.asarray(HOLES[:, None, None]))
    token = inputs(B, 1, E, seed=1)
    only_first = jnp.asarray([[True], [False]])[:, None, None]
    first = layer(token, decode=True, mask=only_first)
    second = layer(token, decode=True)
    for b, found in ((0, first), (1, second)):
        wanted = naive(layer, np.concatenate([x[b][HOLES[b]], token[b]]))
        assert error(found[b], wanted[-1:]) < 1e-5


def test_dtypes() -> None:
    """Parameters of one dtype, arithmetic in another, sums in float32."""
    x = inputs()
    wanted = make(param_dtype=jnp.bfloat16, dtype=jnp.float32)(x)
    layer = make(param_dtype=jnp.bfloat16, dtype=jnp.float16)
    found = {leaf.dtype for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param))}
    assert found == {jnp.dtype("bfloat16")}
    out = layer(x)
    assert out.dtype == jnp.float16
    assert error(out, wanted) < 2e-2
    layer.init_cache(x.shape, jnp.float16)
    layer(x, decode=True)
    assert layer.cached_kv.dtype == layer.cached_k_sum.dtype == jnp.float32


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
    assert error(jnp.concatenate([first, second], 1), layer(x[:, :2])) < 2e-5
    other = make(seed=1)
    nnx.update(other, parameters)
    np.testing.assert_array_equal(other(x), layer(x))


@pytest.mark.parametrize("gate", GATES)
def test_stacked_layers(gate: str) -> None:
    """Made by vmap, run by scan, as a loop over the layers; their caches, too."""
    depth, x = 2, inputs()

    @nnx.split_rngs(splits=depth)
    @nnx.vmap
    def build(rngs: nnx.Rngs) -> GatedLinearAttention:
        layer = GatedLinearAttention(H, E, 16, gate=gate, rngs=rngs)
        layer.init_cache(x.shape)
        return layer

    @functools.partial(nnx.jit, static_argnums=2)
    def run(stack: GatedLinearAttention, x: jax.Array, decode: bool) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def each(layer: GatedLinearAttention, x: jax.Array) -> jax.Array:
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
    heads = nnx.with_partitioning(lecun, (None, "heads", None))
    x = inputs()
    with jax.set_mesh(mesh):
        for gate, flat in (("scalar", (None, "heads")), ("vector", (None, None))):
            layer = make(
                gate=gate,
                kernel_init=heads,
                out_kernel_init=nnx.with_partitioning(lecun, ("heads", None, None)),
                gate_kernel_init=nnx.with_partitioning(lecun, flat),
                bias_metadata={"note": "bias"},
            )
            assert np.isfinite(nnx.jit(lambda layer: layer(x))(layer)).all()
            specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer, nnx.Param)))
            assert specs["output_gate"]["kernel"] == jax.P(None, "heads", None)
            assert specs["out"]["kernel"] == jax.P("heads", None, None)
            first = "forget_gate" if gate == "scalar" else "forget_gate_down"
            assert specs[first]["kernel"] == jax.P(*flat)
            assert layer.output_gate.bias.note == "bias"
    assert specs["forget_gate_up"]["kernel"] == jax.P(None, "heads", None)


# Bad inputs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "matrix"}, "gate must be one of 'vector', 'scalar', got 'matrix'"),
        ({"gate_rank": 0}, "gate_rank must be an int of at least 1"),
        ({"gate": "scalar", "gate_rank": 16}, "gate_rank .* gate='vector'"),
        ({"use_output_gate": 1}, "use_output_gate must be True or False"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"norm_epsilon": -1.0}, "norm_epsilon must be positive"),
        ({"qkv_features": 18}, "divisible"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"dropout_rate": 0.1}, "dropout_rate must be 0"),
        ({"attention_fn": nnx.dot_product_attention}, "attention_fn cannot be given"),
    ],
)
def test_bad_constructors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_bad_calls() -> None:
    layer, x = make(), inputs()
    with pytest.raises(ValueError, match="decode needs a cache: call init_cache"):
        layer(x, decode=True)
    with pytest.raises(ValueError, match="inputs_q must be"):
        layer(x[..., :5])
    random = np.random.default_rng(0).random((B, 1, T, T)) < 0.5
    with pytest.raises(ValueError, match="mask is neither causal nor a mask of padding"):
        layer(x, mask=random)
    with pytest.raises(ValueError, match="mask hides keys head by head"):
        layer(x, mask=np.arange(B * H * T).reshape(B, H, 1, T) % 5 > 0)
    with pytest.raises(ValueError, match="mask has an axis of queries"):
        nnx.jit(lambda layer, mask: layer(x, mask=mask))(layer, random)
    layer.init_cache((B + 1, T, E))
    with pytest.raises(ValueError, match=r"the cache holds .*\(3, 2, 4, 4\).*\(2, 2, 4, 4\)"):
        layer(x, decode=True)
    layer.init_cache(x.shape)
    layer.cached_kv = nnx.Cache(layer.cached_kv[...].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="the cache holds .* in bfloat16.* float32"):
        layer(x, decode=True)
