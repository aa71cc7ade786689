"""The prefix sums of the decays, as the kernels read them: within each chunk, and over each piece.

    sums[t]  = log2(e) sum of decay[first step of t's chunk .. t]

Kernels that Pallas lowers to Triton compute them. XLA would make those within a chunk by a
transpose and a product with a triangle, which takes several times as long as its bytes do, and
those over pieces in many kernels, each of which takes longer to start than to run. XLA computes
them where JAX cannot lower to Triton.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import launch
from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention.decay import LEAST_DECAY
from ato_jax.ops.linear_attention.scans.chunks import (
    LOG2_E,
    C,
    Cut,
    heads_of_tile,
    is_steep,
    whole_chunks,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

MOST_HEADS = 16  # of a tile of steps
WARPS = 2
# A program writes so many chunks of a piece, and reads the decays of so many chunks at once.
CHUNKS, ENDS, OF_PIECES_WARPS = 64, 512, 4


def of_heads(spec: LinearAttentionSpec, decay: jax.Array) -> jax.Array:
    """The prefix sums [B, G, T up to a whole chunk] of a decay per head [G]."""
    up = _to_base_2(decay)[:, None] * jnp.arange(1, C + 1, dtype=jnp.float32)  # [G, C]
    length = whole_chunks(spec.T)
    shape = (spec.B, spec.G, length // C, C)
    return jnp.broadcast_to(up[:, None], shape).reshape(spec.B, spec.G, length)


def of_steps(spec: LinearAttentionSpec, decay: jax.Array) -> jax.Array:
    """The prefix sums [B, G, T up to a whole chunk] of a decay per step [B, T, G], or [B, G, T]."""
    if launch.no_triton is not None:
        return _of_steps_by_xla(spec, decay)
    heads = min(MOST_HEADS, pl.next_power_of_2(spec.G))
    length, blocks = whole_chunks(spec.T), pl.cdiv(spec.G, heads)
    chunks = length // C

    def kernel(decay_ref: Any, sums_ref: Any) -> None:
        chunk, of_batch = pl.program_id(0) % chunks, pl.program_id(0) // chunks
        rows = chunk * C + jnp.arange(C, dtype=jnp.int32)
        head = of_batch % blocks * heads + jnp.arange(heads, dtype=jnp.int32)
        batch = of_batch // blocks
        exist = (head < spec.G)[:, None]
        given = exist & (rows < spec.T)[None, :]
        at = head[:, None], rows[None, :]
        of_decay = at if spec.layout == "bhtd" else at[::-1]
        x = plgpu.load(decay_ref.at[(batch, *of_decay)], mask=given, other=0.0)  # [heads, C]
        sums = jax.lax.cumsum(_to_base_2(x), axis=1)
        plgpu.store(sums_ref.at[(batch, *at)], sums, mask=exist)

    return pallas_call(
        kernel,
        grid=(chunks * blocks * spec.B,),
        out_shape=jax.ShapeDtypeStruct((spec.B, spec.G, length), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        name="linear_attention_gates",
    )(decay)


def _of_steps_by_xla(spec: LinearAttentionSpec, decay: jax.Array) -> jax.Array:
    decay = decay if spec.layout == "bhtd" else jnp.swapaxes(decay, 1, 2)
    length = whole_chunks(spec.T)
    decay = jnp.pad(_to_base_2(decay), ((0, 0), (0, 0), (0, length - spec.T)))
    of_chunks = decay.reshape(spec.B, spec.G, -1, C)
    return jnp.cumsum(of_chunks, axis=3).reshape(spec.B, spec.G, length)


class OfPieces(NamedTuple):
    """The prefix sums that the walks read, and sums over pieces, to base 2."""

    until: jax.Array  # over the later rows of each row's piece, [B, G, T up to a whole chunk]
    since: jax.Array  # from each piece's first row to each row, [B, G, T up to a whole chunk]
    keeps: jax.Array  # what each piece leaves of the state ahead of it, [B, G, P]
    steep: jax.Array  # which pieces of which tiles have a steep chunk, [B, tiles, P] int32
    # Those that were given. Beside segments, in pieces that have a steep chunk a segment begins
    # with the least decay.
    gates: jax.Array


@dataclasses.dataclass(frozen=True)
class _Ends:
    """The rows at the ends and in the middle of a piece's chunks, in a kernel."""

    spec: LinearAttentionSpec
    piece: Any
    in_piece: int  # chunks
    count: int  # of all chunks

    @property
    def at_once(self) -> int:
        return int(min(ENDS, pl.next_power_of_2(self.in_piece)))

    def load(self, ref: Any, number: jax.Array, *head: Any, row: int = C - 1) -> jax.Array:
        """One row of some of the piece's chunks; 0 where there is no chunk."""
        chunk = self.piece * self.in_piece + number
        exist = (number < self.in_piece) & (chunk < self.count)
        # [chunks]
        return plgpu.load(ref.at[(*head, chunk * C + row)], mask=exist, other=0)

    def each(self, add: Callable[[jax.Array, Any], Any], start: Any) -> Any:
        """`add` of the numbers of all chunks, some at a time, and of what was found before."""

        def add_some(i: Any, found: Any) -> Any:
            return add(i * self.at_once + jnp.arange(self.at_once, dtype=jnp.int32), found)

        return jax.lax.fori_loop(0, pl.cdiv(self.in_piece, self.at_once), add_some, start)

    def steep(self, gates_ref: Any, number: jax.Array, head: Any) -> jax.Array:
        """How many of these chunks are steep as they were given."""
        last = self.load(gates_ref, number, head)
        middle = self.load(gates_ref, number, head, row=C // 2 - 1)
        return jnp.sum(is_steep(self.spec, middle, last), dtype=jnp.int32)


def of_pieces(
    spec: LinearAttentionSpec, deal: Cut, gates: jax.Array, borders: jax.Array | None = None
) -> OfPieces:
    """From the prefix sums within chunks, [B, G, T up to a whole chunk].

    `borders`: beside segments, how many begin in a row's chunk up to this row, [B, T up to a whole
    chunk] int32; `gates` has no decay for their first steps.
    """
    if launch.no_triton is not None:
        return _of_pieces_by_xla(spec, deal, gates, borders)
    B, G, length = gates.shape
    heads, count, in_piece = heads_of_tile(spec), length // C, deal.rows // C
    own = min(CHUNKS, pl.next_power_of_2(in_piece))
    programs = pl.cdiv(in_piece, own)

    def kernel(gates_ref: Any, *refs: Any) -> None:
        borders_ref = None if borders is None else refs[0]
        until_ref, since_ref, keeps_ref, steep_ref, *own_gates = refs[borders is not None :]
        piece, program = pl.program_id(0) // programs, pl.program_id(0) % programs
        first = program * own  # of the piece's chunks
        ends = _Ends(spec, piece, in_piece, count)

        def of_head(head: Any, least: Any) -> Any:
            """Writes one head's sums; how many of its chunks are steep. `least`: what each border
            adds to a prefix sum."""

            def last_of(number: jax.Array) -> jax.Array:
                last = ends.load(gates_ref, number, head)
                if borders_ref is None:
                    return last
                return last + least * ends.load(borders_ref, number).astype(jnp.float32)

            def add_ends(number: jax.Array, sums: Any) -> Any:
                before, whole, behind, steep = sums
                last = last_of(number)
                return (
                    before + jnp.sum(jnp.where(number < first, last, 0.0)),
                    whole + jnp.sum(last),
                    behind + jnp.sum(jnp.where(number >= first + own, last, 0.0)),
                    steep + ends.steep(gates_ref, number, head),
                )

            nothing = jnp.float32(0)
            before, whole, behind, steep = ends.each(
                add_ends, (nothing, nothing, nothing, jnp.int32(0))
            )
            chunk = first + jnp.arange(own, dtype=jnp.int32)
            of_chunk, other = chunk[:, None], chunk[None, :]
            last = last_of(other)
            before += jnp.sum(jnp.where(other < of_chunk, last, 0.0), axis=1)
            behind += jnp.sum(jnp.where(other >= of_chunk, last, 0.0), axis=1)
            exist = (of_chunk < in_piece) & (piece * in_piece + of_chunk < count)
            rows = (piece * in_piece + of_chunk) * C + jnp.arange(C, dtype=jnp.int32)[None, :]
            sums = plgpu.load(gates_ref.at[head, rows], mask=exist, other=0.0)  # [CHUNKS, C]
            if borders_ref is not None:
                own_borders = plgpu.load(borders_ref.at[rows], mask=exist, other=0)
                sums += least * own_borders.astype(jnp.float32)
                plgpu.store(own_gates[0].at[head, rows], sums, mask=exist)
            plgpu.store(until_ref.at[head, rows], behind[:, None] - sums, mask=exist)
            plgpu.store(since_ref.at[head, rows], before[:, None] + sums, mask=exist)

            @pl.when(program == 0)
            def _() -> None:
                keeps = jnp.exp2(whole)
                if borders_ref is not None:
                    some = ends.each(add_borders, jnp.int32(0)) > 0
                    keeps = jnp.where(some, jnp.float32(0), keeps)
                plgpu.store(keeps_ref.at[head, piece], keeps)

            return steep

        def add_borders(number: jax.Array, found: jax.Array) -> jax.Array:
            return found + jnp.sum(ends.load(borders_ref, number), dtype=jnp.int32)

        def all_steep(head: int) -> Any:
            def add(number: jax.Array, found: jax.Array) -> jax.Array:
                return found + ends.steep(gates_ref, number, jnp.int32(head))

            return ends.each(add, jnp.int32(0))

        least: Any = None
        if borders_ref is not None:
            # Known before any sum is.
            steep = sum(map(all_steep, range(heads)))
            least = (steep > 0).astype(jnp.float32) * (LEAST_DECAY * LOG2_E)
        steep = sum(of_head(jnp.int32(head), least) for head in range(heads))

        @pl.when(program == 0)
        def _() -> None:
            plgpu.store(steep_ref.at[piece], jnp.minimum(steep, 1))

    def of_tile(*shape: int | None) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda _, tile, b: (b, tile, 0))

    rows, pieces = of_tile(heads, length), of_tile(heads, deal.pieces)
    of_rows = jax.ShapeDtypeStruct(gates.shape, jnp.float32)
    given, own_gates = [gates], []
    in_specs = [rows]
    if borders is not None:
        given.append(borders)
        in_specs.append(pl.BlockSpec((None, length), lambda _, tile, b: (b, 0)))
        own_gates.append(of_rows)
    found = pallas_call(
        kernel,
        grid=(deal.pieces * programs, G // heads, B),
        in_specs=in_specs,
        out_specs=[rows, rows, pieces, of_tile(None, deal.pieces), *[rows] * len(own_gates)],
        out_shape=[
            of_rows,
            of_rows,
            jax.ShapeDtypeStruct((B, G, deal.pieces), jnp.float32),
            jax.ShapeDtypeStruct((B, G // heads, deal.pieces), jnp.int32),
            *own_gates,
        ],
        compiler_params=plgpu.CompilerParams(num_warps=OF_PIECES_WARPS, num_stages=1),
        name="linear_attention_gates_of_pieces",
    )(*given)
    return OfPieces(*found, *[gates] * (borders is None))


def _of_pieces_by_xla(
    spec: LinearAttentionSpec, deal: Cut, gates: jax.Array, borders: jax.Array | None
) -> OfPieces:
    B, G, length = gates.shape
    missing = deal.pieces * deal.rows - length

    def in_pieces(x: jax.Array) -> jax.Array:
        rows = jnp.pad(x, ((0, 0), (0, 0), (0, missing)))
        return rows.reshape(*x.shape[:2], deal.pieces, -1, C)

    rows = in_pieces(gates)  # [B, G, P, chunks, C]
    steep = jnp.any(is_steep(spec, rows[..., C // 2 - 1], rows[..., C - 1]), axis=3)
    heads = heads_of_tile(spec)
    of_tiles = jnp.any(steep.reshape(B, -1, heads, deal.pieces), axis=2)
    keeps: Any = 1.0
    if borders is not None:
        own = in_pieces(borders[:, None])  # [B, 1, P, chunks, C]
        least = jnp.where(jnp.repeat(of_tiles, heads, axis=1), LEAST_DECAY * LOG2_E, 0.0)
        rows += least[..., None, None] * own
        keeps = jnp.where(jnp.any(own > 0, axis=(3, 4)), 0.0, 1.0)
    last = rows[..., C - 1]  # [B, G, P, chunks]
    before = jnp.cumsum(last, axis=3) - last
    behind = jnp.flip(jnp.cumsum(jnp.flip(last, 3), axis=3), 3)  # of this chunk and those behind it
    until, since = behind[..., None] - rows, before[..., None] + rows
    return OfPieces(
        until.reshape(B, G, -1)[:, :, :length],
        since.reshape(B, G, -1)[:, :, :length],
        jnp.exp2(jnp.sum(last, axis=3)) * keeps,
        of_tiles.astype(jnp.int32),
        rows.reshape(B, G, -1)[:, :, :length],
    )


def gradient_of_heads(decay: jax.Array, of_chunks: jax.Array) -> jax.Array:
    """The gradient of a decay per head [G], from its steps' gradients summed over each chunk,
    [B, G, chunks]."""
    return jnp.where(decay < LEAST_DECAY, 0.0, jnp.sum(of_chunks, axis=(0, 2)))


def _to_base_2(decay: jax.Array) -> jax.Array:
    return jnp.maximum(decay, LEAST_DECAY) * LOG2_E
