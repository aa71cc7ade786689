"""The role VALUES of `channel_output.py`: the state S, the weights w of a step's pairs, and out."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_COLUMNS, OF_ROWS, Item, load, multiply
from ato_jax.ops.linear_attention.mosaic_gpu import channel_blocks
from ato_jax.ops.linear_attention.mosaic_gpu.channel_output_storage import Walk
from ato_jax.ops.linear_attention.mosaic_gpu.channel_powers import Power
from ato_jax.ops.linear_attention.mosaic_gpu.channel_turns import Masks, Step
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C


def values(walk: Walk) -> None:
    """Computes half of out's columns, with the same half of S in registers."""
    walk.deal.each(functools.partial(multiply_piece, walk))
    plgpu.wait_smem_to_gmem(0)


def multiply_piece(walk: Walk, item: Item) -> None:
    own, half = walk.own, mosaic.group()
    # The columns of `onto` by which S is scaled: those of the half's head.
    columns = () if walk.heads == 1 else (pl.ds(half * HALF, HALF),)
    own.start.wait()
    S = load(own.s.at[half]).astype(F32)  # [64, F]
    S = walk.times(S, item, half, Power.OVER_STATE)

    def start(in_turns: bool) -> Any:
        if not in_turns:
            return (S,)
        start = S, mosaic.zeros(C, HALF)
        if walk.den is not None:
            return *start, plgpu.layout_cast(jnp.zeros((C,), F32), OF_ROWS)
        return start

    walk.each_step(item, start, functools.partial(multiply_step, walk, half, columns, item))


def multiply_step(
    walk: Walk, half: Any, columns: tuple[Any, ...], item: Item, step: Step, carried: Any
) -> Any:
    """Carries S's half [64, F], scaled to the middle row of the step before. Where steps are turns
    it also carries the parts of out [64, 64], and of den [64] if it is written, of the chunk's
    earlier turns."""
    own, tiling, (S, *found) = walk.own, walk.tiling, carried
    borders = walk.borders(item, step.chunk)
    masks = Masks(borders, step.turn)
    # Then keys are masked before they are added to S, in a product of its own.
    adds_later = walk.has_borders and step.turn is not None
    slot, v_slot = own.rows.slot(step.number), own.values.slot(step.number)
    own.mapped.wait(slot)
    onto = mosaic.in_rows(load(own.onto.at[(slot, *columns)], OF_COLUMNS), HALF)
    S = S * onto * onto
    q, k = (tiling.head_in(tiles, slot, half) for tiles in (own.q, own.k))
    v, state = own.v.at[v_slot, half], own.s.at[half]
    rest = rest_of_state(state, S, q) if walk.in_two_parts else None
    state[...] = walk.times(S, item, half, Power.STATE).astype(tiling.dtype)
    eps, over = eps_and_scale(walk, item, half, slot)
    own.values.produced.wait(v_slot)
    plgpu.commit_smem()
    products = [
        (mosaic.zeros(C, C), [(q, k.T)]),
        (mosaic.zeros(C, HALF) if rest is None else rest, [(q, state.T)]),
        (S, [(v.T, k)]),
    ]
    if adds_later:
        w, out = multiply(*products[:2])
    else:
        w, out, S = multiply(*products)
        borders.unless_some(lambda: own.rows.consumed.arrive(slot))
    out = walk.times(out, item, half, Power.OVER_STATE)
    w, out = borders.either(
        lambda: (jnp.where(borders.pairs_from(), w, 0.0), masks.reading(out)),
        lambda: (w, out),
    )
    w = channel_blocks.seen(walk.spec, item, w)
    parts = [mosaic.rounded(w, tiling.dtype)]
    if walk.in_two_parts:
        parts.append(mosaic.rounded(w - parts[0].astype(F32)))
    (out,) = multiply((out, [(part, v) for part in parts]))
    add_last = functools.partial(add_last_segment, masks, S, v, k)
    if adds_later:
        S = add_last()
        own.rows.consumed.arrive(slot)
    elif walk.has_borders:
        S = borders.either(add_last, lambda: S)
        borders.when_some(lambda: own.rows.consumed.arrive(slot))
    summed = w if walk.in_two_parts else parts[0]
    factor, den = factor_of(walk, half, v_slot, summed, eps, over)
    plgpu.commit_smem()  # all warps have multiplied by the state, which the next step stores
    own.values.consumed.arrive(v_slot)
    out = out * factor
    made = (out,) if walk.den is None else (out, den)
    if step.turn is None:
        store_chunk(walk, half, item, step.chunk, *made)
        return (S,)
    sums = [x + before for x, before in zip(made, found, strict=True)]
    pl.when(step.is_last)(lambda: store_chunk(walk, half, item, step.chunk, *sums))
    return S, *(jnp.where(step.is_last, 0.0, x) for x in sums)


