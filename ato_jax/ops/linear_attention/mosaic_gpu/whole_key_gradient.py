"""dk and dv [B, T, G, D] where every query sees every key, without a decay.

`bidirectional.py` launches it with R [F, V], in the dtype of tiles, and u [F], the sums over all
queries (`whole_query_gradient.py`):

    dv_j = R^T phi(k_j)
    dk_j = (R v_j + u) phi'(k_j)        phi' is phi's derivative

    memory       loads R and u of a head, and chunks of k and v, across pieces
    gradients    three warpgroups that take chunks in turn: phi(k) in registers, dk, then dv

Where phi' is computed from k and not from phi(k), registers have no room for k: k stays in its slot
of shared memory until dk is stored, and dv is computed first.

In float16 (`whole_units.py`) R has a unit of its head, by which products are multiplied. With a
normaliser phi(k) becomes shares, which are multiplied by `LARGEST`. Without one phi(k) is rounded
in a unit of its row, by which dv is multiplied; features of identity are exact and have no unit.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF, OF_COLUMNS, Item, load, multiply, slot_of
from ato_jax.mosaic.tiles import tiled
from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, frame, row_copies, whole_units
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, F, V
from ato_jax.ops.linear_attention.mosaic_gpu.whole_units import LARGEST, SumsOfQueries
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# The warpgroups of the role gradients; the next one loads. The number of slots of k and v is a
# multiple of it, so that each slot belongs to one warpgroup (`mosaic.in_turn`).
WORKERS = 3
STAGES, STATES = 3, 1
WORKER_REGISTERS = 160


def whole_key_gradient(
    spec: LinearAttentionSpec,
    deal: mosaic.Deal,
    k: jax.Array,
    v: jax.Array,
    sums: SumsOfQueries,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel and returns dk and dv, which are 0 behind the lengths of keys, [B]."""
    tiling, maps = row_copies.tiling(spec), feature_maps.features(spec)
    of_rows = whole_units.has_units_of_features(spec) and not spec.normalize
    copies = row_copies.copies_of(tiling)
    scratch = dict(
        k_s=tiling.tiles(STAGES),
        v_s=tiling.tiles(STAGES),
        r_s=tiling.shared(STATES, F, V),
        u_s=plgpu.SMEM((STATES, F), F32),
        out_s=tiling.tiles(2 * WORKERS),
        loaded=plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
        v_loaded=plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        v_free=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        r_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=STATES),
        r_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=STATES),
    )
    if sums.inverse is not None:
        scratch["inverse_s"] = plgpu.SMEM((STATES, F), F32)
        scratch["r_loaded"] = plgpu.Barrier(num_arrivals=3, num_barriers=STATES)

    def body(
        k_ref: Any,
        v_ref: Any,
        r_ref: Any,
        u_ref: Any,
        *refs: Any,
        k_s: Any,
        v_s: Any,
        r_s: Any,
        u_s: Any,
        out_s: Any,
        loaded: Any,
        v_loaded: Any,
        free: Any,
        v_free: Any,
        r_loaded: Any,
        r_free: Any,
        inverse_s: Any = None,
    ) -> None:
        *given, dk_ref, dv_ref = refs
        inverse_ref: Any = given.pop() if sums.inverse is not None else None
        units_ref: Any = given.pop() if sums.units is not None else None
        (lengths_ref,) = given or (None,)
        k_rows, v_rows, out_rows = (tiled(x) for x in (k_s, v_s, out_s))

        def load_piece(item: Item) -> None:
            state = slot_of(item.number, STATES)
            mosaic.wait_until_free(r_free, item.number, STATES)
            of_heads = [(r_ref, r_s), (u_ref, u_s)]
            if inverse_ref is not None:
                of_heads.append((inverse_ref, inverse_s))
            for ref, own in of_heads:
                source = ref.at[item.batch, item.head]
                plgpu.copy_gmem_to_smem(source, own.at[state], r_loaded.at[state])

            def load_chunk(chunk: Any, _: None) -> None:
                step = item.before + chunk
                slot = slot_of(step, STAGES)
                for ref, own, own_loaded, own_free in (
                    (k_ref, k_s, loaded, free),
                    (v_ref, v_s, v_loaded, v_free),
                ):
                    mosaic.wait_until_free(own_free, step, STAGES)
                    rows = item.rows(chunk)
                    tiling.copy_tile(ref, item, rows, item.head, own, slot, own_loaded)

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def write_piece(item: Item) -> None:
            state = slot_of(item.number, STATES)
            unit: Any = None if units_ref is None else units_ref[item.batch, item.head]
            # Shares come times `LARGEST`, and so does what dk is multiplied by.
            unit_of_shares = unit if inverse_ref is None else unit * (1 / LARGEST)
            plgpu.barrier_wait(r_loaded.at[state])

            def write_chunk(chunk: Any) -> None:
                slot = slot_of(item.before + chunk, STAGES)
                count = item.rows_within(chunk, lengths_ref)

                def let_go_of_k() -> None:
                    plgpu.commit_smem()  # reads finish before the next load overwrites them
                    plgpu.barrier_arrive(free.at[slot])

                def write(number: int, found: Any, ref: Any) -> None:
                    """Stores a gradient, or what `found` puts into its place in shared memory."""
                    place = 2 * mosaic.group() + number
                    own_out = out_rows.at[place]
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the other's may go on
                    if callable(found):
                        found(own_out)
                    else:
                        own_out[...] = found.astype(tiling.dtype)
                    plgpu.commit_smem()
                    tiling.leave_tile(out_s, place, ref, item, item.rows(chunk), item.head)

                def gradient_of_features() -> jax.Array:
                    of_sum = mosaic.in_rows(load(u_s.at[state], OF_COLUMNS), C)
                    of_sum = of_sum if unit is None else of_sum * (1 / unit)
                    plgpu.barrier_wait(v_loaded.at[slot])
                    (dk,) = multiply((of_sum, [(v_rows.at[slot], r_s.at[state].T)]))
                    plgpu.barrier_arrive(v_free.at[slot])
                    return dk if unit is None else dk * unit_of_shares

                def write_dv(
                    factors: list[tuple[jax.Array, Any]], rows: jax.Array | None = None
                ) -> None:
                    (dv,) = multiply((mosaic.zeros(C, V), factors))
                    dv = dv if rows is None else dv * mosaic.in_columns(rows, V)
                    write(1, dv if unit is None else dv * unit_of_shares, dv_ref)

                def inverse_of(first: int, width: int) -> jax.Array:
                    own = inverse_s.at[state, pl.ds(first, width)]
                    return mosaic.in_rows(load(own, OF_COLUMNS), C)

                plgpu.barrier_wait(loaded.at[slot])
                if maps.slope_is_known:
                    x = load(k_rows.at[slot])  # [C, F]
                    let_go_of_k()
                    own_units = None
                    if of_rows:
                        phi_k = mosaic.kept(maps.unrounded(maps.present(x)), count)
                        (phi_k,), own_units = whole_units.rows_in_units([phi_k])
                    elif inverse_ref is None:
                        phi_k = mosaic.kept(maps.keys(maps.present(x)), count)
                    else:
                        phi_k = mosaic.kept(maps.unrounded(x) * inverse_of(0, F), count)
                        phi_k = mosaic.rounded(phi_k, tiling.dtype)
                    dk = mosaic.kept(gradient_of_features(), count)
                    factor = None if inverse_ref is None else functools.partial(inverse_of, 0, F)
                    dk = dk * whole_units.slope_of_keys(maps, x, phi_k, own_units, factor)
                    write(0, dk, dk_ref)
                    write_dv([(phi_k, r_s.at[state])], own_units)
                    return

                def keys(first: int) -> jax.Array:
                    return load(k_rows.at[slot, :, pl.ds(first, HALF)])  # [C, HALF]

                def features(first: int) -> jax.Array:
                    if inverse_ref is None:
                        return mosaic.kept(maps.keys(keys(first), first=first), count)
                    phi = maps.unrounded(keys(first), first) * inverse_of(first, HALF)
                    return mosaic.rounded(mosaic.kept(phi, count), tiling.dtype)

                firsts, own_units = range(0, F, HALF), None
                if of_rows:
                    phis = [maps.unrounded(keys(first), first) for first in firsts]
                    phis = [mosaic.kept(phi, count) for phi in phis]
                    phis, own_units = whole_units.rows_in_units(phis)
                else:
                    phis = [features(first) for first in firsts]
                parts_of_r = [r_s.at[state, pl.ds(first, HALF)] for first in firsts]
                write_dv(list(zip(phis, parts_of_r, strict=True)), own_units)
                dk = gradient_of_features()

                def store(own_out: Any) -> None:
                    for first in firsts:
                        own = dk[:, first : first + HALF] * maps.slope(keys(first))
                        if inverse_ref is not None:
                            own = own * inverse_of(first, HALF)
                        own = mosaic.kept(own, count)
                        own_out.at[:, pl.ds(first, HALF)][...] = own.astype(tiling.dtype)
                    let_go_of_k()

                write(0, store, dk_ref)

            mosaic.in_turn(item, WORKERS, write_chunk)
            plgpu.barrier_arrive(r_free.at[state])

        @pl.when(mosaic.group() == WORKERS)
        def _memory() -> None:
            mosaic.set_registers(mosaic.MEMORY_REGISTERS, frame.WARPGROUPS)
            steps = deal.each(load_piece)
            mosaic.await_the_last(free, steps, STAGES)
            mosaic.await_the_last(v_free, steps, STAGES)
            mosaic.await_the_last(r_free, deal.own, STATES)

        @pl.when(mosaic.group() < WORKERS)
        def _gradients() -> None:
            mosaic.set_registers(WORKER_REGISTERS, frame.WARPGROUPS)
            deal.each(write_piece)
            plgpu.wait_smem_to_gmem(0)

    out_type = tuple(jax.ShapeDtypeStruct(x.shape, tiling.dtype) for x in (k, v))
    arrays = [x for x in (k, v, sums.r, sums.u, lengths, *sums[2:]) if x is not None]
    return frame.launch(body, "whole_key_gradient", deal, out_type, scratch, arrays)
