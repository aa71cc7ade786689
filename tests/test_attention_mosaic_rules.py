"""Which block sizes and launches softmax attention gets on Hopper by rule."""

from __future__ import annotations

from typing import Any

import pytest

from ato_jax.ops.attention import mosaic_gpu
from ato_jax.ops.attention.mosaic_gpu import gradient_storage
from ato_jax.ops.attention.mosaic_gpu.schedule import Schedule
from tests.test_attention_mosaic import H200, spec_of


def rule(B: int, T: int, D: int, causal: bool, S: int | None = None, **changes: Any) -> str:
    """Warpgroups of the forward kernel, that for dq, and that for dk and dv, each with a P where a
    block takes several tiles."""
    sizes = dict(B=B, T=T, S=S or T, H=16, G=16, D=D, V=D, right=0 if causal else None)
    spec = spec_of(**sizes | changes)
    config = mosaic_gpu.default_config(spec, H200)
    passes = {of.of_keys: of for of in gradient_storage.passes(spec, config)}
    assert Schedule(spec, config).deal.persistent == config.persistent
    assert passes[False].persistent == config.dq_persistent
    assert passes[True].persistent == config.dkv_persistent
    kernels = [
        (config.consumers, config.persistent),
        (config.dq_consumers, config.dq_persistent),
        (config.dkv_consumers, config.dkv_persistent),
    ]
    return " ".join(f"{count}{'P' * ahead}" for count, ahead in kernels)


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
        (4, 4096, 64, False, {}, "3P 3P 3"),
        (32, 512, 64, True, {}, "2P 2P 2P"),
        (16, 1024, 64, True, {}, "2P 2P 3P"),
        (8, 2048, 64, True, {}, "2P 3 3"),
        (4, 4096, 64, True, {}, "3 3 3"),
        (32, 256, 64, True, dict(S=8192), "2 3 3"),  # the tile of a short T is not half empty
        (16, 1024, 256, False, {}, "2 2P 2P"),
        (16, 1024, 256, True, {}, "2 2 2"),
        # 192 pairs of tiles make one and a half rounds: a launch with one tile a block ends sooner.
        (3, 1024, 128, True, {}, "2 2 2"),
        # Each block has one pair of tiles.
        (4, 512, 64, True, {}, "2P 2P 2P"),
        # Each block has one tile: there is no next one.
        (1, 1024, 128, False, {}, "2 2 2"),
        # One round of three warpgroups, where two would need two rounds.
        (1, 1024, 64, False, dict(H=20, G=20, keep_rest=True), "3 3 3"),
        # Queries ahead of all keys see none: the pairs of tiles are not equal.
        (32, 1024, 128, True, dict(S=512), "2 2 2"),
        # None of these was measured.
        (16, 1024, 128, False, dict(softcap=2.0), "2 2 2"),
        (16, 1024, 64, True, dict(left=512), "3 3 3"),
        (16, 1024, 64, True, dict(segments=True), "3 3 3"),
    ],
)
def test_rule(B: int, T: int, D: int, causal: bool, changes: dict[str, Any], wanted: str) -> None:
    assert rule(B, T, D, causal, **changes) == wanted


def test_no_causal_launch_waits_for_its_fullest_block() -> None:
    """A persistent launch behind a causal mask never has a block with much more than the mean."""
    seen = 0
    for B in range(1, 65):
        for T in (300, 512, 800, 1024, 2000):
            spec = spec_of(B=B, T=T, S=T, H=8, G=8, D=128, V=128, right=0)
            config = mosaic_gpu.default_config(spec, H200)
            deals = [(Schedule(spec, config).deal, config.persistent)]
            deals += [(of.deal, of.persistent) for of in gradient_storage.passes(spec, config)]
            for deal, ahead in deals:
                assert not ahead or deal.imbalance <= 1 + 128 / T
                seen += ahead
    assert seen > 100
