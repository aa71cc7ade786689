"""Runs unchanged models of Hugging Face's transformers with `ato_torch.attention`.

    ato_torch.register_hf()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ato")
    ato_torch.replace_delta_rule(model)     layers of gated DeltaNet and Kimi Delta Attention

transformers makes one mask per forward pass, out of small functions of two positions: causality,
windows, packed sequences. Together with padding these are

    visible[b,i,j] = -left <= j - (query_offset + i) <= right  and  q_ids[b,i] = kv_ids[b,j]

The kernels take these rules, so that no mask [B, 1, T, S] is in memory: `Rules` is a tensor of that
shape without memory, which becomes a real mask only if a model reads it. Padded keys have an id
that no query has. For other patterns, and under torch.compile, the mask is the boolean one that
"sdpa" gets. Where "sdpa" gets none (causal from the first key on, or everything visible), none is
made here either.

A kernel is compiled for fixed sizes, and every generated token adds a key. To limit the number of
compilations, the keys of a few queries are padded to one of four sizes per doubling.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ato_torch import _checks
from ato_torch.delta_rule import (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
)
from ato_torch.functional import attention

NAME = "ato"
# Arguments of models that are refused. The last three select keys inside other kernels.
REFUSED = (
    *("output_attentions", "head_mask", "layer_head_mask", "sinks"),
    *("cache", "block_table", "indices", "block_indices"),
)
# The id of padded keys, which no query has.
PADDING = -1
# The most queries of a step of generation: one new token, or several speculative ones.
FEW = 16


def register_hf() -> None:
    """Registers "ato" as an `attn_implementation` of Hugging Face's transformers.

    Causal and bidirectional attention, masks, padding, sliding windows, soft caps, sinks, position
    biases, grouped heads, dropout, packed sequences and caches are honoured. Attention weights
    (`output_attentions`), head masks, paged caches and keys picked by their indices raise an error
    that names them when the model is called.

    Raises:
      ImportError: transformers is not installed, or has no AttentionMaskInterface.

    Example:
      >>> import ato_torch
      >>> ato_torch.register_hf()  # doctest: +SKIP
      >>> model = AutoModelForCausalLM.from_pretrained(
      ...     name, attn_implementation="ato"
      ... )  # doctest: +SKIP
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "register_hf needs Hugging Face's transformers, with its AttentionMaskInterface: "
            "pip install -U transformers"
        ) from error
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def replace_delta_rule(model: torch.nn.Module) -> None:
    """Puts the delta rule of this library into a model of Hugging Face's transformers.

    Layers of gated DeltaNet (Qwen3-Next and others) and of Kimi Delta Attention (Kimi Linear) then
    compute their recurrence by `chunk_gated_delta_rule`, `fused_recurrent_gated_delta_rule` or
    `chunk_kda`, for training and for generation. Newer versions of transformers call functions of
    the module that defines the layer; they are replaced there, for all models of its kind in this
    process.

    Args:
      model: The model, or a part of it.

    Raises:
      ValueError: The model has no such layer.

    Example:
      >>> import ato_torch
      >>> model = AutoModelForCausalLM.from_pretrained(name)  # doctest: +SKIP
      >>> ato_torch.replace_delta_rule(model)  # doctest: +SKIP
    """
    found = delta_rules(model.modules())
    if not found:
        raise ValueError(
            f"model must have layers of transformers on the delta rule, got {type(model).__name__}"
        )
    for place, name, function in found:
        setattr(place, name, function)


def delta_rules(
    layers: Iterable[torch.nn.Module],
) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Where layers of transformers have functions of the delta rule: the module or the layer, the
    function's name there, and the function of this library that does the same."""
    found = {}
    for layer in layers:
        module = sys.modules[type(layer).__module__]
        names = MODULES_NAMES if module.__name__.startswith("transformers.") else {}
        for place, functions in ((module, names), (layer, LAYERS_NAMES)):
            for name in functions.keys() & vars(place).keys():
                found[id(place), name] = (place, name, functions[name])
    return list(found.values())


def _leaving_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without the arguments that it does not know, as transformers calls it: a layer
    passes on whatever its model was given."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **{n: x for n, x in options.items() if n in known})

    return call


def _recurrent_kda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, **options: Any
) -> Any:
    return GATED[1](q, k, v, gk=g, **options)


