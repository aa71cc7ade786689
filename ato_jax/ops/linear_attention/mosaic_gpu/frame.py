"""What the kernels here are made of: how work is dealt, tiles in shared memory, products, features.

A block stays on its multiprocessor and takes items, a piece of the sequence of one head each, or of
two of 64 columns side by side, chunk by chunk of C rows. Its warpgroups have roles of their own:
one loads by the copy engine (TMA) into slots of a ring, which runs on ahead behind barriers; others
map features, multiply and store.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ato_jax import device, meshes
from ato_jax.ops.linear_attention.mosaic_gpu.narrow import Narrow, width_of
from ato_jax.ops.linear_attention.scans.chunks import ALIKE as ALIKE
from ato_jax.ops.linear_attention.scans.chunks import LOG2_E as LOG2_E
from ato_jax.ops.linear_attention.scans.chunks import PARTS as PARTS
from ato_jax.ops.linear_attention.scans.chunks import C, heads_of_tile, is_steep
from ato_jax.ops.linear_attention.scans.chunks import whole_chunks as whole_chunks
from ato_jax.ops.linear_attention.spec import LinearAttentionSpec

F = V = 128
HALF = V // 2
# A key of which the feature is 0, with any decay.
LEAST_KEY = -1024.0
BF16, F32 = jnp.bfloat16, jnp.float32

# Warpgroups; where 0 and 1 alone multiply, with half of a state each.
MEMORY, FEATURES = 2, 3
WARPGROUPS = 4
# Registers of a thread: of all warpgroups together, and what is enough to load.
REGISTERS, MEMORY_REGISTERS = 512, 24

TILE = plgpu.Layout.WGMMA
OF_ROWS, OF_COLUMNS = TILE.reduce(1), TILE.reduce(0)
# Before JAX 0.12 `load` takes an index; before 0.11 tiles are transposed in registers alone.
_INDEX: tuple[Any, ...] = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
_IN_REGISTERS = jax.__version_info__ < (0, 11)


class Item(NamedTuple):
    """A piece of one head, or of the two of a tile, of which `head` then is the number of the
    pair; with how many chunks it has, and its block has had before it."""

    number: Any
    batch: Any
    head: Any
    piece: Any
    first_row: Any
    chunks: Any
    before: Any

    def rows(self, chunk: Any) -> Any:
        return pl.ds(self.first_row + chunk * C, C)

    def rows_from_the_end(self, chunk: Any) -> Any:
        return self.rows(self.chunks - 1 - chunk)


@dataclasses.dataclass(frozen=True)
class Config:
    """Blocks of each kernel; pieces of a sequence, 0: as many as fill the blocks."""

    blocks: int
    pieces: int = 0


@dataclasses.dataclass(frozen=True)
class Deal:
    """`pieces` of `rows` each, from `first` on, of B sequences of `length` rows and so many heads,
    or pairs of them.

    Heads lie side by side in memory: blocks that run at once have the same piece of several.
    """

    B: int
    heads: int
    length: int
    rows: int
    pieces: int
    most_blocks: int
    first: int = 0

    @property
    def items(self) -> int:
        return self.pieces * self.B * self.heads

    @property
    def blocks(self) -> int:
        return min(self.most_blocks, self.items)

    @property
    def own(self) -> Any:
        """How many items this block takes."""
        if self.items == self.blocks:
            return 1
        return lax.div(self.items - lax.axis_index("block") + (self.blocks - 1), self.blocks)

    def each(
        self, do: Callable[[Item], None], takes: Callable[[Item], Any] | None = None
    ) -> Any:
        """`do` for each item of this block that it takes; how many chunks these had in all."""
        block = lax.axis_index("block")
        heads = self.B * self.heads

        def one(number: Any, before: Any) -> Any:
            item = block + number * self.blocks
            piece, head = lax.div(item, heads), lax.rem(item, heads)
            first_row = self.first + piece * self.rows
            here = jnp.minimum(self.rows, self.length - first_row)
            chunks = lax.div(here + (C - 1), C)
            batch, head = lax.div(head, self.heads), lax.rem(head, self.heads)
            found = Item(number, batch, head, piece, first_row, chunks, before)
            if takes is None:
                do(found)
                return before + chunks
            taken = takes(found)
            pl.when(taken)(lambda: do(found))
            return jnp.where(taken, before + chunks, before)

        if self.items == self.blocks:
            # Where there is no loop the compiler has more registers for what is in it.
            return one(0, jnp.int32(0))
        return lax.fori_loop(0, self.own, one, jnp.int32(0))


def is_wide(spec: LinearAttentionSpec) -> bool:
    """Whether a head has more columns than a tile."""
    return spec.D > F


def head_of(spec: LinearAttentionSpec, head: Any, half: Any) -> Any:
    """The head, in arrays in global memory, whose columns a half of a tile has."""
    return head if heads_of_tile(spec) == 1 else 2 * head + half


def columns_of(spec: LinearAttentionSpec, half: Any) -> Any:
    """Which of that head's columns they are."""
    return _columns(spec, half * HALF if heads_of_tile(spec) == 1 else 0, HALF)


