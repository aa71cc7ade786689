"""The kernels of a chunk's gradients share their roles and storage, what a block loads, and the
products over v's columns.

`gradient.py` is for a decay per step or none, `channel_gradient.py` for one per channel, which has
log decays to load. Their docstrings have the mathematics.

    MEMORY      loads dout, u, dr, S and dS' by blocks of 64 of v's columns, one after the other;
      |         then q, k and the numbers of the chunk's steps
      |  chunks: loaded; consumed once the gradients are known
      |  columns: loaded; consumed once they are multiplied
      v
    WORKER (0 .. D / 64 - 1)    64 columns of dq and dk each

With a decay per step or none, another warpgroup forms F and N while the workers multiply by the
states, and dbeta:

    MEMORY
      |  chunks, columns: as above
      v
    PAIRS
      |  handed: F and N are stored; consumed once what is stored over them is copied
      v
    WORKER
         done: all wait until F and N may be overwritten, and the sums of all are there

With a decay per channel there are no registers for one more: worker 0 forms F, and the last one N.
Two workers then run the same instructions: with a copy for each, fetching them took half the time
(docs/notes/delta_rule.md).

    WORKER
         pairs: all wait for F and N
         dots: with `normalize_qk`, all wait for each other's part of q . dq and k . dk
         done: all wait until F, N and these parts may be overwritten

    symbol          shape       what it is
    q, k            [64, D]     a chunk's rows, in blocks of 64 columns
    dout, u, dr     [64, 64]    a chunk's rows, 64 of their columns; u in two parts, and so is dr
                                with a decay per step
    S, dS'          [D, 64]     transposed, [64, 64] for each block of D
    F, N            [64, 64]    the pairs' parts of the gradients, F in two parts of bfloat16; N
                                too, but in one with a decay per channel and D = 128
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, OF_ROWS, Array, Buffer, Item, Ring, Role, Signal, load
from ato_jax.ops.delta_rule.mosaic_gpu import frame
from ato_jax.ops.delta_rule.mosaic_gpu.frame import MEMORY, PARTS, C, Config
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec

# The registers of a thread of PAIRS and of one of WORKER, by how many warpgroups WORKER has.
REGISTERS = {1: (240, 240), 2: (136, 176)}


def roles_of(spec: DeltaRuleSpec) -> tuple[Role | None, Role]:
    """PAIRS, where there is one, and WORKER."""
    count = frame.blocks_of_key(spec)
    if spec.decay == "channel":
        return None, frame.worker_role(count)
    pairs, worker = REGISTERS[count]
    return Role("pairs", pairs), Role("worker", worker, count, unrolled=True)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    """None where a kernel does not have it."""

    cotangents: Array  # [2, stages, 64, 64] dout and dr
    written: Array  # [stages, PARTS, 64, 64] u
    rest: Array  # [stages, 64, 64] dr's second part
    states: Array  # [stages, D / 64, 64, 64] S^T
    dstates: Array  # as states: dS'^T
    q: Array  # [D / 64, 64, 64]
    k: Array  # as q
    decays: Array  # as q, float16: the log decays of each channel
    numbers: Array  # [NUMBERS, 64] float32
    kept: Array  # [D] float32: exp2(L_C), for a decay per channel
    read: Array  # [PARTS, 64, 64] F
    corrected: Array  # [PARTS, 64, 64] -N
    formed: Array  # F and then -N, for a decay per channel: [3, 64, 64], or 4 where D = 64
    sums: Array  # [D / 64, SUMS, 64] float32, for a decay per step
    rows: Array  # [D / 64, PARTS + 1, 64, 64]
    ddecay: Array  # [D / 64, 2, 64, 32] float32
    of_steps: Array  # [2, 64] float32: dr . u and the diagonal of F
    dot_sums: Array  # [D / 64, 2, 64] float32: q . dq and k . dk
    chunks: Ring
    columns: Ring
    handed: Ring  # of F and N
    pairs: Signal
    dots: Signal
    done: Signal


def storage_of(
    spec: DeltaRuleSpec,
    stages: int,
    loaded: dict[str, Buffer],
    made: dict[str, Buffer],
) -> Storage:
    """Args:
    stages: slots for 64 of v's columns.
    loaded: what one of the kernels loads beside q, k and the numbers.
    made: what it leaves, and what its warpgroups store for each other, F and N among it.
    """
    blocks, tiling = frame.blocks_of_key(spec), frame.tiling(spec)
    pairs, worker = roles_of(spec)
    readers = (worker,) if pairs is None else (worker, pairs)
    cotangents = Buffer(tiling.of_rows(2, stages, C, HALF), copies=2)
    written = Buffer(tiling.shared(stages, PARTS, C, HALF), copies=PARTS)
    states = [Buffer(tiling.shared(stages, blocks, HALF, HALF), copies=blocks) for _ in range(2)]
    q, k = (Buffer(tiling.of_rows(blocks, C, HALF), copies=blocks) for _ in range(2))
    loaded = dict(q=q, k=k, numbers=Buffer(frame.numbers_in_memory())) | loaded
    rest = {"rest": Buffer(tiling.of_rows(stages, C, HALF))} if spec.decay == "step" else {}
    own: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Storage))
    own |= dict(
        cotangents=cotangents,
        written=written,
        states=states[0],
        dstates=states[1],
        dot_sums=Buffer(plgpu.SMEM((blocks, 2, C), F32)),
        chunks=Ring.of(1, loaded.values(), readers),
        columns=Ring.of(stages, (cotangents, *rest.values(), written, *states), readers),
        done=Signal((worker,)),
    )
    if pairs is None:
        own |= dict(pairs=Signal((worker,)), dots=Signal((worker,)))
    else:
        own["handed"] = Ring.of(1, (pairs,), (worker,))
    return Storage(**own | rest | loaded | made)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The call, the blocks' work, the storage of a block, and the arrays in global memory."""

    spec: DeltaRuleSpec
    deal: mosaic.Deal
    own: Storage
    q: Any
    k: Any
    dout: Any
    dr: Any
    written: Any  # [B, H, chunks, V / 64, PARTS, 64, 64]: u
    states: Any
    dstates: Any
    numbers: Any
    dq: Any
    dk: Any
    rest: Any = None
    corrections: Any = None
    decays: Any = None
    kept: Any = None
    ddecay: Any = None
    dbeta: Any = None

    @property
    def steps(self) -> int:
        """How often 64 of v's columns are loaded for a chunk."""
        return self.spec.V // HALF

    def step(self, item: Item, block: Any) -> Any:
        """The step of `columns` that 64 of v's columns are."""
        return item.number * self.steps + block

    def slot(self, step: Callable[[], Any]) -> Any:
        """A step's slot of `columns`. Where there is one, the step is not computed."""
        return 0 if self.own.columns.slots == 1 else self.own.columns.slot(step())

    def parts_of_written(self, slot: Any) -> list[Any]:
        """The tiles [64, 64] of u in shared memory."""
        return [self.own.written.at[slot, part] for part in range(PARTS)]

    def place(self, item: Item) -> tuple[Any, Any, Any]:
        return item.batch, item.head, item.piece

    def store_rows(self, item: Item, number: Any, dq: Any, dk: Any) -> None:
        """Copies tiles of 64 columns of dq and dk to their places."""
        tiling = frame.tiling(self.spec)
        for tile, ref in ((dq, self.dq), (dk, self.dk)):
            target = tiling.part(ref, item, pl.ds(item.piece * C, C), item.head, number)
            plgpu.copy_smem_to_gmem(mosaic.for_copy(tile), target)


