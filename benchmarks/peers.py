"""What runs on PyTorch, in a process of its own: scaled_dot_product_attention, each backend by
itself, the linear attentions of `linear_torch.py` and the rest of `attention_torch.py`.

JAX and PyTorch do not share a process here: each would hold threads and memory that the other
needs. The driver starts this module as `python -m benchmarks.peers`, writes one JSON object a line
and reads one for each:

    {"ask": "about"}                                   -> versions, device, memory, or why not
    {"ask": "copy", "seconds": s}                      -> {"bandwidth": bytes per second}
    {"ask": "matrix", "seconds": s}                    -> {dtype: operations per second, ...}
    {"ask": "sdpa", "backend": name, "case": {...}, "phase": name, "seconds": s}
                                                       -> a Timing, {"batches": [seconds, ...],
                                                          "calls": number}, or
                                                          {"unavailable": reason}
    {"ask": "prepare", "contender": name, "case": {...}, "phase": name}
                                                       -> {"errors": {...}, "scratch": bytes
                                                          beyond inputs and outputs or null,
                                                          "picked": backend or ""}, or why not
    {"ask": "time", "contender": name, "seconds": s}   -> a Timing of what was prepared
    {"ask": "warm", "contender": name, "case": {...}, "phase": name}
                                                       -> {}: what it compiles is in the caches on
                                                          disk now, and nothing was timed
    {"ask": "forget"}                                  -> {}, and what was prepared is freed

Or {"ended": reason}, where nothing more can run in the process. One that ends, so or otherwise, is
started anew; so is one that gives no answer for `LONGEST_SECONDS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import attention_torch, byte_limit, cases, delta_torch, linear_torch, timing

ROOT = Path(__file__).resolve().parents[1]
# Our names for PyTorch's SDPBackend members, the fastest first; they are also the legend's.
BACKENDS = {
    "cuDNN": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "memory-efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
# By the op of the case that is asked for.
CONTENDERS = {
    op: module.CONTENDERS | module.ON_HOST
    for op, module in (("linear", linear_torch), ("softmax", attention_torch))
}
CONTENDERS["softmax"] |= attention_torch.LATENT
CONTENDERS["delta"] = delta_torch.CONTENDERS
# A call below this is launched in a CUDA graph: above, launching it costs nothing.
SHORT_SECONDS = 1e-3

# Rows of a large product by dtype.
MATRICES = {"bfloat16": 8192, "float16": 8192, "float32": 4096}

# For one answer: compiling, searching for block sizes, comparing.
LONGEST_SECONDS = 120

# In one case. Each costs the start of a process, and the preparation of what the last one held.
MOST_ENDS = 3


class PeerError(RuntimeError):
    """What was asked ended the peer process; it says how."""


def kill(process: subprocess.Popen[Any]) -> None:
    """Ends a process with a session of its own, and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Peer:
    """The driver's end: `with Peer("cpu") as peer: peer.ask("about")`.

    A contender that ends the process is told so as its reason. The next one finds a new process,
    where what the old one had prepared is prepared again when it is timed.

    `leads` a session of its own: it can be ended with all that it started.
    """

    COMMAND = (sys.executable, "-m", "benchmarks.peers")

    def __init__(self, platform: str, leads: bool = False, **variables: str) -> None:
        self._platform, self._leads, self._over = platform, leads, False
        # As it is now: libraries that are imported later may set variables for themselves.
        self._environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | variables
        self._case: cases.Case | None = None
        self._ends = 0
        # By contender, in this process and in those that have ended: its case and phase.
        self._prepared: dict[str, tuple[cases.Case, str]] = {}
        self._lost: dict[str, tuple[cases.Case, str]] = {}
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [*self.COMMAND, self._platform],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=self._leads,
            # Ctrl-C is for the driver, which ends this process.
            process_group=None if self._leads else 0,
        )

    def end(self) -> None:
        """Ends the process at once, which leads a session, whoever waits for its answer."""
        self._over = True
        kill(self._process)
        self._end()

    def _end(self) -> int:
        """Lets the process end, or ends it; its status."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            status = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._process.stdout.close()
        return status

    def ask(self, question: str, **facts: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"ask": question, **facts}) + "\n")
            self._process.stdin.flush()
            # An answer is one line, of which the whole follows its beginning.
            ready, _, _ = select.select([self._process.stdout], [], [], LONGEST_SECONDS)
            line = self._process.stdout.readline() if ready else None
        except BrokenPipeError:
            line = ""
        if line is None:
            self._process.kill()
            reply = {"ended": f"no answer in {LONGEST_SECONDS} s"}
        else:
            reply = json.loads(line) if line.endswith("\n") else {"ended": ""}
        if "ended" in reply:
            status = self._end()
            if not self._over:
                self._start()
            self._lost |= self._prepared
            self._prepared.clear()
            raise PeerError(reply["ended"] or f"status {status}")
        return reply

    def _try(self, case: cases.Case, question: str, /, **facts: Any) -> dict[str, Any]:
        """The reply, which is "unavailable" where there is none."""
        if case != self._case:
            self._case, self._ends = case, 0
        if self._ends == MOST_ENDS:
            return {"unavailable": f"PyTorch's process ended {MOST_ENDS} times in this case"}
        try:
            return self.ask(question, **facts)
        except PeerError as error:
            self._ends += 1
            return {"unavailable": f"ended PyTorch's process: {error}"}

    def sdpa(
        self, backend: str, case: cases.Case, phase: str, seconds: float
    ) -> timing.Timing | str:
        """The timing, or why there is none."""
        facts = {"backend": backend, "case": dataclasses.asdict(case), "phase": phase}
        reply = self._try(case, "sdpa", **facts, seconds=seconds)
        return reply.get("unavailable") or timing.Timing(**reply)

    def prepare(self, contender: str, case: cases.Case, phase: str) -> dict[str, Any] | str:
        """What is known of one of `CONTENDERS`, now ready to be timed; or why not."""
        facts = {"contender": contender, "case": dataclasses.asdict(case), "phase": phase}
        reply = self._try(case, "prepare", **facts)
        if "unavailable" in reply:
            return reply["unavailable"]
        self._prepared[contender] = case, phase
        return reply

    def time(self, contender: str, seconds: float) -> timing.Timing | str:
        """The timing of what was prepared, or why there is none."""
        if contender in self._lost:
            again = self.prepare(contender, *self._lost.pop(contender))
            if isinstance(again, str):
                return again
        case, _ = self._prepared[contender]
        reply = self._try(case, "time", contender=contender, seconds=seconds)
        return reply.get("unavailable") or timing.Timing(**reply)

    def warm(self, contender: str, case: cases.Case, phase: str) -> bool:
        """Has what the contender compiles put into the caches on disk; False where that ended the
        process.
        """
        ended = False
        try:
            reason = self.ask(
                "warm", contender=contender, case=dataclasses.asdict(case), phase=phase
            ).get("unavailable", "")
        except PeerError as error:
            reason, ended = str(error), True
        if reason and "is not installed" not in reason:
            print(f"{case}, {phase}: {contender} is not compiled ahead: {reason}", flush=True)
        return not ended

    def forget(self) -> None:
        """Lets go of what was prepared."""
        # A process that ends here has let go of it, too.
        with contextlib.suppress(PeerError):
            self.ask("forget")
        self._prepared.clear()
        self._lost.clear()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, error: type[BaseException] | None = None, *_: object) -> None:
        if error is KeyboardInterrupt:
            self._process.kill()
        self._end()


def _about(torch: Any, platform: str) -> dict[str, Any]:
    if platform == "gpu" and not torch.cuda.is_available():
        return {"unavailable": "JAX has a GPU, but this PyTorch finds none"}
    name = torch.cuda.get_device_name() if platform == "gpu" else ""
    free = torch.cuda.mem_get_info()[0] if platform == "gpu" else 0
    return {
        "version": torch.__version__,
        "device": name,
        "free_bytes": free,
        "cuda": torch.version.cuda or "",
    }


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A contender that was compared: what launches it, and how many calls that is."""

    launches: list[Callable[[], Any]]
    calls: int
    errors: dict[str, float]
    scratch: int | None = None
    picked: str = ""
    counts: list[int] = dataclasses.field(default_factory=list)
    of_host: bool = False


