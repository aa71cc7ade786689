"""Corrections of ddecay for the rounding of states to bfloat16, in the chunks where that matters.

`gradient.py` reads S~ and dS~, which are a chunk's S and dS' rounded to bfloat16. Where the chunk's
keys span few directions S lies along these, and little of dS' does, since each step takes from dS
what lies along its key. Then <S, dS'>, of which a decay's gradient is made, nearly cancels, and the
rounding errors of its factors exceed it. With the letters of `gradient.py`, e = S - S~ and
d = dS' - dS~, the corrections are

    dL_t   scale * exp(L_t) dout_t . (q_t e) - exp(L_t) dr_t . (k_t e)                 by e
           -exp(L_C - L_t) u_t . (k_t d)                                               by d
    dL_C   exp(L_C) <e, dS~>                                                           by e
           exp(L_C) <S~, d> + sum_s exp(L_C - L_s) u_s . (k_s d)                       by d

Chunks whose keys `solve.py` finds to be alike get all of them. The first chunk gets those by e
where the caller gives a first state, and the last chunk those by d where the last state has a
cotangent: these states may be large.

A chunk of like keys of one direction gets all of its ddecay here (`one_key.py`).

For e and d a walk carries S, and another dS', in float32. u and dr are known, in two parts, so a
step is two products for each block of the state, and no state in float32 is stored. An item is one
walk over a head and 64 of v's columns: S from the first chunk to the last one that gets a
correction, dS' from the last chunk down to the first one. Mostly no chunk does, and the kernel
ends without having loaded anything.

    MEMORY      loads a chunk's rows, states and numbers
      |  chunks: loaded; consumed once the next state is known
      v
    WORKER      carries S or dS'

    symbol              shape       what it is
    q, k                [64, D]     a chunk's rows, in blocks of 64 columns
    dout, dr, u         [64, 64]    a chunk's rows, 64 of their columns; dr and u in two parts
    S, dS', S~, dS~     [D, 64]     transposed, [64, 64] for each block of D; e and d lie over S~
                                    and dS~
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, OF_COLUMNS, OF_ROWS, Array, Buffer, Item, Ring, load
from ato_jax.ops.delta_rule.mosaic_gpu import frame, one_key
from ato_jax.ops.delta_rule.mosaic_gpu.chunk_gradient import dot
from ato_jax.ops.delta_rule.mosaic_gpu.frame import MEMORY, PARTS, C, Config
from ato_jax.ops.delta_rule.mosaic_gpu.one_key import OneKey, total
from ato_jax.ops.delta_rule.mosaic_gpu.steps import in_all_rows, sums_to_end
from ato_jax.ops.delta_rule.mosaic_gpu.walk import Numbers, add_products
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec

STAGES = 2
WORKER = frame.worker_role(1)
# The two walks: from the first chunk, with S, and from the last one, with dS'.
FROM_START, FROM_END = WALKS = range(2)
# Where the kernel stores, beside the corrections of each walk, what `gradient.py` multiplies its
# own ddecay by in a chunk of like keys: 0 where they are one key, else 1.
SHARE = len(WALKS)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    q: Array  # [STAGES, D / 64, 64, 64]
    k: Array  # as q
    dout: Array  # [STAGES, 64, 64]
    dr: Array  # as dout
    rest: Array  # as dout: dr's second part
    written: Array  # [STAGES, PARTS, 64, 64] u
    states: Array  # [STAGES, D / 64, 64, 64] S~^T
    dstates: Array  # as states: dS~^T
    numbers: Array  # [STAGES, NUMBERS, 64] float32
    sums: Array  # [2, 64] float32: dL, and what dL_C has besides
    key: Array  # [D / 64 + 2, 64] float32: a chunk's one key, c_t, and the key's products with S
    chunks: Ring


def storage_of(spec: DeltaRuleSpec) -> Storage:
    blocks, tiling = frame.blocks_of_key(spec), frame.tiling(spec)
    loaded = {
        name: Buffer(tiling.of_rows(STAGES, blocks, C, HALF), copies=blocks) for name in ("q", "k")
    }
    for name in ("dout", "dr", "rest"):
        loaded[name] = Buffer(tiling.of_rows(STAGES, C, HALF))
    loaded["written"] = Buffer(tiling.shared(STAGES, PARTS, C, HALF), copies=PARTS)
    for name in ("states", "dstates"):
        loaded[name] = Buffer(tiling.shared(STAGES, blocks, HALF, HALF), copies=blocks)
    loaded["numbers"] = Buffer(frame.numbers_in_memory(STAGES))
    chunks = Ring.of(STAGES, loaded.values(), (WORKER,))
    made = dict(sums=Buffer(plgpu.SMEM((2, C), F32)), key=Buffer(plgpu.SMEM((blocks + 2, C), F32)))
    return Storage(**loaded, **made, chunks=chunks)


class Place(NamedTuple):
    """The walk, the head and the columns of v that an item covers."""

    walk: Any  # `FROM_START` or `FROM_END`
    head: Any
    block: Any  # the number of the 64 of v's columns


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
    rest: Any
    written: Any  # [B, H, chunks, V / 64, PARTS, 64, 64]
    states: Any  # [B, H, chunks, V / 64, D / 64, 64, 64]
    dstates: Any
    numbers: Any
    reach: Any  # [WALKS, B, H]
    corrections: Any  # [WALKS + 1, V / 64, B, H, chunks, 64]
    first: Any = None  # [B, H, V, D] float32: the first state
    last: Any = None  # as `first`: the last state's cotangent

    def place(self, item: Item) -> Place:
        blocks, walks = self.spec.V // HALF, len(WALKS)
        rest = lax.div(item.head, walks)
        return Place(lax.rem(item.head, walks), lax.div(rest, blocks), lax.rem(rest, blocks))

    def each(self, do: Callable[[Item], None]) -> Any:
        """Calls `do` for each item that has a chunk to walk over; returns the number of chunks."""

        def cut(item: Item) -> Item:
            place = self.place(item)
            return item._replace(chunks=self.reach[place.walk, item.batch, place.head])

        return self.deal.each(do, lambda item: item.chunks > 0, cut)

    def number_of(self, walk: Any, chunk: Any) -> Any:
        """The number in the sequence of the chunk that is walked as number `chunk`."""
        return jnp.where(walk == FROM_START, chunk, frame.chunks_of(self.spec) - 1 - chunk)


def reach_of(spec: DeltaRuleSpec, numbers: jax.Array) -> jax.Array:
    """[WALKS, B, H] int32: how many chunks each walk goes over."""
    chunks = frame.chunks_of(spec)
    here, number = numbers[:, :, :chunks, frame.ALIKE, 0] > 0, jnp.arange(chunks, dtype=jnp.int32)
    upto = jnp.stack([number + 1, chunks - number])[:, None, None]
    least = jnp.array([spec.initial_state, spec.return_state], jnp.int32)
    # One sum, so that XLA launches one kernel.
    return jnp.max(jnp.where(here, upto, least[:, None, None, None]), axis=3)


def is_corrected(spec: DeltaRuleSpec, walk: int, alike: Any, number: Any) -> Any:
    """Whether a walk stores corrections for the chunk of this number. `alike`: the chunk's own."""
    if walk == FROM_START:
        return (alike > 0) | (number == 0) if spec.initial_state else alike > 0
    if spec.return_state:
        return (alike > 0) | (number == frame.chunks_of(spec) - 1)
    return alike > 0


