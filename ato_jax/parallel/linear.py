"""Linear attention over a sequence that is cut across devices.

Each device computes the sums over its own keys, one all-gather brings those of all devices to each,
and the single-device operation continues from the state that they add up to (`states.py` has the
mathematics). The backward pass gathers the cotangents of these states.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ato_jax import autodiff
from ato_jax.choosing import UnsupportedError
from ato_jax.ops.common import Integers, Precision, axes, bind_qkv, bind_segments
from ato_jax.ops.linear_attention import api
from ato_jax.ops.linear_attention.api import FeatureMapLike, Request
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState
from ato_jax.parallel import states, walk
from ato_jax.parallel.devices import (
    AxisName,
    Devices,
    comparable,
    devices_along,
    part_of_lengths,
    whole_lengths,
    with_automatic_axes,
    without_batch,
)

NAME = "ato_jax.parallel.linear_attention"


@overload
def linear_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, axis_name: AxisName,
    feature_map: FeatureMapLike = ..., causal: bool = ..., decay: ArrayLike | None = ...,
    normalize: bool | None = ..., scale: float | None = ..., eps: float = ...,
    segment_ids: Integers | None = ..., q_segment_ids: Integers | None = ...,
    kv_segment_ids: Integers | None = ..., q_lengths: Integers | None = ...,
    kv_lengths: Integers | None = ..., initial_state: LinearState | None = ...,
    return_state: Literal[False] = ..., layout: str = ..., precision: Precision = ...,
    implementation: str | None = ...,
) -> jax.Array: ...  # fmt: skip


@overload
def linear_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, axis_name: AxisName,
    feature_map: FeatureMapLike = ..., causal: bool = ..., decay: ArrayLike | None = ...,
    normalize: bool | None = ..., scale: float | None = ..., eps: float = ...,
    segment_ids: Integers | None = ..., q_segment_ids: Integers | None = ...,
    kv_segment_ids: Integers | None = ..., q_lengths: Integers | None = ...,
    kv_lengths: Integers | None = ..., initial_state: LinearState | None = ...,
    return_state: Literal[True], layout: str = ..., precision: Precision = ...,
    implementation: str | None = ...,
) -> tuple[jax.Array, LinearState]: ...  # fmt: skip


def linear_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    axis_name: AxisName,
    feature_map: FeatureMapLike = "elu1",
    causal: bool = False,
    decay: ArrayLike | None = None,
    normalize: bool | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
    segment_ids: Integers | None = None,
    q_segment_ids: Integers | None = None,
    kv_segment_ids: Integers | None = None,
    q_lengths: Integers | None = None,
    kv_lengths: Integers | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    layout: str = "bthd",
    precision: Precision = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, LinearState]:
    """Computes `ato_jax.linear_attention` over a sequence that is cut across devices.

    Call it inside `jax.shard_map`, with T and S cut into contiguous parts of one size along
    `axis_name`: T and S below are the rows of one device, and n T and n S those of the whole
    sequence on n devices. The result is that of the whole sequence. Devices exchange one state
    each, B G F (V + 1) float32 numbers in one all-gather, whatever T is, and as much for the
    gradient; q, k, v and the output stay where they are. (Where queries see both ways, segments and
    a decay need two states a device. With a decay the sums over a device's own keys are computed in
    float32 then, with factors rounded to TF32 where q has 16 bits.)

    Args:
      q: This device's queries [B, T, H, D], as in `ato_jax.linear_attention`. B may be missing.
      k: This device's keys [B, S, G, D].
      v: This device's values [B, S, G, V].
      axis_name: The mesh axis along which the sequence is cut, or a tuple of axes.
      feature_map: As in `ato_jax.linear_attention`; every device gives the same.
      causal: Query i sees key j if and only if j <= i, counted over the whole sequence (T = S).
      decay: As in `ato_jax.linear_attention`: [G], the same on every device, or this device's
        [B, S, G] or [B, S, G, D].
      normalize: As in `ato_jax.linear_attention`, as are `scale` and `eps`.
      scale: Factor of the result for normalize=False.
      eps: The smallest denominator, > 0.
      segment_ids: This device's integers [B, T] (T = S). A segment is one contiguous run, and one
        that ends with a device's last row continues on the next device if the first id there is the
        same.
      q_segment_ids: Refused, like `kv_segment_ids`, unless both are one array, as `segment_ids` is.
      kv_segment_ids: See `q_segment_ids`.
      q_lengths: Integers [B], the lengths of the whole sequence, from 0 to n T, the same on every
        device.
      kv_lengths: Integers [B], from 0 to n S, likewise. Where T = S, giving one gives both.
      initial_state: A `LinearState` ahead of the whole sequence, the same on every device.
      return_state: Return (out, state) in place of out: the state after the last valid key of the
        whole sequence, the same on every device, so that its `out_specs` may be `P()`. It costs one
        more reduction of a state.
      layout: "bthd", or "bhtd" for q, k, v, out [B, H, T, D].
      precision: As in `ato_jax.linear_attention`.
      implementation: As in `ato_jax.linear_attention`, the backend of each device's own rows.

    Returns:
      out [B, T, H, V] of this device's queries; with `return_state` the pair (out, state).

    Raises:
      ValueError: An argument is wrong: no `jax.shard_map` binds `axis_name`, or a shape, dtype or
        value is. The message names the argument, what it was and what it has to be.
      UnsupportedError: `causal` with T != S; `causal`, a decay or segments with different lengths
        of queries and keys; segments of their own for queries and keys; or the backend named by
        `implementation` does not support the call. The message says what to do instead.

    Example:
      >>> import ato_jax, ato_jax.parallel, functools, jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> kinds = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((jax.device_count(),), ("time",), axis_types=kinds)
      >>> attend = functools.partial(
      ...     ato_jax.parallel.linear_attention, axis_name="time", causal=True
      ... )
      >>> cut = P(None, "time")  # T of [B, T, H, D]
      >>> attend = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=cut, out_specs=cut))
      >>> q = k = v = jnp.ones((2, 16 * jax.device_count(), 4, 8))
      >>> out = attend(q, k, v)
      >>> bool(jnp.allclose(out, ato_jax.linear_attention(q, k, v, causal=True), atol=1e-5))
      True
    """
    devices = devices_along(axis_name)
    _, sizes, batched = bind_qkv(q, k, v, layout)
    segment_ids = comparable(
        "segment_ids", _shared_ids(segment_ids, q_segment_ids, kv_segment_ids)
    )
    q_whole, kv_whole, shared = whole_lengths(q_lengths, kv_lengths, sizes, batched, devices)
    q_part, kv_part = (
        None if lengths is None else part_of_lengths(lengths, devices.index * size, size)
        for lengths, size in ((q_whole, sizes["T"]), (kv_whole, sizes["S"]))
    )
    if shared:
        kv_part = q_part
    request = api.prepare(
        q,
        k,
        v,
        feature_map=feature_map,
        causal=causal,
        decay=decay,
        normalize=normalize,
        scale=scale,
        eps=eps,
        segment_ids=segment_ids,
        q_lengths=q_part if batched or q_part is None else q_part.reshape(1),
        kv_lengths=kv_part if batched or kv_part is None else kv_part.reshape(1),
        initial_state=initial_state,
        return_state=return_state,
        layout=layout,
        precision=precision,
        implementation=implementation,
    )
    _refuse(request, shared)
    if devices.count == 1:
        out, state = api.run(request)
        return (out, devices.same(state)) if return_state else out
    ids, _ = bind_segments(segment_ids, None, None, sizes, batched)

    def attend(given: tuple[Inputs, jax.Array | None]) -> Any:
        inputs, ids = given
        found = _attend(request._replace(inputs=inputs), ids, devices_along(axis_name))
        return found if return_state else found[0]

    partition = functools.partial(_partition_of_outputs, request)
    found: Any = with_automatic_axes(attend, (request.inputs, ids), partition)
    return found


def _partition_of_outputs(request: Request) -> Any:
    """The `PartitionSpec` of each array that the call returns, in the structure of its result."""
    out, state = request.inputs.partition_of_outputs(request.spec.layout)
    found = (out, state) if request.spec.return_state else out
    return found if request.batched else without_batch(found)


def _shared_ids(segment_ids: Any, q_segment_ids: Any, kv_segment_ids: Any) -> Any:
    """The ids of queries and keys alike; an UnsupportedError where the two differ."""
    if q_segment_ids is None and kv_segment_ids is None:
        return segment_ids
    if segment_ids is not None:
        raise ValueError("segment_ids cannot be given together with q_segment_ids")
    if q_segment_ids is not kv_segment_ids:
        raise UnsupportedError(
            f"{NAME}: q_segment_ids and kv_segment_ids must be one array; give segment_ids, or "
            "gather k, v and the ids by jax.lax.all_gather(..., tiled=True) and call "
            "ato_jax.linear_attention"
        )
    return q_segment_ids


def _refuse(request: Request, shared: bool) -> None:
    """An UnsupportedError for what a single device alone can do."""
    spec = request.spec
    if spec.causal and spec.T != spec.S:
        raise UnsupportedError(
            f"{NAME}: causal=True needs T = S, got T={spec.T}, S={spec.S}; pad the shorter side "
            "and give its lengths"
        )
    if (spec.causal or spec.decay or spec.segments) and not shared:
        what = "causal=True" if spec.causal else "a decay" if spec.decay else "segment_ids"
        raise UnsupportedError(
            f"{NAME}: {what} needs the same lengths of queries and keys; give one of "
            "q_lengths and kv_lengths"
        )


def _attend(
    request: Request, ids: jax.Array | None, devices: Devices
) -> tuple[jax.Array, LinearState]:
    """The output of this device's queries, and the state after the last key of all devices."""
    spec = request.spec
    if spec.causal or (spec.decay is None and ids is None):
        out, state = walk.attend(request, ids, devices)
        out = out if request.batched else out[0]
    else:
        out, state = _both_ways(request, ids, devices)
    if spec.return_state:
        state = devices.same(state)
        if not request.batched:
            state = jax.tree.map(lambda array: array[0], state)
    return out, state


