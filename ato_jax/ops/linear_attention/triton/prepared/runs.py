"""The runs of rows whose features are decayed beforehand, and those that are too steep for it.

A run is mild where no channel loses more than `decay.MOST_LOST_OF_RUN` in either half. A program of
`steep.py` looks through several runs and passes over the mild ones. In the others it goes chunk by
chunk: `MILD_ROWS` rows where no channel loses much within any such chunk, and `STEEP_BLOCK` rows
whose pairs are parted level by level where one does (`channel/chunk.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention.decay import LEAST_DECAY, most_lost_at_once
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton.channel.chunk import STEEP_BLOCK
from ato_jax.ops.linear_attention.triton.walk import Walk
from ato_jax.triton import tiles
from ato_jax.triton.arithmetic import LOG2_E
from ato_jax.triton.launch import piece_id
from ato_jax.triton.tiles import Columns, Rows

MILD_ROWS = 32
RUNS = 8  # that one program looks through

# [B, G, P, 2] int32: how many chunks of MILD_ROWS rows a run has, and how many of STEEP_BLOCK.
# Both are 0 where it is not steep.
Turns = jax.Array

Chunk = Callable[[bool, int], Callable[[Any, Any], Any]]
WalkChunks = Callable[[Chunk, Any], Any]


def load_columns(ref: Any, rows: Rows, columns: Columns) -> jax.Array:
    """Some channels of the decays, [C, f], to base 2."""
    return jnp.maximum(tiles.load_tile(ref, rows, columns), LEAST_DECAY) * LOG2_E


def slices(spec: LinearAttentionSpec, widest: int) -> tuple[int, int]:
    """Into how many tiles the columns of q and k are cut, and their width."""
    width = min(widest, tiles.padded(spec.F))
    return pl.cdiv(spec.F, width), width


def part_rows(walk: Walk) -> int:
    """The rows of a chunk whose pairs are all multiplied at once; they divide half a run."""
    return min(MILD_ROWS, walk.pieces.rows // 2)


def turns(spec: LinearAttentionSpec, walk: Walk, totals: jax.Array, steep: jax.Array) -> Turns:
    """From the decays' sums of each part of a run, [B, G, P, parts, F], and which are steep."""
    at_once = jnp.all(totals >= -most_lost_at_once(spec), axis=(3, 4))
    rows = walk.pieces.rows
    chunks = jnp.where(at_once[..., None], jnp.array([rows // part_rows(walk), 0]), 0)
    levels = jnp.where(at_once[..., None], 0, jnp.array([0, rows // STEEP_BLOCK]))
    return jnp.where(steep[..., None], chunks + levels, 0).astype(jnp.int32)


def is_steep(turns_ref: Any) -> jax.Array:
    """Whether the run is steep whose turns [2] these are."""
    return turns_ref[0] + turns_ref[1] > 0


def programs(walk: Walk, first_run: int = 0) -> int:
    """How many programs look through the runs from the first one on."""
    return pl.cdiv(walk.pieces.count - first_run, RUNS)


def over_runs(
    walk: Walk, first_run: int, turns_ref: Any, body: Callable[[Any, Any, WalkChunks], None]
) -> None:
    """`body(run, steep, walk_chunks)` for each of the program's runs.

    `walk_chunks(chunk, carry)` is the carry after `chunk(mild, rows)(i, carry)` for each chunk i,
    of which there are none where the run is not steep.
    """
    first = first_run + piece_id() * RUNS
    last = walk.pieces.count - 1
    numbers = jnp.minimum(first + jnp.arange(RUNS, dtype=jnp.int32), last)
    kind = jnp.arange(2, dtype=jnp.int32)[None, :]
    # All turns at once, so that where no run is steep no load waits for another.
    some = jnp.max(plgpu.load(turns_ref.at[numbers[:, None], kind])) > 0  # [RUNS, 2]

    def look(number: Any, _: Any) -> None:
        run = jnp.minimum(first + number, last)
        counts = [jnp.where(first + number <= last, turns_ref[run, kind], 0) for kind in (0, 1)]

        def walk_chunks(chunk: Chunk, carry: Any) -> Any:
            for mild, count in zip((True, False), counts, strict=True):
                rows = part_rows(walk) if mild else STEEP_BLOCK
                carry = jax.lax.fori_loop(0, count, chunk(mild, rows), carry)
            return carry

        body(run, counts[0] + counts[1] > 0, walk_chunks)

    jax.lax.fori_loop(0, some.astype(jnp.int32) * RUNS, look, None)


def load_state(
    spec: LinearAttentionSpec, refs: tuple[Any, Any], edge: Any, wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """kv [V, F] and z [1, F] at one of the edges, of refs [edges, V, F] and [edges, F], or zeros
    where it is not wanted."""
    kv_ref, k_sum_ref = refs
    kv = tiles.load_tile(kv_ref, tiles.all_rows(spec.V).only_if(wanted), spec.F, edge, 0)  # [V, F]
    z = tiles.load_rows(k_sum_ref, tiles.all_rows(spec.F).only_if(wanted), edge)  # [F]
    return kv.astype(jnp.float32), z[None, :]


def store_state(
    spec: LinearAttentionSpec,
    refs: tuple[Any, Any],
    run: Any,
    wanted: jax.Array,
    state: tuple[jax.Array, jax.Array],
) -> None:
    """kv [V, F] and z [1, F] as those of one run, where that is wanted."""
    (kv_ref, k_sum_ref), (kv, z) = refs, state
    tiles.store_tile(kv_ref, tiles.all_rows(spec.V).only_if(wanted), spec.F, kv, run, 0)
    columns = tiles.all_rows(spec.F).only_if(wanted)
    plgpu.store(k_sum_ref.at[run, columns.numbers], z[0], mask=columns.exist)
