"""Random calls on float8 inputs, forward alone, against the oracle of `random_calls.py`.

    python -m tests.random_float8 --seconds=60 [--implementation=mosaic_gpu,default] [--seed=0]

Calls are those of `random_calls`, drawn in bfloat16, with q, k and v rounded to 8 bits. Scales are
powers of two, with which widened arrays are exact, and the oracle has values times scales. Where
a kernel reads the 8 bits an output's RMS error may be LIMITS, and where arrays are widened it is
bfloat16's budget (`numerics.py`). NaN in padding stays, in 8 bits too. On a CPU kernels are
interpreted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import ato_jax
from tests import numerics, random_calls
from tests.covering_float8 import LIMITS, LSE_LIMIT, error_of
from tests.random_calls import Call

OPS = ("attention", "linear_attention")
FLOAT8 = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(FLOAT8).max)


def draw(seed: int, longest: int = 700, op: str | None = None) -> Call:
    """A call whose q, k and v are values of 8 bits times `scales` [B, heads], in float64."""
    chosen = OPS[seed // random_calls.CALLS_ALIKE % len(OPS)] if op is None else op
    call = random_calls.draw(seed, longest, chosen, "bfloat16")
    arrays = {}
    for name in "qkv":
        values = np.asarray(call.arrays[name], np.float64)  # [B, T, H, D]
        largest = np.nanmax(np.abs(values), axis=(1, 3), initial=2.0**-60)
        scale = 2.0 ** np.ceil(np.log2(largest / LARGEST))
        rounded = (values / scale[:, None, :, None]).astype(FLOAT8).astype(np.float64)
        arrays[name] = rounded * scale[:, None, :, None]
        arrays[f"{name}_scale"] = scale
    scales = [arrays.pop(f"{name}_scale") for name in "qkv"]
    facts = call.facts | {"scales": np.log2(scales[0][0]).tolist()}
    call = dataclasses.replace(call, arrays=call.arrays | arrays, facts=facts)
    return dataclasses.replace(call, options=call.options | {"scales": scales})


def split(call: Call) -> tuple[Call, list[np.ndarray]]:
    """The call as the oracle takes it, and its scales."""
    options = dict(call.options)
    scales = options.pop("scales")
    return dataclasses.replace(call, options=options), scales


def exact(call: Call) -> dict[str, np.ndarray]:
    """The outputs in float64, without gradients."""
    found = random_calls.oracle(split(call)[0], torch.float64)
    return {name: array for name, array in found.items() if not name.startswith("d")}


def run(call: Call, implementation: str | None) -> tuple[dict[str, Any], bool]:
    """The outputs by name, in the layout [B, T, H, D], and whether kernels read 8 bits."""
    plain, scales = split(call)
    heads_first = plain.facts.get("layout") == "bhtd"

    def turned(array: Any) -> Any:
        return jnp.swapaxes(array, 1, 2) if heads_first and array.ndim > 2 else array

    arguments: dict[str, Any] = jax.tree.map(jnp.asarray, plain.arrays)
    for name, scale in zip("qkv", scales, strict=True):
        values = (plain.arrays[name] / scale[:, None, :, None]).astype(FLOAT8)
        arguments[name] = turned(jnp.asarray(values))
    if "decay" in arguments:
        arguments["decay"] = turned(arguments["decay"])
    options = plain.options | {"implementation": implementation}
    options |= {"layout": "bhtd"} if heads_first else {}
    options["scales"] = [jnp.asarray(scale, jnp.float32) for scale in scales]
    told = ato_jax.explain(plain.op, **arguments, **options)
    result = getattr(ato_jax, plain.op)(**arguments, **options)
    named = numerics.named_results(plain.op, result, {})
    timed = ("out", "lse")
    found = {name: turned(array) if name in timed else array for name, array in named.items()}
    return found, str(told.implementation).endswith(".float8")


def check(call: Call, implementation: str | None, wanted: dict[str, Any]) -> list[str] | None:
    """A line for each output that is beyond its limit; None where the call is not supported."""
    kernels = implementation in ("triton", "mosaic_gpu") and jax.default_backend() == "cpu"
    try:
        with ato_jax.interpret() if kernels else contextlib.nullcontext():
            found, narrow = run(call, implementation)
    except ato_jax.UnsupportedError:
        return None
    found = {name: np.asarray(array) for name, array in found.items()}
    if not narrow:
        measures = random_calls.compare(split(call)[0], found, wanted)
        return [f"OVER {implementation} {one} | {call}" for one in measures if not one.ok]
    beyond = []
    for name, right in wanted.items():
        error = error_of(name, found[name], right)
        limit = LSE_LIMIT if name == "lse" else LIMITS[call.op]
        if not error <= limit:
            beyond.append(f"OVER {implementation} {name} {error:.1e} of {limit:.0e} | {call}")
    return beyond


def main() -> None:
    options = random_calls.parser_of(__doc__, OPS).parse_args()
    until, failed, read = time.monotonic() + options.seconds, 0, 0
    names = random_calls.names_of(options.implementation)
    seed = options.seed
    while seed < options.seed + options.calls and time.monotonic() < until:
        call = draw(seed, options.longest, options.op)
        seed += 1
        wanted = exact(call)
        if not random_calls.fits(call, wanted):
            continue
        for name in names:
            try:
                beyond = check(call, name, wanted)
            except Exception as error:  # one more finding: the search goes on
                beyond = [f"RAISES {name} {error!r:.300} | {call}"]
            read += beyond is not None
            for line in beyond or ():
                failed += 1
                print(line, flush=True)
    print(f"seeds {options.seed} to {seed - 1}: {read} calls, {failed} beyond", flush=True)


if __name__ == "__main__":
    main()
