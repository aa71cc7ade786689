"""Softmax attention on arrays of 8 bits by Hopper's kernel: interpreted beside float64, what is
refused and widened, and compiled without a card."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import device, mosaic
from ato_jax.ops.attention import api, reading
from ato_jax.ops.attention.eight_bits import reads_eight_bits
from ato_jax.ops.attention.mosaic_gpu import float8
from ato_jax.ops.attention.mosaic_gpu.transposition import transposed
from tests import aot_attention, numerics
from tests.aot_mosaic import requires_plugin
from tests.interpreted import newest, no_races  # noqa: F401

OP = "attention"
H200 = device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0])
FACTORS = 1.1, 0.9, 1.7  # no powers of two
LIMIT = 3e-2


def draw(
    T: int, S: int, H: int, G: int, D: int, V: int, layout: str = "bthd", B: int = 1
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Values of 8 bits, their scales, and their products."""
    values, scales, products = [], [], []
    time = layout.index("t")
    sizes = (T, H, D), (S, G, D), (S, G, V)
    for seed, ((length, heads, width), factor) in enumerate(zip(sizes, FACTORS, strict=True)):
        x = np.random.default_rng(seed).normal(size=(B, length, heads, width)).astype(np.float32)
        x = x if layout == "bthd" else x.swapaxes(1, 2)
        found, scale = ato_jax.quantize(jnp.asarray(x), (time, 3))
        values.append(found)
        scales.append(scale * factor)
        products.append(found.astype(jnp.float32) * jnp.expand_dims(scale * factor, (time, 3)))
    return values, scales, products


def run(values: Any, scales: Any, config: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    with ato_jax.interpret():
        request = api.prepare(
            *values, scales=scales, return_lse=True, implementation="mosaic_gpu", **options
        )
        assert request.op is reading.OP and reads_eight_bits(request.spec), "the call was widened"
        own = dataclasses.replace(float8.default_config(request.spec, H200), **config)
        out, lse, _ = jax.jit(functools.partial(float8.forward, request.spec, own))(request.inputs)
    return out, lse


def error(actual: Any, exact: Any) -> float:
    actual, exact = np.asarray(actual, np.float64), np.asarray(exact, np.float64)
    return float(np.linalg.norm(actual - exact) / np.linalg.norm(exact))


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "D64, causal, a group": ((200, 200, 2, 1, 64, 64), {}, {"causal": True}),
    "D128": ((130, 264, 1, 1, 128, 128), {"keys": 128}, {"layout": "bhtd"}),
    "D64, sums aside": ((72, 400, 1, 1, 64, 64), {"steps_of_sums": 2}, {}),
    "odd, sums aside": (
        (75, 400, 1, 1, 128, 128), {"steps_of_sums": 2},
        {"bias": np.linspace(-3, 3, 400, dtype=np.float32)[None, None, None]},
    ),
    "D256, sinks": (
        (72, 130, 1, 1, 256, 256), {"keys": 128}, {"sinks": jnp.array([0.3]), "scale": 0.2}
    ),
    "D96, V80, bias": (
        (72, 136, 1, 1, 96, 80), {},
        {"bias": np.linspace(-3, 3, 136, dtype=np.float32)[None, None, None]},
    ),
    "odd, window, softcap": (
        (101, 203, 1, 1, 64, 64), {}, {"causal": True, "window": (70, None), "softcap": 3.0}
    ),
}  # fmt: skip


def in_float64(products: list[jax.Array], **options: Any) -> Any:
    wanted = numerics.oracle(OP, *products, return_lse=True, **options)
    return wanted.exact


@newest
@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    sizes, config, options = CASES[name]
    values, scales, products = draw(*sizes, layout=options.get("layout", "bthd"))
    out, lse = run(values, scales, {"consumers": 2, "keys": 64} | config, **options)
    exact = in_float64(products, **options)
    assert out.dtype == jnp.bfloat16
    assert error(out, exact["out"]) < LIMIT
    assert np.abs(np.asarray(lse) - exact["lse"]).max() < 1e-5


@newest
@pytest.mark.parametrize(
    "sizes, config, options",
    [
        ((72, 136, 1, 1, 64, 64), {}, {}),
        ((72, 136, 2, 1, 64, 64), {"steps_of_sums": 2}, {"causal": True}),
        ((72, 136, 1, 1, 64, 64), {}, {"sinks": jnp.array([4.0])}),
    ],
)
@pytest.mark.parametrize("factor", [1e6, 2e7])
def test_large_scores(
    sizes: tuple[int, ...], config: dict[str, Any], options: dict[str, Any], factor: float
) -> None:
    """Scores of 4 10^6 and 9 10^7, where nearly all weights are 0 or 1. In registers the largest
    one of a row is 2^4 to 2^12 in place of 2^8: the exponent of 2 is rounded."""
    values, scales, products = draw(*sizes)
    scales[0], products[0] = scales[0] * factor, products[0] * factor
    out, lse = run(values, scales, {"consumers": 2, "keys": 64} | config, **options)
    exact = in_float64(products, **options)
    assert error(out, exact["out"]) < 4e-3
    assert error(lse, exact["lse"]) < 1e-6


