"""Sequences of any number of rows, and heads of any multiple of 8 columns, by Hopper's kernels:
copies that take 64 columns of some rows (`row_copies.py`), interpreted beside the float64
reference; and their products in blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_linear_mosaic import OP, PLAIN, against_the_reference, draw
from test_mosaic_wide_gates import ids_of
from test_mosaic_wide_runs import wanted_of

import ato_jax
from ato_jax.ops.linear_attention import mosaic_gpu
from ato_jax.ops.linear_attention.mosaic_gpu import frame, row_copies, support
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401


def check(D: int, T: int, options: dict[str, Any]) -> None:
    """The kernels take the call as it is."""
    wanted = wanted_of(D, T, **{"dtype": "bfloat16"} | options)
    for phase in ("forward", "backward"):
        assert support.unsupported_as_given(wanted.request.spec, phase) is None
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


@newest
@pytest.mark.parametrize(
    "D, T, options",
    [
        (128, 203, {"q_lengths": jnp.array([99]), "kv_lengths": jnp.array([150])}),
        (96, 201, {"dtype": "float16"}),
        (112, 139, {"feature_map": "silu"} | PLAIN),
        (128, 133, {"dtype": "float16", "feature_map": "exp"} | PLAIN),
        (88, 136, {"layout": "bhtd"}),
        (256, 203, {}),
        (208, 137, {"dtype": "float16", "layout": "bhtd"}),
        (176, 139, {"feature_map": "exp"}),
        (136, 192, {"dtype": "float16", "feature_map": "silu"} | PLAIN),
        (248, 75, {"feature_map": "softplus", "given": True}),
    ],
)
def test_where_every_query_sees_every_key(D: int, T: int, options: dict[str, Any]) -> None:
    check(D, T, {"causal": False} | options)


@newest
@pytest.mark.parametrize(
    "D, T, options",
    [
        (256, 331, {}),
        (208, 201, {"dtype": "float16", "layout": "bhtd"}),
        (184, 203, {"decay": True, "feature_map": "softplus"}),
        (192, 331, {"causal": False, "segment_ids": ids_of(331, "some")}),
        (232, 264, {"causal": False, "segment_ids": ids_of(264, "short"), "dtype": "float16"}),
    ],
)
def test_wide_heads_in_runs(D: int, T: int, options: dict[str, Any]) -> None:
    check(D, T, options)


@newest
@pytest.mark.parametrize(
    "D, T, options",
    [
        (88, 200, {}),
        (120, 136, {"dtype": "float16", "decay": True}),
        (104, 136, {"causal": False, "segment_ids": ids_of(136, "some")}),
    ],
)
def test_columns_in_steps_of_8(D: int, T: int, options: dict[str, Any]) -> None:
    check(D, T, options)


@newest
@pytest.mark.parametrize(
    "T, S, D, V, options",
    [
        (72, 139, 128, 128, {}),
        (139, 136, 256, 256, {"dtype": "float16"}),
        (75, 69, 88, 120, {"feature_map": "relu"}),
        (64, 77, 184, 200, {"layout": "bhtd"}),
    ],
)
def test_other_rows_of_keys_and_columns_of_values(
    T: int, S: int, D: int, V: int, options: dict[str, Any]
) -> None:
    options = {"layout": "bthd", "dtype": "bfloat16"} | options
    layout, dtype = options["layout"], options.pop("dtype")
    arrays = [draw(1, T, 1, 1, layout, D=D)[0], *draw(1, S, 1, 1, layout, D=max(D, V))[1:]]
    arrays = [x[..., :width].astype(dtype) for x, width in zip(arrays, (D, D, V), strict=True)]
    wanted = numerics.oracle(OP, *arrays, **options)
    assert support.unsupported_as_given(wanted.request.spec, "backward") is None
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)


def test_tiles_are_in_blocks_where_rows_are_no_multiple_of_8() -> None:
    """Of a head of 192 columns a block and a copy for each 64; aligned, one of all."""
    for T, blocks in ((104, 1), (105, 3)):
        spec = numerics.prepare(OP, *draw(1, T, 1, 1, D=192), causal=True)[0].spec
        tiling = row_copies.by_blocks(spec)
        assert tiling.blocks == blocks and row_copies.by_blocks(spec, always=True).blocks == 3
        assert frame.tiling(spec).untiled == (blocks > 1)
    for D, copies in ((120, 16), (128, 1)):
        spec = numerics.prepare(OP, *draw(1, 104, 1, 1, D=D))[0].spec
        in_tiles = mosaic_gpu.spec_in_tiles(spec)
        assert row_copies.copies_of(row_copies.tiling(in_tiles)) == copies


def test_favor_needs_multiples_of_8_rows_where_every_query_sees_every_key() -> None:
    for T, features, reason in ((101, 96, "multiples of 8 rows"), (104, 88, "of 16 features")):
        favor = ato_jax.favor(jax.random.key(0), features, 64)
        spec = numerics.prepare(OP, *draw(1, T, 2, 2, D=64), feature_map=favor)[0].spec
        assert reason in str(mosaic_gpu.unsupported(spec, "forward"))
