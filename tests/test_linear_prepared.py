"""Gates per step and channel beside a large state, interpreted, against the float64 reference."""

import jax.numpy as jnp
import numerics
import pytest
import test_linear_channel as channel

from ato_jax import device
from ato_jax.ops.linear_attention import triton
from ato_jax.ops.linear_attention.spec import LinearState
from ato_jax.ops.linear_attention.triton.calls import is_prepared

OP = "linear_attention"
# Small enough that a short sequence has several runs of several tiles.
ROWS = 64
SMALL = {
    "run_rows": ROWS,
    "backward_run_rows": ROWS,
    "pair_block": 32,
    "state_block": 32,
    "output_block": 32,
    "dq_block": 32,
    "dkv_block": 32,
}


def draw_gates(kind, B, S, G, D):
    """`mixed` ones are steep in every second run, `middling` ones parted at once in its chunks."""
    if kind == "middling":
        return 16 * channel.draw_gates("mild", B, S, G, D)
    if kind != "mixed":
        return channel.draw_gates(kind, B, S, G, D)
    steep = jnp.arange(S)[:, None, None] // ROWS % 2 == 0
    return jnp.where(steep, *(channel.draw_gates(each, B, S, G, D) for each in ("steep", "mild")))


def check(T, S, H, G, D, V, gates, scale=1.0, layout="bthd", **options):
    q, k, v = (
        channel.draw(1, length, heads, width, dtype="bfloat16", scale=scale, seed=width + heads)
        for length, heads, width in ((T, H, D), (S, G, D), (S, G, V))
    )
    decay = draw_gates(gates, 1, S, G, D)
    if layout == "bhtd":
        q, k, v, decay = (jnp.swapaxes(array, 1, 2) for array in (q, k, v, decay))
    wanted = numerics.oracle(OP, q, k, v, decay=decay, causal=True, layout=layout, **options)
    spec = wanted.request.spec
    assert is_prepared(spec)
    for phase in ("forward", "backward"):
        assert triton.unsupported(spec, phase) is None
    with device.interpret():
        found = numerics.run_backends(
            "triton",
            "triton",
            wanted,
            device=channel.GPU,
            forward_config=SMALL,
            backward_config=SMALL,
        )
    numerics.compare(found, wanted)


# One call, compiled once.
@pytest.mark.parametrize(
    "gates, scale",
    [
        *((gates, 1.0) for gates in ("mild", "mixed", "steep", "middling", -0.2)),
        ("mixed", 0.01),
        ("steep", 30.0),
    ],
)
def test_groups_partial_runs_and_states(gates, scale):
    state = LinearState(
        channel.draw(1, 1, 80, 64, seed=7), jnp.abs(channel.draw(1, 1, 80, seed=8)) + 1
    )
    check(100, 100, 2, 1, 80, 64, gates, scale, initial_state=state, return_state=True)


# What gates of -20 leave is less than the rounding of what they are no part of.
@pytest.mark.parametrize("gates", ["mixed", -20.0])
def test_fewer_queries_in_the_other_layout_unnormalised(gates):
    check(40, 120, 1, 1, 32, 256, gates, layout="bhtd", feature_map="identity")


def test_fewer_keys():
    check(100, 40, 1, 1, 128, 64, "mixed")
