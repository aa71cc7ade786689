"""Heads of up to 128 columns by the Hopper kernels that walk runs of rows: documents in
float16, a decay between a query and the keys on either side in float16, and both at once in either
dtype; interpreted beside the float64 reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import test_linear_channel as channel
from test_linear_mosaic import OP, PLAIN, draw
from test_mosaic_lengths import decay_of
from test_mosaic_wide_both_ways import errors_of
from test_mosaic_wide_gates import ids_of

from ato_jax.ops.linear_attention import mosaic_gpu
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401


def wanted_of(
    D: int, T: int, *, layout: str = "bthd", dtype: str = "float16", **options: Any
) -> numerics.Oracle:
    arrays = (x.astype(dtype) for x in draw(1, T, 1, 1, layout, D=D))
    return numerics.oracle(OP, *arrays, layout=layout, **options)


@newest
@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(
    "D, T, names, layout, options",
    [
        (128, 328, "some", "bthd", {}),
        (80, 584, "one", "bhtd", {"feature_map": "silu"} | PLAIN),
        (64, 203, "some", "bthd", {}),
        (40, 328, "short", "bhtd", {"feature_map": "relu"}),
    ],
)
def test_documents(D: int, T: int, names: str, layout: str, options: dict[str, Any]) -> None:
    options = options | {"segment_ids": ids_of(T, names)}
    errors_of(wanted_of(D, T, layout=layout, **options))


@newest
@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(
    "D, T, kind, layout, options",
    [
        (128, 328, "head", "bthd", {}),
        (96, 584, "step", "bhtd", {"feature_map": "silu"} | PLAIN),
        (64, 203, "head", "bhtd", {"feature_map": "identity"} | PLAIN),
        (48, 328, "step", "bthd", {}),
    ],
)
def test_decays_both_ways(D: int, T: int, kind: str, layout: str, options: dict[str, Any]) -> None:
    decay = decay_of(kind, 1, T, 1, layout) * (0.2 if kind == "step" else 1)
    errors_of(wanted_of(D, T, layout=layout, decay=decay, **options))


@newest
@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(
    "D, T, kind, names, dtype, layout, options",
    [
        (128, 640, "head", "some", "bfloat16", "bthd", {}),
        (80, 323, "step", "edges", "bfloat16", "bhtd", {"feature_map": "silu"} | PLAIN),
        (64, 576, "step", "late", "float16", "bthd", {}),
        (40, 328, "head", "short", "bfloat16", "bthd", {"feature_map": "exp"}),
    ],
)
def test_decays_beside_segments(
    D: int,
    T: int,
    kind: str,
    names: str,
    dtype: str,
    layout: str,
    options: dict[str, Any],
) -> None:
    decay = decay_of(kind, 1, T, 1, layout) * (0.2 if kind == "step" else 1)
    options = options | {"segment_ids": ids_of(T, names), "decay": decay}
    errors_of(wanted_of(D, T, layout=layout, dtype=dtype, **options))


def test_choices_of_what_was_timed() -> None:
    arrays = [x.astype("float16") for x in draw(1, 64, 1, 1, D=128)]
    in_bfloat16 = [x.astype("bfloat16") for x in arrays]
    decay, ids = {"decay": decay_of("step", 1, 64, 1, "bthd")}, {"segment_ids": ids_of(64, "some")}
    for (q, k, v), options in ((arrays, decay), (arrays, ids), (in_bfloat16, decay | ids)):
        request, _ = numerics.prepare(OP, q, k, v, **options)
        spec = dataclasses.replace(request.spec, T=2**17, S=2**17)
        assert mosaic_gpu.unsupported(spec, "forward") is None
        assert mosaic_gpu.unsupported(spec, "backward") is None
        of_64_columns = dataclasses.replace(spec, D=64, F=64, V=64)
        for backward in (False, True):
            assert mosaic_gpu.beats_later_backends(spec, channel.GPU, backward)
            chosen = mosaic_gpu.beats_later_backends(of_64_columns, channel.GPU, backward)
            assert chosen == (spec.decay is None)
