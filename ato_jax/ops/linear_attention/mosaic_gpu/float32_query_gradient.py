"""dq where every query sees every key: what `float32.py` and `projected_whole.py` (FAVOR+) share.

Each chunk of queries is multiplied by S in bfloat16 parts (`float32_walk.py`):

    G_i       = S g_i,  den_i = phi(q_i) . z
    inverse_i = 1 / max(den_i, least),  e_i = phi(q_i) . G_i inverse_i, 0 where den_i <= least
    d_phi_i   = (G_i - e_i z) inverse_i

Without a normaliser inverse is 1 and e is 0. Each caller has its own functions that map rows to
features and pull d_phi back to dq.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax import mosaic
from ato_jax.mosaic import F32, HALF
from ato_jax.ops.linear_attention.mosaic_gpu import bidirectional
from ato_jax.ops.linear_attention.mosaic_gpu.float32_walk import Chunk, float32_walk
from ato_jax.ops.linear_attention.mosaic_gpu.frame import Config
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec

Halves = Mapping[int, jax.Array]  # [C, 64] each, by the first column


def in_halves(x: jax.Array) -> Halves:
    return {first: x[:, first : first + HALF] for first in range(0, x.shape[1], HALF)}


class Normaliser(NamedTuple):
    """Numbers of a chunk's rows, [C] each."""

    inverse: jax.Array
    e: jax.Array


def normaliser_of(chunk: Chunk, phi: Halves, G: Halves, least: float) -> Normaliser:
    den: Any = sum(jnp.sum(phi[first] * chunk.vector(0, first), axis=1) for first in phi)
    of_e = sum(jnp.sum(phi[first] * G[first], axis=1) for first in phi)
    inverse = 1.0 / jnp.maximum(den, least)
    return Normaliser(inverse, jnp.where(den > least, of_e * inverse, 0.0))


def d_phi_of(chunk: Chunk, G: Halves, first: int, normaliser: Normaliser | None) -> jax.Array:
    """d_phi in 64 columns from `first` on, [C, 64]."""
    d_phi = G[first]
    if normaliser is not None:
        d_phi = d_phi - mosaic.in_columns(normaliser.e, HALF) * chunk.vector(0, first)
        d_phi = d_phi * mosaic.in_columns(normaliser.inverse, HALF)
    return d_phi


def query_gradient(
    spec: LinearAttentionSpec,
    config: Config,
    name: str,
    inputs: Inputs,
    g: jax.Array,
    state: tuple[jax.Array, jax.Array | None],
    write: Callable[[Chunk], None],
    leaves_numbers: bool,
    common: jax.Array | None = None,
) -> Any:
    """dq and, with `leaves_numbers`, two numbers of each row, [B, H, T up to a whole chunk] in
    float32. A chunk's first tile is g, and its second is q, which dq replaces.

    Args:
      state: S in parts [B, G, parts, F, V] bfloat16, and z where it is read.
      common: a factor of all heads, [B, parts, rows, columns] bfloat16.
    """
    kv, k_sum = state
    rows = jax.ShapeDtypeStruct((spec.B, spec.H, mosaic.whole_chunks(spec.T)), F32)
    return float32_walk(
        spec,
        bidirectional.deal(spec, config, spec.H, spec.T),
        name,
        [g, inputs.q],
        kv,
        [] if k_sum is None else [k_sum],
        [jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype), *([rows] * (2 * leaves_numbers))],
        write,
        kept=[1],
        lengths=inputs.q_lengths,
        common=common,
    )
