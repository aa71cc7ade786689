"""Direct launches: a JAX function's kernels, launched from PyTorch without JAX.

JAX compiles the function once. `_executable` reads the kernels, copies and allocations of the
compiled program, and `_plan` makes a `Plan` of them: PyTorch allocates the memory, and the same
machine code is launched in PyTorch's current stream, in the same order. So no stream waits for
another, the memory is PyTorch's, and the caller's CUDA graph can capture all of it.

A new plan runs once beside JAX on random tensors and must give the same bits. A function whose
program has other steps, or bytes that are not understood, gets a `ClosedError` in place of a plan;
its calls go through JAX (`_bridge`), and a warning says so once for each reason.

Tensors that are not contiguous, such as parts of a projection, are read where they lie if the
kernels read them through tensor maps alone (`_strided`). Each pattern of strides is a plan of its
own, which must give the bits of the plan for contiguous tensors. Its trial allocates all memory
from the first element of such a tensor to its last. All other tensors are copied.

ATO_TORCH_DIRECT=0 in the environment turns direct launches off, and that warning with them.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import warnings
from collections.abc import Callable, Container, Sequence
from typing import Any, Literal

import jax
import torch

from ato_torch import (
    _bridge,
    _compiling,
    _copies,
    _driver,
    _executable,
    _programs,
    _strided,
)
from ato_torch._errors import ClosedError, NoMemoryError, NotMeantError
from ato_torch._kernels import Kernels, unload_retired
from ato_torch._plan import Plan

# An integer dtype for each element size in bytes, to compare bits.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# All bits of a float of any type set: NaN.
NAN_BYTE = 0xFF
# How many patterns of strides a function has plans for. Tensors with others are copied.
MOST_STRIDED = 8
# How many patterns of strides without a plan a function remembers. Others may be tried again.
MOST_REFUSED = 64
# The trial of a pattern of strides takes at most this many times the memory of all the call's
# tensors. The parts of a projection span it once, whichever of them are read where they lie; the
# factor leaves room for a projection with more parts than query, key and value. One layer of a
# cache for many layers spans all of them.
MOST_SPANNED = 4
# XLA's errors contain this word when memory is exhausted.
XLA_NO_MEMORY = "RESOURCE_EXHAUSTED"
# The environment variable that turns direct launches off.
SWITCH = "ATO_TORCH_DIRECT"


def is_on() -> bool:
    """Whether the environment leaves direct launches on.

    Raises:
      ValueError: the variable has a value other than 0 and 1.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"the environment variable {SWITCH} must be 0, so that every call goes through JAX, or "
            f"1, as without it; got {value!r}"
        )
    return value != "0"


def execute(
    function: _programs.Function, tensors: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """The function's results for tensors on one device: by its plan where it has one.

    Raises:
      RuntimeError: the stream captures a CUDA graph, and the function has no plan.
    """
    if not tensors[0].is_cuda:
        return _bridge.execute(function.jitted, tensors)
    plan = plan_of(function, tensors)
    if isinstance(plan, ClosedError):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "ato_torch cannot be captured into a CUDA graph where it goes through JAX, which "
                f"launches its work itself. This call does: {plan}"
            )
        return _bridge.execute(function.jitted, tensors)
    plan, copied = strided(function, plan, tensors)
    return plan(
        [
            tensor.detach().contiguous() if is_copied else tensor
            for tensor, is_copied in zip(tensors, copied, strict=True)
        ]
    )


def plan_of(
    function: _programs.Function, tensors: Sequence[torch.Tensor]
) -> Plan | ClosedError:
    """The function's plan for contiguous tensors of these shapes on a GPU, or why there is none."""
    key = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
    try:
        return function.plans[key]
    except KeyError:
        pass
    with function.planning:
        if key in function.plans:
            return function.plans[key]
        # A plan takes a second to compile, so the 1st, 2nd, 4th, 8th, ... call tries again.
        calls = function.short_of_memory.get(key, 0) + 1
        if calls & (calls - 1):
            found: Plan | ClosedError = NoMemoryError("there was no memory to try its launches")
        else:
            tensors = _bridge.dense(tensors)
            found = _build(function, tensors)
            if isinstance(found, NoMemoryError):
                # JAX and the driver cannot use the memory that PyTorch keeps cached.
                torch.cuda.empty_cache()
                found = _build(function, tensors)
        if isinstance(found, NoMemoryError):
            function.short_of_memory[key] = calls
        else:
            function.plans[key] = found
            function.short_of_memory.pop(key, None)
    if isinstance(found, ClosedError) and not isinstance(found, NotMeantError):
        _warn_once(str(found))
    return found


