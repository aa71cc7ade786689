"""Both passes of causal calls in float32, up to 128 columns, by products of bfloat16 parts.

The backend (`__init__.py`) calls `keep` and `backward`. The sequence is cut into runs of rows.
`float32_sums.py` computes the sums of each run, `scans/edges.py` adds them up to S and z ahead of
each run, and in `float32_pairs.py` rows read these and the rows of their own run. Forward, with j
in the run of i and j <= i,

    out_i = (phi(q_i) S + sum_j w_ij v_j) inverse_i,  w_ij = phi(q_i) . phi(k_j)
    inverse_i = 1 / max(phi(q_i) . z + sum_j w_ij, eps)

Backward, with g the cotangent of out, e_i = g_i . out_i, 0 where the denominator is eps, and
phi'_i = phi(q_i) inverse_i,

    dq_i = (g_i S^T - e_i z + sum_j (g_i . v_j - e_i) phi(k_j)) inverse_i slope(q_i)
    R = sum_i phi'_i g_i^T,  u = -sum_i e_i phi'_i          over all queries behind the run
    dv_j = phi(k_j) R + sum_i (phi(k_j) . phi'_i) g_i       i of the run of j, i >= j
    dk_j = (v_j R^T + u + sum_i (v_j . g_i - e_i) phi'_i) slope(k_j)

Without a normaliser inverse is 1 and e is 0, and all four are multiplied by the scale.

With features of FAVOR+ v and g are bfloat16, one part each. All operands of dv then have one part,
too, since nothing cancels in it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF
from ato_jax.ops.linear_attention.mosaic_gpu import causal, feature_maps, frame
from ato_jax.ops.linear_attention.mosaic_gpu.float32_pairs import (
    chunks_of_runs,
    deal_of_runs,
    float32_pairs,
)
from ato_jax.ops.linear_attention.mosaic_gpu.float32_pass import Given, Halves, Pass, Unit
from ato_jax.ops.linear_attention.mosaic_gpu.float32_sums import float32_sums, parts_of_values
from ato_jax.ops.linear_attention.mosaic_gpu.frame import C, Config
from ato_jax.ops.linear_attention.scans.edges import Edges, at_edges
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Outputs,
    Residuals,
)


def _edges(
    spec: LinearAttentionSpec,
    runs: tuple[jax.Array, jax.Array],
    start: LinearState | None,
    reverse: bool = False,
) -> Edges:
    """The sums ahead of each run, or behind it, kv [B, heads, runs, F, V], and all of them."""

    def turned(state: LinearState | None) -> LinearState | None:
        """`at_edges` takes a state's kv the other way round than sums of pieces."""
        return state and LinearState(jnp.swapaxes(state.kv, 2, 3), state.k_sum)

    found = at_edges(spec, runs, turned(start), ends=True, reverse=reverse, dtype=jnp.float32)
    return found._replace(end=turned(found.end))


def _phi(spec: LinearAttentionSpec) -> Any:
    maps = feature_maps.features(spec)

    def phi(x: jax.Array, first: int, _: Any) -> jax.Array:
        return maps.unrounded(maps.present(x, first), first)

    return phi


def _weighted_phi(spec: LinearAttentionSpec) -> Any:
    """phi'"""
    if not spec.normalize:
        return _phi(spec)

    def phi(x: jax.Array, first: int, numbers: Any) -> jax.Array:
        inverse = mosaic.load(numbers.at[0], mosaic.OF_ROWS)
        return _phi(spec)(x, first, None) * mosaic.in_columns(inverse, HALF)

    return phi


def _numbers(spec: LinearAttentionSpec) -> jax.ShapeDtypeStruct:
    """The type of an array with a number for each row, up to a whole run."""
    return jax.ShapeDtypeStruct((spec.B, spec.H, chunks_of_runs(spec), C), F32)


