"""What `implementation=None` chooses by card, and what becomes of its derivative."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import choosing, device, launch, tuning
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.attention.spec import AttentionSpec
from ato_jax.ops.linear_attention.triton import few_rows
from benchmarks.choices import Row
from tests import choices, numerics

REGENERATE = "choices have changed: run `python -m tests.choices` and look at what it changed"
HOPPER = ("H100", "H200", "GH200", "H20")
PLAIN = Row("attention", B=2, H=16, T=4096, D=128)


def backends(row: Row, card: str) -> list[str]:
    return [choice.backend for choice in choices.chosen(row, choices.described(card)) if choice]


@pytest.mark.lowering
def test_golden_file() -> None:
    assert choices.GOLDEN.read_text() == choices.golden(), REGENERATE


@pytest.mark.parametrize("card", HOPPER)
def test_every_hopper_card_has_hoppers_choices(card: str) -> None:
    assert backends(PLAIN, card) == ["mosaic_gpu"] * 3
    linear = Row("linear_attention", B=2, H=16, T=16384, D=128)
    assert backends(linear, card) == ["mosaic_gpu"] * 3


def softmax(T: int = 2048, D: int = 128, B: int = 2, **changes: Any) -> Row:
    return Row("attention", B=B, H=16, T=T, D=D, **changes)


HOPPERS = ["mosaic_gpu"] * 3


def by_triton(*values: Any) -> Any:
    """A case in which a kernel of Triton's is chosen: skipped where JAX has no lowering to it."""
    return pytest.param(*values, marks=pytest.mark.lowering)


@pytest.mark.parametrize(
    "row, wanted",
    [
        by_triton(softmax(T=128, D=1024), ["triton.wide"] * 3),
        (softmax(D=1024), ["xla"] * 3),
        by_triton(softmax(dtype="float32"), ["triton"] * 3),
        by_triton(softmax(T=504), ["triton"] * 3),
        (softmax(T=128, B=16), HOPPERS),
        by_triton(softmax(T=128, B=15), ["triton"] * 3),
        by_triton(softmax(T=120, B=64), ["triton"] * 3),
        by_triton(softmax(T=256, B=16, bias=True, causal=True), ["triton"] * 3),
        by_triton(softmax(T=128, D=64, B=16), ["mosaic_gpu", "triton", "triton"]),
        by_triton(softmax(T=128, D=64, B=16, causal=True), ["triton"] * 3),
        (softmax(T=256, D=64, B=16, causal=True), HOPPERS),
        by_triton(softmax(D=40), ["triton"] * 3),
        by_triton(softmax(T=2047, D=80), ["triton"] * 3),
        by_triton(softmax(bias=True), ["triton", "mosaic_gpu", "mosaic_gpu"]),
        (softmax(bias=True, causal=True), HOPPERS),
        (softmax(T=1024, D=64), HOPPERS),
        (softmax(T=1024, D=64, B=8), HOPPERS),
        (softmax(T=512), HOPPERS),
        (softmax(causal=True, options=(("window", (1023, None)),)), HOPPERS),
        (softmax(D=64), HOPPERS),
        (softmax(V=64), HOPPERS),
        (softmax(T=2047), HOPPERS),
        (softmax(D=80), HOPPERS),
        (softmax(dtype="float16"), HOPPERS),
        (softmax(documents=512), HOPPERS),
        (softmax(lengths=True), HOPPERS),
        (softmax(options=(("softcap", 30.0),)), HOPPERS),
        (softmax(options=(("layout", "bhtd"),)), HOPPERS),
    ],
    ids=str,
)
def test_what_the_faq_tells_of_softmax_attention_on_hopper(row: Row, wanted: list[str]) -> None:
    """The table in docs/faq.md, "What costs extra?"."""
    assert backends(row, "H100") == wanted


