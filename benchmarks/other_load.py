"""What else runs on this machine while something is timed: programs that are neither this process
nor one that it started.

On the CPU: the busy seconds of the cores that this process may run on, less those of this process
and its descendants, both of /proc, so on Linux alone. They disturb only where they leave fewer
cores than the timed call uses.
On the GPU: the processes that nvidia-smi lists on the GPUs that this process sees. In a container
it lists none, or numbers of another namespace, and then other processes on the GPU are not seen.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks import byte_limit, machine

PROC = Path("/proc")
# Cores that others may take: the system's own programs are always there.
TOLERATED_CORES = 0.25
# /proc counts in hundredths of a second: a shorter interval says nothing.
SHORTEST_SECONDS = 0.1
# While a GPU computes, one thread launches and one process waits.
HOST_THREADS_OF_A_GPU = 2
# nvidia-smi takes tens of milliseconds.
GPU_EVERY_SECONDS = 5.0


def _times(pid: int) -> tuple[int, float] | None:
    """A process's parent, and the seconds that it and its ended children computed."""
    try:
        # Without pathlib, which takes longer than the system does.
        with open(f"{PROC}/{pid}/stat", "rb") as file:
            # The name, in brackets, may hold spaces.
            told = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(told[1]), sum(map(int, told[11:15])) / os.sysconf("SC_CLK_TCK")


def family() -> dict[int, float]:
    """By process, this one and its descendants: the seconds that each computed."""
    numbers = os.listdir(PROC) if PROC.exists() else []
    known = {int(name): _times(int(name)) for name in numbers if name.isdecimal()}
    found = {os.getpid()}
    while more := {pid for pid, told in known.items() if told and told[0] in found} - found:
        found |= more
    return {pid: told[1] for pid in found if (told := known.get(pid))}


def busy_seconds() -> float | None:
    """That the cores which this process may run on were busy since the system started; None where
    /proc does not say.
    """
    try:
        lines = (PROC / "stat").read_text().splitlines()
    except OSError:
        return None
    own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in lines:
        name, *fields = line.split() or [""]
        if name in own:
            user, nice, system, _idle, _wait, irq, softirq, stolen = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + stolen
    return ticks / os.sysconf("SC_CLK_TCK")


_seen_on_gpu = (-GPU_EVERY_SECONDS, "")


def on_gpu() -> str:
    """Which other processes nvidia-smi lists on the GPUs that this one sees; "" for none. Asked
    once in five seconds.
    """
    global _seen_on_gpu
    if time.monotonic() - _seen_on_gpu[0] >= GPU_EVERY_SECONDS:
        own, cards, others = family(), machine.own_cards(), []
        apps = machine.nvidia_smi(
            "--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader"
        )
        for line in apps.splitlines():
            card, pid, name = (*line.split(", ", 2), "", "")[:3]
            if card not in cards or not pid.isdecimal():
                continue
            if int(pid) not in own and (PROC / pid).exists():
                others.append(f"{name} (process {pid})")
        told = f"another process on the GPU: {', '.join(others)}" if others else ""
        _seen_on_gpu = time.monotonic(), told
    return _seen_on_gpu[1]


class Watch:
    """From when it is made on."""

    def __init__(self, platform: str) -> None:
        self._platform = platform
        self._start, self._busy, self._own = time.monotonic(), busy_seconds(), family()

    def others(self) -> float | None:
        """How many cores other programs kept busy; None where that cannot be known."""
        spent, busy = time.monotonic() - self._start, busy_seconds()
        if busy is None or self._busy is None or spent < SHORTEST_SECONDS:
            return None
        own = sum(seconds - self._own.get(pid, 0.0) for pid, seconds in family().items())
        return max(0.0, busy - self._busy - own) / spent

    def told(self) -> str:
        """What disturbed the times that were taken since; "" for nothing."""
        on_gpu_too = self._platform == "gpu"
        cores, others = byte_limit.threads(), self.others()
        unused = max(0, cores - HOST_THREADS_OF_A_GPU) if on_gpu_too else 0
        reasons = [on_gpu()] if on_gpu_too else []
        if others is not None and others > unused + TOLERATED_CORES:
            reasons.append(f"other programs kept {others:.1f} of {cores} cores busy")
        return "; ".join(filter(None, reasons))
