"""Covering arrays over the options of calls whose 8 bits Hopper's kernels read.

    python -m tests.covering_float8                     prints the rows of each array
    python -m tests.covering_float8 attention 0 5 11    compiles rows for a card, without one

Rows are those of `tests/covering.py`: every pair of values that can go together stands in some row.
Their arrays are drawn in bfloat16 and rounded to 8 bits, with scales that are powers of two, or are
not. A row is right on a card if each output is within its limit beside float64 on the values times
their scales.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ato_jax
from tests import aot, aot_covering, aot_mosaic, covering, numerics
from tests.aot_covering import Rows
from tests.aot_mosaic import Compiled
from tests.calls import Call
from tests.covering import (
    HEADS,
    LAYOUTS,
    MOSAIC_ATTENTION_LENGTHS,
    MOSAIC_GRADIENTS,
    NORMALIZER_RULE,
    Row,
    Rule,
    Space,
)

BACKEND, READER = "mosaic_gpu", "mosaic_gpu.float8"
# Relative RMS errors of outputs and states, as in benchmarks/float8.py. Softmax attention rounds
# its weights to 8 bits as well.
LIMITS = {"attention": 3e-2, "linear_attention": 5e-3}
# The limit of lse's error, as a share of the largest score that the norms of q and k allow. Tensor
# cores keep about 13 bits of a sum of products of 8 bits. On an H200 the largest error was 0.8 to
# 0.9 of 2^-13 of that score.
LSE_LIMIT = 2.0**-12
# Widened values are rounded to bfloat16 where a scale is no power of two.
WIDENED_LSE = 5e-2
# Those of `quantize`, and some that are no powers of two.
SCALES = {"powers of two": (1.0, 1.0, 1.0), "any": (1.1, 0.9, 1.7)}
OUT_DTYPES = (None, "float16")

# Those of wide arrays, with whole blocks and with tails.
ATTENTION_LENGTHS = {
    name: MOSAIC_ATTENTION_LENGTHS[name]
    for name in ("T = S, whole blocks", "T < S", "T > S", "odd", "T = 1", "long")
}
ATTENTION = Space(
    "attention",
    {
        "lengths": tuple(ATTENTION_LENGTHS),
        "padding": ("none", "kv", "both"),
        "sight": ("every key", "causal", "window", "left window", "causal window"),
        "query_offset": ("none", "int", "array"),
        "segments": ("none", "cross", "self"),
        "bias": ("none", "BS", "H", "BHTS"),
        "mask": ("none", "BS", "TS"),
        "widths": ((128, 128), (64, 64), (256, 256), (96, 80), (192, 128)),
        "heads": tuple(HEADS),
        "scales": tuple(SCALES),
        "out_dtype": OUT_DTYPES,
        "softcap": (None, 1.5),
        "sinks": (False, True),
        "scale": (None, 0.2),
        "dropout": (False, True),
        "return_lse": (False, True),
        "layout": LAYOUTS,
        "batched": (True, False),
        "x64": (False, True),
    },
    rules=MOSAIC_GRADIENTS.rules,  # those of wide arrays with positive scales
    backend=BACKEND,
)

# B, T, S: chunks have 64 rows, and pieces several chunks.
LINEAR_LENGTHS = {
    "whole chunks": (2, 256, 256),
    "odd": (2, 203, 203),
    "one chunk": (1, 64, 64),
    "long": (1, 1096, 1096),
    "T < S": (2, 72, 328),
    "T > S": (2, 328, 72),
}
UNEQUAL = ("T < S", "T > S")
LINEAR_ATTENTION = Space(
    "linear_attention",
    {
        "lengths": tuple(LINEAR_LENGTHS),
        "padding": ("none", "kv", "both"),
        "feature_map": ("elu1", "exp", "silu", "tanh", "relu"),
        "causal": (False, True),
        "initial_state": (False, True),
        "return_state": (False, True),
        "normalize": (None, False),
        "scale": (None, 0.7, -0.7),
        "widths": ((128, 128), (64, 64), (80, 80), (128, 64), (48, 48)),
        "heads": ("H = G", "pairs", "one key head"),
        "scales": tuple(SCALES),
        "out_dtype": OUT_DTYPES,
        "eps": (1e-6, 0.5),
        "layout": LAYOUTS,
        "batched": (True, False),
        "x64": (False, True),
    },
    rules=(
        NORMALIZER_RULE,
        Rule(
            ("causal", "lengths"),
            lambda causal, lengths: causal and lengths in UNEQUAL,
            "needs T = S where causal",
        ),
        Rule(
            ("padding", "causal"),
            lambda padding, causal: padding == "both" and causal,
            "does not support lengths of queries and keys that differ with causal=True",
        ),
        Rule(
            ("widths", "causal"),
            lambda widths, causal: widths == (48, 48) and not causal,
            "needs D and V",
        ),
        # Two heads share a tile, and with one key head another kernel takes wide arrays.
        Rule(
            ("widths", "heads", "causal"),
            lambda widths, heads, causal: max(widths) <= 64 and heads == "one key head" and causal,
            None,
        ),
    ),
    backend=BACKEND,
)
SPACES = {"attention": ATTENTION, "linear_attention": LINEAR_ATTENTION}
LENGTHS = {"attention": ATTENTION_LENGTHS, "linear_attention": LINEAR_LENGTHS}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A call's arguments: q, k and v of 8 bits, all others by name, and what the values stand for,
    in float32."""

    values: list[jax.Array]
    options: dict[str, Any]
    products: list[jax.Array]


