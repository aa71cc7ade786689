"""`python -m benchmarks COMMAND`; `COMMAND --help`: what it does, and its flags.

    demo                            linear attention against PyTorch over the length, a picture
    run --suite=NAME                a suite beside its peers, or several, or a --config
    run --suite=choices             whether implementation=None takes the fastest backend
    run --suite=cliffs              each option beside its base case
    run --suite=devices             one call on one device and on several of this host
    run --suite=sdpa                ato_torch.attention beside SDPA's default, 128 to 16K tokens
    run --suite=training            a training step of a model by ato_torch and by PyTorch
    linear, attention               short for `run` of these suites
    fit A.json B.json               what tables of choices lack, by that suite's figures
    compare A.json B.json           what became slower
    merge A.json B.json --json=C.json  parts of a report, of one machine and commit, as one file
    tune linear_attention           block sizes for this device; `tune attention`
    profile --case=CASE             what each kernel of a case takes; --ncu: its counters
    memory                          a training step's memory: its peak, and a timeline
    latency                         a decode loop's time of a token, by percentiles
    table FILE.json                 what a file of figures has
    plot FILE.json                  the same as pictures
    whole                           the whole report of this card, in as many parts as it takes
    scaling                         the tables of docs/scaling.md: a model, and what was measured
    report                          docs/results.md, the README's table and pictures, and
                                    ato_jax/slower.toml, from the files in benchmarks/results

The exit status is 2 for what was asked wrongly, and 1 where something failed or became slower.
"""

from __future__ import annotations

import logging as standard_logging
import os
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging

# PyTorch's process needs its part of the GPU's memory. JAX reads this when it starts.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
# NumPy's threads wait for each other by turning in circles. Its products are small here: where one
# thread has no core, they can take many times as long, in the way of what is timed next.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from benchmarks import (  # noqa: E402
    choices,
    cliffs,
    compare,
    demo,
    devices,
    document,
    kept,
    latency,
    memory,
    profiling,
    progress,
    run,
    scaling_page,
    show,
    side_by_side,
    stopping,
    store,
    tune,
    usage,
    whole,
)
from benchmarks.peers import PeerError  # noqa: E402
from benchmarks.results import ResultsError  # noqa: E402

flags.adopt_module_key_flags(cliffs)
flags.adopt_module_key_flags(demo)
flags.adopt_module_key_flags(devices)
flags.adopt_module_key_flags(document)
flags.adopt_module_key_flags(kept)
flags.adopt_module_key_flags(latency)
flags.adopt_module_key_flags(profiling)
flags.adopt_module_key_flags(run)
flags.adopt_module_key_flags(side_by_side)
flags.adopt_module_key_flags(store)
flags.adopt_module_key_flags(tune)
flags.adopt_module_key_flags(whole)

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "demo": demo.main,
    "run": run.main,
    "linear": lambda _: run.main(["linear"]),
    "attention": lambda _: run.main(["attention"]),
    "fit": choices.fit,
    "compare": compare.main,
    "merge": kept.merge,
    "tune": tune.main,
    "profile": profiling.main,
    "memory": memory.main,
    "latency": latency.main,
    "table": show.table,
    "plot": show.plot,
    "scaling": scaling_page.main,
    "report": document.main,
    "whole": whole.main,
}
STOPPED = stopping.STOPPED
# Those that take names after their own.
TAKE_NAMES = ("run", "fit", "compare", "merge", "tune", "table", "plot")


def main(arguments: Sequence[str]) -> int:
    # A message is for a reader at a screen: without absl's date, thread and line.
    logging.get_absl_handler().setFormatter(standard_logging.Formatter("%(message)s"))
    command, names = (*arguments[1:2], "")[0], arguments[2:]
    if command not in COMMANDS or names and command not in TAKE_NAMES:
        given = " ".join(arguments[1:]) or "nothing"
        logging.error("Give one command, %s; got %s", ", ".join(COMMANDS), given)
        return 2
    if foreign := usage.foreign(command):
        told = ", ".join(f"--{name}" for name in foreign)
        logging.error("%s takes no %s: `%s --help` lists what it takes", command, told, command)
        return 2
    # Absl shows what libraries say to each other, too.
    for library in ("jax", "matplotlib"):
        standard_logging.getLogger(library).setLevel(standard_logging.WARNING)
    try:
        return COMMANDS[command](names)
    except ResultsError as error:
        logging.error("%s", error)
        return 2
    except KeyboardInterrupt:
        progress.show("")
        kept.unmark()
        logging.error("%s", kept.stopped(command))
        return STOPPED
    except PeerError as error:
        logging.error("PyTorch's process ended: %s", error)
        return 1


def ended(status: int) -> int:
    """Ends the program at once where something never finishes compiling, whose thread would hold it
    up, and where it was stopped: JAX may crash in a call that was cut off.
    """
    if side_by_side.stuck or status == STOPPED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def parsed(arguments: list[str]) -> list[str]:
    """Returns the arguments that are no flags.

    Absl exits with 1 for a wrong flag and for --help. Here 1 is what `compare` returns for a slower
    call, so a wrong flag is 2 and help is 0.
    """
    if usage.asked(arguments[1:]):
        names = [one for one in arguments[1:] if not one.startswith("-")]
        print(usage.text(names[0] if names else "", COMMANDS, __doc__ or ""))
        sys.exit(0)
    try:
        return flags.FLAGS(arguments)
    except flags.Error as error:
        # Absl's log would put a line of its own above: it has not begun yet.
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    stopping.listen()
    app.run(lambda arguments: ended(main(arguments)), flags_parser=parsed)