def launch(
    name: str,
    spec: DeltaRuleSpec,
    config: Config,
    own: Storage,
    given: dict[str, jax.Array],
    types: dict[str, Any],
    one_chunk: Callable[[Kernel, Any, Item], None],
    hand_pairs: Callable[[Kernel], None] | None = None,
) -> dict[str, jax.Array]:
    """Launches a kernel whose worker does `one_chunk` for each chunk, and PAIRS `hand_pairs`;
    returns its outputs by the names of `Kernel`: dq and dk of each value head, also where value
    heads share keys, and those of `types`."""
    deal = frame.deal_of_chunks(spec, config)
    of_head = jax.ShapeDtypeStruct((*given["dout"].shape[:3], spec.D), BF16)
    pairs, worker = roles_of(spec)
    parts: list[tuple[Role, Callable[..., None]]] = [(MEMORY, memory)]
    if pairs is not None:
        assert hand_pairs is not None
        parts.append((pairs, hand_pairs))
    parts.append((worker, functools.partial(work, one_chunk)))
    bind = functools.partial(Kernel, spec, deal)
    types = {"dq": of_head, "dk": of_head} | types
    return frame.launch(name, deal, own, parts, bind, given, types)


def memory(kernel: Kernel) -> None:
    """Loads chunks as slots come free."""
    kernel.deal.each(functools.partial(load_item, kernel))
    kernel.own.chunks.drain(kernel.deal.own)
    kernel.own.columns.drain(kernel.deal.own * kernel.steps)


