"""Into models that exist: Flax's `attention_fn`, layers replaced in place, Linen, checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.core import freeze

import ato_jax
from ato_jax import nn

B, T, S, H, G, D, E = 2, 6, 9, 4, 2, 8, 16
STATIC = ("deterministic", "dropout_rate")  # of Flax's functions, inside jit
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2}  # where Flax rounds scores and weights to bfloat16


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def qkv(*batch: int, heads: int = H, dtype: str = "float32") -> tuple[jax.Array, ...]:
    shapes = ((*batch, T, H, D), (*batch, S, heads, D), (*batch, S, heads, D))
    return tuple(normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


def close(found: Any, wanted: Any, bound: float = 1e-5) -> None:
    found, wanted = (np.asarray(array, np.float64) for array in (found, wanted))
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=bound, atol=bound)


def padding(*batch: int) -> jax.Array:
    """A mask [batch..., 1, 1, S] with holes."""
    return normal(*batch, 1, 1, S, seed=7) > -0.7


# attention_fn


@pytest.mark.parametrize("flax", [nnx.dot_product_attention, linen.dot_product_attention])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_softmax_is_flaxs(flax: Any, dtype: str, batch: tuple[int, ...]) -> None:
    """Masks of any broadcastable shape, a bias, and any number of batch axes."""
    q, k, v = qkv(*batch, dtype=dtype)
    flax = jax.jit(flax)
    bias = normal(H, 1, S, seed=5, dtype=dtype)
    mask = normal(*batch, 1, T, S, seed=6) > -1
    found = nn.softmax_attention_fn()(q, k, v, bias=bias, mask=mask)
    assert found.dtype == q.dtype
    close(
        found,
        flax(q, k, v, bias=jnp.broadcast_to(bias, (*batch, H, T, S)), mask=mask),
        BOUNDS[dtype],
    )
    found = nn.softmax_attention_fn()(q, k, v, mask=mask.astype(jnp.float32))
    close(found, flax(q, k, v, mask=mask), BOUNDS[dtype])


def test_softmax_of_a_bias_for_each_batch_entry() -> None:
    q, k, v = qkv(2, 3)
    bias = normal(3, 1, T, S, seed=5)
    wanted = linen.dot_product_attention(q, k, v, bias=bias)
    close(nn.softmax_attention_fn()(q, k, v, bias=bias), wanted)


def test_softmax_in_a_dtype() -> None:
    q, k, v = qkv(B)
    found = nn.softmax_attention_fn()(q, k, v, dtype=jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    close(found, linen.dot_product_attention(q, k, v, dtype=jnp.bfloat16), BOUNDS["bfloat16"])


def test_softmax_grouped_and_causal_from_the_top_left() -> None:
    q, k, v = qkv(B, heads=G)
    wanted = nnx.dot_product_attention(q, k, v, is_causal=True)
    close(nn.softmax_attention_fn()(q, k, v, is_causal=True), wanted)
    last = nn.softmax_attention_fn(causal=True)(q, k, v)
    close(last, ato_jax.attention(q, k, v, causal=True))


def test_softmax_options() -> None:
    q, k, v = qkv(B)
    options: dict[str, Any] = {"window": (2, 1), "softcap": 3.0, "scale": 0.2}
    close(nn.softmax_attention_fn(**options)(q, k, v), ato_jax.attention(q, k, v, **options))


@pytest.mark.parametrize("flax", [nnx.dot_product_attention, linen.dot_product_attention])
def test_broadcast_dropout_is_flaxs(flax: Any) -> None:
    """The same weights are dropped, for all of the batch and all heads, with Flax's gradients."""
    q, k, v = qkv(B)
    drop: dict[str, Any] = {
        "dropout_rng": jax.random.key(3),
        "dropout_rate": 0.4,
        "mask": padding(B),
        "deterministic": False,
    }

    def loss(attend: Any, *qkv: jax.Array) -> jax.Array:
        return (attend(*qkv, **drop) ** 2).sum()

    ours, flax = nn.softmax_attention_fn(), jax.jit(flax, static_argnames=STATIC)
    close(ours(q, k, v, **drop), flax(q, k, v, **drop))
    gradients = [jax.grad(loss, (1, 2, 3))(attend, q, k, v) for attend in (ours, flax)]
    for found, wanted in zip(*gradients, strict=True):
        close(found, wanted, 1e-4)
    drop["deterministic"] = True
    close(ours(q, k, v, **drop), flax(q, k, v, **drop))


def test_broadcast_dropout_of_every_key() -> None:
    """A query left with no key, and one that saw none before, give 0 and finite gradients."""
    q, k, v = qkv(B)
    mask = jnp.ones((1, 1, T, S), bool).at[:, :, 0].set(False)

    def loss(q: jax.Array) -> jax.Array:
        return nn.softmax_attention_fn()(
            q, k, v, mask=mask, dropout_rng=jax.random.key(0), dropout_rate=0.9
        ).sum()

    assert np.isfinite(loss(q))
    assert np.isfinite(jax.grad(loss)(q)).all()


