"""A limit on compiled programs in memory. Everything that is compiled by shape goes through here.

JAX never frees a compiled program by itself. On a CPU it takes 0.5 to 7 MiB and 60 to 200 of the
65,530 memory mappings that Linux grants a process, on a GPU its machine code. A process that meets
ever new lengths would end in a segmentation fault. Beyond the limit, the program that was unused
for longest is dropped; a call that needs it again compiles it again.

    ato_jax.program_limit(1000)         or, before the start, ATO_PROGRAM_LIMIT=1000

A program that the caller compiles, by `jax.jit` around an op of this library, belongs to the caller
and does not count.
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
# By platform. A CPU's is lower, since a program for it takes many memory mappings.
DEFAULT_LIMITS = collections.defaultdict(lambda: 512, {"cpu": 128})
# How many hashes of dropped programs' keys are kept, before the set is emptied.
MOST_REMEMBERED = 1 << 14

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Program:
    """The program of one key. Only a `Programs` keeps a reference to it.

    Attributes:
      platform: the platform whose limit it counts for.
      used: whether it was used again since it was made, or since its mark was cleared.
      is_dropped: whether it was dropped.
      known_as: other dictionaries that have a value for it, each by the key there. The values are
        removed when the program is dropped.
    """

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.used = False
        self.is_dropped = False
        self.known_as: dict[Any, dict[Any, Any]] = {}

    def is_pinned(self) -> bool:
        """Whether it must stay in memory whatever the limit is."""
        return False


class Programs:
    """Programs by keys, up to the limit of each platform.

    Which one is dropped follows the clock algorithm: the oldest, unless its `used` mark is set;
    then the mark is cleared and the program becomes the youngest. So a use takes no lock.
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
            # Before the new one is added, or it would be dropped where all others were used.
            self._trim(order, limit - 1)
            self._found[key] = program
            order.append(key)
        if again:
            _warn(limit)
        return program

    def also_known(self, program: Any, mapping: dict[Any, Any], key: Any, value: Any) -> None:
        """Puts a value into a dictionary, until the program is dropped."""
        with self._lock:
            if not program.is_dropped:
                program.known_as[key] = mapping
                mapping[key] = value

    def trim(self) -> None:
        """Drops programs until each platform is within its limit."""
        with self._lock:
            for platform, order in self._orders.items():
                self._trim(order, _limit(platform))

    def clear(self) -> None:
        """Drops all programs."""
        with self._lock:
            for order in self._orders.values():
                while order:
                    self._drop(order.popleft())
            self._dropped.clear()

    def _trim(self, order: collections.deque[Any], limit: int) -> None:
        # Two rounds, since the first may only clear marks.
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


def program_limit(limit: int | None) -> None:
    """Sets how many compiled programs stay in memory, on each platform.

    A program is a call with its options, shapes and dtypes, forward and backward. The calls of
    ato_jax outside of `jax.jit` and those of ato_torch are counted apart. Beyond the limit the
    least recently used program is dropped and its memory is freed. If it is needed again, it is
    compiled again, and a warning says so once. Programs captured into a CUDA graph are kept.

    Args:
      limit: At least 1. None for the value of the environment variable ATO_PROGRAM_LIMIT, or, where
        that is not set, 128 on a CPU and 512 on a GPU.

    Raises:
      ValueError: `limit` is neither None nor an int of at least 1.

    Example:
      >>> import ato_jax
      >>> ato_jax.program_limit(1000)
      >>> ato_jax.program_limit(None)
    """
    global _chosen
    given: object = limit  # of any type, whatever the annotation says
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise ValueError(f"limit must be None or an int of at least 1, got {given!r}")
    _chosen = limit
    for each in list(_everyone):
        each.trim()


_chosen: int | None = None


def clear() -> None:
    """Drops all programs, as `jax.clear_caches` drops JAX's own."""
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
    """Warns once that the limit costs time: compiling takes about a second."""
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


def promoting_ranks(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function without the caller's `jax_numpy_rank_promotion="raise"`, nor the caller's
    `jax_numpy_dtype_promotion="strict"`, which are for the caller's own code. Everything that goes
    through `jit` is traced so.
    """

    @functools.wraps(function)
    def call(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **options)

    return call


_jitted = Programs()


def jit(static: int = 0) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """`jax.jit` with the first `static` arguments static, and the limit on its programs.

    JAX keeps a compiled program as long as the jitted function exists. So each combination of
    static arguments, shapes and dtypes has a jitted function of its own.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        traced = promoting_ranks(function)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            options, arrays = arguments[:static], arguments[static:]
            leaves, tree = jax.tree.flatten(arrays)
            key = (function, options, tree, tuple([_kind(leaf) for leaf in leaves]))

            def make() -> _Jitted:
                platform = device.of_call(leaves).platform
                return _Jitted(platform, functools.partial(traced, *options))

            return _jitted.find(key, make).call(*arrays)

        return call  # type: ignore[return-value]

    return decorate


def _kind(leaf: Any) -> Any:
    try:
        return leaf.shape, leaf.dtype
    except AttributeError:  # a number
        return type(leaf)
