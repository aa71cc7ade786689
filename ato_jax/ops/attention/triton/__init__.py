"""Softmax attention by Pallas kernels lowered to Triton: exact, in memory linear in T and S.

forward.py and backward.py hold the kernels and their mathematics, common.py what they share.
"""

from __future__ import annotations

import dataclasses

from ato_jax.device import Device
from ato_jax.ops.attention.spec import AttentionSpec
from ato_jax.ops.attention.triton.backward import backward
from ato_jax.ops.attention.triton.common import padded
from ato_jax.ops.attention.triton.forward import forward

__all__ = ["Config", "unsupported", "default_config", "forward", "backward"]

# Beyond this a tile of one head no longer fits the registers.
WIDEST_HEAD = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles of queries and keys, warps and pipeline stages: of the forward kernel, of dQ's, and
    of the one for dK and dV. `fast_exp2` takes NVIDIA's instruction for 2^x.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    dq_block_q: int
    dq_block_k: int
    dq_num_warps: int
    dq_num_stages: int
    dkv_block_q: int
    dkv_block_k: int
    dkv_num_warps: int
    dkv_num_stages: int
    fast_exp2: bool = False


def unsupported(spec: AttentionSpec, phase: str) -> str | None:
    for name, width in (("D", spec.D), ("V", spec.V)):
        if width > WIDEST_HEAD:
            return f"{name} must be at most {WIDEST_HEAD}, got {width}"
    if spec.dtype not in ("float32", "float16", "bfloat16"):
        return f"dtype must be float32, float16 or bfloat16, got {spec.dtype}"
    features = {
        "bias": spec.bias is not None,
        "mask": spec.mask is not None,
        "segments": spec.segments,
        "lengths": spec.q_lengths or spec.kv_lengths,
        "a query_offset that is an array": spec.offset is None,
        "sinks": spec.sinks,
        "dropout": spec.dropout_rate > 0,
    }
    missing = [name for name, asked in features.items() if asked]
    return f"does not support {', '.join(missing)}" if missing else None


def default_config(spec: AttentionSpec, device: Device) -> Config:
    """Tiles by the width of a head, its dtype and the shared memory of the device."""
    width = max(padded(spec.D), padded(spec.V))
    fast = device.capability is not None
    if spec.dtype == "float32":
        return Config(32, 32, 4, 2, 32, 32, 8, 1, 32, 32, 8, 1, fast)
    if width <= 64:
        return Config(64, 128, 4, 3, 64, 64, 4, 2, 64, 64, 4, 2, fast)
    if width <= 128:
        return Config(128, 64, 4, 2, 64, 64, 4, 2, 64, 64, 4, 2, fast)
    return Config(128, 64, 8, 2, 64, 64, 8, 1, 64, 64, 8, 1, fast)
