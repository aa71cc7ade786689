"""The kernels on a card: numerics at real sizes, determinism, and no access out of bounds.

    python -m pytest -m gpu          writes the receipt, tests/gpu_receipt.json

With workers, `-n 16 --dist load --maxschedchunk 1`, it takes minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import device
from ato_jax.backend import Residuals
from ato_jax.ops.attention import mosaic_gpu as attention_mosaic
from ato_jax.ops.attention import xla as attention_xla
from ato_jax.ops.attention.spec import REST_UNITS, Outputs
from ato_jax.ops.linear_attention import mosaic_gpu as linear_attention_mosaic
from ato_jax.ops.linear_attention import xla as linear_attention_xla
from tests import launches, numerics, sanitize

pytestmark = pytest.mark.gpu

# What a receipt holds of them stays true while these kernels do not change.
of_attention = pytest.mark.kernels("attention")
of_linear_attention = pytest.mark.kernels("linear_attention")
of_decoding = pytest.mark.kernels("decode_attention")
of_attention_and_decoding = pytest.mark.kernels("attention", "decode_attention")
of_wide_heads = pytest.mark.kernels("wide_attention")
of_mosaic_gpu = pytest.mark.kernels("mosaic_gpu")
of_mosaic_documents = pytest.mark.kernels("mosaic_documents")
of_wide_documents = pytest.mark.kernels("mosaic_gpu", "mosaic_documents")
of_random_features = pytest.mark.kernels("random_features")
of_mosaic_attention = pytest.mark.kernels("mosaic_attention")
of_mosaic_delta_rule = pytest.mark.kernels("mosaic_delta_rule")

DTYPES = ("float32", "float16", "bfloat16")
HEAD_SIZES = (32, 64, 80, 128)
LONG = 65_536
SANITIZER_ATTEMPTS = 4


def arrays(
    dtype: str,
    *,
    B: int = 2,
    T: int,
    S: int | None = None,
    H: int = 4,
    G: int = 2,
    D: int = 64,
    V: int | None = None,
    scale: float = 1.0,
    layout: str = "bthd",
    seed: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    generator = np.random.default_rng(seed)

    def draw(length: int, heads: int, size: int) -> jax.Array:
        shape = (B, length, heads, size) if layout == "bthd" else (B, heads, length, size)
        values = generator.standard_normal(shape, np.float32) * scale
        return jnp.asarray(values, jnp.float32).astype(dtype)

    S, V = S or T, V or D
    return draw(T, H, D), draw(S, G, D), draw(S, G, V)


def check(
    op: str, *qkv: jax.Array, implementation: str | None = "triton", **options: Any
) -> dict[str, Any]:
    """A backend against the float64 reference, forward and backward; the results."""
    wanted = numerics.oracle(op, *qkv, **options)
    result = numerics.run(op, implementation, *qkv, cotangents=wanted.cotangents, **options)
    numerics.compare(result, wanted)
    return result


@pytest.fixture
def linear_time_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle computed by the XLA backends in float64: linear in T, and tested elsewhere
    against the quadratic reference."""
    monkeypatch.setattr(numerics, "PLATFORM", "gpu")
    for op, module in (
        ("attention", attention_xla),
        ("linear_attention", linear_attention_xla),
    ):
        here = device.of_call(())

        def forward(spec: Any, _: Any, inputs: Any, module: Any = module, here: Any = here) -> Any:
            return module.forward(spec, module.default_config(spec, here), inputs)

        oracle = SimpleNamespace(forward=forward)
        monkeypatch.setitem(numerics.REFERENCES, op, oracle)
        monkeypatch.setattr(numerics, f"{op}_reference", oracle)


def sanitized(name: str, *options: str) -> tuple[int, str]:
    """compute-sanitizer over `python -m tests.sanitize name`: its exit status, -1 where time ran
    out, and what was printed. On some machines the tool itself dies of a segmentation fault, on
    programs that it goes through without a finding on others: then it is started again."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(program):
        pytest.skip("compute-sanitizer is not installed")
    # One allocation per array, so that its ends are known: a pool would hide what runs over them.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    # XLA records longer programs as CUDA graphs, under which the tool crashes, as it may over a
    # trace of XLA's many calls.
    flags = f"{environment.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    environment |= {"XLA_FLAGS": flags, "PYTHONFAULTHANDLER": "1"}
    command = [program, "--tool", "memcheck", "--error-exitcode", "7"]
    # Kernels of ours alone: with XLA's and cuBLAS's watched, too, a run takes many minutes.
    watched = sanitize.KERNEL_NAMES.get(name, sanitize.KERNEL_NAME)
    command += ["--kernel-name", f"kernel_substring={watched}", "--show-backtrace", "no"]
    command += [*options, sys.executable, "-m", "tests.sanitize", name]
    for _ in range(SANITIZER_ATTEMPTS):
        with tempfile.TemporaryFile("w+") as printed:
            try:
                status = subprocess.run(
                    command, env=environment, stdout=printed, stderr=subprocess.STDOUT, timeout=300
                ).returncode
            except subprocess.TimeoutExpired:
                return -1, "no end within 300 s"
            printed.seek(0)
            text = printed.read()
        if status != -signal.SIGSEGV or "=========  " in text:
            return status, text
    pytest.skip(
        f"compute-sanitizer itself crashed {SANITIZER_ATTEMPTS} times, nothing found before"
    )


# The longest come first: workers that take tests one by one then end together.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.kernels(sanitize.KERNELS.get(name, "linear_attention"))
        )
        for name in sanitize.GROUPS
    ],
)
def test_no_kernel_reads_or_writes_out_of_bounds(name: str) -> None:
    if name.startswith("mosaic_gpu"):
        needs_hopper()
    status, printed = sanitized(name)
    clean = status == 0 and "ERROR SUMMARY: 0 errors" in printed
    assert clean, f"{name!r} ended with {status}:\n{printed[-6000:]}"


def test_the_sanitizer_sees_a_planted_fault() -> None:
    status, printed = sanitized("planted")
    assert status == 7 and "Invalid __global__ read" in printed, printed[-6000:]


@of_mosaic_attention
def test_the_sanitizer_sees_a_planted_fault_of_mosaic_gpu() -> None:
    needs_hopper()
    status, printed = sanitized("planted in mosaic_gpu")
    assert status == 7 and "Invalid __global__ read" in printed, printed[-6000:]


@of_linear_attention
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("feature_map", "normalize"),
    [("elu1", True), ("elu1", False), ("identity", False)],
)
def test_linear_attention(
    dtype: str, D: int, causal: bool, feature_map: str, normalize: bool
) -> None:
    options = {"causal": causal, "feature_map": feature_map, "normalize": normalize}
    check("linear_attention", *arrays(dtype, T=1100, D=D), **options)


@of_attention
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", (*HEAD_SIZES, 256))
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype: str, D: int, causal: bool) -> None:
    check("attention", *arrays(dtype, T=1100, D=D), causal=causal, return_lse=True)


@pytest.mark.parametrize("op", ["attention", "linear_attention"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("T", "D", "V"), [(1, 64, 64), (37, 5, 1), (129, 96, 40), (513, 1, 128)])
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_odd_sizes_and_layouts(op: str, causal: bool, T: int, D: int, V: int, layout: str) -> None:
    qkv = arrays("bfloat16", T=T, D=D, V=V, H=6, G=3, layout=layout)
    check(op, *qkv, causal=causal, layout=layout)


@pytest.mark.parametrize("op", ["attention", "linear_attention"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("T", "D"), [(192, 64), (384, 128)])
def test_half_a_block(op: str, causal: bool, T: int, D: int) -> None:
    check(op, *arrays("bfloat16", T=T, D=D), causal=causal)


@pytest.mark.parametrize("op", ["attention", "linear_attention"])
@pytest.mark.parametrize(("T", "S"), [(100, 1025), (1025, 100), (1, 700)])
def test_cross(op: str, T: int, S: int) -> None:
    check(op, *arrays("float16", T=T, S=S))


@of_attention
@pytest.mark.parametrize(("T", "S"), [(100, 1025), (1025, 100), (1, 700)])
def test_causal_cross_attention(T: int, S: int) -> None:
    check("attention", *arrays("float16", T=T, S=S), causal=True, return_lse=True)


def of_large_calls(test: Any) -> Any:
    """A test of a function of T, S, dtype, scale, D and causal, by Hopper's softmax kernels."""
    for name, values in (
        (
            "T, S, dtype, scale",
            [
                (8192, 8192, "bfloat16", 1.0),
                (2500, 4099, "float16", 1.0),
                (4099, 2500, "bfloat16", 30.0),
                (1024, 8192, "float16", 30.0),
                (2048, 2048, "bfloat16", 0.01),
            ],
        ),
        ("D", [64, 128, 256]),
        ("causal", [False, True]),
    ):
        test = pytest.mark.parametrize(name, values)(test)
    return of_mosaic_attention(pytest.mark.usefixtures("linear_time_oracle")(test))


def large_call(
    T: int, S: int, dtype: str, scale: float, D: int, causal: bool
) -> tuple[list[jax.Array], dict[str, Any], numerics.Oracle]:
    """q, k and v, the options, and what is right."""
    needs_hopper()
    qkv = arrays(dtype, B=1, T=T, S=S, H=4, G=2, D=D, scale=scale, layout="bhtd")
    options = {"causal": causal, "return_lse": True, "layout": "bhtd"}
    return qkv, options, numerics.oracle("attention", *qkv, **options)


@of_large_calls
def test_attention_by_mosaic_gpu(
    T: int, S: int, dtype: str, scale: float, D: int, causal: bool
) -> None:
    """The forward pass, twice the same bits."""
    qkv, options, wanted = large_call(T, S, dtype, scale, D, causal)
    outputs = ato_jax.attention(*qkv, **options, implementation="mosaic_gpu")
    again = ato_jax.attention(*qkv, **options, implementation="mosaic_gpu")
    assert all(map(jnp.array_equal, outputs, again))
    found = numerics.named_outputs("attention", outputs)
    exact = {name: wanted.exact[name] for name in found}
    numerics.compare(found, dataclasses.replace(wanted, exact=exact))


@of_large_calls
def test_attention_gradients_by_mosaic_gpu(
    T: int, S: int, dtype: str, scale: float, D: int, causal: bool
) -> None:
    """Twice the same bits."""
    qkv, options, wanted = large_call(T, S, dtype, scale, D, causal)
    found, again = (
        numerics.run("attention", "mosaic_gpu", *qkv, cotangents=wanted.cotangents, **options)
        for _ in range(2)
    )
    assert all(jnp.array_equal(found[name], again[name]) for name in found)
    numerics.compare(found, wanted)


# Head sizes in 16 bits at T = 65,536.
LONG_HEADS = [("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 256), ("float16", 64)]
LONG_HEADS += [("float16", 128)]


@of_mosaic_attention
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "D"), LONG_HEADS)
@pytest.mark.usefixtures("linear_time_oracle")
def test_attention_of_mosaic_gpu_over_a_long_sequence(dtype: str, D: int, causal: bool) -> None:
    """Both passes, the softmax normalizer and its derivative included."""
    needs_hopper()
    qkv = arrays(dtype, B=1, T=LONG, H=1, G=1, D=D, layout="bhtd")
    options = {"causal": causal, "return_lse": True, "layout": "bhtd"}
    check("attention", *qkv, implementation="mosaic_gpu", **options)


