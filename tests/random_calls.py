"""Random calls of the three ops against an oracle of their own, which is written in PyTorch.

    python -m tests.random_calls --seconds=60 [--implementation=triton] [--seed=0] [--op=attention]

The oracle has the definitions of the operations once more, beside the references: float64, every
pair (i, j) or every step written out, derivatives by PyTorch. Each call is drawn from its seed,
which is printed with the call where a result is beyond its budget (`numerics.py`).

Attention's float32 scores are rounded: a score s is off by about 2^-24 |s|, and so, relatively, is
its exponential. Inputs of scale 30 have scores of thousands, and where two keys share the weight of
a query, their weights are off by some 1e-4. Whether one float32 computation has that error depends
on the order in which it adds up the columns of D: over 9 orders the errors of dq of one call were
4e-6 to 5e-5. So there a result beyond its budget is compared with several float32 computations that
differ in the order of their sums over D, over the keys and over V alone, and the largest of their
errors counts as the ideal's. The factor 2 and the budgets are as for all other results. V counts
where a query sees one key beside a sink: its gradient is a difference of two sums over V, do . v
and do . out, which cancel.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

import ato_jax
from tests import numerics

OPS = ("linear_attention", "attention", "gated_delta_rule")
FEATURE_MAPS = {
    "elu1": lambda x: torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0))),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
    "exp": torch.exp,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "identity": lambda x: x,
    "silu": lambda x: x * torch.sigmoid(x),
}
SIGNED = ("identity", "silu")
# Elements of the largest array that the oracle makes: of pairs times channels, or of pairs.
MOST_ELEMENTS = 12_000_000
# Orders of sums in which attention is computed in float32 where one does not suffice.
ORDERS_OF_SUMS = 8
# A result that is nowhere larger has terms for which float32 has no normal number, and what is lost
# of these is more than its rounding.
UNDERFLOW = float(np.finfo(np.float32).tiny) * 2**24
# Calls one after the other that differ in their numbers alone.
CALLS_ALIKE = 12


@dataclasses.dataclass
class Call:
    """`arrays` are differentiable, [B, T, H, D] in NumPy; `options` are passed on as they are."""

    op: str
    seed: int
    dtype: str
    sizes: dict[str, int]
    arrays: dict[str, Any]
    options: dict[str, Any]
    cotangents: dict[str, Any]
    facts: dict[str, Any]

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        facts = " ".join(f"{name}={value}" for name, value in self.facts.items())
        return f"{self.op} seed={self.seed} {self.dtype} {sizes} {facts}"


class Draw:
    """Draws one call from its seed. CALLS_ALIKE calls differ in their numbers alone, and so are
    compiled once."""

    def __init__(self, seed: int, longest: int, op: str | None, dtype: str | None) -> None:
        self.random = np.random.default_rng(seed // CALLS_ALIKE)
        self.numbers = np.random.default_rng((seed, 1))
        self.seed = seed
        chosen = self.one_of(*OPS)
        self.op = chosen if op is None else op
        found = self.one_of("bfloat16", "bfloat16", "float16", "float32")
        self.dtype = found if dtype is None else dtype
        T = self.log_uniform(1, longest)
        if longest > 500 and self.chance(0.04):
            T = 1100
        S = T if self.op == "gated_delta_rule" or self.chance(0.7) else self.log_uniform(1, longest)
        G, share = self.one_of(1, 2), self.one_of(1, 1, 2, 3)
        D = self.one_of(8, 16, 32, 64, 64, 128, self.integer(8, 160))
        V = D if self.chance(0.5) else self.one_of(8, 16, 64, 128, self.integer(8, 160))
        B = self.one_of(1, 1, 2)
        self.sizes = {"B": B, "T": T, "S": S, "H": G * share, "G": G, "D": D, "V": V}
        self.facts: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.arrays: dict[str, Any] = {}

    def one_of(self, *values: Any) -> Any:
        return values[self.random.integers(len(values))]

    def any_of(self, *values: Any) -> Any:
        """One of the values, which calls alike need not have alike."""
        return values[self.numbers.integers(len(values))]

    def integer(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high + 1))

    def chance(self, share: float) -> bool:
        return bool(self.random.uniform() < share)

    def log_uniform(self, low: float, high: float) -> int:
        return int(np.exp(self.random.uniform(np.log(low), np.log(high + 1))))

    def option(self, name: str, value: Any, fact: Any = None) -> None:
        self.options[name] = value
        self.facts[name] = value if fact is None else fact

    def normal(self, letters: str, scale: float = 1.0, dtype: Any = None) -> np.ndarray:
        shape = [self.sizes[letter] for letter in letters]
        values = self.numbers.normal(size=shape) * scale
        return np.asarray(values).astype(jnp.dtype(self.dtype if dtype is None else dtype))

    def decay(self, letters: str) -> np.ndarray:
        shape = [self.sizes[letter] for letter in letters]
        steepest = self.any_of(0.01, 0.1, 0.5, 2.0, 16.0)
        values = -steepest * self.numbers.uniform(size=shape)
        if self.numbers.uniform() < 0.3:
            values[self.numbers.uniform(size=shape) < 0.1] = -self.numbers.uniform(0.5, 16.0)
        if self.numbers.uniform() < 0.3:
            values[self.numbers.uniform(size=shape) < 0.2] = 0
        self.facts["decay"] = f"{letters}:{steepest}"
        return values.astype(np.float32)

    def ids(self, size: int, returning: bool) -> np.ndarray:
        """Runs of ids [B, size]; an id may return."""
        starts = self.numbers.uniform(size=(self.sizes["B"], size)) < 4 / max(size, 8)
        ids = starts.cumsum(1).astype(np.int32)
        return ids % 3 if returning else ids

    def lengths(self, size: int) -> np.ndarray:
        return self.numbers.integers(0, size + 1, size=self.sizes["B"]).astype(np.int32)

    def common(self) -> None:
        """What linear_attention and attention have alike."""
        T, S = self.sizes["T"], self.sizes["S"]
        if self.chance(0.6):
            self.option("causal", True)
        kind = self.one_of(None, None, None, "self", "cross")
        if kind == "self" and T == S:
            ids = self.ids(T, self.op == "linear_attention" and self.chance(0.3))
            self.option("segment_ids", ids, "self")
        elif kind is not None:
            self.option("q_segment_ids", self.ids(T, False), "cross")
            self.option("kv_segment_ids", self.ids(S, False), "cross")
        for name, size in (("q_lengths", T), ("kv_lengths", S)):
            if self.chance(0.15):
                lengths = self.lengths(size)
                self.option(name, lengths, lengths.tolist())
        if self.chance(0.3):
            self.facts["layout"] = "bhtd"

    def call(self) -> Call:
        scale = self.any_of(1.0, 1.0, 1.0, 0.01, 0.1, 4.0, 30.0)
        self.facts["x"] = scale
        getattr(self, f"_{self.op}")(scale)
        return self._finish()

    def _linear_attention(self, scale: float) -> None:
        sizes = self.sizes
        self.common()
        causal = self.options.get("causal", False)
        square = sizes["T"] == sizes["S"]
        name = self.one_of("elu1", "elu1", "identity", "relu", "exp", "softplus", "silu", "relu2")
        self.option("feature_map", name)
        if name not in SIGNED and self.chance(0.3):
            self.option("normalize", False)
        if (name in SIGNED or "normalize" in self.options) and self.chance(0.3):
            self.option("scale", self.one_of(1.0, 0.2))
        most = {"exp": 1.0, "relu2": 4.0}.get(name, 30.0)
        scale = min(scale, most)
        self.arrays["q"] = self.normal("BTHD", scale)
        self.arrays["k"] = self.normal("BSGD", scale)
        self.arrays["v"] = self.normal("BSGV", self.any_of(1.0, 1.0, scale))
        if (causal or square) and self.chance(0.6):
            letters = self.one_of("G", "BSG", "BSGD" if causal or self.chance(0.3) else "BSG")
            pairs = sizes["B"] * sizes["G"] * sizes["T"] * sizes["S"] * sizes["D"]
            if letters == "BSGD" and pairs > MOST_ELEMENTS:
                letters = "BSG"
            self.arrays["decay"] = self.decay(letters)
        if not causal or square:
            if self.chance(0.3):
                kv = self.normal("BGDV", scale, np.float32)
                k_sum = np.abs(self.normal("BGD", scale, np.float32)) + 0.1
                self.arrays["initial_state"] = ato_jax.LinearState(kv, k_sum)
                self.facts["initial_state"] = True
            if self.chance(0.3):
                self.option("return_state", True)

    def _attention(self, scale: float) -> None:
        sizes = self.sizes
        self.common()
        S = sizes["S"]
        scale = min(scale, self.any_of(4.0, 30.0))
        self.arrays["q"] = self.normal("BTHD", scale)
        self.arrays["k"] = self.normal("BSGD", scale)
        self.arrays["v"] = self.normal("BSGV", self.any_of(1.0, 1.0, scale))
        if self.chance(0.25):
            bound = lambda: self.one_of(None, 0, self.integer(0, max(S, 2)))  # noqa: E731
            self.option("window", (bound(), bound()))
        if self.chance(0.2):
            offset = self.numbers.integers(-3, S + 1, size=sizes["B"]).astype(np.int32)
            self.option("query_offset", offset, offset.tolist())
        for name in ("bias", "mask"):
            if self.chance(0.25):
                shape = [sizes[letter] if self.chance(0.6) else 1 for letter in "BHTS"]
                if name == "mask":
                    self.option(name, self.numbers.uniform(size=shape) < 0.7, shape)
                    continue
                bias = self.numbers.normal(size=shape) * self.any_of(0.1, 1.0, 4.0)
                if self.numbers.uniform() < 0.3:
                    bias[self.numbers.uniform(size=shape) < 0.1] = -np.inf
                dtype = self.one_of(self.dtype, "float32")
                self.arrays["bias"] = bias.astype(jnp.dtype(dtype))
                self.facts["bias"] = (shape, dtype)
        if self.chance(0.2):
            self.option("softcap", self.one_of(2.0, 20.0))
        if self.chance(0.25):
            self.arrays["sinks"] = self.normal("H", self.any_of(1.0, 4.0))
            self.facts["sinks"] = True
        if self.chance(0.2):
            self.option("scale", self.one_of(1.0, 0.05))
        if self.chance(0.4):
            self.option("return_lse", True)

    def _gated_delta_rule(self, scale: float) -> None:
        if self.chance(0.4):
            self.option("normalize_qk", True)
        else:
            scale = min(scale, 1.0)
        # Keys of length at most about 1, beyond which the states grow without bound.
        of_keys = scale if "normalize_qk" in self.options else self.sizes["D"] ** -0.5
        self.arrays["q"] = self.normal("BTGD", scale)
        self.arrays["k"] = self.normal("BTGD", of_keys)
        self.arrays["v"] = self.normal("BTHV", self.any_of(1.0, scale, 30.0))
        beta = self.numbers.uniform(0, self.any_of(1.0, 0.1, 1.8), self.arrays["v"].shape[:3])
        self.arrays["beta"] = beta.astype(jnp.dtype(self.one_of(self.dtype, "float32")))
        letters = self.one_of(None, "BTH", "BTHD")
        if letters:
            self.arrays["decay"] = self.decay(letters)
        if self.chance(0.3):
            self.option("segment_ids", self.ids(self.sizes["T"], self.chance(0.3)), "self")
        if self.chance(0.25):
            lengths = self.lengths(self.sizes["T"])
            self.option("lengths", lengths, lengths.tolist())
        if self.chance(0.4):
            self.arrays["initial_state"] = self.normal("BHDV", self.any_of(1.0, scale), np.float32)
            self.facts["initial_state"] = True
        if self.chance(0.4):
            self.option("return_state", True)
        if self.chance(0.3):
            self.facts["layout"] = "bhtd"

    def _finish(self) -> Call:
        cotangents = {"out": self.normal("BTHV", self.any_of(1.0, 1.0, 1e-3))}
        if self.options.get("return_lse"):
            cotangents["lse"] = self.normal("BTH", 1.0, np.float32)
        if self.options.get("return_state") and self.op == "gated_delta_rule":
            cotangents["state"] = self.normal("BHDV", 1.0, np.float32)
        elif self.options.get("return_state"):
            cotangents["state_kv"] = self.normal("BGDV", 1.0, np.float32)
            cotangents["state_k_sum"] = self.normal("BGD", 1.0, np.float32)
        call = Call(
            self.op,
            self.seed,
            self.dtype,
            self.sizes,
            self.arrays,
            self.options,
            cotangents,
            self.facts,
        )
        # What lies in padding reaches nothing.
        for real, timed in zip(reals(call), (("q",), ("k", "v", "beta", "decay")), strict=True):
            for name in timed:
                array = self.arrays.get(name)
                if array is not None and array.ndim > 2:
                    array[~real] = np.nan
        for name in ("out", "lse"):
            if name in cotangents:
                cotangents[name][~reals(call)[0]] = np.nan
        return call


def reals(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Which queries and keys are not padding, [B, T] and [B, S]."""
    sizes, options = call.sizes, call.options
    q_lengths, kv_lengths = options.get("q_lengths"), options.get("kv_lengths")
    if call.op == "gated_delta_rule":
        q_lengths = kv_lengths = options.get("lengths")
    elif sizes["T"] == sizes["S"]:
        q_lengths = kv_lengths if q_lengths is None else q_lengths
        kv_lengths = q_lengths if kv_lengths is None else kv_lengths

    def real(lengths: Any, size: int) -> np.ndarray:
        lengths = np.full(sizes["B"], size) if lengths is None else lengths
        return np.arange(size) < lengths[:, None]

    return real(q_lengths, sizes["T"]), real(kv_lengths, sizes["S"])


