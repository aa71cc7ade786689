"""Runs a module of the tests in several processes at once, which find each other by a port."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tests import simulated

# What each process prints as a line of its own once its comparisons have passed.
ALL_ALIKE = "all alike"
# Seconds in which each has to end.
LIMIT = 300


def run(module: str, count: int, devices: int | None = None) -> None:
    """Runs `python -m MODULE PORT NUMBER` on the CPU, NUMBER from 0 to `count` - 1.

    Each process has as many simulated devices as `devices` says. It has to exit with 0 and to print
    `ALL_ALIKE`; the error of one that does not has the output of all.
    """
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port = server.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(port), str(number)],
            cwd=Path(__file__).parent.parent,
            env=simulated.environment(devices),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(count)
    ]
    try:
        told = [process.communicate(timeout=LIMIT)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, text in zip(running, told, strict=True):
        assert process.returncode == 0 and ALL_ALIKE in text.splitlines(), "\n".join(told)
