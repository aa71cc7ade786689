"""Which block sizes and launches softmax attention gets on Hopper by rule."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from ato_jax.ops.attention import mosaic_gpu
from ato_jax.ops.attention.eight_bits import Float8Spec
from ato_jax.ops.attention.mosaic_gpu import gradient_storage
from ato_jax.ops.attention.mosaic_gpu.frame import Config
from ato_jax.ops.attention.mosaic_gpu.schedule import Schedule
from ato_jax.ops.attention.spec import AttentionSpec
from tests.test_attention_mosaic import H200, spec_of
from tests.test_attention_mosaic_rounds import launches_of, taken_by


def rule(B: int, T: int, D: int, causal: bool, S: int | None = None, **changes: Any) -> str:
    """Warpgroups of the forward kernel, that for dq, and that for dk and dv, each with a P where a
    block takes several tiles."""
    sizes = dict(B=B, T=T, S=S or T, H=16, G=16, D=D, V=D, right=0 if causal else None)
    spec = spec_of(**sizes | changes)
    config = mosaic_gpu.default_config(spec, H200)
    passes = {of.of_keys: of for of in gradient_storage.passes(spec, config)}
    assert Schedule(spec, config).rounds.persistent == config.persistent
    assert passes[False].persistent == config.dq_persistent
    assert passes[True].persistent == config.dkv_persistent
    kernels = [
        (config.consumers, config.persistent),
        (config.dq_consumers, config.dq_persistent),
        (config.dkv_consumers, config.dkv_persistent),
    ]
    return " ".join(f"{count}{'P' * ahead}" for count, ahead in kernels)


def loads_of(spec: AttentionSpec, config: Config) -> Iterator[list[int]]:
    """The steps of each block of each persistent launch."""
    for dealt, steps in launches_of(spec, config):
        if dealt.persistent:
            yield [sum(steps[tile] for *_, tile in items) for items in taken_by(dealt)]


@pytest.mark.parametrize(
    "B, T, D, causal, changes, wanted",
    [
        (32, 512, 128, False, {}, "2P 2P 2P"),
        (4, 4096, 128, False, {}, "2P 2P 2P"),
        (16, 1024, 128, True, {}, "2P 2P 2P"),
        (8, 2048, 128, True, {}, "2P 2 2"),
        (4, 4096, 128, True, {}, "2 2 2"),
        (64, 256, 128, True, {}, "2P 2 2"),
        (32, 512, 64, False, {}, "3P 3P 3P"),
        (32, 512, 64, False, dict(keep_rest=True), "2P 3P 3P"),
        (8, 2048, 64, False, {}, "3P 3P 3P"),
        (4, 4096, 64, False, {}, "3P 3P 3"),
        (64, 256, 64, False, {}, "2P 3P 3P"),
        (16, 1024, 64, False, dict(keep_rest=True), "2P 3P 3P"),
        (8, 2048, 64, False, dict(keep_rest=True), "3P 3P 3P"),
        (4, 4096, 64, True, dict(keep_rest=True), "2 3 3"),
        (2, 8192, 64, True, dict(keep_rest=True), "3 3 3"),
        (128, 128, 128, False, {}, "2P 2 2"),
        (32, 512, 64, True, {}, "2P 2P 2P"),
        (16, 1024, 64, True, {}, "2P 2P 3P"),
        (8, 2048, 64, True, {}, "2P 3 3"),
        (4, 4096, 64, True, {}, "3 3 3"),
        (32, 256, 64, True, dict(S=8192), "2 3 3"),  # the tile of a short T is not half empty
        (16, 1024, 256, False, {}, "2 2P 2P"),
        (16, 1024, 256, True, {}, "2 2 2"),
        # 200 pairs of tiles make one and a half rounds, of whose second one the fullest block takes
        # more than it saves.
        (5, 1024, 128, True, dict(H=10, G=10), "2 2 2"),
        # The fullest block has 1.15 and 1.19 times the mean; at T 1024 this pays up to 1.195.
        (3, 1024, 128, True, {}, "2P 2P 2P"),
        (5, 1024, 128, True, {}, "2P 2P 2P"),
        # Each block has one pair of tiles.
        (4, 512, 64, True, {}, "2P 2P 2P"),
        # Each block has one tile: there is no next one.
        (1, 1024, 128, False, {}, "2 2 2"),
        # One round of three warpgroups, where two would need two rounds.
        (1, 1024, 64, False, dict(H=20, G=20, keep_rest=True), "3 3 3"),
        # The pairs of tiles are not equal.
        (32, 1024, 128, True, dict(S=512), "2 2 2"),
        (32, 512, 128, True, dict(S=1024), "2 2 2"),
        (16, 1024, 128, True, dict(offset=-512), "2 2 2"),
        (16, 1024, 128, True, dict(query_offset=True), "2 2 2"),
        (16, 1024, 128, True, dict(right=256), "2 2 2"),
        # None of these was measured.
        (16, 1024, 128, False, dict(softcap=2.0), "2 2 2"),
        (16, 1024, 64, True, dict(left=512), "3 3 3"),
        (16, 1024, 64, True, dict(segments=True), "3 3 3"),
        (16, 1024, 64, True, dict(q_lengths=True), "3 3 3"),
        (16, 1024, 128, True, dict(kv_lengths=True), "2 2 2"),
        (32, 1024, 128, True, dict(sinks=True, H=8, G=8), "2 2 2"),
        (16, 1024, 128, True, dict(sinks=True), "2P 2P 2P"),
    ],
)
def test_rule(B: int, T: int, D: int, causal: bool, changes: dict[str, Any], wanted: str) -> None:
    assert rule(B, T, D, causal, **changes) == wanted


def test_cards_that_do_not_tell_their_size() -> None:
    """They count as one multiprocessor: a persistent launch would be one block."""
    card = dataclasses.replace(H200, multiprocessors=1)
    config = mosaic_gpu.default_config(spec_of(B=16, T=1024, S=1024), card)
    assert not (config.persistent or config.dq_persistent or config.dkv_persistent)


def test_arrays_of_8_bits_keep_one_tile_a_block() -> None:
    spec = Float8Spec.of(spec_of(B=16, T=1024, S=1024, D=64, V=64, H=16, G=16))
    config = mosaic_gpu.default_config(spec, H200)
    assert (config.consumers, config.persistent) == (3, False)


def test_no_causal_launch_waits_for_its_fullest_block() -> None:
    """By a count of steps, a persistent launch behind a causal mask has no block with much more
    than the mean."""
    seen = 0
    for B, T in itertools.product((3, 5, 9, 13, 16, 33), (300, 512, 1024, 2000)):
        for options in ({}, dict(offset=-300), dict(right=300), dict(S=2 * T, offset=T)):
            spec = spec_of(**dict(B=B, T=T, S=T, H=8, G=8, D=128, V=128, right=0) | options)
            config = mosaic_gpu.default_config(spec, H200)
            for loads in loads_of(spec, config):
                assert max(loads) <= (1 + 200 / T) * sum(loads) / 132
                seen += 1
    assert seen > 20
