"""Block sizes: what they are, and a table of them by regime.

A regime says what the kernels hold in registers and in shared memory:

    kind      one       all queries see all keys: one state
              both      both ways with a decay or segments: a stored state on either side of a chunk
              causal    causal without a decay; decayed: with one per head or step
              channel   causal with a decay per step and channel; prepared: its features are decayed
                        beforehand (`prepared/`), and most kernels are those without a decay
    dtype     of q, k and v
    state     small up to 64 x 64, parts where it is stored and no program holds it as a whole, else
              large
    features  long beyond 128 columns
    memory    roomy from Hopper's shared memory on, tight from an A100's on, else small

The size of a state [V, F] weighs most, as its float32 accumulators fill the registers. Up to 64 x
64, 4 warps hold them beside tiles of 64 rows, the height at which Hopper's WGMMA takes over, and
several programs run on a multiprocessor at once. At 128 x 128 a pass with sums of its own takes 8
warps and most of a multiprocessor. float32 factors, and float16's wide ones, take up to three times
the room, which leaves tiles of 32 or 16 rows. Measured on an H200 in bfloat16
(docs/notes/linear_attention.md); float16 in tiles of 64 rows wherever these leave the registers.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ato_jax.device import Device
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec
from ato_jax.ops.linear_attention.triton.calls import (
    LARGEST_STATE,
    SMALL_STATE,
    in_parts,
    is_prepared,
    one_state,
    state_size,
)
from ato_jax.triton.tiles import padded

# Bytes of shared memory that one block may use on a Hopper card.
HOPPER_SHARED_MEMORY = 227 * 1024
# And on an A100, for which the table's tight tiles are.
A100_SHARED_MEMORY = 163 * 1024
LONG_FEATURES = 128
# A program writes so many columns of V at once where states are stored and it holds none.
LARGEST_STORED = 256
# Beside 128 x 128 elements of a state kernels in float32 and float16 take up to 160 KiB, beside
# half as many at most 98: on small memory V is cut for them.
HALF_STATE = LARGEST_STATE // 2
# A program walks along at most so many rows, whose state it carries.
PIECE_ROWS = 4096
# Where a multiprocessor has fewer rows than this, one program walks them all: on an H200 causal
# T 4096 (B8 H8 D64) took 0.111 ms with pieces of 128 rows and 0.075 with 2048, forward + backward
# 0.331 and 0.233.
ENOUGH_PIECE_ROWS = 2048


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows per tile, warps and pipeline stages of each pass, and how its work is cut.

    `state_*` is the pass that sums over the keys, `output_*` the one that writes out, `dq_*` and
    `dkv_*` are the two passes of the backward. Its blocks are dealt to `*_programs` programs; where
    `*_rows` is not 0, each program covers that many rows instead. `dq_delayed`: the pass for dq
    adds each block's terms to its sums when it is at the next block.

    Causal calls whose programs carry a state walk along at most `piece_rows` rows each, and fewer
    where the grid would otherwise have less than `programs`. Where `run_rows` (in the backward
    `backward_run_rows`) is not 0, a state is stored for every run of that many rows instead. All
    blocks then divide a run, each program takes at most `pair_block` rows of the other side at a
    time, and V is cut into blocks of `stored_columns`, or of what a program that holds a state
    takes, whichever is more.

    Where factors are wider than bfloat16, a program holds at most `wide_state` elements of a state.
    """

    piece_rows: int
    programs: int
    run_rows: int
    backward_run_rows: int
    pair_block: int
    stored_columns: int
    wide_state: int
    state_block: int
    state_warps: int
    state_stages: int
    state_programs: int
    output_block: int
    output_warps: int
    output_stages: int
    output_programs: int
    output_rows: int
    dq_block: int
    dq_warps: int
    dq_stages: int
    dq_programs: int
    dq_delayed: bool
    dkv_block: int
    dkv_warps: int
    dkv_stages: int
    dkv_programs: int
    dkv_rows: int


class Facts(NamedTuple):
    """The facts that decide on the regime of a call."""

    kind: str
    dtype: str
    state: str
    features: str
    memory: str


