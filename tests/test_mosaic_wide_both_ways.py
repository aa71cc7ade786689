"""A decay between a query and the keys on either side of it beside heads of 129 to 256 columns, by
the Hopper kernels that walk runs of rows: interpreted beside the float64 reference."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel
from test_linear_mosaic import OP, PLAIN, draw
from test_mosaic_lengths import decay_of
from test_mosaic_wide_gates import ids_of

import ato_jax
from ato_jax.ops.linear_attention import mosaic_gpu
from ato_jax.ops.linear_attention.scans import chunks
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401


def errors_of(wanted: numerics.Oracle) -> dict[str, float]:
    """Runs the kernels with two pieces, checks that all results are within their budgets, and
    returns each result's error beside its norm."""
    configs = dict.fromkeys(("forward_config", "backward_config"), {"pieces": 2, "blocks": 3})
    with ato_jax.interpret():
        found = numerics.run_backends(
            "mosaic_gpu", "mosaic_gpu", wanted, device=channel.GPU, **configs
        )
    numerics.compare(found, wanted)

    def norm_of(x: Any) -> float:
        return float(np.linalg.norm(np.asarray(x, np.float64)))

    return {
        name: norm_of(np.asarray(found[name], np.float64) - np.asarray(exact)) / norm_of(exact)
        for name, exact in wanted.exact.items()
    }


def is_steep(decay: jax.Array, layout: str, D: int, dtype: str) -> bool:
    """Whether the gradients of such a decay per step are the next backend's."""
    of_heads = jnp.swapaxes(decay, 1, 2) if layout == "bthd" else decay
    rows = jnp.pad(of_heads, ((0, 0), (0, 0), (0, -of_heads.shape[2] % 64))).reshape(-1, 64)
    sums = jnp.cumsum(rows, axis=1) * chunks.LOG2_E
    sizes = {"D": D, "V": D, "dtype": dtype, "decay": "step"}
    spec: Any = types.SimpleNamespace(**sizes, causal=False, segments=None)
    return bool(jnp.any(chunks.is_steep(spec, sums[:, 31], sums[:, 63])))


@newest
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steep_chunks_are_the_next_backends(dtype: str) -> None:
    """No two rows see each other."""
    decay = jnp.full((1, 130, 1), -80.0)
    assert is_steep(decay, "bthd", 144, dtype)
    arrays = (x.astype(dtype) for x in draw(1, 130, 1, 1, D=144))
    errors_of(numerics.oracle(OP, *arrays, decay=decay))


@newest
@pytest.mark.parametrize(
    "D, T, layout, dtype, decay, options",
    [
        (192, 328, "bthd", "bfloat16", -0.02, {}),
        (160, 584, "bhtd", "bfloat16", -1e-3, {"feature_map": "silu"} | PLAIN),
        (144, 323, "bthd", "float16", -0.3, {"feature_map": "relu"}),
        (152, 300, "bhtd", "float16", -5.0, {"feature_map": "identity"} | PLAIN),
        (96, 300, "bthd", "float16", -80.0, {}),
    ],
)
def test_of_heads(
    D: int, T: int, layout: str, dtype: str, decay: float, options: dict[str, Any]
) -> None:
    """The gradient is a sum over all pairs of rows: of any decay, also of a steep one."""
    arrays = (x.astype(dtype) for x in draw(1, T, 2, 2, layout, D=D))
    options = {"layout": layout, "decay": decay * jnp.asarray([1.0, 1.3])} | options
    errors = errors_of(numerics.oracle(OP, *arrays, **options))
    assert errors["ddecay"] < 3e-3


