"""What is measured, and what is right: sizes, operations, traffic, memory, exact results.

    u              = B * T * H * D * itemsize, one tensor; that of a key is B * S * G * D * itemsize
    traffic        = 4u forward (q, k, v in, out), 7u backward (q, k, v, dout in, dq, dk, dv out)
    products       = softmax: 4 * H * D * pairs forward, 2.5 times as many backward, where the
                     scores are computed again
                     (of queries beside a cache 2 * H * (D + V) * pairs)
                     linear: 4 * B * T * H * D * D forward, k^T v into the state and q times the
                     state, twice as many backward; whether causal or not, as step by step
                     delta rule: 6 * B * T * H * D * D forward, as there k^T times the state, too
    pairs          = B * T * S, half of it if causal; those that are visible under a window, between
                     documents or in a sequence as long as it is

A result passes when its relative RMS error against float64, on the same rounded inputs, is at
most `TOLERANCES`: far above rounding, far below a mistake. The budgets that the library holds
itself to are the tests' matter; these serve every peer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

import numpy as np

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
TOLERANCES = {"bfloat16": 3e-2, "float16": 1e-2, "float32": 1e-3}
PHASES = ("forward", "forward + backward")
# What is timed of these is the host: the forward pass alone, the same with what a backward needs
# recorded, and both passes.
HOST_PHASES = ("on the host, forward", "on the host, recorded", "on the host, forward + backward")
# Up to here all rows are compared; beyond, a sample, outside of which the compared call's dout is
# zero: so dk and dv are sums over the sample and are compared for every key.
WHOLE = 1024
SAMPLE = 16
# Kernels skip what nothing sees in blocks of about so many rows and keys.
BLOCK = 128
# The exponential of what is further below 0 is 0 in float64.
UNDERFLOW = 746.0
# Logarithms of gates are drawn as the negative half of a normal distribution of this width.
DECAY = 0.1
# Float32 whose factors are rounded to TF32 is told from a mistake by this.
TF32_TOLERANCE = 1e-2
# Steps of the delta rule whose states are kept at one time.
CHUNK = 128
# Queries of a step of decoding.
MOST_DECODED = 16
# The ops of one token, whose state is updated in place.
STEPS = ("step", "delta step")
# The ops that have betas.
WITH_BETAS = ("delta", "delta step")


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem; `op` is "linear", "softmax", "delta", which has betas [B, T, H] in float32, too,
    or "step" or "delta step": one token, T = 1, of linear attention or of the delta rule, against a
    float32 state [B, H, D, D] that is updated in place.

    `decay` is None, "head" ([H]), "step" ([B, T, H]) or "channel" ([B, T, H, D]), in float32.
    Softmax attention alone has the rest: G key heads and S keys, if not H and T; `left`, how many
    keys before its own a query sees, in a causal window; and `documents`, the mean length of
    what is packed into a sequence, of which each token sees its own document. `tf32` rounds the
    factors of float32.

    Where a few queries meet a cache, it may be in pages of `page` keys, in random order; `ragged`,
    sequences of 1 to S keys; of 8 bits, `cache` "int8", with a float32 scale for each key and head;
    or the values may be the first V columns of the keys.
    """

    op: str
    B: int
    H: int
    T: int
    D: int
    dtype: str
    causal: bool = False
    decay: str | None = None
    G: int | None = None
    S: int | None = None
    left: int | None = None
    documents: int | None = None
    tf32: bool = False
    page: int | None = None
    ragged: bool = False
    cache: str | None = None
    V: int | None = None

    @property
    def decoding(self) -> bool:
        """Whether a few queries meet a cache: nobody differentiates that."""
        return self.op == "softmax" and self.T <= MOST_DECODED < self.key_shape[1]

    @property
    def tolerance(self) -> float:
        return TF32_TOLERANCE if self.tf32 else TOLERANCES[self.dtype]

    @property
    def query_shape(self) -> tuple[int, int, int, int]:
        """Of q and out."""
        return self.B, self.T, self.H, self.D

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        """Of k and v."""
        return self.B, self.S or self.T, self.G or self.H, self.D

    @property
    def unit(self) -> int:
        """u, in bytes."""
        return math.prod(self.query_shape) * ITEMSIZES[self.dtype]

    @property
    def key_unit(self) -> int:
        """The bytes of k, or of v; of those keys that there are."""
        B, S, G, D = self.key_shape
        row = D + 4 if self.cache else D * ITEMSIZES[self.dtype]
        return (int(self.lengths.sum()) if self.ragged else B * S) * G * row

    @property
    def cached(self) -> int:
        """The bytes of k and v together."""
        return self.key_unit if self.V else 2 * self.key_unit

    @property
    def set_bytes(self) -> int:
        """Of the inputs of a forward pass and its output, about."""
        return 2 * self.unit + self.cached

    @property
    def lengths(self) -> np.ndarray:
        """[B] int32: the keys of each sequence."""
        B, S = self.key_shape[:2]
        if not self.ragged:
            return np.full(B, S, np.int32)
        return np.random.default_rng(S).integers(self.T, S + 1, B, np.int32)

    @property
    def gates(self) -> tuple[int, ...]:
        """The decay's shape, () where there is none."""
        whole = (self.B, self.T, self.H, self.D)
        shapes = {None: (), "head": (self.H,), "step": whole[:3], "channel": whole}
        return shapes[self.decay]

    def traffic(self, phase: str) -> int:
        """The fewest bytes that have to move: every input read once, every output written once."""
        gates = 4 * math.prod(self.gates) if self.decay else 0
        gates += 4 * self.B * self.T * self.H if self.op in WITH_BETAS else 0
        if self.op in STEPS:
            return 2 * 4 * self.B * self.H * self.D * self.D + 4 * self.unit + gates
        if phase == "forward":
            # The output is narrower than q where the values are.
            out = self.unit * (self.V or self.D) // self.D
            return self.unit + out + self.cached + gates
        return 5 * self.unit + 6 * self.key_unit + 3 * gates

    @property
    def pairs(self) -> float:
        """Of a query and a key, that count: the visible ones, and of a causal square half."""
        S = self.key_shape[1]
        plain = self.left is None and self.documents is None and not self.ragged
        if plain and (self.T == S or not self.causal):
            return self.B * self.T * S / (2 if self.causal else 1)
        return sum(float(np.sum(last - first)) for first, last in map(self.seen, range(self.B)))

    @property
    def visible_blocks(self) -> float:
        """The share of blocks of rows and keys in which any query sees any key."""
        S, visible = self.key_shape[1], 0
        for entry in range(self.B):
            first, last = self.seen(entry)
            starts = np.arange(0, self.T, BLOCK)
            # Neither bound ever steps back, so a block of queries sees one run of keys.
            ends = np.minimum(starts + BLOCK, self.T) - 1
            visible += int(np.sum(-(-last[ends] // BLOCK) - first[starts] // BLOCK))
        return visible / (self.B * -(-self.T // BLOCK) * -(-S // BLOCK))

    def operations(self, phase: str) -> float:
        """Multiplications and additions of the products, the fewest that there have to be."""
        if self.op == "softmax":
            forward, both = 2 * self.H * (self.D + (self.V or self.D)) * self.pairs, 3.5
        else:
            products = 6 if self.op in WITH_BETAS else 4
            forward, both = products * self.B * self.T * self.H * self.D * self.D, 3
        return forward if phase == "forward" else both * forward

    @property
    def document_ids(self) -> np.ndarray:
        """[B, T] int32: the number of each token's document, cut at random places."""
        assert self.documents is not None
        generator = np.random.default_rng(self.T)
        ids = np.zeros((self.B, self.T), np.int32)
        for entry in ids:
            cuts = generator.choice(self.T - 1, self.T // self.documents - 1, replace=False)
            entry[1 + cuts] = 1
        return np.cumsum(ids, axis=1, dtype=np.int32)

    def seen(self, entry: int) -> tuple[np.ndarray, np.ndarray]:
        """The keys of each query of a batch entry: the first, and the one after the last; [T]."""
        S = int(self.lengths[entry])
        position = np.arange(self.T) + S - self.T
        first, last = np.zeros_like(position), np.full_like(position, S)
        if self.causal:
            last = position + 1
        if self.left is not None:
            first = np.maximum(position - self.left, 0)
        if self.documents is not None:
            ids = self.document_ids[entry]
            first = np.maximum(first, np.searchsorted(ids, ids, side="left"))
            last = np.minimum(last, np.searchsorted(ids, ids, side="right"))
        return first, last

    def held(self, phase: str) -> int:
        """The bytes of inputs and outputs."""
        if self.op in STEPS:
            return self.traffic(phase) // 2
        gates = 4 * math.prod(self.gates) if self.decay else 0
        gates += 4 * self.B * self.T * self.H if self.op == "delta" else 0
        if phase == "forward":
            return dataclasses.replace(self, ragged=False).traffic(phase)
        return 4 * self.unit + 4 * self.key_unit + 2 * gates

    def memory(self, phase: str, quadratic: bool = False) -> int:
        """Bytes that a measurement takes, about; `quadratic` where all scores are kept.

        Inputs, outputs and gradients, and as much again for what is made on the way. Scores are
        float32, with their exponentials and the mask; backward has their gradients, too.
        """
        scores = 4 * self.B * self.H * self.T**2 if quadratic else 0
        if phase == "forward":
            return 8 * self.unit + 3 * scores
        return 16 * self.unit + 5 * scores

    def __str__(self) -> str:
        sizes = f"B{self.B} H{self.H}{f' G{self.G}' if self.G else ''}"
        if self.op not in STEPS:
            sizes += f" T{self.T}{f' S{self.S}' if self.S else ''}"
        return (
            f"{self.op} {sizes} D{self.D}{f' V{self.V}' if self.V else ''} {self.dtype}"
            f"{' TF32' if self.tf32 else ''}"
            f"{' causal' if self.causal else ''}"
            f"{f', decay per {self.decay}' if self.decay else ''}"
            f"{f', window {self.left + 1}' if self.left is not None else ''}"
            f"{f', documents of {self.documents}' if self.documents else ''}"
            f"{f', {self.cache} cache' if self.cache else ''}"
            f"{', ragged' if self.ragged else ''}"
            f"{f', pages of {self.page}' if self.page else ''}"
        )


def exact(
    case: Case,
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    rows: np.ndarray,
    decay: Any = None,
    mapped: bool = False,
    normalize: bool = True,
) -> dict[str, np.ndarray]:
    """One head in float64: out and dq [R, D] of the rows, dk and dv [S, D] of a dout that is zero
    in all others. It is the last head of the last batch entry, where that matters.

    With p the weights that average v, dp[i,j] = dout_i . v_j, and either

        softmax: p = exp(s) / sum exp(s), s = q k^T / sqrt(D):   ds = p * (dp - sum(p * dp))
        linear:  p = w / sum w, w = phi(q) phi(k)^T:             dw = (dp - sum(p * dp)) / sum w

    In linear attention `decay` [T] or [T, D] holds the logarithms of the factors between steps,
    `mapped` says that q and k are features already, and without `normalize` p = w and dw = dp.
    """
    q, k, v, dout = (np.asarray(array, np.float64) for array in (q[rows], k, v, dout[rows]))
    first, last = (bound[rows, None] for bound in case.seen(case.B - 1))
    visible = (first <= np.arange(len(k))) & (np.arange(len(k)) < last)
    dp = dout @ v.T
    if case.op == "softmax":
        scale = q.shape[-1] ** -0.5
        s = np.where(visible, scale * (q @ k.T), -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        d_weights = scale * p * (dp - (p * dp).sum(-1, keepdims=True))
        found = {"out": p @ v, "dq": d_weights @ k, "dk": d_weights.T @ q, "dv": p.T @ dout}
    else:
        left, right = (q, k) if mapped else (phi(q), phi(k))
        if decay is None:
            w = left @ right.T
        else:
            total_decay = np.cumsum(np.asarray(decay, np.float64), axis=0).reshape(len(k), -1)
            rising = np.ascontiguousarray(-total_decay.T)
            near = [_near(rising, row, end) for row, end in zip(rows, last[:, 0], strict=True)]

            def between(r: int) -> np.ndarray:
                """From the keys of `near[r]` to the row."""
                return np.exp(np.minimum(total_decay[rows[r]] - total_decay[near[r]], 0))

            w = np.zeros((len(rows), len(k)))
            for r in range(len(rows)):
                w[r, near[r]] = (right[near[r]] * between(r)) @ left[r]
        w = np.where(visible, w, 0)
        if normalize:
            total = w.sum(-1, keepdims=True)
            p = w / total
            d_weights = (dp - (p * dp).sum(-1, keepdims=True)) / total
        else:
            p, d_weights = w, dp
        d_weights = np.where(visible, d_weights, 0)
        found = {"out": p @ v, "dv": p.T @ dout}
        if decay is None:
            found |= {"dq": d_weights @ right, "dk": d_weights.T @ left}
        else:
            found["dq"] = np.empty_like(q)
            found["dk"] = np.zeros_like(k)
            for r in range(len(rows)):
                seen = d_weights[r, near[r], None] * between(r)
                found["dq"][r] = (seen * right[near[r]]).sum(0)
                found["dk"][near[r]] += seen * left[r]
        if not mapped:
            found["dq"] = found["dq"] * slope(q)
            found["dk"] = found["dk"] * slope(k)
    return found


def exact_delta(
    q: Any, k: Any, v: Any, dout: Any, rows: np.ndarray, decay: Any, beta: Any
) -> dict[str, np.ndarray]:
    """One head of the delta rule in float64, as `exact` gives it, with scale = 1 / sqrt(D):

        R_t = exp(decay_t) S_{t-1},  u_t = beta_t (v_t - k_t^T R_t),  S_t = R_t + k_t u_t^T
        out_t = scale q_t^T S_t

    Going back, dS_t holds what later steps and q_t dout_t^T scale make of it, and

        du_t = k_t^T dS_t,  dv_t = beta_t du_t,  dk_t = dS_t u_t - R_t dv_t
        dR_t = dS_t - k_t dv_t^T,  dS_{t-1} = exp(decay_t) dR_t

    The states of `CHUNK` steps are kept at one time, and those before each of these runs.
    """
    q, k, v, dout, beta = (np.asarray(array, np.float64) for array in (q, k, v, dout, beta))
    T, D = k.shape
    factor = np.ones((T, 1))
    if decay is not None:
        factor = np.exp(np.asarray(decay, np.float64)).reshape(T, -1)
    scale = D**-0.5
    compared = np.zeros(T, bool)
    compared[rows] = True
    found = {name: np.zeros_like(k if name == "dk" else v) for name in ("dk", "dv")}
    found |= {"out": np.zeros_like(v), "dq": np.zeros_like(q)}

    def step(t: int, state: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scaled = factor[t][:, None] * state
        u = beta[t] * (v[t] - k[t] @ scaled)
        return scaled, u, scaled + k[t][:, None] * u

    before, state = [], np.zeros((D, v.shape[1]))
    for t in range(T):
        if t % CHUNK == 0:
            before.append(state)
        state = step(t, state)[2]
        if compared[t]:
            found["out"][t] = scale * (q[t] @ state)
            found["dq"][t] = scale * (state @ dout[t])
    d_state = np.zeros_like(state)
    for first in range((len(before) - 1) * CHUNK, -1, -CHUNK):
        steps, state = [], before[first // CHUNK]
        for t in range(first, min(first + CHUNK, T)):
            steps.append(step(t, state))
            state = steps[-1][2]
        for t in range(first + len(steps) - 1, first - 1, -1):
            scaled, u, _ = steps[t - first]
            if compared[t]:
                d_state = d_state + scale * q[t][:, None] * dout[t]
            found["dv"][t] = beta[t] * (k[t] @ d_state)
            found["dk"][t] = d_state @ u - scaled @ found["dv"][t]
            d_state = factor[t][:, None] * (d_state - k[t][:, None] * found["dv"][t])
    return found | {"out": found["out"][rows], "dq": found["dq"][rows]}


def decoded(case: Case, q: Any, k: Any, v: Any) -> np.ndarray:
    """The output [H / G, T, V] of all heads that share a key head, in float64: of a long cache
    each product is one, for all heads.
    """
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    first, last = (bound[:, None] for bound in case.seen(case.B - 1))
    visible = (first <= np.arange(len(k))) & (np.arange(len(k)) < last)  # [T, S]
    s = (q.reshape(-1, q.shape[-1]) @ k.T).reshape(*q.shape[:2], -1) * q.shape[-1] ** -0.5
    s = np.where(visible, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p.reshape(-1, len(k)) @ v).reshape(*q.shape[:2], -1)


def _near(rising: np.ndarray, row: int, end: int) -> slice:
    """The keys before `end` from which any channel's factor to the row is not 0 in float64.

    `rising` [channels, S] is the negative of the gates' logarithms, summed.
    """
    starts = [np.searchsorted(channel, channel[row] - UNDERFLOW) for channel in rising]
    return slice(int(min(starts)), int(end))


def phi(x: np.ndarray) -> np.ndarray:
    """elu(x) + 1, the feature map."""
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def slope(x: np.ndarray) -> np.ndarray:
    """phi's derivative."""
    return np.exp(np.minimum(x, 0))


def compared_rows(case: Case) -> np.ndarray:
    """The queries whose results are compared."""
    if case.T <= WHOLE:
        return np.arange(case.T)
    return np.sort(np.random.default_rng(case.T).choice(case.T, SAMPLE, replace=False))


# What was exact of the last inputs that have names.
_exact_results: dict[Hashable, list[dict[str, np.ndarray]]] = {}
MOST_EXACT_RESULTS = 4


def errors(
    case: Case,
    inputs: dict[str, np.ndarray],
    found: dict[str, np.ndarray],
    drawn: Hashable = None,
    **variant: bool,
) -> dict[str, float]:
    """The relative RMS errors of the results of one key head and its queries: out, and maybe dq,
    dk, dv.

    k, v, dk and dv are [S, D]; q, dout, out and dq [H / G, T, D]; v may be the first columns of k,
    and nowhere else. dout counts as zero outside of `compared_rows`. `drawn` names the inputs:
    those of one name are the same, and what is exact is worked out once. `variant` is what `exact`
    takes beside the arrays.
    """
    rows = compared_rows(case)
    decodes = case.decoding and "dq" not in found
    name = (case, drawn, decodes, *sorted(variant.items()))
    of_heads = _exact_results.get(name) if drawn is not None else None
    if of_heads is None and decodes:
        v = inputs["k"][:, : case.V] if case.V else inputs["v"]
        of_heads = [{"out": out} for out in decoded(case, inputs["q"], inputs["k"], v)]
    if of_heads is None and case.op == "delta":
        arrays = (inputs[one] for one in ("k", "v"))
        gates = inputs.get("decay"), inputs["beta"]
        of_heads = [exact_delta(inputs["q"][0], *arrays, inputs["dout"][0], rows, *gates)]
    if of_heads is None:
        of_heads = [
            exact(case, q, inputs["k"], inputs["v"], dout, rows, inputs.get("decay"), **variant)
            for q, dout in zip(inputs["q"], inputs["dout"], strict=True)
        ]
    if drawn is not None:
        _exact_results[name] = of_heads
        while len(_exact_results) > MOST_EXACT_RESULTS:
            del _exact_results[next(iter(_exact_results))]
    told = {}
    for name, array in found.items():
        if name in ("dk", "dv"):
            wanted = sum(head[name] for head in of_heads)
        elif name in ("out", "dq"):
            wanted, array = np.stack([head[name] for head in of_heads]), array[:, rows]
        else:
            continue
        apart = np.linalg.norm(np.asarray(array, np.float64) - wanted)
        told[name] = float(apart / np.linalg.norm(wanted))
    return told


def too_large(case: Case, found: dict[str, float]) -> str | None:
    """What is wrong with results of these errors; None if nothing."""
    for name, error in found.items():
        # A comparison that NaN does not pass.
        if not error <= case.tolerance:
            return f"{name} is wrong: relative error {error:.1e}"
    return None


def wrong(case: Case, inputs: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> str | None:
    """What is wrong with results, as `errors` takes them; None if nothing."""
    return too_large(case, errors(case, inputs, found))


def head_decays(H: int) -> np.ndarray:
    """RetNet's: the logarithms of 1 - 2^-5, 1 - 2^-6, and so on."""
    return np.log1p(-(2.0 ** (-5.0 - np.arange(H)))).astype(np.float32)
