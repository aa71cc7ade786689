"""Linear attention by large products, for large states (`large_states.py`): D or V above 256 in
bfloat16, which no kernel holds, and above 128 in float16 and TF32, which Hopper's kernels refuse.

The products are einsums of bfloat16 or TF32 operands, which XLA hands to the card's library or
compiles itself. Between them are elementwise passes, which XLA fuses. With 512 columns a
product over all rows and heads takes as long as the bytes of its operands, so what counts is how
few passes there are. `whole.py` is for calls where every query sees every key, `causal.py` cuts the
rows into chunks, to which `gates.py` adds decays and segments. Both say their gradients: those that
JAX would derive multiply float32 arrays.

Its name is "xla.products". `implementation="xla"` does not take it, since its derivative is of
first order and reverse mode alone.
"""

from __future__ import annotations

import dataclasses

from ato_jax import programs
from ato_jax.backend import Backend
from ato_jax.device import Device
from ato_jax.ops.linear_attention import fits
from ato_jax.ops.linear_attention.large_states import unsupported as unsupported
from ato_jax.ops.linear_attention.spec import Inputs, LinearAttentionSpec, Outputs, Residuals
from ato_jax.ops.linear_attention.xla.products import causal, whole

# Rows of a chunk, by the largest number of columns: a row has C pairs and shares a state of F * V
# with C rows, which is the same where C is the root of F * V. 512 steps of the strongest decay are
# what float32 adds exactly in the parts that `gates.py` makes of decays.
SMALL_CHUNK, CHUNK = 256, 512
ALIGNED = 8  # columns
# The most chunks of a segment: their states are added up one after another, which the program says
# for each of them.
MOST_CHUNKS = 32
# The most elements of an array of a segment, on which all passes are done before the next one: what
# lies between them takes about twenty such arrays.
SEGMENT_SIZE = 1 << 23


@dataclasses.dataclass(frozen=True)
class Config:
    """Where causal.

    Attributes:
      chunk: rows whose pairs are multiplied.
      chunks: the most chunks of a segment.
    """

    chunk: int
    chunks: int


def default_config(spec: LinearAttentionSpec, device: Device) -> Config:
    columns = max(spec.F, spec.V)
    chunk = SMALL_CHUNK if columns <= SMALL_CHUNK else CHUNK
    fit = SEGMENT_SIZE // max(1, spec.B * spec.H * chunk * columns)
    return Config(chunk, min(MOST_CHUNKS, max(1, fit)))


def _fit(spec: LinearAttentionSpec) -> fits.Fit | None:
    """The call with columns of whole words of 16 bytes, which products by tensor cores read; None
    where it has them, or no x has a feature of 0."""
    D, V = (fits.up(size, ALIGNED) for size in (spec.D, spec.V))
    fit = fits.Fit((fits.Padded(spec, dataclasses.replace(spec, D=D, F=D, V=V)),))
    return fit if fit.spec != spec and fits.fills(fit) else None


@programs.promoting_ranks
def forward(spec: LinearAttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    if fit := _fit(spec):
        return fit.outputs(forward(fit.spec, config, fit.inputs(inputs)))
    if spec.causal:
        return causal.forward(spec, config.chunk, config.chunks, inputs)
    return whole.forward(spec, inputs)


@programs.promoting_ranks
def backward(
    spec: LinearAttentionSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    if fit := _fit(spec):
        kept = fit.given(residuals.outputs)

        def run(given: Inputs, cotangents: Outputs) -> Inputs:
            return backward(fit.spec, config, Residuals(given, kept), cotangents)

        return fit.gradients(run, residuals.inputs, cotangents)
    if spec.causal:
        return causal.backward(spec, config.chunk, config.chunks, residuals, cotangents)
    return whole.backward(spec, residuals, cotangents)


class _Products(Backend[LinearAttentionSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)


BACKEND = _Products()