# Gives a set of tensors, and what a call makes of one: out and maybe gradients.
_Draw = Callable[[], dict[str, Any]]
_Call = Callable[[dict[str, Any]], dict[str, Any]]


def _calls(
    torch: Any, platform: str, contender: linear_torch.Contender, case: cases.Case, phase: str
) -> tuple[_Draw, _Call]:
    backward, recorded = phase.endswith("backward"), not phase.endswith("forward")
    device = torch.device("cuda" if platform == "gpu" else "cpu")
    generator = torch.Generator(device).manual_seed(case.T)
    order = (0, 1, 2, 3) if contender.bthd else (0, 2, 1, 3)
    normal = functools.partial(torch.randn, generator=generator, device=device)

    def arranged(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(shape[axis] for axis in order[: len(shape)]) if len(shape) > 1 else shape

    def draw() -> dict[str, Any]:
        shapes = {"q": case.query_shape, "k": case.key_shape, "v": case.key_shape}
        shapes["dout"] = case.query_shape
        if case.V:
            del shapes["v"]
        tensors = {
            name: normal(arranged(shape), dtype=getattr(torch, case.dtype))
            for name, shape in shapes.items()
        }
        if contender.mapped:
            for name in ("q", "k"):
                tensors[name] = torch.nn.functional.elu(tensors[name]) + 1
        if case.decay == "head":
            tensors["decay"] = torch.tensor(cases.head_decays(case.H), device=device)
        elif case.decay:
            tensors["decay"] = -cases.DECAY * normal(arranged(case.gates)).abs()
        if case.op == "delta":
            length = tensors["k"].float().norm(dim=-1, keepdim=True)
            tensors["k"] = (tensors["k"] / length).to(tensors["k"].dtype)
            tensors["beta"] = normal(arranged((case.B, case.T, case.H))).sigmoid()
        for name in ("q", "k", "v", "decay", "beta"):
            # RetNet's decays are constants.
            if name in tensors and tensors[name].ndim > 1:
                tensors[name].requires_grad_(recorded)
        return tensors

    torch.backends.cuda.matmul.allow_tf32 = case.tf32
    attend = contender.make(torch, case)

    def call(tensors: dict[str, Any]) -> dict[str, Any]:
        names = ("q", "k", "v", "decay", "beta")
        inputs = {name: tensors[name] for name in names if name in tensors}
        out = attend(*inputs.values())
        if not backward:
            return {"out": out}
        wanted = {f"d{name}": one for name, one in inputs.items() if one.requires_grad}
        gradients = torch.autograd.grad(out, tuple(wanted.values()), tensors["dout"])
        return {"out": out} | dict(zip(wanted, gradients, strict=True))

    return draw, call


def _prepare(
    torch: Any, platform: str, contender: linear_torch.Contender, case: cases.Case, phase: str
) -> _Prepared | str:
    """Compares the contender's results with float64, and captures short calls in CUDA graphs."""
    device = torch.device("cuda" if platform == "gpu" else "cpu")
    draw, call = _calls(torch, platform, contender, case, phase)

    def compared(tensors: dict[str, Any]) -> dict[str, Any]:
        """The same with a dout that is zero but in the rows that are compared."""
        rows = torch.as_tensor(cases.compared_rows(case), device=device)
        axis = 1 if contender.bthd else 2
        kept = tensors["dout"].index_select(axis, rows)
        return tensors | {"dout": torch.zeros_like(tensors["dout"]).index_copy(axis, rows, kept)}

    def one_group(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
        """The last key head of the last batch entry, with its queries."""
        heads = case.H // case.key_shape[2]
        found = {}
        for name, tensor in tensors.items():
            if tensor.ndim == 1:
                last = tensor[-1].expand(case.T)
            else:
                # [H, T, D], or [H, T] of a decay for each step.
                last = tensor[-1].transpose(0, 1) if contender.bthd else tensor[-1]
                last = last[-heads:] if name in ("q", "dout", "out", "dq") else last[-1]
            found[name] = last.detach().double().cpu().numpy()
        return found

    groups, calls = timing.groups_of_inputs(case.set_bytes, platform)
    sets = [draw() for _ in range(groups * calls)]
    inputs = compared(sets[0])
    found = cases.errors(
        case,
        one_group(inputs),
        one_group(call(inputs)),
        ("PyTorch", contender.bthd, contender.mapped),
        mapped=contender.mapped,
        normalize=contender.normalize,
    )
    if reason := cases.too_large(case, found):
        return reason
    picked = contender.picked(torch, sets[-1], case) if contender.picked else ""
    launches: list[Callable[[], Any]]
    if phase in cases.HOST_PHASES:
        launches = [_bare(torch, contender, case, phase, sets[-1])]
        return _Prepared(launches, 1, found, None, picked, of_host=True)
    start = time.perf_counter()
    scratch = _scratch(torch, platform, lambda: call(sets[-1]))
    if calls > 1 and time.perf_counter() - start < SHORT_SECONDS:
        try:
            launches = [
                _capture(torch, call, sets[first : first + calls])
                for first in range(0, len(sets), calls)
            ]
            return _Prepared(launches, calls, found, scratch, picked)
        except RuntimeError as error:
            # What waits for the card cannot be captured, and is launched as its users do.
            print(f"{case}, {phase}: no CUDA graph: {error}", file=sys.stderr)
    single = [functools.partial(call, tensors) for tensors in sets]
    return _Prepared(single, 1, found, scratch, picked)


def _bare(
    torch: Any,
    contender: linear_torch.Contender,
    case: cases.Case,
    phase: str,
    tensors: dict[str, Any],
) -> Callable[[], Any]:
    """A call with next to nothing around it: where the host is timed, a microsecond counts."""
    attend, dout = contender.make(torch, case), tensors["dout"]
    inputs = tuple(tensors[name] for name in "qkv")
    forward = functools.partial(attend, *inputs)
    if not phase.endswith("backward"):
        return forward
    return lambda: torch.autograd.grad(forward(), inputs, dout)


def _scratch(torch: Any, platform: str, call: Callable[[], dict[str, Any]]) -> int | None:
    """Bytes that a call holds at its peak beyond inputs and outputs; not known on a CPU."""
    if platform == "cpu":
        call()
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = call()
    torch.cuda.synchronize()
    size = sum(tensor.numel() * tensor.element_size() for tensor in outputs.values())
    return max(0, torch.cuda.max_memory_allocated() - before - size)


def _matrix(torch: Any, seconds: float) -> dict[str, float]:
    """Operations per second of a large square product; of float32 in full precision."""
    found = {}
    for dtype, size in MATRICES.items():
        left, right = (
            torch.randn(size, size, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2)
        )
        timed = timing.measure(
            lambda _, left=left, right=right: left @ right,
            functools.partial(_wait, torch, "gpu"),
            "gpu",
            seconds,
        )
        found[dtype] = 2 * size**3 / timed.seconds
    return found


def _wait(torch: Any, platform: str, _: Any) -> None:
    if platform == "gpu":
        torch.cuda.synchronize()


def _time(torch: Any, platform: str, ready: _Prepared, seconds: float) -> dict[str, Any]:
    wait = functools.partial(_wait, torch, platform)
    if ready.of_host:
        return dataclasses.asdict(timing.on_host(ready.launches[0], wait, seconds))
    found = timing.measure(
        lambda index: ready.launches[index % len(ready.launches)](),
        wait,
        platform,
        seconds,
        ready.calls,
        ready.counts,
    )
    return dataclasses.asdict(found)


def _sdpa(torch: Any, platform: str, request: dict[str, Any]) -> dict[str, Any]:
    """Times one backend, after a comparison of its results with float64."""
    contender = linear_torch.sdpa(BACKENDS[request["backend"]])
    ready = _prepare(torch, platform, contender, cases.Case(**request["case"]), request["phase"])
    if isinstance(ready, str):
        return {"unavailable": ready}
    return _time(torch, platform, ready, request["seconds"])


def _requested(request: dict[str, Any]) -> tuple[linear_torch.Contender, cases.Case, str]:
    case = cases.Case(**request["case"])
    contender = CONTENDERS[case.op][request["contender"]]
    if contender.softmax:
        case = dataclasses.replace(case, op="softmax")
    return contender, case, request["phase"]


def _warm(torch: Any, platform: str, request: dict[str, Any]) -> dict[str, Any]:
    linear_torch.search_nothing()
    draw, call = _calls(torch, platform, *_requested(request))
    call(draw())
    return {}


def _prepare_contender(
    torch: Any, platform: str, request: dict[str, Any], prepared: dict[str, _Prepared]
) -> dict[str, Any]:
    ready = _prepare(torch, platform, *_requested(request))
    if isinstance(ready, str):
        return {"unavailable": ready}
    prepared[request["contender"]] = ready
    return {"errors": ready.errors, "scratch": ready.scratch, "picked": ready.picked}


@dataclasses.dataclass(frozen=True)
class _Captured:
    """A CUDA graph, with what it reads and writes: it knows memory by address alone, and memory
    that nothing holds becomes somebody else's, or is unmapped.

    `call` holds what it reads beside the sets of tensors: masks, the bounds of documents.
    """

    graph: Any
    call: Callable[[Any], Any]
    sets: list[dict[str, Any]]
    results: list[Any]

    def __call__(self) -> None:
        self.graph.replay()


def _capture(torch: Any, call: Callable[[Any], Any], sets: list[dict[str, Any]]) -> _Captured:
    """A call on each set of tensors, one after the other, as one CUDA graph."""
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call(tensors) for tensors in sets]
    return _Captured(graph, call, sets, results)


def _refusal(error: Exception, caught: list[warnings.WarningMessage]) -> str:
    """PyTorch's own reason: in warnings where it has one, beside an error that has none."""
    reasons = [" ".join(str(warning.message).split(" (Triggered")[0].split()) for warning in caught]
    # Its warnings also name the backends that were switched off on purpose.
    told = [
        reason
        for reason in reasons
        if "not used because" not in reason and "disabled" not in reason
    ]
    return " ".join(told) or str(error).splitlines()[0].split(". ")[0]


def _answer(
    torch: Any, platform: str, request: dict[str, Any], prepared: dict[str, _Prepared]
) -> dict[str, Any]:
    if request["ask"] == "about":
        return _about(torch, platform)
    if request["ask"] == "copy":
        return {"bandwidth": byte_limit.gpu_bandwidth(torch, request["seconds"])}
    if request["ask"] == "matrix":
        return _matrix(torch, request["seconds"])
    if request["ask"] == "sdpa":
        return _sdpa(torch, platform, request)
    if request["ask"] == "prepare":
        return _prepare_contender(torch, platform, request, prepared)
    if request["ask"] == "warm":
        return _warm(torch, platform, request)
    if request["ask"] == "time":
        return _time(torch, platform, prepared[request["contender"]], request["seconds"])
    prepared.clear()
    return {}


def _answers(torch: Any, platform: str, lines: Any) -> Iterator[dict[str, Any]]:
    prepared: dict[str, _Prepared] = {}
    modules = 0
    linear_torch.hasten_triton()
    for line in lines:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                answer = _answer(torch, platform, json.loads(line), prepared)
            except torch.OutOfMemoryError:
                answer = {"unavailable": "out of memory"}
            except ModuleNotFoundError as error:
                answer = {"unavailable": f"{error.name} is not installed"}
            except RuntimeError as error:
                answer = {"unavailable": _refusal(error, caught)}
            except Exception as error:  # a peer's own: its reason, and on to the next
                answer = {"unavailable": f"{type(error).__name__}: {str(error)[:200]}"}
        if platform == "gpu":
            try:
                # An illegal access is the end of CUDA in this process: it fails from now on.
                torch.cuda.synchronize()
                # The other process needs the memory now. What holds it may be a cycle.
                if not prepared:
                    gc.collect()
                    if len(sys.modules) > modules:
                        # Libraries' own objects, half a million: not to be looked at every time.
                        gc.freeze()
                        modules = len(sys.modules)
                torch.cuda.empty_cache()
            except RuntimeError as error:
                yield {"ended": answer.get("unavailable") or _refusal(error, [])}
                return
        yield answer


def main() -> None:
    [platform] = sys.argv[1:]
    # Nothing that a library prints may come between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    say = functools.partial(print, file=answers, flush=True)
    try:
        import torch
    except ImportError:
        for _ in sys.stdin:
            say(json.dumps({"unavailable": "PyTorch is not installed"}))
        return
    torch.set_num_threads(byte_limit.threads())
    for answer in _answers(torch, platform, sys.stdin):
        say(json.dumps(answer))


if __name__ == "__main__":
    main()
