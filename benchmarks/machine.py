"""The machine that figures are of: its driver and clocks, what is installed."""

from __future__ import annotations

import datetime
import importlib.metadata
import subprocess
import sys

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


def clocks() -> str:
    """Of the multiprocessors and the memory, with power and temperature."""
    return nvidia(CLOCKS)
