"""The gradients of softmax attention by Mosaic GPU: interpreted beside the float64 reference,
compiled for a Hopper card without one, and their schedule."""

from __future__ import annotations

import dataclasses
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax.ops.attention import mosaic_gpu
from ato_jax.ops.attention.mosaic_gpu import bias_gradient, gradient_storage, visibility
from ato_jax.ops.attention.spec import Outputs
from tests import aot_attention, numerics
from tests.aot_mosaic import requires_plugin
from tests.interpreted import newest, no_races  # noqa: F401
from tests.test_aot_mosaic import of_the_oldest
from tests.test_attention_mosaic import H200, draw, segment_ids, spec_of, with_nan


def gradients(
    arrays: list[Any],
    config: dict[str, Any] | None = None,
    cotangents: Any = None,
    forward: str = "reference",
    **options: Any,
) -> None:
    """Compares them with the reference's, whose outputs they are given, or those of `forward`."""
    wanted = numerics.oracle("attention", *arrays, cotangents=cotangents, **options)
    assert mosaic_gpu.unsupported(wanted.request.spec, "backward") is None
    with ato_jax.interpret():
        found = numerics.run_backends(
            forward, "mosaic_gpu", wanted, device=H200, backward_config=config
        )
    numerics.compare(found, wanted)


@newest
@pytest.mark.parametrize(
    "sizes, options",
    [
        (dict(T=200, D=128, H=2), dict(causal=True)),
        (dict(T=136, S=72, D=256), dict(causal=True)),
        (
            dict(T=203, S=141, D=64, V=128, H=2, dtype="float16"),
            dict(layout="bhtd", return_lse=True, softcap=2.0, sinks=jnp.array([0.5, -jnp.inf])),
        ),
    ],
)
def test_numbers(sizes: Any, options: Any) -> None:
    """Tails, groups, queries that see nothing, dk and dv apart, parts of columns on either side."""
    gradients(draw(**sizes, layout=options.get("layout", "bthd")), **options)


def of_lengths(arrays: list[Any]) -> tuple[list[Any], dict[str, jax.Array]]:
    """Arrays of four batch entries with NaN in their padding, and the options that say what is
    padding: a sequence without keys, and one that no query sees, are among them."""
    T, S = arrays[0].shape[1], arrays[1].shape[1]
    lengths = {
        "q_lengths": jnp.array([T, 3, 0, 64], jnp.int32),
        "kv_lengths": jnp.array([S, 128, 9, 70], jnp.int32),
        "query_offset": jnp.array([-30, 10, 50, 10**6], jnp.int32),
    }
    of_arrays = [lengths["q_lengths"], lengths["kv_lengths"], lengths["kv_lengths"]]
    arrays = [with_nan(x, length, "bthd") for x, length in zip(arrays, of_arrays, strict=True)]
    return arrays, lengths


@newest
def test_lengths() -> None:
    """Padding holds NaN. A sequence without keys, one that no query sees, and a window."""
    arrays, lengths = of_lengths(draw(T=200, S=136, D=64, B=4))
    gradients(arrays, window=(70, 10), **lengths)


def of_segments() -> tuple[list[Any], dict[str, jax.Array]]:
    """Arrays of two batch entries with groups of two heads, and the segments of their rows."""
    of_queries, of_keys = (segment_ids(length, [20, 45, 150, 190]) for length in (200, 136))
    ids = {"q_segment_ids": of_queries, "kv_segment_ids": of_keys}
    return draw(T=200, S=136, B=2, H=2, G=1), ids


@newest
def test_segments() -> None:
    """Sorted ones, and ids that come back, with some that the other side lacks; groups of two."""
    arrays, ids = of_segments()
    gradients(arrays, causal=True, **ids)


@newest
@pytest.mark.parametrize(
    "mask, sizes, options",
    [
        ("1HTS", dict(T=72, S=128, H=2, G=1), dict(causal=True)),
        ("B11S", dict(T=72, S=76, B=2, G=1), {}),
        ("BHT1", dict(T=72, S=64, B=2, H=2, G=2), dict(layout="bhtd")),
    ],
)
def test_masks(mask: str, sizes: Any, options: Any) -> None:
    """Some queries see nothing, some keys are seen by none."""
    generator = np.random.default_rng(1)
    kept = generator.random([{"1": 1, **sizes}[letter] for letter in mask]) < 0.7
    kept[..., :1, :] &= "T" not in mask
    kept[..., 5:6] &= "S" not in mask
    gradients(
        draw(**sizes, layout=options.get("layout", "bthd")), mask=jnp.asarray(kept), **options
    )


