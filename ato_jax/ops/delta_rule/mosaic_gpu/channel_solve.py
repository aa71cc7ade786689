"""The part of each chunk that no state enters, with a decay per channel.

All chunks are independent. As in `solve.py`, whose inverse it takes, but with pairs by levels, as
`channel.py` explains:

    A[t, s] = beta_t k_t . k_s decayed              s < t, else 0
    X       = (I + A)^-1 diag(beta)
    P[t, s] = scale * q_t . k_s decayed             s <= t, else 0

and with the rows by which the walk reads the state and writes to it, since a factor per channel
cannot follow a product:

    q^_t = scale * exp2(L_t) q_t        k^_t = exp2(L_t) k_t        k~_t = exp2(L_C - L_t) k_t

    MEMORY (n)       loads a chunk of q, k and log decays, and the numbers of its steps, for each
      |              WORKER
      |  chunks: loaded; consumed once all but the inverse is known
      v
    WORKER (0 .. n - 1)    a chunk each

    symbol          shape         what it is
    q, k            [64, D]       a chunk's rows, in blocks of 64 columns
    decays          [64, D]       the log decays of its steps, likewise
    rows            [64, D]       k with a level's factors, in two parts; then what is stored
    A, X            [64, 64]      as in `solve.py`
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
from ato_jax.mosaic import BF16, F32, HALF, OF_COLUMNS, OF_ROWS, Array, Buffer, Item, Ring, load
from ato_jax.ops.delta_rule.mosaic_gpu import channel, frame, solve
from ato_jax.ops.delta_rule.mosaic_gpu.channel import Level
from ato_jax.ops.delta_rule.mosaic_gpu.frame import MEMORY, PARTS, C, Config
from ato_jax.ops.delta_rule.mosaic_gpu.solve import BLOCK
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec, Inputs

WORKERS = 2
WORKER = frame.worker_role(WORKERS)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    q: Array  # [WORKERS, D / 64, 64, 64]
    k: Array  # as q
    decays: Array  # as q, float16
    numbers: Array  # [WORKERS, NUMBERS_OF_CHANNELS, 64] float32
    rows: Array  # [WORKERS, D / 64, PARTS, 64, 64]
    lower: Array  # [WORKERS, PARTS, 4, 64, 16] A
    inverse: Array  # [WORKERS, PARTS, 4, 64, 16] X
    chunks: Ring


def storage_of(spec: DeltaRuleSpec) -> Storage:
    blocks, tiling = frame.blocks_of_key(spec), frame.tiling(spec)
    copies = WORKERS * blocks
    q, k, decays = (
        Buffer(of.of_rows(WORKERS, blocks, C, HALF), copies=copies)
        for of in (tiling, tiling, channel.tiling(spec))
    )
    numbers = Buffer(
        frame.numbers_in_memory(WORKERS, count=frame.NUMBERS_OF_CHANNELS), copies=WORKERS
    )
    return Storage(
        q=q,
        k=k,
        decays=decays,
        numbers=numbers,
        rows=Buffer(tiling.shared(WORKERS, blocks, PARTS, C, HALF)),
        lower=Buffer(solve.column_blocks(WORKERS)),
        inverse=Buffer(solve.column_blocks(WORKERS)),
        chunks=Ring.of(1, (q, k, decays, numbers), (WORKER,)),
    )


class Solved(NamedTuple):
    """The arrays that `solve_chunks` leaves for the walks, with an entry for each chunk. The number
    of chunks is rounded up to a multiple of WORKERS."""

    solved: jax.Array  # X, [B, H, chunks, PARTS, 64, 64] bfloat16
    pairs: jax.Array  # P, likewise
    read: jax.Array  # q^, [B, H, chunks, D / 64, parts, 64, 64] bfloat16
    recalled: jax.Array  # k^, likewise
    written: jax.Array  # k~, likewise, in PARTS parts


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The call, the blocks' work, in how many parts q^ and k^ are left, the arrays in global
    memory, and the storage of a block."""

    spec: DeltaRuleSpec
    deal: mosaic.Deal
    parts: int
    own: Storage
    found: Solved
    q: Any
    k: Any
    decays: Any
    numbers: Any

    def place(self, item: Item, worker: Any) -> tuple[Any, ...]:
        return item.batch, item.head, item.piece * WORKERS + worker

    def leave(self, item: Item, worker: Any, to: Any, tiles: list[Any]) -> None:
        """Stores tiles [64, 64] to their places behind the chunk's in `to`, by axes of one or two
        numbers, once their bytes are there."""
        plgpu.commit_smem()
        for at, tile in tiles:
            plgpu.copy_smem_to_gmem(tile, to.at[(*self.place(item, worker), *at)])


