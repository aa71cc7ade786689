"""The kernels of a chunk's gradients share their roles and storage, what a block loads, and the
products over v's columns.

`gradient.py` is for a decay per step or none, `channel_gradient.py` for one per channel, which has
log decays to load. Their docstrings have the mathematics.

    MEMORY      loads dout, u, dr, S and dS' by blocks of 64 of v's columns, one after the other;
      |         then q, k and the numbers of the chunk's steps
      |  chunks: loaded; consumed once the gradients are known
      |  columns: loaded; consumed once they are multiplied
      v
    WORKER (0 .. D / 64 - 1)    64 columns of dq and dk each; worker 0 forms F, the last one N
         pairs: all wait for F and N
         dots: with `normalize_qk` and a decay per channel, all wait for each other's part of
               q . dq and k . dk
         done: with a decay per channel, all wait until F, N and these parts may be overwritten;
               otherwise, until the parts are stored and F and N may be overwritten

    symbol          shape       what it is
    q, k            [64, D]     a chunk's rows, in blocks of 64 columns
    dout, u, dr     [64, 64]    a chunk's rows, 64 of their columns; u in two parts
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


def worker_role(spec: DeltaRuleSpec) -> Role:
    return frame.worker_role(frame.blocks_of_key(spec), unrolled=True)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    """None where a kernel does not have it."""

    dout: Array  # [stages, 64, 64]
    written: Array  # [stages, PARTS, 64, 64] u
    dr: Array  # as dout
    states: Array  # [stages, D / 64, 64, 64] S^T
    dstates: Array  # as states: dS'^T
    q: Array  # [D / 64, 64, 64]
    k: Array  # as q
    decays: Array  # as q, float16: the log decays of each channel
    numbers: Array  # [NUMBERS, 64] float32
    last: Array  # [D] float32: the sums of exp2(L_C) S dS'
    read: Array  # [PARTS, 64, 64] F
    corrected: Array  # [1 or PARTS, 64, 64] -N
    sums: Array  # [D / 64, SUMS, 64] float32, for a decay per step
    rows: Array  # [D / 64, PARTS + 1, 64, 64]
    ddecay: Array  # [D / 64, 2, 64, 32] float32
    of_steps: Array  # [2, 64] float32: dr . u and the diagonal of F
    dot_sums: Array  # [D / 64, 2, 64] float32: q . dq and k . dk
    chunks: Ring
    columns: Ring
    pairs: Signal
    dots: Signal
    done: Signal


def storage_of(
    spec: DeltaRuleSpec,
    stages: int,
    parts_of_corrected: int,
    loaded: dict[str, Buffer],
    made: dict[str, Buffer],
) -> Storage:
    """Args:
    stages: slots for 64 of v's columns.
    parts_of_corrected: in how many parts N is.
    loaded: what one of the kernels loads beside q, k and the numbers.
    made: what it leaves, and what its workers store for each other, beside F and N.
    """
    blocks, tiling = frame.blocks_of_key(spec), frame.tiling(spec)
    worker = worker_role(spec)
    dout, dr = (Buffer(tiling.of_rows(stages, C, HALF)) for _ in range(2))
    written = Buffer(tiling.shared(stages, PARTS, C, HALF), copies=PARTS)
    states = [Buffer(tiling.shared(stages, blocks, HALF, HALF), copies=blocks) for _ in range(2)]
    q, k = (Buffer(tiling.of_rows(blocks, C, HALF), copies=blocks) for _ in range(2))
    loaded = dict(q=q, k=k, numbers=Buffer(frame.numbers_in_memory())) | loaded
    own: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Storage))
    own |= dict(
        dout=dout,
        written=written,
        dr=dr,
        states=states[0],
        dstates=states[1],
        read=Buffer(tiling.of_rows(PARTS, C, C)),
        corrected=Buffer(tiling.of_rows(parts_of_corrected, C, C)),
        dot_sums=Buffer(plgpu.SMEM((blocks, 2, C), F32)),
        chunks=Ring.of(1, loaded.values(), (worker,)),
        columns=Ring.of(stages, (dout, dr, written, *states), (worker,)),
        pairs=Signal((worker,)),
        dots=Signal((worker,)),
        done=Signal((worker,)),
    )
    return Storage(**own | loaded | made)


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
    decays: Any = None
    last: Any = None
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

    def store_rows(self, item: Item, number: int, dq: Any, dk: Any) -> None:
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
    one_chunk: Callable[[Kernel, int, Item], None],
) -> dict[str, jax.Array]:
    """Launches a kernel whose worker does `one_chunk` for each chunk; returns its outputs by the
    names of `Kernel`: dq and dk of each value head, also where value heads share keys, and those
    of `types`."""
    deal = frame.deal_of_chunks(spec, config)
    of_head = jax.ShapeDtypeStruct((*given["dout"].shape[:3], spec.D), BF16)
    parts = (MEMORY, memory), (worker_role(spec), functools.partial(work, one_chunk))
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
    if own.last is not None:
        plgpu.copy_gmem_to_smem(kernel.last.at[at], own.last, barrier)


def load_columns(kernel: Kernel, item: Item, rows: Any, block: Any, _: None) -> None:
    """Loads 64 of v's columns, and of the states their part."""
    own, tiling, at = kernel.own, frame.tiling(kernel.spec), kernel.place(item)
    step = kernel.step(item, block)
    slot = kernel.slot(lambda: step)
    own.columns.acquire(step)
    barrier = own.columns.produced.at[slot]
    for ref, tiles in ((kernel.dout, own.dout), (kernel.dr, own.dr)):
        source = tiling.part(ref, item, rows, item.head, block)  # [64, 64]
        plgpu.copy_gmem_to_smem(source, mosaic.for_copy(tiles.at[slot]), barrier)
    for part, tile in enumerate(kernel.parts_of_written(slot)):
        source = kernel.written.at[(*at, block, part)]  # [64, 64]
        plgpu.copy_gmem_to_smem(source, tile, barrier)
    for ref, tiles in ((kernel.states, own.states), (kernel.dstates, own.dstates)):
        for of_key in range(frame.blocks_of_key(kernel.spec)):
            source = ref.at[(*at, block, of_key)]  # [64, 64]
            plgpu.copy_gmem_to_smem(source, tiles.at[slot, of_key], barrier)


