"""Softmax attention: the spec of a call, its arrays, and the rules that all backends share."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ato_jax import backend
from ato_jax.meshes import partition, sharded

Broadcast = tuple[bool, bool, bool, bool]

# Units of `Outputs.rest`, as a share of the rounded number: rounding changes it by at most half a
# unit in the last place, which is 127 of these.
REST_UNITS = {"bfloat16": 2.0**-8 / 127, "float16": 2.0**-11 / 127}

# A softcap's slope, 1 - tanh^2, counts as 0 below this, half of float64's epsilon, so that a
# saturated score has no gradient in any precision.
SMALLEST_SLOPE = 2.0**-53

# A fault of all of a query's weights that leaves its gradients half of float16's budget.
SMALLEST_CORRECTION = 2.0**-11

# A sink's gradient is one sum over the queries of its head, which may happen to cancel. In the norm
# of the gradients of more heads than these, one that does counts for nothing.
FEW_HEADS = 8

# Larger than any distance between positions; the sum of two fits int32.
FAR = (1 << 30) - 1


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Everything static about one call.

    Attributes:
      left, right: the bounds of the keys around a query's position, None for no bound; `causal` is
        `right = 0`.
      offset: the position of query 0 among the keys; None where it follows from `query_offset` or
        the lengths and is known only at run time.
      bias, mask: for each axis of [B, H, T, S], whether the array has its full size; False means
        size 1, broadcast. None where there is no such array.
      query_offset, segments, q_lengths, kv_lengths, sinks: whether the arrays are given.
      keep_rest: whether the outputs hold `Outputs.rest`.
    """

    B: int
    T: int
    S: int
    H: int
    G: int
    D: int
    V: int
    dtype: str
    scale: float
    layout: str = "bthd"
    left: int | None = None
    right: int | None = None
    offset: int | None = 0
    query_offset: bool = False
    bias: Broadcast | None = None
    mask: Broadcast | None = None
    segments: bool = False
    q_lengths: bool = False
    kv_lengths: bool = False
    softcap: float | None = None
    sinks: bool = False
    dropout_rate: float = 0.0
    return_lse: bool = False
    precision: str = "exact"
    keep_rest: bool = False

    def for_backward(self) -> AttentionSpec:
        """The spec of a forward pass whose outputs a backward pass reads."""
        return dataclasses.replace(self, keep_rest=self.dtype != "float32")

    def traits(self) -> dict[str, Any]:
        """The facts that block sizes may depend on."""
        return {
            "dtype": self.dtype,
            "D": self.D,
            "V": self.V,
            "causal": self.right == 0,
            "window": self.left is not None or self.right not in (None, 0),
            "bias": _extent(self.bias),
            "mask": _extent(self.mask),
            "segments": self.segments,
            "softcap": self.softcap is not None,
            "dropout": self.dropout_rate > 0,
            "grouped": self.H > self.G,
            "precision": self.precision,
        }


def _extent(full: Broadcast | None) -> str:
    """Whether a bias or mask has an element for every pair, which costs memory and loads."""
    if full is None:
        return "none"
    return "pairs" if full[2] and full[3] else "broadcast"


class Inputs(NamedTuple):
    """The arrays of one call, in `spec.layout`; optional ones that are not given are None."""

    q: jax.Array  # [B, T, H, D]
    k: jax.Array  # [B, S, G, D]
    v: jax.Array  # [B, S, G, V]
    bias: jax.Array | None = None  # [B|1, H|1, T|1, S|1]
    mask: jax.Array | None = None  # [B|1, H|1, T|1, S|1] bool
    sinks: jax.Array | None = None  # [H] float32
    q_segments: jax.Array | None = None  # [B, T] int32
    kv_segments: jax.Array | None = None  # [B, S] int32
    q_lengths: jax.Array | None = None  # [B] int32
    kv_lengths: jax.Array | None = None  # [B] int32
    query_offset: jax.Array | None = None  # [B] int32
    dropout_seed: jax.Array | None = None  # [2] or [6] uint32, as `dropout_keep` reads it

    def partition_of_outputs(self, layout: str) -> Outputs:
        """`Outputs` with a `PartitionSpec` in place of each array."""
        rows = partition(self.q)[:3]
        return Outputs(sharded(*rows, None), sharded(*rows))


class Outputs(NamedTuple):
    """The outputs of a forward pass. `lse`'s cotangent is zero unless `spec.return_lse`.

    `rest` is the part of `out` that rounding removed, from backends that keep it. The gradients are
    made of do . v_j - do . out, which nearly cancels where one key has almost all of a query's
    weight. The forward pass of `triton.wide` keeps its products in `rest` instead, which only its
    own backward pass reads.
    """

    out: jax.Array  # [B, T, H, V], v's dtype
    lse: jax.Array  # [B, T, H] float32 ([B, H, T] with layout "bhtd")
    rest: jax.Array | None = None  # [B, T, H, V] int8, in `REST_UNITS` of out

    def plain(self) -> Outputs:
        """`out` and `lse`, without what only a backward pass reads."""
        return self._replace(rest=None)


