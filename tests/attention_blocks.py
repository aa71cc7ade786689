"""What block sizes softmax attention's Triton kernels have by rule, printed by card and call.

    python -m tests.attention_blocks

writes `attention_blocks.txt` anew; its difference is what a change of the rules changes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ato_jax.device import SHARED_MEMORY, Device
from ato_jax.ops.attention.cached import CacheInputs
from ato_jax.ops.attention.spec import AttentionSpec
from ato_jax.ops.attention.triton import BACKEND, paged, wide

PATH = Path(__file__).parent / "attention_blocks.txt"
CARDS = {
    "sm_80": Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), 108, SHARED_MEMORY[8, 0]),
    "sm_89": Device("gpu", "NVIDIA L4", (8, 9), 58, SHARED_MEMORY[8, 9]),
    "sm_90": Device("gpu", "NVIDIA H200", (9, 0), 132, SHARED_MEMORY[9, 0]),
}
FACTORS = (("bfloat16", "exact"), ("float32", "exact"), ("float32", "tf32"))
PAIRS = (False, False, True, True)
KEYS = (False, False, False, True)
OPTIONS: dict[str, dict[str, Any]] = {
    "-": {},
    "window": {"left": 1023, "right": 0},
    "segments": {"segments": True},
    "bias of keys": {"bias": KEYS},
    "bias": {"bias": PAIRS},
    "mask": {"mask": PAIRS},
    "bias and mask": {"bias": PAIRS, "mask": PAIRS},
}
LENGTHS = ((4, 8192), (1, 2048))  # B and T; the second has too few programs for a card
HEADS = 8


def spec_of(dtype: str, precision: str, B: int, T: int, D: int, **options: Any) -> AttentionSpec:
    sizes = (B, T, T, HEADS, HEADS, D, D)
    return AttentionSpec(*sizes, dtype=dtype, scale=1.0, precision=precision, **options)


def _tiles(config: Any) -> str:
    """The values of the four kernels, then those that the sizes of the call decide."""
    values = dataclasses.asdict(config)
    tiles = [values[name] for name in values if name.endswith(("_q", "_k", "_warps", "_stages"))]
    kernels = [" ".join(map(str, tiles[n : n + 4])) for n in range(0, len(tiles), 4)]
    shared = " ".join(str(values[name]) for name in ("strands", "parts", "dq_parts", "dkv_parts"))
    return f"{', '.join(kernels)}; {shared}"


def _grouped(lines: Iterator[tuple[str, str, str]]) -> Iterator[str]:
    """A line for each set of sizes of a call, with all the options that have it.

    Args:
      lines: (call, options, sizes), the lines of a call one after the other.
    """
    for call, group in itertools.groupby(lines, lambda line: line[0]):
        by_sizes: dict[str, list[str]] = {}
        for _, options, sizes in group:
            by_sizes.setdefault(sizes, []).append(options)
        for sizes, options in by_sizes.items():
            yield f"{call} {', '.join(options)}: {sizes}"


def whole_rows() -> Iterator[tuple[str, str, str]]:
    widths = (64, 96, 128, 192, 256, 512)
    for (card, here), (dtype, precision), D in itertools.product(CARDS.items(), FACTORS, widths):
        for (B, T), (name, options) in itertools.product(LENGTHS, OPTIONS.items()):
            config = BACKEND.default_config(spec_of(dtype, precision, B, T, D, **options), here)
            yield f"{card} {dtype} {precision} D{D} B{B} T{T}", name, _tiles(config)


def wide_heads() -> Iterator[tuple[str, str, str]]:
    problems = ((8, 64), (8, 128), (8, 256), (1, 64))
    for (card, here), (dtype, precision), D, (B, T) in itertools.product(
        CARDS.items(), FACTORS, (512, 2048, 8192), problems
    ):
        config = wide.BACKEND.default_config(spec_of(dtype, precision, B, T, D), here)
        values = list(dataclasses.asdict(config).values())
        sizes = ", ".join(" ".join(map(str, part)) for part in (values[:6], values[6:12]))
        yield f"{card} {dtype} {precision} B{B} T{T}", f"D{D}", sizes


def cache(form: str) -> CacheInputs:
    """Arrays of no size: the rule asks only which of them there are."""
    one = jnp.zeros(())
    scales = one if "8 bits" in form else None
    table = one if "pages" in form else None
    values = None if "shared" in form else one
    return CacheInputs(one, one, values, one, table=table, k_scales=scales)


def caches() -> Iterator[tuple[str, str, str]]:
    forms = ("contiguous", "pages", "pages shared", "contiguous shared", "pages 8 bits")
    for (card, here), (D, V), T, form in itertools.product(
        CARDS.items(), ((64, 64), (128, 128), (576, 512)), (1, 16), forms
    ):
        spec = dataclasses.replace(spec_of("bfloat16", "exact", 4, 8192, D), T=T, G=2, V=V)
        config = paged.default_config(spec, here, cache(form))
        sizes = " ".join(map(str, list(dataclasses.asdict(config).values())[:5]))
        yield f"{card} D{D} V{V} T{T}", form, sizes


TABLES = (
    (
        "Whole rows: queries, keys, warps, stages of the forward, dQ, dK and dV, and bias kernel; "
        "strands; parts of the first three",
        whole_rows,
    ),
    (
        "Wide heads: queries, columns of q and k, columns of v, warps, stages, slices of the "
        "forward and of the backward kernels",
        wide_heads,
    ),
    ("Caches: rows, keys, warps, stages, programs", caches),
)


def text() -> str:
    intro = (
        "# Block sizes of softmax attention's Triton kernels by rule, without the tables in\n"
        "# ato_jax/tuned; made by python -m tests.attention_blocks"
    )
    tables = ("\n".join([f"# {title}", *_grouped(lines())]) for title, lines in TABLES)
    return "\n\n".join([intro, *tables]) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
