"""Which part of each array a program sees: block specs and shapes, whatever the spec's layout.

The index functions map a program's ids (piece, head, batch entry) to (batch entry, head) or (batch
entry, head, piece). Sequences come whole, [length, width] of one head: kernels index rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec
from ato_jax.ops.linear_attention.triton.calls import MatchedSpec, sequence_dtype

Index = Callable[..., tuple[Any, ...]]


def heads_axis(spec: LinearAttentionSpec) -> int:
    """The number of the heads' axis in a ref of several heads."""
    return 1 if spec.layout == "bthd" else 0


def own_head(p: Any, h: Any, b: Any) -> tuple[Any, Any]:
    """The head whose number is the program's."""
    return b, h


def head_of_group(spec: LinearAttentionSpec) -> Index:
    """The key/value head that the program's query head reads."""
    group = spec.H // spec.G
    return lambda p, h, b: (b, h // group)


def sequence_block(
    spec: LinearAttentionSpec,
    length: int,
    width: int,
    index: Index,
    heads: int | None = None,
) -> pl.BlockSpec:
    """The whole sequence of one head, [length, width].

    With `heads` it is that many heads, `index` says which such group, and the ref has an axis for
    them, `heads_axis(spec)`.
    """

    def bthd(*ids: Any) -> tuple[Any, ...]:
        b, h = index(*ids)
        return b, 0, h, 0

    def bhtd(*ids: Any) -> tuple[Any, ...]:
        b, h = index(*ids)
        return b, h, 0, 0

    if spec.layout == "bthd":
        return pl.BlockSpec((None, length, heads, width), bthd)
    return pl.BlockSpec((None, heads, length, width), bhtd)


def query_blocks(spec: LinearAttentionSpec) -> list[pl.BlockSpec]:
    """q [T, D] of the program's query head, and k [S, D] and v [S, V] of the head that it reads."""
    kv_head = head_of_group(spec)
    return [
        sequence_block(spec, spec.T, spec.D, own_head),
        sequence_block(spec, spec.S, spec.D, kv_head),
        sequence_block(spec, spec.S, spec.V, kv_head),
    ]


def gated_blocks_of_group(spec: LinearAttentionSpec) -> tuple[pl.BlockSpec, ...]:
    """q, k, v, a decay per step and channel, and do, of a key/value head and the query heads that
    read it; q and do have an axis for these."""
    group = spec.H // spec.G
    keys = sequence_block(spec, spec.S, spec.D, own_head)
    return (
        sequence_block(spec, spec.T, spec.D, own_head, group),
        keys,
        sequence_block(spec, spec.S, spec.V, own_head),
        keys,
        sequence_block(spec, spec.T, spec.V, own_head, group),
    )


def sequence_shape(
    spec: LinearAttentionSpec, length: int, heads: int, width: int
) -> jax.ShapeDtypeStruct:
    axes = (length, heads) if spec.layout == "bthd" else (heads, length)
    return jax.ShapeDtypeStruct((spec.B, *axes, width), sequence_dtype(spec))


def gradient_shape(
    spec: LinearAttentionSpec, length: int, heads: int, width: int
) -> jax.ShapeDtypeStruct:
    """The shape and dtype of the gradient of q or k."""
    shape = sequence_shape(spec, length, heads, width)
    return shape.update(dtype=jnp.float32) if isinstance(spec, MatchedSpec) else shape


def row_vectors(spec: LinearAttentionSpec) -> tuple[pl.BlockSpec, jax.ShapeDtypeStruct]:
    """A number for each query, [T] of one query head; and the array, [B, H, T] float32."""
    block = pl.BlockSpec((None, None, spec.T), lambda p, h, b: (b, h, 0))
    return block, jax.ShapeDtypeStruct((spec.B, spec.H, spec.T), jnp.float32)


def group_row_vectors(spec: LinearAttentionSpec) -> pl.BlockSpec:
    """A number for each query, [group, T] of the query heads of one key/value head."""
    return pl.BlockSpec((None, spec.H // spec.G, spec.T), lambda p, g, b: (b, g, 0))


def state_blocks(spec: LinearAttentionSpec, index: Index) -> list[pl.BlockSpec]:
    """kv [V, F] and k_sum [F] of one piece; `index(*program_ids)` is (batch, head, piece)."""
    return [
        pl.BlockSpec((None, None, None, spec.V, spec.F), lambda *ids: (*index(*ids), 0, 0)),
        pl.BlockSpec((None, None, None, spec.F), lambda *ids: (*index(*ids), 0)),
    ]


def state_shapes(
    spec: LinearAttentionSpec, heads: int, count: int, dtype: Any = jnp.float32
) -> list[jax.ShapeDtypeStruct]:
    """kv [B, heads, count, V, F] in `dtype`, and k_sum [B, heads, count, F] in float32."""
    return [
        jax.ShapeDtypeStruct((spec.B, heads, count, spec.V, spec.F), dtype),
        jax.ShapeDtypeStruct((spec.B, heads, count, spec.F), jnp.float32),
    ]


def whole_block(array: jax.Array, index: Index) -> pl.BlockSpec:
    """All that one head has of an array [B, heads, ..]."""
    rest = array.shape[2:]
    return pl.BlockSpec((None, None, *rest), lambda *ids: (*index(*ids), *(0 for _ in rest)))


def shapes_of(arrays: Iterable[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]


def length_arrays(inputs: Inputs) -> dict[str, jax.Array]:
    """[B, 1] each, of those lengths that are given."""
    found = {}
    if inputs.q_lengths is not None:
        found["q_length"] = inputs.q_lengths[:, None]
    if inputs.kv_lengths is not None:
        found["kv_length"] = inputs.kv_lengths[:, None]
    return found


def step_blocks(arrays: dict[str, jax.Array], index: Index) -> dict[str, pl.BlockSpec]:
    """The steps of one batch entry of arrays [B, N], or of one head of arrays [B, G or 1, N]."""

    def of_entry(*ids: Any) -> tuple[Any, ...]:
        return index(*ids)[0], 0

    def of_head(*ids: Any) -> tuple[Any, ...]:
        return *index(*ids), 0

    def of_all_heads(*ids: Any) -> tuple[Any, ...]:
        return index(*ids)[0], 0, 0

    found = {}
    for name, array in arrays.items():
        if array.ndim == 2:
            found[name] = pl.BlockSpec((None, array.shape[1]), of_entry)
        else:
            head = of_all_heads if array.shape[1] == 1 else of_head
            found[name] = pl.BlockSpec((None, None, array.shape[2]), head)
    return found


def sum_over_group(spec: LinearAttentionSpec, array: jax.Array, first: int = 0) -> jax.Array:
    """[B, H, n, ..] summed over the query heads of each key/value head, [B, G, first + n, ..]: the
    first pieces hold keys alone, to which queries add nothing."""
    array = jnp.sum(array.reshape(spec.B, spec.G, -1, *array.shape[2:]), axis=2)
    return jnp.pad(array, [(0, 0), (0, 0), (first, 0)] + [(0, 0)] * (array.ndim - 3))
