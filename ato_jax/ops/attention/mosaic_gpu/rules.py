"""Which block sizes and launches a call gets, by the measurements in docs/notes/attention.md."""

from __future__ import annotations

import dataclasses
import functools

from ato_jax.device import Device
from ato_jax.ops.attention.eight_bits import reads_eight_bits
from ato_jax.ops.attention.mosaic_gpu import frame, pairs
from ato_jax.ops.attention.mosaic_gpu.frame import Config
from ato_jax.ops.attention.mosaic_gpu.gradient_storage import ROWS, Pass, passes
from ato_jax.ops.attention.mosaic_gpu.rounds import Rounds
from ato_jax.ops.attention.mosaic_gpu.schedule import Schedule
from ato_jax.ops.attention.spec import AttentionSpec, sums_by_query

# Behind a causal mask a persistent launch is faster up to so many keys.
MOST_KEYS_AHEAD = 2048
MOST_KEYS_OF_GRADIENTS_AHEAD = 1024
# A persistent launch is faster where the fullest block has less than 1 + KEYS_SAVED / S times the
# mean. Loading ahead alone saved 0.22, 0.14 and 0.04 of the time at S = 512, 1024 and 2048 and
# D = 128; at 1.28 times the mean a launch at S = 512 was still 6% faster, at 1.19 one at S = 1024.
KEYS_SAVED = 200


@functools.lru_cache(maxsize=1024)
def default_config(spec: AttentionSpec, device: Device) -> Config:
    widest = max(spec.D, spec.V)
    two_planes = spec.bias is not None and spec.mask is not None
    # With the options that are not plain the kernel for dq spills 60 to 540 bytes at D = 128, if a
    # step has 128 keys. Nor were persistent launches and other tiles measured with them.
    plain = _is_plain(spec)
    heads, heads_of_keys, limit = spec.B * spec.H, spec.B * spec.G, 3 if widest <= 64 else 2
    fill = functools.partial(_filling, device.multiprocessors, limit)
    consumers = fill(_most_consumers(spec, plain), spec.T, heads)
    dq_consumers = fill(_most_of_gradients(spec, plain, 1024), spec.T, heads)
    dkv_consumers = fill(_most_of_gradients(spec, plain, 512), spec.S, heads_of_keys)
    few_keys = two_planes or (widest > 128 and not reads_eight_bits(spec))
    keys = 64 if few_keys else 128
    sets_aside = reads_eight_bits(spec) and spec.S > frame.MOST_KEYS_OF_SUMS
    config = Config(
        consumers=consumers,
        rows=64,
        keys=keys,
        stages=2,
        turns=consumers > 1,
        multiprocessors=device.multiprocessors,
        dkv_consumers=dkv_consumers,
        dq_consumers=dq_consumers,
        dq_keys=128 if 64 < widest <= 128 and plain else 64,
        dq_hold=widest > 64,
        dq_turns=widest > 128 and dq_consumers > 1,
        steps_of_sums=frame.MOST_KEYS_OF_SUMS // keys if sets_aside else 0,
    )
    # A device that does not tell how many multiprocessors it has counts as one.
    if plain and device.multiprocessors > 1:
        config = _with_loads_ahead(spec, config)
    return config if fits(spec, config) else dataclasses.replace(config, stages=1)


def fits(spec: AttentionSpec, config: Config) -> bool:
    """Whether the forward kernel has room in shared memory."""
    own = frame.shared_bytes(spec, config) + pairs.most_bytes(spec, pairs.block_of(config))
    return own <= frame.MOST_BYTES


def _is_plain(spec: AttentionSpec) -> bool:
    without = not (spec.segments or spec.q_lengths or spec.kv_lengths or spec.dropout_rate)
    without = without and spec.left is None and spec.softcap is None
    return without and spec.bias is None and spec.mask is None and not sums_by_query(spec)


def _most_consumers(spec: AttentionSpec, plain: bool) -> int:
    """The most warpgroups that multiply in a block of the forward kernel. With three, a tile has
    192 queries: more of a short sequence's last tile is empty, and the kernel spills what a
    backward pass needs."""
    if max(spec.D, spec.V) > 64:
        return 2
    if spec.right is not None:
        few = spec.T <= (4096 if spec.keep_rest else 2048)
    else:
        few = spec.T <= (1024 if spec.keep_rest else 256)
    return 2 if plain and few and not reads_eight_bits(spec) else 3


def _most_of_gradients(spec: AttentionSpec, plain: bool, short: int) -> int:
    """The most warpgroups that multiply in a block of a backward kernel. Of 64 columns, two are
    faster than three behind a causal mask where T and S are at most `short`."""
    is_short = spec.right is not None and max(spec.T, spec.S) <= short
    return 2 if max(spec.D, spec.V) > 64 or (plain and is_short) else 3


def _filling(multiprocessors: int, limit: int, most: int, rows: int, heads: int) -> int:
    """The fewest warpgroups of 64 rows in a block, up to `limit`, with which all blocks run at
    once; `most` where there are more blocks in any case."""
    for count in range(1, limit + 1):
        if -(-rows // (count * ROWS)) * heads <= multiprocessors:
            return count
    return most


def _with_loads_ahead(spec: AttentionSpec, config: Config) -> Config:
    """The config with a persistent launch of each kernel that it makes faster."""
    every = dataclasses.replace(config, persistent=True, dq_persistent=True, dkv_persistent=True)
    forward = _loads_ahead(spec, Schedule(spec, every).rounds)
    gradients = {of.of_keys: _loads_gradients_ahead(spec, of) for of in passes(spec, every)}
    dq, dkv = gradients[False], gradients[True]
    return dataclasses.replace(config, persistent=forward, dq_persistent=dq, dkv_persistent=dkv)


def _pays(spec: AttentionSpec, rounds: Rounds) -> bool:
    """Whether blocks take several tiles, and the fullest one so little more than the mean that the
    others do not wait for it longer than loading ahead saves. Without a causal mask launches of
    one tile a block leave as many blocks idle at their end."""
    if not rounds.persistent:
        return False
    return spec.right is None or rounds.imbalance <= 1 + KEYS_SAVED / spec.S


def _is_square(spec: AttentionSpec) -> bool:
    """Whether the mask is causal and each pair of tiles of `rounds.py` sees as much. With offsets,
    later keys, or other numbers of queries and keys the fullest block has up to 1.27 times the
    mean."""
    begins_at_zero = spec.offset == 0 and not spec.query_offset
    return spec.right == 0 and spec.T == spec.S and begins_at_zero


def _loads_ahead(spec: AttentionSpec, rounds: Rounds) -> bool:
    """Whether a persistent launch of the forward kernel was faster with such sizes, and pays."""
    if reads_eight_bits(spec) or max(spec.D, spec.V) > 128:
        return False
    was_faster = spec.right is None or (_is_square(spec) and spec.S <= MOST_KEYS_AHEAD)
    return was_faster and _pays(spec, rounds)


def _loads_gradients_ahead(spec: AttentionSpec, of: Pass) -> bool:
    """Whether a persistent launch of a backward kernel was faster with such sizes, and pays."""
    widest, shortest = max(spec.D, spec.V), min(spec.T, spec.S)
    if spec.right is None:
        too_long = widest <= 64 and of.of_keys and spec.T > 2048
        was_faster = shortest >= 256 and not too_long
    else:
        is_short = 256 < spec.S <= MOST_KEYS_OF_GRADIENTS_AHEAD
        was_faster = widest <= 128 and is_short and _is_square(spec)
    return was_faster and _pays(spec, of.rounds)
