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
besides. A step's decay is part of L from the step on, so its gradient is a sum of dL, which XLA
forms. u_t / beta_t is the error that step t corrects, so nothing has to be formed again.

No product's result goes on to another chunk, so factors in one part of bfloat16 are exact enough,
but for F, in two: where keys are alike, dq is a small sum of large terms. Rounded F and N enter dq
and dk' as they enter dk", so that what rounding leaves off cancels in the sums of dL.

With `normalize_qk` the unit rows' gradients are projected: those of q get - q (q . dq) / |q|^2.

    MEMORY      loads dout, u, dr, S and dS' for 64 of v's columns after the other; then q, k and
      |         the numbers of the chunk's steps
      |  chunks: loaded; consumed once the gradients are known
      |  columns: loaded; consumed once they are multiplied
      v
    WORKER (0 .. D / 64 - 1)    64 columns of dq and dk each; worker 0 forms F, the last one N
         pairs: all wait for F and N
         dots: all wait for each other's part of q . dq and k . dk, with `normalize_qk`
         done: all wait until F, N and dots may be overwritten

    symbol          shape       what it is
    q, k            [64, D]     a chunk's rows, in blocks of 64 columns
    dout, u, dr     [64, 64]    a chunk's rows, 64 of their columns
    S, dS'          [D, 64]     transposed, [64, 64] for each block of D
    F, N            [64, 64]    as above, F in two parts
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
from ato_jax.ops.delta_rule.mosaic_gpu import frame
from ato_jax.ops.delta_rule.mosaic_gpu.frame import C, Config
from ato_jax.ops.delta_rule.mosaic_gpu.walk import Numbers
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec

STAGES = 2
MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)
# Sums for each step of a chunk that a worker leaves: dL without the last step's own part; what,
# added up, is that part; dbeta.
OF_LOG_DECAY, OF_LAST, OF_BETA = range(3)
SUMS = 3


@functools.cache
def worker_role(blocks: int) -> Role:
    return Role("worker", mosaic.workers_registers(blocks, frame.MOST_REGISTERS), blocks, True)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    dout: Array  # [STAGES, 64, 64]
    written: Array  # as dout: u
    dr: Array  # as dout
    states: Array  # [STAGES, D / 64, 64, 64] S^T
    dstates: Array  # as states: dS'^T
    q: Array  # [D / 64, 64, 64]
    k: Array  # as q
    numbers: Array  # [NUMBERS, 64] float32
    read: Array  # [PARTS, 64, 64] F
    corrected: Array  # [64, 64] -N
    dq: Array  # [D / 64, 64, 64]
    dk: Array  # as dq
    sums: Array  # [D / 64, SUMS, 64] float32
    dot_sums: Array  # [D / 64, 2, 64] float32: q . dq and k . dk
    chunks: Ring
    columns: Ring
    pairs: Signal
    dots: Signal
    done: Signal


