"""CUDA's driver through ctypes: the structures, constants and functions that launches need.

`library()` is the driver's shared library. The names of constants are those of cuda.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch

from ato_torch._mosaic import MAP_BYTES, TensorMap

OUT_OF_MEMORY = 2
EVENT_DISABLE_TIMING = 2
INVALID_CONTEXT = 201
RELAXED_CAPTURE = 2
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
LAUNCH_PARAM_BUFFER_POINTER = 1
LAUNCH_PARAM_BUFFER_SIZE = 2
# After one of these errors every further call in the process fails with the same error.
STICKY_ERRORS = {
    214: "ECC_UNCORRECTABLE",
    220: "NVLINK_UNCORRECTABLE",
    226: "CONTAINED",
    700: "ILLEGAL_ADDRESS",
    702: "LAUNCH_TIMEOUT",
    709: "CONTEXT_IS_DESTROYED",
    710: "ASSERT",
    714: "HARDWARE_STACK_ERROR",
    715: "ILLEGAL_INSTRUCTION",
    716: "MISALIGNED_ADDRESS",
    717: "INVALID_ADDRESS_SPACE",
    718: "INVALID_PC",
    719: "LAUNCH_FAILED",
    721: "TENSOR_MEMORY_LEAK",
}
POINTER_BYTES = ctypes.sizeof(ctypes.c_uint64)  # of an address on the device


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_size_t),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The driver's shared library; an OSError where there is none."""
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    driver.cuCtxSetCurrent.argtypes = [pointer]
    driver.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    driver.cuModuleGetGlobal_v2.argtypes = [pointer, pointer, pointer, ctypes.c_char_p]
    driver.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    driver.cuMemcpyHtoDAsync_v2.argtypes = [
        ctypes.c_uint64,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
    ]
    driver.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    driver.cuFuncGetParamInfo.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]
    return driver


def tensor_map(what: TensorMap, address: int) -> bytes:
    """A tensor map of the array at an address, as Mosaic GPU and XLA make them."""
    rank, alignment = len(what.sizes), 64
    memory = ctypes.create_string_buffer(MAP_BYTES + alignment)
    start = -(-ctypes.addressof(memory) // alignment) * alignment
    words, halves = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    none = ctypes.c_int(0)  # interleaving, NaN in the place of zeros
    check(
        library().cuTensorMapEncodeTiled(
            ctypes.c_void_p(start),
            ctypes.c_int(what.element),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(address),
            words(*what.sizes),
            words(*what.strides),
            halves(*what.tile),
            halves(*[1] * rank),
            none,
            ctypes.c_int(what.swizzle),
            ctypes.c_int(what.promotion),
            none,
        )
    )
    return ctypes.string_at(start, MAP_BYTES)


def check(error: int) -> None:
    """Raises the error that a function of the driver returned; 0 is success."""
    if error:
        kind = torch.OutOfMemoryError if error == OUT_OF_MEMORY else RuntimeError
        raise kind(f"a kernel launched from PyTorch: {error_text(error)}")


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allows calls that the capture of a graph in another thread would forbid in this one."""
    mode = ctypes.c_int(RELAXED_CAPTURE)
    check(library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    try:
        yield
    finally:
        check(library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))


def error_text(error: int) -> str:
    """What the driver says about one of its error codes."""
    text = ctypes.c_char_p()
    library().cuGetErrorString(error, ctypes.byref(text))
    return text.value.decode() if text.value else f"CUDA error {error}"
