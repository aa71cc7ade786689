"""Attention of a few queries per sequence to a long cache, contiguous or in pages.

Every key is read once. The T queries of all heads of a group are the rows of one tile, so they
share each load of keys and values; row r is query r // share of head r % share. The blocks of keys
that are seen are numbered through all sequences and divided among the programs into equal runs,
whatever the lengths are. A program whose run crosses from one sequence to the next ends the one and
begins the other. For each sequence it goes block by block, with the running maximum and sums of
`forward.py`, and stores its part of the sequence in slot

    program + sequence

No two parts share a slot: from each part to the next, either the program or the sequence increases
by one. A second kernel merges the parts of each sequence. With pages, the place of key j is read
from the page table, block by block like the keys.

A cache in 8 bits has a factor a_j for each row of keys and b_j for each row of values:

    s[i,j]  = a_j (q_i . k_j)
    acc     = acc + b (sum_j (p_j b_j / b) v_j)        b = max_j |b_j| of the block

The rows are multiplied without their factors, and p_j b_j / b loses no more in 16 bits than p_j
does. Values that are the first columns of the keys are loaded once. The rows are loaded in words of
two columns (`paged_words.py`), so the tiles of q and acc are even and odd columns, too. The
products are in float16, which holds every number of 8 bits; each row of q is divided by the power
of two that brings it into float16's range.

`paged_tiles.py` says which rows, columns and blocks a program has, `paged_kernel.py` has the
kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ato_jax import device, launch
from ato_jax.backend import SpecialForward
from ato_jax.device import Device
from ato_jax.launch import pallas_call
from ato_jax.launch import triton as plgpu
from ato_jax.ops.attention.cached import MOST_QUERIES, CacheInputs
from ato_jax.ops.attention.spec import AttentionSpec, Inputs, Outputs, positions_of_first_query
from ato_jax.ops.attention.triton.common import LONGEST_ROW, SMALLEST_TILE, padded, row_size
from ato_jax.ops.attention.triton.paged_kernel import (
    MERGED_COLUMNS,
    attend_kernel,
    merge_kernel,
    merged_columns,
)
from ato_jax.ops.attention.triton.paged_tiles import (
    Config,
    columns_of,
    slices_of,
    value_slices_of,
)
from ato_jax.ops.attention.triton.paged_words import words_of

WIDEST_KEY = 576  # DeepSeek's latent attention: 512 columns, and 64 for positions
WIDEST_VALUE = 512
# Rows in a tile, and bytes of a tile of q: more do not fit the registers beside their sums.
MOST_ROWS = 64
ROWS_BYTES = 16 * 1024
WIDE_ROWS_BYTES = 48 * 1024
# The halves of words take registers, too.
WIDE_ROWS_BYTES_IN_8_BITS = 32 * 1024
LONGEST_BLOCK = 128
NUM_WARPS = 4
# For rows in several slices, so that twice as many rows share each load; and in 8 bits for more
# rows than the smallest tile has.
MANY_WARPS = 8
# What `unsupported` asks whether it fits.
SMALLEST = Config(SMALLEST_TILE, SMALLEST_TILE, MANY_WARPS, num_stages=1, programs=1)
# Each stage holds a block of keys and values in shared memory while it is loaded.
NUM_STAGES = 3
# With pages and rows in several slices, the compiler also prefetches from the table, which takes
# every second stage.
NUM_INDIRECT_STAGES = 5
# MOST_ROWS rows in several slices leave shared memory for two stages.
NUM_STAGES_OF_MOST_ROWS = 2
# With fewer stages no load runs ahead of the products.
FEWEST_STAGES_AHEAD = 2
# Bytes by which `shared_bytes` is above what was found.
MARGIN = 256
# Bytes of an element of a float32 factor in an exact product: three bfloat16 parts.
EXACT_FACTOR_BYTES = 6
# Rows that one warp multiplies.
ROWS_OF_WARP = 16
# Up to so many columns each load that is ahead has a buffer of its own, with pages as without.
NARROW = 128
# All runs are equally long, so one round of programs ends at the same time. In 8 bits the loads of
# a program take half as long, and a second program computes while the first waits for them.
PROGRAMS_PER_MULTIPROCESSOR = 1
PROGRAMS_PER_MULTIPROCESSOR_IN_8_BITS = 2
# Shorter caches are left to the forward kernel of `forward.py`, which needs no merging kernel. It
# has a program for each head. Where these fill the card and several heads load the same keys, the
# paged kernel took 0.38 of its time at 512 keys (B16 H32 G8 T1) and 0.41 at 1024. Elsewhere it took
# 1.02 of its time at 512 keys, 1.07 at 1024 and 0.95 at 4096 (B8 H16 G16 T1), and with more rows
# than the smallest tile has 1.10, 1.19 and 1.10 (B1 H32 G8 T16).
FEWEST_KEYS_SHARED = 512
FEWEST_KEYS = 4096
FEWEST_KEYS_OF_MANY_ROWS = 8192


def unsupported(spec: AttentionSpec, here: Device, k: jax.Array) -> str | None:
    """The reason why the kernel cannot run for a cache of keys such as `k`; None if it can."""
    return launch.no_triton or out_of_range(spec, here, k)


def out_of_range(spec: AttentionSpec, here: Device, k: jax.Array) -> str | None:
    """`unsupported`, without the question whether JAX can lower Triton kernels."""
    capability = here.capability
    if not device.interpreting():
        if here.platform != "gpu" or capability is None or capability < (8, 0):
            return "needs an NVIDIA GPU of compute capability 8.0 or more"
        if k.dtype == jnp.float8_e4m3fn and capability < (8, 9):
            return "float8_e4m3fn needs compute capability 8.9 or more"
    for name, width, widest in (("D", spec.D, WIDEST_KEY), ("V", spec.V, WIDEST_VALUE)):
        if width > widest:
            return f"{name} must be at most {widest}, got {width}"
    if not spec.B * spec.S:
        return "empty arrays"
    return _too_large(spec, here, jnp.dtype(k.dtype).itemsize == 1)


def _too_large(spec: AttentionSpec, here: Device, eight_bits: bool) -> str | None:
    """The reason why the smallest tiles do not fit the shared memory; None if they do."""
    needed = max(
        shared_bytes(spec, SMALLEST, shared=shared, eight_bits=eight_bits)
        for shared in (False, True)
    )
    if needed <= here.shared_memory or device.interpreting():
        return None
    return (
        f"D={spec.D} and V={spec.V} in {spec.dtype} may need {needed} bytes of shared memory "
        f"for the smallest tiles; a block has {here.shared_memory} on this GPU"
    )


def shared_bytes(
    spec: AttentionSpec,
    config: Config,
    *,
    shared: bool = False,
    in_pages: bool = False,
    eight_bits: bool = False,
) -> int:
    """The most shared memory that the first kernel asks for by sm_80's instructions, in bytes.

    It holds q [rows, D], p [rows, block] and a buffer of keys and values for each load that is
    ahead. Found by compiling: contiguous 16-bit and float32 caches come to the same bytes, MARGIN
    aside, and no other cache comes to more.

    Args:
      shared: values are the first columns of the keys.
      in_pages: there is a table.
      eight_bits: the cache is one of 8 bits.
    """
    item = jnp.dtype(spec.dtype).itemsize
    exact = spec.dtype == "float32" and spec.precision == "exact"
    key_slices = slices_of(spec.D, eight_bits)
    value_slices = value_slices_of(spec, shared, eight_bits)
    keys, values = columns_of(key_slices), columns_of(value_slices)
    narrow = max(spec.D, spec.V) <= NARROW
    # Where every warp has rows of its own p stays in registers, but for some narrow 16-bit calls.
    rows_of_its_own = config.rows >= ROWS_OF_WARP * config.num_warps and (exact or not narrow)
    columns = keys if rows_of_its_own else keys + config.block
    factors = config.rows * columns * (EXACT_FACTOR_BYTES if exact else item) + MARGIN
    ahead = config.num_stages - 1
    if not ahead:
        # All values of a block, and one slice of its keys, on their way to the tensor cores.
        widest = max(one.size for one in (*key_slices, *value_slices))
        return factors + config.block * (values + widest) * item
    buffers = max(1, ahead // 2) if in_pages and not narrow else ahead
    streamed = (keys if shared else keys + values) * (1 if eight_bits else item)
    # Page numbers are loaded up to two blocks earlier. Scales came to at most 16 bytes a key.
    vectors = 4 * (ahead + 2) * in_pages + 16 * ahead * eight_bits
    return factors + config.block * (buffers * streamed + vectors)


def _fitted(config: Config, needed: Callable[[Config], int], size: int) -> Config:
    """The config with fewer stages, keys or rows, in this order, until it needs at most `size`.

    A single stage is the last resort: every product then waits for its load.
    """
    for name, least in (
        ("num_stages", FEWEST_STAGES_AHEAD),
        ("block", SMALLEST_TILE),
        ("rows", SMALLEST_TILE),
        ("num_stages", 1),
    ):
        while needed(config) > size and (value := getattr(config, name)) > least:
            smaller = value - 1 if name == "num_stages" else value // 2
            config = dataclasses.replace(config, **{name: smaller})
    return config


def default_config(spec: AttentionSpec, here: Device, inputs: CacheInputs | None = None) -> Config:
    """By the width of a row, the device's shared memory and the form of the cache.

    Without `inputs` the cache is contiguous, in the spec's dtype, with values of its own.
    """
    shared = inputs is not None and inputs.v is None
    in_pages = inputs is not None and inputs.table is not None
    eight_bits = inputs is not None and inputs.k_scales is not None
    item = jnp.dtype(spec.dtype).itemsize
    widths = row_size(spec.D), columns_of(value_slices_of(spec, shared, False))
    count = spec.T * spec.H // spec.G

    def fitting(size: int, width: int, most: int) -> int:
        found = pl.next_power_of_2(size // (width * item) + 1) // 2
        return max(SMALLEST_TILE, min(found, most))

    wide = max(widths) > LONGEST_ROW
    rows_bytes, most_rows = ROWS_BYTES, MOST_ROWS // 2 if eight_bits else MOST_ROWS
    if wide:
        rows_bytes = WIDE_ROWS_BYTES_IN_8_BITS if eight_bits else WIDE_ROWS_BYTES
    rows = min(fitting(rows_bytes, max(widths), most_rows), padded(count))
    streamed = widths[0] if shared else sum(widths)
    block = fitting(here.shared_memory // NUM_STAGES, streamed, LONGEST_BLOCK)
    num_stages = NUM_INDIRECT_STAGES if wide and in_pages else NUM_STAGES
    if wide and shared and item == 2 and count > MOST_ROWS and not in_pages and not eight_bits:
        rows, num_stages = MOST_ROWS, NUM_STAGES_OF_MOST_ROWS
    many = wide or (eight_bits and rows > SMALLEST_TILE)
    config = Config(
        *(rows, block, here.waves(MANY_WARPS if many else NUM_WARPS), num_stages),
        programs=1,
        fast_exp2=here.capability is not None,
    )
    needed = functools.partial(
        shared_bytes, spec, shared=shared, in_pages=in_pages, eight_bits=eight_bits
    )
    config = _fitted(config, needed, here.shared_memory)
    each = PROGRAMS_PER_MULTIPROCESSOR_IN_8_BITS if eight_bits else PROGRAMS_PER_MULTIPROCESSOR
    others = pl.cdiv(count, config.rows) * spec.G
    programs = _programs(spec, config.block, others, each * here.multiprocessors)
    return dataclasses.replace(config, programs=programs)


def _programs(spec: AttentionSpec, block: int, others: int, programs: int) -> int:
    """How many programs share the blocks of all sequences.

    The grid has that many programs `others` times. A multiple of the batch size is taken where it
    gives no program more blocks: with equal lengths no run then crosses two sequences.
    """
    blocks = spec.B * pl.cdiv(spec.S, block)
    most = max(1, min(programs // others, blocks))
    even = most - most % spec.B
    return even if even and pl.cdiv(blocks, even) == pl.cdiv(blocks, most) else most


def attend(spec: AttentionSpec, config: Config, inputs: CacheInputs) -> tuple[jax.Array, jax.Array]:
    """out [B, T, H, V] in q's dtype and lse [B, T, H] float32, or as the spec's layout has it."""
    B, T, H, G = spec.B, spec.T, spec.H, spec.G
    count = T * H // G
    tiles = pl.cdiv(count, config.rows)
    slots = config.programs + B - 1
    cache_dtype = None
    if inputs.k_scales is not None:
        cache_dtype = str(inputs.k.dtype)
        v = None if inputs.v is None else words_of(inputs.v)
        inputs = inputs._replace(k=words_of(inputs.k), v=v)
    rows = (B, T, H) if spec.layout == "bthd" else (B, H, T)

    def whole(array: jax.Array | jax.ShapeDtypeStruct, width: int = 0) -> pl.BlockSpec:
        """The whole array, with room for tiles of `width` columns."""
        shape = (*array.shape[:-1], max(width, array.shape[-1]))
        return pl.BlockSpec(shape, lambda *program: (0,) * array.ndim)

    keys = columns_of(slices_of(spec.D, cache_dtype is not None))
    values = columns_of(value_slices_of(spec, inputs.v is None, cache_dtype is not None))
    values = max(1, pl.cdiv(values, MERGED_COLUMNS)) * MERGED_COLUMNS
    specs = jax.tree.map(whole, inputs)._replace(
        q=whole(inputs.q, keys),
        k=whole(inputs.k, keys),
        v=None if inputs.v is None else whole(inputs.v, values),
    )
    parts = (
        jax.ShapeDtypeStruct((slots, G, count, spec.V), jnp.float32),
        jax.ShapeDtypeStruct((slots, G, count), jnp.float32),
    )
    merged = (
        jax.ShapeDtypeStruct((*rows, spec.V), spec.dtype),
        jax.ShapeDtypeStruct(rows, jnp.float32),
    )
    of_parts, of_merged = ([whole(out, values), whole(lse)] for out, lse in (parts, merged))
    out, lse = pallas_call(
        functools.partial(attend_kernel, spec=spec, config=config, cache_dtype=cache_dtype),
        # The groups of one part are adjacent in memory, and their programs run at the same time.
        grid=(G * tiles, config.programs),
        in_specs=[specs._replace(sinks=None)],
        out_specs=of_parts,
        out_shape=list(parts),
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        name="attention_paged",
    )(inputs._replace(sinks=None))
    out, lse = pallas_call(
        functools.partial(merge_kernel, spec=spec, config=config),
        grid=(G * pl.cdiv(count, SMALLEST_TILE), B, pl.cdiv(spec.V, merged_columns(spec))),
        in_specs=[*of_parts, specs.lengths, specs.first, specs.sinks],
        out_specs=of_merged,
        out_shape=list(merged),
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        name="attention_paged_merge",
    )(out, lse, inputs.lengths, inputs.first, inputs.sinks)
    return out, lse


def _fewest_keys(spec: AttentionSpec, here: Device) -> int:
    if spec.H > spec.G and spec.B * spec.H > here.multiprocessors:
        return FEWEST_KEYS_SHARED
    many = spec.T * spec.H // spec.G > SMALLEST_TILE
    return FEWEST_KEYS_OF_MANY_ROWS if many else FEWEST_KEYS


def serves(spec: AttentionSpec, here: Device) -> bool:
    """Whether `forward` runs this call of attention: a few queries and many keys.

    Not where a backward pass reads `Outputs.rest`: that is what rounding took from the out of
    `forward.py`'s kernel, and this kernel rounds another out.
    """
    plain = spec.bias is None and spec.mask is None and not spec.segments and not spec.dropout_rate
    few = spec.T <= MOST_QUERIES and spec.S >= _fewest_keys(spec, here)
    new = device.interpreting() or (here.capability is not None and here.capability >= (8, 0))
    fits = _too_large(spec, here, False) is None
    return plain and few and new and fits and not spec.keep_rest


def forward(spec: AttentionSpec, config: Config, inputs: Inputs) -> Outputs:
    """`attention` of a few queries to contiguous keys."""
    lengths = inputs.kv_lengths
    if lengths is None:
        lengths = jnp.full((spec.B,), spec.S, jnp.int32)
    first = positions_of_first_query(spec, inputs)
    cache = CacheInputs(
        inputs.q,
        inputs.k,
        inputs.v,
        lengths,
        first=first,
        q_lengths=inputs.q_lengths,
        sinks=inputs.sinks,
    )
    return Outputs(*attend(spec, config, cache))


class _FewQueries(SpecialForward[AttentionSpec, Config, Inputs, Outputs]):
    serves = staticmethod(serves)
    default_config = staticmethod(default_config)
    forward = staticmethod(forward)


SPECIAL_FORWARD = _FewQueries()
