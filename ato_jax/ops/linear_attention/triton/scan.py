"""States of pieces to states before or after each piece: one operator, whatever the gate.

    S[0] = start,  S[p + 1] = keep[p] S[p] + piece[p]          forward: S[p] is ahead of piece p
    S[P] = start,  S[p] = keep[p] S[p + 1] + piece[p]          reversed: S[p + 1] is behind it

and what is stored may be those states times `reads`, and what is added the pieces times `adds`:
what their readers would multiply them by (`prepared.py`).

A state is kv [V, F] and k_sum [F]; keep[p] is what is left of a state after piece p, a number
from 0 to 1, or one for each of the F columns. Nothing here mixes rows of kv, so that a program has
some of them to itself and walks the pieces in order. It loads several pieces ahead of adding them,
or each would wait for memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention.triton import tiles

State = tuple[jax.Array, jax.Array]


class Edges(NamedTuple):
    """The states at the edges of the pieces, and in float32 the kv where the scan ends."""

    kv: jax.Array  # [B, G, P + 1, V, F]
    k_sum: jax.Array  # [B, G, P + 1, F], float32
    end_kv: jax.Array  # [B, G, V, F]


# Elements of kv in one program, so many of a thread, and pieces that are loaded ahead. Factors of
# the columns are loaded by every program, so that with these it pays to have fewer.
PROGRAM_SIZE, PIECES_AHEAD = 1024, 8
FACTORED_SIZE, FACTORED_AHEAD = 4096, 4
WARPS = 4


def scan_states(
    pieces: State,
    start: State | None = None,
    keeps: jax.Array | None = None,
    *,
    adds: jax.Array | None = None,
    reads: jax.Array | None = None,
    reverse: bool = False,
) -> Edges:
    """The states at the edges of the pieces, in the dtypes of the pieces', summed in float32.

    Args:
      pieces: kv [B, G, P, V, F] and k_sum [B, G, P, F].
      start: kv [B, G, V, F] and k_sum [B, G, F]; None: zeros.
      keeps: [B, G or 1, P] or [B, G, P, F]; None: ones.
      adds: [B, G, P, F]; None: ones.
      reads: [B, G, P + 1, F]; None: ones.
    """
    B, G, count, V, width = pieces[0].shape
    padded = tiles.padded(width)
    factored = adds is not None or reads is not None
    size, at_once = (
        (FACTORED_SIZE, FACTORED_AHEAD) if factored else (PROGRAM_SIZE, PIECES_AHEAD)
    )
    block = max(1, size // padded)
    inputs: dict[str, jax.Array] = {"kv": pieces[0], "k_sum": pieces[1]}
    specs = {
        "kv": pl.BlockSpec((None, None, count, V, width), lambda r, g, b: (b, g, 0, 0, 0)),
        "k_sum": pl.BlockSpec((None, None, count, width), lambda r, g, b: (b, g, 0, 0)),
    }
    if start is not None:
        inputs |= {"start_kv": start[0], "start_k_sum": start[1]}
        specs |= {
            "start_kv": pl.BlockSpec((None, None, V, width), lambda r, g, b: (b, g, 0, 0)),
            "start_k_sum": pl.BlockSpec((None, None, width), lambda r, g, b: (b, g, 0)),
        }
    if keeps is not None:
        shared = keeps.shape[1] == 1
        inputs["keep"] = keeps
        rest = (0,) * (keeps.ndim - 3)
        specs["keep"] = pl.BlockSpec(
            (None, None, *keeps.shape[2:]), lambda r, g, b: (b, 0 if shared else g, 0, *rest)
        )

    for name, array in (("adds", adds), ("reads", reads)):
        if array is not None:
            inputs[name] = array
            specs[name] = pl.BlockSpec(
                (None, None, *array.shape[2:]), lambda r, g, b: (b, g, 0, 0)
            )

    def kernel(refs: dict[str, Any], kv_out: Any, k_sum_out: Any, end_out: Any) -> None:
        first = tiles.piece_id() * block
        rows = first + jnp.arange(block, dtype=jnp.int32)[:, None]
        columns = jnp.arange(padded, dtype=jnp.int32)
        real = columns < width
        within = (rows < V) & real[None, :]  # [V_block, F]
        once = real & (first == 0)  # k_sum is written by one program

        def load(name: str, *index: Any, also: Any = True) -> tuple[jax.Array, jax.Array]:
            kv_ref, k_sum_ref = refs[f"{name}kv"], refs[f"{name}k_sum"]
            kv = plgpu.load(kv_ref.at[(*index, rows, columns[None])], mask=within & also, other=0)
            return (
                kv.astype(jnp.float32),
                plgpu.load(k_sum_ref.at[(*index, columns)], mask=real & also, other=0),
            )

        def store(edge: Any, state: tuple[jax.Array, jax.Array], exists: Any = True) -> None:
            kv, k_sum = state
            if reads is not None:
                factor = factors("reads", edge, exists)
                kv, k_sum = factor * kv, factor * k_sum
            kv = kv.astype(kv_out.dtype)
            plgpu.store(kv_out.at[edge, rows, columns[None]], kv, mask=within & exists)
            plgpu.store(k_sum_out.at[edge, columns], k_sum, mask=once & exists)

        def factors(name: str, number: Any, also: Any = True) -> jax.Array:  # [F]
            return plgpu.load(refs[name].at[number, columns], mask=real & also, other=0)

        def kept_after(number: Any) -> Any:
            if keeps is None:
                return 1.0
            if keeps.ndim == 3:
                return refs["keep"][number]
            return factors("keep", number)

        def add_pieces(i: Any, state: State) -> State:
            steps = [i * at_once + ahead for ahead in range(at_once)]
            numbers = [
                jnp.maximum(count - 1 - step, 0) if reverse else jnp.minimum(step, count - 1)
                for step in steps
            ]
            loaded = [
                load("", number, also=step < count)
                for step, number in zip(steps, numbers, strict=True)
            ]
            kept = [kept_after(number) for number in numbers]
            if adds is not None:
                added = [factors("adds", number) for number in numbers]
                loaded = [
                    (factor * kv, factor * k_sum)
                    for factor, (kv, k_sum) in zip(added, loaded, strict=True)
                ]
            for step, number, piece, keep in zip(steps, numbers, loaded, kept, strict=True):
                if keeps is not None:
                    keep = jnp.where(step < count, keep, 1.0)
                state = (keep * state[0] + piece[0], keep * state[1] + piece[1])
                store(number + (0 if reverse else 1), state, step < count)
            return state

        state = (jnp.zeros((block, padded), jnp.float32), jnp.zeros((padded,), jnp.float32))
        if start is not None:
            state = load("start_")
        store(jnp.int32(count if reverse else 0), state)
        state = jax.lax.fori_loop(0, pl.cdiv(count, at_once), add_pieces, state)
        plgpu.store(end_out.at[rows, columns[None]], state[0], mask=within)

    found = tiles.launch(
        kernel,
        "linear_attention_scan",
        grid=(pl.cdiv(V, block), G, B),
        in_specs=[specs],
        out_specs=[
            pl.BlockSpec((None, None, count + 1, V, width), lambda r, g, b: (b, g, 0, 0, 0)),
            pl.BlockSpec((None, None, count + 1, width), lambda r, g, b: (b, g, 0, 0)),
            pl.BlockSpec((None, None, V, width), lambda r, g, b: (b, g, 0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((B, G, count + 1, V, width), pieces[0].dtype),
            jax.ShapeDtypeStruct((B, G, count + 1, width), jnp.float32),
            jax.ShapeDtypeStruct((B, G, V, width), jnp.float32),
        ],
        warps=WARPS,
        stages=1,
    )(inputs)
    return Edges(*found)
