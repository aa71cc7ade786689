"""Causal linear attention on Hopper by Pallas kernels lowered to Mosaic GPU.

    S = sum_j v_j phi(k_j)^T            [V, F]
    z = sum_j phi(k_j)                  [F]
    out_i = S phi(q_i) / max(phi(q_i) . z, eps)        normalize, else scale * S phi(q_i)

over the keys j <= i. The sequence is cut into as many pieces as fill the card, few: XLA adds up
their sums (`sums.py`), and each piece is walked with its running state in registers (`output.py`).
Backwards the queries' gradient is such a walk, too (`query_gradient.py`), and that of keys and
values one from the end (`query_sums.py`, `key_gradient.py`). `frame.py` says what a kernel is made
of.

Sizes are those of a warpgroup's products: D = V = 128 in bfloat16, operands in bfloat16 and sums in
float32. All else is Triton's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl

from ato_jax.device import Device
from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.key_gradient import key_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.output import output
from ato_jax.ops.linear_attention.mosaic_gpu.query_gradient import query_gradient
from ato_jax.ops.linear_attention.mosaic_gpu.query_sums import query_sums
from ato_jax.ops.linear_attention.mosaic_gpu.sums import sums
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)

HOPPER = (9, 0)
# What cutting costs, in the time that the output takes for a chunk: another kernel and a scan, what
# it takes for a chunk of theirs, and what an item takes before its first chunk.
CUT, CUT_CHUNK, ITEM = 4.0, 0.4, 1.0
MOST_PIECES = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Blocks of each kernel; pieces of a sequence, 0: as many as fill the blocks."""

    blocks: int
    pieces: int = 0


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
    if spec.feature_map.name != "elu1":
        return f"does not support feature_map={spec.feature_map.name!r}, only elu1"
    if spec.return_state and spec.T % frame.C:
        # Rows beyond the end are read as zeros, of which the features need not be zero.
        return f"return_state needs T to be a multiple of {frame.C}, got {spec.T}"
    if phase == "backward" and spec.H != spec.G:
        return f"needs H = G for the gradients, got {spec.H} and {spec.G}"
    if phase == "backward" and spec.scale <= 0:
        return f"needs a positive scale for the gradients, got {spec.scale}"
    return None


def default_config(spec: LinearAttentionSpec, device: Device) -> Config:
    return Config(blocks=device.multiprocessors)


def pieces_of(spec: LinearAttentionSpec, config: Config) -> int:
    """So many that the last round of blocks is nearly full, and little is read twice."""
    chunks, heads = pl.cdiv(spec.T, frame.C), spec.B * spec.H

    def cost(pieces: int) -> float:
        each = pl.cdiv(chunks, pieces)
        rounds = pl.cdiv(heads * pieces, config.blocks)
        if pieces == 1:
            return rounds * (each + ITEM)
        rounds_before = pl.cdiv(heads * (pieces - 1), config.blocks)
        return CUT + (rounds + CUT_CHUNK * rounds_before) * (each + ITEM)

    wanted = config.pieces or min(range(1, min(chunks, MOST_PIECES) + 1), key=cost)
    return int(pl.cdiv(chunks, pl.cdiv(chunks, wanted)))


def _deal(spec: LinearAttentionSpec, config: Config, pieces: int) -> frame.Deal:
    """All rows of all query heads. Of so many pieces there is one number of rows."""
    rows = pl.cdiv(pl.cdiv(spec.T, frame.C), pieces) * frame.C
    return frame.Deal(spec.B, spec.H, spec.T, rows, pieces, config.blocks)


