"""Few queries and long caches: contiguous, with the values in the keys, in 8 bits, and in pages.

Every form by the kernel, interpreted, and by plain JAX, against the reference in float64.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import device
from ato_jax.ops.attention import api, reference
from ato_jax.ops.attention.triton import paged, paged_tiles
from tests import numerics
from tests.test_attention_paged import GPUS

B, T, S, H, G, D, V = 3, 2, 48, 4, 2, 16, 12
LENGTHS = np.array([48, 0, 33])
PAGE = 8
IMPLEMENTATIONS = ("triton", "xla", "reference")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for a program and several programs for a sequence, at any length."""
    monkeypatch.setattr(paged, "LONGEST_BLOCK", 16)
    monkeypatch.setattr(paged, "_programs", lambda *sizes: 5)
    monkeypatch.setattr(paged, "_fewest_keys", lambda spec, here: 1)
    monkeypatch.setattr(device, "of_call", lambda arrays: GPUS[90])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def qkv(dtype: str = "float32", D: int = D, V: int = V) -> tuple[jax.Array, ...]:
    """NaN in the keys and values that no sequence has."""
    unused = (np.arange(S) >= LENGTHS[:, None])[..., None, None]
    k, v = (np.where(unused, np.nan, normal(B, S, G, width, seed=width)) for width in (D, V))
    return tuple(jnp.asarray(array, dtype) for array in (normal(B, T, H, D), k, v))


@functools.partial(jax.jit, static_argnums=0)
def _reference(spec: Any, inputs: Any) -> Any:
    return reference.forward(spec, reference.Config(), inputs)


