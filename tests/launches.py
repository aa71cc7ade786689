"""Thousands of launches of Hopper's softmax attention kernels on random shapes, for deadlocks.

    python -m tests.launches                  all shapes, one process each, on a Hopper card
    python -m tests.launches 3                the fourth shape
    python -m tests.launches 3 --calls=2 --most=100 --interpret        on a CPU

A seed draws each shape: its lengths, heads, head size, dtype and layout. Shapes with even seeds
have no options and so many heads that launches are persistent where that pays. Those with odd seeds
have lengths, offsets, a window or segments, which are drawn anew for each call. A call is the
forward kernel and the backward kernels. All calls of a shape run in one loop on the card, twice: a
deadlock lets the process run into its limit, and other bits the second time are an error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import random
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import ato_jax

SHAPES = 20
# The number of launches, all shapes together.
CALLS = 10_000
MOST_ROWS = 1100
# Seconds for one shape: nearly all of them compile its three or four kernels.
LIMIT = 240.0
OPTIONS = ("lengths", "lengths, causal", "offsets, causal", "window, lengths", "segments, causal")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One shape; `drawn` are the options that each call draws."""

    B: int
    T: int
    S: int
    H: int
    G: int
    D: int
    dtype: str
    layout: str
    causal: bool
    drawn: str

    def array(self, key: jax.Array, letters: str) -> jax.Array:
        letters = letters if self.layout == "bthd" else letters[0] + letters[2] + letters[1] + "D"
        shape = [getattr(self, letter) for letter in letters]
        return jax.random.normal(key, shape, jnp.float32).astype(self.dtype)


def shape_of(seed: int, most: int = MOST_ROWS) -> Shape:
    draw = random.Random(seed)
    D = draw.choice((64, 64, 128, 128, 256, 96))
    drawn = draw.choice(OPTIONS) if seed % 2 else ""
    T, S = (draw.randint(1 if drawn else most // 4, most) for _ in range(2))
    if draw.random() < 0.6 or "segments" in drawn:
        S = T
    if D % 64:
        T, S = (-(-rows // 8) * 8 for rows in (T, S))
    G = draw.choice((1, 2, 4) if drawn else (8, 16))
    return Shape(
        B=draw.randint(1, 4),
        T=T,
        S=S,
        H=G * draw.choice((1, 2, 4)),
        G=G,
        D=D,
        dtype=draw.choice(("bfloat16", "float16")),
        layout=draw.choice(("bthd", "bhtd")),
        causal="causal" in drawn or (not drawn and draw.random() < 0.5),
        drawn=drawn,
    )


def options_of(shape: Shape, key: jax.Array) -> dict[str, Any]:
    """The options of one call."""
    first, second = jax.random.split(key)
    found: dict[str, Any] = {"causal": shape.causal}
    if "lengths" in shape.drawn:
        found["q_lengths"] = jax.random.randint(first, (shape.B,), 0, shape.T + 1)
        found["kv_lengths"] = jax.random.randint(second, (shape.B,), 0, shape.S + 1)
    if "offsets" in shape.drawn:
        found["query_offset"] = jax.random.randint(first, (shape.B,), -shape.T, shape.S)
    if "window" in shape.drawn:
        found["window"] = (shape.S // 3, shape.S // 9)
    if "segments" in shape.drawn:
        starts = jax.random.uniform(first, (shape.B, shape.T)) < 8 / shape.T
        found["segment_ids"] = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
    return found


def digest(array: jax.Array) -> jax.Array:
    """A number that other bits, or bits in another order, change."""
    bits = lax.bitcast_convert_type(array, jnp.uint16).astype(jnp.uint32).ravel()
    return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_all(shape: Shape, calls: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The digest of out, dq, dk and dv over all calls, and how many of their elements were not
    finite."""
    keys = jax.random.split(key, 4)
    q, k, v, dout = map(shape.array, keys, ("BTHD", "BSGD", "BSGD", "BTHD"))

    def one(n: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        own = jax.random.fold_in(key, n)
        scale = jnp.exp(2 * jax.random.normal(own)).astype(q.dtype)
        attend = functools.partial(
            ato_jax.attention,
            **options_of(shape, own),
            layout=shape.layout,
            implementation="mosaic_gpu",
        )
        out, pull = jax.vjp(attend, q * scale, k, v)
        arrays = (out, *pull(dout))
        digests = jnp.stack([digest(array) for array in arrays])
        wrong = sum(jnp.sum(~jnp.isfinite(array)) for array in arrays)
        return found[0] * 31 + digests, found[1] + wrong

    return lax.fori_loop(0, calls, one, (jnp.zeros(4, jnp.uint32), jnp.int32(0)))


def run(seed: int, calls: int, most: int) -> None:
    shape = shape_of(seed, most)
    print(f"{seed}: {calls} calls of {shape}", flush=True)
    started = time.perf_counter()
    compiled = run_all.lower(shape, calls, jax.random.key(seed)).compile()
    ready = time.perf_counter()
    (first, wrong), (second, _) = (
        jax.block_until_ready(compiled(jax.random.key(seed))) for _ in range(2)
    )
    ended = time.perf_counter()
    assert int(wrong) == 0, f"{int(wrong)} elements are not finite"
    assert (first == second).all(), f"other bits the second time: {first}, {second}"
    print(
        f"the same bits twice, {first}; compiled in {ready - started:.1f} s, "
        f"ran in {ended - ready:.2f} s"
    )


def in_a_process(seed: int, *arguments: str) -> None:
    """One shape with a limit of time, since a deadlock has no end."""
    command = [sys.executable, "-m", "tests.launches", str(seed), *arguments]
    try:
        done = subprocess.run(
            command, timeout=LIMIT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")
        raise AssertionError(f"{shape_of(seed)}: no end within {LIMIT} s\n{said}") from None
    print(done.stdout)
    assert done.returncode == 0, f"{shape_of(seed)}: ended with {done.returncode}\n{done.stdout}"
    assert "the same bits twice" in done.stdout, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seed", type=int, nargs="?")
    parser.add_argument("--calls", type=int, default=CALLS // SHAPES)
    parser.add_argument("--most", type=int, default=MOST_ROWS)
    parser.add_argument("--interpret", action="store_true")
    given = parser.parse_args()
    if given.seed is None:
        for seed in range(SHAPES):
            in_a_process(seed, *sys.argv[1:])
        return
    with ato_jax.interpret() if given.interpret else contextlib.nullcontext():
        run(given.seed, given.calls, given.most)


if __name__ == "__main__":
    main()
