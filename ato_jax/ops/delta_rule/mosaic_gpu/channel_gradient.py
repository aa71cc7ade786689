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

    exp2(L_C) S dS' + sum_s k_s exp2(L_C - L_s) u_s dS'^T                  S dS' by XLA

from the rounded u and dS' that dk" has, too: where decays are strong, most of S' dS' cancels
against the sums of dL, and so what rounding leaves off cancels with it.
Pairs go by levels, as `channel.py` explains: k and q with a level's factors are multiplied by the
level's pairs of F and N, and the result has the factors of its own steps.

k with its factors, u and F are in two parts of bfloat16, and so is dL, all else in one: where keys
are alike, dq and ddecay are small sums of large terms.

    MEMORY      loads dout, u, dr, S and dS' for 64 of v's columns after the other; then q, k, the
      |         log decays and the numbers of the chunk's steps
      |  chunks: loaded; consumed once the gradients are known
      |  columns: loaded; consumed once they are multiplied
      v
    WORKER (0 .. D / 64 - 1)    64 columns of dq and dk each; worker 0 forms F, the last one N
         pairs: all wait for F and N
         dots: all wait for each other's part of q . dq and k . dk, with `normalize_qk`
         done: all wait until F, N and dots may be overwritten

    symbol          shape       what it is
    q, k            [64, D]     a chunk's rows, in blocks of 64 columns
    decays          [64, D]     the log decays of its steps, likewise
    dout, u, dr     [64, 64]    a chunk's rows, 64 of their columns, u in two parts
    S, dS'          [D, 64]     transposed, [64, 64] for each block of D
    F, N            [64, 64]    as above, F in two parts
    rows            [64, 64]    k with a level's factors, in two parts, and q; then dL, dq and dk
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import (
    BF16,
    F32,
    HALF,
    OF_COLUMNS,
    OF_ROWS,
    Array,
    Buffer,
    Item,
    Ring,
    Role,
    Signal,
    load,
)
from ato_jax.ops.delta_rule.mosaic_gpu import channel, frame, gradient
from ato_jax.ops.delta_rule.mosaic_gpu.channel_solve import plus_nothing
from ato_jax.ops.delta_rule.mosaic_gpu.frame import PARTS, C, Config
from ato_jax.ops.delta_rule.mosaic_gpu.gradient import worker_role
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec

MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)
# Columns of a tile of float32 that is copied untiled, too.
OF_FLOATS = 32
QUERIES = PARTS  # the number of q's tile behind those of k


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    dout: Array  # [1, 64, 64]
    written: Array  # [PARTS, 64, 64] u
    dr: Array  # as dout
    states: Array  # [1, D / 64, 64, 64] S^T
    dstates: Array  # as states: dS'^T
    q: Array  # [D / 64, 64, 64]
    k: Array  # as q
    decays: Array  # as q, float16
    numbers: Array  # [NUMBERS, 64] float32
    last: Array  # [D] float32: the sums of exp2(L_C) S dS'
    read: Array  # [PARTS, 64, 64] F
    corrected: Array  # [64, 64] -N
    rows: Array  # [D / 64, PARTS + 1, 64, 64]
    ddecay: Array  # [D / 64, 2, 64, 32] float32
    of_steps: Array  # [2, 64] float32: dr . u and the diagonal of F
    dot_sums: Array  # [D / 64, 2, 64] float32: q . dq and k . dk
    chunks: Ring
    columns: Ring
    pairs: Signal
    dots: Signal
    done: Signal


OF_BETA, DIAGONAL = range(2)


