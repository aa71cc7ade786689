"""The states that runs of 256 rows start from, of heads of 129 to 256 columns: of keys, ahead of
each run,

    S = sum_j phi(k_j) v_j^T [F, V],  z = sum_j phi(k_j) [F]

or, with what `wide_runs.py` leaves of each row, of queries, behind each run, by walks from the end,

    R = sum_i phi'_i g_i^T [F, V],  u = -sum_i e_i phi'_i [F],  phi'_i = phi(q_i) inverse_i

Where rows see both sides, keys are walked from the end, too, and queries from the start.

With a decay or segments a row adds its part times a factor, and a chunk keeps a part of the sums
ahead of it (`wide_factors.py`). In float16 phi(k) and S or R are multiplied by powers of two where
they are rounded (`wide_powers.py`), and the power of phi' is part of inverse.

    memory    loads chunks of x and y, which are k and v or q and g, as slots come free
    sums      phi(x)^T [64, C] in registers, times 128 columns of y; where a run begins, stores the
              sums [64, 128] as they are by then

So a piece is walked by as many blocks as have a part of its state, and these are enough to fill the
card where other kernels need more pieces. Where values are three times 64 columns, both blocks make
those in the middle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import (
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
    multiply,
)
from ato_jax.mosaic.roles import playing
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame, row_copies, wide_powers
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.scans.chunks import CHUNKS_OF_RUN
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Of keys, and of queries with their inverse and e: two blocks share a multiprocessor.
STAGES, STAGES_OF_QUERIES = 4, 3
REGISTERS = mosaic.REGISTERS // 4  # with more, a block has a multiprocessor to itself
SUMS, MEMORY = Role("sums", REGISTERS), Role("memory", REGISTERS)
COLUMNS = 2  # blocks of 64 values


# What a chunk takes in the sums of pieces, of its time here; another kernel and a scan, in chunks.
CHUNK_OF_SUMS, CUT = 0.4, 4.0


def chunks_at_once(spec: LinearAttentionSpec) -> int:
    """What pieces are made of: of wide heads, whole runs."""
    return CHUNKS_OF_RUN if frame.by_runs(spec) else 1


def pieces_of(spec: LinearAttentionSpec, blocks: int) -> int:
    """So many that all multiprocessors have a part of a state to walk, and few rows are read
    twice."""
    runs, parts = runs_of(spec), spec.B * spec.G * parts_of_state(spec)

    def cost(pieces: int) -> float:
        each = int(pl.cdiv(runs, pieces)) * CHUNKS_OF_RUN
        # A multiprocessor has room for two blocks, which share its time.
        found = max(1.0, parts * pieces / blocks) * each
        if pieces > 1:
            found += CUT + CHUNK_OF_SUMS * max(1.0, parts * (pieces - 1) / blocks) * each
        return found

    return min(range(1, runs + 1), key=cost)


def parts_of_state(spec: LinearAttentionSpec) -> int:
    """How many blocks share a state."""
    return spec.D // HALF * int(pl.cdiv(spec.V // HALF, COLUMNS))


def runs_of(spec: LinearAttentionSpec) -> int:
    return int(pl.cdiv(spec.T, CHUNKS_OF_RUN * C))


class Roles(mosaic.Roles):
    """Roles that keep the registers of the launch. A launch that deals registers takes all of a
    multiprocessor's."""

    def play(self, role: Role, part: Callable[..., None]) -> None:
        @pl.when(mosaic.group() == self.first(role))
        def _() -> None:
            token = playing.set(role)
            try:
                part()
            finally:
                playing.reset(token)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    x: Array  # [stages, C, 64]
    y: Array  # [stages, COLUMNS, C, 64]
    state: Array  # [COLUMNS, 64, 64]: the sums at the piece's start, then what is stored
    rows: Array  # [stages, vectors, C] float32
    chunks: Ring  # of x, y and rows
    start_loaded: Signal
    start_free: Signal


