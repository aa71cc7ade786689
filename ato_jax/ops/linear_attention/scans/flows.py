"""The gradient of a causal decay per head or step, from sums that the kernels leave of each row.

With M[i, j] what the pair of query i and key j adds to the loss's derivative by its own exponent,
the gradient of step t's decay is F(t), the sum of M over the pairs with j < t <= i. The kernels
leave sums of M for each row, over all pairs of a query and over all pairs of a key,

    R_i = sum_j M[i, j]    A_j = sum_i M[i, j]    F(t + 1) = F(t) + A_t - R_t

in which each pair of two rows of a chunk occurs twice, with the same rounding. In a steep chunk a
pair may be small beside that of a row with itself. So there R and A only have pairs with rows of
other chunks, and the kernels sum up the missing pairs, I(t), on their own: with Y what crosses the
start of the chunk and sums within it,

    F(t) = Y + sum_{j < t} A_j - sum_{i < t} R_i + I(t)

Both kernels leave states as they are multiplied: S and z ahead of one chunk in `spacing`, and their
cotangents dS and dz behind the chunk before. There

    Y = <S, dS> + z . dz

is known. Between two such places Y is a running sum, and the difference from the next known Y is
spread evenly over the chunks between. One pass computes the known Y and the sums of chunks, another
the gradient of each step.

S and dS are rounded where they are multiplied, so R and A are wrong by amounts that have nothing to
do with each other, and Y, between two places, by their running sum. Beside a single step's gradient
that is little. The gradient of a decay per head is a sum over all steps, whose terms may cancel: in
it the error grows with the distance of places, and beyond a few chunks it exceeds all other errors.
So a decay per head has places 8 times as dense, and then its error, beside the root mean square of
such sums, is the same at any length.

Where features have either sign, that is too much of such a gradient. There the kernels multiply
each state in two parts, rounded and what that leaves off, so that R and A have no error that adds
up, and Y is the running sum over a whole piece (`decay_flows_in_pieces`). It begins with S as the
walk over queries was given it there and dS as the walk over keys left it, of which R and A are.

Beside segments the sums restart at each border, where F is 0 (`restarts.py`): a row whose segment
begins in its chunk takes neither Y nor earlier rows, and Y is a running sum from the last border or
the last place where it is known, whichever is later. So a segment's gradient has no rounding error
of another segment, and is exactly 0 at its first row.

Both passes are kernels that Pallas lowers to Triton, or XLA where JAX cannot lower to Triton. The
running sums over whole pieces are XLA's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import launch
from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention.decay import LEAST_DECAY
from ato_jax.ops.linear_attention.scans import flows_by_xla, restarts
from ato_jax.ops.linear_attention.scans.borders import NO_BORDERS, OfSequence
from ato_jax.ops.linear_attention.scans.chunks import C, Cut, is_steep
from ato_jax.ops.linear_attention.scans.edges import of_head
from ato_jax.ops.linear_attention.scans.flow_places import (
    Known,
    OfKeys,
    OfQueries,
    chunk_of,
    place_before,
    places,
    spacing,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# A program multiplies so many numbers of a state at once; a tile of steps has so many heads.
NUMBERS, MOST_HEADS, WARPS, KNOWN_WARPS = 8192, 16, 4, 8


def decay_flows(
    spec: LinearAttentionSpec,
    deal: Cut,
    gates: jax.Array,
    queries: OfQueries,
    keys: OfKeys,
    of_start: jax.Array | None,
    decay: jax.Array | None,
    borders: OfSequence = NO_BORDERS,
) -> jax.Array:
    """The gradient of `decay`, an array like it; or where that is None, because the decay is one
    per head, the sums of F over each chunk, [B, H, chunks].

    Args:
      gates: the prefix sums of the decays, [B, H, T up to a whole chunk].
      of_start: Y at the start of the sequence, [B, H]; None where there is no initial state.
      decay: a decay per step as it was given, [B, T, H] or [B, H, T].
      borders: of the sequence that `deal` cuts; `NO_BORDERS` without segments.
    """
    first_pass = _known if launch.no_triton is None else flows_by_xla.known
    known = first_pass(spec, deal, gates, queries, keys, of_start, borders)
    return of_steps(spec, deal, gates, queries, keys, known, decay, borders)


def decay_flows_in_pieces(
    spec: LinearAttentionSpec,
    deal: Cut,
    gates: jax.Array,
    queries: OfQueries,
    keys: OfKeys,
    starts: jax.Array,
    decay: jax.Array | None,
    borders: OfSequence = NO_BORDERS,
) -> jax.Array:
    """As `decay_flows`, where the kernels multiply states in two parts.

    Args:
      starts: S at the start of each piece, as the walk over queries reads it, [B, H, P, V, F].
    """
    _, B, H, length = queries.flows.shape
    in_piece = deal.rows // C
    passing = (keys.flows - jnp.sum(queries.flows, axis=0)).reshape(B, H, -1, C)
    missing = deal.pieces * in_piece - length // C

    def in_pieces(of_chunks: jax.Array) -> jax.Array:
        of_chunks = jnp.pad(of_chunks, ((0, 0), (0, 0), (0, missing)))
        return of_chunks.reshape(*of_chunks.shape[:2], deal.pieces, in_piece)

    at_start = jnp.sum(starts.astype(jnp.float32) * keys.kv, axis=(3, 4))[..., None]
    if borders.chunks is None:
        of_chunks = in_pieces(jnp.sum(passing, axis=3))
        before = jnp.cumsum(of_chunks, axis=3) - of_chunks
    else:
        reads, adds = (borders.chunks[:, None, :, one] for one in range(2))
        _, behind = restarts.at_ends(passing, reads, adds)
        have_border = in_pieces(reads < C)
        before = restarts.over_chunks(in_pieces(behind), have_border)
        begun = jnp.cumsum(have_border, axis=3) - have_border
        at_start = jnp.where(begun > 0, 0.0, at_start)
    crossing = (at_start + before).reshape(B, H, -1)[:, :, : length // C]
    return flows_by_xla.of_chunks(spec, gates, queries, keys, crossing, decay, borders)


def _known(
    spec: LinearAttentionSpec,
    deal: Cut,
    gates: jax.Array,
    queries: OfQueries,
    keys: OfKeys,
    of_start: jax.Array | None,
    borders: OfSequence,
) -> Known:
    """The first pass; a program has a place."""
    parts, B, H, length = queries.flows.shape
    assert queries.kv is not None and keys.k_sum is not None
    count, size = length // C, queries.kv.shape[3] * queries.kv.shape[4]

    def kernel(
        gates_ref: Any, reads_ref: Any, adds_ref: Any, s_ref: Any, ds_ref: Any, *refs: Any
    ) -> None:
        *given, crossing_ref, before_ref, between_ref = refs
        chunks_ref = given.pop() if borders.chunks is not None else None
        z_ref, dz_ref = (given.pop(0), given.pop(0)) if queries.k_sum is not None else (None, None)
        start_ref = given.pop(0) if of_start is not None else None
        number = pl.program_id(0)
        first = chunk_of(spec, deal, number)

        def product(left_ref: Any, right_ref: Any, factors: tuple[Any, Any]) -> jax.Array:
            """The product of what queries left here and keys at the place before, times a factor
            each."""
            width = left_ref.shape[1]
            some = min(width, NUMBERS)

            def add_some(part: Any, total: jax.Array) -> jax.Array:
                at = part * some + jnp.arange(some, dtype=jnp.int32)
                left = plgpu.load(left_ref.at[number, at]).astype(jnp.float32)  # [some]
                right = plgpu.load(right_ref.at[number - 1, at]).astype(jnp.float32)  # [some]
                return total + (left * factors[0]) * (right * factors[1])

            nothing = jnp.zeros((some,), jnp.float32)
            return jnp.sum(lax.fori_loop(0, width // some, add_some, nothing))

        def half_of(chunk: jax.Array, second: bool) -> jax.Array:
            """How much the chunk's half loses, at least 0; or 0 where the chunk is steep."""
            middle = plgpu.load(gates_ref.at[chunk * C + (C // 2 - 1)])
            last = plgpu.load(gates_ref.at[chunk * C + (C - 1)])
            lost = middle - last if second else -middle
            return jnp.where(is_steep(spec, middle, last), 0.0, lost)

        @pl.when((number > 0) & (first < count))
        def _inner() -> None:
            # S is stored as decayed to the middle of the chunk behind, dS to that of the chunk
            # ahead. Each factor may be so small that float32 cannot hold their product.
            factors = jnp.exp2(half_of(first, False)), jnp.exp2(half_of(first - 1, True))
            found = product(s_ref, ds_ref, factors)
            if z_ref is not None:
                found += product(z_ref, dz_ref, factors)
            plgpu.store(crossing_ref.at[number], found)

        @pl.when(number == 0)
        def _first() -> None:
            found = jnp.float32(0) if start_ref is None else plgpu.load(start_ref.at[number])
            plgpu.store(crossing_ref.at[number], found)

        chunk = first + jnp.arange(spacing(spec), dtype=jnp.int32)
        exist = (place_before(spec, deal, chunk) == number) & (chunk < count)
        rows = chunk[:, None] * C + jnp.arange(C, dtype=jnp.int32)[None, :]

        def load(ref: Any, *part: Any) -> jax.Array:
            # [spacing, C]
            return plgpu.load(ref.at[(*part, rows)], mask=exist[:, None], other=0.0)

        passing = load(adds_ref)
        for part in range(parts):
            passing -= load(reads_ref, jnp.int32(part))
        if chunks_ref is not None:
            reads, adds = (
                # [spacing]
                plgpu.load(chunks_ref.at[chunk, jnp.int32(one)], mask=exist, other=0)
                for one in range(2)
            )
            ahead, behind = restarts.at_ends(passing, reads, adds)
            before = restarts.over_chunks(behind, reads < C)
            plgpu.store(before_ref.at[chunk], before, mask=exist)
            plgpu.store(between_ref.at[chunk], before + ahead, mask=exist)
            return
        of_chunks = jnp.sum(passing, axis=1)
        plgpu.store(before_ref.at[chunk], lax.cumsum(of_chunks, axis=0) - of_chunks, mask=exist)
        plgpu.store(between_ref.at[number], jnp.sum(of_chunks))

    count_of_places = places(spec, deal)
    of_rows, of_states = of_head(length), of_head(count_of_places, size)
    of_parts = pl.BlockSpec((parts, None, None, length), lambda _, h, b: (0, b, h, 0))
    arrays: list[Any] = [gates, queries.flows, keys.flows]
    arrays += [array.reshape(B, H, count_of_places, size) for array in (queries.kv, keys.kv)]
    in_specs = [of_rows, of_parts, of_rows, of_states, of_states]
    if queries.k_sum is not None:
        arrays += [queries.k_sum, keys.k_sum]
        in_specs += [of_head(count_of_places, keys.k_sum.shape[3])] * 2
    if of_start is not None:
        arrays.append(of_start[..., None])
        in_specs.append(of_head(1))
    if borders.chunks is not None:
        arrays.append(borders.chunks)
        in_specs.append(pl.BlockSpec((None, count, 2), lambda _, h, b: (b, 0, 0)))
    sizes = count_of_places, count, count_of_places if borders.chunks is None else count
    found = pallas_call(
        kernel,
        grid=(count_of_places, H, B),
        in_specs=in_specs,
        out_specs=[of_head(one) for one in sizes],
        out_shape=[jax.ShapeDtypeStruct((B, H, one), jnp.float32) for one in sizes],
        compiler_params=plgpu.CompilerParams(num_warps=KNOWN_WARPS, num_stages=1),
        name="linear_attention_known_flows",
    )(*arrays)
    return Known(*found)


def of_steps(
    spec: LinearAttentionSpec,
    deal: Cut,
    gates: jax.Array,
    queries: OfQueries,
    keys: OfKeys,
    known: Known,
    decay: jax.Array | None,
    borders: OfSequence,
) -> jax.Array:
    """The second pass; a program has a chunk of some heads."""
    if launch.no_triton is not None:
        return flows_by_xla.of_steps(spec, deal, gates, queries, keys, known, decay, borders)
    parts, B, H, length = queries.flows.shape
    count = length // C
    is_cut = borders.chunks is not None
    heads = min(MOST_HEADS, pl.next_power_of_2(H))
    blocks = pl.cdiv(H, heads)

    def kernel(
        gates_ref: Any,
        reads_ref: Any,
        adds_ref: Any,
        inside_ref: Any,
        crossing_ref: Any,
        before_ref: Any,
        between_ref: Any,
        *refs: Any,
    ) -> None:
        *given, flows_ref = refs
        begun_ref, chunks_ref = (given.pop(0), given.pop(0)) if is_cut else (None, None)
        chunk, of_batch = pl.program_id(0) % count, pl.program_id(0) // count
        batch = of_batch // blocks
        head = of_batch % blocks * heads + jnp.arange(heads, dtype=jnp.int32)
        rows = chunk * C + jnp.arange(C, dtype=jnp.int32)
        at, exist = (batch, head[:, None], rows[None, :]), (head < H)[:, None]

        def of_rows(ref: Any, *part: Any) -> jax.Array:
            return plgpu.load(ref.at[(*part, *at)], mask=exist, other=0.0)  # [heads, C]

        def of_heads(ref: Any, number: Any, mask: Any = True) -> jax.Array:
            # [heads]
            return plgpu.load(ref.at[batch, head, number], mask=(head < H) & mask, other=0.0)

        reads = of_rows(reads_ref, jnp.int32(0))
        for part in range(1, parts):
            reads += of_rows(reads_ref, jnp.int32(part))
        passing = of_rows(adds_ref) - reads
        here = place_before(spec, deal, chunk)
        low, high = chunk_of(spec, deal, here), chunk_of(spec, deal, here + 1)
        is_known = high < count
        start, before = of_heads(crossing_ref, here), of_heads(before_ref, chunk)
        # Nothing crosses the end, unless a state is returned.
        exact = of_heads(crossing_ref, here + 1, is_known)
        first, end, of_between = low, jnp.minimum(high, count), here
        if chunks_ref is not None:
            number = low + jnp.arange(spacing(spec), dtype=jnp.int32)
            of_chunks = chunks_ref.at[batch, number, jnp.int32(0)]
            reads_of = plgpu.load(of_chunks, mask=number < end, other=C)  # [spacing]
            stretch = restarts.stretch_of(chunk, low, end, number, reads_of < C)
            start = jnp.where(stretch.from_border, 0.0, start)
            exact = jnp.where(stretch.to_border, 0.0, exact)
            is_known |= stretch.to_border
            first, end, of_between = stretch.first, stretch.last + 1, stretch.last
        missed = exact - start - of_heads(between_ref, of_between)
        if spec.return_state:
            missed = jnp.where(is_known, missed, 0.0)
        done, all_of_them = chunk - first, end - first
        share = done.astype(jnp.float32) / all_of_them.astype(jnp.float32)
        crossing = start + before + missed * share
        # A steep chunk leaves nothing of its start at its end, while Y has the error of its parts.
        middle, last = (
            # [heads]
            plgpu.load(gates_ref.at[batch, head, chunk * C + row], mask=head < H, other=0.0)
            for row in (C // 2 - 1, C - 1)
        )
        crossing = jnp.where(is_steep(spec, middle, last), jnp.sum(reads, axis=1), crossing)
        if begun_ref is not None:
            begun = plgpu.load(begun_ref.at[batch, rows])[None, :]  # [1, C]
            count_of_borders = plgpu.load(begun_ref.at[batch, chunk * C + (C - 1)])

            def add_segment(number: Any, found: jax.Array) -> jax.Array:
                own = jnp.where(begun == number, passing, 0.0)
                return found + jnp.where(begun == number, lax.cumsum(own, axis=1) - own, 0.0)

            # Ahead of the first border, where there are such rows.
            found = jnp.where(begun == 0, crossing[:, None], 0.0) + of_rows(inside_ref)
            found = lax.fori_loop(0, count_of_borders + 1, add_segment, found)
        else:
            found = lax.cumsum(passing, axis=1) - passing + of_rows(inside_ref) + crossing[:, None]
        exist &= (rows < spec.T)[None, :]
        if decay is None:
            of_chunk = jnp.sum(jnp.where(exist, found, 0.0), axis=1)
            plgpu.store(flows_ref.at[batch, head, chunk], of_chunk, mask=head < H)
            return
        of_decay = at[1:] if spec.layout == "bhtd" else at[:0:-1]
        (decay_ref,) = given
        own = plgpu.load(decay_ref.at[(batch, *of_decay)], mask=exist, other=0.0)  # [heads, C]
        found = jnp.where(own < LEAST_DECAY, 0.0, found)
        plgpu.store(flows_ref.at[(batch, *of_decay)], found, mask=exist)

    shape = (B, H, count) if decay is None else decay.shape
    given = [borders.begun, borders.chunks] if is_cut else []
    given += [] if decay is None else [decay]
    return pallas_call(
        kernel,
        grid=(count * blocks * B,),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        name="linear_attention_flows",
    )(gates, queries.flows, keys.flows, keys.inside, *known, *given)
