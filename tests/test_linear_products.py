"""Linear attention of large states by products (`xla/products`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import choosing
from ato_jax.ops.linear_attention import large_states
from ato_jax.ops.linear_attention.spec import LinearState
from ato_jax.ops.linear_attention.xla import products
from ato_jax.ops.linear_attention.xla.products import rows
from benchmarks.choices import Row
from tests import choices, numerics

# Wider than tall, so that no axis is taken for another; a chunk of 256 rows and a part of one.
SIZES = {"B": 1, "T": 300, "S": 300, "H": 2, "G": 2, "D": 272, "V": 24}
# A state that only float16 and TF32 leave to products; odd numbers.
SMALLER = {"T": 299, "S": 299, "D": 131, "V": 23}
TF32 = {"precision": "tf32"}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two segments of two chunks at 300 rows, one batch entry after the other, and no least number
    of rows of heads."""
    monkeypatch.setattr(large_states, "LEAST_ROWS_OF_HEADS", 1)
    monkeypatch.setattr(products, "default_config", lambda spec, device: products.Config(80, 2, 1))
    monkeypatch.setattr(
        type(products.BACKEND), "default_config", staticmethod(products.default_config)
    )


def draw(dtype: str, layout: str = "bthd", **sizes: int) -> list[jax.Array]:
    sizes = SIZES | sizes
    random = np.random.default_rng(0)

    def one(letters: str) -> jax.Array:
        order = letters if layout == "bthd" else letters[0] + letters[2] + letters[1] + letters[3]
        shape = [sizes[letter] for letter in order]
        return jnp.asarray(random.normal(size=shape), dtype)

    return [one("BTHD"), one("BSGD"), one("BSGV")]


