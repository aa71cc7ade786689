"""Linear attention by Pallas kernels lowered to Triton.

    S = sum_j phi(k_j) v_j^T            [F, V]
    z = sum_j phi(k_j)                  [F]
    out_i = S^T phi(q_i) / max(phi(q_i) . z, eps)      normalize, else scale * S^T phi(q_i)

where j runs over the keys that query i sees: all of them (`bidirectional.py`), or those up to its
own position, or those of its segment, or with a decay between them (`causal.py`; with a gate per
step and channel `channel.py`, or `prepared.py`). The sequence is cut into pieces so that the grid
fills the GPU, the pieces' float32 sums are added by XLA or a kernel of its own (`scan.py`), and
nothing of size [T, S] is ever formed. Every sum has one order, so results are the same bits from
run to run. What a step's row is, and what of a state a gate leaves, XLA works out beforehand, in
small arrays (`walk.py`).

Operands of products are the inputs' dtype, accumulators float32. In float16 whatever is a sum
over keys or a quotient is multiplied in TF32, which has float16's mantissa and float32's range.
float32 is multiplied exactly unless the spec's precision says "tf32".
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax import meshes
from ato_jax.backend import Backend
from ato_jax.device import Device
from ato_jax.ops.linear_attention.features import FeatureMap
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, Outputs, Residuals
from ato_jax.ops.linear_attention.triton import (
    bidirectional,
    causal,
    channel,
    prepared,
    projected,
    split,
    tiles,
    walk,
)
from ato_jax.ops.linear_attention.triton.tiles import Config as Config

# What one block may use on a Hopper card, in bytes.
HOPPER_SHARED_MEMORY = 227 * 1024
# Beyond these sizes, V would be cut into so many blocks that q and k, read for each of them, were
# most of the traffic.
LARGEST_F = 256
LARGEST_V = 512
# Of the columns that are written at once, where no state is held.
LARGEST_STORED = 256
# With a gate per step and channel V is not cut, and its tiles have to fit the shared memory.
LARGEST_GATED_V = 256

# Where a multiprocessor has fewer rows than this, one program walks them all: on an H200 causal
# T 4096 (B8 H8 D64) took 0.111 ms with pieces of 128 rows and 0.075 with 2048, forward + backward
# 0.331 and 0.233.
ENOUGH_PIECE_ROWS = 2048

# What Pallas lowers to Triton elementwise, and feature maps and their derivatives consist of.
ELEMENTWISE = frozenset(
    "abs add add_any and ceil convert_element_type cos custom_jvp_call div eq exp exp2 "
    "expm1 floor ge gt integer_pow is_finite jit le log log1p logistic lt max min mul ne neg not "
    "one_minus_square or pow rsqrt select_n sign sin sqrt square stop_gradient sub tan tanh "
    "broadcast_in_dim".split()
)


def _primitives(jaxpr: Any) -> set[str]:
    """The names of what a jaxpr calls, at any depth."""
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "jaxpr")
        ):
            if hasattr(parameter, "jaxpr"):
                found |= _primitives(parameter.jaxpr)
    return found


@functools.lru_cache(maxsize=1024)
def unsupported_map(feature_map: FeatureMap) -> str | None:
    """Why a kernel cannot compute the map, of which it is given x alone."""
    if not feature_map.elementwise:
        return f"feature map {feature_map.name!r} is not elementwise"
    if feature_map.parameters:
        return f"feature map {feature_map.name!r} closes over arrays"
    x = jax.ShapeDtypeStruct((tiles.COLUMNS, tiles.COLUMNS), jnp.float32)
    try:
        with meshes.nowhere():
            closed = jax.make_jaxpr(lambda x: jax.jvp(feature_map, (x,), (jnp.ones_like(x),)))(x)
    except Exception as error:  # the map is the user's, and so may be the rule of its derivative
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"feature map {feature_map.name!r} has no derivative: {reason}"
    if others := _primitives(closed.jaxpr) - ELEMENTWISE:
        return f"feature map {feature_map.name!r} uses {', '.join(sorted(others))}"
    return None


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    spec = projected.inner_spec(spec, phase)
    if spec.decay == "channel":
        if not spec.causal:
            return "a gate per step and channel is not supported without causal=True"
        if spec.segments or spec.q_lengths or spec.kv_lengths:
            return "a gate per step and channel is not supported with segments or lengths"
        if split.blocks(spec) > 1 or spec.V > LARGEST_GATED_V:
            return (
                "a gate per step and channel is supported up to D * V = 128 * 128 and "
                f"V = {LARGEST_GATED_V}, got D={spec.D}, V={spec.V}"
            )
    if spec.F > LARGEST_F or spec.V > LARGEST_V:
        return f"states up to D = {LARGEST_F}, V = {LARGEST_V}, got D={spec.D}, V={spec.V}"
    if min(spec.B, spec.T, spec.S) < 1:
        return f"empty arrays, got B={spec.B}, T={spec.T}, S={spec.S}"
    return unsupported_map(spec.feature_map)


def default_config(spec: LinearAttentionSpec, device: Device) -> Config:
    """Each phase's fields by that phase's kernels: for projected features their dtypes differ."""
    forward, backward = (
        _phase_config(projected.inner_spec(spec, phase), device, phase)
        for phase in ("forward", "backward")
    )
    of_backward = {
        name: value
        for name, value in dataclasses.asdict(backward).items()
        if name.startswith(("dq", "dkv", "backward"))
    }
    return dataclasses.replace(forward, **of_backward)


def _blocks(spec: LinearAttentionSpec, config: Config, phase: str) -> int:
    stored = not _one_state(spec) and walk.stores(spec, config, phase)
    return split.blocks(spec, config.stored_columns if stored else 0)


def _phase_config(spec: LinearAttentionSpec, device: Device, phase: str) -> Config:
    config = _default_config(spec, device)
    count = _blocks(spec, config, phase)
    return config if count == 1 else _default_config(split.block_spec(spec, count), device)


def _in_float16(spec: LinearAttentionSpec, config: Config, roomy: bool) -> Config:
    """Where TF32 factors leave room for tiles of 64 rows, nothing else was as fast.

    Ampere's tensor cores read all factors from registers, and tall tiles beside a large state
    spill nearly all that they hold; a loop over them that loads ahead leaves the shared memory.
    """
    small = tiles.state_size(spec) <= tiles.SMALL_STATE
    if tiles.padded(spec.F) > 128 or spec.decay == "channel":
        return config
    replace = functools.partial(dataclasses.replace, config)
    tight = not small and not roomy
    tall = {"state_block": 64, "output_block": 64, "output_warps": 4}
    warps = 4 if small else 8
    if _one_state(spec):
        dq = {"dq_block": 64 if small else 32, "dq_warps": warps}
        whole = replace(**tall, **dq, output_stages=3, dkv_block=64, dkv_warps=warps)
        return config if tight else whole
    if not spec.causal or spec.decay is not None:
        if tight:
            return replace(dkv_stages=1)
        return replace(**tall) if small and spec.causal else config
    if tight:
        tall |= {"output_block": 32, "output_warps": 8}
    rows = 64 if small else 128
    # The backward's blocks, and what they take of the other side.
    block = 64 if small else 32
    return replace(
        **tall,
        run_rows=rows,
        backward_run_rows=rows,
        pair_block=block,
        output_stages=3 if small else 1,
        dq_block=64,
        dq_warps=warps,
        dq_stages=1,
        dkv_block=block,
        dkv_warps=warps,
        dkv_stages=1,
    )


def _default_config(spec: LinearAttentionSpec, device: Device) -> Config:
    """By the size of a state [V, F], whose float32 accumulators are what fills the registers.

    Up to 64 x 64, 4 warps hold them beside tiles of 64 rows, the height at which Hopper's tensor
    cores take over, and several programs run on a multiprocessor at once. At 128 x 128, a pass
    with sums of its own takes 8 warps and most of a multiprocessor. float32 factors, and
    float16's wide ones, take up to three times the room: so tiles of 32 or 16 rows. Measured on
    an H200 in bfloat16 (docs/notes/linear_attention.md).
    """
    mapped = prepared.applies(spec)
    if mapped:
        # Most of its kernels are those of the call without gates.
        spec = prepared.inner_spec(spec)
    small = tiles.state_size(spec) <= tiles.SMALL_STATE
    half = spec.dtype == "bfloat16"
    roomy = device.shared_memory >= HOPPER_SHARED_MEMORY
    places = device.multiprocessors
    narrow = 32 if small or spec.dtype != "float32" else 16
    long_rows = tiles.padded(spec.F) > 128
    if long_rows and (spec.causal or not half):
        # Rows of 256 features: tiles of 32 spill twice what those at F = 128 do.
        narrow = 16
    walk_block, walk_warps = (64, 4) if small and half else (narrow, 8)
    # Passes that keep no sums, or in the bidirectional case only one state.
    stream_block, stream_warps = (64, 4) if half else (narrow, 8)
    # A large state is stored for every run of rows, and small programs read it (`stored.py`).
    scalar = spec.decay is None or spec.decay != "channel" and roomy
    stored = spec.causal and scalar and half and not small
    in_parts = tiles.in_parts(spec) and half and roomy
    if in_parts:
        # Two accumulators [64, 256] of float32 take 128 registers of each thread of 8 warps.
        walk_block, walk_warps = stream_block, stream_warps = 64, 8
    elif stored:
        walk_block, walk_warps = (32, 8) if long_rows else (64, 4)
    elif not _one_state(spec):
        if not spec.causal and half:
            # Both ways a state is stored for every chunk, and none is kept: larger chunks.
            walk_block = 64
        stream_block, stream_warps = walk_block, walk_warps
    delayed = half and roomy and not small and not spec.causal and not long_rows
    fast = half and not spec.causal and not long_rows
    # Both ways, two states lie beside the tiles.
    whole = fast and _one_state(spec)
    gated = spec.decay == "channel"
    walks = 8 if small else 2
    if small and not gated:
        # Of short pieces the states are as large as the rows.
        rows = spec.B * spec.G * max(spec.T, spec.S)
        walks = max(1, min(walks, rows // (places * ENOUGH_PIECE_ROWS)))
    if gated:
        # Decayed factors are held beside the plain ones, and two of each for a walk that goes on.
        walk_block = min(walk_block, 32)
    ahead = half and roomy and not long_rows and not gated
    runs = stored and not long_rows or in_parts
    # Features that are mapped already go from memory straight to the products.
    reads = 3 if mapped else 1
    config = Config(
        piece_rows=4096,
        programs=walks * places,
        run_rows=128 if stored else 0,
        backward_run_rows=128 if stored else 0,
        pair_block=64 if in_parts else 32,
        # Elsewhere accumulators of so many columns spill most of what they hold.
        stored_columns=LARGEST_STORED if roomy else 0,
        state_block=(128 if fast and roomy and not small else 64) if half else 32,
        state_warps=4 if small or runs else 8,
        state_stages=(4 if small else 3) if roomy and fast else 3 if small or runs else 2,
        state_programs=(2 if small else 1) * places,
        output_block=stream_block,
        output_warps=stream_warps,
        output_stages=reads if stored else (4 if small else 3) if fast else 3 if ahead else 2,
        output_programs=2 * places,
        output_rows=256 if small else 0,
        dq_block=64 if delayed else walk_block,
        dq_warps=walk_warps,
        dq_stages=3 if ahead and (whole or spec.causal != small) else 2,
        dq_programs=(2 if small else 1) * places,
        dq_delayed=delayed,
        dkv_block=walk_block if gated or stored else stream_block,
        dkv_warps=walk_warps if stored else stream_warps,
        dkv_stages=1 if stored else 4 if whole and roomy and not small else 3 if ahead else 2,
        dkv_programs=places,
        dkv_rows=128 if small else 0,
    )
    if gated and half and not small:
        config = dataclasses.replace(config, output_block=16, output_warps=4, output_stages=3)
    if in_parts and spec.causal:
        # Products of no more columns than 4 warps hold go one after the other.
        config = dataclasses.replace(config, output_warps=4, output_stages=2, pair_block=32)
    config = _in_float16(spec, config, roomy) if spec.dtype == "float16" else config
    if spec.causal and spec.decay in ("head", "step") and not config.backward_run_rows:
        config = _stored_for_decay(spec, config)
    return config


def _stored_for_decay(spec: LinearAttentionSpec, config: Config) -> Config:
    """The backward's blocks where the forward carries its states and the backward stores them,
    as the gradient of a decay needs (`walk.py`)."""
    small = tiles.state_size(spec) <= tiles.SMALL_STATE
    block = config.dq_block
    return dataclasses.replace(
        config,
        backward_run_rows=64 if small and spec.dtype != "bfloat16" else 128,
        pair_block=min(32, block),
        dkv_block=block,
        dkv_warps=config.dq_warps,
        dkv_stages=1,
    )


def _one_state(spec: LinearAttentionSpec) -> bool:
    """Where all queries see all keys, and nothing weighs the pairs, one state serves them all."""
    return not spec.causal and spec.decay is None and spec.segments is None


def _kernels(spec: LinearAttentionSpec) -> Any:
    """The module that has the kernels for the spec."""
    if spec.decay == "channel":
        return prepared if prepared.applies(spec) else channel
    return bidirectional if _one_state(spec) else causal


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    def attend(spec: LinearAttentionSpec, inputs: Inputs) -> Outputs:
        count = _blocks(spec, config, "forward")
        if count > 1:
            return split.forward(attend, spec, count, inputs)
        return _kernels(spec).forward(spec, config, inputs)

    if not spec.feature_map.elementwise:
        return projected.forward(attend, spec, inputs)
    return attend(spec, inputs)


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    def attend(spec: LinearAttentionSpec, residuals: Residuals, cotangents: Outputs) -> Inputs:
        count = _blocks(spec, config, "backward")
        if count > 1:
            return split.backward(attend, spec, count, residuals, cotangents)
        return _kernels(spec).backward(spec, config, residuals, cotangents)

    if not spec.feature_map.elementwise:
        return projected.backward(attend, spec, residuals, cotangents)
    return attend(spec, residuals, cotangents)


class _Triton(Backend[LinearAttentionSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)


BACKEND = _Triton()
