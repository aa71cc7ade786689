"""Softmax attention's options in the Triton kernels: interpreted, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax.device import SHARED_MEMORY, Device
from ato_jax.ops.attention import triton
from ato_jax.ops.attention.spec import AttentionSpec
from ato_jax.ops.attention.triton import visibility
from examples import piecewise_attention
from tests import numerics
from tests.test_attention_triton import SMALL_TILES, draw

KEY = jax.random.key(5)
IDS = np.array([[3] * 7 + [4] * 20 + [9] * 6, [0] * 33])
# Runs in no order, one id of them twice, more keys than queries.
Q_IDS = np.array([[7] * 5 + [2] * 20 + [5] * 8, [1] * 20 + [0] * 13])
KV_IDS = np.array([[2] * 18 + [7] * 1 + [5] * 20 + [2] * 3, [0] * 21 + [4] * 21])


def of_shape(axes, sizes, kind="bias"):
    """A bias with some -inf in it, or a mask with whole rows hidden, over these of the axes."""
    generator = np.random.default_rng(7)
    shape = [sizes[axis] if axis in axes else 1 for axis in "BHTS"]
    if kind == "mask":
        mask = generator.random(shape) < 0.6
        mask[..., 2:4, :] = False
        return jnp.asarray(mask)
    bias = generator.normal(size=shape)
    bias[generator.random(shape) < 0.1] = -np.inf
    return jnp.asarray(bias, jnp.float32)


def check(dtype="float32", parts=1, poisoned=False, bias=None, mask=None, **given):
    """Both phases with small tiles against the oracle; `poisoned` puts NaN beyond the lengths."""
    sizes = dict(B=2, T=33, S=42, H=2, G=1, D=16, V=20)
    sizes |= {name: given.pop(name) for name in list(given) if name in sizes}
    layout = given.get("layout", "bthd")
    q, k, v = draw(dtype, **sizes, layout=layout)
    if bias is not None:
        given["bias"] = of_shape(bias, sizes).astype(dtype)
    if mask is not None:
        given["mask"] = of_shape(mask, sizes, "mask")
    if given.pop("sinks", False):
        given["sinks"] = jnp.linspace(-1, 2, sizes["H"], dtype=jnp.float32)
    if poisoned:
        q_lengths, kv_lengths = given.get("q_lengths"), given.get("kv_lengths")
        if sizes["T"] == sizes["S"]:
            q_lengths = kv_lengths if q_lengths is None else q_lengths
            kv_lengths = q_lengths if kv_lengths is None else kv_lengths

        def poison(array, lengths):
            if lengths is None:
                return array
            time = 1 if layout == "bthd" else 2
            index = np.arange(array.shape[time]).reshape([-1] + [1] * (3 - time))
            return jnp.where(index < np.reshape(lengths, (-1, 1, 1, 1)), array, jnp.nan)

        q, k, v = poison(q, q_lengths), poison(k, kv_lengths), poison(v, kv_lengths)
    wanted = numerics.oracle("attention", q, k, v, **given)
    shares = {"parts": parts, "dq_parts": parts, "dkv_parts": parts}
    with ato_jax.interpret():
        found = numerics.run_backends(
            "triton",
            "triton",
            wanted,
            forward_config=SMALL_TILES | shares,
            backward_config=SMALL_TILES | shares,
        )
    numerics.compare(found, wanted)


SQUARE = dict(T=33, S=33)
CASES = {
    "kv_lengths": dict(kv_lengths=[0, 17], bias="BTS", poisoned=True),
    "lengths of both": dict(
        SQUARE, kv_lengths=[33, 16], q_lengths=[5, 33], causal=True, poisoned=True
    ),
    # Of one length for both, the first query's position is static; of two, each sequence's own.
    "shared lengths": dict(SQUARE, kv_lengths=[18, 1], causal=True, poisoned=True, window=(9, 3)),
    "segments": dict(SQUARE, parts=3, segment_ids=IDS, causal=True, return_lse=True),
    "segments of both": dict(q_segment_ids=Q_IDS, kv_segment_ids=KV_IDS),
    "query_offset": dict(query_offset=np.array([-20, 30]), causal=True, return_lse=True),
    "far query_offset": dict(query_offset=np.array([-(2**29), 2**29]), window=(5, 2**28)),
    "mask BHTS": dict(mask="BHTS", H=6, G=2),
    "bias BHTS": dict(bias="BHTS", causal=True, H=3, G=1),
    "bias TS": dict(bias="TS", H=4, G=2, softcap=1.5, return_lse=True),
    "bias BS": dict(dtype="float16", bias="BS", H=3, G=1),
    "bias HS": dict(parts=3, bias="HS", q_lengths=[0, 17], return_lse=True, poisoned=True),
    "bias HT": dict(bias="HT", return_lse=True),
    "bias H": dict(bias="H", sinks=True, return_lse=True),
    "sinks and lengths": dict(sinks=True, q_lengths=[0, 20], kv_lengths=[0, 40], return_lse=True),
    "dropout": dict(dropout_rate=0.4, dropout_key=KEY, H=4, G=2, return_lse=True),
    "rows in two slices": dict(D=80, V=96, T=20, S=20, causal=True, return_lse=True),
    "rows in many slices": dict(D=300, V=512, T=257, S=20, bias="TS", kv_lengths=[3, 20]),
}
EVERY = dict(
    B=2,
    H=4,
    G=2,
    q_segment_ids=Q_IDS,
    kv_segment_ids=KV_IDS,
    q_lengths=[30, 17],
    kv_lengths=[41, 30],
    query_offset=np.array([5, 13]),
    window=(17, None),
    causal=True,
    bias="HTS",
    mask="BTS",
    sinks=True,
    softcap=3.0,
    dropout_rate=0.2,
    dropout_key=KEY,
    return_lse=True,
    poisoned=True,
)


@pytest.mark.parametrize("name", CASES)
def test_options(name):
    check(**CASES[name])


@pytest.mark.parametrize(
    "options", [dict(dtype="bfloat16"), dict(dtype="float16", parts=2, layout="bhtd")], ids=str
)
def test_all_options_in_16_bits(options):
    check(**EVERY, **options)


def test_dropout_drops_the_same_weights_on_every_backend():
    """Uniform weights and one value to a key: what is not 0 was kept."""
    q, k = jnp.zeros((2, 20, 3, 4)), jnp.zeros((2, 37, 3, 4))
    v = jnp.broadcast_to(jnp.eye(37)[None, :, None], (2, 37, 3, 37))
    kept = {}
    with ato_jax.interpret():
        for name in ("reference", "xla", "triton"):
            out = ato_jax.attention(q, k, v, dropout_rate=0.3, dropout_key=KEY, implementation=name)
            kept[name] = np.asarray(out != 0)
    assert 0.65 < kept["reference"].mean() < 0.75
    for name in ("xla", "triton"):
        np.testing.assert_array_equal(kept[name], kept["reference"])


def test_few_queries_share_a_card_and_many_do_not():
    h200 = Device("gpu", "NVIDIA H200", (9, 0), 132, SHARED_MEMORY[9, 0])

    def parts(T, S, **options):
        spec = AttentionSpec(1, T, S, 8, 8, 128, 128, "bfloat16", 1.0, **options)
        config = triton.default_config(spec, h200)
        return config.parts, config.dq_parts, config.dkv_parts

    assert parts(1, 65536) == (16, 16, 1)
    assert parts(65536, 77) == (1, 1, 8)
    assert parts(8192, 8192) == (1, 1, 1)
    assert parts(1, 65536, left=200, right=0) == (1, 1, 1)
    assert parts(1, 100) == (1, 1, 1)


def test_piecewise_attention_example():
    arrays = piecewise_attention.random_arrays(1, 30, 40, 2, 1, 16)

    def loss(function, **options):
        def of_arrays(arrays):
            with ato_jax.interpret():
                return jnp.sum(jnp.sin(function(*arrays, threshold=9, **options)))

        return jax.jit(jax.value_and_grad(of_arrays))(arrays)

    found = loss(piecewise_attention.piecewise_attention, implementation="triton")
    wanted = loss(piecewise_attention.definition)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["sorted", "padded at the end", "unsorted", "returning", "apart"])
def test_segment_ranges_hold_every_visible_pair(kind):
    generator = np.random.default_rng(1)
    T, S, rows, block = 150, 170, 16, 8

    def ids(length):
        runs = np.sort(generator.integers(1, 9, length))
        if kind == "padded at the end":
            runs[-20:] = 0
        if kind == "unsorted":
            return (runs * 5 + 3) % 11
        return generator.integers(0, 3, length) if kind == "returning" else runs

    q_ids, kv_ids = ids(T), ids(S) + 100 * (kind == "apart")
    sides = (jnp.asarray(side[None]) for side in (q_ids, kv_ids))
    ranges = visibility.segment_ranges(*sides, rows, block)
    pairs = q_ids[:, None] == kv_ids
    for n, (first, whole, whole_end, end) in enumerate(np.asarray(ranges[0])):
        tile = pairs[n * rows : (n + 1) * rows]
        seen = np.flatnonzero(tile.any(0))
        if not seen.size:
            assert first >= end or kind == "returning"
            continue
        assert first * block <= seen[0] and seen[-1] < end * block
        assert tile[:, whole * block : whole_end * block].all()
        if kind != "returning":
            # No block more than needed.
            assert first == seen[0] // block and end == seen[-1] // block + 1
