"""The output of queries that see every key, of S [F, V] (bfloat16) and z [F] of all keys:

    out_i = phi(q_i) S / max(phi(q_i) . z, eps)        or without the denominator

    memory    loads S and z of a head, and chunks of q, as slots come free, across pieces
    output    three, each all of a chunk: phi(q) in registers, the left factor of both products

z lies in 8 columns, 4 of it rounded, 4 of what that left off.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.mosaic_gpu import frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import (
    ALIKE,
    BF16,
    C,
    F,
    Item,
    V,
    load,
    multiply,
    part,
    shared,
    slot_of,
)
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# The warpgroups before the one that loads. Slots of q are a multiple of them.
WORKERS = 3
STAGES, STATES = 6, 2
WORKER_REGISTERS = 160


def whole_output(
    spec: LinearAttentionSpec, deal: frame.Deal, q: jax.Array, s: jax.Array, z_rows: jax.Array
) -> jax.Array:
    """out, of s [B, G, F, V] and z_rows [B, G, 8, F], bfloat16."""
    group_size = spec.H // spec.G
    scratch = dict(
        q_s=shared(STAGES, C, F),
        s_s=shared(STATES, F, V),
        z_rows_s=shared(STATES, ALIKE, F),
        out_s=shared(WORKERS, C, V),
        loaded=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        s_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=STATES),
        s_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=STATES),
    )

    def body(
        q_ref: Any,
        s_ref: Any,
        z_rows_ref: Any,
        out_ref: Any,
        *,
        q_s: Any,
        s_s: Any,
        z_rows_s: Any,
        out_s: Any,
        loaded: Any,
        free: Any,
        s_loaded: Any,
        s_free: Any,
    ) -> None:
        def load_piece(item: Item) -> None:
            of_head = item.batch, lax.div(item.head, group_size)
            state = slot_of(item.number, STATES)
            frame.wait_until_free(s_free, item.number, STATES)
            for ref, own in ((s_ref, s_s), (z_rows_ref, z_rows_s)):
                plgpu.copy_gmem_to_smem(ref.at[of_head], own.at[state], s_loaded.at[state])

            def load_chunk(chunk: Any, _: None) -> None:
                step = item.before + chunk
                slot = slot_of(step, STAGES)
                frame.wait_until_free(free, step, STAGES)
                source = part(spec, q_ref, item, item.rows(chunk), item.head)
                plgpu.copy_gmem_to_smem(source, q_s.at[slot], loaded.at[slot])

            lax.fori_loop(0, item.chunks, load_chunk, None)

        def write_piece(item: Item) -> None:
            state = slot_of(item.number, STATES)
            own_out = out_s.at[frame.group()]
            plgpu.barrier_wait(s_loaded.at[state])

            def write_chunk(chunk: Any) -> None:
                slot = slot_of(item.before + chunk, STAGES)
                plgpu.barrier_wait(loaded.at[slot])
                x = load(q_s.at[slot])
                plgpu.commit_smem()  # what was read, ahead of the load that overwrites it
                plgpu.barrier_arrive(free.at[slot])
                phi_q = frame.features_of(x)
                product = frame.zeros(C, V), [(phi_q, s_s.at[state])]
                if spec.normalize:
                    out, den = multiply(
                        product, (frame.zeros(C, ALIKE), [(phi_q, z_rows_s.at[state].T)])
                    )
                    den = frame.of_parts(den)
                    out = out * frame.in_columns(1.0 / jnp.maximum(den, spec.eps), V)
                else:
                    (out,) = multiply(product)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                own_out[...] = out.astype(BF16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    own_out, part(spec, out_ref, item, item.rows(chunk), item.head)
                )

            frame.in_turn(item, WORKERS, write_chunk)
            plgpu.barrier_arrive(s_free.at[state])

        @pl.when(frame.group() == WORKERS)
        def _memory() -> None:
            frame.set_registers(frame.MEMORY_REGISTERS)
            steps = deal.each(load_piece)
            frame.await_the_last(free, steps, STAGES)
            frame.await_the_last(s_free, deal.own, STATES)

        @pl.when(frame.group() < WORKERS)
        def _output() -> None:
            frame.set_registers(WORKER_REGISTERS)
            deal.each(write_piece)
            plgpu.wait_smem_to_gmem(0)

    out_type = jax.ShapeDtypeStruct(frame.sequence_shape(spec, spec.H), BF16)
    return frame.launch(body, "whole_output", deal, out_type, scratch, (q, s, z_rows))
