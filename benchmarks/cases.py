"""What is measured, and what is right: sizes, operations, traffic, memory, exact results.

    u              = B * T * H * D * itemsize, one tensor
    traffic        = 4u forward (q, k, v in, out), 7u backward (q, k, v, dout in, dq, dk, dv out)
    products       = 4 * B * H * T^2 * D forward, 2.5 times as many backward; causal: half

A result passes when its relative RMS error against float64, on the same rounded inputs, is at
most `TOLERANCES`: far above rounding, far below a mistake. The budgets that the library holds
itself to are the tests' matter; these serve every peer.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
TOLERANCES = {"bfloat16": 3e-2, "float16": 1e-2, "float32": 1e-3}
PHASES = ("forward", "forward + backward")
# Up to here all rows are compared, and dk and dv with them; beyond, a sample of rows.
WHOLE = 1024
SAMPLE = 16
# Logarithms of gates are drawn as the negative half of a normal distribution of this width.
DECAY = 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem with T = S and as many key as query heads; `op` is "linear", "softmax" or
    "step": one token, T = 1, against a float32 state [B, H, D, D] that is updated in place.

    `decay` is None, "head" ([H]), "step" ([B, T, H]) or "channel" ([B, T, H, D]), in float32.
    """

    op: str
    B: int
    H: int
    T: int
    D: int
    dtype: str
    causal: bool = False
    decay: str | None = None

    @property
    def unit(self) -> int:
        """u, in bytes."""
        return self.B * self.T * self.H * self.D * ITEMSIZES[self.dtype]

    @property
    def gates(self) -> tuple[int, ...]:
        """The decay's shape, () where there is none."""
        whole = (self.B, self.T, self.H, self.D)
        shapes = {None: (), "head": (self.H,), "step": whole[:3], "channel": whole}
        return shapes[self.decay]

    def traffic(self, phase: str) -> int:
        """The fewest bytes that have to move: every input read once, every output written once."""
        if self.op == "step":
            return 2 * 4 * self.B * self.H * self.D * self.D + 4 * self.unit
        gates = 4 * math.prod(self.gates) if self.decay else 0
        return self.unit * 4 + gates if phase == "forward" else self.unit * 11 + 3 * gates

    def operations(self, phase: str) -> float:
        """Multiplications and additions of softmax attention's products."""
        forward = 4 * self.B * self.H * self.T**2 * self.D / (2 if self.causal else 1)
        return forward if phase == "forward" else 3.5 * forward

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
        if self.op == "step":
            return f"B{self.B} H{self.H} D{self.D} {self.dtype} step"
        return (
            f"B{self.B} H{self.H} T{self.T} D{self.D} {self.dtype}"
            f"{' causal' if self.causal else ''}"
            f"{f', decay per {self.decay}' if self.decay else ''}"
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
    """One head in float64: out and dq [R, D] of the rows; with all the rows, dk and dv [T, D], too.

    With p the weights that average v, dp[i,j] = dout_i . v_j, and either

        softmax: p = exp(s) / sum exp(s), s = q k^T / sqrt(D):   ds = p * (dp - sum(p * dp))
        linear:  p = w / sum w, w = phi(q) phi(k)^T:             dw = (dp - sum(p * dp)) / sum w

    In linear attention `decay` [T] or [T, D] holds the logarithms of the factors between steps,
    `mapped` says that q and k are features already, and without `normalize` p = w and dw = dp.
    """
    q, k, v, dout = (np.asarray(array, np.float64) for array in (q[rows], k, v, dout[rows]))
    visible = np.arange(len(k)) <= rows[:, None] if case.causal else np.ones((1, len(k)), bool)
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

            def between(r: int) -> np.ndarray:
                return np.exp(np.minimum(total_decay[rows[r]] - total_decay, 0))

            w = np.stack([(right * between(r)) @ left[r] for r in range(len(rows))])
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
                seen = d_weights[r][:, None] * between(r)
                found["dq"][r] = (seen * right).sum(0)
                found["dk"] += seen * left[r]
        if not mapped:
            found["dq"] = found["dq"] * slope(q)
            found["dk"] = found["dk"] * slope(k)
    names = ("out", "dq", "dk", "dv") if len(rows) == len(k) else ("out", "dq")
    return {name: found[name] for name in names}


def phi(x: np.ndarray) -> np.ndarray:
    """elu(x) + 1, the feature map."""
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def slope(x: np.ndarray) -> np.ndarray:
    """phi's derivative."""
    return np.exp(np.minimum(x, 0))


def errors(
    case: Case, inputs: dict[str, np.ndarray], found: dict[str, np.ndarray], **variant: bool
) -> dict[str, float]:
    """The relative RMS errors of one head's results [T, D]: out, and maybe dq, dk, dv.

    Of long sequences a sample of rows is compared, and only out and dq. `variant` is what
    `exact` takes beside the arrays.
    """
    T = len(inputs["q"])
    rows = np.arange(T)
    if T > WHOLE:
        rows = np.sort(np.random.default_rng(T).choice(T, SAMPLE, replace=False))
    arrays = [inputs[name] for name in ("q", "k", "v", "dout")]
    wanted = exact(case, *arrays, rows, inputs.get("decay"), **variant)
    told = {}
    for name, array in found.items():
        if name in wanted:
            array = np.asarray(array if name in ("dk", "dv") else array[rows], np.float64)
            apart = np.linalg.norm(array - wanted[name])
            told[name] = float(apart / np.linalg.norm(wanted[name]))
    return told


def too_large(case: Case, found: dict[str, float]) -> str | None:
    """What is wrong with results of these errors; None if nothing."""
    for name, error in found.items():
        # A comparison that NaN does not pass.
        if not error <= TOLERANCES[case.dtype]:
            return f"{name} is wrong: relative error {error:.1e}"
    return None


def wrong(case: Case, inputs: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> str | None:
    """What is wrong with one head's results [T, D] (out, and maybe dq, dk, dv); None if nothing."""
    return too_large(case, errors(case, inputs, found))


def head_decays(H: int) -> np.ndarray:
    """RetNet's: the logarithms of 1 - 2^-5, 1 - 2^-6, and so on."""
    return np.log1p(-(2.0 ** (-5.0 - np.arange(H)))).astype(np.float32)
