"""Heads of 129 to 256 columns by the Hopper kernels that walk runs of rows: float16, documents
whose rows see both sides, and calls that are made to fit; interpreted beside the float64 reference.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_linear_mosaic import OP, PLAIN, against_the_reference, draw, options_of
from test_mosaic_lengths import decay_of
from test_mosaic_wide_gates import ids_of

from ato_jax.ops.linear_attention import api, mosaic_gpu
from ato_jax.ops.linear_attention.mosaic_gpu import powers, wide_powers
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401


def wanted_of(
    D: int,
    T: int,
    *,
    H: int = 1,
    G: int = 1,
    layout: str = "bthd",
    given: bool = False,
    dtype: str = "float16",
    scale: float = 1.0,
    shift: float = 0.0,
    decay: bool = False,
    until: int = 0,
    **options: Any,
) -> numerics.Oracle:
    """q and k are `shift` and normal numbers of this scale; rows up to `until` are near -14."""
    q, k, v = draw(1, T, H, G, layout, D=D)
    q, k = (x.astype(jnp.float32) * scale + shift for x in (q, k))
    q, k = (x.at[:, :until].set(x[:, :until] / scale - 14) for x in (q, k))
    options = options_of(1, G, layout, given, D) | options
    if decay:
        options["decay"] = decay_of("step", 1, T, G, layout)
    arrays = (x.astype(dtype) for x in (q, k, v))
    return numerics.oracle(OP, *arrays, causal=options.pop("causal", True), **options)


@newest
@pytest.mark.parametrize(
    "D, T, options",
    [
        (192, 320, {"given": True}),
        (160, 328, {"feature_map": "silu", "segment_ids": ids_of(328, "some")} | PLAIN),
        (144, 136, {"shift": -14.0}),
        (192, 136, {"scale": 30.0, "layout": "bhtd"}),
        (144, 328, {"scale": 30.0, "until": 200}),
        (144, 192, {"feature_map": "softplus", "shift": -8.0, "given": True} | PLAIN),
        (176, 136, {"feature_map": "relu", "scale": 10.0}),
        (192, 320, {"decay": True, "segment_ids": ids_of(320, "some"), "given": True}),
    ],
)
def test_causal_in_float16(D: int, T: int, options: dict[str, Any]) -> None:
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted_of(D, T, **options))


@newest
@pytest.mark.parametrize(
    "D, T, names, options",
    [
        (144, 328, "some", {"dtype": "bfloat16"}),
        (192, 576, "late", {"dtype": "bfloat16", "layout": "bhtd"}),
        (160, 328, "short", {}),
        (176, 584, "one", {"feature_map": "silu"} | PLAIN),
    ],
)
def test_documents(D: int, T: int, names: str, options: dict[str, Any]) -> None:
    """Rows see both sides of their segment. The last run has one chunk, two, or all four."""
    options = options | {"causal": False, "segment_ids": ids_of(T, names)}
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted_of(D, T, **options))


@newest
@pytest.mark.parametrize(
    "D, T, lengths, options",
    [
        (144, 600, (200, 400), {"dtype": "bfloat16"}),  # the second run, but not the first one
        (144, 800, (256, 512, 32), {"layout": "bhtd"}),  # of whole documents, and of a part of one
        (144, 584, (512, 72), {"feature_map": "silu", "dtype": "bfloat16"} | PLAIN),
        (144, 513, (513,), {"feature_map": "relu", "dtype": "bfloat16", "scale": 0.01}),
    ],
)
def test_runs_of_one_document(
    D: int, T: int, lengths: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Their rows read states alone, but those of the last run."""
    ids = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths))[None]
    options = options | {"causal": False, "segment_ids": ids}
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted_of(D, T, **options))


@newest
@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_runs_of_one_document_of_256_columns(dtype: str) -> None:
    ids = jnp.asarray(np.repeat(np.arange(2), (300, 300)))[None]
    options: dict[str, Any] = {"causal": False, "segment_ids": ids, "dtype": dtype}
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted_of(256, 600, **options))


@newest
@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("causal, dtype", [(True, "float16"), (False, "float16")])
def test_heads_of_256_columns(causal: bool, dtype: str) -> None:
    """Shared memory has room for few tiles: the first states of a unit fill it."""
    options = {"causal": causal, "segment_ids": ids_of(328, "some"), "dtype": dtype}
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted_of(256, 328, **options))


@newest
@pytest.mark.parametrize(
    "D, T, options",
    [
        (150, 203, {"decay": True, "given": True}),
        (147, 201, {"decay": True, "kv_lengths": jnp.array([150])}),
        (156, 201, {"causal": False, "H": 2, "kv_lengths": jnp.array([150]), "dtype": "bfloat16"}),
    ],
)
def test_odd_numbers_of_rows_in_segments(D: int, T: int, options: dict[str, Any]) -> None:
    """Rows that are added go on with the last segment; each query head gets keys of its own."""
    options = options | {"segment_ids": ids_of(T, "some")}
    against_the_reference("mosaic_gpu", "mosaic_gpu", wanted_of(D, T, **options))


def test_powers_bring_bounds_below_the_largest_float16() -> None:
    """Of each bound of `wide_powers.py`; rows that are not finite count for nothing."""
    spec = numerics.prepare(OP, *(x.astype("float16") for x in draw(1, 64, 2, 2, D=256)))[0].spec
    k = jax.random.normal(jax.random.key(0), (1, 64, 2, 256)) * jnp.array([[1e-3], [1e3]])
    v = jnp.full((1, 64, 2, 256), 2.0, jnp.float16).at[0, 5, 0, 3].set(jnp.inf)
    inputs = api.Inputs(k, k.astype(jnp.float16), v)
    by = wide_powers.of_keys(spec, inputs)
    assert by is not None
    largest = jnp.max(spec.feature_map(k), axis=(1, 3)) * by.keys
    state = jnp.sum(jnp.max(spec.feature_map(k), axis=3), axis=1) * by.keys * by.values * by.state
    for found in (largest, state):
        assert np.all((found >= powers.LARGEST * 0.99) & (found < 2.01 * powers.LARGEST))
    np.testing.assert_array_equal(by.values, jnp.full((1, 2), 2.0))
    features = jnp.array([[[1e-9, 2e-9], [3.0, jnp.nan]]])
    of_rows = wide_powers.of_queries(spec, by, features, jnp.ones_like(features), features, None)
    assert np.all(jnp.nanmax(features, axis=2) * of_rows.queries >= powers.LARGEST)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"return_state": True}, "segments with a state and without causal=True"),
    ],
)
def test_documents_are_refused(options: dict[str, Any], reason: str) -> None:
    arrays = draw(1, 264, 1, 1, D=256)
    request, _ = numerics.prepare(OP, *arrays, segment_ids=ids_of(264, "some"), **options)
    refused = mosaic_gpu.unsupported(request.spec, "forward")
    assert refused is not None and reason in refused
