"""Compiles the direct road's programs for a Hopper card on a machine that has none, as JAX would on
the card, and reads what XLA made of them.

    python -m tests.aot_executables

XLA's CUDA plugin does that in a process of its own (tests/aot_mosaic.py tells how). Neither PyTorch
nor a card is needed. The plugin also holds XLA's schema, with which `_protobuf.FIELDS` is
compared: `schema` reads it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import mmap
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import aot_mosaic

PACKAGE = aot_mosaic.ROOT / "ato_torch"
READ = "what was read: "
B, H, G, T, D = 2, 4, 2, 130, 64
# Of the calls that Hopper's own kernels take.
LONG = dict.fromkeys("qkv", ((1, 16, 16384, 128), "bfloat16"))
FLOAT8 = dict.fromkeys("qkv", ((1, 16, 16384, 128), "float8_e4m3fn")) | dict.fromkeys(
    ("q_scale", "k_scale", "v_scale"), ((1, 16), "float32")
)


def without_torch(name: str) -> Any:
    """A module of ato_torch that needs no PyTorch, where the package itself asks for it."""
    if importlib.util.find_spec("torch") is None and "ato_torch" not in sys.modules:
        package = types.ModuleType("ato_torch")
        package.__path__ = [str(PACKAGE)]
        sys.modules["ato_torch"] = package
        try:
            return importlib.import_module(f"ato_torch.{name}")
        finally:
            del sys.modules["ato_torch"]
    return importlib.import_module(f"ato_torch.{name}")


# The fields of XLA's messages, by the description of each that protocol buffers leave in a program


def plugin() -> Path | None:
    """XLA's CUDA plugin itself, a shared library."""
    found = list(aot_mosaic.PLUGIN.glob("jax_plugins/*/xla_cuda_plugin.so"))
    return found[0] if found else None


def schema(library: Path) -> dict[str, dict[int, str]]:
    """The names of the fields of every message that the library describes."""
    found: dict[str, dict[int, str]] = {}
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for start in _descriptions(data):
            package, messages = "", []
            for number, value in _fields(data, start):
                if number == 2:
                    package = value.decode()
                elif number == 4:
                    messages.append(value)
            for message in messages:
                _describe(found, package, message)
    return found


def _descriptions(data: mmap.mmap) -> Iterator[int]:
    """Where a FileDescriptorProto of XLA's begins: with the name of its file."""
    end = data.find(b".proto\x12")
    while end >= 0:
        end += len(b".proto")
        for start in range(end - 3, max(end - 130, 0), -1):
            if data[start] == 0x0A and data[start + 1] == end - start - 2:
                if data[start + 2 : start + 6] in (b"xla/", b"jaxl"):
                    yield start
                break
        end = data.find(b".proto\x12", end)


def _fields(data: Any, place: int = 0) -> Iterator[tuple[int, Any]]:
    """A FileDescriptorProto's, up to what is none of its fields; or all of another's."""
    names = 0
    while place < len(data):
        tag, after = _varint(data, place)
        number, kind = tag >> 3, tag & 7
        is_name = isinstance(data, mmap.mmap) and number == 1
        names += is_name
        if names > 1 or kind not in (0, 2) or not 0 < number < 20:
            return
        value, after = _varint(data, after)
        if kind == 2:
            size = value
            value, after = data[after : after + size], after + size
        yield number, value
        place = after


def _varint(data: Any, place: int) -> tuple[int, int]:
    """(the number, where it ends)"""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


def _describe(found: dict[str, dict[int, str]], outer: str, message: bytes) -> None:
    """A DescriptorProto and those inside of it."""
    parts = list(_fields(message))
    name = f"{outer}.{next(value for number, value in parts if number == 1).decode()}"
    fields = found.setdefault(name, {})
    for number, value in parts:
        if number == 2:
            field = dict(reversed(list(_fields(value))))
            fields[field[3]] = field[1].decode()
        elif number == 3:
            _describe(found, name, value)


# What XLA makes of programs


def compile_all() -> dict[str, list[str]]:
    """The steps of each program below, or why it is not understood; and its constants."""
    # Tests switch XLA's optimizations off, which makes other steps.
    environment = aot_mosaic.environment() | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.aot_executables"],
        cwd=aot_mosaic.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(READ)]
    if done.returncode or not lines:
        raise RuntimeError(f"nothing was compiled: {done.stdout[-4000:]}")
    found: dict[str, list[str]] = json.loads(lines[-1].removeprefix(READ))
    return found


