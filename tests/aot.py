"""Compiles Pallas kernels for NVIDIA and AMD GPUs on a machine that has none.

A JAX function is lowered for CUDA as on a GPU, its Triton kernels are taken out of the lowered
module, and Triton's own compiler turns each into machine code: registers, shared memory and
spills come out, nothing is run.

    for kernel in compile_function(function, q, k, v):
        assert not kernel.spills and kernel.fits, kernel

XLA compiles the same Triton IR by the same passes, but with the Triton and the ptxas that it
ships, so the figures are close to a GPU's and not equal to them. Where XLA is known to choose
otherwise than the Triton wheel, this file follows XLA and says so.

What was found is kept by all that it depends on, the kernel's Triton IR first of all: in
`.aot_cache/`, and for all to use in `aot_record.json`, or machine code would take half of the
tests' time. A kernel that changed is not in the record, and is compiled. So is one in sixteen of
those that are, and has to come to the same figures. Failures are not kept: what does not compile
fails every time.

    python -m tests.aot         puts into the record what the cache has
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.extend.mlir import ir

from ato_jax import device, launch

requires_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or launch.no_triton is not None,
    reason="compiling kernels without a GPU needs the triton package, which the dev extra holds, "
    "and a JAX that lowers to it",
)

# The most shared memory that one block may ask for, in bytes.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}

# From JAX 0.11 on, the lowering asks which GPU it is for, and knows them by these names. JAX 0.10
# lowers for capability 9.0 where it sees no GPU; only casts to float8 depend on it.
DEVICE_KIND = {80: "NVIDIA A100", 90: "NVIDIA H100"}

TRITON_CALL = "__gpu$xla.gpu.triton"

# Triton's dialect has no Python module in jaxlib, and MLIR's bindings look for one at every
# operation that is made: an empty one is found at the first.
DIALECT = "jaxlib.mlir.dialects.tt"
if DIALECT not in sys.modules and importlib.util.find_spec(DIALECT) is None:
    sys.modules[DIALECT] = types.ModuleType(DIALECT)

CACHE = Path(__file__).parent.parent / ".aot_cache"
RECORD = Path(__file__).parent / "aot_record.json"
# Of the hexadecimal digits of a key, those in the record; and how the keys end of those kernels
# that are compiled all the same.
KEY_DIGITS = 20
COMPILED_ANYWAY = "0"
FIGURES = ("registers", "shared_bytes", "spill_stores", "spill_loads")
AMD_FIGURES = ("object_bytes", "shared_bytes", "registers", "spilled_registers")

# The Instinct MI200 and MI300 series, whose waves have 64 lanes.
AMD_ARCHITECTURES = ("gfx90a", "gfx942")
AMD_WAVE = 64
AMD_SHARED_LIMIT = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Triton kernel of a lowered function, as Pallas hands it to XLA."""

    name: str
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    ttir: str


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What became of one kernel: registers per thread, the rest in bytes.

    `spill_stores` and `spill_loads` count what the instructions of one thread move, as ptxas
    prints them. `shared_bytes` is what a launch asks for.
    """

    name: str
    capability: int
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    registers: int
    shared_bytes: int
    spill_stores: int
    spill_loads: int

    @property
    def spills(self) -> bool:
        return self.spill_stores > 0 or self.spill_loads > 0

    @property
    def fits(self) -> bool:
        return self.shared_bytes <= SHARED_LIMIT[self.capability]


def compile_function(
    function: Callable[..., Any], *args: Any, capabilities: Sequence[int] = (80, 90)
) -> list[Compiled]:
    """Compiles every Triton kernel that `function(*args)` launches.

    `args` are arrays or `jax.ShapeDtypeStruct`s, or trees of them. The result has one entry for
    each capability and each place in the lowered module that launches a kernel, in that order. A
    function without a Triton kernel is a ValueError, since a check of nothing would pass.
    """
    return [
        Compiled(
            name=kernel.name,
            capability=capability,
            grid=kernel.grid,
            num_warps=kernel.num_warps,
            num_stages=kernel.num_stages,
            **_cached_figures(kernel, capability),
        )
        for capability in capabilities
        for kernel in triton_kernels(function, *args, capability=capability)
    ]


@dataclasses.dataclass(frozen=True)
class AmdObject:
    """The machine code of one kernel for an AMD GPU.

    Bytes of the code object and of shared memory (LDS); the vector registers that a lane takes,
    and how many of them spill.
    """

    name: str
    architecture: str
    object_bytes: int
    shared_bytes: int
    registers: int
    spilled_registers: int


def amd_objects(
    function: Callable[..., Any], *args: Any, architectures: Sequence[str] = AMD_ARCHITECTURES
) -> list[AmdObject]:
    """Every Triton kernel that `function(*args)` launches, as machine code of each architecture."""
    with device.compiling_for("rocm"):
        kernels = lowered_kernels(function, *args, platform="rocm")
    return [
        AmdObject(kernel.name, architecture, **_cached_figures(kernel, architecture))
        for kernel in kernels
        for architecture in architectures
    ]


def shared_bytes(function: Callable[..., Any], *args: Any, capability: int) -> dict[str, int]:
    """What each kernel's largest launch asks for, by Triton's passes alone: no machine code."""
    found: dict[str, int] = {}
    for kernel in triton_kernels(function, *args, capability=capability):
        figures = _cached_figures(kernel, capability, machine_code=False)
        found[kernel.name] = max(figures["shared_bytes"], found.get(kernel.name, 0))
    return found


def triton_kernels(function: Callable[..., Any], *args: Any, capability: int) -> list[Kernel]:
    """Lowers `function(*args)` for CUDA and returns its Triton kernels, uncompiled."""
    return _some(kernels_of(lower(function, *args, capability=capability)))


def lowered_kernels(function: Callable[..., Any], *args: Any, platform: str) -> list[Kernel]:
    # From JAX 0.11 on the lowering asks for a device. Before sm_89 it refuses float8 casts.
    target = jax.sharding.AbstractDevice(DEVICE_KIND[90], num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=target)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*args)
        return _some(kernels_of(traced.lower(lowering_platforms=(platform,))))


def _some(kernels: list[Kernel]) -> list[Kernel]:
    if not kernels:
        raise ValueError(
            "the function lowered to no Triton kernel: is it interpreted, or another backend's?"
        )
    return kernels


def lower(function: Callable[..., Any], *args: Any, capability: int) -> jax.stages.Lowered:
    """`function(*args)` lowered for CUDA, as on a card of that capability."""
    target = jax.sharding.AbstractDevice(DEVICE_KIND[capability], num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=target)
    with jax.sharding.use_abstract_mesh(mesh), pytest.MonkeyPatch.context() as patch:
        if launch.no_triton is None:
            from jax._src.pallas.triton.lowering import triton_lowering_rules as rules

            checked = functools.partial(_checked_choice, rules[jax.lax.select_n_p])
            patch.setitem(rules, jax.lax.select_n_p, checked)
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


def _checked_choice(lowered: Any, context: Any, which: Any, *cases: Any) -> Any:
    """Pallas's lowering gives a Python number the type of what it stands beside, which in a choice
    is the condition's: bool. Where a cast follows, no verifier sees that, and the kernel is wrong.
    """
    for case, aval in zip(cases, context.avals_in[1:], strict=True):
        if aval.weak_type and not isinstance(case, ir.Value):
            raise TypeError(f"a choice of the Python number {case} would be one of bools")
    return lowered(context, which, *cases)


def kernels_of(lowered: jax.stages.Lowered) -> list[Kernel]:
    """The Triton kernels of it, each parsed and so verified by jaxlib."""
    return [
        _kernel(ir.DictAttr(operation.attributes["mhlo.backend_config"]))
        for operation in _custom_calls(lowered.compiler_ir("stablehlo").operation)
        if target_of(operation) == TRITON_CALL
    ]


def verify(kernel: Kernel, capability: int) -> None:
    """Triton's own parser, verifier and first stage accept the kernel: no machine code is made."""
    _verify(kernel.ttir, kernel.num_warps, kernel.num_stages, capability)


