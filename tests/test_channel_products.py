"""Linear attention with a decay per step and channel by products (`xla/products`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_linear_products import cut_operands_to_tf32

import ato_jax
from ato_jax.ops.linear_attention import large_states
from ato_jax.ops.linear_attention.spec import LinearState
from ato_jax.ops.linear_attention.xla import products
from ato_jax.ops.linear_attention.xla.products import channels
from benchmarks.choices import Row
from tests import choices, numerics

pytestmark = pytest.mark.skipif(
    jax.__version_info__ <= products.LAST_JAX_TO_CRASH, reason="XLA crashes on a CPU"
)

T = 200
SIZES = {"B": 1, "T": T, "H": 2, "G": 2, "D": 24, "V": 16}
TF32 = {"precision": "tf32"}
# The longest segment, of 96 rows, holds a whole chunk, which one of them begins at the edge of.
RUNS = np.repeat([4, 4, 1, 2, 0], [35, 45, 23, 25, 72])[None]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two segments of two chunks of 64 rows, one batch entry after the other, and no least number
    of rows of heads."""
    monkeypatch.setattr(large_states, "LEAST_ROWS_OF_HEADS", 1)
    configure(monkeypatch, products.Config(64, 2, 1))


def configure(monkeypatch: pytest.MonkeyPatch, config: products.Config) -> None:
    config_of = staticmethod(lambda spec, device: config)
    monkeypatch.setattr(type(products.BACKEND), "default_config", config_of)
    jax.clear_caches()


def draw(dtype: str = "float32", layout: str = "bthd", **sizes: int) -> list[jax.Array]:
    sizes = SIZES | sizes
    random = np.random.default_rng(0)
    B, rows, H, G, D, V = (sizes[letter] for letter in "BTHGDV")
    shapes = (B, rows, H, D), (B, rows, G, D), (B, rows, G, V)
    arrays = [random.normal(size=shape) for shape in shapes]
    return [jnp.asarray(np.swapaxes(x, 1, 2) if layout == "bhtd" else x, dtype) for x in arrays]


def decays(name: str, layout: str = "bthd", **sizes: int) -> jax.Array:
    """By the form that takes most chunks: of whole chunks, of blocks of 16 rows, of single rows."""
    sizes = SIZES | sizes
    random = np.random.default_rng(1)
    shape = sizes["B"], sizes["T"], sizes["G"], sizes["D"]
    size = np.abs(random.normal(size=shape))
    if name == "mild":
        found = -np.log1p(np.exp(random.normal(size=shape)))
    elif name == "strong":
        found = -3 * size
    elif name == "rare":
        found = -0.02 * size
        found[random.random(shape) < 0.02] = -50
        found[random.random(shape) < 0.01] = -np.inf
        found[random.random(shape) < 0.1] = 0
    else:
        found = -np.exp(random.uniform(np.log(1e-3), np.log(80), shape))
        found[random.random(shape) < 0.1] = 0
        found[..., ::3] *= 0.01
    return jnp.asarray(np.swapaxes(found, 1, 2) if layout == "bhtd" else found, jnp.float32)


def state(**sizes: int) -> LinearState:
    sizes = SIZES | sizes
    random = np.random.default_rng(2)
    shape = [sizes[letter] for letter in "BGDV"]
    kv, k_sum = random.normal(size=shape), np.abs(random.normal(size=shape[:3]))
    return LinearState(jnp.asarray(kv, jnp.float32), jnp.asarray(k_sum, jnp.float32))


STATES = {"initial_state": state(), "return_state": True}
LENGTHS = dict.fromkeys(("q_lengths", "kv_lengths"), [170])
TWO = {"B": 2, "H": 4}
BOTH_WAYS = {"causal": False}
CASES: list[tuple[str, dict[str, int], str, dict[str, Any]]] = [
    ("float32", {}, "mild", STATES),
    ("float32", {"H": 4}, "mixed", BOTH_WAYS | STATES),
    ("float32", {"D": 41, "V": 23}, "rare", {"feature_map": "identity"}),
    ("float32", TWO, "strong", {"layout": "bhtd"} | BOTH_WAYS),
    ("float32", {}, "rare", LENGTHS | STATES),
    ("float32", {}, "mild", {"segment_ids": RUNS} | STATES),
    ("float32", {}, "mild", {"segment_ids": RUNS} | BOTH_WAYS),
    ("float32", {"H": 4}, "mixed", TF32 | LENGTHS | {"segment_ids": RUNS} | BOTH_WAYS),
    ("float32", {}, "mild", TF32 | {"feature_map": "silu"}),
    ("float16", TWO, "mild", {"feature_map": "exp"} | BOTH_WAYS),
    ("float16", {"D": 41, "V": 23}, "strong", {"segment_ids": RUNS}),
    ("float16", {"H": 4}, "mixed", LENGTHS | STATES),
    ("bfloat16", {}, "mild", {"feature_map": "identity"}),
]