def _as_larger_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Under `vmap` the arrays are a larger batch, since grids are made for the card."""

    @functools.wraps(function)
    def call(spec: LinearAttentionSpec, config: Config, *arrays: Any) -> Any:
        @custom_vmap
        def run(*arrays: Any) -> Any:
            return function(spec, config, *arrays)

        @run.def_vmap
        def _(size: int, batched: Any, *arrays: Any) -> Any:
            def fold(array: jax.Array, is_batched: bool) -> jax.Array:
                if not is_batched:
                    array = jnp.broadcast_to(array, (size, *array.shape))
                return array.reshape(-1, *array.shape[2:])

            larger = dataclasses.replace(spec, B=size * spec.B)
            found = call(larger, config, *jax.tree.map(fold, arrays, tuple(batched)))
            parted = jax.tree.map(lambda array: array.reshape(size, -1, *array.shape[1:]), found)
            return parted, jax.tree.map(lambda _: True, found)

        return run(*arrays)

    return call


class Kept(NamedTuple):
    """`Outputs`, and the sums ahead of each piece, as `output` reads them."""

    out: jax.Array
    state: LinearState
    s: jax.Array
    z: jax.Array

    def plain(self) -> Outputs:
        return Outputs(self.out, self.state)


@_as_larger_batch
def keep(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Kept:
    deal = _deal(spec, config, pieces_of(spec, config))
    kv, k_sum = _states(spec, deal, inputs)
    s, z = kv[:, :, : deal.pieces].astype(jnp.bfloat16), k_sum[:, :, : deal.pieces]
    out = output(spec, deal, inputs.q, inputs.k, inputs.v, s, z)
    return Kept(out, LinearState(jnp.swapaxes(kv[:, :, -1], 2, 3), k_sum[:, :, -1]), s, z)


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    return keep(spec, config, inputs).plain()


def _states(
    spec: LinearAttentionSpec, of_queries: frame.Deal, inputs: Inputs
) -> tuple[jax.Array, jax.Array]:
    """The states ahead of each piece; behind the last one, too, if it is to be returned."""
    pieces = of_queries.pieces - (not spec.return_state)
    start = None
    if inputs.initial_state is not None:
        start = jnp.swapaxes(inputs.initial_state.kv, 2, 3), inputs.initial_state.k_sum
    found = None
    if pieces:
        length = min(pieces * of_queries.rows, spec.T)
        deal = dataclasses.replace(of_queries, heads=spec.G, length=length, pieces=pieces)
        found = sums(spec, deal, inputs.k, inputs.v)
    return _at_edges(spec, found, start)


State = tuple[jax.Array, jax.Array]


def _at_edges(
    spec: LinearAttentionSpec, pieces: State | None, start: State | None, reverse: bool = False
) -> State:
    """kv [B, G, P, V, F] and k_sum [B, G, P, F] -> the sums of all pieces ahead of each edge, or
    behind it [B, G, P + 1, ..]; from `start` [B, G, ..] on."""
    if pieces is None and start is None:
        shape = (spec.B, spec.G, 1, frame.V, frame.F)
        return jnp.zeros(shape, jnp.float32), jnp.zeros((*shape[:3], frame.F), jnp.float32)
    if pieces is None:
        assert start is not None
        return start[0][:, :, None], start[1][:, :, None]

    def add_up(pieces: jax.Array, start: jax.Array | None) -> jax.Array:
        count = pieces.shape[2]
        # Which pieces are ahead of which edge.
        adds = jnp.tri(count + 1, count, -1, dtype=jnp.float32)
        flat = pieces.reshape(*pieces.shape[:3], -1)
        highest = jax.lax.Precision.HIGHEST
        found = jnp.einsum("er,bgrn->bgen", 1 - adds if reverse else adds, flat, precision=highest)
        found = found.reshape(*pieces.shape[:2], count + 1, *pieces.shape[3:])
        return found if start is None else found + start[:, :, None]

    starts = (None, None) if start is None else start
    kv, k_sum = map(add_up, pieces, starts)
    return kv, k_sum


@_as_larger_batch
def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs, g = residuals.inputs, cotangents.out
    q, k, v = inputs.q, inputs.k, inputs.v
    if isinstance(residuals.outputs, Kept):
        s, z = residuals.outputs.s, residuals.outputs.z
        # Of a call that was batched in the backward alone there are as many as before.
        deal = _deal(spec, config, s.shape[2])
    else:
        deal = _deal(spec, config, pieces_of(spec, config))
        kv, z = _states(dataclasses.replace(spec, return_state=False), deal, inputs)
        s = kv.astype(jnp.bfloat16)
    dq, inverse, e = query_gradient(spec, deal, q, k, v, g, s, z)

    # No key reads the sums of the first piece, but the state before it.
    first = 0 if spec.initial_state else 1
    found = end = None
    if deal.pieces > first:
        later = dataclasses.replace(deal, first=first * deal.rows, pieces=deal.pieces - first)
        found = query_sums(spec, later, q, g, inverse, e)
    if spec.return_state:
        end = jnp.swapaxes(cotangents.state.kv, 2, 3), cotangents.state.k_sum
    r, u = _at_edges(spec, found, end, reverse=True)
    d_state = None
    if spec.initial_state:
        d_state = LinearState(jnp.swapaxes(r[:, :, 0], 2, 3), u[:, :, 0])
        r, u = r[:, :, 1:], u[:, :, 1:]
    dk, dv = key_gradient(spec, deal, q, k, v, g, inverse, e, r.astype(jnp.bfloat16), u)
    return Inputs(dq, dk, dv, initial_state=d_state)
