"""Softmax attention by what runs on JAX, in the driver's process: this library, cuDNN through
`jax.nn`, JAX's own Pallas kernel, Tokamax's, and plain JAX. Arrays are [B, T, H, D].
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import ato_jax
from benchmarks import ours
from benchmarks.cases import Case

# `function(q, k, v)`, or with documents `function(q, k, v, ids)`.
Attend = Callable[..., jax.Array]
# Of the scores of plain JAX: beyond, it is no choice.
SCORES_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Contender:
    """`make(case)` gives the function that is timed."""

    takes: Callable[[Case], bool]
    make: Callable[[Case], Attend]
    package: str = ""
    searches: bool = False

    def compiled(self, case: Case, phase: str) -> ours.Compiled | str:
        return self._missing() or ours.compiled(case, phase, self.make(case))

    def _missing(self) -> str:
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return ""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows and keys of a tile in the forward pass; of those of dk and dv, and of dq."""

    forward: tuple[int, int]
    keys: tuple[int, int]
    queries: tuple[int, int]
    stages: int


# What a search on Hopper left; which is ahead depends on D and on the phase.
TILES = (
    Tiles((128, 64), keys=(64, 64), queries=(64, 64), stages=2),
    Tiles((64, 128), keys=(32, 64), queries=(64, 32), stages=3),
)


def _warps(case: Case) -> int:
    return 4 if case.D <= 128 else 8


def _library(implementation: str | None, case: Case) -> Attend:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
        return ato_jax.attention(q, k, v, implementation=implementation, **ours.options(case, *ids))

    return attend


def _jax_nn(implementation: Literal["cudnn", "xla"], case: Case) -> Attend:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
        mask = ids[0][:, None, :, None] == ids[0][:, None, None, :] if ids else None
        return jax.nn.dot_product_attention(
            *(q, k, v),
            None,
            mask,
            is_causal=case.causal,
            local_window_size=None if case.left is None else (case.left, 0),
            implementation=implementation,
        )

    return attend


def _pallas(tiles: Tiles, case: Case) -> Attend:
    from jax.experimental.pallas.ops.gpu import attention

    blocks = attention.BlockSizes(*tiles.forward, *tiles.keys, *tiles.queries)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
        return attention.mha(
            *(q, k, v, ids[0] if ids else None),
            sm_scale=case.D**-0.5,
            causal=case.causal,
            block_sizes=blocks,
            num_warps=_warps(case),
            num_stages=tiles.stages,
        )

    return attend


def _tokamax(implementation: str, case: Case) -> Attend:
    """A kernel of Tokamax's as its public function calls it, with block sizes of its choice."""
    from tokamax._src.ops.attention import api

    return _by_ranges(api.IMPLEMENTATIONS[implementation], case)


def _tokamax_triton(tiles: Tiles, case: Case) -> Attend:
    from tokamax._src.ops.attention import pallas_triton, pallas_triton_vjp

    shared: dict[str, Any] = {"num_warps": _warps(case), "num_stages": tiles.stages}
    # A product has 16 rows at least.
    rows = max(16, min(tiles.forward[0], case.T))
    forward = pallas_triton.Config(block_q=rows, block_k=tiles.forward[1], **shared)
    backward = pallas_triton_vjp.Config(
        block_m1=tiles.keys[0],
        block_n1=tiles.keys[1],
        block_m2=tiles.queries[0],
        block_n2=tiles.queries[1],
        **shared,
    )
    kernel = pallas_triton.PallasTritonFlashAttention(
        config=forward, vjp=pallas_triton_vjp.PallasTritonFlashAttentionVjp(config=backward)
    )
    return _by_ranges(kernel, case)


def _by_ranges(kernel: Callable[..., jax.Array], case: Case) -> Attend:
    """Of Tokamax's kernels: windows and documents as ranges of keys, which they can skip."""
    from tokamax._src.ops import op
    from tokamax._src.ops.attention import base

    # What it notes for its tuner in a program's metadata keeps XLA from loading the program again.
    op._tokamax_metadata = lambda _: contextlib.nullcontext()

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *_: jax.Array) -> jax.Array:
        if case.left is None and case.documents is None:
            return kernel(q, k, v, is_causal=case.causal)
        ranges = [case.seen(entry) for entry in range(case.B if case.documents else 1)]
        bounds = jnp.asarray(np.stack(ranges, axis=1)[:, :, None], jnp.int32)  # [2, B, 1, T]
        # Or XLA would work out what the mask of the backward pass is while it compiles.
        first, last = jax.lax.optimization_barrier((bounds[0], bounds[1]))
        end = None if case.causal else last
        mask = base.Mask(k_start=first, k_end=end, is_causal=case.causal)
        return kernel(q, k, v, mask=mask)

    return attend


def _jla(case: Case) -> Attend:
    from jla.ops.mosaic_gpu.attention import flash_attention

    window = None if case.left is None else case.left + 1

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
        segments = ids[0] if ids else None
        return flash_attention(q, k, v, segment_ids=segments, sliding_window=window)

    return attend


def _flash_attention_3(case: Case) -> Attend:
    from flash_attn3_jax import flash_mha

    window = (-1, -1) if case.left is None else (case.left, 0)
    return functools.partial(flash_mha, is_causal=case.causal, window_size=window)


def _every(case: Case) -> bool:
    return True


def _without_documents(case: Case) -> bool:
    return case.documents is None


def _square(case: Case) -> bool:
    """What JAX's Pallas kernel can do: its backward pass alone refuses T != S."""
    return case.G is None and case.left is None and case.T >= 16


def _short(case: Case) -> bool:
    return 4 * case.B * case.H * case.T * case.key_shape[1] <= SCORES_BYTES


CONTENDERS = {
    "ato_jax": Contender(_every, functools.partial(_library, None)),
    "ato_jax triton": Contender(_every, functools.partial(_library, "triton")),
    "JAX cuDNN": Contender(_without_documents, functools.partial(_jax_nn, "cudnn")),
    "plain JAX": Contender(_short, functools.partial(_jax_nn, "xla"), searches=True),
    "Tokamax Triton": Contender(_every, functools.partial(_tokamax, "triton"), package="tokamax"),
    "Tokamax Mosaic": Contender(
        _every, functools.partial(_tokamax, "mosaic_gpu"), package="tokamax"
    ),
    "jax-linear-attention's flash": Contender(
        lambda case: case.causal and case.T == case.key_shape[1], _jla, package="jla"
    ),
    "FlashAttention-3 through JAX": Contender(
        _without_documents, _flash_attention_3, package="flash_attn3_jax"
    ),
}
for tiles in TILES:
    size = "{}x{}".format(*tiles.forward)
    CONTENDERS |= {
        f"JAX's Pallas kernel, {size}": Contender(_square, functools.partial(_pallas, tiles)),
        f"Tokamax Triton, {size}": Contender(
            _every, functools.partial(_tokamax_triton, tiles), package="tokamax"
        ),
    }
