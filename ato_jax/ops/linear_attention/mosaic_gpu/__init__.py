"""Causal linear attention on Hopper by Pallas kernels lowered to Mosaic GPU.

    S = sum_j v_j phi(k_j)^T            [V, F]
    z = sum_j phi(k_j)                  [F]
    out_i = S phi(q_i) / max(phi(q_i) . z, eps)        normalize, else scale * S phi(q_i)

over the keys j <= i. The sequence is cut into as many pieces as fill the card, few: XLA adds up
their sums (`sums.py`), and each piece is walked with its running state in registers (`output.py`).
`frame.py` says what a kernel is made of.

Sizes are those of a warpgroup's products: D = V = 128 in bfloat16, operands in bfloat16 and sums in
float32. All else is Triton's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl

from ato_jax.device import Device
from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.output import output
from ato_jax.ops.linear_attention.mosaic_gpu.sums import sums
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
)

HOPPER = (9, 0)
# What cutting costs, in the time that the output takes for a chunk: another kernel and a scan, what
# it takes for a chunk of theirs, and what an item takes before its first chunk.
CUT, CUT_CHUNK, ITEM = 4.0, 0.4, 1.0
MOST_PIECES = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Blocks of each kernel; rows of a piece, 0: as many as fill the blocks."""

    blocks: int
    piece_rows: int = 0


def refuses(device: Device, interpreted: bool) -> str | None:
    """Why not on this device."""
    if interpreted:
        return None if frame.interpreter else "JAX interprets such kernels from 0.12 on"
    if device.capability != HOPPER:
        return f"needs a Hopper GPU, and this one is {device.name}"
    return None


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    if not spec.causal:
        return "needs causal=True"
    for name in ("decay", "segments", "q_lengths", "kv_lengths"):
        if getattr(spec, name):
            return f"does not support {name}"
    if spec.T != spec.S:
        return f"needs T = S, got {spec.T} and {spec.S}"
    if spec.dtype != "bfloat16":
        return f"needs bfloat16, got {spec.dtype}"
    if (spec.D, spec.F, spec.V) != (frame.F, frame.F, frame.V):
        return f"needs D = V = {frame.V}, got D={spec.D}, V={spec.V}"
    if spec.feature_map.name not in frame.MAPS:
        return f"feature map {spec.feature_map.name!r} is none of {', '.join(frame.MAPS)}"
    if spec.return_state and spec.T % frame.C:
        # Rows beyond the end are read as zeros, of which the features need not be zero.
        return f"return_state needs T to be a multiple of {frame.C}, got {spec.T}"
    if phase == "backward":
        return "has no backward yet"
    return None


def default_config(spec: LinearAttentionSpec, device: Device) -> Config:
    return Config(blocks=device.multiprocessors)


def piece_rows(spec: LinearAttentionSpec, config: Config, heads: int) -> int:
    """So many that the last round of blocks is nearly full, and little is read twice."""
    if config.piece_rows:
        return config.piece_rows
    chunks = pl.cdiv(spec.T, frame.C)

    def cost(pieces: int) -> float:
        each = pl.cdiv(chunks, pieces)
        rounds = pl.cdiv(spec.B * heads * pieces, config.blocks)
        if pieces == 1:
            return rounds * (each + ITEM)
        rounds_before = pl.cdiv(spec.B * heads * (pieces - 1), config.blocks)
        return CUT + (rounds + CUT_CHUNK * rounds_before) * (each + ITEM)

    pieces = min(range(1, min(chunks, MOST_PIECES) + 1), key=cost)
    return int(pl.cdiv(chunks, pieces)) * frame.C


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    """Under `vmap` a larger batch: the grid of the kernels is made for the card."""

    @custom_vmap
    def attend(inputs: Inputs) -> Outputs:
        return _forward(spec, config, inputs)

    @attend.def_vmap
    def _(size: int, batched: Any, inputs: Inputs) -> Any:
        def fold(array: jax.Array, is_batched: bool) -> jax.Array:
            if not is_batched:
                array = jnp.broadcast_to(array, (size, *array.shape))
            return array.reshape(-1, *array.shape[2:])

        larger = dataclasses.replace(spec, B=size * spec.B)
        outputs = forward(larger, config, jax.tree.map(fold, inputs, batched[0]))
        unfold = lambda array: array.reshape(size, spec.B, *array.shape[1:])  # noqa: E731
        return jax.tree.map(unfold, outputs), jax.tree.map(lambda _: True, outputs)

    return attend(inputs)


def _forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    rows = piece_rows(spec, config, spec.H)
    deal = frame.Deal(spec.B, spec.H, spec.T, rows, pl.cdiv(spec.T, rows), config.blocks)
    kv, k_sum = _states(spec, deal, inputs)
    s = kv[:, :, : deal.pieces].astype(jnp.bfloat16)
    out = output(spec, deal, inputs.q, inputs.k, inputs.v, s, k_sum)
    return Outputs(out, LinearState(jnp.swapaxes(kv[:, :, -1], 2, 3), k_sum[:, :, -1]))


def _states(
    spec: LinearAttentionSpec, of_queries: frame.Deal, inputs: Inputs
) -> tuple[jax.Array, jax.Array]:
    """The states ahead of each piece; behind the last one, too, if it is to be returned."""
    pieces = of_queries.pieces - (not spec.return_state)
    start = None
    if inputs.initial_state is not None:
        start = jnp.swapaxes(inputs.initial_state.kv, 2, 3), inputs.initial_state.k_sum
    if pieces:
        length = min(pieces * of_queries.rows, spec.T)
        deal = dataclasses.replace(of_queries, heads=spec.G, length=length, pieces=pieces)
        kv, k_sum = sums(spec, deal, inputs.k, inputs.v)
        if start is None:
            return _at_edges(kv), _at_edges(k_sum)
        return _at_edges(kv, start[0]), _at_edges(k_sum, start[1])
    if start is None:
        shape = (spec.B, spec.G, frame.V, frame.F)
        start = jnp.zeros(shape, jnp.float32), jnp.zeros((*shape[:2], frame.F), jnp.float32)
    return start[0][:, :, None], start[1][:, :, None]


def _at_edges(pieces: jax.Array, start: jax.Array | None = None) -> jax.Array:
    """[B, G, P, ...] -> the sums of all pieces before each edge [B, G, P + 1, ...]."""
    if start is not None:
        pieces = jnp.concatenate([start[:, :, None], pieces], axis=2)
    count = pieces.shape[2]
    edges = count + (start is None)
    before = jnp.tri(edges, count, -1 if start is None else 0, dtype=jnp.float32)
    flat = pieces.reshape(*pieces.shape[:3], -1)
    found = jnp.einsum("er,bgrn->bgen", before, flat, precision=jax.lax.Precision.HIGHEST)
    return found.reshape(*pieces.shape[:2], edges, *pieces.shape[3:])
