"""Decoding's Triton kernels on cards whose blocks have 99 KiB (sm_86, sm_89, sm_120), or 163.

Every kernel of a call fits the card's shared memory. What a kernel asks for is found without a GPU,
as sm_80's instructions have it: those other architectures multiply by these, and came to the same
bytes.

    ATO_ALL_ROWS=1 python -m pytest tests/test_paged_small_cards.py     every call

takes a core some minutes. The ordinary tests take the calls that ask for the most.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ato_jax
from ato_jax import device
from ato_jax.ops.attention.spec import AttentionSpec
from ato_jax.ops.attention.triton import paged
from tests import aot, numerics, regimes
from tests.test_attention_paged import LATENT, arguments, by_kernel, program

CARDS = {name: regimes.CARDS[name] for name in ("A10", "A100")}
FORMS = ("pages", "contiguous", "shared", "shared, contiguous")
WIDTHS = ((64, 64), (128, 128), (256, 256), (300, 300), (320, 64), (512, 512), (576, 512))
MANY_HEADS = {"H": LATENT["H"], "G": LATENT["G"]}
# The card, the dtype, D, V, T, and options of `program`.
Case = tuple[str, str, int, int, int, dict[str, Any]]
CASES: list[Case] = [
    (card, dtype, *widths, T, {"form": form, "cached": cached, **heads})
    for card, dtype, widths, T, form, cached, heads in itertools.product(
        *(CARDS, ("bfloat16", "float32"), WIDTHS, (1, 16), FORMS, (None, "int8")),
        ({}, MANY_HEADS),
    )
]
LARGEST: list[Case] = [
    ("A10", "bfloat16", 576, 512, 16, {}),
    ("A10", "float16", 576, 512, 16, {"form": "contiguous"}),
    ("A10", "bfloat16", 512, 512, 1, {"form": "shared, contiguous", **MANY_HEADS}),
    ("A10", "float32", 576, 512, 1, {}),
    ("A10", "float32", 512, 512, 1, {"form": "contiguous"}),
    ("A10", "float32", 576, 512, 1, LATENT),
    ("A10", "float32", 300, 300, 16, MANY_HEADS),
    ("A10", "float32", 128, 128, 1, {"form": "shared, contiguous", **MANY_HEADS}),
    ("A10", "float32", 576, 512, 1, {"cached": "int8"}),
    ("A100", "float32", 576, 512, 1, {}),
    ("A100", "float32", 576, 512, 1, {"form": "contiguous"}),
    ("A100", "float32", 320, 64, 16, MANY_HEADS),
]
# Calls of narrow rows that an earlier rule allowed less memory than the compiler takes.
NARROW: list[Case] = [
    ("A10", "bfloat16", 128, 128, 16, {"form": "shared"}),
    ("A10", "bfloat16", 64, 64, 1, {"cached": "int8"}),
    ("A10", "float32", 64, 64, 1, {"form": "shared", **MANY_HEADS}),
]
SAMPLE = CASES if os.environ.get("ATO_ALL_ROWS") == "1" else LARGEST + NARROW


def asked(case: Case) -> dict[str, int]:
    """The bytes of each kernel."""
    card, *call, options = case
    function, inputs = program(*call, CARDS[card], **options)
    return aot.shared_bytes(function, *inputs, capability=80)


@aot.requires_triton
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_kernels_fit(case: Case) -> None:
    card = CARDS[case[0]]
    found = asked(case)
    assert max(found.values()) <= card.shared_memory
    # The rule is not below what the compiler takes.
    form, eight_bits = case[-1].get("form", "pages"), case[-1].get("cached") is not None
    function, _ = program(*case[1:-1], card, **case[-1])
    limit = paged.shared_bytes(
        *function.args,
        shared="shared" in form,
        in_pages="contiguous" not in form,
        eight_bits=eight_bits,
    )
    assert found["attention_paged"] <= limit <= card.shared_memory


@aot.requires_triton
def test_sizes_of_larger_cards_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "_fitted", lambda config, *rest: config)
    too_large = [case for case in LARGEST[:8] if max(asked(case).values()) > 99 * 1024]
    assert too_large == LARGEST[:8]


@pytest.mark.parametrize("form", FORMS)
def test_larger_cards_take_the_sizes_that_they_took(form: str) -> None:
    """On a card with 227 KiB every call fits without a smaller size."""
    hopper = regimes.CARDS["H200"]
    for _, *call, options in CASES:
        function, (inputs,) = program(*call, hopper, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paged, "_fitted", lambda config, *rest: config)
            wanted = paged.default_config(function.args[0], hopper, inputs)
        assert function.args[1] == wanted


def test_stages_then_keys_then_rows_are_fewer() -> None:
    start = paged.Config(rows=64, block=32, num_warps=8, num_stages=5, programs=1)

    def sizes(limit: int) -> tuple[int, int, int]:
        found = paged._fitted(start, lambda one: one.rows * one.block * one.num_stages, limit)
        return found.rows, found.block, found.num_stages

    assert [sizes(64 * 32 * stages) for stages in (5, 4, 2)] == [
        (64, 32, 5), (64, 32, 4), (64, 32, 2),
    ]  # fmt: skip
    assert sizes(64 * 16 * 2) == (64, 16, 2)
    assert sizes(32 * 16 * 2) == (32, 16, 2)
    assert sizes(16 * 16) == sizes(0) == (16, 16, 1)


def test_cards_that_no_size_fits_are_refused() -> None:
    spec = AttentionSpec(1, 1, 8192, 8, 2, 576, 512, "float32", 1.0)
    keys = jax.ShapeDtypeStruct((1, 8192, 2, 576), jnp.float32)
    assert all(paged.out_of_range(spec, card, keys) is None for card in CARDS.values())
    small = dataclasses.replace(CARDS["A10"], shared_memory=device.SMALLEST_SHARED_MEMORY)
    reason = paged.out_of_range(spec, small, keys)
    assert reason is not None and "D=576 and V=512 in float32 may need" in reason
    assert "a block has 65536 on this GPU" in reason
    assert paged.serves(spec, CARDS["A10"]) and not paged.serves(spec, small)


@pytest.mark.parametrize(
    ("dtype", "T", "sizes"), [("float32", 1, (16, 16, 1)), ("bfloat16", 16, (32, 16, 4))]
)
def test_numbers_on_a_small_card(
    dtype: str, T: int, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted, with sizes that only such cards have."""
    arrays = arguments([37, 20], T=T, H=2, G=1, D=576, V=512, page=16, pages=3, dtype=dtype)
    exact = [array.astype(jnp.float32) for array in arrays[:3]]
    wanted = ato_jax.decode_attention(*exact, *arrays[3:], return_lse=True)
    seen: list[paged.Config] = []
    rule = paged.default_config

    def seen_rule(*call: Any) -> paged.Config:
        seen.append(rule(*call))
        return seen[-1]

    monkeypatch.setattr(paged, "default_config", seen_rule)
    found = by_kernel(*arrays, here=CARDS["A10"])
    assert {(one.rows, one.block, one.num_stages) for one in seen} == {sizes}
    numerics.check("out", found[0], wanted[0], dtype=dtype)
    numerics.check("lse", found[1], wanted[1], dtype=dtype)
