"""A covering array over the options of each op: every pair of values stands together in some row.

    python -m tests.covering        prints the rows of each array, and what they cover

A row takes one value of each factor of its `Space`: a size, a dtype, a kind of mask. All pairs of
values that can go together are in some row, and all triples of the factors named in `triples`,
which decide what a query sees: kernels branch on several of these at once. `Rule`s say which
values never go together. What they exclude is counted, and a test shows that each such call is
refused.

Rows are built greedily: each starts from a pair or a triple that no row has yet, and takes the
value of every further factor that covers the most. The random numbers that break ties have a fixed
seed, so the array is the same in every run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ato_jax
from ato_jax import device
from ato_jax.ops.delta_rule import mosaic_gpu as mosaic_delta_rule
from tests import aot, numerics
from tests.calls import Call

Row = dict[str, Any]
# One value of each of two or three factors, by the factors' numbers.
Target = tuple[tuple[int, Any], ...]

# Rows that are built for each that is taken: the one that covers the most.
ATTEMPTS = 2


@dataclasses.dataclass(frozen=True)
class Rule:
    """Values that do not go together: `forbids` takes the factors' values by name."""

    factors: tuple[str, ...]
    forbids: Callable[..., bool]
    # What the refusal says; None where the call runs, and has no result to measure.
    message: str | None


@dataclasses.dataclass(frozen=True)
class Space:
    """The factors of one op, each with its values, the plainest value first."""

    op: str
    factors: dict[str, tuple[Any, ...]]
    rules: tuple[Rule, ...] = ()
    triples: tuple[str, ...] = ()
    backend: str = "triton"

    @property
    def names(self) -> list[str]:
        return list(self.factors)

    def allows(self, row: Row) -> bool:
        """Whether no rule forbids what the row has so far."""
        return not any(
            rule.forbids(**{name: row[name] for name in rule.factors})
            for rule in self.rules
            if all(name in row for name in rule.factors)
        )

    @functools.cached_property
    def _ruled(self) -> list[str]:
        """The factors that some rule names."""
        ruled = {name for rule in self.rules for name in rule.factors}
        return [name for name in self.factors if name in ruled]

    @functools.cached_property
    def _known(self) -> dict[tuple[Any, ...], bool]:
        return {}

    def completes(self, row: Row) -> bool:
        """Whether some values of the other factors make the row one that is allowed."""
        key = tuple(row.get(name, _UNSET) for name in self._ruled)
        if key not in self._known:
            found = self.allows(row)
            missing = next((name for name in self._ruled if name not in row), None)
            if found and missing is not None:
                found = any(
                    self.completes(row | {missing: value}) for value in self.factors[missing]
                )
            self._known[key] = found
        return self._known[key]

    def targets(self, strength: int, among: Iterable[str] | None = None) -> Iterator[Target]:
        """All combinations of values of `strength` factors, those that rules exclude, too."""
        numbers = [self.names.index(name) for name in (self.names if among is None else among)]
        for chosen in itertools.combinations(sorted(numbers), strength):
            for values in itertools.product(*(self.factors[self.names[n]] for n in chosen)):
                yield tuple(zip(chosen, values, strict=True))

    def possible(self, target: Target) -> bool:
        return self.completes({self.names[n]: value for n, value in target})

    def __hash__(self) -> int:
        return id(self)


_UNSET = object()


def _targets_of(space: Space, row: Row, strength: int) -> Iterator[Target]:
    items = [(n, row[name]) for n, name in enumerate(space.names)]
    return itertools.combinations(items, strength)


def _build(space: Space, left: dict[Target, None], start: Target, draw: random.Random) -> Row:
    """A row with `start` in it, which covers as much of `left` as single steps find."""
    chosen = dict(start)
    by_name = {space.names[n]: value for n, value in start}
    others = [n for n in range(len(space.names)) if n not in chosen]
    tripled = {space.names.index(name) for name in space.triples}
    for n in sorted(others, key=lambda _: draw.random()):
        best: tuple[float, Any] | None = None
        for value in space.factors[space.names[n]]:
            if not space.completes(by_name | {space.names[n]: value}):
                continue
            gain = sum(
                tuple(sorted(((n, value), item), key=_number)) in left for item in chosen.items()
            )
            if n in tripled:
                mates = [item for item in chosen.items() if item[0] in tripled]
                gain += sum(
                    tuple(sorted(((n, value), *pair), key=_number)) in left
                    for pair in itertools.combinations(mates, 2)
                )
            rank = gain + draw.random()
            if best is None or rank > best[0]:
                best = rank, value
        assert best is not None, f"no value of {space.names[n]} goes with {by_name}"
        chosen[n] = by_name[space.names[n]] = best[1]
    return {name: by_name[name] for name in space.names}


def _number(item: tuple[int, Any]) -> int:
    return item[0]


@functools.cache
def rows(space: Space) -> tuple[Row, ...]:
    """The covering array."""
    draw = random.Random(0)
    wanted = itertools.chain(space.targets(2), space.targets(3, space.triples))
    left = dict.fromkeys(target for target in wanted if space.possible(target))
    found = []
    while left:
        starts = list(itertools.islice(left, ATTEMPTS))
        candidates = [_build(space, left, start, draw) for start in starts]
        row, covered = max(
            ((row, _covered(space, row, left)) for row in candidates),
            key=lambda pair: len(pair[1]),
        )
        for target in covered:
            del left[target]
        found.append(row)
    return tuple(found)


def _covered(space: Space, row: Row, left: dict[Target, None]) -> list[Target]:
    every = itertools.chain(_targets_of(space, row, 2), _targets_of(space, row, 3))
    return [target for target in every if target in left]


@dataclasses.dataclass(frozen=True)
class Count:
    """Of pairs or triples: how many there are, how many the rules exclude, and the rows cover."""

    total: int
    excluded: int
    covered: int


def count(space: Space, strength: int, among: tuple[str, ...] | None = None) -> Count:
    targets = list(space.targets(strength, among))
    possible = {target for target in targets if space.possible(target)}
    in_rows = {target for row in rows(space) for target in _targets_of(space, row, strength)}
    return Count(len(targets), len(targets) - len(possible), len(possible & in_rows))


def sample(space: Space) -> list[Row]:
    """Few rows in which every value of every factor occurs."""
    left = {(name, value) for name, values in space.factors.items() for value in values}
    found = []
    while left:
        row = max(rows(space), key=lambda row: len(left & set(row.items())))
        left -= set(row.items())
        found.append(row)
    return found


def label(row: Row) -> str:
    """The values that are not the plainest, for messages."""
    return ", ".join(f"{name}={value}" for name, value in row.items())


