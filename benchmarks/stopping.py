"""SIGTERM, as `timeout` and batch systems send it, stops a command as Ctrl-C does: what was
measured is kept, and the processes that were started are ended.

Python runs a signal's handler between two of its own instructions. A compiler or a kernel may keep
it from that for longer than whoever sent the signal waits, so after `GRACE_SECONDS` a thread ends
the program. Nothing is lost then either: a file of figures is replaced as a whole.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

from benchmarks import kept

# The exit status after Ctrl-C, as shells have it.
STOPPED = 130
GRACE_SECONDS = 8.0
# The descriptors are closed with the last of what refers to them.
_ends: list[socket.socket] = []


def listen() -> None:
    """From now on; in the main thread."""
    receiving, sending = socket.socketpair()
    sending.setblocking(False)
    _ends[:] = receiving, sending
    signal.signal(signal.SIGTERM, _stop)
    # Written to when the signal comes, whatever Python does.
    signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_after, args=(receiving,), daemon=True).start()


def _stop(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_after(receiving: socket.socket) -> None:
    while told := receiving.recv(1):
        if told[0] == signal.SIGTERM:
            time.sleep(GRACE_SECONDS)
            kept.unmark()
            os._exit(STOPPED)
