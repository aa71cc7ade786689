"""Linear attention by Pallas kernels lowered to Triton.

    S = sum_j phi(k_j) v_j^T            [F, V]
    z = sum_j phi(k_j)                  [F]
    out_i = S^T phi(q_i) / max(phi(q_i) . z, eps)      normalize, else scale * S^T phi(q_i)

where j runs over the keys that query i sees: all of them (`bidirectional.py`), or those up to its
own position (`causal.py`, with a gate per step and channel `channel.py`). The sequence is cut into
pieces so that the grid fills the GPU, the pieces' float32 sums are added by XLA (`scan.py` where
they decay), and nothing of size [T, S] is ever formed. Every sum has one order, so results are the
same bits from run to run.

Operands of products are the inputs' dtype, accumulators float32. In float16 whatever is a sum
over keys or a quotient is multiplied in TF32, which has float16's mantissa and float32's range.
float32 is multiplied exactly unless the spec's precision says "tf32".
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax.device import Device
from ato_jax.ops.linear_attention.features import FeatureMap
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, Outputs, Residuals
from ato_jax.ops.linear_attention.triton import bidirectional, causal, channel, tiles
from ato_jax.ops.linear_attention.triton.tiles import Config as Config

# One program holds a state [V, F] in float32 in its registers, beside all else.
LARGEST_STATE = 128 * 128

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
def _unsupported_map(feature_map: FeatureMap) -> str | None:
    if not feature_map.elementwise:
        return f"feature map {feature_map.name!r} is not elementwise"
    x = jax.ShapeDtypeStruct((tiles.COLUMNS, tiles.COLUMNS), jnp.float32)
    try:
        closed = jax.make_jaxpr(lambda x: jax.jvp(feature_map, (x,), (jnp.ones_like(x),)))(x)
    except Exception:  # the map is the user's: whatever it raises without its parameters
        return f"feature map {feature_map.name!r} closes over arrays"
    if others := _primitives(closed.jaxpr) - ELEMENTWISE:
        return f"feature map {feature_map.name!r} uses {', '.join(sorted(others))}"
    return None


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    if spec.decay == "channel":
        if not spec.causal:
            return "a gate per step and channel is not supported without causal=True"
    elif spec.decay is not None:
        return "decay is not supported yet"
    if spec.segments is not None:
        return "segments are not supported yet"
    if spec.q_lengths or spec.kv_lengths:
        return "lengths are not supported yet"
    if tiles.state_size(spec) > LARGEST_STATE:
        return f"states up to D * V = 128 * 128, got D={spec.D}, V={spec.V}"
    if min(spec.B, spec.T, spec.S) < 1:
        return f"empty arrays, got B={spec.B}, T={spec.T}, S={spec.S}"
    return _unsupported_map(spec.feature_map)


def default_config(spec: LinearAttentionSpec, device: Device) -> Config:
    """By the size of a state [V, F], whose float32 accumulators are what fills the registers.

    Up to 64 x 64, 4 warps hold them beside tiles of 64 rows, the height at which Hopper's tensor
    cores take over; a state is then 16 KiB, so that 8 pieces per multiprocessor cost little
    traffic. At 128 x 128 it is 64 KiB: 8 warps where a pass keeps sums, 2 pieces per
    multiprocessor, and tiles of 32 rows where a pass keeps two states or a chunk's weights as
    well. float32 factors, and float16's wide ones, take up to three times the room. Measured on
    an H200 in bfloat16; in the causal backward some spills were faster than smaller tiles.
    """
    small = tiles.state_size(spec) <= tiles.SMALL_STATE
    half = spec.dtype == "bfloat16"
    narrow = 32 if small or spec.dtype != "float32" else 16
    walk_block, walk_warps = (64, 4) if small and half else (narrow, 8)
    # Passes that keep no sums, or in the bidirectional case only one state.
    stream_block, stream_warps = (64, 4) if half else (narrow, 8)
    if spec.causal:
        stream_block, stream_warps = walk_block, walk_warps
    gradient_block = walk_block
    if spec.decay == "channel":
        # Decayed factors are held beside the plain ones, and two of each for a walk that goes on.
        gradient_block = min(walk_block, 32)
    return Config(
        piece_rows=4096,
        stream_rows=256,
        programs=(8 if small else 2) * device.multiprocessors,
        state_block=64 if half else 32,
        state_warps=4 if small else 8,
        state_stages=3 if small else 2,
        output_block=stream_block,
        output_warps=stream_warps,
        output_stages=2,
        dq_block=gradient_block,
        dq_warps=walk_warps,
        dq_stages=2,
        dkv_block=gradient_block if spec.causal else stream_block,
        dkv_warps=stream_warps,
        dkv_stages=2,
    )


def _algorithm(spec: LinearAttentionSpec) -> Any:
    """The module that has the kernels for the spec."""
    if spec.decay == "channel":
        return channel
    return causal if spec.causal else bidirectional


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    return _algorithm(spec).forward(spec, config, inputs)


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    return _algorithm(spec).backward(spec, config, residuals, cotangents)