def _columns(spec: LinearAttentionSpec, first: Any, count: int) -> Any:
    if isinstance(spec, Narrow) and isinstance(first, int):
        # What ends behind the array is refused where it is known.
        first += 0 * lax.axis_index("block")
    return pl.ds(first, count)


def part(
    spec: LinearAttentionSpec, ref: Any, item: Item, rows: Any, head: Any, half: Any = None
) -> Any:
    """Rows of a sequence in global memory; or of them the columns that half a tile has."""
    columns: tuple[Any, ...] = ()
    assert half is not None or heads_of_tile(spec) == 1
    if half is not None:
        head, columns = head_of(spec, head, half), (columns_of(spec, half),)
    elif isinstance(spec, Narrow):
        columns = (_columns(spec, 0, F),)
    if spec.layout == "bthd":
        return ref.at[(item.batch, rows, head, *columns)]
    return ref.at[(item.batch, head, rows, *columns)]


def sequence_shape(spec: LinearAttentionSpec, heads: int) -> tuple[int, ...]:
    lengths = (spec.T, heads) if spec.layout == "bthd" else (heads, spec.T)
    return (spec.B, *lengths, width_of(spec))


def shared(spec: LinearAttentionSpec, *shape: int, dtype: Any = BF16) -> Any:
    """Room for tiles in shared memory, laid out as the copy engine and the products take them: in
    rows of as many bytes as are a part of those of a head."""
    size = jnp.dtype(dtype).itemsize
    swizzle = 128 if dtype == F32 else math.gcd(128, size * width_of(spec))
    transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def tiles(spec: LinearAttentionSpec, slots: int) -> Any:
    """Tiles of C rows; of two heads a tile each, as the copy engine writes no columns of one."""
    return shared(spec, slots, *((C, F) if heads_of_tile(spec) == 1 else (2, C, HALF)))


def half_of(spec: LinearAttentionSpec, tiles: Any, slot: Any, half: Any) -> Any:
    """64 columns of one of `tiles`."""
    if heads_of_tile(spec) == 1:
        return tiles.at[slot, :, pl.ds(half * HALF, HALF)]
    return tiles.at[slot, half]


def head_in(spec: LinearAttentionSpec, tiles: Any, slot: Any, half: Any) -> Any:
    """All columns of one of `tiles` that are of the same head as a half of it."""
    return tiles.at[slot] if heads_of_tile(spec) == 1 else tiles.at[slot, half]


def copy_tile(
    spec: LinearAttentionSpec,
    ref: Any,
    item: Item,
    rows: Any,
    head: Any,
    tiles: Any,
    slot: Any,
    barriers: Any,
) -> None:
    """Rows of a sequence to one of `tiles`: so many arrivals as it has heads."""
    heads = heads_of_tile(spec)
    for half in range(heads):
        source = part(spec, ref, item, rows, head, None if heads == 1 else half)
        own = head_in(spec, tiles, slot, half)
        plgpu.copy_gmem_to_smem(source, own, barriers.at[slot])


