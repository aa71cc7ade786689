"""The text of every Mosaic GPU module that calls of linear attention lower to, and a record of it.

    python -m tests.mosaic_text              compares all cases with the record
    python -m tests.mosaic_text --write      records this JAX version's hashes
    python -m tests.mosaic_text --dump DIR   writes each module's text below DIR, for `diff`
    python -m tests.mosaic_text -k D128      only cases whose name contains that

The exit status is 1 if a module differs. A refactoring of a kernel leaves its module's text as it
is. The text is what XLA compiles, but for source locations and the kernel's own name, which are
taken out: two equal texts become the same machine code. `tests/mosaic_text.json` holds a hash of
each module's text, by JAX version, since lowerings differ between versions.

Nothing is compiled and nothing is run: this needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

from ato_jax import device
from ato_jax.ops.linear_attention import api, mosaic_gpu
from ato_jax.ops.linear_attention.eight_bits import Float8Inputs
from ato_jax.ops.linear_attention.mosaic_gpu import float8
from ato_jax.ops.linear_attention.spec import (
    Inputs,
    LinearAttentionSpec,
    LinearState,
    Residuals,
)
from tests import aot

RECORD = Path(__file__).parent / "mosaic_text.json"
HASH_DIGITS = 16
H200 = device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0])


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, forward and, if `gradients`, backward; both by the mosaic_gpu backend."""

    D: int
    B: int = 1
    T: int = 4096
    S: int | None = None
    H: int = 8
    G: int = 8
    causal: bool = True
    decay: str | None = None
    layout: str = "bthd"
    normalize: bool = True
    states: bool = False
    gradients: bool = True
    feature_map: str = "elu1"
    segments: bool = False
    float8: bool = False
    dtype: str = "bfloat16"
    precision: str | None = None

    @property
    def name(self) -> str:
        parts = [f"D{self.D}", "causal" if self.causal else "full"]
        parts += [f"decay_{self.decay}"] if self.decay else []
        parts += [self.feature_map] if self.feature_map != "elu1" else []
        parts += [f"B{self.B}T{self.T}" + (f"S{self.S}" if self.S else "")]
        parts += [f"H{self.H}G{self.G}"] if self.H != self.G else []
        parts += [self.layout]
        parts += [] if self.normalize else ["unnormalised"]
        parts += ["states"] if self.states else []
        parts += ["segments"] if self.segments else []
        parts += ["float8"] if self.float8 else []
        parts += [self.dtype] if self.dtype != "bfloat16" else []
        parts += [self.precision] if self.precision else []
        parts += [] if self.gradients else ["forward"]
        return "-".join(parts)


