"""The layers on the delta rule: the recurrence, padding, segments, the cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ato_jax.nn
from ato_jax.nn import GatedDeltaNet, KimiDeltaAttention
from tests import layers

B, T, E, H, D, V = 2, 9, 12, 4, 6, 5
HOLES = np.array([[0, 0, 1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]], bool)
KINDS: dict[str, Any] = {
    "gated": (GatedDeltaNet, {"num_key_heads": 2}),
    "kimi": (KimiDeltaAttention, {"gate_rank": 3}),
}
both_kinds = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, seed: int = 0, **options: Any) -> Any:
    cls, own = KINDS[kind]
    sizes = {"key_size": D, "value_size": V, "kernel_init": layers.normal()}
    sizes |= {"conv_kernel_init": layers.normal(0.5), "dt_bias_init": layers.normal(1.0)}
    sizes |= {"a_log_init": layers.normal(0.5), "norm_scale_init": layers.normal(1.0)}
    layer = cls(H, E, **(sizes | own | options), rngs=nnx.Rngs(seed))
    return layers.on_device(layer)


def inputs(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    drawn = np.random.default_rng(seed).normal(size=shape or (B, T, E))
    return jax.device_put(drawn.astype(jnp.dtype(dtype)))


def error(actual: Any, wanted: Any) -> float:
    """Relative RMS."""
    actual, wanted = (np.asarray(array, np.float64) for array in (actual, wanted))
    assert actual.shape == wanted.shape
    return float(np.linalg.norm(actual - wanted) / np.linalg.norm(wanted))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def naive(layer: Any, x: Any, times: float = 1.0) -> np.ndarray:
    """One sequence [T, E], a token at a time, in float64, from the parameters alone."""
    x = np.asarray(x, np.float64)
    parameters = jax.tree.map(
        lambda array: np.asarray(array, np.float64), nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    )

    def project(name: str, x: np.ndarray) -> np.ndarray:
        found = np.tensordot(x, parameters[name]["kernel"], 1)
        return found + parameters[name].get("bias", 0)

    def convolved(name: str) -> np.ndarray:
        projected, kernel = project(name, x), parameters[f"conv_{name}"]
        found = np.zeros_like(projected)
        for t in range(len(x)):
            for w in range(min(len(kernel), t + 1)):
                found[t] += kernel[len(kernel) - 1 - w] * projected[t - w]
        return found * sigmoid(found)

    q, k, v = (convolved(name) for name in ("query", "key", "value"))
    q, k = (array / np.linalg.norm(array, axis=-1, keepdims=True) for array in (q, k))
    beta, rate = times * sigmoid(project("write", x)), np.exp(parameters["A_log"])
    if isinstance(layer, GatedDeltaNet):
        f, gate = project("forget_gate", x), project("output_gate", x)
        f, rate, gate = f[..., None], rate[:, None], gate * sigmoid(gate)
        f = f + parameters["dt_bias"][:, None]
    else:
        f, gate = (
            project(f"{name}_gate_up", project(f"{name}_gate_down", x))
            for name in ("forget", "output")
        )
        f, rate, gate = f + parameters["dt_bias"], rate[:, None], sigmoid(gate)
    factors = np.exp(-rate * np.log1p(np.exp(f)))  # [T, H, D or 1]
    state, out = np.zeros((H, D, V)), np.zeros((len(x), H, V))
    for t in range(len(x)):
        for h in range(H):
            g = h // (H // layer.num_key_heads)
            state[h] *= factors[t, h][:, None]
            state[h] += beta[t, h] * np.outer(k[t, g], v[t, h] - k[t, g] @ state[h])
            out[t, h] = q[t, g] @ state[h] / D**0.5
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + layer.norm.epsilon)
    return np.tensordot(out * parameters["norm"]["scale"] * gate, parameters["out"]["kernel"], 2)


@both_kinds
@pytest.mark.parametrize(
    "options",
    [{}, {"conv_size": 1, "out_features": 7}, {"negative_eigenvalues": True, "conv_size": 12}],
    ids=["as it is", "no convolution", "beta to 2, a long convolution"],
)
def test_recurrence(kind: str, options: dict[str, Any]) -> None:
    layer, x = make(kind, **options), inputs()
    times = 2.0 if options.get("negative_eigenvalues") else 1.0
    assert error(layers.jitted(layer, x), np.stack([naive(layer, one, times) for one in x])) < 1e-5


@both_kinds
def test_hidden_steps_are_not_there(kind: str) -> None:
    """Padding on either side and holes, NaN in them too: as if the rest stood alone."""
    layer, x = make(kind), inputs()
    poisoned = jnp.where(HOLES[..., None], x, jnp.nan)
    out = layers.jitted(layer, poisoned, mask=jnp.asarray(HOLES[:, None, None]))
    with_queries = layer(x, mask=nnx.make_attention_mask(HOLES, HOLES))
    assert not np.any(np.asarray(out)[~HOLES])
    for b in range(B):
        wanted = naive(layer, x[b][HOLES[b]])
        assert error(out[b][HOLES[b]], wanted) < 1e-5
        assert error(with_queries[b][HOLES[b]], wanted) < 1e-5
    with pytest.raises(ValueError, match="mask"):
        layer(x, mask=np.eye(T, dtype=bool)[None, None])
    with pytest.raises(ValueError, match="axis of queries.*This call is causal without a mask"):
        layers.jitted(layer, x, mask=jnp.tri(T, dtype=bool)[None, None])


def test_gradients_of_hidden_steps() -> None:
    """Zero for them, whatever they hold, and finite for all parameters."""
    layer, x = make("gated"), inputs()
    mask = jnp.asarray(HOLES[:, None, None])
    poisoned = jnp.where(HOLES[..., None], x, jnp.nan)

    @nnx.jit
    def gradients(layer: Any, x: jax.Array) -> Any:
        def loss(layer: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(layer(x, mask=mask) ** 2)

        return nnx.grad(loss, argnums=(0, 1))(layer, x)

    (parameters, found), (_, wanted) = gradients(layer, poisoned), gradients(layer, x)
    np.testing.assert_array_equal(np.asarray(found)[~HOLES], 0)
    assert error(found, wanted) < 1e-5
    for path, one in jax.tree.leaves_with_path(nnx.to_pure_dict(parameters)):
        assert np.isfinite(one).all() and np.any(one), path


@both_kinds
def test_segments(kind: str) -> None:
    """Each as if it stood alone, the convolution too; a mask may hide steps within them."""
    layer, x = make(kind), inputs()
    ids = np.array([[3, 3, 3, 1, 1, 1, 1, 3, 3], [0] * 8 + [1]], np.int32)
    out = layers.jitted(layer, x, segment_ids=ids)
    for b in range(B):
        ends = [0, *(np.flatnonzero(np.diff(ids[b])) + 1), T]
        wanted = [naive(layer, x[b][i:j]) for i, j in zip(ends, ends[1:], strict=False)]
        assert error(out[b], np.concatenate(wanted)) < 1e-5
    masked = layer(x, segment_ids=ids, mask=jnp.asarray(HOLES[:, None, None]))
    seen = HOLES[0] & (ids[0] == 1)
    assert error(masked[0][seen], naive(layer, x[0][seen])) < 1e-5


@both_kinds
@pytest.mark.parametrize(("dtype", "prompt"), [("float32", 4), ("bfloat16", 0)])
def test_decoding(kind: str, dtype: str, prompt: int) -> None:
    """A prompt and then a token at a time, or all one at a time, equal the whole pass."""
    layer, x = make(kind, dtype=jnp.dtype(dtype), decode=True), inputs(dtype=dtype)
    wanted = layers.jitted(layer, x, decode=False)
    layer.init_cache(x.shape, dtype)
    sizes = [array.shape for array in jax.tree.leaves(nnx.state(layer, nnx.Cache))]
    found = [layers.jitted(layer, x[:, :prompt])] if prompt else []
    found += [layers.jitted(layer, x[:, i : i + 1]) for i in range(prompt, T)]
    assert error(jnp.concatenate(found, 1), wanted) < (1e-5 if dtype == "float32" else 2e-2)
    assert int(layer.cache_index[...]) == T
    assert sizes == [array.shape for array in jax.tree.leaves(nnx.state(layer, nnx.Cache))]


@both_kinds
def test_decoding_after_prompts_of_unequal_lengths(kind: str) -> None:
    """Padding leaves nothing in the state or in the convolution's tail."""
    layer, x = make(kind), inputs()
    layer.init_cache(x.shape)
    layer(x, decode=True, mask=jnp.asarray(HOLES[:, None, None]))
    token = inputs(B, 1, E, seed=1)
    first = layer(token, decode=True, mask=jnp.asarray([[True], [False]])[:, None, None])
    second = layer(token, decode=True)
    for b, found in ((0, first), (1, second)):
        wanted = naive(layer, np.concatenate([x[b][HOLES[b]], token[b]]))
        assert error(found[b], wanted[-1:]) < 5e-5