@functools.lru_cache(maxsize=4096)
def _verify(ttir: str, num_warps: int, num_stages: int, capability: int) -> None:
    # The same steps as in `_figures`, whose source is part of every key of the record.
    from triton._C.libtriton import ir as triton_ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", capability, warp_size=32))
    options = backend.parse_options({"num_warps": num_warps, "num_stages": num_stages})
    context = triton_ir.context()
    triton_ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, options, Language.TRITON)
    with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
        file.write(ttir)
        file.flush()
        module = triton_ir.parse_mlir_module(file.name, context)
    module.context = context
    if not module.verify():
        raise RuntimeError("Triton does not verify the kernel")
    stages["ttir"](module, {})


def targets_of_calls(lowered: jax.stages.Lowered) -> list[str]:
    """What each custom call of it calls. As text, kernels would take longer to write than that."""
    return [target_of(call) for call in calls_of(lowered)]


def calls_of(lowered: jax.stages.Lowered) -> list[ir.Operation]:
    return _custom_calls(lowered.compiler_ir("stablehlo").operation)


def target_of(call: ir.Operation) -> str:
    return ir.StringAttr(call.attributes["call_target_name"]).value


def _custom_calls(module: ir.Operation) -> list[ir.Operation]:
    found: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call":
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found


def _kernel(config: ir.DictAttr) -> Kernel:
    def number(key: str) -> int:
        return ir.IntegerAttr(config[key]).value

    return Kernel(
        name=ir.StringAttr(config["name"]).value,
        grid=(number("grid_x"), number("grid_y"), number("grid_z")),
        num_warps=number("num_warps"),
        num_stages=number("num_stages"),
        ttir=_ttir(ir.StringAttr(config["ir"]).value_bytes),
    )


