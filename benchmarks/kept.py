"""The files that a run keeps: its figures, written after every group of rows, and the name of what
runs now, so that `--resume` goes on with the one and without the other.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks import results
from benchmarks.results import NO_TIME_LEFT, Results, ResultsError, Row

FLAGS = flags.FLAGS
flags.DEFINE_string("json", "", "run: where to write all figures, a .json")
flags.DEFINE_string("csv", "", "run: where to write a line for each row, a .csv")
flags.DEFINE_bool("resume", False, "run: keep the figures in --json, measure what it lacks")
flags.DEFINE_bool("keep", False, "run: --json is the file of this device in benchmarks/results")
flags.register_multi_flags_validator(
    ["resume", "json", "keep"],
    lambda given: given["json"] or given["keep"] or not given["resume"],
    "--resume goes on with the file that --json names",
)


def write(found: Results) -> None:
    if FLAGS.json:
        results.write(Path(FLAGS.json), results.json_text(found))
    if FLAGS.csv:
        results.write(Path(FLAGS.csv), results.csv_text(found))


def say() -> None:
    """Prints the names of the files that were written."""
    for path in (FLAGS.json, FLAGS.csv):
        if path:
            print(path, flush=True)


def mark(case: str, phase: str, name: str) -> None:
    """Writes beside the file of figures what runs now, or with no name that nothing does. What ends
    this program is left out when the run is resumed.
    """
    if not FLAGS.json:
        return
    if name:
        results.write(doing(Path(FLAGS.json)), json.dumps([case, phase, name]))
    else:
        doing(Path(FLAGS.json)).unlink(missing_ok=True)


def earlier() -> Results | None:
    """The file of figures that a run with --resume goes on with."""
    return results.read(Path(FLAGS.json)) if FLAGS.resume else None


def begun(facts: dict[str, Any], before: Results | None) -> Results:
    """The figures that a run adds to, `facts` being those of `Results` about this machine."""
    here = Results(**facts)
    found = resumed(Path(FLAGS.json), before, here) if before else here
    # Before anything is measured: a file that cannot be written is known now.
    write(found)
    return found


def doing(path: Path) -> Path:
    return path.with_name(path.name + ".doing")


def resumed(path: Path, earlier: Results, here: Results) -> Results:
    """What was found earlier, to go on with.

    It keeps its copy bandwidth: the byte limits of one file are of one bandwidth.
    """
    there_and_here = [
        f"{name} is {getattr(earlier, name)} there and {getattr(here, name)} here"
        for name in results.SAME
        if getattr(earlier, name) != getattr(here, name)
    ]
    if there_and_here:
        raise ResultsError(f"{path} cannot be resumed: {'; '.join(there_and_here)}")
    kept = [row for row in earlier.rows if row.unavailable != NO_TIME_LEFT]
    if doing(path).exists():
        case, phase, name = json.loads(doing(path).read_text())
        kept.append(Row(case, phase, name, 1.0, 1.0, 1.0, unavailable="ended this program"))
        doing(path).unlink()
    print(
        f"{len(kept)} rows are from {path}, byte limits at its copy's "
        f"{earlier.bandwidth / 1e12:.3f} TB/s",
        flush=True,
    )
    return dataclasses.replace(earlier, rows=kept, about=earlier.about | here.about)