def cut_operands_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on products take their operands without the low 13 bits, as a card does that cuts
    float32 numbers to TF32."""
    product = rows.product

    def cut(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFE000)
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    monkeypatch.setattr(rows, "product", lambda spec, equation, left, right, dtype: product(
        spec, equation, cut(left), cut(right), dtype))  # fmt: skip
    jax.clear_caches()


def state(**sizes: int) -> LinearState:
    sizes = SIZES | sizes
    random = np.random.default_rng(1)
    shape = [sizes[letter] for letter in "BGDV"]
    kv, k_sum = random.normal(size=shape), np.abs(random.normal(size=shape[:3]))
    return LinearState(jnp.asarray(kv, jnp.float32), jnp.asarray(k_sum, jnp.float32))


CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("bfloat16", {}, {}),
    ("bfloat16", {}, {"causal": True}),
    ("float16", {}, {}),
    ("float16", {}, {"causal": True}),
    ("float16", SMALLER, {}),
    ("float16", SMALLER | {"H": 4}, {"causal": True, "feature_map": "exp", "layout": "bhtd"}),
    ("float16", SMALLER | {"D": 23, "V": 131}, {"feature_map": "identity"}),
    ("float32", SMALLER, TF32),
    ("float32", SMALLER | {"H": 4}, TF32 | {"causal": True}),
    ("float32", SMALLER, TF32 | {"causal": True, "feature_map": "identity"}),
    ("float32", SMALLER, TF32 | {"initial_state": state(**SMALLER), "return_state": True}),
    ("bfloat16", {"H": 4, "B": 2}, {"layout": "bhtd"}),
    ("bfloat16", {"H": 4, "B": 2}, {"causal": True, "layout": "bhtd"}),
    ("bfloat16", {"H": 4}, {"causal": True, "feature_map": "identity"}),
    ("bfloat16", {}, {"feature_map": "silu"}),
    ("bfloat16", {}, {"causal": True, "feature_map": "silu"}),
    # Several batch entries of several heads, whose operands XLA for CPUs takes in bfloat16.
    ("bfloat16", {"B": 2}, {"feature_map": "silu"}),
    ("bfloat16", {"S": 400}, {"kv_lengths": [311], "feature_map": "relu"}),
    ("bfloat16", {"B": 2}, {"q_lengths": [211, 300], "kv_lengths": [300, 5]}),
    ("bfloat16", {}, {"initial_state": state(), "return_state": True}),
    ("bfloat16", {}, {"initial_state": state(), "return_state": True, "causal": True}),
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("dtype", "sizes", "options"), CASES)
def test_products_are_within_the_budgets(
    dtype: str, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    arrays = draw(dtype, options.get("layout", "bthd"), **sizes)
    options = {
        name: np.array(value) if name.endswith("lengths") else value
        for name, value in options.items()
    }
    wanted = numerics.oracle("linear_attention", *arrays, **options)
    result = numerics.run(
        "linear_attention", "xla.products", *arrays, cotangents=wanted.cotangents, **options
    )
    numerics.compare(result, wanted)


def gates(kind: str, layout: str = "bthd", strength: float = 0.1, **sizes: int) -> jax.Array:
    """Mild decays, with some steep ones and zeros among those of steps."""
    sizes = SIZES | sizes
    random = np.random.default_rng(2)
    if kind == "head":
        return jnp.linspace(-strength, -0.01, sizes["G"], dtype=jnp.float32)
    found = -np.abs(random.normal(size=(sizes["B"], sizes["T"], sizes["G"]))) * strength
    found[random.random(found.shape) < 0.02] = -50
    found[random.random(found.shape) < 0.02] = -np.inf
    found[random.random(found.shape) < 0.1] = 0
    found = found if layout == "bthd" else np.swapaxes(found, 1, 2)
    return jnp.asarray(found, jnp.float32)


# The longest segment, of 98 rows, holds a whole chunk; two of them begin at the edge of one.
RUNS = np.repeat([4, 4, 1, 2, 0], [35, 45, 23, 98, 98])[None]
TWO = SMALLER | {"B": 2}
# The gradient of a decay per head is one number that may cancel by chance; several do not at once.
MORE = SMALLER | {"B": 2, "H": 4, "G": 4}
LENGTHS = dict.fromkeys(("q_lengths", "kv_lengths"), [299, 170])
STATES = {"initial_state": state(**TWO), "return_state": True}
# Exact float32 takes gated heads of these sizes.
EXACT = MORE | {"D": 41, "V": 23}
GATED: list[tuple[str, dict[str, int], str | None, dict[str, Any]]] = [
    ("float16", SMALLER, "step", {}),
    ("float16", TWO | {"H": 6}, "step", {"layout": "bhtd"} | LENGTHS | STATES),
    ("float16", MORE, "head", {"feature_map": "identity"}),
    ("float16", SMALLER | {"H": 4}, None, {"segment_ids": RUNS, "feature_map": "exp"}),
    ("float16", TWO, None, {"segment_ids": np.repeat(RUNS, 2, 0)} | LENGTHS | STATES),
    ("float16", TWO, "step", {"segment_ids": np.repeat(RUNS, 2, 0)} | LENGTHS | STATES),
    ("float32", SMALLER, "step", TF32 | {"segment_ids": RUNS}),
    ("float32", SMALLER | {"H": 4}, "head", TF32 | {"layout": "bhtd"}),
    ("bfloat16", {"H": 4}, "step", {}),
    ("bfloat16", {}, "step", {"feature_map": "silu", "segment_ids": [[0] * 170 + [1] * 130]}),
    ("bfloat16", {"H": 4, "G": 4}, "head", {}),
    ("float32", EXACT, "step", {}),
    ("float32", EXACT | {"H": 8}, "head", {"segment_ids": np.repeat(RUNS, 2, 0)} | LENGTHS),
    ("float32", EXACT, None, {"segment_ids": np.repeat(RUNS, 2, 0), "feature_map": "relu"}),
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dtype", "sizes", "decay", "options"), GATED)
def test_decays_and_segments_are_within_the_budgets(
    dtype: str, sizes: dict[str, int], decay: str | None, options: dict[str, Any], causal: bool
) -> None:
    layout = options.get("layout", "bthd")
    arrays = draw(dtype, layout, **sizes)
    options = {
        name: np.array(value) if name.endswith(("lengths", "ids")) else value
        for name, value in options.items()
    } | {"causal": causal}
    if decay:
        options["decay"] = gates(decay, layout, **sizes)
    wanted = numerics.oracle("linear_attention", *arrays, **options)
    result = numerics.run(
        "linear_attention", "xla.products", *arrays, cotangents=wanted.cotangents, **options
    )
    numerics.compare(result, wanted)


# Features of 1 + 2^-8 are halfway between two bfloat16 numbers, and those of 1 + 2^-11 between two
# of float16.
ALIKE = [
    ("bfloat16", None, 2.0**-8, "elu1"),
    ("bfloat16", 2.0**-8, 2.0**-8, "elu1"),
    ("bfloat16", 0.0, 0.0, "softplus"),
    ("bfloat16", 0.0, None, "elu1"),
    ("float16", 2.0**-11, 2.0**-11, "elu1"),
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "query", "key", "feature_map"), ALIKE)
def test_features_that_round_alike(
    dtype: str, query: float | None, key: float | None, feature_map: str, causal: bool
) -> None:
    """All features of a row are one number, and so are their rounding errors. Numerator and
    normaliser are off by the same factor."""
    q, k, v = draw(dtype)
    q = q if query is None else jnp.full_like(q, query)
    k = k if key is None else jnp.full_like(k, key)
    options: Any = {"causal": causal, "feature_map": feature_map}
    wanted = numerics.oracle("linear_attention", q, k, v + 5, **options)
    result = numerics.run(
        "linear_attention", "xla.products", q, k, v + 5, cotangents=wanted.cotangents, **options
    )
    numerics.compare(result, wanted)


@pytest.mark.usefixtures("small")
def test_queries_of_other_lengths_than_keys() -> None:
    """Where every query sees every key, padded keys have no decay, and padded queries see none."""
    arrays = draw("float16", **MORE)
    lengths = {"q_lengths": np.array([299, 100]), "kv_lengths": np.array([250, 299])}
    options = {"decay": gates("step", **MORE)} | lengths
    wanted = numerics.oracle("linear_attention", *arrays, **options)
    result = numerics.run(
        "linear_attention", "xla.products", *arrays, cotangents=wanted.cotangents, **options
    )
    numerics.compare(result, wanted)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [96, 300])
def test_chunks_and_batches_are_no_matter(
    causal: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one, or 50 rows of two batch entries after the other, then of the third."""
    monkeypatch.setattr(large_states, "LEAST_ROWS_OF_HEADS", 1)
    arrays = draw("float32", **EXACT | {"B": 3})
    ids = np.repeat(np.repeat([0, 1, 2], [99, 101, 99])[None], 3, 0)

    def gradients(config: products.Config) -> Any:
        config_of = staticmethod(lambda spec, device: config)
        monkeypatch.setattr(type(products.BACKEND), "default_config", config_of)
        jax.clear_caches()

        def attend(decay: jax.Array, *qkv: jax.Array) -> jax.Array:
            options: Any = {"decay": decay, "segment_ids": ids, "causal": causal}
            return ato_jax.linear_attention(*qkv, **options, implementation="xla.products")

        out, pull = jax.vjp(attend, gates("head", **EXACT), *arrays)
        return out, pull(jnp.cos(out))

    one, other = gradients(products.Config(chunk, 9, 3)), gradients(products.Config(50, 2, 2))

    def compare(x: jax.Array, y: jax.Array) -> None:
        # A decay per head has a sum of terms of either sign.
        largest = max(1.0, float(jnp.max(jnp.abs(y))))
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6 * largest)

    jax.tree.map(compare, one, other)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("strength", "normalize"), [(2.0, True), (25.0, True), (25.0, False)])
