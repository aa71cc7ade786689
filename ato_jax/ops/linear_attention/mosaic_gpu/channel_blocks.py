"""Heads of 144 to 256 columns with a gate per channel: cut into blocks of at most 128 columns.

With features in blocks a and values in blocks b, what a query reads of its keys is

    num_ib = sum_a (what q_ia, k_ja, their gates and v_jb make of it)        den_i = sum_a den_ia

and each pair of blocks has a state of its own. So a pair of blocks is a head of its own to the
kernels, which are those of 128 columns: head (a, b, h) of a call with as many times more heads.
Arrays lie in memory as they are: [B, T, H, blocks * columns] is [B, T, H * blocks, columns]. Where
features have more than one block, numerators and denominators are left in float32 for XLA to add.

Blocks have multiples of 16 columns: where D has an odd number of them, XLA pads it by 16 whose
features of keys are 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.mosaic_gpu import feature_maps, narrow
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState

COLUMNS = 128  # of a block, at most


@dataclasses.dataclass(frozen=True)
class Cut(narrow.Narrow):
    """A call whose heads are pairs of blocks; `width` and `values_width` are a block's columns."""

    feature_blocks: int = 1
    value_blocks: int = 1

    @property
    def blocks(self) -> int:
        return self.feature_blocks * self.value_blocks


def adds_up(spec: LinearAttentionSpec) -> bool:
    """Whether the output is a sum over blocks of features, which kernels leave to XLA."""
    return isinstance(spec, Cut) and spec.feature_blocks > 1


def _blocks_of(spec: LinearAttentionSpec, head: Any, in_memory: int, of_each: int) -> Any:
    """Which pair of blocks a head is, and whose: of `in_memory` heads, `of_each` to one."""
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


def is_cut(spec: LinearAttentionSpec) -> bool:
    return spec.decay == "channel" and max(spec.D, spec.V) > COLUMNS


def in_blocks(spec: LinearAttentionSpec) -> Cut:
    features, values = (pl.cdiv(columns, COLUMNS) for columns in (spec.D, spec.V))
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    width, values_width = (
        pl.cdiv(columns, blocks * narrow.STEP) * narrow.STEP
        for columns, blocks in ((spec.D, features), (spec.V, values))
    )
    heads = {name: fields[name] * features * values for name in ("H", "G")}
    sizes = dict.fromkeys("DFV", COLUMNS) | heads | {"layout": "bthd"}
    return Cut(**fields | sizes, width=width, values_width=values_width,
               feature_blocks=features, value_blocks=values)


def arrays_in_blocks(spec: LinearAttentionSpec, cut: Cut, inputs: Inputs) -> Inputs:
    """q, k, v and the gates, [B, T, heads * blocks, columns], and the state as kernels have it."""

    def parted(x: jax.Array, blocks: int, columns: int, beyond: float = 0.0) -> jax.Array:
        x = x if spec.layout == "bthd" else jnp.swapaxes(x, 1, 2)
        missing = blocks * columns - x.shape[3]
        if missing:
            x = jnp.pad(x, [(0, 0)] * 3 + [(0, missing)], constant_values=beyond)
        return x.reshape(*x.shape[:2], -1, columns)

    of_features = cut.feature_blocks, cut.width
    assert inputs.decay is not None
    state = inputs.initial_state
    return inputs._replace(
        q=parted(inputs.q, *of_features),
        k=parted(inputs.k, *of_features, feature_maps.LEAST_KEY),
        v=parted(inputs.v, cut.value_blocks, cut.values_width),
        decay=parted(inputs.decay, *of_features),
        initial_state=None if state is None else _state_in_blocks(cut, state),
    )


def _state_in_blocks(cut: Cut, state: LinearState) -> LinearState:
    kv, k_sum = state
    B, G, D, V = kv.shape
    features, values = cut.feature_blocks, cut.value_blocks
    columns = features * cut.width - D, values * cut.values_width - V
    kv = jnp.pad(kv, [(0, 0), (0, 0), (0, columns[0]), (0, columns[1])])
    k_sum = jnp.pad(k_sum, [(0, 0), (0, 0), (0, columns[0])])
    kv = kv.reshape(B, G, features, cut.width, values, cut.values_width)
    kv = jnp.transpose(kv, (0, 2, 4, 1, 3, 5)).reshape(B, -1, cut.width, cut.values_width)
    k_sum = jnp.swapaxes(k_sum.reshape(B, G, features, cut.width), 1, 2)
    k_sum = jnp.broadcast_to(k_sum[:, :, None], (B, features, values, G, cut.width))
    return narrow.widened(cut, LinearState(kv, k_sum.reshape(B, -1, cut.width)))


def whole_state(spec: LinearAttentionSpec, cut: Cut, state: LinearState) -> LinearState:
    """The reverse."""
    kv, k_sum = narrow.narrowed(cut, state)
    shape = spec.B, cut.feature_blocks, cut.value_blocks, spec.G
    kv = kv.reshape(*shape, cut.width, cut.values_width)
    kv = jnp.transpose(kv, (0, 3, 1, 4, 2, 5)).reshape(
        spec.B, spec.G, cut.feature_blocks * cut.width, -1
    )
    k_sum = jnp.swapaxes(k_sum.reshape(*shape, cut.width)[:, :, 0], 1, 2)
    k_sum = k_sum.reshape(spec.B, spec.G, -1)
    return LinearState(kv[:, :, : spec.D, : spec.V], k_sum[:, :, : spec.D])


def whole_output(
    spec: LinearAttentionSpec, cut: Cut, out: jax.Array, den: jax.Array | None
) -> jax.Array:
    """Of what the kernel left, [B, T, heads, columns]; with its denominators [B, heads, T up to a
    whole chunk] where they are to be added up, too."""
    if adds_up(cut):
        shape = cut.feature_blocks, cut.value_blocks, spec.H
        num = jnp.sum(out.reshape(spec.B, spec.T, *shape, cut.values_width), axis=2)
        if den is not None:
            den = jnp.sum(den.reshape(spec.B, *shape, -1)[:, :, 0, :, : spec.T], axis=1)
            den = jnp.swapaxes(den, 1, 2)[:, :, None, :, None]
            num = num / jnp.maximum(den, spec.eps)
        out = jnp.swapaxes(num, 2, 3).astype(spec.dtype)
    out = out.reshape(spec.B, spec.T, spec.H, -1)[..., : spec.V]
    return out if spec.layout == "bthd" else jnp.swapaxes(out, 1, 2)
