"""Compiles Mosaic GPU's kernels of the delta rule for a Hopper card on a machine that has none.

    python -m tests.aot_delta_rule '{"T": 4096, "D": 128, "decay": true}'

As `tests.aot_mosaic` does for linear attention, which says how.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

from tests.aot_mosaic import (
    HOPPER,
    IN_THIS_PROCESS,
    ROOT,
    Compiled,
    compiled_kernels,
    environment,
)


@dataclasses.dataclass(frozen=True)
class Call:
    T: int
    D: int
    B: int = 4
    H: int = 16
    G: int | None = None  # H, unless it is said
    V: int | None = None  # D, unless it is said
    decay: bool = False
    states: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def compile_call(call: Call) -> list[Compiled]:
    told = json.dumps(dataclasses.asdict(call))
    command = [sys.executable, "-m", "tests.aot_delta_rule", IN_THIS_PROCESS, told]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment() | {"MOSAIC_GPU_DUMP_PTXAS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise RuntimeError(f"{call} was not compiled: {done.stdout[-4000:]}")
    return compiled_kernels(done.stdout)


def main(call: Call) -> None:
    import jax
    from jax.experimental import topologies

    import ato_jax
    from ato_jax import device

    card = device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0])
    device.of_call = lambda _: card
    topology = topologies.get_topology_desc(platform="cuda", target_config=HOPPER, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("cards",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    V = call.V or call.D

    def array(heads: int, *columns: int, dtype: str = "bfloat16") -> Any:
        rows = (call.T, heads) if call.options.get("layout") != "bhtd" else (heads, call.T)
        return jax.ShapeDtypeStruct((call.B, *rows, *columns), dtype, sharding=sharding)

    q, v = array(call.G or call.H, call.D), array(call.H, V)
    numbers = array(call.H, dtype="float32")
    arrays = {"decay": numbers} if call.decay else {}
    if call.states:
        shape = (call.B, call.H, call.D, V)
        arrays["initial_state"] = jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

    def forward(q: Any, k: Any, v: Any, beta: Any, arrays: dict[str, Any]) -> Any:
        return ato_jax.gated_delta_rule(
            q, k, v, beta, return_state=call.states, implementation="mosaic_gpu",
            **call.options, **arrays,
        )  # fmt: skip

    kind = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), (), abstract_device=kind, axis_types=())
    ):
        traced = jax.jit(forward, in_shardings=sharding, out_shardings=sharding).trace(
            q, q, v, numbers, arrays
        )
        lowered = traced.lower(lowering_platforms=("cuda",))
    lowered.compile()


def run(*arguments: str) -> None:
    *here, call = arguments
    if here == [IN_THIS_PROCESS]:
        main(Call(**json.loads(call)))
    else:
        print(*compile_call(Call(**json.loads(call))), sep="\n")


if __name__ == "__main__":
    run(*sys.argv[1:])
