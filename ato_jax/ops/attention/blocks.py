"""How the XLA backend divides softmax attention: by kv head, by strip, by block of queries.

    s[i,j] = softcap(scale * q_i . k_j) + bias[i,j]      -inf where query i may not see key j

All functions here work on one kv head and the R = H // G query heads that read it. The arrays are
in a dictionary (`Arrays`), which lacks the optional ones that are not given:

    q [R,T,D]  k [S,D]  v [S,V]  bias, mask [R|1,T|1,S|1]  sinks, h [R]  q_segments [T]
    kv_segments [S]  first, b, q_lengths, kv_lengths []  seed [2|6]  i0, j0 []

`first` is the position of query 0 among the keys, `b` and `h` are the indices that dropout hashes,
`i0` and `j0` are the indices of the first query and the first key that the arrays hold.

A *strip* is a run of queries with the run of keys that causality and window let it see. Strips
follow from the spec alone, so keys outside of a strip are never multiplied. Inside a strip,
`over_queries` goes over blocks of queries, each against all keys of the strip.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax import partitioning
from ato_jax.device import Device
from ato_jax.ops.attention.spec import (
    SMALLEST_SLOPE,
    AttentionSpec,
    Inputs,
    positions_of_first_query,
    within_bounds,
)

Arrays = dict[str, jax.Array]

# The axis, counted from the end, that runs over queries and over keys; a bias or a mask may have
# size 1 there.
T_AXES = {"q": 2, "bias": 2, "mask": 2, "q_segments": 1, "lse": 1}
S_AXES = {"k": 2, "v": 2, "bias": 1, "mask": 1, "kv_segments": 1}

# With a bound on one side alone, each strip has another number of keys and is compiled by itself: n
# strips multiply (n + 1) / 2n of all pairs, and take n times the compilation.
MOST_STRIPS = 8
SHORTEST_STRIP = 256
# With bounds on both sides a strip is this fraction of the window long, and has keys of 1 + 1/4
# windows.
STRIPS_PER_WINDOW = 4

# How many scores are held at once: on a CPU 4 MB, which stay in its caches while the products are
# large enough; on accelerators, which need large products, 256 MB.
SCORES_AT_ONCE = {"cpu": 1 << 20}
SCORES_AT_ONCE_ELSEWHERE = 1 << 26
# Products of fewer rows are bound by loading the keys; more rows than the second number gain
# nothing.
FEWEST_ROWS = 64
MOST_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Queries in a block and in a strip; kv heads and batch entries that are computed together."""

    block_t: int
    strip_t: int
    heads: int
    batch: int


