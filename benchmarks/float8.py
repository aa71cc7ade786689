"""Calls on float8 inputs: how they are drawn and widened, cuDNN's kernel for them, their errors.

    values = x / scale, rounded to float8_e4m3fn        x is about values * scale

What is timed has one scale for every head, `SCALE`, since cuDNN's kernel takes one for each array.
What is compared with float64 has scales of its own for each head, as `ato_jax.quantize` gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ato_jax
from ato_jax.quantizing import FLOAT8
from benchmarks import cases

# Values up to 448 * SCALE, 7, are kept. Of the arrays that are timed, none of normal numbers has a
# larger one.
SCALE = 2.0**-6
# cuDNN rounds the weights, which are at most 1, to 8 bits once they are multiplied by this.
WEIGHTS = 2.0**8
# A right result stays below these, by operation: softmax attention's weights of 4 significant bits
# are off by up to 3e-2. cuDNN's output has 4 bits, too.
TOLERANCES = {"linear_attention": 1e-2, "attention": 4e-2}
TOLERANCE_OF_PEERS = 8e-2
# The largest error that the library aims at. It is measured against float64 on the same float8
# inputs.
LIMITS = {"linear_attention": 5e-3, "attention": 3e-2}

# Each of so many columns of q and k is made so many times larger: outliers.
COLUMNS, FACTOR = 4, 25
NORMAL, OUTLIERS = "normal", f"outliers: {COLUMNS} columns of q and k times {FACTOR}"
# So many queries of so many heads are compared with float64.
QUERIES, HEADS = 32, 2

Arrays = dict[str, Any]


def quantised(arrays: Mapping[str, Any], scale: float | None = None) -> Arrays:
    """q, k and v [B, T, H, D] in 8 bits, with their scales [B, H], and the rest as it is."""
    found = {name: array for name, array in arrays.items() if name not in ("q", "k", "v", "dout")}
    scales = []
    for name in "qkv":
        x = arrays[name]
        known = None if scale is None else jnp.full((x.shape[0], x.shape[2]), scale, jnp.float32)
        found[name], of_heads = ato_jax.quantize(x, (1, 3), scale=known)
        scales.append(of_heads)
    return found | {"scales": tuple(scales)}


def widened(arrays: Mapping[str, Any]) -> Arrays:
    """The arrays that a call without float8 takes: each value times its scale, in float32."""
    found = {name: array for name, array in arrays.items() if name != "scales"}
    for name, scale in zip("qkv", arrays["scales"], strict=True):
        found[name] = found[name].astype(jnp.float32) * scale[:, None, :, None]
    return found


def read(out: jax.Array) -> jax.Array:
    """An output in float32; one of 8 bits, which is cuDNN's alone, is a multiple of `SCALE`."""
    return out.astype(jnp.float32) * (SCALE if out.dtype == FLOAT8 else 1.0)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, *, scales: Any, causal: bool) -> jax.Array:
    """Softmax attention by cuDNN's forward kernel, whose output has 8 bits, too.

    `jax.nn.dot_product_attention` does not offer it: a module beside it does. Every scale is
    `SCALE`, so none of `scales` is read. No output exceeds the largest value of v, so that one's
    scale serves the output.
    """
    from jax._src.cudnn import fused_attention_stablehlo as kernels

    known = {
        **dict.fromkeys(("descale_q", "descale_k", "descale_v"), SCALE),
        "scale_s": WEIGHTS,
        "descale_s": 1 / WEIGHTS,
        "scale_o": 1 / SCALE,
    }
    params = {
        name: jnp.full((1, 1, 1, 1), known.get(name, 1.0), jnp.float32)
        for name in kernels.fp8_params_keys
    }
    mask = kernels.MaskType.CAUSAL if causal else kernels.MaskType.NO_MASK
    call: Any = kernels.dot_product_attention
    out, _, _ = call(
        *(q, k, v), fp8_params=params, scale=q.shape[-1] ** -0.5, mask_type=mask, use_fp8=True
    )
    return out


# Other libraries' functions of float8 inputs, by what a row says.
PEERS: dict[str, Callable[..., jax.Array]] = {"cuDNN float8": cudnn}


# -- errors --------------------------------------------------------------------------------------


