"""What the cotangent of a returned state adds to the gradients, where there is a decay per head or
per step.

With D [F, V] and d [F] the cotangents of the returned kv and k_sum, l_t the log-decays, and w_j the
part of key j that the state still has, 0 for padding and in other segments than the last:

    w_j   = exp(sum l[j+1..])        w_start = exp(sum l), of an initial state S, z
    r_j   = D v_j + d                                             [F]
    dk_j += w_j r_j phi'(k_j)        dv_j += w_j D^T phi(k_j)
    dS   += w_start D                dz   += w_start d
    dl_t += w_start (<S, D> + z . d) + sum_{j < t} w_j phi(k_j) . r_j

The kernels' gradients are those of a call that returns no state. There a step's gradient is made of
products of states and their cotangents, <S, dS>, both rounded to the inputs' dtype. A cotangent of
another size than what queries add, and unrelated to S, leaves a sum of F V products of either sign
in them: rounding S, dS and the features in S put it off by a number that is nearly the same in all
of the last steps, and up to a quarter of a gradient there. Here D is multiplied in two parts,
rounded and what that leaves off, features are not rounded, and each key has its own number, so that
the sums begin where nothing is left of the keys.

One kernel adds to dk and dv in place. It leaves tiles alone of which nothing is left, so that a
call costs as much as the decay lets the state remember.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import launch
from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention.decay import LEAST_DECAY
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, LinearState
from ato_jax.triton import tiles
from ato_jax.triton.arithmetic import EXACT, round_to_tf32
from ato_jax.triton.launch import launch as launch_tiles
from ato_jax.triton.launch import piece_id

# Rows of a tile, columns of D that are multiplied at once, and warps; and where factors take four
# bytes a number. Beside more features both are half as many, but no product takes less than 16.
TILE, TILE_OF_FLOATS, MOST_FEATURES = (64, 64, 8), (32, 16, 8), 128


def add_returned(
    spec: LinearAttentionSpec,
    inputs: Inputs,
    cotangent: LinearState,
    found: Inputs,
    *,
    lowers: bool = True,
) -> Inputs:
    """The gradients `found` of a call that returns no state, with what the state's cotangent adds.

    Args:
      lowers: whether Pallas lowers the feature map to Triton; else XLA computes all.
    """
    assert inputs.decay is not None and found.decay is not None
    decay, real = _steps_of(spec, inputs)
    left, of_start = _left(spec, inputs, decay, real)
    by_kernel = lowers and launch.no_triton is None
    dk, dv, flows = (_by_kernel if by_kernel else _by_xla)(spec, inputs, cotangent, left, found)
    # A key's own number may be far larger than those of all earlier keys: it is never added.
    earlier = lax.cumsum(flows[:, :, :-1], axis=2)
    d_steps = jnp.pad(earlier, ((0, 0), (0, 0), (1, 0)))  # [B, G, S]
    d_state = found.initial_state
    if inputs.initial_state is not None and d_state is not None:
        own = of_start[..., None]
        kv, k_sum = cotangent
        d_state = LinearState(d_state.kv + own[..., None] * kv, d_state.k_sum + own * k_sum)
        passing = jnp.sum(inputs.initial_state.kv * kv, axis=(2, 3))
        passing += jnp.sum(inputs.initial_state.k_sum * k_sum, axis=2)
        d_steps += (of_start * passing)[..., None]
    d_steps = jnp.where(real[:, None], d_steps, 0.0)
    if spec.decay == "head":
        d_decay = jnp.sum(d_steps, axis=(0, 2))
    else:
        d_decay = d_steps if spec.layout == "bhtd" else jnp.swapaxes(d_steps, 1, 2)
    return found._replace(k=dk, v=dv, decay=found.decay + d_decay, initial_state=d_state)


def _steps_of(spec: LinearAttentionSpec, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The log-decays [B, G, S], and which keys are no padding [B, S]."""
    decay: Any = inputs.decay
    if spec.decay == "head":
        decay = jnp.broadcast_to(decay[:, None], (spec.B, spec.G, spec.S))
    elif spec.layout == "bthd":
        decay = jnp.swapaxes(decay, 1, 2)
    step = jnp.arange(spec.S, dtype=jnp.int32)
    lengths = inputs.kv_lengths
    if lengths is None:
        lengths = jnp.full(spec.B, spec.S, jnp.int32)
    real = step < lengths[:, None]
    return jnp.where(real[:, None], jnp.maximum(decay, LEAST_DECAY), 0.0), real


