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
from jax.typing import ArrayLike

from ato_jax import device, meshes, programs, shapes
from ato_jax.ops.attention import blocks
from ato_jax.ops.attention.api import Window, prepare
from ato_jax.ops.attention.merging import merge
from ato_jax.ops.attention.spec import AttentionSpec, Inputs
from ato_jax.ops.common import LAYOUTS, Integers, Precision, axes, with_batch


def combine(
    outs: jax.Array | Sequence[ArrayLike],
    lses: jax.Array | Sequence[ArrayLike],
    *,
    layout: str = "bthd",
) -> tuple[jax.Array, jax.Array]:
    """Merges attention over N parts of the keys into attention over all of them.

        lse = log sum_n exp(lse_n),  out = sum_n exp(lse_n - lse) out_n

    Split-KV decoding, piecewise attention and context parallelism all end with this sum. A part
    with lse -inf saw nothing: its out is ignored, whatever it holds. Where no part saw anything,
    out is 0, lse is -inf, and their gradients are 0. Give the sinks of a call to exactly one of the
    parts, also for queries that see none of its keys; its lse is then the sink's logit there, and
    carries the gradient.

    Args:
      outs: N arrays [B, T, H, V], as a sequence or stacked to [N, B, T, H, V]. B may be missing.
      lses: N arrays [B, T, H], likewise, float32: from `attention(..., return_lse=True)`.
      layout: "bthd", or "bhtd" for outs [B, H, T, V] and lses [B, H, T].

    Returns:
      (out, lse): out [B, T, H, V] in the parts' dtype and lse [B, T, H] float32.

    Raises:
      ValueError: There is no part, or the parts differ in shape or dtype, or lses do not fit outs.

    Example:
      >>> import ato_jax, jax.numpy as jnp
      >>> q, k, v = (jnp.ones((1, 8, 2, 16)) for _ in range(3))  # [B, T, H, D]
      >>> first = ato_jax.attention(q, k[:, :5], v[:, :5], return_lse=True)
      >>> second = ato_jax.attention(q, k[:, 5:], v[:, 5:], return_lse=True)
      >>> out, lse = ato_jax.combine(*zip(first, second))
      >>> bool(jnp.allclose(out, ato_jax.attention(q, k, v)))
      True
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
    q: ArrayLike,
    k: ArrayLike,
    lse: ArrayLike,
    *,
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
    scale: float | None = None,
    layout: str = "bthd",
    precision: Precision = None,
) -> jax.Array:
    """Computes the attention that each key received, summed over the queries.

        total_j = sum_i exp(s[i,j] - lse_i)

    A cache can use it to choose which keys to drop. The options must be those of the `attention`
    call that returned `lse`. Its sinks are part of `lse`; its dropout has no effect here. Memory is
    linear in T and S. The result is differentiable in q, k, lse and bias, to any order.

    Args:
      q: Queries [B, T, H, D]; B may be missing, as in `attention`.
      k: Keys [B, S, G, D].
      lse: float32 [B, T, H], as `attention(..., return_lse=True)` returns it.
      causal: As in `attention`, like all that follow.
      window: (left, right).
      query_offset: An int or integers [B].
      bias: Floats that broadcast to [B, H, T, S].
      mask: Booleans that broadcast to [B, H, T, S].
      segment_ids: Integers [B, T].
      q_segment_ids: Integers [B, T].
      kv_segment_ids: Integers [B, S].
      q_lengths: Integers [B].
      kv_lengths: Integers [B].
      softcap: c > 0.
      scale: D ** -0.5 unless given.
      layout: "bthd", or "bhtd" for q, k [B, H, T, D], lse [B, H, T] and the result [B, H, S].
      precision: How float32 inputs are multiplied.

    Returns:
      [B, S, H] float32.

    Raises:
      ValueError: An argument is wrong: its shape, dtype or value.

    Example:
      >>> import ato_jax, jax.numpy as jnp
      >>> q, k, v = (jnp.ones((1, 4, 2, 16)) for _ in range(3))
      >>> _, lse = ato_jax.attention(q, k, v, causal=True, return_lse=True)
      >>> total = ato_jax.total_attention(q, k, lse, causal=True)
      >>> [round(float(x), 3) for x in total[0, :, 0]]  # 1 + 1/2 + 1/3 + 1/4, 1/2 + 1/3 + 1/4, ...
      [2.083, 1.083, 0.583, 0.25]
    """
    # `prepare` would ask for scales of 8-bit arrays, which this function does not take.
    q = shapes.floating("q", q)
    k = shapes.floating("k", k, str(q.dtype))
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
    S = jnp.shape(k)[-3 if layout == "bthd" else -2]
    total = total[:, :S] if layout == "bthd" else total[..., :S]
    return total if request.batched else total[0]


@programs.promoting_ranks
def _total(spec: AttentionSpec, T: int, given: tuple[Inputs, jax.Array]) -> jax.Array:
    """[B, S, H] or [B, H, S] from the inputs and the lse of their first T queries."""
    inputs, lse = given
    lse = lse.swapaxes(1, 2) if spec.layout == "bthd" else lse  # [B, H, T]
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, spec.T - T)))
    if inputs.q_lengths is not None:
        held = jnp.arange(spec.T, dtype=jnp.int32) < inputs.q_lengths[:, None, None]
        lse = jnp.where(held, lse, -jnp.inf)
    config = blocks.default_config(spec, device.of_call(inputs))
    arrays = blocks.per_kv_head(spec, inputs)
    del arrays["v"]
    arrays["lse"] = lse.reshape(spec.B, spec.G, spec.H // spec.G, spec.T)

    @jax.checkpoint
    def of_block(arrays: blocks.Arrays) -> jax.Array:
        i, _ = blocks.indices(arrays)  # [block, 1]
        # [R, block]; true for NaN, which must stay NaN. The last block is padded with queries.
        saw = (arrays["lse"] != -jnp.inf) & (i[:, 0] < spec.T)
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