def solve_chunks(
    spec: DeltaRuleSpec,
    config: Config,
    inputs: Inputs,
    decays: jax.Array,
    numbers: jax.Array,
    *,
    parts: int,
) -> Solved:
    """Launches the kernel.

    Args:
      parts: of q^ and k^. The forward walk reads one of each.
    """
    deal = frame.deal_of_chunks(spec, config, WORKERS)
    shape = (spec.B, spec.H, deal.pieces * WORKERS)
    square = jax.ShapeDtypeStruct((*shape, PARTS, C, C), BF16)
    blocks = *shape, frame.blocks_of_key(spec)
    written = jax.ShapeDtypeStruct((*blocks, PARTS, C, HALF), BF16)
    rows = jax.ShapeDtypeStruct((*blocks, parts, C, HALF), BF16)

    def bind(*, own: Storage, **refs: Any) -> Kernel:
        leaves = Solved(**{name: refs.pop(name) for name in Solved._fields})
        return Kernel(spec, deal, parts, own, leaves, **refs)

    found = frame.launch(
        "channel_solve",
        deal,
        storage_of(spec),
        ((MEMORY, memory), (WORKER, work)),
        bind,
        {"q": inputs.q, "k": inputs.k, "decays": decays, "numbers": numbers},
        dict(zip(Solved._fields, (square, square, rows, rows, written), strict=True)),
    )
    return Solved(**found)


def memory(kernel: Kernel) -> None:
    """Loads the chunks of an item at once, one for each worker."""
    kernel.deal.each(functools.partial(load_item, kernel))
    kernel.own.chunks.drain(kernel.deal.own)


def load_item(kernel: Kernel, item: Item) -> None:
    own, spec = kernel.own, kernel.spec
    own.chunks.acquire(item.number)
    barrier = own.chunks.produced.at[0]
    key_head = frame.key_head(spec, item.head)
    for worker in range(WORKERS):
        chunk = solve.chunk_of(spec, item, worker, WORKERS)
        rows = pl.ds(chunk * C, C)
        for ref, tiles, head in (
            (kernel.k, own.k, key_head),
            (kernel.q, own.q, key_head),
            (kernel.decays, own.decays, item.head),
        ):
            targets = frame.blocks_at(spec, tiles, worker)
            frame.load_rows(spec, item, ref, rows, head, targets, barrier)
        source = kernel.numbers.at[item.batch, item.head, chunk]  # [NUMBERS_OF_CHANNELS, 64]
        plgpu.copy_gmem_to_smem(source, own.numbers.at[worker], barrier)


def work(kernel: Kernel) -> None:
    kernel.deal.each(functools.partial(one_chunk, kernel, mosaic.group()))
    plgpu.wait_smem_to_gmem(0)


