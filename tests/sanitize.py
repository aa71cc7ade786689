"""One small run of every kernel, for compute-sanitizer to watch; `planted` runs a faulty one.

Odd sizes, so that the last block of every axis runs over the end unless it is masked.
"""

from __future__ import annotations

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

import ato_jax


def run_every_kernel() -> None:
    generator = np.random.default_rng(0)

    def draw(*shape: int, dtype: str) -> jax.Array:
        return jnp.asarray(generator.standard_normal(shape), dtype)

    for op, causal, dtype, (T, S, D, V) in itertools.product(
        (ato_jax.linear_attention, ato_jax.attention),
        (False, True),
        ("float32", "bfloat16"),
        ((67, 67, 33, 17), (301, 301, 64, 64)),
    ):
        q = draw(1, T, 4, D, dtype=dtype)
        k, v = draw(1, S, 2, D, dtype=dtype), draw(1, S, 2, V, dtype=dtype)

        def loss(q, k, v, op=op, causal=causal):
            return op(q, k, v, causal=causal, implementation="triton").astype(jnp.float32).sum()

        jax.block_until_ready(jax.grad(loss, (0, 1, 2))(q, k, v))
        print(op.__name__, causal, dtype, (T, S, D, V), flush=True)

    q, k, v = (draw(1, 67, heads, 33, dtype="bfloat16") for heads in (4, 2, 2))
    gates = -jnp.abs(draw(1, 67, 2, 33, dtype="float32"))
    ids = jnp.arange(67)[None] // 30
    for options in (
        {"causal": True, "decay": gates[..., 0]},
        {"causal": True, "decay": gates},
        {"decay": gates[..., 0]},
        {"segment_ids": ids, "kv_lengths": jnp.array([51])},
        {"causal": True, "segment_ids": ids, "kv_lengths": jnp.array([51])},
        {"kv_lengths": jnp.array([51])},
    ):

        def gated(q, k, v, options=options):
            attend = ato_jax.linear_attention(q, k, v, implementation="triton", **options)
            return attend.astype(jnp.float32).sum()

        jax.block_until_ready(jax.grad(gated, (0, 1, 2))(q, k, v))
        print(*options, flush=True)
    bias = draw(1, 1, 67, 67, dtype="float32")
    for options in (
        {"bias": bias, "mask": bias > -1, "kv_lengths": jnp.array([51])},
        {"bias": bias[:, :, :1], "segment_ids": ids, "sinks": jnp.zeros(4), "causal": True},
        {"dropout_rate": 0.1, "dropout_key": jax.random.key(0), "query_offset": jnp.array([-9])},
    ):

        def attend(q, k, v, bias, options=options):
            options = options | ({"bias": bias} if "bias" in options else {})
            out = ato_jax.attention(q, k, v, implementation="triton", **options)
            return out.astype(jnp.float32).sum()

        shown = options.get("bias", bias)
        jax.block_until_ready(jax.grad(attend, (0, 1, 2, 3))(q, k, v, shown))
        print("attention", *options, flush=True)
    state = ato_jax.LinearState(draw(1, 2, 33, 33, dtype="float32"), gates[:, 0])
    jax.block_until_ready(ato_jax.linear_attention_step(q[:, 0], k[:, 0], v[:, 0], state))


def run_a_faulty_kernel() -> None:
    """Reads 256 MiB behind the end of its input, where nothing else can be."""

    def kernel(x_ref, out_ref):
        far = jnp.arange(16) + (1 << 26)
        plgpu.store(out_ref, plgpu.load(x_ref.at[far]))

    x = jnp.arange(16, dtype=jnp.float32)
    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((16,), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=1),
        name="attention_with_a_fault",
    )
    jax.block_until_ready(call(x))


if __name__ == "__main__":
    run_a_faulty_kernel() if sys.argv[1:] == ["planted"] else run_every_kernel()
