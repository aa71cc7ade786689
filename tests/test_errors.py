"""Every refusal says which argument, what came and what was needed; nothing reaches a traceback.

A pattern below is what the message must contain, in order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax

B, T, S, H, G, D, V = 2, 4, 6, 4, 2, 3, 5


def array(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


def qkv(queries: int = T, keys: int = S, dtype: Any = jnp.float32) -> list[jax.Array]:
    return [
        array(B, queries, H, D, dtype=dtype),
        array(B, keys, G, D, dtype=dtype),
        array(B, keys, G, V, dtype=dtype),
    ]


SQUARE = qkv(T, T)
BOTH = (ato_jax.attention, ato_jax.linear_attention)
each_op = pytest.mark.parametrize("function", BOTH, ids=lambda function: function.__name__)


def refused(*patterns: str) -> Any:
    return pytest.raises(ValueError, match="(?s)" + ".*".join(patterns))


@each_op
@pytest.mark.parametrize(
    ("changed", "patterns"),
    [
        ({"q": array(B, H, D, 1, 1)}, ["q must be", r"\[B, T, H, D\]", "got shape"]),
        ({"q": array(D)}, ["q must be", r"\[B, T, H, D\]", "got shape"]),
        ({"k": array(B, S, G, D + 1)}, ["k must be", r"\[B, S, G, D\]", "D=3", "got shape"]),
        ({"k": array(B + 1, S, G, D)}, ["k must be", "B=2", "got shape"]),
        ({"k": array(S, G, D)}, ["k must be", r"\[B, S, G, D\]", "got shape"]),
        ({"v": array(B, S + 1, G, V)}, ["v must be", "S=6", "got shape"]),
        ({"v": array(B, S, H, V)}, ["v must be", "G=2", "got shape"]),
        (
            {"k": array(B, S, 3, D), "v": array(B, S, 3, V)},
            ["heads H must be a multiple", "H=4", "G=3", r"layout='bthd', q is \[B, T, H, D\]"],
        ),
        ({"layout": "bhtd", "q": array(B, 5, 1, D)}, ["H=5, G=6", r"q is \[B, H, T, D\]"]),
        ({"q": None}, ["q must be an array, got None"]),
        ({"v": object()}, ["v must be an array, got <object"]),
        (
            {"k": array(B, S, 0, D), "v": array(B, S, 0, V)},
            ["axis G must be at least 1", "G=0"],
        ),
        ({"v": array(B, S, G, 0)}, ["axis V must be at least 1", "V=0"]),
        ({"k": array(B, S, G, D, dtype=jnp.bfloat16)}, ["k must have", "float32", "bfloat16"]),
        ({"v": array(B, S, G, V, dtype=jnp.float16)}, ["v must have", "float32", "float16"]),
        ({"q": np.ones((B, T, H, D))}, ["q must be", "float32", "got float64"]),
        ({"k": np.ones((B, S, G, D))}, ["k must be", "float32", "got float64"]),
        ({"q": array(B, T, H, D, dtype=jnp.int32)}, ["q must be", "got int32"]),
        ({"q": array(B, T, H, D, dtype=jnp.complex64)}, ["q must be", "got complex64"]),
        ({"v": array(B, S, G, V, dtype=bool)}, ["v must be", "got bool"]),
        ({"layout": "bnth"}, ["layout must be one of", "bthd", "bhtd", "bnth"]),
        ({"precision": "exact"}, ["precision must be", "tf32", "exact"]),
        ({"precision": 3}, ["precision must be", "3"]),
        ({"implementation": "cuda"}, ["implementation must be", "triton", "xla", "cuda"]),
        ({"causal": "yes"}, ["causal must be True or False", "yes"]),
        ({"causal": None}, ["causal must be True or False", "None"]),
        ({"causal": jnp.bool_(True)}, ["causal must be True or False"]),
        ({"segment_ids": jnp.zeros((B, T), int)}, ["segment_ids", "T = S", "T=4", "S=6"]),
        ({"q_segment_ids": jnp.zeros((B, T), int)}, ["kv_segment_ids must be given"]),
        ({"kv_segment_ids": jnp.zeros((B, S), int)}, ["q_segment_ids must be given"]),
        (
            {"q_segment_ids": jnp.zeros((B, T), int), "kv_segment_ids": jnp.zeros((B, T), int)},
            ["kv_segment_ids must be", "S=6", "got shape"],
        ),
        # One array for both sides, where these differ.
        (
            dict.fromkeys(("q_segment_ids", "kv_segment_ids"), jnp.zeros((B, T), int)),
            ["kv_segment_ids must be", "S=6", "got shape"],
        ),
        (
            {"q_segment_ids": jnp.zeros((B, T)), "kv_segment_ids": jnp.zeros((B, S))},
            ["q_segment_ids must hold integers", "float32"],
        ),
        ({"q_lengths": jnp.ones(B)}, ["q_lengths must hold integers", "float32"]),
        ({"q_lengths": np.array([T + 1, 0])}, ["q_lengths must lie between 0 and T=4", "5"]),
        ({"kv_lengths": np.array([-1, 0])}, ["kv_lengths must lie between 0 and S=6", "-1"]),
        ({"kv_lengths": [7, 0]}, ["kv_lengths must lie between 0 and S=6", "7"]),
        ({"kv_lengths": np.array([1, 2, 3])}, ["kv_lengths must be", "B=2", "got shape"]),
        ({"kv_lengths": np.array([1 << 40, 0])}, ["kv_lengths must fit in int32", "1099511627776"]),
        ({"q": jax.ShapeDtypeStruct((B, T, H, D), jnp.float32)}, ["q must be an array"]),
        ({"kv_lengths": jax.ShapeDtypeStruct((B,), int)}, ["kv_lengths must be an array"]),
        ({"scale": "big"}, ["scale must be a number", "big"]),
        ({"scale": np.nan}, ["scale must be finite", "nan"]),
        ({"scale": jnp.ones(3)}, ["scale must be a number"]),
        ({"scale": 1e39}, ["scale must be finite", "float32", "1e.39"]),
        ({"scale": 1e-50}, ["scale must be 0 or at least 1.2e-38", "got 1e-50"]),
        ({"scale": -1e-40}, ["scale must be 0 or at least 1.2e-38", "got -1e-40"]),
        ({"scale": np.bool_(True)}, ["scale must be a number", "True"]),
        ({"scale": jnp.bool_(True)}, ["scale must be a number", "True"]),
        ({"scale": np.array("3")}, ["scale must be a number", "3"]),
        ({"scale": b"3"}, ["scale must be a number", "3"]),
        ({"scale": np.complex64(1 + 2j)}, ["scale must be a number", "2j"]),
    ],
)
def test_both(function: Any, changed: dict[str, Any], patterns: list[str]) -> None:
    arguments = dict(zip("qkv", qkv(), strict=True)) | changed
    if function is ato_jax.linear_attention and "scale" in changed:
        arguments["normalize"] = False
    with refused(*patterns):
        function(**arguments)


@pytest.mark.parametrize(
    ("square", "options", "patterns"),
    [
        (True, {"feature_map": "gelu"}, ["feature_map must be one of", "elu1", "gelu"]),
        (True, {"feature_map": 3}, ["feature_map must be", "3"]),
        (True, {"feature_map": jnp.cumsum}, ["feature_map must be", "elementwise"]),
        (True, {"feature_map": jax.nn.softmax}, ["feature_map must be", "elementwise"]),
        (True, {"feature_map": lambda x: (x, x)}, ["feature_map must be", "elementwise"]),
        (True, {"feature_map": lambda x: x[0]}, ["feature_map must be", "elementwise"]),
        (True, {"feature_map": jnp.sum}, ["feature_map must be", "elementwise", "reduce_sum"]),
        (True, {"feature_map": lambda x: x / jnp.linalg.norm(x)}, ["feature_map must be", "sum"]),
        (True, {"feature_map": lambda x: x - x.max()}, ["feature_map must be", "reduce_max"]),
        (True, {"feature_map": lambda x: x * 1j}, ["feature_map must map real", "complex64"]),
        (True, {"feature_map": lambda x: jax.random.key(0)}, ["feature_map must map real", "key"]),
        (True, {"feature_map": lambda x: {"x": x}}, ["feature_map must be", "mapped one to {'x'"]),
        (True, {"feature_map": lambda x: (x,)}, ["feature_map must be", r"mapped one to \("]),
        (True, {"feature_map": lambda x: None}, ["feature_map must be", "mapped one to None"]),
        (True, {"feature_map": lambda x: x[..., :1]}, ["feature_map must be", "IndexError"]),
        (True, {"feature_map": lambda x: x[..., None]}, ["feature_map must be", r"shape=\(1,\)"]),
        (True, {"feature_map": lambda x: x * jnp.ones(D)}, ["feature_map must be", r"shape=\(3,"]),
        (True, {"feature_map": np.exp}, ["feature_map must be", "tracing it failed with Tracer"]),
        (True, {"feature_map": lambda x: 1 // 0}, ["feature_map must be", "ZeroDivisionError"]),
        (
            True,
            {"feature_map": ato_jax.favor(jax.random.key(0), 8, D + 1)},
            ["feature_map", "head_dim 4", "D=3"],
        ),
        (True, {"normalize": "yes"}, ["normalize must be True or False", "yes"]),
        (True, {"scale": 0.5}, ["scale must be None", "normalize"]),
        (True, {"normalize": True, "scale": 0.5}, ["scale must be None", "normalize"]),
        (True, {"eps": 0.0}, ["eps must be positive", "0.0"]),
        (True, {"eps": -1}, ["eps must be positive", "-1"]),
        (True, {"eps": 1e-50}, ["eps must be positive", "at least 1.2e-38", "1e-50"]),
        (True, {"eps": "small"}, ["eps must be a number", "small"]),
        (True, {"decay": jnp.full(G, 0.1)}, ["decay", "<= 0", "0.1"]),
        (True, {"decay": jnp.full(G, jnp.nan)}, ["decay", "<= 0", "got NaN"]),
        (True, {"decay": jnp.full((B, T, G), jnp.nan)}, ["decay", "<= 0", "got NaN"]),
        (
            True,
            {"decay": jnp.full(G, jnp.nan), "kv_lengths": np.array([T, 1])},
            ["decay", "<= 0", "got NaN"],
        ),
        (True, {"decay": jnp.ones(H)}, ["decay must be", "G=2", "got shape"]),
        (True, {"decay": -jnp.ones((B, T, H))}, ["decay must be", "G=2", "got shape"]),
        (True, {"decay": -jnp.ones((B, T, G, V))}, ["decay must be", "got shape"]),
        (True, {"decay": jnp.float32(-1.0)}, ["decay must be", r"\[G\]", "got shape"]),
        (True, {"decay": np.array([-1, -1])}, ["decay must be", "int64"]),
        (False, {"decay": -jnp.ones(G)}, ["decay needs", "T = S", "T=4", "S=6"]),
        (
            False,
            {"causal": True, "return_state": True},
            ["return_state", "T = S", "T=4", "S=6"],
        ),
        (
            False,
            {
                "causal": True,
                "initial_state": ato_jax.LinearState(array(B, G, D, V), array(B, G, D)),
            },
            ["initial_state", "T = S", "T=4", "S=6"],
        ),
        (True, {"initial_state": array(B, G, D, V)}, ["initial_state must be", "LinearState"]),
        (
            True,
            {"initial_state": ato_jax.LinearState(array(B, G, V, D), array(B, G, D))},
            ["initial_state.kv must be", "got shape"],
        ),
        (
            True,
            {"initial_state": ato_jax.LinearState(array(B, G, D, V), array(B, G, V))},
            ["initial_state.k_sum must be", "got shape"],
        ),
        (
            True,
            {"initial_state": ato_jax.LinearState(array(B, G, D, V), np.ones((B, G, D)))},
            ["initial_state.k_sum must be", "float64"],
        ),
        (True, {"return_state": 1}, ["return_state must be True or False", "1"]),
    ],
)
def test_linear_attention(square: bool, options: dict[str, Any], patterns: list[str]) -> None:
    with refused(*patterns):
        ato_jax.linear_attention(*(SQUARE if square else qkv()), **options)


@pytest.mark.parametrize(
    ("options", "patterns"),
    [
        ({"window": 3}, ["window must be a pair", "got 3"]),
        ({"window": (1, 2, 3)}, ["window must be a pair", r"\(1, 2, 3\)"]),
        ({"window": (-1, 0)}, ["window must be a pair", ">= 0", r"\(-1, 0\)"]),
        ({"window": (1.5, None)}, ["window must be a pair", "1.5"]),
        ({"window": (True, None)}, ["window must be a pair", "True"]),
        ({"window": (np.timedelta64(3, "s"), None)}, ["window must be a pair", "timedelta64"]),
        ({"query_offset": np.timedelta64(3, "s")}, ["query_offset must hold", "timedelta64"]),
        ({"query_offset": 1.5}, ["query_offset must hold integers", "float"]),
        ({"query_offset": jnp.zeros(3, int)}, ["query_offset must be", "B=2", "got shape"]),
        ({"bias": array(B, 3, T, S)}, ["bias must broadcast", "H=4", "got shape"]),
        ({"bias": array(1, B, H, T, S)}, ["bias must broadcast", "got shape"]),
        ({"bias": np.ones((T, S))}, ["bias must be", "float64"]),
        ({"bias": jnp.ones((T, S), bool)}, ["bias must be", "bool"]),
        ({"mask": array(T, S)}, ["mask must be boolean", "float32", "bias"]),
        ({"mask": jnp.ones((T, S), int)}, ["mask must be boolean", "int32"]),
        ({"mask": jnp.ones((S, T), bool)}, ["mask must broadcast", "T=4", "got shape"]),
        ({"mask": jnp.ones((B, S), bool)}, ["mask must broadcast", "None, None", "kv_lengths"]),
        ({"softcap": 0.0}, ["softcap must be positive", "0.0"]),
        ({"softcap": -3}, ["softcap must be positive", "-3"]),
        ({"softcap": 1e-50}, ["softcap must be positive", "at least 1.2e-38", "1e-50"]),
        ({"softcap": "hard"}, ["softcap must be a number", "hard"]),
        ({"sinks": array(G)}, ["sinks must be", "H=4", "got shape"]),
        ({"sinks": np.ones(H)}, ["sinks must be", "float64"]),
        ({"dropout_rate": 0.1}, ["dropout_key must be given"]),
        ({"dropout_rate": 1.0}, ["dropout_rate must be", "below 1", "1.0"]),
        ({"dropout_rate": -0.1}, ["dropout_rate must be", "-0.1"]),
        ({"dropout_rate": 0.1, "dropout_key": 7}, ["dropout_key must be", "7"]),
        (
            {"dropout_rate": 0.1, "dropout_key": jax.random.split(jax.random.key(0))},
            ["dropout_key must be a single"],
        ),
        ({"query_offset": 1 << 70}, ["query_offset must lie between", f"got {1 << 70}"]),
        ({"query_offset": -(1 << 31)}, ["query_offset must lie between", f"got -{1 << 31}"]),
        ({"query_offset": np.array([(1 << 31) - 1, 0])}, ["query_offset must lie between"]),
        ({"query_offset": np.array([0, -(1 << 31)])}, ["query_offset must lie between"]),
        ({"query_offset": np.array(1 << 30)}, ["query_offset must lie between"]),
        ({"query_offset": np.array([1 << 40, 0])}, ["query_offset must fit in int32"]),
        ({"return_lse": None}, ["return_lse must be True or False", "None"]),
    ],
)
def test_attention(options: dict[str, Any], patterns: list[str]) -> None:
    with refused(*patterns):
        ato_jax.attention(*qkv(), **options)


def test_lengths_on_the_device_are_clipped() -> None:
    """Those of a JAX array are not waited for: they count as the nearest that makes sense."""
    for function in BOTH:
        wanted = function(*qkv(), kv_lengths=np.array([6, 0]))
        found = function(*qkv(), kv_lengths=jnp.array([9, -3]))
        np.testing.assert_array_equal(found, wanted)


def test_nan_in_the_padding_of_a_decay() -> None:
    """It reaches nothing. Beside it a positive decay is found."""
    lengths = np.array([T, 1])
    decay = jnp.full((B, T, G), -0.5).at[1, 1:].set(jnp.nan)
    call = functools.partial(ato_jax.linear_attention, *SQUARE, causal=True, kv_lengths=lengths)
    assert np.isfinite(call(decay=decay)).all()
    with refused("decay", "<= 0", "up to 0.25"):
        call(decay=decay.at[0, 0, 0].set(0.25))


@each_op
def test_lengths_without_a_batch_axis_are_scalars(function: Any) -> None:
    """As the letters say; one in an array means the same."""
    unbatched = [one[0] for one in qkv()]
    wanted = function(*qkv(), kv_lengths=np.array([3, 3]))[0]
    for scalar in (3, np.int64(3), np.array(3), jnp.int32(3), [3], np.array([3]), jnp.array([3])):
        np.testing.assert_array_equal(function(*unbatched, kv_lengths=scalar), wanted)
    for lengths in ([3, 3], [[3]], [np.array([3])], jnp.array([3, 3])):
        with refused("kv_lengths must be a scalar where q has no batch axis", "got shape"):
            function(*unbatched, kv_lengths=lengths)


def test_an_offset_without_a_batch_axis_is_a_scalar() -> None:
    unbatched = [one[0] for one in qkv()]
    wanted = ato_jax.attention(*qkv(), causal=True, query_offset=1)[0]
    found = ato_jax.attention(*unbatched, causal=True, query_offset=jnp.int32(1))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    with refused("query_offset must be a scalar", "got shape"):
        ato_jax.attention(*unbatched, causal=True, query_offset=[1, 1])


def drawn(queries: int = T, keys: int = S) -> list[jax.Array]:
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=one.shape), one.dtype) for one in qkv(queries, keys)]


WIDE = 1 << 32


@each_op
def test_wide_segment_ids(function: Any) -> None:
    """Ids that are the same modulo 2^32 are different ids, in an array of JAX's own, too."""
    ids = np.array([[5, 5, 6, 6], [7, 7, 7, 8]])
    wide = np.where(ids == 6, 5 + WIDE, np.where(ids == 8, 7 - WIDE, ids))
    kv_ids = np.array([[5, 5, 5, 6, 6, 6], [9, 9, 7, 7, 8, 8]])
    kv_wide = np.where(kv_ids == 6, 5 + WIDE, np.where(kv_ids == 8, 7 - WIDE, kv_ids))
    for arrays, small, large in (
        (drawn(T, T), {"segment_ids": ids}, {"segment_ids": wide}),
        (
            drawn(),
            {"q_segment_ids": ids, "kv_segment_ids": kv_ids},
            {"q_segment_ids": wide, "kv_segment_ids": kv_wide},
        ),
    ):
        wanted = function(*arrays, **small)
        with jax.enable_x64(True):
            on_device = {name: jnp.asarray(array) for name, array in large.items()}
            found = function(*arrays, **on_device)
            traced = jax.jit(lambda ids, arrays=arrays: function(*arrays, **ids))(on_device)
            # numpy's integers have 64 bits, whatever they hold.
            on_host = function(*arrays, **small)
        for one in (found, traced, on_host):
            np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-6)


