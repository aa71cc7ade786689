"""A decay between a query and the keys on either side of it beside heads of 129 to 256 columns, by
the Hopper kernels that walk runs of rows: interpreted beside the float64 reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import test_linear_channel as channel
from test_linear_mosaic import OP, PLAIN, draw
from test_mosaic_lengths import decay_of
from test_mosaic_wide_gates import ids_of

import ato_jax
from ato_jax.ops.linear_attention import mosaic_gpu
from tests import numerics
from tests.interpreted import newest, no_races, stored_twice  # noqa: F401


def errors_of(wanted: numerics.Oracle) -> dict[str, jax.Array]:
    """What the kernels find, in two pieces where there are two runs; it is within the budgets."""
    configs = dict.fromkeys(("forward_config", "backward_config"), {"pieces": 2, "blocks": 3})
    with ato_jax.interpret():
        found = numerics.run_backends(
            "mosaic_gpu", "mosaic_gpu", wanted, device=channel.GPU, **configs
        )
    numerics.compare(found, wanted)
    return {
        name: jnp.linalg.norm((found[name] - exact).ravel()) / jnp.linalg.norm(exact.ravel())
        for name, exact in wanted.exact.items()
    }


@newest
@pytest.mark.usefixtures("stored_twice")
@pytest.mark.parametrize(
    "D, T, layout, dtype, decay, options",
    [
        (192, 328, "bthd", "bfloat16", -0.02, {}),
        (160, 584, "bhtd", "bfloat16", -1e-3, {"feature_map": "silu"} | PLAIN),
        (144, 323, "bthd", "float16", -0.3, {"feature_map": "relu"}),
        (152, 300, "bhtd", "float16", -30.0, {"feature_map": "identity"} | PLAIN),
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
@pytest.mark.usefixtures("stored_twice")
@pytest.mark.parametrize(
    "D, T, layout, dtype, strength, options",
    [
        (192, 328, "bthd", "bfloat16", 1.0, {}),
        (160, 584, "bhtd", "bfloat16", 5.0, {"feature_map": "silu"} | PLAIN),
        (144, 323, "bthd", "float16", 1.0, {"feature_map": "relu"}),
        (176, 300, "bhtd", "float16", 0.01, {"feature_map": "identity"} | PLAIN),
        (144, 264, "bthd", "bfloat16", 40.0, {"feature_map": "exp"}),
    ],
)
def test_of_steps(
    D: int, T: int, layout: str, dtype: str, strength: float, options: dict[str, Any]
) -> None:
    """Gradients of calls with a steep chunk are the next backend's."""
    arrays = (x.astype(dtype) for x in draw(1, T, 1, 1, layout, D=D))
    decay = decay_of("step", 1, T, 1, layout) * strength
    errors_of(numerics.oracle(OP, *arrays, layout=layout, decay=decay, **options))


@newest
@pytest.mark.usefixtures("stored_twice")
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
@pytest.mark.usefixtures("stored_twice")
@pytest.mark.parametrize(
    "kind, options", [("head", {"kv_lengths": jnp.array([150])}), ("step", {})]
)
def test_other_sizes(kind: str, options: dict[str, Any]) -> None:
    """Columns and rows that no kernel takes, and query heads that share keys: each gets keys of its
    own."""
    decay = decay_of(kind, 1, 201, 1, "bthd")
    errors_of(numerics.oracle(OP, *draw(1, 201, 2, 1, D=150), decay=decay, **options))


def test_no_choice_yet() -> None:
    """No card has timed them: `wide_heads.TIMED`."""
    for kind in ("head", "step"):
        arrays, decay = draw(1, 64, 1, 1, D=256), decay_of(kind, 1, 64, 1, "bthd")
        request, _ = numerics.prepare(OP, *arrays, decay=decay)
        spec = dataclasses.replace(request.spec, T=2**17, S=2**17)
        assert mosaic_gpu.unsupported(spec, "forward") is None
        assert mosaic_gpu.unsupported(spec, "backward") is None
        assert not mosaic_gpu.beats_later_backends(spec, channel.GPU, False)
        assert not mosaic_gpu.beats_later_backends(spec, channel.GPU, True)
        returns = dataclasses.replace(spec, return_state=True)
        assert mosaic_gpu.unsupported(returns, "forward") == (
            "does not support a state beside a decay without causal=True"
        )
