"""Linear attention on arrays of 8 bits by Hopper's kernels: interpreted beside float64, what is
refused and widened, and compiled without a card."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel
from test_linear_mosaic import SMALL
from test_mosaic_maps import bumpy

import ato_jax
from ato_jax import device
from ato_jax.ops.linear_attention import api, reading
from ato_jax.ops.linear_attention.mosaic_gpu import float8, float8_features
from ato_jax.ops.linear_attention.mosaic_gpu.output_eight_bits import split_scale
from tests import aot_mosaic, numerics
from tests.interpreted import newest, no_races  # noqa: F401

OP = "linear_attention"
# Scales that are no powers of two leave bfloat16's digits to what was rounded in 8 bits alone.
FACTORS = 1.1, 0.9, 1.7


def draw(
    T: int, S: int, H: int, G: int, D: int, V: int, layout: str
) -> tuple[Any, Any, list[jax.Array]]:
    """Values of 8 bits, their scales, which are no powers of two, and their products."""
    shapes = [(1, T, H, D), (1, S, G, D), (1, S, G, V)]
    time = 1 if layout == "bthd" else 2
    values, scales, products = [], [], []
    for seed, (shape, factor) in enumerate(zip(shapes, FACTORS, strict=True)):
        x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        x = x if layout == "bthd" else x.swapaxes(1, 2)
        found, scale = ato_jax.quantize(jnp.asarray(x), (time, 3))
        values.append(found)
        scales.append(scale * factor)
        products.append(found.astype(jnp.float32) * jnp.expand_dims(scale * factor, (time, 3)))
    return values, scales, products


def request_of(values: Any, scales: Any, **options: Any) -> api.Request:
    with ato_jax.interpret():
        return api.prepare(*values, scales=scales, implementation="mosaic_gpu", **options)


def in_float64(products: list[jax.Array], **options: Any) -> Any:
    request, _ = numerics.prepare(OP, *products, **options)
    spec = dataclasses.replace(request.spec, dtype="float64")
    with jax.enable_x64(True):
        inputs = jax.tree.map(
            lambda array: array.astype("float64") if array.dtype == "float32" else array,
            request.inputs,
        )
        return numerics.REFERENCES[OP].forward(spec, None, inputs)


def run(request: api.Request) -> Any:
    """The backend's outputs, in pieces."""
    assert request.op is reading.OP, "the call was widened"
    config = dataclasses.replace(float8.BACKEND.default_config(request.spec, channel.GPU), **SMALL)
    with ato_jax.interpret():
        return jax.jit(functools.partial(float8.forward, request.spec, config))(request.inputs)


def error(actual: Any, exact: Any) -> float:
    actual, exact = np.asarray(actual, np.float64), np.asarray(exact, np.float64)
    return float(np.linalg.norm(actual - exact) / np.linalg.norm(exact))


def state(G: int, D: int, V: int) -> ato_jax.LinearState:
    numbers = np.random.default_rng(9).normal(size=(1, G, D, V)).astype(np.float32)
    return ato_jax.LinearState(jnp.abs(jnp.asarray(numbers)), jnp.abs(jnp.asarray(numbers[..., 0])))


WHOLE = {
    "D128": (136, 200, 1, 1, 128, 128, {}),
    "D128, odd T and S": (139, 75, 2, 1, 128, 128, {"feature_map": "silu"}),
    "D64, odd T": (75, 139, 1, 1, 64, 64, {}),
    "D64": (72, 136, 1, 1, 64, 64, {"layout": "bhtd"}),
    "D80, V112, exp": (72, 72, 1, 1, 80, 112, {"feature_map": "exp", "layout": "bhtd"}),
    "D96, silu": (72, 64, 1, 1, 96, 96, {"feature_map": "silu"}),
    "D64, identity": (64, 200, 1, 1, 64, 64, {"feature_map": "identity"}),
    "D96, relu": (64, 72, 1, 1, 96, 96, {"feature_map": "relu"}),
    "D64, not normalized": (64, 72, 1, 1, 64, 64, {"normalize": False, "return_state": True}),
    "D128, bumpy, states": (
        72, 136, 2, 1, 128, 128,
        {"feature_map": bumpy, "initial_state": state(1, 128, 128), "return_state": True},
    ),
    "D64, lengths": (
        136, 136, 2, 1, 64, 64,
        {"q_lengths": np.array([100]), "kv_lengths": np.array([70]), "return_state": True},
    ),
}  # fmt: skip