def rest_in_units(spec: AttentionSpec, exact: jax.Array, rounded: jax.Array) -> jax.Array:
    """`Outputs.rest` of an exact and a rounded `out`, both float32."""
    share = (exact - rounded) / jnp.where(rounded == 0, jnp.inf, rounded)
    nearest = jnp.floor(share / REST_UNITS[spec.dtype] + 0.5)
    return jnp.clip(nearest, -127, 127).astype(jnp.int8)


Residuals = backend.Residuals[Inputs, Outputs]


def positions_of_first_query(spec: AttentionSpec, inputs: Inputs) -> jax.Array:
    """The position of query 0 among the keys, [B] int32; query i is at that position + i."""
    if spec.offset is not None:
        return jnp.full((spec.B,), spec.offset, jnp.int32)
    if inputs.query_offset is not None:
        return inputs.query_offset
    q_lengths = jnp.int32(spec.T) if inputs.q_lengths is None else inputs.q_lengths
    kv_lengths = jnp.int32(spec.S) if inputs.kv_lengths is None else inputs.kv_lengths
    return jnp.broadcast_to(kv_lengths - q_lengths, (spec.B,))


class Limits(NamedTuple):
    """The bounds of a batch entry's pairs: ints where they are static."""

    low: Any  # None: no bound
    high: Any
    q_length: Any
    kv_length: Any


class Ranges(NamedTuple):
    """Blocks first, ..., end - 1 hold all visible pairs; whole, ..., whole_end - 1 no hidden
    ones."""

    first: Any
    whole: Any
    whole_end: Any
    end: Any


def limits_array(spec: AttentionSpec, inputs: Inputs) -> jax.Array | None:
    """The limits of every batch entry, [B, 4] int32; None where all are static."""
    if spec.offset is not None and not (spec.q_lengths or spec.kv_lengths):
        return None
    nothing = jnp.zeros((spec.B,), jnp.int32)
    position = jnp.clip(positions_of_first_query(spec, inputs), -FAR, FAR)
    # Clipped where a bound hides all pairs or none, whatever its value.
    low, high = (
        nothing if reach is None else jnp.clip(position + reach, -spec.T, spec.S)
        for reach in (None if spec.left is None else -spec.left, spec.right)
    )
    q_length, kv_length = (
        nothing if length is None else length for length in (inputs.q_lengths, inputs.kv_lengths)
    )
    return jnp.stack([low, high, q_length, kv_length], axis=-1)


def within_bounds(spec: AttentionSpec, position: Any, key: Any) -> Any:
    """Whether a query at `position` may see the key at `key`, by causality and window alone."""
    visible = True
    if spec.left is not None:
        visible = key >= position - spec.left
    if spec.right is not None:
        visible = visible & (key <= position + spec.right)
    return visible


