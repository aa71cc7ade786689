"""Launches: a program over global arrays, on a Hopper card or interpreted.

A `Program` says what a block runs: its storage, and its roles with their parts. `launch` also takes
a `Flat` body, whose barriers are counted by hand.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental import pallas as pl

from ato_jax import device, meshes
from ato_jax.mosaic import rings, tiles
from ato_jax.mosaic.rings import Signal, Storage
from ato_jax.mosaic.roles import Role, Roles, group

# What says how to interpret, from JAX 0.12 on.
interpreter: Any = getattr(plgpu, "InterpretGPUParams", None)
# The threads that XLA has to have where it interprets a block's warpgroups.
THREADS_TO_INTERPRET = 32
CAPABILITY = (9, 0)

Body = Callable[..., None]


def refusal_of_device(device: device.Device, interpreted: bool) -> str | None:
    """Why a backend that is made of this kit cannot run here."""
    if interpreted:
        if interpreter is None:
            return "JAX interprets such kernels from 0.12 on"
        if int(os.environ.get("NPROC") or os.cpu_count() or 1) < THREADS_TO_INTERPRET:
            return (
                "its warpgroups are threads of XLA's where they are interpreted, which wait for "
                f"one another: set NPROC={THREADS_TO_INTERPRET} in the environment "
                "before JAX starts"
            )
        return None
    if device.capability != CAPABILITY:
        return f"needs a Hopper GPU, and this one is {device.name}"
    return None


class Grid(Protocol):
    """How many blocks a launch has; `Deal` is one."""

    @property
    def blocks(self) -> int: ...


class Runs(Protocol):
    """The code of one block, called with references to global arrays and to its scratch memory."""

    @property
    def warpgroups(self) -> int: ...
    def scratch(self) -> dict[str, Any]:
        """What to allocate; it lies in the order of its names."""

    def run(self, *refs: Any, **scratch: Any) -> None: ...


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel made of roles: the code of each role, over one storage.

    Attributes:
      roles: in the order of their warpgroups' numbers.
      parts: each role with its part, in the order in which they are traced.
      bind: a function that makes the argument of every part from the references to inputs and
        outputs and from the storage. A part of an unrolled role is also given its warpgroup's
        number within the role.
      reads_number_once: a warpgroup's number is read once, ahead of all roles, and each part is
        given it behind what `bind` makes. Otherwise a part that needs it calls `roles.group`.
    """

    roles: Roles
    storage: Storage
    parts: Sequence[tuple[Role, Callable[..., None]]]
    bind: Callable[[Sequence[Any], Any], Any]
    reads_number_once: bool = False

    @property
    def warpgroups(self) -> int:
        return self.roles.warpgroups

    def _types(self) -> dict[str, Any]:
        return self.storage.types(leave=Signal(tuple(self.roles)))

    def scratch(self) -> dict[str, Any]:
        return {f"_{n:03}": own for n, own in enumerate(self._types().values())}

    def run(self, *refs: Any, **scratch: Any) -> None:
        types, refs_of = self._types(), (scratch[name] for name in sorted(scratch))
        own = {
            name: tiles.bound(type, ref)
            for (name, type), ref in zip(types.items(), refs_of, strict=True)
        }
        storage = self.storage.bound(own)
        number = group() if self.reads_number_once else None
        kernel = self.bind(refs, storage)
        arguments = (kernel,) if number is None else (kernel, number)
        with rings.checked_slots():
            for role, part in self.parts:
                self.roles.play(role, functools.partial(part, *arguments), number)
        storage.check()
        _leave(own["leave"])


@dataclasses.dataclass(frozen=True)
class Flat:
    """A body with its own scratch."""

    body: Body
    types: dict[str, Any]
    warpgroups: int

    def scratch(self) -> dict[str, Any]:
        return {**self.types, "left": plgpu.Barrier(num_arrivals=self.warpgroups)}

    def run(self, *refs: Any, left: Any, **scratch: Any) -> None:
        own = {name: tiles.bound(self.types[name], ref) for name, ref in scratch.items()}
        self.body(*refs, **own)
        _leave(left)


def _leave(barrier: Any) -> None:
    """All warpgroups of a block end together, none while another one still multiplies."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def launch(
    name: str,
    program: Runs,
    deal: Grid,
    out_type: Any,
    arrays: Sequence[jax.Array | np.ndarray],
    *,
    own_barriers: bool = False,
    approximates: bool = True,
    rest: Runs | None = None,
) -> Any:
    """The kernel's outputs.

    Args:
      own_barriers: Pallas puts none of a warpgroup's barriers around loads and stores, so what a
        product reads may be stored again only behind a `commit_smem` or a `wait_smem_to_gmem` that
        follows the product.
      approximates: whether tanh, sine and others are the hardware's, with 11 or more bits.
      rest: a second program, launched behind `program`, which writes those parts of the same
        outputs that `program` leaves out.
    """
    for place, array in enumerate(arrays):
        if array.dtype.itemsize > 4:
            raise TypeError(f"{name}: input {place} is {array.dtype}; kernels have 32 bits at most")
    arrays = meshes.varying_with(tuple(arrays), tuple(arrays))
    interpreted = {"interpret": interpreter()} if device.interpreting() else {}
    params = plgpu.CompilerParams(
        approx_math=approximates,
        reduction_scratch_bytes=0,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        unsafe_no_auto_barriers=own_barriers,
    )
    of_mesh: Any = dict(
        grid=(deal.blocks,),
        grid_names=("block",),
        num_threads=program.warpgroups,
        thread_name="group",
        kernel_name=name,
    )

    def write_rest(rest: Runs, outputs: Any) -> Any:
        """`plgpu.kernel` takes no outputs that there are already."""

        def scoped(*refs: Any) -> None:
            inside = functools.partial(rest.run, *refs)
            pl.run_scoped(inside, collective_axes="group", **rest.scratch())

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
            program.run,
            out_type=meshes.varying_with(out_type, arrays),
            scratch_types=program.scratch(),
            compiler_params=params,
            **of_mesh,
            **interpreted,
        )
        outputs = kernel(*arrays)
        if rest is not None:
            outputs = write_rest(rest, tuple(outputs))
        # Which `plgpu.kernel` forgets.
        return meshes.varying_with(outputs, arrays)