class Tile(NamedTuple):
    block: int
    warps: int
    stages: int


class Regime(NamedTuple):
    """Tiles of the four passes for the calls whose facts are among the first five fields' words;
    ANY goes with every fact. `runs` are the rows of stored runs, forward and backward."""

    kinds: str
    dtypes: str
    states: str
    features: str
    memory: str
    state: tuple[int, int, int]
    output: tuple[int, int, int]
    dq: tuple[int, int, int]
    dkv: tuple[int, int, int]
    runs: tuple[int, int] = (0, 0)
    pair_block: int = 32
    delayed: bool = False

    def covers(self, facts: Facts) -> bool:
        wanted = (self.kinds, self.dtypes, self.states, self.features, self.memory)
        return all(
            words == ANY or fact in words.split()
            for words, fact in zip(wanted, facts, strict=True)
        )


ANY = "*"
BF16, F16, F32 = "bfloat16", "float16", "float32"
W1, W2, W3, W4 = ((64, 4, stages) for stages in (1, 2, 3, 4))  # a tile of 64 rows and 4 warps

# fmt: off
# The first regime that covers a call is its own. Tiles are (rows, warps, stages).
REGIMES = (
    # -- what does not fit the 99 KiB of sm_86, sm_89 and sm_120 by the rows of larger memories
    Regime("decayed", BF16, "small", "long", "small", W2, W2, W2, W1, (0, 128)),
    Regime("decayed", "float16 float32", "small", "long", "small",
           (32, 4, 2), (16, 8, 2), (16, 8, 2), (16, 8, 1), (0, 64), 16),
    Regime("channel", BF16, "small", "long", "tight small",
           (32, 4, 2), (16, 4, 2), (16, 8, 2), (16, 8, 2)),
    Regime("both", BF16, "large", "long", "small", (64, 8, 2), (64, 8, 2), (64, 8, 2), (32, 8, 2)),
    # -- bfloat16, small states
    Regime("one both", BF16, "small", "short", "roomy", W4, W4, W3, W3),
    Regime("one both", BF16, "small", "short", "tight small", W3, W4, W2, W2),
    Regime("causal", BF16, "small", "short", "roomy", W3, W3, W2, W3),
    # The gradient of a decay needs stored states, also where the forward carries them.
    Regime("decayed", BF16, "small", "short", "roomy", W3, W3, W2, W1, (0, 128)),
    Regime("decayed", BF16, "small", ANY, ANY, W3, W2, W2, W1, (0, 128)),
    # Decayed factors lie beside the plain ones, and a walk that goes on holds two of each.
    Regime("channel", BF16, "small", ANY, ANY, W3, W2, (32, 4, 2), (32, 4, 2)),
    Regime(ANY, BF16, "small", ANY, ANY, W3, W2, W2, W2),
    # -- bfloat16, large states: causal ones are stored for every run, and small programs read them
    Regime("one", BF16, "large", "short", "roomy",
           (128, 8, 3), W3, (64, 8, 3), W4, delayed=True),
    Regime("one", BF16, "large", "short", "tight small", (64, 8, 2), W3, (32, 8, 2), W2),
    Regime("one", BF16, "large", "long", ANY, (64, 8, 2), W2, (32, 8, 2), W2),
    Regime("both", BF16, "large", "short", "roomy",
           (128, 8, 3), (64, 8, 3), (64, 8, 2), (64, 8, 3), delayed=True),
    Regime("both", BF16, "large", "short", "tight small",
           (64, 8, 2), (64, 8, 3), (64, 8, 2), (64, 8, 2)),
    Regime("both", BF16, "large", "long", ANY, (64, 8, 2), (64, 8, 2), (64, 8, 2), (64, 8, 2)),
    # Features that are mapped already go from memory straight to the products: three stages.
    Regime("prepared", BF16, "large", "short", "roomy", W3, W3, W3, W1, (128, 128)),
    Regime("prepared", BF16, "large", "short", "tight small", W3, W3, W2, W1, (128, 128)),
    Regime("causal decayed", BF16, "large", "short", "roomy", W3, W1, W3, W1, (128, 128)),
    Regime("causal", BF16, "large", "short", "tight small", W3, W1, W2, W1, (128, 128)),
    # Rows of 256 features: tiles of 32 rows spill twice what those of 128 features do.
    Regime("causal", BF16, "large", "long", ANY,
           (64, 8, 2), W1, (32, 8, 2), (32, 8, 1), (128, 128)),
    Regime("decayed", BF16, "large", "long", "roomy",
           (64, 8, 2), W1, (32, 8, 2), (32, 8, 1), (128, 128)),
    Regime("decayed", BF16, "large", "short", "tight small",
           (64, 8, 2), (32, 8, 2), (32, 8, 2), (32, 8, 1), (0, 128)),
    Regime("decayed", BF16, "large", "long", "tight small",
           (64, 8, 2), (16, 8, 2), (16, 8, 2), (16, 8, 1), (0, 128), 16),
    Regime("channel", BF16, "large", ANY, ANY, (64, 8, 2), (16, 4, 3), (16, 8, 2), (16, 8, 2)),
    # -- bfloat16, states in parts: two accumulators [64, 256] of float32 take 128 registers of each
    # thread of 8 warps. Causal outputs take 4, as products of no more columns than these hold go
    # one after the other.
    Regime("both", BF16, "parts", "short", "roomy",
           (128, 4, 3), (64, 8, 3), (64, 8, 2), (64, 8, 2), pair_block=64, delayed=True),
    Regime("both", BF16, "parts", "long", "roomy",
           W3, (64, 8, 2), (64, 8, 2), (64, 8, 2), pair_block=64),
    Regime("causal decayed", BF16, "parts", "short", "roomy",
           W3, W2, (64, 8, 3), (64, 8, 1), (128, 128)),
    Regime("causal decayed", BF16, "parts", "long", "roomy",
           W3, W2, (64, 8, 2), (64, 8, 1), (128, 128)),
    # -- float16: where TF32 factors leave room for tiles of 64 rows, nothing else was as fast.
    # Ampere's tensor cores read all factors from registers: tall tiles beside a large state spill
    # nearly all that they hold there, and a loop that loads ahead overflows the shared memory.
    Regime("one", F16, "small", "short", ANY, W3, W3, W2, W2),
    Regime("one", F16, "large", "short", "roomy", (64, 8, 2), W3, (32, 8, 2), (64, 8, 2)),
    Regime("causal", F16, "small", "short", ANY, W3, W3, W1, W1, (64, 64), 64),
    Regime("causal", F16, "large", "short", "roomy",
           (64, 8, 2), W1, (64, 8, 1), (32, 8, 1), (128, 128)),
    Regime("causal", F16, "large", "short", "tight small",
           (64, 8, 2), (32, 8, 1), (64, 8, 1), (32, 8, 1), (128, 128)),
    Regime("decayed", F16, "small", "short", ANY, W3, W2, (32, 8, 2), (32, 8, 1), (0, 64)),
    Regime("decayed", F16, "large", "short", ANY,
           (32, 8, 2), (32, 8, 2), (32, 8, 2), (32, 8, 1), (0, 128)),
    Regime("both", F16, "large", "short", "tight small",
           (32, 8, 2), (32, 8, 2), (32, 8, 2), (32, 8, 1)),
    Regime(ANY, F16, "large", "short", ANY, (32, 8, 2), (32, 8, 2), (32, 8, 2), (32, 8, 2)),
    # -- float32, and float16's long rows
    Regime("decayed", F32, "small", "short", ANY,
           (32, 4, 3), (32, 8, 2), (32, 8, 2), (32, 8, 1), (0, 64)),
    Regime("decayed", ANY, "small", ANY, ANY,
           (32, 4, 3), (16, 8, 2), (16, 8, 2), (16, 8, 1), (0, 64), 16),
    Regime("decayed", ANY, "large", ANY, ANY,
           (32, 8, 2), (16, 8, 2), (16, 8, 2), (16, 8, 1), (0, 128), 16),
    Regime(ANY, ANY, "small", "short", ANY, (32, 4, 3), (32, 8, 2), (32, 8, 2), (32, 8, 2)),
    Regime(ANY, ANY, "small", "long", ANY, (32, 4, 3), (16, 8, 2), (16, 8, 2), (16, 8, 2)),
    Regime(ANY, ANY, "large", ANY, ANY, (32, 8, 2), (16, 8, 2), (16, 8, 2), (16, 8, 2)),
)
# fmt: on


