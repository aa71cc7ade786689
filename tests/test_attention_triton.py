"""The Triton kernels of softmax attention: interpreted, against the reference."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax.launch import no_triton, pallas_call
from ato_jax.ops.attention import triton
from ato_jax.ops.attention.spec import AttentionSpec, Outputs
from ato_jax.ops.attention.triton import common, visibility
from tests import aot, numerics

# Tiles as small as they come: several blocks, masked ones and whole ones, at sizes that a CPU
# interprets quickly.
KERNELS = ("", "dq_", "dkv_", "dbias_")
SMALL_TILES = {f"{kernel}block_{side}": 16 for kernel in KERNELS for side in ("q", "k")}


def draw(dtype, B=1, T=50, S=50, H=2, G=2, D=16, V=16, layout="bthd", scale=1.0):
    generator = np.random.default_rng(0)

    def array(length, heads, width):
        shape = (B, length, heads, width) if layout == "bthd" else (B, heads, length, width)
        return jnp.asarray(scale * generator.normal(size=shape), dtype)

    return array(T, H, D), array(S, G, D), array(S, G, V)


def check(q, k, v, cotangents=None, **options):
    wanted = numerics.oracle("attention", q, k, v, cotangents=cotangents, **options)
    with ato_jax.interpret():
        result = numerics.run_backends(
            "triton",
            "triton",
            wanted,
            forward_config=SMALL_TILES,
            backward_config=SMALL_TILES,
        )
    numerics.compare(result, wanted)
    return wanted


@pytest.mark.parametrize(
    "sizes, options",
    [
        (dict(T=37, S=70, H=4, G=2, D=20, V=9, B=2), dict(causal=True, return_lse=True)),
        (dict(T=70, S=37, H=4, G=1, layout="bhtd"), dict(causal=True, return_lse=True)),
        (dict(T=40, S=50), dict(causal=True, query_offset=0, softcap=1.5)),
        (dict(T=40, S=50), dict(causal=True, query_offset=-20, return_lse=True)),
        (dict(T=60, S=60, H=2, G=1), dict(causal=True, window=(9, None))),
        (dict(T=60, S=70), dict(window=(5, 20), query_offset=3)),
        (dict(T=1, S=40, D=3), dict(causal=True)),
        (dict(T=20, S=1, D=1, V=1), dict()),
        (dict(), dict(scale=-0.5)),
        (dict(), dict(scale=0.0)),
        (dict(), dict(precision="tf32")),
    ],
    ids=str,
)
def test_numerics_by_feature(sizes, options):
    q, k, v = draw("float32", **sizes)
    check(q, k, v, **options, **({"layout": sizes["layout"]} if "layout" in sizes else {}))


# One program for each dtype. In float32 at scale 30, scores in the thousands show whether the two
# backward kernels find the same weights to the last bit.
@pytest.mark.parametrize(
    "dtype, scale",
    [
        ("float32", 1.0),
        ("float16", 1.0),
        ("bfloat16", 1.0),
        ("float32", 0.01),
        ("float16", 0.01),
        ("bfloat16", 0.01),
        ("float32", 30.0),
        ("float16", 30.0),
        ("bfloat16", 30.0),
    ],
)
def test_numerics_by_dtype_and_scale(dtype, scale):
    check(*draw(dtype, scale=scale), causal=True)


@pytest.mark.parametrize("size", [2.0**-12, 2.0**10])
def test_float16_gradients_of_tiny_and_huge_cotangents(size):
    """The scores' gradient is below what float16 holds, or above, but for the powers of two."""
    q, k, v = draw("float16")
    generator = np.random.default_rng(1)
    out = jnp.asarray(size * generator.normal(size=q.shape), "float16")
    check(q, k, v, cotangents=Outputs(out, jnp.zeros(q.shape[:-1], jnp.float32)))


