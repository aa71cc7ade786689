"""What Hopper's kernels of the delta rule agree on: sizes, tiles, the numbers of each step, and how
kernels are launched.

Every tile is a block of 64 rows and 64 columns: a head of 128 columns is two of them, and a product
over its columns is one for each block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, OF_COLUMNS, OF_ROWS, Item, Ring, Role, load
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec

C = mosaic.ROWS  # steps of a chunk
LOG2_E = math.log2(math.e)
# The widest key: a state [64, D] in float32 and its rounded parts fill the registers of a thread.
WIDEST_KEY = 128
# The copy engine takes tiles of 8 rows, of arrays whose rows are a multiple of 8.
ROWS_OF_A_TILE = 8
# The most registers of a thread that multiplies: as many as each of two warpgroups gets.
MOST_REGISTERS = 240
# The least magnitude of beta that kernels take: a step's error is what it writes over beta. beta's
# gradient is a product of two such numbers over beta^2, which must stay a normal float32, 2^-126.
# Far below the rounding of float32, 2^-24, it is no different from 0 in what a step writes.
LEAST_BETA = 1e-12
# Numbers of a step, and where they lie in an array [.., NUMBERS, 64] (`steps.py`). Kernels of a
# decay per channel have the first three, and then whether one level has all pairs (`channel.py`).
BETA, OF_KEYS, OF_QUERIES, LOG_DECAY, READ, RECALLED, WRITTEN, DECAY, ALIKE = range(9)
ONE_LEVEL = 3
NUMBERS, NUMBERS_OF_CHANNELS = 9, 4
# The fewest chunks of a piece: a shorter one is not worth the walk that finds its map.
LEAST_CHUNKS = 16
# The most pieces of a sequence: XLA passes the state from one to the next, one at a time.
MOST_PIECES = 16
PARTS = 2  # of a factor of products, as `in_two_parts` makes them
MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)


@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    slices: blocks of 64 columns of v that a block of the walk has, each in a warpgroup.
    stages: slots of chunks of the walk.
    solve_blocks: persistent blocks of the kernel that solves the chunks.
    pieces: how many pieces of a sequence the walks take side by side.
    """

    slices: int
    stages: int = 2
    solve_blocks: int = 132
    pieces: int = 1


def tiling(spec: DeltaRuleSpec) -> mosaic.Tiling:
    """The tiles of q, k, v and out: 64 columns of a head, whose width is a multiple of 64."""
    return mosaic.Tiling(spec.layout, HALF, HALF, 1, BF16, spec.T % ROWS_OF_A_TILE != 0)


def blocks_of_key(spec: DeltaRuleSpec) -> int:
    return spec.D // HALF


