"""The demo: linear attention against PyTorch's scaled_dot_product_attention over the length T.

T doubles until the time or the memory runs out; what is left out is said. Every contender at
every T is measured in the same run, on the same machine, forward and forward + backward.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform as host
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from absl import flags, logging

from benchmarks import byte_limit, cases, noise, other_load, ours, peers, progress, timing

FLAGS = flags.FLAGS
flags.DEFINE_string("output", "benchmarks/output/demo.png", "demo: the picture to write, a .png")
flags.DEFINE_float("budget_seconds", 120, "demo: about how long to measure", lower_bound=1)
flags.DEFINE_integer("max_tokens", 1 << 20, "demo: the largest T", lower_bound=1)
flags.register_validator(
    "output", lambda value: value.endswith(".png"), "--output must be the name of a .png file"
)

# The first T; on a CPU as much as two minutes allow.
SIZES = {
    "gpu": cases.Case("linear", B=8, H=8, T=512, D=64, dtype="bfloat16"),
    "cpu": cases.Case("linear", B=1, H=4, T=512, D=64, dtype="float32"),
}
OURS = "linear attention (ato_jax)"
# Of the time that is left, and of the memory, the most that one measurement may take.
LARGEST_SHARE_OF_TIME = 0.25
LARGEST_SHARE_OF_MEMORY = 0.8
# How a measurement's time and memory grow when T doubles.
GROWTH = {OURS: 2}
QUADRATIC_GROWTH = 4
# How long one measurement takes where a call is short, in shares of the budget and at most.
SHARE_OF_ONE = 1 / 240
LONGEST_SECONDS = 0.5

# times[phase][contender][T]: seconds of one call.
Times = dict[str, dict[str, dict[int, float]]]
# Why a time is doubtful, by phase, contender and T.
Doubts = dict[tuple[str, str, int], str]


def sdpa_name(backend: str) -> str:
    return f"SDPA {backend}"


@dataclasses.dataclass
class Plan:
    """Decides, from what a contender took at the last T, whether it can have the next one."""

    budget: float
    memory: int
    started: float = dataclasses.field(default_factory=time.monotonic)

    def left(self) -> float:
        return self.budget - (time.monotonic() - self.started)

    def reason_against(
        self, contender: str, case: cases.Case, phase: str, last: float | None, overhead: float
    ) -> str | None:
        """Why the contender is left out at this T; `last` is its call's time at half of it."""
        needed = case.memory(phase, quadratic=contender == sdpa_name("math"))
        if needed > LARGEST_SHARE_OF_MEMORY * self.memory:
            return f"would need about {needed / 2**30:.1f} GiB of {self.memory / 2**30:.1f} GiB"
        if last is not None:
            growth = GROWTH.get(contender, QUADRATIC_GROWTH)
            predicted = overhead + timing.FEWEST_CALLS * growth * last
            if predicted > LARGEST_SHARE_OF_TIME * self.left():
                return f"would take about {predicted:.0f} s, with {self.left():.0f} s left"
        return "the time is used up" if self.left() <= 0 else None


