"""Lengths and segments as the kernels take them.

    lengths     [B]: rows behind them have features of 0 (`mosaic.kept`), and a decay of 0
    segments    masks (`chunk_borders.py`). Where there is a decay, too, a decay for each step: at
                the first step of a segment -inf, of which sums take the least decay. exp2(-184) is
                0 in float32, so that nothing of earlier steps is left, neither of a state nor of a
                pair; and such a decay has no gradient
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.ops.linear_attention.mosaic_gpu import document_table, frame
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec


def unsupported_lengths(spec: LinearAttentionSpec, phase: str) -> str | None:
    """Where kernels do not count rows."""
    if spec.decay == "channel":
        return "with a decay per channel"
    if frame.is_wide(spec) and (spec.causal or phase == "backward"):
        seen = " with causal=True" if spec.causal else " for the gradients"
        return f"with more than {frame.F} columns{seen}"
    if spec.causal and spec.offset is None:
        return "of queries and keys that differ with causal=True"
    if frame.both_ways(spec) and spec.offset is None:
        return "of queries and keys that differ with a decay"
    return None


def unsupported_segments(spec: LinearAttentionSpec, phase: str) -> str | None:
    """Where there is no mask for them, and where a decay for each step, in their place where there
    is a decay, is slower than Triton's kernels: every chunk in which a segment begins is steep. On
    an H100, B2 H32 T16384 D64 with segments of 1024, forward and gradients took 1.55 ms so, by
    Triton's 1.34; B2 H16 D128 1.60 and 1.79."""
    if frame.by_documents(spec):
        return document_table.unsupported(spec, phase)
    if not spec.causal:
        return "with a decay and without causal=True"
    if spec.segments != "self":
        return "of queries and keys that differ"
    if spec.decay == "channel":
        return "with a decay per channel"
    if frame.is_wide(spec):
        return f"with more than {frame.F} columns"
    if spec.decay and phase == "backward" and max(spec.D, spec.V) <= mosaic.HALF:
        return f"for the gradients with a decay and up to {mosaic.HALF} columns"
    return None


def in_place(spec: LinearAttentionSpec, inputs: Inputs) -> tuple[LinearAttentionSpec, Inputs]:
    """The call with lengths as they are; where rows are walked with at most `kv_lengths`, and
    beside a decay with segments as part of it.

    Lengths are there, too, where T ends within a chunk, and the state behind it is returned or a
    walk begins there: rows beyond the end are read as zeros, whose features need not be zero.
    """
    both_ways = frame.both_ways(spec)
    if not spec.causal and not both_ways:
        return spec, inputs
    lengths = inputs.kv_lengths if spec.kv_lengths else None
    reads_the_end = both_ways or spec.return_state and spec.decay != "channel"
    if lengths is None and reads_the_end and spec.T % frame.C:
        lengths = jnp.full(spec.B, spec.T, jnp.int32)
    if lengths is not None:
        spec = dataclasses.replace(spec, q_lengths=False, kv_lengths=True)
        inputs = inputs._replace(q_lengths=None, kv_lengths=lengths)
    if spec.segments and spec.decay:
        decay = _with_borders(spec, inputs)
        spec = dataclasses.replace(spec, segments=None, decay="step")
        inputs = inputs._replace(decay=decay, q_segments=None, kv_segments=None)
    return spec, inputs


def _with_borders(spec: LinearAttentionSpec, inputs: Inputs) -> jax.Array:
    """The decay of each step; the least at those that begin a segment."""
    ids = inputs.kv_segments
    assert ids is not None and inputs.decay is not None
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))  # [B, S]
    return jnp.where(_of_steps(spec, begins), -jnp.inf, _as_steps(spec, inputs.decay))


def decay_of_steps(spec: LinearAttentionSpec, inputs: Inputs) -> jax.Array:
    """A decay for each step; 0 where keys do not count."""
    assert inputs.decay is not None
    return _where_counted(spec, inputs, _as_steps(spec, inputs.decay))


def gradient_of_decay(
    called: LinearAttentionSpec, inputs: Inputs, d_steps: jax.Array | None
) -> jax.Array | None:
    """The gradient of the decay as the call has it, from that of `decay_of_steps`."""
    if called.decay is None or d_steps is None:
        return None
    d_steps = _where_counted(called, inputs, d_steps)
    if called.decay == "step":
        return d_steps
    return jnp.sum(d_steps, axis=(0, 1) if called.layout == "bthd" else (0, 2))


def _where_counted(spec: LinearAttentionSpec, inputs: Inputs, x: jax.Array) -> jax.Array:
    """x of each step and head, and 0 where keys do not count."""
    if inputs.kv_lengths is None:
        return x
    counted = jnp.arange(spec.S, dtype=jnp.int32) < inputs.kv_lengths[:, None]  # [B, S]
    return jnp.where(_of_steps(spec, counted), x, 0.0)


def _of_steps(spec: LinearAttentionSpec, x: jax.Array) -> jax.Array:
    """x [B, S] with an axis for heads."""
    return jnp.expand_dims(x, 2 if spec.layout == "bthd" else 1)


def _as_steps(spec: LinearAttentionSpec, decay: jax.Array) -> jax.Array:
    """A decay per head [G], or one per step, as one per step."""
    shape = (spec.B, spec.S, spec.G) if spec.layout == "bthd" else (spec.B, spec.G, spec.S)
    if decay.ndim == 1 and spec.layout == "bhtd":
        decay = decay[:, None]
    return jnp.broadcast_to(decay, shape)
