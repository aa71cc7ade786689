"""What context parallelism costs on 1 to 1024 GPUs: bytes, times and memory, from a small model.

`scaling_page` makes the tables of docs/scaling.md from it.

One call of H heads is cut over n GPUs by time. A GPU receives, of B = 1 sequences,

    linear attention    all-gather of states           (n - 1) 4 G F (V + 1)         each way
    delta rule          all-gather of effects          (n - 1) 4 H D (V + D)         forward
                        all-gather of cotangents       (n - 1) 4 H D V               backward
    softmax, gathered   all-gather of k and v          (n - 1) / n  S G (D + V) e    forward
                        reduce-scatter of dk and dv    (n - 1) / n  S G (D + V) e    backward
    softmax, ring       permutes of k and v            (n - 1) / n  S G (D + V) e    forward
                        the same, and of dk and dv     and  S G (D + V) 4            backward

with e bytes an element. `tests/test_parallel.py` holds these numbers against compiled programs.

Times add up a call on one GPU, measured, over n, what the devices of a cut call compute besides
(`Call.again`), and what its collectives take: a start each, the bytes over a link's bandwidth, and
a latency for each of the n - 1 steps. A node has 8 GPUs. Within it all links are NVLink; of what
comes from other nodes each GPU takes an eighth over its own InfiniBand port, and the rest from its
neighbours. In a ring the slowest link is the one between two nodes. Its permutes stand beside the
kernels in the program, but the measured kernels hold every multiprocessor, so that a step takes the
time of both.
"""

from __future__ import annotations

import dataclasses

NODE = 8
COUNTS = (1, 2, 4, 8, 16, 64, 256, 1024)
FLOAT32, BFLOAT16 = 4, 2


@dataclasses.dataclass(frozen=True)
class Link:
    """Bytes a second that a GPU receives, and seconds that a step takes without any."""

    bandwidth: float
    latency: float


# By their data sheets 450 GB/s (fourth generation, 18 links) and 50 GB/s (NDR, 400 Gbit/s); of
# these, assumed, 80%. The latencies are assumed.
NVLINK = Link(0.8 * 450e9, 3e-6)
INFINIBAND = Link(0.8 * 50e9, 8e-6)
# A permute between two GPUs of a node, as the rows of the ring on two and four H200s took it, with
# what the GPUs wait for each other.
PERMUTE = Link(130e9, 3e-6)
# Seconds that a collective takes besides, by the gathers on four H200s: its kernel's start, the
# small kernels around it, and what the GPUs wait for each other.
START = 60e-6
# The memory of one H200 that arrays can use: CUDA and XLA keep the rest.
MEMORY = 130e9


@dataclasses.dataclass(frozen=True)
class Call:
    """A causal call of one sequence; `seconds` are measured at `measured` rows on one GPU,
    forward, and forward and backward."""

    name: str
    H: int = 16
    G: int = 16
    D: int = 128
    V: int = 128
    measured: int = 65536
    seconds: tuple[float, float] = (0.0, 0.0)
    power: int = 1  # of the rows, in the time
    # What all devices of a cut call compute besides, over the time on one GPU, likewise.
    again: tuple[float, float] = (0.0, 0.0)

    def alone(self, rows: int, both: bool) -> float:
        """Seconds on one GPU."""
        return self.seconds[both] * (rows / self.measured) ** self.power

    def shared(self, rows: int, n: int, both: bool) -> float:
        """Seconds on each of n GPUs, without the collectives."""
        besides = self.again[both] if n > 1 else 0.0
        return self.alone(rows, both) * (1 + besides) / n


# The forward pass, and both, of B1 H16 T65536 D128 and of B2 H16 T16384 D128 (half of which is one
# sequence) on one H200: docs/results.md.
LINEAR = Call("linear attention", seconds=(0.4677e-3, 1.528e-3))
SOFTMAX = Call("softmax", measured=16384, seconds=(3.933e-3 / 2, 14.66e-3 / 2), power=2)


# -- bytes ---------------------------------------------------------------------------------------


