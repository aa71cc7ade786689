"""The delta rule on Hopper by Pallas kernels lowered to Mosaic GPU.

Forward, two kernels, built on the kit in `ato_jax/mosaic/`: `solve.py` for the part of each chunk
of 64 steps that no state enters, all chunks at once, and `walk_forward.py`, which carries the state
from chunk to chunk. Between them, in global memory, are 18 KB for each chunk of a value head.
Backward, two more: `walk_backward.py`, which carries the state's gradient back, and `gradient.py`
for the gradients of each chunk's rows, all chunks at once; and with decays `corrections.py`, which
mostly finds that it has nothing to do. `walk.py` has what both walks share,
`frame.py` the sizes, `steps.py` the numbers of each step. Few long sequences are walked in pieces
(`pieces.py`), after a walk for the pieces' maps.

`solve.py` forms k k^T for each value head, also where heads share keys.

The kernels know neither segments nor lengths, and blocks of 64 columns alone: `fits.py` rewrites
other calls.

A decay per channel has kernels of its own for the same four parts, which take pieces likewise:
`channel.py` says how pairs are decayed, `channel_backward.py` launches them.
"""

from __future__ import annotations

from ato_jax.backend import Backend
from ato_jax.device import Device
from ato_jax.mosaic import HALF
from ato_jax.mosaic import refusal_of_device as unsupported_device
from ato_jax.ops.delta_rule.mosaic_gpu import backward as gradients
from ato_jax.ops.delta_rule.mosaic_gpu import channel_backward, fits, frame, steps
from ato_jax.ops.delta_rule.mosaic_gpu.frame import Config as Config
from ato_jax.ops.delta_rule.mosaic_gpu.solve import solve_chunks
from ato_jax.ops.delta_rule.mosaic_gpu.walk_forward import walk_forward
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec, Inputs, Outputs, Residuals


def unsupported(spec: DeltaRuleSpec, phase: str) -> str | None:
    if spec.dtype != "bfloat16":
        return f"takes bfloat16 alone, got {spec.dtype}"
    if spec.D > frame.WIDEST_KEY:
        return f"needs D to be at most {frame.WIDEST_KEY}, got {spec.D}"
    return None


def default_config(spec: DeltaRuleSpec, device: Device) -> Config:
    """The walk has one slice of v's columns a block as long as all blocks then run at once, and
    else two, which share what they read of q, k and the chunk's matrices. Where there are few,
    sequences are walked in as many pieces as run at once; two would take as long as one."""
    slices = fits.up_to_half(spec.V) // HALF
    blocks = spec.B * spec.H * slices
    together = slices % 2 == 0 and blocks > device.multiprocessors
    pieces = min(
        device.multiprocessors // blocks,
        frame.chunks_of(spec) // frame.LEAST_CHUNKS,
        frame.MOST_PIECES,
    )
    return Config(
        slices=2 if together else 1,
        solve_blocks=device.multiprocessors,
        pieces=pieces if pieces > 2 else 1,
    )


def forward(spec: DeltaRuleSpec, config: Config, inputs: Inputs) -> Outputs:
    if (fitted := fits.fitted(spec)) != spec:
        found = forward(fitted, config, fits.fitted_inputs(spec, inputs))
        return fits.users_outputs(spec, found)
    if spec.decay == "channel":
        return channel_backward.forward(spec, config, inputs)
    solved = solve_chunks(spec, config, inputs.k, steps.given_of(spec, inputs))
    return walk_forward(spec, config, inputs, solved).outputs


def forward_for_own_backward(
    spec: DeltaRuleSpec, config: Config, inputs: Inputs
) -> gradients.Kept | channel_backward.Kept:
    """The outputs have the sizes of `spec`. What is kept beside them has the fitted call's."""
    if (fitted := fits.fitted(spec)) != spec:
        found = forward_for_own_backward(fitted, config, fits.fitted_inputs(spec, inputs))
        return found._replace(**fits.users_outputs(spec, found.plain())._asdict())
    if spec.decay == "channel":
        return channel_backward.keep(spec, config, inputs)
    return gradients.keep(spec, config, inputs)


def backward(
    spec: DeltaRuleSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    if (fitted := fits.fitted(spec)) != spec:

        def run(inputs: Inputs, cotangents: Outputs) -> Inputs:
            return backward(fitted, config, Residuals(inputs, residuals.outputs), cotangents)

        return fits.gradients(spec, run, residuals.inputs, cotangents)
    if spec.decay == "channel":
        return channel_backward.backward(spec, config, residuals, cotangents)
    return gradients.backward(spec, config, residuals, cotangents)


class _MosaicGpu(Backend[DeltaRuleSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    forward_for_own_backward = staticmethod(forward_for_own_backward)
    backward = staticmethod(backward)
    unsupported_device = staticmethod(unsupported_device)


BACKEND = _MosaicGpu()
