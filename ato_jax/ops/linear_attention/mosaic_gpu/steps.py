"""Lengths and segments: which the kernels take, and how the backend passes them on.

    lengths     [B]: rows behind them have features of 0 (`mosaic.kept`), and a decay of 0
    segments    masks (`chunk_borders.py`). A decay counts as 0 at the first step of a segment, as
                nothing of earlier steps is left there; decays per channel are set to 0 by the
                kernels (`channel.round_gates`)

The backend (`__init__.py`, `float8.py`) calls `in_place`, which leaves lengths to the kernels.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ato_jax.ops.linear_attention.alignment import runs_of_keys
from ato_jax.ops.linear_attention.mosaic_gpu import document_table, frame
from ato_jax.ops.linear_attention.scans import borders
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec


def unsupported_lengths(spec: LinearAttentionSpec, phase: str) -> str | None:
    """Where kernels do not count rows."""
    if spec.decay == "channel":
        return "with a decay per channel"
    if frame.by_runs(spec) and frame.is_wide(spec):
        return f"with more than {frame.F} columns and causal=True, segments or a decay"
    if frame.by_runs(spec):
        return "with segments or a decay in float16, or with both, and without causal=True"
    if spec.causal and spec.offset is None:
        return "of queries and keys that differ with causal=True"
    if frame.by_two_walks(spec) and spec.offset is None:
        return "of queries and keys that differ with a decay"
    return None


def unsupported_segments(spec: LinearAttentionSpec, phase: str) -> str | None:
    """Where there is no mask for them."""
    if frame.by_documents(spec) and not frame.by_runs(spec):
        return document_table.unsupported(spec, phase)
    if spec.segments != "self":
        return "of queries and keys that differ"
    if frame.by_documents(spec) and (spec.initial_state or spec.return_state):
        return "with a state and without causal=True"
    return None


def in_place(spec: LinearAttentionSpec, inputs: Inputs) -> tuple[LinearAttentionSpec, Inputs]:
    """The call with lengths as they are; where rows are walked with at most `kv_lengths`.

    Lengths are there, too, where T ends within a chunk, and the state behind it is returned or a
    walk begins there: rows beyond the end are read as zeros, whose features need not be zero.
    """
    both_ways = frame.by_two_walks(spec)
    if not spec.causal and not both_ways:
        return spec, inputs
    lengths = inputs.kv_lengths if spec.kv_lengths else None
    reads_the_end = both_ways or spec.return_state and spec.decay != "channel"
    if lengths is None and reads_the_end and spec.T % frame.C:
        lengths = jnp.full(spec.B, spec.T, jnp.int32)
    if lengths is not None:
        spec = dataclasses.replace(spec, q_lengths=False, kv_lengths=True)
        inputs = inputs._replace(q_lengths=None, kv_lengths=lengths)
    return spec, inputs


def decay_of_steps(spec: LinearAttentionSpec, inputs: Inputs, at_borders: float = 0.0) -> jax.Array:
    """A decay for each step; 0 where keys do not count, and `at_borders` at the steps that begin a
    segment."""
    assert inputs.decay is not None
    decay = _as_steps(spec, inputs.decay)
    if spec.segments:
        runs = runs_of_keys(spec, inputs)
        assert runs is not None
        decay = jnp.where(_of_steps(spec, borders.are_borders(runs)), at_borders, decay)
    return _where_counted(spec, inputs, decay)


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