CASES = [
    Case(128),
    Case(128, B=2, T=1000, layout="bhtd", states=False),
    Case(128, B=16, T=1024, layout="bhtd", states=True),
    Case(128, H=32, T=8192, normalize=False, states=True, G=32),
    Case(128, H=8, G=2, gradients=False),
    Case(128, decay="step"),
    Case(128, decay="step", layout="bhtd", normalize=False, states=True),
    Case(128, decay="head", states=True),
    Case(128, decay="step", H=8, G=2, T=1000, gradients=False),
    Case(64),
    Case(64, layout="bhtd", states=True, normalize=False),
    Case(64, decay="step"),
    Case(64, decay="head", layout="bhtd", states=True),
    Case(128, decay="head", normalize=False, feature_map="identity"),
    Case(64, decay="head", normalize=False, feature_map="identity"),
    Case(80, layout="bhtd", states=True),
    Case(96, decay="step"),
    Case(112, decay="head", normalize=False, layout="bhtd"),
    Case(40, decay="step"),
    Case(160, layout="bhtd"),
    Case(192),
    Case(192, normalize=False, states=True, layout="bhtd"),
    Case(256, layout="bhtd"),
    Case(128, decay="channel"),
    Case(64, decay="channel", normalize=False, layout="bhtd"),
    Case(128, decay="channel", H=8, G=2, states=True, gradients=False),
    Case(128, causal=False, S=1000),
    Case(128, causal=False, layout="bhtd", states=True, normalize=False, H=8, G=2),
    Case(96, causal=False, layout="bhtd"),
    Case(192, causal=False, S=1000, states=True, H=8, G=2),
    Case(256, causal=False),
    Case(128, causal=False, S=1000, feature_map="silu"),
    Case(96, decay="step", feature_map="exp"),
    Case(192, feature_map="softplus", layout="bhtd"),
    Case(128, causal=False, decay="step"),
    Case(128, T=1001),
    Case(128, T=1001, H=8, G=2, layout="bhtd", states=True),
    Case(96, T=1001, decay="step", layout="bhtd"),
    Case(128, causal=False, decay="step", T=1001),
    Case(128, segments=True),
    Case(128, segments=True, layout="bhtd", states=True, H=8, G=2),
    Case(64, segments=True, T=1000),
    Case(64, segments=True, layout="bhtd", normalize=False, H=8, G=4),
    Case(128, causal=False, segments=True, T=1000),
    Case(64, causal=False, segments=True, layout="bhtd", normalize=False),
    Case(128, causal=False, S=1000, dtype="float16"),
    Case(96, causal=False, layout="bhtd", H=8, G=2, feature_map="softplus", dtype="float16"),
    Case(128, causal=False, normalize=False, feature_map="silu", dtype="float16"),
    Case(128, causal=False, S=1000, gradients=False, float8=True),
    Case(64, causal=False, layout="bhtd", gradients=False, float8=True),
    Case(96, causal=False, feature_map="silu", states=True, gradients=False, float8=True),
    Case(128, H=8, G=2, gradients=False, float8=True),
    Case(64, layout="bhtd", states=True, gradients=False, float8=True),
    Case(128, causal=False, S=1000, dtype="float32"),
    Case(128, causal=False, layout="bhtd", dtype="float32", precision="tf32"),
    Case(64, causal=False, states=True, normalize=False, H=8, G=2, dtype="float32"),
    Case(96, causal=False, feature_map="softplus", layout="bhtd", dtype="float32"),
    Case(64, dtype="float16"),
    Case(128, decay="step", segments=True, dtype="float16"),
    Case(128, decay="channel", segments=True),
    Case(192, decay="channel"),
]


def on_hopper() -> contextlib.AbstractContextManager[Any]:
    """Inside, what is lowered for CUDA is for a Hopper card, which need not be there."""
    kind = jax.sharding.AbstractDevice(aot.DEVICE_KIND[90], num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=kind, axis_types=())
    return jax.sharding.use_abstract_mesh(mesh)


