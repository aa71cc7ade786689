"""The gradients of a chunk's q, k, beta and decays, with a decay for each channel of the key.

All chunks are independent. With the letters of `gradient.py`, but F and N without decays, q_t with
its factor and the scale, and e(s..t) [D] = exp2(L_t - L_s):

    F[t, s] = dout_t . u_s                      s <= t, else 0
    N[t, s] = dr_t . u_s                        s < t, else 0
    dq_t    = exp2(L_t) dout_t S^T + sum_s F[t, s] e(s..t) k_s
    dk'_t   = -exp2(L_t) dr_t S^T - sum_s N[t, s] e(s..t) k_s                    as k_t is recalled
    dk"_s   = exp2(L_C - L_s) u_s dS'^T + sum_t e(s..t) (F[t, s] q_t - N[t, s] k_t)
                                                                                 as k_s is written
    dbeta_t = dr_t . u_t / beta_t^2
    dL_t    = q_t dq_t + k_t dk'_t - k_t dk"_t                                   channel by channel

A step's decay is part of L from the step on, and of the state that the chunk ends with. So its
gradient is the sum of dL over it and all later steps, and of S' dS' over v's columns. The latter is
formed as

    exp2(L_C) S dS' + sum_s k_s exp2(L_C - L_s) u_s dS'^T

from the rounded u and dS' that dk" has, too: where decays are strong, most of S' dS' cancels
against the sums of dL, and so what rounding leaves off cancels with it.
Pairs go by levels, as `channel.py` explains: k and q with a level's factors are multiplied by the
level's pairs of F and N, and the result has the factors of its own steps.

k with its factors, u and F are in two parts of bfloat16, and so is dL: where keys are alike, dq and
ddecay are small sums of large terms. N is in two parts, too, where D = 64. All else is in one. So
dk" has q rounded, level by level, and dL is summed up beside it with the same rounded q.

`chunk_gradient.py` has its roles and what it loads; beside that it has

    symbol          shape       what it is
    decays          [64, D]     the log decays of a chunk's steps, in blocks of 64 columns
    rows            [64, 64]    k with a level's factors, in two parts, and q; then dL, dq and dk
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, OF_COLUMNS, OF_ROWS, Buffer, Item, load
from ato_jax.ops.delta_rule.mosaic_gpu import channel, chunk_gradient, frame
from ato_jax.ops.delta_rule.mosaic_gpu.channel import Level
from ato_jax.ops.delta_rule.mosaic_gpu.chunk_gradient import Columns, Factors, Kernel, Storage, dot
from ato_jax.ops.delta_rule.mosaic_gpu.frame import PARTS, C, Config
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec

STAGES = 1
F, N = range(2)  # the numbers of both matrices, and with two workers of the worker that forms each
# Columns of a tile of float32 that is copied untiled, too.
OF_FLOATS = 32
QUERIES = PARTS  # the number of q's tile behind those of k


def parts_of_corrected(spec: DeltaRuleSpec) -> int:
    """In how many parts N is: beside keys of 128 columns shared memory has no room for two."""
    return PARTS if frame.blocks_of_key(spec) == 1 else 1


def storage_of(spec: DeltaRuleSpec) -> Storage:
    blocks, tiling = frame.blocks_of_key(spec), frame.tiling(spec)
    loaded = {
        "decays": Buffer(channel.tiling(spec).of_rows(blocks, C, HALF), copies=blocks),
        "kept": Buffer(plgpu.SMEM((spec.D,), F32)),
        "numbers": Buffer(frame.numbers_in_memory(count=frame.NUMBERS_OF_CHANNELS)),
    }
    of_floats = dataclasses.replace(tiling, dtype=F32)
    made = {
        "rows": Buffer(tiling.of_rows(blocks, PARTS + 1, C, HALF)),
        "ddecay": Buffer(of_floats.of_rows(blocks, HALF // OF_FLOATS, C, OF_FLOATS)),
        "of_steps": Buffer(plgpu.SMEM((2, C), F32)),
        "formed": Buffer(tiling.shared(PARTS + parts_of_corrected(spec), C, C)),
    }
    return chunk_gradient.storage_of(spec, STAGES, loaded, made)


class Gradients(NamedTuple):
    """The gradients of each value head, also where value heads share keys."""

    dq: jax.Array  # [B, T, H, D] in the layout, bfloat16
    dk: jax.Array  # as dq
    ddecay: jax.Array  # as dq, float32
    dbeta: jax.Array  # [B, H, chunks, 64] float32, times beta^2


def chunk_gradients(spec: DeltaRuleSpec, config: Config, arrays: dict[str, jax.Array]) -> Gradients:
    """`arrays`: the inputs in global memory, by the names of `Kernel`."""
    of_head = (*arrays["dout"].shape[:3], spec.D)
    types = {
        "ddecay": jax.ShapeDtypeStruct(of_head, F32),
        "dbeta": jax.ShapeDtypeStruct((spec.B, spec.H, frame.chunks_of(spec), C), F32),
    }
    found = chunk_gradient.launch(
        "channel_gradients", spec, config, storage_of(spec), arrays, types, one_chunk
    )
    return Gradients(**found)


def one_chunk(kernel: Kernel, number: Any, item: Item) -> None:
    own, spec = kernel.own, kernel.spec
    # Addresses were to be computed for each chunk by this, but the assembler of JAX 0.11.2 still
    # computes some 80 ahead of the loop over chunks, and spills them.
    number = mosaic.plus_zero(jnp.int32(number), item.first_row)
    formed = formed_by(kernel, number)

    def factors_of(columns: Columns) -> list[Factors]:
        of_states = chunk_gradient.of_states(spec, number, columns)
        return of_states + [
            [(columns.cotangents.at[which], part.T) for part in columns.written] for which in formed
        ]

    def dots_of(columns: Columns) -> list[jax.Array]:
        """S dS', which is to be summed up over its rows."""
        of_states = load(columns.states.at[number]).astype(F32)
        return [of_states * load(columns.dstates.at[number]).astype(F32)]

    (read, recalled, written, *pairs), (of_states,) = chunk_gradient.multiply_columns(
        kernel, item, (3 + len(formed), 0, 1), factors_of, dots_of
    )
    own.chunks.produced.wait(0)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for which, found in zip(formed, pairs, strict=True):
        publish_pairs(kernel, which, found)
    plgpu.commit_smem()
    decays = [own.decays.at[number]]
    (from_start,) = channel.factors(channel.from_start(), decays)
    dq, recalled = read * from_start, -recalled * from_start
    (to_end,) = channel.factors(channel.to_end(), decays)
    written = written * to_end
    of_last = of_states * mosaic.in_rows(
        load(own.kept.at[pl.ds(number * HALF, HALF)], OF_COLUMNS), C
    )
    begin_decay(kernel, number, of_last + keys_of(kernel, number) * written)
    of_steps = queries_of(kernel, number) * dq + keys_of(kernel, number) * (recalled - written)
    sums = dq, recalled + written, of_steps
    own.pairs.arrive()
    own.pairs.wait()
    add = functools.partial(add_level, kernel, number, item)
    dq, dk, of_steps = channel.over_levels(own.numbers[frame.ONE_LEVEL, 0], add, sums)
    leave_decay(kernel, number, item, of_steps)
    of_pairs = mosaic.in_columns(load(own.of_steps.at[F], OF_ROWS), HALF)
    dq = (dq + of_pairs * keys_of(kernel, number)) * factor_of(kernel, frame.OF_QUERIES)
    dk = dk + of_pairs * queries_of(kernel, number)
    if spec.normalize_qk:
        dk = dk * factor_of(kernel, frame.OF_KEYS)
        dots = dot(own.q.at[number], dq), dot(own.k.at[number], dk)
        chunk_gradient.publish_dots(kernel, number, dots)
        plgpu.commit_smem()
        own.dots.arrive()
        own.dots.wait()
        dq, dk = chunk_gradient.project(kernel, number, (dq, dk))
    leave_rows(kernel, number, item, dq, dk)
    own.done.arrive()
    own.done.wait()