# For whole sequences, and token by token.
GATED = _leaving_out(chunk_gated_delta_rule), _leaving_out(fused_recurrent_gated_delta_rule)
# By their names in transformers' modules, and as attributes of layers in older versions (4.57).
MODULES_NAMES = {
    "torch_chunk_gated_delta_rule": GATED[0],
    "torch_recurrent_gated_delta_rule": GATED[1],
    "chunk_kimi_delta_attention": _leaving_out(chunk_kda),
    "recurrent_kimi_delta_attention": _recurrent_kda,
}
LAYERS_NAMES = {"chunk_gated_delta_rule": GATED[0], "recurrent_gated_delta_rule": GATED[1]}


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention with the arguments that transformers passes.

    Args:
      module: The calling layer.
      query: [B, H, T, D].
      key: [B, G, S, D].
      value: [B, G, S, V].
      attention_mask: The result of `mask`, or a mask of the caller, boolean or added to the scores.
      dropout: Probability with which a weight is dropped.
      scaling: Factor of the scores; D ** -0.5 unless given.
      is_causal: Query i sees the keys up to i; the module's attribute unless given. Without a mask
        only; then a single query sees all keys.
      sliding_window: The number of keys, its own included, that a query sees to either side.
        Without a mask only, since a mask includes it.
      softcap: c > 0: the scores are limited to (-c, c).
      s_aux: The sinks [H].
      position_bias: Broadcastable to [B, H, T, S], added to the scores, with a gradient.
      cu_seq_lens_q: The ends of packed sequences, [0, ..., T]. Without a mask only.
      cu_seq_lens_k: The same for the keys, [0, ..., S].
      others: Refused by name if they would change the result, otherwise ignored.

    Returns:
      The pair (out [B, T, H, V], None in place of the weights).

    Raises:
      ValueError: An argument is not supported.
    """
    for name in REFUSED:
        given = others.get(name)
        if given is not None and given is not False:
            raise ValueError(
                f"{name} is not supported with attn_implementation={NAME!r}: leave it out, or "
                'take attn_implementation="eager"'
            )
    B, _, T, _ = query.shape
    S = key.shape[2]
    seen: dict[str, Any] = {"query_offset": 0}
    left = right = None
    if isinstance(attention_mask, Rules) and attention_mask.shape == (B, 1, T, S):
        rules, attention_mask = attention_mask, None
        left, right, seen = rules.left, rules.right, rules.seen
        if rules.filled > S:
            key, value = (
                torch.nn.functional.pad(tensor, (0, 0, 0, rules.filled - S))
                for tensor in (key, value)
            )
            if position_bias is not None and position_bias.shape[-1] == S:
                position_bias = torch.nn.functional.pad(position_bias, (0, rules.filled - S))
    elif attention_mask is None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        right = 0 if is_causal and T > 1 else None
        if sliding_window is not None and sliding_window < S:
            left = sliding_window - 1
            right = 0 if is_causal else left
            seen["query_offset"] = 0 if T > 1 else S - 1
        if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
            seen["q_segment_ids"] = _ids(cu_seq_lens_q, B, T)
            seen["kv_segment_ids"] = _ids(cu_seq_lens_k, B, S)
    elif isinstance(attention_mask, Rules):
        attention_mask = attention_mask.in_full()
    elif attention_mask.is_floating_point() and attention_mask.dtype != torch.float32:
        attention_mask = attention_mask.to(query.dtype)
    if position_bias is not None:
        attention_mask = _biased(position_bias.to(query.dtype), attention_mask)
    out = attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        # A right bound of 0 is causality. Unlike `is_causal` it may be combined with a mask.
        window=None if left is None and right is None else (left, right),
        softcap=softcap,
        sinks=s_aux,
        **seen,
    )
    return out.transpose(1, 2).contiguous(), None


def _ids(ends: torch.Tensor, B: int, length: int) -> torch.Tensor:
    """[B, length]: the index of each position's sequence; the sequences end at ends[1:]."""
    positions = torch.arange(length, device=ends.device, dtype=ends.dtype)
    ids = torch.searchsorted(ends[1:].contiguous(), positions, right=True, out_int32=True)
    return ids.expand(B, length)


