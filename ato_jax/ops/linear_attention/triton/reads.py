"""How tiles read a stored state, or the cotangent of one, whole or in parts.

A tile of queries reads the state (kv [V, F], z [F]) ahead of it, a tile of keys the cotangent (dS^T
[V, F], dz [F]) behind it. A state that no program holds as a whole is multiplied part after part:
each part is loaded while the one before is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import products
from ato_jax.ops.linear_attention.triton.calls import STATE_PART, in_parts
from ato_jax.triton import tiles
from ato_jax.triton.tiles import Columns, Slice

# kv [V, F], or where it is read in parts the refs of both; and k_sum in each of some rows.
State = tuple[Any, jax.Array]


class RowParts(NamedTuple):
    """Rows that a large state is multiplied with: how many, and some columns of them [C, n]."""

    size: int
    load: Callable[[Columns], jax.Array]


def for_state(
    spec: LinearAttentionSpec, rows: jax.Array, load: Callable[[Columns], jax.Array]
) -> Any:
    """The rows as they are multiplied with a state: whole, or in parts."""
    return RowParts(rows.shape[0], load) if in_parts(spec) else rows


def load_state(spec: LinearAttentionSpec, refs: tuple[Any, Any], rows: int = 1) -> State:
    """kv [V, F], and k_sum in each of `rows` rows, [rows, F]."""
    kv_ref, k_sum_ref = refs
    k_sum = tiles.load_vector(k_sum_ref, spec.F)[None, :]  # [1, F]
    kv = refs if in_parts(spec) else tiles.load_matrix(kv_ref, spec.V, spec.F)  # [V, F]
    return kv, jnp.broadcast_to(k_sum, (rows, k_sum.shape[1]))


def load_cotangent(spec: LinearAttentionSpec, refs: tuple[Any, Any]) -> State:
    """dS^T [V, F], and dz in parts [16, F], whose sum over the rows is dz."""
    dkv, dz = load_state(spec, refs, products.PARTS)
    return dkv, dz / products.PARTS


def over_parts(width: int, body: Callable[[Columns, Any], Any], sums: Any) -> Any:
    """The sums after all parts of an axis of `width`.

    As a loop: while a part is multiplied the next is loaded, and Triton gives the product the
    layout that is best for it alone.
    """
    size = min(STATE_PART, tiles.padded(width))

    def add_part(i: Any, sums: Any) -> Any:
        return body(Slice(i * size, size, width), sums)

    return jax.lax.fori_loop(0, pl.cdiv(width, size), add_part, sums)


def _values_in_parts(spec: LinearAttentionSpec, phi: RowParts, kv_ref: Any) -> jax.Array:
    """phi [C, F] times kv^T: [C, V]."""

    def add_part(columns: Columns, found: jax.Array) -> jax.Array:
        kv = tiles.load_matrix(kv_ref, spec.V, columns)  # [V, f]
        return found + products.product(spec, phi.load(columns), kv, wide=True, trans_b=True)

    zeros = jnp.zeros((phi.size, tiles.padded(spec.V)), jnp.float32)
    return over_parts(spec.F, add_part, zeros)


def _features_in_parts(
    spec: LinearAttentionSpec, rows: RowParts, kv_ref: Any, *, exact: bool = False
) -> jax.Array:
    """rows [C, V] times kv: [C, F]; `exact` multiplies what kv's rounding left, too."""

    def add_part(columns: Columns, found: jax.Array) -> jax.Array:
        kv = tiles.load_matrix(kv_ref, columns, spec.F)  # [v, F]
        return found + products.product(spec, rows.load(columns), kv, wide=True)

    def add_rest(columns: Columns, found: jax.Array) -> jax.Array:
        kv = products.left_by_rounding(spec, tiles.load_matrix(kv_ref, columns, spec.F))  # [v, F]
        return found + products.product(spec, rows.load(columns), kv)

    found = jnp.zeros((rows.size, tiles.padded(spec.F)), jnp.float32)
    found = over_parts(spec.V, add_part, found)
    if exact and kv_ref.dtype == jnp.float32:
        found = over_parts(spec.V, add_rest, found)
    return found