@newest
def test_lengths() -> None:
    """Padding holds NaN. A row without keys is 0."""
    values, scales, products = draw(136, 136, 1, 1, 64, 64, B=3)
    lengths = np.array([100, 70, 0], np.int32)
    for batch, length in enumerate(lengths):
        values = [x.at[batch, length:].set(jnp.nan) for x in values]
        products = [x.at[batch, length:].set(0) for x in products]
    options = {"q_lengths": lengths, "kv_lengths": lengths, "causal": True}
    out, lse = run(values, scales, {"consumers": 2, "keys": 64}, **options)
    exact = in_float64(products, **options)
    assert error(out, exact["out"]) < LIMIT
    assert not np.asarray(out[2], np.float32).any()
    seen = np.isfinite(exact["lse"])
    assert (np.isfinite(np.asarray(lse)) == seen).all() and not seen[2].any()
    assert np.abs(np.asarray(lse)[seen] - exact["lse"][seen]).max() < 1e-5


def test_the_order_of_keys() -> None:
    """Of 16 keys a thread has a pair of either half, and then 4 that lie side by side."""
    found = mosaic.in_order_of_eight_bits(jnp.arange(32), 0)
    one = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert found.tolist() == one + [16 + key for key in one]


@newest
@pytest.mark.parametrize(
    "layout, S, G, V, multiple, lengths",
    [
        ("bthd", 72, 1, 80, 64, None),
        ("bthd", 1, 2, 64, 128, None),
        ("bhtd", 203, 2, 192, 128, [203, 77]),
    ],
)
def test_the_transposition_of_values(
    layout: str, S: int, G: int, V: int, multiple: int, lengths: list[int] | None
) -> None:
    shape = (2, S, G, V) if layout == "bthd" else (2, G, S, V)
    bits = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    spec = api.AttentionSpec(
        B=2, T=S, S=S, H=G, G=G, D=V, V=V, dtype="bfloat16", scale=1.0, layout=layout
    )
    ends = None if lengths is None else jnp.array(lengths, jnp.int32)
    with ato_jax.interpret():
        found = jax.jit(lambda v: transposed(spec, v, multiple, ends))(bits.view(mosaic.F8))
    wanted = np.zeros((2, S + -S % multiple, G, V), np.uint8)
    wanted[:, :S] = bits if layout == "bthd" else bits.swapaxes(1, 2)
    for batch, length in enumerate(lengths or ()):
        wanted[batch, length:] = 0
    wanted = np.asarray(mosaic.in_order_of_eight_bits(jnp.asarray(wanted), 1))
    assert (np.asarray(found).view(np.uint8) == wanted.transpose(0, 2, 3, 1)).all()


def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "of_call", lambda arrays: H200)


