"""The walk over chunks, with the state in registers.

For each head and 64 of v's columns, chunk by chunk, with X and P of `solve.py`, and L_t the sum of
log2 decays from the chunk's first step to t:

    r_t = v_t - exp2(L_t) k_t S
    u   = X r
    out = scale * (exp2(L_t) q_t S + P u)
    S'  = exp2(L_C) S + sum_t k_t^T exp2(L_C - L_t) u_t         for the chunk's last step C

All of it is transposed: S^T [64, D], r^T, u^T and out^T [64, 64] have v's columns as rows. They are
results of products and first factors of the next ones, which both lie in registers, so nothing but
the rows of out goes through shared memory. Each is multiplied in two parts of bfloat16.

    MEMORY (n)     loads q, k, v, X, P and the numbers of a chunk's steps
      |  chunks: loaded; consumed once S' is known
      v
    STATE (0 .. n - 1)    64 columns of v each: the products of a chunk, one after the other

    symbol      shape       what it is
    q, k        [64, D]     a chunk's rows, in blocks of 64 columns
    v, out      [64, 64]    a chunk's rows, 64 of their columns
    X, P        [64, 64]    matrices of the chunk, in two parts each
    S           [D, 64]     the state, in registers [64, 64] for each block of D
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import mosaic
from ato_jax.mosaic import BF16, F32, HALF, OF_COLUMNS, Array, Buffer, Item, Ring, Role, load
from ato_jax.ops.delta_rule.mosaic_gpu import frame
from ato_jax.ops.delta_rule.mosaic_gpu.frame import C, Config
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec, Inputs, Outputs

MEMORY = Role("memory", registers=mosaic.MEMORY_REGISTERS)


@functools.cache
def state_role(slices: int) -> Role:
    return Role("state", mosaic.workers_registers(slices, frame.MOST_REGISTERS), slices)


@dataclasses.dataclass(frozen=True)
class Storage(mosaic.Storage):
    q: Array  # [stages, D / 64, 64, 64]
    k: Array  # as q
    v: Array  # [stages, n, 64, 64]
    matrices: Array  # [stages, MATRICES, 64, 64]
    numbers: Array  # [stages, NUMBERS, 64] float32
    out: Array  # [n, 64, 64]
    chunks: Ring


def storage_of(spec: DeltaRuleSpec, config: Config) -> Storage:
    stages, slices, blocks = config.stages, config.slices, frame.blocks_of_key(spec)
    tiling = frame.tiling(spec)
    q, k = (Buffer(tiling.of_rows(stages, blocks, C, HALF), copies=blocks) for _ in range(2))
    v = Buffer(tiling.of_rows(stages, slices, C, HALF), copies=slices)
    matrices = Buffer(tiling.shared(stages, frame.MATRICES, C, C), copies=frame.MATRICES)
    numbers = Buffer(frame.numbers_in_memory(stages))
    return Storage(
        q=q,
        k=k,
        v=v,
        matrices=matrices,
        numbers=numbers,
        out=Buffer(tiling.of_rows(slices, C, HALF)),
        chunks=Ring.of(stages, (q, k, v, matrices, numbers), (state_role(slices),)),
    )


@dataclasses.dataclass(frozen=True)
class Walk:
    """The call, the blocks' work, the arrays in global memory, and the storage of a block."""

    spec: DeltaRuleSpec
    config: Config
    deal: mosaic.Deal
    own: Storage
    q: Any
    k: Any
    v: Any
    matrices: Any
    numbers: Any
    initial_state: Any = None  # [B, H, V, D]
    out: Any = None
    state: Any = None  # [B, H, V, D]

    def place(self, item: Item) -> tuple[Any, Any]:
        """The head, and the first of the item's blocks of v's columns."""
        count = _parts_of_head(self.spec, self.config)
        return lax.div(item.head, count), lax.rem(item.head, count) * self.config.slices


def _parts_of_head(spec: DeltaRuleSpec, config: Config) -> int:
    """How many blocks share a head."""
    return spec.V // (HALF * config.slices)


