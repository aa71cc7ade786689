"""Arguments of the Flax layers that are none of what they should be: errors that name them.

The arguments that a layer passes on to Flax are checked before, so that the error is a ValueError
with the argument's name, whatever Flax would make of it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="flax is not installed here")

from flax import nnx  # noqa: E402

from ato_jax import nn  # noqa: E402
from tests import layers  # noqa: E402

B, T, E, H = 2, 4, 6, 2
SMALL = {"kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
LAYERS = (nn.Attention, nn.LinearAttention, nn.GatedLinearAttention, nn.LatentAttention)


def make(cls: Any, **options: Any) -> Any:
    options = (SMALL if cls is nn.LatentAttention else {"qkv_features": 8}) | options
    options = {"kernel_init": layers.normal()} | options
    return cls(num_heads=H, in_features=E, rngs=nnx.Rngs(0), **options)


@functools.cache
def made(cls: Any) -> Any:
    drops = {} if issubclass(cls, nn.LinearAttention) else {"dropout_rate": 0.5}
    return layers.on_device(make(cls, **drops))


def inputs(*shape: int) -> jax.Array:
    return jnp.ones(shape or (B, T, E), jnp.float32)


def refused(name: str) -> Any:
    return pytest.raises(ValueError, match=rf"^{name} ")


MASKED = np.ma.masked_array(np.ones((B, T, E), np.float32), mask=True)
NO_FLAGS = ["False", 0, 1.0, [True], np.ones(2, bool), jnp.bool_(True), np.ma.masked]
NO_FUNCTIONS = ["zeros", 0.1, [0], np.zeros(2), int, len, lambda: 0]
IN_MULTI_HEAD = [
    ("qkv_features", [7]),
    ("broadcast_dropout", NO_FLAGS),
    ("out_bias_init", NO_FUNCTIONS),
    ("qkv_promote_dtype", [None, *NO_FUNCTIONS]),
    ("out_promote_dtype", [None, len]),
    ("ln_promote_dtype", [3]),
    ("qkv_dot_general", ["einsum", len]),
    ("out_dot_general_cls", ["einsum", 3, len]),
    ("kernel_metadata", [None, "name", [1], {1: 2}]),
    ("out_bias_metadata", ["name", [1], {1: 2}]),
    ("query_ln_scale_metadata", [None, 3]),
]
CONSTRUCTORS = {
    nn.Attention: [("causal", NO_FLAGS), ("sinks_init", NO_FUNCTIONS), *IN_MULTI_HEAD],
    nn.LinearAttention: [("dropout_rate", ["no", None, np.zeros(2)]), *IN_MULTI_HEAD[:2]],
    nn.GatedLinearAttention: [
        ("gate_kernel_init", [None, *NO_FUNCTIONS]),
        ("gate_bias_init", [None, *NO_FUNCTIONS]),
        ("norm_scale_init", [None, *NO_FUNCTIONS]),
    ],
    nn.LatentAttention: [
        ("down_kernel_init", [None, *NO_FUNCTIONS]),
        ("norm_scale_init", [None, *NO_FUNCTIONS]),
    ],
}


@pytest.mark.parametrize("cls", LAYERS, ids=lambda cls: cls.__name__)
def test_constructors(cls: Any) -> None:
    everywhere = [
        ("deterministic", NO_FLAGS),
        ("use_bias", NO_FLAGS),
        ("keep_rngs", NO_FLAGS),
        ("decode", NO_FLAGS),
        ("dtype", [jnp.float32(1), ["float32"], {}, 3]),
        ("kernel_init", [None, *NO_FUNCTIONS]),
        ("out_kernel_init", NO_FUNCTIONS),
        ("bias_init", [None, *NO_FUNCTIONS]),
    ]
    for name, values in everywhere + CONSTRUCTORS[cls]:
        for value in values:
            with refused(name):
                make(cls, **{name: value})


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("is_causal", "causal"),
        ("head_dim", "qkv_features, which is num_heads \\* head_dim"),
        ("rope_thetas", "rope_theta"),
        ("kernel_inits", "kernel_init"),
    ],
)
def test_unknown_arguments(name: str, near: str) -> None:
    for cls in (nn.Attention, nn.GatedLinearAttention):
        wanted = f"^{cls.__name__} got .*'{name}': did you mean {near}\\?"
        with pytest.raises(TypeError, match=wanted):
            make(cls, **{name: 1})
    with pytest.raises(TypeError, match="'zzz'$"):
        make(nn.Attention, zzz=1)


def test_shapes_of_inputs() -> None:
    """An error compares inputs with those of the queries where they are others."""
    layer = made(nn.Attention)
    with pytest.raises(ValueError, match=r"^inputs_q must be .* 6\], got shape \(2, 4, 5\)$"):
        layer(inputs(B, T, E - 1))
    beside = r"with inputs_q's batch axes, got shape \(3, 4, 6\), where inputs_q has \(2, 4, 6\)$"
    with pytest.raises(ValueError, match=f"^inputs_k must be .*{beside}"):
        layer(inputs(), inputs(3, T, E))


@pytest.mark.parametrize("cls", [nn.Attention, nn.LinearAttention], ids=lambda cls: cls.__name__)
def test_a_mask_of_keys_without_axes(cls: Any) -> None:
    with pytest.raises(ValueError, match=r"got shape \(2, 4\); .* mask\[\.\.\., None, None, :\]$"):
        make(cls)(inputs(), mask=np.ones((B, T), bool))


def test_what_flax_takes() -> None:
    """Metadata, initialisers with partitions, functions of several kinds: none is refused."""
    layer = make(
        nn.Attention,
        out_kernel_metadata=None,
        bias_metadata={"note": 1},
        out_bias_init=None,
        bias_init=nnx.with_metadata(nnx.initializers.zeros, note=2),
        sinks=True,
        sinks_init=functools.partial(nnx.initializers.constant(0.5)),
        qkv_dot_general=jax.lax.dot_general,
        deterministic=np.bool_(True),
        use_bias=np.bool_(False),
        dtype="bfloat16",
    )
    assert layer(inputs()).dtype == jnp.bfloat16


CALLS = [
    ("inputs_q", [[[1.0] * E], "x", None, MASKED, inputs().astype("complex64"), int]),
    ("deterministic", NO_FLAGS),
    ("is_causal", NO_FLAGS),
    ("decode", NO_FLAGS),
    ("rngs", ["key", 3, jax.random.key(0)]),
    ("mask", [np.ma.masked_array(np.ones((T, T), bool), mask=True)]),
    ("out_sharding", ["heads", (None,), ["heads"], 3]),
]


@pytest.mark.parametrize("cls", LAYERS, ids=lambda cls: cls.__name__)
def test_calls(cls: Any) -> None:
    calls = list(CALLS)
    if cls is not nn.LatentAttention:
        calls += [
            ("sow_weights", NO_FLAGS),
            ("qkv_sharding", ["heads", (None,)]),
            ("inputs_k", [MASKED, [[1.0] * E]]),
        ]
    for name, values in calls:
        for value in values:
            arguments = {"inputs_q": inputs(), "deterministic": True} | {name: value}
            with refused(name):
                made(cls)(**arguments)
    positions = np.ma.masked_array(np.zeros((B, T)), mask=True)
    layer = make(nn.Attention, rope_theta=10.0)
    for wrong in (positions, jax.ShapeDtypeStruct((B, T), jnp.float32), jnp.float32, "0"):
        with refused("input_positions"):
            layer(inputs(), input_positions=wrong)


@pytest.mark.parametrize("cls", LAYERS, ids=lambda cls: cls.__name__)
def test_caches_and_views(cls: Any) -> None:
    layer = make(cls)
    for shape in ((B, True, E), (B, 8, E + 1), "shape", 3, None, (B, -1, E)):
        with refused("input_shape"):
            layer.init_cache(shape)
    for dtype in ("text", jnp.float32(1), int):
        with refused("dtype"):
            layer.init_cache((B, 8, E), dtype)
    if cls is nn.LatentAttention:
        for value in NO_FLAGS:
            with refused("deterministic"):
                layer.set_view(deterministic=value)
            with refused("decode"):
                layer.set_view(decode=value)


FUNCTIONS = (nn.softmax_attention_fn(), nn.linear_attention_fn())


@pytest.mark.parametrize("function", FUNCTIONS, ids=["softmax", "linear"])
def test_attention_functions(function: Any) -> None:
    array = inputs(B, T, H, 4)
    table = [
        ("query", [MASKED, None, "x", np.ones((B, T, H, 4)), array.astype(bool)]),
        ("value", [jax.ShapeDtypeStruct(array.shape, array.dtype), array.astype(int)]),
        ("deterministic", [None, *NO_FLAGS]),
        ("broadcast_dropout", [None, *NO_FLAGS]),
        ("force_fp32_for_softmax", NO_FLAGS),
        ("is_causal", [None, *NO_FLAGS]),
        ("dropout_rate", ["0.1", None, np.ones(2)]),
        ("dtype", ["text", int, jnp.float32(1)]),
        ("promote_dtype", [None, len, int]),
        ("mask", [np.ma.masked_array(np.ones((T, T), bool), mask=True)]),
    ]
    for name, values in table:
        for value in values:
            arguments = {"query": array, "key": array, "value": array} | {name: value}
            with refused(name):
                function(**arguments)
    for key in (3, "key", np.zeros(2), 1 << 70):
        with refused("dropout_rng"):
            function(array, array, array, dropout_rate=0.5, dropout_rng=key)


def test_biases_of_attention_functions() -> None:
    function, array = nn.softmax_attention_fn(), inputs(B, T, H, 4)
    empty = [(0,), (B, H, T, 0), (0, H, T, T), (B, 0, T, T), (B, H, 0, T)]
    wrong = [jnp.zeros(shape) for shape in [*empty, (3, 1, 1, 1), (1, B, H, T, T), (T, 3)]]
    for bias in [*wrong, [[1], [1, 2]], [None], 1 << 70, np.zeros((T, T)), np.zeros((T, T), int)]:
        with refused("bias"):
            function(array, array, array, bias=bias)
    nothing = inputs(B, 0, H, 4)
    out = function(nothing, array, array, bias=jnp.zeros((B, H, 0, T)))
    assert out.shape == nothing.shape
    masked = function(nothing, array, array, mask=np.ones((B, H, 0, T), bool))
    assert masked.shape == nothing.shape


def test_linen() -> None:
    for name in (3, ["name"], b"name"):
        with refused("name"):
            nn.to_linen(nn.Attention, num_heads=H, name=name)
    for decode in NO_FLAGS:
        with refused("decode"):
            nn.to_linen(nn.Attention, num_heads=H, decode=decode)
    module = nn.to_linen(nn.Attention, num_heads=H, qkv_features=8, dropout_rate=0.5)
    key = jax.random.key(0)
    wrong = [[[[1.0] * E]], [], None, "x", 3, MASKED, inputs(E), inputs(B, T, 0)]
    for value in wrong:
        with refused("inputs_q"):
            module.init(key, value)
        if value is not None:
            with refused("inputs_k"):
                module.init(key, inputs(), value)
    table = [
        ("deterministic", NO_FLAGS),
        ("dropout_rng", [3, "key", np.zeros(2), 1 << 70]),
        ("decode", NO_FLAGS),
        ("sow_weights", NO_FLAGS),
    ]
    for name, values in table:
        for value in values:
            with refused(name):
                module.init(key, inputs(), **{"deterministic": False, name: value})
    variables = module.init(key, inputs(), deterministic=True)
    with pytest.raises(ValueError, match=r"must have shape \(4, .*; inputs_q has shape"):
        module.apply(variables, inputs(B, T, 4), deterministic=True)


def test_replacements() -> None:
    model = [nnx.MultiHeadAttention(H, E, 8, rngs=nnx.Rngs(0), kernel_init=layers.normal())]
    for where in (3, [1], {}, len, lambda: True, np.zeros(2)):
        with refused("where"):
            nn.replace_attention(nnx.List(model), nn.Attention, where=where)
    for value in NO_FLAGS:
        with refused("causal"):
            nn.convert_attention(model[0], nn.Attention, causal=value)
