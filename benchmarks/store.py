"""Compiled programs on this machine's disk: what one part of a report compiled, the next one loads.

A folder holds one folder for each state of all that a program depends on: the sources, the versions
of JAX and of what else is installed, the kind of card, its driver, XLA's flags. A file in it holds
what a worker of `ahead.py` answered to one job: programs, or None where this program has to be
compiled in the process that times it. Files are pickles, so only this user may read and write the
folder.

What a file saves, found with JAX 0.11.2 and CUDA 13:

- XLA compiles a Mosaic GPU kernel while it compiles the program around it. The kernel's machine
  code and the host function that launches it are state of the custom call (`mosaic_gpu_v2`), and
  XLA serializes that state with the program. A program that is loaded again holds the object files
  of all its kernels, four in 0.7 MB for softmax attention with its gradients, and 32 in 3.3 MB
  where it makes eight calls. Loading it runs neither MLIR's passes nor ptxas.
- JAX's persistent compilation cache holds the same bytes, but JAX looks for them by a digest of the
  lowered program. So a process that asks that cache traces and lowers first, which took 1.5 to
  3.3 s for programs that compiled in 2.9 to 4.2 s on two cores. A file that is named by its row
  saves both.
- XLA's cache of autotuned products (`xla_gpu_per_fusion_autotune_cache_dir`) would help programs
  that search. These are not compiled ahead at all: a search times kernels, so nothing else may run
  beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib
from absl import flags

from benchmarks import machine, results
from benchmarks.results import ResultsError

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "compiled",
    "",
    "run: compile nothing ahead, and time only rows whose programs are in this folder, which "
    "`whole` fills; whole: below which folder that is",
)

# The file in a folder of programs that says what they depend on.
STATE = "state.json"
# What a job asks for, as JSON; the name of its file is a digest of it.
Job = Mapping[str, Any]


def default_folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "ato_jax" / "programs"


def state(platform: str) -> dict[str, str]:
    """All that a program depends on beside its job. No device is touched to find it."""
    card = (machine.own_cards() or ["0"])[0]
    found = {name: told for name, told in machine.about().items() if name != "date"}
    return found | {
        "platform": platform,
        "card": machine.nvidia("name", card),
        "commit": machine.commit(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


@dataclasses.dataclass(frozen=True)
class Store:
    """The programs of one state."""

    folder: Path

    def _path(self, job: Job) -> Path:
        return self.folder / _digest(job)

    def has(self, job: Job) -> bool:
        """Whether the job was answered, with a program or without."""
        return self._path(job).exists()

    def get(self, job: Job) -> Any:
        """The answer; None where there is none, or where its file is not whole."""
        path = self._path(job)
        try:
            with path.open("rb") as file:
                return pickle.load(file)
        except FileNotFoundError:
            return None
        except Exception:  # whatever a broken pickle raises: the job is asked again
            path.unlink(missing_ok=True)
            return None

    def put(self, job: Job, answer: Any) -> None:
        """Keeps an answer as a whole or not at all. A disk that is full loses no row."""
        path = self._path(job)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            with beside.open("wb") as file:
                pickle.dump(answer, file)
            beside.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _digest(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def opened(root: Path, platform: str) -> Store:
    """The programs of today's state below a folder, which is made where it is not there."""
    facts = state(platform)
    folder = root / _digest(facts)
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(exist_ok=True, mode=0o700)
    results.write(folder / STATE, json.dumps(facts, indent=1) + "\n")
    return Store(folder)


def given() -> Store | None:
    """That of --compiled, if the flag is there. The folder is that of a state: a library that this
    process imported may have changed XLA's flags since.
    """
    if not FLAGS.compiled:
        return None
    path = Path(FLAGS.compiled) / STATE
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ResultsError(f"--compiled={FLAGS.compiled} has no programs: {error}") from error
    for name, here in (("commit", machine.commit()), ("jax", jax.__version__)):
        if told.get(name) != here:
            raise ResultsError(f"{path}: {name} is {told.get(name)} there and {here} here")
    return Store(path.parent)