# -- from rows to calls --------------------------------------------------------------------------

# B, T, S. The first are for kernels with their own block sizes, on a card: several blocks, whole
# ones and tails, and several programs for the keys of a block of queries. The second are for
# interpreted kernels with blocks of 16. The third are for heads so wide that one tile holds all
# keys.
LENGTHS = {
    "T = S": ((2, 300, 300), (2, 37, 37), (2, 200, 200)),
    "T = S, whole blocks": ((2, 256, 256), (2, 32, 32), (2, 128, 128)),
    "T < S": ((2, 130, 1100), (2, 21, 50), (2, 40, 250)),
    "T > S": ((2, 1100, 130), (2, 50, 21), (2, 250, 40)),
    "T = 1": ((2, 1, 1100), (2, 1, 40), (2, 1, 200)),
    "S = 1": ((2, 130, 1), (2, 21, 1), (2, 130, 1)),
    "long": ((1, 1100, 1100), (1, 70, 70), (1, 256, 256)),
}
SQUARE = ("T = S", "T = S, whole blocks", "long")
# H, G
HEADS = {"H = G": (4, 4), "pairs": (4, 2), "one key head": (3, 1), "one head": (1, 1)}
MANY_HEADS = (48, 2)
DTYPES = {
    "bfloat16": ("bfloat16", None),
    "float16": ("float16", None),
    "float32": ("float32", None),
    "TF32": ("float32", "tf32"),
}
LAYOUTS = ("bthd", "bhtd")
LENGTH_KINDS = ("none", "kv", "q", "both")
SEGMENT_KINDS = ("none", "cross", "self")
WIDEST_WHOLE_ROW = 512
# The widest heads that the small sizes keep: beyond, an interpreted kernel takes long.
SMALL_WIDTH = 24


def _self_segments_need_a_square(segments: str, lengths: str) -> bool:
    return segments == "self" and lengths not in SQUARE


SEGMENTS_RULE = Rule(("segments", "lengths"), _self_segments_need_a_square, "segment_ids")

WINDOWS: dict[str, Any] = {
    "every key": {},
    "causal": {"causal": True},
    "window": {"window": (70, 20)},
    "left window": {"window": (90, None)},
    "causal window": {"window": (80, None), "causal": True},
}

