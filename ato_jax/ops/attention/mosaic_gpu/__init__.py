"""Softmax attention on Hopper by Pallas kernels lowered to Mosaic GPU.

`forward.py`, `gradient.py` and `bias_gradient.py` have the kernels and their mathematics,
`storage.py` and `gradient_storage.py` their roles and shared memory. `backward.py` launches those
of the gradients, and has what XLA computes around them.

    softmax.py, rest.py                     the softmax of rows; what rounding took from out
    gradient_pairs.py                       p and ds of a block of pairs
    visibility.py, segments.py, pairs.py,   the options: bounds and lengths, segments, bias and
    dropout.py                              mask, dropout
    rounds.py, schedule.py                  which items a block takes; the forward kernel's schedule
    float8.py, transposition.py, sums.py    arrays of 8 bits
    frame.py                                block sizes, and how heads lie in tiles

The kernels are built on the kit in `ato_jax/mosaic/`.
"""

from __future__ import annotations

import dataclasses
import functools

from jax import lax

from ato_jax import device
from ato_jax.backend import Backend
from ato_jax.mosaic import HALF
from ato_jax.mosaic import refusal_of_device as unsupported_device
from ato_jax.ops.attention.eight_bits import reads_eight_bits
from ato_jax.ops.attention.mosaic_gpu import bias_gradient, frame, pairs
from ato_jax.ops.attention.mosaic_gpu import forward as kernel
from ato_jax.ops.attention.mosaic_gpu.backward import backward
from ato_jax.ops.attention.mosaic_gpu.frame import Config as Config
from ato_jax.ops.attention.mosaic_gpu.gradient_storage import ROWS, passes
from ato_jax.ops.attention.spec import (
    AttentionSpec,
    Inputs,
    Outputs,
    sums_by_query,
)


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
    if not _fits(spec, config):
        return f"has no room in shared memory for D={spec.D}, V={spec.V} with a bias or a mask"
    return None


def _no_gradients(spec: AttentionSpec, config: Config) -> str | None:
    fits = all(of.fits for of in passes(spec, config))
    if spec.bias is not None and pairs.extent(spec.bias) == "pairs":
        fits = fits and bias_gradient.tiles_of(spec, config) is not None
    if not fits:
        return f"has no room in shared memory for the gradients of D={spec.D}, V={spec.V}"
    return None


def _fits(spec: AttentionSpec, config: Config) -> bool:
    own = frame.shared_bytes(spec, config) + pairs.most_bytes(spec, pairs.block_of(config))
    return own <= frame.MOST_BYTES


def default_config(spec: AttentionSpec, device: device.Device) -> Config:
    widest = max(spec.D, spec.V)
    two_planes = spec.bias is not None and spec.mask is not None
    # With the options that are not plain the kernel for dq spills 60 to 540 bytes at D = 128, if a
    # step has 128 keys. Nor were persistent launches and other tiles measured with them.
    lengths = spec.q_lengths or spec.kv_lengths
    plain = spec.left is None and spec.softcap is None and not (spec.segments or lengths)
    plain = plain and spec.bias is None and spec.mask is None and not spec.dropout_rate
    plain = plain and not sums_by_query(spec)
    fill = functools.partial(_filling, device.multiprocessors)
    most, most_of_gradients = _most_consumers(spec, plain), 3 if widest <= 64 else 2
    consumers = fill(most, spec.T, spec.B * spec.H)
    dq_consumers = fill(most_of_gradients, spec.T, spec.B * spec.H)
    dkv_consumers = fill(most_of_gradients, spec.S, spec.B * spec.G)
    ahead = plain and _pays_to_load_ahead(spec)
    gradients_ahead = plain and _pays_to_load_gradients_ahead(spec)
    few_keys = two_planes or (widest > 128 and not reads_eight_bits(spec))
    keys = 64 if few_keys else 128
    sets_aside = reads_eight_bits(spec) and spec.S > frame.MOST_KEYS_OF_SUMS
    config = Config(
        consumers=consumers,
        rows=64,
        keys=keys,
        stages=2,
        turns=consumers > 1,
        persistent=ahead,
        own_outputs=ahead,
        multiprocessors=device.multiprocessors,
        dkv_consumers=dkv_consumers,
        dq_consumers=dq_consumers,
        dq_keys=128 if 64 < widest <= 128 and plain else 64,
        dq_hold=widest > 64,
        dq_turns=widest > 128 and dq_consumers > 1,
        dkv_persistent=gradients_ahead,
        dq_persistent=gradients_ahead,
        steps_of_sums=frame.MOST_KEYS_OF_SUMS // keys if sets_aside else 0,
    )
    return config if _fits(spec, config) else dataclasses.replace(config, stages=1)


def _most_consumers(spec: AttentionSpec, plain: bool) -> int:
    """The most warpgroups that multiply in a block of the forward kernel. With three, a tile has
    192 queries: more of a short sequence's last tile is empty, and the kernel spills what a
    backward pass needs."""
    if max(spec.D, spec.V) > 64:
        return 2
    if spec.right is not None:
        few = spec.S <= (4096 if spec.keep_rest else 1024)
    else:
        few = spec.S <= (1024 if spec.keep_rest else 256)
    return 2 if plain and few and not reads_eight_bits(spec) else 3


def _pays_to_load_ahead(spec: AttentionSpec) -> bool:
    """Whether a block of the forward kernel takes several tiles. Behind a causal mask tiles see
    unlike numbers of keys, and persistent blocks, whose tiles are fixed beforehand, get unlike
    amounts of work: there this pays for short sequences alone."""
    widest = max(spec.D, spec.V)
    if reads_eight_bits(spec) or widest > 128:
        return False
    return spec.right is None or spec.S <= (512 if widest > 64 else 1024)


def _pays_to_load_gradients_ahead(spec: AttentionSpec) -> bool:
    """Whether a block of the backward kernels takes several tiles, for the same reasons."""
    widest = max(spec.D, spec.V)
    if widest <= 64:
        return False  # not measured
    if spec.right is None:
        return min(spec.T, spec.S) >= 256
    return widest <= 128 and 256 < min(spec.T, spec.S) <= 512


def _filling(multiprocessors: int, most: int, rows: int, heads: int) -> int:
    """The fewest warpgroups of 64 rows in a block with which all blocks run at once, or `most`."""
    for count in range(1, most):
        if -(-rows // (count * ROWS)) * heads <= multiprocessors:
            return count
    return most


def beats_later_backends(
    spec: AttentionSpec, device: device.Device, backward_follows: bool
) -> bool:
    # On an H100, in us, and Triton's kernels: forward, B4 H16 T512 D128 causal 21 and 31; with
    # gradients, the same without a mask 105 and 120, B1 H2 T4096 D64 causal 117 and 140. Beside a
    # bias, a mask or dropout 0.5 to 0.77 of Triton's time, at B2 H16 T4096 D128 causal; but a
    # forward pass alone, not causal, with a bias over pairs 999 and 949. Fewer queries or keys are
    # not measured.
    of_pairs = spec.bias is not None and pairs.extent(spec.bias) == "pairs"
    is_ahead = backward_follows or spec.right == 0 or not of_pairs
    return min(spec.T, spec.S) >= 512 and is_ahead


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
