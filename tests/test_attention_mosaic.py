"""Softmax attention by Mosaic GPU: interpreted beside the float64 reference, compiled for a Hopper
card without one, and its schedule."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import device
from ato_jax.ops.attention import mosaic_gpu
from ato_jax.ops.attention.mosaic_gpu import frame, pairs, visibility
from ato_jax.ops.attention.mosaic_gpu.schedule import Schedule
from ato_jax.ops.attention.spec import AttentionSpec
from tests import aot_attention, numerics
from tests.aot_mosaic import requires_plugin
from tests.interpreted import newest, no_races  # noqa: F401

H200 = device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0])
# As few keys a step as there can be: several blocks, whole and cut ones, of few keys.
SMALL = {"consumers": 2, "keys": 64}
# Blocks that take several tiles, whose queries are loaded while the tile before is stored.
AHEAD = SMALL | {"persistent": True, "multiprocessors": 3}


def draw(
    T: int,
    S: int | None = None,
    D: int = 64,
    V: int | None = None,
    B: int = 1,
    H: int = 1,
    G: int = 1,
    dtype: str = "bfloat16",
    layout: str = "bthd",
    scale: float = 1.0,
) -> list[jax.Array]:
    generator = np.random.default_rng(0)

    def array(length: int, heads: int, width: int) -> jax.Array:
        shape = (B, length, heads, width) if layout == "bthd" else (B, heads, length, width)
        return jnp.asarray(scale * generator.normal(size=shape), dtype)

    return [array(T, H, D), array(S or T, G, D), array(S or T, G, V or D)]


def segment_ids(length: int, ends: list[int]) -> jax.Array:
    """The ids of two batch entries. The first one's are sorted and change at each of `ends`; the
    second one's come back, and a shorter side lacks some of them."""
    row = np.arange(length)
    sorted_ones = np.searchsorted(ends, row, side="right")
    return jnp.array([sorted_ones, (row // 50 * 77) % 4 + 300 * (row > 150)], jnp.int32)


def forward(
    arrays: list[jax.Array], config: dict[str, Any] = SMALL, **options: Any
) -> dict[str, jax.Array]:
    """Compares out and lse with the reference's, and returns them."""
    wanted = numerics.oracle("attention", *arrays, return_lse=True, **options)
    spec = wanted.request.spec
    assert mosaic_gpu.unsupported(spec, "forward") is None
    config_of = dataclasses.replace(mosaic_gpu.default_config(spec, H200), **config)
    assert Schedule(spec, config_of).rounds.persistent == config.get("persistent", False)
    with ato_jax.interpret():
        outputs = jax.jit(functools.partial(mosaic_gpu.forward, spec, config_of))(
            wanted.request.inputs
        )
    found = numerics.users_outputs("attention", wanted.request, outputs)
    exact = {name: wanted.exact[name] for name in ("out", "lse")}
    numerics.compare(found, dataclasses.replace(wanted, exact=exact))
    return found


@newest
@pytest.mark.parametrize(
    "sizes, config, options",
    [
        (dict(T=200, D=128, H=2), dict(keys=128), dict(causal=True)),
        (dict(T=130, S=200, D=256), {}, dict(layout="bhtd")),
        (dict(T=300, D=64, dtype="float16"), dict(consumers=3), dict(causal=True)),
        (dict(T=264, S=136, D=96), dict(rows=128), dict(causal=True)),
        (dict(T=203, S=141, D=128, H=2), {}, dict(causal=True)),
        (dict(T=136, D=192, V=128), {}, dict(causal=True)),
        (dict(T=75, S=130, D=64, V=128), {}, {}),
        (dict(T=75, S=144, D=128), {}, dict(causal=True, layout="bhtd")),
    ],
)
def test_numbers(sizes: Any, config: Any, options: Any) -> None:
    """Tails, queries that see nothing, groups, parts of columns on either side."""
    arrays = draw(**sizes, layout=options.get("layout", "bthd"))
    forward(arrays, SMALL | config, **options)


@newest
@pytest.mark.parametrize(
    "options",
    [
        dict(window=(50, 60)),
        dict(causal=True, window=(70, None)),
        dict(causal=True, query_offset=-40),
        dict(softcap=3.0, causal=True, sinks=jnp.array([0.5, -jnp.inf])),
        dict(window=(None, 3), scale=1e-3),
        dict(causal=True, dropout_rate=0.2, dropout_key=jax.random.key(3)),
    ],
)
def test_options(options: Any) -> None:
    forward(draw(T=200, D=64, H=2), **options)


@newest
@pytest.mark.parametrize(
    "dtype, factors, options",
    [
        ("bfloat16", (1e6, 1), dict(causal=True)),
        ("bfloat16", (2e7, 1), dict(sinks=jnp.array([0.5]))),
        ("float16", (2e3, 5e3), {}),
    ],
)
def test_scores_of_millions(dtype: str, factors: tuple[float, float], options: Any) -> None:
    """Scores of 5 10^6 to 10^8. The largest weight of a row, 1, is then 2^-4 to 2^4 in registers:
    the exponent of 2 is rounded."""
    q, k, v = draw(T=72, S=136, D=64, dtype=dtype)
    forward([q * jnp.asarray(factors[0], dtype), k * jnp.asarray(factors[1], dtype), v], **options)


@newest
@pytest.mark.parametrize(
    "sizes, lengths, options",
    [
        (dict(T=136, S=200), dict(q_lengths=[136, 3, 0, 64], kv_lengths=[150, 128, 9, 200]), {}),
        (dict(T=141, S=77), dict(q_lengths=[100, 70, 141, 1]), dict(causal=True)),
        (dict(T=136), dict(query_offset=[-30, 0, 50, 10**6]), dict(window=(40, 10))),
        (
            dict(T=136, S=200, H=2),
            dict(kv_lengths=[150, 128, 9, 200], query_offset=[3, -200, 70, 0]),
            dict(causal=True, layout="bhtd", sinks=jnp.array([0.3, -1.0])),
        ),
    ],
)
def test_lengths(sizes: Any, lengths: Any, options: Any) -> None:
    """Padding holds NaN."""
    layout = options.get("layout", "bthd")
    arrays = draw(**sizes, B=4, layout=layout)
    lengths = {name: jnp.array(array, jnp.int32) for name, array in lengths.items()}
    names = ("q_lengths", "kv_lengths", "kv_lengths")
    arrays = [
        with_nan(array, lengths.get(name), layout)
        for array, name in zip(arrays, names, strict=True)
    ]
    forward(arrays, **lengths, **options)


@newest
@pytest.mark.parametrize(
    "T, S, options",
    [
        (300, 300, dict(causal=True)),
        (203, 270, dict(layout="bhtd", kv_lengths=jnp.array([200, 270]))),
    ],
)
def test_segments(T: int, S: int, options: Any) -> None:
    """Sorted ones, one of them over whole blocks; and ids that come back, with some that the other
    side lacks."""
    arrays = draw(T=T, S=S, B=2, layout=options.get("layout", "bthd"))
    of_queries, of_keys = (segment_ids(length, [20, 45, 230, 280]) for length in (T, S))
    forward(arrays, q_segment_ids=of_queries, kv_segment_ids=of_keys, **options)


LOWEST = float(np.finfo(np.float32).min)


@newest
@pytest.mark.parametrize(
    "bias, mask, options",
    [
        ("BHTS", "B11S", dict(causal=True)),
        ("1111", "BHTS", {}),
        ("BHT1", "11TS", dict(softcap=2.0)),
        ("B11S", "BH11", dict(causal=True, sinks=jnp.array([0.4, -jnp.inf]))),
        (None, "BHT1", {}),
    ],
)
def test_bias_and_mask(bias: str | None, mask: str | None, options: Any) -> None:
    """Some keys are hidden by minus infinity, some rows altogether; one by the lowest number of
    all, which its keys then share."""
    sizes = {"B": 2, "H": 2, "T": 136, "S": 192, "1": 1}
    generator = np.random.default_rng(1)
    arrays: dict[str, Any] = {}
    if bias is not None:
        added = 3 * generator.normal(size=[sizes[letter] for letter in bias])
        if added.size > 100:
            added[generator.random(added.shape) < 0.1] = -np.inf
            added[..., :1, :], added[..., -1:, :] = (-np.inf, LOWEST) if "T" in bias else (0.5, 1.0)
        arrays["bias"] = jnp.asarray(added, "float32" if "1" in bias else "bfloat16")
    if mask is not None:
        arrays["mask"] = jnp.asarray(generator.random([sizes[letter] for letter in mask]) < 0.7)
    forward(draw(T=136, S=192, B=2, H=2), **arrays, **options)


def with_nan(array: jax.Array, lengths: jax.Array | None, layout: str) -> jax.Array:
    """NaN beyond each sequence's length."""
    if lengths is None:
        return array
    axis = 1 if layout == "bthd" else 2
    shape = tuple(-1 if n == axis else 1 for n in range(4))
    row = jnp.arange(array.shape[axis]).reshape(shape)
    return jnp.where(row < lengths.reshape(-1, 1, 1, 1), array, jnp.nan)


@newest
def test_large_scores() -> None:
    """The largest weight of a row that sees one key, or has one that towers over the others, is 1,
    and so is its sum: out is that key's value, bit by bit."""
    q, k, v = draw(T=136, D=64, dtype="float16")
    q, k = 20 * q, 20 * k  # scores of thousands
    found = forward([q, k, v], causal=True)
    assert bool(jnp.all(found["out"][:, 0] == v[:, 0]))
    scores = jnp.einsum("bthd,bshd->bhts", *(x.astype(jnp.float32) for x in (q, k)))
    scores = jnp.where(jnp.tril(jnp.ones((136, 136), bool)), scores, -jnp.inf)
    (first, second), best = jax.lax.top_k(scores[0, 0], 2)[0].T, jnp.argmax(scores[0, 0], axis=-1)
    towers = np.flatnonzero(np.asarray(first - second) > 8 * 30)
    assert len(towers) > 40
    assert bool(jnp.all(found["out"][0, towers, 0] == v[0, best[towers], 0]))


@newest
def test_large_scores_that_are_alike() -> None:
    """Scores of 30,000 and a little: sums of earlier blocks keep their share from step to step."""
    q, k, v = draw(T=64, S=1024, D=64)
    q, k = q.at[..., 0].set(64), k.at[..., 0].set(3750)
    v = 0.1 * v + jnp.linspace(-1, 2, 1024, dtype=v.dtype)[:, None, None]
    forward([q, k, v.astype(q.dtype)])


@newest
@pytest.mark.parametrize(
    "config",
    [
        dict(under=False, turns=False, stages=3),
        dict(persistent=True, multiprocessors=3),
        dict(persistent=True, multiprocessors=2, stages=1),
        AHEAD,
        AHEAD | dict(multiprocessors=2, stages=1, consumers=1),
    ],
)
def test_ways_of_working(config: Any) -> None:
    """Every block size and order gives the same numbers. Some blocks take the middle tiles of two
    heads, some that of one."""
    forward(draw(T=260, D=64, H=3), SMALL | config, causal=True)


@newest
@pytest.mark.parametrize(
    "sizes, options",
    [
        (dict(T=203, S=141, D=128, H=2), {}),
        (dict(T=136, D=64, V=128, H=4, G=2), dict(causal=True, window=(70, 0), layout="bhtd")),
        (
            dict(T=136, S=200, B=4, H=2, G=2),
            dict(kv_lengths=[150, 128, 9, 200], sinks=jnp.array([0.3, -1.0])),
        ),
        (dict(T=200, B=2, H=2), dict(segment_ids=jnp.arange(200)[None].repeat(2, 0) // 40)),
    ],
)
def test_queries_that_are_loaded_ahead(sizes: Any, options: Any) -> None:
    """Tiles of different numbers of steps follow one another within a block."""
    options = {
        name: jnp.asarray(value) if isinstance(value, list) else value
        for name, value in options.items()
    }
    forward(draw(**sizes, layout=options.get("layout", "bthd")), AHEAD, **options)


@newest
@pytest.mark.parametrize("config", [SMALL, AHEAD])
def test_another_backward_reads_its_outputs(config: Any) -> None:
    arrays = draw(T=200, S=100, D=64, H=4)
    wanted = numerics.oracle("attention", *arrays, causal=True, return_lse=True)
    with ato_jax.interpret():
        found = numerics.run_backends(
            "mosaic_gpu", "triton", wanted, device=H200, forward_config=config
        )
    numerics.compare(found, wanted)


def spec_of(**changes: Any) -> AttentionSpec:
    fields = dict(B=2, T=1000, S=1000, H=4, G=2, D=128, V=128, dtype="bfloat16", scale=0.1)
    return AttentionSpec(**fields | changes)


@pytest.mark.parametrize("right", [None, 0])
@pytest.mark.parametrize("persistent", [False, True])
def test_each_tile_is_one_item(persistent: bool, right: int | None) -> None:
    spec = spec_of(right=right, S=2**16)
    config = mosaic_gpu.Config(
        consumers=2, rows=64, keys=128, stages=2, persistent=persistent, multiprocessors=7
    )
    schedule = Schedule(spec, config)
    dealt = schedule.rounds
    assert schedule.group == 2 and schedule.tiles == 8 and dealt.items == 64
    places = [tuple(map(int, dealt.place(jnp.int32(n)))) for n in range(dealt.items)]
    wanted = [(b, h, 128 * t) for b in range(2) for h in range(4) for t in range(8)]
    assert sorted(places) == wanted
    # Heads of a group side by side, and tiles that see most keys first.
    first = 7 * 128 if right == 0 else 0
    assert places[:2] == [(0, 0, first), (0, 1, first)]
    assert dealt.persistent == persistent and schedule.blocks == (7 if persistent else 64)


@pytest.mark.parametrize(
    "left, right, offset", [(None, 0, 24), (9, 30, 0), (70, 0, -5), (3, None, 0)]
)
def test_ranges_of_blocks(left: int | None, right: int | None, offset: int) -> None:
    """Against all pairs: no visible one is left out, and whole blocks hide none."""
    T, S, rows, keys = 100, 130, 16, 8
    spec = spec_of(T=T, S=S, left=left, right=right, offset=offset)
    position, j = np.arange(T)[:, None] + offset, np.arange(-(-S // keys) * keys)[None]
    visible = np.broadcast_to(j < S, (T, j.size)).copy()
    visible &= True if left is None else j >= position - left
    visible &= True if right is None else j <= position + right
    limits = visibility.limits_of(spec, None, None)
    for first_row in range(0, T, rows):
        seen = visibility.ranges(limits, jnp.int32(first_row), rows, keys, -(-S // keys))
        first, whole, whole_end, end = map(int, seen)
        assert 0 <= first < end and first <= whole <= whole_end <= end
        own = visible[first_row : first_row + rows].reshape(-1, j.size // keys, keys)
        some, every = own.any((0, 2)), own.all((0, 2))
        assert not some[:first].any() and not some[end:].any()
        assert every[whole:whole_end].all()


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(dtype="float32"), "bfloat16 and float16"),
        (dict(D=72, V=72), "multiple of 16"),
        (dict(D=512, V=512), "up to 256"),
        (dict(T=1001, D=96, V=96), "multiples of 8"),
        (dict(T=1001, V=80), "multiples of 8"),
        (dict(scale=0.0), "positive scale"),
    ],
)
def test_what_is_refused_says_why(changes: Any, reason: str) -> None:
    found = mosaic_gpu.unsupported(spec_of(**changes), "forward")
    assert found is not None and reason in found
    assert mosaic_gpu.unsupported(spec_of(), "forward") is None


def test_shared_memory_suffices() -> None:
    """Whatever is supported fits, with a bias in float32; the rest is refused."""
    pairs_of, sizes = (True, True, True, True), range(16, 257, 16)
    refused = 0
    for D, V in itertools.product(sizes, sizes):
        for bias, mask in itertools.product((None, pairs_of), (None, pairs_of)):
            spec = spec_of(T=1024, S=1024, D=D, V=V, bias=bias, mask=mask)
            config = mosaic_gpu.default_config(spec, H200)
            planes = pairs.Planes(
                None if bias is None else pairs.Plane(bias, jnp.float32),
                None if mask is None else pairs.Plane(mask, jnp.int8),
            )
            reason = mosaic_gpu.unsupported(spec, "forward")
            block, own = pairs.block_of(config), frame.shared_bytes(spec, config)
            slots = planes.slots(block, frame.MOST_BYTES - own)
            slots *= sum(plane.bytes(block) for plane in planes.in_ring)
            fits = own + slots <= H200.shared_memory
            assert fits if reason is None else "no room" in reason
            refused += reason is not None
            assert config.stages == 2 or bias is not None or V != D
    assert refused < 20


# Bytes of registers that a call's kernel spills; no products may wait for each other.
COMPILED = [
    (aot_attention.Call(8192, 64, H=32, options=dict(causal=True)), 160),
    (aot_attention.Call(8192, 128), 0),
    (aot_attention.Call(8191, 128, S=8000, options=dict(causal=True, window=(1024, None))), 0),
    (
        aot_attention.Call(
            8192,
            128,
            options=dict(causal=True),
            arrays=dict(
                bias=("1HTS", "bfloat16"), mask=("B1TS", "bool"), kv_lengths=("B", "int32")
            ),
        ),
        64,
    ),
    (aot_attention.Call(8192, 256, H=8, options=dict(causal=True, layout="bhtd")), 0),
]


# The ordinary tests compile every third one; after a change to the kernel, compile all.
STEP = 1 if os.environ.get("ATO_ALL_ROWS") == "1" else 3


@requires_plugin
@pytest.mark.parametrize(
    "call, spills", COMPILED[::STEP], ids=[f"D {call.D}" for call, _ in COMPILED[::STEP]]
)
def test_calls_compile(call: aot_attention.Call, spills: int) -> None:
    found = aot_attention.compile_call(call)
    assert not found.serialized and found.spill_stores <= spills, found
