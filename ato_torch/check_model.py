"""`check_model`: which layers of a model compute attention by this library, and which do not.

A forward pass runs while a mode of PyTorch sees every operator and hooks tell which layer it
belongs to. A layer computes attention by

    this library        the operator ato::forward
    another kernel      an operator with "attention" or "attn" in its name
    products            a softmax whose numbers, changed by operators that keep their count, are the
                        first factor of a batched matrix product
    the delta rule      functions of transformers, by their names
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from ato_torch import _calls, hugging_face
from ato_torch.explain import Mode

PRODUCTS = "a softmax and products of its own"
UNCALLED = "not called in this forward pass"
KERNELS = ("attention", "attn", "transformer_encoder_layer")
SOFTMAX = ("_softmax", "_safe_softmax")
# The batched products, with the position of the first factor.
FACTOR = {"bmm": 0, "baddbmm": 1}


@dataclasses.dataclass(frozen=True)
class AttentionLayer:
    """A layer that computes attention.

    `name` is its path in the model, "" for the model itself, and `kind` the name of its class.
    `calls` are the ops of this library that it called, in their order, and `others` says how else
    it computed attention.
    """

    name: str
    kind: str
    calls: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether this library computes all of the layer's attention."""
        return bool(self.calls) and not self.others

    def __str__(self) -> str:
        counted = {op: f"{op} x {self.calls.count(op)}" for op in self.calls}
        by = [one if self.calls.count(op) > 1 else op for op, one in counted.items()]
        return f"{self.name or 'the model'} ({self.kind}): {', '.join([*by, *self.others])}"


@dataclasses.dataclass(frozen=True)
class Report:
    """The layers of a model that compute attention, in the order of their first call."""

    layers: tuple[AttentionLayer, ...]

    @property
    def ours(self) -> tuple[AttentionLayer, ...]:
        """The layers that this library computes."""
        return tuple(layer for layer in self.layers if layer.is_ours)

    @property
    def others(self) -> tuple[AttentionLayer, ...]:
        """The layers that it does not compute, or not wholly."""
        return tuple(layer for layer in self.layers if not layer.is_ours)

    def __str__(self) -> str:
        if not self.layers:
            return "no layer computes attention"
        lines = [f"{len(self.ours)} of {len(self.layers)} layers compute attention by ato_torch"]
        lines += [f"  {layer}" for layer in self.ours]
        lines += ["others:"] * bool(self.others)
        return "\n".join(lines + [f"  {layer}" for layer in self.others])


