"""Rewrites a call with options that no kernel knows into a call without them, and maps its outputs
and gradients back.

    segments    the first step of a later segment has a decay of `LEAST_DECAY`, by which the state
                before it is multiplied by 0
    lengths     steps beyond hold zeros: their keys write nothing, and a decay of 0 leaves the state
                as it is
    columns     zeros up to a multiple of 64

XLA writes the arrays anew that change: the decays for segments; q, k, v, beta and the decays for
lengths; q, k, v and out, the state and decays per channel for columns. With gradients it writes
those of the same arrays, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax import programs
from ato_jax.mosaic import F32, HALF
from ato_jax.ops.delta_rule.spec import LEAST_DECAY, DeltaRuleSpec, Inputs, Outputs


def fitted(spec: DeltaRuleSpec) -> DeltaRuleSpec:
    """The call that kernels take; `spec` itself where nothing has to change."""
    return dataclasses.replace(
        spec,
        D=up_to_half(spec.D),
        V=up_to_half(spec.V),
        decay=spec.decay or ("step" if spec.segments else None),
        segments=False,
        lengths=False,
    )


def up_to_half(columns: int) -> int:
    return -(-columns // HALF) * HALF


def fitted_inputs(spec: DeltaRuleSpec, inputs: Inputs) -> Inputs:
    q, k, v, beta, decay, state = inputs[:6]
    if inputs.lengths is not None:
        real = _within(spec, inputs.lengths)
        q, k, v, beta = (where(real, array, 0.0) for array in (q, k, v, beta))
        decay = None if decay is None else where(real, decay, 0.0)
    if inputs.segments is not None:
        runs = inputs.segments
        starts = _of_rows(spec, jnp.pad(runs[:, 1:] != runs[:, :-1], ((0, 0), (1, 0))))
        if decay is None:
            decay = jnp.zeros(beta.shape, F32)
        decay = where(jnp.logical_not(starts), decay, LEAST_DECAY)
    q, k = (pad_columns(array, up_to_half(spec.D)) for array in (q, k))
    if decay is not None and spec.decay == "channel":
        decay = pad_columns(decay, up_to_half(spec.D))
    if state is not None:
        state = pad_state(spec, state)
    return Inputs(q, k, pad_columns(v, up_to_half(spec.V)), beta, decay, state)


def _within(spec: DeltaRuleSpec, lengths: jax.Array) -> jax.Array:
    """Which steps are no padding, as an array of the layout's [B, T, 1]."""
    return _of_rows(spec, jnp.arange(spec.T, dtype=jnp.int32)[None] < lengths[:, None])


def _of_rows(spec: DeltaRuleSpec, of_steps: jax.Array) -> jax.Array:
    """[B, T] as an array of the layout's [B, T, 1]."""
    return of_steps[:, :, None] if spec.layout == "bthd" else of_steps[:, None]


def where(rows: jax.Array, array: jax.Array, other: float) -> jax.Array:
    """An array of the layout's [B, T, heads] or [B, T, heads, columns], and `other` in the rows
    that are not among `rows`."""
    rows = rows if array.ndim == 3 else rows[..., None]
    return jnp.where(rows, array, jnp.asarray(other, array.dtype))


def pad_columns(array: jax.Array, columns: int) -> jax.Array:
    beyond = columns - array.shape[-1]
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, beyond)]) if beyond else array


def pad_state(spec: DeltaRuleSpec, state: jax.Array) -> jax.Array:
    rows, columns = up_to_half(spec.D) - spec.D, up_to_half(spec.V) - spec.V
    return jnp.pad(state, ((0, 0), (0, 0), (0, rows), (0, columns))) if rows or columns else state


def users_outputs(spec: DeltaRuleSpec, outputs: Outputs) -> Outputs:
    """Those of `spec`, of the fitted call's. Queries of 0 beyond the lengths have read 0."""
    return Outputs(
        lax.slice_in_dim(outputs.out, 0, spec.V, axis=3), outputs.state[:, :, : spec.D, : spec.V]
    )


@programs.promoting_ranks  # JAX calls it outside of `programs.jit`
def gradients(
    spec: DeltaRuleSpec,
    run: Callable[[Inputs, Outputs], Inputs],
    inputs: Inputs,
    cotangents: Outputs,
) -> Inputs:
    """The gradients of `spec`. `run` computes those of the fitted call."""

    def fit(numbers: Inputs) -> tuple[Inputs, Inputs]:
        found = fitted_inputs(spec, Inputs(*numbers[:6], *inputs[6:]))
        return found, found

    _, pull, given = jax.vjp(fit, Inputs(*inputs[:6]), has_aux=True)
    dout, dstate = cotangents
    if inputs.lengths is not None:  # nothing depends on what is given there
        dout = where(_within(spec, inputs.lengths), dout, 0.0)
    of_fitted = Outputs(pad_columns(dout, up_to_half(spec.V)), pad_state(spec, dstate))
    result: Inputs = pull(run(given, of_fitted))[0]
    return result
