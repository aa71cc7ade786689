"""A long mixed run of calls from PyTorch, for faults that a short test does not meet.

    python -m tests.soak                        8 minutes, 8 threads, on a GPU if there is one
    python -m tests.soak --minutes=1 --threads=2
    python -m tests.soak --prepare --cache=DIR                  compiles and compares with float64
    python -m tests.soak --cache=DIR --limit=575                the run alone, in 575 s

1. `linear_attention` is timed before and after large calls of `attention` in the same process, with
   the road that `ato_torch.explain` gives each time.
2. The limit of compiled programs is set so low that new lengths make others be dropped. Threads
   make random calls of both ops and of `linear_attention_step`: several dtypes, options and
   lengths, with and without gradients. One of them makes calls of new lengths from time to time, in
   the first half.
   Every other thread has a CUDA stream of its own. A ballast tensor leaves only `--leave_gib` of a
   GPU's memory. Inputs are dropped as soon as a call returns, and their memory is filled with NaN.
3. One thread makes the same calls alone, without new lengths.

Results are compared twice: those of the first call with a float64 computation in PyTorch, by the
budgets of `numerics`, and those of all further calls with the first ones, bit by bit. A program
that was dropped and compiled again may give other bits, since XLA chooses some of its kernels by
their times. Other bits are taken as a call's further result if JAX compiled since the last one and
they are within the budgets, too. The report says how many there were.

`--prepare` compiles all programs but those of new lengths, in several processes, and compares the
first results with float64. The folder DIR gets JAX's persistent cache and a SHA-256 of each first
result. A run with that cache finds its programs there and compares its first results with the
hashes instead. It refuses a DIR of other sources, versions, settings or another card. In parts 2
and 3 the cache is off.

With `--limit` the calls get fewer minutes where the rest would otherwise not fit. A thread that
does not end in time is a fault, and the report is printed without it. A run that is ended by
SIGTERM or Ctrl-C prints what it found so far, marked as cut, and has the exit status 1.

A call is slow if its host time is more than three times the median of its kind in the same part of
the run. Slow calls are all counted. Each has one reason: the first that holds of

    garbage collection  Python's collector ran for at least half of the excess over the median
    compilation         JAX compiled during the call, in any thread (not a reason in part 3)
    device allocation   PyTorch's allocator called cudaMalloc or cudaFree during the call
    noise               the excess is at most the largest one of the control, a small call of
                        PyTorch's own attention, which is timed next to every call
    UNEXPLAINED         none of these

Memory grows if the last quarter of part 2 has a higher maximum than the quarter before, by more
than GROWTH: calls leave nothing behind. The first half may add MIB_OF_PROGRAM for each program that
was compiled: JAX's caches of traced functions keep something of a program that was dropped, until
they are full (on a CPU after 250 lengths; `jax.clear_caches` gives it back). The exit status is 1
for a wrong result, an error, a call that goes through JAX where it went direct before, an
unexplained slow call, or growth of memory. On a CPU, where a call computes on the cores that all
threads share, times are printed and not judged.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import gc
import hashlib
import json
import math
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

STARTED = time.monotonic()  # before the imports that take seconds

import torch  # noqa: E402

import ato_jax  # noqa: E402
import ato_torch  # noqa: E402
from ato_torch import _direct, _programs  # noqa: E402
from tests import numerics  # noqa: E402

# After ato_torch, which sets how much of a GPU's memory JAX takes.
import jax  # noqa: E402  isort: skip
import jaxlib  # noqa: E402  isort: skip
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402  isort: skip
from jax.extend.mlir import ir  # noqa: E402  isort: skip

F = torch.nn.functional
SLOW = 3
# Growth between two quarters of part 2 that is reported: a share, and an amount that is added.
GROWTH = {
    "host MiB": (0.02, 64),
    "PyTorch MiB": (0.02, 64),
    "GPU MiB": (0.02, 64),
    "mappings": (0.02, 200),
}
# On an H100 266 programs added 2.5 each, on a CPU the first 100 lengths 0.8 each.
MIB_OF_PROGRAM = 4
# Heads of the first batch entry alone are compared where float64 has more scores than this.
MOST_SCORES = 1 << 28
# A thread ends after so many errors: a CUDA context that is lost fails for good.
MOST_ERRORS = 20
# Programs that new lengths find place for beside those of the bounded set.
SPARE_PROGRAMS = 16
# How many new lengths there are in a run of any duration, and the largest one.
NEW_LENGTHS, LONGEST_NEW = 84, 400
# Threads that compile programs and compare first results, on a GPU.
COMPILING_THREADS = 16
# Threads that do so where a cache has all programs: more would wait for Python's lock.
CACHED_THREADS = 4
# Processes of `--prepare`. The first one has the large calls, which share the GPU's memory.
PROCESSES = 4
# Seconds of `--limit` that are kept for the last calls of parts 2 and 3, and for the report.
END_SECONDS, REPORT_SECONDS = 20.0, 10.0
# The settings of JAX's cache that keep every program, and nothing of XLA's own. Triton kernels are
# in its key with source locations, which are those of whoever traced a shared function first: so
# these are left out, or programs would be found only if all were traced in the same order.
CACHE_SETTINGS = {
    "jax_traceback_in_locations_limit": 0,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",
}
ROOT = Path(__file__).parent.parent
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
COMPILED = "/jax/core/compile/backend_compile_duration"
DUMP_NAME = "mosaic_gpu.dump_basename"
FOUND, MISSED = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"


@dataclasses.dataclass(frozen=True)
class Kind:
    """One call; `options` are those of the function that are no tensors, `extra` names tensors."""

    op: str
    B: int
    H: int
    G: int
    T: int
    S: int
    D: int
    dtype: torch.dtype
    options: tuple[tuple[str, Any], ...] = ()
    extra: tuple[str, ...] = ()
    gradients: bool = False
    transposed: bool = False
    weight: float = 1.0

    @property
    def asked(self) -> dict[str, Any]:
        return dict(self.options)

    @property
    def causal(self) -> bool:
        return bool(self.asked.get("is_causal") or self.asked.get("causal"))

    def __str__(self) -> str:
        sizes = f"B{self.B} H{self.H} G{self.G} T{self.T} S{self.S} D{self.D} {DTYPES[self.dtype]}"
        words = [f"{name}={value}" for name, value in self.options if name != "enable_gqa"]
        words += [*self.extra, *["gradients"] * self.gradients, *["bthd"] * self.transposed]
        return " ".join([self.op, sizes, *words])


Tensors = dict[str, torch.Tensor]


def draw(kind: Kind, seed: int, device: str) -> Tensors:
    """The tensors of a call by their names, the same ones for a seed; and the cotangent."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = kind.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    B, H, G, T, S, D = kind.B, kind.H, kind.G, kind.T, kind.S, kind.D
    if kind.op == "linear_attention_step":
        found = {"query": normal(B, H, D), "key": normal(B, G, D), "value": normal(B, G, D)}
        state = {"kv": normal(B, G, D, D).float(), "k_sum": normal(B, G, D).float().abs() + D}
        return found | state | {"cotangent": normal(B, H, D)}
    found = {"query": normal(B, H, T, D), "key": normal(B, G, S, D), "value": normal(B, G, S, D)}
    found["cotangent"] = normal(B, H, T, D)
    if kind.transposed:
        found = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in found.items()}
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "head decay": lambda: -normal(G).float().abs() / 8,
        "gate": lambda: -normal(B, G, S).float().abs() / 8,
        "bias": lambda: normal(1, H, T, S),
        "sinks": lambda: normal(H).float(),
        "lengths": lambda: torch.randint(1, S + 1, (B,), generator=generator, device=device).int(),
    }
    return found | {name: makers[name]() for name in kind.extra}