def test_dropout_of_each_weight() -> None:
    """In the kernel: entry by entry and head by head, the mean over draws that without."""
    q, k, v = qkv(B)
    attend = functools.partial(
        nn.softmax_attention_fn(), q, k, v, dropout_rate=0.2, broadcast_dropout=False
    )
    keys = jax.random.split(jax.random.key(0), 2000)
    drawn = jax.vmap(lambda key: attend(dropout_rng=key))(keys)
    close(drawn.mean(0), linen.dot_product_attention(q, k, v), 0.1)
    assert (drawn[0] != drawn[1]).any()
    key = keys[0]
    wanted = ato_jax.attention(q, k, v, dropout_rate=0.2, dropout_key=key)
    close(attend(dropout_rng=key), wanted)


@pytest.mark.parametrize("batch", [(2,), (2, 3)])
def test_linear_with_padding(batch: tuple[int, ...]) -> None:
    """Hidden keys count for nothing, holes included."""
    q, k, v = qkv(*batch)
    mask = padding(*batch)
    found = jax.jit(nn.linear_attention_fn(feature_map="relu"))(q, k, v, mask=mask)
    weights = jnp.einsum("...thd,...shd->...hts", jax.nn.relu(q), jax.nn.relu(k)) * mask
    weights /= jnp.maximum(weights.sum(-1, keepdims=True), 1e-6)
    close(found, jnp.einsum("...hts,...shd->...thd", weights, v))


def test_linear_causal() -> None:
    q, k, v = (normal(B, T, H, D, seed=seed) for seed in range(3))
    wanted = ato_jax.linear_attention(q, k, v, causal=True)
    close(nn.linear_attention_fn(causal=True)(q, k, v), wanted)
    close(nn.linear_attention_fn()(q, k, v, is_causal=True), wanted)
    mask = nnx.make_causal_mask(jnp.ones((B, T)))
    close(nn.linear_attention_fn()(q, k, v, mask=mask), wanted)
    options: dict[str, Any] = {"feature_map": "identity", "normalize": False, "scale": 0.3}
    wanted = ato_jax.linear_attention(q, k, v, **options)
    close(nn.linear_attention_fn(**options)(q, k, v), wanted)


@pytest.mark.parametrize("make", [nn.softmax_attention_fn, nn.linear_attention_fn])
def test_decodes_in_flaxs_layer(make: Any) -> None:
    """One query and a cache of keys: what the whole sequence gives, step by step."""
    fn = make(causal=True)
    layer = nnx.MultiHeadAttention(H, E, attention_fn=fn, decode=True, rngs=nnx.Rngs(0))
    x = normal(B, T, E)
    layer.init_cache(x.shape)
    steps = [layer(x[:, t : t + 1]) for t in range(T)]
    close(jnp.concatenate(steps, 1), layer(x, decode=False))


def test_window_is_refused_where_flaxs_layer_decodes() -> None:
    """The query is not at the end of the cache, which Flax hides behind a mask."""
    fn = nn.softmax_attention_fn(window=(2, 0))
    layer = nnx.MultiHeadAttention(H, E, attention_fn=fn, decode=True, rngs=nnx.Rngs(0))
    x = normal(B, T, E)
    layer.init_cache(x.shape)
    with pytest.raises(ValueError, match="window needs the queries' positions.* T=1, S=6"):
        layer(x[:, :1])
    flax = linen.MultiHeadDotProductAttention(H, attention_fn=fn, decode=True)
    variables = flax.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="window needs the queries' positions"):
        flax.apply(variables, x[:, :1], mutable=["cache"])
    layer(x, decode=False, mask=nnx.make_causal_mask(x[..., 0]))


def test_positions_are_not_guessed() -> None:
    q, k, v = qkv(B)
    causal = nn.softmax_attention_fn(causal=True)
    with pytest.raises(ValueError, match="causal needs the queries' positions.* T=6, S=9"):
        causal(q, k, v, mask=padding(B))
    wanted = nn.softmax_attention_fn()(q[:, :1], k, v, mask=padding(B))
    close(causal(q[:, :1], k, v, mask=padding(B)), wanted)
    mask = padding(B).at[..., 0].set(True)
    wanted = nnx.dot_product_attention(q, k, v, mask=mask, is_causal=True)
    close(nn.softmax_attention_fn()(q, k, v, mask=mask, is_causal=True), wanted)


