"""The state of a whole sequence: the sums over all pieces, in the forms that products read.

One pass, by a kernel that Pallas lowers to Triton. XLA would launch one kernel for S, one for z,
and one for each form of these, each of which takes longer to start than to run. XLA computes them
where JAX cannot lower to Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import launch
from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.linear_attention.scans.chunks import ALIKE, PARTS, C
from ato_jax.ops.linear_attention.scans.edges import NUMBERS, WARPS, State, in_rounds, of_head
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec, LinearState

# The least number whose inverse is finite: float32's smallest normal one.
LEAST_USUAL = 2.0**-126
# Features that may be negative can cancel in k_sum, but not in kv, which times 1 / k_sum has to be
# finite.
LEAST_USUAL_OF_SIGNED = 2.0**-40


class Totals(NamedTuple):
    """[B, G, ..] each, float32 except for what products read."""

    read: jax.Array  # kv [F, V] in bfloat16; unnormalised, scaled
    k_sum: jax.Array  # [F]
    rows: jax.Array  # [8, F] bfloat16: 4 rows of k_sum rounded, 4 of what the rounding left
    least: jax.Array  # [C], eps in the unit of the sums, whose inverse is finite
    kv: jax.Array | None = None  # [F, V], where it is returned


def least_usual(spec: LinearAttentionSpec) -> float:
    """The least sum of absolute values of k_sum by which sums are divided."""
    return LEAST_USUAL if spec.feature_map.nonnegative else LEAST_USUAL_OF_SIGNED


def add_up(
    spec: LinearAttentionSpec,
    pieces: State,
    added: LinearState | None = None,
    unit_of: jax.Array | None = None,
    *,
    returned: bool,
) -> Totals:
    """The sums over the pieces, and over `added`.

    Args:
      pieces: kv [B, G, P, F, V] and k_sum [B, G, P, F].
      added: a state that is added as it is.
      unit_of: a k_sum [B, G, F]. The pieces are divided by the sum of its absolute values, where
        this is at least `least_usual`, or multiplied by the scale in a call that is not normalised.
      returned: whether kv is returned in float32 as well.
    """
    if launch.no_triton is not None:
        return _add_up_by_xla(spec, pieces, added, unit_of, returned)
    B, G, count, rows, columns = pieces[0].shape
    size = rows * columns
    blocks = pl.cdiv(size, NUMBERS)
    types = {
        "read": (size, jnp.bfloat16),
        "k_sum": (rows, jnp.float32),
        "rows": (ALIKE * rows, jnp.bfloat16),
        "least": (C, jnp.float32),
    }
    if returned:
        types["kv"] = size, jnp.float32
    arrays = {"kv": pieces[0].reshape(B, G, count, size), "k_sum": pieces[1]}
    if added is not None:
        arrays |= {"added_kv": added.kv.reshape(B, G, size), "added_k_sum": added.k_sum}
    if unit_of is not None:
        arrays["unit_of"] = unit_of

    def kernel(*refs: Any) -> None:
        given = dict(zip(arrays, refs[: len(arrays)], strict=True))
        found = dict(zip(types, refs[len(arrays) :], strict=True))
        program = pl.program_id(0)

        def load(name: str, numbers: jax.Array, *piece: Any) -> jax.Array:
            limit = arrays[name].shape[-1]
            exist = None if limit % numbers.shape[0] == 0 else numbers < limit
            other = None if exist is None else 0.0
            # [numbers]
            return plgpu.load(given[name].at[(*piece, numbers)], mask=exist, other=other)

        def store(name: str, x: jax.Array, numbers: jax.Array, exist: Any = None) -> None:
            ref = found[name]
            plgpu.store(ref.at[numbers], x.astype(ref.dtype), mask=exist)

        in_columns = jnp.arange(pl.next_power_of_2(rows), dtype=jnp.int32)
        unit: Any = 1.0
        if unit_of is not None and spec.normalize:
            usual = jnp.sum(jnp.abs(load("unit_of", in_columns)))
            unit = 1 / jnp.where(usual >= least_usual(spec), usual, 1.0)
        elif unit_of is not None:
            unit = spec.scale

        def total(name: str, numbers: jax.Array) -> jax.Array:
            def add_some(done: Any, some: int, sums: jax.Array) -> jax.Array:
                loaded = [load(name, numbers, jnp.int32(done + step)) for step in range(some)]
                return sum(loaded, sums)

            sums = jnp.zeros(numbers.shape, jnp.float32)
            sums = in_rounds(count, add_some, sums) * unit
            return sums if added is None else sums + load(f"added_{name}", numbers)

        @pl.when(program < blocks)
        def _kv() -> None:
            numbers = program * NUMBERS + jnp.arange(NUMBERS, dtype=jnp.int32)
            kv = total("kv", numbers)
            if returned:
                store("kv", kv, numbers)
            scaled = unit_of is None and not spec.normalize
            store("read", kv * spec.scale if scaled else kv, numbers)

        @pl.when(program == blocks)
        def _k_sum() -> None:
            k_sum, exist = total("k_sum", in_columns), in_columns < rows
            store("k_sum", k_sum, in_columns, exist)
            rounded = k_sum.astype(jnp.bfloat16).astype(jnp.float32)
            for row in range(ALIKE):
                part = rounded if row < PARTS else k_sum - rounded
                store("rows", part, row * rows + in_columns, exist)
            of_chunk = jnp.arange(C, dtype=jnp.int32)
            least = jnp.maximum(jnp.full((C,), spec.eps, jnp.float32) * unit, LEAST_USUAL)
            store("least", least, of_chunk)

    outputs = pallas_call(
        kernel,
        grid=(blocks + 1, G, B),
        in_specs=[of_head(*array.shape[2:]) for array in arrays.values()],
        out_specs=[of_head(width) for width, _ in types.values()],
        out_shape=[jax.ShapeDtypeStruct((B, G, width), dtype) for width, dtype in types.values()],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        name="linear_attention_totals",
    )(*arrays.values())
    found = dict(zip(types, outputs, strict=True))
    shapes = {"read": (rows, columns), "kv": (rows, columns), "rows": (ALIKE, rows)}
    shaped = {name: x.reshape(B, G, *shapes.get(name, x.shape[2:])) for name, x in found.items()}
    return Totals(**shaped)


def _add_up_by_xla(
    spec: LinearAttentionSpec,
    pieces: State,
    added: LinearState | None,
    unit_of: jax.Array | None,
    returned: bool,
) -> Totals:
    kv, k_sum = (jnp.sum(of_pieces, axis=2) for of_pieces in pieces)  # [B, G, F, V], [B, G, F]
    unit = jnp.ones(k_sum.shape[:2], jnp.float32)
    if unit_of is not None and spec.normalize:
        usual = jnp.sum(jnp.abs(unit_of), axis=2)
        unit = 1 / jnp.where(usual >= least_usual(spec), usual, 1.0)
    elif unit_of is not None:
        unit *= spec.scale
    kv, k_sum = kv * unit[..., None, None], k_sum * unit[..., None]
    if added is not None:
        kv, k_sum = kv + added.kv, k_sum + added.k_sum
    read = kv * spec.scale if unit_of is None and not spec.normalize else kv
    rounded = lax.reduce_precision(k_sum, exponent_bits=8, mantissa_bits=7)
    parts = jnp.stack([rounded, k_sum - rounded], axis=2).astype(jnp.bfloat16)
    least = jnp.maximum(spec.eps * unit, LEAST_USUAL)
    least = jnp.broadcast_to(least[..., None], (*unit.shape, C))
    return Totals(
        read.astype(jnp.bfloat16),
        k_sum,
        jnp.repeat(parts, PARTS, axis=2),
        least,
        kv if returned else None,
    )