@pytest.mark.parametrize(
    "options",
    [
        dict(causal=True, return_lse=True),
        dict(q_lengths=[70, 33], kv_lengths=[41, 90], sinks=[0.5, -1.0], return_lse=True),
        dict(dropout_rate=0.3, window=(20, 7)),
    ],
    ids=str,
)
def test_queries_in_strands(options):
    options = {
        name: jnp.asarray(value) if isinstance(value, list) else value
        for name, value in options.items()
    }
    if "dropout_rate" in options:
        options["dropout_key"] = jax.random.key(0)
    # The last block's second strand lies beyond the queries.
    wanted = numerics.oracle("attention", *draw("bfloat16", B=2, T=80, S=90), **options)
    tiles = SMALL_TILES | {"block_q": 32, "strands": 2}
    with ato_jax.interpret():
        result = numerics.run_backends("triton", "triton", wanted, forward_config=tiles)
    numerics.compare(result, wanted)


@pytest.mark.parametrize("dtype, parts", [("bfloat16", 1), ("bfloat16", 2), ("float16", 1)])
def test_queries_that_one_key_has_nearly_to_itself(dtype, parts):
    """do . v_j - do . out is small then: `out` as it was rounded is too coarse."""
    q, k, v = draw(dtype, T=40, S=40)
    wanted = numerics.oracle("attention", q, 6 * k, v)
    tiles = SMALL_TILES | {"parts": parts}
    with ato_jax.interpret():
        result = numerics.run_backends("triton", "triton", wanted, forward_config=tiles)
    numerics.compare(result, wanted)
    exact = wanted.exact["dq"]
    error, worst = numerics.errors(np.asarray(result["dq"], np.float64), exact, None, True)
    assert error < numerics.budget("dq", dtype) and worst < 4 * numerics.budget("dq", dtype)


def draw_pairs_of_keys(dtype, D, size, causal=False, T=80, S=90):
    """Queries between two keys; at size 30 their scores are thousands above all others'.

    In every 40th row the second key has a few hundredths of the weight. In all other rows it has
    none: do . v_j - do . out vanishes there, and dq and dk come from the few rows alone.
    """
    generator = np.random.default_rng(0)
    k, v = size * generator.normal(size=(S, D)), generator.normal(size=(S, D))
    row = np.arange(T)
    last = row + S - T if causal else np.full(T, S - 1)
    middle = last // 2 + 1
    pair = np.stack([generator.integers(0, middle), generator.integers(middle, last + 1)])
    first, second = k[generator.permuted(pair, axis=0)]
    apart = first - second
    q = (first + second) / np.sqrt(2)
    lead = np.where(row % 40 == 0, generator.uniform(3, 5, size=T), 40.0) * np.sqrt(D)
    q += apart * ((lead - np.sum(q * apart, 1)) / np.sum(apart**2, 1))[:, None]
    return tuple(jnp.asarray(array[None, :, None], dtype) for array in (q, k, v))


def check_pairs_of_keys(q, k, v, tiles=None, **options):
    """The result and the oracle; lse gets no cotangent, which would be most of dq."""
    generator = np.random.default_rng(1)
    out = jnp.asarray(generator.normal(size=(*q.shape[:-1], v.shape[-1])), v.dtype)
    cotangents = Outputs(out, jnp.zeros(q.shape[:-1], jnp.float32))
    wanted = numerics.oracle(
        "attention", q, k, v, cotangents=cotangents, return_lse=True, **options
    )
    medium = dict.fromkeys(SMALL_TILES, 32)
    with ato_jax.interpret():
        result = numerics.run_backends(
            "triton",
            "triton",
            wanted,
            forward_config=medium | (tiles or {}),
            backward_config=medium,
        )
    numerics.compare(result, wanted)
    return result, wanted


def check_without_terms(result, wanted):
    """dq and dk keep their budgets, or twice the ideal's error, measured against what is left of
    the terms that cancel. How XLA adds on a processor changes what is left by a tenth."""
    for name in ("dq", "dk"):
        error, ideal = (
            numerics.errors(np.asarray(found[name], np.float64), wanted.exact[name], None, True)[0]
            for found in (result, wanted.ideal)
        )
        limit = max(numerics.budget(name, wanted.request.spec.dtype), 2 * ideal)
        assert error < limit, (name, error, ideal)


