"""The machine that figures are of: its driver and clocks, what is installed."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath

# By the names that they are installed by.
PACKAGES = (
    "triton",
    "fla-core",
    "flash-bla",
    "jax-linear-attention",
    "jax-triton",
    "tokamax",
    "flash-attn",
    "flash-attn-3",
    "flash-attn3-jax",
    "xformers",
    "numpy",
)
ROOT = Path(__file__).resolve().parents[1]
# What figures depend on.
SOURCES = ("ato_jax", "ato_torch", "benchmarks")
# Between a commit and the digest of sources that differ from it.
CHANGED = ", changed: "
# Commits of the sources among which that of figures is looked for.
LATEST = 100
CLOCKS = "clocks.sm,clocks.mem,power.draw,temperature.gpu"


def nvidia_smi(*arguments: str) -> str:
    """The answer of nvidia-smi to these arguments, or "" where there is no GPU."""
    command = ["nvidia-smi", *arguments]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.strip()


def nvidia(query: str, card: str = "0") -> str:
    """What nvidia-smi answers of one GPU, by number or UUID; "" without one."""
    return nvidia_smi(f"--id={card}", f"--query-gpu={query}", "--format=csv,noheader")


def own_cards(visible: str = "") -> list[str]:
    """The UUIDs of the GPUs that this process sees, by CUDA_VISIBLE_DEVICES, and of their slices:
    all of them where it is not set, or names one that nvidia-smi does not list. With `visible`,
    those of a process in which that is the variable. A MIG slice counts
    as its whole GPU.

    A number there is nvidia-smi's where all GPUs are of one kind, or CUDA_DEVICE_ORDER is
    PCI_BUS_ID.
    """
    # By GPU, in nvidia-smi's order: its UUID, and those of its slices, on the lines after its own.
    cards: list[list[str]] = []
    for line in nvidia_smi("-L").splitlines():
        if match := re.search(r"\(UUID: ([^)]+)\)", line):
            if line.startswith("GPU"):
                cards.append([])
            cards[-1].append(match[1])
    names = visible or os.environ.get("CUDA_VISIBLE_DEVICES")
    found: list[list[str]] = []
    for name in names.replace(" ", "").split(",") if names is not None else ():
        if name.isdecimal():
            of_name = cards[int(name) :][:1]
        else:
            # CUDA takes the beginning of a UUID, too. An older name of a slice has its GPU's in it.
            whole = name.replace("MIG-GPU-", "GPU-").partition("/")[0] or "none"
            of_name = [card for card in cards if any(one.startswith(whole) for one in card)]
        if not of_name:
            found.clear()
            break
        found += of_name
    return [one for card in found or cards for one in card]


def about() -> dict[str, str]:
    """What is noted of a run beside the versions that have to be the same."""
    found = {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    found["Python"] = sys.version.split()[0]
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name, query in (("driver", "driver_version"), ("highest clock", "clocks.max.sm")):
        if told := nvidia(query):
            found[name] = told
    return found


def identity(visible: str = "") -> str:
    """This machine and its card among others of their kind, as eight digits: figures of two
    machines are not put together. `visible` is as in `own_cards`.
    """
    card = nvidia("uuid", (own_cards(visible) or ["0"])[0])
    return hashlib.sha256((card or platform.node()).encode()).hexdigest()[:8]


def commit(root: Path = ROOT) -> str:
    """The commit of the sources; with a digest of them where they are changed, or have no commit.
    """
    git = ["git", "-C", str(root)]
    try:
        told = [
            subprocess.run([*git, *command], capture_output=True, text=True, timeout=20, check=True)
            for command in (
                ("rev-parse", "--short=12", "HEAD"),
                ("status", "--porcelain", "--", *(f"{name}/*.py" for name in SOURCES)),
            )
        ]
    except (OSError, subprocess.SubprocessError):
        return f"sources {_digest(root)}"
    head, changed = (one.stdout.strip() for one in told)
    return f"{head}{CHANGED}{_digest(root)}" if changed else head


def _digest(root: Path) -> str:
    return _digest_of(
        {
            path.relative_to(root): path.read_bytes()
            for name in SOURCES
            for path in (root / name).rglob("*.py")
        }
    )


def _digest_of(texts: Mapping[PurePath, bytes]) -> str:
    found = hashlib.sha256()
    for path in sorted(texts, key=lambda path: (SOURCES.index(path.parts[0]), path)):
        found.update(f"{path.as_posix()}\n".encode() + texts[path])
    return found.hexdigest()[:12]


def of_sources(told: str, root: Path = ROOT) -> str:
    """The commit of figures that were measured where no commit was known, or where the sources
    differed from those of the commit: the newest one here that has those sources.

    Returns `told` itself where it is a commit alone, or where no commit here has those sources.
    """
    digest = told.removeprefix("sources ").rpartition(CHANGED)[2]
    if digest == told:
        return told

    def git(*command: str, given: bytes = b"") -> bytes:
        whole = ["git", "-C", str(root), *command]
        return subprocess.run(whole, input=given, capture_output=True, check=True).stdout

    try:
        recent = f"-{LATEST}", "--format=%h", "--abbrev=12", "HEAD", "--", *SOURCES
        for commit in git("log", *recent).decode().split():
            lines = git("ls-tree", "-r", "-z", commit, "--", *SOURCES).decode().split("\0")
            blobs = {}
            for line in lines:
                about, _, name = line.partition("\t")
                if name.endswith(".py"):
                    blobs[PurePath(name)] = about.split()[2]
            told_of = git("cat-file", "--batch", given="\n".join(blobs.values()).encode())
            texts, at = {}, 0
            for path in blobs:
                # A line with the kind and the size of each, then its text and a new line.
                end = told_of.index(b"\n", at)
                size = int(told_of[at:end].split()[2])
                texts[path] = told_of[end + 1 : end + 1 + size]
                at = end + 2 + size
            if _digest_of(texts) == digest:
                return commit
    except (OSError, subprocess.SubprocessError):
        pass
    return told


def clocks() -> str:
    """The clocks of multiprocessors and memory, the power and the temperature of the first GPU that
    this process sees.
    """
    return nvidia(CLOCKS, (own_cards() or ["0"])[0])
