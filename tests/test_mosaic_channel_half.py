"""Gates per step and channel in float16, forward, by Hopper's kernels: interpreted beside float64.
The gradients are another backend's."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel
from test_linear_mosaic import OP, PLAIN, against_the_reference, draw, options_of

from ato_jax.ops.linear_attention import mosaic_gpu
from ato_jax.ops.linear_attention.mosaic_gpu import channel as by_channel
from ato_jax.ops.linear_attention.mosaic_gpu import channel_powers
from tests import numerics
from tests.choices import described
from tests.interpreted import newest, no_races  # noqa: F401


def call(
    T: int, H: int, D: int, V: int, gates: Any, options: dict[str, Any], scale: float = 1.0
) -> numerics.Oracle:
    """`starts` of `options`: the rows at which segments begin."""
    options = {"layout": "bthd", "causal": True} | options
    decay = channel.draw_gates(gates, 1, T, H, D)
    decay = decay if options["layout"] == "bthd" else jnp.swapaxes(decay, 1, 2)
    arrays = draw(1, T, H, H, options["layout"], D=max(D, V))
    q, k, v = ((x.astype(jnp.float32) * scale).astype(jnp.float16) for x in arrays)
    if starts := options.pop("starts", ()):
        ids = np.searchsorted(np.array(starts), np.arange(T), side="right")
        options["segment_ids"] = jnp.asarray(ids[None], jnp.int32)
    return numerics.oracle(OP, q[..., :D], k[..., :D], v[..., :V], decay=decay, **options)


@newest
@pytest.mark.parametrize(
    "T, H, D, V, gates, scale, options",
    [
        (136, 1, 128, 128, "mild", 1.0, {}),
        (128, 2, 64, 64, "mild", 10.0, options_of(1, 2, "bhtd", True, 64)),
        (136, 1, 128, 128, "mild", 0.01, {"starts": (30, 31, 64, 100)}),
        (72, 1, 48, 80, "mild", 1.0, PLAIN | {"feature_map": "identity", "causal": False}),
        (128, 1, 144, 64, -0.02, 1.0, options_of(1, 1, "bthd", True, 144, 64)),
    ],
)
def test_outputs(
    T: int, H: int, D: int, V: int, gates: Any, scale: float, options: dict[str, Any]
) -> None:
    """Also of two heads in a tile, of blocks of wide ones, and where rows see both sides."""
    against_the_reference("mosaic_gpu", "xla", call(T, H, D, V, gates, options, scale))


@newest
def test_rows_of_their_own() -> None:
    """Where a step loses more than float16's range, a turn has one row."""
    against_the_reference("mosaic_gpu", "xla", call(72, 2, 32, 32, "steep", {}))


def test_turns_of_one_row() -> None:
    """Two rows of which the second loses too much are taken one by one; others are not."""
    sums = jnp.zeros((1, 1, 3, 2, 64)).at[0, 0, 0, 0, 30].set(-9.0).at[0, 0, 1, 1, 14].set(-9.0)
    found = by_channel.turns_of(sums, 8.0, by_channel.MOST_TURNS_IN_FLOAT16)
    assert found[0, 0].tolist() == [64, 16, 1]
    row = by_channel.turn_of(5, 64, in_float16=True)
    assert (row.first, int(row.middle), row.last) == (5, 5, 5)


def test_powers() -> None:
    """What is rounded stays within float16 at any scale of the inputs."""
    k = jnp.asarray(channel.draw(1, 128, 2, 64), jnp.float16)
    sizes = {"decay": jnp.zeros(k.shape), "causal": True}
    for scale in (1e-3, 1.0, 300.0):
        q, v = k * jnp.float16(scale), jnp.full_like(k, 6e4)
        request, _ = numerics.prepare(OP, q, q, v, **sizes)
        spec, inputs = request.spec, request.inputs
        found = channel_powers.of_call(spec, inputs, None)
        assert found is not None
        c_k, s = (
            found.of_heads[..., n] for n in (channel_powers.Power.KEYS, channel_powers.Power.STATE)
        )
        phi = spec.feature_map(q.astype(jnp.float32))
        largest = jnp.max(phi, axis=(1, 3)) * c_k
        assert jnp.all((largest >= 2.0**6) & (largest < 2.0**7))
        rows = jnp.swapaxes(jnp.max(phi, axis=3), 1, 2) * jnp.exp2(found.queries)
        assert jnp.all((rows >= 1) & (rows < 2))
        state = jnp.abs(jnp.einsum("bthd,bthv->bhdv", phi, v.astype(jnp.float32)))
        assert jnp.max(state * (c_k * s)[..., None, None]) < 2.0**15


def test_what_is_refused_and_chosen() -> None:
    """Gradients, and maps whose features one power cannot hold. None chooses these kernels where
    XLA alone would take the call."""
    k = jnp.ones((1, 128, 2, 64), jnp.float16)

    def spec_of(**options: Any) -> Any:
        return numerics.prepare(OP, k, k, k, decay=jnp.zeros(k.shape), **options)[0].spec

    for options in ({"causal": True}, {"segment_ids": jnp.zeros((1, 128), jnp.int32)}, {}):
        spec = spec_of(**options)
        assert mosaic_gpu.unsupported(spec, "forward") is None
        assert "gradients of a decay per channel" in (
            mosaic_gpu.unsupported(spec, "backward") or ""
        )
        many = dataclasses.replace(spec, B=1024)
        assert mosaic_gpu.beats_later_backends(many, described("H200"), False)
        assert not mosaic_gpu.beats_later_backends(many, described("H200"), True)
    assert "feature_map='exp'" in (
        mosaic_gpu.unsupported(spec_of(feature_map="exp"), "forward") or ""
    )