def corrections(
    spec: DeltaRuleSpec,
    config: Config,
    arrays: dict[str, jax.Array],
    first: jax.Array | None,
    last: jax.Array | None,
) -> jax.Array:
    """The corrections of each step's ddecay, and behind them SHARE, [WALKS + 1, V / 64, B, H,
    chunks, 64]. Nothing is stored where `is_corrected` does not hold, and SHARE is where keys are
    alike.

    Args:
      arrays: the inputs in global memory, by the names of `Kernel`.
      first: the first state, [B, H, D, V].
      last: the last state's cotangent.
    """
    ends = {"first": first, "last": last}
    arrays = arrays | {"reach": reach_of(spec, arrays["numbers"])}
    arrays |= {name: jnp.swapaxes(one, 2, 3) for name, one in ends.items() if one is not None}
    chunks, blocks = frame.chunks_of(spec), spec.V // HALF
    heads = spec.H * blocks * len(WALKS)
    deal = mosaic.Deal(spec.B, heads, chunks * C, chunks * C, 1, config.solve_blocks)
    shape = (len(WALKS) + 1, blocks, spec.B, spec.H, chunks, C)
    found = frame.launch(
        "corrections",
        deal,
        storage_of(spec),
        ((MEMORY, memory), (WORKER, work)),
        functools.partial(Kernel, spec, deal),
        arrays,
        {"corrections": jax.ShapeDtypeStruct(shape, F32)},
    )
    return found["corrections"]