def _biased(bias: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """A bias and a mask as one mask to be added to the scores."""
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def mask(**request: Any) -> torch.Tensor | None:
    """Makes a mask from the arguments that transformers passes: `Rules`, or what "sdpa" gets."""
    from transformers.masking_utils import sdpa_mask

    if "q_offset" not in request:  # in older versions of transformers
        return sdpa_mask(**request)
    from transformers.utils.import_utils import is_tracing

    padding = request.get("attention_mask")
    # A tracer can neither inspect the functions nor read which keys are padding.
    pattern = None if is_tracing(padding) else _pattern(request["mask_function"])
    if pattern is None:
        return sdpa_mask(**request)
    B, T, S = (request[name] for name in ("batch_size", "q_length", "kv_length"))
    offset, first = request["q_offset"], request.get("kv_offset", 0)
    device = torch.device(request.get("device", "cpu"))
    kv_ids = pattern.ids
    if padding is not None:
        # A cache may have room for keys that are not written yet.
        padding = torch.nn.functional.pad(padding, (0, max(0, first + S - padding.shape[1])))
        padding = padding[:, first : first + S].bool()
        if not padding.all():
            if pattern.ids is not None:
                return sdpa_mask(**request)
            kv_ids = torch.where(padding, 0, PADDING)
    rules = Rules(B, T, S, device, pattern, offset - first, kv_ids)
    skips = "allow_is_causal_skip" if rules.right == 0 else "allow_is_bidirectional_skip"
    return None if rules.are_understood() and request.get(skips, False) else rules


class Pattern(NamedTuple):
    """A query sees the keys from its position - left to its position + right, of its own id."""

    left: int | None = None
    right: int | None = None
    ids: torch.Tensor | None = None  # [B, T], where T = S


class Rules(torch.Tensor):
    """A boolean mask [B, 1, T, S] without memory, as arguments of `ato_torch.attention`.

    `left` and `right` are the window, and `seen` has the other arguments. `filled` is the number of
    keys that they are for: S, or more if the keys are to be padded and `seen` has their lengths.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, B: int, T: int, S: int, device: torch.device, *_: Any) -> Rules:
        made = torch.Tensor._make_wrapper_subclass(
            cls, (B, 1, T, S), dtype=torch.bool, device=device
        )
        assert isinstance(made, Rules)
        return made

    def __init__(
        self,
        B: int,
        T: int,
        S: int,
        device: torch.device,
        pattern: Pattern,
        offset: int | torch.Tensor,
        kv_ids: torch.Tensor | None,
    ) -> None:
        self.left, self.right, q_ids = pattern
        self.offset = offset
        self.seen: dict[str, Any] = {"query_offset": offset}
        self.filled = S
        if self.grows():
            self.filled = _checks.filled(S)
            lengths = torch.full((B,), S, dtype=torch.int32, device=device)
            # Without an offset, the last query stands at the last key of that length.
            self.seen = {"query_offset": None, "kv_lengths": lengths}
        if kv_ids is not None:
            q_ids = kv_ids.new_zeros(B, T) if q_ids is None else q_ids
            kv_ids = torch.nn.functional.pad(kv_ids, (0, self.filled - S))
            self.seen |= {
                "q_segment_ids": q_ids.int().expand(B, -1),
                "kv_segment_ids": kv_ids.int().expand(B, -1),
            }

    def grows(self) -> bool:
        """Whether this is a step of generation: few queries, the last tokens of all the keys."""
        *_, T, S = self.shape
        counted = not isinstance(self.offset, torch.Tensor)
        return counted and self.right == 0 and T <= FEW and bool(0 < self.offset == S - T)

    def are_understood(self) -> bool:
        """Whether `attend` does the same without a mask."""
        if self.seen.keys() != {"query_offset"} or isinstance(self.offset, torch.Tensor):
            return False
        *_, T, S = self.shape
        if self.left is not None and self.left < self.offset + T - 1:
            return False
        if self.right is None or self.right >= S - 1 - self.offset:
            return self.right != 0 or T == 1
        return self.right == self.offset == 0 and T > 1

    def in_full(self) -> torch.Tensor:
        """The mask with its values in memory."""
        B, _, T, S = self.shape
        position = torch.arange(T, device=self.device)[:, None] + self.offset
        key = torch.arange(S, device=self.device)
        visible = torch.ones(T, S, dtype=torch.bool, device=self.device)
        if self.left is not None:
            visible &= key >= position - self.left
        if self.right is not None:
            visible &= key <= position + self.right
        visible = visible.expand(B, 1, T, S)
        if "q_segment_ids" in self.seen:
            q_ids, kv_ids = self.seen["q_segment_ids"], self.seen["kv_segment_ids"][:, :S]
            visible = visible & (q_ids[:, None, :, None] == kv_ids[:, None, None, :])
        return visible

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Any = None
    ) -> Any:
        arguments, keywords = pytree.tree_map_only(
            Rules, Rules.in_full, (arguments, keywords or {})
        )
        return function(*arguments, **keywords)


def _pattern(function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a mask function of transformers; None if the function is unknown."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return None
    given = inspect.getclosurevars(function).nonlocals
    match function.__qualname__.split(".")[0]:
        case "bidirectional_mask_function":
            return Pattern()
        case "causal_mask_function":
            return Pattern(right=0)
        case "sliding_window_overlay" if given["sliding_window"] > 0:
            return Pattern(left=given["sliding_window"] - 1)
        case "sliding_window_bidirectional_overlay" if given["sliding_window"] >= 0:
            return Pattern(left=given["sliding_window"], right=given["sliding_window"])
        case "packed_sequence_mask_function":
            return Pattern(ids=given["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence":
            # Within a sequence positions differ as indices do; ids separate the sequences.
            return _pattern(given["mask_function"])
        case "and_masks":
            return _all([_pattern(part) for part in given["mask_functions"]])
    return None


def _all(patterns: list[Pattern | None]) -> Pattern | None:
    found = Pattern()
    for pattern in patterns:
        if pattern is None or (found.ids is not None and pattern.ids is not None):
            return None
        found = Pattern(
            _least(found.left, pattern.left),
            _least(found.right, pattern.right),
            pattern.ids if found.ids is None else found.ids,
        )
    return found


def _least(first: int | None, second: int | None) -> int | None:
    given = [bound for bound in (first, second) if bound is not None]
    return min(given, default=None)
