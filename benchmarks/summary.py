"""What is said of many measured times: their mean, standard deviation and percentiles.

A percentile lies between the two samples around it, in proportion, as NumPy's does by default; the
standard deviation is that of a sample, over n - 1.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Spread:
    """Of seconds. p25 and p75 are the quartiles, p50 is the median."""

    count: int
    mean: float
    deviation: float
    p25: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float


def spread(samples: Sequence[float]) -> Spread:
    """Of two samples or more."""
    percentiles = statistics.quantiles(samples, n=100, method="inclusive")
    return Spread(
        count=len(samples),
        mean=statistics.fmean(samples),
        deviation=statistics.stdev(samples),
        # The first of them is p1.
        **{f"p{percent}": percentiles[percent - 1] for percent in (25, 50, 75, 90, 95, 99)},
    )