# In two pieces, which for heads of 64 columns end within a group of chunks.
CAUSAL = {
    "D128": (136, 136, 1, 1, 128, 128, {}),
    "D64, a group": (192, 192, 4, 2, 64, 64, {"layout": "bhtd"}),
    "D64, odd T, exp, returned": (
        165, 165, 2, 2, 64, 64, {"feature_map": "exp", "return_state": True}
    ),
    "D80, V96, silu": (104, 104, 1, 1, 80, 96, {"feature_map": "silu", "layout": "bhtd"}),
    "D128, identity, states": (
        128, 128, 2, 1, 128, 128,
        {"feature_map": "identity", "initial_state": state(1, 128, 128), "return_state": True},
    ),
    "D48, lengths": (136, 136, 2, 2, 48, 48, {"kv_lengths": np.array([70]), "return_state": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", ["elu1", "relu", "silu", "identity", "exp"])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-4, 0.01, 0.3, 100.0, -3.0])
def test_the_power_of_keys_keeps_features_in_range(name: str, scale: float) -> None:
    """The largest feature that 8 bits have stays below float16's largest, 65504. Maps that make
    small features of large numbers have none."""
    ones = (jnp.ones((1, 64, 1, 64)),) * 3
    spec = numerics.prepare(OP, *ones, feature_map=name)[0].spec
    with ato_jax.interpret():
        power = float(float8_features.power_of(spec, jnp.float32(scale)))
    assert np.log2(power) % 1 == 0
    if name not in ("relu", "identity"):
        assert power == 1 and float8_features.dtype_of(spec) == jnp.bfloat16
        return
    assert float8_features.dtype_of(spec) == jnp.float16
    largest = 448 * abs(scale) * power
    assert largest < 2**15 and (largest >= 2**14 or not scale)


@newest
@pytest.mark.parametrize("name", CAUSAL)
def test_each_query_sees_the_keys_up_to_its_own(name: str) -> None:
    *sizes, options = CAUSAL[name]
    compare(sizes, {"causal": True, **options})


@newest
@pytest.mark.parametrize("name", WHOLE)
def test_every_query_sees_every_key(name: str) -> None:
    *sizes, options = WHOLE[name]
    compare(sizes, options)


def compare(sizes: list[int], options: dict[str, Any]) -> None:
    values, scales, products = draw(*sizes, options.get("layout", "bthd"))
    if "kv_lengths" in options:  # what lies behind a length may be anything
        values[1], values[2] = (x.at[:, 70:].set(jnp.nan) for x in values[1:])
        products[1], products[2] = (x.at[:, 70:].set(0) for x in products[1:])
    found = run(request_of(values, scales, **options))
    exact = in_float64(products, **options)
    assert found.out.dtype == jnp.bfloat16
    assert error(found.out, exact.out) < 5e-3
    if options.get("return_state"):
        for own, wanted in zip(found.state, exact.state, strict=True):
            assert error(own, wanted) < 4e-3


# A little above 1 + 2^-8, which lies halfway between bfloat16 numbers, as does 1.5 + 2^-8. Times
# it, powers of two are rounded by up to 2^-8 of themselves, always to the same side.
HALFWAY = 1.001 * (1 + 2.0**-8)
OF_VALUES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "D128": ((136, 136, 1, 1, 128, 128), {"causal": True}),
    "D64, a group, states": (
        (165, 165, 4, 2, 64, 64),
        {
            "causal": True, "feature_map": "exp", "return_state": True,
            "initial_state": state(2, 64, 64),
        },
    ),
    "one piece, relu, not normalized": (
        (64, 64, 2, 2, 64, 64),
        {"causal": True, "feature_map": "relu", "normalize": False, "layout": "bhtd"},
    ),
    "D48, lengths": (
        (136, 136, 2, 2, 48, 48),
        {"causal": True, "kv_lengths": np.array([70]), "return_state": True},
    ),
    "every key": ((72, 136, 1, 1, 64, 64), {"return_state": True}),
}  # fmt: skip


@newest
@pytest.mark.parametrize("name", OF_VALUES)
def test_no_value_times_its_scale_is_rounded(name: str) -> None:
    """With the scales of `quantize` for q and k, and any for v, the budgets are bfloat16's."""
    sizes, options = OF_VALUES[name]
    values, scales, products = draw_one_digit(sizes, options.get("layout", "bthd"))
    found = run(request_of(values, scales, **options))
    exact = in_float64(products, **options)
    numerics.check("out", found.out, exact.out, dtype="bfloat16")
    if options.get("return_state"):
        for part, own, wanted in zip(("kv", "k_sum"), found.state, exact.state, strict=True):
            assert error(own, wanted) < 4e-3, part


@pytest.mark.parametrize("name", OF_VALUES)
def test_widened_values_are_rounded_once(name: str) -> None:
    """XLA takes values times their scales in bfloat16."""
    sizes, options = OF_VALUES[name]
    values, scales, products = draw_one_digit(sizes, options.get("layout", "bthd"))
    found = ato_jax.linear_attention(*values, scales=scales, implementation="xla", **options)
    out = found[0] if options.get("return_state") else found
    assert error(out, in_float64(products, **options).out) < 5e-3


def draw_one_digit(
    sizes: tuple[int, ...], layout: str
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """As `draw`, with v of powers of two times one scale, and powers of two as other scales."""
    values, scales, products = draw(*sizes, layout)
    v = values[2].astype(jnp.float32)
    values[2] = jnp.where(v > 0, 4.0, jnp.where(v < -9, -2.0, 1.0)).astype(values[2].dtype)
    scales = [jnp.exp2(jnp.round(jnp.log2(scale))) for scale in scales]
    scales[2] = scales[2] * (HALFWAY + jnp.arange(scales[2].shape[1]) % 2 / 2)
    axes = (1 if layout == "bthd" else 2, 3)
    products = [
        x.astype(jnp.float32) * jnp.expand_dims(scale, axes)
        for x, scale in zip(values, scales, strict=True)
    ]
    return values, scales, products


@pytest.mark.parametrize("scale", [0.0, 2.0**-126, 1e-30, 0.3, 1.0, HALFWAY, -3.0, 3.3e38])
def test_the_power_of_two_in_a_scale(scale: float) -> None:
    (power,), (rest,) = (np.asarray(x) for x in split_scale(jnp.array([scale], jnp.float32)))
    assert power * rest == np.float32(scale) and 1 <= rest < 2
    assert not power or np.log2(np.abs(power)) % 1 == 0


def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "of_call", lambda arrays: channel.GPU)


def explained(D: int = 128, T: int = 16384, **options: Any) -> Any:
    shape = (1, T, 16, D) if options.get("layout", "bthd") == "bthd" else (1, 16, T, D)
    array = jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)
    scales = (jax.ShapeDtypeStruct((1, 16), jnp.float32),) * 3
    return ato_jax.explain(OP, array, array, array, scales=scales, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"D": 64, "T": 32768},
        {"T": 16383},
        {"D": 80, "layout": "bhtd", "feature_map": "silu"},
        {"implementation": "mosaic_gpu", "T": 128},
        {"out_dtype": "float16", "kv_lengths": np.array([9])},
        {"causal": True},
        {"causal": True, "D": 64, "T": 16383, "layout": "bhtd"},
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
        # Too few rows for these kernels.
        pytest.param({"T": 128}, "triton", marks=pytest.mark.lowering),
        pytest.param({"D": 64, "T": 128}, "triton", marks=pytest.mark.lowering),
        ({"D": 192}, "mosaic_gpu"),
        ({"out_dtype": "float32"}, "mosaic_gpu"),
        pytest.param({"implementation": "triton"}, "triton", marks=pytest.mark.lowering),
        pytest.param({"causal": True, "T": 128}, "triton", marks=pytest.mark.lowering),
        ({"causal": True, "D": 40}, None),
        ({"causal": True, "decay": jnp.zeros(16)}, "mosaic_gpu"),
        ({"implementation": "xla"}, "xla"),
        ({"decay": jnp.zeros(16)}, None),
    ],
)
def test_what_is_widened(
    options: dict[str, Any], implementation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_hopper(monkeypatch)
    found = explained(**options)
    assert "first; no kernel reads 8 bits" in found.note
    assert found.implementation == implementation or implementation is None
    assert found.implementation != reading.BACKEND


def test_what_a_call_of_8_bits_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper(monkeypatch)
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        explained(implementation="mosaic_gpu.float8")
    found = explained(implementation="mosaic_gpu", T=20)
    assert found.forward is None and "at least 64" in str(found.reasons["mosaic_gpu"])


def test_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of calls is a larger one, and a derivative is refused."""
    on_hopper(monkeypatch)
    shape = jax.ShapeDtypeStruct((3, 1, 4096, 16, 128), jnp.float8_e4m3fn)
    scale = jax.ShapeDtypeStruct((3, 1, 16), jnp.float32)

    def call(x: Any, scale: Any) -> Any:
        scales = (scale,) * 3
        return ato_jax.linear_attention(x, x, x, scales=scales, implementation="mosaic_gpu")

    text = str(jax.make_jaxpr(jax.vmap(call))(shape, scale))
    assert "float8_sums" in text and "f32[3,16" in text
    one = [jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in (shape, scale)]
    with pytest.raises(ato_jax.UnsupportedError, match="no derivative.*custom_vjp"):
        jax.eval_shape(lambda x, s: jax.vjp(lambda s: call(x, s), s)[0], *one)


@aot_mosaic.requires_plugin
@pytest.mark.parametrize(
    "options",
    [
        {"D": 128},
        {"D": 64, "layout": "bhtd"},
        {"D": 80, "feature_map": "silu", "states": True},
        {"D": 128, "causal": True},
        {"D": 64, "causal": True, "layout": "bhtd", "G": 4},
    ],
)
def test_compiles_for_a_card(options: dict[str, Any]) -> None:
    """Few registers are spilled, and no product waits for another. JAX 0.10.2 spills 144 bytes of
    the causal output of 128 columns, 0.11.2 spills 8 and 0.12 spills 32."""
    sizes = {"B": 2, "T": 4096, "H": 16, "causal": False, "gradients": False}
    call = aot_mosaic.Call(**sizes | options, dtype="float8_e4m3fn")
    found = aot_mosaic.compile_call(call, machine_code=True)
    most = {"float8_sums": 0} | ({"output": 144} if call.causal else {"whole_output": 16})
    assert {kernel.name for kernel in found.kernels} == set(most)
    for kernel in found.kernels:
        assert kernel.spill_stores <= most[kernel.name], kernel
        assert not kernel.serialized and not kernel.hazards, kernel