# What the function calls them.
ARGUMENTS = {
    "head decay": "decay",
    "gate": "decay",
    "bias": "attn_mask",
    "sinks": "sinks",
    "lengths": "kv_lengths",
}
# What the budgets call their gradients.
BUDGET_OF = {
    "query": "dq",
    "key": "dk",
    "value": "dv",
    "head decay": "ddecay",
    "gate": "ddecay",
    "bias": "dbias",
    "sinks": "dsinks",
    "kv": "state",
    "k_sum": "state",
}


def differentiable(kind: Kind) -> list[str]:
    return ["query", "key", "value", *(name for name in kind.extra if name != "lengths")]


def call(kind: Kind, tensors: Tensors) -> list[torch.Tensor]:
    """The outputs of the call, and the gradients of all that is differentiable."""
    function = getattr(ato_torch, kind.op)
    leaves = [tensors[name] for name in differentiable(kind)]
    others = {ARGUMENTS[name]: tensors[name] for name in kind.extra}
    asked = kind.asked
    if kind.op == "linear_attention_step":
        with torch.no_grad():
            out, state = function(*leaves, (tensors["kv"], tensors["k_sum"]), **asked)
            return [out, *state]
    if not kind.gradients:
        with torch.no_grad():
            return [function(*leaves[:3], **others, **asked)]
    for leaf in leaves:
        leaf.requires_grad_()
    out = function(*leaves[:3], **others, **asked)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors["cotangent"])]


def names(kind: Kind) -> list[str]:
    """What the results of `call` are, as the budgets name them."""
    if kind.op == "linear_attention_step":
        return ["out", "state", "state"]
    return ["out"] + [BUDGET_OF[name] for name in differentiable(kind)] * kind.gradients