# The reasons that were warned of, without the numbers in them.
_warned: set[str] = set()
_warning = threading.Lock()


def _warn_once(reason: str) -> None:
    kind = re.sub(r"\d+", "", reason)
    with _warning:
        if kind in _warned:
            return
        _warned.add(kind)
    warnings.warn(
        "a call of ato_torch goes through JAX, since its kernels cannot be launched from PyTorch "
        f"directly: {reason}. That takes the host about 10 times as long, and no CUDA graph can "
        "capture the call. ato_torch.explain says how a call is launched. This warning is given "
        f"once for each reason; the environment variable {SWITCH}=0 turns direct launches off, and "
        "the warning with them",
        RuntimeWarning,
        stacklevel=2,
    )


def strided(
    function: _programs.Function, plan: Plan, tensors: Sequence[torch.Tensor]
) -> tuple[Plan, tuple[bool, ...]]:
    """A plan for tensors with these strides, and which of them must be made contiguous first.

    `plan` is the function's plan for contiguous tensors of these shapes.
    """
    found = _settled(function, plan, tensors)
    return found or (plan, tuple([not tensor.is_contiguous() for tensor in tensors]))


def _settled(
    function: _programs.Function, plan: Plan, tensors: Sequence[torch.Tensor]
) -> tuple[Plan, tuple[bool, ...]] | None:
    """The result of `strided`; None if a later call may find a plan that copies less."""
    copied = tuple([not tensor.is_contiguous() for tensor in tensors])
    if not any(copied):
        return plan, copied
    key = tuple([(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors])
    try:
        return function.strided[key]
    except KeyError:
        pass
    if function.refused.get(key) == 0:
        return plan, copied
    if len(function.strided) >= MOST_STRIDED:
        return plan, copied
    if torch.cuda.is_current_stream_capturing():  # the trial would be captured
        return None
    with function.planning:
        if key in function.strided:  # another thread has tried it
            return function.strided[key]
        if len(function.strided) >= MOST_STRIDED:
            return plan, copied
        # A trial that could not be made is repeated by the 2nd, 4th, 8th, ... call.
        calls = function.refused.pop(key, 0) + 1
        found = None if calls & (calls - 1) else _strided_plan(plan, tensors, copied)
        if found is not None and found[0] is not plan:
            function.strided[key] = found
        else:
            if len(function.refused) >= MOST_REFUSED:
                function.refused.clear()
            function.refused[key] = calls if found is None else 0
        return found


def copies(function: _programs.Function, plan: Plan, tensors: Sequence[torch.Tensor]) -> int:
    """How many of the tensors a call copies; `plan` is as in `strided`."""
    _, copied = strided(function, plan, tensors)
    read = [tensor for tensor, is_it in zip(tensors, copied, strict=True) if not is_it]
    if not any(map(_bridge.is_unreadable, read)):
        return sum(copied)
    # The plan for contiguous tensors takes the place of the one with other tensor maps.
    return sum(
        not tensor.is_contiguous() or _bridge.is_unreadable(tensor) for tensor in tensors
    )


def ready(
    function: _programs.Function,
    tensors: Sequence[torch.Tensor],
    exchanged: Sequence[bool] = (),
    exchanged_results: Sequence[bool] = (),
) -> tuple[Plan, tuple[bool, ...]] | Literal[False] | None:
    """The plan for tensors of these shapes and strides, and which must be made contiguous first.

    `exchanged` says which tensors, and `exchanged_results` which results, have their second and
    third axis exchanged while their memory is unchanged. False where there is no direct launch, and
    None where a later call may find another answer.
    """
    if not tensors[0].is_cuda:
        return False
    if any(exchanged):
        tensors = _bridge.exchanged(tensors, exchanged)
    found = plan_of(function, tensors)
    if isinstance(found, ClosedError):
        return None if isinstance(found, NoMemoryError) else False
    settled = _settled(function, found, tensors)
    if settled is None:
        return None
    plan, copied = settled
    if any(exchanged):
        plan = plan.with_exchanged(exchanged_results, exchanged)
    return plan, copied


def _build(function: _programs.Function, tensors: Sequence[torch.Tensor]) -> Plan | ClosedError:
    place = tensors[0].device
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "ato_torch compiles a call at its first time, which a CUDA graph cannot capture: "
            "make the call once before"
        )
    if not is_on():
        return NotMeantError(f"{SWITCH}=0 in the environment turns direct launches off")
    if not all(tensor.numel() for tensor in tensors):
        return NotMeantError("an array is empty")
    try:
        # Modes that the caller has turned on must not apply to the trial below.
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(place):
            unload_retired()
            compiled, results = _compiled(function.traced, tensors)
            executable = _executable.read(compiled.runtime_executable().serialize())
            plan = Plan(executable, tensors, results, Kernels(executable))
            drawn = _drawn(tensors)
            wanted = _bridge.execute(compiled, drawn)
            _compare(plan(drawn), wanted)
            _compare(plan(drawn, as_graph=False), wanted)
            return plan
    except ClosedError as closed:
        return ClosedError(*closed.args)  # the traceback of `closed` would keep tensors alive
    except _executable.UnknownError as error:
        return ClosedError(f"what XLA compiled is not understood: {error}")
    except Exception as error:  # any error that another version of JAX or the driver may raise
        _raise_if_broken(place, error)
        is_memory = isinstance(error, torch.OutOfMemoryError) or XLA_NO_MEMORY in str(error)
        kind = NoMemoryError if is_memory else ClosedError
        return kind(f"{type(error).__name__}: {error}")


