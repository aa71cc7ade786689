"""The borders of causal segments: in each chunk, and in each piece.

With rows of a chunk counted from its first one, and segments that are runs of rows,

    begins_i   the first row of the chunk that is of row i's segment
    ends_i     the last such row
    begun_i    how many segments begin in the chunk up to row i
    reads      how many rows, from the chunk's first one on, are of the segment of the row ahead
    adds       the first row that is of the segment of the chunk's last row

Ahead of a sequence's first row is the state that is given, which the first segment continues.

One pass over the segments' numbers, by a kernel that Pallas lowers to Triton: XLA would launch ten,
each of which takes longer to start than to run. XLA computes them where JAX cannot lower to Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import launch
from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention.scans.chunks import C, Cut, whole_chunks
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# A program looks for a piece's borders in the last rows of so many chunks at once.
ENDS, WARPS = 512, 4


class OfSequence(NamedTuple):
    """The borders of all chunks, and of pieces, in the rows of the sequence. Each is None without
    segments."""

    begins: jax.Array | None = None  # [B, T up to a whole chunk] int32, as `ends`
    ends: jax.Array | None = None
    begun: jax.Array | None = None
    chunks: jax.Array | None = None  # [B, chunks, 2] int32: `reads` and `adds`
    # [B, P, 2] int32: the first row and the one behind the last of those that are part of the state
    # behind a piece, and of those that see the state ahead of it.
    adding: jax.Array | None = None
    reading: jax.Array | None = None
    # [B, G, P] float32: 1 where a piece leaves something of the state ahead of it, else 0.
    keeps: jax.Array | None = None

    def arrays(self, *names: str) -> list[jax.Array]:
        """The fields of these names; none without segments."""
        found = [getattr(self, name) for name in names]
        return [array for array in found if array is not None]


NO_BORDERS = OfSequence()


def of_sequence(spec: LinearAttentionSpec, deal: Cut, runs: jax.Array | None) -> OfSequence:
    """`runs`: the number of each row's segment, [B, T] int32, which never falls."""
    if runs is None:
        return OfSequence()
    if launch.no_triton is not None:
        return _by_xla(spec, deal, runs)
    T, count, in_piece = spec.T, whole_chunks(spec.T) // C, deal.rows // C
    ends = min(ENDS, pl.next_power_of_2(in_piece))
    heads = pl.next_power_of_2(spec.G)

    def kernel(
        runs_ref: Any,
        begins_ref: Any,
        ends_ref: Any,
        begun_ref: Any,
        chunks_ref: Any,
        adding_ref: Any,
        reading_ref: Any,
        keeps_ref: Any,
    ) -> None:
        chunk = pl.program_id(0)
        own_rows = jnp.arange(C, dtype=jnp.int32)

        def runs_of(rows: Any) -> Any:
            """Rows behind the last one are of its segment, and so is the one ahead of the first."""
            return plgpu.load(runs_ref.at[jnp.clip(rows, 0, T - 1)])

        def how_many(some: jax.Array, axis: int = 0) -> jax.Array:
            return jnp.sum(some, axis=axis, dtype=jnp.int32)

        rows = chunk * C + own_rows
        own, ahead, last = runs_of(rows), runs_of(chunk * C - 1), runs_of(chunk * C + (C - 1))
        query, key = own[:, None], own[None, :]
        plgpu.store(begins_ref.at[rows], how_many(key < query, axis=1))
        plgpu.store(ends_ref.at[rows], (C - 1) - how_many(key > query, axis=1))
        borders = (own != runs_of(rows - 1)).astype(jnp.int32)
        plgpu.store(begun_ref.at[rows], jax.lax.cumsum(borders, axis=0))
        plgpu.store(chunks_ref.at[chunk, jnp.int32(0)], how_many(own == ahead))
        plgpu.store(chunks_ref.at[chunk, jnp.int32(1)], how_many(own < last))

        @pl.when(chunk % in_piece == 0)
        def _of_piece() -> None:
            piece, first = chunk // in_piece, chunk * C
            ahead, last = runs_of(first - 1), runs_of(first + deal.rows - 1)

            def add_ends(i: Any, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                number = i * ends + jnp.arange(ends, dtype=jnp.int32)
                own = runs_of(first + number * C + (C - 1))
                counts = number < in_piece
                return (
                    found[0] + how_many((own == ahead) & counts),
                    found[1] + how_many((own < last) & counts),
                )

            # Whole chunks of the segment ahead, and of segments before the last one.
            nothing = jnp.int32(0)
            reads, before = jax.lax.fori_loop(
                0, pl.cdiv(in_piece, ends), add_ends, (nothing, nothing)
            )
            of_reads = runs_of(first + reads * C + own_rows)
            more = how_many(of_reads == ahead) * (reads < in_piece).astype(jnp.int32)
            reads = reads * C + more
            of_last = runs_of(first + before * C + own_rows)
            end = jnp.minimum(first + deal.rows, T)
            plgpu.store(
                adding_ref.at[piece, jnp.int32(0)], first + before * C + how_many(of_last < last)
            )
            plgpu.store(adding_ref.at[piece, jnp.int32(1)], end)
            plgpu.store(reading_ref.at[piece, jnp.int32(0)], first)
            plgpu.store(reading_ref.at[piece, jnp.int32(1)], jnp.minimum(first + reads, end))
            head = jnp.arange(heads, dtype=jnp.int32)
            keeps = (reads == deal.rows).astype(jnp.float32)
            at = keeps_ref.at[head, piece]
            plgpu.store(at, jnp.broadcast_to(keeps, (heads,)), mask=head < spec.G)

    length, pieces = count * C, deal.pieces
    shapes = [(length,)] * 3 + [(count, 2), (pieces, 2), (pieces, 2), (spec.G, pieces)]
    dtypes = [jnp.int32] * 6 + [jnp.float32]

    def of_batch(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda _, b: (b, *[0] * len(shape)))

    found = pallas_call(
        kernel,
        grid=(count, spec.B),
        in_specs=[of_batch(T)],
        out_specs=[of_batch(*shape) for shape in shapes],
        out_shape=[
            jax.ShapeDtypeStruct((spec.B, *shape), dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        name="linear_attention_borders",
    )(runs)
    return OfSequence(*found)


def _by_xla(spec: LinearAttentionSpec, deal: Cut, runs: jax.Array) -> OfSequence:
    of_chunks = _cut(runs, whole_chunks(spec.T) // C, C)
    query, key = of_chunks[..., :, None], of_chunks[..., None, :]
    begins = jnp.sum(key < query, axis=3, dtype=jnp.int32)  # [B, chunks, C]
    ends = (C - 1) - jnp.sum(key > query, axis=3, dtype=jnp.int32)
    borders = are_borders(of_chunks.reshape(spec.B, -1)).reshape(of_chunks.shape)
    begun = jnp.cumsum(borders, axis=2, dtype=jnp.int32)
    chunks = jnp.stack([_reads(of_chunks), begins[:, :, -1]], axis=2)
    of_pieces = _cut(runs, deal.pieces, deal.rows)
    last = of_pieces[..., -1:]
    first = jnp.arange(deal.pieces, dtype=jnp.int32) * deal.rows
    end = jnp.minimum(first + deal.rows, spec.T)
    adds = first + jnp.sum(of_pieces < last, axis=2, dtype=jnp.int32)
    reads = jnp.minimum(first + _reads(of_pieces), end)
    first, end = (jnp.broadcast_to(x, adds.shape) for x in (first, end))
    keeps = _reads(of_pieces) == deal.rows
    return OfSequence(
        begins.reshape(spec.B, -1),
        ends.reshape(spec.B, -1),
        begun.reshape(spec.B, -1),
        chunks,
        jnp.stack([adds, end], axis=2),
        jnp.stack([first, reads], axis=2),
        jnp.broadcast_to(keeps[:, None], (spec.B, spec.G, deal.pieces)).astype(jnp.float32),
    )


def are_borders(runs: jax.Array) -> jax.Array:
    """Where a segment begins, [B, T]; not at the first row."""
    return jnp.pad(runs[:, 1:] != runs[:, :-1], ((0, 0), (1, 0)))


def _cut(runs: jax.Array, count: int, rows: int) -> jax.Array:
    """[B, T] as [B, count, rows]; rows behind the last one are of its run."""
    missing = count * rows - runs.shape[1]
    return jnp.pad(runs, ((0, 0), (0, missing)), mode="edge").reshape(-1, count, rows)


def _reads(parts: jax.Array) -> jax.Array:
    """How many rows of each part are of the run of the row ahead, [B, parts]."""
    ahead = jnp.concatenate([parts[:, :1, 0], parts[:, :-1, -1]], axis=1)
    return jnp.sum(parts == ahead[..., None], axis=2, dtype=jnp.int32)