def chunks_of(spec: DeltaRuleSpec) -> int:
    return -(-spec.T // C)


def worker_role(count: int, *, unrolled: bool = False) -> Role:
    """So many warpgroups that multiply, beside `MEMORY`."""
    registers = mosaic.workers_registers(count, MOST_REGISTERS)
    return Role("worker", registers, count, unrolled)


def deal_of_chunks(spec: DeltaRuleSpec, config: Config, together: int = 1) -> mosaic.Deal:
    """The items of a kernel whose chunks are independent: `together` chunks of a value head."""
    chunks = chunks_of(spec)
    items = -(-chunks // together)
    return mosaic.Deal(spec.B, spec.H, chunks * C, together * C, items, config.solve_blocks)


def launch(
    name: str,
    deal: mosaic.Deal,
    storage: mosaic.Storage,
    parts: Sequence[tuple[Role, Callable[..., None]]],
    bind: Callable[..., Any],
    given: dict[str, jax.Array],
    types: dict[str, Any],
) -> dict[str, jax.Array]:
    """Launches a kernel; returns its outputs by the names of `types`.

    Args:
      name: as profilers show it, but for what all names begin and end with.
      parts: roles with their parts, from the last warpgroup to the first.
      bind: makes what each part is called with, of own=storage and the arrays in global memory by
        the names of `given`, which are inputs, and of `types`.
    """

    def bind_all(refs: Sequence[Any], own: mosaic.Storage) -> Any:
        return bind(own=own, **dict(zip([*given, *types], refs, strict=True)))

    roles = mosaic.Roles(tuple(role for role, _ in reversed(parts)))
    found = mosaic.launch(
        f"gated_delta_rule_{name}_mosaic",
        mosaic.Program(roles, storage, parts, bind_all),
        deal,
        tuple(types.values()),
        tuple(given.values()),
        own_barriers=True,
    )
    return dict(zip(types, found, strict=True))


def key_head(spec: DeltaRuleSpec, head: Any) -> Any:
    """The head of q and k that a value head reads."""
    return lax.div(head, jnp.int32(spec.H // spec.G))


def blocks_at(spec: DeltaRuleSpec, tiles: Any, *place: Any) -> list[Any]:
    """The tiles [64, 64] of a key's columns, which lie behind `place` in shared memory."""
    return [tiles.at[(*place, block)] for block in range(blocks_of_key(spec))]


def load_rows(
    spec: DeltaRuleSpec, item: Item, ref: Any, rows: Any, head: Any, tiles: list[Any], barrier: Any
) -> None:
    """Loads rows of a head of q, k or its log decays, 64 columns to each of `tiles`."""
    for block, tile in enumerate(tiles):
        source = tiling(spec).part(ref, item, rows, head, block)  # [64, 64]
        plgpu.copy_gmem_to_smem(source, mosaic.for_copy(tile), barrier)


def load_chunks(item: Item, chunks: Ring, load_chunk: Callable[[Any, Any, Any], None]) -> None:
    """Loads an item's chunks as slots come free. `load_chunk` takes the number of the chunk in its
    item, the slot, and the barrier on which the slot's loads arrive."""

    def one(chunk: Any, _: None) -> None:
        step = item.before + chunk
        slot = chunks.slot(step)
        chunks.acquire(step)
        load_chunk(chunk, slot, chunks.produced.at[slot])

    lax.fori_loop(0, item.chunks, one, None)


def load_keys(
    spec: DeltaRuleSpec,
    item: Item,
    refs: Sequence[tuple[Any, Any]],
    rows: Any,
    head: Any,
    slot: Any,
    barrier: Any,
) -> None:
    """Loads rows of q and k into a slot. `refs`: each with its tiles, or None where they are not
    needed."""
    for ref, tiles in refs:
        if tiles is not None:
            load_rows(spec, item, ref, rows, head, blocks_at(spec, tiles, slot), barrier)


def numbers_in_memory(*slots: int, count: int = NUMBERS) -> Any:
    return plgpu.SMEM((*slots, count, C), F32)


def in_two_parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x as bfloat16, and as bfloat16 what rounding took from it: 16 bits of a float32 number.

    One part does not do: five roundings of 2^-9 each are twice the error budget of the result, and
    with keys that are all alike those of the inverse and of what it multiplies nearly cancel.
    """
    return mosaic.in_two_parts(x)


def products(a: tuple[Any, Any], b: tuple[Any, Any]) -> list[tuple[Any, Any]]:
    """Factors of a @ b, both in two parts. The product of both second parts is too small."""
    return [(a[0], b[0]), (a[1], b[0]), (a[0], b[1])]


def decayed_pairs(spec: DeltaRuleSpec, rows: list[Any], k: list[Any], numbers: Any) -> jax.Array:
    """rows_t . k_s exp2(L_t - L_s) on and below the diagonal, [64, 64], with k's own factor; L_t is
    the sum of log2 decays from the chunk's first step to t."""
    found = pairs(spec, rows, k, numbers)
    return found if spec.decay is None else found * decays_of_pairs(numbers)


def pairs(spec: DeltaRuleSpec, rows: list[Any], k: list[Any], numbers: Any) -> jax.Array:
    """rows_t . k_s, [64, 64], with k's own factor."""
    blocks = [(a, b.T) for a, b in zip(rows, k, strict=True)]
    (found,) = mosaic.multiply((mosaic.zeros(C, C), blocks))
    if spec.normalize_qk:
        found = found * mosaic.in_rows(load(numbers.at[OF_KEYS], OF_COLUMNS), C)
    return found


def decays_of_pairs(numbers: Any) -> jax.Array:
    """exp2(-|L_t - L_s|), [64, 64]: on and below the diagonal exp2(L_t - L_s)."""
    of_rows = mosaic.in_columns(load(numbers.at[LOG_DECAY], OF_ROWS), C)
    of_columns = mosaic.in_rows(load(numbers.at[LOG_DECAY], OF_COLUMNS), C)
    return jnp.exp2(-jnp.abs(of_rows - of_columns))
