"""Softmax attention over a sequence that is cut across devices.

Either every device gathers all keys and values, and calls the single-device operation once for each
of its chunks of queries; or keys and values go around a ring of devices (`ring.py`).
"""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ato_jax import device, meshes, shapes
from ato_jax.choosing import UnsupportedError
from ato_jax.meshes import sharded, varying_with
from ato_jax.ops.attention import api
from ato_jax.ops.attention.api import Window
from ato_jax.ops.attention.pieces import combine
from ato_jax.ops.common import Integers, Precision, bind_qkv, bind_segments
from ato_jax.parallel.devices import (
    AxisName,
    comparable,
    devices_along,
    part_of_lengths,
    whole_lengths,
    with_automatic_axes,
)
from ato_jax.parallel.pieces import Plan, Rows, attend, in_order
from ato_jax.parallel.ring import ring

NAME = "ato_jax.parallel.attention"
SCHEDULES = ("all_gather", "ring")
ORDERS = ("contiguous", "zigzag")


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, axis_name: AxisName, schedule: str = ...,
    order: str = ..., causal: bool = ..., window: Window | None = ...,
    query_offset: Integers | None = ..., bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ..., segment_ids: Integers | None = ...,
    q_segment_ids: Integers | None = ..., kv_segment_ids: Integers | None = ...,
    q_lengths: Integers | None = ..., kv_lengths: Integers | None = ...,
    softcap: float | None = ..., sinks: ArrayLike | None = ..., scale: float | None = ...,
    dropout_rate: float = ..., dropout_key: jax.Array | None = ...,
    return_lse: Literal[False] = ..., layout: str = ..., precision: Precision = ...,
    implementation: str | None = ...,
) -> jax.Array: ...  # fmt: skip


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, axis_name: AxisName, schedule: str = ...,
    order: str = ..., causal: bool = ..., window: Window | None = ...,
    query_offset: Integers | None = ..., bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ..., segment_ids: Integers | None = ...,
    q_segment_ids: Integers | None = ..., kv_segment_ids: Integers | None = ...,
    q_lengths: Integers | None = ..., kv_lengths: Integers | None = ...,
    softcap: float | None = ..., sinks: ArrayLike | None = ..., scale: float | None = ...,
    dropout_rate: float = ..., dropout_key: jax.Array | None = ...,
    return_lse: Literal[True], layout: str = ..., precision: Precision = ...,
    implementation: str | None = ...,
) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    axis_name: AxisName,
    schedule: str = "all_gather",
    order: str = "contiguous",
    causal: bool = False,
    window: Window | None = None,
    query_offset: Integers | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    segment_ids: Integers | None = None,
    q_segment_ids: Integers | None = None,
    kv_segment_ids: Integers | None = None,
    q_lengths: Integers | None = None,
    kv_lengths: Integers | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    return_lse: bool = False,
    layout: str = "bthd",
    precision: Precision = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes `ato_jax.attention` over a sequence that is cut across devices.

    Call it inside `jax.shard_map`, with T and S cut into n parts of one size along `axis_name`: T
    and S below are the rows of one device, and n T and n S those of the whole sequence on n
    devices. The result is that of the whole sequence.

    With `schedule="all_gather"` every device holds all keys and values for the time of the call,
    and their gradients are summed by a reduce-scatter. With "ring" it holds those of two devices:
    they travel from device to device, under the attention to those that are there already, and once
    more for the gradient.

    Args:
      q: This device's queries [B, T, H, D], as in `ato_jax.attention`. B may be missing.
      k: This device's keys [B, S, G, D].
      v: This device's values [B, S, G, V].
      axis_name: The mesh axis along which the sequence is cut, or a tuple of axes.
      schedule: "all_gather", or "ring" where all keys and values do not fit on a device.
      order: "contiguous": device d has rows d T to (d + 1) T of the sequence. "zigzag": the
        sequence was put into the order of `ato_jax.parallel.zigzag`, in which causal attention
        takes each device the same time; so are the ids, and so is the result.
      causal: As in `ato_jax.attention`, counted over the whole sequence, as are the windows,
        offsets and lengths that follow.
      window: (left, right).
      query_offset: An int or integers [B], the same on every device: the position of the first
        query of the whole sequence.
      bias: Floats that broadcast to [B, H, T, n S]: this device's queries, in their order, and all
        keys in the sequence's own order. With "all_gather" alone.
      mask: Booleans that broadcast to [B, H, T, n S], likewise.
      segment_ids: This device's integers [B, T], for queries and keys alike (T = S).
      q_segment_ids: This device's integers [B, T], together with `kv_segment_ids`.
      kv_segment_ids: This device's integers [B, S].
      q_lengths: Integers [B], the lengths of the whole sequence, from 0 to n T, the same on every
        device.
      kv_lengths: Integers [B], from 0 to n S, likewise. Where T = S, giving one gives both.
      softcap: c > 0.
      sinks: Floats [H], the same on every device.
      scale: D ** -0.5 unless given.
      dropout_rate: As in `ato_jax.attention`.
      dropout_key: JAX random key, the same on every device along `axis_name`. The weights that are
        dropped are those of the whole sequence on one device, in either order. Batch entries and
        heads count from this device's first: where these are cut, too, give each part its own key.
      return_lse: Return (out, lse) in place of out.
      layout: "bthd", or "bhtd" for q, k, v, out [B, H, T, D] and lse [B, H, T].
      precision: As in `ato_jax.attention`.
      implementation: As in `ato_jax.attention`, the backend of each piece.

    Returns:
      out [B, T, H, V] of this device's queries in v's dtype; with `return_lse` the pair (out, lse),
      lse [B, T, H] float32.

    Raises:
      ValueError: An argument is wrong: no `jax.shard_map` binds `axis_name`, or a shape, dtype or
        value is. The message names the argument, what it was and what it has to be.
      UnsupportedError: A bias or a mask with `schedule="ring"`; or the backend named by
        `implementation` does not support the call. The message says what to do instead.

    Example:
      >>> import ato_jax, ato_jax.parallel, functools, jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> n, kinds = jax.device_count(), (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((n,), ("time",), axis_types=kinds)
      >>> attend = functools.partial(
      ...     ato_jax.parallel.attention, axis_name="time", schedule="ring", order="zigzag",
      ...     causal=True,
      ... )
      >>> cut = P(None, "time")  # T of [B, T, H, D]
      >>> attend = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=cut, out_specs=cut))
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16 * n, 4, 8))
      >>> out = attend(*(ato_jax.parallel.zigzag(x, n) for x in (q, k, v)))
      >>> out = ato_jax.parallel.unzigzag(out, n)
      >>> bool(jnp.allclose(out, ato_jax.attention(q, k, v, causal=True), atol=1e-5))
      True
    """
    devices = devices_along(axis_name)
    shapes.one_of("schedule", schedule, SCHEDULES)
    shapes.one_of("order", order, ORDERS)
    given = q, k, v
    (q, k, v), sizes, batched = bind_qkv(q, k, v, layout)
    causal, return_lse = shapes.flag("causal", causal), shapes.flag("return_lse", return_lse)
    left, right = api.bounds(causal, window)
    _refuse(schedule, bias, mask)
    dropout_rate, seed = api.bind_dropout(dropout_rate, dropout_key)
    for letter in "TS":
        if order == "zigzag" and sizes[letter] % 2:
            raise ValueError(
                f"order='zigzag' needs an even {letter} on each device, two chunks, got "
                f"{letter}={sizes[letter]}; pad the sequence to a multiple of 2 * devices rows"
            )
    q_whole, kv_whole, shared = whole_lengths(q_lengths, kv_lengths, sizes, batched, devices)
    same_ids = q_segment_ids is kv_segment_ids
    q_segment_ids, kv_segment_ids = (
        comparable("q_segment_ids", q_segment_ids), comparable("kv_segment_ids", kv_segment_ids)
    )  # fmt: skip
    q_ids, kv_ids = bind_segments(
        comparable("segment_ids", segment_ids),
        q_segment_ids,
        q_segment_ids if same_ids else kv_segment_ids,
        sizes,
        batched,
    )
    if devices.count == 1:
        # The whole sequence is here, and its zigzag order is its own.
        alone = functools.partial(
            api.attention, *given, causal=causal, window=window, query_offset=query_offset,
            bias=bias, mask=mask, segment_ids=segment_ids, q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids, q_lengths=q_lengths, kv_lengths=kv_lengths,
            softcap=softcap, sinks=sinks, scale=scale, dropout_rate=dropout_rate,
            dropout_key=dropout_key, layout=layout, precision=precision,
            implementation=implementation,
        )  # fmt: skip
        return alone(return_lse=True) if return_lse else alone()
    sinks = api.bind_sinks(sinks, sizes)
    plan = Plan(
        axis=devices.axis,
        chunks=2 if order == "zigzag" else 1,
        T=sizes["T"],
        S=sizes["S"],
        left=left,
        right=right,
        options=(
            ("softcap", None if softcap is None else shapes.positive("softcap", softcap)),
            ("scale", None if scale is None else shapes.scale(scale)),
            ("dropout_rate", dropout_rate),
            ("precision", precision),
            ("implementation", implementation),
        ),
        layout=layout,
        interpret=device.interpreting(),
    )
    offset = _offset(query_offset, q_whole, kv_whole, shared, sizes, batched, devices.count)
    rows = Rows(q_ids, kv_ids, q_whole, kv_whole, offset, seed)

    def attend_here(given: Any) -> tuple[jax.Array, Any]:
        arrays, more = given
        if schedule == "ring":
            return _by_ring(plan, arrays, more["sinks"])
        return _by_all_gather(plan, arrays, return_lse, more)

    def partition_of_outputs() -> tuple[Any, Any]:
        of_rows = meshes.partition(q)[:3]
        with_lse = return_lse or schedule == "ring"
        return sharded(*of_rows, None), sharded(*of_rows) if with_lse else None

    more = {"bias": _summed_exactly(bias), "mask": mask, "sinks": sinks}
    out, lse = with_automatic_axes(attend_here, ((q, k, v, rows), more), partition_of_outputs)
    if not batched:
        out, lse = jax.tree.map(lambda array: array[0], (out, lse))
    return (out, lse) if return_lse else out


def _summed_exactly(bias: Any) -> Any:
    """A bias that all devices share as float32, so that parts of its gradient are added in it.

    Rounded to 16 bits each, parts that nearly cancel would leave an error of several percent.
    """
    if bias is None:
        return None
    bias = shapes.as_array("bias", bias)
    shared = bias.ndim < 2 or bias.shape[-2] == 1
    return bias.astype(jnp.float32) if shared and bias.dtype.itemsize < 4 else bias


def _refuse(schedule: str, bias: Any, mask: Any) -> None:
    """An UnsupportedError for what a single device alone can do."""
    for name, array in (("bias", bias), ("mask", mask)):
        if schedule == "ring" and array is not None:
            raise UnsupportedError(f"{NAME}: {name} needs schedule='all_gather'")


def _offset(
    query_offset: Any,
    q_whole: jax.Array | None,
    kv_whole: jax.Array | None,
    shared: bool,
    sizes: dict[str, int],
    batched: bool,
    count: int,
) -> jax.Array:
    """The position of the first query of all among the keys, [B]."""
    static, found = api.bind_offset(query_offset, sizes, batched)
    if found is not None:
        return found
    if static is None and shared:
        static = 0
    if static is None:
        queries = count * sizes["T"] if q_whole is None else q_whole
        keys = count * sizes["S"] if kv_whole is None else kv_whole
        return jnp.broadcast_to(jnp.asarray(keys - queries, jnp.int32), (sizes["B"],))
    return jnp.full(sizes["B"], static, jnp.int32)


def _by_all_gather(
    plan: Plan, arrays: Any, return_lse: bool, more: dict[str, Any]
) -> tuple[jax.Array, Any]:
    """out and, where it is asked for, lse of this device's queries to the gathered keys."""
    q, k, v, rows = arrays
    devices = plan.devices

    def all_of(array: jax.Array, axis: int) -> jax.Array:
        array = varying_with(array, devices.index)
        gathered = lax.all_gather(array, devices.axis, axis=axis, tiled=True)
        return in_order(plan, gathered, axis)

    k, v = all_of(k, plan.time), all_of(v, plan.time)
    if rows.kv_ids is not None:
        rows = rows._replace(kv_ids=all_of(rows.kv_ids, 1))
    found = []
    for number, (chunk, start) in enumerate(
        zip(plan.cut(q, plan.time), plan.starts(devices.index, plan.T), strict=True)
    ):
        ids = None if rows.q_ids is None else plan.cut(rows.q_ids, 1)[number]
        own = {name: _rows_of(plan, name, array, number) for name, array in more.items()}
        one = attend(
            plan, rows._replace(q_ids=ids), chunk, k, v, (start, 0), return_lse=return_lse, **own
        )
        found.append(one if return_lse else (one, None))
    outs, lses = zip(*found, strict=True)
    join = lambda parts: jnp.concatenate(parts, axis=plan.time)  # noqa: E731
    return join(outs), join(lses) if return_lse else None