def walk_chunks(
    spec: DeltaRuleSpec,
    config: Config,
    inputs: Inputs,
    numbers: jax.Array,
    matrices: jax.Array,
) -> Outputs:
    heads = spec.H * _parts_of_head(spec, config)
    rows = mosaic.whole_chunks(spec.T)
    deal = mosaic.Deal(spec.B, heads, spec.T, rows, pieces=1, most_blocks=spec.B * heads)
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    given |= {"matrices": matrices, "numbers": numbers}
    if inputs.initial_state is not None:
        given["initial_state"] = jnp.swapaxes(inputs.initial_state, 2, 3)

    def bind(refs: Sequence[Any], own: Storage) -> Walk:
        named = dict(zip([*given, "out", "state"], refs, strict=True))
        return Walk(spec, config, deal, own, **named)

    role = state_role(config.slices)
    parts = (MEMORY, memory), (role, carry)
    program = mosaic.Program(
        mosaic.Roles((role, MEMORY)), storage_of(spec, config), parts, bind
    )
    out, state = mosaic.launch(
        frame.name_of("walk"),
        program,
        deal,
        (
            jax.ShapeDtypeStruct(inputs.v.shape, inputs.v.dtype),
            jax.ShapeDtypeStruct((spec.B, spec.H, spec.V, spec.D), F32),
        ),
        tuple(given.values()),
    )
    return Outputs(out, jnp.swapaxes(state, 2, 3))


def memory(walk: Walk) -> None:
    """Loads chunks as slots come free."""
    steps = walk.deal.each(functools.partial(load_item, walk))
    walk.own.chunks.drain(steps)


