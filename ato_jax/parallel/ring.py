"""Softmax attention in which keys and values go around a ring of devices.

    out = sum_r w_r out_r,   w_r = exp(lse_r - lse),   lse = log sum_r exp(lse_r)

In step r a device attends to the keys that device index - r holds at the start, while these travel
on to its right neighbour. The derivative goes around once more. It computes out_r and lse_r again,
whose cotangents are

    d out_r = w_r d out,   d lse_r = w_r ((out_r - out) . d out + d lse)

and the gradients of keys and values travel with them. So a device holds the keys of two devices at
a time, in the forward and in the backward pass.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax import device
from ato_jax.meshes import varying_with
from ato_jax.ops.attention.pieces import combine
from ato_jax.parallel.pieces import Plan, Rows, attend, sees

Arrays = tuple[jax.Array, jax.Array, jax.Array, Rows]  # q, k, v of this device


def onwards(plan: Plan, tree: Any) -> Any:
    """Every array to the right neighbour."""
    count = plan.devices.count
    pairs = [(source, (source + 1) % count) for source in range(count)]
    return jax.tree.map(lambda array: lax.ppermute(array, plan.axis, pairs), tree)


def where_seen(plan: Plan, seen: Any, function: Any, arrays: Any, otherwise: Any) -> Any:
    """`function(arrays)` where `seen`, elsewhere `otherwise` without the work."""
    otherwise = varying_with(otherwise, arrays)
    if seen is True:
        return function(arrays)
    return lax.cond(
        seen,
        lambda arrays: varying_with(function(arrays), arrays),
        lambda arrays: otherwise,
        arrays,
    )


def pieces_of(plan: Plan, rows: Rows, step: Any) -> list[tuple[int, int, Any, Any]]:
    """The pieces of a step: the numbers of their chunks of queries and keys, where these begin,
    and whether any query sees a key."""
    devices = plan.devices
    q_starts = plan.starts(devices.index, plan.T)
    k_starts = plan.starts((devices.index - step) % devices.count, plan.S)
    sizes = plan.T // plan.chunks, plan.S // plan.chunks
    return [
        (i, j, starts, sees(plan, rows, starts, sizes))
        for i, q_start in enumerate(q_starts)
        for j, k_start in enumerate(k_starts)
        for starts in [(q_start, k_start)]
    ]


def of_piece(plan: Plan, rows: Rows, i: int, j: int) -> Rows:
    """The ids of the chunks i of queries and j of keys."""
    if rows.q_ids is None:
        return rows
    return rows._replace(
        q_ids=plan.cut(rows.q_ids, 1)[i], kv_ids=plan.cut(rows.kv_ids, 1)[j]
    )


def piece(plan: Plan, starts: Any, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """out and lse of one piece, float32."""
    q, k, v, rows = arrays
    out, lse = attend(plan, rows, q, k, v, starts, return_lse=True)
    return out.astype(jnp.float32), lse


def forward(plan: Plan, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    q, k, v, rows = arrays
    queries = plan.cut(q, plan.time)

    def nothing(q: jax.Array) -> Any:
        shape = (*q.shape[:-1], v.shape[-1])
        zeros = jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], -jnp.inf, jnp.float32)
        return varying_with(zeros, arrays)

    def attend_to(step: Any, found: list[Any], held: Any) -> list[Any]:
        k, v, kv_ids = held
        keys, values = plan.cut(k, plan.time), plan.cut(v, plan.time)
        found = list(found)
        now = rows._replace(kv_ids=kv_ids)
        for i, j, starts, seen in pieces_of(plan, rows, step):
            here = queries[i], keys[j], values[j], of_piece(plan, now, i, j)
            one = where_seen(
                plan, seen, functools.partial(piece, plan, starts), here, nothing(queries[i])
            )
            found[i] = combine(*zip(found[i], one, strict=True), layout=plan.layout)
        return found

    def step_of(carry: Any, step: Any) -> tuple[Any, None]:
        found, held = carry
        # The keys of the next step start to travel before this step's attention.
        coming = onwards(plan, held)
        return (attend_to(step, found, held), coming), None

    count = plan.devices.count
    carry = [nothing(q) for q in queries], (k, v, rows.kv_ids)
    if count > 1:
        carry, _ = lax.scan(step_of, carry, jnp.arange(count - 1))
    found = attend_to(jnp.int32(count - 1), *carry)
    outs, lses = zip(*found, strict=True)
    return jnp.concatenate(outs, axis=plan.time), jnp.concatenate(lses, axis=plan.time)


def backward(
    plan: Plan, residuals: tuple[Arrays, jax.Array, jax.Array], cotangents: Any
) -> tuple[Any]:
    arrays, out, lse = residuals
    q, k, v, rows = arrays
    whole = [plan.cut(array, plan.time) for array in (q, out, lse, *cotangents)]
    queries = list(zip(*whole, strict=True))

    def zeros(array: jax.Array) -> jax.Array:
        return varying_with(jnp.zeros(array.shape, jnp.float32), arrays)

    def gradients(starts: Any, given: Any) -> Any:
        (q, out, lse, d_out, d_lse), k, v, rows = given

        def of_floats(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            return piece(plan, starts, (q, k, v, rows))

        (out_r, lse_r), pull = jax.vjp(of_floats, q, k, v)
        # A query that saw nothing, or is padding, may have NaN for a cotangent.
        saw = lse_r > -jnp.inf
        weight = jnp.where(saw, jnp.exp(lse_r - jnp.where(saw, lse, 0)), 0)
        d_out = jnp.where(saw[..., None], d_out, 0)
        d_lse = jnp.where(saw, d_lse, 0)
        inner = jnp.sum((out_r - jnp.where(saw[..., None], out, 0)) * d_out, axis=-1)
        found = pull((weight[..., None] * d_out, weight * (inner + d_lse)))
        return tuple(gradient.astype(jnp.float32) for gradient in found)

    def attend_to(step: Any, d_queries: list[Any], held: Any, d_held: Any) -> Any:
        k, v, kv_ids = held
        keys, values = plan.cut(k, plan.time), plan.cut(v, plan.time)
        d_keys, d_values = (plan.cut(array, plan.time) for array in d_held)
        d_queries = list(d_queries)
        now = rows._replace(kv_ids=kv_ids)
        for i, j, starts, seen in pieces_of(plan, rows, step):
            here = queries[i], keys[j], values[j], of_piece(plan, now, i, j)
            none = tuple(zeros(array) for array in (queries[i][0], keys[j], values[j]))
            d_q, d_k, d_v = where_seen(
                plan, seen, functools.partial(gradients, starts), here, none
            )
            d_queries[i] = d_queries[i] + d_q
            d_keys[j], d_values[j] = d_keys[j] + d_k, d_values[j] + d_v
        join = functools.partial(jnp.concatenate, axis=plan.time)
        return d_queries, (join(d_keys), join(d_values))

    def step_of(carry: Any, step: Any) -> tuple[Any, None]:
        d_queries, held, d_held = carry
        coming = onwards(plan, held)
        d_queries, d_held = attend_to(step, d_queries, held, d_held)
        return (d_queries, coming, onwards(plan, d_held)), None

    count = plan.devices.count
    carry: Any = (
        [zeros(query[0]) for query in queries],
        (k, v, rows.kv_ids),
        (zeros(k), zeros(v)),
    )
    with device.interpret(plan.interpret):
        if count > 1:
            carry, _ = lax.scan(step_of, carry, jnp.arange(count - 1))
        d_queries, d_held = attend_to(jnp.int32(count - 1), *carry)
    # The last step's keys are those of the right neighbour.
    d_k, d_v = onwards(plan, d_held)
    d_q = jnp.concatenate(d_queries, axis=plan.time)
    none = jax.tree.map(lambda _: None, rows)
    return ((d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), none),)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring(plan: Plan, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """out and lse of this device's queries, both float32."""
    return forward(plan, arrays)


def _ring_forward(plan: Plan, arrays: Arrays) -> Any:
    out, lse = forward(plan, arrays)
    return (out, lse), (arrays, out, lse)


ring.defvjp(_ring_forward, backward)