def explained(D: int = 128, T: int = 4096, V: int | None = None, **options: Any) -> Any:
    def array(width: int) -> Any:
        return jax.ShapeDtypeStruct((1, T, 16, width), jnp.float8_e4m3fn)

    scales = (jax.ShapeDtypeStruct((1, 16), jnp.float32),) * 3
    return ato_jax.explain(OP, array(D), array(D), array(V or D), scales=scales, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"D": 64, "causal": True, "implementation": "mosaic_gpu"},
        {"D": 256, "T": 2047},
        {"D": 128, "V": 80},
        {"implementation": "mosaic_gpu", "T": 128, "out_dtype": "float16"},
        {"kv_lengths": np.array([9]), "softcap": 3.0},
    ],
)
def test_what_is_read(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper(monkeypatch)
    found = explained(**options)
    assert found.implementation == reading.BACKEND and found.backward is None
    assert "are read as 8 bits" in found.note and "no derivative" in str(found)


@pytest.mark.parametrize(
    "options, implementation",
    [
        pytest.param({"out_dtype": "float32"}, "triton", marks=pytest.mark.lowering),
        ({"D": 80}, "mosaic_gpu"),
        ({"D": 96}, "mosaic_gpu"),  # too few columns to pay
        ({"D": 48, "implementation": "mosaic_gpu"}, "mosaic_gpu"),
        pytest.param({"implementation": "triton"}, "triton", marks=pytest.mark.lowering),
        ({"implementation": "xla"}, "xla"),
        # Too few rows for Hopper's kernels.
        pytest.param({"T": 128}, "triton", marks=pytest.mark.lowering),
    ],
)
def test_what_is_widened(
    options: dict[str, Any], implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_hopper(monkeypatch)
    found = explained(**options)
    assert "first; no kernel reads 8 bits" in found.note
    assert found.implementation == implementation


@pytest.mark.parametrize("D, pays", [(96, False), (128, True)])
def test_the_backend_says_whether_reading_pays(
    D: int, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = dict(B=2, T=1024, S=1024, H=4, G=4, D=D, V=D, dtype="bfloat16", scale=0.1)
    spec = api.AttentionSpec(**sizes)
    assert reading.OP.backend(reading.BACKEND).beats_later_backends(spec, H200, False) == pays
    on_hopper(monkeypatch)
    rule = staticmethod(lambda *_: not pays)
    monkeypatch.setattr(float8._Float8, "beats_later_backends", rule)
    assert (explained(D).implementation == reading.BACKEND) != pays


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": "float32"}, "an output in bfloat16"),
        ({"D": 80}, "a multiple of 32"),
        ({"V": 72}, "V of 16"),
        ({"D": 512}, "up to 256"),
        ({"T": 1001, "V": 80}, "multiples of 8"),
    ],
)
def test_what_is_refused_says_why(changes: dict[str, Any], reason: str) -> None:
    fields = dict(B=2, T=1000, S=1000, H=4, G=2, D=128, V=128, dtype="bfloat16", scale=0.1)
    found = float8.unsupported(api.AttentionSpec(**fields | changes), "forward")
    assert found is not None and reason in found
    assert float8.unsupported(api.AttentionSpec(**fields), "forward") is None
    assert float8.unsupported(api.AttentionSpec(**fields), "backward") is not None


def test_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of calls is one kernel's, and a derivative is refused."""
    on_hopper(monkeypatch)
    array = jax.ShapeDtypeStruct((3, 1, 512, 4, 128), jnp.float8_e4m3fn)
    scale = jax.ShapeDtypeStruct((3, 1, 4), jnp.float32)

    def call(x: Any, scale: Any) -> Any:
        return ato_jax.attention(x, x, x, scales=(scale,) * 3, implementation="mosaic_gpu")

    text = str(jax.make_jaxpr(jax.vmap(call))(array, scale))
    assert "attention_forward" in text and "f8_e4m3fn" in text
    one = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (array, scale)]
    with pytest.raises(ato_jax.UnsupportedError, match="no derivative.*custom_vjp"):
        jax.eval_shape(lambda x, s: jax.vjp(lambda s: call(x, s), s)[0], *one)


@pytest.mark.parametrize(
    "fields, steps",
    [
        ({"S": 1024}, 0),
        ({"S": 1025}, 8),
        ({"S": 65536, "D": 256, "V": 256}, 8),
        ({"S": 2048, "bias": (False,) * 4, "mask": (False,) * 4}, 16),  # steps of 64 keys
    ],
)
def test_sums_are_set_aside_behind_1024_keys(fields: dict[str, Any], steps: int) -> None:
    sizes = dict(B=2, T=1024, H=4, G=4, D=128, V=128, dtype="bfloat16", scale=0.1)
    config = float8.default_config(api.AttentionSpec(**sizes | fields), H200)
    assert config.steps_of_sums == steps


def test_sums_set_aside_stay_within_a_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step waits there for other warps, nor for the copy engine's view of memory."""
    on_hopper(monkeypatch)
    array = jax.ShapeDtypeStruct((1, 4096, 4, 128), jnp.float8_e4m3fn)
    scale = jax.ShapeDtypeStruct((1, 4), jnp.float32)

    def commits(config: dict[str, Any]) -> int:
        def call(x: Any, scale: Any) -> Any:
            request = api.prepare(
                x, x, x, scales=(scale,) * 3, return_lse=True, implementation="mosaic_gpu"
            )
            own = dataclasses.replace(float8.default_config(request.spec, H200), **config)
            return float8.forward(request.spec, own, request.inputs)

        return str(jax.make_jaxpr(call)(array, scale)).count("commit_smem")

    # One for all tiles, in `finish`.
    assert commits({}) == commits({"steps_of_sums": 0}) + 1


COMPILED = [
    aot_attention.Call(4096, 128, dtype="float8_e4m3fn", options=dict(causal=True)),
    aot_attention.Call(4096, 64, dtype="float8_e4m3fn"),
    aot_attention.Call(4096, 256, H=8, dtype="float8_e4m3fn", options=dict(layout="bhtd")),
]


@requires_plugin
@pytest.mark.parametrize("call", COMPILED, ids=[f"D {call.D}" for call in COMPILED])
def test_calls_compile(call: aot_attention.Call) -> None:
    """Nothing is spilled, and no product waits for another."""
    found = aot_attention.compile_all(call)
    assert [one.name for one in found] == ["attention_transposition", "attention_forward"]
    for one in found:
        assert not one.serialized and not one.spill_stores, one
