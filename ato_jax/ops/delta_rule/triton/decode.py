"""One token of the delta rule against each head's state: read once, written once, in place.

    S       <- Diag(exp(decay)) S                  [D, V]
    written  = beta (v - k S)                      [V]
    S'       = S + k written^T                     [D, V]
    out      = scale (q S + (q . k) written)       [V]

No column of S needs another one. A program holds all D rows of a block of columns of one state in
its registers, so that it reads the block once. The products k S and q S are sums over the rows of
that tile in float32; both read the decayed state before it changes, so that neither waits for the
other. They use no tensor cores, which would round float32 factors to TF32, and for which one row is
too few. A row of a tile of 64 columns is two lines of 128 bytes.

Each program computes the vectors q and k again: they are 1 / (2 V_block) of its bytes or less. A
program issues all loads first and stores last. Several programs share a multiprocessor, and while
some wait for their sums, the loads of others are in flight.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import device, launch
from ato_jax.device import Device
from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.delta_rule.spec import inverse_lengths
from ato_jax.ops.delta_rule.step_spec import StepInputs, StepSpec

# A tile [128, 64], [256, 32] or [512, 16] holds 64 values in each thread of 4 warps.
LARGEST_D = 512
LARGEST_TILE = 128 * 64
VALUES_PER_THREAD = 64
COLUMNS = 64
FEWEST_COLUMNS = 16
PROGRAMS_PER_MULTIPROCESSOR = 2
THREADS_OF_A_WARP = 32
WIDEST_WAVE = 64  # threads of a warp: 32 on NVIDIA GPUs, 64 on AMD's Instinct


@dataclasses.dataclass(frozen=True)
class Config:
    """The columns of a state that one program takes, and how Triton compiles it."""

    columns: int
    num_warps: int
    num_stages: int = 1


def unsupported(inputs: StepInputs, here: Device) -> str | None:
    return launch.no_triton or out_of_range(inputs, here)


def out_of_range(inputs: StepInputs, here: Device) -> str | None:
    """Why the kernel cannot take the call although JAX can lower it; None where it can."""
    if here.platform != "gpu" or here.capability is None or here.capability < (8, 0):
        return "needs an NVIDIA GPU of compute capability 8.0 or more"
    if inputs.state.shape[2] > LARGEST_D:
        return f"D up to {LARGEST_D}, got D={inputs.state.shape[2]}"
    if not inputs.state.size:
        return "empty arrays"
    return None


def default_config(heads: int, D: int, V: int, here: Device) -> Config:
    """For `heads` states [D, V] in all. Where they are few, more programs share each."""
    height = pl.next_power_of_2(D)
    columns = min(COLUMNS, pl.next_power_of_2(V), LARGEST_TILE // height)
    wanted = PROGRAMS_PER_MULTIPROCESSOR * here.multiprocessors
    while columns > FEWEST_COLUMNS and heads * pl.cdiv(V, columns) < wanted:
        columns //= 2
    warps = height * columns // (VALUES_PER_THREAD * THREADS_OF_A_WARP)
    return Config(columns, max(warps, 1))


def step(
    spec: StepSpec, here: Device, inputs: StepInputs, config: Config | None = None
) -> tuple[jax.Array, jax.Array]:
    q, k, v, beta, decay, state = inputs
    B, H, D, V = state.shape
    group = H // q.shape[1]
    config = default_config(B * H, D, V, here) if config is None else config
    block = config.columns
    blocks = pl.cdiv(V, block)
    height = pl.next_power_of_2(D)
    # Whether each value of S is held by one thread alone.
    apart = height * block >= WIDEST_WAVE * config.num_warps

    def kernel(
        q_ref: Any, k_ref: Any, v_ref: Any, beta_ref: Any, state_ref: Any, *refs: Any
    ) -> None:
        *decay_refs, out_ref, new_state_ref = refs
        d = jnp.arange(height, dtype=jnp.int32)
        column = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
        is_row = None if height == D else d < D
        is_column = None if blocks * block == V else column < V
        is_state = None
        if is_row is not None or is_column is not None:
            is_state = (d < D)[:, None] & (column < V)[None, :]

        def load(ref: Any, index: Any, mask: jax.Array | None) -> jax.Array:
            x = plgpu.load(ref.at[index], mask=mask, other=None if mask is None else 0)
            return x.astype(jnp.float32)

        S = load(state_ref, (d[:, None], column[None, :]), is_state)  # [D, V_block]
        k = load(k_ref, d, is_row)  # [D]
        q = load(q_ref, d, is_row)  # [D]
        v = load(v_ref, column, is_column)  # [V_block]
        beta = beta_ref[0]
        if decay is not None:
            whole = decay.shape[2] == D and D > 1
            log = load(decay_refs[0], d, is_row) if whole else decay_refs[0][0]  # [D] or one
            factor = jnp.exp(log)  # 0 for -inf
            S *= factor[:, None] if whole else factor
        if spec.normalize_qk:
            q, k = q * inverse_lengths(q), k * inverse_lengths(k)
        recalled = jnp.sum(k[:, None] * S, axis=0)  # [V_block]
        read = jnp.sum(q[:, None] * S, axis=0)  # [V_block]
        written = beta * (v - recalled)
        out = spec.scale * (read + jnp.sum(q * k) * written)
        if not apart and not device.interpreting():  # the interpreter has no threads
            # All threads have loaded the values that several hold, before one overwrites them.
            plgpu.debug_barrier()
        S += k[:, None] * written[None, :]
        plgpu.store(new_state_ref.at[d[:, None], column[None, :]], S, mask=is_state)
        plgpu.store(out_ref.at[column], out.astype(out_ref.dtype), mask=is_column)

    def per_head(*sizes: int) -> pl.BlockSpec:
        zeros = (0,) * len(sizes)
        return pl.BlockSpec((None, None, *sizes), lambda p, h, b: (b, h, *zeros))

    # [D] of the head of G that head h reads.
    per_key = pl.BlockSpec((None, None, D), lambda p, h, b: (b, h // group, 0))
    arrays = [q, k, v, beta[..., None], state]
    in_specs = [per_key, per_key, per_head(V), per_head(1), per_head(D, V)]
    if decay is not None:
        arrays.append(decay)
        in_specs.append(per_head(decay.shape[2]))
    out, new_state = pallas_call(
        kernel,
        grid=(blocks, H, B),
        in_specs=in_specs,
        out_specs=[per_head(V), per_head(D, V)],
        out_shape=[
            jax.ShapeDtypeStruct((B, H, V), v.dtype),
            jax.ShapeDtypeStruct((B, H, D, V), jnp.float32),
        ],
        input_output_aliases={4: 1} if spec.in_place else {},
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        name="gated_delta_rule_step",
    )(*arrays)
    return out, new_state