def rest_of_state(state: Any, S: jax.Array, q: Any) -> jax.Array:
    """The product of q^ and what rounding S leaves off, [64, 64]. That lies in the place of the
    state until all warps have multiplied by it."""
    state[...] = mosaic.rounded(S - mosaic.rounded(S).astype(F32))
    plgpu.commit_smem()
    (found,) = multiply((mosaic.zeros(C, HALF), [(q, state.T)]))
    plgpu.commit_smem()  # all warps have multiplied by it
    return found


def add_last_segment(masks: Masks, S: jax.Array, v: Any, k: Any) -> jax.Array:
    """S behind a step with borders: with the keys of the last row's segment alone. In a chunk that
    is one step nothing is left of the state ahead. Sets the other rows of v to 0."""
    plgpu.commit_smem()  # all warps have multiplied by the values
    mosaic.keep_rows_between(v, masks.adds, C)
    plgpu.commit_smem()
    ahead = mosaic.zeros(*S.shape) if masks.turn is None else masks.left(S)
    (found,) = multiply((ahead, [(v.T, k)]))
    return found


def eps_and_scale(walk: Walk, item: Item, half: Any, slot: Any) -> tuple[Any, Any]:
    """eps and the scale; in float16 of each row, since numerators and denominators contain the
    powers of the row and of the head."""
    spec = walk.spec
    if not walk.in_float16:
        return spec.eps, spec.scale
    row = load(walk.tiling.rows_in(walk.own.powers, slot, half), OF_ROWS)  # [64]
    eps = jnp.exp2(row) * (spec.eps * walk.power_of(item, half, Power.KEYS))
    return eps, jnp.exp2(-row) * (spec.scale * walk.power_of(item, half, Power.OVER_KEYS))


def factor_of(
    walk: Walk, half: Any, v_slot: Any, w: jax.Array, eps: Any, over: Any
) -> tuple[Any, Any]:
    """The factor of out's rows, [64, 64] or a number; and the denominators [64] without the powers
    of float16, None without a normaliser. `eps` and `over` are those of `eps_and_scale`."""
    own, den, factor = walk.own, None, over
    if walk.spec.normalize:
        of_row: Any = jnp.sum(w.astype(F32), axis=1)
        own.den_known.wait(v_slot)
        for number in range(2) if walk.heads == 1 else (half,):
            of_row = of_row + load(own.den.at[v_slot, number], OF_ROWS)
        den = of_row * over if walk.in_float16 else of_row
        factor = over if walk.den is not None else 1.0 / jnp.maximum(of_row, eps)
    return (mosaic.in_columns(factor, HALF) if jnp.ndim(factor) else factor), den


def store_chunk(
    walk: Walk, half: Any, item: Item, chunk: Any, out: jax.Array, den: jax.Array | None = None
) -> None:
    own = walk.own.out.at[half]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    own[...] = out.astype(walk.own.out.dtype)
    plgpu.commit_smem()
    head = item.head
    if not walk.adds_up:
        head = channel_blocks.head_of_values(walk.spec, walk.out, head)
    target = walk.tiling.part(walk.out, item, item.rows(chunk), head, half)
    plgpu.copy_smem_to_gmem(own, target)
    if den is not None:

        @pl.when(half == 0)
        def _() -> None:
            # Stored from registers: shared memory has no room for den.
            of_rows = walk.den.at[item.batch, item.head, item.rows(chunk)]
            mosaic.store_in_memory(of_rows, den)
