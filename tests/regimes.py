"""The block sizes of linear attention's Triton kernels by regime, in `tests/regimes.txt`.

    python -m tests.regimes

writes that file anew; its difference is what to look at. Every kind of call is printed for every
size of state, on a card with Hopper's shared memory, on an A100, and on one with 99 KiB.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from ato_jax.device import SHARED_MEMORY, Device
from ato_jax.ops.linear_attention import features, triton
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton import split
from ato_jax.ops.linear_attention.triton.calls import LARGEST_STATE
from ato_jax.ops.linear_attention.triton.config import Config, Regime, config_of, regime_of

GOLDEN = Path(__file__).with_name("regimes.txt")
HEAD = """\
Block sizes of linear attention's Triton kernels; made by python -m tests.regimes.

The passes are rows x warps x stages; then the rows of stored runs forward and backward, the rows of
the other side that a program takes at a time, the columns of V written at once, and the programs of
a multiprocessor that walk along pieces; "half a state" where a program holds half as much of one in
float32 and float16. T = 16384, B = 4, H = G = 8.
"""
CARDS = {
    "H200": Device("gpu", "NVIDIA H200", (9, 0), 132, SHARED_MEMORY[9, 0]),
    "A100": Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), 108, SHARED_MEMORY[8, 0]),
    "A10": Device("gpu", "NVIDIA A10", (8, 6), 72, SHARED_MEMORY[8, 6]),
}
DTYPES = ("bfloat16", "float16", "float32")
KINDS = {
    "full": (False, None),
    "full, decay": (False, "step"),
    "causal": (True, None),
    "causal, decay": (True, "step"),
    "causal, decay per channel": (True, "channel"),
}
# F and V: small states, large ones, and those that no program holds; of short rows and of long.
SIZES = ((64, 64), (256, 16), (128, 128), (256, 64), (128, 256), (256, 256))
IDENTITY = features.NAMED["identity"]


def calls() -> Iterator[tuple[str, LinearAttentionSpec]]:
    for (kind, (causal, decay)), dtype, size in itertools.product(KINDS.items(), DTYPES, SIZES):
        sizes = {"B": 4, "T": 16384, "S": 16384, "H": 8, "G": 8, "D": size[0]}
        sizes |= {"F": size[0], "V": size[1]}
        rest = {"dtype": dtype, "feature_map": IDENTITY, "normalize": True, "scale": 1.0}
        spec = LinearAttentionSpec(**sizes, **rest, eps=1e-6, causal=causal, decay=decay)
        if triton.unsupported(spec, "forward") is None:
            yield f"{kind}, {dtype}, F = {spec.F}, V = {spec.V}", spec


def regimes() -> set[Regime]:
    """Those of all calls that are printed, whose values may be cut into blocks."""
    found = set()
    for (_, spec), card in itertools.product(calls(), CARDS.values()):
        for phase in ("forward", "backward"):
            count = triton.blocks_of_values(spec, config_of(spec, card), phase)
            found.add(regime_of(split.block_spec(spec, count), card))
    return found


def line(config: Config, card: Device) -> str:
    passes = ("state", "output", "dq", "dkv")
    sizes = [
        "x".join(str(getattr(config, f"{name}_{part}")) for part in ("block", "warps", "stages"))
        for name in passes
    ]
    delayed = " delayed" if config.dq_delayed else ""
    runs = f"runs {config.run_rows} {config.backward_run_rows}, pairs {config.pair_block}"
    walks = config.programs // card.multiprocessors
    rest = f"columns {config.stored_columns}, walks {walks}"
    half = ", half a state" if config.wide_state < LARGEST_STATE else ""
    return f"{' '.join(sizes)}{delayed}, {runs}, {rest}{half}"


def golden() -> str:
    lines = [HEAD]
    for label, spec in calls():
        found: dict[str, list[str]] = {}
        for name, card in CARDS.items():
            found.setdefault(line(triton.default_config(spec, card), card), []).append(name)
        lines.append(label)
        lines += [f"  {', '.join(names)}: {text}" for text, names in found.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(golden())