def leave_tile(
    spec: LinearAttentionSpec,
    tiles: Any,
    slot: Any,
    ref: Any,
    item: Item,
    rows: Any,
    head: Any,
) -> None:
    """The reverse."""
    heads = heads_of_tile(spec)
    for half in range(heads):
        target = part(spec, ref, item, rows, head, None if heads == 1 else half)
        plgpu.copy_smem_to_gmem(head_in(spec, tiles, slot, half), target)


def by_heads(spec: LinearAttentionSpec, ref: Any) -> list[Any]:
    """Of rows, or of a vector, what is of each head of a tile: one lies behind the other."""
    heads = heads_of_tile(spec)
    each = ref.shape[0] // heads
    return [ref] if heads == 1 else [ref.at[pl.ds(n * each, each)] for n in range(heads)]


def rows_in(spec: LinearAttentionSpec, vectors: Any, slot: Any, half: Any) -> Any:
    """Of one of `vectors` what is of the head that a half of a tile is of, [C]."""
    return vectors.at[slot] if heads_of_tile(spec) == 1 else vectors.at[slot, pl.ds(half * C, C)]


def copy_vector(
    spec: LinearAttentionSpec,
    ref: Any,
    item: Item,
    of_chunk: Any,
    vectors: Any,
    slot: Any,
    barriers: Any,
) -> None:
    """What [B, H, ..] has of a chunk to one of `vectors`: so many arrivals as a tile has heads."""
    for half, own in enumerate(by_heads(spec, vectors.at[slot])):
        source = ref.at[item.batch, head_of(spec, item.head, half), of_chunk]
        plgpu.copy_gmem_to_smem(source, own, barriers.at[slot])


def load(ref: Any, layout: Any = TILE, optimized: bool = True) -> jax.Array:
    """`optimized`: of shared memory."""
    return plgpu.load(ref, *_INDEX, layout=layout, optimized=optimized)


def load_transposed(ref: Any) -> jax.Array:
    if _IN_REGISTERS:
        return plgpu.layout_cast(load(ref.T, plgpu.Layout.WGMMA_TRANSPOSED), TILE)
    return load(ref.T)


def store_transposed(ref: Any, x: jax.Array) -> None:
    x = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED) if _IN_REGISTERS else x
    ref.T[...] = x


def registers_at_launch(warpgroups: int) -> int:
    return REGISTERS // warpgroups // 8 * 8


def set_registers(count: int, warpgroups: int = WARPGROUPS) -> None:
    """What a launch gives to each is what there is to deal, in eights. To ask for more where it is
    fewer is an illegal instruction, as is the reverse."""
    increases = count > registers_at_launch(warpgroups)
    plgpu.set_max_registers(count, action="increase" if increases else "decrease")