def inputs(op: str, drawn: Mapping[str, Any]) -> dict[str, Arrays]:
    """By name: the arrays as they were drawn, normal numbers, and with outliers.

    Outliers make softmax attention's scores large, which would leave each query one key. So its q
    is multiplied by the power of two that brings their deviation back to about 1.
    """
    q, k, v = (drawn[name] for name in "qkv")
    D = q.shape[-1]
    larger = [x.at[..., :COLUMNS].multiply(FACTOR) for x in (q, k)]
    if op == "attention":
        deviation = ((D - COLUMNS + COLUMNS * FACTOR**4) / D) ** 0.5
        larger[0] = larger[0] * 2.0 ** -round(np.log2(deviation))
    return {
        NORMAL: {"q": q, "k": k, "v": v},
        OUTLIERS: {"q": larger[0], "k": larger[1], "v": v},
    }


def rotates(op: str, feature_map: str | None) -> bool:
    """Whether q and k may both be rotated, and the output stays as it is."""
    return op == "attention" or feature_map == "identity"


def compared(T: int) -> slice:
    """The queries that are compared: the last one of each stretch. The first queries of a causal
    call see few keys, so their outputs are large, and would hide the errors of all others.
    """
    every = max(1, T // QUERIES)
    return slice(every - 1, None, every)


def exact(op: str, causal: bool, feature_map: str | None, arrays: Mapping[str, Any]) -> np.ndarray:
    """[HEADS, queries, D] in float64, of the first batch entry."""
    given = [np.asarray(arrays[name][0, :, :HEADS], np.float64) for name in "qkv"]
    found = []
    for q, k, v in zip(*(np.moveaxis(x, 1, 0) for x in given), strict=True):
        rows = np.arange(len(k))[compared(len(k))]
        hidden = np.arange(len(k)) > rows[:, None] if causal else np.zeros((1, len(k)), bool)
        if op == "attention":
            scores = np.where(hidden, -np.inf, q[rows] @ k.T * q.shape[-1] ** -0.5)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
        else:
            phi = {"identity": lambda x: x, None: cases.phi}[feature_map]
            weights = np.where(hidden, 0, phi(q[rows]) @ phi(k).T)
        # Without the division by their sum, the weights are scaled as scores are.
        out = weights @ v * (q.shape[-1] ** -0.5 if feature_map == "identity" else 1)
        found.append(out if feature_map == "identity" else out / weights.sum(-1, keepdims=True))
    return np.stack(found)


def error(out: Any, wanted: np.ndarray) -> float:
    """The relative RMS error of the queries that `exact` gives."""
    rows = np.asarray(out[0, compared(out.shape[1]), :HEADS], np.float64)
    return float(np.linalg.norm(np.moveaxis(rows, 1, 0) - wanted) / np.linalg.norm(wanted))


SAME, BEFORE, ROTATED = "same inputs", "inputs not quantised", "rotated"


def errors(
    op: str,
    causal: bool,
    feature_map: str | None,
    drawn: Mapping[str, Any],
    own: Callable[[Arrays], Any],
    base: Callable[[Arrays], Any],
) -> tuple[dict[str, float], dict[str, float]]:
    """The errors against float64 of a call on float8 inputs, and of the same on wide ones.

    Args:
      op, causal, feature_map: what the call is. "identity" is not normalised, None is elu + 1.
      drawn: wide q, k and v, [B, T, H, D].
      own, base: from arrays of 8 bits, and from wide ones, to the output.

    Returns:
      By the inputs' name, `SAME` or `BEFORE` and maybe `ROTATED`, as `name_of` puts them together,
      the errors of `own`; and by the inputs' name those of `base`.
    """
    of_own, of_base = {}, {}
    for name, wide in inputs(op, drawn).items():
        wanted = exact(op, causal, feature_map, wide)
        of_base[name] = error(base(wide | {"dout": wide["q"]}), wanted)
        for rotated in (False, True) if rotates(op, feature_map) else (False,):
            turn = ato_jax.rotate if rotated else lambda x: x
            narrow = quantised({"q": turn(wide["q"]), "k": turn(wide["k"]), "v": wide["v"]})
            out = own(narrow)
            same = exact(op, causal, feature_map, widened(narrow))
            of_own[name_of(name, SAME, rotated)] = error(out, same)
            of_own[name_of(name, BEFORE, rotated)] = error(out, wanted)
    return of_own, of_base


def name_of(name: str, against: str, rotated: bool) -> str:
    return f"{name}; {against}" + f"; {ROTATED}" * rotated
