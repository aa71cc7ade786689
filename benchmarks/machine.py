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
from pathlib import Path

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


def own_cards() -> list[str]:
    """The UUIDs of the GPUs that this process sees, by CUDA_VISIBLE_DEVICES, and of their slices:
    all of them where it is not set, or names one that nvidia-smi does not list. A MIG slice counts
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
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found: list[list[str]] = []
    for name in visible.replace(" ", "").split(",") if visible is not None else ():
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


def identity() -> str:
    """This machine and its card among others of their kind, as eight digits: figures of two
    machines are not put together.
    """
    return hashlib.sha256((nvidia("uuid") or platform.node()).encode()).hexdigest()[:8]


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
    return f"{head}, changed: {_digest(root)}" if changed else head


def _digest(root: Path) -> str:
    found = hashlib.sha256()
    for name in SOURCES:
        for path in sorted((root / name).rglob("*.py")):
            found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def clocks() -> str:
    """The clocks of multiprocessors and memory, the power and the temperature of the first GPU that
    this process sees.
    """
    return nvidia(CLOCKS, (own_cards() or ["0"])[0])
