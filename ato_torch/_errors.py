"""Why the kernels of a call cannot be launched from PyTorch directly, as exceptions."""

from __future__ import annotations


class ClosedError(Exception):
    """A function's kernels cannot be launched directly: the message gives the reason."""

    is_captured = False  # as in `Plan`: no CUDA graph holds the launches of a function without one


class NoMemoryError(ClosedError):
    """There was no memory to try the launches; a later call tries again."""


class NotMeantError(ClosedError):
    """Direct launches are off, or there is nothing to launch: no warning is due."""


class NotReadError(Exception):
    """No kernel reads the 8 bits of a call on float8 tensors, which have to be widened."""
