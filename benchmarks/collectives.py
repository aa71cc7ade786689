"""The collectives of a compiled program and the kernels that it launches, both read from its text,
and the time of its collectives, read from a trace.

    bytes that one device receives, for a result of R bytes on n devices:
    all-gather, all-to-all    R (n - 1) / n
    reduce-scatter            R (n - 1)
    all-reduce                2 R (n - 1) / n, as a reduce-scatter and an all-gather
    collective-permute        R

A collective in a loop counts as often as XLA says that the loop runs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Sequence

from benchmarks.profiling import Kernel

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
# By the targets of their custom calls.
KERNELS = {"mosaic_gpu": "mosaic_gpu", "xla.gpu.triton": "triton", "__cudnn": "cudnn"}

# By the names of kernels in a trace: NCCL's on a GPU; on a CPU those of the instructions, or of the
# JAX functions that they come from.
_IN_A_TRACE = re.compile("|".join(("nccl", "ppermute", "psum", *KINDS)).replace("-", "."), re.I)

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*)$")
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"\b([a-z]+)(\d+)(?:[a-z]\w*)?\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program: the bytes of its result on a device, the devices that take part,
    and how often it runs."""

    kind: str
    result: int
    devices: int
    times: int = 1

    @property
    def received(self) -> int:
        """Bytes that one device receives, each time."""
        others = self.devices - 1
        of_kind = {
            "all-gather": self.result * others // self.devices,
            "all-to-all": self.result * others // self.devices,
            "all-reduce": 2 * self.result * others // self.devices,
            "reduce-scatter": self.result * others,
            "collective-permute": self.result,
        }
        return of_kind[self.kind]


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program, from `compiled.as_text()`."""
    inside: dict[str, list[Collective]] = {}
    calls: dict[str, list[tuple[str, int]]] = {}
    entry = name = ""
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            name = found[2]
            entry = name if found[1] else entry
            inside[name], calls[name] = [], []
        elif instruction := _INSTRUCTION.match(line):
            rest = instruction[1]
            if one := _collective(rest):
                inside[name].append(one)
            trips = _TRIPS.search(rest)
            times = int(trips[1]) if trips else 1
            called = _CALLED.findall(rest)
            for branches in _BRANCHES.findall(rest):
                called += re.findall(r"[\w.\-]+", branches)
            calls[name] += [(one, times) for one in called]

    found_all: list[Collective] = []

    def walk(name: str, times: int) -> None:
        for one in inside.get(name, ()):
            found_all.append(dataclasses.replace(one, times=one.times * times))
        for callee, trips in calls.get(name, ()):
            walk(callee, times * trips)

    walk(entry, 1)
    return found_all


def _collective(instruction: str) -> Collective | None:
    """The collective that an instruction starts; None where it starts none."""
    found = re.match(rf"(.*?) ({'|'.join(KINDS)})(-start)?\(", instruction)
    if found is None:
        return None
    types, kind, start = found.groups()
    if start and kind != "all-reduce" and types.startswith("("):
        types = _elements(types)[1]  # operands, results, and what the runtime needs
    return Collective(kind, _bytes(types), _devices(instruction))


def _elements(types: str) -> list[str]:
    """The elements of a tuple's type: "(a, (b, c))" -> ["a", "(b, c)"]."""
    found, depth, last = [], 0, 1
    for index, letter in enumerate(types):
        depth += (letter in "({[") - (letter in ")}]")
        if depth == 0 or depth == 1 and letter == ",":
            found.append(types[last:index].strip())
            last = index + 1
    return found


def _bytes(types: str) -> int:
    """The bytes of all arrays in a type."""
    return sum(
        int(bits) // 8 * math.prod(int(size) for size in shape.split(",") if size)
        for _, bits, shape in _ARRAY.findall(types)
    )


def _devices(instruction: str) -> int:
    """How many devices take part together; 2 for a permute, which has pairs."""
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", instruction):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", instruction):
        return int(found[1])
    if found := re.search(r"replica_groups=@?mesh\w*\[([^\]]*)\][^{]*\{([^}]*)\}", instruction):
        # By the axes of a mesh, of which an axis may be cut: 'time':(2)4 are 4 of its devices. The
        # order of the devices may stand between the two.
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", found[1]))
        parts = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(size or sizes[name]) for name, size in parts)
    if "source_target_pairs=" in instruction:
        return 2
    raise ValueError(f"no known form of replica groups in {instruction}")


def received(found: list[Collective]) -> int:
    """Bytes that one device receives in one run of the program."""
    return sum(one.received * one.times for one in found)


def traced_seconds(kernels: Sequence[Kernel], devices: int) -> float:
    """Seconds that a device spends in collectives in one call, on the mean of all devices. They
    hold what a device waits for the others, and may run beside other kernels."""
    return sum(one.seconds for one in kernels if _IN_A_TRACE.search(one.name)) / devices


def told(found: list[Collective]) -> str:
    """Such as "all-gather of 8.5 MB, 7 collective-permutes of 67.1 MB"."""
    counts: collections.Counter[tuple[str, int]] = collections.Counter()
    for one in found:
        counts[one.kind, one.result] += one.times
    return ", ".join(
        f"{f'{count} ' if count > 1 else ''}{kind}{'s' * (count > 1)} of {size / 1e6:.4g} MB"
        for (kind, size), count in counts.items()
    )


def kernels(text: str) -> dict[str, int]:
    """How many custom calls of each backend's kernels a compiled program has."""
    counts: collections.Counter[str] = collections.Counter()
    for target in re.findall(r'custom_call_target="([^"]*)"', text):
        counts.update(name for part, name in KERNELS.items() if part in target)
    return dict(counts)