@newest
@pytest.mark.parametrize(
    "D, T, layout, dtype, strength, options",
    [
        (192, 328, "bthd", "bfloat16", 1.0, {}),
        (160, 584, "bhtd", "bfloat16", 5.0, {"feature_map": "silu"} | PLAIN),
        (144, 323, "bthd", "float16", 1.0, {"feature_map": "relu"}),
        (176, 300, "bhtd", "float16", 0.01, {"feature_map": "identity"} | PLAIN),
        (144, 264, "bthd", "bfloat16", 30.0, {"feature_map": "exp"}),
        (80, 200, "bthd", "float16", 20.0, {}),
    ],
)
def test_of_steps(
    D: int, T: int, layout: str, dtype: str, strength: float, options: dict[str, Any]
) -> None:
    """Some steps lose nearly all, whatever the others do."""
    arrays = (x.astype(dtype) for x in draw(1, T, 1, 1, layout, D=D))
    axis = layout.index("t")
    steps = jnp.isin(jnp.arange(T), jnp.array([0, 40, 200, 255, 256, T - 2]))
    steps = jnp.expand_dims(steps, (0, 3 - axis))
    decay = jnp.where(steps, -60.0, decay_of("step", 1, T, 1, layout) * strength)
    assert not is_steep(decay, layout, D, dtype)
    errors_of(numerics.oracle(OP, *arrays, layout=layout, decay=decay, **options))


@newest
@pytest.mark.parametrize(
    "D, T, layout, dtype, kind, names, options",
    [
        (192, 640, "bthd", "bfloat16", "head", "edges", {}),
        (160, 576, "bhtd", "float16", "step", "late", {}),
        (144, 323, "bthd", "bfloat16", "step", "some", {"feature_map": "exp"}),
        (176, 328, "bthd", "bfloat16", "head", "short", {"feature_map": "silu"} | PLAIN),
    ],
)
def test_beside_segments(
    D: int, T: int, layout: str, dtype: str, kind: str, names: str, options: dict[str, Any]
) -> None:
    """The first step's decay of a segment is between no two rows, and has no gradient."""
    arrays = (x.astype(dtype) for x in draw(1, T, 1, 1, layout, D=D))
    decay = decay_of(kind, 1, T, 1, layout) * (0.2 if dtype == "float16" else 1.0)
    ids = ids_of(T, names)
    options = {"layout": layout, "decay": decay, "segment_ids": ids} | options
    errors_of(numerics.oracle(OP, *arrays, **options))


@newest
@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("kind", ["head", "step"])
def test_heads_of_256_columns(kind: str) -> None:
    """Beside the own rows of q, or of v, shared memory has room for three tiles."""
    decay = decay_of(kind, 1, 328, 1, "bthd")
    errors_of(numerics.oracle(OP, *draw(1, 328, 1, 1, D=256), decay=decay))


@newest
@pytest.mark.parametrize(
    "kind, options", [("head", {"kv_lengths": jnp.array([150])}), ("step", {})]
)
def test_other_sizes(kind: str, options: dict[str, Any]) -> None:
    """Columns and rows that no kernel takes, and query heads that share keys: each gets keys of its
    own."""
    decay = decay_of(kind, 1, 201, 1, "bthd")
    errors_of(numerics.oracle(OP, *draw(1, 201, 2, 1, D=150), decay=decay, **options))


def test_they_are_chosen() -> None:
    for kind in ("head", "step"):
        arrays, decay = draw(1, 64, 1, 1, D=256), decay_of(kind, 1, 64, 1, "bthd")
        request, _ = numerics.prepare(OP, *arrays, decay=decay)
        spec = dataclasses.replace(request.spec, T=2**17, S=2**17)
        assert mosaic_gpu.unsupported(spec, "forward") is None
        assert mosaic_gpu.unsupported(spec, "backward") is None
        assert mosaic_gpu.beats_later_backends(spec, channel.GPU, False)
        # One number may cancel by chance.
        chosen = mosaic_gpu.beats_later_backends(spec, channel.GPU, True)
        assert chosen == (kind == "step")
        assert mosaic_gpu.beats_later_backends(
            dataclasses.replace(spec, H=4, G=4), channel.GPU, True
        )
        returns = dataclasses.replace(spec, return_state=True)
        assert mosaic_gpu.unsupported(returns, "forward") == (
            "does not support a state beside a decay without causal=True"
        )
