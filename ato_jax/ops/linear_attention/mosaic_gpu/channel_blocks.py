"""Calls with a decay per channel that the kernels of 128 columns run as more heads.

`causal.py` calls these functions. Heads of 144 to 256
columns are cut into blocks of at most 128 columns. Calls that are not causal become such a call,
too, with two walks (`channel_both_ways.py`). With blocks a of features and blocks b of values,

    num_ib = sum_a num_iab        den_i = sum_a den_ia

where num_iab is the numerator of a head that has q_ia, k_ja, their gates and v_jb alone. So each
pair of blocks (a, b) of a head h has a state of its own, and is one head (a, b, h) to the kernels.
In memory [B, T, H, blocks * columns] is [B, T, H * blocks, columns] already. Where there
is more than one block of features, or rows see both sides, the kernels return numerators and
denominators in float32, and XLA adds them up.

A block has a multiple of 16 columns. Where the columns of a head cannot be divided so, XLA pads
them, with keys whose features are 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.ops.linear_attention.fits import FILLERS
from ato_jax.ops.linear_attention.mosaic_gpu import channel_both_ways, narrow
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState, Outputs

COLUMNS = 128  # the most columns of a block


@dataclasses.dataclass(frozen=True)
class Cut(narrow.Narrow):
    """The spec of a call whose heads are pairs of blocks; `width` and `values_width` are the
    columns of a block. Where rows see both sides, the batch has two entries, one for each walk."""

    feature_blocks: int = 1
    value_blocks: int = 1
    both_ways: bool = False

    @property
    def blocks(self) -> int:
        return self.feature_blocks * self.value_blocks


def adds_up(spec: LinearAttentionSpec) -> bool:
    """Whether out is a sum over blocks of features or over both walks, which XLA computes."""
    return isinstance(spec, Cut) and (spec.feature_blocks > 1 or spec.both_ways)


def sees(spec: LinearAttentionSpec, item: mosaic.Item, queries: int = 0) -> jax.Array:
    """[64, 64]: whether a query of a chunk sees a key of the chunk; queries lie along the axis
    `queries`. In the walk over the reversed sequence no query sees its own key."""
    query, key = mosaic.hidden_position(queries), mosaic.hidden_position(1 - queries)
    if isinstance(spec, Cut) and spec.both_ways:
        key = key + lax.rem(item.batch, 2)
    return query >= key


def seen(spec: LinearAttentionSpec, item: mosaic.Item, x: jax.Array, queries: int = 0) -> jax.Array:
    """x [64, 64], 0 where the query does not see the key; queries lie along the axis `queries`."""
    x = jnp.where(sees(spec, item, queries), x, 0.0)
    # Without the barrier the selected numbers would be rounded singly, not in pairs.
    return lax.optimization_barrier(x)


def _blocks_of(spec: LinearAttentionSpec, head: Any, in_memory: int, of_each: int) -> Any:
    """The number of the pair of blocks, and of the call's head, that a kernel's head stands for.
    The array has `in_memory` heads: `of_each` blocks for each head of the call."""
    heads = in_memory // of_each
    return lax.div(head, heads), lax.rem(head, heads)


def head_of_features(spec: LinearAttentionSpec, ref: Any, head: Any) -> Any:
    """The head in memory of q, k or gates, [B, T, heads, columns]."""
    if not isinstance(spec, Cut):
        return head
    pair, own = _blocks_of(spec, head, ref.shape[2], spec.feature_blocks)
    return own * spec.feature_blocks + lax.div(pair, spec.value_blocks)


def head_of_values(spec: LinearAttentionSpec, ref: Any, head: Any) -> Any:
    if not isinstance(spec, Cut):
        return head
    pair, own = _blocks_of(spec, head, ref.shape[2], spec.value_blocks)
    return own * spec.value_blocks + lax.rem(pair, spec.value_blocks)


def shape_of_heads(spec: LinearAttentionSpec, x: jax.Array) -> tuple[int, ...]:
    """The shape of an array like x, [B, T, heads, columns], with the kernels' number of heads."""
    if not isinstance(spec, Cut):
        return x.shape
    return (*x.shape[:2], spec.H, x.shape[3])


