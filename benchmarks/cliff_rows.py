"""The rows of the suite `cliffs`: one option each, its base case, its target.

    traffic    = bytes of q, k, v, out, the gates and the segment ids, each array once, forward;
                 forward + backward adds q, k, v, dout and their gradients, and the gates read once
                 more with their gradient written; as in `cases.py`, for any option
    share      = traffic / copy bandwidth / time
    target     = the least share of an option, as a part of its base case's share in the same run,
                 as a part of the byte limit, beside the time of the products, or by the speed of
                 its base case

A gated row's base case is the same call without its gate, so that what the gate costs is told apart
from what the other option costs. Options of softmax attention, the group `softmax`, have the bytes
of q, k, v and out alone, a bias or a mask has none: so their ratio is that of the times, and their
targets are 1.25 times the plain call's time, 1.5 with dropout, 1.6 with a bias, and 1.03 where no
product changes. With fewer key heads the products are the same and the bytes are not, so that
target is one of the speed. At other head sizes bytes and operations change alike: the ratio
compares operations per second, of which a size is to have 1/1.3 of those at D = 128.

The group `float8` has calls on inputs of 8 bits beside the same calls in bfloat16, forward alone,
since they have no gradients: q, k and v of one byte and an output in bfloat16 are their bytes. An
option is also timed beside the float8 call without it, and plain softmax attention beside cuDNN's
float8. Some rows are compared with float64, too (`float8.py`).

The group `drawn` has shapes of linear attention that a seed draws, with options at random, beside
the plain call of the nearest size.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp

from benchmarks import float8, results
from benchmarks.cases import PHASES
from benchmarks.choices import FAVOR_FEATURES, Row

# In the order in which they are measured.
GROUPS = ("lengths", "dtypes", "maps", "gates", "softmax", "float8", "heads", "drawn")
# The contenders of a row; another library's has the name of its function.
OURS, BASE, PLAIN = "ato_jax", "ato_jax, base case", "ato_jax, float8 without the option"

# Operations per second that exact float32 products are expected to reach.
FLOAT32_RATE = 50e12


@dataclasses.dataclass(frozen=True)
class Target:
    """A part of the base case's share, of the byte limit, of the larger of the byte limit and the
    time of the products at `FLOAT32_RATE`, or so many times the base case's speed; `of` is "base",
    "limit", "products" or "speed". With `speed`, so many times the base case's speed meet it, too.
    """

    part: float
    of: str = "base"
    speed: float | None = None

    def share(self, row: results.Row, base: results.Row | None) -> float | None:
        """The least share of the byte limit that meets it; None where the base case has none."""
        seconds = base.seconds if base else None
        if self.of == "base":
            reached = base.reached if base else None
            return None if reached is None else self.part * reached
        if self.of == "speed":
            return self.part * row.limit / seconds if seconds else None
        if self.of == "limit":
            fast_enough = self.speed * row.limit / seconds if self.speed and seconds else self.part
            return min(self.part, fast_enough)
        return self.part * row.limit / max(row.limit, row.operations / FLOAT32_RATE)

    def __str__(self) -> str:
        told = {"base": "", "limit": " of the limit", "products": " of limit or products"}
        told["speed"] = " times the speed"
        either = f", or {self.speed:.2f} times the speed" if self.speed else ""
        return f"{self.part:.2f}{told[self.of]}{either}"


@dataclasses.dataclass(frozen=True)
class Step:
    """A row one option beside its base case; `group` is one of `GROUPS`. Of float8 inputs the base
    case is the same call in bfloat16, `plain` the float8 call without the option, `peer` the call
    by another library, and `errors` asks for errors against float64.
    """

    group: str
    name: str
    row: Row
    base: Row
    target: Target | None = None
    plain: Row | None = None
    peer: Row | None = None
    errors: bool = False

    @property
    def phases(self) -> tuple[str, ...]:
        """Float8 inputs have no gradients."""
        return PHASES[:1] if self.row.dtype == float8.FLOAT8 else PHASES

    @property
    def beside(self) -> dict[str, Row]:
        """By contender the calls that are timed in turns with the row."""
        found = {BASE: self.base}
        if self.plain:
            found[PLAIN] = self.plain
        if self.peer:
            found[self.peer.by] = self.peer
        return found

    @property
    def rows(self) -> tuple[Row, ...]:
        """All that are compiled."""
        return *self.beside.values(), self.row

    @property
    def size(self) -> str:
        direction = "causal" if self.row.causal else "bidirectional"
        return f"B{self.row.B} H{self.row.H} D{self.row.D}, {direction}"


def _bytes(row: Row) -> tuple[int, int, int]:
    """The bytes of q, k and v together, of out, and of the gates."""
    item = jnp.dtype(row.dtype).itemsize
    sizes = {name: item * math.prod(shape) for name, shape in row.shapes.items()}
    if row.dtype == float8.FLOAT8:
        sizes["dout"] *= 2  # the output is in bfloat16
    gates = {None: 0, "head": 1, "step": row.B * row.T, "channel": row.B * row.T * row.D}
    heads = row.G or row.H
    return sizes["q"] + sizes["k"] + sizes["v"], sizes["dout"], 4 * heads * gates[row.decay]


def traffic(row: Row, phase: str) -> int:
    """The bytes of every input and output, each moved once a pass."""
    inputs, out, gates = _bytes(row)
    ids = (4 * row.B * row.T if row.documents else 0) + (4 * row.B if row.lengths else 0)
    forward = inputs + out + gates + ids
    if phase == PHASES[0]:
        return forward
    return forward + 2 * inputs + out + 2 * gates + ids


def operations(row: Row, phase: str) -> float:
    """Multiplications and additions of k^T v and of q times the state, three times as many with
    gradients; those of the feature map are left out. Of softmax attention those of all pairs, half
    of them if causal, and 3.5 times as many.
    """
    if row.op == "attention":
        pairs = row.B * row.T * (row.S or row.T) / (2 if row.causal else 1)
        products = 2 * row.H * (row.D + (row.V or row.D)) * pairs
        return products if phase == PHASES[0] else 3.5 * products
    features = FAVOR_FEATURES if dict(row.options).get("feature_map") == "favor" else row.D
    forward = 4 * row.B * row.T * row.H * features * (row.V or row.D)
    return forward if phase == PHASES[0] else 3 * forward


def _linear(B: int, H: int, D: int, **more: Any) -> Row:
    return Row("linear_attention", **{"B": B, "H": H, "T": 16384, "D": D, **more})


def _mapped(name: str, **more: Any) -> dict[str, Any]:
    return {"options": (("feature_map", name), *more.items())}


# Batch and heads of the base cases by head size.
SIZES = {64: (8, 8), 128: (2, 16)}
# Batch and heads by head size: arrays have about as many elements as the base cases'.
HEADS = {
    32: (8, 16),
    40: (8, 12),
    48: (8, 10),
    72: (8, 7),
    80: (4, 12),
    96: (4, 10),
    112: (4, 9),
    160: (2, 12),
    192: (2, 10),
    256: (2, 8),
    512: (2, 4),
}
GATED_HEADS = (80, 96, 192, 256)
# The length at which float8 calls are compared with float64.
LONG = 65_536
IDENTITY = _mapped("identity", normalize=False)


def _options(D: int, causal: bool) -> Iterator[Step]:
    """The options of one base case, without its gates."""
    B, H = SIZES[D]
    base = _linear(B, H, D, causal=causal)

    def step(group: str, name: str, target: Target | None, **changed: Any) -> Step:
        return Step(group, name, dataclasses.replace(base, **changed), base, target)

    yield step("lengths", "T 16411", Target(0.9), T=16411)
    yield step("lengths", "lengths", Target(0.9), lengths=True)
    segments = Target(0.75 if causal else 0.6)
    yield step("lengths", "segments of 1024", segments, documents=1024)
    yield step("dtypes", "float16", Target(0.85), dtype="float16")
    yield step("dtypes", "float32, exact", Target(1 / 1.5, "products"), dtype="float32")
    yield step("dtypes", "float32, TF32", Target(0.5, "limit"), dtype="float32", tf32=True)
    for name in ("exp", "silu", "relu"):
        yield step("maps", name, Target(0.9), **_mapped(name))
    yield step("maps", "a callable", Target(0.9), **_mapped("callable", normalize=True))
    yield step("maps", "identity, not normalised", Target(0.9), **IDENTITY)
    favor = _mapped("favor")
    yield step("maps", "FAVOR+, 128 features", Target(0.4, "limit"), **favor)
    short = dataclasses.replace(base, T=4096)
    told = "FAVOR+, 128 features, T 4096"
    yield Step("maps", told, dataclasses.replace(short, **favor), short)
    yield step("heads", "group of 4", Target(0.75), G=H // 4)
    other = 192 - D
    yield step("heads", f"V {other}", Target(0.75), V=other)


def _gates(D: int) -> Iterator[Step]:
    B, H = SIZES[D]
    base = _linear(B, H, D, causal=True)

    def step(name: str, target: Target | None, gate: str, beside: Row, **changed: Any) -> Step:
        row = dataclasses.replace(beside, decay=gate, **changed)
        return Step("gates", name, row, beside, target)

    scalar = step("scalar gate", Target(0.85), "step", base)
    yield scalar
    # Both rows move the same bytes: at most 2.2 times the causal row's time.
    yield step("scalar gate both ways", Target(1 / 2.2), "step", scalar.row, causal=False)
    segments = dataclasses.replace(base, documents=1024)
    yield step("scalar gate, segments of 1024", Target(0.85), "step", segments)
    identity = dataclasses.replace(base, **IDENTITY)
    yield step("scalar gate, identity, not normalised", Target(0.85), "step", identity)
    channel = dataclasses.replace(base, decay="channel")
    if D == 128:
        yield Step("gates", "channel gate", channel, base)
        wide = dataclasses.replace(scalar.row, V=256)
        yield Step("gates", "scalar gate, V 256", wide, scalar.row, Target(0.75))
    else:
        yield Step("gates", "channel gate", channel, _channel_base(), Target(0.7))
    not_normalised = dataclasses.replace(channel, options=(("normalize", False),))
    yield Step("gates", "channel gate, not normalised", not_normalised, channel)
    of_gla = dataclasses.replace(channel, **IDENTITY)
    yield Step("gates", "channel gate, identity, not normalised", of_gla, channel, Target(0.9))
    in_segments = dataclasses.replace(channel, documents=1024)
    yield Step("gates", "channel gate, segments of 1024", in_segments, channel, Target(0.75))


def _channel_base() -> Row:
    """A channel gate of any size is measured beside that of 128 columns."""
    return _linear(*SIZES[128], 128, decay="channel", causal=True)


def _heads() -> Iterator[Step]:
    for D, (B, H) in HEADS.items():
        near = 64 if D < 96 else 128
        part = 0.4 if D > 256 else 0.75 if D % 16 == 0 else 0.6
        for causal in (False, True):
            base = _linear(*SIZES[near], near, causal=causal)
            row = _linear(B, H, D, causal=causal)
            yield Step("heads", f"D {D}", row, base, Target(part))
        if D in GATED_HEADS:
            plain = _linear(B, H, D, causal=True)
            scalar = dataclasses.replace(plain, decay="step")
            yield Step("heads", f"D {D}, scalar gate", scalar, plain, Target(0.85))
            channel = dataclasses.replace(plain, decay="channel")
            yield Step("heads", f"D {D}, channel gate", channel, _channel_base(), Target(0.7))


def _softmax() -> Iterator[Step]:
    base = Row("attention", B=2, H=16, T=4096, D=128, causal=True)
    same, option = Target(0.97), Target(1 / 1.25)

    def step(name: str, target: Target, **changed: Any) -> Step:
        row = dataclasses.replace(base, **changed)
        return Step("softmax", f"softmax, {name}", row, base, target)

    yield step("T 4123", same, T=4123)
    yield step("[B, H, T, D]", same, options=(("layout", "bhtd"),))
    yield step("float16", same, dtype="float16")
    yield step("soft cap", option, options=(("softcap", 30.0),))
    yield step("window of 1024", option, options=(("window", (1023, None)),))
    yield step("segments of 1024", option, documents=1024)
    yield step("lengths", option, lengths=True)
    yield step("group of 4", Target(1 / 1.25, "speed"), G=4)
    yield step("a bias [1, H, T, S]", Target(1 / 1.6), bias=True)
    yield step("a mask [B, 1, T, S]", option, mask=True)
    yield step("sinks", option, sinks=True)
    yield step("query offsets", option, offsets=True)
    yield step("dropout", Target(1 / 1.5), options=(("dropout_rate", 0.1),))
    yield step("with its normalizer", same, options=(("return_lse", True),))
    for D in (80, 96, 112, 160):
        yield step(f"D {D}", Target(1 / 1.3), D=D)


def _narrow(base: Row) -> Row:
    return dataclasses.replace(base, dtype=float8.FLOAT8)


def _float8() -> Iterator[Step]:
    """The plain calls, at the sizes of the base cases and at 65,536 rows, and their options, at the
    sizes at which other groups have these in bfloat16.
    """
    limit, speed = Target(0.85, "limit", speed=1.5), Target(1.25, "speed")
    by = next(iter(float8.PEERS))
    for causal in (False, True):
        target = Target(1.0) if causal else limit
        for D, (B, H) in SIZES.items():
            base = _linear(B, H, D, causal=causal)
            yield Step("float8", "float8 linear", _narrow(base), base, target)
        base = _linear(1, 8, 128, T=LONG, causal=causal)
        yield Step("float8", f"float8 linear, T {LONG}", _narrow(base), base, target, errors=True)
        for D, H in ((128, 16), (256, 8)):
            base = Row("attention", B=2, H=H, T=8192, D=D, causal=causal)
            peer = dataclasses.replace(_narrow(base), by=by)
            yield Step("float8", "float8 softmax", _narrow(base), base, speed, peer=peer)
        base = Row("attention", B=1, H=2, T=LONG, D=128, causal=causal)
        yield Step("float8", f"float8 softmax, T {LONG}", _narrow(base), base, speed, errors=True)
    yield from _float8_options()


# Options of softmax attention that are measured on float8 inputs, too.
SOFTMAX_IN_FLOAT8 = [
    f"softmax, {name}"
    for name in (
        *("T 4123", "soft cap", "window of 1024", "segments of 1024", "lengths", "group of 4"),
        "a bias [1, H, T, S]",
    )
]


def _float8_options() -> Iterator[Step]:
    for causal, name, changed in (
        (False, "T 16411", {"T": 16411}),
        (True, "T 16411", {"T": 16411}),
        (False, "lengths", {"lengths": True}),
        (False, "relu", _mapped("relu")),
        (True, "identity, not normalised", IDENTITY),
        (True, "segments of 1024", {"documents": 1024}),
        (True, "group of 4", {"G": SIZES[128][1] // 4}),
        (True, "scalar gate", {"decay": "step"}),
        (True, "channel gate", {"decay": "channel"}),
    ):
        plain = _linear(*SIZES[128], 128, causal=causal)
        base = dataclasses.replace(plain, **changed)
        row, errors = _narrow(base), changed == IDENTITY
        told = f"float8 linear, {name}"
        yield Step("float8", told, row, base, plain=_narrow(plain), errors=errors)
    for step in _softmax():
        if step.name in SOFTMAX_IN_FLOAT8:
            told, plain = f"float8 {step.name}", _narrow(step.base)
            yield Step("float8", told, _narrow(step.row), step.row, plain=plain)


DRAWN, SEED = 20, 2026
# The elements of q in a drawn row, at least and at most. The base cases have 2^26.
ELEMENTS = 2**24, 2**27
MOST_HEADS = 64


def _drawn_size(draw: random.Random) -> dict[str, Any] | None:
    """B, T, H, G and D; None where no number of heads gives as many elements as are wanted."""
    D = draw.choice((draw.randrange(24, 257), draw.randrange(24, 257, 8), 16 * draw.randint(2, 16)))
    B = round(2 ** draw.uniform(0, 6))
    T = round(math.exp(draw.uniform(math.log(100), math.log(200_000))))
    least, most = (elements / (B * T * D) for elements in ELEMENTS)
    heads = [H for H in range(1, MOST_HEADS + 1) if least <= H <= most]
    if not heads:
        return None
    H = draw.choice(heads)
    G = draw.choice([G for G in range(1, H + 1) if H % G == 0])
    return {"B": B, "T": T, "H": H, "G": None if G == H else G, "D": D}


def _drawn_options(draw: random.Random) -> dict[str, Any]:
    causal = draw.random() < 0.6
    gate = draw.choice((None, None, "head", "step", "channel")) if causal else None
    found: dict[str, Any] = {"causal": causal, "decay": gate}
    found["dtype"] = draw.choice(("bfloat16", "bfloat16", "bfloat16", "float16", "float32"))
    found["tf32"] = found["dtype"] == "float32" and draw.random() < 0.5
    found["documents"] = draw.choice((None, None, 1024))
    found["lengths"] = draw.random() < 0.25
    name = draw.choice(("elu1", "elu1", "relu", "exp", "silu"))
    if name != "elu1":
        found |= _mapped(name)
    return found


def _drawn() -> Iterator[Step]:
    """The seed draws the same rows each time. The median of their ratios is to be at least 0.6."""
    draw, sizes = random.Random(SEED), []
    while len(sizes) < DRAWN:
        if size := _drawn_size(draw):
            sizes.append(size | _drawn_options(draw))
    for size in sizes:
        row = Row("linear_attention", **size)
        near = 64 if row.D < 96 else 128
        base = _linear(*SIZES[near], near, causal=row.causal)
        told = str(row).removeprefix(f"{row.op} ")
        yield Step("drawn", f"drawn: {told}", row, base, Target(0.35))


def _all() -> Iterator[Step]:
    for D in SIZES:
        for causal in (False, True):
            yield from _options(D, causal)
        yield from _gates(D)
    yield from _heads()
    yield from _softmax()
    yield from _float8()
    yield from _drawn()


def _small(row: Row) -> Row:
    """The row with sizes for a CPU. An odd length stays odd."""
    T = min(64, max(16, row.T // 256)) + row.T % 2
    H = 4 if row.G else 2
    documents = 16 if row.documents else None
    G = 1 if row.G else None
    return dataclasses.replace(row, B=1, H=H, T=T, G=G, documents=documents)


def _once_each(steps: Iterable[Step]) -> Iterator[Step]:
    """Each option with the smaller of its base cases, since a CPU has no time for both."""
    seen = set()
    for step in sorted(steps, key=lambda step: step.base.D):
        option = step.group, step.name, step.row.causal
        if option not in seen:
            seen.add(option)
            given = {"row": step.row, "base": step.base, "plain": step.plain, "peer": step.peer}
            small = {name: row and _small(row) for name, row in given.items()}
            yield dataclasses.replace(step, **small)


def _sorted(steps: Iterable[Step]) -> tuple[Step, ...]:
    """By group, and in each those of one base case one after the other: a base case is compiled
    and compared once while its rows last.
    """
    return tuple(sorted(steps, key=lambda step: (GROUPS.index(step.group), str(step.base))))


STEPS: dict[str, tuple[Step, ...]] = {"gpu": _sorted(_all()), "cpu": _sorted(_once_each(_all()))}
