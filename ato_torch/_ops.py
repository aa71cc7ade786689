"""A call of ato_jax as one differentiable function of PyTorch's tensors.

Two custom ops stand for every call, so that PyTorch's compilers and transforms can handle it:

    ato::forward(call, tensors) -> outputs
    ato::backward(call, tensors, needed, given) -> gradients

`call` is the text of a `Call`. The backward op takes the tensors of the forward op, its outputs,
and the cotangents that are `given`; `needed` says for each tensor of the forward op whether its
gradient is needed. Where nothing traces, the same two functions run without the ops, which takes
less time on the host.

vmap maps the program inside JAX. Derivatives of second order and of forward mode are refused. A
CUDA graph cannot capture what JAX launches; the ops' tag keeps compilers from trying.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from ato_jax import device
from ato_jax.ops.common import axes
from ato_torch import (
    _bridge,
    _calls,
    _float8,
    _modes,
    _profiling,
    _programs,
)
from ato_torch._errors import NotReadError

Tensors = Sequence[torch.Tensor]
PARAMETERS = _calls.PARAMETERS
QKV = 3  # the tensors q, k and v, in front of the scales of a call on float8 tensors
TELLS_FUNCTIONS_APART = torch.__version__ >= "2.13"


def run(op: str, tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> Tensors:
    """The op's outputs.

    Args:
      op: The op's name, a key of `_adapters.OPS`.
      tensors: The arrays that the op's `prepare` takes, by name, on one device. Their shapes and
        dtypes are such that `prepare` changes neither for an argument with a gradient.
      options: The other arguments of `prepare`.
    """
    leaves = list(tensors.values())
    _modes.refuse_forward_mode(leaves)
    differentiates = torch.is_grad_enabled() and any(
        tensor.requires_grad for name, tensor in tensors.items() if name not in PARAMETERS
    )
    if torch.compiler.is_compiling():
        names, values = tuple(options), options.values()
        transformed = _modes.is_transformed()
        # Inside a transform no tensor shows whether torch.func needs its gradient.
        training = differentiates or (transformed and torch.is_grad_enabled())
        text = _text(op, tuple(tensors), training, names, *values)
        return _transformed(text, *leaves) if transformed else _forward(text, leaves)
    program = program_of(op, tuple(tensors), leaves, differentiates, options)
    if _modes.is_transformed():
        return _Call.apply(program, *leaves)
    if not _modes.runs_plainly(leaves):
        return _forward(program.text, leaves)
    return run_plainly(program, leaves, differentiates)


def refuse_unread(op: str, tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    """Raises a `NotReadError` for a call on float8 tensors whose 8 bits no kernel reads.

    The arguments are those of `run`. Where a compiler looks on, nothing is decided yet: the op
    decides when it runs.
    """
    if torch.compiler.is_compiling():
        return
    leaves = list(tensors.values())
    program = program_of(op, tuple(tensors), leaves, False, options)
    if not program.reads_float8(_shapes(leaves)):
        raise NotReadError


def program_of(
    op: str,
    arrays: tuple[str, ...],
    tensors: Tensors,
    differentiates: bool,
    options: dict[str, Any],
) -> _programs.Program:
    interpreting = device.interpreting()
    call = _calls.Call(op, arrays, tuple(options.items()), differentiates, interpreting)
    place = _bridge.jax_device(tensors[0].device)
    facts = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
    try:
        return _programs.of_call(call, place, facts)
    except TypeError:  # a size is a PyTorch symbol; an option without a hash is refused later
        return _programs.Program(call, place)


def _facts(tensors: Tensors) -> tuple[Any, ...]:
    """Shapes and dtypes, the key of a call's programs.

    Empty while sizes are PyTorch's symbols, which have no hash; then nothing is compiled.
    """
    found = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
    try:
        hash(found)
    except TypeError:
        return ()
    return found


def program_of_text(text: str, tensors: Tensors) -> _programs.Program:
    return _programs.of_text(text, _bridge.jax_device(tensors[0].device), _facts(tensors))


def run_plainly(program: _programs.Program, tensors: Tensors, differentiates: bool) -> Tensors:
    """The outputs of a program on plain tensors, for which `runs_plainly` is true."""
    if differentiates:
        # Skips a preparation for torch.func that takes half of the host's time.
        return super(torch.autograd.Function, _Call).apply(program, *tensors)
    return _profiling.execute(program, program.answer, tensors)


@torch.compiler.assume_constant_result
def _text(
    op: str, arrays: tuple[str, ...], training: bool, names: tuple[str, ...], *values: Any
) -> str:
    options = tuple(zip(names, values, strict=True))
    return _calls.Call(op, arrays, options, training, device.interpreting()).text


def resolved(feature_map: Any, place: torch.device) -> tuple[Any, dict[str, torch.Tensor]]:
    """The feature map as an option, and its parameters as tensors."""
    if isinstance(feature_map, str):
        return feature_map, {}
    if not torch.compiler.is_compiling():
        feature_map, arrays = _calls.resolve(feature_map)
        parameters = tuple(_bridge.from_jax(array, place) for array in arrays)
    elif torch.compiler.is_dynamo_compiling() and not TELLS_FUNCTIONS_APART:
        raise NotImplementedError(
            "torch.compile takes a feature_map that is a function from PyTorch 2.13 on: before, it "
            "does not tell functions of the same code apart. Name one, or leave the call out of "
            "what is compiled by torch.compiler.disable"
        )
    else:  # `_text` resolves it, since compilers cannot trace a FeatureMap
        # The id makes the compiled program one for this function, not for all of the same code.
        parameters = _parameters(feature_map, id(feature_map), place)
    return feature_map, dict(zip(PARAMETERS, parameters, strict=False))


@torch.compiler.assume_constant_result
def _parameters(feature_map: Any, identity: int, place: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(_bridge.from_jax(array, place) for array in _calls.resolve(feature_map)[1])


def static(value: Any) -> Any:
    """The value of a number that a compiler keeps as a symbol; of a tuple or a list, each.

    Kernels are compiled for one value.
    """
    if isinstance(value, tuple | list):
        return tuple(map(static, value))
    symbols = (int, float, torch.SymInt, torch.SymFloat)
    return guard_scalar(value) if isinstance(value, symbols) else value


class _Call(torch.autograd.Function):
    """(program, *tensors) -> the outputs."""

    @staticmethod
    def forward(program: _programs.Program, *tensors: torch.Tensor) -> Any:
        if not _modes.runs_plainly(tensors):
            return tuple(_forward(program.text, tensors))
        return tuple(_profiling.execute(program, program.forward, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.program, *tensors = inputs
        ctx.set_materialize_grads(False)
        # Saved by PyTorch, so that it refuses a backward after one of them was written to.
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        needed = tuple(ctx.needs_input_grad[1:])
        given = tuple(cotangent is not None for cotangent in cotangents)
        chosen = [cotangent for cotangent in cotangents if cotangent is not None]
        _modes.refuse_forward_mode(chosen)
        if any(map(is_batch, chosen)):
            return one_by_one(_Call.backward, ctx, cotangents)
        tensors = [*ctx.saved_tensors, *chosen]
        if torch.is_grad_enabled() or not _modes.runs_plainly(tensors):
            gradients = Gradient.apply(ctx.program, needed, given, *tensors)
        else:
            backward = ctx.program.backward(needed, given)
            gradients = _profiling.execute(ctx.program, backward, tensors, backward=True)
        return None, *placed(needed, gradients)

    @staticmethod
    def vmap(info: Any, in_dims: Any, program: _programs.Program, *tensors: Any) -> Any:
        _, *dims = in_dims
        moved = _in_front(tensors, dims)
        outputs = _Call.apply(program.batched(_level(dims), _facts(moved)), *moved)
        return outputs, (0,) * len(outputs)


# True for the batches of `is_grads_batched` and `jacobian(vectorize=True)`, made by an older vmap.
is_batch = torch._C._functorch.is_legacy_batchedtensor


def one_by_one(backward: Callable[..., Any], ctx: Any, cotangents: Sequence[Any]) -> Any:
    """The backward pass of each member of a batch of cotangents, stacked."""
    mapped = [each is not None and is_batch(each) for each in cotangents]
    # Level 1 is the outermost. The size, also 1 here, matters only for tensors without a batch.
    plain = [
        torch._remove_batch_dim(each, 1, 1, 0) if is_mapped else each
        for each, is_mapped in zip(cotangents, mapped, strict=True)
    ]
    if any(is_mapped and is_batch(each) for each, is_mapped in zip(plain, mapped, strict=True)):
        raise NotImplementedError(
            "ato_torch takes is_grads_batched and vectorize=True on one level: use "
            "torch.func.jacrev or torch.func.vmap"
        )
    size = next(len(each) for each, is_mapped in zip(plain, mapped, strict=True) if is_mapped)
    found = [
        backward(
            ctx,
            *(
                each[n] if is_mapped else each
                for each, is_mapped in zip(plain, mapped, strict=True)
            ),
        )
        for n in range(size)
    ]
    return tuple(
        None if parts[0] is None else torch._add_batch_dim(torch.stack(parts), 0, 1)
        for parts in zip(*found, strict=True)
    )


class Gradient(torch.autograd.Function):
    """(program, needed, given, *tensors) -> the needed gradients."""

    @staticmethod
    def forward(program: _programs.Program, needed: Any, given: Any, *tensors: Any) -> Any:
        if not _modes.runs_plainly(tensors):
            return tuple(_backward(program.text, tensors, needed, given))
        function = program.backward(needed, given)
        return tuple(_profiling.execute(program, function, tensors, backward=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        _refuse_second_order()

    @staticmethod
    def vmap(info: Any, in_dims: Any, program: Any, needed: Any, given: Any, *tensors: Any) -> Any:
        dims = in_dims[3:]
        moved = _in_front(tensors, dims)
        mapped = program.batched_backward(_level(dims), _facts(moved))
        gradients = Gradient.apply(mapped, needed, given, *moved)
        return gradients, (0,) * len(gradients)


@torch.compiler.allow_in_graph
def _transformed(call: str, *tensors: torch.Tensor) -> Tensors:
    """The outputs for torch.func inside torch.compile; it cannot differentiate a custom op."""
    program = program_of_text(call, tensors)
    return _Call.apply(program, *tensors)


def _refuse_second_order() -> None:
    raise NotImplementedError(
        "ato_torch has no derivatives of second order; ato_jax, called from JAX, has them"
    )


def _level(dims: Sequence[int | None]) -> tuple[bool, ...]:
    return tuple(dim is not None for dim in dims)


def _in_front(tensors: Tensors, dims: Sequence[int | None]) -> list[torch.Tensor]:
    return [
        tensor if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


def placed(needed: Sequence[bool], gradients: Tensors) -> list[torch.Tensor | None]:
    ahead = iter(gradients)
    return [next(ahead) if is_needed else None for is_needed in needed]


@torch.library.custom_op(
    "ato::forward",
    mutates_args=(),
    schema="(str call, Tensor[] tensors) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _forward(call: str, tensors: Tensors) -> Tensors:
    program = program_of_text(call, tensors)
    if program.call.is_float8 and not program.reads_float8(_shapes(tensors)):
        outputs = _of_widened(program, tensors)
    else:
        outputs = _profiling.execute(program, program.forward, tensors)
    # Contiguous, as `register_fake` below says.
    return [tensor.contiguous() for tensor in outputs]


def _of_widened(program: _programs.Program, tensors: Tensors) -> Tensors:
    """The outputs of a call on float8 tensors, by the same call on widened ones."""
    named, options = dict(zip(program.call.arrays, tensors, strict=True)), program.call.options
    out_dtype = dict(options)["out_dtype"]
    heads = axes(dict(options)["layout"], "BTHD").index("H") - 4
    wide = _float8.wide_dtype(out_dtype)
    for name, scale in zip("qkv", _calls.SCALES, strict=True):
        named[name] = _float8.product(named[name], named.pop(scale), heads, 3, wide)
    kept = tuple(option for option in options if option[0] != "out_dtype")
    call, leaves = program.call._replace(arrays=tuple(named), options=kept), list(named.values())
    wide_program = _programs.of_call(call, program.place, _facts(leaves))
    out, *rest = _profiling.execute(wide_program, wide_program.forward, leaves)
    return [out.to(getattr(torch, out_dtype)), *rest]


@torch.library.custom_op(
    "ato::backward",
    mutates_args=(),
    schema="(str call, Tensor[] tensors, bool[] needed, bool[] given) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _backward(
    call: str, tensors: Tensors, needed: Sequence[bool], given: Sequence[bool]
) -> Tensors:
    program = program_of_text(call, tensors[: len(needed)])
    function = program.backward(tuple(needed), tuple(given))
    gradients = _profiling.execute(program, function, tensors, backward=True)
    return [gradient.contiguous() for gradient in gradients]


def _shapes(tensors: Tensors) -> _calls.Shapes:
    return [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]


@_forward.register_fake
def _(call: str, tensors: Tensors) -> Tensors:
    shapes = _programs.output_shapes(_calls.parse(call), _shapes(tensors))
    return [tensors[0].new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in shapes]


@_backward.register_fake
def _(call: str, tensors: Tensors, needed: Sequence[bool], given: Sequence[bool]) -> Tensors:
    shapes = _programs.gradient_shapes(_calls.parse(call), _shapes(tensors))
    return [
        tensor.new_empty(shape)
        for is_needed, tensor, (shape, _) in zip(needed, tensors, shapes, strict=False)
        if is_needed
    ]


def _save(ctx: Any, inputs: tuple[str, Tensors], output: Tensors) -> None:
    ctx.call, tensors = inputs
    ctx.outputs = len(output)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, cotangents: Tensors) -> tuple[None, list[torch.Tensor | None]]:
    needed = ctx.needs_input_grad[1]
    saved = ctx.saved_tensors  # once: a checkpoint gives them no second time
    given = [
        output.is_floating_point() and each is not None
        for each, output in zip(cotangents, saved[-ctx.outputs :], strict=True)
    ]
    chosen = [each for each, is_given in zip(cotangents, given, strict=True) if is_given]
    _modes.refuse_forward_mode(chosen)
    gradients = _backward(ctx.call, [*saved, *chosen], needed, given)
    return None, placed(needed, gradients)


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(lambda ctx, cotangents: _refuse_second_order())


# For torch.func inside torch.compile; elsewhere vmap is handled by `_Call`.
@_forward.register_vmap
def _(info: Any, in_dims: Any, call: str, tensors: Tensors) -> tuple[Tensors, list[int]]:
    _, dims = in_dims
    mapped = _calls.parse(call).inside(_level(dims)).text
    outputs = _forward(mapped, _in_front(tensors, dims))
    return outputs, [0] * len(outputs)
