"""What `tune` searches for softmax attention; tune.py says what each name is for.

Each kernel has tiles: rows of its own side, and blocks of the other that it goes over. What is
tried are those that a simple count says fit the registers and the shared memory, and are not too
small to be worth it:

    registers of a thread = rows * (sums * width + products * block) / threads
    shared memory         = held * rows * width + stages * block * (2 * width + planes of pairs)

The count leaves out much of what a kernel needs, so tiles it lets through may still not compile.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax.device import Device
from ato_jax.ops.attention import api
from ato_jax.ops.attention.spec import REST_UNITS, AttentionSpec, Outputs
from ato_jax.ops.attention.triton.common import row_size
from benchmarks import cases, ours

__all__ = ["api", "CASES", "WHEN", "BUDGETS"]
__all__ += ["steps", "draw", "prepare", "cotangents", "results"]


@dataclasses.dataclass(frozen=True)
class Case(cases.Case):
    """Softmax attention with more options; `bias` is one of float32, [1, H, T, T]."""

    bias: bool = False
    dropout_rate: float = 0.0

    def __str__(self) -> str:
        bias = ", bias" if self.bias else ""
        dropout = f", dropout {self.dropout_rate}" if self.dropout_rate else ""
        return super().__str__() + bias + dropout


_bf16 = functools.partial(Case, "softmax", dtype="bfloat16")
# The most wanted first. Each fills a card.
CASES = (
    _bf16(B=4, T=8192, H=16, D=128),
    _bf16(B=4, T=8192, H=16, D=128, causal=True),
    _bf16(B=4, T=8192, H=32, D=64),
    _bf16(B=4, T=8192, H=32, D=64, causal=True),
    _bf16(B=2, T=8192, H=8, D=256),
    _bf16(B=2, T=8192, H=8, D=256, causal=True),
    _bf16(B=2, T=8192, H=32, D=128, causal=True, G=8),
    _bf16(B=2, T=16384, H=16, D=128, causal=True, left=1023),
    _bf16(B=4, T=8192, H=16, D=128, causal=True, documents=1024),
    _bf16(B=4, T=2048, H=16, D=128, bias=True),
    _bf16(B=4, T=2048, H=32, D=64, bias=True),
    _bf16(B=4, T=8192, H=16, D=96, causal=True),
    _bf16(B=2, T=8192, H=16, D=192, causal=True),
    _bf16(B=1, T=4096, H=8, D=512, causal=True),
    Case("softmax", B=4, T=8192, H=16, D=128, dtype="float16", causal=True),
    Case("softmax", B=4, T=4096, H=16, D=64, dtype="float32", causal=True),
    _bf16(B=4, T=8192, H=16, D=128, causal=True, dropout_rate=0.1),
)
WHEN = (
    *("dtype", "D", "V", "precision"),
    *("causal", "window", "bias", "mask", "segments", "softcap", "dropout", "grouped"),
)

BUDGETS = {
    "lse": (1e-5, 1e-5, 1e-5),
    "dbias": (8e-3, 2e-3, 1e-5),
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """How the config names a kernel's fields, and what of its own rows it has in which memory.

    `held` tiles [rows, width] wait in shared memory, `sums` are in registers. Of `products` tiles
    [rows, block] the numbers are in registers at one time. The rows come in one of so many
    `strands` (forward.py).
    """

    prefix: str
    own: str
    other: str
    held: int
    sums: int
    products: int
    strands: tuple[int, ...] = (1,)


FORWARD = Kernel("", "block_q", "block_k", held=1, sums=1, products=1, strands=(1, 2))
DQ = Kernel("dq_", "block_q", "block_k", held=2, sums=1, products=2)
DKV = Kernel("dkv_", "block_k", "block_q", held=2, sums=2, products=2)
DBIAS = Kernel("dbias_", "block_q", "block_k", held=2, sums=0, products=3)

ROWS = (16, 32, 64, 128, 256)
BLOCKS = (16, 32, 64, 128)
# In products with fewer columns the tensor cores wait, unless the rows are long, or the products
# exact ones of float32, which take six times as long.
FEWEST_COLUMNS = 32
LONG_ROW = 256
WARPS = (4, 8)
# Tensor cores take so many rows at a time.
SHORTEST_STRAND = 64
# By the size of an element: for all tiles, and for the fastest one alone. Exact products of float32
# hide the loads without a pipeline.
STAGES = {2: (2, 3), 4: (1,)}
MORE_STAGES = {2: (1, 4), 4: (2, 3, 4)}
# Of 255, by the count above: tiles of more spill, and those of less do little between two loads.
REGISTERS = range(64, 201)
# What the compiler wants of shared memory besides tiles, for turning them from layout to layout.
SCRATCH = 16 * 1024


def tiles(kernel: Kernel, spec: AttentionSpec, device: Device) -> Iterator[dict[str, Any]]:
    item = cases.ITEMSIZES[spec.dtype]
    width = max(row_size(spec.D), row_size(spec.V))
    traits = spec.traits()
    per_pair = 4 * (traits["bias"] == "pairs") + (traits["mask"] == "pairs")
    blocks = [n for n in BLOCKS if n >= FEWEST_COLUMNS or item == 4 or width > LONG_ROW]
    sizes = itertools.product(ROWS, blocks, WARPS, STAGES[item], kernel.strands)
    for rows, block, warps, stages, strands in sizes:
        registers = rows * (kernel.sums * width + kernel.products * block) // (32 * warps)
        streamed = stages * block * (2 * width * item + rows * per_pair)
        shared_memory = kernel.held * rows * width * item + streamed + SCRATCH
        if registers not in REGISTERS or shared_memory > device.shared_memory:
            continue
        if strands > 1 and rows < strands * SHORTEST_STRAND:
            continue
        fields = {kernel.own: rows, kernel.other: block, "num_warps": warps, "num_stages": stages}
        if len(kernel.strands) > 1:
            fields["strands"] = strands
        yield {kernel.prefix + name: value for name, value in fields.items()}


def steps(spec: AttentionSpec, device: Device) -> list[list[dict[str, Any]]]:
    kernels = [FORWARD, DQ, DKV]
    if spec.traits()["bias"] == "pairs":
        kernels.append(DBIAS)
    more = MORE_STAGES[cases.ITEMSIZES[spec.dtype]]
    found = []
    for kernel in kernels:
        found.append(list(tiles(kernel, spec, device)))
        found.append([{f"{kernel.prefix}num_stages": stages} for stages in more])
    return [step for step in found if step]


def draw(case: Case, key: jax.Array) -> dict[str, jax.Array]:
    arrays = ours.draw(case, key)
    if case.bias:
        arrays["bias"] = jax.random.normal(key, (1, case.H, case.T, case.T), jnp.float32)
    return arrays


def prepare(case: Case, arrays: Mapping[str, jax.Array]) -> api.Request:
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    return api.prepare(
        q,
        k,
        v,
        causal=case.causal,
        window=None if case.left is None else (case.left, None),
        bias=arrays.get("bias"),
        segment_ids=arrays.get("ids"),
        dropout_rate=case.dropout_rate,
        dropout_key=jax.random.key(0),
    )


def cotangents(outputs: Outputs, dout: jax.Array) -> Outputs:
    return Outputs(dout, jnp.zeros_like(outputs.lse))


def results(phase: str, found: Any) -> dict[str, jax.Array]:
    if phase != "backward":
        out = found.out
        if found.rest is not None:
            unit = REST_UNITS[str(out.dtype)]
            out = out.astype(jnp.float32) * (1 + unit * found.rest.astype(jnp.float32))
        return {"out": out, "lse": found.lse}
    gradients = {"dq": found.q, "dk": found.k, "dv": found.v}
    return gradients if found.bias is None else gradients | {"dbias": found.bias}