def load_item(kernel: Kernel, item: Item) -> None:
    own, spec, at = kernel.own, kernel.spec, kernel.place(item)
    rows, key_head = pl.ds(item.piece * C, C), frame.key_head(spec, item.head)
    lax.fori_loop(0, kernel.steps, functools.partial(load_columns, kernel, item, rows), None)
    # Behind the columns, which come free sooner.
    own.chunks.acquire(item.number)
    barrier = own.chunks.produced.at[0]
    for ref, tiles, head in (
        (kernel.q, own.q, key_head),
        (kernel.k, own.k, key_head),
        (kernel.decays, own.decays, item.head),
    ):
        if tiles is not None:
            frame.load_rows(spec, item, ref, rows, head, frame.blocks_at(spec, tiles), barrier)
    plgpu.copy_gmem_to_smem(kernel.numbers.at[at], own.numbers, barrier)
    if own.kept is not None:
        plgpu.copy_gmem_to_smem(kernel.kept.at[at], own.kept, barrier)


def load_columns(kernel: Kernel, item: Item, rows: Any, block: Any, _: None) -> None:
    """Loads 64 of v's columns, and of the states their part."""
    own, tiling, at = kernel.own, frame.tiling(kernel.spec), kernel.place(item)
    step = kernel.step(item, block)
    slot = kernel.slot(lambda: step)
    own.columns.acquire(step)
    barrier = own.columns.produced.at[slot]
    targets = [(kernel.dout, own.cotangents.at[0, slot]), (kernel.dr, own.cotangents.at[1, slot])]
    targets += [(kernel.rest, own.rest.at[slot])] if own.rest is not None else []
    for ref, tile in targets:
        source = tiling.part(ref, item, rows, item.head, block)  # [64, 64]
        plgpu.copy_gmem_to_smem(source, mosaic.for_copy(tile), barrier)
    for part, tile in enumerate(kernel.parts_of_written(slot)):
        source = kernel.written.at[(*at, block, part)]  # [64, 64]
        plgpu.copy_gmem_to_smem(source, tile, barrier)
    for ref, tiles in ((kernel.states, own.states), (kernel.dstates, own.dstates)):
        for of_key in range(frame.blocks_of_key(kernel.spec)):
            source = ref.at[(*at, block, of_key)]  # [64, 64]
            plgpu.copy_gmem_to_smem(source, tiles.at[slot, of_key], barrier)


def work(one_chunk: Callable[[Kernel, Any, Item], None], kernel: Kernel, *number: int) -> None:
    """`number`: of a worker that has a copy of the code for itself."""
    own_number: Any = mosaic.group() if frame.blocks_of_key(kernel.spec) > 1 else 0
    if number:
        (own_number,) = number
    kernel.deal.each(functools.partial(one_chunk, kernel, own_number))
    plgpu.wait_smem_to_gmem(0)
    if kernel.own.handed is not None:
        kernel.own.handed.consumed.arrive(0)


class Columns(NamedTuple):
    """64 of v's columns in shared memory. The parts of dr and u are in order."""

    cotangents: Any  # [2, 64, 64] dout and dr's first part
    dout: Any  # [64, 64]
    dr: list[Any]  # as dout
    written: list[Any]  # u
    states: Any  # [D / 64, 64, 64] S^T
    dstates: Any  # dS'^T


# Factors of products that are summed up.
Factors = list[tuple[Any, Any]]