def linear_bytes(
    n: int, B: int, G: int, features: int, V: int, kept: int = 0, both: bool = False
) -> dict[str, int]:
    """Bytes that a device receives, by collective. `kept` are the numbers of a head's decay that
    go with a state: 0, 1, or as many as features for a decay per channel."""
    state = FLOAT32 * B * G * features * (V + 1)
    return {"all-gather": (n - 1) * (state * (1 + both) + FLOAT32 * B * G * kept)}


def delta_rule_bytes(
    n: int, B: int, H: int, D: int, V: int, both: bool = False
) -> dict[str, int]:
    columns = V + D + (V if both else 0)
    return {"all-gather": (n - 1) * FLOAT32 * B * H * D * columns}


def gathered_bytes(
    n: int, B: int, S: int, G: int, D: int, V: int, itemsize: int, both: bool = False
) -> dict[str, int]:
    """Softmax with `schedule="all_gather"`, of S keys in all."""
    rows = (n - 1) * (S // n) * B * G * (D + V) * itemsize
    return {"all-gather": rows, **({"reduce-scatter": rows} if both else {})}


def ring_bytes(
    n: int, B: int, S: int, G: int, D: int, V: int, itemsize: int, both: bool = False
) -> dict[str, int]:
    """Softmax with `schedule="ring"`, of S keys in all."""
    chunk = (S // n) * B * G * (D + V)
    backward = n * chunk * FLOAT32 if both else 0
    return {"collective-permute": (n - 1) * chunk * itemsize * (1 + both) + backward}


# -- times ---------------------------------------------------------------------------------------


def gather_seconds(n: int, received: float) -> float:
    """An all-gather, or a reduce-scatter, by which a device receives so many bytes."""
    if n == 1:
        return 0.0
    if n <= NODE:
        return START + received / NVLINK.bandwidth + (n - 1) * NVLINK.latency
    nodes = n // NODE
    # An eighth of what other nodes have comes over each GPU's own port.
    outside = received * (n - NODE) / (n - 1) / NODE
    return (
        START
        + max(outside / INFINIBAND.bandwidth, received / NVLINK.bandwidth)
        + (nodes - 1) * INFINIBAND.latency
        + (NODE - 1) * NVLINK.latency
    )


def linear_seconds(T: int, n: int, both: bool = True, call: Call = LINEAR) -> float:
    sent = linear_bytes(n, 1, call.G, call.D, call.V, both=both)["all-gather"]
    calls = 1 + both
    return call.shared(T, n, both) + calls * gather_seconds(n, sent / calls)


def gathered_seconds(T: int, n: int, both: bool = True, call: Call = SOFTMAX) -> float:
    sent = gathered_bytes(n, 1, T, call.G, call.D, call.V, BFLOAT16, both)
    return call.shared(T, n, both) + sum(gather_seconds(n, one) for one in sent.values())


def ring_seconds(T: int, n: int, both: bool = True, call: Call = SOFTMAX) -> float:
    if n == 1:
        return call.alone(T, both)
    sent = ring_bytes(n, 1, T, call.G, call.D, call.V, BFLOAT16, both)["collective-permute"]
    link = PERMUTE if n <= NODE else INFINIBAND
    # k and v travel n - 1 times each way, and their gradients n times.
    steps = (n - 1) * (1 + both) + n * both
    return call.shared(T, n, both) + steps * (START + link.latency) + sent / link.bandwidth


# -- memory --------------------------------------------------------------------------------------


def memory(schedule: str, T: int, n: int) -> float:
    """Bytes on a GPU for a forward and a backward pass of one call in bfloat16.

    q, k, v, out and their gradients are the device's rows; `schedule` is what comes on top.
    """
    call = SOFTMAX
    rows = T // n
    own = 2 * BFLOAT16 * rows * (call.H * (call.D + call.V) + call.G * (call.D + call.V))
    pairs = call.G * (call.D + call.V)
    if schedule == "linear":
        return own + 3 * n * FLOAT32 * call.G * call.D * (call.V + 1)
    if schedule == "all_gather":
        return own + 2 * BFLOAT16 * T * pairs
    # Keys and values of two devices, gradients of two, out and dq in float32.
    return own + rows * (2 * (BFLOAT16 + FLOAT32) * pairs + FLOAT32 * call.H * (call.D + call.V))
