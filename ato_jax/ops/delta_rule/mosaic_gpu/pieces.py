"""Pieces of a sequence that are walked side by side, where there are too few heads for a card.

A piece takes the state that it begins with to the one that it ends with by an affine map, S M + E,
all of it transposed as the walks have it. A walk over the piece from 0 ends with E, and one over
keys alone (v = 0) from the identity with M. So three steps take the place of a walk: E and M of all
pieces but the last; the states that pieces begin with, which XLA forms from these in float32; and
the walk itself, over all pieces at once. The gradient of the state goes from piece to piece by M's
transpose, of all pieces but the first.

`walk_forward.py` and `walk_backward.py` take pieces so, and with a decay per channel
`channel_walk_forward.py` and `channel_walk_backward.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ato_jax.ops.delta_rule.mosaic_gpu import frame
from ato_jax.ops.delta_rule.mosaic_gpu.frame import HALF, C, Config
from ato_jax.ops.delta_rule.mosaic_gpu.walk import Course
from ato_jax.ops.delta_rule.spec import DeltaRuleSpec


def course_of(
    spec: DeltaRuleSpec, config: Config, leaves: tuple[str, ...], *, from_end: bool
) -> Course:
    """The course of a walk over all pieces of a sequence."""
    chunks = frame.chunks_of(spec)
    each = -(-chunks // config.pieces)
    return Course(from_end, leaves, -(-chunks // each), each * C)


def starts_forward(
    spec: DeltaRuleSpec,
    course: Course,
    start: jax.Array | None,
    walk_maps: Callable[[Course, jax.Array], jax.Array],
    *,
    keeps: bool,
) -> tuple[jax.Array | None, jax.Array | None]:
    """M of each piece, where there are several, [pieces, B, H, D, D]; and the states that pieces
    begin with.

    Args:
      start: the first piece's, [B, H, V, D]; None for 0.
      walk_maps: walks a course for maps from its first states to its last ones.
      keeps: whether a backward pass follows, for which alone the last piece's map is.
    """
    if course.pieces == 1:
        return None, None if start is None else start[None]
    count = course.pieces if keeps else course.pieces - 1
    course_of_maps = dataclasses.replace(course, leaves=(), pieces=count, maps=True)
    found = walk_maps(course_of_maps, starts_of_maps(spec, course_of_maps))
    maps, ends = found[..., spec.V :, :], found[..., : spec.V, :]
    return maps, passed_on(start, maps, ends[: course.pieces - 1])


def starts_backward(
    course: Course,
    start: jax.Array | None,
    maps: jax.Array | None,
    walk_later: Callable[[Course], jax.Array],
) -> jax.Array | None:
    """The gradients of the states that pieces end with.

    Args:
      start: the last piece's, [B, H, V, D]; None for 0.
      maps: those of `starts_forward`.
      walk_later: walks all pieces but the first from 0 to their last gradients.
    """
    if maps is None:
        return None if start is None else start[None]
    ends = walk_later(dataclasses.replace(course, first=1, pieces=course.pieces - 1))
    back = jnp.swapaxes(maps[1:], 3, 4)
    # The last piece comes first.
    return passed_on(start, back[::-1], ends[::-1])[::-1]


def slices_of_maps(spec: DeltaRuleSpec) -> int:
    """How many blocks of 64 columns, of v's and of the identity, a block walks."""
    return 1 if (spec.V + spec.D) // HALF % 2 else 2


def starts_of_maps(spec: DeltaRuleSpec, course: Course) -> jax.Array:
    """[pieces, B, H, V + D, D]: 0 for v's columns, and the identity."""
    own = jnp.eye(course.columns(spec), spec.D, -spec.V, jnp.float32)
    return jnp.broadcast_to(own, (course.pieces, spec.B, spec.H, *own.shape))


def passed_on(start: jax.Array | None, maps: jax.Array, ends: jax.Array) -> jax.Array:
    """The states that pieces begin with, one after the other: [pieces, B, H, V, D].

    Args:
      start: that of the first piece, [B, H, V, D]; None for 0.
      maps: M of each piece, the last of which is not asked for, [.., B, H, D, D].
      ends: E of each piece but the last, [pieces - 1, B, H, V, D].
    """
    states = [jnp.zeros_like(ends[0]) if start is None else start]
    for piece in range(len(ends)):
        state = ends[piece]
        if piece > 0 or start is not None:
            state += jnp.matmul(states[-1], maps[piece], precision="highest")
        states.append(state)
    return jnp.stack(states)