def _without_padding(layout: str, array: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """[B, T, H, V] with 0 beyond the lengths, whatever the padding holds."""
    if lengths is None:
        return array
    time = 1 if layout == "bthd" else 2
    index = lax.broadcasted_iota(jnp.int32, array.shape, time)
    return jnp.where(index < jnp.expand_dims(lengths, range(1, array.ndim)), array, 0)


def bias_gradient_by_query(
    spec: AttentionSpec, cotangents: Outputs, shares: Any, delta: jax.Array, log2_lse: jax.Array
) -> jax.Array:
    """ds summed over the keys, [B, H, T] float32. With the sink's share of the weights it is

        sum_j ds_ij = out_i . dout_i - (1 - share_i) delta_i = dlse_i + share_i delta_i
    """
    found, counts = shares * delta, log2_lse < jnp.inf
    if spec.return_lse:
        dlse = cotangents.lse if spec.layout == "bhtd" else cotangents.lse.swapaxes(1, 2)
        found = found + dlse
        # delta holds -dlse then. A share is as exact as lse. Where it rounds to 1, the keys have
        # practically no weight, and the two terms would cancel.
        rounding = float(np.finfo(np.float32).eps) * (2 + jnp.abs(log2_lse))
        counts = counts & ((shares == 0) | (1 - shares > shares * rounding))
    return jnp.where(counts, found, 0.0)


def over_lacked_axes(found: jax.Array, bias: jax.Array) -> jax.Array:
    """A gradient [B|1, H|1, T|1, S|1], summed over the axes that the bias lacks, in its dtype."""
    lacked = [axis for axis, size in enumerate(bias.shape) if found.shape[axis] != size]
    return jnp.sum(found, axis=lacked, keepdims=True).astype(bias.dtype)


def may_have_alike_gradients(spec: AttentionSpec) -> bool:
    """Whether ds is multiplied in two parts of 16 bits: rounded, and what rounding left off.

    Where inputs are small and lse has a cotangent, ds_ij = p_ij dlse_i is nearly the same for all
    pairs of a query. If it lies midway between two numbers of the dtype, the sign of q_i . k_j
    decides to which of them it is rounded. So the roundings do not average out in dq, nor in dk
    where dlse is the same for all queries: by emulation they grow with sqrt(S / D), to 6e-2 of dq
    in bfloat16 at S = 16,384 and D = 64, whose budget is 5e-3.

    The spec of a backward pass has `return_lse` False where lse's cotangent is known to be zero
    (`Op.on_demand`), which spares the second part.
    """
    return spec.return_lse and spec.dtype in ("bfloat16", "float16")


def sums_by_query(spec: AttentionSpec) -> bool:
    """Whether the kernel for dq also sums each query's ds over its keys, for the gradient of the
    sinks of few heads (`exact_delta`)."""
    return spec.sinks and spec.dtype != "float32" and spec.H <= FEW_HEADS


def exact_delta(
    spec: AttentionSpec,
    cotangents: Outputs,
    shares: jax.Array | float,
    norm: jax.Array,
    delta: jax.Array,
    by_query: jax.Array,
) -> jax.Array:
    """delta without the error of out, whose weights were rounded to 16 bits, from the sum of each
    query's ds, whose weights were not. With any delta that is

        sum_j ds_ij = sum_j p_ij dp_ij - (1 - share_i) delta_i

    and sum_j p_ij dp_ij is what out_i . dout_i stands for. `norm`: lse, infinite where a query is
    padded. All [B, H, T].
    """
    found = by_query + (1 - shares) * delta
    if not spec.return_lse:
        return found
    dlse = cotangents.lse if spec.layout == "bhtd" else cotangents.lse.swapaxes(1, 2)
    return found - jnp.where(norm < jnp.inf, dlse, 0.0)


def with_correction(
    spec: AttentionSpec, correction: jax.Array, dout: jax.Array, delta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """dout and delta that bring the correction of the weights to dk, dv and dbias. Rounding dout
    changes do . v against delta, by more than is left of their difference where one key has all of
    a query's weight: so rows that hardly need it are left as they are."""
    needed = jnp.abs(correction - 1) > SMALLEST_CORRECTION
    correction = jnp.where(needed, correction, 1.0)
    by_query = correction if spec.layout == "bhtd" else correction.swapaxes(1, 2)
    corrected = dout.astype(correction.dtype) * by_query[..., None]
    return corrected.astype(dout.dtype), delta * correction


def gradient_gain(spec: AttentionSpec, inputs: Inputs, cotangents: Outputs) -> jax.Array | None:
    """In float16 a power of two per group, [B, G], with gain * |dp - delta| <= 1; else None."""
    if spec.dtype != "float16":
        return None
    heads = 2 if spec.layout == "bthd" else 1

    def largest(array: jax.Array, lengths: jax.Array | None) -> jax.Array:
        """[B, G], over all other axes."""
        array = _without_padding(spec.layout, array, lengths)
        shape = array.shape[:heads] + (spec.G, -1) + array.shape[heads + 1 :]
        array = jnp.abs(array.reshape(shape)).astype(jnp.float32)
        return jnp.max(array, axis=[a for a in range(array.ndim) if a not in (0, heads)])

    # |dp| <= V max|do| max|v|, and out . do is a mean of dp.
    bound = 2 * spec.V * largest(cotangents.out, inputs.q_lengths)
    bound *= largest(inputs.v, inputs.kv_lengths) / (1 - spec.dropout_rate)
    if spec.return_lse:
        bound += largest(cotangents.lse, inputs.q_lengths)
    _, exponent = jnp.frexp(bound)
    return jnp.ldexp(jnp.float32(1), -exponent)


def _mix(bits: Any) -> Any:
    """A 32-bit hash (Ettinger's lowbias32): every input bit affects every output bit."""
    for by, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = (bits ^ _shifted(bits, by)) * np.uint32(factor).astype(bits.dtype)
    return bits ^ _shifted(bits, 16)


def _shifted(bits: Any, by: int) -> Any:
    return lax.shift_right_logical(bits, np.uint32(by).astype(bits.dtype))


def dropout_row(seed: Any, b: Any, h: Any, i: Any) -> Any:
    """A query's hash, uint32, which `dropout_keep_in_row` combines with a key.

    `seed` holds two uint32 scalars, and where the call is a part of a larger one, four more: the
    position there of its first pair.
    """

    def word(x: Any, axis: int) -> Any:
        x = jnp.asarray(x).astype(jnp.uint32)
        return x + seed[2 + axis] if len(seed) > 2 else x

    row = _mix(_mix(_mix(seed[0] ^ word(b, 0)) + word(h, 1)) + word(i, 2))
    row = _mix(row ^ seed[1])
    return row + seed[5] if len(seed) > 2 else row


def dropout_keep_in_row(rate: float, row: Any, j: Any) -> Any:
    """Which weights dropout keeps: `row` and key j are both uint32, or both int32."""
    bits = _mix(row + j)
    # With 24 bits the threshold is exact in float32 and the comparison exact in int32.
    threshold = round(rate * (1 << 24))
    return _shifted(bits, 8).astype(jnp.int32) >= threshold


def dropout_keep(rate: float, seed: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Which weights dropout keeps, by a hash of the seed and the position (b, h, i, j) alone.

    So forward and backward agree, on every backend and for every tile size. The indices broadcast
    against each other.
    """
    row = dropout_row(seed, b, h, i)
    return dropout_keep_in_row(rate, row, jnp.asarray(j).astype(jnp.uint32))
