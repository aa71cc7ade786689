"""The states of linear attention on each device, and what they add up to.

The keys of device d add S_d to a causal state and leave M_d of the state ahead of them:

    S_d = sum_j exp(sum of the decays after step j) phi(k_j) v_j^T      over d's last segment
    M_d = exp(sum of all decays), or 0 where a segment begins within d's rows

    state ahead of d + 1 = M_d (state ahead of d) + S_d

A segment that begins with d's first row makes the state ahead of d zero. Both ways, a query sees
its segment on both sides. With segments or a decay, the part on the devices after d is a second
state, made from the sums over the first segment of each device, from the last device to the first:

    F_d = sum_j exp(sum of the decays from d's first row to j) phi(k_j) v_j^T

    state behind d - 1 = F_d + M_d (state behind d)

One all-gather brings S_d, M_d and the ids of the first and the last key to every device, and every
device computes the sums that it needs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax.meshes import varying_with
from ato_jax.ops.common import axes
from ato_jax.ops.linear_attention.decay import LEAST_DECAY
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState
from ato_jax.parallel.devices import Devices

PartT = TypeVar("PartT")


class Part(NamedTuple):
    """What the keys of one device do to a state; None for what the call has no use for.

    `gather` adds an axis of devices in front.
    """

    state: LinearState  # S, of the last segment
    first: LinearState | None  # of the first segment
    keeps: jax.Array | None  # M, [B, 1 or G, 1 or F] float32
    ids: jax.Array | None  # [B, 2] int32, of the first and of the last key
    empty: jax.Array | None  # [B] bool, whether all of its rows are padding


class Around(NamedTuple):
    """The states around one device's rows."""

    ahead: LinearState  # of the first segment here, on earlier devices and in the initial state
    behind: LinearState | None  # of the last segment here, on later devices, from their first row
    total: LinearState  # after the last key of all


def over_rows(mask: jax.Array, spec: LinearAttentionSpec) -> jax.Array:
    """[B, S] -> [B, S, 1, 1] or, as the layout has it, [B, 1, S, 1]."""
    return mask[:, :, None, None] if spec.layout == "bthd" else mask[:, None, :, None]


def within_lengths(spec: LinearAttentionSpec, inputs: Inputs) -> jax.Array | None:
    """Which keys are no padding, [B, S]; None for all."""
    if inputs.kv_lengths is None:
        return None
    return jnp.arange(spec.S, dtype=jnp.int32) < inputs.kv_lengths[:, None]


