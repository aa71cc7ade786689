"""The last pass of the gradients with a decay per step and channel.

With the flows of the queries R = phi(q) d_phi_q and of the keys A = phi(k) d_phi_k, and E the
product of the state at the start of a run and its cotangent there,

    dk_t = A_t phi'(k_t) / phi(k_t)          d_decay_t = E + sum_{s < t} (A_s - R_s)

with sums over the steps of the run. Beside segments they are over the steps of t's segment, and E
counts for the segment that the run begins with alone. It computes row by row except for that sum,
and memory bounds it: one kernel that Pallas lowers to Triton, or XLA where JAX cannot lower to
Triton.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import launch
from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention.scans.chunks import RUN
from ato_jax.ops.linear_attention.scans.flow_features import slope_by_feature
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.triton.arithmetic import EXACT

# The rows and columns of a tile; a run has a program for each tile of columns.
ROWS, COLUMNS, WARPS = 32, 64, 4


def of_flows(
    spec: LinearAttentionSpec,
    k: jax.Array,
    of_queries: jax.Array,
    of_keys: jax.Array,
    crossing: jax.Array,
    runs: jax.Array | None = None,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """dk, in `dtype` or that of k, and the decays' gradient, from both flows, arrays like k in
    float32, and E [B, H, runs, D], whose D may be a tile's, which is larger than k's. `runs`: the
    number of each row's segment, [B, T] int32, which never falls."""
    dtype = k.dtype if dtype is None else dtype
    # Pallas need not lower a map that is traced to Triton.
    if launch.no_triton is not None or spec.feature_map.name == "custom":
        dk, d_gates = _of_flows_by_xla(spec, k, of_queries, of_keys, crossing, runs)
        return dk.astype(dtype), d_gates
    width = k.shape[-1]
    slices = pl.cdiv(width, COLUMNS)

    def kernel(
        k_ref: Any,
        of_queries_ref: Any,
        of_keys_ref: Any,
        crossing_ref: Any,
        *refs: Any,
    ) -> None:
        *runs_refs, dk_ref, d_gates_ref = refs
        run, part = pl.program_id(1) // slices, pl.program_id(1) % slices
        columns = part * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)

        def of_rows(i: Any, crossing: jax.Array) -> jax.Array:
            rows = run * RUN + i * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
            at = rows[:, None], columns[None, :]
            exist = None if spec.T % RUN == 0 else (rows < spec.T)[:, None]
            if width % COLUMNS:
                within = (columns < width)[None, :]
                exist = within if exist is None else exist & within

            def load(ref: Any) -> jax.Array:
                # [ROWS, COLUMNS]
                return plgpu.load(ref.at[at], mask=exist, other=None if exist is None else 0)

            def store(ref: Any, tile: jax.Array) -> None:
                plgpu.store(ref.at[at], tile.astype(ref.dtype), mask=exist)

            k, of_keys, of_queries = map(load, (k_ref, of_keys_ref, of_queries_ref))
            store(dk_ref, _of_keys(spec, k, of_keys))
            passing = of_keys - of_queries
            if not runs_refs:
                earlier = jax.lax.cumsum(passing, axis=0) - passing
                store(d_gates_ref, crossing[None, :] + earlier)
                return crossing + jnp.sum(passing, axis=0)

            def segments(rows: Any) -> jax.Array:
                return plgpu.load(runs_refs[0].at[jnp.clip(rows, 0, spec.T - 1)])

            first = run * RUN + i * ROWS
            own, ahead, last = segments(rows), segments(first - 1), segments(first + (ROWS - 1))
            is_earlier = (own[:, None] == own[None, :]) & (rows[:, None] > rows[None, :])
            # A product with 0 and 1, so that no sum has a term of another segment.
            earlier = plgpu.dot(is_earlier.astype(jnp.float32), passing, precision=EXACT)
            store(d_gates_ref, jnp.where((own == ahead)[:, None], crossing[None, :], 0.0) + earlier)
            passing = jnp.where((own == last)[:, None], passing, 0.0)
            return jnp.where(last == ahead, crossing, 0.0) + jnp.sum(passing, axis=0)

        # [COLUMNS]
        jax.lax.fori_loop(0, RUN // ROWS, of_rows, plgpu.load(crossing_ref.at[columns]))

    if spec.layout == "bthd":
        rows = pl.BlockSpec((None, spec.T, None, width), lambda h, p, b: (b, 0, h, 0))
    else:
        rows = pl.BlockSpec((None, None, spec.T, width), lambda h, p, b: (b, h, 0, 0))
    of_run = pl.BlockSpec((None, None, None, spec.D), lambda h, p, b: (b, h, p // slices, 0))
    of_batch = pl.BlockSpec((None, spec.T), lambda h, p, b: (b, 0))
    found = pallas_call(
        kernel,
        # Heads first: those of one row lie side by side in memory.
        grid=(spec.H, pl.cdiv(spec.T, RUN) * slices, spec.B),
        in_specs=[rows, rows, rows, of_run, *[of_batch] * (runs is not None)],
        out_specs=[rows, rows],
        out_shape=[
            jax.ShapeDtypeStruct(k.shape, dtype),
            jax.ShapeDtypeStruct(k.shape, jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        name="linear_attention_channel_flows",
    )(k, of_queries, of_keys, crossing, *([] if runs is None else [runs]))
    return tuple(found)


def _of_keys(spec: LinearAttentionSpec, k: jax.Array, flow: jax.Array) -> jax.Array:
    """dk, from the flow phi(k) d_phi."""
    k = k.astype(jnp.float32)
    if spec.feature_map.name == "elu1":
        # phi(k) = (max(k, 0) + 1) phi'(k)
        return flow / (jnp.maximum(k, 0.0) + 1.0)
    if spec.feature_map.name == "exp":
        return flow
    phi, slope = jax.jvp(spec.feature_map, (k,), (jnp.ones_like(k),))
    return flow * slope_by_feature(spec.feature_map, phi, slope)


def _of_flows_by_xla(
    spec: LinearAttentionSpec,
    k: jax.Array,
    of_queries: jax.Array,
    of_keys: jax.Array,
    crossing: jax.Array,
    segments: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    width = k.shape[-1]
    crossing = crossing[..., :width]
    dk = _of_keys(spec, k, of_keys)
    passing = of_keys - of_queries
    passing = passing if spec.layout == "bhtd" else jnp.swapaxes(passing, 1, 2)
    runs = crossing.shape[2]
    missing = runs * RUN - spec.T
    passing = jnp.pad(passing, ((0, 0), (0, 0), (0, missing), (0, 0)))
    passing = passing.reshape(spec.B, spec.H, runs, RUN, width)
    if segments is None:
        d_gates = crossing[:, :, :, None] + (jnp.cumsum(passing, axis=3) - passing)
    else:
        own = jnp.pad(segments, ((0, 0), (0, missing)), mode="edge")
        ahead = jnp.pad(own, ((0, 0), (1, 0)), mode="edge")[:, : runs * RUN : RUN]
        own = own.reshape(spec.B, runs, RUN)
        row = jnp.arange(RUN, dtype=jnp.int32)
        is_earlier = (own[..., :, None] == own[..., None, :]) & (row[:, None] > row)
        terms = is_earlier.astype(jnp.float32), passing
        d_gates = jnp.einsum("brts,bhrsd->bhrtd", *terms, precision=jax.lax.Precision.HIGHEST)
        is_crossed = (own == ahead[..., None])[:, None, :, :, None]
        d_gates += jnp.where(is_crossed, crossing[:, :, :, None], 0.0)
    d_gates = d_gates.reshape(spec.B, spec.H, -1, width)[:, :, : spec.T]
    d_gates = d_gates if spec.layout == "bhtd" else jnp.swapaxes(d_gates, 1, 2)
    return dk, d_gates