@each_op
def test_unsigned_segment_ids(function: Any) -> None:
    ids = np.array([[5, 5, 6, 6], [7, 7, 7, 8]])
    unsigned = jnp.asarray(np.where(ids == 6, 5 + (1 << 31), ids), jnp.uint32)
    arrays = drawn(T, T)
    found = function(*arrays, segment_ids=unsigned)
    np.testing.assert_array_equal(found, function(*arrays, segment_ids=ids))
    with refused("q_segment_ids and kv_segment_ids must have one dtype", "uint32 and int32"):
        function(*arrays, q_segment_ids=unsigned, kv_segment_ids=jnp.asarray(ids))
    with jax.enable_x64(True), refused("must have one dtype", "uint64 and int64"):
        both = {"q_segment_ids": jnp.asarray(ids, jnp.uint64), "kv_segment_ids": jnp.asarray(ids)}
        function(*arrays, **both)


@each_op
def test_wide_lengths(function: Any) -> None:
    """Clipped as they are, not after they were narrowed."""
    wanted = function(*drawn(), kv_lengths=np.array([6, 0]))
    unsigned = jnp.array([3_000_000_000, 0], jnp.uint32)
    np.testing.assert_array_equal(function(*drawn(), kv_lengths=unsigned), wanted)
    with jax.enable_x64(True):
        lengths = jnp.asarray(np.array([WIDE + 1, 3 - WIDE]))
        found = function(*drawn(), kv_lengths=lengths)
        traced = jax.jit(lambda lengths: function(*drawn(), kv_lengths=lengths))(lengths)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(traced, wanted, rtol=1e-4, atol=1e-6)


