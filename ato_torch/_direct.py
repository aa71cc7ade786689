"""A function of JAX on PyTorch's tensors without JAX: its kernels, launched from here.

JAX lowers the function for CUDA once. What comes out is a list of a few operations, of which the
kernels are the ones that count; Triton's compiler and XLA's assembler turn each of these into
machine code. The list becomes a `Plan`: PyTorch allocates, the kernels go to PyTorch's current
stream, and what lies between them, a sum over partial results, is PyTorch's own. So there is
nothing to wait for, memory is PyTorch's, and a CUDA graph holds it all.

What has other operations than those in `OPERATIONS`, or more than `MOST` of them where XLA would
fuse them into a few, is `ClosedError`, and goes through `_bridge`.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from ato_jax import device, lowering
from ato_torch import _bridge, _programs

# Operations of PyTorch between the kernels: each takes the host about as long as a kernel.
MOST = 12
# A constant is kept where it takes no more than that many bytes.
KEPT_BYTES = 1 << 16
# Up to that many bytes a sum is also transposed as it is written: more, and it is slow to read.
TURNED_BYTES = 1 << 22
# What a kernel writes and nothing reads lies in one place for all, up to that many bytes.
UNREAD_BYTES = 1 << 20


def _allocator() -> Callable[[Any, Any, torch.dtype], torch.Tensor]:
    """(size, stride, dtype) -> a tensor on the current device."""

    def public(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    # The private one takes half as long.
    return getattr(torch._C._dynamo.guards, "_empty_strided_cuda", public)


DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i1": torch.bool,
    "i8": torch.int8,
    "i32": torch.int32,
    "ui32": torch.uint32,
}

# One at a time builds a plan: Triton's modules import each other, and its compiler takes all of a
# core anyway.
_building = threading.Lock()


class ClosedError(Exception):
    """Why a function has no plan."""


def execute(
    function: _programs.Function, tensors: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """The function of the tensors, all on one device: by its plan where it has one."""
    if not tensors[0].is_cuda:
        return _bridge.execute(function.jitted, tensors)
    tensors = _bridge.dense(tensors)
    plan = plan_of(function, tensors)
    if isinstance(plan, ClosedError):
        return _bridge.execute(function.jitted, tensors)
    return plan(tensors)


def plan_of(
    function: _programs.Function, tensors: Sequence[torch.Tensor]
) -> Plan | ClosedError:
    """The function's plan for tensors on a GPU of such shapes, or why there is none."""
    key = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
    try:
        return function.plans[key]
    except KeyError:
        pass
    with _building:
        if key not in function.plans:
            function.plans[key] = _build(function, tensors)
        return function.plans[key]


def ready(
    function: _programs.Function,
    tensors: Sequence[torch.Tensor],
    turned: Sequence[bool] = (),
    turned_results: Sequence[bool] = (),
) -> Plan | None:
    """The plan for tensors of such shapes and strides, if there is one that reads them as they lie.

    Tensors that are `turned` have their second and third axis exchanged, but not in memory; so
    have then the results.
    """
    if not tensors[0].is_cuda:
        return None
    if any(turned):
        tensors = [
            tensor.transpose(1, 2) if is_turned else tensor
            for tensor, is_turned in zip(tensors, turned, strict=True)
        ]
    if not all(tensor.is_contiguous() for tensor in tensors):
        return None
    plan = plan_of(function, _bridge.dense(tensors))
    if isinstance(plan, ClosedError):
        return None
    return plan.turned(turned_results) if any(turned) else plan


def _build(function: _programs.Function, tensors: Sequence[torch.Tensor]) -> Plan | ClosedError:
    place = tensors[0].device
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "ato_torch compiles a call at its first time, which a CUDA graph cannot capture: "
            "make the call once before"
        )
    try:
        # Where the user's own modes are on, none of them is meant for what is built here.
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(place), place:
            program = Program.of(function.traced, tensors)
            return Plan(program, place)
    except ClosedError as closed:
        return closed
    except Exception as error:  # other versions of JAX, of Triton, of the driver
        return ClosedError(f"{type(error).__name__}: {error}")


class Launch:
    """A kernel as a step: `inputs` and `outputs` are numbers of values.

    `rewritten` are those outputs that lie where an input lay.
    """

    def __init__(
        self,
        kernel: lowering.Kernel,
        inputs: list[int],
        outputs: list[int],
        rewritten: dict[int, int],
    ) -> None:
        self.kernel, self.inputs, self.outputs = kernel, inputs, outputs
        self.rewritten = rewritten


