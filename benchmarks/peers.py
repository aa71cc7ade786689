"""PyTorch's scaled_dot_product_attention, each backend by itself, in a process of its own.

JAX and PyTorch do not share a process here: each would hold threads and memory that the other
needs. The driver starts this module as `python -m benchmarks.peers`, writes one JSON object a line
and reads one for each:

    {"ask": "about"}                                   -> versions, device, memory, or why not
    {"ask": "copy", "seconds": s}                      -> {"bandwidth": bytes per second}
    {"ask": "sdpa", "backend": name, "case": {...}, "phase": name, "seconds": s}
                                                       -> a Timing, or {"unavailable": reason}
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import byte_limit, cases, timing

ROOT = Path(__file__).resolve().parents[1]
# Our names for PyTorch's SDPBackend members, the fastest first; they are also the legend's.
BACKENDS = {
    "cuDNN": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "memory-efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
# A call below this is launched in a CUDA graph: above, launching it costs nothing.
SHORT_SECONDS = 1e-3


class PeerError(RuntimeError):
    """The peer process is gone."""


class Peer:
    """The driver's end: `with Peer("cpu") as peer: peer.ask("about")`."""

    def __init__(self, platform: str) -> None:
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers", platform],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: str, **facts: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"ask": question, **facts}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(
                f"the process that runs PyTorch ended with status {self._process.wait()}"
            )
        return json.loads(line)

    def sdpa(
        self, backend: str, case: cases.Case, phase: str, seconds: float
    ) -> timing.Timing | str:
        """The timing, or why there is none."""
        facts = {"backend": backend, "case": dataclasses.asdict(case), "phase": phase}
        reply = self.ask("sdpa", **facts, seconds=seconds)
        return reply.get("unavailable") or timing.Timing(**reply)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _about(torch: Any, platform: str) -> dict[str, Any]:
    if platform == "gpu" and not torch.cuda.is_available():
        return {"unavailable": "JAX has a GPU, but this PyTorch finds none"}
    name = torch.cuda.get_device_name() if platform == "gpu" else ""
    free = torch.cuda.mem_get_info()[0] if platform == "gpu" else 0
    return {"version": torch.__version__, "device": name, "free_bytes": free}


def _sdpa(torch: Any, platform: str, request: dict[str, Any]) -> dict[str, Any]:
    """Times one backend, after a comparison of its results with float64."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case, backward = cases.Case(**request["case"]), request["phase"] != "forward"
    device = torch.device("cuda" if platform == "gpu" else "cpu")
    generator = torch.Generator(device).manual_seed(case.T)
    shape = (case.B, case.H, case.T, case.D)

    def draw() -> dict[str, Any]:
        tensors = {
            name: torch.randn(
                shape, generator=generator, dtype=getattr(torch, case.dtype), device=device
            )
            for name in ("q", "k", "v", "dout")
        }
        for name in ("q", "k", "v"):
            tensors[name].requires_grad_(backward)
        return tensors

    def call(tensors: dict[str, Any]) -> dict[str, Any]:
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
        if not backward:
            return {"out": out}
        gradients = torch.autograd.grad(out, (q, k, v), tensors["dout"])
        return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))

    def one_head(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
        return {
            name: tensor.detach()[-1, -1].double().cpu().numpy() for name, tensor in tensors.items()
        }

    def wait(_: Any) -> None:
        if platform == "gpu":
            torch.cuda.synchronize()

    groups, calls = timing.groups_of_inputs(4 * case.unit, platform)
    sets = [draw() for _ in range(groups * calls)]
    with sdpa_kernel([getattr(SDPBackend, BACKENDS[request["backend"]])]):
        reason = cases.wrong(case, one_head(sets[0]), one_head(call(sets[0])))
        if reason:
            return {"unavailable": reason}
        start = time.perf_counter()
        wait(call(sets[-1]))
        if calls > 1 and time.perf_counter() - start < SHORT_SECONDS:
            replays: list[Callable[[], Any]] = [
                _captured(torch, call, sets[first : first + calls])
                for first in range(0, len(sets), calls)
            ]
        else:
            calls = 1
            replays = [functools.partial(call, tensors) for tensors in sets]
        found = timing.measure(
            lambda index: replays[index % len(replays)](),
            wait,
            platform,
            request["seconds"],
            calls,
        )
    return dataclasses.asdict(found)


def _captured(
    torch: Any, call: Callable[[Any], Any], sets: list[dict[str, Any]]
) -> Callable[[], None]:
    """A call on each set of tensors, one after the other, as one CUDA graph."""
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensors in sets:
            call(tensors)
    return graph.replay


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


def _answers(torch: Any, platform: str, lines: Any) -> Iterator[dict[str, Any]]:
    for line in lines:
        request = json.loads(line)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                if request["ask"] == "about":
                    yield _about(torch, platform)
                elif request["ask"] == "copy":
                    yield {"bandwidth": byte_limit.gpu_bandwidth(torch, request["seconds"])}
                else:
                    yield _sdpa(torch, platform, request)
            except torch.OutOfMemoryError:
                yield {"unavailable": "out of memory"}
            except RuntimeError as error:
                yield {"unavailable": _refusal(error, caught)}
        if platform == "gpu":
            # The other process needs the memory now.
            torch.cuda.empty_cache()


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