def test_offsets_too_far_to_tell_apart() -> None:
    """On a device they count as far away as positions go; they do not come around."""
    first, last = (ato_jax.attention(*drawn(), causal=True, query_offset=n) for n in (-T, S))
    wanted = jnp.concatenate([last[:1], first[1:]])
    found = ato_jax.attention(
        *drawn(), causal=True, query_offset=jnp.array([(1 << 31) - 1, -(1 << 31)])
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    with jax.enable_x64(True):
        offsets = jnp.asarray(np.array([3 * WIDE - 1, -3 * WIDE]))
        found = ato_jax.attention(*drawn(), causal=True, query_offset=offsets)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_the_smallest_id_is_no_padding() -> None:
    """Padded keys are no run of any id, of which there could be another."""
    arrays = drawn(3, S)
    least = -(1 << 31)
    ids = {"q_segment_ids": [[7] * 3] * B, "kv_segment_ids": [[7, 7, 8, 8, 8, 8]] * B}
    wanted = ato_jax.linear_attention(*arrays, kv_lengths=np.array([4, 5]), **ids)
    least_ids = {name: np.where(np.array(side) == 7, least, side) for name, side in ids.items()}
    found = ato_jax.linear_attention(*arrays, kv_lengths=np.array([4, 5]), **least_ids)
    assert wanted.any()
    np.testing.assert_array_equal(found, wanted)


def test_a_window_wider_than_everything() -> None:
    wanted = ato_jax.attention(*qkv())
    np.testing.assert_array_equal(ato_jax.attention(*qkv(), window=(1 << 70, 1 << 31)), wanted)
    far = {"window": (None, 1 << 31), "query_offset": 1 << 29}
    np.testing.assert_array_equal(ato_jax.attention(*qkv(), **far), wanted)


@pytest.mark.parametrize(
    ("arguments", "patterns"),
    [
        ((None, 8, D), ["key must be a single JAX random key", "None"]),
        ((3, 8, D), ["key must be a single JAX random key", "3"]),
        ((jnp.zeros(2), 8, D), ["key must be a single JAX random key"]),
        ((jax.random.split(jax.random.key(0)), 8, D), ["key must be a single JAX random key"]),
        ((jax.random.key(0), 0, D), ["num_features must be an int of at least 1", "0"]),
        ((jax.random.key(0), 8, 2.0), ["head_dim must be an int of at least 1", "2.0"]),
        ((jax.random.key(0), 8, True), ["head_dim must be an int of at least 1", "True"]),
    ],
)
def test_favor(arguments: tuple[Any, ...], patterns: list[str]) -> None:
    with refused(*patterns):
        ato_jax.favor(*arguments)


@pytest.mark.parametrize("value", ["no", 1, None])
def test_favor_orthogonal(value: Any) -> None:
    with refused("orthogonal must be True or False", str(value)):
        ato_jax.favor(jax.random.key(0), 8, D, orthogonal=value)


@pytest.mark.parametrize("value", [3, "no", None, jnp.bool_(True)])
def test_interpret(value: Any) -> None:
    with refused("interpret", "must be True or False"):
        ato_jax.interpret(value)


STATE = ato_jax.LinearState(array(B, G, D, V), array(B, G, D))


@pytest.mark.parametrize(
    ("changed", "patterns"),
    [
        ({"q": array(B, T, H, D)}, ["q must be", r"\[B, H, D\]", "got shape"]),
        ({"k": array(B, G, D, dtype=jnp.bfloat16)}, ["k must have q's dtype", "bfloat16"]),
        ({"v": array(B, H, V)}, ["v must be", "G=2", "got shape"]),
        ({"state": None}, ["state must be a LinearState", "NoneType"]),
        ({"state": (STATE.kv, None)}, ["state.k_sum must be"]),
        ({"state": (STATE.k_sum, STATE.kv)}, ["state.kv must be", "got shape"]),
        ({"state": (STATE.kv.astype(int), STATE.k_sum)}, ["state.kv must be", "int32"]),
        ({"decay": jnp.full(G, 0.1)}, ["decay", "<= 0", "0.1"]),
        ({"decay": jnp.full(G, jnp.nan)}, ["decay", "<= 0", "got NaN"]),
        ({"decay": jnp.zeros(G, int)}, ["decay must be", "int32"]),
        ({"decay": jnp.zeros(())}, ["decay must be", r"\[G\]", "got shape"]),
        ({"eps": -1}, ["eps must be positive"]),
        ({"scale": 1.0}, ["scale must be None", "normalize"]),
        ({"scale": 1e-50, "normalize": False}, ["scale must be 0 or at least", "got 1e-50"]),
        ({"normalize": 1}, ["normalize must be True or False"]),
        ({"feature_map": None}, ["feature_map must be", "None"]),
    ],
)
def test_step(changed: dict[str, Any], patterns: list[str]) -> None:
    arguments = {"q": array(B, H, D), "k": array(B, G, D), "v": array(B, G, V), "state": STATE}
    with refused(*patterns):
        ato_jax.linear_attention_step(**(arguments | changed))


@each_op
def test_float64_is_refused_with_x64_too(function: Any) -> None:
    with jax.enable_x64(True):
        arrays = [jnp.asarray(np.asarray(one, np.float64)) for one in qkv()]
        with refused("q must be", "got float64"):
            function(*arrays)


@pytest.mark.parametrize(
    ("function", "name", "options"),
    [
        (ato_jax.attention, "scale", {}),
        (ato_jax.attention, "softcap", {}),
        (ato_jax.attention, "dropout_rate", {}),
        (ato_jax.linear_attention, "scale", {"normalize": False}),
        (ato_jax.linear_attention, "eps", {}),
    ],
)
def test_traced_numbers(function: Any, name: str, options: dict[str, Any]) -> None:
    @jax.jit
    def call(number: Any) -> Any:
        return function(*qkv(), **options, **{name: number})

    instead = "multiply q by it" if name == "scale" else "make it a static argument"
    with refused(f"{name} must be a concrete number", "traced", instead):
        call(0.5)


@each_op
@pytest.mark.parametrize("name", ["triton", "mosaic_gpu"])
def test_kernels_need_a_gpu(function: Any, name: str) -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("about machines without a GPU")
    with pytest.raises(ato_jax.UnsupportedError, match=f"{name}: .*needs a GPU"):
        function(*qkv(), implementation=name)
    assert issubclass(ato_jax.UnsupportedError, NotImplementedError)


def test_cudnn_needs_a_gpu() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("about machines without a GPU")
    with pytest.raises(ato_jax.UnsupportedError, match="cudnn: .*needs a GPU"):
        ato_jax.attention(*qkv(), implementation="cudnn")
    with refused("implementation must be", "'xla'", "cudnn"):
        ato_jax.linear_attention(*qkv(), implementation="cudnn")


@each_op
@pytest.mark.parametrize("empty", ["B", "T", "S", "TS"])
def test_empty(function: Any, empty: str) -> None:
    """Empty axes are no error: the result has their shape, zeros where nothing was seen."""
    sizes = {"B": B, "T": T, "S": S} | dict.fromkeys(empty, 0)
    arrays = (
        array(sizes["B"], sizes["T"], H, D),
        array(sizes["B"], sizes["S"], G, D),
        array(sizes["B"], sizes["S"], G, V),
    )

    def total(*arrays: Any) -> Any:
        return function(*arrays).sum()

    out = function(*arrays)
    assert out.shape == (sizes["B"], sizes["T"], H, V) and not out.any()
    for gradient, one in zip(jax.grad(total, (0, 1, 2))(*arrays), arrays, strict=True):
        assert gradient.shape == one.shape and not gradient.any()


def masked(*shape: int, dtype: Any = np.float32) -> np.ma.MaskedArray:
    return np.ma.masked_array(np.ones(shape, dtype), mask=False)


# A call whose arguments are right, and those that are arrays.
ARRAYS: list[tuple[Any, dict[str, Any], str]] = [
    (
        ato_jax.attention,
        dict(zip("qkv", SQUARE, strict=True)),
        "q k v query_offset bias mask segment_ids q_lengths kv_lengths sinks scale softcap",
    ),
    (
        ato_jax.linear_attention,
        dict(zip("qkv", SQUARE, strict=True)),
        "q k v decay segment_ids q_lengths kv_lengths eps",
    ),
    (
        ato_jax.linear_attention_step,
        {"q": array(B, H, D), "k": array(B, G, D), "v": array(B, G, V), "state": STATE},
        "q k v decay eps",
    ),
    (
        ato_jax.decode_attention,
        {
            "q": array(B, 1, H, D),
            "k_pages": array(4, 2, G, D),
            "v_pages": array(4, 2, G, V),
            "page_table": np.array([[0, 1], [2, 3]]),
            "lengths": np.array([3, 4]),
        },
        "q k_pages v_pages page_table lengths sinks scale",
    ),
    (
        ato_jax.total_attention,
        {"q": SQUARE[0], "k": SQUARE[1], "lse": array(B, T, H)},
        "q k lse bias mask kv_lengths",
    ),
    (ato_jax.combine, {"outs": [array(B, T, H, V)], "lses": [array(B, T, H)]}, "outs lses"),
]


@pytest.mark.parametrize(
    ("function", "right", "names"), ARRAYS, ids=[row[0].__name__ for row in ARRAYS]
)
def test_masked_arrays(function: Any, right: dict[str, Any], names: str) -> None:
    """NumPy would ignore their masks, and what is masked would count as what lies below."""
    for name in names.split():
        for wrong in (masked(B), masked(B, T, dtype=int), masked(), np.ma.masked, [masked(B)]):
            with refused(f"^{name}"):
                function(**(right | {name: wrong}))


CACHE = {"num_slots": 2, "max_length": 8, "num_pages": 4, "page_size": 4}
CACHE |= {"num_kv_heads": G, "head_dim": D}


@pytest.mark.parametrize("scale", [1e-50, -1e-40])
def test_a_scale_that_float32_takes_for_0(scale: float) -> None:
    """By every function that has one; 0 itself is right."""
    beta, state = array(B, T, H), array(B, H, D, V)
    keys, values = array(B, T, G, D), array(B, T, H, V)
    given = {function: arguments for function, arguments, _ in ARRAYS}
    given |= {
        ato_jax.linear_attention: given[ato_jax.linear_attention] | {"normalize": False},
        ato_jax.linear_attention_step: given[ato_jax.linear_attention_step] | {"normalize": False},
        ato_jax.gated_delta_rule: {"q": keys, "k": keys, "v": values, "beta": beta},
        ato_jax.gated_delta_rule_step: {
            "q": keys[:, 0], "k": keys[:, 0], "v": values[:, 0], "beta": beta[:, 0], "state": state
        },
    }  # fmt: skip
    del given[ato_jax.combine]
    for function, arguments in given.items():
        with refused("scale must be 0 or at least 1.2e-38 in size", f"got {scale}"):
            function(**arguments, scale=scale)
        function(**arguments, scale=0.0)


def test_the_fields_of_a_paged_cache() -> None:
    cache = ato_jax.PagedCache.empty(**CACHE)
    for name in cache._fields:
        for wrong in (None, "pages", [1], 3, masked(2, 2), np.ones((2, 2), complex), object()):
            with refused(f"^{name} must"):
                cache._replace(**{name: wrong}).allocate()
    with refused("^active must be an array"):
        cache._replace(active=[False, False]).allocate()
    for dtype in (np.float32(1), jnp.ones(2), jax.ShapeDtypeStruct((), jnp.float32), None, "text"):
        with refused("^dtype must be one of"):
            ato_jax.PagedCache.empty(**CACHE, dtype=dtype)


# Whatever is put in an argument's place: a ValueError, or a result where it makes sense.
JUNK = {
    "a string": "junk",
    "None": None,
    "a list": [1, 2],
    "a dict": {"a": 1},
    "an object": object(),
    "NaN": float("nan"),
    "complex": 1j,
    "an int": 3,
    "True": True,
    "a function": len,
    "a scalar array": np.float32(1),
    "a complex array": np.ones((B, T, H, D), np.complex64),
    "a bool array": np.ones((B, T, H, D), bool),
    "a text array": np.array(["a", "b"]),
    "an object array": np.array([None, 1], object),
    "seven axes": np.ones((1,) * 7, np.float32),
    "a ragged list": [[1], [1, 2]],
    "a masked array": np.ma.masked_array([1, 2], mask=[False, True]),
    "a list of masked ones": [np.ma.masked_array([1, 2], mask=[False, True])],
    "a big int": 1 << 70,
    "a key": jax.random.key(0),
    "uint32": np.ones((B, T), np.uint32),
}
ACCEPTED = {
    "attention": {
        "q k v": (),
        "causal return_lse": ("True",),
        "window bias mask segment_ids q_segment_ids kv_segment_ids": ("None",),
        "q_lengths kv_lengths sinks softcap scale": ("None",),
        "precision implementation scales out_dtype": ("None",),
        "layout": (),
        "query_offset": ("None",),
        "dropout_rate": (),
        "dropout_key": tuple(JUNK),
    },
    "linear_attention": {
        "q k v": (),
        "causal return_state normalize": ("True",),
        "decay segment_ids q_segment_ids kv_segment_ids": ("None",),
        "q_lengths kv_lengths initial_state scale": ("None",),
        "precision implementation scales out_dtype": ("None",),
        "layout feature_map": (),
        "eps": (),
    },
}
NUMBERS = ("softcap", "scale", "eps", "query_offset")
ARGUMENTS = [
    (function, name, accepted)
    for function in BOTH
    for names, accepted in ACCEPTED[function.__name__].items()
    for name in names.split()
]


@pytest.mark.parametrize(
    ("function", "name", "accepted"), ARGUMENTS, ids=[f"{f.__name__}-{n}" for f, n, _ in ARGUMENTS]
)
def test_junk(function: Any, name: str, accepted: tuple[str, ...]) -> None:
    for what, junk in JUNK.items():
        arguments = dict(zip("qkv", SQUARE, strict=True)) | {name: junk}
        if name == "scale" and function is ato_jax.linear_attention:
            arguments["normalize"] = False
        sensible = what in accepted
        sensible |= name in NUMBERS and what in ("an int", "a scalar array")
        sensible |= name in ("q_lengths", "kv_lengths") and what == "a list"
        sensible |= name == "segment_ids" and what == "uint32"
        sensible |= name == "normalize" and what == "None"
        sensible |= name in ("query_offset", "window") and what == "a list"
        sensible |= name == "bias" and what == "a scalar array"
        sensible |= name == "mask" and what == "True"
        sensible |= name in ("scale", "eps", "softcap") and what == "a big int"
        sensible &= not (name == "query_offset" and what == "a scalar array")
        try:
            function(**arguments)
        except ValueError as error:
            assert not sensible, (what, error)
            subject = name.removeprefix("q_").removeprefix("kv_")
            assert subject in str(error), (what, str(error))
        else:
            assert sensible, f"{name} took {what}"


@pytest.mark.parametrize("op", ["attention", "linear_attention"])
def test_explain_names_the_call_and_not_its_parts(op: str) -> None:
    array = jnp.ones((1, 4, 2, 8))
    for args, options, told in (
        ((array,), {}, f"{op}: missing a required argument: 'k'"),
        ((array,) * 3, {"causl": True}, f"{op}: got an unexpected keyword argument 'causl'"),
    ):
        with pytest.raises(TypeError, match=told):
            ato_jax.explain(op, *args, **options)


def test_tensors_are_led_to_ato_torch() -> None:
    torch = pytest.importorskip("torch")
    tensor, array = torch.ones(1, 4, 2, 8), jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match="q must be a JAX array.*ato_torch.*jax.ShapeDtypeStruct"):
        ato_jax.attention(tensor, array, array)
    with pytest.raises(ValueError, match="v must be a JAX array.*ato_torch"):
        ato_jax.linear_attention(array, array, tensor)
    eight_bits, scales = tensor.to(torch.float8_e4m3fn), (torch.ones(1, 2),) * 3
    with pytest.raises(ValueError, match="q must be a JAX array.*ato_torch"):
        ato_jax.attention(eight_bits, eight_bits, eight_bits, scales=scales)
