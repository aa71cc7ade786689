"""flash-bidirectional-linear-attention's own Triton kernels, launched from JAX by jax-triton.

So a peer's kernels are timed under the same clock as this library's, without PyTorch's launches.
Their sums come out in float32 and are rounded to the inputs' dtype, as the peer does. They take one
stride for batch entry and head together: in [B, T, H, D] there is one for B = 1. Features go in,
phi(q) and phi(k).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from flash_bla.ops.linear_attn import fused

# Without the searches around them.
peer_states = fused.fused_fwd_kernel_s_km.fn
peer_output = fused.fused_fwd_kernel_o.fn
# Rows and columns of a tile, of those that the peer's search tries.
ROWS, COLUMNS = 64, 64
LAUNCH = {"num_warps": 4, "num_stages": 3}
EPS = 1e-6


# The outputs come last here, as jax-triton has them, and all sizes are constants.
@triton.jit
def _states(
    K,  # noqa: N803
    V,
    S,
    Mean,  # noqa: N803
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BL: tl.constexpr,  # noqa: N803
    BV: tl.constexpr,  # noqa: N803
):
    row: tl.constexpr = H * D
    peer_states(
        *(K, V, S, Mean),
        *(D, row, 1, D, row, 1, D * D, D, 1, D),
        1.0 / T,
        *(T, D, D, BL, D, BV),
    )


@triton.jit
def _output(
    Q,  # noqa: N803
    S,
    Mean,  # noqa: N803
    O,  # noqa: N803, E741
    T: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    eps: tl.constexpr,
    BL: tl.constexpr,  # noqa: N803
    BV: tl.constexpr,  # noqa: N803
):
    row: tl.constexpr = H * D
    peer_output(
        *(Q, S, O, Mean),
        *(D, row, 1, D, row, 1, D * D, D, 1, D),
        eps,
        *(T, D, D, BL, D, BV),
    )


def linear_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Of features phi(q), phi(k) and v [1, T, H, D], D a power of two."""
    B, T, H, D = q.shape
    if B != 1:
        raise ValueError(f"the kernels take [B, T, H, D] for B = 1, got B={B}")
    columns = min(COLUMNS, D)
    sizes: dict[str, Any] = {"T": T, "H": H, "D": D, "BL": ROWS, "BV": columns, **LAUNCH}
    state, mean = jax_triton.triton_call(
        *(k, v),
        kernel=_states,
        out_shape=[
            jax.ShapeDtypeStruct((H, D, D), jnp.float32),
            jax.ShapeDtypeStruct((H, D), jnp.float32),
        ],
        grid=(D // columns, 1, H),
        **sizes,
    )
    return jax_triton.triton_call(
        *(q, state.astype(k.dtype), mean.astype(k.dtype)),
        kernel=_output,
        out_shape=jax.ShapeDtypeStruct(q.shape, v.dtype),
        grid=(D // columns, triton.cdiv(T, ROWS), H),
        eps=EPS,
        **sizes,
    )
