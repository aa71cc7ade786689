"""States too large for the programs that hold one: V in blocks, each of them a call of its own.

With v, do and the states' kv cut along V into blocks c, and the features whole:

    out[.., c] = attend(q, k, v[.., c])
    dv[.., c]  = backward(q, k, v[.., c], do[.., c]).dv      likewise the states' kv
    dq         = sum over c of backward(..).dq               likewise dk and the rest

because everything that flows back is linear in do, the normaliser's share included: each block
takes phi(q) . y_i over its own columns. The sums are of float32, rounded once. The blocks are an
axis of the kernels' grid: XLA reads v and do in place, and copies only the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)
from ato_jax.ops.linear_attention.triton.calls import (
    LARGEST_STATE,
    sequence_dtype,
    unrounded,
)
from ato_jax.triton import tiles

# Tiles of more columns of v, however narrow the features, exceed the shared memory or spill most of
# what they hold. Beside narrow features it costs little to read q and k once more.
LARGEST_BLOCK = 128


def blocks(
    spec: LinearAttentionSpec, stored_columns: int = 0, wide_state: int = LARGEST_STATE
) -> int:
    """Into how many blocks V is cut.

    Where a state is stored for every run of rows, no program has to hold it. Blocks may then be as
    wide as `stored_columns`, if that is more. `wide_state`: the elements of a state that a program
    holds where factors are wider than bfloat16.
    """
    held = LARGEST_STATE if spec.dtype == "bfloat16" else wide_state
    most = max(1, held // tiles.padded(spec.F))
    if spec.dtype == "bfloat16" and most <= LARGEST_BLOCK:
        most = max(most, stored_columns)
    elif spec.decay != "channel":  # its kernels take V whole
        most = min(most, LARGEST_BLOCK)
    return pl.cdiv(spec.V, most)


def block_spec(spec: LinearAttentionSpec, count: int) -> LinearAttentionSpec:
    """The call of each block."""
    return dataclasses.replace(spec, V=pl.cdiv(spec.V, count))


def cut(spec: LinearAttentionSpec, count: int, array: jax.Array) -> jax.Array:
    """[.., V] as [.., blocks, V_block], the last block filled up by zeros."""
    missing = -spec.V % count
    if missing:
        array = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])
    return array.reshape(*array.shape[:-1], count, -1)


def joined(spec: LinearAttentionSpec, array: jax.Array) -> jax.Array:
    """[.., blocks, V_block] as [.., V]."""
    return array.reshape(*array.shape[:-2], -1)[..., : spec.V]


def _cut_inputs(spec: LinearAttentionSpec, count: int, inputs: Inputs) -> tuple[Inputs, Any]:
    """The inputs with v and the state's kv cut, and the axes of the blocks for `vmap`: -2 of
    these two."""
    axes: Any = Inputs._make([None] * len(inputs))
    state = inputs.initial_state
    if state is not None:
        state = state._replace(kv=cut(spec, count, state.kv))
        axes = axes._replace(initial_state=LinearState._make([-2, None]))
    return inputs._replace(v=cut(spec, count, inputs.v), initial_state=state), axes._replace(v=-2)


def _cut_outputs(spec: LinearAttentionSpec, count: int, outputs: Outputs) -> Outputs:
    kv = cut(spec, count, outputs.state.kv)
    return Outputs(cut(spec, count, outputs.out), outputs.state._replace(kv=kv))


def _outputs_axes(k_sum: int | None) -> Any:
    return Outputs._make([-2, LinearState._make([-2, k_sum])])


def forward(
    attend: Callable[..., Outputs], spec: LinearAttentionSpec, count: int, inputs: Inputs
) -> Outputs:
    """`attend(spec, inputs)` is the kernels' forward."""

    def block(inputs: Inputs) -> Outputs:
        return attend(block_spec(spec, count), inputs)

    inputs, axes = _cut_inputs(spec, count, inputs)
    out, state = jax.vmap(block, in_axes=(axes,), out_axes=_outputs_axes(0))(inputs)
    return Outputs(joined(spec, out), LinearState(joined(spec, state.kv), state.k_sum[0]))


def backward(
    attend: Callable[..., Inputs],
    spec: LinearAttentionSpec,
    count: int,
    residuals: Residuals,
    cotangents: Outputs,
) -> Inputs:
    """`attend(spec, residuals, cotangents)` is the kernels' backward."""

    def block(inputs: Inputs, outputs: Outputs, cotangents: Outputs) -> Inputs:
        inner = unrounded(block_spec(spec, count))
        return attend(inner, Residuals(inputs, outputs), cotangents)

    inputs, axes = _cut_inputs(spec, count, residuals.inputs)
    outputs, cotangents = (
        _cut_outputs(spec, count, pair) for pair in (residuals.outputs, cotangents)
    )
    # k_sum has no columns to cut: its cotangent enters with the first block alone.
    first = jnp.arange(count, dtype=jnp.int32) == 0
    d_k_sum = jnp.where(first[:, None, None, None], cotangents.state.k_sum, 0)
    cotangents = cotangents._replace(state=cotangents.state._replace(k_sum=d_k_sum))
    found = jax.vmap(block, in_axes=(axes, _outputs_axes(None), _outputs_axes(0)))(
        inputs, outputs, cotangents
    )

    def cut_first(array: jax.Array) -> jax.Array:
        return joined(spec, jnp.moveaxis(array, 0, -2))

    summed = jax.tree.map(lambda array: jnp.sum(array, axis=0), found)
    dtype = sequence_dtype(spec)
    d_state = found.initial_state
    if d_state is not None:
        d_state = LinearState(cut_first(d_state.kv), summed.initial_state.k_sum)
    return summed._replace(
        q=summed.q.astype(dtype),
        k=summed.k.astype(dtype),
        v=cut_first(found.v).astype(dtype),
        initial_state=d_state,
    )
