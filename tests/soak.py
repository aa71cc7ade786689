"""A long mixed run of calls from PyTorch, for faults that a short test does not meet.

    python -m tests.soak                        8 minutes, 8 threads, on a GPU if there is one
    python -m tests.soak --minutes=1 --threads=2

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
budgets of `numerics`, and those of all further calls with the first ones, bit by bit.

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
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import math
import random
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import ato_jax
import ato_torch
from ato_torch import _direct, _programs
from tests import numerics

import jax  # isort: skip  (after ato_torch, which sets how much of a GPU's memory JAX takes)

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
# That compile and compare at first, on a GPU.
COMPILING_THREADS = 16
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
COMPILED = "/jax/core/compile/backend_compile_duration"


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
        self.out_of_memory = self.checked = self.new_lengths = 0

    def slow(self, pauses: Pauses, compiling: bool) -> dict[str, Any]:
        """For each kind its count, median and worst time, and its slow calls by reason."""
        by_kind = collections.defaultdict(list)
        for each in self.calls:
            by_kind[each.kind].append(each)
        usual = statistics.median(one.seconds for one in self.controls) if self.controls else 0.0
        noise = max((one.seconds - usual for one in self.controls), default=0.0)
        by_kind[CONTROL] = self.controls
        return {
            kind: self._of_kind(timed, pauses, compiling, noise)
            for kind, timed in by_kind.items()
            if timed
        }

    def _of_kind(
        self, timed: list[Timed], pauses: Pauses, compiling: bool, noise: float
    ) -> dict[str, Any]:
        median = statistics.median(one.seconds for one in timed)
        reasons: collections.Counter[str] = collections.Counter()
        for one in timed:
            excess = one.seconds - median
            if one.seconds <= SLOW * median:
                continue
            if pauses.overlap(pauses.collections, one) >= excess / 2:
                reasons["garbage collection"] += 1
            elif compiling and pauses.overlap(pauses.compilations, one) > 0:
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
        self._start = 0.0

    def __enter__(self) -> Pauses:
        gc.callbacks.append(self._collected)
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        return self

    def __exit__(self, *error: Any) -> None:
        gc.callbacks.remove(self._collected)
        jax.monitoring.unregister_event_duration_listener(self._compiled)

    def _collected(self, phase: str, info: Any) -> None:
        if phase == "start":
            self._start = time.perf_counter()
        else:
            self.collections.append((self._start, time.perf_counter()))

    def _compiled(self, event: str, duration: float, **facts: Any) -> None:
        if event == COMPILED:
            end = time.perf_counter()
            self.compilations.append((end - duration, end))

    @staticmethod
    def overlap(pauses: list[tuple[float, float]], one: Timed) -> float:
        return sum(max(0.0, min(end, one.end) - max(start, one.start)) for start, end in pauses)


def memory(device: str) -> dict[str, float]:
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


# The run


class Soak:
    def __init__(self, device: str, chosen: list[Kind], seeds: int = 2) -> None:
        self.device, self.kinds = device, chosen
        self.pairs = [
            (kind, seed) for kind in chosen for seed in range(seeds if kind.weight == 1 else 1)
        ]
        self.weights = [kind.weight for kind, _ in self.pairs]
        self.first: dict[tuple[Kind, int], list[torch.Tensor]] = {}
        self.inputs: dict[tuple[Kind, int], Tensors] = {}
        self.record = Record()
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.control = [torch.randn(1, 4, 128, 64, device=device, dtype=dtype) for _ in range(3)]

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def prepare(self, threads: int) -> None:
        """Compiles all, and compares the first results of each kind with float64 once it is."""
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
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for wrong in pool.map(first_results, ordered):
                self.record.wrong += wrong
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
            self.first[pair] = found
        else:
            self.first[pair] = [x[:1].clone() for x in found]
        return over_budget(kind, tensors, found)

    def _compare(self, kind: Kind, tensors: Tensors, found: Sequence[torch.Tensor]) -> None:
        self.record.checked += 1
        self.record.wrong += [f"{kind}: {said}" for said in over_budget(kind, tensors, found)]

    def _equal(self, kind: Kind, ours: Sequence[Any], first: Sequence[torch.Tensor]) -> None:
        self.record.checked += 1
        if kind.weight != 1:
            ours = [x[: len(y)] for x, y in zip(ours, first, strict=True)]
        if not same_bits(ours, first):
            self.record.wrong.append(f"{kind}: other bits than the first call gave")

    def thread(self, number: int, end: float, new_lengths: bool) -> None:
        """Calls of one thread; the first one has the new lengths, spread over half of the time."""
        chosen = random.Random(number)
        begin = time.monotonic()
        half = (begin + end) / 2
        interval = (half - begin) / NEW_LENGTHS
        next_new = begin if new_lengths and number == 0 else math.inf
        own = self.device == "cuda" and number % 2
        with torch.cuda.stream(torch.cuda.Stream()) if own else contextlib.nullcontext():
            while time.monotonic() < end:
                try:
                    if half > time.monotonic() >= next_new:
                        next_new += interval
                        self._new(new_kind(chosen, self.device), chosen.random())
                    else:
                        self._one(*chosen.choices(self.pairs, self.weights)[0])
                except Exception as error:
                    if isinstance(error, torch.OutOfMemoryError) or "RESOURCE_EX" in str(error):
                        self.record.out_of_memory += 1
                    else:
                        self.record.errors.append(traceback.format_exc())
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
        self._equal(kind, found, self.first[pair])
        self._timed(self.record.controls, CONTROL, self._control)

    def _control(self) -> Any:
        with torch.no_grad():
            return F.scaled_dot_product_attention(*self.control, is_causal=True)

    def _new(self, kind: Kind, seed: float) -> None:
        self.record.new_lengths += 1
        tensors = draw(kind, int(seed * 1e6), self.device)
        found = call(kind, {name: x.clone() for name, x in tensors.items()})
        self._compare(kind, tensors, found)
        self._equal(kind, call(kind, {name: x.clone() for name, x in tensors.items()}), found)

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

    def threads(self, count: int, seconds: float) -> list[dict[str, float]]:
        """Part 2; what memory there was, over time."""
        end = time.monotonic() + seconds
        running = [
            threading.Thread(target=self.thread, args=(number, end, True), daemon=True)
            for number in range(count)
        ]
        for each in running:
            each.start()
        samples, told = [], time.monotonic()
        while time.monotonic() < end:
            time.sleep(min(2.0, seconds / 16))
            samples.append(memory(self.device))
            if time.monotonic() > told + 60:
                told += 60
                print(f"  {len(self.record.calls)} calls; {shown(samples[-1])}", flush=True)
        for each in running:
            each.join()
        self.synchronize()
        return samples

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


def run(
    minutes: float, threads: int, device: str, leave_gib: float, chosen: list[Kind] | None = None
) -> int:
    seconds, faults = 60 * minutes, []
    soak = Soak(device, kinds(device) if chosen is None else chosen)
    with Pauses() as pauses, few_programs(len(soak.kinds) + SPARE_PROGRAMS):
        print("1. linear_attention around large calls of attention", flush=True)
        with timed_around(device, soak.synchronize) as changed:
            large_attention(device)
            soak.synchronize()
        start = time.monotonic()
        soak.prepare(max(threads, COMPILING_THREADS) if device == "cuda" else threads)
        closed = closed_roads()
        print(f"compiled and compared with float64 in {time.monotonic() - start:.0f} s", flush=True)
        held = ballast(leave_gib) if device == "cuda" else None
        print(f"2. {threads} threads; at first {shown(memory(device))}", flush=True)
        with timed_around(device, soak.synchronize) as changed_later:
            before = len(pauses.compilations)
            samples = soak.threads(threads, 7 / 8 * seconds)
            compiled = len(pauses.compilations) - before
            together, soak.record = soak.record, Record()
            unexplained = report(f"{threads} threads", together.slow(pauses, compiling=True))
            soak.alone(seconds / 8)
            soak.synchronize()
        closed_later = closed_roads()
        unexplained += report("alone", soak.record.slow(pauses, compiling=False))
        del held
    for record in (together, soak.record):
        faults += record.wrong + record.errors
    faults += changed + changed_later + growth(samples, compiled)
    faults += list((closed_later - closed).elements())
    if unexplained and device == "cuda":
        faults.append(f"{unexplained} slow calls without an explanation")
    calls = len(together.calls) + len(soak.record.calls)
    print(f"\nmemory at first: {shown(samples[0])}\nmemory at last:  {shown(samples[-1])}")
    print(
        f"{calls} calls, {together.checked + soak.record.checked} results compared, "
        f"{together.new_lengths} new lengths, {compiled} compilations in part 2, "
        f"{together.out_of_memory + soak.record.out_of_memory} calls out of memory"
    )
    print(f"{closed_later.total()} programs go through JAX")
    for reason, count in closed_later.items():
        print(f"  {count} times: {reason}")
    for fault, count in collections.Counter(faults).most_common(40):
        print(f"FAULT ({count} times): {fault}")
    print("passed" if not faults else f"failed: {len(faults)} faults", flush=True)
    return int(bool(faults))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A long mixed run of calls from PyTorch.")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--leave_gib", type=float, default=6.0, help="GPU memory without ballast")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return run(given.minutes, given.threads, device, given.leave_gib)


if __name__ == "__main__":
    sys.exit(main())