@dataclasses.dataclass(frozen=True)
class Walk:
    """The kernel: its arrays in global memory, and its storage. `deal` counts the parts of states
    as heads. `rows` are numbers of each row, of queries inverse and e first; behind them, if
    `has_keeps`, what a chunk keeps. `powers` [B, heads, 2] are those of keys and of the sums."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    own: Storage
    of_queries: bool
    from_the_end: bool
    has_keeps: bool
    x: Any
    y: Any
    start: Any
    start_vector: Any
    rows: Sequence[Any]
    powers: Any
    states: Any
    vectors: Any

    @property
    def values(self) -> int:
        return self.spec.V // HALF

    @property
    def shares(self) -> int:
        return int(pl.cdiv(self.values, COLUMNS))

    def part_of(self, item: Item) -> Any:
        return lax.rem(item.head, parts_of_state(self.spec))

    def head_of(self, item: Item) -> Any:
        return lax.div(item.head, parts_of_state(self.spec))

    def block_of(self, item: Item) -> Any:
        """Which 64 features are its own."""
        return lax.div(self.part_of(item), self.shares)

    def first_value(self, item: Item) -> Any:
        """The first of its blocks of 64 values."""
        share = lax.rem(self.part_of(item), self.shares)
        return jnp.minimum(share * COLUMNS, self.values - COLUMNS)

    def place_of(self, item: Item, chunk: Any) -> Any:
        """The number in memory, within the piece, of the chunk that is walked as number `chunk`."""
        return item.chunks - 1 - chunk if self.from_the_end else chunk

    def power(self, item: Item, number: int) -> Any:
        """None where there are none."""
        return None if self.powers is None else self.powers[item.batch, self.head_of(item), number]

    def of_state(self, ref: Any, item: Item, number: Any, column: int) -> Any:
        own = pl.ds(self.block_of(item) * HALF, HALF)
        values = pl.ds((self.first_value(item) + column) * HALF, HALF)
        return ref.at[item.batch, self.head_of(item), number, own, values]


def wide_states(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    name: str,
    x: jax.Array,
    y: jax.Array,
    start: tuple[jax.Array, jax.Array],
    of_rows: Sequence[jax.Array] = (),
    keeps: jax.Array | None = None,
    powers: jax.Array | None = None,
    from_the_end: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """[B, heads, runs, F, V] in the dtype of tiles, and of each chunk [B, heads, 4 runs, F] in
    float32.

    Args:
      deal: counts heads, and its pieces are whole runs.
      start: [B, heads, P or more, F, V] in the dtype of tiles and [B, heads, P or more, F] in
        float32, ahead of each piece as it is walked.
      of_rows: inverse and e of queries, [B, heads, T up to a whole chunk] in float32. Of keys
        none, or beside `keeps` what multiplies their features.
      keeps: what a chunk keeps of the sums ahead of it, in each of its rows, as `of_rows`.
      powers: [B, heads, 2] in float32, in float16: of phi(k), and of the sums in that dtype.
    """
    heads, of_queries = deal.heads, len(of_rows) == 2
    # Of two blocks on a multiprocessor one multiplies while the other one waits.
    blocks = 2 * deal.most_blocks
    deal = dataclasses.replace(deal, heads=heads * parts_of_state(spec), most_blocks=blocks)
    rows = [*of_rows, *([] if keeps is None else [keeps])]

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        x, y, start, start_vector, *own_rows, states, vectors = refs
        own_powers = own_rows.pop() if powers is not None else None
        arrays = x, y, start, start_vector, own_rows, own_powers, states, vectors
        return Walk(spec, deal, own, of_queries, from_the_end, keeps is not None, *arrays)

    runs = runs_of(spec)
    out_type = (
        jax.ShapeDtypeStruct((spec.B, heads, runs, spec.D, spec.V), frame.tiling(spec).dtype),
        jax.ShapeDtypeStruct((spec.B, heads, runs * CHUNKS_OF_RUN, spec.D), F32),
    )
    roles, parts = Roles((SUMS, MEMORY)), ((MEMORY, memory), (SUMS, add_up))
    program = mosaic.Program(roles, storage_of(spec, of_queries, len(rows)), parts, bind)
    arrays = x, y, *start, *rows, *([] if powers is None else [powers])
    found: tuple[jax.Array, jax.Array] = mosaic.launch(
        frame.name_of(name), program, deal, out_type, arrays
    )
    return found


def storage_of(spec: LinearAttentionSpec, of_queries: bool, vectors: int) -> Storage:
    tiling, stages = frame.tiling(spec), STAGES_OF_QUERIES if of_queries else STAGES
    x = Buffer(tiling.of_rows(stages, C, HALF))
    y = Buffer(tiling.of_rows(stages, COLUMNS, C, HALF), copies=COLUMNS)
    state = Buffer(tiling.shared(COLUMNS, HALF, HALF), copies=COLUMNS)
    rows = Buffer(plgpu.SMEM((stages, vectors, C), F32), copies=vectors) if vectors else None
    return Storage(
        x=x,
        y=y,
        state=state,
        rows=rows,
        chunks=Ring.of(stages, (x, y, rows), (SUMS,)),
        start_loaded=Signal((state,)),
        start_free=Signal((SUMS,)),
    )


def memory(walk: Walk) -> None:
    steps = walk.deal.each(lambda item: load_piece(walk, item))
    walk.own.start_free.wait()
    walk.own.chunks.drain(steps)


def load_piece(walk: Walk, item: Item) -> None:
    own, tiling, head = walk.own, frame.tiling(walk.spec), walk.head_of(item)
    block, first = walk.block_of(item), walk.first_value(item)
    pl.when(item.number > 0)(own.start_free.wait)
    for column in range(COLUMNS):
        source = walk.of_state(walk.start, item, item.piece, column)
        plgpu.copy_gmem_to_smem(source, own.state.at[column], own.start_loaded.barrier)

    def load_chunk(chunk: Any, _: None) -> None:
        step, rows = item.before + chunk, item.rows(walk.place_of(item, chunk))
        slot = own.chunks.slot(step)
        loaded = own.chunks.produced.at[slot]
        own.chunks.acquire(step)
        row_copies.copy_block(tiling, walk.x, item, rows, head, block, own.x.at[slot], loaded)
        for column in range(COLUMNS):
            of_values = walk.y, item, rows, head, first + column
            row_copies.copy_block(tiling, *of_values, own.y.at[slot, column], loaded)
        for number, ref in enumerate(walk.rows):
            source = ref.at[item.batch, head, rows]
            plgpu.copy_gmem_to_smem(source, own.rows.at[slot, number], loaded)

    lax.fori_loop(0, item.chunks, load_chunk, None)


def add_up(walk: Walk) -> None:
    walk.deal.each(lambda item: sum_piece(walk, item))
    plgpu.wait_smem_to_gmem(0)


def map_keys(walk: Walk, item: Item, x: jax.Array, slot: Any) -> tuple[jax.Array, jax.Array]:
    """phi(k) [64, C], and what the chunk adds to the vector."""
    maps, tiling = feature_maps.features(walk.spec), frame.tiling(walk.spec)
    first = walk.block_of(item) * HALF if tiling.is_filled else 0
    power = walk.power(item, wide_powers.KEYS)
    if not walk.rows and power is None:
        phi = maps.transposed_keys(x, first)
        return phi, jnp.sum(phi.astype(F32), axis=1)
    phi = maps.unrounded_transposed_keys(x, first)
    if walk.rows:
        factor = mosaic.in_rows(load(walk.own.rows.at[slot, 0], OF_COLUMNS), HALF)
        phi = phi * factor
        if not maps.slope_is_known:
            # Beyond the end the factor is 0, but phi(0) need not be finite.
            phi = jnp.where(factor > 0, phi, 0.0)
    phi = mosaic.rounded(phi if power is None else phi * power, tiling.dtype)
    return phi, jnp.sum(phi.astype(F32), axis=1)


def map_queries(
    walk: Walk, item: Item, x: jax.Array, slot: Any, place: Any
) -> tuple[jax.Array, jax.Array]:
    """phi' [64, C], and what the chunk adds to the vector."""
    spec, maps = walk.spec, feature_maps.features(walk.spec)
    inverse, e = (load(walk.own.rows.at[slot, number], OF_COLUMNS) for number in range(2))
    phi = maps.unrounded_transposed_queries(x, walk.block_of(item) * HALF)
    phi = phi * mosaic.in_rows(inverse, HALF)
    e = mosaic.in_rows(e, HALF)
    if spec.T % C and not maps.slope_is_known:
        # Beyond the end g and e are 0, but phi(0) inverse may be large or not finite.
        here = mosaic.hidden_position(1) < spec.T - item.first_row - place * C
        phi, e = jnp.where(here, phi, 0.0), jnp.where(here, e, 0.0)
    return mosaic.rounded(phi, frame.tiling(spec).dtype), -jnp.sum(phi * e, axis=1)


