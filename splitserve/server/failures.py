"""A log line for requests that fail for the server's own reasons (5xx): id, code, message, and whence state was due.

Bounded: the 1st, 10th, 100th ... failure of each code. What is the client's fault is told to the client alone.
"""

from __future__ import annotations

from collections import Counter

from splitserve import log
from splitserve.errors import SplitserveError

from .job import Job

_log = log.get(__name__)


class FailureLog:
    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def failed(self, job: Job, error: SplitserveError) -> None:
        """A request that had been accepted."""
        room = job.rooms[0] if job.rooms and job.half == "decode" else None
        self._say(job.rids[0], error, f"; rendezvous {room.host}:{room.port}" if room else "")

    def refused(self, endpoint: str, error: SplitserveError) -> None:
        """A request that was turned away before it had an id."""
        self._say(f"(refused by {endpoint})", error, "")

    def _say(self, rid: str, error: SplitserveError, where: str) -> None:
        if error.status < 500:
            return
        self._counts[error.code] += 1
        count = self._counts[error.code]
        if str(count).strip("0") == "1":  # a power of ten
            text = "request %s failed: %s: %s%s (failure %d of this code)"
            _log.warning(text, rid, error.code, error.message, where, count)