def arguments_of(space: Space, row: Row) -> Arguments:
    call = _call_of(space, row)
    arrays, options = call.arguments()
    first = 1 if row["batched"] else 0
    time = first + (0 if row["layout"] == "bthd" else 1)
    values, scales, products = [], [], []
    for array, factor in zip(arrays, SCALES[row["scales"]], strict=True):
        found, scale = ato_jax.quantize(array, (time, first + 2))
        values.append(found)
        scales.append(scale * jnp.float32(factor))
        products.append(found.astype(jnp.float32) * jnp.expand_dims(scales[-1], (time, first + 2)))
    options |= {"scales": tuple(scales)}
    options |= {} if row["out_dtype"] is None else {"out_dtype": row["out_dtype"]}
    return Arguments(values, options, products)


def _call_of(space: Space, row: Row) -> Call:
    """The row as a call on wide arrays, which are drawn by the row's sizes."""
    B, T, S = LENGTHS[space.op][row["lengths"]]
    sizes = B if row["batched"] else 1, T, S, *HEADS[row["heads"]], *row["widths"]
    seed = math.prod(sizes) % 997
    call = Call(
        space.op, sizes, "bfloat16", 1.0, seed, layout=row["layout"], batched=row["batched"]
    )
    for side in ("q", "kv"):
        if row["padding"] in (side, "both"):
            call.arrays[f"{side}_lengths"] = "drawn"
            call.poisoned = True
    kind = row.get("segments", "none")
    if kind != "none":
        call.arrays["segment_ids" if kind == "self" else "q_segment_ids"] = "runs"
    if space.op == "attention":
        covering._attention(call, row)
    else:
        covering._linear_attention(call, row | {"decay": "none"})
        if row["out_dtype"] == "float16":
            call.magnitude = 0.3  # sums that are not normalized stay within float16's range
    return call


def program(space: Space, row: Row) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function of the row's arrays, all of which are traced, and the arrays."""
    arguments = arguments_of(space, row)
    given = dict(zip("qkv", arguments.values, strict=True)) | arguments.options
    traced = {
        name: jax.tree.map(jnp.asarray, value)
        for name, value in given.items()
        if any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value))
    }
    static = {name: value for name, value in given.items() if name not in traced}
    call = functools.partial(getattr(ato_jax, space.op), **static, implementation=BACKEND)
    return lambda traced: call(**traced), traced


def lower(space: Space, row: Row) -> list[str]:
    """The targets of the custom calls that the row lowers to for a Hopper card."""
    with covering.as_on_a_card(row) as capability:
        function, traced = program(space, row)
        return aot.targets_of_calls(aot.lower(function, traced, capability=capability))