@pytest.mark.parametrize("make", [nn.softmax_attention_fn, nn.linear_attention_fn])
def test_in_flaxs_layers(make: Any) -> None:
    """nnx and Linen hand over the same, so the same comes out; softmax equals Flax's own."""
    x, mask = normal(B, T, E), normal(B, 1, 1, T, seed=1) > -0.7
    ours = linen.MultiHeadDotProductAttention(num_heads=H, attention_fn=make())
    variables = ours.init(jax.random.key(0), x)
    found = ours.apply(variables, x, mask=mask)
    layer = nnx.MultiHeadAttention(H, E, attention_fn=make(), decode=False, rngs=nnx.Rngs(0))
    nnx.update(layer, variables["params"])
    close(layer(x, mask=mask), found)
    if make is nn.softmax_attention_fn:
        flax = linen.MultiHeadDotProductAttention(num_heads=H)
        close(found, flax.apply(variables, x, mask=mask))
    with pytest.raises(ValueError, match="sow_weights is refused"):
        ours.apply(variables, x, sow_weights=True, mutable=["intermediates"])
    with pytest.raises(ValueError, match="sow_weights is refused"):
        layer(x, sow_weights=True)


def test_equal_options_are_one_function() -> None:
    one, other = nn.softmax_attention_fn(window=(2, 0)), nn.softmax_attention_fn(window=(2, 0))
    assert one == other and hash(one) == hash(other)
    assert one != nn.softmax_attention_fn()
    assert nn.linear_attention_fn(causal=True) == nn.linear_attention_fn(causal=True)
    listed: Any = [2, 0]
    other = nn.softmax_attention_fn(window=listed)
    assert one == other and hash(one) == hash(other)
    assert nn.softmax_attention_fn(window=(None, None)) == nn.softmax_attention_fn()
    one, other = nn.softmax_attention_fn(scale=2), nn.softmax_attention_fn(scale=jnp.float32(2))
    assert one == other and hash(one) == hash(other)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (nn.softmax_attention_fn, {"window": (-1, 0)}, "window must be a pair"),
        (nn.softmax_attention_fn, {"window": 3}, "window must be a pair"),
        (nn.softmax_attention_fn, {"softcap": -1.0}, "softcap must be positive"),
        (nn.softmax_attention_fn, {"scale": "a"}, "scale must be a number"),
        (nn.softmax_attention_fn, {"causal": "no"}, "causal must be True or False"),
        (nn.softmax_attention_fn, {"implementation": "a"}, "implementation must be one of"),
        (nn.linear_attention_fn, {"implementation": "cudnn"}, "implementation must be one of"),
        (nn.linear_attention_fn, {"scale": float("inf")}, "scale must be finite"),
        (nn.linear_attention_fn, {"eps": 0}, "eps must be positive"),
        (nn.linear_attention_fn, {"normalize": 1}, "normalize must be True or False"),
    ],
)
def test_options_are_refused_at_once(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": jnp.zeros((1, H, T, S))}, "bias must be None"),
        ({"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}, "dropout_rate must be 0"),
        ({"mask": normal(B, 1, T, S) > 0}, "neither causal nor a mask of padding"),
        ({"mask": normal(B, H, 1, S) > 0}, "head by head"),
        ({"is_causal": True}, "is_causal needs as many keys as queries, got T=6, S=9"),
    ],
)
def test_linear_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nn.linear_attention_fn()(*qkv(B), **options)


def test_linear_refuses_what_it_is_made_of() -> None:
    with pytest.raises(ValueError, match=r"ato_jax\.nn\.Performer"):
        nn.linear_attention_fn(feature_map=ato_jax.favor(jax.random.key(0), 8, D))
    with pytest.raises(ValueError, match="causal needs as many keys as queries"):
        nn.linear_attention_fn(causal=True)(*qkv(B))


@pytest.mark.parametrize("make", [nn.softmax_attention_fn, nn.linear_attention_fn])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum is refused"),
        ({"attn_weights_value_einsum": jnp.einsum}, "attn_weights_value_einsum is refused"),
        ({"einsum_dot_general": jax.lax.dot_general}, "einsum_dot_general is refused"),
        ({"module": object()}, "sow_weights is refused"),
        ({"dropout_rate": 0.1}, "dropout_rng must be given"),
        ({"mask": jnp.ones((B, 1, T, S + 1), bool)}, "mask must broadcast"),
        ({"precision": "bfloat16"}, "precision must be None"),
    ],
)
def test_functions_refuse(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()(*qkv(B), **options)


@pytest.mark.parametrize("make", [nn.softmax_attention_fn, nn.linear_attention_fn])
def test_masks_as_lists(make: Any) -> None:
    q, k, v = qkv(B)
    mask = padding(B)
    close(make()(q, k, v, mask=mask.tolist()), make()(q, k, v, mask=mask))
    close(make()(q, k, v, mask=True), make()(q, k, v))
    with pytest.raises(ValueError, match="mask must be an array"):
        make()(q, k, v, mask=[[True], [True, False]])


@pytest.mark.parametrize("make", [nn.softmax_attention_fn, nn.linear_attention_fn])
@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("rate", [1.0, 1.5, -0.1, float("nan")])
def test_functions_refuse_rates(make: Any, broadcast: bool, rate: float) -> None:
    drop: dict[str, Any] = {"dropout_rate": rate, "broadcast_dropout": broadcast}
    with pytest.raises(ValueError, match="dropout_rate must be at least 0 and below 1, got"):
        make()(*qkv(B), **drop, dropout_rng=jax.random.key(0))
    assert np.isfinite(make()(*qkv(B), **drop, deterministic=True)).all()


def test_functions_refuse_shapes() -> None:
    q, k, v = qkv(B)
    with pytest.raises(ValueError, match="key must have query's batch axes"):
        nn.softmax_attention_fn()(q, k[:1], v)
    with pytest.raises(ValueError, match="bias must broadcast"):
        nn.softmax_attention_fn()(q, k, v, bias=jnp.zeros((1, 1, 1, T, S)))


# replace_attention


class Block(nnx.Module):
    """A block of a transformer, of nnx.MultiHeadAttention."""

    def __init__(self, rngs: nnx.Rngs, **options: Any) -> None:
        self.norm = nnx.LayerNorm(E, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(H, E, decode=False, rngs=rngs, **options)
        self.linear = nnx.Linear(E, E, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        return x + jax.nn.gelu(self.linear(x))


class Model(nnx.Module):
    """Blocks in every kind of container, one of them used twice."""

    def __init__(self, rngs: nnx.Rngs, **options: Any) -> None:
        def block() -> Block:
            return Block(rngs, **options)

        self.first = block()
        self.again = self.first.attention
        self.listed = nnx.List([block(), jax.nn.relu])
        self.named = nnx.Dict(one=block())
        self.plain = nnx.data([block(), {"two": (block(), None)}])
        self.chain = nnx.Sequential(block(), jax.nn.relu)

    def __call__(self, x: jax.Array) -> jax.Array:
        blocks = (
            self.first,
            *self.listed,
            self.named.one,
            self.plain[0],
            self.plain[1]["two"][0],
            self.chain,
            self.again,
        )
        for block in blocks:
            x = block(x)
        return x


PATHS = {
    ("first", "attention"),
    ("listed", 0, "attention"),
    ("named", "one", "attention"),
    ("plain", 0, "attention"),
    ("plain", 1, "two", 0, "attention"),
    ("chain", "layers", 0, "attention"),
}


def layers(model: nnx.Module) -> dict[Any, nnx.MultiHeadAttention]:
    return {
        path: layer
        for path, layer in nnx.iter_graph(model, graph=True)
        if isinstance(layer, nnx.MultiHeadAttention)
    }


def variables(model: nnx.Module) -> dict[Any, nnx.Variable]:
    return {
        path: leaf
        for path, leaf in nnx.iter_graph(model, graph=True)
        if isinstance(leaf, nnx.Variable)
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "num_kv_heads": G,
            "qkv_features": 24,
            "normalize_qk": True,
            "use_bias": False,
            "param_dtype": jnp.bfloat16,
            "dtype": jnp.float32,
        },
    ],
)
def test_replaced_everywhere(options: dict[str, Any]) -> None:
    """The same numbers from the same variables, not from equal ones."""
    model = Model(nnx.Rngs(0), **options)
    x = normal(B, T, E)
    wanted, before = model(x), variables(model)
    paths = nn.replace_attention(model, nn.Attention)
    # The layer that the model holds twice counts once, by either of its names.
    assert len(paths) == len(PATHS)
    assert {("first", "attention") if path == ("again",) else path for path in paths} == PATHS
    assert {type(layer) for layer in layers(model).values()} == {nn.Attention}
    assert model.again is model.first.attention
    after = variables(model)
    assert before.keys() == after.keys()
    assert all(before[path] is after[path] for path in before)
    close(model(x), wanted)
    layer = model.first.attention
    assert layer.dtype == options.get("dtype") and layer.decode is False
    with pytest.raises(ValueError, match=r"no nnx\.MultiHeadAttention"):
        nn.replace_attention(model, nn.Attention)


def test_where() -> None:
    model = Model(nnx.Rngs(0))
    replace = functools.partial(nn.replace_attention, model)
    assert replace(nn.Attention, where=nnx.PathContains("chain")) == (
        ("chain", "layers", 0, "attention"),
    )
    seen = []

    def where(path: Any, layer: Any) -> bool:
        seen.append(layer)
        return path[0] == "named"

    assert replace(nn.LinearAttention, where=where) == (("named", "one", "attention"),)
    assert all(type(layer) is nnx.MultiHeadAttention for layer in seen)
    assert type(model.plain[0].attention) is nnx.MultiHeadAttention
    with pytest.raises(ValueError, match="that `where` lets through"):
        replace(nn.Attention, where=nnx.PathContains("nowhere"))


def test_flags_are_kept() -> None:
    model = nnx.Dict(
        layer=nnx.MultiHeadAttention(
            H,
            E,
            out_features=5,
            in_kv_features=7,
            dropout_rate=0.3,
            broadcast_dropout=False,
            precision="highest",
            dtype=jnp.bfloat16,
            rngs=nnx.Rngs(0),
        )
    )
    model.eval()
    old = model.layer
    nn.replace_attention(model, nn.Attention, window=(2, 0))
    new = model.layer
    for name in (
        "out_features",
        "in_kv_features",
        "dropout_rate",
        "broadcast_dropout",
        "precision",
        "dtype",
        "deterministic",
        "decode",
    ):
        assert getattr(new, name) == getattr(old, name), name
    assert new.rngs is old.rngs and new.window == (2, 0)
    x, y = normal(B, T, E), normal(B, S, 7)
    assert (new(x, y) == new(x, y)).all()
    model.train()
    assert (new(x, y) != new(x, y)).any()


def test_dropout_given_up_and_taken_up() -> None:
    model = Block(nnx.Rngs(0), dropout_rate=0.1)
    with pytest.raises(ValueError, match="dropout_rate must be 0") as caught:
        nn.replace_attention(model, nn.LinearAttention)
    assert any("('attention',)" in note for note in caught.value.__notes__)
    assert type(model.attention) is nnx.MultiHeadAttention
    nn.replace_attention(model, nn.LinearAttention, dropout_rate=0.0)
    assert not jax.tree.leaves(nnx.state(model, nnx.RngState))
    assert model(normal(B, T, E)).shape == (B, T, E)

    model = Block(nnx.Rngs(0))
    nn.replace_attention(
        model, nn.Attention, dropout_rate=0.5, deterministic=False, rngs=nnx.Rngs(1)
    )
    x = normal(B, T, E)
    assert (model(x) != model(x)).any()


# Performer is a LinearAttention, and holds more.
@pytest.mark.parametrize("cls", [nn.Attention, nn.Performer])
def test_stacked_layers(cls: Any) -> None:
    """Layers with a leading axis, run by nnx.scan, are the same as one after the other."""
    depth = 3

    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> Block:
        return Block(rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(block: Block, x: jax.Array) -> jax.Array:
        return block(x)

    stack = make(nnx.Rngs(0))
    kernel = stack.attention.query.kernel
    x = normal(B, T, E)
    flax = run(stack, x)
    assert nn.replace_attention(stack, cls, rngs=nnx.Rngs(1)) == (("attention",),)
    assert stack.attention.query.kernel is kernel
    found = run(stack, x)
    if cls is nn.Attention:
        close(found, flax)
    graph, state = nnx.split(stack)
    for layer in range(depth):
        x = nnx.merge(graph, jax.tree.map(lambda leaf, layer=layer: leaf[layer], state))(x)
    close(found, x)
    if cls is nn.Performer:
        features = stack.attention.random_features[...]
        assert features.shape[0] == depth and (features[0] != features[1]).any()


@pytest.mark.parametrize("cls", [nn.Attention, nn.Performer])
def test_trains_after_the_swap(cls: Any) -> None:
    """With the optimizer that was there before; every parameter moves and the loss falls."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    nn.replace_attention(model, cls, rngs=nnx.Rngs(1), causal=True)
    x, target = normal(B, T, E), normal(B, T, E, seed=1)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: ((model(x) - target) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    before = {path: leaf[...] for path, leaf in variables(model).items()}
    losses = [step(model, optimizer) for _ in range(3)]
    assert losses[-1] < losses[0]
    for path, leaf in variables(model).items():
        moved = (leaf[...] != before[path]).any()
        # A softmax does not see what is the same for all keys: its gradient is 0 or nearly so.
        assert moved == isinstance(leaf, nnx.Param) or path[-2:] == ("key", "bias"), path


def test_abstract_model() -> None:
    """Replaced before there are values, as for a restore."""
    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    nn.replace_attention(model, nn.LinearAttention)
    state = nnx.state(Model(nnx.Rngs(0)))
    nnx.update(model, state)
    assert np.isfinite(model(normal(B, T, E))).all()


class Own(nnx.MultiHeadAttention):
    pass


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: nnx.Linear(E, E, rngs=nnx.Rngs(0)), {}, r"no nnx\.MultiHeadAttention"),
        (
            lambda: nnx.Dict(a=nn.Attention(H, E, rngs=nnx.Rngs(0))),
            {},
            r"no nnx\.MultiHeadAttention; what lies at \('a',\) is of ato_jax\.nn already",
        ),
        (lambda: (nnx.MultiHeadAttention(H, E, rngs=nnx.Rngs(0)),), {}, "model must be .* tuple"),
        (lambda: Block(nnx.Rngs(0)), {"window": 4}, "window must be a pair"),
        (
            lambda: nnx.MultiHeadAttention(H, E, rngs=nnx.Rngs(0)),
            {},
            "use ato_jax.nn.convert_attention",
        ),
        (lambda: nnx.Dict(a=Own(H, E, rngs=nnx.Rngs(0))), {}, "no subclass, got Own"),
        (
            lambda: Block(nnx.Rngs(0), attention_fn=nn.softmax_attention_fn()),
            {},
            "attention_fn must be",
        ),
        (lambda: Block(nnx.Rngs(0)), {"cls": nnx.Linear}, "cls must be a layer"),
        (lambda: Block(nnx.Rngs(0)), {"num_heads": 2}, "num_heads cannot be changed"),
        (lambda: Block(nnx.Rngs(0)), {"cls": nn.Performer}, "rngs must be given: Performer has"),
        (lambda: Block(nnx.Rngs(0)), {"sinks": True}, r"variables of its own, sinks\n"),
        (
            lambda: Block(nnx.Rngs(0)),
            {"sinks": True, "dropout_rate": 0.5},
            r"variables of its own, sinks, keys for dropout\n",
        ),
        (lambda: Block(nnx.Rngs(0)), {"rngs": 0}, r"rngs must be an nnx\.Rngs, got 0"),
        (lambda: Block(nnx.Rngs(0)), {"rngs": jax.random.key(0)}, r"rngs must be an nnx\.Rngs"),
        (lambda: Block(nnx.Rngs(0)), {"attention_fn": jnp.dot}, "brings its own attention"),
    ],
)
def test_replace_refuses(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nn.replace_attention(make(), **({"cls": nn.Attention} | options))


@pytest.mark.parametrize(
    "name",
    [
        "dtype",
        "precision",
        "qkv_dot_general",
        "out_dot_general",
        "out_dot_general_cls",
        "kernel_init",
        "out_kernel_init",
        "bias_init",
        "out_bias_init",
        "kernel_metadata",
        "out_bias_metadata",
        "key_ln_scale_metadata",
        "qkv_promote_dtype",
        "ln_promote_dtype",
    ],
)
def test_replace_refuses_what_the_projections_are_made_of(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} cannot be changed: the projections are"):
        nn.replace_attention(Block(nnx.Rngs(0)), nn.Attention, **{name: None})


def test_replace_makes_gates_as_told() -> None:
    layer = nnx.MultiHeadAttention(H, E, rngs=nnx.Rngs(0))
    new = nn.convert_attention(
        layer,
        nn.GatedLinearAttention,
        rngs=nnx.Rngs(1),
        kernel_init=nnx.initializers.ones,
        kernel_metadata={"of": "gates"},
    )
    assert (new.output_gate.kernel[...] == 1).all() and new.output_gate.kernel.of == "gates"
    assert new.query is layer.query
    with pytest.raises(ValueError, match="dtype cannot be changed"):
        nn.convert_attention(layer, nn.GatedLinearAttention, dtype=jnp.bfloat16)


def test_replace_keeps_a_stream_or_none() -> None:
    x = normal(B, T, E)
    for options in ({"keep_rngs": True}, {"keep_rngs": False}, {}):
        for kept in (True, False):
            layer = nnx.MultiHeadAttention(
                H, E, dropout_rate=0.5, keep_rngs=kept, deterministic=False, rngs=nnx.Rngs(0)
            )
            new = nn.convert_attention(layer, nn.Attention, rngs=nnx.Rngs(1), **options)
            if options.get("keep_rngs", kept):
                assert (new.rngs is layer.rngs) == kept
                assert np.isfinite(new(x)).all()
            else:
                assert new.rngs is None
                assert np.isfinite(new(x, rngs=nnx.Rngs(2))).all()


def test_replace_refuses_a_cache() -> None:
    model = Block(nnx.Rngs(0))
    model.attention.init_cache((B, T, E))
    with pytest.raises(ValueError, match="holds a decoding cache"):
        nn.replace_attention(model, nn.Attention)


def test_replace_refuses_to_guess_a_stacks_axis() -> None:
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=nnx.StateAxes({nnx.Param: 1, ...: 0}))
    def make(rngs: nnx.Rngs) -> Block:
        return Block(rngs, use_bias=False)

    stack = make(nnx.Rngs(0))
    with pytest.raises(ValueError, match="axes of a stack must come first"):
        nn.replace_attention(stack, nn.Performer, rngs=nnx.Rngs(1))
    nn.replace_attention(stack, nn.LinearAttention)
    assert stack.attention.query.kernel.shape == (E, 3, H, E // H)


def test_convert_attention() -> None:
    layer = nnx.MultiHeadAttention(H, E, decode=False, rngs=nnx.Rngs(0))
    new = nn.convert_attention(layer, nn.Attention, sinks=True, rngs=nnx.Rngs(0))
    assert new.query is layer.query
    assert new.sinks.shape == (H,)
    x = normal(B, T, E)
    close(nn.convert_attention(layer, nn.Attention)(x), layer(x))


# Linen


def linen_layers(cls: Any, **options: Any) -> tuple[Any, Any]:
    flax = linen.MultiHeadDotProductAttention(num_heads=H, **options)
    return flax, nn.to_linen(cls, num_heads=H, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_features": 24, "out_features": 5, "use_bias": False, "normalize_qk": True},
        {"param_dtype": jnp.bfloat16, "dtype": jnp.float32},
        {"dtype": jnp.bfloat16},
    ],
)
def test_linen_parameters_and_numbers(options: dict[str, Any]) -> None:
    """Linen's parameters go in as they are, and Linen's numbers come out."""
    flax, ours = linen_layers(nn.Attention, **options)
    x, y = normal(B, T, E), normal(B, S, 7, seed=1)
    mask = normal(B, 1, T, S, seed=2) > -1
    params = jax.jit(flax.init)(jax.random.key(0), x, y)["params"]
    own = jax.eval_shape(ours.init, jax.random.key(0), x, y)
    assert own.keys() == {"params"}
    assert jax.tree.map(lambda a: (a.shape, a.dtype), own["params"]) == jax.tree.map(
        lambda a: (a.shape, a.dtype), params
    )
    bound = BOUNDS["bfloat16"] if options.get("dtype") == jnp.bfloat16 else 1e-5
    apply = jax.jit(ours.apply)
    found = apply({"params": params}, x, y, mask=mask)
    close(found, jax.jit(flax.apply)({"params": params}, x, y, mask=mask), bound)
    close(ours.apply({"params": freeze(params)}, x, inputs_k=y, mask=mask), found, bound)


def test_linen_model() -> None:
    """In a Linen model, from boxed parameters, under Linen's transforms; the same gradients."""

    class Stack(linen.Module):
        make: Any

        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.make(name="first")(x)
            return linen.remat(lambda module, x: x + module(x))(self.make(name="second"), x)

    init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, None, None))
    flax, ours = (
        Stack(functools.partial(layer, num_heads=H, **options))
        for layer, options in (
            (linen.MultiHeadDotProductAttention, {"kernel_init": init}),
            (functools.partial(nn.to_linen, nn.Attention), {}),
        )
    )
    x = normal(B, T, E)
    variables = jax.jit(flax.init)(jax.random.key(0), x)
    close(ours.apply(variables, x), jax.jit(flax.apply)(variables, x))

    def loss(variables: Any, model: Any) -> jax.Array:
        return (model.apply(variables, x) ** 2).mean()

    plain = linen.unbox(variables)
    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    found, wanted = (gradient(plain, model) for model in (ours, flax))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(close, found, wanted)