def memory(kernel: Kernel) -> None:
    """Loads chunks as slots come free."""
    steps = kernel.each(functools.partial(load_item, kernel))
    kernel.own.chunks.drain(steps)


def load_item(kernel: Kernel, item: Item) -> None:
    own, spec, tiling = kernel.own, kernel.spec, frame.tiling(kernel.spec)
    walk, head, column = kernel.place(item)
    key_head = frame.key_head(spec, head)

    def load_chunk(chunk: Any, slot: Any, barrier: Any) -> None:
        number = kernel.number_of(walk, chunk)
        rows = pl.ds(number * C, C)
        keys = (kernel.q, own.q), (kernel.k, own.k)
        frame.load_keys(spec, item, keys, rows, key_head, slot, barrier)
        for ref, tiles in ((kernel.dout, own.dout), (kernel.dr, own.dr), (kernel.rest, own.rest)):
            source = tiling.part(ref, item, rows, head, column)  # [64, 64]
            plgpu.copy_gmem_to_smem(source, mosaic.for_copy(tiles.at[slot]), barrier)
        at = item.batch, head, number
        for ref, tiles, parts in (
            (kernel.written, own.written, PARTS),
            (kernel.states, own.states, frame.blocks_of_key(spec)),
            (kernel.dstates, own.dstates, frame.blocks_of_key(spec)),
        ):
            for part in range(parts):
                source = ref.at[(*at, column, part)]  # [64, 64]
                plgpu.copy_gmem_to_smem(source, tiles.at[slot, part], barrier)
        plgpu.copy_gmem_to_smem(kernel.numbers.at[at], own.numbers.at[slot], barrier)

    frame.load_chunks(item, own.chunks, load_chunk)


def work(kernel: Kernel) -> None:
    def walk_item(item: Item) -> None:
        place = kernel.place(item)
        for walk, start, step in (
            (FROM_START, kernel.first, step_from_start),
            (FROM_END, kernel.last, step_from_end),
        ):
            here = functools.partial(carry, kernel, item, place._replace(walk=walk), start, step)
            pl.when(place.walk == walk)(here)

    kernel.each(walk_item)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of an item: its number in the sequence, and its slot."""

    kernel: Kernel
    item: Item
    place: Place
    number: Any
    slot: Any

    def blocks(self, tiles: Any) -> list[Any]:
        return frame.blocks_at(self.kernel.spec, tiles, self.slot)

    def factor(self, which: int) -> jax.Array:
        """[64]: one of the numbers of each step."""
        return load(self.kernel.own.numbers.at[self.slot, which], OF_ROWS)

    def numbers(self) -> Numbers:
        return Numbers(self.kernel.spec, self.kernel.own.numbers.at[self.slot], OF_COLUMNS)

    def columns_of(self, tiles: Any) -> jax.Array:
        """A tile [64, 64] of rows, transposed."""
        return mosaic.load_transposed(tiles.at[self.slot]).astype(F32)

    @property
    def alike(self) -> Any:
        return self.kernel.own.numbers[self.slot, frame.ALIKE, 0]

    def is_corrected(self) -> Any:
        return is_corrected(self.kernel.spec, self.place.walk, self.alike, self.number)

    def target(self, which: Any) -> Any:
        """[64] in global memory. `which`: a walk, or SHARE."""
        at = self.place.block, self.item.batch, self.place.head, self.number
        return self.kernel.corrections.at[(which, *at)]

    def correct(
        self, by_rounding: Callable[[], None], of_one_key: Callable[[OneKey], None]
    ) -> None:
        """Calls what stores the chunk's corrections, if it has any."""

        @pl.when(self.is_corrected())
        def _() -> None:
            own, steps = self.kernel.own, self.kernel.spec.T - self.number * C
            key, equal = one_key.find(self.blocks(own.k), steps, own.key, own.sums)
            is_one = (self.alike > 0) & equal
            pl.when(is_one)(lambda: of_one_key(key))
            pl.when(jnp.logical_not(is_one))(by_rounding)