def programs() -> Iterator[tuple[str, Callable[..., Any], list[tuple[tuple[int, ...], str]]]]:
    """A name, a function of a list of arrays as `_programs` makes it for the direct road, and the
    arrays' shapes and dtypes."""
    _programs = without_torch("_programs")
    query, key = ((B, H, T, D), "bfloat16"), ((B, G, T, D), "bfloat16")
    state = {"kv": ((B, G, D, D), "float32"), "k_sum": ((B, G, D), "float32")}
    qkv = {"q": query, "k": key, "v": key}
    softmax, linear = {"query_offset": 0}, {"feature_map": "elu1"}
    for name, op, arrays, options, has_backward in [
        ("attention", "attention", qkv, softmax, True),
        (
            "one query, lengths",
            "attention",
            {**qkv, "q": ((B, H, 1, D), "float16")}
            | {name: (key[0], "float16") for name in "kv"}
            | {"kv_lengths": ((B,), "int32")},
            softmax | {"causal": True, "query_offset": T - 1},
            False,
        ),
        ("linear", "linear_attention", qkv, linear, False),
        (
            "decay",
            "linear_attention",
            qkv | {"decay": ((B, G, T), "float32")},
            linear | {"causal": True},
            False,
        ),
        (
            "states",
            "linear_attention",
            qkv | {f"initial_state.{name}": fact for name, fact in state.items()},
            linear | {"causal": True, "return_state": True},
            True,
        ),
        ("hopper attention", "attention", LONG, softmax | {"causal": True}, True),
        ("hopper linear", "linear_attention", LONG, linear | {"causal": True}, False),
        *(
            (
                f"float8 {'causal ' * causal}{op}",
                op,
                FLOAT8,
                {**options, "causal": causal, "out_dtype": "bfloat16"},
                False,
            )
            for op, options in (("attention", softmax), ("linear_attention", linear))
            for causal in (False, True)
        ),
        (
            "step",
            "linear_attention_step",
            {name: ((*shape[:2], D), dtype) for name, (shape, dtype) in qkv.items()}
            | {f"state.{name}": fact for name, fact in state.items()},
            linear,
            False,
        ),
        (
            "delta step",
            "gated_delta_rule_step",
            {"q": ((B, G, D), "bfloat16"), "k": ((B, G, D), "bfloat16")}
            | {"v": ((B, H, D), "bfloat16"), "beta": ((B, H), "float32")}
            | {"decay": ((B, H), "float32"), "state": ((B, H, D, D), "float32")},
            {"l2norm": True},
            False,
        ),
    ]:
        layout = {} if op.endswith("step") else {"layout": "bhtd"}
        facts = list(arrays.values())
        call = _programs.Call(op, tuple(arrays), tuple((layout | options).items()), True, False)
        call = call._replace(training=not call.is_float8)  # float8 has no derivative
        yield name, functools.partial(_programs.forward, call), facts
        if has_backward:
            outputs = _programs.output_shapes(call, facts)
            needed = (True,) * len(facts)
            given = (True,) + (False,) * (len(outputs) - 1)
            yield (
                f"{name}, backward",
                functools.partial(_programs.backward, call, needed, given),
                [*facts, *outputs, outputs[0]],
            )


def main() -> None:
    import jax
    from jax.experimental import topologies

    from ato_jax import device

    _executable = without_torch("_executable")
    card = device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0])
    device.of_call = lambda _: card
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=aot_mosaic.HOPPER, topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("cards",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    kind = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=None, platform="gpu")
    found = {}
    for name, function, facts in programs():
        inputs = [jax.ShapeDtypeStruct(*fact, sharding=sharding) for fact in facts]
        with jax.sharding.use_abstract_mesh(
            jax.sharding.AbstractMesh((), (), abstract_device=kind, axis_types=())
        ):
            jitted = jax.jit(
                lambda *arrays, function=function: function(arrays),
                keep_unused=True,
                in_shardings=sharding,
                out_shardings=sharding,
            )
            lowered = jitted.trace(*inputs).lower(lowering_platforms=("cuda",))
        data = lowered.compile().runtime_executable().serialize()
        try:
            executable = _executable.read(data)
            steps = executable.steps
            found[name] = [getattr(step, "name", type(step).__name__) for step in steps]
            found[f"{name}: constants"] = [
                f"{sum(map(bool, constant.content))} of {len(constant.content)} bytes are not 0"
                for constant in executable.constants.values()
            ]
        except _executable.UnknownError as error:
            found[name] = [f"refused: {error}"]
    print(READ + json.dumps(found))


if __name__ == "__main__":
    main()
