"""Gates per step and channel where rows see both sides, by two walks of the causal kernels,
forward and backward: interpreted beside float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_channel as channel
from test_linear_mosaic import OP, PLAIN, against_the_reference, draw, options_of
from test_mosaic_channel_segments import never_steep
from test_mosaic_wide_gates import check_gradients_under_vmap

from ato_jax.ops.linear_attention import fits, mosaic_gpu
from ato_jax.ops.linear_attention.mosaic_gpu import channel as by_channel
from ato_jax.ops.linear_attention.mosaic_gpu import fitted, support
from tests import numerics
from tests.choices import described
from tests.interpreted import newest, no_races  # noqa: F401


def call(T: int, D: int, V: int, gates: Any, options: dict[str, Any]) -> numerics.Oracle:
    """`starts` of `options`: the rows at which segments begin."""
    options = {"layout": "bthd"} | options
    decay = channel.draw_gates(gates, 1, T, 1, D)
    decay = decay if options["layout"] == "bthd" else jnp.swapaxes(decay, 1, 2)
    q, k, v = draw(1, T, 1, 1, options["layout"], D=max(D, V))
    q, k, v = q[..., :D], k[..., :D], v[..., :V]
    if starts := options.pop("starts", ()):
        ids = np.searchsorted(np.array(starts), np.arange(T), side="right")
        options["segment_ids"] = jnp.asarray(ids[None], jnp.int32)
    return numerics.oracle(OP, q, k, v, decay=decay, **options)


@newest
@pytest.mark.parametrize(
    "T, D, V, options",
    [
        (136, 128, 128, {}),
        (128, 64, 64, options_of(1, 1, "bhtd", True, 64)),
        (72, 48, 80, PLAIN | {"feature_map": "identity"}),
        (136, 96, 96, {"starts": (30, 31, 64, 100)}),
    ],
)
def test_walks(
    T: int, D: int, V: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state belongs to the walk from the start. Strong gates at a border are part of no walk."""
    monkeypatch.setattr(by_channel, "turns_of", never_steep)
    against_the_reference("mosaic_gpu", "mosaic_gpu", call(T, D, V, "mild", options))


@newest
def test_steep_chunks() -> None:
    """Their gradients are the next backend's, XLA's."""
    against_the_reference("mosaic_gpu", "mosaic_gpu", call(72, 64, 64, "steep", {}))


@newest
def test_blocks_of_wide_heads() -> None:
    """Two blocks of features, whose sums are added up with those of the walks."""
    against_the_reference("mosaic_gpu", "mosaic_gpu", call(72, 144, 64, "mild", {}))


@newest
@pytest.mark.parametrize(
    "D, V, options",
    [(48, 48, {}), (160, 32, {"causal": True}), (144, 32, {})],
)
def test_dv_is_rounded_once(
    D: int, V: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA adds up dv over two walks, over two blocks of features, and over both, and the scale is
    no power of two. Features have either sign, so that roundings do not average out. If shares of
    dv are rounded, or if q' is rounded with its scale, dv is beyond nine tenths of its budget."""
    monkeypatch.setattr(by_channel, "turns_of", never_steep)
    q, k, v = (
        channel.draw(1, 128, 1, columns, dtype="bfloat16", seed=seed)
        for seed, columns in enumerate((D, D, V), start=10)
    )
    decay = channel.draw_gates("mild", 1, 128, 1, D)
    wanted = numerics.oracle(OP, q, k, v, decay=decay, feature_map="identity", **options)
    dv = against_the_reference("mosaic_gpu", "mosaic_gpu", wanted)["dv"]
    assert dv.error < 0.9 * numerics.budget("dv", "bfloat16"), str(dv)


@newest
def test_under_vmap() -> None:
    """Each entry of the larger batch becomes two, side by side."""
    arrays = (*draw(2, 72, 1, 1, D=64), channel.draw_gates("mild", 2, 72, 1, 64))
    check_gradients_under_vmap(*arrays)


@pytest.mark.parametrize(
    "sizes, options, steps",
    [
        ({}, {}, ""),
        ({"T": 70}, {}, "Padded"),
        ({"T": 70}, {"return_state": True}, "Padded"),
        ({"T": 70, "D": 36}, {"segments": True}, "Padded"),
        ({"G": 1}, {"segments": True, "causal": True}, "Expanded"),
        ({"G": 1, "T": 70, "D": 40}, {"lengths": True}, "Expanded Counted Padded"),
        ({"T": 70}, {"lengths": True, "causal": True, "segments": True}, "Counted Padded"),
    ],
)
def test_calls_that_are_made_to_fit(
    sizes: dict[str, int], options: dict[str, Any], steps: str
) -> None:
    """Where XLA alone would take a call, copies of its arrays are made for the kernels."""
    of = {"T": 72, "H": 2, "G": 2, "D": 64} | sizes
    T, D, options = of["T"], of["D"], dict(options)
    q, k = (jnp.ones((1, T, of[heads], D), jnp.bfloat16) for heads in "HG")
    if options.pop("segments", False):
        options["segment_ids"] = jnp.zeros((1, T), jnp.int32)
    if options.pop("lengths", False):
        options["kv_lengths"] = jnp.array([T])
    decay = jnp.zeros(k.shape)
    request, _ = numerics.prepare(OP, q, k, k, decay=decay, **options)
    spec = dataclasses.replace(request.spec, B=2048)
    fit = support.fit_of(spec, "backward")
    assert steps == ("" if fit is None else " ".join(type(step).__name__ for step in fit.steps))
    assert mosaic_gpu.unsupported(spec, "backward") is None
    assert mosaic_gpu.beats_later_backends(spec, described("H200"), True)


def test_groups_that_triton_takes_are_not_written_out() -> None:
    q, k = (jnp.ones((1, 72, heads, 128), jnp.bfloat16) for heads in (4, 2))
    decay = jnp.zeros(k.shape)
    request, _ = numerics.prepare(OP, q, k, k, decay=decay, causal=True)
    steps = [step for fit in fitted.candidates(request.spec) for step in fit.steps]
    assert not any(isinstance(step, fits.Expanded) for step in steps)


def test_gradients_of_either_sign_without_a_normaliser_are_the_next_backends() -> None:
    """No card has measured dv of these calls since its shares are added up in float32."""
    q = jnp.ones((1, 72, 2, 128), jnp.bfloat16)
    for name, is_chosen in (("identity", False), ("elu1", True)):
        options: Any = {"decay": jnp.zeros(q.shape), "normalize": False, "feature_map": name}
        request, _ = numerics.prepare(OP, q, q, q, **options)
        spec = dataclasses.replace(request.spec, B=2048)
        assert mosaic_gpu.beats_later_backends(spec, described("H200"), False)
        assert mosaic_gpu.beats_later_backends(spec, described("H200"), True) == is_chosen


def test_few_rows_are_taken_where_xla_alone_is_behind() -> None:
    """XLA takes as long as its scan has steps; what has fewer was not measured."""
    for T, heads, is_chosen in ((1024, 4, True), (1024, 3, False), (512, 8, False)):
        q = jnp.ones((1, T, 1, 128), jnp.bfloat16)
        request, _ = numerics.prepare(OP, q, q, q, decay=jnp.zeros(q.shape))
        spec = dataclasses.replace(request.spec, B=heads)
        for backward in (False, True):
            assert mosaic_gpu.beats_later_backends(spec, described("H200"), backward) == is_chosen