def _strided_plan(
    plan: Plan, tensors: Sequence[torch.Tensor], copied: tuple[bool, ...]
) -> tuple[Plan, tuple[bool, ...]] | None:
    """The result of `strided`: `plan` with other tensor maps, or itself where the maps cannot be.

    None if there was no memory for the trial, or if some of the tensors lie where no map reads
    them: then the call copies, and would be compared with itself.
    """
    arrays = {
        n: _array(tensor)
        for n, (tensor, is_copied) in enumerate(zip(tensors, copied, strict=True))
        if is_copied and tensor.stride(-1) == 1
    }
    place = tensors[0].device
    try:
        executable, read = _strided.restrided(plan.executable, arrays)
        if not read or _is_far_apart(tensors, read):
            return plan, copied
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(place):
            found = plan.with_maps(executable)
            like = [
                tensor if n in read else tensor.contiguous() for n, tensor in enumerate(tensors)
            ]
            laid = _laid_out(_drawn(like), like, read)
            if any(map(_bridge.is_unreadable, laid)):
                return None
            wanted = plan([tensor.contiguous() for tensor in laid])
            _compare(found(laid), wanted)
            _compare(found(laid, as_graph=False), wanted)
    except torch.OutOfMemoryError:
        return None
    except Exception as error:  # the driver may refuse the maps
        _raise_if_broken(place, error)
        return plan, copied
    return found, tuple(is_it and n not in read for n, is_it in enumerate(copied))


def _array(tensor: torch.Tensor) -> _strided.Array:
    width = tensor.element_size()
    *sizes, last = tensor.shape
    strides = [stride * width for stride in tensor.stride()[:-1]]
    return _strided.Array((*sizes, last * width), (*strides, 1))