def carry(
    kernel: Kernel,
    item: Item,
    place: Place,
    start: Any,
    step: Callable[[Chunk, list[jax.Array]], list[jax.Array]],
) -> None:
    """Carries 64 columns of S or dS', transposed, over the chunks of an item."""
    own, spec = kernel.own, kernel.spec
    columns, blocks = pl.ds(place.block * HALF, HALF), range(frame.blocks_of_key(spec))
    state = [mosaic.zeros(HALF, HALF) for _ in blocks]
    if start is not None:
        # Times 1 as in `walk.carry_item`.
        at = item.batch, place.head, columns
        sources = [start.at[(*at, pl.ds(block * HALF, HALF))] for block in blocks]
        state = [1.0 * load(source, optimized=False) for source in sources]

    def one(chunk: Any, state: list[jax.Array]) -> list[jax.Array]:
        slot = own.chunks.slot(item.before + chunk)
        own.chunks.produced.wait(slot)
        here = Chunk(kernel, item, place, kernel.number_of(place.walk, chunk), slot)
        found = step(here, state)
        plgpu.commit_smem()  # what was read of the slot, ahead of the load that overwrites it
        own.chunks.consumed.arrive(slot)
        return found

    lax.fori_loop(0, item.chunks, one, state)


def step_from_start(here: Chunk, S: list[jax.Array]) -> list[jax.Array]:
    """Stores a chunk's corrections by e, or those of one key but for the last term, and SHARE;
    returns S'."""
    own, numbers = here.kernel.own, here.numbers()
    states, dstates = here.blocks(own.states), here.blocks(own.dstates)
    dr = [own.dr.at[here.slot], own.rest.at[here.slot]]

    def store_share(share: float) -> None:
        mosaic.store_in_memory(here.target(SHARE), in_all_rows(share))

    def by_rounding() -> None:
        e, last = overwrite([states], errors(S, states), dstates)
        of_queries, of_keys = mosaic.multiply(*(times(here, rows, e) for rows in (own.q, own.k)))
        read = dot(own.dout.at[here.slot], of_queries)
        recalled = total(dot(part, of_keys) for part in dr)
        of_steps = here.factor(frame.READ) * read - here.factor(frame.RECALLED) * recalled
        store(here, of_steps, last * numbers.kept())
        store_share(1.0)

    def of_one_key(key: OneKey) -> None:
        along = key.along(S)
        across, last = overwrite([states, dstates], key.across(S, along), dstates)
        (of_queries,) = mosaic.multiply(times(here, own.q, across))
        read = here.factor(frame.READ) * dot(own.dout.at[here.slot], of_queries)
        u = own.written.at[here.slot, 0], own.written.at[here.slot, 1]
        room = own.key.at[len(states) + 1]
        dots = one_key.dots_along(key, along, room, own.numbers.at[here.slot], dr, u)
        store(here, read, last * numbers.kept(), dots)
        store_share(0.0)

    here.correct(by_rounding, of_one_key)
    parts = [mosaic.load_transposed(own.written.at[here.slot, part]) for part in range(PARTS)]
    u = parts[0].astype(F32) + parts[1].astype(F32)
    written = frame.in_two_parts(numbers.times(u, numbers.of_written()))
    return add_products(S, numbers.kept(), [(written, here.blocks(own.k))])