def one_chunk(kernel: Kernel, worker: Any, item: Item) -> None:
    own = kernel.own
    own.chunks.produced.wait(0)
    # The last chunk's rows are copied; its X, of the latest copies, may not be.
    plgpu.wait_smem_to_gmem(solve.COPIES, wait_read_only=True)
    worker = mosaic.plus_zero(worker, item.first_row)
    numbers = own.numbers.at[worker]
    lower, pairs = decayed_pairs(kernel, worker, item.first_row)
    pairs = pairs * mosaic.in_columns(load(numbers.at[frame.OF_QUERIES], OF_ROWS), C)
    lower = lower * mosaic.in_columns(load(numbers.at[frame.BETA], OF_ROWS), C)
    columns = [
        load(numbers.at[frame.BETA, pl.ds(n * BLOCK, BLOCK)], OF_COLUMNS) for n in range(C // BLOCK)
    ]
    leave_rows(kernel, worker, item, pairs)
    own.chunks.consumed.arrive(0)
    blocks = solve.columns_of(lower)
    of_lower, of_inverse = own.lower.at[worker], own.inverse.at[worker]
    solve.store(of_lower, [frame.in_two_parts(block) for block in blocks])
    inverse = solve.unit_inverse(blocks, of_lower, of_inverse)
    solved = [
        frame.in_two_parts(block * mosaic.in_rows(beta, C))
        for block, beta in zip(inverse, columns, strict=True)
    ]
    solve.store(of_inverse, solved)
    plgpu.commit_smem()
    target: Any = kernel.found.solved
    solve.leave(of_inverse, target.at[kernel.place(item, worker)])


def keys_of(kernel: Kernel, worker: Any, block: int) -> jax.Array:
    """64 columns of k with the factors of its rows, [64, 64]."""
    k = load(kernel.own.k.at[worker, block]).astype(F32)
    if kernel.spec.normalize_qk:
        k = k * mosaic.in_columns(load(kernel.own.numbers.at[worker, frame.OF_KEYS], OF_ROWS), C)
    return k


def queries_of(kernel: Kernel, worker: Any, block: int) -> jax.Array:
    """64 columns of q, likewise."""
    of_rows = load(kernel.own.numbers.at[worker, frame.OF_QUERIES], OF_ROWS)
    return load(kernel.own.q.at[worker, block]).astype(F32) * mosaic.in_columns(of_rows, C)


def decayed_pairs(kernel: Kernel, worker: Any, first_row: Any) -> tuple[jax.Array, jax.Array]:
    """k_t . k_s decayed below the diagonal and q_t . k_s decayed on it, too; 0 above."""
    own, spec = kernel.own, kernel.spec
    blocks = range(frame.blocks_of_key(spec))

    def add(level: Level, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        here = mosaic.plus_zero(worker, first_row + level.size)
        found: tuple[jax.Array, ...] = mosaic.zeros(C, C), mosaic.zeros(C, C)
        for block in blocks:
            decays = [own.decays.at[here, block]]
            (exponents,) = channel.exponents(channel.to_middle(level.size), decays)
            reads, is_read = level.reads(exponents), level.is_read(exponents)
            tiles = [own.rows.at[here, block, part] for part in range(PARTS)]
            k = keys_of(kernel, here, block)
            for tile, rounded in zip(tiles, frame.in_two_parts(k * is_read), strict=True):
                tile[...] = rounded
            plgpu.commit_smem()
            others = tiles[0].T, tiles[1].T
            rows = k, load(own.q.at[here, block]).astype(F32)
            sums_of_level = (
                (sum, frame.products(frame.in_two_parts(one * reads), others))
                for sum, one in zip(found, rows, strict=True)
            )
            found = mosaic.multiply(*sums_of_level)
        own_level = level.pairs()
        plgpu.commit_smem()  # ahead of what overwrites the rows
        of_keys, of_queries = (
            jnp.where(own_level, new, sum) for new, sum in zip(found, sums, strict=True)
        )
        return of_keys, of_queries

    nothing = mosaic.zeros(C, C), mosaic.zeros(C, C)
    one_level = own.numbers[worker, frame.ONE_LEVEL, 0]
    of_keys, of_queries = channel.over_levels(one_level, add, nothing)
    for block in blocks:
        q = load(own.q.at[worker, block]).astype(F32)
        own_pair = jnp.sum(q * keys_of(kernel, worker, block), axis=1)
        diagonal = mosaic.hidden_position(0) == mosaic.hidden_position(1)
        of_queries = of_queries + jnp.where(diagonal, mosaic.in_columns(own_pair, C), 0.0)
    return of_keys, of_queries


def leave_rows(kernel: Kernel, worker: Any, item: Item, pairs: jax.Array) -> None:
    """Stores P, q^, k^ and k~, tile by tile through the same memory. What is stored is computed
    while the copies of what lies there are in flight."""
    own, spec, found = kernel.own, kernel.spec, kernel.found
    decays = frame.blocks_at(spec, own.decays, worker)
    rows: Any = own.rows.at[worker]
    both = range(PARTS)
    for part, rounded in enumerate(frame.in_two_parts(pairs)):
        rows.at[0, part][...] = rounded
    kernel.leave(item, worker, found.pairs, [((part,), rows.at[0, part]) for part in both])
    from_start = channel.factors(channel.from_start(), decays)
    # k^ in one part lies beside q^.
    of_queries, of_keys = (both, both) if kernel.parts == PARTS else (both[:1], both[1:])
    leave_products(kernel, worker, item, queries_of, from_start, found.read, of_queries)
    leave_products(kernel, worker, item, keys_of, from_start, found.recalled, of_keys)
    to_end = channel.factors(channel.to_end(), decays)
    leave_products(kernel, worker, item, keys_of, to_end, found.written, both)


def leave_products(
    kernel: Kernel,
    worker: Any,
    item: Item,
    rows_of: Any,
    factors: list[Any],
    to: Any,
    places: range,
) -> None:
    """Stores the rows of `keys_of` or `queries_of` times the factors, in as many parts as there are
    places for them: the first place, or both, once what lies there is copied, or the second alone,
    which is free since the rows ahead of these waited."""
    rows: Any = kernel.own.rows.at[worker]
    tiles = []
    for n, factor in enumerate(factors):
        found = frame.in_two_parts(rows_of(kernel, worker, n) * factor)
        if n == 0 and places[0] == 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for part, place in enumerate(places):
            rows.at[n, place][...] = found[part]
            tiles.append(((n, part), rows.at[n, place]))
    kernel.leave(item, worker, to, tiles)
