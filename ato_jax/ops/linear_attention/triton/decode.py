"""One token against the state of each key/value head: read once, written once, in place.

    kv'    = exp(decay) kv + phi(k) v^T            [F, V]
    k_sum' = exp(decay) k_sum + phi(k)             [F]
    out_r  = kv'^T phi(q_r) / max(phi(q_r) . k_sum', eps)     normalize, else scale * kv'^T phi(q_r)

for every query head r of the group that shares the state. A program holds all F rows of a block
of columns of one state in its registers, so that only the sums over F pass between its threads.
With 32 consecutive float32 values a row is at least one line of 128 bytes, and a thread loads 4
values of it. Each program computes the vectors phi(k), phi(q_r) and k_sum' again, and issues all
its loads before it writes: a program that waits for loads at its end occupies the multiprocessor
while no other program can load.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import device, launch
from ato_jax.device import Device
from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention import features
from ato_jax.ops.linear_attention.spec import LinearState, StepInputs, StepSpec
from ato_jax.ops.linear_attention.triton.support import unsupported_map

LARGEST_FEATURES = 256
# One program takes a state of 128 x 128, 64 values a thread with 8 warps. Two programs run at a
# time on a multiprocessor, whose loads in flight are 128 KiB, several times latency * bandwidth.
LARGEST_TILE = 128 * 128
FEWEST_COLUMNS = 16
PROGRAMS_PER_MULTIPROCESSOR = 2
WIDEST_WAVE = 64  # threads of a warp: 32 on NVIDIA GPUs, 64 on AMD's Instinct


def unsupported(inputs: StepInputs, here: Device) -> str | None:
    return launch.no_triton or out_of_range(inputs, here)


def out_of_range(inputs: StepInputs, here: Device) -> str | None:
    """Why the kernel cannot take the call although JAX can lower it; None where it can."""
    if here.platform != "gpu" or here.capability is None or here.capability < (8, 0):
        return "needs an NVIDIA GPU of compute capability 8.0 or more"
    if inputs.state.kv.shape[2] > LARGEST_FEATURES:
        return f"up to {LARGEST_FEATURES} features, got F={inputs.state.kv.shape[2]}"
    if not inputs.state.kv.size:
        return "empty arrays"
    return None


def _columns(heads: int, size: int, V: int, multiprocessors: int) -> int:
    """How many columns of a state [size, V] a program takes: fewer where there are few states."""
    block = min(pl.next_power_of_2(V), LARGEST_TILE // pl.next_power_of_2(size))
    wanted = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
    while block > FEWEST_COLUMNS and heads * pl.cdiv(V, block) < wanted:
        block //= 2
    return block


def step(spec: StepSpec, here: Device, inputs: StepInputs) -> tuple[jax.Array, LinearState]:
    q, k, v, state, decay, parameters = inputs
    B, H, _ = q.shape
    _, G, size, V = state.kv.shape
    group = H // G
    phi = spec.feature_map
    if unsupported_map(phi) is not None:
        # A map that cannot be traced into the kernel runs before it, on [B, H + G, D] alone.
        q, k = (phi(x.astype(jnp.float32), *parameters) for x in (q, k))
        phi = features.NAMED["identity"]
    block = _columns(B * G, size, V, here.multiprocessors)
    blocks = pl.cdiv(V, block)
    height = pl.next_power_of_2(size)
    warps = 8 if height * block > LARGEST_TILE // 2 else 4
    # Whether each value of kv is held by one thread alone, as those of k_sum are not.
    apart = height * block >= WIDEST_WAVE * warps

    def barrier() -> None:
        """All threads have loaded the values that several hold, before one overwrites them."""
        if not device.interpreting():  # the interpreter has no threads
            plgpu.debug_barrier()

    def kernel(
        q_ref: Any, k_ref: Any, v_ref: Any, kv_ref: Any, k_sum_ref: Any, *refs: Any
    ) -> None:
        *decay_refs, out_ref, new_kv_ref, new_k_sum_ref = refs
        f = jnp.arange(height, dtype=jnp.int32)
        column = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
        is_feature = None if height == size else f < size
        is_column = None if blocks * block == V else column < V

        def load(ref: Any, index: Any, mask: jax.Array | None) -> jax.Array:
            return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else 0)

        def mapped(ref: Any, *head: Any) -> jax.Array:
            x = phi(load(ref, (*head, f), is_feature).astype(jnp.float32))
            return x if is_feature is None else jnp.where(is_feature, x, 0)

        is_state = None
        if is_feature is not None or is_column is not None:
            is_state = (f < size)[:, None] & (column < V)[None, :]
        kv = load(kv_ref, (f[:, None], column[None, :]), is_state)  # [F, V_block]
        k_sum = load(k_sum_ref, f, is_feature)  # [F]
        v = load(v_ref, column, is_column).astype(jnp.float32)  # [V_block]
        phi_k = mapped(k_ref)  # [F]
        first_phi_q = mapped(q_ref, 0)  # [F]
        if decay is not None:
            if decay.shape[2] == size:
                factor = jnp.exp(load(decay_refs[0], f, is_feature))  # [F]
            else:
                factor = jnp.full((height,), jnp.exp(decay_refs[0][0]))
            kv *= factor[:, None]
            k_sum *= factor
        kv += phi_k[:, None] * v[None, :]
        k_sum += phi_k
        if not apart:
            barrier()
        plgpu.store(new_kv_ref.at[f[:, None], column[None, :]], kv, mask=is_state)

        def read(r: Any, phi_q: jax.Array) -> None:
            out = jnp.sum(phi_q[:, None] * kv, axis=0)  # [V_block]
            if spec.normalize:
                out /= jnp.maximum(jnp.sum(phi_q * k_sum), spec.eps)
            else:
                out *= spec.scale
            plgpu.store(out_ref.at[r, column], out.astype(out_ref.dtype), mask=is_column)

        read(0, first_phi_q)
        jax.lax.fori_loop(1, group, lambda r, _: read(r, mapped(q_ref, r)), None)
        barrier()

        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            plgpu.store(new_k_sum_ref.at[f], k_sum, mask=is_feature)

    def per_head(*sizes: int) -> pl.BlockSpec:
        zeros = (0,) * len(sizes)
        return pl.BlockSpec((None, None, *sizes), lambda p, g, b: (b, g, *zeros))

    arrays = [q.reshape(B, G, group, -1), k, v, *state]
    in_specs = [per_head(group, q.shape[2]), per_head(k.shape[2]), per_head(V)]
    in_specs += [per_head(size, V), per_head(size)]
    if decay is not None:
        shared = decay.shape[0] == 1
        arrays.append(decay)
        in_specs.append(
            pl.BlockSpec(
                (None, None, decay.shape[2]), lambda p, g, b: (0 if shared else b, g, 0)
            )
        )
    # k_sum in place only where a single program reads it: others could read it overwritten.
    aliases = {3: 1, 4: 2} if blocks == 1 else {3: 1}
    out, *new_state = pallas_call(
        kernel,
        grid=(blocks, G, B),
        in_specs=in_specs,
        out_specs=[per_head(group, V), per_head(size, V), per_head(size)],
        out_shape=[
            jax.ShapeDtypeStruct((B, G, group, V), v.dtype),
            *(jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in state),
        ],
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        name="linear_attention_step",
    )(*arrays)
    return out.reshape(B, H, V), LinearState(*new_state)