def _both_ways(
    request: Request, ids: jax.Array | None, devices: Devices
) -> tuple[jax.Array, LinearState]:
    """`_attend` where queries see both ways, with a decay or segments: two states around them."""
    spec, inputs = request.spec, request.inputs
    initial = inputs.initial_state
    if initial is None:
        rows = (spec.B, spec.G, spec.F)
        initial = LinearState(jnp.zeros((*rows, spec.V), jnp.float32), jnp.zeros(rows, jnp.float32))
    parts = states.gather(states.part_of(spec, inputs, ids), devices)
    found = states.around(spec, parts, initial, devices)
    ahead, behind = found.ahead, found.behind
    assert behind is not None
    if spec.decay is None:
        assert inputs.kv_segments is not None
        last = states.last_of(inputs.kv_segments, inputs.kv_lengths)  # [B, 1]
        # Where one segment has all rows, its queries see the states on both sides.
        ahead = states.plus(ahead, states.zero_where(last[:, 0] != 0, behind))
    spec = dataclasses.replace(spec, initial_state=True, return_state=False)
    here = request._replace(spec=spec, inputs=inputs._replace(initial_state=ahead))
    if spec.decay is not None:
        return _with_later_rows(here, behind), found.total
    out, _ = api.run(here)
    return _with_last_segment(request, parts, behind, out, devices), found.total


