"""Softmax attention in which keys and values go around a ring of devices.

    out = sum_r w_r out_r,   w_r = exp(lse_r - lse),   lse = log sum_r exp(lse_r)

In step r a device attends to the keys that device index - r holds at the start, while these travel
on to its right neighbour. The derivative goes around once more, and the gradients of keys and
values travel with them. So a device holds the keys of two devices at a time, in the forward and in
the backward pass.

A backward kernel makes a query's weights exp(s - lse) from an lse that it is given, so with lse of
all pieces it gives a piece's share of the gradients. Where the kernel divides the weights by their
sum, as in float32, or where plain JAX computes lse_r again, the cotangents of a piece are

    d out_r = w_r d out,   d lse_r = w_r ((out_r - out) . d out + d lse)
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ato_jax import device, dispatch, meshes
from ato_jax.meshes import varying_with
from ato_jax.ops.attention import api
from ato_jax.ops.attention.pieces import combine
from ato_jax.ops.attention.spec import REST_UNITS, Outputs, rest_in_units
from ato_jax.parallel.pieces import Plan, Rows, arguments, attend, sees

Arrays = tuple[jax.Array, jax.Array, jax.Array, Rows]  # q, k, v of this device
# The backends whose backward pass takes lse as it is given, below float32.
TAKES_LSE = ("mosaic_gpu", "triton")


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


def exact_piece(plan: Plan, starts: Any, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """`piece`, with what rounding takes from out added again. The gradients by lse need it."""
    request = request_of_piece(plan, starts, arrays)
    out, lse, rest = dispatch.run(
        api.OP, request.spec.for_backward(), request.inputs, request.implementation, training=True
    )
    out = out.astype(jnp.float32)
    if rest is not None:
        out *= 1 + rest.astype(jnp.float32) * REST_UNITS[request.spec.dtype]
    return out, lse


def request_of_piece(plan: Plan, starts: Any, arrays: Arrays) -> api.Request:
    q, k, v, rows = arrays
    return api.prepare(q, k, v, **arguments(plan, rows, q, k, starts), return_lse=True)


def takes_lse(plan: Plan, arrays: Arrays) -> bool:
    """Whether the backward pass of a piece takes lse of all pieces. All pieces are alike."""
    q, k, v, rows = arrays
    if q.dtype == jnp.float32:
        return False
    q, k, v = (plan.cut(array, plan.time)[0] for array in (q, k, v))
    request = request_of_piece(plan, (0, 0), (q, k, v, of_piece(plan, rows, 0, 0)))
    choice = dispatch.explain(api.OP, request.spec, request.inputs, request.implementation).backward
    return choice is not None and choice.backend in TAKES_LSE


def forward(plan: Plan, arrays: Arrays, exact: bool = False) -> tuple[jax.Array, jax.Array]:
    """out and lse, both float32."""
    q, k, v, rows = arrays
    attend_piece = functools.partial(exact_piece if exact else piece, plan)
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
                plan, seen, functools.partial(attend_piece, starts), here, nothing(queries[i])
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
        carry, _ = lax.scan(step_of, carry, jnp.arange(count - 1, dtype=jnp.int32))
    found = attend_to(jnp.int32(count - 1), *carry)
    outs, lses = zip(*found, strict=True)
    return jnp.concatenate(outs, axis=plan.time), jnp.concatenate(lses, axis=plan.time)


class Queries(NamedTuple):
    """The arrays that the backward pass reads, for a chunk of queries or for all of them."""

    q: jax.Array
    out: jax.Array
    rest: jax.Array | None  # what rounding took from out, `Outputs.rest`
    lse: jax.Array
    d_out: jax.Array
    d_lse: jax.Array | None  # None for zeros


def gradients_again(plan: Plan, starts: Any, query: Queries, keys: Any) -> Any:
    """dq, dk and dv of a piece whose out_r and lse_r are computed again."""
    k, v, rows = keys

    def of_floats(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return piece(plan, starts, (q, k, v, rows))

    (out_r, lse_r), pull = jax.vjp(of_floats, query.q, k, v)
    # A query that saw nothing, or is padding, may have NaN for a cotangent.
    saw = lse_r > -jnp.inf
    weight = jnp.where(saw, jnp.exp(lse_r - jnp.where(saw, query.lse, 0)), 0)
    d_out = jnp.where(saw[..., None], query.d_out, 0)
    inner = jnp.sum((out_r - jnp.where(saw[..., None], query.out, 0)) * d_out, axis=-1)
    if query.d_lse is not None:
        inner = inner + jnp.where(saw, query.d_lse, 0)
    return pull((weight[..., None] * d_out, weight * inner))


def gradients_by_lse(plan: Plan, starts: Any, query: Queries, keys: Any) -> Any:
    """dq, dk and dv of a piece, from out and lse of all pieces."""
    request = request_of_piece(plan, starts, (query.q, *keys))
    found = dispatch.backward(
        api.OP,
        request.spec,
        request.inputs,
        Outputs(query.out, query.lse, query.rest),
        Outputs(query.d_out, query.d_lse),  # type: ignore[arg-type]
        request.implementation,
        ("q", "k", "v"),
    )
    return found["q"], found["k"], found["v"]


def backward(plan: Plan, by_lse: bool, residuals: Any, cotangents: Any) -> Arrays:
    """The cotangents of the arrays. `residuals` are these, out and lse; `by_lse` chooses between
    the two forms of a piece's gradients."""
    arrays, out, lse = residuals
    q, k, v, rows = arrays
    whole = Queries(q, out, None, lse, *cotangents)
    if by_lse:
        spec = request_of_piece(plan, (0, 0), arrays).spec
        rounded = out.astype(q.dtype)
        saw = lse > -jnp.inf
        whole = Queries(
            q,
            rounded,
            rest_in_units(spec, out, rounded.astype(jnp.float32)),
            lse,
            jnp.where(saw[..., None], whole.d_out, 0).astype(q.dtype),
            None if whole.d_lse is None else jnp.where(saw, whole.d_lse, 0),
        )
    cut = functools.partial(plan.cut, axis=plan.time)
    parts = [[None] * plan.chunks if array is None else cut(array) for array in whole]
    queries = [Queries(*part) for part in zip(*parts, strict=True)]

    def zeros(array: jax.Array) -> jax.Array:
        return varying_with(jnp.zeros(array.shape, jnp.float32), arrays)

    def gradients(starts: Any, given: Any) -> Any:
        found = (gradients_by_lse if by_lse else gradients_again)(plan, starts, *given)
        return tuple(gradient.astype(jnp.float32) for gradient in found)

    def attend_to(step: Any, d_queries: list[Any], held: Any, d_held: Any) -> Any:
        k, v, kv_ids = held
        keys, values = cut(k), cut(v)
        d_keys, d_values = map(cut, d_held)
        d_queries = list(d_queries)
        now = rows._replace(kv_ids=kv_ids)
        for i, j, starts, seen in pieces_of(plan, rows, step):
            here = queries[i], (keys[j], values[j], of_piece(plan, now, i, j))
            none = tuple(zeros(array) for array in (queries[i].q, keys[j], values[j]))
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
        [zeros(query.q) for query in queries],
        (k, v, rows.kv_ids),
        (zeros(k), zeros(v)),
    )
    with device.interpret(plan.interpret):
        if count > 1:
            carry, _ = lax.scan(step_of, carry, jnp.arange(count - 1, dtype=jnp.int32))
        d_queries, d_held = attend_to(jnp.int32(count - 1), *carry)
    # The last step's keys are those of the right neighbour.
    d_k, d_v = onwards(plan, d_held)
    d_q = jnp.concatenate(d_queries, axis=plan.time)
    none = jax.tree.map(lambda _: None, rows)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), none


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring(plan: Plan, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """out and lse of this device's queries, both float32."""
    return forward(plan, arrays)


def _ring_forward(plan: Plan, primals: Any) -> Any:
    arrays = jax.custom_derivatives.custom_vjp_primal_tree_values(primals)
    out, lse = forward(plan, arrays, exact=takes_lse(plan, arrays))
    return (out, lse), (arrays, out, lse)


def _ring_backward(plan: Plan, residuals: Any, cotangents: Any) -> tuple[Arrays]:
    d_out, d_lse = cotangents
    if isinstance(d_out, SymbolicZero):
        d_out = meshes.zeros(d_out.aval)
    # Most callers differentiate out alone.
    cotangents = d_out, None if isinstance(d_lse, SymbolicZero) else d_lse
    with device.interpret(plan.interpret):
        by_lse = takes_lse(plan, residuals[0])
    if by_lse:
        return (_by_lse(plan, residuals, cotangents),)
    return (backward(plan, False, residuals, cotangents),)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_lse(plan: Plan, residuals: Any, cotangents: Any) -> Arrays:
    """`backward` by lse. JAX has no derivative of a kernel by lse, so it takes that of the other
    form."""
    return backward(plan, True, residuals, cotangents)


def _by_lse_forward(plan: Plan, residuals: Any, cotangents: Any) -> Any:
    return jax.vjp(functools.partial(backward, plan, False), residuals, cotangents)


def _by_lse_backward(plan: Plan, pull: Any, second_cotangents: Any) -> Any:
    return pull(second_cotangents)


_by_lse.defvjp(_by_lse_forward, _by_lse_backward)
ring.defvjp(_ring_forward, _ring_backward, symbolic_zeros=True)