def load_item(walk: Walk, item: Item) -> None:
    own, spec, tiling = walk.own, walk.spec, frame.tiling(walk.spec)
    head, first = walk.place(item)
    key_head = lax.div(head, jnp.int32(spec.H // spec.G))

    def load_chunk(chunk: Any, _: None) -> None:
        step, rows = item.before + chunk, item.rows(chunk)
        slot = own.chunks.slot(step)
        own.chunks.acquire(step)
        barrier = own.chunks.produced.at[slot]
        for ref, tiles in ((walk.k, own.k), (walk.q, own.q)):
            for block in range(frame.blocks_of_key(spec)):
                source = tiling.part(ref, item, rows, key_head, block)  # [64, 64]
                plgpu.copy_gmem_to_smem(source, mosaic.for_copy(tiles.at[slot, block]), barrier)
        for number in range(walk.config.slices):
            source = tiling.part(walk.v, item, rows, head, first + number)  # [64, 64]
            plgpu.copy_gmem_to_smem(source, mosaic.for_copy(own.v.at[slot, number]), barrier)
        at = item.batch, head, chunk
        for matrix in range(frame.MATRICES):
            source = walk.matrices.at[(*at, matrix)]  # [64, 64]
            plgpu.copy_gmem_to_smem(source, own.matrices.at[slot, matrix], barrier)
        plgpu.copy_gmem_to_smem(walk.numbers.at[at], own.numbers.at[slot], barrier)

    lax.fori_loop(0, item.chunks, load_chunk, None)


def carry(walk: Walk) -> None:
    """Carries 64 columns of the state from chunk to chunk."""
    walk.deal.each(functools.partial(carry_item, walk))
    plgpu.wait_smem_to_gmem(0)


def carry_item(walk: Walk, item: Item) -> None:
    number, blocks = mosaic.group(), frame.blocks_of_key(walk.spec)
    head, first = walk.place(item)
    columns = pl.ds((first + number) * HALF, HALF)
    places = [
        (item.batch, head, columns, pl.ds(block * HALF, HALF)) for block in range(blocks)
    ]
    S = [mosaic.zeros(HALF, HALF) for _ in range(blocks)]
    if walk.initial_state is not None:
        S = [load(walk.initial_state.at[place], optimized=False) for place in places]
    one = functools.partial(multiply_chunk, walk, item, number)
    S = lax.fori_loop(0, item.chunks, one, S)
    for place, block in zip(places, S, strict=True):
        mosaic.store_in_memory(walk.state.at[place], block)


def multiply_chunk(
    walk: Walk, item: Item, number: Any, chunk: Any, S: list[jax.Array]
) -> list[jax.Array]:
    """Stores the chunk's rows of out; returns S'."""
    own, spec = walk.own, walk.spec
    slot = own.chunks.slot(item.before + chunk)
    own.chunks.produced.wait(slot)
    q, k = ([tiles.at[slot, n] for n in range(len(S))] for tiles in (own.q, own.k))
    solved, pairs = (
        tuple(own.matrices.at[slot, first + part].T for part in range(2))
        for first in (frame.SOLVED, frame.PAIRS)
    )
    numbers = Numbers(spec, own.numbers.at[slot])
    parts = [frame.in_two_parts(block) for block in S]

    def read(rows: list[Any]) -> tuple[jax.Array, list[tuple[Any, Any]]]:
        """(rows S)^T."""
        blocks = zip(parts, rows, strict=True)
        return mosaic.zeros(HALF, C), [(part, b.T) for own, b in blocks for part in own]

    recalled, out = mosaic.multiply(read(k), read(q))
    v = mosaic.load_transposed(own.v.at[slot, number]).astype(F32)
    r = frame.in_two_parts(v - numbers.times(recalled, numbers.of_recalled()))
    (u,) = mosaic.multiply((mosaic.zeros(HALF, C), frame.products(r, solved)))
    written = frame.in_two_parts(numbers.times(u, numbers.of_written()))
    kept = numbers.kept()
    out, *S = mosaic.multiply(
        (
            numbers.times(out, numbers.of_read()),
            frame.products(frame.in_two_parts(u), pairs),
        ),
        *(
            (block if kept is None else block * kept, [(part, b) for part in written])
            for block, b in zip(S, k, strict=True)
        ),
    )
    out = out * mosaic.in_rows(load(numbers.ref.at[frame.OF_QUERIES], OF_COLUMNS), HALF)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    mosaic.store_transposed(own.out.at[number], out.astype(BF16))
    plgpu.commit_smem()  # also what was read of the slot, ahead of the load that overwrites it
    own.chunks.consumed.arrive(slot)
    head, first = walk.place(item)
    tiling = frame.tiling(spec)
    target = tiling.part(walk.out, item, item.rows(chunk), head, first + number)
    plgpu.copy_smem_to_gmem(mosaic.for_copy(own.out.at[number]), target)
    return S


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The factors of a chunk's steps, made of `ref` [NUMBERS, 64]. A method returns None where all
    its factors are 1."""

    spec: DeltaRuleSpec
    ref: Any

    def _log_decay(self) -> jax.Array:
        return load(self.ref.at[frame.LOG_DECAY], OF_COLUMNS)

    def _last(self) -> Any:
        return self.ref[frame.LOG_DECAY, C - 1]

    def _with_keys(self, factor: jax.Array | None) -> jax.Array | None:
        if not self.spec.normalize_qk:
            return factor
        of_keys = load(self.ref.at[frame.OF_KEYS], OF_COLUMNS)
        return of_keys if factor is None else factor * of_keys

    def of_read(self) -> jax.Array | None:
        """[64]: the decay from the chunk's start to each step."""
        return None if self.spec.decay is None else jnp.exp2(self._log_decay())

    def of_recalled(self) -> jax.Array | None:
        """[64]: `of_read`, times the factor of the key."""
        return self._with_keys(self.of_read())

    def of_written(self) -> jax.Array | None:
        """[64]: the decay from each step to the chunk's end, times the factor of the key."""
        if self.spec.decay is None:
            return self._with_keys(None)
        return self._with_keys(jnp.exp2(self._last() - self._log_decay()))

    def kept(self) -> Any:
        """The decay over the whole chunk, a scalar."""
        return None if self.spec.decay is None else jnp.exp2(self._last())

    def times(self, x: jax.Array, factor: jax.Array | None) -> jax.Array:
        """x^T [64, 64] with each step, a column, times its factor."""
        return x if factor is None else x * mosaic.in_rows(factor, x.shape[0])
