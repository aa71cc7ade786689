"""The gradients of a chunk's q, k, beta and decays, from the states at its ends.

All chunks are independent. With the letters of `walk_forward.py` and `walk_backward.py`, L_t the
sum of log decays from the chunk's first step to t, and e(s..t) = exp(L_t - L_s):

    F[t, s] = scale * dout_t . u_s e(s..t)      s <= t, else 0
    N[t, s] = dr_t . u_s e(s..t)                s < t, else 0
    dq_t    = scale * exp(L_t) dout_t S^T + sum_s F[t, s] k_s
    dk'_t   = -exp(L_t) dr_t S^T - sum_s N[t, s] k_s                        as k_t is recalled
    dk"_s   = exp(L_C - L_s) u_s dS'^T + sum_t F[t, s] q_t - N[t, s] k_t    as k_s is written
    dbeta_t = dr_t . u_t / beta_t^2
    dL_t    = q_t . dq_t + k_t . dk'_t - k_t . dk"_t

and dL_C for the chunk's last step has exp(L_C) <S, dS'> + sum_s exp(L_C - L_s) k_s . u_s dS'^T
besides. A step's decay is part of L from the step on, so its gradient is the sum of dL over it and
all later steps of its chunk, and over the workers' columns. Where the rounding of S and dS' would
exceed it, the corrections of `corrections.py` are added, or in a chunk of one key take its place.

u_t / beta_t is the error that step t corrects, so nothing has to be formed again.

No product's result goes on to another chunk, so one part of bfloat16 is exact enough for most
factors. F, N and u are in two parts, since dq and ddecay are small sums of large terms where keys
are alike, and so is dr where steps decay; without a decay u beside dS' is in one. The same rounded
F and N enter dq, dk' and dk", so their rounding errors cancel in the sums of dL.

Worker 0 stores its dq and dk over F and worker 1 over N, once all workers have read both. So the
slot of q and k comes free early, and the copies to global memory run under the products of the next
chunk.

With `normalize_qk` the unit rows' gradients are projected: those of q get - q (q . dq) / |q|^2.

`chunk_gradient.py` has its roles and what it loads.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, OF_COLUMNS, OF_ROWS, Buffer, Item, load
from ato_jax.ops.delta_rule.mosaic_gpu import chunk_gradient, corrections, frame, steps
from ato_jax.ops.delta_rule.mosaic_gpu.chunk_gradient import Columns, Kernel, Storage, dot
from ato_jax.ops.delta_rule.mosaic_gpu.frame import C, Config
from ato_jax.ops.delta_rule.mosaic_gpu.walk import Numbers
from ato_jax.ops.delta_rule.spec import LEAST_DECAY, DeltaRuleSpec

STAGES = 2
# Sums over a worker's columns, for each step: dL without the last step's own part; and what, added
# up, is that part.
OF_LOG_DECAY, OF_LAST = range(2)
SUMS = 2
# The log2 decay from which on the rule takes a decay as it is.
LEAST_LOG_DECAY = LEAST_DECAY * frame.LOG2_E


def storage_of(spec: DeltaRuleSpec) -> Storage:
    of_pairs = frame.tiling(spec).of_rows(frame.PARTS, C, C)
    made = {"read": Buffer(of_pairs), "corrected": Buffer(of_pairs)}
    if spec.decay is not None:
        made["sums"] = Buffer(plgpu.SMEM((frame.blocks_of_key(spec), SUMS, C), F32))
    return chunk_gradient.storage_of(spec, STAGES, {}, made)


class Gradients(NamedTuple):
    """The gradients of each value head, also where value heads share keys."""

    dq: jax.Array  # [B, T, H, D] in the layout, bfloat16
    dk: jax.Array  # as dq
    dbeta: jax.Array  # [B, T, H] in the layout, float32
    ddecay: jax.Array | None  # as dbeta


def chunk_gradients(spec: DeltaRuleSpec, config: Config, arrays: dict[str, jax.Array]) -> Gradients:
    """`arrays`: the inputs in global memory, by the names of `Kernel`."""
    rows = frame.chunks_of(spec) * C  # whole chunks, so that stores need no mask
    shape = (rows, spec.H) if spec.layout == "bthd" else (spec.H, rows)
    names = ["dbeta"] + (["ddecay"] if spec.decay is not None else [])
    types = {name: jax.ShapeDtypeStruct((spec.B, *shape), F32) for name in names}
    found = chunk_gradient.launch(
        "gradients", spec, config, storage_of(spec), arrays, types, one_chunk, hand_pairs
    )
    axis = spec.layout.index("t")
    of_steps = {name: lax.slice_in_dim(found[name], 0, spec.T, axis=axis) for name in names}
    return Gradients(found["dq"], found["dk"], of_steps["dbeta"], of_steps.get("ddecay"))


def hand_pairs(kernel: Kernel) -> None:
    """What PAIRS does."""
    kernel.deal.each(functools.partial(pairs_of_chunk, kernel))
    kernel.own.handed.drain(kernel.deal.own)


def pairs_of_chunk(kernel: Kernel, item: Item) -> None:
    """Hands F and -N to the workers, and stores dbeta."""
    own = kernel.own
    pairs, (of_beta,) = chunk_gradient.multiply_columns(
        kernel, item, (2, 1), chunk_gradient.of_pairs, chunk_gradient.dots_of_errors
    )
    own.chunks.produced.wait(0)
    beta = load(own.numbers.at[frame.BETA], OF_ROWS)
    target = steps.of_chunk(kernel.spec, kernel.dbeta, item, item.head, item.piece)
    mosaic.store_in_memory(target, of_beta / beta / beta)
    own.handed.acquire(item.number)
    publish_pairs(kernel, pairs)
    own.handed.produced.arrive(0)
    own.chunks.consumed.arrive(0)


def one_chunk(kernel: Kernel, number: int, item: Item) -> None:
    own, spec = kernel.own, kernel.spec

    def dots_of(columns: Columns) -> list[jax.Array]:
        if spec.decay is None:
            return []
        return [dot(columns.states.at[number], load(columns.dstates.at[number]).astype(F32))]

    def behind(block: Any) -> None:
        """Lets go of the last chunk's F and N, once what lies over them is copied."""

        @pl.when((block == 0) & (item.number > 0))
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            own.handed.consumed.arrive(0)

    (read, recalled, written), dots = chunk_gradient.multiply_columns(
        kernel,
        item,
        (3, 0 if spec.decay is None else 1),
        functools.partial(chunk_gradient.of_states, spec, number),
        dots_of,
        behind,
    )
    own.chunks.produced.wait(0)
    # 0, since the factors of keys are never negative, which no compiler knows. With it in their
    # addresses the descriptors of F and N are computed for each chunk; otherwise they would be
    # computed ahead of the loop over chunks, and spilled.
    first = (own.numbers[frame.OF_KEYS, 0] < 0).astype(jnp.int32)
    numbers = Numbers(spec, own.numbers, OF_ROWS)
    q, k = own.q.at[number], own.k.at[number]
    dq = numbers.times(read, numbers.of_read())
    recalled = numbers.times(-recalled, numbers.of_recalled())
    written = numbers.times(written, numbers.of_written())
    last = of_decay = None
    if spec.decay is not None:
        last = dot(k, written) + dots[0] * numbers.kept()
        # Loaded here, while the slot is held.
        of_decay = load(own.numbers.at[frame.DECAY], OF_ROWS), own.numbers[frame.ALIKE, 0]
    own.handed.produced.wait(0)
    of_read, of_corrected = (
        [tiles.at[first + part] for part in range(frame.PARTS)]
        for tiles in (own.read, own.corrected)
    )
    dq, recalled, written = mosaic.multiply(
        (dq, [(part, k) for part in of_read]),
        (recalled, [(part, k) for part in of_corrected]),
        (
            written,
            [(part.T, q) for part in of_read] + [(part.T, k) for part in of_corrected],
        ),
    )
    dk = recalled + written
    keys = load(k).astype(F32)
    of_queries = dot(q, dq)
    of_recalled, of_written = (jnp.sum(keys * one, axis=1) for one in (recalled, written))
    if last is not None:
        own.sums.at[number, OF_LOG_DECAY][...] = of_queries + of_recalled - of_written
        own.sums.at[number, OF_LAST][...] = last
    if spec.normalize_qk:
        chunk_gradient.publish_dots(kernel, number, (of_queries, of_recalled + of_written))
    plgpu.commit_smem()
    own.done.arrive()
    own.done.wait()
    if spec.normalize_qk:
        dq, dk = chunk_gradient.project(kernel, number, (dq, dk))
    tiles = own.read if number == 0 else own.corrected
    for tile, found in zip((tiles.at[0], tiles.at[1]), (dq, dk), strict=True):
        tile[...] = found.astype(BF16)
    plgpu.commit_smem()  # also what was read of the slot, ahead of the load that overwrites it
    own.chunks.consumed.arrive(0)
    kernel.store_rows(item, number, tiles.at[0], tiles.at[1])
    if of_decay is not None and number == frame.blocks_of_key(spec) - 1:
        store_decay_gradient(kernel, item, *of_decay)


