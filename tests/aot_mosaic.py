"""Compiles Mosaic GPU's kernels of linear attention for a Hopper card on a machine that has none.

    python -m tests.aot_mosaic '{"B": 1, "T": 65536, "H": 16, "D": 128, "decay": "step"}'

XLA's CUDA plugin compiles without a card, given a description of one, and has a PTX compiler linked
into it, which says what each kernel takes: nothing is run, and no CUDA toolkit is needed. XLA's own
schedule says what a call launches. The figures are those of the JAX that is installed: between
versions they differ.

The plugin is not installed beside JAX, which would look for a card: `make venv` puts it into a
folder of its own, and what compiles is a process that has it.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests import hazards

ROOT = Path(__file__).parent.parent
PLUGIN = Path(sys.prefix) / "cuda-plugin"

requires_plugin = pytest.mark.skipif(
    not PLUGIN.exists() and importlib.util.find_spec("jax_plugins") is None,
    reason="compiling Mosaic GPU's kernels without a card needs JAX's CUDA plugin, see `make venv`",
)

# As XLA describes a card to itself.
HOPPER = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 150000000000
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
# Ahead of a call: to be compiled in this process, which has the plugin.
IN_THIS_PROCESS = "--in-this-process"
# A description of calls, a dataclass.
Kind = TypeVar("Kind")
NO_LAUNCH = {"parameter", "constant", "get-tuple-element", "bitcast", "tuple"}
SCHEDULE = "what is launched: "
COMPILING = "Compiling entry function"


@dataclasses.dataclass(frozen=True)
class Call:
    B: int
    T: int
    H: int
    D: int
    causal: bool = True
    decay: str | None = None
    layout: str = "bthd"
    normalize: bool = True
    states: bool = False  # given, and asked for
    gradients: bool = True
    feature_map: str = "elu1"
    G: int | None = None  # H, unless it is said
    dtype: str = "bfloat16"  # of float8_e4m3fn, scales are given
    V: int | None = None  # D, unless it is said
    segments: bool = False
    precision: str | None = None
    random_features: int | None = None  # of FAVOR+, in place of `feature_map`


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A thread's registers at launch, and the bytes of them that it spills; whether products wait
    for each other, for want of registers; and what the machine code does to registers of products
    in flight, where it was asked for."""

    name: str
    registers: int
    spill_stores: int
    serialized: bool
    hazards: tuple[str, ...] = ()

    def __str__(self) -> str:
        waits = ", products serialized" if self.serialized else ""
        found = f"{self.registers} registers a thread, {self.spill_stores} bytes spilled{waits}"
        return "\n    ".join([f"{self.name}: {found}", *self.hazards])


@dataclasses.dataclass(frozen=True)
class Found:
    kernels: list[Compiled]  # Mosaic GPU's, one for each that differs
    launches: collections.Counter[str]  # of all kernels, by name; XLA's own are "fusion"

    def __str__(self) -> str:
        launched = ", ".join(f"{count} {name}" for name, count in sorted(self.launches.items()))
        return "\n".join([*map(str, self.kernels), f"launched: {launched}"])


def environment() -> dict[str, str]:
    """Of a process that compiles by XLA's CUDA plugin."""
    found = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    return found | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(PLUGIN)]),
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # of cuDNN and others, which are only run
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # on the card
    }


def printed_by(module: str, call: Any, machine_code: bool = False) -> str:
    """What `python -m module` prints in a process that has the plugin and compiles the call there,
    with the kernels' machine code if that is wanted.

    Raises:
      RuntimeError: It failed, or a kernel has no machine code.
    """
    told = json.dumps(dataclasses.asdict(call))
    command = [sys.executable, "-m", module, IN_THIS_PROCESS, told]
    with tempfile.TemporaryDirectory() as folder:
        printing = hazards.printing(Path(folder)) if machine_code else {}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment() | {"MOSAIC_GPU_DUMP_PTXAS": "1"} | printing,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    if done.returncode:
        raise RuntimeError(f"{call} was not compiled: {done.stdout[-4000:]}")
    if machine_code and done.stdout.count(COMPILING) != len([*hazards.kernels_of(done.stdout)]):
        raise RuntimeError(f"{call} was not disassembled: {done.stdout[-4000:]}")
    return done.stdout


def command(
    arguments: Sequence[str],
    kind: Callable[..., Kind],
    compile_here: Callable[[Kind], None],
    found_of: Callable[[Kind], Iterable[Any]],
) -> None:
    """Runs `python -m` of a module that compiles calls of a `kind`, given one as JSON: prints what
    it finds, or compiles in this process, as `printed_by` asks.
    """
    *here, told = arguments
    call = kind(**json.loads(told))
    if here == [IN_THIS_PROCESS]:
        compile_here(call)
    else:
        print(*found_of(call), sep="\n")


