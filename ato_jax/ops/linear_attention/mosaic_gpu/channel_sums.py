"""The sums over the keys of each piece with a decay per step and channel, and how steep chunks are.

`causal.py` launches it before the scan over pieces and `channel_output.py`. Read `channel.py`
first. The sums are scaled to the last row T of the piece. For the last piece they are left out,
unless the call returns its state.

    S = sum_j v_j phi(k_j)^T exp2(G_T - G_j) [V, F],  z = sum_j phi(k_j) exp2(G_T - G_j) [F]

Chunk by chunk, with k'_j = phi(k_j) exp2(G_C - G_j) for the last row C of the chunk, this is
S = exp2(G_C) S + v^T k'. No exponent is positive, however strong a gate is.

A block has one piece. Read `ato_jax/mosaic/rings.py` and `roles.py` for the kit. Warpgroups, and
the barriers between them:

    MEMORY (2)   loads chunks as slots of `rows` and `gate_rows` come free
      |    |    +--- v_loaded ------------------------------------------+
      |    +-------- rows: k loaded -----------------+                  |
      |  gate_rows: gates loaded                     |                  |
      v                                              v                  |
    FEATURES (3, 4)   half of F each: rounds the gates; sums them; stores k' in place of k; sums z
      |  weights_stored: both have stored their share of the weights of sums, once at the start
      |  mapped: k', and exp2(G_C), lie in the slot                     |
      v                                                                 v
    VALUES (0, 1)   half of V each: S_half [64, F] float32 in registers

MEMORY loads a slot of `gate_rows` again when FEATURES has consumed it, and one of `rows` when
FEATURES and VALUES have. Of a piece that is not summed FEATURES only needs the gates, to find out
how steep its chunks are.

    symbol      shape       what it is
    k, v        [64, F]     a chunk's rows; [64, V]. k' once it is mapped
    G_i         [64, F]     the gates from the chunk's first row to row i, summed
    keeps       [F]         exp2(G_C): what the chunk leaves of the state ahead of it
    lost        [F]         the sum of all gates of the piece
    least       [2, 64]     per chunk, from which `channel.turns_of` computes its number of turns
    weights     [64, 64]    0 and `channel.UNIT`: `halves` and `until_end` times the rounded gates
                            are the sums over parts of a chunk, and G_C - G_j; [8, 64] for `all`

Where a tile holds two heads, each half is one of them.
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
    ALIKE,
    F32,
    HALF,
    OF_COLUMNS,
    Array,
    Buffer,
    Item,
    Ring,
    Role,
    Signal,
    load,
    multiply,
)
from ato_jax.ops.linear_attention.mosaic_gpu import channel, channel_blocks, chunk_borders, frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, F
from ato_jax.ops.linear_attention.scans.borders import NO_BORDERS, OfSequence
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Slots of k and v, and of gates.
STAGES, GATES_STAGES = 3, 1

VALUES = Role("values", registers=96, warpgroups=2)
MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)
FEATURES = Role("features", registers=128, warpgroups=2, unrolled=True)
ROLES = mosaic.Roles((VALUES, MEMORY, FEATURES))


class Arrays(NamedTuple):
    """The kernel's inputs, in the order of its operands."""

    k: Any
    v: Any
    gates: Any
    begins: Any = None  # with segments, `begins`, `chunks` and `adding` of `borders.OfSequence`
    chunks: Any = None
    adding: Any = None
    powers: Any = None  # in float16, [B, G]


class Left(NamedTuple):
    """The arrays that the kernel writes, all in float32."""

    kv: Any  # [B, G, P, V, F]
    k_sum: Any  # [B, G, P, F]
    lost: Any  # [B, G, P, F]
    least: Any  # [B, tiles, chunks, 2, 64]


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    all: Array  # [2, 8, 64] float16: weights, as `halves` and `until_end`
    columns: Array  # [2, 2, 64] float32: z and lost of each half, to be stored
    gates: Array  # [GATES_STAGES, 2, 64, 64] float32
    halves: Array  # [64, 64] float16
    k: Array  # [STAGES, 64, F], or two blocks of [64, 64]
    keeps: Array  # [STAGES, F] float32
    least: Array  # [2, 64] float32
    ones: Array  # [2, 8, 64]
    rounded: Array  # [2, 64, 64] float16: gates as `channel.round_gates` leaves them
    total: Array  # [2, 64, 64] float32: 64 columns of S of each half of V, to be stored
    until_end: Array  # [64, 64] float16
    v: Array  # [STAGES, 2, 64, 64]
    rows: Ring  # of k and v; `produced`: k is loaded
    gate_rows: Ring
    mapped: Signal  # the slot of `rows` holds k' and `keeps`
    v_loaded: Signal
    weights_stored: Signal

    barriers = (
        "rows.consumed",
        "gate_rows.consumed",
        "gate_rows.produced",
        "leave",
        "rows.produced",
        "mapped",
        "v_loaded",
        "weights_stored",
    )