class Places(NamedTuple):
    """How many programs of each pass run on a multiprocessor at once, and rows that a program
    covers where it streams past a finished state; 0: as the programs are dealt."""

    walk: int
    state: int
    output: int
    dq: int
    dkv: int
    output_rows: int
    dkv_rows: int


BESIDE_SMALL_STATES = Places(8, 2, 2, 2, 1, 256, 128)
BESIDE_LARGE_STATES = Places(2, 1, 2, 1, 1, 0, 0)


def is_small(spec: LinearAttentionSpec) -> bool:
    return state_size(spec) <= SMALL_STATE


def _kind(spec: LinearAttentionSpec) -> str:
    if spec.decay == "channel":
        return "prepared" if is_prepared(spec) else "channel"
    if spec.causal:
        return "causal" if spec.decay is None else "decayed"
    return "one" if one_state(spec) else "both"


def _memory(device: Device) -> str:
    if device.shared_memory >= HOPPER_SHARED_MEMORY:
        return "roomy"
    return "tight" if device.shared_memory >= A100_SHARED_MEMORY else "small"


def facts_of(spec: LinearAttentionSpec, device: Device) -> Facts:
    memory = _memory(device)
    state = "small" if is_small(spec) else "large"
    stored = not one_state(spec) and spec.decay != "channel"
    if in_parts(spec) and spec.dtype == BF16 and memory == "roomy" and stored:
        state = "parts"
    return Facts(
        _kind(spec),
        spec.dtype,
        state,
        "long" if padded(spec.F) > LONG_FEATURES else "short",
        memory,
    )


