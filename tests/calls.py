"""Random calls of both ops for hypothesis: every option alone and in combination.

A call is drawn as a few plain facts and a seed, so that a failing one prints short.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import ato_jax
from ato_jax.choosing import PHASES
from ato_jax.ops.attention import api as attention_api
from ato_jax.ops.linear_attention import api as linear_attention_api
from ato_jax.ops.linear_attention.features import Favor
from tests import numerics

# B, T, S, H, G, D, V: square, more keys and more queries.
SIZES = ((2, 19, 19, 4, 2, 4, 3), (2, 6, 21, 2, 2, 5, 2), (1, 21, 6, 3, 1, 1, 2))
DTYPES = ("bfloat16", "float16", "float32")


def arrays(*sizes: int, dtype: str = "float32", magnitude: float = 1.0) -> list[jax.Array]:
    """q, k and v, the same ones for the same sizes."""
    B, T, S, H, G, D, V = sizes
    draw = np.random.default_rng(0)
    shapes = ((B, T, H, D), (B, S, G, D), (B, S, G, V))
    return [jnp.asarray(magnitude * draw.normal(size=shape), dtype) for shape in shapes]


def run(op: str, implementation: str, *qkv: Any, **options: Any) -> dict[str, numerics.Measure]:
    """The public function against the oracle."""
    wanted = numerics.oracle(op, *qkv, **options)
    with ato_jax.interpret():
        result = numerics.run(op, implementation, *qkv, cotangents=wanted.cotangents, **options)
    return numerics.compare(result, wanted)


@dataclasses.dataclass
class Call:
    """One call's facts; `arguments` makes its arrays, q and k of positive numbers if `positive`."""

    op: str
    sizes: tuple[int, ...]
    dtype: str
    magnitude: float
    seed: int
    layout: str = "bthd"
    batched: bool = True
    poisoned: bool = False
    positive: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    arrays: dict[str, str] = dataclasses.field(default_factory=dict)

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """q, k, v and the options. NaN fills what lies beyond the lengths if `poisoned`."""
        B, T, S, H, G, D, V = self.sizes
        draw = np.random.default_rng(self.seed)
        options = dict(self.options) | {"layout": self.layout}

        def normal(*shape: int) -> np.ndarray:
            return draw.normal(size=shape)

        shapes = {"q": (B, T, H, D), "k": (B, S, G, D), "v": (B, S, G, V)}
        timed = {name: self.magnitude * normal(*shape) for name, shape in shapes.items()}
        if self.positive:
            timed |= {name: np.abs(timed[name]) for name in ("q", "k")}
        feature_map = options.get("feature_map")
        features = len(feature_map.projection) if isinstance(feature_map, Favor) else D
        for name, kind in self.arrays.items():
            if name == "decay":
                shape = {"head": (G,), "step": (B, S, G), "channel": (B, S, G, features)}[kind]
                decay = -np.abs(normal(*shape))
                # Strong, total and no decay, a few of each.
                for value, share in ((-50.0, 0.05), (-np.inf, 0.03), (0.0, 0.1)):
                    decay[draw.uniform(size=shape) < share] = value
                if kind == "head":
                    options["decay"] = jnp.asarray(decay, jnp.float32)
                else:
                    timed["decay"] = decay
            elif name == "initial_state":
                sums = draw.uniform(0.2, 1.0, size=(B, G, features, V + 1))
                options["initial_state"] = ato_jax.LinearState(
                    jnp.asarray(sums[..., :V], jnp.float32), jnp.asarray(sums[..., V], jnp.float32)
                )
            elif name in ("q_lengths", "kv_lengths"):
                options[name] = draw.integers(0, 1 + (T if name == "q_lengths" else S), size=B)
            elif name == "segment_ids":
                options["segment_ids"] = self._ids(draw, B, T)
            elif name == "q_segment_ids":
                options["q_segment_ids"] = self._ids(draw, B, T)
                options["kv_segment_ids"] = self._ids(draw, B, S)
            elif name in ("bias", "mask"):
                full = [B, H, T, S]
                shape = tuple(
                    size if axis in kind else 1 for axis, size in zip("BHTS", full, strict=True)
                )
                if name == "mask":
                    options["mask"] = draw.uniform(size=shape) < 0.7
                else:
                    bias = normal(*shape)
                    bias[draw.uniform(size=shape) < 0.1] = -np.inf
                    options["bias"] = jnp.asarray(bias, self.dtype)
            elif name == "sinks":
                options["sinks"] = jnp.asarray(normal(H), self.dtype)
            elif name == "query_offset":
                options["query_offset"] = draw.integers(-3, S, size=B)
            elif name == "dropout_key":
                options["dropout_key"] = jax.random.key(self.seed)
        if self.poisoned:
            self._poison(timed, options)
        for name, array in timed.items():
            array = np.swapaxes(array, 1, 2) if self.layout == "bhtd" else array
            dtype = jnp.float32 if name == "decay" else self.dtype
            timed[name] = jnp.asarray(array, dtype)
        if not self.batched:
            timed = {name: array[0] for name, array in timed.items()}
            for name in ("initial_state", "segment_ids", "q_segment_ids", "kv_segment_ids"):
                if name in options:
                    options[name] = jax.tree.map(lambda array: array[0], options[name])
        if "decay" in timed:
            options["decay"] = timed.pop("decay")
        return [timed["q"], timed["k"], timed["v"]], options

    @staticmethod
    def _ids(draw: np.random.Generator, batch: int, size: int) -> np.ndarray:
        """Runs of ids, some of which return."""
        ends = draw.uniform(size=(batch, size)) < 0.25
        return np.asarray(draw.integers(0, 3, size=(batch, size)) * ends).cumsum(1) % 4

    def _poison(self, timed: dict[str, np.ndarray], options: dict[str, Any]) -> None:
        _, T, S, *_ = self.sizes
        lengths = {"q": options.get("q_lengths"), "k": options.get("kv_lengths")}
        if T == S:
            given = lengths["q"] if lengths["q"] is not None else lengths["k"]
            lengths = {
                side: given if length is None else length for side, length in lengths.items()
            }
        for name, array in timed.items():
            length = lengths["q" if name == "q" else "k"]
            if length is not None:
                for b, end in enumerate(length):
                    array[b, end:] = np.nan