def formed_by(kernel: Kernel, number: Any) -> list[Any]:
    """Which of F and N a worker forms: both, where there is one worker."""
    return [F, N] if frame.blocks_of_key(kernel.spec) == 1 else [number]


def publish_pairs(kernel: Kernel, which: Any, pairs: jax.Array) -> None:
    """Stores F or -N, all pairs below the diagonal, of which a level takes its own; and the
    diagonal. That of N is dr . u, of which dbeta is made."""
    own = kernel.own
    row, column = mosaic.hidden_position(0), mosaic.hidden_position(1)
    diagonal = jnp.where(row == column, pairs, 0.0)
    own.of_steps.at[which][...] = jnp.sum(diagonal, axis=1)
    sign = jnp.where(jnp.int32(which) == F, jnp.float32(1), jnp.float32(-1))
    first, rest = frame.in_two_parts(jnp.where(row > column, pairs, 0.0) * sign)
    place = which * PARTS
    own.formed.at[place][...] = first

    def store_rest() -> None:
        own.formed.at[place + 1][...] = rest

    if parts_of_corrected(kernel.spec) == PARTS:
        store_rest()
    else:
        pl.when(which == F)(store_rest)


def factor_of(kernel: Kernel, which: int) -> jax.Array:
    """[64, 64]: one of the numbers of each step, in its row."""
    return mosaic.in_columns(load(kernel.own.numbers.at[which], OF_ROWS), HALF)


