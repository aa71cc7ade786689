"""Attention in pieces: `combine`, `total_attention`, and decoding from pages."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax.ops.attention.api import PlacedSeed, attention, dropout_seed
from ato_jax.ops.attention.decode import decode_attention
from ato_jax.ops.attention.pieces import combine, total_attention

B, T, S, H, G, D, V = 2, 5, 11, 4, 2, 8, 3
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def normal(*shape: int, seed: int = 0) -> jax.Array:
    values = np.random.default_rng((seed, *shape)).normal(size=shape)
    return jnp.asarray(values, jnp.float32)


def qkv(layout: str = "bthd") -> tuple[jax.Array, ...]:
    arrays = normal(B, T, H, D), normal(B, S, G, D, seed=1), normal(B, S, G, V, seed=2)
    return tuple(x.swapaxes(1, 2) for x in arrays) if layout == "bhtd" else arrays


def whole(*arrays: Any, **options: Any) -> Any:
    return attention(*arrays, return_lse=True, implementation="xla", **options)


# -- combine -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("stacked", [False, True])
def test_combine_is_attention_over_all_keys(layout: str, stacked: bool) -> None:
    q, k, v = qkv(layout)
    time = 1 if layout == "bthd" else 2

    def in_pieces(q: Any, k: Any, v: Any) -> Any:
        # The last cut leaves some queries of the last piece with nothing to see.
        cuts = zip(*(jnp.split(x, (4, 9), axis=time) for x in (k, v)), strict=True)
        pieces = [
            whole(q, *cut, causal=True, query_offset=S - T - start, layout=layout)
            for start, cut in zip((0, 4, 9), cuts, strict=True)
        ]
        outs, lses = zip(*pieces, strict=True)
        if stacked:
            return combine(jnp.stack(outs), jnp.stack(lses), layout=layout)
        return combine(outs, lses, layout=layout)

    def at_once(q: Any, k: Any, v: Any) -> Any:
        return whole(q, k, v, causal=True, layout=layout)

    found, pull = jax.vjp(jax.jit(in_pieces), q, k, v)
    wanted, pull_wanted = jax.vjp(jax.jit(at_once), q, k, v)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **CLOSE), found, wanted)
    cotangents = normal(*found[0].shape, seed=3), normal(*found[1].shape, seed=4)
    for one, other in zip(pull(cotangents), pull_wanted(cotangents), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton"])
def test_sinks_belong_to_any_one_piece(implementation: str) -> None:
    """Where a query sees none of that piece's keys, its lse has the sink's gradient all the same.

    Padded queries are in no piece, and theirs is 0.
    """
    q, k, v = qkv()
    sinks, q_lengths = normal(H, seed=5), [T, T - 2]
    options = {"causal": True, "return_lse": True, "implementation": implementation}
    cut = S - 2  # the last queries alone see keys from there on

    def in_pieces(sinks: Any) -> Any:
        near, far = (
            attention(
                q, k[:, part], v[:, part], query_offset=S - T - (part.start or 0),
                q_lengths=q_lengths, kv_lengths=[k[:, part].shape[1]] * B,
                sinks=sinks if part.start else None, **options,
            )
            for part in (slice(None, cut), slice(cut, None))
        )  # fmt: skip
        return combine(*zip(near, far, strict=True))

    def at_once(sinks: Any) -> Any:
        lengths = {"q_lengths": q_lengths, "kv_lengths": [S] * B}
        given = options | lengths | {"implementation": "reference"}
        return attention(q, k, v, query_offset=S - T, sinks=sinks, **given)

    with ato_jax.interpret():
        found, pull = jax.vjp(in_pieces, sinks)
        cotangents = normal(*found[0].shape, seed=3), normal(*found[1].shape, seed=4)
        [dsinks] = pull(cotangents)
    wanted, pull_wanted = jax.vjp(at_once, sinks)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **CLOSE), found, wanted)
    np.testing.assert_allclose(dsinks, pull_wanted(cotangents)[0], rtol=1e-4, atol=1e-5)


def test_combine_where_nothing_was_seen() -> None:
    """Pieces with lse -inf count for nothing, also where their out is NaN; no NaN either way."""
    outs = normal(3, T, H, V).at[1].set(jnp.nan)
    lses = normal(3, T, H, seed=1).at[1].set(-jnp.inf).at[:, 0].set(-jnp.inf)
    out, lse = combine(outs, lses)
    alone = combine([outs[0], outs[2]], [lses[0], lses[2]])
    np.testing.assert_array_equal(out, alone[0])
    np.testing.assert_array_equal(lse, alone[1])
    assert (out[0] == 0).all() and (lse[0] == -jnp.inf).all()

    def loss(outs: Any, lses: Any) -> Any:
        out, lse = combine(outs, lses)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0))

    gradient, tangents = jax.grad(loss, (0, 1)), (outs * 0 + 1, jnp.ones_like(lses))
    gradients, second = jax.jit(functools.partial(jax.jvp, gradient))((outs, lses), tangents)
    for leaf in jax.tree.leaves(gradients):
        assert np.isfinite(leaf).all()
        assert (leaf[1] == 0).all() and (leaf[:, 0] == 0).all()
    # (outs' own tangent is NaN where outs is; those of the others are not.)
    assert np.isfinite(second[1]).all()


def test_combine_keeps_the_dtype_and_large_lse() -> None:
    outs = normal(2, 1, 1, 4).astype(jnp.bfloat16)
    out, lse = combine(outs, jnp.array([1e4, 1e4]).reshape(2, 1, 1))
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(lse, 1e4 + np.log(2))
    np.testing.assert_allclose(out, outs.astype(jnp.float32).mean(0), rtol=1e-2)


def test_combine_does_not_hide_nan() -> None:
    """A piece whose scores are NaN is not one that saw nothing."""
    outs, lses = normal(2, B, T, H, V), normal(2, B, T, H).at[0, 0, 0, 0].set(jnp.nan)
    out, lse = combine(outs, lses)
    assert np.isnan(lse[0, 0, 0]) and np.isnan(out[0, 0, 0]).all()
    assert np.isnan(lse).sum() == 1 and np.isnan(out).sum() == V


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "outs must hold at least one piece"),
        (normal(2, T, H, V), normal(3, T, H), r"lses must be \[N, T, H\] with N=2"),
        (normal(2, B, T, H, V), normal(2, B, H, T), r"lses must be \[N, B, T, H\]"),
        (normal(H, V), normal(H), r"outs must hold pieces"),
        ([normal(T, H, V), normal(T, H, 1)], normal(2, T, H), "outs must be alike"),
        (np.zeros((2, T, H, V)), normal(2, T, H), "outs must be float16, bfloat16 or float32"),
    ],
)
def test_combine_refuses(outs: Any, lses: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        combine(outs, lses)


# -- total_attention -----------------------------------------------------------------------------


def dense_total(q: Any, k: Any, lse: Any, visible: Any, bias: Any, softcap: float) -> Any:
    """In the "bthd" layout."""
    s = jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, H // G, axis=2)) / np.sqrt(D)
    s = jnp.where(visible, softcap * jnp.tanh(s / softcap) + bias, -jnp.inf)
    weights = jnp.exp(s - jnp.where(lse > -jnp.inf, lse, 0).swapaxes(1, 2)[..., None])
    return jnp.sum(weights, axis=2).swapaxes(1, 2)


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_total_attention(layout: str) -> None:
    """Values and gradients, with padded queries and queries that see nothing."""
    q, k, v = qkv(layout)
    bias = normal(1, H, 1, S).at[..., 2].set(-jnp.inf)
    q_lengths = np.array([T, T - 2])
    options = {"causal": True, "query_offset": -1, "softcap": 2.0, "q_lengths": q_lengths}
    options |= {"layout": layout, "kv_lengths": np.full(B, S)}
    _, lse = whole(q, k, v, bias=bias, **options)
    i, j = np.ogrid[:T, :S]
    visible = (j <= i - 1) & (i < q_lengths[:, None, None, None])

    def there(q: Any, k: Any, lse: Any, bias: Any) -> Any:
        return total_attention(q, k, lse, bias=bias, **options)

    def dense(q: Any, k: Any, lse: Any, bias: Any) -> Any:
        if layout == "bhtd":
            q, k, lse = (x.swapaxes(1, 2) for x in (q, k, lse))
        found = dense_total(q, k, lse, visible, bias, 2.0)
        return found.swapaxes(1, 2) if layout == "bhtd" else found

    found, pull = jax.vjp(jax.jit(there), q, k, lse, bias)
    wanted, pull_wanted = jax.vjp(jax.jit(dense), q, k, lse, bias)
    np.testing.assert_allclose(found, wanted, **CLOSE)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found.sum(), H * (2 * T - 2 - 2), rtol=1e-5)  # queries that see
    cotangent = normal(*found.shape, seed=5)
    for one, other in zip(pull(cotangent), pull_wanted(cotangent), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_total_attention_of_many_blocks_and_without_batch() -> None:
    """Two thousand queries against as many keys are several blocks."""
    q, k, v = normal(2048, 1, 4), normal(2048, 1, 4, seed=1), normal(2048, 1, 2, seed=2)
    sinks = jnp.zeros(1)
    _, lse = whole(q, k, v, sinks=sinks)
    total = total_attention(q, k, lse)
    assert total.shape == (2048, 1)
    sink = jnp.exp(-lse).sum()
    np.testing.assert_allclose(total.sum() + sink, 2048, rtol=1e-5)


def test_total_attention_of_a_padded_last_block() -> None:
    """Three blocks of 52 queries hold 155 and one that does not exist, which gives no key 1."""
    q, k, v = normal(1, 155, 4, 8), normal(1, 3, 1, 8, seed=1), normal(1, 3, 1, 2, seed=2)
    for options in ({}, {"causal": True, "query_offset": 0}):
        lse = whole(q, k, v, **options)[1]
        total = total_attention(q, k, lse, **options)
        np.testing.assert_allclose(total.sum(1), np.full((1, 4), 155), rtol=1e-5)


def test_total_attention_does_not_hide_nan() -> None:
    q, k, v = qkv()
    lse = attention(q, k, v, return_lse=True)[1].at[0, 0, 0].set(jnp.nan)
    total = total_attention(q, k, lse)
    assert np.isnan(total[0, :, 0]).all() and np.isnan(total).sum() == k.shape[1]


def test_total_attention_refuses() -> None:
    q, k, _ = qkv()
    with pytest.raises(ValueError, match=r"lse must be \[B, T, H\] with B=2, T=5, H=4"):
        total_attention(q, k, normal(B, H, T))


# -- decode_attention ----------------------------------------------------------------------------

PAGES, PAGE = 9, 4


def pages_and_table(lengths: np.ndarray, seed: int = 0) -> tuple[Any, ...]:
    """Contiguous caches [B, S, G, ...], and the same in pages, with NaN and nonsense around."""
    k = np.array(normal(len(lengths), 3 * PAGE, G, D, seed=seed))
    v = np.array(normal(len(lengths), 3 * PAGE, G, V, seed=seed + 1))
    k_pages = np.full((PAGES, PAGE, G, D), np.nan, np.float32)
    v_pages = np.full((PAGES, PAGE, G, V), np.nan, np.float32)
    table = np.random.default_rng(seed).integers(-(2**31), 2**31 - 1, (len(lengths), 3))
    free = iter((7, 2, 5, 1, 8, 3))
    for b, length in enumerate(lengths):
        for n in range(-(-length // PAGE)):
            rows = min(PAGE, length - n * PAGE)
            table[b, n] = next(free)
            k_pages[table[b, n], :rows] = k[b, n * PAGE :][:rows]
            v_pages[table[b, n], :rows] = v[b, n * PAGE :][:rows]
    return k, v, jnp.asarray(k_pages), jnp.asarray(v_pages), jnp.asarray(table, jnp.int32)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [None, (4, 0)])
def test_decode(queries: int, window: Any) -> None:
    lengths = np.array([10, 3, 0, 4])
    k, v, k_pages, v_pages, table = pages_and_table(lengths)
    q, sinks = normal(4, queries, H, D, seed=7), normal(H)
    out, lse = decode_attention(
        q, k_pages, v_pages, table, lengths,
        window=window, softcap=3.0, sinks=sinks, scale=0.5, return_lse=True,
    )  # fmt: skip
    for b, length in enumerate(lengths):
        if length == 0:
            assert (out[b] == 0).all()
            np.testing.assert_allclose(lse[b], np.broadcast_to(sinks, lse[b].shape))
            continue
        wanted = whole(
            q[b], k[b, :length], v[b, :length],
            causal=True, window=window, softcap=3.0, sinks=sinks, scale=0.5,
        )  # fmt: skip
        np.testing.assert_allclose(out[b], wanted[0], **CLOSE)
        np.testing.assert_allclose(lse[b], wanted[1], **CLOSE)


def test_decode_where_queries_are_as_many_as_keys() -> None:
    """T = S must not make the keys' lengths the queries'; queries before the first key see none."""
    _, _, k_pages, v_pages, table = pages_and_table(np.array([2]))
    q = normal(1, PAGE, H, D)
    out, lse = decode_attention(q, k_pages, v_pages, table[:, :1], [2], return_lse=True)
    assert (out[:, :2] == 0).all() and (lse[:, :2] == -jnp.inf).all()
    assert np.isfinite(lse[:, 2:]).all()


def test_decode_takes_wide_integers() -> None:
    """64 bits on the host or on the device, and anything in those that are not used."""
    lengths = np.array([10, 3])
    _, _, k_pages, v_pages, table = pages_and_table(lengths)
    q = normal(2, 1, H, D)
    wanted = decode_attention(q, k_pages, v_pages, table, lengths)
    np.testing.assert_array_equal(
        decode_attention(q, k_pages, v_pages, np.array(table, np.int64), lengths), wanted
    )
    with jax.enable_x64(True):
        wide = jnp.asarray(np.array(table, np.int64)).at[1, 1:].set(1 << 40)
        found = decode_attention(q, k_pages, v_pages, wide, jnp.asarray(lengths))
    np.testing.assert_array_equal(found, wanted)


def test_decode_traces_and_differentiates() -> None:
    lengths = jnp.array([10, 3])
    _, _, k_pages, v_pages, table = pages_and_table(np.array([10, 3]))
    q = normal(2, 2, H, D)

    @jax.jit
    def gradient(q: Any, k_pages: Any, lengths: Any) -> Any:
        def loss(q: Any, k_pages: Any) -> Any:
            return decode_attention(q, k_pages, v_pages, table, lengths).sum()

        return jax.grad(loss, (0, 1))(q, k_pages)

    assert all(np.isfinite(leaf).all() for leaf in gradient(q, k_pages, lengths))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": normal(2, 17, H, D)}, "q must hold between 1 and 16 queries, got T=17"),
        ({"q": normal(H, D)}, r"q must be \[B, T, H, D\] or \[T, H, D\], got shape \(4, 8\)"),
        (
            {"q": normal(2, H, D)},
            r"page_table must be \[pages\] where q is \[T, H, D\], got shape \(2, 3\)",
        ),
        ({"q": None}, "q must be an array, got None"),
        ({"k_pages": None}, "k_pages must be an array, got None"),
        ({"implementation": "flash"}, "implementation must be None or one of .*, got 'flash'"),
        ({"v_pages": normal(PAGES, 2, G, V)}, r"v_pages must be \[P, page, G, V\] with P=9, page"),
        ({"page_table": np.zeros((3, 3), int)}, r"page_table must be \[B, pages\] with B=2"),
        ({"page_table": np.zeros((2, 3))}, "page_table must hold integers"),
        ({"page_table": [[-1, 0, 0], [0, 1, 2]]}, "page_table must lie between 0 and P - 1 = 8"),
        ({"page_table": [[3, -1, 9], [0, 1, 9]]}, "page_table .* = 8 where used, got .* to 9"),
        ({"lengths": [1, 13]}, "lengths must lie between 0 and S=12"),
        ({"q": normal(2, 1, 3, D)}, "multiple of k's heads G, got H=3, G=2"),
        ({"k_pages": np.zeros((PAGES, PAGE, G, D))}, "k_pages must be bfloat16, float16"),
    ],
)
def test_decode_refuses(change: dict[str, Any], message: str) -> None:
    arguments = {
        "q": normal(2, 1, H, D),
        "k_pages": normal(PAGES, PAGE, G, D),
        "v_pages": normal(PAGES, PAGE, G, V),
        "page_table": np.zeros((2, 3), int),
        "lengths": [1, 12],
    }
    with pytest.raises(ValueError, match=message):
        decode_attention(**(arguments | change))


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_dropout_in_a_part_of_a_call(implementation: str) -> None:
    """A part that knows its place drops the weights that the whole call drops there."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 32, 4, 16))
    key = jax.random.key(1)
    drop = functools.partial(
        attention, dropout_rate=0.4, implementation=implementation
    )
    placed = PlacedSeed(dropout_seed(key), 1, 2, 16, 0)
    with ato_jax.interpret():
        whole = drop(q, k, v, dropout_key=key)
        part = drop(
            *(array[1:, start:, 2:] for array, start in ((q, 16), (k, 0), (v, 0))),
            dropout_key=placed,
        )
    np.testing.assert_allclose(part, whole[1:, 16:, 2:], rtol=1e-5, atol=1e-6)