class Progress:
    """A bar over the time that the demo may take, on stderr; where that is a file, a line per T."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._live = sys.stderr.isatty()
        self._last_T = 0

    def __call__(self, T: int, what: str) -> None:
        spent = min(1.0, 1 - self._plan.left() / self._plan.budget)
        if self._live:
            told = progress.line(spent, max(0.0, self._plan.left()), f"T = {T}: {what}")
            sys.stderr.write(f"\r\x1b[K{told}")
        elif T != self._last_T:
            sys.stderr.write(f"T = {T} after {spent * self._plan.budget:.0f} s\n")
        self._last_T = T
        sys.stderr.flush()

    def close(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@dataclasses.dataclass
class Measured:
    """All times, what was left out in lines, which times are doubtful, and by how much the first
    case's time differs from the one that was taken at the end.
    """

    times: Times
    left_out: list[str]
    doubts: Doubts
    drift: float | None

    def steady(self) -> Times:
        """Without the doubtful times."""
        return {
            phase: {
                name: {T: one for T, one in times.items() if (phase, name, T) not in self.doubts}
                for name, times in by_name.items()
            }
            for phase, by_name in self.times.items()
        }

    def disturbance(self, load: str) -> str:
        """Why the machine was too busy for any finding; "" where it was not."""
        if load:
            return load
        if self.drift is not None and self.drift > noise.MOST_DRIFT:
            return f"the first case, timed again at the end, differs by {self.drift:.0%}"
        count = sum(len(one) for by_name in self.times.values() for one in by_name.values())
        if len(self.doubts) > noise.MOST_DOUBTFUL * count:
            return f"{len(self.doubts)} of {count} times are not steady"
        return ""


def measure(
    plan: Plan,
    contenders: Mapping[str, Callable[..., timing.Timing | str]],
    first: cases.Case,
    longest: int,
    say: Callable[[int, str], None],
) -> Measured:
    """All times from `first` on, T doubling up to `longest`."""
    doubts: Doubts = {}
    times: Times = {phase: {name: {} for name in contenders} for phase in cases.PHASES}
    left_out: dict[tuple[str, str], tuple[int, str]] = {}
    overheads: dict[tuple[str, str], float] = {}
    seconds = min(LONGEST_SECONDS, SHARE_OF_ONE * plan.budget)
    T = first.T
    while T <= longest and len(left_out) < len(contenders) * len(cases.PHASES):
        case = dataclasses.replace(first, T=T)
        for phase in cases.PHASES:
            for name, contender in contenders.items():
                key = (name, phase)
                if key in left_out:
                    continue
                last = times[phase][name].get(T // 2)
                reason = plan.reason_against(name, case, phase, last, overheads.get(key, 0.0))
                if reason is None:
                    say(T, f"{name}, {phase}")
                    start = time.monotonic()
                    found = contender(case, phase, seconds)
                    if isinstance(found, timing.Timing):
                        times[phase][name][T] = found.seconds
                        if doubt := noise.doubt_of_batches(found.batches):
                            doubts[phase, name, T] = doubt
                        # Compiling, drawing inputs, comparing: about the same at the next T.
                        calls = max(seconds, timing.FEWEST_CALLS * found.seconds)
                        overheads[key] = max(0.0, time.monotonic() - start - calls)
                        continue
                    reason = found
                left_out[key] = (T, reason)
        T *= 2
    forward = cases.PHASES[0]
    drift = None
    if (once := times[forward].get(OURS, {}).get(first.T)) and len(times[forward][OURS]) > 1:
        say(first.T, f"{OURS}, {forward}, once more")
        again = contenders[OURS](first, forward, seconds)
        drift = noise.drift([once, again.seconds]) if isinstance(again, timing.Timing) else None
    # A line for both phases where they say the same.
    grouped: dict[tuple[str, int, str], list[str]] = {}
    for (name, phase), (T, reason) in left_out.items():
        grouped.setdefault((name, T, reason), []).append(phase)
    lines = [
        f"{name}, {' and '.join(phases)}, {f'from T = {T}' if T > first.T else 'at all'}: {reason}"
        for (name, T, reason), phases in grouped.items()
    ]
    return Measured(times, lines, doubts, drift)


def best_of_sdpa(times: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
    """The fastest backend's time at each T."""
    best: dict[int, float] = {}
    for name, by_length in times.items():
        if name != OURS:
            for T, seconds in by_length.items():
                best[T] = min(seconds, best.get(T, math.inf))
    return best


def ratio(value: float) -> str:
    """3.4 or 34 or 340: two digits, no more than a measurement has."""
    return f"{value:.1f}" if value < 9.95 else f"{float(f'{value:.2g}'):.0f}"


def verdict(linear: Mapping[int, float], sdpa: Mapping[int, float]) -> str:
    """What a phase's times say: 'overtakes the best SDPA backend at T = ... and is ...'."""
    lengths = sorted(set(linear) & set(sdpa))
    if not lengths:
        return "could not be compared with SDPA"
    first, last = lengths[0], lengths[-1]
    gains = {T: sdpa[T] / linear[T] for T in lengths}
    # The first length from which on it stays faster.
    ahead = last
    while ahead > first and gains[lengths[lengths.index(ahead) - 1]] > 1:
        ahead = lengths[lengths.index(ahead) - 1]
    if gains[last] <= 1:
        slower = f"{ratio(1 / gains[last])} times the time of the best SDPA backend at T = {last}"
        if max(gains.values()) <= 1:
            return f"overtakes SDPA at no T measured and takes {slower}"
        return f"overtakes SDPA only at shorter T and takes {slower}"
    if len(lengths) == 1:
        return f"is {ratio(gains[last])} times faster than the best SDPA backend at T = {last}"
    if ahead == first:
        return (
            f"is faster than the best SDPA backend at every T measured, {ratio(gains[first])} "
            f"times at T = {first} and {ratio(gains[last])} times at T = {last}"
        )
    return (
        f"overtakes the best SDPA backend at T = {ahead} and is {ratio(gains[last])} times faster "
        f"at T = {last}"
    )


def finding(times: Times) -> str:
    """The one sentence."""
    forward, both = (
        verdict(times[phase].get(OURS, {}), best_of_sdpa(times[phase])) for phase in cases.PHASES
    )
    return f"Forward, linear attention {forward}; forward + backward, it {both}."


