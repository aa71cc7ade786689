"""Softmax attention by Pallas kernels lowered to Triton: exact, in memory linear in T and S.

`forward.py`, `backward.py` and `bias.py` hold the kernels and their mathematics, `block_sizes.py` a
table of their tiles. The kernels share tiles and products (`common.py`), the ranges of blocks and
the masks of pairs (`visibility.py`), the options of pairs (`pairs.py`), and the backward kernels
the weights (`weights.py`). `wide.py` is the backend for wider heads, `paged.py` the forward pass
for a few queries and a long cache.
"""

from __future__ import annotations

from ato_jax.backend import Backend
from ato_jax.device import of_call
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs
from ato_jax.ops.attention.triton.backward import backward
from ato_jax.ops.attention.triton.block_sizes import Config, default_config
from ato_jax.ops.attention.triton.forward import forward

# The gradients of a tile of wider rows do not fit the registers.
WIDEST_HEAD = 512
# With less shared memory, down to the 99 KiB of consumer cards, the smallest tiles of wider float32
# rows do not fit.
SMALL_SHARED_MEMORY = 120 * 1024
WIDEST_FLOAT32_HEAD_OF_SMALL_CARDS = 256


def unsupported(spec: AttentionSpec, phase: str) -> str | None:
    for name, width in (("D", spec.D), ("V", spec.V)):
        if width > WIDEST_HEAD:
            return f"{name} must be at most {WIDEST_HEAD}, got {width}"
    if spec.dtype not in ("float32", "float16", "bfloat16"):
        return f"dtype must be float32, float16 or bfloat16, got {spec.dtype}"
    device = of_call(())
    shared = device.shared_memory
    small = device.platform == "gpu" and shared < SMALL_SHARED_MEMORY
    widest = max(spec.D, spec.V)
    if small and spec.dtype == "float32" and widest > WIDEST_FLOAT32_HEAD_OF_SMALL_CARDS:
        return (
            f"float32 needs {SMALL_SHARED_MEMORY // 1024} KiB of shared memory per block for heads "
            f"wider than {WIDEST_FLOAT32_HEAD_OF_SMALL_CARDS}, got {widest} and {shared // 1024}"
        )
    return None


class _Triton(Backend[AttentionSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)


BACKEND = _Triton()