def work(
    one_chunk: Callable[[Kernel, int, Item], None], kernel: Kernel, number: int
) -> None:
    kernel.deal.each(functools.partial(one_chunk, kernel, number))
    plgpu.wait_smem_to_gmem(0)


class Columns(NamedTuple):
    """64 of v's columns, and of the states 64 columns of the key, in shared memory."""

    dout: Any  # [64, 64]
    dr: Any  # as dout
    written: list[Any]  # the parts of u
    state: Any  # as dout: S^T
    dstate: Any  # dS'^T


class Products(NamedTuple):
    """Sums over v's columns."""

    read: jax.Array  # dout S^T, [64, 64]
    recalled: jax.Array  # dr S^T
    written: jax.Array  # u dS'^T
    pairs: dict[int, jax.Array]  # of F's dout u^T (0) and N's dr u^T (1) those that it forms
    dots: list[jax.Array]  # [64] each


def multiply_columns(
    kernel: Kernel,
    number: int,
    item: Item,
    count: int,
    add_dots: Callable[[Kernel, int, Columns, list[jax.Array]], list[jax.Array]],
) -> Products:
    """The products of a worker's chunk. `add_dots` adds products of rows to `count` sums of them,
    while no product of tiles is in flight."""
    own = kernel.own
    last = frame.blocks_of_key(kernel.spec) - 1
    formed = [which for which, worker in enumerate((0, last)) if worker == number]

    def one(block: Any, sums: list[Any]) -> list[Any]:
        slot = kernel.slot(lambda: kernel.step(item, block))
        own.columns.produced.wait(slot)
        dout, dr, written = own.dout.at[slot], own.dr.at[slot], kernel.parts_of_written(slot)
        state, dstate = own.states.at[slot, number], own.dstates.at[slot, number]
        # A decay's gradient is a small sum of k . u dS'^T where keys are alike.
        to_state = written[:1] if kernel.spec.decay is None else written
        factors = [[(dout, state)], [(dr, state)], [(part, dstate) for part in to_state]]
        factors += [[((dout, dr)[which], part.T) for part in written] for which in formed]
        found, dots = sums[: len(factors)], sums[len(factors) :]
        dots = add_dots(kernel, number, Columns(dout, dr, written, state, dstate), dots)
        found = list(mosaic.multiply(*zip(found, factors, strict=True)))
        plgpu.commit_smem()  # what was read of the slot, ahead of the load that overwrites it
        own.columns.consumed.arrive(slot)
        return [*found, *dots]

    tiles = [mosaic.zeros(C, C) for _ in range(3 + len(formed))]
    nothing = [jnp.sum(mosaic.zeros(C, C), axis=1) for _ in range(count)]
    found = lax.fori_loop(0, kernel.steps, one, [*tiles, *nothing])
    read, recalled, written, *others = found
    pairs, dots = others[: len(formed)], others[len(formed) :]
    return Products(read, recalled, written, dict(zip(formed, pairs, strict=True)), dots)


def publish_dots(kernel: Kernel, number: int, dots: tuple[jax.Array, jax.Array]) -> None:
    """Stores the products of each row with its gradient, over this worker's columns."""
    for which, own_dot in enumerate(dots):
        kernel.own.dot_sums.at[number, which][...] = own_dot


def project(
    kernel: Kernel, number: int, gradients: tuple[jax.Array, jax.Array]
) -> list[jax.Array]:
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
