"""out [B, T, H, V] where every query sees every key, without a decay.

`bidirectional.py` launches it with S [F, V], in the dtype of tiles, and z [F], the sums over all
keys (`whole_sums.py`):

    out_i = phi(q_i) S / max(phi(q_i) . z, eps)        or without the denominator

    memory    loads S and z of a head, and chunks of q, across pieces
    output    three warpgroups that take chunks in turn: phi(q) in registers is the first factor of
              all products

z has 8 columns: 4 hold z rounded, 4 what rounding left off. Where S leaves no room for slots of q,
two blocks have half of its columns each.

Where features may be negative, products cancel, and the rounding errors of phi(q), phi(k), S and
out together take the whole budget of bfloat16. phi(q) is then multiplied in two parts, in blocks of
64 features: rounded, and what rounding left off.

Queries of 8 bits are widened and scaled in registers, and mapped and multiplied in such blocks.

In float16 (`whole_units.py`) with a normaliser the operands are shares and means. z and the
denominator are then in float32, and out is divided by the sum of the rounded shares. Without a
normaliser S has a unit of its head, and phi(q) is rounded in a unit of its row; out is multiplied
by both. Four roundings are within float16's budget, so phi(q) has one part whatever the signs are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import ALIKE, F32, HALF, OF_COLUMNS, Item, load, multiply, slot_of
from ato_jax.mosaic.tiles import tiled
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame, row_copies, whole_units
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, F
from ato_jax.ops.linear_attention.mosaic_gpu.whole_sums import blocks_of_state
from ato_jax.ops.linear_attention.mosaic_gpu.whole_units import LEAST_SHARE, LEAST_SUM
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

WORKERS = 3  # the warpgroups of the role output; the next one loads
WORKER_REGISTERS = 160


def whole_output(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    q: jax.Array,
    s: jax.Array,
    z: jax.Array,
    lengths: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    units: jax.Array | None = None,
) -> jax.Array:
    """Launches the kernel and returns out, which is 0 behind the lengths of queries.

    Args:
      deal: counts items.
      s: [B, G, F, V] in the dtype of tiles; in float16 with a normaliser the means of values.
      z: [B, G, 8, F] in the dtype of tiles; in float16 [B, G, F] float32.
      lengths: [B] of queries.
      q_scale: [B, H] float32 of queries in 8 bits.
      units: [B, G] float32 of s, in float16 without a normaliser.
    """
    # In blocks, D256 takes 0.193 ms where whole tiles take 0.211 (H200, B2 H8 T16384).
    tiling = row_copies.by_blocks(spec, always=frame.is_wide(spec))
    maps = feature_maps.features(spec)
    group_size, parts = spec.H // spec.G, blocks_of_state(spec)
    width = spec.V // parts
    # As many slots of q, a multiple of the workers, and of S and z as fit.
    slots, states = (WORKERS, 1) if frame.is_wide(spec) else (2 * WORKERS, 2)
    blocks = spec.D // HALF
    of_eight_bits = q_scale is not None
    half_precision = mosaic.has_units(tiling.dtype)
    in_two_parts = not (spec.feature_map.nonnegative or half_precision)
    of_shares = half_precision and spec.normalize
    rows_of_q, copies = tiling.tiles(slots), tiling.blocks
    if of_eight_bits:
        rows_of_q, copies = mosaic.eight_bits(slots, blocks, C, HALF), blocks
    scratch = dict(
        q_s=rows_of_q,
        s_s=tiling.shared(states, spec.D, width),
        z_s=tiling.shared(states, ALIKE, spec.D),
        out_s=tiling.tiles(WORKERS, width),
        loaded=plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
        free=plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        s_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=states),
        s_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=states),
    )

    if half_precision:
        scratch["z_s"] = plgpu.SMEM((states, spec.D), F32)

    def body(
        q_ref: Any,
        s_ref: Any,
        z_ref: Any,
        *refs: Any,
        q_s: Any,
        s_s: Any,
        z_s: Any,
        out_s: Any,
        loaded: Any,
        free: Any,
        s_loaded: Any,
        s_free: Any,
    ) -> None:
        *given, out_ref = refs
        units_ref: Any = given.pop() if units is not None else None
        q_scale_ref: Any = given.pop() if of_eight_bits else None
        (lengths_ref,) = given or (None,)

        def share_of(item: Item) -> tuple[Any, Any]:
            """Its head, and which share of the columns of S and out is its own."""
            return lax.div(item.head, parts), lax.rem(item.head, parts)

        def load_piece(item: Item) -> None:
            head, share = share_of(item)
            columns = pl.ds(share * width, width)
            of_head = item.batch, lax.div(head, group_size)
            state = slot_of(item.number, states)
            mosaic.wait_until_free(s_free, item.number, states)
            for source, own in (
                (s_ref.at[(*of_head, slice(None), columns)], s_s),
                (z_ref.at[of_head], z_s),
            ):
                plgpu.copy_gmem_to_smem(source, own.at[state], s_loaded.at[state])

            def load_chunk(chunk: Any, _: None) -> None:
                step = item.before + chunk
                slot = slot_of(step, slots)
                mosaic.wait_until_free(free, step, slots)
                rows, barrier = item.rows(chunk), loaded.at[slot]
                if of_eight_bits:
                    own = [q_s.at[slot, block] for block in range(blocks)]  # [C, HALF] each
                    mosaic.copy_eight_bits(tiling, q_ref, item, rows, head, own, barrier)
                    return
                tiling.copy_tile(q_ref, item, rows, head, q_s, slot, loaded)

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def block_of_q(slot: Any, block: Any) -> jax.Array:
            return load(tiling.block_in(tiled(q_s).at[slot], block))

        def parts_of_features(slot: Any, count: Any) -> Iterator[tuple[list[jax.Array], Any]]:
            """Both parts of phi(q) [C, 64], and which rows of S they are multiplied with."""
            for block in range(blocks):
                first = block * HALF
                rows = pl.ds(first, HALF)
                phi = maps.unrounded(block_of_q(slot, block), first)  # [C, HALF]
                phi = mosaic.kept(phi, count)
                rounded = mosaic.rounded(phi, tiling.dtype)
                rest = mosaic.rounded(phi - rounded.astype(F32), tiling.dtype)
                yield [rounded, rest], rows

        def weights(x: jax.Array, z_own: Any, count: Any, first: int = 0) -> jax.Array:
            """phi(q) z, [C, columns]."""
            phi = mosaic.kept(maps.unrounded(x, first), count)
            return phi * mosaic.in_rows(load(z_own, OF_COLUMNS), C)

        def shares(phi: jax.Array, den: jax.Array) -> tuple[jax.Array, jax.Array]:
            """The shares of `weights` in `den`, their sum over all columns: rounded, and the sum
            of the rounded ones."""
            inverse = 1.0 / jnp.maximum(den, LEAST_SUM)
            found = phi * mosaic.in_columns(inverse, phi.shape[1])
            found = mosaic.rounded(found, tiling.dtype)
            return found, jnp.sum(found.astype(F32), axis=1)

        def factor_of(den: jax.Array, of_rounded: jax.Array) -> jax.Array:
            """The factor of the products of shares and means, [C]: den / max(den, eps), divided by
            the sum of the rounded shares, which rounding moves away from 1."""
            of_all = den / jnp.maximum(den, max(spec.eps, LEAST_SUM))
            return of_all / jnp.maximum(of_rounded, LEAST_SHARE)

        def in_blocks(phis: Iterable[jax.Array]) -> list[Any]:
            """Features of each 64 columns, with the rows of S to multiply them with."""
            return [([phi], pl.ds(block * HALF, HALF)) for block, phi in enumerate(phis)]

        def features_of_blocks(slot: Any, count: Any) -> tuple[list[Any], jax.Array | None]:
            """phi(q) of each 64 columns, with the rows of S to multiply them with, and the factor
            of the products; None without units."""
            xs = [block_of_q(slot, block) for block in range(blocks)]
            if not whole_units.has_units_of_features(spec):
                phis = (maps.queries(x, n * HALF) for n, x in enumerate(xs))
                return in_blocks(mosaic.kept(phi, count) for phi in phis), None
            phis = (maps.unrounded(maps.present(x, n * HALF)) for n, x in enumerate(xs))
            found, factor = whole_units.rows_in_units([mosaic.kept(phi, count) for phi in phis])
            return in_blocks(found), factor

        def shares_of_blocks(slot: Any, state: Any, count: Any) -> tuple[list[Any], jax.Array]:
            """The shares of each 64 columns, with the rows of S to multiply them with, and the
            factor of the products. Queries are mapped twice, since registers have no room for all
            features in float32."""

            def of_block(block: Any) -> jax.Array:
                first = row_copies.first_of(block)
                own_z = z_s.at[state, pl.ds(first, HALF)]
                return weights(block_of_q(slot, block), own_z, count, first)

            def add_block(block: Any, den: jax.Array) -> jax.Array:
                return den + jnp.sum(of_block(block), axis=1)

            nothing = plgpu.layout_cast(jnp.zeros((C,), F32), mosaic.OF_ROWS)
            den = lax.fori_loop(0, blocks, add_block, nothing)
            found = [shares(of_block(block), den) for block in range(blocks)]
            of_rounded = functools.reduce(jnp.add, (rounded for _, rounded in found))
            return in_blocks(one for one, _ in found), factor_of(den, of_rounded)

        def groups_of(whole: Any, slot: Any, count: Any) -> Iterable[Any]:
            """Features that are multiplied at once: all where registers have them, or each part."""
            if isinstance(whole, list):
                return [whole]
            return ([part] for part in whole or parts_of_features(slot, count))

        def write_piece(item: Item) -> None:
            head, share = share_of(item)
            state = slot_of(item.number, states)
            own_out = tiled(out_s).at[mosaic.group()]
            s_unit: Any = None
            if units_ref is not None:
                s_unit = units_ref[item.batch, lax.div(head, group_size)]
            plgpu.barrier_wait(s_loaded.at[state])

            def write_chunk(chunk: Any) -> None:
                slot = slot_of(item.before + chunk, slots)
                count = item.rows_within(chunk, lengths_ref)
                plgpu.barrier_wait(loaded.at[slot])

                def let_go() -> None:
                    plgpu.commit_smem()  # reads finish before the next load overwrites them
                    plgpu.barrier_arrive(free.at[slot])

                whole: Any = None
                factor: Any = None
                if of_eight_bits:
                    xs = [mosaic.load_eight_bits(q_s.at[slot, block]) for block in range(blocks)]
                    let_go()
                    own_scale = q_scale_ref[item.batch, head]
                    whole = _widened_features(spec, xs, own_scale, count)
                elif of_shares and (parts > 1 or tiling.untiled):
                    whole, factor = shares_of_blocks(slot, state, count)
                    let_go()
                elif tiling.untiled and not in_two_parts:
                    whole, factor = features_of_blocks(slot, count)
                    let_go()
                elif not in_two_parts:
                    x = load(q_s.at[slot])  # [C, D]
                    let_go()
                    if of_shares:
                        phi = weights(x, z_s.at[state], count)
                        den_q = jnp.sum(phi, axis=1)
                        phi, of_rounded = shares(phi, den_q)
                        factor = factor_of(den_q, of_rounded)
                    elif whole_units.has_units_of_features(spec):
                        phi = mosaic.kept(maps.unrounded(maps.present(x)), count)
                        (phi,), factor = whole_units.rows_in_units([phi])
                    else:
                        phi = mosaic.kept(maps.queries(x), count)
                    whole = [([phi], slice(None))]
                # In columns of a width that leaves registers to the features.
                for first in range(0, width, F):
                    size = min(F, width - first)
                    own = pl.ds(first, size)
                    found: tuple[jax.Array, ...] = (mosaic.zeros(C, size),)
                    if spec.normalize and not (first or half_precision):
                        found += (mosaic.zeros(C, ALIKE),)
                    for group in groups_of(whole, slot, count):
                        of_s = [
                            (phi, s_s.at[state, rows, own]) for phis, rows in group for phi in phis
                        ]
                        sums: Any = [(found[0], of_s)]
                        if len(found) > 1:
                            of_z = [
                                (phi, z_s.at[state, :, rows].T)
                                for phis, rows in group
                                for phi in phis
                            ]
                            sums.append((found[1], of_z))
                        found = multiply(*sums)
                    out, *den = found
                    if whole is None and first + size == width:
                        let_go()
                    if den:
                        factor = 1.0 / jnp.maximum(mosaic.of_parts(den[0]), spec.eps)
                    if factor is not None:
                        out = out * mosaic.in_columns(factor, size)
                    out = out if s_unit is None else out * s_unit
                    if not first:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out = out.astype(tiling.dtype)
                    if tiling.untiled:
                        for block in range(size // HALF):
                            columns = slice(block * HALF, (block + 1) * HALF)
                            own_out.at[first // HALF + block][...] = out[:, columns]
                    else:
                        own_out.at[:, own][...] = out
                plgpu.commit_smem()
                rows = item.rows(chunk)
                tiling.leave_tile(out_s, mosaic.group(), out_ref, item, rows, head, share)

            mosaic.in_turn(item, WORKERS, write_chunk)
            plgpu.barrier_arrive(s_free.at[state])

        @pl.when(mosaic.group() == WORKERS)
        def _memory() -> None:
            mosaic.set_registers(mosaic.MEMORY_REGISTERS, frame.WARPGROUPS)
            steps = deal.each(load_piece)
            mosaic.await_the_last(free, steps, slots)
            mosaic.await_the_last(s_free, deal.own, states)

        @pl.when(mosaic.group() < WORKERS)
        def _output() -> None:
            mosaic.set_registers(WORKER_REGISTERS, frame.WARPGROUPS)
            deal.each(write_piece)
            plgpu.wait_smem_to_gmem(0)

    out_type = jax.ShapeDtypeStruct(frame.shape_of_values(spec, spec.H), tiling.dtype)
    given = [array for array in (lengths, q_scale, units) if array is not None]
    arrays = [q, s, z, *given]
    return frame.launch(body, "whole_output", deal, out_type, scratch, arrays)


def _widened_features(
    spec: LinearAttentionSpec, xs: list[jax.Array], scale: Any, count: Any
) -> Iterator[tuple[list[jax.Array], Any]]:
    """phi(q) [C, 64] of each block of queries of 8 bits, in two parts where features may be
    negative, and which rows of S it is multiplied with."""
    maps = feature_maps.features(spec)
    for block, x in enumerate(xs):
        first = block * HALF
        phi = mosaic.kept(maps.unrounded(mosaic.scaled(x, scale), first), count)
        rounded = mosaic.rounded(phi)
        parts = [rounded]
        if not spec.feature_map.nonnegative:
            parts.append(mosaic.rounded(phi - rounded.astype(F32)))
        yield parts, pl.ds(first, HALF)