def both(one: jax.Array | None, other: jax.Array | None) -> jax.Array | None:
    """one & other, None being true everywhere."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def runs(spec: LinearAttentionSpec, inputs: Inputs) -> tuple[jax.Array | None, jax.Array | None]:
    """Which keys are of the first run and which are of the last, [B, S]; None for all."""
    real, run = within_lengths(spec, inputs), inputs.kv_segments
    if run is None:
        return real, real
    return both(real, run == 0), both(real, run == last_of(run, inputs.kv_lengths))


def last_of(rows: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """rows [B, S] -> [B, 1], the last one within the lengths, or the first where there is none."""
    if lengths is None:
        return rows[:, -1:]
    return jnp.take_along_axis(rows, jnp.maximum(lengths - 1, 0)[:, None], axis=1)


@functools.partial(jax.checkpoint, static_argnums=(0, 1))
def sums(
    spec: LinearAttentionSpec, from_start: bool, inputs: Inputs, counted: jax.Array | None
) -> LinearState:
    """S over the keys for which `counted` [B, S] is true, None for all; F with `from_start`.

    The derivative maps the keys to features again, in place of keeping these.
    """
    time = axes(spec.layout, "BSG").index("S")

    def only(array: jax.Array) -> jax.Array:
        return array if counted is None else jnp.where(over_rows(counted, spec), array, 0)

    # Masked ahead of phi, so that NaN in padding reaches nothing, and behind it, as phi(0) may not
    # be 0.
    k = only(inputs.k).astype(jnp.float32)
    k = only(spec.feature_map(k, *inputs.feature_parameters))  # [B, S, G, F]
    v = only(inputs.v).astype(jnp.float32)  # [B, S, G, V]
    decay = decays(spec, inputs)
    if decay is not None:
        # Keys that are not counted are 0 in k.
        k = k * jnp.exp(lax.cumsum(decay, time) if from_start else after(decay, time))
    rows = axes(spec.layout, "bsg")
    exact = spec.dtype == "float32" and spec.precision == "exact"
    kv = jnp.einsum(
        f"{rows}f,{rows}v->bgfv",
        k,
        v,
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
    )
    return LinearState(kv, jnp.sum(k, axis=time))


def after(decay: jax.Array, time: int) -> jax.Array:
    """The sums of the decays of later rows: a difference of sums over earlier ones would cancel."""
    later = lax.cumsum(decay, time, reverse=True)
    later = lax.slice_in_dim(later, 1, decay.shape[time], axis=time)
    return jnp.pad(later, [(0, int(axis == time)) for axis in range(decay.ndim)])


def decays(spec: LinearAttentionSpec, inputs: Inputs) -> jax.Array | None:
    """[B, S, G, 1 or F] in the layout, 0 in padding, bounded as in all backends."""
    if inputs.decay is None:
        return None
    decay = inputs.decay
    if spec.decay == "head":
        shape = axes(spec.layout, "BSG")
        decay = jnp.broadcast_to(
            decay if shape[-1] == "G" else decay[:, None],
            tuple(getattr(spec, letter) for letter in shape),
        )
    if spec.decay != "channel":
        decay = decay[..., None]
    decay = jnp.maximum(decay, LEAST_DECAY)
    real = within_lengths(spec, inputs)
    return decay if real is None else jnp.where(over_rows(real, spec), decay, 0)


def part_of(
    spec: LinearAttentionSpec,
    inputs: Inputs,
    ids: jax.Array | None,
    state: LinearState | None = None,
) -> Part:
    """What this device's keys do to a state. `ids` [B, S] are the keys' segments on all devices.

    `state` is S where it is known.
    """
    of_first, of_last = runs(spec, inputs)
    state = sums(spec, False, inputs, of_last) if state is None else state
    first = keeps = ends = empty = None
    decay = decays(spec, inputs)
    if decay is not None:
        keeps = jnp.exp(jnp.sum(decay, axis=axes(spec.layout, "BSG").index("S")))
    if ids is not None:
        assert inputs.kv_segments is not None
        whole = last_of(inputs.kv_segments, inputs.kv_lengths) == 0  # [B, 1], no segment begins
        kept = jnp.float32(1) if keeps is None else keeps  # float32 under x64, too
        keeps = jnp.where(whole[..., None], kept, 0)
        ends = jnp.concatenate([ids[:, :1], last_of(ids, inputs.kv_lengths)], axis=1)
        if inputs.kv_lengths is not None:
            empty = inputs.kv_lengths == 0
    if not spec.causal and keeps is not None:
        first = sums(spec, True, inputs, of_first)
    return Part(state, first, keeps, ends, empty)


def gather(part: PartT, devices: Devices) -> PartT:
    """The parts of all devices, whose arrays begin with B, by one all-gather of float32 [B, N]."""
    leaves, structure = jax.tree.flatten(part)
    B = len(leaves[0])
    columns = []
    for leaf in leaves:
        found = leaf.reshape(B, -1)
        if leaf.dtype == jnp.int32:  # two halves, each of which float32 holds
            found = jnp.concatenate([found >> 16, found & 0xFFFF], axis=1)
        columns.append(found.astype(jnp.float32))
    everything = devices.gather(jnp.concatenate(columns, axis=1))  # [devices, B, N]
    gathered, start = [], 0
    for leaf, column in zip(leaves, columns, strict=True):
        found = everything[..., start : start + column.shape[1]]
        start += column.shape[1]
        if leaf.dtype == jnp.int32:
            high, low = jnp.split(found.astype(jnp.int32), 2, axis=2)
            found = (high << 16) | low
        gathered.append(found.astype(leaf.dtype).reshape(devices.count, *leaf.shape))
    found_part: PartT = jax.tree.unflatten(structure, gathered)
    return found_part


def begins(ids: jax.Array | None, empty: jax.Array | None) -> jax.Array | None:
    """Whether a segment begins with the first key of each device, [devices, B]; None: nowhere."""
    if ids is None:
        return None
    changed = ids[1:, :, 0] != ids[:-1, :, 1]
    first = jnp.zeros_like(changed[:1])  # continues the initial state
    changed = jnp.concatenate([first, changed])
    return changed if empty is None else changed & ~empty


def zero_where(mask: jax.Array | None, state: LinearState) -> LinearState:
    """The state, 0 where mask [B] is true."""
    if mask is None:
        return state
    return LinearState(
        jnp.where(mask[:, None, None, None], 0, state.kv),
        jnp.where(mask[:, None, None], 0, state.k_sum),
    )


def times(factor: jax.Array | None, state: LinearState) -> LinearState:
    """factor [B, 1 or G, 1 or F] times the state; None is 1."""
    if factor is None:
        return state
    return LinearState(factor[..., None] * state.kv, factor * state.k_sum)


def plus(one: LinearState, other: LinearState) -> LinearState:
    return LinearState(one.kv + other.kv, one.k_sum + other.k_sum)


def pick(wanted: jax.Array, one: LinearState, other: LinearState) -> LinearState:
    """One state where the scalar `wanted` is true, the other elsewhere."""
    found: LinearState = jax.tree.map(functools.partial(jnp.where, wanted), one, other)
    return found


def others(gathered: LinearState, devices: Devices) -> LinearState:
    """The sum of other devices' states: a difference of sums would lose small ones."""

    def of_one(array: jax.Array) -> jax.Array:
        here = jnp.arange(devices.count, dtype=jnp.int32) == devices.index
        here = jnp.expand_dims(here, tuple(range(1, array.ndim)))
        return jnp.sum(jnp.where(here, 0, array), axis=0)

    found: LinearState = jax.tree.map(of_one, gathered)
    return found


