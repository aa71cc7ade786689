"""Compiles calls for eight Hopper cards on a machine that has none, and tells what they send.

    python -m tests.aot_devices          a JSON object: by call, its kernels and its collectives

As `aot_mosaic.py` does for one card.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

from tests.aot_mosaic import HOPPER, ROOT, environment

CARDS = 8


def compile_calls() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot_devices"],
        cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import ato_jax
    from ato_jax import device, partitioning
    from benchmarks import collectives

    card = device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0])
    device.of_call = lambda _: card
    partitioning.device_count = lambda: CARDS
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=HOPPER, topology=f"1x1x{CARDS}"
    )
    mesh = topologies.make_mesh(topology, (4, 2), ("data", "model"))
    rows = NamedSharding(mesh, P("data", None, "model"))
    arrays = [jax.ShapeDtypeStruct((8, 2048, 8, 64), jnp.bfloat16, sharding=rows)] * 3

    linear = functools.partial(ato_jax.linear_attention, causal=True, implementation="mosaic_gpu")
    softmax = functools.partial(ato_jax.attention, causal=True, implementation="mosaic_gpu")

    def both(call: Any) -> Any:
        def run(*arrays: Any) -> Any:
            out, pull = jax.vjp(call, *arrays)
            return out, pull(out)

        return run

    found = {}
    kind = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=None, platform="gpu")
    here = jax.sharding.AbstractMesh((), (), abstract_device=kind, axis_types=())
    for name, call in (("linear", both(linear)), ("softmax", softmax)):
        with jax.sharding.use_abstract_mesh(here):
            lowered = jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",))
            compiled = lowered.compile()
        text = compiled.as_text()
        specs = [json.dumps([*one.spec][:3]) for one in jax.tree.leaves(compiled.output_shardings)]
        sent = [one.kind for one in collectives.collectives(text)]
        found[name] = {
            "kernels": collectives.kernels(text), "sent": sent, "results": sorted(set(specs))
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