def of_states(spec: DeltaRuleSpec, number: Any, columns: Columns) -> list[Factors]:
    """dout S^T, dr S^T and u dS'^T, for a block of 64 of the key's columns."""
    state, dstate = columns.states.at[number], columns.dstates.at[number]
    # A decay's gradient is a small sum of k . u dS'^T where keys are alike.
    written = columns.written[:1] if spec.decay is None else columns.written
    return [
        [(columns.dout, state)],
        [(part, state) for part in columns.dr],
        [(part, dstate) for part in written],
    ]


def of_pairs(columns: Columns) -> list[Factors]:
    """F's dout u^T and N's dr u^T."""
    first, *rest = columns.dr
    return [
        [(columns.dout, part.T) for part in columns.written],
        [(first, part.T) for part in columns.written]
        + [(part, columns.written[0].T) for part in rest],
    ]


def dots_of_errors(columns: Columns) -> list[jax.Array]:
    """dr . u with all of their parts, [64]. The diagonal of dr u^T is the same, but is known only
    when the products are, and this is computed while they are in flight."""
    dr, u = (
        sum((load(part).astype(F32) for part in rest), start=load(first).astype(F32))
        for first, *rest in (columns.dr, columns.written)
    )
    return [jnp.sum(dr * u, axis=1)]


def multiply_columns(
    kernel: Kernel,
    item: Item,
    counts: tuple[int, ...],
    factors_of: Callable[[Columns], list[Factors]],
    dots_of: Callable[[Columns], list[jax.Array]] = lambda columns: [],
    behind: Callable[[Any], None] = lambda block: None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """As many sums over v's columns as `counts` has: of products, [64, 64] each, and of `dots_of`,
    first [64] each and then [64, 64]. `dots_of` is called while the products are in flight, and
    `behind` with the number of each block of 64 columns, once its products are known."""
    own = kernel.own

    def one(block: Any, sums: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        slot = kernel.slot(lambda: kernel.step(item, block))
        own.columns.produced.wait(slot)
        both = own.cotangents.at[:, slot]
        dr = [both.at[1], *([] if own.rest is None else [own.rest.at[slot]])]
        states = own.states.at[slot], own.dstates.at[slot]
        columns = Columns(both, both.at[0], dr, kernel.parts_of_written(slot), *states)
        products = list(zip(sums[0], factors_of(columns), strict=True))
        found, dots = mosaic.accumulate_all_while(products, lambda: dots_of(columns))
        behind(block)
        plgpu.commit_smem()  # what was read of the slot, ahead of the load that overwrites it
        own.columns.consumed.arrive(slot)
        return list(found), [sum + dot for sum, dot in zip(sums[1], dots, strict=True)]

    tiles = [mosaic.zeros(C, C) for _ in range(counts[0])]
    nothing = [jnp.sum(mosaic.zeros(C, C), axis=1) for _ in range(counts[1])]
    nothing += [mosaic.zeros(C, C) for _ in range(sum(counts[2:]))]
    found, dots = lax.fori_loop(0, kernel.steps, one, (tiles, nothing))
    return found, dots


def publish_dots(kernel: Kernel, number: Any, dots: tuple[jax.Array, jax.Array]) -> None:
    """Stores the products of each row with its gradient, over this worker's columns."""
    for which, own_dot in enumerate(dots):
        kernel.own.dot_sums.at[number, which][...] = own_dot


def project(kernel: Kernel, number: Any, gradients: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
    """dq and dk without what they have along q and k, once all workers have published dots."""
    own, spec = kernel.own, kernel.spec
    found = []
    of_numbers = (frame.OF_QUERIES, 1 / spec.scale if spec.scale else 0.0), (frame.OF_KEYS, 1.0)
    for which, (gradient, rows) in enumerate(zip(gradients, (own.q, own.k), strict=True)):
        first, *others = (
            load(own.dot_sums.at[n, which], OF_ROWS) for n in range(frame.blocks_of_key(spec))
        )
        whole = sum(others, start=first)
        of_row, unscaled = of_numbers[which]
        inverse_length = load(own.numbers.at[of_row], OF_ROWS) * unscaled
        along = mosaic.in_columns(whole * inverse_length * inverse_length, HALF)
        found.append(gradient - along * load(rows.at[number]).astype(F32))
    return found


def dot(tile: Any, x: jax.Array) -> jax.Array:
    """The products of a tile's rows with those of x, [64]."""
    return jnp.sum(load(tile).astype(F32) * x, axis=1)