@pytest.mark.parametrize("D, causal", [(64, False), (64, True), (128, True)])
@pytest.mark.parametrize("size", [1.0, 10.0, 30.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_one_key_with_all_the_weight_at_scores_in_the_thousands(dtype, D, size, causal):
    """The weight of the highest score is 1 but for the rounding of m, and 1 in 16 bits."""
    result, wanted = check_pairs_of_keys(*draw_pairs_of_keys(dtype, D, size, causal), causal=causal)
    if dtype != "float32" and size > 1:
        check_without_terms(result, wanted)


@pytest.mark.parametrize(
    "options",
    [
        dict(tiles={"strands": 2}),
        dict(tiles={"parts": 2}),
        dict(sinks=jnp.array([4000.0])),
        dict(sinks=jnp.array([-jnp.inf])),
        dict(softcap=10000.0),
        dict(q_lengths=jnp.array([70]), kv_lengths=jnp.array([85])),
        dict(mask=jnp.asarray(np.arange(90) % 7 > 0)[None, None]),
        dict(bias=jnp.zeros((1, 1, 1, 90))),
    ],
    ids=lambda options: ", ".join(options),
)
def test_options_at_scores_in_the_thousands(options):
    result, wanted = check_pairs_of_keys(*draw_pairs_of_keys("float16", 64, 30.0), **options)
    check_without_terms(result, wanted)


def test_sinks_and_queries_that_see_nothing_beside_scores_in_the_thousands():
    """Beside a sink that is above the highest score, that score's weight is not near 1."""
    arrays = draw_pairs_of_keys("bfloat16", 64, 30.0)
    highest = float(np.max(np.asarray(check_pairs_of_keys(*arrays)[0]["lse"])))
    for sink in (highest - 1, highest, highest + 1):
        check_pairs_of_keys(*arrays, sinks=jnp.array([sink]))
    check_pairs_of_keys(*arrays, causal=True, query_offset=-30)


# float32 factors have three bfloat16 parts each, and the order in which six of their products are
# added up decides the last bit of a score. Interpreted products have no such order.

EXACT = AttentionSpec(1, 64, 64, 1, 1, 64, 64, "float32", 1.0)


def added_in_order(order, spec, a, b, *, trans_b=False):
    """a . b^T by six products in order, each off by a share that grows with its place.

    The order of true sums shows in one score of hundreds.
    """
    if not trans_b:
        return common._interpreted_dot(a, b, trans_b)

    def parts(x):
        found = []
        for _ in range(3):
            found.append(jax.lax.reduce_precision(x, 8, 7))
            x = x - found[-1]
        return found

    a_parts, b_parts = parts(a), parts(b)
    products = [common._interpreted_dot(a_parts[i], b_parts[j], trans_b) for i, j in order]
    return sum(product * (1 + place * 2**-12) for place, product in enumerate(products))


MIRRORED = tuple((j, i) for i, j in common.ORDER_OF_PRODUCTS)


@pytest.mark.parametrize("mirrored", [True, False])
def test_queries_of_one_key_where_exact_products_have_an_order(monkeypatch, mirrored):
    """In the kernel for dk and dv the factors are swapped; scores are up to 20,000."""
    order = MIRRORED if mirrored else common.ORDER_OF_PRODUCTS
    monkeypatch.setattr(
        common, "dot", functools.partial(added_in_order, common.ORDER_OF_PRODUCTS)
    )
    monkeypatch.setattr(
        common, "mirrored_dot", functools.partial(added_in_order, order, trans_b=True)
    )
    q, k, v = draw("float32", T=16, S=16, H=1, G=1, scale=100.0)
    own = jnp.arange(16)[None]
    wanted = numerics.oracle("attention", q, k, v, q_segment_ids=own, kv_segment_ids=own)
    jax.clear_caches()  # which do not know what was replaced
    with ato_jax.interpret():
        result = numerics.run_backends("triton", "triton", wanted, backward_config=SMALL_TILES)
    jax.clear_caches()
    dv, exact = np.asarray(result["dv"], np.float64), wanted.exact["dv"]
    error = np.linalg.norm(dv - exact) / np.linalg.norm(exact)
    assert error < 2e-7 if mirrored else error > 1e-4, error


def test_mirrored_products_have_the_same_bits():
    """Rows of one column, so that only the order of the six products is at work."""
    generator = np.random.default_rng(0)
    a, b = (jnp.asarray(generator.normal(size=(99, 1)), jnp.float32) for _ in range(2))
    found = common.exact_products(a, b.T)
    assert (common.exact_products(b, a.T, MIRRORED).T == found).all()
    assert (common.exact_products(b, a.T).T != found).any()
    np.testing.assert_allclose(found, np.asarray(a, np.float64) * np.asarray(b, np.float64).T, 2e-7)


def test_a_mirrored_product_of_an_infinite_factor():
    a = jnp.full((16, 16), 2.0).at[0, 0].set(jnp.inf)
    assert (common.exact_products(a, jnp.ones((16, 16)), MIRRORED)[0] == jnp.inf).all()


def stored_sums(D, mirrored):
    """q . k^T, or its transpose, as Pallas writes it for Triton: `_terms` of what is stored."""
    spec = dataclasses.replace(EXACT, D=D)

    def kernel(q_ref, k_ref, out_ref):
        q, k = (common.load_rows("bhtd", ref, None, 0, 32, 32, D) for ref in (q_ref, k_ref))
        if mirrored:
            out_ref[...] = common.inner(spec, k, q, mirrored=True)
        else:
            out_ref[...] = common.inner(spec, q, k)

    rows = jax.ShapeDtypeStruct((32, common.row_size(D)), jnp.float32)
    out = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    call = pallas_call(kernel, out_shape=out, grid=(1,), name="scores")
    (found,) = aot.triton_kernels(call, rows, rows, capability=90)
    operations = {}
    for line in found.ttir.splitlines():
        if match := re.match(r"\s*(%\w+) = \w+\.(\w+)(.*)", line):
            operations[match[1]] = match[2], re.findall(r"%\w+", match[3])
        elif "tt.store" in line:
            stored = re.findall(r"%\w+", line)[1]
    return _terms(operations, stored)


def _terms(operations, name):
    """The products that a sum adds up, in order; a pair of such lists where it adds two sums."""
    operation, operands = operations[name]
    if operation == "splat":  # of zeros
        return []
    if operation == "dot":
        *factors, sums = operands
        return [*_terms(operations, sums), dict(_part(operations, one) for one in factors)]
    if operation == "select":  # of what is not NaN
        return max((_terms(operations, one) for one in operands[1:]), key=len)
    assert operation == "addf", operation
    first, last = (_terms(operations, one) for one in operands)
    return [*first, *last] if len(last) == 1 else [first, last]


def _part(operations, name):
    """The argument that a factor is a part of, and the number of that part, from 0."""
    operation, operands = operations[name]
    if operation == "load":
        place = operands[0]
        while place in operations:
            place = operations[place][1][0]
        return place, 0
    whose, count = _part(operations, operands[0])
    return whose, count + (operation == "subf")


@pytest.mark.skipif(no_triton is not None, reason=str(no_triton))
@pytest.mark.parametrize("D", [64, 96])
def test_mirrored_products_are_added_as_pallas_adds_the_plain_ones(D):
    one = [{"%arg0": i, "%arg1": j} for i, j in common.ORDER_OF_PRODUCTS]
    wanted = one if D == 64 else [one, one]  # two slices
    assert stored_sums(D, mirrored=False) == stored_sums(D, mirrored=True) == wanted


LOWEST = float(jnp.finfo(jnp.float32).min)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("hides", [-1e4, -1.3e9, LOWEST])
def test_a_finite_bias_for_all_keys_of_a_query_hides_none(dtype, hides):
    """Beside it lse has no digits for the logarithm of the number of keys."""
    q, k, v = draw(dtype, T=40, S=40)
    bias = np.zeros((1, 2, 40, 40), np.float32)
    bias[:, :, :10] = hides
    bias[:, :, 10:20, 5:] = hides
    bias[:, 1, 30:] = -np.inf
    check(q, k, v, bias=jnp.asarray(bias), sinks=jnp.array([0.0, -jnp.inf]), return_lse=True)
    check(q, k, v, bias=jnp.asarray(bias), return_lse=True)


def test_a_bias_by_query_beside_sinks_with_nearly_all_the_weight():
    """1e-7 of the weight is left for the keys: the sink's share is 1 but for rounding."""
    q, k, v = draw("float32", T=40, S=40)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(1, 2, 40, 1)), jnp.float32)
    wanted = check(q, k, v, bias=bias, sinks=jnp.array([16.0, 25.0]))
    with ato_jax.interpret():
        result = numerics.run_backends("triton", "triton", wanted)
    error, _ = numerics.errors(np.asarray(result["dbias"]), wanted.exact["dbias"], None, True)
    assert error < numerics.budget("dbias", "float32")