def test_the_gradient_of_decays_that_are_all_strong(strength: float, normalize: bool) -> None:
    """Each is so small that it is lost beside any pair that it is no part of, and beside what the
    last key adds to the state."""
    arrays = draw("float16", **SMALLER)
    decay = jnp.full((1, 299, 2), -strength)
    options = {"causal": True, "decay": decay, "return_state": True, "normalize": normalize}
    wanted = numerics.oracle("linear_attention", *arrays, **options)
    result = numerics.run(
        "linear_attention", "xla.products", *arrays, cotangents=wanted.cotangents, **options
    )
    found = numerics.compare(result, wanted)["ddecay"]
    assert np.any(wanted.exact["ddecay"]) and found.error < 2e-3


@pytest.mark.usefixtures("small")
def test_segments_are_calls_of_their_own() -> None:
    """Bit for bit where they begin with a chunk, whatever another one holds."""
    q, k, v = draw("float16", **SMALLER)
    ids = jnp.asarray(np.repeat([0, 1], [160, 139])[None])

    def results(k: jax.Array) -> list[np.ndarray]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array) -> jax.Array:
            return ato_jax.linear_attention(
                q, k, v, causal=True, decay=decay, segment_ids=ids, implementation="xla.products"
            )

        out, pull = jax.vjp(attend, q, k, v, gates("step", **SMALLER))
        return [np.asarray(array)[:, 160:] for array in (out, *pull(out))]

    for one, other in zip(results(k), results(k.at[:, :160].set(3)), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.any(one)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("causal", [False, True])
def test_padding_reaches_nothing(causal: bool) -> None:
    q, k, v = draw("bfloat16")
    length = jnp.array([290])
    q, k, v = (jnp.where(jnp.arange(300)[:, None, None] < 290, x, jnp.nan) for x in (q, k, v))

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = ato_jax.linear_attention(
            q, k, v, causal=causal, q_lengths=length, kv_lengths=length,
            implementation="xla.products",
        )  # fmt: skip
        return jnp.sum(out.astype(jnp.float32))

    for found in (*jax.grad(total, (0, 1, 2))(q, k, v), total(q, k, v)):
        assert np.isfinite(np.asarray(found, np.float32)).all()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_card_that_cuts_operands_to_tf32_loses_nothing(
    dtype: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands are TF32 numbers by themselves: without their low 13 bits, all results are the same
    bits."""
    arrays = draw(dtype, **SMALLER)

    def results() -> dict[str, np.ndarray]:
        options = {"causal": causal, "precision": "tf32", "implementation": "xla.products"}
        found = jax.vjp(lambda *qkv: ato_jax.linear_attention(*qkv, **options), *arrays)
        return dict(enumerate(map(np.asarray, (found[0], *found[1](found[0])))))

    wanted = results()
    cut_operands_to_tf32(monkeypatch)
    for name, found in results().items():
        np.testing.assert_array_equal(found, wanted[name])


@pytest.mark.lowering
def test_chosen_on_a_card_alone_and_only_where_no_kernel_holds_the_states() -> None:
    def backends(**sizes: Any) -> list[str | None]:
        row = Row("linear_attention", **{"B": 1, "H": 8, "T": 16384} | sizes)
        found = choices.chosen(row, choices.described("H100"))
        return [choice and choice.backend for choice in found]

    assert backends(D=512) == backends(D=320, causal=True) == ["xla.products"] * 3
    assert backends(D=256) == ["mosaic_gpu"] * 3
    assert backends(D=512, dtype="float32") == backends(D=192, dtype="float32") == ["xla"] * 3
    assert backends(D=192, V=320) == ["triton"] * 3
    every_gate: Any = {"decay": "step"}, {"decay": "head"}, {"documents": 512}
    for dtype in ({"dtype": "float16"}, {"dtype": "float32", "tf32": True}):
        by_hopper = ["mosaic_gpu" if "tf32" not in dtype else "xla.products"] * 3
        assert backends(D=155, **dtype) == backends(D=64, V=136, **dtype) == by_hopper
        assert backends(D=256, **dtype) == backends(D=256, causal=True, **dtype) == by_hopper
        assert "xla.products" not in backends(D=128, **dtype)
        assert backends(D=155, T=128, **dtype) == backends(D=155, H=1, T=2048, **dtype)
        assert backends(D=155, T=128, B=4, **dtype) == ["xla.products"] * 3
        assert "xla.products" not in backends(D=155, T=48, B=64, **dtype)
        assert "xla.products" not in backends(D=155, T=128, **dtype)
        for gated in every_gate:
            assert backends(D=155, causal=True, **gated, **dtype) == by_hopper
            assert backends(D=155, **gated, **dtype) == by_hopper
            in_documents = "tf32" not in dtype and "documents" in gated
            one_way = "mosaic_gpu" if in_documents else "triton"
            assert backends(D=64, **gated, **dtype) == [one_way] * 3
            by_products = ["triton", *["xla.products"] * 2]
            wanted = by_products if "tf32" in dtype else ["mosaic_gpu"] * 3
            assert backends(D=96, **gated, **dtype) == wanted
    for gated in every_gate:
        for causal in (False, True):
            for D in (80, 256):
                found = backends(D=D, dtype="float32", causal=causal, **gated)
                assert found == ["xla.products"] * 3
            wanted = "xla.products" if causal and "decay" in gated else "triton"
            found = backends(D=64, dtype="float32", causal=causal, **gated)
            assert found == ["triton", wanted, wanted]
    for gated in every_gate:
        assert backends(D=192, **gated) == ["mosaic_gpu"] * 3
        assert backends(D=192, causal=True, **gated) == ["mosaic_gpu"] * 3
    for gated in every_gate:
        assert backends(D=512, causal=True, **gated) == ["xla.products"] * 3
    assert backends(D=512, causal=True, decay="channel") == ["xla.products"] * 3
    q, k, v = draw("bfloat16", T=4096, S=4096)
    assert ato_jax.explain(ato_jax.linear_attention, q, k, v).implementation == "xla"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("decay", [None, "step"])
def test_a_segment_s_state_reaches_no_other_one(causal: bool, decay: str | None) -> None:
    """Not even as a NaN, where a row's weight times another segment's state is beyond float32."""
    q = jnp.zeros((1, 300, 2, 40))
    k = jnp.where((jnp.arange(300) < 150)[:, None, None], 70.0, -30.0) + q
    ids = jnp.asarray(np.repeat([0, 1], 150)[None])
    gates = None if decay is None else jnp.full((1, 300, 2), -0.01)

    def total(q: jax.Array, k: jax.Array, gates: jax.Array | None) -> jax.Array:
        out = ato_jax.linear_attention(
            q, k, jnp.ones_like(q), decay=gates, segment_ids=ids, causal=causal, feature_map="exp",
            implementation="xla.products",
        )  # fmt: skip
        return jnp.sum(out)

    for found in jax.tree.leaves(jax.grad(total, (0, 1, 2))(q, k, gates)):
        assert np.isfinite(np.asarray(found)).all()


def test_one_segment_takes_all_rows_of_as_many_entries_as_fit() -> None:
    """Rather than some rows of more entries; whatever divides the batch."""

    def config(**sizes: Any) -> tuple[int, int, int]:
        row = Row("linear_attention", **{"dtype": "float16", "documents": 512} | sizes)
        return dataclasses.astuple(
            products.default_config(choices.spec_of(row), choices.described("H200"))
        )

    assert config(B=12, T=2446, H=12, D=256) == config(B=13, T=2446, H=12, D=256) == (256, 10, 1)
    assert config(B=1021, T=64, H=8, D=64) == (64, 1, 256)
    assert config(B=1, T=1 << 20, H=8, D=128) == (128, 32, 1)


def test_xla_by_name_is_plain_jax() -> None:
    """`implementation="xla"` names no family: its calls have every derivative, on a card, too."""
    call = choosing.Call(
        choices.APIS["linear_attention"].OP, None, "xla", choices.described("H100"), False
    )
    assert choosing.candidates(call, "forward") == ("xla",)


@pytest.mark.parametrize("decay", [None, "head", "step"])
def test_strict_programs(decay: str | None) -> None:
    """With 64-bit numbers on, and without promotion of ranks, gradients are the same."""
    q, k, v, g = (
        jax.random.normal(key, (1, 300, 16, 136), jnp.float16)
        for key in jax.random.split(jax.random.key(0), 4)
    )
    gates = {None: None, "head": -jnp.full(16, 0.1), "step": -jnp.full((1, 300, 16), 0.1)}[decay]

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, gates: Any, g: jax.Array) -> Any:
        def call(q: jax.Array, k: jax.Array, v: jax.Array, gates: Any) -> jax.Array:
            lengths = jnp.array([290], jnp.int32)
            options: Any = {"q_lengths": lengths, "kv_lengths": lengths, "causal": True}
            return ato_jax.linear_attention(
                q, k, v, decay=gates, implementation="xla.products", **options
            )

        return jax.vjp(call, q, k, v, gates)[1](g)

    wanted = gradients(q, k, v, gates, g)
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        found = gradients(q, k, v, gates, g)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