def around(
    spec: LinearAttentionSpec, parts: Part, initial: LinearState, devices: Devices
) -> Around:
    """The states around this device's rows, from the parts of all."""
    index, numbers = devices.index, jnp.arange(devices.count, dtype=jnp.int32)
    if not spec.causal and parts.first is None:
        ahead = plus(initial, others(parts.state, devices))
        own = jax.tree.map(lambda array: array[index], parts.state)
        return Around(ahead, None, plus(ahead, own))

    starts = begins(parts.ids, parts.empty)
    initial, zero = varying_with((initial, jax.tree.map(jnp.zeros_like, initial)), parts)

    def rightwards(carry: Any, entry: Any) -> tuple[Any, None]:
        """The state ahead of one device -> that ahead of the next; and the one ahead of here."""
        state, here = carry
        number, starts, part = entry
        state = zero_where(starts, state)
        here = pick(number == index, state, here)
        return (plus(times(part.keeps, state), part.state), here), None

    entries = numbers, starts, parts
    carry = varying_with((initial, zero), (initial, entries, index))
    total, ahead = devices.in_turn(rightwards, carry, entries)
    if spec.causal:
        return Around(ahead, None, total)

    def leftwards(carry: Any, entry: Any) -> tuple[Any, None]:
        """The sums behind one device -> those behind the one before; and those behind here."""
        state, here = carry
        number, starts, part = entry
        here = pick(number == index, state, here)
        state = zero_where(starts, plus(part.first, times(part.keeps, state)))
        return (state, here), None

    carry = varying_with((zero, zero), (initial, entries, index))
    _, behind = devices.in_turn(leftwards, carry, entries, reverse=True)
    return Around(ahead, behind, total)