def test_linen_partitions() -> None:
    """The axes' names come from nnx's metadata."""
    ours = nn.to_linen(
        nn.Attention, num_heads=H, kernel_metadata={"out_sharding": (None, "heads", None)}
    )
    x = normal(B, T, E)
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        variables = jax.jit(ours.init)(jax.random.key(0), x)
        found = jax.jit(ours.apply)(variables, x)
        spec = linen.get_partition_spec(variables)["params"]["query"]["kernel"]
    assert spec == jax.sharding.PartitionSpec(None, "heads", None)
    close(found, linen.MultiHeadDotProductAttention(H).apply(linen.unbox(variables), x))


def test_linen_dropout() -> None:
    ours = nn.to_linen(nn.Attention, num_heads=H, dropout_rate=0.5)
    x = normal(B, T, E)
    variables = ours.init(jax.random.key(0), x, deterministic=True)
    rngs = [{"dropout": jax.random.key(seed)} for seed in (0, 0, 1)]
    one, same, other = (ours.apply(variables, x, deterministic=False, rngs=r) for r in rngs)
    assert (one == same).all() and (one != other).any()
    key = jax.random.key(0)
    given = [ours.apply(variables, x, deterministic=False, dropout_rng=key) for _ in range(2)]
    assert (given[0] == given[1]).all()
    assert (ours.apply(variables, x, deterministic=True) != one).any()
    with pytest.raises(ValueError, match='rngs={"dropout": key}, or dropout_rng=key'):
        ours.apply(variables, x, deterministic=False)
    with pytest.raises(ValueError, match="deterministic must be True or False"):
        ours.apply(variables, x)