def test_cache() -> None:
    """A call that fails leaves it as it was; it has to be made, for this batch."""
    layer, x = make("gated"), inputs()
    with pytest.raises(ValueError, match="init_cache"):
        layer(x, decode=True)
    layer.init_cache((3, T, E))
    with pytest.raises(ValueError, match="init_cache"):
        layer(x, decode=True)
    layer.init_cache(x.shape)
    layer(x, decode=True)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer, nnx.Cache)))
    with pytest.raises(ato_jax.UnsupportedError):
        named = make("gated", implementation="xla")
        nnx.update(named, nnx.state(layer, nnx.Param))
        named.implementation = "triton"
        named.init_cache(x.shape)
        named(x, decode=True)
    with pytest.raises(ValueError, match="segment_ids"):
        layer(x, decode=True, segment_ids=np.zeros((B, T), np.int32))
    jax.tree.map(
        np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(layer, nnx.Cache))
    )


def test_batch_axes_and_stacks() -> None:
    """Any number of batch axes, and a stack of layers by nnx.vmap and nnx.scan."""
    layer, x = make("kimi"), inputs(2, 3, T, E)
    out = layers.jitted(layer, x)
    assert error(layers.jitted(layer, x[0, 0]), out[0, 0]) < 1e-6
    layer.init_cache(x.shape)
    assert layer.cached_state.shape == (2, 3, H, D, V)
    assert error(layers.jitted(layer, x, decode=True), out) < 1e-5

    @nnx.vmap(in_axes=0)
    def stack(rngs: nnx.Rngs) -> Any:
        return GatedDeltaNet(2, E, conv_size=2, rngs=rngs)

    deep = stack(nnx.Rngs(0).split(3))

    @nnx.jit
    def run(deep: Any, x: jax.Array) -> jax.Array:
        over = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return over(lambda x, layer: x + layer(x))(x, deep)

    found = run(deep, inputs())
    assert found.shape == (B, T, E) and np.isfinite(np.asarray(found)).all()


