"""How a kernel is divided among the devices of a mesh, by batch and heads.

Under `jax.jit` XLA divides its own operations among devices as their arrays lie, and for a kernel
it gathers all arrays on every device. `divided` tells it how to divide a kernel instead. Each axis
of each array has a letter, and these may be cut:

    B       the batch
    G, H    key/value heads and query heads. Head h of H belongs to head h // (H // G) of G, so a
            cut of H is first one of G, and where that has one head on each device, one of a group
    z, y    axes that `jax.vmap` adds

All other axes are whole on every device. Where a mesh axis has more devices than G has heads,
arrays of G are whole, too, and each device reads the head of its queries. An output that lacks a
cut axis is the same on all devices along it. The backward pass there counts its cotangent once, and
the gradient of an input that lacks a cut axis is summed over the devices along it.

In a process with one device, and inside `jax.shard_map`, nothing is divided, and the kernel runs as
it is. With several devices, JAX lowers no division for an `AbstractMesh` of automatic axes, and
`jax.export` does not serialize it: explicit axes and `jax.shard_map` have neither limit. Under
`jax.vmap` explicit axes have both where one of them cuts no letter: it may cut the mapped axis.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ato_jax import meshes

# The axes of one array: a letter for each. A "." has a size of its own.
Letters = str
VMAPPED = "zyxw"
device_count = jax.device_count


@dataclasses.dataclass(frozen=True)
class Cut:
    """The mesh axes that letters are cut along, and into how many parts in all.

    Where `shared`, arrays of G are whole on every device, which reads one head of them: G has as
    many parts as heads, along no axis. Where `spare`, mesh axes are left that cut no letter.
    """

    all_axes: tuple[tuple[str, tuple[str, ...]], ...]
    all_parts: tuple[tuple[str, int], ...]
    shared: bool = False
    spare: bool = False

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return dict(self.all_axes)

    @property
    def parts(self) -> dict[str, int]:
        return dict(self.all_parts)

    def spec(self, letters: Letters) -> PartitionSpec:
        return PartitionSpec(*(self.axes.get(letter) or None for letter in letters))

    def missing(self, letters: Letters) -> tuple[str, ...]:
        """The axes that B or H is cut along, and an array of these letters is not."""
        own = {axis for letter in letters for axis in self.axes.get(letter, ())}
        return tuple(axis for letter in "BH" for axis in self.axes[letter] if axis not in own)

    def start(self, letter: str, size: int) -> jax.Array:
        """The first of this device's `size` indices along a letter."""
        axes = self.axes[letter]
        return lax.axis_index(axes) * size if axes else jnp.int32(0)

    @property
    def members(self) -> int:
        """Devices that share a head of G."""
        return self.parts["H"] // self.parts["G"]

    def head(self) -> jax.Array:
        """The head of G that this device reads, where `shared`."""
        return lax.axis_index(self.axes["H"]) // self.members

    def once(self, array: jax.Array, letters: Letters) -> jax.Array:
        """An array that several devices have alike: 0 on all of them but one."""
        if self.shared and "G" in letters:
            return jnp.where(lax.axis_index(self.axes["H"]) % self.members == 0, array, 0)
        axes = self.missing(letters)
        return jnp.where(lax.axis_index(axes) == 0, array, 0) if axes else array

    def enter(self, array: jax.Array, letters: Letters, cotangent: bool) -> jax.Array:
        """A device's part of an array, as the kernel there reads it."""
        if self.shared and "G" in letters:
            array = lax.dynamic_slice_in_dim(array, self.head(), 1, axis=letters.index("G"))
        return self.once(array, letters) if cotangent else array

    def leave(self, array: jax.Array, letters: Letters, gradient: bool) -> jax.Array:
        """A result of the kernel on a device as its part of the whole result.

        A gradient is summed over the devices that have parts of it.
        """
        axes = self.missing(letters)
        spread = self.shared and "G" in letters
        if not axes or not (gradient or spread):
            return array
        if not gradient:
            array = self.once(array, letters)
        found = array.astype(jnp.float32)
        if spread:
            at = letters.index("G")
            shape = (*found.shape[:at], self.parts["G"], *found.shape[at + 1 :])
            found = lax.dynamic_update_slice_in_dim(
                jnp.zeros(shape, jnp.float32), found, self.head(), axis=at
            )
        return lax.psum(found, axes).astype(array.dtype)


