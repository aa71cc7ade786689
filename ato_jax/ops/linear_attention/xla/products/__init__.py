"""Linear attention by large products, for calls that kernels serve badly or not at all, by
`large_states.py`: in bfloat16 D or V above 256, in the other dtypes also smaller ones.

The products are einsums of bfloat16, TF32 or float32 operands, which XLA hands to the card's
library or compiles itself. Between them are elementwise passes, which XLA fuses. With 512 columns a
product over all rows and heads takes as long as the bytes of its operands, so what counts is how
few passes there are. `whole.py` is for calls where every query sees every key. `walk.py` is for
causal ones and for those with a decay or segments, which `gates.py` describes; `chunks.py` cuts
their rows into chunks. `channel_walk.py`, with `channel_states.py` and `channels.py`, is for a
decay per step and channel, with states of any size. All say their gradients: those that JAX would
derive multiply float32 arrays.

Its name is "xla.products". `implementation="xla"` does not take it: that name stands for every
derivative, and a derivative of its own has no forward mode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ato_jax import programs
from ato_jax.backend import Backend
from ato_jax.device import Device
from ato_jax.ops.linear_attention import fits
from ato_jax.ops.linear_attention.large_states import unsupported as unsupported
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, Outputs, Residuals
from ato_jax.ops.linear_attention.xla.products import channel_walk, walk, whole

# Rows of a chunk: the larger of F and V, so that a row has about as many pairs as its part of the
# chunk's state. 512 steps of the strongest decay are what float32 adds exactly in the parts that
# `gates.py` makes of decays.
LEAST_CHUNK, MOST_CHUNK = 64, 512
ALIGNED = 8  # columns
# The most chunks of a segment: their states are added up one after another, which the program says
# for each of them.
MOST_CHUNKS = 32
# With a decay per step and channel: powers of two, where a chunk of more than 64 rows takes more
# passes over q and k, and fewer over states. The states of chunks are added up in groups.
MOST_GATED_CHUNK, MOST_GATED_CHUNKS = 256, 64
LEAST_CHUNKS = 8
# The most elements of an array of a segment, on which all passes are done before the next one. Up
# to twenty such arrays exist at a time, so more takes memory, and fewer takes more launches.
SEGMENT_SIZE = 1 << 23
# In this JAX and older ones, XLA for CPUs ends some programs with a decay per channel by a
# segmentation fault: four of the 34 tests of `tests/test_channel_products.py`. All of them pass on
# JAX 0.12.0.1.
LAST_JAX_TO_CRASH = (0, 10, 2)


@dataclasses.dataclass(frozen=True)
class Config:
    """How `walk.py` cuts a call; `whole.py` does not.

    Attributes:
      chunk: rows whose pairs are multiplied.
      chunks: the most chunks of a segment.
      batch: the most batch entries that are done before the next ones.
    """

    chunk: int
    chunks: int
    batch: int


def default_config(spec: LinearAttentionSpec, device: Device) -> Config:
    columns = fits.up(max(spec.F, spec.V), LEAST_CHUNK)
    chunk, most = min(columns, MOST_CHUNK), MOST_CHUNKS
    if spec.decay == "channel":
        chunk, most = MOST_GATED_CHUNK, MOST_GATED_CHUNKS
        while chunk > LEAST_CHUNK and 3 * chunk > 2 * max(spec.F, spec.V):
            chunk //= 2
    fit = max(1, SEGMENT_SIZE // (spec.H * chunk * columns))
    # All rows of few entries rather than some of many: a single segment takes fewer passes.
    chunks = min(fit, -(-spec.T // chunk), most)
    if spec.decay == "channel" and chunks * chunk < spec.T and fit >= LEAST_CHUNKS * spec.B:
        # Several segments in any case: then taking entries apart would only copy them.
        return Config(chunk, min(fit // spec.B, most), spec.B)
    parts = max(1, -(-spec.B // (fit // chunks)))
    return Config(chunk, chunks, max(1, -(-spec.B // parts)))


def _in_batches(
    spec: LinearAttentionSpec, config: Config, run: Callable[..., Any], inputs: Inputs, *more: Any
) -> Any:
    """Runs `config.batch` batch entries at a time. All entries share a decay per head, whose
    gradients are added up."""
    shared = inputs.decay if spec.decay == "head" else None
    if shared is not None:
        inputs = inputs._replace(decay=None)

    def part(trees: Any) -> Any:
        inputs, *more = trees
        if shared is not None:
            inputs = inputs._replace(decay=shared)
        found = run(dataclasses.replace(spec, B=len(inputs.q)), inputs, *more)
        if isinstance(found, Inputs) and shared is not None:
            assert found.decay is not None
            found = found._replace(decay=found.decay[None])
        return found

    count, rest = divmod(spec.B, config.batch)
    trees = (inputs, *more)
    if count == 1 and not rest:
        found = part(trees)
    else:
        whole = jax.tree.map(
            lambda x: x[: spec.B - rest].reshape(count, config.batch, *x.shape[1:]), trees
        )
        found = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(part, whole))
        if rest:
            last = part(jax.tree.map(lambda x: x[spec.B - rest :], trees))
            found = jax.tree.map(lambda *parts: jnp.concatenate(parts), found, last)
    if isinstance(found, Inputs) and shared is not None:
        assert found.decay is not None
        found = found._replace(decay=jnp.sum(found.decay, axis=0))
    return found


def _fit(spec: LinearAttentionSpec) -> fits.Fit | None:
    """The call with columns of whole words of 16 bytes, which products by tensor cores read; None
    where it has them, or no x has a feature of 0."""
    D, V = (fits.up(size, ALIGNED) for size in (spec.D, spec.V))
    fit = fits.Fit((fits.Padded(spec, dataclasses.replace(spec, D=D, F=D, V=V)),))
    return fit if fit.spec != spec and fits.fills(fit) else None


def _walk(spec: LinearAttentionSpec) -> Any:
    return channel_walk if spec.decay == "channel" else walk


def _refuse_old_compilers(spec: LinearAttentionSpec) -> None:
    if spec.decay != "channel" or jax.__version_info__ > LAST_JAX_TO_CRASH:
        return
    if jax.default_backend() == "cpu":
        raise NotImplementedError(
            "implementation='xla.products' with a decay per channel needs a JAX after "
            f"{'.'.join(map(str, LAST_JAX_TO_CRASH))} on a CPU, got {jax.__version__}; "
            "implementation='xla' takes the call"
        )


def _in_chunks(spec: LinearAttentionSpec) -> bool:
    return bool(spec.causal or spec.decay or spec.segments)


@programs.promoting_ranks
def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    _refuse_old_compilers(spec)
    if fit := _fit(spec):
        return fit.outputs(forward(fit.spec, config, fit.inputs(inputs)))
    if not _in_chunks(spec):
        return whole.forward(spec, inputs)

    def run(spec: LinearAttentionSpec, inputs: Inputs) -> Outputs:
        return _walk(spec).forward(spec, config.chunk, config.chunks, inputs)

    found: Outputs = _in_batches(spec, config, run, inputs)
    return found


@programs.promoting_ranks
def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    _refuse_old_compilers(spec)
    if fit := _fit(spec):
        kept = fit.given(residuals.outputs)

        def fitted(given: Inputs, cotangents: Outputs) -> Inputs:
            return backward(fit.spec, config, Residuals(given, kept), cotangents)

        return fit.gradients(fitted, residuals.inputs, cotangents)
    if not _in_chunks(spec):
        return whole.backward(spec, residuals, cotangents)

    def run(spec: LinearAttentionSpec, inputs: Inputs, cotangents: Outputs) -> Inputs:
        return _walk(spec).backward(spec, config.chunk, config.chunks, inputs, cotangents)

    found: Inputs = _in_batches(spec, config, run, residuals.inputs, cotangents)
    return found


class _Products(Backend[LinearAttentionSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)


BACKEND = _Products()