def options_together(name: str, B: int, T: int, H: int) -> dict[str, Any]:
    """Several options of softmax attention at once, by their names."""
    generator = np.random.default_rng(5)
    ids = jnp.asarray(np.sort(generator.integers(0, 5, (B, T)), axis=1))
    lengths = jnp.asarray(generator.integers(T // 2, T + 1, B), jnp.int32)

    def bias(*shape: int) -> jax.Array:
        return jnp.asarray(generator.standard_normal(shape, np.float32))

    def mask(*shape: int) -> jax.Array:
        return jnp.asarray(generator.random(shape, np.float32) < 0.7)

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "causal": lambda: {"causal": True},
        "window": lambda: {"window": (T // 8, T // 64)},
        "offsets": lambda: {"query_offset": lengths - T},
        "segments": lambda: {"segment_ids": ids},
        "lengths": lambda: {"kv_lengths": lengths},
        "lengths of both": lambda: {"q_lengths": lengths[::-1], "kv_lengths": lengths},
        "soft cap": lambda: {"softcap": 3.0},
        "sinks": lambda: {"sinks": jnp.linspace(-2, 3, H)},
        "dropout": lambda: {"dropout_rate": 0.2, "dropout_key": jax.random.key(1)},
        "bias of pairs": lambda: {"bias": bias(1, 1, T, T)},
        "bias of keys": lambda: {"bias": bias(B, H, 1, T)},
        "mask of pairs": lambda: {"mask": mask(B, 1, T, T)},
        "mask of keys": lambda: {"mask": mask(B, 1, 1, T)},
    }
    found: dict[str, Any] = {"return_lse": True}
    for part in name.split(", "):
        found |= parts[part]()
    return found


# Options that meet in one call, its dtype and head size.
TOGETHER = [
    ("causal, segments, soft cap, sinks", "bfloat16", 128),
    ("causal, window, lengths, dropout", "float16", 64),
    ("lengths of both, segments, bias of keys", "bfloat16", 64),
    ("causal, offsets, lengths, mask of keys, sinks", "float16", 128),
    ("causal, lengths, bias of pairs", "bfloat16", 64),
    ("mask of pairs, soft cap, dropout", "bfloat16", 128),
    ("window, segments, sinks, soft cap", "bfloat16", 256),
]


@of_mosaic_attention
@pytest.mark.parametrize(("name", "dtype", "D"), TOGETHER)
@pytest.mark.usefixtures("linear_time_oracle")
def test_options_of_mosaic_gpu_over_a_long_sequence(name: str, dtype: str, D: int) -> None:
    """Options of softmax attention together, T = 8192, two query heads for one key head."""
    needs_hopper()
    qkv = arrays(dtype, B=2, T=8192, H=2, G=1, D=D)
    check("attention", *qkv, implementation="mosaic_gpu", **options_together(name, 2, 8192, 2))


@of_mosaic_attention
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("T", "D", "V", "layout"),
    [
        (1024, 128, 128, "bthd"),
        (1003, 64, 128, "bhtd"),
        (777, 64, 64, "bthd"),
        (1024, 64, 80, "bthd"),
    ],
)
def test_rounding_of_mosaic_gpu(
    dtype: str, ahead: bool, T: int, D: int, V: int, layout: str
) -> None:
    """Where all scores are 0 the sums are exact, so what rounding took from out is known, of blocks
    that take one tile of queries each, and of blocks that take many."""
    needs_hopper()
    qkv = arrays(dtype, B=2, T=T, H=6, G=3, D=D, V=V, layout=layout)
    values = jnp.round(8 * qkv[2])
    wanted = numerics.oracle("attention", 0 * qkv[0], qkv[1], values, causal=True, layout=layout)
    spec = dataclasses.replace(wanted.request.spec, keep_rest=True)
    config = attention_mosaic.default_config(spec, device.of_call(()))
    if ahead:
        config = dataclasses.replace(config, persistent=True, multiprocessors=31)
    run = jax.jit(functools.partial(attention_mosaic.forward, spec, config))
    outputs = run(wanted.request.inputs)
    axis = 1 if layout == "bthd" else 2
    seen = jnp.arange(1, T + 1).reshape([T if n == axis else 1 for n in range(4)])
    exact = jnp.cumsum(jnp.repeat(values.astype(jnp.float32), 2, 3 - axis), axis) / seen
    out, unit = outputs.out.astype(jnp.float32), REST_UNITS[dtype]
    both = out * (1 + outputs.rest.astype(jnp.float32) * unit)
    # Rounding to a subnormal number may take more than 8 bits hold. Such numbers are left out.
    share = jnp.where(jnp.abs(exact) < 1e-4, jnp.inf, jnp.abs(exact))
    assert float(jnp.max(jnp.abs(both - exact) / share)) < 0.55 * unit
    assert float(jnp.max(jnp.abs(out - exact) / share)) > 100 * unit


@of_mosaic_attention
@pytest.mark.parametrize(
    ("T", "D", "G", "layout", "causal"),
    [
        (1024, 64, 8, "bthd", False),
        (777, 64, 4, "bhtd", True),
        (1024, 128, 8, "bthd", False),
        (777, 128, 2, "bhtd", False),
        (1000, 128, 8, "bthd", True),
        (1024, 256, 8, "bhtd", False),
        (1003, 256, 4, "bthd", True),
    ],
)
def test_blocks_of_mosaic_gpu_with_many_items(
    T: int, D: int, G: int, layout: str, causal: bool
) -> None:
    """They give the same bits as blocks with one item each."""
    needs_hopper()
    qkv = arrays("bfloat16", B=2, T=T, H=8, G=G, D=D, layout=layout)
    request, _ = numerics.prepare("attention", *qkv, causal=causal, layout=layout)
    spec, inputs = request.spec.for_backward(), request.inputs
    of_call = attention_mosaic.default_config(spec, device.of_call(()))
    names = ("persistent", "dkv_persistent", "dq_persistent")
    one = dataclasses.replace(of_call, **dict.fromkeys(names, False))
    many = dataclasses.replace(one, multiprocessors=7, **dict.fromkeys(names, True))

    @functools.partial(jax.jit, static_argnums=0)
    def run(config: Any, inputs: Any, dout: jax.Array) -> Any:
        outputs = attention_mosaic.forward(spec, config, inputs)
        residuals = Residuals(inputs, outputs)
        return outputs, attention_mosaic.backward(spec, config, residuals, Outputs(dout, None))

    dout = jax.random.normal(jax.random.key(7), inputs.q.shape, inputs.q.dtype)
    found, wanted = (jax.tree.leaves(run(config, inputs, dout)) for config in (many, one))
    assert len(found) == len(wanted) >= 6
    assert all(map(jnp.array_equal, found, wanted))


@of_mosaic_attention
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("D", "H", "causal"), [(64, 1, False), (128, 1, True), (128, 2, False)])
def test_gradients_of_few_sinks_by_mosaic_gpu(dtype: str, D: int, H: int, causal: bool) -> None:
    """Each is one sum over the queries of a head. In one draw of twelve it cancels to a tenth."""
    needs_hopper()
    options = {"sinks": jnp.linspace(0, 1, H), "causal": causal, "return_lse": True}
    for seed in range(24):
        qkv = arrays(dtype, B=1, T=300, H=H, G=1, D=D, seed=seed)
        check("attention", *qkv, implementation="mosaic_gpu", **options)


@of_mosaic_attention
@pytest.mark.parametrize("seed", range(launches.SHAPES))
def test_launches_of_random_shapes_end(seed: int) -> None:
    """10,000 calls over all seeds, twice: no deadlock, and the same bits."""
    needs_hopper()
    launches.in_a_process(seed)


# Sizes of a call on float8 arrays, and its options: (T, S, H, G, D), of two sequences.
CALLS_OF_FLOAT8: list[tuple[tuple[int, int, int, int, int], dict[str, Any]]] = [
    ((2048, 2048, 2, 2, 128), {}),
    ((2048, 2048, 4, 1, 64), {"causal": True, "layout": "bhtd"}),
    ((1024, 2048, 2, 2, 256), {"causal": True}),
    ((1003, 1301, 4, 2, 64), {"causal": True, "kv_lengths": np.array([1301, 700])}),
    (
        (777, 777, 2, 2, 128),
        {"window": (300, 5), "softcap": 8.0, "sinks": np.array([0.5, -1.0], "f4")},
    ),
    ((1024, 1024, 2, 2, 96), {"segment_ids": np.arange(1024)[None].repeat(2, 0) // 300}),
]


@of_mosaic_attention
@pytest.mark.parametrize(("sizes", "options"), CALLS_OF_FLOAT8)
def test_attention_of_float8_by_mosaic_gpu(
    sizes: tuple[int, int, int, int, int], options: dict[str, Any]
) -> None:
    """8 bits as the kernel multiplies them, beside float32 arrays of the same values by XLA; twice
    the same."""
    needs_hopper()
    T, S, H, G, D = sizes
    layout = options.get("layout", "bthd")
    values, scales, wide = [], [], []
    for seed, (length, heads, factor) in enumerate(((T, H, 1.1), (S, G, 0.9), (S, G, 1.7))):
        shape = (2, length, heads, D) if layout == "bthd" else (2, heads, length, D)
        time = layout.index("t")
        found, scale = ato_jax.quantize(jax.random.normal(jax.random.key(seed), shape), (time, 3))
        values.append(found)
        scales.append(scale * factor)
        wide.append(found.astype(jnp.float32) * jnp.expand_dims(scale * factor, (time, 3)))
    own: dict[str, Any] = {"implementation": "mosaic_gpu", "return_lse": True, **options}
    explained = ato_jax.explain("attention", *values, scales=scales, **own)
    assert explained.implementation == "mosaic_gpu.float8"
    (out, lse), again = (ato_jax.attention(*values, scales=scales, **own) for _ in range(2))
    assert (out == again[0]).all() and jnp.array_equal(lse, again[1])
    exact, exact_lse = ato_jax.attention(*wide, **own | {"implementation": "xla"})
    error = jnp.linalg.norm(out.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert error < 3e-2
    seen = jnp.isfinite(exact_lse)
    assert (jnp.isfinite(lse) == seen).all()
    # The tensor cores keep about 13 bits of a sum of products of 8 bits.
    assert jnp.abs(jnp.where(seen, lse - exact_lse, 0)).max() < 1e-3


# float32, float32 by TF32, and what takes half of the bytes.
PRECISIONS = [(dtype, None) for dtype in DTYPES] + [("float32", "tf32")]


@of_wide_heads
@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS)
@pytest.mark.parametrize("D", [512, 2048, 8192])
@pytest.mark.parametrize("times", [1, 32])
def test_wide_heads(dtype: str, precision: str | None, D: int, times: int) -> None:
    """The columns of two sequences are shared among programs, those of 64 are not."""
    options: dict[str, Any] = {"precision": precision, "return_lse": True}
    qkv = arrays(dtype, T=64, G=4, D=D)
    wanted = numerics.oracle("attention", *qkv, **options)
    repeated, cotangents = jax.tree.map(
        lambda array: jnp.tile(array, (times, *(1,) * (array.ndim - 1))),
        (qkv, wanted.cotangents),
    )
    found = numerics.run("attention", "triton.wide", *repeated, cotangents=cotangents, **options)
    numerics.compare({name: array[-2:] for name, array in found.items()}, wanted)
    for array in found.values():
        assert bool(jnp.all(array.reshape(times, -1) == array[:2].reshape(-1)))


@of_wide_heads
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "S", "D", "V"),
    [(16, 16, 1000, 1536), (1, 200, 576, 512), (100, 128, 1536, 40), (200, 256, 1024, 1000)],
)
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_odd_wide_heads(dtype: str, T: int, S: int, D: int, V: int, layout: str) -> None:
    qkv = arrays(dtype, T=T, S=S, D=D, V=V, H=6, G=3, layout=layout)
    check("attention", *qkv, causal=True, layout=layout, return_lse=True)


@of_wide_heads
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("G", [4, 1])
def test_options_of_wide_heads(dtype: str, G: int) -> None:
    options = {
        "window": (40, 3),
        "query_offset": jnp.array([5, 30]),
        "q_lengths": jnp.array([48, 30]),
        "kv_lengths": jnp.array([0, 64]),
        "segment_ids": jnp.asarray(np.arange(64)[None].repeat(2, 0) // 24),
        "mask": jnp.asarray(np.random.default_rng(2).random((1, 4, 64, 64)) < 0.9),
        "softcap": 5.0,
        "sinks": jnp.array([0.5, -1.0, 3.0, 0.0]),
        "dropout_rate": 0.2,
        "dropout_key": jax.random.key(0),
    }
    check("attention", *arrays(dtype, T=64, D=1024, G=G), **options, return_lse=True)


@of_wide_heads
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.01, 30.0])
def test_small_and_large_inputs_of_wide_heads(dtype: str, scale: float) -> None:
    check("attention", *arrays(dtype, T=64, D=2048, scale=scale), causal=True)


OPS_AND_SIZES = [("attention", 64), ("linear_attention", 64), ("linear_attention", 128)]


@pytest.mark.parametrize(("op", "D"), OPS_AND_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.01, 30.0])
def test_small_and_large_inputs(op: str, D: int, dtype: str, causal: bool, scale: float) -> None:
    check(op, *arrays(dtype, T=600, D=D, scale=scale), causal=causal)


@pytest.mark.parametrize("op", ["attention", "linear_attention"])
def test_tf32_when_asked_for(op: str) -> None:
    check(op, *arrays("float32", T=600, D=64), causal=True, precision="tf32")


@of_linear_attention
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.usefixtures("linear_time_oracle")
def test_linear_attention_over_a_long_sequence(dtype: str, causal: bool, D: int) -> None:
    check("linear_attention", *arrays(dtype, B=1, T=LONG, H=2, G=1, D=D), causal=causal)


# Whether causal, and columns of a head.
BY_SIZE = [(False, 128), (False, 256), (True, 64), (True, 128), (True, 256)]
OTHER_SIZES = [(causal, D) for D in (192, 112) for causal in (False, True)]