def storage_of(spec: DeltaRuleSpec) -> Storage:
    blocks, tiling = frame.blocks_of_key(spec), frame.tiling(spec)
    worker = worker_role(blocks)
    dout, dr = (Buffer(tiling.of_rows(1, C, HALF)) for _ in range(2))
    written = Buffer(tiling.shared(PARTS, C, HALF), copies=PARTS)
    states = [Buffer(tiling.shared(1, blocks, HALF, HALF), copies=blocks) for _ in range(2)]
    q, k, decays = (
        Buffer(of.of_rows(blocks, C, HALF), copies=blocks)
        for of in (tiling, tiling, channel.tiling(spec))
    )
    numbers, last = Buffer(frame.numbers_in_memory()), Buffer(plgpu.SMEM((spec.D,), F32))
    of_floats = dataclasses.replace(tiling, dtype=F32)
    return Storage(
        dout=dout,
        written=written,
        dr=dr,
        states=states[0],
        dstates=states[1],
        q=q,
        k=k,
        decays=decays,
        numbers=numbers,
        last=last,
        read=Buffer(tiling.shared(PARTS, C, C)),
        corrected=Buffer(tiling.shared(C, C)),
        rows=Buffer(tiling.of_rows(blocks, PARTS + 1, C, HALF)),
        ddecay=Buffer(of_floats.of_rows(blocks, HALF // OF_FLOATS, C, OF_FLOATS)),
        of_steps=Buffer(plgpu.SMEM((2, C), F32)),
        dot_sums=Buffer(plgpu.SMEM((blocks, 2, C), F32)),
        chunks=Ring.of(1, (q, k, decays, numbers, last), (worker,)),
        columns=Ring.of(1, (dout, dr, written, *states), (worker,)),
        pairs=Signal((worker,)),
        dots=Signal((worker,)),
        done=Signal((worker,)),
    )


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The call, the blocks' work, the arrays in global memory, and the storage of a block."""

    spec: DeltaRuleSpec
    deal: mosaic.Deal
    own: Storage
    q: Any
    k: Any
    decays: Any
    dout: Any
    dr: Any
    written: Any
    states: Any
    dstates: Any
    numbers: Any
    last: Any
    dq: Any
    dk: Any
    ddecay: Any
    dbeta: Any

    @property
    def steps(self) -> int:
        """How often 64 of v's columns are loaded for a chunk."""
        return self.spec.V // HALF


class Gradients(NamedTuple):
    """The gradients of each value head, also where value heads share keys."""

    dq: jax.Array  # [B, T, H, D] in the layout, bfloat16
    dk: jax.Array  # as dq
    ddecay: jax.Array  # as dq, float32
    dbeta: jax.Array  # [B, H, chunks, 64] float32, times beta^2


def chunk_gradients(
    spec: DeltaRuleSpec, config: Config, arrays: dict[str, jax.Array]
) -> Gradients:
    """`arrays`: the inputs in global memory, by the names of `Kernel` from q to last."""
    chunks = frame.chunks_of(spec)
    deal = mosaic.Deal(spec.B, spec.H, chunks * C, C, chunks, config.solve_blocks)

    def bind(refs: Sequence[Any], own: Storage) -> Kernel:
        return Kernel(spec, deal, own, *refs)

    worker = worker_role(frame.blocks_of_key(spec))
    parts = (MEMORY, memory), (worker, work)
    program = mosaic.Program(mosaic.Roles((worker, MEMORY)), storage_of(spec), parts, bind)
    of_head = (*arrays["dout"].shape[:3], spec.D)
    types = (
        jax.ShapeDtypeStruct(of_head, BF16),
        jax.ShapeDtypeStruct(of_head, BF16),
        jax.ShapeDtypeStruct(of_head, F32),
        jax.ShapeDtypeStruct((spec.B, spec.H, chunks, C), F32),
    )
    names = [field.name for field in dataclasses.fields(Kernel)]
    given = tuple(arrays[name] for name in names[names.index("q") : names.index("dq")])
    name = frame.name_of("channel_gradients")
    return Gradients(*mosaic.launch(name, program, deal, types, given, own_barriers=True))


def memory(kernel: Kernel) -> None:
    """Loads chunks as slots come free."""
    kernel.deal.each(functools.partial(load_item, kernel))
    kernel.own.chunks.drain(kernel.deal.own)
    kernel.own.columns.drain(kernel.deal.own * kernel.steps)


def load_item(kernel: Kernel, item: Item) -> None:
    own, spec, tiling = kernel.own, kernel.spec, frame.tiling(kernel.spec)
    rows = pl.ds(item.piece * C, C)
    at = item.batch, item.head, item.piece
    key_head = lax.div(item.head, jnp.int32(spec.H // spec.G))
    blocks = range(frame.blocks_of_key(spec))

    def load_columns(block: Any, _: None) -> None:
        own.columns.acquire(item.number * kernel.steps + block)
        barrier = own.columns.produced.at[0]
        for ref, tiles in ((kernel.dout, own.dout), (kernel.dr, own.dr)):
            source = tiling.part(ref, item, rows, item.head, block)  # [64, 64]
            plgpu.copy_gmem_to_smem(source, mosaic.for_copy(tiles.at[0]), barrier)
        for part in range(PARTS):
            source = kernel.written.at[(*at, block, part)]  # [64, 64]
            plgpu.copy_gmem_to_smem(source, own.written.at[part], barrier)
        for ref, tiles in ((kernel.states, own.states), (kernel.dstates, own.dstates)):
            for of_key in blocks:
                source = ref.at[(*at, block, of_key)]  # [64, 64]
                plgpu.copy_gmem_to_smem(source, tiles.at[0, of_key], barrier)

    lax.fori_loop(0, kernel.steps, load_columns, None)
    # Behind the columns, which come free sooner.
    own.chunks.acquire(item.number)
    barrier = own.chunks.produced.at[0]
    for ref, tiles, head in (
        (kernel.q, own.q, key_head),
        (kernel.k, own.k, key_head),
        (kernel.decays, own.decays, item.head),
    ):
        for block in blocks:
            source = tiling.part(ref, item, rows, head, block)  # [64, 64]
            plgpu.copy_gmem_to_smem(source, mosaic.for_copy(tiles.at[block]), barrier)
    plgpu.copy_gmem_to_smem(kernel.numbers.at[at], own.numbers, barrier)
    plgpu.copy_gmem_to_smem(kernel.last.at[at], own.last, barrier)


def work(kernel: Kernel, number: int) -> None:
    kernel.deal.each(functools.partial(one_chunk, kernel, number))
    plgpu.wait_smem_to_gmem(0)


def one_chunk(kernel: Kernel, number: int, item: Item) -> None:
    own, spec = kernel.own, kernel.spec
    products = multiply_columns(kernel, number, item)
    own.chunks.produced.wait(0)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    publish_pairs(kernel, number, products)
    decays = [own.decays.at[number]]
    (from_start,) = channel.factors(channel.from_start(), decays)
    dq, recalled = products.read * from_start, -products.recalled * from_start
    (to_end,) = channel.factors(channel.to_end(), decays)
    written = products.written * to_end
    begin_decay(kernel, number, keys_of(kernel, number) * written)
    sums = dq, recalled, written
    own.pairs.arrive()
    own.pairs.wait()
    add = functools.partial(add_level, kernel, number, item)
    dq, recalled, written = lax.fori_loop(0, channel.LEVELS, add, sums)
    leave_decay(kernel, number, item, dq, recalled - written)
    of_pairs = mosaic.in_columns(load(own.of_steps.at[DIAGONAL], OF_ROWS), HALF)
    dq = (dq + of_pairs * keys_of(kernel, number)) * factor_of(kernel, frame.OF_QUERIES)
    dk = recalled + written + of_pairs * queries_of(kernel, number)
    if spec.normalize_qk:
        dk = dk * factor_of(kernel, frame.OF_KEYS)
        tiles = (own.q, dq), (own.k, dk)
        dots = [
            jnp.sum(load(rows.at[number]).astype(F32) * found, axis=1) for rows, found in tiles
        ]
        of_rows: Any = kernel  # which has the storage that `project` takes
        dq, dk = gradient.project(of_rows, number, (dq, dk), (dots[0], dots[1]))
    leave_rows(kernel, number, item, dq, dk)
    own.done.arrive()
    own.done.wait()


class Products(NamedTuple):
    """Sums over v's columns. `of_beta` is zeros in all workers but one."""

    read: jax.Array  # dout S^T, [64, 64]
    recalled: jax.Array  # dr S^T
    written: jax.Array  # u dS'^T
    pairs: list[jax.Array]  # of dout u^T and dr u^T those that the worker forms
    of_beta: jax.Array  # dr . u, [64]


def multiply_columns(kernel: Kernel, number: int, item: Item) -> Products:
    own = kernel.own
    formed = formed_by(kernel.spec, number)

    def one(block: Any, sums: list[Any]) -> list[Any]:
        own.columns.produced.wait(0)
        dout, dr = own.dout.at[0], own.dr.at[0]
        written = [own.written.at[part] for part in range(PARTS)]
        state, dstate = own.states.at[0, number], own.dstates.at[0, number]
        factors = [[(dout, state)], [(dr, state)], [(part, dstate) for part in written]]
        factors += [[((dout, dr)[which], part.T) for part in written] for which in formed]
        *found, of_beta = sums
        if number == 0:
            both = load(dr).astype(F32) * load(written[0]).astype(F32)
            of_beta = of_beta + jnp.sum(both, axis=1)
        pairs = zip(found, factors, strict=True)
        found = list(mosaic.multiply(*pairs))
        plgpu.commit_smem()  # what was read of the slot, ahead of the load that overwrites it
        own.columns.consumed.arrive(0)
        return [*found, of_beta]

    tiles = [mosaic.zeros(C, C) for _ in range(3 + len(formed))]
    nothing = jnp.sum(mosaic.zeros(C, C), axis=1)
    found = lax.fori_loop(0, kernel.steps, one, [*tiles, nothing])
    read, recalled, written, *pairs, of_beta = found
    return Products(read, recalled, written, pairs, of_beta)


def formed_by(spec: DeltaRuleSpec, number: int) -> list[int]:
    """Which of F (0) and N (1) a worker forms."""
    last = frame.blocks_of_key(spec) - 1
    return [which for which, worker in enumerate((0, last)) if worker == number]


def publish_pairs(kernel: Kernel, number: int, products: Products) -> None:
    """Stores F and -N, where this worker forms them: all pairs, of which a level takes its own."""
    own = kernel.own
    for which, pairs in zip(formed_by(kernel.spec, number), products.pairs, strict=True):
        if which == 1:
            own.corrected[...] = (-pairs).astype(BF16)
            continue
        diagonal = mosaic.hidden_position(0) == mosaic.hidden_position(1)
        own.of_steps.at[DIAGONAL][...] = jnp.sum(jnp.where(diagonal, pairs, 0.0), axis=1)
        own.of_steps.at[OF_BETA][...] = products.of_beta
        for part, rounded in enumerate(frame.in_two_parts(pairs)):
            own.read.at[part][...] = rounded
    plgpu.commit_smem()


def factor_of(kernel: Kernel, which: int) -> jax.Array:
    """[64, 64]: one of the numbers of each step, in its row."""
    return mosaic.in_columns(load(kernel.own.numbers.at[which], OF_ROWS), HALF)


def queries_of(kernel: Kernel, number: int) -> jax.Array:
    """64 columns of q with the factors of its rows, [64, 64]."""
    return load(kernel.own.q.at[number]).astype(F32) * factor_of(kernel, frame.OF_QUERIES)


def keys_of(kernel: Kernel, number: int) -> jax.Array:
    """64 columns of k, likewise."""
    k = load(kernel.own.k.at[number]).astype(F32)
    return k * factor_of(kernel, frame.OF_KEYS) if kernel.spec.normalize_qk else k


def add_level(
    kernel: Kernel,
    number: int,
    item: Item,
    level: Any,
    sums: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk' and dk" with those of the level's pairs."""
    own, (dq, recalled, written) = kernel.own, sums
    size = lax.shift_left(jnp.int32(1), jnp.int32(level))
    # So that nothing that is the same for all levels is held in registers over all of them.
    number_here = plus_nothing(jnp.int32(number), item.first_row + level)
    (factor,) = channel.factors(channel.to_middle(size), [own.decays.at[number_here]])
    rows: list[Any] = [own.rows.at[number_here, n] for n in range(PARTS + 1)]
    parts = frame.in_two_parts(keys_of(kernel, number) * factor)
    for to, part in zip(rows, parts, strict=False):
        to[...] = part
    rows[QUERIES][...] = mosaic.rounded(queries_of(kernel, number) * factor)
    plgpu.commit_smem()
    keys = rows[0], rows[1]
    here = channel.of_level(size)
    reads = tuple(of_pairs(here, own.read.at[part]) for part in range(PARTS))
    (found,) = mosaic.multiply((mosaic.zeros(C, HALF), frame.products((reads[0], reads[1]), keys)))
    dq = dq + found * factor
    corrected = of_pairs(here, own.corrected)
    (found,) = mosaic.multiply((mosaic.zeros(C, HALF), [(corrected, k) for k in keys]))
    recalled = recalled + found * factor
    here = channel.of_level(size, turned=True)
    products = [
        (of_pairs(here, own.read.at[part], turned=True), rows[QUERIES]) for part in range(PARTS)
    ]
    corrected = of_pairs(here, own.corrected, turned=True)
    products += [(corrected, k) for k in keys]
    (found,) = mosaic.multiply((mosaic.zeros(C, HALF), products))
    plgpu.commit_smem()  # ahead of what overwrites the rows
    return dq, recalled, written + found * factor


def of_pairs(here: jax.Array, tile: Any, turned: bool = False) -> jax.Array:
    """A matrix of pairs, or its transpose, and 0 in all other places than `here`."""
    pairs = mosaic.load_transposed(tile) if turned else load(tile)
    return jnp.where(here, pairs, jnp.zeros_like(pairs))


def begin_decay(kernel: Kernel, number: int, written: jax.Array) -> None:
    """Stores in each row of ddecay the sum of S' dS', of which `written` [64, 64] is k u dS'^T."""
    last = load(kernel.own.last.at[pl.ds(number * HALF, HALF)], OF_COLUMNS)
    # All rows, by a condition that no compiler knows to hold (hidden_position says why).
    found = sums_of_steps(kernel, number, mosaic.hidden_position(0) >= 0, written)
    for n, columns in enumerate(halves(found + mosaic.in_rows(last, C))):
        kernel.own.ddecay.at[number, n][...] = columns


def halves(tile: jax.Array) -> list[jax.Array]:
    """A tile [64, 64] as ddecay has it, [64, 32] each."""
    return [tile[:, first : first + OF_FLOATS] for first in range(0, HALF, OF_FLOATS)]


def sums_of_steps(kernel: Kernel, number: int, where: jax.Array, terms: jax.Array) -> jax.Array:
    """[64, 64]: in row t the sum of the rows s of `terms` for which `where` [t, s] holds."""
    rows: list[Any] = [kernel.own.rows.at[number, part] for part in range(PARTS)]
    for to, part in zip(rows, frame.in_two_parts(terms), strict=True):
        to[...] = part
    plgpu.commit_smem()
    weights = jnp.where(where, 1.0, 0.0).astype(BF16)
    (found,) = mosaic.multiply((mosaic.zeros(C, HALF), [(weights, part) for part in rows]))
    return found


def leave_decay(
    kernel: Kernel, number: int, item: Item, dq: jax.Array, difference: jax.Array
) -> None:
    """Adds to ddecay the sums of dL over each step and all later ones, and stores it. `difference`
    is dk' - dk". What pairs on the diagonal add to dL cancels, and is left out."""
    own, spec = kernel.own, kernel.spec
    of_sums = queries_of(kernel, number) * dq + keys_of(kernel, number) * difference
    later = mosaic.hidden_position(0) <= mosaic.hidden_position(1)
    for n, columns in enumerate(halves(sums_of_steps(kernel, number, later, of_sums))):
        tile = own.ddecay.at[number, n]
        tile[...] = load(tile) + columns
    plgpu.commit_smem()
    steps = pl.ds(item.piece * C, C)
    for n in range(HALF // OF_FLOATS):
        columns = pl.ds(number * HALF + n * OF_FLOATS, OF_FLOATS)
        at = (steps, item.head) if spec.layout == "bthd" else (item.head, steps)
        target = kernel.ddecay.at[(item.batch, *at, columns)]  # [64, 32]
        plgpu.copy_smem_to_gmem(mosaic.for_copy(own.ddecay.at[number, n]), target)


def leave_rows(kernel: Kernel, number: int, item: Item, dq: jax.Array, dk: jax.Array) -> None:
    own, tiling = kernel.own, frame.tiling(kernel.spec)
    tiles = own.rows.at[number, 0], own.rows.at[number, 1]
    for tile, found in zip(tiles, (dq, dk), strict=True):
        tile[...] = found.astype(BF16)
    plgpu.commit_smem()  # also what was read of the slot, ahead of the load that overwrites it
    own.chunks.consumed.arrive(0)
    for tile, ref in zip(tiles, (kernel.dq, kernel.dk), strict=True):
        target = tiling.part(ref, item, pl.ds(item.piece * C, C), item.head, number)
        plgpu.copy_smem_to_gmem(mosaic.for_copy(tile), target)
    if number == 0:
        target = kernel.dbeta.at[item.batch, item.head, item.piece]
        plgpu.copy_smem_to_gmem(own.of_steps.at[OF_BETA], target)
