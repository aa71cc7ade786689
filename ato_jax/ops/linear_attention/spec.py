"""Linear attention: what one call is, its arrays, and the rules that every backend shares."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ato_jax import backend
from ato_jax.meshes import partition, sharded
from ato_jax.ops.linear_attention.features import FeatureMap


@dataclasses.dataclass(frozen=True)
class LinearAttentionSpec:
    """Everything static about one call.

    `F` is the feature size: D for an elementwise map. `decay` is None, "head" ([G]), "step"
    ([B,S,G]) or "channel" ([B,S,G,F]). `scale` is 1 where the output is normalised.
    """

    B: int
    T: int
    S: int
    H: int
    G: int
    D: int
    F: int
    V: int
    dtype: str
    feature_map: FeatureMap
    normalize: bool
    scale: float
    eps: float
    layout: str = "bthd"
    causal: bool = False
    decay: str | None = None
    offset: int | None = 0
    segments: str | None = None
    q_lengths: bool = False
    kv_lengths: bool = False
    initial_state: bool = False
    return_state: bool = False
    precision: str = "exact"

    def for_backward(self) -> LinearAttentionSpec:
        """The spec of a forward pass whose outputs a backward pass reads."""
        return self

    def traits(self) -> dict[str, Any]:
        """What block sizes may depend on."""
        return {
            "dtype": self.dtype,
            "D": self.D,
            "V": self.V,
            "causal": self.causal,
            "decay": self.decay or "none",
            "segments": self.segments or "none",
            "features": "elementwise" if self.feature_map.elementwise else "projected",
            "normalize": self.normalize,
            "precision": self.precision,
        }


class LinearState(NamedTuple):
    """What causal linear attention remembers of the keys it has seen: two float32 sums.

        kv    = sum_j phi(k_j) v_j^T
        k_sum = sum_j phi(k_j)

    Each key's term is multiplied by the decay since then; `scale` is not part of it, and padding
    adds nothing. F is the number of features: D for an elementwise feature map, `num_features` for
    `favor`. Gradients pass through a state, into a call and out of it.

    Attributes:
      kv: float32 [B, G, F, V].
      k_sum: float32 [B, G, F].

    Example:
      >>> import ato_jax, jax.numpy as jnp
      >>> q = k = v = jnp.ones((2, 16, 4, 8))
      >>> _, state = ato_jax.linear_attention(q, k, v, causal=True, return_state=True)
      >>> state.kv.shape, state.k_sum.shape
      ((2, 4, 8, 8), (2, 4, 8))
    """

    kv: jax.Array  # [B, G, F, V]
    k_sum: jax.Array  # [B, G, F]


class Inputs(NamedTuple):
    """The arrays of one call, q, k, v and per-step decays in `spec.layout`.

    Segments are canonical: a key's is the number of its run, counted from 0 and never
    decreasing along S; a query's is that of the run it may see, or -1 where there is none.
    Beyond the lengths they mean nothing.
    """

    q: jax.Array  # [B, T, H, D]
    k: jax.Array  # [B, S, G, D]
    v: jax.Array  # [B, S, G, V]
    decay: jax.Array | None = None  # [G] | [B, S, G] | [B, S, G, F] float32
    initial_state: LinearState | None = None
    feature_parameters: tuple[jax.Array, ...] = ()
    q_segments: jax.Array | None = None  # [B, T] int32
    kv_segments: jax.Array | None = None  # [B, S] int32
    q_lengths: jax.Array | None = None  # [B] int32
    kv_lengths: jax.Array | None = None  # [B] int32

    def partition_of_outputs(self, layout: str) -> Outputs:
        """`Outputs` of how each is sharded."""
        rows, keys = partition(self.q)[:3], partition(self.k)
        heads = keys[0], keys[layout.index("h")]
        state = LinearState(sharded(*heads, None, None), sharded(*heads, None))
        return Outputs(sharded(*rows, None), state)


class Outputs(NamedTuple):
    """Both always; the state's cotangent is zero unless `spec.return_state`.

    `state` is what `return_state` returns: initial state included, of the last segment. Where
    causal with T != S it is the state after the last key.
    """

    out: jax.Array  # [B, T, H, V], v's dtype
    state: LinearState

    def plain(self) -> Outputs:
        """Without what only a backward reads: all of it."""
        return self


Residuals = backend.Residuals[Inputs, Outputs]


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """What is static about one step, but for the arrays' shapes."""

    feature_map: FeatureMap
    normalize: bool
    scale: float
    eps: float


STATE_LETTERS: Any = LinearState("BGFV", "BGF")  # type: ignore[arg-type]


class StepInputs(NamedTuple):
    """The arrays of one step, bound and batched."""

    q: jax.Array  # [B, H, D]
    k: jax.Array  # [B, G, D]
    v: jax.Array  # [B, G, V]
    state: LinearState
    decay: jax.Array | None  # [B or 1, G, F or 1] float32
    feature_parameters: tuple[jax.Array, ...]

    def letters(self) -> Any:
        """The tree with each array replaced by the letters of its axes (`partitioning.py`)."""
        decay = None
        if self.decay is not None:
            batch = "B" if self.decay.shape[0] == len(self.q) else "."
            decay = batch + ("GF" if self.decay.shape[2] == self.state.kv.shape[2] else "G.")
        parameters = tuple("." * array.ndim for array in self.feature_parameters)
        return StepInputs("BHD", "BGD", "BGV", STATE_LETTERS, decay, parameters)  # type: ignore[arg-type]

    def partition_of_outputs(self) -> Any:
        """(out, state) with a `PartitionSpec` in place of each array."""
        heads = partition(self.k)[:2]
        state = LinearState(sharded(*heads, None, None), sharded(*heads, None))
        return sharded(*partition(self.q)[:2], None), state


def positions_of_first_query(spec: LinearAttentionSpec, inputs: Inputs) -> jax.Array:
    """The position of query 0 among the keys, [B] int32: aligned so that the last meet."""
    if spec.offset is not None:
        return jnp.full((spec.B,), spec.offset, jnp.int32)
    q_lengths = jnp.int32(spec.T) if inputs.q_lengths is None else inputs.q_lengths
    kv_lengths = jnp.int32(spec.S) if inputs.kv_lengths is None else inputs.kv_lengths
    return jnp.broadcast_to(kv_lengths - q_lengths, (spec.B,))