def regime_of(spec: LinearAttentionSpec, device: Device) -> Regime:
    facts = facts_of(spec, device)
    return next(regime for regime in REGIMES if regime.covers(facts))


def config_of(spec: LinearAttentionSpec, device: Device) -> Config:
    """The config of a call that is not split, by its regime and by how many places the card has."""
    regime, multiprocessors = regime_of(spec, device), device.multiprocessors
    places = BESIDE_SMALL_STATES if is_small(spec) else BESIDE_LARGE_STATES
    walks = places.walk
    if is_small(spec) and spec.decay != "channel":
        # States of short pieces are as large as the rows.
        rows = spec.B * spec.G * max(spec.T, spec.S)
        walks = max(1, min(walks, rows // (multiprocessors * ENOUGH_PIECE_ROWS)))
    state, output, dq, dkv = (
        Tile(*sizes) for sizes in (regime.state, regime.output, regime.dq, regime.dkv)
    )
    return Config(
        piece_rows=PIECE_ROWS,
        programs=walks * multiprocessors,
        run_rows=regime.runs[0],
        backward_run_rows=regime.runs[1],
        pair_block=regime.pair_block,
        stored_columns=LARGEST_STORED if _memory(device) == "roomy" else 0,
        wide_state=HALF_STATE if _memory(device) == "small" else LARGEST_STATE,
        state_block=state.block,
        state_warps=state.warps,
        state_stages=state.stages,
        state_programs=places.state * multiprocessors,
        output_block=output.block,
        output_warps=output.warps,
        output_stages=output.stages,
        output_programs=places.output * multiprocessors,
        output_rows=places.output_rows,
        dq_block=dq.block,
        dq_warps=dq.warps,
        dq_stages=dq.stages,
        dq_programs=places.dq * multiprocessors,
        dq_delayed=regime.delayed,
        dkv_block=dkv.block,
        dkv_warps=dkv.warps,
        dkv_stages=dkv.stages,
        dkv_programs=places.dkv * multiprocessors,
        dkv_rows=places.dkv_rows,
    )