@newest
@pytest.mark.parametrize(
    "bias, sizes, options",
    [
        (
            "B11S",
            dict(T=72, S=76, H=2, dtype="float16"),
            dict(causal=True, kv_lengths=jnp.array([70])),
        ),
        ("BHT1", dict(T=72, S=64, H=2, G=2), dict(layout="bhtd", return_lse=True)),
        ("BHTS", dict(T=72, S=128, H=2, G=1), dict(causal=True, softcap=2.0)),
        (
            "1HTS",
            dict(T=72, S=64, H=2, B=2, dtype="float16"),
            dict(kv_lengths=jnp.array([64, 20]), q_lengths=jnp.array([20, 72])),
        ),
    ],
)
def test_biases(bias: str, sizes: Any, options: Any) -> None:
    """Some keys are hidden by minus infinity, some queries altogether, or by the lowest number of
    all, which a query's keys then share. Padding holds NaN."""
    generator = np.random.default_rng(1)
    added = 3 * generator.normal(size=[{"1": 1, "B": 1, **sizes}[letter] for letter in bias])
    if "T" in bias:
        added[..., :1, :], added[..., -1:, :] = -np.inf, np.finfo(np.float32).min
    else:
        added[..., 3:9], added[..., 9:11] = -np.inf, np.finfo(np.float32).min
    options = dict(sinks=jnp.array([0.4, -jnp.inf])) | options
    arrays = draw(**sizes, layout=options.get("layout", "bthd"))
    if "q_lengths" in options:
        lengths = [options["q_lengths"], options["kv_lengths"], options["kv_lengths"]]
        arrays = [with_nan(x, length, "bthd") for x, length in zip(arrays, lengths, strict=True)]
    gradients(arrays, bias=jnp.asarray(added, "float32"), **options)


@newest
@pytest.mark.parametrize(
    "sizes, options",
    [
        (dict(T=72, S=136, H=2, G=1, dtype="float16"), dict(causal=True)),
        (dict(T=72, S=64, B=2, H=2, V=256), dict(bias=jnp.linspace(-2, 2, 2 * 72 * 64))),
    ],
)
def test_dropout(sizes: Any, options: Any) -> None:
    """Groups, dk and dv apart, a bias over pairs."""
    options = dict(options)
    if "bias" in options:
        options["bias"] = options["bias"].reshape(1, 2, 72, 64)
    gradients(draw(**sizes), dropout_rate=0.3, dropout_key=jax.random.key(7), **options)


@newest
@pytest.mark.parametrize(
    "dtype, seed, return_lse", [("bfloat16", 2, False), ("float16", 51, True)]
)
def test_a_sink_whose_gradient_is_a_sum_that_cancels(
    dtype: str, seed: int, return_lse: bool
) -> None:
    """Its 40 terms are on average 8 times as large as the sum. By out, whose weights are rounded,
    it would be off by 6e-2 in bfloat16, and by 6.5e-3 in float16."""
    arrays = draw(T=40, dtype=dtype)
    options: Any = dict(sinks=jnp.zeros(1), return_lse=return_lse)
    request, _ = numerics.prepare("attention", *arrays, **options)
    cotangents = numerics.draw_cotangents("attention", request, seed)
    gradients(arrays, cotangents=cotangents, forward="mosaic_gpu", **options)


@newest
@pytest.mark.parametrize(
    "dtype, scale, dlse", [("bfloat16", 0.01, 0.62744), ("float16", 0.004, 0.625305)]
)
def test_gradients_through_lse_that_are_all_alike(dtype: str, scale: float, dlse: float) -> None:
    """The gradient of each score is dlse / 160: in the middle of two numbers of the dtype, so that
    the sign of q_i . k_j decides how it is rounded."""
    arrays = [x.astype(dtype) for x in draw(T=160, D=16, dtype="float32", scale=scale)]
    lse = jnp.full((1, 160, 1), dlse, jnp.float32)
    cotangents = Outputs((1e-3 * arrays[2].astype("float32")).astype(dtype), lse)
    gradients(arrays, cotangents=cotangents, return_lse=True)


@newest
def test_sinks_as_high_as_a_bias() -> None:
    """There lse has no digits for the logarithm of the number of keys, and all weights have to be
    divided by their sum, those in the sum of ds too."""
    q, k, v = draw(T=40, H=2)
    high = 2.0**24  # beside which lse is rounded to 2
    bias, sinks = jnp.full((1, 2, 40, 1), high), jnp.full(2, high)
    gradients([0 * q, k, v], bias=bias, sinks=sinks, return_lse=True)


