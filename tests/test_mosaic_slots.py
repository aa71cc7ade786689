"""Calls in which a block fills every slot of its rings several times. A barrier too few, or one of
another slot, shows nowhere else. Interpreted beside float64."""

from __future__ import annotations

import pytest
import test_linear_channel as channel
from test_linear_mosaic import draw, options_of

import ato_jax
from tests import numerics
from tests.interpreted import newest, no_races  # noqa: F401

OP = "linear_attention"
# One block takes all 13 chunks, in two pieces.
T, ALONE = 776, {"pieces": 2, "blocks": 1}


@newest
@pytest.mark.parametrize("H, D", [(2, 64), (1, 128)])
def test_every_slot_is_filled_again(H: int, D: int) -> None:
    options = options_of(1, H, "bhtd", True, D) | {"return_state": False}
    wanted = numerics.oracle(OP, *draw(1, T, H, H, "bhtd", D=D), causal=True, **options)
    configs = {"forward_config": ALONE, "backward_config": ALONE}
    with ato_jax.interpret():
        found = numerics.run_backends(
            "mosaic_gpu", "mosaic_gpu", wanted, device=channel.GPU, **configs
        )
    numerics.compare(found, wanted)
