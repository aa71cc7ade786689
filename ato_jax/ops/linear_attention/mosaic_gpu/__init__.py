"""Causal linear attention on Hopper by Pallas kernels lowered to Mosaic GPU.

    S = sum_j v_j phi(k_j)^T            [V, F]
    z = sum_j phi(k_j)                  [F]
    out_i = S phi(q_i) / max(phi(q_i) . z, eps)        normalize, else scale * S phi(q_i)

over the keys j <= i, forward also with a decay for each head, or head and step. The sequence is cut
into as many pieces as fill the card, few: XLA adds up their sums (`sums.py`), and each piece is
walked with its running state in registers (`output.py`). Backwards the queries' gradient is such a
walk, too (`query_gradient.py`), and that of keys and values one from the end (`query_sums.py`,
`key_gradient.py`). `frame.py` says what a kernel is made of.

Sizes are those of a warpgroup's products: D = V = 128 in bfloat16, operands in bfloat16 and sums in
float32. All else is Triton's.
"""

from __future__ import annotations

import dataclasses
import functools
import os
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

State = tuple[jax.Array, jax.Array]

HOPPER = (9, 0)
INTERPRETER_THREADS = 32
ROWS_OF_A_TILE = 8  # as arrays in memory are cut by the copy engine
# With fewer rows of all heads, Triton's kernels are faster: they are fewer. On an H200 8 heads of
# 1024 rows took 23.8 us where they take 14.5, of 4096 rows 36.1 and 33.9; 32 heads of 2048 rows
# 43.7 and 64.7.
ENOUGH_ROWS = 2**16
LEAST_DECAY = -128.0  # exp of it is 0 in float32
# What cutting costs, in the time that the output takes for a chunk: another kernel and a scan, what
# it takes for a chunk of theirs, and what an item takes before its first chunk.
CUT, CUT_CHUNK, ITEM = 4.0, 0.4, 1.0
MOST_PIECES, FEW_PIECES = 256, 16


@dataclasses.dataclass(frozen=True)
class Config:
    """Blocks of each kernel; pieces of a sequence, 0: as many as fill the blocks."""

    blocks: int
    pieces: int = 0


def refuses(device: Device, interpreted: bool) -> str | None:
    """Why not on this device."""
    if interpreted:
        if frame.interpreter is None:
            return "JAX interprets such kernels from 0.12 on"
        if int(os.environ.get("NPROC") or os.cpu_count() or 1) < INTERPRETER_THREADS:
            return (
                "its warpgroups are threads of XLA's where they are interpreted, which wait for "
                f"one another: set NPROC={INTERPRETER_THREADS} in the environment before JAX starts"
            )
        return None
    if device.capability != HOPPER:
        return f"needs a Hopper GPU, and this one is {device.name}"
    return None


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    if not spec.causal:
        return "needs causal=True"
    for name in ("segments", "q_lengths", "kv_lengths"):
        if getattr(spec, name):
            return f"does not support {name}"
    if spec.T != spec.S or spec.T < frame.C or spec.T % ROWS_OF_A_TILE:
        return (
            f"needs T = S of at least {frame.C}, a multiple of {ROWS_OF_A_TILE}, "
            f"got {spec.T} and {spec.S}"
        )
    if spec.dtype != "bfloat16":
        return f"needs bfloat16, got {spec.dtype}"
    if (spec.D, spec.F, spec.V) != (frame.F, frame.F, frame.V):
        return f"needs D = V = {frame.V}, got D={spec.D}, V={spec.V}"
    if spec.feature_map.name != "elu1":
        return f"does not support feature_map={spec.feature_map.name!r}, only elu1"
    if spec.return_state and spec.T % frame.C:
        # Rows beyond the end are read as zeros, of which the features need not be zero.
        return f"return_state needs T to be a multiple of {frame.C}, got {spec.T}"
    if spec.decay == "channel" or phase == "backward" and spec.decay:
        return f"does not support a decay per {spec.decay}, {phase}"
    if phase == "backward" and spec.H != spec.G:
        return f"needs H = G for the gradients, got {spec.H} and {spec.G}"
    if phase == "backward" and spec.scale <= 0:
        return f"needs a positive scale for the gradients, got {spec.scale}"
    return None


def default_config(spec: LinearAttentionSpec, device: Device) -> Config:
    return Config(blocks=device.multiprocessors)


def pays(spec: LinearAttentionSpec, device: Device) -> bool:
    return spec.B * spec.H * spec.T >= ENOUGH_ROWS


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


def _deal(spec: LinearAttentionSpec, config: Config) -> frame.Deal:
    """All rows of all query heads."""
    pieces = pieces_of(spec, config)
    rows = pl.cdiv(pl.cdiv(spec.T, frame.C), pieces) * frame.C
    return frame.Deal(spec.B, spec.H, spec.T, rows, pieces, config.blocks)


