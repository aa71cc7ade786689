"""`python -m benchmarks demo`, `run`, `linear`, `attention`, `compare A.json B.json`,
`tune linear_attention` or `tune attention`; `--helpshort`: flags.

The exit status is 2 for what was asked wrongly, and 1 where something failed or became slower.
"""

from __future__ import annotations

import functools
import logging as standard_logging
import os
import sys
from collections.abc import Sequence

from absl import app, flags, logging

# PyTorch's process needs its part of the GPU's memory. JAX reads this when it starts.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

from benchmarks import attention, compare, demo, linear, run, side_by_side, tune  # noqa: E402
from benchmarks.peers import PeerError  # noqa: E402
from benchmarks.results import ResultsError  # noqa: E402

flags.adopt_module_key_flags(demo)
flags.adopt_module_key_flags(run)
flags.adopt_module_key_flags(side_by_side)
flags.adopt_module_key_flags(tune)

COMMANDS = {"demo": demo.main, "run": run.main}
COMMANDS |= {"linear": linear.main, "attention": attention.main}
COMMANDS |= {f"tune {op}": functools.partial(tune.main, op) for op in tune.OPS}


def main(arguments: Sequence[str]) -> int:
    command = " ".join(arguments[1:])
    # The one command that takes files.
    compares = arguments[1:2] == ["compare"]
    if command not in COMMANDS and not compares:
        given, known = command or "nothing", (*COMMANDS, "compare A.json B.json")
        logging.error("Give one command, %s; got %s", " or ".join(known), given)
        return 2
    # Absl shows what libraries say to each other, too.
    for library in ("jax", "matplotlib"):
        standard_logging.getLogger(library).setLevel(standard_logging.WARNING)
    try:
        return compare.main(arguments[2:]) if compares else COMMANDS[command]()
    except ResultsError as error:
        logging.error("%s", error)
        return 2
    except PeerError as error:
        logging.error("PyTorch's process ended: %s", error)
        return 1


def parsed(arguments: list[str]) -> list[str]:
    """What is left beside the flags. Absl's own exit status is 1, which `compare` has use for."""
    try:
        return flags.FLAGS(arguments)
    except flags.Error as error:
        # Absl's log would put a line of its own above: it has not begun yet.
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(main, flags_parser=parsed)
