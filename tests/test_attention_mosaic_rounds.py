"""The gradients of softmax attention by Mosaic GPU where a block takes several items, one after the
other: interpreted beside the float64 reference, compiled for a Hopper card without one, and how the
items are dealt."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ato_jax.ops.attention import mosaic_gpu
from ato_jax.ops.attention.mosaic_gpu import (
    frame,
    gradient_storage,
    pairs,
    rounds,
    visibility,
)
from ato_jax.ops.attention.mosaic_gpu.schedule import Schedule
from ato_jax.ops.attention.spec import AttentionSpec
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
    assert all(of.persistent and of.rounds.units > of.blocks for of in passes)
    if slots is not None:
        assert [(of.own_x_slots, of.own_y_slots) for of in passes] == slots
    gradients(arrays, PERSISTENT | config, **options)


@newest
@pytest.mark.parametrize(
    "sizes, config, options, slots",
    [
        # Own rows in two slots, and of dq dout in one. One block takes all items.
        (
            dict(T=200, D=128, B=2, H=2),
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
        # Three tiles of three heads: middle tiles of two heads, and of the last one alone.
        (
            dict(T=136, D=64, H=3, G=3),
            dict(multiprocessors=2, dq_consumers=1, dkv_consumers=1),
            dict(causal=True),
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
        (dict(bias="BHTS"), dict(T=72, S=128, B=2, H=2), dict(causal=True, softcap=2.0)),
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


def taken_by(dealt: rounds.Rounds) -> list[list[tuple[int, int, int]]]:
    """Batch entry, head and tile of each item that each block takes, in its order."""
    most = 2 * -(-dealt.units // dealt.blocks)

    def append(turn: Any, place: Any, carried: Any) -> Any:
        return carried.at[turn].set(jnp.stack([jnp.int32(x) for x in place]))

    def items(block: Any) -> Any:
        return dealt.each(block, append, jnp.full((most, 3), -1))

    counts, places = jax.jit(jax.vmap(items))(jnp.arange(dealt.blocks))
    assert ((np.asarray(places) >= 0).all(2) == (np.arange(most) < counts[:, None])).all()
    return [
        [(b, h, row // dealt.rows) for b, h, row in own[:count].tolist()]
        for own, count in zip(np.asarray(places), np.asarray(counts), strict=True)
    ]


@pytest.mark.parametrize("causal, ascending", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize(
    "batches, heads, tiles, group, blocks",
    [
        (2, 3, 8, 4, 7),  # groups of unlike sizes
        (1, 2, 8, 2, 7),  # one unit more than blocks
        (2, 3, 5, 6, 7),  # middle tiles
        (3, 3, 5, 2, 4),  # the last one alone, in several groups
        (1, 5, 3, 5, 7),
        (3, 3, 1, 2, 4),
        (3, 3, 2, 2, 8),
        (1, 1, 9, 1, 1),
        (1, 2, 5, 2, 7),  # more items than blocks, but no more units
        (2, 5, 8, 10, 18),  # four units are left for 18 blocks: they take one tile each
        (2, 5, 8, 3, 18),  # in a group of one head
        (2, 5, 7, 10, 16),  # middle tiles are left
        (3, 3, 7, 9, 13),  # an odd number of these, some of pairs
    ],
)
def test_blocks_take_units_of_equal_weight(
    batches: int, heads: int, tiles: int, group: int, blocks: int, causal: bool, ascending: bool
) -> None:
    dealt = rounds.Rounds(batches, heads, tiles, 64, group, causal, ascending, blocks)
    assert dealt.persistent
    taken = taken_by(dealt)
    every = [(b, h, t) for b in range(batches) for h in range(heads) for t in range(tiles)]
    assert sorted(item for own in taken for item in own) == every
    order = range(tiles)[:: -1 if causal and ascending else 1]  # heaviest first
    weight = {tile: tiles - n if causal else 1 for n, tile in enumerate(order)}
    loads = [sum(weight[tile] for *_, tile in own) for own in taken]
    in_pairs = causal and tiles > 1
    assert max(loads) - min(loads) <= (tiles + 1 if in_pairs else 1)
    for own in taken if in_pairs else []:
        for one, other in zip(own[::2], own[1::2], strict=False):
            assert weight[one[2]] + weight[other[2]] == tiles + 1
            if one[2] == tiles // 2 == other[2]:
                assert tiles % 2 and one[:2] != other[:2]
            else:
                assert weight[one[2]] > weight[other[2]] and one[:2] == other[:2]
    share = max(loads) / (sum(loads) / blocks)
    assert share <= dealt.imbalance * (1 + 1e-6)
    assert share == pytest.approx(dealt.imbalance) or (in_pairs and dealt.items % 2)
    if dealt.last:
        assert dealt.units % blocks and {len(own) % 2 for own in taken} == {0, 1}


def launches_of(
    spec: AttentionSpec, config: frame.Config
) -> Iterator[tuple[rounds.Rounds, list[int]]]:
    """The rounds of each launch, forward and backward, with the number of steps of each tile."""
    limits = visibility.limits_of(spec, None, None)
    launches = [(Schedule(spec, config).rounds, limits, config.keys, spec.S)]
    for of in gradient_storage.passes(spec, config):
        own = visibility.exchanged(spec, limits) if of.of_keys else limits
        launches.append((of.rounds, own, of.others, of.other[0].length))
    for dealt, own, others, length in launches:
        rows = [jnp.int32(tile * dealt.rows) for tile in range(dealt.tiles)]
        blocks = -(-length // others)
        seen = [visibility.ranges(own, first, dealt.rows, others, blocks) for first in rows]
        yield dealt, [int(one.end - one.first) for one in seen]


@pytest.mark.parametrize(
    "sizes, of_units",
    [
        (dict(T=1000, S=1000), 1.02),
        (dict(T=1000, S=2000, offset=1000), 1.2),  # first keys have more queries in all
        (dict(T=1000, S=1000, left=200), 1.2),  # first queries have fewer keys
    ],
)
def test_blocks_take_as_many_steps(sizes: Any, of_units: float) -> None:
    """Forward, dq, and dk and dv: the heavy tile of each pair comes first; in the last round a
    block may have one tile."""
    spec = spec_of(**dict(right=0, B=5, H=4, G=4) | sizes)
    config = dataclasses.replace(
        mosaic_gpu.default_config(spec, H200), persistent=True, multiprocessors=7, **PERSISTENT
    )
    for dealt, steps in launches_of(spec, config):
        taken = taken_by(dealt)
        for items in taken:
            for one, other in zip(items[::2], items[1::2], strict=not dealt.last):
                assert steps[one[2]] >= steps[other[2]] or "left" in sizes
        loads = [sum(steps[tile] for *_, tile in items) for items in taken]
        assert max(loads) / np.mean(loads) <= of_units * dealt.imbalance


def test_units_of_a_group_are_side_by_side() -> None:
    """Three heads in groups of two, with five tiles each, the last one the heaviest."""
    taken = taken_by(rounds.Rounds(1, 3, 5, 64, 2, True, True, 7))
    pairs_of = [own[:2] for own in taken]
    heads = [0, 1, 0, 1, 2, 2]
    wanted = [[(0, h, 4 - p), (0, h, p)] for h, p in zip(heads, [0, 0, 1, 1, 0, 1], strict=True)]
    assert pairs_of == [*wanted, [(0, 0, 2), (0, 1, 2)]]
    assert taken[0][2:] == [(0, 2, 2)]


def test_launches_are_persistent_where_a_block_has_several_items() -> None:
    spec = spec_of(T=1000, S=1000)
    for multiprocessors, persistent in ((7, True), (132, False)):
        config = dataclasses.replace(
            mosaic_gpu.default_config(spec, H200), multiprocessors=multiprocessors
        )
        for of in gradient_storage.passes(spec, dataclasses.replace(config, **ONCE)):
            assert not of.persistent and of.blocks == of.rounds.items
        for of in gradient_storage.passes(spec, dataclasses.replace(config, **PERSISTENT)):
            assert of.persistent == persistent
            assert of.blocks == (7 if persistent else of.rounds.items)


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
