"""The time that moving the bytes takes: the least traffic over the copy bandwidth of this machine.

    limit = traffic / bandwidth         bandwidth = bytes read + bytes written, over time

The bandwidth is that of a plain copy of a large array, measured in the same run: on a GPU a
device-to-device memcpy (a copy that XLA writes itself reaches three quarters of it), on a CPU
memcpy by as many threads as the attention has.
"""

from __future__ import annotations

import concurrent.futures
import os
import statistics
import time
from typing import Any

import numpy as np

from benchmarks import timing
from benchmarks.cases import Case

GPU_COPY_BYTES = 1 << 30
# Well above a processor's caches.
CPU_COPY_BYTES = 1 << 28
CPU_COPIES = 9
CPU_MATRIX = 1024


def limit(case: Case, phase: str, bandwidth: float) -> float:
    """Seconds below which no program that reads its inputs and writes its outputs can go."""
    return case.traffic(phase) / bandwidth


def threads() -> int:
    """How many processors this process may run on: what XLA takes, and PyTorch is set to."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_bandwidth() -> float:
    """Bytes read and written per second, each thread copying its part of an array."""
    source = np.random.default_rng(0).integers(0, 256, CPU_COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    workers = threads()
    pairs = list(zip(np.array_split(target, workers), np.array_split(source, workers), strict=True))
    times = []
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for _ in range(CPU_COPIES):
            start = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(*pair), pairs))
            times.append(time.perf_counter() - start)
    # The first writes to memory that the system has yet to hand out.
    return 2 * CPU_COPY_BYTES / statistics.median(times[1:])


def cpu_matrix_rate() -> float:
    """Operations per second of a float32 product by all threads."""
    left, right = np.random.default_rng(0).random((2, CPU_MATRIX, CPU_MATRIX), np.float32)
    times = []
    # NumPy's own threads may be switched off.
    with concurrent.futures.ThreadPoolExecutor(threads()) as pool:
        for _ in range(3):
            start = time.perf_counter()
            list(pool.map(lambda rows: rows @ right, np.array_split(left, threads())))
            times.append(time.perf_counter() - start)
    return 2 * CPU_MATRIX**3 / min(times)


def gpu_bandwidth(torch: Any, seconds: float) -> float:
    """The same on the GPU: PyTorch copies a contiguous tensor of the same dtype by memcpy."""
    source = torch.randint(0, 256, (GPU_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    found = timing.measure(
        lambda _: target.copy_(source), lambda _: torch.cuda.synchronize(), "gpu", seconds
    )
    return 2 * GPU_COPY_BYTES / found.seconds