def _output_in_parts(
    spec: LinearAttentionSpec, phi_q: RowParts, refs: tuple[Any, Any]
) -> tuple[jax.Array, Any]:
    """num [C, V] and den [C]."""
    kv_ref, k_sum_ref = refs

    def add_part(columns: Columns, sums: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        num, den = sums
        phi = phi_q.load(columns)  # [C, f]
        if spec.normalize:
            z = tiles.load_vector(k_sum_ref, columns)  # [f]
            den += jnp.sum(phi.astype(jnp.float32) * z[None, :], axis=1)
        kv = tiles.load_matrix(kv_ref, spec.V, columns)  # [V, f]
        return num + products.read_by_features(spec, phi, kv, trans_b=True), den

    num = jnp.zeros((phi_q.size, tiles.padded(spec.V)), jnp.float32)
    den = jnp.zeros(phi_q.size, jnp.float32) if spec.normalize else None
    return over_parts(spec.F, add_part, (num, den))


def _denominator(spec: LinearAttentionSpec, phi_q: jax.Array, z: jax.Array) -> jax.Array:
    """phi_q . z, [C]."""
    if z.shape[0] > 1:
        # phi_q is rounded as in the numerator's product: roundings that are alike cancel.
        return jnp.sum(products.rounded(spec, phi_q, wide=True) * z, axis=1)
    # A product, which takes fewer registers than z in each row.
    columns = products.as_columns(spec, z.reshape(-1))
    return jnp.sum(products.product(spec, phi_q, columns, wide=True), axis=1)


def read_for_output(
    spec: LinearAttentionSpec,
    refs: dict[str, Any],
    name: str,
    start: Any,
    phi_q: Any,
    state: State,
) -> tuple[jax.Array, Any]:
    """A state's part of num [C, V] and den [C].

    Args:
      name: the factors of `steps.gates` by which queries read the state, if refs has them.
      start: the first query's step.
      phi_q: [C, F] from `for_state`; float32 where z is in each of C rows, and where
        `products.rounds_both_signs`.
    """
    kv, z = state
    if in_parts(spec):
        num, den = _output_in_parts(spec, phi_q, kv)
    else:
        num = products.read_by_features(spec, phi_q, kv, trans_b=True)
        den = _denominator(spec, phi_q, z) if spec.normalize else None
    if name in refs:
        reads = tiles.load_steps(refs[name], start, num.shape[0])  # [C]
        num, den = num * reads[:, None], None if den is None else den * reads
    return num, den


def read_for_gradient(
    spec: LinearAttentionSpec,
    refs: dict[str, Any],
    name: str,
    start: Any,
    do: Any,
    state: State,
) -> tuple[jax.Array, Any]:
    """A state's part of y_i and of z_i (`causal.py`), [C, F] each; do from `for_state`."""
    kv, z = state
    if in_parts(spec):
        y = _features_in_parts(spec, do, kv[0])
    else:
        y = products.product(spec, do, kv, wide=True)
    z_seen = jnp.broadcast_to(z, y.shape) if spec.normalize else None
    if name in refs:
        reads = tiles.load_steps(refs[name], start, y.shape[0])[:, None]  # [C, 1]
        y, z_seen = y * reads, None if z_seen is None else z_seen * reads
    return y, z_seen


def read_for_values(
    spec: LinearAttentionSpec,
    refs: dict[str, Any],
    name: str,
    start: Any,
    phi_k: Any,
    sums: State,
) -> jax.Array:
    """The part of dv [C, V] that the sums dS^T, dz over later queries add; phi_k from
    `for_state`."""
    if in_parts(spec):
        dv = _values_in_parts(spec, phi_k, sums[0][0])
    else:
        dv = products.product(spec, phi_k, sums[0], wide=True, trans_b=True)
    # [C, 1]
    return dv * tiles.load_steps(refs[name], start, dv.shape[0])[:, None] if name in refs else dv


def read_for_features(
    spec: LinearAttentionSpec,
    refs: dict[str, Any],
    name: str,
    start: Any,
    v: Any,
    sums: State,
) -> jax.Array:
    """The part of phi(k)'s gradient [C, F] that these sums add; v from `for_state`, dz in parts
    [16, F]."""
    dz: Any = 0.0
    if spec.normalize or spec.return_state:
        if in_parts(spec):
            # As a product it would have a layout of its own.
            dz = jnp.sum(sums[1], axis=0)[None, :]
        else:
            # A product: with dz added as a vector, tiles took more shared memory than there is.
            dz = products.in_each_row(spec, v.shape[0], sums[1])
    if in_parts(spec):
        found = _features_in_parts(spec, v, sums[0][0], exact=True) + dz
    else:
        found = products.read_state(spec, v, sums[0]) + dz
    if name in refs:
        found *= tiles.load_steps(refs[name], start, found.shape[0])[:, None]  # [C, 1]
    return found