def step_from_end(here: Chunk, dstate: list[jax.Array]) -> list[jax.Array]:
    """Stores a chunk's corrections by d; returns dS."""
    own, numbers = here.kernel.own, here.numbers()
    states, dstates = here.blocks(own.states), here.blocks(own.dstates)

    def by_rounding() -> None:
        d, last = overwrite([dstates], errors(dstate, dstates), states)
        (of_keys,) = mosaic.multiply(times(here, own.k, d))
        written = here.factor(frame.WRITTEN) * dot(own.written.at[here.slot, 0], of_keys)
        store(here, -written, last * numbers.kept() + written)

    def of_one_key(key: OneKey) -> None:
        both = zip(key.across_rounded(states), errors(dstate, dstates), strict=True)
        last = total(jnp.sum(across * d, axis=1) for across, d in both)
        store(here, in_all_rows(0.0), last * numbers.kept())

    here.correct(by_rounding, of_one_key)
    read = frame.in_two_parts(numbers.times(here.columns_of(own.dout), numbers.of_read()))
    dr = here.columns_of(own.dr) + here.columns_of(own.rest)
    recalled = frame.in_two_parts(numbers.times(-dr, numbers.of_recalled()))
    factors = (read, here.blocks(own.q)), (recalled, here.blocks(own.k))
    return add_products(dstate, numbers.kept(), factors)


def errors(state: list[jax.Array], rounded: list[Any]) -> Iterator[jax.Array]:
    """What rounding took from a state, block by block."""
    for exact, tile in zip(state, rounded, strict=True):
        yield exact - load(tile).astype(F32)


def overwrite(
    places: list[list[Any]], state: Iterable[jax.Array], other: list[Any]
) -> tuple[list[list[Any]], jax.Array]:
    """Stores a state over rounded ones, in as many parts as there are places. Returns the tiles of
    each part, transposed back, and the state's product with the `other` rounded one, a sum for each
    of v's columns."""
    sums = []
    for n, block in enumerate(state):
        sums.append(dot(other[n], block))
        parts = (block.astype(BF16),) if len(places) == 1 else frame.in_two_parts(block)
        for tiles, part in zip(places, parts, strict=True):
            tiles[n][...] = part
    plgpu.commit_smem()
    return [[tile.T for tile in tiles] for tiles in places], total(sums)


def times(here: Chunk, rows: Any, state: list[list[Any]]) -> tuple[jax.Array, list[Any]]:
    """The products of a chunk's rows of q or k with a state in parts, to be added up."""
    blocks = here.blocks(rows)
    products = [pair for part in state for pair in zip(blocks, part, strict=True)]
    return mosaic.zeros(C, HALF), products


def store(
    here: Chunk, of_steps: jax.Array, of_last: jax.Array, beside: jax.Array | None = None
) -> None:
    """Stores corrections of ddecay, the sums of dL from each step to the chunk's end. `of_last`:
    terms whose sum is added to dL of the last step. `beside`: what is added to the sums."""
    sums = here.kernel.own.sums
    for to, terms in zip((sums.at[0], sums.at[1]), (of_steps, of_last), strict=True):
        to[...] = terms
    plgpu.commit_smem()
    found = sums_to_end(load(sums.at[0], OF_COLUMNS), load(sums.at[1], OF_COLUMNS))
    found = found if beside is None else found + beside
    mosaic.store_in_memory(here.target(here.place.walk), found)
    plgpu.commit_smem()  # ahead of what overwrites the sums
