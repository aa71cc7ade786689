"""The part of each chunk that no state enters: all chunks are independent. It is the inverse X, and
the numbers of each step, which the kernels behind this one read, too (`steps.py`).

With L_t the sum of log2 decays from the chunk's first step to t,

    A[t, s] = beta_t k_t . k_s exp2(L_t - L_s)      s < t, else 0
    X       = (I + A)^-1 diag(beta)

The inverse goes by blocks: those of 16 rows along the diagonal by substitution (`substitution.py`),
which are then joined two by two, in products. With Z the inverse of the blocks of m rows along the
diagonal, those of 2 m rows are

    Z' = Z - Z A_m Z        A_m: A where the row's block is the right neighbour of the column's

Z has blocks of m rows, so Z A_m is Z A in the places of A_m. Matrices lie in blocks of 16 columns,
and a product takes 16 rows of one, those that hold A_m. Every factor is in two parts of bfloat16.
Powers of A would take fewer products, but their terms cancel where keys are alike.

For a backward pass with decays it also finds the chunks that `corrections.py` is for. Their keys
are alike, that is span few directions. A chunk's keys are alike where the sum of A[t, s]^2 over
all t and s that differ is more than twice the sum of (beta_t |k_t|^2)^2. For this test A has the
decay between both steps also where s > t, and no decay is taken to be less than `least_decay`. For
random keys of 64 columns the former is half of the latter, for n orthogonal keys in turn some 32 /
n times as much. The lengths of keys do not hide one direction: with betas of 1 / |k_t|^2, A[t, s]
times A[s, t] is as much as for equal keys, so both squares add up to as much or more. Behind strong
decays keys are alike only if all are nearly equal: states are then smaller, and so are the errors
that they lead to, but for equal keys ddecay is smaller, too. A last chunk of few steps has few
pairs, and takes ALIKE of the chunk before it.

    MEMORY (n)       loads a chunk of k for each WORKER; makes the numbers of its steps
      |  chunks: loaded, and made; consumed once X is known
      v
    WORKER (0 .. n - 1)    a chunk's X each

    symbol          shape         what it is
    k               [64, D]       a chunk's rows, in blocks of 64 columns
    A, X, Z         [64, 64]      as above; A and Z lie in shared memory, X takes the place of Z
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, OF_COLUMNS, OF_ROWS, Array, Buffer, Item, Ring, Role, load
from ato_jax.ops.delta_rule.mosaic_gpu import frame, steps
from ato_jax.ops.delta_rule.mosaic_gpu.frame import C, Config
from ato_jax.ops.delta_rule.mosaic_gpu.substitution import BLOCK as BLOCK
from ato_jax.ops.delta_rule.mosaic_gpu.substitution import inverses_along_diagonal
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec

WORKERS, STAGES = 3, 2
# Behind decays of any strength keys are alike where the mean of their squared cosines is more.
LEAST_COSINE = 0.8
# A last chunk of fewer steps takes ALIKE of the one before it.
FEW_STEPS = 16
# MEMORY makes numbers, too, so it has more registers than elsewhere.
MEMORY, WORKER = Role("memory", registers=80), Role("worker", 144, WORKERS)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    k: Array  # [STAGES, WORKERS, D / 64, 64, 64]
    numbers: Array  # [STAGES, WORKERS, NUMBERS, 64] float32
    lower: Array  # [WORKERS, PARTS, 4, 64, 16] A in two parts
    inverse: Array  # [WORKERS, PARTS, 4, 64, 16] Z, then X, in two parts
    excess: Array  # [WORKERS, 64] float32: what ALIKE is made of
    chunks: Ring


def storage_of(spec: DeltaRuleSpec, leaves_alike: bool) -> Storage:
    blocks, tiling = frame.blocks_of_key(spec), frame.tiling(spec)
    k = Buffer(tiling.of_rows(STAGES, WORKERS, blocks, C, C), copies=WORKERS * blocks)
    return Storage(
        k=k,
        numbers=Buffer(frame.numbers_in_memory(STAGES, WORKERS)),
        lower=Buffer(column_blocks()),
        inverse=Buffer(column_blocks()),
        excess=Buffer(plgpu.SMEM((WORKERS, C), F32)) if leaves_alike else None,
        chunks=Ring.of(STAGES, (k, MEMORY), (WORKER,)),
    )


def column_blocks(workers: int = WORKERS) -> Any:
    """Room for a matrix of each worker, in two parts, as column blocks: swizzled so that a product
    takes 16 of a block's rows."""
    size = BLOCK * jnp.dtype(BF16).itemsize
    transforms = plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(size)
    return plgpu.SMEM((workers, frame.PARTS, C // BLOCK, C, BLOCK), BF16, transforms=transforms)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The call, the blocks' work, the arrays in global memory, and the storage of a block."""

    spec: DeltaRuleSpec
    deal: mosaic.Deal
    own: Storage
    k: Any
    solved: Any
    numbers: Any
    beta: Any
    decay: Any = None
    of_keys: Any = None
    of_queries: Any = None

    @property
    def given(self) -> steps.Given:
        return steps.Given(self.beta, self.decay, self.of_keys, self.of_queries)


class Solved(NamedTuple):
    """The number of chunks is rounded up to a multiple of WORKERS."""

    solved: jax.Array  # X in two parts, [B, H, chunks, PARTS, 64, 64] bfloat16
    numbers: jax.Array  # those of `steps.py`, [B, H, chunks, NUMBERS, 64] float32


def solve_chunks(
    spec: DeltaRuleSpec,
    config: Config,
    k: jax.Array,
    given: steps.Given,
    *,
    leaves_alike: bool = False,
) -> Solved:
    """`leaves_alike`: whether ALIKE is among the numbers."""
    deal = frame.deal_of_chunks(spec, config, WORKERS)
    chunks = (spec.B, spec.H, deal.pieces * WORKERS)
    types = {
        "solved": jax.ShapeDtypeStruct((*chunks, frame.PARTS, C, C), BF16),
        "numbers": jax.ShapeDtypeStruct((*chunks, frame.NUMBERS, C), F32),
    }
    found = frame.launch(
        "solve",
        deal,
        storage_of(spec, leaves_alike),
        ((MEMORY, memory), (WORKER, work)),
        functools.partial(Kernel, spec, deal),
        {"k": k, **given.present()},
        types,
    )
    return Solved(**found)


def memory(kernel: Kernel) -> None:
    """Loads the chunks of an item at once, one for each worker, and makes their numbers."""
    kernel.deal.each(functools.partial(load_item, kernel))
    plgpu.wait_smem_to_gmem(0)
    kernel.own.chunks.drain(kernel.deal.own)


def load_item(kernel: Kernel, item: Item) -> None:
    own, spec = kernel.own, kernel.spec
    slot = own.chunks.slot(item.number)
    own.chunks.acquire(item.number)
    barrier = own.chunks.produced.at[slot]
    key_head = frame.key_head(spec, item.head)
    chunks = [chunk_of(spec, item, worker, WORKERS) for worker in range(WORKERS)]
    for worker, chunk in enumerate(chunks):
        tiles = frame.blocks_at(spec, own.k, slot, worker)
        frame.load_rows(spec, item, kernel.k, pl.ds(chunk * C, C), key_head, tiles, barrier)
    targets = [own.numbers.at[slot, worker] for worker in range(WORKERS)]  # [NUMBERS, 64] each
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    steps.make(spec, kernel.given, item, chunks, targets)
    for worker, target in enumerate(targets):
        at = item.batch, item.head, item.piece * WORKERS + worker
        made = pl.ds(0, frame.ALIKE)
        plgpu.copy_smem_to_gmem(target.at[made], kernel.numbers.at[(*at, made)])
    own.chunks.produced.arrive(slot)


def chunk_of(spec: DeltaRuleSpec, item: Item, worker: int, workers: int) -> Any:
    """The chunk that is loaded for a worker: the last one again, where there is no other. What is
    made of that is read by nobody."""
    return jnp.minimum(item.piece * workers + worker, frame.chunks_of(spec) - 1)


def work(kernel: Kernel) -> None:
    kernel.deal.each(functools.partial(solve_chunk, kernel, mosaic.group()))
    plgpu.wait_smem_to_gmem(0)


def solve_chunk(kernel: Kernel, worker: Any, item: Item) -> None:
    own, spec = kernel.own, kernel.spec
    slot = own.chunks.slot(item.number)
    own.chunks.produced.wait(slot)
    worker = mosaic.plus_zero(worker, item.first_row)
    k = frame.blocks_at(spec, own.k, slot, worker)
    numbers = own.numbers.at[slot, worker]
    beta = load(numbers.at[frame.BETA], OF_ROWS)
    if spec.normalize_qk:
        beta = beta * load(numbers.at[frame.OF_KEYS], OF_ROWS)
    row, column = mosaic.hidden_position(0), mosaic.hidden_position(1)
    lower = frame.pairs(spec, k, k, numbers) * mosaic.in_columns(beta, C)
    if spec.decay is not None:
        decays = frame.decays_of_pairs(numbers)
        if own.excess is not None:
            least = least_decay(spec, item.piece * WORKERS + worker)
            pairs = lower * jnp.maximum(decays, least)
            excess = more_than_itself(pairs, lower, numbers, spec.normalize_qk)
            own.excess.at[worker][...] = excess
        lower = lower * decays
    blocks = columns_of(jnp.where(row > column, lower, 0.0))
    store(own.lower.at[worker], [frame.in_two_parts(block) for block in blocks])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    inverse = unit_inverse(blocks, own.lower.at[worker], own.inverse.at[worker])
    if own.excess is not None:
        leave_alike(kernel, item, worker)
    solved = []
    for n, block in enumerate(inverse):
        beta = load(numbers.at[frame.BETA, pl.ds(n * BLOCK, BLOCK)], OF_COLUMNS)
        solved.append(frame.in_two_parts(block * mosaic.in_rows(beta, C)))
    store(own.inverse.at[worker], solved)
    plgpu.commit_smem()  # also what was read of the slot, ahead of the load that overwrites it
    own.chunks.consumed.arrive(slot)
    target = kernel.solved.at[item.batch, item.head, item.piece * WORKERS + worker]
    leave(own.inverse, target, worker)


def least_decay(spec: DeltaRuleSpec, chunk: Any) -> Any:
    """A lower bound for the factors by which decays shrink the pairs of a chunk, where the chunk is
    searched for like keys. A chunk of n steps has n (n - 1) / 2 pairs. If each of them is shrunk to
    this bound b, half of the sum over t and s is b^2 n (n - 1) / 2 times their mean squared cosine,
    and the sum over steps is n. The former is larger where that mean is above `LEAST_COSINE`."""
    whole, last = (
        math.sqrt(2 / LEAST_COSINE / max(count - 1, 1)) for count in (C, (spec.T - 1) % C + 1)
    )
    return whole if spec.T % C == 0 else jnp.where(chunk == spec.T // C, last, whole)


def leave_alike(kernel: Kernel, item: Item, worker: Any) -> None:
    """Stores ALIKE of a worker's chunk; and of the last one, if that has few steps, with the chunk
    before it."""
    alike, last = are_alike(kernel.own.excess.at[worker]), frame.chunks_of(kernel.spec) - 1
    chunk = item.piece * WORKERS + worker

    def leave(chunk: Any) -> None:
        at = item.batch, item.head, chunk, frame.ALIKE
        mosaic.store_in_memory(kernel.numbers.at[at], alike)

    if last > 0 and 0 < kernel.spec.T % C < FEW_STEPS:
        pl.when(chunk != last)(lambda: leave(chunk))
        pl.when(chunk == last - 1)(lambda: leave(last))
    else:
        leave(chunk)


def more_than_itself(
    decayed: jax.Array, pairs: jax.Array, numbers: Any, normalized: bool
) -> jax.Array:
    """[64]: for each row t the sum of A[t, s]^2 over all other s, less twice (beta_t |k_t|^2)^2.
    `decayed`: A with decays that are not too small. `pairs`: without decays. Both have what lies on
    and above the diagonal."""
    row, column = mosaic.hidden_position(0), mosaic.hidden_position(1)
    # Ahead of the diagonal's sum: behind it, more registers are spilled.
    others = jnp.where(row == column, 0.0, decayed)
    total = jnp.sum(others * others, axis=1)
    if normalized:
        itself = load(numbers.at[frame.BETA], OF_ROWS)
    else:
        itself = jnp.sum(jnp.where(row == column, pairs, 0.0), axis=1)
    return total - 2 * itself * itself


def are_alike(excess: Any) -> jax.Array:
    """64 equal numbers: 1 where the sum of all rows' excess is above 0, else 0."""
    total = jnp.sum(mosaic.in_rows(load(excess, OF_COLUMNS), C), axis=1)
    return jnp.where(total > 0, 1.0, 0.0)


def columns_of(x: jax.Array) -> list[jax.Array]:
    """A tile [64, 64] in column blocks."""
    return [x[:, first : first + BLOCK] for first in range(0, C, BLOCK)]


def store(tiles: Any, blocks: list[tuple[jax.Array, jax.Array]]) -> None:
    """Column blocks in two parts."""
    for n, parts in enumerate(blocks):
        for part, own in enumerate(parts):
            tiles.at[part, n][...] = own


# How many copies `leave` makes.
COPIES = frame.PARTS * (C // BLOCK)


def leave(tiles: Any, target: Any, *place: Any) -> None:
    """Copies column blocks in two parts, which lie behind `place` in shared memory, to a matrix
    [PARTS, 64, 64] in global memory."""
    for part in range(frame.PARTS):
        for n in range(C // BLOCK):
            columns = target.at[part, :, pl.ds(n * BLOCK, BLOCK)]  # [64, 16]
            plgpu.copy_smem_to_gmem(tiles.at[(*place, part, n)], columns)


def unit_inverse(lower: list[jax.Array], of_lower: Any, of_inverse: Any) -> list[jax.Array]:
    """(I + A)^-1 of A, strictly lower triangular, which lies in `of_lower`, too; in column blocks.

    A round joins neighbours of `size` rows.
    """
    inverse, size = inverses_along_diagonal(lower), BLOCK
    while size < C:
        parts = [frame.in_two_parts(block) for block in inverse]
        store(of_inverse, parts)
        plgpu.commit_smem()
        # Columns, and the blocks of rows of A that they take with Z's columns of the same number.
        between = _products(parts, of_lower, _neighbours(size))
        joining = {n: frame.in_two_parts(found) for n, found in between.items()}
        own = {n: [m for m in between if m >= n and (m == n or size > BLOCK)] for n in between}
        for n, change in _products(joining, of_inverse, own).items():
            inverse[n] = inverse[n] - change
        plgpu.commit_smem()  # ahead of what overwrites Z
        size *= 2
    return inverse


def _neighbours(size: int) -> dict[int, list[int]]:
    """The column blocks that a round changes, each with the blocks of A's rows that it reads."""
    own = size // BLOCK
    return {
        n: list(range(n // own * own + own, n // own * own + 2 * own))
        for n in range(C // BLOCK)
        if n // own % 2 == 0
    }


def _products(parts: Any, tiles: Any, terms: dict[int, list[int]]) -> dict[int, jax.Array]:
    """For each column block n the sum over `terms[n]` of (column block m) (rows of block m in
    `tiles`' column block n)."""
    sums = []
    for n, blocks in terms.items():
        pairs = []
        for m in blocks:
            rows = pl.ds(m * BLOCK, BLOCK)
            of_rows = tiles.at[0, n, rows], tiles.at[1, n, rows]
            pairs += frame.products(parts[m], of_rows)
        sums.append((mosaic.zeros(C, BLOCK), pairs))
    return dict(zip(terms, mosaic.multiply(*sums), strict=True))
