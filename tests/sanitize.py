"""Small runs of every kernel, for compute-sanitizer to watch; `planted` runs a faulty one.

    python -m tests.sanitize                    all groups
    python -m tests.sanitize "causal gates"     one of `GROUPS`
    python -m tests.sanitize planted            a kernel of Triton's with a fault
    python -m tests.sanitize "planted in mosaic_gpu"
    python -m tests.sanitize "from PyTorch"     tensors of PyTorch's, in memory of its own
    python -m tests.sanitize "from PyTorch, mosaic_gpu"
                                                the same by Mosaic GPU's kernels, on the direct road

Groups whose names begin with "mosaic_gpu" run Mosaic GPU's kernels, which need a Hopper card.

Odd sizes, so that the last block of every axis runs over the end unless it is masked; and sizes
whose columns fill their blocks, where no mask is, over several blocks of rows.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

import ato_jax
from ato_jax import mosaic
from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu

Call = tuple[Callable[..., Any], tuple[Any, ...]]

# T, S, D, V
ODD = (67, 67, 33, 17)
WHOLE_COLUMNS = (301, 301, 64, 64)
# Rows that fill half of the tallest blocks.
HALF_A_BLOCK = (192, 192, 64, 64)
GATED = (67, 67, 33, 33)


def draw(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), dtype)


def gradient(
    attend: Callable[..., jax.Array],
    dtype: str,
    sizes: tuple[int, ...],
    implementation: str = "triton",
    B: int = 1,
    G: int = 2,
    **options: Any,
) -> Call:
    """Forward and backward of an op, H = 4."""
    T, S, D, V = sizes
    arrays = {
        "q": draw(B, T, 4, D, dtype=dtype),
        "k": draw(B, S, G, D, dtype=dtype),
        "v": draw(B, S, G, V, dtype=dtype),
    }
    # What is differentiated beside them.
    arrays |= {name: options.pop(name) for name in ("decay", "bias") if name in options}

    def loss(arrays: dict[str, jax.Array]) -> jax.Array:
        out = attend(**arrays, implementation=implementation, **options)
        return out.astype(jnp.float32).sum()

    return jax.grad(loss), (arrays,)


def plain(op: Callable[..., jax.Array], causal: bool) -> Iterator[Call]:
    for dtype, sizes in (
        ("float32", ODD),
        ("float16", ODD),
        ("bfloat16", ODD),
        ("bfloat16", WHOLE_COLUMNS),
        ("bfloat16", HALF_A_BLOCK),
    ):
        yield gradient(op, dtype, sizes, causal=causal)


def large_heads() -> Iterator[Call]:
    for causal in (False, True):
        yield gradient(ato_jax.linear_attention, "bfloat16", (67, 67, 100, 100), causal=causal)
        # V in several blocks.
        yield gradient(ato_jax.linear_attention, "bfloat16", (67, 67, 150, 90), causal=causal)


def gates(causal: bool) -> Iterator[Call]:
    """One for each step; in float32 their sums are taken apart."""
    decay = -jnp.abs(draw(1, 67, 2))
    for dtype in ("float32", "bfloat16"):
        yield gradient(ato_jax.linear_attention, dtype, GATED, causal=causal, decay=decay)


def gates_of_channels() -> Iterator[Call]:
    for dtype, T in (("float32", 67), ("bfloat16", 301)):
        decay = -jnp.abs(draw(1, T, 2, 33))
        yield gradient(ato_jax.linear_attention, dtype, (T, T, 33, 33), causal=True, decay=decay)


def segments_and_lengths(causal: bool) -> Iterator[Call]:
    ids = jnp.arange(67)[None] // 30
    lengths = jnp.array([51])
    for dtype, sizes, options in (
        ("bfloat16", GATED, {"segment_ids": ids, "kv_lengths": lengths}),
        ("float32", (40, 67, 33, 33), {"q_segment_ids": ids[:, 9:49], "kv_segment_ids": ids}),
        ("bfloat16", GATED, {"q_lengths": lengths, "kv_lengths": lengths - 9}),
    ):
        yield gradient(ato_jax.linear_attention, dtype, sizes, causal=causal, **options)


def features_and_steps() -> Iterator[Call]:
    """Random features, a state that goes in, and one token."""
    state = ato_jax.LinearState(draw(1, 2, 33, 33), jnp.abs(draw(1, 2, 33)))
    with jax.default_device(jax.devices("cpu")[0]):
        favor = ato_jax.favor(jax.random.key(0), 40, 33)
    favor = jax.device_put(favor, jax.devices()[0])
    for options in ({"feature_map": favor}, {"initial_state": state}):
        yield gradient(ato_jax.linear_attention, "bfloat16", GATED, causal=True, **options)
    for dtype, decay in (("bfloat16", None), ("float32", -jnp.abs(draw(1, 2, 33)))):
        q, k, v = (draw(1, heads, 33, dtype=dtype) for heads in (4, 2, 2))
        step = functools.partial(ato_jax.linear_attention_step, decay=decay)
        yield step, (q, k, v, state)


def steps_of_the_delta_rule() -> Iterator[Call]:
    """One token; tails of rows and of columns, and a tile with fewer values than threads."""
    sizes = ("bfloat16", 33, 17, 33), ("float32", 100, 50), ("float32", 1, 3)
    for dtype, D, V, *channels in sizes:
        q, k = draw(1, 2, D, dtype=dtype), draw(1, 2, D, dtype=dtype)
        v, beta, state = draw(1, 4, V, dtype=dtype), jnp.full((1, 4), 0.5), draw(1, 4, D, V)
        decay = -jnp.abs(draw(1, 4, *channels))
        step = functools.partial(ato_jax.gated_delta_rule_step, decay=decay, normalize_qk=True)
        yield step, (q, k, v, beta, state)


def options_of_attention() -> Iterator[Call]:
    ids = jnp.arange(67)[None] // 30
    bias = draw(1, 1, 67, 67)
    for options in (
        {"bias": bias, "mask": bias > -1, "kv_lengths": jnp.array([51])},
        {"bias": bias[:, :, :1], "segment_ids": ids, "sinks": jnp.zeros(4), "causal": True},
        {"dropout_rate": 0.1, "dropout_key": jax.random.key(0), "query_offset": jnp.array([-9])},
    ):
        yield gradient(ato_jax.attention, "bfloat16", GATED, **options)


def wide_heads() -> Iterator[Call]:
    """Of several tiles and groups, and of one tile, its columns shared and not."""
    for dtype in ("float32", "float16", "bfloat16"):
        yield gradient(ato_jax.attention, dtype, (67, 131, 577, 519), causal=True)
    for B, dtype in ((1, "float32"), (1, "bfloat16"), (300, "bfloat16")):
        arrays = tuple(draw(B, rows, 1, width, dtype=dtype) for rows, width in WIDE_ROWS)
        yield _gradients_of_wide, arrays


# Of q, k and v.
WIDE_ROWS = ((13, 1500), (37, 1500), (37, 600))


def _gradients_of_wide(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    def loss(*arrays: jax.Array) -> jax.Array:
        out, lse = ato_jax.attention(*arrays, implementation="triton", return_lse=True)
        return out.astype(jnp.float32).sum() + lse.sum()

    return jax.grad(loss, (0, 1, 2))(q, k, v)


def paged_cache() -> Iterator[Call]:
    """The last page short, and numbers of pages that there are not, used and unused."""
    table = jnp.array([[2, 0, 1, 1 << 30], [4, 5, -9, 6]], jnp.int32)
    lengths = jnp.array([40, 43])
    for dtype, page, D in (("bfloat16", 16, 33), ("float32", 13, 64)):
        k, v = (draw(5, page, 2, width, dtype=dtype) for width in (D, 17))
        q = draw(2, 3, 4, D, dtype=dtype)
        attend = functools.partial(
            ato_jax.decode_attention, window=(30, 0), implementation="triton"
        )
        yield attend, (q, k, v, table, lengths)
    attend = functools.partial(ato_jax.decode_attention, implementation="triton")
    scales = jnp.ones((2, 43, 2))
    for dtype, D in (("bfloat16", 33), ("int8", 48)):
        k, v = (draw(2, 43, 2, width).astype(dtype) for width in (D, 17))
        q = draw(2, 3, 4, D, dtype="bfloat16")
        more = {"k_scale_pages": scales, "v_scale_pages": scales} if dtype == "int8" else {}
        yield functools.partial(attend, **more), (q, k, v, None, lengths)
    # Values are the first columns of the keys, which come in two slices.
    q, k = draw(2, 3, 4, 96, dtype="bfloat16"), draw(5, 16, 2, 96, dtype="bfloat16")
    yield functools.partial(attend, value_dim=33), (q, k, None, table, lengths)
    # A few queries of attention's.
    q, k, v = (draw(2, size, 2, 33, dtype="bfloat16") for size in (3, 1031, 1031))
    yield functools.partial(ato_jax.attention, implementation="triton"), (q, k, v)


by_mosaic_gpu = functools.partial(gradient, implementation="mosaic_gpu")


def attention_by_mosaic_gpu() -> Iterator[Call]:
    """Tails, whole blocks, and a persistent launch, whose blocks take several tiles."""
    for dtype, sizes, options in (
        ("bfloat16", (203, 300, 64, 64), {"causal": True}),
        ("float16", (203, 300, 128, 128), {}),
        ("bfloat16", (256, 256, 128, 128), {"causal": True, "layout": "bthd"}),
        ("bfloat16", (200, 136, 256, 80), {}),
        ("bfloat16", (260, 260, 64, 64), {"B": 40}),
    ):
        yield by_mosaic_gpu(ato_jax.attention, dtype, sizes, **options)


def options_of_attention_by_mosaic_gpu() -> Iterator[Call]:
    ids = jnp.arange(300)[None] // 70
    lengths = jnp.array([251])
    # Arrays over pairs need a number of keys that is a multiple of 64.
    bias = draw(1, 1, 200, 320)
    for dtype, sizes, options in (
        ("bfloat16", (300, 300, 64, 64), {"segment_ids": ids, "causal": True, "softcap": 5.0}),
        ("float16", (203, 300, 128, 128), {"kv_lengths": lengths, "window": (90, 20)}),
        ("bfloat16", (200, 320, 64, 64), {"bias": bias, "mask": bias[:, :, :, ::-1] > -1}),
        (
            "bfloat16",
            (203, 300, 128, 128),
            {
                "bias": draw(1, 4, 1, 300),
                "dropout_rate": 0.1,
                "dropout_key": jax.random.key(0),
                "sinks": jnp.zeros(4),
                "query_offset": jnp.array([-9]),
                "causal": True,
            },
        ),
    ):
        yield by_mosaic_gpu(ato_jax.attention, dtype, sizes, **options)


def linear_attention_by_mosaic_gpu(causal: bool) -> Iterator[Call]:
    """Tails, whole chunks, and lengths."""
    for dtype, T, D, options in (
        ("bfloat16", 300, 64 if causal else 96, {}),
        ("bfloat16", 203, 128, {"kv_lengths": jnp.array([150])}),
        ("float16", 256, 128, {}),
    ):
        options = {"causal": causal, **options}
        yield by_mosaic_gpu(ato_jax.linear_attention, dtype, (T, T, D, D), **options)


def documents_by_mosaic_gpu() -> Iterator[Call]:
    for T, D in ((300, 128), (203, 64)):
        ids = jnp.arange(T)[None] // 70
        yield by_mosaic_gpu(ato_jax.linear_attention, "bfloat16", (T, T, D, D), segment_ids=ids)


def gates_by_mosaic_gpu() -> Iterator[Call]:
    """For each step, for each step and channel, and none beside segments."""
    ids = jnp.arange(300)[None] // 70
    options: dict[str, Any]
    for T, D, options in (
        (300, 128, {"segment_ids": ids}),
        (203, 64, {"decay": -jnp.abs(draw(1, 203, 2))}),
        (203, 64, {"decay": -jnp.abs(draw(1, 203, 4, 64)), "G": 4}),
    ):
        yield by_mosaic_gpu(
            ato_jax.linear_attention, "bfloat16", (T, T, D, D), causal=True, **options
        )


def delta_rule_by_mosaic_gpu() -> Iterator[Call]:
    """G = 2 and H = 4; without a decay, with one for each step, and for each step and channel."""
    for T, D, V, decay in ((193, 64, 64, ()), (300, 128, 128, (4,)), (203, 64, 128, (4, 64))):
        keys = [draw(1, T, 2, D, dtype="bfloat16") / D**0.5 for _ in range(2)]
        arrays = dict(zip("qk", keys, strict=True))
        arrays |= {"v": draw(1, T, 4, V, dtype="bfloat16"), "beta": jnp.abs(draw(1, T, 4)) / 4}
        arrays |= {"initial_state": draw(1, 4, D, V)}
        arrays |= {"decay": -jnp.abs(draw(1, T, *decay))} if decay else {}
        yield _gradients_of_the_delta_rule, (arrays,)


def _gradients_of_the_delta_rule(arrays: dict[str, jax.Array]) -> Any:
    def loss(arrays: dict[str, jax.Array]) -> jax.Array:
        out, state = ato_jax.gated_delta_rule(
            **arrays, return_state=True, implementation="mosaic_gpu"
        )
        return out.astype(jnp.float32).sum() + state.sum()

    return jax.grad(loss)(arrays)


# Of about the same length, each in a process of its own.
GROUPS: dict[str, Callable[[], Iterator[Call]]] = {
    "attention": functools.partial(plain, ato_jax.attention, False),
    "causal attention": functools.partial(plain, ato_jax.attention, True),
    "options of attention": options_of_attention,
    "linear attention": functools.partial(plain, ato_jax.linear_attention, False),
    "causal linear attention": functools.partial(plain, ato_jax.linear_attention, True),
    "large heads": large_heads,
    "gates both ways": functools.partial(gates, False),
    "causal gates": functools.partial(gates, True),
    "gates of channels": gates_of_channels,
    "segments and lengths": functools.partial(segments_and_lengths, False),
    "causal segments and lengths": functools.partial(segments_and_lengths, True),
    "features and steps": features_and_steps,
    "paged cache": paged_cache,
    "wide heads": wide_heads,
    "steps of the delta rule": steps_of_the_delta_rule,
    "mosaic_gpu, attention": attention_by_mosaic_gpu,
    "mosaic_gpu, options of attention": options_of_attention_by_mosaic_gpu,
    "mosaic_gpu, linear attention": functools.partial(linear_attention_by_mosaic_gpu, False),
    "mosaic_gpu, causal linear attention": functools.partial(linear_attention_by_mosaic_gpu, True),
    "mosaic_gpu, documents": documents_by_mosaic_gpu,
    "mosaic_gpu, gates": gates_by_mosaic_gpu,
    "mosaic_gpu, delta rule": delta_rule_by_mosaic_gpu,
}
# Whose kernels a group runs, where these are not linear attention's.
KERNELS = {
    **dict.fromkeys(("attention", "causal attention", "options of attention"), "attention"),
    "paged cache": "decode_attention",
    "wide heads": "wide_attention",
    "gates of channels": "channel_gates",
    "steps of the delta rule": "delta_rule",
    "mosaic_gpu, attention": "mosaic_attention",
    "mosaic_gpu, options of attention": "mosaic_attention",
    "mosaic_gpu, linear attention": "mosaic_gpu",
    "mosaic_gpu, causal linear attention": "mosaic_gpu",
    "mosaic_gpu, documents": "mosaic_documents",
    "mosaic_gpu, gates": "mosaic_gpu",
    "mosaic_gpu, delta rule": "mosaic_delta_rule",
}
# The sanitizer watches kernels whose names contain `KERNEL_NAME`, but in these groups another word.
KERNEL_NAME = "attention"
KERNEL_NAMES = {"steps of the delta rule": "delta_rule", "mosaic_gpu, delta rule": "delta_rule"}


def run(name: str) -> None:
    for number, (function, arguments) in enumerate(GROUPS[name]()):
        jax.block_until_ready(jax.jit(function)(*arguments))
        print(name, number, flush=True)


def memory_of_pytorch(*shape: int) -> Any:
    """A tensor in an allocation of its own."""
    # Read when PyTorch starts.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    import torch

    return torch.randn(shape, device="cuda").bfloat16().requires_grad_()


def run_mosaic_gpu_from_pytorch() -> None:
    """Forward and backward by kernels whose tensor maps the direct road makes: at T = 1003 and
    T = 1024, out of one projection's memory, and by linear attention's. The first call goes through
    JAX, further ones direct."""
    memory = memory_of_pytorch
    calls: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("attention", [memory(1, 4, 1003, 64) for _ in range(3)], {"is_causal": True}),
        ("attention", [memory(1, 4, 1024, 128) for _ in range(3)], {}),
        (
            "attention",
            list(memory(1, 1024, 3, 4, 64).permute(2, 0, 3, 1, 4)),
            {"is_causal": True},
        ),
        ("linear_attention", [memory(1, 16, 4096, 128) for _ in range(3)], {"causal": True}),
        ("linear_attention", [memory(1, 16, 4096, 128) for _ in range(3)], {}),
    ]
    import torch

    import ato_torch

    for number, (name, tensors, options) in enumerate(calls):
        function = getattr(ato_torch, name)
        for _ in range(3):
            function(*tensors, **options).sum().backward()
            torch.cuda.synchronize()
        told = ato_torch.explain(function, *tensors, **options)
        roads = {told.forward.road, told.backward.road}
        assert roads == {"direct"} and "mosaic_gpu" in str(told), told
        print("from PyTorch, mosaic_gpu", number, flush=True)


def run_from_pytorch() -> None:
    """Forward and backward through ato_torch: in either layout, at odd starts and strides, with a
    mask, and linear attention with its state."""
    memory = memory_of_pytorch
    H, T, D = 4, 67, 33
    whole = [memory(1, H, T, D) for _ in range(3)]
    transposed = [memory(1, T, H, D).transpose(1, 2) for _ in range(3)]
    shifted = [memory(H * T * D + 1)[1:].view(1, H, T, D) for _ in range(3)]
    cut = [memory(1, H, T, D + 1)[..., 1:] for _ in range(3)]
    import torch

    import ato_torch

    bias = torch.randn(T, T, device="cuda", requires_grad=True)
    calls: list[Callable[[], Any]] = [
        *(functools.partial(ato_torch.attention, *tensors, is_causal=True)
          for tensors in (whole, transposed, shifted, cut)),
        functools.partial(ato_torch.attention, *whole, attn_mask=bias),
        functools.partial(ato_torch.linear_attention, *transposed, causal=True),
    ]  # fmt: skip
    for number, call in enumerate(calls):
        call().sum().backward()
        torch.cuda.synchronize()
        print("from PyTorch", number, flush=True)


def run_a_faulty_kernel() -> None:
    """Reads 256 MiB behind the end of its input, where nothing else can be."""

    def kernel(x_ref, out_ref):
        far = jnp.arange(16) + (1 << 26)
        plgpu.store(out_ref, plgpu.load(x_ref.at[far]))

    x = jnp.arange(16, dtype=jnp.float32)
    call = pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((16,), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=1),
        name="attention_with_a_fault",
    )
    jax.block_until_ready(call(x))


def run_a_faulty_kernel_of_mosaic_gpu() -> None:
    """Reads 256 MiB behind the end of its input, too."""
    jax.block_until_ready(faulty_kernel_of_mosaic_gpu(jnp.arange(128, dtype=jnp.float32)))


def faulty_kernel_of_mosaic_gpu(x: jax.Array) -> jax.Array:
    def body(x_ref: Any, out_ref: Any) -> None:
        far = jax.lax.axis_index("block") + (1 << 26)
        out_ref[...] = x_ref[pl.ds(far, 128)]

    found: jax.Array = mosaic.launch(
        "attention_with_a_fault_mosaic",
        mosaic.Flat(body, {}, 1),
        types.SimpleNamespace(blocks=1),
        jax.ShapeDtypeStruct((128,), jnp.float32),
        [x],
    )
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["planted"]:
        run_a_faulty_kernel()
    elif sys.argv[1:] == ["from PyTorch"]:
        run_from_pytorch()
    elif sys.argv[1:] == ["from PyTorch, mosaic_gpu"]:
        run_mosaic_gpu_from_pytorch()
    elif sys.argv[1:] == ["planted in mosaic_gpu"]:
        run_a_faulty_kernel_of_mosaic_gpu()
    else:
        for name in sys.argv[1:] or GROUPS:
            run(name)
