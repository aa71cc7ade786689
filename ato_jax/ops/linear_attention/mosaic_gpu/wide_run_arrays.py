"""The arrays of the passes in `wide_runs.py`, in global memory."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple


class Pass(enum.Enum):
    OUT = "wide_output"
    DQ = "wide_query_gradient"
    DV = "wide_value_gradient"
    DK = "wide_key_gradient"


class Beyond(NamedTuple):
    """The fields of `Arrays` that differ by side, for the other side of a run. A pass whose rows
    see both sides reads these, too."""

    states: Any
    vectors: Any
    limit: Any
    reads: Any
    reads_of_chunk: Any = None


class Arrays(NamedTuple):
    """A pass's inputs, in the order of its operands: x, y and p of its table; S and z or R and u as
    `wide_states` leaves them; q for DQ and k for DK; inverse and e of the rows of q; and v for DV,
    which is the x of DK, where pairs are weighed for a decay's gradient.

    Four are of `wide_factors.Factors`, where there are any: `sums`; `limit`, the first row that a
    row sees, or from the end the last one; what it reads of its run's state; and, for DQ, of its
    chunk's. `beyond` has those of the other side, where rows see both; and `undivided` then says
    which runs are of one document. In float16 `powers` [B, G, 3 or 5] float32 are those of
    `wide_powers.py`."""

    x: Any
    y: Any
    p: Any
    states: Any
    vectors: Any
    reader: Any = None
    inverse: Any = None
    e: Any = None
    held: Any = None
    sums: Any = None
    limit: Any = None
    reads: Any = None
    reads_of_chunk: Any = None
    powers: Any = None
    beyond: Beyond | None = None
    undivided: Any = None


class Left(NamedTuple):
    """The outputs of a pass. With a normaliser DQ writes `inverse` and `e`. With a causal decay per
    step DQ and DK write `flows`, the numbers of rows from which its gradient is made
    (`scans/flows.py`); with any other decay DQ and DV do, and where rows see both sides
    `flows_beyond`, too, while DV writes `within` and `seen_within` (`wide_run_flows.py`). In
    float16 DQ writes the largest magnitude in each row of phi(q) and of g."""

    found: Any
    inverse: Any = None
    e: Any = None
    flows: Any = None
    flows_beyond: Any = None
    within: Any = None
    seen_within: Any = None
    features: Any = None
    cotangents: Any = None
