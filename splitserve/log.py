"""Logging for all processes: one line a record, to stderr, with time, level, process name and a short logger name.

Nothing here configures anything on import; each process calls `setup` once.
"""

from __future__ import annotations

import logging
import sys


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