def default_config(spec: AttentionSpec, device: Device) -> Config:
    """Fills the platform's number of scores with queries first, then heads, then batch entries."""
    limit = SCORES_AT_ONCE.get(device.platform, SCORES_AT_ONCE_ELSEWHERE)
    repeats = spec.H // spec.G
    rows = min(max(limit // spec.S, FEWEST_ROWS), MOST_ROWS)
    block_t = min(spec.T, -(-rows // repeats))
    limit //= repeats * block_t * spec.S  # kv heads
    heads = _divisor(spec.G, limit)
    batch = _divisor(spec.B, limit // heads) if heads == spec.G else 1
    return Config(block_t, _strip_length(spec), heads, batch)


def _strip_length(spec: AttentionSpec) -> int:
    left, right = _bounds(spec)
    if left is None and right is None:
        return spec.T
    if left is None or right is None:
        return max(SHORTEST_STRIP, -(-spec.T // MOST_STRIPS))
    return max(SHORTEST_STRIP, (left + right) // STRIPS_PER_WINDOW)


def _divisor(size: int, limit: int) -> int:
    """The largest divisor of `size` that is at most `limit`; at least 1."""
    return next(d for d in range(max(1, min(size, limit)), 0, -1) if size % d == 0)


def dot_precision(spec: AttentionSpec) -> lax.Precision:
    exact = spec.dtype == "float32" and spec.precision != "tf32"
    return lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT


def per_kv_head(spec: AttentionSpec, inputs: Inputs) -> Arrays:
    """The arrays with two leading axes [B|1, G|1], of size 1 where all entries share one array."""
    B, H, G = spec.B, spec.H, spec.G

    def heads_first(x: jax.Array) -> jax.Array:
        return x.swapaxes(1, 2) if spec.layout == "bthd" else x  # [B, H|G, T|S, D|V]

    def grouped(x: jax.Array) -> jax.Array:
        """[B|1, H|1, ...] -> [B|1, G|1, R|1, ...]"""
        heads = (G, H // G) if x.shape[1] == H else (1, 1)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    bias = inputs.bias
    if bias is not None and not all(spec.bias or ()):
        # Its gradient is summed over blocks, and sums are accumulated in float32.
        bias = bias.astype(jnp.promote_types(bias.dtype, jnp.float32))
    found: dict[str, jax.Array | None] = {
        "q": grouped(heads_first(inputs.q)),
        "k": heads_first(inputs.k),
        "v": heads_first(inputs.v),
        "bias": None if bias is None else grouped(bias),
        "mask": None if inputs.mask is None else grouped(inputs.mask),
        "sinks": None if inputs.sinks is None else inputs.sinks.reshape(1, G, H // G),
        "h": jnp.arange(H, dtype=jnp.int32).reshape(1, G, H // G),
        "b": jnp.arange(B, dtype=jnp.int32)[:, None],
        "first": positions_of_first_query(spec, inputs)[:, None],
        "q_segments": None if inputs.q_segments is None else inputs.q_segments[:, None],
        "kv_segments": None if inputs.kv_segments is None else inputs.kv_segments[:, None],
        "q_lengths": None if inputs.q_lengths is None else inputs.q_lengths[:, None],
        "kv_lengths": None if inputs.kv_lengths is None else inputs.kv_lengths[:, None],
        "seed": None if inputs.dropout_seed is None else inputs.dropout_seed[None, None],
        "i0": jnp.zeros((B, G), jnp.int32),
        "j0": jnp.zeros((1, 1), jnp.int32),
    }
    return {name: array for name, array in found.items() if array is not None}


def ready(spec: AttentionSpec, arrays: Arrays) -> Arrays:
    """One kv head's arrays with q, k and v in float32, and 0 in place of padding.

    Padding may hold NaN, which would reach the gradients as 0 * NaN.
    """

    def wide(name: str, lengths: str) -> jax.Array:
        x = arrays[name]  # [R, T, D], [S, D] or [S, V]
        if lengths in arrays:
            x = jnp.where(jnp.arange(x.shape[-2], dtype=jnp.int32)[:, None] < arrays[lengths], x, 0)
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    found = {"q": wide("q", "q_lengths"), "k": wide("k", "kv_lengths")}
    if "v" in arrays:
        found["v"] = wide("v", "kv_lengths")
    # JAX's derivative of a loop over heads would move the visible pairs, all T * S of them, out of
    # the loop, since they are the same for each head. The barrier ties their inputs to i0, which
    # every head has for itself.
    undifferentiated = {
        name: array
        for name, array in arrays.items()
        if not jnp.issubdtype(array.dtype, jnp.floating)
    }
    return arrays | found | lax.optimization_barrier(undifferentiated)


def per_head(
    spec: AttentionSpec, config: Config, function: Callable[[Arrays], Any], arrays: Arrays
) -> Any:
    """`function` of every kv head's arrays; its results [R, ...] are stacked to [B, H, ...]."""
    divides = partitioning.may_divide([*arrays.values()])
    devices = partitioning.device_count() if divides else 1

    def entry(arrays: Arrays) -> Any:
        return _each(
            lambda head: function(ready(spec, head)), arrays, spec.G, config.heads, devices
        )

    found = _each(entry, arrays, spec.B, config.batch, devices)  # [B, G, R, ...]
    return jax.tree.map(lambda x: x.reshape(spec.B, spec.H, *x.shape[3:]), found)


def _each(
    function: Callable[[Arrays], Any], arrays: Arrays, size: int, together: int, devices: int
) -> Any:
    """`function` of every entry of the leading axis, `together` at once; the results are stacked.

    All entries share an array whose leading axis is 1: it is not expanded, and its gradient is
    summed. Where several devices may have cut the axis into runs of entries, each step takes one
    entry or more of each run: XLA would gather the axis on every device for a loop over it.
    """
    shared = {name: array[0] for name, array in arrays.items() if array.shape[0] == 1}
    own = {name: array for name, array in arrays.items() if name not in shared}
    if size == 1:
        return jax.tree.map(lambda x: x[None], function(shared))
    of_entry = lambda entry: function(shared | entry)  # noqa: E731
    together = math.lcm(together, math.gcd(size, devices))
    if together >= size:
        return jax.vmap(of_entry)(own)
    if devices == 1:
        return lax.map(of_entry, own, batch_size=together if together > 1 else None)
    steps = {
        name: array.reshape(together, -1, *array.shape[1:]).swapaxes(0, 1)
        for name, array in own.items()
    }
    found = lax.map(jax.vmap(of_entry), steps)
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(size, *x.shape[2:]), found)


def _has(axes: dict[str, int], name: str, array: jax.Array) -> bool:
    """Whether the array has an axis of queries (`T_AXES`) or keys (`S_AXES`)."""
    return name in axes and (name not in ("bias", "mask") or array.shape[-axes[name]] > 1)


def _cut(arrays: Arrays, axes: dict[str, int], start: int, stop: int) -> Arrays:
    """`arrays` with the entries from `start` to `stop` of an axis, where they have that axis."""
    return arrays | {
        name: lax.slice_in_dim(array, start, stop, axis=array.ndim - axes[name])
        for name, array in arrays.items()
        if _has(axes, name, array)
    }


def _bounds(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """`left` and `right`; None where the bound hides no key or is unknown while tracing."""
    if spec.offset is None:
        return None, None
    left, right = spec.left, spec.right
    if left is not None and left >= spec.offset + spec.T - 1:
        left = None
    if right is not None and spec.offset + right >= spec.S - 1:
        right = None
    return left, right


def strips(
    spec: AttentionSpec, config: Config, function: Callable[[Arrays], Any], arrays: Arrays
) -> Any:
    """`function` of every strip's arrays; its results are joined along the queries, [R, T, ...]."""
    left, right = _bounds(spec)
    if left is not None and right is not None:
        return _band(spec, min(config.strip_t, spec.T), function, arrays)
    results = []
    for start in range(0, spec.T, config.strip_t):
        stop = min(start + config.strip_t, spec.T)
        low = 0 if left is None else (spec.offset or 0) + start - left
        high = spec.S if right is None else (spec.offset or 0) + stop + right
        low = min(max(low, 0), spec.S - 1)
        high = min(max(high, low + 1), spec.S)  # at least one key, which the mask may hide
        strip = _cut(_cut(arrays, T_AXES, start, stop), S_AXES, low, high)
        strip |= {"i0": arrays["i0"] + start, "j0": arrays["j0"] + low}
        results.append(function(strip))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *results)


def _band(
    spec: AttentionSpec, length: int, function: Callable[[Arrays], Any], arrays: Arrays
) -> Any:
    """The strips of a window with two bounds, in a loop whose cost is linear in T.

    The keys of all strips are laid out before the loop. They overlap, and take about
    1 + STRIPS_PER_WINDOW times the memory. A slice of all keys inside the loop would be as fast
    forward, but its gradient has the size of all keys, for every strip.
    """
    left, right = _bounds(spec)
    assert left is not None and right is not None and spec.offset is not None
    count = -(-spec.T // length)
    spans = -(-(length + left + right) // length)  # a strip's keys, in strip lengths
    first_key = spec.offset - left  # of strip 0; may be outside of the keys

    def from_first_key(array: jax.Array, axis: int) -> jax.Array:
        """Sliced or padded to the keys of all strips: (count + spans - 1) * length."""
        pads = [(0, 0, 0)] * array.ndim
        pads[-axis] = (-first_key, (count + spans - 1) * length + first_key - spec.S, 0)
        return lax.pad(array, jnp.zeros((), array.dtype), pads)

    def overlapping(array: jax.Array, axis: int) -> jax.Array:
        """[..., S, ...] -> [count, ..., spans * length, ...]"""
        cut = _blocks(from_first_key(array, axis), axis, length)
        return jnp.concatenate(
            [cut[span : span + count] for span in range(spans)], axis=cut.ndim - axis
        )

    stacked: Arrays = {"strip": jnp.arange(count, dtype=jnp.int32)}
    shared: Arrays = {}
    rectangular = []  # [R|1, T, S]: rows by strip, columns sliced inside the loop
    for name, array in arrays.items():
        has_s = _has(S_AXES, name, array)
        if _has(T_AXES, name, array):
            stacked[name] = _blocks(_padded(array, T_AXES[name], length), T_AXES[name], length)
            if has_s:
                rectangular.append(name)
                stacked[name] = from_first_key(stacked[name], S_AXES[name])
        elif has_s:
            stacked[name] = overlapping(array, S_AXES[name])
        else:
            shared[name] = array

    def strip(entry: Arrays) -> Any:
        start = entry.pop("strip") * length
        for name in rectangular:
            entry[name] = lax.dynamic_slice_in_dim(entry[name], start, spans * length, axis=-1)
        return function(shared | entry | {"i0": start, "j0": first_key + start})

    return _joined(lax.map(strip, stacked), spec.T)


def _padded(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    pads = [(0, 0)] * array.ndim
    pads[-axis] = (0, -array.shape[-axis] % multiple)
    return jnp.pad(array, pads)


def _blocks(array: jax.Array, axis: int, length: int) -> jax.Array:
    """[..., n * length, ...] -> [n, ..., length, ...]"""
    at = array.ndim - axis
    split = array.reshape(*array.shape[:at], -1, length, *array.shape[at + 1 :])
    return jnp.moveaxis(split, at, 0)


def _joined(results: Any, T: int) -> Any:
    """[n, R, length, ...] -> [R, T, ...] without the padding"""

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 1)  # [R, n, length, ...]
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]

    return jax.tree.map(join, results)


def by_query_block(arrays: Arrays, block_t: int) -> tuple[Arrays, Arrays]:
    """The arrays that all blocks of queries share, and those of each block, stacked in front."""
    T = arrays["q"].shape[-2]
    length = -(-T // -(-T // block_t))  # the same number of blocks, with the least padding
    own = {
        name: _blocks(_padded(array, T_AXES[name], length), T_AXES[name], length)
        for name, array in arrays.items()
        if _has(T_AXES, name, array)
    }
    shared = {name: array for name, array in arrays.items() if name not in own}
    own["i0"] = shared.pop("i0") + length * jnp.arange(own["q"].shape[0], dtype=jnp.int32)
    return shared, own


def over_queries(function: Callable[[Arrays], Any], arrays: Arrays, block_t: int) -> Any:
    """`function` of every block of queries; its results [R, block, ...] are joined to [R, T,
    ...]."""
    shared, own = by_query_block(arrays, block_t)
    return _joined(
        lax.map(lambda entry: function(shared | entry), own), arrays["q"].shape[-2]
    )


def indices(arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """The indices of the queries [T, 1] and of the keys [1, S] that the arrays hold."""
    i = arrays["i0"] + jnp.arange(arrays["q"].shape[-2], dtype=jnp.int32)[:, None]
    j = arrays["j0"] + jnp.arange(arrays["k"].shape[-2], dtype=jnp.int32)[None, :]
    return i, j


def visible(spec: AttentionSpec, arrays: Arrays) -> jax.Array | None:
    """Which query may see which key, [R|1, T|1, S|1]; None where every query sees every key."""
    i, j = indices(arrays)
    rules: list[jax.Array] = []
    if spec.left is not None or spec.right is not None:
        rules.append(within_bounds(spec, arrays["first"] + i, j))
    if None not in _bounds(spec):
        rules.append((j >= 0) & (j < spec.S))  # outer strips' keys extend beyond the ends
    if "q_lengths" in arrays:
        rules.append(i < arrays["q_lengths"])
    if "kv_lengths" in arrays:
        rules.append(j < arrays["kv_lengths"])
    if "q_segments" in arrays:
        rules.append(arrays["q_segments"][:, None] == arrays["kv_segments"][None, :])
    if "mask" in arrays:
        rules.append(arrays["mask"])
    if not rules:
        return None
    seen = rules[0]
    for rule in rules[1:]:
        seen = seen & rule
    return seen if seen.ndim == 3 else seen[None]


def scores(spec: AttentionSpec, arrays: Arrays) -> jax.Array:
    """s, [R, T, S], -inf where hidden. That is a select, so no gradient becomes NaN."""
    s = jnp.einsum("rtd,sd->rts", arrays["q"], arrays["k"], precision=dot_precision(spec))
    s = s * spec.scale  # a scaled q would be rounded once more, which large scores show
    if spec.softcap is not None:
        s = spec.softcap * _tanh(s / spec.softcap)
    if "bias" in arrays:
        s = s + arrays["bias"].astype(s.dtype)
    seen = visible(spec, arrays)
    return s if seen is None else jnp.where(seen, s, -jnp.inf)


@jax.custom_jvp
def _tanh(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


@_tanh.defjvp
def _tanh_jvp(primals: Any, tangents: Any) -> Any:
    """1 - tanh(x)^2 without the subtraction, which cancels in float32 beyond |x| = 8."""
    (x,), (d_x,) = primals, tangents
    slope = 4 * jax.nn.sigmoid(2 * x) * jax.nn.sigmoid(-2 * x)
    return _tanh(x), jnp.where(slope > SMALLEST_SLOPE, slope, 0) * d_x