def _with_last_segment(
    request: Request, parts: states.Part, behind: LinearState, out: jax.Array, devices: Devices
) -> jax.Array:
    """`out`, with the queries of this device's last segment reading the sums over all of it.

    The operation adds its initial state to the first segment alone. Here every query reads one
    state and no key, and those of the last segment are taken.
    """
    spec, inputs = request.spec, request.inputs
    own = jax.tree.map(lambda array: array[devices.index], parts.state)
    run: Any = inputs.kv_segments
    last = states.last_of(run, inputs.kv_lengths)
    # One key, which is padding.
    time = spec.layout.index("t")
    k, v = (lax.slice_in_dim(array, 0, 1, axis=time) for array in (inputs.k, inputs.v))
    reading, _ = api.run(
        request._replace(
            spec=dataclasses.replace(
                spec, S=1, segments=None, kv_lengths=True, offset=None, initial_state=True,
                return_state=False,
            ),
            inputs=inputs._replace(
                k=k,
                v=v,
                q_segments=None,
                kv_segments=None,
                kv_lengths=jnp.zeros(spec.B, jnp.int32),
                initial_state=states.plus(own, behind),
            ),
        )
    )  # fmt: skip
    in_last = states.over_rows((run == last) & (last != 0), spec)
    in_last = in_last[:, : request.T] if time == 1 else in_last[:, :, : request.T]
    return jnp.where(in_last if request.batched else in_last[0], reading, out)