def storage_of(spec: LinearAttentionSpec) -> Storage:
    tiling = frame.tiling(spec)
    k = Buffer(tiling.tiles(STAGES), copies=tiling.blocks)
    v = Buffer(tiling.shared(STAGES, 2, C, HALF), copies=2)
    gates = Buffer(tiling.of_rows_in_float32(GATES_STAGES, 2, C, HALF), copies=2)
    return Storage(
        all=Buffer(channel.shared(spec, 2, ALIKE, C)),
        columns=Buffer(plgpu.SMEM((2, 2, HALF), F32)),
        gates=gates,
        halves=Buffer(channel.shared(spec, C, C)),
        k=k,
        keeps=Buffer(plgpu.SMEM((STAGES, F), F32)),
        least=Buffer(plgpu.SMEM((2, C), F32)),
        ones=Buffer(tiling.shared(2, ALIKE, C)),
        rounded=Buffer(channel.shared(spec, 2, C, HALF)),
        total=Buffer(tiling.shared(2, HALF, F // 2, dtype=F32)),
        until_end=Buffer(channel.shared(spec, C, C)),
        v=v,
        rows=Ring.of(STAGES, filled=(k,), readers=(FEATURES, VALUES)),
        gate_rows=Ring.of(GATES_STAGES, filled=(gates,), readers=(FEATURES,)),
        mapped=Signal((FEATURES,), within="rows"),
        v_loaded=Signal((v,), within="rows"),
        weights_stored=Signal((FEATURES,)),
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """A launch: its static arguments, its arrays in global memory, and its storage."""

    spec: LinearAttentionSpec
    deal: mosaic.Deal
    arrays: Arrays
    left: Left
    own: Storage

    @property
    def tiling(self) -> mosaic.Tiling:
        return frame.tiling(self.spec)

    def summed(self, item: Item) -> Any:
        """The number of chunks of an item that are summed up."""
        if self.spec.return_state:
            return item.chunks
        return jnp.where(item.piece < self.deal.pieces - 1, item.chunks, 0)


def channel_sums(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    k: jax.Array,
    v: jax.Array,
    gates: jax.Array,
    borders: OfSequence = NO_BORDERS,
    k_powers: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Launches the kernel. It returns in float32 kv [B, G, P, V, F]; k_sum [B, G, P, F]; the sums
    of each piece's gates, [B, G, P, F]; and `least`, from which `channel.turns_of` computes the
    number of turns of each chunk. With segments the sums are over the rows of `borders.adding`.

    Args:
      k_powers: [B, G], in float16 log2 of the power of two by which keys, and so both sums, are
        multiplied (`channel_powers.py`).
    """
    # One item for each block, since there is room for the sums of one.
    deal = dataclasses.replace(deal, most_blocks=deal.items)
    arrays = Arrays(k, v, gates, borders.begins, borders.chunks, borders.adding, k_powers)
    operands, structure = jax.tree.flatten(arrays)

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        given, left = refs[: len(operands)], Left(*refs[len(operands) :])
        return Walk(spec, deal, jax.tree.unflatten(structure, given), left, own)

    parts = (MEMORY, memory), (FEATURES, features), (VALUES, values)
    program = mosaic.Program(ROLES, storage_of(spec), parts, bind)
    of_pieces = spec.B, spec.G, deal.pieces
    out_type = (
        jax.ShapeDtypeStruct((*of_pieces, spec.V, spec.F), F32),
        jax.ShapeDtypeStruct((*of_pieces, spec.F), F32),
        jax.ShapeDtypeStruct((*of_pieces, spec.F), F32),
        jax.ShapeDtypeStruct((deal.B, deal.heads, pl.cdiv(deal.length, C), 2, C), F32),
    )
    name = frame.name_of("channel_sums")
    found: tuple[jax.Array, jax.Array, jax.Array, jax.Array] = mosaic.launch(
        name, program, deal, out_type, operands, own_barriers=True
    )
    return found


def memory(walk: Walk) -> None:
    """Loads chunks."""
    walk.deal.each(functools.partial(load_piece, walk))


def load_piece(walk: Walk, item: Item) -> None:
    lax.fori_loop(0, item.chunks, lambda chunk, _: load_chunk(walk, item, chunk), None)
    walk.own.rows.drain(walk.summed(item))
    walk.own.gate_rows.drain(item.chunks)


def load_chunk(walk: Walk, item: Item, chunk: Any) -> None:
    own, arrays, tiling, spec = walk.own, walk.arrays, walk.tiling, walk.spec
    rows = item.rows(chunk)
    slot, gates_slot = own.rows.slot(chunk), own.gate_rows.slot(chunk)

    @pl.when(chunk < walk.summed(item))
    def _load_summed() -> None:
        own.rows.acquire(chunk)
        k_head = channel_blocks.head_of_features(spec, arrays.k, item.head)
        tiling.copy_tile(arrays.k, item, rows, k_head, own.k, slot, own.rows.produced)  # [64, F]
        v_head = channel_blocks.head_of_values(spec, arrays.v, item.head)
        for half in range(2):
            source = tiling.part(arrays.v, item, rows, v_head, half)  # [64, 64]
            plgpu.copy_gmem_to_smem(source, own.v.at[slot, half], own.v_loaded.at[slot])

    own.gate_rows.acquire(chunk)
    gates_head = channel_blocks.head_of_features(spec, arrays.gates, item.head)
    for half in range(2):
        source = tiling.part(arrays.gates, item, rows, gates_head, half)  # [64, 64]
        target = own.gates.at[gates_slot, half]
        plgpu.copy_gmem_to_smem(source, target, own.gate_rows.produced.at[gates_slot])


def features(walk: Walk, half: int) -> None:
    """Sums half of the gates' columns, stores the same half of k', and sums z over it."""
    store_weights(walk, half)
    walk.deal.each(functools.partial(map_piece, walk, half))
    plgpu.wait_smem_to_gmem(0)


def store_weights(walk: Walk, half: int) -> None:
    """Stores what the products of both warpgroups take as weights."""
    own = walk.own
    mosaic.store_transposed(own.ones.at[half], mosaic.ones(C, ALIKE, walk.tiling.dtype))
    channel.store_all(own.all.at[half])
    if half:
        own.halves[...] = channel.of_halves()
    else:
        own.until_end[...] = channel.until_end()
    plgpu.commit_smem()
    own.weights_stored.arrive()
    own.weights_stored.wait()


def map_piece(walk: Walk, half: int, item: Item) -> None:
    of_piece = item.batch, walk.tiling.head_of(item.head, half), item.piece
    none = mosaic.zeros(HALF, ALIKE)
    sum_one = functools.partial(map_chunk, walk, half, item)
    found = lax.fori_loop(0, walk.summed(item), sum_one, (none, none))
    classify_one = functools.partial(classify_chunk, walk, half, item)
    lax.fori_loop(walk.summed(item), item.chunks, lambda chunk, _: classify_one(chunk), None)
    targets = walk.left.k_sum, walk.left.lost
    for number, (ref, rows) in enumerate(zip(targets, found, strict=True)):
        own = walk.own.columns.at[half, number]
        own[...] = jnp.sum(rows, axis=1) * (1 / ALIKE)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own, ref.at[(*of_piece, walk.tiling.columns_of(half))])


def map_chunk(walk: Walk, half: int, item: Item, chunk: Any, carried: Any) -> Any:
    """Carries half of z and of lost, [64, 8] each."""
    own, arrays, tiling = walk.own, walk.arrays, walk.tiling
    z, lost = carried
    rounded = own.rounded.at[half]
    slot = own.rows.slot(chunk)
    own_k = tiling.half_of(own.k, slot, half)
    round_gates(walk, half, item, chunk)
    halves, until_end, total = multiply(
        channel.sums_of(own.halves, rounded),
        channel.sums_of(own.until_end, rounded),
        channel.sums_by_channel(rounded, own.all.at[half]),
    )
    leave_least(walk, half, item, chunk, halves)
    keeps = jnp.exp2(total)
    own.rows.produced.wait(slot)
    own.keeps.at[slot, pl.ds(half * HALF, HALF)][...] = jnp.max(keeps, axis=1)
    if arrays.powers is not None:
        until_end += arrays.powers[item.batch, tiling.head_of(item.head, half)]
    channel.map_in_place(walk.spec, own_k, half, until_end, are_keys=True)
    if arrays.adding is not None:
        chunk_borders.keep_within(arrays.adding, item, chunk, own_k)
    plgpu.commit_smem()
    own.mapped.arrive(slot)
    (z,) = multiply((z * keeps, [(own_k.T, own.ones.at[half].T)]))
    own.rows.consumed.arrive(slot)
    return z, lost + total


def classify_chunk(walk: Walk, half: int, item: Item, chunk: Any) -> None:
    """Only writes `least`, of a chunk that is not summed."""
    round_gates(walk, half, item, chunk)
    (halves,) = multiply(channel.sums_of(walk.own.halves, walk.own.rounded.at[half]))
    leave_least(walk, half, item, chunk, halves)


def round_gates(walk: Walk, half: int, item: Item, chunk: Any) -> None:
    own, arrays = walk.own, walk.arrays
    borders = chunk_borders.of_chunk(arrays.begins, arrays.chunks, item, chunk)
    slot = own.gate_rows.slot(chunk)
    own.gate_rows.produced.wait(slot)
    channel.round_gates(own.gates.at[slot, half], own.rounded.at[half], borders)
    plgpu.commit_smem()
    own.gate_rows.consumed.arrive(slot)


def leave_least(walk: Walk, half: int, item: Item, chunk: Any, halves: jax.Array) -> None:
    """Stores the least, over half of F, of each of the sums [64, 64] of `channel.of_halves`."""
    own = walk.own.least.at[half]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    own[...] = jnp.min(halves, axis=1)
    plgpu.commit_smem()
    number = lax.div(item.first_row, C) + chunk
    plgpu.copy_smem_to_gmem(own, walk.left.least.at[item.batch, item.head, number, half])


def values(walk: Walk) -> None:
    """Computes half of the rows of S."""
    walk.deal.each(functools.partial(multiply_piece, walk))
    plgpu.wait_smem_to_gmem(0)


def multiply_piece(walk: Walk, item: Item) -> None:
    half, tiling, own = mosaic.group(), walk.tiling, walk.own.total
    of_head = () if tiling.heads == 1 else (pl.ds(half * HALF, HALF),)  # the columns of its head
    one = functools.partial(multiply_chunk, walk, half, of_head)
    S = lax.fori_loop(0, walk.summed(item), one, mosaic.zeros(HALF, walk.spec.F))
    of_piece = item.batch, tiling.head_of(item.head, half), item.piece
    for first in range(0, walk.spec.F, HALF):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        own.at[half][...] = S[:, first : first + HALF]
        plgpu.commit_smem()
        block = tiling.columns_of(half), pl.ds(first, HALF)
        plgpu.copy_smem_to_gmem(own.at[half], walk.left.kv.at[(*of_piece, *block)])


def multiply_chunk(
    walk: Walk, half: Any, of_head: tuple[Any, ...], chunk: Any, S: jax.Array
) -> jax.Array:
    """Carries half of S, [64, F]."""
    own, tiling = walk.own, walk.tiling
    slot = own.rows.slot(chunk)
    own.v_loaded.wait(slot)
    own.mapped.wait(slot)
    keeps = load(own.keeps.at[(slot, *of_head)], OF_COLUMNS)
    S *= mosaic.in_rows(keeps, HALF)
    features = tiling.head_in(own.k, slot, half)
    (S,) = multiply((S, [(own.v.at[slot, half].T, features)]))
    own.rows.consumed.arrive(slot)
    return S