# The oracle. `part` takes the derivative through the "numerator" alone or through the
# "normaliser" alone, the two terms that nearly cancel.


def facts_of_pairs(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Each query's position among the keys [B, T], and which pairs are visible [B, T, S]."""
    sizes, options = call.sizes, call.options
    asked, real = reals(call)
    offset = options.get("query_offset")
    if offset is None:
        offset = real.sum(1) - asked.sum(1)
    position = np.arange(sizes["T"]) + np.asarray(offset).reshape(-1, 1)
    key = np.arange(sizes["S"])
    visible = asked[:, :, None] & real[:, None, :]
    if options.get("causal"):
        visible &= key <= position[:, :, None]
    left, right = options.get("window", (None, None))
    if left is not None:
        visible &= key >= position[:, :, None] - left
    if right is not None:
        visible &= key <= position[:, :, None] + right
    q_ids, kv_ids = ids(call)
    if q_ids is not None:
        visible &= q_ids[:, :, None] == kv_ids[:, None, :]
    return torch.tensor(position), torch.tensor(visible)


def ids(call: Call) -> tuple[Any, Any]:
    """The segments of queries and keys; an id that returns is another one."""
    own = call.options.get("segment_ids")
    if own is not None:
        runs = np.cumsum(np.diff(own, axis=1, prepend=own[:, :1]) != 0, axis=1)
        return runs, runs
    return call.options.get("q_segment_ids"), call.options.get("kv_segment_ids")


def without_padding(array: torch.Tensor, real: np.ndarray) -> torch.Tensor:
    """The array with 0 in padding, [B, T, ...]."""
    mask = torch.tensor(real).reshape(real.shape + (1,) * (array.ndim - 2))
    return torch.where(mask, array, 0.0)


def to_heads(array: torch.Tensor, sizes: dict[str, int]) -> torch.Tensor:
    """[B, S, G, ...] -> [B, H, S, ...]."""
    return array.repeat_interleave(sizes["H"] // sizes["G"], dim=2).transpose(1, 2)


class Order(NamedTuple):
    """The order of attention's sums: that over D, those over the keys, and those over V."""

    columns: np.ndarray  # [D]
    keys: np.ndarray  # [S]
    values: np.ndarray  # [V]


def orders(call: Call) -> list[Order]:
    """Some orders at random; the same ones for the same call."""
    random = np.random.default_rng((call.seed, 2))
    return [
        Order(*(random.permutation(call.sizes[letter]) for letter in "DSV"))
        for _ in range(ORDERS_OF_SUMS)
    ]


def attention(
    call: Call, x: dict[str, Any], part: str | None, order: Order | None = None
) -> dict[str, Any]:
    options, sizes = call.options, call.sizes
    asked, real = reals(call)
    _, visible = facts_of_pairs(call)
    visible = visible[:, None]
    q = without_padding(x["q"], asked).transpose(1, 2)  # [B, H, T, D]
    k, v = (to_heads(without_padding(x[name], real), sizes) for name in ("k", "v"))
    if order is not None:
        q, k = q[..., order.columns], k[..., order.columns]
    s = options.get("scale", sizes["D"] ** -0.5) * (q @ k.transpose(2, 3))
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    if "bias" in x:
        s = s + x["bias"].to(s.dtype)
    if "mask" in options:
        visible = visible & torch.tensor(options["mask"])
    s = s.masked_fill(~visible, -torch.inf)
    if order is not None:
        s, v = s[..., order.keys], v[:, :, order.keys][..., order.values]
    top = s.detach().amax(-1)  # [B, H, T]
    sinks = None
    if "sinks" in x:
        sinks = x["sinks"].to(s.dtype)[:, None]
        top = torch.maximum(top, sinks.detach())
    top = torch.where(torch.isfinite(top), top, 0.0)
    p = torch.exp(s - top[..., None])
    total = p.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    nothing = total == 0
    total = torch.where(nothing, 1.0, total)
    numerator, divisor = p @ v, total
    if part == "numerator":
        divisor = divisor.detach()
    elif part == "normaliser":
        numerator = numerator.detach()
    out = numerator / divisor[..., None]
    if order is not None:
        out = out[..., np.argsort(order.values)]
    found = {"out": out.transpose(1, 2)}
    if options.get("return_lse"):
        lse = torch.where(nothing, -torch.inf, top + torch.log(total))
        found["lse"] = lse.transpose(1, 2)
    return found


def linear_attention(call: Call, x: dict[str, Any], part: str | None) -> dict[str, Any]:
    options, sizes = call.options, call.sizes
    asked, real = reals(call)
    position, visible = facts_of_pairs(call)
    causal = options.get("causal", False)
    phi = FEATURE_MAPS[options["feature_map"]]
    q = phi(without_padding(x["q"], asked)).transpose(1, 2)  # [B, H, T, F]
    k = without_padding(phi(without_padding(x["k"], real)), real)  # [B, S, G, F]
    v = without_padding(x["v"], real)
    k_heads, v_heads = to_heads(k, sizes), to_heads(v, sizes)  # [B, H, S, F], [B, H, S, V]
    length = torch.tensor(real.sum(1))  # [B]
    # sums[a] of the decays of the steps before a, in float64 in any case: their differences.
    sums = None
    here = position if causal else torch.arange(sizes["T"]).expand(sizes["B"], -1)
    step = here.clamp(-1, sizes["S"] - 1) + 1  # [B, T]
    if "decay" in x:
        decay = x["decay"].double()
        if decay.ndim == 1:
            decay = decay.expand(sizes["B"], sizes["S"], -1)
        decay = without_padding(decay[..., None] if decay.ndim == 3 else decay, real)
        sums = torch.nn.functional.pad(decay.cumsum(1), (0, 0, 0, 0, 1, 0))  # [B, S+1, G, F|1]
        index = step[:, :, None, None].expand(-1, -1, *sums.shape[2:])
        of_queries = sums.gather(1, index)  # [B, T, G, F|1]
        of_keys = sums[:, 1:]
        between = (
            of_queries.transpose(1, 2)[:, :, :, None] - of_keys.transpose(1, 2)[:, :, None]
        )  # [B, G, T, S, F|1]
        if not causal:
            mirrored = torch.arange(sizes["T"])[:, None] < torch.arange(sizes["S"])
            between = torch.where(mirrored[..., None], -between, between)
        between = between.masked_fill(~visible[:, None, :, :, None], -torch.inf)
        factor = torch.exp(between).to(q.dtype)
        factor = factor.repeat_interleave(sizes["H"] // sizes["G"], dim=1)
    if sums is None:
        w = q @ k_heads.transpose(2, 3)
    elif sums.shape[-1] == 1:
        w = (q @ k_heads.transpose(2, 3)) * factor[..., 0]
    else:
        w = torch.einsum("bhtf,bhtsf->bhts", q, k_heads[:, :, None] * factor)
    w = torch.where(visible[:, None], w, 0.0)
    numerator, divisor = w @ v_heads, w.sum(-1)
    _, kv_ids = ids(call)
    q_ids, kv_ids = (
        np.zeros((sizes["B"], size), np.int32) if given is None else given
        for given, size in zip(ids(call), (sizes["T"], sizes["S"]), strict=True)
    )
    state = x.get("initial_state")
    first_id = kv_ids[:, 0]
    if state is not None:
        sees = asked & (q_ids == first_id[:, None]) & (here.numpy() >= -1)
        to_state = torch.where(torch.tensor(sees)[:, None, :, None], q, 0.0)
        if sums is not None:
            to_state = to_state * torch.exp(to_heads(of_queries, sizes)).to(q.dtype)
        share = sizes["H"] // sizes["G"]
        kv, k_sum = (part.repeat_interleave(share, dim=1) for part in state)
        numerator = numerator + to_state @ kv
        divisor = divisor + (to_state @ k_sum[..., None])[..., 0]
    if options.get("normalize", options["feature_map"] not in SIGNED):
        divisor = divisor.clamp(min=1e-6)
        if part == "numerator":
            divisor = divisor.detach()
        elif part == "normaliser":
            numerator = numerator.detach()
        out = numerator / divisor[..., None]
    else:
        out = numerator * options.get("scale", sizes["D"] ** -0.5)
    out = torch.where(torch.tensor(asked)[:, None, :, None], out, 0.0)
    found = {"out": out.transpose(1, 2)}
    if options.get("return_state"):
        batch = np.arange(sizes["B"])
        last = kv_ids[batch, np.maximum(length.numpy() - 1, 0)]
        last = np.where(length.numpy() > 0, last, first_id)
        in_last = torch.tensor(real & (kv_ids == last[:, None]))[..., None, None]
        kept = torch.where(in_last, k, 0.0)
        since = torch.tensor(last == first_id).to(k.dtype).reshape(-1, 1, 1)
        if sums is not None:
            whole = sums[torch.arange(sizes["B"]), length]  # [B, G, F|1]
            after = torch.where(in_last, whole[:, None] - of_keys, 0.0)
            kept = kept * torch.exp(after).to(k.dtype)
            since = since * torch.exp(whole).to(k.dtype)
        found["state_kv"] = torch.einsum("bsgf,bsgv->bgfv", kept, v)
        found["state_k_sum"] = kept.sum(1)
        if state is not None:
            found["state_kv"] = found["state_kv"] + since[..., None] * state[0]
            found["state_k_sum"] = found["state_k_sum"] + since * state[1]
    return found


def unit(x: torch.Tensor) -> torch.Tensor:
    squares = (x * x).sum(-1, keepdim=True)
    return x / torch.sqrt(torch.where(squares == 0, 1.0, squares))


def gated_delta_rule(call: Call, x: dict[str, Any], part: str | None) -> dict[str, Any]:
    options, sizes = call.options, call.sizes
    _, real = reals(call)
    arrays = {name: without_padding(x[name], real) for name in ("q", "k", "v", "beta")}
    q, k, v, beta = arrays["q"], arrays["k"], arrays["v"], arrays["beta"].to(x["q"].dtype)
    if options.get("normalize_qk"):
        q, k = unit(q), unit(k)
    share = sizes["H"] // sizes["G"]
    q, k = (array.repeat_interleave(share, dim=2) for array in (q, k))
    factor = None
    if "decay" in x:
        factor = torch.exp(without_padding(x["decay"], real))
        factor = factor if factor.ndim == 4 else factor[..., None]
    state = x.get("initial_state")
    if state is None:
        state = torch.zeros([sizes[letter] for letter in "BHDV"], dtype=q.dtype)
    runs, _ = ids(call)
    outs = []
    for t in range(sizes["T"]):
        if runs is not None and t:
            starts = torch.tensor((runs[:, t] != runs[:, t - 1]) & real[:, t])
            state = torch.where(starts[:, None, None, None], 0.0, state)
        if factor is not None:
            state = state * factor[:, t, :, :, None]
        recalled = torch.einsum("bhd,bhdv->bhv", k[:, t], state)
        written = beta[:, t, :, None] * (v[:, t] - recalled)
        state = state + k[:, t, :, :, None] * written[:, :, None]
        outs.append(torch.einsum("bhd,bhdv->bhv", q[:, t], state))
    out = torch.stack(outs, 1) * options.get("scale", sizes["D"] ** -0.5)
    found = {"out": without_padding(out, real)}
    if options.get("return_state"):
        found["state"] = state
    return found


ORACLES: dict[str, Any] = {
    "attention": attention,
    "linear_attention": linear_attention,
    "gated_delta_rule": gated_delta_rule,
}


def to_torch(array: Any, dtype: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(array, np.float64)).to(dtype)


def oracle(
    call: Call, dtype: Any, part: str | None = None, order: Order | None = None
) -> dict[str, np.ndarray]:
    """The outputs and gradients by name, computed in `dtype`; attention's sums in this order."""
    x: dict[str, Any] = {}
    leaves: dict[str, torch.Tensor] = {}
    for name, array in call.arrays.items():
        if isinstance(array, tuple):
            parts = [to_torch(one, dtype).requires_grad_() for one in array]
            x[name] = parts
            leaves |= {"dstate_kv": parts[0], "dstate_k_sum": parts[1]}
        else:
            x[name] = to_torch(array, dtype).requires_grad_()
            leaves["dstate" if name == "initial_state" else f"d{name}"] = x[name]
    ordered = {} if order is None else {"order": order}
    outputs = ORACLES[call.op](call, x, part, **ordered)
    loss: Any = 0
    for name, output in outputs.items():
        if part == "normaliser" and name != "out":
            continue
        cotangent = to_torch(call.cotangents[name], dtype)
        if name in ("out", "lse"):
            cotangent = without_padding(cotangent, reals(call)[0])
            output = torch.where(torch.isfinite(output), output, 0.0)
        loss = loss + (output * cotangent).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {name: output.detach().numpy() for name, output in outputs.items()}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        found[name] = np.zeros(leaf.shape) if gradient is None else gradient.numpy()
    return found


# The function under test.

_compiled: dict[Any, Any] = {}


def compiled(call: Call, implementation: str | None, both: Any) -> Any:
    """`both`, compiled once for calls that are alike."""
    key = call.op, call.dtype, str(call.sizes), call.seed // CALLS_ALIKE
    found, function = _compiled.get(implementation, (None, None))
    if found != key:
        function = jax.jit(both)
        _compiled[implementation] = key, function
    return function


def run(call: Call, implementation: str | None) -> dict[str, Any]:
    """The public function's outputs and gradients by name, in the layout [B, T, H, D]."""
    options = dict(call.options)
    heads_first = call.facts.get("layout") == "bhtd"
    arrays = jax.tree.map(jnp.asarray, call.arrays)
    cotangents = jax.tree.map(jnp.asarray, call.cotangents)

    def turned(name: str, array: Any) -> Any:
        plain = name.removeprefix("d") if name != "decay" else name
        plain = "decay" if name == "ddecay" else plain
        axes = getattr(array, "ndim", 0)
        timed = plain in ("q", "k", "v", "out", "beta", "lse") or plain == "decay" and axes > 2
        return jnp.swapaxes(array, 1, 2) if heads_first and timed else array

    if heads_first:
        options["layout"] = "bhtd"
    # Arrays are arguments, so that calls alike are one program.
    traced = {name: jnp.asarray(x) for name, x in options.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in options.items() if name not in traced}
    function = functools.partial(
        getattr(ato_jax, call.op), **static, implementation=implementation
    )

    cotangents = {name: turned(name, array) for name, array in cotangents.items()}
    beside: Any = [cotangents[name] for name in ("lse", "state") if name in cotangents]
    if "state_kv" in cotangents:
        beside = [ato_jax.LinearState(cotangents["state_kv"], cotangents["state_k_sum"])]
    cotangent = (cotangents["out"], *beside) if beside else cotangents["out"]
    turned_arrays = {name: turned(name, array) for name, array in arrays.items()}

    def both(arrays: dict[str, Any], traced: dict[str, Any], cotangent: Any) -> Any:
        result, pull = jax.vjp(lambda arrays: function(**arrays, **traced), arrays)
        return result, pull(cotangent)[0]

    both = compiled(call, implementation, both)
    result, gradients = both(turned_arrays, traced, cotangent)
    found = numerics.named_results(call.op, result, gradients)
    return {name: turned(name, array) for name, array in found.items()}


def without_tiny(array: np.ndarray) -> np.ndarray:
    """With 0 in place of what float32 has no normal number for: GPUs compute with 0 there."""
    return np.where(np.abs(array) < np.finfo(np.float32).tiny, 0, array).astype(array.dtype)


def compare(call: Call, found: dict[str, Any], exact: dict[str, Any]) -> list[numerics.Measure]:
    """Every result against the oracle's."""
    found, exact = jax.tree.map(without_tiny, (found, exact))
    memo: dict[str, Any] = {}

    def once(key: str, make: Any) -> Any:
        if key not in memo:
            memo[key] = make()
        return memo[key]

    def terms(name: str) -> Any:
        normalised = call.op == "attention" or (
            call.op == "linear_attention"
            and call.options.get("normalize", call.options["feature_map"] not in SIGNED)
        )
        if not normalised or name not in numerics.SHARE_OF_TERMS:
            return None
        pair = [
            once(part, lambda part=part: oracle(call, torch.float64, part))
            for part in ("numerator", "normaliser")
        ]
        return np.hypot(pair[0][name], pair[1][name])

    def ideal(name: str, order: Order | None = None, key: str = "ideal") -> Any:
        results = once(key, lambda: oracle(call, torch.float32, order=order))
        return results[name].astype(found[name].dtype)

    measures = []
    for name, wanted in exact.items():
        if name == "ddecay" and not wanted.any():
            # Terms that cancel to nothing, of the size of v dv, leave their roundings.
            size = np.max(np.abs(np.nan_to_num(np.asarray(call.arrays["v"], np.float64))))
            size *= np.abs(exact["dv"]).max() * call.sizes["V"]
            assert np.abs(found[name]).max() <= numerics.budget(name, call.dtype) * size, name
            continue
        if wanted.any() and np.abs(wanted).max() < UNDERFLOW:
            # Not where the result is NaN, either.
            assert np.abs(found[name].astype(np.float64)).max() < 2 * UNDERFLOW, name
            continue
        whole = name == "dsinks" or name == "ddecay" and wanted.ndim == 1
        measure = functools.partial(
            numerics.measure,
            name,
            found[name],
            wanted,
            dtype=call.dtype,
            terms=lambda name=name: terms(name),
            batched=not whole,
        )
        one = measure(ideal=lambda name=name: ideal(name))
        if not one.ok and not one.wrong and call.op == "attention" and call.dtype == "float32":
            of_orders = [
                measure(ideal=ideal(name, order, f"order {number}"))
                for number, order in enumerate(orders(call))
            ]
            one = worst_ideal([one, *of_orders])
        measures.append(one)
    return measures


def worst_ideal(measures: list[numerics.Measure]) -> numerics.Measure:
    """The measure of one result against several ideals: the largest limits count."""
    return dataclasses.replace(
        measures[0],
        limit=max(one.limit for one in measures),
        row_limit=max(one.row_limit for one in measures),
        ideal=max(one.ideal or 0.0 for one in measures),
    )


def draw(seed: int, longest: int = 700, op: str | None = None, dtype: str | None = None) -> Call:
    return Draw(seed, longest, op, dtype).call()


def fits(call: Call, exact: dict[str, Any]) -> bool:
    """Whether no result leaves the range of the inputs' dtype."""
    most = 3e4 if call.dtype == "float16" else 1e30
    return all(
        np.abs(np.where(np.isinf(array) & (name == "lse"), 0, array)).max(initial=0) < most
        for name, array in exact.items()
    )


def check(call: Call, implementation: str | None, exact: dict[str, Any]) -> list[str] | None:
    """A line for each result that is beyond its budget, or None if the implementation does not
    support the call."""
    kernels = implementation in ("triton", "mosaic_gpu") and jax.default_backend() == "cpu"
    try:
        with ato_jax.interpret() if kernels else contextlib.nullcontext():
            found = run(call, implementation)
    except ato_jax.UnsupportedError:
        return None
    beyond = []
    for measure in compare(call, jax.tree.map(np.asarray, found), exact):
        if not measure.ok:
            factor = max(measure.error / measure.limit, measure.worst_row / measure.row_limit)
            beyond.append(f"OVER x{factor:.2f} {implementation} {measure} | {call}")
    return beyond


def parser_of(description: str | None, ops: tuple[str, ...]) -> argparse.ArgumentParser:
    """A parser of the arguments that say which calls to draw, and for how long."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--implementation", default="xla", help="several with commas, or default")
    parser.add_argument("--seed", type=int, default=0, help="that of the first call")
    parser.add_argument("--calls", type=int, default=10**9)
    parser.add_argument("--longest", type=int, default=700, help="the largest T and S")
    parser.add_argument("--op", choices=ops)
    return parser


def names_of(implementation: str) -> list[str | None]:
    """The backends of `--implementation`. None is the default one."""
    return [None if name == "default" else name for name in implementation.split(",")]


def main() -> None:
    parser = parser_of(__doc__, OPS)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + options.seconds
    implementations = names_of(options.implementation)
    counts = dict.fromkeys(implementations, 0)
    failed, seed = 0, options.seed
    while seed < options.seed + options.calls and time.monotonic() < until:
        call = draw(seed, options.longest, options.op, options.dtype)
        seed += 1
        exact = oracle(call, torch.float64)
        if not fits(call, exact):
            continue
        for implementation in implementations:
            try:
                beyond = check(call, implementation, exact)
            except Exception as error:  # one more finding: the search goes on
                beyond = [f"RAISES {implementation} {error!r:.300} | {call}"]
            counts[implementation] += beyond is not None
            for line in beyond or ():
                failed += 1
                print(line, flush=True)
    done = ", ".join(f"{name or 'default'} {count}" for name, count in counts.items())
    print(f"seeds {options.seed} to {seed - 1}: {done} calls, {failed} results beyond", flush=True)


if __name__ == "__main__":
    main()