def may_divide(arrays: Sequence[jax.Array]) -> bool:
    """Whether XLA may have several devices to divide a call among."""
    if device_count() == 1 or not any(isinstance(array, jax.core.Tracer) for array in arrays):
        return False
    # Inside jax.shard_map each device has its own part already.
    return not any(
        jax.typeof(array).manual_axis_type.varying or _manual(array) for array in arrays
    )


def _manual(array: jax.Array) -> bool:
    mesh = jax.typeof(array).sharding.mesh
    return not mesh.empty and bool(mesh.manual_axes)


def divided(
    whole: Callable[..., Any],
    part: Callable[..., Any],
    inputs: tuple[list[jax.Array], list[Letters]],
    outputs: Callable[[list[jax.ShapeDtypeStruct]], list[Letters]],
    cotangents: Sequence[bool] = (),
    cut: Cut | None = None,
) -> list[jax.Array]:
    """`whole(*arrays)`, and on several devices `part(cut, *arrays)` of each device's arrays.

    Args:
      whole: from all arrays to a list of arrays.
      part: the same from a `Cut` and a device's arrays to its part of the results.
      inputs: the arrays, and the letters of each.
      outputs: from the shapes of the results to the letters of each.
      cotangents: of a backward pass, which of the arrays are cotangents. The results are gradients.
      cut: how explicit axes of the mesh, which are automatic here, cut the arrays; None where XLA
        decides.
    """
    arrays, letters = inputs
    closed = jax.make_jaxpr(whole)(*arrays)
    count = len(arrays)
    # A custom partitioning has no constants: what `whole` captured becomes an argument.
    constants = [jnp.asarray(array) for array in closed.consts]
    of_results = tuple(outputs(closed.out_avals))
    marks = [*cotangents] or [False] * count

    def local(cut: Cut, *both: jax.Array) -> list[jax.Array]:
        entering = zip(both[:count], letters, marks, strict=True)
        found = part(cut, *(cut.enter(*one) for one in entering))
        return [
            cut.leave(array, one, bool(cotangents))
            for array, one in zip(found, of_results, strict=True)
        ]

    rule = _Rule(
        lambda *both: jax.core.eval_jaxpr(closed.jaxpr, both[count:], *both[:count]),
        local,
        (*letters, *("." * array.ndim for array in constants)),
        of_results,
    )
    function = rule.call(cut)
    found: list[jax.Array] = function(*arrays, *constants)
    return found


