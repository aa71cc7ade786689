"""Softmax attention on Hopper by Pallas kernels lowered to Mosaic GPU.

`forward.py`, `gradient.py` and `bias_gradient.py` have the kernels and their mathematics,
`storage.py` and `gradient_storage.py` their roles and shared memory. `backward.py` launches those
of the gradients, and has what XLA computes around them.

    softmax.py, rest.py                     the softmax of rows; what rounding took from out
    gradient_pairs.py                       p and ds of a block of pairs
    visibility.py, segments.py, pairs.py,   the options: bounds and lengths, segments, bias and
    dropout.py                              mask, dropout
    rounds.py, schedule.py                  which items a block takes; the forward kernel's schedule
    rules.py                                which block sizes and launches a call gets
    float8.py, transposition.py, sums.py    arrays of 8 bits
    frame.py                                block sizes, and how heads lie in tiles

The kernels are built on the kit in `ato_jax/mosaic/`.
"""

from __future__ import annotations

from jax import lax

from ato_jax import device
from ato_jax.backend import Backend
from ato_jax.mosaic import HALF
from ato_jax.mosaic import refusal_of_device as unsupported_device
from ato_jax.ops.attention.mosaic_gpu import bias_gradient, frame, pairs
from ato_jax.ops.attention.mosaic_gpu import forward as kernel
from ato_jax.ops.attention.mosaic_gpu.backward import backward
from ato_jax.ops.attention.mosaic_gpu.frame import Config as Config
from ato_jax.ops.attention.mosaic_gpu.gradient_storage import passes
from ato_jax.ops.attention.mosaic_gpu.rules import default_config as default_config
from ato_jax.ops.attention.mosaic_gpu.rules import fits
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs


def unsupported(spec: AttentionSpec, phase: str) -> str | None:
    if spec.dtype not in ("bfloat16", "float16"):
        return f"takes bfloat16 and float16 alone, got {spec.dtype}"
    for name, width in (("D", spec.D), ("V", spec.V)):
        if width % frame.HEAD_MULTIPLE or width > frame.WIDEST_HEAD:
            return (
                f"needs {name} to be a multiple of {frame.HEAD_MULTIPLE} up to "
                f"{frame.WIDEST_HEAD}, got {width}"
            )
    ragged = spec.T % frame.ROWS_OF_A_TILE or spec.S % frame.ROWS_OF_A_TILE
    if ragged and (spec.D % HALF or spec.V % HALF):
        return (
            f"needs T and S to be multiples of {frame.ROWS_OF_A_TILE} where D or V is no multiple "
            f"of {HALF}, got T={spec.T}, S={spec.S}, D={spec.D}, V={spec.V}"
        )
    if spec.scale <= 0:
        return f"needs a positive scale, got {spec.scale}"
    config = default_config(spec, device.of_call(()))
    if lacking := pairs.unsupported(spec):
        return lacking
    if phase == "backward":
        return _no_gradients(spec, config)
    if not fits(spec, config):
        return f"has no room in shared memory for D={spec.D}, V={spec.V} with a bias or a mask"
    return None


def _no_gradients(spec: AttentionSpec, config: Config) -> str | None:
    has_room = all(of.fits for of in passes(spec, config))
    if spec.bias is not None and pairs.extent(spec.bias) == "pairs":
        has_room = has_room and bias_gradient.tiles_of(spec, config) is not None
    if not has_room:
        return f"has no room in shared memory for the gradients of D={spec.D}, V={spec.V}"
    return None


def beats_later_backends(
    spec: AttentionSpec, device: device.Device, backward_follows: bool
) -> bool:
    # On an H100, in us, and Triton's kernels: forward, B4 H16 T512 D128 causal 21 and 31; with
    # gradients, the same without a mask 105 and 120, B1 H2 T4096 D64 causal 117 and 140. Beside a
    # bias, a mask or dropout 0.5 to 0.77 of Triton's time, at B2 H16 T4096 D128 causal; but a
    # forward pass alone, not causal, with a bias over pairs 999 and 949.
    of_pairs = spec.bias is not None and pairs.extent(spec.bias) == "pairs"
    shortest, causal = min(spec.T, spec.S), spec.right == 0
    if shortest >= 512:
        return backward_follows or causal or not of_pairs
    # On an H200, in us, forward and with gradients, and Triton's kernels. D128 T128: B128 H16 69,
    # 342 and 102, 432; causal 70, 362 and 106, 423; B16 H8 6.5, 29 and 7.6, 29. T256: B64 H16 97,
    # 431 and 127, 572; causal 78, 411 and 131, 520. D64 T128: B128 H32 79, 474 and 91, 404; causal
    # 84, 425 and 72, 395. T256: B64 H32 109, 552 and 125, 549; causal 104, 519 and 128, 577; B8 H16
    # 9.5, 47 and 10.8, 42. From PyTorch a launch takes longer than calls of few rows, and those of
    # Triton's kernels less. Not measured are fewer queries or keys, few of one with many of the
    # other, and other options, but for both passes of D128 from 256 on.
    if spec.bias or spec.mask or spec.dropout_rate or spec.B * spec.H * spec.T < 32768:
        return False
    if (
        backward_follows
        and shortest >= 256
        and (spec.D, spec.V, spec.dtype) == (128, 128, "bfloat16")
    ):
        return True
    beside = spec.softcap or spec.segments or spec.left is not None
    if beside or spec.right not in (None, 0) or shortest < 128 or max(spec.T, spec.S) > 512:
        return False
    if spec.D > HALF:
        return True
    if shortest >= 256:
        return causal or not backward_follows
    return not causal and not backward_follows


def forward(spec: AttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    out, *by_row = kernel.forward(spec, config, inputs)
    axis = 1 if spec.layout == "bthd" else 2
    return Outputs(out, *(lax.slice_in_dim(one, 0, spec.T, axis=axis) for one in by_row))


class _MosaicGpu(Backend[AttentionSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)
    unsupported_device = staticmethod(unsupported_device)
    beats_later_backends = staticmethod(beats_later_backends)


BACKEND = _MosaicGpu()