ATTENTION = Space(
    "attention",
    {
        "lengths": tuple(LENGTHS),
        "padding": LENGTH_KINDS,
        "sight": tuple(WINDOWS),
        "query_offset": ("none", "int", "array"),
        "segments": SEGMENT_KINDS,
        "bias": ("none", "BHTS", "TS", "BS", "HT", "H", ""),
        "mask": ("none", "BHTS", "TS", "BS", "T"),
        "widths": (
            *((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (320, 320)),
            *((40, 72), (192, 128), (1, 24), (576, 512), (1000, 1024)),
        ),
        "heads": tuple(HEADS),
        "dtype": tuple(DTYPES),
        "softcap": (None, 1.5),
        "sinks": (False, True),
        "scale": (None, 0.2, -0.2),
        "dropout": (False, True),
        "return_lse": (False, True),
        "layout": LAYOUTS,
        "batched": (True, False),
        "x64": (False, True),
        "alone": (False, True),
        "card": (90, 80),
    },
    rules=(
        SEGMENTS_RULE,
        Rule(
            ("bias", "widths"),
            lambda bias, widths: bias != "none" and max(widths) > WIDEST_WHOLE_ROW,
            "has no kernel for a bias's gradient",
        ),
    ),
    triples=("lengths", "padding", "sight", "query_offset", "segments"),
)

MAPS: dict[str, Any] = {
    "tanh": lambda x: jnp.tanh(x) + 1.5,
    "steps": lambda x: jnp.where(x > 0, 2.0, 0.5),
}
SIGNED = ("identity", "silu")
MAP_NAMES = ("elu1", "relu", "exp", "softplus", "relu2", *SIGNED, *MAPS, "favor")
FAVOR_FEATURES = 24


def _scale_cancels(feature_map: str, normalize: bool | None, scale: float | None) -> bool:
    unknown = feature_map in SIGNED or feature_map in MAPS
    return scale is not None and (normalize is True or normalize is None and not unknown)


NORMALIZER_RULE = Rule(("feature_map", "normalize", "scale"), _scale_cancels, "scale")
GATED = "a gate per step and channel"
LINEAR_ATTENTION = Space(
    "linear_attention",
    {
        "lengths": tuple(LENGTHS),
        "padding": LENGTH_KINDS,
        "causal": (False, True),
        "decay": ("none", "head", "step", "channel"),
        "segments": SEGMENT_KINDS,
        "initial_state": (False, True),
        "return_state": (False, True),
        "feature_map": MAP_NAMES,
        "normalize": (None, False, True),
        "scale": (None, 0.7, -0.7),
        "widths": (
            *((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256)),
            *((40, 72), (1, 24), (64, 300)),
        ),
        "heads": tuple(HEADS),
        "dtype": tuple(DTYPES),
        "eps": (1e-6, 0.5),
        "layout": LAYOUTS,
        "batched": (True, False),
        "x64": (False, True),
        "alone": (False, True),
        "card": (90, 80),
    },
    rules=(
        SEGMENTS_RULE,
        NORMALIZER_RULE,
        Rule(
            ("decay", "causal", "lengths"),
            lambda decay, causal, lengths: decay != "none" and not causal and lengths not in SQUARE,
            "decay needs",
        ),
        Rule(
            ("initial_state", "causal", "lengths"),
            lambda initial_state, causal, lengths: (
                initial_state and causal and lengths not in SQUARE
            ),
            "initial_state with causal",
        ),
        Rule(
            ("return_state", "causal", "lengths"),
            lambda return_state, causal, lengths: return_state and causal and lengths not in SQUARE,
            "return_state with causal",
        ),
        Rule(
            ("decay", "causal"),
            lambda decay, causal: decay == "channel" and not causal,
            f"{GATED} is not supported without causal",
        ),
        Rule(
            ("decay", "padding"),
            lambda decay, padding: decay == "channel" and padding != "none",
            f"{GATED} is not supported with segments or lengths",
        ),
        Rule(
            ("decay", "segments"),
            lambda decay, segments: decay == "channel" and segments != "none",
            f"{GATED} is not supported with segments or lengths",
        ),
        Rule(
            ("decay", "widths"),
            lambda decay, widths: decay == "channel" and max(widths) > 128,
            f"{GATED} is supported up to",
        ),
        # Its gradient is 0, to which no rounding is small.
        Rule(
            ("decay", "lengths"),
            lambda decay, lengths: decay == "channel" and lengths == "S = 1",
            None,
        ),
    ),
    triples=("lengths", "padding", "causal", "decay", "segments"),
)

# At least a chunk of 64 rows; pieces of several chunks.
MOSAIC_LENGTHS = {
    "whole chunks": (2, 256, 256),
    "a tail": (2, 200, 200),
    "one chunk": (1, 64, 64),
    "long": (1, 1096, 1096),
    "odd": (2, 203, 203),
    "T < S": (2, 72, 328),
    "T > S": (2, 328, 72),
}
MOSAIC = Space(
    "linear_attention",
    {
        "lengths": tuple(MOSAIC_LENGTHS),
        "padding": ("none", "kv", "both"),
        "segments": ("none", "self"),
        "feature_map": ("elu1", "exp", "silu", "tanh"),
        "causal": (False, True),
        "decay": ("none", "head", "step", "channel"),
        "initial_state": (False, True),
        "return_state": (False, True),
        "normalize": (None, False),
        "scale": (None, 0.7, -0.7),
        "widths": (
            *((128, 128), (64, 64), (40, 40), (80, 80), (128, 64), (160, 160), (256, 256)),
            *((64, 144), (192, 128)),
        ),
        "heads": ("H = G", "pairs", "one key head"),
        "dtype": ("bfloat16", "float16", "float32", "TF32"),
        "eps": (1e-6, 0.5),
        "layout": LAYOUTS,
        "batched": (True, False),
        "x64": (False, True),
        "alone": (False, True),
    },
    rules=(
        NORMALIZER_RULE,
        Rule(
            ("decay", "causal"),
            lambda decay, causal: decay == "channel" and not causal,
            None,  # no part of this array yet: tests/test_mosaic_channel_both_ways.py
        ),
        Rule(
            ("decay", "causal", "lengths"),
            lambda decay, causal, lengths: (
                decay != "none" and not causal and lengths in ("T < S", "T > S")
            ),
            "decay needs causal=True or T = S",
        ),
        Rule(
            ("decay", "causal", "padding"),
            lambda decay, causal, padding: (
                decay in ("head", "step") and not causal and padding == "both"
            ),
            "does not support lengths of queries and keys that differ with a decay",
        ),
        Rule(
            ("causal", "lengths"),
            lambda causal, lengths: causal and lengths in ("T < S", "T > S"),
            "needs T = S where causal",
        ),
        Rule(
            ("padding", "causal"),
            lambda padding, causal: padding == "both" and causal,
            "does not support lengths of queries and keys that differ with causal=True",
        ),
        Rule(
            ("padding", "decay"),
            lambda padding, decay: padding != "none" and decay == "channel",
            "does not support lengths with a decay per channel",
        ),
        Rule(
            ("padding", "widths", "causal"),
            lambda padding, widths, causal: padding != "none" and widths[0] > 128 and causal,
            "does not support lengths with more than 128 columns and causal=True",
        ),
        Rule(
            ("padding", "widths", "causal", "segments"),
            lambda padding, widths, causal, segments: (
                padding != "none" and max(widths) > 128 and not causal and segments != "none"
            ),
            "does not support",  # lengths, or of both sides segments that differ
        ),
        Rule(
            ("segments", "lengths"),
            lambda segments, lengths: segments == "self" and lengths in ("T < S", "T > S"),
            "segment_ids",
        ),
        Rule(
            ("segments", "causal", "decay"),
            lambda segments, causal, decay: segments != "none" and not causal and decay != "none",
            None,  # no part of this array yet: tests/test_mosaic_runs_of_128.py
        ),
        *(
            Rule(
                ("segments", "causal", state),
                lambda segments, causal, **state: (
                    segments != "none" and not causal and any(state.values())
                ),
                "does not support segments with a state and without causal=True",
            )
            for state in ("initial_state", "return_state")
        ),
        Rule(
            ("segments", "causal", "widths"),
            lambda segments, causal, widths: (
                segments != "none" and not causal and widths == (128, 64)
            ),
            "does not support segments without causal=True but of D = V",
        ),
        Rule(
            ("lengths", "decay"),
            lambda lengths, decay: lengths == "odd" and decay == "channel",
            "multiples of 8",
        ),
        Rule(
            ("return_state", "causal", "lengths", "decay", "widths"),
            lambda return_state, causal, lengths, decay, widths: (
                return_state
                and causal
                and lengths not in ("whole chunks", "one chunk")
                and (decay == "channel" or widths[0] > 128)
            ),
            "return_state needs T to be a multiple",
        ),
        Rule(
            ("decay", "widths"),
            lambda decay, widths: decay == "channel" and widths == (40, 40),
            "needs D",
        ),
        Rule(
            ("causal", "decay", "widths", "segments"),
            lambda causal, decay, widths, segments: (
                not causal
                and (
                    max(widths) <= 64 and segments == "none"
                    if decay == "none"
                    else widths in ((40, 40), (128, 64))
                )
            ),
            "needs D",
        ),
        Rule(
            ("causal", "decay", "widths"),
            lambda causal, decay, widths: (
                not causal and decay in ("head", "step") and max(widths) > 128
            ),
            None,  # no part of this array yet: tests/test_mosaic_wide_both_ways.py
        ),
        Rule(
            ("heads", "widths", "decay"),
            lambda heads, widths, decay: (
                max(widths) <= 64
                and (heads == "one key head" or heads == "pairs" and decay == "channel")
            ),
            "needs",
        ),
        Rule(
            ("dtype", "decay", "segments"),
            lambda dtype, decay, segments: (
                dtype in ("float32", "TF32") and (decay != "none" or segments != "none")
            ),
            "does not support float32 with a decay or segments",
        ),
        Rule(
            ("dtype", "causal", "padding"),
            lambda dtype, causal, padding: (
                dtype in ("float32", "TF32") and causal and padding != "none"
            ),
            "does not support float32 with causal=True and lengths",
        ),
        Rule(
            ("dtype", "causal", "widths"),
            lambda dtype, causal, widths: (
                dtype in ("float32", "TF32") and causal and widths[0] < 64
            ),
            "needs D",
        ),
        Rule(
            ("dtype", "lengths"),
            lambda dtype, lengths: dtype in ("float32", "TF32") and lengths == "odd",
            "multiples of 8",
        ),
        Rule(
            ("dtype", "widths"),
            lambda dtype, widths: dtype in ("float32", "TF32") and max(widths) > 128,
            "needs D",
        ),
        Rule(
            ("dtype", "decay", "segments"),
            lambda dtype, decay, segments: (
                dtype == "float16" and (decay != "none" or segments != "none")
            ),
            None,  # where causal they are no part of this array yet: tests/test_mosaic_half.py
        ),
        Rule(
            ("dtype", "feature_map", "causal"),
            lambda dtype, feature_map, causal: (
                dtype == "float16" and feature_map in ("exp", "tanh") and causal
            ),
            "does not support float16 with feature_map",
        ),
        Rule(
            ("dtype", "initial_state", "feature_map", "normalize", "causal", "widths"),
            lambda dtype, initial_state, feature_map, normalize, causal, widths: (
                dtype == "float16"
                and initial_state
                and normalize is None
                and feature_map in ("elu1", "exp")
                and not (causal and widths[0] > 128)
            ),
            "does not support float16 with a normalizer beside an initial_state",
        ),
    ),
    triples=(
        *("padding", "segments", "causal", "decay", "initial_state", "return_state", "heads"),
    ),
    backend="mosaic_gpu",
)

# Whole blocks and tails of queries and keys, in multiples of 8 rows or of none.
MOSAIC_ATTENTION_LENGTHS = {
    "T = S, whole blocks": (2, 256, 256),
    "T = S": (2, 301, 301),
    "T < S": (2, 72, 640),
    "T > S": (2, 640, 128),
    "tails": (2, 200, 456),
    "odd": (2, 203, 300),
    "T = 1": (2, 1, 640),
    "S = 1": (2, 130, 1),
    "long": (1, 1088, 1088),
}


def _is_of_pairs(axes: str, lengths: str) -> bool:
    """Whether an array with these axes has one element for each query and key."""
    _, T, S = MOSAIC_ATTENTION_LENGTHS[lengths]
    return axes != "none" and ("T" in axes or T == 1) and ("S" in axes or S == 1)


def _tails_of_pairs(lengths: str, bias: str, mask: str) -> bool:
    _, T, S = MOSAIC_ATTENTION_LENGTHS[lengths]
    return bool(T % 8 or S % 64) and any(_is_of_pairs(axes, lengths) for axes in (bias, mask))


MOSAIC_ATTENTION = Space(
    "attention",
    {
        "lengths": tuple(MOSAIC_ATTENTION_LENGTHS),
        "padding": LENGTH_KINDS,
        "sight": tuple(WINDOWS),
        "query_offset": ("none", "int", "array"),
        "segments": SEGMENT_KINDS,
        "bias": ("none", "BHTS", "TS", "BS", "HT", "H", ""),
        "mask": ("none", "BHTS", "TS", "BS", "T"),
        "widths": ((128, 128), (64, 64), (80, 80), (96, 96), (192, 192), (256, 256)),
        "heads": tuple(HEADS),
        "dtype": ("bfloat16", "float16"),
        "softcap": (None, 1.5),
        "sinks": (False, True),
        "scale": (None, 0.2, -0.2),
        "dropout": (False, True),
        "return_lse": (False, True),
        "layout": LAYOUTS,
        "batched": (True, False),
        "x64": (False, True),
        "alone": (True,),
    },
    rules=(
        SEGMENTS_RULE,
        Rule(("scale",), lambda scale: scale == -0.2, "needs a positive scale"),
        Rule(
            ("lengths", "widths"),
            lambda lengths, widths: (
                any(size % 8 for size in MOSAIC_ATTENTION_LENGTHS[lengths][1:])
                and widths[0] % 64 != 0
            ),
            "needs T and S to be multiples of 8",
        ),
        Rule(("lengths", "bias", "mask"), _tails_of_pairs, "over pairs, got"),
    ),
    triples=("padding", "sight", "query_offset", "segments"),
    backend="mosaic_gpu",
)

# What the gradients depend on, of calls that have them.
MOSAIC_GRADIENTS = Space(
    "attention",
    {
        **MOSAIC_ATTENTION.factors,
        "lengths": tuple(
            name for name in MOSAIC_ATTENTION_LENGTHS if name not in ("T = S", "S = 1")
        ),
        "widths": ((128, 128), (64, 64), (80, 80), (192, 128), (256, 256)),
        "scale": (None, 0.2),
        "batched": (True,),
        "alone": (False,),
    },
    rules=tuple(rule for rule in MOSAIC_ATTENTION.rules if "scale" not in rule.factors),
    backend="mosaic_gpu",
)

DECODE = Space(
    "decode_attention",
    {
        "queries": (1, 4, 16),
        # Keys, and how many of them are in a page, None where all are in a row.
        "keys": (1100, 40, 4200),
        "page": (64, 16, 5, None),
        "lengths": (True, False),
        "bits": ("none", "int8", "float8_e4m3fn"),
        "values": ("own", "columns of keys"),
        "widths": ((64, 64), (128, 128), (80, 80), (96, 72), (256, 192), (576, 512), (24, 1)),
        "heads": (*HEADS, "many"),
        "dtype": ("bfloat16", "float16", "float32"),
        "window": (None, (100, None), (0, None)),
        "softcap": (None, 1.5),
        "sinks": (False, True),
        "scale": (None, 0.2, -0.2),
        "return_lse": (False, True),
        "batched": (True, False),
        "x64": (False, True),
        "card": (90, 80),
    },
    rules=(
        Rule(
            ("page", "lengths"),
            lambda page, lengths: page is not None and not lengths,
            "lengths must be given with a page_table",
        ),
        Rule(
            ("bits", "card"),
            lambda bits, card: bits == "float8_e4m3fn" and card == 80,
            "float8_e4m3fn needs",
        ),
    ),
    triples=("queries", "keys", "page", "bits", "values"),
)
STEP = Space(
    "linear_attention_step",
    {
        "feature_map": MAP_NAMES,
        "decay": ("none", "G", "BG", "BGD"),
        "normalize": (None, False, True),
        "scale": (None, 0.7, -0.7),
        "widths": ((64, 64), (128, 128), (80, 80), (40, 72), (256, 256), (1, 24), (64, 300)),
        "heads": tuple(HEADS),
        "dtype": ("bfloat16", "float16", "float32"),
        "eps": (1e-6, 0.5),
        "batched": (True, False),
        "x64": (False, True),
        "card": (90, 80),
    },
    rules=(NORMALIZER_RULE,),
)

# B, T: chunks have 64 steps, and tiles of the copy engine 8 rows. The second are for interpreted
# kernels.
DELTA_LENGTHS = {
    "odd": ((2, 301), (1, 139)),
    "whole chunks": ((2, 128), (1, 128)),
    "whole tiles": ((2, 200), (1, 72)),
    "below a chunk": ((2, 37), (1, 37)),
    "T = 1": ((2, 1), (1, 1)),
}
# H, G
SMALL_HEADS = {"H = G": (2, 2), "pairs": (2, 1), "one key head": (3, 1), "one head": (1, 1)}
DELTA_FACTORS: dict[str, tuple[Any, ...]] = {
    "decay": ("none", "step", "channel"),
    "beta": ("up to 1", "up to 2", "0, 1 and 2"),
    "keys": ("random", "alike"),
    "normalize_qk": (False, True),
    "initial_state": (False, True),
    "return_state": (False, True),
    "scale": (None, 0.7, -0.7),
    "layout": LAYOUTS,
    "batched": (True, False),
    "x64": (False, True),
    "alone": (False, True),
}
DELTA_RULE = Space(
    "gated_delta_rule",
    {
        **DELTA_FACTORS,
        "lengths": ("odd", "whole chunks", "below a chunk", "T = 1"),
        "padding": (False, True),
        "segments": (False, True),
        "widths": ((64, 64), (128, 128), (256, 256), (33, 65)),
        "heads": tuple(SMALL_HEADS),
        "dtype": tuple(DTYPES),
    },
    triples=("decay", "padding", "segments", "initial_state", "return_state", "normalize_qk"),
    backend="xla",
)
MOSAIC_DELTA_RULE = Space(
    "gated_delta_rule",
    {
        **DELTA_FACTORS,
        "lengths": ("odd", "whole chunks", "whole tiles", "T = 1"),
        "padding": (False, True),
        "segments": (False, True),
        "widths": ((128, 128), (64, 64), (128, 64), (64, 192), (96, 96), (33, 65)),
        "heads": ("H = G", "pairs", "one key head"),
        # How the state is walked from chunk to chunk, which otherwise follows from how many heads
        # there are for the card.
        "walk": ("one slice", "two slices", "pieces"),
    },
    rules=(
        Rule(
            ("walk", "widths"),
            lambda walk, widths: walk == "two slices" and widths[1] not in (96, 128),
            None,
        ),
        Rule(
            ("walk", "decay"),
            lambda walk, decay: walk != "one slice" and decay == "channel",
            None,
        ),
        # The decay then has no state to act on. Its gradient is 0, and the kernels' the rounding of
        # terms that cancel.
        Rule(
            ("lengths", "decay", "initial_state"),
            lambda lengths, decay, initial_state: (
                lengths == "T = 1" and decay == "step" and not initial_state
            ),
            None,
        ),
        Rule(
            ("walk", "lengths"),
            lambda walk, lengths: walk == "pieces" and lengths not in ("odd", "whole tiles"),
            None,
        ),
    ),
    triples=("decay", "padding", "segments", "normalize_qk", "initial_state", "layout"),
    backend="mosaic_gpu",
)
DELTA_STEP = Space(
    "gated_delta_rule_step",
    {
        "decay": ("none", "BH", "BHD"),
        "beta": DELTA_FACTORS["beta"],
        "normalize_qk": (False, True),
        "scale": (None, 0.7, -0.7),
        "widths": ((64, 64), (128, 128), (256, 256), (128, 64), (33, 65), (1, 24)),
        "heads": tuple(HEADS),
        "dtype": ("bfloat16", "float16", "float32"),
        "batched": (True, False),
        "x64": (False, True),
    },
    triples=("decay", "normalize_qk", "heads"),
)

SPACES = {
    "attention": ATTENTION,
    "linear_attention": LINEAR_ATTENTION,
    "mosaic_gpu": MOSAIC,
    "mosaic_attention": MOSAIC_ATTENTION,
    "mosaic_gradients": MOSAIC_GRADIENTS,
    "decode_attention": DECODE,
    "linear_attention_step": STEP,
    "delta_rule": DELTA_RULE,
    "mosaic_delta_rule": MOSAIC_DELTA_RULE,
    "delta_rule_step": DELTA_STEP,
}
# One token from a state: no backend to name, and no gradients of kernels.
STEPS = (STEP, DELTA_STEP)

OWN_LENGTHS = {
    MOSAIC: MOSAIC_LENGTHS,
    MOSAIC_ATTENTION: MOSAIC_ATTENTION_LENGTHS,
    MOSAIC_GRADIENTS: MOSAIC_ATTENTION_LENGTHS,
}


def _sizes(space: Space, row: Row, small: bool) -> tuple[int, ...]:
    D, V = row["widths"]
    wide = max(D, V) > WIDEST_WHOLE_ROW
    if space in OWN_LENGTHS:
        B, T, S = OWN_LENGTHS[space][row["lengths"]]
    else:
        B, T, S = LENGTHS[row["lengths"]][1 if small else 2 if wide else 0]
    if small and not wide:
        # In proportion, so that the larger of the two stays the larger.
        most = max(D, V, SMALL_WIDTH)
        D, V = (max(1, size * SMALL_WIDTH // most) for size in (D, V))
    return B if row["batched"] else 1, T, S, *HEADS[row["heads"]], D, V


def call_of(space: Space, row: Row, small: bool = False) -> Call:
    """The row as a call, whose arrays are drawn by the row's place in the array."""
    dtype, precision = DTYPES[row.get("dtype", "bfloat16")]
    sizes = _sizes(space, row, small)
    call = Call(
        space.op,
        sizes,
        dtype,
        1.0,
        math.prod(sizes) % 997,
        layout=row["layout"],
        batched=row["batched"],
    )
    if precision:
        call.options["precision"] = precision
    for side in ("q", "kv"):
        if row.get("padding") in (side, "both"):
            call.arrays[f"{side}_lengths"] = "drawn"
            call.poisoned = True
    if (kind := row.get("segments", "none")) != "none":
        call.arrays["segment_ids" if kind == "self" else "q_segment_ids"] = "runs"
    (_attention if space.op == "attention" else _linear_attention)(call, row)
    if space is MOSAIC and _few_features_dominate(row):
        call.magnitude = 0.5
    return call


def _few_features_dominate(row: Row) -> bool:
    """Whether a few features exp(k) of normal numbers k are most of the norm of dk, and two walks
    round it. Bfloat16 may round the share of one walk and the sum by up to 2^-9 each, which does
    not average out over a few numbers. So such rows have features closer to one another."""
    both_ways = row["decay"] in ("head", "step") and not row["causal"]
    unnormalized = row["feature_map"] == "exp" and row["normalize"] is False
    return both_ways and unnormalized and row["dtype"] == "bfloat16"


def _attention(call: Call, row: Row) -> None:
    _, T, S, *_ = call.sizes
    shrink = max(1, 300 // max(T, S)) if max(T, S) < 100 else 1
    for name, value in WINDOWS[row["sight"]].items():
        if name == "window":
            value = tuple(bound if bound is None else bound // shrink for bound in value)
        call.options[name] = value
    if row["query_offset"] == "int":
        call.options["query_offset"] = S // 3
    elif row["query_offset"] == "array":
        call.arrays["query_offset"] = "drawn"
    for name in ("bias", "mask"):
        if row[name] != "none":
            call.arrays[name] = row[name]
    for name in ("softcap", "scale"):
        if row[name] is not None:
            call.options[name] = row[name]
    if row["sinks"]:
        call.arrays["sinks"] = "drawn"
    if row["dropout"]:
        call.options["dropout_rate"] = 0.3
        call.arrays["dropout_key"] = "drawn"
    call.options["return_lse"] = row["return_lse"]


def _feature_map(name: str, D: int) -> Any:
    if name == "favor":
        return ato_jax.favor(jax.random.key(0), FAVOR_FEATURES, D)
    return MAPS.get(name, name)


def _linear_attention(call: Call, row: Row) -> None:
    D = call.sizes[5]
    name = row.get("feature_map", "elu1")
    call.options["feature_map"] = _feature_map(name, D)
    # A sum of weights of both signs may vanish, and the quotient then means nothing.
    call.positive = bool(row["normalize"]) and name in SIGNED
    normalized = row["normalize"]
    if normalized is None:
        normalized = name not in SIGNED and name not in MAPS
    if call.dtype == "float16" and not normalized:
        # The sums themselves come out, and have to stay within float16's range.
        call.magnitude = 0.3
    for option in ("causal", "return_state", "eps"):
        call.options[option] = row[option]
    for option in ("normalize", "scale"):
        if row[option] is not None:
            call.options[option] = row[option]
    if row["decay"] != "none":
        call.arrays["decay"] = row["decay"]
    if row["initial_state"]:
        call.arrays["initial_state"] = "drawn"


def arguments_of(space: Space, row: Row) -> dict[str, Any]:
    """The arguments of the row's call by name, but for the backend."""
    if space is DECODE:
        return _decode_arguments(row)
    if space is STEP:
        return _step_arguments(row)
    if space is DELTA_STEP:
        return _delta_step_arguments(row)
    (q, k, v), options = qkv_and_options(space, row)
    return {"q": q, "k": k, "v": v} | options


def qkv_and_options(
    space: Space, row: Row, small: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """[q, k, v] of a call on whole sequences, and all its other arguments by name."""
    if space.op == "gated_delta_rule":
        return _delta_rule(row, small)
    return call_of(space, row, small).arguments()


def _decode_arguments(row: Row) -> dict[str, Any]:
    """Sequences of several lengths; nonsense in the rows and pages that none of them uses."""
    T, (D, V), page = row["queries"], row["widths"], row["page"]
    H, G = MANY_HEADS if row["heads"] == "many" else HEADS[row["heads"]]
    B = 3 if row["batched"] else 1
    draw = np.random.default_rng(T + D + V)
    lengths = np.full(B, row["keys"])
    if row["lengths"]:
        lengths = np.array([row["keys"] - 3, 0, row["keys"] // 3])[:B]
    found: dict[str, Any] = {"q": jnp.asarray(draw.normal(size=(B, T, H, D)), row["dtype"])}
    rows_of = (B, row["keys"])
    if page is not None:
        pages = math.ceil(row["keys"] / page)
        rows_of = B * pages + 2, page
        table = draw.permutation(B * pages + 2)[: B * pages].reshape(B, pages)
        unused = np.arange(pages) * page >= lengths[:, None]
        found["page_table"] = jnp.asarray(np.where(unused, -1 - table, table), jnp.int32)
    own_values = row["values"] == "own"
    for name, width in (("k", D), ("v", V))[: 1 + own_values]:
        array = draw.normal(size=(*rows_of, G, width))
        if name == "v" and width == 1:
            # The average of thousands may be close to 0 in every query at once, where an error
            # relative to it measures nothing but how close.
            array = np.abs(array)
        if row["bits"] == "none":
            found[f"{name}_pages"] = jnp.asarray(array, row["dtype"])
            continue
        scales = np.abs(array).max(axis=-1) / 127
        if row["bits"] == "int8":
            array = np.round(array / scales[..., None])
        found[f"{name}_pages"] = jnp.asarray(array, row["bits"])
        found[f"{name}_scale_pages"] = jnp.asarray(scales, jnp.float32)
    if not own_values:
        found["value_dim"] = V
    if row["lengths"]:
        found["lengths"] = jnp.asarray(lengths, jnp.int32)
    if row["sinks"]:
        found["sinks"] = jnp.asarray(draw.normal(size=H), row["dtype"])
    if not row["batched"]:
        own = ["q", "page_table", "lengths"]
        if page is None:
            own += ["k_pages", "v_pages", "k_scale_pages", "v_scale_pages"]
        found |= {name: found[name][0] for name in own if name in found}
    for name in ("window", "softcap", "scale", "return_lse"):
        found[name] = row[name]
    return found


def _step_arguments(row: Row) -> dict[str, Any]:
    (D, V), (H, G) = row["widths"], HEADS[row["heads"]]
    B = 3 if row["batched"] else 1
    draw = np.random.default_rng(D + V)
    q, k, v = (draw.normal(size=(B, *shape)) for shape in ((H, D), (G, D), (G, V)))
    if row["normalize"] and row["feature_map"] in SIGNED:
        q, k = np.abs(q), np.abs(k)
    feature_map = _feature_map(row["feature_map"], D)
    features = FAVOR_FEATURES if row["feature_map"] == "favor" else D
    sums = jnp.asarray(draw.uniform(0.2, 1.0, size=(B, G, features, V + 1)), jnp.float32)
    state = ato_jax.LinearState(sums[..., :V], sums[..., V])
    found = dict(zip("qkv", (jnp.asarray(x, row["dtype"]) for x in (q, k, v)), strict=True))
    found |= {"state": state, "feature_map": feature_map, "eps": row["eps"]}
    found |= {name: row[name] for name in ("normalize", "scale")}
    if row["decay"] != "none":
        sizes = {"B": B, "G": G, "D": features}
        decay = -np.abs(draw.normal(size=[sizes[axis] for axis in row["decay"]]))
        found["decay"] = jnp.asarray(decay, jnp.float32)
    if not row["batched"]:
        own = ["q", "k", "v", "state"] + ["decay"] * ("B" in row["decay"])
        found |= {name: jax.tree.map(lambda array: array[0], found[name]) for name in own}
    return found


def _delta_rule(row: Row, small: bool) -> tuple[list[Any], dict[str, Any]]:
    """Keys of length 1 unless they are normalised by the call: beyond, the state grows."""
    (B, T), (D, V) = DELTA_LENGTHS[row["lengths"]][small], row["widths"]
    # A gradient of beta or of a decay is one sum, and the few of one step may all cancel by chance.
    times = 1 if T > 1 else 3 if small else 8
    H, G = (size * times for size in SMALL_HEADS[row["heads"]])
    B = B if row["batched"] else 1
    dtype, precision = DTYPES[row.get("dtype", "bfloat16")]
    draw = np.random.default_rng(math.prod((B, T, H, D, V)) % 997)
    q, k = draw.normal(size=(2, B, T, G, D))
    if row["keys"] == "alike":
        k = np.broadcast_to(k[:, :1], k.shape).copy()
    if not row["normalize_qk"]:
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
    timed = {"q": q, "k": k, "v": draw.normal(size=(B, T, H, V))}
    timed["beta"] = _betas(draw, row["beta"], (B, T, H))
    if row["decay"] != "none":
        of_channels = (D,) * (row["decay"] == "channel")
        timed["decay"] = _decays(draw, (B, T, H, *of_channels))
    options: dict[str, Any] = {}
    if row.get("segments"):
        ids = draw.integers(0, 3, size=(B, T)) * (draw.uniform(size=(B, T)) < 0.1)
        options["segment_ids"] = ids.cumsum(1) % 4  # runs, some of whose ids return
    if row.get("padding"):
        options["lengths"] = lengths = draw.integers(0, 1 + T, size=B)
        for array in timed.values():
            array[np.arange(T) >= lengths[:, None]] = np.nan
    if row["initial_state"]:
        state = draw.normal(size=(B, H, D, V))
        options["initial_state"] = jnp.asarray(state, jnp.float32)
    if row["layout"] == "bhtd":
        timed = {name: np.swapaxes(array, 1, 2) for name, array in timed.items()}
    given: dict[str, Any] = {
        name: jnp.asarray(array, dtype if name in "qkv" else jnp.float32)
        for name, array in timed.items()
    }
    if not row["batched"]:
        given, options = jax.tree.map(lambda array: array[0], (given, options))
    options |= {name: row[name] for name in ("normalize_qk", "return_state", "scale", "layout")}
    if precision:
        options["precision"] = precision
    return [given.pop(name) for name in "qkv"], given | options


def _betas(draw: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    if kind == "0, 1 and 2":
        return draw.integers(0, 3, size=shape).astype(float)
    return draw.uniform(0, 1 if kind == "up to 1" else 2, size=shape)


def _decays(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Mostly none and weak ones, and a few that are strong or total."""
    return draw.choice([0, -1e-3, -1, -50, -np.inf], p=[0.4, 0.4, 0.14, 0.04, 0.02], size=shape)


def _delta_step_arguments(row: Row) -> dict[str, Any]:
    (D, V), (H, G) = row["widths"], HEADS[row["heads"]]
    B = 3 if row["batched"] else 1
    draw = np.random.default_rng(D + V)
    q, k = draw.normal(size=(2, B, G, D))
    k = k if row["normalize_qk"] else k / np.linalg.norm(k, axis=-1, keepdims=True)
    given = {"q": q, "k": k, "v": draw.normal(size=(B, H, V))}
    given["beta"] = _betas(draw, row["beta"], (B, H))
    given["state"] = draw.normal(size=(B, H, D, V))
    if row["decay"] != "none":
        given["decay"] = _decays(draw, (B, H, D)[: len(row["decay"])])
    found: dict[str, Any] = {
        name: jnp.asarray(array if row["batched"] else array[0], _dtype_of(name, row))
        for name, array in given.items()
    }
    return found | {name: row[name] for name in ("normalize_qk", "scale")}


def _dtype_of(name: str, row: Row) -> str:
    return row["dtype"] if name in "qkv" else "float32"


# -- lowering ------------------------------------------------------------------------------------

CARDS = {
    80: device.Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), 108, device.SHARED_MEMORY[8, 0]),
    90: device.Device("gpu", "NVIDIA H200", (9, 0), 132, device.SHARED_MEMORY[9, 0]),
}


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


def program(space: Space, row: Row) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function of the row's arrays, all of which are traced, and the arrays: outputs and all
    gradients, and the outputs of a call alone, which no derivative follows, if the row says so."""
    options = arguments_of(space, row)
    traced = {
        name: jnp.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
        if any(map(_is_array, jax.tree.leaves(value)))
    }
    static = {name: value for name, value in options.items() if name not in traced}
    if space not in STEPS:
        static["implementation"] = space.backend
    call = functools.partial(getattr(ato_jax, space.op), **static)
    differentiated = {"q", "k", "v", *numerics.DIFFERENTIABLE} & set(traced)

    def run(traced: dict[str, Any]) -> Any:
        inputs = {name: traced[name] for name in differentiated}
        others = {name: traced[name] for name in traced if name not in differentiated}
        outputs, pull = jax.vjp(lambda inputs: call(**inputs, **others), inputs)
        return (call(**traced) if row["alone"] else None), outputs, pull(outputs)

    return (run if has_gradients(space, row) else lambda traced: call(**traced)), traced


def has_gradients(space: Space, row: Row) -> bool:
    """Whether the backend has them: those of some of Mosaic GPU's calls are Triton's, and those of
    decoding are plain JAX."""
    if space not in (MOSAIC, MOSAIC_ATTENTION):
        return space not in (DECODE, *STEPS)
    arguments, options = qkv_and_options(space, row)
    spec = numerics.prepare(space.op, *arguments, **options)[0].spec
    return numerics.APIS[space.op].OP.backend(space.backend).unsupported(spec, "backward") is None


@contextlib.contextmanager
def as_on_a_card(row: Row) -> Iterator[int]:
    """Calls are made as on the row's card, whose capability this gives, and with its `x64`."""
    capability = row.get("card", 90)
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(row["x64"]), walked(row):
        patch.setattr(device, "of_call", lambda arrays: CARDS[capability])
        yield capability


@contextlib.contextmanager
def walked(row: Row) -> Iterator[None]:
    """Hopper's kernels of the delta rule walk as the row says, however many heads there are."""
    walk = row.get("walk", "one slice")
    given = mosaic_delta_rule.default_config

    def own(spec: Any, device: device.Device) -> Any:
        walks = {"slices": 2 if walk == "two slices" else 1, "pieces": 3 if walk == "pieces" else 1}
        return dataclasses.replace(given(spec, device), **walks)

    with pytest.MonkeyPatch.context() as patch:
        if "walk" in row:
            backend = type(mosaic_delta_rule.BACKEND)
            patch.setattr(backend, "default_config", staticmethod(own))
        yield


def trace(space: Space, row: Row) -> None:
    """Traces the row's call, forward and backward, without lowering it."""
    with as_on_a_card(row):
        function, traced = program(space, row)
        jax.eval_shape(function, traced)


def lower(space: Space, row: Row) -> list[str]:
    """The names of the kernels that the row lowers to for CUDA; Triton's are parsed and verified.

    Pallas does not verify Triton's IR when it makes it. JAX does when it reads the kernel, and so
    does Triton when it reads the text and runs the passes that come before those of one card.
    """
    with as_on_a_card(row) as capability:
        function, traced = program(space, row)
        lowered = aot.lower(function, traced, capability=capability)
    kernels = aot.kernels_of(lowered)
    for kernel in kernels:
        aot.verify(kernel, capability)
    of_mosaic = [
        target for target in aot.targets_of_calls(lowered) if target.startswith("mosaic_gpu")
    ]
    found = [*(kernel.name for kernel in kernels), *of_mosaic]
    assert of_mosaic or space.backend != "mosaic_gpu", f"no kernel of Mosaic GPU: {found}"
    assert bool(found) != (space.backend == "xla"), f"kernels: {found}"
    return found


# -- numbers -------------------------------------------------------------------------------------

_PHASES_OF_ATTENTION = ("", "dq_", "dkv_", "dbias_")
# Blocks so small that the short calls have several, with whole ones and a tail among them.
SMALL_CONFIGS: dict[str, dict[str, int]] = {
    "attention": {
        f"{kernel}block_{side}": 16 for kernel in _PHASES_OF_ATTENTION for side in ("q", "k")
    },
    "linear_attention": {
        "piece_rows": 32,
        "programs": 1,
        "run_rows": 0,
        "backward_run_rows": 0,
        "output_rows": 32,
        "dkv_rows": 32,
        **{f"{kernel}_block": 16 for kernel in ("state", "output", "dq", "dkv")},
    },
}


def check_interpreted(space: Space, row: Row) -> None:
    """The backend's kernels, interpreted on short arrays, beside the float64 reference."""
    arguments, options = qkv_and_options(space, row, small=True)
    if space.op == "gated_delta_rule":
        wanted = numerics.oracle(space.op, *arguments, **options)
        options["cotangents"] = wanted.cotangents
        with ato_jax.interpret(), walked(row):
            found = numerics.run(space.op, space.backend, *arguments, **options)
        numerics.compare(found, wanted)
        return
    config = SMALL_CONFIGS[space.op]
    wide = space is ATTENTION and max(row["widths"]) > WIDEST_WHOLE_ROW
    if row.get("decay") == "channel":
        # Its chunks are halved, and are 32 rows at least.
        config = {name: max(size, 32) for name, size in config.items() if size > 1} | {
            "programs": 1
        }
    # Without `x64`, under which JAX's interpreter mixes integers of its own in 32 and 64 bits.
    wanted = numerics.oracle(space.op, *arguments, **options)
    with ato_jax.interpret():
        found = numerics.run_backends(
            *["triton.wide" if wide else space.backend] * 2,
            wanted,
            device=CARDS[row["card"]],
            forward_config={} if wide else config,
            backward_config={} if wide else config,
        )
    numerics.compare(found, wanted)


def check_on_the_card(space: Space, row: Row, implementation: str | None) -> None:
    """The public function beside the float64 reference: outputs with and without a derivative to
    follow, and all gradients. What has no derivative of its own, beside plain JAX in float32."""
    with jax.enable_x64(row["x64"]), walked(row):
        if space in (DECODE, *STEPS):
            _check_outputs(space, row, implementation)
            return
        arguments, options = qkv_and_options(space, row)
        if implementation is None and _chooses(space, arguments, options):
            return  # the test that names the backend runs the same program
        wanted = numerics.oracle(space.op, *arguments, **options)
        both = implementation is None or has_gradients(space, row)
        if both:
            cotangents = wanted.cotangents
            numerics.compare(
                numerics.run(
                    space.op, implementation, *arguments, cotangents=cotangents, **options
                ),
                wanted,
            )
        if row["alone"] or not both:
            function = getattr(ato_jax, space.op)
            outputs = function(*arguments, implementation=implementation, **options)
            named = numerics.named_outputs(space.op, outputs)
            exact = {name: wanted.exact[name] for name in named}
            numerics.compare(named, dataclasses.replace(wanted, exact=exact))


def _chooses(space: Space, arguments: Any, options: dict[str, Any]) -> bool:
    """Whether a call that names no backend runs the space's own in every phase."""
    free, named = (
        ato_jax.explain(space.op, *arguments, implementation=implementation, **options)
        for implementation in (None, space.backend)
    )
    phases = ("forward", "recorded", "backward")
    return all(getattr(free, phase) == getattr(named, phase) for phase in phases)


def _check_outputs(space: Space, row: Row, implementation: str | None) -> None:
    given = arguments_of(space, row)
    function = getattr(ato_jax, space.op)

    def upcast(array: Any) -> Any:
        """In float32 on the CPU, where there are no kernels; keys in 8 bits stay as they are."""
        if not isinstance(array, jax.Array):
            return array
        half = array.dtype in (jnp.bfloat16, jnp.float16)
        return jax.device_put(array.astype(jnp.float32) if half else array, jax.devices("cpu")[0])

    exact = {name: jax.tree.map(upcast, value) for name, value in given.items()}
    if space is DECODE:
        found = function(**given, implementation=implementation)
        wanted = function(**exact, implementation="reference")
        named = [numerics.named_outputs("attention", result) for result in (found, wanted)]
    else:
        found, wanted = function(**given), function(**exact)
        op = space.op.removesuffix("_step")
        named = [numerics.named_outputs(op, result) for result in (found, wanted)]
    for name, actual in named[0].items():
        numerics.check(name, actual, named[1][name], dtype=row["dtype"])


def report() -> str:
    lines = []
    for name, space in SPACES.items():
        counts = {
            "pairs": count(space, 2),
            "triples": count(space, 3),
            f"triples among {', '.join(space.triples)}": count(space, 3, space.triples),
        }
        lines.append(f"{name}: {len(rows(space))} rows")
        lines += [
            f"  {found.covered} of {found.total - found.excluded} possible {what}, "
            f"{found.excluded} excluded"
            for what, found in counts.items()
            if found.total
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
