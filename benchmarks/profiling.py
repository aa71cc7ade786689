"""What the kernels of a case take: each one's time, and the bytes and operations a second that all
of them reach together, counted as the case's least traffic and its products.

Calls run back to back inside JAX's profiler, whose trace names every kernel on the device; on a CPU
it names what XLA's threads run. With --ncu the same calls run once more under Nsight Compute, which
counts what each kernel moves and how busy its units are.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags, logging

from benchmarks import attention, cases, demo, linear, noise, other_load, ours, progress
from benchmarks.cases import Case
from benchmarks.results import ResultsError
from benchmarks.tables import Table

FLAGS = flags.FLAGS
flags.DEFINE_bool("ncu", False, "profile: count also with Nsight Compute, where it is installed")
flags.DEFINE_bool("traced", False, "profile: only run the calls, for a profiler around them")

CALLS = 5
# What Nsight Compute counts of each kernel: bytes, and how busy memory and multiprocessors are.
COUNTERS = (
    "gpu__time_duration.sum",
    "dram__bytes.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "launch__registers_per_thread",
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    calls: float
    seconds: float


def kernels(trace: dict[str, Any], calls: int) -> list[Kernel]:
    """Of a trace in Chrome's form: the kernels of one call, those that take longest first."""
    events = trace["traceEvents"]
    processes, threads = {}, {}
    for event in events:
        if event.get("name") == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        if event.get("name") == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    devices = {pid for pid, name in processes.items() if "/device:GPU" in name}
    spent: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        if event.get("ph") != "X":
            continue
        thread = threads.get((event["pid"], event["tid"]), "")
        # A GPU's streams; beside them a trace has lines that sum them up.
        on_device = event["pid"] in devices and thread.startswith("Stream")
        of_xla = not devices and "hlo_op" in event.get("args", {})
        if on_device or of_xla:
            spent[event["name"]].append(1e-6 * event["dur"])
    found = [Kernel(name, len(each) / calls, sum(each) / calls) for name, each in spent.items()]
    return sorted(found, key=lambda kernel: -kernel.seconds)


def traced(launch: Callable[[int], object], calls: int = CALLS) -> dict[str, Any]:
    """The trace of so many launches, in Chrome's form."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([launch(0) for _ in range(calls)][-1])
        [path] = Path(folder).glob("plugins/profile/*/*.trace.json.gz")
        return json.loads(gzip.decompress(path.read_bytes()))


def table(
    case: Case, phase: str, found: Sequence[Kernel], scratch: int | None, load: str = ""
) -> Table:
    """All kernels; no rate is made of what was traced beside other programs, the load."""
    total = sum(kernel.seconds for kernel in found)
    lines = [
        [
            f"  {kernel.name[:70]}",
            f"{kernel.calls:g}",
            f"{kernel.seconds * 1e6:.1f}",
            f"{kernel.seconds / total:.1%}",
        ]
        for kernel in found
    ]
    throughput, rate = case.traffic(phase) / total, case.operations(phase) / total
    rates = (
        f"  all kernels {demo.milliseconds(total)} ms: {throughput / 1e9:.0f} GB/s of the least "
        f"traffic, {rate / 1e12:.3g} TFLOP/s"
    )
    if load:
        rates = f"  all kernels {noise.MARK}{demo.milliseconds(total)} ms: {noise.busy(load)}"
    peak = "" if scratch is None else f"; peak {(case.held(phase) + scratch) / 1e6:.1f} MB"
    head = ["", "times", "µs", "of all"]
    return Table(f"{case}, {phase}", head, lines, [rates + peak])


def counted(arguments: Sequence[str]) -> str:
    """The same under Nsight Compute: its table, or why there is none."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return "No counters: ncu is not installed"
    command = [ncu, "--csv", "--metrics", ",".join(COUNTERS), "--clock-control", "none"]
    # Drawing inputs and comparing launch kernels of XLA's own; the profiler is told to wait.
    command += ["--profile-from-start", "off", sys.executable, "-m", "benchmarks", "profile"]
    ran = subprocess.run([*command, *arguments, "--traced"], capture_output=True, text=True)
    lines = [line for line in ran.stdout.splitlines() if line.startswith('"')]
    if ran.returncode or not lines:
        last = (ran.stderr or ran.stdout).strip().splitlines()[-1:]
        return f"No counters: ncu ended with status {ran.returncode}: {' '.join(last)}"
    return "\n".join(lines)


def chosen() -> list[Case]:
    both = (linear.CONTEST, attention.CONTEST)
    found = [case for contest in both for case in contest.wanted_cases(ours.platform())]
    # One token is no case of it: `latency` has that.
    found = [case for case in found if case.op != "step"]
    # A case's whole name is part of others' names.
    found = [case for case in found if str(case) == FLAGS.case] or found
    if not FLAGS.case or not found:
        known = [case for contest in both for case in contest.cases[ours.platform()]]
        names = "; ".join(str(case) for case in known if case.op != "step")
        raise ResultsError(f"profile needs a --case of these: {names}")
    return found


def _cuda_runtime() -> ctypes.CDLL:
    """The one that JAX has loaded."""
    jax.block_until_ready(jax.numpy.arange(2))
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise ResultsError("CUDA's runtime library is not found: no counters")


def _only_run(ready: ours.Prepared) -> None:
    """Between the marks of CUDA's own profiler, so that nothing else is counted."""
    runtime = _cuda_runtime()
    jax.block_until_ready(ready.launch(0))
    runtime.cudaProfilerStart()
    jax.block_until_ready(ready.launch(0))
    runtime.cudaProfilerStop()


def short(found: Sequence[tuple[Case, str, Sequence[Kernel]]]) -> Table:
    """A line of each case and phase: what stands before all kernels' tables."""
    lines = []
    for case, phase, each in found:
        total, first = sum(kernel.seconds for kernel in each), each[0]
        share = f"{first.seconds / total:.0%}"
        numbers = [share, str(len(each)), f"{total * 1e6:.1f}"]
        lines.append([str(case), phase, first.name[:40], *numbers])
    head = ["case", "phase", "longest kernel", "of all", "kernels", "µs"]
    return Table("In short", head, lines, texts=3)


def main(_: Sequence[str]) -> int:
    groups = [
        (case, phase)
        for case in chosen()
        for phase in cases.PHASES[: 1 if FLAGS.forward_only else 2]
    ]
    status, found, tables = 0, [], []
    progress.start(len(groups))
    for case, phase in groups:
        progress.show(f"{case}, {phase}")
        ready = ours.prepare(case, phase)
        if FLAGS.traced and not isinstance(ready, str):
            _only_run(ready)
            continue
        reason = ready if isinstance(ready, str) else "the trace names no kernel"
        watch = other_load.Watch(ours.platform())
        each = [] if isinstance(ready, str) else kernels(traced(ready.launch), CALLS * ready.calls)
        load = watch.told()
        progress.step()
        if not each:
            logging.error("%s, %s: %s", case, phase, reason)
            status = 1
            continue
        found.append((case, phase, each))
        tables.append(table(case, phase, each, ready.scratch, load))
    for one in [short(found)] * bool(found) + tables:
        print("\n" + one.text(), flush=True)
    if FLAGS.ncu and not FLAGS.traced:
        print("\n" + counted([f"--case={FLAGS.case}", "--forward_only"]), flush=True)
    return status