class Operation:
    """A function of PyTorch's as a step."""

    def __init__(
        self, function: Callable[..., torch.Tensor], inputs: list[int], output: int
    ) -> None:
        self.function, self.inputs, self.outputs = function, inputs, [output]


class Program:
    """The steps of a lowered function. Values have numbers; the first are its arguments.

    `metas` holds a tensor without memory for each value: its shape, dtype and strides.
    `constants` are the values that are the same in every call, and small.
    """

    def __init__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.metas = [torch.empty_like(tensor, device="meta") for tensor in arguments]
        self.arguments = len(arguments)
        self.steps: list[Launch | Operation] = []
        self.constants: set[int] = set()
        self.splats: dict[int, bool | int | float] = {}
        # Values that are sums: of what, over which axes.
        self.sums: dict[int, tuple[int, list[int]]] = {}
        self.results: list[int] = []

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        tensors: Sequence[torch.Tensor],
        capability: int | None = None,
    ) -> Program:
        """`capability` names the GPU where there is none."""
        program = cls(tensors)
        shapes = [
            jax.ShapeDtypeStruct(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for tensor in tensors
        ]
        module = lowering.lower(function, *shapes, capability=capability)
        functions = {
            ir.StringAttr(each.operation.attributes["sym_name"]).value: each.operation
            for each in module.body.operations
        }
        found = program._inlined(functions, "main", list(range(len(tensors))))
        program.results = program._own(found)
        program._drop_what_nothing_reads()
        program._fold_views()
        program.check()
        return program

    def check(self) -> None:
        count = sum(isinstance(step, Operation) for step in self.calls)
        if count == len(self.calls):
            raise ClosedError("it has no Triton kernel")
        if count > MOST:
            raise ClosedError(f"{count} operations lie around its kernels, which XLA fuses")

    @property
    def calls(self) -> list[Launch | Operation]:
        """The steps of every call."""
        return [step for step in self.steps if not set(step.outputs) <= self.constants]

    def _inlined(self, functions: dict[str, Any], name: str, arguments: list[int]) -> list[int]:
        """The numbers of a function's results."""
        block = functions[name].regions[0].blocks[0]
        numbers = dict(zip(block.arguments, arguments, strict=True))
        for each in block.operations:
            operation = each.operation
            inputs = [numbers[operand] for operand in operation.operands]
            if operation.name == "func.return":
                return inputs
            if operation.name == "func.call":
                callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
                outputs = self._inlined(functions, callee, inputs)
            elif lowering.is_kernel(operation):
                outputs = self._launch(operation, inputs)
            elif operation.name in OPERATIONS:
                outputs = [OPERATIONS[operation.name](self, operation, inputs)]
            else:
                raise ClosedError(f"it holds {_name(operation)}, which has no counterpart here")
            numbers.update(zip(operation.results, outputs, strict=True))
        raise AssertionError("a function returns")

    def _launch(self, operation: Any, inputs: list[int]) -> list[int]:
        inputs = [self._dense(number) for number in inputs]
        outputs = []
        for result in operation.results:
            shape, dtype = _type(result)
            outputs.append(self._value(torch.empty(shape, dtype=dtype, device="meta")))
        rewritten = {}
        for each in ir.ArrayAttr(operation.attributes["output_operand_aliases"]):
            alias = stablehlo.OutputOperandAlias(each)
            place = alias.operand_index
            # A kernel writes to a copy of its own, as XLA has it where an argument is not donated.
            inputs[place] = self.apply(_copied, inputs[place])
            self.constants.discard(inputs[place])
            rewritten[outputs[(alias.output_tuple_indices or [0])[0]]] = inputs[place]
        self.steps.append(Launch(lowering.kernel_of(operation), inputs, outputs, rewritten))
        return outputs

    def apply(self, function: Callable[..., torch.Tensor], *inputs: int) -> int:
        """One more value: PyTorch's function of others."""
        meta = function(*(self.metas[number] for number in inputs))
        output = self._value(meta)
        self.steps.append(Operation(function, list(inputs), output))
        small = meta.untyped_storage().nbytes() <= KEPT_BYTES
        if small and self.constants.issuperset(inputs):
            self.constants.add(output)
        return output

    def _value(self, meta: torch.Tensor) -> int:
        self.metas.append(meta)
        return len(self.metas) - 1

    def _dense(self, number: int) -> int:
        """The value as kernels read it."""
        meta = self.metas[number]
        offset = meta.storage_offset() * meta.itemsize
        if meta.is_contiguous() and not offset % _bridge.ALIGNMENT:
            return number
        return self.apply(_copied, number)

    def _own(self, results: list[int]) -> list[int]:
        """The results, each in memory of its own; strides are what they are."""
        shared = [self._base(number) for number in range(self.arguments)]
        shared += [self._base(number) for number in self.constants]
        found: list[int] = []
        for number in results:
            if any(self._base(number) is base for base in shared):
                number = self.apply(_copied, number)
                self.constants.discard(number)
            shared.append(self._base(number))
            found.append(number)
        return found

    def _base(self, number: int) -> torch.Tensor:
        """Whose memory it is."""
        meta = self.metas[number]
        return meta._base if meta._is_view() else meta  # type: ignore[return-value]

    def _drop_what_nothing_reads(self) -> None:
        read = set(self.results)
        kept = []
        for step in reversed(self.steps):
            if read & set(step.outputs):
                read |= set(step.inputs)
                kept.append(step)
        self.steps = kept[::-1]


    def _fold_views(self) -> None:
        """A kernel's output that PyTorch's operations read as one view is allocated as that."""
        fresh = set()
        for step in self.steps:
            if isinstance(step, Launch):
                fresh |= set(step.outputs).difference(step.rewritten, self.results)
        operations = [step for step in self.steps if isinstance(step, Operation)]
        allocated = list(self.metas)
        for step in operations:
            (output,) = step.outputs
            if len(step.inputs) != 1 or step.inputs[0] not in fresh.difference(self.results):
                continue
            (base,), view = step.inputs, self.metas[output]
            others = [other for other in operations if base in other.inputs]
            span = 1 + sum(
                (size - 1) * stride
                for size, stride in zip(view.shape, view.stride(), strict=True)
            )
            whole = view.numel() == self.metas[base].numel() == span and not view.storage_offset()
            if self._base(output) is allocated[base] and others == [step] and whole:
                self.steps.remove(step)
                self.metas[base] = torch.empty_strided(
                    view.shape, view.stride(), dtype=view.dtype, device="meta"
                )
                for reader in self.steps:
                    reader.inputs = [base if n == output else n for n in reader.inputs]
                self.results = [base if n == output else n for n in self.results]


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _name(operation: Any) -> str:
    if operation.name == "stablehlo.custom_call":
        return ir.StringAttr(operation.attributes["call_target_name"]).value
    return operation.name


def _type(value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    found = ir.RankedTensorType(value.type)
    name = str(found.element_type)
    if name not in DTYPES:
        raise ClosedError(f"it holds {name}, which has no counterpart here")
    return tuple(found.shape), DTYPES[name]


def _integers(operation: Any, name: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(operation.attributes[name]))


def _constant(program: Program, operation: Any, inputs: list[int]) -> int:
    value = ir.DenseElementsAttr(operation.attributes["value"])
    if not value.is_splat:
        raise ClosedError("it holds a table of constants")
    splat: Any = value.get_splat_value()
    number = splat.value
    shape, dtype = _type(operation.results[0])

    def constant() -> torch.Tensor:  # where `torch.device` says
        return torch.full((), number, dtype=dtype).expand(shape)

    with torch.device("meta"):
        output = program._value(constant())
    program.steps.append(Operation(constant, [], output))
    program.constants.add(output)
    program.splats[output] = number
    return output


def _broadcast(program: Program, operation: Any, inputs: list[int]) -> int:
    shape, _ = _type(operation.results[0])
    places = _integers(operation, "broadcast_dimensions")
    if places != sorted(places):
        raise ClosedError("it holds a broadcast that transposes")
    between = [1] * len(shape)
    for place, size in zip(places, program.metas[inputs[0]].shape, strict=True):
        between[place] = size
    return program.apply(lambda x: x.reshape(between).expand(shape), *inputs)


def _reshape(program: Program, operation: Any, inputs: list[int]) -> int:
    shape, _ = _type(operation.results[0])
    return program.apply(lambda x: x.reshape(shape), *inputs)


def _transpose(program: Program, operation: Any, inputs: list[int]) -> int:
    places = _integers(operation, "permutation")
    array, axes = program.sums.get(inputs[0], (inputs[0], []))
    if axes and program.metas[array].untyped_storage().nbytes() <= TURNED_BYTES:
        # One operation instead of the sum and a copy of it.
        kept = [axis for axis in range(program.metas[array].ndim) if axis not in axes]
        order = [*(kept[place] for place in places), *axes]
        turned = program.apply(lambda x: x.permute(order), array)
        last = list(range(len(kept), len(order)))
        return program.apply(lambda x: x.sum(last), turned)
    return program.apply(lambda x: x.permute(places), *inputs)


def _slice(program: Program, operation: Any, inputs: list[int]) -> int:
    names = ("start_indices", "limit_indices", "strides")
    cuts = tuple(map(slice, *(_integers(operation, name) for name in names)))
    return program.apply(lambda x: x[cuts], *inputs)


def _convert(program: Program, operation: Any, inputs: list[int]) -> int:
    _, dtype = _type(operation.results[0])
    if program.metas[inputs[0]].dtype == dtype:
        return inputs[0]
    output = program.apply(lambda x: x.to(dtype), *inputs)
    if inputs[0] in program.splats:
        program.splats[output] = program.splats[inputs[0]]
    return output


def _pad(program: Program, operation: Any, inputs: list[int]) -> int:
    array, filling = inputs
    low, high, between = (
        _integers(operation, name)
        for name in ("edge_padding_low", "edge_padding_high", "interior_padding")
    )
    if any(between) or filling not in program.splats:
        raise ClosedError("it holds a pad that PyTorch has not")
    if not any(low) and not any(high):
        return array
    widths = [width for pair in zip(low[::-1], high[::-1], strict=True) for width in pair]
    value = program.splats[filling]
    return program.apply(lambda x: torch.nn.functional.pad(x, widths, value=value), array)


def _concatenate(program: Program, operation: Any, inputs: list[int]) -> int:
    axis = ir.IntegerAttr(operation.attributes["dimension"]).value
    return program.apply(lambda *parts: torch.cat(parts, axis), *inputs)


def _reduce(program: Program, operation: Any, inputs: list[int]) -> int:
    """A sum in float32."""
    body = [each.operation.name for each in operation.regions[0].blocks[0].operations]
    array, start = inputs[0], inputs[-1]
    is_sum = body == ["stablehlo.add", "stablehlo.return"] and program.splats.get(start) == 0
    if len(inputs) != 2 or not is_sum or program.metas[array].dtype != torch.float32:
        raise ClosedError("it holds a reduction that is no sum in float32")
    axes = _integers(operation, "dimensions")
    shape, _ = _type(operation.results[0])
    if all(program.metas[array].shape[axis] == 1 for axis in axes):
        output = program.apply(lambda x: x.reshape(shape), array)
    else:
        output = program.apply(lambda x: x.sum(axes), array)
    program.sums[output] = array, axes
    return output


def _elementwise(function: Callable[..., torch.Tensor]) -> Any:
    def read(program: Program, operation: Any, inputs: list[int]) -> int:
        return program.apply(function, *inputs)

    return read


# Of StableHLO: (program, operation, inputs) -> the number of the value.
OPERATIONS: dict[str, Callable[[Program, Any, list[int]], int]] = {
    "stablehlo.constant": _constant,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.reshape": _reshape,
    "stablehlo.transpose": _transpose,
    "stablehlo.slice": _slice,
    "stablehlo.convert": _convert,
    "stablehlo.pad": _pad,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.reduce": _reduce,
    "stablehlo.add": _elementwise(torch.add),
    "stablehlo.subtract": _elementwise(torch.sub),
    "stablehlo.multiply": _elementwise(torch.mul),
    "stablehlo.negate": _elementwise(torch.neg),
    "stablehlo.maximum": _elementwise(torch.maximum),
    "stablehlo.minimum": _elementwise(torch.minimum),
    "stablehlo.exponential": _elementwise(torch.exp),
}


class Plan:
    """A program on one GPU, ready to run on tensors that are dense as its arguments are."""

    def __init__(self, program: Program, place: torch.device) -> None:
        self.program, self.index = program, place.index
        self.facts = [(meta.shape, meta.stride(), meta.dtype) for meta in program.metas]
        self.values: list[Any] = [None] * len(program.metas)
        self.addresses = [0] * len(program.metas)
        for step in program.steps:
            if set(step.outputs) <= program.constants and isinstance(step, Operation):
                inputs = [self.values[number] for number in step.inputs]
                (output,) = step.outputs
                self.values[output] = constant = step.function(*inputs)
                self.addresses[output] = constant.data_ptr()
                _kept.append(constant)
        read = {number for step in program.calls for number in step.inputs}
        kept = program.constants.union(program.results)
        last = {number: n for n, step in enumerate(program.calls) for number in step.inputs}
        self.steps: list[Step] = []
        for n, step in enumerate(program.calls):
            done = [number for number in set(step.inputs) - kept if last[number] == n]
            if isinstance(step, Operation):
                self.steps.append(_applying(step, done))
                continue
            unread = [
                number
                for number in step.outputs
                if number not in read.union(kept, step.rewritten)
                and program.metas[number].untyped_storage().nbytes() <= UNREAD_BYTES
            ]
            for number in unread:
                self.addresses[number] = _nowhere(place).data_ptr()
            self.steps.append(_launching(step, place, unread, done))
        self.values = self.values[program.arguments :]
        self.addresses = self.addresses[program.arguments :]
        self.answer = _getter(program.results)
        # Other streams read the constants, too.
        torch.cuda.current_stream(place).synchronize()

    def turned(self, which: Sequence[bool]) -> Plan | None:
        """The plan that gives those results with their second and third axis exchanged, but not in
        memory, and takes any argument so. None where an operation of PyTorch's would see it.
        `which` may tell of more results than there are.
        """
        program = self.program
        results = [n for n, is_it in zip(program.results, which, strict=False) if is_it]
        seen = {*range(program.arguments), *results}
        fresh = {n for step in program.steps if isinstance(step, Launch) for n in step.outputs}
        for step in program.calls:
            if isinstance(step, Operation) and seen.intersection(step.inputs):
                return None
        if not fresh.issuperset(results):
            return None
        plan = copy.copy(self)
        plan.facts = list(self.facts)
        for number in results:
            meta = program.metas[number].transpose(1, 2)
            plan.facts[number] = meta.shape, meta.stride(), meta.dtype
        return plan

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if torch._C._cuda_getDevice() != self.index:
            with torch.cuda.device(self.index):
                return self(tensors)
        tensors = [
            _aligned(tensor) if tensor.data_ptr() & MISALIGNED or tensor.is_neg() else tensor
            for tensor in tensors
        ]
        values = [*tensors, *self.values]
        addresses = [tensor.data_ptr() for tensor in tensors]
        addresses += self.addresses
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        for step in self.steps:
            step(self.facts, values, addresses, stream)
        return self.answer(values)


# By value's number: what to allocate, the tensors, their addresses. Last, the stream.
Step = Callable[[list[Any], list[Any], list[int], int], None]

MISALIGNED = _bridge.ALIGNMENT - 1
# The constants of all plans: a CUDA graph may outlive the plan that it holds.
_kept: list[torch.Tensor] = []


@functools.cache
def _nowhere(place: torch.device) -> torch.Tensor:
    """Where kernels write what nothing reads, all of them to the same memory."""
    return torch.empty(UNREAD_BYTES, dtype=torch.uint8, device=place)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, with its axes in memory as they were."""
    return tensor.detach().resolve_neg().clone(memory_format=torch.preserve_format)


def _getter(numbers: list[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """`operator.itemgetter` for any count of numbers."""
    if len(numbers) > 1:
        return operator.itemgetter(*numbers)
    return lambda values: [values[number] for number in numbers]


def _applying(step: Operation, done: list[int]) -> Step:
    function, inputs, (output,) = step.function, step.inputs, step.outputs

    def apply(facts: list[Any], values: list[Any], addresses: list[int], stream: int) -> None:
        values[output] = result = function(*[values[number] for number in inputs])
        addresses[output] = result.data_ptr()
        for number in done:
            values[number] = None

    return apply


def _launching(step: Launch, place: torch.device, unread: list[int], done: list[int]) -> Step:
    capability = device.describe(_bridge.jax_device(place)).capability
    assert capability is not None
    number_of_it = 10 * capability[0] + capability[1]
    code = lowering.compile_kernel(step.kernel, number_of_it)
    context, kernel = _loaded(code, number_of_it)
    grid, threads = step.kernel.grid, 32 * step.kernel.num_warps
    shared, name = code.shared_bytes, code.name
    # An output that lies where an input lay is that input.
    fresh = [n for n in step.outputs if n not in unread and n not in step.rewritten]
    rewritten = list(step.rewritten.items())
    places = [*step.inputs, *(step.rewritten.get(n, n) for n in step.outputs)]
    count = len(places)
    pick: Any = _getter(places)
    launch_kernel, empty_strided = _driver().cuLaunchKernel, _allocator()
    idle: list[_Arguments] = []

    def launch(facts: list[Any], values: list[Any], addresses: list[int], stream: int) -> None:
        for number in fresh:
            values[number] = result = empty_strided(*facts[number])
            addresses[number] = result.data_ptr()
        for number, before in rewritten:
            values[number], addresses[number] = values[before], addresses[before]
        try:
            arguments = idle.pop()
        except IndexError:
            arguments = _Arguments(kernel, grid, threads, shared, code.parameters)
        arguments.pointers[:count] = pick(addresses)
        arguments.stream.value = stream
        error = launch_kernel(*arguments.of_call)
        if error == INVALID_CONTEXT:  # a thread in which CUDA was not used yet
            _check(_driver().cuCtxSetCurrent(context), name)
            error = launch_kernel(*arguments.of_call)
        idle.append(arguments)
        if error:
            _check(error, name)
        for number in done:
            values[number] = None

    return launch


class _Arguments:
    """Those of `cuLaunchKernel`, as C has them: made once and filled in for each launch.

    One launch at a time may use them; the driver has copied what they hold when it returns.
    """

    def __init__(
        self,
        kernel: ctypes.c_void_p,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        parameters: int,
    ) -> None:
        # What is not filled in is Triton's own scratch, which is none.
        self.pointers = (ctypes.c_uint64 * parameters)()
        self.stream = ctypes.c_void_p()
        self.size = ctypes.c_size_t(ctypes.sizeof(self.pointers))
        extra = (ctypes.c_void_p * 5)(
            LAUNCH_PARAM_BUFFER_POINTER,
            ctypes.addressof(self.pointers),
            LAUNCH_PARAM_BUFFER_SIZE,
            ctypes.addressof(self.size),
            None,
        )
        numbers = map(ctypes.c_uint, (*grid, threads, 1, 1, shared))
        self.of_call = (kernel, *numbers, self.stream, None, extra)


# cuda.h's names for these numbers.
INVALID_CONTEXT = 201
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
LAUNCH_PARAM_BUFFER_POINTER = 1
LAUNCH_PARAM_BUFFER_SIZE = 2
# What a launch gets without asking for more.
SHARED_BYTES = 48 * 1024


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    driver.cuCtxSetCurrent.argtypes = [pointer]
    driver.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    driver.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    driver.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    return driver


def _check(error: int, name: str) -> None:
    if error:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(error, ctypes.byref(text))
        said = text.value.decode() if text.value else f"CUDA error {error}"
        raise RuntimeError(f"the kernel {name!r}: {said}")


def _loaded(
    code: lowering.Code, capability: int
) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """The current context, and the kernel in it. It stays there: plans are kept."""
    driver = _driver()
    context, module, kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    image = _image(code, capability)
    torch.cuda.current_stream().query()  # PyTorch makes the context when it is first used
    for error in (
        driver.cuCtxGetCurrent(ctypes.byref(context)),
        driver.cuModuleLoadData(ctypes.byref(module), image),
        driver.cuModuleGetFunction(ctypes.byref(kernel), module, code.name.encode()),
    ):
        _check(error, code.name)
    if code.shared_bytes > SHARED_BYTES:
        attribute = MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(kernel, attribute, code.shared_bytes), code.name)
    return context, kernel


def _image(code: lowering.Code, capability: int) -> bytes:
    """What the driver loads: machine code by XLA's assembler, or PTX for the driver's own."""
    found = lowering.xla_ptxas()
    if found is not None and lowering.is_right(code.ptx, found[1]):
        return lowering.assemble(code.ptx, capability, found[0])
    version = driver_version()
    if lowering.is_right(code.ptx, version):
        return code.ptx.encode()
    ours = "none" if found is None else "{}.{}".format(*found[1])
    raise ClosedError(
        f"the kernel {code.name!r} needs an assembler of CUDA "
        "{}.{} or newer: ".format(*lowering.ASSEMBLER)
        + f"JAX's is {ours}, the driver's is " + "{}.{}".format(*version)
    )


@functools.cache
def driver_version() -> tuple[int, int]:
    """The CUDA version that the driver has."""
    number = ctypes.c_int()
    _check(_driver().cuDriverGetVersion(ctypes.byref(number)), "driver")
    return number.value // 1000, number.value % 1000 // 10