@pytest.mark.parametrize("sinks", [None, -jnp.inf])
def test_gradient_through_lse_of_a_low_bias_by_query(sinks):
    """lse has no digits left there, but the sink has no share that these could spoil."""
    q, k, v = draw("bfloat16", T=12, S=12)
    bias = np.zeros((1, 2, 12, 1), np.float32)
    bias[:, :, -2:, 0] = -1.3e9, LOWEST
    options = {} if sinks is None else {"sinks": jnp.full((2,), sinks, jnp.float32)}
    wanted = check(q, k, v, return_lse=True, bias=jnp.asarray(bias), **options)
    assert np.all(np.abs(wanted.exact["dbias"][:, :, -2:]) > 1e-3)


def test_sinks_beside_which_the_keys_have_no_weight():
    """In float16 lse with its power of two has another rounding than the sink."""
    q, k, v = draw("float16", T=40, S=40)
    sinks = jnp.array([1.3e9, 2.2e8])
    wanted = check(q, k, v, sinks=sinks, return_lse=True)
    given = wanted.outputs_cotangents.lse
    np.testing.assert_allclose(wanted.exact["dsinks"], given.sum((0, 1)), rtol=1e-5)


@pytest.mark.parametrize("dtype, seed, return_lse", [("bfloat16", 13, False), ("float16", 2, True)])
def test_a_sink_whose_gradient_is_a_sum_that_cancels(dtype, seed, return_lse):
    """Each of its 40 terms is larger than the sum, and off by the rounding of its weights."""
    q, k, v = draw(dtype, T=40, S=40, H=1, G=1)
    options = {"sinks": jnp.zeros(1), "return_lse": return_lse}
    request, _ = numerics.prepare("attention", q, k, v, **options)
    check(q, k, v, numerics.draw_cotangents("attention", request, seed), **options)


