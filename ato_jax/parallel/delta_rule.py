"""The delta rule over a sequence that is cut across devices.

The steps of device d are affine in the state S [D, V] ahead of them, column by column:

    state after d = M_d (state ahead of d) + N_d        M_d [D, D], 0 where a segment begins within

The operation itself computes both in one pass: N_d are its columns for the values, from a state of
0, and M_d its columns for values of 0, from the identity. One all-gather brings them to every
device, which multiplies its way to the state S_d ahead of its own steps; from there the operation
continues.

The backward pass gathers D_d, the cotangent of S_d by d's own steps alone. With E_d, that of the
state after d,

    E_d-1 = D_d + M_d^T E_d       0 where a segment begins with d's first step
    dN_d  = E_d                   dM_d = E_d S_d^T

so each device receives (n - 1) B H D (V + D) float32 numbers from n devices in the forward pass,
and (n - 1) B H D V in the backward pass. JAX's transpose of the first all-gather, a reduce-scatter,
would bring the cotangents of N and M, (n - 1) B H D (V + D) once more.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ato_jax import dispatch, shapes
from ato_jax.meshes import varying_with
from ato_jax.ops.common import Integers, Precision, bind_segments, check_lengths
from ato_jax.ops.delta_rule import api
from ato_jax.parallel import states
from ato_jax.parallel.devices import (
    AxisName,
    Devices,
    comparable,
    devices_along,
    part_of_lengths,
    with_automatic_axes,
)

EXACT = lax.Precision.HIGHEST


class Part(NamedTuple):
    """How the steps of one device change a state. A field that the call does not need is None."""

    effect: jax.Array  # [N, M], [B, H, D, V + D] float32
    ids: jax.Array | None  # [B, 2] int32, of the first and of the last step
    empty: jax.Array | None  # [B] bool, whether all of its steps are padding


@overload
def gated_delta_rule(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, beta: ArrayLike, *, axis_name: AxisName,
    decay: ArrayLike | None = ..., scale: float | None = ..., normalize_qk: bool = ...,
    segment_ids: Integers | None = ..., lengths: Integers | None = ...,
    initial_state: ArrayLike | None = ..., return_state: Literal[False] = ..., layout: str = ...,
    precision: Precision = ..., implementation: str | None = ...,
) -> jax.Array: ...  # fmt: skip


@overload
def gated_delta_rule(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, beta: ArrayLike, *, axis_name: AxisName,
    decay: ArrayLike | None = ..., scale: float | None = ..., normalize_qk: bool = ...,
    segment_ids: Integers | None = ..., lengths: Integers | None = ...,
    initial_state: ArrayLike | None = ..., return_state: Literal[True], layout: str = ...,
    precision: Precision = ..., implementation: str | None = ...,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


def gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    beta: ArrayLike,
    *,
    axis_name: AxisName,
    decay: ArrayLike | None = None,
    scale: float | None = None,
    normalize_qk: bool = False,
    segment_ids: Integers | None = None,
    lengths: Integers | None = None,
    initial_state: ArrayLike | None = None,
    return_state: bool = False,
    layout: str = "bthd",
    precision: Precision = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes `ato_jax.gated_delta_rule` over a sequence that is cut across devices.

    Call it inside `jax.shard_map`, with T cut into contiguous parts of one size along `axis_name`:
    T below are the steps of one device, and n T those of the whole sequence on n devices. The
    result is that of the whole sequence. Devices exchange B H D (V + D) float32 numbers each in one
    all-gather, whatever T is, and B H D V in another one for the gradient. Each goes over its own
    steps twice.

    Args:
      q: This device's queries [B, T, G, D], as in `ato_jax.gated_delta_rule`. B may be missing.
      k: This device's keys [B, T, G, D].
      v: This device's values [B, T, H, V].
      beta: How far each of this device's steps moves the memory, [B, T, H].
      axis_name: The mesh axis along which the sequence is cut, or a tuple of axes.
      decay: This device's [B, T, H] or [B, T, H, D], as in `ato_jax.gated_delta_rule`.
      scale: Factor of the result; D ** -0.5 unless given.
      normalize_qk: As in `ato_jax.gated_delta_rule`.
      segment_ids: This device's integers [B, T]. A segment is one contiguous run, and one that ends
        with a device's last step continues on the next device if the first id there is the same.
      lengths: Integers [B], the lengths of the whole sequence, from 0 to n T, the same on every
        device.
      initial_state: S before the first step of all, [B, H, D, V], the same on every device.
      return_state: Return (out, state) in place of out: S after the last step of the whole
        sequence, the same on every device, so that its `out_specs` may be `P()`. It costs one more
        reduction of a state.
      layout: "bthd", or "bhtd" for all arrays with a T.
      precision: As in `ato_jax.gated_delta_rule`.
      implementation: As in `ato_jax.gated_delta_rule`, the backend of each device's own steps.

    Returns:
      out [B, T, H, V] of this device's steps; with `return_state` the pair (out, state), the state
      float32 [B, H, D, V].

    Raises:
      ValueError: An argument is wrong: no `jax.shard_map` binds `axis_name`, or a shape, dtype or
        value is. The message names the argument, what it was and what it has to be.
      UnsupportedError: The backend named by `implementation` does not support the call.

    Example:
      >>> import ato_jax, ato_jax.parallel, functools, jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> kinds = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((jax.device_count(),), ("time",), axis_types=kinds)
      >>> step = functools.partial(
      ...     ato_jax.parallel.gated_delta_rule, axis_name="time", normalize_qk=True
      ... )
      >>> cut = P(None, "time")  # T of [B, T, G, D]
      >>> step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=cut, out_specs=cut))
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16 * jax.device_count(), 4, 8))
      >>> beta = jnp.full(v.shape[:3], 0.5)
      >>> wanted = ato_jax.gated_delta_rule(q, k, v, beta, normalize_qk=True)
      >>> bool(jnp.allclose(step(q, k, v, beta), wanted, atol=1e-4))
      True
    """
    devices = devices_along(axis_name)
    segment_ids = comparable("segment_ids", segment_ids)

    def prepare(lengths: Any) -> api.Request:
        return api.prepare(
            q,
            k,
            v,
            beta,
            decay=decay,
            scale=scale,
            normalize_qk=normalize_qk,
            segment_ids=segment_ids,
            lengths=lengths,
            initial_state=initial_state,
            return_state=return_state,
            layout=layout,
            precision=precision,
            implementation=implementation,
        )

    request = prepare(None)
    sizes = {letter: getattr(request.spec, letter) for letter in "BTGHDV"} | {"T": request.T}
    if lengths is not None:
        whole = sizes | {"T": request.T * devices.count}
        bound = shapes.lengths("lengths", lengths, whole, "T", request.batched)
        check_lengths("lengths", bound, "T", whole["T"])
        part = part_of_lengths(bound, devices.index * request.T, request.T)
        request = prepare(part if request.batched else part.reshape(1))
    ids, _ = bind_segments(segment_ids, None, None, sizes | {"S": request.T}, request.batched)

    def attend(given: tuple[Any, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
        inputs, ids = given
        return _attend(request._replace(inputs=inputs), ids, devices_along(axis_name))

    def partition_of_outputs() -> tuple[Any, Any]:
        out, state = request.inputs.partition_of_outputs(layout)
        return out, state

    out, state = with_automatic_axes(attend, (request.inputs, ids), partition_of_outputs)
    if not request.batched:
        out, state = out[0], state[0]
    return (out, state) if return_state else out


def _run(request: api.Request, **changed: Any) -> tuple[jax.Array, jax.Array]:
    """The operation with other values for some of its inputs, from and to a state."""
    inputs = request.inputs._replace(**changed)
    spec = dataclasses.replace(
        request.spec, V=inputs.v.shape[-1], initial_state=True, return_state=True
    )
    return dispatch.run(api.OP, spec, inputs, request.implementation)


def part_of(request: api.Request, ids: jax.Array | None) -> Part:
    """What this device's steps do to a state. `ids` [B, T] are their segments on all devices."""
    spec, inputs = request.spec, request.inputs
    zeros = jnp.zeros((*inputs.v.shape[:-1], spec.D), inputs.v.dtype)
    nothing = jnp.zeros((spec.B, spec.H, spec.D, spec.V), jnp.float32)
    identity = jnp.broadcast_to(jnp.eye(spec.D), (spec.B, spec.H, spec.D, spec.D))
    _, effect = _run(
        request,
        v=jnp.concatenate([inputs.v, zeros], axis=-1),
        initial_state=jnp.concatenate([nothing, identity], axis=-1),
    )
    ends = empty = None
    if ids is not None:
        ends = jnp.concatenate([ids[:, :1], states.last_of(ids, inputs.lengths)], axis=1)
        empty = None if inputs.lengths is None else inputs.lengths == 0
    return Part(effect, ends, empty)


def _attend(
    request: api.Request, ids: jax.Array | None, devices: Devices
) -> tuple[jax.Array, jax.Array]:
    """The output of this device's steps, and the state after the last step of all devices."""
    spec, inputs = request.spec, request.inputs
    if devices.count == 1:
        out, total = dispatch.run(api.OP, spec, inputs, request.implementation)
    else:
        part, initial = part_of(request, ids), inputs.initial_state
        if initial is None:
            initial = jnp.zeros((spec.B, spec.H, spec.D, spec.V), jnp.float32)
        # A custom derivative gives each cotangent the type of its input.
        given = varying_with((part, initial), (part, initial, devices.index))
        ahead, total = _states(devices.axis, spec.return_state, *given)
        out, _ = _run(request, initial_state=ahead)
    out = lax.slice_in_dim(out, 0, request.T, axis=spec.layout.index("t"))
    return out, devices.same(total) if spec.return_state else total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _states(
    axis: AxisName, returns_total: bool, part: Part, initial: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The state ahead of this device's steps, and that after the last step of all."""
    return _states_forward(axis, returns_total, part, initial)[0]


def _states_forward(axis: AxisName, returns_total: bool, part: Part, initial: jax.Array) -> Any:
    devices = devices_along(axis)
    parts = states.gather(part, devices)
    starts = states.begins(parts.ids, parts.empty)

    def onwards(carry: Any, entry: Any) -> tuple[Any, None]:
        """The state ahead of one device -> that ahead of the next; and the one ahead of here."""
        state, here = carry
        number, starts, effect = entry
        state = _zero_where(starts, state)
        here = jnp.where(number == devices.index, state, here)
        added, kept = jnp.split(effect, [initial.shape[-1]], axis=-1)
        return (added + jnp.matmul(kept, state, precision=EXACT), here), None

    entries = jnp.arange(devices.count, dtype=jnp.int32), starts, parts.effect
    total, ahead = devices.in_turn(onwards, (initial, jnp.zeros_like(initial)), entries)
    kept = parts.effect[..., initial.shape[-1] :]
    return (ahead, total), (kept, starts, ahead)


def _states_backward(
    axis: AxisName, returns_total: bool, residuals: Any, cotangents: Any
) -> tuple[Part, jax.Array]:
    kept, starts, ahead = residuals
    own, after = cotangents
    devices = devices_along(axis)
    if returns_total:  # the devices' cotangents of one state
        after = varying_with(lax.psum(after, axis), own)
    else:
        after = jnp.zeros_like(own)

    def backwards(carry: Any, entry: Any) -> tuple[Any, None]:
        """The cotangent after one device -> that after the one before; and that after here."""
        after, here = carry
        number, starts, kept, own = entry
        here = jnp.where(number == devices.index, after, here)
        before = own + jnp.matmul(kept.mT, after, precision=EXACT)
        return (_zero_where(starts, before), here), None

    entries = jnp.arange(devices.count, dtype=jnp.int32), starts, kept, devices.gather(own)
    first, here = devices.in_turn(
        backwards, (after, jnp.zeros_like(after)), entries, reverse=True
    )
    effect = jnp.concatenate([here, jnp.matmul(here, ahead.mT, precision=EXACT)], axis=-1)
    # The initial state is the same on all devices, and its cotangents there are summed.
    return Part(effect, None, None), jnp.where(devices.index == 0, first, 0)


_states.defvjp(_states_forward, _states_backward)


def _zero_where(starts: jax.Array | None, state: jax.Array) -> jax.Array:
    """The state, 0 where `starts` [B] is true."""
    return state if starts is None else jnp.where(starts[:, None, None, None], 0, state)