def exact(*arrays: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """The reference's out and lse, in float64."""
    request = api.prepare(*(np.asarray(array, np.float32) for array in arrays), **options)
    with jax.enable_x64(True):
        inputs = numerics._upcast(request.inputs, np.float64)
        outputs = _reference(request.spec, inputs)
        return np.asarray(outputs.out), np.asarray(outputs.lse)


def compare(found: Any, wanted: Any, dtype: str) -> None:
    assert found[0].dtype == dtype and found[1].dtype == jnp.float32
    hidden = wanted[1] == -np.inf
    np.testing.assert_array_equal(found[1] == -np.inf, hidden)
    numerics.check("out", found[0], wanted[0], dtype=dtype)
    lse = (np.where(hidden, 0, one) for one in (found[1], wanted[1]))
    numerics.check("lse", *lse, dtype=dtype)


def check(q: Any, k: Any, v: Any, *cache: Any, **options: Any) -> None:
    """decode_attention(q, *cache) by kernel and by XLA against exact attention of q, k and v."""
    only = ("value_dim", "k_scale_pages", "v_scale_pages")
    known = {name: option for name, option in options.items() if name not in only}
    known = {"lengths": LENGTHS} | known
    lengths = known.pop("lengths")
    wanted = exact(
        q, k, v, causal=True, query_offset=lengths - q.shape[1], kv_lengths=lengths,
        q_lengths=np.full(B, q.shape[1]), **known,
    )  # fmt: skip
    options = {"lengths": LENGTHS, "return_lse": True} | options
    for name in IMPLEMENTATIONS:
        with ato_jax.interpret():
            found = ato_jax.decode_attention(q, *cache, implementation=name, **options)
        compare(found, wanted, str(q.dtype))


def in_pages(*arrays: Any) -> tuple[list[jax.Array], np.ndarray]:
    """The same in pages in another order, and the table."""
    order = np.random.default_rng(1).permutation(B * S // PAGE)
    pages = [array.reshape(-1, PAGE, *array.shape[2:])[order] for array in arrays]
    return pages, np.argsort(order).reshape(B, -1)


def test_contiguous() -> None:
    options = {"window": (9, 0), "softcap": 1.5, "sinks": normal(H), "scale": 0.7}
    check(*(arrays := qkv("bfloat16")), *arrays[1:], **options)


def test_contiguous_without_lengths() -> None:
    arrays = [jnp.nan_to_num(array) for array in qkv()]
    every = np.full(B, S)
    wanted = exact(*arrays, causal=True, kv_lengths=every)
    for name in IMPLEMENTATIONS:
        with ato_jax.interpret():
            found = ato_jax.decode_attention(*arrays, return_lse=True, implementation=name)
        compare(found, wanted, "float32")


def test_lengths_beyond_the_cache() -> None:
    """Of a device they are not waited for, and count as S: for the queries' positions, too."""
    q, k, v = (jnp.nan_to_num(array) for array in qkv())
    (k_pages, v_pages), table = in_pages(k, v)
    # With a window, a query whose position is too far sees other keys.
    options: dict[str, Any] = {"window": (9, 0), "return_lse": True}
    beyond, every = jnp.array([S + 30, S + 1, -5]), np.array([S, S, 0])
    for cache, names in (((k, v), ("triton", "xla")), ((k_pages, v_pages, table), IMPLEMENTATIONS)):
        wanted = ato_jax.decode_attention(q, *cache, lengths=every, **options)
        for name in names:
            with ato_jax.interpret():
                found = ato_jax.decode_attention(
                    q, *cache, lengths=beyond, implementation=name, **options
                )
            compare(found, [np.asarray(one) for one in wanted], "float32")


@pytest.mark.parametrize(
    ("form", "length"),
    [
        ("pages", jnp.int32(33)),
        ("eight bits", [33]),
        ("eight bits in pages", 33),
    ],
)
def test_without_a_batch_axis(form: str, length: Any) -> None:
    q, k, v = (array[2:] for array in qkv())
    options: dict[str, Any] = {}
    if "eight" in form:
        k, v = (jnp.nan_to_num(8 * array).astype(jnp.int8) for array in (k, v))
        options = {name: SCALES[2:] for name in ("k_scale_pages", "v_scale_pages")}
    cache, table = [k, v, *options.values()], None
    if "pages" in form:
        cache = [array.reshape(-1, PAGE, *array.shape[2:])[::-1] for array in cache]
        table = np.arange(S // PAGE)[::-1]
    alone = cache if "pages" in form else [array[0] for array in cache]
    for name in IMPLEMENTATIONS:

        def decode(q: Any, cache: Any, *arguments: Any, name: str = name) -> Any:
            with ato_jax.interpret():
                return ato_jax.decode_attention(
                    q, *cache[:2], *arguments, **dict(zip(options, cache[2:], strict=True)),
                    window=(20, 0), return_lse=True, implementation=name,
                )  # fmt: skip

        wanted = decode(q, cache, None if table is None else table[None], np.array([33]))
        found = decode(q[0], alone, table, length)
        assert found[0].shape == (T, H, V) and found[1].shape == (T, H)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other[0])
    error, _ = ato_jax.checked(functools.partial(decode, q[0], alone))(table, jnp.int32(S + 1))
    assert f"lengths must lie between 0 and S={S}, got {S + 1}" in str(error.get())
    with pytest.raises(ValueError, match="lengths must be a scalar where q has no batch axis"):
        decode(q[0], alone, table, [33, 33])


@pytest.mark.parametrize(
    ("D", "V", "form"), [(40, 20, "contiguous"), (576, 512, "pages")]
)
def test_values_in_the_keys(D: int, V: int, form: str) -> None:
    """The first's slices of keys are no power of two of values, the last's are several."""
    q, k, _ = qkv(D=D)
    options = {"value_dim": V, "sinks": normal(H)}
    if form == "contiguous":
        check(q, k, k[..., :V], k, **options)
    else:
        [pages], table = in_pages(k)
        check(q, k, k[..., :V], pages, None, table, **options)


@pytest.mark.parametrize(("D", "V"), [(16, 16), (40, 20), (96, 41), (193, 130), (576, 512)])
def test_values_are_cut_as_keys_are(D: int, V: int) -> None:
    spec = dataclasses.replace(api.prepare(*qkv()).spec, D=D, V=V)
    for in_words in (False, True):
        values = paged_tiles.value_slices_of(spec, True, in_words)
        keys = paged_tiles.slices_of(D, in_words)
        for width, parts in ((V, values), (D, keys)):
            columns = [part.start + part.step * n for part in parts for n in range(part.width)]
            assert sorted(columns) == list(range(width))
        for value, key in zip(values, keys, strict=False):
            assert (value.start, value.size) == (key.start, key.size)


def eight_bits(array: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows in 8 bits, their scales, and the product; NaN stays in the scales."""
    array = array.astype(jnp.float32)
    most = 127 if dtype == "int8" else 448
    scales = jnp.max(jnp.abs(array), axis=-1) / most
    rows = jnp.nan_to_num(array) / jnp.nan_to_num(scales, nan=1.0)[..., None]
    rows = (jnp.round(rows) if dtype == "int8" else rows).astype(dtype)
    return rows, scales, rows.astype(jnp.float32) * scales[..., None]


@pytest.mark.parametrize(
    ("cached", "dtype", "form"),
    [
        ("int8", "bfloat16", "contiguous"),
        ("int8", "float32", "pages"),
        ("float8_e4m3fn", "bfloat16", "pages"),
        ("float8_e4m3fn", "float16", "shared"),
    ],
)
def test_eight_bits(cached: str, dtype: str, form: str) -> None:
    q, k, v = qkv(dtype)
    # Small values, whose scales float16 would hardly hold.
    k, k_scales, k_exact = eight_bits(k, cached)
    v, v_scales, v_exact = eight_bits(v.astype(jnp.float32) * 1e-3, cached)
    options: dict[str, Any] = {"window": (30, 0)}
    if form == "shared":
        q, k_scales, k_exact = q * 100, k_scales / 100, k_exact / 100
        # Of the last word of the values only one column is theirs.
        options |= {"value_dim": V - 1, "k_scale_pages": k_scales}
        check(q, k_exact, k_exact[..., : V - 1], k, **options)
        return
    cache = [k, v]
    scales = [k_scales, v_scales]
    if form == "pages":
        (*cache, k_scales, v_scales), table = in_pages(*cache, *scales)
        cache, scales = [*cache, table], [k_scales, v_scales]
    options |= dict(zip(("k_scale_pages", "v_scale_pages"), scales, strict=True))
    check(q, k_exact, v_exact, *cache, **options)


# -- a few queries of `attention` ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bfloat16", {"causal": True, "kv_lengths": LENGTHS, "sinks": normal(H)}),
        (
            "float32",
            {"kv_lengths": LENGTHS, "q_lengths": np.array([2, 1, 0]), "softcap": 2.0},
        ),
        (
            "bfloat16",
            {"window": (5, 11), "query_offset": np.array([-3, 20, 60]), "kv_lengths": LENGTHS},
        ),
        (
            "float32",
            {"window": (None, 3), "query_offset": 7, "kv_lengths": LENGTHS, "layout": "bhtd"},
        ),
    ],
    ids=["causal", "lengths of both", "window", "other layout"],
)
def test_few_queries(dtype: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = list(qkv(dtype))
    if options.get("layout") == "bhtd":
        arrays = [jnp.swapaxes(array, 1, 2) for array in arrays]
    if "q_lengths" in options:
        arrays[0] = arrays[0].at[1, 1:].set(jnp.nan)
    calls = []
    own = paged.forward
    monkeypatch.setattr(
        paged.SPECIAL_FORWARD, "forward", lambda *call: calls.append(call) or own(*call)
    )
    with ato_jax.interpret():
        found = ato_jax.attention(*arrays, return_lse=True, implementation="triton", **options)
    assert calls
    compare(found, exact(*arrays, **options), dtype)


@pytest.mark.lowering
def test_who_takes_few_queries() -> None:
    """The paged kernel, in the forward alone; what it does not know is left to attention's own."""

    def kernel(phase: str = "forward", T: int = 16, **options: Any) -> Any:
        arrays = [jax.ShapeDtypeStruct((2, n, 2, 64), jnp.bfloat16) for n in (T, 64, 64)]
        with ato_jax.interpret():
            explained = ato_jax.explain(
                "attention", *arrays, implementation="triton", **{"kv_lengths": LENGTHS[:2]}
                | options
            )
        return getattr(explained, phase).kernel

    assert kernel() == kernel(causal=True, softcap=1.0) == "triton.paged"
    assert kernel("backward") == kernel(T=17) == kernel(mask=np.ones((1, 1, 1, 64), bool))
    assert kernel(bias=normal(64)) == kernel(segment_ids=None, dropout_rate=0.5,
        dropout_key=jax.random.key(0)) == "triton"  # fmt: skip


def test_short_caches_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = api.prepare(*qkv()).spec
    assert paged.serves(spec, GPUS[90]) and not paged.serves(spec, device.Device("cpu"))
    monkeypatch.undo()
    for B, T, H, G, fewest in ((16, 1, 32, 8, 512), (8, 1, 16, 16, 4096), (1, 16, 32, 8, 8192)):
        spec = dataclasses.replace(spec, B=B, T=T, H=H, G=G)
        takes = [
            paged.serves(dataclasses.replace(spec, S=S), GPUS[90]) for S in (fewest - 1, fewest)
        ]
        assert takes == [False, True]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_few_queries(dtype: str) -> None:
    """In 16 bits they follow attention's own forward, which keeps what rounding took from out."""
    arrays = [jnp.nan_to_num(array) for array in qkv(dtype)]
    options = {"causal": True, "kv_lengths": LENGTHS, "return_lse": True}
    wanted = numerics.oracle("attention", *arrays, **options)

    def run(*arrays: Any) -> dict[str, Any]:
        cotangents = wanted.cotangents
        return numerics.run("attention", "triton", *arrays, cotangents=cotangents, **options)

    with ato_jax.interpret():
        numerics.compare(run(*arrays), wanted)
        runs_paged = "attention_paged" in str(jax.make_jaxpr(run)(*arrays))
    assert runs_paged == (dtype == "float32")


# -- bad input -----------------------------------------------------------------------------------

class Typed:
    """What has a dtype and no values."""

    dtype = np.dtype("int8")


INT8 = np.zeros((B, S, G, D), np.int8)
SCALES = np.ones((B, S, G), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_pages": normal(B + 1, S, G, D)}, r"k_pages must be \[B, S, G, D\] with B=3, D=16"),
        ({"v_pages": normal(B, S + 1, G, V)}, r"v_pages must be \[B, S, G, V\] with B=3, S=48"),
        ({"v_pages": None}, "value_dim must be given without v_pages"),
        ({"v_pages": None, "value_dim": D + 1}, "value_dim must be at most D=16, got 17"),
        ({"v_pages": None, "value_dim": 0}, "value_dim must be an int of at least 1"),
        ({"value_dim": V}, "value_dim goes without v_pages"),
        ({"page_table": np.zeros((B, 1), int)}, "lengths must be given with a page_table"),
        ({"lengths": [1, 2, S + 1]}, "lengths must lie between 0 and S=48"),
        ({"k_pages": INT8}, "v_pages must have k_pages's dtype int8, got float32"),
        ({"v_pages": INT8}, "v_pages must have k_pages's dtype float32, got int8"),
        ({"k_pages": INT8.astype(np.int16)}, "k_pages must be .* int8 or float8_e4m3fn, got int16"),
        ({"k_pages": INT8, "v_pages": INT8}, "k_scale_pages must be given with k_pages in int8"),
        (
            {"k_pages": INT8, "v_pages": INT8, "k_scale_pages": SCALES},
            "v_scale_pages must be given with v_pages in int8",
        ),
        (
            {"k_pages": INT8, "v_pages": INT8, "k_scale_pages": SCALES[..., 0]},
            r"k_scale_pages must be \[B, S, G\] with B=3, S=48, G=2",
        ),
        (
            {"k_pages": INT8, "v_pages": INT8, "k_scale_pages": SCALES.astype(np.float16)},
            "k_scale_pages must be float32, got float16",
        ),
        ({"k_pages": Typed()}, "k_pages must be an array, got <"),
        ({"k_scale_pages": SCALES}, "k_scale_pages goes with k_pages in int8 or .*, got float32"),
        (
            {"k_pages": INT8, "v_pages": None, "value_dim": V, "k_scale_pages": SCALES,
             "v_scale_pages": SCALES},
            "v_scale_pages goes with v_pages in .*, got none",
        ),
    ],
)  # fmt: skip
def test_refuses(change: dict[str, Any], message: str) -> None:
    arguments = {
        "q": normal(B, T, H, D),
        "k_pages": normal(B, S, G, D),
        "v_pages": normal(B, S, G, V),
    }
    with pytest.raises(ValueError, match=message):
        ato_jax.decode_attention(**(arguments | change))


def test_lengths_are_checked_without_a_table() -> None:
    attend = ato_jax.checked(functools.partial(ato_jax.decode_attention, implementation="xla"))
    error, _ = attend(*qkv(), lengths=jnp.array([49, 0, 0]))
    assert "lengths must lie between 0 and S=48" in str(error.get())
