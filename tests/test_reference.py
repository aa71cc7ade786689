"""The references against double loops over i and j, written from the contract and not from them.

Outputs are compared directly, gradients by a derivative along a random direction: the loops'
central difference against the reference's gradients.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax.ops.attention.spec import dropout_keep
from tests import numerics

B, T, S, H, G, D, V = 2, 5, 7, 4, 2, 3, 2


def generator() -> np.random.Generator:
    return np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return generator().normal(size=shape).astype(np.float32)


def gates(*shape: int) -> np.ndarray:
    return -np.abs(generator().normal(size=shape)).astype(np.float32)


# -- linear attention ----------------------------------------------------------------------------

PHI = {
    "elu1": lambda x: x + 1 if x > 0 else math.exp(x),
    "relu": lambda x: max(x, 0.0),
    "exp": math.exp,
    "softplus": lambda x: math.log1p(math.exp(x)),
    "identity": lambda x: x,
    "silu": lambda x: x / (1 + math.exp(-x)),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


def features(feature_map: Any, x: np.ndarray) -> np.ndarray:
    """phi of one vector."""
    if isinstance(feature_map, str):
        return np.array([PHI[feature_map](float(value)) for value in x])
    projection = np.asarray(feature_map.projection, np.float64)
    x = x / len(x) ** 0.25
    return np.array([math.exp(w @ x - x @ x / 2) / math.sqrt(len(projection)) for w in projection])


def runs(ids: np.ndarray, length: int) -> list[tuple[int, int]]:
    """Each position's run as (id, how many runs of that id come after it)."""
    starts = [i for i in range(length) if i == 0 or ids[i] != ids[i - 1]]
    named = []
    for i in range(length):
        own = max(start for start in starts if start <= i)
        later = sum(1 for start in starts if start > own and ids[start] == ids[i])
        named.append((int(ids[i]), later))
    return named


