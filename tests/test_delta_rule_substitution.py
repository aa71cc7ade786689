"""The PTX of the delta rule's substitution, run instruction by instruction for a warpgroup."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ato_jax.ops.delta_rule.mosaic_gpu import substitution

THREADS = 128
DOES: dict[str, Callable[..., Any]] = {
    "mov": lambda a: a,
    "neg": lambda a: -a,
    "and": lambda a, b: a & b,
    "add": lambda a, b: a + b,
    "shr": lambda a, b: a >> b,
    "shl": lambda a, b: a << b,
    "setp": lambda a, b: a == b,
    "selp": lambda a, b, which: np.where(which, a, b),
    "fma": lambda a, b, c: (a * b + c).astype(np.float32),
}


def run(program: str, given: list[Any]) -> list[Any]:
    """What a warpgroup's threads have in $0 to $31 after the program, with `given` in the
    registers behind them, [128] each."""
    thread = np.arange(THREADS)
    has: dict[str, Any] = {f"${substitution.VALUES + n}": one for n, one in enumerate(given)}
    has |= {"%laneid": thread % 32, "%tid.x": thread}

    def value(name: str) -> Any:
        if name.startswith("0f"):
            return np.array(int(name[2:], 16), np.uint32).view(np.float32)
        return int(name) if name.isdigit() or name.startswith("0x") else has[name]

    for line in program.strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        op, rest = line.strip().split(" ", 1)
        to, *names = re.split(r",\s*", rest)
        if op == "shfl.sync.idx.b32":
            has[to] = value(names[0])[thread // 32 * 32 + value(names[1])]
            continue
        does = DOES[op.split(".")[0]]
        has[to] = does(*(np.broadcast_to(value(name), THREADS) for name in names))
    return [has[f"${n}"] for n in range(substitution.VALUES)]


def test_the_program_inverts_each_block() -> None:
    generator = np.random.default_rng(0)
    lower = np.tril(generator.normal(size=(64, 64)), -1).astype(np.float32)
    warp, g, t = np.arange(THREADS) // 32, np.arange(THREADS) % 32 // 4, np.arange(THREADS) % 4
    places = [
        (16 * warp + 8 * half + g, 8 * eighth + 2 * t + column)
        for eighth in range(8)
        for half in range(2)
        for column in range(2)
    ]
    found = np.full((64, 64), np.nan)
    for place, own in zip(
        places, run(substitution._program(), [lower[place] for place in places]), strict=True
    ):
        found[place] = own
    wanted = np.zeros((64, 64))
    for first in range(0, 64, 16):
        own = slice(first, first + 16)
        wanted[own, own] = np.linalg.inv(np.eye(16) + lower[own, own].astype(np.float64))
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    blocks = [jnp.asarray(lower[:, first : first + 16]) for first in range(0, 64, 16)]
    interpreted = np.concatenate(substitution._interpreted(blocks), axis=1)
    np.testing.assert_allclose(interpreted, wanted, atol=1e-5 * np.abs(wanted).max())