def keep(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> causal.Kept:
    deal = deal_of_runs(spec, config.blocks, spec.G)
    runs = float32_sums(spec, deal, "float32_sums", inputs.k, inputs.v)
    ahead = _edges(spec, runs, inputs.initial_state)

    def finish(unit: Unit, total: Halves, den: Any) -> None:
        factor: Any
        factor = spec.scale
        if spec.normalize:
            for first in range(0, spec.D, HALF):
                den = den + jnp.sum(unit.read(first) * unit.vector_from(first), axis=1)
            inverse = 1.0 / jnp.maximum(den, spec.eps)
            factor = mosaic.in_columns(inverse, HALF)
            unit.leave_numbers(inverse)
        for first, half in total.items():
            unit.store(first, half * factor)
        unit.leave()

    out_type = jax.ShapeDtypeStruct(frame.shape_of_values(spec, spec.H), F32)
    found = float32_pairs(
        spec,
        config.blocks,
        Pass(
            name="float32_causal_output",
            x=Given(inputs.q),
            y=Given(inputs.k, of_keys=True),
            value=Given(inputs.v, True, parts_of_values(spec)),
            state=Given(ahead.kv, of_keys=True),
            vector=Given(ahead.k_sum, of_keys=True) if spec.normalize else None,
            outputs=[out_type, *([_numbers(spec)] * spec.normalize)],
            finish=finish,
            map_x=_phi(spec),
            map_y=_phi(spec),
            sums_weights=spec.normalize,
        ),
    )
    assert ahead.end is not None
    den = found[1] if spec.normalize else None
    return causal.Kept(found[0], ahead.end, ahead.kv, ahead.k_sum, den=den)


def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    inputs = residuals.inputs
    outputs: Any = residuals.outputs
    kept = outputs if isinstance(outputs, causal.Kept) else keep(spec, config, inputs)
    g, numbers, of_rows = cotangents.out, None, []
    if spec.normalize:
        assert kept.den is not None
        numbers = kept.den, _e(spec, g, kept)
        of_rows = [x.reshape(*x.shape[:2], -1) for x in numbers]
    run = functools.partial(float32_pairs, spec, config.blocks)
    (dq,) = run(_query_gradient(spec, inputs, g, kept, numbers))
    deal = deal_of_runs(spec, config.blocks, spec.H)
    r, u = float32_sums(spec, deal, "float32_query_sums", inputs.q, g, of_rows)
    if not spec.normalize:
        u = jnp.zeros_like(u)
    start = None
    if spec.return_state:
        # The heads of a group are added up, so the first head alone begins with the cotangent.
        group_size = spec.H // spec.G

        def of_queries(x: jax.Array) -> jax.Array:
            return jnp.zeros((spec.B, spec.H, *x.shape[2:]), F32).at[:, ::group_size].set(x)

        start = jax.tree.map(lambda x: of_queries(x / spec.scale), cotangents.state)
    behind = _edges(spec, (r, u), start, reverse=True)
    (dv,) = run(_value_gradient(spec, inputs, g, behind, numbers))
    (dk,) = run(_key_gradient(spec, inputs, g, behind, numbers))
    axis = 2 if spec.layout == "bthd" else 1
    dk, dv = (_of_groups(spec, x, axis) for x in (dk, dv))
    d_state = None
    if spec.initial_state:
        d_state = jax.tree.map(lambda x: _of_groups(spec, x * spec.scale, 1), behind.end)
    return Inputs(dq, dk, dv, initial_state=d_state)


def _of_groups(spec: LinearAttentionSpec, x: jax.Array, axis: int) -> jax.Array:
    """Sums over the query heads, which are axis `axis`, of each kv head."""
    if spec.H == spec.G:
        return x
    parted = x.reshape(*x.shape[:axis], spec.G, spec.H // spec.G, *x.shape[axis + 1 :])
    return jnp.sum(parted, axis=axis + 1)


def _e(spec: LinearAttentionSpec, g: jax.Array, kept: causal.Kept) -> jax.Array:
    """[B, H, chunks, C]"""
    e = jnp.sum(g * kept.out, axis=3)
    e = jnp.swapaxes(e, 1, 2) if spec.layout == "bthd" else e  # [B, H, T]
    shape = _numbers(spec).shape
    e = jnp.pad(e, ((0, 0), (0, 0), (0, shape[2] * C - spec.T))).reshape(shape)
    assert kept.den is not None
    # With some room for the rounding of a quotient: where it was clamped, it is 1 / eps.
    return jnp.where(kept.den < (1 - 2.0**-20) / spec.eps, e, 0.0)


Numbers = tuple[jax.Array, jax.Array] | None


def _query_gradient(
    spec: LinearAttentionSpec, inputs: Inputs, g: jax.Array, kept: causal.Kept, numbers: Numbers
) -> Pass:
    maps = feature_maps.features(spec)

    def finish(unit: Unit, total: Halves, _: Any) -> None:
        for first, dq in total.items():
            if spec.normalize:
                dq = dq - mosaic.in_columns(unit.number(1), HALF) * unit.vector_from(first)
                dq = dq * mosaic.in_columns(unit.number(0), HALF)
            unit.store(first, dq * spec.scale * maps.slope(unit.read(first)))
        unit.leave()

    return Pass(
        name="float32_causal_query_gradient",
        x=Given(g, parts=parts_of_values(spec)),
        y=Given(inputs.v, True, parts_of_values(spec)),
        value=Given(inputs.k, of_keys=True),
        state=Given(kept.s, of_keys=True),
        vector=Given(kept.z, of_keys=True) if spec.normalize else None,
        last=Given(inputs.q),
        numbers=numbers,
        outputs=[jax.ShapeDtypeStruct(inputs.q.shape, F32)],
        finish=finish,
        map_value=_phi(spec),
        turned=True,
        minus="rows" if spec.normalize else None,
    )


def _of_keys(spec: LinearAttentionSpec, like: jax.Array) -> jax.ShapeDtypeStruct:
    """Gradients of keys or values, of each query head."""
    shape = list(like.shape)
    shape[2 if spec.layout == "bthd" else 1] = spec.H
    return jax.ShapeDtypeStruct(tuple(shape), F32)


def _value_gradient(
    spec: LinearAttentionSpec, inputs: Inputs, g: jax.Array, behind: Edges, numbers: Numbers
) -> Pass:
    def finish(unit: Unit, total: Halves, _: Any) -> None:
        for first, dv in total.items():
            unit.store(first, dv * spec.scale)
        unit.leave()

    parts = parts_of_values(spec)
    return Pass(
        name="float32_causal_value_gradient",
        x=Given(inputs.k, True, parts),
        y=Given(inputs.q, parts=parts),
        value=Given(g, parts=parts),
        state=Given(behind.kv, parts=parts),
        weight_parts=parts,
        numbers=numbers,
        outputs=[_of_keys(spec, inputs.v)],
        finish=finish,
        map_x=_phi(spec),
        map_y=_weighted_phi(spec),
        reverse=True,
    )


def _key_gradient(
    spec: LinearAttentionSpec, inputs: Inputs, g: jax.Array, behind: Edges, numbers: Numbers
) -> Pass:
    maps = feature_maps.features(spec)

    def finish(unit: Unit, total: Halves, _: Any) -> None:
        for first, dk in total.items():
            dk = (dk + unit.vector_from(first)) * spec.scale
            unit.store(first, dk * maps.slope(unit.read(first)))
        unit.leave()

    return Pass(
        name="float32_causal_key_gradient",
        x=Given(inputs.v, True, parts_of_values(spec)),
        y=Given(g, parts=parts_of_values(spec)),
        value=Given(inputs.q),
        state=Given(behind.kv),
        vector=Given(behind.k_sum),
        last=Given(inputs.k, of_keys=True),
        numbers=numbers,
        outputs=[_of_keys(spec, inputs.k)],
        finish=finish,
        map_value=_weighted_phi(spec),
        reverse=True,
        turned=True,
        minus="columns" if spec.normalize else None,
    )