def test_a_sink_above_scores_that_are_all_alike():
    """Taken from the sink, all weights would be 0.502, and would lose 3.9e-3 by one rounding."""
    q, k, _ = draw("bfloat16", T=40, S=40, H=1, G=1, scale=0.01)
    check(q, k, draw("bfloat16", T=40, S=40, H=1, G=1)[2], sinks=jnp.array([0.6892]))


def test_few_queries_whose_weights_are_all_alike():
    """1/255 lies between two numbers of bfloat16: all pairs lose 3.9e-3 by one rounding."""
    q, k, _ = draw("bfloat16", T=40, S=255, H=1, G=1, scale=0.01)
    check(q, k, draw("bfloat16", T=40, S=255, H=1, G=1)[2])


@pytest.mark.parametrize("dtype, dlse", [("bfloat16", 0.62744), ("float16", 0.625305)])
def test_gradients_through_lse_that_are_all_alike(dtype, dlse):
    """The gradient of each score is dlse / 160: in the middle of two numbers of the dtype, so that
    the sign of q_i . k_j decides how it is rounded."""
    q, k, v = draw(dtype, T=160, S=160, H=1, G=1, D=8, scale=0.01)
    lse = jnp.full((1, 160, 1), dlse, jnp.float32)
    check(q, k, v, cotangents=Outputs(1e-3 * v, lse), return_lse=True)