def store_decay_gradient(kernel: Kernel, item: Item, decay: jax.Array, alike: Any) -> None:
    """Adds up dL from each step to the chunk's end. `decay`: the steps' log2 decays, [64]; `alike`:
    whether the chunk's keys are alike."""
    own, spec = kernel.own, kernel.spec
    of_steps, of_last = (
        sum(
            (load(own.sums.at[n, which], OF_COLUMNS) for n in range(1, frame.blocks_of_key(spec))),
            start=load(own.sums.at[0, which], OF_COLUMNS),
        )
        for which in (OF_LOG_DECAY, OF_LAST)
    )
    found = with_corrections(kernel, item, alike, steps.sums_to_end(of_steps, of_last))
    target = steps.of_chunk(spec, kernel.ddecay, item, item.head, item.piece)
    mosaic.store_in_memory(target, jnp.where(decay > LEAST_LOG_DECAY, found, 0.0))


def with_corrections(kernel: Kernel, item: Item, alike: Any, found: jax.Array) -> jax.Array:
    """ddecay with the corrections of `corrections.py`, where the chunk has any. `found`: this
    kernel's own."""
    at = kernel.place(item)

    def of_own(found: jax.Array) -> jax.Array:
        share = load(kernel.corrections.at[(corrections.SHARE, 0, *at)], OF_ROWS, optimized=False)
        return jnp.where(share > 0, found, 0.0)

    found = lax.cond(alike > 0, of_own, lambda found: found, found)
    for walk in corrections.WALKS:

        def add(found: jax.Array, walk: int = walk) -> jax.Array:
            for block in range(kernel.steps):
                found += load(kernel.corrections.at[(walk, block, *at)], OF_ROWS, optimized=False)
            return found

        is_corrected = corrections.is_corrected(kernel.spec, walk, alike, item.piece)
        found = lax.cond(is_corrected, add, lambda found: found, found)
    return found


