"""How many compiled programs stay in memory: all that is compiled by shape goes through here.

A program takes memory for good: on a CPU 0.5 to 7 MiB and 60 to 200 of the 65,530 memory mappings
that Linux grants a process, on a GPU its machine code. A process that meets ever new lengths would
end in a segmentation fault. So there is a limit, and the program that was not used for longest is
dropped for a new one; a call that needs it again compiles it again.

    ato_jax.program_limit(1000)         or, before the start, ATO_PROGRAM_LIMIT=1000

What a caller compiles, by `jax.jit` around an op of ours, belongs to the caller.
"""

from __future__ import annotations

import collections
import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from ato_jax import device

VARIABLE = "ATO_PROGRAM_LIMIT"
# By platform: a program for a CPU consists of many small mappings of memory.
DEFAULT_LIMITS = collections.defaultdict(lambda: 512, {"cpu": 128})
# Hashes of keys whose programs were dropped; a set of more is emptied.
MOST_REMEMBERED = 1 << 14

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Program:
    """What is compiled for one key. Only a `Programs` holds on to it.

    `used` is set by each use but the first. `known_as` are dictionaries in which it is a value as
    well, by their keys; it is removed from these when it is dropped.
    """

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.used = False
        self.is_dropped = False
        self.known_as: dict[Any, dict[Any, Any]] = {}

    def is_pinned(self) -> bool:
        """Whether it has to stay, beyond any limit."""
        return False


class Programs:
    """Programs by keys, up to the limit for each platform.

    The order is that of a clock: the oldest program is dropped, unless it was used since it was
    looked at last; then its mark is cleared, and it becomes the youngest. So a use costs no lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Any, Program] = {}
        self._orders: dict[str, collections.deque[Any]] = collections.defaultdict(collections.deque)
        self._dropped: set[int] = set()
        _everyone.add(self)

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: Any, make: Callable[[], Any]) -> Any:
        """The program of a key, which `make` makes where there is none."""
        program = self._found.get(key)
        if program is None:
            return self._add(key, make)
        program.used = True
        return program

    def _add(self, key: Any, make: Callable[[], Any]) -> Any:
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                return found
            again = hash(key) in self._dropped
            program = make()
            limit = _limit(program.platform)
            order = self._orders[program.platform]
            # Before it is added: where all others are in use, the new one would be dropped.
            self._trim(order, limit - 1)
            self._found[key] = program
            order.append(key)
        if again:
            _warn(limit)
        return program

    def also_known(self, program: Any, mapping: dict[Any, Any], key: Any, value: Any) -> None:
        """Puts a value into a dictionary, from which it is removed when the program is dropped."""
        with self._lock:
            if not program.is_dropped:
                program.known_as[key] = mapping
                mapping[key] = value

    def trim(self) -> None:
        """Drops what is beyond the limits."""
        with self._lock:
            for platform, order in self._orders.items():
                self._trim(order, _limit(platform))

    def clear(self) -> None:
        """Drops all."""
        with self._lock:
            for order in self._orders.values():
                while order:
                    self._drop(order.popleft())
            self._dropped.clear()

    def _trim(self, order: collections.deque[Any], limit: int) -> None:
        # Twice around: the first time clears marks.
        for _ in range(2 * len(order)):
            if len(order) <= limit:
                return
            key = order.popleft()
            program = self._found[key]
            if program.used or program.is_pinned():
                program.used = False
                order.append(key)
            else:
                self._drop(key)

    def _drop(self, key: Any) -> None:
        program = self._found.pop(key)
        program.is_dropped = True
        for other, mapping in program.known_as.items():
            mapping.pop(other, None)
        if len(self._dropped) >= MOST_REMEMBERED:
            self._dropped.clear()
        self._dropped.add(hash(key))


_everyone: weakref.WeakSet[Programs] = weakref.WeakSet()


def program_limit(limit: Any) -> None:
    """Sets how many compiled programs stay in memory, on each platform.

    The calls of ato_jax outside of `jax.jit`, and those of ato_torch, are counted apart. A program
    is a call with its options, shapes and dtypes, forward and backward. Beyond the limit the
    program that was not used for longest is dropped, and its memory is given back; a warning says
    once if it is needed again. Programs that were captured into a CUDA graph are never dropped.

    Args:
      limit: a number of at least 1; None for the one of the environment's ATO_PROGRAM_LIMIT, or
        else 128 on a CPU and 512 on a GPU.
    """
    global _chosen
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit must be None or an int of at least 1, got {limit!r}")
    _chosen = limit
    for each in list(_everyone):
        each.trim()


_chosen: int | None = None


def clear() -> None:
    """Drops all programs: what `jax.clear_caches` is to JAX's own."""
    for each in list(_everyone):
        each.clear()


def _limit(platform: str) -> int:
    if _chosen is not None:
        return _chosen
    text = os.environ.get(VARIABLE, "")
    if not text:
        return DEFAULT_LIMITS[platform]
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{VARIABLE} must be a number of at least 1, got {text!r}")
    return int(text)


_warned = False


def _warn(limit: int) -> None:
    """Says once that the limit costs time: to compile takes about a second."""
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"a program is compiled again that was dropped, since more than {limit} are in use: raise "
        f"the limit by ato_jax.program_limit or {VARIABLE}, or pad arrays to fewer lengths",
        RuntimeWarning,
        stacklevel=5,
    )


class _Jitted(Program):
    def __init__(self, platform: str, function: Callable[..., Any]) -> None:
        super().__init__(platform)
        self.call = jax.jit(function)


_jitted = Programs()


def jit(static: int = 0) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """`jax.jit`, the first `static` arguments static, whose programs are subject to the limit.

    JAX keeps what it compiled as long as the jitted function exists. So each set of static
    arguments, shapes and dtypes has a function of its own.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            options, arrays = arguments[:static], arguments[static:]
            leaves, tree = jax.tree.flatten(arrays)
            key = (function, options, tree, tuple([_kind(leaf) for leaf in leaves]))

            def make() -> _Jitted:
                platform = device.of_call(leaves).platform
                return _Jitted(platform, functools.partial(function, *options))

            return _jitted.find(key, make).call(*arrays)

        return call  # type: ignore[return-value]

    return decorate


def _kind(leaf: Any) -> Any:
    try:
        return leaf.shape, leaf.dtype
    except AttributeError:  # a number
        return type(leaf)