def _left(
    spec: LinearAttentionSpec, inputs: Inputs, decay: jax.Array, real: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """w_j [B, G, S] and w_start [B, G]."""
    # Summed from the end, so that the sums are small where much is left, and as exact.
    since = lax.cumsum(decay, axis=2, reverse=True)
    counted, starts = real, jnp.ones((spec.B, 1), bool)
    if inputs.kv_segments is not None:
        last = jnp.max(jnp.where(real, inputs.kv_segments, 0), axis=1, keepdims=True)
        counted, starts = real & (inputs.kv_segments == last), last == 0
    behind = jnp.pad(since[:, :, 1:], ((0, 0), (0, 0), (0, 1)))
    left = jnp.where(counted[:, None], jnp.exp(behind), 0.0)
    return left, jnp.where(starts, jnp.exp(since[:, :, 0]), 0.0)


def _by_kernel(
    spec: LinearAttentionSpec,
    inputs: Inputs,
    cotangent: LinearState,
    left: jax.Array,
    found: Inputs,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dk, dv, and w_j phi(k_j) . r_j [B, G, S]; a program has a tile of keys."""
    is_narrow = spec.dtype == "bfloat16"
    rows, most_columns, warps = TILE if is_narrow else TILE_OF_FLOATS
    if tiles.padded(spec.F) > MOST_FEATURES:
        rows, most_columns = rows // 2, most_columns // 2
    columns = max(tiles.COLUMNS, min(most_columns, tiles.padded(spec.V)))
    whole = spec.S % rows == 0

    def operand(x: jax.Array) -> jax.Array:
        if is_narrow:
            return x.astype(jnp.bfloat16)
        exact = spec.dtype == "float32" and spec.precision == "exact"
        x = x.astype(jnp.float32)
        return x if exact else round_to_tf32(x)

    def product(a: jax.Array, parts: list[jax.Array], trans_b: bool = False) -> jax.Array:
        exact = spec.dtype == "float32" and spec.precision == "exact"
        precision: Any = EXACT if exact else lax.Precision.DEFAULT
        a = operand(a)
        of_parts = [plgpu.dot(a, part, trans_b=trans_b, precision=precision) for part in parts]
        return sum(of_parts[1:], of_parts[0])

    def parts_of(x: jax.Array) -> list[jax.Array]:
        """Rounded, and what that leaves off."""
        if spec.dtype == "float32" and spec.precision == "exact":
            return [x]
        rounded = operand(x)
        return [rounded, operand(x - rounded.astype(jnp.float32))]

    def map_keys(k_ref: Any, keys: tiles.Rows, anew: bool) -> tuple[jax.Array, jax.Array]:
        """phi(k) and phi'(k), [C, F]."""
        k = tiles.load_tile(k_ref, keys, spec.D, anew=anew).astype(jnp.float32)  # [C, D]
        phi_k, slopes = jax.jvp(spec.feature_map, (k,), (jnp.ones_like(k),))
        exist = tiles.all_columns(spec.F).exist
        return phi_k if exist is None else jnp.where(exist[None, :], phi_k, 0.0), slopes

    def kernel(
        k_ref: Any,
        v_ref: Any,
        left_ref: Any,
        kv_ref: Any,
        k_sum_ref: Any,
        old_dk_ref: Any,
        old_dv_ref: Any,
        dk_ref: Any,
        dv_ref: Any,
        flows_ref: Any,
    ) -> None:
        here = tiles.tile_rows(piece_id() * rows, rows, spec.S, whole)
        left = tiles.load_rows(left_ref, here)  # [C]
        remains = jnp.max(left) > 0

        @pl.when(~remains)
        def _() -> None:
            tiles.store_rows(flows_ref, here, jnp.zeros((rows,), jnp.float32))

        @pl.when(remains)
        def _() -> None:
            # What the state does not have, such as padding, may be NaN.
            counted = tiles.Rows(here.numbers, here.exist, left > 0)
            of_keys = operand(map_keys(k_ref, counted, anew=False)[0])

            def add_columns(part: Any, read: jax.Array) -> jax.Array:
                some = tiles.Slice(part * columns, columns, spec.V)
                of_state = parts_of(tiles.load_matrix(kv_ref, spec.F, some))  # [F, v]
                v = tiles.load_tile(v_ref, counted, some)  # [C, v]
                added = product(of_keys, of_state) * left[:, None]  # [C, v]
                old = tiles.load_tile(old_dv_ref, here, some).astype(jnp.float32)  # [C, v]
                tiles.store_tile(dv_ref, here, some, old + added)
                return read + product(v, of_state, trans_b=True)

            of_sum = tiles.load_vector(k_sum_ref, spec.F)  # [F]
            read = jnp.broadcast_to(of_sum[None, :], of_keys.shape)  # [C, F]
            read = lax.fori_loop(0, pl.cdiv(spec.V, columns), add_columns, read)
            read *= left[:, None]
            phi_k, slopes = map_keys(k_ref, counted, anew=True)
            tiles.store_rows(flows_ref, here, jnp.sum(phi_k * read, axis=1))
            old = tiles.load_tile(old_dk_ref, here, spec.D).astype(jnp.float32)  # [C, D]
            tiles.store_tile(dk_ref, here, spec.D, old + read * slopes)

    def of_head(*shape: int) -> pl.BlockSpec:
        zeros = (0,) * len(shape)
        return pl.BlockSpec((None, None, *shape), lambda _, g, b: (b, g, *zeros))

    def of_rows(width: int) -> pl.BlockSpec:
        if spec.layout == "bhtd":
            return of_head(spec.S, width)
        return pl.BlockSpec((None, spec.S, None, width), lambda _, g, b: (b, 0, g, 0))

    given = inputs.k, inputs.v, left, *cotangent, found.k, found.v
    out_shape = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (found.k, found.v, left)]
    gradients = [of_rows(spec.D), of_rows(spec.V)]
    dk, dv, flows = launch_tiles(
        kernel,
        "linear_attention_returned_state",
        grid=(pl.cdiv(spec.S, rows), spec.G, spec.B),
        in_specs=[
            *(of_rows(spec.D), of_rows(spec.V), of_head(spec.S)),
            *(of_head(spec.F, spec.V), of_head(spec.F), *gradients),
        ],
        out_specs=[*gradients, of_head(spec.S)],
        out_shape=out_shape,
        warps=warps,
        stages=1,
        aliases={5: 0, 6: 1},
    )(*given)
    return dk, dv, flows


def _by_xla(
    spec: LinearAttentionSpec,
    inputs: Inputs,
    cotangent: LinearState,
    left: jax.Array,
    found: Inputs,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = "bsg" if spec.layout == "bthd" else "bgs"

    def product(letters: str, x: jax.Array) -> jax.Array:
        return jnp.einsum(letters, x, cotangent.kv, precision=lax.Precision.HIGHEST)

    of_rows = left if spec.layout == "bhtd" else jnp.swapaxes(left, 1, 2)
    of_rows = of_rows[..., None]
    k, v = (jnp.where(of_rows > 0, x, 0).astype(jnp.float32) for x in (inputs.k, inputs.v))
    phi_k, slopes = jax.jvp(spec.feature_map, (k,), (jnp.ones_like(k),))
    time = 2 - (spec.layout == "bthd")
    read = product(f"{rows}v,bgfv->{rows}f", v) + jnp.expand_dims(cotangent.k_sum, time)
    read *= of_rows
    added = product(f"{rows}f,bgfv->{rows}v", phi_k) * of_rows
    flows = jnp.sum(phi_k * read, axis=3)
    flows = flows if spec.layout == "bhtd" else jnp.swapaxes(flows, 1, 2)
    dk, dv = found.k + read * slopes, found.v + added
    return dk.astype(found.k.dtype), dv.astype(found.v.dtype), flows
