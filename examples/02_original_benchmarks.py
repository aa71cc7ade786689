"""The measurements that this project began with, made again on this machine.

The project grew from Triton kernels for bidirectional linear attention and wide heads, which were
compared with PyTorch's scaled_dot_product_attention. Its tables are suites of `benchmarks` here,
with the original's ratio beside ours:

    bidirectional   linear attention over T against SDPA, both directions (50 times at 64K tokens)
    causal          causal linear attention against FlashAttention-2
    tiles           bandwidth by tile size
    wide            heads of 512 to 8192 columns
    ladder          naive, tiled, flash: time and memory

    python -m examples.02_original_benchmarks                   all of them; for a GPU, minutes
    python -m examples.02_original_benchmarks --suite ladder    one of them; small sizes on a CPU

needs `pip install '.[bench,torch]'` and the folder `benchmarks` of this repository. It writes the
figures (JSON) to --output.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # started by its path, from whatever folder
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from examples import command

ROOT = Path(__file__).resolve().parents[1]
SUITES = ("bidirectional", "causal", "tiles", "wide", "ladder")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of the benchmarks."""
    parser = command.parser(__doc__, output="original_output")
    parser.add_argument("--suite", choices=SUITES, action="append", help="may be given repeatedly")
    options = parser.parse_args(arguments)
    figures = options.output.resolve() / "original.json"
    suites = options.suite or SUITES
    run = [sys.executable, "-m", "benchmarks", "run"]
    run += [f"--suite={','.join(suites)}", f"--json={figures}"]
    print("runs", " ".join(run[1:]))
    status = subprocess.run(run, cwd=ROOT, check=False).returncode
    if figures.exists():
        command.told(figures)
    return status


if __name__ == "__main__":
    sys.exit(main())
