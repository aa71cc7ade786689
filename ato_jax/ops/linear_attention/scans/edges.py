"""The states ahead of each piece, or behind it, from the pieces' own sums.

    S[0] = start,  S[p + 1] = keep[p] S[p] + piece[p]          and reversed from the last piece

One pass over the states, by a kernel that Pallas lowers to Triton. XLA would launch one kernel for
S and one for z, and several more where there is a decay, each of which takes longer to start than
to run. XLA computes them where JAX cannot lower to Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import launch
from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec, LinearState

State = tuple[jax.Array, jax.Array]

# A program adds up so many numbers of a state, and loads so many pieces at once.
NUMBERS, AT_ONCE, WARPS = 1024, 8, 4


class Edges(NamedTuple):
    kv: jax.Array  # [B, G, P, V, F], as products read it
    k_sum: jax.Array  # [B, G, P, F] float32
    end: LinearState | None = None  # behind the last piece, or ahead of the first


def of_head(*shape: int) -> pl.BlockSpec:
    """The part of an array [B, heads, *shape] that one head has, for a grid (.., heads, B)."""
    zeros = (0,) * len(shape)
    return pl.BlockSpec((None, None, *shape), lambda _, head, b: (b, head, *zeros))


def in_rounds(
    count: int, add_some: Callable[[Any, int, jax.Array], jax.Array], sums: jax.Array
) -> jax.Array:
    """The sums after `add_some(done, some, sums)` for `count` pieces, `some` of them at once and
    `done` of them before."""
    rounds = count // AT_ONCE
    sums = lax.fori_loop(0, rounds, lambda i, sums: add_some(i * AT_ONCE, AT_ONCE, sums), sums)
    return add_some(rounds * AT_ONCE, count % AT_ONCE, sums)


def join_pieces(
    pieces: State, start: State | None, keeps: jax.Array, reverse: bool = False
) -> State:
    """The sums of all pieces ahead of each edge, or behind it, [B, G, P + 1, ..], by XLA.

    Args:
      pieces: kv [B, G, P, V, D] and k_sum [B, G, P, D].
      start: [B, G, ..] each, what is ahead of the first piece, or behind the last.
      keeps: [B, G, P, D or 1], what a piece leaves of the state ahead of it.
    """
    kv, k_sum = pieces
    if start is None:
        kv_shape, k_sum_shape = ((*x.shape[:2], *x.shape[3:]) for x in pieces)
        start = jnp.zeros(kv_shape, jnp.float32), jnp.zeros(k_sum_shape, jnp.float32)
    if reverse:
        kv, k_sum, keeps = (jnp.flip(array, 2) for array in (kv, k_sum, keeps))
    decays = jnp.pad(keeps, ((0, 0), (0, 0), (1, 0), (0, 0)), constant_values=1)
    states = [
        jnp.concatenate([first[:, :, None], rest], axis=2)
        for first, rest in zip(start, (kv, k_sum), strict=True)
    ]

    def join(before: Any, after: Any) -> Any:
        (decay, kv, k_sum), (by, added, k_added) = before, after
        return decay * by, kv * by[..., None, :] + added, k_sum * by + k_added

    _, kv, k_sum = lax.associative_scan(join, (decays, *states), axis=2)
    return (jnp.flip(kv, 2), jnp.flip(k_sum, 2)) if reverse else (kv, k_sum)


def _at_edges_by_xla(
    pieces: State,
    start: State | None,
    keeps: jax.Array | None,
    first: int,
    *,
    ends: bool,
    reverse: bool,
    dtype: Any,
) -> Edges:
    """`at_edges`, with kv of `start` as [B, G, V, F]."""
    B, G, count = pieces[1].shape[:3]
    own = jnp.ones((B, G, count)) if keeps is None else keeps[:, :, first : first + count]
    kv, k_sum = join_pieces(pieces, start, own.astype(jnp.float32)[..., None], reverse)
    end = None
    if ends:
        last = 0 if reverse else count
        end = LinearState(jnp.swapaxes(kv[:, :, last], 2, 3), k_sum[:, :, last])
        edges = slice(1, None) if reverse else slice(count)
        kv, k_sum = kv[:, :, edges], k_sum[:, :, edges]
    return Edges(kv.astype(dtype), k_sum, end)


def at_edges(
    spec: LinearAttentionSpec,
    pieces: State | None,
    start: LinearState | None,
    keeps: jax.Array | None = None,
    first: int = 0,
    *,
    ends: bool = False,
    reverse: bool = False,
    dtype: Any = jnp.bfloat16,
) -> Edges:
    """The states at the edges of the pieces.

    Args:
      pieces: kv [B, G, P, V, F] and k_sum [B, G, P, F]; None: there is one edge, at the start.
      start: the state ahead of the first piece, or behind the last one.
      keeps: [B, G, pieces of the sequence], what a piece leaves of the state ahead of it.
      first: which piece of the sequence is the first of these.
      ends: P edges, and the last state in float32; else P + 1 edges.
      reverse: from the last piece to the first.
      dtype: of kv.
    """
    own = None if start is None else (jnp.swapaxes(start.kv, 2, 3), start.k_sum)
    if pieces is None:
        if own is None:
            shape = spec.B, spec.G, 1, spec.D
            kv = jnp.zeros((*shape[:3], spec.V, spec.D), dtype)
            return Edges(kv, jnp.zeros(shape, jnp.float32))
        kv, k_sum = (x[:, :, None] for x in own)
        return Edges(kv.astype(dtype), k_sum)
    if launch.no_triton is not None:
        return _at_edges_by_xla(
            pieces, own, keeps, first, ends=ends, reverse=reverse, dtype=dtype
        )
    B, G, count, rows, columns = pieces[0].shape
    edges, size = count + (not ends), rows * columns
    blocks = pl.cdiv(size, NUMBERS)

    def kernel(kv_ref: Any, k_sum_ref: Any, *refs: Any) -> None:
        inputs, outputs = list(refs[: len(given)]), refs[len(given) :]
        starts = (inputs.pop(0), inputs.pop(0)) if own is not None else (None, None)
        keeps_ref = inputs.pop(0) if keeps is not None else None
        program = pl.program_id(0)

        def add_up(which: int, piece_ref: Any, start_ref: Any) -> None:
            numbers = jnp.arange(NUMBERS, dtype=jnp.int32)
            limit = columns
            if which == 0:
                numbers, limit = program * NUMBERS + numbers, size
            exist = None if limit % NUMBERS == 0 else numbers < limit
            edge_ref, end_ref = outputs[which], outputs[2 + which] if ends else None

            def load(ref: Any) -> jax.Array:
                # [NUMBERS]
                return plgpu.load(ref, mask=exist, other=None if exist is None else 0.0)

            def store(ref: Any, sums: jax.Array) -> None:
                plgpu.store(ref, sums.astype(ref.dtype), mask=exist)

            def add_some(done: Any, some: int, sums: jax.Array) -> jax.Array:
                steps = [jnp.int32(done + step) for step in range(some)]
                order = [count - 1 - step if reverse else step for step in steps]
                loaded = [load(piece_ref.at[piece, numbers]) for piece in order]
                for piece, added in zip(order, loaded, strict=True):
                    edge = piece + int(not ends) if reverse else piece
                    store(edge_ref.at[edge, numbers], sums)
                    if keeps_ref is not None:
                        sums *= plgpu.load(keeps_ref.at[first + piece])  # a number
                    sums += added
                return sums

            sums = jnp.zeros((NUMBERS,), jnp.float32)
            if start_ref is not None:
                sums = load(start_ref.at[numbers])
            sums = in_rounds(count, add_some, sums)
            if end_ref is not None:
                store(end_ref.at[numbers], sums)
            else:
                store(edge_ref.at[jnp.int32(0 if reverse else count), numbers], sums)

        pl.when(program < blocks)(lambda: add_up(0, kv_ref, starts[0]))
        pl.when(program == blocks)(lambda: add_up(1, k_sum_ref, starts[1]))

    # Each state as one row.
    flat = [pieces[0].reshape(B, G, count, size), pieces[1]]
    given = [] if own is None else [own[0].reshape(B, G, size), own[1]]
    given += [] if keeps is None else [keeps]
    arrays = [*flat, *given]
    types: list[Any] = [((edges, size), dtype), ((edges, columns), jnp.float32)]
    types += [((size,), jnp.float32), ((columns,), jnp.float32)] if ends else []

    kv, k_sum, *end = pallas_call(
        kernel,
        grid=(blocks + 1, G, B),
        in_specs=[of_head(*array.shape[2:]) for array in arrays],
        out_specs=[of_head(*shape) for shape, _ in types],
        out_shape=[jax.ShapeDtypeStruct((B, G, *shape), dtype) for shape, dtype in types],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        name="linear_attention_edges",
    )(*arrays)
    behind = None
    if ends:
        behind = LinearState(jnp.swapaxes(end[0].reshape(B, G, rows, columns), 2, 3), end[1])
    return Edges(kv.reshape(B, G, edges, rows, columns), k_sum, behind)
