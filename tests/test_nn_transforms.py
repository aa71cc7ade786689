"""The Flax layers under Flax's transforms: each gives what the plain call gives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ato_jax import nn

B, T, E, LAYERS = 2, 6, 12, 3
CLASSES = (nn.Attention, nn.Performer)  # which is a LinearAttention, and holds more


def make(cls: Any, rngs: nnx.Rngs | None = None, **options: Any) -> Any:
    settings: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "in_features": E}
    rngs = nnx.Rngs(0) if rngs is None else rngs
    return cls(**settings, causal=True, **options, rngs=rngs)


def inputs(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape or (B, T, E)), jnp.float32)


def assert_same(found: Any, wanted: Any) -> None:
    """Equal leaves, of pytrees, up to float32's rounding."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


def loss(layer: Any, x: jax.Array) -> jax.Array:
    return (layer(x) ** 2).sum()


@pytest.mark.parametrize("cls", CLASSES)
def test_split_and_merge(cls: Any) -> None:
    layer, x = make(cls), inputs()
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)
    assert_same(nnx.merge(graph, parameters, rest)(x), layer(x))
    # The same layer made again is the same graph, so that jit does not compile anew.
    assert hash(graph) == hash(nnx.split(make(cls), nnx.Param, ...)[0])
    abstract = nnx.eval_shape(lambda: make(cls))
    assert_same(nnx.merge(nnx.graphdef(abstract), nnx.state(layer))(x), layer(x))
    # A cache travels with the state.
    layer.init_cache(x.shape)
    graph, cache, rest = nnx.split(layer, nnx.Cache, ...)
    copy = nnx.merge(graph, cache, rest, copy=True)
    assert_same(copy(x[:, :1], decode=True), layer(x[:, :1], decode=True))
    assert_same(copy(x[:, 1:2], decode=True), layer(x[:, 1:2], decode=True))


@pytest.mark.parametrize("cls", CLASSES)
def test_jit_grad_remat(cls: Any) -> None:
    layer, x = make(cls), inputs()
    wanted = nnx.to_pure_dict(nnx.grad(loss)(layer, x))
    jitted = nnx.jit(nnx.grad(loss))(layer, x)
    assert_same(nnx.to_pure_dict(jitted), wanted)
    remat = nnx.remat(lambda layer, x: layer(x))
    again = nnx.jit(nnx.grad(lambda layer, x: (remat(layer, x) ** 2).sum()))(layer, x)
    assert_same(nnx.to_pure_dict(again), wanted)


@pytest.mark.parametrize("cls", CLASSES)
def test_vmap(cls: Any) -> None:
    """Over inputs, and over layers made in a vmap: an ensemble."""
    layer, x = make(cls), inputs(LAYERS, B, T, E)
    over_inputs = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))
    assert_same(over_inputs(layer, x), jnp.stack([layer(each) for each in x]))

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def ensemble(rngs: nnx.Rngs) -> Any:
        return make(cls, rngs)

    layers = ensemble(nnx.Rngs(0))
    found = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(layers, x[0])
    graph, state = nnx.split(layers)
    for i in range(LAYERS):
        alone = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))
        assert_same(found[i], alone(x[0]))


@pytest.mark.parametrize("cls", CLASSES)
def test_scan_over_layers(cls: Any) -> None:
    """Forward, its gradient through remat, and decoding with the caches of all layers."""

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def stack(rngs: nnx.Rngs) -> Any:
        layer = make(cls, rngs)
        layer.init_cache((B, T, E))
        return layer

    layers, x = stack(nnx.Rngs(0)), inputs()
    graph, state = nnx.split(layers)

    def loop(state: Any, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            x = x + nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))(x)
        return x

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def scanned(layer: Any, x: jax.Array) -> jax.Array:
        return x + layer(x)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def decoded(layer: Any, x: jax.Array) -> jax.Array:
        return x + layer(x, decode=True)

    wanted = loop(state, x)
    assert_same(scanned(layers, x), wanted)
    found = nnx.grad(lambda layers: (scanned(layers, x) ** 2).sum())(layers)
    by_loop = jax.grad(lambda state: (loop(state, x) ** 2).sum(), allow_int=True)(state)
    by_loop = nnx.to_pure_dict(nnx.filter_state(by_loop, nnx.Param))
    assert_same(nnx.to_pure_dict(found), by_loop)
    step = nnx.jit(decoded)
    tokens = [step(layers, x[:, :3])] + [step(layers, x[:, i : i + 1]) for i in range(3, T)]
    assert_same(jnp.concatenate(tokens, 1), wanted)


def test_dropout_in_scan() -> None:
    """Each layer of a scan drops by itself, and not at all after eval()."""

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def stack(rngs: nnx.Rngs) -> Any:
        return make(nn.Attention, rngs, dropout_rate=0.5)

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def scanned(layer: Any, x: jax.Array) -> jax.Array:
        return x + layer(x)

    layers, x = stack(nnx.Rngs(0)), inputs()
    layers.train()
    assert np.abs(scanned(layers, x) - scanned(layers, x)).max() > 1e-2
    layers.eval()
    assert_same(scanned(layers, x), scanned(layers, x))


@pytest.mark.parametrize("cls", CLASSES)
def test_training_moves_every_parameter(cls: Any) -> None:
    """A few steps of gradient descent inside jit lower a loss; what was drawn stays."""
    layer, x = make(cls), inputs()
    drawn = nnx.state(layer, nn.linear_attention.RandomFeatures)

    @nnx.jit
    def step(layer: Any) -> jax.Array:
        value, gradient = nnx.value_and_grad(lambda layer: ((layer(x) - x) ** 2).mean())(layer)
        parameters = nnx.state(layer, nnx.Param)
        nnx.update(layer, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradient))
        return value

    before = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    values = [float(step(layer)) for _ in range(5)]
    assert values == sorted(values, reverse=True)
    after = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.abs(old - new).max() > 0
    assert_same(nnx.state(layer, nn.linear_attention.RandomFeatures), drawn)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    ("dtype", "param_dtype", "given", "wanted"),
    [
        (None, "float32", "bfloat16", "float32"),
        (None, "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32", "bfloat16"),
        ("float16", "float32", "float32", "float16"),
    ],
)
def test_dtypes(cls: Any, dtype: Any, param_dtype: str, given: str, wanted: str) -> None:
    """The layer's dtype, or what inputs and parameters promote to; parameters keep theirs."""
    layer = make(cls, dtype=dtype and jnp.dtype(dtype), param_dtype=jnp.dtype(param_dtype))
    x = inputs().astype(given)
    assert jax.eval_shape(layer, x).dtype == wanted
    layer.init_cache(x.shape, wanted)
    assert layer(x[:, :2], decode=True).dtype == wanted
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param))} == {
        param_dtype
    }