@pytest.mark.parametrize(
    "T, S, D, wanted",
    [
        by_triton(64, 64, 8192, "triton.wide"),
        (1024, 1024, 512, "xla"),
        (1, 8192, 512, "xla"),
        (16384, 64, 512, "xla"),
    ],
)
def test_exact_wide_heads_are_chosen_by_their_rows(T: int, S: int, D: int, wanted: str) -> None:
    """Float32 on an H100 and an H200: one block of queries and keys takes Triton's kernels."""
    row = softmax(T=T, S=S, D=D, dtype="float32")
    assert backends(row, "H100") == backends(row, "H200") == [wanted] * 3


@pytest.mark.parametrize("op", ["attention", "linear_attention", "gated_delta_rule"])
def test_an_empty_batch_is_explained_as_one_sequence_is(op: str) -> None:
    def told(B: int) -> Any:
        arrays = [jax.ShapeDtypeStruct((B, 512, 16, 64), jnp.bfloat16)] * 3
        if op == "gated_delta_rule":
            return ato_jax.explain(op, *arrays, beta=jnp.ones((B, 512, 16)))
        return ato_jax.explain(op, *arrays, causal=True)

    with choices.pretending(choices.described("H100")):
        none, one = told(0), told(1)
    assert none.spec.B == 0 and one.spec.B == 1
    assert dataclasses.replace(none, spec=one.spec) == one


def test_callers_without_hoppers_kernel_run_cudnn() -> None:
    """Calls from PyTorch on a JAX whose launches of `mosaic_gpu` it cannot read."""
    spec = AttentionSpec(2, 1024, 1024, 16, 16, 128, 128, "bfloat16", 1.0)
    names, card = attention_api.OP.backends, choices.described("H100")
    without = tuple(name for name in names if name != "mosaic_gpu")
    assert tuning.order("attention", spec, card, tuning.FORWARD, without).first == {
        "cudnn": "sm_90"
    }
    assert tuning.order("attention", spec, card, tuning.FORWARD, names).first == {}


@pytest.mark.lowering
def test_both_passes_of_training_weigh_that_there_are_both() -> None:
    """Groups of 64 columns: on an H100 the forward pass alone is faster by Triton, both by Mosaic
    GPU together."""
    row = Row("linear_attention", B=2, H=32, G=8, T=16384, D=64, causal=True)
    assert backends(row, "H100") == ["triton", "mosaic_gpu", "mosaic_gpu"]


def causal(D: int, H: int = 16, **changes: Any) -> Row:
    return Row("linear_attention", B=8, H=H, T=16384, D=D, causal=True, **changes)


@pytest.mark.parametrize(
    "row, forward, gradients",
    [
        (causal(72, H=7), "mosaic_gpu", "mosaic_gpu"),
        (causal(32), "mosaic_gpu", "mosaic_gpu"),
        by_triton(causal(32, decay="channel"), "triton", "mosaic_gpu"),
        by_triton(causal(24), "triton", "triton"),
        (causal(24, decay="step"), "mosaic_gpu", "mosaic_gpu"),
        by_triton(causal(16, decay="step"), "triton", "triton"),
        (causal(40, H=7, decay="head"), "mosaic_gpu", "mosaic_gpu"),
        by_triton(causal(48, H=7, decay="head"), "triton", "mosaic_gpu"),
        (causal(80, decay="channel", dtype="float32"), "xla.products", "xla.products"),
        by_triton(causal(64, decay="channel", dtype="float32"), "triton", "triton"),
    ],
    ids=str,
)
def test_heads_that_fill_a_part_of_a_tile(row: Row, forward: str, gradients: str) -> None:
    assert backends(row, "H200") == [forward, gradients, gradients]


@pytest.mark.parametrize("op", ["attention", "linear_attention"])
@pytest.mark.parametrize("card", ["T4", "unknown"])
def test_a_card_without_triton_runs_xla_and_says_why(op: str, card: str) -> None:
    row = Row(op, B=2, H=16, T=4096, D=128)
    assert backends(row, card) == ["xla"] * 3
    here, spec = choices.described(card), choices.spec_of(row)
    for name in choices.APIS[op].OP.backends:
        call = choosing.Call(choices.APIS[op].OP, spec, name, here, False)
        if choosing.family(name) in choosing.PLAIN_JAX:
            continue
        with choices.pretending(here), pytest.raises(ato_jax.UnsupportedError) as refused:
            choosing.choose(call, "forward")
        wanted = ["7.5" if card == "T4" else "Some GPU", here.name]
        if launch.no_triton and choosing.family(name) == "triton":
            wanted = [launch.no_triton]  # said first, since it holds for every card
        assert any(fact in str(refused.value) for fact in wanted), name


