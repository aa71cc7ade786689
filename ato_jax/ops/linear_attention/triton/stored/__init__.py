"""Nothing is carried: a state is stored for every run of rows, and each program has one tile.

Each program takes a tile of C queries, or of keys, reads the state ahead of its run (and both ways
the one behind it), and goes through those tiles of the run that it sees. So all programs are alike,
small and independent. Against `carried.py` this writes and reads a state for every run, which pays
where a state would fill the registers. Both ways a tile is a whole run. No program holds a state: a
state larger than the shared memory is summed in blocks, and multiplied part after part.

Backward, a pass of its own computes the sums dS and dz over a run's queries (`states.py`).
"""

from ato_jax.ops.linear_attention.triton.stored.key_gradient import key_gradient as key_gradient
from ato_jax.ops.linear_attention.triton.stored.output import output as output
from ato_jax.ops.linear_attention.triton.stored.query_gradient import (
    query_gradient as query_gradient,
)
