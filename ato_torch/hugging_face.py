"""Models of Hugging Face's transformers with `ato_torch.attention`, and nothing of them changed.

    ato_torch.register_hf()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ato")

transformers tells an attention function who sees whom by a mask, which it makes once per forward
from small functions of two positions: causality, windows, packed sequences. With padding these are

    visible[b,i,j] = -left <= j - (query_offset + i) <= right  and  q_ids[b,i] = kv_ids[b,j]

which the kernels compute with, so that no mask [B, 1, T, S] is ever in memory: `Rules` is a tensor
of that shape which becomes one only where a model looks into it. Padding is an id of its own among
the keys. Other patterns, and all that torch.compile traces, come as the boolean masks that "sdpa"
gets; and where that gets none, because causality from the first key on or nothing is all there is
to say, none is made here.

A kernel is compiled for its sizes. While text is generated, each token adds one key: so that not
each is a size of its own, the keys of few queries are filled up to one of four sizes per doubling.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ato_torch.functional import attention

NAME = "ato"
# What a model may pass that is not honoured. The last three belong to kernels that find out
# themselves which keys are seen.
REFUSED = (
    *("output_attentions", "head_mask", "layer_head_mask", "sinks"),
    *("cache", "block_table", "indices", "block_indices"),
)
# Of keys that nobody sees: no query has it.
PADDING = -1
# So many queries after the first forward are new tokens, one or some that were guessed ahead.
FEW = 16


def register_hf() -> None:
    """Adds "ato" to the names that `attn_implementation` takes in Hugging Face's transformers.

    Causal and bidirectional attention, masks, padding, sliding windows, soft caps, sinks, position
    biases, grouped heads, dropout, packed sequences and caches are honoured. What is not raises an
    error with its name when the model is called: attention weights (`output_attentions`), head
    masks, paged caches, and keys that are picked by their indices.
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
    """An attention function as transformers calls it.

    Args:
      query: [B, H, T, D].
      key: [B, G, S, D].
      value: [B, G, S, V].
      attention_mask: what `mask` made, or a mask of the caller's own, boolean or added.
      is_causal: the module's own unless given. It counts without a mask alone: then several
        queries begin with the first key, and a single one sees all.
      sliding_window: how many keys, its own included, a query sees to either side; without a mask
        alone, which says it otherwise.
      s_aux: the sinks, [H].
      position_bias: broadcastable to [B, H, T, S], added to the scores, with a gradient.
      cu_seq_lens_q, cu_seq_lens_k: where packed sequences end, [0, ..., T]; without a mask alone.

    Returns:
      [B, T, H, V], and None for the weights.
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
        # To the right, 0 is causality, and may stand beside a mask.
        window=None if left is None and right is None else (left, right),
        softcap=softcap,
        sinks=s_aux,
        **seen,
    )
    return out.transpose(1, 2).contiguous(), None


def _ids(ends: torch.Tensor, B: int, length: int) -> torch.Tensor:
    """[B, length]: which of the sequences that end at ends[1:] each position belongs to."""
    positions = torch.arange(length, device=ends.device, dtype=ends.dtype)
    ids = torch.searchsorted(ends[1:].contiguous(), positions, right=True, out_int32=True)
    return ids.expand(B, length)


def _biased(bias: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """A bias and a mask as one mask that is added."""
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def mask(**request: Any) -> torch.Tensor | None:
    """A mask function as transformers calls it: `Rules`, or what "sdpa" gets."""
    from transformers.masking_utils import sdpa_mask

    if "q_offset" not in request:  # in older versions of transformers
        return sdpa_mask(**request)
    from transformers.utils.import_utils import is_tracing

    padding = request.get("attention_mask")
    # What traces can neither look into the functions nor wait to see what is padding.
    pattern = None if is_tracing(padding) else _pattern(request["mask_function"])
    if pattern is None:
        return sdpa_mask(**request)
    B, T, S = (request[name] for name in ("batch_size", "q_length", "kv_length"))
    offset, first = request["q_offset"], request.get("kv_offset", 0)
    device = torch.device(request.get("device", "cpu"))
    kv_ids = pattern.ids
    if padding is not None:
        # A cache may hold keys that are yet to be written.
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
    """Keys from position - left to position + right, of the query's own id."""

    left: int | None = None
    right: int | None = None
    ids: torch.Tensor | None = None  # [B, T], where T = S


class Rules(torch.Tensor):
    """The booleans [B, 1, T, S] of a mask, said by what the kernels compute with.

    `left` and `right` are bounds, and `seen` are other arguments of `ato_torch.attention`, to keys
    of which there are `filled`: S, or more where `seen` has their lengths.
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
            self.filled = _filled(S)
            lengths = torch.full((B,), S, dtype=torch.int32, device=device)
            # Of that length, the last query is at the last key.
            self.seen = {"query_offset": None, "kv_lengths": lengths}
        if kv_ids is not None:
            q_ids = kv_ids.new_zeros(B, T) if q_ids is None else q_ids
            kv_ids = torch.nn.functional.pad(kv_ids, (0, self.filled - S))
            self.seen |= {
                "q_segment_ids": q_ids.int().expand(B, -1),
                "kv_segment_ids": kv_ids.int().expand(B, -1),
            }

    def grows(self) -> bool:
        """Whether the queries are the newest tokens after others, with as many keys as tokens."""
        *_, T, S = self.shape
        counted = not isinstance(self.offset, torch.Tensor)
        return counted and self.right == 0 and T <= FEW and bool(0 < self.offset == S - T)

    def are_understood(self) -> bool:
        """Whether `attend` would do the same without a mask."""
        if self.seen.keys() != {"query_offset"} or isinstance(self.offset, torch.Tensor):
            return False
        *_, T, S = self.shape
        if self.left is not None and self.left < self.offset + T - 1:
            return False
        if self.right is None or self.right >= S - 1 - self.offset:
            return self.right != 0 or T == 1
        return self.right == self.offset == 0 and T > 1

    def in_full(self) -> torch.Tensor:
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


def _filled(S: int) -> int:
    """S rounded up, to one of four sizes per doubling, from 64 on."""
    step = max(64, 1 << (S - 1).bit_length() >> 3)
    return -(-S // step) * step


def _pattern(function: Callable[..., Any]) -> Pattern | None:
    """What a mask function of transformers says; None where it is one that is not known."""
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
            # Within a sequence positions count up by one, as indices do; the ids see to the rest.
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
