"""Linear attention by Pallas kernels lowered to Triton.

    S = sum_j phi(k_j) v_j^T            [F, V]
    z = sum_j phi(k_j)                  [F]
    out_i = S^T phi(q_i) / max(phi(q_i) . z, eps)      normalize, else scale * S^T phi(q_i)

where j runs over the keys that query i sees: all of them, or those up to its own position, or those
of its segment, or with a decay between them. The sequence is cut into pieces so that the grid fills
the GPU, a kernel or XLA adds up the pieces' float32 sums, and no array of size [T, S] is formed.
Every sum has one order, so results are the same bits from run to run. XLA computes beforehand which
row each step holds and what a decay leaves of a state: these arrays are small.

The kernels, by family:

    bidirectional   all queries see all keys
    causal          causal, or both ways with a decay or segments: states per piece, then either
                    `carried` (a program carries its state through a piece) or `stored` (a state
                    is stored for every run, and a program has one tile)
    channel         causal with a decay per step and channel, which `prepared` does for large states
    decode          one token
    states, scan    the sums of pieces, and the states at their edges, for all of these
    walk, steps     the steps along which pieces are cut, and what decays make of them

`projected`, `split` and `few_rows` turn a call into one of these, for feature maps that are not
elementwise, for states that no program holds, and for 16-bit calls whose roundings would not
average out. `config` has the block sizes, `support` what is supported. The rest is shared: `calls`,
`mapping`, `products`, `sequences`, `pairs`, and `ato_jax.triton`.

Operands of products have the spec's dtype, accumulators are float32. In float16 a factor that is a
sum over keys or a quotient is multiplied in TF32, which has float16's mantissa and float32's range,
and features of keys that may be tiny are multiplied by a power of two before they are rounded
(`powers`).
float32 is multiplied exactly unless the spec's precision says "tf32".
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ato_jax.backend import Backend
from ato_jax.device import Device
from ato_jax.ops.linear_attention import large_states
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, Outputs, Residuals
from ato_jax.ops.linear_attention.triton import (
    bidirectional,
    causal,
    channel,
    prepared,
    projected,
    split,
    walk,
)
from ato_jax.ops.linear_attention.triton.calls import is_prepared, one_state
from ato_jax.ops.linear_attention.triton.config import Config as Config
from ato_jax.ops.linear_attention.triton.config import config_of
from ato_jax.ops.linear_attention.triton.few_rows import finer
from ato_jax.ops.linear_attention.triton.support import unsupported as unsupported

BACKWARD_FIELDS = ("dq", "dkv", "backward")


def default_config(spec: LinearAttentionSpec, device: Device) -> Config:
    """Each phase's fields by that phase's kernels: for projected features and for few rows their
    dtypes differ."""
    forward, backward = (
        _phase_config(finer(projected.inner_spec(spec, phase), phase), device, phase)
        for phase in ("forward", "backward")
    )
    of_backward = {
        name: value
        for name, value in dataclasses.asdict(backward).items()
        if name.startswith(BACKWARD_FIELDS)
    }
    found = dataclasses.replace(forward, **of_backward)
    if not spec.feature_map.elementwise:
        found = dataclasses.replace(found, **projected.block_sizes(spec, device))
    return found


def _phase_config(spec: LinearAttentionSpec, device: Device, phase: str) -> Config:
    config = config_of(spec, device)
    count = blocks_of_values(spec, config, phase)
    return config if count == 1 else config_of(split.block_spec(spec, count), device)


def blocks_of_values(spec: LinearAttentionSpec, config: Config, phase: str) -> int:
    """Into how many blocks V is cut."""
    stored = not one_state(spec) and walk.stores(spec, config, phase)
    return split.blocks(spec, config.stored_columns if stored else 0, config.wide_state)


def beats_later_backends(
    spec: LinearAttentionSpec, device: Device, backward_follows: bool
) -> bool:
    return not large_states.beats_kernels(spec, backward_follows)


def _kernels(spec: LinearAttentionSpec) -> Any:
    """The module that has the kernels for the spec."""
    if spec.decay == "channel":
        return prepared if is_prepared(spec) else channel
    return bidirectional if one_state(spec) else causal


def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    def attend(spec: LinearAttentionSpec, inputs: Inputs) -> Outputs:
        spec = finer(spec, "forward")
        count = blocks_of_values(spec, config, "forward")
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
        spec = finer(spec, "backward")
        count = blocks_of_values(spec, config, "backward")
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
    beats_later_backends = staticmethod(beats_later_backends)


BACKEND = _Triton()
