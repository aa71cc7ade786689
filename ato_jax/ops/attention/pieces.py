"""Attention in pieces: merging results over parts of the keys, and the attention per key.

    combine          lse = log sum_n exp(lse_n),  out = sum_n exp(lse_n - lse) out_n
    total_attention  total_j = sum_i exp(s[i,j] - lse_i)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ato_jax import device, meshes, shapes
from ato_jax.ops.attention import blocks
from ato_jax.ops.attention.api import prepare
from ato_jax.ops.attention.merging import merge
from ato_jax.ops.attention.spec import AttentionSpec, Inputs
from ato_jax.ops.common import LAYOUTS, axes, with_batch


def combine(outs: Any, lses: Any, *, layout: str = "bthd") -> tuple[jax.Array, jax.Array]:
    """Merges attention over parts of the keys into attention over all of them.

        lse = log sum_n exp(lse_n),  out = sum_n exp(lse_n - lse) out_n

    Split-KV decoding, piecewise attention and context parallelism all end with this. A piece
    with lse -inf saw nothing and counts for nothing, whatever its out holds; where no piece saw
    anything, out is 0 and lse -inf, and so are their gradients 0. Sinks belong to one piece, also
    for queries that see none of its keys: there lse is the sink's logit, and the only way by which
    the gradient of what the other pieces found reaches it.

    Args:
      outs: N pieces [B, T, H, V], a sequence or stacked to [N, B, T, H, V]; the batch axis may
        be missing.
      lses: as many [B, T, H], float32: what `attention(..., return_lse=True)` returned.
      layout: "bthd", or "bhtd" for [B, H, T, V] and [B, H, T].

    Returns:
      out in the pieces' dtype, and lse in float32.
    """
    shapes.one_of("layout", layout, LAYOUTS)
    out, lse = _stacked("outs", outs), _stacked("lses", lses)
    letters = axes(layout, "BTHV")
    if out.ndim not in (4, 5):
        raise ValueError(
            f"outs must hold pieces [{', '.join(letters)}] or [{', '.join(letters[1:])}], "
            f"got shape {out.shape[1:]}"
        )
    sizes: dict[str, int] = {}
    first = 5 - out.ndim
    shapes.bind(sizes, "outs", out.shape, "N" + letters[first:])
    shapes.bind(sizes, "lses", lse.shape, "N" + letters[first:-1])
    if sizes["N"] == 0:
        raise ValueError("outs must hold at least one piece, got none")

    return merge(out, lse)


def _stacked(name: str, pieces: Any) -> jax.Array:
    """A sequence of pieces, or an array of stacked ones, as one array with the pieces in front."""
    if not isinstance(pieces, Sequence):
        return shapes.floating(name, pieces)
    arrays = [shapes.floating(f"{name}[{n}]", piece) for n, piece in enumerate(pieces)]
    if not arrays:
        raise ValueError(f"{name} must hold at least one piece, got none")
    if len({(array.shape, array.dtype) for array in arrays}) > 1:
        listing = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
        raise ValueError(f"{name} must be alike in shape and dtype, got {listing}")
    return jnp.stack(arrays)


def total_attention(
    q: Any,
    k: Any,
    lse: Any,
    *,
    causal: bool = False,
    window: Any = None,
    query_offset: Any = None,
    bias: Any = None,
    mask: Any = None,
    segment_ids: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    softcap: Any = None,
    scale: Any = None,
    layout: str = "bthd",
    precision: Any = None,
) -> jax.Array:
    """The attention that each key received, summed over the queries: sum_i exp(s[i,j] - lse_i).

    Which keys a cache may drop is decided by this. The options are those of the `attention` call
    that returned `lse`; its sinks are in `lse` already, its dropout does not count. Memory is
    linear in T and S, the result differentiable in q, k, lse and bias, to any order.

    Args:
      q: [B, T, H, D]; the batch axis may be missing, here and everywhere.
      k: [B, S, G, D].
      lse: [B, T, H] ([B, H, T] with layout "bhtd"), as `attention(..., return_lse=True)` gives it.

    Returns:
      [B, S, H] float32 ([B, H, S] with layout "bhtd").
    """
    request = prepare(
        q,
        k,
        k,
        causal=causal,
        window=window,
        query_offset=query_offset,
        bias=bias,
        mask=mask,
        segment_ids=segment_ids,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        softcap=softcap,
        scale=scale,
        layout=layout,
        precision=precision,
    )
    spec, inputs = request.spec, request.inputs
    lse = shapes.floating("lse", lse)
    sizes = {"B": spec.B, "T": request.T, "H": spec.H}
    shapes.bind(sizes, "lse", lse.shape, axes(layout, "BTH")[0 if request.batched else 1 :])

    def partition() -> jax.Array:
        """Batch and heads are sharded as those of q, keys are not sharded."""
        found = list(meshes.partition(inputs.q)[:3])
        found[layout.index("t")] = None
        return meshes.sharded(*found)

    given = inputs, with_batch(lse, 3).astype(jnp.float32)
    total = meshes.call(functools.partial(_total, spec, request.T), given, partition)
    # S may be 0, which `prepare` pads to 1.
    total = total[:, : k.shape[-3]] if layout == "bthd" else total[..., : k.shape[-2]]
    return total if request.batched else total[0]


def _total(spec: AttentionSpec, T: int, given: tuple[Inputs, jax.Array]) -> jax.Array:
    """[B, S, H] or [B, H, S] from the inputs and the lse of their first T queries."""
    inputs, lse = given
    lse = lse.swapaxes(1, 2) if spec.layout == "bthd" else lse  # [B, H, T]
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, spec.T - T)))
    if inputs.q_lengths is not None:
        lse = jnp.where(jnp.arange(spec.T) < inputs.q_lengths[:, None, None], lse, -jnp.inf)
    config = blocks.default_config(spec, device.of_call(inputs))
    arrays = blocks.per_kv_head(spec, inputs)
    del arrays["v"]
    arrays["lse"] = lse.reshape(spec.B, spec.G, spec.H // spec.G, spec.T)

    @jax.checkpoint
    def of_block(arrays: blocks.Arrays) -> jax.Array:
        saw = arrays["lse"] != -jnp.inf  # [R, block]; true for NaN, which must stay NaN
        s = blocks.scores(spec, arrays)  # [R, block, S]
        p = jnp.exp(s - jnp.where(saw, arrays["lse"], 0)[..., None])
        return jnp.sum(jnp.where(saw[..., None], p, 0), axis=1)  # [R, S]

    def head(arrays: blocks.Arrays) -> jax.Array:
        shared, own = blocks.by_query_block(arrays, config.block_t)
        nothing = jnp.zeros((spec.H // spec.G, spec.S), arrays["q"].dtype)
        total, _ = lax.scan(
            lambda total, entry: (total + of_block(shared | entry), None),
            meshes.varying_with(nothing, own),
            own,
        )
        return total

    total = blocks.per_head(spec, config, head, arrays)  # [B, H, S]
    return total.swapaxes(1, 2) if spec.layout == "bthd" else total
