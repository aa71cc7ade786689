"""Linear attention by Pallas kernels lowered to Triton.

    S = sum_j phi(k_j) v_j^T            [F, V]
    z = sum_j phi(k_j)                  [F]
    out_i = S^T phi(q_i) / max(phi(q_i) . z, eps)      normalize, else scale * S^T phi(q_i)

where j runs over the keys that query i sees: all of them (`bidirectional.py`), or those up to its
own position (`causal.py`). The sequence is cut into pieces so that the grid fills the GPU, the
pieces' float32 sums are added by XLA, and nothing of size [T, S] is ever formed. Every sum has
one order, so results are the same bits from run to run.

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
from ato_jax.ops.linear_attention.triton import bidirectional, causal, tiles
from ato_jax.ops.linear_attention.triton.tiles import Config as Config

# A state [V, F] is held in one program's registers.
LARGEST_WIDTH = 256

# What Pallas lowers to Triton elementwise, and feature maps and their derivatives consist of.
ELEMENTWISE = frozenset(
    "abs add add_any and ceil convert_element_type copy cos custom_jvp_call div eq erf exp exp2 "
    "expm1 floor ge gt integer_pow is_finite jit le log log1p logistic lt max min mul ne neg not "
    "or pjit pow rsqrt select_n sign sin sqrt square stop_gradient sub tan tanh "
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
    x = jax.ShapeDtypeStruct((tiles.COLUMN, tiles.COLUMN), jnp.float32)
    try:
        closed = jax.make_jaxpr(lambda x: jax.jvp(feature_map, (x,), (jnp.ones_like(x),)))(x)
    except Exception:  # the map is the user's: whatever it raises without its parameters
        return f"feature map {feature_map.name!r} closes over arrays"
    if others := _primitives(closed.jaxpr) - ELEMENTWISE:
        return f"feature map {feature_map.name!r} uses {', '.join(sorted(others))}"
    return None


def unsupported(spec: LinearAttentionSpec, phase: str) -> str | None:
    if spec.decay is not None:
        return "decay is not supported yet"
    if spec.segments is not None:
        return "segments are not supported yet"
    if spec.q_lengths or spec.kv_lengths:
        return "lengths are not supported yet"
    if max(spec.D, spec.V) > LARGEST_WIDTH:
        return f"D and V up to {LARGEST_WIDTH}, got D={spec.D}, V={spec.V}"
    if min(spec.B, spec.T, spec.S) < 1:
        return f"empty arrays, got B={spec.B}, T={spec.T}, S={spec.S}"
    return _unsupported_map(spec.feature_map)


def default_config(spec: LinearAttentionSpec, device: Device) -> Config:
    """Tiles by the size of a state, whose registers bind: [V, F] float32 over the warps."""
    return Config(
        piece_rows=4096,
        stream_rows=256,
        programs=8 * device.multiprocessors,
        state_block=64,
        state_warps=4,
        state_stages=3,
        output_block=64,
        output_warps=4,
        output_stages=3,
        dq_block=64,
        dq_warps=4,
        dq_stages=2,
        dkv_block=64,
        dkv_warps=4,
        dkv_stages=2,
    )


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    return (causal if spec.causal else bidirectional).forward(spec, config, inputs)


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    return (causal if spec.causal else bidirectional).backward(spec, config, residuals, cotangents)