def _as_larger_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Under `vmap` the arrays are a larger batch, since grids are made for the card."""

    @functools.wraps(function)
    def call(spec: LinearAttentionSpec, config: Config, *arrays: Any) -> Any:
        # What is kept has one shape, however large the batch becomes.
        config = dataclasses.replace(config, pieces=pieces_of(spec, config))

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
    deal = _deal(spec, config)
    gates = None if inputs.decay is None else _gates(spec, inputs.decay)
    kv, k_sum = _states(spec, deal, inputs, gates)
    s, z = kv[:, :, : deal.pieces].astype(jnp.bfloat16), k_sum[:, :, : deal.pieces]
    out = output(spec, deal, inputs.q, inputs.k, inputs.v, s, z, gates)
    return Kept(out, LinearState(jnp.swapaxes(kv[:, :, -1], 2, 3), k_sum[:, :, -1]), s, z)


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    return keep(spec, config, inputs).plain()


def _gates(spec: LinearAttentionSpec, decay: jax.Array) -> jax.Array:
    """[B, G, T up to a whole chunk]: the decays' logarithms to base 2, summed up from each chunk's
    first row."""
    chunks = pl.cdiv(spec.T, frame.C)
    decay = jnp.maximum(decay, LEAST_DECAY) * frame.LOG2_E
    if spec.decay == "head":
        up = decay[:, None] * jnp.arange(1, frame.C + 1, dtype=jnp.float32)  # [G, C]
        shape = (spec.B, spec.G, chunks, frame.C)
        return jnp.broadcast_to(up[:, None], shape).reshape(spec.B, spec.G, -1)
    if spec.layout == "bthd":
        decay = jnp.swapaxes(decay, 1, 2)
    decay = jnp.pad(decay, ((0, 0), (0, 0), (0, chunks * frame.C - spec.T)))
    # [j, i]: 1 where j <= i
    triangle = jnp.tri(frame.C, dtype=jnp.float32).T
    of_chunks = decay.reshape(spec.B, spec.G, chunks, frame.C)
    up = jnp.einsum("bgcj,ji->bgci", of_chunks, triangle, precision=jax.lax.Precision.HIGHEST)
    return up.reshape(decay.shape)


def _states(
    spec: LinearAttentionSpec, of_queries: frame.Deal, inputs: Inputs, gates: jax.Array | None
) -> State:
    """The states ahead of each piece; behind the last one, too, if it is to be returned."""
    pieces = of_queries.pieces - (not spec.return_state)
    start = found = keeps = None
    if inputs.initial_state is not None:
        start = jnp.swapaxes(inputs.initial_state.kv, 2, 3), inputs.initial_state.k_sum
    if pieces:
        length = min(pieces * of_queries.rows, spec.T)
        deal = dataclasses.replace(of_queries, heads=spec.G, length=length, pieces=pieces)
        found = sums(spec, deal, inputs.k, inputs.v, gates)
        if gates is not None:
            of_chunks = gates[:, :, frame.C - 1 :: frame.C]
            chunks = deal.rows // frame.C
            missing = max(0, pieces * chunks - of_chunks.shape[2])
            of_chunks = jnp.pad(of_chunks, ((0, 0), (0, 0), (0, missing)))
            of_chunks = of_chunks[:, :, : pieces * chunks]
            keeps = jnp.exp2(jnp.sum(of_chunks.reshape(*gates.shape[:2], pieces, -1), axis=3))
    return _at_edges(spec, found, start, keeps)


def _at_edges(
    spec: LinearAttentionSpec,
    pieces: State | None,
    start: State | None,
    keeps: jax.Array | None = None,
    reverse: bool = False,
) -> State:
    """kv [B, G, P, V, F] and k_sum [B, G, P, F] -> the sums of all pieces ahead of each edge, or
    behind it, [B, G, P + 1, ..], from `start` [B, G, ..] on. `keeps` [B, G, P]: what a piece leaves
    of what is ahead of it."""
    if pieces is None and start is None:
        shape = (spec.B, spec.G, 1, frame.V, frame.F)
        return jnp.zeros(shape, jnp.float32), jnp.zeros((*shape[:3], frame.F), jnp.float32)
    if pieces is None:
        assert start is not None
        return start[0][:, :, None], start[1][:, :, None]
    count = pieces[0].shape[2]
    # What edge e has of piece r; and of the start.
    ahead = jnp.tri(count + 1, count, -1, dtype=jnp.float32)
    weights = (1 - ahead if reverse else ahead)[None, None]
    of_start: Any = 1.0
    if keeps is not None:
        passed = jnp.where(jnp.tri(count, dtype=bool, k=-1), keeps[..., None], 1.0)
        passed = jnp.cumprod(passed, axis=2)  # from piece r on, up to the edge behind e
        weights = jnp.pad(passed, ((0, 0), (0, 0), (1, 0), (0, 0))) * ahead
        of_start = jnp.pad(jnp.cumprod(keeps, axis=2), ((0, 0), (0, 0), (1, 0)), constant_values=1)
        of_start = of_start[..., None]

    def add_up(pieces: jax.Array, start: jax.Array | None) -> jax.Array:
        flat = pieces.reshape(*pieces.shape[:3], -1)
        if count <= FEW_PIECES:  # a product of matrices would be mostly empty
            found = jnp.sum(weights[..., None] * flat[:, :, None], axis=3)
        else:
            every = jnp.broadcast_to(weights, (*flat.shape[:2], *weights.shape[2:]))
            found = jnp.einsum("bger,bgrn->bgen", every, flat, precision=jax.lax.Precision.HIGHEST)
        if start is not None:
            found += of_start * start.reshape(*start.shape[:2], 1, -1)
        return found.reshape(*pieces.shape[:2], count + 1, *pieces.shape[3:])

    starts = (None, None) if start is None else start
    kv, k_sum = map(add_up, pieces, starts)
    return kv, k_sum


@_as_larger_batch
def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs, g = residuals.inputs, cotangents.out
    q, k, v = inputs.q, inputs.k, inputs.v
    deal = _deal(spec, config)
    if isinstance(residuals.outputs, Kept):
        s, z = residuals.outputs.s, residuals.outputs.z
    else:
        kv, z = _states(dataclasses.replace(spec, return_state=False), deal, inputs, None)
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
