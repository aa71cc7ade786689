"""Compiles for the driver what it is asked for: the process that `ahead.py` starts, several times
over, with a --config or "" and the names of the suites whose contests the jobs count.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from benchmarks import choices, ours, side_by_side, suites
from benchmarks.ahead import Answer
from benchmarks.cases import Case


def answer(contender: Any, case: Case, phase: str) -> Answer:
    """Of one contender, as a worker tells it."""
    try:
        ready = contender.compiled(case, phase)
        if isinstance(ready, ours.Programs):
            return ready.packed()
        return ready if isinstance(ready, str) else None
    except Exception:  # whatever it is: the driver finds it again, or does without
        return None


def of_row(job: Mapping[str, Any]) -> Answer:
    """All programs of a row of `choices` or `cliffs`."""
    row, phase = choices.row_of(job["row"]), job["phase"]
    try:
        return choices.packed(row, phase, ours.platform(), job["by_name"])
    except Exception as error:  # as above
        print(f"{row}, {phase}: not compiled ahead: {side_by_side.refusal(error)}", flush=True)
        return None


def answered(job: Mapping[str, Any], contests: Callable[[], Sequence[Any]]) -> Answer:
    if "row" in job:
        return of_row(job)
    contender = contests()[job["contest"]].in_jax[job["contender"]]
    return answer(contender, Case(**job["case"]), job["phase"])


def main(arguments: Sequence[str]) -> None:
    logging.set_verbosity(logging.ERROR)
    # Nothing that a library prints may come between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    config, *names = arguments
    contests = functools.cache(lambda: suites.contests(suites.chosen(names, config)))
    for line in sys.stdin:
        pickle.dump(answered(json.loads(line), contests), answers)
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
