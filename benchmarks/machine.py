"""The machine that figures are of: its driver and clocks, what is installed."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import platform
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


def nvidia(query: str, of: str = "gpu") -> str:
    """What nvidia-smi answers of the first GPU; "" without one."""
    command = ["nvidia-smi", "--id=0", f"--query-{of}={query}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.strip()


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
    """Of the multiprocessors and the memory, with power and temperature."""
    return nvidia(CLOCKS)
