"""A kernel over a grid (pieces, heads, batch).

Programs start in the order heads, pieces, batch: the heads of one row lie side by side in memory,
so programs that run at one time read and write whole lines of it together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu


def piece_id() -> jax.Array:
    """Which piece a program of `launch` has."""
    return pl.program_id(1)


def launch(
    kernel: Callable[..., None],
    name: str,
    *,
    grid: tuple[int, int, int],
    in_specs: Any,
    out_specs: Any,
    out_shape: Any,
    warps: int,
    stages: int,
    aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """The kernel as a function of arrays.

    Args:
      grid: how many pieces, heads and batch entries.
      in_specs, out_specs: block specs whose index maps take (piece, head, batch entry).
      aliases: from an input's number to that of the output which takes over its memory, contents
        included; inputs are numbered as the leaves of `in_specs`.
    """
    pieces, heads, batch = grid

    def turned(spec: pl.BlockSpec) -> pl.BlockSpec:
        index_map: Any = spec.index_map
        return pl.BlockSpec(spec.block_shape, lambda h, p, b: index_map(p, h, b))

    in_specs, out_specs = jax.tree.map(
        turned, (in_specs, out_specs), is_leaf=lambda leaf: isinstance(leaf, pl.BlockSpec)
    )
    return pallas_call(
        kernel,
        grid=(heads, pieces, batch),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        name=name,
    )