def test_explain_says_where_a_choice_comes_from() -> None:
    arrays = [jax.ShapeDtypeStruct((2, 4096, 16, 128), jnp.bfloat16)] * 3
    with choices.pretending(choices.described("H100")):
        told = str(ato_jax.explain(ato_jax.attention, *arrays))
        assert "(first in the op's order; block sizes by rule)" in told
        short = [jax.ShapeDtypeStruct((32, 1024, 16, 64), jnp.float16)] * 3
        told = str(ato_jax.explain(ato_jax.attention, *short))
        assert "(first by tuned/sm_90.toml; block sizes by rule)" in told.partition("backward: ")[2]
        few = [jax.ShapeDtypeStruct((2, 256, 16, 128), jnp.bfloat16)] * 3
        told = str(ato_jax.explain(ato_jax.attention, *few))
        assert "(mosaic_gpu last by its own rule for such calls; block sizes by rule)" in told
        assert "first in the op's order" not in told.partition("backward: ")[0]


@pytest.mark.lowering
def test_explain_says_where_a_choice_of_triton_comes_from() -> None:
    arrays = [jax.ShapeDtypeStruct((2, 4096, 16, 128), jnp.bfloat16)] * 3
    exact = [jax.ShapeDtypeStruct((2, 4099, 16, 128), jnp.float32)] * 3
    with choices.pretending(choices.described("H100")):
        named = ato_jax.explain(ato_jax.attention, *arrays, implementation="triton")
        assert named.forward is not None and named.forward.why == ""
        told = str(ato_jax.explain(ato_jax.linear_attention, *exact))
        assert "(triton last by tuned/sm_90.toml; block sizes by rule)" in told
    with choices.pretending(choices.described("A100")):
        told = str(ato_jax.explain(ato_jax.attention, *arrays))
        assert "(first in the op's order; block sizes by rule)" in told