def has_first_values(spec: LinearAttentionSpec, head: Any) -> Any:
    """Whether a kernel's head has the first block of values, of those with the same features; None
    if there is only one block of values."""
    if not isinstance(spec, Cut) or spec.value_blocks == 1:
        return None
    pair = lax.div(head, spec.H // spec.blocks)
    return lax.rem(pair, spec.value_blocks) == 0


def of_pairs(spec: LinearAttentionSpec, x: jax.Array, of_values: bool) -> jax.Array:
    """Repeats an array [B, heads in memory, ..] of features, or of values, for each of the kernels'
    heads. In memory the blocks of a head lie next to each other."""
    if not isinstance(spec, Cut):
        return x
    rest, own = x.shape[2:], spec.value_blocks if of_values else spec.feature_blocks
    x = jnp.moveaxis(x.reshape(x.shape[0], -1, own, *rest), 2, 1)  # [B, blocks, heads, ..]
    x = jnp.expand_dims(x, 1 if of_values else 2)
    shape = x.shape[0], spec.feature_blocks, spec.value_blocks, *x.shape[3:]
    return jnp.broadcast_to(x, shape).reshape(x.shape[0], -1, *rest)


def is_cut(spec: LinearAttentionSpec) -> bool:
    return spec.decay == "channel" and (max(spec.D, spec.V) > COLUMNS or not spec.causal)


def in_blocks(spec: LinearAttentionSpec) -> Cut:
    features, values = (pl.cdiv(columns, COLUMNS) for columns in (spec.D, spec.V))
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    width, values_width = (
        pl.cdiv(columns, blocks * narrow.STEP) * narrow.STEP
        for columns, blocks in ((spec.D, features), (spec.V, values))
    )
    heads = {name: fields[name] * features * values for name in ("H", "G")}
    sizes = dict.fromkeys("DFV", COLUMNS) | heads | {"layout": "bthd"}
    both_ways = not spec.causal
    if both_ways:
        sizes |= {"B": 2 * spec.B, "causal": True}
    widths: dict[str, Any] = {"width": width, "values_width": values_width}
    blocks: dict[str, Any] = {"feature_blocks": features, "value_blocks": values}
    return Cut(**fields | sizes, **widths, **blocks, both_ways=both_ways)


def _parted(
    spec: LinearAttentionSpec, x: jax.Array, blocks: int, columns: int, beyond: float = 0.0
) -> jax.Array:
    x = x if spec.layout == "bthd" else jnp.swapaxes(x, 1, 2)
    missing = blocks * columns - x.shape[3]
    if missing:
        x = jnp.pad(x, [(0, 0)] * 3 + [(0, missing)], constant_values=beyond)
    return x.reshape(*x.shape[:2], -1, columns)


def arrays_in_blocks(spec: LinearAttentionSpec, cut: Cut, inputs: Inputs) -> Inputs:
    """q, k, v and the gates as [B, T, heads * blocks, columns], and the state of the kernels'
    heads, for both walks if there are two."""
    of_features = cut.feature_blocks, cut.width
    assert inputs.decay is not None
    state = inputs.initial_state
    inputs = inputs._replace(
        q=_parted(spec, inputs.q, *of_features),
        k=_parted(spec, inputs.k, *of_features, FILLERS.get(spec.feature_map.name, 0.0)),
        v=values_in_blocks(spec, cut, inputs.v),
        decay=_parted(spec, inputs.decay, *of_features),
        initial_state=None if state is None else state_in_blocks(cut, state),
    )
    return channel_both_ways.inputs_of_walks(inputs) if cut.both_ways else inputs


def cotangents_in_blocks(spec: LinearAttentionSpec, cut: Cut, cotangents: Outputs) -> Outputs:
    g, state = values_in_blocks(spec, cut, cotangents.out), cotangents.state
    if spec.return_state:
        state = state_in_blocks(cut, state, is_cotangent=True)
    if cut.both_ways:
        g = channel_both_ways.of_walks(g)
        state = channel_both_ways.state_of_walks(state) if spec.return_state else state
    return cotangents._replace(out=g, state=state)


def values_in_blocks(spec: LinearAttentionSpec, cut: Cut, v: jax.Array) -> jax.Array:
    """v, or an array of its shape, as [B, T, heads * blocks, columns]."""
    return _parted(spec, v, cut.value_blocks, cut.values_width)


def state_in_blocks(cut: Cut, state: LinearState, is_cotangent: bool = False) -> LinearState:
    """The state of the kernels' heads. All blocks of values have the same k_sum. The cotangent of
    k_sum goes to the first block of values, and the others have 0."""
    kv, k_sum = state
    B, G, D, V = kv.shape
    features, values = cut.feature_blocks, cut.value_blocks
    columns = features * cut.width - D, values * cut.values_width - V
    kv = jnp.pad(kv, [(0, 0), (0, 0), (0, columns[0]), (0, columns[1])])
    k_sum = jnp.pad(k_sum, [(0, 0), (0, 0), (0, columns[0])])
    kv = kv.reshape(B, G, features, cut.width, values, cut.values_width)
    kv = jnp.transpose(kv, (0, 2, 4, 1, 3, 5)).reshape(B, -1, cut.width, cut.values_width)
    k_sum = jnp.swapaxes(k_sum.reshape(B, G, features, cut.width), 1, 2)
    if is_cotangent:
        k_sum = jnp.pad(k_sum[:, :, None], [(0, 0), (0, 0), (0, values - 1), (0, 0), (0, 0)])
    else:
        k_sum = jnp.broadcast_to(k_sum[:, :, None], (B, features, values, G, cut.width))
    return narrow.widened(cut, LinearState(kv, k_sum.reshape(B, -1, cut.width)))


def whole_state(
    spec: LinearAttentionSpec, cut: Cut, state: LinearState, is_gradient: bool = False
) -> LinearState:
    """The inverse of `state_in_blocks`. In a gradient k_sum is the sum over blocks of values."""
    kv, k_sum = narrow.narrowed(cut, state)
    if cut.both_ways:
        kv, k_sum = map(channel_both_ways.of_first_walk, (kv, k_sum))
    shape = spec.B, cut.feature_blocks, cut.value_blocks, spec.G
    kv = kv.reshape(*shape, cut.width, cut.values_width)
    kv = jnp.transpose(kv, (0, 3, 1, 4, 2, 5)).reshape(
        spec.B, spec.G, cut.feature_blocks * cut.width, -1
    )
    k_sum = k_sum.reshape(*shape, cut.width)
    k_sum = jnp.sum(k_sum, axis=2) if is_gradient else k_sum[:, :, 0]
    k_sum = jnp.swapaxes(k_sum, 1, 2)
    k_sum = k_sum.reshape(spec.B, spec.G, -1)
    return LinearState(kv[:, :, : spec.D, : spec.V], k_sum[:, :, : spec.D])


def summed(cut: Cut, x: jax.Array, axis: int, dtype: Any) -> jax.Array:
    """The sum of x [B, T, the kernels' heads, ..] over blocks of features (axis 2) or of values
    (axis 3), with the heads in the order in which they lie in memory."""
    pairs = cut.feature_blocks, cut.value_blocks
    x = x.reshape(*x.shape[:2], *pairs, -1, x.shape[3])
    x = jnp.swapaxes(jnp.sum(x.astype(jnp.float32), axis=axis), 2, 3).astype(dtype)
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def whole_rows(spec: LinearAttentionSpec, x: jax.Array, columns: int) -> jax.Array:
    """Rows of whole heads in the call's layout: the inverse of `arrays_in_blocks` for one array."""
    x = x.reshape(spec.B, spec.T, spec.H, -1)[..., :columns]
    return x if spec.layout == "bthd" else jnp.swapaxes(x, 1, 2)


def whole_gradients(spec: LinearAttentionSpec, cut: Cut, found: Inputs) -> Inputs:
    assert found.decay is not None
    state = found.initial_state
    if state is not None:
        state = whole_state(spec, cut, state, is_gradient=True)
    q, k, v, decay = found.q, found.k, found.v, found.decay
    if cut.both_ways:
        q, k, v = (channel_both_ways.added_up(x).astype(spec.dtype) for x in (q, k, v))
        decay = channel_both_ways.gradient_of_decay(decay)
    return found._replace(
        q=whole_rows(spec, q, spec.D),
        k=whole_rows(spec, k, spec.D),
        v=whole_rows(spec, v, spec.V),
        decay=whole_rows(spec, decay, spec.D),
        initial_state=state,
    )


def den_of(spec: LinearAttentionSpec, cut: Cut, den: jax.Array) -> jax.Array:
    """The denominator of each query, [B, H, T]: the sum of the kernel's `den` over blocks of
    features and both walks. All blocks of values have the same denominator."""
    shape = cut.B, cut.feature_blocks, cut.value_blocks, spec.H
    den = jnp.sum(den.reshape(*shape, -1)[:, :, 0], axis=1)[:, :, : spec.T]
    return channel_both_ways.added_up(den, 2) if cut.both_ways else den


def weights_of(
    spec: LinearAttentionSpec, cut: Cut, kept: tuple[jax.Array | None, ...], g: jax.Array
) -> tuple[jax.Array, jax.Array] | None:
    """inverse, and the part of e = g . out that belongs to each block of values, for the kernels'
    heads: [B, heads, T up to a whole chunk] each. None where the kernels compute both themselves.

    Args:
      kept: den, out, and what rounding left off out.
      g: the cotangent of out, in blocks and of both walks.
    """
    den, *parts = kept
    if den is None:
        return None
    out: Any = sum(
        values_in_blocks(spec, cut, part).astype(jnp.float32) for part in parts if part is not None
    )
    if cut.both_ways:
        g = channel_both_ways.of_first_walk(g)
    whole = den_of(spec, cut, den)
    e = jnp.sum(g.astype(jnp.float32) * out, axis=3)
    e = jnp.moveaxis(e.reshape(spec.B, spec.T, spec.H, -1), (3, 2), (1, 2))
    e = jnp.where(whole[:, None] > spec.eps, e, 0.0)
    shape = spec.B, cut.feature_blocks, cut.value_blocks, *whole.shape[1:]
    inverse = (1.0 / jnp.maximum(whole, spec.eps))[:, None, None]

    def of_blocks(x: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(x, shape).reshape(spec.B, -1, spec.T)
        x = channel_both_ways.of_walks(x, 2) if cut.both_ways else x
        return jnp.pad(x, [(0, 0), (0, 0), (0, den.shape[2] - spec.T)])

    return of_blocks(inverse), of_blocks(e[:, None])


def whole_output(
    spec: LinearAttentionSpec, cut: Cut, out: jax.Array, den: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """out of whole heads and, where XLA adds up the numerators in bfloat16, what its rounding left
    off. e is computed from both: from the rounded out alone, the gradient of a state's k_sum had an
    error of 5.3e-3, where 4e-3 is allowed.

    Args:
      out: the output of the kernel, [B, T, heads, columns].
      den: its denominators, [B, heads, T up to a whole chunk], or None.
    """
    rest = None
    if adds_up(cut):
        shape = cut.feature_blocks, cut.value_blocks, spec.H
        num = jnp.sum(out.reshape(cut.B, spec.T, *shape, cut.values_width), axis=2)
        if cut.both_ways:
            num = channel_both_ways.added_up(num)
        if den is not None:
            den = jnp.swapaxes(den_of(spec, cut, den), 1, 2)[:, :, None, :, None]
            num = num / jnp.maximum(den, spec.eps)
        num = jnp.swapaxes(num, 2, 3)
        if spec.dtype == "float16":
            return whole_rows(spec, num.astype(spec.dtype), spec.V), None
        out = lax.reduce_precision(num, 8, 7)
        rest = whole_rows(spec, (num - out).astype(spec.dtype), spec.V)
        out = out.astype(spec.dtype)
    return whole_rows(spec, out, spec.V), rest