def _rows_of(plan: Plan, name: str, array: Any, number: int) -> Any:
    """The rows of a bias or mask for one chunk of queries; sinks as they are."""
    if array is None or name == "sinks" or plan.chunks == 1:
        return array
    array = shapes.as_array(name, array)
    if array.ndim < 2 or array.shape[-2] == 1:
        return array
    if array.shape[-2] != plan.T:
        raise ValueError(
            f"{name} must broadcast to [B, H, T, n S] with T={plan.T}, got shape {array.shape}"
        )
    return plan.cut(array, array.ndim - 2)[number]


def _by_ring(plan: Plan, arrays: Any, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    q, _, v, rows = arrays
    # A custom derivative gives each cotangent the type of its input.
    out, lse = ring(plan, varying_with(arrays, (arrays, plan.devices.index)))
    if sinks is not None:
        letters = "bth" if plan.layout == "bthd" else "bht"
        logits = jnp.broadcast_to(sinks if letters[-1] == "h" else sinks[:, None], lse.shape)
        if rows.q_lengths is not None:
            # Padded queries give the sinks no gradient.
            asked = _asked(plan, rows.q_lengths)
            asked = asked[..., None] if letters[-1] == "h" else asked[:, None]
            logits = jnp.where(asked, logits, lax.stop_gradient(logits))
        # One more part, which has a weight and no value.
        out, lse = combine(
            [out, jnp.zeros_like(out)], [lse, varying_with(logits, lse)], layout=plan.layout
        )
    return out.astype(v.dtype), lse


def _asked(plan: Plan, q_lengths: jax.Array) -> jax.Array:
    """Which of this device's queries are no padding, [B, T]."""
    size = plan.T // plan.chunks
    return jnp.concatenate(
        [
            jnp.arange(size, dtype=jnp.int32) < part_of_lengths(q_lengths, start, size)[:, None]
            for start in plan.starts(plan.devices.index, plan.T)
        ],
        axis=1,
    )