def needs_hopper() -> None:
    if device.describe(jax.devices()[0]).capability != (9, 0):
        pytest.skip("Mosaic GPU's kernels are for Hopper")


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "layout", "scale"),
    [
        (1, LONG, 2, 2, 128, "bthd", 1.0),
        (2, 7000, 6, 6, 128, "bhtd", 30.0),
        (1, 9000, 8, 2, 128, "bthd", 1.0),
        (30, 72, 50, 50, 128, "bthd", 1.0),
        (1, LONG, 2, 2, 256, "bhtd", 1.0),
        (2, 7000, 6, 6, 192, "bthd", 30.0),
        (1, 9000, 8, 2, 192, "bhtd", 1.0),
        (30, 72, 50, 50, 256, "bthd", 1.0),
        (1, LONG, 2, 2, 64, "bthd", 1.0),
        (2, 9000, 8, 8, 64, "bhtd", 30.0),
        (30, 72, 64, 64, 64, "bthd", 1.0),
        (1, LONG, 2, 2, 96, "bthd", 1.0),
        (2, 7000, 8, 8, 80, "bhtd", 30.0),
        (1, 9000, 16, 2, 112, "bthd", 1.0),
        (30, 72, 50, 50, 96, "bhtd", 1.0),
        (1, LONG, 2, 2, 160, "bhtd", 1.0),
        (2, 7000, 6, 6, 208, "bthd", 30.0),
        (1, LONG, 4, 4, 48, "bthd", 1.0),
        (2, 9001, 16, 16, 40, "bhtd", 30.0),
        (2, 9001, 8, 8, 72, "bthd", 1.0),
        (2, 9001, 16, 4, 32, "bthd", 1.0),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_mosaic_gpu(B: int, T: int, H: int, G: int, D: int, layout: str, scale: float) -> None:
    """What is chosen where no backend is named; of groups with wide heads the gradients are
    Triton's."""
    needs_hopper()
    qkv = arrays("bfloat16", B=B, T=T, H=H, G=G, D=D, layout=layout, scale=scale)
    options = {"causal": True, "layout": layout, "implementation": None}
    explained = ato_jax.explain("linear_attention", *qkv, **options)
    assert explained.forward.backend == "mosaic_gpu"
    assert explained.backward.backend == ("mosaic_gpu" if H == G or D <= 128 else "triton")
    check("linear_attention", *qkv, **options)


@of_mosaic_gpu
@pytest.mark.parametrize("options", [{}, {"decay": "step"}, {"feature_map": "silu"}], ids=str)
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("T", [72, 184])
def test_few_chunks_of_mosaic_gpu(T: int, D: int, options: dict[str, Any]) -> None:
    """What a kernel knows of its only chunks when it is compiled becomes constants in registers,
    with which ptxas has gone wrong: then what rows became depended on what the registers held
    before. From T = 65 to 128, of 64 columns, some rows in ten calls were NaN."""
    needs_hopper()
    options = options | {"causal": True}
    for seed in range(6):
        qkv = arrays("bfloat16", B=2, T=T, H=8, G=8, D=D, seed=seed)
        given = dict(options)
        if options.get("decay"):
            given["decay"] = -jax.random.uniform(jax.random.key(seed), (2, T, 8))
        check("linear_attention", *qkv, implementation="mosaic_gpu", **given)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "scale", "options"),
    [
        (1, LONG, 2, 2, 128, 1.0, {}),
        (1, LONG, 4, 2, 64, 0.01, {}),
        (2, 9000, 8, 2, 128, 30.0, {"layout": "bhtd"}),
        (2, 9000, 8, 8, 64, 30.0, {"feature_map": "softplus"}),
        (2, 9001, 8, 8, 64, 1.0, {"feature_map": "relu", "return_state": True}),
        (2, 9000, 8, 4, 96, 1.0, {"feature_map": "silu", "scale": 1e-3}),
        (2, 9000, 8, 8, 128, 30.0, {"feature_map": "identity", "scale": 1e-8}),
        (2, 9001, 16, 16, 72, 30.0, {}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_mosaic_gpu_in_float16(
    B: int, T: int, H: int, G: int, D: int, scale: float, options: dict[str, Any]
) -> None:
    """Sums and weights far beyond float16's range, and far below."""
    needs_hopper()
    layout = options.get("layout", "bthd")
    qkv = arrays("float16", B=B, T=T, H=H, G=G, D=D, scale=scale, layout=layout)
    options = options | {"causal": True, "implementation": None}
    explained = ato_jax.explain("linear_attention", *qkv, **options)
    assert explained.recorded.backend == explained.backward.backend == "mosaic_gpu"
    check("linear_attention", *qkv, **options)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("T", "H", "G", "D", "of_queries", "of_keys", "of_first_key", "options"),
    [
        (4096, 2, 2, 128, -16.0, 2.0, 2.0, {}),
        (4096, 2, 2, 128, 2.0, -16.0, -16.0, {}),
        (9000, 8, 8, 64, -12.0, -1.0, -1.0, {}),
        (4096, 4, 2, 128, 2.0, 2.0, -16.0, {}),
        (4104, 4, 4, 96, -13.0, -13.0, -13.0, {"feature_map": "softplus"}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_mosaic_gpu_in_float16_causal_by_offsets(
    T: int,
    H: int,
    G: int,
    D: int,
    of_queries: float,
    of_keys: float,
    of_first_key: float,
    options: dict[str, Any],
) -> None:
    """Features below float16's least normal number: queries and keys have offsets, and the first
    key has one of its own."""
    needs_hopper()
    q, k, v = arrays("float32", B=2, T=T, H=H, G=G, D=D)
    k = k + jnp.where(jnp.arange(T) == 0, of_first_key, of_keys)[:, None, None]
    qkv = [x.astype("float16") for x in (q + of_queries, k, v)]
    check("linear_attention", *qkv, implementation="mosaic_gpu", causal=True, **options)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "scale", "decay", "options"),
    [
        (1, LONG, 2, 2, 128, 1.0, "mild", {}),
        (1, LONG, 4, 2, 64, 0.01, "mild", {}),
        (2, 9000, 8, 2, 128, 30.0, "strong", {"layout": "bhtd"}),
        (2, 9001, 8, 8, 64, 1.0, "strong", {"feature_map": "relu"}),
        (2, 9000, 8, 8, 128, 1.0, "strong", {"feature_map": "silu", "return_state": True}),
        (2, 9000, 8, 4, 96, 1.0, "heads", {"feature_map": "softplus"}),
        (2, 9000, 8, 8, 64, 1.0, "heads", {}),
        (2, 9000, 4, 4, 128, 1.0, "mild", {"kv_lengths": np.array([9000, 1001])}),
        (2, 9000, 6, 6, 72, 1.0, "strong", {"layout": "bhtd"}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_mosaic_gpu_in_float16_with_a_decay(
    B: int,
    T: int,
    H: int,
    G: int,
    D: int,
    scale: float,
    decay: str,
    options: dict[str, Any],
) -> None:
    """Without a steep chunk, with some, and with heads whose chunks are all steep or none is."""
    needs_hopper()
    layout = options.get("layout", "bthd")
    qkv = arrays("float16", B=B, T=T, H=H, G=G, D=D, scale=scale, layout=layout)
    given: Any = -jnp.linspace(0.001, 0.5, G)
    if decay != "heads":
        given = -jax.random.uniform(jax.random.key(3), (B, T, G)) / 10
        given = given.at[:, 100::777].set(-50.0) if decay == "strong" else given
        given = given if layout == "bthd" else jnp.swapaxes(given, 1, 2)
    options = options | {"causal": True, "decay": given}
    check("linear_attention", *qkv, implementation="mosaic_gpu", **options)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("H", "G", "D", "layout", "options"),
    [
        (4, 4, 128, "bthd", {}),
        (8, 2, 128, "bhtd", {"feature_map": "silu"}),
        (8, 8, 64, "bthd", {}),
        (4, 4, 128, "bthd", {"decay": True}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_causal_segments_of_mosaic_gpu_in_float16(
    H: int, G: int, D: int, layout: str, options: dict[str, Any]
) -> None:
    """Several borders in a chunk, and chunks without one."""
    if options.get("decay"):
        decay = -jax.random.uniform(jax.random.key(3), (2, 7000, G)) / 10
        options = options | {"decay": decay}
    check_segments(2, 7000, H, G, D, layout, rows=200, causal=True, dtype="float16", **options)


@of_mosaic_gpu
@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "scale", "options"),
    [
        (1, LONG, 2, 2, 128, 1.0, {}),
        (1, LONG, 4, 2, 64, 0.01, {}),
        (2, 9000, 8, 2, 128, 30.0, {"layout": "bhtd"}),
        (2, 9000, 8, 4, 96, 1.0, {"feature_map": "silu", "return_state": True}),
        (2, 9000, 8, 8, 80, 1.0, {"feature_map": "softplus"}),
        (30, 72, 50, 25, 128, 1.0, {}),
        (2, 9000, 8, 8, 64, 1.0, {"feature_map": "identity", "scale": 1e-3}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_mosaic_gpu_in_float32(
    B: int,
    T: int,
    H: int,
    G: int,
    D: int,
    scale: float,
    options: dict[str, Any],
    precision: str | None,
) -> None:
    needs_hopper()
    layout = options.get("layout", "bthd")
    qkv = arrays("float32", B=B, T=T, H=H, G=G, D=D, scale=scale, layout=layout)
    options = options | {"precision": precision, "implementation": None}
    explained = ato_jax.explain("linear_attention", *qkv, **options)
    assert explained.recorded.backend == explained.backward.backend == "mosaic_gpu"
    check("linear_attention", *qkv, **options)


@of_mosaic_gpu
@pytest.mark.usefixtures("linear_time_oracle")
def test_mosaic_gpu_in_float32_with_lengths() -> None:
    needs_hopper()
    qkv = arrays("float32", B=2, T=9000, S=4104, H=4, G=2, D=128)
    lengths = {"q_lengths": jnp.array([9000, 70]), "kv_lengths": jnp.array([3, 4100])}
    check("linear_attention", *qkv, implementation="mosaic_gpu", **lengths)


def check_segments(
    B: int,
    T: int,
    H: int,
    G: int,
    D: int,
    layout: str,
    *,
    rows: int,
    dtype: str = "bfloat16",
    **options: Any,
) -> None:
    """Segments of 2 rows in the mean, then of `rows`. Two runs give the same bits."""
    needs_hopper()
    generator = np.random.default_rng(0)
    begins = generator.random((B, T)) < np.where(np.arange(T) < 200, 1 / 2, 1 / rows)
    qkv = arrays(dtype, B=B, T=T, H=H, G=G, D=D, layout=layout)
    options |= {"layout": layout, "segment_ids": np.cumsum(begins, axis=1)}
    wanted = numerics.oracle("linear_attention", *qkv, **options)
    found, again = (numerics.run_backends("mosaic_gpu", "mosaic_gpu", wanted) for _ in range(2))
    numerics.compare(found, wanted)
    for name in found:
        np.testing.assert_array_equal(found[name], again[name], err_msg=name)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "scale", "options"),
    [
        (1, LONG, 2, 2, 128, 1.0, {}),
        (1, LONG, 2, 2, 128, 30.0, {"feature_map": "softplus"}),
        (2, 9000, 8, 2, 128, 30.0, {"layout": "bhtd"}),
        (1, 16384, 4, 4, 128, 0.01, {}),
        (30, 72, 50, 25, 128, 1.0, {}),
        (2, 9000, 8, 4, 96, 1.0, {"feature_map": "silu", "return_state": True}),
        (2, 9000, 8, 8, 128, 30.0, {"feature_map": "identity", "scale": 1e-8}),
        (1, LONG, 2, 2, 256, 1.0, {}),
        (2, 9000, 8, 2, 192, 30.0, {"layout": "bhtd", "feature_map": "softplus"}),
        (2, 9000, 4, 4, 256, 30.0, {"normalize": False, "scale": 1e-8}),
        (2, 9000, 4, 2, 192, 1.0, {"feature_map": "silu", "return_state": True}),
        (2, 1003, 4, 2, 155, 0.01, {"q_lengths": [1003, 600], "kv_lengths": [70, 1003]}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_mosaic_gpu_in_float16_where_every_query_sees_every_key(
    B: int, T: int, H: int, G: int, D: int, scale: float, options: dict[str, Any]
) -> None:
    needs_hopper()
    layout = options.get("layout", "bthd")
    qkv = arrays("float16", B=B, T=T, H=H, G=G, D=D, scale=scale, layout=layout)
    lengths = {name: jnp.array(options[name]) for name in options if name.endswith("lengths")}
    check("linear_attention", *qkv, implementation="mosaic_gpu", **options | lengths)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("T", "S", "H", "G", "D", "of_queries", "of_keys", "options"),
    [
        (9000, 16384, 2, 2, 128, (0.0,), (-14.0,), {}),
        (4104, 9000, 4, 2, 96, (-14.0,), (-14.0,), {"feature_map": "softplus"}),
        (4096, 4096, 4, 4, 112, (10.0, 0.0, -14.0), (-20.0, 10.0), {"return_state": True}),
        (2048, 9000, 2, 2, 128, (3.0, 3.0, -6e4), (3.0, -6e4), {"feature_map": "relu"}),
        (4104, 9000, 2, 2, 128, (3.0,), (-14.0,), {"kv_lengths": [9000, 72]}),
        (4104, 9000, 2, 2, 256, (-14.0,), (-14.0,), {"return_state": True}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_mosaic_gpu_in_float16_by_offsets_of_columns(
    T: int,
    S: int,
    H: int,
    G: int,
    D: int,
    of_queries: tuple[float, ...],
    of_keys: tuple[float, ...],
    options: dict[str, Any],
) -> None:
    """Features below float16's least normal number, or that no key has: queries and keys have
    offsets, by columns in turn."""
    needs_hopper()
    q, k, v = arrays("float16", B=2, T=T, S=S, H=H, G=G, D=D)
    q, k = (x + jnp.resize(jnp.array(o), D) for x, o in ((q, of_queries), (k, of_keys)))
    qkv = (q.astype("float16"), k.astype("float16"), v)
    if "kv_lengths" in options:
        options = options | {"kv_lengths": jnp.array(options["kv_lengths"])}
    check("linear_attention", *qkv, implementation="mosaic_gpu", **options)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("B", "T", "S", "H", "G", "D", "layout", "scale"),
    [
        (1, LONG, LONG, 2, 2, 128, "bthd", 1.0),
        (2, 7000, 9000, 8, 2, 128, "bhtd", 30.0),
        (1, 16384, 16384, 4, 4, 128, "bthd", 0.01),
        (30, 72, 200, 50, 25, 128, "bthd", 1.0),
        (1, LONG, LONG, 2, 2, 256, "bhtd", 1.0),
        (2, 7000, 9000, 6, 2, 256, "bthd", 30.0),
        (1, 16384, 16384, 4, 4, 192, "bthd", 0.01),
        (30, 72, 200, 50, 25, 192, "bhtd", 1.0),
        (1, LONG, LONG, 2, 2, 96, "bhtd", 1.0),
        (2, 7000, 9000, 8, 2, 112, "bthd", 30.0),
        (1, 16384, 16384, 4, 4, 80, "bthd", 0.01),
        (30, 72, 200, 50, 25, 96, "bthd", 1.0),
        (2, 7001, 9000, 8, 2, 72, "bhtd", 30.0),
        (1, LONG, LONG, 2, 2, 160, "bthd", 1.0),
        (2, 7000, 9000, 6, 2, 240, "bhtd", 30.0),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_mosaic_gpu_both_ways(
    B: int, T: int, S: int, H: int, G: int, D: int, layout: str, scale: float
) -> None:
    needs_hopper()
    qkv = arrays("bfloat16", B=B, T=T, S=S, H=H, G=G, D=D, layout=layout, scale=scale)
    options = {"layout": layout, "implementation": None}
    explained = ato_jax.explain("linear_attention", *qkv, **options)
    assert explained.forward.backend == explained.backward.backend == "mosaic_gpu"
    check("linear_attention", *qkv, **options)


@of_mosaic_documents
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "layout", "options"),
    [
        (2, 9001, 4, 4, 96, "bthd", {}),
        (2, 7003, 8, 2, 40, "bhtd", {"feature_map": "silu"}),
        (2, 7003, 6, 3, 72, "bhtd", {}),
        (3, 4100, 4, 2, 128, "bhtd", {"kv_lengths": np.array([4100, 77, 3001])}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_documents_of_mosaic_gpu(
    B: int, T: int, H: int, G: int, D: int, layout: str, options: dict[str, Any]
) -> None:
    """Of one row and more, most of them no multiple of 8."""
    check_segments(B, T, H, G, D, layout, rows=60, **options)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("dtype", "B", "T", "H", "G", "D", "layout", "options"),
    [
        ("bfloat16", 3, 9001, 1, 1, 40, "bthd", {"decay": "head", "causal": True}),
        ("bfloat16", 2, 5000, 9, 3, 36, "bhtd", {"decay": "step", "causal": True}),
        ("bfloat16", 2, 5001, 4, 4, 156, "bthd", {"causal": True, "return_state": True}),
        ("bfloat16", 3, 5000, 4, 2, 200, "bthd", {"lengths": True, "feature_map": "exp"}),
        ("bfloat16", 3, 5000, 3, 3, 100, "bthd", {"decay": "channel", "lengths": True}),
        ("float16", 2, 5003, 4, 2, 100, "bthd", {"causal": True, "feature_map": "relu"}),
        ("float32", 3, 3001, 2, 2, 128, "bthd", {"causal": True, "lengths": True}),
        ("float32", 2, 3001, 4, 2, 72, "bhtd", {}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_calls_that_are_fitted(
    dtype: str, B: int, T: int, H: int, G: int, D: int, layout: str, options: dict[str, Any]
) -> None:
    """Sizes, heads and lengths that kernels take as others (`fits.py`)."""
    needs_hopper()
    qkv = arrays(dtype, B=B, T=T, H=H, G=G, D=D, layout=layout)
    options = {"causal": "decay" in options} | options | {"layout": layout}
    if options.pop("lengths", False):
        options |= dict.fromkeys(("q_lengths", "kv_lengths"), np.linspace(T // 3, T, B).astype(int))
    if kind := options.pop("decay", None):
        widths = {"head": (G,), "step": (B, T, G), "channel": (B, T, G, D)}[kind]
        decay = -jax.random.uniform(jax.random.key(3), widths) / 10
        swaps = kind != "head" and layout == "bhtd"
        options["decay"] = jnp.swapaxes(decay, 1, 2) if swaps else decay
    check("linear_attention", *qkv, implementation="mosaic_gpu", **options)


@of_random_features
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("D", "count"), [(64, 128), (128, 128), (48, 240)])
def test_random_features_of_mosaic_gpu(D: int, count: int, causal: bool) -> None:
    """With gradients by Triton, which stores states up to 128 features and walks beyond them, or
    by Mosaic GPU where it has them."""
    needs_hopper()
    qkv = arrays("bfloat16", B=2, T=1040, H=4, G=2, D=D)
    feature_map = ato_jax.favor(jax.random.key(0), count, D)
    options = {"feature_map": feature_map, "causal": causal}
    if count <= 128:  # Beyond it causal lengths are refused.
        options["kv_lengths"] = np.array([1040, 700])
    wanted = numerics.oracle("linear_attention", *qkv, **options)
    whole = linear_attention_mosaic.unsupported(wanted.request.spec, "backward") is None
    assert whole == (not causal and count == 128)
    backward = "mosaic_gpu" if whole else "triton"
    numerics.compare(numerics.run_backends("mosaic_gpu", backward, wanted), wanted)


@of_random_features
@pytest.mark.parametrize(
    ("B", "T", "S", "H", "G", "D", "count", "layout", "scale"),
    [
        (1, LONG, LONG, 2, 2, 64, 128, "bthd", 1.0),
        (2, 7000, 9000, 8, 2, 128, 96, "bhtd", 1.0),
        (1, 16384, 16384, 4, 4, 64, 128, "bthd", 0.01),
        (1, 4096, 4096, 4, 4, 64, 128, "bthd", 2.5),
        (30, 72, 200, 50, 25, 64, 80, "bthd", 1.0),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_random_features_seen_by_every_query(
    B: int, T: int, S: int, H: int, G: int, D: int, count: int, layout: str, scale: float
) -> None:
    """Features made within kernels, of which a sum may have few large ones."""
    needs_hopper()
    qkv = arrays("bfloat16", B=B, T=T, S=S, H=H, G=G, D=D, layout=layout, scale=scale)
    options = {"feature_map": ato_jax.favor(jax.random.key(0), count, D), "layout": layout}
    check("linear_attention", *qkv, implementation="mosaic_gpu", **options)


@of_random_features
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "count", "layout", "scale", "options"),
    [
        (1, LONG, 2, 2, 64, 128, "bthd", 1.0, {}),
        (2, 7000, 8, 2, 128, 96, "bhtd", 1.0, {}),
        (1, 16384, 4, 4, 64, 128, "bthd", 0.01, {}),
        (1, 4096, 4, 4, 64, 128, "bthd", 2.5, {}),
        (1, 4096, 4, 4, 128, 64, "bthd", 1.0, {"normalize": False}),
        (3, 200, 50, 25, 80, 112, "bthd", 1.0, {}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_random_features_where_causal(
    B: int,
    T: int,
    H: int,
    G: int,
    D: int,
    count: int,
    layout: str,
    scale: float,
    options: dict[str, Any],
) -> None:
    """Arrays of features in two parts, of which a sum may have few large ones."""
    needs_hopper()
    qkv = arrays("bfloat16", B=B, T=T, H=H, G=G, D=D, layout=layout, scale=scale)
    options = options | {"feature_map": ato_jax.favor(jax.random.key(0), count, D)}
    options |= {"causal": True, "layout": layout}
    check("linear_attention", *qkv, implementation="mosaic_gpu", **options)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "layout", "options"),
    [
        (2, 9000, 4, 4, 128, "bthd", {}),
        (2, 7000, 8, 2, 128, "bhtd", {"feature_map": "silu"}),
        (2, 9001, 8, 8, 64, "bthd", {}),
        (2, 7000, 8, 4, 64, "bhtd", {"kv_lengths": np.array([7000, 3001])}),
        (2, 9000, 4, 4, 256, "bhtd", {"feature_map": "silu"}),
        (3, 3000, 4, 4, 208, "bthd", {}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_causal_segments_of_mosaic_gpu(
    B: int, T: int, H: int, G: int, D: int, layout: str, options: dict[str, Any]
) -> None:
    """Several borders in a chunk, and chunks without one."""
    check_segments(B, T, H, G, D, layout, rows=200, causal=True, **options)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "decay", "rows", "options"),
    [
        (2, 9000, 4, 4, 128, "step", 200, {}),
        (2, 7000, 8, 2, 128, "step", 200, {"layout": "bhtd", "feature_map": "silu"}),
        (2, 9001, 8, 8, 64, "step", 200, {}),
        (2, 7000, 8, 4, 64, "head", 200, {"layout": "bhtd", "kv_lengths": np.array([7000, 3001])}),
        (2, 9000, 4, 4, 128, "strong", 200, {}),
        (2, 9000, 4, 4, 64, "strong", 200, {"normalize": False, "feature_map": "identity"}),
        (1, LONG, 2, 2, 128, "head", 1024, {}),
        (1, LONG, 2, 2, 64, "head", 1024, {"normalize": False, "feature_map": "identity"}),
        (1, LONG, 4, 4, 64, "step", 1024, {"dtype": "float16"}),
        (2, 9000, 4, 4, 256, "step", 200, {}),
        (2, 7000, 4, 4, 160, "step", 200, {"layout": "bhtd", "feature_map": "exp"}),
        (2, 9000, 4, 4, 192, "strong", 200, {"normalize": False}),
        (1, LONG, 2, 2, 256, "step", 1024, {}),
        (1, LONG, 2, 2, 256, "step", 1024, {"dtype": "float16"}),
        (2, 9001, 4, 2, 192, "step", 200, {"dtype": "float16", "layout": "bhtd"}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_causal_segments_beside_a_decay(
    B: int, T: int, H: int, G: int, D: int, decay: str, rows: int, options: dict[str, Any]
) -> None:
    """Some pieces have a steep chunk where decays are `strong`, and no masks."""
    layout = options.get("layout", "bthd")
    given: Any = -jnp.linspace(0.001, 0.1, G)
    if decay != "head":
        given = -jax.random.uniform(jax.random.key(3), (B, T, G)) / 10
        given = given.at[:, 100:2000:777].set(-50.0) if decay == "strong" else given
        given = given if layout == "bthd" else jnp.swapaxes(given, 1, 2)
    options = {"layout": layout} | options | {"decay": given}
    check_segments(B, T, H, G, D, rows=rows, causal=True, **options)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "V", "dtype", "kind", "options"),
    [
        (2, 331, 4, 4, 128, 128, "bfloat16", None, {}),
        (2, 4099, 8, 2, 128, 128, "bfloat16", None, {"layout": "bhtd", "feature_map": "silu"}),
        (2, 9001, 4, 4, 128, 128, "bfloat16", "step", {}),
        (2, 4099, 8, 2, 128, 128, "bfloat16", "mild", {"normalize": False}),
        (2, 4099, 4, 4, 128, 128, "bfloat16", "states", {}),
        (2, 4099, 4, 4, 128, 128, "bfloat16", "all", {}),
        (2, 4099, 4, 4, 128, 128, "float16", None, {"kv_lengths": np.array([4099, 1001])}),
        (2, 4099, 4, 4, 80, 80, "bfloat16", "head", {}),
        (2, 1027, 4, 4, 96, 96, "bfloat16", "segments, causal", {}),
        (2, 4099, 4, 2, 112, 112, "bfloat16", None, {"layout": "bhtd", "feature_map": "exp"}),
        (2, 1027, 4, 4, 128, 64, "bfloat16", None, {}),
        (2, 1027, 4, 4, 48, 96, "bfloat16", None, {"layout": "bhtd"}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_causal_tails_within_8_rows_of_mosaic_gpu(
    B: int,
    T: int,
    H: int,
    G: int,
    D: int,
    V: int,
    dtype: str,
    kind: str | None,
    options: dict[str, Any],
) -> None:
    """Tiles of one head that copies fill atom by atom. Two runs give the same bits."""
    needs_hopper()
    qkv = arrays(dtype, B=B, T=T, H=H, G=G, D=D, V=V, layout=options.get("layout", "bthd"))
    options = (linear_options(kind, B, T, D, G=G, V=V) if kind else {"causal": True}) | options
    wanted = numerics.oracle("linear_attention", *qkv, **options)
    found, again = (numerics.run_backends("mosaic_gpu", "mosaic_gpu", wanted) for _ in range(2))
    numerics.compare(found, wanted)
    for name in found:
        np.testing.assert_array_equal(
            np.asarray(found[name]), np.asarray(again[name]), err_msg=name
        )


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("causal", "D", "V", "kind"),
    [
        (True, 128, 64, "step"),
        (True, 64, 128, "states"),
        (True, 192, 64, None),
        (False, 128, 64, "states"),
        (False, 96, 192, None),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_values_of_another_size_of_mosaic_gpu(
    causal: bool, D: int, V: int, kind: str | None
) -> None:
    needs_hopper()
    T = 4096
    qkv = arrays("bfloat16", T=T, H=4, G=4, D=D, V=V)
    options = linear_options(kind, 2, T, D, G=4, V=V) if kind else {}
    options |= {"causal": causal, "implementation": "mosaic_gpu"}
    check("linear_attention", *qkv, **options)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("B", "T", "G", "D", "V", "kind", "options"),
    [
        (2, 16384, 4, 128, 256, "mild", {"normalize": False, "feature_map": "identity"}),
        (2, 9000, 4, 128, 256, "step", {}),
        (2, 16379, 2, 128, 192, "mild", {}),
        (2, 9001, 4, 128, 160, None, {"layout": "bhtd"}),
        (2, 16384, 4, 64, 256, "all", {}),
        (1, LONG, 4, 128, 256, "step", {"normalize": False, "feature_map": "identity"}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_blocks_of_values_of_mosaic_gpu(
    B: int, T: int, G: int, D: int, V: int, kind: str | None, options: dict[str, Any]
) -> None:
    """Causal values of more than 128 columns beside at most 128 features."""
    needs_hopper()
    qkv = arrays("bfloat16", B=B, T=T, H=4, G=G, D=D, V=V, layout=options.get("layout", "bthd"))
    options = (linear_options(kind, B, T, D, G=G, V=V) if kind else {"causal": True}) | options
    options |= {"implementation": None}
    explained = ato_jax.explain("linear_attention", *qkv, **options)
    assert explained.forward.backend == explained.backward.backend == "mosaic_gpu"
    check("linear_attention", *qkv, **options)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("T", "G", "D", "V", "kind", "options"),
    [
        (9001, 2, 64, 144, None, {"layout": "bhtd", "feature_map": "relu"}),
        (4096, 4, 128, 256, "step", {"feature_map": "relu"}),
        (4096, 4, 96, 192, None, {"normalize": False, "return_state": True}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_blocks_of_values_in_float16_of_mosaic_gpu(
    T: int, G: int, D: int, V: int, kind: str | None, options: dict[str, Any]
) -> None:
    """The keys of the sequences differ by a factor of 64, and so do the powers of two."""
    needs_hopper()
    layout = options.get("layout", "bthd")
    q, k, v = arrays("float16", T=T, H=4, G=G, D=D, V=V, layout=layout)
    k = k * jnp.array([2.0**-6, 1.0], k.dtype)[:, None, None, None]
    options = (linear_options(kind, 2, T, D, G=G, V=V) if kind else {"causal": True}) | options
    check("linear_attention", q, k, v, **options, implementation="mosaic_gpu")


@of_mosaic_gpu
@pytest.mark.parametrize(
    "causal, T, D, G, options",
    [
        (False, 4096, 128, 4, {}),
        (False, 4096, 64, 2, {"layout": "bhtd"}),
        (False, 1000, 80, 4, {"feature_map": "silu"}),
        (False, 4096, 96, 4, {"kv_lengths": np.array([4096, 70]), "return_state": True}),
        (True, 4096, 128, 2, {}),
        (True, 4001, 64, 4, {"layout": "bhtd", "return_state": True}),
        (True, 4096, 112, 4, {"feature_map": "exp"}),
        (True, 4096, 48, 4, {"kv_lengths": np.array([4096, 70])}),
    ],
)
def test_float8_of_mosaic_gpu(
    causal: bool, T: int, D: int, G: int, options: dict[str, Any]
) -> None:
    """8 bits as kernels read them, beside float32 arrays of the same values by XLA; twice the
    same."""
    layout = options.get("layout", "bthd")
    values, scales, wide = [], [], []
    for seed, (heads, factor) in enumerate(((4, 1.1), (G, 0.9), (G, 1.7))):
        shape = (2, T, heads, D) if layout == "bthd" else (2, heads, T, D)
        x = jax.random.normal(jax.random.key(seed), shape)
        time = layout.index("t")
        found, scale = ato_jax.quantize(x, (time, 3))
        values.append(found)
        scales.append(scale * factor)
        wide.append(found.astype(jnp.float32) * jnp.expand_dims(scale * factor, (time, 3)))
    options = {"causal": causal, **options}

    def call() -> Any:
        return ato_jax.linear_attention(
            *values, scales=scales, implementation="mosaic_gpu", **options
        )

    explained = ato_jax.explain(
        "linear_attention", *values, scales=scales, implementation="mosaic_gpu", **options
    )
    assert explained.implementation == "mosaic_gpu.float8"
    found, again = (jax.tree.leaves(call()) for _ in range(2))
    exact = jax.tree.leaves(ato_jax.linear_attention(*wide, implementation="xla", **options))
    for own, same, wanted in zip(found, again, exact, strict=True):
        assert (own == same).all()
        error = jnp.linalg.norm(own.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
        assert error < 5e-3


@of_mosaic_gpu
@pytest.mark.parametrize("scale", [0.01, 30.0])
@pytest.mark.parametrize("causal, D", [*BY_SIZE, (False, 96), (True, 96), (True, 32)])
def test_small_and_large_inputs_of_mosaic_gpu(causal: bool, scale: float, D: int) -> None:
    needs_hopper()
    qkv = arrays("bfloat16", T=600, H=2, G=2, D=D, scale=scale)
    check("linear_attention", *qkv, causal=causal, implementation="mosaic_gpu")


@of_mosaic_gpu
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("causal, D", [*BY_SIZE, *OTHER_SIZES])
@pytest.mark.usefixtures("linear_time_oracle")
def test_states_of_mosaic_gpu(causal: bool, D: int, normalize: bool) -> None:
    needs_hopper()
    T = 4096 if causal else 4000
    qkv = arrays("bfloat16", B=2, T=T, H=4, G=4, D=D)
    options = linear_options("states", 2, T, D, G=4) | {"causal": causal}
    options |= {"normalize": normalize, "implementation": "mosaic_gpu"}
    check("linear_attention", *qkv, **options)


@of_mosaic_gpu
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    "name, scale", [("head", 1.0), ("step", 1.0), ("mild", 1.0), ("mild", 30.0)]
)
@pytest.mark.parametrize("B, G, D", [(2, 2, 128), (2, 4, 128), (4, 4, 64), (4, 2, 64), (3, 4, 96)])
@pytest.mark.usefixtures("linear_time_oracle")
def test_gates_of_mosaic_gpu(
    name: str, scale: float, B: int, G: int, D: int, normalize: bool
) -> None:
    needs_hopper()
    qkv = arrays("bfloat16", B=B, T=9000, H=4, G=G, D=D, scale=scale)
    options = linear_options(name, B, 9000, D, G=G) | {"implementation": None}
    options |= {"normalize": normalize}
    explained = ato_jax.explain("linear_attention", *qkv, **options)
    assert explained.forward.backend == explained.backward.backend == "mosaic_gpu"
    check("linear_attention", *qkv, **options)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "scale", "options"),
    [
        (1, LONG, 2, 2, 256, 1.0, {}),
        (1, LONG, 2, 2, 256, 0.01, {"layout": "bhtd"}),
        (2, 9000, 4, 4, 192, 3.0, {"feature_map": "softplus"}),
        (2, 9000, 4, 4, 160, 30.0, {"feature_map": "silu", "scale": 1e-4}),
        (2, 9001, 4, 1, 147, 1.0, {"feature_map": "relu"}),
        (2, 8192, 4, 4, 256, 1.0, {"states": True}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_wide_heads_in_float16_of_mosaic_gpu(
    B: int, T: int, H: int, G: int, D: int, scale: float, options: dict[str, Any]
) -> None:
    needs_hopper()
    layout, options = options.get("layout", "bthd"), dict(options)
    qkv = arrays("float16", B=B, T=T, H=H, G=G, D=D, scale=scale, layout=layout)
    if options.pop("states", False):
        options |= linear_options("states", B, T, D, G=G)
    options |= {"causal": True, "implementation": "mosaic_gpu"}
    check("linear_attention", *qkv, **options)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("T", "S", "D", "V", "options"),
    [
        (65529, 65529, 128, 128, {}),
        (9001, 9001, 120, 88, {"layout": "bhtd", "dtype": "float16"}),
        (4099, 9000, 128, 128, {"kv_lengths": [9000, 3001], "feature_map": "silu"}),
        (65529, 65529, 256, 256, {}),
        (9003, 1001, 184, 136, {"feature_map": "exp", "layout": "bhtd"}),
        (9001, 9001, 208, 208, {"dtype": "float16", "return_state": True}),
        (9000, 5003, 256, 256, {"q_lengths": [9000, 70], "kv_lengths": [129, 5003]}),
        (4096, 5000, 192, 192, {"q_lengths": [0, 4095], "dtype": "float16", "normalize": False}),
        (65529, 65529, 256, 256, {"causal": True}),
        (9001, 9001, 216, 136, {"causal": True, "dtype": "float16", "layout": "bhtd"}),
        (9000, 9000, 88, 88, {"causal": True, "feature_map": "relu"}),
        (9001, 9001, 120, 104, {"causal": True, "dtype": "float16"}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_any_rows_and_multiples_of_8_columns_of_mosaic_gpu(
    T: int, S: int, D: int, V: int, options: dict[str, Any]
) -> None:
    needs_hopper()
    options = {"layout": "bthd", "dtype": "bfloat16", "implementation": "mosaic_gpu"} | options
    lengths = {name: jnp.array(options[name]) for name in options if name.endswith("lengths")}
    qkv = arrays(options.pop("dtype"), T=T, S=S, D=D, V=V, H=4, G=4, layout=options["layout"])
    check("linear_attention", *qkv, **options | lengths)


@of_wide_documents
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "rows", "options"),
    [
        (2, 9000, 4, 4, 256, 200, {}),
        (1, LONG, 2, 2, 256, 1024, {"dtype": "float16"}),
        (2, 9001, 4, 2, 155, 30, {"layout": "bhtd", "kv_lengths": np.array([9001, 3001])}),
        (2, 7000, 4, 4, 192, 7000, {"feature_map": "silu", "dtype": "float16"}),
        (2, 1000, 4, 4, 208, 3, {"dtype": "float16"}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_documents_of_wide_heads_of_mosaic_gpu(
    B: int, T: int, H: int, G: int, D: int, rows: int, options: dict[str, Any]
) -> None:
    options = {"layout": "bthd"} | options
    check_segments(B, T, H, G, D, rows=rows, causal=False, **options)


@of_mosaic_gpu
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    "name, T, D, scale",
    [("step", 9000, 256, 1.0), ("mild", 9000, 192, 30.0), ("mild", 136, 144, 1.0)],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_gates_of_wide_heads_of_mosaic_gpu(
    name: str, T: int, D: int, scale: float, normalize: bool
) -> None:
    needs_hopper()
    qkv = arrays("bfloat16", B=2, T=T, H=4, G=4, D=D, scale=scale)
    options = linear_options(name, 2, T, D, G=4) | {"normalize": normalize}
    check("linear_attention", *qkv, implementation="mosaic_gpu", **options)


@of_mosaic_gpu
@pytest.mark.parametrize(
    "name, B, T, H, G, D, scale, options",
    [
        ("step, both ways", 2, 9000, 4, 4, 128, 1.0, {}),
        ("step, both ways", 2, 8192, 4, 2, 128, 30.0, {"normalize": False}),
        ("step, both ways", 1, 16379, 4, 4, 128, 1.0, {"feature_map": "exp"}),
        ("step, both ways", 3, 9000, 4, 4, 96, 1.0, {}),
        ("step, both ways", 4, 9000, 4, 4, 64, 1.0, {}),
        ("step, both ways", 4, 8187, 8, 2, 64, 30.0, {"normalize": False}),
        ("head", 2, LONG, 2, 2, 128, 1.0, {"causal": False}),
        ("head", 2, 9000, 4, 4, 64, 0.01, {"causal": False}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_gates_both_ways_of_mosaic_gpu(
    name: str, B: int, T: int, H: int, G: int, D: int, scale: float, options: dict[str, Any]
) -> None:
    """Two runs give the same bits. Triton's kernels compute the gradients of a decay per head."""
    needs_hopper()
    qkv = arrays("bfloat16", B=B, T=T, H=H, G=G, D=D, scale=scale)
    options = linear_options(name, B, T, D, G=G) | options
    wanted = numerics.oracle("linear_attention", *qkv, **options)
    backward = "triton" if name == "head" else "mosaic_gpu"
    found, again = (numerics.run_backends("mosaic_gpu", backward, wanted) for _ in range(2))
    numerics.compare(found, wanted)
    for array in found:
        np.testing.assert_array_equal(np.asarray(found[array]), np.asarray(again[array]))


@of_mosaic_gpu
@pytest.mark.parametrize(
    "dtype, name, B, T, H, G, D, scale, options",
    [
        ("bfloat16", "step", 2, 9000, 4, 4, 256, 1.0, {}),
        ("bfloat16", "mild", 2, 8187, 4, 2, 160, 30.0, {"normalize": False}),
        ("bfloat16", "head", 1, LONG, 2, 2, 256, 0.01, {}),
        ("float16", "step", 1, LONG, 2, 2, 192, 1.0, {}),
        ("float16", "mild", 2, 9000, 4, 4, 128, 30.0, {"feature_map": "silu", "scale": 1e-4}),
        ("float16", "head", 2, 9001, 4, 2, 80, 1.0, {}),
        ("float16", "step", 3, 8192, 4, 4, 64, 1.0, {}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_gates_of_both_sides_in_runs_of_mosaic_gpu(
    dtype: str,
    name: str,
    B: int,
    T: int,
    H: int,
    G: int,
    D: int,
    scale: float,
    options: dict[str, Any],
) -> None:
    needs_hopper()
    qkv = arrays(dtype, B=B, T=T, H=H, G=G, D=D, scale=scale)
    options = linear_options(name, B, T, D, G=G) | options | {"causal": False}
    check("linear_attention", *qkv, implementation="mosaic_gpu", **options)


@of_mosaic_gpu
@pytest.mark.parametrize(
    ("dtype", "decay", "B", "T", "H", "G", "D", "rows"),
    [
        pytest.param("float16", None, 2, 9000, 4, 4, 128, 200, marks=of_wide_documents),
        pytest.param("float16", None, 2, 9001, 4, 2, 40, 30, marks=of_wide_documents),
        ("bfloat16", "step", 2, 9000, 4, 4, 128, 200),
        ("bfloat16", "head", 2, 9001, 4, 4, 64, 30),
        ("bfloat16", "step", 2, 9001, 4, 4, 256, 1000),
        ("float16", "step", 2, 9000, 4, 4, 96, 300),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_segments_in_runs_of_mosaic_gpu(
    dtype: str, decay: str | None, B: int, T: int, H: int, G: int, D: int, rows: int
) -> None:
    options = {} if decay is None else {"decay": linear_options(decay, B, T, D, G=G)["decay"]}
    check_segments(B, T, H, G, D, "bthd", rows=rows, causal=False, dtype=dtype, **options)


@pytest.mark.kernels("mosaic_channel_gates", "channel_gates")
@pytest.mark.parametrize(
    ("B", "T", "G", "layout", "strength", "share", "options"),
    [
        (1, LONG, 4, "bthd", 0.1, 0.0, {}),
        (2, 9000, 4, "bhtd", 0.1, 1e-4, {"normalize": False}),
        (4, 4096, 4, "bhtd", 0.1, 0.02, {"states": True}),
        (4, 5000, 2, "bthd", 3.0, 0.0, {}),
        (8, 2048, 4, "bthd", 0.001, 0.0, {}),
        (28, 600, 4, "bthd", 20.0, 0.0, {"scale": 30.0}),
        (28, 600, 4, "bthd", 0.01, 0.0, {"scale": 0.01}),
        (1, LONG, 4, "bthd", 0.01, 0.0, {"D": 64}),
        (2, 9000, 4, "bhtd", 0.1, 0.0, {"D": 64, "normalize": False}),
        (4, 5000, 4, "bthd", 3.0, 0.0, {"D": 64}),
        (4, 4096, 4, "bhtd", 0.1, 0.02, {"D": 64, "states": True}),
        (4, 5000, 4, "bthd", 0.1, 0.0, {"D": 80}),
        (8, 4096, 4, "bhtd", 0.1, 0.02, {"D": 48, "states": True}),
        (4, 4096, 4, "bthd", 0.1, 0.0, {"D": 256, "states": True}),
        (4, 5000, 4, "bhtd", 0.1, 0.0, {"D": 144, "normalize": False}),
        (1, LONG, 4, "bthd", 0.05, 0.0, {"feature_map": "identity", "normalize": False}),
        (4, 5000, 4, "bhtd", 0.1, 0.0, {"feature_map": "silu", "D": 144, "normalize": False}),
        (8, 4096, 4, "bhtd", 0.1, 0.02, {"feature_map": "identity", "D": 64, "normalize": False}),
        (4, 5000, 4, "bthd", 0.001, 0.0, {"feature_map": jnp.tanh, "segments": 40}),
        (4, 5000, 4, "bthd", 0.1, 0.0, {"segments": 300}),
        (4, 4096, 4, "bhtd", 0.1, 0.0, {"segments": 5, "D": 256, "states": True}),
        (8, 4096, 4, "bthd", 0.1, 0.02, {"segments": 100, "D": 64}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_channel_gates_of_mosaic_gpu(
    B: int, T: int, G: int, layout: str, strength: float, share: float, options: dict[str, Any]
) -> None:
    """Mild and strong, with a share that leave nothing; the same bits twice. The gradients of
    groups are Triton's. Of small inputs single rows of dq are beyond the budget, and no matter of
    this test."""
    needs_hopper()
    options = dict(options)
    scale, D = options.pop("scale", 1.0), options.pop("D", 128)
    qkv = arrays("bfloat16", B=B, T=T, H=4, G=G, D=D, layout=layout, scale=scale)
    generator = np.random.default_rng(4)
    gates = -np.abs(generator.standard_normal(qkv[1].shape, np.float32)) * strength
    gates[generator.random(gates.shape) < share] = -50
    if options.pop("states", False):
        options |= linear_options("states", B, T, D, G=G)
    if segments := options.pop("segments", 0):
        ids = np.sort(generator.integers(0, segments, (B, T)), axis=1)
        options["segment_ids"] = jnp.asarray(ids)
    options |= {"decay": jnp.asarray(gates), "causal": True, "layout": layout}
    explained = ato_jax.explain("linear_attention", *qkv, implementation=None, **options)
    assert explained.forward.backend == "mosaic_gpu"
    backward = "mosaic_gpu" if G == 4 else "triton"
    assert explained.backward.backend == backward
    wanted = numerics.oracle("linear_attention", *qkv, **options)
    here = device.describe(jax.devices()[0])
    found, again = (
        numerics.run_backends("mosaic_gpu", backward, wanted, device=here) for _ in range(2)
    )
    for name, array in found.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(again[name]), err_msg=name)
    if scale < 1:
        numerics.check("out", found["out"], wanted.exact["out"], dtype="bfloat16")
    else:
        numerics.compare(found, wanted)


@pytest.mark.kernels("mosaic_channel_gates", "channel_gates")
@pytest.mark.parametrize(
    ("B", "T", "G", "D", "layout", "options"),
    [
        (2, 9000, 4, 128, "bthd", {}),
        (4, 4099, 4, 64, "bhtd", {"states": True}),
        (2, 9001, 2, 192, "bthd", {"segments": 20}),
        (8, 2048, 4, 80, "bthd", {"normalize": False}),
        (6, 3001, 4, 48, "bthd", {"lengths": True}),
        (4, 4099, 4, 128, "bhtd", {"causal": True, "segments": 20}),
        (4, 4096, 2, 64, "bthd", {"causal": True, "segments": 5, "lengths": True}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_channel_gates_that_xla_alone_took(
    B: int, T: int, G: int, D: int, layout: str, options: dict[str, Any]
) -> None:
    """Rows that see both sides, and any number of rows, lengths and groups beside segments."""
    needs_hopper()
    options = {"causal": False, "layout": layout} | options
    qkv = arrays("bfloat16", B=B, T=T, H=4, G=G, D=D, layout=layout)
    gates = -np.abs(np.random.default_rng(4).standard_normal(qkv[1].shape, np.float32)) / 10
    if options.pop("states", False):
        options = linear_options("states", B, T, D, G=G) | options
    if segments := options.pop("segments", 0):
        ids = np.sort(np.random.default_rng(5).integers(0, segments, (B, T)), axis=1)
        options["segment_ids"] = jnp.asarray(ids)
    if options.pop("lengths", False):
        options["kv_lengths"] = np.linspace(0, T, B).astype(int)
    options |= {"decay": jnp.asarray(gates), "implementation": None}
    explained = ato_jax.explain("linear_attention", *qkv, **options)
    assert explained.forward.backend == explained.backward.backend == "mosaic_gpu"
    check("linear_attention", *qkv, **options)


@pytest.mark.kernels("mosaic_channel_gates")
@pytest.mark.parametrize(
    ("B", "T", "D", "causal"),
    [
        (8, 2048, 48, False),
        (8, 2048, 80, False),
        (2, 5000, 192, True),
        (2, 5000, 192, False),
        (2, 9000, 128, True),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_dv_beside_channel_gates_of_mosaic_gpu_is_rounded_once(
    B: int, T: int, D: int, causal: bool
) -> None:
    """Features of either sign without a normaliser, whose roundings do not average out. If shares
    of dv are rounded, those of two walks or of two blocks of features, or if q' is rounded with
    its scale, dv is beyond nine tenths of its budget."""
    needs_hopper()
    qkv = arrays("bfloat16", B=B, T=T, H=4, G=4, D=D)
    gates = -np.abs(np.random.default_rng(4).standard_normal(qkv[1].shape, np.float32)) / 10
    options = {"feature_map": "identity", "causal": causal, "decay": jnp.asarray(gates)}
    wanted = numerics.oracle("linear_attention", *qkv, **options)
    cotangents = wanted.cotangents
    found = numerics.run("linear_attention", "mosaic_gpu", *qkv, cotangents=cotangents, **options)
    dv = numerics.compare(found, wanted)["dv"]
    assert dv.error < 0.9 * numerics.budget("dv", "bfloat16"), str(dv)


@pytest.mark.kernels("mosaic_channel_gates", "channel_gates")
@pytest.mark.parametrize(
    ("B", "T", "D", "layout", "strength", "options"),
    [
        (1, LONG, 128, "bthd", 0.1, {}),
        (4, 4096, 64, "bhtd", 0.5, {"states": True}),
        (2, 5000, 192, "bthd", 0.01, {"scale": 30.0}),
        (2, 5001, 128, "bthd", 0.1, {"segments": 40, "scale": 0.01}),
        (2, 3000, 96, "bthd", 3.0, {"causal": False}),
        (2, 3000, 64, "bhtd", 0.1, {"feature_map": "identity", "normalize": False}),
    ],
)
@pytest.mark.usefixtures("linear_time_oracle")
def test_channel_gates_in_float16_of_mosaic_gpu(
    B: int, T: int, D: int, layout: str, strength: float, options: dict[str, Any]
) -> None:
    """Forward; the gradients are XLA's. Strong gates leave a row a turn of its own."""
    needs_hopper()
    options = {"causal": True, "layout": layout} | options
    scale = options.pop("scale", 1.0)
    qkv = arrays("float16", B=B, T=T, H=4, G=4, D=D, layout=layout, scale=scale)
    gates = -np.abs(np.random.default_rng(4).standard_normal(qkv[1].shape, np.float32))
    if options.pop("states", False):
        options |= linear_options("states", B, T, D, G=4)
    if segments := options.pop("segments", 0):
        ids = np.sort(np.random.default_rng(5).integers(0, segments, (B, T)), axis=1)
        options["segment_ids"] = jnp.asarray(ids)
    options["decay"] = jnp.asarray(gates * strength)
    wanted = numerics.oracle("linear_attention", *qkv, **options)
    here = device.describe(jax.devices()[0])
    found = numerics.run_backends("mosaic_gpu", "xla", wanted, device=here)
    if scale > 1:  # docs/numerics.md has dq's worst row, which is XLA's
        numerics.check("out", found["out"], wanted.exact["out"], dtype="float16")
    else:
        numerics.compare(found, wanted)


@of_mosaic_gpu
@pytest.mark.parametrize("causal, D", [*BY_SIZE, (True, 96)])
def test_transforms_of_mosaic_gpu(causal: bool, D: int) -> None:
    """The same bits again, and on a mesh; under `vmap` pieces may be others."""
    needs_hopper()
    qkv = arrays("bfloat16", B=4, T=3000, H=4, G=4, D=D)

    def both(*qkv: jax.Array) -> Any:
        attend = functools.partial(
            ato_jax.linear_attention, causal=causal, implementation="mosaic_gpu"
        )
        out, pull = jax.vjp(attend, *qkv)
        return out, *pull(out)

    def alike(found: Any, most: float = 0.0) -> None:
        for one, other in zip(found, wanted, strict=True):
            one, other = (np.asarray(x, np.float32).reshape(qkv[0].shape) for x in (one, other))
            assert np.linalg.norm(one - other) <= most * np.linalg.norm(other)

    wanted = jax.jit(both)(*qkv)
    alike(both(*qkv))
    alike(jax.jit(jax.vmap(both))(*(array[:, None] for array in qkv)), 5e-3)
    in_pairs = (array.reshape(2, 2, 1, *array.shape[1:]) for array in qkv)
    alike(jax.jit(jax.vmap(jax.vmap(both)))(*in_pairs), 5e-3)
    axes = jax.sharding.PartitionSpec(None, None, "heads")
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    alike(jax.jit(jax.shard_map(both, mesh=mesh, in_specs=axes, out_specs=axes))(*qkv))


def linear_options(
    name: str, B: int, T: int, D: int, G: int = 2, V: int | None = None
) -> dict[str, Any]:
    """Options of linear attention by the name of a case."""
    generator = np.random.default_rng(3)

    def gates(*shape: int) -> jax.Array:
        """Mild ones, with some steep ones and zeros among them."""
        found = -np.abs(generator.standard_normal(shape, np.float32)) * 0.1
        found[generator.random(shape) < 0.02] = -50
        found[generator.random(shape) < 0.1] = 0
        return jnp.asarray(found)

    ids = np.sort(generator.integers(0, 5, (B, T)), axis=1)
    lengths = jnp.asarray(generator.integers(T // 2, T + 1, B), jnp.int32)
    state = ato_jax.LinearState(
        jnp.asarray(generator.standard_normal((B, G, D, V or D), np.float32)),
        jnp.asarray(np.abs(generator.standard_normal((B, G, D), np.float32)) + 1),
    )
    cases: dict[str, dict[str, Any]] = {
        "head": {"decay": -jnp.asarray(np.linspace(0.001, 0.1, G), jnp.float32), "causal": True},
        "step": {"decay": gates(B, T, G), "causal": True},
        "mild": {"decay": jnp.maximum(gates(B, T, G), -0.5), "causal": True},
        "channel": {"decay": gates(B, T, G, D), "causal": True},
        "step, both ways": {"decay": gates(B, T, G)},
        "segments": {"segment_ids": jnp.asarray(ids)},
        "segments, causal": {"segment_ids": jnp.asarray(ids), "causal": True},
        "lengths": {"kv_lengths": lengths},
        "lengths, causal": {"kv_lengths": lengths, "causal": True},
        "states": {"initial_state": state, "return_state": True, "causal": True},
        "all": {
            "decay": gates(B, T, G),
            "segment_ids": jnp.asarray(ids),
            "kv_lengths": lengths,
            "initial_state": state,
            "return_state": True,
            "causal": True,
        },
        "favor": {"feature_map": ato_jax.favor(jax.random.key(0), D, D), "causal": True},
    }
    return cases[name]


OPTIONS = (
    *("head", "step", "channel", "step, both ways", "segments", "segments, causal", "lengths"),
    *("lengths, causal", "states", "all", "favor"),
)


@of_linear_attention
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("dtype", "D"), [("bfloat16", 128), ("float16", 64), ("float32", 64)])
def test_options_of_linear_attention(name: str, dtype: str, D: int) -> None:
    check("linear_attention", *arrays(dtype, T=700, D=D), **linear_options(name, 2, 700, D))


@of_linear_attention
@pytest.mark.parametrize("name", ["step", "channel", "lengths, causal", "all"])
@pytest.mark.usefixtures("linear_time_oracle")
def test_options_over_a_long_sequence(name: str) -> None:
    qkv = arrays("bfloat16", B=1, T=LONG, H=2, G=1, D=64)
    check("linear_attention", *qkv, **linear_options(name, 1, LONG, 64, G=1))


def long_decay(kind: str, T: int, G: int, D: int) -> jax.Array:
    """From weak to strong, by heads; those of steps and channels differ from step to step."""
    of_heads = np.geomspace(0.01, 4.0, G).astype(np.float32)
    if kind == "head":
        return jnp.asarray(-of_heads)
    generator = np.random.default_rng(6)
    shape = (1, T, G) if kind == "step" else (1, T, G, D)
    found = -np.abs(generator.standard_normal(shape, np.float32))
    found *= of_heads if kind == "step" else of_heads[:, None]
    found[generator.random(shape) < 1e-3] = -50
    return jnp.asarray(found)


LONG_DECAYS = [(kind, states) for kind in ("head", "step", "channel") for states in (False, True)]


@of_linear_attention
@pytest.mark.parametrize("feature_map", ["elu1", "identity"])
@pytest.mark.parametrize(("dtype", "D"), [("bfloat16", 64), ("bfloat16", 128), ("float16", 64)])
@pytest.mark.parametrize(("kind", "states"), LONG_DECAYS)
@pytest.mark.usefixtures("linear_time_oracle")
def test_decays_over_a_long_sequence(
    kind: str,
    states: bool,
    dtype: str,
    D: int,
    feature_map: str,
) -> None:
    """With and without the cotangent of a returned state."""
    qkv = arrays(dtype, B=1, T=LONG, H=2, G=2, D=D)
    options = {"decay": long_decay(kind, LONG, 2, D), "feature_map": feature_map}
    check("linear_attention", *qkv, causal=True, return_state=states, **options)


@of_linear_attention
@pytest.mark.parametrize(("kind", "states"), LONG_DECAYS)
@pytest.mark.usefixtures("linear_time_oracle")
def test_decays_over_a_long_sequence_in_float32(kind: str, states: bool) -> None:
    qkv = arrays("float32", B=1, T=LONG, H=2, G=2, D=32)
    options = {"decay": long_decay(kind, LONG, 2, 32), "feature_map": "identity"}
    check("linear_attention", *qkv, causal=True, return_state=states, **options)


@pytest.mark.kernels("mosaic_gpu", "mosaic_channel_gates")
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("kind", "states"), LONG_DECAYS)
@pytest.mark.usefixtures("linear_time_oracle")
def test_decays_of_mosaic_gpu_over_a_long_sequence(
    kind: str, states: bool, D: int, normalize: bool
) -> None:
    needs_hopper()
    qkv = arrays("bfloat16", B=1, T=LONG, H=2, G=2, D=D)
    options = {"decay": long_decay(kind, LONG, 2, D), "causal": True, "return_state": states}
    options |= {"normalize": normalize, "implementation": None}
    explained = ato_jax.explain("linear_attention", *qkv, **options)
    assert explained.forward.backend == "mosaic_gpu"
    check("linear_attention", *qkv, **options)


def attention_options(name: str, B: int, T: int, H: int = 4) -> dict[str, Any]:
    """Options of softmax attention by the name of a case; bias and mask by the axes they have."""
    generator = np.random.default_rng(3)

    def plane(axes: str, mask: bool = False) -> jax.Array:
        sizes = {"B": B, "H": H, "T": T, "S": T}
        shape = [size if axis in axes else 1 for axis, size in sizes.items()]
        if mask:
            return jnp.asarray(generator.random(shape) < 0.7)
        bias = generator.standard_normal(shape, np.float32)
        bias[generator.random(shape) < 0.1] = -np.inf
        return jnp.asarray(bias)

    if name.startswith(("bias ", "mask ")):
        kind, axes = name.split()
        return {kind: plane(axes, kind == "mask"), "return_lse": True}
    ids = jnp.asarray(np.sort(generator.integers(0, 5, (B, T)), axis=1))
    unsorted = jnp.asarray((np.asarray(ids) * 3 + 4) % 5)
    lengths = jnp.asarray(generator.integers(0, T + 1, B), jnp.int32)
    kv_lengths = jnp.asarray(generator.integers(T // 2, T + 1, B), jnp.int32)
    dropout = {"dropout_rate": 0.2, "dropout_key": jax.random.key(1)}
    cases: dict[str, dict[str, Any]] = {
        "window": {"window": (100, 30)},
        "softcap": {"softcap": 3.0, "causal": True},
        "segments": {"segment_ids": ids},
        "segments, causal": {"segment_ids": ids, "causal": True, "return_lse": True},
        "segments, unsorted": {"segment_ids": unsorted, "causal": True},
        "lengths": {"kv_lengths": lengths},
        "lengths, causal": {"kv_lengths": lengths, "causal": True, "window": (200, None)},
        "lengths of both": {"q_lengths": lengths, "kv_lengths": kv_lengths, "return_lse": True},
        "offsets": {"query_offset": lengths - T // 2, "causal": True, "return_lse": True},
        "sinks": {"sinks": jnp.linspace(-2, 3, H), "causal": True, "return_lse": True},
        "dropout": {**dropout, "causal": True},
        "all": {
            **dropout,
            "bias": plane("HTS"),
            "mask": plane("BS", mask=True),
            "q_segment_ids": ids,
            "kv_segment_ids": ids,
            "q_lengths": kv_lengths,
            "kv_lengths": kv_lengths[::-1],
            "query_offset": lengths - T // 2,
            "window": (T // 2, 40),
            "sinks": jnp.linspace(-2, 3, H),
            "softcap": 5.0,
            "return_lse": True,
        },
    }
    return cases[name]


PLANES = ("bias BHTS", "bias TS", "bias BS", "bias HT", "bias H", "mask BHTS", "mask BS", "mask TS")
ATTENTION_OPTIONS = (
    *("window", "softcap", "segments", "segments, causal", "segments, unsorted", "lengths"),
    *("lengths, causal", "lengths of both", "offsets", "sinks", "dropout", "all"),
)


@of_attention
@pytest.mark.parametrize("name", (*PLANES, *ATTENTION_OPTIONS))
def test_options_of_attention(name: str) -> None:
    check("attention", *arrays("bfloat16", T=700, D=128), **attention_options(name, 2, 700))


@of_attention
@pytest.mark.parametrize("name", ["bias TS", "bias BS", "sinks", "lengths of both", "all"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_options_of_attention_by_dtype(name: str, dtype: str) -> None:
    check("attention", *arrays(dtype, T=700, D=64), **attention_options(name, 2, 700))


@of_attention
@pytest.mark.parametrize("name", ["all", "bias TS"])
@pytest.mark.parametrize("D", [64, 192, 256, 512])
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_options_of_attention_by_width(name: str, D: int, layout: str) -> None:
    qkv = arrays("bfloat16", T=300, D=D, layout=layout)
    check("attention", *qkv, layout=layout, **attention_options(name, 2, 300))


@of_attention
@pytest.mark.parametrize("name", ["segments, causal", "lengths, causal", "bias BS", "dropout"])
@pytest.mark.usefixtures("linear_time_oracle")
def test_options_of_attention_over_a_long_sequence(name: str) -> None:
    qkv = arrays("bfloat16", T=8192, H=2, G=1)
    check("attention", *qkv, **attention_options(name, 2, 8192, H=2))


@of_attention
@pytest.mark.parametrize("D", [16, 64, 96, 128, 256, 512])
def test_queries_of_one_key_at_scores_of_20_000(D: int) -> None:
    """Their weight is 1, whichever factor is first in the product of a score."""
    own = jnp.broadcast_to(jnp.arange(256), (2, 256))
    qkv = arrays("float32", T=256, D=D, scale=30.0)
    check("attention", *qkv, scale=20 * D**-0.5, q_segment_ids=own, kv_segment_ids=own)


# In float32, where a backward needs no more of it, few queries are forwarded by decoding's kernel.
@of_attention_and_decoding
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "S"), [(1, 20_000), (16, 9000), (9000, 20)])
def test_few_queries_or_keys_are_shared_among_programs(dtype: str, T: int, S: int) -> None:
    sinks = jnp.linspace(-2, 3, 4)
    check("attention", *arrays(dtype, B=1, T=T, S=S), sinks=sinks, return_lse=True)


@of_attention
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("D", "V"), [(96, 96), (192, 192), (64, 512), (512, 512)])
def test_large_heads_of_attention(dtype: str, D: int, V: int, causal: bool) -> None:
    check("attention", *arrays(dtype, T=300, D=D, V=V), causal=causal, return_lse=True)


@of_attention
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (99, None)}])
@pytest.mark.parametrize(("T", "D"), [(1100, 64), (1100, 128), (300, 256)])
def test_cudnn(T: int, D: int, options: dict[str, Any]) -> None:
    check("attention", *arrays("bfloat16", T=T, D=D), implementation="cudnn", **options)


@of_attention
def test_cudnn_across() -> None:
    check("attention", *arrays("bfloat16", T=100, S=1026), implementation="cudnn")


@of_attention
def test_dropout_is_the_same_on_every_backend() -> None:
    qkv = arrays("float32", T=300)
    options = attention_options("dropout", 2, 300)
    found, wanted = (
        ato_jax.attention(*qkv, implementation=name, **options) for name in ("triton", "xla")
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def check_few(
    out: jax.Array, lse: jax.Array, q: Any, k: Any, v: Any, lengths: Any, dtype: str, **options: Any
) -> None:
    """The newest queries' out and lse against the reference in float32."""
    wanted = ato_jax.attention(
        *(array.astype(jnp.float32) for array in (q, k, v)),
        causal=True,
        query_offset=jnp.asarray(lengths - q.shape[1]),
        kv_lengths=jnp.asarray(lengths),
        return_lse=True,
        implementation="reference",
        **options,
    )
    assert out.dtype == dtype
    hidden = wanted[1] == -jnp.inf
    np.testing.assert_array_equal(lse == -jnp.inf, hidden)
    numerics.check("out", out, wanted[0], dtype=dtype)
    numerics.check("lse", *(jnp.where(hidden, 0, one) for one in (lse, wanted[1])), dtype=dtype)


@of_decoding
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "H", "D", "page", "options"),
    [
        (1, 8, 128, 16, {}),
        (4, 8, 64, 64, {"window": (900, 0)}),
        (16, 16, 128, 16, {"softcap": 5.0, "sinks": jnp.linspace(-1, 1, 16)}),
        (2, 8, 80, 48, {"sinks": jnp.linspace(-1, 1, 8), "window": (0, 0)}),
        (1, 8, 512, 16, {}),
    ],
    ids=["one query", "window", "tiles of rows", "itself alone", "wide"],
)
def test_paged_decoding(
    dtype: str, T: int, H: int, D: int, page: int, options: dict[str, Any]
) -> None:
    """Ragged, pages in a random order, NaN in what is not used."""
    B, pages = 4, 320
    S = pages * page
    lengths = np.array([S, 1, 0, S // 2 + 3])
    q, k, v = arrays(dtype, B=B, T=T, S=S, H=H, D=D)
    unused = (np.arange(S) >= lengths[:, None])[..., None, None]
    order = np.random.default_rng(0).permutation(B * pages)
    where = np.argsort(order)  # the page that holds the n-th of the contiguous ones

    def in_pages(array: jax.Array) -> jax.Array:
        array = jnp.where(unused, jnp.nan, array).astype(dtype)
        return array.reshape(B * pages, page, *array.shape[2:])[order]

    table = jnp.asarray(where.reshape(B, pages), jnp.int32)
    out, lse = ato_jax.decode_attention(
        *(q, in_pages(k), in_pages(v), table, jnp.asarray(lengths)),
        return_lse=True,
        implementation="triton",
        **options,
    )
    check_few(out, lse, q, k, v, lengths, dtype, **options)


def eight_bits(array: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Rows in 8 bits and the factor of each."""
    most = 127 if dtype == "int8" else 448
    scales = jnp.max(jnp.abs(array.astype(jnp.float32)), axis=-1) / most
    rows = array / scales[..., None]
    return (jnp.round(rows) if dtype == "int8" else rows).astype(dtype), scales


@of_decoding
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("cached", "T", "H", "G", "D", "V", "options"),
    [
        (None, 1, 32, 8, 128, 128, {}),
        (None, 4, 8, 2, 96, 64, {"window": (3000, 0), "sinks": jnp.linspace(-1, 1, 8)}),
        (None, 1, 128, 1, 576, 512, {"value_dim": 512}),
        (None, 2, 16, 1, 576, 512, {"value_dim": 512, "softcap": 5.0}),
        (None, 3, 8, 2, 96, 40, {"value_dim": 40}),
        ("int8", 1, 32, 8, 128, 128, {}),
        ("float8_e4m3fn", 3, 8, 2, 64, 128, {"window": (0, 0)}),
        ("float8_e4m3fn", 1, 128, 1, 576, 512, {"value_dim": 512}),
        ("int8", 16, 8, 1, 256, 256, {}),
    ],
)
@pytest.mark.parametrize("page", [None, 16])
def test_caches_of_every_form(
    dtype: str, cached: str | None, page: int | None, T: int, H: int, G: int, D: int, V: int,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Contiguous and in pages, ragged; values in the keys; 8 bits."""
    B, S = 4, 8208
    if cached == "float8_e4m3fn" and (device.of_call(()).capability or (0, 0)) < (8, 9):
        pytest.skip("this card has no float8")
    lengths = np.array([S, 1, 0, 4099])
    shared = "value_dim" in options
    q, k, v = arrays(dtype, B=B, T=T, S=S, H=H, G=G, D=D, V=V)
    cache = {"k_pages": k} if shared else {"k_pages": k, "v_pages": v}
    exact = cache
    if cached:
        found = {name: eight_bits(array, cached) for name, array in cache.items()}
        cache = {name: rows for name, (rows, _) in found.items()}
        scales = {name: scales for name, (_, scales) in found.items()}
        exact = {name: cache[name].astype(jnp.float32) * scales[name][..., None] for name in cache}
        cache |= {name.replace("_", "_scale_"): one for name, one in scales.items()}
    if page is not None:
        order = np.random.default_rng(0).permutation(B * S // page)
        cache = {
            name: array.reshape(-1, page, *array.shape[2:])[order] for name, array in cache.items()
        } | {"page_table": jnp.asarray(np.argsort(order).reshape(B, -1), jnp.int32)}
    cache["lengths"] = jnp.asarray(lengths)
    out, lse = ato_jax.decode_attention(
        q, **cache, return_lse=True, implementation="triton", **options
    )
    k = exact["k_pages"].astype(jnp.float32)
    v = k[..., :V] if shared else exact["v_pages"].astype(jnp.float32)
    options = {name: option for name, option in options.items() if name != "value_dim"}
    check_few(out, lse, q, k, v, lengths, dtype, **options)


@of_attention_and_decoding
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "layout", "options"),
    [
        (1, "bthd", {"causal": True, "return_lse": True, "sinks": jnp.linspace(-1, 1, 8)}),
        (16, "bhtd", {"window": (700, 5), "query_offset": jnp.array([90, 8200])}),
        (5, "bthd", {"kv_lengths": np.array([8201, 77]), "q_lengths": np.array([5, 2])}),
    ],
    ids=["one", "window", "lengths"],
)
def test_few_queries(dtype: str, T: int, layout: str, options: dict[str, Any]) -> None:
    """The paged kernel forward, and gradients."""
    qkv = arrays(dtype, T=T, S=8201, H=8, D=128, layout=layout)
    options = options | {"layout": layout}
    explained = ato_jax.explain("attention", *qkv, implementation="triton", **options)
    assert explained.forward.kernel == "triton.paged"
    wanted = numerics.oracle("attention", *qkv, **options)
    found = ato_jax.attention(*qkv, implementation="triton", **options)
    out = found[0] if isinstance(found, tuple) else found
    numerics.check("out", out, wanted.exact["out"], dtype=dtype)
    check("attention", *qkv, **options)


@of_decoding
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_generation_equals_the_full_pass(dtype: str) -> None:
    """From a PagedCache that grows token by token, forks, frees and is defragmented on the way."""
    B, prompt, T, H, G, D = 4, 100, 140, 8, 2, 128
    q, k, v = arrays(dtype, B=B, T=T, H=H, G=G, D=D)
    cache = ato_jax.PagedCache.empty(
        B + 1, 160, num_pages=60, page_size=16, num_kv_heads=G, head_dim=D, dtype=dtype
    )
    for _ in range(B):
        cache, _ = cache.allocate()
    slots = jnp.arange(B)
    cache, fits = cache.append(k[:, :prompt], v[:, :prompt], slots=slots)
    assert fits

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache: Any, q: Any, k: Any, v: Any) -> Any:
        cache, fits = cache.append(k, v, slots=slots)
        out = ato_jax.decode_attention(
            jnp.pad(q, ((0, 1), (0, 0), (0, 0), (0, 0))),
            *(cache.k_pages, cache.v_pages, cache.page_table, cache.lengths),
            implementation="triton",
        )
        return cache, out[:B], fits

    outs = []
    for t in range(prompt, T):
        if t == prompt + 9:
            cache, branch = cache.fork(0)
        if t == prompt + 15:
            cache = cache.free(branch)
            cache = cache.defragment()
        cache, out, fits = step(cache, *(array[:, t : t + 1] for array in (q, k, v)))
        assert fits
        outs.append(out)
    wanted = ato_jax.attention(
        *(array.astype(jnp.float32) for array in (q, k, v)), causal=True, implementation="reference"
    )
    numerics.check("out", jnp.concatenate(outs, 1), wanted[:, prompt:], dtype=dtype)


@of_linear_attention
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("D", "V"), [(192, 192), (256, 256), (64, 512)])
def test_large_heads_of_linear_attention(dtype: str, D: int, V: int, causal: bool) -> None:
    check("linear_attention", *arrays(dtype, T=300, D=D, V=V), causal=causal)


@of_linear_attention
@pytest.mark.parametrize(("D", "V"), [(96, 256), (128, 200), (64, 144)])
def test_wide_values_that_see_both_sides_through_a_decay(D: int, V: int) -> None:
    """States are multiplied in parts, by tiles of their own."""
    qkv = arrays("bfloat16", T=384, D=D, V=V)
    decay = -0.1 * jnp.ones(qkv[1].shape[:3], jnp.float32)
    check("linear_attention", *qkv, decay=decay, normalize=False, feature_map="relu")


@of_linear_attention
@pytest.mark.parametrize("scale", [0.05, 1.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "D", "V"), [("bfloat16", 512, 512), ("float16", 320, 272), ("float16", 155, 147)]
)
def test_states_above_256_columns_by_products(
    dtype: str, D: int, V: int, causal: bool, scale: float
) -> None:
    qkv = arrays(dtype, B=1, T=1100, D=D, V=V, scale=scale)
    check("linear_attention", *qkv, causal=causal, implementation="xla.products")


BY_PRODUCTS = [
    ("float16", 155, None),
    ("float32", 155, "tf32"),
    ("float32", 99, "highest"),
    ("bfloat16", 272, None),
]


@of_linear_attention
@pytest.mark.parametrize(
    ("dtype", "D", "precision"), [one for one in BY_PRODUCTS if one[2] != "highest"]
)
def test_causal_products(dtype: str, D: int, precision: str | None) -> None:
    qkv = arrays(dtype, B=2, T=1100, H=4, G=4, D=D, V=147)
    options = {"causal": True, "precision": precision, "implementation": "xla.products"}
    check("linear_attention", *qkv, **options)


@of_linear_attention
@pytest.mark.parametrize("name", ["head", "step", "segments"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dtype", "D", "precision"), BY_PRODUCTS)
def test_products_with_decays_and_segments(
    dtype: str, D: int, precision: str | None, name: str, causal: bool
) -> None:
    B, T, G = 2, 1100, 4
    options = linear_options(name, B, T, D, G, V=147)
    qkv = arrays(dtype, B=B, T=T, H=G, G=G, D=D, V=147)
    options |= {"causal": causal, "precision": precision, "implementation": "xla.products"}
    check("linear_attention", *qkv, **options)


@of_linear_attention
@pytest.mark.usefixtures("linear_time_oracle")
@pytest.mark.parametrize("least", [-1.0, -6.0, -50.0])
@pytest.mark.parametrize(
    ("dtype", "D", "precision", "causal"),
    [
        ("float32", 160, "highest", True),
        ("float32", 99, "tf32", True),
        ("float16", 272, None, False),
        ("bfloat16", 48, None, False),
    ],
)
def test_products_with_a_decay_per_channel(
    dtype: str, D: int, precision: str | None, causal: bool, least: float
) -> None:
    """Each form of the pairs: whole chunks, blocks of 16 rows, and levels down to single rows."""
    B, T, G = 2, 1100, 2
    decay = linear_options("channel", B, T, D, G)["decay"]
    decay = jnp.maximum(jnp.where(decay < -49, decay, decay * 20), least)
    options = {"decay": decay, "causal": causal, "precision": precision}
    qkv = arrays(dtype, B=B, T=T, H=4, G=G, D=D, V=147)
    check("linear_attention", *qkv, **options, implementation="xla.products")


@of_linear_attention
@pytest.mark.parametrize("decay", [None, "head", "step", "channel"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_steps_equal_the_causal_pass(dtype: str, decay: str | None) -> None:
    B, T, G, D = 2, 5, 2, 128
    q, k, v = arrays(dtype, B=B, T=T, D=D)
    gates = None if decay is None else linear_options(decay, B, T, D)["decay"]
    wanted = ato_jax.linear_attention(
        *(x.astype(jnp.float32) for x in (q, k, v)),
        decay=gates,
        causal=True,
        implementation="reference",
    )
    step = jax.jit(ato_jax.linear_attention_step, donate_argnums=3)
    state = ato_jax.LinearState(jnp.zeros((B, G, D, D)), jnp.zeros((B, G, D)))
    for t in range(T):
        gate = gates if decay in (None, "head") else gates[:, t]
        out, state = step(q[:, t], k[:, t], v[:, t], state, decay=gate)
        error = jnp.linalg.norm(out - wanted[:, t]) / jnp.linalg.norm(wanted[:, t])
        assert error <= {"bfloat16": 3e-3, "float16": 6e-4, "float32": 2e-6}[dtype]


@of_attention
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.usefixtures("linear_time_oracle")
def test_attention_over_a_long_sequence(dtype: str) -> None:
    check("attention", *arrays(dtype, B=1, T=LONG, H=1, G=1, D=64), causal=True)


@pytest.mark.parametrize(("op", "D"), OPS_AND_SIZES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_runs_give_the_same_bits(op: str, D: int, causal: bool, dtype: str) -> None:
    qkv = arrays(dtype, T=2000, D=D)
    cotangents = arrays(dtype, T=2000, D=D, seed=1)[0]
    first, second = (
        numerics.run(op, "triton", *qkv, cotangents=cotangents, causal=causal) for _ in range(2)
    )
    for name, array in first.items():
        assert array.tobytes() == second[name].tobytes(), name


@of_attention
@pytest.mark.parametrize("name", ["all", "bias BS", "segments, causal"])
def test_options_give_the_same_bits_twice(name: str) -> None:
    qkv, options = arrays("bfloat16", T=2000), attention_options(name, 2, 2000)
    cotangents = numerics.oracle("attention", *qkv, **options).cotangents
    first, second = (
        numerics.run("attention", "triton", *qkv, cotangents=cotangents, **options)
        for _ in range(2)
    )
    for key, array in first.items():
        assert array.tobytes() == second[key].tobytes(), key


@pytest.mark.parametrize(
    ("op", "dtype", "T", "options"),
    [
        ("linear_attention", "bfloat16", 1024, {}),
        ("attention", "bfloat16", 1024, {}),
        ("attention", "bfloat16", 1000, {}),
        ("attention", "bfloat16", 1024, {"kv_lengths": np.array([1000, 1024])}),
    ],
)
def test_without_a_name_the_fastest_is_chosen(
    op: str, dtype: str, T: int, options: dict[str, Any]
) -> None:
    function, qkv = getattr(ato_jax, op), arrays(dtype, T=T)
    hopper = device.describe(jax.devices()[0]).architecture == "sm_90"
    wanted = "mosaic_gpu" if hopper and op == "attention" else "triton"
    explanation = ato_jax.explain(function, *qkv, **options)
    assert (explanation.forward.backend, explanation.backward.backend) == (wanted, wanted)
    chosen, named = (function(*qkv, implementation=name, **options) for name in (None, wanted))
    assert chosen.tobytes() == named.tobytes()


def check_delta_rule_twice(*qkv: jax.Array, **options: Any) -> None:
    """Both passes on Hopper's kernels beside the float64 reference, twice the same bits."""
    wanted = numerics.oracle("gated_delta_rule", *qkv, **options)
    found, again = (
        numerics.run(
            "gated_delta_rule", "mosaic_gpu", *qkv, cotangents=wanted.cotangents, **options
        )
        for _ in range(2)
    )
    assert found.keys() == again.keys() == wanted.exact.keys()
    assert all(jnp.array_equal(found[name], again[name]) for name in found)
    numerics.compare(found, wanted)


@of_mosaic_delta_rule
@pytest.mark.parametrize(
    ("T", "D", "V", "H", "decay", "strongest", "layout", "normalize_qk"),
    [
        (1100, 64, 64, 2, None, 0.0, "bthd", False),
        (1037, 128, 128, 4, "step", 0.1, "bthd", True),
        (4096, 128, 128, 4, "step", 50.0, "bhtd", False),
        (4096, 64, 192, 4, "step", 1.0, "bhtd", True),
        # A last chunk that is filled in part, of whole tiles.
        (1000, 128, 128, 4, "step", 0.01, "bhtd", False),
        (2048, 128, 128, 128, "step", 0.01, "bthd", False),  # two slices of v in a block
        (LONG, 64, 64, 2, "step", 0.1, "bthd", True),
        # Marked, since "channel" alone names linear attention's gates to the receipt.
        pytest.param(1037, 128, 128, 4, "channel", 50.0, "bthd", True, marks=of_mosaic_delta_rule),
        pytest.param(4096, 64, 192, 4, "channel", 0.01, "bhtd", False, marks=of_mosaic_delta_rule),
        pytest.param(2048, 128, 128, 64, "channel", 1.0, "bthd", False, marks=of_mosaic_delta_rule),
        # In 16 pieces, whose maps are walked by blocks of two slices, and in 4, by blocks of one.
        pytest.param(LONG, 64, 64, 2, "channel", 0.1, "bthd", True, marks=of_mosaic_delta_rule),
        pytest.param(
            LONG - 36, 128, 128, 2, "channel", 0.01, "bhtd", False, marks=of_mosaic_delta_rule
        ),
        pytest.param(4096, 128, 64, 2, "channel", 0.01, "bthd", True, marks=of_mosaic_delta_rule),
    ],
)
def test_the_delta_rule_by_mosaic_gpu(
    T: int,
    D: int,
    V: int,
    H: int,
    decay: str | None,
    strongest: float,
    layout: str,
    normalize_qk: bool,
) -> None:
    """Both passes, twice the same bits."""
    needs_hopper()
    generator = np.random.default_rng(7)
    q, k, _ = arrays("float32", B=1, T=T, H=H // 2, G=H // 2, D=D, layout=layout)
    *_, v = arrays("float32", B=1, T=T, H=H, G=H, D=D, V=V, layout=layout, seed=1)
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    qkv = [array.astype(jnp.bfloat16) for array in (q, k, v)]
    shape = v.shape[:3]
    options: dict[str, Any] = {
        "beta": jnp.asarray(generator.uniform(0, 2, shape), jnp.float32),
        "initial_state": jnp.asarray(generator.normal(size=(1, H, D, V)), jnp.float32),
        "normalize_qk": normalize_qk,
        "return_state": True,
        "layout": layout,
    }
    if decay is not None:
        of_steps = (*shape, D) if decay == "channel" else shape
        options["decay"] = -jnp.asarray(strongest * generator.random(of_steps) ** 3, jnp.float32)
    check_delta_rule_twice(*qkv, **options)


@of_mosaic_delta_rule
@pytest.mark.parametrize(
    ("T", "D", "V", "decay", "longest", "padded"),
    [
        (2048, 128, 128, "step", 500, False),
        (2048, 128, 128, "", 500, True),
        # Segments of up to 9 steps, so that several start in each chunk of 64.
        (2000, 64, 64, "step", 9, False),
        (2000, 64, 64, "per channel", 9, True),
        (4096, 128, 128, "per channel", 1000, False),
        (1100, 96, 80, "step", 200, True),
        (LONG, 64, 64, "step", 3000, False),
    ],
)
def test_segments_and_lengths_of_the_delta_rule_by_mosaic_gpu(
    T: int, D: int, V: int, decay: str, longest: int, padded: bool
) -> None:
    """Segments of 1 to `longest` steps, in two rows; twice the same bits."""
    needs_hopper()
    generator = np.random.default_rng(11)
    q, k, _ = arrays("float32", B=2, T=T, H=1, G=1, D=D)
    *_, v = arrays("float32", B=2, T=T, H=2, G=2, D=D, V=V, seed=1)
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    qkv = [array.astype(jnp.bfloat16) for array in (q, k, v)]
    starts = [np.cumsum(generator.integers(1, longest + 1, T)) for _ in range(2)]
    runs = [np.searchsorted(row, np.arange(T), side="right") for row in starts]
    options: dict[str, Any] = {
        "beta": jnp.asarray(generator.uniform(0, 2, (2, T, 2)), jnp.float32),
        "initial_state": jnp.asarray(generator.normal(size=(2, 2, D, V)), jnp.float32),
        "segment_ids": jnp.asarray(np.stack(runs) % 3),
        "normalize_qk": True,
        "return_state": True,
    }
    if padded:
        options["lengths"] = np.array([T - 70, T // 2])
    if decay:
        of_steps = (2, T, 2, D) if decay == "per channel" else (2, T, 2)
        options["decay"] = -jnp.asarray(generator.random(of_steps) ** 3, jnp.float32)
    check_delta_rule_twice(*qkv, **options)


@of_mosaic_delta_rule
@pytest.mark.parametrize(("T", "D", "decay"), [(193, 64, -0.4), (1024, 64, 0.0), (300, 128, -4.0)])
def test_the_delta_rule_where_each_step_takes_all_of_the_state(
    T: int, D: int, decay: float
) -> None:
    check_steps_that_take_all(T, D, decay, 1.0)


@of_mosaic_delta_rule
@pytest.mark.parametrize(("T", "D", "decay"), [(193, 64, -0.4), (1024, 64, 0.0), (300, 128, 0.0)])
def test_the_delta_rule_where_keys_are_equal_but_for_their_signs(
    T: int, D: int, decay: float
) -> None:
    signs = np.random.default_rng(5).choice([-1, 1], (1, T, 4, 1))
    check_steps_that_take_all(T, D, decay, signs)


def check_steps_that_take_all(T: int, D: int, decay: float, signs: Any) -> None:
    """One key, times the signs, and betas of 1: ddecay is a thousandth of its terms."""
    needs_hopper()
    qkv = arrays("float32", B=1, T=T, H=4, G=4, D=D)
    k = signs * jnp.broadcast_to(qkv[1][:, :1], qkv[1].shape)
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    qkv = [array.astype(jnp.bfloat16) for array in (qkv[0], k, qkv[2])]
    options = {"beta": jnp.ones((1, T, 4)), "decay": jnp.full((1, T, 4), decay)}
    check("gated_delta_rule", *qkv, implementation="mosaic_gpu", **options)


@of_mosaic_delta_rule
@pytest.mark.parametrize(
    ("T", "D", "strongest", "states", "by_turns"),
    [
        (300, 64, 0.1, False, False),
        (300, 128, 0.1, False, False),
        (300, 128, 1.0, False, False),
        (1000, 64, 0.0, False, False),
        (1000, 128, 0.01, True, False),
        (2000, 128, 0.01, True, True),
    ],
)
def test_the_delta_rule_where_all_keys_are_the_same(
    T: int, D: int, strongest: float, states: bool, by_turns: bool
) -> None:
    """ddecay is then a small sum of large terms, for which dr is in two parts, and what rounding
    takes from states is added. `by_turns`: in every second chunk alone."""
    needs_hopper()
    generator = np.random.default_rng(3)
    qkv = arrays("float32", B=1, T=T, H=4, G=4, D=D)
    k = jnp.broadcast_to(qkv[1][:, :1], qkv[1].shape)
    if by_turns:
        k = jnp.where((jnp.arange(T) // 64 % 2 == 0)[:, None, None], k, qkv[1])
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    qkv = [array.astype(jnp.bfloat16) for array in (qkv[0], k, qkv[2])]
    options: dict[str, Any] = {
        "beta": jnp.asarray(generator.uniform(0, 2, (1, T, 4)), jnp.float32),
        "decay": -jnp.asarray(generator.uniform(0, strongest, (1, T, 4)), jnp.float32),
    }
    if states:
        state = jnp.asarray(generator.normal(size=(1, 4, D, D)), jnp.float32)
        options |= {"initial_state": state, "return_state": True}
    check_delta_rule_twice(*qkv, **options)