def test_linen() -> None:
    module = ato_jax.nn.to_linen(GatedDeltaNet, num_heads=2, key_size=4, conv_size=2)
    x = inputs()
    variables = module.init(jax.random.key(0), x)
    layer = GatedDeltaNet(2, E, key_size=4, conv_size=2, rngs=nnx.Rngs(0))
    nnx.update(layer, jax.tree.map(nnx.Param, dict(variables["params"])))
    assert error(module.apply(variables, x), layer(x)) < 1e-6


def test_shapes_and_sizes_of_parameters() -> None:
    shapes = {
        kind: jax.tree.map(
            lambda array: array.shape, nnx.to_pure_dict(nnx.state(make(kind), nnx.Param))
        )
        for kind in KINDS
    }
    common = {"value": {"kernel": (E, H, V)}, "A_log": (H,), "norm": {"scale": (V,)}}
    for found in shapes.values():
        assert {name: found[name] for name in common} == common
        assert found["write"] == {"kernel": (E, H)} and found["conv_value"] == (4, H, V)
    assert shapes["gated"]["key"] == {"kernel": (E, 2, D)}
    assert shapes["gated"]["dt_bias"] == (H,) and shapes["kimi"]["dt_bias"] == (H, D)
    assert shapes["kimi"]["output_gate_up"] == {"kernel": (3, H, V), "bias": (H, V)}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_key_heads": 3}, "num_key_heads"),
        ({"num_key_heads": 0}, "num_key_heads"),
        ({"key_size": 0}, "key_size"),
        ({"conv_size": 0}, "conv_size"),
        ({"negative_eigenvalues": 1.0}, "negative_eigenvalues"),
        ({"dt_bias_init": None}, "dt_bias_init"),
        ({"dtype": "int32"}, "dtype"),
        ({"implementation": "cuda"}, "implementation"),
        ({"norm_epsilon": 0.0}, "norm_epsilon"),
        ({"context_axis": ()}, "context_axis"),
    ],
)
def test_bad_constructors(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        GatedDeltaNet(4, E, **options, rngs=nnx.Rngs(0))


def test_bad_calls() -> None:
    layer = make("gated")
    with pytest.raises(ValueError, match="key_size"):
        GatedDeltaNet(5, E, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="gate_rank"):
        KimiDeltaAttention(4, E, gate_rank=0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="inputs_q"):
        layer(inputs(B, T, E + 1))
    with pytest.raises(ValueError, match="segment_ids"):
        layer(inputs(), segment_ids=np.zeros((B, T - 1), np.int32))
    with pytest.raises(ValueError, match="context_axis"):
        make("gated", context_axis="time")(inputs())


@both_kinds
def test_nothing(kind: str) -> None:
    """No step or no sequence, as in the other layers: nothing comes out, no gradient, and a cache
    stays as it is."""
    layer = make(kind)
    for batch, length in (((B,), 0), ((0,), T), ((0,), 0), ((), 0)):
        empty = inputs(*batch, length, E)
        mask, ids = np.ones((*batch, 1, 1, length), bool), np.zeros((*batch, length), int)
        for options in ({}, {"mask": mask}, {"segment_ids": ids}):
            assert layer(empty, **options).shape == empty.shape, (empty.shape, options)
    empty = inputs(B, 0, E)
    gradients = nnx.grad(lambda layer: layer(empty).sum())(layer)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradients))
    layer.init_cache((B, T, E))
    x = inputs()
    begun = layer(x[:, :5], decode=True)
    assert layer(empty, mask=np.ones((B, 1, 1, 0), bool), decode=True).shape == empty.shape
    rest = layer(x[:, 5:], decode=True)
    assert error(jnp.concatenate([begun, rest], axis=1), layer(x)) < 1e-5
