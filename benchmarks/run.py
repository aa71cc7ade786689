"""The library beside its peers at set sizes: linear attention against the byte limit, both ops
against PyTorch's scaled_dot_product_attention, softmax attention also against cuDNN through JAX.

On a GPU the sizes are those of long sequences and of large models; on a CPU small ones, by XLA.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags, logging

import ato_jax
from benchmarks import byte_limit, cases, demo, ours, peers, timing

FLAGS = flags.FLAGS
flags.DEFINE_float("seconds", 1.0, "run: how long to time one call, about", lower_bound=0.01)
flags.DEFINE_enum("op", "both", ["linear", "softmax", "both"], "run: which op to time")

# B, H, T, D of each op, and the dtype.
SIZES: dict[str, dict[str, Any]] = {
    "gpu": {
        "linear": [(8, 8, 65536, 64), (1, 32, 16384, 128)],
        "softmax": [(4, 16, 8192, 128), (4, 32, 8192, 64)],
        "dtype": "bfloat16",
    },
    "cpu": {
        "linear": [(1, 4, 4096, 64), (1, 4, 2048, 128)],
        "softmax": [(1, 4, 1024, 64), (1, 2, 1024, 128)],
        "dtype": "float32",
    },
}
# The backends worth waiting for: the others are slower, and at these sizes need more memory.
PEERS = {"gpu": ("cuDNN", "flash"), "cpu": ("flash", "math")}


def all_cases(op: str, platform: str) -> Iterator[tuple[cases.Case, str]]:
    for B, H, T, D in SIZES[platform][op]:
        for causal in (False, True):
            for phase in cases.PHASES:
                yield cases.Case(op, B, H, T, D, SIZES[platform]["dtype"], causal), phase


def progress(what: str) -> None:
    """One line on stderr, each in place of the last; nothing where that is a file."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what}")
        sys.stderr.flush()


def cell(found: timing.Timing | str, notes: list[str], what: str) -> str:
    """Milliseconds; a dash, and the reason among the notes, where there is no time."""
    if isinstance(found, timing.Timing):
        return demo.milliseconds(found.seconds)
    note = f"{what}: {found}"
    if note not in notes:
        notes.append(note)
    return "-"


def linear(peer: peers.Peer, platform: str, bandwidth: float, notes: list[str]) -> str:
    """Milliseconds, and the share of the byte limit that is reached."""
    names = [demo.sdpa_name(backend) for backend in PEERS[platform]]
    rows = [["linear attention, ms", "", "backend", "ato_jax", *names, "byte limit", "reached"]]
    for case, phase in all_cases("linear", platform):
        progress(f"{case}, {phase}")
        found = ours.measure(case, phase, FLAGS.seconds)
        limit = byte_limit.limit(case, phase, bandwidth)
        reached = f"{limit / found.seconds:.0%}" if isinstance(found, timing.Timing) else "-"
        against = [
            cell(
                peer.sdpa(backend, softmax_of(case), phase, FLAGS.seconds),
                notes,
                f"SDPA {backend}, {case}, {phase}",
            )
            for backend in PEERS[platform]
        ]
        time = cell(found, notes, f"linear attention, {case}, {phase}")
        backend = ran(case, phase)
        rows.append(
            [str(case), phase, backend, time, *against, demo.milliseconds(limit), reached]
        )
    progress("")
    return demo.aligned(rows, texts=3)


def softmax(peer: peers.Peer, platform: str, notes: list[str]) -> str:
    """TFLOP/s on a GPU, GFLOP/s on a CPU, of the products alone."""
    unit, name = (1e12, "TFLOP/s") if platform == "gpu" else (1e9, "GFLOP/s")
    names = [demo.sdpa_name(backend) for backend in PEERS[platform]]
    in_jax = ["JAX cuDNN"] if platform == "gpu" else []
    rows = [[f"softmax attention, {name}", "", "backend", "ato_jax", *names, *in_jax]]
    for case, phase in all_cases("softmax", platform):
        progress(f"{case}, {phase}")
        found = {"ato_jax": ours.measure(case, phase, FLAGS.seconds)}
        for backend in PEERS[platform]:
            found[demo.sdpa_name(backend)] = peer.sdpa(backend, case, phase, FLAGS.seconds)
        for peer_name in in_jax:
            cudnn = functools.partial(
                jax.nn.dot_product_attention, is_causal=case.causal, implementation="cudnn"
            )
            found[peer_name] = ours.measure(case, phase, FLAGS.seconds, cudnn)
        rates = []
        for column, one in found.items():
            text = cell(one, notes, f"{column}, softmax attention, {case}, {phase}")
            if isinstance(one, timing.Timing):
                text = f"{case.operations(phase) / one.seconds / unit:.3g}"
            rates.append(text)
        rows.append([str(case), phase, ran(case, phase), *rates])
    progress("")
    return demo.aligned(rows, texts=3)


def softmax_of(case: cases.Case) -> cases.Case:
    """The same sizes for softmax attention."""
    return cases.Case("softmax", case.B, case.H, case.T, case.D, case.dtype, case.causal)


def ran(case: cases.Case, phase: str) -> str:
    """The backend that ran, or both where forward and backward differ."""
    forward, backward = ours.backends(case)
    if phase == "forward" or forward == backward:
        return forward
    return f"{forward}, {backward}"


def introduced(peer: peers.Peer, platform: str) -> dict[str, Any] | None:
    """Prints what this runs on, and gives it: the device, the versions, a copy's bandwidth.

    None, and an error logged, where PyTorch is missing.
    """
    about = peer.ask("about")
    if "unavailable" in about:
        logging.error("%s: pip install '.[torch]'", about["unavailable"])
        return None
    if platform == "gpu":
        device, bandwidth = about["device"], peer.ask("copy", seconds=0.5)["bandwidth"]
    else:
        device, bandwidth = demo.processor(), byte_limit.cpu_bandwidth()
    facts = {
        "device": device,
        "ato_jax": ato_jax.__version__,
        "jax": jax.__version__,
        "torch": about["version"],
        "bandwidth": bandwidth,
    }
    print(
        f"{device}; JAX {jax.__version__}, PyTorch {about['version']}; "
        f"a copy moves {bandwidth / 1e12:.3f} TB/s",
        flush=True,
    )
    return facts


def main() -> int:
    platform = ours.platform()
    if platform not in SIZES:
        logging.error("The benchmarks run on a CPU or an NVIDIA GPU, JAX computes on %s", platform)
        return 1
    notes: list[str] = []
    with peers.Peer(platform) as peer:
        facts = introduced(peer, platform)
        if facts is None:
            return 1
        print(flush=True)
        if FLAGS.op in ("linear", "both"):
            print(linear(peer, platform, facts["bandwidth"], notes) + "\n", flush=True)
        if FLAGS.op in ("softmax", "both"):
            print(softmax(peer, platform, notes) + "\n", flush=True)
    if notes:
        print("No time:\n" + "\n".join(f"  {note}" for note in notes))
    return 0