def test_queries_that_see_nothing():
    q, k, v = draw("float32", T=40, S=40)
    with ato_jax.interpret():
        (out, lse), pull = jax.vjp(
            lambda q, k, v: ato_jax.attention(
                q,
                k,
                v,
                causal=True,
                query_offset=-30,
                return_lse=True,
                implementation="triton",
            ),
            q,
            k,
            v,
        )
        dq, dk, dv = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    assert not out[:, :30].any() and not dq[:, :30].any()
    assert jnp.isneginf(lse[:, :30]).all() and jnp.isfinite(lse[:, 30:]).all()
    assert all(jnp.isfinite(array).all() for array in (out, dq, dk, dv))


@pytest.mark.parametrize("left, right", [(None, None), (None, 0), (7, 0), (3, 11), (20, None)])
@pytest.mark.parametrize("offset", [-25, 0, 13, 90])
def test_block_ranges_hold_every_visible_pair(left, right, offset):
    spec = AttentionSpec(1, 50, 70, 1, 1, 16, 16, "float32", 1.0, left=left, right=right)
    i, j = np.ogrid[: spec.T, : spec.S]
    seen = np.ones((spec.T, spec.S), bool)
    if left is not None:
        seen &= j >= i + offset - left
    if right is not None:
        seen &= j <= i + offset + right
    for bounds, pairs, rows, block in (
        (visibility.key_bounds(spec, offset), seen, 16, 8),
        (visibility.query_bounds(visibility.key_bounds(spec, offset)), seen.T, 8, 16),
    ):
        items, length = pairs.shape
        for start in range(0, items, rows):
            first, whole, whole_end, end = map(
                int, visibility.block_ranges(bounds, jnp.int32(start), rows, length, block)
            )
            assert 0 <= first <= whole <= whole_end <= end <= -(-length // block)
            tile = pairs[start : start + rows]
            assert not tile[:, : first * block].any() and not tile[:, end * block :].any()
            assert whole_end * block <= length or whole == whole_end
            assert tile[:, whole * block : whole_end * block].all()


def test_unsupported_says_why():
    spec = AttentionSpec(1, 8, 8, 1, 1, 16, 16, "float32", 1.0)
    assert triton.unsupported(spec, "forward") is None
    for name, width in (("D", 513), ("V", 600)):
        reason = triton.unsupported(dataclasses.replace(spec, **{name: width}), "backward")
        assert reason and str(width) in reason


def test_gradients_of_saturated_scores():
    """Where tanh(x) of the softcap is 1 but for some 1e-7, so is its float32 square."""
    q, k, v = draw("bfloat16", T=12, S=12, D=1)
    q, k = jnp.sign(q), jnp.sign(k) * (7 + jnp.abs(k))
    wanted = check(q, k, v, softcap=1.0, scale=1.0)
    assert numerics.errors(wanted.ideal["dq"].astype(np.float64), wanted.exact["dq"], None, True)[0]


def test_gradient_of_a_bias_by_queries_that_see_their_sink_alone():
    """The two terms of the gradient, through lse and through the sink, are then the same."""
    q, k, v = draw("float16", T=5, S=5)
    bias = jnp.asarray(np.random.default_rng(3).normal(size=(1, 2, 5, 1)), "float16")
    sinks = jnp.asarray([0.3, -1.7], jnp.float32)
    options = {"bias": bias, "sinks": sinks, "mask": jnp.zeros((5, 5), bool)[None]}
    wanted = check(q, k, v, return_lse=True, **options)
    assert not wanted.exact["dbias"].any()
