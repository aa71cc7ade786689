"""States of pieces to states before or after each piece: one operator, whatever the decay.

    S[0] = start,  S[p + 1] = keep[p] S[p] + piece[p]          forward: S[p] is ahead of piece p
    S[P] = start,  S[p] = keep[p] S[p + 1] + piece[p]          reversed: S[p + 1] is behind it

The states may be stored times `reads`, and the pieces added times `adds`, the factors that their
readers would multiply them by (`prepared/`).

A state is kv [V, F] and k_sum [F]. keep[p] is what is left of a state after piece p, a number from
0 to 1, or one for each of the F columns. The operator does not mix rows of kv, so a program has
some of them to itself and walks the pieces in order. It loads several pieces ahead of adding them,
or each addition would wait for memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.launch import triton as plgpu
from ato_jax.triton import tiles
from ato_jax.triton.launch import launch, piece_id

State = tuple[jax.Array, jax.Array]


class Edges(NamedTuple):
    """The states at the edges of the pieces, and in float32 the kv where the scan ends."""

    kv: jax.Array  # [B, G, P + 1, V, F]
    k_sum: jax.Array  # [B, G, P + 1, F], float32
    end_kv: jax.Array  # [B, G, V, F]


# Elements of kv in one program, and pieces that are loaded ahead. Every program loads the factors
# of the columns, so that with these it pays to have fewer programs.
PROGRAM_SIZE, PIECES_AHEAD = 1024, 8
FACTORED_SIZE, FACTORED_AHEAD = 4096, 4
WARPS = 4


class Block(NamedTuple):
    """The part of the states that a program has, and which edges it stores."""

    rows: jax.Array  # [V_block, 1]
    columns: jax.Array  # [F]
    within: jax.Array  # [V_block, F], which elements exist
    real: jax.Array  # [F], which columns exist
    once: jax.Array  # [F], which of them this program stores of k_sum, that one program does

    def load(self, refs: dict[str, Any], name: str, *index: Any, also: Any = True) -> State:
        """kv [V_block, F] and k_sum [F] in float32."""
        kv_ref, k_sum_ref = refs[f"{name}kv"], refs[f"{name}k_sum"]
        at = kv_ref.at[(*index, self.rows, self.columns[None])]
        kv = plgpu.load(at, mask=self.within & also, other=0)
        return (
            kv.astype(jnp.float32),
            plgpu.load(k_sum_ref.at[(*index, self.columns)], mask=self.real & also, other=0),
        )

    def factors(self, refs: dict[str, Any], name: str, number: Any, also: Any = True) -> jax.Array:
        """A factor for each column, [F], zero where `also` is false."""
        ref = refs[name]
        return plgpu.load(ref.at[number, self.columns], mask=self.real & also, other=0)

    def kept_after(self, refs: dict[str, Any], number: Any) -> Any:
        """The factor of a state over a piece: a number, or one for each column [F]."""
        if "keep" not in refs:
            return 1.0
        if len(refs["keep"].shape) == 1:
            return refs["keep"][number]
        return self.factors(refs, "keep", number)

    def store(
        self, refs: dict[str, Any], outs: tuple[Any, Any], edge: Any, state: State, exists: Any
    ) -> None:
        """The state at an edge, as it is read there."""
        (kv_out, k_sum_out), (kv, k_sum) = outs, state
        if "reads" in refs:
            factor = self.factors(refs, "reads", edge, exists)
            kv, k_sum = factor * kv, factor * k_sum
        kv = kv.astype(kv_out.dtype)
        plgpu.store(
            kv_out.at[edge, self.rows, self.columns[None]], kv, mask=self.within & exists
        )
        plgpu.store(k_sum_out.at[edge, self.columns], k_sum, mask=self.once & exists)


def _block_of(program: Any, rows: int, V: int, width: int) -> Block:
    first = program * rows
    index = first + jnp.arange(rows, dtype=jnp.int32)[:, None]
    columns = jnp.arange(tiles.padded(width), dtype=jnp.int32)
    real = columns < width
    return Block(index, columns, (index < V) & real[None, :], real, real & (first == 0))


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
    factored = adds is not None or reads is not None
    size, at_once = (
        (FACTORED_SIZE, FACTORED_AHEAD) if factored else (PROGRAM_SIZE, PIECES_AHEAD)
    )
    block = max(1, size // tiles.padded(width))
    inputs: dict[str, jax.Array] = {"kv": pieces[0], "k_sum": pieces[1]}
    if start is not None:
        inputs |= {"start_kv": start[0], "start_k_sum": start[1]}
    factors = {"keep": keeps, "adds": adds, "reads": reads}
    inputs |= {name: array for name, array in factors.items() if array is not None}

    def kernel(refs: dict[str, Any], kv_out: Any, k_sum_out: Any, end_out: Any) -> None:
        part = _block_of(piece_id(), block, V, width)
        outs = kv_out, k_sum_out

        def add_pieces(i: Any, state: State) -> State:
            steps = [i * at_once + ahead for ahead in range(at_once)]
            numbers = [
                jnp.maximum(count - 1 - step, 0) if reverse else jnp.minimum(step, count - 1)
                for step in steps
            ]
            loaded = [
                part.load(refs, "", number, also=step < count)
                for step, number in zip(steps, numbers, strict=True)
            ]
            kept = [part.kept_after(refs, number) for number in numbers]
            if adds is not None:
                added = [part.factors(refs, "adds", number) for number in numbers]
                loaded = [
                    (factor * kv, factor * k_sum)
                    for factor, (kv, k_sum) in zip(added, loaded, strict=True)
                ]
            for step, number, piece, keep in zip(steps, numbers, loaded, kept, strict=True):
                if keeps is not None:
                    keep = jnp.where(step < count, keep, 1.0)
                state = (keep * state[0] + piece[0], keep * state[1] + piece[1])
                part.store(refs, outs, number + (0 if reverse else 1), state, step < count)
            return state

        zeros = jnp.zeros((block, tiles.padded(width)), jnp.float32)
        state = (zeros, jnp.zeros((tiles.padded(width),), jnp.float32))
        if start is not None:
            state = part.load(refs, "start_")
        part.store(refs, outs, jnp.int32(count if reverse else 0), state, True)
        state = jax.lax.fori_loop(0, pl.cdiv(count, at_once), add_pieces, state)
        plgpu.store(end_out.at[part.rows, part.columns[None]], state[0], mask=part.within)

    def of_head(array: Any, shared: bool = False) -> pl.BlockSpec:
        """All that one head has of an array, or the only head, which is `shared`."""
        rest = (0,) * (array.ndim - 2)
        return pl.BlockSpec(
            (None, None, *array.shape[2:]), lambda r, g, b: (b, 0 if shared else g, *rest)
        )

    shapes = [
        jax.ShapeDtypeStruct((B, G, count + 1, V, width), pieces[0].dtype),
        jax.ShapeDtypeStruct((B, G, count + 1, width), jnp.float32),
        jax.ShapeDtypeStruct((B, G, V, width), jnp.float32),
    ]
    found = launch(
        kernel,
        "linear_attention_scan",
        grid=(pl.cdiv(V, block), G, B),
        in_specs=[
            {
                name: of_head(array, name == "keep" and array.shape[1] == 1)
                for name, array in inputs.items()
            }
        ],
        out_specs=[of_head(shape) for shape in shapes],
        out_shape=shapes,
        warps=WARPS,
        stages=1,
    )(inputs)
    return Edges(*found)