def linear_loops(
    arrays: dict[str, Any],
    *,
    feature_map: Any = "elu1",
    causal: bool = False,
    normalize: bool | None = None,
    scale: float | None = None,
    eps: float = 1e-6,
    q_ids: Any = None,
    kv_ids: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
) -> dict[str, np.ndarray]:
    """Everything [B, T, H, D]; q_ids and kv_ids the same object where they serve both sides."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    batch, queries, heads, size = q.shape
    keys, groups, values = v.shape[1:]
    if normalize is None:
        normalize = feature_map not in ("identity", "silu")
    if scale is None:
        scale = size**-0.5
    if queries == keys and q_lengths is None:
        q_lengths = kv_lengths
    if queries == keys and kv_lengths is None:
        kv_lengths = q_lengths
    width = len(features(feature_map, np.zeros(size)))
    decay = arrays.get("decay")
    out = np.zeros((batch, queries, heads, values))
    state_kv = np.zeros((batch, groups, width, values))
    state_k_sum = np.zeros((batch, groups, width))
    for b in range(batch):
        q_length = queries if q_lengths is None else int(q_lengths[b])
        kv_length = keys if kv_lengths is None else int(kv_lengths[b])
        q_runs = runs(q_ids[b] if q_ids is not None else np.zeros(queries, int), q_length)
        kv_runs = runs(kv_ids[b] if kv_ids is not None else np.zeros(keys, int), kv_length)

        def step(j: int, g: int, b: int = b) -> Any:
            if decay is None:
                return np.zeros(width)
            if decay.ndim == 1:
                return np.full(width, decay[g])
            return np.broadcast_to(decay[b, j, g], (width,))

        for h in range(heads):
            g = h // (heads // groups)
            if "initial_state" in arrays:
                before_kv, before_k_sum = (part[b, g] for part in arrays["initial_state"])
            else:
                before_kv, before_k_sum = np.zeros((width, values)), np.zeros(width)
            for i in range(q_length):
                position = i + kv_length - q_length if causal else i
                numerator, denominator = np.zeros(values), 0.0
                for j in range(kv_length):
                    if q_runs[i] != kv_runs[j] or causal and j > position:
                        continue
                    between = range(min(position, j) + 1, max(position, j) + 1)
                    factor = np.ones(width)
                    if decay is not None:
                        for step_between in between:
                            factor = factor * np.exp(step(step_between, g))
                    weight = np.sum(
                        features(feature_map, q[b, i, h])
                        * features(feature_map, k[b, j, g])
                        * factor
                    )
                    numerator += weight * v[b, j, g]
                    denominator += weight
                # What came before belongs to the keys' first run.
                if kv_length and q_runs[i] == kv_runs[0] or not kv_length and kv_ids is None:
                    factor = np.ones(width)
                    if decay is not None:
                        for step_between in range(min(position + 1, kv_length)):
                            factor = factor * np.exp(step(step_between, g))
                    mapped = features(feature_map, q[b, i, h]) * factor
                    if not causal or position >= -1:
                        numerator += mapped @ before_kv
                        denominator += mapped @ before_k_sum
                if normalize:
                    out[b, i, h] = numerator / max(denominator, eps)
                else:
                    out[b, i, h] = scale * numerator
            kv, k_sum, run = before_kv, before_k_sum, kv_runs[0] if kv_length else None
            for j in range(kv_length):
                if kv_runs[j] != run:
                    kv, k_sum, run = np.zeros_like(kv), np.zeros_like(k_sum), kv_runs[j]
                mapped, factor = features(feature_map, k[b, j, g]), np.exp(step(j, g))
                kv = factor[:, None] * kv + np.outer(mapped, v[b, j, g])
                k_sum = factor * k_sum + mapped
            state_kv[b, g], state_k_sum[b, g] = kv, k_sum
    return {"out": out, "state_kv": state_kv, "state_k_sum": state_k_sum}


def ids(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int32)


RETURNING = ids([3, 3, 1, 3, 3], [2, 1, 1, 1, 2])
Q_IDS = ids([1, 1, 2, 1, 5], [4, 2, 2, 3, 3])
KV_IDS = ids([1, 2, 2, 1, 1, 2, 1], [2, 2, 3, 4, 3, 3, 3])


def state() -> ato_jax.LinearState:
    draw = np.random.default_rng(3).uniform(0.5, 1.5, size=(B, G, D, V + 1)).astype(np.float32)
    return ato_jax.LinearState(jnp.asarray(draw[..., :V]), jnp.asarray(draw[..., V]))


MIXED = gates(B, T, G, D)
MIXED[0, 1, 0] = 0.0
MIXED[0, 3, :, 1] = -50.0
MIXED[1, 2] = -np.inf

SQUARE = {"square": True}
LINEAR_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal square": SQUARE | {"causal": True},
    "causal more queries": {"causal": True, "swap": True},
    "lengths": {"q_lengths": [5, 2], "kv_lengths": [3, 7]},
    "lengths causal": {"q_lengths": [4, 5], "kv_lengths": [6, 0], "causal": True},
    "lengths causal, some see nothing": {"q_lengths": [5, 3], "kv_lengths": [2, 1], "causal": True},
    "one length gives both": SQUARE | {"kv_lengths": [3, 5]},
    "one length gives both, causal": SQUARE | {"q_lengths": [0, 4], "causal": True},
    "two lengths, T = S": SQUARE | {"q_lengths": [2, 5], "kv_lengths": [4, 3], "causal": True},
    "segments that return": SQUARE | {"segment_ids": RETURNING},
    "segments that return, causal": SQUARE | {"segment_ids": RETURNING, "causal": True},
    "segments on each side": {"q_segment_ids": Q_IDS, "kv_segment_ids": KV_IDS},
    "segments on each side, causal": {
        "q_segment_ids": Q_IDS,
        "kv_segment_ids": KV_IDS,
        "causal": True,
    },
    "segments and lengths": {
        "q_segment_ids": Q_IDS,
        "kv_segment_ids": KV_IDS,
        "q_lengths": [4, 3],
        "kv_lengths": [6, 5],
    },
    "decay per head": SQUARE | {"decay": gates(G)},
    "decay per head, causal": {"decay": gates(G), "causal": True},
    "decay per step": SQUARE | {"decay": gates(B, T, G)},
    "decay per step, causal": {"decay": gates(B, S, G), "causal": True},
    "decay per channel": SQUARE | {"decay": gates(B, T, G, D)},
    "decay per channel, causal": {"decay": gates(B, S, G, D), "causal": True},
    "decay 0, -50, -inf": SQUARE | {"decay": MIXED},
    "decay 0, -50, -inf, causal": SQUARE | {"decay": MIXED, "causal": True},
    "decay 0": SQUARE | {"decay": np.zeros((B, T, G), np.float32)},
    "decay, lengths, segments, causal": SQUARE
    | {"decay": gates(B, T, G, D), "causal": True, "q_lengths": [3, 5], "segment_ids": RETURNING},
    "decay, lengths, segments": SQUARE
    | {"decay": gates(B, T, G), "q_lengths": [4, 5], "segment_ids": RETURNING},
    "state": {"initial_state": state()},
    "state, lengths": {"initial_state": state(), "kv_lengths": [0, 4]},
    "state, causal": SQUARE | {"initial_state": state(), "causal": True},
    "state, decay, causal": SQUARE
    | {"initial_state": state(), "causal": True, "decay": gates(B, T, G, D)},
    "state, decay": SQUARE | {"initial_state": state(), "decay": gates(B, T, G)},
    "state, segments, causal": SQUARE
    | {"initial_state": state(), "causal": True, "segment_ids": RETURNING, "decay": gates(G)},
    "state, segments, lengths, causal": SQUARE
    | {"initial_state": state(), "causal": True, "segment_ids": RETURNING, "q_lengths": [2, 0]},
    "scale": {"normalize": False, "scale": 0.3},
    "default scale": {"normalize": False},
    "eps": {"eps": 5.0},
    "normalised identity": {"feature_map": "identity", "normalize": True, "eps": 1.0},
    "favor": {"feature_map": ato_jax.favor(jax.random.key(1), 5, D)},
} | {name: {"feature_map": name} for name in PHI if name != "elu1"}


def along(arrays: dict[str, Any], seed: int) -> dict[str, Any]:
    """A random direction; 0 where an entry is infinite."""
    draw = np.random.default_rng(seed)

    def one(array: Any) -> np.ndarray:
        array = np.asarray(array, np.float64)
        return np.where(np.isfinite(array), draw.normal(size=array.shape), 0.0)

    return {
        name: tuple(map(one, array)) if isinstance(array, tuple) else one(array)
        for name, array in arrays.items()
    }


def moved(arrays: dict[str, Any], direction: dict[str, Any], by: float) -> dict[str, Any]:
    def one(array: Any, change: Any) -> np.ndarray:
        return np.asarray(array, np.float64) + by * change

    return {
        name: tuple(map(one, array, direction[name]))
        if isinstance(array, tuple)
        else one(array, direction[name])
        for name, array in arrays.items()
    }


def agrees(wanted: numerics.Oracle, loops: Any) -> None:
    """Outputs and the derivative along a direction, loops against the reference."""
    nowhere = along(wanted.arrays, 0)
    found = loops(moved(wanted.arrays, nowhere, 0.0))
    exact = wanted.exact
    for name in set(exact) & set(found):
        np.testing.assert_allclose(exact[name], found[name], rtol=1e-10, atol=1e-12, err_msg=name)

    direction = along(wanted.arrays, 1)
    by = 1e-6
    above, below = (loops(moved(wanted.arrays, direction, sign * by)) for sign in (1, -1))
    cotangents = {"out": wanted.cotangents}
    if isinstance(wanted.cotangents, tuple):
        rest = wanted.cotangents[1]
        cotangents = {"out": wanted.cotangents[0]}
        cotangents |= (
            {"state_kv": rest.kv, "state_k_sum": rest.k_sum}
            if isinstance(rest, tuple)
            else {"lse": rest}
        )
    slope, size = 0.0, 0.0
    for name, cotangent in cotangents.items():
        infinite = np.isinf(found[name])
        difference = np.where(infinite, 0, above[name] - np.where(infinite, 0, below[name]))
        # Padding has NaN for a cotangent.
        cotangent = np.nan_to_num(np.asarray(cotangent, np.float64))
        slope += float(np.sum(cotangent * difference)) / (2 * by)
    predicted = 0.0
    for name, change in direction.items():
        parts = zip(
            ("dstate_kv", "dstate_k_sum") if isinstance(change, tuple) else (f"d{name}",),
            change if isinstance(change, tuple) else (change,),
            strict=True,
        )
        for gradient, part in parts:
            assert np.isfinite(exact[gradient]).all(), gradient
            predicted += float(np.sum(exact[gradient] * part))
            size += float(np.sum(np.abs(exact[gradient] * part)))
    assert abs(slope - predicted) <= 1e-6 * size + 1e-8, (slope, predicted)


@pytest.mark.parametrize("case", LINEAR_CASES)
def test_linear_attention(case: str) -> None:
    options = dict(LINEAR_CASES[case])
    queries, keys = (T, T) if options.pop("square", False) else (T, S)
    if options.pop("swap", False):
        queries, keys = S, T
    draw = generator()
    q, k, v = (
        draw.normal(size=shape).astype(np.float32)
        for shape in ((B, queries, H, D), (B, keys, G, D), (B, keys, G, V))
    )
    returns_state = queries == keys or not options.get("causal", False)
    wanted = numerics.oracle(
        "linear_attention",
        q,
        k,
        v,
        return_state=returns_state,
        **{
            name: np.array(value) if "lengths" in name else value for name, value in options.items()
        },
    )
    static = {
        name: value for name, value in options.items() if name not in ("decay", "initial_state")
    }
    if "segment_ids" in static:
        static["q_ids"] = static["kv_ids"] = static.pop("segment_ids")
    for side in ("q", "kv"):
        if f"{side}_segment_ids" in static:
            static[f"{side}_ids"] = static.pop(f"{side}_segment_ids")
    agrees(wanted, lambda arrays: linear_loops(arrays, **static))


# -- softmax attention ---------------------------------------------------------------------------


def attention_loops(
    arrays: dict[str, Any],
    *,
    causal: bool = False,
    window: Any = (None, None),
    query_offset: Any = None,
    mask: Any = None,
    q_ids: Any = None,
    kv_ids: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    seed: Any = None,
) -> dict[str, np.ndarray]:
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    batch, queries, heads, size = q.shape
    keys, groups, values = v.shape[1:]
    scale = size**-0.5 if scale is None else scale
    if queries == keys and q_lengths is None:
        q_lengths = kv_lengths
    if queries == keys and kv_lengths is None:
        kv_lengths = q_lengths
    full = (batch, heads, queries, keys)
    bias = np.broadcast_to(arrays.get("bias", 0.0), full)
    mask = np.broadcast_to(True if mask is None else mask, full)
    out = np.zeros((batch, queries, heads, values))
    lse = np.full((batch, queries, heads), -np.inf)
    for b in range(batch):
        q_length = queries if q_lengths is None else int(q_lengths[b])
        kv_length = keys if kv_lengths is None else int(kv_lengths[b])
        first = kv_length - q_length
        if query_offset is not None:
            first = int(np.broadcast_to(query_offset, (batch,))[b])
        for h in range(heads):
            g = h // (heads // groups)
            for i in range(queries):
                logits, seen = [], []
                for j in range(kv_length):
                    position = first + i
                    left, right = window
                    hidden = (
                        i >= q_length
                        or (causal and j > position)
                        or (left is not None and j < position - left)
                        or (right is not None and j > position + right)
                        or (q_ids is not None and q_ids[b, i] != kv_ids[b, j])
                        or not mask[b, h, i, j]
                        or bias[b, h, i, j] == -np.inf
                    )
                    if hidden:
                        continue
                    score = scale * (q[b, i, h] @ k[b, j, g])
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    logits.append(score + bias[b, h, i, j])
                    seen.append(j)
                if "sinks" in arrays:
                    logits.append(arrays["sinks"][h])
                if not logits:
                    continue
                lse[b, i, h] = math.log(sum(math.exp(x) for x in logits))
                for j, score in zip(seen, logits, strict=False):
                    weight = math.exp(score - lse[b, i, h])
                    if dropout_rate:
                        keep = bool(dropout_keep(dropout_rate, seed, b, h, i, j))
                        weight = weight * keep / (1 - dropout_rate)
                    out[b, i, h] += weight * v[b, j, g]
    return {"out": out, "lse": lse}


def hiding_bias(*shape: int) -> np.ndarray:
    bias = normal(*shape)
    bias[generator().uniform(size=shape) < 0.3] = -np.inf
    return bias


def some(*shape: int) -> np.ndarray:
    return generator().uniform(size=shape) < 0.6


NOTHING_SEEN = np.ones((T, S), bool)
NOTHING_SEEN[1:3] = False

ATTENTION_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal square": SQUARE | {"causal": True},
    "causal more queries": {"causal": True, "swap": True},
    "lengths": {"q_lengths": [5, 2], "kv_lengths": [3, 0]},
    "lengths causal": {"q_lengths": [4, 5], "kv_lengths": [6, 2], "causal": True},
    "one length gives both, causal": SQUARE | {"kv_lengths": [3, 5], "causal": True},
    "two lengths, T = S": SQUARE | {"q_lengths": [2, 5], "kv_lengths": [4, 3], "causal": True},
    "window": {"window": (1, 1)},
    "window left": {"window": (2, None)},
    "window right": {"window": (None, 0)},
    "window causal": {"window": (2, 3), "causal": True},
    "window lengths": {"window": (1, 0), "q_lengths": [3, 5], "kv_lengths": [7, 4]},
    "offset 0": {"query_offset": 0, "causal": True},
    "offset": {"query_offset": 3, "causal": True, "window": (2, None)},
    "offset negative": {"query_offset": -2, "causal": True},
    "offset beyond": {"query_offset": 9, "window": (3, None)},
    "offset per entry": {"query_offset": np.array([1, 4]), "causal": True},
    "offset and lengths": {"query_offset": np.array([1, 0]), "causal": True, "kv_lengths": [5, 7]},
    "bias": {"bias": normal(B, H, T, S)},
    "bias over heads": {"bias": normal(1, 1, T, S)},
    "bias over queries": {"bias": normal(B, 1, 1, S)},
    "bias over all": {"bias": normal(1, 1, 1, 1)},
    "bias of two axes": {"bias": normal(T, S)},
    "bias that hides": {"bias": hiding_bias(B, H, T, S)},
    "bias that hides all": {"bias": np.full((1, 1, 1, 1), -np.inf, np.float32)},
    "mask": {"mask": some(B, H, T, S)},
    "mask over heads": {"mask": some(B, 1, 1, S)},
    "rows that see nothing": {"mask": NOTHING_SEEN},
    "rows that see nothing but a sink": {"mask": NOTHING_SEEN, "sinks": normal(H)},
    "segments that return": SQUARE | {"segment_ids": RETURNING},
    "segments that return, causal": SQUARE | {"segment_ids": RETURNING, "causal": True},
    "segments on each side": {"q_segment_ids": Q_IDS, "kv_segment_ids": KV_IDS},
    "softcap": {"softcap": 0.7},
    "softcap, bias": {"softcap": 0.7, "bias": hiding_bias(B, 1, T, S)},
    "sinks": {"sinks": normal(H)},
    "scale": {"scale": 1.7},
    "dropout": {"dropout_rate": 0.4},
    "dropout, sinks, causal": {"dropout_rate": 0.2, "sinks": normal(H), "causal": True},
    "everything": {
        "causal": True,
        "window": (4, None),
        "q_segment_ids": Q_IDS,
        "kv_segment_ids": KV_IDS,
        "q_lengths": [5, 4],
        "kv_lengths": [6, 7],
        "bias": hiding_bias(1, H, T, S),
        "mask": some(B, 1, T, S),
        "softcap": 2.0,
        "sinks": normal(H),
        "scale": 0.9,
        "dropout_rate": 0.3,
    },
}


@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_attention(case: str) -> None:
    options = dict(ATTENTION_CASES[case])
    queries, keys = (T, T) if options.pop("square", False) else (T, S)
    if options.pop("swap", False):
        queries, keys = S, T
    draw = generator()
    q, k, v = (
        draw.normal(size=shape).astype(np.float32)
        for shape in ((B, queries, H, D), (B, keys, G, D), (B, keys, G, V))
    )
    if "dropout_rate" in options:
        options["dropout_key"] = jax.random.key(5)
    wanted = numerics.oracle(
        "attention",
        q,
        k,
        v,
        return_lse=True,
        **{
            name: np.array(value) if "lengths" in name else value for name, value in options.items()
        },
    )
    static = {
        name: value
        for name, value in options.items()
        if name not in ("bias", "sinks", "dropout_key")
    }
    if "segment_ids" in static:
        static["q_ids"] = static["kv_ids"] = static.pop("segment_ids")
    for side in ("q", "kv"):
        if f"{side}_segment_ids" in static:
            static[f"{side}_ids"] = static.pop(f"{side}_segment_ids")
    seed = wanted.request.inputs.dropout_seed
    agrees(wanted, lambda arrays: attention_loops(arrays, seed=seed, **static))


def test_dropout_keeps_its_share() -> None:
    """The share kept is 1 - rate, and neighbours in every axis are independent."""
    seed = jnp.array([123, 456], jnp.uint32)
    b, h, i, j = jnp.ogrid[:4, :4, :64, :64]
    keep = np.asarray(dropout_keep(0.25, seed, b, h, i, j), np.float64)
    assert abs(keep.mean() - 0.75) < 0.01
    centred = keep - 0.75
    for axis in range(4):
        neighbour = np.roll(centred, 1, axis)
        assert abs(np.mean(centred * neighbour)) < 0.01
    other = np.asarray(dropout_keep(0.25, seed + 1, b, h, i, j), np.float64) - 0.75
    assert abs(np.mean(centred * other)) < 0.01
