"""Inputs and outputs in global memory of the four passes of `wide_runs.py`, whose docstring defines
x, y, p and T. `wide_heads.py` fills `Arrays` and reads `Left`."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple


class Pass(enum.Enum):
    OUT = "wide_output"
    DQ = "wide_query_gradient"
    DV = "wide_value_gradient"
    DK = "wide_key_gradient"


class Beyond(NamedTuple):
    """The fields of `Arrays` of the other side of a run, for passes whose rows see both sides. With
    `Arrays.documents` they are those of the run's last document, with the same states."""

    states: Any
    vectors: Any
    limit: Any
    reads: Any
    reads_of_chunk: Any = None


class Arrays(NamedTuple):
    """The inputs of a pass, in the order of the kernel's operands."""

    x: Any
    y: Any
    p: Any
    states: Any  # S or R of each run, as `wide_states` returns them
    vectors: Any  # z or u of each chunk, as `wide_states` returns them
    reader: Any = None  # q in DQ, k in DK: the rows that found is finished with
    inverse: Any = None  # of the rows of q
    e: Any = None  # of the rows of q
    held: Any = None  # v in DV, where the pass sums over pairs for a decay's gradient
    # The next four are fields of `wide_factors.Factors`; None without a decay and segments.
    sums: Any = None  # L of each row
    limit: Any = None  # the first row that a row sees; in DV and DK the last one
    reads: Any = None  # the factor of what a row reads of its run's state
    reads_of_chunk: Any = None  # in DQ, the factor of what a row reads of its chunk's z
    powers: Any = None  # [B, G, 3 or 5] float32 in float16 (`wide_powers.py`)
    beyond: Beyond | None = None
    documents: Any = None  # `document_states.Documents`, where these are what each row sees


class Left(NamedTuple):
    """The outputs of a pass: found, and a float32 number of each row in the other arrays.

    With a causal decay per step DQ and DK write `flows`, from which XLA computes the decay's
    gradient (`scans/flows.py`). With any other decay DQ and DV write it, and the sums over pairs
    that `wide_run_flows.py` defines."""

    found: Any
    inverse: Any = None  # by DQ, with a normaliser
    e: Any = None  # by DQ, with a normaliser
    flows: Any = None
    flows_beyond: Any = None  # where rows see both sides
    within: Any = None  # by DV
    seen_within: Any = None  # by DV
    features: Any = None  # by DQ in float16: the largest magnitude of phi(q_i)
    cotangents: Any = None  # by DQ in float16: the largest magnitude of g_i
