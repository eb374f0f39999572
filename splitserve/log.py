"""Logging for all processes: one line a record, to stderr, with time, level, process name and a short logger name.

Nothing here configures anything on import; each process calls `setup` once.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

MOST_A_SECOND = 20
"""Requests told of at info in one second; an engine that dies with a thousand of them must not fill a disk."""


def setup(process: str, level: str = "info") -> None:
    """Send this process's records to stderr as `HH:MM:SS.mmm LEVEL process logger: message`."""
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(asctime)s.%(msecs)03d %(levelname).1s {process} %(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(line, "%H:%M:%S"))
    root = logging.getLogger("splitserve")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def get(name: str) -> logging.Logger:
    """The logger of a module: `get(__name__)`."""
    return logging.getLogger(name if name.startswith("splitserve") else f"splitserve.{name}")


class RequestLog:
    """One line for each request that has ended, so that its id is found: at debug if all was as usual, else at info.

    Not usual is what took longer than `slow_s`, and what the caller says did not end by itself. Beyond MOST_A_SECOND
    such lines are at debug too, and the next one at info says how many were.
    """

    def __init__(
        self, logger: logging.Logger, *, slow_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._slow_s = slow_s
        self._clock = clock
        self._second = 0.0
        self._num_told = 0
        self._num_held = 0

    def ended(self, text: Callable[[], str], *, seconds: float, usual: bool) -> None:
        """`text` makes the line, if there is to be one; a line end in it cannot begin another."""
        tells = not usual or seconds > self._slow_s
        level = logging.INFO if tells and self._may_tell() else logging.DEBUG
        if not self._logger.isEnabledFor(level):
            return
        line = text()
        if level == logging.INFO and self._num_held:
            line += f" (and {self._num_held} more requests, at level debug)"
            self._num_held = 0
        self._logger.log(level, "%s", line if line.isprintable() else ascii(line)[1:-1])

    def _may_tell(self) -> bool:
        now = self._clock()
        if now - self._second >= 1.0:
            self._second, self._num_told = now, 0
        self._num_told += 1
        if self._num_told > MOST_A_SECOND:
            self._num_held += 1
            return False
        return True
