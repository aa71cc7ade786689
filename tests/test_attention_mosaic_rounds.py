"""The gradients of softmax attention by Mosaic GPU where a block takes several items, one after the
other: interpreted beside the float64 reference, compiled for a Hopper card without one, and how the
items are dealt."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ato_jax.ops.attention import mosaic_gpu
from ato_jax.ops.attention.mosaic_gpu import frame, gradient_storage, pairs, rounds
from tests import aot_attention, numerics
from tests.aot_mosaic import requires_plugin
from tests.interpreted import newest, no_races  # noqa: F401
from tests.test_attention_mosaic import H200, draw, spec_of
from tests.test_attention_mosaic_backward import gradients, of_lengths, of_segments

PERSISTENT = dict(dkv_persistent=True, dq_persistent=True)
ONCE = dict(dkv_persistent=False, dq_persistent=False)


TWO = dict(dkv_consumers=2, dq_consumers=2)
Slots = tuple[int, int]


def in_rounds(
    arrays: list[Any], config: dict[str, Any], slots: list[Slots] | None = None, **options: Any
) -> None:
    """Compares gradients with the reference's. Some block of each kernel takes two items or more.
    `slots` are those of own x and y in the kernels for dq, and for dk and dv, or dk, and dv."""
    request, _ = numerics.prepare("attention", *arrays, **options)
    spec = request.spec.for_backward()
    of_call = dataclasses.replace(mosaic_gpu.default_config(spec, H200), **PERSISTENT, **config)
    passes = gradient_storage.passes(spec, of_call)
    assert all(of.persistent and of.items > of.blocks for of in passes)
    if slots is not None:
        assert [(of.own_x_slots, of.own_y_slots) for of in passes] == slots
    gradients(arrays, PERSISTENT | config, **options)


@newest
@pytest.mark.parametrize(
    "sizes, config, options, slots",
    [
        # Own rows in two slots, and of dq dout in one. Three items of one block, one of another.
        (
            dict(T=200, D=128, H=2),
            dict(multiprocessors=1, dq_keys=128) | TWO,
            dict(causal=True),
            [(2, 1), (2, 2)],
        ),
        # In one slot; groups; dk and dv apart; turns across items.
        (
            dict(T=136, S=200, D=256, H=2, G=1),
            dict(multiprocessors=1, dq_turns=True, dkv_turns=True) | TWO,
            dict(layout="bhtd"),
            [(1, 1), (1, 1), (1, 1)],
        ),
        # dv has a place that no v is loaded into.
        (dict(T=136, D=256, V=128, H=2), dict(multiprocessors=2), {}, [(2, 2), (2, 2), (2, 1)]),
        # Odd lengths in parts of columns, several walks of dk and dv, a last round of few items.
        (
            dict(T=203, S=141, D=64, V=128, H=4, G=2, dtype="float16"),
            dict(multiprocessors=3, dq_consumers=1, dkv_consumers=1),
            dict(return_lse=True, softcap=2.0, sinks=jnp.array([0.5, -jnp.inf, 0.0, 1.0])),
            [(2, 2), (2, 2)],
        ),
    ],
)
def test_numbers(sizes: Any, config: Any, options: Any, slots: list[Slots]) -> None:
    arrays = draw(**sizes, layout=options.get("layout", "bthd"))
    in_rounds(arrays, config, slots, **options)


@newest
@pytest.mark.parametrize(
    "sizes, config, options",
    [
        (dict(T=200, S=136, B=4), dict(multiprocessors=3), dict(window=(70, 10))),
        (dict(T=136, S=200, B=4, H=2, G=1), dict(multiprocessors=1) | TWO, dict(causal=True)),
    ],
)
def test_lengths(sizes: Any, config: Any, options: Any) -> None:
    """Padding holds NaN. A sequence without keys, one that no query sees, and heads of a group."""
    arrays, lengths = of_lengths(draw(**sizes, D=64))
    in_rounds(arrays, config, **options, **lengths)


@newest
def test_segments() -> None:
    """Items of different numbers of steps, as ids come back."""
    arrays, ids = of_segments()
    in_rounds(arrays, dict(multiprocessors=2), causal=True, **ids)


@newest
@pytest.mark.parametrize(
    "letters, sizes, options",
    [
        (dict(bias="BHTS"), dict(T=72, S=128, H=2, G=1), dict(causal=True, softcap=2.0)),
        (dict(bias="B11S", mask="BHT1"), dict(T=72, S=136, H=2, B=2), {}),
        (dict(bias="1HT1", mask="11TS"), dict(T=72, S=64, H=2, B=2), dict(dropout_rate=0.3)),
        ({}, dict(T=72, S=136, H=2, G=1, B=2, dtype="float16"), dict(dropout_rate=0.3)),
    ],
)
def test_bias_mask_and_dropout(letters: dict[str, str], sizes: Any, options: Any) -> None:
    generator, arrays = np.random.default_rng(1), {}
    for name, axes in letters.items():
        drawn = generator.normal(size=[{"1": 1, "B": 1, **sizes}[letter] for letter in axes])
        arrays[name] = jnp.asarray(drawn < 0.7) if name == "mask" else jnp.asarray(drawn, "float32")
    if "dropout_rate" in options:
        options = options | dict(dropout_key=jax.random.key(7))
    in_rounds(draw(**sizes), dict(multiprocessors=1), **arrays, **options)


@pytest.mark.parametrize("items", [8, 20, 21, 27])
def test_each_item_has_one_block(items: int) -> None:
    """All blocks take as many, or one less; the first ones of a round are the heaviest."""

    def append(turn: Any, number: Any, carried: Any) -> Any:
        return carried.at[turn].set(number)

    taken = []
    for block in range(7):
        start = jnp.full(4, -1)
        count, numbers = rounds.each(items, 7, jnp.int32(block), append, start)
        assert int(count) in (items // 7, items // 7 + 1)
        assert (numbers >= 0).tolist() == [turn < count for turn in range(4)]
        taken += numbers[:count].tolist()
    assert sorted(taken) == list(range(items))
    both = [[int(rounds.number_of(jnp.int32(t), 7, b)) for b in (0, 6)] for t in range(2)]
    assert both == [[0, 6], [13, 7]]


def test_launches_are_persistent_where_a_block_has_several_items() -> None:
    spec = spec_of(T=1000, S=1000)
    for multiprocessors, persistent in ((7, True), (132, False)):
        config = dataclasses.replace(
            mosaic_gpu.default_config(spec, H200), multiprocessors=multiprocessors
        )
        for of in gradient_storage.passes(spec, dataclasses.replace(config, **ONCE)):
            assert not of.persistent and of.blocks == of.items
        for of in gradient_storage.passes(spec, dataclasses.replace(config, **PERSISTENT)):
            assert of.persistent == persistent
            assert of.blocks == (7 if persistent else of.items)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(mask=(True,) * 4),
        dict(bias=(False, True, True, True), mask=(True, False, True, True)),
    ],
)
def test_slots_ahead_leave_room(options: dict[str, Any]) -> None:
    """No other buffer has fewer slots where own rows have a second one."""
    for D in range(16, 257, 16):
        spec = spec_of(B=64, T=1024, S=1024, D=D, V=D, **options)
        config = mosaic_gpu.default_config(spec, H200)
        both = [dataclasses.replace(config, **own) for own in (ONCE, PERSISTENT)]
        for once, of in zip(*(gradient_storage.passes(spec, own) for own in both), strict=True):
            changed = dict(most_blocks=None, own_x_slots=1, own_y_slots=1)
            assert of.fits and dataclasses.replace(of, **changed) == once
            twice = 2 * pairs.most_bytes(spec, of.block, of.of_keys)
            room, left = (frame.MOST_BYTES - own.shared_bytes for own in (once, of))
            assert twice <= left or (twice > room and room == left)
            if D <= 96 and not options:
                assert (of.own_x_slots, of.own_y_slots) == (2, 2)


# Bytes of registers that the kernels of dq and of dk and dv spill. At D = 256 these are offsets of
# threads in tiles, which are the same for all items: stored once, read once an item or, behind a
# causal mask, where a block of the others is cut. No products may wait for each other.
CAUSAL: dict[str, Any] = dict(causal=True)
COMPILED = [
    (aot_attention.Call(8192, 128, options=CAUSAL), 28, 8),
    (aot_attention.Call(8192, 128), 0, 0),
    (aot_attention.Call(8192, 64, H=32, options=CAUSAL), 0, 32),
    (aot_attention.Call(8192, 64, H=32), 0, 12),
    (aot_attention.Call(8192, 256, H=8, options=CAUSAL | dict(layout="bhtd")), 144, 72),
    (aot_attention.Call(8192, 256, H=8), 0, 0),
]
# The ordinary tests compile the first one; after a change to the kernel, compile all.
STEP = 1 if os.environ.get("ATO_ALL_ROWS") == "1" else len(COMPILED)


@requires_plugin
@pytest.mark.parametrize(
    "call, of_dq, of_keys", COMPILED[::STEP], ids=[f"D {call.D}" for call, *_ in COMPILED[::STEP]]
)
def test_calls_compile(call: aot_attention.Call, of_dq: int, of_keys: int) -> None:
    found = aot_attention.compile_gradients(dataclasses.replace(call, config=PERSISTENT))
    assert len(found) >= 2
    for one in found:
        spills = of_dq if "_dq" in one.name else of_keys
        assert not one.serialized and one.spill_stores <= spills, found