def _laid_out(
    drawn: Sequence[torch.Tensor], like: Sequence[torch.Tensor], which: Container[int]
) -> list[torch.Tensor]:
    """Copies of some of `drawn` that lie as those of `like` do, with NaN around them.

    Those that share memory share it here, so that they take no more of it than the original.
    """
    spans = _spans(like, which)
    memory = {
        number: torch.full((end - begin,), NAN_BYTE, dtype=torch.uint8, device=like[0].device)
        for number, (begin, end) in spans.items()
    }
    found = []
    for n, (numbers, tensor) in enumerate(zip(drawn, like, strict=True)):
        if n in which:
            begin, _ = spans[_memory(tensor)]
            part = memory[_memory(tensor)][tensor.data_ptr() - begin :]
            whole = part[: len(part) // tensor.element_size() * tensor.element_size()]
            laid = whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
            numbers = laid.copy_(numbers)
        found.append(numbers)
    return found


def _spans(
    tensors: Sequence[torch.Tensor], which: Container[int]
) -> dict[int, tuple[int, int]]:
    """The first address of some tensors in each piece of memory, and the end of the last one."""
    spans: dict[int, tuple[int, int]] = {}
    for n, tensor in enumerate(tensors):
        if n in which:
            first = tensor.data_ptr()
            end = first + _copies.span_of(tensor) * tensor.element_size()
            begin, behind = spans.get(_memory(tensor), (first, end))
            spans[_memory(tensor)] = min(begin, first), max(behind, end)
    return spans


def _is_far_apart(tensors: Sequence[torch.Tensor], which: Container[int]) -> bool:
    """Whether the trial with some of the tensors read where they lie takes too much memory."""
    spanned = sum(end - begin for begin, end in _spans(tensors, which).values())
    given = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return spanned > MOST_SPANNED * given


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _raise_if_broken(place: torch.device, error: Exception) -> None:
    """Raises a RuntimeError if a launch has made CUDA unusable in this process.

    Calls through JAX would fail, too, so this is no reason to go through JAX.
    """
    try:
        driver = _driver.library()
    except OSError:  # without a driver nothing was launched
        return
    with torch.cuda.device(place):
        stream = torch.cuda.current_stream().cuda_stream
        code = driver.cuStreamSynchronize(ctypes.c_size_t(stream))
    if code in _driver.STICKY_ERRORS:
        raise RuntimeError(
            "the trial of a first call's kernels, launched from PyTorch beside JAX's own launch, "
            f"has left CUDA unusable in this process: {_driver.error_text(code)}. Start it anew; "
            f"with the environment variable {SWITCH}=0 JAX alone launches"
        ) from error


def _drawn(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Random tensors for the trial, like the given ones.

    The given numbers may all be 0, or equal for q, k and v, and then hide a mistake. A tensor
    without positive (or negative) numbers gets none: a decay above 0 would overflow. Integers stay
    as they are: lengths, offsets and segments must be valid. Float8 tensors are queries, keys and
    values, and get numbers of both signs.
    """
    generator = torch.Generator(tensors[0].device).manual_seed(0)
    drawn = []
    for tensor in tensors:
        if tensor.dtype is torch.float8_e4m3fn:
            # PyTorch neither draws nor compares in 8 bits. Normal numbers are finite there.
            wide = torch.empty_like(tensor, dtype=torch.bfloat16)
            tensor = wide.normal_(generator=generator).to(tensor.dtype)
        elif tensor.is_floating_point():
            numbers = torch.empty_like(tensor).normal_(generator=generator)
            if (tensor <= 0).all():
                numbers.abs_().neg_()
            elif (tensor >= 0).all():
                numbers.abs_()
            tensor = numbers
        drawn.append(tensor)
    return drawn


def _compiled(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor]
) -> tuple[Any, list[torch.Tensor]]:
    """The function, compiled by JAX, and tensors on `meta` with its results' shapes and dtypes."""
    place = _bridge.jax_device(tensors[0].device)
    sharding = jax.sharding.SingleDeviceSharding(place)
    shapes = [
        jax.ShapeDtypeStruct(
            tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), sharding=sharding
        )
        for tensor in tensors
    ]
    # `keep_unused`: parameters are found by their position among the tensors. The lambda is new
    # each time, because JAX keeps a compiled program for as long as its function exists.
    jitted = _compiling.jit(lambda *arrays: function(*arrays), place, keep_unused=True)
    lowered = jitted.lower(*shapes)
    compiled = lowered.compile()
    results = [
        torch.empty(info.shape, dtype=getattr(torch, str(info.dtype)), device="meta")
        for info in jax.tree.leaves(lowered.out_info)
    ]
    return compiled, results


def _compare(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    """Raises a `ClosedError` unless all bits are equal."""
    for n, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        bits = BITS[one.element_size()]
        if one.shape != other.shape:
            raise ClosedError(f"result {n} of its launches has another shape than JAX's")
        if not torch.equal(one.view(bits), other.view(bits)):
            count = int((one.view(bits) != other.view(bits)).sum())
            raise ClosedError(
                f"result {n} of its launches is not what JAX gives, in {count} numbers of "
                f"{one.numel()}"
            )