@pytest.mark.parametrize("cls", [nn.LinearAttention, nn.Performer])
def test_linen_linear(cls: Any) -> None:
    flax, ours = linen_layers(cls)
    x = normal(B, T, E)
    params = flax.init(jax.random.key(0), x)["params"]
    variables = ours.init(jax.random.key(0), x) | {"params": params}
    layer = cls(H, E, rngs=nnx.Rngs(0))
    nnx.update(layer, params)
    if cls is nn.Performer:
        layer.random_features[...] = variables["RandomFeatures"]["random_features"]
    mask = normal(B, 1, 1, T, seed=2) > -1
    close(ours.apply(variables, x, mask=mask), layer(x, mask=mask))


def test_linen_latent() -> None:
    """A layer with parameters of its own and no inputs_k."""
    ours = nn.to_linen(
        nn.LatentAttention,
        num_heads=H,
        kv_lora_rank=4,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=4,
    )
    x = normal(B, T, E)
    found, variables = ours.init_with_output(jax.random.key(0), x)
    assert {"kv_down", "rope_key"} < variables["params"].keys()
    close(ours.apply(variables, x), found)


def test_linen_captures() -> None:
    """What Linen captured in the module's scope is not taken for variables of the layer."""

    class Twice(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            layer = nn.to_linen(nn.Attention, num_heads=H, name="layer")
            return layer(layer(x))

    model, x = Twice(), normal(B, T, E)
    variables = model.init(jax.random.key(0), x)
    wanted = model.apply(variables, x)
    capture: dict[str, Any] = {"capture_intermediates": True, "mutable": ["intermediates"]}
    found, captured = model.apply(variables, x, **capture)
    close(found, wanted)
    close(captured["intermediates"]["__call__"][0], wanted)
    close(model.apply(variables | captured, x), wanted)


def test_linen_refuses() -> None:
    _, ours = linen_layers(nn.Performer)
    x = normal(B, T, E)
    variables = ours.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="RandomFeatures/random_features must have shape"):
        ours.apply({"params": variables["params"]}, x)
    with pytest.raises(ValueError, match=r"params/key/bias must have shape .* got"):
        ours.apply(jax.tree.map(lambda leaf: leaf[1:], variables), x)
    more = nn.to_linen(nn.Attention, num_heads=H, sinks=True).init(jax.random.key(0), x)
    less = nn.to_linen(nn.Attention, num_heads=H)
    with pytest.raises(ValueError, match="^params/sinks: Attention has no such variables"):
        less.apply(more, x)
    without = nn.to_linen(nn.Attention, num_heads=H, use_bias=False)
    with pytest.raises(ValueError, match=r"^params/\w+/bias, .*: Attention has no such variables"):
        without.apply(less.init(jax.random.key(0), x), x)
    cache = {"cached_key": jnp.zeros((B, T, H, E // H)), "cache_index": jnp.zeros((), jnp.int32)}
    with pytest.raises(ValueError, match="^cache/cache_index, cache/cached_key: Attention has"):
        less.apply(less.init(jax.random.key(0), x) | {"cache": cache}, x)
    with pytest.raises(ValueError, match="sow_weights must be False"):
        ours.apply(variables, x, sow_weights=True)
    for options in ({"rngs": nnx.Rngs(0)}, {"keep_rngs": True}, {"decode": True}):
        with pytest.raises(ValueError, match=next(iter(options))):
            nn.to_linen(nn.Attention, num_heads=H, **options)
    with pytest.raises(ValueError, match="decode must be False"):
        ours.apply(variables, x, decode=True)
    with pytest.raises(ValueError, match="cls must be a layer"):
        nn.to_linen(linen.Dense, num_heads=H)
    with pytest.raises(ValueError, match="cls must be a layer"):
        nn.to_linen(nnx.Linear, num_heads=H)


# Checkpoints


def saved_and_restored(tree: Any, like: Any, path: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "checkpoint", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "checkpoint", like)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": G, "normalize_qk": True}])
def test_checkpoint_of_nnx(tmp_path: Path, options: dict[str, Any]) -> None:
    """Saved from nnx.MultiHeadAttention, restored into `Attention` and `LinearAttention`."""
    flax = nnx.MultiHeadAttention(H, E, decode=False, rngs=nnx.Rngs(0), **options)
    abstract = nnx.eval_shape(lambda: nn.Attention(H, E, rngs=nnx.Rngs(1), **options))
    state = saved_and_restored(nnx.state(flax), nnx.state(abstract), tmp_path)
    x = normal(B, T, E)
    ours = nnx.merge(nnx.graphdef(abstract), state)
    close(ours(x), flax(x))
    linear = nn.LinearAttention(H, E, rngs=nnx.Rngs(1), **options)
    nnx.update(linear, state)
    close(linear(x), nn.convert_attention(flax, nn.LinearAttention)(x))


def test_checkpoint_of_linen(tmp_path: Path) -> None:
    """Saved from Linen's layer, restored into ours in Linen and in nnx."""
    flax, ours = linen_layers(nn.Attention)
    x = normal(B, T, E)
    variables = flax.init(jax.random.key(0), x)
    like = jax.eval_shape(ours.init, jax.random.key(1), x)
    restored = saved_and_restored(variables, like, tmp_path)
    wanted = flax.apply(variables, x)
    close(ours.apply(restored, x), wanted)
    layer = nn.Attention(H, E, rngs=nnx.Rngs(1))
    nnx.update(layer, restored["params"])
    close(layer(x), wanted)
