"""Runs a module of the tests in a process that has as many simulated devices as it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def environment(devices: int | None) -> dict[str, str]:
    """The environment of a process on the CPU; None leaves the number of devices to it."""
    found = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if devices is not None:
        flags = found.get("XLA_FLAGS", "")
        found["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}"
    return found


def last_line(module: str, *arguments: str, devices: int | None = None) -> str:
    """The last line that `python -m module` prints."""
    found = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parent.parent,
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout.split("\n")[-2]