def storage_of(spec: DeltaRuleSpec) -> Storage:
    blocks, tiling = frame.blocks_of_key(spec), frame.tiling(spec)
    worker = worker_role(blocks)
    rows = [Buffer(tiling.of_rows(STAGES, C, HALF)) for _ in range(2)]
    written = Buffer(tiling.shared(STAGES, C, HALF))
    states = [Buffer(tiling.shared(STAGES, blocks, HALF, HALF), copies=blocks) for _ in range(2)]
    q, k = (Buffer(tiling.of_rows(blocks, C, HALF), copies=blocks) for _ in range(2))
    numbers = Buffer(frame.numbers_in_memory())
    return Storage(
        dout=rows[0],
        written=written,
        dr=rows[1],
        states=states[0],
        dstates=states[1],
        q=q,
        k=k,
        numbers=numbers,
        read=Buffer(tiling.shared(frame.PARTS, C, C)),
        corrected=Buffer(tiling.shared(C, C)),
        dq=Buffer(tiling.of_rows(blocks, C, HALF)),
        dk=Buffer(tiling.of_rows(blocks, C, HALF)),
        sums=Buffer(plgpu.SMEM((blocks, SUMS, C), F32)),
        dot_sums=Buffer(plgpu.SMEM((blocks, 2, C), F32)),
        chunks=Ring.of(1, (q, k, numbers), (worker,)),
        columns=Ring.of(STAGES, (*rows, written, *states), (worker,)),
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
    dout: Any
    dr: Any
    written: Any
    states: Any
    dstates: Any
    numbers: Any
    dq: Any
    dk: Any
    sums: Any

    @property
    def steps(self) -> int:
        """How often 64 of v's columns are loaded for a chunk."""
        return self.spec.V // HALF


class Gradients(NamedTuple):
    """The gradients of each value head, also where value heads share keys."""

    dq: jax.Array  # [B, T, H, D] in the layout, bfloat16
    dk: jax.Array  # as dq
    sums: jax.Array  # [B, H, chunks, D / 64, SUMS, 64] float32


def chunk_gradients(
    spec: DeltaRuleSpec, config: Config, arrays: dict[str, jax.Array]
) -> Gradients:
    """`arrays`: the inputs in global memory, by the names of `Kernel` from q to numbers."""
    chunks, blocks = frame.chunks_of(spec), frame.blocks_of_key(spec)
    deal = mosaic.Deal(spec.B, spec.H, chunks * C, C, chunks, config.solve_blocks)

    def bind(refs: Sequence[Any], own: Storage) -> Kernel:
        return Kernel(spec, deal, own, *refs)

    worker = worker_role(blocks)
    parts = (MEMORY, memory), (worker, work)
    program = mosaic.Program(mosaic.Roles((worker, MEMORY)), storage_of(spec), parts, bind)
    dout = arrays["dout"]
    of_head = jax.ShapeDtypeStruct((*dout.shape[:3], spec.D), BF16)
    sums = jax.ShapeDtypeStruct((spec.B, spec.H, chunks, blocks, SUMS, C), F32)
    names = [field.name for field in dataclasses.fields(Kernel)]
    given = tuple(arrays[name] for name in names[names.index("q") : names.index("dq")])
    found = mosaic.launch(
        frame.name_of("gradients"),
        program,
        deal,
        (of_head, of_head, sums),
        given,
        own_barriers=True,
    )
    return Gradients(*found)


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
    blocks = frame.blocks_of_key(spec)

    def load_columns(block: Any, _: None) -> None:
        step = item.number * kernel.steps + block
        slot = own.columns.slot(step)
        own.columns.acquire(step)
        barrier = own.columns.produced.at[slot]
        for ref, tiles in ((kernel.dout, own.dout), (kernel.dr, own.dr)):
            source = tiling.part(ref, item, rows, item.head, block)  # [64, 64]
            plgpu.copy_gmem_to_smem(source, mosaic.for_copy(tiles.at[slot]), barrier)
        source = kernel.written.at[(*at, block)]  # [64, 64]
        plgpu.copy_gmem_to_smem(source, own.written.at[slot], barrier)
        for ref, tiles in ((kernel.states, own.states), (kernel.dstates, own.dstates)):
            for of_key in range(blocks):
                source = ref.at[(*at, block, of_key)]  # [64, 64]
                plgpu.copy_gmem_to_smem(source, tiles.at[slot, of_key], barrier)

    lax.fori_loop(0, kernel.steps, load_columns, None)
    # Behind the columns, which come free sooner.
    own.chunks.acquire(item.number)
    barrier = own.chunks.produced.at[0]
    for ref, tiles in ((kernel.q, own.q), (kernel.k, own.k)):
        for block in range(blocks):
            source = tiling.part(ref, item, rows, key_head, block)  # [64, 64]
            plgpu.copy_gmem_to_smem(source, mosaic.for_copy(tiles.at[block]), barrier)
    plgpu.copy_gmem_to_smem(kernel.numbers.at[at], own.numbers, barrier)


def work(kernel: Kernel, number: int) -> None:
    kernel.deal.each(functools.partial(one_chunk, kernel, number))
    plgpu.wait_smem_to_gmem(0)


def one_chunk(kernel: Kernel, number: int, item: Item) -> None:
    own, spec = kernel.own, kernel.spec
    products = multiply_columns(kernel, number, item)
    own.chunks.produced.wait(0)
    numbers = Numbers(spec, own.numbers, OF_ROWS)
    publish_pairs(kernel, number, products)
    q, k = own.q.at[number], own.k.at[number]
    dq = numbers.times(products.read, numbers.of_read())
    recalled = numbers.times(-products.recalled, numbers.of_recalled())
    written = numbers.times(products.written, numbers.of_written())
    last = _dot(k, written)
    if spec.decay is not None:
        last = last + products.kept * numbers.kept()
    own.pairs.arrive()
    own.pairs.wait()
    reads, corrected = [own.read.at[part] for part in range(frame.PARTS)], own.corrected
    dq, recalled, written = mosaic.multiply(
        (dq, [(read, k) for read in reads]),
        (recalled, [(corrected, k)]),
        (written, [*((read.T, q) for read in reads), (corrected.T, k)]),
    )
    dk = recalled + written
    of_queries = _dot(q, dq)
    of_recalled, of_written = _dot(k, recalled), _dot(k, written)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    own.sums.at[number, OF_LOG_DECAY][...] = of_queries + of_recalled - of_written
    own.sums.at[number, OF_LAST][...] = last
    own.sums.at[number, OF_BETA][...] = products.of_beta
    if spec.normalize_qk:
        dots = of_queries, of_recalled + of_written
        dq, dk = project(kernel, number, (dq, dk), dots)
    own.dq.at[number][...] = dq.astype(BF16)
    own.dk.at[number][...] = dk.astype(BF16)
    plgpu.commit_smem()  # also what was read of the slot, ahead of the load that overwrites it
    own.chunks.consumed.arrive(0)
    own.done.arrive()
    tiling = frame.tiling(spec)
    for ref, tiles in ((kernel.dq, own.dq), (kernel.dk, own.dk)):
        target = tiling.part(ref, item, pl.ds(item.piece * C, C), item.head, number)
        plgpu.copy_smem_to_gmem(mosaic.for_copy(tiles.at[number]), target)
    target = kernel.sums.at[item.batch, item.head, item.piece, number]
    plgpu.copy_smem_to_gmem(own.sums.at[number], target)
    own.done.wait()


class Products(NamedTuple):
    """Sums over v's columns. `of_beta` is zeros in all workers but one."""

    read: jax.Array  # dout S^T, [64, 64]
    recalled: jax.Array  # dr S^T
    written: jax.Array  # u dS'^T
    pairs: list[jax.Array]  # of dout u^T and dr u^T those that the worker forms
    of_beta: jax.Array  # dr . u, [64]
    kept: jax.Array  # S . dS', [64]


def multiply_columns(kernel: Kernel, number: int, item: Item) -> Products:
    own, spec = kernel.own, kernel.spec
    formed = _formed_by(spec, number)

    def one(block: Any, sums: list[Any]) -> list[Any]:
        slot = own.columns.slot(item.number * kernel.steps + block)
        own.columns.produced.wait(slot)
        dout, written, dr = (tiles.at[slot] for tiles in (own.dout, own.written, own.dr))
        state, dstate = own.states.at[slot, number], own.dstates.at[slot, number]
        factors = [(dout, state), (dr, state), (written, dstate)]
        factors += [((dout, dr)[which], written.T) for which in formed]
        *found, of_beta, kept = sums
        if number == 0:
            of_beta = of_beta + _dot(dr, load(written).astype(F32))
        if spec.decay is not None:
            kept = kept + _dot(state, load(dstate).astype(F32))
        pairs = zip(found, factors, strict=True)
        found = list(mosaic.multiply(*((sum, [pair]) for sum, pair in pairs)))
        plgpu.commit_smem()  # what was read of the slot, ahead of the load that overwrites it
        own.columns.consumed.arrive(slot)
        return [*found, of_beta, kept]

    tiles = [mosaic.zeros(C, C) for _ in range(3 + len(formed))]
    nothing = [jnp.sum(mosaic.zeros(C, C), axis=1) for _ in range(2)]
    found = lax.fori_loop(0, kernel.steps, one, [*tiles, *nothing])
    read, recalled, written, *formed_pairs, of_beta, kept = found
    return Products(read, recalled, written, formed_pairs, of_beta, kept)


def _formed_by(spec: DeltaRuleSpec, number: int) -> list[int]:
    """Which of F (0) and N (1) a worker forms."""
    last = frame.blocks_of_key(spec) - 1
    return [which for which, worker in enumerate((0, last)) if worker == number]


def publish_pairs(kernel: Kernel, number: int, products: Products) -> None:
    """Stores F and -N, where this worker forms them, with the factors of both steps."""
    own, spec = kernel.own, kernel.spec
    row, column = mosaic.hidden_position(0), mosaic.hidden_position(1)
    of_rows = {0: frame.OF_QUERIES, 1: frame.OF_KEYS}
    for which, pairs in zip(_formed_by(spec, number), products.pairs, strict=True):
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
        pairs = jnp.where(kept, pairs, 0.0)
        if which == 1:
            own.corrected[...] = pairs.astype(BF16)
            continue
        for part, rounded in enumerate(frame.in_two_parts(pairs)):
            own.read.at[part][...] = rounded
    plgpu.commit_smem()


def project(
    kernel: Kernel,
    number: int,
    gradients: tuple[jax.Array, jax.Array],
    dots: tuple[jax.Array, jax.Array],
) -> list[jax.Array]:
    """dq and dk without what they have along q and k; `dots` are the products of each row with
    its gradient, over this worker's columns."""
    own, spec = kernel.own, kernel.spec
    for which, dot in enumerate(dots):
        own.dot_sums.at[number, which][...] = dot
    plgpu.commit_smem()
    own.dots.arrive()
    own.dots.wait()
    found = []
    of_numbers = (frame.OF_QUERIES, 1 / spec.scale if spec.scale else 0.0), (frame.OF_KEYS, 1.0)
    for which, (gradient, rows) in enumerate(zip(gradients, (own.q, own.k), strict=True)):
        first, *others = (
            load(own.dot_sums.at[n, which], OF_ROWS) for n in range(frame.blocks_of_key(spec))
        )
        dot = sum(others, start=first)
        of_row, unscaled = of_numbers[which]
        inverse_length = load(own.numbers.at[of_row], OF_ROWS) * unscaled
        along = mosaic.in_columns(dot * inverse_length * inverse_length, HALF)
        found.append(gradient - along * load(rows.at[number]).astype(F32))
    return found


def _dot(tile: Any, x: jax.Array) -> jax.Array:
    """The products of a tile's rows with those of x, [64]."""
    return jnp.sum(load(tile).astype(F32) * x, axis=1)
