"""Pieces of a sequence that are walked side by side, where there are too few heads for a card.

A piece takes the state that it begins with to the one that it ends with by an affine map, S M + E,
all of it transposed as the walks have it. A walk over the piece from 0 ends with E, and one over
keys alone (v = 0) from the identity with M. So three steps take the place of a walk: E and M of all
pieces but the last; the states that pieces begin with, which XLA forms from these in float32; and
the walk itself, over all pieces at once. The gradient of the state goes from piece to piece by M's
transpose, of all pieces but the first.
"""

from __future__ import annotations

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