def publish_pairs(kernel: Kernel, of_values: list[jax.Array]) -> None:
    """Stores F and -N: dout u^T and dr u^T with the factors of both steps."""
    own, spec = kernel.own, kernel.spec
    row, column = mosaic.hidden_position(0), mosaic.hidden_position(1)
    of_rows = {0: frame.OF_QUERIES, 1: frame.OF_KEYS}
    for which, pairs in enumerate(of_values):
        factors = load(own.numbers.at[of_rows[which]], OF_ROWS)
        pairs = pairs * mosaic.in_columns(factors if which == 0 else -factors, C)
        if spec.normalize_qk:
            pairs = pairs * mosaic.in_rows(load(own.numbers.at[frame.OF_KEYS], OF_COLUMNS), C)
        if spec.decay is not None:
            upto_row, upto_column = (
                load(own.numbers.at[frame.LOG_DECAY], layout) for layout in (OF_ROWS, OF_COLUMNS)
            )
            between = mosaic.in_columns(upto_row, C) - mosaic.in_rows(upto_column, C)
            # Above the diagonal the factor would be infinite.
            pairs = pairs * jnp.exp2(jnp.minimum(between, 0.0))
        kept = row >= column if which == 0 else row > column
        tiles = (own.read, own.corrected)[which]
        for part, rounded in enumerate(frame.in_two_parts(jnp.where(kept, pairs, 0.0))):
            tiles.at[part][...] = rounded
    plgpu.commit_smem()