def sum_piece(walk: Walk, item: Item) -> None:
    own, head = walk.own, walk.head_of(item)
    of_block = pl.ds(walk.block_of(item) * HALF, HALF)
    first_chunk = lax.div(item.first_row, C)
    own.start_loaded.wait()
    sums = tuple(load(own.state.at[column]).astype(F32) for column in range(COLUMNS))
    power = walk.power(item, wide_powers.SUMS)
    if power is not None:
        sums = tuple(part * (1 / power) for part in sums)
    of_start = walk.start_vector.at[item.batch, head, item.piece, of_block]
    # A mesh's axes belong to the type of what is loaded, but not to that of a sum.
    vector = load(of_start, OF_ROWS, optimized=False) + 0.0

    def sum_chunk(chunk: Any, carried: Any) -> Any:
        sums, vector = carried
        place = walk.place_of(item, chunk)
        slot, number = own.chunks.slot(item.before + chunk), first_chunk + place
        begins = lax.rem(place, CHUNKS_OF_RUN) == (CHUNKS_OF_RUN - 1 if walk.from_the_end else 0)
        pl.when(begins | (chunk == 0))(
            lambda: store_sums(walk, item, lax.div(number, CHUNKS_OF_RUN), sums)
        )

        @pl.when(lax.rem(walk.part_of(item), walk.shares) == 0)
        def _() -> None:
            walk.vectors.at[item.batch, head, number, of_block][...] = vector

        own.chunks.produced.wait(slot)
        x = mosaic.load_transposed(own.x.at[slot])
        if walk.of_queries:
            phi, added = map_queries(walk, item, x, slot, place)
        else:
            phi, added = map_keys(walk, item, x, slot)
        if walk.has_keeps:
            keep = own.rows[slot, len(walk.rows) - 1, 0]
            sums, vector = tuple(part * keep for part in sums), vector * keep
        sums = multiply(
            *((part, [(phi, own.y.at[slot, column])]) for column, part in enumerate(sums))
        )
        plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
        own.chunks.consumed.arrive(slot)
        return tuple(sums), vector + added

    lax.fori_loop(0, item.chunks, sum_chunk, (sums, vector))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    own.start_free.arrive()


def store_sums(walk: Walk, item: Item, run: Any, sums: Sequence[jax.Array]) -> None:
    power = walk.power(item, wide_powers.SUMS)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for column, part in enumerate(sums):
        part = part if power is None else part * power
        walk.own.state.at[column][...] = part.astype(frame.tiling(walk.spec).dtype)
    plgpu.commit_smem()
    for column in range(COLUMNS):
        target = walk.of_state(walk.states, item, run, column)
        plgpu.copy_smem_to_gmem(walk.own.state.at[column], target)