@newest
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_sinks_beside_all_else(dtype: str, with_bias: bool) -> None:
    """Padding holds NaN. With a bias the kernel for dq sums weights too, and there is dropout."""
    lengths = dict(q_lengths=jnp.array([72, 9, 30]), kv_lengths=jnp.array([130, 60, 0]))
    arrays = draw(T=72, S=136, B=3, H=2, dtype=dtype)
    of_arrays = [lengths["q_lengths"], lengths["kv_lengths"], lengths["kv_lengths"]]
    arrays = [with_nan(x, length, "bthd") for x, length in zip(arrays, of_arrays, strict=True)]
    options: Any = dict(softcap=2.0, window=(70, 20), return_lse=True, **lengths)
    options |= dict(sinks=jnp.array([0.5, -1.0]))
    if with_bias:
        options |= dict(dropout_rate=0.3, dropout_key=jax.random.key(7))
        added = np.random.default_rng(1).normal(size=(1, 2, 72, 1))
        added[..., :5, :] = np.finfo(np.float32).min
        options["bias"] = jnp.asarray(added, "float32")
    gradients(arrays, **options)


@pytest.mark.parametrize("right", [None, 0])
def test_each_tile_is_one_item(right: int | None) -> None:
    spec = spec_of(right=right, T=2**16, S=1000)
    config = dataclasses.replace(mosaic_gpu.default_config(spec, H200), dkv_consumers=2)
    of = gradient_storage.dkv_passes(spec, config)[0]
    places = [tuple(map(int, of.rounds.place(jnp.int32(n)))) for n in range(of.blocks)]
    wanted = [(b, g, 128 * tile) for b in range(2) for g in range(2) for tile in range(8)]
    assert sorted(places) == wanted
    # All tiles of the heads whose queries fit the cache, the ones that are seen most first.
    assert places[:2] == [(0, 0, 0), (0, 0, 128)]


