"""Shared memory and barriers of `channel_output.py`, as `scratch` of its launch."""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

from ato_jax.mosaic import ALIKE, F32, HALF
from ato_jax.ops.linear_attention.mosaic_gpu import channel, channel_blocks, frame
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, F
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

# Slots of q and k, of v, and of gates.
STAGES, V_STAGES, GATES_STAGES = 2, 2, 1


def storage(spec: LinearAttentionSpec, keeps_features: bool, in_float16: bool) -> dict[str, Any]:
    tiling, heads = frame.tiling(spec), frame.heads_of_tile(spec)
    adds_up = channel_blocks.adds_up(spec)
    scratch = dict(
        q_s=tiling.tiles(STAGES),
        k_s=tiling.tiles(STAGES),
        v_s=tiling.shared(V_STAGES, 2, C, HALF),
        gates_s=tiling.of_rows_in_float32(GATES_STAGES, 2, C, HALF),
        rounded_s=channel.shared(spec, 2, C, HALF),
        s_s=tiling.shared(2, HALF, spec.F),
        out_s=tiling.of_rows_in_float32(2, C, HALF) if adds_up else tiling.shared(2, C, HALF),
        z_s=plgpu.SMEM((2, HALF), F32),
        onto_s=plgpu.SMEM((STAGES, F), F32),
        den_s=plgpu.SMEM((V_STAGES, 2, C), F32),
        z_rows_s=tiling.shared(2, ALIKE, HALF),
        ones_s=tiling.shared(2, ALIKE, C),
        halves_s=channel.shared(spec, 2, ALIKE, C),
        since_middle_s=channel.shared(spec, C, C),
        loaded=plgpu.Barrier(num_arrivals=(2 + (in_float16)) * heads, num_barriers=STAGES),
        v_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=V_STAGES),
        gates_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=GATES_STAGES),
        mapped=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        den_known=plgpu.Barrier(num_arrivals=2, num_barriers=V_STAGES),
        free=plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
        v_free=plgpu.Barrier(num_arrivals=2, num_barriers=V_STAGES),
        gates_free=plgpu.Barrier(num_arrivals=2, num_barriers=GATES_STAGES),
        start_loaded=plgpu.Barrier(num_arrivals=4),
        weights_stored=plgpu.Barrier(num_arrivals=2),
    )
    if keeps_features:
        scratch["both_s"] = plgpu.SMEM((2, 2, HALF), F32)
    if in_float16:
        scratch["powers_s"] = plgpu.SMEM((STAGES, heads * C), F32)
    return scratch
