"""Combinations of options that Hopper's kernels say they take: JAX traces both passes of each.

Shapes inside the kernels that do not fit one another end in an error here, without a card and
without numbers. The widths are those at which kernels cut a head or widen it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ato_jax
from ato_jax import device
from ato_jax.ops.linear_attention.spec import LinearState
from tests import choices
from tests.interpreted import newest

B, T, H, G = 2, 200, 4, 2
LEAST = 10  # calls that are taken, of 24
MAPS: Any = ({}, {"feature_map": "silu", "normalize": False})


def calls(D: int, V: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Options, and arrays as JAX describes them."""
    float32 = jnp.float32
    decays = {
        "head": jax.ShapeDtypeStruct((G,), float32),
        "step": jax.ShapeDtypeStruct((B, T, G), float32),
        "channel": jax.ShapeDtypeStruct((B, T, G, D), float32),
    }
    kv, k_sum = ((B, G, D, V), (B, G, D))
    state = LinearState(*(jax.ShapeDtypeStruct(shape, float32) for shape in (kv, k_sum)))
    besides: Any = (
        {"kv_lengths": jax.ShapeDtypeStruct((B,), jnp.int32)},
        {"segment_ids": jax.ShapeDtypeStruct((B, T), jnp.int32)},
        {"initial_state": state},
    )
    combined = itertools.product((True, False), (None, *decays), besides)
    for number, (causal, decay, beside) in enumerate(combined):
        maps = MAPS[number % len(MAPS)]
        arrays = beside | ({} if decay is None else {"decay": decays[decay]})
        options = maps | {"causal": causal, "return_state": "initial_state" in beside}
        yield options, arrays


def both_passes(options: dict[str, Any], arrays: dict[str, Any], *qkv: Any) -> Any:
    """The outputs and the gradients of all arrays but those of integers."""
    ids = {name: x for name, x in arrays.items() if getattr(x, "dtype", None) == jnp.int32}
    rest = {name: x for name, x in arrays.items() if name not in ids}

    def attend(q: Any, k: Any, v: Any, rest: Any) -> Any:
        call = options | ids | rest | {"implementation": "mosaic_gpu"}
        return ato_jax.linear_attention(q, k, v, **call)

    outputs, pull_back = jax.vjp(attend, *qkv, rest)
    return outputs, pull_back(jax.tree.map(jnp.ones_like, outputs))


@newest
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("D", "V"), [(40, 64), (64, 144), (192, 128)])
def test_traces(D: int, V: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card = choices.described("H200")
    monkeypatch.setattr(device, "of_call", lambda _: card)
    qkv = [jax.ShapeDtypeStruct((B, T, *sizes), dtype) for sizes in ((H, D), (G, D), (G, V))]
    taken = 0
    for options, arrays in calls(D, V):
        try:
            jax.eval_shape(lambda a, *qkv, o=options: both_passes(o, a, *qkv), arrays, *qkv)
        except ato_jax.UnsupportedError:
            continue
        except Exception as error:
            raise AssertionError(f"{options} and {', '.join(arrays)}") from error
        taken += 1
    assert taken >= LEAST, taken