@pytest.mark.parametrize(
    "left, right, offset", [(None, 0, 24), (9, 30, 0), (70, 0, -5), (3, None, 0)]
)
def test_ranges_of_queries(left: int | None, right: int | None, offset: int) -> None:
    """Against all pairs: no query that sees a key of the block is left out, and whole blocks hide
    no pair."""
    T, S, keys, queries = 100, 130, 16, 8
    spec = spec_of(T=T, S=S, left=left, right=right, offset=offset)
    position, j = np.arange(-(-T // queries) * queries)[:, None] + offset, np.arange(S)[None]
    visible = np.broadcast_to(position - offset < T, (position.size, S)).copy()
    visible &= True if left is None else j >= position - left
    visible &= True if right is None else j <= position + right
    limits = visibility.exchanged(spec, visibility.limits_of(spec, None, None))
    blocks = position.size // queries
    for first_key in range(0, S, keys):
        seen = visibility.ranges(limits, jnp.int32(first_key), keys, queries, blocks)
        first, whole, whole_end, end = map(int, seen)
        assert 0 <= first < end and first <= whole <= whole_end <= end
        own = visible[:, first_key : first_key + keys].reshape(blocks, queries, -1)
        some, every = own.any((1, 2)), own.all((1, 2))
        assert not some[:first].any() and not some[end:].any()
        assert every[whole:whole_end].all()


@pytest.mark.parametrize("of_batch, of_head", [*itertools.product((False, True), repeat=2)])
def test_each_element_of_a_bias_has_one_owner(of_batch: bool, of_head: bool) -> None:
    """Which sums over all entries that share the element, each of them once."""
    spec = spec_of(B=3, T=200, S=1152, bias=(of_batch, of_head, True, True))
    tiles = bias_gradient.tiles_of(spec, mosaic_gpu.default_config(spec, H200))
    assert tiles is not None
    places = [tiles.place(jnp.int32(n)) for n in range(tiles.blocks)]
    found = sorted((int(b), int(h), int(row), int(block)) for (b, h), row, block in places)
    batches, heads = range(3 if of_batch else 1), range(4 if of_head else 1)
    first_rows = range(0, 200, tiles.of.tile)
    assert found == list(itertools.product(batches, heads, first_rows, (0, 8, 16)))
    owners = itertools.product(batches, heads)
    entries = [tiles.entry(own, jnp.int32(n)) for own in owners for n in range(tiles.entries)]
    assert sorted((int(b), int(h)) for b, h in entries) == list(
        itertools.product(range(3), range(4))
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(segments=True),
        dict(mask=(True,) * 4),
        dict(mask=(True, False) * 2),
        dict(bias=(True,) * 4),
        dict(bias=(False, True, True, True), mask=(True, False, True, True)),
    ],
)
def test_shared_memory_suffices(options: dict[str, Any]) -> None:
    """With room for loads ahead of the products, but for the widest heads with an option."""
    for D, V in itertools.product(range(16, 257, 16), repeat=2):
        spec = spec_of(B=64, T=1024, S=1024, D=D, V=V, **options)
        assert mosaic_gpu.unsupported(spec, "backward") is None
        for of in gradient_storage.passes(spec, mosaic_gpu.default_config(spec, H200)):
            assert of.fits and of.x_stages + of.y_stages >= (2 if options else 3)


# Bytes of registers that the kernels of dq and of dk and dv spill; no products may wait for each
# other.
COMPILED = [
    (aot_attention.Call(8192, 128, options=dict(causal=True)), 0, 8),
    # Indices of the causal mask, for the few blocks that it cuts.
    (aot_attention.Call(8192, 64, H=32, options=dict(causal=True)), 0, 72),
    (aot_attention.Call(8192, 128), 0, 0),
    (aot_attention.Call(8192, 256, H=8, options=dict(causal=True, layout="bhtd")), 8, 0),
    (
        aot_attention.Call(
            8191,
            128,
            G=4,
            S=8000,
            dtype="float16",
            options=dict(causal=True, window=(1024, None), softcap=30.0),
            arrays=dict(kv_lengths=("B", "int32"), q_lengths=("B", "int32")),
        ),
        0,
        340,
    ),
    (
        aot_attention.Call(
            8192,
            128,
            options=dict(causal=True),
            arrays=dict(bias=("1HTS", "bfloat16"), mask=("B1TS", "bool")),
        ),
        0,
        0,
    ),
    (
        aot_attention.Call(
            8192,
            128,
            options=dict(causal=True, dropout_rate=0.1),
            arrays=dict(mask=("B11S", "bool")),
        ),
        0,
        104,
    ),
    (
        aot_attention.Call(
            8192, 64, H=32, options=dict(dropout_rate=0.1), arrays=dict(bias=("B11S", "float32"))
        ),
        0,
        140,
    ),
    (
        aot_attention.Call(
            8192,
            256,
            H=8,
            dtype="float16",
            options=dict(layout="bhtd"),
            arrays=dict(bias=("11TS", "float32"), mask=("B1TS", "bool")),
        ),
        240,
        200,
    ),
]
# The ordinary tests compile the first one; after a change to the kernel, compile all.
STEP = 1 if os.environ.get("ATO_ALL_ROWS") == "1" else len(COMPILED)


@requires_plugin
@pytest.mark.parametrize(
    "call, of_dq, of_keys",
    [COMPILED[0], *(pytest.param(*row, marks=of_the_oldest) for row in COMPILED[STEP::STEP])],
    ids=[f"D {call.D}" for call, *_ in COMPILED[::STEP]],
)
def test_calls_compile(call: aot_attention.Call, of_dq: int, of_keys: int) -> None:
    found = aot_attention.compile_gradients(call)
    assert len(found) >= 2
    for one in found:
        spills = of_dq if "_dq" in one.name else of_keys
        assert not one.serialized and one.spill_stores <= spills, found


@requires_plugin
def test_launches() -> None:
    """Beside the three kernels: delta, the rows of lse with the heads ahead, and each padded to
    whole tiles."""
    call = aot_attention.Call(1024, 64, B=16, gradients=True)
    found = aot_attention.launches_of(call)
    assert found["custom-call"] == 3 and found.total() <= 7, found


@newest
@pytest.mark.parametrize("V", [64, 128])
def test_what_rounding_took_from_out_is_kept(V: int) -> None:
    """With scores that leave one key nearly all of a query's weight, rows of dq are right only with
    it: they were off by up to 5e-2."""
    arrays = draw(T=136, D=64, V=V, H=2, scale=4.0)
    wanted = numerics.oracle("attention", *arrays, causal=True)
    for backward in ("mosaic_gpu", "triton"):
        with ato_jax.interpret():
            found = numerics.run_backends("mosaic_gpu", backward, wanted, device=H200)
        numerics.compare(found, wanted)
        error = np.asarray(found["dq"], np.float64) - wanted.exact["dq"]
        worst, usual = (np.sqrt(np.mean(x**2, axis=-1)) for x in (error, wanted.exact["dq"]))
        least = 0.5 * np.sqrt(np.mean(wanted.exact["dq"] ** 2))
        assert np.max(worst / np.maximum(usual, least)) < 2e-2


@newest
def test_what_rounding_took_from_out_is_kept_for_a_bias() -> None:
    """Query 9 of the second head sees two keys, one of which has 97% of the weight: there dp and
    delta nearly cancel. Without `rest` this row is off by 4.4e-2, and the limit is 4.05e-2."""
    T, S, H, seed = 136, 128, 2, 77
    generator = np.random.default_rng(seed)
    q, k, v = (
        jnp.asarray(generator.normal(size=(1, length, heads, 64)), "bfloat16")
        for length, heads in ((T, H), (S, 1), (S, 1))
    )
    bias = jnp.asarray(generator.normal(size=(1, H, T, S)), "float32")
    options: Any = dict(causal=True, softcap=5.0, bias=bias)
    request, _ = numerics.prepare("attention", q, k, v, **options)
    cotangents = numerics.draw_cotangents("attention", request, seed)
    gradients([q, k, v], cotangents=cotangents, forward="mosaic_gpu", **options)
