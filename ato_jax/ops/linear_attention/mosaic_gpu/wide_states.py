"""One kernel that walks a sequence and stores the state at each run of 256 rows.

`wide_heads.py` launches it, and `wide_runs.py` reads the states. A walk over keys goes from the
first chunk to the last and stores the sums over all earlier keys ahead of each run:

    S = sum_j phi(k_j) v_j^T [F, V],  z = sum_j phi(k_j) [F]

A walk over queries goes from the last chunk to the first and stores the sums over all later queries
behind each run. It reads inverse and e of each row, which the pass DQ of `wide_runs.py` writes:

    R = sum_i phi'_i g_i^T [F, V],  u = -sum_i e_i phi'_i [F],  phi'_i = phi(q_i) inverse_i

S and R are stored for each run, z and u for each chunk. Where rows see both sides through a decay,
both walks also run in the other direction. Where each query sees its whole segment, without a
decay, both walks go forwards and store the sums over each document once (`document_states.py`). A
chunk in which a document ends is then multiplied twice.

With a decay or segments each row's term has a factor, and so has the sum at each chunk
(`wide_factors.py`). In float16 phi(k), and S or R, are multiplied by powers of two before they are
rounded (`wide_powers.py`), and inverse contains the power of phi'.

    memory    loads chunks of x and y, which are k and v or q and g, into a ring
    sums      each warpgroup has 64 features: it multiplies phi(x)^T [64, C], in registers, by all
              columns of y, and stores the sums [64, V] where a run begins

Each warpgroup keeps all V columns of its sums in registers, so a feature is mapped once. The
registers of a multiprocessor hold the sums of two or three warpgroups: a state of 256 features is
divided between two blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
from ato_jax.mosaic.roles import workers_registers
from ato_jax.mosaic.tiles import tiled
from ato_jax.ops.linear_attention.mosaic_gpu import (
    document_states,
    feature_maps,
    frame,
    row_copies,
    wide_powers,
)
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C
from ato_jax.ops.linear_attention.mosaic_gpu.whole_sums import blocks_of_state
from ato_jax.ops.linear_attention.scans.chunks import CHUNKS_OF_RUN
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

STAGES = 3
MOST_WORKERS = 3  # warpgroups of a block whose sums fit its registers, where V = D = 192
MEMORY = Role("memory", mosaic.MEMORY_REGISTERS)
# The cost of cutting a sequence into pieces, in units of the time of one chunk: the kernel for the
# sums of pieces, and the scan over them.
CUT = 12.0


def chunks_at_once(spec: LinearAttentionSpec) -> int:
    """How many chunks a piece is a multiple of: those of a run where rows are computed by runs."""
    return CHUNKS_OF_RUN if frame.by_runs(spec) else 1


def pieces_of(spec: LinearAttentionSpec, blocks: int) -> int:
    """The number of pieces that takes the least time. More pieces occupy more multiprocessors, but
    `whole_sums` reads the rows of all pieces but one a second time, at the same time per chunk."""
    runs, heads = runs_of(spec), spec.B * spec.G

    def cost(pieces: int) -> float:
        each = int(pl.cdiv(runs, pieces)) * CHUNKS_OF_RUN
        found = float(pl.cdiv(heads * parts_of_state(spec) * pieces, blocks)) * each
        if pieces > 1:
            of_sums = heads * blocks_of_state(spec) * (pieces - 1)
            found += CUT + float(pl.cdiv(of_sums, blocks)) * each
        return found

    return min(range(1, runs + 1), key=cost)


def workers_of(spec: LinearAttentionSpec) -> int:
    """The number of warpgroups with 64 features each in a block."""
    count = spec.D // HALF
    return count if count <= MOST_WORKERS else count // 2


def parts_of_state(spec: LinearAttentionSpec) -> int:
    """How many blocks share a state."""
    return spec.D // HALF // workers_of(spec)


def runs_of(spec: LinearAttentionSpec) -> int:
    return int(pl.cdiv(spec.T, CHUNKS_OF_RUN * C))


def sums_of(spec: LinearAttentionSpec) -> Role:
    """The role of the warpgroups that accumulate the sums."""
    workers = workers_of(spec)
    return Role("sums", workers_registers(workers), workers)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    x: Array  # [stages, workers, C, 64]
    y: Array  # [stages, C, V], in blocks of 64 columns
    state: Array  # [workers, V / 64, 64, 64]: the sums ahead of the piece, then those of each run
    rows: Array  # [stages, vectors, C] float32
    chunks: Ring  # of x, y and rows
    start_loaded: Signal
    start_free: Signal


@dataclasses.dataclass(frozen=True)
class Walk:
    """The kernel's static arguments, its arrays in global memory, and its storage.

    `deal` counts each part of a state as a head. `rows` are float32 vectors with a number for each
    row: inverse and e of queries, or a factor of keys; and last, if `has_keeps`, the factor of the
    sums ahead of the row's chunk. `powers` [B, heads, 2] are the powers of two of keys and sums.
    `steps` are `document_states.OfRows.steps`; None where the sums are not those of documents."""

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
    steps: Any
    states: Any
    vectors: Any

    @property
    def tiling(self) -> row_copies.ByBlocks:
        return row_copies.by_blocks(self.spec, always=True)

    @property
    def workers(self) -> int:
        return workers_of(self.spec)

    @property
    def columns(self) -> int:
        """How many blocks of 64 values there are."""
        return self.spec.V // HALF

    def head_of(self, item: Item) -> Any:
        return lax.div(item.head, parts_of_state(self.spec))

    def block_of(self, item: Item, worker: Any) -> Any:
        """Which 64 features are a warpgroup's."""
        return lax.rem(item.head, parts_of_state(self.spec)) * self.workers + worker

    def place_of(self, item: Item, chunk: Any) -> Any:
        """The position within the piece, counted from its start, of the walk's step `chunk`."""
        return item.chunks - 1 - chunk if self.from_the_end else chunk

    def power(self, item: Item, number: int) -> Any:
        """One of the item's powers of two; None in bfloat16."""
        return None if self.powers is None else self.powers[item.batch, self.head_of(item), number]

    def of_state(self, ref: Any, item: Item, number: Any, worker: Any, column: int) -> Any:
        """A block [64, 64] of the state `number`: a warpgroup's features, 64 values."""
        own = pl.ds(self.block_of(item, worker) * HALF, HALF)
        values = pl.ds(column * HALF, HALF)
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
    steps: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Launches the walk. It returns S or R of each run, [B, heads, runs, F, V] in the dtype of
    tiles, and z or u of each chunk, [B, heads, 4 runs, F] in float32.

    Args:
      deal: counts heads, and its pieces are whole runs.
      x: k or q.
      y: v or g.
      start: the sums ahead of each piece, in the direction of the walk: [B, heads, P or more, F, V]
        in the dtype of tiles, and [B, heads, P or more, F] in float32.
      of_rows: [B, heads, T up to a whole chunk] in float32. In a walk over queries inverse and e;
        in a walk over keys (), or with `keeps` the factor of each row's features.
      keeps: the factor of the sums ahead of each chunk, repeated in the chunk's rows; of the shape
        of `of_rows`.
      powers: [B, heads, 2] in float32, where the dtype is float16: of phi(k), and of the sums.
      from_the_end: whether the walk goes from the last chunk to the first.
      steps: [B, chunks], of `document_states.OfRows`, for the sums over each document, stored
        where `document_states.py` says. The places of other runs and chunks are not written.
    """
    heads, of_queries = deal.heads, len(of_rows) == 2
    deal = dataclasses.replace(deal, heads=heads * parts_of_state(spec))
    rows = [*of_rows, *([] if keeps is None else [keeps])]

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        x, y, start, start_vector, *own_rows, states, vectors = refs
        own_steps = own_rows.pop() if steps is not None else None
        own_powers = own_rows.pop() if powers is not None else None
        arrays = x, y, start, start_vector, own_rows, own_powers, own_steps, states, vectors
        return Walk(spec, deal, own, of_queries, from_the_end, keeps is not None, *arrays)

    runs = runs_of(spec)
    out_type = (
        jax.ShapeDtypeStruct((spec.B, heads, runs, spec.D, spec.V), frame.tiling(spec).dtype),
        jax.ShapeDtypeStruct((spec.B, heads, runs * CHUNKS_OF_RUN, spec.D), F32),
    )
    sums = sums_of(spec)
    roles, parts = mosaic.Roles((sums, MEMORY)), ((MEMORY, memory), (sums, add_up))
    program = mosaic.Program(roles, storage_of(spec, sums, len(rows)), parts, bind)
    arrays = x, y, *start, *rows, *(given for given in (powers, steps) if given is not None)
    found: tuple[jax.Array, jax.Array] = mosaic.launch(
        frame.name_of(name), program, deal, out_type, arrays
    )
    return found


def storage_of(spec: LinearAttentionSpec, sums: Role, vectors: int) -> Storage:
    tiling, columns = row_copies.by_blocks(spec, always=True), spec.V // HALF
    workers = sums.warpgroups
    x = Buffer(tiling.of_rows(STAGES, workers, C, HALF), copies=workers)
    y = Buffer(tiling.tiles(STAGES), copies=tiling.blocks)
    state = Buffer(tiling.shared(workers, columns, HALF, HALF), copies=workers * columns)
    rows = Buffer(plgpu.SMEM((STAGES, vectors, C), F32), copies=vectors) if vectors else None
    return Storage(
        x=x,
        y=y,
        state=state,
        rows=rows,
        chunks=Ring.of(STAGES, (x, y, rows), (sums,)),
        start_loaded=Signal((state,)),
        start_free=Signal((sums,)),
    )


def memory(walk: Walk) -> None:
    steps = walk.deal.each(lambda item: load_piece(walk, item))
    walk.own.start_free.wait()
    walk.own.chunks.drain(steps)


def load_piece(walk: Walk, item: Item) -> None:
    own, tiling, head = walk.own, walk.tiling, walk.head_of(item)
    pl.when(item.number > 0)(own.start_free.wait)
    for worker in range(walk.workers):
        for column in range(walk.columns):
            source = walk.of_state(walk.start, item, item.piece, worker, column)
            target = own.state.at[worker, column]
            plgpu.copy_gmem_to_smem(source, target, own.start_loaded.barrier)

    def load_chunk(chunk: Any, _: None) -> None:
        step, rows = item.before + chunk, item.rows(walk.place_of(item, chunk))
        slot = own.chunks.slot(step)
        loaded = own.chunks.produced.at
        own.chunks.acquire(step)
        for worker in range(walk.workers):
            of_worker = walk.x, item, rows, head, walk.block_of(item, worker)
            row_copies.copy_block(tiling, *of_worker, own.x.at[slot, worker], loaded[slot])
        tiling.copy_tile(walk.y, item, rows, head, own.y, slot, own.chunks.produced)
        for number, ref in enumerate(walk.rows):
            source = ref.at[item.batch, head, rows]
            plgpu.copy_gmem_to_smem(source, own.rows.at[slot, number], loaded[slot])

    lax.fori_loop(0, item.chunks, load_chunk, None)


def add_up(walk: Walk) -> None:
    walk.deal.each(lambda item: sum_piece(walk, item))
    plgpu.wait_smem_to_gmem(0)


def map_keys(
    walk: Walk, item: Item, x: jax.Array, slot: Any, here: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """phi(k)^T [64, C], and its sum over the chunk's rows [64], which is added to z. `here` says
    which rows count."""
    maps, tiling = feature_maps.features(walk.spec), walk.tiling
    first = walk.block_of(item, mosaic.group()) * HALF if tiling.is_filled else 0
    power = walk.power(item, wide_powers.KEYS)
    if not walk.rows and power is None and here is None:
        phi = maps.transposed_keys(x, first)
        return phi, jnp.sum(phi.astype(F32), axis=1)
    phi = maps.unrounded_transposed_keys(x, first)
    if walk.rows:
        factor = mosaic.in_rows(load(walk.own.rows.at[slot, 0], OF_COLUMNS), HALF)
        phi = phi * factor
        if not maps.slope_is_known:
            # Behind the last row the factor is 0, but phi(0) need not be finite.
            phi = jnp.where(factor > 0, phi, 0.0)
    if here is not None:
        phi = jnp.where(here, phi, 0.0)
    phi = mosaic.rounded(phi if power is None else phi * power, tiling.dtype)
    return phi, jnp.sum(phi.astype(F32), axis=1)


def map_queries(
    walk: Walk, item: Item, x: jax.Array, slot: Any, place: Any, here: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """phi'^T [64, C], and the chunk's term of u [64]. `here` says which rows count."""
    spec, maps = walk.spec, feature_maps.features(walk.spec)
    inverse, e = (load(walk.own.rows.at[slot, number], OF_COLUMNS) for number in range(2))
    first = walk.block_of(item, mosaic.group()) * HALF
    phi = maps.unrounded_transposed_queries(x, first)
    phi = phi * mosaic.in_rows(inverse, HALF)
    e = mosaic.in_rows(e, HALF)
    if here is not None:
        phi, e = jnp.where(here, phi, 0.0), jnp.where(here, e, 0.0)
    elif spec.T % C and not maps.slope_is_known:
        # Behind the last row g and e are 0, but phi(0) inverse may be large or not finite.
        here = mosaic.hidden_position(1) < spec.T - item.first_row - place * C
        phi, e = jnp.where(here, phi, 0.0), jnp.where(here, e, 0.0)
    return mosaic.rounded(phi, walk.tiling.dtype), -jnp.sum(phi * e, axis=1)


def sum_piece(walk: Walk, item: Item) -> None:
    own, head, worker = walk.own, walk.head_of(item), mosaic.group()
    of_block = pl.ds(walk.block_of(item, worker) * HALF, HALF)
    first_chunk = lax.div(item.first_row, C)
    own.start_loaded.wait()
    of_start = (load(own.state.at[worker, column]) for column in range(walk.columns))
    sums = tuple(part.astype(F32) for part in of_start)
    power = walk.power(item, wide_powers.SUMS)
    if power is not None:
        sums = tuple(part * (1 / power) for part in sums)
    of_vector = walk.start_vector.at[item.batch, head, item.piece, of_block]
    # A mesh's axes belong to the type of what is loaded, but not to that of a sum.
    vector = load(of_vector, OF_ROWS, optimized=False) + 0.0

    def sum_chunk(chunk: Any, carried: Any) -> Any:
        place = walk.place_of(item, chunk)
        slot, number = own.chunks.slot(item.before + chunk), first_chunk + place
        if walk.steps is not None:
            return sum_documents(walk, item, number, slot, carried)
        sums, vector = carried
        begins = lax.rem(place, CHUNKS_OF_RUN) == (CHUNKS_OF_RUN - 1 if walk.from_the_end else 0)
        pl.when(begins | (chunk == 0))(
            lambda: store_sums(walk, item, lax.div(number, CHUNKS_OF_RUN), sums)
        )
        walk.vectors.at[item.batch, head, number, of_block][...] = vector
        own.chunks.produced.wait(slot)
        x = mosaic.load_transposed(own.x.at[slot, worker])
        if walk.of_queries:
            phi, added = map_queries(walk, item, x, slot, place)
        else:
            phi, added = map_keys(walk, item, x, slot)
        if walk.has_keeps:
            keep = own.rows[slot, len(walk.rows) - 1, 0]
            sums, vector = tuple(part * keep for part in sums), vector * keep
        blocks = walk.tiling.all_in(tiled(own.y).at[slot])
        sums = multiply(*((part, [(phi, y)]) for part, y in zip(sums, blocks, strict=True)))
        plgpu.commit_smem()  # the reads of this slot finish before the next load overwrites it
        own.chunks.consumed.arrive(slot)
        return tuple(sums), vector + added

    start: tuple[Any, ...] = sums, vector
    if walk.steps is not None:
        start = sums, vector, walk.steps[item.batch, first_chunk]
    lax.fori_loop(0, item.chunks, sum_chunk, start)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    own.start_free.arrive()


def sum_documents(
    walk: Walk, item: Item, number: Any, slot: Any, carried: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Completes the sums over the document of the chunk's first row, and begins those over the
    document of its last row. `number` is the chunk's number in the sequence. S, z and the chunk's
    number in `OfRows.steps` are carried."""
    own, worker, row = walk.own, mosaic.group(), mosaic.hidden_position(1)
    of_block = pl.ds(walk.block_of(item, worker) * HALF, HALF)
    at_vector = walk.vectors.at[item.batch, walk.head_of(item), number, of_block]
    sums, vector, step = carried
    # Ahead of the products: the next chunk would wait for it.
    next_step = walk.steps[item.batch, jnp.minimum(number + 1, walk.steps.shape[1] - 1)]

    def add(here: jax.Array, keep: Any, sums: Any, vector: Any) -> tuple[Any, Any]:
        keep = keep.astype(F32)
        x = mosaic.load_transposed(own.x.at[slot, worker])
        if walk.of_queries:
            phi, added = map_queries(walk, item, x, slot, None, here)
        else:
            phi, added = map_keys(walk, item, x, slot, here)
        blocks = walk.tiling.all_in(tiled(own.y).at[slot])
        sums = (part * keep for part in sums)
        sums = multiply(*((part, [(phi, y)]) for part, y in zip(sums, blocks, strict=True)))
        return tuple(sums), vector * keep + added

    end, begin = (
        document_states.rows_in(step, field)
        for field in (document_states.END, document_states.BEGIN)
    )
    own.chunks.produced.wait(slot)

    def complete() -> tuple[Any, Any]:
        goes_on = document_states.is_set(step, document_states.GOES_ON)
        found, of_document = add(row < end, goes_on, sums, vector)
        at_vector[...] = of_document
        pl.when(document_states.is_set(step, document_states.STORES) > 0)(
            lambda: store_sums(walk, item, lax.div(number, CHUNKS_OF_RUN), found)
        )
        return found, of_document

    sums, vector = lax.cond(end > 0, complete, lambda: (sums, vector))
    keeps = document_states.is_set(step, document_states.KEEPS)
    sums, vector = add(row >= begin, keeps, sums, vector)
    plgpu.commit_smem()  # the reads of this slot finish before the next load overwrites it
    own.chunks.consumed.arrive(slot)
    return sums, vector, next_step


def store_sums(walk: Walk, item: Item, run: Any, sums: Sequence[jax.Array]) -> None:
    power, worker = walk.power(item, wide_powers.SUMS), mosaic.group()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for column, part in enumerate(sums):
        part = part if power is None else part * power
        walk.own.state.at[worker, column][...] = part.astype(walk.tiling.dtype)
    plgpu.commit_smem()
    for column in range(walk.columns):
        target = walk.of_state(walk.states, item, run, worker, column)
        plgpu.copy_smem_to_gmem(walk.own.state.at[worker, column], target)
