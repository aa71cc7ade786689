"""The check of stores that run over the end of an axis, in kernels that are traced alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from tests.interpreted import no_races  # noqa: F401

SWIZZLED = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def trace(shape: tuple[int, ...], swizzled: bool, index: Any) -> None:
    """A kernel that stores to `index(block)` of an array."""

    def body(_: Any, out: Any, tile: Any) -> None:
        target = out.at[index(jax.lax.axis_index("block"))]
        plgpu.copy_smem_to_gmem(tile if swizzled else tile.at[0], target)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        scratch_types=[plgpu.SMEM((8, 64), jnp.bfloat16, transforms=SWIZZLED * swizzled)],
        grid=(4,),
        grid_names=("block",),
        num_threads=1,
        thread_name="group",
    )
    jax.eval_shape(kernel, jnp.zeros(8))


def test_a_row_of_a_narrow_head_is_refused() -> None:
    """40 of 64 columns are the head's. Pallas refuses what is known to be too long itself."""
    with pytest.raises(ValueError, match="64 of 40 elements of axis 2"):
        trace((16, 3, 40), False, lambda n: (n, 1, pl.ds(0 * n, 64)))


def test_a_vector_beyond_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="64 of 100 elements of axis 1"):
        trace((4, 100), False, lambda n: (0, pl.ds(n * 64, 64)))


def test_what_is_cut_off_or_inside_is_taken() -> None:
    trace((16, 40), True, lambda n: (pl.ds(n * 8, 8), pl.ds(0 * n, 64)))  # by a tensor map
    trace((16, 3, 64), False, lambda n: (n, 1, pl.ds(0, 64)))
    trace((4, 256), False, lambda n: (0, pl.ds(n * 64, 64)))