@pytest.mark.lowering
def test_explain_says_where_a_decay_of_few_heads_takes_longer() -> None:
    few, rows = few_rows.FEW_HEADS, few_rows.SOME_ROWS

    def note(G: int, T: int = 4096, dtype: Any = jnp.bfloat16, **options: Any) -> str:
        q, k = (jax.ShapeDtypeStruct((1, T, heads, 64), dtype) for heads in (2 * G, G))
        decay = jax.ShapeDtypeStruct(options.pop("decay", (G,)), jnp.float32)
        options = {"causal": True, "decay": decay} | options
        return ato_jax.explain(ato_jax.linear_attention, q, k, k, **options).note

    with choices.pretending(choices.described("A100")):
        assert f"TF32, since a decay per head of at most {few} key/value heads" in note(few)
        assert note(1, causal=False) and note(1, T=rows // 2 + 1)
        assert not note(few + 1)
        assert not note(few, decay=(1, 4096, few))
        assert not note(1, T=rows // 2)  # any number of heads is multiplied so
        assert not note(few, dtype=jnp.float16)
        assert not note(few, implementation="xla")
    with choices.pretending(choices.described("H100")):
        assert note(few, causal=False)  # whose gradients Hopper's kernels leave to Triton


@pytest.mark.lowering
@pytest.mark.parametrize("T", [4096, 4099])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("segments", [False, True])
def test_explain_tells_the_passes_of_training(
    T: int, D: int, segments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`recorded` and `backward` are the choices that a gradient makes when it is traced."""
    ran = []
    choose = choosing.choose

    def recording(call: Any, phase: str) -> choosing.Choice:
        choice = choose(call, phase)
        if phase == "backward" or call.backward_follows:
            ran.append((phase, choice))
        return choice

    x = jax.ShapeDtypeStruct((2, T, 16, D), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, T), jnp.int32) if segments else None

    def loss(x: jax.Array, ids: jax.Array | None) -> jax.Array:
        out = ato_jax.linear_attention(x, x, x, causal=True, segment_ids=ids)
        return out.astype(jnp.float32).sum()

    with choices.pretending(choices.described("H100")):
        told = ato_jax.explain(ato_jax.linear_attention, x, x, x, causal=True, segment_ids=ids)
        monkeypatch.setattr(choosing, "choose", recording)
        jax.eval_shape(jax.grad(loss), x, ids)
    assert dict(ran) == {"forward": told.recorded, "backward": told.backward}


@pytest.mark.parametrize("op", ["attention", "linear_attention"])
def test_a_kernel_forward_with_a_plain_derivative(op: str, monkeypatch: Any) -> None:
    """Where the forward pass alone is a kernel's, and both passes of a derivative plain JAX:
    right to second order, and of one forward pass.
    """
    found = choosing.choose

    def choose(call: Any, phase: str) -> choosing.Choice:
        if call.implementation is not None:
            return found(call, phase)
        name = "triton" if call.use(phase) == "forward" else "xla"
        named = choosing.dataclasses.replace(call, implementation=name)
        seen.append((call.use(phase), phase))
        return found(named, phase)

    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(choosing, "choose", choose)
    draw = np.random.default_rng(0)
    q, k, v = (jnp.asarray(draw.normal(size=(2, 24, 2, 16)), jnp.float32) for _ in "qkv")
    ids = jnp.arange(24)[None].repeat(2, 0) // 9
    options: dict[str, Any] = {"causal": True, "segment_ids": ids}
    wanted = numerics.oracle(op, q, k, v, **options)
    with ato_jax.interpret():
        cotangents = wanted.cotangents
        numerics.compare(
            numerics.run(op, None, q, k, v, cotangents=cotangents, **options), wanted
        )
        function = getattr(ato_jax, op)

        def gradient(implementation: str | None) -> str:
            def total(*qkv: jax.Array) -> jax.Array:
                return function(*qkv, **options, implementation=implementation).sum()

            # By all three: a custom derivative makes those that are not asked for, too.
            return str(jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(q, k, v))

        assert "pallas_call" not in gradient(None)
        products = [gradient(name).count("dot_general") for name in (None, "xla")]
        assert products[0] == products[1] > 0
        text = str(jax.make_jaxpr(lambda q: function(q, k, v, **options))(q))
        assert "pallas_call" in text

        def norm(implementation: str | None) -> jax.Array:
            def first(q: jax.Array) -> jax.Array:
                return jax.grad(
                    lambda q: (
                        function(q, k, v, **options, implementation=implementation) ** 2
                    ).sum()
                )(q)

            return jax.grad(lambda q: (first(q) ** 2).sum())(q)

        np.testing.assert_allclose(norm(None), norm("reference"), rtol=2e-4, atol=2e-4)
    assert {("forward", "forward"), ("training", "forward"), ("training", "backward")} <= set(seen)


def test_the_card_may_be_unknown_in_every_way() -> None:
    """A description never fails, and XLA runs on what it describes."""
    for name in choices.CARDS:
        card = choices.described(name)
        assert isinstance(card, device.Device) and card.platform == "gpu"
        assert backends(Row("linear_attention", B=1, H=2, T=300, D=20), name)


def test_without_cudnn_its_kernels_are_not_chosen(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """On a machine with a card, JAX is asked; here it finds no cuDNN."""
    from ato_jax.ops.attention import cudnn

    spec, card = choices.spec_of(PLAIN), choices.described("H100")
    call = choosing.Call(attention_api.OP, spec, "cudnn", card, False)
    assert choosing.reason_against(call, "cudnn", "forward") is None
    cudnn._missing.cache_clear()
    request.addfinalizer(cudnn._missing.cache_clear)
    monkeypatch.setattr(cudnn.jax, "default_backend", lambda: "gpu")
    assert "cuDNN is not" in str(choosing.reason_against(call, "cudnn", "forward"))
    assert "cuDNN is not detected" in str(cudnn._missing())