def _ttir(bytecode: bytes) -> str:
    """The kernel as text that the wheel can read.

    The wheel cannot read jaxlib's bytecode: that encodes operations by the layout of their
    properties, which differs between the two Tritons. Nor is the generic text safe, where
    enumerations are bare numbers. Triton's own syntax names everything, and carries no source
    locations, so that moving a kernel within its file leaves the cache valid.
    """
    from jax._src.pallas.triton.lowering import _new_ir_context  # which a later JAX may lack

    with _new_ir_context():  # the context in which Pallas built the kernel: it has the dialect
        text = str(ir.Module.parse(bytecode))
    # From JAX 0.12 on, one attribute holds what used to be two; the wheel knows only the two:
    #   {cachePolicy = #tt.cache_policy<cache_modifier = cg, eviction_policy = evict_first>}
    #   cacheModifier = cg evictionPolicy = evict_first
    # Another attribute of the same operation, if any, follows inside the braces.
    return re.sub(
        r"\{cachePolicy = #tt\.cache_policy<cache_modifier = (\w+), eviction_policy = (\w+)>"
        r"(?:, )?",
        r"cacheModifier = \1 evictionPolicy = \2 {",
        text,
    )


@functools.cache
def _recorded() -> dict[str, list[int]]:
    return json.loads(RECORD.read_text())


def _named(figures: Sequence[int], target: int | str) -> dict[str, int]:
    """Shared memory alone, or all that the machine code says."""
    names = AMD_FIGURES if isinstance(target, str) else FIGURES
    names = names[1:2] if len(figures) == 1 else names
    return dict(zip(names, figures, strict=True))


def record() -> None:
    """Writes the record anew, with what the cache has."""
    found = dict(_recorded())
    for path in CACHE.glob("*.json"):
        figures = json.loads(path.read_text())
        names = AMD_FIGURES if AMD_FIGURES[0] in figures else FIGURES
        found[path.stem[:KEY_DIGITS]] = [figures[name] for name in names if name in figures]
    lines = ",\n".join(f'"{key}": {json.dumps(found[key])}' for key in sorted(found))
    RECORD.write_text(f"{{\n{lines}\n}}\n")


def _cached_figures(
    kernel: Kernel, target: int | str, machine_code: bool = True
) -> dict[str, int]:
    """`_figures`, from the record or from disk, by everything that they depend on.

    `target` is a capability, or an AMD architecture's name.
    """
    # What steers Triton or ptxas from outside, TRITON_PTXAS_PATH for one.
    environment = {
        name: value
        for name, value in os.environ.items()
        if any(word in name for word in ("TRITON", "PTXAS", "LLVM", "MLIR"))
    }
    key = (
        kernel.ttir,
        target,
        kernel.num_warps,
        kernel.num_stages,
        importlib.metadata.version("triton"),
        sorted(environment.items()),
        machine_code,
        AMD_RECIPE if isinstance(target, str) else RECIPE,
    )
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    recorded = _recorded().get(digest[:KEY_DIGITS])
    if recorded and not digest.endswith(COMPILED_ANYWAY):
        return _named(recorded, target)
    figures = _on_disk(digest, kernel, target, machine_code)
    if recorded and figures != _named(recorded, target):
        raise RuntimeError(f"{RECORD.name} has {recorded} for {kernel.name!r}, found {figures}")
    return figures


def _on_disk(
    digest: str, kernel: Kernel, target: int | str, machine_code: bool
) -> dict[str, int]:
    path = CACHE / f"{digest}.json"
    if path.exists():
        return json.loads(path.read_text())
    try:
        if isinstance(target, str):
            figures = _amd_figures(kernel, target)
        else:
            figures = _figures(kernel, target, machine_code)
    except Exception as error:
        where = target if isinstance(target, str) else f"sm_{target}"
        error.add_note(f"while compiling the kernel {kernel.name!r} for {where}")
        raise
    CACHE.mkdir(exist_ok=True)
    # Written aside and moved into place: tests in parallel never read half a file.
    with tempfile.NamedTemporaryFile("w", dir=CACHE, delete=False) as file:
        json.dump(figures, file)
    os.replace(file.name, path)
    return figures


