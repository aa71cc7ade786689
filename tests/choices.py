"""What `implementation=None` chooses on a list of cards, and with which block sizes.

    python -m tests.choices        writes tests/choices.txt

The calls are those that the suite `choices` of the benchmarks measures. No card is needed: each is
described as JAX would describe it. A change of a choice is a change of tests/choices.txt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from ato_jax import choosing, device, dispatch, tuning
from benchmarks.choices import APIS, ROWS, Row, draw, keywords
from benchmarks.ours import import_backends

GOLDEN = Path(__file__).parent / "choices.txt"
HEAD = """\
What implementation=None chooses, by card; made by python -m tests.choices.

One line for the cards that choose alike: the forward pass of a call whose derivative is not taken,
then both passes of one whose derivative is. A config's values stand in the order of its fields:
"""

# What JAX says of a card: its name, compute capability and multiprocessors.
CARDS = {
    "T4": ("Tesla T4", "7.5", 40),
    "A100": ("NVIDIA A100-SXM4-80GB", "8.0", 108),
    "A10": ("NVIDIA A10", "8.6", 72),
    "L4": ("NVIDIA L4", "8.9", 58),
    "H100": ("NVIDIA H100 80GB HBM3", "9.0", 132),
    "H200": ("NVIDIA H200", "9.0", 132),
    "GH200": ("NVIDIA GH200 480GB", "9.0", 132),
    "H20": ("NVIDIA H20", "9.0", 78),
    "B200": ("NVIDIA B200", "10.0", 148),
    "RTX 5090": ("NVIDIA GeForce RTX 5090", "12.0", 170),
    "sm_150": ("A later card", "15.0", 132),
    "MI250X": ("AMD Instinct MI250X", "gfx90a:sramecc+:xnack-", 104),
    "MI300X": ("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 304),
    "RX 7900": ("AMD Radeon RX 7900 XTX", "gfx1100", 96),
    "unknown": ("Some GPU", None, None),
}


def described(name: str) -> device.Device:
    """A card as `device.describe` sees it."""
    kind, capability, multiprocessors = CARDS[name]
    facts: dict[str, Any] = {"platform": "gpu", "device_kind": kind}
    if capability is not None:
        facts |= {"compute_capability": capability, "core_count": multiprocessors}
    return device.describe(types.SimpleNamespace(**facts))


@contextlib.contextmanager
def pretending(card: device.Device) -> Iterator[None]:
    """Inside this context calls run on that card, as far as anything asks."""
    import_backends()  # one that is imported in here would keep the pretended function
    with contextlib.ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("ato_jax") and getattr(module, "of_call", None) is device.of_call:
                patches.enter_context(mock.patch.object(module, "of_call", lambda arrays: card))
        yield


@functools.cache
def spec_of(row: Row) -> Any:
    found = []

    def prepare(arrays: dict[str, Any]) -> None:
        named = {name: array for name, array in arrays.items() if name != "dout"}
        q, k, v = (named.pop(name) for name in "qkv")
        found.append(APIS[row.op].prepare(q, k, v, **named, **keywords(row)).spec)

    key = jax.eval_shape(lambda: jax.random.key(0))
    jax.eval_shape(prepare, jax.eval_shape(functools.partial(draw, row), key))
    return found[0]


def chosen(row: Row, card: device.Device) -> tuple[choosing.Choice | None, ...]:
    """Of the forward pass alone, and of both passes where the derivative is taken."""
    spec = spec_of(row)
    call = choosing.Call(APIS[row.op].OP, spec, None, card, False)
    with pretending(card):
        return choosing.choose_if_any(call, "forward"), *dispatch.choices_of_training(call)


def _text(choice: choosing.Choice | None) -> str:
    if choice is None:
        return "-"
    values = dataclasses.astuple(choice.config)
    sizes = " ".join(str(int(one) if isinstance(one, bool) else one) for one in values)
    beside = f" or {_text(choice.fallback)}" if choice.fallback else ""
    by = "" if choice.sizes_by == "block sizes by rule" else f" by {choice.sizes_by.split()[-1]}"
    return f"{choice.kernel}{f' [{sizes}{by}]' if sizes else ''}{beside}"


def _line(choices: tuple[choosing.Choice | None, ...]) -> str:
    forward, *training = map(_text, choices)
    both = training[0] if len(set(training)) == 1 else " then ".join(training)
    return forward if forward == both else f"{forward}; {both}"


def golden() -> str:
    cards = {name: described(name) for name in CARDS}
    fields: dict[str, str] = {}
    lines = ["", "Cards:"]
    for name, card in cards.items():
        tables = ", ".join(tuning.tables_of(card, "last")) or "none"
        lines.append(
            f"  {name}: {card.name}, {card.architecture or 'no architecture'}, "
            f"{card.shared_memory // 1024} KiB, warps of {card.warp_size}; tables: {tables}"
        )
    for row in ROWS["gpu"]:
        lines += ["", str(row)]
        together: dict[str, list[str]] = {}
        for name, card in cards.items():
            choices = chosen(row, card)
            for choice in filter(None, choices):
                names = " ".join(field.name for field in dataclasses.fields(choice.config))
                fields[f"{row.op}, {choice.kernel}"] = names or "none"
            together.setdefault(_line(choices), []).append(name)
        lines += [f"  {', '.join(names)}: {line}" for line, names in together.items()]
    told = [f"  {name}: {names}" for name, names in sorted(fields.items())]
    return HEAD + "\n".join(["", *told, *lines]) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(golden())
