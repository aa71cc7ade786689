"""The delta rule in plain JAX: every option, time and memory linear in T, any derivative.

The sequence is cut into chunks of 32 or 64 steps. What no state enters, among it the inverse of a
triangular system, is computed for all chunks of a piece at once; then `lax.scan` carries the state
from chunk to chunk (`chunk.py` has the mathematics), and the queries of all chunks read the states
that it left. An outer scan goes from piece to piece. For
the derivative it keeps the states before each piece, and `jax.checkpoint` recomputes a piece's
arrays instead of storing them.

On a CPU a step costs no launch. There, calls with small states go step by step where no derivative
is taken (`Config.by_steps`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ato_jax import autodiff, programs
from ato_jax.backend import Backend
from ato_jax.device import Device
from ato_jax.meshes import varying_with
from ato_jax.ops.delta_rule import recurrence
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec, Inputs, Outputs, Residuals
from ato_jax.ops.delta_rule.xla.chunk import Steps, open_chunk, read, walk

# The most elements of v in a piece where there are many chunks to keep a device busy.
PIECE_SIZE = 1 << 22
# Elements of one state: up to here a CPU's products of 32 steps gain little.
NARROW_STATE = 1 << 12
# The most elements of all states that go step by step: with a decay per step, which costs a chunk
# little, with one per channel where they are not narrow, and narrow ones otherwise. At 256 KiB XLA
# (JAX 0.10.2) cuts each step among threads, which took up to twice as long.
STATES_BY_STEPS = 3 << 14
CHANNEL_STATES_BY_STEPS = 5 << 14
NARROW_STATES_BY_STEPS = 1 << 18


@dataclasses.dataclass(frozen=True)
class Config:
    """Powers of two.

    Attributes:
      chunk: steps of a chunk.
      piece: the most chunks of a piece.
      by_steps: whether a forward pass whose derivative is not taken goes step by step.
    """

    chunk: int
    piece: int
    by_steps: bool = False


def unsupported(spec: DeltaRuleSpec, phase: str) -> str | None:
    return None


def default_config(spec: DeltaRuleSpec, device: Device) -> Config:
    """On CPUs a piece has one chunk, whose arrays stay in the caches.

    With gradients, pieces of 4 chunks took 1.1 times as long, and of 16 chunks 1.7 times. Chunks
    of 32 steps took 0.7 to 1.1 times as long as chunks of 64, forward and with gradients.
    """
    if device.platform == "cpu":
        return Config(chunk=32, piece=1, by_steps=is_faster_by_steps(spec))
    row = spec.B * spec.H * 64 * max(spec.D, spec.V)
    return Config(chunk=64, piece=power_of_two(max(1, PIECE_SIZE // max(1, row))))


def is_faster_by_steps(spec: DeltaRuleSpec) -> bool:
    """Whether a CPU's forward pass is, by the times in docs/notes/delta_rule.md."""
    states = spec.B * spec.H * spec.D * spec.V
    narrow = spec.D * spec.V <= NARROW_STATE
    if spec.decay == "step":
        return narrow and states <= STATES_BY_STEPS
    if narrow:
        return states <= NARROW_STATES_BY_STEPS
    return spec.decay == "channel" and states <= CHANNEL_STATES_BY_STEPS


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def cut(spec: DeltaRuleSpec, config: Config, inputs: Inputs) -> tuple[Steps, int]:
    """The arrays in pieces [pieces, B, steps, heads, ...], and the steps of a chunk."""
    # Not 1: `vmap` of a custom derivative whose result is a constant fails.
    chunk = min(config.chunk, power_of_two(max(spec.T, 2)))
    piece = chunk * min(config.piece, power_of_two(-(-spec.T // chunk)))
    tail = -spec.T % piece

    def pieces(array: Any, mode: str = "constant") -> Any:
        """Cuts an array [B, T, ...] into pieces. It is padded with steps of zeros, which leave the
        state as it is."""
        if array is None:
            return None
        array = jnp.pad(array, ((0, 0), (0, tail), *((0, 0),) * (array.ndim - 2)), mode=mode)
        return jnp.moveaxis(array.reshape(spec.B, -1, piece, *array.shape[2:]), 1, 0)

    arrays = inputs[:5]
    if spec.layout == "bhtd":
        arrays = jax.tree.map(lambda array: jnp.swapaxes(array, 1, 2), arrays)
    q, k, v, beta, decay = (pieces(array) for array in arrays)
    real = run = None
    if inputs.lengths is not None:
        real = pieces(jnp.arange(spec.T, dtype=jnp.int32) < inputs.lengths[:, None])
    if inputs.segments is not None:
        run = pieces(inputs.segments, "edge")  # [pieces, B, steps]
        before = jnp.pad(run[:-1, :, -1:], ((1, 0), (0, 0), (0, 0)))
        run = jnp.concatenate([before, run], axis=-1)
    return Steps(q, k, v, beta, decay, real, run), chunk


def open_piece(spec: DeltaRuleSpec, chunk: int, piece: Steps) -> Steps:
    """[B, steps, heads, ...] -> [B * chunks, G, ...] and the axes of `Steps`."""
    group = spec.H // spec.G

    def chunks(array: jax.Array, heads: int) -> jax.Array:
        """[B * chunks, heads, C, ...]."""
        return jnp.swapaxes(array.reshape(-1, chunk, heads, *array.shape[3:]), 1, 2)

    def groups(array: Any, group: int) -> Any:
        """[B * chunks, G, R, C, ...]."""
        if array is None:
            return None
        array = chunks(array, spec.H)
        return array.reshape(len(array), -1, group, *array.shape[2:])

    q, k = (chunks(array, spec.G) for array in (piece.q, piece.k))
    if spec.decay == "channel":
        # In float32, in which the gradients of a group's heads are then added up.
        dtype = jnp.promote_types(q.dtype, jnp.float32)
        q, k = (jnp.repeat(array.astype(dtype), group, axis=1) for array in (q, k))
        group = 1
    v, beta, decay = (groups(array, group) for array in (piece.v, piece.beta, piece.decay))
    real, run = piece.real, piece.run
    if real is not None:
        real = real.reshape(-1, chunk)
    if run is not None:
        first = jnp.arange(0, run.shape[1] - 1, chunk, dtype=jnp.int32)[:, None]
        run = run[:, first + jnp.arange(1 + chunk, dtype=jnp.int32)].reshape(-1, 1 + chunk)
    return Steps(q, k, v, beta, decay, real, run)


OVER_HEADS = Steps(q=0, k=0, v=0, beta=0, decay=0, real=None, run=None)


def forward(spec: DeltaRuleSpec, config: Config, inputs: Inputs) -> Outputs:
    return (_by_steps if config.by_steps else _by_chunks)(spec, config, inputs)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _by_steps(spec: DeltaRuleSpec, config: Config, inputs: Inputs) -> Outputs:
    return recurrence.forward(spec, inputs)


@programs.promoting_ranks  # JAX calls it outside of `programs.jit`
def _by_steps_jvp(spec: DeltaRuleSpec, config: Config, primals: Any, tangents: Any) -> Any:
    """The outputs by chunks, and their derivative by the inputs whose tangents are not zero."""
    leaves, structure = jax.tree.flatten(primals)
    given = {
        index: tangent
        for index, tangent in enumerate(jax.tree.leaves(tangents))
        if not isinstance(tangent, SymbolicZero)
    }

    def of_given(arrays: dict[int, jax.Array]) -> Outputs:
        merged = [arrays.get(index, leaf) for index, leaf in enumerate(leaves)]
        return _by_chunks(spec, config, *jax.tree.unflatten(structure, merged))

    return jax.jvp(of_given, ({index: leaves[index] for index in given},), (given,))


_by_steps.defjvp(_by_steps_jvp, symbolic_zeros=True)


def _by_chunks(spec: DeltaRuleSpec, config: Config, inputs: Inputs) -> Outputs:
    pieces, chunk = cut(spec, config, inputs)
    given = inputs.q.dtype
    dtype = jnp.promote_types(given, jnp.float32)
    open_chunks = functools.partial(open_chunk, spec)
    for axes in (OVER_HEADS, 0):  # heads; batch entries and chunks
        open_chunks = jax.vmap(open_chunks, (axes,))
    walk_on = jax.vmap(jax.vmap(functools.partial(walk, spec)))
    read_all = jax.vmap(jax.vmap(jax.vmap(functools.partial(read, spec))))

    def attend(state: jax.Array, piece: Steps) -> tuple[jax.Array, jax.Array]:
        """The state after a piece, and out [B, steps, H, V]."""
        chunks = jax.tree.map(
            lambda array: jnp.swapaxes(array.reshape(spec.B, -1, *array.shape[1:]), 0, 1),
            open_chunks(open_piece(spec, chunk, piece)),
        )
        state, walked = jax.lax.scan(walk_on, state, chunks)
        out = read_all(chunks, walked)  # [chunks, B, G, R, C, V]
        out = jnp.moveaxis(out.astype(given), (1, 4), (0, 2))
        return state, out.reshape(spec.B, -1, spec.H, spec.V)

    state: Any = inputs.initial_state
    if state is None:
        state = jnp.zeros((spec.B, spec.H, spec.D, spec.V), dtype)
    heads = spec.H if spec.decay == "channel" else spec.G
    state = state.astype(dtype).reshape(spec.B, heads, -1, spec.D, spec.V)
    state = varying_with(state, pieces)
    state, out = jax.lax.scan(jax.checkpoint(attend, prevent_cse=False), state, pieces)
    out = jnp.moveaxis(out, 0, 1).reshape(spec.B, -1, spec.H, spec.V)[:, : spec.T]
    if inputs.lengths is not None:
        real = jnp.arange(spec.T, dtype=jnp.int32) < inputs.lengths[:, None]
        out = jnp.where(real[..., None, None], out, 0)
    out = jnp.swapaxes(out, 1, 2) if spec.layout == "bhtd" else out
    return Outputs(out, state.reshape(spec.B, spec.H, spec.D, spec.V))


def backward(
    spec: DeltaRuleSpec, config: Config, residuals: Residuals, cotangents: Outputs
) -> Inputs:
    return autodiff.gradient(functools.partial(forward, spec, config), residuals.inputs, cotangents)


class _Xla(Backend[DeltaRuleSpec, Config, Inputs, Outputs]):
    unsupported = staticmethod(unsupported)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)
    backward = staticmethod(backward)


BACKEND = _Xla()