def check_model(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Report:
    """Says which layers of a model compute attention by this library, after one forward pass.

    Some models take `attn_implementation="ato"` and compute attention by themselves all the same;
    some layers call PyTorch's function by a name that `sdpa_override` does not replace. The pass
    runs without gradients and without torch.compile, in the model's own mode, training or
    evaluation, and leaves the random number generators as they were. Call it inside
    `sdpa_override()` to see what that reaches.

    Args:
      model: The model, or a part of it.
      *args: The model's positional arguments: a small batch is enough.
      **kwargs: Its keyword arguments. Without any argument, the `dummy_inputs` of a model of
        transformers are passed.

    Returns:
      An object with the attributes `layers`, `ours` and `others`, tuples of layers, each with
      `name`, `kind`, `calls`, `others` and `is_ours`. `others` has each layer that computes
      attention, or a part of it, without this library, and those with "Attention" in the name of
      their class that the pass did not reach. Printing shows all of them.

    Raises:
      ValueError: `model` is no module, or has no `dummy_inputs` and no arguments are given.

    Example:
      >>> import torch, ato_torch
      >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
      >>> x = torch.ones(1, 4, 8)
      >>> with ato_torch.sdpa_override():
      ...     print(ato_torch.check_model(model, x, x, x, need_weights=False))
      1 of 1 layers compute attention by ato_torch
        the model (MultiheadAttention): attention
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not args and not kwargs:
        kwargs = _dummy_inputs(model)
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    cards = [device for device in devices if device.type == "cuda"]
    watch = _Watch(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(cards))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(watch.layers_followed())
        stack.enter_context(watch.delta_rule_watched())
        stack.enter_context(watch)
        model(*args, **kwargs)
    return watch.report()


def _dummy_inputs(model: torch.nn.Module) -> dict[str, Any]:
    given = getattr(model, "dummy_inputs", None)
    if not isinstance(given, dict):
        raise ValueError(
            f"{type(model).__name__} has no dummy_inputs: pass the arguments of a forward pass, "
            "check_model(model, tokens)"
        )
    place = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    return {
        name: one.to(place) if isinstance(one, torch.Tensor) else one for name, one in given.items()
    }


class _Watch(Mode):
    """Records which functions the layers of a model call in one forward pass."""

    # Otherwise an operator that takes functions, as FlexAttention's does, raises an error.
    supports_higher_order_operators = True

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        # A layer that is in the model under several names has the first of them.
        self.names = {layer: name for name, layer in model.named_modules()}
        self.thread = threading.get_ident()
        self.within = [model]  # the layers whose forward pass runs, innermost last
        self.ours: dict[torch.nn.Module, list[str]] = {}
        self.others: dict[torch.nn.Module, dict[str, None]] = {}
        self.called: dict[torch.nn.Module, None] = {}
        # Results of a softmax, and what was made of them. Few, because this keeps their memory.
        self.weights: collections.deque[torch.Tensor] = collections.deque(maxlen=8)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        name = str(func)
        short = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else name
        if func is torch.ops.ato.forward.default:
            op = _calls.parse(args[0]).op
            if op != "combine":
                self.ours.setdefault(self.within[-1], []).append(op)
        elif func is torch.ops.ato.backward.default:
            pass  # of a layer that differentiates within its forward pass
        elif any(word in name for word in KERNELS):
            self.other(name.removesuffix(".default"))
        elif short in FACTOR:
            if self._are_weights(args[FACTOR[short]]):
                self.other(PRODUCTS)
        else:
            counts = {one.numel() for one in pytree.tree_leaves(args) if self._are_weights(one)}
            for one in pytree.tree_leaves(results):
                if isinstance(one, torch.Tensor) and (
                    short in SOFTMAX or one.numel() in counts or (counts and short == "slice")
                ):
                    self.weights.append(one)
        return results

    def _are_weights(self, value: Any) -> bool:
        return any(value is one for one in self.weights)

    def other(self, how: str) -> None:
        """Notes that the innermost layer computes attention in another way."""
        self.others.setdefault(self.within[-1], {})[how] = None

    @contextlib.contextmanager
    def layers_followed(self) -> Iterator[None]:
        """Inside, `within` has the layers that run. A layer's own hooks would keep PyTorch from its
        fast path, so these are hooks of all modules."""

        def is_followed(layer: torch.nn.Module) -> bool:
            return layer in self.names and threading.get_ident() == self.thread

        def before(layer: torch.nn.Module, _: Any) -> None:
            if is_followed(layer):
                self.called[layer] = None
                self.within.append(layer)

        def after(layer: torch.nn.Module, *_: Any) -> None:
            if is_followed(layer):
                self.within.pop()

        hooks = (
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def delta_rule_watched(self) -> Iterator[None]:
        """Inside, functions of transformers that `replace_delta_rule` replaces are noted."""
        with contextlib.ExitStack() as stack:
            for place, name, ours in hugging_face.delta_rules(self.names):
                function = vars(place)[name]
                if function is not ours and function is not None:
                    setattr(place, name, self._noting(name, function))
                    stack.callback(setattr, place, name, function)
            yield

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            self.other(f"{name}, which replace_delta_rule replaces")
            return function(*arguments, **options)

        return call

    def report(self) -> Report:
        found = [layer for layer in self.called if layer in self.ours or layer in self.others]
        paths = [f"{self.names[layer]}." for layer in found]
        layers = [
            AttentionLayer(
                self.names[layer],
                type(layer).__name__,
                tuple(self.ours.get(layer, ())),
                tuple(self.others.get(layer, ())),
            )
            for layer in found
        ]
        for layer, name in self.names.items():
            kind = type(layer).__name__
            own = f"{name}."
            # A part of a layer that is there, or the other way round, is not a second one.
            related = any(own.startswith(path) or path.startswith(own) for path in paths)
            if "Attention" in kind and layer not in self.called and not related:
                layers.append(AttentionLayer(name, kind, others=(UNCALLED,)))
        return Report(tuple(layers))