def reference(kind: Kind, tensors: Tensors, batches: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What `call` should give for the first batch entries, one of them and one head at a time."""
    exact = {
        name: x.detach().to(dtype) if x.is_floating_point() else x for name, x in tensors.items()
    }
    if kind.op == "linear_attention_step":
        return _step(kind, exact)
    names = differentiable(kind)
    totals = {name: torch.zeros_like(exact[name]) for name in names}
    out = torch.zeros_like(exact["cotangent"])
    compute = _softmax if kind.op == "attention" else _linear
    group = kind.H // kind.G
    for b in range(batches):
        for h in range(kind.H):
            places = {
                "query": (b, h),
                "key": (b, h // group),
                "value": (b, h // group),
                "bias": (0, h),
                "sinks": (h,),
                "head decay": (h // group,),
                "gate": (b, h // group),
            }
            parts = {name: exact[name][places[name]].clone().requires_grad_() for name in names}
            seen = _visible(kind, exact, b)
            with torch.set_grad_enabled(kind.gradients):
                row = compute(kind, parts, seen)
            out[b, h] = row.detach()
            if kind.gradients:
                found = torch.autograd.grad(row, list(parts.values()), exact["cotangent"][b, h])
                for name, gradient in zip(parts, found, strict=True):
                    totals[name][places[name]] += gradient
    return [out, *(totals[name] for name in names)] if kind.gradients else [out]


def _visible(kind: Kind, tensors: Tensors, b: int) -> torch.Tensor:
    device = tensors["query"].device
    i = torch.arange(kind.T, device=device)[:, None]
    j = torch.arange(kind.S, device=device)
    seen = (j <= i) if kind.causal else (j >= 0).expand(kind.T, kind.S)
    if window := kind.asked.get("window"):
        seen = seen & (j >= i - window[0])
    if "lengths" in tensors:
        seen = seen & (j < tensors["lengths"][b]) & (i < tensors["lengths"][b])
    return seen


def _softmax(kind: Kind, parts: Tensors, seen: torch.Tensor) -> torch.Tensor:
    scores = kind.D**-0.5 * (parts["query"] @ parts["key"].T)  # [T, S]
    if cap := kind.asked.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    if "bias" in parts:
        scores = scores + parts["bias"]
    scores = scores.masked_fill(~seen, -torch.inf)
    if "sinks" in parts:
        scores = torch.cat([scores, parts["sinks"].expand(kind.T, 1)], dim=1)
    largest = scores.detach().amax(1, keepdim=True)
    weights = torch.exp(scores - largest.where(largest.isfinite(), torch.zeros_like(largest)))
    total = weights.sum(1, keepdim=True)
    out = weights[:, : kind.S] @ parts["value"] / total.where(total > 0, torch.ones_like(total))
    return out * seen.any(1, keepdim=True) if "lengths" in kind.extra else out


def _linear(kind: Kind, parts: Tensors, seen: torch.Tensor) -> torch.Tensor:
    weights = (F.elu(parts["query"]) + 1) @ (F.elu(parts["key"]) + 1).T  # [T, S]
    if "head decay" in parts or "gate" in parts:
        steps = parts["gate"] if "gate" in parts else parts["head decay"].expand(kind.S)
        sums = steps.cumsum(0)
        weights = weights * (sums[:, None] - sums).masked_fill(~seen, 0).exp()
    weights = weights.masked_fill(~seen, 0)
    return weights @ parts["value"] / weights.sum(1, keepdim=True).clamp(min=1e-6)


def _step(kind: Kind, exact: Tensors) -> list[torch.Tensor]:
    query, key = (F.elu(exact[name]) + 1 for name in ("query", "key"))
    kv = exact["kv"] + key[..., :, None] * exact["value"][..., None, :]  # [B, G, D, D]
    k_sum = exact["k_sum"] + key
    grouped = query.unflatten(1, (kind.G, kind.H // kind.G))  # [B, G, H / G, D]
    out = grouped @ kv / (grouped @ k_sum[..., None]).clamp(min=1e-6)
    return [out.flatten(1, 2), kv, k_sum]


def over_budget(kind: Kind, tensors: Tensors, found: Sequence[torch.Tensor]) -> list[str]:
    """Which results are further from float64 than the budgets allow."""
    large = kind.B * kind.H * kind.T * kind.S > MOST_SCORES
    batches = 1 if large and not kind.extra else kind.B
    exact = reference(kind, tensors, batches, torch.float64)

    @functools.cache
    def ideal() -> list[torch.Tensor]:
        return reference(kind, tensors, batches, torch.float32)

    wrong = []
    for n, (name, ours, wanted) in enumerate(zip(names(kind), found, exact, strict=True)):
        measure = numerics.measure(
            name,
            _array(ours[:batches]),
            _array(wanted[:batches]),
            dtype=DTYPES[kind.dtype],
            ideal=lambda n=n, ours=ours: _array(ideal()[n][:batches].to(ours.dtype)),
            batched=wanted.ndim > 1,
        )
        if not measure.ok:
            wrong.append(str(measure))
    return wrong


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().double().cpu().numpy()


def same_bits(ours: Sequence[torch.Tensor], first: Sequence[torch.Tensor]) -> bool:
    return all(
        one.shape == other.shape
        and torch.equal(
            one.contiguous().view(INTEGERS[one.element_size()]),
            other.contiguous().view(INTEGERS[other.element_size()]),
        )
        for one, other in zip(ours, first, strict=True)
    )


# Which calls there are


def kinds(device: str) -> list[Kind]:
    """Calls of a bounded set: their programs are compiled once, before they are timed."""
    if device == "cpu":
        small = functools.partial(Kind, B=1, H=2, G=1, T=9, S=9, D=4, dtype=torch.float32)
        causal = (("is_causal", True), ("enable_gqa", True))
        return [
            small("attention", options=causal),
            small("linear_attention", options=(("causal", True),), gradients=True),
            small("linear_attention_step"),
        ]
    bf16, f16, f32 = DTYPES
    gqa = (("enable_gqa", True),)
    causal = (*gqa, ("is_causal", True))
    found = []
    for gradients in (False, True):
        soft = functools.partial(Kind, "attention", gradients=gradients)
        line = functools.partial(Kind, "linear_attention", gradients=gradients)
        found += [
            soft(1, 4, 4, 128, 128, 64, bf16, causal),
            soft(2, 8, 2, 513, 513, 64, bf16, (*causal, ("window", (100, 0)))),
            soft(2, 4, 4, 300, 700, 128, f16, gqa),
            soft(1, 4, 2, 256, 256, 96, f32, (*gqa, ("softcap", 20.0))),
            soft(2, 4, 4, 384, 384, 64, bf16, gqa, ("bias",)),
            soft(2, 4, 4, 640, 640, 64, bf16, causal, ("sinks",), transposed=True),
            soft(3, 4, 4, 512, 512, 128, bf16, gqa, ("lengths",)),
            soft(4, 16, 16, 8192, 8192, 128, bf16, gqa, weight=0.02),
            soft(4, 32, 32, 8192, 8192, 64, bf16, causal, weight=0.02),
            line(8, 8, 8, 1024, 1024, 64, bf16),
            line(1, 4, 4, 128, 128, 64, bf16, (("causal", True),)),
            line(2, 8, 2, 1000, 1000, 64, bf16, (("causal", True),), transposed=True),
            line(2, 4, 4, 333, 333, 128, f16),
            line(1, 4, 2, 512, 512, 32, f32, (("causal", True),)),
            line(2, 4, 4, 2048, 2048, 64, bf16, (("causal", True),), ("head decay",)),
            line(2, 4, 4, 777, 777, 64, bf16, (("causal", True),), ("gate",)),
            line(2, 4, 4, 600, 600, 64, bf16, (), ("lengths",)),
            line(4, 16, 16, 16384, 16384, 64, bf16, (("causal", True),), weight=0.02),
        ]
    step = functools.partial(Kind, "linear_attention_step", T=1, S=1)
    return found + [
        step(B=8, H=8, G=8, D=64, dtype=bf16),
        step(B=2, H=8, G=2, D=128, dtype=f32),
    ]


def new_kind(chosen: random.Random, device: str) -> Kind:
    """A call of a length that was most likely not met before.

    Not of a few rows, whose gradients cancel: `numerics` measures those against their terms.
    """
    T = chosen.randint(8, 24 if device == "cpu" else LONGEST_NEW)
    op, option = chosen.choice([("attention", "is_causal"), ("linear_attention", "causal")])
    dtype = torch.float32 if device == "cpu" else chosen.choice(list(DTYPES))
    D = 4 if device == "cpu" else 64
    return Kind(op, 1, 2, 2, T, T, D, dtype, ((option, chosen.random() < 0.5),), gradients=True)


# What is recorded


@dataclasses.dataclass(slots=True)
class Timed:
    """One call. Hundreds of thousands are kept, in memory that the run itself watches."""

    kind: str
    start: float
    end: float
    allocated: bool

    @property
    def seconds(self) -> float:
        return self.end - self.start


CONTROL = "PyTorch's attention (control)"


class Record:
    """All that a part of the run found; threads add to it."""

    def __init__(self) -> None:
        self.calls: list[Timed] = []
        self.controls: list[Timed] = []
        self.wrong: list[str] = []
        self.errors: list[str] = []
        self.again: list[str] = []  # kinds whose program gave other bits once it was compiled again
        self.out_of_memory = self.checked = self.new_lengths = 0

    def slow(self, pauses: Pauses, compiling: bool) -> dict[str, Any]:
        """For each kind its count, median and worst time, and its slow calls by reason."""
        by_kind = collections.defaultdict(list)
        for each in list(self.calls):
            by_kind[each.kind].append(each)
        controls = list(self.controls)
        usual = statistics.median(one.seconds for one in controls) if controls else 0.0
        noise = max((one.seconds - usual for one in controls), default=0.0)
        by_kind[CONTROL] = controls
        collected, compiled = Intervals(pauses.collections), Intervals(pauses.compilations)
        if not compiling:
            compiled = Intervals([])
        return {
            kind: self._of_kind(timed, collected, compiled, noise)
            for kind, timed in by_kind.items()
            if timed
        }

    def _of_kind(
        self, timed: list[Timed], collected: Intervals, compiled: Intervals, noise: float
    ) -> dict[str, Any]:
        median = statistics.median(one.seconds for one in timed)
        reasons: collections.Counter[str] = collections.Counter()
        for one in timed:
            excess = one.seconds - median
            if one.seconds <= SLOW * median:
                continue
            if collected.overlap(one) >= excess / 2:
                reasons["garbage collection"] += 1
            elif compiled.overlap(one) > 0:
                reasons["compilation"] += 1
            elif one.allocated:
                reasons["device allocation"] += 1
            elif excess <= noise:
                reasons["noise"] += 1
            else:
                reasons["UNEXPLAINED"] += 1
        worst = max(one.seconds for one in timed)
        return {"count": len(timed), "median": median, "worst": worst, "slow": reasons}


class Pauses:
    """When Python's collector and JAX's compiler were at work, in any thread."""

    def __init__(self) -> None:
        self.collections: list[tuple[float, float]] = []
        self.compilations: list[tuple[float, float]] = []
        self.cache: collections.Counter[str] = collections.Counter()
        self._start = 0.0

    def __enter__(self) -> Pauses:
        gc.callbacks.append(self._collected)
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        jax.monitoring.register_event_listener(self._happened)
        return self

    def __exit__(self, *error: Any) -> None:
        gc.callbacks.remove(self._collected)
        jax.monitoring.unregister_event_duration_listener(self._compiled)
        jax.monitoring.unregister_event_listener(self._happened)

    def _collected(self, phase: str, info: Any) -> None:
        if phase == "start":
            self._start = time.perf_counter()
        else:
            self.collections.append((self._start, time.perf_counter()))

    def _compiled(self, event: str, duration: float, **facts: Any) -> None:
        if event == COMPILED:
            end = time.perf_counter()
            self.compilations.append((end - duration, end))

    def _happened(self, event: str, **facts: Any) -> None:
        self.cache[event] += 1


class Intervals:
    """Sorted, so that the few beside a call are found: there are a hundred collections a second."""

    def __init__(self, found: Sequence[tuple[float, float]]) -> None:
        self.sorted = sorted(found)
        self.starts = [start for start, _ in self.sorted]
        self.longest = max((end - start for start, end in self.sorted), default=0.0)

    def overlap(self, one: Timed) -> float:
        first = bisect.bisect_left(self.starts, one.start - self.longest)
        last = bisect.bisect_right(self.starts, one.end)
        return sum(
            max(0.0, min(end, one.end) - max(start, one.start))
            for start, end in self.sorted[first:last]
        )


def memory(device: str) -> dict[str, float]:
    """The memory that the process holds, of the host and of a GPU.

    Compilers run in many threads, and for each thread the C library keeps freed memory for later.
    `malloc_trim` makes it return that memory first.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    found = {
        "host MiB": int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20,
        "mappings": float(len(Path("/proc/self/maps").read_text().splitlines())),
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found["PyTorch MiB"] = torch.cuda.memory_reserved() / 2**20
        found["GPU MiB"] = (total - free) / 2**20
    return found


def growth(samples: Sequence[dict[str, float]], compiled: int) -> list[str]:
    """What has a higher maximum in the last quarter than in the one before, beyond GROWTH.

    And the host's memory if it is above that at first by more than `compiled` programs may add.
    """
    quarter = len(samples) // 4
    if not quarter:
        return []
    found = []
    begin, end = (samples[one]["host MiB"] for one in (0, -1))
    share, amount = GROWTH["host MiB"]
    if end > begin * (1 + share) + amount + MIB_OF_PROGRAM * compiled:
        found.append(f"host MiB grew from {begin:.0f} to {end:.0f} by {compiled} programs")
    for name in samples[0]:
        before = max(one[name] for one in samples[-2 * quarter : -quarter])
        after = max(one[name] for one in samples[-quarter:])
        share, amount = GROWTH[name]
        if after > before * (1 + share) + amount:
            found.append(f"{name} grew from {before:.0f} to {after:.0f}")
    return found


# What --prepare keeps


@contextlib.contextmanager
def cached_programs(folder: Path | None) -> Iterator[None]:
    """Inside, JAX keeps all programs in the folder and looks for them there."""
    if folder is None:
        yield
        return
    settings = {"jax_compilation_cache_dir": str(folder / "programs"), **CACHE_SETTINGS}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX asks its settings once
    try:
        with unnumbered_kernels():
            yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def unnumbered_kernels() -> Iterator[None]:
    """Inside, a Mosaic GPU kernel's module is the same whatever was lowered before it.

    JAX 0.11 counts the kernels of a name, and the number is in the module, for the names of dumps.
    So it is in the key of JAX's cache, which threads that lower in any order would miss.
    """
    from jax.experimental.mosaic.gpu import core

    serialize = core._run_serde_pass

    def unnumbered(module: Any, **options: Any) -> Any:
        module = serialize(module, **options)
        if DUMP_NAME in module.operation.attributes:
            name = ir.StringAttr.get("kernel", context=module.context)
            module.operation.attributes[DUMP_NAME] = name
        return module

    core._run_serde_pass = unnumbered
    try:
        yield
    finally:
        core._run_serde_pass = serialize


def identity(device: str) -> dict[str, str]:
    """All that the programs and the bits of results depend on, by name."""
    sources = hashlib.sha256()
    files = [Path(__file__), Path(numerics.__file__)]
    for package in ("ato_jax", "ato_torch"):
        files += sorted(one for one in (ROOT / package).rglob("*") if one.is_file())
    for file in files:
        if file.suffix != ".pyc":
            sources.update(f"{file.relative_to(ROOT)} {file.stat().st_size}\n".encode())
            sources.update(file.read_bytes())
    card = "cpu " + platform.machine()
    if device == "cuda":
        facts = torch.cuda.get_device_properties(0)
        card = f"{facts.name}, {facts.multi_processor_count} multiprocessors"
    return {
        "sources": sources.hexdigest(),
        "Python": platform.python_version(),
        "JAX": f"{jax.__version__}, jaxlib {jaxlib.__version__}",
        "PyTorch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "settings": f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get(_direct.SWITCH, '')}",
        "card": card,
    }


def digest(found: Sequence[torch.Tensor]) -> str:
    """SHA-256 of shapes, dtypes and bits."""
    total = hashlib.sha256()
    for one in found:
        total.update(f"{tuple(one.shape)} {one.dtype}\n".encode())
        total.update(one.contiguous().view(INTEGERS[one.element_size()]).cpu().numpy().tobytes())
    return total.hexdigest()


@dataclasses.dataclass
class Kept:
    """What `--prepare` leaves beside the programs.

    `results` has the hash of each first result, which was compared with float64; `closed` is how
    many programs went through JAX.
    """

    identity: dict[str, str]
    results: dict[str, str]
    closed: int = 0

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> Kept:
        return cls(**json.loads(file.read_text()))


KEPT = "kept.json"


def read_kept(folder: Path, device: str) -> tuple[Kept | None, list[str]]:
    """The content of the folder's `kept.json`, and the reasons why this run cannot use it."""
    if not (folder / KEPT).exists():
        return None, [f"{folder} has no results: python -m tests.soak --prepare --cache={folder}"]
    kept = Kept.read(folder / KEPT)
    return kept, [
        f"{folder} was prepared with other {name}: {kept.identity.get(name)!r}, here {here!r}"
        for name, here in identity(device).items()
        if kept.identity.get(name) != here
    ]


def share_of(chosen: list[Kind], number: int, count: int) -> list[Kind]:
    """The kinds of one of several processes. The first one has all large ones."""
    if count == 1:
        return chosen
    small = [kind for kind in chosen if kind.weight == 1]
    small.sort(key=lambda kind: not kind.gradients)
    large = [kind for kind in chosen if kind.weight != 1]
    return large if number == 0 else small[number - 1 :: count - 1]


def prepare_share(folder: Path, device: str, number: int, count: int, chosen: list[Kind]) -> int:
    """Compiles and compares one share; writes what is kept of it."""
    pauses = Pauses()
    soak = Soak(device, share_of(chosen, number, count), lambda: len(pauses.compilations))
    with pauses, cached_programs(folder):
        if number == 0:
            with timed_around(device, soak.synchronize):
                large_attention(device)
                soak.synchronize()
        soak.prepare(max(1, COMPILING_THREADS // count) if device == "cuda" else 1)
    faults = soak.record.wrong
    results = {label(pair): digest(found.all[0]) for pair, found in soak.first.items()}
    closed = closed_roads()
    for fault in faults:
        print(f"FAULT: {fault}", flush=True)
    for reason, times in closed.items():
        print(f"  {times} times through JAX: {reason}", flush=True)
    took = time.monotonic() - STARTED
    print(
        f"share {number + 1} of {count}: {len(soak.kinds)} kinds in {took:.0f} s, "
        f"{pauses.cache[FOUND]} programs found in the cache, {pauses.cache[MISSED]} compiled",
        flush=True,
    )
    if not faults:
        Kept(identity(device), results, closed.total()).write(folder / f"share_{number}.json")
    return int(bool(faults))


def prepare(folder: Path, device: str, processes: int, chosen: list[Kind] | None = None) -> int:
    """Fills the folder. What is kept of an earlier time is dropped first, programs apart."""
    (folder / "programs").mkdir(parents=True, exist_ok=True)
    for old in [folder / KEPT, *folder.glob("share_*.json")]:
        old.unlink(missing_ok=True)
    if processes == 1:
        chosen = kinds(device) if chosen is None else chosen
        statuses = [prepare_share(folder, device, 0, 1, chosen)]
    else:
        command = [sys.executable, "-m", "tests.soak", "--prepare", f"--cache={folder}"]
        running = [
            subprocess.Popen([*command, f"--share={number}/{processes}"], cwd=ROOT)
            for number in range(processes)
        ]
        try:
            statuses = [each.wait() for each in running]
        finally:
            for each in running:
                each.terminate()
    shares = [Kept.read(file) for file in sorted(folder.glob("share_*.json"))]
    if any(statuses) or len(shares) != processes:
        print(f"failed: exit statuses {statuses}", flush=True)
        return 1
    results = {name: bits for share in shares for name, bits in share.results.items()}
    Kept(identity(device), results, sum(share.closed for share in shares)).write(folder / KEPT)
    programs = [file.stat().st_size for file in (folder / "programs").iterdir()]
    print(
        f"{len(results)} first results within the budgets, {len(programs)} files of programs, "
        f"{sum(programs) / 2**20:.0f} MiB, in {time.monotonic() - STARTED:.0f} s\nprepared",
        flush=True,
    )
    return 0


# The run


class CutError(BaseException):
    """The run is to end now, with a report. No `Exception`: nothing else catches it."""


def label(pair: tuple[Kind, int]) -> str:
    return f"{pair[0]} seed {pair[1]}"


@dataclasses.dataclass
class Results:
    """What the calls of a pair may give: each one a first result that was compared with float64."""

    all: list[list[torch.Tensor]]
    compilations: int  # that there had been when the last of them came
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def has(self, ours: Sequence[torch.Tensor]) -> bool:
        return any(same_bits(ours, one) for one in self.all)


class Soak:
    def __init__(
        self,
        device: str,
        chosen: list[Kind],
        compilations: Callable[[], int],
        seeds: int = 2,
        kept: Kept | None = None,
    ) -> None:
        self.device, self.kinds, self.kept = device, chosen, kept
        self.compilations = compilations
        self.stopped = threading.Event()
        self.pairs = [
            (kind, seed) for kind in chosen for seed in range(seeds if kind.weight == 1 else 1)
        ]
        self.weights = [kind.weight for kind, _ in self.pairs]
        self.first: dict[tuple[Kind, int], Results] = {}
        self.inputs: dict[tuple[Kind, int], Tensors] = {}
        self.record = Record()
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.control = [torch.randn(1, 4, 128, 64, device=device, dtype=dtype) for _ in range(3)]

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def prepare(self, threads: int) -> None:
        """Compiles all, and compares the first results of each kind once it is: with float64, or
        with what is kept."""
        alone = threading.Lock()  # large calls and their float64 scores share the GPU's memory

        def first_results(kind: Kind) -> list[str]:
            with contextlib.nullcontext() if kind.weight == 1 else alone:
                # One call each, then the ways that follow a first call.
                for _ in range(4):
                    call(kind, draw(kind, 0, self.device))
                return [
                    f"{kind}: {said}"
                    for pair in self.pairs
                    if pair[0] == kind
                    for said in self._first_result(pair)
                ]

        # What takes longest comes first.
        ordered = sorted(self.kinds, key=lambda kind: (kind.weight, not kind.gradients))
        pool = concurrent.futures.ThreadPoolExecutor(threads)
        try:
            for wrong in pool.map(first_results, ordered):
                self.record.wrong += wrong
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        self.record.checked += len(self.pairs)
        self.synchronize()

    def _first_result(self, pair: tuple[Kind, int]) -> list[str]:
        """Keeps what all later calls are compared with; what is over the budgets."""
        kind, seed = pair
        tensors = draw(kind, seed, self.device)
        found = call(kind, {name: x.clone() for name, x in tensors.items()})
        # Large ones are drawn anew, so that they do not take all of the memory.
        if kind.weight == 1:
            self.inputs[pair] = tensors
            first = found
        else:
            first = [x[:1].clone() for x in found]
        self.first[pair] = Results([first], self.compilations())
        if self.kept is None:
            return over_budget(kind, tensors, found)
        if self.kept.results.get(label(pair)) != digest(first):
            return [f"seed {seed}: other bits than those that were compared with float64"]
        return []

    def _compare(self, kind: Kind, tensors: Tensors, found: Sequence[torch.Tensor]) -> None:
        self.record.checked += 1
        self.record.wrong += [f"{kind}: {said}" for said in over_budget(kind, tensors, found)]

    def _equal(self, pair: tuple[Kind, int], ours: Sequence[torch.Tensor]) -> None:
        """Whether a call's results are its first ones, or right ones of a program that was
        compiled since."""
        self.record.checked += 1
        kind, seed = pair
        known = self.first[pair]
        own = ours if kind.weight == 1 else [x[:1] for x in ours]
        if known.has(own):
            return
        with known.lock:
            if known.has(own):  # from a thread that ran the same program
                return
            compilations = self.compilations()
            if compilations == known.compilations:
                self.record.wrong.append(f"{kind}: other bits than the first call gave")
                return
            tensors = self.inputs.get(pair) or draw(kind, seed, self.device)
            try:
                said = over_budget(kind, tensors, ours)
            except torch.OutOfMemoryError:  # a fault: nothing has compared these bits
                said = ["no memory to compare other bits with float64"]
            self.record.wrong += [f"{kind}, compiled again: {one}" for one in said]
            known.all.append([x.clone() for x in own])
            self.synchronize()  # threads on other streams read the copies
            known.compilations = compilations
            self.record.again.append(str(kind))

    def warm(self, threads: int) -> None:
        """A new length compiled in each thread. What compilers take once, such as the arenas of
        their threads, is no growth: with a cache nothing was compiled so far."""
        chosen = random.Random(-1)
        kinds = [new_kind(chosen, self.device) for _ in range(threads)]
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for kind in kinds:
                pool.submit(self._recorded, self._new, kind, chosen.random())
        self.synchronize()

    def _recorded(self, work: Callable[..., None], *given: Any) -> None:
        """Makes calls. What they raise is recorded, and ends nothing."""
        try:
            work(*given)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or "RESOURCE_EX" in str(error):
                self.record.out_of_memory += 1
            else:
                self.record.errors.append(traceback.format_exc())

    def thread(self, number: int, end: float, new_lengths: bool) -> None:
        """Calls of one thread; the first one has the new lengths, spread over half of the time."""
        chosen = random.Random(number)
        begin = time.monotonic()
        half = (begin + end) / 2
        interval = (half - begin) / NEW_LENGTHS
        next_new = begin if new_lengths and number == 0 else math.inf
        own = self.device == "cuda" and number % 2
        with torch.cuda.stream(torch.cuda.Stream()) if own else contextlib.nullcontext():
            while time.monotonic() < end and not self.stopped.is_set():
                if half > time.monotonic() >= next_new:
                    next_new += interval
                    self._recorded(self._new, new_kind(chosen, self.device), chosen.random())
                else:
                    self._recorded(self._one, *chosen.choices(self.pairs, self.weights)[0])
                if len(self.record.errors) > MOST_ERRORS:
                    return

    def _one(self, kind: Kind, seed: int) -> None:
        pair = (kind, seed)
        tensors = self.inputs.get(pair) or draw(kind, seed, self.device)
        tensors = {name: x.detach().clone() for name, x in tensors.items()}
        shapes = [(x.shape, x.dtype) for x in tensors.values() if x.is_floating_point()]
        found = self._timed(self.record.calls, sys.intern(str(kind)), lambda: call(kind, tensors))
        tensors.clear()
        scrap = [torch.full(s, torch.nan, dtype=d, device=self.device) for s, d in shapes]
        del scrap
        self._equal(pair, found)
        self._timed(self.record.controls, CONTROL, self._control)

    def _control(self) -> Any:
        with torch.no_grad():
            return F.scaled_dot_product_attention(*self.control, is_causal=True)

    def _new(self, kind: Kind, seed: float) -> None:
        self.record.new_lengths += 1
        tensors = draw(kind, int(seed * 1e6), self.device)
        found = call(kind, {name: x.clone() for name, x in tensors.items()})
        self._compare(kind, tensors, found)
        self.record.checked += 1
        if not same_bits(call(kind, {name: x.clone() for name, x in tensors.items()}), found):
            self.record.wrong.append(f"{kind}: other bits than the first call gave")

    def _timed(self, into: list[Timed], kind: str, function: Callable[[], Any]) -> Any:
        allocations = self._allocations()
        start = time.perf_counter()
        found = function()
        end = time.perf_counter()
        into.append(Timed(kind, start, end, self._allocations() != allocations))
        return found

    def _allocations(self) -> int:
        """How often PyTorch's allocator went to the driver."""
        if self.device != "cuda":
            return 0
        told = torch.cuda.memory_stats_as_nested_dict()
        return told["num_device_alloc"] + told["num_device_free"] + told["num_alloc_retries"]

    def threads(
        self, count: int, seconds: float, samples: list[dict[str, float]], patience: float | None
    ) -> None:
        """Part 2. `samples` gets what memory there was, over time.

        Threads that do not end within `patience` seconds are left, and an error each.
        """
        end = time.monotonic() + seconds
        running = [
            threading.Thread(target=self.thread, args=(number, end, True), daemon=True)
            for number in range(count)
        ]
        for each in running:
            each.start()
        told = time.monotonic()
        while time.monotonic() < end:
            time.sleep(min(2.0, seconds / 16))
            samples.append(memory(self.device))
            if time.monotonic() > told + 60:
                told += 60
                print(f"  {len(self.record.calls)} calls; {shown(samples[-1])}", flush=True)
        for each in running:
            left = None if patience is None else max(0.0, end + patience - time.monotonic())
            each.join(left)
        stuck = sum(each.is_alive() for each in running)
        if stuck:
            self.stopped.set()
            self.record.errors.append(f"{stuck} threads did not end within {patience:.0f} s")
        else:
            self.synchronize()

    def alone(self, seconds: float) -> None:
        """Part 3."""
        self.thread(0, time.monotonic() + seconds, new_lengths=False)


def closed_roads() -> collections.Counter[str]:
    """Why programs of this process go through JAX or wait for memory, and how many of each."""
    found: collections.Counter[str] = collections.Counter()
    for each in gc.get_objects():
        if type(each) is _programs.Function:
            for plan in list(each.plans.values()):
                if isinstance(plan, _direct.ClosedError):
                    found[f"{each.traced}: {plan}"] += 1
            if each.short_of_memory:
                found[f"{each.traced}: short of memory"] += 1
    return found


def shown(sample: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in sample.items())


# Part 1


def host_microseconds(function: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    """The median over rounds of what a call takes of the host, few calls a round: none waits."""
    rounds = []
    for _ in range(21):
        synchronize()
        start = time.perf_counter()
        for _ in range(20):
            function()
        rounds.append((time.perf_counter() - start) / 20)
    return statistics.median(rounds[1:]) * 1e6


@contextlib.contextmanager
def timed_around(device: str, synchronize: Callable[[], None]) -> Iterator[list[str]]:
    """Times `linear_attention` before and after what is done inside, and prints both."""
    sizes = (8, 8, 1024, 64) if device == "cuda" else (1, 2, 16, 4)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tensors = [torch.randn(sizes, device=device, dtype=dtype) for _ in range(3)]
    changed: list[str] = []
    found = []
    for when in ("before", "after"):
        function = functools.partial(ato_torch.linear_attention, *tensors)
        for _ in range(5):
            function()
        taken = host_microseconds(function, synchronize)
        road = ato_torch.explain(ato_torch.linear_attention, *tensors).forward
        print(f"  {when}: {taken:.1f} us of host time a call, road: {road}", flush=True)
        found.append((taken, str(road)))
        if when == "before":
            yield changed
    (first, road), (second, other) = found
    if road != other:
        changed.append(f"the road of linear_attention changed from {road} to {other}")
    if second > SLOW * first and device == "cuda":
        changed.append(f"linear_attention went from {first:.1f} to {second:.1f} us")


def large_attention(device: str) -> None:
    shapes = ((4, 16, 8192, 128), (4, 32, 8192, 64), (8, 8, 1024, 64))
    for shape in shapes if device == "cuda" else ((1, 2, 16, 4),):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        leaves = [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]
        for is_causal in (False, True):
            for gradients in (False, True):
                given = [leaf.detach().requires_grad_(gradients) for leaf in leaves]
                for _ in range(10):
                    out = ato_torch.attention(*given, is_causal=is_causal)
                    if gradients:
                        torch.autograd.grad(out, given, torch.ones_like(out))


def ballast(leave_gib: float) -> torch.Tensor:
    """A tensor that leaves so much of the GPU's memory to all the rest."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(max(0, int(free - leave_gib * 2**30)), dtype=torch.uint8, device="cuda")


@contextlib.contextmanager
def few_programs(limit: int) -> Iterator[None]:
    ato_jax.program_limit(limit)
    try:
        yield
    finally:
        ato_jax.program_limit(None)


def report(title: str, found: dict[str, Any]) -> int:
    """Prints a part's times; how many slow calls have no explanation."""
    print(f"\n{title}: host time of a call by kind, us")
    print(f"  {'calls':>7} {'median':>8} {'worst':>9} {'slow':>5}  kind; reasons of the slow ones")
    unexplained = 0
    for kind, facts in sorted(found.items()):
        reasons = ", ".join(f"{name} {count}" for name, count in facts["slow"].most_common())
        print(
            f"  {facts['count']:7} {facts['median'] * 1e6:8.1f} {facts['worst'] * 1e6:9.1f} "
            f"{sum(facts['slow'].values()):5}  {kind}" + f"; {reasons}" * bool(reasons)
        )
        # The control is not ours.
        unexplained += facts["slow"]["UNEXPLAINED"] if kind != CONTROL else 0
    return unexplained


class Report:
    """The figures and faults of a run so far. `finish` prints them, also if the run was cut."""

    def __init__(self, device: str, started: float) -> None:
        self.device, self.started = device, started
        self.part = "ahead of part 1"
        self.faults: list[str] = []
        self.records: list[Record] = []
        self.samples: list[dict[str, float]] = []
        self.unexplained = self.compiled = 0
        self.closed: collections.Counter[str] = collections.Counter()
        # A part that runs: its title, its record, and whether compilations are a reason there.
        self.open: tuple[str, Record, bool] | None = None

    def begin(self, title: str, record: Record, compiling: bool) -> None:
        self.open = title, record, compiling
        self.records.append(record)

    def end(self, pauses: Pauses) -> None:
        """Prints the times of the part that runs."""
        if self.open is not None:
            title, record, compiling = self.open
            self.open = None
            self.unexplained += report(title, record.slow(pauses, compiling))

    def finish(self, cut: str | None) -> int:
        faults = list(self.faults)
        for record in self.records:
            faults += record.wrong + record.errors
        if self.unexplained and self.device == "cuda":
            faults.append(f"{self.unexplained} slow calls without an explanation")
        if self.samples:
            first, last = self.samples[0], self.samples[-1]
            print(f"\nmemory at first: {shown(first)}\nmemory at last:  {shown(last)}")
        total = {
            name: sum(getattr(record, name) for record in self.records)
            for name in ("checked", "new_lengths", "out_of_memory")
        }
        print(
            f"{sum(len(record.calls) for record in self.records)} calls, "
            f"{total['checked']} results compared, {total['new_lengths']} new lengths, "
            f"{self.compiled} compilations in part 2, "
            f"{total['out_of_memory']} calls out of memory"
        )
        again = [kind for record in self.records for kind in record.again]
        print(f"{len(again)} results with other bits by a program that was compiled again")
        for kind, count in collections.Counter(again).items():
            print(f"  {count} times: {kind}")
        print(f"{self.closed.total()} programs go through JAX")
        for reason, count in self.closed.items():
            print(f"  {count} times: {reason}")
        for fault, count in collections.Counter(faults).most_common(40):
            print(f"FAULT ({count} times): {fault}")
        took = time.monotonic() - self.started
        if cut is not None:
            print(f"CUT {cut}, after {took:.0f} s: {len(faults)} faults so far", flush=True)
            return 1
        ended = "passed" if not faults else f"failed: {len(faults)} faults"
        print(f"{took:.0f} s\n{ended}", flush=True)
        return int(bool(faults))


def run(
    minutes: float,
    threads: int,
    device: str,
    leave_gib: float,
    chosen: list[Kind] | None = None,
    cache: Path | None = None,
    limit: float = math.inf,
    started: float | None = None,
) -> int:
    """The whole run; its exit status. `limit` counts from `started`, which is now if not given."""
    kept, reasons = (None, []) if cache is None else read_kept(cache, device)
    for reason in reasons:
        print(f"FAULT: {reason}", flush=True)
    if reasons:
        return 1
    made = Report(device, time.monotonic() if started is None else started)
    pauses = Pauses()
    soak = Soak(
        device,
        kinds(device) if chosen is None else chosen,
        lambda: len(pauses.compilations),
        kept=kept,
    )
    with pauses, few_programs(len(soak.kinds) + SPARE_PROGRAMS):
        try:
            _parts(soak, made, pauses, minutes, threads, leave_gib, cache, limit)
        except (CutError, KeyboardInterrupt) as cut:
            soak.stopped.set()
            print(f"\nCUT in {made.part}: what was found so far", flush=True)
            made.end(pauses)
            return made.finish(cut=f"in {made.part} by {cut or type(cut).__name__}")
    return made.finish(cut=None)


def _parts(
    soak: Soak,
    made: Report,
    pauses: Pauses,
    minutes: float,
    threads: int,
    leave_gib: float,
    cache: Path | None,
    limit: float,
) -> None:
    device = soak.device
    ending = made.started + limit - REPORT_SECONDS
    with cached_programs(cache):
        made.part = "part 1"
        print("1. linear_attention around large calls of attention", flush=True)
        with timed_around(device, soak.synchronize) as changed:
            large_attention(device)
            soak.synchronize()
        made.faults += changed
        made.part = "the first calls"
        start = time.monotonic()
        made.records.append(soak.record)
        if cache is not None:
            count = min(threads, CACHED_THREADS)
        else:
            count = max(threads, COMPILING_THREADS) if device == "cuda" else threads
        soak.prepare(count)
    made.closed = closed = closed_roads()
    if soak.kept is None:
        beside = "float64"
    else:
        beside = "what is kept"
        if closed.total() > soak.kept.closed:
            made.faults.append(
                f"{closed.total()} programs go through JAX, where {soak.kept.closed} did when they "
                "were compiled"
            )
    print(
        f"compiled and compared with {beside} in {time.monotonic() - start:.0f} s, "
        f"{pauses.cache[FOUND]} programs found in the cache; "
        f"{time.monotonic() - made.started:.0f} s since the start",
        flush=True,
    )
    held = ballast(leave_gib) if device == "cuda" else None
    start = time.monotonic()
    soak.warm(threads)
    print(f"{threads} new lengths compiled in {time.monotonic() - start:.0f} s", flush=True)
    # Ahead of this line is all that takes time from the calls.
    seconds = min(60 * minutes, ending - END_SECONDS - time.monotonic())
    if seconds < 60 * minutes:
        print(f"the limit leaves {seconds:.0f} s of calls in place of {60 * minutes:.0f}")
    if seconds <= 0:
        made.faults.append("the limit left no time for calls")
        return
    made.part = "part 2"
    print(f"2. {threads} threads; at first {shown(memory(device))}", flush=True)
    with timed_around(device, soak.synchronize) as changed:
        soak.record = Record()
        made.begin(f"{threads} threads", soak.record, compiling=True)
        before = len(pauses.compilations)
        patience = None if limit == math.inf else END_SECONDS
        soak.threads(threads, 7 / 8 * seconds, made.samples, patience)
        made.compiled = len(pauses.compilations) - before
        if soak.stopped.is_set():  # further calls may wait for the thread that does not end
            raise CutError("a thread that does not end")
        made.end(pauses)
        made.part = "part 3"
        soak.record = Record()
        made.begin("alone", soak.record, compiling=False)
        soak.alone(min(seconds / 8, ending - time.monotonic()))
        soak.synchronize()
    made.faults += changed + growth(made.samples, made.compiled)
    made.closed = closed_roads()
    made.faults += list((made.closed - closed).elements())
    made.end(pauses)
    del held


def _cut(*signal_and_frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise CutError("SIGTERM")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A long mixed run of calls from PyTorch.")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--leave_gib", type=float, default=6.0, help="GPU memory without ballast")
    parser.add_argument("--cache", type=Path, help="the folder of programs and first results")
    parser.add_argument("--prepare", action="store_true", help="fill that folder, and end")
    parser.add_argument("--processes", type=int, help="of --prepare")
    parser.add_argument("--share", help="NUMBER/COUNT: what one of those processes prepares")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds, of all there is")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cache = None if given.cache is None else given.cache.absolute()
    if not given.prepare:
        return run(
            given.minutes,
            given.threads,
            device,
            given.leave_gib,
            cache=cache,
            limit=given.limit,
            started=STARTED,
        )
    if cache is None:
        parser.error("--prepare needs --cache=DIR")
    try:
        if given.share is not None:
            number, count = map(int, given.share.split("/"))
            return prepare_share(cache, device, number, count, kinds(device))
        usual = PROCESSES if device == "cuda" else 1
        return prepare(cache, device, given.processes or usual)
    except (CutError, KeyboardInterrupt):
        print(f"CUT after {time.monotonic() - STARTED:.0f} s: programs are kept", flush=True)
        return 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _cut)
    status = main()
    if threading.active_count() > 1:
        # Python would wait for threads that do not end, or that a cut left at work.
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