def table(
    times: Times, limits: Mapping[str, Mapping[int, float]], doubts: Doubts | None = None
) -> str:
    """Milliseconds by T, a block for each phase; doubtful ones are marked."""

    def cell(phase: str, name: str, T: int) -> str:
        mark = noise.MARK * ((phase, name, T) in (doubts or {}))
        return mark + milliseconds(times[phase][name].get(T))

    blocks = []
    for phase, by_name in times.items():
        columns = [name for name in by_name if by_name[name]]
        lengths = sorted({T for name in columns for T in by_name[name]})
        heads = ["T", *columns, "byte limit"]
        rows = [
            [str(T)]
            + [cell(phase, name, T) for name in columns]
            + [milliseconds(limits[phase].get(T))]
            for T in lengths
        ]
        blocks.append(f"{phase}, ms\n{aligned([heads, *rows])}")
    return "\n\n".join(blocks)


def milliseconds(seconds: float | None) -> str:
    """Four digits; empty where there is no time."""
    if seconds is None:
        return ""
    value = 1e3 * seconds
    decimals = max(0, min(4, 3 - math.floor(math.log10(value)))) if value > 0 else 0
    return f"{value:.{decimals}f}"


def aligned(rows: list[list[str]], texts: int = 0) -> str:
    """Columns of equal width: the first `texts` to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def free_memory() -> int:
    """Bytes that this machine can still give, the limit of a container included."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = 1024 * int(line.split()[1])
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


def processor() -> str:
    """What the CPU calls itself, and how many of its threads are used."""
    name = host.processor() or host.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    threads = byte_limit.threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def main(_: Sequence[str] = ()) -> int:
    try:
        from benchmarks import picture
    except ImportError as error:
        logging.error("The demo draws with Matplotlib: pip install '.[bench]' (%s)", error)
        return 1
    platform = ours.platform()
    if platform not in SIZES:
        logging.error("The demo runs on a CPU or an NVIDIA GPU, JAX computes on %s", platform)
        return 1
    first = SIZES[platform]
    first = dataclasses.replace(first, T=min(first.T, FLAGS.max_tokens))
    with peers.Peer(platform) as peer:
        about = peer.ask("about")
        if "unavailable" in about:
            logging.error("%s: pip install '.[torch]', the demo compares with it", *about.values())
            return 1
        if platform == "gpu":
            device, memory = about["device"], about["free_bytes"]
            bandwidth = peer.ask("copy", seconds=0.5)["bandwidth"]
        else:
            device, memory = f"on a CPU: {processor()}", free_memory()
            bandwidth = byte_limit.cpu_bandwidth()
        plan = Plan(FLAGS.budget_seconds, memory)
        forward, backward = ours.backends(first)
        setting = (
            f"{device}; {first.dtype}, B = {first.B}, H = {first.H}, D = {first.D}, bidirectional"
        )
        print(setting)
        print(
            f"ato_jax's backend: {forward} forward, {backward} backward"
            + (" (no GPU here: its kernels do not run)" if platform == "cpu" else "")
            + f"; PyTorch {about['version']}; a copy moves {bandwidth / 1e9:.0f} GB/s",
            flush=True,
        )

        def sdpa(backend: str) -> Callable[[cases.Case, str, float], timing.Timing | str]:
            return lambda case, phase, seconds: peer.sdpa(
                backend, dataclasses.replace(case, op="softmax"), phase, seconds
            )

        contenders: dict[str, Callable[..., timing.Timing | str]] = {OURS: ours.measure}
        contenders |= {sdpa_name(backend): sdpa(backend) for backend in peers.BACKENDS}
        bar = Progress(plan)
        watch = other_load.Watch(platform)
        found = measure(plan, contenders, first, FLAGS.max_tokens, bar)
        disturbed = found.disturbance(watch.told())
        bar.close()
    times = found.times
    limits = {
        phase: {
            T: byte_limit.limit(dataclasses.replace(first, T=T), phase, bandwidth)
            for T in sorted({T for by_length in times[phase].values() for T in by_length})
        }
        for phase in cases.PHASES
    }
    sentence = noise.busy(disturbed) if disturbed else finding(found.steady())
    print(f"\n{table(times, limits, found.doubts)}\n")
    if found.doubts:
        print(noise.LEGEND + "\n")
    if found.left_out:
        print("Left out:\n" + "\n".join(f"  {line}" for line in found.left_out) + "\n")
    output = Path(FLAGS.output)
    title = "A busy machine: no comparison is made of these times" if disturbed else sentence
    picture.draw(times, limits, title, setting, output)
    print(f"{sentence}\n{output}")
    return 0