def arrays_of(case: Case) -> tuple[Any, Any, Any, dict[str, Any]]:
    """q, k, v and the options that are arrays, by their shapes."""
    S = case.S or case.T
    rows: Any = (case.B, S, case.G) if case.layout == "bthd" else (case.B, case.G, S)
    queries = (case.B, case.T, case.H) if case.layout == "bthd" else (case.B, case.H, case.T)
    arrays: list[Any] = [
        jax.ShapeDtypeStruct((*of_rows, case.D), case.dtype) for of_rows in (queries, rows, rows)
    ]
    options: dict[str, Any] = {}
    if case.decay is not None:
        shape = {"head": (case.G,), "step": rows, "channel": (*rows, case.D)}[case.decay]
        options["decay"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    if case.states:
        of_state = case.B, case.G, case.D, case.D
        kv, k_sum = (jax.ShapeDtypeStruct(of_state[:n], jnp.float32) for n in (4, 3))
        options["initial_state"] = LinearState(kv, k_sum)
    if case.segments:
        options["segment_ids"] = jax.ShapeDtypeStruct((case.B, case.T), jnp.int32)
    q, k, v = arrays
    return q, k, v, options


def spec_of(case: Case) -> LinearAttentionSpec:
    found: list[LinearAttentionSpec] = []

    def prepared(q: Any, k: Any, v: Any, options: Any) -> None:
        found.append(
            api.prepare(
                q,
                k,
                v,
                feature_map=case.feature_map,
                causal=case.causal,
                layout=case.layout,
                normalize=case.normalize,
                return_state=case.states,
                precision=case.precision,
                **options,
            ).spec
        )

    jax.eval_shape(prepared, *arrays_of(case))
    (spec,) = found
    return spec


def lower(case: Case) -> jax.stages.Lowered:
    spec = spec_of(case)
    for phase in ("forward", "backward")[: 1 + case.gradients]:
        backend: Any = float8 if case.float8 else mosaic_gpu
        if reason := backend.unsupported(spec, phase):
            raise ValueError(f"{case.name}, {phase}: mosaic_gpu {reason}")
    config = mosaic_gpu.default_config(spec, H200)

    def call(q: Any, k: Any, v: Any, options: Any) -> Any:
        given, ids = map(options.get, ("initial_state", "segment_ids"))
        inputs = Inputs(q, k, v, options.get("decay"), given, q_segments=ids, kv_segments=ids)
        kept = mosaic_gpu.forward_for_own_backward(spec, config, inputs)
        if not case.gradients:
            return kept
        residuals = Residuals(inputs, kept)
        arrays = spec, config, residuals, kept.plain()
        if spec.decay == "channel":
            return mosaic_gpu.backward_with_fallback(*arrays, _nothing)
        return mosaic_gpu.backward(*arrays)

    def call_in_8_bits(q: Any, k: Any, v: Any, options: Any) -> Any:
        heads = (case.B, case.H), (case.B, case.G), (case.B, case.G)
        values = (x.astype(jnp.float8_e4m3fn) for x in (q, k, v))
        scales = (jnp.ones(shape, jnp.float32) for shape in heads)
        given = options.get("initial_state")
        return float8.forward(spec, config, Float8Inputs(*values, *scales, initial_state=given))

    if case.float8:
        call = call_in_8_bits
    with on_hopper():
        return jax.jit(call).trace(*arrays_of(case)).lower(lowering_platforms=("cuda",))


def _nothing(_spec: Any, residuals: Residuals, _cotangents: Any) -> Inputs:
    """In the place of another backend's gradients, which segments have none of."""
    inputs = residuals.inputs._replace(q_segments=None, kv_segments=None)
    return jax.tree.map(jnp.zeros_like, inputs)


def modules_of(lowered: jax.stages.Lowered) -> list[tuple[str, str]]:
    """The name and the text of each Mosaic GPU module of a lowered call, in their order."""
    found: list[tuple[str, str]] = []
    for call in aot.calls_of(lowered):
        if not aot.target_of(call).startswith("mosaic_gpu"):
            continue
        config = ir.DictAttr(call.attributes["mhlo.backend_config"])
        bytecode = ir.StringAttr(config["module"]).value_bytes
        with call.context as context:
            # Its operations are Mosaic GPU's, of a form that is kept between versions.
            context.allow_unregistered_dialects = True
            text = str(ir.Module.parse(bytecode))
        (name,) = re.findall(r"^module @(\S+)", text, re.MULTILINE)
        found.append((name, text.replace(name, "kernel")))
    return found


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def hashes_of(case: Case) -> list[str]:
    """A kernel's name and the hash of its module's text, of each of the case's kernels."""
    return [f"{name} {hash_of(text)}" for name, text in modules_of(lower(case))]


def everything() -> dict[str, dict[str, list[str]]]:
    """The record, by JAX version and case."""
    found: dict[str, dict[str, list[str]]] = json.loads(RECORD.read_text())
    return found


def recorded() -> dict[str, list[str]] | None:
    """By case, of the JAX that is installed; None where this version is not in the record."""
    return everything().get(jax.__version__)


def write(found: dict[str, list[str]]) -> None:
    record = everything()
    record[jax.__version__] = record.get(jax.__version__, {}) | found
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--dump", type=Path)
    parser.add_argument("-k", default="", metavar="PART")
    arguments = parser.parse_args()
    wanted, found = recorded() or {}, {}
    differs = 0
    for case in CASES:
        if arguments.k not in case.name:
            continue
        modules = modules_of(lower(case))
        hashes = [f"{name} {hash_of(text)}" for name, text in modules]
        found[case.name] = hashes
        if arguments.dump:
            folder = arguments.dump / case.name
            folder.mkdir(parents=True, exist_ok=True)
            for number, (name, text) in enumerate(modules):
                (folder / f"{number}-{name}.mlir").write_text(text)
        if hashes == wanted.get(case.name):
            print(f"same      {case.name}", flush=True)
            continue
        differs += 1
        print(f"differs   {case.name}", flush=True)
        for line in sorted(set(hashes) ^ set(wanted.get(case.name, []))):
            print(f"    {'now' if line in hashes else 'was'} {line}", flush=True)
    if arguments.write:
        write(found)
        return 0
    return int(differs > 0)


if __name__ == "__main__":
    sys.exit(main())