def queries_of(kernel: Kernel, number: Any) -> jax.Array:
    """64 columns of q with the factors of its rows, [64, 64]."""
    return load(kernel.own.q.at[number]).astype(F32) * factor_of(kernel, frame.OF_QUERIES)


def keys_of(kernel: Kernel, number: Any) -> jax.Array:
    """64 columns of k, likewise."""
    k = load(kernel.own.k.at[number]).astype(F32)
    return k * factor_of(kernel, frame.OF_KEYS) if kernel.spec.normalize_qk else k


def add_level(
    kernel: Kernel,
    number: Any,
    item: Item,
    level: Level,
    sums: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and dL with those of the level's pairs. dL has q as dk" has it, rounded: what a pair
    adds to both of its steps then cancels in the sums over both."""
    own, (dq, dk, of_steps) = kernel.own, sums
    # So that nothing that is the same for all levels is held in registers over all of them.
    number = mosaic.plus_zero(number, item.first_row + level.size)
    decays = [own.decays.at[number]]

    def exponents() -> jax.Array:
        return channel.exponents(channel.to_middle(level.size), decays)[0]

    rows: list[Any] = [own.rows.at[number, n] for n in range(PARTS + 1)]

    def store_keys(factor: jax.Array) -> None:
        parts = frame.in_two_parts(keys_of(kernel, number) * factor)
        for to, part in zip(rows, parts, strict=False):
            to[...] = part

    found = exponents()
    store_keys(level.is_read(found))
    reads = level.reads(found)
    rows[QUERIES][...] = mosaic.rounded(queries_of(kernel, number) * reads)
    plgpu.commit_smem()
    keys = rows[0], rows[1]
    here = None if level.has_all else level.pairs()
    pairs = tuple(of_pairs(here, own.formed.at[part]) for part in range(PARTS))
    (found,) = mosaic.multiply((mosaic.zeros(C, HALF), frame.products((pairs[0], pairs[1]), keys)))
    dq = dq + found * reads
    of_steps = of_steps + load(rows[QUERIES]).astype(F32) * found
    (found,) = mosaic.multiply((mosaic.zeros(C, HALF), factors_of_corrected(kernel, here, keys)))
    dk = dk + found * reads
    of_steps = of_steps + keys_of(kernel, number) * (found * reads)
    plgpu.commit_smem()  # ahead of what overwrites the rows
    store_keys(reads)
    plgpu.commit_smem()
    here = None if level.has_all else level.pairs(turned=True)
    products = [
        (of_pairs(here, own.formed.at[part], turned=True), rows[QUERIES]) for part in range(PARTS)
    ]
    products += factors_of_corrected(kernel, here, keys, turned=True)
    (found,) = mosaic.multiply((mosaic.zeros(C, HALF), products))
    plgpu.commit_smem()  # ahead of what overwrites the rows
    found = found * level.is_read(exponents())
    return dq, dk + found, of_steps - keys_of(kernel, number) * found


def factors_of_corrected(
    kernel: Kernel, here: jax.Array | None, keys: tuple[Any, Any], turned: bool = False
) -> list[tuple[jax.Array, Any]]:
    """Factors of -N @ k, or of its transpose, for the pairs that are `here`."""
    first, *rest = (
        of_pairs(here, kernel.own.formed.at[PARTS + part], turned)
        for part in range(parts_of_corrected(kernel.spec))
    )
    return [*((first, k) for k in keys), *((part, keys[0]) for part in rest)]


def of_pairs(here: jax.Array | None, tile: Any, turned: bool = False) -> jax.Array:
    """A matrix of pairs, or its transpose; with `here`, 0 in all other places."""
    pairs = mosaic.load_transposed(tile) if turned else load(tile)
    return pairs if here is None else jnp.where(here, pairs, jnp.zeros_like(pairs))


def begin_decay(kernel: Kernel, number: Any, of_last: jax.Array) -> None:
    """Stores in each row of ddecay the sum of S' dS', that of the rows of `of_last` [64, 64]."""
    # All rows, by a condition that no compiler knows to hold (hidden_position says why).
    found = sums_of_steps(kernel, number, mosaic.hidden_position(0) >= 0, of_last)
    for n, columns in enumerate(halves(found)):
        kernel.own.ddecay.at[number, n][...] = columns
    plgpu.commit_smem()  # ahead of what overwrites the rows


def halves(tile: jax.Array) -> list[jax.Array]:
    """A tile [64, 64] as ddecay has it, [64, 32] each."""
    return [tile[:, first : first + OF_FLOATS] for first in range(0, HALF, OF_FLOATS)]


def sums_of_steps(kernel: Kernel, number: Any, where: jax.Array, terms: jax.Array) -> jax.Array:
    """[64, 64]: in row t the sum of the rows s of `terms` for which `where` [t, s] holds."""
    rows: list[Any] = [kernel.own.rows.at[number, part] for part in range(PARTS)]
    for to, part in zip(rows, frame.in_two_parts(terms), strict=True):
        to[...] = part
    plgpu.commit_smem()
    weights = jnp.where(where, 1.0, 0.0).astype(BF16)
    (found,) = mosaic.multiply((mosaic.zeros(C, HALF), [(weights, part) for part in rows]))
    return found


def leave_decay(kernel: Kernel, number: Any, item: Item, of_steps: jax.Array) -> None:
    """Adds to ddecay the sums of dL, `of_steps`, over each step and all later ones, and stores it,
    but 0 for decays of `LEAST_DECAY` and less. What pairs on the diagonal add to dL cancels, and is
    left out."""
    own, spec = kernel.own, kernel.spec
    later = mosaic.hidden_position(0) <= mosaic.hidden_position(1)
    found = sums_of_steps(kernel, number, later, of_steps)
    decays = load(own.decays.at[number]).astype(F32)
    above = jnp.where(decays > channel.LEAST, 1.0, 0.0)
    for n, (half, is_above) in enumerate(zip(halves(found), halves(above), strict=True)):
        tile = own.ddecay.at[number, n]
        tile[...] = (load(tile) + half) * is_above
    plgpu.commit_smem()
    steps = pl.ds(item.piece * C, C)
    for n in range(HALF // OF_FLOATS):
        columns = pl.ds(number * HALF + n * OF_FLOATS, OF_FLOATS)
        at = (steps, item.head) if spec.layout == "bthd" else (item.head, steps)
        target = kernel.ddecay.at[(item.batch, *at, columns)]  # [64, 32]
        plgpu.copy_smem_to_gmem(mosaic.for_copy(own.ddecay.at[number, n]), target)


def leave_rows(kernel: Kernel, number: Any, item: Item, dq: jax.Array, dk: jax.Array) -> None:
    own = kernel.own
    tiles = own.rows.at[number, 0], own.rows.at[number, 1]
    for tile, found in zip(tiles, (dq, dk), strict=True):
        tile[...] = found.astype(BF16)
    plgpu.commit_smem()  # also what was read of the slot, ahead of the load that overwrites it
    own.chunks.consumed.arrive(0)
    kernel.store_rows(item, number, *tiles)

    @pl.when(number == 0)
    def _() -> None:
        target = kernel.dbeta.at[item.batch, item.head, item.piece]
        plgpu.copy_smem_to_gmem(own.of_steps.at[N], target)