def workers_registers(workers: int) -> int:
    """Of so many warpgroups, beside one that loads."""
    dealt = (workers + 1) * registers_at_launch(workers + 1)
    return min(232, (dealt - MEMORY_REGISTERS) // workers // 8 * 8)


def zeros(rows: int, columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((rows, columns), F32), TILE)


def ones(rows: int, columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.ones((rows, columns), BF16), TILE)


def rounded(x: jax.Array) -> jax.Array:
    # Without the barrier each element would be converted there and back by itself, which is slow.
    return lax.optimization_barrier(x.astype(BF16))


def in_turn(item: Item, workers: int, do: Callable[[Any], None]) -> None:
    """`do` for each chunk of an item that is this one's of so many warpgroups, which take turns
    across items. Where slots are a multiple of them each slot is one warpgroup's."""
    first = lax.rem(group() + workers - lax.rem(item.before, workers), workers)
    own = lax.div(item.chunks - first + (workers - 1), workers)
    lax.fori_loop(0, own, lambda turn, _: do(first + turn * workers), None)


def slot_of(step: Any, slots: int) -> Any:
    return lax.rem(step, slots)


def wait_until_free(barriers: Any, step: Any, slots: int) -> None:
    """Before a slot is loaded again."""

    @pl.when(step >= slots)
    def _() -> None:
        plgpu.barrier_wait(barriers.at[slot_of(step, slots)])


def await_the_last(barriers: Any, steps: Any, slots: int) -> None:
    """Every completion of a barrier has to be awaited."""

    def one(step: Any, _: None) -> None:
        plgpu.barrier_wait(barriers.at[slot_of(step, slots)])

    lax.fori_loop(jnp.maximum(steps - slots, 0), steps, one, None)


Sum = tuple[jax.Array, Sequence[tuple[Any, Any]]]


def multiply(
    *sums: Sum, meanwhile: Callable[[], None] = lambda: None
) -> tuple[jax.Array, ...]:
    """For each of `sums`, (start, [(a, b), ...]): start + a @ b + ..., all in flight at once, and
    while `meanwhile` is done."""
    if device.interpreting():
        found = _multiply_interpreted(*sums)
        meanwhile()
        return found

    def issue(accumulators: Any) -> None:
        for accumulator, (_, products) in zip(accumulators, sums, strict=True):
            for a, b in products:
                plgpu.wgmma(accumulator, a, b)
        meanwhile()

    accumulators = pl.run_state(issue)(tuple(plgpu.ACC.init(start) for start, _ in sums))
    # What is read from an accumulator must not be moved ahead of the wait for it.
    return lax.optimization_barrier(tuple(accumulators))


def multiply_while(
    products: Sequence[tuple[Any, Any]], shape: tuple[int, int], do: Callable[[], Any]
) -> tuple[jax.Array, Any]:
    """The sum of a @ b, and what `do` gives while that is in flight."""

    def both(accumulator: Any) -> Any:
        for a, b in products:
            plgpu.wgmma(accumulator, a, b)
        found = do()
        return accumulator[...], found

    product, found = pl.run_scoped(both, plgpu.ACC(shape, F32))
    return lax.optimization_barrier(product), found


def _multiply_interpreted(*sums: Sum) -> tuple[jax.Array, ...]:
    """Pallas's interpreter knows no factors in registers, and no sums that begin with values."""
    found = []
    for start, products in sums:
        for a, b in products:
            if isinstance(a, jax.Array):
                start = start + jnp.dot(a, b[...], preferred_element_type=F32)
                plgpu.commit_smem()
                continue

            def one(accumulator: Any, a: Any = a, b: Any = b) -> jax.Array:
                plgpu.wgmma(accumulator, a, b)
                return accumulator[...]

            rows, columns = start.shape
            start = start + pl.run_scoped(one, plgpu.ACC((rows, columns), F32))
        found.append(start)
    return tuple(found)


def of_parts(parts: jax.Array) -> jax.Array:
    """Of a sum's 8 columns, half of what is rounded, half of what that left off."""
    return jnp.sum(parts, axis=1) / PARTS


def features_of(x: jax.Array) -> jax.Array:
    """elu(x) + 1 in bfloat16; its derivative is the smaller of it and 1.

    Two to an instruction but for exp, and the same as in float32, rounded at the end.
    """
    raised = jnp.exp2(jnp.minimum(x, 0).astype(F32) * LOG2_E)
    return jnp.maximum(x + 1, raised.astype(BF16))


def unrounded_features_of(x: jax.Array) -> jax.Array:
    x = x.astype(F32)
    return jnp.maximum(x + 1, jnp.exp2(jnp.minimum(x, 0.0) * LOG2_E))


def decayed_features_of(x: jax.Array, exponents: jax.Array) -> jax.Array:
    """The features of rows times exp2 of `exponents` [rows], rounded once."""
    x = x.astype(F32)
    return rounded(unrounded_decayed_features_of(x, in_columns(exponents, x.shape[1])))


def unrounded_decayed_features_of(x: jax.Array, exponents: jax.Array) -> jax.Array:
    """The same of x in float32, with an exponent of its own for each element."""
    factor = jnp.exp2(exponents)
    raised = jnp.exp2(jnp.minimum(x, 0.0) * LOG2_E + exponents)
    return jnp.maximum(x * factor + factor, raised)


def map_in_place(ref: Any) -> None:
    """Features of a tile in shared memory, where they replace it."""
    ref[...] = features_of(load(ref))


def map_keys_in_place(
    spec: LinearAttentionSpec, ref: Any, half: int, exponents: jax.Array | None = None
) -> None:
    """The same of half a tile of keys; with a decay, times that."""
    x = keys(spec, load(ref), half * HALF)
    ref[...] = features_of(x) if exponents is None else decayed_features_of(x, exponents)


def keys(spec: LinearAttentionSpec, x: jax.Array, first: Any = 0, axis: int = 1) -> jax.Array:
    """From that column of a tile on, or row of its transpose: where a head has none, what has
    features of 0."""
    if not isinstance(spec, Narrow):
        return x
    if isinstance(first, int) and first + x.shape[axis] <= spec.width:
        return x
    column = first + plgpu.broadcasted_iota(jnp.int32, x.shape, dimension=axis, layout=TILE)
    return jnp.where(column < spec.width, x, LEAST_KEY)


class Gates(NamedTuple):
    """Of a chunk, from shared memory: G up to its middle row and its last, and whether it is steep,
    None where none is: one of its halves loses more than features in bfloat16 have room for.

    In all other chunks keys carry exp2(G_m - G_j), their decay up to the middle, queries, or what
    they get at the end, exp2(G_i - G_m), theirs since, and states are those that the middle sees:
    so there is nothing between products that a decay would add. In a steep one neither carries any,
    states are those of its start or, behind it, of its end, and pairs of rows are multiplied by
    exp2(G_i - G_j).
    """

    ref: Any
    middle: Any
    last: Any
    steep: Any

    def of(self, layout: Any) -> jax.Array:
        return load(self.ref, layout)

    def unless_steep(self, exponent: Any) -> Any:
        return exponent if self.steep is None else jnp.where(self.steep, 0.0, exponent)

    def either(self, when_steep: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        return otherwise() if self.steep is None else lax.cond(self.steep, when_steep, otherwise)

    def if_steep(self, exponent: Any) -> Any:
        """A factor of a steep chunk alone."""
        return 1.0 if self.steep is None else jnp.exp2(jnp.where(self.steep, exponent, 0.0))

    def since_middle(self) -> jax.Array:
        """[C]: G_i - G_m, or 0 in a steep chunk."""
        return self.unless_steep(self.of(OF_ROWS) - self.middle)

    def up_to_middle(self) -> jax.Array:
        return self.unless_steep(self.middle - self.of(OF_ROWS))

    def to_middle(self) -> Any:
        """What is left of a state at the start when the middle sees it."""
        return jnp.exp2(self.unless_steep(self.middle))

    def from_middle(self) -> Any:
        return jnp.exp2(self.unless_steep(self.last - self.middle))

    def of_pairs(self, queries: int) -> jax.Array:
        """In a steep chunk exp2(G_i - G_j), queries along this axis; where a key is not seen
        infinite, perhaps."""
        rows, columns = in_columns(self.of(OF_ROWS), C), in_rows(self.of(OF_COLUMNS), C)
        return self.if_steep(columns - rows if queries else rows - columns)

    def left(self, layout: Any) -> jax.Array:
        """[C]: what is left of each key at the end of a steep chunk."""
        return self.if_steep(self.last - self.of(layout))


def gates_of(ref: Any, some_steep: bool = True) -> Gates:
    middle, last = ref[C // 2 - 1], ref[C - 1]
    return Gates(ref, middle, last, is_steep(middle, last) if some_steep else None)


def takes_pieces(
    steep_ref: Any, some_steep: bool, group_size: int = 1
) -> Callable[[Item], Any] | None:
    """Those of which some chunk is steep, or those of which none is; without gates all. So many
    heads of an item have the same gates."""
    if steep_ref is None:
        return None

    def takes(item: Item) -> Any:
        some = steep_ref[item.batch, lax.div(item.head, group_size), item.piece] != 0
        return some if some_steep else ~some

    return takes


def each_chunk(steep_ref: Any, item: Item, head: Any, loop: Callable[[bool], None]) -> None:
    """`loop` goes through an item's chunks, of which some may be steep or none is. These are two
    loops, since what a steep one needs would cost all others registers."""
    if steep_ref is None:
        return loop(False)
    some = steep_ref[item.batch, head, item.piece] != 0
    return lax.cond(some, lambda: loop(True), lambda: loop(False))


def times_rows(ref: Any, factors: jax.Array) -> jax.Array:
    """The transpose of a tile whose rows are times `factors`, in registers."""
    turned = load_transposed(ref).astype(F32)
    return rounded(turned * in_rows(factors, turned.shape[0]))


def in_columns(rows: jax.Array, width: int) -> jax.Array:
    """A number of each row, in all of its columns."""
    return lax.broadcast_in_dim(rows, (rows.shape[0], width), [0])


def in_rows(columns: jax.Array, height: int) -> jax.Array:
    return lax.broadcast_in_dim(columns, (height, columns.shape[0]), [1])


def times_squares(x: jax.Array, roots: jax.Array) -> jax.Array:
    """Each row times a number's square, which may be less than float32 holds."""
    factors = in_columns(roots, x.shape[1])
    return x * factors * factors


def position(axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (C, C), dimension=axis, layout=TILE)


# What says how to interpret, from JAX 0.12 on.
interpreter: Any = getattr(plgpu, "InterpretGPUParams", None)


Body = Callable[..., None]


def launch(
    body: Body,
    name: str,
    deal: Deal,
    out_type: Any,
    scratch: dict[str, Any],
    arrays: Sequence[jax.Array | np.ndarray],
    *,
    warpgroups: int = WARPGROUPS,
    own_barriers: bool = False,
    rest: tuple[Body, dict[str, Any]] | None = None,
) -> Any:
    """The kernel's outputs. All of a block's warpgroups leave together: none while another still
    multiplies. `own_barriers`: Pallas puts none of a warpgroup's around loads and stores, so what a
    product reads may be stored again only behind a `commit_smem` or a `wait_smem_to_gmem` that
    follows the product. `rest`: body and scratch of a kernel that writes what this one leaves of
    the same outputs."""
    arrays = meshes.varying_with(tuple(arrays), tuple(arrays))
    interpreted = {"interpret": interpreter()} if device.interpreting() else {}
    params = plgpu.CompilerParams(
        approx_math=True,
        reduction_scratch_bytes=0,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        unsafe_no_auto_barriers=own_barriers,
    )
    of_mesh: Any = dict(
        grid=(deal.blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="group",
        kernel_name=f"linear_attention_{name}_mosaic",
    )

    def guarded(body: Body, *refs: Any, left: Any, **scratch: Any) -> None:
        body(*refs, **scratch)
        plgpu.barrier_arrive(left)
        plgpu.barrier_wait(left)

    def guard() -> Any:
        return {"left": plgpu.Barrier(num_arrivals=warpgroups)}

    def write_rest(body: Body, scratch: dict[str, Any], outputs: Any) -> Any:
        """`plgpu.kernel` takes no outputs that there are already."""

        def scoped(*refs: Any) -> None:
            inside = functools.partial(guarded, body, *refs)
            pl.run_scoped(inside, collective_axes="group", **scratch, **guard())

        kernel = pl.kernel(
            scoped,
            mesh=plgpu.Mesh(**of_mesh),
            compiler_params=params,
            name=of_mesh["kernel_name"],
            **interpreted,
        )
        return pl.run_state(lambda targets: kernel(*arrays, *targets))(outputs)

    with jax.enable_x64(False):  # rows are counted in 32 bits
        kernel = plgpu.kernel(
            functools.partial(guarded, body),
            out_type=meshes.varying_with(out_type, arrays),
            scratch_types={**scratch, **guard()},
            compiler_params=params,
            **of_mesh,
            **interpreted,
        )
        outputs = kernel(*arrays)
        if rest is not None:
            outputs = write_rest(*rest, tuple(outputs))
        # Which `plgpu.kernel` forgets.
        return meshes.varying_with(outputs, arrays)


group = functools.partial(lax.axis_index, "group")