def check(call: Call, implementation: str, config: dict[str, int]) -> None:
    """One backend, both phases with these block sizes, against the oracle."""
    arguments, options = call.arguments()
    wanted = numerics.oracle(call.op, *arguments, **options)
    result = numerics.run_backends(
        implementation, implementation, wanted, forward_config=config, backward_config=config
    )
    numerics.compare(result, wanted)


def for_triton(call: Call) -> Call:
    """The call without those options that the Triton kernels do not support."""
    if call.op == "attention":
        api: Any = attention_api
    else:
        api = linear_attention_api
    while True:
        arguments, options = call.arguments()
        request = api.prepare(*arguments, **options)
        backend = api.OP.backend("triton")
        if all(backend.unsupported(request.spec, phase) is None for phase in PHASES):
            return call
        if call.arrays.get("decay") == "channel":
            call.arrays["decay"] = "step"
            continue
        assert call.arrays or call.options, "nothing is left to leave out"
        (call.arrays or call.options).popitem()
        call.options.pop("dropout_rate", None)
        call.arrays.pop("dropout_key", None)
        call.poisoned = call.poisoned and any("lengths" in name for name in call.arrays)


@st.composite
def _common(draw: Any, op: str, sizes: tuple[tuple[int, ...], ...]) -> Call:
    call = Call(
        op,
        draw(st.sampled_from(sizes)),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from((1.0, 1.0, 1.0, 0.01, 30.0))),
        draw(st.integers(0, 999)),
        layout=draw(st.sampled_from(("bthd", "bhtd"))),
    )
    call.batched = call.sizes[0] > 1 or draw(st.booleans())
    square = call.sizes[1] == call.sizes[2]
    segments = (None, None, "q_segment_ids") + (("segment_ids",) if square else ())
    chosen = draw(st.sampled_from(segments))
    if chosen:
        call.arrays[chosen] = "runs"
    for name in ("q_lengths", "kv_lengths"):
        if draw(st.sampled_from((False, False, True))):
            call.arrays[name] = "drawn"
            call.poisoned = draw(st.booleans())
    if draw(st.booleans()):
        call.options["causal"] = True
    return call


@st.composite
def linear_attention(draw: Any, sizes: Any = SIZES) -> Call:
    call = draw(_common("linear_attention", sizes))
    square = call.sizes[1] == call.sizes[2]
    causal = call.options.get("causal", False)
    call.options["feature_map"] = draw(
        st.sampled_from(("elu1", "relu", "exp", "softplus", "identity", "silu", "relu2"))
    )
    if call.options["feature_map"] == "exp":
        call.magnitude = min(call.magnitude, 1.0)
    if square or causal:
        kind = draw(st.sampled_from((None, "head", "step", "channel")))
        if kind:
            call.arrays["decay"] = kind
    if square or not causal:
        if draw(st.booleans()):
            call.arrays["initial_state"] = "drawn"
        call.options["return_state"] = draw(st.booleans())
    if draw(st.sampled_from((False, False, True))):
        call.options["normalize"] = False
    if call.options["feature_map"] in ("identity", "silu") or "normalize" in call.options:
        # The sums themselves come out: they leave float16's range long before float32's.
        call.magnitude = min(call.magnitude, 1.0)
        if draw(st.booleans()):
            call.options["scale"] = 0.7
    else:
        call.options["eps"] = draw(st.sampled_from((1e-6, 0.5)))
    return call


@st.composite
def attention(draw: Any, sizes: Any = SIZES) -> Call:
    call = draw(_common("attention", sizes))
    some = st.sampled_from((False, False, True))
    if call.dtype == "float32":
        # Scores in the thousands carry errors of 1e-4 into exp, and a few rows say by luck how many
        # times the ideal's: a larger array tells (test_scale).
        call.magnitude = min(call.magnitude, 1.0)
    if draw(some):
        bound = st.sampled_from((None, 0, 2, 7))
        call.options["window"] = (draw(bound), draw(bound))
    offset = draw(st.sampled_from((None, None, 0, 5, "array")))
    if offset == "array":
        call.arrays["query_offset"] = "drawn"
    elif offset is not None:
        call.options["query_offset"] = offset
    axes = st.sampled_from(("BHTS", "TS", "HT", "BS", "H", ""))
    for name in ("bias", "mask"):
        if draw(some):
            call.arrays[name] = draw(axes)
    if draw(some):
        call.options["softcap"] = 1.5
    if draw(some):
        call.arrays["sinks"] = "drawn"
    if draw(some):
        call.options["scale"] = 0.7
    if draw(some):
        call.options["dropout_rate"] = 0.3
        call.arrays["dropout_key"] = "drawn"
    call.options["return_lse"] = draw(st.booleans())
    return call