def _allocated(module: Any, options: Any, capability: int) -> int:
    """The shared memory of a kernel, by the first passes of Triton's third stage: without LLVM."""
    from triton._C.libtriton import ir as triton_ir
    from triton._C.libtriton import nvidia, passes
    from triton.backends.nvidia.compiler import get_ptx_version_from_options

    ptx_version = get_ptx_version_from_options(options, capability)
    manager = triton_ir.pass_manager(module.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, ptx_version)
    manager.run(module, "allocate_shared_memory")
    return module.get_int_attr("ttg.shared")


def _figures(kernel: Kernel, capability: int, machine_code: bool = True) -> dict[str, int]:
    """Compiles one kernel; the fields of `Compiled` that the compiler finds out.

    Before any machine code is made, these are the shared memory alone.
    """
    # Here, because importing Triton takes longer than reading a result from the cache.
    from triton._C.libtriton import ir as triton_ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", capability, warp_size=32))
    options = backend.parse_options(
        {
            "num_warps": kernel.num_warps,
            "num_stages": kernel.num_stages,
            "num_ctas": 1,
            # XLA leaves denormals alone in libdevice's functions, Triton flushes them.
            "enable_reflect_ftz": False,
        }
    )
    context = triton_ir.context()
    triton_ir.load_dialects(context)
    backend.load_dialects(context)
    # `triton.compile` leaves out the first stage when it is given IR, and XLA does not.
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, options, Language.TRITON)
    metadata: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        ttir_path = Path(folder, "kernel.ttir")
        ttir_path.write_text(kernel.ttir)
        module = triton_ir.parse_mlir_module(str(ttir_path), context)
        module.context = context
        for stage in ("ttir", "ttgir"):
            module = stages[stage](module, metadata)
        if not machine_code:
            return {"shared_bytes": _allocated(module, options, capability)}
        module = stages["llir"](module, metadata)

        # Triton's last stage runs ptxas too, and throws away what it says.
        ptx_path = Path(folder, "kernel.ptx")
        ptx_path.write_text(stages["ptx"](module, metadata))
        ptxas = subprocess.run(
            [
                get_ptxas(capability).path,
                "-v",
                f"--gpu-name={sm_arch_from_capability(capability)}",
                str(ptx_path),
                "-o",
                str(Path(folder, "kernel.cubin")),
            ],
            capture_output=True,
            text=True,
        )
    if ptxas.returncode:
        raise RuntimeError(f"ptxas failed:\n{ptxas.stderr}")
    registers = re.findall(r"Used (\d+) registers", ptxas.stderr)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", ptxas.stderr)
    if not registers or not spills:
        raise RuntimeError(f"ptxas does not say what the kernel uses:\n{ptxas.stderr}")
    # More than one line where a library function was not inlined: each has its own spills.
    return {
        "registers": max(map(int, registers)),
        "shared_bytes": metadata["shared"],
        "spill_stores": sum(int(stores) for stores, _ in spills),
        "spill_loads": sum(int(loads) for _, loads in spills),
    }


def _amd_figures(kernel: Kernel, architecture: str) -> dict[str, int]:
    """Compiles one kernel for an AMD GPU; the fields of `AmdObject` that the compiler finds out."""
    from triton._C.libtriton import ir as triton_ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("hip", architecture, warp_size=AMD_WAVE))
    options = backend.parse_options(
        {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "num_ctas": 1}
    )
    context = triton_ir.context()
    triton_ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, options, Language.TRITON)
    metadata: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ttir")
        path.write_text(kernel.ttir)
        module = triton_ir.parse_mlir_module(str(path), context)
        module.context = context
        for stage in ("ttir", "ttgir", "llir"):
            module = stages[stage](module, metadata)
        assembly = stages["amdgcn"](module, metadata)
        machine_code = stages["hsaco"](assembly, metadata)
    registers, spilled = (
        int(re.findall(rf"\.{name}:\s+(\d+)", assembly)[0])
        for name in ("vgpr_count", "vgpr_spill_count")
    )
    return {
        "object_bytes": len(machine_code),
        "shared_bytes": metadata["shared"],
        "registers": registers,
        "spilled_registers": spilled,
    }


RECIPE = inspect.getsource(_figures) + inspect.getsource(_allocated)
AMD_RECIPE = inspect.getsource(_amd_figures)

if __name__ == "__main__":
    record()
