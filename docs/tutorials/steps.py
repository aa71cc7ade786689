"""Times the kernels of tutorial 6 on the card in this machine and writes a table.

The kernels are those of the page: its blocks are run, and its function `launch` is replaced by one
that compiles for the card, with Pallas's lowering to Triton. Each step is compared with float64 at
a small size before it is timed.

    python docs/tutorials/steps.py --out=steps_table.md
    python docs/tutorials/steps.py --interpret     on a CPU: tiny sizes, times mean nothing
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pages

PAGE = "06-a-kernel-step-by-step"
# Relative error that bfloat16 leaves: inputs, weights and the output are rounded to 8 bits.
BUDGET = 1e-2
BATCHES = 20
BATCH_SECONDS = 0.02


def on_card(kernel: Callable[..., None], **options: Any) -> Any:
    """`pl.pallas_call` of a kernel, compiled for a GPU by way of Triton."""
    from ato_jax.launch import pallas_call, triton

    params = triton.CompilerParams(num_warps=4, num_stages=2)
    return pallas_call(kernel, compiler_params=params, **options)


def inputs(H: int, T: int, D: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (H, T, D), jnp.bfloat16) for key in keys]


def milliseconds(call: Callable[[], jax.Array]) -> float:
    """The median over batches of calls; each batch is long beside the wait at its end."""
    call().block_until_ready()
    start = time.perf_counter()
    call().block_until_ready()
    calls = max(1, round(BATCH_SECONDS / (time.perf_counter() - start)))
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        out.block_until_ready()
        times.append((time.perf_counter() - start) / calls)
    return 1e3 * statistics.median(times)


def measure(page: dict[str, Any], H: int, T: int, D: int, blocks: dict[str, Any]) -> list[str]:
    """The lines of the table."""
    exact = {name: page["exact_softmax"] for name in page["STEPS"]}
    exact["causal linear"] = page["exact_linear"]
    small, large = inputs(1, 1024 if T > 1024 else T, D), inputs(H, T, D)
    lines = [
        "| step | kernels | loads, MiB | stores, MiB | relative error | ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, step in page["STEPS"].items():
        step = partial(step, **blocks.get(name, {}))
        error = page["relative_error"](jax.jit(step)(*small), exact[name](*small))
        if not error < BUDGET:
            raise SystemExit(f"{name}: the relative error {error:.1e} is over {BUDGET:.0e}")
        program = jax.jit(step).lower(*large).compile()
        found = page["count"](step, *large)
        loads, stores = (found[key] / 2**20 for key in ("loads", "stores"))
        taken = milliseconds(lambda program=program: program(*large))
        cells = (name, found["kernels"], f"{loads:.1f}", f"{stores:.1f}", f"{error:.1e}")
        lines.append("| " + " | ".join(map(str, (*cells, f"{taken:.4g}"))) + " |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192, help="a power of two (default 8192)")
    parser.add_argument("--head_dim", type=int, default=64, help="16, 32, 64 or 128")
    parser.add_argument("--out", type=pathlib.Path, help="a Markdown file for the table")
    parser.add_argument("--interpret", action="store_true", help="tiny sizes, on a CPU")
    options = parser.parse_args()
    if options.out is not None:
        try:
            options.out.touch()
        except OSError as error:
            parser.error(f"--out={options.out} cannot be written: {error.strerror}")
    if not options.interpret and jax.default_backend() != "gpu":
        sys.exit("JAX finds no GPU here: --interpret runs the kernels without one")

    # Without a GPU, on which JAX multiplies float32 in fewer bits than the page's checks allow.
    with jax.default_device(jax.devices("cpu")[0]):
        page = pages.run(PAGE)
    if options.interpret:
        heads, length, head_dim, blocks = 1, 64, 16, {}
    else:
        page["launch"] = on_card
        heads, length, head_dim = options.heads, options.length, options.head_dim
        blocks = page["BLOCKS"]
    lines = measure(page, heads, length, head_dim, blocks)
    device = jax.devices()[0].device_kind
    how = "interpreted, times mean nothing" if options.interpret else "bfloat16"
    title = f"{device}, JAX {jax.__version__}: H {heads}, T {length}, D {head_dim}, {how}"
    text = "\n".join([title, "", *lines, ""])
    print(text)
    if options.out is not None:
        options.out.write_text(text)
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