def _with_later_rows(request: Request, behind: LinearState) -> jax.Array:
    """The output of this device's queries, from its keys, the state ahead and the one `behind`.

    The operation takes the state ahead, which decays from the first row on, and no other. So it
    gives sums that are not normalised, with the normaliser as one more column, in float32, and what
    later devices hold is added to them:

        phi(q_i) exp(sum of the decays after i) (state behind)      i in the last segment
    """
    spec, inputs = request.spec, request.inputs
    given = inputs.v.dtype
    exact = spec.dtype == "float32" and spec.precision == "exact"
    sums_spec = dataclasses.replace(
        spec, V=spec.V + 1, dtype="float32", normalize=False, scale=1.0,
        precision="exact" if exact else "tf32",
    )  # fmt: skip
    q, k, v = (array.astype(jnp.float32) for array in (inputs.q, inputs.k, inputs.v))
    v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
    assert inputs.initial_state is not None
    found, _ = api.run(request._replace(
        spec=sums_spec,
        inputs=inputs._replace(
            q=q, k=k, v=v, initial_state=api.with_sums(inputs.initial_state)
        ),
    ))  # fmt: skip
    later = _read_behind(spec, inputs, api.with_sums(behind).kv)
    found = found + (later if request.batched else later[0])
    num, den = found[..., :-1], found[..., -1:]
    if spec.normalize:
        return autodiff.quotient(num, jnp.maximum(den, spec.eps)).astype(given)
    return (spec.scale * num).astype(given)


@functools.partial(jax.checkpoint, static_argnums=0)
def _read_behind(
    spec: LinearAttentionSpec, inputs: Inputs, kv: jax.Array
) -> jax.Array:
    """The terms that the state behind adds to the sums of this device's queries, [B, T, H, V + 1]
    float32.

    The derivative maps the queries to features again, in place of keeping these.
    """
    time = axes(spec.layout, "BSG").index("S")
    # T = S, and queries and keys have one length and one segment.
    counted = states.runs(spec, inputs)[1]

    def only(array: jax.Array) -> jax.Array:
        return array if counted is None else jnp.where(states.over_rows(counted, spec), array, 0)

    q = only(spec.feature_map(only(inputs.q).astype(jnp.float32), *inputs.feature_parameters))
    heads = time ^ 3  # 2 or 1
    q = q.reshape(*q.shape[:heads], spec.G, -1, *q.shape[heads + 1 :])  # H as [G, H // G]
    decay = states.decays(spec, inputs)
    assert decay is not None
    q = q * jnp.expand_dims(jnp.exp(states.after(decay, time)), heads + 1)
    rows = axes(spec.layout, "bsg").replace("g", "gr")
    exact = spec.dtype == "float32" and spec.precision == "exact"
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    found = jnp.einsum(f"{rows}f,bgfv->{rows}v", q, kv, precision=precision)
    return found.reshape(*found.shape[:heads], spec.H, *found.shape[heads + 2 :])
