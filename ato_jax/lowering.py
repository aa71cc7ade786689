"""A JAX function as JAX lowers it for an NVIDIA GPU, and its Triton kernels as machine code.

    module = lower(function, *arrays)     StableHLO, with a custom call for each kernel
    kernel = kernel_of(operation)         what such a call holds: a grid, and Triton's IR
    code = compile_kernel(kernel, 90)     PTX, by Triton's own compiler, from the `triton` package
    cubin = assemble(code.ptx, 90, path)  machine code, by an assembler: XLA's is `xla_ptxas()`

XLA compiles the same IR by the same passes, but with the Triton that it ships. Where XLA is known
to choose otherwise than the package, this file follows XLA and says so.

The `triton` package ships an assembler, too, and that one is not to be used: see `ASSEMBLER`.

Needs no GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax._src.lib import cuda_path
from jax._src.pallas.triton.lowering import _new_ir_context
from jax.extend.mlir import ir

TRITON_CALL = "__gpu$xla.gpu.triton"

# The oldest assembler that is right about an asynchronous `wgmma` whose first operand is in
# registers. Those before use these registers again while it still reads them: results are wrong at
# best, addresses at worst. 12.8.93, which Triton 3.6 ships, did so with the gradient of
# linear attention.
ASSEMBLER = (13, 1)
_READS_REGISTERS = re.compile(r"wgmma\.mma_async\S*\s*\{[^}]*\}\s*,\s*\{")

# From JAX 0.11 on, the lowering asks which GPU it is for, and knows them by these names. JAX 0.10
# lowers for capability 9.0 where it sees no GPU; only casts to float8 depend on it.
DEVICE_KIND = {80: "NVIDIA A100", 90: "NVIDIA H100"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Triton kernel of a lowered function, as Pallas hands it to XLA."""

    name: str
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    ttir: str


@dataclasses.dataclass(frozen=True)
class Code:
    """A compiled kernel: its name in `ptx`, and the shared memory that a launch asks for, in bytes.
    `parameters` counts its pointers: arguments, results, and scratch of Triton's.
    """

    name: str
    ptx: str
    shared_bytes: int
    parameters: int


def lower(function: Callable[..., Any], *args: Any, capability: int | None = None) -> Any:
    """The MLIR module of `function(*args)` for CUDA.

    `args` are arrays or `jax.ShapeDtypeStruct`s, or trees of them; `capability` names the GPU where
    there is none. What the function does not read is an argument nevertheless.
    """
    with _named(capability):
        traced = jax.jit(function, keep_unused=True).trace(*args)
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compiler_ir("stablehlo")


def _named(capability: int | None) -> contextlib.AbstractContextManager[Any]:
    if capability is None:
        return contextlib.nullcontext()
    kind = DEVICE_KIND[capability]
    device = jax.sharding.AbstractDevice(kind, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def is_kernel(operation: Any) -> bool:
    return (
        operation.name == "stablehlo.custom_call"
        and ir.StringAttr(operation.attributes["call_target_name"]).value == TRITON_CALL
    )


def kernel_of(operation: Any) -> Kernel:
    config = ir.DictAttr(operation.attributes["mhlo.backend_config"])

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
    """The kernel as text that the package can read.

    It cannot read jaxlib's bytecode: that encodes operations by the layout of their properties,
    which differs between the two Tritons. Nor is the generic text safe, where enumerations are bare
    numbers. Triton's own syntax names everything, and carries no source locations, so that a kernel
    moved within its file has the same text.
    """
    with _new_ir_context():  # the context in which Pallas built the kernel: it has the dialect
        text = str(ir.Module.parse(bytecode))
    # From JAX 0.12 on, one attribute holds what used to be two; the package knows only the two:
    #   {cachePolicy = #tt.cache_policy<cache_modifier = cg, eviction_policy = evict_first>}
    #   cacheModifier = cg evictionPolicy = evict_first
    # Another attribute of the same operation, if any, follows inside the braces.
    return re.sub(
        r"\{cachePolicy = #tt\.cache_policy<cache_modifier = (\w+), eviction_policy = (\w+)>"
        r"(?:, )?",
        r"cacheModifier = \1 evictionPolicy = \2 {",
        text,
    )


def compile_kernel(kernel: Kernel, capability: int) -> Code:
    module, metadata, stages = _llvm(kernel, capability)
    if metadata.get("global_scratch_size"):
        raise NotImplementedError(f"the kernel {kernel.name!r} wants scratch in global memory")
    ptx = str(stages["ptx"](module, metadata))
    signature = re.search(r"\.entry [^(]*\(([^)]*)\)", ptx)
    assert signature is not None
    return Code(
        name=metadata["name"],
        ptx=ptx,
        shared_bytes=metadata["shared"],
        parameters=signature[1].count(".param"),
    )


def shared_bytes(kernel: Kernel, capability: int) -> int:
    """`Code.shared_bytes`, by half of the compiler."""
    return _llvm(kernel, capability)[1]["shared"]


def _llvm(kernel: Kernel, capability: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The kernel in LLVM's IR, what Triton found out about it, and Triton's stages."""
    # Here: most of what lowers a function needs no compiler, and importing it takes a while.
    import triton
    from triton._C.libtriton import ir as triton_ir
    from triton.backends.compiler import GPUTarget, Language

    backend = triton.compiler.make_backend(GPUTarget("cuda", capability, warp_size=32))
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
        path = Path(folder, "kernel.ttir")
        path.write_text(kernel.ttir)
        module = triton_ir.parse_mlir_module(str(path), context)
        module.context = context
        for stage in ("ttir", "ttgir", "llir"):
            module = stages[stage](module, metadata)
    return module, metadata, stages


def is_right(ptx: str, version: tuple[int, int]) -> bool:
    """Whether an assembler of that version, or a driver of that CUDA version, gets it right."""
    return version >= ASSEMBLER or not _READS_REGISTERS.search(ptx)


@functools.cache
def xla_ptxas() -> tuple[str, tuple[int, int]] | None:
    """The assembler that XLA runs, and its version; None where JAX was installed without one."""
    path = Path(cuda_path or "", "bin", "ptxas")
    if not cuda_path or not path.is_file():
        return None
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    except OSError:  # not for this machine
        return None
    found = re.search(r"release (\d+)\.(\d+)", said)
    return (str(path), (int(found[1]), int(found[2]))) if found else None


def assemble(ptx: str, capability: int, ptxas: str) -> bytes:
    # "a": instructions of that generation alone, `wgmma` for one.
    suffix = "a" if capability >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [ptxas, f"--gpu-name=sm_{capability}{suffix}", str(source), "-o", str(binary)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{ptxas} failed: {done.stderr}")
        return binary.read_bytes()
