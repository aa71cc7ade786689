"""How far a long command is: one line on stderr, each in place of the last, with a bar and the time
that is left; nothing where stderr is a file.
"""

from __future__ import annotations

import math
import sys
import time

WIDTH = 24
# The bar's parts; what is left is estimated from these that are done.
_total, _done, _start, _end = 0, 0, 0.0, math.inf
_shown = ""


def start(total: int, end: float = math.inf) -> None:
    """Begins a bar of so many parts, at `end` of the monotonic clock at the latest."""
    global _total, _done, _start, _end
    _total, _done, _start, _end = total, 0, time.monotonic(), end


def step() -> None:
    """One part is done, and its line is cleared."""
    global _done
    _done += 1
    show("")


def left() -> float | None:
    """Seconds, from what the parts so far took, and up to the end at most; None where neither is
    known.
    """
    now = time.monotonic()
    by_parts = (now - _start) / _done * (_total - _done) if _done else math.inf
    known = max(0.0, min(by_parts, _end - now))
    return known if _total and known < math.inf else None


def duration(seconds: float) -> str:
    """90 s, 12 min or 1.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def line(share: float, seconds: float | None, what: str) -> str:
    bar = ("#" * round(min(1.0, share) * WIDTH)).ljust(WIDTH, ".")
    return f"[{bar}] {f'{duration(seconds)} left, ' if seconds is not None else ''}{what}"


def show(what: str) -> None:
    """What runs now, behind the bar if there is one; "" clears the line."""
    global _shown
    _shown = what
    if sys.stderr.isatty():
        told = line(_done / _total, left(), what) if what and _total else what
        sys.stderr.write(f"\r\x1b[K{told}")
        sys.stderr.flush()


def say(line: str) -> None:
    """A line on stdout, below which the bar stands again."""
    shown = _shown
    show("")
    print(line, flush=True)
    show(shown)