def check(dtype: str, sizes: dict[str, int], decay: str, options: dict[str, Any]) -> None:
    layout = options.get("layout", "bthd")
    arrays = draw(dtype, layout, **sizes)
    options = {
        name: np.array(value) if name.endswith(("lengths", "ids")) else value
        for name, value in options.items()
    }
    options["decay"] = decays(decay, layout, **sizes)
    wanted = numerics.oracle("linear_attention", *arrays, **options)
    result = numerics.run(
        "linear_attention", "xla.products", *arrays, cotangents=wanted.cotangents, **options
    )
    numerics.compare(result, wanted)


@pytest.mark.parametrize(("dtype", "sizes", "decay", "options"), CASES)
def test_within_the_budgets(
    dtype: str, sizes: dict[str, int], decay: str, options: dict[str, Any]
) -> None:
    check(dtype, sizes, decay, {"causal": True} | options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("config", [(16, 20, 1), (128, 1, 2)])
def test_any_chunks(
    config: tuple[int, int, int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their states in groups, and several blocks in a chunk."""
    configure(monkeypatch, products.Config(*config))
    ids = np.repeat([[0, 1, 2]], [100, 28, 128], axis=1)
    options = {"causal": causal, "segment_ids": np.repeat(ids, 2, 0)}
    check("float32", {"B": 2, "T": 256}, "mild", options)


def test_the_form_follows_the_decays() -> None:
    steps = jnp.full((1, 1, 2, 128, 3), -0.5)
    found = [steps * by for by in (1, 10)]
    found += [steps.at[0, 0, 1, 70, 2].set(-56.0), steps.at[0, 0, 1, 40:50, 1].set(-5.0)]
    sizes = [channels.forms(128)[int(channels.form(one, 1.0))] for one in found]
    assert sizes == [64, 16, 1, 16]
    # Large features leave less of the range of float32.
    assert [int(channels.form(steps, largest)) for largest in (1e9, 1e30, np.inf)] == [0, 1, 2]


@pytest.mark.parametrize(("strength", "normalize"), [(2.0, True), (25.0, True), (25.0, False)])
def test_the_gradient_of_decays_that_are_all_strong(strength: float, normalize: bool) -> None:
    """Each is so small that it is lost beside any pair that it is no part of, and beside what the
    last key adds to the state."""
    arrays = draw("float16")
    decay = jnp.full((1, T, 2, 24), -strength)
    options = {"causal": True, "decay": decay, "return_state": True, "normalize": normalize}
    wanted = numerics.oracle("linear_attention", *arrays, **options)
    result = numerics.run(
        "linear_attention", "xla.products", *arrays, cotangents=wanted.cotangents, **options
    )
    found = numerics.compare(result, wanted)["ddecay"]
    assert np.any(wanted.exact["ddecay"]) and found.error < 2e-3


def test_segments_are_calls_of_their_own() -> None:
    """Bit for bit where they begin with a chunk, whatever another one holds."""
    q, k, v = draw("float16")
    ids = jnp.asarray(np.repeat([0, 1], [128, T - 128])[None])

    def results(k: jax.Array) -> list[np.ndarray]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array) -> jax.Array:
            return ato_jax.linear_attention(
                q, k, v, causal=True, decay=decay, segment_ids=ids, implementation="xla.products"
            )

        out, pull = jax.vjp(attend, q, k, v, decays("mild"))
        return [np.asarray(array)[:, 128:] for array in (out, *pull(out))]

    for one, other in zip(results(k), results(k.at[:, :128].set(3)), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.any(one)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("by", ["segments", "decay", "lengths"])
def test_nothing_hidden_reaches_a_result(by: str, causal: bool) -> None:
    """Not even as a NaN: a row's weight times another segment's state is beyond float32, as is one
    behind a decay of -inf; padding is NaN."""
    q = jnp.zeros((1, T, 2, 16))
    k = jnp.where((jnp.arange(T) < 128)[:, None, None], 70.0, -30.0) + q
    decay = jnp.full(q.shape, -0.01)
    options: dict[str, Any] = {"causal": causal}
    if by == "segments":
        options["segment_ids"] = jnp.asarray(np.repeat([0, 1], [128, T - 128])[None])
    elif by == "decay":
        decay = decay.at[:, 128].set(-jnp.inf)
    else:
        options |= dict.fromkeys(("q_lengths", "kv_lengths"), jnp.array([190]))
        q, k, decay = (x.at[:, 190:].set(jnp.nan) for x in (q, k * 0.1, decay))

    def total(q: jax.Array, k: jax.Array, decay: jax.Array) -> jax.Array:
        out = ato_jax.linear_attention(
            q, k, jnp.ones_like(q), decay=decay, feature_map="exp",
            implementation="xla.products", **options,
        )  # fmt: skip
        return jnp.sum(out)

    for found in (total(q, k, decay), *jax.grad(total, (0, 1, 2))(q, k, decay)):
        assert np.isfinite(np.asarray(found)).all()


@pytest.mark.parametrize("decay", ["mild", "mixed"])
def test_a_card_that_cuts_operands_to_tf32_loses_nothing(
    decay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands are TF32 numbers by themselves: without their low 13 bits, all results are the same
    bits."""
    arrays = [*draw("float32"), decays(decay)]

    def results() -> dict[str, np.ndarray]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array) -> jax.Array:
            return ato_jax.linear_attention(
                q, k, v, decay=decay, causal=True, precision="tf32", implementation="xla.products"
            )

        out, pull = jax.vjp(attend, *arrays)
        return dict(enumerate(map(np.asarray, (out, *pull(out)))))

    wanted = results()
    cut_operands_to_tf32(monkeypatch)
    for name, found in results().items():
        np.testing.assert_array_equal(found, wanted[name])


def test_chosen_on_a_card_where_no_kernel_takes_the_call() -> None:
    def backends(**sizes: Any) -> list[str | None]:
        row = Row("linear_attention", **{"B": 1, "H": 8, "T": 16384, "decay": "channel"} | sizes)
        found = choices.chosen(row, choices.described("H100"))
        return [choice and choice.backend for choice in found]

    for causal in (True, False):
        for dtype in ("float16", "float32", "bfloat16"):
            assert backends(D=320, dtype=dtype, causal=causal) == ["xla.products"] * 3
        assert backends(D=160, dtype="float32", causal=causal) == ["xla.products"] * 3
    assert backends(D=64, dtype="float32") == ["xla.products"] * 3
    assert backends(D=64, dtype="float32", causal=True) == ["triton"] * 3
    assert backends(D=320, dtype="float32", causal=True, T=32, B=64) == ["xla"] * 3


def test_large_features_beside_strong_decays() -> None:
    """Their product with a factor of a whole chunk would be beyond float32."""
    q, k, v = draw()
    options = {"causal": True, "decay": decays("mild"), "feature_map": "exp", "eps": 1e-30}
    arrays = q * 0.1, k * 0.1 + 80, v
    wanted = numerics.oracle("linear_attention", *arrays, **options)
    result = numerics.run(
        "linear_attention", "xla.products", *arrays, cotangents=wanted.cotangents, **options
    )
    numerics.compare(result, wanted)


def test_strict_programs() -> None:
    """With 64-bit numbers on, and without promotion of ranks, gradients are the same."""
    q, k, v = draw("float16")
    decay, g = decays("mixed"), jnp.cos(v)

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, g: jax.Array) -> Any:
        def call(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array) -> jax.Array:
            lengths = jnp.array([190], jnp.int32)
            return ato_jax.linear_attention(
                q, k, v, decay=decay, q_lengths=lengths, kv_lengths=lengths,
                implementation="xla.products",
            )  # fmt: skip

        return jax.vjp(call, q, k, v, decay)[1](g)

    wanted = gradients(q, k, v, decay, g)
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        found = gradients(q, k, v, decay, g)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_chunks_grow_with_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def config(**sizes: Any) -> tuple[int, int, int]:
        row = Row("linear_attention", **{"dtype": "float32", "decay": "channel"} | sizes)
        return dataclasses.astuple(
            products.default_config(choices.spec_of(row), choices.described("H200"))
        )

    assert config(B=1, T=4096, H=4, D=64) == (64, 64, 1)
    assert config(B=2, T=16384, H=16, D=160) == (64, 21, 2)
    assert [config(B=1, T=4096, H=4, D=D)[0] for D in (191, 192, 384, 1024)] == [64, 128, 256, 256]


def test_a_compiler_that_crashes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LAST_JAX_TO_CRASH", (99, 0, 0))
    arrays = draw()
    with pytest.raises(NotImplementedError, match="needs a JAX after 99.0.0 on a CPU"):
        ato_jax.linear_attention(
            *arrays, decay=decays("mild"), causal=True, implementation="xla.products"
        )