def compile_call(call: Call, machine_code: bool = False) -> Found:
    printed = printed_by("tests.aot_mosaic", call, machine_code)
    schedules = [
        line.removeprefix(SCHEDULE) for line in printed.splitlines() if line.startswith(SCHEDULE)
    ]
    if not schedules:
        raise RuntimeError(f"{call} was not compiled: {printed[-4000:]}")
    return Found(compiled_kernels(printed), collections.Counter(json.loads(schedules[-1])))


def compiled_kernels(printed: str) -> list[Compiled]:
    """Of what the PTX compiler printed."""
    found = []
    serialized = set(re.findall(r"are serialized due to .* in (?:the )?function '(\w+)'", printed))
    hazardous = collections.defaultdict(list)  # what is, by the kernel's name
    for kernel in hazards.kernels_of(printed):
        hazardous[kernel.name] += hazards.faults_of(kernel)
    for name, rest in re.findall(
        rf"{COMPILING} '(\w+)' for 'sm_90a'(.*?)Compile time", printed, re.DOTALL
    ):
        (registers,) = re.findall(r"Used (\d+) registers", rest)
        (spills,) = re.findall(r"(\d+) bytes spill stores", rest)
        of_name = name in serialized, tuple(hazardous[name])
        found.append(Compiled(_plain(name), int(registers), int(spills), *of_name))
    return found


def _plain(name: str) -> str:
    return (
        name.removeprefix("linear_attention_")
        .removesuffix("_mosaic_gpu_kernel")
        .removesuffix("_mosaic")
    )


def _launches(text: str) -> list[str]:
    """Of an XLA module as it is scheduled; a conditional is one."""
    found = []
    for line in text[text.index("\nENTRY") :].splitlines():
        matched = re.match(r"\s+(?:ROOT )?%\S+ = .+? ([a-z\-]+)\(", line)
        if matched is None or matched[1] in NO_LAUNCH:
            continue
        own = re.search(r'op_name="[^"]*/linear_attention_(\w+?)(?:_mosaic)?/', line)
        found.append(own[1] if own and matched[1] == "custom-call" else matched[1])
    return found


def sharding_on_hopper() -> Any:
    """The sharding of arrays on the card that is described. From here on, all calls of this process
    are made as on that card."""
    import jax
    from jax.experimental import topologies

    from ato_jax import device

    card = device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0])
    device.of_call = lambda _: card
    topology = topologies.get_topology_desc(platform="cuda", target_config=HOPPER, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("cards",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def compiled_on_hopper(function: Any, sharding: Any, inputs: Any) -> Any:
    """The function of these inputs, compiled for the card of `sharding_on_hopper`."""
    import jax

    kind = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), (), abstract_device=kind, axis_types=())
    ):
        traced = jax.jit(function, in_shardings=sharding, out_shardings=sharding).trace(*inputs)
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile()


def main(call: Call) -> None:
    import jax
    import jax.numpy as jnp

    import ato_jax

    sharding = sharding_on_hopper()

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    B, T, H, D, G = call.B, call.T, call.H, call.D, call.G or call.H
    V = call.V or D

    def of(heads: int) -> tuple[int, ...]:
        return (B, T, heads) if call.layout == "bthd" else (B, heads, T)

    rows = of(G)
    options: dict[str, Any] = {}
    of_features = call.random_features or D
    if call.decay is not None:
        options["decay"] = array(*{"head": (G,), "step": rows, "channel": (*rows, D)}[call.decay])
    if call.segments:
        options["segment_ids"] = array(B, T, dtype=jnp.int32)
    if call.dtype == "float8_e4m3fn":
        options["scales"] = tuple(array(B, heads) for heads in (H, G, G))
    if call.states:
        of_keys = B, G, of_features
        options["initial_state"] = ato_jax.LinearState(array(*of_keys, V), array(*of_keys))

    feature_map: Any = call.feature_map
    if call.random_features is not None:
        feature_map = ato_jax.favor(jax.random.key(0), of_features, D)

    def forward(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
        return ato_jax.linear_attention(
            q,
            k,
            v,
            feature_map=feature_map,
            causal=call.causal,
            layout=call.layout,
            normalize=call.normalize,
            return_state=call.states,
            precision=call.precision,
            implementation="mosaic_gpu",
            **options,
        )

    def with_gradients(cotangents: Any, *inputs: Any) -> Any:
        outputs, pull = jax.vjp(forward, *inputs)
        return outputs, pull(cotangents)

    function: Any = forward
    q, k = (array(*of(heads), D, dtype=call.dtype) for heads in (H, G))
    v, out = (array(*of(heads), V, dtype=call.dtype) for heads in (G, H))
    inputs: list[Any] = [q, k, v, options]
    if call.gradients:
        function = with_gradients
        inputs.insert(0, (out, options["initial_state"]) if call.states else out)
    text = compiled_on_hopper(function, sharding, inputs).as_text()
    print(SCHEDULE + json.dumps(_launches(text)))


def run(*arguments: str) -> None:
    command(arguments, Call, main, lambda call: [compile_call(call)])


if __name__ == "__main__":
    run(*sys.argv[1:])