@dataclasses.dataclass(frozen=True)
class _Rule:
    whole: Callable[..., Any]
    part: Callable[..., Any]
    inputs: tuple[Letters, ...]
    outputs: tuple[Letters, ...]

    def call(self, cut: Cut | None) -> Callable[..., Any]:
        """The function of all arrays, which `jax.vmap` maps, too.

        An axis that `jax.vmap` adds may be explicitly sharded, and no type in here tells: where
        `cut` leaves mesh axes for it, XLA decides.
        """

        @jax.custom_batching.custom_vmap
        def run(*arrays: jax.Array) -> Any:
            return (self._partitioned() if cut is None else self._sharded(cut))(*arrays)

        @run.def_vmap
        def map_over(size: int, mapped: Any, *arrays: jax.Array) -> Any:
            in_axes = tuple(0 if one else None for one in mapped)
            used = set("".join((*self.inputs, *self.outputs)))
            letter = next(letter for letter in VMAPPED if letter not in used)
            rule = dataclasses.replace(
                self,
                whole=jax.vmap(self.whole, in_axes, axis_size=size),
                part=lambda cut, *arrays: jax.vmap(
                    functools.partial(self.part, cut), in_axes,
                    axis_size=size // cut.parts.get(letter, 1),
                )(*arrays),
                inputs=tuple(
                    letter + one if is_mapped else one
                    for one, is_mapped in zip(self.inputs, mapped, strict=True)
                ),
                outputs=tuple(letter + one for one in self.outputs),
            )  # fmt: skip
            found = rule.call(None if cut is None or cut.spare else cut)(*arrays)
            return found, jax.tree.map(lambda _: True, found)

        return run

    def _sharded(self, cut: Cut) -> Callable[..., Any]:
        return jax.shard_map(
            functools.partial(self.part, cut),
            in_specs=tuple(map(cut.spec, self.inputs)),
            out_specs=[*map(cut.spec, self.outputs)],
            check_vma=False,  # results that `Cut.missing` devices have alike
        )

    def _partitioned(self) -> Callable[..., Any]:
        function = custom_partitioning(lambda *arrays: self.whole(*arrays))

        def cut_of(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Cut:
            arrays = [*zip(operands, self.inputs, strict=True)]
            if results:
                arrays += zip(results, self.outputs, strict=True)

            def axes_of(letter: str) -> tuple[str, ...]:
                for array, letters in arrays:
                    if letter in letters:
                        if found := axes_along(mesh, array, letters.index(letter)):
                            return found
                return ()

            return cut_by(axes_of, sizes_of(arrays), dict(mesh.shape))

        def shardings(mesh: Any, cut: Cut, letters: Sequence[Letters]) -> list[NamedSharding]:
            return [NamedSharding(mesh, cut.spec(one)) for one in letters]

        def partition(mesh: Any, operands: Any, results: Any) -> Any:
            cut = cut_of(mesh, operands, results)

            def part(*arrays: jax.Array) -> Any:
                # XLA compiles it, perhaps where the caller has set a mesh of explicit axes.
                with meshes.nowhere():
                    return self.part(cut, *arrays)

            return (
                mesh,
                part,
                shardings(mesh, cut, self.outputs),
                tuple(shardings(mesh, cut, self.inputs)),
            )

        def of_results(mesh: Any, operands: Any, results: Any) -> Any:
            return shardings(mesh, cut_of(mesh, operands, ()), self.outputs)

        function.def_partition(
            partition,
            infer_sharding_from_operands=of_results,
            # A part of a mesh axis, which may cut G where H has more parts, has no name.
            decode_shardings=False,
            sharding_rule=lambda mesh, operands, results: self._shardy(mesh, operands),
        )
        return function

    def _shardy(self, mesh: Any, operands: Any) -> tuple[str, dict[str, Any]]:
        """The rule by which XLA carries shardings through the call.

        Where a mesh axis may cut H and not G, each has a factor of its own: XLA would cut G along a
        part of that axis.
        """
        sizes_of_letters = sizes_of([*zip(operands, self.inputs, strict=True)])
        few, many = sizes_of_letters["G"], sizes_of_letters["H"]
        apart = any(few % size and many % size == 0 for size in mesh.shape.values())
        whole: list[str] = []

        def named(letters: Letters) -> str:
            names = []
            for letter in letters:
                if letter == "H" and many > few:
                    names.append("h" if apart else "(g r)")
                elif letter in "BGH":
                    names.append("b" if letter == "B" else "g")
                elif letter in VMAPPED:
                    names.append(letter)
                else:
                    whole.append(f"u{len(whole)}")
                    names.append(whole[-1])
            return " ".join(names)

        sides = (", ".join(map(named, side)) for side in (self.inputs, self.outputs))
        rule = " -> ".join(sides)
        sizes = {"r": many // few} if "(g r)" in rule else {}
        if sizes and "g" not in rule.replace("(g r)", "").split():
            sizes["g"] = few
        return rule, {"need_replication_factors": tuple(whole), **sizes}


def cut_by(
    axes_of: Callable[[str], tuple[str, ...]], sizes: dict[str, int], mesh: dict[str, int]
) -> Cut:
    """The cut of letters of these sizes along the mesh axes that arrays have them along already.

    `mesh` has the size of each axis. An axis that does not cut evenly is left out.
    """
    found: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()

    def count(names: Sequence[str]) -> int:
        return math.prod(mesh[name] for name in names)

    def take(names: Sequence[str], size: int) -> tuple[str, ...]:
        """The first axes that cut `size` evenly and that no other letter has."""
        good: list[str] = []
        for name in names:
            if name in taken or size % count([*good, name]):
                break
            good.append(name)
        taken.update(good)
        return tuple(good)

    for letter in (*VMAPPED, "B"):
        found[letter] = take(axes_of(letter), sizes.get(letter, 1))
    few, many = sizes["G"], sizes["H"]
    names, shared = axes_of("H"), False
    of_heads = take(names or axes_of("G"), few)
    found |= {"G": of_heads, "H": of_heads}
    rest = [name for name in names if name not in of_heads]
    if rest and count(of_heads) == few:
        found["H"] += take(rest, many // few)
    elif rest and not taken & {*rest} and count(names) % few == 0 and many % count(names) == 0:
        found |= {"G": (), "H": tuple(names)}
        shared = True
    parts = {letter: count(axes) for letter, axes in found.items()}
    parts |= {"G": few} if shared else {}
    used = {axis for axes in found.values() for axis in axes}
    spare = any(size > 1 and name not in used for name, size in mesh.items())
    return Cut(tuple(found.items()), tuple(parts.items()), shared, spare)


def cut_by_types(
    mesh: Any, arrays: Sequence[jax.Array], letters: Callable[[], Sequence[Letters]]
) -> Cut | None:
    """The cut along the explicit axes of the arrays' mesh; None where there are none, and on a mesh
    of one device.
    """
    if not mesh.explicit_axes or mesh.manual_axes or mesh.size == 1:
        return None
    pairs = [*zip(arrays, letters(), strict=True)]

    def axes_of(letter: str) -> tuple[str, ...]:
        for array, one in pairs:
            names = meshes.partition(array)[one.index(letter)] if letter in one else None
            if names:
                return names if isinstance(names, tuple) else (names,)
        return ()

    return cut_by(axes_of, sizes_of(pairs), dict(mesh.shape))


def cut_of(inputs: Any, letters: Callable[[], Any]) -> Cut | None:
    """`cut_by_types` of a tree of arrays and that of their letters, on the mesh of their types."""
    mesh = meshes.of(inputs)
    if mesh is None:
        return None
    return cut_by_types(mesh, jax.tree.leaves(inputs), lambda: jax.tree.leaves(letters()))


def axes_along(mesh: Any, array: Any, at: int) -> tuple[str, ...]:
    """The mesh axes that cut one axis of an array, the slowest first; () where none does, or where
    they do not cut it evenly.
    """
    try:
        held = array.sharding.devices_indices_map(array.shape)
    except ValueError:  # it does not divide
        return ()
    starts = np.vectorize(lambda device: held[device][at].start or 0, otypes=[int])(mesh.devices)
    first = starts[(0,) * starts.ndim]
    steps: dict[str, int] = {}
    for number, name in enumerate(mesh.axis_names):
        line = np.moveaxis(starts, number, 0)[(slice(None), *(0,) * (starts.ndim - 1))]
        if len(line) > 1 and line[1] != first:
            steps[name] = int(line[1] - first)
    names = sorted(steps, key=lambda name: -steps[name])
    # The start of each device, if these axes cut the array and no other.
    grid = np.ix_(*(np.arange(size) * steps.get(name, 0) for name, size in mesh.shape.items()))
    count = math.prod(mesh.shape[name] for name in names)
    even = array.shape[at] % count == 0 and (first + sum(grid) == starts).all()
    return tuple(names) if even else ()


def laid_out(letters: Letters, layout: str) -> Letters:
    """Letters as with layout "bthd" in another layout, which swaps time and heads."""
    swaps = layout == "bhtd" and letters[1:2] in ("T", "S") and letters[2:3] in ("G", "H")
    return letters[0] + letters[2] + letters[1] + letters[3:] if swaps else letters


def sizes_of(arrays: Sequence[tuple[Any, Letters]]) -> dict[str, int]:
    """The sizes of the letters of arrays."""
    return {
        letter: size
        for array, letters in arrays
        for letter, size in zip(letters, array.shape, strict=True)
    }