def explained(space: Space, row: Row) -> Any:
    """What runs the row on a Hopper card."""
    arrays, options = _call_of(space, row).arguments()
    first = 1 if row["batched"] else 0
    heads = first + (1 if row["layout"] == "bthd" else 0)
    values = [jax.ShapeDtypeStruct(array.shape, "float8_e4m3fn") for array in arrays]
    scales = [
        jax.ShapeDtypeStruct((*array.shape[:first], array.shape[heads]), "float32")
        for array in arrays
    ]
    options |= {"scales": scales, "out_dtype": row["out_dtype"], "implementation": BACKEND}
    with covering.as_on_a_card(row):
        return ato_jax.explain(space.op, *values, **options)


def in_float64(op: str, arguments: Arguments) -> dict[str, Any]:
    """The outputs, and gradients, by name: those of the values times their scales."""
    options = {
        name: value
        for name, value in arguments.options.items()
        if name not in ("scales", "out_dtype")
    }
    return numerics.oracle(op, *arguments.products, **options).exact


def check(space: Space, row: Row, implementation: str = BACKEND) -> None:
    """Every output of the public function within its limit. Hopper's kernels read the 8 bits, and
    for another backend they are widened."""
    with jax.enable_x64(row["x64"]):
        arguments = arguments_of(space, row)
        options = arguments.options | {"implementation": implementation}
        told = ato_jax.explain(space.op, *arguments.values, **options)
        is_read = told.implementation == READER
        assert is_read == (implementation == BACKEND), str(told)
        result = getattr(ato_jax, space.op)(*arguments.values, **options)
    found = numerics.named_outputs(space.op, result)
    assert found["out"].dtype == (row["out_dtype"] or "bfloat16")
    lse_limit = LSE_LIMIT * largest_score(arguments) if is_read else WIDENED_LSE
    compare(space.op, found, in_float64(space.op, arguments), lse_limit)


def largest_score(arguments: Arguments) -> float:
    """The scale times the largest norm of a query and of a key, without padding, which is NaN."""
    q, k = (np.asarray(array, np.float64) for array in arguments.products[:2])
    norms = [float(np.nanmax(np.linalg.norm(array, axis=-1))) for array in (q, k)]
    scale = arguments.options.get("scale")
    return (q.shape[-1] ** -0.5 if scale is None else scale) * norms[0] * norms[1]


def compare(op: str, found: dict[str, Any], exact: dict[str, Any], lse_limit: float) -> None:
    for name, array in found.items():
        error = error_of(name, array, exact[name])
        limit = lse_limit if name == "lse" else LIMITS[op]
        assert error < limit, f"{name}: {error:.1e} of {limit:.0e}"


def error_of(name: str, array: Any, exact: Any) -> float:
    """The largest error of lse, and the relative RMS error of everything else."""
    actual, wanted = np.asarray(array, np.float64), np.asarray(exact, np.float64)
    if name == "lse":
        same = actual == wanted  # -inf where nothing is seen
        difference = np.abs(np.where(same, 0, actual) - np.where(same, 0, wanted))
        return float(difference.max(initial=0))
    return float(np.linalg.norm(actual - wanted) / max(np.linalg.norm(wanted), 1e-30))


# -- compiled without a card ---------------------------------------------------------------------


def compile_rows(rows: Rows) -> list[Compiled]:
    """The kernels of rows of `SPACES[rows.name]`."""
    return aot_mosaic.compiled_kernels(aot_mosaic.printed_by("tests.covering_float8", rows))


def main(rows: Rows) -> None:
    aot_covering.compile_each(SPACES[rows.name], rows.numbers, program)


def run(*arguments: str) -> None:
    """As `aot_covering.command`, by an op's name; without arguments prints all rows."""
    if not arguments:
        for name, space in SPACES.items():
            print(f"{name}: {len(covering.rows(space))} rows")
            for n, row in enumerate(covering.rows(space)):
                print(f"  {n}: {covering.label(row)}")
        return
    aot_covering.command(arguments, main, compile_rows)


if __name__ == "__main__":
    run(*sys.argv[1:])
